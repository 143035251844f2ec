"""How gpucount, gpudist and gputrace turn points, filters, expressions and formats of a command line into device programs."""

"""What gpucount, gpudist and gputrace make of a command line: points, filters, expressions and formats become device programs."""

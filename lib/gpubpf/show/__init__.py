"""The command line and the output of tools: options, results, tables, histograms, pictures, traces."""

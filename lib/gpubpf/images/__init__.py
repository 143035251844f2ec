"""Device code: where it lies in files and processes, how it is instrumented and assembled."""

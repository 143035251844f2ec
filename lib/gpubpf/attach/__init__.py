"""Load the agent into a running process, and into each process that begins to use CUDA."""

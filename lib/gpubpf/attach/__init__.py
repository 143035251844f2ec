"""Load the agent into a running process, and into each process that starts to use CUDA."""

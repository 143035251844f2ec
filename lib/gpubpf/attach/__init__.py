"""The agent in a process that runs already, and in each process that begins to use CUDA."""

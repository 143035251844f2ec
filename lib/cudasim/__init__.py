"""The embedded CUDA device: a software GPU that executes PTX on the CPU."""

"""The embedded AMD device: a software GPU under AMD's own HIP runtime and ROCr."""

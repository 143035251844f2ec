"""eBPF programs inside GPU kernels and in the Linux kernel at once, on unmodified programs."""

__version__ = "0.1.0"

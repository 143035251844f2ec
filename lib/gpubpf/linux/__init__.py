"""Interfaces of the Linux kernel: BTF type information, uprobes at library functions, host programs."""

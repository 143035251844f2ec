"""Interfaces of the Linux kernel: bpf(2), BTF type information, uprobes at library functions, host programs."""

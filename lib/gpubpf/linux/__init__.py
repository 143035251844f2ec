"""What the Linux kernel offers: bpf(2), type information, probes at functions of libraries."""

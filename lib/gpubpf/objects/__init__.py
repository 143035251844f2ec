"""Existing eBPF object files, made by `clang -target bpf -g`, as a second source of programs and maps."""

"""memtrace: memory accesses, the bytes that kernels touch, and allocations."""

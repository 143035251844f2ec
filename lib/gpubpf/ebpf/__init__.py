"""eBPF programs as values: bytecode, maps, headers and helpers, and the compiler from C text."""

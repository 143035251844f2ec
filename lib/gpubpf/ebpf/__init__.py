"""eBPF programs as values: bytecode, maps, headers, helpers; C text compiled to them."""

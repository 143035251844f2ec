"""Other people's objects: ELF files that `clang -target bpf -g` made, as a second source of programs and maps."""

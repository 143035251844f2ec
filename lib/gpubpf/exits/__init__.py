"""kernelretsnoop: when threads, warps and blocks leave a kernel."""

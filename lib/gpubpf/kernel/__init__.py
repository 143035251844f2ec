"""System calls of the Linux kernel, for this process: bpf(2), capabilities, seccomp, and calls that Python does not have."""

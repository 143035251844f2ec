"""Injection of device programs into copies of kernels in PTX. `inject` is the entry; `plan`, `body` and `sidecar` are its stages."""

"""The GPUs of this machine: what their drivers report of them."""

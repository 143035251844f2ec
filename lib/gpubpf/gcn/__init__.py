"""Instruments AMD GPU code objects: kernels (code_object.py), instructions (comgr.py, kernel_code.py), probes (inject.py, work.py)."""

# The `bytecode.DEVICE_POINTS` that AMD GPU kernels support.
POINTS = (
    "entry",
    "exit",
    "block_begin",
    "block_end",
    "barrier_arrive",
    "barrier_leave",
    "basic_block",
    "access",
)

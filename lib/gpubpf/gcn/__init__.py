"""Code objects of AMD GPUs: kernels (code_object.py), their instructions (comgr.py, kernel_code.py), probes (inject.py, work.py)."""

# Of `bytecode.DEVICE_POINTS`, those that kernels of AMD GPUs have.
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

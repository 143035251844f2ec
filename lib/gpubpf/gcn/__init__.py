"""Code objects of AMD GPUs: kernels (code_object.py), their instructions (comgr.py, kernel_code.py), probes (inject.py, work.py)."""

POINTS = ("entry", "exit", "access")  # of `bytecode.DEVICE_POINTS`, those that kernels of AMD GPUs have

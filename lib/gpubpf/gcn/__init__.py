"""Code objects of AMD GPUs: their kernels (code_object.py), their instructions (comgr.py), and probes in them (inject.py)."""

POINTS = ("exit",)  # of `bytecode.DEVICE_POINTS`, those that kernels of AMD GPUs have

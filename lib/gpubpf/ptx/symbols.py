"""Names in PTX that the injector adds, and the names of CUDA's device runtime.

This module imports nothing, so that the agent's definitions can use it without loading the PTX model.
"""

PREFIX = "gpubpf"
LAUNCH = "gpubpf_launch"  # the hidden parameter: the launch block
TABLE = "gpubpf_variables"  # addresses of the program's variables, filled in when the copy is loaded
GRIDS = "gpubpf_grids"  # an entry of that table: the address of a counter of the grids that kernels launched
LIMITED = "$gpubpf_limited"  # suffix of the name of a copy that is limited to fewer registers
FUNCTION = "gpubpf_program"  # prefix of the names of functions that hold programs
DEVICE_RUNTIME = r"(?:__cudaCDP2|cuda)[A-Z]\w*"  # a pattern: the functions of CUDA's device runtime
LAUNCHED = "$gpubpf_launched"  # suffix of the name of a copy that other kernels launch (device_launches.py)


def original_name(copy: str) -> str:
    """Return the name of the original kernel, given the name of its copy in a sidecar."""
    return copy.removesuffix(LIMITED).removesuffix(LAUNCHED)

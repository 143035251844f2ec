"""Names in PTX: of what the injector adds, and of CUDA's device runtime. This module imports nothing, so that the agent's definitions
can use it, and what needs no PTX model loads none."""

PREFIX = "gpubpf"
LAUNCH = "gpubpf_launch"  # the hidden parameter: the launch block
TABLE = "gpubpf_variables"  # addresses of the program's variables, filled in when the copy is loaded
GRIDS = "gpubpf_grids"  # in that table: the address of the number of grids that kernels launched
LIMITED = "$gpubpf_limited"  # suffix of the name of a copy that is limited to fewer registers
FUNCTION = "gpubpf_program"  # what begins the names of functions that hold programs
DEVICE_RUNTIME = r"(?:__cudaCDP2|cuda)[A-Z]\w*"  # a pattern: the functions of CUDA's device runtime
LAUNCHED = "$gpubpf_launched"  # suffix of the name of a copy that other kernels launch (device_launches.py)


def original_name(copy: str) -> str:
    """Return the name of the kernel that a copy in a sidecar was made of."""
    return copy.removesuffix(LIMITED).removesuffix(LAUNCHED)

"""Imported before cuda.core or Numba: they find no nvJitLink, as where it is not installed, and let the driver link."""

import cuda.pathfinder

_load = cuda.pathfinder.load_nvidia_dynamic_lib


def _without(name: str):
    if name == "nvJitLink":
        raise cuda.pathfinder.DynamicLibNotFoundError("left out")
    return _load(name)


cuda.pathfinder.load_nvidia_dynamic_lib = _without

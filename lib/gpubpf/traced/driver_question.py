"""Ask NVIDIA's driver for its GPUs. This is a separate program, which `device.question` runs in a child process.

    python3 -I -S driver_question.py        the first GPU, as a program would find it
    python3 -I driver_question.py details   every GPU and the versions; through cuda-python (cuda.bindings) where that is installed

It prints a JSON object, or exits with a line about the call that failed. It imports nothing of gpubpf.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from typing import Any

_COMPUTE_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_TEXT = 256  # bytes of a name


def main(details: bool) -> None:
    """Print the driver's answers. Raises SystemExit with a line for the user."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise SystemExit(f"the driver library cannot be loaded ({error})") from None
    found = None
    if details:
        with contextlib.suppress(ImportError, RuntimeError):  # RuntimeError: it does not know this driver
            found = _through_bindings()
    found = found or _through_library(driver, details)
    if details:
        found |= _management()
    print(json.dumps(found))


def _through_library(driver: ctypes.CDLL, details: bool) -> dict[str, Any]:
    def must(name: str, *arguments: Any) -> None:
        if code := getattr(driver, name)(*arguments):
            text = ctypes.c_char_p()
            driver.cuGetErrorName(code, ctypes.byref(text))
            raise SystemExit(f"{name} returns {(text.value or b'an unknown error').decode()} ({code})")

    count, version = ctypes.c_int(1), ctypes.c_int()
    must("cuInit", 0)
    if details:
        must("cuDriverGetVersion", ctypes.byref(version))
        must("cuDeviceGetCount", ctypes.byref(count))
    gpus = []
    for index in range(max(count.value, 1)):  # without a GPU, cuDeviceGet returns the error
        number, name = ctypes.c_int(), ctypes.create_string_buffer(_TEXT)
        must("cuDeviceGet", ctypes.byref(number), index)
        must("cuDeviceGetName", name, _TEXT, number)
        capability = []
        for attribute in _COMPUTE_CAPABILITY:
            value = ctypes.c_int()
            must("cuDeviceGetAttribute", ctypes.byref(value), attribute, number)
            capability.append(value.value)
        gpus.append({"name": name.value.decode(errors="replace"), "cc": capability})
    return {"through": "libcuda.so.1", "version": version.value, "gpus": gpus}


def _through_bindings() -> dict[str, Any]:
    """Return the driver's answers about all GPUs, through cuda-python. Raises ImportError."""
    from cuda.bindings import driver

    def must(name: str, *arguments: Any) -> Any:
        code, *values = getattr(driver, name)(*arguments)
        if int(code):
            raise SystemExit(f"{name} returns {code.name} ({int(code)})")
        return values[0] if values else None

    must("cuInit", 0)
    gpus = []
    for index in range(max(must("cuDeviceGetCount"), 1)):
        number = must("cuDeviceGet", index)
        name = must("cuDeviceGetName", _TEXT, number).split(b"\0")[0].decode(errors="replace")
        capability = [
            must("cuDeviceGetAttribute", driver.CUdevice_attribute(attribute), number)
            for attribute in _COMPUTE_CAPABILITY
        ]
        gpus.append({"name": name, "cc": capability})
    return {"through": "cuda.bindings", "version": must("cuDriverGetVersion"), "gpus": gpus}


def _management() -> dict[str, Any]:
    """Return the driver's release, and whether MIG and confidential computing are on, from NVML. Unknown keys are left out."""
    found: dict[str, Any] = {}
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2():
            return found
        release, count = ctypes.create_string_buffer(_TEXT), ctypes.c_uint()
        if not library.nvmlSystemGetDriverVersion(release, _TEXT):
            found["release"] = release.value.decode(errors="replace")
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        modes = []
        for index in range(count.value):
            handle, mode, pending = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
            if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
                continue
            # A GPU that does not know MIG returns NVML_ERROR_NOT_SUPPORTED.
            code = library.nvmlDeviceGetMigMode(handle, ctypes.byref(mode), ctypes.byref(pending))
            modes.append(code == 0 and mode.value == 1)
        if modes:
            found["mig"] = modes
        state = (ctypes.c_uint * 3)()  # nvmlConfComputeSystemState_t: environment, feature, developer tools
        if not library.nvmlSystemGetConfComputeState(state):
            found["confidential"], found["developer"] = bool(state[1]), bool(state[2])
    except (OSError, AttributeError):  # no NVML, or one without these functions
        pass
    return found


if __name__ == "__main__":
    main("details" in sys.argv[1:])

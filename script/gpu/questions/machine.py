"""What this machine lets the tools do: settings of the driver and the kernel."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any

from gpu.driver import CU_MODULE_EAGER_LOADING, CU_MODULE_LAZY_LOADING, PUT, Driver
from gpu.questions.asking import Answer, question

LOADING = {CU_MODULE_EAGER_LOADING: "eager", CU_MODULE_LAZY_LOADING: "lazy"}
SENTENCES = ("sandbox", "ptrace")  # of what was found
CAPABILITIES = {"CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21, "CAP_PERFMON": 38, "CAP_BPF": 39}


@question(
    "what does this machine let the tools do?",
    "modules are loaded lazily, the driver compiles PTX, MIG and confidential computing are off",
)
def machine() -> Answer:
    driver = Driver().open()
    loading = ctypes.c_int()
    code = driver.call("cuModuleGetLoadingMode", ctypes.byref(loading))
    module = ctypes.c_uint64()
    text = ctypes.c_char_p(PUT.encode() + b"\0")
    compiled = driver.call("cuModuleLoadData", ctypes.byref(module), text)
    found = {
        "module loading": driver.name(code) if code else LOADING.get(loading.value, str(loading.value)),
        "PTX compiler": driver.name(compiled) if compiled else "works",
        **_management(),
        **_kernel(),
    }
    return {
        "answer": "; ".join(
            value if name in SENTENCES else f"{name}: {value}" for name, value in found.items()
        ),
        "agrees": compiled == 0
        and found["MIG"] in ("off", "unknown")
        and found["confidential"] in ("off", "unknown"),
        "found": found,
    }


def _management() -> dict[str, Any]:
    """Return the states of MIG and confidential computing, from NVML."""
    found = {"MIG": "unknown", "confidential": "unknown"}
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return found
    handle = ctypes.c_void_p()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)):
        return found
    mode, pending = ctypes.c_uint(), ctypes.c_uint()
    code = library.nvmlDeviceGetMigMode(handle, ctypes.byref(mode), ctypes.byref(pending))
    found["MIG"] = "unknown" if code else "on" if mode.value else "off"
    state = (
        ctypes.c_uint * 3
    )()  # nvmlConfComputeSystemState_t: environment, feature, mode of developer tools
    if hasattr(library, "nvmlSystemGetConfComputeState") and not library.nvmlSystemGetConfComputeState(state):
        found["confidential"] = "on" if state[1] else "off"
    return found


def _kernel() -> dict[str, str]:
    """Return the kernel, its sandbox, and what it allows this user."""
    status = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    effective = int(status["CapEff"], 16)
    version = Path("/proc/version")
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "kernel": platform.release(),
        "sandbox": "runs in gVisor"
        if version.exists() and "gVisor" in version.read_text()
        else "no gVisor found",
        "capabilities": " ".join(name for name, bit in CAPABILITIES.items() if effective >> bit & 1)
        or "none",
        "BPF": _bpf(),
        "ptrace": _yama(),
        "/dev/shm": f"{shared.f_bavail * shared.f_frsize >> 20} MiB free" if shared else "absent",
    }


def _bpf() -> str:
    """Return whether bpf(2) makes a map here, or why not."""
    from gpubpf.kernel import bpf_syscall

    try:
        os.close(bpf_syscall.create_map(2, 4, 8, 1, 0, "question"))  # ARRAY
    except OSError as error:
        return os.strerror(error.errno or 0)
    return "allowed"


def _yama() -> str:
    """Return whether Yama restricts ptrace, which attaching needs."""
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        scope = "0"
    return (
        "no Yama restriction on ptrace" if scope == "0" else f"Yama restricts ptrace (ptrace_scope {scope})"
    )

"""AMD GPUs, ROCr, and the embedded AMD device. None of these checks was tested on an AMD GPU."""

from __future__ import annotations

import grp
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import hipsim.launcher
from gpubpf import embedded
from gpubpf.check.finding import LIMITED, MISSING, UNKNOWN, Finding, of_error, ok
from gpubpf.check.machine import Machine
from gpubpf.check.nvidia import pci_devices
from gpubpf.errors import Error
from gpubpf.gpus.hip_devices import HipDevices
from gpubpf.linux.libraries import LibraryNames, files
from gpubpf.traced import amd_device

_VENDOR = "0x1002"
_QUESTION = Path(__file__).with_name("rocr_question.py")
_ROCR, _HIP = LibraryNames("libhsa-runtime64.so"), LibraryNames("libamdhip64.so")


def gpu(machine: Machine) -> Finding:
    """Whether HIP programs find a GPU: the kernel's driver has one, and this user may open it."""
    consequence = "HIP programs need the embedded device, hipsim: times mean nothing"
    if not amd_device.has_gpu():
        if not pci_devices(machine, _VENDOR):
            return Finding(MISSING, "none", consequence, needed=False)
        return Finding(
            MISSING, "there is one, but its driver is not loaded", consequence, "run: modprobe amdgpu"
        )
    kfd = machine.dev / "kfd"
    if not kfd.exists():
        action = "start the container with --device /dev/kfd --device /dev/dri"
        return Finding(MISSING, "there is one, but no /dev/kfd", consequence, action)
    if not os.access(kfd, os.R_OK | os.W_OK):
        try:
            group = grp.getgrgid(kfd.stat().st_gid).gr_name
        except KeyError:
            group = str(kfd.stat().st_gid)
        action = f"run as root, and then log in again: usermod -aG {group} USER"
        return Finding(MISSING, "this user may not open /dev/kfd", consequence, action)
    asked = "" if importlib.util.find_spec("hip") else "; its name needs the package hip-python"
    names = [f"{one['name']} ({one['architecture']})" for one in HipDevices().devices(machine.timeout) or ()]
    what = ", ".join(names) or "known to the kernel's driver"
    why = "no tool was tried on an AMD GPU"
    return Finding(LIMITED, f"{what}{asked}", why, needed=False)


def rocr(machine: Machine) -> Finding:
    """The version of AMD's ROCr, which a child process asks for. Without a GPU, ROCr runs on hipsim's driver, if it is built."""
    has_gpu = amd_device.has_gpu()
    if not files(_ROCR):
        return Finding(
            MISSING, "not installed", "HIP programs do not run", "install ROCm, or Debian's hipcc", has_gpu
        )
    variables = dict(os.environ) if has_gpu else embedded_environment()
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(_QUESTION), *files(_ROCR)[:1]],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        env=variables, timeout=machine.timeout,
    )  # fmt: skip
    if done.returncode < 0:
        return Finding(UNKNOWN, f"it crashed (status {done.returncode})", action="run rocminfo")
    said = (done.stdout or done.stderr).strip().splitlines()
    if done.returncode or not said:
        why = said[-1] if said else "no answer"
        if not has_gpu:
            return ok("installed")
        action = "run rocminfo, and install ROCm again if that fails, too"
        return Finding(LIMITED, f"installed; {why}", "HIP programs do not run", action)
    return ok(said[-1])


def embedded_environment() -> dict[str, str]:
    """Return the variables with which a HIP program uses hipsim, or those of this process if hipsim is not built."""
    try:
        return embedded.environment(hipsim.launcher.DEVICE, os.environ)
    except Error:
        return dict(os.environ)


def embedded_device(machine: Machine) -> Finding:
    """Whether HIP programs run without a GPU: hipsim is built, and AMD's own HIP and ROCr are installed."""
    consequence = "HIP programs do not run without a GPU (hipsim)"
    try:
        embedded.environment(hipsim.launcher.DEVICE, {})
    except Error as error:
        return of_error(error, consequence, needed=False)
    lacks = [name.patterns[0] for name in (_HIP, _ROCR) if not files(name)]
    if lacks:
        value = f"built, but AMD's {' and '.join(lacks)} {'is' if len(lacks) == 1 else 'are'} not installed"
        return Finding(MISSING, value, consequence, "install ROCm, or Debian's hipcc", needed=False)
    return ok("works, with AMD's HIP and ROCr")

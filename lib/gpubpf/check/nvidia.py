"""NVIDIA GPUs, their driver and ptxas, the states of the driver that change what tools see, and the embedded CUDA device."""

from __future__ import annotations

import functools
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cudasim.launcher
from gpubpf import embedded
from gpubpf.check.finding import LIMITED, MISSING, UNKNOWN, Finding, of_error, ok
from gpubpf.check.machine import Machine
from gpubpf.errors import Error
from gpubpf.images import assemble
from gpubpf.kernel import directories
from gpubpf.traced import device

_VENDOR, _DISPLAY = "0x10de", "0x03"  # of PCI devices; the class of GPUs begins with 0x03
_GRAPHS = 13000  # CUDA version of the oldest driver with which kernels in graphs are measured by default
_HOOKED = 11040  # CUDA version of the oldest driver whose functions the tests hook (470)
_DRIVER_FILES = ("nvidiactl", "nvidia-uvm", "nvidia[0-9]*")
_MPS = "nvidia-cuda-mps"  # the first 15 characters of MPS's process names, which are all that Linux keeps
_one_question = threading.Lock()


def answer(machine: Machine) -> dict[str, Any] | str:
    """Return the driver's answer (`device.question`), which is asked for once. The embedded device does not count as a GPU."""
    with _one_question:
        said = _asked(machine.timeout)
    if not isinstance(said, str) and device.is_embedded(said["gpus"][0]["name"]):
        return device.EMBEDDED
    return said


@functools.cache
def _asked(timeout: float) -> dict[str, Any] | str:
    return device.question(timeout, details=True)


def _gpus(machine: Machine) -> dict[str, Any] | None:
    said = answer(machine)
    return None if isinstance(said, str) else said


def pci_devices(machine: Machine, vendor: str) -> int:
    """Return the number of a vendor's GPUs on the PCI bus, which are visible without a driver."""
    found = 0
    for place in machine.sys.glob("bus/pci/devices/*"):
        if machine.text(place / "vendor", "") == vendor:
            found += machine.text(place / "class", "").startswith(_DISPLAY)
    return found


def gpu(machine: Machine) -> Finding:
    """Whether CUDA programs find a GPU, through the driver as a program finds it."""
    said = answer(machine)
    if not isinstance(said, str):
        names = Counter(f"{gpu['name']} ({gpu['cc'][0]}.{gpu['cc'][1]})" for gpu in said["gpus"])
        shown = ", ".join(f"{count} x {name}" for name, count in names.items())
        return ok(f"{shown}; asked through {said['through']}")
    consequence = "CUDA programs need the embedded device, cudasim: counts are exact, times mean nothing"
    there = pci_devices(machine, _VENDOR)
    if not there and not (machine.proc / "driver/nvidia/version").exists():
        return Finding(MISSING, f"none: {said}", consequence, needed=False)
    return Finding(MISSING, f"not usable: {said}", consequence, _remedy(machine, said))


def _remedy(machine: Machine, said: str) -> str:
    """Return what to do if the driver does not offer a GPU."""
    if not (machine.proc / "driver/nvidia/version").exists():
        return "install NVIDIA's driver, or load it: modprobe nvidia"
    if any(not os.access(file, os.R_OK | os.W_OK) for file in _driver_files(machine)):
        return "ask root for access to /dev/nvidia*: this user may not open them"
    if "cannot be loaded" in said:
        return "install the driver's libraries (Debian: libcuda1); start a container with NVIDIA's runtime: --gpus all"
    return "run nvidia-smi, and look at: dmesg | grep NVRM"


def _driver_files(machine: Machine) -> Iterator[Path]:
    for pattern in _DRIVER_FILES:
        yield from machine.dev.glob(pattern)


def driver(machine: Machine) -> Finding | None:
    """The CUDA version of the driver, compared with the tested versions."""
    if (said := _gpus(machine)) is None:
        return None
    version = said["version"]
    release = f", release {said['release']}" if said.get("release") else ""
    value = f"CUDA {version // 1000}.{version % 1000 // 10}{release}"
    if version >= _GRAPHS:
        return ok(value)
    if version >= _HOOKED:
        why = "kernels in CUDA graphs are measured only with --graphs, which was not tried with this driver"
        return Finding(LIMITED, value, why, "update the driver to one for CUDA 13.0 or newer", needed=False)
    return Finding(LIMITED, value, "no tool was tried with a driver this old", "update the driver")


def ptxas(machine: Machine) -> Finding:
    """Whether there is a ptxas whose code the driver can load."""
    said = _gpus(machine)
    major = said["version"] // 1000 if said else 0
    found = assemble.installed()
    usable = [one for one in found if one.version]  # it can be run
    fits = [one for one in usable if assemble.suits(one, major)]
    names = ", ".join(dict.fromkeys(f"{type(one).__name__.lower()} {one.release}" for one in usable))
    if fits:
        return ok(f"{names}{f' for a driver of CUDA {major}' if major else ''}")
    consequence = "no kernel can be instrumented: only launchlate, cudasnoop and hipsnoop work on the GPU"
    if said is None:
        consequence = "the extra registers of a probe are not shown; the embedded device needs no ptxas"
    if usable:
        value = f"{names} is newer than the driver's CUDA {major}, which does not load its code"
        return Finding(MISSING, value, consequence, assemble.install_for(major))
    value = "cannot be run, or does not say its release" if found else "not installed"
    return Finding(MISSING, value, consequence, assemble.INSTALL, needed=said is not None)


def mig(machine: Machine) -> Finding | None:
    """Whether GPUs are divided into instances."""
    if (said := _gpus(machine)) is None:
        return None
    if "mig" not in said:
        return Finding(UNKNOWN, "NVML does not say", needed=False)
    if not any(said["mig"]):
        return ok("off")
    why = "each instance is a GPU of its own to a program, and to the tools; nothing was tried with MIG"
    return Finding(LIMITED, f"on for {sum(said['mig'])} of {len(said['mig'])} GPUs", why, needed=False)


def confidential(machine: Machine) -> Finding | None:
    """Whether GPUs are in confidential computing mode."""
    if (said := _gpus(machine)) is None:
        return None
    if "confidential" not in said:
        return Finding(UNKNOWN, "NVML does not say", needed=False)
    if not said["confidential"]:
        return ok("off")
    value = f"on, developer tools {'on' if said['developer'] else 'off'}"
    why = "nothing was tried in this mode; without developer tools, launchlate gets no times from CUPTI"
    return Finding(LIMITED, value, why, needed=False)


def mps(machine: Machine) -> Finding:
    """Whether processes share the GPU through MPS."""
    named = "CUDA_MPS_PIPE_DIRECTORY" in machine.environment
    if not named and not any(name.startswith(_MPS) for name in machine.commands()):
        return ok("not seen")
    value = "CUDA_MPS_PIPE_DIRECTORY is set" if named else "its control daemon or server runs"
    why = "kernels of other clients change times, and no tool reports that; nothing was tried with MPS"
    return Finding(LIMITED, value, why, needed=False)


def embedded_device(machine: Machine) -> Finding:
    """Whether CUDA programs run without a GPU: the device is built, and a C compiler compiles for it."""
    from cudasim.translate import compiler

    needed = _gpus(machine) is None
    consequence = "CUDA programs do not run without a GPU (cudasim, --device sim)"
    try:
        embedded.environment(cudasim.launcher.DEVICE, {})
        command = compiler.command()
        with tempfile.TemporaryDirectory(prefix="gpubpf-check-", dir=directories.temporary()) as directory:
            compiler.compile_c("int answer(void) { return 42; }\n", f"{directory}/answer.so")
    except Error as error:
        finding = of_error(error, consequence, needed)
        install = "install gcc or clang, with the C library's headers"
        return Finding(MISSING, finding.value, consequence, finding.action or install, needed)
    return ok(f"works; compiles with {os.path.basename(command[0])}")

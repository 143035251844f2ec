"""What the Linux kernel offers: its version, eBPF, uprobes, tracepoints, type information; and compilers of eBPF programs."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import re
import struct
import subprocess
from pathlib import Path

from gpubpf import processor, ziglang
from gpubpf.check import isolation
from gpubpf.check.finding import LIMITED, MISSING, UNKNOWN, Finding, of_error, ok
from gpubpf.check.machine import Machine
from gpubpf.ebpf import clang
from gpubpf.ebpf import compile as compiling
from gpubpf.errors import Error, in_words
from gpubpf.kernel import bpf_syscall, privileges
from gpubpf.linux import btf
from gpubpf.linux import uprobes as linux_uprobes

_SNOOP = "cudasnoop and hipsnoop"
_OLDEST, _COMPLETE = (5, 8), (5, 18)  # man/fragments/snoop-requirements.roff; docs/timing.md
_SWITCH = ("sched_switch", 4)  # the tracepoint and its arguments, since Linux 5.18; see linux/tracepoints.py
# r0 = 0; exit
_NOTHING = struct.pack("<BBhi", 0xB7, 0, 0, 0) + struct.pack("<BBhi", 0x95, 0, 0, 0)


def version(machine: Machine) -> Finding:
    """The kernel's version and architecture."""
    release = machine.text(machine.proc / "sys/kernel/osrelease")
    value = f"Linux {release} on {processor.NAME}"
    match = re.match(r"(\d+)\.(\d+)", release)
    numbers = (int(match[1]), int(match[2])) if match else _COMPLETE
    if numbers < _OLDEST:
        return Finding(MISSING, value, f"{_SNOOP} do not work", "use Linux 5.8 or newer")
    if not processor.IS_X86_64:
        why = f"-p, {_SNOOP} and the embedded AMD device need x86-64; only COMMAND is measured"
        return Finding(LIMITED, value, why, "use a machine with an x86-64 CPU")
    if numbers < _COMPLETE and not _has_whole_switches(machine):
        why = "--why and launchlate --slow know less of what a thread waited for"
        return Finding(LIMITED, value, why, "use Linux 5.18 or newer", needed=False)
    return ok(value)


def _has_whole_switches(machine: Machine) -> bool:
    """Return whether an old kernel's tracepoint passes what it has passed since Linux 5.18: distributions add such features."""
    if not privileges.holds(privileges.PERFMON, privileges.SYS_ADMIN) or isolation.kills(machine, "bpf", ""):
        return False
    try:
        return bpf_syscall.raw_arguments(*_SWITCH)
    except (OSError, Error):
        return False


def bpf(machine: Machine) -> Finding:
    """Whether this user may load eBPF programs. The check loads a program that does nothing."""
    consequence = (
        f"{_SNOOP} do not work; launchlate --slow does not show what threads did meanwhile;"
        " gpurun refuses programs at tracepoints, kprobes and uprobes"
    )
    if not privileges.capable():
        return _not_allowed("CAP_BPF", privileges.BPF, consequence)
    if (fatal := isolation.kills(machine, "bpf", consequence)) is not None:
        return fatal
    try:
        os.close(bpf_syscall.load_program(bpf_syscall.KPROBE, _NOTHING, name="check"))
    except bpf_syscall.Rejected as error:
        return Finding(MISSING, f"loading a program fails: {in_words(error)}", consequence, _allow(error))
    except OSError as error:
        return Finding(MISSING, f"loading a program fails: {in_words(error)}", consequence, _allow(error))
    return ok("programs can be loaded")


def _not_allowed(name: str, capability: int, consequence: str) -> Finding:
    if capability in privileges.effective():
        value = f"{name} does not count in a user namespace"
        return Finding(MISSING, value, consequence, "run these tools on the host as root")
    action = "run these tools as root (sudo), or with CAP_BPF and CAP_PERFMON"
    return Finding(MISSING, f"not allowed without {name}", consequence, action)


def _allow(error: OSError) -> str:
    if error.errno in (errno.EPERM, errno.EACCES):
        return "run on the host, or allow bpf(2): a container or a security module forbids it"
    return "use a kernel with CONFIG_BPF_SYSCALL, CONFIG_BPF_EVENTS and CONFIG_KPROBES"


def uprobes(machine: Machine) -> Finding:
    """Whether programs can be attached to functions of libraries, and in which way."""
    consequence = f"{_SNOOP} do not work; new processes are not held until they are measured"
    if not privileges.holds(privileges.PERFMON, privileges.SYS_ADMIN):
        return _not_allowed("CAP_PERFMON", privileges.PERFMON, consequence)
    if (fatal := isolation.kills(machine, "bpf", consequence)) is not None:
        return fatal
    action = "use a kernel with CONFIG_UPROBE_EVENTS, and mount sysfs on /sys"
    try:
        method = linux_uprobes.best_method()
    except (OSError, ValueError):
        return Finding(MISSING, "the kernel does not offer them", consequence, action)
    try:
        bpf_syscall.uprobe_type()
    except (OSError, ValueError):
        why = "new processes are not held until they are measured: their first launches may be missed"
        return Finding(LIMITED, "not through perf_event_open(2)", why, action)
    return ok(
        "attached in groups" if method == "multi" else "attached one by one; Linux 6.6 and newer are faster"
    )


def tracefs(machine: Machine) -> Finding:
    """Whether the kernel's tracepoints can be read."""
    consequence = f"{_SNOOP} do not work; launchlate --slow does not show what threads did meanwhile"
    try:
        with bpf_syscall.tracefs() as directory:
            return ok(f"in {directory}" if str(directory).startswith("/sys") else "can be mounted")
    except Error as error:
        if not privileges.capable():
            return Finding(
                UNKNOWN,
                "this user may not read it",
                action="run gpubpf check as root of the machine to see it",
            )
        return of_error(error, consequence)


def type_information(machine: Machine) -> Finding:
    """Whether the kernel has BTF."""
    try:
        btf.member("task_struct", "pid")
    except Error as error:
        why = (
            "gpurun refuses objects with CO-RE relocations, and --why knows less of what a thread waited for"
        )
        return Finding(MISSING, "the kernel has no BTF", why, str(error).partition("; ")[2])
    return ok("/sys/kernel/btf/vmlinux")


def compiler(machine: Machine) -> Finding:
    """The compiler for device programs that are not prebuilt."""
    consequence = "gpucount, gpudist, gputrace and tools of your own do not work"
    found = clang.find()
    if compiling.usable() or (found is None and compiling.found_bcc()):
        if _is_bcc():
            return ok("bcc")
        value = "the Python module bcc is another project's"
        return Finding(MISSING, value, consequence, f"pip uninstall bcc; {compiling.INSTALL_BCC}")
    if found is None:
        return Finding(MISSING, "neither clang nor bcc", consequence, compiling.install_clang())
    name = os.path.basename(found)
    release = _clang_release(found, machine)
    if release < clang.OLDEST:
        value = f"{name} is version {release}" if release else f"{name} cannot be run"
        return Finding(LIMITED, value, "gpucount, gpudist and gputrace may fail", compiling.install_clang())
    return ok(f"{name}; tools of your own need bcc and root" if privileges.capable() else name)


def _clang_release(path: str, machine: Machine) -> int:
    """Return the version of a clang; 0 if it cannot be run. The clang in zig is always new enough."""
    if path == ziglang.find():
        return clang.OLDEST
    with contextlib.suppress(OSError):
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=machine.timeout)
        if match := re.search(r"clang version (\d+)", done.stdout):
            return int(match[1])
    return 0


def _is_bcc() -> bool:
    """Return whether the module bcc is the BPF Compiler Collection. PyPI's package bcc is another project."""
    spec = importlib.util.find_spec("bcc")
    return spec is not None and spec.origin is not None and Path(spec.origin).with_name("libbcc.py").exists()


def headers(machine: Machine) -> Finding | None:
    """Whether bcc finds kernel headers. clang needs none."""
    if not compiling.found_bcc() or not _is_bcc():
        return None
    with contextlib.suppress(OSError):
        if compiling.has_kernel_headers():
            return ok("found by bcc")
    others = "" if clang.find() else "gpucount, gpudist, gputrace and "
    consequence = f"{others}tools of your own do not work as root"
    return Finding(MISSING, "bcc finds none", consequence, compiling.INSTALL_HEADERS)

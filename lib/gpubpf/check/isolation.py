"""What may prevent a tool from tracing other processes: ptrace and Yama, namespaces, hidepid, seccomp, no_new_privs, cgroups."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from gpubpf.check import syscall_question
from gpubpf.check.finding import LIMITED, MISSING, Finding, ok
from gpubpf.check.machine import Machine
from gpubpf.errors import in_words
from gpubpf.kernel import libc, privileges, syscalls
from gpubpf.process import traceable

_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, include/linux/proc_ns.h
_CONTAINERS = (
    "docker",
    "podman",
    "lxc",
    "oci",
    "systemd-nspawn",
    "flatpak",
    "wsl",
)  # values of the environment variable `container`
_SEIZE = 0x4206  # PTRACE_SEIZE
_EVERY = "measuring every process (without COMMAND and -p)"
_QUESTION = Path(syscall_question.__file__)


def ptrace(machine: Machine) -> Finding:
    """Whether running processes can be attached to (-p): Yama, capabilities, and a child that is traced for a moment."""
    consequence = "-p does not work, and new processes are not measured without COMMAND"
    scope = traceable.ptrace_scope(machine.proc)
    capable = privileges.SYS_PTRACE in privileges.effective()
    value = f"kernel.yama.ptrace_scope is {scope}" if scope else "no restriction by Yama"
    if scope == 3:
        return Finding(MISSING, value, consequence, "start programs with the tool: TOOL -- COMMAND")
    if (fatal := kills(machine, "ptrace", consequence)) is not None:
        return fatal
    if (why := _refused()) is not None:
        action = "allow ptrace(2): docker run --cap-add SYS_PTRACE, or --security-opt seccomp=unconfined"
        return Finding(MISSING, f"ptrace(2) is refused: {why}", consequence, action)
    if not capable and scope:
        action = "use sudo, or as root: sysctl kernel.yama.ptrace_scope=0"
        return Finding(LIMITED, value, "-p needs root", action)
    if not capable:
        return Finding(
            LIMITED,
            f"{value}; this user's processes",
            "-p for others' processes needs root",
            "use sudo: sudo TOOL -p PID",
        )
    return ok(f"{value}; CAP_SYS_PTRACE")


def _refused() -> str | None:
    """Return why a child of this process cannot be traced, or None."""
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    try:
        libc.system_call("ptrace", _SEIZE, child.pid, 0, 0)
    except OSError as error:
        return in_words(error)
    finally:
        child.kill()
        child.communicate()
    return None


def _sees_machine(machine: Machine) -> bool:
    """Return whether this process is in the machine's own PID namespace. Raises OSError."""
    return os.readlink(machine.proc / "self/ns/pid") == _FIRST_PID_NAMESPACE


def user_namespace(machine: Machine) -> Finding:
    """Whether root has its rights for the whole machine, or only in a user namespace."""
    os.readlink(machine.proc / "self/ns/user")  # raises OSError without /proc: then the answer is unknown
    if privileges.in_first_user_namespace(machine.proc):
        return ok("the machine's own")
    why = f"root here has no rights over the host: no eBPF programs, and not {_EVERY}"
    return Finding(LIMITED, "not the machine's own", why, "run the tool on the host as root")


def pid_namespace(machine: Machine) -> Finding:
    """Which processes this PID namespace contains."""
    if machine.text(machine.proc / "self/stat", "").partition(" ")[0] != str(os.getpid()):
        action = "mount the right one, as root: mount -t proc proc /proc"
        return Finding(MISSING, "/proc is not that of this PID namespace", "no tool works", action)
    if _sees_machine(machine):
        return ok("the machine's own")
    why = "processes outside of this container are not seen, and -p takes the numbers inside"
    action = "run the tool on the host, or the container with --pid=host"
    return Finding(LIMITED, "not the machine's own", why, action, needed=False)


def hidepid(machine: Machine) -> Finding:
    """Whether /proc hides the processes of other users."""
    for directory, kind, options in machine.mounts():
        hidden = sorted(option for option in options if option.startswith("hidepid="))
        if (
            kind == "proc"
            and directory == "/proc"
            and hidden
            and hidden[0] not in ("hidepid=0", "hidepid=off")
        ):
            if privileges.SYS_PTRACE in privileges.effective():
                return ok(f"{hidden[0]}, which does not apply to root")
            why = "processes of other users are not seen: -p and completion know yours alone"
            return Finding(LIMITED, f"/proc is mounted with {hidden[0]}", why, "use sudo")
    return ok("/proc shows every process")


def seccomp(machine: Machine) -> Finding:
    """Whether a filter refuses system calls that the tools make."""
    if machine.status().get("Seccomp", "0") == "0":
        return ok("no filter")
    refused = filtered_calls(machine)
    if not refused:
        return ok("a filter, which allows what the tools need")
    why = f"what needs these calls fails: {', '.join(_needs(refused))}"
    value = f"a filter refuses {', '.join(refused)}"
    return Finding(LIMITED, value, why, "run on the host, or with seccomp=unconfined")


def filtered_calls(machine: Machine) -> dict[str, bool]:
    """Return the system calls of tools that a seccomp filter refuses: name → whether the filter kills the process for the call.

    A child process tries the calls. Raises OSError.
    """
    refused: dict[str, bool] = {}
    if machine.status().get("Seccomp", "0") == "0":
        return refused
    numbers = {name: syscalls.NUMBERS[name] for name in syscall_question.CALLS}
    while True:  # the filter may kill the child, and then the next child skips that call
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(_QUESTION), *(f"{name}={numbers[name]}" for name in numbers)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=machine.timeout,
        )
        tried = [line.split() for line in done.stdout.splitlines()]
        refused |= {line[0]: False for line in tried if line[1:] == ["refused"]}
        if done.returncode >= 0 or not tried:
            return refused
        refused[tried[-1][0]] = True
        for name, *_ in tried:
            numbers.pop(name, None)


def kills(machine: Machine, call: str, consequence: str) -> Finding | None:
    """Return a finding if a seccomp filter would kill this process for a system call. Then the check must not make the call."""
    if not filtered_calls(machine).get(call):
        return None
    value = f"a seccomp filter kills each process that calls {call}(2)"
    return Finding(MISSING, value, consequence, "run on the host, or with seccomp=unconfined")


def _needs(calls: Iterable[str]) -> list[str]:
    """Return which tools or options do not work without these system calls."""
    calls, found = set(calls), []
    if calls & {"bpf", "perf_event_open"}:
        found.append("cudasnoop and hipsnoop")
    if calls & {"ptrace", "process_vm_readv", "pidfd_open", "pidfd_getfd"}:
        found.append("-p")
    if calls & {"memfd_create", "openat2", "membarrier"}:
        found.append("every tool")
    return found


def no_new_privileges(machine: Machine) -> Finding:
    """Whether sudo can give privileges here, or no_new_privs prevents it."""
    if machine.status().get("NoNewPrivs", "0") == "0":
        return ok("not set")
    if os.geteuid() == 0:
        return ok("set; this is root already")
    return Finding(
        LIMITED,
        "set: sudo gains nothing here",
        "what needs root does not work",
        "use another shell, or log in",
    )


def cgroups(machine: Machine) -> Finding:
    """Which version of cgroups exists, for --cgroup."""
    kinds = {kind for _, kind, _ in machine.mounts()}
    old = "cgroup" in kinds
    if "cgroup2" in kinds:
        return ok("v2, and v1" if old else "v2")
    value = "v1 alone" if old else "none mounted"
    return Finding(
        LIMITED, value, "--cgroup takes the number of a cgroup v2, and no path", "mount cgroup2", needed=False
    )


def container(machine: Machine) -> Finding:
    """Whether this is a container, according to its files and environment variables."""
    found = machine.environment.get("container", "")
    found = found if found in ("", *_CONTAINERS) else "another container"
    if (machine.root / ".dockerenv").exists():
        found = found or "docker"
    if (machine.root / "run/.containerenv").exists():
        found = found or "podman"
    if "KUBERNETES_SERVICE_HOST" in machine.environment:
        found = found or "kubernetes"
    if not found:
        return ok("no sign of one")
    if _sees_machine(machine):
        return ok(f"signs of {found}, but the processes are the machine's")
    why = "processes of the host are measured only from the host"
    return Finding(LIMITED, found, why, "run the tool on the host to measure them", needed=False)

"""Only one module talks to a process's socket, and only one reads its memory: these know how not to wait for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpubpf

pytestmark = pytest.mark.without_driver

LIBRARY = Path(gpubpf.__file__).parent
SOCKETS = {"recv_fds", "send_fds", "recvmsg", "recvmsg_into", "sendmsg", "sendall", "settimeout"}
SOCKETS |= {"recv", "recv_into", "recvfrom", "send", "sendto", "makefile"}
# Sockets that no process has which the tool does not trust, or that the tool has accepted and sets itself not to wait.
OWN_SOCKETS = {
    "attach/holding.py": {"recv", "send"},
    "traced/machine.py": {"recv", "send", "settimeout"},
    "calls/device_times/dispatches.py": {"recvmsg"},
    # `TargetSocket.send`
    **{name: {"send"} for name in ("attach/loading.py", "traced/traced_process.py", "traced/workers.py")},
}
# Files that no process has: the tool's pipes, its terminal, the kernel's files.
OWN_FILES = {
    *("attach/holding.py", "traced/command.py", "traced/server.py", "show/progress.py"),
    *("calls/kfd.py", "process/proc.py", "gpus/devices.py"),
}
MEMORY = ("/mem", "process_vm_readv", "process_vm_writev")
LOOKS = {"mappings", "mapping_at", "mapped_at"}
# Modules that look at a process through `patience.within`, or on a thread that works for this process alone.
LOOKING = {
    *(
        "process/address_space.py",
        "process/gpu_processes.py",
        "process/host_frames.py",
        "traced/joining.py",
        "traced/machine.py",
    ),
    "linux/libraries.py",
    *("attach/borrow.py", "attach/holding.py", "attach/loading.py", "attach/patching.py"),
    *("images/mapped.py", "images/triton.py", "linux/indirect_functions.py"),
    *("calls/kernel_names.py", "calls/listing.py", "check/process.py"),
}
# `gpubpf check` asks whether a seccomp filter refuses these calls, for a process that does not exist.
ASKING = ("check/isolation.py", "check/syscall_question.py")
OWN_MEMORY = {
    "process/address_space.py": {"/mem"},
    "kernel/syscalls.py": set(MEMORY[1:]),
    **{name: {"process_vm_readv"} for name in ASKING},
}


def modules(*words: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules of the library that contain one of these words, each with its syntax tree."""
    for path in sorted(LIBRARY.rglob("*.py")):
        text = path.read_text()
        if any(word in text for word in words):
            yield str(path.relative_to(LIBRARY)), ast.parse(text)


def test_only_one_module_talks_to_processes() -> None:
    found: dict[str, set[str]] = {}
    for name, tree in modules(*SOCKETS):
        calls = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & SOCKETS
        if calls - OWN_SOCKETS.get(name, set()):
            found[name] = calls
    assert found.keys() == {"process/target_socket.py"}


def test_few_modules_read_and_write_files_without_a_limit() -> None:
    """os.read on a pipe, a socket or a FUSE file of a process waits for the process."""
    ways = {"read", "write", "readv", "writev", "sendfile", "splice"}
    found = {
        name
        for name, tree in modules("os.")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ways and ast.unparse(node.value) == "os"
    }
    assert found == OWN_FILES


def test_only_one_module_reads_memory_of_processes() -> None:
    found: dict[str, set[str]] = {}
    for name, tree in modules(*MEMORY):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                used = {way for way in MEMORY if node.value.endswith(way) or way in node.value.split()}
                if used := used - OWN_MEMORY.get(name, set()):
                    found.setdefault(name, set()).update(used)
    assert not found


def test_few_modules_take_the_lock_of_an_address_space() -> None:
    """A process can keep whoever reads its mappings waiting (process/patience.py)."""
    found = set()
    for name, tree in modules(*LOOKS, '"maps"'):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                first = node.args[1] if node.func.attr == "lines" and len(node.args) > 1 else None
                lists = isinstance(first, ast.Constant) and first.value == "maps"
                if lists or (node.func.attr in LOOKS and isinstance(node.func.value, ast.Name)):
                    found.add(name)
    assert found == LOOKING


def test_only_one_module_fetches_files_of_processes() -> None:
    users = [
        name
        for name, tree in modules("pidfd_getfd")
        if name not in ASKING
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value == "pidfd_getfd"
    ]
    assert users == ["attach/loading.py"]

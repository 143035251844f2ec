"""To whom an agent connects: the name of the tool's socket is free once the tool has ended, and then anybody may listen there."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gpubpf import agent
from gpubpf.agent.definitions import SOCKET_VARIABLE
from gpubpf.calls import device_times
from gpubpf.traced import device

NOBODY, SOMEBODY, ANOTHER = 65534, 12345, 23456
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc"),
    pytest.mark.skipif(
        not (device.LIBRARIES / "libcuda.so.1").exists() or not agent.LIBRARY.exists(),
        reason="needs the agent and the embedded device (script/setup)",
    ),
]
# Says how many bytes the first connection sends: none if it closes at once.
LISTENER = """
import socket, sys
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind("\\0" + sys.argv[1])
    listener.listen()
    print("ready", flush=True)
    connection, _ = listener.accept()
    print(len(connection.recv(100)), flush=True)
"""


# Runs a command as user 5 of a user namespace in which 65,536 users have IDs.
MAPPED = """
import ctypes, os, sys
ready, mapped = os.pipe(), os.pipe()
if pid := os.fork():
    os.read(ready[0], 1)
    for kind in "uid", "gid":
        with open(f"/proc/{pid}/{kind}_map", "w") as file:
            file.write("0 100000 65536")
    os.write(mapped[1], b"1")
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
if ctypes.CDLL(None).unshare(0x10000000):
    sys.exit(1)
os.write(ready[1], b"1")
os.read(mapped[0], 1)
os.setuid(5)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """What every user can read: a program that initializes the driver, the driver, and the agent."""
    with tempfile.TemporaryDirectory() as name:
        at = Path(name)
        at.chmod(0o755)
        for library in (*device.LIBRARIES.glob("*.so*"), agent.LIBRARY):
            shutil.copy(library, at)
        (at / "program.c").write_text("int cuInit(unsigned); int main(void) { return cuInit(0); }")
        subprocess.run(
            ["gcc", at / "program.c", "-o", at / "program", f"-L{at}", "-l:libcuda.so.1", f"-Wl,-rpath,{at}"],
            check=True,
        )
        (at / "rocm.c").write_text(ROCM)
        sources = Path(device_times.__file__).parent
        parts = [
            f"-I{sources}",
            "-iquote",
            Path(agent.__file__).parent / "hsa",
            sources / "ring.c",
            "-pthread",
        ]
        subprocess.run(["gcc", at / "rocm.c", *parts, "-o", at / "rocm"], check=True)
        yield at


# What libgpubpf-hsa.so and libgpubpf-rocprofiler.so do first.
ROCM = """
#include "ring.h"
int main(int argc, char **argv) {
    hello.state = AGENT_STARTED;
    return argc != 2 || !ring_create() || !ring_tell(argv[1]);
}
"""


@contextlib.contextmanager
def listening(user: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    name = f"gpubpf-test-{secrets.token_hex(12)}"
    command = [sys.executable, "-c", LISTENER, name]
    with subprocess.Popen(command, user=user, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        try:
            yield name, process
        finally:
            process.kill()


def greets(place: Path, listener: int, user: int, before: Sequence[str] = (), rocm: bool = False) -> bool:
    """Return whether the agent in a program of `user` talks to a listener of another user. rocm: the one in ROCm's programs."""
    environment = {
        "PATH": os.environ["PATH"],
        "CUDA_INJECTION64_PATH": str(place / agent.LIBRARY.name),
        "HOME": "/nonexistent",
    }
    with listening(listener) as (name, process):
        environment[SOCKET_VARIABLE] = f"@{name}"
        command = [place / "rocm", name] if rocm else [place / "program"]
        with subprocess.Popen(
            [*before, *command], user=user, env=environment, stderr=subprocess.DEVNULL
        ) as program:
            assert process.stdout is not None
            answer = process.stdout.readline()
            process.kill()  # so that the program need not wait for an answer
            program.wait(60)
    return int(answer) > 0


@pytest.mark.parametrize(
    ("listener", "user", "expected"),
    [
        (SOMEBODY, SOMEBODY, True),
        (0, SOMEBODY, True),
        (NOBODY, NOBODY, True),
        (ANOTHER, SOMEBODY, False),
        (NOBODY, SOMEBODY, False),  # services run as this user
        (NOBODY, 0, False),
        (SOMEBODY, 0, False),
    ],
)
@pytest.mark.parametrize("rocm", [False, True])
def test_only_root_and_the_programs_own_user(
    place: Path, listener: int, user: int, expected: bool, rocm: bool
) -> None:
    assert greets(place, listener, user, rocm=rocm) is expected


def test_root_outside_of_a_user_namespace(place: Path) -> None:
    """Without an ID in the namespace, it looks like nobody. Where nobody has an ID, that user may be another one."""
    if subprocess.run(["unshare", "-U", "true"]).returncode:
        pytest.skip("no user namespaces here")
    assert greets(place, 0, 0, ["unshare", "-U", f"--map-user={SOMEBODY}"])
    mapped = [sys.executable, "-c", MAPPED]
    assert subprocess.run([*mapped, "/bin/true"]).returncode == 0
    listeners = {100_000: True, 100_005: True, 100_006: False, 100_000 + NOBODY: False, SOMEBODY: False}
    assert {user: greets(place, user, 0, mapped) for user in listeners} == listeners

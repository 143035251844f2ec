"""Hostile traced processes: the tool and the terminal survive, and each problem is reported in one line."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpubpf import agent
from gpubpf.agent import protocol
from gpubpf.agent.definitions import PROTOCOL_VERSION, Message
from gpubpf.process import traceable
from gpubpf.show import cli
from gpubpf.traced import device

sys.path.insert(0, str(Path(__file__).parents[1] / "agent"))
import fake_tool

from gpubpf_commands import words

HERE = Path(__file__).parent
TOOL = [sys.executable, str(Path(__file__).parents[3] / "tools" / "threadhist.py")]
HEADERS = [
    *sorted(Path("/usr/local").glob("cuda*/include")),
    *(Path(place) / "nvidia/cu13/include" for place in sys.path),
]
ROOT = os.geteuid() == 0

pytestmark = pytest.mark.skipif(
    os.uname().machine != "x86_64" or not shutil.which("gcc"), reason="needs gcc on x86-64"
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (device.LIBRARIES / "libcuda.so.1").exists() or not agent.LIBRARY.exists():
        pytest.skip("the embedded device or the agent is not built (script/setup)")
    headers = [d for d in HEADERS if (d / "cuda.h").exists()]
    if not headers:
        pytest.skip("needs cuda.h")
    at = tmp_path_factory.mktemp("hostile")
    libraries = device.LIBRARIES
    command = (
        "gcc -O1 -pthread -I{headers} {here}/hostile.c -o {at}/hostile -L{place} -lcuda -Wl,-rpath,{place}"
    )
    names = {"headers": headers[0], "here": HERE, "at": at, "place": libraries}
    subprocess.run(words(command, **names), check=True)
    return at / "hostile"


@contextlib.contextmanager
def running(*command: object, delay: int = 200_000) -> Iterator[subprocess.Popen[str]]:
    """Start a target and wait until it prints "ready". `delay`: µs between the agent's start and the hostile act."""
    process = subprocess.Popen(
        [str(c) for c in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "DELAY": str(delay)},
    )
    timer = threading.Timer(200, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def measure(pid: int, *arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run the tool on a process. Return its result and duration; check that its messages are printable and begin with its name."""
    began = time.monotonic()
    done = subprocess.run(
        [*TOOL, "-p", str(pid), *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    for line in done.stderr.splitlines():
        assert line.startswith("threadhist: "), done.stderr
    for char in done.stdout + done.stderr:
        assert char == "\n" or char.isprintable(), (done.stdout, done.stderr)
    assert max(map(len, done.stderr.splitlines()), default=0) < 1000
    return done, time.monotonic() - began


def ends(process: subprocess.Popen[str]) -> str:
    """Return what the target prints at its end, after it has checked its results."""
    out, error = process.communicate("\n", timeout=100)
    assert process.returncode == 0, error
    return out.strip()


# --- what goes on ---


@pytest.mark.every(8)
@pytest.mark.parametrize(
    "kind",
    [
        "close", "shutdown", "babble", "shrink", "undumpable", "seccomp", "signals", "names", "vfork",
        pytest.param("setuid", marks=pytest.mark.skipif(not ROOT, reason="needs root")),
    ],
)  # fmt: skip
def test_it_goes_on_and_so_do_we(hostile: Path, kind: str) -> None:
    with running(hostile, kind) as process:
        done, took = measure(process.pid, "-d", "0.8")
        assert done.returncode in (0, 1), done.stderr
        assert took < 60
        assert ends(process) == "did it"


@pytest.mark.skipif(not ROOT, reason="needs root")
def test_an_agent_that_somebody_holds(hostile: Path) -> None:
    with running(hostile, "freeze") as process:
        done, took = measure(process.pid, "-d", "0.8")
        assert done.returncode in (0, 1), done.stderr
        assert took < 60


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", ["unmap", "protect", "overwrite", "kill", "exit", "exec"])
def test_it_ends_and_we_do_not(hostile: Path, kind: str) -> None:
    """The target unmaps the agent's memory, or exits."""
    with running(hostile, kind) as process:
        done, took = measure(process.pid, "-d", "0.8")
        assert done.returncode in (0, 1), done.stderr
        assert took < 60


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", ["exit", "exec", "kill"])
def test_it_goes_in_the_middle_of_the_attach(hostile: Path, kind: str) -> None:
    for delay in (0, 5000):
        with running(hostile, kind, delay=delay) as process:
            done, took = measure(process.pid, "-d", "0.3")
            assert done.returncode in (0, 1), done.stderr
            assert took < 60


def test_strict_seccomp(hostile: Path) -> None:
    with running(hostile, "strict") as process:
        time.sleep(0.1)
        done, _ = measure(process.pid, "-d", "0.3")
        assert done.returncode == 1
        assert "is in strict seccomp mode, which allows almost no system call; " in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not ROOT, reason="needs root")
def test_a_filter_that_kills(hostile: Path) -> None:
    """Systemd's filters kill for system calls that are not on their list. The tool does not attach to such a process."""
    with running(hostile, "deadly") as process:
        done, _ = measure(process.pid, "-d", "0.3")
        assert done.returncode == 1
        assert (
            "has a seccomp filter that would kill it for a system call of the agent (socketpair)"
            in done.stderr
        )
        assert done.stderr.count("\n") == 1
        assert ends(process) == "did not"


@pytest.mark.skipif(not shutil.which("gdb"), reason="needs gdb")
def test_a_debugger_is_there(hostile: Path) -> None:
    with running(hostile, "nothing") as process:
        debugger = subprocess.Popen(
            ["gdb", "-q", "-nx", "-batch", "-p", str(process.pid), "-ex", "shell sleep 100"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            until = time.monotonic() + 60
            while traceable.status(process.pid)["TracerPid"] == "0" and time.monotonic() < until:
                time.sleep(0.05)
            done, _ = measure(process.pid, "-d", "0.3")
        finally:
            os.killpg(debugger.pid, signal.SIGKILL)
            debugger.wait()
        assert done.returncode == 1 and re.search(
            r"is already traced by gdb \(pid \d+\); stop that first", done.stderr
        )


# --- what agents could say ---


def connected(frames: list[bytes]) -> list[str]:
    """Return the notices of a session that gets these frames from a process of the user, each with a file and on a new connection."""
    said: list[str] = []
    with fake_tool.session(["sleep", "60"], note=said.append, wanted=()) as session:
        assert session._child is not None
        try:
            for frame in frames:
                with socket.socket(socket.AF_UNIX) as peer, contextlib.suppress(OSError):
                    peer.settimeout(60)
                    peer.connect("\0" + session.socket_name[1:])
                    file = os.memfd_create("lies")
                    os.write(file, b"\xff" * 4096)
                    try:
                        socket.send_fds(peer, [hello() + frame], [file])
                    finally:
                        os.close(file)
                    peer.shutdown(socket.SHUT_WR)
                    while peer.recv(1 << 16):
                        pass
            assert session._server._thread.is_alive()
        finally:
            session._child.send_signal(signal.SIGKILL)
        for _ in session.intervals():
            pass
        session.summary()
    return said


def hello() -> bytes:
    name = b"\x1b]0;evil\7"
    return protocol.frame(Message.HELLO, struct.pack("<3I", PROTOCOL_VERSION, 0, len(name)) + name + bytes(4))


# Those of agents.
KINDS = [
    kind for kind in Message if kind < Message.WELCOME or kind in (Message.NO_ROOM, Message.KERNEL_FAILED)
]


def test_every_message_can_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send each kind of message with random and extreme numbers, false counts, unterminated strings, too short and too long."""
    monkeypatch.setattr("gpubpf.session.session.ANSWER_WAIT", 0.1)
    monkeypatch.setattr("gpubpf.session.session.DRAIN_WAIT", 0.1)
    chance = random.Random(5)
    limits = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 14, 1 << 20]
    frames = []
    for kind in (*KINDS, 0, Message.WELCOME, 200):
        for _ in range(12):
            words = [
                chance.choice(limits) if chance.random() < 0.7 else chance.getrandbits(32) for _ in range(40)
            ]
            payload = struct.pack("<40I", *words)[: chance.choice((0, 3, 24, 60, 100, 160))]
            if chance.random() < 0.3:
                payload += struct.pack("<I", 50_000) + b"\x1b[2J\n" * 10_000
            frames.append(protocol.frame(kind, payload))
    before = len(os.listdir("/proc/self/fd"))
    said = connected(frames)
    assert len(said) < 60, said
    for line in said:
        assert "internal error" not in line, line
        assert cli.printable(line).isprintable() and len(line) < 2000
    assert len(os.listdir("/proc/self/fd")) <= before + 2

"""A tool that is killed (SIGKILL) at any step of tracing a program: the program goes on as if nothing had happened.

A child process makes each step, which is a ptrace request or a write to the program's memory, and kills itself at the N-th: before
each step, and also right after each that lets the program run. The program is attach/steps.c.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpubpf.attach import loading

HERE = Path(__file__).parent
KINDS = "read poll rawpoll ppoll epoll futex nanosleep compute".split()
# A thread is held in a function, not in a system call.
CASES = [(work, kind) for work in ("inject", "stop") for kind in KINDS] + [
    ("hold", "compute"),
    ("again", "poll"),
]

pytestmark = pytest.mark.skipif(
    os.uname().machine != "x86_64" or not shutil.which("gcc"), reason="needs gcc on x86-64"
)

# Reads lines "WORK PID STEP"; answers each with the exit status of a child that does the work and is killed at that step.
KILLED = """
import contextlib, os, sys, time
from pathlib import Path
from gpubpf.attach import borrow, loading
from gpubpf.attach.borrow import ProcessCode
from gpubpf.process import address_space, ptrace; from gpubpf.kernel import fresh_thread
from gpubpf.process.address_space import Memory
from gpubpf.kernel.syscalls import NUMBERS

LIBRARY = Path(sys.argv[1])
RUNS = {ptrace._INTERRUPT, ptrace._SYSCALL, ptrace._CONT, ptrace._DETACH}
left = 0
borrow.TURNS = 20  # so that a held thread is released soon

def step():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), 9)

def counted(real):
    def call(first, *rest):
        step()
        result = real(first, *rest)
        if first in RUNS:
            step()
        return result
    return call

def inject(pid):
    assert loading.inject(pid, LIBRARY, "entry", "abc").wait() == 3

def stop(pid):
    def both():
        with contextlib.suppress(ptrace.NotStopped), ptrace.stopped(pid):
            pass
    fresh_thread.run(both, "stop")

def again(pid):  # after an earlier stop: the call is restart_syscall
    global left
    steps, left = left, 0
    while not (call := ptrace.blocked_call(pid, pid)) or call.number != NUMBERS["restart_syscall"]:
        assert not ptrace.is_dead(pid, pid)
        stop(pid)  # before, the program may not have been in the call
        time.sleep(0.001)
    left = steps
    inject(pid)

def hold(pid):
    def held():
        with Memory(pid) as memory:
            code = ProcessCode(pid, memory, address_space.mappings(pid))
            thread = ptrace.TracedThread(pid, pid)
            thread.interrupt()
            assert thread.wait(time.monotonic() + 5)
            if not borrow.make_worker_and_wait(thread, memory, code, code.functions(pid), False):
                thread.release()
                os._exit(3)
    fresh_thread.run(held, "hold")

works = {"inject": inject, "again": again, "stop": stop, "hold": hold}
ptrace._ptrace = counted(ptrace._ptrace)
Memory.write = counted(Memory.write)
for line in sys.stdin:
    work, pid, at = line.split()
    child = os.fork()
    if child == 0:
        left = int(at)
        try:
            works[work](int(pid))
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("steps")
    for command in (
        ["-shared", "-fPIC", HERE / "library.c", "-o", at / "library.so"],
        ["-mavx2", "-mno-red-zone", HERE / "steps.c", "-o", at / "steps"],
    ):
        subprocess.run(["gcc", "-O1", "-w", "-pthread", *command], check=True)
    return at


@pytest.fixture(scope="module")
def tool(built: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": str(Path(loading.__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, built / "library.so"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment,
    ) as process:  # fmt: skip
        yield process


def ask(process: subprocess.Popen[bytes], line: str) -> str:
    """Return the answer to a line; "": the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{line}\n".encode())
    return process.stdout.readline().decode()


def end_of(program: subprocess.Popen[bytes]) -> str:
    """Talk with a program for a while. Return what is wrong with it."""
    for signals in range(3):  # the first line comes before any signal
        if signals:
            os.kill(program.pid, signal.SIGUSR1)
        expected = f"{signals} line {signals}\n"
        if (answer := ask(program, f"line {signals}")) != expected:
            break
    out, error = program.communicate()
    if answer == expected and program.returncode == 0 and not out:
        return ""
    return f"{program.returncode}, {answer!r} is not {expected!r}, {error.decode()}"


@pytest.mark.every(12)
@pytest.mark.parametrize(("work", "kind"), CASES)
def test_the_program_goes_on(built: Path, tool: subprocess.Popen[bytes], work: str, kind: str) -> None:
    faults = []
    step, refused = 1, 0
    while step < 1000 and refused < 100:
        with subprocess.Popen(
            [built / "steps", kind],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
        ) as program:  # fmt: skip
            timer = threading.Timer(60, program.kill)  # it may not answer
            timer.start()
            assert program.stdout is not None and program.stdout.readline() == b"ready\n"
            status = int(ask(tool, f"{work} {program.pid} {step}"))
            if found := end_of(program):
                faults.append(f"step {step}: {found}")
            timer.cancel()
        if status == 3:  # it was stopped where it cannot be held
            refused += 1
        elif status == -signal.SIGKILL:
            step += 1
        else:
            break
    assert status == 0 and step > (5 if work == "stop" else 20)
    assert not faults, "\n".join(faults)

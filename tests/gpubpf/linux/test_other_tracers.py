"""Other tracers' uprobes on functions that the agent hooks: set and taken out before or after, they and we count right."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpubpf import agent, elf
from gpubpf.ebpf import bytecode
from gpubpf.ebpf.bytecode import (
    ADD,
    ALU64,
    ATOMIC,
    ATOMIC_ADD,
    CALL,
    EXIT,
    JEQ,
    JMP,
    JNE,
    LD_IMM64,
    LDX,
    MEM,
    MOV,
    PSEUDO_MAP,
    ST,
    STX,
    Instruction,
)
from gpubpf.kernel import bpf_syscall
from gpubpf.linux.host_programs import Host
from gpubpf.process import address_space
from gpubpf.program import BPF
from gpubpf.traced import device
from gpubpf_commands import words

HERE = Path(__file__).parents[1] / "attach"
TOOL = [sys.executable, str(Path(__file__).parents[3] / "tools" / "threadhist.py")]
DRIVER = device.LIBRARIES / "libcuda.so.1"
HEADERS = [
    *sorted(Path("/usr/local").glob("cuda*/include")),
    *(Path(place) / "nvidia/cu13/include" for place in sys.path),
]
NAME = "tracedby"  # of the program, for `_program`: other tests use the driver at the same time

pytestmark = [
    pytest.mark.whole_machine,
    pytest.mark.skipif(
        os.geteuid() != 0
        or not bpf_syscall._UPROBE_TYPE.exists()
        or not DRIVER.exists()
        or not agent.LIBRARY.exists(),
        reason="needs root, a kernel with uprobes, and what script/setup builds",
    ),
]


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    headers = [d for d in HEADERS if (d / "cuda.h").exists()]
    if not headers:
        pytest.skip("needs cuda.h")
    program = tmp_path_factory.mktemp("tracers") / NAME
    command = "gcc -O1 -pthread -I{headers} {here}/loads.c -o {program} -L{place} -lcuda -Wl,-rpath,{place}"
    names = {"headers": headers[0], "here": HERE, "program": program, "place": DRIVER.parent}
    subprocess.run(words(command, **names), check=True)
    return program


def _program(count: int) -> bytes:
    """Adds 1 to the element of a map when it is a process of that name."""
    name = int.from_bytes(NAME.encode(), "little")
    return bytecode.encode(
        [
            Instruction(ALU64 | MOV | 8, 1, 10),
            Instruction(ALU64 | ADD, 1, imm=-16),
            Instruction(ALU64 | MOV, 2, imm=16),
            Instruction(JMP | CALL, imm=16),  # bpf_get_current_comm
            Instruction(LDX | MEM | 0x18, 2, 10, offset=-16),
            Instruction(LD_IMM64, 3, imm=name),
            Instruction(0),
            Instruction(JMP | JNE | 8, 2, 3, offset=9),
            Instruction(ST | MEM, 10, offset=-4),
            Instruction(LD_IMM64, 1, PSEUDO_MAP, map="count"),
            Instruction(0),
            Instruction(ALU64 | MOV | 8, 2, 10),
            Instruction(ALU64 | ADD, 2, imm=-4),
            Instruction(JMP | CALL, imm=1),  # bpf_map_lookup_elem
            Instruction(JMP | JEQ, offset=2),
            Instruction(ALU64 | MOV, 1, imm=1),
            Instruction(STX | ATOMIC | 0x18, 0, 1, imm=ATOMIC_ADD),
            Instruction(ALU64 | MOV),
            Instruction(JMP | EXIT),
        ],
        {"count": count},
    )


class Uprobes:
    """What any tracer would set: a program at the beginning of functions of the driver."""

    def __init__(self, *functions: str) -> None:
        with address_space.Memory(os.getpid()) as memory:
            import ctypes

            ctypes.CDLL(str(DRIVER))
            inode = DRIVER.stat().st_ino
            library = next(
                x
                for x in address_space.libraries(address_space.mappings(os.getpid()))
                if x.mappings[0].file[1] == inode
            )
            symbols = elf.exports(memory, library.base)
            self.count = bpf_syscall.create_map(bpf_syscall.ARRAY, 4, 8, 1)
            self.program = bpf_syscall.load_program(bpf_syscall.KPROBE, _program(self.count), name="other")
            self.events = []
            for name in functions:
                at = symbols[name].address
                m = next(m for m in library.mappings if m.start <= at < m.end)
                self.events.append(
                    bpf_syscall.attach_uprobe(self.program, str(DRIVER.resolve()), at - m.start + m.offset)
                )

    @property
    def hits(self) -> int:
        return int.from_bytes(bpf_syscall.lookup(self.count, bytes(4), 8) or b"", "little")

    def wait(self, hits: int) -> None:
        """Until there were so many more."""
        wanted, until = self.hits + hits, time.monotonic() + 100
        while self.hits < wanted:
            assert time.monotonic() < until, "no hits"
            time.sleep(0.02)

    def remove(self) -> None:
        bpf_syscall.close_all(self.events)
        self.events = []

    def close(self) -> None:
        self.remove()
        os.close(self.program)
        os.close(self.count)


@contextlib.contextmanager
def uprobes(*functions: str) -> Iterator[Uprobes]:
    made = Uprobes(*functions)
    try:
        yield made
    finally:
        made.close()


# Functions whose first instructions are of every kind that compilers make.
FUNCTIONS = (
    "cuLaunchKernel",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuMemcpyDtoH_v2",
    "cuStreamSynchronize",
    "cuStreamCreate",
    "cuMemAlloc_v2",
    "cuCtxSetCurrent",
)


@contextlib.contextmanager
def bounded(process: subprocess.Popen[str]) -> Iterator[None]:
    """It is killed at the end, and when it takes too long."""
    timer = threading.Timer(200, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


@contextlib.contextmanager
def running(*command: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [str(c) for c in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **device.Device("sim").environment},
    )
    with bounded(process):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


@contextlib.contextmanager
def tool(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A tool that is attached."""
    process = subprocess.Popen(
        [*TOOL, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with bounded(process):
        assert process.stderr is not None
        while "attached to" not in (line := process.stderr.readline()):
            assert line, "it ended"
        yield process


def results(out: str) -> tuple[dict[str, int], dict[str, int]]:
    """The kernel's record, and the summary's."""
    records = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    kernels = [r for r in records if r["type"] == "kernel"]
    return kernels[-1] if kernels else {}, next(r for r in records if r["type"] == "summary")


def changed_bytes(pid: int) -> list[tuple[int, int, int]]:
    """Of the driver's code: (offset in the file, there, in memory), but for cuInit, where who watches the machine has a breakpoint."""
    changed = []
    with open(DRIVER, "rb") as file:
        driver = elf.LoadedFile(file.fileno())
        init = driver.offset(elf.exports(driver)["cuInit"].address)
    with address_space.Memory(pid) as memory:
        for m in address_space.mappings(pid):
            if m.code and re.search(r"/libcuda\.so", m.path):
                with open(m.path, "rb") as file:
                    expected = os.pread(file.fileno(), m.end - m.start, m.offset)
                held = memory.read(m.start, len(expected))
                pairs = enumerate(zip(expected, held, strict=True), m.offset)
                changed += [(at, a, b) for at, (a, b) in pairs if a != b and (at, b) != (init, 0xCC)]
    return changed


def ends_well(process: subprocess.Popen[str]) -> int:
    """It checked its results to the end. Its launches of fresh kernels."""
    out, error = process.communicate("\n", timeout=100)
    assert process.returncode == 0, error
    return int(out.split()[-2])


@pytest.mark.every(3)
@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_a_command(loads: Path, when: str) -> None:
    with (
        uprobes(*FUNCTIONS if when != "after" else ()) as first,
        tool("--kernel", "fresh", "--json", "--", loads, 2) as process,
    ):
        with uprobes(*FUNCTIONS if when != "before" else ()) as second:
            (first if when == "before" else second).wait(300)
            if when == "both":
                first.remove()
                second.wait(100)
        time.sleep(0.1)
        out, error = process.communicate("\n", timeout=100)
    assert process.returncode == 0, error
    kernel, summary = results(out)
    assert summary["launches_instrumented"] == summary["launches_matched"] == kernel["launches"] > 10
    assert kernel["runs"] == 128 * kernel["launches"]


@pytest.mark.every(2)
@pytest.mark.parametrize("removed", ["before", "after"])
def test_a_process(loads: Path, removed: str) -> None:
    """They are there before the attach, and more come after it; they go before, or after, we do."""
    with running(loads, 2) as process, uprobes(*FUNCTIONS[::2]) as first:
        with tool("--kernel", "fresh", "--json", "-p", process.pid) as measuring:
            first.wait(200)
            with uprobes(*FUNCTIONS[1::2]) as second:
                second.wait(100)
                if removed == "before":
                    first.remove()
                    second.remove()
                    time.sleep(0.2)
                measuring.terminate()
                out, error = measuring.communicate(timeout=100)
        assert measuring.returncode == 0, error
        kernel, summary = results(out)
        assert kernel["launches"] == summary["launches_instrumented"] > 5
        first.remove()
        until = time.monotonic() + 60  # the kernel takes them out when it comes to it
        while (changed := changed_bytes(process.pid)) and time.monotonic() < until:
            time.sleep(0.05)
        assert changed == []
        assert ends_well(process) > 20


def test_a_tool_that_dies_leaves_nothing_that_a_uprobe_would_break(loads: Path) -> None:
    with running(loads, 2) as process:
        with tool("--kernel", "fresh", "-p", process.pid) as measuring:
            time.sleep(0.2)
            measuring.kill()
        with uprobes(*FUNCTIONS) as other:
            other.wait(100)
        time.sleep(0.1)
        assert ends_well(process) > 20


CALLS = r"""
#include <uapi/linux/ptrace.h>
BPF_ARRAY(entered, u64, 16);
BPF_ARRAY(returned, u64, 16);
BPF_HASH(targets, u32, u8, 16);   /* others may use the driver, too */
struct call { u64 thread, function; };   /* the agent's own calls begin after the probe at the entry */
BPF_TABLE("lru_hash", struct call, u8, under_way, 1024);
int on_call(struct pt_regs *ctx) {
    int function = bpf_get_attach_cookie(ctx);
    u32 pid = bpf_get_current_pid_tgid() >> 32;
    if (!targets.lookup(&pid))
        return 1;
    struct call call = {bpf_get_current_pid_tgid(), function};
    u8 one = 1;
    under_way.update(&call, &one);
    u64 *n = entered.lookup(&function);
    if (n)
        __sync_fetch_and_add(n, 1);
    return 0;
}
int on_return(struct pt_regs *ctx) {
    int function = bpf_get_attach_cookie(ctx);
    struct call call = {bpf_get_current_pid_tgid(), function};
    if (!under_way.lookup(&call))
        return 0;
    under_way.delete(&call);
    u64 *n = returned.lookup(&function);
    if (n && PT_REGS_RC(ctx) == 0)
        __sync_fetch_and_add(n, 1);
    return 0;
}
"""


@pytest.mark.every(2)
@pytest.mark.parametrize("first", ["hooks", "probes"])
def test_our_own_at_the_functions_that_the_agent_hooks(loads: Path, first: str) -> None:
    """Entries and returns of all of them, beside the hooks: each call is seen once, and goes well."""
    b = BPF(text=CALLS)
    b.attach_uprobe(str(DRIVER), FUNCTIONS, fn_name="on_call")
    b.attach_uprobe(str(DRIVER), FUNCTIONS, fn_name="on_return", ret=True)
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(running(loads, 2))

        def attach() -> Host:
            made = b.host(None, notes.append)
            assert made is not None
            made.update("targets", process.pid.to_bytes(4, "little"), b"\1")
            return stack.enter_context(made)

        host = attach() if first == "probes" else None
        with tool("--kernel", "fresh", "--json", "-p", process.pid) as measuring:
            host = host or attach()
            before = host.items("entered")["value"][:4]  # others are called once
            until = time.monotonic() + 100
            while (more := host.items("entered")["value"][:4] - before).min() < 100:
                assert time.monotonic() < until, (dict(zip(FUNCTIONS, more, strict=False)), notes)
                time.sleep(0.05)
            measuring.terminate()
            out, error = measuring.communicate(timeout=100)
        assert measuring.returncode == 0, error
        kernel, summary = results(out)
        assert kernel["launches"] == summary["launches_instrumented"] > 5
        assert ends_well(process) > 20
        entered, returned = host.items("entered")["value"], host.items("returned")["value"]
        # A call that was under way when the probes were put in may have a return that is seen alone, or the other way round.
        assert abs(entered.astype(int) - returned.astype(int)).max() <= 2
    assert notes == []


def test_a_process_whose_calls_are_all_traced(loads: Path) -> None:
    """As a tracer of every call does it: each function has a breakpoint, also those that only pass on their arguments."""
    with open(DRIVER, "rb") as file:
        names = [name for name in elf.exports(elf.LoadedFile(file.fileno())) if name.startswith("cu")]
    assert len(names) > 500
    b = BPF(text="#include <uapi/linux/ptrace.h>\nint nothing(struct pt_regs *ctx) { return 0; }")
    b.attach_uprobe(str(DRIVER), names, fn_name="nothing", optional=True)
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(running(loads, 1))
        host = b.host(None, lambda text: None)
        assert host is not None and host.uprobes is not None
        stack.enter_context(host)
        assert len(host.uprobes.placed[0].functions) > 500
        with tool("--kernel", "fresh", "--json", "-p", process.pid) as measuring:
            time.sleep(0.5)
            measuring.terminate()
            out, error = measuring.communicate(timeout=100)
        assert measuring.returncode == 0, error
        kernel, summary = results(out)
        assert kernel["launches"] == summary["launches_instrumented"] > 5
        assert ends_well(process) > 20

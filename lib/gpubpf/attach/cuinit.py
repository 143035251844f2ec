"""Who begins to use the CUDA driver: eBPF programs on the `cuInit` of driver files (`Watch`).

A uprobe is on a file, so that it is met in every process that maps it, of whatever name space. The first time that a process comes by,
its thread is told of through a ring buffer, and waits right there, in the program, until the tool has stopped it (`go`): so it stands
at the entry of cuInit, where it holds no lock, and has run nothing of the driver. A wait is `WAIT_NS` at most: should the tool
be slow, or gone, the thread goes on. A process that the tool is done with (`done`) passes with one look into a hash; one that executes
another program, or ends, is told of and forgotten: by programs at raw tracepoints, since at those with
records the kernel leaves programs out at times, and who is not forgotten would not be told of again, nor who gets its number.

The programs are assembled here, so that nothing is compiled at start. They wait in a loop that the verifier follows to its end,
called anew by tail calls: that takes no newer kernel than the ring buffer does (Linux 5.8).
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass

from gpubpf.ebpf import bytecode
from gpubpf.ebpf.bytecode import (  # fmt: skip
    ADD,
    ALU64,
    ATOMIC,
    ATOMIC_ADD,
    CALL,
    EXIT,
    JA,
    JEQ,
    JGT,
    JMP,
    JNE,
    LD_IMM64,
    LDX,
    LSH,
    MEM,
    MOV,
    OR,
    PSEUDO_MAP,
    RSH,
    ST,
    STX,
    SUB,
    Instruction,
)
from gpubpf.linux import bpf_syscall
from gpubpf.linux.bpf_syscall import ARRAY, HASH, KPROBE, LRU_HASH, PROG_ARRAY, RAW_TRACEPOINT, RINGBUF, Ring

WAIT_NS = 4_000_000  # a thread waits for the tool at the entry of cuInit
_RING = 1 << 18  # bytes; 4000 events
_PROCESSES = 1 << 16  # that are remembered
_TURNS = 2500  # of the waiting loop, which is called anew 33 times at most: the verifier follows 8192 jumps

CAME, EXECUTED, ENDED = range(3)
_COMING, _DONE = 1, 2
_EVENT = struct.Struct("<QIIQQ16sI4xQ")
_W, _DW = 0x00, 0x18  # of 4, of 8 bytes
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO
_IP, _SP = 128, 152  # in struct pt_regs
_lookup, _update, _delete, _ktime, _this_cpu, _tail_call, _pid_tgid, _comm = 1, 2, 3, 5, 8, 12, 14, 16
_read_user, _ns_pid_tgid, _reserve, _submit = 112, 120, 131, 132


@dataclass(frozen=True)
class Event:
    """What happened at `ts` (ns, CLOCK_MONOTONIC). Of one that came: `entry` is cuInit, at `sp` lies its return address, `back`."""

    kind: int
    ts: int
    pid: int
    tid: int
    sp: int
    back: int
    entry: int
    comm: str


class _Assembly:
    """Instructions with names for where jumps go."""

    def __init__(self) -> None:
        self._code: list[Instruction | tuple[int, int, int, int, str]] = []
        self._labels: dict[str, int] = {}

    def op(self, opcode: int, dst: int = 0, src: int = 0, offset: int = 0, imm: int = 0) -> None:
        self._code.append(Instruction(opcode, dst, src, offset, imm))

    def move(self, dst: int, src: int) -> None:
        self.op(ALU64 | MOV | 8, dst, src)

    def set(self, dst: int, value: int) -> None:
        self.op(ALU64 | MOV, dst, imm=value)

    def constant(self, dst: int, value: int) -> None:
        self._code += [Instruction(LD_IMM64, dst, imm=value), Instruction(0)]

    def map(self, dst: int, name: str) -> None:
        self._code += [Instruction(LD_IMM64, dst, PSEUDO_MAP, map=name), Instruction(0)]

    def stack(self, dst: int, offset: int) -> None:
        self.move(dst, 10)
        self.op(ALU64 | ADD, dst, imm=offset)

    def call(self, helper: int) -> None:
        self.op(JMP | CALL, imm=helper)

    def jump(self, operation: int, label: str, dst: int = 0, imm: int = 0) -> None:
        self._code.append((JMP | operation, dst, 0, imm, label))

    def jump_to(self, operation: int, label: str, dst: int, src: int) -> None:
        self._code.append((JMP | operation | 8, dst, src, 0, label))

    def label(self, name: str) -> None:
        self._labels[name] = len(self._code)

    def leave(self) -> None:
        self.set(0, 0)
        self.op(JMP | EXIT)

    def bytes(self, files: dict[str, int]) -> bytes:
        code = []
        for i, item in enumerate(self._code):
            if isinstance(item, tuple):
                opcode, dst, src, imm, label = item
                item = Instruction(opcode, dst, src, self._labels[label] - i - 1, imm)
            code.append(item)
        return bytecode.encode(code, files)


def _who(a: _Assembly, unseen: str = "leave") -> None:
    """r7: process and thread, as this tool sees them. [r10-4]: process, [r10-8]: thread. `unseen`: where to go with one of whose name
    space the kernel tells nothing, as the tool is in none of the machine's first."""
    space = os.stat("/proc/self/ns/pid")
    if space.st_ino == _FIRST_PID_NAMESPACE:
        a.call(_pid_tgid)
        a.move(7, 0)
    else:
        a.op(ST | MEM | _DW, 10, offset=-16)
        a.constant(1, space.st_dev)
        a.constant(2, space.st_ino)
        a.stack(3, -16)
        a.set(4, 8)
        a.call(_ns_pid_tgid)
        a.jump(JNE, unseen, 0)
        a.op(LDX | MEM | _W, 7, 10, offset=-12)  # struct bpf_pidns_info: pid, tgid
        a.op(ALU64 | LSH, 7, imm=32)
        a.op(LDX | MEM | _W, 1, 10, offset=-16)
        a.op(ALU64 | OR | 8, 7, 1)
    a.op(STX | MEM | _W, 10, 7, offset=-8)
    a.move(8, 7)
    a.op(ALU64 | RSH, 8, imm=32)
    a.op(STX | MEM | _W, 10, 8, offset=-4)


def _tell(a: _Assembly, kind: int) -> None:
    """Sends an event; r6: when, r9: `sp`, [r10-32]: `back`, [r10-72]: `entry`."""
    a.map(1, "ring")
    a.set(2, _EVENT.size)
    a.set(3, 0)
    a.call(_reserve)
    a.jump(JEQ, "lost", 0)
    a.op(STX | MEM | _DW, 0, 6, offset=0)
    a.op(STX | MEM | _W, 0, 8, offset=12)
    a.op(STX | MEM | _W, 0, 7, offset=8)
    a.op(STX | MEM | _DW, 0, 9, offset=16)
    a.op(LDX | MEM | _DW, 1, 10, offset=-32)
    a.op(STX | MEM | _DW, 0, 1, offset=24)
    a.op(ST | MEM | _W, 0, offset=48, imm=kind)
    a.op(ST | MEM | _W, 0, offset=52)
    a.op(LDX | MEM | _DW, 1, 10, offset=-72)
    a.op(STX | MEM | _DW, 0, 1, offset=56)
    a.move(6, 0)
    a.move(1, 0)
    a.op(ALU64 | ADD, 1, imm=32)
    a.set(2, 16)
    a.call(_comm)
    a.move(1, 6)
    a.set(2, 2)  # BPF_RB_FORCE_WAKEUP
    a.call(_submit)


def _lost(a: _Assembly) -> None:
    a.label("lost")
    a.op(ST | MEM | _W, 10, offset=-16)
    a.map(1, "lost")
    a.stack(2, -16)
    a.call(_lookup)
    a.jump(JEQ, "leave", 0)
    a.set(1, 1)
    a.op(STX | ATOMIC | _DW, 0, 1, imm=ATOMIC_ADD)


def _coming(own: int, cpu: int) -> _Assembly:
    """At the entry of cuInit."""
    a = _Assembly()
    a.op(STX | MEM | _DW, 10, 1, offset=-40)
    a.op(LDX | MEM | _DW, 9, 1, offset=_SP)
    a.op(LDX | MEM | _DW, 2, 1, offset=_IP)
    a.op(STX | MEM | _DW, 10, 2, offset=-72)
    _who(a, "lost")  # /proc is looked through then
    a.jump(JEQ, "leave", 8, own)
    a.map(1, "processes")
    a.stack(2, -4)
    a.call(_lookup)
    a.jump(JEQ, "new", 0)
    a.op(LDX | MEM | _W, 1, 0)
    a.jump(JEQ, "leave", 1, _DONE)
    a.jump(JA, "thread")
    a.label("new")
    a.op(ST | MEM | _W, 10, offset=-16, imm=_COMING)
    a.map(1, "processes")
    a.stack(2, -4)
    a.stack(3, -16)
    a.set(4, 0)
    a.call(_update)
    a.label("thread")
    a.map(1, "threads")
    a.stack(2, -8)
    a.call(_lookup)
    a.jump(JEQ, "tell", 0)  # another probe on the same file, or a thread that nobody held: told once
    a.op(LDX | MEM | _DW, 1, 0)
    a.jump_to(JEQ, "leave", 1, 9)
    a.label("tell")
    a.call(_ktime)
    a.move(6, 0)
    a.op(STX | MEM | _DW, 10, 9, offset=-64)  # the thread's: where, since when, whether it is to go on
    a.op(STX | MEM | _DW, 10, 6, offset=-56)
    a.op(ST | MEM | _DW, 10, offset=-48)
    a.map(1, "threads")
    a.stack(2, -8)
    a.stack(3, -64)
    a.set(4, 0)
    a.call(_update)
    a.op(ST | MEM | _DW, 10, offset=-32)
    a.stack(1, -32)
    a.set(2, 8)
    a.move(3, 9)
    a.call(_read_user)
    _tell(a, CAME)
    a.call(_this_cpu)
    a.jump(JEQ, "leave", 0, cpu)
    a.op(LDX | MEM | _DW, 1, 10, offset=-40)
    a.map(2, "programs")
    a.set(3, 0)
    a.call(_tail_call)
    a.jump(JA, "leave")
    _lost(a)
    a.label("leave")
    a.leave()
    return a


def _waiting() -> _Assembly:
    """Until the tool says so, or for as long as may be."""
    a = _Assembly()
    a.move(6, 1)
    _who(a)
    a.map(1, "threads")
    a.stack(2, -8)
    a.call(_lookup)
    a.jump(JEQ, "leave", 0)
    a.move(8, 0)
    a.call(_ktime)
    a.op(LDX | MEM | _DW, 9, 8, offset=8)
    a.op(ALU64 | SUB | 8, 0, 9)
    a.jump(JGT, "leave", 0, WAIT_NS)
    a.set(7, _TURNS)
    a.label("turn")
    a.op(LDX | MEM | _DW, 1, 8, offset=16)
    a.jump(JNE, "leave", 1)
    a.call(_ktime)  # takes time, 20 ns or more
    a.call(_ktime)
    a.op(ALU64 | SUB, 7, imm=1)
    a.jump(JNE, "turn", 7)
    a.move(1, 6)
    a.map(2, "programs")
    a.set(3, 0)
    a.call(_tail_call)
    a.label("leave")
    a.leave()
    return a


def _forgetting(kind: int) -> _Assembly:
    """Where a program is executed, or a thread ends."""
    a = _Assembly()
    _who(a)
    if kind == ENDED:
        a.map(1, "threads")
        a.stack(2, -8)
        a.call(_delete)
    a.map(1, "processes")
    a.stack(2, -4)
    a.call(_lookup)
    a.jump(JEQ, "leave", 0)
    if kind == ENDED:  # of its first thread: what others do then, nobody can reach
        a.op(LDX | MEM | _W, 1, 10, offset=-8)
        a.jump_to(JNE, "leave", 1, 8)
    a.map(1, "processes")
    a.stack(2, -4)
    a.call(_delete)
    a.call(_ktime)
    a.move(6, 0)
    a.set(9, 0)
    a.op(ST | MEM | _DW, 10, offset=-32)
    a.op(ST | MEM | _DW, 10, offset=-72)
    _tell(a, kind)
    a.jump(JA, "leave")
    _lost(a)
    a.label("leave")
    a.leave()
    return a


class Watch:
    """The programs, loaded. `without`: a process that is not told of. `cpu`: where who reads the events runs, before all others: a
    thread that comes there need not wait, as it cannot go on. Raises OSError where the kernel, or the lack of a privilege, forbids
    it."""

    def __init__(self, without: int, cpu: int) -> None:
        self._files = contextlib.ExitStack()
        self._placed: list[int] = []
        with contextlib.ExitStack() as stack:
            self._maps = {
                name: self._keep(
                    stack, bpf_syscall.create_map(kind, key, value, entries, name=f"gpubpf_{name}")
                )
                for name, kind, key, value, entries in (
                    ("processes", LRU_HASH, 4, 4, _PROCESSES),
                    ("threads", HASH, 4, 24, 1 << 12),
                    ("ring", RINGBUF, 0, 0, _RING),
                    ("lost", ARRAY, 4, 8, 1),
                    ("programs", PROG_ARRAY, 4, 4, 1),
                )
            }
            waiting = self._load(stack, KPROBE, _waiting(), "gpubpf_wait")
            bpf_syscall.update(self._maps["programs"], bytes(4), struct.pack("<I", waiting))
            self._program = self._load(stack, KPROBE, _coming(without, cpu), "gpubpf_cuinit")
            for kind, name in (EXECUTED, "exec"), (ENDED, "exit"):
                program = self._load(stack, RAW_TRACEPOINT, _forgetting(kind), f"gpubpf_{name}")
                self._keep(stack, bpf_syscall.attach_raw_tracepoint(program, f"sched_process_{name}"))
            self._ring = Ring(self._maps["ring"], _RING)
            stack.callback(self._ring.close)
            self._files = stack.pop_all()

    @staticmethod
    def _keep(stack: contextlib.ExitStack, file: int) -> int:
        stack.callback(os.close, file)
        return file

    def _load(self, stack: contextlib.ExitStack, kind: int, code: _Assembly, name: str) -> int:
        return self._keep(stack, bpf_syscall.load_program(kind, code.bytes(self._maps), name=name))

    def close(self) -> None:
        """Takes everything out; threads that wait go on."""
        bpf_syscall.close_all(self._placed)
        self._files.close()

    @property
    def file(self) -> int:
        """Becomes readable when there are events."""
        return self._maps["ring"]

    def place(self, path: str, offset: int) -> None:
        """On the function at `offset` in the file. Raises OSError."""
        self._placed.append(bpf_syscall.attach_uprobe(self._program, path, offset))

    def events(self) -> list[Event]:
        """Those that were not read yet, in order."""
        found = []
        for record in self._ring.records():
            if len(record) == _EVENT.size:
                ts, tid, pid, sp, back, comm, kind, entry = _EVENT.unpack(record)
                name = comm.partition(b"\0")[0].decode(errors="replace")
                found.append(Event(kind, ts, pid, tid, sp, back, entry, name))
        return found

    def go(self, tid: int) -> None:
        """The thread does not wait (any more)."""
        with contextlib.suppress(FileNotFoundError):  # it ended
            bpf_syscall.update(
                self._maps["threads"], struct.pack("<I", tid), struct.pack("<QQQ", 0, 0, 1), existing=True
            )

    def forget(self, tid: int) -> None:
        """The next cuInit of this thread is told of, if its process is not `done`."""
        with contextlib.suppress(FileNotFoundError):
            bpf_syscall.delete(self._maps["threads"], struct.pack("<I", tid))

    def follow(self, pid: int) -> None:
        """It is told when the process executes another program, or ends, as of one that came."""
        self._remember(pid, _COMING)

    def done(self, pid: int) -> None:
        """The process is not told of any more, until it executes another program, or ends, which is."""
        self._remember(pid, _DONE)

    def _remember(self, pid: int, state: int) -> None:
        bpf_syscall.update(self._maps["processes"], struct.pack("<I", pid), struct.pack("<I", state))

    def leave(self, pid: int) -> None:
        """The process that this number was `done` for executed another program, or has ended: who has it now is told of."""
        key = struct.pack("<I", pid)
        if bpf_syscall.lookup(self._maps["processes"], key, 4) == struct.pack("<I", _DONE):
            with contextlib.suppress(FileNotFoundError):
                bpf_syscall.delete(self._maps["processes"], key)

    @property
    def lost(self) -> int:
        """How many came that could not be told of."""
        value = bpf_syscall.lookup(self._maps["lost"], bytes(4), 8)
        return int.from_bytes(value or b"", "little")

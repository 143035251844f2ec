"""The first gate: the kernel's own verifier, on a stand-in of the device program.

The stand-in is a TRACEPOINT program, the type that accepts every context offset but 0 to 7: so the context is moved by 8, and its
size is the second gate's to check. Helpers that the kernel does not know become known ones with the same argument types, or
plain stores.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import CONTEXTS, Instruction, Program, encode
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.errors import VerifyError
from gpubpf.process.libc import bpf
from gpubpf.verify.values import Checked, place_of

_MAP_CREATE, _PROG_LOAD = 0, 5
_TRACEPOINT = 5
_CONTEXT_SHIFT = 8
_LOG = 1 << 20
_KTIME, _PRANDOM, _PRINTK = 5, 7, 6
# Helpers that take no addresses, by one that takes nothing and gives the same kind of number.
_STAND_INS = {
    502: _KTIME,
    506: _PRANDOM,
    602: _PRANDOM,
    603: _PRANDOM,
    604: _PRANDOM,
    605: _KTIME,
    606: _KTIME,
    608: _PRANDOM,
    609: _PRANDOM,
    610: _PRANDOM,
    611: _PRANDOM,
    612: _PRANDOM,
    613: _KTIME,
    614: _KTIME,
    615: _PRANDOM,
    616: _PRANDOM,
    617: _PRANDOM,
}
_MAX = 607  # becomes a load and a store
_OUT_POINTERS = (503, 504, 505, 601)


def check(program: Program, checked: Checked) -> str | None:
    """Asks the kernel about a program that the second gate has followed (which tells where it reads its context).

    Returns the kernel's release, or None where it cannot be asked for want of CAP_BPF. Raises VerifyError.
    """
    code, origin = stand_in(checked)
    with ExitStack() as stack:
        fds: dict[str, int] = {}
        try:
            for name in sorted({i.map for i in code if i.map is not None}):
                fds[name] = stack.enter_context(_map(program.maps[name], _is_perf(checked, name)))
            _load(encode(code, fds), b"")
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOSYS, errno.ENOMEM):
                return None
            raise VerifyError(_message(program, checked, _log_of(encode(code, fds)), origin, error)) from None
    return platform.release()


def stand_in(checked: Checked) -> tuple[list[Instruction], list[int]]:
    """The stand-in's instructions, and for each the number of the one that it stands for."""
    code = checked.function.instructions
    fields = CONTEXTS[checked.function.point]
    context = {
        pc: fields[access.name][0] + access.offset
        for (_, pc), access in checked.accesses.items()
        if access.kind == "context"
    }
    texts = {pc: call.size for (_, pc), call in checked.calls.items() if call.helper == 501}
    # Below all that the program uses: an unknown number, and the context's address as it came.
    slot = (checked.stack_low & ~7) - 16
    room = slot >= -b.STACK_SIZE
    moved = {
        pc for pc, at in context.items() if at != code[pc].offset
    }  # the kernel wants the address as it came
    unknown = room and (bool(moved) or any(_is_out(i) for i in code))
    made: list[Instruction] = []
    origin: list[int] = []
    start: dict[int, int] = {}

    def put(pc: int, *instructions: Instruction) -> None:
        made.extend(instructions)
        origin.extend([pc] * len(instructions))

    if unknown:
        put(
            0,
            Instruction(b.ALU64 | b.MOV | 8, 6, 1),
            Instruction(b.JMP | b.CALL, imm=_PRANDOM),
            Instruction(b.STX | b.MEM | 0x18, 10, 0, slot),
            Instruction(b.STX | b.MEM | 0x18, 10, 6, slot + 8),
            Instruction(b.ALU64 | b.MOV | 8, 1, 6),
        )
    entries = {0} | {
        pc + 1 + i.imm for pc, i in enumerate(code) if i.opcode == b.JMP | b.CALL and i.src == b.PSEUDO_CALL
    }
    inside_main = True
    for pc, i in enumerate(code):
        start[pc] = len(made)
        inside_main = inside_main and (pc == 0 or pc not in entries)
        if pc in moved and unknown and inside_main:
            put(pc, Instruction(b.LDX | b.MEM | 0x18, i.dst, 10, slot + 8))
            i = replace(i, src=i.dst, offset=context[pc])
        if pc in context:
            i = replace(i, offset=i.offset + _CONTEXT_SHIFT)
        if _is_out(i):
            if unknown and inside_main:
                put(pc, Instruction(b.LDX | b.MEM | 0x18, 0, 10, slot))
                put(pc, *(Instruction(b.STX | b.MEM | 0x18, register, 0) for register in (1, 2, 3)))
            else:
                put(pc, *(Instruction(b.ST | b.MEM | 0x18, register) for register in (1, 2, 3)))
            put(pc, Instruction(b.JMP | b.CALL, imm=_PRANDOM))  # a call leaves nothing in r1 to r5
        elif i.opcode == b.JMP | b.CALL and i.src == 0 and i.imm == _MAX:
            put(pc, Instruction(b.LDX | b.MEM | 0x18, 0, 1), Instruction(b.STX | b.MEM | 0x18, 1, 2))
            put(pc, Instruction(b.JMP | b.CALL, imm=_KTIME))
        elif pc in texts:
            put(pc, Instruction(b.ALU64 | b.MOV, 2, imm=texts[pc]), replace(i, imm=_PRINTK))
        elif i.opcode == b.JMP | b.CALL and i.src == 0 and i.imm in _STAND_INS:
            put(pc, replace(i, imm=_STAND_INS[i.imm]))
        else:
            put(pc, i)
    start[len(code)] = len(made)
    for at, i in enumerate(made):
        pc, op = origin[at], i.opcode & 0xF0
        if i.cls not in (b.JMP, b.JMP32) or op == b.EXIT or i is not code[pc]:
            continue
        if op == b.CALL:
            if i.src == b.PSEUDO_CALL:
                made[at] = replace(i, imm=start[pc + 1 + i.imm] - at - 1)
        elif i.opcode == 0x06:
            made[at] = replace(i, imm=start[pc + 1 + i.imm] - at - 1)
        else:
            made[at] = replace(i, offset=start[pc + 1 + i.offset] - at - 1)
    return made, origin


def _is_out(i: Instruction) -> bool:
    return i.opcode == b.JMP | b.CALL and i.src == 0 and i.imm in _OUT_POINTERS


def _is_perf(checked: Checked, name: str) -> bool:
    return any(call.helper == 25 and call.map == name for call in checked.calls.values())


@contextmanager
def _map(definition: MapDefinition, perf: bool) -> Iterator[int]:
    """A kernel map with the sizes that the verifier asks for, and no more memory than it must have."""
    key, value, entries = definition.key_size, definition.value_size, min(definition.max_entries, 1024)
    kind, flags = 2, 0
    if definition.kind == "hash":
        kind, flags = 1, 1  # BPF_F_NO_PREALLOC
    elif definition.kind == "ringbuf":
        kind, key, value, entries = (4, 4, 4, 1) if perf else (27, 0, 0, 4096)
    fd = bpf(_MAP_CREATE, struct.pack("<5I", kind, key, value, max(entries, 1), flags))[0]
    try:
        yield fd
    finally:
        os.close(fd)


def _load(code: bytes, log: bytes | ctypes.Array[ctypes.c_char]) -> None:
    instructions = ctypes.create_string_buffer(code, len(code))
    license_ = ctypes.create_string_buffer(b"GPL")
    attributes = struct.pack(
        "<2I2Q2IQ",
        _TRACEPOINT,
        len(code) // 8,
        ctypes.addressof(instructions),
        ctypes.addressof(license_),
        1 if log else 0,
        len(log),
        ctypes.addressof(log) if isinstance(log, ctypes.Array) else 0,
    )
    os.close(bpf(_PROG_LOAD, attributes)[0])


def _log_of(code: bytes) -> str:
    log = ctypes.create_string_buffer(_LOG)
    try:
        _load(code, log)
    except OSError:
        return log.value.decode("utf-8", "replace")
    return ""


def _message(program: Program, checked: Checked, log: str, origin: list[int], error: OSError) -> str:
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith("processed ")]
    said = next(
        (line.strip() for line in reversed(lines) if not re.match(r"\d+: |;|from |\d+$|func#|R\d", line)),
        lines[-1].strip() if lines else (error.strerror or str(error)),
    )
    at = next((int(m[1]) for line in reversed(lines) if (m := re.match(r"(\d+): \(", line))), None)
    name = checked.function.name
    if at is None or at >= len(origin):
        return f"device program {name}: the kernel's verifier says: {said}; correct the C text"
    where = place_of(program, checked.function, origin[at])
    return f"{where}: the kernel's verifier says: {said}; correct the C text"

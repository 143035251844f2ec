"""Decode which memory an instruction accesses, and where it takes the address from.

accesses(instruction)       # global_load_dwordx4 v[0:3], v[4:5], off → (GcnAccess("load", "global", 16, …),)
is_memory(instruction)      # image_load … → True, although probes cannot observe its addresses
scalar_loads(…)             # the scalar loads that may read the program's memory, not the kernel's arguments

Probes do not see scalar loads, because the wave makes them as a whole. ds_read2 and similar instructions count as two accesses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set

from gpubpf.ebpf.bytecode import READS, WRITES
from gpubpf.gcn.calls import VCC, use
from gpubpf.gcn.comgr import GcnInstruction
from gpubpf.record import Record

SCRATCH = "s[0:3]"  # the scratch buffer descriptor: kernels set it here, and functions expect it here
_EFFECTS = {"load": READS, "store": WRITES, "atomic": READS | WRITES}


class GcnAccess(Record):
    """One memory access that each lane makes when it executes an instruction.

    kind     load, store or atomic
    space    global, shared or local; "generic" if the space is known only at run time
    width    bytes per lane
    vgpr     the VGPR with the address, or the first of two for a 64-bit address; None: the address is `offset` plus `sgpr`
    sgpr     the SGPR with an added offset, or the first of two with a 64-bit address; None: nothing is added
    scaled   `sgpr` is an offset into the wave's scratch memory, which its lanes share
    offset   the constant that the instruction adds
    """

    kind: str
    space: str
    width: int
    vgpr: int | None
    sgpr: int | None = None
    scaled: bool = False
    offset: int = 0

    @property
    def effect(self) -> int:
        return _EFFECTS[self.kind]


_BYTES = {
    "ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12,
    "dwordx4": 16,
}  # fmt: skip
_MOVE = re.compile(rf"(global|flat|scratch|buffer)_(load|store)_({'|'.join(_BYTES)})(?:_d16)?(?:_hi)?")
_ATOMIC = re.compile(r"(global|flat|buffer)_(atomic)_(\w+)")
_DS_MOVE = re.compile(r"ds_(read|write)(2?)(st64)?_[biu](8|16|32|64|96|128)(?:_d16)?(?:_hi)?")
_DS_ATOMIC = re.compile(r"ds_(?!read|write|\w+_src2)\w+?(2?)(st64)?(_rtn)?_(?:bf|[biuf])(16|32|64)")
_MEMORY = re.compile(r"(?:global|flat|scratch|buffer|tbuffer|image|ds)_")
_SCALAR_LOAD = re.compile(r"s_(?:buffer_)?load_")
_NOT_MEMORY = re.compile(  # lane permutes, queries and cache control
    r"ds_(?:swizzle|b?permute|nop|gws_)|image_get_|buffer_(?:wb|inv|gl[01])"
)
_FIRST = re.compile(r"[sv](?:(\d+)|\[(\d+):\d+\])")


def accesses(instruction: GcnInstruction, scratch: bool) -> tuple[GcnAccess, ...]:
    """Return the accesses of an instruction that can be probed; () if there are none.

    scratch: whether SCRATCH holds the scratch buffer descriptor
    """
    if not is_memory(instruction):
        return ()
    *operands, last = instruction.operands.split(", ")
    last, *modifiers = last.split()
    operands.append(last)
    offsets = {
        name: int(value)
        for name, _, value in (m.partition(":") for m in modifiers)
        if value.isdigit() or value[1:].isdigit()
    }
    if {"lds", "gds", "tfe"} & set(modifiers):
        return ()
    if match := _MOVE.fullmatch(instruction.name):
        return _vector(match[1], match[2], _BYTES[match[3]], match[2] == "load", operands, offsets, scratch)
    if match := _ATOMIC.fullmatch(instruction.name):
        width = 8 if match[3].endswith(("_x2", "_f64")) else 4
        return _vector(match[1], match[2], width, "glc" in modifiers, operands, offsets, scratch)
    if match := _DS_MOVE.fullmatch(instruction.name):
        kind, two, far, bits = match.groups()
        place = operands[1] if kind == "read" else operands[0]
        return _shared("load" if kind == "read" else "store", int(bits) // 8, place, two, far, offsets)
    if match := _DS_ATOMIC.fullmatch(instruction.name):
        two, far, returns, bits = match.groups()
        return _shared("atomic", int(bits) // 8, operands[1] if returns else operands[0], two, far, offsets)
    return ()


def is_memory(instruction: GcnInstruction) -> bool:
    """Return whether an instruction accesses memory. It can be probed only if `accesses` returns something."""
    return bool(_MEMORY.match(instruction.name)) and not _NOT_MEMORY.match(instruction.name)


def scalar_loads(
    instructions: Sequence[GcnInstruction], branches: Mapping[int, int], given: Set[int]
) -> set[int]:
    """Return the addresses of a kernel's scalar loads that may read the program's memory.

    The other scalar loads take their address from a register of `given` that still has its initial value, the address of the kernel's
    arguments or of its dispatch packet. The analysis takes the order of addresses as control flow; only with branches back can a later
    instruction precede a load.

    branches: branch → its target, both as addresses
    given: the first SGPR of each address that the kernel receives when it starts
    """
    written = {
        first: [one.address for one in instructions if use(one)[0] & {first, first + 1}] for first in given
    }
    found = set()
    for load in instructions:
        if not _SCALAR_LOAD.match(load.name):
            continue
        before = load.address
        while further := [at for at, to in branches.items() if to <= before < at]:
            before = max(further)
        base = _first(load.operands.split(", ")[1])
        changes = None if base is None else written.get(base)
        if changes is None or any(at < before for at in changes):
            found.add(load.address)
    return found


def _vector(
    memory: str,
    kind: str,
    width: int,
    has_result: bool,
    operands: Sequence[str],
    offsets: Mapping[str, int],
    scratch: bool,
) -> tuple[GcnAccess, ...]:
    offset = offsets.get("offset", 0)
    if memory == "buffer":
        _, address, descriptor, base = operands
        space, known = "local", scratch and descriptor == SCRATCH and "[" not in address
    else:
        address, base = operands[1] if has_result else operands[0], operands[-1]
        space, known = {"flat": "generic", "scratch": "local"}.get(memory, "global"), True
    base = "off" if memory == "flat" else base
    vgpr, sgpr = _first(address), _first(base)
    known = known and (sgpr is not None or base in ("off", "0")) and (vgpr is not None or space == "local")
    if not known:
        return ()
    return (GcnAccess(kind, space, width, vgpr, sgpr, memory == "buffer", offset),)


def _shared(
    kind: str, width: int, place: str, two: str, far: str | None, offsets: Mapping[str, int]
) -> tuple[GcnAccess, ...]:
    if not two:
        return (GcnAccess(kind, "shared", width, _first(place), offset=offsets.get("offset", 0)),)
    unit = width * (64 if far else 1)
    return tuple(
        GcnAccess(kind, "shared", width, _first(place), offset=unit * offsets.get(f"offset{n}", 0))
        for n in range(2)
    )


def _first(operand: str) -> int | None:
    """Return the number of an operand's first register; None for `off`, constants and unrecognized operands."""
    if operand in ("vcc", "vcc_lo"):
        return VCC
    match = _FIRST.fullmatch(operand)
    return int(match[1] or match[2]) if match else None

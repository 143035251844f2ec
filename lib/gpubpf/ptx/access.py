"""Determine which memory a PTX instruction accesses, and whether the access can be probed.

    accesses(instruction)               # ld.global.v4.f32 → (Access("load", "global", 16, Address("%rd4")),)
    unprobed(instruction)               # tex.2d.v4.f32… → "tex"
    unaddressed_accesses(instruction)   # tex.2d.v4.f32… → (Access("load", "texture", 16, …),)

Covers PTX ISA 9.0, chapter 9.7 (ld … tcgen05). `opcodes` defines loads, stores and atomics. A copy (cp.async, cp.async.bulk,
cp.reduce.async.bulk) is two accesses: its source and its destination. Parameters do not count as memory, nor do mbarriers, which
synchronize. Instructions that only move lines between caches (prefetch, discard, applypriority) access nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from gpubpf.record import replace

from .module import Address, Immediate, Name, Not, Operand, PtxInstruction, Vector, type_size
from .opcodes import TABLE, facts, is_of_parameters


@dataclass(frozen=True, slots=True)
class Rows:
    """How lanes map to the rows of a matrix in memory (wmma). Lane 0 of the first access is at the address that the instruction gives.

    per_row  how many adjacent lanes share a row
    first    the row of lane 0
    stride   the distance between rows in elements: a register or number
    bits     the size of an element in bits
    """

    per_row: int
    first: int
    stride: Operand
    bits: int


@dataclass(frozen=True, slots=True)
class Access:
    """One memory access of each lane that executes an instruction with a true predicate.

    kind     one of bytecode.KINDS; "async" is either end of a copy
    space    one of bytecode.SPACES or UNADDRESSED_SPACES, or "generic": the address space is known only at run time
    width    bytes per lane, all elements of a vector together; 0 if `size` gives them, or if they are unknown (tensor copies)
    address  as written in the instruction: an address of the space, with 32 or 64 bits
    size     a register or number: the bytes per lane; for the source of a cp.async, the bytes read (the rest is filled with zeros)
    unless   a predicate that disables the access (cp.async's ignore-src)
    lanes    only lanes with a lower number access memory (ldmatrix, stmatrix)
    rows     how a lane's address follows from the written one, if lanes share the written address (wmma)
    reads, writes   both are true for an atomic
    """

    kind: str
    space: str
    width: int
    address: Address
    size: Operand | None = None
    unless: Name | Not | None = None
    lanes: int = 32
    rows: Rows | None = None
    reads: bool = True
    writes: bool = False


# Matches the modifiers that are types.
TYPE = re.compile(r"[busf](?:8|16|32|64|128)|b?f16(?:x2)?|e[45]m[23](?:x[24])?")
_WMMA_SHAPES = {  # M, N, K
    f"m{m}n{n}k{k}": (m, n, k)
    for m, n, k in ((16, 16, 16), (32, 8, 16), (8, 32, 16), (16, 16, 8), (8, 8, 4), (8, 8, 32), (8, 8, 128))
}
_ELEMENT_BITS = {
    "f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "f32": 32, "s32": 32, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1,
}  # fmt: skip
_SPACE_NAMES = {
    "global": "global",
    "local": "local",
    "const": "const",
    "shared": "shared",
    "shared::cta": "shared",
    "shared::cluster": "shared",
}

# Instructions whose addresses are unknown, by the names that reports use: kind and space. Programs that need no address see them.
UNADDRESSED = {row.name: row.unaddressed for row in TABLE.values() if row.unaddressed is not None}
_KINDS = {"loads": "load", "stores": "store", "atomics": "atomic"}
_COPIED_SHAPE = re.compile(r"(\d+)x(\d+)b")  # lanes of tensor memory, and bits in each
_WGMMA_SHAPE = re.compile(r"m64n(\d+)k\d+")


def _is_predicate(name: str) -> bool:
    return name.startswith("%p")


def accesses(
    instruction: PtxInstruction,
    is_predicate: Callable[[str], bool] = _is_predicate,
    declared_in: Callable[[str], str | None] = lambda name: None,
) -> tuple[Access, ...]:
    """Return the accesses of an instruction whose predicate is true, a copy's source first; () if none can be probed.

    is_predicate: returns whether a register was declared `.pred`; only this distinguishes cp.async's ignore-src from its src-size. By
      default, a register is a predicate if its name begins with `%p`, as in compilers' output.
    declared_in: returns the space that a name is declared in; None if it is unknown. If an instruction without a space names a
      variable, the access is in the variable's space, as for ptxas.
    """
    found = _read(instruction, is_predicate) or ()
    return tuple(
        replace(access, space=named_space(access.address, declared_in) or "generic")
        if access.space == "generic"
        else access
        for access in found
    )


def without_operands(access: Access) -> Access:
    """Return an access without everything that depends on its instruction's operands, to count accesses that get the same probes."""
    return replace(access, address=Address(None), size=None, unless=None)


def named_space(address: Address, declared_in: Callable[[str], str | None]) -> str:
    """Return the space of the variable that an address names; "" if it names none in global, shared or local memory."""
    space = declared_in(address.base) if address.base is not None else None
    return space if space in ("global", "shared", "local") else ""


def unprobed(instruction: PtxInstruction) -> str | None:
    """Return the name of an instruction whose accesses cannot be probed because its form or address is unknown; else None."""
    known = facts(instruction)
    if known.unaddressed is not None or known.is_opaque:
        return known.name
    bracketed = any(isinstance(o, Address) for o in instruction.operands)
    if bracketed and known.moves and _read(instruction, _is_predicate) is None:
        return instruction.full_name
    return None


def unaddressed_accesses(instruction: PtxInstruction) -> tuple[Access, ...]:
    """Return the access of an instruction to a texture, surface, tensor or tensor memory, whose address is unknown; else ().

    The width of an access to a texture or surface is that of all elements in registers, which may differ from those in memory. The
    width of a wgmma is what each of the 128 lanes would read of the matrices in shared memory if the lanes shared the work. The width
    of a tensor copy is 0, because it is unknown. So is that of a tcgen05.mma, whose shape is in a register.
    """
    unaddressed = facts(instruction).unaddressed
    if unaddressed is None:
        return ()
    kind, space = unaddressed
    width = 0
    if space == "tmem":
        width = _width_in_tensor_memory(instruction)
    elif space != "tensor":
        width = _width_of_image(instruction)
    elif kind == "load":
        width = _width_of_wgmma(instruction)
    return (Access(kind, space, width, Address(None), reads=kind != "store", writes=kind != "load"),)


def _width_of_image(instruction: PtxInstruction) -> int:
    modifiers = instruction.modifiers
    end = next((n for n, m in enumerate(modifiers, 1) if TYPE.fullmatch(m)), 0)
    return _width(modifiers[:end])  # the type of the coordinates may follow


def _width_of_wgmma(instruction: PtxInstruction) -> int:
    """Return the bytes of the matrices A and B in shared memory, divided among the 128 lanes. A may be in registers instead.

    A row of A, or a column of B, has 32 bytes. With a sparse A, which holds every second element, a column of B has 64 bytes.
    """
    columns = next(
        (int(m[1]) for m in map(_WGMMA_SHAPE.fullmatch, instruction.modifiers) if m is not None), 0
    )
    in_shared = len(instruction.operands) > 1 and isinstance(instruction.operands[1], Name)
    return (64 * 32 * in_shared + columns * (64 if "sp" in instruction.modifiers else 32)) // 128


def _width_in_tensor_memory(instruction: PtxInstruction) -> int:
    """Return the bytes of a lane's registers (tcgen05.ld, .st), or those that one thread moves (.cp, .shift); 0 for .mma."""
    modifiers = instruction.modifiers
    if modifiers[:1] in (("ld",), ("st",)):
        return 4 * next((len(o.items) for o in instruction.operands if isinstance(o, Vector)), 1)
    if modifiers[:1] == ("shift",):
        return 31 * 32  # 31 lanes of 256 bits
    shape = next(filter(None, map(_COPIED_SHAPE.fullmatch, modifiers)), None)
    return int(shape[1]) * int(shape[2]) // 8 if shape else 0


def _read(instruction: PtxInstruction, is_predicate: Callable[[str], bool]) -> tuple[Access, ...] | None:
    """Return the accesses of an instruction; None if it has no address or an unknown form."""
    opcode, modifiers = instruction.opcode, instruction.modifiers
    addresses = [o for o in instruction.operands if isinstance(o, Address)]
    if not addresses or facts(instruction).unaddressed is not None:
        return None
    if opcode == "cp":
        return _copy(instruction, addresses, is_predicate)
    if opcode in ("ldmatrix", "stmatrix"):
        return _matrix(instruction, addresses[0])
    if opcode == "wmma":
        return _wmma(instruction, addresses[0])
    kind = next(map(_KINDS.get, facts(instruction).counts), None)
    if kind is None:
        return None
    if is_of_parameters(instruction):
        return ()
    width, size = _width(modifiers), None
    if opcode == "st" and modifiers[:1] == ("bulk",):
        if len(instruction.operands) < 2:
            return None
        width, size = _amount(instruction.operands[1])
    elif not width:
        return None
    return _some(
        Access(
            kind,
            _space(modifiers),
            width,
            addresses[0],
            size,
            lanes=1 if opcode == "tcgen05" else 32,  # the warp stores one address of tensor memory (alloc)
            reads=kind != "store",
            writes=kind != "load",
        )
    )


def _copy(
    instruction: PtxInstruction, addresses: list[Address], is_predicate: Callable[[str], bool]
) -> tuple[Access, ...] | None:
    """Return the accesses of cp.async, cp.async.bulk, cp.reduce.async.bulk: `[destination], [source], size` and more."""
    modifiers, operands = instruction.modifiers, instruction.operands
    reduces = modifiers[:1] == ("reduce",)
    modifiers = modifiers[reduces:]
    spaces = [_SPACE_NAMES[m] for m in modifiers if m in _SPACE_NAMES]
    if modifiers[:1] != ("async",) or "tensor" in modifiers:
        return None
    if len(spaces) != 2 or len(addresses) < 2 or len(operands) < 3:
        return None
    width, size = _amount(operands[2])
    written = Access("async", spaces[0], width, addresses[0], size, reads=reduces, writes=True)
    unless: Name | Not | None = None
    rest = operands[3 : len(operands) - ("L2::cache_hint" in modifiers)]
    if rest and "bulk" not in modifiers:
        # The next operand is the number of bytes to read, or the predicate ignore-src.
        if isinstance(rest[0], Not) or (isinstance(rest[0], Name) and is_predicate(rest[0].name)):
            unless = rest[0]
        else:
            width, size = _amount(rest[0])
    return *_some(Access("async", spaces[1], width, addresses[1], size, unless)), *_some(written)


def _matrix(instruction: PtxInstruction, address: Address) -> tuple[Access, ...] | None:
    """Return the access of ldmatrix or stmatrix. Each lane gives the address of a row of 16 bytes; a matrix has 8 or 16 rows."""
    count = next((int(m[1:]) for m in instruction.modifiers if m in ("x1", "x2", "x4")), None)
    if count is None:
        return None
    lanes = min(32, count * (16 if "m16n16" in instruction.modifiers else 8))
    loads = instruction.opcode == "ldmatrix"
    kind = "load" if loads else "store"
    return (
        Access(kind, _space(instruction.modifiers), 16, address, lanes=lanes, reads=loads, writes=not loads),
    )


def _wmma(instruction: PtxInstruction, address: Address) -> tuple[Access, ...] | None:
    """Return the accesses of wmma.load or wmma.store: the rows (or columns) in memory, in pieces of up to 16 bytes per lane.

    PTX does not define which lane accesses which elements, so the pieces are assigned to lanes in order. A matrix of 1024 bytes
    takes two accesses.
    """
    modifiers = instruction.modifiers
    shape = next((_WMMA_SHAPES[x] for x in modifiers if x in _WMMA_SHAPES), None)
    bits = _ELEMENT_BITS.get(modifiers[-1]) if modifiers else None
    if modifiers[:1] not in (("load",), ("store",)) or shape is None or bits is None:
        return None
    m, n, k = shape
    height, width = {"a": (m, k), "b": (k, n)}.get(modifiers[1], (m, n))
    rows, length = (height, width) if "row" in modifiers else (width, height)
    piece = min(16, length * bits // 8)
    if not piece:
        return None
    per_row = length * bits // 8 // piece
    lanes = rows * per_row
    loads = modifiers[0] == "load"
    stride = instruction.operands[2] if len(instruction.operands) > 2 else Immediate(str(length))
    kind = "load" if loads else "store"
    return tuple(
        Access(
            kind,
            _space(modifiers),
            piece,
            address,
            lanes=min(32, lanes),
            rows=Rows(per_row, first // per_row, stride, bits),
            reads=loads,
            writes=not loads,
        )
        for first in range(0, lanes, 32)
    )


def _some(access: Access) -> tuple[Access, ...]:
    """Return the access, or () if it has zero bytes."""
    return (access,) if access.width or access.size is not None else ()


def _space(modifiers: tuple[str, ...]) -> str:
    return next((_SPACE_NAMES[m] for m in modifiers if m in _SPACE_NAMES), "generic")


def _width(modifiers: tuple[str, ...]) -> int:
    """Return the bytes that the modifiers give: the size of the last type times the vector's elements; 0 without a type.

    The type need not be last: ptxas allows `.v4.f32.add`.
    """
    types = [m for m in modifiers if TYPE.fullmatch(m)]
    vectors = [int(m[1:]) for m in modifiers if m in ("v2", "v4", "v8")]
    return type_size(types[-1]) * (vectors[-1] if vectors else 1) if types else 0


def _amount(operand: Operand) -> tuple[int, Operand | None]:
    """Return an operand as (width, size): a number gives the width, anything else the size."""
    return (operand.integer, None) if isinstance(operand, Immediate) else (0, operand)

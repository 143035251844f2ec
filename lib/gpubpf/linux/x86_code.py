"""Read x86-64 code: where an instruction ends, and where control goes from there (Intel SDM volume 2, chapter 2 and appendix A).

The lengths of instructions are a regular language, so a regular expression reads them. It skips instructions after which the next
instruction executes, and stops at the first other instruction. It takes about 0.1 µs per instruction. The agent has a separate decoder
in C++, for hooks (agent/src/machine/x86_64/instruction.cpp); a test compares both with binutils.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator

from gpubpf.record import Record

RETURN, JUMP, BRANCH, INDIRECT, END = "return", "jump", "branch", "indirect", "end"


class Block(Record):
    """Instructions from `start` to `end`; the last one begins at `last`.

    kind      RETURN; JUMP or BRANCH to `target`; INDIRECT: a jump through a register or memory; END: nothing follows (ud2, hlt, int3);
              None: the bytes at `last` are not an instruction that is known here
    """

    start: int
    last: int
    end: int
    kind: str | None
    target: int = 0


def _one_of(values: Iterable[int]) -> bytes:
    """Return an expression for one of these bytes."""
    held = set(values)
    first = (v for v in sorted(held) if v - 1 not in held)
    last = (v for v in sorted(held) if v + 1 not in held)
    return b"[" + b"".join(b"\\x%02x-\\x%02x" % pair for pair in zip(first, last, strict=True)) + b"]"


def _modrm(fields: Iterable[int] = range(8), mods: Iterable[int] = range(4)) -> bytes:
    """Return an expression for ModRM, SIB and displacement. `fields`: the values of ModRM's second field."""
    wanted = set(fields)

    def byte(mod: int, rms: Iterable[int]) -> bytes:
        return _one_of(mod << 6 | f << 3 | rm for f in wanted for rm in rms)

    no_sib = [0, 1, 2, 3, 5, 6, 7]
    any_base = _one_of(s for s in range(256) if s & 7 != 5)
    no_base = _one_of(s for s in range(256) if s & 7 == 5)
    forms = {
        3: [byte(3, range(8))],
        0: [
            byte(0, [0, 1, 2, 3, 6, 7]),
            byte(0, [5]) + b".{4}",
            byte(0, [4]) + b"(?:" + any_base + b"|" + no_base + b".{4})",
        ],
        1: [byte(1, no_sib) + b".", byte(1, [4]) + b".."],
        2: [byte(2, no_sib) + b".{4}", byte(2, [4]) + b".{5}"],
    }
    return b"(?:" + b"|".join(f for mod in mods for f in forms[mod]) + b")"


_SEGMENTS = (0x26, 0x2E, 0x36, 0x3E, 0x64, 0x65, 0x67)
_NOT_66 = _one_of((*_SEGMENTS, 0xF0, 0xF2, 0xF3)) + b"*"
_PREFIXES = _one_of((*_SEGMENTS, 0x66, 0xF0, 0xF2, 0xF3)) + b"*"
_REX = b"[\\x40-\\x4f]?"
_ANY = _modrm()

# Opcodes by what follows them. _Z: an immediate of 4 bytes, or of 2 with prefix 66.
_PLAIN = {*range(0x50, 0x60), *range(0x90, 0x9A), *range(0x9B, 0xA0), *range(0xA4, 0xA8), *range(0xAA, 0xB0)}
_PLAIN |= {*range(0x6C, 0x70), 0xC9, 0xF5, *range(0xF8, 0xFE), *range(0xEC, 0xF0)}
_MODRM = {op for op in range(0x40) if op & 7 < 4} | {
    0x63,
    *range(0x84, 0x8F),
    *range(0xD0, 0xD4),
    *range(0xD8, 0xE0),
}
_IMM8 = {op for op in range(0x40) if op & 7 == 4} | {0x6A, 0xA8, *range(0xB0, 0xB8), 0xCD, *range(0xE4, 0xE8)}
_Z = {op for op in range(0x40) if op & 7 == 5} | {0x68, 0xA9}
_MODRM_IMM8 = {0x6B, 0x80, 0x83, 0xC0, 0xC1}
_TWO_PLAIN = {
    0x05,
    0x06,
    0x08,
    0x09,
    0x30,
    0x31,
    0x32,
    0x33,
    0x34,
    0x77,
    0xA0,
    0xA1,
    0xA2,
    0xA8,
    0xA9,
    *range(0xC8, 0xD0),
}
_TWO_MODRM = {
    *range(0x10, 0x20),
    *range(0x28, 0x30),
    *range(0x40, 0x70),
    *range(0x90, 0xA0),
    *range(0xD0, 0xFF),
}
_TWO_MODRM |= {
    0x00,
    0x01,
    0x02,
    0x03,
    0x0D,
    0x74,
    0x75,
    0x76,
    *range(0x78, 0x80),
    0xA3,
    0xA5,
    0xAB,
    *range(0xAD, 0xB9),
    0xBB,
}
_TWO_MODRM |= {*range(0xBC, 0xC2), 0xC3, 0xC7}
_TWO_IMM8 = {*range(0x70, 0x74), 0xA4, 0xAC, 0xBA, 0xC2, 0xC4, 0xC5, 0xC6}


def _vector(modrm: Iterable[int], imm8: Iterable[int], plain: bytes = b"") -> bytes:
    return b"(?:" + plain + _one_of(modrm) + _ANY + b"|" + _one_of(imm8) + _ANY + b".)"


def _instruction() -> bytes:
    """Return an expression for an instruction after which the next instruction executes, including calls."""
    zero_or_one, others = _modrm((0, 1)), _modrm(range(2, 8))
    rest_z = b"|[\\x69\\x81]" + _ANY + b"|\\xc7" + _modrm((0,)) + b"|\\xf7" + zero_or_one + b")"
    some_z = b"(?:" + _one_of(_Z | {0xE8}) + rest_z
    with_z = b"(?:" + _one_of(_Z | set(range(0xB8, 0xC0))) + rest_z
    first = _vector(_TWO_MODRM, _TWO_IMM8, b"\\x77|")
    second, third = b"." + _ANY, b"." + _ANY + b"."
    one_byte = [
        _one_of(_MODRM) + _ANY,
        _one_of(_PLAIN),
        _one_of(_MODRM_IMM8) + _ANY + b".",
        b"\\xff" + _modrm((0, 1, 2, 3, 6)),
        b"\\x0f" + _one_of(_TWO_MODRM) + _ANY,
        _one_of(_IMM8) + b".",
        b"\\xf6" + zero_or_one + b".",
        b"[\\xf6\\xf7]" + others,
        b"\\xc6(?:" + _modrm((0,)) + b"|\\xf8).",  # mov, xabort
        b"[\\x8f\\xfe]" + _modrm((0,)),
        b"\\xfe" + _modrm((1,)),
        b"\\x0f" + _one_of(_TWO_IMM8) + _ANY + b".",
        b"\\x0f" + _one_of(_TWO_PLAIN),
        b"\\x0f\\x38" + second,
        b"\\x0f\\x3a" + third,
    ]
    any_one_byte = b"(?:" + b"|".join(one_byte) + b")"
    forms = [
        b"[\\x48-\\x4f]" + any_one_byte,  # most instructions have these two forms; forms that match fast come first
        any_one_byte,
        b"[\\x40-\\x47]?(?:" + some_z + b"|[\\xb8-\\xbf]).{4}",
        b"[\\x48-\\x4f](?:" + some_z + b".{4}|[\\xb8-\\xbf].{8})",
        _PREFIXES + _REX + any_one_byte,
        _NOT_66 + b"[\\x40-\\x47]?(?:" + some_z + b"|[\\xb8-\\xbf]).{4}",
        _PREFIXES + b"[\\x48-\\x4f](?:" + some_z + b".{4}|[\\xb8-\\xbf].{8})",
        _NOT_66 + b"\\x66" + _PREFIXES + b"[\\x40-\\x47]?" + with_z + b"..",
        _one_of(_SEGMENTS) + b"*\\xc5." + first,
        _one_of(_SEGMENTS) + b"*\\xc4(?:"
        + b"|".join(_one_of(m | high << 5 for high in range(8)) + b"." + form for m, form in ((1, first), (2, second), (3, third)))
        + b")",
        _one_of(_SEGMENTS) + b"*\\x62(?:"
        + b"|".join(
            _one_of(m | high << 4 for high in range(16)) + _one_of(p for p in range(256) if p & 4) + b"." + form
            for m, form in ((1, first), (2, second), (3, third), (5, second), (6, second))
        )
        + b")",
        _PREFIXES + _REX + b"[\\xa0-\\xa3].{8}",
        b"\\xc8...",
    ]  # fmt: skip
    return b"(?:" + b"|".join(forms) + b")"


@functools.cache
def _one() -> re.Pattern[bytes]:
    return re.compile(_instruction(), re.DOTALL)


@functools.cache
def _block() -> re.Pattern[bytes]:
    ends = [
        b"(?P<return>" + _NOT_66 + _REX + b"(?:\\xc3|\\xc2..))",
        b"(?P<branch>"
        + _NOT_66
        + b"(?:[\\x70-\\x7f\\xe0-\\xe3].|(?:\\x0f[\\x80-\\x8f]|\\xc7\\xf8).{4}))",  # \xc7\xf8: xbegin
        b"(?P<jump>" + _NOT_66 + _REX + b"(?:\\xeb.|\\xe9.{4}))",
        b"(?P<indirect>" + _NOT_66 + _REX + b"\\xff" + _modrm((4, 5)) + b")",
        b"(?P<end>\\x0f\\x0b|\\x0f\\xb9" + _ANY + b"|\\xf4|\\xcc)",
        b"",
    ]
    return re.compile(_instruction() + b"*(?P<last>" + b"|".join(ends) + b")", re.DOTALL)


_SHORT = re.compile(_NOT_66 + _REX + b"[\\x70-\\x7f\\xe0-\\xe3\\xeb].\\Z", re.DOTALL)
_NOPS = re.compile(b"(?:" + _PREFIXES + _REX + b"(?:\\x90|\\x0f\\x1f" + _ANY + b")|[\\x00\\xcc])*", re.DOTALL)
_CALL = re.compile(_PREFIXES + _REX + b"(?:\\xe8|\\xff" + _modrm((2, 3)) + b")", re.DOTALL)
_LEA = re.compile(b"[\\x48\\x4c]\\x8d" + _modrm(mods=(0,)) + b"\\Z", re.DOTALL)
_INDIRECT = re.compile(_NOT_66 + b"(" + _REX + b")\\xff(.)(.*)", re.DOTALL)
# What Linux emulates at a uprobe by the opcode alone: push, jumps, calls, returns, popf. In another map of opcodes, that of vector
# instructions, these numbers are others, such as vpor and vpbroadcastb.
_EMULATED = (
    *range(0x50, 0x58),
    *range(0x70, 0x80),
    0x9A,
    0x9D,
    0xC2,
    0xC3,
    0xCA,
    0xCB,
    0xCF,
    *range(0xE8, 0xEC),
    0xFF,
)
_MISREAD = re.compile(_one_of(_SEGMENTS) + b"*(?:\\xc5.|\\xc4..|\\x62...)" + _one_of(_EMULATED), re.DOTALL)
_ADD = re.compile(b"([\\x48-\\x4f])([\\x01\\x03])([\\xc0-\\xff])\\Z", re.DOTALL)


def block(code: bytes, start: int, base: int = 0) -> Block:
    """Return the instructions from an offset to the first instruction that ends, or may end, straight execution (see `Block`).

    base: address of the code, so that the block has addresses."""
    match = _block().match(code, start)
    assert match is not None  # the last alternative matches the empty string
    last, end = match.span("last")
    kind = next((k for k in (BRANCH, JUMP, RETURN, INDIRECT, END) if match[k] is not None), None)
    target = 0
    if kind in (JUMP, BRANCH):
        size = 1 if _SHORT.match(code[last:end]) else 4
        target = base + end + int.from_bytes(code[end - size : end], "little", signed=True)
    return Block(base + start, base + last, base + end, kind, target)


def instructions(code: bytes, start: int, end: int, base: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the instructions that follow one another from `start` to before `end`, with their addresses. `base`: as for `block`."""
    while start < end and (match := _one().match(code, start)) is not None:
        yield base + start, match[0]
        start = match.end()


def is_misread_by_linux(code: bytes) -> bool:
    """Return whether the kernel, at a uprobe, would take the vector instruction with which the code begins for a jump or the like.

    The program would then compute something else, or crash (kernel/events/uprobes.c, branch_setup_xol_ops; tried with 6.18)."""
    return _MISREAD.match(code) is not None


def is_call(instruction: bytes) -> bool:
    return _CALL.match(instruction) is not None


def after_padding(code: bytes, start: int) -> int:
    """Return the offset after the padding between functions that begins at `start`."""
    match = _NOPS.match(code, start)
    assert match is not None
    return match.end()


def loaded_address(instruction: bytes) -> int | None:
    """Return the distance from the instruction's end to the address that it loads (lea); None for other instructions."""
    if _LEA.match(instruction) is None or instruction[2] & 7 != 5:
        return None
    return int.from_bytes(instruction[3:7], "little", signed=True)


def slot(jump: bytes) -> int | None:
    """Return the distance from an indirect jump's end to the word that it reads; None for a jump through something else."""
    _, modrm, rest = _indirect(jump)
    return int.from_bytes(rest[:4], "little", signed=True) if modrm & 0xC7 == 0x05 else None


def is_switch(jump: bytes, before: Iterable[bytes]) -> bool:
    """Return whether an indirect jump chooses an address in a table, as compilers emit it for switch statements.

    before: the earlier instructions of the same block. In position-independent code, they add the table's address to its entry.
    """
    rex, modrm, rest = _indirect(jump)
    if modrm == 0x24 and rest[:1] and rest[0] & 7 == 5:  # jmp *table(,%reg,8)
        return True
    if modrm < 0xC0:
        return False
    register = modrm & 7 | (8 if rex and rex[0] & 1 else 0)
    for instruction in before:
        match = _ADD.match(instruction)
        if match is None:
            continue
        prefix, opcode, operands = match[1][0], match[2][0], match[3][0]
        into_rm = operands & 7 | (8 if prefix & 1 else 0)
        into_reg = operands >> 3 & 7 | (8 if prefix & 4 else 0)
        if register == (into_rm if opcode == 0x01 else into_reg):
            return True
    return False


def _indirect(jump: bytes) -> tuple[bytes, int, bytes]:
    match = _INDIRECT.match(jump)
    assert match is not None
    return match[1], match[2][0], match[3]

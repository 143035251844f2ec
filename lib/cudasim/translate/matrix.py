"""Translate ldmatrix, stmatrix and movmatrix to C (PTX ISA 9.7.14.5.15–17).

Each lane offers the host address of a row (or, for movmatrix, its part of the matrix) in `w->ca`. Lane l then works on row or column
l / 4, from element l % 4 on.
"""

from __future__ import annotations

from gpubpf.ptx.module import Operand, PtxInstruction, Vector

from .memory import space_of
from .values import Values

_ROW = "(u8 *)w->ca[{}]"
_MINE, _FIRST = "(l >> 2)", "(l & 3)"  # the row or column of lane l; its first element


def _count(v: Values, i: PtxInstruction) -> int:
    found = next((int(m[1:]) for m in i.modifiers if m in ("x1", "x2", "x4")), None)
    if found is None:
        raise v.unsupported()
    return found


def offer(v: Values, i: PtxInstruction) -> str:
    """Return C in which each lane offers, in `w->ca`, the address or contents that the other lanes need."""
    if i.opcode == "movmatrix":
        return f"w->ca[l] = {v.src(i.operands[1], 'b32')};"
    loads = i.opcode == "ldmatrix"
    rows = _count(v, i) * (16 if "m16n16" in i.modifiers else 8)
    address = v.address(i.operands[1 if loads else 0])
    pointer = v.pointer(space_of(i), address, 16, "r" if loads else "w")
    return f"if (l < {rows}) {{ {v.line()} w->ca[l] = (u64){pointer}; }}"


def exchange(v: Values, i: PtxInstruction) -> str:
    """Return C in which each lane loads or stores, after all lanes have offered."""
    m = i.modifiers
    if i.opcode == "movmatrix":
        halves = [
            f"(u32)(w->ca[({_FIRST} * 2 + {e}) * 4 + (l >> 3)] >> 16 * ({_MINE} & 1) & 0xffff)"
            for e in (0, 1)
        ]
        return v.dst(i.operands[0], "b32", f"{halves[0]} | {halves[1]} << 16")
    if i.opcode == "ldmatrix":
        v.code.reads_shared = True
        registers = _registers(v, i.operands[0], _count(v, i) * (2 if "m16n16" in m else 1))
        return " ".join(v.dst(o, "b32", _loaded(v, i, k)) for k, o in enumerate(registers))
    v.code.writes_shared = True
    return " ".join(
        _stored(v, i, k, v.src(o, "b32")) for k, o in enumerate(_registers(v, i.operands[1], _count(v, i)))
    )


def _registers(v: Values, operand: Operand, count: int) -> tuple[Operand, ...]:
    if not isinstance(operand, Vector) or len(operand.items) != count:
        raise v.unsupported(f"{operand} for {count} registers")
    return operand.items


def _loaded(v: Values, i: PtxInstruction, k: int) -> str:
    """Return the value of a lane's register k: elements of one row, or of one column with .trans."""
    m = i.modifiers
    bits = next(
        (b for name, b in (("b6x16_p32", 6), ("b4x16_p64", 4), ("b8", 8), ("b16", 16)) if name in m), 0
    )
    shape = next((x for x in m if x in ("m8n8", "m16n16", "m8n16")), "")
    if (
        not bits
        or shape == ""
        or (shape == "m8n8") != (bits == 16)
        or (shape == "m16n16" and "trans" not in m)
    ):
        raise v.unsupported()
    part, each = (2, 16) if bits == 16 else (4, 8)  # elements in a register, bits of each in the register
    terms = []
    for e in range(part):
        place = f"{_FIRST} * {part} + {e}"
        if shape == "m16n16":
            row, column = f"{16 * (k // 2)} + {place}", f"{_MINE} + {8 * (k % 2)}"
        elif "trans" in m:
            row, column = f"{8 * k} + {place}", _MINE
        else:
            row, column = f"{8 * k} + {_MINE}", place
        terms.append(f"cs_element({_ROW.format(row)}, {column}, {bits}) << {each * e}")
    return " | ".join(terms)


def _stored(v: Values, i: PtxInstruction, k: int, value: str) -> str:
    m = i.modifiers
    if "m8n8" in m and "b16" in m:
        if "trans" not in m:
            return f"ST(u32, {_ROW.format(f'{8 * k} + {_MINE}')} + {_FIRST} * 4, {value});"
        rows = (_ROW.format(f"{8 * k} + {_FIRST} * 2 + {e}") for e in (0, 1))
        return " ".join(f"ST(u16, {row} + {_MINE} * 2, {value} >> {16 * e});" for e, row in enumerate(rows))
    if "m16n8" in m and "b8" in m and "trans" in m:
        return " ".join(
            f"ST(u8, {_ROW.format(f'{8 * k} + {_FIRST} * 2 + {e & 1}')} + {_MINE} + {8 * (e >> 1)}, {value} >> {8 * e});"
            for e in range(4)
        )
    raise v.unsupported()

"""Every operation and type of atom and red that ptxas and the embedded device accept, against Python's integers and fractions.

Each thread has its own cell. test_engine_kernels.py has threads that share one, test_engine_memory_forms.py vectors and 128 bits.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine_device import Array, Device
from engine_forms import HEAD, REGISTERS, accepted, legal, register, register_bits
from engine_references import FLOAT_PAIRS
from engine_values import COUNT, FORMATS, add, integer, is_subnormal, of_values, operands, packed, same

OPERATIONS = ["and", "or", "xor", "exch", "add", "inc", "dec", "min", "max", "cas"]
TYPES = ["u32", "s32", "u64", "s64", "b16", "b32", "b64", "f16", "bf16", "f16x2", "bf16x2", "f32", "f64"]


@dataclass(frozen=True)
class Atomic:
    """The old value is register 0, the operands are registers 1 and 2, the address is register 4."""

    opcode: str
    space: str
    operation: str
    noftz: str
    t: str

    def __str__(self) -> str:
        result = f"{register(self.t, 0)}, " if self.opcode == "atom" else ""
        last = f", {register(self.t, 2)}" if self.operation == "cas" else ""
        name = f"{self.opcode}{self.space}.{self.operation}{self.noftz}.{self.t}"
        return f"{name} {result}[%x64_4], {register(self.t, 1)}{last};"


def updated(form: Atomic, old: int, b: int, c: int) -> int | None:
    """Return the new value of a cell; None if it is not compared."""
    t = form.t
    if t in (*FORMATS, *FLOAT_PAIRS):
        element = FLOAT_PAIRS.get(t, t)
        total = of_values(add, element)
        made = packed(total)(old, b) if t in FLOAT_PAIRS else total(old, b)
        if t == "f32" and made is not None and any(is_subnormal(x, t) for x in (old, b, made)):
            return None  # on a GPU it depends on the memory whether they are flushed
        return made
    x, y, mask = integer(old, t), integer(b, t), (1 << register_bits(t)) - 1
    return {
        "and": x & y,
        "or": x | y,
        "xor": x ^ y,
        "exch": y,
        "add": x + y,
        "inc": 0 if x >= y else x + 1,
        "dec": y if x == 0 or x > y else x - 1,
        "min": min(x, y),
        "max": max(x, y),
        "cas": c if x == y else x,
    }[form.operation] & mask


def kernel(forms: list[Atomic], t: str) -> str:
    """Return a kernel that runs the forms of a type on cells of 8 bytes, and stores the old values."""
    w = register_bits(t)
    lines = [f".visible .entry {t}(.param .u64 cells, .param .u64 old, .param .u64 in) {{ {REGISTERS}"]
    lines.append(".reg .b64 %cells, %old, %in, %at; .reg .b32 %t, %n; .shared .align 8 .b8 tile[1024];")
    lines.append("ld.param.u64 %cells, [cells]; ld.param.u64 %old, [old]; ld.param.u64 %in, [in];")
    lines.append("mov.u32 %t, %ctaid.x; mov.u32 %n, %ntid.x; mov.u32 %x32_9, %tid.x;")
    lines.append("mad.lo.u32 %t, %t, %n, %x32_9; mul.wide.u32 %at, %t, 8; mul.wide.u32 %x64_8, %x32_9, 8;")
    lines.append("mov.u64 %x64_9, tile; add.u64 %x64_8, %x64_8, %x64_9;")
    lines += [f"add.u64 {r}, {r}, %at;" for r in ("%cells", "%old", "%in")]
    lines += [f"ld.global.b{w} {register(t, k)}, [%in+{8 * COUNT * k}];" for k in (1, 2)]
    for number, form in enumerate(forms):
        place = f"[%cells+{8 * COUNT * number}]"
        if "shared" in form.space:
            lines.append(
                f"ld.global.b64 %x64_7, {place}; st.shared.b64 [%x64_8], %x64_7; mov.u64 %x64_4, %x64_8;"
            )
        else:
            lines.append(f"add.u64 %x64_4, %cells, {8 * COUNT * number};")
        lines.append(str(form))
        if "shared" in form.space:
            lines.append(f"ld.shared.b64 %x64_7, [%x64_8]; st.global.b64 {place}, %x64_7;")
        if form.opcode == "atom":
            lines.append(f"st.global.b{w} [%old+{8 * COUNT * number}], {register(t, 0)};")
    return "\n".join(lines) + "\nret; }\n"


def test_every_atomic(tmp_path: Path) -> None:
    every = itertools.product(["atom", "red"], ["", ".global", ".shared"], OPERATIONS, ["", ".noftz"], TYPES)
    candidates = [Atomic(*parts) for parts in every]
    known = legal(tmp_path, candidates)
    forms = accepted(known)
    assert forms == known
    device = Device(HEAD + "".join(kernel([f for f in forms if f.t == t], t) for t in TYPES))
    wrong = []
    for t in TYPES:
        its = [f for f in forms if f.t == t]
        kind = t if t in (*FORMATS, *FLOAT_PAIRS) else f"u{register_bits(t)}"
        a, b, c = (operands(kind, k) for k in range(3))
        if any(f.operation == "cas" for f in its):
            b[::2] = a[::2]
        before = np.array([a] * len(its), np.uint64)
        cells, old = Array(before), Array(np.zeros_like(before))
        device.launch(t, COUNT // 128, 128, cells, old, Array(np.array([a, b, c], np.uint64)))
        for form, new, seen in zip(its, cells.host.tolist(), old.host.tolist(), strict=True):
            for x, y, z, got, was in zip(a, b, c, new, seen, strict=True):
                right = updated(form, x, y, z)
                if (right is not None and not same(got, right, t)) or (form.opcode == "atom" and was != x):
                    wrong.append(f"{form} {x:#x} {y:#x} {z:#x}: {got:#x}, was {was:#x}")
                    break
    assert not wrong, "\n".join(wrong)

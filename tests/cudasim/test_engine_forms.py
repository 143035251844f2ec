"""Every form of an arithmetic instruction that ptxas and the embedded device accept, against an independent evaluation.

ptxas says which of all combinations of modifiers and types exist. Each that the device translates is run on the edges of its types
and on random operands. A form without a reference is an error, so that the device cannot learn an instruction without its test.
"""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from engine_device import Array, Device
from engine_forms import HEAD, REGISTERS, Form, accepted, arithmetic, legal, register, register_bits
from engine_references import FLOAT_PAIRS, UNDOCUMENTED, approximation, result_type, wanted
from engine_values import COUNT, edges, operands, same

MOST = 150  # forms of a kernel: compilers take long for longer ones
CARRY = ("addc", "subc", "madc")
EDGES = {  # of approximations, besides those of every operation
    "f32": [0x7E800000, 0x7E800001, 0x7F000000, 0x00400000, 0x3F317218, 0x40C90FDB, 0x439D1463, 0x42FE0000,
            0xC2FC0000, 0xC3150000, 0x3F000001, 0x3F7FFFFF, 0x40000000, 0x43160000, 0x41000000, 0x7E000000],
    "f64": [0x0010000000000001, 0x7FE0000000000000, 0x7FEFFFFF00000001, 0x3FF00000FFFFFFFF, 0x000FFFFF00000000],
    "f16": [0x4C00, 0xCC00, 0xCE00, 0x4BFF, 0x3C01, 0xCE40],
    "bf16": [0x42FF, 0x4300, 0xC2FC, 0xC2FE, 0xC300, 0xC315],
}  # fmt: skip


def column_type(t: str) -> str:
    """Return the type whose edges an operand has."""
    if t in ("pred", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2", "e2m1x2"):
        return t
    return f"u{register_bits(t)}" if t != "tf32" else "f32"


def column(t: str, k: int) -> list[int]:
    """Return the operands at a place of an instruction."""
    if t == "pred":
        return [random.Random(k).getrandbits(n % 7 + 1) & 1 for n in range(COUNT)]
    return operands("u8" if t == "e2m1x2" else t, k)


Key = tuple[str, ...]


def key_of(form: Form) -> Key:
    """Return the types of the operands. Instructions that add the carry have it as a last operand."""
    types = tuple(column_type(t) for t in form.sources)
    approximates = ("approx",) if approximation(form) else ()
    return (*types, *("pred",) * (form.opcode in CARRY), *approximates)


def columns_of(key: Key) -> list[list[int]]:
    found = [column(t, k) for k, t in enumerate(key) if t != "approx"]
    if key[-1] == "approx":
        for k, t in enumerate(key[:-1]):
            some = [*edges(FLOAT_PAIRS.get(t, t)), *EDGES[FLOAT_PAIRS.get(t, t)]]
            some = some[11 * k :] + some[: 11 * k]  # of two operands, different ones
            found[k][: len(some)] = [edge | edge << 16 for edge in some] if t in FLOAT_PAIRS else some
    return found


def kernel(name: str, key: Key, forms: list[Form]) -> str:
    """Return a kernel that stores the results of all forms, each in COUNT places of 8 bytes."""
    lines = [f".visible .entry {name}(.param .u64 out, .param .u64 in) {{ {REGISTERS}"]
    lines.append(".reg .b64 %out, %in, %at; .reg .b32 %t, %n; .reg .b64 %wide;")
    lines.append(
        "ld.param.u64 %out, [out]; ld.param.u64 %in, [in]; mov.u32 %t, %ctaid.x; mov.u32 %n, %ntid.x;"
    )
    lines.append("mov.u32 %x32_1, %tid.x; mad.lo.u32 %t, %t, %n, %x32_1; mul.wide.u32 %at, %t, 8;")
    lines.append("add.u64 %out, %out, %at; add.u64 %in, %in, %at;")
    for k, t in enumerate(t for t in key if t != "approx"):
        place = f"[%in+{8 * COUNT * k}]"
        if t == "pred":
            lines.append(f"ld.global.u32 %n, {place}; setp.ne.u32 {register(t, k + 1)}, %n, 0;")
        else:
            lines.append(f"ld.global.b{register_bits(t)} {register(t, k + 1)}, {place};")
    for number, form in enumerate(forms):
        if form.opcode in CARRY:
            lines.append(f"selp.u32 %n, 1, 0, %x0_{len(key)}; add.cc.u32 %n, %n, -1;")
        lines.append(str(form))
        first, *others = form.operands[0].split("|")
        made = register(first, 0)
        if first == "pred":
            lines.append(f"selp.u32 %x32_0, 1, 0, {made};")
            made = "%x32_0"
        if others:
            lines.append("@%x0_9 xor.b32 %x32_0, %x32_0, " + ("2;" if first == "pred" else "0x5a5a5a5a;"))
        lines.append(
            f"cvt.u64.u{made[2:].split('_')[0]} %wide, {made};"
            if made[:4] != "%x64"
            else f"mov.u64 %wide, {made};"
        )
        lines.append(f"st.global.u64 [%out+{8 * COUNT * number}], %wide;")
    return "\n".join(lines) + "\nret; }\n"


def differs(form: Form, columns: list[list[int]], results: list[int]) -> str | None:
    """Return what is wrong with the results of a form."""
    near = approximation(form)
    if near is not None:
        pair = form.modifiers[-1] in FLOAT_PAIRS
        for got, *patterns in zip(results, *columns, strict=True):
            halves = [
                (got & 0xFFFF, [p & 0xFFFF for p in patterns]),
                (got >> 16, [p >> 16 for p in patterns]),
            ]
            for one, its in halves if pair else [(got, patterns)]:
                if not near.allows(one, *its):
                    return f"{form} {[hex(p) for p in its]}: {one:#x}"
        return None
    t = result_type(form)
    for got, right, *patterns in zip(results, wanted(form, columns), *columns, strict=True):
        if right is not None and not same(got, right, t):
            return f"{form} {[hex(p) for p in patterns]}: {got:#x}, not {right:#x}"
    return None


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> list[Form]:
    """The forms that ptxas knows."""
    return legal(tmp_path_factory.mktemp("forms"), arithmetic())


@pytest.fixture(scope="module")
def forms(known: list[Form]) -> list[Form]:
    return accepted(known)


@pytest.mark.every(3)
def test_what_ptxas_refuses_is_refused(known: list[Form]) -> None:
    """Of all combinations of types and modifiers, the device takes none that ptxas does not know."""
    of_ptxas = set(known)
    others = [form for form in dict.fromkeys(arithmetic()) if form not in of_ptxas]
    assert len(others) > 9 * len(known)
    assert [str(form) for form in accepted(others)] == []


@pytest.mark.parametrize(
    ("version", "target"),
    [
        ("3.0", "sm_30"), ("4.3", "sm_53"), ("6.3", "sm_75"), ("6.5", "sm_75"), ("7.0", "sm_80"), ("7.8", "sm_90"), ("8.1", "sm_90"),
        ("8.6", "sm_89"), ("8.6", "sm_100"), ("9.0", "sm_30"), ("9.0", "sm_61"), ("9.0", "sm_86"),
    ],
)  # fmt: skip
@pytest.mark.every(3)
def test_the_forms_of_older_versions_and_targets(
    version: str, target: str, forms: list[Form], tmp_path: Path
) -> None:
    head = f".version {version}\n.target {target}\n.address_size 64\n"
    of_ptxas, of_device = set(legal(tmp_path, forms, head)), set(accepted(forms, head))
    assert sorted(map(str, of_device - of_ptxas)) == []
    assert sorted(map(str, of_ptxas - of_device)) == []


@pytest.mark.every(2)
def test_every_form(forms: list[Form]) -> None:
    groups: dict[Key, list[Form]] = defaultdict(list)
    for form in forms:
        if form.name in UNDOCUMENTED:
            continue
        groups[key_of(form)].append(form)
    parts = [(key, some[at : at + MOST]) for key, some in groups.items() for at in range(0, len(some), MOST)]
    device = Device(HEAD + "".join(kernel(f"k{n}", *part) for n, part in enumerate(parts)))
    wrong = []
    for n, (key, some) in enumerate(parts):
        columns = columns_of(key)
        given, made = Array(np.array(columns, np.uint64)), Array(np.zeros((len(some), COUNT), np.uint64))
        device.launch(f"k{n}", COUNT // 128, 128, made, given)
        for form, results in zip(some, made.host.tolist(), strict=True):
            if said := differs(form, columns, results):
                wrong.append(said)
    assert not wrong, f"{len(wrong)} forms\n" + "\n".join(wrong)

"""Which forms of loads, stores, atomics and barriers exist: ptxas and the embedded device agree on each of many combinations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from cudasim.translate import syntax
from engine_forms import HEAD, accepted, kernel, legal, register
from gpubpf.ptx.module import PtxInstruction
from gpubpf.ptx.parser import parse

TYPES = "b8 u8 s8 b16 u16 s16 b32 u32 s32 b64 u64 s64 f16 f32 f64 f16x2 bf16 bf16x2".split()
FEW = ["u32", "s64", "f32", "f16", "f16x2", "bf16"]
SEMANTICS = (
    " weak volatile relaxed acquire release relaxed.gpu relaxed.sys acquire.cta release.gpu acq_rel.cluster gpu "
    "mmio.relaxed.sys mmio.relaxed.gpu"
).split(" ")
SPACES = " global shared local const shared::cta shared::cluster".split(" ")
CACHED = " ca cg cs lu cv wb wt nc L1::evict_last L1::no_allocate L2::128B L2::evict_last".split(" ")
VECTORS = [
    ("v2", "b32"),
    ("v4", "f32"),
    ("v2", "u64"),
    ("v4", "u64"),
    ("v8", "b32"),
    ("v4", "b16"),
    ("v2", "b8"),
    ("v4", "f16"),
]


def named(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def value(t: str, vector: str, first: int = 0) -> str:
    registers = [register(t.removeprefix("b") if t.startswith("bf") else t, k) for k in range(first, 8)]
    return "{" + ", ".join(registers[: int(vector[1:])]) + "}" if vector else register(t, first)


def accesses() -> Iterator[str]:
    for semantics, space, (vector, t) in itertools.product(
        SEMANTICS, SPACES, [*(("", t) for t in TYPES), *VECTORS]
    ):
        if semantics in ("", "weak", "relaxed.gpu") or t in ("u32", "f16") or vector:
            yield f"{named('ld', semantics, space, vector, t)} {value(t, vector)}, [%x64_9];"
            yield f"{named('st', semantics, space, vector, t)} [%x64_9], {value(t, vector)};"
    for semantics, space, cached, (vector, t) in itertools.product(
        SEMANTICS[:7], SPACES, CACHED, [("", "u32"), *VECTORS[3:5]]
    ):
        yield f"{named('ld', semantics, space, cached, vector, t)} {value(t, vector)}, [%x64_9];"
        yield f"{named('st', semantics, space, cached, vector, t)} [%x64_9], {value(t, vector)};"


def atomics() -> Iterator[str]:
    operations = "add min max inc dec and or xor exch cas add.noftz min.noftz max.noftz add.ftz".split()
    plain = [("", space, "", t) for space in SPACES for t in TYPES]
    ordered = [(semantics, "global", "", t) for semantics in SEMANTICS for t in FEW]
    vectors = [
        ("", space, vector, t) for space in SPACES for vector, t in [*VECTORS, ("v8", "f16"), ("v2", "f16x2")]
    ]
    for operation, (semantics, space, vector, t) in itertools.product(
        operations, [*plain, *ordered, *vectors]
    ):
        name = named(semantics, space, operation, vector, t)
        third = f", {value(t, vector, 0)}" if operation == "cas" else ""
        yield f"atom.{name} {value(t, vector)}, [%x64_9], {value(t, vector)}{third};"
        yield f"red.{name} [%x64_9], {value(t, vector)}{third};"


def barriers() -> Iterator[str]:
    kinds = {
        "sync": "", "arrive": "", "red.popc.u32": "%x32_3, ", "red.popc.s32": "%x32_3, ", "red.and.u32": "%x32_3, ",
        "red.and.pred": "%x0_1, ", "red.or.pred": "%x0_1, ", "red.xor.pred": "%x0_1, ",
    }  # fmt: skip
    numbers = ["0", "15", "16", "-1", "%x32_1", "0, 64", "0, 33", "%x32_1, %x32_2", "1, 0", "1, 32, 5"]
    for opcode, cta, (kind, result), aligned, number in itertools.product(
        ("bar", "barrier"), ("", "cta"), kinds.items(), ("", "aligned"), numbers
    ):
        first, *rest = kind.split(".")
        name = named(opcode, cta, first, *rest[:-1], aligned, *rest[-1:])
        yield f"{name} {result}{number}{', %x0_2' if result else ''};"


def known_here(forms: list[str]) -> list[str]:
    """Return the forms that the device's table of forms has."""
    module = parse(HEAD + kernel("k", "\n".join(forms)))
    found = [part for part in module.functions["k"].body if isinstance(part, PtxInstruction)][:-1]
    assert len(found) == len(forms)
    return [form for form, i in zip(forms, found, strict=True) if not syntax.reason(i, (9, 0), "sm_100a")]


def test_accesses_and_atomics(tmp_path: Path) -> None:
    forms = [*dict.fromkeys([*accesses(), *atomics()])]
    assert len(forms) > 5000
    assert sorted(set(known_here(forms)) ^ set(legal(tmp_path, forms))) == []


def test_barriers(tmp_path: Path) -> None:
    forms = [*barriers()]
    assert sorted(set(accepted(forms)) ^ set(legal(tmp_path, forms))) == []

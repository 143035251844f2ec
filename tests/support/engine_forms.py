"""The forms of PTX's arithmetic instructions that ptxas and the embedded device accept.

A form is an instruction with its modifiers and the kinds of its operands. `CANDIDATES` has more than PTX has: ptxas says which exist.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cudasim.translate.arithmetic import TABLE
from cudasim.translate.program import TranslatedModule
from gpubpf.ptx.parser import parse
from gpubpf_sass import need

ALL = "GPUBPF_OPERANDS" in os.environ  # also all of the comparisons
TARGET = "sm_100a"  # has all the forms of older targets
HEAD = f".version 9.0\n.target {TARGET}\n.address_size 64\n"
INTEGERS = ["u16", "s16", "u32", "s32", "u64", "s64"]
PACKED = ["f16x2", "bf16x2", "u16x2", "s16x2"]
TYPES = [*INTEGERS, "u8", "s8", "b16", "b32", "b64", "f16", "bf16", "f32", "f64", *PACKED, "f32x2", "pred"]
SCALARS = ["u8", "s8", *INTEGERS, "f16", "bf16", "f32", "f64", "tf32"]
SMALL = ["e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "e2m1x2", "ue8m0x2"]
PAIRS = ["f16x2", "bf16x2", *SMALL]
RESULTS = [*INTEGERS, "f16", "bf16", "f32", "f64", "f16x2", "bf16x2"]  # of set
ROUNDINGS = ["", "rn", "rz", "rm", "rp"]
RELATIONS = ["eq", "ne", "lt", "le", "gt", "ge"]
COMPARISONS = [*RELATIONS, "lo", "ls", "hi", "hs", *(f"{name}u" for name in RELATIONS), "num", "nan"]
SIGNS = ["u32", "s32"]


@dataclass(frozen=True)
class Form:
    """`operands`: types, of the destination first; `0x6a` is a constant, and `pred|pred` are two destinations."""

    name: str
    operands: tuple[str, ...]

    @property
    def opcode(self) -> str:
        return self.name.split(".")[0]

    @property
    def modifiers(self) -> list[str]:
        return self.name.split(".")[1:]

    @property
    def sources(self) -> list[str]:
        return [t for t in self.operands[1:] if not t.startswith("0")]

    def __str__(self) -> str:
        """Return the instruction: its destination is register 0, its sources are registers 1 and up, a second destination is 9."""
        first, *others = self.operands
        destination = "|".join(register(t, 9 * k) for k, t in enumerate(first.split("|")))
        number = iter(range(1, 9))
        rest = (t if t.startswith("0") else register(t, next(number)) for t in others)
        return f"{self.name} {', '.join((destination, *rest))};"


Kinds = Callable[[list[str]], Sequence[str]]


def last(count: int) -> Kinds:
    """Return the kinds of a destination and `count` sources that have the instruction's last type."""
    return lambda m: [m[-1]] * (count + 1)


def wide(count: int) -> Kinds:
    def kinds(m: list[str]) -> Sequence[str]:
        t = m[-1]
        if "wide" not in m:
            return [t] * (count + 1)
        double = {"16": "32", "32": "64"}.get(t[1:], "")
        return [t[0] + double, t, t, *[t[0] + double] * (count - 2)]

    return kinds


def mixed(count: int, *small: int) -> Kinds:
    """Return the kinds of an f32 operation whose sources at the places `small` have the last type."""
    return lambda m: [m[-1] if k in small else "f32" for k in range(count + 1)]


def first_of(t: str, count: int) -> Kinds:
    return lambda m: [t, *[m[-1]] * count]


def compared(result: str) -> Kinds:
    return lambda m: [result, m[-1], m[-1], "pred"]


def with_count(count: int, counts: int) -> Kinds:
    return lambda m: [*[m[-1]] * (count + 1), *["u32"] * counts]


def always(*types: str) -> Kinds:
    return lambda m: types


# Of each opcode: alternatives for each place of the name, and the types of operands.
CANDIDATES: list[tuple[str, list[list[str]], Kinds]] = []


def candidates(opcodes: str, *places: str | list[str], kinds: Kinds) -> None:
    """Note candidates. A place that is a string may have this modifier or none."""
    for opcode in opcodes.split():
        CANDIDATES.append((opcode, [["", p] if isinstance(p, str) else p for p in places], kinds))


candidates("add sub", ROUNDINGS, "ftz", "sat", "cc", TYPES, kinds=last(2))
candidates("add sub", ROUNDINGS, "sat", ["f32"], ["f16", "bf16"], kinds=mixed(2, 1))
candidates("addc subc", "sat", "cc", TYPES, kinds=last(2))
candidates("mul", ["", "lo", "hi", "wide"], ROUNDINGS, "ftz", "sat", TYPES, kinds=wide(2))
candidates("mad madc", ["", "lo", "hi", "wide"], ROUNDINGS, "ftz", "sat", "cc", TYPES, kinds=wide(3))
candidates("fma", ROUNDINGS, "ftz", "sat", "oob", "relu", TYPES, kinds=last(3))
candidates("fma", ROUNDINGS, "sat", ["f32"], ["f16", "bf16"], kinds=mixed(3, 1, 2))
candidates("mul24", ["lo", "hi"], "sat", TYPES, kinds=last(2))
candidates("mad24", ["lo", "hi"], "sat", TYPES, kinds=last(3))
candidates("div", [*ROUNDINGS, "approx", "full"], "ftz", "sat", TYPES, kinds=last(2))
candidates("rem", "ftz", TYPES, kinds=last(2))
candidates("abs neg", "ftz", "sat", TYPES, kinds=last(1))
candidates("sad", "sat", TYPES, kinds=last(3))
for sources in (2, 3):
    signs = ["", "xorsign.abs", "abs"]
    candidates("min max", "ftz", "NaN", signs, "relu", TYPES, kinds=last(sources))
candidates("min max", TYPES, ["relu"], kinds=lambda m: [m[0]] * 3)
candidates("and or xor", TYPES, kinds=last(2))
candidates("not cnot brev mov", TYPES, kinds=last(1))
candidates("shl shr", TYPES, kinds=with_count(1, 1))
candidates("shf", ["l", "r"], ["clamp", "wrap"], TYPES, kinds=with_count(2, 1))
candidates("popc clz bfind", "shiftamt", TYPES, kinds=first_of("u32", 1))
candidates("fns", TYPES, kinds=always("b32", "b32", "b32", "s32"))
candidates("bfe", TYPES, kinds=with_count(1, 2))
candidates("bfi", TYPES, kinds=with_count(2, 2))
candidates("bmsk", ["clamp", "wrap"], TYPES, kinds=last(2))
candidates("szext", ["clamp", "wrap"], TYPES, kinds=with_count(1, 1))
candidates("prmt", TYPES, ["", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"], kinds=always(*["b32"] * 4))
candidates("lop3", TYPES, kinds=always(*["b32"] * 4, "0x6a"))
candidates("lop3", ["or", "and"], TYPES, kinds=always("b32|pred", *["b32"] * 3, "0x6a", "pred"))
candidates("dp4a", SIGNS, SIGNS, kinds=always(*["b32"] * 4))
candidates("dp2a", ["lo", "hi"], SIGNS, SIGNS, kinds=always(*["b32"] * 4))
simd = "vabsdiff vadd vsub vavrg vmin vmax"
candidates(
    " ".join(f"{name}{parts}" for name in simd.split() for parts in (2, 4)),
    *[SIGNS] * 3, ["", "sat", "add"], kinds=always(*["b32"] * 4),
)  # fmt: skip
candidates("vset2 vset4", SIGNS, SIGNS, RELATIONS, "add", kinds=always(*["b32"] * 4))
candidates(
    "vadd vsub vabsdiff vmin vmax vshl vshr",
    *[SIGNS] * 3,
    "sat",
    ["", "clamp", "wrap"],
    kinds=always(*["b32"] * 3),
)
candidates("vset", SIGNS, SIGNS, RELATIONS, kinds=always(*["b32"] * 3))
candidates("vmad", *[SIGNS] * 3, "po", "sat", ["", "shr7", "shr15"], kinds=always(*["b32"] * 4))
candidates("rcp sqrt rsqrt", [*ROUNDINGS, "approx"], "ftz", "sat", TYPES, kinds=last(1))
candidates("sin cos ex2 lg2 tanh", "approx", "ftz", "sat", TYPES, kinds=last(1))
candidates("copysign", "ftz", TYPES, kinds=last(2))
tests = ["finite", "infinite", "number", "notanumber", "normal", "subnormal"]
candidates("testp", tests, TYPES, kinds=first_of("pred", 1))
joined = ["and", "or", "xor"]
for result in ("pred", "pred|pred"):
    candidates("setp", COMPARISONS, "ftz", TYPES, kinds=first_of(result, 2))
    candidates("setp", COMPARISONS, joined, "ftz", TYPES, kinds=compared(result))
candidates("set", COMPARISONS, "ftz", RESULTS, TYPES, kinds=lambda m: [m[-2], m[-1], m[-1]])
candidates(
    "set",
    COMPARISONS,
    joined,
    "ftz",
    RESULTS,
    TYPES,
    kinds=lambda m: [m[-2], m[-1], m[-1], "pred"],
)
candidates("selp", TYPES, kinds=lambda m: [m[-1]] * 3 + ["pred"])
candidates("slct", "ftz", TYPES, TYPES, kinds=lambda m: [m[-2]] * 3 + [m[-1]])
whole = ["rni", "rzi", "rmi", "rpi"]
candidates("cvt", [*ROUNDINGS, *whole], "ftz", "sat", SCALARS, SCALARS, kinds=lambda m: m[-2:])
candidates("cvt", ["rn", "rz", "rna"], "satfinite", "relu", SCALARS, ["f32"], kinds=lambda m: m[-2:])
candidates(
    "cvt", ["rn", "rz", "rp"], "satfinite", "relu", PAIRS, ["f32"], kinds=lambda m: [m[-2], "f32", "f32"]
)
candidates("cvt", ["rn", "rz", "rp"], "satfinite", "relu", PAIRS, PAIRS, kinds=lambda m: m[-2:])
candidates("cvt", ["pack"], ["sat"], ["u16", "s16"], ["s32"], kinds=always("b32", "s32", "s32"))
tiny = ["u8", "s8", "u4", "s4", "u2", "s2"]
candidates("cvt", ["pack"], ["sat"], tiny, ["s32"], ["b32"], kinds=always("b32", "s32", "s32", "b32"))


def register_bits(t: str) -> int:
    """Return the width of the register for a type; 0 for a predicate. Bytes are in registers of 16 bits, but for two floats of 4."""
    if t in ("pred", "tf32", *PACKED):
        return {"pred": 0}.get(t, 32)
    if t.endswith("x2"):
        return {"f32x2": 64, "e2m1x2": 8}.get(t, 16)
    return max(16, int(re.sub("[a-z]", "", t)))


def register(t: str, number: int) -> str:
    return f"%x{register_bits(t)}_{number}"


REGISTERS = "".join(f".reg .{'pred' if t == 0 else f'b{t}'} %x{t}_<10>; " for t in (0, 8, 16, 32, 64))


def arithmetic() -> Iterator[Form]:
    """Yield the candidates for forms of arithmetic instructions."""
    for opcode, places, kinds in CANDIDATES:
        if opcode not in TABLE:
            continue
        for chosen in itertools.product(*places):
            modifiers = [m for m in chosen if m]
            try:
                form = Form(".".join((opcode, *modifiers)), tuple(kinds(modifiers)))
                str(form)
            except ValueError:  # there is no wide product of this type
                continue
            if ALL or opcode not in ("set", "setp") or _chosen(form):
                yield form


def _chosen(form: Form) -> bool:
    """Return whether a comparison is one of the fourth that is tested: each has one of the Boolean operators, or none."""
    operators = {"and": 1, "or": 2, "xor": 3}
    rest = [m for m in (*form.modifiers, form.operands[0]) if m not in operators]
    return zlib.crc32(".".join(rest).encode()) % 4 == max(operators.get(m, 0) for m in form.modifiers)


T = TypeVar("T", bound=object)  # an instruction: str() is its text


def legal(folder: Path, candidates: Iterable[T], head: str = HEAD) -> list[T]:
    """Return the instructions that ptxas knows. It finds some errors only in a text without errors of other kinds."""
    forms = list(dict.fromkeys(candidates))
    head = f"{head}.visible .entry k() {{ {REGISTERS}\n"
    first = head.count("\n") + 1
    path = folder / "forms.ptx"
    command = [need("ptxas"), "-O0", f"-arch={TARGET}", str(path), "-o", "/dev/null"]
    while True:
        path.write_text(head + "\n".join(map(str, forms)) + "\nret; }\n")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = done.stderr + done.stdout
        wrong = {int(line) - first for line in re.findall(r"line (\d+); (?:error|fatal)", said)}
        if not wrong:
            assert done.returncode == 0, said[:2000]
            return forms
        forms = [form for k, form in enumerate(forms) if k not in wrong]


def kernel(name: str, body: str) -> str:
    return f".visible .entry {name}() {{ {REGISTERS} {body} ret; }}\n"


def accepted(forms: Sequence[T], head: str = HEAD) -> list[T]:
    """Return the instructions that the embedded device translates."""
    module = TranslatedModule(parse(head + "".join(kernel(f"k{k}", str(f)) for k, f in enumerate(forms))))
    return [form for k, form in enumerate(forms) if f"k{k}" not in module.refused]

"""The forms of most instructions that PTX has: types and modifiers (PTX ISA 9.7.1 to 9.7.6, 9.7.8, 9.7.9, 9.7.13, 9.7.17).

    reason(instruction, (7, 8), "sm_80")     # "" or why a module of PTX 7.8 for sm_80 has no such instruction

Like ptxas, this check takes modifiers in nearly any order. Opcodes without a row are not checked here, but by their emitters. Emitters
also refuse some forms that PTX has.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from gpubpf.ptx.module import Name, PtxInstruction

_TYPE = re.compile(
    r"[usb](?:8|16|32|64|128)|[us][24]|[us]16x2|b?f16(?:x2)?|f32(?:x2)?|f64|tf32|u?e\dm\d(?:x[24])?|pred"
)


@dataclass(frozen=True)
class _Form:
    """A form of an instruction.

    types            the allowed types, each in order
    groups           groups of modifiers; an instruction has at most one modifier of each group
    required         for each group, whether an instruction must have one of its modifiers
    operands         the allowed numbers of operands, without a hint about the cache; () if that is not checked
    version, target  the first version of PTX and the lowest architecture with this form
    is_specific      whether only targets with a suffix, such as sm_100a and sm_100f, have this form
    needs_sync       whether the form is only for PTX before 6.3 or targets below sm_70; the later form has .sync
    """

    types: frozenset[tuple[str, ...]]
    groups: tuple[frozenset[str], ...]
    required: tuple[bool, ...]
    operands: tuple[int, ...]
    version: tuple[int, int]
    target: int
    is_specific: bool
    needs_sync: bool

    def has(self, types: tuple[str, ...], modifiers: tuple[str, ...], operands: int) -> bool:
        if types not in self.types:
            return False
        if self.operands and operands - ("L2::cache_hint" in modifiers) not in self.operands:
            return False
        numbers = [next((n for n, group in enumerate(self.groups) if m in group), -1) for m in modifiers]
        needed = {n for n, is_required in enumerate(self.required) if is_required}
        return -1 not in numbers and len(set(numbers)) == len(numbers) and needed <= set(numbers)


_FORMS: dict[str, list[_Form]] = {}


def _form(
    opcodes: str,
    types: str | Iterable[str],
    *groups: str,
    operands: int | tuple[int, ...] = (),
    since: str = "0.0 0",
    needs_sync: bool = False,
) -> None:
    """Add a form of several opcodes to the table.

    types: the allowed types, separated by spaces, each as in an instruction: "f32.f16"; [""] for an instruction without a type
    groups: groups of modifiers, separated by spaces; an instruction must have a modifier of a group that begins with !
    operands: the allowed number or numbers of operands, without a hint about the cache; () if that is not checked
    needs_sync: whether the form is only for PTX before 6.3 or targets below sm_70
    since: the first version of PTX and the lowest architecture, with "a" if the target must have a suffix; by default, the oldest that
      ptxas takes
    """
    version, target = since.split()
    major, minor = version.split(".")
    words = types.split() if isinstance(types, str) else types
    form = _Form(
        frozenset(tuple(word.split(".")) if word else () for word in words),
        tuple(frozenset(group.lstrip("!").split()) for group in groups),
        tuple(group.startswith("!") for group in groups),
        operands if isinstance(operands, tuple) else (operands,),
        (int(major), int(minor)),
        int(target.rstrip("a")),
        target.endswith("a"),
        needs_sync,
    )
    for opcode in opcodes.split():
        _FORMS.setdefault(opcode, []).append(form)


def _products(*places: str) -> list[str]:
    """Return all combinations of the types of several places."""
    found = [""]
    for place in places:
        found = [f"{before}.{t}".lstrip(".") for before in found for t in place.split()]
    return found


def _can_saturate(to: str, of: str) -> bool:
    """Return whether one integer type has values that the other does not have."""
    return (of[0] == "s" and to[0] == "u") or int(of[1:]) - (of[0] == "s") > int(to[1:]) - (to[0] == "s")


_SIGNED, _UNSIGNED = "s16 s32 s64", "u16 u32 u64"
_INTEGERS = f"{_SIGNED} {_UNSIGNED}"
_WIDE = "s32 s64 u32 u64"
_BITS = "b16 b32 b64"
_HALVES, _BRAINS = "f16 f16x2", "bf16 bf16x2"
_ROUNDED = "rn rz rm rp"
_WHOLE = "rni rzi rmi rpi"

# Integer arithmetic, with and without carry.
_form("add sub", f"{_INTEGERS}")
_form("add", "u16x2 s16x2", since="8.0 90")
_form("add sub", "s32", "!sat")
_form("add sub addc subc", "s32 u32", "!cc")
_form("add sub addc subc", "s64 u64", "!cc", since="4.3 0")
_form("addc subc", _INTEGERS)
_form("addc subc", "s32", "!sat")
_form("mul", _INTEGERS, "!lo hi")
_form("mul", "s16 s32 u16 u32", "!wide")
_form("mad madc", _INTEGERS, "!lo hi")
_form("mad", "s16 s32 u16 u32", "!wide")
_form("mad madc", "s32 u32", "!lo hi", "!cc")
_form("mad madc", "s64 u64", "!lo hi", "!cc", since="4.3 0")
_form("mad madc mad24", "s32", "!hi", "!sat")
_form("mul24 mad24", "s32 u32", "!lo hi")
_form("div rem sad", _INTEGERS)
_form("abs neg", _SIGNED)
_form("min max", _INTEGERS, operands=3)
_form("min max", "u16x2 s16x2", operands=3, since="8.0 90")
_form("min max", "s32 s16x2", "!relu", operands=3, since="8.0 90")
_form("popc clz brev", "b32 b64")
_form("bfind", _WIDE, "shiftamt")
_form("fns", "b32", since="6.0 0")
_form("bfe", _WIDE)
_form("bfi", "b32 b64")
_form("bmsk", "b32", "!clamp wrap", since="7.6 70")
_form("szext", "s32 u32", "!clamp wrap", since="7.6 70")
_form("dp4a", _products("s32 u32", "s32 u32"), since="5.0 61")
_form("dp2a", _products("s32 u32", "s32 u32"), "!lo hi", since="5.0 61")
# Bits.
_form("and or xor not", f"{_BITS} pred")
_form("cnot shl", _BITS)
_form("shr", f"{_BITS} {_INTEGERS}")
_form("shf", "b32", "!l r", "!clamp wrap", since="3.1 32")
_form("lop3", "b32", since="4.3 50")
_form("lop3", "b32", "!and or", since="8.2 70")
_form("prmt", "b32", "f4e b4e rc8 ecl ecr rc16")
# Floating-point arithmetic.
_form("add sub mul", "f32", _ROUNDED, "ftz", "sat")
_form("add sub mul", "f32x2", _ROUNDED, "ftz", since="8.6 100")
_form("add sub mul", "f64", _ROUNDED)
_form("add sub mul", _HALVES, "rn", "ftz", "sat", since="4.2 53")
_form("add sub mul", _BRAINS, "rn", since="7.8 90")
_form("add sub", "f32.f16 f32.bf16", _ROUNDED, "sat", since="8.6 100")
_form("fma", "f32.f16 f32.bf16", f"!{_ROUNDED}", "sat", since="8.6 100")
_form("fma mad", "f32", f"!{_ROUNDED}", "ftz", "sat")
_form("fma", "f32x2", f"!{_ROUNDED}", "ftz", since="8.6 100")
_form("fma mad", "f64", f"!{_ROUNDED}")
_form("fma", _HALVES, "!rn", "ftz", "sat", since="4.2 53")
_form("fma", _HALVES, "!rn", "ftz", "!relu", since="7.0 80")
_form("fma", _HALVES, "!rn", "!oob", "sat relu", since="8.1 90")
_form("fma", _BRAINS, f"!{_ROUNDED}", "relu", since="7.0 80")
_form("fma", _BRAINS, f"!{_ROUNDED}", "!oob", "relu", since="8.1 90")
_form("div", "f32", f"!approx full {_ROUNDED}", "ftz")
_form("div", "f64", f"!{_ROUNDED}")
_form("abs neg", "f32", "ftz")
_form("abs", _HALVES, "ftz", since="6.5 53")
_form("neg", _HALVES, "ftz", since="6.0 53")
_form("abs neg", "f64")
_form("abs neg", _BRAINS, since="7.0 80")
_form("min max", "f32", "ftz", operands=3)
_form("min max", "f32", "ftz", "!NaN", operands=3, since="7.0 80")
_form("min max", _HALVES, "ftz", "NaN", operands=3, since="7.0 80")
_form("min max", f"f32 {_HALVES}", "ftz", "NaN", "!xorsign", "!abs", operands=3, since="7.2 86")
_form("min max", "f32", "ftz", "NaN", "abs", operands=4, since="8.8 100")
_form("min max", _BRAINS, "NaN", operands=3, since="7.0 80")
_form("min max", _BRAINS, "NaN", "!xorsign", "!abs", operands=3, since="7.2 86")
_form("min max", "f64", operands=3)
_form("rcp sqrt", "f32", f"!approx {_ROUNDED}", "ftz")
_form("rcp sqrt", "f64", f"!{_ROUNDED}")
_form("rcp", "f64", f"!approx {_ROUNDED}", "!ftz")
_form("rsqrt", "f32", "!approx", "ftz")
_form("rsqrt", "f64", "!approx")
_form("rsqrt", "f64", "!approx", "!ftz", since="4.0 0")
_form("sin cos lg2 ex2", "f32", "!approx", "ftz")
_form("ex2", _HALVES, "!approx", since="7.0 75")
_form("ex2", _BRAINS, "!approx", "!ftz", since="7.8 90")
_form("tanh", f"f32 {_HALVES}", "!approx", since="7.0 75")
_form("tanh", _BRAINS, "!approx", since="7.8 90")
_form("copysign", "f32 f64")
_form("testp", "f32 f64", "!finite infinite number notanumber normal subnormal")
# Comparison and selection.
_EQUAL, _ORDERED = "eq ne", "eq ne lt le gt ge"
_OF_FLOATS = f"{_ORDERED} equ neu ltu leu gtu geu num nan"
_JOINED = "and or xor"
for _sources, _operators in (
    (_BITS, _EQUAL), (_SIGNED, _ORDERED), (_UNSIGNED, f"{_ORDERED} lo ls hi hs"), ("f32 f64", _OF_FLOATS),
):  # fmt: skip
    _form("setp", _sources, f"!{_operators}", _JOINED)
    _form("set", _products("u32 s32 f32", _sources), f"!{_operators}", _JOINED)
    _form("set", _products("f16", _sources), f"!{_operators}", _JOINED, since="4.2 53")
    _form("set", _products("bf16", _sources), f"!{_operators}", _JOINED, since="7.8 90")
_form("setp", "f16 f16x2", f"!{_OF_FLOATS}", _JOINED, "ftz", since="4.2 53")
_form("setp", "f32", f"!{_OF_FLOATS}", _JOINED, "!ftz")
_form("setp", _BRAINS, f"!{_OF_FLOATS}", _JOINED, since="7.8 90")
_form("set", _products("u32 s32 f32", "f32"), f"!{_OF_FLOATS}", _JOINED, "!ftz")
_form("set", "f16.f16 f16x2.f16x2", f"!{_OF_FLOATS}", _JOINED, "ftz", since="4.2 53")
_form("set", "f16.f32", f"!{_OF_FLOATS}", _JOINED, "!ftz", since="4.2 53")
_form(
    "set",
    [*_products("u16 s16", "f16"), *_products("u32 s32", _HALVES)],
    f"!{_OF_FLOATS}",
    _JOINED,
    "ftz",
    since="6.5 53",
)
_to_brains = [
    "bf16.f16",
    "bf16.bf16",
    "bf16x2.bf16x2",
    *_products("u16 s16", "bf16"),
    *_products("u32 s32", _BRAINS),
]
_form("set", _to_brains, f"!{_OF_FLOATS}", _JOINED, since="7.8 90")
_SELECTED = f"{_BITS} {_INTEGERS} f32 f64"
_form("selp", _SELECTED)
_form("slct", _products(_SELECTED, "s32"))
_form("slct", _products(_SELECTED, "f32"), "ftz")
# Moves and conversions.
_form("mov", f"{_SELECTED} pred", "v2 v4")
_form("mov", "b128", since="8.3 70")
_NARROW = f"s8 u8 {_INTEGERS}"
_form("cvt", _products(_NARROW, _NARROW))
_form("cvt", {p for p in _products(_NARROW, _NARROW) if _can_saturate(*p.split("."))}, "!sat")
_form("cvt", {*_products("f16 f32 f64", f"{_NARROW} f64")} - {"f64.f64"}, f"!{_ROUNDED}", "sat")
_form("cvt", [*_products("f32", f"{_NARROW} f64"), "f16.f32"], f"!{_ROUNDED}", "ftz", "sat")
_form("cvt", _products("bf16", f"{_INTEGERS} f64"), f"!{_ROUNDED}", since="7.8 90")
_form("cvt", _products(_NARROW, "f16 f32 f64"), f"!{_WHOLE}", "sat")
_form("cvt", _products(_NARROW, "f32"), f"!{_WHOLE}", "ftz", "sat")
_form("cvt", _products(_INTEGERS, "bf16"), f"!{_WHOLE}", since="7.8 90")
_form("cvt", "f32.f32 f16.f16 f64.f64", _WHOLE, "sat")
_form("cvt", "f32.f32", _WHOLE, "ftz", "sat")
_form("cvt", "bf16.bf16", _WHOLE, since="7.8 90")
_form("cvt", "f32.f16 f64.f32", "ftz", "sat")
_form("cvt", "f64.f16", "sat")
_form("cvt", "bf16.f16 f16.bf16 f64.bf16", _ROUNDED, since="7.8 90")
_form("cvt", "f32.bf16", _ROUNDED, since="7.1 80")
_form("cvt", "f32.bf16", _ROUNDED, "!ftz", since="7.8 90")
_PACKED = "bf16.f32 f16x2.f32 bf16x2.f32"
_form("cvt", "bf16.f32", f"!{_ROUNDED}", "ftz", since="7.0 80")
_form("cvt", _PACKED, "!rn rz", "relu", since="7.0 80")
_form("cvt", f"f16.f32 {_PACKED}", "!rn rz", "satfinite", "!relu", since="8.1 80")
_form("cvt", "f16.f32", "!rn rz", "!relu", since="7.0 80")
_form("cvt", "f16.f32", "!rn rz", "!satfinite", since="8.1 70")
_form("cvt", _PACKED, "!rn rz", "!satfinite", since="8.1 80")
_form("cvt", "tf32.f32", "!rn rz", "relu", since="7.8 90")
_form("cvt", "tf32.f32", "!rn rz", "relu", "!satfinite", since="8.6 100")
_form("cvt", "tf32.f32", "!rna", since="7.0 80")
_form("cvt", "tf32.f32", "!rna", "!satfinite", since="8.1 80")
for _since in ("7.8 90", "8.1 89"):
    _form("cvt", _products("e4m3x2 e5m2x2", "f32 f16x2"), "!rn", "!satfinite", "relu", since=_since)
    _form("cvt", _products("f16x2", "e4m3x2 e5m2x2"), "!rn", "relu", since=_since)
_form("cvt", "e2m3x2.f32 e3m2x2.f32", "!rn", "!satfinite", "relu", since="8.6 100a")
_form("cvt", "f16x2.e2m3x2 f16x2.e3m2x2", "!rn", "relu", since="8.6 100a")
_form("cvt", "e2m1x2.f32 e2m1x2.f16x2", "!rn", "!satfinite", "relu", since="8.6 100a")
_form("cvt", "f16x2.e2m1x2", "!rn", "relu", since="8.6 100a")
_form("cvt", "f16x2.f32 bf16x2.f32", "!rs", "relu", "satfinite", since="8.7 100a")
_form(
    "cvt",
    _products("e4m3x4 e5m2x4 e2m3x4 e3m2x4 e2m1x4", "f32"),
    "!rs",
    "relu",
    "!satfinite",
    since="8.7 100a",
)
_form("cvt", "ue8m0x2.f32 ue8m0x2.bf16x2", "!rz rp", "satfinite", since="8.6 100a")
_form("cvt", "bf16x2.ue8m0x2", "!rn", since="8.6 100a")
_form("cvt", "s16.s32 u16.s32", "!pack", "!sat", since="6.5 72")
_form("cvt", _products("s8 u8", "s32", "b32"), "!pack", "!sat", since="6.5 72")
_form("cvt", _products("s4 u4 s2 u2", "s32", "b32"), "!pack", "!sat", since="6.5 75")
# Loads and stores: vectors of at most 16 bytes, or 32 in global memory. Generic addresses have no space.
_SHARED = "shared shared::cta shared::cluster"
_SCOPES = "cta cluster gpu sys"
_HINTS = (
    "L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last L1::no_allocate",
    "L2::evict_normal L2::evict_first L2::evict_last",
    "L2::cache_hint",
)
_FETCHED = "L2::64B L2::128B L2::256B"
_UP_TO_32_BITS, _OF_64_BITS = "b8 u8 s8 b16 u16 s16 b32 u32 s32 f32", "b64 u64 s64 f64"
for _types, _vector, _is_global, _since in (
    (_UP_TO_32_BITS, "v2 v4", False, "0.0 0"),
    (_OF_64_BITS, "v2", False, "0.0 0"),
    ("b128", "", False, "8.3 70"),
    ("b32 u32 s32 f32", "!v8", True, "8.8 100"),
    (_OF_64_BITS, "!v4", True, "8.8 100"),
):
    for _opcode, _ordered, _fetched, _cached, _constant in (
        ("ld", "relaxed acquire", _FETCHED, "ca cg cs lu cv", "const param param::entry param::func"),
        ("st", "relaxed release", "", "wb cg cs wt", "param param::func"),
    ):
        _hints = (_HINTS[0], _HINTS[1] if _is_global else "", _HINTS[2], _fetched)
        _form(_opcode, _types, "weak", "global", *_hints, _vector, since=_since)
        _form(_opcode, _types, f"!{_ordered}", f"!{_SCOPES}", "global", *_hints, _vector, since=_since)
        _form(_opcode, _types, "!volatile", "global", *_hints[1:2], _fetched, _vector, since=_since)
        _form(_opcode, _types, "weak", "global", _cached, *_HINTS[2:], _fetched, _vector, since=_since)
        if not _is_global:
            _form(_opcode, _types, "weak", f"local {_constant} {_SHARED}", _cached, _vector, since=_since)
            _form(_opcode, _types, f"!{_ordered}", f"!{_SCOPES}", f"!{_SHARED}", _vector, since=_since)
            _form(_opcode, _types, "!volatile", f"!{_SHARED}", _vector, since=_since)
        if not _vector.startswith("!"):
            _form(_opcode, _types, "!mmio", "!relaxed", "!sys", "global", since=_since)
    _hints = (_HINTS[0], _HINTS[1] if _is_global else "", _HINTS[2], _FETCHED)
    _form("ld", _types, "!global", "!nc", *_hints, _vector, since=_since)
    _form("ld", _types, "!global", "!nc", "ca cg cs", _HINTS[2], _FETCHED, _vector, since=_since)
# Atomic operations, on memory that threads share. Vectors are only in global memory.
for _opcode, _ordered in (("atom", "relaxed acquire release acq_rel"), ("red", "relaxed release")):
    _place = (_ordered, _SCOPES, f"global {_SHARED}", _HINTS[2])
    _form(_opcode, "b32 b64", "!and or xor", *_place)
    _form(_opcode, "u32", "!inc dec", *_place)
    _form(_opcode, "u32 s32 u64 s64", "!min max", *_place)
    _form(_opcode, "u32 s32 u64 f32 f64", "!add", *_place)
    _form(_opcode, _HALVES, "!add", "!noftz", *_place, since="6.2 60")
    _form(_opcode, _BRAINS, "!add", "!noftz", *_place, since="7.8 90")
    if _opcode == "atom":
        _form(_opcode, "b32 b64", "!exch cas", *_place)
        _form(_opcode, "b16", "!cas", *_place, since="6.3 70")
        _form(_opcode, "b128", "!exch cas", *_place, since="8.3 90")
    _place = (_ordered, _SCOPES, "global", _HINTS[2])
    _form(_opcode, "f32", "!add", "!v2 v4", *_place, since="8.1 90")
    _form(_opcode, "f16 bf16", "!add min max", "!noftz", "!v2 v4 v8", *_place, since="8.1 90")
    _form(_opcode, "f16x2 bf16x2", "!add min max", "!noftz", "!v2 v4", *_place, since="8.1 90")
# Barriers.
for _opcode, _aligned in (("bar", ""), ("barrier", "aligned")):
    for _count in (0, 1):
        _form(_opcode, [""], "cta", "!sync", _aligned, operands=1 + _count)
        _form(_opcode, "u32", "cta", "!red", "!popc", _aligned, operands=3 + _count)
        _form(_opcode, "pred", "cta", "!red", "!and or", _aligned, operands=3 + _count)
    _form(_opcode, [""], "cta", "!arrive", _aligned, operands=2)
_form("bar", [""], "!warp", "!sync", operands=1, since="6.0 0")
_form("barrier", [""], "!cluster", "!arrive wait", "aligned", since="7.8 90")
_form("barrier", [""], "!cluster", "!arrive", "!release relaxed", "aligned", since="8.0 90")
_form("barrier", [""], "!cluster", "!wait", "!acquire", "aligned", since="8.0 90")
# Fences. The scope of fence.proxy.async::generic is the cluster.
_form("membar", [""], "!cta gl sys", operands=0)
_form("membar", [""], "!proxy", "!alias", operands=0, since="7.5 0")
_form("fence", [""], "!proxy", "!alias", operands=0, since="7.5 70")
_ALL = "!cta cluster gpu sys"
for _scopes, _since in (("!cta gpu sys", "6.0 70"), ("!cluster", "7.8 90")):
    _form("fence", [""], "sc acq_rel acquire release", _scopes, operands=0, since=_since)
_form("fence", [""], "!mbarrier_init", "!release", "!cluster", operands=0, since="8.0 90")
_form("fence", [""], "!proxy", "!async", "global shared::cta shared::cluster", operands=0, since="8.0 90")
_form("fence", [""], "!proxy", "!tensormap::generic", "!release", _ALL, operands=0, since="8.3 90")
_form("fence", [""], "!proxy", "!tensormap::generic", "!acquire", _ALL, operands=2, since="8.3 90")
for _semantics, _space in (("!acquire", "cluster"), ("!release", "cta")):
    _restricted = (_semantics, f"!sync_restrict::shared::{_space}", "!cluster")
    _form("fence", [""], *_restricted, operands=0, since="8.6 90")
    _form("fence", [""], "!proxy", "!async::generic", *_restricted, operands=0, since="8.6 90")
# Caches. A generic address has no space.
_form("prefetch", [""], "global local", "!L1 L2", operands=1)
_form("prefetch", [""], "global", "!L2::evict_last L2::evict_normal", operands=1, since="7.4 80")
_form("prefetch", [""], "const param", "!tensormap", operands=1, since="8.0 90")
_form("prefetchu", [""], "!L1", operands=1)
_form("applypriority", [""], "global", "!L2::evict_normal", operands=2, since="7.4 80")
_form("discard", [""], "global", "!L2", operands=2, since="7.4 80")
# Lanes of a warp together.
_MODES = "!up down bfly idx"
_form("shfl", "b32", "!sync", _MODES, operands=5, since="6.0 0")
_form("shfl", "b32", _MODES, operands=4, needs_sync=True)
_form("vote", "pred", "!sync", "!all any uni", operands=3, since="6.0 0")
_form("vote", "b32", "!sync", "!ballot", operands=3, since="6.0 0")
_form("vote", "pred", "!all any uni", operands=2, needs_sync=True)
_form("vote", "b32", "!ballot", operands=2, needs_sync=True)
_form("match", "b32 b64", "!any all", "!sync", operands=3, since="6.0 70")
_form("activemask", "b32", operands=1, since="6.2 0")
_form("elect", [""], "!sync", operands=2, since="8.0 90")
_form("redux", "u32 s32", "!sync", "!add min max", operands=3, since="7.0 80")
_form("redux", "b32", "!sync", "!and or xor", operands=3, since="7.0 80")
_form("redux", "f32", "!sync", "!min max", "abs", "NaN", operands=3, since="8.6 100a")
# Matrices in shared memory.
for _opcode, _since, _wide in (("ldmatrix", "6.5 75", "m16n16"), ("stmatrix", "7.8 90", "m16n8")):
    _together = ("!sync", "!aligned", "shared shared::cta")
    _counts = "!x1 x2" if _opcode == "ldmatrix" else "!x1 x2 x4"
    for _spaces, _of_spaces in (("shared", _since), ("!shared::cta", f"7.8 {_since[-2:]}")):
        _of_halves = ("!sync", "!aligned", _spaces, "!m8n8", "!x1 x2 x4", "trans")
        _form(_opcode, "b16", *_of_halves, operands=2, since=_of_spaces)
    _form(_opcode, "b8", *_together, f"!{_wide}", _counts, "!trans", operands=2, since="8.6 100a")
    if _opcode == "ldmatrix":
        _packed = (*_together, "!b8x16", "!b6x16_p32 b4x16_p64")
        _form(_opcode, [""], *_packed, "!m16n16", "!x1 x2", "!trans", operands=2, since="8.6 100a")
        _form(_opcode, [""], *_packed, "!m8n16", "!x1 x2 x4", operands=2, since="8.6 100a")
_form("movmatrix", "b16", "!sync", "!aligned", "!m8n8", "!trans", operands=2, since="7.8 75")
# Asynchronous stores and atomic operations.
_BYTES = "!mbarrier::complete_tx::bytes"
_MARKED: tuple[str, ...] = ("!async", "weak", "shared::cluster", _BYTES)
_form("st", "b32 u32 s32 f32", *_MARKED, "v2 v4", operands=3, since="8.1 90")
_form("st", "b64 u64 s64 f64", *_MARKED, "v2", operands=3, since="8.1 90")
_RELEASED = ("!async", "mmio", "!release", "!gpu sys", "global")
_form("st", f"{_UP_TO_32_BITS} {_OF_64_BITS}", *_RELEASED, operands=2, since="8.7 100")
_form("st", [""], "!bulk", "weak", "shared::cta", operands=3, since="8.6 100")
_MARKED = ("!async", "!relaxed", "!cluster", "shared::cluster", _BYTES)
_form("red", "u32", *_MARKED, "!inc dec", operands=3, since="8.1 90")
_form("red", "u32 s32", *_MARKED, "!min max", operands=3, since="8.1 90")
_form("red", "b32", *_MARKED, "!and or xor", operands=3, since="8.1 90")
_form("red", "u32 s32 u64 s64", *_MARKED, "!add", operands=3, since="8.1 90")
_RELEASED = (*_RELEASED[:2], "!release relaxed", *_RELEASED[3:])
_form("red", "u32", *_RELEASED, "!inc dec", operands=2, since="8.7 100")
_form("red", "u32 s32", *_RELEASED, "!min max", operands=2, since="8.7 100")
_form("red", "b32", *_RELEASED, "!and or xor", operands=2, since="8.7 100")
_form("red", "u32 s32 u64 s64", *_RELEASED, "!add", operands=2, since="8.7 100")
# Copies. Their spaces are one modifier here, since the order of spaces says which is copied to which.
_HINT = "L2::cache_hint"
_SMALL = ("!async", "!ca cg", "!shared.global shared::cta.global")
_form("cp", [""], *_SMALL, operands=(3, 4), since="7.0 80")
_form("cp", [""], *_SMALL, _HINT, _FETCHED, operands=(3, 4), since="7.4 80")
_form("cp", [""], "!async", "!commit_group wait_all", operands=0, since="7.0 80")
_form("cp", [""], "!async", "!wait_group", operands=1, since="7.0 80")
for _spaces, _since in (("shared", "7.0 80"), ("!shared::cta", "7.8 80")):
    _form("cp", "b64", "!async", "!mbarrier", "!arrive", "noinc", _spaces, operands=1, since=_since)
_BULK = ("!async", "!bulk")
_form("cp", [""], *_BULK, "!commit_group", operands=0, since="8.0 90")
_form("cp", [""], *_BULK, "!wait_group", "read", operands=1, since="8.0 90")
_form("cp", [""], *_BULK, "!shared::cluster.shared::cta", _BYTES, operands=4, since="8.0 90")
_form("cp", [""], *_BULK, "!shared::cta.global", _BYTES, _HINT, operands=4, since="8.6 90")
_loaded: tuple[str, ...] = (*_BULK, "!shared::cluster.global", _BYTES, _HINT)
_form("cp", [""], *_loaded, operands=4, since="8.0 90")
_form("cp", [""], *_loaded, "!multicast::cluster", operands=5, since="8.0 90")
_stored: tuple[str, ...] = (*_BULK, "!global.shared::cta", "!bulk_group", _HINT)
_form("cp", [""], *_stored, operands=3, since="8.0 90")
_form("cp", [""], *_stored, "!cp_mask", operands=4, since="8.6 100")
_form("cp", [""], *_BULK, "!prefetch", "!L2", "!global", _HINT, operands=2, since="8.0 90")
_reduced: tuple[str, ...] = ("!reduce", *_BULK, "!shared::cluster.shared::cta", _BYTES)
_form("cp", "u32 s32 u64", *_reduced, "!add", operands=4, since="8.0 90")
_form("cp", "u32 s32", *_reduced, "!min max", operands=4, since="8.0 90")
_form("cp", "u32", *_reduced, "!inc dec", operands=4, since="8.0 90")
_form("cp", "b32", *_reduced, "!and or xor", operands=4, since="8.0 90")
_reduced = ("!reduce", *_stored)
_form("cp", "u32 s32 u64 f32 f64", *_reduced, "!add", operands=3, since="8.0 90")
_form("cp", "f16 bf16", *_reduced, "!add", "!noftz", operands=3, since="8.0 90")
_form("cp", "u32 s32 u64 s64 f16 bf16", *_reduced, "!min max", operands=3, since="8.0 90")
_form("cp", "u32", *_reduced, "!inc dec", operands=3, since="8.0 90")
_form("cp", "b32 b64", *_reduced, "!and or xor", operands=3, since="8.0 90")
# Copies of tensors. Only copies from global memory have offsets.
_TENSOR, _REDUCED = (*_BULK, "!tensor", _HINT), "!add min max inc dec and or xor"
for _mode, _dimensions, _offsets, _to_cluster, _to_block in (
    ("tile", "!1d 2d 3d 4d 5d", 0, "8.0 90", "8.6 90"),
    ("!im2col", "!3d 4d 5d", 1, "8.0 90", "8.6 90"),
    ("!im2col::w", "!3d 4d 5d", 1, "8.6 100a", "8.6 100"),
    ("!im2col::w::128", "!3d 4d 5d", 1, "8.6 100a", "8.6 100a"),
    ("!tile::gather4", "!2d", 0, "8.6 100a", "8.6 100"),
):
    _loaded = (*_TENSOR, _mode, _dimensions, _BYTES)
    _cluster, _block, _count = "!shared::cluster.global", "!shared::cta.global", 3 + _offsets
    for _groups, _since in (((), ""), (("!cta_group::1 cta_group::2",), "8.6 100a")):
        _form("cp", [""], *_loaded, *_groups, _cluster, operands=_count, since=_since or _to_cluster)
        _form("cp", [""], *_loaded, *_groups, _block, operands=_count, since=_since or _to_block)
        _several = (*_loaded, *_groups, _cluster, "!multicast::cluster")
        _form("cp", [""], *_several, operands=_count + 1, since=_since or _to_cluster)
    _ahead = (*_TENSOR, _mode, _dimensions, "!prefetch", "!L2", "!global")
    _form("cp", [""], *_ahead, operands=1 + _offsets, since=_to_cluster)
for _mode, _dimensions, _since in (
    ("tile", "!1d 2d 3d 4d 5d", "8.0 90"),
    ("!im2col_no_offs", "!3d 4d 5d", "8.0 90"),
    ("!tile::scatter4", "!2d", "8.6 100a"),
):
    _stored = (*_TENSOR, _mode, _dimensions, "!global.shared::cta", "!bulk_group")
    _form("cp", [""], *_stored, operands=2, since=_since)
    _form("cp", [""], *_stored, "!reduce", _REDUCED, operands=2, since=_since)
# Maps of tensors.
_replaced = ("!replace", "!tile", "!b1024", "global shared::cta")
_form("tensormap", "b64", *_replaced, "!global_address", operands=2, since="8.3 90a")
_form("tensormap", "b32", *_replaced, "!rank elemtype fill_mode", operands=2, since="8.3 90a")
_form("tensormap", "b32", *_replaced, "!interleave_layout swizzle_mode", operands=2, since="8.3 90a")
_form("tensormap", "b32", *_replaced, "!swizzle_atomicity", operands=2, since="8.6 100a")
_form("tensormap", "b32", *_replaced, "!box_dim global_dim element_stride", operands=3, since="8.3 90a")
_form("tensormap", "b64", *_replaced, "!global_stride", operands=3, since="8.3 90a")
_fenced = ("!cp_fenceproxy", "!global.shared::cta", "!tensormap::generic", "!release", _ALL)
_form("tensormap", [""], *_fenced, "!sync", "!aligned", operands=3, since="8.3 90")
# Requests to cancel the launch of a cluster.
_canceled = ("!try_cancel", "!async", "shared::cta", _BYTES)
_form("clusterlaunchcontrol", "b128", *_canceled, operands=2, since="8.6 100")
_form("clusterlaunchcontrol", "b128", *_canceled, "!multicast::cluster::all", operands=2, since="8.6 100a")
_QUERY = "!query_cancel"
_firsts = "!get_first_ctaid::x get_first_ctaid::y get_first_ctaid::z"
_form("clusterlaunchcontrol", "pred.b128", _QUERY, "!is_canceled", operands=2, since="8.6 100")
_form("clusterlaunchcontrol", "b32.b128", _QUERY, _firsts, operands=2, since="8.6 100")
_form("clusterlaunchcontrol", "b32.b128", _QUERY, "!get_first_ctaid", "!v4", operands=2, since="8.6 100")


def _of_mbarrier(*groups: str, operands: int | tuple[int, ...], since: str) -> None:
    """Add a form for an mbarrier of the same block. Its space can be named `.shared::cta` from PTX 7.8 on."""
    version, target = since.split()
    _form("mbarrier", "b64", *groups, "shared", operands=operands, since=since)
    named = f"{max(version, '7.8')} {target}"
    _form("mbarrier", "b64", *groups, "!shared::cta", operands=operands, since=named)


# Mbarriers. The modifier _ stands for a result that is not used. In another block, an arrival has no result.
_of_mbarrier("!init", operands=2, since="7.0 80")
_of_mbarrier("!inval", operands=1, since="7.0 80")
for _arrival, _since in (("!arrive", "7.1 80"), ("!arrive_drop", "7.0 80")):
    for _ignored, _version in (((), "7.0 80"), (("!_",), _since)):
        _of_mbarrier(_arrival, *_ignored, operands=2, since=_version)
        _of_mbarrier(_arrival, *_ignored, "!noComplete", operands=3, since=_version)
    _released = (_arrival, "_", "!release", "!cta")
    _of_mbarrier(*_released, operands=2, since="8.0 80")
    _of_mbarrier(*_released, "!noComplete", operands=3, since="8.0 80")
    _of_mbarrier(_arrival, "_", operands=3, since="7.8 90")
    for _order, _since in (
        ((), "8.0 90"), (("!release", "!cta cluster"), "8.0 90"), (("!relaxed", "!cta cluster"), "8.6 90"),
    ):  # fmt: skip
        for _expected, _numbers in (((), (2, 3)), (("!expect_tx",), (3,))):
            _remote = (_arrival, "!_", *_order, *_expected, "!shared::cluster")
            _form("mbarrier", "b64", *_remote, operands=_numbers, since=_since)
            if _order or _expected:
                _of_mbarrier(_arrival, "_", *_order, *_expected, operands=_numbers, since=_since)
for _order in ((), ("!relaxed", "!cta cluster")):
    _changed = ("!expect_tx complete_tx", *_order, _SHARED)
    _form("mbarrier", "b64", *_changed, operands=2, since="8.0 90")
_of_mbarrier("!test_wait", operands=3, since="7.0 80")
_of_mbarrier("!test_wait", "!parity", operands=3, since="7.1 80")
_of_mbarrier("!test_wait", "parity", "!acquire", "!cta", operands=3, since="8.0 80")
_of_mbarrier("!try_wait", "parity", operands=(3, 4), since="7.8 90")
for _waiting, _numbers in (("!test_wait", (3,)), ("!try_wait", (3, 4))):
    for _ordering, _since in (("!acquire", "8.0 90"), ("!relaxed", "8.6 90")):
        _of_mbarrier(_waiting, "parity", _ordering, "!cta cluster", operands=_numbers, since=_since)
_form("mbarrier", "b64", "!pending_count", operands=2, since="7.0 80")
# Video instructions.
_SIGNS = ("s32 u32",) * 3
_form("vadd vsub vabsdiff vmin vmax", _products(*_SIGNS), "sat", "add min max")
_form("vshl vshr", _products(*_SIGNS[:2], "u32"), "!clamp wrap", "sat", "add min max")
_form("vmad", _products(*_SIGNS), "po", "sat", "shr7 shr15")
_form("vset", _products(*_SIGNS[:2]), f"!{_ORDERED}", "add min max")
_form("vset2 vset4", _products(*_SIGNS[:2]), f"!{_ORDERED}", "add")
_PARALLEL = " ".join(
    f"{name}{n}" for name in ("vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax") for n in (2, 4)
)
_form(_PARALLEL, _products(*_SIGNS), "sat add")


def reason(i: PtxInstruction, version: tuple[int, int], sm: str) -> str:
    """Return why PTX does not have the form of an instruction; "" if PTX has it, or if the table does not have the opcode.

    version: the version of PTX
    sm: the target, such as `sm_80`
    """
    if i.opcode not in _FORMS:
        return ""
    forms = _found(i.opcode, _distinguished(i), len(i.operands))
    if not forms:
        return "PTX has no such form"
    found = re.search(r"\d+", sm)
    target, is_specific = int(found[0]) if found else 0, sm.endswith(("a", "f"))
    if version >= (6, 4) and target >= 70 and all(f.needs_sync for f in forms):
        return "it requires .sync for .target sm_70 or higher since PTX ISA .version 6.4"
    of_target = [f for f in forms if f.target <= target and f.is_specific <= is_specific]
    if any(form.version <= version for form in of_target):
        return ""
    if not of_target:
        first = min(forms, key=lambda form: (form.target, form.is_specific, form.version))
        suffix = f", and a suffix, as in sm_{first.target}a" if first.is_specific else " or higher"
        return f"it requires .target sm_{first.target}{suffix}"
    first = min(of_target, key=lambda form: form.version)
    return f"it requires PTX ISA .version {first.version[0]}.{first.version[1]} or later"


def _distinguished(i: PtxInstruction) -> tuple[str, ...]:
    """Return the modifiers of an instruction, with what else distinguishes forms in the table."""
    if i.opcode == "mbarrier" and i.operands[:1] == (Name("_"),):
        return (*i.modifiers, "_")
    if i.opcode in ("cp", "tensormap"):
        spaces = [m for m in i.modifiers if m == "global" or m in _SHARED.split()]
        return (*(m for m in i.modifiers if m not in spaces), *([".".join(spaces)] if spaces else []))
    return i.modifiers


@functools.lru_cache(4096)
def _found(opcode: str, modifiers: tuple[str, ...], operands: int) -> tuple[_Form, ...]:
    types = tuple(m for m in modifiers if _TYPE.fullmatch(m))
    others = tuple(m for m in modifiers if not _TYPE.fullmatch(m))
    return tuple(form for form in _FORMS[opcode] if form.has(types, others, operands))

"""Which forms of asynchronous copies and stores, mbarriers and tensor maps exist: ptxas and the embedded device agree on many."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from cudasim.translate import syntax
from engine_forms import HEAD, accepted, kernel, legal, register
from gpubpf.ptx.module import PtxInstruction
from gpubpf.ptx.parser import parse

SHARED = ["shared", "shared::cta", "shared::cluster"]
SPACES = ["", *SHARED, "global"]
SEMANTICS = ["", "release", "acquire", "relaxed"]
SCOPES = ["", "cta", "cluster", "gpu", "sys"]
HINT = ["", "L2::cache_hint"]
BYTES = "mbarrier::complete_tx::bytes"
END = ["", "bulk_group", BYTES]
A, B, C = "[%x64_1]", "[%x64_2]", "[%x64_3]"
OPERATIONS = ["add", "add.noftz", "min", "max", "min.noftz", "inc", "dec", "and", "or", "xor", "exch"]
REDUCED = ["u32", "s32", "u64", "s64", "b32", "b64", "f16", "bf16", "f32", "f64", "f16x2"]


def named(*places: str | list[str]) -> Iterator[str]:
    """Yield all combinations of alternatives for each place of a name."""
    for chosen in itertools.product(*([place] if isinstance(place, str) else place for place in places)):
        yield ".".join(part for part in chosen if part)


def with_operands(names: Iterator[str], *lists: str) -> Iterator[str]:
    """Yield an instruction for each name and each list of operands."""
    yield from (f"{name} {operands};" for name, operands in itertools.product(names, lists))


def with_hint(names: Iterator[str], *lists: str) -> Iterator[str]:
    """Yield an instruction for each name and each list of operands, with the operand of a hint about the cache."""
    for name, operands in itertools.product(names, lists):
        yield f"{name} {operands}{', %x64_4' if 'cache_hint' in name else ''};"


def mbarriers() -> Iterator[str]:
    names = named("mbarrier", ["init", "inval", "init.noComplete"], SPACES, ["b64", "b32"])
    yield from with_operands(names, A, f"{A}, 4", f"{A}, %x32_1")
    names = named("mbarrier", ["expect_tx", "complete_tx"], SEMANTICS, SCOPES, SPACES, "b64")
    yield from with_operands(names, A, f"{A}, %x32_1")
    kinds = ["", "expect_tx", "noComplete", "expect_tx.noComplete"]
    names = named("mbarrier", ["arrive", "arrive_drop"], kinds, SEMANTICS, SCOPES, SPACES, "b64")
    results = [f"%x64_0, {A}", f"%x64_0, {A}, %x32_1", f"_, {A}, 1", f"_, {A}", A]
    yield from with_operands(names, *results)
    for parity, phase in (("", "%x64_2"), ("parity", "%x32_1")):
        names = named("mbarrier", ["test_wait", "try_wait"], parity, SEMANTICS, SCOPES, SPACES, "b64")
        asked = f"%x0_0, {A}"
        yield from with_operands(names, f"{asked}, {phase}", f"{asked}, {phase}, %x32_2", asked)
    yield from with_operands(
        named("mbarrier.pending_count", ["", "shared"], ["b64", "b32"]), "%x32_0, %x64_1"
    )


def copies() -> Iterator[str]:
    fetched = ["", "L2::128B", "L2::32B"]
    for size in (4, 8, 16, 12, 32):
        names = named("cp.async", ["", "ca", "cg", "cs"], ["", *SHARED], ["", "global"], HINT, fetched)
        rest = [f"{A}, {B}, {size}", f"{A}, {B}, {size}, %x32_1", f"{A}, {B}, {size}, %x0_1"]
        yield from with_hint(names, *rest[: 1 if size in (4, 12, 32) else 3])
    yield f"cp.async.cg.shared.global.L2::cache_hint {A}, {B}, 16, %x32_1;"
    yield from with_operands(named("cp.async.mbarrier.arrive", ["", "noinc"], SPACES, ["b64", "b32"]), A)
    groups = ["commit_group", "wait_all", "wait_group"]
    yield from with_operands(named("cp.async", ["", "bulk"], groups, ["", "read"]), "", "0", "3", "%x32_1")
    spaces = ["", *SHARED, "global"]
    copied = f"{A}, {B}, %x32_1"
    marked = f"{copied}, {C}"
    names = named("cp.async.bulk", spaces, spaces, ["", BYTES], ["", "multicast::cluster"], HINT)
    yield from with_operands(
        names, copied, marked, f"{marked}, %x16_1", f"{marked}, %x64_4", f"{marked}, %x16_1, %x64_4"
    )
    names = named("cp.async.bulk", spaces, spaces, ["", "bulk_group"], HINT, ["", "cp_mask"])
    yield from with_operands(
        names, copied, marked, f"{copied}, %x64_4", f"{copied}, %x16_1", f"{copied}, %x64_4, %x16_1"
    )
    names = named("cp.async.bulk.prefetch", ["", "L2"], ["", "global", "shared::cta"], HINT)
    yield from with_operands(names, f"{A}, %x32_1", f"{A}, 32", f"{A}, %x32_1, %x64_2", A)


def reductions() -> Iterator[str]:
    for end in END:
        names = named(
            "cp.reduce.async.bulk", ["shared::cluster", "global"], ["shared::cta", "global"], end, HINT,
            OPERATIONS, REDUCED,
        )  # fmt: skip
        copied = f"{A}, {B}, %x32_1"
        yield from with_hint(names, *([copied, f"{copied}, {C}"] if end == BYTES else [copied]))


def registers(t: str, vector: str) -> str:
    items = [register(t, k) for k in range(int(vector[1:]) if vector else 1)]
    return "{" + ", ".join(items) + "}" if vector else items[0]


def stores() -> Iterator[str]:
    """Yield candidates, without forms of st.async and red.async that only ptxas knows, and its stores of bytes, which it refuses."""
    vectors = [("b32", "v2"), ("f32", "v4"), ("u64", "v2"), ("b64", "v4"), ("b16", "v2"), ("b32", "v8")]
    types = ["b16", "s16", "f16", "u32", "f32", "b64", "f64", "b128"]
    for t, vector in [*((t, "") for t in types), *vectors]:
        value = registers(t, vector)
        names = named("st.async", ["", "weak", "relaxed.gpu"], ["", "shared::cluster"], END, vector, t)
        yield from with_operands(names, f"{A}, {value}, {B}")
        names = named("st.async", ["", "mmio"], SEMANTICS[1:], SCOPES, ["", "global"], vector, t)
        yield from with_operands(names, f"{A}, {value}")
    sizes = [f"{A}, {size}" for size in ("64, 0", "%x64_1, 0", "%x64_1, 1", "%x32_1, 0", "64")]
    yield from with_operands(named("st.bulk", ["", "weak", "relaxed.cta"], SPACES), *sizes)
    for t in ("u32", "s32", "u64", "s64", "b32", "b64", "f32", "f16x2"):
        value = register(t, 1)
        names = named("red.async", ["", "relaxed"], SCOPES[:4], ["", *SHARED], END, OPERATIONS, t)
        yield from with_operands(names, f"{A}, {value}, {B}")
        names = named("red.async", ["", "mmio"], "release", SCOPES, ["", "global"], OPERATIONS, t)
        yield from with_operands(names, f"{A}, {value}")


FIELDS = {  # of a tensor map: types and operands
    "global_address": (["b64", "b32"], ["%x64_2"]),
    "rank": (["b32"], ["%x32_1", "2"]),
    "box_dim": (["b32", "b64"], ["0, %x32_1", "4, %x32_1", "5, 1", "%x32_2, 1", "%x32_1"]),
    "global_dim": (["b32"], ["0, %x32_1", "4, %x32_1", "5, 1"]),
    "global_stride": (["b64", "b32"], ["0, %x64_1", "3, %x64_1", "4, %x64_1"]),
    "element_stride": (["b32"], ["0, %x32_1", "4, %x32_1", "5, 1"]),
    "elemtype": (["b32"], [*map(str, range(17)), "%x32_1"]),
    "interleave_layout": (["b32"], [*map(str, range(4)), "%x32_1"]),
    "swizzle_mode": (["b32"], [*map(str, range(6))]),
    "swizzle_atomicity": (["b32"], [*map(str, range(5))]),
    "fill_mode": (["b32"], [*map(str, range(3))]),
}


def maps() -> Iterator[str]:
    for field, (types, values) in FIELDS.items():
        spaces = ["", "global", "shared::cta", "shared"]
        names = named("tensormap.replace", ["tile", "im2col"], field, spaces, ["b1024", "b512"], types)
        yield from with_operands(names, *(f"{A}, {value}" for value in values))
    spaces = ["global.shared::cta", "global.shared", "shared::cta.global"]
    names = named(
        "tensormap.cp_fenceproxy", spaces, "tensormap::generic", SEMANTICS[1:], SCOPES, ["sync.aligned", "sync"],
    )  # fmt: skip
    yield from with_operands(names, f"{A}, {B}, 128", f"{A}, {B}, 64", f"{A}, {B}")


MODES = (
    "tile", "im2col", "im2col::w", "im2col::w::128", "tile::gather4", "tile::scatter4", "im2col_no_offs",
)  # fmt: skip


def tensors() -> Iterator[str]:
    for d, mode in itertools.product((1, 2, 3, 4, 5), ["", *MODES]):
        places = ", ".join(f"%x32_{k}" for k in range(5 if "4" in mode else d))
        tensor = f"[%x64_2, {{{places}}}]"
        offsets = 0 if "im2col" not in mode or d < 3 else 2 if "::w" in mode else d - 2
        given = f", {{{', '.join(f'%x16_{k}' for k in range(offsets))}}}" if offsets else ""
        for multicast, mask in (("", ""), ("multicast::cluster", ", %x16_1")):
            group = ["", "cta_group::1", "cta_group::2"]
            names = named(
                f"cp.async.bulk.tensor.{d}d", SHARED[1:], "global", mode, BYTES, multicast, group, HINT
            )
            yield from with_hint(names, *{f"{A}, {tensor}, {C}{o}{mask}" for o in ("", given)})
        stored = named(f"cp.async.bulk.tensor.{d}d.global.shared::cta", mode, "bulk_group", HINT)
        fetched = named(f"cp.async.bulk.prefetch.tensor.{d}d.L2.global", mode, HINT)
        reduced = named(
            f"cp.reduce.async.bulk.tensor.{d}d.global.shared::cta", OPERATIONS, mode, "bulk_group", HINT
        )
        yield from with_hint(fetched, *{f"{tensor}{o}" for o in ("", given)})
        yield from with_hint(itertools.chain(stored, reduced), f"{tensor}, {A}")


def cancellations() -> Iterator[str]:
    names = named(
        "clusterlaunchcontrol.try_cancel.async", ["", *SHARED[:2]], ["", BYTES], ["", "multicast::cluster::all"],
        ["b128", "b64"],
    )  # fmt: skip
    yield from with_operands(names, f"{A}, {B}")
    query = "clusterlaunchcontrol.query_cancel"
    first = named(f"{query}.get_first_ctaid", ["", "v4"], "b32.b128")
    asked = [
        *with_operands(named(f"{query}.is_canceled", ["pred", "b32"], ["b128", "b64"]), "%x0_0, %q"),
        *with_operands(first, "{%x32_0, %x32_1, %x32_2, _}, %q", "%x32_0, %q"),
        *with_operands(named(query, [f"get_first_ctaid::{d}" for d in "xyzw"], ["b32", "b64"], "b128"), "%x32_0, %q"),
    ]  # fmt: skip
    for text in asked:
        yield f"{{ .reg .b128 %q; mov.b128 %q, {{%x64_1, %x64_2}}; {text} }}"


def refused_by_name(form: str) -> bool:
    """Return whether the device refuses a form that PTX has: PTX does not define these copies and this field in detail."""
    return ("im2col::w" in form and ".prefetch." not in form) or ("global_stride" in form and ", 4," in form)


@pytest.fixture(scope="module")
def candidates() -> list[str]:
    texts = [*mbarriers(), *copies(), *reductions(), *stores(), *maps(), *tensors(), *cancellations()]
    return list(dict.fromkeys(texts))


@pytest.fixture(scope="module")
def known(candidates: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The forms that ptxas knows in the newest version for the newest target, which has those of older ones."""
    return legal(tmp_path_factory.mktemp("forms"), candidates)


def test_what_ptxas_refuses_is_refused(candidates: list[str], known: list[str]) -> None:
    body = parse(HEAD + kernel("k", "\n".join(candidates))).functions["k"].body or ()
    found = [part for part in body if isinstance(part, PtxInstruction) and part.opcode != "mov"][:-1]
    forms = zip(candidates, found, strict=True)
    in_table = {form for form, i in forms if not syntax.reason(i, (9, 0), "sm_100a")}
    assert len(candidates) > 10 * len(known)
    assert sorted(set(known) - in_table) == []
    assert sorted(accepted(sorted(in_table - set(known)))) == []


@pytest.mark.parametrize(
    ("version", "target"),
    [
        ("9.0", "sm_100a"), ("9.0", "sm_100"), ("8.6", "sm_100a"), ("8.6", "sm_90"), ("8.1", "sm_90"), ("8.0", "sm_90"),
        ("8.0", "sm_80"), ("7.8", "sm_90"), ("7.4", "sm_80"), ("7.1", "sm_80"), ("7.0", "sm_80"), ("6.5", "sm_75"),
    ],
)  # fmt: skip
@pytest.mark.every(3)
def test_the_forms_of_older_versions_and_targets(
    version: str, target: str, known: list[str], tmp_path: Path
) -> None:
    head = f".version {version}\n.target {target}\n.address_size 64\n"
    of_ptxas, of_device = set(legal(tmp_path, known, head)), set(accepted(known, head))
    assert sorted(of_device - of_ptxas) == []
    assert [form for form in sorted(of_ptxas - of_device) if not refused_by_name(form)] == []
    assert not any(map(refused_by_name, of_device))

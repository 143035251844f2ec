"""Which accesses are found to differ from an earlier one by a constant."""

from __future__ import annotations

import pytest

from gpubpf.ebpf.probe import Probe
from gpubpf.inject.inject import inject
from gpubpf.lower.fragment import Argument, Fragment
from gpubpf.ptx.parser import parse
from gpubpf.record import replace

COUNT = Fragment(
    "count",
    "{ red.global.add.u64 [%gpubpf_counts], 1; }",
    (Argument("counts", "b64", "map_base", "counts"), Argument("site", "b64", "context", field="site")),
)
HEAD = ".version 8.3\n.target sm_80\n.address_size 64\n.func f() { ret; }\n"


def likes(body: str, alike: int = 32) -> list[int | None]:
    """Return `like` of each site of a kernel with this body."""
    registers = ".reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>; .reg .pred %p<3>;"
    text = f"{HEAD}.visible .entry k(.param .u64 p) {{ {registers} ld.param.u64 %rd1, [p]; {body} ret; }}"
    repeated = replace(COUNT, ptx="{ red.global.or.b64 [%gpubpf_counts], 1; }")
    probes = [Probe(COUNT, "access", alike=alike)]
    made = inject(parse(text), {"k": [*probes, Probe(repeated, "access", alike=alike, repeats=True)]})
    sites = made.kernels["k"].sites
    assert made.text.count("red.global.add") == sum(site.like is None for site in sites)
    assert made.text.count("red.global.or") == sum(site.like is not None for site in sites)
    alone = inject(parse(text), {"k": probes})
    assert alone.kernels["k"].sites == sites and "red.global.or" not in alone.text
    return [site.like for site in sites]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("ld.shared.f32 %f1, [%r1]; ld.shared.f32 %f2, [%r1+64]; ld.shared.f32 %f3, [%r1+-32];", [None, 0, 0]),
        ("ld.shared.f32 %f1, [%r1]; ld.shared.f32 %f2, [%r1+4]; ld.shared.f32 %f3, [%r1+36];", [None, None, 1]),
        ("ld.shared.f32 %f1, [%r1]; bar.sync 0; ld.shared.f32 %f2, [%r1+32];", [None, None]),
        ("ld.shared.f32 %f1, [%r1]; bar.warp.sync 0xffffffff; ld.shared.f32 %f2, [%r1+32];", [None, None]),  # other lanes, too
        (  # as does whatever waits for the lanes of a warp
            "ld.shared.f32 %f1, [%r1]; mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%rd2, %rd3}, {%rd4}, {%rd5}, {%rd2, %rd3};"
            "ld.shared.f32 %f2, [%r1+32];",
            [None, None],
        ),
        ("ld.shared.f32 %f1, [%r1]; movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r3; ld.shared.f32 %f2, [%r1+32];", [None, None]),
        ("ld.shared.f32 %f1, [%r1]; add.f32 %f3, %f1, %f2; ld.shared.f32 %f2, [%r1+32];", [None, 0]),
        ("ld.shared.u32 %r1, [%r1]; ld.shared.f32 %f2, [%r1+32];", [None, None]),  # another base
        ("ld.shared.f32 %f1, [%r1]; add.u32 %r1, %r1, 4; ld.shared.f32 %f2, [%r1+32];", [None, None]),
        ("ld.shared.f32 %f1, [%r1]; mov.b64 {%r1, %r2}, %rd1; ld.shared.f32 %f2, [%r1+32];", [None, None]),
        ("ld.shared.f32 %f1, [%r1]; $L: ld.shared.f32 %f2, [%r1+32];", [None, None]),  # others may come here
        ("ld.shared.f32 %f1, [%r1]; @%p1 bra $L; ld.shared.f32 %f2, [%r1+32]; $L:", [None, None]),
        ("ld.shared.f32 %f1, [%r1]; @%p1 exit; ld.shared.f32 %f2, [%r1+32];", [None, None]),
        ("ld.shared.f32 %f1, [%r1]; call f; ld.shared.f32 %f2, [%r1+32];", [None, None]),
        ("@%p1 ld.shared.f32 %f1, [%r1]; @%p1 ld.shared.f32 %f2, [%r1+32];", [None, 0]),
        ("@%p1 ld.shared.f32 %f1, [%r1]; @!%p1 ld.shared.f32 %f2, [%r1+32];", [None, None]),
        ("@%p1 ld.shared.f32 %f1, [%r1]; ld.shared.f32 %f2, [%r1+32];", [None, None]),
        (
            "@%p1 ld.shared.f32 %f1, [%r1]; setp.eq.u32 %p1, %r2, 0; @%p1 ld.shared.f32 %f2, [%r1+32];",
            [None, None],
        ),
        ("{ .reg .b32 %r1; ld.shared.f32 %f1, [%r1]; } ld.shared.f32 %f2, [%r1+32];", [None, None]),
        ("ld.shared.f32 %f1, [%r1]; st.shared.f32 [%r1+32], %f1; ld.shared.f32 %f1, [%r1];", [None, 0, 0]),
        ("st.shared.f32 [%r1], %f1; ld.shared.f32 %f1, [%r1+4];", [None, None]),
        ("ld.shared.f32 %f1, [%r1]; atom.shared.add.u32 %r2, [%r1], 1;", [None, None]),
        ("st.shared.f32 [%r1], %f1; st.shared.f32 [%r1+32], %f1;", [None, 0]),
        ("ld.shared.f32 %f1, [%r1]; ld.shared.v2.f32 {%f2, %f3}, [%r1+32];", [None, None]),
        ("ld.shared.f32 %f1, [%r1]; ld.global.f32 %f2, [%rd1+32]; ld.f32 %f3, [%rd1];", [None, None, None]),
        ("atom.shared.add.u32 %r2, [%r1], 1; atom.shared.add.u32 %r2, [%r1+32], 1;", [None, None]),
        (  # rows of 64 bytes: all lanes begin at the same place in a sector
            "mov.u32 %r2, %tid.y; shl.b32 %r3, %r2, 6; add.u32 %r1, %r3, 8; ld.shared.f32 %f1, [%r1]; ld.shared.f32 %f2, [%r1+4];",
            [None, 0],
        ),
        (
            "mov.u32 %r2, %tid.y; shl.b32 %r3, %r2, 4; add.u32 %r1, %r3, 8; ld.shared.f32 %f1, [%r1]; ld.shared.f32 %f2, [%r1+4];",
            [None, None],
        ),
        ("ld.global.f32 %f1, [%rd1]; ld.global.f32 %f2, [%rd1+4];", [None, 0]),  # a parameter
    ],
)  # fmt: skip
def test_accesses_are_alike(body: str, expected: list[int | None]) -> None:
    assert likes(body) == expected


def test_a_program_that_sees_addresses_runs_at_each_access() -> None:
    assert likes("ld.shared.f32 %f1, [%r1]; ld.shared.f32 %f2, [%r1+64];", alike=0) == [None, None]


def test_all_programs_of_an_access_must_do_the_same() -> None:
    text = f"{HEAD}.visible .entry k(.param .u64 p) {{ .reg .b64 %rd<3>; .reg .f32 %f<3>; .reg .b32 %r1;"
    text += "mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 4;"
    text += "ld.f32 %f1, [%rd1]; ld.f32 %f2, [%rd1+32]; ld.f32 %f1, [%rd1+64]; ret; }"
    for other, expected in ((0, [None, None, None]), (64, [None, None, 0]), (32, [None, 0, 0])):
        probes = [
            Probe(COUNT, "access", spaces=(space,), alike=a)
            for space, a in (("shared", 32), ("global", other))
        ]
        assert [site.like for site in inject(parse(text), {"k": probes}).kernels["k"].sites] == expected


LOADS, STORES = {"kinds": ("load",)}, {"kinds": ("store",)}


@pytest.mark.parametrize(
    ("field", "repeats", "kinds", "expected"),
    [
        ("site", False, [{}], [None, 0]),
        ("kind", False, [{}], [None, None]),
        ("kind", True, [{}], [None, None]),
        ("effect", False, [{}], [None, None]),
        ("effect", True, [{}], [None, 0]),  # the other program sees the effect of the store
        ("site", False, [LOADS], [None]),
        ("site", False, [LOADS, STORES], [None, None]),
        ("site", False, [{"kinds": ("load", "store")}, {"kinds": ("atomic",)}], [None, 0]),
    ],
)
def test_loads_and_stores_are_alike_if_programs_do_not_tell_them_apart(
    field: str, repeats: bool, kinds: list[dict[str, tuple[str, ...]]], expected: list[int | None]
) -> None:
    sees = replace(COUNT, arguments=(*COUNT.arguments, Argument("what", "b32", "context", field=field)))
    body = "ld.shared.f32 %f1, [%r1]; st.shared.f32 [%r1+32], %f1;"
    text = f"{HEAD}.visible .entry k(.param .u64 p) {{ .reg .b32 %r<2>; .reg .f32 %f<2>; {body} ret; }}"
    probes = [Probe(sees, "access", alike=32, **some) for some in kinds]
    probes += [Probe(sees, "access", alike=32, repeats=True)] if repeats else []
    assert [site.like for site in inject(parse(text), {"k": probes}).kernels["k"].sites] == expected


def test_a_program_is_inlined_where_few_accesses_need_it() -> None:
    """The limits of inlined text count probes, not accesses that share one."""
    lines = "\n".join(f"add.u64 %x, %x, {n};" for n in range(200))
    long = Fragment("long", f"{{ .reg .b64 %x;\nmov.u64 %x, 0;\n{lines}\n}}", ())
    body = " ".join(f"ld.shared.f32 %f1, [%r1+{32 * n}];" for n in range(64))
    text = f"{HEAD}.visible .entry k(.param .u64 p) {{ .reg .b32 %r<9>; .reg .f32 %f<9>; {body} ret; }}"
    for alike, repeats, calls in ((0, False, 64), (32, False, 0), (32, True, 63)):
        probes = [Probe(COUNT, "access", alike=alike)] if repeats else []
        probes.append(Probe(long, "access", alike=alike, repeats=repeats))
        made = inject(parse(text), {"k": probes})
        assert made.text.count("call gpubpf_program0") == calls

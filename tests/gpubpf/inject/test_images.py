"""Programs at accesses to textures and surfaces: which ones run there, what they are told, and what counts as not probed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpubpf.ebpf.bytecode import UNADDRESSED_SPACES
from gpubpf.ebpf.probe import Probe
from gpubpf.inject.inject import inject
from gpubpf.inject.values import PtxProbe
from gpubpf.lower.fragment import Argument, Fragment
from gpubpf.ptx.parser import parse
from gpubpf_points import HEAD
from gpubpf_sass import assembled, sass

FIELDS = ("site", "width", "space", "kind", "active", "effect")
COUNT = Fragment(
    "count",
    "{ .reg .b64 %rd1; mov.b64 %rd1, %gpubpf_site;"
    + " ".join(f"mad.lo.u64 %rd1, %rd1, 31, %gpubpf_{field};" for field in FIELDS[1:])
    + " red.global.add.u64 [%gpubpf_sums], %rd1; }",
    (
        Argument("sums", "b64", "map_base", "sums"),
        *(Argument(field, "b64", "context", field=field) for field in FIELDS),
    ),
)
NOTHING = Fragment("nothing", "{ }", ())
KERNEL = f"""{HEAD}
.visible .entry k(.param .u64 t) {{
    .reg .b64 %rd<3>; .reg .f32 %f<9>; .reg .b32 %r<3>; .reg .pred %p<3>; .reg .v4.f32 %v;
    ld.param.u64 %rd1, [t]; mov.u32 %r1, %laneid; setp.lt.u32 %p1, %r1, 8; mov.f32 %f8, 0f00000000;
    tex.1d.v4.f32.s32 {{%f1, %f2, %f3, %f4}}, [%rd1, {{%r1}}];
    @%p1 tld4.r.2d.v4.f32.f32 {{%f4, %f5, %f6, %f7}}, [%rd1, {{%f8, %f8}}];
    add.f32 %f5, %f1, %f3; ld.global.f32 %f5, [%rd1];
    suld.b.1d.v4.b32.trap %v, [%rd1, {{%r1}}]; mov.f32 %f6, %v.y;
    sust.b.1d.v2.b32.trap [%rd1, {{%r1}}], {{%r1, %r1}};
    sured.b.add.1d.u32.trap [%rd1, {{%r1}}], %r1;
    ret; }}"""


def images(*probes: PtxProbe):
    injected = inject(parse(KERNEL), {"k": probes})
    assert not injected.refusals
    return injected, injected.kernels["k"]


def test_programs_of_these_spaces_are_told_what_the_kernel_uses(tmp_path: Path) -> None:
    injected, kernel = images(Probe(COUNT, "access", spaces=UNADDRESSED_SPACES))
    # Of tex the first and third element are used; of tld4, %f4 by both, and %f5 and %f6 by others that overwrite them.
    assert [(s.kind, s.space, s.width, s.effect, s.opcode.split(".")[0]) for s in kernel.sites] == [
        *(("load", "texture", 12, 1, "tex"), ("load", "texture", 12, 1, "tld4")),
        *(("load", "surface", 4, 1, "suld"), ("store", "surface", 8, 2, "sust")),
        ("atomic", "surface", 4, 3, "sured"),
    ]
    assert kernel.unprobed == {}
    assembled(injected.text, "sm_80", tmp_path)


@pytest.mark.parametrize(
    ("probe", "seen", "unprobed"),
    [
        (Probe(COUNT, "access"), ["ld"], {"tex", "tld4", "suld", "sust", "sured"}),
        (
            Probe(COUNT, "access", spaces=("global", "surface")),
            ["ld", "suld", "sust", "sured"],
            {"tex", "tld4"},
        ),
        (
            Probe(COUNT, "access", kinds=("load",), spaces=("surface",)),
            ["suld"],
            {"tex", "tld4", "sust", "sured"},
        ),
        (
            Probe(COUNT, "access", spaces=("texture",), alike=32),
            ["tex", "tld4"],
            {"suld", "sust", "sured"},
        ),
        (
            Probe(NOTHING, "access", spaces=("texture",)),
            ["tex", "tld4"],
            {"tex", "tld4", "suld", "sust", "sured"},
        ),
        (Probe(COUNT, "value"), ["ld"], {"tex", "tld4", "suld", "sust", "sured"}),
    ],
    ids=["default", "mixed", "kinds", "alike", "empty", "values"],
)
def test_what_is_not_seen(probe: PtxProbe, seen: list[str], unprobed: set[str]) -> None:
    if probe.point == "value":
        narrow = Fragment("narrow", "{ red.global.add.u32 [%gpubpf_sums], 1; }", COUNT.arguments[:1])
        probe = Probe(narrow, "value")
    _, kernel = images(probe)
    assert [site.opcode.split(".")[0] for site in kernel.sites] == seen
    assert kernel.unprobed == dict.fromkeys(sorted(unprobed), 1)


def test_probed_wgmma_stay_asynchronous(tmp_path: Path) -> None:
    """ptxas only adds `warpgroup.arrive` between them, which waits for no multiplication."""
    one = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 1, 1, 0, 0;"
    text = f""".version 8.3
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p, .param .u64 a, .param .u64 b) {{ .reg .f32 %f<5>; .reg .b64 %rd<4>; .reg .pred %p<2>;
    ld.param.u64 %rd3, [p]; ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b];
    {" ".join(f"mov.f32 %f{n}, 0f00000000;" for n in range(1, 5))} wgmma.fence.sync.aligned; {4 * one}
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    st.global.v4.f32 [%rd3], {{%f1, %f2, %f3, %f4}}; ret; }}"""
    injected = inject(parse(text), {"k": [Probe(COUNT, "access", spaces=("tensor",))]})
    assert [site.opcode.split(".")[0] for site in injected.kernels["k"].sites] == 4 * ["wgmma"]
    cubin, _ = assembled(injected.text, "sm_90a", tmp_path)
    order = re.findall(r"HGMMA|WARPGROUP\.\w+", "\n".join(sass(cubin)["k"]))
    assert order.count("HGMMA") == 4
    last = len(order) - order[::-1].index("HGMMA")
    assert set(order[:last]) == {"HGMMA", "WARPGROUP.ARRIVE"}

"""What ptxas makes of probes: every form is taken, what was there stays, nothing goes to local memory."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

from gpubpf.ebpf.probe import Probe
from gpubpf.inject.inject import inject
from gpubpf.lower.fragment import Argument, Fragment
from gpubpf.ptx.module import render
from gpubpf.ptx.parser import parse
from gpubpf_sass import assembled, registers, sass

_spec = importlib.util.spec_from_file_location("forms", Path(__file__).parents[1] / "ptx" / "test_access.py")
assert _spec is not None and _spec.loader is not None
_forms = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_forms)
FORMS, ROWS, module = _forms.FORMS, _forms.ROWS, _forms.module

FIELDS = ("site", "address", "width", "space", "kind", "active", "effect")
# Adds all that it is told to a word: nothing of it can be left out.
SUM = Fragment(
    "sum",
    "{ .reg .b64 %rd<4>; mov.b64 %rd1, %gpubpf_site;"
    + " ".join(f"mad.lo.u64 %rd1, %rd1, 31, %gpubpf_{field};" for field in FIELDS[1:])
    + " red.global.add.u64 [%gpubpf_sums], %rd1; }",
    (
        Argument("sums", "b64", "map_base", "sums"),
        *(Argument(field, "b64", "context", field=field) for field in FIELDS),
    ),
)
NARROW = Fragment(
    "narrow",
    "{ red.global.add.u32 [%gpubpf_sums], %gpubpf_width; }",
    (Argument("sums", "b64", "map_base", "sums"), Argument("width", "b32", "context", field="width")),
)
MEMORY = re.compile(r"\b((?:LD(?!C)|ST|ATOM|RED|CCTL|LDSM|UBLKCP|SYNCS)[\w.]*)")


def rows(sm: str) -> list[tuple[str, str]]:
    """Forms, without those of texture references: their kernels are refused."""
    return [
        (text, told) for of, text, told in ROWS if of == sm and not re.search(r"\[(picture|surface)\b", text)
    ]


@pytest.mark.every(2)
@pytest.mark.parametrize("sm", FORMS)
def test_ptxas_takes_a_probe_at_every_form(sm: str, tmp_path: Path) -> None:
    text = module(sm, "\n".join(text for text, _ in rows(sm)))
    probes = (
        Probe(SUM, "access"),
        Probe(NARROW, "access", spaces=("shared", "local")),
        Probe(NARROW, "access", spaces=("global",)),
    )
    injected = inject(parse(text), {"k": probes})
    assert not injected.refusals
    kernel = injected.kernels["k"]
    expected = [len(re.findall(r"(?:^|, )(?:load|store|atomic|async) ", told)) for _, told in rows(sm)]
    assert kernel.site_count == len(kernel.sites) == sum(expected)
    named = Counter(told[2:] for _, told in rows(sm) if told.startswith("- "))
    assert kernel.unprobed == named
    assembled(injected.text, sm, tmp_path, "-O0")
    told = [s for s in kernel.sites if s.space == "generic"]
    assert injected.text.count("isspacep.shared %gpubpf_0shared") == len(told)


@pytest.mark.parametrize("sm", ["sm_80", "sm_90"])
def test_what_was_there_stays_and_nothing_is_spilled(sm: str, tmp_path: Path) -> None:
    """The application's memory instructions are all still there, once; a probe adds its own atomic and no other."""
    body = """ld.param.u64 %rd1, [a]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 16; add.u64 %rd3, %rd1, %rd2;
    mov.u32 %r2, tile; shl.b32 %r3, %r1, 2; add.u32 %r2, %r2, %r3; setp.lt.u32 %p1, %r1, 9;
    ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd3];
    @%p1 ld.global.nc.f32 %f5, [%rd3+256];
    st.shared.f32 [%r2+16], %f1;
    bar.sync 0;
    ld.shared.f32 %f6, [%r2+20];
    @!%p1 st.global.f32 [%rd3+4], %f6;
    atom.global.add.f32 %f7, [%rd1], %f5;
    ld.f32 %f8, [%rd3+512];
    add.f32 %f8, %f8, %f2; add.f32 %f8, %f8, %f7;
    st.global.v2.f32 [%rd3+1024], {%f8, %f3};"""
    text = module(sm, body)
    cubin, before = assembled(render(parse(text)), sm, tmp_path)
    plain = Counter(m[1] for line in sass(cubin)["k"] if (m := MEMORY.search(line)))
    assert sum(plain.values()) >= 8
    injected = inject(parse(text), {"k": [Probe(SUM, "access")]})
    cubin, after = assembled(injected.text, sm, tmp_path)
    probed = Counter(m[1] for line in sass(cubin)["k"] if (m := MEMORY.search(line)))
    added = probed - plain
    assert not plain - probed
    assert sum(added.values()) == len(injected.kernels["k"].sites) == 8, added
    assert {name.split(".")[0] for name in added} <= {"RED", "REDG", "ATOMG", "ATOM"}
    assert "0 bytes spill stores" in after and "0 bytes stack frame" in after
    assert registers(after)["k"] <= registers(before)["k"] + 24


def test_probes_at_barriers_are_taken_with_every_operand(tmp_path: Path) -> None:
    wait = Fragment(
        "wait",
        "{ .reg .b64 %rd1; add.u64 %rd1, %gpubpf_barrier, %gpubpf_threads; add.u64 %rd1, %rd1, %gpubpf_waited;"
        " red.global.add.u64 [%gpubpf_sums], %rd1; }",
        (
            Argument("sums", "b64", "map_base", "sums"),
            *(Argument(field, "b64", "context", field=field) for field in ("barrier", "threads", "waited")),
        ),
    )
    come = Fragment(
        "come",
        "{ .reg .b64 %rd1; add.u64 %rd1, %gpubpf_barrier, %gpubpf_threads; red.global.add.u64 [%gpubpf_sums], %rd1; }",
        tuple(a for a in wait.arguments if a.name != "waited"),
    )
    forms = """bar.sync 0; bar.sync %r1; bar.sync 1, 64; bar.sync %r1, %r2; bar.arrive 2, 64; bar.arrive %r1, %r2; barrier.sync 3;
    barrier.sync.aligned 4, 32; barrier.cta.sync.aligned 5; bar.red.and.pred %p1, 0, %p1; @%p1 bar.red.or.pred %p1, 1, 32, !%p2;
    bar.red.popc.u32 %r1, %r1, %p1; @!%p2 bar.red.popc.u32 %r2, 6, %r2, %p1; barrier.red.popc.aligned.u32 %r3, 1, %p2;
    barrier.arrive.aligned 3, 64; bar.warp.sync 0xffffffff; barrier.cluster.arrive; barrier.cluster.wait;
    @%p1 barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
    @%p1 st.global.u32 [%rd1], %r1; st.global.u32 [%rd1+4], %r2; st.global.u32 [%rd1+8], %r3;"""
    text = module("sm_90", "ld.param.u64 %rd1, [a]; mov.u32 %r1, %tid.x; setp.lt.u32 %p2, %r1, 40;" + forms)
    probes = [Probe(come, "barrier_arrive"), Probe(wait, "barrier_leave")]
    injected = inject(parse(text), {"k": probes})
    points = Counter(site.point for site in injected.kernels["k"].sites)
    assert points == {"barrier_arrive": 17, "barrier_leave": 14}
    assembled(injected.text, "sm_90", tmp_path)


@pytest.mark.parametrize("sm", ["sm_80", "sm_90"])
def test_lanes_meet_again_after_a_program(sm: str, tmp_path: Path) -> None:
    """Instructions of a whole warp (`.aligned`) and `activemask` come after a BSYNC or WARPSYNC, however the lanes went."""
    turns = Fragment(
        "turns",
        """{
.reg .b64 %rd1; .reg .b32 %r1; .reg .pred %p1;
mov.u32 %r1, %laneid;
$L_turn:
atom.global.add.u64 %rd1, [%gpubpf_sums], 1; add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 40; @%p1 bra $L_turn;
}""",
        (Argument("sums", "b64", "map_base", "sums"),),
    )
    body = """ld.param.u64 %rd1, [a]; mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 7; mov.u32 %r9, tile;
    @%p1 ld.global.u32 %r2, [%rd1];
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r3, %r4}, [%r9];
    add.f32 %f1, %f1, %f2;
    mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, {%r3, %r4}, {%r2}, {%f1, %f2, %f3, %f4};
    add.f32 %f1, %f1, %f2;
    activemask.b32 %r5;
    bar.sync 0;
    st.global.v2.f32 [%rd1+8], {%f1, %f2}; st.global.u32 [%rd1], %r5;"""
    probes = [Probe(turns, point) for point in ("access", "barrier_arrive", "float")]
    injected = inject(parse(module(sm, body)), {"k": probes})
    assert not injected.refusals
    cubin, _ = assembled(injected.text, sm, tmp_path)
    code = sass(cubin)["k"]
    for name in (r"LDSM\b", r"HMMA\b", r"VOTE\.ANY R", r"BAR\.SYNC"):
        (at,) = (n for n, line in enumerate(code) if re.match(name, line))
        nearest = next(
            line for line in reversed(code[:at]) if re.search(r"BSYNC|WARPSYNC|@!?U?P\d BRA", line)
        )
        assert nearest.startswith(("BSYNC", "WARPSYNC")), code[: at + 1]

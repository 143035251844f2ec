"""Programs that run in some blocks or warps only, at each point, on the embedded device's engine."""

from __future__ import annotations

import numpy as np
import pytest

from engine_device import Array
from gpubpf.ebpf.maps import GROUPS, SAMPLED
from gpubpf.ebpf.probe import Probe
from gpubpf.ebpf.sampling import PARAMETER, Sampling, Unit, hashes
from gpubpf.inject import plan
from gpubpf.inject.inject import inject
from gpubpf.lower.fragment import Argument, Fragment
from gpubpf.ptx.parser import parse
from gpubpf_fragments import log
from gpubpf_points import HEAD, Run

BLOCKS, THREADS, WARPS = 12, 80, 3
POINTS = (
    "entry",
    "exit",
    "function_entry",
    "function_exit",
    "barrier_arrive",
    "barrier_leave",
    "access",
    "value",
    "basic_block",
    "branch",
    "instruction",
)
# Each thread writes 1 to its word in a called function, which lane 3 of each warp leaves by an exit; the others add 1.
KERNEL = f"""{HEAD}
.func first(.param .b64 p) {{
    .reg .b64 %rd1; .reg .b32 %r<3>; .reg .pred %p;
    ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x; and.b32 %r1, %r1, 31;
    mov.u32 %r2, 1; st.global.u32 [%rd1], %r2;
    setp.eq.u32 %p, %r1, 3; @%p exit; ret;
}}
.visible .entry k(.param .u64 p) {{
    .reg .b64 %rd<4>; .reg .b32 %r<4>;
    ld.param.u64 %rd1, [p]; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x; mad.lo.u32 %r1, %r1, {THREADS}, %r2;
    mul.wide.u32 %rd2, %r1, 4; add.u64 %rd3, %rd1, %rd2;
    {{ .param .b64 a; st.param.b64 [a], %rd3; call first, (a); }}
    bar.sync 0;
    ld.global.u32 %r3, [%rd3]; add.u32 %r3, %r3, 1; st.global.u32 [%rd3], %r3;
    ret;
}}"""


class Sampled(Run):
    """The kernel with a program at each of POINTS; `ran` says which threads ran it at which site, by point."""

    def __init__(self, unit: Unit | None) -> None:
        super().__init__(
            KERNEL,
            [
                Probe(log(point, point, "site"), point, opcodes=("setp",), sampled=unit or "")
                for point in POINTS
            ],
        )

    def ran(self, limit: int = 0) -> dict[str, list[tuple[int, ...]]]:
        self.params[PARAMETER] = limit.to_bytes(4, "little") + b"\7\0\0\0"
        out = Array(np.zeros(BLOCKS * THREADS, np.uint32))
        self("k", THREADS, out, grid=BLOCKS)
        left = np.arange(BLOCKS * THREADS) % THREADS % 32 == 3
        assert (out.host == np.where(left, 1, 2)).all()  # whatever is measured
        return {point: self.records(1, point) for point in POINTS}


@pytest.mark.parametrize(("unit", "form"), [("block", "inline"), ("warp", "inline"), ("block", "functions")])
def test_all_or_none(unit: Unit, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "functions":
        monkeypatch.setattr(plan, "MAX_INLINE", 0)
        monkeypatch.setattr(plan, "MIN_FUNCTION", 0)
    full, sampled = Sampled(None).ran(), Sampled(unit)
    assert all(full.values())
    assert not any(sampled.ran(0).values())
    assert sampled.ran(0xFFFFFFFF) == full


@pytest.mark.parametrize("unit", ["block", "warp"])
def test_the_device_chooses_and_counts_as_the_host_says(unit: Unit) -> None:
    """In called functions, too."""
    sampling = Sampling(unit, 4, 7)
    units = BLOCKS * (WARPS if unit == "warp" else 1)
    of = hashes(np.arange(units), 0, 7)
    chosen = of[of <= sampling.limit]
    assert 0 < len(chosen) < units
    sizes = np.full(BLOCKS, THREADS) if unit == "block" else np.tile([32, 32, 16], BLOCKS)
    threads = int(sizes[of <= sampling.limit].sum())
    run = Sampled(unit)
    found = run.ran(sampling.limit)
    counted = run.maps[SAMPLED].host[:GROUPS]
    assert (counted == np.bincount(chosen % GROUPS, minlength=GROUPS)).all()
    assert len(found["entry"]) == len(found["exit"]) == len(found["function_entry"]) == threads


def test_the_group_is_the_hash_or_the_multiprocessor() -> None:
    note = Fragment(
        "note",
        """{
.reg .b64 %rd1; .reg .b32 %r<3>;
mov.u32 %r1, %ctaid.x; mad.wide.u32 %rd1, %r1, 4, %gpubpf_groups;
st.global.u32 [%rd1], %gpubpf_group;
}""",
        (Argument("groups", "b64", "map_base", "groups"), Argument("group", "b32", "group")),
    )
    for sampled in ("block", ""):
        run = Run(KERNEL, (Probe(note, "exit", sampled=sampled),))  # type: ignore[arg-type]
        run.params[PARAMETER] = b"\xff\xff\xff\xff\7\0\0\0"
        run("k", THREADS, Array(np.zeros(BLOCKS * THREADS, np.uint32)), grid=BLOCKS)
        groups = run.maps["groups"].host.view(np.uint32)[:BLOCKS]
        assert (groups == hashes(np.arange(BLOCKS), 0, 7)).all() if sampled else groups.max() < 1024


@pytest.mark.parametrize(("space", "bodies"), [("shared", 1), ("local", 2)])
def test_a_kernel_that_calls_a_function_with_shared_memory_has_one_body(space: str, bodies: int) -> None:
    """Each body would call a copy of the function with memory of its own, so that warps of a block would not share it."""
    text = f"""{HEAD}
.func f(.param .b64 p) {{
    .{space} .align 4 .b8 room[64];
    .reg .b64 %rd1; .reg .b32 %r1;
    ld.param.u64 %rd1, [p]; st.{space}.u32 [room], 1; ld.{space}.u32 %r1, [room]; st.global.u32 [%rd1], %r1; ret;
}}
.visible .entry k(.param .u64 p) {{
    .reg .b64 %rd1; ld.param.u64 %rd1, [p];
    {{ .param .b64 a; st.param.b64 [a], %rd1; call f, (a); }} ret;
}}"""
    made = inject(parse(text), {"k": [Probe(log("access", "access", "site"), "access", sampled="block")]})
    assert made.kernels["k"].split is (bodies == 2)
    assert made.text.count(".align 4 .b8 room[64]") == bodies

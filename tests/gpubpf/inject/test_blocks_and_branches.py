"""Programs at basic blocks and branches: which threads run them, how often, with which lanes. On the embedded device's engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine_device import Array
from gpubpf.ebpf.probe import Probe
from gpubpf.inject import plan
from gpubpf.inject.inject import inject
from gpubpf.inject.values import Site
from gpubpf.ptx.parser import parse
from gpubpf.record import replace
from gpubpf_fragments import log, tally
from gpubpf_points import HEAD, Run
from gpubpf_sass import assembled

THREADS = 48

# `#` marks the first instruction of a basic block, with its number; `?` a conditional branch.
PATHS = f"""{HEAD}
.func (.param .b32 r) _Z4halfj(.param .b32 n) {{
    .reg .pred %p<4>; .reg .b32 %r<9>;
    ld.param.b32 %r1, [n];                      //# half 0
    setp.gt.u32 %p1, %r1, 40;
    @%p1 exit;                                  //? half leaves
    mov.u32 %r2, 0;                             //# half 1
again:
    shr.u32 %r1, %r1, 1;                        //# half 2
    add.u32 %r2, %r2, 1;
    setp.ne.u32 %p2, %r1, 0;
    @%p2 bra again;                             //? half again
    st.param.b32 [r], %r2;                      //# half 3
    ret;
}}
.visible .entry k(.param .u64 p) {{
    .reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<20>;
    ld.param.u64 %rd1, [p];                     //# k 0
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.u64 %rd1, %rd1, %rd2;
    setp.lt.u32 %p1, %r1, 5;
    @%p1 ret;                                   //? few
    and.b32 %r2, %r1, 3;                        //# k 1
    mov.u32 %r3, 0;
turn:
debug:
    .pragma "nounroll";
    setp.eq.u32 %p2, %r3, %r2;                  //# k 2
    add.u32 %r3, %r3, 1;
also_debug:
    @!%p2 bra turn;                             //? turn
    {{ .param .b32 a; .param .b32 b;            //  a call does not end a block
      st.param.b32 [a], %r1;                    //# k 3
      call (b), _Z4halfj, (a);
      ld.param.b32 %r4, [b]; }}
    rem.u32 %r5, %r1, 3;
    jumps: .branchtargets one, two, both;
    brx.idx %r5, jumps;
one:
    add.u32 %r4, %r4, 100;                      //# k 4
    bra both;
two:
    add.u32 %r4, %r4, 200;                      //# k 5
both:
    st.global.u32 [%rd1], %r4;                  //# k 6
    setp.eq.u32 %p3, %r1, 20;
    @%p3 bra out;                               //? 20
    setp.eq.u32 %p4, %r1, 21;                   //# k 7
    @%p4 exit;                                  //? 21
    {{ .reg .pred %p4; setp.eq.u32 %p4, %r1, 22; //# k 8
      @%p4 bra inner;                           //? 22
      st.global.u32 [%rd1+256], %r3;            //# k 9
      inner: }}
out:
    ret;                                        //# k 10
}}"""


def _visits() -> dict[str, Callable[[int], int]]:
    """How often thread t enters each block of PATHS."""

    def inside(t: int) -> bool:  # it calls half
        return t >= 5

    def after(t: int) -> bool:  # it returns from half
        return 5 <= t <= 40

    return {
        "half 0": lambda t: inside(t),
        "half 1": lambda t: after(t),
        "half 2": lambda t: after(t) * t.bit_length(),
        "half 3": lambda t: after(t),
        "k 0": lambda t: 1,
        "k 1": lambda t: inside(t),
        "k 2": lambda t: inside(t) * (t % 4 + 1),
        "k 3": lambda t: inside(t),
        "k 4": lambda t: after(t) and t % 3 == 0,
        "k 5": lambda t: after(t) and t % 3 == 1,
        "k 6": lambda t: after(t),
        "k 7": lambda t: after(t) and t != 20,
        "k 8": lambda t: after(t) and t not in (20, 21),
        "k 9": lambda t: after(t) and t not in (20, 21, 22),
        "k 10": lambda t: after(t) and t != 21,
    }


def _taken() -> dict[str, tuple[Callable[[int], int], Callable[[int], int]]]:
    """How often thread t executes each branch of PATHS, and how often it takes it."""
    visits = _visits()
    return {
        "half leaves": (visits["half 0"], lambda t: t > 40),
        "half again": (visits["half 2"], lambda t: 5 <= t <= 40 and t.bit_length() - 1),
        "few": (visits["k 0"], lambda t: t < 5),
        "turn": (visits["k 2"], lambda t: t >= 5 and t % 4),
        "20": (visits["k 6"], lambda t: t == 20),
        "21": (visits["k 7"], lambda t: t == 21),
        "22": (visits["k 8"], lambda t: t == 22),
    }


def _results() -> list[int]:
    """What PATHS stores, by thread."""
    return [t.bit_length() + (100, 200, 0)[t % 3] if 5 <= t <= 40 else 0 for t in range(THREADS)]


def _marked(text: str, mark: str) -> dict[int, str]:
    """What stands behind a mark, by the line of the text."""
    return {n: line.split(mark)[1].strip() for n, line in enumerate(text.splitlines(), 1) if mark in line}


def _check_lanes(records: list[tuple[int, ...]]) -> None:
    """Lanes that run a program together are told the same, and are among the active ones."""
    together = Counter((thread // 32, *told) for thread, *told in records)
    for (_, _, active, *_), number in together.items():
        assert number % active.bit_count() == 0
    assert all(active >> thread % 32 & 1 for thread, _, active, *_ in records)


def _is_unchanged(run: Run, data: Array) -> None:
    assert data.host[:THREADS].tolist() == _results()
    assert (data.host[64 : 64 + THREADS] != 0).sum() == sum(_visits()["k 9"](t) for t in range(THREADS))


@pytest.fixture(params=["inline", "functions"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "functions":
        monkeypatch.setattr(plan, "MAX_INLINE", 0)
        monkeypatch.setattr(plan, "MIN_FUNCTION", 0)
    return str(request.param)


# --- basic blocks -------------------------------------------------------------------------------------


def blocks_of(sites: dict[int, Site]) -> dict[int, str]:
    """`k 3` by site."""
    return {
        n: f"{'k' if s.function == 'k' else 'half'} {s.block}"
        for n, s in sites.items()
        if s.point == "basic_block"
    }


def test_threads_run_a_program_at_each_block_that_they_enter(form: str) -> None:
    run = Run(PATHS, [Probe(log("basic_block"), "basic_block"), Probe(tally("blocks"), "exit", "blocks")])
    data = Array(np.zeros(256, np.uint32))
    run("k", THREADS, data)
    _is_unchanged(run, data)
    sites = run.sites("k")
    blocks = blocks_of(sites)
    marked = _marked(PATHS, "//# ")
    assert {n: marked[sites[n].line] for n in blocks} == blocks
    # the last block of each is only a way out, which two branches take, or one branch and the block before
    assert Counter(blocks.values()) == Counter([*marked.values(), "k 10"])
    records = run.records(2)
    found = Counter((blocks[site], thread) for thread, site, _ in records)
    expected = {(b, t): int(n(t)) for b, n in _visits().items() for t in range(THREADS) if n(t)}
    assert found == expected
    _check_lanes(records)
    counted = run.maps["blocks"].host[: 2 * THREADS].reshape(-1, 2)[:, 1].tolist()
    assert counted == [sum(1 for r in records if r[0] == t) for t in range(THREADS)]


# Branches to a common exit, out of a loop and behind it.
WAYS_OUT = f"""{HEAD}.visible .entry k() {{
    .reg .pred %p<9>; .reg .b32 %r<9>;
    mov.u32 %r1, %tid.x; mov.u32 %r2, 0; setp.gt.u32 %p1, %r1, 20;
    @%p1 bra out;
    turn: add.u32 %r2, %r2, 1; setp.eq.u32 %p2, %r2, %r1;
    @%p2 bra out;
    setp.lt.u32 %p3, %r2, 10;
    @%p3 bra turn;
    setp.eq.u32 %p4, %r1, 0;
    @%p4 bra out;
    mov.u32 %r3, 1;
    out: mov.u32 %r4, 2;
    ret; }}"""


def test_ways_out_that_are_copied() -> None:
    """Each branch to the way out gets a copy of it; where a program at exits reads a clock, the copy is in the loop."""
    left = log("exit", "left")
    timed = left.ptx.replace("mov.u32 %r1", ".reg .b64 %now; mov.u64 %now, %globaltimer; mov.u32 %r1")
    points = ("basic_block", "branch")
    run = Run(
        WAYS_OUT,
        [
            *(Probe(log(point, point), point) for point in points),
            Probe(replace(left, ptx=timed), "exit"),
        ],
    )
    assert run.injected.text.count("mov.u32 %r4, 2;") == 4
    run("k", 32)
    sites = run.sites("k")
    blocks: Counter[tuple[int | None, int]] = Counter()
    branches: Counter[tuple[int, int]] = Counter()
    for t in range(32):
        early, leaves = t > 20, 1 <= t <= 10  # before the loop, or out of it at its turn t
        turns = 0 if early else t if leaves else 10
        ends = not early and not leaves  # it comes to the end of the loop
        entered = (1, turns, turns - leaves, ends, ends and t != 0, 1)
        blocks.update({(number, t): n for number, n in enumerate(entered)})
        taken = (early, leaves, max(0, turns - 1), ends and t == 0)
        branches.update({(4 + 2 * n, t): times for n, times in enumerate(taken)})
    assert Counter((sites[s].block, t) for t, s, _ in run.records(2, "basic_block")) == +blocks
    records = run.records(3, "branch")
    _check_lanes(records)
    first = HEAD.count("\n")
    took = Counter((sites[s].line - first, t) for t, s, _, lanes in records if lanes >> t & 1)
    assert took == +branches


def test_blocks_of_chosen_kernels_and_of_nothing() -> None:
    text = f"""{HEAD}.func nothing() {{ }} .func one() {{ ret; }}
.visible .entry a() {{ call nothing; call one; ret; }}
.visible .entry b() {{ call one; }}"""
    placed = {"a": [Probe(log("basic_block"), "basic_block")], "b": [Probe(log("entry"), "entry")]}
    injected = inject(parse(text), placed)
    assert [(s.function, s.point, s.block) for s in injected.kernels["a"].sites] == [
        ("one", "basic_block", 0),
        ("a", "basic_block", 0),
    ]
    assert [s.point for s in injected.kernels["b"].sites] == ["entry"]


# --- branches -----------------------------------------------------------------------------------------


def test_threads_run_a_program_before_each_conditional_branch(form: str) -> None:
    run = Run(PATHS, [Probe(log("branch"), "branch"), Probe(log("branch", "only", "taken"), "branch")])
    data = Array(np.zeros(256, np.uint32))
    run("k", THREADS, data)
    _is_unchanged(run, data)
    sites, marked = run.sites("k"), _marked(PATHS, "//? ")
    assert sorted(site.line for site in sites.values()) == sorted(marked)
    assert Counter(site.opcode for site in sites.values()) == {"bra": 4, "exit": 2, "ret": 1}
    records = run.records(3)
    _check_lanes(records)
    assert all(taken & ~active == 0 for _, _, active, taken in records)
    executed = Counter((marked[sites[site].line], t) for t, site, *_ in records)
    took = Counter((marked[sites[s].line], t) for t, s, _, taken in records if taken >> t % 32 & 1)
    for name, (often, taken) in _taken().items():
        assert [executed[name, t] for t in range(THREADS)] == [often(t) for t in range(THREADS)], name
        assert [took[name, t] for t in range(THREADS)] == [taken(t) for t in range(THREADS)], name
    # alone, it is told the same
    own = Counter(t for t, taken in run.records(1, "only") if taken >> t % 32 & 1)
    assert own == Counter(t for (_, t), n in took.items() for _ in range(n))
    assert run.injected.kernels["k"].unprobed == {"brx.idx": 1}


def test_what_is_a_conditional_branch() -> None:
    text = f"""{HEAD}.func f() {{ ret; }}
.visible .entry k() {{
    .reg .pred %p<4>; .reg .b32 %r<4>;
    @%p1 bra one;
    @!%p1 bra.uni one;
    bra one;
    one: selp.b32 %r1, %r2, %r3, %p1;
    @%p1 mov.u32 %r1, 1;
    @%p1 call f;
    @%p1 trap;
    table: .branchtargets one, two;
    @%p1 brx.idx %r1, table;
    two: @%p1 ret;
    @%p1 exit;
    ret; }}"""
    kernel = inject(parse(text), {"k": [Probe(log("branch"), "branch")]}).kernels["k"]
    assert [site.opcode for site in kernel.sites] == ["bra", "bra.uni", "ret", "exit"]
    assert kernel.unprobed == {"brx.idx": 1}


POINTS = ("basic_block", "branch")


@pytest.mark.parametrize("sm", ["sm_75", "sm_80", "sm_90"])
def test_ptxas_takes_them_at_every_place(sm: str, form: str, tmp_path: Path) -> None:
    edges = (Path(__file__).parent / "edges.ptx").read_text()
    for text in (edges, PATHS.replace("sm_80", sm)):
        module = parse(text)
        probes = [Probe(log(point, point), point) for point in POINTS]
        injected = inject(module, dict.fromkeys(module.entries, probes))
        assert not injected.refusals
        _, report = assembled(injected.text, sm, tmp_path)
        assert "spill stores" in report

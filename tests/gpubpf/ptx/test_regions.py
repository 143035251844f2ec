"""Regions of branches, against their definition; and what the conditions of branches depend on."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

import diverging
import gpubpf
from gpubpf.ebpf.bytecode import REGIONS
from gpubpf.ptx.causes import Causes
from gpubpf.ptx.flow import Flow
from gpubpf.ptx.parser import parse
from gpubpf.ptx.regions import Regions, post_dominators

HEADER = Path(gpubpf.__file__).parent / "include/gpubpf.h"


def ahead(successors: list[list[int]], start: int, without: int | None) -> set[int]:
    """Return the nodes that a node leads to if no way goes through `without`; the node itself, if it is in a cycle."""
    seen: set[int] = set()
    todo = [way for way in successors[start] if way != without]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += [way for way in successors[node] if way != without]
    return seen


def test_post_dominators_are_on_every_way_to_the_end() -> None:
    chosen = random.Random(3)
    for _ in range(300):
        count = chosen.randint(1, 12)
        successors = [chosen.sample(range(count), min(count, chosen.randint(0, 3))) for _ in range(count)]
        leaving = {n for n in range(count) if not successors[n] or chosen.random() < 0.1}
        found = post_dominators(successors, leaving)
        for node in range(count):
            reached = ahead(successors, node, None) | {node}
            if not reached & leaving:
                assert found[node] is None
                continue
            always = [
                other
                for other in range(count)
                if other != node and not (ahead(successors, node, other) | {node}) & leaving
            ]
            nearest = [
                n
                for n in always
                if all(m == n or not (ahead(successors, n, m) | {n}) & leaving for m in always)
            ]
            assert found[node] == (nearest[0] if nearest else None)


@pytest.mark.parametrize("seed", range(8))
def test_a_region_ends_where_all_ways_meet(seed: int) -> None:
    flow = Flow(parse(diverging.module(range(seed, seed + 1))).functions[f"k{seed}"].body or ())
    regions = Regions(flow, REGIONS, first=2)
    successors = [list(block.successors) for block in flow.blocks]
    members = {
        branch: ahead(successors, block, regions.meets[branch]) for branch, block in regions.branches.items()
    }
    for branch in regions.branches:
        meets = regions.meets[branch]
        first = None if meets is None else flow.blocks[meets].instructions[0]
        assert first == diverging.meeting(flow)[branch]
        number = regions.numbers[branch]
        assert 2 <= number <= REGIONS
        for other, elsewhere in members.items():
            end = regions.meets[other]
            if end != meets and number < REGIONS and members[branch] & elsewhere | members[branch] & {end}:
                assert regions.numbers[other] != number
    for block, mask in enumerate(regions.inside):
        inside = {regions.numbers[branch] for branch, blocks in members.items() if block in blocks}
        assert mask == 0b11 | sum(1 << number for number in inside if number < REGIONS)


def test_which_branches_leave_a_loop() -> None:
    text = """.version 7.0
.target sm_70
.address_size 64
.visible .entry k()
{
 .reg .pred %p<4>;
 @%p0 bra OUT;                 // an if around the loop
HEAD: @%p1 bra ELSE;           // an if in the loop
 @%p2 bra DONE;                // break
ELSE: @%p3 bra NEXT;
 @%p1 ret;                     // return
NEXT: @%p0 bra HEAD;           // the loop
DONE: bar.sync 0;
OUT: ret;
}
"""
    flow = Flow(parse(text).functions["k"].body or ())
    regions = Regions(flow, REGIONS)
    assert [regions.leaves_loop(branch) for branch in regions.branches] == [
        False,
        False,
        True,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("seed", range(12, 15))
def test_lanes_meet_where_a_called_function_ends(seed: int) -> None:
    flow = Flow(parse(diverging.module(range(seed, seed + 1), calls=True)).functions["helper"].body or ())
    regions = Regions(flow, REGIONS, called=True)
    last = max(n for n, block in enumerate(flow.blocks) if not block.successors)
    for branch, meets in regions.meets.items():
        assert meets is not None
        assert flow.blocks[meets].instructions[0] == diverging.meeting(flow, called=True)[branch]
    assert last in regions.meets.values()
    assert not regions.inside[last]
    assert last not in Regions(flow, REGIONS).meets.values()


def test_the_number_of_regions_is_that_of_the_header() -> None:
    (number,) = re.findall(r"#define GPU_REGIONS (\d+)", HEADER.read_text())
    assert int(number) == REGIONS


CONDITIONS = """.version 7.0
.target sm_70
.address_size 64
.visible .entry k(.param .u64 p, .param .u32 n)
{
 .reg .b64 %rd<4>; .reg .b32 %r<16>; .reg .pred %p<8>; .local .align 4 .b8 stack[4];
 ld.param.u64 %rd1, [p]; ld.param.u32 %r1, [n];
 mov.u32 %r2, %tid.x; mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x;
 mad.lo.u32 %r5, %r3, %r4, %r2;
 setp.ge.u32 %p1, %r5, %r1;
 @%p1 bra END;                                  // grid
 and.b32 %r6, %r2, 1;
 setp.eq.u32 %p2, %r6, 0;
 @%p2 bra A;                                    // lane
A: mul.wide.u32 %rd2, %r5, 4;
 add.u64 %rd2, %rd1, %rd2;
 ld.global.u32 %r7, [%rd2];
 setp.eq.u32 %p3, %r7, 0;
 @%p3 bra B;                                    // data
B: setp.eq.u32 %p4, %r1, 0;
 @%p4 bra C;                                    // uniform
C: st.local.u32 [stack], %r2;
 ld.local.u32 %r8, [stack];
 setp.eq.u32 %p5, %r8, 0;
 @%p5 bra D;                                    // unknown
D: shfl.sync.idx.b32 %r9, %r1, 0, 31, -1;
 setp.eq.u32 %p6, %r9, 0;
 @%p6 bra END;                                  // data
 @%p1 bra.uni END;
END: ret;
}
"""


def test_what_a_condition_depends_on() -> None:
    flow = Flow(parse(CONDITIONS).functions["k"].body or ())
    causes = Causes(flow, entry=True)
    branches = [index for index, one in flow.instructions() if one.opcode == "bra"]
    assert [causes.of(i) for i in branches] == ["grid", "lane", "data", "uniform", "", "data", "grid"]
    assert branches[-1] not in Regions(flow, REGIONS).branches

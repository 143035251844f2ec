"""Makes PTX kernels whose warps diverge, and counts exactly what their branches cost: lane by lane, by the definition.

`Count` knows nothing of numbers of regions or of blocks: it follows each lane's instructions, and remembers where the lane was parted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

from gpubpf.ptx.flow import Flow
from gpubpf.ptx.module import Module
from ptxrun import Memory, Thread, place_variables

WARP = 32
HEAD = """.version 7.8
.target sm_80
.address_size 64
"""


class Maker:
    """Writes a kernel of nested ifs, loops, breaks and early returns. What a lane does depends on a number `x` of its own."""

    def __init__(self, seed: int, calls: bool = False) -> None:
        self.chosen = random.Random(seed)
        self.calls = calls
        self.leaves = True
        self.lines: list[str] = []
        self.labels = 0
        self.trips = 0

    def kernel(self, name: str, depth: int) -> str:
        self.block(depth, None)
        return self._whole(
            f".visible .entry {name}(.param .u64 out)",
            [
                "ld.param.u64 %rd1, [out];",
                "mov.u32 %r2, %tid.x;",
                "mov.u32 %r3, %ctaid.x;",
                "mov.u32 %r4, %ntid.x;",
                "mad.lo.u32 %r5, %r3, %r4, %r2;",
                "mad.lo.u32 %r1, %r5, 747796405, 2891336453;",
            ],
            [
                "mul.wide.u32 %rd2, %r5, 4;",
                "add.u64 %rd2, %rd1, %rd2;",
                "st.global.u32 [%rd2], %r1;",
                "ret;",
            ],
        )

    def function(self, name: str) -> str:
        """A function without early returns: where lanes wait after these depends on the blocks of the caller."""
        self.leaves = False
        self.block(2, None)
        return self._whole(
            f".func (.param .b32 result) {name}(.param .b32 given)",
            ["ld.param.u32 %r1, [given];"],
            ["st.param.b32 [result], %r1;", "ret;"],
        )

    def _whole(self, head: str, before: list[str], after: list[str]) -> str:
        declared = [
            ".reg .b64 %rd<4>;",
            f".reg .b32 %r<10>; .reg .b32 %t<{self.trips + 1}>; .reg .pred %p<2>;",
        ]
        return "\n".join([head, "{", *declared, *before, *self.lines, *after, "}", ""])

    def label(self) -> str:
        self.labels += 1
        return f"L{self.labels}"

    def mix(self) -> None:
        for _ in range(self.chosen.randint(1, 3)):
            self.lines.append(f"mad.lo.u32 %r1, %r1, 1664525, {self.chosen.randrange(1 << 31)};")

    def condition(self) -> str:
        self.lines.append(f"shr.u32 %r8, %r1, {self.chosen.randint(8, 28)};")
        self.lines.append("and.b32 %r8, %r8, 7;")
        self.lines.append(f"setp.lt.u32 %p1, %r8, {self.chosen.choice((0, 1, 3, 4, 6, 8))};")
        return self.chosen.choice(("@%p1", "@!%p1"))

    def block(self, depth: int, loop: tuple[str, str] | None) -> None:
        for _ in range(self.chosen.randint(1, 3)):
            self.mix()
            kinds = ["if", "if", "else", "loop"] if depth else []
            kinds += ["break", "continue"] if loop else []
            kinds += ["return", "call"] if self.chosen.random() < 0.3 else []
            if kinds:
                getattr(self, f"make_{self.chosen.choice(kinds)}")(depth, loop)
        self.mix()

    def make_if(self, depth: int, loop: tuple[str, str] | None) -> None:
        over = self.label()
        self.lines.append(f"{self.condition()} bra {over};")
        self.block(depth - 1, loop)
        self.lines.append(f"{over}:")

    def make_else(self, depth: int, loop: tuple[str, str] | None) -> None:
        other, over = self.label(), self.label()
        self.lines.append(f"{self.condition()} bra {other};")
        self.block(depth - 1, loop)
        self.lines += [f"bra {over};", f"{other}:"]
        self.block(depth - 1, loop)
        self.lines.append(f"{over}:")

    def make_loop(self, depth: int, loop: tuple[str, str] | None) -> None:
        self.trips += 1
        turns, head, again, end = f"%t{self.trips}", self.label(), self.label(), self.label()
        self.lines += [f"shr.u32 {turns}, %r1, 20;", f"and.b32 {turns}, {turns}, 3;", f"{head}:"]
        self.block(depth - 1, (again, end))
        self.lines += [f"{again}:", f"setp.ne.u32 %p1, {turns}, 0;", f"sub.u32 {turns}, {turns}, 1;"]
        self.lines += [f"@%p1 bra {head};", f"{end}:"]

    def make_break(self, depth: int, loop: tuple[str, str] | None) -> None:
        assert loop
        self.lines.append(f"{self.condition()} bra {loop[1]};")

    def make_continue(self, depth: int, loop: tuple[str, str] | None) -> None:
        assert loop
        self.lines.append(f"{self.condition()} bra {loop[0]};")

    def make_return(self, depth: int, loop: tuple[str, str] | None) -> None:
        if self.leaves:
            self.lines.append(f"{self.condition()} ret;")

    def make_call(self, depth: int, loop: tuple[str, str] | None) -> None:
        if self.calls:
            self.lines.append(
                "{ .param .b32 a; .param .b32 b; st.param.b32 [a], %r1; call (b), helper, (a); ld.param.b32 %r1, [b]; }"
            )


def module(seeds: range, calls: bool = False) -> str:
    """Return PTX with a kernel k0, k1, … for each seed."""
    helper = Maker(seeds.start + 10_000).function("helper") if calls else ""
    return HEAD + helper + "".join(Maker(seed, calls).kernel(f"k{seed}", 1 + seed % 3) for seed in seeds)


class Count:
    """What a warp executes, if the lanes with the lowest place in the code run first.

    executed, diverged, lanes, taken, lost   by (function, statement of the branch)
    instructions, lane_instructions          of all
    """

    def __init__(self, flows: dict[str, Flow]) -> None:
        self.executed, self.diverged = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
        self.lanes, self.taken = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
        self.lost = Counter[tuple[str, int]]()
        self.instructions = self.lane_instructions = 0
        self.flows = flows
        self._order = {name: position for position, name in enumerate(flows)}
        self._heads = {name: {block.instructions[0] for block in flow.blocks} for name, flow in flows.items()}
        self._meets = {name: meeting(flow, name == "helper") for name, flow in flows.items()}

    def warp(self, traces: list[list[tuple[str, int, bool]]]) -> None:
        """Add what a warp executes. `traces`: of each lane, as `Thread.trace`."""
        at = [0] * len(traces)
        parted: list[list[tuple[str, int]]] = [
            [] for _ in traces
        ]  # the branches that parted each lane, the last one last
        while alive := [lane for lane, trace in enumerate(traces) if at[lane] < len(trace)]:
            place = min(self._place(traces[lane][at[lane]]) for lane in alive)
            together = [lane for lane in alive if self._place(traces[lane][at[lane]]) == place]
            function, index, _ = traces[together[0]][at[together[0]]]
            for lane in together:
                parted[lane] = [
                    one
                    for one in parted[lane]
                    if one[0] != function or self._meets[function][one[1]] != index
                ]
            self.instructions += 1
            self.lane_instructions += len(together)
            for other in set(range(len(traces))) - set(together):
                self.lost.update(parted[other][-1:])
            statement = self.flows[function].instruction(index)
            if statement.predicate is not None and statement.opcode in ("bra", "ret", "exit"):
                key = function, index
                going = [lane for lane in together if traces[lane][at[lane]][2]]
                self.executed[key] += 1
                self.diverged[key] += 0 < len(going) < len(together)
                self.lanes[key] += len(together)
                self.taken[key] += len(going)
                for lane in together if 0 < len(going) < len(together) else ():
                    parted[lane].append(key)
            for lane in together:
                at[lane] += 1

    def _place(self, step: tuple[str, int, bool]) -> tuple[int, int]:
        return self._order[step[0]], step[1]


def meeting(flow: Flow, called: bool = False) -> dict[int, int | None]:
    """Return for each branch the first instruction that all ways from it lead to: without its block, no way leads to the end.

    called: of a function that returns, so that lanes may meet in its last block. From the last block of a kernel, they have left.
    """
    found: dict[int, int | None] = {}
    for block in flow.blocks:
        branch = block.instructions[-1]
        if flow.instruction(branch).predicate is None:
            continue
        through = [
            number
            for number in range(len(flow.blocks))
            if not any(_leads_to_end(flow, way, number) for way in _ways(flow, block.instructions[-1]))
        ]
        # Of these, the one from which all others are still ahead.
        first = [n for n in through if all(m == n or not _leads_to_end(flow, n, m) for m in through)]
        ends = not first or not (called or flow.blocks[first[0]].successors)
        found[branch] = None if ends else flow.blocks[first[0]].instructions[0]
    return found


def _ways(flow: Flow, index: int) -> list[int | None]:
    (block,) = (one for one in flow.blocks if one.instructions[-1] == index)
    leaves = flow.instruction(index).opcode in ("ret", "exit")
    return [*block.successors, *([None] if leaves or not block.successors else [])]


def _leads_to_end(flow: Flow, start: int | None, without: int) -> bool:
    """Return whether a way leads from a block to the end that does not go through another block."""
    seen: set[int | None] = set()
    todo = [start]
    while todo:
        block = todo.pop()
        if block is None:
            return True
        if block not in seen and block != without:
            seen.add(block)
            todo += _ways(flow, flow.blocks[block].instructions[-1])
    return False


def traces(
    parsed: Module, kernel: str, blocks: int, threads: int
) -> Iterator[list[list[tuple[str, int, bool]]]]:
    """Yield for each warp what its lanes execute."""
    memory = Memory()
    variables = place_variables(parsed, memory)
    out = memory.allocate(4 * blocks * threads)
    for block in range(blocks):
        for first in range(0, threads, WARP):
            lanes = []
            for thread in range(first, min(first + WARP, threads)):
                special = {"%tid.x": thread, "%ctaid.x": block, "%ntid.x": threads}
                one = Thread(parsed, memory, variables, special)
                one.run(kernel, out.to_bytes(8, "little"))
                lanes.append(one.trace)
            yield lanes

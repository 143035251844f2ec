"""Plan how a function's exits are probed: which branches to an exit get a copy of it, and at which threads leave directly."""

from __future__ import annotations

from collections.abc import Collection

from gpubpf.ptx.flow import SYSTEM_FUNCTIONS, Flow, callee
from gpubpf.ptx.module import Label, PtxInstruction
from gpubpf.ptx.opcodes import facts
from gpubpf.record import MutableRecord, field

# If more branches of a function lead to exits than this, the remaining ones share one probe (`shared_exits` counts them).
MAX_EXIT_COPIES = 64
# At most this many instructions besides branches are copied to give an exit its own probe.
MAX_TAIL = 4


class ExitPlan(MutableRecord):
    """How a function's exits are rewritten. Statements are identified by their index in the body.

    retarget        branch or branch table → label → label of the copy
    copies          statement → the copies of exits to insert after it: each copy's label, the copied statements, its only branch
    copied          the number of copies; each label ends with its copy's number
    shared_exits    the number of branches that share a probe with others
    arrivals        `ret` or `exit` → the branches that still lead to it; None if control falls into it or a branch shares its probe
    direct_exits    branch at which threads leave the kernel directly → the statements up to the exit, and whether they run if the
                    branch is taken (see `_plan_direct_exits`)
    unreachable     statements that only branches in `direct_exits` led to
    """

    retarget: dict[int, dict[str, str]] = field(default_factory=dict)
    copies: dict[int, list[tuple[str, tuple[int, ...], int]]] = field(default_factory=dict)
    copied: int = 0
    shared_exits: int = 0
    arrivals: dict[int, list[int | None]] = field(default_factory=dict)
    direct_exits: dict[int, tuple[tuple[int, ...], bool]] = field(default_factory=dict)
    unreachable: set[int] = field(default_factory=set)


def plan_exits(
    flow: Flow,
    probed: Collection[str],
    leaving: Collection[str],
    has_launch_block: bool,
    timed: bool,
    ordered: bool,
) -> ExitPlan:
    """Plan the exits: each branch to an exit gets its own copy of the instructions up to it.

    probed: the opcodes that get a probe before them
    leaving: the opcodes that leave the kernel, if exits are probed
    has_launch_block: whether the function has a launch block with the address of a map
    timed: whether a probe at an exit reads a clock
    ordered: whether that clock is the multiprocessor's, which distinguishes the lanes of a warp
    """
    plan = ExitPlan()
    if not probed:
        return plan
    if leaving and has_launch_block:
        _plan_direct_exits(plan, flow, leaving, timed, ordered)
    sources: dict[int, dict[int, None]] = {}
    for index, targets in flow.targets.items():
        if index in plan.direct_exits or index in plan.unreachable:
            continue
        source = flow.table(index) if flow.instruction(index).opcode == "brx" else index
        for target in dict.fromkeys(targets):
            sources.setdefault(target, {})[source] = None
    for label in sorted(sources):
        path = flow.tail(label, MAX_TAIL)
        if path is None or flow.instruction(path[-1]).opcode not in probed:
            continue
        falls = _falls_into(plan, flow, label)
        takers = list(sources[label])[0 if falls else 1 :]
        plan.arrivals.setdefault(path[-1], []).append(None if falls else next(iter(sources[label])))
        place = next(i for i in path if facts(flow.instruction(i)).ends)
        name = flow.body[label]
        assert isinstance(name, Label)
        for source in takers:
            if plan.copied == MAX_EXIT_COPIES:
                plan.shared_exits += 1
                plan.arrivals[path[-1]].append(None)
                continue
            plan.copied += 1
            new = f"$gpubpf_exit_{plan.copied}"
            plan.retarget.setdefault(source, {})[name.name] = new
            plan.copies.setdefault(place, []).append((new, path, source))
    return plan


def _plan_direct_exits(
    plan: ExitPlan, flow: Flow, leaving: Collection[str], timed: bool, ordered: bool
) -> None:
    """Plan the branches at which some threads leave the kernel and others stay.

    The probe becomes a conditional part of the code, followed by a bare, conditional EXIT, for two reasons:

    - After a loop, ptxas makes the lanes that have left the loop wait for the others, unless a bare EXIT follows.
    - Where lanes diverge, a GPU may run the lanes that stay to their end before it runs those that leave (observed on an H200). If
      `ordered`, lanes that stay therefore wait until the probe has run.

    A direct exit costs some instructions, in a loop in each iteration. So it is planned only where waiting matters: if `ordered`, at
    all branches to an exit; if `timed`, at those in loops; and in loops that synchronize, where the others would wait for the lanes
    that have left.
    """
    synchronizing = {
        flow.cycles[number]
        for number, block in enumerate(flow.blocks)
        if number in flow.cycles and any(synchronizes(flow.instruction(i)) for i in block.instructions)
    }
    gone: set[tuple[int, int]] = set()
    for number, block in enumerate(flow.blocks):
        index = block.instructions[-1]
        instruction = flow.instruction(index)
        cycle = flow.cycles.get(number)
        if instruction.predicate is None or "uni" in instruction.modifiers:
            continue
        if not (ordered or (cycle is not None and (timed or cycle in synchronizing))):
            continue
        if cycle is None and len(plan.direct_exits) == MAX_EXIT_COPIES:
            continue
        if cycle is not None and all(flow.cycles.get(s) != cycle for s in block.successors):
            continue
        if instruction.opcode in leaving:
            plan.direct_exits[index] = (index,), True
        elif instruction.opcode == "bra":
            for start, taken in ((flow.targets[index][0], True), (index, False)):
                path = flow.tail(start, MAX_TAIL)
                if path is None or flow.instruction(path[-1]).opcode not in leaving:
                    continue
                bare = all(facts(flow.instruction(i)).ends for i in path)
                same = flow.scope[start] == flow.scope[index] and all(flow.means_same(i, index) for i in path)
                if bare or same:
                    plan.direct_exits[index] = path, taken
                    gone |= {
                        (number, s) for s in block.successors if flow.blocks[s].instructions[0] == path[0]
                    }
                    break
    if gone:
        plan.unreachable = _unreachable(flow, gone)


def _unreachable(flow: Flow, gone: set[tuple[int, int]]) -> set[int]:
    """Return the statements that only the removed edges `gone` led to. An edge is a pair of block numbers."""
    seen: set[int] = set()
    todo = [0]
    while todo:
        number = todo.pop()
        if number not in seen:
            seen.add(number)
            todo += [s for s in flow.blocks[number].successors if (number, s) not in gone]
    return {index for number in flow.reachable - seen for index in flow.blocks[number].instructions}


def synchronizes(instruction: PtxInstruction) -> bool:
    """Return whether lanes may wait for each other at an instruction, or in a function that it calls."""
    if instruction.opcode == "call":
        return callee(instruction) not in SYSTEM_FUNCTIONS
    return facts(instruction).waits == "lanes"


def _falls_into(plan: ExitPlan, flow: Flow, label: int) -> bool:
    """Return whether control can reach a label from the statement before it."""
    for index in range(label - 1, -1, -1):
        statement = flow.body[index]
        if index in plan.direct_exits:
            return plan.direct_exits[index][1]
        if isinstance(statement, PtxInstruction):
            return statement.predicate is not None or not facts(statement).ends
        if isinstance(statement, Label) and index in flow.leaders:
            return True
    return True

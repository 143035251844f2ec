"""Rewrite the body of one function: accumulators, probes, exits, calls, and access to module variables through the address table."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpubpf.ebpf.bytecode import (
    ARGUMENTS,
    COMPARES,
    FLOAT_OPERATIONS,
    OPERANDS,
    REGIONS,
    RETURNS,
    SWAPS,
    TYPES,
    WORK,
)
from gpubpf.ebpf.probe import Probe
from gpubpf.errors import Refusal
from gpubpf.lower.fragment import KEPT_NUMBER
from gpubpf.lower.numbers import global_warp
from gpubpf.ptx.access import Access, accesses, unaddressed_accesses
from gpubpf.ptx.barriers import Barrier, barrier
from gpubpf.ptx.carry import KEPT, kept, live_carry
from gpubpf.ptx.causes import Causes
from gpubpf.ptx.congruence import common_bits
from gpubpf.ptx.emit import RETURNED, accumulator, add, around, array, counts, guard, marked, text, widened
from gpubpf.ptx.flow import Flow, callee, find_names
from gpubpf.ptx.indirect import Entry, IndirectCall, direct, indirect_calls
from gpubpf.ptx.loops import Loops
from gpubpf.ptx.module import (
    Address,
    Close,
    Directive,
    Function,
    Group,
    Immediate,
    Label,
    Name,
    Not,
    Open,
    Operand,
    Pair,
    PtxInstruction,
    Statement,
    Variable,
    Vector,
    type_size,
)
from gpubpf.ptx.opcodes import LEAVING, counted, facts
from gpubpf.ptx.regions import Regions
from gpubpf.ptx.source import source_lines
from gpubpf.ptx.symbols import GRIDS, LAUNCH, TABLE
from gpubpf.record import replace

from .alike import Alike, step_of
from .arguments import argument, returned
from .computation import Element, computation, is_chosen
from .contraction import products_before
from .cost import ADDED, SKIPPED, TALLY, lengths, tallied
from .deferral import (
    COUNT,
    MOST_CHECKED,
    MOST_SITES,
    NONE,
    ROOM,
    CheckedAccess,
    DeferredGroup,
    DeferredSite,
    stored,
)
from .device_launches import launched_name, launches_grid
from .exits import plan_exits
from .number_types import INTEGER, number_types
from .operands import Operands, operands
from .plan import PASSED_WORK, InjectionPlan, Role
from .probe_text import (
    AGAIN,
    AT,
    BYTES,
    DIVIDING,
    GLOBAL_WARP,
    LAUNCH_ID,
    SEEING_RESULTS,
    Filler,
    effect,
    identifies_warp,
    in_rows,
    shard_register,
    wants,
)
from .sampling import GROUP, SKIPS, choice, units
from .tables import SiteTable, VariableTable
from .values import WAYS_OUT, PtxProbe, Site
from .words import word

_GONE = "%gpubpf_0gone"  # a predicate: the thread leaves the kernel
_PARTING = "%gpubpf_0parting"  # the active lanes at a branch where some lanes may leave the kernel
_HELD = "%gpubpf_0held"  # a copy of the predicate of an instruction that overwrites it
_WAITED = "%gpubpf_0waited"  # at a barrier: the time of arrival, then the time waited
_NUMBER, _THREADS = "%gpubpf_0number", "%gpubpf_0threads"  # copies of a barrier's operands
_DATA = ("global", "shared", "local", "const")  # spaces of variables whose addresses programs can see
_KEPT = "%gpubpf_0kept"  # a copy of the address of an instruction with a value
_DIFFERS = "%gpubpf_0differs"  # a predicate: a call through a register goes to another function
# Context fields → the registers that hold them: the value, and for an atomic the old value in memory.
_VALUE = {"low": "%gpubpf_0value0", "high": "%gpubpf_0value1"}
_OLD = {"old_low": "%gpubpf_0old0", "old_high": "%gpubpf_0old1"}
# Likewise for the context at a function's exit: the function's result.
_RESULT = {"low": "%gpubpf_0result0", "high": "%gpubpf_0result1"}

_AXES, _COLOURS = "xyzw", "rgba"  # the elements of vector registers have two names each


class Body:
    """Rewrites the body of one function."""

    def __init__(
        self,
        plan: InjectionPlan,
        sites: SiteTable,
        variables: VariableTable,
        function: Function,
        variant: int,
        probes: tuple[PtxProbe, ...],
    ) -> None:
        """Prepare one variant of a function (see `InjectionPlan`). Adds the sites and variables that it needs to the tables."""
        self.plan = plan
        self.site_table = sites
        self.variables = variables
        self.function = function
        self.variant = variant
        self.entry = function.kind == "entry"
        self.name = function.name if self.entry else plan.new_name(function.name, variant)
        self.role = None if self.entry else plan.role(function.name, variant)
        if self.role is not None and not self.role.block:  # nothing in it is probed
            probes = ()
        self.filler = plan.filler(function.name)
        self.probes = probes
        self.has_launch_block = self.entry or (self.role is not None and self.role.block)
        self.sampled = units([[p for p in probes if p.checks_choice]]) if self.has_launch_block else ()

        def at(*points: str) -> tuple[PtxProbe, ...]:
            return tuple(p for p in probes if p.point in points)

        self.at_entry = (
            at("entry", "block_begin") if self.entry else plan.called(at("function_entry"), function)
        )
        self.counts = [kind for kind in (ADDED, SKIPPED) if kind in plan.work]
        self.tally: tuple[Statement, ...] = (TALLY,) if self.counts else ()
        self.at_return = () if self.entry else plan.called(at("function_exit"), function)
        # The fields of the function's result that programs read.
        self.results = [f for f in _RESULT if function.returns and self.filler.reads_any(self.at_return, f)]
        self.at_exit = at(*WAYS_OUT) if self.entry or (self.role is not None and self.role.leaving) else ()
        self.at_arrive, self.at_leave = at("barrier_arrive"), at("barrier_leave")
        self.at_access, self.at_value = at("access"), at("value")
        self.at_result = at(*SEEING_RESULTS)
        self.whole_loads: set[int] = set()  # loads whose whole value programs read
        self.at_block, self.at_branch = at("basic_block"), at("branch")
        self.flow = Flow(function.body or (), plan.may_leave)
        self.carry = live_carry(self.flow)
        self.products = products_before(self.flow, self.carry) if at(*DIVIDING) and not self.at_result else {}
        self.later = {index for products in self.products.values() for index in products}
        self.signature = {v.name for v in (*function.parameters, *function.returns)}
        self.addresses = 0
        self.alike = Alike(plan.moves_alike)
        # Deferred accesses: their statements, the groups so far, and places whose text depends on all groups.
        self.modulus = min((p.alike for p in self.at_access if p.keeps), default=0)
        may = plan.deferred(function.name, self.modulus) if self.modulus and self.entry else NONE
        self.proven, self.checked = may.proven, may.checked
        self.deferred = self.proven | self.checked
        self.comparing: list[CheckedAccess] = []
        self.at_again = at(AGAIN)
        self.groups: list[DeferredGroup] = []
        self.heads: list[tuple[Directive, DeferredGroup]] = []
        self.flushes: list[Directive] = []
        self.begin = text("")
        # Statements are identified by their index in the body.
        self.before: dict[int, list[Statement]] = {}  # what `_before` adds to every copy alike
        self.first = {block.instructions[0] for block in self.flow.blocks}
        # Basic blocks with programs: their first instructions, and their numbers.
        entered = [block.instructions[0] for block in self.flow.blocks if block.entered]
        self.blocks = {first: n for n, first in enumerate(entered)} if self.at_block else {}
        self.parts: dict[
            int, list[int]
        ] = {}  # the numbers of the parts of each basic block, by its first instruction
        for number, block in enumerate(self.flow.blocks):
            if block.entered:
                whole = self.parts.setdefault(block.instructions[0], [])
            whole.append(number)
        self.widened_results: dict[int, Variable] = {}  # declarations of call results that are replaced
        self.indirect = indirect_calls(self.flow.body)
        self.sources = source_lines(self.flow.body, sites.files)
        probed = bool(self.at_exit or self.deferred)
        leaving = frozenset() if not probed else LEAVING if self.entry else frozenset({"exit"})
        # The opcodes that get a probe before them.
        self.probed_opcodes = leaving | ({"ret"} if self.at_return else set())
        reads = {word for p in self.at_exit for word in ("%globaltimer", "%clock") if word in p.program.ptx}
        self.ordered = "%clock" in reads  # lanes that leave read it before others continue
        # If basic blocks are probed, the copies of a block that only leads to an exit are probed too.
        copied = self.probed_opcodes | (LEAVING if self.at_block else set())
        if self.at_block:
            leaving = LEAVING if self.entry else frozenset({"exit"})
        self.exits = plan_exits(
            self.flow,
            copied,
            leaving,
            self.has_launch_block and bool(plan.block.bases),
            bool(reads),
            self.ordered,
        )
        self.labels = self.exits.copied
        self.added_registers: dict[str, str] = {}  # added registers that outlive a scope: name → type
        self.has_vectors = any(isinstance(s, Variable) and _is_vector(s) for s in self.flow.body)

    @functools.cached_property
    def common_bits(self) -> dict[str, int]:
        return common_bits(self.function, self.plan.module.variables)

    def rewrite(self) -> tuple[Statement, ...]:
        """Return the statements of the new body. Raises Refusal, PtxError."""
        body = self.flow.body
        self._plan_counts()
        self._plan_branches()
        for index, instruction in self.flow.instructions() if self.deferred else ():
            if instruction.opcode == "trap":
                self.before.setdefault(index, []).extend(self._flush(_guards(instruction)))
        start = next(
            (i for i, s in enumerate(body) if isinstance(s, PtxInstruction | Label | Open)), len(body)
        )
        out: list[Statement] = []
        end = 0  # the statement after a call through a register
        for index in range(len(body) + 1):
            if index == start:
                out += self._prologue()
            if index == len(body):
                break
            if index in self.indirect and self.indirect[index].call not in self.exits.unreachable:
                out += self._indirect_call(self.indirect[index])
                end = self.indirect[index].end + 1
                self.alike.enter()
            if index < end:
                continue
            statement = body[index]
            if index in self.first or isinstance(statement, Label | Open | Close):
                self.alike.enter()
            if index not in self.exits.unreachable:
                added = self._with_added(index)
                if added and out and _for_the_next(out[-1]) and isinstance(statement, PtxInstruction):
                    pragma = out.pop()
                    own = [at for at, s in enumerate(added) if isinstance(s, PtxInstruction)][-1:]
                    if index not in self.whole_loads:
                        added.insert(own[0] if own else 0, pragma)
                out += added
            if isinstance(statement, PtxInstruction):
                self.alike.overwrite(statement)
            for label, path, source in self.exits.copies.get(index, ()):
                out += self._copy(label, path, source)
        if self.flow.falls_off:
            out += self._end()
        out = self._with_groups(out)
        if self.tally:
            out = tallied(out, lengths(self.plan.programs), self.counts)
        # Every function declares the accumulators, even one that returns no work: ptxas drops what nothing reads.
        head: list[Statement] = [text(f".reg .b64 {accumulator(kind)};") for kind in self.plan.work]
        if self.exits.direct_exits:
            head.append(text(f".reg .pred {_GONE};"))
        head += [text(f".reg .{kind} {name};") for name, kind in self.added_registers.items()]
        if self.addresses:
            head.append(Variable("reg", "b64", "%gpubpf_0address", count=self.addresses))
        # Rewriting a call decides the size of its result. By then, the result's declaration has been emitted.
        wide = {id(body[index]): declaration for index, declaration in self.widened_results.items()}
        return tuple(marked(head + [wide.get(id(s), s) for s in out]))

    def _with_added(self, index: int) -> list[Statement]:
        """Return a statement, and the statements added before and after it."""
        now = [*self.products.get(index, ()), index] if index not in self.later else []
        emitted = [statement for number in now for statement in self._emit(number)]
        return self._keep_carry(index, [*self._before(index), *emitted])

    def _keep_carry(self, index: int, statements: list[Statement]) -> list[Statement]:
        """Return an instruction and the statements added around it, wrapped so that they preserve a carry that is live there.

        Copied exits do not need this: no instruction in them reads the carry (`Flow.tail`).
        """
        if index not in self.carry.before and index not in self.carry.after:
            return statements
        self._added(KEPT, "b32")
        own = (n for n, s in enumerate(statements) if isinstance(s, PtxInstruction))
        at = next(own, len(statements))
        before, after = statements[:at], statements[at + 1 :]
        return [
            *(kept(before) if before and index in self.carry.before else before),
            *statements[at : at + 1],
            *(kept(after) if after and index in self.carry.after else after),
        ]

    # accumulators

    def _plan_counts(self) -> None:
        """Plan the additions that count work: for each kind, one before the first instruction of a basic block.

        A predicated instruction that also counts as another kind, such as a load, gets an addition of its own.
        """
        for block in self.flow.blocks if self.plan.work else ():
            total = dict.fromkeys((*WORK, ADDED, SKIPPED), 0)
            total["instructions"] = len(block.instructions)
            total["blocks"] = int(block.entered)
            for index in block.instructions:
                instruction = self.flow.instruction(index)
                for kind in counted(instruction):
                    if instruction.predicate is None:
                        total[kind] += 1
                    elif kind in self.plan.work:
                        self.before.setdefault(index, []).append(text(f"{guard(instruction)}{add(kind, 1)}"))
            adds = [text(add(kind, total[kind])) for kind in self.plan.work if total[kind]]
            first = block.instructions[0]
            self.before[first] = adds + self.before.get(first, [])

    def _before(self, index: int) -> list[Statement]:
        """Return the statements added before an instruction: programs at the basic block that it begins, counts, programs at branches.

        Each copy of a block has a site of its own, so that ptxas does not merge them.
        """
        blocks: list[Statement] = [*self.tally] if index in self.first else []
        if index in self.blocks and (probes := self._at_block(index)):
            line, number = self.flow.body[index].line, self.blocks[index]
            ends = self.loops.ends.get(index, "") if any(p.loops for p in probes) else ""
            site = self._site("basic_block", line, self.sources[index], block=number, ends=ends)
            fields = {"site": site} | self._of_block(index)
            blocks += (text(self.filler.basic_block(p, fields)) for p in probes)
        return blocks + self.before.get(index, [])

    def _plan_branches(self) -> None:
        """Plan the programs before each conditional branch."""
        for index, branch in self.flow.instructions() if self.at_branch else ():
            if facts(branch).parts and branch.predicate is not None:
                details, context = self._of_branch(index)
                source = self.sources[index]
                site = self._site("branch", branch.line, source, opcode=branch.full_name, **details)
                condition = f"{'!' if branch.negated else ''}{branch.predicate}"
                fields = {"site": site} | context
                self.before.setdefault(index, []).extend(
                    text(self.filler.branch(p, fields, condition)) for p in self.at_branch
                )

    def _at_block(self, first: int) -> list[PtxProbe]:
        """Return the probes at the basic block whose first statement is `first`."""
        return [p for p in self.at_block if not p.loops or first in self.loops.heads(p.loops)]

    @property
    def loops(self) -> Loops:
        return self.plan.loops(self.function.name)

    @functools.cached_property
    def regions(self) -> Regions:
        return Regions(self.flow, REGIONS, self.plan.first_region(self.function.name), not self.entry)

    def _of_block(self, first: int) -> dict[str, int]:
        """Return the fields of the context at the basic block whose first statement is `first`, except its site."""
        fields = {"instructions": sum(len(self.flow.blocks[n].instructions) for n in self.parts[first])}
        if self.filler.reads_any(self.at_block, "regions"):
            fields["regions"] = self.regions.inside[self.parts[first][0]]
        return fields

    @functools.cached_property
    def causes(self) -> Causes:
        return Causes(self.flow, self.entry)

    def _of_branch(self, index: int) -> tuple[dict[str, Any], dict[str, int]]:
        """Return further fields of a branch's `Site`, and the fields of its context, except its site and its lanes."""
        if not self.filler.reads_any(self.at_branch, "region"):
            return {}, {}
        details = {"cause": self.causes.of(index), "loop": self.regions.leaves_loop(index)}
        return details, {"region": self.regions.numbers.get(index, REGIONS)}

    def _prologue(self) -> list[Statement]:
        out: list[Statement] = []
        for unit in self.sampled:
            self._added(SKIPS, "pred")
            self._added(GROUP, "b32")
            chosen = Probe(choice(unit, counts=self.entry), "entry")
            out.append(text(self.filler.text(chosen, {})))
        if self.exits.direct_exits:
            out.append(self._set_gone("eq"))
        for position, kind in enumerate(self.plan.work):
            if self.role is not None and self.role.leaving:
                out.append(text(f"ld.param.b64 {accumulator(kind)}, [{PASSED_WORK}+{8 * position}];"))
            else:
                out.append(text(f"mov.b64 {accumulator(kind)}, 0;"))
        out += [self.begin] if self.deferred else []
        out += self.tally
        out += [text(f"mov.b64 {self._added(_RESULT[field])}, 0;") for field in self.results]
        if self.has_launch_block:
            out += self._shards()
            out += self._identity()
        here = next((place for place in self.sources if place != (0, 0)), (0, 0))
        return out + self._probes(self.at_entry, self.function.line, here)

    def _identity(self) -> list[Statement]:
        """Return code that sets GLOBAL_WARP and LAUNCH_ID, if a program in this function reads the number of the warp."""
        if not any(identifies_warp(p) and self._has(p) for p in self.probes):
            return []
        launch, more = self.filler.block.launch_id, self.filler.block.replay
        id_, warp = self._added(LAUNCH_ID), global_warp(self._added(GLOBAL_WARP, "b32"))
        lines = [
            "{",
            ".reg .b64 %gpubpf_0replay, %gpubpf_0more;",
            ".reg .pred %gpubpf_0again;",
            f"ld.param.u64 {id_}, [{LAUNCH}+{launch}];",
            f"ld.param.u64 %gpubpf_0replay, [{LAUNCH}+{more}];",
            "setp.ne.b64 %gpubpf_0again, %gpubpf_0replay, 0;",
            "mov.b64 %gpubpf_0more, 0;",
            "@%gpubpf_0again ld.global.nc.b64 %gpubpf_0more, [%gpubpf_0replay];",
            f"add.s64 {id_}, {id_}, %gpubpf_0more;",
            "}",
        ]
        return [text("\n".join([warp, *lines]))]

    def _has(self, probe: PtxProbe) -> bool:
        """Return whether this function may run the program."""
        return (
            probe in self.at_entry or probe in self.at_exit or self.plan.places(self.function.name, probe) > 0
        )

    def _shards(self) -> list[Statement]:
        """Return statements that set the registers with the arguments of kind `shard` for probes at FREQUENT points."""
        often = (*self.at_access, *self.at_value, *self.at_block, *self.at_branch, *self.at_result)
        needed = {
            shard_register(a, p): (a, p) for p in often for a in p.program.arguments if a.kind == "shard"
        }
        return [text(self.filler.shard(a, p, self._added(register))) for register, (a, p) in needed.items()]

    # exits

    def _copy(self, label: str, path: tuple[int, ...], source: int) -> list[Statement]:
        """Return a copy of the instructions up to an exit, to which only the branch `source` leads."""
        copy: list[Statement] = [Label(label)]
        for index in path:
            copy += self._before(index)
            if index == path[-1]:
                copy += self._leave(index, source)
            elif self.flow.instruction(index).opcode == "bra":
                copy += counts(1)
            else:
                copy += self._computing(index)
        return copy

    def _set_gone(self, comparison: str) -> Directive:
        """Return code that sets the predicate "this thread leaves" to false (`eq`) or true (`ne`), and hides the value from ptxas.

        The comparison is with a map's address, which is never 0. If ptxas knew the predicate's value, it would split the loop, and
        lanes would wait for each other again.
        """
        offset = next(iter(self.plan.block.bases.values()))
        return text(
            f"{{ .reg .b64 %gpubpf_base; ld.param.u64 %gpubpf_base, [{LAUNCH}+{offset}];"
            f" setp.{comparison}.u64 {_GONE}, %gpubpf_base, 0; }}"
        )

    def _leave_directly(self, index: int) -> list[Statement]:
        """Return the replacement for a branch of `ExitPlan.direct_exits`: the probe, which threads that stay skip, then the exit."""
        branch = self.flow.instruction(index)
        path, taken = self.exits.direct_exits[index]
        stay = self._label("stay")
        negated = branch.negated != taken  # threads that stay skip the probe
        around = PtxInstruction("bra", (), (Name(stay),), branch.predicate, negated)
        alone = path == (index,)  # a predicated `exit`, without a branch
        out: list[Statement] = []
        if self.ordered:
            out.append(text(f"activemask.b32 {self._added(_PARTING, 'b32')};"))
        out += [*counts(1), text(str(around))] if alone else [around]
        out += self.tally
        for step in path:
            if step != index:
                out += self._before(step)
            if step != path[-1] and self.flow.instruction(step).opcode == "bra":
                out += counts(1) if step != index else []
            elif step != path[-1]:
                out += self._computing(step)
        if not alone:
            out += counts(1)
        out += [*self._flush(), *self._probes(self.at_exit, branch.line, self.sources[index])]
        out += [self._set_gone("ne"), Label(stay), *self.tally]
        if self.ordered:
            out.append(text(f"bar.warp.sync {_PARTING};"))
        out.append(text(f"@{_GONE} exit;"))
        if not taken:
            out.append(text(f"bra {branch.operands[0]};"))
        return out

    def _site(self, point: str, line: int, source: tuple[int, int], **details: Any) -> int:
        """Return the number of a new site. `details`: further fields of `Site`."""
        site = Site(0, self.function.name, line, point=point, **details)
        return self.site_table.add(self.name, site, source)

    def _leave(self, index: int, source: int | None = None) -> list[Statement]:
        """Return a `ret` or `exit` with its probes and counts. `source`: the branch that leads to it, if there is exactly one."""
        instruction = self.flow.instruction(index)
        returns = instruction.opcode == "ret" and not self.entry
        if instruction.opcode in self.probed_opcodes:
            if source is None and len(arrivals := self.exits.arrivals.get(index, [])) == 1:
                source = arrivals[0]
            place = index if source is None else source
            line = self.flow.body[place].line
            probes = self._probes(self.at_return if returns else self.at_exit, line, self.sources[place])
            going = replace(instruction, predicate=None, negated=False)
            # Count the instruction before the probe, so that a probe that reads the virtual clock sees when the thread ends.
            flush = () if returns else self._flush()
            leave = [*counts(1), *flush, *probes, *(self._return_work() if returns else ()), text(str(going))]
            if instruction.predicate is None:
                return leave
            over = self._label("stay")
            skipped = [text(around(instruction, over)), *self.tally, *leave, Label(over), *self.tally]
            return [*skipped, *counts(1)]
        if returns:
            return [*self._return_work(guard(instruction)), instruction]
        return [instruction]

    def _return_work(self, condition: str = "") -> list[Statement]:
        if self.role is None or not self.role.returns_work:
            return []
        result = self.function.returns[0].name if self.function.returns else RETURNED
        return [
            text(f"{condition}st.param.b64 [{result}+{self.role.work_offset + 8 * k}], {accumulator(kind)};")
            for k, kind in enumerate(self.plan.work)
        ]

    def _end(self) -> list[Statement]:
        """Return the end of a body that does not end with `ret`: probes, returned work and a `ret`."""
        here = self.sources[-1] if self.sources else (0, 0)
        probes = self._probes(self.at_exit if self.entry else self.at_return, self.function.line, here)
        return [*self._flush(), *probes, *(() if self.entry else self._return_work()), text("ret;")]

    def _label(self, what: str) -> str:
        self.labels += 1
        return f"$gpubpf_{what}_{self.labels}"

    # probes

    def _probes(self, probes: Iterable[PtxProbe], line: int, source: tuple[int, int]) -> list[Statement]:
        """Return the programs at an entry or exit. Each point has its own site."""
        sites: dict[str, int] = {}
        found: list[Statement] = []
        for probe in probes:
            if probe.point not in sites:
                sites[probe.point] = self._site(probe.point, line, source)
            counted_work = probe.accumulate if probe.point == "exit" else None
            work = accumulator(counted_work) if counted_work else "0"
            context = {"site": str(sites[probe.point]), "work": work}
            if self.tally:
                context |= {"own": accumulator("instructions")}
                context |= {kind: accumulator(kind) for kind in self.counts}
            context |= {field: _RESULT[field] if field in self.results else "0" for field in _RESULT}
            arguments = self._arguments(probe, context)
            found.append(text(self.filler.scope(probe, [*arguments, self.filler.text(probe, context)])))
        return found

    def _arguments(self, probe: PtxProbe, context: dict[str, str]) -> list[str]:
        """Return instructions that load the function arguments that a program reads, and add them to `context`."""
        parameters = self.function.parameters
        context |= {"args": str(len(parameters)), **dict.fromkeys(ARGUMENTS, "0")}
        lines: list[str] = []
        for field, parameter in zip(ARGUMENTS, parameters, strict=False):
            if self.filler.reads(probe, field):
                context[field] = f"%gpubpf_0{field}"
                lines += [f".reg .b64 {context[field]};", *argument(parameter, context[field])]
        return lines

    def _keep_result(self, index: int, instruction: PtxInstruction) -> list[Statement]:
        """Return instructions that copy what an instruction stores in the function's result, for programs at the function's exit."""
        name = self.function.returns[0].name if self.results else ""
        instruction = self._in_elements(index, instruction)
        lines: list[str] = []
        part = "%gpubpf_0part"
        for offset, of in returned(instruction, name) if self._declaration(index, name) is None else ():
            for half, field in enumerate(_RESULT):
                at = offset - 8 * half  # the element's offset in this word
                if field not in self.results or not (0 <= at < 8 or (of.size == 16 and at == -8)):
                    continue
                lines += self._word(index, of, of.given, -at // 8 if at < 0 else 0, part)
                hole = ~(((1 << min(8 * of.size, 64)) - 1) << 8 * max(at, 0)) & (2**64 - 1)
                lines += [f"shl.b64 {part}, {part}, {8 * at};"] if at > 0 else []
                condition = guard(instruction)
                lines.append(f"{condition}and.b64 {_RESULT[field]}, {_RESULT[field]}, {hole};")
                lines.append(f"{condition}or.b64 {_RESULT[field]}, {_RESULT[field]}, {part};")
        return [text("\n".join(["{", f".reg .b64 {part};", *lines, "}"]))] if lines else []

    def _accesses(self, index: int, instruction: PtxInstruction) -> list[Statement]:
        """Return the probes before an instruction that accesses memory, with one scope per access."""
        found: list[Statement] = []
        for access in self._accessed(index) if self.at_access else ():
            probes = [p for p in self.at_access if wants(p, access)]
            if not probes:
                continue
            guards = _guards(instruction)
            if access.unless is not None:
                negated = isinstance(access.unless, Not)
                name = access.unless.operand if isinstance(access.unless, Not) else access.unless
                guards.append(f"@{'!' if negated else ''}{name.name} ")
            modulus = math.lcm(*(p.alike for p in probes if not p.repeats))
            like = None
            if modulus:
                like = self.alike.find(instruction, access, step_of(access, self.common_bits, modulus))
            site = self._access_site("access", index, access, like=like)
            if modulus and like is None:
                self.alike.add(instruction, access, site)
            keeping = [p for p in probes if p.keeps]
            room = bool(keeping) and like is None and len(self.kept_sites) < MOST_SITES
            if room and index in self.proven:
                found += self._defer(index, access, site, keeping, guards)
                probes = [p for p in probes if p.repeats]
            elif room and index in self.checked and len(self.comparing) < MOST_CHECKED:
                found += self._compare(index, access, site, probes, guards)
                continue
            else:
                probes = [p for p in probes if p.repeats == (like is not None) and not p.keeps]
            if not probes:
                continue
            size = self._to_64_bits(index, access.size, BYTES) if access.size is not None else ()
            where = self._to_64_bits(index, access.address, AT)
            if access.rows is not None:
                where += in_rows(access.rows, access.width)
            found.append(text(self.filler.access(probes, access, site, guards, where, size)))
        return found

    # deferred accesses

    def _defer(
        self, index: int, access: Access, site: int, probes: Sequence[PtxProbe], guards: Sequence[str]
    ) -> list[Statement]:
        """Return the probes of an access whose executions a register counts (deferral.py)."""
        instruction = self.flow.instruction(index)
        key = instruction.predicate, instruction.negated
        group = self.alike.groups.get(key)
        out: list[Statement] = []
        if group is None:
            skips = [f"@{SKIPS} "] if any(p.checks_choice for p in probes) else []
            group = self.alike.groups[key] = DeferredGroup(len(self.groups), (*skips, *guards))
            self.groups.append(group)
            for register, kind in group.registers.items():
                self._added(register, kind)
            self.heads.append((text(""), group))
            out.append(self.heads[-1][0])
        made = DeferredSite(site, access, len(self.kept_sites))
        group.sites.append(made)
        where = self._to_64_bits(index, access.address, AT)
        some = (*guards, f"@!{group.fresh} ")
        return [*out, text(self.filler.access(probes, access, site, some, where, kept=stored(made)))]

    def _compare(
        self, index: int, access: Access, site: int, probes: Sequence[PtxProbe], guards: Sequence[str]
    ) -> list[Statement]:
        """Return the probes of an access whose executions compare addresses (deferral.py)."""
        made = CheckedAccess(len(self.comparing), DeferredSite(site, access, len(self.kept_sites)))
        self.comparing.append(made)
        for register, kind in made.registers.items():
            self._added(register, kind)
        skips = [f"@{SKIPS} "] if any(p.checks_choice for p in probes) else []
        where = self._to_64_bits(index, access.address, AT)

        def run(filler: Filler, some: Sequence[PtxProbe], stores: str = "") -> str:
            some = [replace(p, unconditional=True) for p in some]
            return filler.access(some, access, site, (), where, kept=stores) if some else ""

        keep = run(self.filler, [p for p in probes if p.keeps], stored(made.site))
        # Most executions count, so the other programs are not worth much text.
        ordinary = run(self.plan.caller, [p for p in probes if not p.keeps and not p.repeats])
        marks = run(self.filler, [p for p in probes if p.repeats])
        return [text(made.text((*skips, *guards), where, keep, ordinary, marks, self._again, self.modulus))]

    @property
    def kept_sites(self) -> list[DeferredSite]:
        in_groups = [site for group in self.groups for site in group.sites]
        return [*in_groups, *(one.site for one in self.comparing)]

    def _flush(self, guards: Sequence[str] = ()) -> list[Statement]:
        """Return the place of the text that adds the executions of all groups. guards: of lanes that do not execute the text."""
        if not self.deferred:
            return []
        self.flushes.append(text("\n".join(f"{one}bra $gpubpf_stays;" for one in guards)))
        return [self.flushes[-1]]

    def _again(self, site: DeferredSite) -> str:
        """Return the programs for executions of an access. COUNT and KEPT_NUMBER have the number of executions, and what was kept."""
        context = {
            "site": str(site.site),
            "width": str(site.access.width),
            "kept": KEPT_NUMBER,
            "count": COUNT,
        }
        return "\n".join(self.filler.text(p, context) for p in self.at_again if wants(p, site.access))

    def _with_groups(self, statements: list[Statement]) -> list[Statement]:
        """Return the statements with the texts that depend on all groups, and the groups' registers and room."""
        if not self.deferred:
            return statements
        remarks = self.filler.remarks
        made = {id(place): text(group.head(self._again, remarks)) for place, group in self.heads}
        flush = [group.flush(self._again) for group in self.groups]
        flush += [access.flush(self._again) for access in self.comparing]
        for place in self.flushes:
            lines = ["{", place.text, *flush, *(["$gpubpf_stays:"] if place.text else []), "}"]
            made[id(place)] = text("\n".join(line for line in lines if line))
        zero = [f"mov.b32 {register}, 0;" for g in self.groups for register in (g.mask, g.turns)]
        for one in self.comparing:
            zero += [f"mov.b32 {one.turns}, -1;", f"mov.b64 {one.first}, 0;", f"mov.b32 {one.modulus}, 0;"]
        made[id(self.begin)] = text("\n".join(zero))
        room = Variable("local", "b64", ROOM, dimensions=(len(self.kept_sites),))
        if not self.kept_sites:
            return [s for s in statements if id(s) not in made]
        return [room, *(made.get(id(s), s) for s in statements)]

    def _accessed(self, index: int) -> tuple[Access, ...]:
        """Return the accesses of an instruction."""
        instruction = self.flow.instruction(index)
        if unaddressed := unaddressed_accesses(instruction):
            return tuple(self._of_used_elements(index, access) for access in unaddressed)
        return accesses(
            instruction,
            lambda name: self._type(index, name) == "pred",
            lambda name: self._space(index, name),
        )

    def _of_used_elements(self, index: int, access: Access) -> Access:
        """Return a load from a texture or surface with the width, in bytes, of the elements that the kernel uses.

        `tex` always names four elements, also if the kernel uses fewer.
        """
        if access.space not in ("texture", "surface"):
            return access
        found = computation(self._in_elements(index, self.flow.instruction(index)))
        if access.kind != "load" or found is None or not found.written:
            return access
        used = sum(isinstance(o, Name) and o.name != "_" and self.mentions[o.name] > 1 for o in found.written)
        return replace(access, width=access.width * used // len(found.written) or access.width)

    def _access_site(
        self,
        point: str,
        index: int,
        access: Access,
        more: int = 0,
        type_: str = "",
        like: int | None = None,
    ) -> int:
        """Return the number of a new site of an access.

        more: bits to add to the access's effect
        type_, like: as in `Site`
        """
        instruction = self.flow.instruction(index)
        return self._site(
            point,
            instruction.line,
            self.sources[index],
            opcode=instruction.full_name,
            kind=access.kind,
            space=access.space,
            width=access.width,
            effect=effect(access) | more,
            like=like,
            type=type_,
        )

    def _values(self, index: int, instruction: PtxInstruction) -> tuple[list[Statement], list[Statement]]:
        """Return the statements added before and after an instruction for programs that see its value.

        A store's programs run before it, those of loads and atomics after it. A load or atomic may overwrite the registers that it
        reads, so these are copied before it. ptxas keeps a copy only if the register is overwritten.
        """
        found = operands(self._in_elements(index, instruction)) if self.at_value else None
        if found is None:
            return [], []
        (access,) = self._accessed(index)
        probes = [
            p for p in self.at_value if wants(p, access) and not (p.loops and index not in self.loops.polled)
        ]
        if not probes:
            return [], []
        # ptxas turns an atomic whose result is unused into a reduction. Reading the result would prevent that.
        old = [o for o in found.read if access.kind == "atomic" and isinstance(o, Name) and o.name != "_"]
        returns = RETURNS if any(self.mentions[o.name] > 1 for o in old) else 0
        swaps = SWAPS if "exch" in instruction.modifiers else COMPARES if found.compared else 0
        type_ = self._value_type(found)
        site = self._access_site("value", index, access, returns | swaps, type_)
        context = {"type": str(TYPES.index(type_)), "effect": str(effect(access) | returns | swaps)}
        before: list[str] = []
        inside: list[str] = []  # lines in the scope of the programs
        for registers, elements, lines in (
            (_VALUE, found.given or found.read, before if access.kind == "atomic" else inside),
            (_OLD, found.read if returns else (), inside),
        ):
            for half, (field, register) in enumerate(registers.items()):
                context[field] = "0"
                if len(elements) * found.size > 8 * half and self.filler.reads_any(probes, field):
                    context[field] = self._added(register)
                    lines += self._word(index, found, elements, half, register)
        if found.compared and self.filler.reads_any(probes, "high"):
            context["high"] = self._added(_VALUE["high"])
            before += self._word(index, found, found.compared, 0, _VALUE["high"])
        where = self._to_64_bits(index, access.address, AT)
        if access.kind != "store" and (access.space == "generic" or self.filler.reads_any(probes, "address")):
            before += ["{", *self._to_64_bits(index, access.address, self._added(_KEPT)), "}"]
            where = [f"mov.b64 {AT}, {_KEPT};"]
        if access.kind == "load" and self.filler.reads_any(probes, *_VALUE):
            self.whole_loads.add(index)
        guards = _guards(instruction)
        probe = text(self.filler.access(probes, access, site, guards, where, (), context, inside))
        copies = [text("\n".join(before))] if before else []
        return ([*copies, probe], []) if access.kind == "store" else ([*copies], [probe])

    def _results(self, index: int, instruction: PtxInstruction) -> tuple[list[Statement], list[Statement]]:
        """Return the statements added before and after an instruction for programs that see what it reads and writes.

        The registers that it reads are copied before it, as in `_values`. A result has one site per 16 bytes.
        """
        found = computation(self._in_elements(index, instruction))
        before: list[str] = []
        after: list[Statement] = []
        for point in dict.fromkeys(p.point for p in self.at_result) if found is not None else ():
            assert found is not None
            opcode = instruction.full_name
            probes = [p for p in self.at_result if p.point == point and is_chosen(p.opcodes, opcode)]
            if not probes or not (found.operation or point == "instruction"):
                continue
            context = {
                "type": str(TYPES.index(found.type)),
                "operand_type": str(TYPES.index(found.operand_type)),
                "operands": str(len(found.read)),
                **dict.fromkeys((*OPERANDS, *_VALUE), "0"),
            }
            if point == "float":
                context["operation"] = str(FLOAT_OPERATIONS.index(found.operation))
            for field, read in zip(OPERANDS, found.read, strict=False):
                if self.filler.reads_any(probes, field):
                    context[field] = self._added(f"%gpubpf_0{field}")
                    before += self._bits(index, read, found.operand_type, 0, context[field])
            if instruction.predicate in tuple(find_names(found.written)):
                before.append(f"mov.pred {self._added(_HELD, 'pred')}, {instruction.predicate};")
                instruction = replace(instruction, predicate=_HELD)
            size = self._size(index, found.written, found.type)
            for start in range(0, max(1, len(found.written)), 16 // size):
                part = found.written[start : start + 16 // size]
                site = self._site(
                    point, instruction.line, self.sources[index], opcode=opcode, type=found.type
                )
                inside: list[str] = []
                for half, (field, register) in enumerate(_VALUE.items()):
                    context[field] = "0"
                    if len(part) * size > 8 * half and self.filler.reads_any(probes, field):
                        context[field] = self._added(register)
                        inside += self._bits(index, part, found.type, half, register)
                context["site"] = str(site)
                after.append(text(self.filler.result(probes, _guards(instruction), inside, context)))
        return [text("\n".join(before))] if before else [], after

    def _size(self, index: int, elements: Iterable[Element], type_: str) -> int:
        """Return the size in bytes of each of these registers and numbers.

        type_: the instruction's type, which gives the size of numbers
        """
        names = [_named(element) for element in elements if element != Name("_")]
        kinds = [kind for name in names if name and (kind := self._type(index, name))]
        return type_size(kinds[0]) if kinds else 8 if any(names) else type_size(type_)

    def _bits(self, index: int, elements: tuple[Element, ...], type_: str, half: int, into: str) -> list[str]:
        """Return instructions that put 8 bytes of the values in registers into a 64-bit register. Raises Refusal.

        type_: as in `_size`. A predicate is 0 or 1. Special registers and the addresses of functions read as 0.
        """
        first = elements[0] if elements else None
        if (name := _named(first)) and self._type(index, name) == "pred":
            return [f"selp.b64 {into}, {'0, 1' if isinstance(first, Not) else '1, 0'}, {name};"]
        size = self._size(index, elements, type_)
        floats = any(isinstance(element, Immediate) and element.is_float for element in elements)
        known = []
        for element in elements:
            name = _named(element)
            is_known = not name or self._type(index, name) or self._space(index, name) in _DATA
            known.append(element if is_known and not isinstance(element, Not) else Name("_"))
        return self._word(
            index, Operands(f"{'f' if floats else 'b'}{8 * size}", size), tuple(known), half, into
        )

    def _word(
        self, index: int, of: Operands, elements: tuple[Name | Immediate, ...], half: int, into: str
    ) -> list[str]:
        """Return instructions that put 8 bytes of a value into a 64-bit register. Raises Refusal."""

        def address(name: Name, into: str) -> list[str]:
            return self._to_64_bits(index, name, into)

        return word(of, elements, half, into, lambda name: self._type(index, name), address)

    def _added(self, register: str, kind: str = "b64") -> str:
        """Declare an added register for the whole function and return it."""
        self.added_registers[register] = kind
        return register

    @functools.cached_property
    def number_types(self) -> Mapping[str, str]:
        """The types of numbers in registers that the PTX declares as bits, by register."""
        return number_types(self.flow.body)

    def _value_type(self, found: Operands) -> str:
        """Return the type of an element.

        If the access gives only bits (b16, b32) or an unsigned type (compilers move f16 as u16), other instructions that use the
        registers give the type. If these instructions do not agree, u16 becomes b16, and any other type stays.
        """
        if found.type not in ("b16", "u16", "b32", "u32"):
            return found.type
        registers = [o.name for o in (*found.given, *found.read) if isinstance(o, Name) and o.name != "_"]
        types = {self.number_types.get(name, "") for name in registers}
        type_ = types.pop() if len(types) == 1 else ""
        if type_ == INTEGER:
            return f"u{8 * found.size}"
        if type_ and type_size(type_) <= found.size:
            return type_
        return "b16" if found.type == "u16" else found.type

    @functools.cached_property
    def mentions(self) -> Counter[str]:
        """How often instructions mention each name, as an operand or predicate. A vector register counts as all of its elements."""
        found: Counter[str] = Counter()
        for index, instruction in self.flow.instructions():
            found.update(find_names(self._in_elements(index, instruction).operands))
            found.update([instruction.predicate] if instruction.predicate else [])
        return found

    def _to_64_bits(self, index: int, operand: Operand, into: str) -> list[str]:
        """Return instructions that put an address or a number, zero-extended, into the 64-bit register `into`. Raises Refusal."""
        offset = 0
        match operand:
            case Address(index=str()) if not self._is_in_table(index, operand.base or ""):
                return [f"mov.b64 {into}, {operand};"]
            case Address(index=str()):
                start = f"ld.const.b64 {into}, [{TABLE}+{self.variables.offset(operand.base or '')}];"
                return [start, self._add_element(index, operand, into)]
            case Address():
                base, offset = operand.base, operand.offset
            case Name():
                base, offset = operand.name, operand.offset
            case Immediate():
                return [f"mov.b64 {into}, {operand.integer};"]
            case _:
                raise Refusal(f"PTX line {self.flow.body[index].line}: {operand} is not an address")
        if base is None:
            return [f"mov.b64 {into}, {offset};"]
        if self._is_in_table(index, base):
            start = f"ld.const.b64 {into}, [{TABLE}+{self.variables.offset(base)}];"
        else:
            declared = self._declaration(index, base)
            if declared is not None and declared.space == "reg" and type_size(declared.type) == 4:
                if not offset:
                    return [f"cvt.u64.u32 {into}, {base};"]
                low = "%gpubpf_0low"  # the sum has 32 bits; it is zero-extended
                return [
                    f".reg .b32 {low};",
                    f"add.s32 {low}, {base}, {offset};",
                    f"cvt.u64.u32 {into}, {low};",
                ]
            start = f"mov.b64 {into}, {base};"
        return [start, f"add.s64 {into}, {into}, {offset};"] if offset else [start]

    def _add_element(self, index: int, operand: Address, to: str) -> str:
        """Return instructions that add the distance of an array's element to the array's address in a register (see `Address`)."""
        width = 8 * type_size(self._type(index, operand.index or "") or "b32")
        number = "%gpubpf_0number"
        lines = ["{", f".reg .b32 {number};", f".reg .b64 {number}64;"]
        lines.append(f"cvt.u32.u{width} {number}, {operand.index};")
        lines.append(f"mad.lo.u32 {number}, {number}, {operand.unit}, {operand.offset & (1 << 32) - 1};")
        lines += [f"cvt.u64.u32 {number}64, {number};", f"add.s64 {to}, {to}, {number}64;", "}"]
        return "\n".join(lines)

    def _declaration(self, index: int, name: str) -> Variable | None:
        """Return the declaration that a name refers to at statement `index`; None if the declaration is not in this body."""
        found = self.flow.declaration(index, name)
        statement = self.flow.body[found] if found is not None else None
        return statement if isinstance(statement, Variable) else None

    def _in_elements(self, index: int, instruction: PtxInstruction) -> PtxInstruction:
        """Return the instruction with vector registers replaced by their elements: `{%v.x, %v.y}` for `%v`, and `%v.x` for `%v.r`."""
        if not self.has_vectors:
            return instruction

        def element(name: str) -> str:
            whole, _, at = name.partition(".")
            if len(at) != 1 or at not in _COLOURS or not _is_vector(self._declaration(index, whole)):
                return name
            return f"{whole}.{_AXES[_COLOURS.index(at)]}"

        def replaced(operand: Operand) -> Operand:
            match operand:
                case Name():
                    declared = self._declaration(index, operand.name)
                    if declared is not None and _is_vector(declared):
                        return Vector(tuple(Name(f"{operand.name}.{at}") for at in _AXES[: declared.vector]))
                    return Name(element(operand.name), operand.offset)
                case Vector():
                    return Vector(tuple(map(replaced, operand.items)))
                case _:
                    return operand

        return replace(instruction, operands=tuple(map(replaced, instruction.operands)))

    def _type(self, index: int, name: str) -> str:
        """Return the PTX type of a register, or of a component of one (`%v.x`); "" if it is unknown."""
        declared = self._declaration(index, name) or self._declaration(index, name.partition(".")[0])
        return declared.type if declared is not None and declared.space == "reg" else ""

    def _space(self, index: int, name: str) -> str:
        """Return the space that a name is declared in; "" if it is unknown."""
        declared = self._declaration(index, name) or self.plan.module.variables.get(name)
        return declared.space if declared is not None else ""

    def _barrier(self, index: int, instruction: PtxInstruction) -> list[Statement]:
        """Return a barrier with the `barrier_arrive` programs before it and the `barrier_leave` programs after it."""
        known = barrier(instruction)
        arrives = self.at_arrive if known is not None and known.arrives else ()
        leaves = self.at_leave if known is not None and known.leaves else ()
        if known is None or not (arrives or leaves):
            return self._plain(index)
        out: list[Statement] = []
        if arrives:
            out.append(self._at_barrier(index, instruction, known, arrives))
        left = instruction
        if leaves:
            if instruction.predicate in known.results:  # the barrier overwrites its predicate
                self.added_registers[_HELD] = "pred"
                out.append(text(f"mov.pred {_HELD}, {instruction.predicate};"))
                left = replace(instruction, predicate=_HELD)
            kept: list[Operand | None] = []
            for operand, register in ((known.number, _NUMBER), (known.threads, _THREADS)):
                if isinstance(operand, Name) and operand.name in known.results:
                    self.added_registers[register] = "b64"
                    out += map(text, self._to_64_bits(index, operand, register))
                    kept.append(Name(register))
                else:
                    kept.append(operand)
            known = replace(known, number=kept[0], threads=kept[1])
            if any(self.filler.reads(p, "waited") for p in leaves):
                self.added_registers[_WAITED] = "b64"
                out.append(text(f"mov.u64 {_WAITED}, %clock64;"))
        out += self._plain(index)
        if leaves:
            out.append(self._at_barrier(index, left, known, leaves))
        return out

    def _at_barrier(
        self, index: int, instruction: PtxInstruction, known: Barrier, probes: tuple[PtxProbe, ...]
    ) -> Directive:
        """Return the programs of one point of a barrier."""
        point = probes[0].point
        site = self._site(point, instruction.line, self.sources[index], opcode=instruction.full_name)
        context = {"site": str(site), "waited": _WAITED, "barrier": str(2**64 - 1), "threads": "0"}
        lines = ["{"]
        if point == "barrier_leave" and any(self.filler.reads(p, "waited") for p in probes):
            lines += [".reg .b64 %gpubpf_0now;", "mov.u64 %gpubpf_0now, %clock64;"]
            lines.append(f"sub.s64 {_WAITED}, %gpubpf_0now, {_WAITED};")
        if instruction.predicate is not None:
            lines.append(around(instruction, "$gpubpf_over"))
        for field, operand in (("barrier", known.number), ("threads", known.threads)):
            if isinstance(operand, Immediate):
                context[field] = str(operand.integer)
            elif isinstance(operand, Name) and operand.name in (_NUMBER, _THREADS):
                context[field] = operand.name
            elif operand is not None and any(self.filler.reads(p, field) for p in probes):
                context[field] = f"%gpubpf_0now{field}"
                lines += [f".reg .b64 {context[field]};", *self._to_64_bits(index, operand, context[field])]
        lines += [self.filler.scope(p, [self.filler.text(p, context)]) for p in probes]
        if instruction.predicate is not None:
            lines.append("$gpubpf_over:")
        return text("\n".join([*lines, "}"]))

    # statements

    def _emit(self, index: int) -> list[Statement]:
        statement = self.flow.body[index]
        if isinstance(statement, Directive) and index in self.exits.retarget:
            listed = statement.text
            moved = self.exits.retarget[index]
            if moved:
                listed = f".branchtargets {', '.join(moved.get(n, n) for n in statement.names)};"
            return [Directive(statement.name, listed)]
        if index in self.exits.direct_exits:
            return self._leave_directly(index)
        if not isinstance(statement, PtxInstruction):
            return [statement]
        if statement.opcode in LEAVING:
            return self._leave(index)
        if statement.opcode == "bra" and index in self.exits.retarget:
            target = statement.operands[0]
            assert isinstance(target, Name)
            return [replace(statement, operands=(Name(self.exits.retarget[index][target.name]),))]
        if statement.opcode == "call":
            return self._call(index, statement)
        if statement.opcode in ("bar", "barrier"):
            return self._barrier(index, statement)
        before, after = self._values(index, statement)
        before += self._keep_result(index, statement) if self.results else []
        return [*self._accesses(index, statement), *before, *self._computing(index), *after]

    def _computing(self, index: int) -> list[Statement]:
        """Return an instruction, and the statements added around it for programs that see what it reads and writes."""
        before, after = self._results(index, self.flow.instruction(index)) if self.at_result else ([], [])
        return [*before, *self._plain(index), *after]

    def _plain(self, index: int) -> list[Statement]:
        """Return the instruction, rewritten so that it accesses module variables through the table."""
        instruction = self.flow.instruction(index)
        loads: list[Statement] = []
        operands = instruction.operands
        if instruction.opcode not in ("bra", "brx"):  # a label may have the name of a variable or function
            operands = tuple(self._operand(index, o, loads) for o in operands)
        return [
            *loads,
            replace(instruction, modifiers=_modifiers(instruction), operands=operands),
        ]

    def _operand(self, index: int, operand: Operand, loads: list[Statement]) -> Operand:
        match operand:
            case Name():
                if operand.name in self.plan.module.functions and not self._is_hidden(index, operand.name):
                    if operand.offset:
                        raise Refusal(f"an address inside of {operand.name}")
                    return Name(self._function(operand.name, loads))
                if not self._is_in_table(index, operand.name):
                    return operand
                return Name(self._load_address(operand.name, loads, operand.offset))
            case Address():
                coordinates = tuple(self._operand(index, o, loads) for o in operand.coordinates)
                base = operand.base
                if base is not None and self._is_in_table(index, base):
                    base = self._load_address(base, loads)
                    if operand.index is not None:
                        loads.append(text(self._add_element(index, operand, base)))
                        is_value = self.flow.instruction(index).opcode in ("mov", "cvta")
                        return Name(base) if is_value else Address(base)
                return replace(operand, base=base, coordinates=coordinates)
            case Vector():
                return Vector(tuple(self._operand(index, o, loads) for o in operand.items))
            case Group():
                return Group(tuple(self._operand(index, o, loads) for o in operand.items))
            case Pair():
                first, second = (self._operand(index, o, loads) for o in (operand.first, operand.second))
                return Pair(first, second)
            case Not() | Immediate():
                return operand

    def _is_hidden(self, index: int, name: str) -> bool:
        """Return whether a declaration in the function hides a name of the module at statement `index`."""
        declared = self._declaration(index, name)
        return name in self.signature or declared is not None

    def _is_in_table(self, index: int, name: str) -> bool:
        """Return whether a name is a module variable that is accessed through the table. Record any other module variable as kept."""
        variable = self.plan.module.variables.get(name)
        if variable is None or self._is_hidden(index, name):
            return False
        if variable.space not in ("global", "const"):
            self.variables.kept.add(name)
            return False
        return True

    def _load_address(self, what: str | Entry, loads: list[Statement], offset: int = 0) -> str:
        """Return a register with the address of a variable, or of the function in an entry, plus `offset` bytes.

        Appends the load to `loads`. Each use loads the address again, which is cheap: the table of addresses is in the constant bank.
        """
        register = f"%gpubpf_0address{self.addresses}"
        self.addresses += 1
        loads.append(text(f"ld.const.b64 {register}, [{TABLE}+{self.variables.offset(what)}];"))
        if offset:
            loads.append(text(f"add.s64 {register}, {register}, {offset};"))
        return register

    def _function(self, name: str, loads: list[Statement]) -> str:
        """Return a register with the address of the original function, or the name of the function's copy.

        Appends the load of the register to `loads`.
        """
        if self.plan.module.functions[name].kind == "entry":
            return launched_name(name)
        if name not in self.plan.graph.entries:
            return self.plan.new_name(name, self.variant)
        return self._load_address(self.plan.graph.entries[name], loads)

    # calls

    def _call(self, index: int, call: PtxInstruction) -> list[Statement]:
        """Return a call, with the hidden arguments and results of the called function."""
        name = callee(call)
        assert name is not None
        role = self.plan.role(name, self.variant)
        if role is None:
            return [call, *self._count_grid(call)] if launches_grid(call) else [call]
        at = next(i for i, o in enumerate(call.operands) if isinstance(o, Name))
        results = next((o.items for o in call.operands[:at] if isinstance(o, Group)), ())
        arguments = next((o.items for o in call.operands[at + 1 :] if isinstance(o, Group)), ())
        condition = guard(call)
        kinds = len(self.plan.work)
        setup: list[Statement] = []
        after: list[Statement] = []
        if role.block:
            arguments, setup = self._hidden_arguments(arguments, role)
        if role.returns_work:
            result, declared, copied = self._result(index, name, results, role, condition)
            setup = declared + setup
            for k, kind in enumerate(self.plan.work):
                slot = f"[{result}+{role.work_offset + 8 * k}]"
                returned = f"%gpubpf_0returned{k}"
                after.append(text(f"ld.param.b64 {returned}, {slot};"))  # ptxas accepts no predicate here
                if role.leaving:  # the function received the work counted so far and returns the sum
                    after.append(text(f"{condition}mov.b64 {accumulator(kind)}, {returned};"))
                else:
                    after.append(
                        text(f"{condition}add.s64 {accumulator(kind)}, {accumulator(kind)}, {returned};")
                    )
            setup.insert(0, text(f".reg .b64 %gpubpf_0returned<{kinds}>;"))
            after += copied
            results = (Name(result),)
        operands: tuple[Operand, ...] = (Group(results),) if results else ()
        operands += (Name(self.plan.new_name(name, self.variant)),)
        operands += (Group(arguments),) if arguments else ()
        return [Open(), *setup, replace(call, operands=operands), *after, Close()]

    def _indirect_call(self, call: IndirectCall) -> list[Statement]:
        """Return direct calls that replace a call through a register: one for each function that the call can reach.

        Each lane executes one of the calls. A lane whose address is not in a table of this module, but may be in one of another
        module, still calls through the register. Other lanes must not call the original: the GPU would look for the original module's
        variables and constants at the addresses of the copy's.
        """
        done = self._label("called")
        differs = self._added(_DIFFERS, "pred")
        out: list[Statement] = []
        for name in sorted(self.plan.graph.targets(self.function.name, call.shape)):
            over = self._label("other")
            address = self._function(name, out)
            if name not in self.plan.graph.entries:  # the name of the copy
                name_of_copy, address = address, f"%gpubpf_0address{self.addresses}"
                self.addresses += 1
                out.append(text(f"mov.b64 {address}, {name_of_copy};"))
            out.append(text(f"setp.ne.b64 {differs}, {address}, {call.register};"))
            out += [text(f"@{differs} bra {over};"), *self.tally, *self._scope_of(call, name)]
            out += [text(f"bra {done};"), Label(over), *self.tally]
        return [*out, *self._scope_of(call, None), Label(done), *self.tally]

    def _scope_of(self, call: IndirectCall, name: str | None) -> list[Statement]:
        """Return the scope around a call through a register, with a direct call of `name` instead; unchanged if `name` is None."""
        out: list[Statement] = []
        for index in range(call.begin, call.end + 1):
            statement = self.flow.body[index]
            if index == call.call and name is not None:
                out += [*self._before(index), *self._call(index, direct(self.flow.instruction(index), name))]
            elif isinstance(statement, Variable) and name is None:
                out.append(replace(statement))  # a copy: direct calls widen the declaration of their result
            elif not (name is not None and _is_prototype(statement)):
                out += self._with_added(index)
        return out

    def _count_grid(self, call: PtxInstruction) -> list[Statement]:
        """Return statements that follow a call which launches a grid, and count the grid if the call succeeded."""
        results = call.operands[0].items if isinstance(call.operands[0], Group) else ()
        if not isinstance(result := next(iter(results), None), Name):
            raise Refusal(f"PTX line {call.line}: the launch of a kernel ignores the result")
        out: list[Statement] = [Open(), text(".reg .b32 %gpubpf_error;"), text(".reg .pred %gpubpf_started;")]
        out.append(text(f"ld.param.b32 %gpubpf_error, [{result.name}];"))
        out.append(text("setp.ne.b32 %gpubpf_started, 0, 0;"))
        out.append(text(f"{guard(call)}setp.eq.b32 %gpubpf_started, %gpubpf_error, 0;"))
        counter = self._load_address(GRIDS, out)
        out.append(text(f"@%gpubpf_started red.global.add.u64 [{counter}], 1;"))
        return [*out, Close()]

    def _hidden_arguments(
        self, arguments: tuple[Operand, ...], role: Role
    ) -> tuple[tuple[Operand, ...], list[Statement]]:
        """Return the arguments followed by the hidden ones, and the statements that fill the hidden ones.

        The hidden arguments are the work counted so far, if the function may leave the kernel, and the launch block.
        """
        setup: list[Statement] = []
        if self.plan.work and role.leaving:
            setup.append(array("gpubpf_passed_work", 8 * len(self.plan.work)))
            for k, kind in enumerate(self.plan.work):
                setup.append(text(f"st.param.b64 [gpubpf_passed_work+{8 * k}], {accumulator(kind)};"))
            arguments += (Name("gpubpf_passed_work"),)
        setup.append(array("gpubpf_passed_launch", self.plan.block.size))
        setup.append(text(".reg .b64 %gpubpf_word;"))
        for offset in range(0, self.plan.block.size, 8):
            setup.append(text(f"ld.param.b64 %gpubpf_word, [{LAUNCH}+{offset}];"))
            setup.append(text(f"st.param.b64 [gpubpf_passed_launch+{offset}], %gpubpf_word;"))
        return (*arguments, Name("gpubpf_passed_launch")), setup

    def _result(
        self, index: int, name: str, results: tuple[Operand, ...], role: Role, condition: str
    ) -> tuple[str, list[Statement], list[Statement]]:
        """Return the name of a call's widened result, its declaration if added, and statements that copy it to the original result."""
        function = self.plan.module.functions[self.plan.graph.resolve(name)]
        kinds = len(self.plan.work)
        original = function.returns[0] if function.returns else None
        given = results[0] if results else None
        if original is not None and isinstance(given, Name):
            at = self.flow.declaration(index, given.name)
            declared = self._declaration(index, given.name)
            if at is not None and declared is not None and declared.space == "param":
                self.widened_results[at] = widened(declared, role.work_offset, kinds)
                return given.name, [], []
        mine = replace(widened(original, role.work_offset, kinds), name="gpubpf_result")
        copied: list[Statement] = []
        if original is not None and isinstance(given, Name) and given.name != "_":
            if condition:
                raise Refusal(f"a predicated call of {name} that returns in a register")
            copied.append(text(f"ld.param.{original.type} {given.name}, [gpubpf_result];"))
        return "gpubpf_result", [mine], copied


def _is_prototype(statement: Statement) -> bool:
    """Return whether a statement belongs to the prototype of a call through a register.

    Any label does: the scope of such a call has no other label.
    """
    return isinstance(statement, Label) or (
        isinstance(statement, Directive) and statement.name == "callprototype"
    )


def _is_vector(declared: Variable | None) -> bool:
    """Return whether this declares vector registers. They have 2 or 4 elements (PTX ISA 5.4.2)."""
    return declared is not None and declared.space == "reg" and 1 < declared.vector <= len(_AXES)


def _named(element: Element | None) -> str:
    """Return the name of a register or variable; "" for a number."""
    element = element.operand if isinstance(element, Not) else element
    return element.name if isinstance(element, Name) else ""


def _guards(instruction: PtxInstruction) -> list[str]:
    """Return guards (`@!%p1 `) for the lanes that do not execute a predicated instruction; [] without a predicate."""
    if instruction.predicate is None:
        return []
    return [f"@{'' if instruction.negated else '!'}{instruction.predicate} "]


def _for_the_next(statement: Statement) -> bool:
    """Return whether this is a pragma that applies to the next instruction, a load (PTX ISA, "used_bytes_mask")."""
    return (
        isinstance(statement, Directive)
        and "used_bytes_mask" in statement.text
        and statement.name == "pragma"
    )


def _modifiers(instruction: PtxInstruction) -> tuple[str, ...]:
    """Return the modifiers with `.const` replaced: the copy accesses the application's constants in global memory.

    Constants do not change while a kernel runs, so loads get `.nc`, unless they have another modifier before `.const`.
    """
    modifiers = instruction.modifiers
    if "const" not in modifiers:
        return modifiers
    if instruction.opcode in ("ld", "cvta"):
        at = modifiers.index("const")
        plain = instruction.opcode == "ld" and at == 0
        return (*modifiers[:at], "global", *(("nc",) if plain else ()), *modifiers[at + 1 :])
    return modifiers

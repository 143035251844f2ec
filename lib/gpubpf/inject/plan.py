"""Decide each function's name, signature and programs before any body is rewritten."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from gpubpf import names
from gpubpf.ebpf.bytecode import DEVICE_POINTS, REGIONS, WORK
from gpubpf.errors import Error, Refusal
from gpubpf.lower.launch_block import LaunchBlock, align
from gpubpf.ptx.access import UNADDRESSED, Access, accesses, unaddressed_accesses, unprobed, without_operands
from gpubpf.ptx.barriers import barrier, mbarrier_waits
from gpubpf.ptx.call_graph import CallGraph
from gpubpf.ptx.emit import WAITING, array, widened
from gpubpf.ptx.flow import Flow, find_names
from gpubpf.ptx.loops import Loops
from gpubpf.ptx.module import Address, Function, Module, PtxInstruction, with_spaces
from gpubpf.ptx.opcodes import facts
from gpubpf.ptx.regions import Regions
from gpubpf.ptx.symbols import FUNCTION, LAUNCH, PREFIX
from gpubpf.record import Record, field, replace

from .alike import count_unlike, moves_alike
from .computation import Computation, computation, is_chosen, unseen_float
from .cost import ADDED, SKIPPED
from .deferral import NONE, Deferrable, deferrable
from .operands import operands, without_value
from .probe_text import AGAIN, FREQUENT, Filler, wants
from .seldom import called, shortened
from .values import WAYS_OUT, PtxProbe

if TYPE_CHECKING:
    from gpubpf.lower.fragment import Fragment

# Limits of the lines of PTX that programs with at least MIN_FUNCTION lines may add at FREQUENT points:
# - A module may get MAX_INLINE lines. In a module with more, each kernel or function may get MAX_INLINE lines, because the time of
#   ptxas grows with the square of its length (0.1 s for MAX_INLINE lines), and all of them together MAX_MODULE lines.
# - In such a module, programs of more than MAX_PROGRAM lines are not inlined: inlined, they would need fewer registers, but execute
#   more instructions on their common path.
# - Above these limits, the rarely executed parts of programs become functions. If the remaining parts still have more than MAX_SHORT
#   lines in a kernel or function, the kernel or function calls whole programs. MAX_MODULE also limits the sum of the remaining parts.
MAX_INLINE = 4000
MAX_MODULE = 10 * MAX_INLINE
MAX_PROGRAM = 1000
MAX_SHORT = 4 * MAX_INLINE
MIN_FUNCTION = 40
INLINED, SHORTENED, CALLED = "inlined", "shortened", "called"  # the form of fragments at FREQUENT points
WHOLE = "_whole"  # suffix of the name of a function with a whole program that has rarely executed parts
_WHOLE = ("entry", "exit")  # points where `Probe.loops` chooses kernels
_IF_IT_WAITS = (
    "barrier_arrive",
    "barrier_leave",
    "function_entry",
    "function_exit",
)  # not in kernels that end by themselves
_WAITS = frozenset(
    {"call", "griddepcontrol", "setmaxnreg"}
)  # what can take forever, apart from loops and barriers
PASSED_WORK = "gpubpf_work"  # hidden parameter: the work counted so far


class Role(Record):
    """How a function takes part in counting work, leaving the kernel and probing. This determines its signature."""

    returns_work: bool  # it appends the counted work to its return value, at `work_offset`
    leaving: bool  # its threads may leave the kernel at a probed exit, so it receives the work counted so far
    block: bool  # it receives the launch block: it holds a probe, or calls a function that does
    work_offset: int = 0


class Contents(Record):
    """The places in a function's body where programs can be injected."""

    # Point → number of places: `exit` (only `exit` instructions), barriers, `branch`, `basic_block` (an upper bound).
    places: Mapping[str, int] = field(default_factory=dict)
    # Access without its operands → number of places; `values` counts only those whose value programs can see.
    accesses: Mapping[Access, int] = field(default_factory=dict)
    values: Mapping[Access, int] = field(default_factory=dict)
    # Point → opcode → number of places where no program can be injected.
    unprobed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class InjectionPlan:
    """The decisions about one module.

    A function contains the probes of the kernel that calls it. Kernels may have different programs, so a function is copied once for
    each distinct set of programs. Each copy is a *variant*, numbered by the set's index in `variants`. Variant 0 has no programs.

    work      the counted kinds of work, of `bytecode.WORK`, ADDED and SKIPPED
    leaving   functions whose threads may leave the kernel
    """

    def __init__(
        self, module: Module, graph: CallGraph, block: LaunchBlock, kernels: Mapping[str, Sequence[PtxProbe]]
    ) -> None:
        """Plan the instrumentation of `kernels`: probes by the kernel's mangled name.

        Raises Error for a point or a kind of work that does not exist.
        """
        self.module = module
        self.graph = graph
        self.block = block
        self._loops: dict[str, Loops] = {}
        self.probes = {name: self._placed(name, probes) for name, probes in kernels.items()}
        every = [p for probes in kernels.values() for p in probes]
        asked = {p.accumulate for p in every if p.point == "exit"}
        if {ADDED, SKIPPED} & asked:
            asked |= {"instructions", ADDED}
        for kind in asked - {None, *WORK, ADDED, SKIPPED}:
            raise Error(f"cannot count {kind!r}; use one of {', '.join(WORK)}")
        for point in {p.point for p in every} - set(DEVICE_POINTS):
            raise Error(f"no device program can be at {point!r}; use one of {', '.join(DEVICE_POINTS)}")
        # Kernels share functions, so all kernels count all kinds; ptxas drops counts that nothing reads.
        self.work = tuple(kind for kind in (*WORK, ADDED, SKIPPED) if kind in asked)
        reached = {f for name in kernels for f in graph.runs(name)}
        self.functions = {f for f in reached if module.functions[f].kind == "func"}
        self.leaving = graph.leaving(self.functions)
        self.variants: list[tuple[PtxProbe, ...]] = [()]
        self.variant_of = {name: self._variant(name) for name in kernels}
        self._roles: dict[tuple[str, int], Role | None] = {}
        self._holding: dict[int, frozenset[str]] = {}
        self._contents: dict[str, Contents] = {}
        self._first_regions: dict[str, int] = {}
        self._last_regions: dict[str, int] = {}
        self._probed: dict[tuple[str, int], Mapping[Access, int]] = {}
        self._computations: dict[str, list[tuple[str, Computation]]] = {}
        self._deferred: dict[str, Deferrable] = {}
        self.moves_alike = moves_alike(every)
        apart = [p.program for p in every if p.keeps or p.point == AGAIN]
        self._apart = {id(f): f"{FUNCTION}again{n}" for n, f in enumerate({id(f): f for f in apart}.values())}
        self._names, self._forms = self._programs(reached)
        self._made: dict[tuple[object, ...], str] = {}
        self._functions: dict[str, Function] = {}
        self._fillers = {
            form: Filler(
                block,
                functools.partial(self._call, form),
                parameters=any(module.functions[f].mentions("cvta.param") for f in reached),
                clusters=any(module.functions[f].mentions("mapa.") for f in reached),
                remarks=ADDED in self.work,
            )
            for form in (INLINED, SHORTENED, CALLED)
        }

    def _variant(self, kernel: str) -> int:
        """Return the number of the set of programs that goes into the functions that a kernel calls."""
        inner = tuple(p for p in self.probes[kernel] if p.point not in ("entry", "block_begin"))
        if inner not in self.variants:
            self.variants.append(inner)
        return self.variants.index(inner)

    def filler(self, name: str) -> Filler:
        """Return the filler that builds the text of probes in a kernel or function."""
        return self._fillers[self._forms.get(name, CALLED)]

    @property
    def caller(self) -> Filler:
        """The filler that calls programs, unless all kernels are so short that no program is a function."""
        return self._fillers[CALLED]

    @property
    def programs(self) -> tuple[Function, ...]:
        """The functions that the probes so far call: they hold programs, or parts of programs."""
        return tuple(self._functions[name] for name in sorted(self._functions))

    def _call(self, form: str, fragment: Fragment, known: Mapping[str, str]) -> str | None:
        """Return the text to inline for a fragment in this form, and add the functions that it calls to `programs`.

        known: fields of the context that are known numbers, by name
        """
        name = self._names.get(id(fragment))
        if id(fragment) in self._apart:
            name, form = self._apart[id(fragment)], CALLED
        if name is None or form == INLINED:
            return None
        key = form, id(fragment), *known.items()
        if key not in self._made:
            name += "".join(f"_{field}{value}" for field, value in known.items())
            if form == CALLED:
                made = called(fragment, f"{name}{WHOLE}" if fragment.seldom else name, known)
            else:
                made = shortened(fragment, name, known)
            self._functions |= {function.name: function for function in made.functions}
            self._made[key] = made.text
        return self._made[key]

    def _programs(self, reached: Iterable[str]) -> tuple[dict[int, str], dict[str, str]]:
        """Decide where fragments at FREQUENT points are inlined. Elsewhere, inlining would add too much text. Return:

        - the first part of the names of functions that hold a program or parts of it, by the fragment's `id`
        - the form of the fragments (INLINED, SHORTENED, CALLED) in each kernel and function, by name

        A module with `setmaxnreg` does not get functions: in a kernel with calls, ptxas ignores `setmaxnreg` (advisory C7507), which
        changes how many blocks fit.
        """
        if any(self.module.functions[f].mentions("setmaxnreg") for f in reached):
            return {}, {}
        places: dict[str, Counter[int]] = {}
        fragments: dict[int, Fragment] = {}
        seen: set[tuple[str, int]] = set()
        for kernel, probes in self.probes.items():
            for probe in probes:
                fragment = probe.program
                if probe.point not in FREQUENT or probe.keeps or fragment.ptx.count("\n") < MIN_FUNCTION:
                    continue
                for name in self.graph.reach(kernel):
                    if (name, id(probe)) not in seen:
                        seen.add((name, id(probe)))
                        places.setdefault(name, Counter())[id(fragment)] += self.places(name, probe)
                        fragments[id(fragment)] = fragment
        length = {key: fragment.ptx.count("\n") for key, fragment in fragments.items()}
        lines = {name: sum(length[key] * n for key, n in found.items()) for name, found in places.items()}
        forms = dict.fromkeys(lines, CALLED)
        if sum(lines.values()) <= MAX_INLINE:
            forms = dict.fromkeys(lines, INLINED)
        left = MAX_MODULE
        for name in sorted(lines, key=lambda name: (lines[name], name)):
            longest = max((length[key] for key, count in places[name].items() if count), default=0)
            if lines[name] <= min(MAX_INLINE, left) and longest <= MAX_PROGRAM:
                forms[name] = INLINED
                left -= lines[name]
        outside = {key for name, found in places.items() if forms[name] != INLINED for key in +found}
        used = [fragment for key, fragment in fragments.items() if key in outside]
        names = {id(f): f"{WAITING if f.waits else FUNCTION}{n}" for n, f in enumerate(used)}
        short = {id(fragment): shortened(fragment, names[id(fragment)]) for fragment in used}
        left = MAX_MODULE
        for name in sorted(
            (name for name in lines if forms[name] != INLINED), key=lambda name: (lines[name], name)
        ):
            parts = sum(short[key].text.count("\n") * n for key, n in (+places[name]).items())
            if parts <= min(MAX_SHORT, left):
                forms[name] = SHORTENED
                left -= parts
        return names, forms

    def role(self, name: str, variant: int) -> Role | None:
        """Return the role of a function; None if the function keeps its signature.

        Raises Refusal for a function that needs hidden parameters or results but passes its own in registers.
        """
        if (name, variant) not in self._roles:
            self._roles[name, variant] = self._role(name, variant)
        return self._roles[name, variant]

    def _role(self, name: str, variant: int) -> Role | None:
        resolved = self.graph.resolve(name)
        function = self.module.functions.get(resolved)
        if function is None or not function.defined:
            return None
        leaving = resolved in self.leaving and any(p.point in WAYS_OUT for p in self.variants[variant])
        noreturn = any(d.name == "noreturn" for d in function.directives)
        returns_work = bool(self.work) and not noreturn
        block = resolved in self.holding(variant)
        if not (block or returns_work):
            return None
        if any(v.space == "reg" for v in (*function.parameters, *function.returns)):
            raise Refusal(f"function {name} takes its parameters in registers")
        offset = align(function.returns[0].size, 8) if function.returns else 0
        return Role(returns_work, leaving, block, offset)

    def holding(self, variant: int) -> frozenset[str]:
        """Return the functions that contain a probe of this variant, or call a function that does."""
        if variant not in self._holding:
            probes = self.variants[variant]
            found = {f for f in self.functions if probes and any(self.places(f, p) for p in probes)}
            self._holding[variant] = self.graph.callers(self.functions, found)
        return self._holding[variant]

    def places(self, name: str, probe: PtxProbe) -> int:
        """Return an upper bound on the places for a program in a function's own body; 0 if there are none."""
        point = probe.point
        function = self.module.functions[name]
        if not function.defined:
            return 0
        if point in ("function_entry", "function_exit"):
            return len(self.called((probe,), function))
        if probe.loops:
            loops = self.loops(name)
            return len(loops.heads(probe.loops) if point == "basic_block" else loops.polled)
        if probe.keeps:
            found = self.deferred(name, probe.alike)
            return len(found.proven | found.checked)
        contents = self.contents(name)
        if point in ("access", "value"):
            of = contents.accesses if point == "access" else contents.values
            unlike = self._unlike(name, probe.alike) if probe.alike else of
            least = unlike if probe.repeats else {}
            return sum(
                n - least.get(access, 0)
                for access, n in (of if probe.repeats else unlike).items()
                if wants(probe, access)
            )
        if point in ("float", "instruction"):
            return sum(
                computed.most_parts
                for opcode, computed in self.computations(name)
                if (computed.operation or point == "instruction") and is_chosen(probe.opcodes, opcode)
            )
        return contents.places.get("exit" if point in WAYS_OUT else point, 0)

    def _placed(self, kernel: str, probes: Sequence[PtxProbe]) -> tuple[PtxProbe, ...]:
        """Return the probes without those for kernels that may not end, if this kernel ends by itself."""
        if not any(p.loops and p.point in _WHOLE for p in probes) or self._may_hang(kernel):
            return tuple(probes)
        return tuple(p for p in probes if not p.loops and p.point not in _IF_IT_WAITS)

    def _may_hang(self, kernel: str) -> bool:
        """Return whether a kernel has a loop, a barrier, or another instruction that may take forever. Any other kernel ends."""
        if self.loops(kernel).ends:
            return True
        body = [s for s in self.module.functions[kernel].body or () if isinstance(s, PtxInstruction)]
        return any(s.opcode in _WAITS or not facts(s).is_known or barrier(s) is not None for s in body)

    def loops(self, name: str) -> Loops:
        """Return the loops of a kernel or function, by statement."""
        if name not in self._loops:
            self._loops[name] = Loops(Flow(self.module.functions[name].body or ()))
        return self._loops[name]

    def first_region(self, name: str) -> int:
        """Return the lowest number of a region in a function (see `Regions`): regions of its callers have lower ones.

        A function that calls itself, also through others, has the numbers of its first call again.
        """
        if name not in self._first_regions:
            self._first_regions[name] = 0  # while the callers are looked at
            runs = {*self.probes, *self.functions}
            callers = [one for one in runs if name in map(self.graph.resolve, self.graph.of(one).calls)]
            ends = (self._last_region(one) for one in callers if one != name)
            self._first_regions[name] = min(max(ends, default=0), REGIONS)
        return self._first_regions[name]

    def _last_region(self, name: str) -> int:
        """Return the lowest number of a region that a function which this one calls may use."""
        if name not in self._last_regions:
            function = self.module.functions[name]
            flow, called = Flow(function.body or ()), function.kind != "entry"
            self._last_regions[name] = Regions(flow, REGIONS, self.first_region(name), called).end
        return self._last_regions[name]

    def called(self, probes: tuple[PtxProbe, ...], function: Function) -> tuple[PtxProbe, ...]:
        """Select the probes at `function_entry` or `function_exit` whose patterns match this function."""
        return tuple(p for p in probes if not p.functions or names.matches(p.functions, function.name))

    def deferred(self, kernel: str, modulus: int) -> Deferrable:
        """Return which accesses of a kernel can be deferred; none in a called function.

        A kernel that leaves in a called function has none: the function does not know the kernel's registers. A kernel with
        `setmaxnreg` must not call functions.
        """
        if kernel not in self._deferred:
            reached = self.graph.reach(kernel)
            function = self.module.functions[kernel]
            refused = any(self.module.functions[f].mentions("setmaxnreg") for f in reached)
            if refused or function.kind != "entry" or self.graph.leaving(reached - {kernel}):
                self._deferred[kernel] = NONE
            else:
                found = deferrable(function, self.module.variables, modulus)
                # The cost of a checked access depends on how often the comparison holds, so --budget could not count it.
                self._deferred[kernel] = replace(found, checked=frozenset()) if ADDED in self.work else found
        return self._deferred[kernel]

    def _unlike(self, name: str, alike: int) -> Mapping[Access, int]:
        """Return the accesses of a function that get a probe of a program with this `Probe.alike`."""
        key = name, alike
        if key not in self._probed:
            function, variables = self.module.functions[name], self.module.variables
            self._probed[key] = count_unlike(function, variables, alike, self.moves_alike)
        return self._probed[key]

    def contents(self, name: str) -> Contents:
        """Return the places in a function where programs can be injected, independent of the actual programs."""
        if name not in self._contents:
            places: Counter[str] = Counter()
            targets: set[str] = set()
            found: Counter[Access] = Counter()
            values: Counter[Access] = Counter()
            points = ("access", "branch", "barrier_leave", "value", "float")
            missed: dict[str, Counter[str]] = {p: Counter() for p in points}
            body = self.module.functions[name].body or ()
            for statement, spaces in with_spaces(body, self.module.variables):
                if not isinstance(statement, PtxInstruction):
                    continue
                places["exit"] += statement.opcode == "exit"
                places["basic_block"] += facts(statement).ends or not places["basic_block"]
                targets.update(find_names(statement.operands) if statement.opcode in ("bra", "brx") else ())
                places["branch"] += facts(statement).parts and statement.predicate is not None
                missed["branch"].update(["brx.idx"] if statement.opcode == "brx" else [])
                missed["barrier_leave"].update(mbarrier_waits(statement))
                if (known := barrier(statement)) is not None:
                    places["barrier_arrive"] += known.arrives
                    places["barrier_leave"] += known.leaves
                for access in (
                    *accesses(statement, declared_in=spaces.get),
                    *unaddressed_accesses(statement),
                ):
                    of = without_operands(access)
                    found[of] += 1
                    values[of] += operands(statement) is not None
                missed["float"].update([opcode] if (opcode := unseen_float(statement)) is not None else [])
                missed["access"].update([opcode] if (opcode := unprobed(statement)) is not None else [])
                missed["value"].update([opcode] if (opcode := without_value(statement)) is not None else [])
            places["basic_block"] += len(targets)
            self._contents[name] = Contents(places, found, values, missed)
        return self._contents[name]

    def computations(self, name: str) -> list[tuple[str, Computation]]:
        """Return the opcode and the computation of each instruction in a function that computes from registers."""
        if name not in self._computations:
            instructions = [
                s for s in self.module.functions[name].body or () if isinstance(s, PtxInstruction)
            ]
            found = [(one.full_name, computation(one)) for one in instructions]
            self._computations[name] = [(opcode, one) for opcode, one in found if one is not None]
        return self._computations[name]

    def unprobed(self, kernel: str) -> dict[str, int]:
        """Return opcode → number of places in a kernel, and in the functions that it calls, that no program sees."""
        probes = self.probes[kernel]
        # A program without arguments sees nothing: it only numbers the places.
        seeing = [p for p in probes if p.point == "access" and p.program.arguments]
        known = {o: Access(kind, space, 0, Address(None)) for o, (kind, space) in UNADDRESSED.items()}
        seen = {o for o, access in known.items() if any(wants(p, access) for p in seeing)}
        found: Counter[str] = Counter()
        for point in {p.point for p in probes}:
            of_point: Counter[str] = Counter()
            for name in self.graph.reach(kernel):
                of_point.update(self.contents(name).unprobed.get(point, {}))
            for opcode in seen if point == "access" else ():
                del of_point[opcode]
            found |= of_point  # the maximum, since several points may miss the same places
        return dict(sorted(found.items()))

    def may_leave(self, name: str) -> bool:
        """Return whether threads may leave the kernel during a call of this function."""
        return name in self.module.functions and self.graph.resolve(name) in self.leaving

    def new_name(self, name: str, variant: int) -> str:
        """Return the name of a function's variant in the sidecar."""
        role = self.role(name, variant)
        if role is None:
            return name
        meant = self.graph.resolve(name)  # aliases of a rewritten function are dropped
        return f"{meant}${PREFIX}{variant}" if role.block else meant

    def signature(self, function: Function, variant: int) -> Function:
        """Return the head of a variant: the function with its new name, hidden parameters and widened return value."""
        role = self.role(function.name, variant)
        name = self.new_name(function.name, variant)
        # `.attribute(.unified(…))` names the original function on all devices.
        directives = tuple(d for d in function.directives if d.name != "attribute")
        function = replace(function, name=name, directives=directives)
        if role is None:
            return function
        returns, parameters = function.returns, function.parameters
        if role.returns_work:
            returns = (widened(returns[0] if returns else None, role.work_offset, len(self.work)),)
        if role.leaving and self.work:
            parameters += (array(PASSED_WORK, 8 * len(self.work)),)
        if role.block:
            parameters += (array(LAUNCH, self.block.size),)
        return replace(function, returns=returns, parameters=parameters)

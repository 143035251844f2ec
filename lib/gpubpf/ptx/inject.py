"""Device programs into copies of an application's kernels.

    injected = inject(parse(ptx), {"_Z9vectorAddPKfS0_Pfi": [Placement(fragment, "exit", accumulate="instructions")]})
    injected.text       # PTX: the instrumented kernels and what they reach, nothing else

What is added to a kernel:

* a hidden last parameter, the launch block, which lies in the constant bank like every parameter;
* the fragments, each in a `{ }` of its own: at the kernel's entry, wherever a thread leaves it by `ret` or `exit` (a `trap` is no way
  out: the launch fails with it), at entry and returns of the functions that it calls, in front of memory accesses, around barriers;
* accumulators: one 64-bit register for each kind of work asked for, and one `add` of a constant per basic block.

What is added stands between the comments `//gpubpf{` and `//gpubpf}`; `//gpubpf+N` stands for N instructions that the original
reaches there and the copy does not: the virtual clock of the embedded device goes by the original (docs/timing.md).

An exit probe stands in front of every way out of the kernel. Where several branches lead to one `ret`, each gets a `ret` of its own:
with one probe at the common `ret`, ptxas would make the lanes of a warp wait for each other in front of it (BSSY … BSYNC), and a
thread that leaves early while the rest goes to a barrier would then hang the block. Each copy carries its own number, the site, so
that ptxas does not merge them again.

Module-scope variables stay the application's: the copy reaches them through a table of their addresses, `gpubpf_variables`.
Names that begin with `gpubpf` are ours.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpubpf import names
from gpubpf.ebpf.bytecode import DEVICE_POINTS
from gpubpf.errors import Error, PtxError

from .access import Access, accesses, unprobed
from .barriers import barrier
from .body import MAX_EXIT_COPIES, PASSED_WORK, Body
from .constants import is_constant
from .emit import array, widened
from .flow import SYSTEM_FUNCTIONS, WORK, CallGraph, initializer_names, may_wait
from .module import Address, Directive, Function, Instruction, Item, Module, Variable, render
from .probe import Filler, effect, function_of, wants
from .source import source_files
from .values import (
    LAUNCH,
    PREFIX,
    TABLE,
    WAYS_OUT,
    Injected,
    InjectedKernel,
    InjectedVariable,
    LaunchBlock,
    Placement,
    Refusal,
    Site,
    align,
    launch_block,
    parameter_layout,
)

if TYPE_CHECKING:
    from gpubpf.lower.fragment import Fragment

__all__ = [
    "MAX_EXIT_COPIES",
    "TABLE",
    "Injected",
    "InjectedKernel",
    "InjectedVariable",
    "LaunchBlock",
    "Placement",
    "Refusal",
    "Site",
    "inject",
    "launch_block",
    "parameter_layout",
]

# Constants that point to constants that point … are copied down to this depth.
MAX_POINTERS = 16
# Lines of PTX that the fragments at memory accesses may come to in a module: ptxas takes a second for that. Beyond it
# those of at least MIN_FUNCTION lines become functions, which every access calls.
MAX_INLINE = 4000
MIN_FUNCTION = 40
_ANY = Address(None)


def inject(
    module: Module, kernels: Mapping[str, Sequence[Placement]], minimum_version: tuple[int, int] = (6, 3)
) -> Injected:
    """Instrument the named kernels of `module`.

    All share one launch block layout. `.version` becomes at least `minimum_version`, the one the fragments were written in.
    Nothing is raised for a kernel that does not fit: it is in `refusals`.
    """
    graph = CallGraph(module)
    block = launch_block(p.fragment for placements in kernels.values() for p in placements)
    refusals: dict[str, str] = {}
    accepted: dict[str, Sequence[Placement]] = {}
    for name, placements in kernels.items():
        try:
            _check(module, graph, name, block)
            accepted[name] = placements
        except (Refusal, PtxError) as error:
            refusals[name] = str(error)
    while True:
        sidecar = SidecarModule(module, graph, block, accepted)
        done, failed = sidecar.rewrite()
        if not failed:
            text, variables = sidecar.finish(minimum_version)
            return Injected(text, done, variables, refusals)
        refusals |= failed  # once more without them, so that they leave nothing behind
        accepted = {name: placements for name, placements in accepted.items() if name not in failed}


# --- what cannot be done -----------------------------------------------------------------------------


def _architecture(module: Module) -> int:
    digits = "".join(c for c in module.sm.partition("_")[2] if c.isdigit())
    return int(digits) if digits else 0


def _check(module: Module, graph: CallGraph, name: str, block: LaunchBlock) -> None:
    """Raises Refusal with the reason why the kernel cannot be instrumented."""
    entry = module.entries.get(name)
    if entry is None:
        raise Refusal("no such kernel in this PTX")
    if module.address_size != 64:
        raise Refusal("32-bit addresses")
    if _architecture(module) < 70:  # a newer .target would take away its assumption that a warp runs in step
        raise Refusal(f"PTX for {module.sm}, older than sm_70")
    _, end = parameter_layout(entry)
    # PTX ISA 9.0, .param: 4352 bytes; 32764 since 8.1 on sm_70 and newer
    limit = 32764 if module.version >= (8, 1) else 4352
    if align(end, 8) + block.size > limit:
        raise Refusal("parameters too large")
    for parameter in entry.parameters:
        if parameter.type in _OPAQUE:
            raise Refusal(f"texture or surface reference {parameter.name}")
        if parameter.name.startswith(PREFIX):
            raise Refusal(f"{parameter.name} is a name of ours: this PTX is instrumented already")
    functions = sorted(graph.reach(name))
    if any(graph.of(f).indirect for f in functions):
        raise Refusal("indirect call")
    for function in functions:
        _check_function(module, module.functions[function], graph)
    for variable in sorted({v for f in functions for v in graph.of(f).variables}):
        declared = module.variables[variable]
        if variable.startswith(PREFIX):
            raise Refusal(f"{variable} is a name of ours: this PTX is instrumented already")
        if declared.type in _OPAQUE or declared.space == "tex":
            raise Refusal(f"texture or surface reference {variable}")
        if any(n in module.functions for n in initializer_names(declared.initializer)):
            raise Refusal(f"variable {variable} holds code addresses")


_OPAQUE = ("texref", "surfref", "samplerref")


def _check_function(module: Module, function: Function, graph: CallGraph) -> None:
    meant = module.functions.get(graph.resolve(function.name))
    if (meant is None or not meant.defined) and function.name not in SYSTEM_FUNCTIONS:
        raise Refusal(f"needs device linking: {function.name}")
    for statement in function.body or ():
        if isinstance(statement, Variable) and statement.space in ("global", "const"):
            raise Refusal(f"variable {statement.name} is declared in a function")
        if isinstance(statement, Variable) and statement.name.lstrip("%").startswith(PREFIX):
            raise Refusal(f"{statement.name} is a name of ours: this PTX is instrumented already")
        if (
            isinstance(statement, Instruction)
            and statement.opcode == "isspacep"
            and "const" in statement.modifiers
        ):
            raise Refusal("isspacep.const asks where a variable lies")


# --- the sidecar module --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Role:
    """How a function takes part in counting, leaving and probing; it decides the function's signature."""

    returns_work: bool  # appended to the return value, at `work_offset`
    leaving: bool  # its threads may leave the kernel where that is probed: it gets the work so far
    block: bool  # it gets the launch block: it holds a probe, or calls what does
    work_offset: int = 0


@dataclass(frozen=True)
class Contents:
    """What of a function's body may be probed."""

    exits: bool = False
    barriers: frozenset[str] = frozenset()  # points
    accesses: Mapping[Access, int] = dataclasses.field(default_factory=dict)  # without operands, places
    unprobed: Mapping[str, int] = dataclasses.field(default_factory=dict)


class SidecarModule:
    """Collects what goes into the instrumented module."""

    def __init__(
        self, module: Module, graph: CallGraph, block: LaunchBlock, kernels: Mapping[str, Sequence[Placement]]
    ) -> None:
        self.module = module
        self.graph = graph
        self.block = block
        self.placements = {name: tuple(placements) for name, placements in kernels.items()}
        every = [p for placements in kernels.values() for p in placements]
        asked = {p.accumulate for p in every if p.point == "exit"}
        for kind in asked - {None, *WORK}:
            raise Error(f"cannot add up {kind!r}; one of {', '.join(WORK)}")
        for point in {p.point for p in every} - set(DEVICE_POINTS):
            raise Error(f"no device program can be at {point!r}; only at one of {', '.join(DEVICE_POINTS)}")
        # Functions are shared between kernels, so all kernels carry all kinds; ptxas drops what nothing reads.
        self.work = tuple(kind for kind in WORK if kind in asked)
        reached = {f for name in kernels for f in graph.reach(name)}
        self.functions = {f for f in reached if module.functions[f].kind == "func"}
        self.leaving = graph.leaving(self.functions)
        # A function holds probes of the kernel that it runs in: one copy for each set of them. Set 0 is the empty one.
        self.groups: list[tuple[Placement, ...]] = [()]
        self.of = {name: self._group(name) for name in kernels}
        self.slots: dict[str, int] = {}
        self.shared: set[str] = set()
        self.sites: dict[str, list[Site]] = {}  # by the function's new name
        self.next_site = 0
        self.files = source_files(module)
        self.rewritten: dict[str, Function] = {}  # by new name
        self.members: dict[str, set[str]] = {}  # original name → new names
        self._shared_exits: dict[str, int] = {}
        self._roles: dict[tuple[str, int], Role | None] = {}
        self._holding: dict[int, frozenset[str]] = {}
        self._contents: dict[str, Contents] = {}
        self.programs = self._programs()
        self.filler = Filler(
            block,
            {id(f): name for name, f in self.programs.items()},
            parameters=any(module.functions[f].mentions("cvta.param") for f in reached),
            clusters=any(module.functions[f].mentions("mapa.") for f in reached),
        )

    def _programs(self) -> dict[str, Fragment]:
        """The fragments at memory accesses that become functions, by name: where all of them inline would be too much text."""
        lines: dict[int, int] = {}
        fragments: dict[int, Fragment] = {}
        seen: set[tuple[str, int]] = set()
        for kernel, placements in self.placements.items():
            for placement in placements:
                fragment = placement.fragment
                length = fragment.ptx.count("\n")
                if placement.point != "access" or length < MIN_FUNCTION:
                    continue
                for name in self.graph.reach(kernel):
                    if (name, id(placement)) not in seen:
                        seen.add((name, id(placement)))
                        places = self.contents(name).accesses
                        number = sum(n for access, n in places.items() if wants(placement, access))
                        lines[id(fragment)] = lines.get(id(fragment), 0) + length * number
                        fragments[id(fragment)] = fragment
        if sum(lines.values()) <= MAX_INLINE:
            return {}
        return {f"{PREFIX}_program{n}": f for n, f in enumerate(fragments.values()) if lines[id(f)]}

    # what a function is called, and looks like

    def _group(self, kernel: str) -> int:
        """The number of the placements of a kernel that matter in the functions that it calls."""
        inner = tuple(p for p in self.placements[kernel] if p.point not in ("entry", "block_begin"))
        if inner not in self.groups:
            self.groups.append(inner)
        return self.groups.index(inner)

    def role(self, name: str, group: int) -> Role | None:
        """None for a function that is left as it is."""
        if (name, group) not in self._roles:
            self._roles[name, group] = self._role(name, group)
        return self._roles[name, group]

    def _role(self, name: str, group: int) -> Role | None:
        resolved = self.graph.resolve(name)
        function = self.module.functions.get(resolved)
        if function is None or not function.defined:
            return None
        leaving = resolved in self.leaving and any(p.point in WAYS_OUT for p in self.groups[group])
        noreturn = any(d.name == "noreturn" for d in function.directives)
        returns_work = bool(self.work) and not noreturn
        block = resolved in self.holding(group)
        if not (block or returns_work):
            return None
        if any(v.space == "reg" for v in (*function.parameters, *function.returns)):
            raise Refusal(f"function {name} takes its parameters in registers")
        offset = align(function.returns[0].size, 8) if function.returns else 0
        return Role(returns_work, leaving, block, offset)

    def holding(self, group: int) -> frozenset[str]:
        """The functions that hold a probe of this group, or call one that does."""
        if group not in self._holding:
            placements = self.groups[group]
            found = {f for f in self.functions if placements and any(self._holds(f, p) for p in placements)}
            self._holding[group] = self.graph.callers(self.functions, found)
        return self._holding[group]

    def _holds(self, name: str, placement: Placement) -> bool:
        """Whether a function itself has a place for a program."""
        point = placement.point
        function = self.module.functions[name]
        if not function.defined:
            return False
        if point in ("function_entry", "function_exit"):
            return bool(self.called((placement,), function))
        contents = self.contents(name)
        if point in WAYS_OUT:
            return contents.exits
        if point == "access":
            return any(wants(placement, access) for access in contents.accesses)
        return point in contents.barriers

    def called(self, placements: tuple[Placement, ...], function: Function) -> tuple[Placement, ...]:
        """Those of the programs at entry or exit of functions that are for this one."""
        return tuple(p for p in placements if not p.functions or names.matches(p.functions, function.name))

    def contents(self, name: str) -> Contents:
        """What of a function may be probed, whatever is."""
        if name not in self._contents:
            exits = False
            barriers: set[str] = set()
            found: Counter[Access] = Counter()
            missed: Counter[str] = Counter()
            for statement in self.module.functions[name].body or ():
                if not isinstance(statement, Instruction):
                    continue
                exits = exits or statement.opcode == "exit"
                if (known := barrier(statement)) is not None:
                    barriers |= {"barrier_arrive"} if known.arrives else set()
                    barriers |= {"barrier_leave"} if known.leaves else set()
                for access in accesses(statement):
                    found[dataclasses.replace(access, address=_ANY, size=None, unless=None)] += 1
                if (opcode := unprobed(statement)) is not None:
                    missed[opcode] += 1
            self._contents[name] = Contents(exits, frozenset(barriers), found, missed)
        return self._contents[name]

    def new_name(self, name: str, group: int) -> str:
        role = self.role(name, group)
        if role is None or not role.block:
            return name
        return f"{self.graph.resolve(name)}${PREFIX}{group}"

    def signature(self, function: Function, group: int) -> Function:
        """The function's head with what is hidden in it."""
        role = self.role(function.name, group)
        name = self.new_name(function.name, group)
        if role is None:
            return dataclasses.replace(function, name=name)
        returns, parameters = function.returns, function.parameters
        if role.returns_work:
            returns = (widened(returns[0] if returns else None, role.work_offset, len(self.work)),)
        if role.leaving and self.work:
            parameters += (array(PASSED_WORK, 8 * len(self.work)),)
        if role.block:
            parameters += (array(LAUNCH, self.block.size),)
        return dataclasses.replace(function, name=name, returns=returns, parameters=parameters)

    # what is used

    def slot(self, name: str) -> int:
        """Offset in bytes in the table of addresses."""
        return 8 * self.slots.setdefault(name, len(self.slots))

    def site(
        self,
        new_name: str,
        function: str,
        point: str,
        line: int,
        source: tuple[int, int],
        opcode: str,
        access: Access | None,
    ) -> int:
        """A number for a place; `source` is file number and line, 0 where they are not known."""
        file = self.files.get(source[0], "")
        seen = (access.kind, access.space, access.width, effect(access)) if access is not None else ()
        number, self.next_site = self.next_site, self.next_site + 1
        site = Site(number, function, line, file, source[1] if file else 0, point, opcode, *seen)
        self.sites.setdefault(new_name, []).append(site)
        return number

    # making it

    def rewrite(self) -> tuple[dict[str, InjectedKernel], dict[str, str]]:
        """All kernels, and the reasons of those that cannot be. Where there are such, nothing of it is of use."""
        done: dict[str, InjectedKernel] = {}
        failed: dict[str, str] = {}
        for name in self.placements:
            try:
                for other in sorted(self.graph.reach(name) - {name}):
                    self._function(other, self.of[name])
            except (Refusal, PtxError) as error:
                failed[name] = str(error)
        shared = self.next_site
        for name in self.placements:
            self.next_site = shared  # each kernel's own follow those of functions
            try:
                if name not in failed:
                    done[name] = self._kernel(name)
            except (Refusal, PtxError) as error:
                failed[name] = str(error)
        return done, failed

    def _kernel(self, name: str) -> InjectedKernel:
        function = self.module.functions[name]
        group = self.of[name]
        reached = self.graph.reach(name)
        body = Body(self, function, group, self.placements[name])
        statements = body.rewrite()
        self.rewritten[name] = dataclasses.replace(
            function,
            parameters=(*function.parameters, array(LAUNCH, self.block.size)),
            statements=statements,
            _source=None,
        )
        self.members.setdefault(name, set()).add(name)
        self._shared_exits[name] = body.shared_exits
        layout, end = parameter_layout(function)
        run = {self.new_name(f, group) for f in reached - {name}} | {name}
        unprobed: Counter[str] = Counter()
        if any(p.point == "access" for p in self.placements[name]):
            for other in reached:
                unprobed.update(self.contents(other).unprobed)
        return InjectedKernel(
            layout,
            align(end, 8),
            self.block,
            tuple(sorted((s for f in run for s in self.sites.get(f, ())), key=lambda site: site.number)),
            sum(self._shared_exits.get(f, 0) for f in run),
            tuple(sorted({u for f in reached for u in self.graph.of(f).unknown})),
            may_wait(function, self.graph),
            self.next_site,
            dict(sorted(unprobed.items())),
        )

    def _function(self, name: str, group: int) -> None:
        function = self.module.functions[name]
        if self.graph.resolve(name) != name and self.role(name, group) is not None:
            return  # calls name what the alias stands for
        new = self.new_name(name, group)
        if new in self.rewritten:
            return
        head = self.signature(function, group)
        if function.defined:
            body = Body(self, function, group, self.groups[group])
            head = dataclasses.replace(head, statements=body.rewrite(), _source=None)
            self._shared_exits[new] = body.shared_exits
        self.rewritten[new] = head
        self.members.setdefault(name, set()).add(new)

    def finish(self, minimum_version: tuple[int, int]) -> tuple[str, tuple[InjectedVariable, ...]]:
        """The text of the module, and the variables it wants addresses of."""
        module = self.module
        copies = self._copies()
        items: list[Item] = []
        if self.slots:
            table = Variable(
                "const", "b64", TABLE, align=8, dimensions=(len(self.slots),), linkage=("visible",)
            )
            items.append(table)
        for name, fragment in self.programs.items():
            program = function_of(fragment, name)
            items += [dataclasses.replace(program, statements=None), program]
        seen: set[str] = set()
        for item in module.items:
            if isinstance(item, Variable):
                if item.name in copies:
                    items.append(dataclasses.replace(item, space="global", linkage=("visible",)))
                elif item.name in self.shared:
                    items.append(item)
            elif isinstance(item, Function):
                for new in sorted(self.members.get(item.name, ())):
                    made = self.rewritten[new]
                    if made.kind == "func" and new not in seen:
                        seen.add(new)
                        # declared ahead of everything: a definition may call what stands further down
                        items.append(dataclasses.replace(made, statements=None, _source=None))
                    if item.defined:
                        items.append(made)
            elif _kept(item, self.members):
                items.append(item)
        items.sort(key=_rank)
        target = tuple(
            t for t in module.target if t != "debug"
        )  # it asks for DWARF, which does not fit any more
        made_module = Module(max(module.version, minimum_version), target, module.address_size, tuple(items))
        variables = tuple(
            InjectedVariable(name, index, v.space, v.size, name in copies, self._users(name))
            for name, index in self.slots.items()
            for v in (module.variables[name],)
        )
        return render(made_module), variables

    def _users(self, variable: str) -> tuple[str, ...]:
        """The instrumented kernels that reach a variable of the table."""
        return tuple(
            kernel
            for kernel in self.placements
            if any(variable in self.graph.of(function).variables for function in self.graph.reach(kernel))
        )

    def _copies(self) -> frozenset[str]:
        """Variables in the table that may be copied, and what their initialisers name."""
        found: set[str] = set()
        known: dict[str, bool] = {}
        for name in self.slots:
            if self._copyable(name, known, 0):
                found |= self._parts(name)
        return frozenset(found)

    def _copyable(self, name: str, known: dict[str, bool], depth: int) -> bool:
        """Whether a copy of `name`, and of what its initialiser points to, would be the same."""
        if name not in known:
            known[name] = False  # what leads back to itself is not
            variable = self.module.variables.get(name)
            known[name] = (
                variable is not None
                and depth < MAX_POINTERS
                and is_constant(self.module, variable)
                and all(
                    self._copyable(n, known, depth + 1) for n in set(initializer_names(variable.initializer))
                )
            )
        return known[name]

    def _parts(self, name: str) -> set[str]:
        """A variable and those that its initialiser points to, directly or not."""
        seen: set[str] = set()
        todo = [name]
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo.extend(initializer_names(self.module.variables[name].initializer))
        return seen


def _rank(item: Item) -> int:
    """Order in the module: what is used comes first."""
    if isinstance(item, Directive):
        return {"file": 0, "pragma": 0}.get(item.name, 9)
    if isinstance(item, Variable):
        return 2
    return 5 if item.defined else 1


def _kept(item: Directive, members: Mapping[str, set[str]]) -> bool:
    if item.name in ("file", "pragma"):
        return True
    if item.name == "alias":
        return bool(item.names) and item.names[0] in members
    # .debug_str holds the names that `.loc … function_name` refers to; the rest of DWARF describes code that is no more
    return item.name == "section" and item.text.split()[1].startswith(".debug_str")

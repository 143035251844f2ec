"""Device programs into copies of an application's kernels.

    injected = inject(parse(ptx), {"_Z9vectorAddPKfS0_Pfi": [Placement(fragment, "exit", accumulate="instructions")]})
    injected.text       # PTX: the instrumented kernels and what they reach, nothing else

What is added to a kernel:

* a hidden last parameter, the launch block, which lies in the constant bank like every parameter;
* the fragments, inline, each in a `{ }` of its own, at the kernel's entry or wherever a thread leaves it by `ret` or `exit`. A `trap`
  is no way out: the launch fails with it;
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
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import Error, PtxError
from .flow import (
    LEAVING,
    SYSTEM_FUNCTIONS,
    WORK,
    CallGraph,
    Flow,
    callee,
    counted,
    initializer_names,
    may_wait,
    names,
)
from .module import (
    Address,
    Close,
    Directive,
    Function,
    Group,
    Immediate,
    Instruction,
    Item,
    Label,
    Module,
    Name,
    Not,
    Open,
    Operand,
    Pair,
    Statement,
    Variable,
    Vector,
    render,
)

if TYPE_CHECKING:
    from ..lower.fragment import Argument, Fragment

# A kernel with more branches to its returns than this keeps one probe for the rest of them (`shared_exits` counts those).
MAX_EXIT_COPIES = 64
# Constants that point to constants that point … are copied down to this depth.
MAX_POINTERS = 16
# Passes over a function that follow an address through its registers; more means that it is taken to escape.
MAX_PASSES = 32
# Instructions, beside branches, that are worth copying to keep the ways out of a kernel apart.
MAX_TAIL = 4

TABLE = "gpubpf_variables"
LAUNCH = "gpubpf_launch"
_GONE = "%gpubpf_0gone"  # registers with a digit there: no argument is named so
_PREFIX = "gpubpf"
_PASSED_WORK = "gpubpf_work"  # parameter: the work so far
_RETURNED = "gpubpf_returned"  # result of a function that had none


@dataclass(frozen=True)
class Placement:
    """A fragment, where it goes (`entry` or `exit`), and the work that is added up for it (one of `flow.WORK`)."""

    fragment: Fragment
    point: str
    accumulate: str | None = None


@dataclass(frozen=True)
class LaunchBlock:
    """What is where in the hidden last parameter: offsets in bytes, by the name of the map.

    The number of a launch is the u64 at `launch_id`, plus the u64 in GPU memory whose address is at `replay`, where that is not 0
    (a kernel node of a graph, docs/timing.md).
    """

    size: int
    launch_id: int = 0
    replay: int = 8
    bases: Mapping[str, int] = dataclasses.field(default_factory=dict)
    capacities: Mapping[str, int] = dataclasses.field(default_factory=dict)
    params: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)  # offset, size
    pid_tgid: int | None = None  # process << 32 | thread that launched (u64); None where no program asks


@dataclass(frozen=True)
class ExitSite:
    """One probed way out: its number (`ctx->site`, unique in the sidecar), the function (mangled), and the line of the original
    PTX that decides to leave: of the branch where several lead to one `ret`, else of the `ret` or `exit`.

    `source`, `source_line`: the same in the source (`-lineinfo`), of an inlined function where it is in one; "" and 0 without.
    """

    number: int
    function: str
    line: int
    source: str = ""
    source_line: int = 0


@dataclass(frozen=True)
class InjectedKernel:
    """`parameters` are the application's, as (offset, size) in bytes; the launch block follows at `block_offset`.

    `shared_exits`: branches that had to share a probe with others. `unknown`: opcodes that are counted as instructions although
    what else they do is not known. `waits`: its blocks may wait for each other (flow.may_wait).
    """

    parameters: tuple[tuple[int, int], ...]
    block_offset: int
    block: LaunchBlock
    sites: tuple[ExitSite, ...] = ()
    shared_exits: int = 0
    unknown: tuple[str, ...] = ()
    waits: bool = True


@dataclass(frozen=True)
class InjectedVariable:
    """Slot `index` of `gpubpf_variables` wants the address of the application's `name`.

    `copied`: the sidecar holds a copy of the same name, for use where the driver does not find the original.
    """

    name: str
    index: int
    space: str  # global or const
    size: int  # bytes; 0 where the length is not known
    copied: bool
    kernels: tuple[str, ...] = ()  # that reach it (mangled)


@dataclass(frozen=True)
class Injected:
    """The instrumented module. `text` holds no kernel where all were refused; `refusals`: reason by mangled name."""

    text: str
    kernels: dict[str, InjectedKernel]
    variables: tuple[InjectedVariable, ...]
    refusals: dict[str, str]


class Refusal(Error):
    """A kernel that cannot be instrumented. `str()` is the reason, as the user sees it."""


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
    sidecar = _Sidecar(module, graph, block, accepted)
    done: dict[str, InjectedKernel] = {}
    for name in accepted:
        try:
            done[name] = sidecar.kernel(name)
        except (Refusal, PtxError) as error:
            refusals[name] = str(error)
    text, variables = sidecar.finish(minimum_version)
    return Injected(text, done, variables, refusals)


def launch_block(fragments: Iterable[Fragment]) -> LaunchBlock:
    """The layout that these fragments need: launch id and cell, each map's base and capacity, the bytes of `param` maps."""
    bases: dict[str, int] = {}
    capacities: dict[str, int] = {}
    sizes: dict[str, int] = {}
    arguments = [a for f in fragments for a in f.arguments]
    for argument in arguments:
        if argument.kind == "param":
            sizes[_map(argument)] = max(sizes.get(_map(argument), 0), argument.offset + argument.width)
    position = 16
    for argument in arguments:
        if argument.kind not in ("map_base", "map_capacity") or _map(argument) in bases:
            continue
        bases[_map(argument)] = position
        position += 8
        if any(a.kind == "map_capacity" and a.map == argument.map for a in arguments):
            capacities[_map(argument)] = position
            position += 8
    params: dict[str, tuple[int, int]] = {}
    for name, size in sizes.items():
        params[name] = (position, size)
        position += _align(size, 8)
    pid_tgid = None
    if any(argument.kind == "pid_tgid" for argument in arguments):
        pid_tgid, position = position, position + 8
    return LaunchBlock(position, bases=bases, capacities=capacities, params=params, pid_tgid=pid_tgid)


def _map(argument: Argument) -> str:
    if not argument.map:
        raise Error(
            f"argument {argument.name} of a device program names no map; this is a fault of the lowering"
        )
    return argument.map


def _align(value: int, to: int) -> int:
    return -(-value // to) * to


def parameter_layout(function: Function) -> tuple[tuple[tuple[int, int], ...], int]:
    """(offset, size) of each parameter of a kernel, and the end of the last one (PTX ISA 5.1.6: each is naturally aligned)."""
    found = []
    end = 0
    for parameter in function.parameters:
        # in `.param .u64 .ptr .global .align 16 p` the alignment is that of the memory pointed to
        natural = 8 if "ptr" in parameter.attributes else parameter.alignment
        offset = _align(end, natural)
        found.append((offset, parameter.size))
        end = offset + parameter.size
    return tuple(found), end


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
    if _align(end, 8) + block.size > limit:
        raise Refusal("parameters too large")
    for parameter in entry.parameters:
        if parameter.type in _OPAQUE:
            raise Refusal(f"texture or surface reference {parameter.name}")
        if parameter.name.startswith(_PREFIX):
            raise Refusal(f"{parameter.name} is a name of ours: this PTX is instrumented already")
    functions = sorted(graph.reach(name))
    if any(graph.of(f).indirect for f in functions):
        raise Refusal("indirect call")
    for function in functions:
        _check_function(module, module.functions[function], graph)
    for variable in sorted({v for f in functions for v in graph.of(f).variables}):
        declared = module.variables[variable]
        if variable.startswith(_PREFIX):
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
        if isinstance(statement, Variable) and statement.name.lstrip("%").startswith(_PREFIX):
            raise Refusal(f"{statement.name} is a name of ours: this PTX is instrumented already")
        if (
            isinstance(statement, Instruction)
            and statement.opcode == "isspacep"
            and "const" in statement.modifiers
        ):
            raise Refusal("isspacep.const asks where a variable lies")


# --- the sidecar module --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Role:
    """How a function takes part in counting and leaving; it decides the function's signature."""

    returns_work: bool  # appended to the return value, at `work_offset`
    leaving: bool  # its threads may leave the kernel: it gets the launch block, and the work so far
    work_offset: int = 0


class _Sidecar:
    """Collects what goes into the instrumented module."""

    def __init__(
        self, module: Module, graph: CallGraph, block: LaunchBlock, kernels: Mapping[str, Sequence[Placement]]
    ) -> None:
        self.module = module
        self.graph = graph
        self.block = block
        self.placements = kernels
        asked = {p.accumulate for placements in kernels.values() for p in placements if p.point == "exit"}
        for kind in asked - {None, *WORK}:
            raise Error(f"cannot add up {kind!r}; one of {', '.join(WORK)}")
        # Functions are shared between kernels, so all kernels carry all kinds; ptxas drops what nothing reads.
        self.work = tuple(kind for kind in WORK if kind in asked)
        reached = {f for name in kernels for f in graph.reach(name)}
        self.functions = {f for f in reached if module.functions[f].kind == "func"}
        self.leaving = graph.leaving(self.functions)
        # A function that holds an `exit` holds the exit probes of the kernel it runs in.
        self.groups: list[tuple[Placement, ...]] = []
        self.slots: dict[str, int] = {}
        self.shared: set[str] = set()
        self.sites: list[tuple[str, ExitSite]] = []  # with the function's new name
        self.files = source_files(module)
        self.rewritten: dict[str, Function] = {}  # by new name
        self.members: dict[str, set[str]] = {}  # original name → new names
        self._shared_exits: dict[str, int] = {}

    # what a function is called, and looks like

    def exit_placements(self, kernel: str) -> tuple[Placement, ...]:
        return tuple(p for p in self.placements[kernel] if p.point == "exit")

    def group(self, placements: tuple[Placement, ...]) -> int:
        if placements not in self.groups:
            self.groups.append(placements)
        return self.groups.index(placements)

    def role(self, name: str, placements: tuple[Placement, ...]) -> _Role | None:
        """None for a function that is left as it is."""
        resolved = self.graph.resolve(name)
        function = self.module.functions.get(resolved)
        if function is None or not function.defined:
            return None
        leaving = resolved in self.leaving and bool(placements)
        noreturn = any(d.name == "noreturn" for d in function.directives)
        returns_work = bool(self.work) and not noreturn
        if not (leaving or returns_work):
            return None
        if any(v.space == "reg" for v in (*function.parameters, *function.returns)):
            raise Refusal(f"function {name} takes its parameters in registers")
        offset = _align(function.returns[0].size, 8) if function.returns else 0
        return _Role(returns_work, leaving, offset)

    def new_name(self, name: str, placements: tuple[Placement, ...]) -> str:
        role = self.role(name, placements)
        number = self.group(placements) if role is not None and role.leaving else 0
        return f"{name}${_PREFIX}{number}" if number else name

    def signature(self, function: Function, placements: tuple[Placement, ...]) -> Function:
        """The function's head with what is hidden in it."""
        role = self.role(function.name, placements)
        name = self.new_name(function.name, placements)
        if role is None:
            return dataclasses.replace(function, name=name)
        returns, parameters = function.returns, function.parameters
        if role.returns_work:
            returns = (widened(returns[0] if returns else None, role.work_offset, len(self.work)),)
        if role.leaving:
            if self.work:
                parameters += (_bytes(_PASSED_WORK, 8 * len(self.work)),)
            parameters += (_bytes(LAUNCH, self.block.size),)
        return dataclasses.replace(function, name=name, returns=returns, parameters=parameters)

    # what is used

    def slot(self, name: str) -> int:
        """Offset in bytes in the table of addresses."""
        return 8 * self.slots.setdefault(name, len(self.slots))

    def site(self, new_name: str, function: str, line: int, source: tuple[int, int]) -> int:
        """A number for a way out; `source` is file number and line, 0 where they are not known."""
        file = self.files.get(source[0], "")
        site = ExitSite(len(self.sites), function, line, file, source[1] if file else 0)
        self.sites.append((new_name, site))
        return site.number

    # making it

    def kernel(self, name: str) -> InjectedKernel:
        function = self.module.functions[name]
        placements = self.exit_placements(name)
        self.group(placements)
        entries = tuple(p for p in self.placements[name] if p.point == "entry")
        reached = self.graph.reach(name)
        for other in sorted(reached - {name}):
            self._function(other, placements)
        body = _Body(self, function, placements, entries)
        statements = body.rewrite()
        self.rewritten[name] = dataclasses.replace(
            function,
            parameters=(*function.parameters, _bytes(LAUNCH, self.block.size)),
            statements=statements,
            _source=None,
        )
        self.members.setdefault(name, set()).add(name)
        self._shared_exits[name] = body.shared_exits
        layout, end = parameter_layout(function)
        run = {self.new_name(f, placements) for f in reached}
        return InjectedKernel(
            layout,
            _align(end, 8),
            self.block,
            tuple(site for name, site in self.sites if name in run),
            sum(self._shared_exits.get(f, 0) for f in run),
            tuple(sorted({u for f in reached for u in self.graph.of(f).unknown})),
            may_wait(self.module.functions[name], self.graph),
        )

    def _function(self, name: str, placements: tuple[Placement, ...]) -> None:
        function = self.module.functions[name]
        new = self.new_name(name, placements)
        if new in self.rewritten:
            return
        head = self.signature(function, placements)
        if function.defined:
            body = _Body(self, function, placements, ())
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


def _bytes(name: str, size: int, align: int = 8) -> Variable:
    return Variable("param", "b8", name, align=align, dimensions=(size,))


def widened(result: Variable | None, offset: int, kinds: int) -> Variable:
    """The return parameter with `kinds` 64-bit counts behind it, at `offset`."""
    if result is None:
        return _bytes(_RETURNED, 8 * kinds)
    return _bytes(result.name, offset + 8 * kinds, max(8, result.alignment))


# --- where the source is --------------------------------------------------------------------------------


_FILE = re.compile(r'\.file\s+(\d+)\s+"((?:[^"\\]|\\.)*)"')
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")


def source_files(module: Module) -> dict[int, str]:
    """Names of source files by number, from the `.file` directives."""
    found = {}
    for item in module.items:
        if isinstance(item, Directive) and item.name == "file" and (match := _FILE.match(item.text)):
            found[int(match[1])] = match[2]
    return found


def source_lines(body: Sequence[Statement]) -> list[tuple[int, int]]:
    """File number and line of each statement, (0, 0) where there is none. Line 0 is the compiler's: the one before holds."""
    found = []
    current = 0, 0
    for statement in body:
        if isinstance(statement, Directive) and statement.name == "loc":
            match = _LOC.match(statement.text)
            if match and int(match[2]):
                current = int(match[1]), int(match[2])
        found.append(current)
    return found


# --- constants ------------------------------------------------------------------------------------------


def is_constant(module: Module, variable: Variable) -> bool:
    """Whether nothing can write a variable: it is initialised, no host code can name it, and no code here writes it.

    A compiler's literals (`$str`, `__unnamed_1`) are constants wherever their address goes. Function-local statics (`_ZZ…`) and the
    tables of libdevice (`__cudart_…`) are, unless an address escapes; so is any data that only printf and assert get to see.
    A variable of namespace scope is not: the host may have written it.
    """
    if variable.initializer is None or variable.linkage or "managed" in variable.attributes:
        return False
    name = variable.name
    literal = name.startswith(("$", "_$_str", "__unnamed_")) and variable.type == "b8"
    if literal:
        return True
    private = name.startswith(("_ZZ", "__cudart_", "__internal_"))
    if any(name in initializer_names(v.initializer) for v in module.variables.values()):
        return False
    uses = set()
    for function in module.functions.values():
        if function.mentions(name):
            try:
                uses |= _uses(function, name)
            except PtxError:  # who knows what it does
                return False
    return uses <= ({"read", "system"} if private else {"system"})


def _uses(function: Function, variable: str) -> set[str]:
    """What a function does with an address: `read`, `system` (handed to printf or assert), `written` (that, or it escapes).

    Conservative: registers are followed without regard to order.
    """
    flow = Flow(function.body or ())

    def seen(index: int, operands: Iterable[Operand]) -> set[str | int]:
        """Names; those of parameters of calls, which each call has of its own, as the statement that declares them."""
        return {flow.declaration(index, n) or n for n in names(operands)}

    tainted: set[str | int] = {variable}
    uses: set[str] = set()
    results = {r.name for r in function.returns}
    grown = True
    passes = 0
    while grown:
        grown = False
        passes += 1
        if passes > MAX_PASSES:
            return {"written"}
        for index, statement in flow.instructions():
            opcode, operands = statement.opcode, statement.operands
            if tainted.isdisjoint(seen(index, operands)):
                continue
            new: set[str | int] = set()
            if opcode in ("ld", "ldu") and "param" not in statement.modifiers:
                uses.add("read")
            elif opcode == "call":
                uses.add("system" if callee(statement) in SYSTEM_FUNCTIONS else "written")
            elif opcode == "st" and "param" in statement.modifiers:
                new = seen(index, operands[:1]) if tainted & seen(index, operands[1:]) else set()
            elif opcode in ("setp", "set", "testp", "prefetch", "prefetchu"):
                uses.add("read")
            elif opcode in ("st", "atom", "red") or any(isinstance(o, Address) for o in operands):
                uses.add("written")
            else:
                new = seen(index, operands[:1])
            if new & results:
                uses.add("written")
            if not new <= tainted:
                tainted |= new
                grown = True
    return uses


# --- a function's body ------------------------------------------------------------------------------------


def _text(text: str) -> Directive:
    """A statement of ours, given as text."""
    return Directive("", text)


def _counts(instructions: int) -> list[Statement]:
    """Stands for that many instructions of the original."""
    return [Directive("gpubpf", f"//gpubpf+{instructions}")] if instructions else []


def _marked(statements: Iterable[Statement]) -> Iterator[Statement]:
    """With the comments around what is ours. Labels, scopes and declarations cost nothing on either side."""
    ours = False
    for statement in statements:
        mine = isinstance(statement, Directive) and not statement.name
        if mine != ours and isinstance(statement, Directive | Instruction):
            yield Directive("gpubpf", "//gpubpf{" if mine else "//gpubpf}")
            ours = mine
        yield statement
    if ours:
        yield Directive("gpubpf", "//gpubpf}")


class _Body:
    """Rewrites the body of one function."""

    def __init__(
        self,
        sidecar: _Sidecar,
        function: Function,
        exits: tuple[Placement, ...],
        entries: tuple[Placement, ...],
    ) -> None:
        self.sidecar = sidecar
        self.function = function
        self.exits = exits
        self.entries = entries
        self.name = sidecar.new_name(function.name, exits)
        self.entry = function.kind == "entry"
        self.role = None if self.entry else sidecar.role(function.name, exits)
        self.flow = Flow(function.body or (), self._may_not_return)
        self.local = {v.name for v in (*function.parameters, *function.returns)}
        self.local.update(s.name for s in self.flow.body if isinstance(s, Variable) and s.count is None)
        self.addresses = 0
        self.labels = 0
        self.shared_exits = 0
        self.before: dict[int, list[Statement]] = {}  # adds in front of an instruction
        self.retarget: dict[int, dict[str, str]] = {}  # branch or table → label → label of the copy
        self.after: dict[int, list[Statement]] = {}
        self.widen: dict[int, Variable] = {}
        self.apart: dict[int, tuple[tuple[int, ...], bool]] = {}
        self.sources = source_lines(self.flow.body)
        self.arrivals: dict[
            int, list[int | None]
        ] = {}  # a `ret` → the branches that keep it; None: control falls into it
        self.dead: set[int] = set()
        self.leaves = frozenset() if not exits else LEAVING if self.entry else frozenset({"exit"})

    def _may_not_return(self, name: str) -> bool:
        return (
            name in self.sidecar.module.functions and self.sidecar.graph.resolve(name) in self.sidecar.leaving
        )

    def rewrite(self) -> tuple[Statement, ...]:
        body = self.flow.body
        self._count()
        self._separate_exits()
        start = next((i for i, s in enumerate(body) if isinstance(s, Instruction | Label | Open)), len(body))
        out: list[Statement] = []
        for index in range(len(body) + 1):
            if index == start:
                out += self._prologue()
            if index == len(body):
                break
            if index not in self.dead:
                added = self.before.get(index, []) + self._emit(index)
                if added and out and _for_the_next(out[-1]) and isinstance(body[index], Instruction):
                    added.insert(len(added) - 1, out.pop())
                out += added
            out += self.after.get(index, [])
        if self.flow.falls_off:
            out += self._fall_off()
        head: list[Statement] = [_text(f".reg .b64 {_accumulator(kind)};") for kind in self._counting()]
        if self.apart:
            head.append(_text(f".reg .pred {_GONE};"))
        if self.addresses:
            head.append(Variable("reg", "b64", "%gpubpf_0address", count=self.addresses))
        # Calls are emitted after the declarations of their results, whose size they decide.
        wide = {id(body[index]): declaration for index, declaration in self.widen.items()}
        return tuple(_marked(head + [wide.get(id(s), s) for s in out]))

    # accumulators

    def _counting(self) -> tuple[str, ...]:
        if self.entry or self.role is not None:
            return self.sidecar.work
        return ()

    def _count(self) -> None:
        """Plan one add per block and kind in front of the block's first instruction, and one at each predicated access."""
        for block in self.flow.blocks if self._counting() else ():
            total = dict.fromkeys(WORK, 0)
            total["instructions"] = len(block.instructions)
            total["blocks"] = int(block.entered)
            for index in block.instructions:
                instruction = self.flow.body[index]
                assert isinstance(instruction, Instruction)
                for kind in counted(instruction):
                    if instruction.predicate is None:
                        total[kind] += 1
                    elif kind in self.sidecar.work:
                        self.before.setdefault(index, []).append(
                            _text(f"{_guard(instruction)}{_add(kind, 1)}")
                        )
            adds = [_text(_add(kind, total[kind])) for kind in self.sidecar.work if total[kind]]
            first = block.instructions[0]
            self.before[first] = adds + self.before.get(first, [])

    def _prologue(self) -> list[Statement]:
        out: list[Statement] = []
        if self.apart:
            out.append(self._opaque("eq"))
        for position, kind in enumerate(self._counting()):
            if self.role is not None and self.role.leaving:
                out.append(_text(f"ld.param.b64 {_accumulator(kind)}, [{_PASSED_WORK}+{8 * position}];"))
            else:
                out.append(_text(f"mov.b64 {_accumulator(kind)}, 0;"))
        return out + [self._probe(p, 0) for p in self.entries]

    # ways out

    def _separate_exits(self) -> None:
        """Plan a copy of the tail for every branch to it."""
        if not self.leaves:
            return
        body = self.flow.body
        self._leave_loops()
        sources: dict[int, dict[int, None]] = {}
        for index, targets in self.flow.targets.items():
            instruction = body[index]
            assert isinstance(instruction, Instruction)
            if index in self.apart or index in self.dead:
                continue
            source = self.flow.table(index) if instruction.opcode == "brx" else index
            for target in dict.fromkeys(targets):
                sources.setdefault(target, {})[source] = None
        copies = 0
        for label in sorted(sources):
            path = self.flow.tail(label, MAX_TAIL)
            if path is None:
                continue
            last = body[path[-1]]
            assert isinstance(last, Instruction)
            if last.opcode not in self.leaves:
                continue
            falls = self._falls_into(label)
            takers = list(sources[label])[0 if falls else 1 :]
            self.arrivals.setdefault(path[-1], []).append(None if falls else next(iter(sources[label])))
            place = next(i for i in path if self._opcode(i) in ("bra", *LEAVING))
            name = body[label]
            assert isinstance(name, Label)
            for source in takers:
                if copies == MAX_EXIT_COPIES:
                    self.shared_exits += 1
                    self.arrivals[path[-1]].append(None)
                    continue
                copies += 1
                new = self._label("exit")
                self.retarget.setdefault(source, {})[name.name] = new
                copy: list[Statement] = [Label(new)]
                for index in path:
                    copy += self.before.get(index, [])
                    if index == path[-1]:
                        copy += self._leave(index, source)
                    elif self._opcode(index) == "bra":
                        copy += _counts(1)
                    else:
                        copy += self._plain(index)
                self.after.setdefault(place, []).extend(copy)

    def _leave_loops(self) -> None:
        """Plan for the branches that leave a divergent loop and the kernel at once.

        Whatever stands behind a loop, ptxas lets the lanes that are through with it wait for the others, unless it is a bare EXIT. So
        these branches stay inside the loop: the probe becomes a conditional part of its body, and the EXIT comes behind it. It costs
        three instructions per turn, hence only where it matters: to a probe that reads a clock, and in loops that synchronize, which
        would wait for the waiting lanes.
        """
        given = self.entry or (self.role is not None and self.role.leaving)  # the launch block
        if not (given and self.sidecar.block.bases):
            return
        body = self.flow.body
        timed = any(word in p.fragment.ptx for p in self.exits for word in ("%globaltimer", "%clock"))
        synchronizing = {
            self.flow.cycles[number]
            for number, block in enumerate(self.flow.blocks)
            if number in self.flow.cycles and any(self._synchronizes(i) for i in block.instructions)
        }
        gone: set[tuple[int, int]] = set()
        for number, block in enumerate(self.flow.blocks):
            index = block.instructions[-1]
            instruction = body[index]
            assert isinstance(instruction, Instruction)
            cycle = self.flow.cycles.get(number)
            if cycle is None or instruction.predicate is None or "uni" in instruction.modifiers:
                continue
            if not (timed or cycle in synchronizing):
                continue
            stays = any(self.flow.cycles.get(s) == cycle for s in block.successors)
            if instruction.opcode in self.leaves and stays:
                self.apart[index] = (index,), True
            elif instruction.opcode == "bra" and stays:
                for start, taken in ((self.flow.targets[index][0], True), (index, False)):
                    path = self.flow.tail(start, MAX_TAIL)
                    if path is None or self._opcode(path[-1]) not in self.leaves:
                        continue
                    bare = all(self._opcode(i) in ("bra", *LEAVING) for i in path)
                    if bare or self.flow.scope[start] == self.flow.scope[index]:  # names mean the same here
                        self.apart[index] = path, taken
                        gone |= {(number, s) for s in block.successors if self.flow.cycles.get(s) != cycle}
                        break
        if gone:
            self._left_out(gone)

    def _left_out(self, gone: set[tuple[int, int]]) -> None:
        """Leave out what only the edges between blocks in `gone` led to."""
        seen: set[int] = set()
        todo = [0]
        while todo:
            number = todo.pop()
            if number not in seen:
                seen.add(number)
                todo += [s for s in self.flow.blocks[number].successors if (number, s) not in gone]
        for number in self.flow.reachable - seen:
            self.dead.update(self.flow.blocks[number].instructions)

    def _synchronizes(self, index: int) -> bool:
        statement = self.flow.body[index]
        assert isinstance(statement, Instruction)
        if statement.opcode == "call":
            return callee(statement) not in SYSTEM_FUNCTIONS
        return statement.opcode in ("bar", "barrier", "shfl", "vote", "match", "redux")

    def _opaque(self, comparison: str) -> Directive:
        """Set the predicate that says that this thread is gone, to false (`eq`) or true (`ne`), with ptxas unable to tell which.

        A map's address is never 0. If ptxas knew the value it would split the loop, and its lanes would wait again.
        """
        offset = next(iter(self.sidecar.block.bases.values()))
        return _text(
            f"{{ .reg .b64 %gpubpf_base; ld.param.u64 %gpubpf_base, [{LAUNCH}+{offset}];"
            f" setp.{comparison}.u64 {_GONE}, %gpubpf_base, 0; }}"
        )

    def _leave_loop(self, index: int) -> list[Statement]:
        """A branch of `_leave_loops`: around the probe, then out."""
        branch = self.flow.body[index]
        assert isinstance(branch, Instruction)
        path, taken = self.apart[index]
        stay = self._label("stay")
        negated = branch.negated != taken  # around the probe go those that stay
        around = Instruction("bra", (), (Name(stay),), branch.predicate, negated)
        alone = path == (index,)  # an `exit` with a predicate: no branch leads to it
        out: list[Statement] = [*_counts(1), _text(str(around))] if alone else [around]
        for step in path:
            if step != index:
                out += self.before.get(step, [])
            if step != path[-1] and self._opcode(step) == "bra":
                out += _counts(1) if step != index else []
            elif step != path[-1]:
                out += self._plain(step)
        site = self._site(index)
        if not alone:
            out += _counts(1)
        out += [self._probe(p, site) for p in self.exits]
        out += [self._opaque("ne"), Label(stay), _text(f"@{_GONE} exit;")]
        if not taken:
            out.append(_text(f"bra {branch.operands[0]};"))
        return out

    def _opcode(self, index: int) -> str:
        statement = self.flow.body[index]
        assert isinstance(statement, Instruction)
        return statement.opcode

    def _falls_into(self, label: int) -> bool:
        """Whether control can come to a label from the statement before it."""
        for index in range(label - 1, -1, -1):
            statement = self.flow.body[index]
            if index in self.apart:
                return self.apart[index][1]
            if isinstance(statement, Instruction):
                return statement.predicate is not None or statement.opcode not in (
                    "bra", "brx", "ret", "exit", "trap",
                )  # fmt: skip
            if isinstance(statement, Label) and index in self.flow.leaders:
                return True
        return True

    def _site(self, index: int) -> int:
        """A number for the way out that begins with the statement at `index`."""
        line = self.flow.body[index].line
        return self.sidecar.site(self.name, self.function.name, line, self.sources[index])

    def _leave(self, index: int, source: int | None = None) -> list[Statement]:
        """A `ret` or `exit` with what has to happen before it; `source` is the branch that alone leads to it."""
        instruction = self.flow.body[index]
        assert isinstance(instruction, Instruction)
        if instruction.opcode in self.leaves:
            if source is None and len(arrivals := self.arrivals.get(index, [])) == 1:
                source = arrivals[0]
            site = self._site(index if source is None else source)
            going = dataclasses.replace(instruction, predicate=None, negated=False)
            # It counts in front of the probe: there the thread's time is the one that it ends at.
            leave = [*_counts(1), *[self._probe(p, site) for p in self.exits], _text(str(going))]
            if instruction.predicate is None:
                return leave
            over = self._label("stay")
            skip = f"@{'' if instruction.negated else '!'}{instruction.predicate} bra {over};"
            return [_text(skip), *leave, Label(over), *_counts(1)]
        if instruction.opcode == "ret" and self.role is not None:
            return [*self._return_work(_guard(instruction)), instruction]
        return [instruction]

    def _return_work(self, guard: str = "") -> list[Statement]:
        if self.role is None or not self.role.returns_work:
            return []
        result = self.function.returns[0].name if self.function.returns else _RETURNED
        return [
            _text(f"{guard}st.param.b64 [{result}+{self.role.work_offset + 8 * k}], {_accumulator(kind)};")
            for k, kind in enumerate(self.sidecar.work)
        ]

    def _fall_off(self) -> list[Statement]:
        """What stands at the end of a body that does not end with a `ret`."""
        if self.entry:
            here = self.sources[-1] if self.sources else (0, 0)
            site = (
                self.sidecar.site(self.name, self.function.name, self.function.line, here)
                if self.exits
                else 0
            )
            return [*[self._probe(p, site) for p in self.exits], _text("ret;")]
        return [*self._return_work(), _text("ret;")]

    def _label(self, what: str) -> str:
        self.labels += 1
        return f"$gpubpf_{what}_{self.labels}"

    def _probe(self, placement: Placement, site: int) -> Directive:
        """The fragment, in a scope that declares and fills the registers it reads."""
        lines = ["{"]
        for argument in placement.fragment.arguments:
            lines.append(f".reg .{argument.type} {argument.register};")
            lines.append(self._fill(argument, placement, site))
        lines += [placement.fragment.ptx.strip(), "}"]
        return _text("\n".join(lines))

    def _fill(self, argument: Argument, placement: Placement, site: int) -> str:
        block = self.sidecar.block
        register, bits = argument.register, int(argument.type[1:])
        if argument.kind == "context":
            if argument.field == "site":
                return f"mov.b{bits} {register}, {site};"
            if argument.field == "work":
                if placement.accumulate is None or placement.point != "exit":
                    return f"mov.b{bits} {register}, 0;"
                source = _accumulator(placement.accumulate)
                return (
                    f"mov.b64 {register}, {source};"
                    if bits == 64
                    else f"cvt.u{bits}.u64 {register}, {source};"
                )
            raise Error(
                f"a device program asks for the context field {argument.field!r}, which is not known here"
            )
        width = 8
        if argument.kind == "launch":
            offset = block.launch_id
        elif argument.kind == "replay":
            offset = block.replay
        elif argument.kind == "map_base":
            offset = block.bases[_map(argument)]
        elif argument.kind == "map_capacity":
            offset = block.capacities[_map(argument)]
        elif argument.kind == "pid_tgid" and block.pid_tgid is not None:
            offset = block.pid_tgid
        elif argument.kind == "param":
            offset = block.params[_map(argument)][0] + argument.offset
            width = argument.width
        else:
            raise Error(f"a device program asks for {argument.kind!r}, which is not known here")
        # a narrow value is zero-extended into a wider register
        return f"ld.param.u{8 * min(width, bits // 8)} {register}, [{LAUNCH}+{offset}];"

    # statements

    def _emit(self, index: int) -> list[Statement]:
        statement = self.flow.body[index]
        if isinstance(statement, Directive) and index in self.retarget:
            text = statement.text
            moved = self.retarget[index]
            if moved:
                text = f".branchtargets {', '.join(moved.get(n, n) for n in statement.names)};"
            return [Directive(statement.name, text)]
        if index in self.apart:
            return self._leave_loop(index)
        if not isinstance(statement, Instruction):
            return [statement]
        if statement.opcode in LEAVING:
            return self._leave(index)
        if statement.opcode == "bra" and index in self.retarget:
            target = statement.operands[0]
            assert isinstance(target, Name)
            return [dataclasses.replace(statement, operands=(Name(self.retarget[index][target.name]),))]
        if statement.opcode == "call":
            return self._call(index, statement)
        return self._plain(index)

    def _plain(self, index: int) -> list[Statement]:
        """An instruction with the module's variables reached through the table."""
        instruction = self.flow.body[index]
        assert isinstance(instruction, Instruction)
        loads: list[Statement] = []
        operands = tuple(self._operand(o, loads) for o in instruction.operands)
        return [
            *loads,
            dataclasses.replace(instruction, modifiers=_modifiers(instruction), operands=operands),
        ]

    def _operand(self, operand: Operand, loads: list[Statement]) -> Operand:
        match operand:
            case Name():
                if not self._aliased(operand.name):
                    return operand
                return Name(self._load(operand.name, loads, operand.offset))
            case Address():
                coordinates = tuple(self._operand(o, loads) for o in operand.coordinates)
                base = operand.base
                if base is not None and self._aliased(base):
                    base = self._load(base, loads)
                return dataclasses.replace(operand, base=base, coordinates=coordinates)
            case Vector():
                return Vector(tuple(self._operand(o, loads) for o in operand.items))
            case Group():
                return Group(tuple(self._operand(o, loads) for o in operand.items))
            case Pair():
                return Pair(self._operand(operand.first, loads), self._operand(operand.second, loads))
            case Not() | Immediate():
                return operand

    def _aliased(self, name: str) -> bool:
        variable = self.sidecar.module.variables.get(name)
        if variable is None or name in self.local:
            return False
        if variable.space not in ("global", "const"):
            self.sidecar.shared.add(name)
            return False
        return True

    def _load(self, name: str, loads: list[Statement], offset: int = 0) -> str:
        """A register with the variable's address. Read at each use: the table lies in the constant bank."""
        register = f"%gpubpf_0address{self.addresses}"
        self.addresses += 1
        loads.append(_text(f"ld.const.b64 {register}, [{TABLE}+{self.sidecar.slot(name)}];"))
        if offset:
            loads.append(_text(f"add.s64 {register}, {register}, {offset};"))
        return register

    # calls

    def _call(self, index: int, call: Instruction) -> list[Statement]:
        name = callee(call)
        assert name is not None
        role = self.sidecar.role(name, self.exits)
        if role is None:
            return [call]
        at = next(i for i, o in enumerate(call.operands) if isinstance(o, Name))
        results = next((o.items for o in call.operands[:at] if isinstance(o, Group)), ())
        arguments = next((o.items for o in call.operands[at + 1 :] if isinstance(o, Group)), ())
        guard = _guard(call)
        kinds = len(self.sidecar.work)
        setup: list[Statement] = []
        after: list[Statement] = []
        if role.leaving:
            arguments, setup = self._hidden_arguments(arguments)
        if role.returns_work:
            result, declared, copied = self._result(index, name, results, role, guard)
            setup = declared + setup
            for k, kind in enumerate(self.sidecar.work):
                slot = f"[{result}+{role.work_offset + 8 * k}]"
                returned = f"%gpubpf_0returned{k}"
                after.append(_text(f"ld.param.b64 {returned}, {slot};"))  # ptxas takes no predicate here
                if role.leaving:  # it was given the work so far
                    after.append(_text(f"{guard}mov.b64 {_accumulator(kind)}, {returned};"))
                else:
                    after.append(
                        _text(f"{guard}add.s64 {_accumulator(kind)}, {_accumulator(kind)}, {returned};")
                    )
            setup.insert(0, _text(f".reg .b64 %gpubpf_0returned<{kinds}>;"))
            after += copied
            results = (Name(result),)
        operands: tuple[Operand, ...] = (Group(results),) if results else ()
        operands += (Name(self.sidecar.new_name(name, self.exits)),)
        operands += (Group(arguments),) if arguments else ()
        return [Open(), *setup, dataclasses.replace(call, operands=operands), *after, Close()]

    def _hidden_arguments(
        self, arguments: tuple[Operand, ...]
    ) -> tuple[tuple[Operand, ...], list[Statement]]:
        """The arguments with the work so far and the launch block behind them, and how these two are filled."""
        setup: list[Statement] = []
        if self.sidecar.work:
            setup.append(_bytes("gpubpf_passed_work", 8 * len(self.sidecar.work)))
            for k, kind in enumerate(self.sidecar.work):
                setup.append(_text(f"st.param.b64 [gpubpf_passed_work+{8 * k}], {_accumulator(kind)};"))
            arguments += (Name("gpubpf_passed_work"),)
        setup.append(_bytes("gpubpf_passed_launch", self.sidecar.block.size))
        setup.append(_text(".reg .b64 %gpubpf_word;"))
        for offset in range(0, self.sidecar.block.size, 8):
            setup.append(_text(f"ld.param.b64 %gpubpf_word, [{LAUNCH}+{offset}];"))
            setup.append(_text(f"st.param.b64 [gpubpf_passed_launch+{offset}], %gpubpf_word;"))
        return (*arguments, Name("gpubpf_passed_launch")), setup

    def _result(
        self, index: int, name: str, results: tuple[Operand, ...], role: _Role, guard: str
    ) -> tuple[str, list[Statement], list[Statement]]:
        """Where the widened result of a call goes: its name, its declaration if it is ours, and how the original gets its part."""
        function = self.sidecar.module.functions[self.sidecar.graph.resolve(name)]
        kinds = len(self.sidecar.work)
        original = function.returns[0] if function.returns else None
        given = results[0] if results else None
        if original is not None and isinstance(given, Name):
            declared = self.flow.declaration(index, given.name)
            statement = self.flow.body[declared] if declared is not None else None
            if declared is not None and isinstance(statement, Variable) and statement.space == "param":
                self.widen[declared] = widened(statement, role.work_offset, kinds)
                return given.name, [], []
        mine = dataclasses.replace(widened(original, role.work_offset, kinds), name="gpubpf_result")
        copied: list[Statement] = []
        if original is not None and isinstance(given, Name) and given.name != "_":
            if guard:
                raise Refusal(f"a predicated call of {name} that returns in a register")
            copied.append(_text(f"ld.param.{original.type} {given.name}, [gpubpf_result];"))
        return "gpubpf_result", [mine], copied


def _for_the_next(statement: Statement) -> bool:
    """Whether this is a pragma about the very next instruction (PTX ISA, "used_bytes_mask"), always a load."""
    return (
        isinstance(statement, Directive)
        and "used_bytes_mask" in statement.text
        and statement.name == "pragma"
    )


def _accumulator(kind: str) -> str:
    return f"%gpubpf_0{kind}"


def _add(kind: str, amount: int) -> str:
    return f"add.s64 {_accumulator(kind)}, {_accumulator(kind)}, {amount};"


def _guard(instruction: Instruction) -> str:
    if instruction.predicate is None:
        return ""
    return f"@{'!' if instruction.negated else ''}{instruction.predicate} "


def _modifiers(instruction: Instruction) -> tuple[str, ...]:
    """State spaces as they are where no `.const` variable is left: the originals are reached in global memory.

    Constants do not change while a kernel runs, hence `.nc`, unless the load says something else about caching.
    """
    modifiers = instruction.modifiers
    if "const" not in modifiers:
        return modifiers
    if instruction.opcode in ("ld", "cvta"):
        at = modifiers.index("const")
        plain = instruction.opcode == "ld" and at == 0
        return (*modifiers[:at], "global", *(("nc",) if plain else ()), *modifiers[at + 1 :])
    return modifiers

"""Find what functions use: other functions, also by calls through registers, and variables.

graph = CallGraph(module)
graph.reach("_Z9vectorAddPKfS0_Pfi")      # the kernel and all functions that it may run
may_wait(kernel, graph)                   # whether its blocks may wait for each other
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from gpubpf import names
from gpubpf.errors import PtxError
from gpubpf.record import Record, field, replace

from .address_flow import Parameter, passes
from .flow import Flow, callee, find_initializer_names, find_names
from .indirect import (
    MAX_CALLS,
    MAX_TARGETS,
    MOST_APART,
    PARTIAL,
    Entry,
    Shape,
    entries,
    indirect_calls,
    is_table,
    shape_of,
)
from .module import Close, Function, Module, Open, PtxInstruction, Variable
from .opcodes import facts


class References(Record):
    """The names that one function uses.

    calls      functions that it may call
    variables  variables of the module
    indirect   whether it has calls through registers that cannot be followed
    taken      functions whose addresses it takes
    unknown    opcodes that `opcodes` does not know
    shapes     shape → number of calls through registers that can be followed
    originals  functions in tables: the copy needs the address of the original
    launched   kernels whose addresses it takes
    """

    calls: frozenset[str]
    variables: frozenset[str]
    indirect: bool
    taken: frozenset[str]
    unknown: frozenset[str]
    shapes: Mapping[Shape, int] = field(default_factory=dict)
    originals: frozenset[str] = frozenset()
    launched: frozenset[str] = frozenset()


def references(function: Function, module: Module) -> References:
    """Return the names of a module that the body of a function uses. Raises PtxError if the body cannot be parsed."""
    calls: set[str] = set()
    variables: set[str] = set()
    unknown: set[str] = set()
    taken: set[str] = set()
    launched: set[str] = set()
    indirect = False
    body = function.body or ()
    followed = {found.call: found.shape for found in indirect_calls(body).values()}
    shapes: Counter[Shape] = Counter()
    scopes = [[*function.parameters, *function.returns]]  # from the outermost block to that of the statement

    def is_local(name: str) -> bool:
        return any(variable.declares(name) for declared in scopes for variable in declared)

    for index, statement in enumerate(body):
        if isinstance(statement, Open):
            scopes.append([])
        elif isinstance(statement, Close):
            if len(scopes) == 1:
                raise PtxError(f"PTX line {statement.line}: this }} has no matching {{")
            scopes.pop()
        elif isinstance(statement, Variable):
            scopes[-1].append(statement)
        if not isinstance(statement, PtxInstruction):
            continue
        if not facts(statement).is_known:
            unknown.add(statement.full_name)
        target = callee(statement) if statement.opcode == "call" else None
        if statement.opcode == "call":
            if index in followed:
                shapes[followed[index]] += 1
            elif target is None or target not in module.functions or is_local(target):
                indirect = True
            else:
                calls.add(target)
        for name in find_names(statement.operands) if statement.opcode not in ("bra", "brx") else ():
            known = name in module.variables or name in module.functions
            if not known or name == target or is_local(name):
                continue
            if name in module.variables:
                variables.add(name)
            else:
                (launched if module.functions[name].kind == "entry" else taken).add(name)
    return References(
        frozenset(calls),
        frozenset(variables),
        indirect,
        frozenset(taken),
        frozenset(unknown),
        shapes,
        launched=frozenset(launched),
    )


class CallGraph:
    """The calls between the functions of a module, with `.alias` names resolved.

    A call through a register reaches all functions of its shape that are in tables, or whose addresses its function takes.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self._references: dict[str, References] = {}  # the original uses these names
        self._of: dict[str, References] = {}
        self._own: dict[str, frozenset[str]] = {}
        self._reachable: dict[str, frozenset[str]] = {}
        self._reach: dict[tuple[frozenset[str], Shape], frozenset[str] | str] = {}

    def resolve(self, name: str) -> str:
        """Return the function that an alias stands for; any other name unchanged."""
        return self.module.aliases.get(name, name)

    def of(self, name: str) -> References:
        """Return the names that a function and its copy use. Raises PtxError.

        `taken` omits functions in tables, and functions whose addresses stay in the thread (`own`).
        """
        if name not in self._of:
            found = self._found(name)
            self._of[name] = self._with_targets(name, found) if found.taken or found.shapes else found
        return self._of[name]

    def _found(self, name: str) -> References:
        if name not in self._references:
            self._references[name] = references(self.module.functions[name], self.module)
        return self._references[name]

    def _with_targets(self, name: str, found: References) -> References:
        own = self.own(name)
        reached = [self._reached(own, shape) for shape in found.shapes]
        followed = frozenset[str]().union(*(targets for targets in reached if not isinstance(targets, str)))
        in_tables = (found.taken | followed) & self.entries.keys()
        return replace(
            found,
            calls=found.calls | own | followed,
            indirect=found.indirect or any(isinstance(targets, str) for targets in reached),
            taken=found.taken - in_tables - own,
            originals=in_tables,
        )

    def own(self, name: str) -> frozenset[str]:
        """Return the functions, except those in tables, whose addresses function `name` takes and keeps in the thread.

        Raises PtxError.
        If function `name` takes more than MOST_APART addresses and one of them may leave the thread, return none.
        """
        if name not in self._own:
            taken = frozenset(self._found(name).taken - self.entries.keys())
            apart = taken if len(taken) <= MOST_APART else ()
            if taken and self.stays(name, taken) is None:
                taken = frozenset(one for one in apart if self.stays(name, {one}) is not None)
            self._own[name] = taken
        return self._own[name]

    def stays(self, name: str, addresses: Collection[str]) -> bool | None:
        """Return whether function `name` passes the `addresses` that it takes as arguments; None if they may leave the thread."""
        functions = self.module.functions
        places: list[tuple[str, Collection[str], Collection[Parameter]]] = [(name, addresses, ())]
        seen: set[Parameter] = set()
        for function, taken, parameters in places:  # the loop appends to `places`
            found = passes(functions[function], taken, parameters)
            if found is None:
                return None
            for parameter in found - seen:
                called = functions.get(self.resolve(parameter.function))
                if called is None or not called.defined or parameter.number >= len(called.parameters):
                    return None
                places.append((called.name, (), (parameter,)))
            seen |= found
        return len(places) > 1

    def targets(self, name: str, shape: Shape) -> frozenset[str]:
        """Return the functions that a call of this shape through a register in function `name` can reach. Raises PtxError."""
        reached = self._reached(self.own(name), shape)
        assert not isinstance(reached, str)  # otherwise, checks.py has refused the kernel
        return reached

    def through_registers(self, name: str) -> frozenset[str]:
        """Return the functions that all calls through registers in function `name` can reach. Raises PtxError."""
        return frozenset[str]().union(*(self.targets(name, shape) for shape in self._found(name).shapes))

    def obstacle(self, name: str) -> str:
        """Return why a call through a register in function `name` cannot be followed; "" if the reason is unknown. Raises PtxError."""
        found = self._found(name)
        for shape in found.shapes:
            if isinstance(why := self._reached(self.own(name), shape), str):
                return why
        for variable in sorted(found.variables):  # the call has an unknown form
            for held in find_initializer_names(self.module.variables[variable].initializer):
                if held in self.module.functions:
                    return f"{variable} has the address of {names.demangle(held).short}"
        return ""

    def _reached(self, own: frozenset[str], shape: Shape) -> frozenset[str] | str:
        """Return the functions that a call through a register can reach, or why they are unknown.

        own: the result of `own` for the calling function
        shape: the shape of the call
        """
        if (own, shape) not in self._reach:
            self._reach[own, shape] = self._find_reached(own, shape)
        return self._reach[own, shape]

    def _find_reached(self, own: frozenset[str], shape: Shape) -> frozenset[str] | str:
        if PARTIAL in self.module.functions:
            return "it may reach code without PTX"
        holders, calls = self._addresses
        shapes = self._shapes
        others = [one for one in holders if shapes[one] in (None, shape) and one not in self.entries]
        if others:
            return f"{holders[others[0]]} the address of {names.demangle(others[0]).short}"
        if unusual := [one for one in self.entries if shapes[one] is None]:
            return f"{names.demangle(unusual[0]).short} takes its parameters in registers"
        found = frozenset(one for one in own | self._passed | self.entries.keys() if shapes[one] == shape)
        if len(found) > MAX_TARGETS or calls[shape] * len(found) > MAX_CALLS:
            places = "1 place" if calls[shape] == 1 else f"{calls[shape]} places"
            return f"it may reach {len(found)} functions, in {places}"
        return found or "no table has a function for it"

    @functools.cached_property
    def entries(self) -> Mapping[str, Entry]:
        """An entry for each function that is in a table."""
        return entries(self.module)

    @functools.cached_property
    def _passed(self) -> frozenset[str]:
        """The functions whose addresses a function of the module may pass to another one."""
        own = {name: self.own(name) for name in self.module.functions}
        return frozenset[str]().union(
            *(found for name, found in own.items() if found and self.stays(name, found))
        )

    @functools.cached_property
    def _shapes(self) -> Mapping[str, Shape | None]:
        return {name: shape_of(function) for name, function in self.module.functions.items()}

    @functools.cached_property
    def _addresses(self) -> tuple[Mapping[str, str], Counter[Shape]]:
        """The functions whose addresses are also outside of tables, each with a text of the holder ("NAME has", "NAME passes on"); and
        the number of calls of each shape."""
        functions = self.module.functions
        found: dict[str, str] = {}
        for variable in self.module.variables.values():
            if not is_table(self.module, variable):
                held = find_initializer_names(variable.initializer)
                found |= dict.fromkeys(held, f"{variable.name} has")
        calls: Counter[Shape] = Counter()
        for name, function in functions.items():
            used = self._found(name)
            calls.update(used.shapes)
            if escaping := used.taken - self.own(name) - self.entries.keys():
                found |= dict.fromkeys(sorted(escaping), f"{names.demangle(name).short} passes on")
            for statement in function.body or ():
                if isinstance(statement, Variable):
                    held = find_initializer_names(statement.initializer)
                    found |= dict.fromkeys(held, f"{statement.name} has")
        of_functions = {n: who for n, who in found.items() if n in functions and functions[n].kind == "func"}
        return of_functions, calls

    def reach(self, root: str) -> frozenset[str]:
        """Return the functions that a kernel may run, including itself, aliases and their targets. Raises PtxError."""
        if root in self._reachable:
            return self._reachable[root]
        seen: set[str] = set()
        todo = [root]
        while todo:
            name = todo.pop()
            if name not in seen and name in self.module.functions:
                seen.add(name)
                todo.append(self.resolve(name))
                todo.extend(self.of(name).calls)
        self._reachable[root] = frozenset(seen)
        return self._reachable[root]

    def launched(self, kernel: str) -> frozenset[str]:
        """Return the kernels that a kernel, or one that it launches, may launch. Raises PtxError."""
        found: set[str] = set()
        todo = [kernel]
        while todo:
            for function in self.reach(todo.pop()):
                new = self.of(function).launched - found
                found |= new
                todo += new
        return frozenset(found)

    def runs(self, kernel: str) -> frozenset[str]:
        """Return the functions that a kernel, and those that it may launch, may run, including all these kernels. Raises PtxError."""
        return frozenset[str]().union(*(self.reach(one) for one in {kernel} | self.launched(kernel)))

    def leaving(self, functions: Iterable[str]) -> frozenset[str]:
        """Return those of `functions` in which a thread may execute `exit`, directly or in a called function."""
        found: set[str] = set()
        every = set(functions)
        for name in every:
            body = self.module.functions[name].body or ()
            if any(isinstance(s, PtxInstruction) and s.opcode == "exit" for s in body):
                found.add(name)
        return self.callers(every, found)

    def callers(self, functions: Iterable[str], of: Iterable[str]) -> frozenset[str]:
        """Return those of `functions` that are in `of`, are an alias of a function in `of`, or call one directly or indirectly."""
        every, found = set(functions), set(of)
        grown = True
        while grown:
            grown = False
            for name in every - found:
                if self.resolve(name) in found or any(c in found for c in self.of(name).calls):
                    found.add(name)
                    grown = True
        return frozenset(found)


# Modifiers of loads that expect concurrent writes by other threads, and spaces that no other block can access.
_STRONG = frozenset({"volatile", "relaxed", "acquire", "mmio", "cv", "cg"})
_OF_THE_BLOCK = frozenset({"shared", "shared::cta", "local", "param", "const"})


def may_wait(kernel: Function, graph: CallGraph) -> bool:
    """Return whether threads of a kernel may wait for threads of other blocks.

    They may if a loop or a called function contains a strong load, an atomic whose result is used, a fence wider than the block, a
    sleep or a multimem instruction. They may also if there are indirect calls or unknown opcodes. Raises PtxError.
    """
    reached = graph.reach(kernel.name)
    if any(graph.of(name).indirect or graph.of(name).unknown for name in reached):
        return True
    flow = Flow(kernel.body or ())
    again = {i for number in flow.cycles for i in flow.blocks[number].instructions}
    if any(_looks(kernel, i) for i in again):
        return True
    # In a called function everything counts, since the call may be in a loop.
    for name in reached - {kernel.name}:
        function = graph.module.functions[name]
        if any(
            _looks(function, i) for i, s in enumerate(function.body or ()) if isinstance(s, PtxInstruction)
        ):
            return True
    return False


def _looks(function: Function, index: int) -> bool:
    """Return whether an instruction, executed repeatedly, may observe what another block wrote, or suggests that a loop waits."""
    instruction = (function.body or ())[index]
    assert isinstance(instruction, PtxInstruction)
    opcode, modifiers = instruction.opcode, set(instruction.modifiers)
    if facts(instruction).waits == "blocks":
        return True
    if opcode in ("membar", "fence"):
        return not modifiers & {"cta", "proxy"}
    if modifiers & _OF_THE_BLOCK:
        return False
    if opcode == "ld":
        return bool(modifiers & _STRONG)
    if opcode != "atom":
        return False
    results = set(find_names(instruction.operands[:1]))
    used = sum(
        not results.isdisjoint(find_names(s.operands)) or (s.predicate in results)
        for s in function.body or ()
        if isinstance(s, PtxInstruction)
    )
    return used > 1

"""Find what functions use: other functions, also by calls through registers, and variables.

graph = CallGraph(module)
graph.reach("_Z9vectorAddPKfS0_Pfi")      # the kernel and all functions that it may run
may_wait(kernel, graph)                   # whether its blocks may wait for each other
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from .flow import OPCODES, Flow, callee, find_initializer_names, find_names
from .indirect import (
    MAX_CALLS,
    MAX_TARGETS,
    Entry,
    Shape,
    entries,
    indirect_calls,
    is_fixed,
    shape_of,
    stays,
    targets,
)
from .module import Function, Module, PtxInstruction, Variable


@dataclass(frozen=True)
class References:
    """The names that one function uses.

    indirect  it makes calls through registers that cannot be followed
    taken     functions whose addresses it takes, and which the copy does not know
    own       functions whose addresses it takes, and which stay in the thread: in the copy, those of the copies
    unknown   opcodes
    shapes    of its other calls through registers, each with the number of calls
    """

    calls: frozenset[str]
    variables: frozenset[str]
    indirect: bool
    taken: frozenset[str]
    unknown: frozenset[str]
    shapes: Mapping[Shape, int] = dataclasses.field(default_factory=dict)
    own: frozenset[str] = frozenset()


def references(function: Function, module: Module) -> References:
    """Return the names of a module that the body of a function uses. Raises PtxError if the body cannot be parsed."""
    calls: set[str] = set()
    variables: set[str] = set()
    unknown: set[str] = set()
    taken: set[str] = set()
    indirect = False
    body = function.body or ()
    followed = {found.call: found.shape for found in indirect_calls(body).values()}
    shapes: Counter[Shape] = Counter()
    local = {v.name for v in (*function.parameters, *function.returns)}
    local.update(s.name for s in body if isinstance(s, Variable) and s.count is None)
    for index, statement in enumerate(body):
        if not isinstance(statement, PtxInstruction):
            continue
        if statement.opcode not in OPCODES:
            unknown.add(".".join((statement.opcode, *statement.modifiers)))
        target = callee(statement) if statement.opcode == "call" else None
        if statement.opcode == "call":
            if index in followed:
                shapes[followed[index]] += 1
            elif target is None or target in local or target not in module.functions:
                indirect = True
            else:
                calls.add(target)
        for name in find_names(statement.operands):
            if name in local or name == target:
                continue
            if name in module.variables:
                variables.add(name)
            elif name in module.functions:
                taken.add(name)
    own = taken if taken and stays(body, taken) else frozenset[str]()
    return References(
        frozenset(calls),
        frozenset(variables),
        indirect,
        frozenset(taken),
        frozenset(unknown),
        shapes,
        frozenset(own),
    )


class CallGraph:
    """The calls between the functions of a module, with `.alias` names resolved.

    A call through a register reaches all functions of its shape that are in tables, or whose addresses its function takes.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self._references: dict[str, References] = {}
        self._in_tables: dict[Shape, Mapping[str, Entry] | None] = {}

    def resolve(self, name: str) -> str:
        """Return the function that an alias stands for; any other name unchanged."""
        return self.module.aliases.get(name, name)

    def of(self, name: str) -> References:
        """Return the names that a function uses, with those that calls through registers use in the copy. Raises PtxError."""
        if name not in self._references:
            self._references[name] = self._with_targets(references(self.module.functions[name], self.module))
        return self._references[name]

    def _with_targets(self, found: References) -> References:
        """Return the names that a function and its copy use, from those that it uses itself."""
        if not (found.taken or found.shapes):
            return found
        known = found.taken & self.entries.keys()
        found = dataclasses.replace(
            found,
            calls=found.calls | found.own,
            variables=found.variables | {self.entries[function].table for function in known},
            taken=found.taken - known - found.own,
        )
        for shape in found.shapes:
            reached = self._targets(found.own, shape)
            found = dataclasses.replace(
                found,
                calls=found.calls | reached.keys(),
                variables=found.variables | {entry.table for entry in reached.values() if entry is not None},
                indirect=found.indirect or not reached,
            )
        return found

    def targets(self, name: str, shape: Shape) -> Mapping[str, Entry | None]:
        """Return the functions that a call of this shape through a register in function `name` can reach; {} if it may reach others.

        Each has the entry of a table with its address; None if the copy knows the address of its own copy only. Raises PtxError.
        """
        return self._targets(self.of(name).own, shape)

    def _targets(self, own: Collection[str], shape: Shape) -> Mapping[str, Entry | None]:
        elsewhere, calls = self._addresses
        if shape not in self._in_tables:
            self._in_tables[shape] = targets(self.module, self.entries, elsewhere, shape)
        if (in_tables := self._in_tables[shape]) is None:
            return {}
        own = [name for name in own if shape_of(self.module.functions[name]) == shape]
        found = {**dict.fromkeys(own), **in_tables}
        return found if len(found) <= MAX_TARGETS and calls[shape] * len(found) <= MAX_CALLS else {}

    @functools.cached_property
    def entries(self) -> Mapping[str, Entry]:
        """An entry for each function that is in a table that never changes."""
        return entries(self.module)

    @functools.cached_property
    def _addresses(self) -> tuple[frozenset[str], Counter[Shape]]:
        """The functions whose addresses are not only in tables that never change, and the number of calls of each shape."""
        functions, variables = self.module.functions, self.module.variables.values()
        found = {
            n
            for v in variables
            if not is_fixed(self.module, v)
            for n in find_initializer_names(v.initializer)
        }
        calls: Counter[Shape] = Counter()
        for function in functions.values():
            used = references(function, self.module)
            found |= used.taken - used.own
            for statement in function.body or ():
                if isinstance(statement, Variable):
                    found.update(find_initializer_names(statement.initializer))
            calls.update(used.shapes)
        return frozenset(found & functions.keys()), calls

    def reach(self, root: str) -> frozenset[str]:
        """Return the functions that a kernel may run, including itself, aliases and their targets. Raises PtxError."""
        seen: set[str] = set()
        todo = [root]
        while todo:
            name = todo.pop()
            if name not in seen and name in self.module.functions:
                seen.add(name)
                todo.append(self.resolve(name))
                todo.extend(self.of(name).calls)
        return frozenset(seen)

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
        """Return those of `functions` that are in `of`, are an alias of one, or call one directly or indirectly."""
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
    if opcode in ("nanosleep", "multimem"):
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

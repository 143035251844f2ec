"""Turn probes that occur at many places into functions: a kernel with a hundred probes then compiles as fast as with one.

The injector puts the same scope, with the same text, before many instructions. Each such scope becomes a call of one function,
whose parameters are the registers that the scope reads from outside. Like the probes, the calls take no virtual time, since they
are between the same marks (docs/timing.md).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

from gpubpf.ptx.flow import callee, find_names
from gpubpf.ptx.module import (
    Address,
    Close,
    Directive,
    Function,
    Group,
    Label,
    Module,
    Name,
    Open,
    PtxInstruction,
    Statement,
    Variable,
    numbered,
)
from gpubpf.record import replace

PREFIX = "cudasim$outlined"  # prefix of the new functions' names
MIN_STATEMENTS = 8  # the fewest statements of a scope that becomes a function
_BEGIN, _END = Directive("gpubpf", "//gpubpf{"), Directive("gpubpf", "//gpubpf}")
_NOT_OUTLINED = {"ret", "exit", "trap", "brx", "alloca", "stacksave", "stackrestore"}


class _Names:
    """The types of the registers of nested scopes, by name."""

    def __init__(self, parent: _Names | None = None) -> None:
        self.parent = parent
        self.types: dict[str, str] = {}
        self.ranges: dict[str, tuple[int, str]] = {}
        self.others: set[str] = set()  # variables other than registers

    def declare(self, variable: Variable) -> None:
        if variable.space != "reg" or variable.vector > 1:
            self.others.add(variable.name)
        elif variable.count is not None:
            self.ranges[variable.name] = variable.count, variable.type
        else:
            self.types[variable.name] = variable.type

    def find(self, name: str) -> str | None:
        """Return the type of a register; `other` for another variable of the function; None for a name that it does not declare."""
        at: _Names | None = self
        while at is not None:
            if name in at.types:
                return at.types[name]
            if name in at.others:
                return "other"
            prefix, number = numbered(name)
            count, kind = at.ranges.get(prefix, (0, ""))
            if 0 <= number < count:
                return kind
            at = at.parent
        return None


@dataclasses.dataclass(slots=True)
class _Scope:
    begin: int  # the index of the statement that opens the scope
    outside: _Names
    end: int = 0
    text: str = ""
    inner: list[_Scope] = dataclasses.field(default_factory=list)


def outline(module: Module) -> Module:
    """Return the module with repeated probes turned into functions. Raises PtxError if a body cannot be read."""
    found: dict[str, list[_Scope]] = {}
    for function in module.functions.values():
        if function.mentions("//gpubpf{"):
            found[function.name] = _scopes(function)
    counts = Counter(scope.text for scopes in found.values() for scope in _all(scopes))
    outlined: dict[str, Function | None] = {}
    replaced: dict[str, Function] = {}
    for name, scopes in found.items():
        function = module.functions[name]
        calls = dict(_calls(function, scopes, counts, outlined))
        if calls:
            replaced[name] = function.with_body(_with_calls(function, calls))
    functions = [function for function in outlined.values() if function is not None]
    if not functions:
        return module
    items = [
        replaced.get(item.name, item) if isinstance(item, Function) and item.defined else item
        for item in module.items
    ]
    return replace(module, items=(*items, *functions))


def _all(scopes: list[_Scope]) -> Iterator[_Scope]:
    for scope in scopes:
        yield scope
        yield from _all(scope.inner)


def _scopes(function: Function) -> list[_Scope]:
    """Return the outermost scopes between marks, with their inner scopes."""
    outermost: list[_Scope] = []
    open_scopes: list[_Scope | None] = []  # None: a scope of the application
    known = _Names()
    for variable in (*function.parameters, *function.returns):
        known.declare(variable)
    marks = 0
    texts: dict[int, str] = {}
    for index, statement in enumerate(function.body or ()):
        if isinstance(statement, Directive):
            if statement.name == "gpubpf":
                kind = statement.text.strip().removeprefix("//gpubpf")
                marks = max(0, marks + (kind == "{") - (kind == "}"))
        elif isinstance(statement, Open):
            scope = _Scope(index, known) if marks else None
            if scope is not None:
                within = next((s for s in reversed(open_scopes) if s is not None), None)
                (within.inner if within is not None else outermost).append(scope)
            open_scopes.append(scope)
            known = _Names(known)
        elif isinstance(statement, Close) and open_scopes:
            assert known.parent is not None
            known = known.parent
            scope = open_scopes.pop()
            if scope is not None:
                scope.end = index
                if index - scope.begin > MIN_STATEMENTS:
                    scope.text = "\n".join(texts[k] for k in range(scope.begin + 1, index) if k in texts)
        elif isinstance(statement, Variable):
            known.declare(statement)
        if marks and not isinstance(statement, Directive):
            texts[index] = str(statement)
    return outermost


def _calls(
    function: Function, scopes: list[_Scope], counts: Counter[str], outlined: dict[str, Function | None]
) -> Iterator[tuple[int, tuple[int, PtxInstruction]]]:
    """Return (first statement, (last statement, call)) for each repeated scope that a call replaces."""
    body = function.body or ()
    for scope in scopes:
        if scope.text and counts[scope.text] > 1 and scope.end:
            if scope.text not in outlined:
                outlined[scope.text] = _outlined(body, scope, f"{PREFIX}{len(outlined)}")
            target = outlined[scope.text]
            if target is not None and all(scope.outside.find(p.name) == p.type for p in target.parameters):
                arguments = Group(tuple(Name(p.name) for p in target.parameters))
                line = body[scope.begin].line
                yield (
                    scope.begin,
                    (scope.end, PtxInstruction("call", (), (Name(target.name), arguments), line=line)),
                )
                continue
        yield from _calls(function, scope.inner, counts, outlined)


def _with_calls(function: Function, calls: dict[int, tuple[int, PtxInstruction]]) -> tuple[Statement, ...]:
    statements: list[Statement] = []
    until = -1
    for index, statement in enumerate(function.body or ()):
        if index in calls:
            until, call = calls[index]
            statements.append(call)
        if index > until:
            statements.append(statement)
    return tuple(statements)


def _outlined(body: tuple[Statement, ...], scope: _Scope, name: str) -> Function | None:
    """Return a function with the statements of a scope; None if the scope depends on its place."""
    inside = _Names()
    nested = [inside]
    parameters: dict[str, Variable] = {}
    labels = {s.name for s in body[scope.begin + 1 : scope.end] if isinstance(s, Label)}
    kept: list[Statement] = []
    for statement in body[scope.begin + 1 : scope.end]:
        match statement:
            case Open():
                nested.append(_Names(nested[-1]))
            case Close():
                nested.pop()
            case Variable():
                if statement.space not in ("reg", "param"):  # param: a call inside the scope
                    return None
                nested[-1].declare(statement)
            case Directive():
                if statement.name not in ("loc", "pragma"):
                    return None
                continue
            case PtxInstruction():
                if statement.opcode in _NOT_OUTLINED:
                    return None
                if statement.opcode in ("vote", "shfl") and "sync" not in statement.modifiers:
                    return None  # depends on which lanes are active together
                if statement.opcode == "call" and (
                    (target := callee(statement)) is None
                    or nested[-1].find(target)
                    or scope.outside.find(target)
                ):
                    return None  # a call through a register
                written = set(find_names(o for o in statement.operands[:1] if not isinstance(o, Address)))
                used = list(find_names(statement.operands))
                if statement.predicate is not None:
                    used.append(statement.predicate)
                for used_name in used:
                    if used_name in labels or nested[-1].find(used_name) is not None:
                        continue
                    kind = scope.outside.find(used_name)
                    if kind is None:
                        if statement.opcode == "bra":
                            return None
                        continue  # a special register, or a name of the module
                    if kind in ("other", "pred") or used_name in written:
                        return None
                    parameters[used_name] = Variable("reg", kind, used_name)
        kept.append(statement)
    return Function(
        "func",
        name,
        tuple(parameters.values()),
        statements=(_BEGIN, *kept, PtxInstruction("ret"), _END),
        line=body[scope.begin].line,
    )

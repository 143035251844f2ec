"""Refuse declarations that contradict each other, as ptxas does."""

from __future__ import annotations

from gpubpf.errors import PtxError
from gpubpf.ptx.module import Directive, Function, Module, Variable

# Directives that all declarations of a `.func` must share.
_SIGNATURE = ("noreturn", "abi_preserve", "abi_preserve_control")


def check_declarations(module: Module) -> None:
    """Compare each declaration of a name with the one before. Raises PtxError, which names the line."""
    before: dict[str, Function | Variable] = {}
    for item in module.items:
        if isinstance(item, Directive):
            continue
        known = before.get(item.name)
        if known is not None and (reason := _conflict(known, item)):
            raise PtxError(f"PTX line {item.line}: {item.name} {reason}")
        # A declaration of a variable after its definition adds nothing.
        if known is None or not (isinstance(known, Variable) and _is_definition(known)):
            before[item.name] = item


def _is_definition(item: Function | Variable) -> bool:
    return item.defined if isinstance(item, Function) else "extern" not in item.linkage


def _conflict(first: Function | Variable, second: Function | Variable) -> str:
    """Return why the second declaration of a name contradicts the first; "" if it does not."""
    if isinstance(first, Function) and isinstance(second, Function):
        return _function_conflict(first, second)
    if isinstance(first, Variable) and isinstance(second, Variable):
        return _variable_conflict(first, second)
    return "is declared as a function and as a variable"


def _function_conflict(first: Function, second: Function) -> str:
    if first.defined:
        return "is defined twice" if second.defined else "is declared after its definition"
    if first.kind != second.kind:
        return "is declared as an entry and as a function"
    # A later declaration may leave out .visible and .weak.
    if first.linkage != second.linkage and (second.linkage or "extern" in first.linkage):
        return "is declared again with another linkage"
    if second.defined and "extern" in first.linkage:
        return "is declared as .extern and defined"
    for directive in _SIGNATURE if first.kind == "func" else ():
        texts = [
            [d.text.split() for d in function.directives if d.name == directive]
            for function in (first, second)
        ]
        if texts[0] != texts[1]:
            return f"is declared with and without the same .{directive}"
    if _shapes(first) != _shapes(second):
        return "is declared again with other parameters"
    return ""


def _shapes(function: Function) -> list[list[tuple[object, ...]]]:
    """Return the properties of a function's parameters and results that must be the same in all of its declarations."""
    return [
        [
            (v.space, v.type, v.vector, v.dimensions, v.alignment if "ptr" not in v.attributes else 8)
            for v in group
        ]
        for group in (function.returns, function.parameters)
    ]


def _variable_conflict(first: Variable, second: Variable) -> str:
    if _is_definition(first) and _is_definition(second):
        return "is defined twice"
    if not second.linkage:  # and the first is .extern
        return "is declared as .extern and defined without linkage"
    same = (first.type, first.vector, len(first.dimensions)) == (
        second.type,
        second.vector,
        len(second.dimensions),
    )
    if not same or any(
        a != b and None not in (a, b) for a, b in zip(first.dimensions, second.dimensions, strict=True)
    ):
        return "is declared again with another type"
    return ""

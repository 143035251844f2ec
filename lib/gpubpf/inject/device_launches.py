"""Kernels that launch kernels (dynamic parallelism): which kernels they launch, and the names of those in the copy.

A kernel launches another one by its address. In the copy of a module, that is the address of a *launched copy* in the same module: the
other kernel without probes, under the name `launched_name`. The copy counts the grids that it launches in the u64 `symbols.GRIDS`.
"""

from __future__ import annotations

from collections.abc import Collection

from gpubpf.ptx.address_flow import Parameter
from gpubpf.ptx.flow import GRID_LAUNCH, callee, find_names
from gpubpf.ptx.module import Address, Close, Function, Group, Name, Open, Operand, PtxInstruction
from gpubpf.ptx.symbols import LAUNCHED


def launched_name(kernel: str) -> str:
    """Return the name of a kernel's copy that other kernels launch."""
    return kernel + LAUNCHED


def launches_grid(call: PtxInstruction) -> bool:
    """Return whether a call launches a grid."""
    return GRID_LAUNCH.fullmatch(callee(call) or "") is not None


def kernels_passed(
    function: Function, kernels: Collection[str], to: Collection[str], number: int
) -> frozenset[Parameter] | None:
    """Return the parameters of `function` that it passes on as argument `number` of the function with one of the names `to`.

    The function may also pass addresses of `kernels` that it takes itself. Return None if it may pass any other address.
    """
    definitions: dict[str, list[PtxInstruction]] = {}
    given: list[Operand] = []
    scopes: list[dict[str, list[Operand]]] = [{}]  # by scope: parameter of a call → the operands stored in it
    for statement in function.body or ():
        if isinstance(statement, Open):
            scopes.append({})
        elif isinstance(statement, Close) and len(scopes) > 1:
            scopes.pop()
        elif not isinstance(statement, PtxInstruction):
            continue
        elif statement.opcode == "st":
            address, *values = statement.operands or (None,)
            if isinstance(address, Address) and "param" in statement.modifiers and not address.offset:
                scopes[-1].setdefault(address.base or "", []).extend(values)
        elif statement.opcode == "call":
            for name in find_names(statement.operands):
                definitions.setdefault(name, []).append(statement)  # the name may be a result of the call
            if callee(statement) not in to:
                continue
            groups = [operand for operand in statement.operands if isinstance(operand, Group)]
            argument = groups[-1].items[number] if groups and len(groups[-1].items) > number else None
            if not isinstance(argument, Name):
                return None
            stored = [value for scope in scopes for value in scope.get(argument.name, ())]
            given += stored or [argument]
        else:
            for name in find_names(statement.operands[:1]):
                definitions.setdefault(name, []).append(statement)
    numbers = {v.name: n for n, v in enumerate(function.parameters) if function.kind == "func"}
    found: set[Parameter] = set()
    seen: set[str] = set()
    for value in given:  # the loop appends to `given`
        if not isinstance(value, Name) or value.offset:
            return None
        if value.name in kernels or value.name in seen:
            continue
        seen.add(value.name)
        for definition in definitions.get(value.name, [None]):
            match definition:
                case PtxInstruction(opcode="mov", operands=(Name(), source)):
                    given.append(source)
                case PtxInstruction(opcode="selp", operands=(Name(), first, second, _)):
                    given += [first, second]
                case PtxInstruction(
                    opcode="ld",
                    modifiers=("param", "b64" | "u64" | "s64"),
                    operands=(Name(), Address(base=str(base), offset=0, index=None)),
                ) if base in numbers:
                    found.add(Parameter(function.name, numbers[base]))
                case _:
                    return None
    return frozenset(found)

"""Find the variables of a module that nothing can write and that may therefore be copied.

is_constant(module, module.variables["$str"])
"""

from __future__ import annotations

from collections.abc import Iterable

from gpubpf.errors import PtxError

from .flow import SYSTEM_FUNCTIONS, Flow, callee, find_initializer_names, find_names
from .module import Address, Function, Module, Operand, Variable

# Passes over a function that follow an address through registers. If more are needed, the address is assumed to escape.
MAX_PASSES = 32


def is_constant(module: Module, variable: Variable) -> bool:
    """Return whether nothing can write a variable: it is initialised, host code cannot name it, and no code in the module writes it.

    A compiler's literals (`$str`, `__unnamed_1`) are constant wherever their address goes. Function-local statics (`_ZZ…`) and the
    tables of libdevice (`__cudart_…`) are constant unless they are written or their address escapes. Other variables are constant
    only if nothing but printf and assert receives them: the host may have written a variable at namespace scope.
    """
    if variable.name not in module.known_constants:
        module.known_constants[variable.name] = _is_constant(module, variable)
    return module.known_constants[variable.name]


def _is_constant(module: Module, variable: Variable) -> bool:
    """See `is_constant`. This may read all functions of the module."""
    if variable.initializer is None or variable.linkage or "managed" in variable.attributes:
        return False
    name = variable.name
    literal = name.startswith(("$", "_$_str", "__unnamed_")) and variable.type == "b8"
    if literal:
        return True
    private = name.startswith(("_ZZ", "__cudart_", "__internal_"))
    if any(name in find_initializer_names(v.initializer) for v in module.variables.values()):
        return False
    uses = set()
    for function in module.functions.values():
        if function.mentions(name):
            try:
                uses |= _uses(function, name)
                declared = (s.initializer for s in function.body or () if isinstance(s, Variable))
                if any(name in find_initializer_names(initializer) for initializer in declared):
                    return False
            except PtxError:  # assume the worst of a function that cannot be parsed
                return False
    return uses <= ({"read", "system"} if private else {"system"})


def _uses(function: Function, variable: str) -> set[str]:
    """Return what a function does with a variable: `read`, `system` (passed to a system function such as printf), `written` (or
    its address escapes).

    This is conservative: addresses are followed through registers regardless of order.
    """
    flow = Flow(function.body or ())

    def seen(index: int, operands: Iterable[Operand]) -> set[tuple[int | None, str]]:
        """Return the names in operands, each with its declaration in the body, since each call declares its own parameters.

        An element of a vector register has the name of the register."""
        names = {name.partition(".")[0] for name in find_names(operands)}
        return {(flow.declaration(index, name), name) for name in names}

    tainted: set[tuple[int | None, str]] = {(None, variable)}
    instructions = [
        (i, s, {name.partition(".")[0] for name in find_names(s.operands)}) for i, s in flow.instructions()
    ]
    uses: set[str] = set()
    results = {(None, r.name) for r in function.returns}
    grown = True
    passes = 0
    while grown:
        grown = False
        passes += 1
        if passes > MAX_PASSES:
            return {"written"}
        for index, statement, named in instructions:
            opcode, operands = statement.opcode, statement.operands
            # A quick check: most instructions name no tainted variable or register.
            if named.isdisjoint(name for _, name in tainted) or tainted.isdisjoint(seen(index, operands)):
                continue
            new: set[tuple[int | None, str]] = set()
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

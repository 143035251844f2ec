"""Find the functions that a call through a register can reach, so that the copy of a kernel can call its own copies of them.

The register holds an address from a table: that of an object's class, which the compiler names `_ZTV…`, or a constant array of
function pointers. The table is in the application's module, and holds the addresses of the original functions. So the copy compares
the register with the entries of the tables, and calls the copy of the function whose entry it equals (body.py). The agent reads the
entries when it loads the copy, because nothing says them before.

    calls = indirect_calls(function.body)               # {21: IndirectCall(21, 29, 30, "%rd8", Shape(…))}
    entries(module)                                     # {"_ZN5Shape4growEf": Entry("_ZTV5Shape", 24, True)}

Tables of classes, and constant arrays of functions, never change. The program may change any other variable. The agent can read such
a table only if it loads the copy together with the module.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from .constants import is_constant
from .flow import PLAIN, callee, find_names
from .module import (
    Close,
    Directive,
    Function,
    Group,
    Initializer,
    Label,
    Module,
    Name,
    Open,
    Operand,
    PtxInstruction,
    Statement,
    Variable,
    type_size,
)
from .tokens import parse_integer

# Virtual tables, and those of objects under construction (Itanium C++ ABI 5.1.4.1 and 5.1.4.4). With -rdc, nvcc puts the name of the
# file before those of classes in anonymous namespaces.
_TABLE = re.compile(r"(?:__nv_static_[0-9]{1,5}_\w*_)?_ZT[VC]")
# A text that declares this function is not all code of its module: a call may reach functions that it does not have.
PARTIAL = "gpubpf_partial"
# A call is followed if at most this many functions have its shape: the copy compares the address with that of each,
MAX_TARGETS = 64
# and if all calls of this shape together become at most this many calls.
MAX_CALLS = 4000

_MOST_PASSES = 64  # over a body, to follow addresses
_MOST_APART = 16  # functions of a body whose addresses are followed one by one

_PROTOTYPE = re.compile(r"\.callprototype\s*(?:\(([^()]*)\))?\s*_\s*(?:\(([^()]*)\))?\s*;")
_PARAMETER = re.compile(r"\s*\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+_\s*(?:\[\s*(\w+)\s*\])?\s*")


@dataclass(frozen=True)
class Shape:
    """The size and alignment, in bytes, of a function's results and parameters. A call reaches only functions of its own shape."""

    results: tuple[tuple[int, int], ...]
    parameters: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Entry:
    """An entry of a table: the table's name, and the offset in bytes. fixed: the entry never changes."""

    table: str
    offset: int
    fixed: bool


@dataclass(frozen=True)
class IndirectCall:
    """A call through a register, with the scope around it: the indices of `{`, the call and `}` in the body.

    This scope only passes the call's arguments and result, and computes with registers.
    """

    begin: int
    call: int
    end: int
    register: str
    shape: Shape


def indirect_calls(body: Sequence[Statement]) -> dict[int, IndirectCall]:
    """Return the calls through registers in a body that can be followed, by the index of the `{` before them."""
    found: dict[int, IndirectCall] = {}
    begin: int | None = None
    for index, statement in enumerate(body):
        if isinstance(statement, Open):
            begin = index
        elif isinstance(statement, Close):
            if begin is not None and (call := _call_in(body, begin, index)) is not None:
                found[begin] = call
            begin = None
    return found


def _call_in(body: Sequence[Statement], begin: int, end: int) -> IndirectCall | None:
    """Return the call through a register in a scope. Return None without one, or if the scope has instructions that are not `PLAIN`.

    Besides passing arguments, nvcc computes them there, in unrolled loops.
    """
    call: int | None = None
    prototypes: dict[str, str] = {}
    declared: set[str] = set()
    written: set[str] = set()
    label = ""
    for index in range(begin + 1, end):
        match body[index]:
            case PtxInstruction(opcode="call"):
                if call is not None:
                    return None
                call = index
            case PtxInstruction(opcode=opcode, modifiers=modifiers, operands=operands, predicate=None):
                passing = opcode in ("ld", "st") and modifiers[:1] == ("param",)
                if not passing and opcode not in PLAIN:
                    return None
                if call is None and opcode != "st":
                    written.update(find_names(operands[:1]))
            case Label(name=label):
                pass
            case Directive(name="callprototype", text=text):
                prototypes[label] = text
            case Variable(space="param" | "reg", name=name, count=None):
                declared.add(name)
            case Directive(name="loc"):
                pass
            case _:
                return None
    if call is None:
        return None
    instruction = body[call]
    assert isinstance(instruction, PtxInstruction)
    names = [operand.name for operand in instruction.operands if isinstance(operand, Name)]
    passed = set(find_names(operand for operand in instruction.operands if isinstance(operand, Group)))
    if len(names) != 2 or not names[0].startswith("%") or len(prototypes) != 1:
        return None
    if names[0] in written | declared or not passed <= declared:
        return None
    shape = _prototype(prototypes.get(names[1], ""))
    return IndirectCall(begin, call, end, names[0], shape) if shape is not None else None


def _prototype(text: str) -> Shape | None:
    match = _PROTOTYPE.fullmatch(text.strip())
    if match is None:
        return None
    results, parameters = (list(_sizes(part or "")) for part in match.groups())
    if None in results or None in parameters:
        return None
    return Shape(tuple(r for r in results if r), tuple(p for p in parameters if p))


def _sizes(parameters: str) -> Iterator[tuple[int, int] | None]:
    """Yield size and alignment of each parameter in a prototype; None for one that is not in memory of its own."""
    for text in parameters.split(",") if parameters.strip() else ():
        if (match := _PARAMETER.fullmatch(text)) is None:
            yield None
            continue
        align, kind, count = match.groups()
        made = Variable(
            "param",
            kind,
            "_",
            align=parse_integer(align) if align else None,
            dimensions=(parse_integer(count),) if count else (),
        )
        yield made.size, made.alignment


def shape_of(function: Function) -> Shape | None:
    """Return the shape of a function; None if a register passes a parameter or result."""
    if any(v.space != "param" for v in (*function.returns, *function.parameters)):
        return None
    results, parameters = (
        tuple((v.size, v.alignment) for v in group) for group in (function.returns, function.parameters)
    )
    return Shape(results, parameters)


def entries(module: Module) -> dict[str, Entry]:
    """Return an entry for each function that is in a table, preferably one that never changes."""
    found: dict[str, Entry] = {}
    for variable in module.variables.values():
        if not is_table(module, variable):
            continue
        fixed = _is_fixed(module, variable)
        for number, value in enumerate(_words(variable)):
            if isinstance(value, Name) and not value.offset and value.name in module.functions:
                entry = Entry(variable.name, 8 * number, fixed)
                found[value.name] = max(found.get(value.name, entry), entry, key=lambda one: one.fixed)
    return found


def is_table(module: Module, variable: Variable) -> bool:
    """Return whether a variable has addresses of functions, in words of their own."""
    if variable.space not in ("global", "const") or variable.vector != 1 or type_size(variable.type) != 8:
        return False
    return any(isinstance(value, Name) and value.name in module.functions for value in _words(variable))


def _words(variable: Variable) -> tuple[Initializer, ...]:
    value = variable.initializer
    return value if isinstance(value, tuple) else () if value is None else (value,)


def _is_fixed(module: Module, variable: Variable) -> bool:
    """Return whether a table never changes.

    It is one of virtual functions, or a constant array of a function: code on the host can name any other variable. Linked code may
    define it several times, all alike, so its linkage does not matter.
    """
    if _TABLE.match(variable.name):
        return True
    return variable.name.startswith("_ZZ") and is_constant(module, replace(variable, linkage=()))


def staying(body: Sequence[Statement], functions: Collection[str]) -> frozenset[str]:
    """Return those of `functions` whose addresses stay in the thread. A body takes all their addresses.

    Of many functions, none is returned if the address of one leaves.
    """
    if _stay(body, functions):
        return frozenset(functions)
    return frozenset(one for one in functions if len(functions) <= _MOST_APART and _stay(body, [one]))


def _stay(body: Sequence[Statement], functions: Collection[str]) -> bool:
    """Return whether the addresses of `functions` stay in the thread: in registers and local memory, until a call.

    This is conservative: addresses are followed through registers regardless of order, and through all local memory.
    """
    held = set(functions)
    # Local variables, and registers with their addresses.
    places = {s.name for s in body if isinstance(s, Variable) and s.space == "local"}
    in_memory = escape = False
    before = -1
    instructions = [statement for statement in body if isinstance(statement, PtxInstruction)]
    for _ in range(_MOST_PASSES):
        if before == len(held) + len(places) + in_memory:
            return not (in_memory and escape)
        before = len(held) + len(places) + in_memory
        for instruction in instructions:
            opcode, operands = instruction.opcode, instruction.operands
            local = "local" in instruction.modifiers
            first, read = _bases(operands[:1]), _bases(operands[1:])
            if opcode == "call":
                passed = (first | read) - {callee(instruction)}
                escape |= not places.isdisjoint(passed)
                if not held.isdisjoint(passed):
                    return False
            elif opcode == "ld":
                if not held.isdisjoint(read):
                    return False
                held |= first if local and in_memory else set()
            elif opcode == "st":
                if (not held.isdisjoint(read) and not local) or not held.isdisjoint(first):
                    return False
                in_memory |= not held.isdisjoint(read)
                escape |= not places.isdisjoint(read)
            else:
                if not places.isdisjoint(read):
                    places |= first
                    escape |= opcode not in ("mov", "add", "sub", "mad", "selp")
                if not held.isdisjoint(read):
                    if opcode not in ("mov", "selp"):
                        return False
                    held |= first
    return False


def _bases(operands: Sequence[Operand]) -> set[str]:
    """Return the names in operands; of an element of a vector register, the register."""
    return {name.partition(".")[0] if name.startswith("%") else name for name in find_names(operands)}


def direct(call: PtxInstruction, name: str) -> PtxInstruction:
    """Return a call through a register as a call of the function `name`."""
    at = next(n for n, operand in enumerate(call.operands) if isinstance(operand, Name))
    arguments = (operand for operand in call.operands[at + 1 :] if isinstance(operand, Group))
    return replace(call, operands=(*call.operands[:at], Name(name), *arguments))

"""Find the functions that a call through a register can reach, so that the copy of a kernel can call its own copies of them.

The register holds an address from a table: that of an object's class, which the compiler names `_ZTV…`, or another variable with
function pointers. The table is in the application's module, and holds the addresses of the original functions. So the copy compares
the register with the entries of the tables, and calls the copy of the function whose entry is equal (body.py). The agent reads the
entries when it loads the copy, because the PTX does not contain them. Or the register holds an address that a kernel takes and passes
on; address_flow.py follows such addresses.

    calls = indirect_calls(function.body)               # {21: IndirectCall(21, 29, 30, "%rd8", Shape(…))}
    entries(module)                                     # {"_ZN5Shape4growEf": Entry("_ZTV5Shape", 24, True)}

Tables of classes, and constant arrays of functions, never change. The program may change any other variable. The agent can read such
a table only if it loads the copy together with the module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from gpubpf.record import Record, replace

from .constants import is_constant
from .flow import find_names
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
    PtxInstruction,
    Statement,
    Variable,
    type_size,
)
from .opcodes import facts
from .tokens import parse_integer

# Virtual tables, and those of objects under construction (Itanium C++ ABI 5.1.4.1 and 5.1.4.4). With -rdc, nvcc puts the name of the
# file before those of classes in anonymous namespaces.
_TABLE = re.compile(r"(?:__nv_static_[0-9]{1,5}_\w*_)?_ZT[VC]")
# A PTX text that declares this function is only a part of its module's code: a call may reach functions outside of the text.
PARTIAL = "gpubpf_partial"
# A call is followed only if at most this many functions have its shape, because the copy compares the address with each of theirs.
MAX_TARGETS = 64
# All followed calls of one shape may together become at most this many direct calls.
MAX_CALLS = 4000

MOST_APART = 16  # most functions whose addresses are followed one by one in a body

_PROTOTYPE = re.compile(r"\.callprototype\s*(?:\(([^()]*)\))?\s*_\s*(?:\(([^()]*)\))?\s*;")
_PARAMETER = re.compile(r"\s*\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+_\s*(?:\[\s*(\w+)\s*\])?\s*")


class Shape(Record):
    """The size and alignment, in bytes, of a function's results and parameters. A call reaches only functions of its own shape."""

    results: tuple[tuple[int, int], ...]
    parameters: tuple[tuple[int, int], ...]


class Entry(Record):
    """An entry of a table.

    table   the table's name
    offset  the entry's offset in the table, in bytes
    fixed   whether the entry never changes
    """

    table: str
    offset: int
    fixed: bool


class IndirectCall(Record):
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
    """Return the call through a register in a scope; None without such a call, or if the scope has instructions that are not simple.

    nvcc's scopes pass the arguments, and in unrolled loops also compute them.
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
            case PtxInstruction(opcode=opcode, modifiers=modifiers, operands=operands, predicate=None) as one:
                passing = opcode in ("ld", "st") and modifiers[:1] == ("param",)
                if not passing and not facts(one).is_simple:
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
    """Yield the size and the alignment, in bytes, of each parameter in a prototype; None for a parameter in a register."""
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
            if isinstance(value, Name) and not value.offset and _is_function(module, value.name):
                entry = Entry(variable.name, 8 * number, fixed)
                found[value.name] = max(found.get(value.name, entry), entry, key=lambda one: one.fixed)
    return found


def is_table(module: Module, variable: Variable) -> bool:
    """Return whether a variable is an array of 64-bit words in which some are addresses of functions."""
    if variable.space not in ("global", "const") or variable.vector != 1 or type_size(variable.type) != 8:
        return False
    if "managed" in variable.attributes:  # shared by all contexts, so a new one does not reset it
        return False
    return any(isinstance(value, Name) and _is_function(module, value.name) for value in _words(variable))


def _is_function(module: Module, name: str) -> bool:
    """Return whether a name is that of a function, not of a kernel: calls do not reach kernels."""
    return name in module.functions and module.functions[name].kind == "func"


def _words(variable: Variable) -> tuple[Initializer, ...]:
    value = variable.initializer
    return value if isinstance(value, tuple) else () if value is None else (value,)


def _is_fixed(module: Module, variable: Variable) -> bool:
    """Return whether a table never changes: it is a table of virtual functions, or a constant array of a function.

    Host code can name, and so change, any other variable. Linked code may define the table several times with the same content, so its
    linkage does not matter.
    """
    if _TABLE.match(variable.name):
        return True
    return variable.name.startswith("_ZZ") and is_constant(module, replace(variable, linkage=()))


def direct(call: PtxInstruction, name: str) -> PtxInstruction:
    """Return a direct call of the function `name` with the operands of a call through a register."""
    at = next(n for n, operand in enumerate(call.operands) if isinstance(operand, Name))
    arguments = (operand for operand in call.operands[at + 1 :] if isinstance(operand, Group))
    return replace(call, operands=(*call.operands[:at], Name(name), *arguments))

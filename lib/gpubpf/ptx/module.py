"""The model of PTX that injection, listing and the embedded device share: operands, statements, functions, modules.

    module = parser.parse(text)
    module.functions["_Z9vectorAddPKfS0_Pfi"].body      # statements, parsed on first use
    render(module)                                      # PTX text again

Statements are immutable values: a pass builds new ones (`replace`) and never changes its input.
"""

from __future__ import annotations

import functools
import re
import struct
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from gpubpf.errors import PtxError
from gpubpf.record import Record, field, replace

from .tokens import parse_integer, parse_size

_DIGITS = "0123456789"


def numbered(name: str) -> tuple[str, int]:
    """Split a name into its prefix and its number: ("%r", 12) for `%r12`, register 12 of `%r<N>`. Without digits, the number is -1."""
    prefix = name.rstrip(_DIGITS)
    number = name[len(prefix) :]
    return prefix, int(number) if 0 < len(number) < 10 and str(int(number)) == number else -1


# --- operands --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Name:
    """A register (`%tid.x` includes the component, `%r1.b2` the byte), variable, function or label.

    offset    8 in `table+8`, in bytes
    negative  True for `-%r1`, an operand of vmad
    """

    name: str
    offset: int = 0
    negative: bool = False

    @property
    def whole(self) -> str:
        """The name without the bytes or half-words that a video instruction chooses: `%r1` of `%r1.b2` and `%r1.h10`."""
        base, _, selector = self.name.rpartition(".")
        return base if base and len(selector) > 1 and selector[0] in "bh" else self.name

    def __str__(self) -> str:
        # A negative offset gives `a+-4`: ptxas does not accept `a-4`.
        return f"{'-' * self.negative}{self.name}{f'+{self.offset}' if self.offset else ''}"


@dataclass(frozen=True, slots=True)
class Not:
    """`!%p1`, a negated predicate operand."""

    operand: Name

    def __str__(self) -> str:
        return f"!{self.operand}"


@dataclass(frozen=True, slots=True)
class Immediate:
    """A literal as written: `12`, `-1`, `0xffU`, `0f3F800000`, `0d3FF0000000000000`, `1.5`."""

    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def is_float(self) -> bool:
        text = self.text.lstrip("-+").lower()
        return text[:2] in ("0f", "0d") or (not text.startswith("0x") and any(c in text for c in ".e"))

    @property
    def integer(self) -> int:
        """The value of an integer literal. Raises PtxError for a floating-point literal."""
        if self.is_float:
            raise PtxError(f"{self.text} is not an integer")
        return parse_integer(self.text)

    @property
    def real(self) -> float:
        """The value as a double. `0f…` and `0d…` are bit patterns (PTX ISA 4.5.2)."""
        text = self.text
        sign = -1.0 if text.startswith("-") else 1.0
        text = text.lstrip("-+")
        if text[:2] in ("0f", "0F"):
            return sign * float(struct.unpack(">f", bytes.fromhex(text[2:]))[0])
        if text[:2] in ("0d", "0D"):
            return sign * float(struct.unpack(">d", bytes.fromhex(text[2:]))[0])
        return sign * (float(text) if self.is_float else float(parse_integer(text)))


@dataclass(frozen=True, slots=True)
class Address:
    """`[base+offset]`, `[a].unified`, `array[%r1+2]`, which has no brackets around it (PTX ISA 6.4.2).

    base         a register or variable; None for an absolute address
    offset       in bytes
    coordinates  as in `[tensor, {%r1, %r2}]`
    index        a register: the number of an element of the array `base`, which is added to `offset` in elements
    unit         bytes of an element. Like ptxas, take the sum of index and offset as an unsigned number of 32 bits.
    """

    base: str | None
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()
    unified: bool = False
    index: str | None = None
    unit: int = 1

    def __str__(self) -> str:
        if self.index is not None:
            return f"{self.base}[{Name(self.index, self.offset // self.unit)}]"
        inside = self.base if self.base is not None else str(self.offset)
        if self.base is not None and self.offset:
            inside += f"+{self.offset}"  # `[a+-4]`: ptxas does not accept `[a-4]`
        return "[" + ", ".join([inside, *map(str, self.coordinates)]) + "]" + ".unified" * self.unified


@dataclass(frozen=True, slots=True)
class Vector:
    """`{%f1, %f2, %f3, %f4}`"""

    items: tuple[Operand, ...]

    def __str__(self) -> str:
        return "{" + ", ".join(map(str, self.items)) + "}"


@dataclass(frozen=True, slots=True)
class Pair:
    """`%p1|%p2`: two destinations."""

    first: Operand
    second: Operand

    def __str__(self) -> str:
        return f"{self.first}|{self.second}"


@dataclass(frozen=True, slots=True)
class Group:
    """`(param0, param1)`: the arguments or results of a call."""

    items: tuple[Operand, ...]

    def __str__(self) -> str:
        return "(" + ", ".join(map(str, self.items)) + ")"


Operand = Name | Not | Immediate | Address | Vector | Pair | Group

# --- statements ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PtxInstruction:
    """`@!%p1 ld.global.f32 %f1, [%rd1+4];`: opcode `ld`, modifiers `("global", "f32")`."""

    opcode: str
    modifiers: tuple[str, ...] = ()
    operands: tuple[Operand, ...] = ()
    predicate: str | None = None
    negated: bool = False
    line: int = 0

    @property
    def full_name(self) -> str:
        """The opcode with its modifiers: `ld.global.f32`."""
        return ".".join((self.opcode, *self.modifiers))

    def __str__(self) -> str:
        guard = "" if self.predicate is None else f"@{'!' if self.negated else ''}{self.predicate} "
        return f"{guard}{self.full_name} {', '.join(map(str, self.operands))}".rstrip() + ";"


@dataclass(frozen=True, slots=True)
class Label:
    """A label: `name:`."""

    name: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.name}:"


@dataclass(frozen=True, slots=True)
class Open:
    """`{`: a nested scope of registers, parameters and labels."""

    line: int = 0

    def __str__(self) -> str:
        return "{"


@dataclass(frozen=True, slots=True)
class Close:
    """`}`: the end of a nested scope."""

    line: int = 0

    def __str__(self) -> str:
        return "}"


@dataclass(frozen=True, slots=True)
class Directive:
    """Any other statement that starts with a dot, as text: `.loc 1 3 0`, `.pragma "nounroll";`.

    `name` is the directive without its dot; `names` the identifiers in it (`.branchtargets`, `.calltargets`, `.alias`).
    The injector's marks `//gpubpf{`, `//gpubpf}`, `//gpubpf+N` and `//gpubpf@N` (docs/timing.md) have the name `gpubpf`.
    """

    name: str
    text: str
    names: tuple[str, ...] = ()
    line: int = 0

    def __str__(self) -> str:
        return self.text


AT_LINE = "//gpubpf@"  # begins a mark with the line that the next instruction has in the original

_SIZES = {"pred": 1, "texref": 8, "surfref": 8, "samplerref": 8}
_SIZES |= {"e4m3": 1, "e5m2": 1, "e4m3x2": 2, "e5m2x2": 2, "e4m3x4": 4, "e5m2x4": 4}


def type_size(type_name: str) -> int:
    """Return the bytes of a fundamental type: 4 for `u32` and `f16x2`, 16 for `b128`. Raises PtxError."""
    if type_name in _SIZES:
        return _SIZES[type_name]
    if type_name in ("f16x2", "bf16x2", "tf32"):
        return 4
    if type_name == "bf16":
        return 2
    digits = type_name.lstrip("abcdefghijklmnopqrstuvwxyz")
    if digits not in ("8", "16", "32", "64", "128"):
        raise PtxError(f"unknown PTX type .{type_name}")
    return int(digits) // 8


@dataclass(frozen=True, slots=True)
class Generic:
    """`generic(table)+4` in an initializer: the generic address of a variable plus the offset of `operand`."""

    operand: Name

    def __str__(self) -> str:
        # A negative offset gives `+-4`: ptxas does not accept `-4`.
        offset = f"+{self.operand.offset}" if self.operand.offset else ""
        return f"generic({self.operand.name}){offset}"


@dataclass(frozen=True, slots=True)
class Masked:
    """`0xFF00(table)` in an initializer: one byte of an address (PTX ISA 5.4.4, mask())."""

    mask: int
    operand: Name | Generic

    def __str__(self) -> str:
        return f"{self.mask:#X}({self.operand})"


Initializer = Immediate | Name | Generic | Masked | tuple["Initializer", ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A declaration in any state space, including registers and parameters.

    count       N in `%r<N>` (registers %r0 … %r(N-1))
    dimensions  the dimensions of an array; None for `[]`
    """

    space: str  # reg, local, shared, global, const, param, tex, sreg
    type: str
    name: str
    vector: int = 1
    align: int | None = None
    count: int | None = None
    dimensions: tuple[int | None, ...] = ()
    initializer: Initializer | None = None
    linkage: tuple[str, ...] = ()  # visible, extern, weak, common
    attributes: tuple[str, ...] = ()  # managed, ptr, global …
    line: int = 0

    @property
    def size(self) -> int:
        """The size in bytes; 0 for an array of unknown length."""
        total = type_size(self.type) * self.vector
        for length in self.dimensions:
            total *= length or 0
        return total

    @property
    def alignment(self) -> int:
        """The alignment in bytes; the natural alignment of the type if none is given."""
        return self.align or type_size(self.type) * self.vector

    def declares(self, name: str) -> bool:
        """Return whether this declares a name: `%r<9>` declares `%r8`, but not `%r`.

        As for ptxas, `%r1<9>` declares nothing, because `%r12` is always register 12 of `%r<N>`.
        """
        if self.count is None:
            return name == self.name
        prefix, number = numbered(name)
        return prefix == self.name and 0 <= number < self.count

    def declaration(self) -> str:
        """Return the declaration without its linkage and `;`."""
        words = [f".{self.space}"]
        if "managed" in self.attributes:
            words.append(".attribute(.managed)")
        if self.space == "param" and "ptr" in self.attributes:
            words.append(f".{self.type} .ptr")
            words += [f".{a}" for a in self.attributes if a in ("global", "const", "local", "shared")]
            if self.align:
                words.append(f".align {self.align}")
        else:
            if self.align:
                words.append(f".align {self.align}")
            if self.vector > 1:
                words.append(f".v{self.vector}")
            words.append(f".{self.type}")
        name = self.name if self.count is None else f"{self.name}<{self.count}>"
        name += "".join(f"[{'' if d is None else d}]" for d in self.dimensions)
        words.append(name)
        if self.initializer is not None:
            words.append(f"= {render_initializer(self.initializer)}")
        return " ".join(words)

    def __str__(self) -> str:
        return "".join(f".{word} " for word in self.linkage) + self.declaration() + ";"


def render_initializer(value: Initializer) -> str:
    if isinstance(value, tuple):
        return "{" + ", ".join(map(render_initializer, value)) + "}"
    return str(value)


Statement = PtxInstruction | Label | Open | Close | Directive | Variable


def with_spaces(
    body: Iterable[Statement], variables: Mapping[str, Variable]
) -> Iterator[tuple[Statement, Mapping[str, str]]]:
    """Yield the statements of a body, each with variable → space for all variables that the statement can name.

    variables: the variables of the module
    """
    spaces: ChainMap[str, str] = ChainMap({name: variable.space for name, variable in variables.items()})
    for statement in body:
        if isinstance(statement, Open):
            spaces = spaces.new_child()
        elif isinstance(statement, Close):
            spaces = spaces.parents
        elif isinstance(statement, Variable):
            spaces[statement.name] = statement.space
        yield statement, spaces


# --- functions and modules -------------------------------------------------------------------------


class UnparsedBody(Protocol):
    """The text of a function's body, parsed on demand."""

    def mentions(self, name: str) -> bool:
        """Return whether the text contains `name` anywhere."""

    def parse(self) -> tuple[Statement, ...]:
        """Return the statements. Raises PtxError, which names the line."""


class Function(Record):
    """`.entry` or `.func`. `body` is None for a declaration."""

    kind: str  # entry or func
    name: str
    parameters: tuple[Variable, ...] = ()
    returns: tuple[Variable, ...] = ()
    linkage: tuple[str, ...] = ()
    directives: tuple[Directive, ...] = ()  # .maxntid 256, 1, 1 …
    line: int = 0
    statements: tuple[Statement, ...] | None = None
    unparsed: UnparsedBody | None = field(default=None, repr=False, compare=False)

    @property
    def defined(self) -> bool:
        return self.statements is not None or self.unparsed is not None

    def mentions(self, name: str) -> bool:
        """Return whether the text of the body contains `name` anywhere: a quick check before parsing it."""
        if self.unparsed is not None:
            return self.unparsed.mentions(name)
        return any(name in str(s) for s in self.statements or ())

    def block_limit(self, name: str) -> tuple[int, int, int] | None:
        """Return the block dimensions in the directive `name` (`reqntid` or `maxntid`), or None without it (PTX ISA 11.4)."""
        for directive in self.directives:
            if directive.name == name:
                numbers = [n for text in directive.text.split(None, 1)[1:] for n in text.split(",")]
                x, y, z = ([parse_size(number) for number in numbers] + [1, 1, 1])[:3]
                return x, y, z
        return None

    @functools.cached_property
    def body(self) -> tuple[Statement, ...] | None:
        """The statements between the outer braces, parsed on first use.

        Raises PtxError, which names the line and the function.
        """
        try:
            return self.unparsed.parse() if self.unparsed is not None else self.statements
        except PtxError as error:
            raise PtxError(f"{error}, in {self.name}") from None

    def with_body(self, statements: tuple[Statement, ...] | None) -> Function:
        """Return this function with another body, or as a declaration if `statements` is None."""
        return replace(self, statements=statements, unparsed=None)

    @property
    def declaration(self) -> Function:
        """This function without its body, as it can be declared before its definition.

        ptxas requires the same directives (`.noreturn`, `.abi_preserve`) in each declaration of a `.func`. The directives of a kernel
        (`.maxntid`) belong to its definition alone.
        """
        directives = self.directives if self.kind == "func" else ()
        return replace(self, directives=directives, statements=None, unparsed=None)

    def __str__(self) -> str:
        head = "".join(f".{word} " for word in self.linkage) + f".{self.kind} "
        head += "".join(f"{d.text} " for d in self.directives if d.name == "attribute")
        if self.returns:
            head += f"({', '.join(p.declaration() for p in self.returns)}) "
        head += self.name
        if self.parameters or self.kind == "func":
            head += "(" + ",\n\t".join(p.declaration() for p in self.parameters) + ")"
        head += "".join(f"\n{d.text}" for d in self.directives if d.name != "attribute")
        if self.body is None:
            return head + ";"
        lines = ["\t" + str(s) if not isinstance(s, Label) else str(s) for s in self.body]
        return "\n".join([head, "{", *lines, "}"])


Item = Function | Variable | Directive


class Module(Record):
    """A PTX translation unit.

    target           the architecture and options: `("sm_75", "debug")`
    known_constants  a cache of the results of `constants.is_constant`
    """

    version: tuple[int, int]
    target: tuple[str, ...]
    address_size: int
    items: tuple[Item, ...]
    known_constants: dict[str, bool] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def functions(self) -> dict[str, Function]:
        """The functions by name. A definition replaces declarations."""
        found: dict[str, Function] = {}
        for item in self.items:
            if isinstance(item, Function) and (item.name not in found or item.defined):
                found[item.name] = item
        return found

    @functools.cached_property
    def variables(self) -> dict[str, Variable]:
        """The module-scope variables by name. A definition replaces an `.extern`."""
        found: dict[str, Variable] = {}
        for item in self.items:
            if isinstance(item, Variable) and (item.name not in found or "extern" not in item.linkage):
                found[item.name] = item
        return found

    @functools.cached_property
    def aliases(self) -> dict[str, str]:
        """The `.alias` names, each with the function that it stands for."""
        found = (item.names for item in self.items if isinstance(item, Directive) and item.name == "alias")
        return {names[0]: names[1] for names in found if len(names) == 2}

    @property
    def entries(self) -> dict[str, Function]:
        """The kernels that are defined in this module, by (mangled) name."""
        return {n: f for n, f in self.functions.items() if f.kind == "entry" and f.defined}

    @property
    def sm(self) -> str:
        """The architecture, such as `sm_90a`."""
        return self.target[0]

    @property
    def architecture(self) -> int:
        """The architecture as a number: 90 for `sm_90a`; 0 if the target has none."""
        digits = re.search("[0-9]{1,4}", self.sm)
        return int(digits[0]) if digits is not None else 0


def render(module: Module) -> str:
    """Return the PTX text of a module, without the comments and layout of the original."""
    head = [
        f".version {module.version[0]}.{module.version[1]}",
        f".target {', '.join(module.target)}",
        f".address_size {module.address_size}",
        "",
    ]
    return "\n".join([*head, *map(str, module.items), ""])

"""Parse PTX text into a `Module`, the model of PTX that injection, listing and the embedded device share, and render it.

    module = parse(text)
    module.functions["_Z9vectorAddPKfS0_Pfi"].body      # statements, parsed on first use
    render(module)                                      # PTX text again

Statements are values; a pass builds new ones (`dataclasses.replace`) and never changes those it got.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gpubpf.errors import PtxError

from .tokens import Lexer, Token, strip_comments

# --- operands --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Name:
    """A register (`%tid.x` with its component), variable, function or label. `offset`: as in `table+8`."""

    name: str
    offset: int = 0

    def __str__(self) -> str:
        # A negative offset gives `a+-4`: ptxas does not accept `a-4`.
        return f"{self.name}+{self.offset}" if self.offset else self.name


@dataclass(frozen=True, slots=True)
class Not:
    """`!%p1`, a negated predicate operand."""

    operand: Name

    def __str__(self) -> str:
        return f"!{self.operand}"


@dataclass(frozen=True, slots=True)
class Immediate:
    """A literal as it was written: `12`, `-1`, `0xffU`, `0f3F800000`, `0d3FF0000000000000`, `1.5`."""

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
    """`[base+offset]`, `[a].unified`. `base` is None for an absolute address. `coordinates`: as in `[tensor, {%r1, %r2}]`."""

    base: str | None
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()
    unified: bool = False

    def __str__(self) -> str:
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

    def __str__(self) -> str:
        guard = "" if self.predicate is None else f"@{'!' if self.negated else ''}{self.predicate} "
        name = ".".join((self.opcode, *self.modifiers))
        return f"{guard}{name} {', '.join(map(str, self.operands))}".rstrip() + ";"


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
    The marks `//gpubpf{`, `//gpubpf}` and `//gpubpf+N` around what the injector added (docs/timing.md) have the name `gpubpf`.
    """

    name: str
    text: str
    names: tuple[str, ...] = ()
    line: int = 0

    def __str__(self) -> str:
        return self.text


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
    """`generic(table)+4` in an initialiser: the generic address of a variable plus the offset of `operand`."""

    operand: Name

    def __str__(self) -> str:
        offset = f"{self.operand.offset:+d}" if self.operand.offset else ""
        return f"generic({self.operand.name}){offset}"


@dataclass(frozen=True, slots=True)
class Masked:
    """`0xFF00(table)` in an initialiser: one byte of an address (PTX ISA 5.4.4, mask())."""

    mask: int
    operand: Name | Generic

    def __str__(self) -> str:
        return f"{self.mask:#X}({self.operand})"


Initializer = Immediate | Name | Generic | Masked | tuple["Initializer", ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A declaration in any state space, also of registers and parameters.

    `count` is N of `%r<N>` (registers %r0 … %r(N-1)); `dimensions` of an array, None for `[]`.
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

    def declaration(self) -> str:
        """Return the declaration without linkage and `;`."""
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

# --- functions and modules -------------------------------------------------------------------------


@dataclass(frozen=True)
class Function:
    """`.entry` or `.func`. `body` is None for a declaration."""

    kind: str  # entry or func
    name: str
    parameters: tuple[Variable, ...] = ()
    returns: tuple[Variable, ...] = ()
    linkage: tuple[str, ...] = ()
    directives: tuple[Directive, ...] = ()  # .maxntid 256, 1, 1 …
    line: int = 0
    statements: tuple[Statement, ...] | None = None
    _source: tuple[str, int, int, int] | None = field(default=None, repr=False, compare=False)

    @property
    def defined(self) -> bool:
        return self.statements is not None or self._source is not None

    def mentions(self, name: str) -> bool:
        """Return whether the text of the body contains `name` anywhere: a quick check before parsing it."""
        if self._source is not None:
            text, start, end, _ = self._source
            return text.find(name, start, end) >= 0
        return any(name in str(s) for s in self.statements or ())

    def block_limit(self, name: str) -> tuple[int, int, int] | None:
        """Return the block's dimensions that a kernel states with `.reqntid` or `.maxntid`, or None (PTX ISA 11.4)."""
        for directive in self.directives:
            if directive.name == name:
                numbers = re.findall(r"\b(?:0[xX][0-9a-fA-F]+|\d+)\b", directive.text)
                x, y, z = ([parse_integer(number) for number in numbers] + [1, 1, 1])[:3]
                return x, y, z
        return None

    @functools.cached_property
    def body(self) -> tuple[Statement, ...] | None:
        """The statements between the outer braces, parsed on first use.

        Raises PtxError, which names the line.
        """
        if self.statements is not None or self._source is None:
            return self.statements
        text, start, end, line = self._source
        return tuple(_statements(Lexer(text, start, end, line)))

    def __str__(self) -> str:
        head = "".join(f".{word} " for word in self.linkage) + f".{self.kind} "
        if self.returns:
            head += f"({', '.join(p.declaration() for p in self.returns)}) "
        head += self.name
        if self.parameters or self.kind == "func":
            head += "(" + ",\n\t".join(p.declaration() for p in self.parameters) + ")"
        head += "".join(f"\n{d.text}" for d in self.directives)
        if self.body is None:
            return head + ";"
        lines = ["\t" + str(s) if not isinstance(s, Label) else str(s) for s in self.body]
        return "\n".join([head, "{", *lines, "}"])


Item = Function | Variable | Directive


@dataclass(frozen=True)
class Module:
    """A PTX translation unit. `target` is `("sm_75", "debug")`."""

    version: tuple[int, int]
    target: tuple[str, ...]
    address_size: int
    items: tuple[Item, ...]

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
        """The function that each `.alias` stands for, by the alias."""
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


def render(module: Module) -> str:
    """Return the PTX text of a module, without the comments and layout of the original."""
    head = [
        f".version {module.version[0]}.{module.version[1]}",
        f".target {', '.join(module.target)}",
        f".address_size {module.address_size}",
        "",
    ]
    return "\n".join([*head, *map(str, module.items), ""])


# --- parsing ---------------------------------------------------------------------------------------

_SPACES = {"reg", "local", "shared", "global", "const", "param", "tex", "sreg"}
_LINKAGE = {"visible", "extern", "weak", "common"}
_LINE_DIRECTIVES = {"loc", "file"}  # end with their line, not with ;


def parse_integer(text: str) -> int:
    """Return the value of an integer literal: decimal, octal, hexadecimal or binary, with or without U and sign. Raises PtxError."""
    sign = -1 if text.startswith("-") else 1
    digits = text.lstrip("+-").rstrip("U")
    try:
        if digits[:2] in ("0x", "0X", "0b", "0B"):
            return sign * int(digits, 0)
        if len(digits) > 1 and digits[0] == "0":
            return sign * int(digits, 8)
        return sign * int(digits)
    except ValueError:
        raise PtxError(f"{text!r} is not an integer") from None


def parse(text: str | bytes) -> Module:
    """Parse a PTX translation unit. Function bodies are parsed on first use.

    The text is untrusted; a trailing NUL is allowed. Raises PtxError, which names the line.
    """
    if isinstance(text, bytes):
        text = text.rstrip(b"\0").decode("utf-8", "replace")
    lexer = Lexer(strip_comments(text.rstrip("\0")))
    version: tuple[int, int] | None = None
    target: tuple[str, ...] = ()
    address_size = 64
    items: list[Item] = []
    while (token := lexer.peek()) is not None:
        if token.text == ".version":
            lexer.next()
            number = lexer.next().text
            major, _, minor = number.partition(".")
            if not (major.isdigit() and minor.isdigit()):
                raise PtxError(f"PTX line {token.line}: .version {number} is not a version")
            version = int(major), int(minor)
        elif token.text == ".target":
            lexer.next()
            names = [lexer.next().text]
            while lexer.accept(","):
                names.append(lexer.next().text)
            target = tuple(names)
        elif token.text == ".address_size":
            lexer.next()
            address_size = parse_integer(lexer.next().text)
        elif token.text == ";" or token.kind == "mark":
            lexer.next()
        elif token.kind == "dotted":
            items.extend(_item(lexer))
        else:
            raise PtxError(f"PTX line {token.line}: unexpected {token.text!r} outside of a function")
    if version is None or not target:
        raise PtxError("this is not PTX: it has no .version and .target")
    return Module(version, target, address_size, tuple(items))


def _item(lexer: Lexer) -> Iterator[Item]:
    linkage: list[str] = []
    while (token := lexer.peek()) is not None and token.text[1:] in _LINKAGE:
        linkage.append(lexer.next().text[1:])
    if token is None:
        raise PtxError("PTX ends after a linkage directive")
    name = token.text[1:]
    if name in ("entry", "func"):
        yield _function(lexer, tuple(linkage))
    elif name in _SPACES:
        yield from _variables(lexer, tuple(linkage))
    elif name in _LINE_DIRECTIVES:
        lexer.next()
        yield Directive(name, f".{name} {lexer.rest_of_line()}", line=token.line)
    elif name == "section":
        start = lexer.next().start
        while (ahead := lexer.peek()) is not None and ahead.text != "{":
            lexer.next()
        _, end, _ = lexer.skip_braces()
        yield Directive(name, lexer.text[start : end + 1], line=token.line)
    else:
        yield _directive(lexer)


def _directive(lexer: Lexer) -> Directive:
    """Parse a directive that ends with `;`."""
    first = lexer.next()
    names = []
    last = first
    while last.text != ";":
        last = lexer.next()
        if last.kind == "name":
            names.append(last.text)
    return Directive(first.text[1:], lexer.text[first.start : last.end], tuple(names), first.line)


def _function(lexer: Lexer, linkage: tuple[str, ...]) -> Function:
    kind = lexer.next()
    directives: list[Directive] = []
    while (token := lexer.peek()) is not None and token.kind == "dotted":  # .attribute(.unified(…))
        directives.append(_function_directive(lexer))
    returns: tuple[Variable, ...] = ()
    if token is not None and token.text == "(":
        returns = _parameters(lexer)
    name = lexer.next()
    if name.kind != "name":
        raise PtxError(f"PTX line {name.line}: expected the name of a function, found {name.text!r}")
    parameters: tuple[Variable, ...] = ()
    token = lexer.peek()
    if token is not None and token.text == "(":
        parameters = _parameters(lexer)
    source: tuple[str, int, int, int] | None = None
    while True:
        token = lexer.peek()
        if token is None:
            raise PtxError(f"PTX line {name.line}: {name.text} has no end")
        if token.text == "{":
            start, end, line = lexer.skip_braces()
            source = (lexer.text, start, end, line)
            break
        if lexer.accept(";"):
            # a `;` ends a declaration, and also a .pragma before the body
            after = lexer.peek()
            if not (
                directives and directives[-1].name == "pragma" and after and after.text in ("{", ".pragma")
            ):
                break
            continue
        directives.append(_function_directive(lexer))
    return Function(
        kind.text[1:], name.text, parameters, returns, linkage, tuple(directives), kind.line, None, source
    )


def _function_directive(lexer: Lexer) -> Directive:
    """Parse `.maxntid 256, 1, 1`, `.noreturn`, `.pragma "…";`, which end before the next directive, `{` or `;`."""
    first = lexer.next()
    if first.kind != "dotted":
        raise PtxError(f"PTX line {first.line}: unexpected {first.text!r} in the head of a function")
    last = first
    depth = 0
    while (token := lexer.peek()) is not None:
        if depth == 0 and (token.text in ("{", ";") or (token.kind == "dotted" and last.text != "(")):
            break
        if depth == 0 and token.kind == "name" and last.kind != "punct" and first.text == ".attribute":
            break
        if depth == 0 and token.text == "(" and first.text != ".attribute":
            break
        if depth == 0 and token.text == "(" and last.text == ")":
            break
        depth += {"(": 1, ")": -1}.get(token.text, 0)
        last = lexer.next()
    text = lexer.text[first.start : last.end]
    if first.text == ".pragma":
        text += ";"
    return Directive(first.text[1:], text, line=first.line)


def _parameters(lexer: Lexer) -> tuple[Variable, ...]:
    lexer.expect("(")
    found: list[Variable] = []
    while not lexer.accept(")"):
        if found:
            lexer.expect(",")
        found.append(_declarator(lexer, *_declaration_head(lexer), ()))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Head:
    """What the variables of one declaration share."""

    space: str
    type: str
    vector: int
    align: int | None
    attributes: tuple[str, ...]
    line: int


def _declaration_head(lexer: Lexer) -> tuple[_Head]:
    space = lexer.next()
    if space.text[1:] not in _SPACES:
        raise PtxError(f"PTX line {space.line}: expected a state space, found {space.text!r}")
    type_name = ""
    vector = 1
    align: int | None = None
    attributes: list[str] = []
    if lexer.accept("["):  # .const[2]
        lexer.next()
        lexer.expect("]")
    while (token := lexer.peek()) is not None and token.kind == "dotted":
        word = lexer.next().text[1:]
        if word == "align":
            align = parse_integer(lexer.next().text)
        elif word == "attribute":
            lexer.expect("(")
            depth = 1
            while depth:
                inner = lexer.next()
                depth += {"(": 1, ")": -1}.get(inner.text, 0)
                if inner.kind == "dotted":
                    attributes.append(inner.text[1:])
        elif word in ("v2", "v4", "v8"):
            vector = int(word[1:])
        elif type_name:
            attributes.append(word)  # .ptr .global
        else:
            type_name = word
    if not type_name:
        raise PtxError(f"PTX line {space.line}: a declaration without a type")
    return (_Head(space.text[1:], type_name, vector, align, tuple(attributes), space.line),)


def _declarator(lexer: Lexer, head: _Head, linkage: tuple[str, ...]) -> Variable:
    name = lexer.next()
    if name.kind != "name":
        raise PtxError(f"PTX line {name.line}: expected a name, found {name.text!r}")
    count = None
    dimensions: list[int | None] = []
    initializer: Initializer | None = None
    if lexer.accept("<"):
        count = parse_integer(lexer.next().text)
        lexer.expect(">")
    while lexer.accept("["):
        if lexer.accept("]"):
            dimensions.append(None)
        else:
            dimensions.append(_constant(lexer, "]"))
            lexer.expect("]")
    if lexer.accept("="):
        initializer = _initializer(lexer)
        if dimensions and dimensions[0] is None and isinstance(initializer, tuple):
            dimensions[0] = len(initializer)
    return Variable(
        head.space,
        head.type,
        name.text,
        head.vector,
        head.align,
        count,
        tuple(dimensions),
        initializer,
        linkage,
        head.attributes,
        head.line,
    )


def _variables(lexer: Lexer, linkage: tuple[str, ...]) -> Iterator[Variable]:
    (head,) = _declaration_head(lexer)
    yield _declarator(lexer, head, linkage)
    while lexer.accept(","):
        yield _declarator(lexer, head, linkage)
    lexer.expect(";")


def _initializer(lexer: Lexer) -> Initializer:
    if lexer.accept("{"):
        items: list[Initializer] = []
        while not lexer.accept("}"):
            if items:
                lexer.expect(",")
            items.append(_initializer(lexer))
        return tuple(items)
    token = lexer.peek()
    if token is not None and token.text == "generic":
        lexer.next()
        return _generic(lexer, (",", "}", ";"))
    if token is not None and token.kind == "number":
        number = lexer.next()
        if lexer.accept("("):
            inner = lexer.peek()
            operand: Name | Generic
            if inner is not None and inner.text == "generic":
                lexer.next()
                operand = _generic(lexer, (")",))
            else:
                operand = _symbol(_until(lexer, (")",)))
            lexer.expect(")")
            return Masked(parse_integer(number.text), operand)
        return _scalar([number, *_until(lexer, (",", "}", ";"))])
    return _scalar(_until(lexer, (",", "}", ";")))


def _generic(lexer: Lexer, stops: tuple[str, ...]) -> Generic:
    """Parse what follows the word `generic`: `(table)`, `(table)+4`."""
    lexer.expect("(")
    name = _symbol(_until(lexer, (")",)))
    lexer.expect(")")
    added = _until(lexer, stops)
    return Generic(Name(name.name, name.offset + (_evaluate(added) if added else 0)))


def _until(lexer: Lexer, stops: tuple[str, ...]) -> list[Token]:
    """Take the tokens before one of `stops` that is outside of parentheses. Raises PtxError."""
    found: list[Token] = []
    depth = 0
    while (token := lexer.peek()) is not None:
        if depth == 0 and token.text in stops and token.kind == "punct":
            return found
        depth += {"(": 1, ")": -1}.get(token.text, 0)
        found.append(lexer.next())
    raise PtxError(f"PTX line {lexer.line}: expected one of {' '.join(stops)}")


def _constant(lexer: Lexer, stop: str) -> int:
    return _evaluate(_until(lexer, (stop,)))


def _symbol(tokens: list[Token]) -> Name:
    value = _scalar(tokens)
    if not isinstance(value, Name):
        raise PtxError(f"PTX line {tokens[0].line if tokens else 0}: expected a name, found {value}")
    return value


def _scalar(tokens: list[Token]) -> Name | Immediate:
    """Parse one value without brackets: `%r1`, `table+8`, `-1`, `4*3`, `1.5`. Raises PtxError."""
    if not tokens:
        raise PtxError("PTX: an operand is missing")
    first = tokens[0]
    if len(tokens) == 1:
        if first.kind == "name" and first.text != "WARP_SZ":
            return Name(first.text)
        if first.kind == "number":
            return Immediate(first.text)
    if len(tokens) == 2 and first.text in "+-" and tokens[1].kind == "number":
        return Immediate(("-" if first.text == "-" else "") + tokens[1].text)
    if first.kind == "name" and first.text != "WARP_SZ" and len(tokens) > 2 and tokens[1].text in "+-":
        return Name(first.text, _evaluate(tokens[1:]))
    if len(tokens) > 2 and tokens[-1].kind == "name" and tokens[-2].text == "+":
        return Name(tokens[-1].text, _evaluate(tokens[:-2]))
    return Immediate(str(_evaluate(tokens)))


_PRECEDENCE = [
    {"||"}, {"&&"}, {"|"}, {"^"}, {"&"}, {"==", "!="}, {"<", ">", "<=", ">="}, {"<<", ">>"}, {"+", "-"}, {"*", "/", "%"},
]  # fmt: skip


def _evaluate(tokens: list[Token]) -> int:
    """Return the value of a constant expression over integers (PTX ISA 4.6). Raises PtxError."""
    position = 0

    def fail() -> PtxError:
        text = " ".join(t.text for t in tokens)
        return PtxError(f"PTX line {tokens[0].line if tokens else 0}: {text!r} is not a constant expression")

    def take() -> Token:
        nonlocal position
        if position >= len(tokens):
            raise fail()
        position += 1
        return tokens[position - 1]

    def unary() -> int:
        token = take()
        if token.text == "(":
            if position < len(tokens) and tokens[position].kind == "dotted":  # a cast: (.s64)
                take()
                if take().text != ")":
                    raise fail()
                return unary()
            value = level(0)
            if take().text != ")":
                raise fail()
            return value
        if token.text in ("-", "+", "~", "!"):
            value = unary()
            return {"-": -value, "+": value, "~": ~value, "!": int(not value)}[token.text]
        if token.kind == "number":
            return parse_integer(token.text)
        if token.text == "WARP_SZ":
            return 32
        raise fail()

    def level(depth: int) -> int:
        if depth == len(_PRECEDENCE):
            return unary()
        left = level(depth + 1)
        while position < len(tokens) and tokens[position].text in _PRECEDENCE[depth]:
            operator = take().text
            left = _apply(operator, left, level(depth + 1), fail)
        return left

    value = level(0)
    if position != len(tokens):
        raise fail()
    return value


def _apply(operator: str, left: int, right: int, fail) -> int:  # type: ignore[no-untyped-def]
    if operator in ("/", "%"):
        if right == 0:
            raise fail()
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if operator == "/" else left - quotient * right
    if operator in ("<<", ">>") and not 0 <= right < 64:
        raise fail()
    table = {
        "+": lambda: left + right,
        "-": lambda: left - right,
        "*": lambda: left * right,
        "<<": lambda: left << right,
        ">>": lambda: left >> right,
        "&": lambda: left & right,
        "|": lambda: left | right,
        "^": lambda: left ^ right,
        "&&": lambda: int(bool(left and right)),
        "||": lambda: int(bool(left or right)),
        "==": lambda: int(left == right),
        "!=": lambda: int(left != right),
        "<": lambda: int(left < right),
        ">": lambda: int(left > right),
        "<=": lambda: int(left <= right),
        ">=": lambda: int(left >= right),
    }
    return table[operator]()


def _statements(lexer: Lexer) -> Iterator[Statement]:
    """Parse the statements of a function body. Raises PtxError."""
    while (token := lexer.peek()) is not None:
        if token.text == "{":
            lexer.next()
            yield Open(token.line)
        elif token.text == "}":
            lexer.next()
            yield Close(token.line)
        elif token.text == ";":
            lexer.next()
        elif token.kind == "dotted":
            name = token.text[1:]
            if name in _SPACES or name in _LINKAGE:
                for item in _item(lexer):
                    if not isinstance(item, Variable):
                        raise PtxError(f"PTX line {token.line}: .{name} inside of a function")
                    yield item
            elif name in _LINE_DIRECTIVES:
                lexer.next()
                yield Directive(name, f".{name} {lexer.rest_of_line()}", line=token.line)
            else:
                yield _directive(lexer)
        elif token.kind == "mark":
            yield Directive("gpubpf", lexer.next().text, line=token.line)
        elif token.kind == "name":
            first = lexer.next()
            if lexer.accept(":"):
                yield Label(first.text, first.line)
            else:
                yield _instruction(lexer, first, None, False)
        elif token.text == "@":
            lexer.next()
            negated = lexer.accept("!")
            guard = lexer.next()
            yield _instruction(lexer, lexer.next(), guard.text, negated)
        else:
            raise PtxError(f"PTX line {token.line}: unexpected {token.text!r}")


def _instruction(lexer: Lexer, first: Token, predicate: str | None, negated: bool) -> PtxInstruction:
    opcode, _, component = first.text.partition(".")  # an opcode such as `set.r…` may look like a component
    modifiers = [component] if component else []
    while (token := lexer.peek()) is not None and token.kind == "dotted":
        modifiers.append(lexer.next().text[1:])
    operands: list[Operand] = []
    while not lexer.accept(";"):
        if operands:
            lexer.expect(",")
        operands.append(_operand(lexer))
    return PtxInstruction(opcode, tuple(modifiers), tuple(operands), predicate, negated, first.line)


def _operand(lexer: Lexer) -> Operand:
    found = _operand_part(lexer)
    if lexer.accept("|"):
        found = Pair(found, _operand_part(lexer))
    return found


def _operand_part(lexer: Lexer) -> Operand:
    if lexer.accept("["):
        tokens = _until(lexer, ("]", ","))
        base = _scalar(tokens)
        coordinates: list[Operand] = []
        while lexer.accept(","):
            coordinates.append(_operand(lexer))
        lexer.expect("]")
        unified = lexer.accept(".unified")
        if isinstance(base, Name):
            return Address(base.name, base.offset, tuple(coordinates), unified)
        return Address(None, base.integer, tuple(coordinates), unified)
    if lexer.accept("{"):
        return Vector(tuple(_list(lexer, "}")))
    token = lexer.peek()
    if token is not None and token.text == "(" and not _is_expression(lexer):
        lexer.next()
        return Group(tuple(_list(lexer, ")")))
    if token is not None and token.text == "!":
        lexer.next()
        return Not(_symbol(_until(lexer, (",", ";", "}", ")", "|", "]"))))
    return _scalar(_until(lexer, (",", ";", "}", ")", "|", "]")))


def _is_expression(lexer: Lexer) -> bool:
    """Return whether the next `(` opens a constant expression instead of call arguments."""
    ahead = lexer.peek()
    assert ahead is not None
    after = lexer.text[ahead.end : ahead.end + 40].lstrip()
    return after[:1] == "." or (
        after[:1].isdigit()
        and ")" in after
        and "," not in after.split(")")[0]
        and after.split(")", 1)[1].lstrip()[:1] not in (",", ";")
    )


def _list(lexer: Lexer, close: str) -> Iterable[Operand]:
    items: list[Operand] = []
    while not lexer.accept(close):
        if items:
            lexer.expect(",")
        items.append(_operand(lexer))
    return items

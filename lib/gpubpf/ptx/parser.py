"""Parse PTX text into a `Module`. Function bodies are parsed on demand."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from gpubpf.errors import PtxError
from gpubpf.record import Record, field, replace

from .constant_expressions import constant, integer
from .module import (
    AT_LINE,
    Address,
    Close,
    Directive,
    Function,
    Generic,
    Group,
    Immediate,
    Initializer,
    Item,
    Label,
    Masked,
    Module,
    Name,
    Not,
    Open,
    Operand,
    Pair,
    PtxInstruction,
    Statement,
    Variable,
    Vector,
    type_size,
)
from .tokens import Lexer, Token, parse_integer, parse_size, strip_comments

_SPACES = {"reg", "local", "shared", "global", "const", "param", "tex", "sreg"}
_LINKAGE = {"visible", "extern", "weak", "common"}
_LINE_DIRECTIVES = {"loc", "file"}  # end at the end of the line, not at `;`
_NEGATED = re.compile(r"!\s*(?!WARP_SZ\b)[%A-Za-z_$]")  # `!%p1`; `!0` is a constant expression
_MINUS = re.compile(r"-\s*(?!WARP_SZ\b)[%A-Za-z_$]")  # `-%r1`, of vmad
_VERSION = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})")
# Instructions with an operand that may be an element of an array, and the number of that operand.
_INDEXING = {"ld": 1, "ldu": 1, "st": 0, "mov": 1, "cvta": 1, "mapa": 1, "getctarank": 1}
_OF_ADDRESSES = {"mov", "cvta", "mapa", "getctarank"}  # the operand is the element's address
_DEEPEST = 16  # maximum nesting of braces or parentheses in an operand or initializer
# The rest of a list of decimal and octal numbers.
_NUMBERS = re.compile(r"\s*+[0-9]++(?:\s*+,\s*+[0-9]++)*+\s*+\}")


def parse(text: str | bytes) -> Module:
    """Parse a PTX translation unit. Function bodies are parsed on first use.

    The text is untrusted; a trailing NUL is allowed. Raises PtxError, which names the line.
    """
    if isinstance(text, bytes):
        text = text.rstrip(b"\0").decode("utf-8", "replace")
    lexer = Lexer(strip_comments(text.rstrip("\0")))
    known = _Known({}, ChainMap())
    version: tuple[int, int] | None = None
    target: tuple[str, ...] = ()
    address_size = 64
    items: list[Item] = []
    while (token := lexer.peek()) is not None:
        if token.text == ".version":
            lexer.next()
            number = lexer.next().text
            match = _VERSION.fullmatch(number)
            if match is None:
                raise PtxError(f"PTX line {token.line}: .version {number} is not a version")
            version = int(match[1]), int(match[2])
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
            found = tuple(_item(lexer, known))
            known.declare(found)
            items.extend(found)
        else:
            raise PtxError(f"PTX line {token.line}: unexpected {token.text!r} outside of a function")
    if version is None or not target:
        raise PtxError("this is not PTX: it has no .version and .target")
    return Module(version, target, address_size, tuple(items))


class _Known(Record):
    """What the parser knows while it reads a function: parsed operands by text, and the element size in bytes of each variable.

    The element size is 0 for a variable that is not an array.
    """

    operands: dict[str, Operand]
    units: ChainMap[str, int]

    def declare(self, items: Iterable[Item]) -> None:
        for item in items:
            if isinstance(item, Variable):
                self.units[item.name] = type_size(item.type) if item.dimensions else 0

    def inside(self, items: Iterable[Item] = ()) -> _Known:
        """Return what is known in a block that declares `items` at its beginning."""
        found = _Known(self.operands, self.units.new_child())
        found.declare(items)
        return found

    def outside(self) -> _Known:
        """Return what is known in the block around this one."""
        return _Known(self.operands, self.units.parents)


def _item(lexer: Lexer, known: _Known) -> Iterator[Item]:
    linkage: list[str] = []
    while (token := lexer.peek()) is not None and token.text[1:] in _LINKAGE:
        linkage.append(lexer.next().text[1:])
    if token is None:
        raise PtxError(f"PTX line {lexer.line}: the text ends after .{linkage[-1]}; it may be truncated")
    name = token.text[1:]
    if name in ("entry", "func"):
        yield _function(lexer, tuple(linkage), known)
    elif name in _SPACES:
        yield from _variables(lexer, tuple(linkage))
    elif linkage:
        raise PtxError(
            f"PTX line {token.line}: .{linkage[-1]} before {token.text!r}, which is neither a function nor a variable"
        )
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


class _UnparsedBody(Record):
    """A function's body: `text` from `start` to `end`, which begins at line `line` of the PTX."""

    text: str
    start: int
    end: int
    line: int
    known: _Known = field(repr=False, compare=False)

    def mentions(self, name: str) -> bool:
        return self.text.find(name, self.start, self.end) >= 0

    def parse(self) -> tuple[Statement, ...]:
        return tuple(_statements(Lexer(self.text, self.start, self.end, self.line), self.known))


def only_bodies_of(text: str, module: Module, kernels: Collection[str]) -> str:
    """Return `text`, which `module` was parsed from, with empty bodies of all other kernels. Lines keep their numbers."""
    text = strip_comments(text)
    parts: list[str] = []
    at = 0
    for name, kernel in module.entries.items():
        body = kernel.unparsed
        if name not in kernels and isinstance(body, _UnparsedBody):
            parts += [text[at : body.start], "\n" * text.count("\n", body.start, body.end), "ret; "]
            at = body.end
    return "".join([*parts, text[at:]])


def _function(lexer: Lexer, linkage: tuple[str, ...], known: _Known) -> Function:
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
    unparsed: _UnparsedBody | None = None
    while True:
        token = lexer.peek()
        if token is None:
            raise PtxError(f"PTX line {name.line}: the declaration of {name.text} has no end")
        if token.text == "{":
            start, end, line = lexer.skip_braces()
            unparsed = _UnparsedBody(lexer.text, start, end, line, known.inside((*parameters, *returns)))
            break
        if lexer.accept(";"):
            # A `;` ends a declaration, but also a .pragma before the body.
            after = lexer.peek()
            if not (
                directives and directives[-1].name == "pragma" and after and after.text in ("{", ".pragma")
            ):
                break
            continue
        directives.append(_function_directive(lexer))
    return Function(
        kind.text[1:], name.text, parameters, returns, linkage, tuple(directives), kind.line, None, unparsed
    )


def _function_directive(lexer: Lexer) -> Directive:
    """Parse a directive such as `.maxntid 256, 1, 1`, `.noreturn` or `.pragma "…";`. It ends at the next directive, `{` or `;`."""
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
        if token is None or token.text != ";":
            raise PtxError(f"PTX line {first.line}: .pragma in the head of a function has no `;` at its end")
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
            align = _size(lexer)
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
        raise PtxError(f"PTX line {space.line}: this declaration has no type")
    return (_Head(space.text[1:], type_name, vector, align, tuple(attributes), space.line),)


def _size(lexer: Lexer) -> int:
    """Parse a size, alignment or count. ptxas accepts no expressions there."""
    token = lexer.next()
    try:
        return parse_size(token.text)
    except PtxError as error:
        raise PtxError(f"PTX line {token.line}: {error}") from None


def _declarator(lexer: Lexer, head: _Head, linkage: tuple[str, ...]) -> Variable:
    name = lexer.next()
    if name.kind != "name":
        raise PtxError(f"PTX line {name.line}: expected a name, found {name.text!r}")
    count = None
    dimensions: list[int | None] = []
    initializer: Initializer | None = None
    if lexer.accept("<"):
        count = _size(lexer)
        lexer.expect(">")
    while lexer.accept("["):
        if lexer.accept("]"):
            dimensions.append(None)
        else:
            dimensions.append(_size(lexer))
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


def _initializer(lexer: Lexer, depth: int = 0) -> Initializer:
    if lexer.accept("{"):
        if depth > _DEEPEST:
            raise PtxError(f"PTX line {lexer.line}: more than {_DEEPEST} levels of braces")
        if (numbers := lexer.match(_NUMBERS)) is not None:  # tables such as cuRAND's have 100,000
            lexer.move(numbers.end())
            texts = numbers.group()[:-1].replace(",", " ").split()
            known = {text: Immediate(text) for text in set(texts)}
            return tuple([known[text] for text in texts])
        items: list[Initializer] = []
        while not lexer.accept("}"):
            if items:
                lexer.expect(",")
            items.append(_initializer(lexer, depth + 1))
        return tuple(items)
    token = lexer.peek()
    if token is None or token.kind == "name":
        return _address(lexer)
    value = constant(lexer)
    if not lexer.accept("("):
        return value
    operand = _address(lexer)
    if isinstance(operand, Immediate):
        raise PtxError(f"PTX line {token.line}: expected a name, found {operand}")
    lexer.expect(")")
    return Masked(value.integer, operand)


def _address(lexer: Lexer) -> Name | Generic | Immediate:
    """Parse an address in an initializer: `table+4`, `generic(table)+4`. WARP_SZ is a number."""
    if not lexer.accept("generic"):
        return _value(lexer)
    lexer.expect("(")
    name = _symbol(lexer)
    lexer.expect(")")
    added = integer(lexer) if (after := lexer.peek()) is not None and after.text in ("+", "-") else 0
    return Generic(Name(name.name, name.offset + added))


def _value(lexer: Lexer) -> Name | Immediate:
    """Parse one value without brackets: `%r1`, `table+8`, `-1`, `4*3`, `1.5`. Raises PtxError."""
    token = lexer.peek()
    if token is None or token.kind != "name" or token.text == "WARP_SZ":
        return constant(lexer)
    return _symbol(lexer)


def _symbol(lexer: Lexer) -> Name:
    """Parse a name, perhaps with an offset: `table+8`. Raises PtxError."""
    token = lexer.next()
    if token.kind != "name" or token.text == "WARP_SZ":
        raise PtxError(f"PTX line {token.line}: expected a name, found {token.text!r}")
    after = lexer.peek()
    if after is not None and after.text in ("+", "-"):
        return Name(token.text, integer(lexer))
    return Name(token.text)


# The most frequent lines in compilers' output: an instruction without parentheses, `.loc`, and a label. All other lines are read token
# by token.
_COMMON = re.compile(
    r"""\s*+(?:
        (?:@(?P<not>!?)(?P<guard>%[A-Za-z_]\w*)[ \t]+)?
        (?P<opcode>[a-z]\w*+(?!\.(?:[xyzwrgba]|b[0-7]{1,4}|h[0-3]{1,2})::)(?:\.[A-Za-z0-9_]\w*+(?:::\w++)*)*)
        (?:\s++(?P<operands>[^;"(@/:]*+))?;
      | \.loc[ \t]+(?P<loc>[^\n\s][^\n]*+)
      | (?P<label>[A-Za-z_$][\w$]*+):
    )""",
    re.VERBOSE | re.ASCII,
)


def _common(lexer: Lexer, operands: dict[str, Operand]) -> Iterator[Statement]:
    """Parse statements up to the first one that does not match _COMMON.

    operands: a cache of parsed operands, by text
    """
    while (match := lexer.match(_COMMON)) is not None:
        negated, guard, name, words, location, label = match.groups()
        if name is not None:
            found = _known(words, operands) if words else []
            if found is None:
                return
            line = lexer.move(match.start("opcode"))
            opcode, *modifiers = name.split(".")
            yield PtxInstruction(opcode, tuple(modifiers), tuple(found), guard, negated == "!", line)
        elif label is not None:
            yield Label(label, lexer.move(match.start("label")))
        else:
            yield Directive("loc", f".loc {location.strip()}", line=lexer.move(match.start("loc")))
        lexer.move(match.end())


def _known(words: str, operands: dict[str, Operand]) -> list[Operand] | None:
    """Return the operands of an instruction; None if they cannot be parsed one by one."""
    found = []
    for piece in _pieces(words):
        operand = operands.get(piece)
        if operand is None:
            alone = Lexer(piece + ";")
            try:
                operand = _operand(alone)
                alone.expect(";")
            except PtxError:  # the token-by-token parser reads it again and raises with the line
                return None
            if alone.peek() is not None:
                return None
            operands[piece] = operand
        found.append(operand)
    return found


def _pieces(words: str) -> list[str]:
    """Split operands at the commas that are outside brackets and braces."""
    parts = words.split(",")
    if "[" not in words and "{" not in words:
        return [part.strip() for part in parts]
    found: list[str] = []
    inside: list[str] = []
    depth = 0
    for part in parts:
        depth += part.count("[") + part.count("{") - part.count("]") - part.count("}")
        inside.append(part)
        if depth <= 0:
            found.append(",".join(inside).strip())
            inside = []
    return [*found, *inside]


def _statements(lexer: Lexer, known: _Known) -> Iterator[Statement]:
    """Parse the statements of a function body. Raises PtxError."""
    while True:
        yield from _common(lexer, known.operands)
        token = lexer.peek()
        if token is None:
            return
        if token.text == "{":
            lexer.next()
            known = known.inside()
            yield Open(token.line)
        elif token.text == "}":
            lexer.next()
            known = known.outside()
            yield Close(token.line)
        elif token.text == ";":
            lexer.next()
        elif token.kind == "dotted":
            name = token.text[1:]
            if name in _SPACES or name in _LINKAGE:
                for item in _item(lexer, known):
                    if not isinstance(item, Variable):
                        raise PtxError(f"PTX line {token.line}: .{name} inside of a function")
                    known.declare([item])
                    yield item
            elif name in _LINE_DIRECTIVES:
                lexer.next()
                yield Directive(name, f".{name} {lexer.rest_of_line()}", line=token.line)
            else:
                yield _directive(lexer)
        elif token.kind == "mark":
            mark = lexer.next().text
            if mark.startswith(AT_LINE):  # the mark gives the original's line of the next instruction
                lexer.line = int(mark.removeprefix(AT_LINE)) - 1
            else:
                yield Directive("gpubpf", mark, line=token.line)
        elif token.kind == "name":
            first = lexer.next()
            if lexer.accept(":"):
                yield Label(first.text, first.line)
            else:
                yield _instruction(lexer, first, None, False, known)
        elif token.text == "@":
            lexer.next()
            negated = lexer.accept("!")
            guard = lexer.next()
            yield _instruction(lexer, lexer.next(), guard.text, negated, known)
        else:
            raise PtxError(f"PTX line {token.line}: unexpected {token.text!r}")


def _instruction(
    lexer: Lexer, first: Token, predicate: str | None, negated: bool, known: _Known
) -> PtxInstruction:
    opcode, _, component = first.text.partition(".")  # in `set.r…`, the lexer may see a component
    modifiers = [component] if component else []
    while (token := lexer.peek()) is not None and token.kind == "dotted":
        modifiers.append(lexer.next().text[1:])
    operands: list[Operand] = []
    while not lexer.accept(";"):
        if operands:
            lexer.expect(",")
        if opcode == "vmad" and operands and _accept_minus(lexer):
            found: Operand = replace(_symbol(lexer), negative=True)
        else:
            found = _operand(lexer, of_call=opcode == "call")
        indexes = _INDEXING.get(opcode) == len(operands) and modifiers[:1] not in (["async"], ["bulk"])
        if indexes and isinstance(found, Name) and lexer.accept("["):
            found = _element(lexer, found, known, opcode in _OF_ADDRESSES)
        operands.append(found)
    return PtxInstruction(opcode, tuple(modifiers), tuple(operands), predicate, negated, first.line)


def _accept_minus(lexer: Lexer) -> bool:
    """Take a minus that precedes a name, and return whether there was one."""
    token = lexer.peek()
    return token is not None and _MINUS.match(lexer.text, token.start) is not None and lexer.accept("-")


def _element(lexer: Lexer, array: Name, known: _Known, of_value: bool) -> Operand:
    """Parse the rest of `array[2]`, `array[%r1]` or `array[%r1+2]`.

    of_value: whether the operand is the address itself (_OF_ADDRESSES)
    """
    unit = known.units.get(array.name, 0)
    if not unit or array.offset:
        raise PtxError(f"PTX line {lexer.line}: Array indexing on non-array")
    token = lexer.peek()
    chosen = token is not None and token.kind == "name" and token.text != "WARP_SZ"
    index = _symbol(lexer) if chosen else integer(lexer)
    lexer.expect("]")
    if isinstance(index, Name):
        if "." in index.name:
            raise PtxError(
                f"PTX line {lexer.line}: {index.name} is not an index: only a whole register can be one"
            )
        return Address(array.name, index.offset * unit, index=index.name, unit=unit)
    offset = index * unit
    return Name(array.name, offset) if of_value else Address(array.name, offset)


def _operand(lexer: Lexer, depth: int = 0, of_call: bool = False) -> Operand:
    """Parse an operand.

    of_call: whether parentheses contain the arguments or results of a call; otherwise, they begin a constant expression
    """
    if depth > _DEEPEST:
        raise PtxError(f"PTX line {lexer.line}: more than {_DEEPEST} levels of braces or parentheses")
    found = _operand_part(lexer, depth, of_call)
    if lexer.accept("|"):
        found = Pair(found, _operand_part(lexer, depth, False))
    return found


def _operand_part(lexer: Lexer, depth: int, of_call: bool) -> Operand:
    if lexer.accept("["):
        token = lexer.peek()
        is_name = token is not None and token.kind == "name" and token.text != "WARP_SZ"
        base = _symbol(lexer) if is_name else integer(lexer)
        coordinates: list[Operand] = []
        while lexer.accept(","):
            coordinates.append(_operand(lexer, depth + 1))
        lexer.expect("]")
        unified = lexer.accept(".unified")
        if isinstance(base, Name):
            return Address(base.name, base.offset, tuple(coordinates), unified)
        return Address(None, base, tuple(coordinates), unified)
    if lexer.accept("{"):
        return Vector(tuple(_list(lexer, "}", depth + 1)))
    if of_call and lexer.accept("("):
        return Group(tuple(_list(lexer, ")", depth + 1)))
    token = lexer.peek()
    if token is not None and _NEGATED.match(lexer.text, token.start):
        lexer.next()
        return Not(_symbol(lexer))
    return _value(lexer)


def _list(lexer: Lexer, close: str, depth: int) -> Iterable[Operand]:
    items: list[Operand] = []
    while not lexer.accept(close):
        if items:
            lexer.expect(",")
        items.append(_operand(lexer, depth))
    return items

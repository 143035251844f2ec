"""The expressions of gpucount, gpudist and gputrace: C over the names of a point, as a typed tree.

    names = Names("load", {"width": U64}, {"lane": U64})
    parse("width > 4 && lane % 2", names)       # a Node

A number has 64 bits and is unsigned or signed. As in C, an operation on an unsigned and a signed number is unsigned. What C leaves
undefined is defined as eBPF does it: a division by 0 gives 0, a remainder by 0 the dividend, and a shift counts modulo 64.

Only the tree leaves this module. c_text.py and evaluate.py read the tree, so the user's own text never reaches the C compiler.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum

from gpubpf.errors import UsageError
from gpubpf.record import Record, field

LONGEST = 4000  # characters of an expression
MOST_LISTED = 16  # constants in an error message
DEEPEST = 64  # levels of a tree; the C compiler allows 256 nested brackets
MASK = (1 << 64) - 1


class Type(Enum):
    """The type of a number. There are no floating-point numbers: eBPF has none."""

    U64 = "unsigned"
    S64 = "signed"


U64, S64 = Type.U64, Type.S64


# --- the tree ---


class Number(Record):
    """A literal. `value` is below 2**64."""

    value: int
    type: Type
    depth: int = 1


class Name(Record):
    """A field, builtin or value of the point, or a function in FLOAT_FUNCTIONS of a value: `isnan(value)`."""

    name: str
    type: Type
    depth: int = 1


class Call(Record):
    """A call of one of FUNCTIONS."""

    function: str
    argument: Node
    type: Type
    depth: int


class Unary(Record):
    """One of - ~ ! before an operand."""

    operator: str
    operand: Node
    type: Type
    depth: int


class Binary(Record):
    """An operator of PRECEDENCE between two operands."""

    operator: str
    left: Node
    right: Node
    type: Type
    depth: int

    @property
    def signed(self) -> bool:
        """Whether the operator works on signed numbers. For a shift to the right, only the left operand decides."""
        operands = (self.left,) if self.operator in SHIFTS else (self.left, self.right)
        return all(one.type is S64 for one in operands)


class Conditional(Record):
    """CONDITION ? YES : NO."""

    condition: Node
    yes: Node
    no: Node
    type: Type
    depth: int


Node = Number | Name | Call | Unary | Binary | Conditional

# How tightly an operator binds (C11 6.5.5 to 6.5.14).
PRECEDENCE: Mapping[str, int] = {
    operator: level
    for level, operators in enumerate(
        ("||", "&&", "|", "^", "&", "== !=", "< <= > >=", "<< >>", "+ -", "* / %"), 1
    )
    for operator in operators.split()
}
TRUTH = ("||", "&&", "==", "!=", "<", "<=", ">", ">=")  # these give 0 or 1
SHIFTS = ("<<", ">>")
CASTS = {"s8": 8, "s16": 16, "s32": 32}  # the lower bits as a signed number
FUNCTIONS = ("popcount", "log2", *CASTS)
# Functions of one of the values of a point, given by its name.
FLOAT_FUNCTIONS = ("isnan", "isinf")


class Names(Record):
    """What an expression may name at a point.

    point: name of the point, for messages.
    fields: the fields of the point's context.
    builtins: the names that every point of this kind has.
    constants: numbers by their names.
    texts: names that are not numbers; only keys and format arguments can use them.
    values: names of the loaded, stored or changed value, a signed number whose bits may be a floating-point number.
    by_detail: names that a DETAIL of the point adds → these DETAILs, for messages.
    """

    point: str
    fields: Mapping[str, Type]
    builtins: Mapping[str, Type] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)
    texts: Sequence[str] = ()
    values: Sequence[str] = ()
    by_detail: Mapping[str, str] = field(default_factory=dict)

    def type_of(self, name: str) -> Type:
        """Return the type of a name. Raises UsageError for an unknown name; the message lists the known names."""
        if name in self.texts:
            raise UsageError(f"{name} is a text, not a number; use it only as a key or as an argument of %s")
        found = self.builtins.get(name) or self.fields.get(name)
        found = found or (S64 if name in self.constants or name in self.values else None)
        if found is None and name in self.by_detail:
            raise UsageError(f"{self.point} has {name!r} only with a DETAIL: {self.by_detail[name]}")
        if found is None:
            raise UsageError(f"{self.point} has no {name!r}; {self.listed()}")
        return found

    @property
    def functions(self) -> Sequence[str]:
        return (*FUNCTIONS, *(FLOAT_FUNCTIONS if self.values else ()))

    def listed(self) -> str:
        """Return a list of the names for an error message. `block(.x)` stands for block and its parts, `…` for further constants."""
        builtins = (
            f"{name}(.x)" if f"{name}.x" in self.builtins else name
            for name in self.builtins
            if "." not in name
        )
        listed = {
            "fields": self.fields,
            "values": self.values,
            "builtins": [name for name in builtins if name not in self.fields],
            "constants": _listed(list(self.constants)),
            "texts": self.texts,
            "functions": self.functions,
        }
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in listed.items() if names)


def _listed(constants: Sequence[str]) -> Sequence[str]:
    """Return constants; if there are many, only the first and the last with each prefix: `GPU_FLOAT_ADD … GPU_FLOAT_MMA`."""
    if len(constants) <= MOST_LISTED:
        return constants
    families: dict[str, list[str]] = {}
    for name in constants:
        families.setdefault(name.rpartition("_")[0], []).append(name)
    return [f"{names[0]} … {names[-1]}" for names in families.values()]


# --- tokens ---

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<float>(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fFlL]? | [0-9]+[eE][+-]?[0-9]+[fFlL]?)
      | (?P<number>0[xX][0-9a-fA-F]+|0[bB][01]+|[0-9]+)(?P<suffix>\w*)
      | (?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?)
      | (?P<operator>\|\||&&|==|!=|<=|>=|<<|>>|[-+*/%&|^~!<>?:(),])
    )""",
    re.VERBOSE | re.ASCII,
)
_SUFFIX = re.compile(r"(?i:u|l|ll|ul|ull|lu|llu)?")
END = "end"


class Token(Record):
    """A token. kind: float, number, name, operator or END. text: as typed. at: index of its first character."""

    kind: str
    text: str
    at: int
    unsigned: bool = False


def tokens(text: str) -> Iterator[Token]:
    """Yield the tokens of an expression, and END. Raises UsageError."""
    if len(text) > LONGEST:
        raise UsageError(f"the expression has {len(text):,} characters; it may have {LONGEST:,}")
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            at += len(text[at:]) - len(text[at:].lstrip())
            raise UsageError(f"unexpected {text[at]!r} {_place(text, at)}; an expression is C over numbers")
        kind = str(match.lastgroup)
        if kind == "suffix":
            kind = "number"
            suffix = match["suffix"]
            if not _SUFFIX.fullmatch(suffix):
                raise UsageError(f"{match['number'] + suffix!r} is not a number; correct it")
            yield Token(kind, match["number"], match.start("number"), "u" in suffix.lower())
        else:
            yield Token(kind, match[kind], match.start(kind))
        at = match.end()
    yield Token(END, "", end)


def _place(text: str, at: int) -> str:
    """Return where something is in an expression, for a message: at most 24 characters before it."""
    before = text[max(0, at - 24) : at].strip()
    return f"after {before!r}" if before else "at the beginning"


# --- the parser ---


def parse(text: str, names: Names) -> Node:
    """Return the tree of an expression. Raises UsageError."""
    parser = _Parser(text, names)
    found = parser.expression()
    parser.end()
    return found


def parse_list(text: str, names: Names, texts: Sequence[str] = ()) -> list[Node | str]:
    """Return the trees of expressions separated by commas. An expression that is only a name in `texts` is returned as that name.

    Raises UsageError."""
    parser = _Parser(text, names)
    found: list[Node | str] = []
    while True:
        found.append(parser.text(texts) or parser.expression())
        if not parser.take(","):
            parser.end()
            return found


class _Parser:
    """Reads an expression from left to right: precedence climbing."""

    def __init__(self, text: str, names: Names) -> None:
        self._source, self._names = text, names
        self._tokens = list(tokens(text))
        self._next = 0
        self._depth = 0

    @property
    def _token(self) -> Token:
        return self._tokens[self._next]

    def take(self, *operators: str) -> str:
        """Take the next token if it is one of these operators, and return it; otherwise return ""."""
        token = self._token
        if token.kind != "operator" or token.text not in operators:
            return ""
        self._next += 1
        return token.text

    def text(self, names: Sequence[str]) -> str:
        """If the next expression is only the name of a text, take it and return it; otherwise return ""."""
        token, after = self._token, self._tokens[min(self._next + 1, len(self._tokens) - 1)]
        if token.kind == "name" and token.text in names and (after.kind == END or after.text == ","):
            self._next += 1
            return token.text
        return ""

    def end(self) -> None:
        """Raise UsageError if something follows."""
        if self._token.kind != END:
            raise self._unexpected("an operator")

    def expression(self) -> Node:
        """Return a whole expression: a conditional, or an operation without a question mark after it."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise UsageError(f"the expression is nested more than {DEEPEST} levels deep; shorten it")
        condition = self._operation(1)
        if self.take("?"):
            yes = self.expression()
            if not self.take(":"):
                raise self._unexpected("':'")
            no = self.expression()
            kind = _common(yes, no)
            condition = self._made(
                lambda depth: Conditional(condition, yes, no, kind, depth), condition, yes, no
            )
        self._depth -= 1
        return condition

    def _operation(self, least: int) -> Node:
        """Return operands and the operators between them that bind at least as tightly as `least`."""
        left = self._operand()
        while self._token.kind == "operator" and (level := PRECEDENCE.get(self._token.text, 0)) >= least:
            operator = self._token.text
            self._next += 1
            left = self._binary(operator, left, self._operation(level + 1))
        return left

    def _binary(self, operator: str, left: Node, right: Node) -> Node:
        if operator in ("/", "%") and isinstance(right, Number) and right.value == 0:
            raise UsageError(f"{operator} 0 divides by zero; correct the expression")
        kind = S64 if operator in TRUTH else left.type if operator in SHIFTS else _common(left, right)
        return self._made(lambda depth: Binary(operator, left, right, kind, depth), left, right)

    def _operand(self) -> Node:
        operators = []
        while operator := self.take("-", "+", "~", "!"):
            operators.append(operator)
            if len(operators) > DEEPEST:
                raise UsageError(f"the expression is nested more than {DEEPEST} levels deep; shorten it")
        found = self._primary()
        for operator in reversed(operators):
            found = self._unary(operator, found) if operator != "+" else found
        return found

    def _unary(self, operator: str, operand: Node) -> Node:
        kind = S64 if operator == "!" else operand.type
        return self._made(lambda depth: Unary(operator, operand, kind, depth), operand)

    def _primary(self) -> Node:
        token = self._token
        self._next += token.kind != END
        if token.kind == "number":
            return _number(token)
        if token.kind == "float":
            raise UsageError(
                f"{token.text} is a floating-point number; {self._names.point} has only integers"
            )
        if token.kind == "name":
            return (
                self._called(token.text)
                if self.take("(")
                else Name(token.text, self._names.type_of(token.text))
            )
        if token.text == "(":
            found = self.expression()
            if not self.take(")"):
                raise self._unexpected("')'")
            return found
        self._next -= token.kind != END
        raise self._unexpected("a number, a name or '('")

    def _called(self, function: str) -> Node:
        if function in FLOAT_FUNCTIONS and self._names.values:
            return self._of_value(function)
        if function in FLOAT_FUNCTIONS:
            raise UsageError(
                f"{function}() takes a floating-point value; {self._names.point} has only integers"
            )
        if function not in FUNCTIONS:
            functions = ", ".join(self._names.functions)
            raise UsageError(f"there is no function {function}(); use one of: {functions}")
        argument = self.expression()
        if not self.take(")"):
            raise self._unexpected(f"')' behind the argument of {function}()")
        kind = S64 if function in CASTS else U64
        return self._made(lambda depth: Call(function, argument, kind, depth), argument)

    def _of_value(self, function: str) -> Node:
        """Return a function in FLOAT_FUNCTIONS of a value. Its argument must be the name of a value, not another expression."""
        name = self._token.text
        self._next += self._token.kind == "name"
        if name not in self._names.values or not self.take(")"):
            allowed = " or ".join(f"{function}({one})" for one in self._names.values)
            raise UsageError(f"{function}() takes a value alone; write {allowed}")
        return Name(f"{function}({name})", S64)

    def _made(self, make: Callable[[int], Node], *parts: Node) -> Node:
        """Return a node above its parts. Raises UsageError if the tree becomes deeper than DEEPEST."""
        depth = 1 + max(part.depth for part in parts)
        if depth > DEEPEST:
            raise UsageError(f"the expression has more than {DEEPEST} operations in a row; shorten it")
        return make(depth)

    def _unexpected(self, expected: str) -> UsageError:
        token = self._token
        if token.kind == END:
            where = (
                f"after {self._source.strip()[-24:]!r}" if self._source.strip() else "in an empty expression"
            )
            return UsageError(f"{expected} is missing {where}; complete the expression")
        place = _place(self._source, token.at)
        return UsageError(f"unexpected {token.text!r} {place}: {expected} is missing; correct the expression")


def _common(left: Node, right: Node) -> Type:
    return S64 if left.type is right.type is S64 else U64


def _number(token: Token) -> Number:
    text = token.text.lower()
    octal = text.startswith("0") and text.isdigit() and len(text) > 1
    try:
        value = int(text, 8 if octal else 0)
    except ValueError:
        raise UsageError(
            f"{token.text} is not an octal number; leave out the zeros at its beginning"
        ) from None
    if value > MASK:
        raise UsageError(f"{token.text} has more than 64 bits; use a smaller number")
    return Number(value, U64 if token.unsigned or value >> 63 else S64)


def names_of(node: Node) -> Iterator[str]:
    """Yield the names that an expression uses, in their order. A name is yielded as often as it occurs."""
    match node:
        case Name():
            yield node.name
        case Call():
            yield from names_of(node.argument)
        case Unary():
            yield from names_of(node.operand)
        case Binary():
            yield from names_of(node.left)
            yield from names_of(node.right)
        case Conditional():
            for part in (node.condition, node.yes, node.no):
                yield from names_of(part)

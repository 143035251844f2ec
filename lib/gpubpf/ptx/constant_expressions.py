"""Evaluate constant expressions as ptxas does (PTX ISA 4.5, 4.6).

Integers have 64 bits, signed or unsigned, and wrap around. Floating-point numbers are doubles. The two do not mix.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

from gpubpf.errors import PtxError

from .module import Immediate
from .tokens import WARP_SIZE, Lexer, Token

DEEPEST = 100  # maximum nesting of parentheses, unary operators and right operands
_SHORT = re.compile(r"\.[0-9]+(?:[eE][0-9]+)?")  # `.5`: to the lexer it looks like a modifier
_MASK = (1 << 64) - 1
_INTEGER, _FLOAT = ("s64", "u64"), "f64"


@dataclass(frozen=True, slots=True)
class _Constant:
    """A value of type s64, u64 or f64. `text`: how the value can be written; a literal keeps the text of the program."""

    type: str
    value: int | float
    text: str


def constant(lexer: Lexer) -> Immediate:
    """Take a constant expression. Raises PtxError, which names the line."""
    return Immediate(_conditional(lexer, 0).text)


def integer(lexer: Lexer) -> int:
    """Take a constant expression of integers; return its value as a signed integer of 64 bits. Raises PtxError."""
    first = lexer.peek()
    found = _conditional(lexer, 0)
    if found.type not in _INTEGER:
        raise PtxError(f"PTX line {first.line if first else lexer.line}: {found.text} is not an integer")
    return _wrapped("s64", int(found.value))


def _made(type_name: str, value: int | float) -> _Constant:
    if type_name in _INTEGER:
        value = _wrapped(type_name, int(value))
        return _Constant(type_name, value, str(value))
    return _Constant(type_name, value, f"0d{struct.pack('>d', value).hex().upper()}")


def _wrapped(type_name: str, value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if type_name == "s64" and value >> 63 else value


def _literal(token: Token) -> _Constant:
    literal = Immediate(token.text)
    try:
        if literal.is_float:
            return _Constant(_FLOAT, literal.real, token.text)
        value = literal.integer
    except PtxError as error:
        raise PtxError(f"PTX line {token.line}: {error}") from None
    type_name = "u64" if token.text.endswith("U") or value >> 63 else "s64"
    return _Constant(type_name, _wrapped(type_name, value), token.text)


def _conditional(lexer: Lexer, depth: int) -> _Constant:
    line = lexer.line
    condition = _binary(lexer, 0, depth)
    if not lexer.accept("?"):
        return condition
    chosen = _conditional(lexer, depth + 1)
    lexer.expect(":")
    other = _conditional(lexer, depth + 1)
    if _FLOAT in (condition.type, chosen.type, other.type):
        raise PtxError(f"PTX line {line}: the operands of ?: must be integers")
    return chosen if condition.value else other


def _binary(lexer: Lexer, precedence: int, depth: int) -> _Constant:
    """Take an expression of operators that bind at least as tightly as `precedence`."""
    left = _unary(lexer, depth)
    while (token := lexer.peek()) is not None and _PRECEDENCE.get(token.text, -1) >= precedence:
        lexer.next()
        right = _binary(lexer, _PRECEDENCE[token.text] + 1, depth + 1)
        left = _applied(token, left, right)
    return left


def _unary(lexer: Lexer, depth: int) -> _Constant:
    token = lexer.next()
    if depth > DEEPEST:
        raise PtxError(f"PTX line {token.line}: more than {DEEPEST} levels in a constant expression")
    if token.kind == "number" or _SHORT.fullmatch(token.text):
        return _literal(token)
    if token.text == "WARP_SZ":
        return _made("s64", WARP_SIZE)
    if token.text == "(":
        return _parenthesized(lexer, depth + 1)
    if token.text not in ("-", "+", "~", "!"):
        raise PtxError(f"PTX line {token.line}: {token.text!r} is not a constant expression")
    of = _unary(lexer, depth + 1)
    if of.type == _FLOAT and token.text in ("~", "!"):
        raise PtxError(f"PTX line {token.line}: the operand of {token.text} must be an integer")
    if token.text == "+":
        return of
    if token.text == "!":
        return _made("s64", int(not of.value))
    if token.text == "~":
        return _made(of.type, ~int(of.value))
    made = _made(of.type, -of.value)
    # A literal keeps its form: `-1.5` is not written as bits.
    return made if of.text.startswith("-") else _Constant(made.type, made.value, "-" + of.text)


def _parenthesized(lexer: Lexer, depth: int) -> _Constant:
    """Take what follows a parenthesis: `2*4)`, or the rest of a cast such as `(.s64)-1`."""
    token = lexer.peek()
    if token is None or token.text not in (".s64", ".u64"):
        found = _conditional(lexer, depth)
        lexer.expect(")")
        return found
    lexer.next()
    lexer.expect(")")
    of = _unary(lexer, depth)
    if of.type == _FLOAT:
        raise PtxError(f"PTX line {token.line}: ({token.text}) requires an integer")
    return _made(token.text[1:], of.value)


def _applied(operator: Token, left: _Constant, right: _Constant) -> _Constant:
    name = operator.text
    floats = (left.type == _FLOAT) + (right.type == _FLOAT)
    if floats == 1 or (floats and name not in _ON_FLOATS):
        raise PtxError(f"PTX line {operator.line}: the operands of {name} must be integers")
    if name in ("/", "%") and not right.value:
        raise PtxError(f"PTX line {operator.line}: division by zero in a constant expression")
    if floats:
        value = _ON_FLOATS[name](left.value, right.value)
        return _made("s64" if isinstance(value, bool) else _FLOAT, value)
    if name in ("<<", ">>"):
        count = int(right.value) & 63
        return _made(left.type, int(left.value) << count if name == "<<" else int(left.value) >> count)
    # The remainder is that of unsigned integers, whatever their types.
    type_name = "u64" if name == "%" or "u64" in (left.type, right.type) else "s64"
    value = _ON_INTEGERS[name](*(_wrapped(type_name, int(one.value)) for one in (left, right)))
    return _made("s64" if isinstance(value, bool) else type_name, value)


def _quotient(left: int, right: int) -> int:
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
}
_ON_FLOATS: dict[str, Callable[[float, float], float]] = {
    **_COMPARISONS,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}
_ON_INTEGERS: dict[str, Callable[[int, int], int]] = {
    **_COMPARISONS,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _quotient,
    "%": lambda a, b: a % b,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "&&": lambda a, b: bool(a and b),
    "||": lambda a, b: bool(a or b),
}
# From the loosest to the tightest.
_LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", ">", "<=", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
_PRECEDENCE = {name: level for level, names in enumerate(_LEVELS) for name in names}

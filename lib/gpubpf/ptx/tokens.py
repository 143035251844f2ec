"""Split PTX text into tokens by the lexical rules in the PTX ISA, "Syntax" (4.1–4.6)."""

from __future__ import annotations

import re
from typing import NamedTuple

from gpubpf.errors import PtxError

# Strings and comments may be unterminated. If the pattern required an end, many unterminated ones would take quadratic time.
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)

# The marks that the injector writes around added statements (docs/timing.md). All other comments are dropped.
_MARK = re.compile(r"//gpubpf(?:[{}]|[+@][0-9]{1,9})[ \t\r]*")

_TOKEN = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<mark>//gpubpf\S+)
  | (?P<string>"(?:\\.|[^"\\\n])*")
  | (?P<number>0[fF][0-9a-fA-F]{8}(?![\w$]) | 0[dD][0-9a-fA-F]{16}(?![\w$]) | 0[xX][0-9a-fA-F]+U?(?![\w$])
            | 0[bB][01]+U?(?![\w$])
            | [0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)? | \.[0-9]+[eE][+-][0-9]+ | [0-9]+[eE][+-]?[0-9]+ | [0-9]+U?(?![\w$]))
  | (?P<dotted>\.[A-Za-z0-9_][\w$]*(?:::[\w$]+)*)
  | (?P<name>%?[A-Za-z_$][\w$]*(?:\.(?:[xyzwrgba]|b[0-7]{1,4}|h[0-3]{1,2})(?![\w$]))?)
  | (?P<punct><<|>>|&&|\|\||==|!=|<=|>=|[()\[\]{}<>,;:|!+\-*/=@&^~?%\#])
    """,
    re.VERBOSE,
)


class Token(NamedTuple):
    """One lexical element. `kind` is mark, string, number, dotted, name or punct; `line` counts from 1."""

    kind: str
    text: str
    line: int
    start: int  # offset in the text
    end: int


def strip_comments(text: str) -> str:
    """Return the text with all comments except marks replaced by spaces. Offsets and line numbers do not change."""

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        if found[0] == '"' or (found.startswith("//g") and _MARK.fullmatch(found)):
            return found
        return re.sub(r"[^\n]", " ", found)

    return _COMMENT.sub(blank, text)


class Lexer:
    """A cursor over comment-free PTX text, with one token of lookahead."""

    def __init__(self, text: str, position: int = 0, end: int | None = None, line: int = 1) -> None:
        self.text = text
        self.position = position
        self.end = len(text) if end is None else end
        self.line = line
        self._ahead: Token | None = None

    def _read(self) -> Token | None:
        while self.position < self.end:
            match = _TOKEN.match(self.text, self.position, self.end)
            if match is None:
                raise PtxError(f"PTX line {self.line}: unexpected character {self.text[self.position]!r}")
            start, self.position = self.position, match.end()
            kind = match.lastgroup
            if kind == "space":
                self.line += match.group().count("\n")
                continue
            assert kind is not None
            return Token(kind, match.group(), self.line, start, self.position)
        return None

    def peek(self) -> Token | None:
        """Return the next token without taking it; None at the end."""
        if self._ahead is None:
            self._ahead = self._read()
        return self._ahead

    def next(self) -> Token:
        """Take the next token. Raises PtxError at the end of the text."""
        token = self.peek()
        if token is None:
            raise PtxError(
                f"PTX line {self.line}: the text ends in the middle of a statement; it may be truncated"
            )
        self._ahead = None
        return token

    def accept(self, text: str) -> bool:
        """Take the next token if it is `text`, and return whether it was."""
        token = self.peek()
        if token is not None and token.text == text and token.kind != "string":
            self._ahead = None
            return True
        return False

    def expect(self, text: str) -> Token:
        """Take the next token, which must be `text`. Raises PtxError."""
        token = self.next()
        if token.text != text:
            raise PtxError(f"PTX line {token.line}: expected {text!r}, found {token.text!r}")
        return token

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match the text that follows; None if it does not match, or if the next token has already been read ahead (`peek`)."""
        return pattern.match(self.text, self.position, self.end) if self._ahead is None else None

    def move(self, position: int) -> int:
        """Go on to a position in the text that follows, and return its line."""
        self.line += self.text.count("\n", self.position, position)
        self.position = position
        return self.line

    def rest_of_line(self) -> str:
        """Take the rest of the last token's line, as text."""
        begin = self._ahead.start if self._ahead is not None else self.position
        stop = self.text.find("\n", self.position if self._ahead is None else begin, self.end)
        stop = self.end if stop < 0 else stop
        if self._ahead is not None and self._ahead.start >= stop:
            return ""
        self._ahead = None
        self.position = stop
        return self.text[begin:stop].strip()

    def skip_braces(self) -> tuple[int, int, int]:
        """Skip a block whose `{` is the next token. Return the start and end of its contents, and the line of `{`. Raises PtxError."""
        opening = self.expect("{")
        depth = 1
        position = opening.end
        while match := _SPECIAL.search(self.text, position, self.end):
            position = match.end()
            found = match.group()
            if found == '"' or found == "/":
                if whole := _STRING_OR_MARK.match(self.text, match.start(), self.end):
                    position = whole.end()
                continue
            depth += 1 if found == "{" else -1
            if depth == 0:
                line = opening.line
                self.line = line + self.text.count("\n", opening.end, position)
                self.position = position
                return opening.end, match.start(), line
        raise PtxError(f"PTX line {opening.line}: this {{ is never closed")


_SPECIAL = re.compile(
    r'["/{}]'
)  # a set of characters alone is searched for many times faster than alternatives
_STRING_OR_MARK = re.compile(r'"(?:\\.|[^"\\\n])*"?|//gpubpf[^\n]*')


WARP_SIZE = 32  # WARP_SZ
_LONGEST_INTEGER = 66  # characters: 64 bits in binary, with the prefix 0b


def parse_integer(text: str) -> int:
    """Return the value of an integer literal: decimal, octal, hexadecimal or binary, with optional sign and U. Raises PtxError."""
    sign = -1 if text.startswith("-") else 1
    digits = text.lstrip("+-").rstrip("U")
    if len(digits) > _LONGEST_INTEGER:
        raise PtxError(f"{digits[:16]}... is larger than 64 bits")
    try:
        if digits[:2] in ("0x", "0X", "0b", "0B"):
            return sign * int(digits, 0)
        if len(digits) > 1 and digits[0] == "0":
            return sign * int(digits, 8)
        return sign * int(digits)
    except ValueError:
        raise PtxError(f"{text!r} is not an integer") from None


def parse_size(text: str) -> int:
    """Return the value of an integer literal without sign, or of WARP_SZ. Raises PtxError."""
    if text.strip() == "WARP_SZ":
        return WARP_SIZE
    if not text.strip()[:1].isdigit():
        raise PtxError(f"{text!r} is not a size")
    return parse_integer(text.strip())

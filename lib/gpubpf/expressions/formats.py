"""FORMAT of gputrace: the text and conversions of printf, checked against the arguments before anything runs.

Every number has 64 bits, so length modifiers are accepted and ignored. Only values can have floating-point conversions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from gpubpf.ebpf.floats import as_float
from gpubpf.errors import UsageError
from gpubpf.expressions.evaluate import signed
from gpubpf.expressions.syntax import Name
from gpubpf.expressions.values import ELEMENTS
from gpubpf.record import Record
from gpubpf.show.table import printable

_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", '"': '"', "'": "'"}
_CONVERSION = re.compile(
    r'%(?P<flags>[-+ 0#]*)(?P<width>\d*)(?P<precision>\.\d*)?(?:hh|h|ll|l|j|z|t)?(?P<letter>[^"]?)'
)
FLOATS = "feg"
LETTERS = "diuxXopsc" + FLOATS
MOST_DIGITS = 3  # maximum digits of a width or precision


class Conversion(Record):
    """One conversion: `flags`, `width` and `precision` as in C; `letter` is one of LETTERS."""

    flags: str
    width: str
    precision: str
    letter: str

    @property
    def text(self) -> str:
        """The conversion as the user wrote it, without length modifier."""
        return f"%{self.flags}{self.width}{self.precision}{self.letter}"

    @property
    def is_float(self) -> bool:
        return self.letter in FLOATS

    def show(self, value: int | float | str) -> str:
        """Return a value as the conversion shows it."""
        start = f"%{self.flags}{self.width}{self.precision}"
        if isinstance(value, str):
            return (start + "s") % printable(value)
        if isinstance(value, float):
            flags = self.flags if math.isfinite(value) else self.flags.replace("0", "")
            return f"%{flags}{self.width}{self.precision}{self.letter}" % value
        if self.letter == "c":
            return (start + "s") % printable(chr(value & 0xFF))
        if self.letter == "p":
            return (start + "s") % f"{value:#x}"
        number = signed(value) if self.letter in "di" else value
        return (start + ("d" if self.letter in "diu" else self.letter)) % number

    def json(self, value: int | float | str) -> int | float | str:
        """Return a value for JSON: a number, signed if the text is. Addresses (%p), NaN and infinities are strings."""
        if isinstance(value, str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)
        return f"{value:#x}" if self.letter == "p" else signed(value) if self.letter in "di" else value


class Format(Record):
    """A FORMAT. parts: texts and conversions, in order."""

    parts: tuple[str | Conversion, ...]

    @classmethod
    def read(cls, text: str) -> tuple[Format, str]:
        """Return the format in the quotes at the beginning of a text, and the rest of the text. Raises UsageError."""
        parts: list[str | Conversion] = []
        at, plain = 1, ""
        while at < len(text) and text[at] != '"':
            if text[at] == "\\":
                escaped = text[at + 1 : at + 2]
                if escaped not in _ESCAPES or not escaped:
                    raise UsageError(f'FORMAT has no escape \\{escaped}; use one of: \\n \\t \\\\ \\"')
                plain, at = plain + _ESCAPES[escaped], at + 2
            elif text.startswith("%%", at):
                plain, at = plain + "%", at + 2
            elif text[at] == "%":
                match = _CONVERSION.match(text, at)
                assert match is not None
                parts += [*([plain] if plain else []), _conversion(match)]
                plain, at = "", match.end()
            else:
                plain, at = plain + text[at], at + 1
        if at >= len(text):
            raise UsageError("FORMAT has no closing double quote; add one")
        plain = plain.rstrip("\n")  # an event is a line anyway
        return cls((*parts, *([plain] if plain else []))), text[at + 1 :]

    @property
    def conversions(self) -> tuple[Conversion, ...]:
        return tuple(part for part in self.parts if isinstance(part, Conversion))

    def check(self, arguments: Sequence[object]) -> None:
        """Raise UsageError if these arguments do not fit the conversions. arguments: expressions, and names of texts."""
        wanted = self.conversions
        if len(wanted) != len(arguments):
            needed = "1 EXPR" if len(wanted) == 1 else f"{len(wanted)} EXPRs"
            raise UsageError(f"FORMAT needs {needed}, not {len(arguments)}; write one for each conversion")
        for number, (conversion, argument) in enumerate(zip(wanted, arguments, strict=True), 1):
            if (conversion.letter == "s") != isinstance(argument, str):
                what = f"is the text {argument}" if isinstance(argument, str) else "is a number"
                advice = "%s" if isinstance(argument, str) else "%u, %d or %x"
                raise UsageError(f"{conversion.text} does not fit EXPR {number}, which {what}; use {advice}")
            if conversion.is_float and not (isinstance(argument, Name) and argument.name in ELEMENTS):
                raise UsageError(
                    f"{conversion.text} shows a floating-point number, and EXPR {number} is an integer; use %u, %d or %x (only the"
                    f" names {', '.join(ELEMENTS)} fit {conversion.text})"
                )

    def with_floats(
        self, values: Sequence[int | str], kinds: Sequence[int | None]
    ) -> tuple[int | float | str, ...]:
        """Return these values. A value with a type (its index in TYPES) becomes a floating-point number."""
        return tuple(
            as_float(value, kind) if kind is not None and isinstance(value, int) else value
            for value, kind in zip(values, kinds, strict=True)
        )

    def types(self, arguments: Sequence[object]) -> tuple[str, ...]:
        """Return, for each argument that is shown as a floating-point number, the field with its type; "" for the others."""
        return tuple(
            ELEMENTS[argument.name] if conversion.is_float and isinstance(argument, Name) else ""
            for conversion, argument in zip(self.conversions, arguments, strict=True)
        )

    def show(self, values: Sequence[int | float | str]) -> str:
        """Return the text for these values."""
        left = iter(values)
        return "".join(part if isinstance(part, str) else part.show(next(left)) for part in self.parts)

    def json(self, values: Sequence[int | float | str]) -> list[int | float | str]:
        """Return the values for JSON."""
        return [conversion.json(value) for conversion, value in zip(self.conversions, values, strict=True)]


def _conversion(match: re.Match[str]) -> Conversion:
    flags, width, precision, letter = (
        match["flags"],
        match["width"],
        match["precision"] or "",
        match["letter"],
    )
    text = match[0]
    if not letter or letter not in LETTERS:
        raise UsageError(
            f"FORMAT has no conversion {text!r}; use one of: %d %i %u %x %X %o %p %c %s %f %e %g %%"
        )
    if len(width) > MOST_DIGITS or len(precision) > MOST_DIGITS + 1:
        raise UsageError(f"{text[:24]} is too wide; a width or precision has at most {MOST_DIGITS} digits")
    signs = "di" + FLOATS if set(flags) & set("+ ") else LETTERS
    alternate = "xX" + FLOATS if "#" in flags else LETTERS
    if letter not in signs or letter not in alternate:
        raise UsageError(f"{text}: the flags + and space belong to %d and %f, and # to %x and %f; correct it")
    if letter in "psc":
        flags = flags.replace("0", "")
    return Conversion(flags, width, precision, letter)

"""Read what a user asks for: SPEC, FILTER, TYPE, keys and FORMAT.

    POINT:KERNEL[:DETAIL] [(FILTER)]                             gpucount
    POINT:KERNEL[:DETAIL] [(FILTER)] ["FORMAT"[, EXPR...]]       gputrace
    POINT:KERNEL[:DETAIL] [(FILTER)]:TYPE:EXPR[, KEY][#LABEL]    gpudist

Two colons in a row belong to a name, such as that of the kernel ns::scale.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from gpubpf.errors import UsageError
from gpubpf.expressions import points
from gpubpf.expressions.formats import Format
from gpubpf.expressions.points import Attachment, Point
from gpubpf.expressions.syntax import U64, Name, Names, Node, names_of, parse, parse_list
from gpubpf.record import Record, field, replace
from gpubpf.show.parsed import LookOptions

MOST = 32  # maximum specifications of a command line, and maximum EXPRs of a FORMAT
TYPES = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64")
EVERY = "*"
TIMES = ("globaltimer", "clock", "waited", "call_ns")

_COLON = re.compile(r"(?<!:):(?!:)")
_HEAD_END = re.compile(r'\s+\(|\s*"')
_SPACE = re.compile(r"\s")
# Brackets in names; the last kind occurs in names of lambda functions.
_NAMED = re.compile(r"\(anonymous namespace\)|operator\(\)|\{[^{}]*\}")
_TYPE = re.compile(rf"(?<!:):\s*({'|'.join(TYPES)})\s*:(?!:)")


class Spec(Record):
    """POINT:KERNEL[:DETAIL] [(FILTER)]. text: the whole specification, as the user typed it."""

    text: str
    point: Point
    kernel: str
    attachment: Attachment
    filter: Node | None = None

    @property
    def names(self) -> Names:
        """What the specification's expressions may name."""
        return self.point.names(self.attachment)


class Distribution(Record):
    """What gpudist adds up: the value of an expression, as one of TYPES.

    key: a name in `points.TEXTS`, or "".
    kind: log2, linear or values.
    width: width of a linear bucket."""

    spec: Spec
    type: str
    value: Node
    key: str
    label: str
    kind: str = "log2"
    width: int = 1

    @property
    def signed(self) -> bool:
        return self.type.startswith("s")


class Trace(Record):
    """What gputrace prints.

    arguments: expressions, and names in `points.TEXTS`; empty without FORMAT.
    numbers: the expressions whose values a record has. The last of them are the types of arguments that are shown as floating-point
        numbers."""

    spec: Spec
    format: Format = field(default_factory=lambda: Format(()))
    arguments: tuple[Node | str, ...] = ()

    @property
    def numbers(self) -> tuple[Node, ...]:
        found = tuple(argument for argument in self.arguments if not isinstance(argument, str))
        return (*found, *(Name(field, U64) for field in self.type_fields))

    @property
    def type_fields(self) -> tuple[str, ...]:
        """The fields with the types of arguments that are shown as floating-point numbers."""
        return tuple(dict.fromkeys(field for field in self.format.types(self.arguments) if field))


def count(text: str) -> Spec:
    """Parse a specification of gpucount. Raises UsageError."""
    found, rest = _head(text, text)
    if rest:
        raise UsageError(
            f"unexpected {rest[:24]!r} behind the filter; a SPEC is POINT:KERNEL[:DETAIL] [(FILTER)]"
        )
    return _with_values(found)


def distribution(text: str) -> Distribution:
    """Parse a specification of gpudist. Raises UsageError."""
    start, kind = _HEAD_END.search(text), _TYPE.search(text)
    before = kind.end() if kind else 0  # a KERNEL may be a lambda: foo::{lambda()#1}
    body, _, label = text[before:].partition("#")
    body = text[:before] + body
    if kind is None:
        raise UsageError(f"there is no TYPE:EXPR; write SPEC:TYPE:EXPR, with TYPE one of: {', '.join(TYPES)}")
    if start is not None and start.start() < kind.start():
        spec, rest = _head(body, body)
        kind = _TYPE.match(rest)
        if kind is None:
            raise UsageError(
                f"unexpected {rest[:24]!r} behind the filter; write :TYPE:EXPR, with TYPE one of: {', '.join(TYPES)}"
            )
    else:
        spec, rest = _spec(body[: kind.start()].strip(), None), body[kind.start() :]
        kind = _TYPE.match(rest)
        assert kind is not None
    value, *keys = parse_list(rest[kind.end() :], spec.names, spec.names.texts)
    if isinstance(value, str):
        raise UsageError(f"{value} is a text, not a number; use it as a key: EXPR, {value}")
    if len(keys) > 1 or not all(isinstance(key, str) for key in keys):
        raise UsageError(f"EXPR may have one key after a comma: {' or '.join(spec.names.texts)}")
    key = str(keys[0]) if keys else ""
    return Distribution(
        _with_values(spec, value), kind[1], value, key, label.strip() or " ".join(body.split())
    )


def trace(text: str) -> Trace:
    """Parse a specification of gputrace. Raises UsageError."""
    spec, rest = _head(text, text)
    if not rest:
        return Trace(_with_values(spec))
    if not rest.startswith('"'):
        raise UsageError(f"unexpected {rest[:24]!r} behind the filter; a FORMAT begins with a double quote")
    form, rest = Format.read(rest)
    rest = rest.strip()
    if rest and not rest.startswith(","):
        raise UsageError(f"unexpected {rest[:24]!r} behind the FORMAT; put a comma before each EXPR")
    arguments = tuple(parse_list(rest[1:], spec.names, spec.names.texts)) if rest else ()
    if len(arguments) > MOST:
        raise UsageError(f"{len(arguments)} EXPRs follow the FORMAT; there may be {MOST}")
    form.check(arguments)
    made = Trace(spec, form, arguments)
    return replace(made, spec=_with_values(spec, *made.numbers))


def _head(text: str, whole: str) -> tuple[Spec, str]:
    """Return the SPEC and FILTER at the beginning of a text, and the rest of the text."""
    end = _HEAD_END.search(text)
    head, rest = (text, "") if end is None else (text[: end.start()], text[end.start() :].lstrip())
    chosen = None
    if rest.startswith("("):
        chosen, rest = _bracketed(rest)
    return _spec(head.strip(), chosen), rest.strip()


def _with_values(spec: Spec, *expressions: Node) -> Spec:
    """Return the specification. If its filter or one of these expressions uses the access's values, its program gets the values."""
    used = {name for node in (spec.filter, *expressions) if node is not None for name in names_of(node)}
    needed = spec.point.needs_values(used)
    return replace(spec, attachment=spec.attachment.with_values()) if needed else spec


def _bracketed(text: str) -> tuple[str, str]:
    """Return the text in the brackets at the beginning of a text, and the rest. Quotes have no meaning in expressions."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return text[1:at], text[at + 1 :]
    raise UsageError("the filter has no closing bracket; write (FILTER)")


def _spec(head: str, chosen: str | None) -> Spec:
    parts = [part.strip() for part in _COLON.split(head)]
    point = points.point(parts[0])
    if not 2 <= len(parts) <= 3 or not all(parts):
        raise UsageError(f"{head[:60]!r} is not POINT:KERNEL[:DETAIL]; use * as KERNEL for every kernel")
    plain, bracket, _ = parts[1].partition("<")
    if plain and bracket:
        raise UsageError(
            f"KERNEL has no template arguments; write {plain[:40]!r} for all of them, or the mangled name of one"
        )
    for number, part in enumerate(parts):
        if _has_filter(part, point, number == 2):
            raise UsageError(f"{part[:40]!r}: write a space before (FILTER)")
        if _SPACE.search(part.replace("(anonymous namespace)", "")):
            raise UsageError(
                f"{part[:40]!r} has a space in it; put a FILTER in brackets, or write ? for a space"
            )
    attachment = point.attachment(parts[2] if len(parts) == 3 else points.ALL)
    if chosen is None:
        return Spec(head, point, parts[1], attachment)
    condition = parse(chosen, point.names(attachment))
    return Spec(f"{head} ({' '.join(chosen.split())})", point, parts[1], attachment, condition)


def _has_filter(part: str, point: Point, is_detail: bool) -> bool:
    """Return whether a part of a SPEC ends in a FILTER without a space before it, and not in the parameters of a function's name."""
    _, bracket, chosen = _NAMED.sub("", part).partition("(")
    if not bracket or not is_detail or point.glob != "function":
        return bool(bracket)
    try:
        parse(chosen.removesuffix(")"), point.names(point.attachment(EVERY)))
    except UsageError:
        return False
    return True


# --- the command line ---

Read = TypeVar("Read")


def read(
    texts: Sequence[str], looks: LookOptions, one: Callable[[str], Read], listed: str = "entry:*"
) -> list[Read]:
    """Return the specifications of a command line. Raises UsageError, whose message begins with the wrong specification.

    texts: SPEC…
    looks: the values of --list, --ptx and --ebpf. Without a SPEC, --ebpf prints the tool's own part, and --list uses `listed`.
    one: reads one specification.
    """
    if not texts and looks.list:
        return [one(listed)]
    if not texts and looks.ebpf:
        return []
    if not texts:
        raise UsageError(
            f"no SPEC is given; write POINT:KERNEL, with POINT one of: {', '.join(points.POINTS)}"
        )
    if len(texts) > MOST:
        raise UsageError(f"{len(texts)} SPECs are given; a run takes at most {MOST}")
    found = []
    for text in texts:
        try:
            found.append(one(text))
        except UsageError as error:
            raise UsageError(f"{_quoted(text)}: {error}") from None
    return found


def _quoted(text: str) -> str:
    """Return the beginning of a text for a message, without line breaks."""
    text = " ".join(text.split())
    return repr(text if len(text) <= 40 else text[:39] + "…")


def tells_times(*expressions: Node | None) -> bool:
    """Return whether an expression reads a clock. Then the command should run on the virtual clock, which gives repeatable results."""
    return any(name in TIMES for node in expressions if node is not None for name in names_of(node))


def choose_kernels(wanted: Sequence[str], specs: Iterable[Spec]) -> list[tuple[str, ...]]:
    """Return the kernel globs of each specification; an empty tuple selects every kernel.

    wanted: --kernel, which replaces the kernel `*`. Raises UsageError for --kernel together with a specification that names its
    kernels."""
    chosen = []
    for spec in specs:
        if wanted and spec.kernel != EVERY:
            raise UsageError(
                f"--kernel and the KERNEL of {_quoted(spec.text)} exclude each other; write * there"
            )
        chosen.append(tuple(wanted) if spec.kernel == EVERY else (spec.kernel,))
    return chosen


def union(chosen: Iterable[Sequence[str]]) -> list[str]:
    """Return the kernel globs of all specifications together; empty: every kernel."""
    chosen = list(chosen)
    return list(dict.fromkeys(glob for globs in chosen for glob in globs)) if all(chosen) else []


def any_launches(specs: Iterable[Spec]) -> bool:
    """Return whether a specification is about launches, which are in the operation log."""
    return any(spec.point.of_launch for spec in specs)

"""Shorten demangled kernel names. In a table, names that are too long lose what does not tell them apart."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from gpubpf import digest

_NODE = r"\d+\.\d+ "  # the node of a graph, which launchlate puts in front of a name
_TAG = r" #[0-9a-f]+$"  # the hash that `told_apart` appends
_DIGITS = 2  # minimum digits of a hash
_LEAST_ARGUMENT = 8  # a template argument is not cut to fewer columns
_LEAST_NAME = 8  # minimum columns in which the name before the arguments stays different from others
# Longest first, as a compiler reads them (C++ standard, [over.oper]).
_OPERATORS = (
    *("<=>", "<<=", ">>=", "->*", "new[]", "delete[]", "()", "[]", "->", "<<", ">>", "<=", ">=", "==", "!="),
    *("&&", "||", "++", "--", "+=", "-=", "*=", "/=", "%=", "^=", "&=", "|=", "new", "delete", "co_await"),
    *("<", ">", "+", "-", "*", "/", "%", "^", "&", "|", "~", "!", "=", ","),
)
_ANONYMOUS = "(anonymous namespace)"
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class _Name(NamedTuple):
    """The parts of a demangled name.

    before      the text before the name: the return type
    texts       the name, split at its template arguments: ("ns::Outer", "::run", "")
    arguments   the template arguments between these texts: (("int",), ("4", "float")); "" if left out
    after       the text after the name: parameters, " const", " [clone .isra.0]"
    tag         the hash that distinguishes it from an equal name
    """

    before: str
    texts: tuple[str, ...]
    arguments: tuple[tuple[str, ...], ...]
    after: str
    tag: str = ""

    def __str__(self) -> str:
        lists = [f"<{', '.join(filter(None, some))}>" if any(some) else "" for some in self.arguments]
        name = "".join(part for pair in zip(self.texts, (*lists, ""), strict=True) for part in pair)
        return f"{self.before}{name}{self.after}{self.tag}"


_Step = Callable[[Sequence[_Name], int], list[_Name]]  # shortens names for a width


def shorten(full: str) -> str:
    """Return a demangled name without return type, template arguments and parameter list."""
    return "".join(_parsed(full).texts) or full


def fitted(texts: Iterable[str], width: int) -> dict[str, str]:
    """Return how each of these printable names is shown in `width` columns. Different names look different.

    If a name is too long, it is shortened together with the names that differ from it only in namespaces, types and arguments. These
    names lose parts that do not distinguish them: the return type, then parameters, template arguments that all of them share,
    namespaces, and other arguments. If that is not enough, long arguments are shortened in the same way. Then the name before the
    arguments is cut, or the whole text loses its middle. Names that would then look the same show the part where they differ, or end
    with a hash.
    """
    shown = {text: text for text in texts}
    if all(len(text) <= width for text in shown):
        return shown
    alike: dict[str, list[str]] = {}
    for text in shown:
        alike.setdefault("".join(_last_part(_named(text)).texts), []).append(text)
    labels = dict(shown)
    for some in alike.values():
        fewer = _by_steps(some, width, _DROPS)
        shown |= zip(some, fewer, strict=True)
        labels |= zip(some, _by_steps(fewer, width, (_shorten_arguments,)), strict=True)
    cut = _cut_names(list(labels.values()), width)
    labels = {text: without_middle(label, width) for text, label in zip(labels, cut, strict=True)}
    for some in _equal(labels):
        labels |= zip(some, _where_they_differ([shown[text] for text in some], width), strict=True)
    digits = _DIGITS
    while same := _equal(labels):
        for text in (text for some in same for text in some):
            tag = f"#{_hash(text, digits)}"
            room = max(width - len(tag), 0)
            labels[text] = (without_middle(shown[text], room) if room > 3 else shown[text][:room]) + tag
        digits += 1
    return labels


def told_apart(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels by key, all of them different: equal labels end with a hash of their keys."""
    found, digits = dict(labels), _DIGITS
    while same := _equal(found):
        found |= {key: f"{labels[key]} #{_hash(key, digits)}" for some in same for key in some}
        digits += 1
    return found


def without_middle(text: str, width: int) -> str:
    """Return `text`; without its middle if it is longer than `width`."""
    if len(text) <= width:
        return text
    front = (width - 3) * 2 // 3
    return f"{text[:front]}...{text[len(text) - (width - 3 - front) :]}"


def _equal(labels: Mapping[str, str]) -> list[list[str]]:
    """Return the groups of keys whose labels are equal."""
    keys: dict[str, list[str]] = {}
    for key, label in labels.items():
        keys.setdefault(label, []).append(key)
    return [some for some in keys.values() if len(some) > 1]


def _hash(key: str, digits: int) -> str:
    return digest.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:digits]


def _by_steps(texts: Sequence[str], width: int, steps: Iterable[_Step]) -> list[str]:
    """Return names after as few steps as they need to fit into `width`. A step that would make names equal is left out."""
    if all(len(text) <= width for text in texts):
        return list(texts)
    found, shown = [_named(text) for text in texts], list(texts)
    for step in steps:
        fewer = step(found, width)
        if len(labels := {str(name) for name in fewer}) == len(found) and "" not in labels:
            found, shown = fewer, [str(name) for name in fewer]
        if all(len(label) <= width for label in shown):
            break
    return shown


def _drop_return_type(names: Sequence[_Name], width: int) -> list[_Name]:
    kept = [re.match(_NODE, name.before) for name in names]
    return [
        name._replace(before=node[0] if node else "") if name.after else name
        for name, node in zip(names, kept, strict=True)
    ]


def _drop_parameters(names: Sequence[_Name], width: int) -> list[_Name]:
    return [name._replace(after="") for name in names]


def _drop_shared_arguments(names: Sequence[_Name], width: int) -> list[_Name]:
    """Leave out the template arguments that all names have at the same place."""
    found = [name.arguments for name in names]
    if len(set(map(len, found))) > 1:
        return list(names)
    kept = []
    for lists in zip(*found, strict=True):
        if len(set(map(len, lists))) > 1:
            kept.append(lists)
            continue
        differ = [len(set(column)) > 1 for column in zip(*lists, strict=True)]
        kept.append(tuple(tuple(a for a, keep in zip(one, differ, strict=True) if keep) for one in lists))
    return [name._replace(arguments=tuple(lists[n] for lists in kept)) for n, name in enumerate(names)]


def _drop_namespaces(names: Sequence[_Name], width: int) -> list[_Name]:
    return [_last_part(name) for name in names]


def _last_part(name: _Name) -> _Name:
    """Return a name without the namespaces and classes around it. Operators and lambda functions keep them."""
    at = max((n for n, text in enumerate(name.texts) if "::" in text), default=None)
    if at is None or "operator" in "".join(name.texts) or "{" in "".join(name.texts):
        return name
    first = name.texts[at].rpartition("::")[2]
    return name._replace(texts=(first, *name.texts[at + 1 :]), arguments=name.arguments[at:])


def _argument_places(names: Sequence[_Name]) -> list[tuple[int, int]]:
    """Return where all names have a template argument: list, place in it. Long ones first. [] if their numbers differ."""
    (first, *others) = {tuple(map(len, name.arguments)) for name in names}
    places = [] if others else [(n, m) for n, count in enumerate(first) for m in range(count)]
    return sorted(places, key=lambda place: -max(map(len, _arguments_at(names, place))))


def _arguments_at(names: Sequence[_Name], place: tuple[int, int]) -> list[str]:
    return [name.arguments[place[0]][place[1]] for name in names]


def _with_arguments(names: Sequence[_Name], place: tuple[int, int], shown: Mapping[str, str]) -> list[_Name]:
    """Return names with their arguments at a place replaced."""
    made = []
    for name, argument in zip(names, _arguments_at(names, place), strict=True):
        lists = [list(some) for some in name.arguments]
        lists[place[0]][place[1]] = shown.get(argument, "")
        made.append(name._replace(arguments=tuple(map(tuple, lists))))
    return made


def _surplus(names: Sequence[_Name], width: int) -> int:
    return max(len(str(name)) for name in names) - width


def _drop_needless_arguments(names: Sequence[_Name], width: int) -> list[_Name]:
    """Leave out template arguments, long ones first, as long as the remaining arguments distinguish the names."""
    found = list(names)
    for place in _argument_places(names):
        if _surplus(found, width) <= 0:
            break
        fewer = _with_arguments(found, place, {})
        if len(set(map(str, fewer))) == len(fewer):
            found = fewer
    return found


_DROPS: tuple[_Step, ...] = (
    _drop_return_type,
    _drop_parameters,
    _drop_shared_arguments,
    _drop_namespaces,
    _drop_needless_arguments,
)


def _shorten_arguments(names: Sequence[_Name], width: int) -> list[_Name]:
    """Shorten template arguments, long ones first. Different arguments at one place stay different."""
    found = list(names)
    for place in _argument_places(names):
        some = sorted(set(_arguments_at(found, place)))
        longest, surplus = max(map(len, some)), _surplus(found, width)
        if surplus <= 0 or longest <= _LEAST_ARGUMENT:
            break
        found = _with_arguments(found, place, fitted(some, max(longest - surplus, _LEAST_ARGUMENT)))
    return found


def _cut_names(labels: Sequence[str], width: int) -> list[str]:
    """Return labels. In labels that are too long, shorten the name before the template arguments and parameters."""
    names = [_named(label) for label in labels]
    rooms = [width - len(str(name)) + len(name.texts[0]) for name in names]
    # A name with nothing behind it is cut last, so that it can show where it differs from others.
    cut = [3 < room < min(len(name.texts[0]), width) for name, room in zip(names, rooms, strict=True)]
    firsts = sorted({name.texts[0] for name, is_cut in zip(names, cut, strict=True) if is_cut})
    shown = {
        room: fitted(firsts, room) for room in set(itertools.compress(rooms, cut)) if room >= _LEAST_NAME
    }
    made = list(labels)
    for at in itertools.compress(range(len(made)), cut):
        (first, *others), room = names[at].texts, rooms[at]
        first = shown[room][first] if room in shown else f"{first[: room - 3]}..."
        made[at] = str(names[at]._replace(texts=(first, *others)))
    return made


def _where_they_differ(labels: Sequence[str], width: int) -> list[str]:
    """Return the beginning of each label, and the part after the beginning that all labels share."""
    first, last = min(labels), max(labels)  # what these two begin with, all begin with
    common = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    head = min(common, width // 3)
    room = width - head - 3
    parts = [
        label[common:] if len(label) - common <= room else f"{label[common:][: room - 3]}..."
        for label in labels
    ]
    return [f"{label[:head]}...{part}" for label, part in zip(labels, parts, strict=True)]


@functools.lru_cache(maxsize=16384)
def _named(text: str) -> _Name:
    """Return the parts of a label, which may end with a hash."""
    tag = re.search(_TAG, text)
    return _parsed(text[: tag.start()])._replace(tag=tag[0]) if tag else _parsed(text)


def _parsed(full: str) -> _Name:
    texts, arguments, name = list[str](), list[tuple[str, ...]](), ""
    start = position = 0  # start: of the name
    while position < len(full):
        character = full[position]
        fresh = not arguments and name in ("decltype", "")
        if full.startswith(_ANONYMOUS, position):
            name += _ANONYMOUS
            position += len(_ANONYMOUS)
        elif full.startswith("operator", position) and _is_operator(full, position, name):
            text, position = _operator(full, position)
            name += text
        elif character == "<" and (name or arguments):
            end = _after_arguments(full, position)
            arguments.append(_split(full[position + 1 : end - full.startswith(">", end - 1)]))
            texts.append(name)
            name = ""
            position = end
        elif character == "{":  # {lambda(int)#1}, {unnamed type#1}
            end = _after_brackets(full, position)
            name += full[position:end]
            position = end
        elif character == "[":  # [abi:cxx11], [clone .isra.0]
            position = _after_brackets(full, position)
        elif character == "(" and fresh:
            if full[position + 1 : position + 2] in ("*", "&"):
                # The function returns a pointer: int (*name(…))(…).
                start = position = position + 2
            else:  # all of a decltype is the return type
                start = position = _after_brackets(full, position)
                name = ""
        elif character == "(":
            break
        elif character == " ":  # the text before was a part of the return type
            rest = full[position + 1 :].lstrip()
            if not rest or rest.startswith("["):
                break
            if not (not arguments and name == "decltype" and rest.startswith("(")):
                texts, arguments, name, start = [], [], "", position + 1
            position += 1
        else:
            name += character
            position += 1
    return _Name(full[:start], (*texts, name), tuple(arguments), full[position:])


def _split(arguments: str) -> tuple[str, ...]:
    """Return template arguments one by one."""
    found, begin, position = [], 0, 0
    while position < len(arguments):
        character = arguments[position]
        if character in _CLOSING:
            position = _after_brackets(arguments, position)
        elif character == "<":
            position = _after_arguments(arguments, position)
        else:
            if character == ",":
                found.append(arguments[begin:position].strip())
                begin = position + 1
            position += 1
    return tuple(one for one in (*found, arguments[begin:].strip()) if one)


def _is_operator(full: str, position: int, name: str) -> bool:
    """Return whether "operator" at `position` is the keyword and not a part of an identifier."""
    before = name[-1:]
    after = full[position + 8 : position + 9]
    return not (before.isalnum() or before in ("_", "$")) and not (after.isalnum() or after in ("_", "$"))


def _operator(full: str, position: int) -> tuple[str, int]:
    """Return the name of the operator function at `position`, and the position after it."""
    position += len("operator")
    spaced = full[position : position + 1] == " "
    start = position + spaced
    for symbol in _OPERATORS:
        word = symbol[0].isalpha()
        if full.startswith(symbol, start) and word == spaced:
            return f"operator{' ' if word else ''}{symbol}", _skip_space(full, start + len(symbol))
    # A literal operator or a conversion ends at its parameter list. Template arguments of the target type are left out.
    text = ""
    while start < len(full) and full[start] != "(":
        if full[start] == "<":
            start = _after_arguments(full, start)
        else:
            text += full[start]
            start += 1
    return f"operator {text}" if spaced else f"operator{text}", start


def _skip_space(full: str, position: int) -> int:
    """Return the position after a space before template arguments, which operators have: operator<< <int>."""
    return position + full.startswith(" <", position)


def _after_arguments(full: str, position: int) -> int:
    """Return the end of the template arguments that begin at `position`. In parentheses, < and > may be comparisons."""
    depth = 0
    while position < len(full):
        character = full[position]
        if character in _CLOSING:
            position = _after_brackets(full, position)
            continue
        if character == ">" and full[position - 1] == "-":  # ->
            position += 1
            continue
        depth += {"<": 1, ">": -1}.get(character, 0)
        position += 1
        if depth == 0:
            break
    return position


def _after_brackets(full: str, position: int) -> int:
    """Return the position after the bracket that closes the one at `position`. Other kinds of brackets inside are balanced."""
    opening = full[position]
    depth = 0
    while position < len(full):
        depth += {opening: 1, _CLOSING[opening]: -1}.get(full[position], 0)
        position += 1
        if depth == 0:
            break
    return position

"""Shorten demangled kernel names. In a table, names that are too long lose what does not tell them apart."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

_NODE = re.compile(r"\d+\.\d+ ")  # the node of a graph, which launchlate puts in front of a name
_TAG = re.compile(r" #[0-9a-f]+$")  # of `told_apart`
_DIGITS = 2  # the fewest digits of a hash
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

    before      what is in front of the name: the return type
    texts       the name, cut where its template arguments are: ("ns::Outer", "::run", "")
    arguments   the template arguments between these: (("int",), ("4", "float"))
    after       what is behind the name: parameters, " const", " [clone .isra.0]"
    tag         the hash that tells it from an equal name
    """

    before: str
    texts: tuple[str, ...]
    arguments: tuple[tuple[str, ...], ...]
    after: str
    tag: str = ""

    def __str__(self) -> str:
        lists = [f"<{', '.join(some)}>" if some else "" for some in self.arguments]
        name = "".join(part for pair in zip(self.texts, (*lists, ""), strict=True) for part in pair)
        return f"{self.before}{name}{self.after}{self.tag}"


def shorten(full: str) -> str:
    """Return a demangled name without return type, template arguments and parameter list."""
    return "".join(_parsed(full).texts) or full


def fitted(texts: Iterable[str], width: int) -> dict[str, str]:
    """Return each of some printable names as it is shown in `width` columns. Different names look different.

    If a name is too long, it and the names that differ from it in types and arguments only lose what does not tell them
    apart: the return type, then parameters, template arguments that all of them have, and namespaces. If that is not enough,
    names lose their middle. Those that would then look the same show the part where they differ, or end with a hash.
    """
    shown = {text: text for text in texts}
    if all(len(text) <= width for text in shown):
        return shown
    alike: dict[str, list[str]] = {}
    for text in shown:
        alike.setdefault("".join(_named(text).texts), []).append(text)
    for some in alike.values():
        shown |= zip(some, _without_what_they_share(some, width), strict=True)
    labels = {text: without_middle(label, width) for text, label in shown.items()}
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
    """Return labels by key, each different from the others: equal ones end with a hash of their keys."""
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
    """Return the keys of labels that are equal, together."""
    keys: dict[str, list[str]] = {}
    for key, label in labels.items():
        keys.setdefault(label, []).append(key)
    return [some for some in keys.values() if len(some) > 1]


def _hash(key: str, digits: int) -> str:
    import hashlib  # slow to import, and rarely needed

    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:digits]


def _without_what_they_share(texts: Sequence[str], width: int) -> list[str]:
    """Return names without parts that do not tell them apart, as few as needed to fit them into `width`."""
    if all(len(text) <= width for text in texts):
        return list(texts)
    found, shown = [_named(text) for text in texts], list(texts)
    for drop in (_drop_return_type, _drop_parameters, _drop_shared_arguments, _drop_namespaces):
        fewer = drop(found)
        if len(labels := {str(name) for name in fewer}) == len(found) and "" not in labels:
            found, shown = fewer, [str(name) for name in fewer]
        if all(len(label) <= width for label in shown):
            break
    return shown


def _drop_return_type(names: Sequence[_Name]) -> list[_Name]:
    kept = [_NODE.match(name.before) for name in names]
    return [
        name._replace(before=node[0] if node else "") if name.after else name
        for name, node in zip(names, kept, strict=True)
    ]


def _drop_parameters(names: Sequence[_Name]) -> list[_Name]:
    return [name._replace(after="") for name in names]


def _drop_shared_arguments(names: Sequence[_Name]) -> list[_Name]:
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


def _drop_namespaces(names: Sequence[_Name]) -> list[_Name]:
    return [_last_part(name) for name in names]


def _last_part(name: _Name) -> _Name:
    """Return a name without the namespaces and classes around it. Operators and lambda functions keep them."""
    at = max((n for n, text in enumerate(name.texts) if "::" in text), default=None)
    if at is None or "operator" in "".join(name.texts) or "{" in "".join(name.texts):
        return name
    first = name.texts[at].rpartition("::")[2]
    return name._replace(texts=(first, *name.texts[at + 1 :]), arguments=name.arguments[at:])


def _where_they_differ(labels: Sequence[str], width: int) -> list[str]:
    """Return the beginning of each label, and the part behind all that the labels have in common."""
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
    tag = _TAG.search(text)
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

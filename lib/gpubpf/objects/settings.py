"""Values that a user gives to an object's variables, arrays and hashes before its programs run: NAME=VALUE, NAME[KEY]=VALUE."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf.ebpf import maps
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.errors import UsageError
from gpubpf.record import Record, field, replace
from gpubpf.show import table

if TYPE_CHECKING:
    import numpy as np

_SETTING = re.compile(r"(\w+)(?:\[([^\[\]=]+)\])?=(.*)", re.S)
_MOST_CONTENTS = 1 << 24  # maximum bytes of an array or hash in which an element is set
_ARRAYS = ("array", "shared_array")


class Settings(Record):
    """What the command line changes in an object: the sections of programs, and values of variables, arrays and hashes.

    sections  name of a program → the section that replaces its own
    values    NAME=VALUE or NAME[KEY]=VALUE
    alone     the only program that is loaded, as a separate kernel
    """

    sections: Mapping[str, str] = field(default_factory=dict)
    values: Sequence[str] = ()
    alone: str | None = None


def sections(given: Iterable[str]) -> dict[str, str]:
    """Parse each PROGRAM=SECTION of --attach. Raises UsageError."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UsageError(
                f"--attach {text!r} has no value; write PROGRAM=SECTION, such as on_entry=kprobe/scale"
            )
        found[name] = value
    return found


def with_values(
    definitions: Mapping[str, MapDefinition], sections: Collection[str], values: Iterable[str]
) -> dict[str, MapDefinition]:
    """Return the maps with these values, given as NAME=VALUE, in their contents. Raises UsageError.

    sections: the maps that hold variables."""
    result = dict(definitions)
    variables = {
        field: (name, kind, at)
        for name, one in definitions.items()
        if name in sections and one.value_type is not None
        for field, kind, at in one.value_type["fields"]
    }
    kinds = (*_ARRAYS, "hash")
    settable = [name for name, one in definitions.items() if one.kind in kinds and name not in sections]
    for text in values:
        match = _SETTING.fullmatch(text)
        where = f"--set {text!r}"
        if match is None:
            raise UsageError(f"{where} has no value; write NAME=VALUE or NAME[KEY]=VALUE")
        name, key, value = match.groups()
        if name in variables:
            holder, kind, at = variables[name]
            result[holder] = _with_variable(result[holder], kind, at, key, value, where)
        elif name in result and name not in sections:
            of_kind = _with_entry if result[name].kind == "hash" else _with_elements
            result[name] = of_kind(result[name], key, value, where)
        else:
            known = [*(one for one in variables if one.isidentifier()), *settable]
            raise UsageError(
                f"{where}: there is no variable, array or hash {name}; use one of: {', '.join(known) or 'none'}"
            )
    return result


def _with_variable(
    definition: MapDefinition, kind: Any, at: int, key: str | None, value: str, where: str
) -> MapDefinition:
    whole = maps.dtype(kind, maps.type_size(kind))
    if key is not None:
        base, shape = whole.subdtype or (whole, ())
        index = _number(key, where)
        if len(shape) != 1 or not 0 <= index < shape[0]:
            known = f"it has the elements 0 to {shape[0] - 1}" if len(shape) == 1 else "set it as a whole"
            raise UsageError(f"{where}: the variable has no element {key}; {known}")
        at, whole = at + index * base.itemsize, base
    return _written(definition, at, _bytes(whole, value, where))


def _with_elements(definition: MapDefinition, key: str | None, value: str, where: str) -> MapDefinition:
    """Return an array with one element, or with the first elements, one for each number of a list."""
    if definition.kind not in _ARRAYS:
        raise UsageError(
            f"{where}: map {definition.name} is of kind {definition.kind}; only arrays and hashes can be set"
        )
    kind, size = definition.value_dtype, definition.value_size
    if key is None and kind.subdtype is None and kind.names is None and kind.kind in "iufb":
        parts = (_repeated(part, definition.max_entries, where) for part in value.split(","))
        data, first = b"".join(_bytes(kind, part, where) * times for part, times in parts), 0
    else:
        data, first = _bytes(kind, value, where), _number(key or "0", where)
    if not 0 <= first < definition.max_entries or len(data) > (definition.max_entries - first) * size:
        raise UsageError(
            f"{where}: map {definition.name} has only {table.count(definition.max_entries, 'element')}"
        )
    if first * size + len(data) > _MOST_CONTENTS:
        raise UsageError(f"{where}: only the first {_MOST_CONTENTS:,} bytes of a map can be set")
    return _written(definition, first * size, data)


def _with_entry(definition: MapDefinition, key: str | None, value: str, where: str) -> MapDefinition:
    """Return a hash with a new element, or with a new value of an existing element."""
    name = definition.name
    if key is None:
        raise UsageError(f"{where}: map {name} is a hash; write {name}[KEY]=VALUE")
    if maps.storage_size(definition) > _MOST_CONTENTS:
        raise UsageError(f"{where}: map {name} has more than {_MOST_CONTENTS:,} bytes, so it cannot be set")
    found = maps.elements(definition)
    found[_bytes(definition.key_dtype, key, where)] = _bytes(definition.value_dtype, value, where)
    if len(found) > definition.max_entries:
        raise UsageError(f"{where}: map {name} has room for {table.count(definition.max_entries, 'element')}")
    return replace(definition, contents=b"".join(one + of for one, of in found.items()))


def _repeated(part: str, most: int, where: str) -> tuple[str, int]:
    """Return VALUE and N of a text VALUE*N, which stands for N times VALUE."""
    value, star, times = part.partition("*")
    count = _number(times, where) if star else 1
    if not 0 < count <= most:
        raise UsageError(f"{where}: there is room for {table.count(most, 'number')}")
    return value, count


def _named(kinds: Sequence[np.dtype[Any]]) -> str:
    """Return the types of numbers in words: ``uint32``, ``int8 and uint64``."""
    return " and ".join(sorted({"text" if kind.kind == "S" else kind.name for kind in kinds}))


def _written(definition: MapDefinition, at: int, data: bytes) -> MapDefinition:
    old = definition.contents.ljust(at + len(data), b"\0")
    size = definition.value_size
    contents = old[:at] + data + old[at + len(data) :]
    return replace(definition, contents=contents.ljust(-(-len(contents) // size) * size, b"\0"))


def _number(text: str, where: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        raise UsageError(f"{where}: {text!r} is not a number; write a number such as 7 or 0x10") from None


def _bytes(kind: np.dtype[Any], value: str, where: str) -> bytes:
    """Return the bytes of a value: a number or text; for arrays and structures, a list of them in the order of the members."""
    import numpy as np

    if kind.kind == "V" and kind.names is None and kind.subdtype is None:  # as `values.plain` shows it
        size = kind.itemsize
        kind = np.dtype(("<u8", (size // 8,)) if size % 8 == 0 else ("|u1", (size,)))
    single = list(_members(kind, 0))
    whole = value if kind.kind == "S" else None  # a text may have commas
    repeated = (
        [(whole, 1)] if whole is not None else (_repeated(p, len(single), where) for p in value.split(","))
    )
    parts = [part for part, times in repeated for _ in range(times)]
    if len(parts) != len(single):
        raise UsageError(f"{where}: the type has {table.count(len(single), 'number')}, not {len(parts)}")
    found = bytearray(kind.itemsize)
    try:
        for (at, one), part in zip(single, parts, strict=True):
            found[at : at + one.itemsize] = _scalar(one, part, where)
    except (ValueError, OverflowError):
        raise UsageError(
            f"{where}: {value!r} does not fit the type, {_named([one for _, one in single])}; write numbers such as 7, -1, 0x10 or 0.5"
        ) from None
    return bytes(found)


def _members(kind: np.dtype[Any], at: int) -> Iterator[tuple[int, np.dtype[Any]]]:
    """Yield the numbers and texts of a type, each with its offset."""
    if kind.subdtype is not None:
        base, shape = kind.subdtype
        for n in range(math.prod(shape)):
            yield from _members(base, at + n * base.itemsize)
    elif kind.fields is not None:
        for name in kind.names or ():
            member, offset = kind.fields[name][:2]
            yield from _members(member, at + offset)
    else:
        yield at, kind


def _scalar(kind: np.dtype[Any], text: str, where: str) -> bytes:
    """Return a number or text of this type. Raises ValueError or OverflowError; UsageError for a text that is too long."""
    import numpy as np

    if kind.kind == "S":
        data = text.encode()
        if len(data) >= kind.itemsize:
            raise UsageError(
                f"{where}: the text has {len(data)} bytes; shorten it to at most {kind.itemsize - 1}"
            )
        return data.ljust(kind.itemsize, b"\0")
    text = text.strip()
    if kind.kind == "f":
        with np.errstate(over="ignore"):
            found = np.array(float(text)).astype(kind)
        if np.isinf(found) and "inf" not in text.lower():
            raise OverflowError
        return found.tobytes()
    if kind.kind == "b":
        return bytes([text == "true" if text in ("true", "false") else int(text, 0) != 0])
    if kind.kind not in "iu":
        raise ValueError
    number, info = int(text, 0), np.iinfo(kind)
    if not info.min <= number <= info.max:
        raise OverflowError
    return np.array(number, kind).tobytes()

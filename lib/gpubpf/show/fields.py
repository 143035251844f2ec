"""Declare the fields of a record: the one place for its name, type, meaning and column.

COUNT = Fields(
    "count",
    "One for each SPEC and kernel.",
    (
        *OWNER,
        Field("spec", "string", "as it was typed", header="SPEC", left=True),
        Field("count", "integer", "how often warps reached the point", header="COUNT", show="{:,}".format),
    ),
    csv="pid comm gpu spec count",
)
COUNT.record(one)                   # the JSON record of an object, here with the attributes pid, …, count
COUNT.columns, COUNT.row(record)    # CSV
COUNT.cells(one, spec="[1]")        # a row of a table for people
COUNT.schema                        # --json-schema; `script/manpages.py --fields` makes the man page's FIELDS from it

`RECORDS` in a tool's module lists all that the tool writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeAlias

from gpubpf.record import Record
from gpubpf.show.output import csv_cells

Type: TypeAlias = dict[str, Any]  # a JSON schema; "unit" is that of a number

_INTEGER: Type = {"type": "integer"}
_TYPES: dict[str, Type] = {
    **{name: {"type": name} for name in ("integer", "number", "string", "boolean")},
    "any": {},
    "ns": _INTEGER | {"unit": "ns"},
    "bytes": _INTEGER | {"unit": "bytes"},
    "hex": {"type": "string", "pattern": "^0x[0-9a-f]+$"},
    "index": {"type": "array", "items": _INTEGER, "minItems": 3, "maxItems": 3},  # x, y and z
}


def type_of(of: str | Type) -> Type:
    """Return the JSON schema for the name of a type. A schema is returned as it is.

    "integer", "number", "string", "boolean", "any"; "ns" and "bytes": integers with a unit; "hex": a string; "index": [x,y,z];
    "distribution": mean, p50, p99 and max. "a|b": one of these words. "[ns]": a list. "{ns}": an object whose names are data, such as
    reasons. "ns?": or null.
    """
    if not isinstance(of, str):
        return of
    if of.endswith("?"):
        return maybe(of[:-1])
    if of[0] in "[{":
        return (many if of[0] == "[" else by_name)(of[1:-1])
    return _TYPES[of] if "|" not in of else {"type": "string", "enum": of.split("|")}


def many(of: str | Type) -> Type:
    """Return the type of a list."""
    return {"type": "array", "items": type_of(of)}


def by_name(of: str | Type) -> Type:
    """Return the type of an object whose names are data, such as reasons."""
    return {"type": "object", "additionalProperties": type_of(of)}


def maybe(of: str | Type) -> Type:
    """Return the type with null."""
    of = type_of(of)
    return of | {"type": [of["type"], "null"]} | ({"enum": [*of["enum"], None]} if "enum" in of else {})


def having(*described: Field, **others: str | Type) -> Type:
    """Return the type of an object with these fields. others: types of further fields, by name."""
    fields = (*described, *(Field(name, of) for name, of in others.items()))
    return {
        "type": "object",
        "properties": {field.name: field.schema for field in fields},
        "required": [field.name for field in fields if not field.when],
        "additionalProperties": False,
    }


class Field(Record):
    """A field of a record, and its column in a table.

    name       the name in JSON and CSV
    type       its type: see `type_of`
    meaning    what it is, for the man page: a phrase without a capital and a full stop; names of options as they are
    get        what returns the value from the object of the record, or the name of an attribute, such as "times.count".
               None: the attribute `name`; with `when`: the caller gives the value
    when       in which records the field is: "with -T"; "": in all. A value None from `get` then leaves the field out
    header     title of the column in a table for people; "": it has none
    show       returns the cell for a value
    left       align the column left
    """

    name: str
    type: str | Type
    meaning: str = ""
    get: Callable[[Any], Any] | str | None = None
    when: str = ""
    header: str = ""
    show: Callable[[Any], str] = str
    left: bool = False

    @property
    def schema(self) -> Type:
        """The JSON schema of the field."""
        about = ", ".join(filter(None, (self.meaning, self.when)))
        return type_of(self.type) | ({"description": about} if about else {})

    @cached_property
    def value(self) -> Callable[[Any], Any]:
        """The function that returns the value from the object of the record."""
        return self.get if callable(self.get) else attrgetter(self.get or self.name)


def values_of(fields: Iterable[Field], one: Any) -> dict[str, Any]:
    """Return the values of fields of an object."""
    return {field.name: field.value(one) for field in fields}


class Fields(Record):
    """The fields of a type of record, in their order.

    name         the record's `type`
    about        when there is such a record: one sentence
    fields       the fields after `type`
    csv          columns of the CSV table: names of fields, separated by spaces. `object.field` is a field of an object. An index or
                 object has several columns, unless it has a name of its own: `mean_ns=lat_ns.mean`
    csv_fields   fields that only the CSV table has
    notes        more about the record: sentences
    """

    name: str
    about: str
    fields: tuple[Field, ...]
    csv: str = ""
    csv_fields: tuple[Field, ...] = ()
    notes: str = ""

    @cached_property
    def schema(self) -> Type:
        """The JSON schema of the record."""
        made = having(Field("type", {"type": "string", "const": self.name}), *self.fields)
        return {"title": self.name, "description": " ".join(filter(None, (self.about, self.notes)))} | made

    @cached_property
    def _getters(self) -> dict[str, tuple[Callable[[Any], Any] | None, bool]]:
        """By name of the field: what returns its value (None: only the caller), and whether None leaves the field out."""
        return {
            one.name: (one.value if one.get or not one.when else None, bool(one.when)) for one in self.fields
        }

    def record(self, one: Any = None, **given: Any) -> dict[str, Any]:
        """Return the JSON record of an object. given: values of fields that do not come from it."""
        made = {"type": self.name}
        for name, (get, optional) in self._getters.items():
            if name in given:
                made[name] = given[name]
            elif get is not None and ((value := get(one)) is not None or not optional):
                made[name] = value
        if not given.keys() <= self._getters.keys():
            raise TypeError(
                f"the record {self.name} has no field {', '.join(given.keys() - self._getters.keys())}"
            )
        return made

    def json_texts(self, known: Mapping[str, Any], *also: str) -> list[bytes]:
        """Return what is between the columns of many JSON records, for `bulk_text.joined`.

        Columns of words are JSON text, but for words of `one_of` plain.

        known: the fields that are the same in all records. also: fields with `when` that have a column.
        """
        text = f'{{"type":"{self.name}"'
        for field in self.fields:
            if field.name in known:
                value = json.dumps(known[field.name], separators=(",", ":"))
            elif field.when and field.name not in also:
                continue
            elif field.type == "index":
                value = "[\0,\0,\0]"
            else:
                value = '"0x\0"' if field.type == "hex" else '"\0"' if "enum" in field.schema else "\0"
            text += f',"{field.name}":{value}'
        return f"{text}}}\n".encode().split(b"\0")

    # --- CSV ---

    @cached_property
    def _cells(self) -> list[tuple[str, list[str | int]]]:
        """The columns: name, and the names and indices that lead to the value in a record."""
        declared = having(*self.fields, *self.csv_fields)
        return [one for word in self.csv.split() for one in _columns(declared, word)]

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The header of the CSV table."""
        return tuple(name for name, _ in self._cells)

    def row(self, record: Mapping[str, Any], **given: Any) -> list[Any]:
        """Return the row of a record: None for what it does not have. given: the values of `csv_fields`."""
        values = {**record, **given}
        return [_value(values, path) for _, path in self._cells]

    def csv_texts(self, known: Mapping[str, Any]) -> list[bytes]:
        """Return what is between the columns of many rows, for `bulk_text.joined`. known: the cells that are the same in all rows."""
        cells = []
        for _, (name, *rest) in self._cells:
            is_hex = any(field.name == name and field.type == "hex" for field in self.fields)
            value = _value(known, [name, *rest]) if name in known else None
            cells.append(
                csv_cells((value,))
                if value is not None
                else ""
                if name in known
                else "0x\0"
                if is_hex
                else "\0"
            )
        return f"{','.join(cells)}\n".encode().split(b"\0")

    # --- tables for people ---

    def cells(self, one: Any, **shown: str) -> dict[str, str]:
        """Return a row of a table for `table.within`. shown: cells that depend on other rows, by field."""
        return {
            field.header: shown[field.name] if field.name in shown else field.show(field.value(one))
            for field in self.fields
            if field.header
        }

    @property
    def left(self) -> tuple[str, ...]:
        """The titles of the columns that align left."""
        return tuple(field.header for field in self.fields if field.left)


def _columns(declared: Type, word: str) -> Iterator[tuple[str, list[str | int]]]:
    """Yield the columns of a word in `Fields.csv`. Raises KeyError for a field that is not declared."""
    name, _, place = word.rpartition("=")
    path = place.split(".")
    for part in path:
        declared = declared["properties"][part]
    parts: Sequence[str] = list(declared.get("properties", ())) or (
        "xyz" if declared.get("maxItems") == 3 else ()
    )
    if name or not parts:
        yield name or path[-1], [*path]
        return
    stem = path[-1].removesuffix("_ns")
    for at, part in enumerate(parts):
        yield f"{stem}_{part}{path[-1][len(stem) :]}", [*path, at if parts == "xyz" else part]


def _value(values: Any, path: Sequence[str | int]) -> Any:
    """Return what a path leads to in a record; None if it is not there."""
    for step in path:
        if values is None:
            return None
        values = values[step] if isinstance(step, int) else values.get(step)
    return values


_TYPES["distribution"] = having(mean="number", p50="number", p99="number", max="number")

"""Check JSON records against the schemas that the tools declare (`gpubpf.show.fields`)."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from hypothesis import strategies

TYPES = {
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


def declared(tool: str) -> Any:
    """Return the records that a tool declares."""
    return importlib.import_module(f"gpubpf.tools.{tool}").build_parser().declared()


def problems(schema: dict[str, Any], value: Any, place: str = "") -> Iterator[str]:
    """Yield how a value differs from a JSON schema: of the keywords that `gpubpf.show.fields` uses."""
    types = schema.get("type", [])
    if types and not any(TYPES[one](value) for one in ([types] if isinstance(types, str) else types)):
        yield f"{place}: {value!r} is not of type {types}"
        return
    if ("enum" in schema and value not in schema["enum"]) or schema.get("const", value) != value:
        yield f"{place}: {value!r} is not one of {schema.get('enum', schema.get('const'))}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{place}: {value!r} does not match {schema['pattern']}"
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{place}: {len(value)} elements"
        for number, one in enumerate(value):
            yield from problems(schema.get("items", {}), one, f"{place}[{number}]")
    if isinstance(value, dict):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
        yield from (f"{place}: {name} is missing" for name in schema.get("required", ()) if name not in value)
        for name, one in value.items():
            if name not in known and rest is False:
                yield f"{place}: {name} is not declared"
            else:
                yield from problems(known.get(name, rest or {}), one, f"{place}.{name}")


def value_of(schema: dict[str, Any]) -> strategies.SearchStrategy[Any]:
    """Return a strategy for values that a schema allows."""
    if "enum" in schema:
        return strategies.sampled_from(schema["enum"])
    if "const" in schema:
        return strategies.just(schema["const"])
    kinds = schema.get("type", ["integer", "string", "boolean"])
    if isinstance(kinds, list):
        return strategies.one_of(*(value_of(schema | {"type": kind}) for kind in kinds))
    if kinds == "array":
        least = schema.get("minItems", 0)
        return strategies.lists(value_of(schema["items"]), min_size=least, max_size=max(least, 2))
    if kinds == "object" and "properties" in schema:
        its = {name: value_of(one) for name, one in schema["properties"].items()}
        needed = {name: its[name] for name in schema["required"]}
        return strategies.fixed_dictionaries(
            needed, optional={name: one for name, one in its.items() if name not in needed}
        )
    if kinds == "object":
        return strategies.dictionaries(
            strategies.text(max_size=3), value_of(schema.get("additionalProperties", {})), max_size=2
        )
    return {
        "integer": strategies.integers(-(2**63), 2**63 - 1),
        "number": strategies.floats(allow_nan=False, allow_infinity=False)
        | strategies.integers(-(2**40), 2**40),
        "string": strategies.text(max_size=5),
        "boolean": strategies.booleans(),
        "null": strategies.none(),
    }[kinds]


def check_records(tool: str, lines: Iterable[str]) -> None:
    """Check lines of JSON that a tool wrote against the schemas of its records."""
    schemas = {one.name: one.schema for one in declared(tool)}
    for line in lines:
        record = json.loads(line)
        assert record["type"] in schemas, f"{tool} does not declare {line}"
        found = list(problems(schemas[record["type"]], record, record["type"]))
        assert not found, f"{found} in {line}"

"""Check JSON records against the schemas that the tools declare (`gpubpf.show.fields`)."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

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


def check_records(tool: str, lines: Iterable[str]) -> None:
    """Check lines of JSON that a tool wrote against the schemas of its records."""
    schemas = {one.name: one.schema for one in declared(tool)}
    for line in lines:
        record = json.loads(line)
        assert record["type"] in schemas, f"{tool} does not declare {line}"
        found = list(problems(schemas[record["type"]], record, record["type"]))
        assert not found, f"{found} in {line}"

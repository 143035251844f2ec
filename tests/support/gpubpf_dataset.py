"""Read what `gpubpf.show.dataset` wrote, by DuckDB, and compare with JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpubpf.show.fields import Fields
from gpubpf_schema import declared


def check_dataset(tool: str, text: str, directory: Path) -> None:
    """Check that JSON Lines of a tool, written as Parquet, have the same records as DuckDB reads them."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("duckdb")
    from gpubpf.show.dataset import Dataset

    out = Dataset(str(directory), tool, declared(tool))
    out.write(text)
    out.close()
    records = [json.loads(line) for line in text.splitlines()]
    for kind in {record["type"] for record in records}:
        [fields] = [one for one in declared(tool) if one.name == kind]
        expected = [without_none(record) for record in records if record["type"] == kind]
        assert records_in(directory, fields, out.run) == expected


def records_in(directory: Path, fields: Fields, run: str) -> list[dict[str, Any]]:
    """Return the records of one type and run as `without_none` does, in their order."""
    import duckdb

    with duckdb.connect() as database:
        rows = database.execute(
            "SELECT * FROM read_parquet(?, file_row_number = true, filename = true, hive_partitioning = false) "
            "ORDER BY filename, file_row_number",
            [str(directory / f"tool=*/day=*/host=*/{fields.name}-{run}-*.parquet")],
        )
        names = [column[0] for column in rows.description]
        found = [dict(zip(names, row, strict=True)) for row in rows.fetchall()]
    assert {row["run"] for row in found} <= {run}
    columns = fields.schema["properties"]
    assert set(names) - {"run", "filename", "file_row_number"} == set(columns)
    return [without_none({name: _value(of, row[name]) for name, of in columns.items()}) for row in found]


def _value(of: dict[str, Any], value: Any) -> Any:
    """Return the JSON value for one of DuckDB: what may be anything is text."""
    if value is None:
        return None
    kinds = of.get("type", [])
    kinds = {kinds} if isinstance(kinds, str) else set(kinds) - {"null"}
    kind = min(kinds) if len(kinds) == 1 else ""
    if not kind:
        return json.loads(value)
    if kind == "array":
        return [_value(of["items"], one) for one in value]
    if kind == "object":
        known, rest = of.get("properties", {}), of.get("additionalProperties")
        return {name: _value(known.get(name, rest), one) for name, one in value.items()}
    return value


def without_none(value: Any) -> Any:
    """Return a JSON value without the fields that are null: Parquet does not distinguish them from missing ones."""
    if isinstance(value, dict):
        return {name: without_none(one) for name, one in value.items() if one is not None}
    return [without_none(one) for one in value] if isinstance(value, (list, tuple)) else value

"""Records that tools would have kept with --parquet DIR."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis

from gpubpf.show.dataset import Dataset
from gpubpf_schema import declared, value_of

TIMES = {"mean": 0.0, "p50": 0, "p99": 0, "max": 0}


def some(tool: str, kind: str, /, **given: Any) -> dict[str, Any]:
    """Return a record of a tool, with some values, and the others as the schema allows."""
    [fields] = [one for one in declared(tool) if one.name == kind]
    found: list[dict[str, Any]] = []

    @hypothesis.settings(max_examples=1, database=None, derandomize=True, phases=[hypothesis.Phase.generate])
    @hypothesis.given(value_of(fields.schema))
    def make(record: dict[str, Any]) -> None:
        found.append({"type": kind} | record | given)

    make()
    return found[0]


def keep(directory: Path, tool: str, *records: dict[str, Any]) -> None:
    """Write records as one run of a tool does."""
    out = Dataset(str(directory), tool, declared(tool))
    out.records(records)
    out.close()

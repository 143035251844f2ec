"""The records of many machines that benchmarks/fleet.py makes, and what the questions of docs/analysis.md find in them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")

from gpubpf_schema import declared, problems

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def fleet() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fleet", ROOT / "benchmarks/fleet.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def records(fleet: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("fleet")
    fleet.make(place, 70, 70 * 8 * 3 * 150)
    return place


def answer(sql: str, directory: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "gpubpf", "query", "--json", sql, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_questions_find_the_machines_that_are_not_like_the_others(
    fleet: ModuleType, records: Path
) -> None:
    """`all_reduce` waits for the slow machine in two thirds of the steps, and for the late one in a third of those that are late."""
    asked = dict(fleet.questions())
    assert len(asked) == 10
    found = {question: answer(sql.removesuffix(" LIMIT 5"), records) for question, sql in asked.items()}
    slow, late = fleet.SLOW, fleet.LATE
    assert found["On which machines do launches begin late?"][0]["host"] == late
    assert [
        row["host"] for row in found["On which machines does a kernel take longer than on most?"][:2]
    ] == [slow] * 2
    waited = {
        row["host"]: row["steps"] for row in found["For which machine do the others wait in `all_reduce`?"]
    }
    assert waited[slow] == 100 - 2, (
        "of steps 50 to 149; in the steps 50 and 100 the others wait for the late machine"
    )
    assert waited[late] == 3
    first, second = found["Is such a machine late because of its GPUs, or because of its host?"][:2]
    assert (first["host"], second["host"]) == (slow, late)
    assert first["gpu_us"] > 1.04 * second["gpu_us"] and second["host_us"] > 5 * first["host_us"]
    assert {row["host"] for row in found["What was not measured, and where?"]} == {
        "node007",
        "node027",
        "node047",
        "node067",
    }


@pytest.mark.parametrize("kind", ["launch", "kernel", "summary"])
def test_the_records_are_those_that_the_tool_declares(records: Path, kind: str) -> None:
    [fields] = [one for one in declared("launchlate") if one.name == kind]
    view = "summaries" if kind == "summary" else f"launchlate_{kind}"
    rows = answer(f"FROM {view} LIMIT 5", records)
    assert rows
    for row in rows:
        known = {
            name: value
            for name, value in row.items()
            if name in fields.schema["properties"] and value is not None
        }
        assert not list(problems({**fields.schema, "required": []}, known))

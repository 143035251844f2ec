"""gpumem on the embedded AMD device: what an unmodified program holds at its end, on AMD's own runtime."""

from __future__ import annotations

from pathlib import Path

import pytest

from hipsim_device import measured, program


@pytest.mark.every(3)
@pytest.mark.parametrize("gpu", ["gfx906", "gfx90a", "gfx1030"])
def test_what_a_program_does_not_free(tmp_path: Path, gpu: str) -> None:
    """allocations.hip makes ten allocations, and frees `first`, `host`, `mapped` and `pooled`."""
    records, done = measured("gpumem", tmp_path / "out", "--", program("allocations", gpu=gpu))
    assert done.returncode == 0, done.stderr
    held = {record["kind"]: record for record in records if record["type"] == "held"}
    pitched = held["device"]["bytes"] - (400 + 4000 + 77 + 99)  # the runtime chooses the pitch of its rows
    assert pitched >= 300 and pitched % 3 == 0
    assert {kind: (record["bytes"], record["count"]) for kind, record in held.items()} == {
        "device": (held["device"]["bytes"], 5),
        "managed": (5000, 1),
    }
    for record in held.values():
        assert (record["vendor"], record["frames"][-1]["name"]) == ("amd", "main")
    summary = records[-1]
    assert (summary["allocated"], summary["freed"], summary["frees_unknown"], summary["lost"]) == (
        10,
        4,
        0,
        0,
    )
    assert (summary["launches_seen"], summary["launches_matched"]) == (7, 0), "gpumem measures no kernel"

"""memtrace on the embedded AMD device: the accesses of unmodified programs, on AMD's own runtime."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import memory_model as model
from hipsim_device import ROOT, environment, libraries, program

TOOL = [sys.executable, str(ROOT / "tools" / "memtrace.py")]
GPUS = ("gfx906", "gfx90a", "gfx1030")
LANES = {"gfx906": 64, "gfx90a": 64, "gfx1030": 32}
ROOM, OFF = 4096, 0xFFFFFFFF  # bytes that requests go to; in the table: the lane makes none
# Kernels of requests.hip: space, width, whether the address can be any.
KINDS = {
    "global1": ("global", 1, True),
    "global2": ("global", 2, True),
    "global4": ("global", 4, True),
    "global8": ("global", 8, True),
    "global12": ("global", 12, True),
    "global16": ("global", 16, True),
    "flat4": ("global", 4, True),
    "shared1": ("shared", 1, False),
    "shared2": ("shared", 2, False),
    "shared4": ("shared", 4, False),
    "shared8": ("shared", 8, False),
    "shared16": ("shared", 16, False),
}


def measured(
    out: Path, *words: object, **variables: str
) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    """Run memtrace with --json; give its records, and how it ended."""
    libraries()
    done = subprocess.run(
        [*TOOL, "--json", "-o", out, *map(str, words)],
        capture_output=True, text=True, timeout=300, env=environment(**variables),
    )  # fmt: skip
    return [json.loads(line) for line in out.read_text().splitlines()], done


def request(rng: random.Random, width: int, lanes: int, anywhere: bool, row: int) -> list[int | None]:
    """Offsets of all lanes, some of them None: of every pattern, forwards and backwards, whole waves and parts."""
    units = (ROOM - 4) // width
    step = rng.choice([0, 1, 1, 2, 3, 4, 5, 8, 16, 31, 32, -1, -2, -7, -32])
    while units <= (lanes - 1) * abs(step):
        step //= 2
    if step < 0 and units <= (lanes - 1) * -step:
        step = 0
    first = rng.randrange((lanes - 1) * max(0, -step), units - (lanes - 1) * max(0, step))
    form = rng.random()
    if form < 0.6:
        found = [first + lane * step for lane in range(lanes)]
        if row < lanes and rng.random() < 0.8:  # each row begins somewhere
            away = [rng.randrange(-first, units - first) for _ in range(lanes // row)]
            found = [(lane % row * step + first + away[lane // row]) % units for lane in range(lanes)]
    elif form < 0.8:  # neighbours and outliers
        found = [rng.randrange(units) if rng.random() < 0.1 else first for _ in range(lanes)]
    else:
        few = rng.choice([2, 8, units])
        found = [rng.randrange(few) for _ in range(lanes)]
    whole = (1 << lanes) - 1
    active = rng.choice(
        [whole, whole, whole, 0xFFFF, 0x55555555, 1 << rng.randrange(lanes), 3 << rng.randrange(31)]
    )
    chance = rng.random()
    if chance < 0.3:
        active = rng.getrandbits(lanes) | 1
    elif chance < 0.5:
        active = 1 << rng.randrange(lanes) | 1 << rng.randrange(lanes)
    more = rng.choice([0, 0, 1, 2, 4]) if anywhere else 0  # bytes: accesses need not be aligned
    return [width * unit + more if active >> lane & 1 else None for lane, unit in enumerate(found)]


def near(found: Any, value: Any) -> bool:
    """Whether they are equal but for rounding."""
    if isinstance(value, dict):
        return all(near(found[key], part) for key, part in value.items())
    return found == value or (
        found is not None and value is not None and found == pytest.approx(value, abs=1e-6)
    )


@pytest.mark.parametrize("rows", [1, 4, 8], ids=["one-row", "rows-of-a-quarter", "rows-of-an-eighth"])
@pytest.mark.parametrize("gpu", GPUS)
def test_requests_of_every_kind(tmp_path: Path, gpu: str, rows: int) -> None:
    """What waves add up is what an independent model says of each single request."""
    rng, lanes = random.Random(rows), LANES[gpu]
    warp, row = model.Warp(lanes, 64), lanes // rows
    tables = {
        name: [request(rng, width, lanes, anywhere, row) for _ in range(120)]
        for name, (_, width, anywhere) in KINDS.items()
    }
    for name, requests in tables.items():
        words = [OFF if at is None else at for one in requests for at in one]
        (tmp_path / name).write_bytes(struct.pack(f"<{len(words)}I", *words))
    app = program("requests", gpu=gpu)
    records, done = measured(tmp_path / "out", "--", app, tmp_path, lanes, row)
    assert done.returncode == 0, done.stderr
    for name, requests in tables.items():
        space, width, _ = KINDS[name]
        # The first place reads the table. What follows is not reached.
        _, found = (r for r in records if r["type"] == "site" and r["kernel"] == name)
        for field, value in model.site("load", space, width, requests, row, warp).items():
            assert near(found[field], value), (name, field, found[field], value)
        patterns = (model.pattern(width, one, row=row) or "single" for one in requests if model.active(one))
        assert found["patterns"] == Counter(pattern.split()[0] for pattern in patterns), name
        assert (found["vendor"], found["wave"]) == ("amd", lanes)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("hostile", ["0", "1"])
def test_results_stay_and_every_access_is_counted(tmp_path: Path, gpu: str, hostile: str) -> None:
    """Also of functions that a kernel calls, and of each launch of several threads of the host."""
    app = program("probed", gpu=gpu)
    records, done = measured(tmp_path / "out", "--", app, 5, HIPSIM_HOSTILE=hostile)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    (summary,) = (record for record in records if record["type"] == "summary")
    assert summary["launches_matched"] == summary["launches_instrumented"] == 5 + 4 * 5 + 3
    assert (summary["not_instrumented"], summary["not_probed"], summary["lost"]) == ({}, {}, 0)
    kernels = {record["kernel"]: record for record in records if record["type"] == "kernel"}
    assert set(kernels) == {"uses_variables", "sums", "leaves_early", "rows", "columns"}
    assert all(one["registers"]["after"] > one["registers"]["before"] for one in kernels.values())
    assert all(one["vendor"] == "amd" and one["wave"] == LANES[gpu] for one in kernels.values())


def test_every_access_as_a_record(tmp_path: Path) -> None:
    """What is recorded one by one adds up to what waves count themselves; a place has its line in the source."""
    app = program("leaves")
    summed, done = measured(tmp_path / "sums", "--", app)
    single, again = measured(tmp_path / "each", "-e", "--", app)
    assert (done.returncode, again.returncode) == (0, 0), done.stderr + again.stderr
    counted = Counter(
        {(r["kernel"], r["site"], r["op"], r["space"]): r["accesses"] for r in summed if r["type"] == "site"}
    )
    each = [r for r in single if r["type"] == "access"]
    assert each and Counter((r["kernel"], r["site"], r["op"], r["space"]) for r in each) == counted
    assert {(r["vendor"], r["wave"], r["ptx_line"]) for r in each} == {("amd", 64, None)}
    assert all("offset" in r and r["ptx_line"] is None for r in summed if r["type"] == "site")


def test_footprints_are_said_to_be_unknown() -> None:
    libraries()
    done = subprocess.run(
        [*TOOL, "--footprint", "--", str(program("vectoradd"))],
        capture_output=True, text=True, timeout=300, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "footprint: of kernels on AMD GPUs not known yet" in done.stdout


def test_blocks_that_wait_for_each_other(tmp_path: Path) -> None:
    """A grid that fits at once can be measured; one that only fits with the registers of the original runs that."""
    app = program("waits")
    for blocks, reasons in ((8, {}), (0, {"occupancy": 1})):
        records, done = measured(tmp_path / "out", "--", app, blocks)
        assert done.returncode == 0 and done.stdout.startswith("right"), done.stderr
        assert records[-1]["not_instrumented"] == reasons

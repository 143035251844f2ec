"""memtrace on the embedded AMD device: the accesses of unmodified programs, on AMD's own runtime."""

from __future__ import annotations

import functools
import json
import random
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import hipsim_device
import memory_model as model
from hipsim_device import ROOT, environment, program

measured = functools.partial(hipsim_device.measured, "memtrace")
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


@pytest.mark.every(18)
@pytest.mark.parametrize("rows", [1, 4, 8], ids=["one-row", "rows-of-a-quarter", "rows-of-an-eighth"])
@pytest.mark.parametrize("gpu", GPUS)
def test_requests_of_every_kind(tmp_path: Path, gpu: str, rows: int) -> None:
    """What waves add up is what an independent model says of each single request."""
    rng, lanes = random.Random(rows), LANES[gpu]
    warp, row = model.Warp(lanes, 64), lanes // rows
    tables = {
        name: [model.request(rng, width, ROOM, lanes, row, anywhere) for _ in range(120)]
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
            assert model.near(found[field], value), (name, field, found[field], value)
        assert found["patterns"] == model.patterns(width, requests, row), name
        assert (found["vendor"], found["wave"]) == ("amd", lanes)


@pytest.mark.every(12)
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("hostile", ["0", "1"])
def test_results_stay_and_every_launch_is_measured(tmp_path: Path, gpu: str, hostile: str) -> None:
    """Several threads of the host launch kernels; a kernel calls functions."""
    app = program("probed", gpu=gpu)
    records, done = measured(tmp_path / "out", "--", app, 5, HIPSIM_HOSTILE=hostile)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    (summary,) = (record for record in records if record["type"] == "summary")
    assert summary["launches_matched"] == summary["launches_instrumented"] == 5 + 4 * 5 + 3
    assert (summary["not_instrumented"], summary["lost"]) == ({}, 0)
    assert set(summary["not_probed"]) == {"s_load_dword"}  # all lanes read the same variable
    kernels = {record["kernel"]: record for record in records if record["type"] == "kernel"}
    assert set(kernels) == {"uses_variables", "sums", "leaves_early", "rows", "columns"}
    assert all(one["registers"]["after"] > one["registers"]["before"] for one in kernels.values())
    assert all(one["vendor"] == "amd" and one["wave"] == LANES[gpu] for one in kernels.values())


@pytest.mark.every(2)
def test_every_access_as_a_record(tmp_path: Path) -> None:
    """What is recorded one by one adds up to what waves count themselves; a place has its line in the source."""
    app = program("leaves", "-gline-tables-only")
    summed, done = measured(tmp_path / "sums", "--", app)
    single, again = measured(tmp_path / "each", "-e", "--", app)
    assert (done.returncode, again.returncode) == (0, 0), done.stderr + again.stderr
    counted = Counter(
        {(r["kernel"], r["site"], r["op"], r["space"]): r["accesses"] for r in summed if r["type"] == "site"}
    )
    each = [r for r in single if r["type"] == "access"]
    assert each and Counter((r["kernel"], r["site"], r["op"], r["space"]) for r in each) == counted
    assert {(r["vendor"], r["wave"], r["ptx_line"]) for r in each} == {("amd", 64, None)}
    places = [r for r in summed if r["type"] == "site"]
    assert all(r["source"].startswith("leaves.hip:") and r["offset"] >= 0 for r in places)
    assert {r["ptx_line"] for r in places} == {None}


# What kernels touch of allocations.hip: bytes, read, written; the kind of memory; the function that allocates.
TOUCHED = {
    "first": (4000, 0, 1000, "device", "hipMalloc"),
    "sum": (400, 64, 64, "device", "hipMalloc"),
    "host": (400, 0, 400, "host", "hipHostMalloc"),
    "pitched": (None, 0, 40, "device", "hipMallocPitch"),
    "managed": (5000, 64, 0, "managed", "hipMallocManaged"),
    "mapped": (8000, 0, 12, "host", "hipHostRegister"),
    "pooled": (2048, 0, 32, "device", "hipMallocAsync"),
    "again": (4000, 28, 0, "device", "hipMalloc"),
    "unused": (77, 0, 0, "device", "hipMalloc"),
    "exported": (99, 0, 0, "device", "hipMalloc"),
}


def said(output: str) -> dict[str, str]:
    return dict(line.split() for line in output.splitlines())


@pytest.mark.every(12)
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("hostile", ["0", "1"])
def test_bytes_of_allocations_and_footprints(tmp_path: Path, gpu: str, hostile: str) -> None:
    app = program("allocations", gpu=gpu)
    records, done = measured(tmp_path / "out", "--footprint", "--", app, HIPSIM_HOSTILE=hostile)
    assert done.returncode == 0, done.stderr
    at = said(done.stdout)
    found = [record for record in records if record["type"] == "allocation"]
    assert not [record for record in records if record["type"] == "unallocated"]
    for name, (size, read, written, kind, call) in TOUCHED.items():
        # An address may have had two allocations, one after the other.
        freed = name in ("first", "host", "mapped", "pooled")
        (one,) = (one for one in found if (one["base"], one["call"], one["freed"]) == (at[name], call, freed))
        assert (one["read_bytes"], one["written_bytes"], one["kind"]) == (read, written, kind), one
        assert (one["bytes"], one["vendor"], one["copied"]) == (size or one["bytes"], "amd", None)
        assert "main" in " ".join(one["stack"])
    (table,) = (one for one in found if one["call"] == "variable table")
    assert (table["bytes"], table["read_bytes"], table["written_bytes"]) == (1000, 64, 0)
    assert len(found) == len(TOUCHED) + 1
    sizes = {one["mangled"]: one["bytes"] for one in records if one["type"] == "footprint"}
    # An address counts once, whichever allocation it belongs to.
    assert sizes == {"_Z4fillPii": 1000 + 400 + 40 + 12 + 32, "_Z3addPKiiPi": 64 + 28 + 64 + 64}


def test_variables_of_hips_headers_are_not_allocations(tmp_path: Path) -> None:
    """In HIP 5.2, blockIdx.x is a variable of a byte in the program's code object."""
    records, done = measured(tmp_path / "out", "--", program("vectoradd"))
    assert done.returncode == 0, done.stderr
    found = [record for record in records if record["type"] == "allocation"]
    assert found and {(one["call"], one["wave"]) for one in found} == {("hipMalloc", 64)}


def test_another_process_may_touch_what_was_exported(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [*TOOL, "-o", str(out), "--", str(program("allocations"))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 0, done.stderr
    assert "never touched by kernels: 1 allocation of device memory, 77 bytes;" in out.read_text()


@pytest.mark.every(2)
@pytest.mark.parametrize("gpu", ["gfx90a", "gfx1030"])
def test_bytes_of_accesses_that_are_not_aligned(tmp_path: Path, gpu: str) -> None:
    """An access may begin in one word of 64 bytes in the table of touched memory and end in the next, in any kind of request."""
    lanes = LANES[gpu]
    tables = {
        "global2": [63 + 128 * lane if lane < 20 else OFF for lane in range(lanes)],
        "global4": [1 + 4 * lane for lane in range(lanes)],
        "global8": [3 + 8 * lane if lane < 21 else OFF for lane in range(lanes)],
        "global12": [12 * lane for lane in range(lanes)],
        "global16": [4095 - 8] * lanes,  # the last bytes are in the next page
    }
    touched = []
    for name, table in tables.items():
        (tmp_path / name).write_bytes(struct.pack(f"<{lanes}I", *table))
        width = KINDS[name][1]
        touched.append(len({at + byte for at in table if at != OFF for byte in range(width)}))
    app = program("requests", gpu=gpu)
    records, done = measured(tmp_path / "out", "--", app, tmp_path, lanes, lanes)
    assert done.returncode == 0, done.stderr
    rooms = [one for one in records if one["type"] == "allocation" and one["bytes"] == ROOM + 64]
    assert sorted(one["read_bytes"] for one in rooms) == sorted(touched)


@pytest.mark.every(2)
def test_fills_by_hip_itself_are_no_kernels_that_were_missed(tmp_path: Path) -> None:
    """points.hip fills memory twice, which HIP does with a kernel of its own."""
    out = tmp_path / "out"
    words = [*TOOL, "-o", str(out), "--", str(program("points"))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment())
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    text = out.read_text()
    assert "matching launches (25 in total)" in text and "kernels may have touched more" not in text, text


def test_allocations_from_before_the_tool(tmp_path: Path) -> None:
    """They are found in the arguments of launches. ROCr may round their sizes up to pages."""
    out = tmp_path / "out"
    with subprocess.Popen(
        [program("allocations"), "late"],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as app:
        assert app.stdin is not None and app.stdout is not None
        at = said("".join(iter(app.stdout.readline, "waits (nil)\n")))
        with subprocess.Popen(
            [*TOOL, "--json", "-o", out, "-p", str(app.pid)], stderr=subprocess.PIPE, text=True
        ) as tool:
            assert tool.stderr is not None
            while "attached" not in (line := tool.stderr.readline()) or "yet" in line:
                assert line
            at |= said(app.communicate("go\n", timeout=60)[0])
            tool.communicate(timeout=60)
        assert (app.returncode, tool.returncode) == (0, 0)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    found = [one for one in records if one["type"] == "allocation"]
    for name, (_, read, written, _, call) in TOUCHED.items():
        call = "before" if name in ("first", "sum", "host") else call
        (one,) = (one for one in found if (one["base"], one["call"]) == (at[name], call))
        assert (one["read_bytes"], one["written_bytes"]) == (read, written), one


@pytest.mark.every(2)
def test_blocks_that_wait_for_each_other(tmp_path: Path) -> None:
    """A grid that fits at once can be measured; one that only fits with the registers of the original runs that."""
    app = program("waits")
    for blocks, reasons in ((8, {}), (0, {"occupancy": 1})):
        records, done = measured(tmp_path / "out", "--", app, blocks)
        assert done.returncode == 0 and done.stdout.startswith("right"), done.stderr
        assert records[-1]["not_instrumented"] == reasons


@pytest.mark.every(4)
def test_blocks_that_wait_for_each_other_in_wgp_mode(tmp_path: Path) -> None:
    """Blocks of 10 waves on 4 pairs of compute units. With 128 VGPRs, 32 waves fit on a pair, which are 3 blocks. The copy has more
    VGPRs, so only 2 blocks fit. On a single compute unit, one block of either fits."""
    app = program("waits", "-DTHREADS=320", "-DLARGE", gpu="gfx1030")
    for blocks, reasons in ((8, {}), (12, {"occupancy": 1})):
        records, done = measured(tmp_path / "out", "--", app, blocks)
        assert done.returncode == 0 and done.stdout.startswith("right"), done.stderr
        assert records[-1]["not_instrumented"] == reasons

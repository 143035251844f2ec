"""What scripts rely on: each record of each tool has its promised fields, on both embedded devices."""

from __future__ import annotations

from pathlib import Path

import pytest

import cudasim_device
from gpubpf.ebpf import clang, compile
from hipsim_device import measured, program

PROCESS = "pid comm"
DEVICE = f"{PROCESS} gpu vendor wave"  # of every fact about a device
SUMMARY = "tool device launches_seen launches_matched launches_instrumented not_instrumented lost duration_ns"
SHAPE = "kernel grid block_dim"
NAMES = "kernel demangled mangled"
TIMES = "latency_ns api_ns wait_ns overhead_ns exec_ns"
# By command line: the kinds of records that it brings, and their fields.
FIELDS = {
    "threadhist": {
        "thread": f"{DEVICE} {SHAPE} block thread runs work",
        "kernel": f"{DEVICE} {NAMES} grid block_dim launches threads runs work imbalance work_kind registers",
    },
    "kernelretsnoop": {
        "lane": f"{DEVICE} kernel lane exits late_ns",
        "kernel": f"{DEVICE} {NAMES} launches threads exits warp_spread_ns block_spread_ns grid_spread_ns tail_ns clock_error_ns",
    },
    "kernelretsnoop -e": {"exit": f"{DEVICE} ts_ns launch kernel block thread warp lane sm site"},
    "launchlate -v --timeline": {
        "launch": f"{DEVICE} launch kernel tid stream graph call_ns return_ns start_ns end_ns {TIMES} waited_for method",
        "kernel": f"{DEVICE} {NAMES} stream count {TIMES} clock_error_ns",
        "op": f"{DEVICE} t_ns dur_ns op name stream tid bytes",
    },
    "memtrace --footprint": {
        "site": f"{DEVICE} kernel site op space width source ptx_line requests accesses bytes sectors sectors_least ratio"
                " lanes_mean pattern bank_ways contention_max hot addresses",
        "allocation": f"{DEVICE} base bytes read_bytes written_bytes untouched_bytes",
        "footprint": f"{DEVICE} {NAMES} sectors bytes",
    },
    "gpucount entry:*": {"count": f"{DEVICE} spec kernel count threads"},
    "gpudist -H entry:*:u32:lane -C entry:*:u32:lane": {"dist": f"{DEVICE} label key count sum"},
    "gputrace entry:*": {"event": f"{DEVICE} spec kernel launch block thread source args text"},
}  # fmt: skip
SPECS = ("gpucount", "gpudist", "gputrace")


@pytest.mark.parametrize("words", FIELDS)
def test_every_record_has_its_fields(words: str, tmp_path: Path) -> None:
    tool, *options = words.split()
    if tool in SPECS and not compile.usable() and clang.find() is None:
        pytest.skip("compiling a SPEC requires root and bcc, or clang")
    cudasim_device.libraries()
    fields = FIELDS[words]
    both = f"{cudasim_device.program('adds')} >/dev/null; {program('vectoradd')} 100 >/dev/null"
    records, done = measured(tool, tmp_path / "out", *options, "--", "sh", "-c", both)
    assert done.returncode == 0, done.stderr
    promised = fields | {"attached": f"{PROCESS} ts_ns", "summary": SUMMARY}
    kinds = {(one["type"], one.get("vendor")) for one in records}
    assert {(kind, vendor) for kind in fields for vendor in ("nvidia", "amd")} <= kinds
    for one in records:
        if (kind := one["type"]) in promised:
            assert set(promised[kind].split()) <= set(one), one
        if kind in fields:
            assert one["wave"] == {"nvidia": 32, "amd": 64}[one["vendor"]], one

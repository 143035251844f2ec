"""hipsnoop reports why a call or a gap took long: what users see for calls that wait for known reasons."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import gpubpf_hip
import gpubpf_scenes as scenes
from gpubpf.kernel import bpf_syscall
from gpubpf_host import needs_bpf

TOOL = Path(__file__).resolve().parents[2] / "tools/hipsnoop.py"
MS = 1_000_000
ALWAYS = {"preempted", "page_faults"}  # what happens to any program on a busy machine

pytestmark = [needs_bpf, pytest.mark.skipif(not bpf_syscall._UPROBE_TYPE.exists(), reason="needs uprobes")]
WHERES = pytest.mark.parametrize("where", ["call", "gap"])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hip-why")
    scenes.build(place)
    source = scenes.HERE / "hip_scenes.c"
    options = (f"-L{place}", "-lscenes")
    gpubpf_hip.program(place, gpubpf_hip.standin(place), source, *options, name="hip_scenes")
    return place


class Watched:
    """hipsnoop with a program that ends by itself."""

    def __init__(
        self, built: Path, place: Path, where: str, what: str, argument: str, before: Sequence[str] = ()
    ) -> None:
        self.out = place / "out"
        self.where = where
        tool = [
            sys.executable,
            str(TOOL),
            "--why",
            "--slow",
            "5000",
            "--json",
            "-o",
            str(self.out),
            "--",
            *before,
        ]
        command = [*tool, str(built / "hip_scenes"), where, what, argument]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end(self) -> list[dict[str, Any]]:
        """Return the records that explain the call or the gaps."""
        assert self.process.wait(60) == 0
        records = [json.loads(line) for line in self.out.read_text().splitlines()]
        api = "hipMemcpy" if self.where == "call" else None
        copies = [r for r in records if r["type"] == "call" and r["api"] == "hipMemcpy"]
        # On a busy machine other copies take 5 ms as well: the one that the program holds up takes longest.
        copies.sort(key=lambda record: record["lat_ns"], reverse=True)
        held_up = self.where == "call"
        self.slow, self.others = copies[:held_up], copies[held_up:]
        assert records[-1]["lost"] == 0
        if records[-1]["lost_why"]:
            raise scenes.UntoldError
        return [r for r in records if r["type"] == "why" and r["api"] == api]


def reasons(rows: list[dict[str, Any]]) -> set[tuple[str, str | None]]:
    found = {(r["reason"], r["syscall"]) for r in rows if r["reason"] not in ALWAYS}
    return found - {("blocked", call) for call in scenes.LAYOUT}


@WHERES
@scenes.told
def test_a_call_that_sleeps(built: Path, tmp_path: Path, where: str) -> None:
    watched = Watched(built, tmp_path, where, "sleep", "60")
    rows = watched.end()
    assert reasons(rows) == {("blocked", "clock_nanosleep")}, watched.out.read_text()
    assert max(r["ns"] or 0 for r in rows) >= 60 * MS
    assert len(watched.slow) == (where == "call")
    for call in watched.slow:
        assert "blocked in clock_nanosleep" in {cause["what"] for cause in call["why"]}
    for call in watched.others:
        assert "blocked in clock_nanosleep" not in {cause["what"] for cause in call["why"]}


@WHERES
@scenes.told
def test_a_call_that_waits_for_a_disk(built: Path, tmp_path: Path, where: str) -> None:
    file = scenes.uncached(built / "file")
    scenes.needs_disk(file)
    watched = Watched(built, tmp_path, where, "disk", file)
    rows = watched.end()
    most = sum(r["count"] for r in rows if r["reason"] == "block_io" and r["syscall"] == "pread64")
    others = [r["count"] for r in rows if r["reason"] not in {*ALWAYS, "block_io"}]
    # A file system sometimes waits for other things. Counts, as each wait is longer where others have the CPU.
    assert most > 0 and sum(others) * 4 <= most, rows
    for call in watched.slow:
        assert "block I/O in pread64" in {cause["what"] for cause in call["why"]}


@WHERES
@scenes.told
def test_a_call_that_is_preempted(built: Path, tmp_path: Path, where: str) -> None:
    cpu = max(os.sched_getaffinity(0))
    with scenes.hogs(cpu):
        watched = Watched(built, tmp_path, where, "compute", "40", ("taskset", "-c", str(cpu)))
        rows = watched.end()
    assert not reasons(rows)
    assert sum(r["ns"] for r in rows if r["reason"] == "preempted") >= 20 * MS
    for call in watched.slow:
        assert {cause["what"] for cause in call["why"] if cause["ns"]} == {"preempted"}


@pytest.mark.every(2)
@WHERES
@scenes.told
def test_a_call_under_memory_pressure(built: Path, tmp_path: Path, where: str) -> None:
    with scenes.small_group() as group:
        watched = Watched(built, tmp_path, where, "memory", "6", scenes.filled(group, tmp_path))
        rows = watched.end()
    assert reasons(rows) == {("memory", None)}
    faults = [r["count"] for r in rows if r["reason"] == "page_faults"]
    assert faults and 1536 <= faults[0] <= 1536 + 100 and sum(r["ns"] or 0 for r in rows) > 0


@pytest.mark.every(2)
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip, of iproute2")
@WHERES
@scenes.told
def test_a_call_next_to_tcp_retransmits(built: Path, tmp_path: Path, where: str) -> None:
    with contextlib.ExitStack() as stack:
        try:
            wire = scenes.Wire(stack)
        except subprocess.CalledProcessError:
            pytest.skip("no network name spaces here")
        client = ("ip", "netns", "exec", wire.near, sys.executable, "-c", wire.CLIENT)
        watched = Watched(built, tmp_path, where, "ask", "-", client)
        assert watched.process.stdout is not None and watched.process.stdout.readline() == "up\n"
        wire.cut(True)
        assert watched.process.stdin is not None
        watched.process.stdin.write("\n")
        watched.process.stdin.flush()
        end = time.monotonic() + 20
        while time.monotonic() < end and wire.sent_again() < 2:
            time.sleep(0.05)
        wire.cut(False)
        rows = watched.end()
    assert reasons(rows) - {("tcp_retransmits", None)} == {
        ("blocked", "recvfrom"),
        ("tcp_retransmits", "recvfrom"),
    }, watched.out.read_text()
    for call in watched.slow:
        assert {"blocked in recvfrom", "TCP retransmits"} <= {cause["what"] for cause in call["why"]}

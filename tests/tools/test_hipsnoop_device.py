"""hipsnoop with GPU timestamps, with stand-ins for ROCm's libraries. Not tested on an AMD GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_rocm
import gpubpf_traces
from gpubpf.kernel import bpf_syscall
from gpubpf_host import needs_bpf

REPOSITORY = Path(__file__).parents[2]

pytestmark = [needs_bpf, pytest.mark.skipif(not bpf_syscall._UPROBE_TYPE.exists(), reason="needs uprobes")]


@pytest.fixture(scope="module")
def rocm(tmp_path_factory):
    return gpubpf_rocm.build(tmp_path_factory.mktemp("rocm"))


def hipsnoop(rocm, *words, results=None, **environment):
    """Run hipsnoop on the program. The words before `--` are options of hipsnoop."""
    at = words.index("--")
    given = os.environ | {"ROCM_PATH": str(rocm), "STANDIN_LOG": str(rocm / "log")} | environment
    (rocm / "log").unlink(missing_ok=True)
    command = [sys.executable, REPOSITORY / "tools/hipsnoop.py", "-o", results or os.devnull, *words[:at]]
    command += ["--", rocm / "program", *words[at + 1 :]]
    return subprocess.run(
        [str(part) for part in command], env=given, capture_output=True, text=True, timeout=120
    )


def records(rocm, *words, **environment):
    """Return the JSON records by type, and what the GPU did: (thread, kernel, start, end)."""
    path = rocm / "results"
    done = hipsnoop(rocm, "--json", *words, results=path, **environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, list] = {}
    for line in path.read_text().split("\n")[:-1]:
        record = json.loads(line)
        found.setdefault(record["type"], []).append(record)
    log = (rocm / "log").read_text().split("\n")[:-1]
    return found, sorted((int(t), n, int(a), int(b)) for _, t, n, _, a, b in map(str.split, log))


NAMES = {"vectorAdd": "_Z9vectorAddPKfS0_Pfi", "scale": "_Z5scalePff"}


def test_every_dispatch_is_joined_to_the_call_of_its_thread(rocm):
    found, expected = records(rocm, "-e", "--", "threads", "50")
    dispatches = found["dispatch"]
    assert (
        sorted((d["tid"], NAMES[d["kernel"]], d["ts_ns"], d["ts_ns"] + d["exec_ns"]) for d in dispatches)
        == expected
    )
    assert len(expected) == 400
    summary = found["summary"][0]["device_times"]
    assert summary.pop("source") == "rocprofiler-sdk" and summary.pop("device") in ("gpu", "sim")
    assert summary == {
        "dispatches": 400,
        "lost": 0,
        "unended": 0,
        "without_call": 0,
        "without_name": 0,
        "unread": None,
    }
    calls = {(c["tid"], c["ts_ns"]): c for c in found["call"] if c["api"] == "hipLaunchKernel"}
    joined = [calls.pop((d["tid"], d["call_ns"])) for d in dispatches]  # each call once
    assert not calls
    for call, dispatch in zip(joined, dispatches, strict=True):
        assert dispatch["stream"] == call["stream"] and dispatch["block_dim"] == call["block_dim"]
        assert dispatch["grid"] == call["grid"] == [4, 2, 1]
        assert dispatch["latency_ns"] == dispatch["ts_ns"] - call["ts_ns"] > 0


def test_how_long_kernels_ran(rocm):
    found, expected = records(rocm, "--", "graph", "3", STANDIN_KERNEL_US="250")
    kernels = {k["kernel"]: k for k in found["kernel"] if "exec_ns" in k}
    assert len(expected) == 6 and kernels.keys() == NAMES.keys()
    for kernel in kernels.values():
        assert kernel["runs"] == 3 and kernel["count"] == 0 and kernel["exec_total_ns"] == 750_000
        assert kernel["exec_ns"] == {"mean": 250_000, "p50": 250_000, "p99": 250_000, "max": 250_000}


def test_only_what_was_asked_for(rocm):
    found, expected = records(rocm, "-e", "--kernel", "scale", "--", "plain", "6")
    assert len(expected) == 6 and [d["kernel"] for d in found["dispatch"]] == ["scale"] * 3
    found, _ = records(rocm, "-e", "--sample", "3", "--", "plain", "6")
    assert sorted(d["kernel"] for d in found["dispatch"]) == ["scale", "vectorAdd"]
    times = found["summary"][0]["device_times"]
    assert times["dispatches"] == 2 and times["without_call"] == 0
    found, _ = records(rocm, "--comm", "nobody", "--", "plain", "6")
    assert "kernel" not in found and found["summary"][0]["device_times"]["dispatches"] == 0


def test_a_trace_and_a_timeline(rocm, tmp_path):
    path = tmp_path / "trace.json"
    found, expected = records(rocm, "--timeline", "--trace", str(path), "--", "plain", "6")
    gpu = [op for op in found["op"] if op["on"] == "gpu"]
    assert [(op["t_ns"], op["t_ns"] + op["dur_ns"]) for op in gpu] == sorted(line[2:] for line in expected)
    loaded = json.loads(path.read_text())
    assert list(gpubpf_traces.problems(loaded)) == []
    slices = [event for event in loaded["traceEvents"] if event["ph"] == "X"]
    assert (
        sum(event["cat"] == "kernel" for event in slices)
        == sum(event["ph"] == "f" for event in loaded["traceEvents"])
        == 6
    )
    named = [
        e["args"]["name"] for e in loaded["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"
    ]
    assert {"stream 0x100", "stream 0x200"} <= set(named)


def test_the_program_notices_nothing(rocm):
    alone = subprocess.run([rocm / "program", "closes"], capture_output=True, text=True)
    done = hipsnoop(rocm, "--", "closes")
    assert (done.returncode, done.stdout) == (0, alone.stdout)
    assert [
        line for line in done.stderr.split("\n") if line and not line.startswith("hipsnoop: note: ")
    ] == []


def test_without_it_one_line_says_why(rocm, tmp_path):
    path = tmp_path / "results"
    done = hipsnoop(rocm, "--", "plain", results=path, ROCM_PATH="", STANDIN_SDK_VERSION="1")
    assert done.returncode == 0
    (line,) = [line for line in path.read_text().split("\n") if line.startswith("no GPU timestamps")]
    # On a machine without a GPU, hipsim's ROCr is asked instead, which this program does not load.
    assert (
        re.search("rocprofiler-sdk|none used a GPU or loaded ROCr", line) and "EXEC" not in path.read_text()
    )
    found, _ = records(rocm, "--", "plain", STANDIN_SDK_VERSION="90000")
    summary = found["summary"][0]
    assert summary["device_times"] is None and "9.0.0" in summary["no_device_times"]

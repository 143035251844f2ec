"""Timelines and traces of calls and dispatches."""

from __future__ import annotations

import json

import gpubpf_traces
from gpubpf.calls import timeline
from gpubpf.show.perfetto import Trace

CALLS = (
    {
        "pid": 7,
        "comm": "app",
        "tid": 8,
        "api": "hipLaunchKernel",
        "ts_ns": 5_000,
        "lat_ns": 2_000,
        "kernel": "add",
        "stream": "0x10",
    },
    {
        "pid": 7,
        "comm": "app",
        "tid": 7,
        "api": "hipMalloc",
        "ts_ns": 1_000,
        "lat_ns": 500,
        "bytes": 64,
        "error": "hipErrorNoDevice",
    },
    {
        "pid": 7,
        "comm": "app",
        "tid": 7,
        "api": "hipDeviceSynchronize",
        "ts_ns": 9_000,
        "lat_ns": 7_000,
        "off_cpu_ns": 6_000,
    },
)
DISPATCHES = (
    {
        "pid": 7, "comm": "app", "gpu": 0, "queue": "0x1", "kernel": "add", "ts_ns": 8_000, "exec_ns": 4_000,
        "tid": 8, "api": "hipLaunchKernel", "stream": "0x10", "call_ns": 5_000, "latency_ns": 3_000,
    },
    {"pid": 7, "comm": "app", "gpu": 0, "queue": "0x1", "kernel": "fill", "ts_ns": 11_000, "exec_ns": 4_000},
    {"pid": 7, "comm": "app", "gpu": 0, "queue": "0x1", "kernel": "fill", "ts_ns": 14_000, "exec_ns": 4_000},
)  # fmt: skip


def test_operations_come_in_the_order_in_which_they_began():
    found = list(timeline.operations(CALLS, DISPATCHES))
    assert [record["t_ns"] for record in found] == [1_000, 5_000, 8_000, 9_000, 11_000, 14_000]
    assert found[1] == {
        "type": "op", "t_ns": 5_000, "dur_ns": 2_000, "op": "api", "name": "hipLaunchKernel", "on": "host",
        "pid": 7, "comm": "app", "tid": 8, "stream": "0x10",
    }  # fmt: skip
    assert found[2]["op"] == "kernel" and found[2]["on"] == "gpu" and found[2]["call_ns"] == 5_000
    assert "tid" not in found[4]


def test_lines_are_a_story_for_each_stream_and_thread():
    found = list(timeline.lines(CALLS, DISPATCHES, origin=1_000))
    assert [line for line in found if line and line[0].isalpha()] == [
        "stream 0x10 of app (pid 7), GPU 0",
        "queue 0x1 of app (pid 7), GPU 0",
        "thread 8 of app (pid 7)",
        "thread 7 of app (pid 7)",
    ]
    assert "        7.00        11.00      4.00  add" in found
    assert "        0.00         0.50      0.50  hipMalloc hipErrorNoDevice" in found
    assert list(timeline.lines(())) == []


def test_a_trace_has_threads_streams_and_arrows(tmp_path):
    trace = Trace(str(tmp_path / "t.json"))
    tracer = timeline.CallTrace(trace)
    tracer.add(CALLS[:2])
    tracer.add(CALLS[2:], DISPATCHES)
    trace.close()
    loaded = json.loads((tmp_path / "t.json").read_text())
    assert list(gpubpf_traces.problems(loaded)) == []
    events = loaded["traceEvents"]
    slices = {(e["name"], e["ts"]): e for e in events if e["ph"] == "X"}
    assert slices["hipLaunchKernel add", 5.0]["tid"] == 8 and slices["add", 8.0]["dur"] == 4.0
    assert slices["hipDeviceSynchronize", 9.0]["args"] == {"off_cpu_us": 6.0}
    # Two kernels that run in one queue at the same time get rows of their own.
    assert slices["fill", 11.0]["tid"] != slices["fill", 14.0]["tid"]
    (begin,) = [e for e in events if e["ph"] == "s"]
    (end,) = [e for e in events if e["ph"] == "f"]
    assert (begin["pid"], begin["tid"], begin["ts"]) == (7, 8, 5.0) and end["ts"] == 8.0
    assert end["pid"] == slices["add", 8.0]["pid"] != 7

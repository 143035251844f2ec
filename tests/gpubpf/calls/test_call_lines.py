"""Calls as records and as lines of JSON, CSV and text: all have the same content, in the order of the calls."""

from __future__ import annotations

import csv
import json
from typing import Any

import numpy as np

from gpubpf import names
from gpubpf.calls import call_lines, records
from gpubpf.calls.api import Api, ApiFunction
from gpubpf.calls.call_fields import CALL
from gpubpf.calls.statistics import NameOrAddress
from gpubpf.show import cli

FUNCTIONS = (
    ApiFunction("hipLaunchKernel", "hipLaunchKernel", "launch", "kernel=0 grid=1:packed block=3:packed shared=s0 stream=s1"),
    ApiFunction("hipMemcpyAsync", "hipMemcpyAsync", "copy", "bytes=2 copy=3 stream=4"),
    ApiFunction("hipMalloc", "hipMalloc", "memory", "bytes=1 out=0"),
    ApiFunction("hipApiName", "hipApiName", "other", "", "other"),
)  # fmt: skip
API = Api("hipsnoop", ("libamdhip64.so",), FUNCTIONS, {"hip": {1: "hipErrorInvalidValue", -3: "odd"}})
SPENT = [(name, "<u8") for name in ("preempted_ns", "blocked_ns", "io_ns", "fault_ns", "reclaim_ns")]
EVENT = np.dtype(
    [
        *((name, "<u8") for name in ("start_ns", "end_ns", "result", "out", "kernel", "gap_ns", "gap_off_ns")),
        ("spent", [*SPENT, ("faults", "<u4"), ("switches", "<u4")]),
        ("cgroup", "<u8"), ("arguments", "<u8", 6), ("stack", "<u8", 4), ("memory", "<u8", 10),
        *((name, "<u4") for name in ("tgid", "tid", "function")),
        *((name, "u1") for name in ("failed", "launch", "after", "zero")), ("comm", "i1", 16),
    ]
)  # fmt: skip
KERNELS: list[NameOrAddress] = [names.demangle("_Z5saxpyPfS_"), 'say "%s", twice', "a\x1b[1mb", None]
COMMS = [b"app", b'a,"b"', b"100%d", b"\xff\x1b[1m", b"a\0rest"]


def name_of(pid: int, handle: int) -> NameOrAddress:
    return KERNELS[handle % len(KERNELS)]


def some(count: int) -> Any:
    """Return events of every kind, with common and uncommon values."""
    random = np.random.default_rng(count)
    made = np.zeros(count, EVENT)
    chance = random.random((len(EVENT.names or ()), count))
    made["function"] = random.integers(0, len(FUNCTIONS), count)
    made["start_ns"] = 10**12 + random.integers(0, 10**10, count)
    made["end_ns"] = made["start_ns"] + (10 ** random.uniform(0, 13, count)).astype("u8")
    made["failed"] = chance[0] < 0.3
    made["result"] = np.where(made["failed"], random.choice([1, 2, 2**32 - 3, 2**40 + 1], count), 0)
    made["out"] = random.integers(0, 2**48, count)
    made["kernel"] = np.where((made["function"] == 0) & (chance[1] < 0.9), random.integers(0, 9, count), 0)
    made["after"], made["gap_ns"] = chance[2] < 0.5, random.integers(0, 10**6, count)
    for name in (*(name for name, _ in SPENT), "faults"):
        made["spent"][name] = np.where(random.random(count) < 0.6, 0, random.integers(0, 10**6, count))
    made["arguments"] = random.choice([0, 1, 2, 64, 2**32 + 7, 2**63 + 5], (count, 6))
    made["stack"] = random.choice([0, 48, 2**47], (count, 4))
    made["cgroup"], made["tgid"], made["tid"] = (
        7,
        random.integers(1, 4, count),
        random.integers(1, 2**22, count),
    )
    comms = np.array(COMMS, "S16")[random.integers(0, len(COMMS), count)]
    made["comm"] = np.frombuffer(comms.tobytes(), "i1").reshape(count, 16)
    return made


def lines(array: Any, make: Any) -> list[str]:
    text = "".join(records.format_calls(array, API, name_of, make))
    assert text.endswith("\n") and text.count("\n") == len(array)
    return text[:-1].split("\n")


def test_lines_of_json_are_the_records() -> None:
    array = some(3000)
    told = records.call_records(array, API, name_of)
    assert lines(array, call_lines.json_lines) == [json.dumps(r, separators=(",", ":")) for r in told]
    assert [r["ts_ns"] for r in told] == array["start_ns"].tolist()
    assert {r.get("error") for r in told} == {None, "hipErrorInvalidValue", "2", "odd"}
    assert {r["comm"] for r in told} == {"app", 'a,"b"', "100%d", "\ufffd\x1b[1m", "a"}


def test_a_record_has_what_applies() -> None:
    array = some(3000)
    for one, record in zip(array, records.call_records(array, API, name_of), strict=True):
        spent = {key: int(one["spent"][field]) for key, field in records.SPENT.items() if one["spent"][field]}
        assert record.get("spent_ns", {}) == spent
        assert record.get("gap_ns") == (int(one["gap_ns"]) if one["after"] else None)
        assert record.get("page_faults", 0) == one["spent"]["faults"]
        assert (
            ("error" in record)
            == (bool(one["failed"]) and record["api"] != "hipApiName")
            == (record.get("ret", 0) != 0)
        )
        if record["api"] == "hipLaunchKernel":
            low, high = int(one["arguments"][1]) & 0xFFFFFFFF, int(one["arguments"][1]) >> 32
            assert record["grid"] == [low, high, int(one["arguments"][2]) & 0xFFFFFFFF]
            assert record.get("fn_addr") == (f"{one['kernel']:#x}" if one["kernel"] else None)
        if record["api"] == "hipMemcpyAsync":
            assert record.get("copy") == {0: "h2h", 1: "h2d", 2: "d2h"}.get(
                int(one["arguments"][3]) & 0xFFFFFFFF
            )
            assert int(record["stream"], 16) == one["arguments"][4]
        if record["api"] == "hipMalloc":
            assert record.get("out") == (None if one["failed"] else f"{one['out']:#x}")


def test_lines_of_csv_have_the_same() -> None:
    array = some(3000)
    for record, cells in zip(
        records.call_records(array, API, name_of), csv.reader(lines(array, call_lines.csv_lines)), strict=True
    ):
        wanted = (record.get(key, "") for key in CALL.columns)
        texts = ("x".join(map(str, value)) if isinstance(value, list) else str(value) for value in wanted)
        assert cells == [cli.printable(text) for text in texts]


def test_lines_for_people() -> None:
    array = some(3000)
    told = records.call_records(array, API, name_of)
    shown = lines(
        array, lambda group: call_lines.text_lines(group, call_lines.CallColumns(10**12, True, whole=True))
    )
    assert all(line.isprintable() for line in shown)
    for record, line in zip(told, shown, strict=True):
        assert line.startswith(f"{(record['ts_ns'] - 10**12) / 1e9:>10.6f} {record['pid']:>7} ")
        assert record["api"] in line and line.partition(" = ")[2] == record.get("error", "")
    one = np.zeros(2, EVENT)
    one["start_ns"], one["end_ns"], one["tid"], one["function"] = 10**12, 10**12 + 7270, 9, [0, 1]
    one["kernel"][0], one["stack"][0] = 4, (64, 0, 0, 0)
    one["arguments"] = [[4, 10 + (2 << 32), 1, 64 + (1 << 32), 1, 0], [0, 0, 4096, 1, 0, 0]]
    assert lines(one, lambda group: call_lines.text_lines(group, call_lines.CallColumns(10**12, False))) == [
        "  0.000000       9    7.27       -  hipLaunchKernel saxpy<<<10x2, 64, 64>>>",
        "  0.000000       9    7.27       -  hipMemcpyAsync 4,096 B h2d",
    ]


def test_names_are_cut_where_a_line_would_be_too_long_for_a_terminal() -> None:
    function = ApiFunction(
        "hipLaunchCooperativeKernel", "f", "launch", "kernel=0 grid=1:packed block=3:packed"
    )
    api = Api("hipsnoop", ("libamdhip64.so",), (*FUNCTIONS, function), {})
    names_ = ["saxpy", "ns::" + "quite_long_" * 9 + "kernel"]
    one = np.zeros(3, EVENT)
    one["end_ns"], one["tgid"], one["tid"], one["function"] = 7270, 9, 9, [0, 0, 4]
    one["kernel"] = [1, 2, 2]
    one["arguments"] = (0, 100 + (1 << 32), 1, 256 + (1 << 32), 1, 0)

    def shown(**columns: Any) -> list[str]:
        made = records.format_calls(
            one,
            api,
            lambda pid, handle: names_[handle - 1],
            lambda group: call_lines.text_lines(group, call_lines.CallColumns(0, **columns)),
        )
        return "".join(made).splitlines()

    alone = shown(several=False)
    assert [len(line) for line in alone[1:]] == [80, 80]
    assert alone[0].endswith("-  hipLaunchKernel saxpy<<<100, 256>>>")
    assert alone[1].endswith("-  hipLaunchKernel ns::qui...rnel<<<100, 256>>>")
    assert alone[2].endswith("-  hipLaunchCoo...Kernel ns:...el<<<100, 256>>>")
    together = shown(several=True)
    whole = shown(several=True, whole=True)
    assert all(names_[1] in line and "hipLaunchCooperativeKernel" in line for line in whole[2:])
    assert together and len(together[2]) == 80
    names_[1] = "0x55e7ecd9d3b0"  # an address; without a name to cut, the line stays long
    one["arguments"][1] = (0, 2**32 - 1 + (2**32 - 1 << 32), 1, 2**32 - 1 + (2**32 - 1 << 32), 1, 0)
    assert all(names_[1] in line for line in shown(several=True)[1:])
    assert "-  hipLaunchKernel 0x55e7ecd9d3b0<<<4294967295x4294967295, " in shown(several=False)[1]

"""Who holds memory: known answers of made-up logs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpubpf.held.memory import Memory
from gpubpf.process.host_frames import HostFrame
from gpubpf.records import operation_log
from gpubpf.records.results import ProcessLog

STACKS = {
    7: (HostFrame(0x1000, 0x10, "", "keep"), HostFrame(0x2000, 0x20, "", "main")),
    8: (HostFrame(0x3000, 0x30, "", "spend"),),
    9: (HostFrame(0x1000, 0x10, "", "keep"), HostFrame(0x2000, 0x20, "", "main")),
}


def after(*rows: tuple[str, dict[str, Any]], lost: int = 0, parts: int = 1) -> Memory:
    records = np.zeros(len(rows), operation_log.DTYPE)
    records["kind"] = operation_log.API
    for at, (call, row) in enumerate(rows):
        for name in ("result", "flags", "context", "stack"):
            records[name][at] = row.get(name, 0)
        records["return_ns"][at] = 10 * (at + 1)
        records["api"]["name"][at] = call
        for name in ("address", "bytes", "epoch"):
            records["api"][name][at] = row.get(name, 0)
    memory = Memory()
    for part in np.array_split(records, parts):
        memory.add(ProcessLog(101, "app", part, lost, False, {}, {0: 0, 1: 3}, STACKS, False, 1))
    return memory


def made(address: int, size: int, stack: int = 7, call: str = "cuMemAlloc", **more: Any) -> tuple[str, Any]:
    return call, {"address": address, "bytes": size, "stack": stack} | more


def gone(address: int, call: str = "cuMemFree", **more: Any) -> tuple[str, Any]:
    return call, {"address": address} | more


def held(memory: Memory) -> list[tuple[str, int, int]]:
    return [(row.kind, row.bytes, row.count) for row in memory.rows()]


@pytest.mark.parametrize("parts", (1, 3, 7))
def test_live_bytes_by_stack_with_the_age_of_the_oldest(parts: int) -> None:
    memory = after(
        *(made(0x1000, 100), made(0x2000, 50, 9), made(0x3000, 70, 8), gone(0x3000), made(0x4000, 8, 8)),
        *(made(0x5000, 4, 8, context=1), gone(0x9000)),
        parts=parts,
    )
    rows = memory.rows()
    assert [(row.gpu, row.bytes, row.count, row.oldest_ns) for row in rows] == [
        (0, 150, 2, 60),  # stacks with the same functions are one row
        (0, 8, 1, 20),
        (3, 4, 1, 10),
    ]
    assert [frame.name for frame in rows[0].stack.frames] == ["main", "keep"]
    assert (memory.allocated, memory.freed, memory.frees_unknown, memory.live_bytes) == (5, 2, 1, 162)


def test_what_is_refused_holds_nothing() -> None:
    memory = after(
        made(0, 1 << 40, result=2),
        *(made(0x1000, 16), gone(0x1000), gone(0x1000, result=1), gone(0x77, result=1), gone(0)),
    )
    assert (memory.failed, memory.frees_failed, memory.frees_unknown) == (1, 2, 0)
    assert held(memory) == []


def test_kinds() -> None:
    calls = ("cuMemAlloc", "cuMemAllocManaged", "cuMemHostAlloc", "cuMemAllocAsync", "cuMemMap")
    rows = [made(0x1000 * (at + 1), 64 - at, call=call) for at, call in enumerate(calls)]
    assert held(after(*rows)) == [
        *(("device", 64, 1), ("managed", 63, 1), ("pinned", 62, 1), ("pool", 61, 1), ("virtual", 60, 1)),
    ]
    others = (made(0x9000, 8, call="cuIpcOpenMemHandle"), made(0x9800, 8, call="variable"))
    assert held(after(*others)) == []


def test_a_free_that_is_logged_after_the_next_allocation_of_its_address() -> None:
    memory = after(made(0x1000, 16, 7), made(0x1000, 32, 8, epoch=1), gone(0x1000, epoch=0))
    assert held(memory) == [("device", 32, 1)]
    assert memory.frees_unknown == 0


def test_a_context_ends_with_its_memory() -> None:
    memory = after(
        *(made(0x1000, 16, context=1), made(0x2000, 8, context=2)),
        ("cuCtxDestroy", {"context": 1}),
    )
    assert held(memory) == [("device", 8, 1)]


def test_unmapping_a_range_ends_all_mappings_in_it() -> None:
    maps = [made(0x1000 * at, 0x1000, call="cuMemMap") for at in range(1, 5)]
    assert held(after(*maps, gone(0x2000, "cuMemUnmap", bytes=0x2000))) == [("virtual", 0x2000, 2)]


def test_nodes_of_graphs_are_counted_apart() -> None:
    flags = operation_log.CAPTURED
    memory = after(
        made(0x1000, 16, call="cuMemAllocAsync", flags=flags), gone(0x1000, "cuMemFreeAsync", flags=flags)
    )
    assert (memory.captured, memory.allocated, memory.freed, held(memory)) == (1, 0, 0, [])


def test_the_peak_and_who_was_there() -> None:
    memory = after(
        *(made(0x1000, 100, 7), made(0x2000, 60, 8), made(0x9000, 999, 8, call="cuMemHostAlloc")),
        *(gone(0x1000), made(0x3000, 30, 8), gone(0x2000), made(0x4000, 20, 7)),
    )
    assert (memory.peak_bytes, memory.peak_ns) == (160, 20)
    assert [(row.bytes, row.count, row.stack.frames[-1].name) for row in memory.at_peak()] == [
        (100, 1, "keep"),
        (60, 1, "spend"),
    ]


def test_random_schedules_leave_what_a_model_holds() -> None:
    random = np.random.default_rng(7)
    live: dict[int, int] = {}
    rows = []
    for address in random.integers(1, 200, 4000).tolist():
        if address in live:
            rows.append(gone(address << 12))
            del live[address]
        else:
            live[address] = int(random.integers(1, 4096))
            rows.append(made(address << 12, live[address], 7 + address % 2))
    memory = after(*rows, parts=40, lost=3)
    assert sum(row.bytes for row in memory.rows()) == memory.live_bytes == sum(live.values())
    assert sum(row.count for row in memory.rows()) == len(live)
    assert (memory.lost, memory.frees_unknown) == (3, 0)

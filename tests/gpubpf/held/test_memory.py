"""Who holds memory: known answers of made-up logs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpubpf.held import memory as held_memory
from gpubpf.held.memory import Memory
from gpubpf.held.report import ALLOCATION
from gpubpf.process.host_frames import HostFrame
from gpubpf.records import operation_log
from gpubpf.records.results import ProcessLog

STACKS = {
    7: (HostFrame(0x1000, 0x10, "", "keep"), HostFrame(0x2000, 0x20, "", "main")),
    8: (HostFrame(0x3000, 0x30, "", "spend"),),
    9: (HostFrame(0x1000, 0x10, "", "keep"), HostFrame(0x2000, 0x20, "", "main")),
}


def after(
    *rows: tuple[str, dict[str, Any]],
    lost: int = 0,
    parts: int = 1,
    into: Memory | None = None,
    process: int = 1,
    user: int = 7,
) -> Memory:
    records = np.zeros(len(rows), operation_log.DTYPE)
    records["kind"] = operation_log.API
    for at, (call, row) in enumerate(rows):
        for name in ("result", "flags", "context", "stack"):
            records[name][at] = row.get(name, 0)
        records["return_ns"][at] = 10 * (at + 1)
        records["api"]["name"][at] = call
        for name in ("address", "bytes", "epoch"):
            records["api"][name][at] = row.get(name, 0)
    memory = Memory() if into is None else into
    for part in np.array_split(records, parts):
        memory.add(
            ProcessLog(
                *(100 + process, "app", part, lost, False, {}, {0: 0, 1: 3}, STACKS, False, process),
                user=user,
            )
        )
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


def test_each_live_allocation() -> None:
    memory = after(
        *(made(0x2000, 100), made(0x1000, 50, 8, "cuMemAllocManaged"), made(0x3000, 70)),
        *(gone(0x3000), made(0x3000, 8, 9, context=1)),
    )
    each = memory.allocations()
    assert [(one.base, one.bytes, one.gpu, one.kind, one.held_ns) for one in each] == [
        (0x2000, 100, 0, "device", 40),
        (0x1000, 50, 0, "managed", 30),
        (0x3000, 8, 3, "device", 0),
    ]
    assert [[frame.name for frame in one.stack.frames] for one in each] == [
        *(["main", "keep"], ["spend"], ["main", "keep"]),
    ]
    assert sum(one.bytes for one in each) == memory.live_bytes
    record = ALLOCATION.record(each[0])
    assert (record["base"], record["bytes"], record["held_ns"], record["vendor"]) == (
        *("0x2000", 100, 40, "nvidia"),
    )


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


# --- logs as a hostile process may write them ---


def test_one_address_holds_few_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A free looks through all of them."""
    monkeypatch.setattr(held_memory, "MOST_AT_ADDRESS", 3)
    rows = [made(0x1000, 16, epoch=9) for _ in range(5)] + [gone(0x1000, epoch=0)] * 4
    memory = after(*rows, made(0x1000, 8), made(0x2000, 4))
    assert (memory.dropped, memory.frees_unknown) == (3, 4)
    assert held(memory) == [("device", 52, 4)]


def test_mappings_have_a_limit_and_are_found_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_memory, "MOST_MAPPED", 4)
    maps = [made(0x1000 * at, at, call="cuMemMap") for at in (4, 1, 3, 2, 6)]
    memory = after(*maps, made(0x2800, 7), gone(0x2000, "cuMemUnmap", bytes=0x2000))
    assert memory.dropped == 1 and memory.frees_unknown == 0
    assert held(memory) == [("device", 7, 1), ("virtual", 5, 2)]
    # Its place is taken by memory of another kind, and then by a mapping again.
    after(gone(0x1000), made(0x1000, 9), made(0x1000, 6, call="cuMemMap", epoch=3), into=memory)
    after(gone(0x1000, epoch=2), gone(0x1000, "cuMemUnmap", bytes=1, epoch=3), into=memory)
    assert held(memory) == [("device", 7, 1), ("virtual", 4, 1)]


@pytest.mark.parametrize(
    "ending", [("cuCtxDestroy", {"context": 1}), gone(0x1000, "cuMemUnmap", bytes=1 << 30)]
)
def test_looks_in_vain_have_a_limit(
    ending: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log says that memory ends, again and again, but that all of it came later."""
    monkeypatch.setattr(held_memory, "MOST_FUTILE", 100)
    later = [made(0x1000 * at, 1, call="cuMemMap", context=1, epoch=7) for at in range(1, 41)]
    looks: list[int] = []
    end = Memory._end
    monkeypatch.setattr(Memory, "_end", lambda *some: looks.append(some[2]) or end(*some))  # type: ignore[func-returns-value]
    memory = after(*later, *[ending] * 50)
    [process] = memory._processes.values()
    assert 100 < process.futile <= 140 and not looks
    assert memory.frees_unknown >= 47 and held(memory) == [("virtual", 40, 40)]


def test_a_user_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_memory, "LIMIT", 8)
    monkeypatch.setattr(held_memory, "LIMIT_OF_USER", 2)
    memory = Memory()
    for process, user in ((1, 7), (2, 7), (3, 8), (1, 7)):
        after(*(made(0x1000 * at, 16) for at in range(1, 4)), into=memory, process=process, user=user)
    assert memory.dropped == 12 - 4
    assert [(row.pid, row.count) for row in memory.rows()] == [(101, 2), (103, 2)]
    after(gone(0x1000), made(0x9000, 1), into=memory, process=1, user=7)
    assert memory.dropped == 8


def test_further_stacks_share_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums stay when nothing is held any more, because the peak may have it."""
    monkeypatch.setattr(held_memory, "MOST_KEYS", 3)
    rows = []
    for stack in range(1, 100):
        rows += [made(0x1000, 16, stack), gone(0x1000)]
    memory = after(*rows, made(0x2000, 5, 99), made(0x3000, 6, 98, call="cuMemMap"))
    assert len(memory._sums) == 5 and memory.dropped == 0
    assert held(memory) == [("virtual", 6, 1), ("device", 5, 1)]


@pytest.mark.parametrize("seed", range(20))
def test_any_log_keeps_the_indexes_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("MOST_AT_ADDRESS", 3), ("MOST_MAPPED", 20), ("MOST_KEYS", 9), ("MOST_FUTILE", 400)):
        monkeypatch.setattr(held_memory, name, most)
    random = np.random.default_rng(seed)
    calls = (*held_memory.KIND_OF, *held_memory._FREEING, "cuCtxDestroy", "cuMemMap", "cuMemUnmap")
    rows = []
    for _ in range(1500):
        small = {
            name: int(random.integers(0, most))
            for name, most in (("context", 3), ("stack", 20), ("epoch", 5))
        }
        where = {
            "address": 0x1000 * int(random.integers(0, 40)),
            "bytes": 0x800 << int(random.integers(0, 7)),
        }
        rows.append((calls[random.integers(0, len(calls))], small | where))
    memory = after(*rows, parts=5)
    [process] = memory._processes.values()
    live = {base: kept for base, kept in process.live.items() if kept}
    assert live == process.live and process.mapped == sorted(
        base for base, kept in live.items() if kept[0].key.kind == "virtual"
    )
    contexts = {context: {base for base, kept in live.items() if any(one.context == context for one in kept)}
                for context in range(3)}  # fmt: skip
    assert process.contexts == {context: bases for context, bases in contexts.items() if bases}
    assert memory._total == sum(memory._live.values()) == sum(map(len, live.values()))
    assert memory.live_bytes == sum(one.end - base for base, kept in live.items() for one in kept)
    assert sum(row.bytes for row in memory.at_peak()) == memory.peak_bytes


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

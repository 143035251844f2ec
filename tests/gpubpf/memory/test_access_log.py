"""Records of memory accesses as a session gives them → columns, lines, Parquet files, heatmaps; what is missing is counted."""

from __future__ import annotations

import argparse
import csv
import errno
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

import access_records
from gpubpf.ebpf.bytecode import KINDS, SPACES
from gpubpf.errors import Error
from gpubpf.inject.values import Site
from gpubpf.memory import access_log, access_trace, parquet
from gpubpf.memory.access_log import Accesses, AccessLog, SiteLabels
from gpubpf.memory.access_text import AccessPrinter
from gpubpf.memory.memory_options import MemoryOptions
from gpubpf.record import replace
from gpubpf.records import operation_log
from gpubpf.records.kernel_shapes import KernelShape
from gpubpf.records.results import ProcessLog, RingRecords
from gpubpf.show import cli, option_values

PID, PROCESS = 77, 3
FIELDS = [("address", "<u8"), ("launch", "<u8"), ("thread", "<u4"), ("site", "<u2"), ("how", "<u2")]
RECORD, TIMED = np.dtype(FIELDS), np.dtype([*FIELDS, ("time", "<u8")])
SITES = {0: Site(0, "k", 40), 1: Site(1, "k", 50, "/home/me/scale.cu", 17, effect=2)}
BASE = 0x7F0012000000


def log(*launches: int, process: int = PROCESS, virtual: bool = False, brackets: int = 0) -> ProcessLog:
    """Launches of `_Z5scalePf` with 3 x 2 blocks of 8 x 8 threads; clock brackets whose GPU is 1 ms behind the host."""
    made = np.zeros(len(launches) + brackets, operation_log.DTYPE)
    for at, number in enumerate(launches):
        made[at]["id"], made[at]["kind"] = number | process << 40, operation_log.KERNEL
        made[at]["kernel"]["grid"], made[at]["kernel"]["block"] = (3, 2, 1), (8, 8, 1)
    for k in range(brackets):
        row, gpu = made[len(launches) + k], 10**6 * (k + 1)
        row["kind"] = operation_log.CLOCK
        row["clock"]["host_before"], row["clock"]["gpu"] = gpu + 10**6 - 2500, gpu
        row["clock"]["host_after"], row["clock"]["tick_ns"] = gpu + 10**6 + 2500, 1
    return ProcessLog(PID, "app", made, 0, virtual, {0: "_Z5scalePf"}, {0: 0}, {}, False, process)


def some(launch: int, threads: Any, dtype: Any = RECORD, **more: Any) -> Any:
    """Stores of 4 bytes by threads at site 1; strided, as records lie in a ring."""
    ring = np.zeros(len(threads), np.dtype([("mark", "<u8"), ("payload", dtype)]))
    records = ring["payload"]
    records["thread"], records["site"] = threads, 1
    records["address"] = BASE + 4 * np.asarray(threads, np.uint64)
    records["launch"], records["how"] = np.uint64(launch | 4 << 40), 1 << 2 | 5 << 4
    for name, value in more.items():
        records[name] = value
    return records


def ring(records: Any, process: int = PROCESS) -> RingRecords:
    return RingRecords(PID, "app", 0, 0, records, {}, process)


def session(*rings: RingRecords, stopped: bool = False, counts: Any = ()) -> Any:
    return SimpleNamespace(
        rings=lambda name: rings,
        stopped=stopped,
        sites=lambda mangled, pid, build: SITES,
        ring_counts=lambda name: counts,
    )


class Kept:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.parts: list[tuple[Accesses, Any]] = []

    def __call__(self, accesses: Accesses, where: SiteLabels, times: Any) -> None:
        self.parts.append((accesses, times))

    def column(self, name: str) -> list[int]:
        return [value for part, _ in self.parts for value in getattr(part, name).tolist()]


def test_a_record_is_taken_apart() -> None:
    kept = Kept()
    found = AccessLog(False, False, [kept])
    made = some(5, [0, 383])
    made["how"][1] = 3 | 2 << 2 | 131 << 4
    made["launch"][1] = 5 | 0xABCDEF << 40
    found.take(session(ring(made)), [log(5)])
    ((accesses, times),) = kept.parts
    assert times is None and accesses.place == KernelShape(
        PID, "app", 0, "_Z5scalePf", (3, 2, 1), (8, 8, 1), build=0
    )
    assert accesses.launch.tolist() == [5 | PROCESS << 40] * 2
    assert accesses.width.tolist() == [4, 0xABCDEF] and accesses.sm.tolist() == [5, 131]
    assert [KINDS[kind] for kind in accesses.kind] == ["store", "atomic"]
    assert [SPACES[space] for space in accesses.space] == ["global", "const"]
    assert [column.tolist() for column in accesses.coordinates()] == [
        [0, 2], [0, 1], [0, 0], [0, 7], [0, 7], [0, 0],
    ]  # fmt: skip


def test_records_may_come_before_their_launch_and_mixed() -> None:
    kept = Kept()
    found = AccessLog(False, False, [kept])
    mixed = np.concatenate([some(number, range(100)) for number in (5, 900, 6)])
    mixed = mixed[np.random.default_rng(1).permutation(300)]
    found.take(session(ring(mixed)), [log(5)])
    assert found.delivered == 100 and {part.launch[0] & access_log.NUMBER_MASK for part, _ in kept.parts} == {
        5
    }
    other = replace(log(900, 6), names={0: "_Z5otherv"})
    found.take(session(), [other])
    assert found.delivered == 300 and found.unknown == 0
    for number, name in ((5, "_Z5scalePf"), (6, "_Z5otherv"), (900, "_Z5otherv")):
        got = [
            thread
            for part, _ in kept.parts
            for launch, thread in zip(part.launch, part.thread, strict=True)
            if part.place.mangled == name and launch & access_log.NUMBER_MASK == number
        ]
        assert got == mixed["thread"][(mixed["launch"] & access_log.NUMBER_MASK) == number].tolist()


def test_launches_of_two_programs_in_one_process_id() -> None:
    """After exec numbers begin anew."""
    kept = Kept()
    found = AccessLog(False, False, [kept])
    other = replace(log(5, process=4), names={0: "_Z5otherv"})
    found.take(session(ring(some(5, [1])), ring(some(5, [2]), process=4)), [log(5), other])
    assert [(part.place.mangled, part.thread.tolist()) for part, _ in kept.parts] == [
        ("_Z5scalePf", [1]),
        ("_Z5otherv", [2]),
    ]


def test_what_makes_no_sense_is_counted() -> None:
    kept = Kept()
    found = AccessLog(False, False, [kept])
    found.take(session(ring(some(5, [0, 384, 2**32 - 1])), ring(some(9, range(10)))), [log(5)])
    assert found.delivered == 1 and found.unknown == 2
    found.take(session(stopped=True), [])
    losses = found.losses(session())
    assert found.unknown == 12 and losses["records_unknown"] == 12
    assert [line.split(":")[0] for line in found.loss_lines(losses)] == [
        "accesses left out because their launch is unknown"
    ]


def test_grids_whose_threads_have_larger_numbers_than_records() -> None:
    found = AccessLog(False, False, [])
    huge = log(5)
    huge.records["kernel"]["grid"] = (1 << 28, 2, 1)
    found.take(session(ring(some(5, [0, 1]))), [huge])
    assert (found.delivered, found.unknown) == (0, 2)


def test_records_without_a_launch_take_no_more_room_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "MOST_WAITING", 250)
    found = AccessLog(False, False, [])
    for _ in range(4):
        found.take(session(ring(some(9, range(100)))), [])
    assert found.unknown == 200 and sum(len(records) for _, records in found._waiting) == 200


def test_losses_are_told_by_multiprocessor() -> None:
    found = AccessLog(False, False, [])
    shards = [
        SimpleNamespace(shard=n, received=100, lost=lost, incomplete=n) for n, lost in enumerate((7, 0, 5))
    ]
    losses = found.losses(session(counts=[SimpleNamespace(shards=shards)] * 2))
    assert losses["records_lost"] == {"0": 14, "2": 10} and losses["records_incomplete"] == 6
    assert next(iter(found.loss_lines(losses))).startswith(
        "accesses lost because the ring was full: 24 of 624;"
    )


def test_on_the_virtual_clock_the_order_is_that_of_time() -> None:
    kept = Kept()
    found = AccessLog(True, True, [kept])
    random = np.random.default_rng(2)
    threads = random.integers(0, 384, 1000)
    made = some(5, threads, TIMED, time=random.integers(0, 50, 1000))
    made["launch"][random.random(1000) < 0.5] = 4 | 4 << 40
    for part in np.array_split(made, 3):
        found.take(session(ring(part)), [log(virtual=True)])
    assert not kept.parts
    found.take(session(stopped=True), [log(4, 5, virtual=True)])
    columns = zip(*(kept.column(name) for name in ("launch", "time", "thread")), strict=True)
    order = list(columns)
    assert len(order) == 1000 and order == sorted(order)


@pytest.mark.parametrize("brackets", [20, 0])
def test_times_are_the_host_s_or_none(brackets: int) -> None:
    kept = Kept()
    found = AccessLog(True, False, [kept], host_times=True)
    made = some(5, range(100), TIMED, time=8_000_000 + np.arange(100))
    found.take(session(ring(made)), [log(5, brackets=brackets)])
    parts = [(part, times) for part, times in kept.parts if len(part)]
    ((part, times),) = parts
    assert len(part) == 100
    if brackets:
        assert np.abs(times - (9_000_000 + np.arange(100))).max() <= 2500
    else:
        assert times is None


def test_each_program_with_the_same_pid_has_its_own_clocks() -> None:
    """GPU 0 of the second program is another one, whose timer is 1 s further behind the host."""
    kept = Kept()
    found = AccessLog(True, False, [kept], host_times=True)
    logs = [log(5, process=number, brackets=20) for number in (3, 4)]
    for name in ("host_before", "host_after"):
        logs[1].records["clock"][name][1:] += 10**9
    made = some(5, range(100), TIMED, time=8_000_000)
    found.take(session(ring(made, 3), ring(made, 4)), logs)
    first, second = (times for part, times in kept.parts if len(part))
    assert np.abs(first - 9_000_000).max() <= 2500 and np.abs(second - 1_009_000_000).max() <= 2500


def test_a_wide_terminal_shows_whole_places(tmp_path: Path) -> None:
    lines = {}
    for width in (80, 120):
        out = cli.Output(str(tmp_path / "out"))
        AccessLog(False, False, [AccessPrinter(out, "text", width=width)]).take(
            session(ring(some(5, [0, 65]))), [log(5)]
        )
        lines[width] = (tmp_path / "out").read_text().splitlines()
    assert max(map(len, lines[80])) <= 80 < max(map(len, lines[120])) <= 120


def test_lines_tell_kernels_that_share_a_name_apart(tmp_path: Path) -> None:
    found = AccessLog(False, False, [AccessPrinter(cli.Output(str(tmp_path / "out")), "text")])
    for process, kernel in enumerate(
        ("_Z4twinILi64EiEvPT0_", "_Z4twinILi128EiEvPT0_", "_Z4twinILi64EfEvPT0_")
    ):
        launches = replace(log(5, process=process), names={0: kernel})
        found.take(session(ring(some(5, [0]), process)), [launches])
    lines = (tmp_path / "out").read_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line[7:17].rstrip() for line in lines[1:]] == ["twin", "twin<128>", "twin...at>"]


@pytest.mark.parametrize("form", ["json", "csv", "text"])
@pytest.mark.parametrize("timed", [False, True])
def test_lines(form: str, timed: bool, tmp_path: Path) -> None:
    out = cli.Output(str(tmp_path / "out"))
    found = AccessLog(timed, False, [AccessPrinter(out, form, timed)], host_times=timed)
    made = some(5, [0, 65, 383], TIMED if timed else RECORD)
    made["site"] = [1, 0, 9]
    made["how"][1], made["address"][1] = 1, 0x40
    if timed:
        made["time"] = [5, 6, 7]
    launches = replace(log(5, virtual=timed), comm='a "b"')
    for part in (made[:2], made[2:]):
        found.take(session(ring(part)), [launches])
    lines = (tmp_path / "out").read_text().splitlines()
    address = BASE + 4 * 383
    if form == "json":
        records = [json.loads(line) for line in lines]
        stamp = {"ts_ns": 7} if timed else {}
        assert records[2] == stamp | {
            "type": "access", "pid": PID, "comm": 'a "b"', "gpu": 0, "vendor": "nvidia", "wave": 32,
            "kernel": "scale", "launch": 5 | PROCESS << 40,
            "site": 9, "op": "store", "space": "global", "address": hex(address), "width": 4, "block": [2, 1, 0],
            "thread": [7, 7, 0], "sm": 5, "source": None, "ptx_line": None,
        }  # fmt: skip
        assert (records[0]["source"], records[0]["ptx_line"]) == ("scale.cu:17", 50)
        assert (records[1]["source"], records[1]["ptx_line"], records[1]["space"]) == (None, 40, "shared")
        assert records[1]["block"] == [1, 0, 0] and records[1]["thread"] == [1, 0, 0]
    elif form == "csv":
        rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
        assert len(rows) == 3 and rows[1]["address"] == "0x40" and rows[1]["where"] == "PTX line 40"
        assert (rows[2]["comm"], rows[2]["thread_y"], rows[2]["address"]) == ('a "b"', "7", hex(address))
        assert rows[2].get("ts_ns") == ("7" if timed else None)
    else:
        if timed:
            assert [line.split()[0] for line in lines] == ["TIME", "5", "6", "7"]
            lines = [line[17:] for line in lines]
        assert [line.split() for line in lines] == [
            ["LAUNCH", "KERNEL", "BLOCK", "THREAD", "OP", "SPACE", "ADDRESS", "WIDTH", "WHERE"],
            ["5", "scale", "(0,0)", "(0,0)", "store", "global", hex(BASE), "4", "scale.cu:17"],
            ["5", "scale", "(1,0)", "(1,0)", "load", "shared", "0x40", "4", "PTX:40"],
            ["5", "scale", "(2,1)", "(7,7)", "store", "global", hex(address), "4", "?"],
        ]
        assert {len(line) for line in lines} == {80}


@pytest.mark.parametrize("form", ["json", "csv", "text"])
def test_garbage_does_no_harm(form: str, tmp_path: Path) -> None:
    """What comes from a target is untrusted."""
    random = np.random.default_rng(5)
    out = cli.Output(str(tmp_path / "out"))
    heatmaps = access_trace.AddressHeatmaps()
    with parquet.Writer(str(tmp_path / "a.parquet"), True, rows=1000) as file:
        found = AccessLog(
            True, form == "csv", [AccessPrinter(out, form, True), heatmaps, file], host_times=True
        )
        for turn in range(20):
            junk = np.frombuffer(random.bytes(TIMED.itemsize * 200), TIMED).copy()
            junk["launch"][::2] = random.integers(4, 7, 100)
            junk["thread"] %= np.uint32([1, 100, 384, 2**31][turn % 4])
            logs = [log(5, 6, brackets=1, virtual=turn < 10)]
            found.take(session(ring(junk), stopped=turn == 19), logs)
    assert found.unknown > 0 and found.delivered > 500
    assert len((tmp_path / "out").read_text().splitlines()) >= found.delivered
    assert pyarrow.parquet.read_metadata(tmp_path / "a.parquet").num_rows == found.delivered
    for heat in heatmaps.sources():
        heat.chart()


# --- Parquet ---


def written(path: Path, records: list[Any], timed: bool = False, rows: int = 1 << 16) -> Any:
    with parquet.Writer(str(path), timed, rows) as file:
        found = AccessLog(timed, False, [file], host_times=timed)
        for part in records:
            found.take(session(ring(part)), [log(5, virtual=True)])
    return pyarrow.parquet.read_table(path)


def test_a_parquet_file_has_every_access(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    made = some(5, random.integers(0, 384, 5000), TIMED, time=np.arange(5000))
    made["address"] = random.integers(0, 2**64, 5000, np.uint64)
    made["site"] = random.integers(0, 3, 5000)
    made["how"] = random.integers(0, 16, 5000)
    table = written(tmp_path / "a.parquet", [made[:7], made[7:3000], made[3000:]], True, rows=1000)
    assert table.num_rows == 5000
    file = pyarrow.parquet.ParquetFile(tmp_path / "a.parquet")
    assert file.num_row_groups == 5
    assert {name: str(file.schema_arrow.field(name).type) for name in ("kernel", "op", "address", "sm", "ts_ns")} == {
        "kernel": "string", "op": "string", "address": "uint64", "sm": "uint16", "ts_ns": "int64",
    }  # fmt: skip
    assert "RLE_DICTIONARY" in file.metadata.row_group(0).column(1).encodings
    assert table.group_by(["kernel", "space"]).aggregate([([], "count_all")])["count_all"].to_pylist()
    assert (table["address"].to_numpy() == made["address"]).all()
    assert (table["ts_ns"].to_numpy() == np.arange(5000)).all()
    assert table["op"].to_pylist() == [KINDS[how >> 2] for how in made["how"]]
    assert table["space"].to_pylist() == [SPACES[how & 3] for how in made["how"]]
    assert table["source"].to_pylist() == [("PTX line 40", "scale.cu:17", "?")[site] for site in made["site"]]
    block, own = np.divmod(made["thread"].astype(int), 64)
    assert (table["block_x"].to_numpy() == block % 3).all() and (
        table["block_y"].to_numpy() == block // 3
    ).all()
    assert (table["thread_x"].to_numpy() == own % 8).all() and (
        table["thread_y"].to_numpy() == own // 8
    ).all()
    assert set(table["launch"].to_pylist()) == {5 | PROCESS << 40} and set(table["kernel"].to_pylist()) == {
        "scale"
    }


def test_a_parquet_file_is_whole_whatever_happens(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with pytest.raises(KeyboardInterrupt), parquet.Writer(str(path), rows=64) as file:
        found = AccessLog(False, False, [file])
        found.take(session(ring(some(5, range(100)))), [log(5)])
        raise KeyboardInterrupt
    assert pyarrow.parquet.read_table(path).num_rows == 100
    parquet.check(str(path))
    assert pyarrow.parquet.read_table(path).num_rows == 0


def test_where_parquet_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Error, match=r"cannot write .*no/a\.parquet: No such file.*; choose another file"):
        parquet.check(str(tmp_path / "no" / "a.parquet"))
    with pytest.raises(Error, match="cannot write /dev/full: No space left on device"):
        parquet.Writer("/dev/full")
    parquet.check("/dev/full")  # a device is not tried

    def full(*given: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "x")

    file = parquet.Writer(str(tmp_path / "a.parquet"), rows=1 << 12)
    monkeypatch.setattr(file._file, "write_table", full)
    found = AccessLog(False, False, [file])
    with pytest.raises(Error, match=r"a\.parquet: No space left on device"), file:
        for _ in range(50):  # another thread writes
            found.take(session(ring(some(5, np.arange(1 << 12) % 384))), [log(5)])
    with (
        monkeypatch.context() as patch,
        pytest.raises(Error, match=r"--parquet: .*pip install pyarrow, or use --json"),
    ):
        patch.setitem(__import__("sys").modules, "pyarrow", None)
        parquet.check(str(tmp_path / "a.parquet"))


# --- speed ---


def test_decoding_and_writing_are_quick() -> None:
    """A tenth of what is measured in benchmarks/run: this machine may do other things meanwhile."""
    assert access_records.decoded_per_second(1 << 18) > 2e6


# --- command line ---


def test_which_sites_and_addresses() -> None:
    assert option_values.parse_sites("3") == ((3, 3),)
    assert option_values.parse_sites("9,1:3,4,20:21") == ((1, 4), (9, 9), (20, 21))
    with pytest.raises(argparse.ArgumentTypeError, match="has 9 ranges of sites; name at most 8"):
        option_values.parse_sites(",".join(str(2 * n) for n in range(9)))
    assert option_values.parse_addresses("0x7f00:0x7fff") == (
        0x7F00,
        0x7FFF,
    ) and option_values.parse_addresses("16") == (16, 16)
    assert option_values.parse_addresses("0x10:") == (16, 2**64 - 1)
    for wrong in ("x", "5:4", "-1", "0x1:0x2:0x3", f"0:{2**64}"):
        with pytest.raises(argparse.ArgumentTypeError):
            option_values.parse_addresses(wrong)


def test_what_the_device_is_told() -> None:
    found = access_trace.filter_fields(((2, 4), (9, 9)), (16, 31), 3)
    assert (found["first"], found["last"], found["warps"]) == (16, 31, 3)
    chosen = [n for n in range(20) if any((n - lo) % 2**32 <= span for lo, span in found["site"].tolist())]
    assert chosen == [2, 3, 4, 9]
    every = access_trace.filter_fields((), None, 1)
    assert (every["first"], every["last"]) == (0, 2**64 - 1) and every["site"][0].tolist() == (0, 2**32 - 1)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("-e", "on_record"),
        ("-e -T", "on_timed_record"),
        ("--parquet a --site 3", "on_chosen_record"),
        ("-e --warps 2", "on_chosen_record"),
        ("-e --thread 1", "on_chosen_record"),
        ("--heatmap a.svg --address 0:9", "on_chosen_timed_record"),
    ],
)
def test_only_what_is_asked_for_is_on_the_device(words: str, name: str) -> None:
    parser = cli.parser("memtrace", "", "")
    for add in (cli.add_kernels, cli.add_threads, cli.add_accesses, cli.add_output):
        add(parser)
    args = cli.parse(parser, words.split())
    timed = bool(args.timestamps or args.heatmap)
    probe, *numbered = access_trace.attach(MemoryOptions.of(args), timed).attached.probes
    assert probe.program == name
    assert [p.spaces for p in numbered] == [] if args.heatmap else [("texture", "surface")]
    assert ("shared" in probe.spaces) == (not args.heatmap)

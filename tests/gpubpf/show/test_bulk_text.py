import json

import numpy as np
import pytest

from gpubpf.show import histogram, table
from gpubpf.show.bulk_text import Hex, Words, aligned, joined, records


def test_slots_are_powers_of_two_exactly():
    values = np.array([0, 1, 2, 3, 4, 7, 8, 2**53 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1], dtype=np.uint64)
    slots = histogram.log2_slots(values)
    assert {slot: int(count) for slot, count in enumerate(slots) if count} == {
        0: 2,
        1: 2,
        2: 2,
        3: 1,
        52: 1,
        53: 1,
        62: 1,
        63: 2,
    }
    assert len(histogram.log2_slots(np.array([], dtype=np.uint64))) == 0


def test_a_histogram_looks_like_bccs():
    lines = histogram.lines([0, 1, 40, 0, 20], "instructions", "threads")
    assert lines == [
        "      instructions       : threads   distribution",
        "         2 -> 3          : 1        |*                                       |",
        "         4 -> 7          : 40       |****************************************|",
        "         8 -> 15         : 0        |                                        |",
        "        16 -> 31         : 20       |********************                    |",
    ]
    assert histogram.lines([0, 0]) == []


def test_a_histogram_fits_a_terminal():
    widest = histogram.lines([0] * 63 + [10**8], "instructions", "threads")
    assert max(map(len, widest)) <= 80
    assert "18446744073709551615" in widest[-1]


def test_one_of_many_still_shows():
    assert "|.   " in histogram.lines([10_000, 1])[-1]


def test_tables_align():
    assert table.lines(["NAME", "RUNS"], [["a", 1], ["long", 1000]], left=["NAME"]) == [
        "NAME  RUNS",
        "a        1",
        "long  1000",
    ]


def test_a_row_of_a_table_is_one_line_whatever_a_process_calls_itself():
    assert table.lines(["NAME", "RUNS"], [["a\nb\x1c\x85", 1], ["c", 2]], left=["NAME"])[1:] == [
        "a\\nb\\x1c\\x85     1",
        "c                2",
    ]


@pytest.mark.parametrize(("value", "stars"), [(0, ""), (1, "."), (50, "*****"), (100, "*" * 10)])
def test_bars(value, stars):
    assert table.bar(value, 100, 10) == stars


def test_words():
    assert [table.count(n, noun) for n, noun in ((1, "launch"), (2, "launch"), (1234, "thread"))] == [
        "1 launch",
        "2 launches",
        "1,234 threads",
    ]
    assert table.fit("short", 10) == "short"
    assert len(table.fit("x" * 100, 40)) == 40
    assert len(table.fit("\x1b" * 100, 40)) == 40 and table.fit("\x1b[2J", 10) == "\\x1b[2J"
    assert (table.process("app", 7), table.process("", 7)) == ("app (pid 7)", "? (pid 7)")
    assert (table.us(-4), table.us(-40), table.us(None)) == ("0.00", "-0.04", "-")
    assert [table.us(ns) for ns in (9_999_949, 9_999_950, 97_136_000, 99_950_000, 999_499_999, 999_500_000)] == [
        "9999.9", "10.0ms", "97.1ms", "100ms", "999ms", "1.00s",
    ]  # fmt: skip
    assert max(map(len, table.wrap("word " * 40, indent=2))) <= 80
    assert table.wrap("overhead: 156 KB read", width=14) == ["overhead:", "  156 KB read"]
    assert table.wrap("it spent 39 % there", width=12) == ["it spent", "  39 % there"]
    assert table.wrap("waited for 12.5 us; up to 6 registers", width=16) == [
        "waited for",
        "  12.5 us; up to",
        "  6 registers",
    ]


def test_records_in_bulk_are_what_a_loop_would_write():
    numbers = (
        np.random.default_rng(1).integers(0, 2**63, 3000, dtype=np.uint64)
        >> np.arange(3000, dtype=np.uint64) % 63
    )
    numbers[:4] = [0, 2**64 - 1, 9, 10]
    same = np.full(3000, 7)
    text = records([b'{"a":', numbers, b',"b":[', same, b",", np.arange(3000) % 11, b"]}\n"])
    assert [json.loads(line) for line in text.splitlines()] == [
        {"a": int(number), "b": [7, index % 11]} for index, number in enumerate(numbers)
    ]
    assert records([b"a", np.array([], dtype=np.uint64)]) == b""


def test_words_and_addresses_in_bulk():
    random = np.random.default_rng(2)
    address = random.integers(0, 2**63, 500, dtype=np.uint64) >> random.integers(0, 63, 500, dtype=np.uint64)
    address[:2] = 0, 2**64 - 1
    codes = random.integers(0, 3, 500)
    words = ("load", "", "a longer one")
    parts = [Words([word.encode() for word in words], codes), Hex(address), np.arange(500)]
    lines = joined([b"<", b"|0x", b"|", b">\n"], parts).decode().splitlines()
    assert lines == [f"<{words[codes[n]]}|{address[n]:#x}|{n}>" for n in range(500)]
    columns = [(parts[0], -6), (parts[0], 3), (parts[1], 5), (parts[2], 4)]
    rows = aligned(columns).decode().splitlines()
    width = max(len(f"{value:#x}") for value in address)
    assert rows == [
        f"{words[codes[n]][:6]:6} {words[codes[n]]:>12} {f'{address[n]:#x}':>{width}} {n:4}"
        for n in range(500)
    ]

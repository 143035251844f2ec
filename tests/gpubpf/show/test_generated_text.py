"""What all tools print, over generated values: histograms, the last lines of a report, and numbers with units."""

from __future__ import annotations

import random
import re
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from gpubpf.agent.definitions import Reason
from gpubpf.records.reasons import MISSED, NOT_COUNTED
from gpubpf.show import histogram, picture, table
from gpubpf.show.heatmap import BlockHeat
from gpubpf_properties import LARGEST, NUMBERS, generated, number, numbers
from gpubpf_text import COMMS, KERNELS, Page, check, opened


@generated(100, slots=st.lists(st.just(0) | numbers(10**15), min_size=1, max_size=64))
def test_a_generated_histogram(slots: list[int]) -> None:
    lines = histogram.lines(slots, "instructions", "threads")
    assert bool(lines) is any(slots) and all(len(line) <= table.WIDTH for line in lines)
    counts = [int(re.findall(r": (\d+)", line)[0]) for line in lines[1:]]
    assert sum(counts) == sum(slots)
    for line, count in zip(lines[1:], counts, strict=True):
        assert ("*" in line or "." in line) is bool(count)


@generated(80)
def test_generated_last_lines(rng: random.Random) -> None:
    def some() -> int:
        return rng.choice((0, 1, number(rng, 10**12)))

    reasons = [*(reason.name.lower().replace("_", " ") for reason in Reason), *NOT_COUNTED]
    left_out = {reason: max(some(), 1) for reason in rng.sample(reasons, rng.randrange(len(reasons)))}
    counted = some()
    matched = counted + sum(left_out.values())
    missed = {reason: max(some(), 1) for reason in rng.sample([*MISSED], rng.randrange(len(MISSED) + 1))}
    hooks = rng.choice((None, 0, 1, 10**9))
    overhead = {
        "hooks": hooks,
        "hooks_ns": rng.choice((None, some())),
        "registers": rng.choice((None, 0, -2, 1, 9)),
    }
    overhead |= {"drained_bytes": some(), "stood_ns": some()}
    summary = {
        "launches_seen": matched + some(),
        "launches_matched": matched,
        "launches_instrumented": counted,
    }
    summary |= {"not_instrumented": left_out, "lost": some(), "overhead": overhead}
    summary |= {
        "launches_unknown": some(),
        "graphs_before": some(),
        "launches_by_kernels": some(),
        "launches_unread": rng.choice((0, some())),
        "not_probed": {"atom.x": 1, "y": some()},
    }
    summary |= {"launches_timed": rng.choice(({}, {"device": 1, "stamp": some()}, {"cupti": some()}))}
    unmeasured = {reason: some() for reason in missed}
    processes = {"measured": some(), "missed": missed, "unmeasured_ns": unmeasured}
    summary |= {"processes": rng.choice((None, processes))}
    _, args, page, results = opened("threadhist")
    results.end(summary)
    assert check(page, args)


@pytest.mark.parametrize("ns", [*NUMBERS, *(10**n - 1 for n in range(19)), *(999 * 10**n for n in range(15))])
def test_numbers_have_three_digits_and_a_unit(ns: int) -> None:
    text = table.duration(ns)
    value, unit = text.split()
    size = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}[unit]
    assert abs(float(value) * size - ns) <= 0.005 * ns and (float(value) < 1000 or unit == "s")
    assert float(value) >= 1 or unit == "ns"
    short = table.number(ns)
    assert len(short) <= 7 or ns >= 10**15, short
    assert re.fullmatch(r"[\d.,]+( [kMGT])?", short)
    stored = table.size(ns)
    assert len(stored) <= 7 or ns >= 1000 << 40, stored
    assert re.fullmatch(r"[\d.,]+ [KMGT]?B", stored)
    assert len(table.us(ns)) <= 7 or ns >= 10**15 - 10**9, table.us(ns)
    assert re.fullmatch(r"[\d.]+(m?s)?", table.us(ns)) and table.us(-ns).lstrip("-") == table.us(ns)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", [*KERNELS, *COMMS])
def test_pictures_with_any_names_are_valid(name: str, tmp_path: Path) -> None:
    heat = BlockHeat(name, 3)
    heat.add(np.array([0, 1, 2]), np.array([0, 5, LARGEST >> 4]))
    picture.write(str(tmp_path / "a.svg"), [heat])
    drawn = xml.etree.ElementTree.parse(tmp_path / "a.svg")
    assert any(name[:1] in (text.text or "") or not name[:1].isprintable() for text in drawn.iter())


@pytest.mark.parametrize("name", [*KERNELS, *COMMS])
def test_a_name_is_one_line_that_a_terminal_shows_as_it_is(name: str) -> None:
    page = Page()
    page.line(table.fit(name, 40))
    page.lines(
        [*table.wrap(f"{table.fit(name, 40)} took long", 2), *table.within([{"KERNEL": name, "N": 1}])]
    )
    lines = page.raw.decode().split("\n")[:-1]
    assert all(line.isprintable() and len(line) <= table.WIDTH for line in lines) and 4 <= len(lines) <= 5


def test_ordinals() -> None:
    said = {2: "2nd", 3: "3rd", 4: "4th", 11: "11th", 12: "12th", 21: "21st", 32: "32nd", 1113: "1,113th"}
    assert {number: table.ordinal(number) for number in said} == said

"""What gpudist shows people of a distribution."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpubpf.expressions import distributions, specs
from gpubpf.expressions.distributions import NEGATIVE, Found, Keys, Sums
from gpubpf.inject.values import Site
from gpubpf.record import replace
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf.tools import gpudist


def shown(kind: str, buckets: dict[int, int], type_: str = "u64") -> list[str]:
    """Return the lines of the histogram, each without its bar."""
    sums = Sums(sum(buckets.values()), 100, Counter(buckets))
    wanted = replace(specs.distribution(f"load:*:{type_}:width"), kind=kind, width=10)
    found = Found(1, "app", 0, None, wanted, "", sums)
    lines = list(distributions.lines([found], OwnerColumns(False), False))
    first = next(n for n, line in enumerate(lines) if "distribution" in line)
    return [line.partition("|")[0].rstrip() for line in lines[first + 1 :] if line]


def test_powers_of_two_include_the_empty_ones_between() -> None:
    assert shown("log2", {1: 4, 4: 2}) == [
        "         2 -> 3          : 4",
        "         4 -> 7          : 0",
        "         8 -> 15         : 0",
        "        16 -> 31         : 2",
    ]
    signed = shown("log2", {NEGATIVE: 3, 1: 1}, "s32")
    assert [line.split(":")[1].strip() for line in signed] == ["3", "0", "1"]
    assert signed[0].startswith("-2147483648 -> -1 ") and len({line.index(":") for line in signed}) == 1
    assert len(shown("log2", {0: 1, 63: 1})) == 64


def test_equal_widths_leave_the_empty_ones_out() -> None:
    assert shown("linear", {0: 1, 1 << 40: 1})[1].split()[0] == str(10 << 40)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc")
def test_sums_are_exact_however_many_values_there_are(tmp_path: Path) -> None:
    """The tool's C text adds large values to sums that are about to overflow, as after 2**32 of them."""
    begin, end = (gpudist.PROGRAM.index(text) for text in ("struct sum", "/* Add the values"))
    text = (
        "typedef unsigned u32;\ntypedef unsigned long long u64;\ntypedef long long s64;\n"
        + gpudist.PROGRAM[begin:end]
    )
    text += "void add(struct sum *to, u64 value, int is_signed) { add_value(to, value, is_signed); }\n"
    command = ["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", tmp_path / "sum.so"]
    subprocess.run(command, input=text, text=True, check=True)
    add = ctypes.CDLL(str(tmp_path / "sum.so")).add
    rng, top = random.Random(1), 1 << 63
    for type_, values in (
        ("u64", (0, 1, top - 1, top, 2 * top - 1)),
        ("s64", (0, 1, -1, top - 1, -top)),
        ("u32", (0, 1, 2**32 - 1)),
        ("s32", (1, -1, 2**31 - 1, -(2**31))),
    ):
        one = specs.distribution(f"load:*:{type_}:width")
        for low in (0, 5, top - 1, top, 2 * top - 1):
            cells = np.array([[(1, low, 0)]], [("count", "<u8"), ("low", "<u8"), ("high", "<u8")])

            def total(cells: Any = cells, one: Any = one) -> int:
                ((_, sums),) = distributions._by_site(SimpleNamespace(array=cells), one)  # type: ignore[arg-type]
                return sums.sum

            expected = total()
            for value in rng.choices(values, k=50):
                add(ctypes.c_void_p(cells.ctypes.data), ctypes.c_uint64(value), int(one.signed))
                expected += value
                assert total() == expected


def test_values_that_are_missing_have_no_histogram() -> None:
    """A mean that rounds to 0 has no sign."""
    wanted = replace(specs.distribution("load:*:s32:width"), kind="values")
    found = Found(1, "app", 0, None, wanted, "", Sums(64, -2, Counter()))
    assert list(distributions.lines([found], OwnerColumns(False), False)) == [
        "load:*:s32:width",
        "  app (pid 1): 64 values, mean 0.0",
        "  64 values missing: no room in the table, or a kernel was running when it was",
        "    read",
        "",
    ]


def test_instantiations_of_a_template_have_their_own_distribution() -> None:
    wanted = replace(specs.distribution("load:*:u32:width, kernel"), kind="values")
    found = [
        Found(1, "app", 0, None, wanted, mangled, Sums(2, 8, Counter({4: 2})))
        for mangled in ("_Z4fillIiEvPT_", "_Z4fillIdEvPT_", "_Z5plainPf")
    ]
    lines = list(distributions.lines(found, OwnerColumns(False), False))
    assert [line for line in lines if line.startswith("  kernel: ")] == [
        "  kernel: fill<int>(int*)",
        "  kernel: fill<double>(double*)",
        "  kernel: plain",
    ]
    rows = [dict(zip(distributions.DIST.columns, row, strict=True)) for row in distributions.rows(found)]
    assert [(row["key"], row["mangled"]) for row in rows] == [(one.name, one.key) for one in found]
    record = distributions.DIST.record(found[0])
    assert (record["key"], record["mangled"]) == ("fill", "_Z4fillIiEvPT_")
    plain = Found(1, "app", 0, None, specs.distribution("load:*:u32:width, source"), "a.cu:3", Sums(1))
    record = distributions.DIST.record(plain)
    assert record["key"] == "a.cu:3" and "mangled" not in record


def test_places_of_the_same_name_have_their_own_distribution() -> None:
    """A line of two files, and a line of the PTX of two modules."""
    sites = {
        "_Z1aPf": {0: Site(0, "_Z1aPf", 40), 1: Site(1, "_Z1aPf", 41, "/x/one/util.cuh", 12)},
        "_Z1bPf": {0: Site(0, "_Z1bPf", 40), 1: Site(1, "_Z1bPf", 41, "/x/two/util.cuh", 12)},
        "_Z1cPf": {0: Site(0, "_Z1cPf", 9), 1: Site(1, "_Z1cPf", 41, "/x/two/util.cuh", 13)},
    }
    session: Any = SimpleNamespace(sites=lambda mangled, pid, build: sites[mangled])
    instance: Any = SimpleNamespace(pid=1)
    keys = Keys(session, "source")
    found = [keys.of(instance, mangled, number) for mangled in sites for number in (0, 1, 7)]
    names = distributions.shown_keys(found)
    assert [names[key] for key in found] == [
        *("PTX line 40 of a", "one/util.cuh:12", "site 7 of a"),
        *("PTX line 40 of b", "two/util.cuh:12", "site 7 of b"),
        *("PTX line 9", "util.cuh:13", "site 7 of c"),
    ]


def test_names_of_files() -> None:
    paths = ["/a/b.cu", "a/b.cu", "/a/c.cu", "d/b.cu", "/q/\x01.cu", "/q/\\x01.cu"]
    assert distributions.file_names(paths)["/a/c.cu"] == "c.cu"
    assert len({distributions.file_names(paths)[path] for path in paths[:4]}) == 4
    assert distributions.file_names([]) == {}

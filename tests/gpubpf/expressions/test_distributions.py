"""What gpudist shows people of a distribution."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from gpubpf.expressions import distributions, specs
from gpubpf.expressions.distributions import NEGATIVE, Found, Keys, Sums
from gpubpf.ptx.values import Site
from gpubpf.show.owner_columns import OwnerColumns


def shown(kind: str, buckets: dict[int, int], type_: str = "u64") -> list[str]:
    """Return the lines of the histogram, each without its bar."""
    sums = Sums(sum(buckets.values()), 100, Counter(buckets))
    found = Found(1, "app", 0, None, specs.distribution(f"load:*:{type_}:width"), "", sums)
    lines = list(distributions.lines([found], kind, 10, OwnerColumns(False), False))
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


def test_values_that_are_missing_have_no_histogram() -> None:
    """A mean that rounds to 0 has no sign."""
    found = Found(1, "app", 0, None, specs.distribution("load:*:s32:width"), "", Sums(64, -2, Counter()))
    assert list(distributions.lines([found], "values", 1, OwnerColumns(False), False)) == [
        "load:*:s32:width",
        "  app (pid 1): 64 values, mean 0.0",
        "  64 values missing: no room in the table, or a kernel was running when it was",
        "    read",
        "",
    ]


def test_instantiations_of_a_template_have_their_own_distribution() -> None:
    wanted = specs.distribution("load:*:u32:width, kernel")
    found = [
        Found(1, "app", 0, None, wanted, mangled, Sums(2, 8, Counter({4: 2})))
        for mangled in ("_Z4fillIiEvPT_", "_Z4fillIdEvPT_", "_Z5plainPf")
    ]
    lines = list(distributions.lines(found, "values", 1, OwnerColumns(False), False))
    assert [line for line in lines if line.startswith("  kernel: ")] == [
        "  kernel: void fill<int>(int*)",
        "  kernel: void fill<double>(double*)",
        "  kernel: plain",
    ]
    rows = [
        dict(zip(distributions.COLUMNS, row, strict=True)) for row in distributions.rows(found, "values", 1)
    ]
    assert [(row["key"], row["mangled"]) for row in rows] == [(one.name, one.key) for one in found]
    record = found[0].record("values", 1)
    assert (record["key"], record["mangled"]) == ("fill", "_Z4fillIiEvPT_")
    plain = Found(1, "app", 0, None, specs.distribution("load:*:u32:width, source"), "a.cu:3", Sums(1))
    assert plain.record("values", 1)["key"] == "a.cu:3" and "mangled" not in plain.record("values", 1)


def test_places_of_the_same_name_have_their_own_distribution() -> None:
    """A line of two files, and a line of the PTX of two modules."""
    sites = {
        "_Z1aPf": {0: Site(0, "_Z1aPf", 40), 1: Site(1, "_Z1aPf", 41, "/x/one/util.cuh", 12)},
        "_Z1bPf": {0: Site(0, "_Z1bPf", 40), 1: Site(1, "_Z1bPf", 41, "/x/two/util.cuh", 12)},
        "_Z1cPf": {0: Site(0, "_Z1cPf", 9), 1: Site(1, "_Z1cPf", 41, "/x/two/util.cuh", 13)},
    }
    session: Any = SimpleNamespace(sites=lambda mangled, pid: sites[mangled])
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

"""What gpudist shows people of a distribution."""

from __future__ import annotations

from collections import Counter

from gpubpf.expressions import distributions, specs
from gpubpf.expressions.distributions import NEGATIVE, Found, Sums
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

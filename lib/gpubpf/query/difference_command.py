"""The command `gpubpf diff`: its options, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from gpubpf.query.limits import add_limits
from gpubpf.show import cli
from gpubpf.show.option_values import parse_results

DESCRIPTION = "Compare two measurements of one program: what got slower or wasteful."
EXAMPLES = """examples:
    launchlate -v --parquet before -- ./app         five times or more
    launchlate -v --parquet after -- ./app_new      as often
    gpubpf diff before after        what got slower, and what is noise
    gpubpf diff --fail-above 5% before after
                                    for CI: exit status 1 if a measure got
                                    more than 5 % worse

exit status: 0; 1 if a measure got worse by more than --fail-above, or if
the records are wrong; 2 if the command line is wrong.
"""
MOST = 50  # findings that are shown to people
RUNS = 3  # runs of each measurement, from which on they show how much runs differ
NAME = 40  # columns of a kernel's name or a place in a sentence
NAMES = 8  # kernels and places that a line of what was not compared names
_WHY = {"a": "only A has", "b": "only B has", None: "A and B have different sampling:"}


def _percent(text: str) -> float:
    """Parse a percentage from 0 on; ``5%`` is 5."""
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent < 1e9:
        raise argparse.ArgumentTypeError(f"must be a percentage, 0 or more, not {text!r}")
    return percent


def add_options(made: cli.Parser) -> None:
    """Add the options of the command to its parser."""
    made.add_argument(
        "--fail-above",
        type=_percent,
        metavar="PERCENT",
        help="exit with status 1 if a measure got worse by more than PERCENT, beyond the noise",
    )
    made.add_argument(
        "--ignore-below",
        type=_percent,
        default=1.0,
        metavar="PERCENT",
        help="take smaller changes for equal (default 1%%); 0 shows every change beyond the noise",
    )
    made.add_argument(
        "-o",
        dest="output",
        type=parse_results,
        metavar="FILE",
        help="write the results to FILE (default, or -: standard output)",
    )
    made.add_argument("--json", action="store_true", help="print JSON Lines: every measure, also equal ones")
    add_limits(made)
    made.add_argument("a", metavar="A", help="directory of the measurement before (--parquet DIR)")
    made.add_argument("b", metavar="B", help="directory of the measurement after")


def run(args: argparse.Namespace, made: cli.Parser) -> int:
    """Run the command. Return its exit status. Raises Error for records that cannot be read or compared."""
    from gpubpf.query import difference

    limit = args.fail_above
    floor = args.ignore_below if limit is None else min(args.ignore_below, limit)
    with difference.compare([args.a], [args.b], floor / 100, args.memory, args.timeout) as database:
        differences = _rows(database, "FROM compared")
        one_sided = _rows(database, "FROM not_compared")
        conditions = {
            side: _rows(database, f"FROM {side}.conditions ORDER BY ALL") for side in difference.SIDES
        }
    out = cli.open_results(cli.Options.of(args).output)  # not before: an error leaves an older FILE as it is
    if args.json:
        _write_records(out, differences, one_sided, conditions)
    else:
        out.lines(_lines(differences, one_sided, conditions))
    failed = limit is not None and any(
        one["verdict"] == "worse" and _size(one) > limit / 100 for one in differences
    )
    return 1 if failed else 0


def _rows(database: Any, question: str) -> list[dict[str, Any]]:
    answer = database.execute(question)
    names = [column[0] for column in answer.description]
    return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]


def _size(one: Mapping[str, Any]) -> float:
    """Return the size of a change; a value that was 0 has changed without limit."""
    return float("inf") if one["change"] is None else abs(one["change"])


def _write_records(
    out: cli.Output,
    differences: list[dict[str, Any]],
    one_sided: list[dict[str, Any]],
    conditions: Mapping[str, list[dict[str, Any]]],
) -> None:
    from gpubpf.query.difference_records import CONDITION, DIFFERENCE, NOT_COMPARED, SUMMARY, VERDICTS

    out.records(
        DIFFERENCE.record(**{name: value for name, value in one.items() if name != "by_runs"})
        for one in differences
    )
    out.records(NOT_COMPARED.record(**one) for one in one_sided)
    for side, facts in conditions.items():
        out.records(CONDITION.record(side=side, **fact) for fact in facts)
    found = [one["verdict"] for one in differences]
    counts = {name: found.count(name) for name in VERDICTS}
    out.records([SUMMARY.record(**counts, not_compared=len(one_sided))])


def _lines(
    differences: list[dict[str, Any]],
    one_sided: list[dict[str, Any]],
    conditions: Mapping[str, list[dict[str, Any]]],
) -> Iterator[str]:
    """Yield the report for people: the findings first, then what could not be compared."""
    from gpubpf.show import table

    verdicts = [one["verdict"] for one in differences]
    worse, better = verdicts.count("worse"), verdicts.count("better")
    equal = verdicts.count("same")
    found = f"{table.count(worse, 'measure')} got worse, {better} got better" if worse or better else ""
    verb = "is" if 1 in (equal, len(differences)) else "are"
    rest = f"{equal} of {table.count(len(differences), 'measure')} {verb} equal within the noise"
    yield from table.wrap(f"{found or 'no finding'}; {rest}")
    yield ""
    left = MOST
    for verdict in ("worse", "better"):
        shown = sorted((one for one in differences if one["verdict"] == verdict), key=_size, reverse=True)
        if shown:
            rows = [_cells(one) for one in shown[:left]]
            exact = all(row["NOISE"] == "exact" for row in rows)
            made = (
                table.within if exact else table.cut_first
            )  # `within` leaves out NOISE before it cuts names
            yield from made(rows, ("KERNEL", "WHERE", "MEASURE"), cut=("KERNEL", "WHERE"), drop=("NOISE",))
            if len(shown) > left:
                yield f"... {len(shown) - left:,} more; --json prints all"
            yield ""
        left = max(left - len(shown), 1)
    yield from _unknown(differences)
    yield from _runs(differences)
    for line in _uncomparable(one_sided, conditions):
        yield from table.wrap(line)


def _cells(one: Mapping[str, Any]) -> dict[str, str]:
    change = "new" if one["change"] is None else f"{100 * one['change']:+.1f} %"
    noise = "-" if one["noise"] is None else "exact" if one["noise"] == 0 else f"{100 * one['noise']:.1f} %"
    return {
        one["verdict"].upper(): change,
        "NOISE": noise,
        "KERNEL": one["kernel"],
        "WHERE": one["place"] or "-",
        "MEASURE": one["measure"],
        "A": _value(one["a"], one["unit"]),
        "B": _value(one["b"], one["unit"]),
    }


def _value(value: float, unit: str) -> str:
    from gpubpf.show import table

    if unit == "ns":
        return table.with_unit(round(value))
    return f"{value:.3g}" if value < 1000 else table.number(value)


def _unknown(differences: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the measures whose noise is unknown, and what shows the noise."""
    from gpubpf.show import table

    unknown = [one for one in differences if one["verdict"] == "unknown"]
    if unknown:
        names = ", ".join(sorted({f"{one['tool']}: {one['measure']}" for one in unknown}))
        launches = ", or with launchlate -v" if any(one["tool"] == "launchlate" for one in unknown) else ""
        yield from table.wrap(
            f"unknown: {table.count(len(unknown), 'measure')} ({names}): so few runs do not show the noise; "
            f"measure {RUNS} runs or more of each{launches}"
        )


def _runs(differences: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line if launch times were compared by runs that are too few."""
    from gpubpf.show import table

    if any(one["tool"] == "launchlate" and one["noise"] and not one["by_runs"] for one in differences):
        yield from table.wrap(
            f"few runs: how much runs differ is taken from how much launches differ in a run; {RUNS} runs "
            "or more of each show smaller changes"
        )


def _not_compared(one_sided: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each group of measures that were not compared, with their kernels and the reason."""
    from gpubpf.show.kernel_names import fitted
    from gpubpf.show.table import fit

    short = fitted({one["kernel"] for one in one_sided}, NAME)
    whole = {
        (one["side"], one["tool"], one["kernel"], one["measure"]) for one in one_sided if not one["place"]
    }
    measures: dict[tuple[Any, str, str, str], list[str]] = {}
    for one in one_sided:
        kernel = one["side"], one["tool"], one["kernel"]
        if not one["place"] or (*kernel, one["measure"]) not in whole:  # else all its places lack it
            measures.setdefault((*kernel, one["place"]), []).append(one["measure"])
    groups: dict[tuple[Any, str, tuple[str, ...]], list[tuple[str, str]]] = {}
    for (side, tool, name, place), listed in measures.items():
        groups.setdefault((side, tool, tuple(listed)), []).append((name, place))
    for (side, tool, names), found in groups.items():
        places: dict[str, list[str]] = {}
        for name, place in found[:NAMES]:
            places.setdefault(name, []).extend([fit(place, NAME)] * bool(place))
        wheres = [short[name] + (f" ({', '.join(some)})" if some else "") for name, some in places.items()]
        more = f" and {len(found) - NAMES} more" if len(found) > NAMES else ""
        yield f"not compared: {_WHY[side]} {tool}'s {' and '.join(names)} of {', '.join(wheres)}{more}"


def _uncomparable(
    one_sided: list[dict[str, Any]], conditions: Mapping[str, list[dict[str, Any]]]
) -> Iterator[str]:
    """Yield what could not be compared, and what makes the comparison doubtful."""
    yield from _not_compared(one_sided)
    how: dict[str, dict[str, list[str]]] = {}
    for side, facts in conditions.items():
        for fact in facts:
            if fact["missing"]:
                yield f"incomplete: in {side.upper()}, {fact['condition']} {fact['value']}"
            else:
                how.setdefault(fact["condition"], {}).setdefault(side, []).append(fact["value"])
    for condition, values in how.items():
        in_a, in_b = (", ".join(values.get(side, ["none"])) for side in ("a", "b"))
        if in_a != in_b:
            yield f"differs: {condition}: {in_a} in A, {in_b} in B"
    if any("an embedded device" in values for values in how.get("device", {}).values()):
        yield "an embedded device: times say nothing about a GPU, except on the virtual clock"

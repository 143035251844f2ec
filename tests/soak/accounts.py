"""What a tool said in a cycle of the soak: its records or its text, and whether that accounts for each launch of the program.

The tables say all that a tool may say on standard error, and when. `account` compares three numbers of launches: those that the
program made, those that the tool had to see (not those after a signal had ended the measurement), and those that it saw.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpubpf.records import reasons

ADD, SPIN = "soak_add", "soak_spin"
THREADS = 64  # of a launch of soak_add, in 2 warps of 2 blocks; soak_spin does not end
WARPS = 2
THREADS_OF_PROGRAM = 4  # of lives.cu that launch at once, at most
WIDTH = 80  # columns of text
CALLS = ("cudasnoop", "hipsnoop")  # they count calls, not launches
LAUNCHES, EXITS = "kernel:soak*", "exit:soak*"


class Defect(Exception):
    """What must not happen."""


def demand(condition: object, what: str) -> None:
    if not condition:
        raise Defect(what)


# --- what may be said, and when -------------------------------------------------------------------------------------

ALWAYS = ""  # with any fault, any end
OUT_OF_FILES = "few files of the tool"
NO_FILES_IN_PROGRAM = ("few files of the program", "small files of the program")
SIGNALS = ("terminated", "interrupted")

# What a notice excuses.
NOTHING = "nothing"
PROGRAM = "program"  # the launches of one program: of the process that it names
MISSED_PROGRAM = "missed program"  # the same; the summary's `missed` counts this process, too
PROCESSES = "processes"  # as many programs as it says
ALL = "all"
COUNTS = "counts"  # launches were seen, but up to so many of them are not in the counts


@dataclass(frozen=True)
class Notice:
    """A line on standard error. `when`: the faults, ends or ways in with which it may come; any of them is enough."""

    pattern: str
    excuses: str
    when: Sequence[str] = (ALWAYS,)


_PID = r"pid (?P<pid>\d+) \(\w*\)"
# Of a process that can make no files.
_NOT_HOOKABLE = (
    rf"{_PID} (cannot be hooked: it can make no files in memory \(.*\)|cannot be hooked: \w+ failed in it \(.*\); .*"
    r"|cannot load \S+: .*Too many open files; .*)"
)
# Of results that were not read.
_LOST_RECORDS = r"(; [\d,]+ records? of \w+ received, .* lost)*"
_LOST_COUNTS = r"the counts of up to (?P<counts>[\d,]+) launch(es)? are lost( \([\d,]+ of them began after the last reading\))?"
NOTICES = (
    Notice(r"note: attached to \d+ \(\w*\)(, after it executed another program)?", NOTHING),
    Notice(
        r"note: attached to \d+ \(\w*\), but (a kernel is|\d+ kernels are) not instrumented yet: launches run the original",
        NOTHING,
        ("process", "machine"),
    ),
    Notice(r"note: watching every process", NOTHING, ("machine",)),
    Notice(r"note: no AMD GPU: HIP runs on hipsim, in software; times mean nothing", NOTHING),
    # The summary's `missed` then has their number.
    Notice(r"note: further notices of this kind are suppressed", NOTHING, ("execs", "forks")),
    # Processes that are not traced, or not to their end.
    Notice(
        rf"note: {_PID} is not traced: it can make no files in memory \(.*\)",
        MISSED_PROGRAM,
        NO_FILES_IN_PROGRAM,
    ),
    Notice(
        rf"note: {_NOT_HOOKABLE}",
        MISSED_PROGRAM,
        NO_FILES_IN_PROGRAM,
    ),
    Notice(rf"note: {_PID} is not traced: too many open files; .*", MISSED_PROGRAM, (OUT_OF_FILES,)),
    Notice(rf"note: {_PID} is no longer traced: too many open files; .*", PROGRAM, (OUT_OF_FILES,)),
    Notice(
        r"note: (?P<processes>[\d,]+) process(es)? ended or continued before the tool could attach; .* launches are missing: .*",
        PROCESSES,
        (OUT_OF_FILES,),
    ),
    # Every process: a new one may be reached late, or too late.
    Notice(
        r"note: no CUDA driver and no ROCr found yet; waiting for a process that loads one",
        NOTHING,
        ("machine",),
    ),
    Notice(r"note: found no .* yet; waiting for a process that loads it", NOTHING, ("machine",)),
    Notice(
        r"note: process (?P<pid>\d+) mapped \S+, but ended before probes were attached; .*",
        PROGRAM,
        ("machine",),
    ),
    Notice(
        r"note: process \d+ loaded \S+ before it had probes; calls of any process until then are not traced",
        ALL,
        ("machine",),
    ),
    Notice(
        r"note: the hold helper (exited|does not answer); new processes will be attached late, or missed",
        NOTHING,
        (OUT_OF_FILES, "little memory of the tool", *SIGNALS),
    ),
    Notice(
        r"note: processes may be attached late or missed: too many open files; .*", NOTHING, (OUT_OF_FILES,)
    ),
    # Calls that are not traced: cudasnoop and hipsnoop.
    Notice(
        r"note: libraries that processes load later are not traced \(Too many open files\)",
        ALL,
        (OUT_OF_FILES,),
    ),
    Notice(
        r"note: cannot open \S+ \(Too many open files\); calls of it are not traced", ALL, (OUT_OF_FILES,)
    ),
    Notice(
        r"note: .* (is|are) not traced: the kernel refused the probe \(too many open files; .*\)",
        ALL,
        (OUT_OF_FILES,),
    ),
    # Kernels that are not instrumented: their launches are seen.
    Notice(rf"note: {_PID}: a module is not instrumented: too many open files; .*", NOTHING, (OUT_OF_FILES,)),
    Notice(
        r"note: modules are not instrumented: a Python package cannot be loaded: .*; raise the limit on open files .*",
        NOTHING,
        (OUT_OF_FILES,),
    ),
    # Its launches are in the log, but without what host programs tell of them.
    Notice(
        rf"note: {_PID}: host programs do not run at its launches: too many open files; .*",
        NOTHING,
        (OUT_OF_FILES,),
    ),
    # Results that were not read. Their launches were seen, and the summary's `lost` counts them.
    Notice(
        rf"note: {_PID}( (ended|executed another program) before its results could be read|: its last results were not read)"
        rf"(; {_LOST_COUNTS})?{_LOST_RECORDS}",
        COUNTS,
        ("kill", "abort", "_exit", "execs", OUT_OF_FILES, *SIGNALS),
    ),
    Notice(
        rf"note: {_PID}: it could not create a file in memory for its results \(.*\)"
        rf"; {_LOST_COUNTS}",
        COUNTS,
        NO_FILES_IN_PROGRAM,
    ),
    Notice(
        rf"note: {_PID}: some readings of its maps were dropped, because the tool was too slow",
        NOTHING,
        ("stopped tool",),
    ),
    # A signal other than SIGINT leaves little time for the last reading, and a kernel may run for longer.
    Notice(
        r"note: [\d,]+ process(es)? did not answer in time; counts since the last reading are not shown: .*",
        NOTHING,
        ("terminated",),
    ),
    Notice(
        rf"note: {_PID}: its results could not be read in time(; {_LOST_COUNTS})?{_LOST_RECORDS}",
        COUNTS,
        ("terminated",),
    ),
    Notice(
        rf"note: {_PID} ended while a kernel was running or had failed; results may be incomplete",
        NOTHING,
        ("running",),
    ),
)

# Why there are no results at all.
ENDINGS = (
    Notice(r"cannot write the results: .*|.*: No space left on device; .*", NOTHING, ("full output",)),
    Notice(r"(?!note: ).*[Tt]oo many open files.*", NOTHING, (OUT_OF_FILES,)),
    Notice(r"out of memory; measure less .*", NOTHING, ("little memory of the tool",)),
    Notice(r"(?!note: ).* \(Cannot allocate memory\); .*", NOTHING, ("little memory of the tool",)),
    Notice(
        r"the compiler was killed, perhaps because memory ran out; .*",
        NOTHING,
        ("little memory of the tool",),
    ),
    Notice(  # the agent knows its tool once that has answered
        rf"{_PID} is already traced by (another tool|\w+, pid \d+|\w+ \(pid \d+\)); stop that( tool)? first",
        NOTHING,
        ("second tool",),
    ),
    Notice(_NOT_HOOKABLE, NOTHING, NO_FILES_IN_PROGRAM),
)

# When results of launches that were counted may be missing (`lost`), and when launches may be without times. The buffer of gputrace
# may be full.
LOSSES = (
    *("kill", "abort", "_exit", "execs", "running", "gputrace"),
    *(OUT_OF_FILES, *NO_FILES_IN_PROGRAM, *SIGNALS),
)
FOLLOWED = 1024  # dispatches under way whose times hipsnoop's agent reports (docs/host-calls.md)
UNTIMED = (*LOSSES, "process", "machine")  # they may have waited for work from before attaching

# Why launches that were seen are not counted (`not_instrumented`), and why processes are missed (`processes.missed`).
NOT_COUNTED = {
    reasons.BEFORE_READY: ("process", "machine", OUT_OF_FILES, *SIGNALS),
    "no memory for maps": NO_FILES_IN_PROGRAM,
}
MISSED = {
    reasons.UNREACHED: (OUT_OF_FILES,),
    reasons.OUT_OF_FILES: (OUT_OF_FILES,),
    reasons.UNHOOKED: NO_FILES_IN_PROGRAM,
    reasons.STOPPED: ("stopped program",),
    reasons.ENDED: ("machine",),
    reasons.REACHED_LATE: ("machine",),
    reasons.TOO_LATE: ("machine",),
    reasons.NO_DRIVER: ("machine",),
    reasons.NO_ROCR: ("machine",),
}


NO_KERNEL = re.compile(
    r"(note: )?no (kernel was launched|traced process launched a kernel|traced process has loaded \S+)"
)


def read_notice(line: str, notices: Iterable[Notice]) -> tuple[Notice, re.Match[str]] | None:
    """Return the notice that a line of standard error is, without the tool's name."""
    for notice in notices:
        if found := re.fullmatch(notice.pattern, line):
            return notice, found
    return None


# --- what the tool said ---------------------------------------------------------------------------------------------


@dataclass
class Said:
    """What a tool said of the launches.

    `seen`: None if there was no summary. `counted`: launches with a probe, or whose calls were counted. `lost`: of the summary.
    `totals`: what was added up, and how much of it a launch makes.
    """

    seen: int | None = None
    counted: int = 0
    lost: int = 0
    not_counted: dict[str, int] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    totals: list[Total] = field(default_factory=list)
    untimed: int = 0  # launches that launchlate does not show, or of which ROCr says nothing


@dataclass(frozen=True)
class Total:
    """What a tool added up. `each`: how much of it one launch makes. `of`: the launches that it must agree with."""

    what: str
    sum: int
    each: int
    of: str = "counted"  # or "seen"


def from_records(tool: str, records: Sequence[Mapping[str, Any]]) -> Said:
    """Return what JSON records say."""
    said = Said()
    summary = next((r for r in records if r["type"] == "summary"), None)
    if summary is None:
        return said
    kernels = [r for r in records if r["type"] == "kernel" and r["kernel"] in (ADD, SPIN)]
    if tool in CALLS:
        said.seen = said.counted = sum(r["count"] for r in kernels)
        said.lost = summary["lost"]
        if any("runs" in r for r in kernels):  # kernels that ROCr saw
            device = summary["device_times"]
            said.untimed = device["lost"] + device["unended"]
            if device["unread"] is None:
                said.totals = [Total("executions", sum(r.get("runs", 0) for r in kernels), 1)]
        return said
    said.seen, said.counted = summary["launches_matched"], summary["launches_instrumented"]
    said.not_counted, said.lost = summary["not_instrumented"], summary["lost"]
    said.missed = summary.get("processes", {}).get("missed", {})
    adds_up = said.counted + sum(said.not_counted.values()) == said.seen <= summary["launches_seen"]
    demand(adds_up, f"the summary does not add up: {summary}")
    ours = [r for r in kernels if r["kernel"] == ADD]
    if tool == "threadhist":
        said.totals = [
            Total("launches", _sum(ours, "launches"), 1),
            Total("runs", _sum(ours, "runs"), THREADS),
        ]
    elif tool == "memtrace":
        said.totals = [
            Total("launches", _sum(ours, "launches"), 1),
            Total("requests", _sum(ours, "requests"), 2 * WARPS),
        ]
    elif tool == "kernelretsnoop":
        said.totals = [Total("exits", _sum(ours, "exits"), THREADS)]
    elif tool == "launchlate":
        said.totals = [Total("launches", _sum(kernels, "count"), 1, "seen")]
        said.untimed = summary["launches_untimed"] + summary["launches_running"]
    elif tool == "gpucount":
        of = {
            spec: [r for r in records if r.get("spec") == spec and r["kernel"] == ADD]
            for spec in (LAUNCHES, EXITS)
        }
        said.totals = [
            Total("launches", _sum(of[LAUNCHES], "count"), 1, "seen"),
            Total("threads launched", _sum(of[LAUNCHES], "threads"), THREADS, "seen"),
            Total("warps that end", _sum(of[EXITS], "count"), WARPS),
            Total("threads that end", _sum(of[EXITS], "threads"), THREADS),
        ]
    elif tool == "gpudist":
        of = {spec: [r for r in records if r.get("spec") == spec] for spec in (LAUNCHES, EXITS)}
        sizes = sum((Counter(r["values"]) for r in of[LAUNCHES]), Counter[str]())
        said.totals = [
            Total("launches", sizes[str(THREADS)], 1, "seen"),
            Total("values", _sum(of[EXITS], "count"), THREADS),
            Total("sum of values", _sum(of[EXITS], "sum"), THREADS // 2),
        ]
    elif tool == "gpurun":
        entries = [entry for r in records if r["type"] == "map" for entry in r["entries"]]
        said.totals = [Total("threads that end", _sum(entries, "value"), THREADS)]
    elif tool == "gputrace":
        events = Counter(r["spec"] for r in records if r["type"] == "event" and r["kernel"] == ADD)
        said.totals = [
            Total("launches", events[LAUNCHES], 1, "seen"),
            Total("warps that end", sum(events.values()) - events[LAUNCHES], WARPS),
        ]
    return said


def _sum(records: Iterable[Mapping[str, Any]], name: str) -> int:
    return sum(r[name] for r in records)


# The first line of a result, and its end.
TITLES = {
    "threadhist": r"soak_\w+: instructions per thread",
    "kernelretsnoop": r"soak_\w+: when its threads exit",
    "memtrace": r"soak_\w+: memory traffic",
    "launchlate": r"KERNEL .*COUNT P50 P99 MAX|latency, and its parts \(means\)",
    "cudasnoop": r"[\d,]+ calls? took .* in all",
    "gpucount": r"COUNT: executions by warps",
    "gpudist": r"kernel:soak\*:u64:threads",
    "gpurun": r"ends \(array\); ",
    "gputrace": r"LAUNCH KERNEL BLOCK THREAD EVENT",
}


def from_text(tool: str, text: str) -> Said:
    """Return what the output says for people."""
    said = Said()
    lines, joined = text.splitlines(), " ".join(text.split())
    for line in lines:
        demand(len(line) <= WIDTH, f"{len(line)} columns: {line}")
    if tool in CALLS:
        return _calls_of(lines, joined)
    found = re.search(
        r"counted (nothing|[\d,]+)( of ([\d,]+) (matching )?launch(es)?)?( \(([\d,]+) in total\))?", joined
    )
    if found is None:
        return said
    said.seen, said.counted = _number(found[3]), _number(found[1])
    said.not_counted = _reasons(re.findall(r"(?:not counted|no probe): ([\d,]+) \((.*?)\)", joined))
    unprobed = sum(said.not_counted.values())
    if " not counted: " not in joined:  # launchlate times launches without a probe, too, if it can
        unprobed = sum(map(_number, re.findall(r"([\d,]+) launch(?:es)? not timed: neither", joined)))
    demand(said.counted + unprobed == said.seen, f"the summary does not add up: {found[0]}")
    if lost := re.search(r"lost: (?:[a-z, ]*at most )?([\d,]+)", joined):
        said.lost = _number(lost[1])
    if missed := re.search(r"processes measured: .*?; missed: ((?:[\d,]+ \([^)]*\)(?:, )?)+)", joined):
        said.missed = _reasons(re.findall(r"([\d,]+) \((.*?)\)", missed[1]))
    if said.counted > said.lost:
        demand(re.search(TITLES[tool], joined), f"no header: {lines[:3]}")
    if tool in ("threadhist", "memtrace", "kernelretsnoop"):
        blocks = re.findall(rf"{ADD}: .*?([\d,]+) launch(?:es)?, ", joined)
        said.totals = [Total("launches", sum(map(_number, blocks)), 1)]
    elif tool == "launchlate":
        took = re.search(r"([\d,]+) launch(?:es)? took", joined)
        if took:  # without latencies above the clock's error, there are no sums
            said.totals = [Total("launches", _number(took[1]), 1, "seen")]
        left_out = r"([\d,]+) launch(?:es)? (?:still|not timed|left out|is left out|are left out)"
        said.untimed = sum(map(_number, re.findall(left_out, joined)))
    elif tool == "gpucount":
        rows = re.findall(rf"(kernel|exit):soak\* +{ADD} +([\d,]+) +([\d,]+)$", text, re.MULTILINE)
        said.totals = [
            Total("launches", sum(_number(n) for of, n, _ in rows if of == "kernel"), 1, "seen"),
            Total("threads that end", sum(_number(n) for of, _, n in rows if of == "exit"), THREADS),
        ]
    elif tool == "gpudist":
        values = re.findall(r": ([\d,]+) values?, mean 0\.5 ", joined)
        said.totals = [Total("values", sum(map(_number, values)), THREADS)]
    elif tool == "gpurun":
        ends = re.findall(r"^  0: (\d+)$", text, re.MULTILINE)
        said.totals = [Total("threads that end", sum(map(_number, ends)), THREADS)]
    elif tool == "gputrace":
        if full := re.search(r"events lost because the ring was full: ([\d,]+) of", joined):
            said.lost += _number(full[1])
        events = Counter(re.findall(rf" {ADD} +(\d+|-) ", text))
        said.totals = [
            Total("launches", events.pop("-", 0), 1, "seen"),
            Total("warps that end", sum(events.values()), WARPS),
        ]
    return said


def _calls_of(lines: Sequence[str], joined: str) -> Said:
    said = Said()
    if not re.search(r"counted (nothing|[\d,]+ calls?)", joined):
        return said
    rows = [re.search(r"(?:^| )(soak_\w+) +([\d,]+) +", line) for line in lines]
    said.seen = said.counted = sum(_number(row[2]) for row in rows if row)
    said.lost = sum(_number(n) for n in re.findall(r"lost: (?:the records of )?([\d,]+) calls?", joined))
    if said.counted:
        demand(re.search(TITLES["cudasnoop"], joined), f"no header: {lines[:3]}")
    return said


def _number(text: str | None) -> int:
    return int(text.replace(",", "")) if text and text[0].isdigit() else 0


def _reasons(found: Iterable[tuple[str, str]]) -> dict[str, int]:
    return {reason: _number(number) for number, reason in found}


# --- the account ----------------------------------------------------------------------------------------------------


@dataclass
class Account:
    """The launches of a cycle, and why some were not seen: `explained` gives the notices and reasons."""

    made: int
    due: int
    seen: int | None = None  # None: the tool did not get to say
    explained: list[str] = field(default_factory=list)


def account(
    said: Said,
    lines: Sequence[str],
    programs: Sequence[tuple[int, int]],
    due: int,
    conditions: Collection[str],
) -> Account:
    """Compare what a tool said with what the program did. Raise Defect unless each launch is accounted for.

    lines: of standard error, without the tool's name. programs: the PID and the launches of each program that was executed.
    due: the launches that the tool had to see. conditions: the tool, the fault, the way in and the end.
    """
    made = sum(launches for _, launches in programs)
    found = Account(made, due, said.seen)
    if said.seen is None:
        last = next((line for line in reversed(lines) if is_ending(line, conditions)), None)
        demand(last is not None, "neither a summary nor a reason")
        found.explained.append(str(last))
        return found
    named: Counter[int] = Counter()
    nameless = counted_too = lost = 0
    for line in lines:
        if none := NO_KERNEL.match(line):
            some = none[2] == "traced process launched a kernel"  # processes that are not traced may have
            demand(not said.seen and (some or not due), f"not true: {line}")
            continue
        known = read_notice(line, NOTICES)
        demand(known is not None, f"unknown notice: {line}")
        assert known is not None
        notice, parts = known
        foreign = int(parts.groupdict().get("pid") or 0) not in {0, *(pid for pid, _ in programs)}
        if foreign and made and "machine" in conditions:
            continue  # another process of this machine
        demand(_may(notice.when, conditions), f"has no cause here: {line}")
        if notice.excuses in (PROGRAM, MISSED_PROGRAM):
            named[int(parts["pid"])] += 1
            counted_too += notice.excuses == MISSED_PROGRAM
        elif notice.excuses == PROCESSES:
            nameless += _number(parts["processes"])
        elif notice.excuses == ALL:
            nameless = len(programs)
        elif notice.excuses == COUNTS:
            lost += _number(parts["counts"])
    for reason, table in ((r, NOT_COUNTED) for r in said.not_counted):
        demand(_may(table.get(reason, ()), conditions), f"launches are not counted ({reason})")
    for reason in said.missed:
        demand(_may(MISSED.get(reason, ()), conditions), f"processes are missed ({reason})")
    demand(not said.lost or _may(LOSSES, conditions), f"{said.lost} are lost, for no reason")
    untimed = _may(UNTIMED, conditions) or ("hipsnoop" in conditions and made > FOLLOWED)
    demand(not said.untimed or untimed, f"{said.untimed} are not timed, for no reason")
    demand(said.seen <= made, f"{said.seen} launches seen of {made}")
    demand(lost <= said.lost, f"the notices say that {lost} are lost, the summary {said.lost}")
    others = max(0, max(nameless, sum(said.missed.values())) - counted_too)
    # A process may execute several programs while the tool waits for files. It is missed once.
    if OUT_OF_FILES in conditions:
        together: Counter[int] = Counter()
        for pid, launches in programs:
            together[pid] += launches
        programs = list(together.items())
    excused = _launches_of(programs, named, others)
    shortfall = due - said.seen
    if shortfall > 0:
        why = f"{said.seen} launches seen of {due}: reasons only for {excused}"
        demand(
            shortfall <= excused, why if excused else f"{said.seen} launches seen of {due}, without a word"
        )
    if not _may((OUT_OF_FILES, "machine", *NO_FILES_IN_PROGRAM, *SIGNALS), conditions):
        counted = f"{said.counted} launches counted of {due} since the tool attached: {said.not_counted}"
        demand(said.counted >= due - excused, counted)
    _check_totals(said, excused - max(0, min(excused, shortfall)), conditions)
    if shortfall > 0:
        found.explained += [line for line in lines if _excuses(line)] or [*said.missed]
    elif said.seen < made:
        found.explained.append("before the tool attached, or after a signal")
    return found


def is_ending(line: str, conditions: Collection[str]) -> bool:
    """Return whether a line of standard error says why there are no results, for a reason that these conditions can have."""
    known = read_notice(line, ENDINGS)
    return known is not None and _may(known[0].when, conditions)


def _excuses(line: str) -> bool:
    known = read_notice(line, NOTICES)
    return known is not None and known[0].excuses in (PROGRAM, MISSED_PROGRAM, PROCESSES, ALL)


def _may(when: Iterable[str], conditions: Collection[str]) -> bool:
    return any(one == ALWAYS or one in conditions for one in when)


def _launches_of(programs: Sequence[tuple[int, int]], named: Mapping[int, int], others: int) -> int:
    """Return the most launches that so many programs of the named processes, and so many others, can have made."""
    excused, left = 0, []
    for pid in {pid for pid, _ in programs}:
        own = sorted((n for one, n in programs if one == pid), reverse=True)
        excused += sum(own[: named.get(pid, 0)])
        left += own[named.get(pid, 0) :]
    return excused + sum(sorted(left, reverse=True)[:others])


def _check_totals(said: Said, excused: int, conditions: Collection[str]) -> None:
    """Compare what the tool added up with the launches that it counted. `lost` is an upper bound for what is missing."""
    spins = 1 if "running" in conditions else 0  # launches of soak_spin: counted, without an end
    # hipsnoop has the calls and the dispatches from two sources. At a signal, each thread may be between the two.
    between = THREADS_OF_PROGRAM if "hipsnoop" in conditions and _may(SIGNALS, conditions) else 0
    for total in said.totals:
        of = said.counted if total.of == "counted" else said.seen or 0
        least = of - spins - excused - said.lost - said.untimed - between
        right = least * total.each <= total.sum <= (of + between) * total.each
        demand(
            right, f"{total.what}: {total.sum}, but {of} launches make {total.each} each; lost: {said.lost}"
        )


def read_records(text: str, may_be_cut: bool) -> list[dict[str, Any]]:
    """Return JSON Lines. The last line may be half, if the tool was killed."""
    lines = text.splitlines()
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            demand(may_be_cut and line is lines[-1], f"no JSON: {line[:200]}")
    return records

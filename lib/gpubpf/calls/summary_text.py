"""The last lines of the output, from the summary record: what was counted, and what was lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpubpf.show import table


def device_lines(summary: Mapping[str, Any], filters: str = "") -> Iterator[str]:
    """Yield a sentence about the times of kernels on the GPU: how many there are and what is missing, or why there
    are none. `filters`: the user's filters, if any; then only dispatches of matching calls are counted.
    """
    if "device_times" not in summary:
        return
    times = summary["device_times"]
    if times is None:
        yield from table.wrap(f"no GPU timestamps: {summary['no_device_times']}")
        return
    dispatches = table.count(times["dispatches"], "kernel dispatch")
    where = " on hipsim" if times["device"] == "sim" else " (not tested on AMD hardware)"
    chosen = " of these calls" if filters else ""
    said = f"{times['source']} reported {dispatches}{chosen}{where}"
    most = " (at most 1,024 at a time are followed)" if times["source"] == "ROCr" else ""
    missing = (
        ("lost", "lost, because they came too fast"),
        ("unended", f"whose end was not reported{most}"),
        ("without_call", "without a known call"),
    )
    parts = [f"{times[key]:,} {what}" for key, what in missing if times[key]]
    if times["unread"]:
        parts.append(f"those of some programs are missing: {times['unread']}")
    yield from table.wrap("; ".join((said, *parts)))


def coverage_lines(summary: Mapping[str, Any], filters: str = "") -> Iterator[str]:
    """Yield the last lines of the output: what was counted, and what was lost. `filters`: the user's filters."""
    calls, lost = summary["calls"], summary["lost"]
    late = [library for library in summary["libraries"] if "late" in library]
    processes = table.count(summary["processes"], "process")
    if calls:
        said = f"counted {table.count(calls, 'call')} of {processes}"
    elif summary["abandoned"]:
        said = "counted nothing"
    elif summary["processes"]:
        said = f"counted nothing: no call of {processes} matched"
    else:
        said = f"counted nothing: {f'no call matched {filters}' if filters else 'no calls seen'}"
    if summary["abandoned"]:
        said += f"; {table.count(summary['abandoned'], 'call')} did not return"
    yield said + ("; none lost" if calls and not lost and not late else "")
    for library in late:
        pid, comm = library["late"]["pid"], library["late"]["comm"]
        who = table.process(comm, pid) if comm else f"process {pid}"
        yield from table.wrap(
            f"not counted: the first milliseconds of calls to {library['path']} by {who}, before it had probes"
        )
    by = summary["lost_by"]
    if by["records"]:
        yield from table.wrap(
            f"lost: the records of {table.count(by['records'], 'call')}, because the ring was full"
        )
    if by["sums"] or by["calls"]:
        yield from table.wrap(
            f"lost: {table.count(by['sums'] + by['calls'], 'call')}, because a map was full"
        )
    for key, noun, what in (
        ("lost_why", "period", "off the CPU or with page faults"),
        ("lost_names", "name", "of kernels, because the ring was full"),
        ("lost_processes", "process", "of COMMAND or -p, because the map of traced processes was full"),
    ):
        if count := summary[key]:
            yield from table.wrap(f"lost: {table.count(count, noun)} {what}", 0)
    if missed := summary["missed"]:
        runs = ", ".join(f"{table.count(count, 'run')} of {name}" for name, count in missed.items())
        yield from table.wrap(
            f"lost: runs that the kernel skipped, because the CPU was already in an eBPF program: {runs}", 0
        )

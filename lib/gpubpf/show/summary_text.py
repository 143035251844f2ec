"""The last lines of every report: what was counted, what was not and why, what was lost, and the overhead."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from gpubpf.show import table
from gpubpf.show.remedies import remedy

# How launches without a probe are timed, by method.
WITHOUT_PROBE = {"stamp": "timing events", "cupti": "CUPTI"}
MOST_BUDGET_LINES = 10
WITHOUT_ESTIMATES = (
    "barrierlate",
    "gpuhang",
    "nansnoop",
    "warpdiv",
)  # tools that do not extrapolate from a sample
LOST = "{} (a map was full, an update timed out, a kernel failed, or a program ended early)"


def summary_lines(summary: Mapping[str, Any], lost: str = LOST) -> list[str]:
    """Return the last lines of a report from the fields of the `summary` record. lost: text about losses; ``{}`` is their number."""
    lines = _coverage_lines(summary)
    if sampling := summary.get("sampling"):
        chosen = f"sampled: 1 in {sampling['one_in']:,} {sampling['unit']}s"
        if summary.get("tool") in WITHOUT_ESTIMATES:
            chosen += ", and all numbers are those of these"
        lines.append(f"{chosen}; --seed {sampling['seed']} makes the same choice")
    if grids := summary.get("launches_by_kernels"):
        lines.append(f"launched by kernels: {table.count(grids, 'grid')}, not measured")
    if unknown := summary.get("launches_unknown"):
        lines.append(f"unknown kernels: {table.count(unknown, 'launch')} of kernels loaded before attaching")
    if unprobed := summary.get("not_probed"):
        opcodes = (f"{opcode} ({table.count(n, 'instruction')})" for opcode, n in unprobed.items())
        lines.append(f"not probed: {', '.join(opcodes)}")
    if summary["lost"]:
        lines.append(f"lost: {lost.format(format(summary['lost'], ','))}")
    if graphs := summary.get("graphs_before"):
        launches = table.count(graphs, "launch")
        lines.append(
            f"graphs created before attaching: {launches}; their kernels are unknown and not counted"
        )
    if processes := summary.get("processes"):
        measured = f"processes measured: {processes['measured']:,}"
        if programs := processes.get("programs"):
            measured += f", which executed {programs:,} programs"
        missed = "; missed: " + ", ".join(_reasons(processes["missed"]).values())
        lines.append(measured + (missed if processes["missed"] else ""))
        if unmeasured := sum(processes.get("unmeasured_ns", {}).values()):
            most = table.duration(unmeasured)
            lines.append(f"  at most {most} of their time was not measured; its launches are unknown")
    if "overhead" in summary:
        lines.append(_overhead_line(summary["overhead"]))
    if "budget" in summary:
        lines += _budget_lines(summary["budget"])
    return [part for line in lines for part in table.wrap(line.lstrip(), len(line) - len(line.lstrip()))]


def host_program_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each eBPF program in the Linux kernel: how often it ran, and how long a run took."""
    said = (
        f"host program {name}: {table.count(cost['runs'], 'run')} in the Linux kernel, {table.duration(cost['mean_ns'])} each"
        for name, cost in summary.get("host_programs", {}).items()
    )
    return [line for sentence in said for line in table.wrap(sentence)]


def _coverage_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return how many launches were counted. `launches_timed`, by method: launches without a probe may count as well."""
    seen, matched, instrumented = (
        summary[f"launches_{what}"] for what in ("seen", "matched", "instrumented")
    )
    if not seen:
        return ["counted nothing"]  # a notice of the session has the reason
    if not matched:
        return [f"counted nothing of {table.count(seen, 'launch')}"]
    timed = summary.get("launches_timed", {})
    events = {what: timed[method] for method, what in WITHOUT_PROBE.items() if method in timed}
    by_others = summary.get("launches_by_others", 0)
    unread = summary.get("launches_unread", 0)
    counted = sum(timed.values()) if events else max(instrumented - by_others - unread, 0)
    least = "at least " if unread else ""
    lines = [f"counted {least}{counted:,} of {matched:,} matching launches ({seen:,} in total)"]
    reasons = _reasons(summary["not_instrumented"])
    without_probe = reasons.keys() - {"sampled out", "filtered"} if events else ()
    lines += [f"  no probe: {text}" for reason, text in reasons.items() if reason in without_probe]
    lines += [f"  of these, {what} timed {number:,}" for what, number in events.items()]
    for reason, text in reasons.items():
        if reason not in without_probe:
            lines += table.wrap(f"not counted: {text}", 2)
    if unread:
        lines.append(f"  not counted: up to {unread:,} (the program ended before its counts were read)")
    if by_others:
        lines.append(f"  not counted: {by_others:,} (by threads that -t, --comm or --cgroup leaves out)")
    return lines


def _reasons(counts: Mapping[str, int]) -> dict[str, str]:
    """Return a text such as ``4 (capture)`` by reason, the most frequent first. It ends with a remedy if the remedy is certain."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return {
        reason: f"{number:,} ({'; '.join(filter(None, (reason, remedy(reason))))})"
        for reason, number in ordered
    }


def _budget_lines(budget: Mapping[str, Any]) -> list[str]:
    """Return which launches --budget measured of each kernel, and whether the budget was kept.

    Kernels over the budget come first, then those with the most launches."""
    percent, kernels = budget["percent"], budget["kernels"]
    over = sum(kernel["held"] is False for kernel in kernels)
    held = f"not held for {table.count(over, 'kernel')}" if over else "held"
    if any(kernel["held"] is None for kernel in kernels):
        held = f"{held}; unknown for some" if over else "unknown"
    lines = [f"budget of {percent:g} %: {held if kernels else 'no launch was measured'}"]
    ordered = sorted(kernels, key=lambda kernel: (kernel["held"] is not False, -kernel["launches"]))
    alike = Counter(kernel["kernel"] for kernel in {kernel["mangled"]: kernel for kernel in kernels}.values())
    for kernel in ordered[:MOST_BUDGET_LINES]:
        launches = f"measured {kernel['measured']:,} of {table.count(kernel['launches'], 'launch')}"
        label = table.printable(kernel["kernel" if alike[kernel["kernel"]] == 1 else "demangled"])
        lines.append(f"  {label} (pid {kernel['pid']}): {launches}{_spent(kernel, percent)}")
    if len(ordered) > MOST_BUDGET_LINES:
        lines.append(f"  {table.count(len(ordered) - MOST_BUDGET_LINES, 'more kernel')}: see --json")
    return lines


def _spent(kernel: Mapping[str, Any], percent: float) -> str:
    """Return how the launches of a kernel were chosen, their cost, and why the cost exceeds the budget, if it does."""
    cost, host = kernel["launch_percent"], kernel["host_percent"] or 0.0
    if cost is None:
        return "; what they cost is unknown, because their counts were not read"
    without_rate = "only the first" if kernel["measured"] == 1 else "none at the end"
    rate = f"1 in {kernel['one_in']:,}" if kernel["one_in"] else without_rate
    more = f"{_percent(kernel['overhead_percent'])} more instructions"
    parts = [f" ({rate}; each adds about {_percent(cost)}): {more}"]
    if host:
        parts.append(f" and {host:,.2g} % of the time in hooks and readings")
    if kernel["held"] is False and host >= percent:
        parts.append(", which no choice of launches reduces")
    elif kernel["held"] is False:
        enough = math.ceil(cost * kernel["measured"] / (percent - host))
        parts.append(f"; about {table.count(enough, 'launch')} would hold the budget")
    return "".join(parts)


def _percent(value: float) -> str:
    """Return a percentage with three digits; a large one with all digits of its integer part."""
    return f"{value:,.0f} %" if value >= 100 else f"{value:.3g} %"


def _overhead_line(overhead: Mapping[str, Any]) -> str:
    parts = []
    if overhead["hooks"] is None:
        parts.append("no time on the virtual clock")
    elif not overhead["hooks"]:
        parts.append("no hooked calls")
    else:  # an estimate: the agent times one call in 64
        took = overhead["hooks_ns"]
        calls = f"about {table.count(overhead['hooks'], 'hooked call')}"
        parts.append(calls if took is None else f"{calls}, {table.duration(took)}")
    registers = overhead["registers"]
    if registers is not None:
        most = f"up to {table.count(registers, 'extra register')}" if registers > 0 else "no extra registers"
        parts.append(f"{most} per kernel")
    if spilled := overhead.get("spilled_bytes"):
        parts.append(f"up to {table.size(spilled)} per thread spilled")
    if overhead["drained_bytes"]:
        parts.append(f"{table.size(overhead['drained_bytes'])} read")
    if overhead["stood_ns"]:
        parts.append(f"threads stopped for {table.duration(overhead['stood_ns'])}")
    return f"overhead: {'; '.join(parts)}"

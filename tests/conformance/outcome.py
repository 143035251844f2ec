"""What one program of a suite showed, and the table of all of them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

SAME, REFUSED, DIFFERENT = "same", "refused", "different"


@dataclass(frozen=True)
class Outcome:
    """One program in one way, such as a lowering or a tool.

    verdict: SAME: it gave what was expected. REFUSED: it has no result to compare, for a known reason. DIFFERENT: all else.
    reason: why it was refused, in words that programs with the same cause share; or what was different.
    seconds: how long it took. launches, instrumented: how many launches a tool matched, and instrumented. None where unknown.
    """

    program: str
    way: str
    verdict: str
    reason: str = ""
    seconds: float | None = None
    launches: int | None = None
    instrumented: int | None = None

    @property
    def file(self) -> str:
        """The program's name, without the kernel of an outcome that is about a single kernel (`FILE: KERNEL`)."""
        return self.program.partition(": ")[0]


def table(outcomes: Iterable[Outcome]) -> str:
    """Return the counts for each way, then the reasons of refusals with their counts, then each difference."""
    outcomes = list(outcomes)
    lines = [f"{'WAY':16} {'RUN':>6} {'SAME':>6} {'REFUSED':>8} {'DIFFERENT':>10}"]
    for way in dict.fromkeys(o.way for o in outcomes):
        counts = Counter(o.verdict for o in outcomes if o.way == way)
        run = counts[SAME] + counts[DIFFERENT]
        lines.append(f"{way:16} {run:6} {counts[SAME]:6} {counts[REFUSED]:8} {counts[DIFFERENT]:10}")
    lines += [*_launches(outcomes), *_times(outcomes)]
    refused = Counter((o.way, o.reason) for o in outcomes if o.verdict == REFUSED)
    if refused:
        lines += ["", "refused:"]
        lines += [f"  {count:4}  {way}: {reason}" for (way, reason), count in refused.most_common()]
    different = [o for o in outcomes if o.verdict == DIFFERENT]
    if different:
        lines += ["", "different:"]
        lines += [f"  {o.program}, {o.way}: {o.reason}" for o in different]
    return "\n".join(lines)


def _launches(outcomes: list[Outcome]) -> list[str]:
    """Return a line for each way that counts launches."""
    lines = []
    for way in dict.fromkeys(o.way for o in outcomes if o.launches is not None):
        found = [o for o in outcomes if o.way == way and o.launches is not None]
        launches = sum(o.launches or 0 for o in found)
        if all(o.instrumented is None for o in found):
            lines.append(f"{way}: {launches:,} launches counted")
            continue
        instrumented = sum(o.instrumented or 0 for o in found)
        share = f"{100 * instrumented / launches:.1f} %" if launches else "none"
        lines.append(f"{way}: {instrumented:,} of {launches:,} launches instrumented ({share})")
    return ["", *lines] if lines else []


def _times(outcomes: list[Outcome]) -> list[str]:
    """Return a line for each way but `plain`: how many times longer programs took than alone. Most of it is the tool's start."""
    alone = {o.program: o.seconds for o in outcomes if o.way == "plain" and o.seconds}
    lines = []
    for way in dict.fromkeys(o.way for o in outcomes if o.way != "plain"):
        times = [
            (o.seconds / alone[o.program], o.program)
            for o in outcomes
            if o.way == way and o.verdict == SAME and o.seconds and o.program in alone
        ]
        if times:
            most, slowest = max(times)
            median = statistics.median(ratio for ratio, _ in times)
            lines.append(
                f"{way}: {median:.1f} times as long as alone (median), at most {most:.0f} ({slowest})"
            )
    return ["", *lines] if lines else []

"""What one program of a suite showed, and the table of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

SAME, REFUSED, DIFFERENT = "same", "refused", "different"


@dataclass(frozen=True)
class Outcome:
    """One program in one way, such as a lowering or a tool.

    verdict: SAME: it gave what was expected. REFUSED: gpubpf or the device said beforehand that it cannot run it. DIFFERENT: all else.
    reason: why it was refused, in words that programs with the same cause share; or what was different.
    """

    program: str
    way: str
    verdict: str
    reason: str = ""


def table(outcomes: Iterable[Outcome]) -> str:
    """Return the counts for each way, then the reasons of refusals with their counts, then each difference."""
    outcomes = list(outcomes)
    lines = [f"{'WAY':16} {'RUN':>6} {'SAME':>6} {'REFUSED':>8} {'DIFFERENT':>10}"]
    for way in dict.fromkeys(o.way for o in outcomes):
        counts = Counter(o.verdict for o in outcomes if o.way == way)
        run = counts[SAME] + counts[DIFFERENT]
        lines.append(f"{way:16} {run:6} {counts[SAME]:6} {counts[REFUSED]:8} {counts[DIFFERENT]:10}")
    refused = Counter((o.way, o.reason) for o in outcomes if o.verdict == REFUSED)
    if refused:
        lines += ["", "refused:"]
        lines += [f"  {count:4}  {way}: {reason}" for (way, reason), count in refused.most_common()]
    different = [o for o in outcomes if o.verdict == DIFFERENT]
    if different:
        lines += ["", "different:"]
        lines += [f"  {o.program}, {o.way}: {o.reason}" for o in different]
    return "\n".join(lines)

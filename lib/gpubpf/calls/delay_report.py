"""--why: what delayed threads in calls and between launches, as records and text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf.calls import delay_text, delays, statistics_text
from gpubpf.calls.arrays import GAP
from gpubpf.calls.call_fields import WHY
from gpubpf.calls.statistics import CallStatistics

if TYPE_CHECKING:
    from gpubpf.calls.api import Api

MOST_THREADS = 8  # maximum threads that the text names
_NOT_FUNCTIONS = {GAP: "between launches", delays.PROCESS: "the process"}  # keys of `delays.by_function`


class DelayReport:
    """Formats delays for --why. `comm` returns the name of a process."""

    def __init__(self, api: Api, comm: Callable[[int], str]) -> None:
        self._api, self._comm = api, comm

    def record(self, row: Any) -> dict[str, Any]:
        """Return the record "why" of a row of `DelayProbes.delays`."""
        pid, tid, function = int(row["tgid"]), int(row["tid"]), int(row["function"])
        whose = {"pid": pid, "comm": self._comm(pid)} | ({"tid": tid} if tid else {})
        api = None if function == GAP else self._api.functions[function].name
        reason = delay_text.reason_fields(int(row["reason"]), int(row["syscall"]), row)
        return WHY.record(**whose, api=api, **reason)

    def lines(
        self,
        rows: Any,
        between: Any,
        by_function: Sequence[CallStatistics],
        by_kernel: Sequence[CallStatistics],
    ) -> Iterator[str]:
        """Yield the causes in functions and gaps, largest first, then what delayed each thread between its
        launches.

        `rows`, `between`: the two arrays of `DelayProbes.delays`. `by_function`, `by_kernel`: the statistics
        of the same period.
        """
        total_ns: dict[int, int] = {}
        for row in by_function:
            total_ns[row.number] = total_ns.get(row.number, 0) + row.times.ns
        total_ns[GAP] = sum(row.gaps.ns for row in by_kernel)
        groups = []
        for number, own in delays.by_function(rows).items():
            name = _NOT_FUNCTIONS.get(number) or self._api.functions[number].name
            groups.append((name, total_ns.get(number, 0), delays.causes(own)))
        groups.sort(key=lambda group: -sum(cause.ns for cause in group[2]))
        threads = sorted(self._threads(between), key=lambda thread: -sum(cause.ns for cause in thread[1]))
        yield from delay_text.why_lines(groups[: statistics_text.MOST_ROWS], threads[:MOST_THREADS])

    def _threads(self, between: Any) -> Iterator[tuple[str, list[delays.Cause]]]:
        """Yield each thread with the causes of delays between its launches, without those in launches
        themselves.
        """
        import numpy as np

        launches = [
            number for number, function in enumerate(self._api.functions) if function.group == "launch"
        ]
        between = between[(between["tid"] != 0) & ~np.isin(between["function"], launches)]
        for pid, tid in sorted(set(zip(between["tgid"].tolist(), between["tid"].tolist(), strict=True))):
            own = between[(between["tgid"] == pid) & (between["tid"] == tid)]
            yield f"thread {tid} of {self._comm(pid)}", delays.causes(own, self._function_name)

    def _function_name(self, number: int) -> str:
        """Return the function's name, or "" for GAP, when the thread was in no call."""
        return "" if number == GAP else self._api.functions[number].name

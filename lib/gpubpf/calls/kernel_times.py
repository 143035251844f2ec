"""The times of kernels on an AMD GPU, joined with the calls that launched them.

An agent in the program reports kernel dispatches (device_times/). It records when a thread put a dispatch into
a queue (`enqueued_ns`), inside the runtime's function and on the clock of the calls. A thread is in one call at
a time, so the call of the same thread around that time launched the dispatch. There are two exceptions. If the
work-group sizes differ, the call is unknown: another thread's dispatch went into a shared queue, or a thread of
the runtime enqueued it later. If a thread has ended and was in another PID namespace than the tool, its number
is unknown. Then the call counts only if no other thread of the process was in a call.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from gpubpf import names
from gpubpf.calls import arrays, call_fields
from gpubpf.calls.device_times.dispatches import DISPATCH, Dispatches
from gpubpf.calls.selection import KernelSelection
from gpubpf.calls.statistics import CallStatistics, Durations
from gpubpf.process import users
from gpubpf.record import Record

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpubpf.calls.api import Api
    from gpubpf.calls.snoop_options import SnoopOptions

    Array: TypeAlias = NDArray[Any]

# Groups of functions that may run kernels, including copies and fills.
LAUNCHING = ("launch", "graph", "copy", "memory")
MOST_CALLS = 1 << 19  # maximum calls to keep, because their kernels may not have ended
CHUNK = 1 << 13  # calls to search together
MOST_WAITING = 1 << 16  # maximum dispatches to keep whose call may not have returned
PATIENCE = 100  # how often to search for the call of a waiting dispatch
MOST_KERNELS = 1 << 14  # maximum kernels with separate times between two reports
MOST_THREADS = 256  # calls to search backwards for one that was in progress
CALL = np.dtype(
    [
        *(("start_ns", "<u8"), ("end_ns", "<u8"), ("stream", "<u8"), ("tgid", "<u4"), ("tid", "<u4"), ("function", "<u4")),
        *(("block", "<u4", 3), ("streamed", "?")),
    ]
)  # fmt: skip


class JoinedDispatches(Record):
    """Dispatches, the call of each, and whether the call is known. All arrays have the shape (dispatches,)."""

    dispatches: Array
    calls: Array
    known: NDArray[np.bool_]


class CallChunk(NamedTuple):
    """Calls, with their first start and last end in ns."""

    calls: Array
    first: int
    last: int


class DispatchJoiner:
    """Find the call of each dispatch. Pass events to `calls` as they are read, then dispatches to
    `dispatches`.
    """

    def __init__(self, api: Api, processes: Dispatches) -> None:
        self._api, self._processes = api, processes
        self._chunks: deque[CallChunk] = deque()
        self._waiting = np.empty(0, DISPATCH)
        self._searches = np.empty(0, np.int64)  # how often the call of each waiting dispatch was searched for

    def calls(self, events: Array) -> None:
        """Keep the calls in `events`, from `CallProbes.events`."""
        made = np.concatenate(
            [
                np.empty(0, CALL),
                *(
                    self._of(number, events[events["function"] == number])
                    for number in np.unique(events["function"]).tolist()
                ),
            ]
        )
        if not len(made):
            return
        if self._chunks and len(self._chunks[-1].calls) < CHUNK:
            made = np.concatenate([self._chunks.pop().calls, made])
        self._chunks.append(CallChunk(made, int(made["start_ns"].min()), int(made["end_ns"].max())))
        while sum(len(chunk.calls) for chunk in self._chunks) > MOST_CALLS and len(self._chunks) > 1:
            self._chunks.popleft()

    def _of(self, number: int, events: Array) -> Array:
        function = self._api.functions[number]
        if function.group not in LAUNCHING:
            return np.empty(0, CALL)
        made = np.zeros(len(events), CALL)
        for name in ("start_ns", "end_ns", "tgid", "tid", "function"):
            made[name] = events[name]
        if (stream := arrays.values(function, events, "stream")) is not None:
            made["stream"], made["streamed"] = stream, True
        if (block := arrays.shapes(function, events, "block")) is not None:
            made["block"] = block
        return made

    def dispatches(self, new: Array, last: bool = False) -> JoinedDispatches:
        """Return the dispatches whose call is known, or will never be known, in order of their start.

        last: no further calls will come.
        """
        all_ = np.concatenate([self._waiting, new])
        searches = np.concatenate([self._searches + 1, np.zeros(len(new), np.int64)])
        pids = np.array([process.pid for process in self._processes.processes] or [0], "<u4")[all_["process"]]
        calls, found = self._around(all_, pids)
        known = found & (np.all(calls["block"] == all_["block"], axis=1) | ~calls["block"].any(axis=1))
        done = found | (searches >= PATIENCE) | (all_["enqueued_ns"] == 0) | last
        done[: max(0, len(all_) - MOST_WAITING)] = True
        self._waiting, self._searches = all_[~done], searches[~done]
        order = np.flatnonzero(done)
        order = order[np.argsort(all_["start_ns"][order], kind="stable")]
        return JoinedDispatches(all_[order], calls[order], known[order])

    def _around(self, dispatches: Array, pids: Array) -> tuple[Array, NDArray[np.bool_]]:
        """Return the call around the time of each dispatch, and whether there is one."""
        calls, found = np.zeros(len(dispatches), CALL), np.zeros(len(dispatches), bool)
        times, numbered = dispatches["enqueued_ns"], dispatches["tid"] != 0
        for chunk in self._chunks:
            mine = np.flatnonzero(numbered & ~found & (times >= chunk.first) & (times <= chunk.last))
            if len(mine):
                place = _around(chunk.calls, dispatches[mine], pids[mine])
                calls[mine[place >= 0]] = chunk.calls[place[place >= 0]]
                found[mine[place >= 0]] = True
        for pid in np.unique(pids[~numbered]).tolist():
            mine = np.flatnonzero(~numbered & (pids == pid))
            first, last = times[mine].min(), times[mine].max()
            overlapping = [c.calls for c in self._chunks if c.first <= last and c.last >= first]
            if overlapping:
                candidates = np.concatenate(overlapping)
                place = _only_call(candidates, pid, times[mine])
                calls[mine[place >= 0]] = candidates[place[place >= 0]]
                found[mine[place >= 0]] = True
        return calls, found

    def records(self, joined: JoinedDispatches) -> Iterator[dict[str, Any]]:
        """Yield the records "dispatch", also for timeline.py. Without a known call, the fields of the call are
        absent.
        """
        for dispatch, call, known in zip(joined.dispatches, joined.calls, joined.known, strict=True):
            name = self.kernel(int(dispatch["process"]), int(dispatch["kernel"]))
            process = self._processes.processes[int(dispatch["process"])]
            start, end = int(dispatch["start_ns"]), int(dispatch["end_ns"])
            grid, block = dispatch["grid"].tolist(), dispatch["block"].tolist()
            called: dict[str, Any] = {}
            if known:
                call_ns = int(call["start_ns"])
                called = {"tid": int(call["tid"]), "api": self._api.functions[int(call["function"])].name}
                called |= {"call_ns": call_ns, "latency_ns": start - call_ns}
                if call["streamed"]:
                    called["stream"] = f"{int(call['stream']):#x}"
            yield call_fields.DISPATCH.record(
                pid=process.pid,
                comm=process.comm,
                gpu=int(dispatch["gpu"]),
                queue=f"{int(dispatch['queue']):#x}",
                kernel=name if isinstance(name, str) else name.short,
                ts_ns=start,
                exec_ns=end - start,
                grid=[-(-size // max(1, of)) for size, of in zip(grid, block, strict=True)],
                block_dim=block,
                shared_bytes=int(dispatch["shared"]),
                **called,
            )

    def kernel(self, process: int, kernel: int) -> names.KernelName | str:
        """Return the name of a kernel, or "kernel N" if none was reported."""
        mangled = self._processes.processes[process].names.get(kernel)
        return names.demangle(mangled) if mangled else f"kernel {kernel}"


def _around(calls: Array, dispatches: Array, pids: Array) -> NDArray[np.int64]:
    """Return the index of the call of the same thread around each dispatch's `enqueued_ns`; -1 for none."""
    count = len(calls)
    threads = np.concatenate(
        [
            calls["tgid"].astype("u8") << np.uint64(32) | calls["tid"],
            pids.astype("u8") << np.uint64(32) | dispatches["tid"],
        ]
    )
    times = np.concatenate([calls["start_ns"], dispatches["enqueued_ns"]])
    # At equal times, a call comes before a dispatch.
    order = np.lexsort((np.arange(len(times)) >= count, times, threads))
    before = np.maximum.accumulate(np.where(order < count, np.arange(len(order)), -1))
    found = np.full(len(dispatches), -1, np.int64)
    ours = np.flatnonzero((order >= count) & (before >= 0))
    call, dispatch = order[before[ours]], order[ours] - count
    around = (threads[call] == threads[count + dispatch]) & (
        calls["end_ns"][call] >= dispatches["enqueued_ns"][dispatch]
    )
    found[dispatch[around]] = call[around]
    return found


def _only_call(calls: Array, pid: int, times: Array) -> NDArray[np.int64]:
    """Return the index of the only call of a process around each time; -1 if there are several or none.

    This is for threads whose number in the tool's PID namespace is unknown.
    """
    mine = np.flatnonzero(calls["tgid"] == pid)
    mine = mine[np.argsort(calls["start_ns"][mine], kind="stable")]
    begun = np.searchsorted(calls["start_ns"][mine], times, "right")
    over = np.searchsorted(np.sort(calls["end_ns"][mine]), times, "left")
    found = np.full(len(times), -1, np.int64)
    for at in np.flatnonzero(begun - over == 1).tolist():
        for call in mine[max(0, begun[at] - MOST_THREADS) : begun[at]][::-1]:
            if calls["end_ns"][call] >= times[at]:
                found[at] = call
                break
    return found


class KernelTimes:
    """The dispatches of a command.

        times = KernelTimes(api, command, os.environ, uid, wanted, filtered)
        …                               # start the command with times.environment
        times.take(events)              # records "dispatch"
        times.runs()                    # how long kernels ran, since the last call
        times.take(events, last=True)
        times.summary()
        times.close()

    uid: the command's user.
    wanted: returns whether the user asked for a kernel.
    filtered: only some calls are recorded, so count only dispatches whose call is known.
    simulated: the command runs on hipsim.
    """

    def __init__(
        self,
        api: Api,
        command: Sequence[str],
        environment: Mapping[str, str],
        uid: int,
        wanted: Callable[[names.KernelName | str], bool] = lambda name: True,
        filtered: bool = False,
        simulated: bool = False,
    ) -> None:
        self._processes = Dispatches(command, environment, uid, simulated)
        self._joiner = DispatchJoiner(api, self._processes)
        self._wanted, self._filtered, self._simulated = wanted, filtered, simulated
        self._runs: dict[tuple[int, str], Durations] = {}
        self._count = 0
        self._unknown: int | None = None  # dispatches without a known call; None: `take` got no calls

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables to add to the command's environment; none if times cannot be measured."""
        return self._processes.environment

    @property
    def reason(self) -> str | None:
        """Why there are no times, or None if there are."""
        return self._processes.reason

    @property
    def needs_calls(self) -> bool:
        """Whether `take` needs all events, because they select the dispatches."""
        return self._filtered and bool(self.environment)

    def take(
        self, events: Array | None = None, last: bool = False, ended_ns: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the records of dispatches that have ended, with their calls.

        A dispatch whose call may still come is held back until the call comes, or until `last`.

        events: new events from `CallProbes.events`. None: return no records, and only add the dispatches to `runs`.
        ended_ns: when the measurement ended (CLOCK_BOOTTIME); later dispatches are left out.
        """
        new = self._processes.take(last)
        if ended_ns is not None:
            new = new[np.where(new["enqueued_ns"], new["enqueued_ns"], new["start_ns"]) <= ended_ns]
        if events is None or not self.environment:
            self._add(new)
            return []
        self._joiner.calls(events)
        joined = self._joiner.dispatches(new, last)
        chosen = joined.known | (not self._filtered)
        kernels = np.stack(
            [joined.dispatches["process"].astype("i8"), joined.dispatches["kernel"].astype("i8")], axis=1
        )
        for process, kernel in np.unique(kernels, axis=0).tolist():
            if not self._wanted(self._joiner.kernel(process, kernel)):
                chosen &= ~(kernels == (process, kernel)).all(axis=1)
        joined = JoinedDispatches(joined.dispatches[chosen], joined.calls[chosen], joined.known[chosen])
        self._unknown = (self._unknown or 0) + int(np.count_nonzero(~joined.known))
        self._add(joined.dispatches)
        return list(self._joiner.records(joined))

    def _add(self, dispatches: Array) -> None:
        edges = np.append(arrays.bounds()[:-1], np.inf)
        kernels = np.stack([dispatches["process"].astype("i8"), dispatches["kernel"].astype("i8")], axis=1)
        for process, kernel in np.unique(kernels, axis=0).tolist():
            name = self._joiner.kernel(process, kernel)
            if not self._wanted(name):
                continue
            mine = dispatches[(kernels == (process, kernel)).all(axis=1)]
            lengths = (mine["end_ns"] - mine["start_ns"]).astype("i8")
            key = self._processes.processes[process].pid, name if isinstance(name, str) else name.mangled
            if key not in self._runs and len(self._runs) >= MOST_KERNELS:
                key = 0, "[other kernels]"
            times = self._runs.setdefault(key, Durations())
            times.count += len(lengths)
            times.ns += int(lengths.sum())
            times.largest_ns = max(times.largest_ns, int(lengths.max()))
            times.buckets = times.buckets + np.histogram(lengths, edges)[0]
            self._count += len(lengths)

    def runs(self) -> dict[tuple[int, str], Durations]:
        """Return the durations of kernels that ended since the last call, by process and mangled name."""
        runs, self._runs = self._runs, {}
        return runs

    def summary(self) -> dict[str, Any]:
        """Return the fields of the summary record: the numbers of dispatches, and of those with something unknown."""
        processes = self._processes
        if not processes.processes:
            return {"device_times": None, "no_device_times": self.reason}
        return {
            "device_times": {
                "source": processes.source, "device": "sim" if self._simulated else "gpu",
                "dispatches": self._count, "lost": processes.lost, "unended": processes.unended,
                "without_call": self._unknown, "without_name": processes.names_lost, "unread": processes.unread,
            }
        }  # fmt: skip

    def close(self) -> None:
        """Stop reading. Kernels that still run are not reported."""
        self._processes.close()


def kernel_times_of_command(
    api: Api, options: SnoopOptions, simulated: Mapping[str, str] | None = None
) -> KernelTimes:
    """Return the `KernelTimes` for a command line. Without COMMAND, there are no times.

    simulated: the variables with which it runs on hipsim; None or empty: it does not.
    """
    targets = options.shared.targets
    user = users.command_user(targets.user) if targets.command else None
    return KernelTimes(
        api,
        targets.command or (),
        {**os.environ, **(simulated or {})},
        user.uid if user else os.geteuid(),
        KernelSelection(options.shared.kernels.wanted).includes,
        bool(options.filters) or options.selects_launches,
        bool(simulated),
    )


def with_gpu_times(
    rows: list[CallStatistics], runs: Mapping[tuple[int, str], Durations], comm: Callable[[int], str]
) -> list[CallStatistics]:
    """Add to the rows of `statistics.by_kernel` how long each kernel ran.

    Kernels without a known launch, such as those of graphs and the runtime's own, are appended as separate rows.
    """
    rest = dict(runs)
    for row in rows:
        if (times := rest.pop((row.pid, row.kernel.mangled if row.kernel else row.name), None)) is not None:
            row.runs = times
    for (pid, mangled), times in rest.items():
        name = names.demangle(mangled)
        rows.append(CallStatistics(pid, comm(pid), name.short, name, runs=times))
    return rows

"""Which call gave each dispatch to the GPU; records of both.

The agent notes when the launching thread gave a dispatch to a queue (`enqueued_ns`), in that thread, inside the runtime's function, on
the clock that calls are timed by. A thread is in one call at a time, so the call of that thread around that time is the one. It is not
said to be where the sizes of the work-group are others: that of another thread was given to a queue that both use, or the runtime gave
it later from a thread of its own. In another PID namespace than the tool's, where a thread that has ended cannot be told from others,
it is the one if no other thread of the process was in a call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from gpubpf import names
from gpubpf.calls import arrays
from gpubpf.calls.rocprofiler.dispatches import DISPATCH, Dispatches
from gpubpf.calls.sums import Row, Times

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpubpf.calls.api import Api

    Array: TypeAlias = NDArray[Any]

LAUNCHING = ("launch", "graph", "copy", "memory")  # groups of functions: copies and fills may be kernels
MOST_CALLS = 1 << 19  # that are remembered, as their kernels may not have ended
CHUNK = 1 << 13  # of them, that are looked through together
MOST_WAITING = 1 << 16  # dispatches whose call may still go on
PATIENCE = 100  # how often such a one is looked for
MOST_KERNELS = 1 << 14  # that are told apart between two reports
MOST_THREADS = 256  # that make calls while one goes on
CALL = np.dtype(
    [
        *(("start_ns", "<u8"), ("end_ns", "<u8"), ("stream", "<u8"), ("tgid", "<u4"), ("tid", "<u4"), ("function", "<u4")),
        *(("block", "<u4", 3), ("streamed", "?")),
    ]
)  # fmt: skip


@dataclass(frozen=True)
class Joined:
    """Dispatches, the call of each, and whether it is known; shapes (dispatches,)."""

    dispatches: Array
    calls: Array
    known: NDArray[np.bool_]


class Chunk(NamedTuple):
    """Calls, and from when to when they went."""

    calls: Array
    first: int
    last: int


class Launched:
    """Joins what comes: `calls` with records of calls as they are read, then `dispatches`."""

    def __init__(self, api: Api, processes: Dispatches) -> None:
        self._api, self._processes = api, processes
        self._chunks: deque[Chunk] = deque()
        self._waiting = np.empty(0, DISPATCH)
        self._looked = np.empty(0, np.int64)  # of each that waits: how often

    def calls(self, events: Array) -> None:
        """`events`: of `Calls.events`."""
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
        self._chunks.append(Chunk(made, int(made["start_ns"].min()), int(made["end_ns"].max())))
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

    def dispatches(self, new: Array, last: bool = False) -> Joined:
        """Those whose call is known, and those of which it will not be any more. `last`: none will be."""
        all_ = np.concatenate([self._waiting, new])
        looked = np.concatenate([self._looked + 1, np.zeros(len(new), np.int64)])
        pids = np.array([process.pid for process in self._processes.processes] or [0], "<u4")[all_["process"]]
        calls, found = self._around(all_, pids)
        known = found & (np.all(calls["block"] == all_["block"], axis=1) | ~calls["block"].any(axis=1))
        done = found | (looked >= PATIENCE) | (all_["enqueued_ns"] == 0) | last
        done[: max(0, len(all_) - MOST_WAITING)] = True
        self._waiting, self._looked = all_[~done], looked[~done]
        return Joined(all_[done], calls[done], known[done])

    def _around(self, dispatches: Array, pids: Array) -> tuple[Array, NDArray[np.bool_]]:
        """The call around the time of each, and whether there is one."""
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
            near = [chunk.calls for chunk in self._chunks if chunk.first <= last and chunk.last >= first]
            if near:
                together = np.concatenate(near)
                place = _alone(together, pid, times[mine])
                calls[mine[place >= 0]] = together[place[place >= 0]]
                found[mine[place >= 0]] = True
        return calls, found

    def records(self, joined: Joined) -> Iterator[dict[str, Any]]:
        """The records "dispatch": what `calls.timeline` takes. Fields of its call are absent where that is not known."""
        for dispatch, call, known in zip(joined.dispatches, joined.calls, joined.known, strict=True):
            name = self.kernel(int(dispatch["process"]), int(dispatch["kernel"]))
            process = self._processes.processes[int(dispatch["process"])]
            start, end = int(dispatch["start_ns"]), int(dispatch["end_ns"])
            grid, block = dispatch["grid"].tolist(), dispatch["block"].tolist()
            record: dict[str, Any] = {
                "type": "dispatch",
                "pid": process.pid,
                "comm": process.comm,
                "gpu": int(dispatch["gpu"]),
                "queue": f"{int(dispatch['queue']):#x}",
                "kernel": name if isinstance(name, str) else name.short,
                "ts_ns": start,
                "exec_ns": end - start,
                "grid": [-(-size // max(1, of)) for size, of in zip(grid, block, strict=True)],
                "block_dim": block,
                "shared_bytes": int(dispatch["shared"]),
            }
            if known:
                record |= {
                    "tid": int(call["tid"]), "api": self._api.functions[int(call["function"])].name,
                    "call_ns": int(call["start_ns"]), "latency_ns": start - int(call["start_ns"]),
                }  # fmt: skip
                if call["streamed"]:
                    record["stream"] = f"{int(call['stream']):#x}"
            yield record

    def kernel(self, process: int, kernel: int) -> names.Name | str:
        """The name of a kernel; a number where rocprofiler-sdk named none."""
        mangled = self._processes.processes[process].names.get(kernel)
        return names.demangle(mangled) if mangled else f"kernel {kernel}"


def _around(calls: Array, dispatches: Array, pids: Array) -> NDArray[np.int64]:
    """The place of the call of the same thread around each dispatch's `enqueued_ns`; -1 for none."""
    count = len(calls)
    threads = np.concatenate(
        [
            calls["tgid"].astype("u8") << np.uint64(32) | calls["tid"],
            pids.astype("u8") << np.uint64(32) | dispatches["tid"],
        ]
    )
    times = np.concatenate([calls["start_ns"], dispatches["enqueued_ns"]])
    order = np.lexsort(
        (np.arange(len(times)) >= count, times, threads)
    )  # a call before what was given when it began
    before = np.maximum.accumulate(np.where(order < count, np.arange(len(order)), -1))
    found = np.full(len(dispatches), -1, np.int64)
    ours = np.flatnonzero((order >= count) & (before >= 0))
    call, dispatch = order[before[ours]], order[ours] - count
    around = (threads[call] == threads[count + dispatch]) & (
        calls["end_ns"][call] >= dispatches["enqueued_ns"][dispatch]
    )
    found[dispatch[around]] = call[around]
    return found


def _alone(calls: Array, pid: int, times: Array) -> NDArray[np.int64]:
    """The place of the only call of a process that was made around each time; -1 where there are others, or none. For threads of which
    it is not known what number the tool has for them."""
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


class DeviceTimes:
    """What a tool shows of dispatches. `wanted`: whether a kernel's name is one that was asked for; `filtered`: calls are told of only
    in part, and so are dispatches: those whose call was.

    times = DeviceTimes(api, command, os.environ, uid, wanted, filtered)
    …                                   # the command is started with times.environment
    times.take(events)                  # records "dispatch"
    times.runs()                        # how long kernels ran, since the last time
    times.take(events, last=True); times.summary(); times.close()
    """

    def __init__(
        self,
        api: Api,
        command: Sequence[str],
        environment: Mapping[str, str],
        uid: int,
        wanted: Callable[[names.Name | str], bool] = lambda name: True,
        filtered: bool = False,
    ) -> None:
        self._processes = Dispatches(command, environment, uid)
        self._launched = Launched(api, self._processes)
        self._wanted, self._filtered = wanted, filtered
        self._runs: dict[tuple[int, str], Times] = {}
        self._count = self._unknown = 0

    @property
    def environment(self) -> Mapping[str, str]:
        """What the command is started with; nothing where there can be no times."""
        return self._processes.environment

    @property
    def reason(self) -> str | None:
        """Why there are no times; None where there are."""
        return self._processes.reason

    @property
    def needs_calls(self) -> bool:
        """Whether `take` needs all calls, as they say which dispatches are meant."""
        return self._filtered and bool(self.environment)

    def take(self, events: Array | None = None, last: bool = False) -> list[dict[str, Any]]:
        """Records of dispatches that have ended, with their calls where `events` (of `Calls.events`) are given; else none are, and the
        dispatches only add to `runs`. One that may have a call in what comes is kept until then, or `last`."""
        new = self._processes.take(last)
        if events is None or not self.environment:
            self._add(new)
            return []
        self._launched.calls(events)
        joined = self._launched.dispatches(new, last)
        chosen = joined.known | (not self._filtered)
        kernels = np.stack(
            [joined.dispatches["process"].astype("i8"), joined.dispatches["kernel"].astype("i8")], axis=1
        )
        for process, kernel in np.unique(kernels, axis=0).tolist():
            if not self._wanted(self._launched.kernel(process, kernel)):
                chosen &= ~(kernels == (process, kernel)).all(axis=1)
        joined = Joined(joined.dispatches[chosen], joined.calls[chosen], joined.known[chosen])
        self._unknown += int(np.count_nonzero(~joined.known))
        self._add(joined.dispatches)
        return list(self._launched.records(joined))

    def _add(self, dispatches: Array) -> None:
        edges = np.append(arrays.bounds()[:-1], np.inf)
        kernels = np.stack([dispatches["process"].astype("i8"), dispatches["kernel"].astype("i8")], axis=1)
        for process, kernel in np.unique(kernels, axis=0).tolist():
            name = self._launched.kernel(process, kernel)
            if not self._wanted(name):
                continue
            mine = dispatches[(kernels == (process, kernel)).all(axis=1)]
            lengths = (mine["end_ns"] - mine["start_ns"]).astype("i8")
            key = self._processes.processes[process].pid, name if isinstance(name, str) else name.mangled
            if key not in self._runs and len(self._runs) >= MOST_KERNELS:
                key = 0, "[other kernels]"
            times = self._runs.setdefault(key, Times())
            times.count += len(lengths)
            times.ns += int(lengths.sum())
            times.largest_ns = max(times.largest_ns, int(lengths.max()))
            times.buckets = times.buckets + np.histogram(lengths, edges)[0]
            self._count += len(lengths)

    def runs(self) -> dict[tuple[int, str], Times]:
        """How long kernels ran, by process and mangled name; those that ended since the last call."""
        runs, self._runs = self._runs, {}
        return runs

    def summary(self) -> dict[str, Any]:
        """Fields of the summary record: how many dispatches, and of how many something is not known."""
        processes = self._processes
        if not processes.processes:
            return {"device_times": None, "no_device_times": self.reason}
        return {
            "device_times": {
                "dispatches": self._count, "lost": processes.lost, "unended": processes.unended,
                "without_call": self._unknown, "without_name": processes.names_lost,
            }
        }  # fmt: skip

    def close(self) -> None:
        """What still runs is not told of any more."""
        self._processes.close()


def with_runs(
    rows: list[Row], runs: Mapping[tuple[int, str], Times], comm: Callable[[int], str]
) -> list[Row]:
    """The rows of `sums.kernels`, with how long each kernel ran, and behind them those of kernels that no launch is known of: of
    graphs, and of the runtime's own."""
    rest = dict(runs)
    for row in rows:
        if (times := rest.pop((row.pid, row.kernel.mangled if row.kernel else row.name), None)) is not None:
            row.runs = times
    for (pid, mangled), times in rest.items():
        name = names.demangle(mangled)
        rows.append(Row(pid, comm(pid), name.short, name, runs=times))
    return rows

"""What threads called and GPUs ran, in order: lines, records, and a trace for ui.perfetto.dev.

Takes calls and dispatches as the records that tools print (man page, FIELDS): of a call `pid`, `comm`, `tid`, `api`, `ts_ns` (when it
began), `lat_ns`, and where they apply `ret`, `kernel`, `stream`, `grid`, `block_dim`, `bytes`, `off_cpu_ns`; of a dispatch `pid`,
`comm`, `gpu`, `queue`, `kernel`, `ts_ns` (when it started), `exec_ns`, and where its call is known `tid`, `api`, `stream`, `call_ns`.
Host calls alone where no times of dispatches are known. All times are of one clock, CLOCK_BOOTTIME.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from gpubpf.show import table

if TYPE_CHECKING:
    from gpubpf.show.perfetto import Trace

Record: TypeAlias = Mapping[str, Any]

_DETAILS = ("ret", "error", "stream", "grid", "block_dim", "shared_bytes", "bytes", "fn_addr", "cgroup_id")
_COMMON = ("pid", "comm", "tid", "gpu", "queue", "stream", "bytes", "call_ns")
_HEADER = f"{'FROM T+us':>12} {'TO T+us':>12} {'FOR us':>9}  "


def operations(calls: Iterable[Record], dispatches: Iterable[Record] = ()) -> Iterator[dict[str, Any]]:
    """The records of `--timeline --json`, by when they began: calls are on the host ("api"), dispatches on the GPU ("kernel")."""
    host = [_operation(call, "api", call["api"], "lat_ns") for call in calls]
    gpu = [_operation(dispatch, "kernel", dispatch["kernel"], "exec_ns") for dispatch in dispatches]
    yield from sorted(host + gpu, key=lambda operation: operation["t_ns"])


def _operation(record: Record, kind: str, name: str, length: str) -> dict[str, Any]:
    operation = {"type": "op", "t_ns": record["ts_ns"], "dur_ns": record[length], "op": kind, "name": name}
    operation["on"] = "host" if kind == "api" else "gpu"
    return operation | {field: record[field] for field in _COMMON if field in record}


def lines(calls: Iterable[Record], dispatches: Iterable[Record] = (), origin: int = 0) -> Iterator[str]:
    """For people: each stream's story, then each thread's. Times in µs since `origin`."""
    lanes: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for dispatch in dispatches:
        lanes[dispatch["pid"], dispatch["comm"], dispatch["gpu"], lane(dispatch)].append(dispatch)
    for (pid, comm, gpu, name), there in lanes.items():
        yield f"{name} of {comm} (pid {pid}), GPU {gpu}"
        yield _HEADER + "KERNEL"
        for one in sorted(there, key=lambda dispatch: dispatch["ts_ns"]):
            yield _line(one["ts_ns"] - origin, one["exec_ns"], one["kernel"])
        yield ""
    threads: dict[tuple[int, str, int], list[Record]] = defaultdict(list)
    for call in calls:
        threads[call["pid"], call["comm"], call["tid"]].append(call)
    for (pid, comm, tid), there in threads.items():
        yield f"thread {tid} of {comm} (pid {pid})"
        yield _HEADER + "CALL"
        for one in sorted(there, key=lambda call: call["ts_ns"]):
            yield _line(one["ts_ns"] - origin, one["lat_ns"], title(one))
        yield ""


def _line(begin: int, length: int, what: str) -> str:
    return f"{begin / 1000:12.2f} {(begin + length) / 1000:12.2f} {length / 1000:9.2f}  {table.fit(what, 43)}"


def title(call: Record) -> str:
    """What a call is shown as: its function, its kernel, its error."""
    return " ".join(str(call[field]) for field in ("api", "kernel", "error") if call.get(field))


def lane(dispatch: Record) -> str:
    """What a dispatch is shown with: its stream where its call is known, else the queue of the device, which streams may share."""
    return f"stream {dispatch['stream']}" if dispatch.get("stream") else f"queue {dispatch['queue']}"


class Tracer:
    """Writes calls and dispatches into a trace: threads, beside each process its GPUs with their streams, arrows between."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._processes: dict[int, int] = {}  # in order of appearance
        self._lanes: dict[tuple[int, str], int] = {}
        self._arrows = 0

    def add(self, calls: Iterable[Record], dispatches: Iterable[Record] = ()) -> None:
        """A dispatch whose call is known comes with it or later."""
        for call in calls:
            pid, tid = call["pid"], call["tid"]
            self._trace.name(pid, f"{call['comm']} (host)", order=self._order(pid))
            self._trace.name(pid, f"{call['comm']} {tid}", tid)
            details = {name: call[name] for name in _DETAILS if name in call}
            if "off_cpu_ns" in call:
                details["off_cpu_us"] = call["off_cpu_ns"] / 1000
            self._trace.slice(pid, tid, title(call), call["ts_ns"], call["lat_ns"], "call", **details)
        for dispatch in dispatches:
            self._dispatch(dispatch)

    def _order(self, pid: int) -> int:
        """Each process's GPUs stand below it."""
        return 64 * self._processes.setdefault(pid, len(self._processes))

    def _dispatch(self, dispatch: Record) -> None:
        pid, gpu, begin, length = dispatch["pid"], dispatch["gpu"], dispatch["ts_ns"], dispatch["exec_ns"]
        device = (gpu + 1 << 22) + pid  # no process of Linux is beyond 2^22
        name = lane(dispatch)
        number = self._lanes.setdefault((device, name), len(self._lanes))
        self._trace.name(
            device, f"{dispatch['comm']} (pid {pid}) on GPU {gpu}", order=self._order(pid) + 1 + gpu
        )
        row, begin = self._trace.place(device, number, begin, begin + length)
        track = number + (row << 32)
        self._trace.name(device, name + (f", beside ({row})" if row else ""), track, number)
        details = {
            field: dispatch[field] for field in ("api", "grid", "block_dim", "queue") if field in dispatch
        }
        if "latency_ns" in dispatch:
            details["latency_us"] = dispatch["latency_ns"] / 1000
        self._trace.slice(device, track, dispatch["kernel"], begin, length, "kernel", **details)
        if "call_ns" in dispatch:
            self._arrows += 1
            self._trace.arrow(
                self._arrows, (pid, dispatch["tid"], dispatch["call_ns"]), (device, track, begin)
            )

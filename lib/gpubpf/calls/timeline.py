"""--timeline and --trace: calls and kernel dispatches in order, as lines, as records, and as a trace for
ui.perfetto.dev.

The inputs are records as the tools print them (man page, FIELDS). A call has `pid`, `comm`, `tid`, `api`, `ts_ns`
(its start), `lat_ns`, and where applicable `ret`, `kernel`, `stream`, `grid`, `block_dim`, `bytes` and
`off_cpu_ns`. A dispatch has `pid`, `comm`, `gpu`, `queue`, `kernel`, `ts_ns` (its start), `exec_ns`, and if its
call is known, `tid`, `api`, `stream` and `call_ns`. Without GPU timestamps, there are only calls. All times are on
CLOCK_BOOTTIME.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from gpubpf.calls.call_fields import OPERATION
from gpubpf.errors import Error
from gpubpf.show import cli, table
from gpubpf.show.perfetto import Trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpubpf.show.parsed import OutputOptions

Record: TypeAlias = Mapping[str, Any]

_DETAILS = ("ret", "error", "stream", "grid", "block_dim", "shared_bytes", "bytes", "fn_addr", "cgroup_id")
_COMMON = tuple(field.name for field in OPERATION.fields[5:])  # of calls and dispatches, too
MOST_PENDING = 500_000  # maximum calls, and maximum dispatches, that --timeline keeps until the next report
_HEADER = f"{'FROM T+us':>12} {'TO T+us':>12} {'FOR us':>9}  "


def operations(calls: Iterable[Record], dispatches: Iterable[Record] = ()) -> Iterator[dict[str, Any]]:
    """Yield the records of `--timeline --json` in order of their start: calls ("api") and dispatches
    ("kernel").
    """
    host = [_operation(call, "api", call["api"], "lat_ns") for call in calls]
    gpu = [_operation(dispatch, "kernel", dispatch["kernel"], "exec_ns") for dispatch in dispatches]
    yield from sorted(host + gpu, key=lambda operation: operation["t_ns"])


def _operation(record: Record, kind: str, name: str, length: str) -> dict[str, Any]:
    about = {name: record[name] for name in _COMMON if name in record}
    on = "host" if kind == "api" else "gpu"
    return OPERATION.record(t_ns=record["ts_ns"], dur_ns=record[length], op=kind, name=name, on=on, **about)


def lines(calls: Iterable[Record], dispatches: Iterable[Record] = (), origin: int = 0) -> Iterator[str]:
    """Yield text: the kernels of each stream, then the calls of each thread. Times are in µs since `origin`."""
    streams: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for dispatch in dispatches:
        streams[dispatch["pid"], dispatch["comm"], dispatch["gpu"], _stream(dispatch)].append(dispatch)
    for (pid, comm, gpu, name), dispatched in streams.items():
        yield f"{name} of {table.process(comm, pid)}, GPU {gpu}"
        yield _HEADER + "KERNEL"
        for one in sorted(dispatched, key=lambda dispatch: dispatch["ts_ns"]):
            yield _line(one["ts_ns"] - origin, one["exec_ns"], one["kernel"])
        yield ""
    threads: dict[tuple[int, str, int], list[Record]] = defaultdict(list)
    for call in calls:
        threads[call["pid"], call["comm"], call["tid"]].append(call)
    for (pid, comm, tid), called in threads.items():
        yield f"thread {tid} of {table.process(comm, pid)}"
        yield _HEADER + "CALL"
        for one in sorted(called, key=lambda call: call["ts_ns"]):
            yield _line(one["ts_ns"] - origin, one["lat_ns"], _title(one))
        yield ""


def _line(begin: int, length: int, what: str) -> str:
    return table.fit_end(f"{begin / 1000:12.2f} {(begin + length) / 1000:12.2f} {length / 1000:9.2f}  ", what)


def _title(call: Record) -> str:
    """Return a call's function, kernel and error."""
    return " ".join(str(call[field]) for field in ("api", "kernel", "error") if call.get(field))


def _stream(dispatch: Record) -> str:
    """Return a dispatch's stream; if its call is unknown, the device's queue, which streams may share."""
    return f"stream {dispatch['stream']}" if dispatch.get("stream") else f"queue {dispatch['queue']}"


class CallTrace:
    """Writes calls and dispatches to a trace: the threads of each process, the streams of its GPUs, and arrows
    from calls to kernels.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._processes: dict[int, int] = {}  # in order of appearance
        self._streams: dict[tuple[int, str], int] = {}
        self._arrows = 0

    def add(self, calls: Iterable[Record], dispatches: Iterable[Record] = ()) -> None:
        """Add calls and dispatches. A dispatch must not come before its call."""
        for call in calls:
            pid, tid = call["pid"], call["tid"]
            self._trace.name(pid, f"{call['comm']} (host)", order=self._order(pid))
            self._trace.name(pid, f"{call['comm']} {tid}", tid)
            details = {name: call[name] for name in _DETAILS if name in call}
            if "off_cpu_ns" in call:
                details["off_cpu_us"] = call["off_cpu_ns"] / 1000
            self._trace.slice(pid, tid, _title(call), call["ts_ns"], call["lat_ns"], "call", **details)
        for dispatch in dispatches:
            self._dispatch(dispatch)

    def _order(self, pid: int) -> int:
        """Return the position of a process in the trace. Its GPUs follow it."""
        return 64 * self._processes.setdefault(pid, len(self._processes))

    def _dispatch(self, dispatch: Record) -> None:
        pid, gpu, begin, length = dispatch["pid"], dispatch["gpu"], dispatch["ts_ns"], dispatch["exec_ns"]
        device = (gpu + 1 << 22) + pid  # PIDs are below 2^22
        name = _stream(dispatch)
        number = self._streams.setdefault((device, name), len(self._streams))
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


class PendingTimeline:
    """The calls and dispatches that --timeline shows with the next report."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._calls: list[Record] = []
        self._dispatches: list[Record] = []
        self._full = False

    def add(self, calls: Sequence[Record], dispatches: Sequence[Record]) -> None:
        """Keep records. If there are too many, drop the rest and give a notice once."""
        for kept, new in ((self._calls, calls), (self._dispatches, dispatches)):
            room = MOST_PENDING - len(kept)
            kept += new[:room]
            if len(new) > room and not self._full:
                self._full = True
                self._note(
                    f"--timeline shows only the first {MOST_PENDING:,} calls between two reports; "
                    "give a shorter interval, or use --trace"
                )

    def show(self, form: OutputOptions, out: cli.Output, origin: int) -> None:
        """Print what was kept. Times in text count from `origin`."""
        calls, self._calls = self._calls, []
        dispatches, self._dispatches = self._dispatches, []
        if form.json:
            out.records(operations(calls, dispatches))
        elif not form.csv:
            out.lines(lines(calls, dispatches, origin))


class TraceFile:
    """The file of --trace. If writing fails, the measurement continues without it. Raise Error if the file
    cannot be created.
    """

    def __init__(self, path: str, complain: Callable[[str], None]) -> None:
        self._complain = complain
        self._trace: Trace | None = Trace(path)
        self._calls = CallTrace(self._trace)
        self.status = 0  # the exit status after an error

    @property
    def open(self) -> bool:
        """Whether the file is still being written."""
        return self._trace is not None

    def add(self, calls: Iterable[Record], dispatches: Iterable[Record]) -> None:
        """Write calls and dispatches, unless writing has failed before."""
        if self._trace is None:
            return
        try:
            self._calls.add(calls, dispatches)
        except Error as error:
            self.close(error)

    def close(self, failed: Error | None = None) -> None:
        """Complete the file, and report an error. `failed`: the error that ends it early."""
        trace, self._trace = self._trace, None
        try:
            if trace is not None:
                trace.close()
        except Error as error:
            failed = failed or error
        if failed is not None:
            self._complain(str(failed))
            self.status = failed.status

"""What hipsnoop and cudasnoop do: whose calls they watch, and what they print of them."""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpubpf import names
from gpubpf.calls import command_libraries, kfd, listing, records, show, timeline, why
from gpubpf.calls.arrays import GAP
from gpubpf.calls.context import Context
from gpubpf.calls.inventory import WAIT, Inventory
from gpubpf.calls.inventory import line as inventory_line
from gpubpf.calls.kernels import Kernels
from gpubpf.calls.probes import Calls, Options
from gpubpf.calls.rocprofiler.launched import DeviceTimes, with_runs
from gpubpf.calls.sums import Kernel, Picked, Row, functions, kernels, merged, of_events
from gpubpf.calls.watch import Watch
from gpubpf.ebpf.compile import capable
from gpubpf.errors import Error, SessionError
from gpubpf.linux import libraries
from gpubpf.linux.libraries import Names
from gpubpf.names import Name
from gpubpf.process import users
from gpubpf.session import joining
from gpubpf.show import cli
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf.show.perfetto import Trace

if TYPE_CHECKING:
    from gpubpf.calls.api import Api
    from gpubpf.calls.why import Cause

TICK = 0.1  # seconds between two looks at records,
FIRST = 0.005, 1.0  # sooner until a process is attached to, as it may be short: seconds, until when
MOST_HAPPENED = 10_000
MOST_UNTOLD = 500_000  # calls of --timeline that are kept until the next report
MOST_SLOW = 10_000  # slow calls of an interval that are looked at together
_PLACES = {GAP: "between launches", why.PROCESS: "the process"}  # beside functions


def run(api: Api, text: str, args: argparse.Namespace, out: cli.Output) -> int:
    """Runs the tool, and gives its exit status. `text`: its programs."""

    def note(said: str) -> None:
        cli.note(args.tool, said)

    if args.list and not args.command:
        return listing.show(api, text, args, out)
    if not capable():
        whom = "every process" if not args.command and not args.pid else "calls of a library"
        raise SessionError(f"watching {whom} takes root, or CAP_BPF and CAP_PERFMON; use sudo")
    if args.list:
        return listing.show(api, text, args, out)
    if args.csv:
        _leave_out_of_csv(args, note)
    options = Options(
        events=bool(args.each or args.slow or args.timeline or args.trace or _picks(args)),
        everybody=not args.command and not args.pid,
        slow_ns=1000 * (args.slow or 0),
        errors=args.errors,
        cgroup=args.cgroup,
        comm=args.comm,
        tid=args.tid,
        statistics=args.verbose,
    )
    if args.command:
        api = command_libraries.also(api, args.command, users.command_user(args.user))
    with ExitStack() as stack:
        device = inventory = None
        if api.tool == "hipsnoop":
            device = _device_times(api, args)
            stack.callback(device.close)
            options = replace(options, events=options.events or device.needs_calls)
            inventory = Inventory()
            stack.callback(inventory.close)
            if options.everybody:  # which would see its calls
                inventory.devices(WAIT)
        watch = Watch(args, device.environment if device else {}, note)
        calls = Calls(api, api.choose(args.api), options, note, text)
        stack.callback(calls.close)
        context = Context(calls, note, why=args.why, spans=bool(args.slow))
        named = Kernels(api, calls.bpf)
        driver = kfd.open_devices(note) if api.tool == "hipsnoop" and (args.why or args.slow) else None
        if driver is not None:
            stack.callback(driver.close)
        calls.start()
        report = Report(Sources(api, calls, context, named, watch, device, driver, inventory), args, out)
        with watch.follow(calls):
            report.begin()
            for _ in watch.intervals(report.tick, calls.stop):
                report.show()
                if out.closed:
                    break
            report.end()
        return watch.status or report.status


def _leave_out_of_csv(args: argparse.Namespace, note: Callable[[str], None]) -> None:
    """Views that have no place among rows of one table."""
    asked = {"--why": args.why, "--timeline": args.timeline, "what --slow tells of each call": args.slow}
    if left_out := [what for what in asked if asked[what]]:
        note(f"CSV is of one table, without {' and '.join(left_out)}; use --json for that")
    args.why = args.timeline = False


def _device_times(api: Api, args: argparse.Namespace) -> DeviceTimes:
    user = users.command_user(args.user) if args.command else None
    uid = user.uid if user else os.geteuid()
    filtered = any((args.api, args.errors, args.slow, args.cgroup, args.comm, args.tid, _picks(args)))
    return DeviceTimes(
        api, args.command or (), os.environ, uid, lambda name: _is_wanted(args.kernel, name), filtered
    )


def _picks(args: argparse.Namespace) -> bool:
    """Whether only some launches of a kernel are meant."""
    return bool(args.launch and args.launch != (1, None)) or (args.sample or 1) > 1


def _is_wanted(globs: Sequence[str], name: Kernel) -> bool:
    """Whether --kernel means it."""
    return not globs or names.matches(globs, name.mangled if isinstance(name, Name) else name or "")


@dataclass(frozen=True)
class Sources:
    """Where what is told comes from. `device`, `driver`, `inventory`: for GPUs whose vendor has a way to ask."""

    api: Api
    calls: Calls
    context: Context
    kernels: Kernels
    watch: Watch
    device: DeviceTimes | None
    driver: kfd.Driver | None
    inventory: Inventory | None


class Report:
    """What is printed, from the beginning of the measurement to its end."""

    def __init__(self, sources: Sources, args: argparse.Namespace, out: cli.Output) -> None:
        self._api, self._calls, self._context = sources.api, sources.calls, sources.context
        self._kernels, self._watch, self._device = sources.kernels, sources.watch, sources.device
        self._args, self._out = args, out
        self._whose = OwnerColumns(self._watch.everyone or len(set(args.pid)) > 1)
        self._names = Names(*self._api.libraries)
        self._library = self._api.libraries[0]
        self._waiting = list(
            self._watch.pids
        )  # processes that have not mapped a library yet, as far as is known
        self._attached: set[int] = set()
        self._comms: dict[int, str] = {}
        self._origin = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self._clock = time.time_ns() - self._origin
        self._counted = 0
        self._kernels_seen: set[str] = set()
        self._spans = why.Spans()
        self._slow: list[tuple[dict[str, Any], list[Cause]]] = []
        self._driver, self._inventory = sources.driver, sources.inventory
        self._told_devices = False
        self._picked = Picked(args.launch or (1, None), args.sample or 1) if _picks(args) else None
        self._batch = (
            self._calls.sums()[:0] if self._picked else None
        )  # of what was picked, since the last report
        self._happened: deque[kfd.Happened] = deque(maxlen=MOST_HAPPENED)  # what the driver did
        self._untold_happened: list[kfd.Happened] = []  # of --why
        self._untold: list[dict[str, Any]] = []  # calls, of --timeline
        self._untold_dispatches: list[dict[str, Any]] = []
        self._full = False  # more of them came
        self._trace = Trace(args.trace) if args.trace else None
        self._tracer = timeline.Tracer(self._trace) if self._trace else None
        self._headed: bool | None = None  # whether the header over lines has columns for processes
        self.status = 0

    def _note(self, text: str) -> None:
        cli.note(self._args.tool, text)

    # --- while it runs ---

    def begin(self) -> None:
        self._waiting = list(self._watch.pids)
        if self._watch.everyone:
            self._note("watching every process")
            if self._args.json:
                self._out.record(type="watching", ts_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME))
        self._look()
        for pid in self._waiting if self._args.pid else ():
            self._note(f"pid {pid} ({joining.comm(pid)}) has not loaded {self._library}; waiting for that")

    def tick(self) -> float:
        """Takes what has come. Gives the seconds until it is to be called again."""
        self._look()
        soon, until = FIRST
        early = time.monotonic_ns() - self._watch.started_ns < until * 1e9
        if self._waiting and early and not self._watch.stopped and not self._calls.seen:
            return soon
        self._tell_attached()
        self._kernels.read(self._calls.host)
        self._context.tick()
        self._take_happened()
        if self._calls.options.events:
            self._take_events()
        else:
            self._take_dispatches(None)
        self._watch.unread = self._out.closed and self._trace is None
        return TICK

    def _take_happened(self) -> None:
        """What the driver did to processes that are watched."""
        if self._driver is None:
            return
        found = [h for h in self._driver.take() if not h.pid or self._watch.everyone or h.pid in self._comms]
        self._happened += found
        if self._args.why and len(self._untold_happened) < MOST_HAPPENED:
            self._untold_happened += found

    def _look(self) -> None:
        """Whether the processes that are waited for map a library by now."""
        for pid in tuple(self._waiting):
            with suppress(OSError):
                if any(True for _ in libraries.mapped(pid, self._names)):
                    self._tell(pid, joining.comm(pid))

    def _tell_attached(self) -> None:
        """Of processes that have made calls."""
        for pid, comm in self._calls.seen.items():
            self._comms[pid] = comm  # it may be another program's since
            if pid not in self._attached:
                self._tell(pid, comm)

    def _tell(self, pid: int, comm: str) -> None:
        self._attached.add(pid)
        self._comms[pid] = comm
        self._kernels.look(pid)
        if pid in self._waiting:
            self._waiting.remove(pid)
        self._note(f"attached to {pid} ({comm})")
        if self._args.json:
            now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            self._out.record(type="attached", pid=pid, comm=comm, ts_ns=now)

    def _comm(self, pid: int) -> str:
        if pid not in self._comms:
            self._comms.update(self._calls.seen)
        return self._comms.get(pid, "")

    def _name(self, pid: int, handle: int) -> Kernel:
        return self._kernels.name(pid, handle)

    def _chosen(self, array: Any) -> Any:
        """Of sums or events those of the kernels that were asked for."""
        if not self._args.kernel:
            return array
        import numpy as np

        keys = list(zip(array["tgid"].tolist(), array["kernel"].tolist(), strict=True))
        wanted = {}
        for pid, handle in set(keys):
            name = self._name(pid, handle) if handle else None
            wanted[pid, handle] = bool(handle) and _is_wanted(self._args.kernel, name or f"{handle:#x}")
            if handle and len(self._kernels_seen) < 4096:
                self._kernels_seen.add(name.short if isinstance(name, Name) else name or f"{handle:#x}")
        return array[np.fromiter((wanted[key] for key in keys), bool, len(keys))]

    # --- each call ---

    def _take_events(self) -> None:
        array = self._calls.events()
        if self._picked is not None:
            array = self._picked.of(self._chosen(array), self._name)
            if self._batch is not None and len(array):
                self._batch = merged([self._batch, of_events(array, self._batch.dtype)])
        args, out = self._args, self._out
        if args.slow:
            self._spans.add(self._context.spans())
        dispatched = self._take_dispatches(array)
        if not (args.each or args.slow or args.timeline or args.trace):
            return
        array = self._chosen(array)
        found = []  # of records, which take long to make
        if args.slow or args.timeline or args.trace:
            found = records.calls(array, self._api, self._name)
        self._trace_calls(found, dispatched)
        if args.timeline:
            self._keep(self._untold, found)
            self._keep(self._untold_dispatches, dispatched)
        if args.slow:
            self._tell_slow(array, found)
        if args.each and len(array):
            self._tell_calls(array)
        if dispatched and args.each and args.json:
            out.records(dispatched)
        elif dispatched and args.each and not args.csv:
            out.lines(show.dispatch_line(record, self._columns) for record in dispatched)

    def _trace_calls(self, found: list[dict[str, Any]], dispatched: list[dict[str, Any]]) -> None:
        """Into --trace's file. Where that cannot be written any more everything else goes on."""
        if self._tracer is None:
            return
        try:
            self._tracer.add(found, dispatched)
        except Error as error:
            self._end_trace(error)

    def _end_trace(self, failed: Error | None = None) -> None:
        trace, self._trace, self._tracer = self._trace, None, None
        try:
            if trace is not None:
                trace.close()
        except Error as error:
            failed = failed or error
        if failed is not None:
            cli.complain(self._args.tool, str(failed))
            self.status = failed.status

    def _keep(self, untold: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
        """Until the next report."""
        room = MOST_UNTOLD - len(untold)
        untold += found[:room]
        if len(found) > room and not self._full:
            self._full = True
            self._note(
                f"--timeline shows the first {MOST_UNTOLD:,} calls between two reports; give a shorter interval, or --trace"
            )

    def _tell_slow(self, array: Any, found: list[dict[str, Any]]) -> None:
        """Adds to records of calls why they took long. Tells them, unless --each does."""
        args, out = self._args, self._out
        explained = [(record, self._explain(record)) for record in found]
        if len(self._slow) < MOST_SLOW:
            self._slow += explained
        if args.json:
            whys = ([show.cause_record(cause) for cause in causes] for _, causes in explained)
            out.records(record | {"why": why_} for record, why_ in zip(found, whys, strict=True))
        elif found and not args.csv and not args.each:
            self._see(array)
            groups = records.groups(array, self._api, self._name)
            texts = records.in_order((group.places, show.call_texts(group)) for group in groups)
            for text, (record, causes) in zip(texts, explained, strict=True):
                out.lines(show.story(record, text, causes, self._origin, self._whose.processes))

    def _tell_calls(self, array: Any) -> None:
        """Each one."""
        args = self._args
        if args.json:
            if not args.slow:  # where they have been told
                self._write(array, show.call_records)
        elif args.csv:
            self._head(show.CSV_CALLS)
            self._write(array, show.call_rows)
        else:
            self._see(array)
            columns = self._columns
            if columns.several != self._headed:
                self._headed = columns.several
                self._out.line(columns.header)
            self._write(array, lambda group: show.call_lines(group, columns))

    def _write(self, array: Any, lines: Callable[[records.Group], Iterable[str]]) -> None:
        """A line for each call, in order."""
        for text in records.texts(array, self._api, self._name, lines):
            self._out.write(text)

    def _explain(self, record: dict[str, Any]) -> list[Cause]:
        """What a call's thread did beside running, and what the driver did meanwhile."""
        pid, start, end = record["pid"], record["ts_ns"], record["ts_ns"] + record["lat_ns"]
        driven = kfd.during(self._happened, pid, start, end) if self._happened else []
        return self._spans.explain(pid, record["tid"], start, end) + driven

    def _take_dispatches(self, array: Any) -> list[dict[str, Any]]:
        """Records of those that have ended. `array`: new events; None where there are none."""
        return self._device.take(array, self._watch.stopped) if self._device is not None else []

    def _see(self, array: Any) -> None:
        """Takes note of whose calls they are."""
        import numpy as np

        self._whose.see(Row(pid, self._comm(pid), "") for pid in np.unique(array["tgid"]).tolist())

    @property
    def _columns(self) -> show.Columns:
        return show.Columns(
            self._origin,
            self._whose.processes,
            self._clock if self._args.timestamps else None,
            self._args.verbose,
        )

    def _head(self, columns: tuple[str, ...]) -> None:
        if not self._out.began:
            self._out.write(cli.csv_cells(columns) + "\n")

    # --- reports ---

    def show(self) -> None:
        """What ended since the last report, added up."""
        args, out = self._args, self._out
        array = self._chosen(self._sums())
        by_function = functions(array, self._comm, self._api)
        self._counted += sum(row.times.count for row in by_function)
        causes, between = self._context.why() if args.why else (None, None)
        self._show_timeline()
        if args.each and causes is None:
            return
        by_kernel = self._by_kernel(array)
        now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        if args.json:
            stamp = {"ts_ns": now} if args.timestamps else {}
            if not args.each:
                out.records(row.function_record() | stamp for row in by_function)
                out.records(row.kernel_record() | stamp for row in by_kernel)
            if causes is not None:
                out.records(self._why_record(row) | stamp for row in causes)
                happened, self._untold_happened = self._untold_happened, []
                out.records(show.driver_record(h, self._comm(h.pid)) for h in happened)
        elif args.csv:
            if not args.each:
                self._show_csv(by_function, now)
        else:
            out.lines(self._devices())
            if args.timestamps:
                out.line(time.strftime("%H:%M:%S"))
            out.lines(self._text(by_function, by_kernel))
            if causes is not None and (len(causes) or by_function):
                out.lines(self._why_text(causes, between, by_function, by_kernel))
                happened, self._untold_happened = self._untold_happened, []
                out.lines(show.driver_lines(happened, self._comm))

    def _devices(self) -> Iterator[str]:
        """Which GPUs there are, above the first report by whose time that is known."""
        if self._inventory is None or self._told_devices:
            return
        if found := self._inventory.devices(WAIT if self._watch.stopped else 0.0):
            self._told_devices = True
            yield from map(inventory_line, found)
            yield ""

    def _by_kernel(self, array: Any) -> list[Row]:
        rows = kernels(array, self._comm, self._name, self._api)
        return with_runs(rows, self._device.runs(), self._comm) if self._device is not None else rows

    def _sums(self) -> Any:
        """Since the last time."""
        found = self._calls.sums()
        if self._batch is None:
            return found
        batch, self._batch = self._batch, self._batch[:0]
        return batch

    def _show_timeline(self) -> None:
        calls, self._untold = self._untold, []
        dispatched, self._untold_dispatches = self._untold_dispatches, []
        if self._args.json:
            self._out.records(timeline.operations(calls, dispatched))
        elif not self._args.csv:
            self._out.lines(timeline.lines(calls, dispatched, self._origin))

    def _show_csv(self, rows: list[Row], now: int) -> None:
        cells = (now,) if self._args.timestamps else ()
        self._head((*(("ts_ns",) if cells else ()), *show.CSV_SUMS))
        lines = (cli.csv_cells((*cells, *show.function_row(row.function_record()))) for row in rows)
        self._out.write("".join(line + "\n" for line in lines))

    def _text(self, by_function: list[Row], by_kernel: list[Row]) -> Iterator[str]:
        if not by_function or self._args.each:
            return
        self._whose.see(by_function)
        if self._args.slow:
            yield from show.slow_threads(self._slow, self._whose.processes)
            self._slow = []
        yield from show.finding(by_function)
        yield ""
        yield from show.function_table(by_function, self._whose, self._args.verbose)
        yield ""
        if by_kernel:
            yield from show.kernel_table(by_kernel, self._whose, self._args.verbose)
            yield ""

    # --- why ---

    def _why_record(self, row: Any) -> dict[str, Any]:
        record: dict[str, Any] = {
            "type": "why",
            "pid": int(row["tgid"]),
            "comm": self._comm(int(row["tgid"])),
        }
        record |= {"tid": int(row["tid"])} if row["tid"] else {}
        gap = int(row["function"]) == GAP
        record |= {"api": None if gap else self._api.functions[int(row["function"])].name}
        return record | show.reason(int(row["reason"]), int(row["syscall"]), row)

    def _why_text(
        self, rows: Any, between: Any, by_function: list[Row], by_kernel: list[Row]
    ) -> Iterator[str]:
        """Most time first: functions, and the gaps; then threads by what they did in gaps."""
        import numpy as np

        totals: dict[int, int] = {}
        for row in by_function:
            totals[row.number] = totals.get(row.number, 0) + row.times.ns
        totals[GAP] = sum(row.gaps.ns for row in by_kernel)
        groups = []
        for number, own in why.by_place(rows).items():
            where = _PLACES.get(number) or self._api.functions[number].name
            groups.append((where, totals.get(number, 0), why.causes(own)))
        groups.sort(key=lambda group: -sum(cause.ns for cause in group[2]))
        threads = []
        launch = [number for number, function in enumerate(self._api.functions) if function.group == "launch"]
        between = between[(between["tid"] != 0) & ~np.isin(between["function"], launch)]
        told = set(zip(between["tgid"].tolist(), between["tid"].tolist(), strict=True))
        for pid, tid in sorted(told):
            mine = between[(between["tgid"] == pid) & (between["tid"] == tid)]
            threads.append((f"thread {tid} of {self._comm(pid)}", why.causes(mine, self._between)))
        threads.sort(key=lambda thread: -sum(cause.ns for cause in thread[1]))
        yield from show.why_lines(groups[: show.MOST], threads[:8])

    def _between(self, number: int) -> str:
        """The call that a thread was in between launches, "" for none."""
        return "" if number == GAP else self._api.functions[number].name

    def end(self) -> None:
        """The last lines, or the last record."""
        args, out = self._args, self._out
        self._end_trace()
        if self._device is not None:
            self._device.close()
        summary = self._summary()
        if args.json:
            out.record(**({"type": "summary", "tool": args.tool} | summary))
        elif not args.csv:
            out.lines(show.coverage(summary))
            out.lines(show.device_lines(summary))
            out.lines(cli.host_program_lines(summary) if args.verbose else ())
        if self._watch.terminated:
            return
        if args.kernel and not self._counted:
            from gpubpf.images.listing import no_match

            cli.complain(args.tool, no_match(args.kernel, self._kernels_seen))
            self.status = 1
        elif not self._attached and not any("late" in one for one in summary["libraries"]):
            self._note(f"no process that was watched has loaded {self._library}")

    def _is_late(self, pid: int | None) -> bool:
        """Whether a process that mapped a library before that had probes is one that is watched, as far as is known."""
        return pid is not None and (self._watch.everyone or pid in self._calls.seen or not self._calls.seen)

    def _summary(self) -> dict[str, Any]:
        """The fields of the summary record, but for `type` and `tool`."""
        counts, lost_by = self._calls.counts, self._calls.lost_by
        device = self._device.summary() if self._device is not None else {}
        if self._inventory is not None and (found := self._inventory.devices(WAIT)):
            device["devices"] = list(found)
        placed: dict[str, dict[str, Any]] = {}  # programs of several kinds may be on a file
        for one in self._calls.placed:
            known = placed.setdefault(
                one.path, {"path": one.path, "functions": len(one.functions), "refused": {}}
            )
            known["refused"].update(one.refused)
            if self._is_late(one.late):
                known["late"] = {"pid": one.late, "comm": self._comm(one.late or 0)}
        return device | {
            "calls": self._counted,
            "lost": sum(lost_by.values()),
            "duration_ns": self._watch.ended_ns - self._watch.started_ns,
            "lost_by": lost_by,
            "lost_why": self._context.lost,
            "lost_names": self._kernels.lost(self._calls.host),
            "lost_processes": counts.processes,
            "missed": self._calls.missed,
            "processes": len(self._calls.seen),
            "nested": counts.nested,
            "abandoned": counts.abandoned,
            "libraries": list(placed.values()),
            "host_programs": {
                r.function: {"runs": r.runs, "mean_ns": round(r.mean_ns)} for r in self._calls.host.runs()
            },
        }

#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""gputop   Show what runs on the GPUs of this machine now, by process and kernel.

USAGE: gputop [options] [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]

The agent logs each call that gives the GPU work, allocates memory, or waits. The device programs of launchlate record when each
kernel starts and ends. The tool sums both by process, in each interval.
"""

from __future__ import annotations

import os
import sys

if __package__ in (None, ""):  # run as tools/gputop.py: the library is in ../lib
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "lib"))

from gpubpf.record import Record, replace
from gpubpf.show import cli  # early: Ctrl-C is answered quietly from here on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpubpf.session.session import Session

TOOL = "gputop"
EXAMPLES = """examples:
    gputop                           every process, until q is pressed (root)
    gputop 5                         the same, a report every 5 s
    gputop --once                    one report of one second
    gputop 1 10 -p 1234              a running process, ten reports
    gputop -- ./app                  one report of a whole program
    gputop --once --sort memory      who holds the most memory
    gputop --json -o top.jsonl 10    records for another program
"""
INTERVAL = 1.0  # seconds


class Rows(Record):
    """Which rows to show.

    live: they are on a screen, which is refreshed.
    sort: --sort.
    top: rows of each table; None: all.
    """

    live: bool = False
    sort: str = "time"
    top: int | None = None


def build_parser() -> cli.Parser:
    """Return the parser: the shared options, and what to show."""
    parser = cli.parser(TOOL, "Show what runs on the GPUs of this machine, by process and kernel.", EXAMPLES)
    cli.add_targets(parser)
    shown = parser.add_argument_group("what to show")
    shown.add_argument("--once", action="store_true", help="print one report and exit")
    shown.add_argument(
        "--sort",
        choices=("time", "launches", "copies", "memory", "waits", "pid"),
        default="time",
        help="what the rows of processes are sorted by (default time: GPU time)",
    )
    shown.add_argument("--top", type=cli.positive, metavar="N", help="show only N rows of each table")
    cli.add_kernels(parser)
    cli.add_patches(parser)
    cli.add_device(parser, times=True)
    cli.add_looks(parser)
    cli.add_output(parser, "gpubpf.top.records")
    return parser


@cli.command(TOOL)
def main(argv: list[str] | None = None) -> int:
    """Run the tool; return its exit status."""
    parser = build_parser()
    args = cli.parse(parser, argv)
    if args.once and args.count:
        parser.error("--once prints one report; leave out count")
    text = not (args.json or args.csv or args.output)
    live = text and not (args.once or args.command) and sys.stdout is not None and sys.stdout.isatty()
    always = args.once or live or not (args.command or args.duration)
    interval = args.interval or (INTERVAL if always else None)
    options = cli.Options.of(args).with_reports(interval, 1 if args.once else args.count)
    out = cli.open_results(options.output)
    from gpubpf.tools.launchlate import PROGRAM, SLOTS

    if args.ebpf:
        out.write(PROGRAM.lstrip())
        return 0
    from gpubpf.program import BPF

    b = BPF(text=PROGRAM)
    b.attach_gpu_entry(kernel=args.kernel, fn_name="on_entry")
    b.attach_gpu_exit(kernel=args.kernel, fn_name="on_exit")
    if args.list or args.ptx:
        return b.show_kernels(options, out)
    if os.geteuid() and not args.pid and not args.command:
        from gpubpf.top import own_processes

        options = options.with_pids(own_processes.found(TOOL, lambda text: cli.note(TOOL, text)))
    from gpubpf.session import tracing
    from gpubpf.traced.measurement import Follow, Kept

    b["every_lane"].set(int(tracing.device_of(options).kind == "sim").to_bytes(8, "little"))
    kept = Kept("ends", "launches", offset=16, slots=SLOTS)
    follow = Follow(
        log_records=1 << 18, stamps=True, allocation_stacks=True, pump=SLOTS // 4, kept=kept
    )  # on AMD GPUs, allocations are logged only with their stacks
    with b.trace(options, out, follow) as session:
        results = cli.ResultWriter(options.output, out, session.now_ns)
        measure(session, SLOTS, options, replace(cli.group(Rows, args), live=live), results)
    return session.status


def measure(
    session: Session, slots: int, options: cli.Options, rows: Rows, results: cli.ResultWriter
) -> None:
    """Show reports until the measurement ends. The imports load NumPy, which would delay the first probe."""
    from gpubpf.gpus.devices import Devices
    from gpubpf.held.memory import Memory
    from gpubpf.launches import latency
    from gpubpf.launches.launches import Launches
    from gpubpf.launches.sums import LaunchLosses
    from gpubpf.top import report, screen
    from gpubpf.top.usage import Usage

    launches, memory, losses = Launches(slots, options.kernels.wanted), Memory(), LaunchLosses()
    usage, late_ns = Usage(graphs=not options.kernels.wanted), 0
    attached_ns, begun = session.now_ns(), bool(options.targets.command)
    shown = report.Report(rows.sort, rows.top, options.output.verbose, session.device.clock_notice or "")
    view = screen.view(shown, results, session.end, rows.live)

    def look(last: bool = False) -> int:
        """Add what is known now. Return the time until which it is."""
        nonlocal begun
        if not begun:
            usage.begin(session.began_ns() or attached_ns)
            begun = True
        columns = launches.columns()
        known = latency.LaunchView(columns)
        end_ns = session.end_ns() if session.stopped else usage.known_until(session.now_ns())
        usage.add(known, end_ns)
        losses.add(known, launches.fresh(columns, last))
        launches.forget()
        return end_ns

    def take() -> None:
        for log in session.logs():
            usage.know(launches.take_log(log))
            memory.add(log)
        launches.take_readings(session)
        if launches.full:
            launches.take_shared(session)
            look()
        view.tick()

    with Devices() as devices, view:
        for _ in session.intervals(options.output.interval, options.output.count, tick=take):
            launches.take_shared(session)
            interval = usage.close(look(session.stopped), memory.on_gpus())
            late_ns += interval.late_ns
            found = devices.read()
            for unknown in devices.unknown(found):
                results.note_once(unknown)
            view.show(replace(interval, devices=tuple(found)))
            for use in interval.processes:
                if use.ended:
                    memory.forget(use.process)
            if results.out.closed:
                break
    view.last()
    lost = losses.fields(launches.lost, session.failed(), session.ended_unread())
    report.end(session, lost, late_ns, results)


if __name__ == "__main__":
    sys.exit(main())

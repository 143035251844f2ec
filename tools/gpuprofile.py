#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""gpuprofile   Show where GPU time comes from, by the host's call stack.

USAGE: gpuprofile [options] [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]

The agent walks the host stack of each launch and gives equal stacks one number. The device programs of launchlate record when the
kernel starts and ends. The tool adds up GPU time and launches by stack, as a table, folded stacks, or a file for another program.
"""

from __future__ import annotations

import os.path
import sys
import time

if __package__ in (None, ""):  # run as tools/gpuprofile.py: the library is in ../lib
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "lib"))

from gpubpf.show import cli  # early: Ctrl-C is answered quietly from here on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpubpf.launches.profile import ProfileViews
    from gpubpf.launches.profile_otlp import ProfilePush
    from gpubpf.session.session import Session

TOOL = "gpuprofile"
EXAMPLES = """examples:
    gpuprofile -- ./app                          who uses the GPU, for how long
    gpuprofile -v --top 5 -- ./app               with all frames of five stacks
    gpuprofile --folded -o app.folded -- ./app   for flamegraph.pl and others
    gpuprofile --speedscope app.json -- ./app    for https://www.speedscope.app
    gpuprofile --svg app.svg -- ./app            a flame graph for a browser
    gpuprofile --weight launches -- ./app        who launches most often
    gpuprofile --kernel 'gemm*' -- ./app         who uses these kernels
    gpuprofile --otlp http://localhost:4317 -p 1234 10
                                                 push to OpenTelemetry, too
    gpuprofile -p 1234 10                        a running program, every 10 s
"""
WEIGHTS = ("time", "launches")
FILES = {
    "svg": "as a flame graph for a browser",
    "pprof": "for pprof",
    "speedscope": "for https://www.speedscope.app",
}


def build_parser() -> cli.Parser:
    """Return the parser: the shared options, and what to show of stacks."""
    parser = cli.parser(TOOL, "Show where GPU time comes from, by the host's call stack.", EXAMPLES)
    cli.add_targets(parser)
    shown = parser.add_argument_group("what to show")
    shown.add_argument(
        "--weight",
        choices=WEIGHTS,
        default=WEIGHTS[0],
        help="what counts: GPU time, or the number of launches (default time)",
    )
    shown.add_argument(
        "--top", type=cli.positive, metavar="N", help="show only the N rows with the largest weight"
    )
    shown.add_argument(
        "--folded", action="store_true", help="print folded stacks instead of the table, with ns or launches"
    )
    for form, reader in FILES.items():
        shown.add_argument(
            f"--{form}",
            type=cli.parse_file,
            metavar="FILE",
            help=f"write the whole measurement to FILE {reader}",
        )
    shown.add_argument(
        "--otlp",
        type=cli.parse_endpoint,
        metavar="URL",
        help="also push each report to the OpenTelemetry collector at URL (gRPC), such as http://localhost:4317;"
        " its signal for profiles is an alpha version",
    )
    cli.add_kernels(parser)
    cli.add_patches(parser)
    cli.add_host_filters(parser)
    cli.add_device(parser, times=True)
    cli.add_looks(parser)
    cli.add_output(parser, "gpubpf.launches.profile")
    return parser


@cli.command(TOOL)
def main(argv: list[str] | None = None) -> int:
    """Run the tool; return its exit status."""
    parser = build_parser()
    args = cli.parse(parser, argv)
    options = cli.Options.of(args)
    if args.folded and (args.json or args.csv):
        parser.error("--folded is another form than --json and --csv; choose one")
    out = cli.open_results(options.output)
    from gpubpf.tools.launchlate import PROGRAM, SLOTS

    if args.ebpf:
        out.write(PROGRAM.lstrip())
        return 0
    from gpubpf.program import BPF

    b = BPF(text=PROGRAM)
    if options.threads.host_filters:
        b.attach_launch(fn_name="on_launch")
    b.attach_gpu_entry(kernel=args.kernel, fn_name="on_entry")
    b.attach_gpu_exit(kernel=args.kernel, fn_name="on_exit")
    if args.list or args.ptx:
        return b.show_kernels(options, out)
    push = collector(args.otlp)
    from gpubpf.session import tracing
    from gpubpf.traced.measurement import Follow, Kept

    b["every_lane"].set(int(tracing.device_of(options).kind == "sim").to_bytes(8, "little"))
    kept = Kept("ends", "launches", offset=16, slots=SLOTS)
    follow = Follow(log_records=1 << 18, stamps=True, stacks=True, ranges=True, pump=SLOTS // 4, kept=kept)
    with b.trace(options, out, follow) as session:
        results = cli.ResultWriter(options.output, out, session.now_ns)
        if not args.folded:
            results.head(session.device.clock_notice)
        from gpubpf.launches.profile import ProfileViews  # NumPy would delay the first probe

        measure(session, SLOTS, cli.group(ProfileViews, args), options, results, push)
    return session.status


def collector(url: str | None) -> ProfilePush | None:
    """Return the connection to an OpenTelemetry collector. Raises ImportError without the Python packages."""
    if not url:
        return None
    from gpubpf.launches.profile_otlp import ProfilePush

    return ProfilePush(url)


def measure(
    session: Session,
    slots: int,
    views: ProfileViews,
    options: cli.Options,
    results: cli.ResultWriter,
    push: ProfilePush | None,
) -> None:
    """Print profiles until the measurement ends. The imports load NumPy, which would delay the first probe."""
    from gpubpf.launches import latency, latency_text, profile, profile_files, profile_text
    from gpubpf.launches.launches import Launches
    from gpubpf.launches.sums import LaunchLosses
    from gpubpf.show.owner_columns import OwnerColumns

    launches = Launches(slots, options.kernels.wanted, filtered=bool(options.threads.host_filters))
    current, whole, losses = profile.Profile(), profile.Profile(), LaunchLosses()
    owners = OwnerColumns(session.several)
    began_ns = time.time_ns()

    def look(last: bool) -> None:
        columns = launches.columns()
        view = latency.LaunchView(columns)
        new = launches.fresh(columns, last)
        current.add(view, new[columns.wanted[new]])
        losses.add(view, new)
        launches.forget()

    def take() -> None:
        launches.take(session)
        if launches.full:
            launches.take_shared(session)
            look(last=False)

    for _ in session.intervals(options.output.interval, options.output.count, tick=take):
        launches.take_shared(session)
        results.begin()
        look(last=session.stopped)
        rows = current.rows(views.weight)
        if views.folded:
            results.out.lines(
                profile.folded_lines(rows[: views.top], views.weight, owners.see(rows).processes)
            )
        elif results.form == "text":
            results.out.lines(
                profile_text.report(rows, views.weight, owners, views.top, results.options.verbose)
            )
        elif results.csv:
            cells = ((profile.STACK.record(row), row.folded) for row in rows[: views.top])
            results.table(
                profile.STACK.columns, (profile.STACK.row(record, stack=stack) for record, stack in cells)
            )
        else:
            results.records(profile.STACK, rows[: views.top])
        if push:
            ended_ns = time.time_ns()
            if why := push.send(rows, ended_ns, ended_ns - began_ns):
                results.note_once(
                    f"the OpenTelemetry collector at {views.otlp} did not take a profile: {why}"
                )
            began_ns = ended_ns
        whole.take(current)
        current = profile.Profile()
        if results.out.closed:
            break
    if push:
        push.close()
    rows = whole.rows(views.weight)
    for form, path in views.files.items():
        if path:
            profile_files.write(path, form, rows, views.weight)
            cli.note(TOOL, f"wrote {path}")
    if losses.others and not losses.wanted:
        cli.note(TOOL, latency_text.none_chosen(options.threads.host_filters, losses.others))
    lost = losses.fields(launches.lost, session.failed(), session.ended_unread())
    if not views.folded:
        profile_text.show_summary(session, rows, lost, results)


if __name__ == "__main__":
    sys.exit(main())

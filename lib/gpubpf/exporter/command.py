"""The command `gpubpf exporter`: its options, and its loop."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

from gpubpf.errors import SessionError
from gpubpf.record import replace
from gpubpf.show import cli
from gpubpf.show.option_values import parse_endpoint, parse_percent, parse_pids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from gpubpf.exporter.metrics import Family
    from gpubpf.exporter.otlp import Push
    from gpubpf.exporter.watch import Watch
    from gpubpf.session.session import Session

DESCRIPTION = "Serve metrics of all GPU programs on this machine to Prometheus, as long as it runs."
EXAMPLES = """examples:
    sudo gpubpf exporter            watch every process; metrics are at
                                    http://127.0.0.1:9696/metrics
    sudo gpubpf exporter --listen 0.0.0.0:9696
                                    let other machines read them, too
    sudo gpubpf exporter --budget 0.5 --top 20
                                    less overhead, and fewer series
    sudo gpubpf exporter --otlp http://collector:4317
                                    also push them to OpenTelemetry
    gpubpf exporter -p 1234         watch one process, without root

exit status: 0 after SIGTERM, or when the last process of -p has ended; 1 if
the address cannot be used or nothing can be measured; 2 if the command line
is wrong.
"""
TOOL = "gpubpf exporter"
LISTEN = "127.0.0.1:9696"
BUDGET = 1.0  # per cent
LEAST_PUSH = 1.0  # seconds between pushes
LEAST_GPUS = 1.0  # seconds between readings of the GPUs' drivers
LOOK = 0.5  # seconds between looks for new processes


def add_options(made: cli.Parser) -> None:
    """Add the options of the command to its parser."""
    made.add_argument(
        "--listen",
        type=parse_address,
        default=parse_address(LISTEN),
        metavar="ADDRESS:PORT",
        help=f"serve /metrics there (default: {LISTEN}); port 0: any free port",
    )
    made.add_argument(
        "--otlp",
        type=parse_endpoint,
        metavar="URL",
        help="also push metrics to the OpenTelemetry collector at URL (gRPC), such as http://localhost:4317;"
        f" every S seconds of --every, but at most every {LEAST_PUSH:g}",
    )
    made.add_argument(
        "--every",
        type=cli.seconds,
        default=5.0,
        metavar="S",
        help="read the counts every S seconds (default: 5)",
    )
    made.add_argument(
        "--top",
        type=cli.positive,
        default=50,
        metavar="N",
        help="series for the N kernels with the most launches; the rest is 'other' (default: 50)",
    )
    made.add_argument(
        "--budget",
        type=parse_percent,
        default=None,
        metavar="PERCENT",
        help="measure so few launches that programs run at most PERCENT more instructions, and let the exporter"
        f" use at most PERCENT of a core for reading counts (default: {BUDGET:g})",
    )
    made.add_argument(
        "--sample",
        type=cli.positive,
        default=None,
        metavar="N",
        help="instead of --budget: measure one launch in N (1: every launch)",
    )
    made.add_argument(
        "--kernel",
        action="append",
        metavar="GLOB",
        help="measure only kernels whose name matches; repeatable",
    )
    made.add_argument(
        "-p",
        dest="pid",
        action="extend",
        type=parse_pids,
        metavar="PID[,PID...]",
        help="watch these running processes (default: every process; requires root)",
    )
    made.set_defaults(tool=TOOL)


def parse_address(text: str) -> tuple[str, int]:
    """Parse ADDRESS:PORT; an IPv6 address is in brackets."""
    address, colon, port = text.rpartition(":")
    bare = address.removeprefix("[").removesuffix("]")
    if not (colon and bare and port.isascii() and port.isdigit() and int(port) < 1 << 16) or (
        ":" in bare and bare == address
    ):
        raise argparse.ArgumentTypeError(
            f"must be ADDRESS:PORT, such as {LISTEN} or [::1]:9696, not {text!r}"
        )
    return bare, int(port)


def run(args: argparse.Namespace, made: cli.Parser) -> int:
    """Serve metrics until the measurement ends. Return the exit status.

    Raises SessionError if the user may not watch all processes; ImportError without the Python packages.
    """
    if args.budget is not None and args.sample is not None:
        made.error("--budget and --sample exclude each other: --budget chooses the launches")
    if not args.pid and os.geteuid() != 0:
        raise SessionError(
            f"watching all processes requires root; use sudo, or name processes: {TOOL} -p PID"
        )
    budget = BUDGET if args.budget is None and args.sample is None else args.budget
    options = cli.Options.of(args)
    options = replace(options, kernels=replace(options.kernels, budget=budget))
    from gpubpf.exporter.gpus import Gpus
    from gpubpf.exporter.prometheus import Server
    from gpubpf.exporter.watch import Watch

    watch, gpus = Watch(args.top, budget), Gpus(max(LEAST_GPUS, args.every), args.top, _note)

    def measured() -> Iterator[Family]:
        yield from watch.latest()
        yield from gpus.latest()

    push = _push(args, measured)

    def families() -> Iterator[Family]:
        yield from measured()
        if push is not None:
            yield from push.families()

    address, port = args.listen
    with Server(address, port, families) as server, gpus:
        try:
            return _measure(options, args.every, watch, push, server.url)
        finally:
            if push is not None:
                push.close()


def _note(text: str) -> None:
    cli.note(TOOL, text)


def _push(args: argparse.Namespace, families: Callable[[], Iterable[Family]]) -> Push | None:
    if not args.otlp:
        return None
    from gpubpf.exporter.otlp import Push

    return Push(args.otlp, max(LEAST_PUSH, args.every), families, _note)


def _measure(options: cli.Options, every: float, watch: Watch, push: Push | None, url: str) -> int:
    from gpubpf.exporter.gpu_time import PROGRAM
    from gpubpf.program import BPF
    from gpubpf.session import tracing
    from gpubpf.traced.measurement import Follow

    b = BPF(text=PROGRAM)
    b.limit(options.kernels)
    b.attach_gpu_entry(kernel=options.kernels.wanted, fn_name="on_entry")
    b.attach_gpu_exit(kernel=options.kernels.wanted, fn_name="on_exit")
    b["every_lane"].set(int(tracing.device_of(options).kind == "sim").to_bytes(8, "little"))
    with b.trace(options, follow=Follow(registers=False)) as session:
        _note(f"serving {url}")
        if push is not None:
            push.start()
        _Loop(session, watch, every, options.kernels.budget).run()
    return session.status


class _Loop:
    """Updates the metrics until the session ends.

    every: seconds between updates. percent: the most CPU time that updates may take, of a core; None: no limit.
    """

    def __init__(self, session: Session, watch: Watch, every: float, percent: float | None) -> None:
        self._session, self._watch, self._every, self._percent = session, watch, every, percent
        self._next = self._last = time.monotonic()
        self._updating = False

    def run(self) -> None:
        for _ in self._session.intervals(tick=self._tick, every=LOOK):
            self._watch.update(self._session)

    def _tick(self) -> None:
        if self._updating:  # `Session.read` ticks, too
            return
        self._watch.see(self._session)
        now = time.monotonic()
        if now < self._next or self._session.stopped:
            return
        began = time.thread_time()
        self._updating = True
        try:
            self._session.read()
            self._watch.update(self._session)
        finally:
            self._updating = False
        self._watch.interval, self._last = now - self._last, now
        took = time.thread_time() - began
        self._next = now + max(self._every, 100 * took / self._percent if self._percent else 0.0)

"""The command `gpubpf check`: its options, and what it prints."""

from __future__ import annotations

import json
import os
import sys

from gpubpf.show import cli
from gpubpf.show.option_values import seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from gpubpf.check.finding import Finding
    from gpubpf.check.machine import Machine

DESCRIPTION = "Check what the tools can do on this machine, or in one process."
EXAMPLES = """examples:
    gpubpf check                    what this machine can do
    sudo gpubpf check               also what only root can see and do
    gpubpf check && threadhist -- ./app
    gpubpf check --json | jq -r 'select(.ok == false) | .name'
    gpubpf check --report           a text for a bug report
    gpubpf check -p 1234            what each tool would measure there

exit status: 0 if nothing that a tool needs is limited or missing, else 1;
2 if the command line is wrong.
"""
_WAIT = 2.0  # seconds until a thread waits for memory that does not arrive
_DEFAULT_TIMEOUT = 5.0  # as machine.TIMEOUT, whose import takes time


def add_options(made: cli.Parser) -> None:
    """Add the options of the command to its parser."""
    made.add_argument("-p", dest="pid", type=cli.positive, metavar="PID", help="check this process instead")
    form = made.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON Lines: one record for each check")
    form.add_argument(
        "--report", action="store_true", help="print a text for bug reports, in which nothing is personal"
    )
    made.add_argument(
        "--timeout",
        type=seconds,
        default=_DEFAULT_TIMEOUT,
        metavar="S",
        help=f"give up each check after S seconds (default: {_DEFAULT_TIMEOUT:g})",
    )


def run(args: argparse.Namespace, made: cli.Parser) -> int:
    """Run the command. Return its exit status. Raises Error for a process that cannot be checked."""
    from gpubpf.check.machine import Machine

    machine = Machine(timeout=args.timeout)
    if args.pid and args.report:
        made.error("--report and -p exclude each other")
    found = _of_process(args.pid, machine) if args.pid else _of_machine(machine)
    if args.json:
        about = {"pid": args.pid} if args.pid else {}
        _print(json.dumps(finding.record(name) | about) for name, _, finding in found)
    else:
        rows = [(title, finding) for _, title, finding in found]
        _print(_text_of_process(rows) if args.pid else _text_of_machine(rows, args.report))
    return int(any(finding.fails for _, _, finding in found))


def _of_machine(machine: Machine) -> list[tuple[str, str, Finding]]:
    from gpubpf.check import probing, table

    return [(check.name, check.title, finding) for check, finding in probing.run(table.CHECKS, machine)]


def _of_process(pid: int, machine: Machine) -> list[tuple[str, str, Finding]]:
    from gpubpf.check import process
    from gpubpf.process import user_waits

    found = [(name, name, finding) for name, finding in process.findings(pid, machine)]
    for text in user_waits.end(_WAIT):
        cli.note("gpubpf check", text)
    return found


def _text_of_process(rows: Sequence[tuple[str, Finding]]) -> Iterator[str]:
    from gpubpf.check import text

    return text.lines(rows, merge=True)


def _text_of_machine(rows: Sequence[tuple[str, Finding]], report: bool) -> Iterator[str]:
    from gpubpf.check import text

    first = []
    if report:
        first = [f"gpubpf check, as {'root' if os.geteuid() == 0 else 'an ordinary user'}"]
        rows = [(title, text.without_names(finding)) for title, finding in rows]
    return iter([*first, *text.lines(rows), *text.conclusion(rows)])


def _print(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))

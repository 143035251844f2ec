"""A tool's command line: its parser, COMMAND after ``--``, and the parsed arguments.

The parsed arguments have these attributes, whichever options a tool takes:

    tool         str                the tool's name
    out          Output             the results; set by `open_results`
    command      list[str] | None   COMMAND [ARG…] after ``--``
    pid          list[int]          -p
    files        list[str]          FILE… of --list and --ptx
    operand      str | None         the first word, of tools that need one (`Parser.operand`)
    specs        list[str]          SPEC…, of tools that take them (`Parser.takes_specs`)
    interval     float | None       seconds
    count        int | None         number of intervals
    kernel       list[str]          globs or mangled names; empty: every kernel
    launch       (int, int | None)  first and last launch of each kernel and process, from 1; None: no end
    sample       int                one launch in N
    block        Ranges             index ranges of x, y and z, each (first, last), inclusive
    thread       Ranges
    sample_blocks, sample_warps   int | None   --sample-blocks, --sample-warps: N of 1/N
    seed         int | None         --seed
    budget       float | None       --budget: per cent
    device       "auto" | "gpu" | "sim"
    map_memory   int                bytes
    ptx_options  bool               not --no-ptx-options
    sass         bool               --sass
    alone        bool               the tool has the Python process to itself: it was not called as a function
    duration     float | None       seconds
    cgroup       int | None         --cgroup: the cgroup's id
    comm         str | None         --comm
    tid          int | None         -t
    user         str | None
    output       str | None         -o FILE
    dataset      str | None         --parquet DIR; `json` is then true
    records      str                where the records that the tool writes are declared: see `Parser`
    list, ptx, ebpf, json, csv, timestamps, verbose   bool
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from gpubpf import __version__
from gpubpf.show import progress
from gpubpf.show.notices import complain
from gpubpf.show.option_values import EVERYTHING, positive, seconds

if TYPE_CHECKING:
    from gpubpf.show.fields import Fields

_SPEC = re.compile(r"\s*[A-Za-z_]\w*\s*:")  # how a specification begins; such a file is ./NAME


def _terminal_width() -> int:
    """Return the columns of the terminal, like `shutil.get_terminal_size`. (Importing shutil takes 2 ms.)"""
    with suppress(ValueError):
        if (columns := int(os.environ.get("COLUMNS", "0"))) > 0:
            return columns
    with suppress(AttributeError, ValueError, OSError):  # no standard output, or not a terminal
        assert sys.__stdout__ is not None
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or 80
    return 80


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows an optional value after "=", as it is parsed."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_terminal_width() - 2)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        text = super()._format_action_invocation(action)
        return text.replace(" [", "[=") if action.option_strings and action.nargs == "?" else text


class Parser(argparse.ArgumentParser):
    """A parser whose usage errors are one line and exit status 2.

    takes_specs: words such as POINT:KERNEL before COMMAND are specifications, in `args.specs`.
    operand: description of the first word before COMMAND, which is required; the word is in `args.operand`. "": no such word.
    records: where the records that the tool writes as JSON are declared: a module, and perhaps the name in it, after a colon.
    no_patches: without --sass: what about the tool makes that impossible, for the message.
    """

    takes_specs = False
    operand = ""
    records = ""
    no_patches = "has no programs in kernels"

    def declared(self) -> tuple[Fields, ...]:
        """Return the records that the tool writes as JSON."""
        return declared(self.records)

    def error(self, message: str) -> NoReturn:
        complain(self.prog, f"{message}; see {self.prog} --help")
        raise SystemExit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write a message. A failed write raises OSError; since Python 3.12 argparse would ignore it."""
        if message and (file := file or sys.stderr) is not None:
            file.write(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Flush standard output after --help and --version, so that a failed write is reported here."""
        if sys.stdout is not None:
            sys.stdout.flush()
        super().exit(status, message)


class SubcommandParser(Parser):
    """The parser of a subcommand: options may also stand between and behind the other words."""

    _intermixed = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._intermixed:  # called by parse_known_intermixed_args
            return super().parse_known_args(args, namespace)
        self._intermixed = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._intermixed = False


def declared(records: str) -> tuple[Fields, ...]:
    """Return the records of a tool. records: see `Parser`."""
    import importlib

    module, _, name = records.partition(":")
    made: tuple[Fields, ...] = getattr(importlib.import_module(module), name or "RECORDS")
    return made


def parser(tool: str, description: str, examples: str, usage: str | None = None) -> Parser:
    """Return a tool's parser with -h and --version. `examples` is printed as it is, below the options."""
    made = Parser(
        prog=tool,
        usage=usage
        or f"{tool} [options] [interval [count]]\n       {' ' * len(tool)} [-p PID[,PID...] | -- COMMAND [ARG...]]",
        description=description,
        epilog=examples,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--version", action="version", version=f"{tool} (gpubpf) {__version__}")
    made.set_defaults(
        command=None,
        pid=[],
        files=[],
        specs=[],
        operand=None,
        interval=None,
        count=None,
        kernel=[],
        launch=(1, None),
        range=[],
        sample=1,
        block=(EVERYTHING,) * 3,
        thread=(EVERYTHING,) * 3,
        sample_blocks=None,
        sample_warps=None,
        seed=None,
        budget=None,
        device="auto",
        map_memory=2**28,
        ptx_options=True,
        sass=False,
        duration=None,
        cgroup=None,
        comm=None,
        tid=None,
        user=None,
        output=None,
        dataset=None,
        **dict.fromkeys(("list", "ptx", "ebpf", "json", "csv", "timestamps", "verbose"), False),
    )
    return made


def spec_usage(tool: str, needed: str = "") -> str:
    """Return the usage line of a tool that takes specifications. needed: options that the tool requires."""
    what = f"{needed} SPEC..." if needed else "SPEC..."
    targets = f"{' ' * len(tool)} [-p PID[,PID...] | -- COMMAND [ARG...]]"
    return f"{tool} [options] {what} [interval [count]]\n       {targets}"


def parse(made: Parser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a tool's command line. Usage errors end the process with one line and status 2."""
    own, command = split_command(sys.argv[1:] if argv is None else argv)
    if "--sass" in own and "--sass" not in made._option_string_actions:
        made.error(f"--sass is not possible: {made.prog} {made.no_patches}; leave out --sass")
    args = parse_own(made, own)
    args.tool = made.prog
    progress.enable(made.prog)
    args.command = command
    args.alone = argv is None
    words = args.__dict__.pop("positional", []) + args.__dict__.pop("behind", [])
    advice = "" if command else "; put a command after '--'"
    if made.takes_specs:
        args.specs = [word for word in words if is_spec(word)]
        words = [word for word in words if not is_spec(word)]
        advice = f"; a SPEC is POINT:KERNEL{advice}"
    if made.operand:
        if not words:
            made.error(f"{made.operand} is missing")
        args.operand = words.pop(0)
    if command == []:
        made.error("no COMMAND after '--'")
    if command and args.pid:
        made.error("-p and COMMAND exclude each other")
    if args.seed is not None and not (args.sample_blocks or args.sample_warps):
        made.error("--seed needs --sample-blocks or --sample-warps")
    if args.budget is not None and args.sample > 1:
        made.error("--budget and --sample exclude each other: --budget chooses the launches")
    if args.sass:
        _check_patches(made, args)
    args.records = made.records
    if args.dataset:
        _check_dataset(made, args)
        args.json = True
    if args.list or args.ptx:
        args.files = words
        option = "--list" if args.list else "--ptx"
        if bool(words) + bool(args.pid) + bool(command) > 1:
            made.error(f"{option} takes one of FILEs, -p PID and COMMAND")
        if not (words or args.pid or command or args.ebpf):
            made.error(f"{option} needs FILEs, -p PID or -- COMMAND")
    elif len(words) > 2:
        made.error(f"too many arguments: {' '.join(words)!r}{advice}")
    else:
        try:
            args.interval = seconds(words[0]) if words else None
            args.count = positive(words[1]) if len(words) > 1 else None
        except argparse.ArgumentTypeError as error:
            name = "interval" if args.interval is None else "count"
            made.error(f"{name} {error}{advice}")
    return args


def _check_dataset(made: Parser, args: argparse.Namespace) -> None:
    """End the process if --parquet DIR comes with an option that chooses another form of the results."""
    others = {
        "--json": args.json,
        "--csv": args.csv,
        "-o": args.output,
        "--ptx": args.ptx,
        "--ebpf": args.ebpf,
    }
    for option in (option for option, given in others.items() if given):
        made.error(f"--parquet DIR and {option} exclude each other: all results go into DIR")


def _check_patches(made: Parser, args: argparse.Namespace) -> None:
    """End the process if --sass comes with an option that patches of machine code do not support."""
    if args.list or args.ptx:
        option = "--list" if args.list else "--ptx"
        made.error(
            f"--sass and {option} exclude each other: --sass measures what --list shows as SASS only;"
            " leave out --sass"
        )
    if not args.command:
        made.error(
            "--sass needs a COMMAND: nobody has tried yet whether NVIDIA's library can patch a running program;"
            " start the program with the tool"
        )
    given = {
        "--launch": args.launch != (1, None),
        "--range": bool(args.range),
        "--no-graphs": getattr(args, "graphs", None) is False,
        "--sample": args.sample > 1,
        "--budget": args.budget is not None,
    }
    for option in (option for option, is_given in given.items() if is_given):
        made.error(f"--sass and {option} exclude each other: a patched kernel has one form, for all launches")
    if getattr(args, "cupti", None) is not None and args.cupti is not False:
        made.error("--sass and --cupti exclude each other: both need the driver's interface for profilers")


def is_spec(word: str) -> bool:
    """Return whether a word of the command line is a specification, such as POINT:KERNEL."""
    return bool(_SPEC.match(word))


class PrintSchemas(argparse.Action):
    """--json-schema: print the JSON schema of each record, one a line, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import json

        assert isinstance(parser, Parser)
        parser._print_message("".join(json.dumps(one.schema) + "\n" for one in parser.declared()), sys.stdout)
        parser.exit()


class SpecsBehind(argparse.Action):
    """An option before specifications: appends `const` and each specification to `dest`. Other words after it are positional."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        own = [word for word in values if is_spec(word)]
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), (self.const, own)])
        namespace.behind = [*getattr(namespace, "behind", []), *(w for w in values if not is_spec(w))]


def parse_own(made: Parser, own: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments before ``--``, or complete them when a shell asks for that."""
    _begin(made)
    # An option whose value may be missing takes it only after "=": the next word may be the interval.
    optional = {name for action in made._actions if action.nargs == "?" for name in action.option_strings}
    return made.parse_intermixed_args([word + "=" * (word in optional) for word in own])


def parse_subcommand(made: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line of a command with subcommands, or complete it when a shell asks for that."""
    _begin(made)
    args = made.parse_args(sys.argv[1:] if argv is None else argv)
    args.alone = argv is None
    return args


def _begin(made: Parser) -> None:
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(made)
    _occupy_standard_files()


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Split arguments at the first ``--``. The second part is None when there is no ``--``."""
    words = list(argv)
    if "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _occupy_standard_files() -> None:
    """Open /dev/null as each standard file that the caller closed.

    Otherwise another file would get its number, and be read or written by mistake. COMMAND still finds the file closed, because
    /dev/null is not inherited.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):  # open() takes the lowest free number, which is this one
                os.open(os.devnull, os.O_RDWR)

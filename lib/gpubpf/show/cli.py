"""What a tool's script needs of its command line and output: ``from gpubpf.show import cli``.

    @cli.command(TOOL)
    def main(argv=None):
        args = cli.parse(build_parser(), argv)
        options = cli.Options.of(args)
        out = cli.open_results(options.output)

The library imports the modules below directly. `TOOL --help` takes no time: NumPy, bcc and tabulate are imported where they are used.
"""

from __future__ import annotations

from gpubpf.show import interrupt  # first: these change how the other modules are loaded

# isort: split
import atexit
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpubpf.errors import TOO_MANY_FILES, Error, missing_package, out_of_files
from gpubpf.show import garbage
from gpubpf.show.command_line import (
    Parser,
    SpecsBehind,
    SubcommandParser,
    parse,
    parse_own,
    parse_subcommand,
    parser,
    spec_usage,
    split_command,
)
from gpubpf.show.notices import complain, note
from gpubpf.show.option_values import extents, parse_endpoint, parse_file, parse_picture, positive, seconds
from gpubpf.show.options import (
    add_accesses,
    add_budget,
    add_call_views,
    add_calls,
    add_coverage,
    add_device,
    add_embedded_device,
    add_host_filters,
    add_kernels,
    add_looks,
    add_output,
    add_patches,
    add_rings,
    add_sampling,
    add_targets,
    add_threads,
)
from gpubpf.show.output import Output, csv_cells, drop_stdout
from gpubpf.show.parsed import Options, group
from gpubpf.show.result_writer import ResultWriter, complete_results, open_results
from gpubpf.show.summary_text import host_program_lines, summary_lines
from gpubpf.show.table import printable

__all__ = [
    "Options",
    "Output",
    "Parser",
    "ResultWriter",
    "SpecsBehind",
    "SubcommandParser",
    "add_accesses",
    "add_budget",
    "add_call_views",
    "add_calls",
    "add_coverage",
    "add_device",
    "add_embedded_device",
    "add_host_filters",
    "add_kernels",
    "add_looks",
    "add_output",
    "add_patches",
    "add_rings",
    "add_sampling",
    "add_targets",
    "add_threads",
    "command",
    "complain",
    "csv_cells",
    "errors",
    "extents",
    "group",
    "host_program_lines",
    "note",
    "open_results",
    "parse",
    "parse_endpoint",
    "parse_file",
    "parse_own",
    "parse_picture",
    "parse_subcommand",
    "parser",
    "positive",
    "printable",
    "seconds",
    "spec_usage",
    "split_command",
    "summary_lines",
]


def command(tool: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Make a function `main(argv=None)` a tool's command: see `errors`. If this process runs the tool, end it with the status.

    The process ends before the interpreter is finalized. Threads may still wait in the kernel, such as for a file system that does not
    answer. If a thread wakes up during finalization, the process can crash (CPython 3.11).
    """

    ending: list[int] = []
    if _runs(tool):
        atexit.register(_end, tool, ending)  # registered first, so called last

    def made(main: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(main)
        def run(argv: list[str] | None = None) -> int:
            garbage.seldom()
            try:
                with errors(tool), complete_results():
                    status = main(argv)
            except SystemExit as leaving:
                if leaving.code is None or isinstance(leaving.code, int):
                    ending[:] = [leaving.code or 0]
                raise
            ending[:] = [status]
            return status

        return run

    return made


def _runs(tool: str) -> bool:
    """Return whether this process was started as the tool."""
    return os.path.basename(sys.argv[0]).removesuffix(".py") == tool


def _end(tool: str, ending: list[int]) -> None:
    """End the process with a status, after all other exit handlers. Without a status, let Python end it and show a traceback."""
    if not ending:
        return
    status = ending[0]
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        pass
    except (OSError, ValueError) as error:
        complain(tool, f"cannot write the results: {getattr(error, 'strerror', None) or error}")
        status = status or 1
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except (OSError, ValueError):
        pass
    os._exit(status & 0xFF)


@contextmanager
def errors(tool: str) -> Iterator[None]:
    """Turn errors into one line and an exit status. This is the only place that does so. A traceback is a bug of the tool."""
    # Again, because a module that is loaded later may turn KeyboardInterrupt into any exception.
    quiet = interrupt.ends()
    try:
        yield
    except Error as error:
        complain(tool, str(error))
        raise SystemExit(error.status) from None
    except BrokenPipeError:
        drop_stdout()
        raise SystemExit(0) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except ImportError as error:
        complain(tool, missing_package(error))
        raise SystemExit(1) from None
    except MemoryError:
        complain(tool, "out of memory; measure less with --kernel, --block or --thread")
        raise SystemExit(1) from None
    except OSError as error:
        drop_stdout()  # if standard output cannot be written, Python would try again at exit
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
        what += "; check the path, its permissions and the free space"
        complain(tool, TOO_MANY_FILES if out_of_files(error) else what)
        raise SystemExit(1) from None
    finally:
        # Ctrl-C must end the program quietly even while Python waits for threads at exit, where no code would catch it.
        if quiet and not _runs(tool):
            interrupt.raises()


if interrupt.loading:
    interrupt.raises()

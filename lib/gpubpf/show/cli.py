"""What every tool shares towards its user: options, the command line, errors, notices, results.

Everything heavy is imported where it is used: `TOOL --help` needs no NumPy, no bcc, and no time.

A tool's parsed command line has these attributes, whichever options it takes:

    tool         str                the tool's name, for `note`
    out          Output             results; opened by `open_results`
    command      list[str] | None   COMMAND [ARG…] after ``--``
    pid          list[int]          -p
    files        list[str]          FILE… of --list and --ptx
    interval     float | None       seconds
    count        int | None         how many intervals
    kernel       list[str]          globs or mangled names; empty means every kernel
    launch       (int, int | None)  first and last launch of each kernel and process, from 1; None: no end
    sample       int                one launch in N
    block        Ranges             index ranges of x, y, z, each (first, last), inclusive
    thread       Ranges
    device       "auto" | "gpu" | "sim"
    map_memory   int                bytes
    alone        bool               the process is the tool's own: nobody called it as a function
    duration     float | None       seconds
    cgroup       int | None         --cgroup: the cgroup's id
    comm         str | None         --comm
    tid          int | None         -t
    user         str | None
    output       str | None         -o FILE
    list, ptx, ebpf, json, csv, timestamps, verbose   bool
"""

from __future__ import annotations

from gpubpf.show import interrupt  # first: Ctrl-C may come while the others are loaded

# isort: split
import argparse
import errno
import os
import select
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from gpubpf import __version__
from gpubpf.errors import Error, UsageError
from gpubpf.show import table
from gpubpf.show.table import printable

Range = tuple[int, int]
Ranges = tuple[Range, Range, Range]

LARGEST_INDEX = 2**32 - 1
EVERYTHING: Range = (0, LARGEST_INDEX)
SITE_RANGES = 8  # of --site: as many as device programs look at
_SIZE_SUFFIXES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


# --- values ---


def parse_range(text: str) -> Range:
    """``7`` is (7, 7), ``2:5`` is (2, 5), ``:5`` is (0, 5), ``*`` is everything. Both ends are in it."""
    if text == "*":
        return EVERYTHING
    first, colon, last = text.partition(":")
    low = _whole(first, 0 if colon else None)
    high = _whole(last, LARGEST_INDEX) if colon else low
    if low > high or high > LARGEST_INDEX:
        raise argparse.ArgumentTypeError(f"{text!r} is an empty range")
    return low, high


def parse_ranges(text: str) -> Ranges:
    """``X[,Y[,Z]]``, each as in `parse_range`; what is left out means everything."""
    parts = [parse_range(part) for part in text.split(",")]
    if len(parts) > 3:
        raise argparse.ArgumentTypeError(f"{text!r} has more than three dimensions")
    x, y, z = (parts + [EVERYTHING] * 3)[:3]
    return x, y, z


def parse_launches(text: str) -> tuple[int, int | None]:
    """``N:M`` is (N, M), ``N:`` is (N, None), ``:M`` is (1, M), ``N`` is (N, N). Launches count from 1."""
    first, colon, last = text.partition(":")
    low = _whole(first, 1 if colon else None)
    high = (_whole(last) if last else None) if colon else low
    if low < 1 or (high is not None and high < low):
        raise argparse.ArgumentTypeError(f"{text!r} is an empty range (launches count from 1)")
    return low, high


def parse_sites(text: str) -> tuple[Range, ...]:
    """``N[,N…]``, each a number or ``A:B``: ranges, as few as there can be, at most SITE_RANGES."""
    found: list[Range] = []
    for low, high in sorted(parse_range(part) for part in text.split(",")):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    if len(found) > SITE_RANGES:
        raise argparse.ArgumentTypeError(f"{text!r} has more than {SITE_RANGES} ranges of sites")
    return tuple(found)


def parse_addresses(text: str) -> Range:
    """``LO:HI``, both in it, or one address; 0x… or decimal."""
    first, colon, last = text.partition(":")
    try:
        low = int(first, 0) if first else 0
        high = (int(last, 0) if last else 2**64 - 1) if colon else low
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no range of addresses, such as 0x7f0000000000:0x7f00000fffff"
        ) from None
    if not 0 <= low <= high < 2**64:
        raise argparse.ArgumentTypeError(f"{text!r} is an empty range")
    return low, high


def parse_size(text: str) -> int:
    """Bytes: ``256M``, ``1G``, ``4096``. K, M, G and T are powers of 1024."""
    digits = text.rstrip("BbIi").upper()
    suffix = digits[-1:] if digits[-1:].isalpha() else ""
    number = digits.removesuffix(suffix) if suffix else digits
    size = int(number) * _SIZE_SUFFIXES.get(suffix, 0) if _is_whole(number) else 0
    if not 0 < size < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; such as 64M or 1G")
    return size


def _parse_part(text: str) -> int:
    """One in so many: a whole number from 1 that has room in 32 bits on the device."""
    number = positive(text)
    if number >= 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r} is larger than {(1 << 32) - 1}")
    return number


def parse_pids(text: str) -> list[int]:
    """``PID[,PID…]``"""
    return list(dict.fromkeys(positive(part) for part in text.split(",")))


def parse_cgroup(text: str) -> int:
    """The id of a cgroup: that number, or the directory of a cgroup v2, as a path or as /proc/PID/cgroup has it."""
    if _is_whole(text):
        return positive(text)
    roots = ("", "/sys/fs/cgroup/", "/sys/fs/cgroup/unified/")
    for root in roots:
        place = root + (text.lstrip("/") if root else text)
        if os.path.exists(os.path.join(place, "cgroup.controllers")):  # each cgroup v2 has that
            return os.stat(place).st_ino
    if os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no cgroup of version 2")
    raise argparse.ArgumentTypeError(f"there is no cgroup {text!r}")


def parse_comm(text: str) -> str:
    """A thread's name: 1 to 15 bytes, all that the kernel keeps."""
    if not 0 < len(text.encode()) < 16:
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a thread: those have 1 to 15 bytes")
    return text


def positive(text: str) -> int:
    """A whole number from 1."""
    if not _is_whole(text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def seconds(text: str) -> float:
    """A time in seconds, more than 0; fractions allowed."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no time in seconds")
    return value


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def _whole(text: str, default: int | None = None) -> int:
    if not text and default is not None:
        return default
    if not _is_whole(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


# --- options: one factory each, so that a letter means one thing in every tool ---


class Parser(argparse.ArgumentParser):
    """Usage errors are one line and exit status 2."""

    def error(self, message: str) -> NoReturn:
        complain(self.prog, f"{message}; see {self.prog} --help")
        raise SystemExit(2)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """After --help and --version: what cannot be written is noticed here."""
        if sys.stdout is not None:
            sys.stdout.flush()
        super().exit(status, message)


def parser(tool: str, description: str, examples: str, usage: str | None = None) -> Parser:
    """A tool's parser, with -h and --version. `examples` is printed below the options as it stands."""
    made = Parser(
        prog=tool,
        usage=usage or f"{tool} [options] [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--version", action="version", version=f"{tool} (gpubpf) {__version__}")
    made.set_defaults(
        command=None,
        pid=[],
        files=[],
        interval=None,
        count=None,
        kernel=[],
        launch=(1, None),
        sample=1,
        block=(EVERYTHING,) * 3,
        thread=(EVERYTHING,) * 3,
        device="auto",
        map_memory=2**28,
        duration=None,
        cgroup=None,
        comm=None,
        tid=None,
        user=None,
        output=None,
        **dict.fromkeys(("list", "ptx", "ebpf", "json", "csv", "timestamps", "verbose"), False),
    )
    return made


def add_targets(made: Parser) -> None:
    """Whom to watch, and for how long: -p, --user, -d, interval, count; COMMAND is split off before."""
    group = made.add_argument_group("whom to watch, for how long")
    group.add_argument(
        "positional", nargs="*", metavar="interval [count]", help="print every so many seconds, so many times"
    )
    group.add_argument(
        "-p",
        dest="pid",
        action="extend",
        type=parse_pids,
        metavar="PID[,PID...]",
        help="these processes, which run already, from now on (without -p and COMMAND: every process, as root)",
    )
    group.add_argument(
        "-d",
        "--duration",
        type=seconds,
        metavar="S",
        help="end the measurement after S seconds (fractions allowed)",
    )
    group.add_argument(
        "--user", metavar="NAME", help="run COMMAND as NAME (default under sudo: who called sudo)"
    )


def add_kernels(made: Parser) -> None:
    """Which kernels and launches: --kernel, --launch, --sample, --graphs."""
    group = made.add_argument_group("which kernels and launches")
    group.add_argument(
        "--kernel",
        action="append",
        metavar="GLOB",
        help="kernels whose demangled name (without template arguments and parameter list) matches, "
        "or whose mangled name equals GLOB; repeatable",
    )
    group.add_argument(
        "--launch",
        type=parse_launches,
        metavar="N:M",
        help="only the Nth to Mth launch of each kernel and process (from 1, inclusive)",
    )
    group.add_argument("--sample", type=positive, metavar="N", help="one launch in N")
    group.add_argument(
        "--graphs",
        action="store_true",
        default=None,
        help="also kernels in CUDA graphs, where no real driver has proven it; on the embedded device they always are",
    )


def chooses_threads(args: argparse.Namespace) -> bool:
    """Whether --block or --thread leave anything out."""
    return any(extent != EVERYTHING for extent in (*args.block, *args.thread))


def add_threads(made: Parser) -> None:
    """Which threads: --block, --thread. The filter acts on the device."""
    group = made.add_argument_group("which threads (each a number, A:B or *; left out means *)")
    group.add_argument(
        "--block", type=parse_ranges, metavar="X[,Y[,Z]]", help="only blocks with these indices"
    )
    group.add_argument(
        "--thread", type=parse_ranges, metavar="X[,Y[,Z]]", help="only threads with these indices"
    )


def add_host_filters(made: Parser, what: str = "launches") -> None:
    """Which host threads: --cgroup, --comm, -t. The host program filters, see `gpu_host_selected` in gpubpf.h."""
    group = made.add_argument_group("which host threads")
    group.add_argument(
        "--cgroup",
        type=parse_cgroup,
        metavar="PATH|ID",
        help=f"only {what} by threads in this cgroup (v2) and those below it",
    )
    group.add_argument("--comm", type=parse_comm, metavar="NAME", help=f"only {what} by threads of this name")
    group.add_argument("-t", dest="tid", type=positive, metavar="TID", help=f"only {what} by this thread")


def add_calls(made: Parser) -> None:
    """Which calls of a host API: --api, --kernel, --launch, --sample, --errors, --slow."""
    group = made.add_argument_group("which calls")
    group.add_argument(
        "--api",
        action="append",
        default=[],
        metavar="GLOB",
        help="only functions whose name matches; repeatable (default: all but those that do next to nothing)",
    )
    group.add_argument(
        "--kernel",
        action="append",
        metavar="GLOB",
        help="only launches of kernels whose demangled name (without template arguments and parameter list) "
        "matches, or whose mangled name equals GLOB; repeatable",
    )
    group.add_argument(
        "--launch",
        type=parse_launches,
        metavar="N:M",
        help="only the Nth to Mth launch of each kernel and process (from 1, inclusive)",
    )
    group.add_argument(
        "--sample", type=positive, metavar="N", help="one launch in N of each kernel and process"
    )
    group.add_argument("--errors", action="store_true", help="only calls that failed")
    group.add_argument(
        "--slow",
        type=positive,
        metavar="US",
        help="only calls that took longer, each with what happened inside",
    )


def add_call_views(made: Parser) -> None:
    """What to show of calls: -e, --why, --timeline, --trace."""
    group = made.add_argument_group("what to show (default: a summary by function and by kernel)")
    group.add_argument("-e", "--snoop", dest="each", action="store_true", help="a line for each call")
    group.add_argument(
        "--why", action="store_true", help="what calls, and gaps between launches, spent their time on"
    )
    group.add_argument("--timeline", action="store_true", help="what each thread did, in order")
    group.add_argument("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev")


def parse_granule(text: str) -> int:
    """Bytes: a power of two, at most 1 MB."""
    size = parse_size(text)
    if size & (size - 1) or not 0 < size <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a power of two between 1 and 1M")
    return size


def add_device(made: Parser) -> None:
    """Where device programs run, and with how much memory: --device, --map-memory."""
    group = made.add_argument_group("device")
    group.add_argument(
        "--device",
        choices=("auto", "gpu", "sim"),
        help="a GPU, or the embedded device (default auto: a GPU if there is one)",
    )
    group.add_argument(
        "--map-memory", type=parse_size, metavar="SIZE", help="GPU memory for maps (default 256M)"
    )


def add_rings(made: Parser) -> None:
    """Where records of device programs go until the tool has read them: --ring-size, --ring."""
    group = made.add_argument_group("records")
    group.add_argument(
        "--ring-size", type=parse_size, metavar="SIZE", help="memory for records that are not read yet"
    )
    group.add_argument(
        "--ring", choices=("host", "gpu"), help="where that is: the host's memory (default) or the GPU's"
    )


def add_accesses(made: Parser) -> None:
    """Every memory access: -e, --parquet, --heatmap, and which: --site, --address, --warps. The filters act on the device."""
    group = made.add_argument_group("every access (instead of tables)")
    group.add_argument("-e", dest="each", action="store_true", help="a line for each access of each thread")
    group.add_argument("--parquet", metavar="FILE", help="the same into a Parquet file")
    group.add_argument(
        "--heatmap", metavar="FILE", help="a picture (.svg or .png): accesses by address and time"
    )
    group.add_argument(
        "--site",
        type=parse_sites,
        default=(),
        metavar="N[,N...]",
        help="only at these places in the kernel, numbers or A:B, as tables and --json number them",
    )
    group.add_argument(
        "--address",
        type=parse_addresses,
        metavar="LO:HI",
        help="only what touches these addresses (of shared and local memory: offsets)",
    )
    group.add_argument("--warps", type=_parse_part, default=1, metavar="N", help="one warp in N")


def records_accesses(args: argparse.Namespace) -> bool:
    """Whether every access is asked for. Raises UsageError where only its filters are, or what cannot be had together with it."""
    for option, file in (("--parquet", args.parquet), ("--heatmap", args.heatmap)):
        if file == "":
            raise UsageError(f"{option} has an empty name; give one")
    asked = bool(args.each or args.parquet or args.heatmap)
    if asked and args.footprint:
        raise UsageError(
            "--footprint is added up, -e, --parquet and --heatmap record each access; run it twice"
        )
    if not asked and (args.site or args.address or args.warps > 1):
        raise UsageError(
            "--site, --address and --warps choose of every access; add -e, --parquet or --heatmap"
        )
    return asked


def add_coverage(made: Parser) -> None:
    """Which bytes are touched: --no-allocations, --footprint, --granule."""
    group = made.add_argument_group("which bytes of memory are touched")
    group.add_argument(
        "--no-allocations",
        dest="allocations",
        action="store_false",
        help="do not say which bytes of each allocation are read, written, never touched; it costs less",
    )
    group.add_argument(
        "--footprint",
        action="store_true",
        help="of each kernel, how much different memory it touches and how often it comes back to it",
    )
    group.add_argument(
        "--granule",
        type=parse_granule,
        default=1,
        metavar="BYTES",
        help="tell bytes apart in groups of so many, a power of two: for programs with much memory (default 1: exact)",
    )


def add_looks(made: Parser, device_programs: bool = True) -> None:
    """Instead of measuring: --list, --ptx (of tools with device programs), --ebpf."""
    group = made.add_argument_group("instead of measuring")
    group.add_argument(
        "--list",
        action="store_true",
        help="the kernels of FILE..., of -p PID or of COMMAND, and why each can or can't be instrumented"
        if device_programs
        else "the libraries of FILE..., of -p PID or of COMMAND, which of their functions have probes, and kernels",
    )
    if device_programs:
        group.add_argument("--ptx", action="store_true", help="the instrumented PTX of the same")
    group.add_argument("--ebpf", action="store_true", help="print the program's C text and exit")


def add_output(made: Parser) -> None:
    """Where results go and how they look: -o, --json, --csv, -T, -v."""
    group = made.add_argument_group("results")
    group.add_argument("-o", dest="output", metavar="FILE", help="results to FILE (default: standard output)")
    form = group.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="JSON Lines; fields are in the man page")
    form.add_argument("--csv", action="store_true", help="CSV of the main table")
    group.add_argument("-T", dest="timestamps", action="store_true", help="print the time with each result")
    group.add_argument("-v", dest="verbose", action="store_true", help="more")


def parse(made: Parser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, as described at the top. Leaves with status 2 and one line when it makes no sense."""
    own, command = split_command(sys.argv[1:] if argv is None else argv)
    args = parse_own(made, own)
    args.tool = made.prog
    args.command = command
    args.alone = argv is None
    words = args.__dict__.pop("positional", [])
    if command == []:
        made.error("no COMMAND after '--'")
    if command and args.pid:
        made.error("-p and COMMAND exclude each other")
    if args.list or args.ptx:
        args.files = words
        asked = "--list" if args.list else "--ptx"
        if bool(words) + bool(args.pid) + bool(command) > 1:
            made.error(f"{asked} takes FILEs, -p PID or COMMAND, one of them")
        if not (words or args.pid or command or args.ebpf):
            made.error(f"{asked} needs FILEs, -p PID or -- COMMAND")
    elif len(words) > 2:
        made.error(f"too many arguments: {' '.join(words)!r}; a command goes behind '--'")
    else:
        try:
            args.interval = seconds(words[0]) if words else None
            args.count = positive(words[1]) if len(words) > 1 else None
        except argparse.ArgumentTypeError as error:
            made.error(f"{error} (interval, count); a command goes behind '--'")
    return args


def parse_own(made: Parser, own: Sequence[str]) -> argparse.Namespace:
    """A command's own arguments; also the answer to a shell that completes them."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(made)
    _occupy_standard_files()
    return made.parse_intermixed_args(own)


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """A tool's own arguments, and what comes behind the first ``--`` (None: there is none)."""
    words = list(argv)
    if "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]


# --- talk: standard error ---


def note(tool: str, text: str) -> None:
    """A notice: what a user should know about the result, or about what happens."""
    complain(tool, f"note: {text}")


def complain(tool: str, text: str) -> None:
    """An error, or what else is said in one line. A closed or full standard error is no reason to stop measuring."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(printable(f"{tool}: {text}") + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


def _occupy_standard_files() -> None:
    """Where the caller closed standard files: let nothing else get their numbers, or it would be read and written by mistake.

    COMMAND finds them closed still: the files are not inheritable.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):  # the lowest free number, which is this one
                os.open(os.devnull, os.O_RDWR)


@contextmanager
def errors(tool: str) -> Iterator[None]:
    """The one place where errors become a line and an exit status. A traceback that gets out is our bug."""
    quiet = interrupt.ends()  # also later: modules that are being loaded may make anything of an exception
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
    except ModuleNotFoundError as error:
        complain(
            tool,
            f"Python's module {error.name} is missing; run script/setup, which installs {tool} with all it needs",
        )
        raise SystemExit(1) from None
    except MemoryError:
        complain(tool, "out of memory; narrow it with --kernel, --block or --thread")
        raise SystemExit(1) from None
    except OSError as error:
        drop_stdout()  # if this is what cannot be written, Python would try again at exit
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
        complain(tool, f"{what}; check the path, its permissions and the space left")
        raise SystemExit(1) from None
    finally:
        if quiet:
            interrupt.raises()


def drop_stdout() -> None:
    """Nobody reads any more: make what is still buffered, and Python's flush at exit, go nowhere."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError, AttributeError):
        pass


# --- results ---


class Output:
    """Where results go: standard output or ``-o FILE``, as bytes in UTF-8, flushed with every call.

    `closed` turns true when the reader has gone (a closed pipe): what is written then is dropped.
    `began` turns true with the first write.
    """

    def __init__(self, path: str | None = None):
        self.closed = False
        self.began = False
        self._file: Any = None
        if path is None:
            return
        try:
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (open as long as the tool runs)
        except OSError as error:
            raise Error(
                f"cannot write {printable(path)}: {error.strerror}; choose another file with -o"
            ) from None

    def write(self, data: str | bytes) -> None:
        """Write all of `data`. Raises Error when the file is full."""
        self.began = True
        if self.closed:
            return
        raw = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
        view = memoryview(raw)
        try:
            if self._file is None and sys.stdout is None:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            if self._file is None:
                sys.stdout.flush()
                target = getattr(sys.stdout, "buffer", None)
                if target is None:  # a stdout that a test or a caller put in place
                    sys.stdout.write(raw.decode())
                else:  # not through its buffer, which loses the rest where a signal comes in the middle (CPython 3.11)
                    _write_all(getattr(target, "raw", target), view)
            else:
                _write_all(self._file, view)
        except BrokenPipeError:
            self.closed = True
            if self._file is None:
                drop_stdout()
        except OSError as error:
            raise Error(
                f"cannot write the results: {error.strerror}; make room or choose another file with -o"
            ) from None

    def line(self, text: str = "") -> None:
        """One line for people; what a target named itself is escaped."""
        self.write(printable(text) + "\n")

    def lines(self, texts: Iterable[str]) -> None:
        """Many lines for people in few writes."""
        from itertools import islice

        rest = iter(texts)
        while chunk := list(islice(rest, 4096)):
            self.write("".join(printable(text) + "\n" for text in chunk))

    def record(self, **fields: Any) -> None:
        """One JSON Lines record."""
        self.records([fields])

    def records(self, records: Iterable[Mapping[str, Any]]) -> None:
        """JSON Lines records, many in one write."""
        import json
        from itertools import islice

        rest = iter(records)
        while chunk := list(islice(rest, 4096)):
            self.write("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in chunk))


def open_results(args: argparse.Namespace) -> Output:
    """Open where results go, before anything is started; kept as `args.out` for whoever writes records besides the tool."""
    args.out = Output(args.output)
    return args.out


def _write_all(file: Any, view: memoryview) -> None:
    """Raises OSError."""
    while view:
        written = file.write(view)
        if written is None:  # a terminal or pipe that does not block, and is full
            select.select([], [file], [])
        view = view[written or 0 :]


def csv_cells(cells: Iterable[object]) -> str:
    """Cells with commas between them, quoted where RFC 4180 wants it and fit for a terminal; a tuple is a cell for each of
    its elements."""
    quoted = []
    for part in (part for cell in cells for part in (cell if isinstance(cell, tuple) else (cell,))):
        text = printable(str(part))
        quoted.append('"' + text.replace('"', '""') + '"' if any(char in text for char in ',"') else text)
    return ",".join(quoted)


def host_programs(summary: Mapping[str, Any]) -> list[str]:
    """What programs in the kernel cost, from the `summary` record: for `-v`."""
    return [
        f"in the kernel, {name} ran {cost['runs']:,} times, {cost['mean_ns']:,} ns each"
        for name, cost in summary.get("host_programs", {}).items()
    ]


def coverage(summary: Mapping[str, Any]) -> list[str]:
    """The last lines of every report, from the `summary` record: what was counted, what was not and why, what was lost."""
    seen, matched, instrumented = (
        summary[f"launches_{what}"] for what in ("seen", "matched", "instrumented")
    )
    if not seen:
        lines = ["counted nothing: no launches seen"]
    elif not matched:
        lines = [f"counted nothing: none of the launches seen ({seen:,}) is of a kernel asked for"]
    else:
        lines = [
            f"counted {instrumented:,} of {matched:,} launches of the kernels asked for ({seen:,} seen in all)"
        ]
        reasons = sorted(summary["not_instrumented"].items(), key=lambda item: (-item[1], item[0]))
        lines += [f"  not counted: {number:,} ({reason})" for reason, number in reasons]
    if unknown := summary.get("launches_unknown"):
        lines.append(
            f"{unknown:,} of the launches seen are of kernels loaded before, whose names are not known"
        )
    if unseen := summary.get("not_probed"):
        places = (f"{opcode} ({n:,} {'place' if n == 1 else 'places'})" for opcode, n in unseen.items())
        lines.append(f"not probed: {', '.join(places)}")
    if summary["lost"]:
        lines.append(
            f"lost: {summary['lost']:,} for which maps had no room, or whose kernel or process failed"
        )
    if graphs := summary.get("graphs_before"):
        lines.append(
            f"{graphs:,} launches of graphs made before the tool came: what is in them is neither known nor counted"
        )
    if processes := summary.get("processes"):
        missed = sorted(processes["missed"].items(), key=lambda item: (-item[1], item[0]))
        said = "; missed: " + ", ".join(f"{number:,} ({reason})" for reason, number in missed)
        lines.append(f"processes measured: {processes['measured']:,}{said if missed else ''}")
    if "overhead" in summary:
        lines.append(_own_part(summary["overhead"]))
    return [part for line in lines for part in table.wrap(line.lstrip(), len(line) - len(line.lstrip()))]


def _own_part(overhead: Mapping[str, Any]) -> str:
    """What the tool itself cost, in a line."""
    said = []
    if overhead["hooks"] is None:
        said.append("none, on the virtual clock")
    elif not overhead["hooks"]:
        said.append("no calls came through hooks")
    else:
        took = overhead["hooks_ns"]
        what = f"about {table.count(overhead['hooks'], 'hooked call')}"
        said.append(what if took is None else f"{what} took {table.duration(took)} in all")
    more = overhead["registers"]
    if more is not None:
        least = f"up to {table.count(more, 'register')}" if more > 0 else "no register"
        said.append(f"kernels need {least} more")
    if overhead["drained_bytes"]:
        said.append(f"{table.size(overhead['drained_bytes'])} read")
    if overhead["stood_ns"]:
        said.append(f"threads stood still for {table.duration(overhead['stood_ns'])} in all")
    return f"the tool's own part: {'; '.join(said)}"


if interrupt.loading:
    interrupt.raises()

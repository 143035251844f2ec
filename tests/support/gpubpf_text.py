"""For tests of what people read: names that are hard to show, and what is true of every report."""

from __future__ import annotations

import argparse
import csv
import functools
import importlib
import io
import json
import re
from collections.abc import Iterable
from typing import Any

from gpubpf.names import demangle
from gpubpf.show import cli
from gpubpf.show.table import WIDTH, printable
from gpubpf_schema import check_records

# Names come from traced processes: they may be long, foreign, or escape sequences for the user's terminal.
COMMS = (
    "app",
    "c" * 15,
    "\x1b[2J\x1b[31m",
    "a b\nc\t",
    "naïve",
    "日本語",
    "\udcff" * 15,
    "",
    "\x07" * 15,
    "50%s",
)
KERNELS = (
    *("scale", "_Z5scalePfi", "_ZN2ns5scaleIfEEvPf", "k" * 500, "_Z" + "500" + "k" * 500 + "v", ""),
    *(
        "_Z1kI" + "f" * 500 + "Evv",
        "\x1b]0;title\x07kernel",
        "Kernel_ünï_日本語",
        "\x00" * 40,
        "a\nb\r",
        "k%s%d{}",
    ),
    *(
        "\udcff" * 60,
        "_ZZ4mainENKUlvE_clEv",
        "_ZN3fmt2v96detail" + "9templated" * 20 + "Ev",
        "\u202ereversed",
    ),
)
SHORT_NAME = 20  # columns
# A sentence about a time that is shown as 0 ns.
NO_TIME = re.compile(r"(?<![\w.,])0 ns (after|before|apart|of each other)|(up to|at most|last|to) 0 ns\b")
PIDS = (1, 4194304, *range(2, 12))
FILES = (
    "a.cu",
    "a_file_with_a_long_name_in_a_deep_directory.cuh",
    "/tmp/\x1b[31m.cu",
    "ünï.cu",
    "",
    "PTX.cu",
)


class Page(cli.Output):
    """An output that keeps what would have reached the terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = b""

    def write(self, data: str | bytes) -> None:
        self.began = True
        self.raw += data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data


def opened(tool: str, *options: str) -> tuple[Any, argparse.Namespace, Page, cli.ResultWriter]:
    """Return a tool as a module, the arguments of `options`, a page, and what writes results to it."""
    module = importlib.import_module(f"gpubpf.tools.{tool}")
    args = cli.parse(module.build_parser(), [*options, "--", "true"])
    page = Page()
    return module, args, page, cli.ResultWriter(cli.Options.of(args).output, page, lambda: 1)


@functools.cache
def long_names() -> list[str]:
    """Return what -v may print of the names above, where it is long."""
    kernels = [form for kernel in map(demangle, KERNELS) for form in (kernel.full, kernel.short)]
    return longest([printable(name) for name in (*kernels, *KERNELS, *COMMS, *FILES)])


def longest(names: Iterable[str]) -> list[str]:
    """Return the long names, the longest first."""
    return sorted((name for name in {*names} if len(name) > SHORT_NAME), key=len, reverse=True)


def shortened(text: str, names: list[str]) -> str:
    """Return a text with these names cut short, and narrower columns if it has any of them."""
    short = text
    for name in names:
        short = short.replace(name, name[:SHORT_NAME])
    return re.sub(" {3,}", "  ", short) if short != text else text


def check(
    page: Page,
    args: argparse.Namespace,
    shares: bool = True,
    negative: bool = False,
    wide: str | None = None,
    verbose: int = WIDTH,
    values: bool = False,
    names: Iterable[str] = (),
) -> list[str]:
    """Check what a tool has printed; return its lines.

    shares     all percentages are parts of a whole
    negative   there may be times below 0
    wide       lines that contain this may be wider than a terminal
    verbose    columns of a line with -v, full names not counted
    values     there may be values of the traced program, such as NaN
    names      what -v prints in full beside the names above
    """
    wrong = ("None",) if values else ("nan", "inf", "None")
    text = page.raw.decode()
    lines = text.split("\n")[:-1]
    assert not text or text.endswith("\n")
    if args.json:
        for line in lines:
            json.loads(line, parse_constant=_refused)
        check_records(
            args.tool, (line for line in lines if '"type":"summary"' not in line)
        )  # those are made up
        return lines
    assert all(line.isprintable() for line in lines), next(line for line in lines if not line.isprintable())
    if args.csv:
        rows = list(csv.reader(io.StringIO(text)))
        assert len({len(row) for row in rows}) <= 1, rows
        assert not any(cell in wrong for row in rows for cell in row), rows
        return lines
    most, shown = (
        (verbose, shortened(text, longest([*long_names(), *names]))) if args.verbose else (WIDTH, text)
    )
    for line in shown.splitlines():
        assert len(line) <= most or (wide is not None and wide in line), f"{line!r} in\n{text}"
    for line in lines:
        assert not re.search(rf"(?<!\w)({'|'.join(wrong)})(?!\w)", line), f"{line!r} in\n{text}"
        assert negative or not re.search(r"(?<![\w.:,)\]-])-\d[\d.,]*( (ns|us|ms|s)\b|s?$)", line), "\n".join(
            lines
        )
        assert not NO_TIME.search(line), f"{line!r} in\n{text}"
        # A sentence without an end, or without a part.
        assert (values and wide is not None and wide in line) or not re.search(
            r"[:;,] *[;,]|(?<=\s)\( *\)|: and\b|\bof  ", line
        ), f"{line!r} in\n{text}"
        for share in re.findall(r"(-?[\d.,]+) ?%(?! (more|less))", line) if shares else ():
            assert 0 <= float(share[0].replace(",", "") or 0) <= 100, f"{line!r} in\n{text}"
    return lines


def _refused(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")

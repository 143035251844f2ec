"""Open a tool's results, and complete them when the tool ends: standard output, ``-o FILE`` or ``--parquet DIR``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from gpubpf.show.command_line import declared
from gpubpf.show.output import Output

_opened: list[Output] = []  # by `open_results`; not complete yet


def open_results(args: argparse.Namespace) -> Output:
    """Open the output before anything else starts. It is also kept as `args.out`, for code that writes records beside the tool.

    `complete_results` completes it."""
    if args.dataset:
        from gpubpf.show.dataset import Dataset  # imported here because it is seldom needed

        args.out = Dataset(args.dataset, args.tool, declared(args.records))
    else:
        args.out = Output(args.output)
    _opened.append(args.out)
    return args.out


@contextmanager
def complete_results() -> Iterator[None]:
    """When the block ends, however it ends, complete what was opened in it."""
    before = len(_opened)
    try:
        yield
    finally:
        opened = _opened[before:]
        del _opened[before:]
        for out in opened:
            out.close()

"""Open a tool's results, and complete them when the tool ends: standard output, ``-o FILE`` or ``--parquet DIR``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpubpf.show.command_line import declared
from gpubpf.show.output import Output
from gpubpf.show.parsed import OutputOptions

_opened: list[Output] = []  # by `open_results`; not complete yet


def open_results(options: OutputOptions) -> Output:
    """Open the output before anything else starts. `complete_results` completes it."""
    if options.dataset:
        from gpubpf.show.dataset import Dataset  # imported here because it is seldom needed

        out: Output = Dataset(options.dataset, options.tool, declared(options.records))
    else:
        out = Output(options.path)
    _opened.append(out)
    return out


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

"""Whose a row of a table is: the columns PID and COMM where a measurement is of several processes, GPU where kernels ran on several.

    whose = Whose(session.several)
    whose.see(rows)                          # anything with pid, comm and gpu
    for row in rows:
        cells = whose.cells(row) | {"KERNEL": …}

With one process and one GPU nothing is added. A column that is there once stays, so that intervals look alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from gpubpf.show import cli, table

if TYPE_CHECKING:
    from gpubpf.show.bulk_text import Column

MOST_SECTIONS = (
    8  # of several processes so many kernels are shown one by one without -v, below a table of all
)


class Row(Protocol):
    """Something that a process did on a GPU."""

    @property
    def pid(self) -> int: ...
    @property
    def comm(self) -> str: ...
    @property
    def gpu(self) -> int: ...


class Owner(NamedTuple):
    """A process and one of its GPUs: a `Row`."""

    pid: int
    comm: str
    gpu: int


class Whose:
    """Remembers of which processes and GPUs rows have come. `asked`: for several processes, by the user."""

    def __init__(self, asked: bool = False) -> None:
        self.asked = asked
        # Of very many it is enough to know that they are several.
        self._processes: set[tuple[int, str]] = set()
        self._gpus: set[int] = set()

    def see(self, rows: Iterable[Row]) -> Whose:
        """Takes note of rows that are to be shown. Gives itself."""
        for row in rows:
            if len(self._processes) < 2:
                self._processes.add((row.pid, row.comm))
            if len(self._gpus) < 2:
                self._gpus.add(row.gpu)
        return self

    @property
    def processes(self) -> bool:
        """There are several, or may be."""
        return self.asked or len(self._processes) > 1

    @property
    def gpus(self) -> bool:
        """There are several."""
        return len(self._gpus) > 1

    @property
    def several(self) -> bool:
        return self.processes or self.gpus

    def cells(self, row: Row) -> dict[str, str]:
        """Columns that say whose the row is: none, where all are of one process and GPU."""
        cells = {"PID": str(row.pid), "COMM": row.comm} if self.processes else {}
        return cells | ({"GPU": str(row.gpu)} if self.gpus else {})

    def columns(self, row: Row, count: int) -> list[tuple[Column, int]]:
        """The same for `output.aligned`, of `count` lines."""
        import numpy as np

        from gpubpf.show.bulk_text import Words

        widths = {"PID": 7, "COMM": -8, "GPU": 3}
        where = np.zeros(count, np.intp)
        made: list[tuple[Column, int]] = []
        for name, cell in self.cells(row).items():
            text = table.fit(cli.printable(cell), abs(widths[name])).encode("ascii", "replace")
            made.append((Words([text], where), widths[name]))
        return made

    @property
    def header(self) -> str:
        """Above `columns`."""
        return ("    PID COMM     " if self.processes else "") + ("GPU " if self.gpus else "")

    def name(self, row: Row) -> str:
        """For a sentence: ``app (pid 1234)``, ``app (pid 1234), GPU 1``."""
        return f"{row.comm} (pid {row.pid})" + (f", GPU {row.gpu}" if self.gpus else "")

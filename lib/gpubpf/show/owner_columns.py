"""Which process and GPU a row of a table belongs to: columns PID and COMM for several processes, GPU for several GPUs. With GPUs of
both vendors, the column GPU also names the vendor.

    owners = OwnerColumns(session.several)
    owners.see(rows)                          # anything with pid, comm and gpu
    for row in rows:
        cells = owners.cells(row) | {"KERNEL": …}

One process on one GPU has no such columns. Once a column was shown, it stays, so that the reports of all intervals look alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from gpubpf.show import table

if TYPE_CHECKING:
    from gpubpf.show.bulk_text import Column

MOST_SECTIONS = 8  # maximum kernels of several processes with a separate section below the table, without -v


class Owned(Protocol):
    """Something that a process did on a GPU."""

    @property
    def pid(self) -> int: ...
    @property
    def comm(self) -> str: ...
    @property
    def gpu(self) -> int: ...


class Owner(NamedTuple):
    """A process and one of its GPUs. It has the attributes of `Owned`."""

    pid: int
    comm: str
    gpu: int
    vendor: str = "nvidia"


class OwnerColumns:
    """The columns for the process and GPU of a row. `asked`: the user asked for several processes."""

    def __init__(self, asked: bool = False) -> None:
        self.asked = asked
        # Keep at most two of each: a third makes no difference.
        self._processes: set[tuple[int, str]] = set()
        self._gpus: set[tuple[str, int]] = set()
        self._vendors: set[str] = set()

    def see(self, rows: Iterable[Owned]) -> OwnerColumns:
        """Record the owners of rows that will be shown. Return this object."""
        for row in rows:
            if len(self._processes) < 2:
                self._processes.add((row.pid, row.comm))
            self._vendors.add(_vendor(row))
            if len(self._gpus) < 2:
                self._gpus.add((_vendor(row), row.gpu))
        return self

    @property
    def processes(self) -> bool:
        """Whether there are, or may be, several processes."""
        return self.asked or len(self._processes) > 1

    @property
    def gpus(self) -> bool:
        """Whether there are several GPUs."""
        return len(self._gpus) > 1

    @property
    def several(self) -> bool:
        """Whether there are several processes or GPUs."""
        return self.processes or self.gpus

    def cells(self, row: Owned) -> dict[str, str]:
        """Return the cells of a row by column name."""
        cells = {"PID": str(row.pid), "COMM": row.comm} if self.processes else {}
        return cells | ({"GPU": self._gpu(row)} if self.gpus else {})

    def _gpu(self, row: Owned) -> str:
        return f"{_vendor(row)} {row.gpu}" if len(self._vendors) > 1 else str(row.gpu)

    def columns(self, row: Owned, count: int) -> list[tuple[Column, int]]:
        """Return the same cells for `count` lines, as `bulk_text.aligned` takes them."""
        import numpy as np

        from gpubpf.show.bulk_text import Words

        widths = {"PID": 7, "COMM": -8, "GPU": self.gpu_width}
        codes = np.zeros(count, np.intp)
        made: list[tuple[Column, int]] = []
        for name, cell in self.cells(row).items():
            text = table.fit(table.printable(cell), abs(widths[name])).encode("ascii", "replace")
            made.append((Words([text], codes), widths[name]))
        return made

    @property
    def header(self) -> str:
        """The header above `columns`."""
        return ("    PID COMM     " if self.processes else "") + (
            f"{'GPU':>{self.gpu_width}} " if self.gpus else ""
        )

    @property
    def gpu_width(self) -> int:
        """The width of the column GPU in lines that are printed one by one."""
        return 8 if len(self._vendors) > 1 else 3

    def name(self, row: Owned) -> str:
        """Return the owner as words of a sentence: ``app (pid 1234)`` or ``app (pid 1234), GPU 1``."""
        if not self.gpus:
            return table.process(row.comm, row.pid)
        return f"{table.process(row.comm, row.pid)}, {self.gpu_name(row)}"

    def gpu_name(self, row: Owned) -> str:
        """Return the GPU as words of a sentence: ``GPU 1``, or ``AMD GPU 1`` among GPUs of both vendors."""
        return f"{_vendor(row)} GPU {row.gpu}" if len(self._vendors) > 1 else f"GPU {row.gpu}"


def _vendor(row: Owned) -> str:
    vendor = getattr(row, "vendor", "")  # a Vendor, or its word
    is_amd = getattr(row, "wave", None) or getattr(vendor, "word", vendor) == "amd"
    return "AMD" if is_amd else "NVIDIA"

"""Sum GPU time and launches by the host stack that launched, for gpuprofile. Memory depends on the number of rows, not of launches.

profile = Profile()
profile.add(view, chosen)                # any number of times
for row in profile.rows("time"):         # by kernel and stack, the largest first
    record = STACK.record(row)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from gpubpf.agent.definitions import Vendor
from gpubpf.launches import arrays
from gpubpf.launches.dependencies import NONE
from gpubpf.launches.frames import NATIVE, PYTHON, RANGE, Stack
from gpubpf.launches.launch_records import LOSSES
from gpubpf.record import MutableRecord, Record, replace
from gpubpf.records.fields import DEMANGLED, KERNEL, MANGLED, OWNER_OF_HOST, STAMP
from gpubpf.session.records import HOST_PROGRAMS, of_every_tool
from gpubpf.show.fields import Field, Fields, having, many
from gpubpf.show.table import printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpubpf.launches.latency import LaunchView
    from gpubpf.launches.launches import LoggedProcess

    Integers: TypeAlias = NDArray[np.int64]

MOST_ROWS = 1 << 17  # further stacks of a kernel share one row
# The times come from the traced process, which can log any numbers.
LONGEST = 1 << 53  # ns, 104 days: a launch that lasts longer counts as one without a known time
MOST_NS = (1 << 63) - 1  # files have 64-bit numbers


class StackRow(MutableRecord):
    """The launches of one kernel from one host stack, in one process on one GPU.

    process: number of the process in the session.
    vendor: of the GPU.
    wave: lanes of a wave on an AMD GPU; None: not known, or of another vendor.
    gpu_ns: time from start to end, summed over the launches with known times.
    launches: all launches.
    untimed: launches whose time is not known.
    """

    process: int
    pid: int
    comm: str
    gpu: int
    vendor: Vendor
    wave: int | None
    mangled: str
    stack: Stack
    gpu_ns: int = 0
    launches: int = 0
    untimed: int = 0

    def add(self, gpu_ns: int, launches: int, untimed: int) -> None:
        self.gpu_ns = min(self.gpu_ns + gpu_ns, MOST_NS)
        self.launches += launches
        self.untimed += untimed

    def empty(self) -> StackRow:
        """Return the row without launches."""
        return replace(self, gpu_ns=0, launches=0, untimed=0)

    def weight(self, by: str) -> int:
        """Return the time in ns, or the number of launches. by: "time" or "launches"."""
        return self.gpu_ns if by == "time" else self.launches

    @property
    def folded(self) -> str:
        """The stack as one line, outermost frame first, with the kernel last: `main;train;launch;scale`."""
        names = (frame.name for frame in self.stack.shown)
        return ";".join(one_word(name) for name in (*names, KERNEL.value(self)))


def one_word(name: str) -> str:
    """Return a name without what separates frames in a folded stack."""
    return printable(name).replace(";", ":")


FRAME = having(
    Field(
        "name",
        "string",
        f"the function, without template arguments and parameters; {PYTHON}: the qualified name; "
        f"{RANGE}: the range's name",
    ),
    Field(
        "file",
        "string",
        f"{NATIVE}: the source file, or without a line the program or library; {PYTHON}: the source file; {RANGE}: the domain",
    ),
    Field("line", "integer?", "in the source file; null: not known"),
    Field("object", "string", f"{NATIVE}: the program or library"),
    Field(
        "kind",
        "string",
        f"{NATIVE}: a function of a program or library; {PYTHON}: a function in Python; {RANGE}: an NVTX range, which stands "
        "before all functions; later versions may have others",
    ),
)
STACK = Fields(
    "stack",
    "One for each kernel and host stack, those with the most GPU time first (with --weight launches: the most launches).",
    (
        *OWNER_OF_HOST,
        KERNEL,
        DEMANGLED,
        MANGLED,
        Field("gpu_ns", "ns", "from the start to the end of each launch, in total"),
        Field("launches", "integer"),
        Field("untimed", "integer", "launches whose time is not in gpu_ns, because it is not known"),
        Field(
            "frames",
            many(FRAME),
            "the ranges of the program, and the host stack, outermost frame first; no frames of the stack if it is not known",
            get=lambda row: [frame._asdict() for frame in row.stack.frames],
        ),
        Field("complete", "boolean", "false if outer frames are missing", get="stack.complete"),
        STAMP,
    ),
    csv="pid comm gpu kernel gpu_ns launches untimed complete stack mangled",
    csv_fields=(Field("stack", "string", "as with --folded"),),
)
RECORDS = (STACK, *of_every_tool(HOST_PROGRAMS, *LOSSES, Field("launches_incomplete", "integer")))


class ProfileViews(Record):
    """How a profile is shown.

    weight: what counts: "time" or "launches".
    top: the number of rows to show, those with the largest weight; None: all rows.
    folded: folded stacks in place of the table.
    svg, pprof, speedscope: a file of this form; None: no such file.
    otlp: the URL of an OpenTelemetry collector; None: nothing is pushed.
    """

    weight: str = "time"
    top: int | None = None
    folded: bool = False
    svg: str | None = None
    pprof: str | None = None
    speedscope: str | None = None
    otlp: str | None = None

    @property
    def files(self) -> dict[str, str | None]:
        """The file of each form."""
        return {"svg": self.svg, "pprof": self.pprof, "speedscope": self.speedscope}


class Profile:
    """Launches by kernel and host stack."""

    def __init__(self) -> None:
        self._rows: dict[
            tuple[int, int, str, int, int], StackRow
        ] = {}  # by process, GPU, kernel, and numbers of the stack and the ranges
        self._processes: dict[int, LoggedProcess] = {}  # by number

    def add(self, view: LaunchView, chosen: Integers) -> None:
        """Add launches, given by their indices in `view`. A kernel in a graph has the stack that launched the graph."""
        columns = view.columns
        numbers = np.where(columns.parent >= 0, columns.stack[np.maximum(columns.parent, 0)], columns.stack)
        keys = (columns.process, columns.gpu, columns.name, numbers, columns.ranges)
        alike = arrays.row_numbers(*(key[chosen] for key in keys))
        order = np.argsort(alike, kind="stable")
        for place in arrays.equal_runs(alike[order]):
            some = chosen[order[place]]
            lasted = view.waits.exec[some]
            timed = lasted[(lasted != NONE) & (lasted >= 0) & (lasted <= LONGEST)]
            sums = arrays.exact_sum(timed), len(some), len(some) - len(timed)
            self._row(view, int(some[0]), int(numbers[some[0]]), int(columns.ranges[some[0]])).add(*sums)

    def _row(self, view: LaunchView, at: int, number: int, ranges: int) -> StackRow:
        columns = view.columns
        process = columns.processes[int(columns.process[at])]
        key = process.number, int(columns.gpu[at]), columns.names[int(columns.name[at])], number, ranges
        if key not in self._rows and len(self._rows) >= MOST_ROWS:
            key = (*key[:3], 0, 0)
        if key not in self._rows:
            wave = view.common(at)["wave"] if process.vendor is Vendor.AMD else None
            owner = (process.number, process.pid, process.comm, key[1], process.vendor, wave)
            self._processes[process.number] = process
            self._rows[key] = StackRow(*owner, key[2], self._stack(process.number, *key[3:]))
        return self._rows[key]

    def _stack(self, process: int, number: int, ranges: int) -> Stack:
        logged = self._processes[process]
        return Stack.of(logged.stacks.get(number, ())).within(logged.ranges.get(ranges, ()))

    def take(self, other: Profile) -> None:
        """Add the launches of another profile."""
        self._processes |= other._processes
        for key, row in other._rows.items():
            if key not in self._rows and len(self._rows) >= MOST_ROWS:
                key = (*key[:3], 0, 0)
            self._rows.setdefault(key, row.empty()).add(row.gpu_ns, row.launches, row.untimed)

    def rows(self, by: str) -> list[StackRow]:
        """Return the launches by kernel and stack, the row with the largest weight first. by: "time" or "launches".

        Stacks with the same functions are one row.
        """
        found: dict[tuple[int, int, str, Stack], StackRow] = {}
        for (process, gpu, mangled, number, ranges), row in self._rows.items():
            if (number and not row.stack.host) or (
                ranges and not row.stack.ranges
            ):  # the log may come before them
                row.stack = self._stack(process, number, ranges)
            same = found.setdefault((process, gpu, mangled, row.stack), row.empty())
            same.add(row.gpu_ns, row.launches, row.untimed)
        return sorted(
            found.values(), key=lambda row: (-row.weight(by), -row.launches, row.pid, row.gpu, row.folded)
        )


def folded_lines(rows: Iterable[StackRow], by: str, several: bool) -> Iterator[str]:
    """Yield folded stacks, as flamegraph.pl and other programs read them: `main;train;launch;scale 1200`.

    by: "time" or "launches".
    several: begin each stack with its process.
    """
    sums: dict[str, int] = {}
    for row in rows:
        process = f"{one_word(row.comm)} (pid {row.pid});" if several else ""
        text = process + row.folded
        sums[text] = sums.get(text, 0) + row.weight(by)
    yield from (f"{text} {weight}" for text, weight in sums.items() if weight)

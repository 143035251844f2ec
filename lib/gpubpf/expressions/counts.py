"""What gpucount counts: a number for each specification and kernel, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpubpf import names
from gpubpf.expressions.evaluate import evaluate
from gpubpf.expressions.launches import Launches
from gpubpf.expressions.specs import Spec
from gpubpf.record import Record, replace
from gpubpf.records.fields import KERNEL, MANGLED, OWNER, STAMP
from gpubpf.records.launch_shape import Warp
from gpubpf.session.records import BUDGET, LOG_LOST, NOT_PROBED, VERIFIED_BY, of_every_tool
from gpubpf.show import table
from gpubpf.show.fields import Field, Fields

if TYPE_CHECKING:
    from gpubpf.session.session import Session
    from gpubpf.show.owner_columns import OwnerColumns

# Process, GPU, kernel (mangled), number of the specification.
Place = tuple[int, int, str, int]


class Count(Record):
    """How often a point of a kernel was reached.

    count: by warps; for launches, the number of launches.
    threads: by lanes; for launches, the number of threads in their grids.
    wave: the lanes of a wave, on an AMD GPU."""

    pid: int
    comm: str
    gpu: int
    wave: int | None
    spec: Spec
    mangled: str
    count: int
    threads: int

    def plus(self, count: int, threads: int) -> Count:
        return replace(self, count=self.count + count, threads=self.threads + threads)


COUNT = Fields(
    "count",
    "One for each SPEC and kernel.",
    (
        *OWNER,
        Field("spec", "string", "as it was typed", get=lambda one: one.spec.text, header="SPEC", left=True),
        KERNEL,
        MANGLED,
        Field(
            "count",
            "integer",
            "executions by a warp with a lane that passes the filter; of kernel, launches",
            header="COUNT",
            show="{:,}".format,
        ),
        Field(
            "threads",
            "integer",
            "these lanes; of kernel, threads of the grids",
            header="THREADS",
            show="{:,}".format,
        ),
        STAMP,
    ),
    csv="pid comm gpu spec kernel count threads mangled",
    notes="With an interval, kernels that did not reach the point in it have none.",
)
RECORDS = (COUNT, *of_every_tool(BUDGET, NOT_PROBED, LOG_LOST, VERIFIED_BY))


class Counts:
    """Reads the counts of a measurement. kernels: for each specification its globs; no globs: every kernel."""

    def __init__(self, specs: Sequence[Spec], kernels: Sequence[tuple[str, ...]]) -> None:
        self._specs, self._kernels = specs, kernels
        self.launches = Launches()
        self._launched: dict[Place, Count] = {}
        self._before: dict[Place, Count] = {}

    def take(self, session: Session) -> None:
        """Take the launches since the last call. Call it at each tick."""
        wanted = [number for number, spec in enumerate(self._specs) if spec.point.of_launch]
        for log in session.logs():
            for launch in self.launches.take(log):
                for number in wanted:
                    spec = self._specs[number]
                    if names.chosen(self._kernels[number], launch.mangled) and passes(spec, launch.values):
                        place = (log.process, launch.gpu, launch.mangled, number)
                        one = Count(
                            launch.pid, launch.comm, launch.gpu, launch.wave, spec, launch.mangled, 0, 0
                        )
                        self._launched[place] = self._launched.get(place, one).plus(
                            1, launch.values["threads"]
                        )

    def read(self, session: Session, since_last: bool) -> list[Count]:
        """Return the counts by specification, the largest first. since_last: count since the last call, and leave out zeros."""
        found = dict(self._launched)
        for number, spec in enumerate(self._specs):
            if spec.point.of_launch or not session.has_map(
                f"counts_{number}"
            ):  # no map: the filter is never true
                continue
            for one in session.instances(f"counts_{number}"):
                if not names.chosen(self._kernels[number], one.mangled):
                    continue
                place = (one.process, one.gpu, one.mangled, number)
                made = Count(one.pid, one.comm, one.gpu, one.wave, spec, one.mangled, 0, 0)
                sums = (int(one.array[name].sum()) for name in ("count", "threads"))
                found[place] = found.get(place, made).plus(*sums)
        grown = found
        if since_last:
            grown = {place: one.plus(*(-n for n in self._seen(place))) for place, one in found.items()}
            grown = {place: one for place, one in grown.items() if one.count > 0}
            self._before = found
        return [grown[place] for place in sorted(grown, key=lambda place: (place[3], -grown[place].count))]

    def _seen(self, place: Place) -> tuple[int, int]:
        one = self._before.get(place)
        return (one.count, one.threads) if one else (0, 0)


def passes(spec: Spec, values: Any) -> bool:
    """Return whether a launch with these values passes the filter."""
    return spec.filter is None or evaluate(spec.filter, values) != 0


LONG = 32  # a SPEC with more characters gets a separate line


def lines(counts: Sequence[Count], owners: OwnerColumns, full: bool) -> list[str]:
    """Return the table for people. full: kernel names in full.

    Long SPECs are listed above the table, which has only their numbers."""
    if not counts:
        return ["nothing was counted"]
    owners.see(counts)
    labels = names.labels((one.mangled for one in counts), full=full)
    specs = list(dict.fromkeys(one.spec.text for one in counts))
    numbers: dict[str, str] = {}
    if not full and max(map(len, specs)) > LONG:
        numbers = {text: f"[{number}]" for number, text in enumerate(specs, 1)}
    legend = [line for text, number in numbers.items() for line in table.wrap(f"{number} {text}")]
    cells = [
        owners.cells(one)
        | COUNT.cells(one, spec=numbers.get(one.spec.text, one.spec.text), kernel=labels[one.mangled])
        for one in counts
    ]
    cut = () if full else ("KERNEL", "COMM", "SPEC")
    shown = table.within(cells, left=("COMM", *COUNT.left), cut=cut)
    warps = " and ".join(sorted({f"{Warp.of(one.wave).word}s" for one in counts}))
    heading = (
        f"COUNT: executions by {warps}; THREADS: the lanes in them",
        "(of kernel: launches; the threads of their grids)",
    )
    return [*heading, *([""] if legend else []), *legend, "", *shown]

"""What gpudist adds up: the distribution of a value for each specification and key, and how it is shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf import names
from gpubpf.expressions.counts import passes
from gpubpf.expressions.evaluate import evaluate, signed
from gpubpf.expressions.launches import Launch, Launches
from gpubpf.expressions.specs import Distribution
from gpubpf.record import MutableRecord, Record, field, replace
from gpubpf.records.fields import MANGLED, OWNER, STAMP
from gpubpf.records.kernel_shapes import file_names, site_name
from gpubpf.session.records import BUDGET, LOG_LOST, NOT_PROBED, VERIFIED_BY, of_every_tool
from gpubpf.show import histogram, table
from gpubpf.show.fields import Field, Fields

if TYPE_CHECKING:
    from gpubpf.inject.values import Site
    from gpubpf.records.results import Instance
    from gpubpf.session.session import Session
    from gpubpf.show.owner_columns import OwnerColumns

NEGATIVE = -1  # the bucket of all negative values, with log2
FEW = 40  # rows of a linear histogram, or of values, without -v
# A key: its name, and for a place in the source also its file or, without -lineinfo, its function.
Key = tuple[str, str, str]
# Process, GPU, key, number of the specification.
Place = tuple[int, int, Key, int]


class Sums(MutableRecord):
    """Values that were added up. buckets: number of the bucket, or value → how many values."""

    count: int = 0
    sum: int = 0
    buckets: Counter[int] = field(default_factory=Counter)

    @property
    def missing(self) -> int:
        """The number of values that are missing from the buckets: the table was full, or a kernel was running at the reading."""
        return max(0, self.count - self.buckets.total())

    def since(self, before: Sums) -> Sums:
        """Return the values that were added since an earlier state."""
        buckets = Counter(
            {k: n - before.buckets[k] for k, n in self.buckets.items() if n > before.buckets[k]}
        )
        return Sums(self.count - before.count, self.sum - before.sum, buckets)


class Found(Record):
    """The distribution of one specification and key in a process. wave: the lanes of a wave, on an AMD GPU."""

    pid: int
    comm: str
    gpu: int
    wave: int | None
    wanted: Distribution
    key: str
    sums: Sums

    @property
    def mangled(self) -> str:
        """The mangled name of the kernel if the key is a kernel; "" otherwise."""
        return self.key if self.wanted.key == "kernel" else ""

    @property
    def name(self) -> str:
        """The key for people. Names of kernels have no template arguments and parameters."""
        return names.demangle(self.key).short if self.mangled else self.key

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return the buckets that are not empty as (lowest value, highest value, count), in order."""
        return [(*limits(self.wanted, bucket), n) for bucket, n in sorted(self.sums.buckets.items())]

    def log2_ranges(self) -> list[tuple[int, int, int]]:
        """Return the buckets of a histogram in powers of two, from the first bucket that is not empty to the last."""
        counts = self.sums.buckets
        return [(*limits(self.wanted, n), counts[n]) for n in range(min(counts), max(counts) + 1)]

    @property
    def values(self) -> dict[str, int] | None:
        """How often each value was seen; None for a histogram."""
        return (
            {str(v): n for v, n in sorted(self.sums.buckets.items())}
            if self.wanted.kind == "values"
            else None
        )

    @property
    def buckets(self) -> list[list[int]] | None:
        """The buckets as lists; None if each value is counted."""
        return None if self.wanted.kind == "values" else [list(one) for one in self.ranges()]


DIST = Fields(
    "dist",
    "One for each SPEC and key.",
    (
        *OWNER,
        Field("label", "string", get="wanted.label"),
        Field("spec", "string", "with its filter", get="wanted.spec.text"),
        Field(
            "key",
            "string?",
            "the name of the kernel, or the file and line, with the directory or function if others have the same name; "
            "null without a key",
            get=lambda one: one.name or None,
        ),
        replace(MANGLED, get=lambda one: one.mangled or None, when="with the key kernel"),
        Field("kind", "log2|linear|values", get="wanted.kind"),
        Field("values", "{integer}", "the count of each value", "values", when="with -C"),
        Field(
            "buckets",
            "[[integer]]",
            "a list of [low,high,count], both ends included; empty ones are left out",
            "buckets",
            when="without -C",
        ),
        Field("count", "integer", "how many values there were", get="sums.count"),
        Field("sum", "integer", "of all values; it may need more than 64 bits", get="sums.sum"),
        Field(
            "missing",
            "integer",
            "values that are in count, but in none of buckets or values: they found no room, or a kernel was running when they "
            "were read",
            get="sums.missing",
        ),
        STAMP,
    ),
    csv="pid comm gpu label key low high count mangled",
    csv_fields=(Field("low", "integer"), Field("high", "integer")),
    notes="With an interval, distributions that got no value in it have none.",
)
RECORDS = (DIST, *of_every_tool(BUDGET, NOT_PROBED, LOG_LOST, VERIFIED_BY))


def limits(wanted: Distribution, bucket: int) -> tuple[int, int]:
    """Return the lowest and the highest value of a bucket."""
    if wanted.kind == "values":
        return bucket, bucket
    if wanted.kind == "linear":
        return bucket * wanted.width, min(
            (bucket + 1) * wanted.width, 1 << 63 if wanted.signed else 1 << 64
        ) - 1
    if bucket == NEGATIVE:
        return -(1 << (int(wanted.type[1:]) - 1)), -1
    return (1 << bucket if bucket else 0), (2 << bucket) - 1


def bucket_of(wanted: Distribution, value: int) -> int:
    """Return the bucket of a value."""
    if wanted.kind == "values":
        return value
    if wanted.kind == "linear":
        return value // wanted.width
    return NEGATIVE if value < 0 else max(0, value.bit_length() - 1)


def as_type(value: int, kind: str) -> int:
    """Return a number of 64 bits as one of `specs.TYPES`, as a C cast does."""
    bits = int(kind[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind.startswith("s") and value >> (bits - 1) else value


class Distributions:
    """Reads the distributions of a measurement. kernels: for each specification its globs; no globs: every kernel."""

    def __init__(self, wanted: Sequence[Distribution], kernels: Sequence[tuple[str, ...]]) -> None:
        self._wanted, self._kernels = wanted, kernels
        self.launches = Launches()
        self._launched: dict[Place, Found] = {}
        self._before: dict[Place, Sums] = {}

    def take(self, session: Session) -> None:
        """Take the launches since the last call. Call it at each tick."""
        for log in session.logs():
            for launch in self.launches.take(log):
                for number, one in enumerate(self._wanted):
                    if (
                        one.spec.point.of_launch
                        and names.chosen(self._kernels[number], launch.mangled)
                        and passes(one.spec, launch.values)
                    ):
                        self._add_launch(log.process, number, one, launch)

    def _add_launch(self, process: int, number: int, one: Distribution, launch: Launch) -> None:
        key = launch.mangled if one.key else ""
        made = Found(launch.pid, launch.comm, launch.gpu, launch.wave, one, key, Sums())
        sums = self._launched.setdefault((process, launch.gpu, (key, "", ""), number), made).sums
        value = as_type(evaluate(one.value, launch.values), one.type)
        sums.count += 1
        sums.sum += value
        sums.buckets[bucket_of(one, value)] += 1

    def read(self, session: Session, since_last: bool) -> list[Found]:
        """Return the distributions by specification, the one with the most values first. since_last: since the last call."""
        found = {place: replace(one, sums=one.sums.since(Sums())) for place, one in self._launched.items()}
        for number, one in enumerate(self._wanted):
            if session.has_map(
                f"sums_{number}"
            ):  # no map: the specification is of launches, or its filter is never true
                self._read_device(session, number, one, found)
        before, self._before = self._before, {place: one.sums for place, one in found.items()}
        if since_last:
            found = {
                place: replace(one, sums=one.sums.since(before.get(place, Sums())))
                for place, one in found.items()
            }
        order = sorted(found, key=lambda place: (place[3], -found[place].sums.count, place[2]))
        shown = shown_keys({place[2] for place in found})
        return [replace(found[place], key=shown[place[2]]) for place in order if found[place].sums.count]

    def _read_device(
        self, session: Session, number: int, one: Distribution, found: dict[Place, Found]
    ) -> None:
        def sums_of(instance: Instance, key: Key) -> Sums:
            place = (instance.process, instance.gpu, key, number)
            made = Found(instance.pid, instance.comm, instance.gpu, instance.wave, one, key[0], Sums())
            return found.setdefault(place, made).sums

        keys = Keys(session, one.key)
        # Counts by value are by kernel, not by build, so the sums that belong to them have the same keys.
        has_values = session.has_map(f"values_{number}")
        for instance in session.instances(f"sums_{number}"):
            build = None if has_values else instance.build
            for site, cell in _by_site(instance, one):
                sums = sums_of(instance, keys.of(instance, instance.mangled, site, build))
                sums.count += cell.count
                sums.sum += cell.sum
                sums.buckets += cell.buckets
        if not has_values:
            return
        kernels = session.kernel_names()
        for instance in session.instances(f"values_{number}"):
            for entry in instance.array:
                value, kernel, site = (int(entry["key"][name]) for name in ("value", "kernel", "site"))
                mangled = kernels.get(instance.process, {}).get(kernel, "")
                sums = sums_of(instance, keys.of(instance, mangled, site))
                sums.buckets[signed(value) if one.signed else value] += int(entry["value"])


def _by_site(instance: Instance, one: Distribution) -> Iterator[tuple[int, Sums]]:
    """Yield the sums of each site with values, over all multiprocessors."""
    cells = instance.array
    is_log2 = "slots" in (cells.dtype.names or ())
    parts = cells["sum"] if is_log2 else cells
    lows = parts["low"].astype(np.int64 if one.signed else np.uint64).tolist()
    overflows = parts["high"].astype(np.int64).tolist()

    def total(site: int) -> int:
        return sum(low[site] + (high[site] << 64) for low, high in zip(lows, overflows, strict=True))

    if is_log2:
        slots, negative = cells["slots"].sum(axis=0).tolist(), cells["negative"].sum(axis=0).tolist()
        for site, counts in enumerate(slots):
            buckets = Counter({slot: n for slot, n in enumerate(counts) if n})
            if negative[site]:
                buckets[NEGATIVE] = negative[site]
            if buckets:
                yield site, Sums(buckets.total(), total(site), buckets)
        return
    for site, count in enumerate(cells["count"].sum(axis=0).tolist()):
        if count:
            yield site, Sums(count, total(site))


class Keys:
    """Finds the keys of values: an empty key, the kernel's mangled name, or the place in the source. key: see `Distribution.key`."""

    def __init__(self, session: Session, key: str) -> None:
        self._session, self._key = session, key
        self._sites: dict[tuple[int, str, int | None], Mapping[int, Site]] = {}

    def of(self, instance: Instance, mangled: str, number: int, build: int | None = None) -> Key:
        """Return the key of a value at a site of a kernel. `build`: None if it is unknown."""
        if not self._key:
            return "", "", ""
        if self._key == "kernel":
            return mangled, "", ""
        place = (instance.pid, mangled, build)
        if place not in self._sites:
            self._sites[place] = self._session.sites(mangled, instance.pid, build)
        site = self._sites[place].get(number)
        if site is None:
            return f"site {number}", "", mangled
        return site_name(site), site.source, "" if site.source else site.function


def shown_keys(keys: Collection[Key]) -> dict[Key, str]:
    """Return the name of each key. Places with equal names also show the directory, or the function."""
    same = Counter(name for name, _, _ in keys)
    files = file_names({file for name, file, _ in keys if file and same[name] > 1})
    functions = names.labels(function for name, _, function in keys if function and same[name] > 1)
    return {
        (name, file, function): name
        if same[name] == 1
        else f"{files[file]}:{name.rpartition(':')[2]}"
        if file
        else f"{name} of {functions[function]}"
        for name, file, function in keys
    }


# --- for people, and CSV ---


def rows(found: Iterable[Found]) -> Iterator[list[Any]]:
    """Yield the rows of the CSV table: one for each bucket."""
    for one in found:
        record = DIST.record(one)
        for low, high, count in one.ranges():
            yield DIST.row(record, low=low, high=high, count=count)


def lines(found: Sequence[Found], owners: OwnerColumns, full: bool) -> Iterator[str]:
    """Yield a section for each distribution. full: all of its rows."""
    if not found:
        yield from ("no value was seen", "")
    owners.see(found)
    labels = names.labels(one.mangled for one in found if one.mangled)
    for one in found:
        yield table.printable(one.wanted.label if full else table.fit(one.wanted.label, table.WIDTH))
        if one.key:
            yield table.fit_end(f"  {one.wanted.key}: ", labels.get(one.key, one.key))
        mean = one.sums.sum / one.sums.count
        about = f"{table.count(one.sums.count, 'value')}, mean {mean:z,.{0 if abs(mean) >= 1000 else 1}f}"
        yield from table.wrap(f"{owners.name(one)}: {about}", 2)
        if one.sums.missing:
            missing = f"{table.count(one.sums.missing, 'value')} missing"
            yield from table.wrap(
                f"{missing}: no room in the table, or a kernel was running when it was read", 2
            )
        kind = one.wanted.kind
        ranges = one.log2_ranges() if kind == "log2" else one.ranges()
        if kind == "values":
            ranges.sort(key=lambda row: (-row[2], row[0]))
        shown = ranges if full or kind == "log2" else ranges[:FEW] if kind == "values" else _dense(ranges)
        if shown:
            yield ""
        yield from histogram.range_lines(shown, "value", "count")
        if len(ranges) > len(shown):
            yield f"... {table.count(len(ranges) - len(shown), 'row')} more; -v shows all"
        yield ""


def _dense(ranges: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return the FEW buckets with the highest counts, in order of their values."""
    if len(ranges) <= FEW:
        return ranges
    return sorted(sorted(ranges, key=lambda row: -row[2])[:FEW])

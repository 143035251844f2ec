"""Format the traffic of kernels as text: a table for each kernel, findings and advice.

for line in traffic_text.lines(kernel, "scale", verbose=False):
    print(line)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from gpubpf import names
from gpubpf.memory.sampled_part import SampledPart
from gpubpf.memory.traffic import BANKS, GATHER, SHIFTED, UNIT, KernelTraffic, SiteTraffic, ratio_of
from gpubpf.memory.updates import Updates
from gpubpf.record import Record
from gpubpf.records.kernel_shapes import file_names
from gpubpf.show import kernel_names, table
from gpubpf.show.owner_columns import MOST_SECTIONS, OwnerColumns
from gpubpf.show.table import number, size

TITLE = 46  # maximum characters of a kernel's name in a title
MOST_ROWS = 24  # maximum rows of a kernel's table; -v shows all
WHERE = 20  # maximum characters of a place in a table
HEADER = ("WHERE", "OP", "REQUESTS", "+-", "BYTES", "RATIO", "PATTERN", "LANES", "BANKS", "SHARE")
LEFT = ("WHERE", "OP", "PATTERN")
_OPS = {"load": "ld", "store": "st", "atomic": "atom", "async": "cp"}
_GEOMETRY = re.compile(r"a?(?:[123]d(?:ms)?|cube)")
_DOES = {"load": "loads from", "store": "stores to", "atomic": "updates", "async": "copies"}
_MANY_UPDATES = 32  # updates of one address from which on the report mentions them
_SHIFTED = 1.05  # ratio from which on the report mentions accesses that start inside a sector
_LITTLE_TRAFFIC = 0.01  # share of a kernel's traffic below which loads and stores get no advice
_LITTLE_WASTE = 0.05  # share of the moved bytes up to which the report does not mention wasted ones
_SCATTERED = 0.25  # share of the moved bytes that are used up to which gathered lanes get advice; rows of small tiles use more
_GATHERED = {
    "load": "load whole rows and pick in shared memory",
    "store": "collect in shared memory and store whole rows",
}
_NEARLY_ALL = 0.95  # if a smaller share of the lanes takes part, some are idle
_SMALL_PART = 0.25  # a row that costs less than this share of an earlier row of its line gets no own advice
_REGULAR = 6  # mean ways of a phase above which addresses are not scattered: 32 random words have 3.5
_WIDEST = 16  # bytes of a lane's widest access
_SHARED_SECTORS = 0.75  # rows share sectors if they need less than this share of what separate rows need
_MANY_LOADS = 1000  # requests from which on the report mentions loads of a loop that waits
_POLLS = re.compile(r"ld\.(?:volatile|acquire|relaxed|mmio)\b")
# Atomics, also AMD's, that lanes cannot do for each other.
_EXCHANGES = re.compile("cas|exch|swap|cmpst|wrxchg")
_FEW_ADDRESSES = 1024  # addresses that fit in shared memory along with other data
_CONSTANTS = (
    "loads constants from several addresses at once, which the GPU serves one by one: move data that differs by lane to"
    " global or shared memory"
)


class SiteGroup(Record):
    """A row of the table: the copies that the compiler made of one source line, with the same kind, space and pattern."""

    where: str
    sites: tuple[SiteTraffic, ...]

    def sum(self, field: str) -> int:
        """Return the sum of a field over all sites."""
        return sum(getattr(site, field) for site in self.sites)

    @property
    def part(self) -> SampledPart | None:
        """The sampled part of the row; None without sampling."""
        return SampledPart.of([site.part for site in self.sites])

    @property
    def error(self) -> str:
        """The standard error of the requests in per cent; "" without sampling."""
        if self.part is None:
            return ""
        return self.part.estimate("requests").percent or "?"

    @property
    def wasted(self) -> int:
        return self.sum("wasted")

    @property
    def ratio(self) -> float:
        """See `traffic.ratio_of`."""
        return ratio_of(self.sites)

    @property
    def shares_addresses(self) -> bool:
        """Whether lanes update the same addresses, so that they wait for each other. Then the ratio is below 1, its ideal."""
        return self.sites[0].site.kind == "atomic" and self.ratio < 1

    @property
    def lanes(self) -> float:
        """Lanes that take part in a request, on average."""
        return self.sum("accesses") / self.sum("requests")

    @property
    def idle(self) -> int:
        """Idle lanes of all requests."""
        return self.sites[0].warp.lanes * self.sum("requests") - self.sum("accesses")

    @property
    def of_leaders(self) -> bool:
        """Whether one lane in 4, 8, 16 or 32 seems to write for the others: each request has 1/4, 1/8, … of the lanes, with gaps."""
        first, lanes = self.sites[0], self.lanes
        same = all(site.accesses == lanes * site.requests for site in self.sites)
        writes = first.site.kind in ("store", "atomic") and self.sum("gaps") == self.sum("requests")
        return writes and same and lanes in [first.warp.lanes / group for group in (4, 8, 16, 32)]

    @property
    def updates(self) -> Updates | None:
        """The updates by all copies; None if any copy was not counted."""
        return _updates(self.sites)

    @property
    def distinct(self) -> float | None:
        """Distinct addresses of a request, on average; None if not counted."""
        found = [site.distinct for site in self.sites if site.distinct is not None]
        return sum(found) / self.sum("requests") if len(found) == len(self.sites) else None

    @property
    def contention(self) -> int:
        return max(site.contention for site in self.sites)

    @property
    def pattern(self) -> str:
        """The pattern as in JSON, with two exceptions.

        `one lane`: only one lane took part in each request. `rows`: gathered lanes use every sector fully, as with rows of a tile."""
        first = self.sites[0]
        if first.of_one_lane and first.has_addresses:
            return "one lane"
        whole = first.in_device_memory and self.sum("sectors") == self.sum("least")
        # If lanes update the same addresses, equal numbers of sectors are a coincidence.
        rows = first.pattern == "gather" and whole and first.site.kind != "atomic"
        return "rows" if rows else first.pattern

    def cells(self, share: float, mixed: bool = False) -> dict[str, str]:
        """Return the cells of the row, by column. `mixed`: the table has both kinds of shares (`KernelTraffic.share`)."""
        first, phases = self.sites[0], self.sum("phases")
        shared = first.space == "shared"
        ratio = (
            "-" if not first.has_addresses else "" if shared or self.shares_addresses else f"{self.ratio:.2f}"
        )
        part = f"{100 * share:.0f} %"
        return {
            "WHERE": self.where,
            "OP": _operation(first),
            "REQUESTS": number(first.estimated(self.sum("requests"))),
            "+-": self.error,
            "BYTES": size(first.estimated(self.sum("bytes"))) if first.has_bytes else "-",
            "RATIO": ratio,
            "PATTERN": self.pattern,
            "LANES": f"{self.lanes:.1f}".removesuffix(".0"),
            "BANKS": f"{self.sum('ways') / phases:.1f}".removesuffix(".0") if phases else "",
            "SHARE": "-" if not first.has_addresses else f"({part})" if mixed and shared else part,
        }


def _operation(site: SiteTraffic) -> str:
    """Return the operation and the memory: `ld.global`; `tex.2d`, `cp.tensor.2d`, `tcgen05.ld` where the address is unknown."""
    name, *modifiers = site.site.opcode.split(".")
    if site.space == "tmem":
        return ".".join((name, *modifiers[:1]))
    if site.has_addresses or not site.has_bytes:
        name = f"{_OPS[site.site.kind]}.{site.space}"
    return ".".join((name, *(m for m in modifiers if not site.has_addresses and _GEOMETRY.fullmatch(m))))


def _updates(sites: Sequence[SiteTraffic]) -> Updates | None:
    """Return the updates by all copies of a place; None if any copy was not counted."""
    found = [site.updates for site in sites if site.updates is not None]
    return Updates.sum(found) if len(found) == len(sites) else None


def report(kernels: Sequence[KernelTraffic], owners: OwnerColumns, verbose: bool) -> Iterator[str]:
    """Yield the whole report: a table of all kernels if there are several processes or GPUs, then a section per kernel.

    Without `verbose`, and with several processes, only the kernels that waste the most get sections.
    """
    mangled = [kernel.mangled for kernel in kernels]
    labels = names.labels(mangled)
    titles = names.labels(mangled, None if verbose else TITLE, full=verbose)
    owners.see(kernels)
    shown = kernels if verbose or not owners.processes else kernels[:MOST_SECTIONS]
    if not kernels:
        yield from ("no memory access was counted", "")
    if owners.several and len(kernels) > 1:
        yield f"memory traffic of kernels, by {'process' if owners.processes else 'GPU'}"
        yield ""
        yield from _overview(kernels, labels, owners)
        if len(kernels) > len(shown):
            yield f"details of the {len(shown)} kernels that waste the most; -v shows all"
        yield ""
    for kernel in shown:
        yield from lines(kernel, titles[kernel.mangled], verbose, owners)


def _overview(kernels: Sequence[KernelTraffic], labels: Mapping[str, str], owners: OwnerColumns) -> list[str]:
    """Return the table of all kernels, with one row per kernel."""
    rows = []
    for kernel in kernels:
        total = kernel.record()
        row = owners.cells(kernel) | {"KERNEL": labels[kernel.mangled], "LAUNCHES": number(kernel.launches)}
        row |= {
            "REQUESTS": number(kernel.estimated(sum(site.requests for site in kernel.sites))),
            "ASKED": size(total["bytes"]),
        }
        row |= {"MOVED": size(kernel.warp.sector * total["sectors"])}
        ratio = total["ratio"]
        row |= {"RATIO": "" if ratio is None else f"{ratio:.2f}", "WASTED": size(total["wasted_bytes"])}
        if kernel.sites and not any(site.has_addresses for site in kernel.sites):
            row |= dict.fromkeys(("ASKED", "MOVED", "RATIO", "WASTED"), "-")
        rows.append(row)
    return table.within(rows, left=("COMM", "KERNEL"), drop=("REQUESTS",))


def lines(
    kernel: KernelTraffic, title: str, verbose: bool, owners: OwnerColumns | None = None
) -> Iterator[str]:
    """Yield the lines for one kernel: findings, a row per place, worst first, and advice."""
    owners = owners or OwnerColumns()
    rows = group_sites(kernel.sites)
    shown = rows if verbose else rows[:MOST_ROWS]
    yield f"{title if verbose else table.fit(title, TITLE)}: memory traffic"
    for sentence in (f"{owners.name(kernel)}, {_counts(kernel, rows)}", *findings(kernel, rows)):
        yield from table.wrap(sentence, indent=2)
    yield ""
    mixed = len({row.sites[0].space == "shared" for row in rows}) > 1
    cells = [row.cells(kernel.share(row.sites), mixed) for row in shown]
    places = kernel_names.fitted((row.where for row in shown), WHERE)
    cells = [cell | {"WHERE": places[cell["WHERE"]]} for cell in cells]
    yield from _table(cells, kernel.warp.lanes, verbose, owners.cells(kernel))
    if mixed:
        yield "SHARE in parentheses: of the time that shared memory takes"
    if left := rows[len(shown) :]:
        less = " wasting less" if all(row.sites[0].has_addresses for row in left) else ""
        yield f"{table.count(len(left), 'more place')}{less}; -v shows them"
    yield ""
    yield from _advice_lines(kernel, shown)


def _advice_lines(kernel: KernelTraffic, rows: Sequence[SiteGroup]) -> Iterator[str]:
    """Yield each piece of advice with its places, and an empty line if there is any advice.

    Loads and stores with little traffic get no advice. Atomics do, because even few of them may wait for each other."""
    # Advice without its verb ("loads from") → the places that get this advice, each with its verbs.
    said: dict[str, dict[str, dict[str, None]]] = {}
    matters: dict[str, float] = {}
    costs: dict[tuple[str, str], int] = {}  # (source line, verb) → cost of the first row with advice
    for where, sites in _advised(rows):
        if text := advice(sites, kernel.sites):
            cost = sum(site.cost for site in sites)
            if cost < _SMALL_PART * costs.setdefault((where, sites[0].site.kind), cost):
                continue  # perhaps the rest of an unrolled loop
            begin = does if text.startswith(does := _DOES[sites[0].site.kind]) else ""
            rest = text.removeprefix(begin)
            said.setdefault(rest, {}).setdefault(where, {})[begin] = None
            share = 1.0 if sites[0].site.kind == "atomic" else kernel.share(sites)
            matters[rest] = matters.get(rest, 0.0) + share
    given = {rest: places for rest, places in said.items() if matters[rest] >= _LITTLE_TRAFFIC}
    for rest, places in given.items():
        alike: dict[tuple[str, ...], list[str]] = {}
        for where, verbs in places.items():
            alike.setdefault(tuple(verbs), []).append(where)
        for shared_verbs, (place, *others) in alike.items():
            yield from table.wrap(f"{place} {' and '.join(shared_verbs)}{rest}{_also(others)}")
    if given:
        yield ""


def _table(rows: Sequence[dict[str, str]], lanes: int, verbose: bool, owners: Mapping[str, str]) -> list[str]:
    """Return the table of one kernel, without columns that carry no information. `owners`: cells for process and GPU."""
    empty = [
        name
        for name, cell in (("+-", ""), ("BANKS", ""), ("LANES", str(lanes)))
        if all(row[name] == cell for row in rows) and not (verbose and name == "LANES")
    ]
    made = [{**owners, **{name: row[name] for name in HEADER if name not in empty}} for row in rows]
    left = ("COMM", *LEFT)
    if not verbose:
        return table.within(made, left, drop=("BYTES", "LANES", "SHARE"), cut=("WHERE", "COMM"))
    shown = table.within(made, left, cut=())
    return (
        shown if max(map(len, shown), default=0) <= table.WIDTH else table.within(made, left, cut=(), gap=1)
    )


def group_sites(sites: Iterable[SiteTraffic]) -> list[SiteGroup]:
    """Return the rows of a kernel's table: the worst first, then most moved bytes (of images: bytes in registers)."""
    found: dict[tuple[Any, ...], list[SiteTraffic]] = {}
    for one in sites:
        place = (one.site.source, one.site.source_line) if one.site.source else one.site.number
        found.setdefault((place, _operation(one), one.pattern, one.of_one_lane), []).append(one)
    files = file_names({one.site.source for copies in found.values() for one in copies if one.site.source})
    made = []
    for first, *more in found.values():
        where = f"{files[first.site.source]}:{first.site.source_line}" if first.site.source else first.where
        made.append(SiteGroup(where, (first, *more)))

    def order(row: SiteGroup) -> tuple[int, int, int]:
        moved = row.sum("moved" if row.sites[0].has_addresses else "bytes")
        return -row.sum("cost"), -moved, row.sites[0].site.number

    return sorted(made, key=order)


def _counts(kernel: KernelTraffic, rows: Sequence[SiteGroup]) -> str:
    """Return a kernel's numbers of launches, requests and places as text."""
    requests = table.count(kernel.estimated(sum(site.requests for site in kernel.sites)), "request")
    launches = f"{table.count(kernel.launches, 'launch')}, " if kernel.launches else ""
    return f"{launches}{requests} at {table.count(len(rows), 'place')}"


def findings(kernel: KernelTraffic, rows: Sequence[SiteGroup]) -> Iterator[str]:
    """Yield the sentences above a kernel's table."""
    total = kernel.record()
    yield from _sample(kernel)
    shared = [row for row in rows if row.sites[0].space == "shared"]
    device = [row for row in rows if row.sites[0].in_device_memory]
    images = [row for row in rows if row.sites[0].space in ("texture", "surface")]
    tensors = [row for row in rows if row.sites[0].space == "tensor"]
    if least := total["sectors_least"]:
        asked, moved = total["bytes"], kernel.warp.sector * total["sectors"]
        why = f"; contiguous lanes would move {size(kernel.warp.sector * least)} ({total['ratio']:.2f}x)"
        if moved < asked:
            why = "; lanes share addresses"
        elif 1 <= total["ratio"] < _SHIFTED and moved > _SHIFTED * asked:
            why = "; requests of few lanes move whole sectors"
        elif total["ratio"] < 1:  # some lanes share addresses, others are few and move whole sectors
            why = ""
        space = "global and local memory: " if shared or images or tensors else ""
        yield f"{space}asked for {size(asked)}, moved {size(moved)}{why}"
    wasted = _by_place(device, "wasted")
    whole = wasted.total()
    if len(rows) > 1 and whole > _LITTLE_WASTE * sum(row.sum("moved") for row in device):
        ((where, most),) = wasted.most_common(1)
        yield f"{where} wastes the most: {100 * most / whole:.0f} % of {size(kernel.estimated(whole))}"
    if images:
        asked = kernel.estimated(sum(row.sum("bytes") for row in images))
        yield f"textures and surfaces: asked for {size(asked)}; addresses, and so sectors and waste, are unknown"
    if copies := sum(row.sum("requests") for row in tensors if not row.sites[0].has_bytes):
        yield f"bulk tensor copies: {table.count(kernel.estimated(copies), 'request')}; addresses and bytes are unknown"
    if memory := [row for row in rows if row.sites[0].space == "tmem"]:
        yield f"tensor memory: {'; '.join(_tensor_memory(kernel, memory))}"
    if asked := sum(row.sum("bytes") for row in tensors):
        yield f"wgmma: asked for {size(kernel.estimated(asked))} of shared memory; bank conflicts are unknown"
    phases = sum(row.sum("phases") for row in shared)
    if phases and (times := f"{sum(row.sum('ways') for row in shared) / phases:.2f}") != "1.00":
        yield f"shared memory takes {times} times as long as without bank conflicts"
        if len(rows) > 1:
            ((where, _),) = _by_place(shared, "conflicts").most_common(1)
            there = [site for row in shared if row.where == where for site in row.sites]
            worst = [site for site in there if site.conflicts] or there
            yield f"{where} loses the most in shared memory: {_bank_conflicts(worst)}"
    yield from _contention(rows)
    yield from _idle_lanes(kernel, rows)
    yield from _one_lane(rows)
    yield from _polling(rows)
    if kernel.unknown:
        yield f"left out: {table.count(kernel.estimated(kernel.unknown), 'request')} at unknown sites"


def _tensor_memory(kernel: KernelTraffic, rows: Sequence[SiteGroup]) -> Iterator[str]:
    """Yield what instructions of each kind did with tensor memory (tcgen05)."""
    for kind, did in (("load", "loads of"), ("store", "stores of"), ("async", "copies of")):
        moved = [row for row in rows if row.sites[0].site.kind == kind]
        if asked := sum(row.sum("bytes") for row in moved):
            yield f"{did} {size(kernel.estimated(asked))}"
    if count := sum(row.sum("requests") for row in rows if not row.sites[0].has_bytes):
        yield f"{table.count(kernel.estimated(count), 'multiplication')} of unknown size"


def _by_place(rows: Iterable[SiteGroup], field: str) -> Counter[str]:
    """Return the sum of a field for each place, which may have several rows, such as loads and stores."""
    found: Counter[str] = Counter()
    for row in rows:
        found[row.where] += row.sum(field)
    return found


def _sample(kernel: KernelTraffic) -> Iterator[str]:
    """Yield sentences about the sample and the errors of the estimates; none without sampling."""
    if kernel.sample is None:
        return
    yield kernel.sample.sentence(
        kernel.warp.word if kernel.sample.sampling.unit == "warp" else kernel.sample.sampling.unit
    )
    part = SampledPart.of([site.part for site in kernel.sites if site.in_device_memory])
    if part is not None:
        sectors, ratio = part.estimate("sectors"), part.errors()["ratio"]
        yield f"about {sectors.text('sectors moved')}; ratio +- {'unknown' if ratio is None else f'{ratio:.2f}'}"


def _contention(rows: Sequence[SiteGroup]) -> Iterator[str]:
    """Yield two sentences: about the place where most atomic updates wait for others of the same address, and the hottest address."""
    atomics = [row for row in rows if row.sites[0].distinct is not None]
    waiting = max(atomics, key=lambda row: row.sum("accesses") - row.sum("distinct"), default=None)
    counted = [(row, row.updates) for row in atomics]
    hot, most = max(counted, key=lambda pair: pair[1].hottest if pair[1] else 0, default=(None, None))
    if waiting is not None and waiting.sum("distinct") < (1 - _LITTLE_WASTE) * waiting.sum("accesses"):
        addresses, lanes = (
            f"{mean:.1f}".removesuffix(".0") for mean in (waiting.distinct or 0, waiting.lanes)
        )
        together = f"{addresses} address{'' if addresses == '1' else 'es'} for {lanes} lanes"
        at_once = f"up to {waiting.contention} lanes of a {waiting.sites[0].warp.word} update the same address at once"
        yield f"{waiting.where}: a request updates {together}; {at_once}"
    if hot is not None and most is not None and most.hottest >= _MANY_UPDATES:
        percent = 100 * most.hottest / most.total
        share = f"{percent:.{1 if percent < 10 else 0}f} %"
        updates = f"{most.total:,} updates of {table.count(most.addresses, 'address')}"
        yield f"{hot.where}: {updates}, the hottest {most.hottest:,} times ({share})"


def _idle_lanes(kernel: KernelTraffic, rows: Sequence[SiteGroup]) -> Iterator[str]:
    """Yield a sentence about the place with the most idle lanes between active ones, if such lanes are a quarter of all lanes."""
    scattered = [row for row in rows if 2 * row.sum("gaps") > row.sum("requests") and not row.of_leaders]
    scattered = [
        row for row in scattered if row.sites[0].site.kind != "atomic"
    ]  # not atomics: fewer updating lanes are better
    worst = max(scattered, key=lambda row: row.idle, default=None)
    requests = sum(site.requests for site in kernel.sites)
    if worst is not None and 4 * sum(row.idle for row in scattered) >= kernel.warp.lanes * requests:
        lanes = f"{worst.lanes:.1f}".removesuffix(".0")
        yield (
            f"{worst.where}: {lanes} of {kernel.warp.lanes} lanes take part on average, with idle lanes between them;"
            f" neighbouring threads would need fewer {kernel.warp.word}s"
        )


def _one_lane(rows: Sequence[SiteGroup]) -> Iterator[str]:
    """Yield a sentence about the place with the most requests of one lane, if at least half of all requests have one lane.

    A single thread that waits for others, or adds up for others, makes fewer requests."""
    alone = [
        row
        for row in rows
        if row.sites[0].of_one_lane
        and row.sites[0].site.kind != "atomic"
        and "bulk" not in row.sites[0].site.opcode  # one lane copies for all
        and not _polls(row)  # a line that polls makes its other loads while it waits
    ]
    requests, of_one = (sum(row.sum("requests") for row in some) for some in (rows, alone))
    if of_one >= max(_MANY_LOADS, requests / 2):
        most = max(alone, key=lambda row: row.sum("requests"))
        share = f"{100 * of_one / requests:.0f} % of all requests"
        yield f"{most.where}: {share} are by one lane alone; let the lanes of a {most.sites[0].warp.word} share the work"


def _polls(row: SiteGroup) -> list[SiteTraffic]:
    """Return the sites of a place that may poll a value until another thread changes it."""
    return [site for site in row.sites if site.pattern == "broadcast" and _POLLS.match(site.site.opcode)]


def _polling(rows: Sequence[SiteGroup]) -> Iterator[str]:
    """Yield a sentence about loops that may wait for other threads, if they make at least half of all requests."""
    requests = sum(row.sum("requests") for row in rows)
    polling: Counter[str] = Counter()
    opcodes: Counter[str] = Counter()
    for row in rows:
        for site in _polls(row):
            polling[row.where] += site.requests
            opcodes[".".join(site.site.opcode.split(".")[:2])] += site.requests
    if polling.total() >= max(_MANY_LOADS, requests / 2):
        share = f"{100 * polling.total() / requests:.0f} % of all requests"
        places = [
            where for n, (where, count) in enumerate(polling.most_common(4)) if not n or count >= _MANY_LOADS
        ]
        what = " or ".join(opcode for opcode, _ in opcodes.most_common(2))
        loops = "loops wait" if len(places) > 1 else "a loop waits"
        yield f"{places[0]}{_also(places[1:])}: {share} are {what} of one address; perhaps {loops} for other threads there"


# --- advice ---


def _also(places: Sequence[str]) -> str:
    """Return other places as the end of a sentence. Successive lines of one file have the file's name only once."""
    texts = list(places[:1])
    for before, place in pairwise(places):
        file, _, line = place.rpartition(":")
        texts.append(line if file and file == before.rpartition(":")[0] else place)
    return f" (also {', '.join(texts)})" if texts else ""


def advice(sites: Sequence[SiteTraffic], others: Iterable[SiteTraffic] = ()) -> str | None:
    """Return what the copies of one place do, and how to improve it; None if no advice is certain, or nothing is wasted.

    others: the other sites of the kernel, which may show that these sites load neighbours of elements, as in a stencil.
    """
    first = sites[0]
    begin = _DOES[first.site.kind]
    contention = max(site.contention for site in sites)
    adds = first.site.kind == "atomic" and not any(_EXCHANGES.search(site.site.opcode) for site in sites)
    if adds and first.pattern == "broadcast" and contention == first.warp.lanes:
        return f"{begin} one address from all lanes: reduce within the {first.warp.word}, then update from one lane"
    if adds and (text := _update_advice(sites, begin)):
        return text
    # True if lanes have different addresses in every request of several lanes.
    apart = first.pattern not in ("broadcast", "mixed")
    if first.space == "const":
        return _CONSTANTS if apart else None
    if first.space == "shared":
        return _bank_advice([site for site in sites if site.conflicts], begin)
    if not any(site.wasted for site in sites):
        return None
    if first.space == "local" and first.pattern != "gather":
        return None
    if first.space == "local":
        return f"{begin} local memory at offsets that differ by lane: index the array with constants, or keep it in shared memory"
    used = sum(site.bytes for site in sites) / sum(site.sectors for site in sites)
    moved = f"{used:.0f} of every {first.warp.sector} bytes moved are used"
    requests = sum(site.requests for site in sites)
    strided = [
        site for site in sites if site.mostly_strided and (found := _steps(site)) and found[0] > site.width
    ]
    # The copy for the rest of an unrolled loop may differ.
    if 4 * sum(site.requests for site in strided) > 3 * requests:
        shortest = min(found[0] for site in strided if (found := _steps(site)))
        of_all_lanes = (
            first.warp.sector * strided[0].width / max(strided[0].width, min(shortest, first.warp.sector))
        )
        lanes = sum(site.accesses for site in sites) / requests
        idle = lanes < _NEARLY_ALL * first.warp.lanes and used < _NEARLY_ALL * of_all_lanes
        cause = f"and {first.warp.word}s have idle lanes, so" if idle else "so"
        return f"{begin} memory with {_strides(strided)} bytes apart, {cause} {moved}; {_stride_advice(strided, others)}"
    gathered = 2 * sum(site.patterns[GATHER] for site in sites) > sum(site.requests for site in sites)
    if gathered and first.site.kind in _GATHERED and used <= first.warp.sector * _SCATTERED:
        # Idle lanes can hide the stride of lanes in several rows of a block.
        some_idle = sum(site.accesses for site in sites) < _NEARLY_ALL * first.warp.lanes * requests
        sort = (
            "let neighbouring lanes access neighbouring elements; if indices decide, sort them"
            if some_idle
            else "sort the indices"
        )
        return f"{begin} scattered addresses: {moved}; {sort}, or {_GATHERED[first.site.kind]}"
    if first.site.kind == "load":  # not all loads of a stencil can be aligned
        starts_inside = all(site.patterns[SHIFTED] and site.ratio >= _SHIFTED for site in sites)
    else:
        starts_inside = 2 * sum(site.patterns[SHIFTED] for site in sites) > requests
    if (
        all(site.pattern == "unit" for site in sites)
        and starts_inside
        and not _loads_neighbours(first, others)
    ):
        start = f"{first.warp.word}s start inside a {first.warp.sector}-byte sector: align the array, its rows and the blocks"
        return f"{begin} neighbouring elements, but {start}"
    return None


def _strides(sites: Sequence[SiteTraffic]) -> str:
    """Return in words how far the lanes of strided sites are apart. The text ends with the number of bytes."""
    steps = [found for site in sites if (found := _steps(site))]
    stride, apart = sites[0].stride, "lanes next to each other in x are"
    if stride is not None and all(site.stride == stride for site in sites):
        distances = " or ".join(f"{distance:,}" for distance in sorted({shortest for shortest, _ in steps}))
        return f"stride {stride}: {apart} {distances}"
    shortest, longest = min(step[0] for step in steps), max(step[1] for step in steps)
    return f"changing strides: {apart} {shortest:,} to {longest:,}"


def _stride_advice(sites: Sequence[SiteTraffic], others: Iterable[SiteTraffic]) -> str:
    if not all(map(_shares_sectors_in_y, sites)):
        _, longest = _steps(sites[0]) or (0, 0)
        if len(sites) > 1 and longest <= min(
            _WIDEST, sum(site.width for site in sites)
        ):  # fields of a structure, perhaps
            return (
                "join a thread's accesses if they are side by side, or let lanes access neighbouring elements"
            )
        return "let them access neighbouring elements"
    along_x = any(one.pattern == "unit" and one.space == "global" for one in others)  # as in a transpose
    return f"those next to each other in y are closer: {'go through a tile in shared memory' if along_x else 'swap x and y'}"


def _loads_neighbours(site: SiteTraffic, others: Iterable[SiteTraffic]) -> bool:
    """Return whether a site may load neighbours of elements, as a stencil or a convolution does: not all such loads can be aligned."""
    if site.site.kind != "load":
        return False
    contiguous = [one for one in others if one.pattern == "unit" and one.space == "global"]
    loads = [one for one in contiguous if one.site.kind == "load" and one.width == site.width]
    if not all(one.patterns[SHIFTED] for one in loads):
        return True
    # The stores are aligned, so the loaded array may be aligned, too. There are several loads for each store, or one load in a loop.
    results = sum(one.site.kind in ("store", "atomic") and not one.patterns[SHIFTED] for one in contiguous)
    return bool(results) and (len(loads) > results or any(one.patterns[UNIT] for one in loads))


def _shares_sectors_in_y(site: SiteTraffic) -> bool:
    """Return whether strided lanes touch clearly fewer sectors than if each row of the block (along x) were alone."""
    shortest, _ = _steps(site) or (0, 0)
    alone = site.accesses * min(1.0, shortest / site.warp.sector)
    return site.sectors < _SHARED_SECTORS * alone


def _update_advice(sites: Sequence[SiteTraffic], begin: str) -> str | None:
    """Return the advice for atomics that often update few addresses in global memory; None for other atomics, or if not counted."""
    most = _updates(sites)
    if sites[0].space == "shared" or most is None:
        return None
    if all(site.of_one_lane for site in sites):
        return None  # one lane updates at a time, perhaps once per block
    if most.addresses > _FEW_ADDRESSES or most.hottest < _MANY_UPDATES:
        return None
    if most.hottest <= most.blocks:
        return None  # blocks that added up first would update the address as often
    few = "one address" if most.addresses == 1 else f"only {most.addresses:,} addresses"
    return f"{begin} {few} {most.total:,} times: combine those of a block in shared memory or registers, then update once"


def _advised(rows: Sequence[SiteGroup]) -> list[tuple[str, list[SiteTraffic]]]:
    """Return the groups of sites that get advice together, each with its place.

    A group has the sites of one row, or of all rows of a line whose strides cause bank conflicts."""
    found: dict[object, tuple[str, list[SiteTraffic]]] = {}
    for index, row in enumerate(rows):
        first = row.sites[0]
        strided = first.space == "shared" and row.sum("conflicts") and all(map(_is_strided, row.sites))
        key = (row.where, first.site.kind) if strided else index
        found.setdefault(key, (row.where, []))[1].extend(row.sites)
    return list(found.values())


def _is_strided(site: SiteTraffic) -> bool:
    """Return whether all requests of several lanes have a stride."""
    return not site.requests_by_pattern.keys() - {"stride", "single"}


def _steps(site: SiteTraffic) -> tuple[int, int] | None:
    """Return the shortest and the longest distance from lane to lane in bytes; None if unknown."""
    if site.stride is None:
        return site.steps
    step = abs(site.stride) * site.width
    return step, step


def _bank_conflicts(sites: Sequence[SiteTraffic]) -> str:
    """Return the bank conflicts in shared memory, in words."""
    most = max(site.ways_max for site in sites)
    fewer = sum(site.ways for site in sites) < most * sum(site.phases for site in sites)
    return f"{'up to ' if fewer else ''}{most}-way bank conflicts"


def _bank_advice(sites: Sequence[SiteTraffic], begin: str) -> str | None:
    """Return the advice for the bank conflicts of one place's copies; None if they may come from scattered addresses."""
    steps = [found for site in sites if (found := _steps(site))]
    if not sites or len(steps) < len(sites) or not all(map(_is_strided, sites)):
        if sum(site.ways for site in sites) < _REGULAR * sum(site.phases for site in sites) or not sites:
            return None
        conflicts = f"{_bank_conflicts(sites)}, more than scattered addresses have"
        return f"{begin} shared memory with {conflicts}: pad each row of the array by one element, or change the index"
    if max(site.ways_max for site in sites) < 2:
        return None
    shortest, longest = min(step[0] for step in steps), max(step[1] for step in steps)
    width = sites[0].width
    # Elements smaller than a word share words, so padding to an odd number of elements is not enough.
    scale, unit = (1, "bytes") if width < 4 else (4, "words")
    conflict = f"{begin} shared memory with {_bank_conflicts(sites)}: neighbouring lanes are"
    if shortest < longest:
        apart = f"{shortest // scale} to {longest // scale} {unit} apart"
        return f"{conflict} {apart}; let neighbouring lanes access neighbouring elements"
    conflict = f"{conflict} {shortest // scale} {unit} apart"
    if shortest % BANKS == 0:
        # An element of a wide access, such as a matrix row of ldmatrix, is not an element of the program's array.
        padding = "one element" if width == 4 else f"{max(width, 4)} bytes"
        return f"{conflict}; pad each row by {padding}"
    return f"{conflict}; {'an odd number of words (4 bytes)' if width < 4 else 'an odd stride'} avoids them"

"""What memtrace says of a kernel to people: its table, what it finds, what can be done about it.

for line in traffic_text.lines(kernel, "scale", verbose=False):
    print(line)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpubpf import names
from gpubpf.memory.traffic import LANES, SECTOR, SHIFTED, KernelTraffic, SiteTraffic
from gpubpf.show import table
from gpubpf.show.owner_columns import MOST_SECTIONS, OwnerColumns
from gpubpf.show.table import number, size

MOST_ROWS = 24  # of a kernel; `verbose`: all
HEADER = ("WHERE", "OP", "REQUESTS", "BYTES", "RATIO", "PATTERN", "LANES", "BANKS", "SHARE")
LEFT = ("WHERE", "OP", "PATTERN")
_OPS = {"load": "ld", "store": "st", "atomic": "atom", "async": "cp"}
_DOES = {"load": "loads from", "store": "stores to", "atomic": "updates", "async": "copies"}
_CONSTANTS = (
    "loads constants from several addresses at once, which are served one by one: constants are for lanes that agree, let others"
    " be in global or shared memory"
)


@dataclass(frozen=True)
class Row:
    """A line of the table: the copies that the compiler made of one place of the source, of the same kind and pattern."""

    where: str
    sites: tuple[SiteTraffic, ...]

    def sum(self, field: str) -> int:
        return sum(getattr(site, field) for site in self.sites)

    @property
    def wasted(self) -> int:
        return self.sum("wasted")

    @property
    def contention(self) -> int:
        return max(site.contention for site in self.sites)

    def cells(self, share: float) -> dict[str, str]:
        """By column."""
        first, phases = self.sites[0], self.sum("phases")
        shared = first.space == "shared"
        return {
            "WHERE": table.fit(self.where, 20),
            "OP": f"{_OPS[first.site.kind]}.{first.space}",
            "REQUESTS": number(self.sum("requests")),
            "BYTES": size(self.sum("bytes")),
            "RATIO": "" if shared else f"{self.sum('sectors') / max(self.sum('least'), 1):.2f}",
            "PATTERN": first.pattern,
            "LANES": f"{self.sum('accesses') / self.sum('requests'):.1f}".removesuffix(".0"),
            "BANKS": f"{self.sum('ways') / phases:.1f}".removesuffix(".0") if phases else "",
            "SHARE": f"{100 * share:.0f} %",
        }


def report(kernels: Sequence[KernelTraffic], whose: OwnerColumns, verbose: bool) -> Iterator[str]:
    """Of each kernel. Of several processes or GPUs first a table of all, then those that waste most one by one."""
    labels = names.labels(kernel.mangled for kernel in kernels)
    whose.see(kernels)
    shown = kernels if verbose or not whose.processes else kernels[:MOST_SECTIONS]
    if whose.several and len(kernels) > 1:
        yield f"how kernels touch memory, by {'process' if whose.processes else 'GPU'}"
        yield ""
        yield from _overview(kernels, labels, whose)
        if len(kernels) > len(shown):
            yield f"the {len(shown)} that waste most one by one; -v shows the others, too"
        yield ""
    for kernel in shown:
        yield from lines(kernel, kernel.demangled if verbose else labels[kernel.mangled], verbose, whose)


def _overview(kernels: Sequence[KernelTraffic], labels: Mapping[str, str], whose: OwnerColumns) -> list[str]:
    rows = []
    for kernel in kernels:
        total = kernel.record()
        row = whose.cells(kernel) | {"KERNEL": labels[kernel.mangled], "LAUNCHES": number(kernel.launches)}
        row |= {
            "REQUESTS": number(sum(site.requests for site in kernel.sites)),
            "ASKED": size(total["bytes"]),
        }
        row |= {"MOVED": size(SECTOR * total["sectors"])}
        ratio = total["ratio"]
        rows.append(row | {"RATIO": "" if ratio is None else f"{ratio:.2f}", "WASTED": size(kernel.wasted)})
    return table.within(rows, left=("COMM", "KERNEL"), drop=("REQUESTS",))


def lines(
    kernel: KernelTraffic, title: str, verbose: bool, whose: OwnerColumns | None = None
) -> Iterator[str]:
    """What is wasted; a row for each place, the worst first; what can be done about it."""
    whose = whose or OwnerColumns()
    rows = folded(kernel.sites)
    shown = rows if verbose else rows[:MOST_ROWS]
    yield f"{title if verbose else table.fit(title, 46)}: how it touches memory"
    for sentence in (f"{whose.name(kernel)}, {_counted(kernel, rows)}", *findings(kernel, rows)):
        yield from table.wrap(sentence, indent=2)
    yield ""
    yield from _table([row.cells(kernel.share(row.sites)) for row in shown], verbose, whose.cells(kernel))
    if len(rows) > len(shown):
        yield f"and {table.count(len(rows) - len(shown), 'place')} more that waste less; -v shows them"
    yield ""
    said = [text for row in shown if (text := advice(row.sites))]
    for text in said:
        yield from table.wrap(text)
    if said:
        yield ""


def _table(rows: Sequence[dict[str, str]], verbose: bool, whose: Mapping[str, str]) -> list[str]:
    empty = [
        name
        for name, cell in (("BANKS", ""), ("LANES", str(LANES)))
        if all(row[name] == cell for row in rows) and not (verbose and name == "LANES")
    ]
    made = [{**whose, **{name: row[name] for name in HEADER if name not in empty}} for row in rows]
    drop, cut = (("BYTES", "LANES", "SHARE"), ("WHERE", "COMM")) if not verbose else ((), ())
    return table.within(made, left=("COMM", *LEFT), drop=drop, cut=cut)


def folded(sites: Iterable[SiteTraffic]) -> list[Row]:
    """The rows of a kernel's table, the most waste first, then the most moved."""
    found: dict[tuple[Any, ...], list[SiteTraffic]] = {}
    for one in sites:
        place = (one.site.source, one.site.source_line) if one.site.source else one.site.number
        found.setdefault((place, one.site.kind, one.space, one.pattern), []).append(one)
    made = [Row(of[0].where, tuple(of)) for of in found.values()]
    return sorted(made, key=lambda row: (-row.wasted, -row.sum("moved"), row.sites[0].site.number))


def _counted(kernel: KernelTraffic, rows: Sequence[Row]) -> str:
    requests = table.count(sum(site.requests for site in kernel.sites), "request")
    launches = f"{table.count(kernel.launches, 'launch')}, " if kernel.launches else ""
    return f"{launches}{requests} at {table.count(len(rows), 'place')}"


def findings(kernel: KernelTraffic, rows: Sequence[Row]) -> Iterator[str]:
    """What a kernel's table says, in sentences."""
    total = kernel.record()
    if total["sectors_least"]:
        moved = f"asked for {size(total['bytes'])}, moved {size(SECTOR * total['sectors'])}"
        yield f"{moved}: {total['ratio']:.2f} times what lanes side by side would"
    phases = sum(row.sum("phases") for row in rows)
    if phases and (ways := sum(row.sum("ways") for row in rows)) > phases:
        yield f"shared memory takes {ways / phases:.2f} times as long as without bank conflicts"
    if len(rows) > 1 and rows[0].wasted:
        whole = kernel.wasted
        yield f"{rows[0].where} wastes most, {100 * rows[0].wasted / whole:.0f} % of {size(whole)}"
    crowded = max(
        (row for row in rows if row.sites[0].site.kind == "atomic"),
        key=lambda row: row.contention,
        default=None,
    )
    if crowded is not None and crowded.contention > 1:
        yield f"{crowded.where}: up to {crowded.contention} lanes of a warp update one address at once"
    if kernel.unknown:
        yield f"left out: {table.count(kernel.unknown, 'request')} at places that nothing is known of"


# --- what can be done ---


def advice(sites: Sequence[SiteTraffic]) -> str | None:
    """What to do about the copies of one place, in a sentence; None where nothing is certain, or nothing is wasted."""
    first = sites[0]
    begin = f"{first.where} {_DOES[first.site.kind]}"
    if first.site.kind == "atomic" and first.pattern == "broadcast" and first.contention == LANES:
        return f"{begin} one address in all lanes: let the warp add up first, and one lane do it"
    apart = first.pattern not in ("broadcast", "mixed")  # lanes, in every request of several
    if first.space == "const":
        return f"{first.where} {_CONSTANTS}" if apart else None
    if not any(site.wasted for site in sites):
        return None
    if first.space == "shared":
        return _banks(first, begin)
    if first.space == "local" and not apart:
        return None
    if first.space == "local":
        return f"{begin} local memory, each lane at an offset of its own: index the array by constants, or keep it in shared memory"
    if first.stride is not None and abs(first.stride) > 1 and first.pattern.startswith("stride"):
        used = sum(site.bytes for site in sites) / sum(site.sectors for site in sites)
        step = abs(first.stride) * first.width
        return (
            f"{begin} memory with stride {first.stride}: neighbouring lanes are {step:,} bytes apart, {used:.0f} of 32 bytes"
            " moved are used; let neighbouring lanes take neighbouring elements"
        )
    if first.pattern == "unit" and first.patterns[SHIFTED]:
        return f"{begin} neighbouring elements, but begins within a 32-byte sector: align what the first lane takes to 32 bytes"
    return None


def _banks(one: SiteTraffic, begin: str) -> str | None:
    if one.stride is None or not one.pattern.startswith("stride") or one.ways_max < 2:
        return None
    words = abs(one.stride) * one.width // 4
    conflict = f"{begin} shared memory with {one.ways_max}-way bank conflicts: neighbouring lanes are {words} words apart"
    if words % LANES == 0:
        return f"{conflict}; pad each row by one element"
    return f"{conflict}; an odd stride has none"

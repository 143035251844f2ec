"""Write gpuhang's results: text for people, JSON or CSV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gpubpf import names
from gpubpf.hangs.stands import HANG, PLACE, Hang, Hangs, Place, Warp
from gpubpf.show import table

if TYPE_CHECKING:
    from gpubpf.records.launch_shape import Index
    from gpubpf.show.owner_columns import OwnerColumns
    from gpubpf.show.result_writer import ResultWriter

SHOWN = 4  # warps of a row or sentence, if all of them need more than ROOM columns
ROOM = 36
VERDICTS = {
    "deadlock": "deadlock: all warps of a block wait at barriers",
    "spinning": "spinning: its loops cannot end by themselves",
    "running": "running: its warps get further, or are in loops that count",
    "unknown": "whether it can end is unknown",
}
STATES = {
    "spin": "in the loop at {} now",
    "loop": "in the loop at {} now",
    "barrier": "at the barrier at {} now",
    "block": "last seen at {}",
    "exited": "gone: it exited at {}",
}


def report(found: Sequence[Hang], owners: OwnerColumns, full: bool, results: ResultWriter) -> None:
    """Write launches that do not end. full: see `lines`."""
    if found:
        results.begin()
    for hang in found:
        if results.form == "text":
            results.out.lines([*lines(hang, full, owners), ""])
        elif results.json:
            results.records(HANG, (hang,))
            results.records(PLACE, hang.places)
        else:
            rows = (PLACE.row(PLACE.record(one), verdict=hang.verdict) for one in hang.places)
            results.table(PLACE.columns, rows)


def notices(hangs: Hangs) -> Iterator[str]:
    """Yield what the user should know now beside the launches."""
    yield from map(ended, hangs.take_ended())
    for user in hangs.delayed:
        yield f"launches of user {user} are looked at less often: what its processes write takes too long to read"


def ended(hang: Hang) -> str:
    """Return a notice about a launch that has ended, although it was reported as one that cannot."""
    label = names.labels((hang.mangled,))[hang.mangled]
    return f"pid {hang.pid}: launch {hang.launch} of {label} has ended; it was reported as {hang.verdict}"


def lines(hang: Hang, full: bool, owners: OwnerColumns) -> Iterator[str]:
    """Yield the report of a launch: the verdict, a row for each place, then who is missing at barriers, and what loops read.

    full: the whole kernel name, and all warps that the record lists.
    """
    label = names.labels((hang.mangled,), full=full)[hang.mangled]
    who = f" of {table.process(hang.comm, hang.pid)}" if owners.see((hang,)).processes else ""
    word = hang.shape.warp_word
    verdict = VERDICTS[hang.verdict].replace("warp", word)
    yield from table.wrap(f"{label}, launch {hang.launch}{who}, {table.duration(hang.running_ns)}: {verdict}")
    yield f"  {table.count(hang.blocks, 'block')}, {table.count(hang.warps, word)}; exited: {hang.exited:,}"
    if not hang.places:
        return
    yield ""
    shown = None if full else SHOWN
    cells = [_row(one, shown) for one in hang.places]
    rows = table.within(cells, left=("PLACE", "SOURCE", "WHERE"), cut=("WHERE", "SOURCE"))
    yield from rows
    # A row is cut in the middle to fit, so what is missing there follows as a sentence.
    told = [
        f"{cell['PLACE']} at {cell['SOURCE']}: {cell['WHERE']}"
        for cell, row in zip(cells, rows[1:], strict=True)
        if cell["WHERE"] not in row or cell["SOURCE"] not in row
    ]
    told += [sentence for one in hang.places for sentence in _about(one, shown)]
    if told:
        yield ""
    for sentence in told:
        yield from table.wrap(sentence)


def _row(one: Place, shown: int | None) -> dict[str, str]:
    turns = "-"
    if one.turns is not None:
        low, high = one.turns
        turns = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    name = one.kind if one.barrier is None else f"{one.kind} {one.barrier}"
    return {
        "PLACE": name,
        "SOURCE": one.source or "unknown",
        f"{one.hang.shape.warp_word.upper()}S": f"{one.warps:,}",
        "TURNS": turns,
        "WHERE": _list(one.where, one.warps, shown),
    }


def _about(one: Place, shown: int | None) -> Iterator[str]:
    if one.address is not None:
        yield f"{one.source}: the loop ends only if the word at {one.address:#x} changes"
    if one.is_lock:
        yield f"{one.source}: {_taken_by(one)}"
    if one.kind == "barrier" and one.missing:
        by_source: dict[str, list[Warp]] = {}
        for warp in one.missing:
            by_source.setdefault(warp.source or "an unknown place", []).append(warp)
        where = "; ".join(
            f"{_list(found, len(found), shown)} last at {source}" for source, found in by_source.items()
        )
        yield f"{one.source}: not at barrier {one.barrier}: {where}"


def _taken_by(one: Place) -> str:
    """Return who took the lock that a spin waits for."""
    by = one.taken_by
    if by is None:
        return "who changed that word last cannot be told"
    if one.warps == 1 and (by.block, by.warp) == (one.where[0].block, one.where[0].warp):
        return f"that {one.hang.shape.warp_word} itself changed that word last, in such a loop"
    who = f"{_named((by,), 1)} changed that word last, in such a loop"
    return f"{who}; it is {STATES[by.kind].format(by.source or 'an unknown place')}" if by.kind else who


def _list(warps: Sequence[Warp], count: int, shown: int | None) -> str:
    """Return some warps as text: `blocks 2 to 5: 0, 3; block 7: 1`, and how many others there are."""
    text = _named(warps, count)
    return text if shown is None or len(text) <= ROOM else _named(warps[:shown], count)


def _named(warps: Sequence[Warp], count: int) -> str:
    by_block: dict[Index, list[str]] = {}
    for one in warps:
        by_block.setdefault(one.block, []).append(str(one.warp))
    alike: list[tuple[Index, Index, list[str]]] = []  # blocks side by side with the same warps: first, last
    for block, found in by_block.items():
        if alike and alike[-1][2] == found and block == (alike[-1][1][0] + 1, *alike[-1][1][1:]):
            alike[-1] = alike[-1][0], block, found
        else:
            alike.append((block, block, found))
    text = "; ".join(f"{_blocks(first, last)}: {', '.join(found)}" for first, last, found in alike)
    return text if count <= len(warps) else f"{text}; {count - len(warps):,} more"


def _blocks(first: Index, last: Index) -> str:
    return f"block {_index(first)}" if first == last else f"blocks {_index(first)} to {_index(last)}"


def _index(block: Sequence[int]) -> str:
    x, y, z = block
    return str(x) if not (y or z) else f"({x},{y})" if not z else f"({x},{y},{z})"

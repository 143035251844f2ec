"""gpuprofile's report for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from gpubpf import names
from gpubpf.agent.definitions import STACK_LIMIT
from gpubpf.launches import latency_text
from gpubpf.launches.frames import INCOMPLETE, Frame, Stack
from gpubpf.launches.profile import StackRow
from gpubpf.show import summary_text, table
from gpubpf.show.kernel_names import fitted
from gpubpf.show.owner_columns import OwnerColumns

if TYPE_CHECKING:
    from gpubpf.session.session import Session
    from gpubpf.show.result_writer import ResultWriter

_KERNEL = 24  # maximum columns of a kernel's name
LEAST = 30  # minimum columns of a stack beside the other columns; with fewer, the stack has its own line
_BETWEEN, _LEFT_OUT = " > ", "..."


def report(
    rows: Sequence[StackRow], by: str, owners: OwnerColumns, top: int | None, full: bool
) -> Iterator[str]:
    """Yield the report: a sentence, a table with a line for each kernel and stack, and what it leaves out.

    rows: the row with the largest weight first.
    by: the weight of the column SHARE: "time" or "launches".
    top: maximum rows; None: all.
    full: below the table, show the frames of each stack.
    """
    if not rows:
        yield from ("no launches to show", "")
        return
    owners.see(rows)
    whole = sum(row.weight(by) for row in rows)
    launches = sum(row.launches for row in rows)
    stacks = len({(row.process, row.stack.host) for row in rows})
    said = (
        f"{table.duration(sum(row.gpu_ns for row in rows))} of GPU time in {table.count(launches, 'launch')}"
    )
    yield from table.wrap(f"{said} from {table.count(stacks, 'host stack')}")
    yield ""
    shown = rows[:top]
    kernels = _kernels(rows)
    cells = [
        owners.cells(row)
        | {
            "SHARE": f"{100 * row.weight(by) / whole:.1f} %" if whole else "-",
            "GPU TIME": table.duration(row.gpu_ns) if row.untimed < row.launches else "unknown",
            "LAUNCHES": f"{row.launches:,}",
            "KERNEL": kernels[row.mangled],
        }
        for row in shown
    ]
    lines = table.within(cells, left=("COMM", "KERNEL"), cut=("COMM",))
    start = max(map(len, lines)) + 2
    beside = table.WIDTH - start >= LEAST
    stacks_ = ("STACK", *own_lines([row.stack for row in shown], table.WIDTH - (start if beside else 4)))
    for line, stack in zip(lines, stacks_, strict=True):
        yield f"{line:<{start}}{stack}" if beside else line
        if not beside:
            yield f"    {stack}"
    yield ""
    if left := rows[len(shown) :]:
        rest = sum(row.launches for row in left)
        yield f"and {table.count(len(left), 'row')} with {table.count(rest, 'launch')}"
        yield ""
    if full:
        for row in shown:
            yield from _frames(row, kernels[row.mangled])


def _kernels(rows: Sequence[StackRow]) -> dict[str, str]:
    """Return the labels of kernels in at most _KERNEL columns, by mangled name."""
    labels = names.labels(row.mangled for row in rows)
    short = fitted((table.printable(label) for label in labels.values()), _KERNEL)
    return {mangled: short[table.printable(label)] for mangled, label in labels.items()}


def _frames(row: StackRow, kernel: str) -> Iterator[str]:
    """Yield a heading, all frames of a stack, and an empty line."""
    yield f"{table.count(row.launches, 'launch')} of {kernel} from"
    yield from all_frames(row.stack)
    yield ""


def all_frames(stack: Stack) -> Iterator[str]:
    """Yield all frames of a stack, one a line, outermost first. Frames of a recursion are one line."""
    if not stack.host:
        yield "    unknown stack"
    shown = stack.shown if stack.host else stack.ranges
    for text, same in groupby(frame.name + _place(frame) for frame in shown):
        times = _times(same)
        yield f"    {table.fit(text, table.WIDTH - 4 - len(times))}{times}"


def _times(same: Iterable[object]) -> str:
    """Return how often something is repeated, for the end of a line; "" for once."""
    count = sum(1 for _ in same)
    return f" ({count}x)" if count > 1 else ""


def _place(frame: Frame) -> str:
    file = frame.file.rsplit("/", 1)[-1]
    if not file or frame.name.startswith(f"{file}+"):
        return ""
    return f" ({file}:{frame.line})" if frame.line is not None else f" ({file})"


def own_lines(stacks: Sequence[Stack], width: int) -> list[str]:
    """Return the `own_line` of each stack. Stacks that differ in lines of the source only have their lines."""
    names = [own_line(stack, width) for stack in stacks]
    alike: dict[str, set[Stack]] = {}
    for name, stack in zip(names, stacks, strict=True):
        alike.setdefault(name, set()).add(stack)
    return [
        own_line(stack, width, lines=True) if len(alike[name]) > 1 else name
        for name, stack in zip(names, stacks, strict=True)
    ]


def own_line(stack: Stack, width: int, lines: bool = False) -> str:
    """Return the program's own frames in at most `width` columns, outermost first: `main > train > ... > launch`.

    lines: with their lines, where these are known: `main:17 > train:5`.
    """
    if not stack.frames:
        return "unknown"
    own = stack.own()
    ranges, host = own[: len(stack.ranges)], own[len(stack.ranges) :]
    words = [f"[{table.printable(frame.name)}]" for frame in ranges]
    words += [] if stack.complete else [INCOMPLETE]
    for name, same in groupby(_named(frame, lines) for frame in host):
        words.append(table.printable(name) + _times(same))
    return _fitted(words, width)


def _named(frame: Frame, lines: bool) -> str:
    return f"{frame.name}:{frame.line}" if lines and frame.line is not None else frame.name


def _fitted(words: Sequence[str], width: int) -> str:
    """Return the words, without some in the middle if they would need more than `width` columns.

    The last words say most, the first ones which part of the program it is: take them in turn.
    """
    text = _BETWEEN.join(words)
    if len(text) <= width:
        return text
    first: list[str] = []
    last: list[str] = []
    room = width - len(_LEFT_OUT)
    while len(first) + len(last) < len(words):
        word = words[len(first)] if len(first) < len(last) else words[-1 - len(last)]
        room -= len(word) + len(_BETWEEN)
        if room < 0:
            break
        if len(first) < len(last):
            first.append(word)
        else:
            last.insert(0, word)
    return _BETWEEN.join((*first, _LEFT_OUT, *last)) if last else table.fit(words[-1], width)


def show_summary(
    session: Session,
    rows: Sequence[StackRow],
    losses: dict[str, Any],
    results: ResultWriter,
) -> None:
    """Print the summary of the whole measurement.

    rows: all rows of the measurement.
    losses: see `LaunchLosses.fields`. The session knows only an upper bound of the lost launches.
    """
    incomplete = sum(row.launches for row in rows if not row.stack.complete)
    summary = session.summary()
    summary["lost"] = losses["launches_lost"] + losses["operations_lost"]
    summary |= losses | {"launches_incomplete": incomplete}
    lines = summary_text.summary_lines(summary | {"lost": 0})
    lines += latency_text.loss_lines(losses | {"launches_behind_unseen": 0})
    lines += _incomplete_lines(incomplete)
    lines += summary_text.host_program_lines(summary) if results.options.verbose else []
    results.end(summary, lines)


def _incomplete_lines(launches: int) -> list[str]:
    """Return a line about launches whose stacks lack outer frames, given their number."""
    if not launches:
        return []
    why = f"the stack has more than {STACK_LIMIT - 1} frames, or code in it has no unwind information"
    return table.wrap(f"{table.count(launches, 'launch')} with an incomplete host stack: {why}")

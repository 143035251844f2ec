"""The launch block: what a launch passes to the programs in its kernel, as one hidden parameter.

block = launch_block([fragment])
block.bases["times"]      # the offset of that map's address
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from gpubpf.errors import Error
from gpubpf.lower.fragment import Argument
from gpubpf.record import Record, field

TICK_BITS = 10  # the length of a tick is in ns << TICK_BITS


class Lowered(Protocol):
    """A lowered program, for any target."""

    @property
    def arguments(self) -> tuple[Argument, ...]: ...


class LaunchBlock(Record):
    """The layout of the launch block: offsets in bytes, by name for maps.

    The number of a launch is the u64 at `launch_id`. If the u64 at `replay` is not 0, it is the address of a u64 in GPU memory to add
    (for a kernel node of a graph, docs/timing.md).
    """

    size: int
    launch_id: int = 0
    replay: int = 8
    bases: Mapping[str, int] = field(default_factory=dict)
    capacities: Mapping[str, int] = field(default_factory=dict)
    params: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # offset, size
    # Each of these is None if no program reads it:
    pid_tgid: int | None = None  # process << 32 | thread, of the thread that launched (u64)
    kernel: int | None = None  # the kernel's number in its process (u64)
    epoch: int | None = None  # the launch's epoch of allocations (u64)
    tick: int | None = None  # the length of a tick of an AMD GPU's timer, see TICK_BITS (u64)
    shape: int | None = None  # threads of a block, then blocks of the grid, each x, y, z (six u32)
    # Address of a u64 in GPU memory in which the copy counts its executions, or 0 (u64). None if a program reads the launch's number.
    executions: int | None = None


def launch_block(fragments: Iterable[Lowered], counts_executions: bool = False) -> LaunchBlock:
    """Return the layout of the launch block for these fragments. Raises Error for an argument without a map.

    The block has the launch's number, its replay cell, the base of each map, the capacities that a fragment reads, the bytes of
    `param` maps, and the optional words that a fragment reads.

    counts_executions: whether the copy can count how often it runs
    """
    bases: dict[str, int] = {}
    capacities: dict[str, int] = {}
    sizes: dict[str, int] = {}
    arguments = [a for f in fragments for a in f.arguments]
    for argument in arguments:
        if argument.kind == "param":
            sizes[map_of(argument)] = max(sizes.get(map_of(argument), 0), argument.offset + argument.width)
    position = LaunchBlock.replay + 8
    roomy = {argument.map for argument in arguments if argument.kind in ("map_capacity", "shard")}
    for argument in arguments:
        if argument.kind not in ("map_base", "map_capacity", "shard") or map_of(argument) in bases:
            continue
        bases[map_of(argument)] = position
        position += 8
        if argument.map in roomy:
            capacities[map_of(argument)] = position
            position += 8
    params: dict[str, tuple[int, int]] = {}
    for name, size in sizes.items():
        params[name] = (position, size)
        position += align(size, 8)
    words: dict[str, int] = {}
    for kind in ("pid_tgid", "kernel", "epoch"):
        if any(argument.kind == kind for argument in arguments):
            words[kind], position = position, position + 8
    if any((argument.kind, argument.field) == ("time", "globaltimer") for argument in arguments):
        words["tick"], position = position, position + 8
    if any(argument.kind in ("shape", "first_thread") for argument in arguments):
        words["shape"], position = position, position + 24
    if counts_executions and not any(argument.kind in ("launch", "replay") for argument in arguments):
        words["executions"], position = position, position + 8
    return LaunchBlock(position, bases=bases, capacities=capacities, params=params, **words)


def map_of(argument: Argument) -> str:
    """Return the name of an argument's map. Raises Error if it has none."""
    if not argument.map:
        raise Error(
            f"argument {argument.name} of a device program names no map; this is a fault of the lowering"
        )
    return argument.map


def align(value: int, to: int) -> int:
    """Round `value` up to a multiple of `to`."""
    return -(-value // to) * to

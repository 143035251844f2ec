"""The shape of a launch: its grid and block dimensions, and the numbering of its threads, warps and blocks.

A thread's number in the grid is its block's number times the block size, plus its number in the block. In both, x varies fastest, as
in CUDA (CUDA C++ Programming Guide, "Thread Hierarchy"). A warp is 32 threads of a block with consecutive numbers. On an AMD GPU, it
has 32 or 64 threads and is called a wave. A lane is a thread's number in its warp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from gpubpf.agent.definitions import WARP, Vendor
from gpubpf.record import Record

By = Literal["thread", "lane", "warp", "block"]
Index = tuple[int, int, int]
Ranges = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]


class Warp(Record):
    """A group of threads that execute together: number of lanes, size of a memory sector in bytes, the vendor's word for the group."""

    lanes: int = WARP
    sector: int = Vendor.NVIDIA.sector
    word: str = "warp"

    @classmethod
    def of(cls, wave: int | None) -> Warp:
        """Return an AMD GPU's wave with this number of lanes; for None, the warp of NVIDIA GPUs."""
        return NVIDIA if wave is None else cls(wave, Vendor.AMD.sector, "wave")

    def sectors(self, width: int) -> int:
        """Return the minimum number of sectors when each lane accesses `width` bytes."""
        return -(-self.lanes * width // self.sector)


NVIDIA = Warp()


def wave_of(waves: Mapping[str | int, int], gpu: int, mangled: str = "") -> int | None:
    """Return the lanes of a kernel's waves, or else of the GPU's; None on NVIDIA GPUs. waves: see `ProcessLog`."""
    return waves.get(mangled) or waves.get(gpu)


def vendor_fields(vendor: Vendor, wave: int | None) -> dict[str, object]:
    """Return the JSON fields for the GPU's vendor and the number of lanes in a warp or wave."""
    return {"vendor": vendor.word, "wave": NVIDIA.lanes if vendor is Vendor.NVIDIA else wave}


class Shape(Record):
    """The grid and block dimensions of a launch. wave: lanes per wave, on an AMD GPU."""

    grid: Index
    block_dim: Index
    wave: int | None = None

    @property
    def warp(self) -> int:
        """The number of lanes in a warp."""
        return Warp.of(self.wave).lanes

    @property
    def warp_word(self) -> str:
        """The vendor's word for a warp."""
        return Warp.of(self.wave).word

    @property
    def sm_word(self) -> str:
        """The vendor's word for a multiprocessor."""
        return "compute unit" if self.wave else "multiprocessor"

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def block_size(self) -> int:
        """The number of threads in a block."""
        return self.block_dim[0] * self.block_dim[1] * self.block_dim[2]

    @property
    def threads(self) -> int:
        return self.blocks * self.block_size

    @property
    def warps(self) -> int:
        """The number of warps in a block."""
        return -(-self.block_size // self.warp)

    def coordinates(self, threads: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return block x, y, z and thread x, y, z for thread numbers."""
        block, thread = np.divmod(threads, self.block_size)
        return (*unravel(block, self.grid), *unravel(thread, self.block_dim))

    def selection(self, block: Ranges, thread: Ranges) -> np.ndarray | None:
        """Return a mask of the threads whose indices are in these inclusive ranges: bool [threads]; None if all are."""
        within = [
            np.arange(extent) >= first
            if last >= extent
            else (np.arange(extent) >= first) & (np.arange(extent) <= last)
            for extent, (first, last) in zip(self.grid + self.block_dim, block + thread, strict=True)
        ]
        if all(mask.all() for mask in within):
            return None
        bx, by, bz, tx, ty, tz = within
        blocks = (bz[:, None, None] & by[:, None] & bx).ravel()
        threads = (tz[:, None, None] & ty[:, None] & tx).ravel()
        return (blocks[:, None] & threads).ravel()

    def name(self, by: By, number: int) -> str:
        """Return the name of a thread, lane, warp or block: ``thread 4 of block 2``, ``warp 3``, ``block (1,2)``."""
        if by == "lane":
            return f"lane {number}"
        if by == "block":
            return f"block {self.block_index(number)}"
        block, own = self.place(by, number)
        label = self.thread_index(own) if by == "thread" else str(own)
        named = f"{self.word(by)} {label}"
        return named if self.blocks == 1 else f"{named} of block {self.block_index(block)}"

    def word(self, by: By) -> str:
        """Return the word for a thread, lane, warp or block on this GPU."""
        return self.warp_word if by == "warp" else by

    def place(self, by: By, number: int) -> tuple[int, int]:
        """Return the block number, and the thread's or warp's number in the block; for a lane or block, 0 and its own number."""
        if by in ("thread", "warp"):
            return divmod(number, self.block_size if by == "thread" else self.warps)
        return 0, number

    def block_index(self, block: int) -> str:
        """Return the block's index: ``3``, ``(3,0)`` or ``(3,0,1)`` in a grid of one, two or three dimensions."""
        return _short(block, self.grid)

    def thread_index(self, thread: int) -> str:
        """Return a thread's index in its block, in the same form."""
        return _short(thread, self.block_dim)


def shape_cells(owners: Sequence[object], shapes: Sequence[Shape]) -> list[dict[str, str]]:
    """Return a column for each row, ``{"GRID:BLOCK": "8:128"}``; empty dicts if `owners` already distinguish all rows."""
    if all(owners.count(one) == 1 for one in owners):
        return [{} for _ in shapes]
    return [{"GRID:BLOCK": f"{_extents(shape.grid)}:{_extents(shape.block_dim)}"} for shape in shapes]


def _extents(of: Index) -> str:
    """Return extents as ``8``, ``8x2`` or ``8x1x4``."""
    used = max((n for n, extent in enumerate(of) if extent > 1), default=0)
    return "x".join(map(str, of[: used + 1]))


def unravel(number: np.ndarray, extents: Index) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the x, y and z indices of numbers; x varies fastest."""
    rest, x = np.divmod(number, extents[0])
    z, y = np.divmod(rest, extents[1])
    return x, y, z


def index_of(number: int, extents: Index) -> Index:
    """Return the x, y and z index of a number; x varies fastest."""
    rest, x = divmod(number, extents[0])
    z, y = divmod(rest, extents[1])
    return x, y, z


def _short(number: int, extents: Index) -> str:
    x, y, z = index_of(number, extents)
    if extents[2] > 1:
        return f"({x},{y},{z})"
    return f"({x},{y})" if extents[1] > 1 else str(x)

"""Unpack what kernelretsnoop's device programs store about the latest launches, for `Exits.take_maps` and `LaneLateness.of_maps`.

The programs store as little as possible. If all lanes of a warp exit together, they store the time and count one exit for all lanes.
Only for other warps do they count the lanes.
"""

from __future__ import annotations

import numpy as np

from gpubpf.exits.lateness import CLOCK_BITS, CLOCK_MASK, ROUNDS
from gpubpf.records.launch_shape import Shape

WARP = np.dtype([("first", "<u8"), ("late", "<u8")])
ROUND = np.dtype([("left", "<u8"), ("clock", "<u8"), ("time_sm", "<u8")])


def unpacked(
    firsts: np.ndarray, rests: np.ndarray, blocks: np.ndarray, shape: Shape
) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays: the maps `firsts` and `rests` as [ROUNDS, warp] of WARP, and `blocks` as [1, block] with these fields.

    exits    uint32 [lane]: exits of the block's warps whose lanes did not exit together
    rounds   [ROUNDS] of ROUND:
             left     launch << CLOCK_BITS | exits of this launch; 0 if unused, or if the cells of the block belong to several launches
             clock    as the device stores it
             time_sm  time << 16 | multiprocessor
    """
    made = np.zeros((ROUNDS, shape.blocks * shape.warps), WARP)
    made["first"], made["late"] = firsts, rests["late"]
    rounds = blocks["rounds"].reshape(shape.blocks, ROUNDS)
    found = np.zeros((1, shape.blocks), [("exits", blocks.dtype["exits"]), ("rounds", ROUND, (ROUNDS,))])
    found["exits"] = blocks["exits"]
    # [block, warp, round]
    first, left = (
        np.moveaxis(one.reshape(ROUNDS, shape.blocks, shape.warps), 0, 2) for one in (firsts, rests["left"])
    )
    launch, counted = first >> np.uint64(CLOCK_BITS), left >> np.uint64(CLOCK_BITS)
    # If a launch has not counted the lanes of a warp, they exited together.
    exits = np.where(counted == launch, left & np.uint64(CLOCK_MASK), np.uint64(shape.warp))
    exits = np.minimum(exits, np.uint64(shape.block_size + 1)).sum(axis=1)
    # The clocks belong to the launch that wrote last, which may differ from the launch of the exits.
    same = (launch == launch[:, :1]).all(axis=1)
    same &= rounds["launch"] & np.uint64((1 << 64 - CLOCK_BITS) - 1) == launch[:, 0]
    read = found["rounds"][0]
    read["left"] = np.where(same, (launch[:, 0] << np.uint64(CLOCK_BITS)) + exits, np.uint64(0))
    read["clock"] = rounds["clock"]
    read["time_sm"] = rounds["time"] << np.uint64(16) | rounds["sm"] & np.uint64(0xFFFF)
    return made, found


def together(wholes: np.ndarray | None, blocks: np.ndarray, shape: Shape) -> np.ndarray:
    """Return the exits of whole warps by lane, from the map `wholes` and the unpacked `blocks`, as int64 [lane].

    wholes: None if the program counts them with the other exits, because it does not count all threads.
    """
    found = np.zeros(blocks.dtype["exits"].shape, np.int64)
    found[: shape.warp] = 0 if wholes is None else wholes.sum(dtype=np.uint64).astype(np.int64)
    return found

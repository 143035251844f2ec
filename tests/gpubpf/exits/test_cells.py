"""What kernelretsnoop's device programs keep of launches, unpacked: whole warps, others, and launches that share a slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpubpf.ebpf.bytecode import WIDE
from gpubpf.exits.cells import together, unpacked
from gpubpf.exits.lateness import CLOCK_BITS, CLOCK_MASK, CycleLength, Exits
from gpubpf.lower.programs import load
from gpubpf.records.launch_shape import Shape
from gpubpf.tools import kernelretsnoop

SHAPE = Shape((2, 1, 1), (40, 1, 1))  # two warps in each block: one of 32 threads, one of 8
LAUNCH, SLOT = 11, 3


def empty(shape: Shape, lanes: int = 32) -> tuple[Any, Any, Any]:
    """Return the maps `firsts`, `rests` and `blocks` before any launch, as the device programs have them."""
    maps = load(kernelretsnoop.PROGRAM if lanes == 32 else WIDE + kernelretsnoop.PROGRAM).program.maps
    firsts, rests = (
        np.zeros((maps[name].max_entries, shape.blocks * shape.warps), maps[name].value_dtype)
        for name in ("firsts", "rests")
    )
    return firsts, rests, np.zeros((1, shape.blocks), maps["blocks"].value_dtype)


def exited(launch: int, clock: int) -> int:
    return launch << CLOCK_BITS | (~clock & CLOCK_MASK)


def one_launch() -> tuple[Any, Any, Any]:
    """The full warps exit at 1,000, and block 1 ends 70 later. Of the others, the last lane exits 90 after the rest, at 1,200."""
    firsts, rests, blocks = empty(SHAPE)
    firsts[SLOT] = [exited(LAUNCH, clock) for clock in (1000, 1110, 1070, 1110)]
    rests["late"][SLOT, 1::2] = LAUNCH << CLOCK_BITS | 90
    rests["left"][SLOT, 1::2] = LAUNCH << CLOCK_BITS | 8
    blocks["exits"][0, :, :8] = 1
    rounds = blocks["rounds"][0, :, SLOT]
    rounds["clock"], rounds["time"], rounds["launch"], rounds["sm"] = 1010, [5_010, 5_080], LAUNCH, [4, 7]
    return firsts, rests, blocks


def taken(*maps: Any) -> Exits:
    found = Exits(SHAPE)
    found.take_maps(*unpacked(*maps, SHAPE), CycleLength())
    return found


def test_whole_warps_and_others() -> None:
    maps = one_launch()
    _, made = unpacked(*maps, SHAPE)
    assert made["exits"].tolist() == [[[1] * 8 + [0] * 24] * 2]
    assert together(np.array([2, 0, 3], np.uint64), made, SHAPE).tolist() == [5] * 32
    assert together(None, made, SHAPE).tolist() == [0] * 32
    found = taken(*maps)
    assert (found.complete, found.seen) == (1, {(0, LAUNCH)})
    assert (found.warp.count, found.warp.total, found.warp.largest) == (4, 180, 90)
    assert (found.block.total, found.last_warp) == (110 + 40, {1: 2})
    # Block 0 ends at 5,010 + 1,200 - 1,010 ns, and block 1 at 5,080 + 190 ns, on another multiprocessor.
    assert found.grid.total == 70 and sorted(found.sm) == [4, 7]


def a_lane_is_missing(firsts: Any, rests: Any, blocks: Any) -> None:
    rests["left"][SLOT, 3] -= np.uint64(1)


def no_clock_of_a_block(firsts: Any, rests: Any, blocks: Any) -> None:
    blocks["rounds"]["launch"][0, 1, SLOT] = 0


def the_clocks_of_an_earlier_launch(firsts: Any, rests: Any, blocks: Any) -> None:
    blocks["rounds"]["launch"][0, 0, SLOT] = LAUNCH - 8


def a_warp_in_a_later_launch(firsts: Any, rests: Any, blocks: Any) -> None:
    firsts[SLOT, 2] = exited(LAUNCH + 8, 9000)


@pytest.mark.parametrize(
    "change",
    [a_lane_is_missing, no_clock_of_a_block, the_clocks_of_an_earlier_launch, a_warp_in_a_later_launch],
)
def test_launches_that_are_not_whole_do_not_count(change: Any) -> None:
    maps = one_launch()
    change(*maps)
    assert taken(*maps).complete == 0


def test_lanes_that_an_earlier_launch_counted_do_not_matter() -> None:
    """The full warps were not whole eight launches ago."""
    firsts, rests, blocks = one_launch()
    rests["left"][SLOT, ::2] = (LAUNCH - 8) << CLOCK_BITS | 31
    rests["late"][SLOT, ::2] = (LAUNCH - 8) << CLOCK_BITS | 4000
    found = taken(firsts, rests, blocks)
    assert (found.complete, found.warp.total) == (1, 180)


def test_launch_numbers_have_more_bits_in_the_stamp_than_in_the_cells() -> None:
    firsts, rests, blocks = one_launch()
    blocks["rounds"]["launch"][0, :, SLOT] = LAUNCH | 1 << 30
    assert taken(firsts, rests, blocks).complete == 1


def test_waves_of_32_lanes_in_a_text_for_64() -> None:
    shape = Shape((1, 1, 1), (64, 1, 1), wave=32)
    _, made = unpacked(*empty(shape, 64), shape)
    assert together(np.array([6], np.uint64), made, shape).tolist() == [6] * 32 + [0] * 32


def test_garbage_does_no_harm() -> None:
    """Data from the traced process is untrusted."""
    random = np.random.default_rng(6)
    for _ in range(20):
        firsts, rests, blocks = (
            np.frombuffer(random.bytes(one.nbytes), one.dtype).reshape(one.shape) for one in empty(SHAPE)
        )
        blocks = blocks.copy()
        blocks["rounds"]["launch"] = LAUNCH
        assert taken(firsts, rests, blocks).complete == 0  # nothing in it belongs together
        _, made = unpacked(firsts, rests, blocks, SHAPE)
        together(np.frombuffer(random.bytes(64), np.uint64), made, SHAPE)
    whole = together(np.full(2, 1 << 62, np.uint64), made, SHAPE)
    assert whole.tolist() == [-(1 << 63)] * 32  # wrong, but no error

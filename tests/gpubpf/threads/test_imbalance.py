import numpy as np
import pytest

from gpubpf.records.launch_shape import Shape
from gpubpf.threads.imbalance import findings, group, idle_findings, idle_lanes

EVERYTHING = (0, 2**32 - 1)
ALL = (EVERYTHING,) * 3

LENGTHS = {"thread": 6, "lane": 1, "warp": 4, "block": 3}  # columns of an index


def tally(shape, work):
    return np.full(shape.threads, 3, dtype=np.uint64), np.asarray(work, dtype=np.uint64).ravel()


def said(shape, work, sampled=False):
    return findings(group(shape, *tally(shape, work)), "stores", sampled)


def test_coordinates_count_x_fastest():
    shape = Shape((3, 2, 2), (4, 3, 2))
    expected = [
        (bx, by, bz, tx, ty, tz)
        for bz in range(2)
        for by in range(2)
        for bx in range(3)
        for tz in range(2)
        for ty in range(3)
        for tx in range(4)
    ]
    got = np.stack(shape.coordinates(np.arange(shape.threads)), axis=1)
    assert [tuple(map(int, row)) for row in got] == expected
    chosen = shape.selection(((1, 2), EVERYTHING, (1, 1)), ((0, 0), (2, 9), EVERYTHING))
    assert [bool(c) for c in chosen] == [
        bx >= 1 and bz == 1 and tx == 0 and ty == 2 for bx, _, bz, tx, ty, _ in expected
    ]


def test_no_filter_selects_everything():
    assert Shape((2, 1, 1), (64, 1, 1)).selection(ALL, ALL) is None
    assert Shape((2, 1, 1), (64, 1, 1)).selection(((0, 1), (0, 0), EVERYTHING), ALL) is None


@pytest.mark.parametrize(
    "extents",
    [((3, 1, 1), (70, 1, 1)), ((2, 2, 1), (8, 5, 1)), ((1, 1, 1), (5, 1, 1)), ((4, 1, 1), (32, 1, 1))],
)
@pytest.mark.parametrize("filtered", [False, True])
def test_groups_are_what_a_loop_would_sum(extents, filtered):
    shape = Shape(*extents)
    random = np.random.default_rng(7)
    runs, work = (random.integers(0, 1000, shape.threads, dtype=np.uint64) for _ in range(2))
    selected = random.random(shape.threads) < 0.4 if filtered else None
    whose = {
        "thread": lambda block, own: block * shape.block_size + own,
        "lane": lambda block, own: own % 32,
        "warp": lambda block, own: block * shape.warps + own // 32,
        "block": lambda block, own: block,
    }
    for by, key in whose.items():
        expected: dict[int, list[int]] = {}
        for number in range(shape.threads):
            if selected is None or selected[number]:
                sums = expected.setdefault(key(*divmod(number, shape.block_size)), [0, 0, 0])
                sums[0] += 1
                sums[1] += int(runs[number])
                sums[2] += int(work[number])
        groups = group(shape, runs, work, by, selected)
        got = zip(groups.numbers, groups.threads, groups.runs, groups.work, strict=True)
        assert {int(n): [int(t), int(r), int(w)] for n, t, r, w in got} == expected


def test_names_say_as_much_as_needed():
    one, flat, deep = Shape((1, 1, 1), (5, 1, 1)), Shape((4, 1, 1), (64, 1, 1)), Shape((2, 2, 1), (4, 4, 4))
    assert [one.name(by, 4) for by in ("thread", "lane")] == ["thread 4", "lane 4"]
    assert flat.name("thread", 70) == "thread 6 of block 1"
    assert flat.name("warp", 3) == "warp 1 of block 1"
    assert deep.name("thread", 64 + 21) == "thread (1,1,1) of block (1,0)"
    assert deep.name("block", 3) == "block (1,1)"
    groups = group(deep, *tally(deep, np.zeros(256)))
    assert groups.labels(85) == {"BLOCK": "(1,0)", "THREAD": "(1,1,1)"}
    columns = {by: group(deep, *tally(deep, np.zeros(256)), by).indices(np.array([1])) for by in LENGTHS}
    assert {by: len(found) for by, found in columns.items()} == LENGTHS
    indices = {by: [column.item() for column in found] for by, found in columns.items()}
    assert indices == {"thread": [0, 0, 0, 1, 0, 0], "lane": [1], "warp": [0, 0, 0, 1], "block": [1, 0, 0]}
    assert [column.item() for column in groups.indices(np.array([85]))] == [1, 0, 0, 1, 1, 1]


def test_the_largest_come_first_and_ties_in_order():
    shape = Shape((1, 1, 1), (100, 1, 1))
    work = np.zeros(100)
    work[[7, 50, 3]] = [9, 9, 5]
    groups = group(shape, *tally(shape, work))
    assert list(groups.largest(3)) == [7, 50, 3]
    assert list(groups.largest(6)) == [7, 50, 3, 0, 1, 2]
    assert list(groups.largest(40))[:4] == [7, 50, 3, 0]
    assert list(groups.largest(None)) == list(range(100))
    assert len(groups.largest(1000)) == 100


def test_neighbours_in_a_block_that_did_the_same_are_alike():
    shape = Shape((2, 1, 1), (40, 1, 1))
    work = np.repeat([3, 1, 3], [10, 20, 50])
    assert group(shape, *tally(shape, work)).alike() == [(0, 9), (10, 29), (30, 39), (40, 79)]
    selected = np.arange(80) % 40 < 35
    assert group(shape, *tally(shape, work), "thread", selected).alike()[-2:] == [(30, 34), (35, 69)]
    uneven = Shape((4, 1, 1), (40, 1, 1))  # warps of 32 and 8 threads
    assert group(uneven, *tally(uneven, np.zeros(160)), "warp").alike() == [(n, n) for n in range(8)]
    assert group(uneven, *tally(uneven, np.zeros(160)), "block").alike() == [(0, 3)]
    runs = np.where(np.arange(160) % 32 < 16, 1, 2).astype(np.uint64)
    assert group(Shape((1, 1, 1), (160, 1, 1)), runs, np.zeros(160, np.uint64), "lane").alike() == [
        (0, 15),
        (16, 31),
    ]
    assert group(shape, *tally(shape, work), "thread", np.zeros(80, bool)).alike() == []


def test_imbalance_is_largest_over_mean():
    shape = Shape((1, 1, 1), (5, 1, 1))
    assert group(shape, *tally(shape, [4, 4, 4, 4, 3])).imbalance == pytest.approx(4 / 3.8)
    assert group(shape, *tally(shape, [0] * 5)).imbalance == 1.0


def test_one_thread_that_does_less_is_named():
    shape = Shape((1, 1, 1), (5, 1, 1))
    assert said(shape, [4, 4, 4, 4, 3]) == ["thread 4 did 25 % less than the others"]
    assert said(shape, [4, 4, 4, 4, 0]) == ["thread 4 did nothing"]
    assert said(shape, [4, 4, 4, 4, 20]) == ["thread 4 did 5.0x the work of the others"]
    assert said(shape, [0, 0, 0, 0, 20]) == ["thread 4 did all of it"]
    assert said(shape, [10, 10, 10, 12, 13]) == ["threads 3 and 4 did 20 % to 30 % more than the others"]


def test_extreme_differences_are_readable():
    work = np.full((2, 8), 1_000_000)
    work[1, 5] = 101
    assert said(Shape((2, 1, 1), (8, 1, 1)), work) == [
        "thread 5 of block 1 did more than 99 % less than the others"
    ]
    work[1, 4] = 500_000
    assert said(Shape((2, 1, 1), (8, 1, 1)), work) == [
        "threads 4 and 5 of block 1 did 50 % to more than 99 % less than the others"
    ]
    work[:] = 1
    work[1, 5] = 10**9
    assert said(Shape((2, 1, 1), (8, 1, 1)), work) == [
        "thread 5 of block 1 did 1,000,000,000x the work of the others"
    ]


def test_threads_of_a_kernel_that_failed_did_not_finish():
    shape = Shape((1, 1, 1), (5, 1, 1))
    runs, work = np.zeros(5, np.uint64), np.zeros(5, np.uint64)
    assert findings(group(shape, runs, work), "stores") == ["no thread ran the kernel to its end"]
    assert findings(group(shape, runs, work, "warp"), "stores") == ["no warp ran the kernel to its end"]


def test_even_work_is_called_even():
    shape = Shape((1, 1, 1), (5, 1, 1))
    assert said(shape, [7] * 5) == ["the work is even: every thread did the same (7 stores)"]
    assert "every sampled thread did" in said(shape, [7] * 5, sampled=True)[0]
    assert "even" in said(shape, [200001] * 3 + [200000] * 2)[0]
    assert said(shape, [0] * 5) == ["no thread did any stores"]
    assert said(Shape((1, 1, 1), (1, 1, 1)), [9]) == []  # nothing to compare it with
    assert said(Shape((1, 1, 1), (2, 1, 1)), [1, 1]) == [
        "the work is even: every thread did the same (1 store)"
    ]


def test_the_level_that_was_asked_for_is_told():
    shape = Shape((2, 1, 1), (64, 1, 1))
    work = np.full((2, 64), 100)
    work[0, 3] = 1000  # one thread of the four in lane 3
    assert said(shape, work) == ["thread 3 of block 0 did 10.0x the work of the others"]
    lanes = group(shape, *tally(shape, work), "lane")
    assert findings(lanes, "stores") == ["lane 3 did 3.2x the work of the others"]
    assert lanes.imbalance == pytest.approx(1300 / (13700 / 32))
    even = group(shape, *tally(shape, np.full((2, 64), 5)), "warp")
    assert findings(even, "stores") == ["the work is even: every warp did the same (160 stores)"]


def test_groups_with_fewer_threads_are_not_uneven():
    """Of blocks of 100 threads, the last warp has 4, and so do lanes of the last warp."""
    shape = Shape((10, 1, 1), (100, 1, 1))
    even, uneven = (tally(shape, np.where(np.arange(1000) == 999, last, 50)) for last in (50, 5000))
    assert findings(group(shape, *even, "lane"), "loads") == [
        "the lanes' work differs because they have 30 to 40 threads"
    ]
    assert findings(group(shape, *even, "warp"), "loads") == [
        "the warps' work differs because they have 4 to 32 threads"
    ]
    assert "warp 3 of block 9 did" in str(findings(group(shape, *uneven, "warp"), "loads"))


def test_differences_are_told_at_the_level_that_accounts_for_them():
    shape = Shape((4, 1, 1), (256, 1, 1))
    by_block = np.full((4, 256), 100)
    by_block[2] = 400
    assert said(shape, by_block) == ["block 2 did 4.0x the work of the others"]
    by_lane = np.full((4, 256), 100)
    by_lane[:, ::32] = 3000
    assert said(shape, by_lane) == ["lane 0 did 30.0x the work of the others"]
    by_warp = np.full((4, 256), 100)
    by_warp[1, 64:96] = 3000
    assert said(shape, by_warp) == ["warp 2 of block 1 did 30.0x the work of the others"]
    for warps, who in (
        ([2], "warp 2 of each block"),
        ([1, 3], "warps 1 and 3 of each block"),
        ([0, 1, 2, 4, 6], None),
        ([1, 2, 3, 4, 5], "warps 1 to 5 of each block"),
    ):
        each = np.full((4, 16, 32), 100)
        each[:, warps] = 10
        each[:, warps, 3] = 11  # otherwise lanes, or blocks, would account for the differences, too
        more = said(Shape((4, 1, 1), (512, 1, 1)), each)
        assert more[0].startswith(f"{who} did" if who else "20 of 64 warps did"), more
    rest = np.full((4, 256), 100)
    rest[3, 200:] = 10
    assert said(shape, rest) == ["threads 200 to 255 of block 3 did 90 % less than the others"]


def test_both_sides_are_told_the_larger_first():
    shape = Shape((4, 1, 1), (256, 1, 1))
    work = np.full((4, 256), 100)
    work[3, 200:] = 0
    work[0, 0] = 200
    assert said(shape, work) == [
        "threads 200 to 255 of block 3 did nothing",
        "thread 0 of block 0 did 2.0x the work of the others",
    ]


def test_without_a_majority_the_ends_are_named():
    shape = Shape((1, 1, 1), (64, 1, 1))
    assert said(shape, np.arange(64) ** 2) == [
        "the work is uneven: thread 63 did 3.0x the mean, thread 0 did nothing"
    ]
    halves = np.where(np.arange(256) % 32 < 16, 100, 10)
    assert said(Shape((2, 1, 1), (128, 1, 1)), halves) == [
        "the work is uneven: lanes 0 to 15 did 1.8x the mean, lanes 16 to 31 did 0.2x"
    ]
    odd = np.where(np.arange(256) % 2, 100, 0)
    assert said(Shape((2, 1, 1), (128, 1, 1)), odd) == [
        "the work is uneven: every 2nd lane (1 to 31) did 2.0x the mean, every 2nd lane (0 to 30) did nothing"
    ]


def test_a_few_that_do_less_leave_the_work_even():
    work = np.full(2048, 100)
    work[2000:] = 50
    assert said(Shape((8, 1, 1), (256, 1, 1)), work)[0].startswith(
        "threads 208 to 255"
    )  # 1.2 % above the mean
    work[2016:] = 100
    assert said(Shape((8, 1, 1), (256, 1, 1)), work) == [
        "the work is even: the busiest thread did less than 1 % more than the mean",
        "threads 208 to 223 of block 7 did 50 % less than the others",
    ]


def test_lanes_without_a_thread_and_lanes_that_wait():
    shape = Shape((2, 1, 1), (48, 1, 1))
    work = np.full((2, 48), 10)
    assert idle_lanes(shape, tally(shape, work)[1]) == (pytest.approx(0.25), 0)
    work[:, 1:32] = 0
    # Of 2 blocks x 2 warps x 32 lanes: 16 lanes in each second warp are empty, 31 in each first one wait.
    assert idle_lanes(shape, tally(shape, work)[1]) == (pytest.approx(16 / 64), pytest.approx(31 / 64))
    assert any("multiple of 32" in line for line in idle_findings(shape, tally(shape, work)[1]))
    whole = Shape((2, 1, 1), (64, 1, 1))
    assert idle_findings(whole, tally(whole, np.full(128, 3))[1]) == []
    assert idle_lanes(whole, tally(whole, np.zeros(128))[1]) == (0, 0)


def test_sixteen_million_threads_take_seconds_not_minutes():
    shape = Shape((62_500, 1, 1), (256, 1, 1))
    work = np.arange(shape.threads, dtype=np.uint64) % 1000
    groups = group(shape, np.ones(shape.threads, dtype=np.uint64), work, "warp")
    assert len(groups) == 500_000 and int(groups.work.sum()) == int(work.sum())

"""gpuhang from its command line to its exit status, on programs whose kernels hang in ways that are known beforehand."""

from __future__ import annotations

import csv
import itertools
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpubpf_cuda
import gpubpf_examples
from gpubpf.hangs import stands, text
from gpubpf.inject.values import Site
from gpubpf.process import limits
from gpubpf.records.launch_shape import Shape
from gpubpf.show.owner_columns import OwnerColumns
from gpuhang_runs import PATIENCE, TOOL, gone, hanging, read, until_told

pytestmark = gpubpf_cuda.needs_cuda


@pytest.fixture(scope="module")
def hangs() -> Path:
    return gpubpf_examples.build("hangs") / "hangs"


# What to launch: the verdict, and of each kind of place how many warps are there.
PLANTED = {
    "lock": ("spinning", {"spin": 1, "exited": 1}),
    "blocks": ("spinning", {"spin": 2, "barrier": 2}),
    "flag": ("spinning", {"spin": 2, "barrier": 2, "exited": 2}),
    "loop": ("spinning", {"loop": 4}),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_hang_is_named_while_it_hangs(what: str, hangs: Path, tmp_path: Path) -> None:
    verdict, warps = PLANTED[what]
    with hanging(tmp_path, "--", hangs, what, "600") as (tool, out):
        head, *places = until_told(out, verdict, tool)
        assert tool.poll() is None  # as the program still hangs
    assert (head["kernel"], head["launch"], head["gpu"]) == (what, 1, 0)
    assert head["exited"] == warps.get("exited", 0)
    counted: dict[str, int] = {}
    for one in places:
        assert one["type"] == "place" and one["source"].startswith("hangs.cu:")
        counted[one["kind"]] = counted.get(one["kind"], 0) + one["warps"]
        assert (one["turns"] is not None) == (one["kind"] in ("spin", "loop"))
        assert (one["address"] is not None) == (one["kind"] == "spin")
    assert counted == warps
    spins = [one for one in places if one["kind"] == "spin"]
    taken = spins[0]["taken_by"] if spins else None
    assert (what == "lock") == (taken is not None)
    if what == "lock":  # twice by the same warp
        assert (taken["block"], taken["warp"], taken["kind"]) == ([0, 0, 0], 0, "spin")
    if what == "blocks":  # each waits for a word of its own
        assert len({one["address"] for one in spins}) == 2
        assert sorted(one["where"][0]["block"][0] for one in spins) == [0, 1]
    if what == "flag":
        (waiting,) = (one for one in places if one["kind"] == "barrier")
        assert [(one["block"][0], one["warp"]) for one in waiting["missing"]] == [(1, 0), (2, 0)]
        assert {one["source"] for one in waiting["missing"]} == {spins[0]["source"]}


LOCKS = r"""
#include <cstring>
__device__ void take(int *lock, int by) {
    while (atomicCAS(lock, 0, by) != 0) {
    }
}
__global__ void held(int *lock, volatile int *taken) {  // warp 1 of block 1 takes it, and waits for warp 0 at the barrier
    if (blockIdx.x == 1 && threadIdx.x == 32) {
        take(lock, 77);
        *taken = 1;
    }
    if (blockIdx.x == 1 && threadIdx.x == 0) {
        while (!*taken) {
        }
        take(lock, 5);
    }
    __syncthreads();
    atomicExch(lock, 0);
}
__global__ void left(int *lock, volatile int *taken) {  // block 0 takes it and leaves
    if (threadIdx.x) return;
    if (blockIdx.x == 0) {
        while (atomicExch(lock, 1) != 0) {
        }
        *taken = 1;
        return;
    }
    while (!*taken) {
    }
    while (atomicExch(lock, 1) != 0) {
    }
}
__global__ void shared(int *, int *) {  // in each of the blocks, warp 1 takes the lock of the block
    __shared__ int lock;
    __shared__ volatile int taken;
    if (threadIdx.x == 0) lock = taken = 0;
    __syncthreads();
    if (threadIdx.x == 32) take(&lock, 1), taken = 1;
    __syncthreads();
    if (threadIdx.x == 0) take(&lock, 2);
}
__global__ void before(int *lock, int *) {  // another launch has it
    if (threadIdx.x == 0) take(lock + 1, 1);
}
int main(int, char **arguments) {
    int *x, start[3] = {0, 3, 0};
    if (cudaMalloc(&x, 12) || cudaMemcpy(x, start, 12, cudaMemcpyHostToDevice)) return 1;
    if (!strcmp(arguments[1], "held")) held<<<2, 64>>>(x, x + 2);
    if (!strcmp(arguments[1], "left")) left<<<2, 32>>>(x, x + 2);
    if (!strcmp(arguments[1], "shared")) shared<<<1, 64>>>(x, x);
    if (!strcmp(arguments[1], "before")) before<<<1, 32>>>(x, x);
    return cudaDeviceSynchronize() != cudaSuccess;
}
"""


@pytest.mark.parametrize(
    ("kernel", "spins", "taken"),
    [
        ("held", (1, 0), (1, 1, "barrier")),
        ("left", (1, 0), (0, 0, "exited")),
        ("shared", (0, 0), (0, 1, "exited")),
        ("before", (0, 0), None),
    ],
)
@pytest.mark.every(2)
def test_who_took_a_lock(
    kernel: str, spins: tuple[int, int], taken: tuple[int, int, str] | None, tmp_path: Path
) -> None:
    program = gpubpf_cuda.build(LOCKS, tmp_path / "locks")
    with hanging(tmp_path, "--", program, kernel) as (tool, out):
        _, *places = until_told(out, "spinning", tool)
    (spin,) = (one for one in places if one["kind"] == "spin")
    assert [(one["block"][0], one["warp"]) for one in spin["where"]] == [spins]
    found = spin["taken_by"]
    assert (found and (found["block"][0], found["warp"], found["kind"])) == taken
    assert all(one["taken_by"] is None for one in places if one is not spin)


def test_a_barrier_that_a_warp_skips_is_found_at_once(hangs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [
        sys.executable,
        TOOL,
        "--device",
        "sim",
        "--json",
        "-o",
        out,
        "--check",
        "--",
        hangs,
        "barrier",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1, done.stderr
    assert read(out)[-1]["lost"] == 0 and "lost" not in done.stderr  # the words outlive the context
    head, *places = (one for one in read(out) if one["type"] in ("hang", "place"))
    assert (head["verdict"], head["running_ns"] < 10e9) == ("deadlock", True)
    (waiting,) = (one for one in places if one["kind"] == "barrier")
    assert (waiting["barrier"], waiting["turns"]) == (1, None)
    for block in {one["block"][0] for one in waiting["where"]}:
        assert [one["warp"] for one in waiting["missing"] if one["block"][0] == block] == [1]


def test_a_slow_kernel_is_not_called_a_hang(hangs: Path, tmp_path: Path) -> None:
    with hanging(tmp_path, "--", hangs, "slow", "4000000000") as (tool, out):
        _, *places = until_told(out, "running", tool)
    assert [(one["kind"], one["warps"]) for one in places] == [("loop", 4)]


def test_sampled_warps_show_a_loop_without_an_end(hangs: Path, tmp_path: Path) -> None:
    with hanging(tmp_path, "--sample-warps", "1/2", "--seed", "2", "--", hangs, "loop", "600") as (tool, out):
        head, *places = until_told(out, "spinning", tool)
    assert head["warps"] == 4 and 0 < sum(one["warps"] for one in places) < 4


def test_blocks_that_wait_for_each_other_and_get_further_are_no_hang(tmp_path: Path) -> None:
    source = r"""
    __global__ void pipe(volatile int *x) {  // each block waits for the other in every turn
        for (int i = 1; threadIdx.x == 0 && i < 2000000000; i++) {
            while (x[1 - blockIdx.x] < i - static_cast<int>(1 - blockIdx.x)) {
            }
            x[blockIdx.x] = i;
        }
    }
    int main() {
        int *x;
        if (cudaMalloc(&x, 8) || cudaMemset(x, 0, 8)) return 1;
        pipe<<<2, 32>>>(x);
        return cudaDeviceSynchronize() != cudaSuccess;
    }
    """
    program = gpubpf_cuda.build(source, tmp_path / "pipe")
    with hanging(tmp_path, "--", program) as (tool, out):
        until_told(out, "running", tool)
        assert {one["verdict"] for one in read(out) if one["type"] == "hang"} == {"running"}


def test_a_program_is_unchanged_and_fast_kernels_are_not_reported(hangs: Path) -> None:
    done = subprocess.run(
        [sys.executable, TOOL, "--device", "sim", "--check", "--", hangs], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("hangs: PASSED\nno launch ran for 10 s\n")
    header = subprocess.run(
        [sys.executable, TOOL, "--device", "sim", "--csv", "--", hangs], capture_output=True, text=True
    )
    assert list(csv.reader(header.stdout.splitlines())) == [["hangs: PASSED"]]


def test_the_tool_detaches_while_the_kernel_hangs(hangs: Path, tmp_path: Path) -> None:
    with hanging(tmp_path, "--check", "--", hangs, "flag", "600") as (tool, out):
        (attached,) = (one for one in until_told_all(out, tool) if one["type"] == "attached")
        tool.send_signal(signal.SIGTERM)
        assert tool.wait(PATIENCE) == 1  # --check; the program goes on
        assert read(out)[-1]["type"] == "summary"
        assert not gone(attached["pid"])


def until_told_all(out: Path, tool: subprocess.Popen[str]) -> list[dict[str, Any]]:
    until_told(out, "spinning", tool)
    return read(out)


# --- what cannot be planted: words as a traced process may write them ---

WORDS = np.dtype([(name, "<u8") for name in "launch warp place turns events polls changes address".split()])
SHAPE = Shape((2, 1, 1), (64, 1, 1))
SITES = {
    1: Site(1, "k", 7, point="basic_block", ends="value"),
    2: Site(2, "k", 8, point="barrier_arrive", opcode="bar.sync"),
    3: Site(3, "k", 9, point="barrier_arrive", opcode="bar.arrive"),
    4: Site(4, "k", 9, point="basic_block", ends=""),
}


def word(did: int, site: int, barrier: int = 0) -> int:
    return did << 61 | 32 << 55 | barrier << 32 | site


def verdict(now: list[tuple[int, ...]], before: list[tuple[int, ...]], untracked: bool = False) -> str:
    """Return the verdict of two looks: place, turns, events, polls and changes of warps 0, 1, …"""

    def array(rows: list[tuple[int, ...]]) -> Any:
        return np.array([(1, warp, *row, 0) for warp, row in enumerate(rows)], WORDS)

    reading = stands._Reading(array(now), array(before), SHAPE, SITES)
    return reading.verdict(None, False, untracked)


def spin(turns: int, changes: int = 0) -> tuple[int, ...]:
    return word(stands.LOOP, 1), turns, turns, turns, changes


WAITS = (word(stands.BARRIER, 2), 0, 0, 0, 0)
EXITED = (word(stands.EXITED, 5), 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("now", "before", "expected"),
    [
        ([spin(9), WAITS, WAITS, spin(9)], [spin(5), WAITS, WAITS, spin(5)], "spinning"),
        (
            [spin(9), WAITS, WAITS, spin(9, 2)],
            [spin(5), WAITS, WAITS, spin(5, 1)],
            "running",
        ),  # another value
        (
            [spin(9), WAITS, WAITS, spin(5)],
            [spin(5), WAITS, WAITS, spin(5)],
            "unknown",
        ),  # a warp does not turn
        ([WAITS, WAITS, spin(9), spin(9)], [WAITS, WAITS, spin(5), spin(5)], "deadlock"),  # of block 0
        ([EXITED, WAITS, EXITED, EXITED], [EXITED, WAITS, EXITED, EXITED], "deadlock"),
        (
            [WAITS, WAITS, spin(9), spin(9)],
            [(word(2, 2), 2**15, 0, 0, 0), WAITS, spin(5), spin(5)],
            "running",
        ),  # it has passed barriers in between
        (
            [(word(2, 3), 0, 0, 0, 0)] * 4,
            [(word(2, 3), 0, 0, 0, 0)] * 4,
            "unknown",
        ),  # bar.arrive does not wait
        ([(word(2, 2, 255), 0, 0, 0, 0)] * 4, [(word(2, 2, 255), 0, 0, 0, 0)] * 4, "unknown"),  # of a cluster
        ([(word(4, 4), 9, 9, 0, 0)] * 4, [(word(4, 4), 5, 5, 0, 0)] * 4, "unknown"),  # a loop of unknown kind
        ([(word(7, 99), 2**64 - 1, 0, 0, 0)] * 4, [(word(0, 0), 0, 2**64 - 1, 0, 0)] * 4, "running"),
    ],
)
def test_verdicts(now: list[tuple[int, ...]], before: list[tuple[int, ...]], expected: str) -> None:
    assert verdict(now, before) == expected


def test_nothing_is_concluded_about_warps_that_were_not_seen() -> None:
    now, before = [spin(9)] * 4, [spin(5)] * 4
    assert verdict(now, before) == "spinning"
    assert verdict(now, before, untracked=True) == "unknown"


def test_only_launches_with_warps_are_open_and_no_shape_is_believed() -> None:
    rows = np.zeros(3, [("launch", "<u8"), ("kernel", "<u8"), ("grid", "<u8", 3), ("block", "<u8", 3)])
    rows["launch"] = 5, 6, 7
    rows["grid"], rows["block"] = 1, 1
    rows["block"][1] = 2048
    words = np.zeros(4, WORDS)
    words["launch"] = 5, 6, 7, 7
    words["place"] = [word(did, 1) for did in (stands.EXITED, stands.BEGUN, stands.LOOP, stands.EXITED)]
    hangs = stands.Hangs(1)
    found = hangs._launches(1, rows, words)
    assert [(number, stands._shape(head) is None) for number, head in found] == [(6, True), (7, False)]
    # A launch stays known when a later one has its row.
    hangs._open[1, 6], hangs._open[2, 8] = (stands._Open(0.0, head=head) for _, head in found)
    rows["launch"][1] = 9
    assert [number for number, _ in hangs._launches(1, rows, words)] == [6, 7]
    assert len(stands._of_launch(words, 7, Shape((1 << 30, 1 << 30, 1 << 30), (1, 1, 1)))) == 1


def test_places_that_the_kernel_does_not_have_are_one_place() -> None:
    words = np.zeros(4000, WORDS)
    words["warp"] = np.arange(4000)
    words["place"] = [word(stands.BARRIER, 100 + number) for number in range(4000)]
    reading = stands._Reading(words, words, Shape((2000, 1, 1), (64, 1, 1)), SITES)
    hang = stands.Hang(1, "app", 0, "k", 1, reading.shape, 0, "unknown", 0)
    [place] = reading.places(hang)
    assert (place.kind, place.site, place.warps, place.missing) == ("barrier", None, 4000, ())


def test_places_have_a_limit() -> None:
    """A process can write any place. The largest are reported, and the others share one row; the text stays short."""
    count = 20_000
    sites = {
        number: Site(number, "k", number, point="barrier_arrive", opcode="bar.sync") for number in range(100)
    }
    words = np.zeros(count, WORDS)
    words["warp"] = np.arange(count)
    at = np.arange(count) % (256 * len(sites) // 2)
    words["place"] = [word(stands.BARRIER, one // 256, one % 256) for one in at.tolist()]
    words["place"][:100] = word(stands.BARRIER, 99, 7)
    words["place"][100:200] = word(stands.BEGUN, 1000)  # an unknown place of its own
    reading = stands._Reading(words, words, Shape((count, 1, 1), (32, 1, 1)), sites)
    hang = stands.Hang(1, "app", 0, "k", 1, reading.shape, 0, "unknown", 0)
    hang.places = tuple(reading.places(hang))
    numbers = [one.warps for one in hang.places]
    assert len(numbers) == stands.MOST_PLACES - 1 and sum(numbers) == count  # one is both unknown and large
    assert [(one.site, one.barrier) for one in hang.places if one.warps == 100] == [(99, 7)]
    [rest] = [one for one in hang.places if one.kind == "block"]
    assert rest.site is None and rest.barrier is None and rest.warps > count // 2
    assert len(list(text.lines(hang, False, OwnerColumns()))) < 10 * stands.MOST_PLACES


def test_launches_of_a_user_cannot_take_all_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches of others are looked at as ever, and a notice names the user."""
    now = itertools.count()
    monkeypatch.setattr(stands.time, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(limits, "SCAN_SHARE", 0.0)
    session, hangs = Shared(), stands.Hangs(2)
    for user in (7, 8):
        session.user = user
        hangs.look(session)  # type: ignore[arg-type]
    hangs._budget.spend(7, limits.SCAN_BURST)
    looks = []
    launches = hangs._launches
    monkeypatch.setattr(hangs, "_launches", lambda *some: looks.append(session.user) or launches(*some))  # type: ignore[func-returns-value]
    for user in (7, 8, 7):
        session.user = user
        hangs.look(session)  # type: ignore[arg-type]
    assert looks == [8] and hangs._budget._left[8][0] < limits.SCAN_BURST
    assert [*text.notices(hangs)] == [
        "launches of user 7 are looked at less often: what its processes write takes too long to read"
    ]


class Shared:
    """A session in which a process has one launch of one warp, which spins until `place` changes."""

    device = SimpleNamespace(kind="gpu")
    user = 7

    def __init__(self) -> None:
        numbers = [(name, "<u8") for name in ("launch", "kernel", "exited", "untracked")]
        self.rows = np.zeros(1, [*numbers, ("grid", "<u8", 3), ("block", "<u8", 3)])
        self.rows["launch"], self.rows["kernel"], self.rows["grid"], self.rows["block"] = 1, 9, 1, (32, 1, 1)
        self.words = np.array([(1, 0, *spin(1), 64)], WORDS)
        self.known = True

    def shared(self, name: str, processes: Any = None) -> list[Any]:
        array = (self.words if name == "stands" else self.rows).copy()
        return (
            [SimpleNamespace(process=1, pid=5, comm="app", array=array, user=self.user)] if self.known else []
        )

    def turn(self) -> None:
        for name in ("turns", "events", "polls"):
            self.words[name] += np.uint64(1)

    def sites(self, mangled: str, pid: int) -> dict[int, Site]:
        return SITES

    def faults(self) -> dict[int, Any]:
        return {}

    gpus = waves = faults

    def failed(self) -> set[int]:
        return set()

    ended = failed

    def kernel_names(self) -> dict[int, dict[int, str]]:
        return {1: {9: "k"}}


def test_words_are_read_only_while_a_launch_runs() -> None:
    session, read = Shared(), []
    session.shared = lambda name, processes=None: read.append(name) or Shared.shared(session, name)  # type: ignore[assignment,func-returns-value]
    session.rows["exited"] = 1
    session.words["place"] = word(stands.EXITED, 5)
    hangs = stands.Hangs(1)
    hangs.look(session)  # type: ignore[arg-type]
    assert read == ["launches"]
    session.rows["exited"] = 0
    hangs.look(session)  # type: ignore[arg-type]
    assert read == ["launches", "launches", "stands", "locks"]


def test_blocks_alike_are_one_part_and_nothing_that_is_cut_is_lost() -> None:
    warps = [stands.Warp((x, 0, 0), warp) for x in (0, 1, 2, 5) for warp in (0, 3)]
    assert text._list(warps, 9, None) == "blocks 0 to 2: 0, 3; block 5: 0, 3; 1 more"
    apart = [stands.Warp((x, 1, 0), x % 7) for x in range(20)]
    assert text._list(apart, 20, 4).endswith("; block (3,1): 3; 16 more")
    hang = stands.Hang(1, "app", 0, "k", 1, SHAPE, 0, "unknown", 0)
    where = tuple(stands.Warp((2000 + 3 * x, 100, 7), 10) for x in range(4))
    source = "a_source_file_with_a_long_name_that_fits_nowhere.cu:123"
    hang.places = (stands.Place(hang, "barrier", 1, source, 4, where, None, 15, (), None),)
    lines = list(text.lines(hang, False, OwnerColumns()))
    assert max(map(len, lines)) <= 80
    assert f"barrier 15 at {source}: {text._list(where, 4, 4)}" in " ".join(map(str.strip, lines))


def test_a_launch_that_ends_after_all_is_reported_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host or another kernel has changed the word that it waited for."""
    seconds = itertools.count()
    monkeypatch.setattr(stands.time, "monotonic", lambda: float(next(seconds)))
    hangs, session, found = stands.Hangs(2), Shared(), list[stands.Hang]()
    for _ in range(5):
        session.turn()
        found += hangs.look(session)  # type: ignore[arg-type]
    assert [hang.verdict for hang in found] == ["spinning"] and hangs.stuck and not hangs.take_ended()
    session.known = False  # the process is gone: what it wrote last counts
    hangs.look(session)  # type: ignore[arg-type]
    assert hangs.stuck
    session.known = True
    session.words["place"] = word(stands.EXITED, 5)
    assert not hangs.look(session) and not hangs.stuck  # type: ignore[arg-type]
    [hang] = hangs.take_ended()
    assert text.ended(hang) == "pid 5: launch 1 of k has ended; it was reported as spinning"

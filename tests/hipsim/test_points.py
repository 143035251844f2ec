"""Points of AMD kernels that few tools use: thread blocks, barriers, basic blocks. A program of known counts sees exact ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpubpf_bcc import compiled
from hipsim_device import environment, libraries, program
from hipsim_engine import GPUS

TEXT = """
#include <gpubpf.h>
GPU_ARRAY(counts, u64, 8);
GPU_ARRAY(left, u64, 4096);      /* threads that have left, by launch and block */
GPU_SITE_ARRAY(entered, u64);    /* threads that enter a basic block */
GPU_WARP_ARRAY(longest, u64, 1); /* how long a wave waited */
static inline void count(int key) {
    u64 *mine = counts.lookup(&key);
    if (mine) __sync_fetch_and_add(mine, 1);
}
static inline u64 *of_block(u64 launch) {
    u64 x, y, z;
    bpf_get_block_idx(&x, &y, &z);
    int key = (launch * 4 + x) & 4095;
    return left.lookup(&key);
}
int on_begin(struct gpu_block_begin *ctx) { count(0); return 0; }
int on_exit(struct gpu_exit *ctx) {
    u64 *mine = of_block(ctx->launch);
    if (mine) __sync_fetch_and_add(mine, 1);
    return 0;
}
int on_end(struct gpu_block_end *ctx) {
    u64 *mine = of_block(ctx->launch), x, y, z;
    bpf_get_block_dim(&x, &y, &z);
    count(1);
    if (mine && *mine == x * y * z) count(2);
    return 0;
}
int on_block(struct gpu_basic_block *ctx) {
    u64 site = ctx->site, *here = entered.lookup(&site);
    if (here) __sync_fetch_and_add(here, 1);
    return 0;
}
int on_arrive(struct gpu_barrier_arrive *ctx) {
    count(3);
    if (ctx->barrier == 0 && ctx->threads == 0) count(4);
    return 0;
}
int on_leave(struct gpu_barrier_leave *ctx) {
    int key = 0;
    u64 waited = ctx->waited, *mine = longest.lookup(&key);
    count(5);
    if (mine) gpu_max(mine, waited);
    return 0;
}
"""
SCRIPT = """
import json, sys
from gpubpf.program import BPF
from gpubpf.show import cli
parser = cli.parser("points", "", "")
for add in (cli.add_targets, cli.add_kernels, cli.add_device, cli.add_looks, cli.add_output):
    add(parser)
args = cli.parse(parser, sys.argv[3:])
b = BPF(text=open(sys.argv[1]).read())
for point in json.loads(sys.argv[2]):
    getattr(b, "attach_gpu_" + point)(kernel=args.kernel, fn_name="on_" + point.split("_")[-1])
with b.trace(cli.Options.of(args)) as session:
    for _ in session.intervals(None, None):
        pass
summary = session.summary()
sites = {k.mangled: [[s.point, s.block] for _, s in sorted(session.sites(k.mangled).items())] for k in session.kernels()}
used = {d.name for d in b.attached.definitions()}
found = {name: [i.array.tolist() for i in b[name].instances()] for name in b.attached.programs.maps if name in used}
json.dump({"summary": summary, "sites": sites, **found}, open("found.json", "w"))
"""
POINTS = ("block_end", "block_begin", "exit", "barrier_arrive", "barrier_leave")


@pytest.fixture(scope="module", autouse=True)
def text() -> None:
    compiled(TEXT)


def measured(
    place: Path, app: Path, *kernels: str, points: tuple[str, ...] = POINTS, **variables: str
) -> dict[str, Any]:
    libraries()
    (place / "points.c").write_text(TEXT)
    (place / "points.py").write_text(SCRIPT)
    chosen = [word for kernel in kernels for word in ("--kernel", kernel)]
    done = subprocess.run(
        [sys.executable, "points.py", "points.c", json.dumps(points), *chosen, "--device", "sim", "--", app],
        capture_output=True, text=True, timeout=300, cwd=place, env=environment(**variables),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    return json.loads((place / "found.json").read_text())


@pytest.mark.every(6)
@pytest.mark.parametrize("gpu", GPUS)
def test_blocks_begin_and_end_once(tmp_path: Path, gpu: str) -> None:
    """20 launches in four streams, with 4 blocks each. A block ends after all of its threads, whichever way they went."""
    found = measured(tmp_path, program("points", gpu=gpu), "early")
    assert found["counts"][0][:3] == [80, 80, 80]
    assert sorted(found["left"][0], reverse=True)[:81] == [128] * 80 + [0]
    assert found["summary"]["launches_instrumented"] == 20 and found["summary"]["lost"] == 0
    points = [point for point, _ in found["sites"]["_Z5earlyPi"]]
    assert points[0] == "block_begin" and points.count("exit") == points.count("block_end") >= 1
    without_exits = measured(tmp_path, program("points", gpu=gpu), "early", points=("block_end",))
    assert without_exits["counts"][0][1:3] == [80, 0]


@pytest.mark.every(6)
@pytest.mark.parametrize("gpu", GPUS)
def test_barriers(tmp_path: Path, gpu: str) -> None:
    """Each thread arrives at each barrier and leaves it; a lane that is off does not, and a wave may have none."""
    found = measured(tmp_path, program("points", gpu=gpu), "tile", "some", HIPSIM_HOSTILE="1")
    threads = 3 * 2 * 4 * 256 + (256 - (32 if gpu == "gfx1030" else 64)) + (256 - 32)
    assert found["counts"][0][3:6] == [threads] * 3
    assert found["summary"]["launches_instrumented"] == 2 and found["summary"]["lost"] == 0
    sites = [point for point, _ in found["sites"]["_Z4tilePii"] if point.startswith("barrier")]
    assert sites == ["barrier_arrive", "barrier_leave"] * (len(sites) // 2) and sites
    alone = measured(tmp_path, program("points", gpu=gpu), "tile", points=("barrier_leave",))
    assert alone["counts"][0][3:6] == [0, 0, 3 * 2 * 4 * 256]


@pytest.mark.every(6)
@pytest.mark.parametrize("gpu", GPUS)
def test_how_long_waves_wait_at_a_barrier(tmp_path: Path, gpu: str) -> None:
    """On the virtual clock: each wave arrives one step after the one before it, and the last one waits for nobody."""
    found = measured(tmp_path, program("points", gpu=gpu), "waits", HIPSIM_CLOCK="virtual")
    (waited,) = (array[0] for array in found["longest"])
    step = waited[0] - waited[1]
    assert len(waited) == (8 if gpu == "gfx1030" else 4) and step > 100
    assert waited[::-1] == [waited[-1] + step * n for n in range(len(waited))] and waited[-1] <= 1


@pytest.mark.every(3)
@pytest.mark.parametrize("gpu", GPUS)
def test_basic_blocks(tmp_path: Path, gpu: str) -> None:
    """Each thread enters the first block and the last one, and the loop three times."""
    found = measured(tmp_path, program("points", gpu=gpu), "tile", points=("basic_block",))
    sites = found["sites"]["_Z4tilePii"]
    assert sites == [["basic_block", number] for number in range(len(sites))]
    counts = [sum(column) for column in zip(*found["entered"][0], strict=True)]
    assert counts[0] == 4 * 256 and max(counts) == 3 * 4 * 256

"""Programs with every kind of map inside a real kernel, on the embedded device: known answers end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda
from gpubpf.lower.programs import verified
from gpubpf_bcc import compiled

ROOT = Path(__file__).resolve().parents[2]
CUDA = r"""
#include <cstdio>
__global__ void scale(float *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        x[i] *= 2;
}
int main() {
    float *x;
    cudaMalloc(&x, 4 * 256);
    cudaMemset(x, 0, 4 * 256);
    for (int launch = 0; launch < 3; launch++)
        scale<<<4, 64>>>(x, 200);
    printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
"""
TEXT = r"""
#include <gpubpf.h>
struct event { u64 launch; u32 thread, block; u64 work; u64 site; };
struct edge { u32 block; u8 active; };
GPU_HASH(edges, struct edge, u64, 64);
GPU_HASH(blocks, u32, u64, 64);
GPU_HISTOGRAM(sizes, 8);
GPU_RINGBUF(events, struct event, 16);
GPU_THREAD_ARRAY(mine, u64, 2);
GPU_WARP_ARRAY(warps, u64, 1);
GPU_BLOCK_ARRAY(last, u64, 2);
GPU_KERNEL_ARRAY(whole, u64, 3);
GPU_PARAM(filter, struct gpu_filter);

int on_entry(struct gpu_entry *ctx) {
    int key = 1;
    u64 *entered = mine.lookup(&key);
    if (entered)
        *entered += 1;
    return 0;
}

int on_exit(struct gpu_exit *ctx) {
    int key = 0;
    struct gpu_filter *chosen = filter.lookup(&key);
    if (!chosen || !gpu_selected(chosen))
        return 0;
    u64 bx, by, bz, tx, ty, tz;
    bpf_get_block_idx(&bx, &by, &bz);
    bpf_get_thread_idx(&tx, &ty, &tz);
    struct edge edge = {};
    edge.block = bx;
    edge.active = ctx->work != 0;
    edges.increment(edge);
    blocks.increment((u32)bx, ctx->work);
    sizes.increment(gpu_lane() & 7);
    struct event event = {};
    event.launch = ctx->launch;
    event.thread = tx;
    event.block = bx;
    event.work = gpu_global_thread();
    event.site = ctx->site;
    events.ringbuf_output(&event, sizeof(event), 0);
    u64 *warp = warps.lookup(&key), *total = whole.lookup(&key);
    if (warp && total) {
        __sync_fetch_and_add(warp, 1);
        __sync_fetch_and_add(total, tx);
    }
    key = 1;
    u64 *highest = last.lookup(&key);
    key = 0;
    if (highest)
        gpu_max(highest, gpu_global_thread() + 1);
    u64 *left = mine.lookup(&key);
    if (left)
        *left += 100;
    if (bx == 3 && tx == 9)
        bpf_trace_printk("block %d, thread %d: %d stores\n", bx, tx, ctx->work);
    return 0;
}
"""
SCRIPT = """
import argparse, json, sys
from gpubpf.ebpf import maps
from gpubpf.show import cli
from gpubpf.program import BPF
parser = cli.parser("probe", "", "")
for add in (cli.add_targets, cli.add_kernels, cli.add_threads, cli.add_device, cli.add_looks, cli.add_output):
    add(parser)
args = cli.parse(parser, sys.argv[2:])
b = BPF(text=open(sys.argv[1]).read())
b.attach_gpu_entry(kernel=args.kernel, fn_name="on_entry")
b.attach_gpu_exit(kernel=args.kernel, fn_name="on_exit", accumulate="stores")
found = {"prints": [], "events": []}
rings = [d.name for d in b.attached.definitions() if d.kind == "ringbuf"]
with b.trace(cli.Options.of(args)) as session:
    for _ in session.intervals(args.interval, args.count):
        for name in rings:
            for part in session.rings(name):
                if name == maps.PRINTS:
                    found["prints"] += maps.prints(b.attached.formats(), part.records)
                else:
                    found[name] += part.records.tolist()
for d in b.attached.definitions():
    for i in session.instances(d.name) if d.kind not in ("param", "ringbuf") else ():
        found[d.name] = maps.decode(d, i.raw, i.capacity).tolist()
        found["lost " + d.name] = maps.lost(d, i.raw, i.capacity)
found["sites"] = {
    kernel.mangled: {n: [s.source, s.source_line] for n, s in session.sites(kernel.mangled).items()}
    for kernel in session.kernels()
}
for name in rings:
    for counts in session.ring_counts(name):
        found["lost " + name] = sum(shard.lost + shard.incomplete for shard in counts.shards)
json.dump(found, open("found.json", "w"))
"""


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    """A directory with `scale`, the traced program, and the probe."""
    compiled(TEXT)
    where = tmp_path_factory.mktemp("program")
    gpubpf_cuda.build(CUDA, where / "scale", "-lineinfo")
    (where / "probe.c").write_text(TEXT)
    (where / "probe.py").write_text(SCRIPT)
    return where


@pytest.fixture(scope="module")
def run(where):
    def once(*options, **environment):
        command = [sys.executable, "probe.py", "probe.c", "--device", "sim", *options, "--", "./scale"]
        done = subprocess.run(
            command, cwd=where, capture_output=True, text=True, timeout=120, env=os.environ | environment
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "no error\n"
        return json.loads((where / "found.json").read_text())

    return once


@pytest.mark.every(2)
@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_every_map_has_the_known_answer(run, clock):
    """3 launches of 4 blocks of 64 threads, of which the first 200 store once."""
    found = run("--kernel", "scale", CUDASIM_CLOCK=clock)
    assert found["mine"] == [[300] * 256, [3] * 256]
    assert dict(found["blocks"]) == {0: 192, 1: 192, 2: 192, 3: 24}
    assert sorted(found["edges"]) == [
        [[0, 1], 192],
        [[1, 1], 192],
        [[2, 1], 192],
        [[3, 0], 168],
        [[3, 1], 24],
    ]
    assert found["sizes"] == [96] * 8
    events = found["events"]
    assert len({launch for launch, *_ in events}) == 3
    assert sorted((block, thread) for _, thread, block, *_ in events) == sorted(
        [(block, thread) for block in range(4) for thread in range(64)] * 3
    )
    assert all(number == 64 * block + thread for _, thread, block, number, _ in events)
    assert found["warps"] == [[96] * 8]
    assert found["last"] == [[0] * 4, [64, 128, 192, 256]]
    assert found["whole"] == [[3 * 4 * sum(range(64))], [0], [0]]
    (sites,) = found["sites"].values()
    ways = {number >= 200: sites[str(site)] for _, _, _, number, site in events}
    lines = CUDA.splitlines()
    for beyond, text in ((True, "    if (i < n)"), (False, "}")):  # where it leaves, and after its work
        source, line = ways[beyond]
        assert Path(source).name == "scale.cu" and lines[line - 1] == text
    assert found["prints"] == ["block 3, thread 9: 0 stores\n"] * 3
    lost = {name: value for name, value in found.items() if name.startswith("lost ")}
    assert not any(lost.values()), lost


def test_filters_act_on_the_device(run):
    found = run("--kernel", "scale", "--block", "3", "--thread", "6:9", "--launch", "2:3")
    assert sorted((block, thread) for _, thread, block, *_ in found["events"]) == sorted(
        [(3, thread) for thread in (6, 7, 8, 9)] * 2
    )
    assert found["mine"][1] == [2] * 256
    assert found["mine"][0] == [0] * 198 + [200] * 4 + [0] * 54


def test_the_programs_in_the_documentation():
    """They compile; those for accesses are verified and lowered, too."""
    page = (ROOT / "docs" / "device-programs.md").read_text()
    access, shared, host = (
        compiled("#include <gpubpf.h>\n" + part.split("```")[0]) for part in page.split("```c\n")[1:]
    )
    assert [(f.name, f.point) for f in access.device_functions] == [("on_access", "access")]
    assert "match.any.sync" in verified(access, "on_access")[0].ptx
    assert shared.maps["shared_cells"].kind == "site_array" and verified(shared, "on_shared")
    assert [(f.name, f.point) for f in host.host_functions] == [("on_launch", "launch")]
    assert host.maps["slots"].kind == "shared_array"


def test_the_tool_in_the_documentation(where):
    """docs/device-programs.md shows a whole tool; it counts what it says."""
    page = (ROOT / "docs" / "device-programs.md").read_text()
    (where / "smcount.py").write_text(page.split("```python\n")[1].split("```")[0])
    command = [sys.executable, "smcount.py", "--device", "sim", "--", "./scale"]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    threads = [int(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("SM ")]
    assert sum(threads) == 3 * 4 * 64

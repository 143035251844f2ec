"""gpurun on the embedded AMD device: an object's programs at the entry and exit of a kernel, and at its memory accesses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from gpubpf_objects import build, needs_clang
from hipsim_device import ROOT, environment, program

pytestmark = needs_clang

# 1,000 additions on 4 blocks of 256 threads.
TEXT = """
MAP(runs, THREAD_ARRAY, u32, u64, 1);
MAP(counts, GPU_ARRAY, u32, u64, 2);
MAP(blocks, GPU_HASH, u64, u64, 16);
const volatile u64 loud = 2;
static __attribute__((always_inline)) void add(u32 key) {
    u64 *count = bpf_map_lookup_elem(&counts, &key);
    if (count)
        __sync_fetch_and_add(count, 1);
}
SEC("kprobe/KERNEL") int on_entry(void *ctx) { add(0); return 0; }
SEC("kprobe/__memcapture") int on_access(void *ctx) { add(1); return 0; }
SEC("kretprobe/KERNEL") int on_exit(void *ctx) {
    u64 block, thread, y, z, one = 1;
    u32 zero = 0;
    u64 *mine = bpf_map_lookup_elem(&runs, &zero);
    bpf_get_block_idx(&block, &y, &z);
    bpf_get_thread_idx(&thread, &y, &z);
    if (mine)
        *mine += 1;
    bpf_map_update_elem(&blocks, &block, &one, 0);
    if (block == loud && thread == 255)
        print_all("block %lu, thread %lu %s %d %d %d", block, thread, (u64)"of", 1, -2, 3);
    return 0;
}
"""


def test_programs_of_an_object(tmp_path: Path) -> None:
    app = program("vectoradd")
    path = build(TEXT.replace("KERNEL", "_Z9vectorAddPKfS0_Pfi"), tmp_path / "probe.bpf.o")
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "gpurun.py", path, "--set", "blocks[99]=7", "--json", "-o", out, "--", app, "1000"],
        capture_output=True, text=True, timeout=300, env=environment(),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "1000 sums are right\n"), done.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    maps = {
        one["map"]: [(e["key"], e["value"]) for e in one["entries"]]
        for one in records
        if one["type"] == "map"
    }
    assert maps["runs"] == [(0, [1] * 1024)]
    assert maps["counts"] == [(0, 1024), (1, 3 * 1000)]
    assert maps["blocks"] == [*((block, 1) for block in range(4)), (99, 7)]
    assert [one["text"] for one in records if one["type"] == "print"] == ["block 2, thread 255 of 1 -2 3"]

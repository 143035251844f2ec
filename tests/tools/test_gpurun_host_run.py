"""gpurun with programs at events of the Linux kernel and in the middle of functions, on a program with known answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gpubpf_cuda
import gpubpf_host
import gpubpf_specs
from gpubpf_objects import build, needs_clang

pytestmark = [*gpubpf_cuda.needs_cuda, needs_clang, gpubpf_host.needs_bpf]

# app: touches 300 pages at PAGES, sleeps 20 times, then launches work twice, with a call of turns(5) after each launch. The loop of
# `turns`, which has 9 bytes of code, begins 2 bytes after its entry.
PAGES = 0x6A0000000000
APP = r"""
#include <cstdio>
#include <sys/mman.h>
#include <unistd.h>
extern "C" int turns(int n);
asm(".text\n.globl turns\n"
    ".type turns, @function\nturns: xor %eax, %eax\n1: inc %eax\ncmp %edi, %eax\njl 1b\nret\n.size turns, . - turns\n");
__global__ void work(int *numbers) { numbers[threadIdx.x] = 1; }
int main() {
    char *pages = (char *)mmap((void *)PAGES, 300 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    madvise(pages, 300 * 4096, MADV_NOHUGEPAGE);
    for (int i = 0; i < 300; i++) pages[4096 * i] = 1;
    for (int i = 0; i < 20; i++) usleep(1000);
    int *numbers, found = 0;
    cudaMalloc(&numbers, 4096);
    for (int i = 0; i < 2; i++) {
        work<<<1, 40>>>(numbers);
        if (cudaDeviceSynchronize()) return 98;
        found += turns(5);
    }
    return found == 10 ? 7 : 97;
}
""".replace("PAGES", str(PAGES))
COUNT = """
#define COUNT(number) ({ \\
    u32 key = number; u64 *count = bpf_map_lookup_elem(&counts, &key); if (count) __sync_fetch_and_add(count, 1); })
MAP(counts, ARRAY, u32, u64, 4);
static long (*bpf_get_current_comm)(void *to, u32 size) = (void *)16;
static __attribute__((always_inline)) bool traced(void) {
    char comm[16];
    return !bpf_get_current_comm(comm, 16) && comm[0] == 'e' && comm[1] == 'v' && comm[2] == 't' && !comm[3];
}
"""
EVENTS = """
struct context { u64 registers[21]; u64 period, address; };
SEC("perf_event/page-faults:1") int on_fault(struct context *ctx) {
    if (ctx->address - PAGES < 300 * 4096)
        COUNT(0);
    return 0;
}
SEC("perf_event/context-switches:1") int on_switch(void *ctx) {
    if (traced())
        COUNT(1);
    return 0;
}
SEC("perf_event/cpu-clock:199hz") int on_clock(void *ctx) { COUNT(2); return 0; }
SEC("perf_event") int on_task(void *ctx) { COUNT(3); return 0; }
"""
INSIDE = """
MAP(weights, HASH, u64, u32, 8);
SEC("uprobe/PATH:turns") int on_turns(void *ctx) {
    u64 key = 77;
    u32 *weight = bpf_map_lookup_elem(&weights, &key);
    COUNT(0);
    if (weight)
        *weight += 1;
    return 0;
}
SEC("uprobe/PATH:turns+2") int on_turn(void *ctx) { COUNT(1); return 0; }
SEC("uretprobe/PATH:turns") int on_return(void *ctx) { COUNT(2); return 0; }
SEC("kprobe/_Z4workPi") int on_entry(void *ctx) { COUNT(3); return 0; }
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(gpubpf_cuda.build(APP, tmp_path_factory.mktemp("events") / "evt"))


def counts(path: Path, app: str, folder: Path, *options: str) -> list[int]:
    out = folder / "out"
    done = gpubpf_specs.run("gpurun", path, *options, "--json", "-o", out, "--", app)
    assert done.returncode == 7, done.stderr
    found = [json.loads(line) for line in out.read_text().splitlines()]
    (shown,) = [one for one in found if one.get("map") == "counts"]
    return [entry["value"] for entry in shown["entries"]]


def test_perf_events(app: str, tmp_path: Path) -> None:
    path = build(COUNT + EVENTS.replace("PAGES", str(PAGES)), tmp_path / "events.bpf.o")
    faults, switches, clock, task = counts(
        path, app, tmp_path, "--attach", "on_task=perf_event/task-clock:1000000"
    )
    assert faults == 300 and switches >= 20 and clock > 0 and task > 0


def test_an_instruction_inside_a_function(app: str, tmp_path: Path) -> None:
    path = build(COUNT + INSIDE.replace("PATH", app), tmp_path / "inside.bpf.o")
    assert counts(path, app, tmp_path, "--set", "weights[77]=0x100") == [2, 10, 2, 80]
    found = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [one["entries"] for one in found if one.get("map") == "weights"] == [[{"key": 77, "value": 0x102}]]


@pytest.mark.skipif(Path("/sys/bus/event_source/devices/kprobe").exists(), reason="this kernel has kprobes")
def test_a_kernel_without_kprobes_is_one_line(app: str, tmp_path: Path) -> None:
    path = build(
        COUNT + 'SEC("kprobe/vfs_read") int on_read(void *ctx) { COUNT(0); return 0; }', tmp_path / "k.bpf.o"
    )
    done = gpubpf_specs.run("gpurun", path, "--", "/usr/bin/touch", tmp_path / "ran")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "program on_read: this Linux kernel has no kprobes (CONFIG_KPROBES)" in done.stderr
    assert "kprobe/cuda_vfs_read" in done.stderr and not (tmp_path / "ran").exists()


@pytest.mark.skipif(
    not Path("/sys/bus/event_source/devices/kprobe").exists(), reason="this kernel has no kprobes"
)
def test_functions_of_the_kernel(app: str, tmp_path: Path) -> None:
    text = 'SEC("kprobe/hrtimer_nanosleep") int on_sleep(void *ctx) { if (traced()) COUNT(0); return 0; }'
    text += 'SEC("kretprobe/hrtimer_nanosleep") int on_woken(void *ctx) { if (traced()) COUNT(1); return 0; }'
    found = counts(build(COUNT + text, tmp_path / "k.bpf.o"), app, tmp_path)
    assert found[0] == found[1] >= 20


def test_a_frequency_that_the_kernel_refuses_is_one_line(app: str, tmp_path: Path) -> None:
    path = build(COUNT + EVENTS.replace("PAGES", str(PAGES)), tmp_path / "events.bpf.o")
    done = gpubpf_specs.run(
        "gpurun", path, "--attach", "on_task=perf_event/task-clock:999999999hz", "--", app
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "the Linux kernel refuses the perf event task-clock:999999999hz (Invalid argument)" in done.stderr

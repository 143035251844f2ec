"""gpurun from its command line to its exit status, on a program and objects with known answers."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda
import gpubpf_host
import gpubpf_specs
from gpubpf_objects import build, needs_clang

pytestmark = [*gpubpf_cuda.needs_cuda, needs_clang]

# app LAUNCHES: so many launches of work on 3 blocks of 40 threads, so a warp and 8 lanes in each, and one of rest. A thread of work
# loads 4 bytes and stores 4; one of rest stores 1. `step` is called before each launch of work.
APP = r"""
#include <cstdio>
#include <cstdlib>
#include <unistd.h>
__global__ void work(int *numbers) {
    int own = blockIdx.x * 40 + threadIdx.x;
    numbers[own] = 2 * numbers[own];
}
__global__ void rest(char *out) { out[threadIdx.x] = 1; }
static __attribute__((noinline)) int step(int x) { asm volatile(""); return x + 1; }
int main(int argc, char **argv) {
    int *numbers, found = 0;
    cudaMalloc(&numbers, 4096);
    cudaMemset(numbers, 1, 4096);
    for (int i = 0; i < atoi(argv[1]); found = step(found), i++) {
        work<<<3, 40>>>(numbers);
        if (cudaDeviceSynchronize()) return 98;
        if (!i) puts("launched"), fflush(stdout);
        usleep(argc > 2 ? 1000 * atoi(argv[2]) : 0);
    }
    rest<<<1, 8>>>((char *)numbers);
    puts(cudaDeviceSynchronize() ? "wrong" : "right");
    return 7;
}
"""
OBJECT = """
struct event { u64 block, thread; char tag[4]; u32 number; };
struct total { u64 threads; u32 least, most; };
MAP(tallies, THREAD_ARRAY, u32, u64, 2);
MAP(blocks, GPU_HASH, u64, u64, 16);
MAP(both, ARRAY, u32, u64, 2);
MAP(accesses, GPU_ARRAY, u32, u64, 1);
MAP(switches, PERCPU_ARRAY, u32, u64, 1);
struct { __uint(type, RINGBUF); __uint(max_entries, 65536); } events SEC(".maps");
const volatile u32 limit = 5;
const volatile bool loud = 1;
struct total total;
u64 scale = 10;

static __noinline u64 scaled(u64 x) { return scale * x; }

SEC("kprobe/_Z4workPi")
int on_entry(void *ctx) {
    u64 x, y, z, bx, one = 1;
    u32 zero = 0;
    bpf_get_thread_idx(&x, &y, &z);
    bpf_get_block_idx(&bx, &y, &z);
    u64 *mine = bpf_map_lookup_elem(&tallies, &zero), *all = bpf_map_lookup_elem(&both, &zero);
    if (mine)
        *mine += scaled(1);
    if (all)
        __sync_fetch_and_add(all, 1);
    __sync_fetch_and_add(&total.threads, 1);
    if (loud && !x)
        print("block %lu, limit %u\\n", bx, limit);
    return 0;
}

SEC("kretprobe/_Z4workPi")
int on_exit(void *ctx) {
    struct event event = {.tag = "end", .number = limit};
    u64 y, z, one = 0;
    bpf_get_thread_idx(&event.thread, &y, &z);
    bpf_get_block_idx(&event.block, &y, &z);
    bpf_map_update_elem(&blocks, &event.block, &one, 1);
    u64 *count = bpf_map_lookup_elem(&blocks, &event.block);
    if (count)
        __sync_fetch_and_add(count, 1);
    if (event.thread == 39)
        bpf_ringbuf_output(&events, &event, sizeof(event), 0);
    return 0;
}

SEC("kprobe/__memcapture")
int on_access(void *ctx) {
    u32 zero = 0;
    u64 *count = bpf_map_lookup_elem(&accesses, &zero);
    if (count)
        __sync_fetch_and_add(count, 1);
    return 0;
}
"""
HOST = """
struct { __uint(type, RINGBUF); __uint(max_entries, 4096); } steps SEC(".maps");
SEC("uretprobe/PATH:_ZL4stepi")
int on_step(void *ctx) {
    u32 one = 1;
    u64 *count = bpf_map_lookup_elem(&both, &one);
    u64 step[2] = {7, limit};
    if (count)
        *count += limit;
    bpf_ringbuf_output(&steps, step, sizeof(step), 0);
    return 0;
}
SEC("raw_tp/sys_enter")
int on_call(void *ctx) {
    u32 zero = 0;
    u64 *count = bpf_map_lookup_elem(&switches, &zero);
    if (count)
        *count += 1;
    return 0;
}
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(gpubpf_cuda.build(APP, tmp_path_factory.mktemp("app") / "app"))


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(OBJECT, tmp_path_factory.mktemp("device") / "probe.bpf.o"))


def records(out: Path, *arguments: str) -> list[dict]:
    done = gpubpf_specs.run("gpurun", *arguments[:-2], "--json", "-o", out, "--", *arguments[-2:])
    assert (done.returncode, done.stdout) == (7, "launched\nright\n"), done.stderr
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert found[-1]["type"] == "summary" and found[-1]["lost"] == 0
    return found


def contents(found: list[dict]) -> dict[str, dict]:
    """Return what is in each map, by key; of rings, the records."""
    result: dict[str, dict] = {}
    for one in found:
        if one["type"] == "map":
            own = result.setdefault(one["map"], {})
            own |= {entry.get("key", len(own) + n): entry["value"] for n, entry in enumerate(one["entries"])}
    return result


def test_prints_and_maps(app: str, device: str, tmp_path: Path) -> None:
    found = records(tmp_path / "out", device, app, "3")
    assert [one["type"] for one in found if one["type"] == "attached"]
    maps = contents(found)
    assert maps["tallies"] == {0: [30] * 120, 1: [0] * 120}
    assert maps["blocks"] == {0: 120, 1: 120, 2: 120}
    assert maps["both"] == {0: 360, 1: 0}
    assert maps["accesses"] == {0: 3 * 240 + 8}
    assert maps["bss"] == {0: {"total": {"threads": 360, "least": 0, "most": 0}}}
    assert maps["data"] == {0: {"scale": 10}}
    assert "switches" not in maps and "rodata" not in maps  # no program uses the first; the other is constant
    # A ring buffer of the kernel has no type: words of 8 bytes.
    end = int.from_bytes(b"end\0" + (5).to_bytes(4, "little"), "little")
    assert sorted(maps["events"].values()) == sorted([[block, 39, end] for block in range(3)] * 3)
    prints = [one for one in found if one["type"] == "print"]
    assert {one["program"] for one in prints} == {"on_entry"}
    assert sorted(one["text"] for one in prints) == sorted([f"block {n}, limit 5" for n in range(3)] * 3)
    (tallies,) = [one for one in found if one.get("map") == "tallies"]
    assert tallies.items() >= {
        "kind": "thread_array", "comm": "app", "gpu": 0, "kernel": "work", "mangled": "_Z4workPi", "grid": [3, 1, 1],
        "block_dim": [40, 1, 1], "launches": 3,
    }.items()  # fmt: skip


def test_values_and_sections_from_the_command_line(app: str, device: str, tmp_path: Path) -> None:
    settings = [word for text in ("limit=9", "scale=100", "loud=0", "both[1]=77") for word in ("--set", text)]
    attach = ("--attach", "on_exit=kretprobe/rest", "--attach", "on_access=?none")
    maps = contents(found := records(tmp_path / "out", device, *settings, *attach, app, "2"))
    assert maps["tallies"][0] == [200] * 120 and maps["both"] == {0: 240, 1: 77}
    assert maps["blocks"] == {0: 8} and "accesses" not in maps
    assert not [one for one in found if one["type"] == "print"]


@gpubpf_host.needs_bpf
def test_programs_on_the_host_share_arrays_with_the_gpu(app: str, tmp_path: Path) -> None:
    path = build(OBJECT + HOST.replace("PATH", app), tmp_path / "both.bpf.o")
    found = records(tmp_path / "out", str(path), "--set", "limit=4", app, "3")
    maps = contents(found)
    assert maps["both"] == {0: 360, 1: 3 * 4}
    assert list(maps["steps"].values()) == [[7, 4]] * 3
    assert sum(maps["switches"][0]) > 0
    (switches,) = [one for one in found if one.get("map") == "switches"]
    assert (
        set(switches) == {"type", "pid", "comm", "map", "kind", "entries"}
        and switches["kind"] == "percpu_array"
    )


@gpubpf_host.needs_bpf
@pytest.mark.parametrize(
    ("section", "why"),
    [
        ("uprobe/APP:nothing", "it has no function nothing in APP"),
        ("uprobe/APP:main+0x10000", "bytes of code in function main in APP, so none at +0x10000"),
        ("uretprobe/APP.not:main", "APP.not cannot be read (No such file or directory)"),
    ],
)
def test_a_function_that_is_not_there_is_an_error(app: str, tmp_path: Path, section: str, why: str) -> None:
    path = build(OBJECT + HOST.replace("PATH:_ZL4stepi", f"{app}:nothing"), tmp_path / "both.bpf.o")
    section = section.replace("APP", app)
    done = gpubpf_specs.run("gpurun", path, "--attach", f"on_step={section}", "--", app, "1")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("gpurun: program on_step: ")
    assert done.stderr.endswith(f"{why.replace('APP', app)}; check section '{section}'\n")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--grid", "4294967298"), "--grid may be at most 2147483647,65535,65535"),
        (("--grid", "1,65536"), "--grid may be at most 2147483647,65535,65535"),
        (("--block", "1,1,65"), "--block may be at most 1024,1024,64"),
        (("--block", "32,32,2"), "--block may have at most 1024 threads"),
    ],
)
def test_grids_that_no_gpu_has(device: str, options: tuple[str, ...], why: str) -> None:
    done = gpubpf_specs.run("gpurun", device, "--run", "on_entry", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"gpurun: {why}; see gpurun --help\n"


def test_a_function_that_a_running_process_lacks_is_a_notice(app: str, tmp_path: Path) -> None:
    path = build(OBJECT + HOST.replace("PATH:_ZL4stepi", f"{app}:nothing"), tmp_path / "both.bpf.o")
    with subprocess.Popen(
        [sys.executable, "-m", "cudasim.launcher", "--", app, "1000", "20"], stdout=subprocess.PIPE
    ) as program:
        assert program.stdout is not None and program.stdout.readline() == b"launched\n"
        done = gpubpf_specs.run("gpurun", path, "-d", "1", "-p", str(program.pid))
        program.kill()
    assert done.returncode == 0, done.stderr
    assert "has no function nothing in app; program on_step does not run there" in done.stderr


def test_text_and_csv(app: str, device: str, tmp_path: Path) -> None:
    done = gpubpf_specs.run("gpurun", device, "--", app, "1")
    lines = done.stdout.splitlines()
    assert done.returncode == 7 and "on_entry: block 2, limit 5" in lines
    title = next(n for n, line in enumerate(lines) if line.startswith("tallies (thread array)"))
    assert lines[title].startswith("tallies (thread array); app (pid ")
    shown = ["  of work, grid 3 x 1 x 1, block 40 x 1 x 1", "  0: threads 0-119: 10", "  1: threads 0-119: 0"]
    assert lines[title + 1 : title + 4] == shown
    at = next(n for n, line in enumerate(lines) if line.startswith("blocks (hash)"))
    assert lines[at + 1] == "  0-2: 40"
    out = tmp_path / "out.csv"
    gpubpf_specs.run("gpurun", device, "--csv", "-o", out, "--", app, "1")
    rows = list(csv.DictReader(out.open()))
    assert {
        (row["kernel"], row["unit"], row["key"], row["value"]) for row in rows if row["map"] == "tallies"
    } == {
        ("work", str(thread), str(key), "10" if key == 0 else "0") for thread in range(120) for key in (0, 1)
    }


@pytest.mark.every(2)
def test_intervals_in_a_running_process(app: str, device: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "cudasim.launcher", "--", app, "1000", "20"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None and program.stdout.readline() == b"launched\n"
        done = gpubpf_specs.run("gpurun", device, "0.5", "8", "--json", "-o", out, "-p", str(program.pid))
        program.kill()
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in out.read_text().splitlines()]
    both = [one["entries"][0]["value"] for one in found if one.get("map") == "both"]
    assert len(both) == 8 and both == sorted(both)
    assert both[0] < both[-1] == 120 * found[-1]["launches_instrumented"]


def test_kernels_are_chosen_for_programs_that_name_none(app: str, device: str, tmp_path: Path) -> None:
    maps = contents(records(tmp_path / "out", device, "--kernel", "rest", app, "2"))
    assert maps["accesses"] == {0: 8} and maps["both"] == {0: 240, 1: 0}
    attach = ("--attach", "on_access=?none")
    done = gpubpf_specs.run("gpurun", device, "--kernel", "rest", *attach, "--", app, "2")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--kernel and the kernels that the programs name (_Z4workPi) exclude each other" in done.stderr


def test_ptx_list_and_ebpf(app: str, device: str) -> None:
    ptx = gpubpf_specs.run("gpurun", device, "--ptx", app)
    assert ptx.returncode == 0 and ptx.stdout.count("atom") + ptx.stdout.count("red.") >= 3
    listed = gpubpf_specs.run("gpurun", device, "--list", app)
    assert listed.returncode == 0 and "work" in listed.stdout
    ebpf = gpubpf_specs.run("gpurun", device, "--ebpf")
    assert ebpf.returncode == 0 and "program on_access: section kprobe/__memcapture" in ebpf.stdout


ALONE = """
MAP(a, GPU_ARRAY, u32, u32, 1024);
MAP(sums, GPU_ARRAY, u32, s64, 64);
struct { __uint(type, GPU_ARRAY); __uint(max_entries, 1); __type(key, u32); __type(value, u32[2]); } size SEC(".maps");
static u64 (*bpf_get_block_dim)(u64 *x, u64 *y, u64 *z) = (void *)504;

/* Each thread adds up a row of size[1] numbers. */
SEC("kprobe/__directly_run")
int rows(void *ctx) {
    u64 block, width, thread, y, z;
    u32 zero = 0, *extents = bpf_map_lookup_elem(&size, &zero);
    s64 sum = 0;
    bpf_get_block_idx(&block, &y, &z);
    bpf_get_block_dim(&width, &y, &z);
    bpf_get_thread_idx(&thread, &y, &z);
    u32 row = block * width + thread;
    if (!extents || row >= extents[0])
        return 0;
    for (u32 column = 0; column < extents[1]; column++) {
        u32 at = row * extents[1] + column, *one = bpf_map_lookup_elem(&a, &at);
        sum += one ? *one : 0;
    }
    bpf_map_update_elem(&sums, &row, &sum, 0);
    if (!thread)
        print("block %lu of rows", block);
    return 0;
}

SEC("kprobe/__directly_run")
int other(void *ctx) { return 0; }
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(ALONE, tmp_path_factory.mktemp("alone") / "rows.bpf.o"))


def test_a_program_as_a_kernel_of_its_own(alone: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    numbers = ",".join(str(n) for n in range(100))
    options = ["--grid", "3", "--block", "5,1,1", "--set", "size=10,10", "--set", f"a={numbers},7*3"]
    done = gpubpf_specs.run("gpurun", "--run", "rows", *options, alone, "--json", "-o", out)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    found = [json.loads(line) for line in out.read_text().splitlines()]
    maps = contents(found)
    assert maps["sums"] == {row: 100 * row + 45 if row < 10 else 0 for row in range(64)}
    assert list(maps["a"].values())[:104] == [*range(100), 7, 7, 7, 0] and maps["size"] == {0: [10, 10]}
    prints = [(one["program"], one["text"]) for one in found if one["type"] == "print"]
    assert prints == [("rows", "block 0 of rows"), ("rows", "block 1 of rows")]
    assert (found[-1]["launches_seen"], found[-1]["launches_instrumented"]) == (1, 1)


ENDLESS = """
MAP(turns, GPU_ARRAY, u32, u64, 1);
SEC("kprobe/__directly_run") int endless(void *ctx) {
    u32 key = 0;
    u64 *to = bpf_map_lookup_elem(&turns, &key), n = 0;
    if (!to)
        return 0;
    while (((u64(*)(void))605)() != ~0ull)  /* gpu_clock */
        n++;
    *to = n;
    return 0;
}
"""


def test_a_loop_that_does_not_end_is_said_once(tmp_path: Path) -> None:
    path = build(ENDLESS, tmp_path / "endless.bpf.o")
    done = gpubpf_specs.run("gpurun", "--run", "endless", "--block", "3", path)
    assert done.returncode == 0 and "loop" not in done.stdout, done.stderr
    said = "gpurun: note: program endless: a loop was stopped after 1,048,576 turns in 3 threads; its results are incomplete\n"
    assert done.stderr.count(said) == done.stderr.count("loop") == 1


HASHES = """
struct place { u32 row; short column; char tag[6]; };
struct cell { u64 count; u32 first, last; };
MAP(cells, GPU_HASH, struct place, struct cell, 100);
MAP(missed, GPU_ARRAY, u32, u64, 1);

/* Thread n adds to the cell (n, -n, "abc"), and deletes that of thread 7. */
SEC("kprobe/__directly_run")
int add(void *ctx) {
    u64 x, y, z;
    u32 zero = 0;
    bpf_get_thread_idx(&x, &y, &z);
    struct place place = {x, -x, "abc"};
    struct cell *cell = bpf_map_lookup_elem(&cells, &place);
    u64 *others = bpf_map_lookup_elem(&missed, &zero);
    if (cell)
        cell->count += cell->first * cell->last;
    else if (others)
        __sync_fetch_and_add(others, 1);
    if (x == 7)
        ((long (*)(void *, void *))3)(&cells, &place);
    return 0;
}
"""


def test_first_values_of_hashes(tmp_path: Path) -> None:
    path, out = build(HASHES, tmp_path / "hashes.bpf.o"), tmp_path / "out"
    settings = [f"cells[{n},{-n},abc]={n},2,{n}" for n in range(60)] + ["cells[5,-5,abc]=100,0,0"]
    options = [word for text in settings for word in ("--set", text)]
    done = gpubpf_specs.run("gpurun", "--run", "add", "--block", "96", *options, path, "--json", "-o", out)
    assert done.returncode == 0, done.stderr
    maps = {
        one["map"]: one["entries"] for one in map(json.loads, out.read_text().splitlines()) if "map" in one
    }
    assert maps["missed"] == [{"key": 0, "value": 36}]
    value = {n: {"count": 3 * n, "first": 2, "last": n} for n in range(60)} | {
        5: {"count": 100, "first": 0, "last": 0}
    }
    assert maps["cells"] == [
        {"key": {"row": n, "column": -n, "tag": "abc"}, "value": value[n]} for n in range(60) if n != 7
    ]
    options = [word for n in range(101) for word in ("--set", f"cells[{n},0,x]=0*3")]
    done = gpubpf_specs.run("gpurun", "--run", "add", *options, path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "map cells has room for 100 elements" in done.stderr


SHOWN = """
struct pair { int left; u32 right; };
MAP(patterns, THREAD_ARRAY, u32, u32, 2);
MAP(pairs, GPU_HASH, struct pair, u32, 200);

SEC("kprobe/__directly_run")
int f(void *ctx) {
    u64 block, thread, y, z;
    u32 zero = 0;
    bpf_get_block_idx(&block, &y, &z);
    bpf_get_thread_idx(&thread, &y, &z);
    u32 *mine = bpf_map_lookup_elem(&patterns, &zero), number = 64 * block + thread;
    struct pair pair = {(int)(number & 1) - 1, number};
    if (mine)
        *mine = thread < 8 ? 7 : block / 2;
    if (number < 150)
        bpf_map_update_elem(&pairs, &pair, &number, 0);
    return 0;
}
"""


def test_equal_blocks_share_lines_and_long_maps_are_cut(tmp_path: Path) -> None:
    path = build(SHOWN, tmp_path / "shown.bpf.o")
    done = gpubpf_specs.run("gpurun", "--run", "f", "--grid", "6", "--block", "64", path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    title = next(n for n, line in enumerate(lines) if line.startswith("patterns (thread array)"))
    assert lines[title + 2 : title + 9] == [
        "  0: blocks 0-1, threads 0-7: 7",
        "  0: blocks 0-1, threads 8-63: 0",
        "  0: blocks 2-3, threads 0-7: 7",
        "  0: blocks 2-3, threads 8-63: 1",
        "  0: blocks 4-5, threads 0-7: 7",
        "  0: blocks 4-5, threads 8-63: 2",
        "  1: threads 0-383: 0",
    ]
    title = next(n for n, line in enumerate(lines) if line.startswith("pairs (hash)"))
    ordered = [(-1, n) for n in range(0, 150, 2)] + [(0, n) for n in range(1, 150, 2)]
    shown = [f'  {{"left": {left}, "right": {right}}}: {right}' for left, right in ordered]
    assert lines[title + 1 : title + 102] == [
        *shown[:100],
        "  ... 50 more lines; --json and --csv show all values",
    ]


LONG_PRINTS = """
SEC("kprobe/__directly_run")
int f(void *ctx) {
    u64 x, y, z;
    bpf_get_thread_idx(&x, &y, &z);
    print("first %d", 10 * x);
    print_all("%lu %d %x %s %c %u|%lu %lu %lu %lu %lu %5d", x, -1, 255, (u64)"of", 'z',
              x + 1, x + 2, x + 3, x + 4, x + 5, x + 6, x + 7);
    print_all("%lu, %lu, %lu and %lu", x, 2 * x, 3 * x, 1ul << 40);
    return 0;
}
"""


def test_prints_of_many_values_come_in_order(tmp_path: Path) -> None:
    path, out = build(LONG_PRINTS, tmp_path / "long.bpf.o"), tmp_path / "out"
    done = gpubpf_specs.run("gpurun", "--run", "f", "--block", "40", path, "--json", "-o", out)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in out.read_text().splitlines()]
    texts = [one["text"] for one in found if one["type"] == "print"]
    assert found[-1]["lost"] == 0 and len(texts) == 3 * 40
    for x in (0, 1, 39):
        rest = " ".join(str(x + n) for n in range(2, 7))
        own = [
            f"first {10 * x}",
            f"{x} -1 ff of z {x + 1}|{rest} {x + 7:5}",
            f"{x}, {2 * x}, {3 * x} and {1 << 40}",
        ]
        at = [texts.index(text) for text in own]
        assert at == sorted(at)


BODY = 'SEC("kprobe/k") int f(void *ctx) {{ u32 key = 0; {} return 0; }}'
WRONG = {
    "unknown section": ('SEC("xdp") int f(void *ctx) { return 0; }', "section 'xdp' is not supported"),
    "unknown helper": (BODY.format("((long (*)(void))203)();"), "calls helper number 203, which does not exist on a GPU"),
    "oversized map": (
        "MAP(m, GPU_ARRAY, u32, u64, 1u << 26);" + BODY.format("bpf_map_lookup_elem(&m, &key);"),
        "map m of 536,870,912 bytes does not fit into 268,435,456 bytes of GPU memory",
    ),
    "oversized shared map": (
        "MAP(m, SHARED_ARRAY, u32, u64, 1u << 30);" + BODY.format("bpf_map_lookup_elem(&m, &key);"),
        "map m has 8,589,934,592 bytes",
    ),
    "unverified": (
        BODY.format("u64 *p = bpf_map_lookup_elem(&m, &key); *p = 1;").join(("MAP(m, HASH, u32, u64, 1);", "")),
        "program f, instruction",
    ),
    "sizes of records": (
        'struct { __uint(type, RINGBUF); __uint(max_entries, 4096); } ring SEC(".maps");'
        'SEC("uprobe/./app:f") int f(u64 *c) { u64 two[2] = {}; bpf_ringbuf_output(&ring, two, 8, 0);'
        " bpf_ringbuf_output(&ring, two, 16, 0); return 0; }",
        "ring buffer ring: host programs send records whose size is not one constant",
    ),
    "perf buffer": (
        'struct { __uint(type, 4); __uint(key_size, 4); __uint(value_size, 4); } perf SEC(".maps");'
        'SEC("uprobe/./app:f") int f(void *c) { u32 x = 0; bpf_map_lookup_elem(&perf, &x); return 0; }',
        "map perf is a perf buffer, which f uses on the host",
    ),
    "nothing to attach": ('SEC("kprobe/__directly_run") int f(void *ctx) { return 0; }', "kernels of their own"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_bad_object_is_one_line_and_no_command_runs(name: str, tmp_path: Path) -> None:
    text, why = WRONG[name]
    refuse(build(text, tmp_path / "wrong.bpf.o"), why, tmp_path)


def test_a_bad_file_is_one_line_and_no_command_runs(device: str, tmp_path: Path) -> None:
    data, wrong = Path(device).read_bytes(), tmp_path / "wrong.bpf.o"
    for changed, why in (
        (data[: len(data) // 2], "it is cut short"),
        (
            Path("/bin/true").read_bytes(),
            r"it has code for a CPU or GPU \(ELF machine 62\), not eBPF; compile it with clang -target bpf",
        ),
        (data.replace(b".BTF\0", b".BTG\0"), "it has no type information"),
    ):
        wrong.write_bytes(changed)
        refuse(wrong, why, tmp_path)
    refuse(tmp_path / "nothing", "cannot be read", tmp_path)


def refuse(path: Path, why: str, folder: Path, status: int = 1) -> None:
    import re

    done = gpubpf_specs.run("gpurun", path, "--", "/usr/bin/touch", folder / "ran")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1), done.stderr
    assert done.stderr.startswith("gpurun: ") and re.search(why, done.stderr) and len(done.stderr) < 500
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "OBJECT is missing"),
        (["OBJECT", "--attach", "f", "--ebpf"], "--attach 'f' has no value"),
        (["OBJECT", "--set", "limit", "--ebpf"], "--set 'limit' has no value"),
        (["OBJECT", "--run", "f", "--", "true"], "--run excludes -p, COMMAND, --list and --ptx"),
        (["OBJECT", "--grid", "4", "--", "true"], "--grid and --block are those of --run"),
        (["OBJECT", "--run", "f", "--grid", "0"], "must be a positive integer"),
        (["OBJECT", "x", "--", "true"], "interval must be a positive number of seconds, not 'x'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(device: str, arguments: list[str], message: str) -> None:
    done = gpubpf_specs.run("gpurun", *(device if word == "OBJECT" else word for word in arguments))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("gpurun: ") and message in done.stderr

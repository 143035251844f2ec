"""memtrace -e, --parquet and --heatmap from the command line to the exit status: every record against the addresses that the program
itself says it touches."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import gpubpf_cuda

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = [sys.executable, str(REPOSITORY / "tools/memtrace.py"), "--device", "sim"]
BLOCKS, THREADS, FLOOD = 6, 64, 200  # FLOOD: stores of each of 1,024 threads

pytestmark = gpubpf_cuda.needs_cuda

# app WHAT...: runs these, and prints where its memory is.
PROGRAM = r"""
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>
namespace many {
__global__ void mixed(const int *in, int4 *wide, int *bins) {
    __shared__ int tile[64];
    int own = threadIdx.y * 8 + threadIdx.x, i = (blockIdx.y * 3 + blockIdx.x) * 64 + own, value;
    tile[own] = in[2 * i];
    __syncthreads();
    const int *any = own % 2 ? tile + own : bins + own;  // a generic address into either
    asm volatile("ld.u32 %0, [%1];" : "=r"(value) : "l"(any) : "memory");
    if (own < 10) atomicAdd(bins + own % 4, value);
    wide[i] = make_int4(value, 1, 2, 3);
}
}
__global__ void other(int *out) { out[threadIdx.x] = 1; }
__global__ void flood(int *out, int n) {
    for (int k = 0; k < n; k++) ((volatile int *)out)[blockIdx.x * 64 + threadIdx.x] = k;
}
int main(int argc, char **argv) {
    int *in, *bins, *flat;
    int4 *wide;
    if (cudaMalloc(&in, 4096) || cudaMalloc(&wide, 16 * 384) || cudaMalloc(&bins, 1024) || cudaMalloc(&flat, 4096)) return 99;
    cudaMemset(in, 0, 4096);
    cudaMemset(bins, 0, 1024);
    printf("at %p %p %p %p\n", (void *)in, (void *)wide, (void *)bins, (void *)flat);
    for (int i = 1; i < argc; i++) {
        const char *what = argv[i];
        if (!strcmp(what, "mixed")) many::mixed<<<dim3(3, 2), dim3(8, 8)>>>(in, wide, bins);
        if (!strcmp(what, "other")) other<<<1, 40>>>(flat);
        if (!strcmp(what, "flood")) flood<<<16, 64>>>(flat, 200);
        if (!strcmp(what, "graph")) {
            cudaStream_t s;
            cudaGraph_t graph;
            cudaGraphExec_t exec;
            cudaStreamCreate(&s);
            cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal);
            other<<<1, 40, 0, s>>>(flat);
            cudaStreamEndCapture(s, &graph);
            cudaGraphInstantiate(&exec, graph, 0);
            for (int k = 0; k < 3; k++) cudaGraphLaunch(exec, s);
        }
        printf("%s %d\n", what, cudaDeviceSynchronize());
        fflush(stdout);
        if (!strcmp(what, "die")) raise(SIGKILL);
        if (!strcmp(what, "hang")) sleep(60);
        if (!strcmp(what, "pause")) usleep(300000);
    }
    return 7;
}
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: Any) -> str:
    flags = ("-O2", "-lineinfo", "-include", "csignal")
    return str(gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("app") / "app", *flags))


def environment(virtual: bool = False) -> dict[str, str]:
    return os.environ | {"CUDASIM_CLOCK": "virtual" if virtual else "real", "CUDASIM_HOSTILE": "1"}


def run(*arguments: Any, virtual: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=100, env=environment(virtual)
    )


def traced(
    app: str, tmp_path: Path, *arguments: Any, whats: tuple[str, ...] = ("mixed",), **more: Any
) -> Any:
    """Access records, the summary, and what the program said of its addresses."""
    out = tmp_path / "out.jsonl"
    done = run("-e", "--json", "-o", out, *arguments, "--", app, *whats, **more)
    assert done.returncode == 7, done.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert records[-1]["type"] == "summary"
    return [one for one in records if one["type"] == "access"], records[-1], addresses(done.stdout)


@pytest.fixture(scope="module")
def whole(app: str, tmp_path_factory: Any) -> Any:
    """Every access of `mixed`, as `traced` gives it."""
    return traced(app, tmp_path_factory.mktemp("whole"))


def addresses(said: str) -> list[int]:
    return [int(word, 16) for word in re.findall(r"0x[0-9a-f]+", said)]


def threads() -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...], int]]:
    """Of `mixed`: number in the block, block, thread, number in the grid."""
    for block in range(BLOCKS):
        for own in range(THREADS):
            yield own, (block % 3, block // 3, 0), (own % 8, own // 8, 0), block * THREADS + own


def expected(at: list[int]) -> Counter[Any]:
    """What `mixed` accesses, from its source."""
    found: Counter[Any] = Counter()
    origin, wide, bins, _ = at
    for own, block, thread, i in threads():
        found["load", "global", origin + 8 * i, 4, block, thread] += 1
        found["store", "shared", 4 * own, 4, block, thread] += 1
        generic = ("shared", 4 * own) if own % 2 else ("global", bins + 4 * own)
        found["load", *generic, 4, block, thread] += 1
        if own < 10:
            found["atomic", "global", bins + 4 * (own % 4), 4, block, thread] += 1
        found["store", "global", wide + 16 * i, 16, block, thread] += 1
    return found


def seen(records: Any, allocations: Sequence[int] = ()) -> Counter[Any]:
    """What records tell. Addresses of global memory are those in the allocations which begin at these addresses: (which, offset)."""

    def place(record: Any) -> Any:
        address = int(record["address"], 16)
        if record["space"] != "global" or not allocations:
            return address
        begin = max(at for at in allocations if at <= address)
        return allocations.index(begin), address - begin

    return Counter(
        (r["op"], r["space"], place(r), r["width"], tuple(r["block"]), tuple(r["thread"])) for r in records
    )


@pytest.mark.every(2)
@pytest.mark.parametrize("virtual", [False, True])
def test_every_access_of_every_lane(app: str, tmp_path: Path, virtual: bool) -> None:
    records, summary, at = traced(app, tmp_path, whats=("mixed", "other", "mixed"), virtual=virtual)
    mixed = [record for record in records if record["kernel"] == "many::mixed"]
    wanted = expected(at)
    assert seen(mixed) == wanted + wanted
    launches = sorted({record["launch"] for record in mixed})
    assert len(launches) == 2 and launches[1] - launches[0] == 2
    others = [record for record in records if record["kernel"] == "other"]
    assert seen(others) == Counter(
        ("store", "global", at[3] + 4 * n, 4, (0, 0, 0), (n, 0, 0)) for n in range(40)
    )
    assert {record["source"].split(":")[0] for record in records if record["op"] != "atomic"} == {"app.cu"}
    assert len({(record["kernel"], record["site"]) for record in records}) == 6
    assert summary["accesses"] == len(records) == 2 * wanted.total() + 40
    assert summary["lost"] == 0 and not summary["records_lost"] and summary["records_unknown"] == 0


@pytest.mark.every(2)
def test_sites_have_the_numbers_of_the_tables(app: str, whole: Any, tmp_path: Path) -> None:
    records, _, _ = whole
    out = tmp_path / "tables.jsonl"
    run("--json", "-o", out, "--", app, "mixed")
    sites = [json.loads(line) for line in out.read_text().splitlines()]
    keys = ("site", "op", "space", "width", "source", "ptx_line")
    rows = [tuple(one[key] for key in keys) for one in sites if one["type"] == "site"]
    assert len(rows) == 6 and set(rows) == {tuple(one[key] for key in keys) for one in records}
    counts = Counter((one["site"], one["space"]) for one in records)
    assert counts == {(one["site"], one["space"]): one["accesses"] for one in sites if one["type"] == "site"}


def test_the_virtual_clock_repeats(app: str, tmp_path: Path) -> None:
    def once() -> list[Any]:
        out = tmp_path / "out"
        done = run("-e", "-T", "--json", "-o", out, "--", app, "mixed", "other", virtual=True)
        base = addresses(done.stdout)[0]
        found = [json.loads(line) for line in out.read_text().splitlines()]
        for record in found:
            record.pop("pid", None)
            if "address" in record and record["space"] == "global":
                record["address"] = int(record["address"], 16) - base
        return [record for record in found if record["type"] == "access"]

    first = once()
    assert first == once() and len(first) == 1596 + 40
    times = [record["ts_ns"] for record in first if record["kernel"] == "many::mixed"]
    assert times == sorted(times) and times[-1] - times[0] < 1000


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        (("--block", "1,1"), lambda own, block, i, record: block == (1, 1, 0)),
        (("--thread", "2:3,*"), lambda own, block, i, record: own % 8 in (2, 3)),
        (("--warps", "3"), lambda own, block, i, record: i // 32 % 3 == 0),
        (("--site", "0,3:4"), lambda own, block, i, record: record["site"] in (0, 3, 4)),
        (("--warps", "2", "--block", "2"), lambda own, block, i, record: i // 32 % 2 == 0 and block[0] == 2),
    ],
)
def test_filters_act_on_the_device(app: str, whole: Any, tmp_path: Path, arguments: Any, chosen: Any) -> None:
    every, _, at = whole
    records, summary, there = traced(app, tmp_path, *arguments)

    def is_chosen(record: Any) -> bool:
        own = record["thread"][1] * 8 + record["thread"][0]
        block = tuple(record["block"])
        return bool(chosen(own, block, (block[1] * 3 + block[0]) * 64 + own, record))

    wanted = [record for record in every if is_chosen(record)]
    assert 0 < len(wanted) < len(every)
    assert seen(records, there) == seen(wanted, at) and summary["records"] == len(wanted)


def test_addresses_are_chosen_by_what_is_touched(app: str, whole: Any, tmp_path: Path) -> None:
    _, _, at = whole
    for _ in range(
        20
    ):  # addresses depend on whether the copy of the kernel was loaded before the program allocated memory
        records, _, found = traced(app, tmp_path, "--address", f"{at[1] + 15:#x}:{at[1] + 32:#x}")
        if at == found:
            break
        at = found
    assert sorted(int(record["address"], 16) - at[1] for record in records) == [0, 16, 32]


def test_launches_are_chosen(app: str, tmp_path: Path) -> None:
    whats = ("other",) * 5
    for arguments, launches in (
        (("--launch", "2:3"), 2),
        (("--sample", "2"), 3),
        (("--kernel", "many::*"), 0),
    ):
        out = tmp_path / "out"
        run("-e", "--csv", "-o", out, *arguments, "--", app, *whats)
        assert max(0, len(out.read_text().splitlines()) - 1) == 40 * launches


def test_lines_for_people(app: str, tmp_path: Path) -> None:
    done = run("-e", "--", app, "other", "mixed")
    lines = [line for line in done.stdout.splitlines() if re.match(r" *(LAUNCH|\d+) ", line)]
    assert len([line for line in lines if "LAUNCH" in line]) == 1
    assert max(map(len, done.stdout.splitlines())) <= 80
    row = next(line for line in lines if "store" in line and "global" in line and "mixed" in line)
    assert re.match(r" +2 mixed +\(\d,\d\) +\(\d,\d\) store  global 0x[0-9a-f]{12} +16 app.cu:\d+", row)
    assert f"{1596 + 40:,} accesses of 2 launches recorded" in done.stdout


def test_graphs_and_several_processes(app: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = f"{app} other graph & {app} graph; wait"
    run("-e", "--json", "-o", out, "--", "sh", "-c", script)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    accesses = [record for record in records if record["type"] == "access"]
    launches = Counter((record["pid"], record["launch"]) for record in accesses)
    assert sorted(Counter(pid for pid, _ in launches).values()) == [3, 4] and set(launches.values()) == {40}
    assert records[-1]["records_unknown"] == 0


def test_what_finds_no_room_is_counted_exactly(app: str, tmp_path: Path) -> None:
    """And the program does not wait for it."""
    records, summary, _ = traced(app, tmp_path, "--ring-size", "64K", "--kernel", "flood", whats=("flood",))
    lost = sum(summary["records_lost"].values())
    assert lost > 0 and len(records) + lost == 1024 * FLOOD and summary["lost"] == lost
    done = run(
        "--parquet", tmp_path / "a.parquet", "--ring-size", "64K", "--kernel", "flood", "--", app, "flood"
    )
    (said,) = re.findall(r"accesses lost because the ring was full: ([\d,]+) of ([\d,]+)", done.stdout)
    assert said[1] == f"{1024 * FLOOD:,}"
    rows = pyarrow.parquet.read_metadata(tmp_path / "a.parquet").num_rows
    assert rows + int(said[0].replace(",", "")) == 1024 * FLOOD


def test_the_program_does_not_wait_for_the_tool(app: str, tmp_path: Path) -> None:
    """Which is stopped while it writes more than there is room for."""
    out = tmp_path / "out"
    command = [*TOOL, "-e", "--json", "-o", str(out), "--ring-size", "2M", "--kernel", "flood", "--", app]
    with subprocess.Popen(
        [*command, "flood", "pause", "flood", "flood", "hang"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True,
    ) as tool:  # fmt: skip
        assert tool.stdout is not None and tool.stdout.readline()
        # The kernel is instrumented before the tool is stopped.
        assert [tool.stdout.readline() for _ in range(2)] == ["flood 0\n", "pause 0\n"]
        tool.send_signal(signal.SIGSTOP)
        assert [tool.stdout.readline() for _ in range(3)] == ["flood 0\n", "flood 0\n", "hang 0\n"]
        tool.send_signal(signal.SIGCONT)
        tool.send_signal(signal.SIGTERM)
        assert tool.wait(60) == 0
        os.killpg(tool.pid, signal.SIGKILL)
    lines = out.read_text().splitlines()
    lost = sum(json.loads(lines[-1])["records_lost"].values())
    assert lost > 0 and sum('"access"' in line for line in lines) + lost == 3 * 1024 * FLOOD


@pytest.mark.may_come_too_late
def test_a_parquet_file(app: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    done = run("--parquet", path, "-T", "--", app, "mixed")
    assert done.returncode == 7 and "1,596 accesses of 1 launch recorded" in done.stdout
    rows = pyarrow.parquet.read_table(path).to_pylist()
    found = Counter(
        (
            row["op"], row["space"], row["address"], row["width"],
            tuple(row[f"block_{axis}"] for axis in "xyz"), tuple(row[f"thread_{axis}"] for axis in "xyz"),
        )
        for row in rows
    )  # fmt: skip
    assert found == expected(addresses(done.stdout))
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    assert all(0 < now - row["ts_ns"] < 100e9 for row in rows)
    assert {row["source"].split(":")[0] for row in rows if row["op"] == "store"} == {"app.cu"}
    assert {row["kernel"] for row in rows} == {"many::mixed"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_parquet_file_is_whole(app: str, tmp_path: Path, number: int) -> None:
    path = tmp_path / "a.parquet"
    with subprocess.Popen(
        [*TOOL, "--parquet", str(path), "--", app, "mixed", "hang"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True,
    ) as tool:  # fmt: skip
        assert tool.stdout is not None
        said = tool.stdout.readline()
        while not tool.stdout.readline().startswith("hang"):
            pass
        tool.send_signal(number)
        while "accesses of" not in (line := tool.stdout.readline()):
            assert line
        assert "1,596 accesses of 1 launch recorded" in line
        table = pyarrow.parquet.read_table(path)  # while the program runs on
        assert table.num_rows == 1596 and min(table["address"].to_pylist()) == 0
        assert len(addresses(said)) == 4
        if number == signal.SIGTERM:
            assert tool.wait(60) == 0
        os.killpg(tool.pid, signal.SIGKILL)


def test_a_program_that_dies(app: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    done = run("--parquet", path, "--", app, "mixed", "die")
    assert done.returncode == 128 + signal.SIGKILL
    table = pyarrow.parquet.read_table(path)
    assert table.num_rows == 1596, done.stdout + done.stderr


def test_a_picture(app: str, tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    done = run("--heatmap", path, "--", app, "mixed", "other")
    assert done.returncode == 7 and f"memtrace: note: wrote {path}\n" in done.stderr
    in_, wide, bins, flat = addresses(done.stdout)
    text = path.read_text()
    for address, size in ((in_, 4), (wide, 6), (bins, 1), (flat, 4)):
        assert f"cuMemAlloc main (app), {size} KiB at {address:#x}" in text
    assert "unknown allocation" not in text and ">writes</text>" in text


def test_what_cannot_be_written(app: str, tmp_path: Path) -> None:
    for option, name, said in (
        ("--parquet", "no/a.parquet", "cannot write"),
        ("--heatmap", "no/a.svg", "cannot write"),
    ):
        done = run(option, tmp_path / name, "--", app, "other")
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith("memtrace: ") and said in done.stderr and ";" in done.stderr
        assert "at 0x" not in done.stdout  # nothing was started


def test_filters_of_nothing() -> None:
    done = run("--site", "3", "--", "true")
    assert done.returncode == 2 and done.stderr == (
        "memtrace: --site, --address and --warps filter single accesses; add -e, --parquet or --heatmap\n"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-e", "--footprint"], "--footprint cannot be combined"),
        (["--parquet", ""], "argument --parquet: '' is not the name of a file"),
        (["--heatmap", "-"], "argument --heatmap: '-' is not the name of a file"),
        (["--heatmap", "a.txt"], "argument --heatmap: 'a.txt' must end in .svg, .png or .pdf"),
        (["-e", "--warps", "4294967296"], "argument --warps: '4294967296' is larger than 4294967295"),
    ],
)
def test_what_would_be_left_out_in_silence_is_refused(options: list[str], said: str) -> None:
    done = run(*options, "--", "true")
    assert (
        done.returncode == 2 and done.stderr.startswith(f"memtrace: {said}") and done.stderr.count("\n") == 1
    )


def test_the_program_is_shown() -> None:
    done = run("-e", "--ebpf")
    assert done.returncode == 0 and "int on_record(struct gpu_access *ctx)" in done.stdout

"""Which allocation an address means: against a model, against what a program knows of its own memory, and against nonsense."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpubpf_cuda
from gpubpf.memory import allocations
from gpubpf.memory.allocations import LIMIT, Allocation, Allocations
from gpubpf.process.host_frames import HostFrame
from gpubpf.record import replace
from gpubpf.records import operation_log
from gpubpf.records.results import ProcessLog
from gpubpf.show.parsed import Options

STACKS = {7: (HostFrame(0x1000, 0x10, "app", "main"),), 8: (HostFrame(0, 0, "", "_ZN1a5tableE"),)}


def log_of(*rows: dict[str, Any], process: int = 1, lost: int = 0) -> ProcessLog:
    records = np.zeros(len(rows), operation_log.DTYPE)
    for at, row in enumerate(rows):
        records["kind"][at] = row.get("kind", operation_log.API)
        for name in ("result", "flags", "context", "stack"):
            records[name][at] = row.get(name, 0)
        records["return_ns"][at] = row.get("at", at + 1)
        records["api"]["name"][at] = row["call"]
        for name in ("address", "bytes", "epoch"):
            records["api"][name][at] = row.get(name, 0)
        if "source" in row:
            records["copy"]["source"][at] = row["source"]
    return ProcessLog(100 + process, "app", records, lost, False, {}, {0: 0, 1: 3}, STACKS, False, process)


def made(call: str, address: int, size: int, epoch: int = 0, **more: Any) -> dict[str, Any]:
    return {"call": call, "address": address, "bytes": size, "epoch": epoch} | more


def gone(call: str, address: int, epoch: int = 0, **more: Any) -> dict[str, Any]:
    return {"call": call, "address": address, "epoch": epoch} | more


def after(*rows: dict[str, Any]) -> Allocations:
    found = Allocations()
    found.add(log_of(*rows))
    return found


def test_what_is_told_of_an_allocation() -> None:
    found = after(
        made("cuMemAlloc", 0x1000, 256, context=1, stack=7, at=5),
        made("cuMemAllocManaged", 0x2000, 64),
        made("cuMemHostAlloc", 0x3000, 64),
        made("variable", 0x4000, 32, stack=8),
        made("variable", 0x5000, 32, stack=99),
        gone("cuMemFree", 0x1000, 2, at=9),
        gone("cuModuleUnload", 0x4000, 2),
        made("cuStreamCreate", 0, 0),
    ).all()
    expected = Allocation(1, 101, "app", 3, 0x1000, 256, "cuMemAlloc", "device", STACKS[7], 0, 2, 5, 9)
    assert found[0] == expected and found[0].freed and not found[1].freed
    assert [(a.kind, a.call, a.name, a.last_epoch) for a in found[1:]] == [
        ("managed", "cuMemAllocManaged", "", None),
        ("host", "cuMemHostAlloc", "", None),
        ("variable", "variable a::table", "a::table", 2),
        ("variable", "variable (unknown)", "(unknown)", None),
    ]


def copy(source: int, kind: int = operation_log.D2H, **more: Any) -> dict[str, Any]:
    return {"call": "", "kind": kind, "source": source} | more


def test_what_the_program_copies_from() -> None:
    rows = [
        *(made("cuMemAlloc", base, 256) for base in (0x1000, 0x2000, 0x3000, 0x4000)),
        *(copy(0x1000), copy(0x20FF, operation_log.D2D), copy(0x3100), copy(0x4000, operation_log.H2D)),
        *(copy(0x4010, result=1), gone("cuMemFree", 0x1000), made("cuMemAlloc", 0x1000, 256, 1)),
    ]
    assert [one.copied for one in after(*rows).all()] == [True, True, False, False, False]
    graph = log_of({"call": "", "kind": operation_log.GRAPH})
    found = after(*rows)
    found.add(graph)
    assert [one.copied for one in found.all()] == [True, True, False, False, False]
    graph.records["graph"]["others"] = 1  # which may be a copy
    found.add(graph)
    assert [one.copied for one in found.all()] == [True, True, None, None, None]
    # The log has only the first copy of a batch.
    batch = copy(0x2000, operation_log.H2D, flags=operation_log.BATCH)
    assert [one.copied for one in after(*rows, batch).all()] == [True, True, None, None, None]


def test_copies_that_were_not_seen_are_unknown() -> None:
    rows = [made("cuMemAlloc", 0x1000, 256), made("cuMemAlloc", 0x2000, 256), copy(0x1000)]
    found = Allocations()
    found.add(log_of(*rows, lost=3))
    found.add(log_of(*rows, process=2))
    assert [one.copied for one in found.all()] == [True, None, True, False]
    imported = after(
        made("cuIpcOpenMemHandle", 0x1000, 256), made("cuMemPoolImportPointer", 0x2000, 256), copy(0x2000)
    )
    assert [one.copied for one in imported.all()] == [None, True]


def test_memory_that_another_process_may_use() -> None:
    rows = [made("cuMemAlloc", base, 256) for base in (0x1000, 0x2000, 0x3000)]
    rows += [made("cuMemMap", 0x4000, 256), made("cuIpcOpenMemHandle", 0x5000, 256)]
    exports = [gone("cuIpcGetMemHandle", 0x1000), gone("cuMemGetHandleForAddressRange", 0x20FF)]
    exports.append(gone("cuIpcGetMemHandle", 0x3000, result=1))
    found = after(*rows, *exports, copy(0x2000)).all()
    assert [one.shared for one in found] == [True, True, False, False, True]
    assert [one.copied for one in found] == [None, True, False, False, None]
    for call in ("cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"):
        found = after(gone(call, 0), *rows).all()
        assert [one.shared for one in found] == [False, False, False, True, True]


def places(found: Allocations, addresses: Iterable[int], epoch: int) -> list[int]:
    """Which allocation each address is in, in an epoch; -1: none."""

    def place(address: int) -> int:
        return next((n for n, row in rows if row.base <= address < row.base + row.bytes), -1)

    rows = [
        (n, row)
        for n, row in enumerate(found.all())
        if row.first_epoch <= epoch and (row.last_epoch is None or epoch <= row.last_epoch)
    ]
    return [place(address) for address in addresses]


def test_an_address_means_one_allocation_in_each_epoch() -> None:
    found = after(
        made("cuMemAlloc", 0x1000, 256),
        gone("cuMemFree", 0x1000, 3),
        made("cuMemAlloc", 0x1080, 256, 4),
        made("cuMemAlloc", 0x8000, 16, 4),
    )
    assert places(found, [0xFFF, 0x1000, 0x107F, 0x10FF, 0x1100], 3) == [-1, 0, 0, 0, -1]
    assert places(found, [0x107F, 0x1080, 0x117F, 0x1180, 0x8000, 0x8010], 4) == [-1, 1, 1, -1, 2, -1]
    assert (places(found, [0x1080], 0), places(found, [0x1080], 9), places(found, [0x8000], 3)) == (
        [0],
        [1],
        [-1],
    )


def test_a_free_may_be_logged_after_what_took_its_place() -> None:
    found = after(
        made("cuMemAlloc", 0x1000, 256),
        made("cuMemAlloc", 0x1000, 512, 1),
        gone("cuMemFree", 0x1000, 0, at=77),
    ).all()
    assert [(a.last_epoch, a.freed_ns) for a in found] == [(0, 77), (None, None)]


def test_what_ends_without_a_free_of_its_own() -> None:
    found = after(
        made("cuMemMap", 0x1000, 0x1000),
        made("cuMemMap", 0x2000, 0x1000),
        made("cuMemMap", 0x3000, 0x1000),
        gone("cuMemUnmap", 0x1000, 5, bytes=0x2000),
        made("cuMemAlloc", 0x8000, 64, 5, context=1),
        made("cuMemAlloc", 0x9000, 64, 5),
        gone("cuCtxDestroy", 0, 6, context=1),
        made("cuMemAlloc", 0x8F00, 0x200, 7),  # over what nobody freed
    ).all()
    assert [a.last_epoch for a in found] == [5, 5, None, 6, 6, None]
    assert not found[4].freed


def test_what_the_driver_refused_or_captured_is_nothing() -> None:
    found = after(
        made("cuMemAlloc", 0x1000, 256, result=2),
        made("cuMemAlloc", 0x2000, 256),
        gone("cuMemFree", 0x2000, result=1),
        gone("cuMemFreeAsync", 0x2000, flags=operation_log.CAPTURED),
        gone("cuMemFree", 0),
        made("cuMemAllocAsync", 0x3000, 256, flags=operation_log.CAPTURED),
        made("cuMemAlloc", 0x4000, 256, kind=operation_log.SYNC),
    ).all()
    assert [(a.base, a.last_epoch) for a in found] == [(0x2000, None), (0x3000, None)]


def test_against_a_model() -> None:
    """Allocations by chance, and every word looked up in every epoch."""
    rng = random.Random(3)
    for _ in range(20):
        rows, live = [], {}
        meaning: list[dict[int, int]] = [{}]  # by epoch: which allocation a word is in
        freed: set[int] = set()
        count = 0
        for _ in range(120):
            if live and rng.random() < 0.45:
                base = rng.choice(list(live))
                words = live.pop(base)[1]
                freed |= set(words)
                rows.append(gone("cuMemFree", base, len(meaning) - 1))
                continue
            base, size = 64 + rng.randrange(60), rng.randrange(1, 9)
            words = range(base, base + size)
            if any(set(words) & set(other) for _, other in live.values()):
                continue
            if freed & set(words):
                freed.clear()
                meaning.append({w: n for n, other in live.values() for w in other})
            meaning[-1] |= dict.fromkeys(words, count)
            live[base] = count, words
            rows.append(made("cuMemAlloc", base, size, len(meaning) - 1))
            count += 1
        found = after(*rows)
        for epoch, expected in enumerate(meaning):
            words = list(range(60, 140))
            assert places(found, words, epoch) == [expected.get(w, -1) for w in words]


def test_nonsense_is_only_nonsense() -> None:
    rng = np.random.default_rng(1)
    found = Allocations()
    calls = np.array([b"cuMemAlloc", b"cuMemFree", b"cuMemUnmap", b"cuCtxDestroy", b"variable", b"\xff\xfe"])
    start = time.process_time()
    for _ in range(20):
        records = (
            rng.integers(0, 256, (2000, operation_log.RECORD), np.uint8).view(operation_log.DTYPE).reshape(-1)
        )
        records["kind"], records["result"] = operation_log.API, 0
        records["api"]["name"] = rng.choice(calls, len(records))
        records["api"]["address"] &= rng.choice(np.array([0xFFF, (1 << 64) - 1], np.uint64), len(records))
        records["api"]["bytes"] &= rng.choice(np.array([0xFFF, (1 << 62) - 1], np.uint64), len(records))
        found.add(replace(log_of(lost=3), records=records))
    rows = found.all()
    assert rows and all(a.base > 0 and a.bytes > 0 and a.base + a.bytes <= 1 << 62 for a in rows)
    assert found.incomplete == {1} and time.process_time() - start < 5


def test_there_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LIMIT >= 1 << 20
    monkeypatch.setattr("gpubpf.memory.allocations.LIMIT", 3)
    found = after(*(made("cuMemAlloc", 0x1000 * n, 16) for n in range(1, 6)))
    assert len(found) == 3 and found.dropped == 2


# --- a program that knows its own memory ---

TEXT = r"""
#include <gpubpf.h>
struct seen { u64 launch, kernel, epoch, address, site; };
struct sums { u64 stores, first; };
GPU_RINGBUF(stores, struct seen, 64);
GPU_SITE_ARRAY(sites, struct sums);
int on_store(struct gpu_access *ctx) {
    struct seen s = {};
    u32 site = ctx->site;
    s.launch = ctx->launch;
    s.kernel = gpu_kernel();
    s.epoch = gpu_epoch();
    s.address = ctx->address;
    s.site = site;
    stores.ringbuf_output(&s, sizeof(s), 0);
    struct sums *mine = sites.lookup(&site);
    if (mine)
        __sync_fetch_and_add(&mine->stores, 1);
    return 0;
}
"""
# Each launch stores its own number to an address; the program prints for each what memory that is: number, name, beginning, bytes.
APP = r"""
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>
__global__ void store(int *p, int value) { *p = value; }
__device__ int table[1000];
namespace { __constant__ int unread[4]; __managed__ int both[8]; }
__global__ void fill(int i) { table[i] = i; both[0] = unread[i]; }
static void check(int error, int line) { if (error) { fprintf(stderr, "line %d: error %d\n", line, error); exit(3); } }
#define OK(call) check(call, __LINE__)
static std::mutex lock;
static void put(const char *name, void *at, size_t bytes, size_t offset, cudaStream_t s) {
    std::lock_guard<std::mutex> hold(lock);
    store<<<1, 1, 0, s>>>((int *)((char *)at + offset), 0);
    OK(cudaGetLastError());
    printf("%s %llu %zu %zu\n", name, (unsigned long long)at, bytes, offset);
}
static void thread(int rounds) {
    cudaStream_t s;
    OK(cudaStreamCreate(&s));
    for (int i = 0; i < rounds; i++) {
        int *p, *q, *h;
        size_t pitch;
        OK(cudaMalloc(&p, 4096 + 256 * i));
        OK(cudaMallocPitch(&q, &pitch, 100, 10));
        OK(cudaHostAlloc(&h, 1024, 0));
        put("cuMemAlloc", p, 4096 + 256 * i, 4092, s);
        put("cuMemAllocPitch", q, pitch * 10, pitch * 9, s);
        put("cuMemHostAlloc", h, 1024, 8, s);
        OK(cudaStreamSynchronize(s));
        OK(cudaFree(p));
        OK(cudaMalloc(&p, 2048));  // often where the last one was
        put("cuMemAlloc", p, 2048, 0, s);
        OK(cudaStreamSynchronize(s));
        OK(cudaFree(p));
        OK(cudaFree(q));
        OK(cudaFreeHost(h));
    }
    void *first = nullptr, *again = nullptr;
    for (int i = 0; i < 2; i++) {
        OK(cudaMallocAsync(&again, 8192, s));
        put("cuMemAllocAsync", again, 8192, 16, s);
        OK(cudaFreeAsync(again, s));
        if (!first) first = again;
    }
    OK(cudaStreamSynchronize(s));
}
int main(int argc, char **argv) {
    int *m, *page = (int *)aligned_alloc(4096, 8192);
    std::vector<std::thread> all;
    for (int t = 0; t < atoi(argv[1]); t++) all.emplace_back(thread, 5);
    for (auto &t : all) t.join();
    OK(cudaMallocManaged(&m, 300));
    put("cuMemAllocManaged", m, 300, 296, 0);
    OK(cudaHostRegister(page, 8192, 0));
    put("cuMemHostRegister", page, 8192, 4096, 0);
    OK(cudaDeviceSynchronize());
    OK(cudaHostUnregister(page));
    cudaMalloc(&m, (size_t)1 << 60);  // refused
    cudaGetLastError();
    fill<<<1, 1>>>(3);
    void *v, *w;
    OK(cudaGetSymbolAddress(&v, table));
    OK(cudaGetSymbolAddress(&w, both));
    printf("table %llu %zu %d\n", (unsigned long long)v, sizeof table, 12);
    printf("both %llu %zu %d\n", (unsigned long long)w, sizeof both, 0);
    OK(cudaDeviceSynchronize());
}
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_cuda.build(APP, tmp_path_factory.mktemp("memory") / "app")


def options(command: list[str]) -> Options:
    from gpubpf.show import cli

    parser = cli.parser("probe", "", "")
    for add in (
        cli.add_targets,
        cli.add_kernels,
        cli.add_threads,
        cli.add_device,
        cli.add_looks,
        cli.add_output,
    ):
        add(parser)
    return cli.Options.of(cli.parse(parser, ["--device", "sim", "--", *command]))


@pytest.mark.every(2)
@pytest.mark.parametrize("hostile", ["0", "1"])
def test_a_program_and_its_memory(
    app: Path, hostile: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from gpubpf.program import BPF
    from gpubpf.traced.measurement import Follow
    from gpubpf_bcc import compiled

    compiled(TEXT)
    monkeypatch.setenv("CUDASIM_HOSTILE", hostile)
    b = BPF(text=TEXT)
    b.attach_gpu_access(fn_name="on_store", kinds="store", spaces="global")
    follow = Follow(log_records=1 << 13, allocation_stacks=True)
    found, seen = Allocations(), []
    with b.trace(options([str(app), "4"]), follow=follow) as session:
        for _ in session.intervals(0.1):
            seen += [part.records for part in session.rings("stores")]
            for log in session.logs():
                found.add(log)
    assert session.status == 0
    out = [line.split() for line in capfd.readouterr().out.splitlines()]
    stores = np.concatenate(seen)
    stores = stores[np.lexsort((stores["site"], stores["launch"]))]  # as the program printed them
    assert len(stores) == len(out) == 4 * (5 * 4 + 2) + 2 + 2
    rows = found.all()
    names = {row.name.split("::")[-1] for row in rows if row.name}
    assert names == {"table", "both", "unread"}
    for store, (name, base, size, offset) in zip(stores, out, strict=True):
        (place,) = places(found, [int(store["address"])], int(store["epoch"]))
        row = rows[place]
        assert (row.base, row.bytes) == (int(base), int(size)) and store["address"] == row.base + int(offset)
        assert name in (row.call, row.name.split("::")[-1])
        assert row.first_epoch <= store["epoch"]
        assert row.kind == "variable" or any(frame.symbol or "app" in frame.file for frame in row.stack)
    live = [row for row in rows if not row.freed]
    assert {row.call for row in live if row.kind != "variable"} == {"cuMemAllocManaged"}
    assert max(row.first_epoch for row in rows) > 3  # addresses were used again
    # Sites: each kernel's are there once for the context, whatever the shard.
    instances = session.instances("sites")
    counted = {i.kernel: i.array["stores"].sum(axis=0).tolist() for i in instances}
    assert counted == {"store": [len(out) - 2], "fill": [1, 1]}
    assert all((i.grid, i.block_dim) == ((0, 0, 0), (0, 0, 0)) for i in instances)
    assert {i.kernel: i.launches for i in instances} == {"store": len(out) - 2, "fill": 1}
    assert len(set(stores["kernel"][:-2].tolist()) | {-1}) == len(set(stores["kernel"].tolist())) == 2
    assert session.summary()["lost"] == 0


@pytest.mark.parametrize(
    "ending", [gone("cuCtxDestroy", 0, context=1), gone("cuMemUnmap", 0x1000) | {"bytes": 1 << 30}]
)
def test_looks_in_vain_have_a_limit(ending: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile log says that memory ends, again and again, but that all of it came later. Then nothing of the process ends."""
    monkeypatch.setattr(allocations, "_MOST_FUTILE", 100)
    later = [made("cuMemMap", 0x1000 * at, 1, 7, context=1) for at in range(1, 41)]
    found = after(*later, *[ending] * 50)
    assert 100 < found._processes[1]._futile <= 140 and not any(one.freed for one in found.all())
    assert not any(one.freed for one in after(*later, *[ending] * 3, ending | {"epoch": 6}).all())
    assert not any(one.freed for one in after(*later, *[ending] * 3, ending | {"epoch": 7}).all())
    assert all(one.freed for one in after(*later, *[ending] * 2, ending | {"epoch": 7}).all())

"""What memtrace's device programs add up, against the model, for requests of every kind: a program that takes the addresses of each
request from a table, so that nothing of it can be known to the compiler."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda
import memory_model as model

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = [sys.executable, os.environ.get("MEMTRACE", str(REPOSITORY / "tools/memtrace.py")), "--device", "sim"]
pytestmark = gpubpf_cuda.needs_cuda

ROOM = 4096  # bytes that requests go to
OFF = 0xFFFFFFFF

# A kernel for each kind of access: one instruction that the table says everything of.
SOURCE = r"""
#include <cstdio>
#include <cstdlib>
#include <vector>
#define KERNEL(name, code) \
    __global__ void name(const unsigned *table, char *room) { \
        __shared__ __align__(32) char shared[4096]; \
        unsigned at = table[blockIdx.x * 32 + threadIdx.y * blockDim.x + threadIdx.x], v = 0; \
        unsigned long long in_room = (unsigned long long)__cvta_generic_to_global(room) + at; \
        unsigned in_shared = (unsigned)__cvta_generic_to_shared(shared) + at; \
        if (at != ~0u) asm volatile(REGISTERS code "}" : "+r"(v) : "l"(in_room), "r"(in_shared) : "memory"); \
        if (v == 0x12345678) room[1] = shared[v & 7]; \
    }
#define REGISTERS "{ .reg .b16 h<2>; .reg .b32 x<8>; .reg .b64 y<2>; mov.b32 x0, 0; mov.b32 x1, 0; mov.b32 x2, 0; mov.b32 x3, 0;"
KERNEL(global1, "ld.global.u8 h0, [%1];")
KERNEL(global2, "ld.global.u16 h0, [%1];")
KERNEL(global4, "ld.global.cg.u32 x0, [%1];")
KERNEL(global8, "st.global.v2.u32 [%1], {x0, x1};")
KERNEL(global16, "ld.global.v4.u32 {x0, x1, x2, x3}, [%1];")
KERNEL(atomic4, "red.global.add.u32 [%1], x0;")
KERNEL(shared1, "ld.shared.u8 h0, [%2];")
KERNEL(shared2, "ld.shared.u16 h0, [%2];")
KERNEL(shared4, "st.shared.u32 [%2], x0;")
KERNEL(shared8, "ld.shared.u64 y0, [%2];")
KERNEL(shared16, "ld.shared.v4.u32 {x0, x1, x2, x3}, [%2];")
KERNEL(sharedAtomic4, "red.shared.add.u32 [%2], x0;")
int main(int argc, char **argv) {
    struct { const char *name; void (*kernel)(const unsigned *, char *); } kernels[] = {
#define ENTRY(name) {#name, name}
        ENTRY(global1), ENTRY(global2), ENTRY(global4), ENTRY(global8), ENTRY(global16), ENTRY(atomic4),
        ENTRY(shared1), ENTRY(shared2), ENTRY(shared4), ENTRY(shared8), ENTRY(shared16), ENTRY(sharedAtomic4)};
    for (int i = 0; i < 12; i++) {
        FILE *file = fopen((std::string(argv[1]) + "/" + kernels[i].name).c_str(), "rb");
        if (!file) continue;
        std::vector<unsigned> table(1 << 20);
        size_t count = fread(table.data(), 4, table.size(), file);
        unsigned *device; char *room;
        if (cudaMalloc(&device, 4 * count) || cudaMalloc(&room, 4096 + 64)) return 1;
        cudaMemset(room, 0, 4096 + 64);
        cudaMemcpy(device, table.data(), 4 * count, cudaMemcpyHostToDevice);
        unsigned row = argc > 2 ? atoi(argv[2]) : 32;
        kernels[i].kernel<<<count / 32, dim3(row, 32 / row)>>>(device, room);
        if (cudaDeviceSynchronize()) return 2;
    }
}
"""
KINDS = {
    "global1": ("load", "global", 1),
    "global2": ("load", "global", 2),
    "global4": ("load", "global", 4),
    "global8": ("store", "global", 8),
    "global16": ("load", "global", 16),
    "atomic4": ("atomic", "global", 4),
    "shared1": ("load", "shared", 1),
    "shared2": ("load", "shared", 2),
    "shared4": ("store", "shared", 4),
    "shared8": ("load", "shared", 8),
    "shared16": ("load", "shared", 16),
    "sharedAtomic4": ("atomic", "shared", 4),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return gpubpf_cuda.build("#include <string>\n" + SOURCE, tmp_path_factory.mktemp("requests") / "requests")


def traced(program, folder, tables, *options, row=32):
    """The record of each kernel's site, whose requests are in `tables` by name."""
    for name, requests in tables.items():
        words = [OFF if at is None else at for lanes in requests for at in lanes]
        (folder / name).write_bytes(struct.pack(f"<{len(words)}I", *words))
    done = subprocess.run(
        [*TOOL, *options, "--json", "-o", str(folder / "records"), "--", str(program), str(folder), str(row)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found = [
        r for r in records(folder) if r["type"] == "site" and r["opcode"] != "ld.global.u32"
    ]  # that reads the table
    assert sorted(r["kernel"] for r in found) == sorted(tables)
    return {r["kernel"]: r for r in found}


def records(folder):
    """The records of the last run."""
    return [json.loads(line) for line in (folder / "records").read_text().splitlines()]


GAPS = [0, 1, 2, 7, 8, 9, 15, 16, 17, 23, 24, 31, 32, 33, 47, 48, 64, 65, 80, 127, 128]


def tiles(width, gaps=GAPS, steps=(0, 1)):
    """Requests of a tile with rows of 16 lanes, twice: rows at any distance, overlapping too; each at one address, or side by side."""
    units = ROOM // width
    found = []
    for gap in [sign * gap for gap in gaps for sign in (1, -1) if gap + 20 < units]:
        for step in steps:
            for first in (0, 1, 3):
                begin = first + max(0, -gap)
                found.append(
                    [width * (begin + gap * (lane // 16) + step * (lane % 16)) for lane in range(32)]
                )
    if gaps is GAPS:
        found += [[*one[:21], (one[21] + width) % ROOM, *one[22:]] for one in found[::7]]  # but for one lane
    return found * 2


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("options", "chosen"),
    [(("--no-allocations",), ()), ((), ()), (("--granule", "4"), ((0, 64), (1,)))],
    ids=["no-allocations", "", "at-most-two-lanes-at-an-address"],
)
def test_tiles_of_16(program, tmp_path, options, chosen):
    tables = {name: tiles(width, *chosen) for name, (_, _, width) in KINDS.items()}
    for name, found in traced(program, tmp_path, tables, *options, row=16).items():
        kind, space, width = KINDS[name]
        for field, value in model.site(kind, space, width, tables[name], 16).items():
            assert found[field] == value or model.near(found[field], value), (name, field)
        assert found["patterns"] == model.patterns(width, tables[name], 16), name
    if options == ():
        touched = []
        for name, (kind, space, width) in KINDS.items():
            bytes_of = (
                len(model.touched((at, width) for one in tables[name] for at in one))
                if space == "global"
                else 0
            )
            touched.append((bytes_of * (kind != "store"), bytes_of * (kind != "load")))
        rooms = [r for r in records(tmp_path) if r["type"] == "allocation" and r["bytes"] == ROOM + 64]
        assert sorted((r["read_bytes"], r["written_bytes"]) for r in rooms) == sorted(touched)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("options", "row"),
    [((), 32), (("--no-allocations",), 16), (("--block", "0:99"), 8), (("--no-allocations",), 4)],
    ids=["", "rows-of-16", "block", "rows-of-4"],
)
def test_requests_of_every_kind(program, tmp_path, options, row):
    rng = random.Random(1)
    tables = {
        name: [model.request(rng, width, ROOM, row=row) for _ in range(150)]
        for name, (_, _, width) in KINDS.items()
    }
    for name, found in traced(program, tmp_path, tables, *options, row=row).items():
        kind, space, width = KINDS[name]
        taken = tables[name][:100] if "--block" in options else tables[name]  # a block is a request
        for field, value in model.site(kind, space, width, taken, row).items():
            assert found[field] == value or model.near(found[field], value), (name, field)
        assert found["patterns"] == model.patterns(width, taken, row), name


@pytest.mark.every(4)
@pytest.mark.parametrize("options", [(), ("--no-allocations",)], ids=["", "no-allocations"])
def test_some_lanes_side_by_side(program, tmp_path, options):
    parts = ((0, 2), (3, 17), (5, 31), (1, 32), (30, 32))
    tables = {
        name: [
            [None] * first + [width * (start + n) for n in range(end - first)] + [None] * (32 - end)
            for first, end in parts
            for start in (0, 3, 16)
        ]
        for name, (_, _, width) in KINDS.items()
    }
    for name, found in traced(program, tmp_path, tables, *options).items():
        kind, space, width = KINDS[name]
        for field, value in model.site(kind, space, width, tables[name], 32).items():
            assert found[field] == value or model.near(found[field], value), (name, field)
        assert found["patterns"] == model.patterns(width, tables[name], 32), name


@pytest.mark.every(2)
def test_one_stride(program, tmp_path):
    strides = dict(zip(KINDS, (2, 3, -3, 5, 7, 31, 33, -1, 9, 2, 3, -8), strict=True))
    tables = {}
    for name, stride in strides.items():
        width, first = KINDS[name][2], max(0, -31 * stride)
        whole = [width * (first + stride * lane) for lane in range(32)]
        tables[name] = [whole, whole, whole[:7] + [None] * 25, [None] * 5 + whole[5:7] + [None] * 25]
    for name, found in traced(program, tmp_path, tables, "--no-allocations").items():
        assert found["pattern"] == f"stride {strides[name]}", name

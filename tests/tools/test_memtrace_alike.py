"""Accesses that differ from an earlier one by a constant have no probe of their own: their numbers are those of the model, too."""

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

OFF = 0xFFFFFFFF
OFFSETS = (0, 32, 36, 128, 164, -64)  # of the accesses of a kernel, in its order
BEGIN, END = 64, 3800  # of the addresses in the table
SOURCE = r"""
#include <cstdio>
#include <string>
#include <vector>
#define KERNEL(name, code) \
    __global__ void name(const unsigned *table, char *room) { \
        __shared__ __align__(128) char shared[4096]; \
        unsigned at = table[blockIdx.x * 32 + threadIdx.x], v = 0; \
        unsigned long long in_room = (unsigned long long)__cvta_generic_to_global(room) + at; \
        unsigned in_shared = (unsigned)__cvta_generic_to_shared(shared) + at; \
        if (at != ~0u) asm volatile("{ .reg .b32 x<6>; " code "}" : "+r"(v) : "l"(in_room), "r"(in_shared) : "memory"); \
        if (v == 0x12345678) room[1] = shared[v & 7]; \
    }
KERNEL(ofGlobal, "ld.global.cg.u32 x0, [%1]; ld.global.cg.u32 x1, [%1+32]; ld.global.cg.u32 x2, [%1+36];"
                 "ld.global.cg.u32 x3, [%1+128]; ld.global.cg.u32 x4, [%1+164]; ld.global.cg.u32 x5, [%1+-64];")
KERNEL(ofShared, "ld.shared.u32 x0, [%2]; ld.shared.u32 x1, [%2+32]; ld.shared.u32 x2, [%2+36];"
                 "ld.shared.u32 x3, [%2+128]; ld.shared.u32 x4, [%2+164]; ld.shared.u32 x5, [%2+-64];")
__global__ void ofRows(char *room) {
    __shared__ __align__(128) char shared[4096];
    unsigned long long in_room = (unsigned long long)__cvta_generic_to_global(room) + blockIdx.x * 4;
    unsigned in_shared = (unsigned)__cvta_generic_to_shared(shared) + threadIdx.y * 64 + 8;
    asm volatile("{ .reg .b32 x<6>; ld.shared.u32 x0, [%1]; ld.shared.u32 x1, [%1+4]; ld.shared.u32 x2, [%1+20];"
                 "ld.global.cg.u32 x3, [%0]; ld.global.cg.u32 x4, [%0+4]; ld.global.cg.u32 x5, [%0+44]; }" ::
                 "l"(in_room), "r"(in_shared) : "memory");
    if (in_shared == 0x12345678) room[1] = shared[threadIdx.x];
}
int main(int argc, char **argv) {
    std::vector<unsigned> table(1 << 20);
    size_t count = fread(table.data(), 4, table.size(), fopen(argv[1], "rb"));
    unsigned *device; char *room;
    if (cudaMalloc(&device, 4 * count) || cudaMalloc(&room, 4096)) return 1;
    cudaMemset(room, 0, 4096);
    cudaMemcpy(device, table.data(), 4 * count, cudaMemcpyHostToDevice);
    ofGlobal<<<count / 32, 32>>>(device, room);
    ofShared<<<count / 32, 32>>>(device, room);
    ofRows<<<3, dim3(16, 6)>>>(room);
    return cudaDeviceSynchronize() != cudaSuccess;
}
"""


def requests() -> list[list[int | None]]:
    """Return requests of all patterns and alignments: the address of each lane, None if it takes no part."""
    chosen = random.Random(48)
    found: list[list[int | None]] = []
    for first in range(10):
        for step in (0, 1, 2, 3, 8, 16, -1):
            begin = BEGIN + 4 * (first + 40)
            found.append([begin + 4 * step * lane for lane in range(32)])
    for _ in range(40):
        some = [BEGIN + 4 * chosen.randrange((END - BEGIN) // 4) for _ in range(32)]
        found.append([at if chosen.random() < 0.8 else None for at in some])
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize("options", [("--no-allocations",), ()], ids=["no-allocations", "touched-bytes"])
def test_numbers_are_those_of_the_model(options: tuple[str, ...], tmp_path: Path) -> None:
    program = gpubpf_cuda.build(SOURCE, tmp_path / "alike")
    table = requests()
    words = [OFF if at is None else at for lanes in table for at in lanes]
    (tmp_path / "table").write_bytes(struct.pack(f"<{len(words)}I", *words))
    command = [*TOOL, *options, "--json", "-o", str(tmp_path / "records"), "--"]
    done = subprocess.run(
        [*command, str(program), str(tmp_path / "table")], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    for kernel, space in (("ofGlobal", "global"), ("ofShared", "shared")):
        sites = [r for r in records if r["type"] == "site" and r["kernel"] == kernel]
        sites = [r for r in sites if r["opcode"] in ("ld.global.cg.u32", "ld.shared.u32")]
        sites.sort(key=lambda site: site["site"])
        assert len(sites) == len(OFFSETS)
        for site, offset in zip(sites, OFFSETS, strict=True):
            moved = [[None if at is None else at + offset for at in lanes] for lanes in table]
            for field, value in model.site("load", space, 4, moved).items():
                assert site[field] == value or model.near(site[field], value), (kernel, offset, field)
    offsets = [(at, offset) for at in words if at != OFF for offset in OFFSETS]
    offsets += [(4 * block, offset) for block in range(3) for offset in (0, 4, 44)]
    read = {at + offset + byte for at, offset in offsets for byte in range(4)}
    room = [r for r in records if r["type"] == "allocation" and r["bytes"] == 4096]
    assert [r["read_bytes"] for r in room] == ([] if options else [len(read)])
    sites = [r for r in records if r["type"] == "site" and r["kernel"] == "ofRows"]
    sites.sort(key=lambda site: site["site"])
    assert [r["space"] for r in sites] == ["shared"] * 3 + ["global"] * 3
    for site, offset in zip(sites, (8, 12, 28, 0, 4, 44), strict=True):
        shared = site["space"] == "shared"
        rows = (
            [[64 * (2 * warp + lane // 16) for lane in range(32)] for warp in range(3)]
            if shared
            else [[0] * 32] * 3
        )
        moved = [
            [at + offset + (0 if shared else 4 * block) for at in row] for block in range(3) for row in rows
        ]
        for field, value in model.site("load", site["space"], 4, moved, 16).items():
            assert site[field] == value or model.near(site[field], value), (site["opcode"], offset, field)


CONSTANTS = """.version 8.3
.target sm_90
.address_size 64
.const .align 4 .b8 table[512];
.visible .entry k(.param .u64 p) {{ .reg .b32 %r<3>; .reg .b64 %rd<3>;
ld.param.u64 %rd1, [p]; mov.u32 %r1, 0; {loads}
st.global.u32 [%rd1], %r1; ret; }}
"""


@pytest.mark.parametrize("options", ["", "--footprint", "--block 0", "--no-allocations", "--granule 4"])
def test_loads_from_constant_memory_share_a_probe(options: str) -> None:
    """Their bytes are not tracked, whatever memtrace tracks elsewhere: a polynomial has a probe, not one for each coefficient."""
    from gpubpf.inject.inject import inject
    from gpubpf.memory.memory_options import MemoryOptions
    from gpubpf.program import BPF
    from gpubpf.ptx.parser import parse
    from gpubpf.show import cli
    from gpubpf.tools import memtrace

    b = BPF(text=memtrace.PROGRAM)
    memtrace.attach(b, MemoryOptions.of(cli.parse(memtrace.build_parser(), [*options.split(), "--", "true"])))
    loads = "\n".join(f"ld.const.u32 %r2, [table+{4 * n}]; add.u32 %r1, %r1, %r2;" for n in range(64))
    injected = inject(parse(CONSTANTS.format(loads=loads)), b.attached.probes_of(["k"]))
    sites = [site for site in injected.kernels["k"].sites if site.space == "const"]
    assert [site.like for site in sites] == [None] + [sites[0].number] * 63

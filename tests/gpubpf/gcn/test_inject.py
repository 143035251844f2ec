"""Kernels with probes on hipsim's engine: the same results as without, and exact counts by the probes."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import hipsim_engine
from gpubpf.ebpf import maps
from gpubpf.ebpf.bytecode import WIDE, Program
from gpubpf.ebpf.probe import Probe
from gpubpf.errors import ImageError, VerifyError
from gpubpf.gcn.added import NOP
from gpubpf.gcn.code_object import CodeObject
from gpubpf.gcn.comgr import Comgr
from gpubpf.gcn.inject import GcnInjected, inject
from gpubpf.gcn.kernel_code import read
from gpubpf.verify import rules
from gpubpf_bcc import compiled
from gpubpf_gcn import RUNS, block_arguments, content, lowered, with_argument
from hipsim_engine import GPUS, Engine, assemble, kernel

pytestmark = pytest.mark.skipif(
    shutil.which("hipcc") is None or hipsim_engine.missing() is not None,
    reason="needs hipcc and LLVM's tools for AMD GPUs, which script/setup installs where the distribution has them",
)

TEXT = r"""
#include <gpubpf.h>
struct tally { u64 runs; };
GPU_THREAD_ARRAY(tallies, struct tally, 1);
GPU_ARRAY(sites, u64, 8);
struct place { u64 tx, ty, tz, bx, by, bz, nx, ny, nz, gx, gy, gz, thread, launch, warp; };
GPU_THREAD_ARRAY(places, struct place, 1);
GPU_HASH(blocks, u64, u64, 64);
GPU_THREAD_ARRAY(lanes, u64, 1);
GPU_PARAM(limit, u64);
GPU_BLOCK_ARRAY(units, u64, 1);

int on_exit(struct gpu_exit *ctx) {
    int key = 0;
    struct tally *mine = tallies.lookup(&key);
    if (mine) __sync_fetch_and_add(&mine->runs, 1);
    return 0;
}
GPU_THREAD_ARRAY(begun, struct tally, 1);
int on_entry(struct gpu_entry *ctx) {
    int key = 0;
    struct tally *mine = begun.lookup(&key);
    if (mine && ctx->launch == 77) __sync_fetch_and_add(&mine->runs, 1 + (gpu_global_thread() & 7));
    return 0;
}
int on_site(struct gpu_exit *ctx) {
    int key = ctx->site;
    u64 *n = sites.lookup(&key);
    if (n) __sync_fetch_and_add(n, 1);
    return 0;
}
int on_place(struct gpu_exit *ctx) {
    int key = 0;
    struct place *p = places.lookup(&key);
    if (!p) return 0;
    bpf_get_thread_idx(&p->tx, &p->ty, &p->tz);
    bpf_get_block_idx(&p->bx, &p->by, &p->bz);
    bpf_get_block_dim(&p->nx, &p->ny, &p->nz);
    gpu_grid_dim(&p->gx, &p->gy, &p->gz);
    p->thread = gpu_global_thread();
    p->launch = ctx->launch;
    p->warp = gpu_warp();
    return 0;
}
int on_block(struct gpu_exit *ctx) {
    u64 x, y, z, one = 1, *n;
    bpf_get_block_idx(&x, &y, &z);
    n = blocks.lookup_or_try_init(&x, &(u64){0});
    if (n) __sync_fetch_and_add(n, 1);
    return 0;
}
int on_limit(struct gpu_exit *ctx) {
    int key = 0;
    u64 *most = limit.lookup(&key);
    struct tally *mine = tallies.lookup(&key);
    if (most && mine && gpu_global_thread() < *most) __sync_fetch_and_add(&mine->runs, 3);
    return 0;
}
int on_unit(struct gpu_exit *ctx) {
    int key = 0;
    u64 *mine = units.lookup(&key);
    if (mine) *mine = 1 + gpu_sm();
    return 0;
}
int on_slot(struct gpu_exit *ctx) {
    int key = 0;
    struct tally *mine = tallies.lookup(&key);
    if (mine) mine->runs = 1 + bpf_get_warp_id() + (bpf_get_sm_id() != gpu_sm()) * 100 + bpf_get_lane_id() * 1000;
    return 0;
}
int on_turns(struct gpu_exit *ctx) {
    int key = 0;
    u64 *most = limit.lookup(&key), s = 0;
    struct tally *mine = tallies.lookup(&key);
    if (!most || !mine) return 0;
    for (u64 n = 0; n < *most + (gpu_global_thread() & 1); n++) {
        s += n;
        asm volatile("" : "+r"(s));
    }
    mine->runs = s;
    return 0;
}
int on_end(struct gpu_entry *ctx) {
    bpf_cuda_exit();
    return 0;
}
int on_lane(struct gpu_exit *ctx) {
    int key = 0;
    u64 *mine = lanes.lookup(&key);
    u64 threes = gpu_shuffle(gpu_lane() + 100, 3), alike = gpu_popcount(gpu_match(gpu_lane() & 3));
    u64 found = gpu_uniform(5ull << 40) | gpu_uniform((u64)(gpu_lane() == 17) << 40) << 1 | gpu_any(gpu_lane() == 17) << 2;
    if (mine) *mine = (u64)gpu_popcount(gpu_active()) << 32 | found << 24 | threes << 16 | alike;
    return 0;
}
"""


@pytest.fixture(scope="module")
def program() -> Program:
    return compiled(TEXT)


@dataclass
class Device:
    """Runs kernels on the engine, hostile as hardware may be."""

    engine: Engine
    place: Path
    images: int = 0

    def run(
        self,
        image: bytes,
        name: str,
        arguments: Sequence[str],
        shape: tuple[tuple[int, int, int], tuple[int, int, int]],
        buffers: Mapping[str, np.ndarray],
    ) -> dict[str, np.ndarray]:
        """Run a kernel of an image and give its buffers afterwards."""
        self.images += 1
        code = self.place / f"image{self.images}.co"
        code.write_bytes(image)
        self.engine.load(code)
        for each, value in buffers.items():
            self.engine.put(each, value)
        outcome = self.engine.run(name, arguments, *shape)
        assert outcome.fault is None
        return {each: self.engine.get(each, value.dtype.type) for each, value in buffers.items()}


@pytest.fixture
def device(gpu: str, tmp_path: Path) -> Iterator[Device]:
    engine = Engine(tmp_path, gpu=gpu)
    engine.send("set hostile 7")
    yield Device(engine, tmp_path)
    engine.close()


def injected(code: CodeObject, program: Program, *names: str, only: str = "") -> GcnInjected:
    """Place the programs in all kernels, or in one, each at its point."""
    points = {name: program.functions[name].point.removeprefix("gpu_") for name in names}
    return inject(
        code,
        {
            each.name: [
                Probe(lowered(program, name, each.descriptor.wave), point) for name, point in points.items()
            ]
            for each in code.kernels
            if only in ("", each.name)
        },
    )


@pytest.mark.every(8)
@pytest.mark.parametrize(
    "names", [("on_exit",), ("on_entry",), ("on_entry", "on_exit")], ids=["exit", "entry", "both"]
)
@pytest.mark.parametrize(("name", "arguments", "given", "shape"), RUNS, ids=[run[0] for run in RUNS])
def test_each_thread_counts_once_and_results_stay(
    device: Device,
    built: Path,
    program: Program,
    name: str,
    arguments: Sequence[str],
    given: int,
    shape: tuple,
    names: tuple[str, ...],
) -> None:
    """The probe at the entry leaves all registers as they were."""
    original = built.read_bytes()
    made = injected(CodeObject(original), program, *names, only=name)
    threads = int(np.prod(shape[0]))
    before = device.run(original, name, arguments, shape, {"x": content(name)})
    maps = {"tallies": "t", "begun": "b"}
    buffers = {"x": content(name)} | {short: np.zeros(threads + 1, np.uint64) for short in maps.values()}
    used = {each: maps[each] for each in made.kernels[name].block.bases}
    rest = block_arguments(made, name, given, shape, used)
    after = device.run(made.image, name, [*arguments, *rest], shape, buffers)
    assert np.array_equal(before["x"], after["x"])
    begun = [1 + (n & 7) for n in range(threads)] if "on_entry" in names else [0] * threads
    assert after["b"].tolist() == [*begun, 0]
    assert after["t"].tolist() == [int("on_exit" in names)] * threads + [0]


def test_a_kernel_that_may_call_any_function_is_refused(built: Path, program: Program) -> None:
    made = injected(CodeObject(built.read_bytes()), program, "on_exit")
    assert set(made.refusals) == {"by_pointer", "keeps"}
    assert made.refusals["by_pointer"] == "it calls functions whose addresses it loads"
    assert set(made.kernels) == {run[0] for run in RUNS}


def test_functions_without_symbols(device: Device, built: Path, program: Program) -> None:
    """Where a function ends shows in its branches."""
    original = built.read_bytes()
    code = CodeObject(original)
    code.functions = {}
    made = injected(code, program, "on_exit")
    assert set(made.kernels) == {run[0] for run in RUNS}
    shape = ((640, 1, 1), (128, 1, 1))
    for name in ("nested", "recursive"):
        before = device.run(original, name, ["x"], shape, {"x": content(name)})
        rest = block_arguments(made, name, 8, shape, {"tallies": "t"})
        buffers = {"x": content(name), "t": np.zeros(641, np.uint64)}
        after = device.run(made.image, name, ["x", *rest], shape, buffers)
        assert np.array_equal(before["x"], after["x"]) and after["t"].tolist() == [1] * 640 + [0]


def test_indices(device: Device, built: Path, program: Program) -> None:
    made = injected(CodeObject(built.read_bytes()), program, "on_place")
    _, arguments, given, shape = RUNS[1]
    (gx, gy, gz), (nx, ny, nz) = shape
    buffers = {"x": content("cube"), "p": np.zeros(15 * (gx * gy * gz + 1), np.uint64)}
    rest = block_arguments(made, "cube", given, shape, {"places": "p"})
    found = device.run(made.image, "cube", [*arguments, *rest], shape, buffers)["p"].reshape(-1, 15)
    expected = []
    blocks = (gx // nx, gy // ny, gz // nz)
    wave = CodeObject(built.read_bytes()).kernels[0].descriptor.wave
    for block in range(blocks[0] * blocks[1] * blocks[2]):
        bx, by, bz = block % blocks[0], block // blocks[0] % blocks[1], block // (blocks[0] * blocks[1])
        for thread in range(nx * ny * nz):
            at = (thread % nx, thread // nx % ny, thread // (nx * ny))
            expected.append(
                (*at, bx, by, bz, nx, ny, nz, *blocks, block * nx * ny * nz + thread, 77, thread // wave)
            )
    assert found[:-1].tolist() == [list(row) for row in expected] and not found[-1].any()


def test_several_programs_and_parameters(device: Device, built: Path, program: Program) -> None:
    made = injected(CodeObject(built.read_bytes()), program, "on_exit", "on_limit", "on_site")
    _, arguments, given, shape = RUNS[0]
    buffers = {"x": content("scale"), "t": np.zeros(1281, np.uint64), "s": np.zeros(8, np.uint64)}
    rest = block_arguments(
        made, "scale", given, shape, {"tallies": "t", "sites": "s"}, struct.pack("<Q", 600)
    )
    found = device.run(made.image, "scale", [*arguments, *rest], shape, buffers)
    assert found["t"].tolist() == [4] * 600 + [1] * 680 + [0]
    assert int(found["s"].sum()) == 1280


def test_a_hash_of_blocks(device: Device, built: Path, program: Program) -> None:
    made = injected(CodeObject(built.read_bytes()), program, "on_block")
    _, arguments, given, shape = RUNS[0]
    table = np.zeros(8 + 3 * 128, np.uint64)
    table[2] = 128
    rest = block_arguments(made, "scale", given, shape, {"blocks": "h"})
    found = device.run(made.image, "scale", [*arguments, *rest], shape, {"x": content("scale"), "h": table})[
        "h"
    ]
    states, keys, values = found[8:136], found[136:264], found[264:392]
    used = np.flatnonzero(states & np.uint64((1 << maps.STATE_BITS) - 1) == maps.SlotState.FULL)
    assert dict(zip(keys[used].tolist(), values[used].tolist(), strict=True)) == dict.fromkeys(range(5), 256)
    assert found[:2].tolist() == [5, 0]


def test_a_thread_that_stopped_while_it_inserted_stops_no_other(
    device: Device, built: Path, program: Program
) -> None:
    """The slot of block 3 is claimed, and its key is never written: the counts of that block are in it all the same."""
    made = injected(CodeObject(built.read_bytes()), program, "on_block")
    _, arguments, given, shape = RUNS[0]
    table = np.zeros(8 + 3 * 128, np.uint64)
    hashed = maps.hash_of(struct.pack("<Q", 3))
    claimed = hashed >> 24 & 127
    table[8 + claimed] = hashed << maps.STATE_BITS & (1 << 64) - 1 | maps.SlotState.NAMELESS
    rest = block_arguments(made, "scale", given, shape, {"blocks": "h"})
    buffers = {"x": content("scale"), "h": table}
    found = device.run(made.image, "scale", [*arguments, *rest], shape, buffers)["h"]
    assert found[264 + claimed] == 256 and found[136 + claimed] == 0
    assert found[:2].tolist() == [4, 0]


def test_compute_units(device: Device, built: Path, program: Program, gpu: str) -> None:
    made = injected(CodeObject(built.read_bytes()), program, "on_unit")
    shape = ((480, 1, 1), (60, 1, 1))
    rest = block_arguments(made, "none", 0, shape, {"units": "u"})
    found = device.run(made.image, "none", rest, shape, {"u": np.zeros(481, np.uint64)})["u"]
    assert len(set(found[:8].tolist())) == (4 if gpu == "gfx1030" else 8) and not found[8:].any()


def test_the_slots_of_waves(device: Device, built: Path, program: Program) -> None:
    """The embedded device numbers them by workgroup."""
    made = injected(CodeObject(built.read_bytes()), program, "on_slot")
    wave = CodeObject(built.read_bytes()).kernels[0].descriptor.wave
    shape = ((480, 1, 1), (160, 1, 1))
    rest = block_arguments(made, "none", 0, shape, {"tallies": "t"})
    found = device.run(made.image, "none", rest, shape, {"t": np.zeros(481, np.uint64)})["t"]
    of_block = [1 + thread // wave + 1000 * (thread % wave) for thread in range(160)]
    assert found.tolist() == [*of_block * 3, 0]


def test_a_loop_of_unknown_length(
    device: Device, built: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other lane takes a turn more."""
    monkeypatch.setattr(rules, "MAX_STEPS", 4000)  # the gate sees sooner that it cannot follow each turn
    made = injected(CodeObject(built.read_bytes()), program, "on_turns", only="none")
    shape = ((320, 1, 1), (160, 1, 1))
    used = {"tallies": "t", maps.PRINTS: "p"}
    rest = block_arguments(made, "none", 0, shape, used, struct.pack("<Q", 100))
    buffers = {"t": np.zeros(321, np.uint64), "p": np.zeros(64, np.uint64)}
    found = device.run(made.image, "none", rest, shape, buffers)
    assert found["t"].tolist() == [sum(range(100)), sum(range(101))] * 160 + [0]
    assert not found["p"].any()


def test_what_amd_gpus_do_not_have(program: Program) -> None:
    for wave in (32, 64):
        with pytest.raises(VerifyError, match="on_end calls bpf_cuda_exit, which AMD GPUs do not have"):
            lowered(program, "on_end", wave)


# Numbers of each kind for gpu_match, in C and Python: small ones, rising and falling ones, runs, and others.
VALUES = (
    "(L * L) % 211", "255 - L % 3", "L << 40", "1000 - L", "300 + L / 6", "(7 << 33) - (L / 9 << 20)",
    "(L * 12345) % 17 << 45", "300 + (L + 40) % 64", "L % 2 * 1000 + 5",
)  # fmt: skip
MATCHES = r"""
#include <gpubpf.h>
struct matches { u64 all[9], some[9]; };
GPU_THREAD_ARRAY(matched, struct matches, 1);
int on_match(struct gpu_exit *ctx) {
    int key = 0;
    u64 L = gpu_lane(), values[] = {VALUES};
    struct matches *mine = matched.lookup(&key);
    if (!mine) return 0;
#pragma unroll
    for (int n = 0; n < 9; n++)
        mine->all[n] = gpu_match(values[n]);
    if (L % 5 == 1 || L % 7 == 2) {
#pragma unroll
        for (int n = 0; n < 9; n++)
            mine->some[n] = gpu_match(values[n]);
    }
    return 0;
}
""".replace("VALUES", ", ".join(VALUES).replace("7 <<", "7ull <<"))


@pytest.mark.every(2)
def test_lanes_with_the_same_number(device: Device, built: Path) -> None:
    """Whatever the numbers, of all lanes and of some."""
    code = CodeObject(built.read_bytes())
    wave = code.kernels[0].descriptor.wave
    made = injected(code, compiled((WIDE if wave == 64 else "") + MATCHES), "on_match")
    shape = ((wave + 9, 1, 1), (wave + 9, 1, 1))  # the second wave has 9 lanes
    rest = block_arguments(made, "none", 0, shape, {"matched": "m"})
    found = device.run(made.image, "none", rest, shape, {"m": np.zeros(18 * (wave + 10), np.uint64)})["m"]
    expected = []
    for thread in range(wave + 9):
        lanes = range(wave if thread < wave else 9)
        some = [lane for lane in lanes if lane % 5 == 1 or lane % 7 == 2]
        for which in (lanes, some):
            for value in VALUES:
                numbers = {L: eval(value.replace("/", "//")) for L in which}
                own = numbers.get(thread % wave)
                expected.append(sum(1 << L for L in which if own is not None and numbers[L] == own))
    assert found[: len(expected)].tolist() == expected


def test_what_lanes_compute_together(device: Device, gpu: str, built: Path, program: Program) -> None:
    code = CodeObject(built.read_bytes())
    wave = code.kernels[0].descriptor.wave
    if wave == 64:
        with pytest.raises(VerifyError, match="gpu_lane, which is verified for 32 lanes only"):
            lowered(program, "on_lane", 64)
        program = compiled(WIDE + TEXT)
    made = injected(code, program, "on_lane")
    shape = ((80, 1, 1), (40, 1, 1))  # the second wave of 32 in each block has 8 lanes
    rest = block_arguments(made, "none", 0, shape, {"lanes": "l"})
    found = device.run(made.image, "none", rest, shape, {"l": np.zeros(81, np.uint64)})["l"]
    block = [32 << 32 | 5 << 24 | 103 << 16 | 8] * 32 + [8 << 32 | 103 << 16 | 2] * 8
    if wave == 64:
        block = [40 << 32 | 4 << 24 | 103 << 16 | 10] * 40
    assert found.tolist() == [*block, *block, 0]


# The lanes whose number is odd leave first, and then EXEC has only the others; the first half of the workgroups leaves early.
TWO_EXITS = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_and_b32 v1, 1, v0
    v_cmp_eq_u32 vcc, 0, v1
    s_and_saveexec_b64 s[6:7], vcc
    s_waitcnt lgkmcnt(0)
    s_cmp_lt_u32 s2, 2
    s_cbranch_scc1 early
    s_endpgm
early:
    v_mov_b32 v2, 7
    v_lshlrev_b32 v3, 2, v0
    global_store_dword v3, v2, s[4:5]
"""


@pytest.mark.parametrize("each", GPUS[:2])
def test_exits_are_sites_and_all_lanes_count(each: str, tmp_path: Path, program: Program) -> None:
    code = CodeObject(
        assemble(with_argument(kernel("two", TWO_EXITS, gpu=each)), tmp_path, each).read_bytes()
    )
    made = injected(code, program, "on_site")
    assert [site.number for site in made.kernels["two"].sites] == [0, 1]
    engine = Engine(tmp_path, gpu=each)
    shape = ((5 * 64, 1, 1), (64, 1, 1))
    rest = block_arguments(made, "two", 8, shape, {"sites": "s"})
    buffers = {"x": np.zeros(64, np.uint32), "s": np.zeros(8, np.uint64)}
    found = Device(engine, tmp_path).run(made.image, "two", ["x", *rest], shape, buffers)
    engine.close()
    assert found["s"].tolist() == [192, 128, 0, 0, 0, 0, 0, 0] and found["x"].tolist() == [7, 0] * 32


# All SGPRs that a wave starts with, and the work-item: with no pointer to the arguments, these come from the dispatch packet.
STARTS = """
    s_load_dwordx2 s[20:21], s[0:1], 0x28
    s_waitcnt lgkmcnt(0)
    s_load_dwordx2 s[20:21], s[20:21], 0x0
    s_waitcnt lgkmcnt(0)
{stores}
"""


@pytest.mark.parametrize(
    ("axes", "information"), [("x", 0), ("y", 0), ("z", 1), ("xz", 1), ("yz", 0), ("", 1), ("xyz", 1)]
)
def test_the_kernel_starts_as_if_nothing_had_been_added(
    tmp_path: Path, program: Program, axes: str, information: int
) -> None:
    """A wave of another workgroup has other indices: sums over all of them tell whether they are where they were."""
    count = 4 + len(axes) + information
    add = "\n".join(
        f"    v_mov_b32 v2, s{n}\n    v_mov_b32 v3, {4 * n}\n    v_mov_b32 v4, 0\n    global_atomic_add v3, v2, s[20:21]"
        for n in range(2, count)
    )
    text = with_argument(kernel("starts", STARTS.format(stores=add)))
    text = text.replace(
        ".amdhsa_user_sgpr_kernarg_segment_ptr 1",
        ".amdhsa_user_sgpr_dispatch_ptr 1\n    .amdhsa_user_sgpr_dispatch_id 1",
    ).replace(
        ".amdhsa_system_sgpr_workgroup_id_x 1",
        "\n".join(f".amdhsa_system_sgpr_workgroup_id_{a} {int(a in axes)}" for a in "xyz")
        + f"\n    .amdhsa_system_sgpr_workgroup_info {information}",
    )
    original = assemble(text, tmp_path).read_bytes()
    made = injected(CodeObject(original), program, "on_exit")
    assert not made.refusals
    shape = ((6, 4, 10), (3, 2, 2))
    engine = Engine(tmp_path)
    device = Device(engine, tmp_path)
    before = device.run(original, "starts", ["x"], shape, {"x": np.zeros(16, np.uint32)})
    rest = block_arguments(made, "starts", 8, shape, {"tallies": "t"})
    buffers = {"x": np.zeros(16, np.uint32), "t": np.zeros(241, np.uint64)}
    after = device.run(made.image, "starts", ["x", *rest], shape, buffers)
    engine.close()
    assert np.array_equal(before["x"], after["x"]) and (before["x"].any() or not axes)
    assert after["t"].tolist() == [1] * 240 + [0]


# All SGPRs that a kernel can have, and more VGPRs than the probe needs.
FULL = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    s_mov_b32 s{last}, 5
    v_mov_b32 v20, s{last}
    v_lshlrev_b32 v21, 2, v0
    s_waitcnt lgkmcnt(0)
    global_atomic_add v21, v20, s[4:5]
"""


@pytest.mark.parametrize("last", [60, 93, 94, 101])
def test_registers_that_a_kernel_leaves(tmp_path: Path, program: Program, last: int) -> None:
    """Where too few SGPRs are left, what probes need is in lanes of a VGPR."""
    text = with_argument(kernel("full", FULL.format(last=last))).replace(
        "next_free_sgpr 96", "next_free_sgpr 102"
    )
    original = assemble(text, tmp_path).read_bytes()
    made = injected(CodeObject(original), program, "on_place")
    shape = ((40, 6, 4), (20, 3, 2))
    engine = Engine(tmp_path)
    device = Device(engine, tmp_path)
    rest = block_arguments(made, "full", 8, shape, {"places": "p"})
    buffers = {"x": np.zeros(20, np.uint32), "p": np.zeros(15 * 961, np.uint64)}
    found = device.run(made.image, "full", ["x", *rest], shape, buffers)
    engine.close()
    assert found["x"].tolist() == [5 * 48] * 20
    places = found["p"].reshape(-1, 15)[:-1]
    assert places[:, 12].tolist() == list(range(960)) and places[:, 5].max() == 1


# The address of the end of the kernel.
ADDRESS = """
    s_getpc_b64 s[4:5]
    s_add_u32 s4, s4, 0x100
    s_addc_u32 s5, s5, 0x100
"""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    s_getpc_b64 s[4:5]\n    s_setpc_b64 s[4:5]", "it computes an address of its code"),
        ("    s_swappc_b64 s[30:31], s[4:5]", "it calls functions whose addresses it is given"),
        (
            "    s_load_dwordx2 s[4:5], s[0:1], 0\n    s_swappc_b64 s[30:31], s[4:5]",
            "it calls functions whose addresses it loads",
        ),
        (
            f"{ADDRESS}    s_mov_b32 s4, s6\n    s_swappc_b64 s[30:31], s[4:5]",
            "it calls functions whose addresses it loads",
        ),
        (
            f"{ADDRESS}    s_mov_b64 s[6:7], s[4:5]\n    s_swappc_b64 s[30:31], s[4:5]",
            "it keeps the address of a function",
        ),
        (
            f"{ADDRESS}    s_swappc_b64 s[30:31], s[4:5]",
            "it calls a function that cannot be read: it has no 0 bytes at address",
        ),
        ("    s_call_b64 s[30:31], 0", "it calls functions by s_call_b64"),
        ("    s_movrels_b32 s4, s5", "it computes the numbers of SGPRs (s_movrels_b32)"),
        ("    .long 0xd3ff0000", "unknown instruction at +0x0"),
        ("    s_getpc_b64 s[4:5]\n    s_nop 0\n    s_nop 0", "it computes an address of its code"),
        (
            "    s_getpc_b64 s[4:5]\n    s_add_u32 s4, s4, 8\n    s_addc_u32 s5, s5, 0",
            "it computes an address of its code",
        ),
    ],
)
def test_refusals(tmp_path: Path, program: Program, body: str, reason: str) -> None:
    code = CodeObject(assemble(kernel("odd", body), tmp_path).read_bytes())
    made = injected(code, program, "on_exit")
    assert made.refusals["odd"].startswith(reason) and not made.kernels and made.image == code.data


def test_a_kernel_that_uses_every_register_is_refused(tmp_path: Path, program: Program) -> None:
    text = kernel("full", "    v_mov_b32 v255, s101").replace("next_free_vgpr 64", "next_free_vgpr 256")
    code = CodeObject(
        assemble(text.replace("next_free_sgpr 96", "next_free_sgpr 102"), tmp_path).read_bytes()
    )
    assert injected(code, program, "on_exit").refusals == {"full": "it leaves no register free"}


# Adds a constant of the code object, in front of 100 KB of other code.
AWAY = """
    s_getpc_b64 s[6:7]
    s_add_u32 s6, s6, constant@rel32@lo+4
    s_addc_u32 s7, s7, constant@rel32@hi+12
    s_load_dword s8, s[6:7], 0x0
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    s_waitcnt lgkmcnt(0)
    v_mov_b32 v1, s8
    v_lshlrev_b32 v2, 2, v0
    global_atomic_add v2, v1, s[4:5]
    s_cbranch_execz {name}_end
    .fill 25000, 4, 0xbf800000
{name}_end:
"""


def test_kernels_are_copied_next_to_their_sites(tmp_path: Path, program: Program) -> None:
    names = ("a", "b", "c")
    text = "".join(with_argument(kernel(name, AWAY.format(name=name))) for name in names)
    text += ".rodata\n.p2align 2\nconstant:\n.long 11\n"
    original = assemble(text, tmp_path).read_bytes()
    made = injected(CodeObject(original), program, "on_exit")
    assert not made.refusals
    engine = Engine(tmp_path)
    device = Device(engine, tmp_path)
    shape = ((128, 1, 1), (64, 1, 1))
    for name in names:
        rest = block_arguments(made, name, 8, shape, {"tallies": "t"})
        buffers = {"x": np.zeros(64, np.uint32), "t": np.zeros(129, np.uint64)}
        found = device.run(made.image, name, ["x", *rest], shape, buffers)
        assert found["x"].tolist() == [22] * 64 and found["t"].tolist() == [1] * 128 + [0]
    engine.close()


def test_a_kernel_that_is_too_large_is_refused(tmp_path: Path, program: Program) -> None:
    text = kernel("far", "    .fill 40000, 4, 0xbf800000")  # s_nop
    made = injected(CodeObject(assemble(text, tmp_path).read_bytes()), program, "on_exit")
    assert made.refusals == {"far": "it is larger than a branch reaches"} and made.image


@pytest.mark.every(4)
def test_a_damaged_code_object_is_an_error(built: Path, program: Program) -> None:
    whole = built.read_bytes()
    generator = np.random.default_rng(5)
    for size in (*range(0, len(whole), 997), 64, 100):
        with pytest.raises(ImageError):
            injected(CodeObject(whole[:size]), program, "on_exit")
    for _ in range(60):
        damaged = bytearray(whole)
        for at in generator.integers(0, len(whole), 6):
            damaged[at] = generator.integers(0, 256)
        try:
            code = CodeObject(bytes(damaged))
            made = injected(code, program, "on_exit", only="looped")
        except ImageError:
            continue
        assert made.kernels or made.refusals or "looped" not in {kernel.name for kernel in code.kernels}


def test_assembly_and_disassembly(gpu: str) -> None:
    comgr = Comgr(f"amdgcn-amd-amdhsa--{gpu}")
    code = comgr.assemble("s_mov_b64 s[0:1], s[94:95]\ns_add_u32 s4, s4, 0x12345\ns_endpgm")
    found = [(one.address, one.size, one.name, one.operands) for one in comgr.disassemble(code, 0x100)]
    assert found == [
        (0x100, 4, "s_mov_b64", "s[0:1], s[94:95]"),
        (0x104, 8, "s_add_u32", "s4, s4, 0x12345"),
        (0x10C, 4, "s_endpgm", ""),
    ]
    with pytest.raises(ImageError, match="amd_comgr_do_action"):
        comgr.assemble("no_such_instruction s0")
    with pytest.raises(ImageError, match=r"unknown instruction at \+0x4"):
        list(comgr.disassemble(code[-4:] + b"\xff" * 4, 0))


FUNCTION = """
.text
asks:
    global_load_dword v1, v2, s[4:5] glc
    s_waitcnt vmcnt(0)
    s_cmp_eq_u32 s4, s4
    s_cbranch_scc1 back
    s_nop 0
back:
    s_setpc_b64 s[30:31]
"""
SWAPS = "    global_atomic_cmpswap v1, v[4:5], v[2:3], off glc\n"
CALLS = """
    s_getpc_b64 s[10:11]
    s_add_u32 s10, s10, asks@rel32@lo+4
    s_addc_u32 s11, s11, asks@rel32@hi+12
    s_swappc_b64 s[30:31], s[10:11]
"""


@pytest.mark.parametrize(
    ("body", "waits"),
    [
        ("{}    global_atomic_add v2, v3, s[4:5]\n    s_cbranch_vccnz {}", False),
        ("{}    global_atomic_add v1, v2, v3, s[4:5] glc\n    s_cbranch_vccnz {}", True),
        ("    global_atomic_add v1, v2, v3, s[4:5] glc\n{}    s_cbranch_vccnz {}", False),
        ("{}    global_load_dword v1, v2, s[4:5]\n    s_cbranch_vccnz {}", False),
        ("{}    global_load_dword v1, v2, s[4:5] glc\n    s_cbranch_vccnz {}", True),
        ("{}    ds_add_rtn_u32 v1, v2, v3\n    s_cbranch_vccnz {}", False),
        (f"{{}}{SWAPS}    v_mov_b32_e32 v3, v1\n    s_cbranch_vccnz {{}}", False),
        (f"{{}}{SWAPS}    v_mov_b32_e32 v2, v1\n    s_cbranch_vccnz {{}}", True),
        ("{}    s_sleep 1\n    s_cbranch_vccnz {}", True),
        (f"{{}}{CALLS}    s_cbranch_vccnz {{}}", True),
        (f"{CALLS}{{}}    s_cbranch_vccnz {{}}", False),
    ],
    ids=[
        "adds",
        "adds-and-sees",
        "sees-once",
        "loads",
        "polls",
        "within-a-block",
        "tries-again",
        "takes-a-lock",
        "sleeps",
        "calls",
        "calls-once",
    ],
)
def test_kernels_whose_blocks_may_wait_for_each_other(tmp_path: Path, body: str, waits: bool) -> None:
    text = kernel("k", body.format("again:\n", "again")) + FUNCTION
    code = CodeObject(assemble(text, tmp_path).read_bytes())
    assert read(code, Comgr(code.isa), code.kernels[0]).waits == waits


POLLS = "again:\n    s_sleep 1\n    s_cbranch_scc1 again"


@pytest.mark.parametrize(
    ("mode", "body", "threads"), [(0, "", 768), (1, "", 1536), (0, POLLS, 768), (1, POLLS, 1536)]
)
def test_threads_that_fit_on_a_workgroup_processor(
    tmp_path: Path, program: Program, mode: int, body: str, threads: int
) -> None:
    """With 72 VGPRs, a SIMD unit has 12 waves. Compute units have two SIMD units, and workgroup processors have four."""
    modes = f"    .amdhsa_wavefront_size32 1\n    .amdhsa_workgroup_processor_mode {mode}\n"
    text = with_argument(kernel("fits", body, gpu="gfx1030", vgprs=72)).replace(
        "    .amdhsa_next_free_vgpr", f"{modes}    .amdhsa_next_free_vgpr"
    )
    code = CodeObject(assemble(text, tmp_path, "gfx1030").read_bytes())
    made = injected(code, program, "on_exit").kernels["fits"]
    assert made.registers == (72, 72) and made.waits == bool(body)
    assert (made.most_threads, made.original_threads) == (threads, threads)
    assert made.compute_units == 1 + mode


@pytest.mark.parametrize("each", GPUS)
def test_nops_follow_the_added_code(each: str, tmp_path: Path, program: Program) -> None:
    """The instruction cache fetches ahead of the last instruction. LLVM leaves 1,024 bytes for that on gfx90a."""
    code = CodeObject(assemble(kernel("ends", "", gpu=each), tmp_path, each).read_bytes())
    image = injected(code, program, "on_exit").image
    nop = struct.pack("<I", NOP)
    assert image[-1024:] == nop * 256 and image[-1028:-1024] != nop

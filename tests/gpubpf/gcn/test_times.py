"""When lanes leave kernels, on hipsim's virtual clock: a nanosecond for each instruction of a wave."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import hipsim_engine
from gpubpf.ebpf import maps
from gpubpf.ebpf.bytecode import WIDE, Program
from gpubpf.ebpf.probe import Probe
from gpubpf.exits.cells import together, unpacked
from gpubpf.exits.lateness import CycleLength, ExitReport, Exits, LaneLateness
from gpubpf.gcn import kernel_writer
from gpubpf.gcn.code_object import CodeObject
from gpubpf.gcn.comgr import Comgr, GcnInstruction
from gpubpf.gcn.inject import GcnInjected, inject
from gpubpf.gcn.kernel_code import KernelCode, read, writes_exec
from gpubpf.gcn.leaving import leaving
from gpubpf.gcn.start import Save
from gpubpf.gcn.times import Times
from gpubpf.records.launch_shape import Shape
from gpubpf.tools import kernelretsnoop
from gpubpf_bcc import compiled
from gpubpf_gcn import RUNS, block_arguments, content, lowered, with_argument
from hipsim_engine import Engine, assemble, kernel

pytestmark = pytest.mark.skipif(
    shutil.which("hipcc") is None or hipsim_engine.missing() is not None,
    reason="needs hipcc and LLVM's tools for AMD GPUs, which script/setup installs where the distribution has them",
)

TEXT = r"""
#include <gpubpf.h>
struct left { u64 clock, time, site, work, again; };
GPU_THREAD_ARRAY(lefts, struct left, 1);
int on_exit(struct gpu_exit *ctx) {
    int key = 0;
    struct left *mine = lefts.lookup(&key);
    if (!mine) return 0;
    mine->clock = gpu_clock();
    mine->time = bpf_get_globaltimer();
    mine->site = ctx->site;
    mine->work = ctx->work;
    __sync_fetch_and_add(&mine->again, 1);
    return 0;
}
int on_entry(struct gpu_entry *ctx) { return 0; }
"""
FIELDS = ("clock", "time", "site", "work", "again")
# A tick of s_memrealtime is 3 ns, so that a wrong unit shows.
TICK = 3 << 10


@pytest.fixture(scope="module")
def program() -> Program:
    return compiled(TEXT)


class Clocked:
    """Runs instrumented kernels on the virtual clock."""

    def __init__(self, place: Path, gpu: str) -> None:
        self.place, self.images = place, 0
        self.engine = Engine(place, gpu=gpu)
        self.engine.send("set virtual 1")

    def run(
        self, image: bytes, name: str, arguments: list[str], shape: tuple, buffers: Mapping[str, np.ndarray]
    ) -> hipsim_engine.Outcome:
        self.images += 1
        code = self.place / f"image{self.images}.co"
        code.write_bytes(image)
        self.engine.load(code)
        for each, value in buffers.items():
            self.engine.put(each, value)
        outcome = self.engine.run(name, arguments, *shape)
        assert outcome.fault is None, outcome.fault
        return outcome

    def lefts(
        self, made: GcnInjected, name: str, arguments: list[str], given: int, shape: tuple, x: np.ndarray
    ):
        threads = int(np.prod(shape[0]))
        rest = block_arguments(made, name, given, shape, {"lefts": "l"})
        block = made.kernels[name].block
        words = rest[-block.size // 8 :]
        assert block.tick is not None
        words[block.tick // 8] = f"u64 {TICK}"
        buffers = {"x": x, "l": np.zeros((threads + 1) * len(FIELDS), np.uint64)}
        outcome = self.run(made.image, name, [*arguments, *rest[: -block.size // 8], *words], shape, buffers)
        left = self.engine.get("l", np.uint64).reshape(-1, len(FIELDS))[:-1].astype(np.int64)
        left[:, 2] = np.array([site.offset for site in made.kernels[name].sites])[left[:, 2]]
        return (
            outcome,
            {field: left[:, n] for n, field in enumerate(FIELDS)},
            self.engine.get("x", x.dtype.type),
        )


def timed(code: CodeObject, program: Program, only: str, kind: str | None = "instructions") -> GcnInjected:
    return inject(
        code,
        {
            each.name: [Probe(lowered(program, "on_exit", each.descriptor.wave), "exit", kind)]
            for each in code.kernels
            if each.name == only
        },
        virtual=True,
    )


@pytest.fixture
def clocked(gpu: str, tmp_path: Path):
    made = Clocked(tmp_path, gpu)
    yield made
    made.engine.close()


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "arguments", "given", "shape"), RUNS, ids=[run[0] for run in RUNS])
def test_what_is_kept_is_enough(
    clocked: Clocked, built: Path, program: Program, monkeypatch: pytest.MonkeyPatch, name: str, arguments: tuple,
    given: int, shape: tuple,
) -> None:  # fmt: skip
    """Times are the same if every instruction that changes EXEC keeps them. Nothing that is added takes time."""
    code = CodeObject(built.read_bytes())
    x = content(name)
    plain = clocked.run(code.data, name, list(arguments), shape, {"x": x})
    results = clocked.engine.get("x", x.dtype.type)
    outcome, few, after = clocked.lefts(timed(code, program, name), name, list(arguments), given, shape, x)
    assert outcome.end_ns == plain.end_ns and np.array_equal(results, after)
    assert few["again"].tolist() == [1] * len(few["again"])

    def every(body: KernelCode) -> list[int]:
        """All but those that end a stretch in which functions save registers of all lanes, also of those that have left."""
        writing = [one for one in body.instructions if writes_exec(one)]
        before = [None, *writing]
        return [
            one.address for one, last in zip(writing, before, strict=False) if not last or not whole(last)
        ]

    def whole(one: GcnInstruction) -> bool:
        return "_or_saveexec" in one.name and one.operands.endswith(", -1")

    monkeypatch.setattr(kernel_writer, "leaving", every)
    outcome, all_, after = clocked.lefts(timed(code, program, name), name, list(arguments), given, shape, x)
    assert outcome.end_ns == plain.end_ns and np.array_equal(results, after)
    for field in FIELDS:
        assert np.array_equal(few[field], all_[field]), field
    assert few["clock"].max() == plain.end_ns
    assert np.array_equal(few["time"], few["clock"] * 3)


# Lanes leave: 0 to 15 at the first, 16 to 31 in a loop of which lane n makes n - 15 turns, all others at the end.
STEPS = """
    v_cmp_lt_u32 vcc, 15, v0
    s_and_saveexec_b64 s[4:5], vcc
    s_cbranch_execz L_end
    v_mov_b32 v1, 15
    s_mov_b64 s[6:7], exec
    v_cmp_gt_u32 vcc, 32, v0
    s_and_saveexec_b64 s[8:9], vcc
    s_cbranch_execz L_skip
L_turn:
    v_add_u32 v1, 1, v1
    v_cmp_lt_u32 vcc, v1, v0
    s_and_b64 exec, exec, vcc
    s_cbranch_execnz L_turn
L_skip:
    s_andn2_b64 exec, s[6:7], s[8:9]
    s_or_b64 exec, exec, s[8:9]
    v_cmp_lt_u32 vcc, 31, v0
    s_mov_b64 exec, vcc
    s_nop 0
L_end:
"""


def test_times_of_lanes(tmp_path: Path, program: Program) -> None:
    """Known to the instruction, where lanes leave at once, in a loop, and at the end. The kernel begins at 0."""
    code = CodeObject(assemble(with_argument(kernel("steps", STEPS)), tmp_path).read_bytes())
    (found,) = code.kernels
    body = read(code, Comgr(code.isa), found)
    assert len(leaving(body)) == 4
    clocked = Clocked(tmp_path, "gfx906")
    shape = ((64, 1, 1), (64, 1, 1))
    plain = clocked.run(code.data, "steps", ["u64 0"], shape, {})
    _, left, _ = clocked.lefts(timed(code, program, "steps", None), "steps", ["u64 0"], 8, shape, np.zeros(1))
    clocked.engine.close()
    last = 8 + 4 * 16 + 3  # instructions before the last s_mov_b64 exec
    assert plain.end_ns == last + 3
    assert left["clock"].tolist() == [2] * 16 + [last + 1] * 16 + [last + 3] * 32
    at = {one.address - found.begin: (one.name, one.operands) for one in body.instructions}
    assert [at[offset] for offset in left["site"][[0, 16, 32]].tolist()] == [
        ("s_and_saveexec_b64", "s[4:5], vcc"),
        ("s_mov_b64", "exec, vcc"),
        ("s_endpgm", ""),
    ]


def test_sums_are_those_of_single_exits(clocked: Clocked, built: Path, program: Program) -> None:
    """What kernelretsnoop's program adds up on the GPU is what the times of single threads say. Lanes 40 and above are late, too."""
    code = CodeObject(built.read_bytes())
    shape = ((1280, 1, 1), (256, 1, 1))
    launch = Shape((5, 1, 1), shape[1], next(k for k in code.kernels if k.name == "scale").descriptor.wave)
    _, left, _ = clocked.lefts(
        timed(code, program, "scale"), "scale", ["x", "u32 1100"], 12, shape, content("scale")
    )
    singly = Exits(launch)
    records = np.zeros(
        launch.threads, [("clock", "<u8"), ("time", "<u8"), ("thread", "<u4"), ("sm", "<u2"), ("site", "<u2")]
    )
    records["thread"] = np.arange(launch.threads)
    records["clock"], records["site"] = (
        left["clock"] + 1000,
        [number_of(left["site"], site) for site in left["site"]],
    )
    records["time"] = records["clock"] * 3
    assert singly.take_records(records, CycleLength(3.0))

    made = compiled(WIDE + kernelretsnoop.PROGRAM)
    probe = Probe(lowered(made, "on_exit", launch.warp), "exit")
    found = inject(code, {"scale": [probe]}, virtual=True)
    short = {"firsts": "f", "rests": "r", "blocks": "b", "lateness": "t", "wholes": "w"}
    rest = block_arguments(found, "scale", 12, shape, short)
    block = found.kernels["scale"].block
    words = rest[-block.size // 8 :]
    words[0] = "u64 5"  # the launch's number
    warps = launch.blocks * launch.warps
    units = {"firsts": warps, "rests": warps, "blocks": launch.blocks, "lateness": 1, "wholes": 1}
    for name, at in block.capacities.items():
        words[at // 8] = f"u64 {units[name]}"
    assert block.tick is not None
    words[block.tick // 8] = f"u64 {TICK}"
    sizes = {name: maps.storage_size(made.maps[name], units[name]) for name in units}
    buffers = {"x": content("scale")}
    buffers |= {short[name]: np.zeros(size, np.uint8) for name, size in sizes.items()}
    clocked.run(found.image, "scale", ["x", "u32 1100", *rest[: -block.size // 8], *words], shape, buffers)
    firsts, rests, blocks, late, wholes = (
        maps.decode(made.maps[name], clocked.engine.get(short[name], np.uint8).tobytes(), units[name])
        for name in short
    )
    summed = Exits(launch)
    cells, blocks = unpacked(firsts, rests, blocks, launch)
    whole = together(wholes, blocks, launch)
    summed.take_maps(cells, blocks, CycleLength(3.0))
    reports = [
        ExitReport.of(singly, 1, CycleLength(3.0)),
        ExitReport.of(summed, 1, CycleLength(3.0), LaneLateness.of_maps(late, blocks, None, whole)),
    ]
    one, other = ([(lane.number, lane.exits, lane.late) for lane in report.lanes] for report in reports)
    assert one == other and len(one) == launch.warp
    assert reports[0].warp == reports[1].warp and reports[0].block == reports[1].block
    assert reports[0].complete == reports[1].complete == 1 and reports[0].warp.max > 0


def number_of(sites: np.ndarray, site: int) -> int:
    return int(np.searchsorted(np.unique(sites), site))


def test_groups_come_in_order(clocked: Clocked, built: Path, program: Program) -> None:
    """The probe runs once for all lanes that leave together, and for those that leave earlier first."""
    text = """
    #include <gpubpf.h>
    struct when { u64 number, clock; };
    GPU_THREAD_ARRAY(whens, struct when, 1);
    GPU_ARRAY(counter, u64, 1);
    int on_exit(struct gpu_exit *ctx) {
        int key = 0;
        struct when *mine = whens.lookup(&key);
        u64 *count = counter.lookup(&key), now = gpu_clock();
        if (!mine || !count) return 0;
        mine->number = __sync_fetch_and_add(count, 1);
        mine->clock = now;
        return 0;
    }
    """
    made = compiled(text)
    code = CodeObject(built.read_bytes())
    wave = next(each for each in code.kernels if each.name == "scale").descriptor.wave
    found = inject(code, {"scale": [Probe(lowered(made, "on_exit", wave), "exit")]}, virtual=True)
    shape = ((wave, 1, 1), (wave, 1, 1))
    rest = block_arguments(found, "scale", 12, shape, {"whens": "w", "counter": "c"})
    buffers = {"x": content("scale"), "w": np.zeros(2 * (wave + 1), np.uint64), "c": np.zeros(1, np.uint64)}
    clocked.run(found.image, "scale", ["x", "u32 20", *rest], shape, buffers)
    when = clocked.engine.get("w", np.uint64).reshape(-1, 2)[:-1]
    assert sorted(when[:, 0].tolist()) == list(range(wave))
    by_number = when[np.argsort(when[:, 0])]
    assert (np.diff(by_number[:, 1].astype(np.int64)) >= 0).all() and len(np.unique(when[:, 1])) == 2


def test_lanes_that_leave_together(clocked: Clocked, built: Path) -> None:
    """A program that asks for the lanes that run together gets those that leave together, without reading a clock."""
    text = """
    #include <gpubpf.h>
    GPU_THREAD_ARRAY(masks, u64, 1);
    int on_exit(struct gpu_exit *ctx) {
        int key = 0;
        gpu_mask lanes = gpu_active();
        u64 *mine = masks.lookup(&key);
        if (mine) *mine = lanes;
        return 0;
    }
    """
    code = CodeObject(built.read_bytes())
    wave = next(each for each in code.kernels if each.name == "scale").descriptor.wave
    probe = Probe(lowered(compiled(WIDE + text), "on_exit", wave), "exit")
    found = inject(code, {"scale": [probe]})
    shape = ((wave, 1, 1), (wave, 1, 1))
    rest = block_arguments(found, "scale", 12, shape, {"masks": "m"})
    buffers = {"x": content("scale"), "m": np.zeros(wave + 1, np.uint64)}
    clocked.run(found.image, "scale", ["x", "u32 20", *rest], shape, buffers)
    early = (1 << 20) - 1
    masks = [early] * 20 + [(1 << wave) - 1 - early] * (wave - 20)
    assert clocked.engine.get("m", np.uint64)[:-1].tolist() == masks


FULL = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    s_mov_b32 s{last}, 5
    v_mov_b32 v20, s{last}
    v_lshlrev_b32 v21, 2, v0
    v_cmp_lt_u32 vcc, 9, v0
    s_waitcnt lgkmcnt(0)
    s_mov_b32 s0, 11
    s_mov_b32 s1, 12
    s_mov_b32 s2, 13
    s_mov_b32 s3, 14
    s_and_saveexec_b64 s[6:7], vcc
    s_cbranch_execz L_end
    s_add_u32 s0, s0, s1
    s_add_u32 s2, s2, s3
    s_add_u32 s0, s0, s2
    v_add_u32 v20, s0, v20
    global_atomic_add v21, v20, s[4:5]
L_end:
"""


@pytest.mark.parametrize("last", [60, 90, 91, 92, 93, 94, 101])
def test_registers_that_a_kernel_leaves(tmp_path: Path, program: Program, last: int) -> None:
    """Where too few SGPRs are left, the time is read into registers of the kernel, which are put back."""
    text = with_argument(kernel("full", FULL.format(last=last))).replace(
        "next_free_sgpr 96", "next_free_sgpr 102"
    )
    code = CodeObject(assemble(text, tmp_path).read_bytes())
    shape = ((64, 1, 1), (64, 1, 1))
    clocked = Clocked(tmp_path, "gfx906")
    made = timed(code, program, "full")
    assert not made.refusals
    _, left, x = clocked.lefts(made, "full", ["x"], 8, shape, np.zeros(64, np.uint32))
    clocked.engine.close()
    assert x.tolist() == [0] * 10 + [55] * 54
    assert left["clock"].tolist() == [11] * 10 + [18] * 54
    assert left["work"].tolist() == [11] * 10 + [18] * 54


@pytest.mark.parametrize("sgpr", [None, 8])
def test_reading_the_time_waits_first_for_loads_into_its_registers(sgpr: int | None) -> None:
    """A kernel's scalar load may be in flight into s0 to s3. If it landed later, the old value would be put back over it."""
    vgprs = {"clock": 20, "globaltimer": 22}
    lines = Times(vgprs, 24, Save(0, 19), sgpr).keep()
    reads = next(n for n, line in enumerate(lines) if line.startswith(("s_mem", "v_writelane")))
    assert lines[:reads] == (["s_waitcnt lgkmcnt(0)"] if sgpr is None else [])

"""Kernels with probes inside them on hipsim's engine: the same results as without, and exact counts."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpubpf_gcn
import hipsim_engine
from gpubpf.ebpf.probe import Probe
from gpubpf.gcn import inner_sites, kernel_writer
from gpubpf.gcn.branches import branches
from gpubpf.gcn.code_object import CodeObject
from gpubpf.gcn.comgr import Comgr, GcnInstruction
from gpubpf.gcn.inject import inject
from gpubpf.gcn.kernel_code import read, writes_exec
from gpubpf.gcn.start import Save
from gpubpf.lower.amdgcn import OTHERS
from gpubpf.lower.launch_block import launch_block
from gpubpf_bcc import compiled
from gpubpf_gcn import RUNS, block_arguments, content, lowered, with_argument
from hipsim_engine import Engine, assemble, kernel

pytestmark = pytest.mark.skipif(
    shutil.which("hipcc") is None or hipsim_engine.missing() is not None,
    reason="needs hipcc and LLVM's tools for AMD GPUs, which script/setup installs where the distribution has them",
)
TEXT = """
#include <gpubpf.h>
struct tally { u32 one, other; };
GPU_THREAD_ARRAY(tallies, struct tally, 1);
int on_arrive(struct gpu_barrier_arrive *ctx) {
    int key = 0;
    struct tally *mine = tallies.lookup(&key);
    if (mine && mine->one == mine->other) mine->one += 1;
    return 0;
}
int on_leave(struct gpu_barrier_leave *ctx) {
    int key = 0;
    struct tally *mine = tallies.lookup(&key);
    if (mine && mine->one > mine->other && ctx->waited < 1ULL << 40) mine->other += 1;
    return 0;
}
int on_block(struct gpu_basic_block *ctx) {
    int key = 0;
    struct tally *mine = tallies.lookup(&key);
    if (mine && ctx->active >> gpu_lane() & 1) mine->one += 1;
    return 0;
}
int on_instruction(struct gpu_instruction *ctx) {
    int key = 0;
    struct tally *mine = tallies.lookup(&key);
    if (mine && ctx->active >> gpu_lane() & 1) mine->one += 1;
    return 0;
}
int on_branch(struct gpu_branch *ctx) {
    int key = 0;
    struct tally *mine = tallies.lookup(&key);
    if (mine && ctx->active >> gpu_lane() & 1) mine->one += 1, mine->other += ctx->taken >> gpu_lane() & 1;
    return 0;
}
int on_exit(struct gpu_exit *ctx) {
    int key = 0;
    struct tally *mine = tallies.lookup(&key);
    if (mine) mine->other = ctx->work;
    return 0;
}
"""
BARRIERS = (("on_arrive", "barrier_arrive"), ("on_leave", "barrier_leave"))
INSTRUCTIONS = (("on_instruction", "instruction"), ("on_exit", "exit", "instructions"))
BRANCHES = (("on_branch", "branch"),)
BLOCKS = (("on_block", "basic_block"), ("on_exit", "exit", "blocks"))


def tallies(
    gpu: str,
    built: Path,
    place: Path,
    name: str,
    placed: Sequence[tuple[str, ...]],
    run: tuple[Any, ...] | None = None,
) -> np.ndarray:
    """Return what each thread of a kernel has counted. Its results must be those that it has without probes. run: None for that of
    RUNS."""
    program = compiled("#define GPU_LANES 64\n" + TEXT)
    code = CodeObject(built.read_bytes())
    wave = next(kernel.descriptor.wave for kernel in code.kernels if kernel.name == name)
    probes = [Probe(lowered(program, function, wave), *where) for function, *where in placed]
    made = inject(code, {name: probes})
    assert not made.refusals
    _, arguments, given, shape = run or next(one for one in RUNS if one[0] == name)
    more = block_arguments(made, name, given, shape, {"tallies": "t"})
    threads = int(np.prod(shape[0]))
    engine = Engine(place, gpu=gpu)
    engine.send("set hostile 7")
    found = []
    for number, (image, rest) in enumerate(((code.data, []), (made.image, more))):
        path = place / f"image{number}.co"
        path.write_bytes(image)
        engine.load(path)
        engine.put("x", content(name))
        engine.put("t", np.zeros(2 * (threads + 1), np.uint32))
        assert engine.run(name, [*arguments, *rest], *shape).fault is None
        found.append(engine.get("x", content(name).dtype.type))
    counted = engine.get("t", np.uint32).reshape(-1, 2)
    engine.close()
    np.testing.assert_array_equal(*found)
    assert not counted[threads:].any()
    return counted[:threads]


@pytest.mark.every(6)
def test_each_thread_arrives_and_leaves(gpu: str, built: Path, room: None, tmp_path: Path) -> None:
    """The kernel has three barriers."""
    assert (tallies(gpu, built, tmp_path, "indexed", BARRIERS) == 3).all()


@pytest.mark.every(4)
@pytest.mark.parametrize("name", [name for name, *_ in RUNS if name not in ("none", "reversed")])
def test_threads_enter_as_many_blocks_as_are_counted(
    gpu: str, built: Path, room: None, tmp_path: Path, name: str
) -> None:
    entered, counted = tallies(gpu, built, tmp_path, name, BLOCKS).T
    np.testing.assert_array_equal(entered, counted)
    assert (counted > 0).all()


@pytest.mark.parametrize("name", ["scale", "looped"])
def test_probes_before_each_vector_instruction_change_no_result(
    gpu: str, built: Path, room: None, tmp_path: Path, name: str
) -> None:
    seen, executed = tallies(gpu, built, tmp_path, name, INSTRUCTIONS).T
    assert (seen > 0).all() and (seen < executed).all()


def _of_scale(threads: int) -> np.ndarray:
    """At most three conditions, and one at the end of each turn of the loop. The compiler jumps to the code for large numbers."""
    small, turns = content("scale")[:threads] <= 10, np.arange(threads) & 7
    inside = np.arange(threads) < 1000
    branches = np.where(inside, np.where(small, 3 + turns, 2), 1)
    return np.stack((branches, np.where(inside & small, np.where(turns, turns - 1, 1), 1)), axis=1)


def _of_unoptimized(threads: int) -> np.ndarray:
    """Around the first addition; and in each turn of the loop twice: into its body or around it, and back or out."""
    thread = np.arange(threads)
    return np.stack((1 + 2 * ((thread & 7) + 1), (thread >= 70) + 1 + (thread & 7)), axis=1)


# How often each thread comes to a branch, and takes it.
BRANCHED = {"scale": _of_scale, "unoptimized": _of_unoptimized}


@pytest.mark.parametrize("name", BRANCHED)
def test_threads_branch_as_the_kernel_says(
    gpu: str, built: Path, room: None, tmp_path: Path, name: str
) -> None:
    found = tallies(gpu, built, tmp_path, name, BRANCHES)
    np.testing.assert_array_equal(found, BRANCHED[name](len(found)))


@pytest.mark.parametrize(("turns", "branches", "taken"), [(0, 2, 2), (1, 3, 1), (5, 7, 4)])
def test_waves_take_branches_as_a_whole(
    gpu: str, built: Path, tmp_path: Path, turns: int, branches: int, taken: int
) -> None:
    """Three branches, on SCC and VCC: around the loop, back to its begin, and around the store."""
    run = ("uniform", ("x", f"u32 {turns}"), 12, ((640, 1, 1), (128, 1, 1)))
    assert (tallies(gpu, built, tmp_path, "uniform", BRANCHES, run) == (branches, taken)).all()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the kernels in waves of 64 lanes for gfx1030. HIP 5.2 refuses to compile that, by a macro of the compiler."""
    return gpubpf_gcn.build(tmp_path_factory.mktemp("wide"), "gfx1030", "-mwavefrontsize64", "-U__gfx1030__")


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["scale", "unoptimized", "indexed", "looped"])
def test_waves_of_64_lanes_on_gfx10(wide: Path, tmp_path: Path, name: str) -> None:
    kernel = next(one for one in CodeObject(wide.read_bytes()).kernels if one.name == name)
    assert kernel.descriptor.wave == 64
    entered, counted = tallies("gfx1030", wide, tmp_path, name, BLOCKS).T
    np.testing.assert_array_equal(entered, counted)
    seen, executed = tallies("gfx1030", wide, tmp_path, name, INSTRUCTIONS).T
    assert (seen > 0).all() and (seen < executed).all()
    if name == "indexed":
        assert (tallies("gfx1030", wide, tmp_path, name, BARRIERS) == 3).all()
    elif name in BRANCHED:
        found = tallies("gfx1030", wide, tmp_path, name, BRANCHES)
        np.testing.assert_array_equal(found, BRANCHED[name](len(found)))


# The mask is in the last two SGPRs that the kernel names. Nothing but lane masks names the second one.
MASKED = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_cmp_gt_u32_e64 s[16:17], 40, v0
    v_mov_b32_e32 v1, 7
    v_lshlrev_b32_e32 v0, 2, v0
    v_cndmask_b32_e64 v1, 1, v1, s[16:17]
    s_waitcnt lgkmcnt(0)
    global_store_dword v0, v1, s[4:5]
"""


def _masked(place: Path) -> Path:
    """Give the kernel in waves of 64 lanes for gfx1030."""
    text = with_argument(kernel("masked", MASKED, gpu="gfx1030"))
    text = text.replace(".amdhsa_next_free_vgpr", ".amdhsa_wavefront_size32 0\n    .amdhsa_next_free_vgpr")
    return assemble(text, place, "gfx1030", "-wavefrontsize32,+wavefrontsize64")


def test_a_mask_of_64_lanes_counts_as_two_registers_on_gfx10(tmp_path: Path) -> None:
    code = CodeObject(_masked(tmp_path).read_bytes())
    body = read(code, Comgr(code.isa), code.kernels[0])
    assert "s[16:17]" not in " ".join(one.operands for one in body.instructions)
    assert body.sgprs == 18


@pytest.mark.parametrize("sgprs", [102, 34])
@pytest.mark.parametrize("placed", [INSTRUCTIONS, INSTRUCTIONS[1:]], ids=["inside", "exit"])
def test_probes_keep_masks_of_64_lanes_on_gfx10(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placed: tuple[tuple[str, ...], ...], sgprs: int
) -> None:
    """Whether there are SGPRs that the kernel does not use, or none."""
    monkeypatch.setattr(inner_sites, "SGPRS", sgprs)
    monkeypatch.setattr(kernel_writer, "SGPRS", sgprs)
    run = ("masked", ("x",), 8, ((128, 1, 1), (128, 1, 1)))
    found = tallies("gfx1030", _masked(tmp_path), tmp_path, "masked", placed, run)
    assert found.tolist() == [[4 * (len(placed) - 1), 8]] * 128


@pytest.mark.parametrize(
    ("gpu", "load", "waits"),
    [
        ("gfx906", "s_load_dwordx2 vcc, s[0:1], 0x0", True),
        ("gfx906", "s_load_dword vcc_hi, s[0:1], 0x0", True),
        ("gfx906", "s_memtime vcc", True),
        ("gfx906", "s_load_dwordx2 s[6:7], s[0:1], 0x0", False),
        ("gfx906", "s_mov_b64 vcc, 0", False),
        ("gfx90a", "s_buffer_load_dwordx2 vcc, s[8:11], 0x0", True),
        ("gfx90a", "s_atomic_add_x2 vcc, s[0:1], 0x0 glc", True),
        ("gfx1030", "s_load_dword vcc_lo, s[0:1], 0x0", True),
        ("gfx1030", "s_load_dword s6, s[0:1], 0x0", False),
    ],
)
def test_a_probe_waits_for_loads_into_vcc_before_it_saves_vcc(
    tmp_path: Path, gpu: str, load: str, waits: bool
) -> None:
    """Otherwise, the probe would overwrite the loaded value with the one that it saved. Other kernels do not wait."""
    body = f"    {load}\n    v_mov_b32_e32 v1, 7\n    s_waitcnt lgkmcnt(0)"
    code = CodeObject(assemble(kernel("loads", body, gpu=gpu), tmp_path, gpu).read_bytes())
    (found,) = code.kernels
    comgr = Comgr(code.isa)
    program = lowered(compiled("#define GPU_LANES 64\n" + TEXT), "on_instruction", found.descriptor.wave)
    block = launch_block([program])
    probes = inner_sites.InnerProbes([Probe(program, "instruction")], block, gpu)
    sites = inner_sites.InnerSites(found, read(code, comgr, found), gpu, probes, first=0)
    registers, _ = sites.registers(Save(16, None), 16, 4)
    made = comgr.disassemble(sites.code(comgr, sites.probes[0], registers), 0)
    texts = [f"{one.name} {one.operands}" for one in made]
    saves = next(n for n, text in enumerate(texts) if re.fullmatch(r"s_mov_b64 s\S+, vcc", text))
    assert ("s_waitcnt lgkmcnt(0)" in texts[:saves]) == waits


def _block(*lines: str) -> list[GcnInstruction]:
    return [GcnInstruction(4 * n, 4, *line.split(" ", 1)) for n, line in enumerate(lines)]


@pytest.mark.parametrize(
    ("lines", "expected"),
    {
        ("s_and_saveexec_b64 s[0:1], s[2:3]", "s_cbranch_execz 5"): ("s_mov_b64 s[8:9], s[2:3]", OTHERS),
        ("s_and_saveexec_b64 s[0:1], vcc", "s_cbranch_execnz 5"): ("s_mov_b64 s[8:9], vcc", 0),
        ("s_and_saveexec_b64 s[0:1], vcc", "v_nop "): ("s_mov_b64 s[8:9], vcc", OTHERS),
        ("s_andn1_saveexec_b64 s[0:1], vcc", "s_cbranch_execz 5"): ("s_mov_b64 s[8:9], vcc", 0),
        ("s_andn2_b64 exec, exec, s[4:5]", "s_cbranch_execnz 9"): ("s_mov_b64 s[8:9], s[4:5]", OTHERS),
        ("s_and_b64 exec, exec, s[4:5]", "s_or_b64 exec, exec, s[0:1]", "s_cbranch_execnz 9"): (
            *("s_mov_b64 s[8:9], s[4:5]", OTHERS),
        ),
        ("v_cmpx_lt_u32_e32 v0, v1",): ("v_cmp_lt_u32_e64 s8, v0, v1", OTHERS),
        ("v_cmpx_eq_u16_sdwa v0, v1 src0_sel:BYTE_0 src1_sel:DWORD",): (
            *("v_cmp_eq_u16_sdwa s8, v0, v1 src0_sel:BYTE_0 src1_sel:DWORD", OTHERS),
        ),
        ("s_and_b64 s[0:1], exec, s[2:3]", "s_mov_b64 exec, s[0:1]", "s_cbranch_execz 5"): (
            *("s_mov_b64 s[8:9], s[0:1]", OTHERS),
        ),
        (
            "s_mov_b64 s[0:1], exec",
            "s_and_b64 s[2:3], s[2:3], s[0:1]",
            "s_xor_b64 s[0:1], s[2:3], s[0:1]",
            "s_mov_b64 exec, s[2:3]",
        ): (*("s_mov_b64 s[8:9], s[2:3]", OTHERS),),
        ("s_mov_b64 exec, s[0:1]", "s_cbranch_execz 5"): None,
        (
            "s_and_b64 s[0:1], exec, s[2:3]",
            "s_mov_b32 s1, 0",
            "s_mov_b64 exec, s[0:1]",
            "s_cbranch_execz 5",
        ): None,
        (
            "s_mov_b64 s[0:1], exec",
            "s_mov_b32 s0, 0",
            "s_and_b64 s[2:3], s[0:1], s[2:3]",
            "s_mov_b64 exec, s[2:3]",
            "s_cbranch_execz 5",
        ): None,
        (
            "s_and_b64 s[0:1], exec, s[2:3]",
            "s_or_b64 exec, exec, s[0:1]",
            "s_mov_b64 exec, s[0:1]",
            "s_cbranch_execz 5",
        ): None,
        ("v_cmpx_lt_u32_e32 vcc, v0, v1", "s_cbranch_execz 5"): None,
    }.items(),
)
def test_lanes_part_where_exec_loses_some(lines: tuple[str, ...], expected: tuple[str, int] | None) -> None:
    (found,) = branches(_block(*lines), 64)
    assert found[0] in [one for one in _block(*lines) if writes_exec(one)]
    assert (found[1] and (found[1].mask(8), found[1].facts)) == expected


def test_no_lanes_part_where_others_are_switched_on() -> None:
    lines = (
        *("s_or_saveexec_b64 s[0:1], s[0:1]", "s_xor_b64 exec, exec, s[0:1]", "s_cbranch_execz 5"),
        *("s_andn2_saveexec_b64 s[0:1], s[0:1]", "s_cbranch_execz 5", "s_or_b64 exec, exec, s[0:1]"),
        *("s_mov_b64 exec, -1", "s_cbranch_execz 5", "s_mov_b64 exec, s[0:1]", "s_branch 5"),
    )
    assert list(branches(_block(*lines), 64)) == []

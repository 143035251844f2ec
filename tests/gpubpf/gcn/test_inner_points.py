"""Kernels with probes at their barriers and basic blocks on hipsim's engine: the same results as without, and exact counts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import hipsim_engine
from gpubpf.gcn.code_object import CodeObject
from gpubpf.gcn.inject import GcnPlacement, inject
from gpubpf_bcc import compiled
from gpubpf_gcn import RUNS, block_arguments, content, lowered
from hipsim_engine import Engine

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
int on_exit(struct gpu_exit *ctx) {
    int key = 0;
    struct tally *mine = tallies.lookup(&key);
    if (mine) mine->other = ctx->work;
    return 0;
}
"""
BARRIERS = (("on_arrive", "barrier_arrive"), ("on_leave", "barrier_leave"))
INSTRUCTIONS = (("on_instruction", "instruction"), ("on_exit", "exit", "instructions"))
BLOCKS = (("on_block", "basic_block"), ("on_exit", "exit", "blocks"))


def tallies(gpu: str, built: Path, place: Path, name: str, placed: Sequence[tuple[str, ...]]) -> np.ndarray:
    """Return what each thread of a kernel of RUNS has counted. Its results must be those that it has without probes."""
    program = compiled("#define GPU_LANES 64\n" + TEXT)
    code = CodeObject(built.read_bytes())
    wave = next(kernel.descriptor.wave for kernel in code.kernels if kernel.name == name)
    placements = [GcnPlacement(lowered(program, function, wave), *where) for function, *where in placed]
    made = inject(code, {name: placements})
    assert not made.refusals
    _, arguments, given, shape = next(one for one in RUNS if one[0] == name)
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


def test_each_thread_arrives_and_leaves(gpu: str, built: Path, room: None, tmp_path: Path) -> None:
    """The kernel has three barriers."""
    assert (tallies(gpu, built, tmp_path, "indexed", BARRIERS) == 3).all()


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

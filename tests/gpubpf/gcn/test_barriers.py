"""Kernels with probes at their barriers on hipsim's engine: the same results as without, and exact counts."""

from __future__ import annotations

import shutil
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
struct tally { u32 arrived, left; };
GPU_THREAD_ARRAY(tallies, struct tally, 1);
int on_arrive(struct gpu_barrier_arrive *ctx) {
    int key = 0;
    struct tally *mine = tallies.lookup(&key);
    if (mine && mine->arrived == mine->left) mine->arrived += 1;
    return 0;
}
int on_leave(struct gpu_barrier_leave *ctx) {
    int key = 0;
    struct tally *mine = tallies.lookup(&key);
    if (mine && mine->arrived > mine->left && ctx->waited < 1ULL << 40) mine->left += 1;
    return 0;
}
"""
POINTS = (("on_arrive", "barrier_arrive"), ("on_leave", "barrier_leave"))
NAME, BARRIERS = "indexed", 3  # a kernel, and the barriers that each of its threads passes


def test_each_thread_arrives_and_leaves(gpu: str, built: Path, room: None, tmp_path: Path) -> None:
    program = compiled(TEXT)
    code = CodeObject(built.read_bytes())
    wave = next(kernel.descriptor.wave for kernel in code.kernels if kernel.name == NAME)
    made = inject(code, {NAME: [GcnPlacement(lowered(program, each, wave), point) for each, point in POINTS]})
    assert not made.refusals
    _, arguments, given, shape = next(one for one in RUNS if one[0] == NAME)
    threads = int(np.prod(shape[0]))
    engine = Engine(tmp_path, gpu=gpu)
    engine.send("set hostile 7")
    found = []
    for image, more in (
        (code.data, []),
        (made.image, block_arguments(made, NAME, given, shape, {"tallies": "t"})),
    ):
        path = tmp_path / f"image{len(found)}.co"
        path.write_bytes(image)
        engine.load(path)
        engine.put("x", content(NAME))
        engine.put("t", np.zeros(2 * (threads + 1), np.uint32))
        assert engine.run(NAME, [*arguments, *more], *shape).fault is None
        found.append(engine.get("x", content(NAME).dtype.type))
    tallies = engine.get("t", np.uint32).reshape(-1, 2)
    engine.close()
    np.testing.assert_array_equal(*found)
    assert (tallies[:threads] == BARRIERS).all() and not tallies[threads:].any()

"""Which forms of collectives, fences, cache hints and matrix accesses exist: ptxas and the embedded device agree on many."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine_device import Array, Device
from engine_forms import accepted, legal

MEMBERS = ["%x32_4", "0xffffffff"]
SPACES = ["", "global", "shared", "local", "const", "param", "shared::cta", "shared::cluster"]
SEMANTICS = ["", "sc", "acq_rel", "acquire", "release", "relaxed"]
SCOPES = ["", "cta", "cluster", "gpu", "sys", "gl"]


def named(*places: str | list[str]) -> Iterator[str]:
    """Yield all combinations of alternatives for each place of a name."""
    for chosen in itertools.product(*([place] if isinstance(place, str) else place for place in places)):
        yield ".".join(part for part in chosen if part)


def collectives() -> Iterator[str]:
    result = ["%x32_0", "%x32_0|%x0_1"]
    shuffles = named("shfl", ["", "sync"], ["up", "down", "bfly", "idx", "all"], "b32")
    for name, to in itertools.product(shuffles, result):
        yield f"{name} {to}, %x32_1, 3, %x32_3;"
        yield f"{name} {to}, %x32_1, %x32_2, 0x1f, 0xffffffff;"
    for name in named("vote", ["", "sync"], ["all", "any", "uni", "ballot"], ["pred", "b32"]):
        to = "%x0_0" if name.endswith("pred") else "%x32_0"
        yield f"{name} {to}, !%x0_1;"
        yield f"{name} {to}, %x0_1, %x32_4;"
    for name, to in itertools.product(named("match", ["any", "all"], ["", "sync"], ["b32", "b64"]), result):
        yield f"{name} {to}, 5, 0xffffffff;"
    operations, types = ["add", "min", "max", "and", "or", "xor"], ["u32", "s32", "b32", "f32", "u64", "b64"]
    for name in named("redux", ["", "sync"], operations, ["", "abs"], ["", "NaN"], types):
        width = name[-2:]
        yield f"{name} %x{width}_0, %x{width}_1, 0xffffffff;"
    for members in MEMBERS:
        yield f"elect.sync %x32_0|%x0_1, {members};"
        yield f"elect.sync _|%x0_1, {members};"
    yield "activemask.b32 %x32_0;"
    semantics = ["", "release", "acquire", "relaxed"]
    for name in named("barrier.cluster", ["arrive", "wait"], semantics, ["", "aligned"]):
        yield f"{name};"


def fences() -> Iterator[str]:
    """Yield candidates, without fences for which .sync_restrict has no meaning. ptxas takes some of these."""
    restricted = ["", "sync_restrict::shared::cta", "sync_restrict::shared::cluster"]
    for name in named(["membar", "fence"], ["", "mbarrier_init"], SEMANTICS, SCOPES):
        yield f"{name};"
    for name in named("fence", SEMANTICS, restricted[1:], SCOPES):
        yield f"{name};"
    spaces = ["", "global", "shared::cta", "shared::cluster", "generic"]
    for name in named(["membar", "fence"], "proxy", ["alias", "async", "tensormap"], spaces):
        yield f"{name};"
    for proxy, without in (("tensormap::generic", ""), ("async::generic", restricted)):
        for name in named("fence.proxy", proxy, SEMANTICS, without, SCOPES):
            yield f"{name};"
            yield f"{name} [%x64_9], 128;"


def cached() -> Iterator[str]:
    levels = ["", "L1", "L2", "L2::evict_last", "L2::evict_normal", "L2::evict_first", "tensormap"]
    for name in named(["prefetch", "prefetchu"], SPACES, levels):
        yield f"{name} [%x64_9];"
    for name in named(["applypriority", "discard"], SPACES, levels):
        yield f"{name} [%x64_9], 128;"


def matrices() -> Iterator[str]:
    types = ["b16", "b8", "b8x16.b6x16_p32", "b8x16.b4x16_p64", "b32"]
    shapes, spaces = ["m8n8", "m16n8", "m8n16", "m16n16"], ["", "shared", "shared::cta", "shared::cluster"]
    for shape, x, trans, space, t in itertools.product(shapes, (1, 2, 4), ["", "trans"], spaces, types):
        for count in (x, 2 * x):
            names = "{" + ", ".join(f"%x32_{n}" for n in range(count)) + "}"
            (rest,) = named("sync.aligned", shape, f"x{x}", trans, space, t)
            yield f"ldmatrix.{rest} {names}, [%x64_9];"
            yield f"stmatrix.{rest} [%x64_9], {names};"
    yield "ldmatrix.sync.aligned.m8n8.x1.shared.b16 %x32_0, [%x64_9];"
    yield "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%x64_9], %x32_0;"
    yield "ldmatrix.m8n8.x1.shared.b16 {%x32_0}, [%x64_9];"
    for name in named("movmatrix.sync.aligned", ["m8n8", "m16n8"], ["", "trans"], ["b16", "b8"]):
        yield f"{name} %x32_0, %x32_1;"


@pytest.mark.parametrize(
    ("version", "target"),
    [
        ("9.0", "sm_100a"), ("9.0", "sm_100"), ("8.6", "sm_90"), ("8.0", "sm_90"), ("7.8", "sm_90"), ("7.0", "sm_80"),
        ("6.5", "sm_75"), ("6.4", "sm_70"), ("6.3", "sm_70"), ("6.0", "sm_60"), ("9.0", "sm_60"),
    ],
)  # fmt: skip
@pytest.mark.every(2)
def test_the_forms(version: str, target: str, tmp_path: Path) -> None:
    head = f".version {version}\n.target {target}\n.address_size 64\n"
    forms = list(dict.fromkeys([*collectives(), *fences(), *cached(), *matrices()]))
    of_ptxas, of_device = set(legal(tmp_path, forms, head)), set(accepted(forms, head))
    assert sorted(of_device - of_ptxas) == []
    assert sorted(of_ptxas - of_device) == []


def test_votes_and_shuffles_without_sync() -> None:
    """Targets below sm_70 have them: of the lanes that are at the instruction."""
    text = """.version 6.0
    .target sm_60
    .address_size 64
    .visible .entry k(.param .u64 a) { .reg .b32 %r<9>; .reg .b64 %rd<3>; .reg .pred %p<9>;
    ld.param.u64 %rd1, [a]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 32; add.u64 %rd1, %rd1, %rd2;
    setp.ge.u32 %p1, %r1, 20; @%p1 ret;
    setp.gt.u32 %p2, %r1, 4; setp.lt.u32 %p3, %r1, 20;
    vote.ballot.b32 %r2, !%p2; vote.all.pred %p4, %p3; vote.any.pred %p5, %p1; vote.uni.pred %p6, %p2;
    selp.u32 %r3, 1, 0, %p4; selp.u32 %r4, 2, 0, %p5; or.b32 %r3, %r3, %r4; selp.u32 %r4, 4, 0, %p6; or.b32 %r3, %r3, %r4;
    mul.lo.u32 %r5, %r1, 7;
    shfl.up.b32 %r4|%p7, %r5, 3, 0; shfl.idx.b32 %r6, %r5, 11, 0x1f; shfl.bfly.b32 %r7, %r5, 1, 0x1f;
    selp.u32 %r8, 1000, 0, %p7; add.u32 %r8, %r8, %r4;
    st.global.v4.u32 [%rd1], {%r2, %r3, %r8, %r6}; st.global.u32 [%rd1+16], %r7; ret; }"""
    out = Array(np.zeros((32, 8), np.uint32))
    Device(text).launch("k", 1, 32, out)
    lanes = np.arange(20)
    assert (out.host[:20, 0] == 0x1F).all()
    assert (out.host[:20, 1] == 1).all()
    assert (out.host[:20, 2] == np.where(lanes < 3, 7 * lanes, 7 * (lanes - 3) + 1000)).all()
    assert (out.host[:20, 3] == 77).all()
    assert (out.host[:20, 4] == 7 * (lanes ^ 1)).all()
    assert (out.host[20:] == 0).all()

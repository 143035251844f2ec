"""Probes at memory accesses of AMD kernels: what each lane is said to access, and kernels that compute as without."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hipsim_engine
from gpubpf.ebpf.bytecode import KINDS, SPACES, Program
from gpubpf.ebpf.probe import Probe
from gpubpf.gcn.access import accesses, is_memory, scalar_loads
from gpubpf.gcn.code_object import CodeObject
from gpubpf.gcn.comgr import Comgr, GcnInstruction
from gpubpf.gcn.inject import GcnInjected, inject
from gpubpf_bcc import compiled
from gpubpf_gcn import RUNS, block_arguments, content, lowered, with_argument
from hipsim_engine import Engine, assemble, kernel

pytestmark = pytest.mark.skipif(
    shutil.which("hipcc") is None or hipsim_engine.missing() is not None,
    reason="needs hipcc and LLVM's tools for AMD GPUs, which script/setup installs where the distribution has them",
)
MOST = 400  # accesses of a thread that are kept
TEXT = rf"""
#include <gpubpf.h>
struct entry {{ u64 address, active; u32 site; u8 width, space, kind, effect; }};
GPU_THREAD_ARRAY(counts, u64, 1);
GPU_THREAD_ARRAY(entries, struct entry, {MOST});
int on_access(struct gpu_access *ctx) {{
    int key = 0;
    u64 *count = counts.lookup(&key);
    if (!count) return 0;
    key = *count;
    *count += 1;
    struct entry *e = entries.lookup(&key);
    if (!e) return 0;
    e->address = ctx->address;
    e->active = ctx->active;
    e->site = ctx->site;
    e->width = ctx->width;
    e->space = ctx->space;
    e->kind = ctx->kind;
    e->effect = ctx->effect;
    return 0;
}}
"""
ENTRY = np.dtype([("address", "u8"), ("active", "u8"), ("site", "u4"), ("width", "u1"), ("space", "u1"), ("kind", "u1"),
                  ("effect", "u1")])  # fmt: skip


@pytest.fixture(scope="module")
def program() -> Program:
    return compiled(TEXT)


class Device:
    """Runs kernels with probes at their accesses."""

    def __init__(self, place: Path, gpu: str, code: CodeObject, program: Program) -> None:
        self.place, self.code, self.program = place, code, program
        self.engine = Engine(place, gpu=gpu)
        self.images = 0

    def injected(self, name: str, kinds: tuple[str, ...] = (), spaces: tuple[str, ...] = ()) -> GcnInjected:
        wave = next(k.descriptor.wave for k in self.code.kernels if k.name == name)
        probe = Probe(lowered(self.program, "on_access", wave), "access", None, kinds, spaces)
        made = inject(self.code, {name: [probe]})
        assert not made.refusals
        return made

    def run(self, name: str, made: GcnInjected | None) -> tuple[np.ndarray, list[np.ndarray]]:
        """Give what a kernel of RUNS computes, and what each thread accesses, in order."""
        _, arguments, given, shape = next(one for one in RUNS if one[0] == name)
        threads = int(np.prod(shape[0]))
        buffers = {
            "x": content(name),
            "counts": np.zeros(threads + 1, np.uint64),
            "entries": np.zeros((threads * MOST + 1) * ENTRY.itemsize, np.uint8),
        }
        more = (
            block_arguments(made, name, given, shape, {n: n for n in ("counts", "entries")}) if made else []
        )
        self.images += 1
        path = self.place / f"image{self.images}.co"
        path.write_bytes(made.image if made else self.code.data)
        self.engine.load(path)
        for each, value in buffers.items():
            self.engine.put(each, value)
        outcome = self.engine.run(name, [*arguments, *more], *shape)
        assert outcome.fault is None, outcome.fault
        counts = self.engine.get("counts", np.uint64)[:threads]
        assert counts.max(initial=0) <= MOST
        found = self.engine.get("entries", np.uint8)[: threads * MOST * ENTRY.itemsize].view(ENTRY)
        found = found.reshape(MOST, threads)
        return self.engine.get("x", content(name).dtype.type), [
            found[: int(n), t] for t, n in enumerate(counts)
        ]


@pytest.fixture
def device(gpu: str, built: Path, program: Program, tmp_path: Path) -> Iterator[Device]:
    made = Device(tmp_path, gpu, CodeObject(built.read_bytes()), program)
    yield made
    made.engine.close()


@pytest.mark.every(4)
@pytest.mark.parametrize("name", [one[0] for one in RUNS if one[0] != "none"])
def test_kernels_compute_the_same(device: Device, room: None, name: str) -> None:
    plain, _ = device.run(name, None)
    probed, found = device.run(name, device.injected(name))
    np.testing.assert_array_equal(plain, probed)
    assert any(map(len, found))


def spelled(entries: np.ndarray) -> list[tuple[str, str, int, int]]:
    """Give accesses in words: kind, space, width, address."""
    return [(KINDS[e["kind"]], SPACES[e["space"]], int(e["width"]), int(e["address"])) for e in entries]


def test_addresses_in_global_and_shared_memory(device: Device, room: None) -> None:
    _, found = device.run("reversed", device.injected("reversed"))
    start = spelled(found[0])[0][3]
    for thread, entries in enumerate(found):
        lane, own = thread % 128, start + 4 * thread
        assert spelled(entries) == [
            ("load", "global", 4, own),
            ("store", "shared", 4, 4 * lane),
            ("load", "shared", 4, 4 * (127 - lane)),
            ("store", "global", 4, own),
        ]
        assert [int(e["effect"]) for e in entries] == [1, 2, 1, 2]


def test_only_lanes_that_access_are_seen(device: Device) -> None:
    made = device.injected("scale")
    _, found = device.run("scale", made)
    wave = made.kernels["scale"].wave
    x, start = content("scale"), spelled(found[0])[0][3]
    for thread, entries in enumerate(found):
        if thread >= 1000:
            assert not len(entries)
            continue
        assert [one[0] for one in spelled(entries)] == ["load", "store"]
        assert {one[3] for one in spelled(entries)} == {start + 4 * thread}
        first = thread // wave * wave
        asked = [t for t in range(first, first + wave) if t < 1000]
        large = [t for t in asked if (x[t] > 10) == (x[thread] > 10)]
        masks = [sum(1 << t - first for t in lanes) for lanes in (asked, large)]
        # The compiler may join both stores.
        assert int(entries[0]["active"]) == masks[0] and int(entries[1]["active"]) in masks


def test_offsets_in_local_memory(device: Device, room: None) -> None:
    _, found = device.run("stack", device.injected("stack"))
    x = content("stack")
    for thread, entries in enumerate(found):
        local = [one for one in spelled(entries) if one[1] == "local"]
        stored = [address for kind, _, _, address in local if kind == "store"]
        loaded = [address for kind, _, _, address in local if kind == "load"]
        assert len(stored) == 64 and {b - a for a, b in itertools.pairwise(stored)} == {4}
        assert loaded == [stored[(int(x[thread]) + 5) & 63]]
        assert {one[2] for one in local} == {4} and stored[0] < 4096


def test_kinds_and_spaces_are_chosen(device: Device) -> None:
    _, found = device.run("reversed", device.injected("reversed", ("store",), ("shared", "local")))
    assert Counter(one[:2] for each in found for one in spelled(each)) == {("store", "shared"): len(found)}
    made = device.injected("reversed", (), ("shared",))
    places = [(s.opcode, s.access.space) for s in made.kernels["reversed"].sites if s.access]
    assert len(places) == 2 and {space for _, space in places} == {"shared"}


def test_kernels_may_ask_for_different_kinds(device: Device) -> None:
    """With the same program."""
    wave = next(k.descriptor.wave for k in device.code.kernels if k.name == "scale")
    one = lowered(device.program, "on_access", wave)
    asked = {
        name: [Probe(one, "access", None, (kind,))]
        for name, kind in (("reversed", "load"), ("cube", "store"))
    }
    made = inject(device.code, asked)
    for name, (probe,) in asked.items():
        assert {s.access.kind for s in made.kernels[name].sites if s.access} == {*probe.kinds}


def test_every_access_of_the_kernels_is_understood(gpu: str, built: Path) -> None:
    code = CodeObject(built.read_bytes())
    comgr = Comgr(code.isa)
    for each in code.kernels:
        offset = code.offset(each.begin, each.end - each.begin)
        for one in comgr.disassemble(code.data[offset : offset + each.end - each.begin], each.begin):
            assert not is_memory(one) or accesses(one, scratch=True), one


@pytest.mark.parametrize(
    ("lines", "branches", "expected"),
    [
        # An argument, what it points to, and arguments after the register was overwritten.
        (("s_load_dwordx2 s[0:1], s[4:5], 0x0", "s_load_dword s2, s[0:1], 0x0"), {}, {1}),
        (("s_load_dwordx4 s[4:7], s[4:5], 0x0", "s_load_dword s2, s[6:7], 0x0"), {}, {1}),
        (("s_mov_b32 s5, s7", "s_load_dword s2, s[4:5], 0x0"), {}, {1}),
        (("s_load_dword s2, s[4:5], 0x0", "s_mov_b64 s[4:5], exec", "s_cbranch_scc1 0"), {}, set()),
        (("s_load_dword s2, s[4:5], 0x0", "s_mov_b64 s[4:5], exec", "s_cbranch_scc1 0"), {2: 0}, {0}),
        (("s_buffer_load_dword s2, s[8:11], 0x0", "s_waitcnt lgkmcnt(0)"), {}, {0}),
    ],
)
def test_scalar_loads_of_other_memory_than_arguments(
    lines: tuple[str, ...], branches: dict[int, int], expected: set[int]
) -> None:
    instructions = [
        GcnInstruction(number, 1, name, operands)
        for number, (name, _, operands) in enumerate(line.partition(" ") for line in lines)
    ]
    assert scalar_loads(instructions, branches, {4}) == expected


@pytest.mark.parametrize(
    ("kinds", "expected"), [((), {"s_load_dword": 1}), (("load",), {"s_load_dword": 1}), (("store",), {})]
)
def test_scalar_loads_are_named_as_unprobed(
    gpu: str, tmp_path: Path, program: Program, kinds: tuple[str, ...], expected: dict[str, int]
) -> None:
    body = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    s_waitcnt lgkmcnt(0)
    s_load_dword s6, s[4:5], 0x4
    v_mov_b32_e32 v1, 0
    s_waitcnt lgkmcnt(0)
    v_mov_b32_e32 v2, s6
    global_store_dword v1, v2, s[4:5]
"""
    code = CodeObject(
        assemble(with_argument(kernel("scalar", body, gpu=gpu)), tmp_path, gpu=gpu).read_bytes()
    )
    probe = Probe(lowered(program, "on_access", code.kernels[0].descriptor.wave), "access", None, kinds)
    assert inject(code, {"scalar": [probe]}).kernels["scalar"].unprobed == expected


@pytest.mark.every(2)
def test_a_large_kernel_has_its_sites_behind_it(gpu: str, tmp_path: Path, program: Program) -> None:
    """A branch over 100,000 bytes, half of them accesses, would not reach over what is put before these."""
    wave32 = "    .amdhsa_wavefront_size32 1\n" if gpu == "gfx1030" else ""
    add = "v_add_nc_u32_e32" if gpu == "gfx1030" else "v_add_u32_e32"
    body = f"""
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_lshlrev_b32_e32 v2, 2, v0
    v_mov_b32_e32 v3, 0
    s_mov_b32 s6, 2
    s_waitcnt lgkmcnt(0)
again:
    .fill 15000, 4, 0xbf800000
    .rept 2500
    global_load_dword v1, v2, s[4:5]
    s_waitcnt vmcnt(0)
    {add} v3, v3, v1
    .endr
    s_sub_u32 s6, s6, 1
    s_cmp_lg_u32 s6, 0
    s_cbranch_scc1 again
    global_store_dword v2, v3, s[4:5]
"""
    text = with_argument(kernel("large", body, gpu=gpu)).replace(
        ".amdhsa_next_free_vgpr", f"{wave32}    .amdhsa_next_free_vgpr"
    )
    code = CodeObject(assemble(text, tmp_path, gpu=gpu).read_bytes())
    wave = code.kernels[0].descriptor.wave
    made = inject(code, {"large": [Probe(lowered(program, "on_access", wave), "access")]})
    assert not made.refusals
    (tmp_path / "made.co").write_bytes(made.image)
    engine = Engine(tmp_path, gpu=gpu)
    engine.load(tmp_path / "made.co")
    shape = ((wave, 1, 1), (wave, 1, 1))
    engine.put("x", np.arange(wave, dtype=np.uint32))
    engine.put("counts", np.zeros(wave + 1, np.uint64))
    engine.put("entries", np.zeros((wave * MOST + 1) * ENTRY.itemsize, np.uint8))
    maps = {name: name for name in ("counts", "entries")}
    outcome = engine.run("large", ["x", *block_arguments(made, "large", 8, shape, maps)], *shape)
    assert outcome.fault is None, outcome.fault
    assert engine.get("counts", np.uint64)[:wave].tolist() == [5001] * wave
    assert engine.get("x", np.uint32).tolist() == [5000 * n for n in range(wave)]
    engine.close()

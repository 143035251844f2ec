"""What probes in kernels of AMD GPUs count as work: an instruction counts for the lanes that EXEC has when it is issued."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hipsim_engine
from gpubpf.ebpf.bytecode import WORK, Program
from gpubpf.ebpf.probe import Probe
from gpubpf.errors import Refusal
from gpubpf.gcn.code_object import CodeObject
from gpubpf.gcn.comgr import Comgr
from gpubpf.gcn.inject import inject
from gpubpf.gcn.kernel_code import read
from gpubpf.gcn.work import adder
from gpubpf.lower import amdgcn
from gpubpf.verify.rules import check
from gpubpf_bcc import compiled
from hipsim_engine import GPUS, Engine, assemble, kernel

pytestmark = pytest.mark.skipif(
    hipsim_engine.missing() is not None, reason="needs LLVM's tools for AMD GPUs, which script/setup installs"
)
TEXT = r"""
#include <gpubpf.h>
struct tally { u64 runs, work; };
GPU_THREAD_ARRAY(tallies, struct tally, 1);
GPU_THREAD_ARRAY(others, struct tally, 1);
int on_exit(struct gpu_exit *ctx) {
    int key = 0;
    struct tally *mine = tallies.lookup(&key);
    if (mine) { mine->runs += 1; mine->work += ctx->work; }
    return 0;
}
int on_exit_too(struct gpu_exit *ctx) {
    int key = 0;
    struct tally *mine = others.lookup(&key);
    if (mine) { mine->runs += 1; mine->work += ctx->work; }
    return 0;
}
"""
THREADS = 192


def text(gpu: str) -> str:
    """Give a kernel: a loop with as many turns as the thread's number modulo 32, and a part for half of the threads."""
    add, exec_, pair, vcc, mov, save = (
        ("v_add_nc_u32_e32", "exec_lo", ("s6", "s8"), "vcc_lo", "s_mov_b32", "s_and_saveexec_b32")
        if gpu == "gfx1030"
        else ("v_add_u32_e32", "exec", ("s[6:7]", "s[8:9]"), "vcc", "s_mov_b64", "s_and_saveexec_b64")
    )
    long = "\n".join(["    v_xor_b32_e32 v5, v3, v5"] * 70)
    return f"""
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    s_waitcnt lgkmcnt(0)
    v_and_b32_e32 v1, 31, v0
    v_lshlrev_b32_e32 v2, 2, v0
    v_mov_b32_e32 v3, 0
    v_mov_b32_e32 v5, 1
    {mov} {pair[0]}, {exec_}
again:
    v_cmp_lt_u32_e32 {vcc}, v3, v1
    {save} {pair[1]}, {vcc}
    s_cbranch_execz over
    {add} v3, 1, v3
    global_load_dword v4, v2, s[4:5]
    s_branch again
over:
    {mov} {exec_}, {pair[0]}
    s_barrier
{long}
    v_cmp_gt_u32_e32 {vcc}, 16, v1
    {save} {pair[1]}, {vcc}
    global_store_dword v2, v5, s[4:5]
    global_atomic_add v2, v3, s[4:5]
    ds_add_u32 v2, v3
    ds_write_b32 v2, v3
"""


def calling(gpu: str) -> str:
    """Give a kernel whose threads call a function, and half of them once more."""
    add, vcc, save = (
        ("v_add_nc_u32_e32", "vcc_lo", "s_and_saveexec_b32 s8")
        if gpu == "gfx1030"
        else ("v_add_u32_e32", "vcc", "s_and_saveexec_b64 s[8:9]")
    )
    more = ".amdhsa_kernarg_size 8\n" + (".amdhsa_wavefront_size32 1\n" if gpu == "gfx1030" else "")
    body = f"""
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    s_waitcnt lgkmcnt(0)
    v_and_b32_e32 v1, 31, v0
    v_lshlrev_b32_e32 v2, 2, v0
    v_mov_b32_e32 v3, 0
    s_getpc_b64 s[10:11]
    s_add_u32 s10, s10, leaf@rel32@lo+4
    s_addc_u32 s11, s11, leaf@rel32@hi+12
    s_swappc_b64 s[30:31], s[10:11]
    v_cmp_gt_u32_e32 {vcc}, 16, v1
    {save}, {vcc}
    s_cbranch_execz over
    s_swappc_b64 s[30:31], s[10:11]
over:"""
    function = f"""
.text
leaf:
    {add} v3, 1, v3
    global_load_dword v4, v2, s[4:5]
    ds_write_b32 v2, v3
    ds_add_u32 v2, v3
    s_waitcnt vmcnt(0) lgkmcnt(0)
    s_cmp_eq_u32 s4, s4
    s_cbranch_scc1 back
    s_nop 0
back:
    s_setpc_b64 s[30:31]
"""
    made = kernel("turns", body, lds=1024, gpu=gpu)
    return made.replace(".amdhsa_kernel turns\n", f".amdhsa_kernel turns\n{more}") + function


def expected(kind: str) -> np.ndarray:
    turns = np.arange(THREADS) % 32
    low = turns < 16
    return {
        # 7 before the loop; 2 at each look at its condition, 4 in each turn; barrier, 70 and 2 behind it; 4 and the end.
        "instructions": 7 + 2 * (turns + 1) + 4 * turns + 1 + 70 + 2 + 5 * low,
        "loads": turns,
        "stores": 2 * low,
        "atomics": 2 * low,
        "barriers": np.ones(THREADS, int),
        "blocks": 1 + (turns + 1) + turns + 1,
    }[kind].astype(np.uint64)


@pytest.fixture(scope="module", params=GPUS)
def gpu(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def program() -> Program:
    return compiled(TEXT)


@pytest.fixture(scope="module")
def code(gpu: str, tmp_path_factory: pytest.TempPathFactory) -> CodeObject:
    place = tmp_path_factory.mktemp("work")
    made = kernel("turns", text(gpu), lds=1024, gpu=gpu)
    more = ".amdhsa_kernarg_size 8\n" + (".amdhsa_wavefront_size32 1\n" if gpu == "gfx1030" else "")
    made = made.replace(".amdhsa_kernel turns\n", f".amdhsa_kernel turns\n{more}")
    return CodeObject(assemble(made, place, gpu).read_bytes())


@pytest.fixture
def engine(gpu: str, tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path, gpu=gpu)
    made.send("set hostile 3")
    yield made
    made.close()


def counted(engine: Engine, code: CodeObject, program: Program, kinds: dict[str, str]) -> list[np.ndarray]:
    """Run the kernel with programs that each count a kind of work; give the work of each."""
    wave = code.kernels[0].descriptor.wave
    probes = []
    for name, kind in kinds.items():
        function = program.functions[name]
        probes.append(Probe(amdgcn.lower(program, check(program, function), wave), "exit", kind))
    made = inject(code, {"turns": probes})
    assert not made.refusals
    (engine.place / "probed.co").write_bytes(made.image)
    engine.load(engine.place / "probed.co")
    engine.put("x", np.zeros(THREADS, np.uint32))
    for name in ("tallies", "others"):
        engine.put(name, np.zeros(2 * (THREADS + 1), np.uint64))
    found = made.kernels["turns"]
    words = ["u64 0"] * (found.block.size // 8)
    for name, at in found.block.bases.items():
        words[at // 8] = name
        words[found.block.capacities[name] // 8] = f"u64 {THREADS}"
    assert found.block.shape is not None
    shape = [THREADS, 1, 1, 1, 1, 1]
    for n in range(3):
        words[found.block.shape // 8 + n] = f"u64 {shape[2 * n] | shape[2 * n + 1] << 32}"
    arguments = ["x", *["u64 0"] * (found.block_offset // 8 - 1), *words]
    outcome = engine.run("turns", arguments, (THREADS, 1, 1), (THREADS, 1, 1))
    assert outcome.fault is None
    results = []
    for name in ("tallies", "others")[: len(kinds)]:
        tallies = engine.get(name, np.uint64)[: 2 * THREADS].reshape(-1, 2)
        assert tallies[:, 0].tolist() == [1] * THREADS
        results.append(tallies[:, 1])
    return results


@pytest.mark.parametrize("kind", WORK)
def test_work_is_exact(engine: Engine, code: CodeObject, program: Program, kind: str) -> None:
    (found,) = counted(engine, code, program, {"on_exit": kind})
    assert found.tolist() == expected(kind).tolist()


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", WORK)
def test_work_of_functions_is_exact(
    engine: Engine, gpu: str, tmp_path: Path, program: Program, kind: str
) -> None:
    code = CodeObject(assemble(calling(gpu), tmp_path, gpu).read_bytes())
    (found,) = counted(engine, code, program, {"on_exit": kind})
    low = np.arange(THREADS) % 32 < 16
    per_call = {"instructions": 8, "loads": 1, "stores": 1, "atomics": 1, "barriers": 0, "blocks": 2}[kind]
    # 9 for the first call, 2 before the branch; and for half of the threads the branch, a call, and the end.
    kernel_ = {"instructions": 9 + 2 + 3 * low, "blocks": 1 + 2 * low}.get(kind, 0)
    calls = 1 + low
    assert found.tolist() == (kernel_ + calls * per_call).tolist()


def test_two_kinds_at_once(engine: Engine, code: CodeObject, program: Program) -> None:
    found = counted(engine, code, program, {"on_exit": "loads", "on_exit_too": "instructions"})
    assert found[0].tolist() == expected("loads").tolist()
    assert found[1].tolist() == expected("instructions").tolist()


@pytest.mark.parametrize("number", [1, 2, 63, 64, 65, 1000, 100_003])
def test_a_number_is_added_by_one_instruction(gpu: str, number: int) -> None:
    comgr = Comgr(f"amdgcn-amd-amdhsa--{gpu}")
    (made,) = comgr.disassemble(adder(comgr, gpu, 200)(number), 0)
    name = "v_add_nc_u32_e32" if gpu == "gfx1030" else "v_add_u32_e32"
    assert (made.name, made.operands) == (
        name,
        f"v200, {number if number <= 64 else hex(number)}, v200",
    )


def test_a_copy_at_another_place_is_the_same_code(code: CodeObject) -> None:
    comgr = Comgr(code.isa)
    (kernel_,) = code.kernels
    original = read(code, comgr, kernel_)
    copy = original.moved(kernel_.begin + 4096, {})
    assert bytes(copy.content) == b"".join(original.code.values())  # branches count from where they are
    assert copy.places == {one.address: one.address + 4096 for one in original.instructions}


def test_a_branch_that_would_not_reach_is_refused(code: CodeObject) -> None:
    (kernel_,) = code.kernels
    original = read(code, Comgr(code.isa), kernel_)
    inside = next(at for at, to in original.branches.items() if to < at)
    with pytest.raises(Refusal, match="too far"):
        original.moved(0, {inside: bytes(1 << 17)})

"""What the probes of kernelretsnoop and memtrace cost on the paths that most warps take, as benchmarks/probe_costs.py counts it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import access_paths
import probe_costs
from gpubpf.ebpf.sampling import Unit
from gpubpf.inject.inject import inject
from gpubpf.lower.programs import load
from gpubpf.program import BPF
from gpubpf.ptx.parser import parse
from gpubpf.tools import kernelretsnoop, launchlate
from gpubpf_sass import assembled, nvdisasm, registers

MOST = (60, 71)  # instructions that a warp executes if all of its lanes exit together; a block's first warp
# Instructions for a further store of contiguous lanes: without, and with touched bytes.
MOST_OF_STORES = {"sm_75": (26, 53), "sm_80": (21, 49), "sm_90": (16, 44)}


@pytest.mark.every(3)
@pytest.mark.parametrize("arch", probe_costs.TARGETS)
def test_a_warp_that_exits_whole_costs_little(arch: str, tmp_path: Path) -> None:
    nvdisasm()
    b = BPF(text=kernelretsnoop.PROGRAM)
    b.attach_gpu_exit(fn_name="on_exit")
    plain = probe_costs.kernel(arch)
    made = inject(parse(plain), b.attached.probes_of(["k"]))
    before, _ = assembled(plain, arch, tmp_path)
    alone = len(access_paths.executed(before.read_bytes(), "k", probe_costs.OWN, probe_costs.OPERATIONS))
    after, said = assembled(made.text, arch, tmp_path)
    *together, late = probe_costs.EXITS.values()
    for path, most in zip(together, MOST, strict=True):
        way = access_paths.executed(
            after.read_bytes(), "k", (*probe_costs.OWN, *path), probe_costs.OPERATIONS
        )
        # Nothing waits for an answer from memory: additions and maxima whose old values nobody reads.
        assert len(way) - alone <= most and not any("ATOM" in line for line in way)
    assert access_paths.executed(after.read_bytes(), "k", (*probe_costs.OWN, *late), probe_costs.OPERATIONS)
    assert registers(said)["k"] <= 25


@pytest.mark.every(3)
@pytest.mark.parametrize("arch", probe_costs.TARGETS)
def test_an_exit_takes_few_registers_from_a_kernel_with_many_values(arch: str, tmp_path: Path) -> None:
    """Only there do more registers mean fewer warps."""
    for found in probe_costs.probes():
        if found.label in ("threadhist --work instructions", "kernelretsnoop", "launchlate"):
            before, after, spilled = probe_costs.crowded_registers(tmp_path, arch, found, 36)
            assert before >= 36 and after - before <= 8 and not spilled


@pytest.mark.every(3)
@pytest.mark.parametrize("arch", probe_costs.TARGETS)
@pytest.mark.parametrize("values", probe_costs.VALUES)
def test_accesses_take_few_registers_from_a_kernel_with_many_values(
    arch: str, values: int, tmp_path: Path
) -> None:
    for found in probe_costs.probes():
        if found.repeated:
            before, after, spilled = probe_costs.crowded_registers(tmp_path, arch, found, values)
            least, more = (32, 12) if "--no-allocations" in found.label else (40, 19)
            assert after <= max(least, before + more) and spilled <= 64


@pytest.mark.every(6)
@pytest.mark.parametrize("arch", probe_costs.TARGETS)
def test_a_request_of_contiguous_lanes_costs_little(arch: str, tmp_path: Path) -> None:
    nvdisasm()
    without, touched = (found for found in probe_costs.probes() if found.repeated)
    for found, most in zip((without, touched), MOST_OF_STORES[arch], strict=True):
        executed = []
        for stores in (1, probe_costs.STORES):
            paths = [found.repeated * stores]
            (*_, (own,)), (*_, (more,)) = probe_costs.costs(tmp_path, arch, found, stores, paths)
            executed.append(more - own)
        assert round((executed[1] - executed[0]) / (probe_costs.STORES - 1)) <= most
        assert executed[0] <= most + 12  # with what is done once, where the kernel begins


@pytest.mark.every(6)
@pytest.mark.parametrize("arch", probe_costs.TARGETS)
@pytest.mark.parametrize("unit", ["block", "warp"])
def test_blocks_that_are_not_chosen_cost_the_same_for_any_number_of_accesses(
    arch: str, unit: Unit, tmp_path: Path
) -> None:
    nvdisasm()
    probes = probe_costs.sampled(unit)
    store = "    st.volatile.global.u32 [%rd3], %r1;\n"
    costs = []
    for stores in (2, 5):
        more = "".join(store.replace("]", f"+{4096 * n}]") for n in range(stores))
        plain = probe_costs.kernel(arch).replace(store, more)
        made = inject(parse(plain), probes.bpf.attached.probes_of(["k"]))
        path = probe_costs.OWN * stores
        lengths = [
            len(
                access_paths.executed(
                    assembled(text, arch, tmp_path)[0].read_bytes(), "k", path, probes.landmarks
                )
            )
            for text in (plain, made.text)
        ]
        costs.append(lengths[1] - lengths[0])
    assert costs[1] == costs[0] <= (40 if unit == "block" else 62)


@pytest.mark.parametrize(
    ("text", "clock"), [(kernelretsnoop.PROGRAM, "%clock64"), (launchlate.PROGRAM, "%globaltimer")]
)
def test_no_clock_waits_for_the_number_of_a_launch_in_a_graph(text: str, clock: str) -> None:
    """It is loaded from GPU memory: the first lanes that leave would wait longer than later ones, which find it cached."""
    ptx = load(text).fragment("on_exit").ptx.splitlines()
    (at,) = (n for n, line in enumerate(ptx) if "ld.global.nc" in line)
    loaded = re.search(r"ld\.global\.nc\.b64 (%\w+),", ptx[at])
    assert loaded
    used = next(n for n in range(at + 1, len(ptx)) if re.search(rf"{loaded[1]}\b", ptx[n]))
    assert next(n for n, line in enumerate(ptx) if clock in line) < used

"""The cost of kernelretsnoop's probes after ptxas: registers, instructions, and nothing before the read of the clock."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from gpubpf.inject.inject import inject
from gpubpf.program import BPF
from gpubpf.ptx.parser import parse
from gpubpf_sass import assembled, registers, sass

TOOLS = Path(__file__).resolve().parents[2] / "tools"
# Two exits: lane 31 exits after a loop, the others before it.
KERNEL = """.version 8.3
.target {arch}
.address_size 64
.visible .entry scale(.param .u64 p) {
    .reg .pred %p<3>; .reg .b32 %r<5>; .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.u64 %rd3, %rd1, %rd2;
    and.b32 %r2, %r1, 31; setp.ne.u32 %p1, %r2, 31; @%p1 bra out;
turn:
    ld.volatile.global.u32 %r3, [%rd3]; setp.lt.u32 %p2, %r3, %r1; @%p2 bra turn;
out:
    ret;
}"""
MOST = {"on_exit": 276, "on_chosen_exit": 302, "on_record": 204}  # instructions for each exit


def program() -> BPF:
    sys.path.insert(0, str(TOOLS))
    from kernelretsnoop import PROGRAM

    return BPF(text=PROGRAM)


@pytest.mark.every(3)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
@pytest.mark.parametrize("function", MOST)
def test_probes_are_small_and_read_the_clock_first(function: str, arch: str, tmp_path: Path) -> None:
    """Up to 32 registers cost no occupancy: 2,048 threads of a multiprocessor share 65,536. On sm_75, there are 1,024 threads."""
    b = program()
    b.attach_gpu_exit(fn_name=function)
    plain = KERNEL.replace("{arch}", arch)
    made = inject(parse(plain), b.attached.probes_of(["scale"]))
    ways = len(made.kernels["scale"].sites)
    before, _ = assembled(plain, arch, tmp_path)
    length = len(sass(before)["scale"])
    after, said = assembled(made.text, arch, tmp_path)
    code = sass(after)["scale"]
    assert registers(said)["scale"] <= (64 if arch == "sm_75" else 32) and "0 bytes spill stores" in said
    assert ways == 2 and len(code) - length <= ways * MOST[function] + 8
    first = 0
    for clock in (n for n, line in enumerate(code) if "SR_CLOCKLO" in line):
        back = clock
        while back and not re.match(r"\.L|.*\b(BRA|EXIT)\b", code[back - 1]):
            back -= 1
        first += not re.search(r"\b(BSYNC|WARPSYNC|ATOMG|ATOM|RED|STG|ST|BAR)\b", " ".join(code[back:clock]))
    assert first >= ways

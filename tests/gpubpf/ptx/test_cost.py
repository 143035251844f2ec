"""The count of the instructions that injection adds, for --budget."""

from __future__ import annotations

import numpy as np

from engine_device import Array
from gpubpf.ebpf.maps import SPENT, SPENT_PARTS
from gpubpf.lower.fragment import Fragment
from gpubpf.ptx.cost import ADDED, COST
from gpubpf.ptx.values import Placement
from gpubpf_points import HEAD, Run

THREADS = 40
# Threads below 8 leave at once; the others store 4 times.
KERNEL = f"""{HEAD}
.visible .entry k(.param .u64 p) {{
    .reg .b64 %rd<4>; .reg .b32 %r<4>; .reg .pred %p;
    ld.param.u64 %rd1, [p];
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p, %r1, 8;
    @%p bra $gone;
    mul.wide.u32 %rd2, %r1, 4;
    add.u64 %rd3, %rd1, %rd2;
    mov.u32 %r2, 4;
$more:
    st.global.u32 [%rd3], %r2;
    sub.u32 %r2, %r2, 1;
    setp.ne.u32 %p, %r2, 0;
    @%p bra $more;
$gone:
    ret;
}}"""
OWN = 8 * (4 + 1) + 32 * (4 + 3 + 4 * 4 + 1)
TWELVE = Fragment("twelve", "{\n.reg .b32 %x;\n" + "add.u32 %x, %x, 1;\n" * 12 + "}", ())


def spent(*placements: Placement, kernel: str = KERNEL) -> tuple[int, int]:
    """Run the kernel with these programs. Return its own instructions, and the added ones."""
    run = Run(kernel, (*placements, Placement(COST, "exit", ADDED)))
    run("k", THREADS, Array(np.zeros(THREADS, np.uint32)))
    parts = run.maps[SPENT].host[: 2 * SPENT_PARTS]
    return int(parts[0::2].sum()), int(parts[1::2].sum())


def test_each_program_counts_as_often_as_it_runs() -> None:
    own, alone = spent()
    assert own == OWN
    assert spent(Placement(TWELVE, "entry")) == (OWN, alone + 12 * THREADS)
    assert spent(Placement(TWELVE, "access", kinds=("store",))) == (OWN, alone + 12 * 4 * 32)
    assert spent(Placement(TWELVE, "exit")) == (OWN, alone + 12 * THREADS)

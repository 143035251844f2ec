#!/usr/bin/env python3
"""What each probe of warpdiv, barrierlate, nansnoop and gpuhang costs: registers, and SASS instructions for each place.

    python3 benchmarks/inside_costs.py [FILE.md]

ptxas assembles a kernel with one place and with MANY, without and with the program. Nothing runs and no time is measured, so the
machine need not be idle.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "lib"), str(ROOT / "tests" / "support")]

from gpubpf.inject.inject import inject  # noqa: E402
from gpubpf.program import BPF  # noqa: E402
from gpubpf.ptx.parser import parse  # noqa: E402
from gpubpf.tools import barrierlate, gpuhang, nansnoop, warpdiv  # noqa: E402
from gpubpf_sass import assembled, registers, sass  # noqa: E402
from point_costs import BRANCH, FLOAT, KERNEL, MANY, STORE  # noqa: E402

TARGETS = ("sm_80", "sm_90")
BARRIER = "bar.sync 0;"
COUNTED = "mov.u32 %r2, 0; AGAIN{at}: add.u32 %r2, %r2, 1; st.volatile.global.u32 [%rd1+{at}], %r2; \
setp.lt.u32 %p1, %r2, %r0; @%p1 bra AGAIN{at};"
LOCK = "AGAIN{at}: atom.global.cas.b32 %r1, [%rd3+{at}], 0, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra AGAIN{at};"
STORED = STORE.replace(".u32", ".f32").replace("%r0", "%f0")
HEAD = f"""# Probes of warpdiv, barrierlate, nansnoop and gpuhang on NVIDIA GPUs

What each probe adds to a kernel that does nothing but what the program sees: SASS instructions
(ptxas, nvdisasm), and registers. No GPU ran, and no time is measured. Each row has one program alone.
Registers: of the kernel, and with the program at one place and at {MANY}. "Per place" are the
instructions of the code, not those that a warp executes: most places skip a part of them
([executed_inside.md](executed_inside.md) has what programs execute). A place of "basic block" has three
blocks. Long programs become functions where a kernel has many places.

    python3 benchmarks/inside_costs.py benchmarks/results/inside_costs.md
"""


@dataclass(frozen=True)
class Row:
    """A probe. attach: attaches the program. place: PTX with one place; "" if a kernel has one place by itself."""

    tool: str
    name: str
    text: str
    attach: Callable[[BPF], None]
    place: str = ""


def rows() -> Iterator[Row]:
    """Yield the probes to measure."""
    yield from (
        Row("warpdiv", "branch", warpdiv.PROGRAM, lambda b: b.attach_gpu_branch(fn_name="on_branch"), BRANCH),
        Row("warpdiv", "basic block", warpdiv.PROGRAM, lambda b: b.attach_gpu_basic_block(fn_name="on_block"), BRANCH),
        Row("warpdiv", "entry", warpdiv.PROGRAM, lambda b: b.attach_gpu_entry(fn_name="on_entry")),
        Row("warpdiv", "exit", warpdiv.PROGRAM, lambda b: b.attach_gpu_exit(fn_name="on_exit")),
        Row("barrierlate", "arrive", barrierlate.PROGRAM, lambda b: b.attach_gpu_barrier_arrive(fn_name="on_arrive"), BARRIER),
        Row("barrierlate", "leave", barrierlate.PROGRAM, lambda b: b.attach_gpu_barrier_leave(fn_name="on_leave"), BARRIER),
        Row("nansnoop", "operation", nansnoop.PROGRAM, lambda b: b.attach_gpu_float(fn_name="on_float", opcodes=("fma",)), FLOAT),
        Row(
            "nansnoop", "store (--stores)", nansnoop.PROGRAM,
            lambda b: b.attach_gpu_value(fn_name="on_store", kinds=("store", "atomic")), STORED,
        ),
        Row("gpuhang", "entry", gpuhang.PROGRAM, lambda b: b.attach_gpu_entry(fn_name="on_entry")),
        Row("gpuhang", "exit", gpuhang.PROGRAM, lambda b: b.attach_gpu_exit(fn_name="on_exit")),
        Row("gpuhang", "loop", gpuhang.PROGRAM, lambda b: b.attach_gpu_basic_block(fn_name="on_loop", loops="others"), COUNTED),
        Row(
            "gpuhang", "loop that waits", gpuhang.PROGRAM,
            lambda b: b.attach_gpu_basic_block(fn_name="on_wait", loops="waiting"), LOCK,
        ),
        Row(
            "gpuhang", "what the loop waits for", gpuhang.PROGRAM,
            lambda b: b.attach_gpu_value(fn_name="on_poll", kinds=("load", "atomic"), loops="waiting"), LOCK,
        ),
        Row("gpuhang", "arrive", gpuhang.PROGRAM, lambda b: b.attach_gpu_barrier_arrive(fn_name="on_arrive"), BARRIER),
        Row("gpuhang", "leave", gpuhang.PROGRAM, lambda b: b.attach_gpu_barrier_leave(fn_name="on_leave"), BARRIER),
    )  # fmt: skip


def measured(row: Row, arch: str, count: int, folder: Path) -> tuple[int, int, int, int]:
    """Return what a kernel has: registers and instructions without the program, then both with the program.

    count: the number of places in the kernel.
    """
    body = "\n".join(row.place.format(at=1024 * n) for n in range(count))
    plain = KERNEL.format(body=body).replace("sm_80", arch)
    bpf = BPF(text=row.text)
    row.attach(bpf)
    found = []
    for text in (plain, inject(parse(plain), bpf.attached.probes_of(["k"])).text):
        cubin, said = assembled(text, arch, folder)
        found += [registers(said)["k"], sum(not line.startswith(".L") for line in sass(cubin)["k"])]
    return found[0], found[1], found[2], found[3]


def line(row: Row, arch: str, folder: Path) -> str:
    """Return the row of the table."""
    one = measured(row, arch, 1, folder)
    many = measured(row, arch, MANY, folder) if row.place else one
    first, last = one[3] - one[1], many[3] - many[1]
    each = f"{(last - first) / (MANY - 1):.1f}" if row.place else str(first)
    return f"| {row.tool} | {row.name} | {arch} | {one[0]} | {one[2]} | {many[2]} | {first} | {each} |"


def main(arguments: list[str]) -> int:
    """Measure, and print a table; also write it to a file, if one is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", help="write the table to this file, too")
    file = parser.parse_args(arguments).file
    lines = [
        "| tool | probe | GPU | registers | with one place | with many | instructions, one place | per place |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        lines += [line(row, arch, Path(folder)) for row in rows() for arch in TARGETS]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if file:
        file.write_text(f"{HEAD}\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

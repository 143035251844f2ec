"""Count how often an instrumented kernel runs in the body of a conditional graph node, which only the GPU knows."""

from __future__ import annotations

from gpubpf.lower.launch_block import LaunchBlock
from gpubpf.ptx.emit import text
from gpubpf.ptx.module import Directive
from gpubpf.ptx.symbols import LAUNCH

_NUMBERS = tuple(f"%{of}.{axis}" for of in ("ctaid", "tid") for axis in "xyz")


def count_executions(block: LaunchBlock) -> list[Directive]:
    """Return statements for the kernel's entry. The grid's first thread adds 1 to the counter, if the launch block has one."""
    if block.executions is None:
        return []
    names = ("counter", "one", "number", "other", "skip")
    counter, one, number, other, skip = (f"%gpubpf_0{name}" for name in names)
    lines = [
        "{",
        f".reg .b64 {counter}, {one};",
        f".reg .b32 {number}, {other};",
        f".reg .pred {skip};",
        f"ld.param.u64 {counter}, [{LAUNCH}+{block.executions}];",
        f"setp.eq.u64 {skip}, {counter}, 0;",
        f"@{skip} bra $gpubpf_counted;",
        f"mov.u32 {number}, 0;",
    ]
    for register in _NUMBERS:
        lines += [f"mov.u32 {other}, {register};", f"or.b32 {number}, {number}, {other};"]
    lines += [
        f"setp.eq.u32 {skip}, {number}, 0;",
        # A 1 that ptxas does not know to be constant. For a constant, ptxas would let one lane add for all others.
        f"cvt.u64.u32 {one}, {number};",
        f"add.u64 {one}, {one}, 1;",
        f"@{skip} red.global.add.u64 [{counter}], {one};",
        "$gpubpf_counted:",
        "}",
    ]
    return [text("\n".join(lines))]

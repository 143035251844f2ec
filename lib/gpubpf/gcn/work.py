"""Count the work of a kernel's threads, in one VGPR per kind of work.

An instruction counts for the lanes that are active in EXEC when the wave issues it. Before each run of instructions with the same
EXEC, a v_add therefore adds the run's count in the lanes that execute it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping

from gpubpf.gcn.comgr import Comgr
from gpubpf.gcn.kernel_code import KernelCode, entered, writes_exec

_MEMORY = r"(?:global|flat|scratch|buffer|tbuffer|image)"
_DS_ATOMIC = (
    r"ds_(?:pk_)?(?:add|sub|rsub|inc|dec|min|max|and|or|xor|mskor|cmpst|wrxchg|wrap|condxchg|append|consume)"
)
# The instructions that count as work of each kind, by name. Blocks are counted differently.
KINDS: Mapping[str, re.Pattern[str]] = {
    "instructions": re.compile(""),
    "loads": re.compile(rf"{_MEMORY}_(?:load|sample|gather)|ds_(?:read|load)"),
    "stores": re.compile(rf"{_MEMORY}_store|ds_(?:write|store)"),
    "atomics": re.compile(rf"{_MEMORY}_atomic|{_DS_ATOMIC}"),
    "barriers": re.compile(r"s_barrier"),
}
_MOST_INLINE = 64  # the largest constant that needs no literal


def counted(code: KernelCode, kind: str) -> dict[int, int]:
    """Return the count to add before the instruction at each address."""
    found: dict[int, int] = {}
    for block in code.blocks():
        if kind == "blocks":
            found[entered(block).address] = 1
            continue
        begin = block[0].address
        for instruction in block:
            if KINDS[kind].match(instruction.name):
                found[begin] = found.get(begin, 0) + 1
            if writes_exec(instruction):
                begin = instruction.address + instruction.size
    return found


def adder(comgr: Comgr, gpu: str, vgpr: int) -> Callable[[int], bytes]:
    """Return a function that assembles the addition of a constant to a VGPR. The assembled code changes nothing else."""
    name = "v_add_u32_e32" if gpu.startswith("gfx9") else "v_add_nc_u32_e32"
    small = comgr.assemble(f"{name} v{vgpr}, 1, v{vgpr}")
    large = comgr.assemble(f"{name} v{vgpr}, 0x12345678, v{vgpr}")[:4]

    def add(number: int) -> bytes:
        if number > _MOST_INLINE:
            return large + struct.pack("<I", number)
        return struct.pack("<I", int.from_bytes(small, "little") + number - 1)  # SRC0 is 128 + number

    return add

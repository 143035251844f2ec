"""What a program at each attach point costs: registers and SASS instructions of the smallest one that counts.

Its kernel does nothing but what the program sees, at one place or at MANY. Device functions are not among the points: their cost is
mostly that of handing on the launch block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gpubpf.ebpf import compile
from gpubpf.ebpf.probe import Probe
from gpubpf.images import assemble, fatbin
from gpubpf.images.instrument import instrument_module
from gpubpf.images.sidecar import Sidecar
from gpubpf.lower.programs import verified

MANY = 9
TARGETS = {f"sm_{cc}": assemble.Target("gpu", divmod(cc, 10)) for cc in (80, 90)}
# One lane adds for all that are active.
PROGRAM = """
#include <gpubpf.h>
GPU_SITE_ARRAY(counts, u64);
int program(struct gpu_{point} *ctx) {{
    u64 site = ctx->site;
    u64 *count = counts.lookup(&site);
    gpu_mask lanes = {lanes};
    if (count && gpu_first(lanes))
        __sync_fetch_and_add(count, {amount});
    return 0;
}}
"""
LOAD = "ld.volatile.global.u32 %r1, [%rd1+{at}];"
STORE = "st.volatile.global.u32 [%rd1+{at}], %r0;"
FLOAT = "fma.rn.f32 %f0, %f0, %f1, %f2; st.volatile.global.f32 [%rd1+{at}], %f0;"
BRANCH = f"setp.gt.u32 %p1, %r0, {{at}}; @%p1 bra over{{at}}; {STORE} over{{at}}:"
# What is there: the point, what is counted, and one place in PTX; {at} is another number for each.
PLACES = {
    "kernel entry": ("entry", "lanes", ""),
    "kernel entry, an argument": ("entry", "ctx->arg0", ""),
    "kernel exit": ("exit", "lanes", ""),
    "block begin": ("block_begin", "lanes", ""),
    "block end": ("block_end", "lanes", ""),
    "barrier, arrive": ("barrier_arrive", "lanes", "bar.sync 0;"),
    "barrier, leave": ("barrier_leave", "lanes", "bar.sync 0;"),
    "barrier, time waited": ("barrier_leave", "ctx->waited", "bar.sync 0;"),
    "access, load, global": ("access", "lanes", LOAD),
    "access, load, generic": ("access", "lanes", LOAD.replace(".global", "")),
    "access, addresses": ("access", "ctx->address", LOAD),
    "basic block": ("basic_block", "lanes", BRANCH),
    "branch, executed": ("branch", "lanes", BRANCH),
    "branch, taken": ("branch", "gpu_popcount(ctx->taken)", BRANCH),
    "value, store": ("value", "ctx->low", STORE),
    "value, store of 16 bytes": (
        "value",
        "ctx->low + ctx->high",
        "st.volatile.global.v4.u32 [%rd1+{at}], {{%r0, %r0, %r0, 7}};",
    ),
    "value, load": ("value", "ctx->low", LOAD),
    "value, load, generic": ("value", "ctx->low", LOAD.replace(".global", "")),
    "value, operand of an atomic": ("value", "ctx->low", "red.global.add.u32 [%rd1+{at}], %r0;"),
    "value, result of an atomic": (
        "value",
        "ctx->old_low",
        f"atom.global.add.u32 %r1, [%rd1+{{at}}], 1; {STORE.replace('%r0', '%r1')}",
    ),
    "float, executed": ("float", "lanes", FLOAT),
    "float, result": ("float", "ctx->low", FLOAT),
    "float, result and operands": (
        "float",
        "ctx->low + ctx->operand0 + ctx->operand1 + ctx->operand2",
        FLOAT,
    ),
    "instruction, result": ("instruction", "ctx->low", f"xor.b32 %r0, %r0, {{at}}; {STORE}"),
}
# What a program is attached to, where that is not everything.
CHOSEN: dict[str, dict[str, tuple[str, ...]]] = {
    "value, result of an atomic": {"kinds": ("atomic",)},
    **{
        name: {"opcodes": ("fma", "xor")}
        for name, (point, *_) in PLACES.items()
        if point in ("float", "instruction")
    },
}
KERNEL = """.version 8.3
.target sm_80
.address_size 64
.visible .entry k(.param .u64 p) {{
    .reg .pred %p<2>; .reg .b32 %r<6>; .reg .b64 %rd<4>; .reg .f32 %f<3>;
    mov.u32 %r0, %tid.x;
    ld.param.u64 %rd3, [p];
    mul.wide.u32 %rd2, %r0, 16;
    add.s64 %rd1, %rd3, %rd2;
    cvt.rn.f32.u32 %f0, %r0; add.f32 %f1, %f0, %f0; add.f32 %f2, %f1, %f1;
{body}
    ret;
}}
"""


def costs(compared: Callable[[Sidecar, assemble.Target], list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each point and target. `compared`: returns rows of kernels before and after."""
    for name, (point, amount, place) in PLACES.items():
        lanes = (
            "ctx->active"
            if point in ("access", "basic_block", "branch", "value", "float", "instruction")
            else "gpu_active()"
        )
        number = "gpu_popcount(lanes)" if amount == "lanes" else amount
        program = compile.compile_text(PROGRAM.format(point=point, lanes=lanes, amount=number))
        attached = [Probe(verified(program, "program")[0], point, **CHOSEN.get(name, {}))]
        for arch, target in TARGETS.items():
            rows = []
            for count in (1, MANY):
                body = "\n".join("    " + place.format(at=1024 * n) for n in range(count))
                group = fatbin.images_of_bytes(KERNEL.format(body=body).encode())
                rows += compared(instrument_module(group, attached, target), target)
            one, many = rows
            first, last = (row["instructions"][1] - row["instructions"][0] for row in rows)
            sites = many["exits"] - one["exits"]
            each = (last - first) / sites if sites else 0
            yield {
                "place": name,
                "arch": arch,
                "registers": [*one["registers"], many["registers"][1]],
                "spill_bytes": many["spill_bytes"][1] - many["spill_bytes"][0],
                "instructions": round(each, 1) if sites else None,
                "instructions_once": round(first - each * one["exits"], 1) if sites else first,
            }

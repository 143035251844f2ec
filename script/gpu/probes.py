"""Make patches for the Compute Sanitizer API from eBPF programs, which are verified and lowered as for any tool."""

from __future__ import annotations

from gpubpf.ebpf import compile
from gpubpf.lower import nvptx
from gpubpf.lower.fragment import Fragment
from gpubpf.verify import verify

# counts[0] exits, counts[1] accesses: programs/patches.cpp's Counts.
PROGRAM = r"""
#include <gpubpf.h>

GPU_ARRAY(counts, u64, 2);

int on_exit(struct gpu_exit *ctx)
{
    u32 key = 0;
    u64 *count = counts.lookup(&key);

    if (count)
        __sync_fetch_and_add(count, 1);
    return 0;
}

int on_access(struct gpu_access *ctx)
{
    u32 key = 1;
    u64 *count = counts.lookup(&key);

    if (count)
        __sync_fetch_and_add(count, 1);
    return 0;
}
"""

# Of each program: the function that the API calls, and its parameters behind the address of the counts (sanitizer_patching.h).
FUNCTIONS = {
    "on_exit": ("countExit", ("b64",)),  # pc
    "on_access": ("countAccess", ("b64", "b64", "b32", "b32", "b64")),  # pc, address, size, flags, new value
}


def patches() -> str:
    """Return PTX for `ptxas --compile-as-tools-patch`. Raises gpubpf.errors.Error if a program cannot be compiled."""
    program = compile.compile_text(PROGRAM)
    text = ".version 8.0\n.target sm_90\n.address_size 64\n"
    for name in FUNCTIONS:
        checked, _ = verify(program, program.functions[name])
        text += patch(name, nvptx.lower(program, checked))
    return text


def patch(program: str, fragment: Fragment) -> str:
    """Return a function around a fragment. The data that the API passes to it is the storage of the only map."""
    name, types = FUNCTIONS[program]
    (argument,) = fragment.arguments
    assert argument.kind == "map_base"
    rest = "".join(f", .param .{kind} p{number}" for number, kind in enumerate(types))
    return f"""
.visible .func (.param .b32 result) {name}(.param .b64 data{rest})
{{
    .reg .pred %none;
    .reg .{argument.type} {argument.register};
    ld.param.{argument.type} {argument.register}, [data];
    setp.eq.u64 %none, {argument.register}, 0;
    @%none bra done;
{fragment.ptx}
done:
    st.param.b32 [result], 0;
    ret;
}}
"""

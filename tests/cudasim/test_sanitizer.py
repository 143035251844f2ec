"""The stand-in for NVIDIA's Compute Sanitizer API: a tool counts what known kernels do, exactly."""

from __future__ import annotations

import pytest

from cudasim_device import run_python

HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n"
# Instruction numbers: 0 mov, 1 setp, 2 bra, 3 … ; of the launch's 64 threads, those from 40 leave early.
WORK = (
    HEAD
    + """
.visible .entry work(.param .u64 p)
{
    .reg .pred %p<4>; .reg .b32 %r<10>; .reg .b64 %rd<10>; .reg .f32 %f<8>;
    mov.u32 %r1, %tid.x;                     // 0
    setp.ge.u32 %p1, %r1, 40;                // 1
    @%p1 exit;                               // 2
    ld.param.u64 %rd1, [p];                  // 3
    mul.wide.u32 %rd2, %r1, 16;              // 4
    add.s64 %rd3, %rd1, %rd2;                // 5
    ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd3];  // 6
    and.b32 %r5, %r1, 1;                     // 7
    setp.eq.u32 %p2, %r5, 0;                 // 8
    @%p2 st.global.u32 [%rd3+4], %r1;        // 9
    @!%p2 bra odd;                           // 10
    ld.u16 %r6, [%rd3];                      // 11
odd:
    red.global.add.u32 [%rd1], 1;            // 12
    atom.global.sys.add.u32 %r7, [%rd1+8], 1;  // 13
    ret;                                     // 14
}
"""
)
PROGRAM = f"""
from sanitizer_client import *
WORK = {WORK!r}
def launch(function, pointer, blocks=1, threads=64, stream=None):
    argument = ctypes.c_void_p(pointer.value)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    cu.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, None)
cu = Driver()
memory = cu.memory(1 << 16)
cu.cuMemsetD8_v2(memory, 0, ctypes.c_size_t(1 << 16))
"""


def client(code: str, hostile: bool = False, **more: str) -> str:
    import textwrap

    return run_python(PROGRAM + textwrap.dedent(code), hostile, **more)


@pytest.mark.parametrize("hostile", [False, True])
def test_exits_and_accesses_are_counted_by_program_counter(hostile: bool) -> None:
    """Early exits, predicates, divergence, vectors, generic addresses, atomics."""
    code = """
    tool = Tool(cu)
    tool.patch_modules({2: "onPc", 3: "onAccess", 4: "onAccess"})
    module = cu.module(WORK)
    work = cu.function(module, "work")
    launch(work, memory, blocks=3)
    cu.cuCtxSynchronize()
    for at, words in tool.records(module, "work").items():
        address = (words[2] - memory.value) if words[2] else None
        print(at, words[0], words[1], address if at in (12, 13) else "", words[3], words[4] if at == 9 else "")
    print(tool.launches[0][:3])
    """
    lines = client(code, hostile).splitlines()
    # flags: read 1, write 2, system-scoped atomic 4, GPU scope 64, system scope 128
    assert [line.split() for line in lines[:-1]] == [
        ["2", str(3 * 24), "0", "0"],
        ["6", "120", str(120 * 16), "1"],
        *[line.split() for line in lines if line.startswith("9 ")],
        ["11", "60", "120", "1"],
        ["12", "120", "480", "0", str(1 | 2 | 64)],
        ["13", "120", "480", "8", str(1 | 2 | 4 | 128)],
        ["14", "120", "0", "0"],
    ]
    store = next(line.split() for line in lines if line.startswith("9 "))
    assert store[1:4] == ["60", "240", "2"]
    assert int(store[4]) in range(0, 40, 2)  # the value that a thread stored
    assert lines[-1] == "('work', (3, 1, 1), (64, 1, 1))"

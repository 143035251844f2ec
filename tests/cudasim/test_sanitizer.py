"""The stand-in for NVIDIA's Compute Sanitizer API: a tool counts what known kernels do, exactly."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cudasim.translate import patches
from cudasim_device import CUDASIM, cuda_include, libraries, run_python

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
# All threads of a block meet. Lanes 0 to 7 of each warp call a function, which returns at two places.
MEETING = (
    HEAD
    + """
.func (.param .b32 out) half(.param .b32 in)
{
    .reg .b32 %r<4>; .reg .pred %p;
    ld.param.b32 %r1, [in];                  // 0
    setp.lt.u32 %p, %r1, 4;                  // 1
    st.param.b32 [out], %r1;                 // 2
    @%p ret;                                 // 3
    st.param.b32 [out], 7;                   // 4
}
.visible .entry meeting(.param .u64 p)
{
    .reg .pred %p<4>; .reg .b32 %r<10>; .reg .b64 %rd<10>;
    .shared .align 16 .b8 tile[1024];
    .local .align 8 .b8 own[16];
    mov.u32 %r1, %tid.x;                     // 0
    shl.b32 %r2, %r1, 2;                     // 1
    mov.u32 %r3, tile;                       // 2
    add.u32 %r3, %r3, %r2;                   // 3
    st.shared.u32 [%r3+16], %r1;             // 4
    bar.sync 0;                              // 5
    bar.sync 3, 64;                          // 6
    bar.warp.sync 0xffffffff;                // 7
    shfl.sync.idx.b32 %r4, %r1, 0, 31, -1;   // 8
    st.local.u32 [own+4], %r1;               // 9
    mov.u64 %rd1, own;                       // 10
    cvta.local.u64 %rd1, %rd1;               // 11
    ld.u32 %r5, [%rd1+4];                    // 12: of local memory
    cvt.u64.u32 %rd2, %r3;                   // 13
    cvta.shared.u64 %rd2, %rd2;              // 14
    ld.u32 %r5, [%rd2+16];                   // 15: of shared memory
    setp.ge.u32 %p1, %r1, 8;                 // 16
    @%p1 bra over;                           // 17
    {
    .param .b32 a; .param .b32 b;
    st.param.b32 [a], %r1;                   // 18
    call (b), half, (a);                     // 19
    ld.param.b32 %r6, [b];                   // 20
    }
over:
    ld.param.u64 %rd3, [p];                  // 21
    red.global.add.u32 [%rd3], %r5;          // 22
}
"""
)
# Asynchronous copies, matrices, the heap, prefetches, the cluster's barrier.
OTHERS = (
    HEAD
    + """
.extern .func (.param .b64 r) malloc(.param .b64 size);
.extern .func free(.param .b64 p);
.visible .entry others(.param .u64 p)
{
    .reg .pred %p<4>; .reg .b32 %r<10>; .reg .b64 %rd<10>;
    .shared .align 16 .b8 tile[1024];
    ld.param.u64 %rd1, [p];                  // 0
    mov.u32 %r1, tile;                       // 1
    cp.async.ca.shared.global [%r1+16], [%rd1+32], 16;     // 2
    cp.async.ca.shared.global [%r1], [%rd1+64], 8, 5;      // 3
    cp.async.commit_group;                   // 4
    cp.async.wait_group 0;                   // 5
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r2, %r3}, [%r1];  // 6
    mov.u32 %r2, 1234;                       // 7
    stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1+512], {%r2};   // 8
    prefetch.global.L2 [%rd1+128];           // 9
    barrier.cluster.arrive;                  // 10
    barrier.cluster.wait;                    // 11
    mov.u32 %r4, %laneid;                    // 12
    setp.ne.u32 %p1, %r4, 5;                 // 13
    @%p1 bra over;                           // 14
    {
    .param .b64 a; .param .b64 b;
    st.param.b64 [a], 48;                    // 15
    call (b), malloc, (a);                   // 16
    ld.param.b64 %rd2, [b];                  // 17
    }
    {
    .param .b64 c;
    st.param.b64 [c], %rd2;                  // 18
    call free, (c);                          // 19
    }
over:
    ret;                                     // 20
}
"""
)
# The first thread copies 64 bytes to shared memory and 48 bytes back, and adds 16 to global memory.
BULK = (
    HEAD
    + """
.visible .entry bulk(.param .u64 p)
{
    .reg .pred %p<4>; .reg .b32 %r<10>; .reg .b64 %rd<10>;
    .shared .align 128 .b8 tile[1024];
    .shared .align 8 .b8 bar[8];
    mov.u32 %r1, %tid.x;                     // 0
    setp.ne.u32 %p1, %r1, 0;                 // 1
    @%p1 ret;                                // 2
    ld.param.u64 %rd1, [p];                  // 3
    mov.u32 %r1, tile;                       // 4
    mov.u32 %r2, bar;                        // 5
    mbarrier.init.shared.b64 [%r2], 1;       // 6
    mbarrier.arrive.expect_tx.shared.b64 %rd2, [%r2], 64;  // 7
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1+256], 64, [%r2];  // 8
    cp.async.bulk.global.shared::cta.bulk_group [%rd1+1024], [%r1], 48;                              // 9
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1+2048], [%r1], 16;               // 10
    cp.async.bulk.commit_group;              // 11
    ret;                                     // 12
}
"""
)
# A function is called through a pointer in a table, whose initial value the first image has set.
POINTERS = (
    HEAD
    + """
.visible .func (.param .b32 out) twice(.param .b32 in)
{
    .reg .b32 %r<4>;
    ld.param.b32 %r1, [in];
    add.u32 %r1, %r1, %r1;
    st.param.b32 [out], %r1;
    ret;
}
.global .align 8 .u64 table[1] = {twice};
.visible .entry pointers(.param .u64 p)
{
    .reg .b32 %r<4>; .reg .b64 %rd<4>;
    ld.global.u64 %rd1, [table];
    {
    .param .b32 a; .param .b32 b;
    st.param.b32 [a], 21;
    prototype: .callprototype (.param .b32 _) _ (.param .b32 _);
    call (b), %rd1, (a), prototype;
    ld.param.b32 %r1, [b];
    }
    ld.param.u64 %rd2, [p];
    st.global.u32 [%rd2], %r1;
    ret;
}
"""
)


def launching(name: str, launched: str, blocks: int, threads: int) -> str:
    """A kernel whose threads launch another one. Instruction numbers: 9 and 15 the calls, 17 the exit."""
    grid = "".join(f"st.param.b32 [b+{at}], {size};" for at, size in ((0, blocks), (4, 1), (8, 1)))
    block = "".join(f"st.param.b32 [c+{at}], {size};" for at, size in ((0, threads), (4, 1), (8, 1)))
    return f"""
.visible .entry {name}(.param .u64 p)
{{
    .reg .b32 %r<4>; .reg .b64 %rd<4>;
    mov.u64 %rd1, {launched};                // 0
    {{
    .param .b64 a, e; .param .align 4 .b8 b[12]; .param .align 4 .b8 c[12]; .param .b32 d;
    st.param.b64 [a], %rd1; {grid} {block} st.param.b32 [d], 0;  // 1 to 8
    call (e), cudaGetParameterBufferV2, (a, b, c, d);  // 9
    ld.param.b64 %rd2, [e];                  // 10
    }}
    ld.param.u64 %rd3, [p];                  // 11
    st.u64 [%rd2], %rd3;                     // 12
    {{
    .param .b64 a, b; .param .b32 c;
    st.param.b64 [a], %rd2; st.param.b64 [b], 0;  // 13, 14
    call (c), cudaLaunchDeviceV2, (a, b);    // 15
    ld.param.b32 %r1, [c];                   // 16
    }}
    ret;                                     // 17
}}
"""


# `top` launches `middle`, which launches `work`.
NESTED = (
    HEAD
    + ".extern .func (.param .b64 r) cudaGetParameterBufferV2"
    + "(.param .b64 f, .param .align 4 .b8 g[12], .param .align 4 .b8 b[12], .param .b32 s);\n"
    + ".extern .func (.param .b32 r) cudaLaunchDeviceV2(.param .b64 p, .param .b64 s);\n"
    + WORK.removeprefix(HEAD)
    + launching("middle", "work", 2, 50)
    + launching("top", "middle", 1, 3)
)
PROGRAM = f"""
from sanitizer_client import *
HEAD, WORK, MEETING, OTHERS, POINTERS, BULK, NESTED = {(HEAD, WORK, MEETING, OTHERS, POINTERS, BULK, NESTED)!r}
def launch(function, pointer, blocks=1, threads=64, stream=None):
    argument = ctypes.c_void_p(pointer.value)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    cu.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, None)
cu = Driver()
memory = cu.memory(1 << 16)
cu.cuMemsetD8_v2(memory, 0, ctypes.c_size_t(1 << 16))
"""


def client(code: str, hostile: bool = False, **more: str) -> str:
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


@pytest.mark.parametrize("hostile", [False, True])
def test_kernels_that_launch_kernels(hostile: bool) -> None:
    """Grids of all depths run their patches. Only launches of the host have data."""
    code = """
    tool = Tool(cu)
    tool.patch_modules({2: "onPc", 3: "onAccess", 9: "onCall"})
    tool.data = {"top": memory.value + 8192}
    module = cu.module(NESTED)
    top = cu.function(module, "top")
    for _ in range(2):
        launch(top, memory, blocks=2, threads=4)
    cu.cuCtxSynchronize()
    for name in ("top", "middle", "work"):
        cu.cuFuncLoad(cu.function(module, name))  # the driver does not know that they ran
        for at, words in tool.records(module, name).items():
            print(name, at, words[0], words[5])
    print([launched[0] for launched in tool.launches])
    """
    tops = 2 * 2 * 4
    middles = tops * 3  # threads
    works = middles * 2  # blocks; threads 40 to 49 leave early
    expected = [("top", at, tops, tops) for at in (9, 12, 15, 17)]
    expected += [("middle", at, middles, middles if hostile else 0) for at in (9, 12, 15, 17)]
    per_block = {2: 10, 6: 40, 9: 20, 11: 20, 12: 40, 13: 40, 14: 40}
    expected += [("work", at, n * works, n * works if hostile else 0) for at, n in per_block.items()]
    lines = client(code, hostile).splitlines()
    assert lines == [*(" ".join(map(str, row)) for row in expected), "['top', 'top']"]


@pytest.mark.parametrize("hostile", [False, True])
def test_a_fault_in_a_patch_has_its_program_counter(hostile: bool) -> None:
    """A fault of the kernel has none. After a fault, nothing is copied: the API says so instead of leaving the memory as it is."""
    code = """
    tool = Tool(cu)
    tool.table(cu.context.value)
    text = HEAD + ".visible .func (.param .b32 r) other() { st.param.b32 [r], 0; ret; }"
    text += ".visible .func (.param .b32 r) bad(.param .b64 data, .param .b64 pc) { .reg .b64 %p, %q;"
    text += "ld.param.b64 %p, [pc]; mov.u64 %q, 16; ld.global.u64 %p, [%q]; st.param.b32 [r], 0; ret; }"
    tool.call("sanitizerAddPatches", text.encode(), cu.context)
    wanted = {9: "onCall", 2: "bad"} if sys.argv[1:] else {3: "onAccess"}
    tool.patch_modules(wanted)
    module = cu.module(WORK)
    in_kernel = memory if 2 in wanted else ctypes.c_void_p(4096)
    launch(cu.function(module, "work"), in_kernel)
    pc, size, at = (ctypes.c_uint64() for _ in range(3))
    print(cu.status("cuCtxSynchronize"), cu.status("cudasim_fault_in_patch", cu.context, ctypes.byref(at)))
    tool.call("sanitizerGetCallbackPcAndSize", cu.context, b"bad", ctypes.byref(pc), ctypes.byref(size))
    print(at.value - pc.value if at.value else None)
    word = ctypes.c_uint64(77)
    table = ctypes.c_void_p(tool.tables[cu.context.value])
    print(tool.status("sanitizerMemcpyDeviceToHost", ctypes.byref(word), table, ctypes.c_size_t(8), None), word.value)
    print(tool.status("sanitizerStreamSynchronize", None))
    """
    assert client("sys.argv.append('patch')\n" + textwrap.dedent(code), hostile).splitlines() == [
        "700 0", "32", "999 77", "999"
    ]  # fmt: skip
    assert client(code, hostile).splitlines() == ["700 500", "None", "999 77", "999"]


def test_barriers_shuffles_calls_and_other_memory() -> None:
    """Shared and local addresses are offsets. The end of a kernel has a program counter, too."""
    code = """
    names = {1: "onPc", 2: "onPc", 4: "onAccess", 5: "onAccess", 6: "onBarrier", 7: "onMask", 8: "onPc", 9: "onCall", 10: "onPc"}
    tool = Tool(cu)
    tool.patch_modules(names)
    module = cu.module(MEETING)
    launch(cu.function(module, "meeting"), memory, blocks=2)
    cu.cuCtxSynchronize()
    for name in ("meeting", "half"):
        for at, words in tool.records(module, name).items():
            print(name, at, words[0], *words[1:5] if at in (4, 9, 12, 15) else words[2:5])
    print(tool.place(module, "half")[0])
    total = ctypes.c_uint32()
    cu.cuMemcpyDtoH_v2(ctypes.byref(total), memory, ctypes.c_size_t(4))
    print(total.value)
    """
    lines = client(code).splitlines()
    found = {tuple(line.split()[:2]): [int(word) for word in line.split()[2:]] for line in lines[:-2]}
    every = 128  # threads of two blocks
    assert found["meeting", "0"] == [every, 0, 0, 0]
    assert found["meeting", "4"][:2] == [every, 4 * every]
    assert found["meeting", "4"][2] in range(16, 16 + 256, 4)
    assert found["meeting", "5"] == [every, 0, 0, 2]
    assert found["meeting", "6"] == [every, 3, 64, 2]
    assert found["meeting", "7"] == [every, 0xFFFFFFFF, 0, 0]
    assert found["meeting", "8"] == [every, 0, 0, 0]
    assert found["meeting", "9"][:2] == [every, 4 * every]
    assert found["meeting", "12"][:4] == [every, 4 * every, found["meeting", "9"][2], 1]
    assert found["meeting", "15"][:2] == [every, 4 * every]
    assert found["meeting", "15"][2] in range(16, 16 + 256, 4)
    assert found["meeting", "19"] == [16, int(lines[-2]), 0, 0]
    assert found["meeting", "23"][0] == every
    assert found["half", "3"][0] == found["half", "5"][0] == 8
    assert len(found) == 13
    assert int(lines[-1]) == 2 * sum(range(64))  # the kernel's result is what it is without patches


def test_a_point_after_a_barrier_comes_when_all_have_arrived() -> None:
    """A thread counts arrivals before the barrier; behind it, each thread finds all of them."""
    code = """
    tool = Tool(cu)
    cell = memory.value + 4096
    parameters = ".param .b64 d, .param .b64 pc, .param .b32 a, .param .b32 b, .param .b32 c"
    text = HEAD + f".visible .func (.param .b32 r) arrive({parameters})"
    text += f"{{ .reg .b64 %p; mov.u64 %p, {cell}; red.global.add.u32 [%p], 1; st.param.b32 [r], 0; ret; }}"
    text += f".visible .func (.param .b32 r) pass({parameters}) {{ .reg .b64 %p; .reg .b32 %v; mov.u64 %p, {cell};"
    text += "ld.global.u32 %v, [%p]; red.global.min.u32 [%p+8], %v; st.param.b32 [r], 0; ret; }"
    cu.cuMemsetD32_v2(ctypes.c_void_p(cell + 8), 1000, ctypes.c_size_t(1))
    tool.call("sanitizerAddPatches", text.encode(), cu.context)
    tool.patch_modules({6: "arrive", 29: "pass"})
    module = cu.module(HEAD + ".visible .entry meeting(.param .u64 p) { bar.sync 0; ret; }")
    launch(cu.function(module, "meeting"), memory, threads=256)
    cu.cuCtxSynchronize()
    found = (ctypes.c_uint32 * 3)()
    cu.cuMemcpyDtoH_v2(found, ctypes.c_void_p(cell), ctypes.c_size_t(12))
    print(*found)
    """
    assert client(code, True) == "256 0 256\n"


GRAPH = """
def graph_of(*functions):
    stream, graph, exec = (ctypes.c_void_p() for _ in range(3))
    cu.cuStreamCreate(ctypes.byref(stream), 1)
    cu.cuStreamBeginCapture_v2(stream, 2)
    for function in functions:
        launch(function, memory, threads=64, stream=stream)
    cu.cuStreamEndCapture(stream, ctypes.byref(graph))
    cu.cuGraphInstantiateWithFlags(ctypes.byref(exec), graph, ctypes.c_ulonglong(0))
    return exec, stream
tool = Tool(cu)
tool.patch_modules({2: "onPcWithData"})
cells = {name: memory.value + 8192 + 8 * k for k, name in enumerate(("work", "meeting"))}
def data_of(name):
    value = ctypes.c_uint64()
    cu.cuMemcpyDtoH_v2(ctypes.byref(value), ctypes.c_void_p(cells[name]), ctypes.c_size_t(8))
    return value.value
modules = {"work": cu.module(WORK), "meeting": cu.module(MEETING)}
kernels = {name: cu.function(module, name) for name, module in modules.items()}
"""


@pytest.mark.parametrize("hostile", [False, True])
def test_nodes_of_graphs_and_their_data(hostile: bool) -> None:
    """By program counter, every node is exact. In hostile mode all nodes of a launch get the data that was set last."""
    code = """
    tool.data = cells
    exec, stream = graph_of(kernels["work"], kernels["meeting"], kernels["work"])
    assert tool.nodes == [] and tool.launches == []  # a capture launches nothing
    cu.cuGraphUpload(exec, stream)
    for _ in range(5):
        cu.cuGraphLaunch(exec, stream)
    launch(kernels["meeting"], memory, threads=64)
    cu.cuCtxSynchronize()
    for name, module in modules.items():
        print(name, sum(tool.counts(module, name).values()), data_of(name))
    print([name for name, upload in tool.nodes if upload], tool.nodes.count(("work", False)), len(tool.launches))
    """
    data = {"work": 3 * 5 * 64, "meeting": 64} if hostile else {"work": 2 * 5 * 64, "meeting": 6 * 64}
    assert client(GRAPH + textwrap.dedent(code), hostile).splitlines() == [
        f"work {2 * 5 * 64} {data['work']}",
        f"meeting {6 * 64} {data['meeting']}",
        "['work', 'meeting', 'work'] 10 1",
    ]


@pytest.mark.parametrize("hostile", [False, True])
def test_data_of_functions_and_missing_data(hostile: bool) -> None:
    """The data of a launch comes before that of its function. In hostile mode, missing data is a bad pointer."""
    code = """
    tool.call("sanitizerSetCallbackData", kernels["work"], ctypes.c_void_p(cells["work"]))
    exec, stream = graph_of(kernels["work"])
    cu.cuGraphLaunch(exec, stream)
    launch(kernels["work"], memory, threads=64)
    tool.data = {"work": cells["meeting"]}
    launch(kernels["work"], memory, threads=64)
    cu.cuCtxSynchronize()
    print(data_of("work"), data_of("meeting"))
    tool.data = {}
    launch(kernels["meeting"], memory, threads=64)
    print(cu.status("cuCtxSynchronize"))
    """
    found = client(GRAPH + textwrap.dedent(code), hostile).splitlines()
    assert found[0] == "128 64"
    assert (int(found[1]) != 0) == hostile


def test_launches_of_several_streams_have_their_own_data() -> None:
    code = """
    streams = [cu.handle("cuStreamCreate", 1) for _ in range(4)]
    slots = [memory.value + 16384 + 8 * k for k in range(40)]
    for k, slot in enumerate(slots):
        tool.data = {"work": slot}
        launch(kernels["work"], memory, threads=32 + k, stream=streams[k % 4])
    cu.cuCtxSynchronize()
    found = (ctypes.c_uint64 * len(slots))()
    cu.cuMemcpyDtoH_v2(found, ctypes.c_void_p(slots[0]), ctypes.c_size_t(8 * len(slots)))
    assert list(found) == [32 + k for k in range(40)], list(found)
    assert sum(tool.counts(modules["work"], "work").values()) == sum(found)
    assert len({grid for *_, grid in tool.launches}) == 40
    """
    client(GRAPH + textwrap.dedent(code), True)


def test_contexts_have_their_own_patches() -> None:
    code = """
    tool = Tool(cu)
    tool.patch_modules({2: "onPc"})
    first = cu.context.value
    modules = {first: cu.module(WORK)}
    second = cu.handle("cuCtxCreate_v4", None, 0, 0).value
    modules[second] = cu.module(WORK)
    memories = {first: memory, second: cu.memory(1 << 16)}
    for context, threads in ((first, 32), (second, 33)):
        cu.cuCtxSetCurrent(ctypes.c_void_p(context))
        launch(cu.function(modules[context], "work"), memories[context], threads=threads)
        cu.cuCtxSynchronize()
        print(sum(tool.counts(modules[context], "work", context).values()))
        pc, size = ctypes.c_uint64(), ctypes.c_uint64()
        arguments = ctypes.c_void_p(context), b"onPc", ctypes.byref(pc), ctypes.byref(size)
        tool.call("sanitizerGetCallbackPcAndSize", *arguments)
        assert pc.value and size.value
    cu.cuCtxDestroy_v2(ctypes.c_void_p(second))
    print(tool.status("sanitizerPatchInstructions", 2, modules[first], b"onPc"))
    """
    assert client(code, True) == "32\n33\n0\n"


@pytest.mark.parametrize("hostile", [False, True])
def test_unloading_gives_program_counters_back(hostile: bool) -> None:
    """In hostile mode the next module gets them. A module stays where it is."""
    code = """
    tool = Tool(cu)
    tool.patch_modules({2: "onPc"})
    places = []
    for _ in range(2):
        module = cu.module(WORK)
        launch(cu.function(module, "work"), memory)
        places.append(tool.place(module, "work"))
        assert tool.place(module, "work") == places[-1]
        cu.cuModuleUnload(module)
    assert len(tool.loaded) == len(tool.unloaded) == 2
    print(places[0] == places[1], places[0][0] % 128, places[0][1])
    """
    assert client(code, hostile) == f"{hostile} 0 {16 * 16}\n"


@pytest.mark.parametrize("hostile", [False, True])
def test_functions_are_loaded_at_their_first_use(hostile: bool) -> None:
    """The subscriber learns of it once. In hostile mode a function has no place before."""
    code = """
    tool = Tool(cu)
    tool.patch_modules({2: "onPc"})
    module = cu.module(WORK)
    work = cu.function(module, "work")
    pc = (ctypes.c_uint64 * 2)()
    arguments = module, b"work", ctypes.byref(pc), ctypes.byref(pc, 8)
    print(tool.lazy, tool.status("sanitizerGetFunctionPcAndSize", *arguments))
    cu.cuFuncLoad(work)
    launch(work, memory)
    print([(callback, function == work.value) for callback, function in tool.lazy])
    print(tool.status("sanitizerGetFunctionPcAndSize", *arguments))
    """
    assert client(code, hostile) == f"[] {int(hostile)}\n[(24, True), (25, True)]\n0\n"


def test_a_late_subscriber_patches_and_unpatches_a_running_program() -> None:
    code = """
    module = cu.module(WORK)
    work = cu.function(module, "work")
    launch(work, memory)
    tool = Tool(cu)
    tool.wanted = {2: "onPc"}
    tool.patch(module.value, cu.context.value)
    launch(work, memory)
    cu.cuCtxSynchronize()
    print(sum(tool.counts(module, "work").values()), len(tool.loaded))
    tool.call("sanitizerUnpatchModule", module)
    launch(work, memory)
    cu.cuCtxSynchronize()
    print(sum(tool.counts(module, "work").values()), len(tool.launches))
    other = ctypes.c_void_p()
    print(tool.status("sanitizerSubscribe", ctypes.byref(other), tool._callback, None))
    tool.call("sanitizerUnsubscribe", tool.handle)
    launch(work, memory)
    print(len(tool.launches), tool.status("sanitizerSubscribe", ctypes.byref(other), tool._callback, None))
    """
    assert client(code, True) == "64 0\n64 2\n10\n2 0\n"


def test_a_patch_that_returns_an_error_ends_its_threads() -> None:
    code = """
    tool = Tool(cu)
    text = HEAD + ".visible .func (.param .b32 r) stop(.param .b64 d, .param .b64 pc) { .reg .b32 %t; .reg .pred %p;"
    text += "mov.u32 %t, %tid.x; setp.lt.u32 %p, %t, 10; selp.u32 %t, 1, 0, %p; st.param.b32 [r], %t; ret; }"
    tool.call("sanitizerAddPatches", text.encode(), cu.context)
    tool.patch_modules({1: "stop", 2: "onPc"})
    module = cu.module(WORK)
    launch(cu.function(module, "work"), memory)
    cu.cuCtxSynchronize()
    print(sum(tool.counts(module, "work").values()))
    """
    assert client(code) == "54\n"


def test_addresses_of_functions_and_variables_of_patches() -> None:
    """A pointer to a function leads to its patched code. Patches of all modules of a context share their variables."""
    code = """
    tool = Tool(cu)
    text = HEAD + ".global .u64 total; .visible .func (.param .b32 r) add(.param .b64 d, .param .b64 pc)"
    text += "{ .reg .b64 %v; atom.global.add.u64 %v, [total], 1; add.u64 %v, %v, 1; st.global.u64 [SEEN], %v; "
    text = text.replace("SEEN", str(memory.value + 4096)) + "st.param.b32 [r], 0; ret; }"
    tool.call("sanitizerAddPatches", text.encode(), cu.context)
    tool.patch_modules({10: "add", 2: "add"})
    for k in range(2):
        launch(cu.function(cu.module(POINTERS), "pointers"), memory, threads=8)
    cu.cuCtxSynchronize()
    found = ctypes.c_uint64(), ctypes.c_uint64()
    for cell, at in zip(found, (0, 4096)):
        cu.cuMemcpyDtoH_v2(ctypes.byref(cell), ctypes.c_void_p(memory.value + at), ctypes.c_size_t(8))
    print(found[0].value)
    tool.patch_modules({2: "add"})
    launch(cu.function(cu.module(POINTERS), "pointers"), memory, threads=1)
    cu.cuCtxSynchronize()
    cu.cuMemcpyDtoH_v2(ctypes.byref(found[1]), ctypes.c_void_p(memory.value + 4096), ctypes.c_size_t(8))
    print(found[1].value)  # a return and an exit of 16 threads, an exit of one
    """
    assert client(code, True) == "42\n33\n"


def test_what_does_not_fit_is_refused() -> None:
    code = """
    tool = Tool(cu)
    module = cu.module(WORK)
    print(tool.status("sanitizerPatchInstructions", 2, module, b"onPc"))  # not added yet
    tool.table(cu.context.value)
    print(tool.status("sanitizerPatchInstructions", 99, module, b"onPc"))
    print(tool.status("sanitizerPatchInstructions", 2, ctypes.c_void_p(8), b"onPc"))
    print(tool.status("sanitizerPatchInstructions", 3, module, b"onPc"), tool.status("sanitizerPatchModule", module))
    print(tool.status("sanitizerAddPatches", b"no image at all, but text", cu.context))
    print(tool.status("sanitizerEnableDomain", 1, tool.handle, 14), tool.status("sanitizerEnableDomain", 1, None, 3))
    text = ctypes.c_char_p()
    tool.call("sanitizerGetResultString", 10, ctypes.byref(text))
    print(tool.status("sanitizerGetResultString", 77, ctypes.byref(text)), bool(text.value))
    """
    assert client(code, True).split("\n") == ["1", "1", "1", "0 1", "1", "4 1", "1 True", ""]


def test_patches_in_a_cubin(tmp_path: Path) -> None:
    """As ptxas compiles them for NVIDIA's library; -lineinfo keeps the PTX."""
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("no ptxas here; script/setup --dev installs one")
    source, cubin = tmp_path / "patches.ptx", tmp_path / "patches.cubin"
    source.write_text(
        HEAD
        + """.visible .func (.param .b32 r) add(.param .b64 data, .param .b64 pc)
        { .reg .b64 %p; ld.param.b64 %p, [data]; red.global.add.u64 [%p], 1; st.param.b32 [r], 0; ret; }"""
    )
    options = ["-arch=sm_90", "--compile-as-tools-patch", "-lineinfo"]
    subprocess.run([ptxas, *options, str(source), "-o", str(cubin)], check=True)
    code = f"""
    tool = Tool(cu)
    tool.call("sanitizerAddPatchesFromFile", {str(cubin)!r}.encode(), cu.context)
    tool.patch_modules({{2: "add"}})
    tool.table = lambda context: 0
    tool.data = {{"work": memory.value + 4096}}
    launch(cu.function(cu.module(WORK), "work"), memory)
    cu.cuCtxSynchronize()
    found = ctypes.c_uint64()
    cu.cuMemcpyDtoH_v2(ctypes.byref(found), ctypes.c_void_p(memory.value + 4096), ctypes.c_size_t(8))
    print(found.value)
    """
    assert client(code, True) == "64\n"


def test_copies_matrices_the_heap_and_clusters() -> None:
    code = """
    names = {9: "onCall", 11: "onMalloc", 12: "onFree", 14: "onCopy", 15: "onPc", 16: "onMask", 19: "onMatrix", 20: "onCall"}
    tool = Tool(cu)
    tool.patch_modules({**names, 21: "onPc", 22: "onPc", 40: "onPc"})
    module = cu.module(OTHERS)
    launch(cu.function(module, "others"), memory, threads=32)
    cu.cuCtxSynchronize()
    records = tool.records(module, "others")
    print(records[16][2] == records[19][2] != 0)
    for at, words in records.items():
        words[2] -= memory.value if at == 9 else words[2] if at in (16, 19) else 0
        words[1] -= memory.value if at in (2, 3) else 0
        print(at, *words[:5])
    """
    lines = client(code).splitlines()
    assert lines[0] == "True"  # what malloc returned is freed
    found = {int(line.split()[0]): [int(word) for word in line.split()[1:]] for line in lines[1:]}
    tile = found[3][2]
    assert found == {
        2: [32, 32, tile + 16, 16, 0],  # source, destination, size, zeros
        3: [32, 64, tile, 8, 3],
        4: [32, 0, 0, 0, 0],
        5: [32, 0, 0, 0, 0],
        6: [32, 0, tile, 1, 2],  # row, flags, matrices
        8: [32, 1234, tile + 512, 2, 1],
        9: [32, 0, 128, 0, 0],
        10: [32, 0, 0, 0, 0],
        11: [64, 0, 0, 0, 0],  # before and after
        16: [1, 0, 0, 48, 0],
        19: [1, 0, 0, 0, 0],
    }


def test_bulk_copies() -> None:
    """Sizes are blocks of 16 bytes."""
    code = """
    tool = Tool(cu)
    tool.patch_modules({30: "onBulkLoad", 35: "onCopy", 37: "onReduction"})
    module = cu.module(BULK)
    launch(cu.function(module, "bulk"), memory)
    cu.cuCtxSynchronize()
    for at, words in tool.records(module, "bulk").items():
        print(at, words[0], words[1] - memory.value, *words[2:5])
    """
    found = {
        int(line.split()[0]): [int(word) for word in line.split()[1:]] for line in client(code).splitlines()
    }
    tile = found[9][2]
    assert found[8][:3] == [1, 256, tile] and found[8][4] == 4  # source, destination, barrier, blocks
    assert found[9] == [1, 1024, tile, 3, 0]  # destination, source, blocks, mask
    assert found[10] == [1, 2048, tile, 1, 0]
    assert len(found) == 3


# Of the package nvidia-cuda-sanitizer-api 13.5, on x86-64: the offset of each member and the size, in bytes.
LAYOUTS = {
    "ResourceContextData": {"context": 0, "greenContext": 8, "device": 16, "": 24},
    "ResourceStreamData": {"context": 0, "greenContext": 8, "stream": 16, "hStream": 24, "": 32},
    "ResourceModuleData": {"context": 0, "module": 8, "cubinSize": 16, "pCubin": 24, "library": 32, "": 40},
    "ResourceFunctionsLazyLoadedData": {"context": 0, "module": 8, "functions": 16, "numFunctions": 24, "": 32},
    "SynchronizeData": {"context": 0, "stream": 8, "hStream": 16, "greenContext": 24, "": 32},
    "LaunchData": dict(
        zip(
            "context stream hStream module function functionName gridDim_x gridDim_y gridDim_z blockDim_x blockDim_y blockDim_z "
            "clusterDim_x clusterDim_y clusterDim_z gridId hLaunch device apiContext apiStream hApiStream splitLaunchPart ".split(
                " "
            ),
            [0, 8, 16, 24, 32, 40, 48, 52, 56, 60, 64, 68, 72, 76, 80, 88, 96, 104, 112, 120, 128, 136, 144],
            strict=True,
        )
    ),
    "GraphExecData": {
        "graph": 0, "graphExec": 8, "isDeviceLaunch": 16, "containsDeviceGraphLaunches": 20, "deviceGraphLaunchesContext": 24, "": 32,
    },
    "GraphNodeLaunchData": {
        "graphExec": 0, "launchId": 8, "node": 16, "nodeType": 24, "launchData": 32, "isGraphUpload": 176, "": 184,
    },
    "GraphLaunchData": {"context": 0, "stream": 8, "hStream": 16, "graphExec": 24, "isGraphUpload": 32, "": 40},
}  # fmt: skip


def test_cupti_and_the_library_exclude_each_other() -> None:
    code = """
    subscribe = ctypes.CDLL(str(libraries() / "libcuda.so.1")).cudasim_cupti
    subscribe.argtypes, subscribe.restype = [ctypes.c_bool], ctypes.c_bool
    tool = Tool(cu)
    print(subscribe(True))
    tool.call("sanitizerUnsubscribe", tool.handle)
    print(subscribe(True), tool.status("sanitizerSubscribe", ctypes.byref(tool.handle), tool._callback, None))
    print(subscribe(False), tool.status("sanitizerSubscribe", ctypes.byref(tool.handle), tool._callback, None))
    """
    assert client(code, True) == "False\nTrue 10\nTrue 0\n"


def layout_checks(prefix: str) -> str:
    checks = []
    for structure, members in LAYOUTS.items():
        for name, at in members.items():
            size = f"offsetof({prefix}{structure}, {name})" if name else f"sizeof({prefix}{structure})"
            checks.append(f'static_assert({size} == {at}, "{prefix}{structure} {name}");')
    return "\n".join(checks)


def exported(name: str) -> set[str]:
    command = ["nm", "-D", "--defined-only", str(libraries() / name)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in output.splitlines()}


def compile_checks(text: str, *includes: Path | str) -> None:
    options = [f"-I{directory}" for directory in (*includes, cuda_include())]
    done = subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", *options, "-"],
        input=text,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr


def test_structures_are_those_of_the_library() -> None:
    text = (
        '#include <cstddef>\n#include "sanitizer/api.h"\nusing namespace cudasim::sanitizer;\n'
        + layout_checks("")
    )
    compile_checks(text, CUDASIM / "src")
    declared = set(re.findall(r"^struct (\w+) \{", (CUDASIM / "src/sanitizer/api.h").read_text(), re.M))
    assert declared == set(LAYOUTS)


def test_nvidias_headers_agree() -> None:
    """The recorded layouts and numbers are those of the newest headers, and the stand-in has every function."""
    found = [Path(p) / "sanitizer.h" for p in sanitizer_headers() if (Path(p) / "sanitizer.h").exists()]
    if not found:
        pytest.skip(
            "pip install nvidia-cuda-sanitizer-api, and set SANITIZER_INCLUDE to the folder of sanitizer.h"
        )
    text = "#include <cstddef>\n#include <sanitizer.h>\n" + layout_checks("Sanitizer_")
    numbers = {
        "SANITIZER_CBID_RESOURCE_MODULE_LOADED": 9,
        "SANITIZER_CBID_RESOURCE_MODULE_UNLOAD_STARTING": 10,
        "SANITIZER_CBID_RESOURCE_FUNCTIONS_LAZY_LOADED": 24,
        "SANITIZER_CBID_RESOURCE_FUNCTIONS_LAZY_PATCHED": 25,
        "SANITIZER_CBID_LAUNCH_BEGIN": 1,
        "SANITIZER_CBID_LAUNCH_AFTER_SYSCALL_SETUP": 2,
        "SANITIZER_CBID_LAUNCH_END": 3,
        "SANITIZER_CBID_GRAPHS_NODE_LAUNCH_BEGIN": 4,
        "SANITIZER_CBID_GRAPHS_NODE_LAUNCH_END": 5,
        "SANITIZER_CB_DOMAIN_SIZE": 14,
        "SANITIZER_CB_DOMAIN_GRAPHS": 10,
        "SANITIZER_ERROR_MAX_LIMIT_REACHED": 10,
        "SANITIZER_INSTRUCTION_MATRIX_MEMORY_ACCESS": patches.MATRIX,
        "SANITIZER_INSTRUCTION_BARRIER_RELEASE": patches.BARRIER_RELEASE,
        "SANITIZER_INSTRUCTION_CLUSTER_BARRIER_WAIT_ENTRY": patches.CLUSTER_WAIT_ENTRY,
        "SANITIZER_INSTRUCTION_CLUSTER_LAUNCH_CONTROL": 47,
    }
    text += "".join(f'\nstatic_assert({name} == {value}, "{name}");' for name, value in numbers.items())
    compile_checks(text, found[0].parent)
    declared = re.findall(
        r"SANITIZERAPI (sanitizer\w+)\(", "".join(p.read_text() for p in found[0].parent.glob("*.h"))
    )
    assert set(declared) == exported("libsanitizer-public.so")


def sanitizer_headers() -> list[str]:
    """Folders that may have NVIDIA's headers."""
    named = os.environ.get("SANITIZER_INCLUDE")
    packages = [Path(p) / "nvidia/cu13/compute-sanitizer/include" for p in sys.path]
    return [*([named] if named else []), *map(str, packages)]

"""What a kernel does wrong ends its launch with a fault that says where; the process goes on."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from engine_device import Array, Device, DeviceFault, TranslateFailure, compile_cuda, nvcc

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"

KERNELS = (
    HEAD
    + """
.extern .func __assertfail(.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);
.extern .shared .align 16 .b8 dynamic[];
.shared .align 4 .b8 fixed[64];
.global .align 1 .b8 text[5] = {111, 111, 112, 115, 0};
.visible .entry store(.param .u64 address, .param .u32 who) {
  .reg .b64 %rd<3>; .reg .b32 %r<9>; .reg .pred %p;
  ld.param.u64 %rd1, [address];
  ld.param.u32 %r1, [who];
  mov.u32 %r2, %tid.x; mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x;
  mad.lo.u32 %r5, %r3, %r4, %r2;
  setp.ne.u32 %p, %r5, %r1;
  @%p bra done;
  st.global.u32 [%rd1], %r5;
done:
  ret;
}
.visible .entry load_generic(.param .u64 address, .param .u64 out) {
  .reg .b64 %rd<3>; .reg .b32 %r1;
  ld.param.u64 %rd1, [address]; ld.param.u64 %rd2, [out];
  ld.u32 %r1, [%rd1];
  st.u32 [%rd2], %r1;
  ret;
}
.visible .entry add(.param .u64 address) {
  .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [address];
  red.global.add.u64 [%rd1], 1;
  ret;
}
.visible .entry shared_at(.param .u32 offset) {
  .reg .b32 %r<4>;
  ld.param.u32 %r1, [offset];
  mov.u32 %r2, fixed;
  add.u32 %r1, %r1, %r2;
  st.shared.u32 [%r1], 7;
  mov.u32 %r3, dynamic;
  ld.shared.u8 %r3, [%r3];
  ret;
}
.visible .entry local_at(.param .u32 offset) {
  .local .align 8 .b8 mine[32];
  .reg .b64 %rd<4>; .reg .b32 %r1;
  ld.param.u32 %r1, [offset];
  cvt.u64.u32 %rd1, %r1;
  mov.u64 %rd2, mine;
  add.u64 %rd2, %rd2, %rd1;
  st.local.u32 [%rd2], 7;
  ret;
}
.visible .entry assert() {
  .reg .b64 %rd1;
  mov.u64 %rd1, text;
  { .param .b64 a; .param .b64 b; .param .b32 c; .param .b64 d; .param .b64 e;
    st.param.b64 [a], %rd1; st.param.b64 [b], %rd1; st.param.b32 [c], 12; st.param.b64 [d], %rd1; st.param.b64 [e], 1;
    call.uni __assertfail, (a, b, c, d, e); }
  ret;
}
.visible .entry traps() {
  .reg .pred %p; .reg .b32 %r1;
  mov.u32 %r1, %tid.x;
  setp.eq.u32 %p, %r1, 33;
  @%p trap;
  ret;
}
.visible .entry deadlock() {
  .reg .pred %p; .reg .b32 %r1;
  mov.u32 %r1, %tid.x;
  setp.lt.u32 %p, %r1, 32;
  @%p bra first;
  bar.sync 1, 128;
  ret;
first:
  bar.sync 2, 128;
  ret;
}
.func (.param .b32 r) deeper(.param .b32 n) {
  .reg .b32 %r<3>;
  ld.param.b32 %r1, [n];
  add.u32 %r1, %r1, 1;
  { .param .b32 a; .param .b32 b; st.param.b32 [a], %r1; call (b), deeper, (a); ld.param.b32 %r2, [b]; }
  st.param.b32 [r], %r2;
  ret;
}
.visible .entry endless() {
  { .param .b32 a; .param .b32 b; st.param.b32 [a], 0; call (b), deeper, (a); }
  ret;
}
.visible .entry call_at(.param .u64 where) {
  .reg .b64 %rd1;
  ld.param.u64 %rd1, [where];
  proto: .callprototype _ ();
  call %rd1, (), proto;
  ret;
}
.visible .entry wait_for(.param .u64 flag, .param .u64 other) {
  .reg .b64 %rd<3>; .reg .b32 %r1; .reg .pred %p;
  ld.param.u64 %rd1, [flag]; ld.param.u64 %rd2, [other];
  st.volatile.global.u32 [%rd2], 1;
again:
  ld.volatile.global.u32 %r1, [%rd1];
  setp.eq.u32 %p, %r1, 0;
  @%p bra again;
  ret;
}
"""
)


@pytest.fixture(scope="module")
def device() -> Device:
    return Device(KERNELS)


def line_of(text: str, after: str = "") -> int:
    lines = KERNELS.splitlines()
    begin = next((k for k, line in enumerate(lines) if after in line), 0)
    return next(k for k in range(begin, len(lines)) if text in lines[k]) + 1


def test_stray_store_names_address_thread_and_line(device: Device) -> None:
    with pytest.raises(DeviceFault) as caught:
        device.launch("store", 4, 64, 0x1234560, np.uint32(64 * 2 + 40))
    fault = caught.value
    assert fault.code == 700
    assert (fault.address, fault.block, fault.thread) == (0x1234560, (2, 0, 0), (40, 0, 0))
    assert fault.line == line_of("st.global.u32 [%rd1], %r5")
    assert "illegal address: write of 4 bytes at 0x1234560 in store, block (2,0,0) thread (40,0,0)" in str(
        fault
    )


@pytest.mark.parametrize(
    ("kernel", "where"), [("with_lines", "/home/me/a b.cu:8, PTX line 15"), ("without", " PTX line 22")]
)
def test_a_fault_names_the_source_line_of_its_function_only(kernel: str, where: str) -> None:
    store = "  .reg .b64 %rd; ld.param.u64 %rd, [address];\n"
    lines = Device(
        HEAD
        + """.file 1 "/home/me/other.cu"
.file 2 "/home/me/a b.cu", 1700000000, 120
.visible .entry with_lines(.param .u64 address) {
  .reg .b32 %r;
"""
        + store
        + """  .loc 1 3 0
  mov.u32 %r, 1;
  .loc\t2 7 5
  .loc 2 8 9, function_name $L__info, inlined_at 2 20 3

  /* no line */
  st.global.u32 [%rd], %r;
  .loc 2 9 1
  ret;
}
.visible .entry without(.param .u64 address) {
"""
        + store
        + """
  st.global.u32 [%rd], 5;
  ret;
}
"""
    )
    with pytest.raises(DeviceFault) as caught:
        lines.launch(kernel, 1, 1, 0x1234560)
    assert str(caught.value).endswith(where) and ("a b.cu" in str(caught.value)) == (kernel == "with_lines")


def test_null_pointer(device: Device) -> None:
    with pytest.raises(DeviceFault) as caught:
        device.launch("load_generic", 1, 1, 0, 0)
    assert caught.value.code == 700


def test_unmapped_page_of_the_region(device: Device) -> None:
    a = Array(np.zeros(4, np.int32))
    with pytest.raises(DeviceFault) as caught:
        device.launch("store", 1, 1, a.address + (1 << 30), np.uint32(0))
    assert caught.value.code == 700
    assert caught.value.address == a.address + (1 << 30)
    assert ": write" in str(caught.value)
    device.launch("store", 1, 64, a, np.uint32(63))  # the engine goes on
    assert a.host[0] == 63


def test_host_memory_is_not_device_memory(device: Device) -> None:
    host = np.zeros(4, np.int32)
    with pytest.raises(DeviceFault) as caught:
        device.launch("store", 1, 1, host.ctypes.data, np.uint32(0))
    assert caught.value.code == 700
    assert host[0] == 0


@pytest.mark.parametrize(("kernel", "offset"), [("store", 2), ("load_generic", 1), ("add", 4)])
def test_misaligned(device: Device, kernel: str, offset: int) -> None:
    a = Array(np.zeros(4, np.int64))
    arguments = {"store": (np.uint32(0),), "load_generic": (a,), "add": ()}[kernel]
    with pytest.raises(DeviceFault) as caught:
        device.launch(kernel, 1, 1, a.address + offset, *arguments)
    assert caught.value.code == 716


def test_shared_memory_has_an_end(device: Device) -> None:
    device.launch("shared_at", 1, 1, np.uint32(60), shared=64)
    device.launch("shared_at", 1, 1, np.uint32(124), shared=64)
    for offset in (128, 1 << 20, 2**32 - 4):
        with pytest.raises(DeviceFault) as caught:
            device.launch("shared_at", 1, 1, np.uint32(offset), shared=64)
        assert caught.value.code == 700
    with pytest.raises(DeviceFault):
        device.launch("shared_at", 1, 1, np.uint32(0))  # no dynamic memory: reading it is a fault


def test_local_memory_has_an_end(device: Device) -> None:
    device.launch("local_at", 1, 40, np.uint32(28))
    with pytest.raises(DeviceFault) as caught:
        device.launch("local_at", 1, 40, np.uint32(32))
    assert caught.value.code == 700


def test_assert(device: Device, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DeviceFault) as caught:
        device.launch("assert", 1, 1)
    assert caught.value.code == 710
    assert "oops:12: oops: block: [0,0,0], thread: [0,0,0] Assertion `oops` failed." in capfd.readouterr().err


def test_trap(device: Device) -> None:
    with pytest.raises(DeviceFault) as caught:
        device.launch("traps", 1, 64)
    assert caught.value.code == 719
    assert caught.value.thread == (33, 0, 0)


def test_deadlock_is_reported(device: Device) -> None:
    with pytest.raises(DeviceFault, match="deadlock") as caught:
        device.launch("deadlock", 1, 64)
    assert caught.value.code == 719


def test_endless_recursion_overflows_the_stack(device: Device) -> None:
    with pytest.raises(DeviceFault, match="stack overflow"):
        device.launch("endless", 1, 64, stack=4096)


def test_call_of_no_function(device: Device) -> None:
    with pytest.raises(DeviceFault) as caught:
        device.launch("call_at", 1, 1, 0xDEADBEE0)
    assert caught.value.code == 718


def test_grids_that_wait_for_each_other_overlap(device: Device) -> None:
    flags = Array(np.zeros(2, np.int32))
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        first = threads.submit(device.launch, "wait_for", 4, 64, flags.address, flags.address + 4)
        second = threads.submit(device.launch, "wait_for", 4, 64, flags.address + 4, flags.address)
        first.result(20)
        second.result(20)


def test_host_ends_a_waiting_kernel(device: Device) -> None:
    flags = Array(np.zeros(2, np.int32))
    thread = threading.Thread(
        target=device.launch, args=("wait_for", 8, 32, flags.address, flags.address + 4)
    )
    thread.start()
    deadline = time.time() + 10
    while not flags.host[1] and time.time() < deadline:
        time.sleep(0.001)
    flags.host[0] = 1
    thread.join(60)
    assert not thread.is_alive()


def test_handlers_of_the_application_still_work() -> None:
    """A fault outside of kernels reaches the application's own handler, or ends the process as ever."""
    text = (
        "import sys, ctypes; from engine_device import *; import test_engine_faults as t\n"
        "d = Device(t.KERNELS)\n"
        "try: d.launch('store', 1, 1, 0x10000, np.uint32(0)); sys.exit(3)\n"
        "except DeviceFault: pass\n"
        "import faulthandler; faulthandler.enable()\n"
        "try: d.launch('store', 1, 1, 0x10000, np.uint32(0)); sys.exit(3)\n"
        "except DeviceFault: pass\n"
        "ctypes.string_at(16)\n"
    )
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -11, done.stderr
    assert "Segmentation fault" in done.stderr


def test_fork(device: Device) -> None:
    """The child has no worker threads; the engine starts its own."""
    a = Array(np.zeros(1, np.int32))
    device.launch("store", 64, 64, a, np.uint32(4000))
    child = os.fork()
    if child == 0:
        try:
            a.host[0] = 0
            device.launch("store", 64, 64, a, np.uint32(77))
            os._exit(0 if a.host[0] == 77 else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "tcgen05.shift.cta_group::1.down [0];",
            "PTX line 6: the embedded device does not support tcgen05.shift.cta_group::1.down",
        ),
        (
            ".reg .b32 %r; tex.1d.v4.f32.s32 {%r, %r, %r, %r}, [t, {%r}];",
            "does not support tex.1d.v4.f32.s32",
        ),
        ("call gone, ();", "PTX line 6: function gone is not defined in this module"),
    ],
)
def test_a_kernel_that_cannot_be_translated_spares_the_others(body: str, message: str) -> None:
    extern = ".extern .func gone();\n"
    other = ".visible .entry other(.param .u64 p) { .reg .b64 a; ld.param.u64 a, [p]; st.global.u32 [a], 7; ret; }"
    device = Device(HEAD + extern + ".visible .entry k() {\n" + body + "\nret; }\n" + other)
    with pytest.raises(DeviceFault) as caught:
        device.launch("k", 1, 1)
    assert message in str(caught.value)
    a = Array(np.zeros(1, np.uint32))
    device.launch("other", 1, 1, a)
    assert a.host[0] == 7


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (".reg .b32 %r; mov.u32 %r, %nosuch;", "PTX line 5: %nosuch is not declared"),
        ("bra nowhere;", "there is no label nowhere"),
        ("add.u32 %r1 %r2;", "PTX line 5"),
    ],
)
def test_what_cannot_be_translated_is_named(body: str, message: str) -> None:
    with pytest.raises(TranslateFailure) as caught:
        Device(HEAD + ".visible .entry k() {\n" + body + "\nret; }")
    assert caught.value.code == 218
    assert message in str(caught.value)


def test_text_that_is_not_ptx() -> None:
    with pytest.raises(TranslateFailure) as caught:
        Device("int main() { return 0; }")
    assert caught.value.code == 218


STACK = r"""
__device__ __noinline__ int fill(int n, int depth)
{
    int *mine = (int *)alloca(n * sizeof(int)), sum = 0;
    for (int k = 0; k < n; k++) mine[k] = k + depth;
    if (depth) sum = fill(n + 1, depth - 1);
    for (int k = 0; k < n; k++) sum += mine[k];
    return sum;
}
extern "C" __global__ void allocates(int *out, int n)
{
    int sum = 0;
    for (int turn = 0; turn < 50; turn++)
        sum = fill(threadIdx.x % n, threadIdx.x % 3);  // given back at each return
    out[threadIdx.x] = sum;
}
"""


@pytest.mark.skipif(nvcc() is None, reason="nvcc is not installed")
@pytest.mark.parametrize("virtual", [False, True])
def test_memory_allocated_on_the_stack(virtual: bool) -> None:
    device = Device(compile_cuda(STACK), virtual)
    out = Array(np.zeros(64, np.int32))
    device.launch("allocates", 1, 64, out, np.int32(20), stack=4096)

    def expected(n: int, depth: int) -> int:
        return sum(k + depth for k in range(n)) + (expected(n + 1, depth - 1) if depth else 0)

    assert out.host.tolist() == [expected(t % 20, t % 3) for t in range(64)]
    with pytest.raises(DeviceFault) as caught:
        device.launch("allocates", 1, 64, out, np.int32(64), stack=128)
    assert caught.value.code == 719


def test_functions_of_different_modules_have_different_addresses() -> None:
    """A function of another module cannot be called, instead of one of this module being taken for it."""
    texts = [
        f"{HEAD}.func f{n}() {{ ret; }}\n.visible .global .u64 table = f{n};\n"
        ".visible .entry address(.param .u64 out) { .reg .b64 %rd<3>; ld.param.u64 %rd1, [out];"
        f" mov.u64 %rd2, f{n}; st.u64 [%rd1], %rd2; ret; }}\n"
        ".visible .entry calls(.param .u64 f) { .reg .b64 %rd<2>; ld.param.u64 %rd1, [f];"
        " t: .callprototype _ (); call %rd1, (), t; ret; }"
        for n in range(2)
    ]
    devices = [Device(text) for text in texts]
    addresses = []
    for device in devices:
        out = Array(np.zeros(1, np.uint64))
        device.launch("address", 1, 1, out)
        assert out.host[0] == device.variable("table", np.uint64, (1,))[0]
        addresses.append(int(out.host[0]))
    assert addresses[0] != addresses[1]
    devices[0].launch("calls", 1, 1, addresses[0])
    with pytest.raises(DeviceFault, match="not a function of this module"):
        devices[0].launch("calls", 1, 1, addresses[1])

"""Host memory that the GPU writes to, and what it holds after a trap or a kill."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
import time
from pathlib import Path

from gpu.driver import CU_MEMHOSTREGISTER_DEVICEMAP, PTX, PUT, Driver
from gpu.questions.asking import Answer, alone, die_with_parent, question, reap


def _register(driver: Driver, file: int, size: int) -> Answer:
    """Map and register a file, let the GPU write to it, and read it through another mapping."""
    mapped, other = mmap.mmap(file, size), mmap.mmap(file, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    code = driver.call("cuMemHostRegister_v2", address, size, CU_MEMHOSTREGISTER_DEVICEMAP)
    if code:
        return {"register": driver.name(code)}
    target = driver.handle("cuMemHostGetDevicePointer_v2", address, 0)
    put = driver.kernel(PUT, "put")
    code = driver.launch(put, [target + 8, 4711]) or driver.call("cuCtxSynchronize")
    seen = struct.unpack_from("<Q", other, 8)[0]
    driver.must("cuMemHostUnregister", address)
    return {"register": "CUDA_SUCCESS", "launch": driver.name(code), "seen": seen == 4711}


@question(
    "does cuMemHostRegister take a mapped BPF array, and a mapped memfd?",
    "yes, both: an mmapable BPF array passes long-term pinning; what the GPU writes is seen in the kernel's map",
)
def host_register() -> Answer:
    sys.path.append(str(Path(__file__).resolve().parents[3] / "lib"))
    from gpubpf.kernel import bpf_syscall

    driver = Driver().open()
    file = os.memfd_create("question")
    os.ftruncate(file, 1 << 16)
    found = {"memfd": _register(driver, file, 1 << 16)}
    try:
        array = bpf_syscall.create_map(bpf_syscall.ARRAY, 4, 8, 8192, bpf_syscall.MMAPABLE, "question")
        found["BPF array"] = _register(driver, array, 1 << 16)
        value = bpf_syscall.lookup(array, struct.pack("<I", 1), 8)
        found["BPF array"]["bpf(2) reads"] = struct.unpack("<Q", value)[0] if value else None
    except OSError as error:
        found["BPF array"] = {"register": f"there is no BPF here ({error.strerror})"}
    used = [name for name, of in found.items() if of.get("seen")]
    lacking = [f"a {name} ({_why(of)})" for name, of in found.items() if not of.get("seen")]
    said = [f"the GPU can use a {' and a '.join(used)}"] if used else []
    said += [f"the GPU cannot use {' and '.join(lacking)}"] if lacking else []
    return {
        "answer": "; ".join(said),
        "agrees": None if "no BPF" in found["BPF array"]["register"] else not lacking,
        "found": found,
    }


def _why(of: Answer) -> str:
    """Return why registered memory cannot be used."""
    refused = [of[what] for what in ("register", "launch") if of.get(what, "CUDA_SUCCESS") != "CUDA_SUCCESS"]
    return str((refused or ["what it writes is not seen"])[0])


RING = (
    PTX
    + """
.visible .entry fill(.param .u64 ring, .param .u64 count, .param .u64 end) {
    .reg .pred %p<3>; .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [ring];
    ld.param.u64 %rd2, [count];
    ld.param.u64 %rd3, [end];
    mov.u64 %rd4, 0;
again:
    add.u64 %rd4, %rd4, 1;
    st.volatile.global.u64 [%rd1+8], %rd4;
    membar.sys;
    st.volatile.global.u64 [%rd1], %rd4;
    setp.lt.u64 %p1, %rd4, %rd2;
    @%p1 bra again;
    setp.eq.u64 %p2, %rd3, 1;
    @%p2 trap;
    ret;
}
"""
)


def _fill(file: int, count: int, traps: bool) -> str:
    """Run a kernel that counts up in registered shared memory, and traps at the end if asked. For a child process."""
    driver = Driver().open()
    mapped = mmap.mmap(file, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    driver.must("cuMemHostRegister_v2", address, 4096, CU_MEMHOSTREGISTER_DEVICEMAP)
    target = driver.handle("cuMemHostGetDevicePointer_v2", address, 0)
    code = driver.launch(driver.kernel(RING, "fill"), [target, count, int(traps)])
    if code == 0:
        code = driver.call("cuCtxSynchronize")
    return driver.name(code)


@question(
    "what does a ring in registered host memory hold after a kernel traps?",
    "all that was committed before: host memory outlives the context",
)
def ring_after_trap() -> Answer:
    file = os.memfd_create("ring")
    os.ftruncate(file, 4096)
    said = alone(lambda: _fill(file, 1000, True))
    marked, value = struct.unpack("<QQ", os.pread(file, 16, 0))
    return {
        "answer": f"{said}; {marked} of 1000 records marked, the last written is {value}",
        "agrees": marked == 1000 == value,
    }


@question(
    "what does it hold after SIGKILL, while a kernel writes to it?",
    "all that was committed until the driver stopped the kernel, some time after the death of the process",
    40,
)
def ring_after_kill() -> Answer:
    file = os.memfd_create("ring")
    os.ftruncate(file, 4096)
    child = os.fork()
    if child == 0:
        said = "it ended"
        try:
            die_with_parent()
            said = _fill(file, 1 << 23, False)  # some ten seconds, should nobody stop it
        except Exception as error:
            said = str(error) or type(error).__name__
        finally:
            os.pwrite(file, said.encode()[:1024], 2048)
            os._exit(1)
    ends = time.monotonic() + 15

    def marked() -> int:
        return int(struct.unpack("<Q", os.pread(file, 8, 0))[0])

    def told() -> str:
        return os.pread(file, 1024, 2048).rstrip(b"\0").decode(errors="replace")

    while marked() < 1000 and not told() and time.monotonic() < ends:
        time.sleep(0.005)
    before = marked()
    began = time.monotonic()
    gone = reap(child, kill=True, seconds=15)
    gone_ms = 1000 * (time.monotonic() - began)
    at_death = marked()
    time.sleep(1)
    after, value = struct.unpack("<QQ", os.pread(file, 16, 0))
    if before < 1000:
        return {
            "answer": f"{before} records before it was killed; {told() or 'nothing said'}",
            "agrees": False,
        }
    when = f"when the process was reaped ({gone_ms:.0f} ms)"
    if gone is None:
        when = "15 seconds after SIGKILL, the process still there"
    return {
        "answer": f"{before} records before, {at_death} {when}, {after} a second later",
        "agrees": gone is not None and at_death >= before and 0 <= value - after <= 1,
        "went_on_after_reaping": after > at_death,
    }

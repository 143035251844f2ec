"""Questions about the driver, each asked by itself: `python3 questions.py NAME` prints the answer as one line of JSON.

Runs on any driver that has the functions; no kernel of it runs longer than some seconds by itself.
Exit status 77: cannot be asked here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import mmap
import os
import re
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from gpu.driver import PTX, PUT, PUT_COPY, Driver, DriverError, Spinning, Watched, pointers

AGENT = Path(__file__).resolve().parents[2] / "lib" / "gpubpf" / "agent" / "src"
Answer = dict[
    str, Any
]  # "answer": a sentence; "agrees": with what was believed, None: nothing was; what else was seen


class CannotAsk(Exception):
    """This machine lacks what the question needs."""


@dataclass(frozen=True)
class Question:
    """`believed`: what the code goes by. `seconds`: the process is killed after that."""

    name: str
    text: str
    believed: str
    seconds: float
    ask: Callable[[], Answer]


QUESTIONS: list[Question] = []


def question(
    text: str, believed: str, seconds: float = 20
) -> Callable[[Callable[[], Answer]], Callable[[], Answer]]:
    def register(ask: Callable[[], Answer]) -> Callable[[], Answer]:
        QUESTIONS.append(Question(ask.__name__.replace("_", " "), text, believed, seconds, ask))
        return ask

    return register


def isolated(action: Callable[[], Any], seconds: float = 10) -> Any:
    """What it gives, run in a child of its own (to be called before the driver is): "died by SIGNAL" where it does not end well."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                said = action()
            except DriverError as error:
                said = str(error)
            os.write(writer, json.dumps(said).encode())
        finally:
            os._exit(0)
    os.close(writer)
    said = b""
    ready, _, _ = select.select([reader], [], [], seconds)
    if ready:
        said = os.read(reader, 65536)
    else:
        os.kill(child, signal.SIGKILL)
    os.close(reader)
    _, status = os.waitpid(child, 0)
    if said:
        return json.loads(said)
    return f"died by {signal.Signals(status & 127).name}" if ready else f"no answer in {seconds:.0f} s"


# --- symbols and handles ---


def hooked() -> list[str]:
    """Names of the driver's functions that the agent hooks, from its tables."""
    names = []
    for file in sorted(AGENT.glob("hooks*.def")):
        names += re.findall(r"^GPUBPF_HOOK\((cu[A-Z]\w+)\)", file.read_text(), re.MULTILINE)
    if not names:
        raise CannotAsk("the agent's tables of hooks are not in this checkout")
    return sorted(set(names))


@question(
    "are the driver's exported symbols and what cuGetProcAddress gives one address?",
    "yes, for every function that is hooked: hooks at exported symbols see all calls",
)
def symbols() -> Answer:
    driver = Driver().open()
    found: dict[str, int] = {}
    missing, different = [], {}
    for name in hooked():
        if not driver.has(name):
            missing.append(name)
            continue
        found[name] = ctypes.cast(getattr(driver.library, name), ctypes.c_void_p).value or 0
    bases = {re.sub(r"(_v\d+)?(_pt[sd]z?)?$", "", name) for name in found}
    exported = {address: name for name, address in found.items()}
    for base, version, kind in itertools.product(
        sorted(bases), ("", "_v2", "_v3", "_v4"), ("", "_ptsz", "_ptds")
    ):
        if driver.has(name := base + version + kind):
            address = ctypes.cast(getattr(driver.library, name), ctypes.c_void_p).value or 0
            exported.setdefault(address, name)
    asked, unhooked = 0, set()
    kinds = (1, 2)  # legacy, per-thread default stream
    for base in sorted(bases):
        for release, flag in itertools.product((13000, 12000, 11040, 10000, 8000), kinds):
            pointer, status = ctypes.c_void_p(), ctypes.c_int()
            arguments = (
                ctypes.c_char_p(base.encode()),
                ctypes.byref(pointer),
                release,
                flag,
                ctypes.byref(status),
            )
            if driver.call("cuGetProcAddress_v2", *arguments) == 0 and pointer.value:
                asked += 1
                if pointer.value not in exported:
                    different[f"{base} {release} {'per-thread' if flag == 2 else 'legacy'}"] = hex(
                        pointer.value
                    )
                elif exported[pointer.value] not in found:
                    unhooked.add(exported[pointer.value])
    starts = Counter(bytes((ctypes.c_ubyte * 5).from_address(address)).hex() for address in found.values())
    crossing = [name for name, address in found.items() if address % 16 > 11]
    return {
        "answer": f"{len(found)} exported, {asked} asked of cuGetProcAddress, {len(different)} at other addresses",
        "agrees": not different,
        "other_addresses": dict(list(different.items())[:40]),
        "not_exported": missing,
        "given_but_not_hooked": sorted(unhooked),
        "first_five_bytes": dict(starts.most_common(12)),
        "not_within_16_bytes": crossing,
    }


# (handle, function, rest of the arguments): what is tried with a handle of each kind.
def _tries(driver: Driver) -> dict[str, Callable[[int], int]]:
    text, number, size, offset = ctypes.c_char_p(), ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
    value = ctypes.c_int()
    return {
        "cuFuncGetName": lambda f: driver.call("cuFuncGetName", ctypes.byref(text), f),
        "cuKernelGetName": lambda f: driver.call("cuKernelGetName", ctypes.byref(text), f),
        "cuFuncGetModule": lambda f: driver.call("cuFuncGetModule", ctypes.byref(number), f),
        "cuKernelGetLibrary": lambda f: driver.call("cuKernelGetLibrary", ctypes.byref(number), f),
        "cuFuncGetParamInfo": lambda f: driver.call(
            "cuFuncGetParamInfo", f, 1, ctypes.byref(offset), ctypes.byref(size)
        ),
        "cuKernelGetParamInfo": lambda f: driver.call(
            "cuKernelGetParamInfo", f, 1, ctypes.byref(offset), ctypes.byref(size)
        ),
        "cuFuncGetAttribute": lambda f: driver.call("cuFuncGetAttribute", ctypes.byref(value), 4, f),
        "cuKernelGetAttribute": lambda f: driver.call("cuKernelGetAttribute", ctypes.byref(value), 4, f, 0),
        "cuFuncSetAttribute": lambda f: driver.call("cuFuncSetAttribute", f, 8, 1024),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": lambda f: driver.call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(value), f, 32, 0
        ),
        "cuLaunchKernel": lambda f: driver.launch(f, [driver.memory(8), 1]),
    }


def _handles(driver: Driver) -> dict[str, int]:
    image = ctypes.c_char_p(PUT.encode())
    library = driver.handle("cuLibraryLoadData", image, 0, 0, 0, 0, 0, 0)
    kernel = driver.handle("cuLibraryGetKernel", library, ctypes.c_char_p(b"put"))
    return {
        "function of a module": driver.kernel(PUT, "put"),
        "kernel of a library": kernel,
        "function of that kernel": driver.handle("cuKernelGetFunction", kernel),
    }


@question(
    "which of cuFuncGetName, cuFuncGetModule, cuKernelGetLibrary … take a CUfunction, which a CUkernel?",
    "a launch takes both; a name is told of both; cuFuncGetModule refuses a CUkernel, cuKernelGetLibrary a CUfunction, without harm",
    60,
)
def handles() -> Answer:
    kinds = ("function of a module", "kernel of a library", "function of that kernel")

    def group(kind: str, name: str) -> Any:
        driver = Driver().open()
        if not driver.has(name):
            return "not exported"
        return driver.name(_tries(driver)[name](_handles(driver)[kind]))

    def everything(kind: str) -> dict[str, str]:
        driver = Driver().open()
        handle, tries = _handles(driver)[kind], _tries(driver)
        return {
            name: driver.name(tries[name](handle)) if driver.has(name) else "not exported" for name in tries
        }

    found: dict[str, dict[str, str]] = {}
    for kind in kinds:
        said = isolated(functools.partial(everything, kind))
        if isinstance(said, dict):
            found[kind] = said
        else:  # one of them ended the process: which?
            names = list(_tries(Driver()))
            found[kind] = {name: isolated(functools.partial(group, kind, name)) for name in names}
    ok = "CUDA_SUCCESS"
    kernel, function = found["kernel of a library"], found["function of a module"]
    died = [
        f"{name} of a {kind}"
        for kind in kinds
        for name, said in found[kind].items()
        if said.startswith("died")
    ]
    agrees = (
        kernel["cuLaunchKernel"] == function["cuLaunchKernel"] == ok
        and function["cuFuncGetName"] == ok
        and not died
    )
    taken = [name for name, said in kernel.items() if said == ok]
    return {
        "answer": f"of a CUkernel: {', '.join(taken)}" + (f"; died: {', '.join(died)}" if died else ""),
        "agrees": agrees,
        "found": found,
    }


GLOBALS = (
    PTX
    + """
.visible .global .align 8 .u64 seen = 7;
.global .align 8 .u64 hidden = 8;
.global .align 8 .u64 untouched = 9;
.visible .const .align 8 .u64 constant = 10;
.const .align 8 .u64 hidden_constant = 11;
.weak .global .align 8 .u64 weakly = 12;
.global .align 1 .b8 $str[4] = {97, 98, 99, 0};
.global .align 8 .u64 _ZZ4usedvE1s = 13;
.extern .shared .align 8 .b8 dynamic[];
.visible .entry use(.param .u64 out) {
    .reg .b64 %rd<10>;
    ld.param.u64 %rd1, [out];
    ld.global.u64 %rd2, [seen];
    ld.global.u64 %rd3, [hidden];
    add.u64 %rd2, %rd2, %rd3;
    ld.const.u64 %rd3, [constant];
    add.u64 %rd2, %rd2, %rd3;
    ld.const.u64 %rd3, [hidden_constant];
    add.u64 %rd2, %rd2, %rd3;
    ld.global.u64 %rd3, [weakly];
    add.u64 %rd2, %rd2, %rd3;
    ld.global.u64 %rd3, [_ZZ4usedvE1s];
    add.u64 %rd2, %rd2, %rd3;
    mov.u64 %rd4, $str;
    add.u64 %rd2, %rd2, %rd4;
    st.global.u64 [seen], %rd2;
    st.global.u64 [hidden], %rd2;
    st.global.u64 [_ZZ4usedvE1s], %rd2;
    st.global.u64 [%rd1], %rd2;
    ret;
}
"""
)


@question(
    "which module-level symbols does cuModuleGetGlobal find?",
    "global and constant variables, also those that are LOCAL symbols; what no kernel uses may be gone",
)
def module_symbols() -> Answer:
    driver = Driver().open()
    names = ["seen", "hidden", "untouched", "constant", "hidden_constant", "weakly", "$str", "_ZZ4usedvE1s"]
    images = {"PTX": GLOBALS.encode() + b"\0"}
    if cubin := _assembled(GLOBALS, driver.cc()):
        images["cubin by ptxas"] = cubin
    found: dict[str, dict[str, str]] = {}
    failed: dict[str, str] = {}
    for kind, image in images.items():
        try:
            module = driver.module(image)
        except DriverError as error:
            failed[kind] = str(error)
            continue
        address, size = ctypes.c_uint64(), ctypes.c_uint64()
        for name in names:
            code = driver.call(
                "cuModuleGetGlobal_v2",
                ctypes.byref(address),
                ctypes.byref(size),
                module,
                ctypes.c_char_p(name.encode()),
            )
            found.setdefault(kind, {})[name] = f"{size.value} bytes" if code == 0 else driver.name(code)
    lost = {kind: [name for name, said in of.items() if "bytes" not in said] for kind, of in found.items()}
    return {
        "answer": "; ".join(f"{kind}: all but {', '.join(of) or 'none'}" for kind, of in lost.items()),
        "agrees": all(name in ("untouched", "$str") for of in lost.values() for name in of),
        "found": found,
        "not_loaded": failed,
    }


def _assembled(ptx: str, cc: int) -> bytes | None:
    """The cubin that ptxas makes of it, where there is one."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(OSError, subprocess.TimeoutExpired):
        out = Path(scratch, "cubin")
        command = ["ptxas", f"-arch=sm_{cc}", "-o", str(out), "-"]
        if subprocess.run(command, input=ptx.encode(), capture_output=True, timeout=10).returncode == 0:
            return out.read_bytes()
    return None


# --- waiting, and captures ---

MODES = {"none": None, "global": 0, "thread-local": 1, "relaxed": 2}
BLOCKED_AFTER = 0.4  # seconds


def _operations(driver: Driver) -> dict[str, Callable[[], int]]:
    """What the agent may have to do while a program captures, or a kernel of it does not end. Each can be called once."""
    image = ctypes.c_char_p(PUT.encode())
    other = driver.module(PUT_COPY.encode() + b"\0")
    used, unused = driver.kernel(PUT, "put"), driver.kernel(PUT, "put")
    private, device = driver.stream(), driver.memory(1 << 16)
    _, pinned = driver.pinned(1 << 13)
    pageable = (ctypes.c_uint64 * (1 << 13))()
    event = driver.handle("cuEventCreate", 2)
    driver.must("cuEventRecord", event, private)
    driver.launch(used, [device, 1], private)
    driver.must("cuStreamSynchronize", private)
    graph = driver.handle("cuGraphCreate", 0)
    freed = [driver.memory(1 << 16) for _ in range(2)]
    found = ctypes.c_uint64()
    file = os.memfd_create("question")
    os.ftruncate(file, 1 << 16)
    mapped = mmap.mmap(file, 1 << 16)
    where = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    driver.keeps.append(mapped)  # what is registered must stay mapped

    def out(name: str, *arguments: Any) -> int:
        return driver.call(name, ctypes.byref(found), *arguments)

    def copied(target: Any, stream: int) -> int:
        return driver.call("cuMemcpyDtoHAsync_v2", target, device, 1 << 16, stream) or driver.call(
            "cuStreamSynchronize", stream
        )

    return {
        "cuModuleLoadData": lambda: out("cuModuleLoadData", image),
        "cuLibraryLoadData": lambda: out("cuLibraryLoadData", image, 0, 0, 0, 0, 0, 0),
        "cuModuleGetFunction": lambda: out("cuModuleGetFunction", other, ctypes.c_char_p(b"put")),
        "cuModuleUnload": lambda: driver.call("cuModuleUnload", other),
        "cuMemAlloc": lambda: out("cuMemAlloc_v2", 1 << 20),
        "cuMemFree": lambda: driver.call("cuMemFree_v2", freed.pop()),
        "cuMemHostAlloc": lambda: out("cuMemHostAlloc", 1 << 16, 0),
        "cuMemHostRegister": lambda: driver.call("cuMemHostRegister_v2", where, 1 << 16, 0),
        "cuStreamCreate": lambda: out("cuStreamCreate", 1),
        "cuEventCreate": lambda: out("cuEventCreate", 0),
        "cuEventQuery": lambda: driver.call("cuEventQuery", event),
        "cuFuncGetAttribute": lambda: driver.call("cuFuncGetAttribute", ctypes.byref(found), 4, used),
        "cuGraphClone": lambda: out("cuGraphClone", graph),
        "copy, private stream, pinned": lambda: copied(pinned, private),
        "copy, private stream, pageable": lambda: copied(pageable, private),
        "copy, synchronous": lambda: driver.call("cuMemcpyDtoH_v2", pageable, device, 1 << 16),
        "set, private stream": lambda: (
            driver.call("cuMemsetD8Async", device, 0, 1 << 16, private)
            or driver.call("cuStreamSynchronize", private)
        ),
        "cuFuncLoad": lambda: driver.call("cuFuncLoad", unused),
        "launch, private stream": lambda: (
            driver.launch(used, [device, 1], private) or driver.call("cuStreamSynchronize", private)
        ),
        "first launch, private stream": lambda: (
            driver.launch(unused, [device, 1], private) or driver.call("cuStreamSynchronize", private)
        ),
        "cuCtxSynchronize": lambda: driver.call("cuCtxSynchronize"),
    }


def _matrix(spins: bool, mode: str, same_thread: bool) -> Answer:
    """Each operation by itself: what it gives, whether it waits for the kernel, whether the capture is still good."""
    driver = Driver().open()
    spinning = Spinning(driver, 4)
    captured = driver.stream()
    results: dict[str, list[Any]] = {}
    for name in list(_operations(driver)):
        action = _operations(driver)[name]
        number = MODES[mode]
        if spins:
            spinning.start()
        if number is not None:
            driver.must("cuStreamBeginCapture_v2", captured, number)
        blocked = False
        if same_thread and not spins:
            began = time.perf_counter()
            code = action()
            ms = 1000 * (time.perf_counter() - began)
        else:
            watched = Watched(driver, action)
            blocked = not watched.over(BLOCKED_AFTER)
            spinning.stop()
            if not watched.over(8):
                results[name] = ["never came back", True, None]
                return {"results": results, "ended": name}
            code, ms = watched.code or 0, watched.ms
        spinning.stop()
        valid: str | None = None
        if number is not None:
            graph = ctypes.c_uint64()
            valid = driver.name(driver.call("cuStreamEndCapture", captured, ctypes.byref(graph)))
        results[name] = [driver.name(code), blocked, valid, round(ms, 2)]
        with contextlib.suppress(DriverError):
            driver.must("cuStreamSynchronize", spinning.stream)
    return {"results": results}


def _while(spins: bool) -> Answer:
    found: dict[str, dict[str, Any]] = {}
    ways = (
        [(mode, False) for mode in MODES]
        if spins
        else [(m, t) for m in MODES if m != "none" for t in (True, False)]
    )
    for mode, same in ways:
        said = isolated(functools.partial(_matrix, spins, mode, same), 45)
        key = mode + ("" if spins else ", same thread" if same else ", another thread")
        found[key] = said["results"] if isinstance(said, dict) else {"": [said, False, None]}
    blocks = sorted({name for of in found.values() for name, row in of.items() if row[1]})
    bad = sorted(
        {name for of in found.values() for name, row in of.items() if row[2] not in (None, "CUDA_SUCCESS")}
    )
    refused = sorted({name for of in found.values() for name, row in of.items() if row[0] != "CUDA_SUCCESS"})
    return {"found": found, "waits": blocks, "invalidates": bad, "refused": refused}


@question(
    "what do loading, allocating and copying do while a stream is captured?",
    "refused, or the capture is invalidated, except in relaxed mode and in threads of the agent in thread-local mode",
    100,
)
def capture() -> Answer:
    found = _while(False)
    relaxed = [
        row
        for mode, of in found["found"].items()
        if mode.startswith("relaxed") or mode == "thread-local, another thread"
        for name, row in of.items()
        if not name.startswith(("copy, synchronous", "cuCtxSynchronize", "set", "launch"))
    ]
    return {
        **found,
        "answer": f"invalidates: {', '.join(found['invalidates']) or 'nothing'}; refused: {', '.join(found['refused']) or 'nothing'}",
        "agrees": all(row[0] == "CUDA_SUCCESS" and row[2] == "CUDA_SUCCESS" for row in relaxed),
    }


@question(
    "under a kernel that does not end, and a capture of each mode: which calls wait for it?",
    "loading, unloading, freeing and registering may wait; copies and launches in a private stream do not",
    200,
)
def spinning_kernel() -> Answer:
    found = _while(True)
    private = [name for name in found["waits"] if "private" in name and "pageable" not in name]
    return {
        **found,
        "answer": f"waits: {', '.join(found['waits']) or 'nothing'}; invalidates: {', '.join(found['invalidates']) or 'nothing'}",
        "agrees": not private,
    }


@question(
    "does a copy in a private stream go on under a persistent kernel that fills the GPU?",
    "yes, in a non-blocking stream and with pinned memory; one in the legacy stream waits where the kernel's stream is a blocking one",
    40,
)
def persistent_kernel() -> Answer:
    driver = Driver().open()
    spinning = Spinning(driver, 4)
    blocks = ctypes.c_int()
    driver.must("cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(blocks), spinning.function, 32, 0)
    grid = blocks.value * driver.attribute(16)
    device, private = driver.memory(1 << 20), driver.stream()
    _, pinned = driver.pinned(1 << 17)
    pageable = (ctypes.c_uint64 * (1 << 17))()
    blocking = driver.handle("cuStreamCreate", 0)
    found: dict[str, dict[str, Any]] = {}
    for where, stream in (("non-blocking", spinning.stream), ("blocking", blocking)):
        for how, target, to in (
            ("pinned", pinned, private),
            ("pageable", pageable, private),
            ("legacy stream", pinned, 0),
        ):
            spinning.start(stream, grid, 32)

            def copy(target: Any = target, to: int = to) -> int:
                return driver.call("cuMemcpyDtoHAsync_v2", target, device, 1 << 20, to) or driver.call(
                    "cuStreamSynchronize", to
                )

            watched = Watched(driver, copy)
            late = not watched.over(BLOCKED_AFTER)
            spinning.stop()
            watched.over(8)
            driver.must("cuStreamSynchronize", stream)
            found[f"kernel in a {where} stream, {how}"] = {"waits": late, "ms": round(watched.ms, 2)}
    waits = [name for name, row in found.items() if row["waits"]]
    return {
        "answer": f"{grid} blocks; waits: {'; '.join(waits) or 'nothing'}",
        "agrees": not any(name.endswith("pinned") for name in waits),
        "found": found,
    }


# --- host memory ---


def _register(driver: Driver, file: int, size: int) -> Answer:
    """Maps the file, registers it, has the GPU write to it, reads it through another mapping."""
    mapped, other = mmap.mmap(file, size), mmap.mmap(file, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    code = driver.call("cuMemHostRegister_v2", address, size, 2)  # CU_MEMHOSTREGISTER_DEVICEMAP
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
    sys.path.append(str(Path(__file__).resolve().parents[2] / "lib"))
    from gpubpf import bpf_syscall

    driver = Driver().open()
    file = os.memfd_create("question")
    os.ftruncate(file, 1 << 16)
    found = {"memfd": _register(driver, file, 1 << 16)}
    try:
        array = bpf_syscall.create_map(2, 4, 8, 8192, 1 << 10, "question")  # ARRAY, BPF_F_MMAPABLE
        found["BPF array"] = _register(driver, array, 1 << 16)
        value = bpf_syscall.lookup(array, struct.pack("<I", 1), 8)
        found["BPF array"]["bpf(2) reads"] = struct.unpack("<Q", value)[0] if value else None
    except OSError as error:
        found["BPF array"] = {"register": f"there is no BPF here ({error.strerror})"}
    said = {name: of["register"] for name, of in found.items()}
    return {
        "answer": ", ".join(f"{name}: {text}" for name, text in said.items()),
        "agrees": None if "no BPF" in said["BPF array"] else all(of.get("seen") for of in found.values()),
        "found": found,
    }


# --- clocks ---

TICK = (
    PTX
    + """
.visible .entry tick(.param .u64 out, .param .u64 count) {
    .reg .pred %p<3>; .reg .b64 %rd<10>;
    ld.param.u64 %rd1, [out];
    ld.param.u64 %rd2, [count];
    mov.u64 %rd3, %globaltimer;
    mov.u64 %rd6, 0;
again:
    mov.u64 %rd4, %globaltimer;
    mov.u64 %rd5, %clock64;
    setp.eq.u64 %p1, %rd3, %rd4;
    @%p1 bra again;
    mov.u64 %rd3, %rd4;
    st.global.u64 [%rd1], %rd4;
    st.global.u64 [%rd1+8], %rd5;
    add.u64 %rd1, %rd1, 16;
    add.u64 %rd6, %rd6, 1;
    setp.lt.u64 %p2, %rd6, %rd2;
    @%p2 bra again;
    ret;
}
"""
)


def _ticks(driver: Driver, function: int, count: int) -> list[tuple[int, int]]:
    out = driver.memory(16 * count)
    if code := driver.launch(function, [out, count]) or driver.call("cuCtxSynchronize"):
        raise DriverError(driver.name(code))
    words = driver.read(out, 2 * count)
    return list(itertools.pairwise([0, *words]))[1::2]


@question("how often does globaltimer tick?", "every 32 ns on Hopper, every 1,000 ns on older GPUs")
def globaltimer_tick() -> Answer:
    driver = Driver().open()
    seen = [timer for timer, _ in _ticks(driver, driver.kernel(TICK, "tick"), 2000)]
    steps = [b - a for a, b in itertools.pairwise(seen)]
    common = Counter(steps).most_common(8)
    tick = common[0][0]
    return {
        "answer": f"{tick} ns most often, {min(steps)} at least, {max(steps)} at most",
        "agrees": tick == 32 if driver.cc() >= 90 else None,
        "steps": {str(step): count for step, count in common},
    }


CLOCKS = (
    PTX
    + """
.visible .entry clocks(.param .u64 out, .param .u64 unused) {
    .reg .pred %p<2>; .reg .b32 %r<3>; .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %ctaid.x;
    mul.wide.u32 %rd2, %r1, 24;
    add.u64 %rd1, %rd1, %rd2;
    mov.u32 %r2, %smid;
    cvt.u64.u32 %rd3, %r2;
    mov.u64 %rd4, %globaltimer;
again:
    mov.u64 %rd5, %globaltimer;
    mov.u64 %rd6, %clock64;
    setp.eq.u64 %p1, %rd4, %rd5;
    @%p1 bra again;
    st.global.u64 [%rd1], %rd3;
    st.global.u64 [%rd1+8], %rd5;
    st.global.u64 [%rd1+16], %rd6;
    ret;
}
"""
)


@question(
    "how far apart is clock64 of different multiprocessors?",
    "so far that only a line for each multiprocessor ties it to globaltimer",
)
def clock64_offsets() -> Answer:
    driver = Driver().open()
    (first, c1), *_, (last, c2) = _ticks(driver, driver.kernel(TICK, "tick"), 2000)
    rate = (c2 - c1) / (last - first)
    grid = 4 * driver.attribute(16)
    out = driver.memory(24 * grid)
    function = driver.kernel(CLOCKS, "clocks")
    offsets: dict[int, list[float]] = {}
    for _ in range(5):
        if code := driver.launch(function, [out, 0], grid=grid) or driver.call("cuCtxSynchronize"):
            raise DriverError(driver.name(code))
        words = driver.read(out, 3 * grid)
        for sm, timer, clock in zip(words[::3], words[1::3], words[2::3], strict=True):
            offsets.setdefault(sm, []).append(clock - rate * (timer - first))
    middles = [statistics.median(of) for of in offsets.values()]
    return {
        "answer": f"{len(middles)} multiprocessors, offsets spread over {max(middles) - min(middles):.0f} cycles",
        "agrees": None,
        "within_one_cycles": round(statistics.median(max(of) - min(of) for of in offsets.values())),
        "cycles_per_ns": rate,
    }


# --- captured swaps ---


class NodeParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("func", ctypes.c_uint64),
        *((f"{what}{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_uint64),
        ("ctx", ctypes.c_uint64),
    ]


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((f"{what}{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_uint64),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


class HiddenParameter(ctypes.Structure):
    _fields_ = [("launch", ctypes.c_uint64), ("more", ctypes.c_uint64)]


def _launch_with(
    driver: Driver, function: int, out: int, stream: int, attribute: LaunchAttribute | None
) -> None:
    config = LaunchConfig(gridx=2, gridy=1, gridz=1, blockx=1, blocky=1, blockz=1, stream=stream)
    if attribute is not None:
        config.attributes, config.count = ctypes.addressof(attribute), 1
    driver.must("cuLaunchKernelEx", ctypes.byref(config), function, pointers([out, 5]), 0)


def newest(driver: Driver, ptx: str) -> str:
    """For Hopper, where this is one: clusters may not be had by what was made for older GPUs."""
    return ptx.replace(PTX, PTX.replace("7.0", "7.8").replace("sm_75", "sm_90")) if driver.cc() >= 90 else ptx


def _swap(attribute: LaunchAttribute | None) -> Answer:
    """A captured kernel replaced in the executable graph by a copy with a parameter more, as the agent does it (docs/timing.md)."""
    driver = Driver().open()
    original, copy = (driver.kernel(newest(driver, ptx), "put") for ptx in (PUT, PUT_COPY))
    out, stream = driver.memory(8), driver.stream()
    driver.must("cuStreamBeginCapture_v2", stream, 2)
    graph = ctypes.c_uint64()
    try:
        _launch_with(driver, original, out, stream, None)
        _launch_with(driver, original, out, stream, attribute)
    finally:
        driver.call("cuStreamEndCapture", stream, ctypes.byref(graph))
    executable = driver.handle("cuGraphInstantiateWithFlags", graph.value, 0)
    result: Answer = {}

    def replay() -> Any:
        driver.zero(out, 8)
        code = driver.call("cuGraphLaunch", executable, stream) or driver.call("cuStreamSynchronize", stream)
        return driver.read(out, 1)[0] if code == 0 else driver.name(code)

    def nodes_of(of: int) -> list[int]:
        count = ctypes.c_uint64()
        driver.must("cuGraphGetNodes", of, 0, ctypes.byref(count))
        nodes = (ctypes.c_uint64 * count.value)()
        driver.must("cuGraphGetNodes", of, nodes, ctypes.byref(count))
        return list(nodes)

    values = (ctypes.c_uint64 * 2)(out, 5)
    hidden = HiddenParameter(1, 100)
    addresses = [ctypes.addressof(values), ctypes.addressof(values) + 8, ctypes.addressof(hidden)]

    def swapped(node: int) -> NodeParameters:
        parameters = NodeParameters()
        driver.must("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(parameters))
        pointers_ = (ctypes.c_void_p * 3)(*addresses)
        parameters.func, parameters.parameters = copy, ctypes.addressof(pointers_)
        parameters.extra = None
        parameters.kern = 0
        parameters.keeps = pointers_
        return parameters

    result["before"] = replay()
    clone = driver.handle("cuGraphClone", graph.value)
    for node in nodes_of(clone):
        driver.must("cuGraphKernelNodeSetParams_v2", node, ctypes.byref(swapped(node)))
    info = (ctypes.c_uint64 * 3)()
    result["exec update"] = driver.name(driver.call("cuGraphExecUpdate_v2", executable, clone, info))
    if info[0] & 0xFFFFFFFF:
        result["exec update"] += f" ({info[0] & 0xFFFFFFFF})"
    result["after the update"] = replay()
    first = NodeParameters()
    driver.must("cuGraphKernelNodeGetParams_v2", nodes_of(graph.value)[0], ctypes.byref(first))
    result["the program reads back"] = "its own function" if first.func in (original, 0) else "something else"
    if attribute is not None:
        read = (ctypes.c_uint * 16)()
        code = driver.call("cuGraphKernelNodeGetAttribute", nodes_of(clone)[-1], attribute.id, read)
        result["attribute of the clone's node"] = driver.name(code) if code else list(read)[:4]
    back = driver.call("cuGraphExecUpdate_v2", executable, graph.value, info)
    result["update back"] = driver.name(back)
    result["after that"] = replay()
    codes = [
        driver.call("cuGraphExecKernelNodeSetParams_v2", executable, node, ctypes.byref(swapped(node)))
        for node in nodes_of(graph.value)
    ]
    result["one node set"] = driver.name(max(codes))
    result["after setting nodes"] = replay()
    return result


@question(
    "can a captured kernel be replaced in an executable graph by a copy with one more parameter, and back?",
    "yes, by cuGraphExecUpdate from a changed clone, and node by node; also with clusters and programmatic dependent launch",
    60,
)
def captured_swap() -> Answer:
    cluster = LaunchAttribute(id=4)  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value[0], cluster.value[1], cluster.value[2] = 2, 1, 1
    dependent = LaunchAttribute(id=6)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    dependent.value[0] = 1
    ways = {"plain": None, "clusters": cluster, "dependent launch": dependent}
    found = {name: isolated(functools.partial(_swap, attribute), 15) for name, attribute in ways.items()}
    right = {
        "before": 5,
        "exec update": "CUDA_SUCCESS",
        "after the update": 105,
        "the program reads back": "its own function",
        "update back": "CUDA_SUCCESS",
        "after that": 5,
        "one node set": "CUDA_SUCCESS",
        "after setting nodes": 105,
    }
    odd = {
        name: {key: of.get(key) for key, value in right.items() if of.get(key) != value}
        if isinstance(of, dict)
        else of
        for name, of in found.items()
    }
    return {
        "answer": "; ".join(f"{name}: {of or 'as believed'}" for name, of in odd.items()),
        "agrees": not any(odd.values()),
        "found": found,
    }


# --- what is left of a ring ---

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
    """In a child: a kernel that counts up in registered shared memory, and traps at the end if asked."""
    driver = Driver().open()
    mapped = mmap.mmap(file, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    driver.must("cuMemHostRegister_v2", address, 4096, 2)
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
    said = isolated(lambda: _fill(file, 1000, True))
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
        with contextlib.suppress(BaseException):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            _fill(file, 1 << 23, False)  # some ten seconds, should nobody stop it
        os._exit(1)
    ends = time.monotonic() + 15

    def marked() -> int:
        return int(struct.unpack("<Q", os.pread(file, 8, 0))[0])

    while marked() < 1000 and time.monotonic() < ends:
        time.sleep(0.005)
    before = marked()
    began = time.monotonic()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    gone_ms = 1000 * (time.monotonic() - began)
    at_death = marked()
    time.sleep(1)
    after, value = struct.unpack("<QQ", os.pread(file, 16, 0))
    return {
        "answer": f"{before} records before, {at_death} when the process was reaped ({gone_ms:.0f} ms), {after} a second later",
        "agrees": before >= 1000 and at_death >= before and 0 <= value - after <= 1,
        "went_on_after_reaping": after > at_death,
    }


def main() -> int:
    wanted = {question.name: question for question in QUESTIONS}[sys.argv[1]]
    try:
        print(json.dumps(wanted.ask()))
    except CannotAsk as error:
        print(error, file=sys.stderr)
        return 77
    except DriverError as error:
        print(json.dumps({"answer": f"could not be asked: {error}", "agrees": False}))
    sys.stdout.flush()
    os._exit(0)  # without waiting for what the driver may still wait for


if __name__ == "__main__":
    sys.exit(main())

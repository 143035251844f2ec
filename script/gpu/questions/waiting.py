"""Calls that wait for a kernel that does not end, and calls that invalidate a capture."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpu.driver import (
    CU_EVENT_DISABLE_TIMING,
    CU_FUNC_ATTRIBUTE_NUM_REGS,
    CU_MODULE_LAZY_LOADING,
    CU_STREAM_CAPTURE_MODE_GLOBAL,
    CU_STREAM_CAPTURE_MODE_RELAXED,
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    CU_STREAM_NON_BLOCKING,
    PUT,
    PUT_COPY,
    Driver,
    DriverError,
    Spinning,
    Watched,
)
from gpu.questions.asking import Answer, alone, note, question, row_by_row

MODES = {
    "none": None,
    "global": CU_STREAM_CAPTURE_MODE_GLOBAL,
    "thread-local": CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    "relaxed": CU_STREAM_CAPTURE_MODE_RELAXED,
}
BLOCKED_AFTER = 0.4  # seconds


@dataclass(frozen=True)
class Way:
    """A capture mode, and who calls: the capturing thread or another one, relaxed or not."""

    mode: str
    same_thread: bool = False
    relaxed: bool = True
    spins: bool = False

    @property
    def name(self) -> str:
        thread = "same thread" if self.same_thread else "another thread"
        return f"{self.mode}, {thread}{', made relaxed' if self.relaxed else ''}"


# The agent makes the threads relaxed in which it calls the driver.
CAPTURES = [Way(mode, same, relaxed) for mode in ("global", "thread-local", "relaxed") for same in (True, False)
            for relaxed in (True, False)]  # fmt: skip


# Asking for these is no work, but the agent does not ask during a capture.
ATTRIBUTES = (
    "cuStreamGetCtx",
    "cuStreamGetCtx_v2",
    "cuStreamGetFlags",
    "cuStreamGetPriority",
    "cuStreamGetId",
)
ATTRIBUTE_OF = "{}, the captured stream"


def _operations(driver: Driver, captured: int) -> dict[str, Callable[[], int]]:
    """Return what the agent may have to do during a capture, or under a kernel that does not end. Each can be called once."""
    image = ctypes.c_char_p(PUT.encode())
    other = driver.module(PUT_COPY.encode() + b"\0")
    used, unused = driver.kernel(PUT, "put"), driver.kernel(PUT, "put")
    private, device = driver.stream(), driver.memory(1 << 16)
    _, pinned = driver.pinned(1 << 13)
    pageable = (ctypes.c_uint64 * (1 << 13))()
    event = driver.handle("cuEventCreate", CU_EVENT_DISABLE_TIMING)
    driver.must("cuEventRecord", event, private)
    driver.launch(used, [device, 1], private)
    driver.must("cuStreamSynchronize", private)
    graph = driver.handle("cuGraphCreate", 0)
    freed = [driver.memory(1 << 16) for _ in range(2)]
    found, also = ctypes.c_uint64(), ctypes.c_uint64()  # only cuStreamGetCtx_v2 gives two values
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
        "cuStreamCreate": lambda: out("cuStreamCreate", CU_STREAM_NON_BLOCKING),
        "cuEventCreate": lambda: out("cuEventCreate", 0),
        "cuEventQuery": lambda: driver.call("cuEventQuery", event),
        "cuStreamQuery": lambda: driver.call("cuStreamQuery", private),
        "cuStreamSynchronize": lambda: driver.call("cuStreamSynchronize", private),
        "cuFuncGetAttribute": lambda: driver.call(
            "cuFuncGetAttribute", ctypes.byref(found), CU_FUNC_ATTRIBUTE_NUM_REGS, used
        ),
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
        **{
            ATTRIBUTE_OF.format(name): functools.partial(
                driver.call, name, ctypes.c_void_p(captured), ctypes.byref(found), ctypes.byref(also)
            )
            for name in ATTRIBUTES
        },
    }


# What a call gives, whether it waited, whether the capture is good (None: there was none), milliseconds.
Row = tuple[str, bool, str | None, float]


def _relaxed(driver: Driver, action: Callable[[], int]) -> int:
    """Return the result of `action` in a thread that made itself relaxed."""
    mode = ctypes.c_int(CU_STREAM_CAPTURE_MODE_RELAXED)
    driver.must("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        return action()
    finally:
        driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def _matrix(way: Way, names: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yield a row for each operation. The last one is of a call that never returns, if there is one."""
    driver = Driver().open()
    spinning = Spinning(driver, 4)
    captured = driver.stream()
    for name in names:
        action = _operations(driver, captured)[name]
        if way.relaxed:
            action = functools.partial(_relaxed, driver, action)
        number = MODES[way.mode]
        if way.spins:
            spinning.start()
        if number is not None:
            driver.must("cuStreamBeginCapture_v2", captured, number)
        blocked = False
        if way.same_thread:
            said, ms = _timed(driver, action)
        else:
            watched = Watched(driver, action)
            blocked = not watched.over(BLOCKED_AFTER)
            spinning.stop()
            if not watched.over(8):
                yield name, ("never came back", True, None, 0)
                return
            said, ms = watched.said, watched.ms
        valid: str | None = None
        if number is not None:
            graph = ctypes.c_uint64()
            valid = driver.name(driver.call("cuStreamEndCapture", captured, ctypes.byref(graph)))
        yield name, (said, blocked, valid, round(ms, 2))
        driver.must("cuStreamSynchronize", spinning.stream)


def _timed(driver: Driver, action: Callable[[], int]) -> tuple[str, float]:
    began = time.perf_counter()
    try:
        said = driver.name(action())
    except DriverError as error:
        said = str(error)
    return said, 1000 * (time.perf_counter() - began)


def _names() -> list[str]:
    driver = Driver().open()
    return list(_operations(driver, driver.stream()))


def _each(ways: Sequence[Way], seconds: float) -> Answer:
    found: dict[str, dict[str, Any]] = {}
    names = alone(_names)
    if not isinstance(names, list):
        raise DriverError(str(names))
    for way in ways:
        rows = row_by_row(names, functools.partial(_matrix, way), seconds)
        # A sentence instead of a row: what ended the process that asked.
        found[way.name] = {
            name: (row, False, None, 0) if isinstance(row, str) else row for name, row in rows.items()
        }
        note(found=found)
    blocks = sorted({name for of in found.values() for name, row in of.items() if row[1]})
    bad = sorted(
        {name for of in found.values() for name, row in of.items() if row[2] not in (None, "CUDA_SUCCESS")}
    )
    refused = sorted({name for of in found.values() for name, row in of.items() if row[0] != "CUDA_SUCCESS"})
    return {"found": found, "waits": blocks, "invalidates": bad, "refused": refused}


def _invalidated(found: Answer) -> str:
    calls = found["invalidates"]
    return f"these calls invalidated a capture: {', '.join(calls)}" if calls else "no capture was invalidated"


@question(
    "what do loading, allocating and copying do while a stream is captured?",
    "refused, or the capture is invalidated, except in relaxed mode and in a thread that made itself relaxed, as the agent does",
    180,
)
def capture() -> Answer:
    found = _each(CAPTURES, 14)
    relaxed = [
        row
        for way in CAPTURES
        if way.relaxed
        for name, row in found["found"][way.name].items()
        if not name.startswith(("copy, synchronous", "cuCtxSynchronize", *ATTRIBUTES))
    ]
    return {
        **found,
        "answer": f"{_invalidated(found)}; {'refused: ' + ', '.join(found['refused']) if found['refused'] else 'no call was refused'}",
        "agrees": all(row[0] == "CUDA_SUCCESS" and row[2] == "CUDA_SUCCESS" for row in relaxed),
    }


@question(
    "under a kernel that does not end, and a capture of each mode: which calls wait for it?",
    "loading, unloading, freeing, registering and lazy first launches may wait; copies and launches in a private stream do not",
    200,
)
def spinning_kernel(*modes: str) -> Answer:
    """Ask for these capture modes; for all if none is given."""
    lazy = alone(_loads_lazily) is True
    found = _each([Way(mode, spins=True) for mode in modes or MODES], 40)
    # A first launch loads its kernel then, which is why the agent calls cuFuncLoad earlier.
    allowed = ("pageable", "first launch") if lazy else ("pageable",)
    private = [
        name for name in found["waits"] if "private" in name and not any(word in name for word in allowed)
    ]
    waits = (
        f"these calls wait for the kernel: {', '.join(found['waits'])}"
        if found["waits"]
        else "no call waits for the kernel"
    )
    return {
        **found,
        "lazy loading": lazy,
        "answer": f"{waits}; {_invalidated(found)}",
        "agrees": not private,
    }


def _loads_lazily() -> bool:
    """Return whether the driver loads a kernel at its first use (CUDA_MODULE_LOADING)."""
    mode = ctypes.c_int()
    code = Driver().open().call("cuModuleGetLoadingMode", ctypes.byref(mode))
    return code == 0 and mode.value == CU_MODULE_LAZY_LOADING


@question(
    "does a capture stay valid that begins while cuCtxSynchronize waits in another thread?",
    "yes, in each mode: the agent delays a capture only until its own wait is inside the driver",
    60,
)
def capture_during_a_wait() -> Answer:
    found = {
        f"{mode}, the waiting thread{' made relaxed' if relaxed else ''}": alone(
            functools.partial(_begun_during_a_wait, number, relaxed), 15
        )
        for mode, number in MODES.items()
        if number is not None
        for relaxed in (True, False)
    }
    good = ["CUDA_SUCCESS"] * 3
    bad = {name: row for name, row in found.items() if row != good}
    return {
        "answer": "; ".join(f"{name}: {row}" for name, row in bad.items()) or "valid, and the wait succeeds",
        "agrees": not bad,
        "found": found,
    }


def _begun_during_a_wait(mode: int, relaxed: bool) -> list[str]:
    """Return the results of beginning the capture, of ending it after the wait, and of the wait."""
    driver = Driver().open()
    spinning, captured = Spinning(driver, 4), driver.stream()
    spinning.start()

    def wait() -> int:
        return driver.call("cuCtxSynchronize")

    watched = Watched(driver, functools.partial(_relaxed, driver, wait) if relaxed else wait)
    if watched.over(BLOCKED_AFTER):
        raise DriverError(f"cuCtxSynchronize does not wait: {watched.said}")
    begun = driver.name(driver.call("cuStreamBeginCapture_v2", captured, mode))
    spinning.stop()
    if not watched.over(8):
        return [begun, "not ended", "the wait never came back"]
    graph = ctypes.c_uint64()
    return [
        begun,
        driver.name(driver.call("cuStreamEndCapture", captured, ctypes.byref(graph))),
        watched.said,
    ]


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
    grid = blocks.value * driver.multiprocessors()
    size = 1 << 20
    device, private = driver.memory(size), driver.stream()
    _, pinned = driver.pinned(size // 8)
    pageable = (ctypes.c_uint64 * (size // 8))()
    blocking = driver.handle("cuStreamCreate", 0)
    actions: dict[str, Callable[[], int]] = {
        "pinned": lambda: (
            driver.call("cuMemcpyDtoHAsync_v2", pinned, device, size, private)
            or driver.call("cuStreamSynchronize", private)
        ),
        "to the GPU, pinned": lambda: (
            driver.call("cuMemcpyHtoDAsync_v2", device, pinned, size, private)
            or driver.call("cuStreamSynchronize", private)
        ),
        "pageable": lambda: (
            driver.call("cuMemcpyDtoHAsync_v2", pageable, device, size, private)
            or driver.call("cuStreamSynchronize", private)
        ),
        "set": lambda: (
            driver.call("cuMemsetD8Async", device, 0, size, private)
            or driver.call("cuStreamSynchronize", private)
        ),
        "legacy stream": lambda: (
            driver.call("cuMemcpyDtoHAsync_v2", pinned, device, size, 0)
            or driver.call("cuStreamSynchronize", 0)
        ),
    }
    found: dict[str, dict[str, Any]] = {}
    for where, stream in (("non-blocking", spinning.stream), ("blocking", blocking)):
        for how, action in actions.items():
            spinning.start(stream, grid, 32)
            watched = Watched(driver, action)
            late = not watched.over(BLOCKED_AFTER)
            spinning.stop()
            back = watched.over(8)
            said = watched.said if back else "never came back"
            found[f"kernel in a {where} stream, {how}"] = {
                "waits": late,
                "said": said,
                "ms": round(watched.ms, 2),
            }
            note(found=found)
            if not back:
                break
            driver.must("cuStreamSynchronize", stream)
    waits = [name for name, row in found.items() if row["waits"]]
    return {
        "answer": f"{grid} blocks; waits: {'; '.join(waits) or 'nothing'}",
        "agrees": not any(name.endswith("pinned") for name in waits),
        "found": found,
    }

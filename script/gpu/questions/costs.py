"""The cost of the calls with which a tool could mark times in a stream."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable

from gpu.driver import CU_EVENT_DISABLE_TIMING, PUT, Driver, DriverError, Spinning
from gpu.questions.asking import Answer, note, question

PAIRS = 200  # of kernels and marks behind a kernel that waits: fewer than a stream can hold
TURNS = 5


def _marks(driver: Driver, stream: int) -> dict[str, Callable[[], int]]:
    """Return what is put between two kernels. "nothing" is a call that asks nothing of the GPU: what Python needs for a call."""

    def prepared(name: str, *arguments: int) -> Callable[[], int]:
        function, values = getattr(driver.library, name), [ctypes.c_uint64(one) for one in arguments]
        return lambda: int(function(*values))

    timed = driver.handle("cuEventCreate", 0)
    plain = driver.handle("cuEventCreate", CU_EVENT_DISABLE_TIMING)
    device = driver.memory(8)
    _, host = driver.pinned(1)
    marks = {
        "nothing": prepared("cuCtxGetApiVersion", driver.context, host),
        "cuEventRecord": prepared("cuEventRecord", timed, stream),
        "cuEventRecord, no timing": prepared("cuEventRecord", plain, stream),
    }
    if driver.has("cuStreamWriteValue64_v2"):
        marks |= {
            "cuStreamWriteValue64, host memory": prepared("cuStreamWriteValue64_v2", stream, host, 1, 0),
            "cuStreamWriteValue64, GPU memory": prepared("cuStreamWriteValue64_v2", stream, device, 1, 0),
        }
    return marks


def _turn(driver: Driver, spinning: Spinning, kernel: int, mark: Callable[[], int]) -> tuple[float, float]:
    """Return ns of a mark on the host, and ns between the starts of two kernels on the GPU, which has all of them before it begins."""
    begin, end = driver.handle("cuEventCreate", 0), driver.handle("cuEventCreate", 0)
    target = driver.memory(8)
    stream = spinning.stream
    spinning.start()
    driver.must("cuEventRecord", begin, stream)
    host = 0
    try:
        for _ in range(PAIRS):
            if code := driver.launch(kernel, [target, 1], stream):
                raise DriverError(driver.name(code))
            began = time.perf_counter_ns()
            code = mark()
            host += time.perf_counter_ns() - began
            if code:
                raise DriverError(driver.name(code))
        driver.must("cuEventRecord", end, stream)
    finally:
        spinning.stop()
    driver.must("cuStreamSynchronize", stream)
    ms = ctypes.c_float()
    driver.must("cuEventElapsedTime_v2", ctypes.byref(ms), begin, end)
    for event in (begin, end):
        driver.must("cuEventDestroy_v2", event)
    driver.must("cuMemFree_v2", target)
    return host / PAIRS, 1e6 * ms.value / PAIRS


@question(
    "what do cuStreamWriteValue64 and cuEventRecord cost, for the host and between two kernels?",
    "not known; the agent marks each replay of a graph by cuStreamWriteValue64, and times launches without a probe by two events",
    40,
)
def marks_in_a_stream() -> Answer:
    driver = Driver().open()
    spinning = Spinning(driver, 3)
    kernel = driver.kernel(PUT, "put")
    found: dict[str, dict[str, float | str]] = {}
    times: dict[str, list[tuple[float, float]]] = {}
    marks = _marks(driver, spinning.stream)
    for _ in range(TURNS):
        for name, mark in marks.items():
            if name in found:
                continue
            try:
                times.setdefault(name, []).append(_turn(driver, spinning, kernel, mark))
            except DriverError as error:
                found[name] = {"refused": str(error)}
                driver.must("cuStreamSynchronize", spinning.stream)
    base = [statistics.median(of[i] for of in times["nothing"]) for i in (0, 1)]
    for name, of in times.items():
        if name != "nothing" and name not in found:
            host, device = (statistics.median(one[i] for one in of) - base[i] for i in (0, 1))
            found[name] = {"host_ns": round(host), "gpu_ns": round(device)}
            note(found=found)
    shown = [
        f"{name}: {of.get('refused') or '{host_ns} ns, {gpu_ns} ns on the GPU'.format(**of)}"
        for name, of in found.items()
    ]
    return {
        "answer": "; ".join(shown),
        "agrees": None,
        "found": found,
        "kernel_to_kernel_ns": round(base[1]),
    }

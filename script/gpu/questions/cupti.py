"""CUPTI: whose call a kernel's record belongs to, and whether recording can begin while a kernel runs.

Numbers and offsets are those of cupti_activity.h (CUDA 13).
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

from gpu.driver import PUT, Driver, DriverError, Spinning, Watched
from gpu.questions.asking import Answer, CannotAsk, alone, question
from gpu.questions.waiting import BLOCKED_AFTER
from gpubpf.session.tracing import CUPTI_STAND_IN
from gpubpf.traced.device import cupti_libraries

MEMCPY, DRIVER_CALL, KERNEL, EXTERNAL = 1, 4, 10, 39  # CUPTI_ACTIVITY_KIND_…
CUSTOM = 3  # kind of our external correlation ids
ID = 4711

Pointer, Size = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t)
Requested = ctypes.CFUNCTYPE(None, Pointer, Size, Size)
Completed = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


class Cupti:
    """CUPTI's library, which records activities of these kinds. Raises DriverError without one that records."""

    def __init__(self, *kinds: int) -> None:
        self.library = _load([*filter(None, [os.environ.get(CUPTI_STAND_IN)]), *cupti_libraries()], "CUPTI")
        self.records: list[bytes] = []
        self.keeps: list[Any] = [Requested(self._requested), Completed(self._completed)]
        self.do("cuptiActivityRegisterCallbacks", *self.keeps)
        for kind in kinds:
            self.do("cuptiActivityEnable", kind)

    def do(self, name: str, *arguments: Any) -> None:
        if code := getattr(self.library, name)(*arguments):
            raise DriverError(f"{name}: error {code} of CUPTI")

    def push(self) -> None:
        self.do("cuptiActivityPushExternalCorrelationId", CUSTOM, ctypes.c_uint64(ID))

    def pop(self) -> None:
        self.do("cuptiActivityPopExternalCorrelationId", CUSTOM, ctypes.byref(ctypes.c_uint64()))

    def of(self, kind: int) -> list[bytes]:
        """Return the records of this kind, once CUPTI has delivered them."""
        self.do("cuptiActivityFlushAll", 1)
        return [record for record in self.records if _u32(record, 0) == kind]

    def _requested(self, buffer: Any, size: Any, records: Any) -> None:
        self.keeps.append(memory := ctypes.create_string_buffer(1 << 16))
        buffer[0], size[0], records[0] = ctypes.addressof(memory), len(memory), 0

    def _completed(self, context: Any, stream: int, buffer: int, size: int, valid: int) -> None:
        record = ctypes.c_void_p()
        at = ctypes.c_void_p(buffer)
        while not self.library.cuptiActivityGetNextRecord(at, ctypes.c_size_t(valid), ctypes.byref(record)):
            assert record.value is not None
            self.records.append(ctypes.string_at(record.value, min(160, buffer + valid - record.value)))


def _load(paths: list[str], what: str) -> ctypes.CDLL:
    for path in paths:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise DriverError(f"there is no {what} here")


def _u32(record: bytes, offset: int) -> int:
    return int(struct.unpack_from("<I", record, offset)[0])


def _launch(cupti: Cupti) -> None:
    """Launch a kernel by the driver's call, with the id pushed around it."""
    driver = Driver().open()
    kernel, target = driver.kernel(PUT, "put"), driver.memory(8)
    cupti.push()
    code = driver.launch(kernel, [target, 1])
    cupti.pop()
    if code := code or driver.call("cuCtxSynchronize"):
        raise DriverError(driver.name(code))


def _correlated() -> Answer:
    """Return the correlation ids of a kernel's record, and of the external record with our id."""
    cupti = Cupti(EXTERNAL, DRIVER_CALL, KERNEL)
    _launch(cupti)
    kernels = [_u32(record, 92) for record in cupti.of(KERNEL)]
    external = [
        _u32(record, 16) for record in cupti.of(EXTERNAL) if struct.unpack_from("<Q", record, 8) == (ID,)
    ]
    return {
        "kernel": kernels,
        "external": external,
        "driver's calls": [_u32(record, 32) for record in cupti.of(DRIVER_CALL)],
        "carries": len(kernels) == 1 and kernels[0] in external,
    }


def _need_cupti() -> None:
    """Raise CannotAsk unless CUPTI records here."""
    if (why := alone(lambda: bool(Cupti(KERNEL)), 10)) is not True:
        raise CannotAsk(str(why))


@question(
    "does the kernel's record of CUPTI have the correlation id of the driver's launch call?",
    "yes: an external id that is pushed around the driver's call leads to the kernel's record, as the agent needs",
    20,
)
def cupti_correlation() -> Answer:
    _need_cupti()
    found = alone(_correlated, 12)
    if isinstance(found, str):
        return {"answer": found, "agrees": None, "found": {}}
    return {"answer": "yes" if found["carries"] else "no", "agrees": found["carries"], "found": found}


def _enabling(spins: bool) -> tuple[bool, bool, float]:
    """Enable records of kernels, under a kernel that does not end or not. Return whether it waits, whether it comes back, ms."""
    cupti = Cupti(EXTERNAL, MEMCPY)  # as in the agent, from before cuInit on
    driver = Driver().open()
    spinning = Spinning(driver, 5)
    if spins:
        spinning.start()
    watched = Watched(driver, lambda: int(cupti.library.cuptiActivityEnable(KERNEL)))
    waits = not watched.over(BLOCKED_AFTER)
    spinning.stop()
    back = watched.over(6)
    return waits, back, round(watched.ms, 2)


@question(
    "how long does cuptiActivityEnable take for records of kernels while a kernel runs that does not end?",
    "it may wait for the kernel, so the agent enables these records only while nothing runs",
    40,
)
def cupti_enabled_under_a_kernel() -> Answer:
    _need_cupti()
    found = {
        name: alone(lambda spins=spins: _enabling(spins), 14)
        for name, spins in (("alone", False), ("under a kernel", True))
    }
    said = []
    for name, row in found.items():
        if isinstance(row, str):
            said.append(f"{name}: {row}")
        else:
            waits, back, ms = row
            ended = "waits until the kernel ends" if waits and name != "alone" else f"takes {ms} ms"
            said.append(f"{name}, it {ended if back else 'never comes back'}")
    return {"answer": "; ".join(said), "agrees": None, "found": found}

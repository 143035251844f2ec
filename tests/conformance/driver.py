"""Run PTX kernels through the driver API of the embedded device: in this process, or each of a file's under a tool.

`python -m conformance.driver JOBS.json RESULTS.json` runs a list of jobs and writes their outputs in hexadecimal.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpubpf.traced.device import LIBRARIES

SHARED = 1024  # bytes of dynamic shared memory that each launch gets


class DriverError(Exception):
    """A driver function failed. The message has the function, the error's name and the device's log."""


@dataclass(frozen=True)
class Job:
    """One launch of one block: the kernel gets the addresses of `given` and of `room` zeroed bytes, which are its result.

    given: None: the address of the result takes the place of the first argument, too.
    """

    ptx: str
    kernel: str
    given: bytes | None
    room: int
    threads: int = 1

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "given": None if self.given is None else self.given.hex()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Job:
        return cls(**{**value, "given": None if value["given"] is None else bytes.fromhex(value["given"])})


class Driver:
    """The embedded device. Each job has a context of its own, so a fault of one leaves the others alone."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(LIBRARIES / "libcuda.so.1"))
        self.must("cuInit", 0)

    def must(self, name: str, *arguments: object) -> None:
        if code := getattr(self.library, name)(*arguments):
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'an unknown error').decode()}")

    def run(self, job: Job) -> bytes:
        """Return the result's bytes. Raises DriverError."""
        context = ctypes.c_void_p()
        self.must("cuCtxCreate_v2", ctypes.byref(context), 0, 0)
        try:
            return self._run(job)
        finally:
            self.library.cuCtxDestroy_v2(context)

    def _run(self, job: Job) -> bytes:
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._load(module, job.ptx)
        self.must("cuModuleGetFunction", ctypes.byref(kernel), module, job.kernel.encode())
        result = self._memory(bytes(job.room))
        given = result if job.given is None else self._memory(job.given)
        arguments = (ctypes.c_void_p * 2)(
            ctypes.cast(ctypes.byref(given), ctypes.c_void_p),
            ctypes.cast(ctypes.byref(result), ctypes.c_void_p),
        )
        shape = (1, 1, 1, job.threads, 1, 1, SHARED)
        self.must("cuLaunchKernel", kernel, *shape, ctypes.c_void_p(), arguments, ctypes.c_void_p())
        self.must("cuCtxSynchronize")
        data = ctypes.create_string_buffer(job.room)
        self.must("cuMemcpyDtoH_v2", data, result, ctypes.c_size_t(job.room))
        return data.raw

    def _memory(self, data: bytes) -> ctypes.c_uint64:
        made = ctypes.c_uint64()
        self.must("cuMemAlloc_v2", ctypes.byref(made), ctypes.c_size_t(max(1, len(data))))
        self.must("cuMemcpyHtoD_v2", made, data, ctypes.c_size_t(len(data)))
        return made

    def _load(self, module: ctypes.c_void_p, ptx: str) -> None:
        log = ctypes.create_string_buffer(4096)
        options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER, its size in bytes
        values = (ctypes.c_void_p * 2)(ctypes.cast(log, ctypes.c_void_p).value, len(log))
        try:
            self.must("cuModuleLoadDataEx", ctypes.byref(module), ptx.encode(), 2, options, values)
        except DriverError as error:
            said = log.value.decode(errors="replace").strip()
            raise DriverError(f"{error}: {said}" if said else str(error)) from None


def main(arguments: Sequence[str]) -> None:
    jobs, results = map(Path, arguments)
    driver = Driver()
    found = []
    for job in json.loads(jobs.read_text()):
        try:
            found.append(driver.run(Job.from_json(job)).hex())
        except DriverError as error:
            found.append(f"error: {error}")
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])

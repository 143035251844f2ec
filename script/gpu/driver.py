"""The CUDA driver through ctypes, for questions/: calls by name, with 64-bit numbers."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

# As cuda.h has them; the tests compare.
CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
CU_EVENT_DISABLE_TIMING = 2
CU_FUNC_ATTRIBUTE_NUM_REGS = 4
CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
CU_GET_PROC_ADDRESS_LEGACY_STREAM = 1
CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM = 2
CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4
CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6
CU_MEMHOSTALLOC_DEVICEMAP = 2
CU_MEMHOSTREGISTER_DEVICEMAP = 2
CU_MODULE_EAGER_LOADING = 1
CU_MODULE_LAZY_LOADING = 2
CU_STREAM_LEGACY = 1
CU_STREAM_NON_BLOCKING = 1
CU_STREAM_CAPTURE_MODE_GLOBAL = 0
CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1
CU_STREAM_CAPTURE_MODE_RELAXED = 2


class DriverError(Exception):
    """A call that had to succeed failed."""


def _number(value: Any) -> Any:
    """Return a value as a ctypes type of 64 bits; ctypes passes a Python int as 32 bits."""
    if isinstance(value, bool):
        return ctypes.c_int64(int(value))
    if isinstance(value, int):
        return ctypes.c_uint64(value) if value >= 0 else ctypes.c_int64(value)
    return value


class Driver:
    """The driver's functions: `call` returns the CUresult, `must` raises DriverError if it is not 0."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.context = 0
        self.names: dict[int, str] = {}
        self.keeps: list[object] = []

    def has(self, name: str) -> bool:
        return hasattr(self.library, name)

    def call(self, name: str, *arguments: Any) -> int:
        if not self.has(name):
            raise DriverError(f"{name} is not exported")
        return int(getattr(self.library, name)(*(_number(a) for a in arguments)))

    def must(self, name: str, *arguments: Any) -> None:
        if code := self.call(name, *arguments):
            raise DriverError(f"{name}: {self.name(code)}")

    def handle(self, name: str, *arguments: Any) -> int:
        """Call a function whose first parameter takes the result, and return that result."""
        found = ctypes.c_uint64()
        self.must(name, ctypes.byref(found), *arguments)
        return found.value

    def name(self, code: int) -> str:
        """Return the name of a CUresult."""
        if code not in self.names:
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
            self.names[code] = (text.value or str(code).encode()).decode()
        return self.names[code]

    def open(self) -> Driver:
        """Make the primary context of GPU 0 current in this thread."""
        self.must("cuInit", 0)
        self.context = self.handle("cuDevicePrimaryCtxRetain", 0)
        self.must("cuCtxSetCurrent", self.context)
        return self

    def attribute(self, number: int) -> int:
        found = ctypes.c_int()
        self.must("cuDeviceGetAttribute", ctypes.byref(found), number, 0)
        return found.value

    def cc(self) -> int:
        """Return the compute capability: 90 for 9.0."""
        return 10 * self.attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) + self.attribute(
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
        )

    def multiprocessors(self) -> int:
        return self.attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)

    def module(self, image: bytes) -> int:
        return self.handle("cuModuleLoadData", ctypes.c_char_p(image))

    def function(self, module: int, name: str) -> int:
        return self.handle("cuModuleGetFunction", module, ctypes.c_char_p(name.encode()))

    def kernel(self, ptx: str, name: str) -> int:
        return self.function(self.module(ptx.encode() + b"\0"), name)

    def stream(self) -> int:
        """Create a stream that does not wait for the legacy stream."""
        return self.handle("cuStreamCreate", CU_STREAM_NON_BLOCKING)

    def memory(self, size: int) -> int:
        """Allocate zeroed GPU memory."""
        address = self.handle("cuMemAlloc_v2", size)
        self.zero(address, size)
        return address

    def zero(self, address: int, size: int) -> None:
        """Zero GPU memory, without waiting."""
        self.must("cuMemsetD8_v2", address, 0, size)
        self.must("cuStreamSynchronize", CU_STREAM_LEGACY)

    def pinned(self, count: int) -> tuple[Any, int]:
        """Return an array of u64 in pinned host memory, and its address."""
        address = self.handle("cuMemHostAlloc", 8 * count, CU_MEMHOSTALLOC_DEVICEMAP)
        words = (ctypes.c_uint64 * count).from_address(address)
        ctypes.memset(address, 0, 8 * count)
        return words, address

    def read(self, address: int, count: int) -> list[int]:
        """Return u64s from GPU memory."""
        words = (ctypes.c_uint64 * count)()
        self.must("cuMemcpyDtoH_v2", words, address, 8 * count)
        return list(words)

    def launch(
        self, function: int, arguments: Sequence[int], stream: int = 0, grid: int = 1, block: int = 1
    ) -> int:
        """Launch a kernel whose parameters are all u64; return the CUresult."""
        return self.call(
            "cuLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, stream, pointers(arguments), 0
        )


def pointers(arguments: Sequence[int]) -> Any:
    """Return kernelParams for u64 parameters; the array keeps alive what it points to."""
    values = (ctypes.c_uint64 * max(len(arguments), 1))(*arguments)
    found = (ctypes.c_void_p * max(len(arguments), 1))(
        *(ctypes.addressof(values) + 8 * i for i in range(len(arguments)))
    )
    found.keeps = values  # type: ignore[attr-defined]
    return found


class Watched:
    """A call on its own thread: whether it returns in time, and the name of its result."""

    def __init__(self, driver: Driver, action: Callable[[], int]) -> None:
        self.said = ""
        self.ms = 0.0

        def run() -> None:
            try:
                driver.must("cuCtxSetCurrent", driver.context)
                began = time.perf_counter()
                self.said = driver.name(action())
                self.ms = 1000 * (time.perf_counter() - began)
            except DriverError as error:
                self.said = str(error)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def over(self, seconds: float) -> bool:
        self.thread.join(seconds)
        return not self.thread.is_alive()


PTX = """.version 7.0
.target sm_75
.address_size 64
"""

# spin(flags, ns): sets flags[1], then waits for flags[0], but no longer than that. It rests between two looks, so that thousands of it
# leave the bus to others.
SPIN = (
    PTX
    + """
.visible .entry spin(.param .u64 flags, .param .u64 ns) {
    .reg .pred %p<3>; .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [flags];
    ld.param.u64 %rd2, [ns];
    mov.u64 %rd3, 1;
    st.volatile.global.u64 [%rd1+8], %rd3;
    mov.u64 %rd4, %globaltimer;
again:
    ld.volatile.global.u64 %rd5, [%rd1];
    setp.ne.u64 %p1, %rd5, 0;
    @%p1 bra done;
    nanosleep.u32 500;
    mov.u64 %rd6, %globaltimer;
    sub.u64 %rd7, %rd6, %rd4;
    setp.lt.u64 %p2, %rd7, %rd2;
    @%p2 bra again;
done:
    ret;
}
"""
)

# put(address, value): *address = value
PUT = (
    PTX
    + """
.visible .entry put(.param .u64 address, .param .u64 value) {
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [address];
    ld.param.u64 %rd2, [value];
    st.global.u64 [%rd1], %rd2;
    ret;
}
"""
)

# The same with a parameter more, and another result: what a copy with probes is to its original.
PUT_COPY = (
    PTX
    + """
.visible .entry put(.param .u64 address, .param .u64 value, .param .align 8 .b8 hidden[16]) {
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [address];
    ld.param.u64 %rd2, [value];
    ld.param.u64 %rd3, [hidden+8];
    add.u64 %rd4, %rd2, %rd3;
    st.global.u64 [%rd1], %rd4;
    ret;
}
"""
)


class Spinning:
    """A kernel that runs until it is stopped, or for `seconds` at most."""

    def __init__(self, driver: Driver, seconds: float = 6) -> None:
        self.driver = driver
        self.flags, address = driver.pinned(2)
        self.stream = driver.stream()
        self.address = address
        self.function = driver.kernel(SPIN, "spin")
        self.seconds = seconds

    def start(self, stream: int | None = None, grid: int = 1, block: int = 1) -> None:
        self.flags[0] = self.flags[1] = 0
        where = self.stream if stream is None else stream
        if code := self.driver.launch(
            self.function, [self.address, int(1e9 * self.seconds)], where, grid, block
        ):
            raise DriverError(f"the spinning kernel: {self.driver.name(code)}")
        ends = time.monotonic() + 5
        while not self.flags[1] and time.monotonic() < ends:
            time.sleep(0.001)
        if not self.flags[1]:
            raise DriverError("the spinning kernel does not start")

    def stop(self) -> None:
        self.flags[0] = 1

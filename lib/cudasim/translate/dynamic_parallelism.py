"""The functions of the device runtime (cuda_device_runtime_api.h): kernels that launch kernels, copy and allocate.

Each function has a number, also in device_abi.h. The engine runs it (engine/dynamic_parallelism.cpp).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DIM3 = 12  # bytes of a dim3, which is passed as three arguments


@dataclass(frozen=True)
class Call:
    """A function of the device runtime.

    number     CS_CALL_… of device_abi.h
    arguments  the sizes of the arguments, in bytes
    result     the size of the result, in bytes
    """

    number: int
    arguments: tuple[int, ...]
    result: int = 4


_CALLS = {
    "GetParameterBufferV2": Call(0, (8, DIM3, DIM3, 4), 8),
    "LaunchDeviceV2": Call(1, (8, 8)),
    "GetLastError": Call(2, ()),
    "PeekAtLastError": Call(3, ()),
    "GetErrorString": Call(4, (4,), 8),
    "GetDeviceCount": Call(5, (8,)),
    "GetDevice": Call(6, (8,)),
    "StreamCreateWithFlags": Call(7, (8, 4)),
    "StreamDestroy": Call(8, (8,)),
    "StreamWaitEvent": Call(8, (8, 8, 4)),
    "EventCreateWithFlags": Call(7, (8, 4)),
    "EventRecord": Call(8, (8, 8)),
    "EventRecordWithFlags": Call(8, (8, 8, 4)),
    "EventDestroy": Call(8, (8,)),
    "Malloc": Call(9, (8, 8)),
    "Free": Call(10, (8,)),
    "MemcpyAsync": Call(11, (8, 8, 8, 4, 8)),
    "MemsetAsync": Call(12, (8, 4, 8, 8)),
    "GraphSetConditional": Call(13, (8, 4), 0),
}
_NAME = re.compile(r"(?:__cudaCDP2|cuda)(\w+?)(?:_ptsz)?")


def find(name: str) -> Call | None:
    """Return the function of the device runtime that PTX calls by this name; None if the embedded device has none."""
    match = _NAME.fullmatch(name)
    return _CALLS.get(match[1]) if match else None

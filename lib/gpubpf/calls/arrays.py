"""The sums and events that the eBPF programs write, as NumPy arrays. include/gpubpf_calls.h defines the same
structures in C.

Sums (`sum_dtype`) have the fields `tgid`, `function` (its number), `kernel` (its handle, or 0), `count`,
`errors`, `error` (the code of the last error), `ns`, `largest_ns` and `off_ns`. For launches they also have
`gaps`, `gap_ns`, `gap_largest_ns` and `gap_off_ns`: the time since the previous launch of the same thread
returned. `latency` and `gap` are histograms; see `percentile`.

Events have the fields `start_ns`, `end_ns` (CLOCK_BOOTTIME), `result`, `out` (the handle or address that the
call produced), `kernel`, `gap_ns`, `gap_off_ns`, `spent` (struct call_spent; see `off_ns`), `cgroup`,
`arguments` (6 registers), `stack` (4 words), `memory` (2 windows of 5 words), `tgid`, `tid`, `function`,
`failed`, `launch`, `after` (the thread launched before, so `gap_ns` is valid) and `comm`. `values` and
`shapes` decode the arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gpubpf.calls.api import REGISTERS, ApiFunction, ArgumentPlace
from gpubpf.record import Record

if TYPE_CHECKING:
    import numpy as np

GAP = 0xFFFFFFFF  # in place of a function's number: the gap between two launches of a thread
# Histograms have STEPS buckets per factor of two; the first bucket is below 1 << SHIFT ns.
STEPS, SHIFT, BUCKETS = 8, 6, 288
STACK, WINDOWS, WORDS = 4, 2, 5
NOWHERE, MEMORY = 255, REGISTERS + STACK
_SHAPES = ("grid", "block")


class Layout(Record):
    """How the eBPF program reads a function's arguments: struct call_layout.

    A place is 0 to 5 for registers, 6 to 9 for words on the stack, MEMORY for the first window, or NOWHERE.

    stack: number of words on the stack to read.
    windows: for each window of memory, the argument that points to it and the offset in bytes.
    """

    launch: bool
    kernel: int
    result: int
    stack: int
    out: int
    windows: tuple[tuple[int, int], ...]

    def bytes(self) -> bytes:
        """Return the bytes of the struct call_layout."""
        windows = (*self.windows, *((NOWHERE, 0),) * WINDOWS)[:WINDOWS]
        head = (self.launch, self.kernel, self.result, self.stack, self.out, *(place for place, _ in windows))
        return bytes(head).ljust(8, b"\0") + b"".join(offset.to_bytes(2, "little") for _, offset in windows)


def layout(function: ApiFunction) -> Layout:
    """Return how to read a function's arguments. Raise ValueError if they are too many or too far apart."""
    places = function.places
    kernel, out = places.get("kernel"), places.get("out")
    windows: dict[int, int] = {}
    ends: dict[int, int] = {}
    if kernel is not None and kernel.offset is not None:
        windows[kernel.argument] = kernel.offset
    last = 0
    for field, place in places.items():
        if place.number is not None:
            continue
        last = max(last, place.argument + _arguments(field, place))
        if place.offset is not None:
            at, size = place.argument, 12 if field in _SHAPES else 8
            windows[at] = min(place.offset, windows.get(at, place.offset))
            ends[at] = max(place.offset + size, ends.get(at, 0))
    fits = last <= MEMORY and len(windows) <= WINDOWS
    fits = fits and all(ends[at] - start <= 8 * WORDS for at, start in windows.items())
    if kernel is not None and kernel.offset is not None:
        fits = fits and windows[kernel.argument] == kernel.offset
    if not fits:
        raise ValueError(f"{function.name}: its arguments are too many, or too far apart, to be read")
    place_of_kernel = NOWHERE if kernel is None else MEMORY if kernel.offset is not None else kernel.argument
    return Layout(
        function.group == "launch",
        place_of_kernel,
        ("status", "query", "other").index(function.result),
        max(0, last - REGISTERS),
        NOWHERE if out is None else out.argument,
        tuple(windows.items()),
    )


def layouts(functions: Iterable[tuple[int, ApiFunction]], size: int) -> bytes:
    """Return the layouts of numbered functions as a struct call_layouts of `size` bytes. Raise ValueError if
    they do not fit.
    """
    made = bytearray(size)
    for number, function in functions:
        one = layout(function).bytes()
        made[number * len(one) : (number + 1) * len(one)] = one
    if len(made) != size:
        raise ValueError("there are more functions than the program has room for")
    return bytes(made)


def _arguments(field: str, place: ArgumentPlace) -> int:
    """Return how many arguments hold the field."""
    if field not in _SHAPES or place.offset is not None:
        return 1
    return 2 if place.packed else 3


def sum_dtype(key: np.dtype[Any], value: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that combines the key and the value of the map call_sums."""
    import numpy as np

    fields = [(name, key[name]) for name in ("tgid", "function", "kernel")]
    return np.dtype(fields + [(name, value[name]) for name in value.names or ()])


def _arguments_of(events: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the arguments in registers and on the stack: shape (events, 10)."""
    import numpy as np

    return np.concatenate([events["arguments"], events["stack"]], axis=1)


def _pointed(
    function: ApiFunction, place: ArgumentPlace, events: np.ndarray[Any, Any], kind: str
) -> np.ndarray[Any, Any]:
    """Return the values of type `kind` from `place` in memory to the end of the window: shape (events, values)."""
    import numpy as np

    windows = layout(function).windows
    number = [argument for argument, _ in windows].index(place.argument)
    start = (place.offset or 0) - windows[number][1]
    data = (
        np.ascontiguousarray(events["memory"][:, number * WORDS : (number + 1) * WORDS])
        .view(np.uint8)
        .reshape(len(events), 8 * WORDS)
    )
    size = np.dtype(kind).itemsize
    count = (8 * WORDS - start) // size
    return np.ascontiguousarray(data[:, start : start + count * size]).view(kind)


def values(function: ApiFunction, events: np.ndarray[Any, Any], field: str) -> np.ndarray[Any, Any] | None:
    """Return a field of calls of one function: shape (events,), 64 bits; None if the function has no such
    field.

    For `grid` and `block` use `shapes`.
    """
    import numpy as np

    place = function.places.get(field)
    if place is None:
        return None
    if field == "out":
        found = events["out"]
    elif place.number is not None:
        found = np.full(len(events), place.number, "<u8")
    elif place.offset is not None:
        found = _pointed(function, place, events, "<u8")[:, 0]
    else:
        found = _arguments_of(events)[:, place.argument]
    return found & np.uint64(0xFFFFFFFF) if field in ("shared", "copy") else found


def shapes(function: ApiFunction, events: np.ndarray[Any, Any], field: str) -> np.ndarray[Any, Any] | None:
    """Return `grid` or `block` of launches of one function: shape (events, 3); None if the function has no
    such field.

    A grid is always in blocks, even if the call gives it in threads.
    """
    import numpy as np

    place = function.places.get(field)
    if place is None:
        return None
    if place.offset is not None:
        found = _pointed(function, place, events, "<u4")[:, :3].astype("<u8")
    else:
        words = _arguments_of(events)[:, place.argument :]
        low = np.uint64(0xFFFFFFFF)
        if place.packed:
            parts = [words[:, 0] & low, words[:, 0] >> np.uint64(32), words[:, 1] & low]
        else:
            parts = [words[:, i] & low for i in range(3)]
        found = np.stack(parts, axis=1)
    if place.items and field == "grid":
        block = shapes(function, events, "block")
        if block is not None:
            found = -(-found.astype("i8") // np.maximum(block.astype("i8"), 1)).astype("<u8")
    return found


def off_ns(spent: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the time off the CPU, given an array of struct call_spent."""
    return spent["preempted_ns"] + spent["blocked_ns"] + spent["io_ns"] + spent["fault_ns"]


def bounds() -> np.ndarray[Any, Any]:
    """Return the start of each bucket of a histogram, and the end of the last: shape (BUCKETS + 1,), ns."""
    import numpy as np

    number = np.arange(BUCKETS, dtype="f8") - 1
    exponent, step = np.floor(number / STEPS) + SHIFT, number % STEPS
    starts = np.where(number < 0, 0, 2**exponent * (1 + step / STEPS))
    return np.append(starts, 2.0 ** (BUCKETS // STEPS + SHIFT + 1))


def percentile(hist: np.ndarray[Any, Any], q: float, largest: int | None = None) -> int:
    """Return the quantile `q` (0 to 1) of a histogram in ns, within 6 %; 0 if the histogram is empty.

    `largest`: the largest value that was counted; the result does not exceed it.
    """
    import numpy as np

    total = int(hist.sum(dtype="u8"))
    if not total:
        return 0
    bucket = int(np.searchsorted(np.cumsum(hist, dtype="u8"), max(1, int(np.ceil(q * total)))))
    edges = bounds()
    middle = int((edges[bucket] + edges[bucket + 1]) / 2)
    return middle if largest is None else min(middle, largest)

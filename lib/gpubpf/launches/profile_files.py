"""Write the profile of a whole measurement as a file for other programs: speedscope, pprof, and a browser."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from gpubpf.errors import Error
from gpubpf.launches import flame_graph
from gpubpf.launches.frames import Frame
from gpubpf.launches.profile import StackRow
from gpubpf.records.fields import KERNEL
from gpubpf.show.new_file import open_new
from gpubpf.show.table import printable

TOOL = "gpuprofile"
_SPEEDSCOPE = "https://www.speedscope.app/file-format-schema.json"


def write(path: str, form: str, rows: Sequence[StackRow], by: str) -> None:
    """Create the file of a form. Raises Error if it cannot be written.

    form: one of FORMS.
    by: "time" or "launches".
    """
    try:
        with open(open_new(path), "wb") as file:
            file.write(FORMS[form](rows, by))
    except OSError as error:
        raise Error(f"cannot write {printable(path)}: {error.strerror}; choose another file") from None


def frames_of(row: StackRow) -> Iterator[Frame]:
    """Yield the frames of a row as files have them, outermost first, with the kernel last."""
    yield from row.stack.shown
    yield Frame(KERNEL.value(row), "", kind=flame_graph.KERNEL)


def _process(row: StackRow) -> str:
    return f"{printable(row.comm)} (pid {row.pid})"


def speedscope(rows: Iterable[StackRow], by: str) -> bytes:
    """Return a file for https://www.speedscope.app: a profile for each process and GPU."""
    numbers: dict[tuple[Any, ...], int] = {}
    frames: list[dict[str, Any]] = []

    def number(frame: Frame) -> int:
        key = frame.name, frame.file, frame.line
        if key not in numbers:
            numbers[key] = len(frames)
            made: dict[str, Any] = {"name": printable(frame.name)}
            made |= {"file": printable(frame.file)} if frame.file else {}
            frames.append(made | ({"line": frame.line} if frame.line is not None else {}))
        return numbers[key]

    profiles: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        made = profiles.setdefault(
            (row.process, row.gpu),
            {
                "type": "sampled",
                "name": f"{_process(row)}, GPU {row.gpu}",
                "unit": "nanoseconds" if by == "time" else "none",
                "startValue": 0,
                "endValue": 0,
                "samples": [],
                "weights": [],
            },
        )
        made["samples"].append([number(frame) for frame in frames_of(row)])
        made["weights"].append(row.weight(by))
        made["endValue"] += row.weight(by)
    whole = {
        "$schema": _SPEEDSCOPE,
        "exporter": TOOL,
        "shared": {"frames": frames},
        "profiles": [*profiles.values()],
    }
    return json.dumps(whole, separators=(",", ":")).encode()


def pprof(rows: Iterable[StackRow], by: str) -> bytes:
    """Return a file for pprof: a compressed message of the type Profile (github.com/google/pprof, proto/profile.proto).

    Each sample has the number of launches and the time, and labels with its process and GPU. `by` chooses the value that pprof shows
    first.
    """
    strings: dict[str, int] = {"": 0}
    functions: dict[tuple[str, str], int] = {}
    locations: dict[Frame, int] = {}

    def text(value: str) -> int:
        return strings.setdefault(printable(value), len(strings))

    def location(frame: Frame) -> int:
        functions.setdefault((frame.name, frame.file), len(functions) + 1)
        return locations.setdefault(frame, len(locations) + 1)

    types = ("launches", "count"), ("time", "nanoseconds")
    whole = [_field(1, _message((1, text(kind)), (2, text(unit)))) for kind, unit in types]
    for row in rows:
        labels = (
            _message((1, text("process")), (2, text(_process(row)))),
            _message((1, text("gpu")), (2, text(str(row.gpu)))),
        )
        places = [location(frame) for frame in frames_of(row)]
        sample = [(1, place) for place in reversed(places)]  # the innermost first
        sample += [(2, row.launches), (2, row.gpu_ns)]
        whole.append(_field(2, _message(*sample, *((3, label) for label in labels))))
    for frame, number in locations.items():
        line = _message((1, functions[frame.name, frame.file]), (2, frame.line or 0))
        whole.append(_field(4, _message((1, number), (4, line))))
    for (name, file), number in functions.items():
        whole.append(_field(5, _message((1, number), (2, text(name)), (3, text(name)), (4, text(file)))))
    whole.append(_field(14, text(by)))
    whole[:0] = [_field(6, value.encode()) for value in strings]
    return gzip.compress(b"".join(whole), mtime=0)


def _message(*fields: tuple[int, int | bytes]) -> bytes:
    return b"".join(_field(number, value) for number, value in fields)


def _field(number: int, value: int | bytes) -> bytes:
    """Return a field of a message: an unsigned number as varint, bytes with their length (protobuf.dev, "Encoding")."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*made, value))


def _svg(rows: Iterable[StackRow], by: str) -> bytes:
    weights = ((tuple(frames_of(row)), row.weight(by), _process(row)) for row in rows)
    return flame_graph.svg(weights, by).encode()


FORMS: dict[str, Callable[[Sequence[StackRow], str], bytes]] = {
    "speedscope": speedscope,
    "pprof": pprof,
    "svg": _svg,
}

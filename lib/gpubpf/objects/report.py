"""What an object's programs print and leave in maps, as records, rows and text."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gpubpf import names
from gpubpf.ebpf import maps
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.lower import ir
from gpubpf.record import Record, replace
from gpubpf.records.fields import GPU, KERNEL, MANGLED, SHAPE, STAMP
from gpubpf.session.records import HOST_PROGRAMS, VERIFIED_BY, of_every_tool
from gpubpf.show import notices, table
from gpubpf.show.fields import Field, Fields, having, many, maybe, values_of
from gpubpf.show.process_records import PROCESS

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.program import BPF
    from gpubpf.session.session import Session
    from gpubpf.show.output import Output
    from gpubpf.show.result_writer import ResultWriter

_MOST_LINES = 100  # maximum lines of a map in the text for people
_LONGEST_NAME = 60  # maximum columns of a map's name in that text
_LABEL = table.WIDTH - len("  of ,")  # columns of a kernel's name
PRINT = Fields(
    "print",
    "One for each text that a device program printed.",
    (
        *PROCESS,
        GPU,
        Field("program", "string", "if several programs print the same text, all of them"),
        Field("text", "string"),
    ),
)
_BY_THREAD = "for values by thread, warp or block"
_HOST = "for the arrays of the Linux kernel, of COMMAND or of the only process of -p, and otherwise null"
MAP = Fields(
    "map",
    "One for each map, and for each process, kernel and launch shape that has its own copy.",
    (
        *(Field(one.name, maybe(one.type), f"{one.meaning}; {_HOST}") for one in PROCESS),
        Field(
            "gpu",
            "integer",
            GPU.meaning,
            when="but for an array in host memory and a map in the Linux kernel",
        ),
        Field("map", "string", "its name"),
        Field("kind", "string"),
        *(replace(one, get=None, header="", when=_BY_THREAD) for one in (KERNEL, MANGLED, *SHAPE)),
        Field("launches", "integer", when=_BY_THREAD),
        Field(
            "entries",
            many(having(Field("key", "any", when="but for a ring buffer"), Field("value", "any"))),
            "keys and values",
        ),
        STAMP,
    ),
    csv="pid comm gpu map kernel unit key value mangled grid block_dim",
    csv_fields=(Field("unit", "integer"), Field("key", "string"), Field("value", "string")),
)
RECORDS = (PRINT, MAP, *of_every_tool(HOST_PROGRAMS, VERIFIED_BY))


class Contents(Record):
    """What is in one map, or the new records of a ring buffer.

    owner    fields of the owner: pid and comm of the process, and gpu. A map of the Linux kernel has no gpu. Its pid and comm are None
             unless exactly one process is traced.
    kernel   fields with the kernel and launch shape; empty if all kernels share the map
    entries  keys and values in JSON types; records have no keys
    unit     the unit that has a separate value in each entry, such as "thread"; "": an entry has one value
    """

    definition: MapDefinition
    owner: Mapping[str, Any]
    kernel: Mapping[str, Any]
    entries: Sequence[tuple[Any, Any]]
    unit: str = ""

    def record(self) -> dict[str, Any]:
        """Return the JSON record."""
        ring = self.definition.kind == "ringbuf"
        entries = [{"value": value} if ring else {"key": key, "value": value} for key, value in self.entries]
        about = {"map": self.definition.name, "kind": self.definition.kind}
        return MAP.record(**self.owner, **about, **self.kernel, entries=entries)

    def rows(self) -> Iterator[list[object]]:
        """Yield the rows of the CSV table."""
        row = MAP.row({**self.owner, "map": self.definition.name, **self.kernel})
        at = MAP.columns.index("unit")
        for key, value in self.entries:
            cells = enumerate(value) if self.unit else [(None, value)]
            for unit, one in cells:
                row[at : at + 3] = unit, None if key is None else shown(key), shown(one)
                yield row[:]

    def lines(self, labels: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
        """Yield the lines for people. Successive equal values share one line. labels: labels of kernels, by mangled name."""
        title = f"{table.fit(self.definition.name, _LONGEST_NAME)} ({self.definition.kind.replace('_', ' ')}"
        title += f" by {self.unit})" if self.unit and self.unit not in title else ")"
        if self.owner["pid"] is not None:
            title += f"; {table.process(self.owner['comm'], self.owner['pid'])}"
        yield from table.wrap(title)
        if self.kernel:
            label = labels.get(self.kernel["mangled"], self.kernel["kernel"])
            yield from table.wrap(f"of {label}, {_shape(self.kernel)}", 2)
        if not self.entries:
            yield "  empty"
        if self.definition.kind == "ringbuf":
            yield from (f"  {shown(value)}" for _, value in self.entries)
            return
        lines = list(self._values())
        yield from lines[:_MOST_LINES]
        if len(lines) > _MOST_LINES:
            yield f"  ... {table.count(len(lines) - _MOST_LINES, 'more line')}; --json and --csv show all values"

    def _values(self) -> Iterator[str]:
        """Yield a line for each value, or for several that are equal."""
        if not self.unit:
            for first, last, one in _runs(self.entries):
                yield f"  {shown(first) if first == last else f'{shown(first)}-{shown(last)}'}: {shown(one)}"
            return
        blocks = math.prod(self.kernel["grid"]) if self.unit in ("thread", "warp") else 0
        for key, values in self.entries:
            found = _of_units(self.unit, values)
            if blocks > 1 and len(found) > 1 and len(values) % blocks == 0:
                found = min(found, _of_blocks(self.unit, values, len(values) // blocks), key=len)
            yield from (f"  {shown(key)}: {line}" for line in found)


def _shape(kernel: Mapping[str, Any]) -> str:
    grid, block = (" x ".join(map(str, kernel[name])) for name in ("grid", "block_dim"))
    return f"grid {grid}, block {block}"


def _runs(entries: Sequence[tuple[Any, Any]]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (first key, last key, value) of entries. Successive integer keys with equal values are one range."""
    run: tuple[Any, Any, Any] | None = None
    for key, value in entries:
        if run is not None and value == run[2] and isinstance(key, int) and key == run[1] + 1:
            run = (run[0], key, value)
            continue
        if run is not None:
            yield run
        run = (key, key, value)
    if run is not None:
        yield run


def _of_units(unit: str, values: Sequence[Any]) -> list[str]:
    """Return a line for each range of units with equal values."""
    return [
        f"{_range(unit, first, last)}: {shown(one)}" for first, last, one in _runs(list(enumerate(values)))
    ]


def _of_blocks(unit: str, values: Sequence[Any], width: int) -> list[str]:
    """Return the lines by blocks of `width` units. Successive blocks with equal values share their lines."""
    blocks = [(number, values[at : at + width]) for number, at in enumerate(range(0, len(values), width))]
    return [
        f"{_range('block', first, last)}, {line}"
        for first, last, own in _runs(blocks)
        for line in _of_units(unit, own)
    ]


def _range(unit: str, first: int, last: int) -> str:
    return f"{unit} {first}" if first == last else f"{unit}s {first}-{last}"


class Reader:
    """Reads what an object's programs print, send and keep in maps. `programs`: the names of the attached programs."""

    def __init__(self, bpf: BPF, programs: Iterable[str]) -> None:
        self._bpf = bpf
        self._used = {
            name: {i.map for i in bpf.attached.programs.program.functions[name].instructions}
            for name in programs
        }
        used = set().union(*self._used.values())
        self._definitions = [
            one for one in bpf.attached.programs.maps.values() if one.name in used and not one.constant
        ]
        self._printing = bpf.attached.printing()
        self._stopped: Counter[str] = Counter()  # by program: threads whose loop was stopped

    def prints(self, session: Session) -> list[dict[str, Any]]:
        """Return the records of what was printed on GPUs since the last call."""
        found = []
        formats = self._bpf.attached.formats()
        rings = [name for name in (maps.PRINTS, maps.LONG_PRINTS) if session.has_map(name)]
        for part in (part for name in rings for part in session.rings(name)):
            for record in part.records:
                number = int(record["format"])
                if number in formats and formats[number].endswith(ir.STOPPED):
                    self._stopped.update(self._printing.get(number, ()))
                elif number in formats:
                    text = maps.format_print(formats[number], [int(v) for v in record["arguments"]])
                    program = ", ".join(self._printing.get(number, ()))
                    found.append(PRINT.record(part, program=program, text=text.removesuffix("\n")))
        return found

    def say_stopped(self, tool: str) -> None:
        """Print a notice about programs whose loops were stopped."""
        for program, threads in self._stopped.items():
            notices.note(
                tool,
                f"program {program}: a loop was stopped after {ir.LOOP_TURNS:,} turns in {table.count(threads, 'thread')};"
                " its results are incomplete",
            )

    def records(self, session: Session) -> list[Contents]:
        """Return the new records of all ring buffers."""
        found = []
        for one in self._definitions:
            if one.kind != "ringbuf":
                continue
            if session.has_map(one.name):
                for part in session.rings(one.name):
                    found.append(_of_ring(one, values_of((*PROCESS, GPU), part), part.records))
            elif self._bpf.host_side is not None:
                found.append(_of_ring(one, session.only_process(), self._bpf.host_side.records(one.name)))
        return [part for part in found if part.entries]

    def contents(self, session: Session) -> list[Contents]:
        """Return the contents of all other maps, in the order of the object."""
        found: list[Contents] = []
        for one in self._definitions:
            if one.kind == "shared_array":
                for part in session.shared(one.name):
                    entries = list(enumerate(columns(part.array)))
                    found.append(Contents(one, values_of(PROCESS, part), {}, entries))
            elif one.kind != "ringbuf" and session.has_map(one.name):
                found += [
                    _of_instance(part)
                    for part in session.instances(one.name)
                    if self._uses(one, part.mangled)
                ]
            elif one.kind != "ringbuf" and self._bpf.host_side is not None:
                found += _of_kernel(one, self._bpf.host_side, session.only_process())
        return found

    def _uses(self, definition: MapDefinition, kernel: str) -> bool:
        """Return whether a program in this kernel uses the map. A kernel whose programs do not use it has an instance, too."""
        probes = [
            probe for probe in self._bpf.attached.probes if definition.name in self._used[probe.program]
        ]
        return not kernel or any(names.chosen(probe.kernels, kernel) for probe in probes)


def _of_ring(definition: MapDefinition, owner: Mapping[str, Any], records: Any) -> Contents:
    return Contents(definition, owner, {}, [(None, value) for value in columns(records)])


def _of_instance(one: Any) -> Contents:
    definition, array = one.definition, one.array
    owner = values_of((*PROCESS, GPU), one)
    if definition.kind == "hash":
        entries = sorted(zip(columns(array["key"]), columns(array["value"]), strict=True), key=_order)
        return Contents(definition, owner, {}, entries)
    if definition.kind not in maps.SHAPED:
        return Contents(definition, owner, {}, list(enumerate(columns(array))))
    kernel = values_of((KERNEL, MANGLED, *SHAPE), one) | {"launches": one.launches}
    entries = [(key, columns(row)) for key, row in enumerate(array)]
    return Contents(definition, owner, kernel, entries, maps.SHAPED[definition.kind])


def _of_kernel(definition: MapDefinition, host: Any, owner: Mapping[str, Any]) -> list[Contents]:
    """Return the contents of a map in the Linux kernel; [] if it has no elements that can be listed."""
    try:
        items = host.items(definition.name)
    except (OSError, KeyError):
        return []
    entries = [(plain(item["key"]), plain(item["value"])) for item in items]
    unit = "CPU" if items.dtype["value"].shape != definition.value_dtype.shape else ""
    return [Contents(definition, owner, {}, sorted(entries, key=_order), unit)]


def _order(entry: tuple[Any, Any]) -> list[tuple[int, Any]]:
    """Return the sort key of a map key: its number, or the numbers in its structure."""
    return _parts(entry[0])


def _parts(value: Any) -> list[tuple[int, Any]]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [part for one in value for part in _parts(one)]
    return [(0, value) if isinstance(value, (int, float)) else (1, value)]


class Printer:
    """Writes what a `Reader` finds, in the form that the user chose."""

    def __init__(self, reader: Reader, out: Output, results: ResultWriter) -> None:
        self._reader, self._out, self._results = reader, out, results

    def stream(self, session: Session) -> None:
        """Write what was printed and sent since the last call."""
        prints, records = self._reader.prints(session), self._reader.records(session)
        if self._results.json:
            self._out.records([*prints, *(one.record() for one in records)])
        elif not self._results.csv:
            self._out.lines(f"{one['program']}: {one['text']}" for one in prints)
            self._out.lines(line for one in records for line in one.lines())
        else:
            self._rows(records)

    def maps(self, session: Session) -> None:
        """Write the contents of the maps."""
        self._results.begin()
        found = self._reader.contents(session)
        if self._results.json:
            self._out.records(one.record() | self._results.stamp for one in found)
        elif self._results.csv:
            self._rows(found)
        else:
            labels = names.labels((one.kernel["mangled"] for one in found if one.kernel), _LABEL)
            self._out.lines(line for one in found for line in (*one.lines(labels), ""))

    def _rows(self, found: Iterable[Contents]) -> None:
        self._results.table(MAP.columns, (row for one in found for row in one.rows()))


# --- contents of maps as JSON values and as text ---


def plain(value: Any) -> Any:
    """Return a NumPy value in JSON types.

    Structures become mappings, and arrays become lists. Arrays of char become strings if they are text. Bytes of an unknown type
    become a list of 8-byte words, or of bytes if their number is not a multiple of 8. NaN and infinities become strings.
    """
    import numpy as np

    if isinstance(value, np.void) and value.dtype.names:
        return {name: plain(value[name]) for name in value.dtype.names}
    if isinstance(value, np.void):
        return _words(value.tobytes())
    if isinstance(value, np.ndarray):
        return [plain(one) for one in value]
    if isinstance(value, bytes):
        return _text(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bytes):
        return _text(value)
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


def _words(data: bytes) -> list[int]:
    size = 8 if len(data) % 8 == 0 else 1
    return [int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size)]


def _text(data: bytes) -> str | list[int]:
    """Return an array of char: a string if it is printable text without its zeros at the end, else a list of bytes."""
    try:
        text = data.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        return list(data)
    return text if text.isprintable() else list(data)


def shown(value: Any) -> str:
    """Return a JSON value as text for people."""
    return str(value) if isinstance(value, (int, float, str)) else json.dumps(value, ensure_ascii=False)


def columns(array: np.ndarray[Any, Any]) -> list[Any]:
    """Return the values of an array in JSON types."""
    if array.dtype.names is None and array.dtype.kind in "iufb" and array.ndim == 1:
        values: list[Any] = array.tolist()
        if array.dtype.kind != "f":
            return values
    return [plain(one) for one in array]

"""Turn nansnoop's maps into findings: for each instruction and kind of number, how many there were, and the first one.

findings = Findings(KINDS, stores=False)
for _ in session.intervals(…):
    for one in findings.read(session, since_last):
        …
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf import names
from gpubpf.agent.definitions import NUMBER_MASK
from gpubpf.ebpf.bytecode import FLOAT_OPERATIONS, TYPES
from gpubpf.ebpf.floats import FLOATS, as_float, element, is_denormal, size
from gpubpf.record import Record, replace
from gpubpf.records.fields import BLOCK, KERNEL, MANGLED, OWNER, STAMP, THREAD
from gpubpf.records.kernel_shapes import site_name
from gpubpf.records.launch_shape import Index
from gpubpf.session.records import BUDGET, NOT_PROBED, of_every_tool
from gpubpf.show import table
from gpubpf.show.fields import Field, Fields, having, maybe
from gpubpf.show.summary_text import summary_lines

if TYPE_CHECKING:
    from gpubpf.inject.values import Site
    from gpubpf.session.session import Session
    from gpubpf.show.owner_columns import OwnerColumns

# Process, GPU, kernel (mangled), site, kind.
Place = tuple[int, int, str, int, str]
MOST_BYTES = 16  # maximum bytes of a stored value that a program sees
TITLES = {"nan": "NaN", "inf": "infinity", "overflow": "overflow", "denormal": "denormal number"}


class First(Record):
    """The first number of a kind at an instruction.

    order      the position among the first numbers of the process and GPU, from 1
    value      the number as text: `nan`, `-inf`, `1e-45`
    element    index of its element in a result of several elements, such as a pair of halves
    operands   the instruction's operands as text: of each, the element with this index if it has the result's type, else the first
               element. Empty for a store, and for a multiplication of matrices, whose operands are in several lanes.
    """

    order: int
    launch: int
    block: Index
    thread: Index
    value: str
    element: int
    operands: tuple[str, ...]


class Finding(Record):
    """Numbers of one kind at one instruction.

    count: number of threads whose result had such an element.
    first: the first such number; None if there was no room to record it.
    op: the instruction with its modifiers, or `unknown`.
    wave: lanes of a wave, on an AMD GPU.
    """

    pid: int
    comm: str
    gpu: int
    wave: int | None
    kind: str
    mangled: str
    site: int
    source: str
    op: str
    count: int
    first: First | None

    @property
    def kernel(self) -> str:
        """The name of the kernel without template arguments and parameters."""
        return names.demangle(self.mangled).short

    @property
    def shown(self) -> str:
        """The instruction with its operands: `div.rn.f32(0, 0)`."""
        operands = self.first.operands if self.first is not None else ()
        return f"{self.op}({', '.join(operands)})" if operands else self.op


_FIRST = having(
    Field("launch", "integer", "in its process, from 1"),
    BLOCK,
    THREAD,
    Field("value", "string", "the number as a string"),
    Field("element", "integer", "its place in a result of several elements, from 0"),
    Field("operands", "[string]", "strings; empty if they are unknown"),
)


def _first(one: Finding) -> dict[str, Any] | None:
    return None if one.first is None else {name: getattr(one.first, name) for name in _FIRST["properties"]}


NAN = Fields(
    "nan",
    "One for each instruction and kind, in the order of the first numbers.",
    (
        *OWNER,
        Field("kind", "nan|inf|overflow|denormal"),
        KERNEL,
        MANGLED,
        Field("site", "integer", "number of the instruction in the kernel"),
        Field("source", "string", "file and line, or line of the PTX"),
        Field(
            "op", "string", "the instruction with its modifiers; unknown if kernels of one name differ there"
        ),
        Field("count", "integer", "how many times a thread got such a result"),
        Field(
            "first", maybe(_FIRST), "the first such number, or null if there was no room for it", get=_first
        ),
        STAMP,
    ),
    csv="pid comm gpu kind kernel site source op count first.launch first.block first.thread first.value first.element mangled",
    notes="A result of more than 16 bytes, as wmma has, has a record for each 16 bytes. "
    "With an interval, only instructions with new numbers have a record.",
)
RECORDS = (
    NAN,
    *of_every_tool(BUDGET, NOT_PROBED, Field("not_looked_at", "{integer}", when="with --stores")),
)


class Findings:
    """Reads nansnoop's maps.

    kinds: names of the kinds of number, by their number in the maps.
    stores: the programs look only at numbers that are written to memory.
    any: whether anything was found so far.
    measured: whether a launch was measured so far."""

    def __init__(self, kinds: Sequence[str], stores: bool) -> None:
        self._kinds, self._stores = kinds, stores
        self._before: Counter[Place] = Counter()
        self._sites: dict[tuple[int, str], Mapping[int, Site]] = {}
        self.any = self.measured = False

    def read(self, session: Session, since_last: bool) -> list[Finding]:
        """Return the findings in the order of their first numbers. since_last: only findings with numbers since the last call."""
        found: dict[Place, Finding] = {}
        for instance in session.instances("tallies"):
            counts = instance.array["count"].sum(axis=0)
            for site, kind in zip(*(axis.tolist() for axis in counts.nonzero()), strict=True):
                place = instance.process, instance.gpu, instance.mangled, site, self._kinds[kind]
                count = int(counts[site, kind])
                if place in found:  # from another build of the kernel
                    found[place] = replace(found[place], count=found[place].count + count)
                    continue
                owner = (instance.pid, instance.comm, instance.gpu, instance.wave)
                where = self._place(session, instance.pid, instance.mangled, site)
                found[place] = Finding(*owner, place[4], instance.mangled, site, *where, count, None)
        kernels = session.kernel_names()
        for instance in session.instances("firsts"):
            for entry in instance.array:
                kernel, site, kind = (int(entry["key"][name]) for name in ("kernel", "site", "kind"))
                mangled = kernels.get(instance.process, {}).get(kernel, "")
                name = self._kinds[kind] if kind < len(self._kinds) else ""
                place = instance.process, instance.gpu, mangled, site, name
                # The traced program can write to the map.
                if place in found and (first := first_of(entry["value"], name)) is not None:
                    found[place] = replace(found[place], first=_earlier(found[place].first, first))
        self.any = self.any or bool(found)
        self.measured = self.measured or any(kernel.instrumented for kernel in session.kernels())
        before, self._before = self._before, Counter({place: one.count for place, one in found.items()})
        if since_last:
            found = {place: replace(one, count=one.count - before[place]) for place, one in found.items()}
        order = sorted(
            (place for place, one in found.items() if one.count > 0), key=lambda p: _order(p, found[p])
        )
        return [found[place] for place in order]

    def _place(self, session: Session, pid: int, mangled: str, number: int) -> tuple[str, str]:
        """Return the source and the instruction of a site."""
        key = pid, mangled
        if number not in self._sites.get(key, {}):
            self._sites[key] = session.sites(mangled, pid)
        site = self._sites[key].get(number)
        return (f"site {number}", "unknown") if site is None else (site_name(site), site.opcode)

    def summary(self, session: Session) -> dict[str, Any]:
        """Return the fields of the summary record. With `stores`, `not_looked_at` counts stores of unknown or long values."""
        summary = session.summary()
        if not self._stores:
            return summary
        found: Counter[str] = Counter()
        for kernel in session.kernels():
            if kernel.instrumented:
                sites = session.sites(kernel.mangled).values()
                found.update(site.opcode for site in sites if site.point == "value" and _is_hidden(site))
        return summary | {"not_looked_at": dict(sorted(found.items(), key=lambda one: (-one[1], one[0])))}

    def summary_lines(self, summary: Mapping[str, Any]) -> list[str]:
        """Return the last lines of a report."""
        lines = summary_lines(summary)
        if hidden := summary.get("not_looked_at"):
            opcodes = ", ".join(f"{opcode} ({table.count(n, 'instruction')})" for opcode, n in hidden.items())
            lines += table.wrap(f"not looked at, since the type or a part of the value is unknown: {opcodes}")
        return lines


def _is_hidden(site: Site) -> bool:
    """Return whether a store may write numbers that no program sees: bits of unknown type, or more than MOST_BYTES bytes."""
    is_of_bits = site.type.startswith("b") and site.type != "bf16"
    return is_of_bits or (site.type in FLOATS and site.width > MOST_BYTES)


def _earlier(one: First | None, other: First) -> First:
    return other if one is None or other.order < one.order else one


def _order(place: Place, one: Finding) -> tuple[object, ...]:
    """Return the sort key of a finding: position of its first number (unique only in one process and GPU), then the place."""
    return place[0], place[1], one.first is None, one.first.order if one.first is not None else 0, *place[2:]


def first_of(raw: Any, kind: str) -> First | None:
    """Return the first number of a kind from its record in the map; None if the record is not complete."""
    type_, operand_type, operation = (int(raw[name]) for name in ("type", "operand_type", "operation"))
    if type_ >= len(TYPES) or TYPES[type_] not in FLOATS or operand_type >= len(TYPES):
        return None
    own, of_operands = TYPES[type_], TYPES[operand_type]
    low, high = int(raw["low"]), int(raw["high"])
    numbers = [element(own, low, high, at) for at in range(128 // size(own))]
    at = next((at for at, bits in enumerate(numbers) if is_kind(kind, own, bits, type_)), None)
    if at is None:
        return None
    operands: tuple[str, ...] = ()
    name = FLOAT_OPERATIONS[operation] if operation < len(FLOAT_OPERATIONS) else ""
    if name not in ("", "mma"):
        same = at if of_operands == own else 0
        wanted = raw["operand"].tolist()[: int(raw["operands"])]
        operands = tuple(text(of_operands, bits, same, operand_type) for bits in wanted)
    block, thread = (tuple(raw[name].tolist()) for name in ("block", "thread"))
    launch = int(raw["launch"]) & NUMBER_MASK
    return First(int(raw["order"]), launch, block, thread, f"{as_float(numbers[at], type_):g}", at, operands)


def is_kind(kind: str, type_name: str, bits: int, number: int) -> bool:
    """Return whether a floating-point number is of a kind. number: index of its type in TYPES. An overflow counts as infinity."""
    if kind == "denormal":
        return is_denormal(type_name, bits)
    value = as_float(bits, number)
    return value != value if kind == "nan" else value in (float("inf"), float("-inf"))


def text(type_name: str, low: int, at: int, number: int) -> str:
    """Return an element of an operand as text. number: index of its type in TYPES."""
    if type_name == "pred":
        return str(low & 1)
    bits = element(type_name, low, 0, at)
    if type_name.startswith("s") and bits >> size(type_name) - 1:
        bits -= 1 << size(type_name)
    return f"{as_float(bits, number):g}" if type_name in (*FLOATS, "b16", "b32", "b64") else str(bits)


# --- for people ---


def lines(
    found: Sequence[Finding], kinds: Sequence[str], owners: OwnerColumns, full: bool, measured: bool
) -> Iterator[str]:
    """Yield the report for people: the first number of all, then a row for each line and instruction.

    full: a row for each copy of an instruction, such as of an unrolled loop, with its operands; whole kernel names.
    measured: whether a launch was measured."""
    if not found:
        yield (
            f"no {' or '.join(TITLES[kind] for kind in kinds)} was found"
            if measured
            else "no launch was measured"
        )
        return
    owners.see(found)
    labels = names.labels((one.mangled for one in found), full=full)
    one = found[0]
    if one.first is not None:
        where = f"launch {one.first.launch}, block {index(one.first.block)}, thread {index(one.first.thread)}"
        title = TITLES[one.kind][0].upper() + TITLES[one.kind][1:]
        yield from table.wrap(f"{title} first at {one.source} in {labels[one.mangled]}: {where}")
        is_of = " = " if one.first.operands else ": "
        yield from table.wrap(f"{one.shown}{is_of}{one.first.value}", 2)
        yield ""
    cells = [
        owners.cells(one)
        | {
            "KIND": one.kind,
            "KERNEL": labels[one.mangled],
            "SOURCE": one.source,
            "COUNT": f"{one.count:,}",
            "LAUNCH": "-" if one.first is None else str(one.first.launch),
            "BLOCK": "-" if one.first is None else index(one.first.block),
            "THREAD": "-" if one.first is None else index(one.first.thread),
            "FROM": _worst(one.first.operands) if one.first is not None else "-",
            "OP": one.shown if full else one.op,
        }
        for one in (found if full else _joined(found))
    ]
    left = ("COMM", "KIND", "KERNEL", "SOURCE", "FROM", "OP")
    yield from table.within(cells, left=left, cut=() if full else ("OP", "KERNEL", "COMM"))


def _joined(found: Iterable[Finding]) -> list[Finding]:
    """Return findings with the same instruction of one source line as one, in place of the first."""
    joined: dict[tuple[object, ...], Finding] = {}
    for one in found:
        key = one.pid, one.comm, one.gpu, one.kind, one.mangled, one.source, one.op
        joined[key] = replace(joined[key], count=joined[key].count + one.count) if key in joined else one
    return list(joined.values())


def _worst(operands: Sequence[str]) -> str:
    """Return whether operands were finite, infinite or NaN; `-` if they are unknown."""
    if not operands:
        return "-"
    return "nan" if "nan" in operands else "inf" if {"inf", "-inf"} & {*operands} else "finite"


def index(place: Index) -> str:
    """Return an index for people: its x alone if it has no more."""
    return str(place[0]) if place[1:] == (0, 0) else f"({','.join(map(str, place))})"

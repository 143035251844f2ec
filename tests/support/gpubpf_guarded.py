"""For tests: run a program by a strict interpreter, on the embedded devices, and as x86-64 code, in memory that has guard pages.

Each value lies once at the beginning and once at the end of a page, between pages without access. So does the stack of x86-64 code.
The records of a ring buffer fill all pages between two without access, and begin just before the end of the ring.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import pickle
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import CONTEXTS, STACK_SIZE, Program
from gpubpf.ebpf.maps import (
    CONVERSION,
    DISCARDED,
    HEADER,
    PRINTS,
    RING_MARGIN,
    SHAPED,
    MapDefinition,
    decode,
    lost,
)
from gpubpf.lower import amdgcn, ir
from gpubpf.lower.fragment import Argument, Fragment
from gpubpf.lower.launch_block import LaunchBlock, launch_block
from gpubpf.lower.native import Native
from gpubpf_asm import CONTEXT, MAPS, STACK, VALUE, Interpreter

PAGE = 4096
MAPS_APART, KEYS_APART = 0x8000, 0x800
MAX_STEPS = 1 << 17
AMD_LANES = 16  # the last lanes of an AMD GPU's wave run programs
# What StrictInterpreter can call. The results of COLLECTIVE depend on which lanes run together.
COLLECTIVE = {608, 610, 611, 612, 619, 621}
LANES = {602, 603, 606, 616, 617, 618, *COLLECTIVE}
HELPERS = {1, 2, 3, 6, 25, 130, 131, 132, 133, 505, 607, 609, 615, *LANES}
MOST_KEYS = 16  # slots of a hash, and reserved records, at once
WARP = 32
APART = (
    WARP + 1
)  # from a thread to the next one, if each is the only lane of its warp that runs: each is another lane
UNITS = 5  # threads, warps or blocks that an instance of a map has room for
RING_RECORDS, RING_BEGIN = (
    2 * RING_MARGIN,
    (1 << 32) - 2,
)  # of a ring: its records, and where its positions begin


@dataclass(frozen=True)
class Case:
    """What one run of a program is given: the fields of its context, the bytes of its maps, the number of its thread, and its rings.

    Of each ring, by name: the bytes from a record to the next.
    """

    fields: tuple[int, ...]
    maps: dict[str, bytes]
    thread: int
    rings: Mapping[str, int] = field(default_factory=dict)


class Harmful(Exception):
    """A program does what no device program may do."""


class Endless(Harmful):
    """A program takes more than MAX_STEPS jumps."""


class Unwritten:
    """What a register holds that was never written. Nothing can be computed with it."""


class StrictInterpreter(Interpreter):
    """Runs a program and raises Harmful where it leaves an object, or reads bytes or a register that were never written."""

    unwritten = Unwritten()

    def __init__(
        self, program: Program, code: Sequence[b.Instruction], case: Case, room: int = RING_MARGIN
    ) -> None:
        super().__init__(tuple(code), b"")
        self.room = room
        self.called: set[int] = set()
        self.clear = True  # whether all results are known, if only this lane of the warp runs
        self.case, self.maps = case, program.maps
        self.frame, self.steps = STACK, 0
        self.written: set[int] = set()
        self.values: dict[int, bytearray] = {}  # by address
        self.keys: dict[bytes, int] = {}  # of hashes: the addresses of their values
        self.places: dict[bytes, int] = {}  # and those of deleted keys, which get no other slot
        self.lost = dict.fromkeys(program.maps, 0)
        self.reserved: dict[int, int] = {}  # the numbers of records, by address
        self.records: dict[str, list[bytes]] = {name: [] for name in case.rings}
        for number, definition in enumerate(program.maps.values()):
            for key in range(values_of(definition)):
                start = VALUE + number * MAPS_APART + key * KEYS_APART
                size = definition.value_size
                self.values[start] = bytearray(case.maps[definition.name][key * size : (key + 1) * size])

    def results(self) -> dict[str, bytes]:
        """Return the bytes of the maps, by name; see `readable`."""
        found = {
            name: b"".join(
                self.values[VALUE + number * MAPS_APART + key * KEYS_APART]
                for key in range(values_of(definition))
            )
            for number, (name, definition) in enumerate(self.maps.items())
            if definition.kind not in ("hash", "ringbuf")
        }
        for name, definition in self.maps.items():
            if definition.kind == "hash" and name in self.case.maps:
                elements = (key + self.values[at][: definition.value_size] for key, at in self.keys.items())
                found[name] = b"".join([self.lost[name].to_bytes(8, "little"), *sorted(elements)])
        return found

    def map(self, name: str) -> int:
        return MAPS + list(self.maps).index(name)

    def leave(self, frame: int) -> None:
        self.frame = frame + STACK_SIZE
        self.written = {at for at in self.written if at >= frame}

    def run(self) -> None:
        try:
            super().run()
        except IndexError:
            raise Harmful("leaves its code") from None
        except TypeError as error:
            if Unwritten.__name__ not in str(error):
                raise
            raise Harmful("reads a register that was never written") from None

    def taken(self, i: b.Instruction, r: list[int]) -> bool:  # type: ignore[override]
        self.frame = r[10]
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise Endless("does not end")
        return super().taken(i, r)

    def access(self, i: b.Instruction, r: list[int]) -> None:
        self.frame = r[10]
        super().access(i, r)

    def place(self, address: int, size: int, write: bool) -> tuple[bytearray, int]:
        start = address & -KEYS_APART
        value = self.values.get(start)
        if value is not None and address + size <= start + len(value):
            if write and list(self.maps.values())[(start - VALUE) // MAPS_APART].kind == "param":
                raise Harmful("writes to a parameter")
            if address % size:
                raise Harmful("an access that is not aligned")
            return value, address - start
        if not self.frame - STACK_SIZE <= address <= STACK - size:
            raise Harmful(f"reaches {address:#x}, {size} bytes")
        return self.stack, address - (STACK - len(self.stack))

    def read(self, address: int, size: int) -> int:
        if CONTEXT <= address < CONTEXT + 8 * len(self.case.fields):
            field, at = divmod(address - CONTEXT, 8)
            if at + size > 8:
                raise Harmful("reads two fields of its context")
            return self.case.fields[field] >> 8 * at & (1 << 8 * size) - 1
        where, at = self.place(address, size, False)
        if where is self.stack and not self.written.issuperset(range(address, address + size)):
            raise Harmful(f"reads {address - self.frame} of its stack, which was never written")
        return int.from_bytes(where[at : at + size], "little")

    def write(self, address: int, size: int, number: int) -> None:
        where, at = self.place(address, size, True)
        if where is self.stack:
            self.written |= set(range(address, address + size))
        where[at : at + size] = (number & (1 << 8 * size) - 1).to_bytes(size, "little")

    def helper(self, number: int, r: list[int]) -> None:
        self.frame = r[10]
        self.called.add(number)
        result = 0
        if number in (1, 2, 3) and list(self.maps.values())[r[1] - MAPS].kind == "hash":
            result = self._hash(number, list(self.maps.values())[r[1] - MAPS], r)
        elif number in (25, 130):
            of = r[1:4] if number == 130 else [r[2], r[4], r[5]]
            if of[2] != list(self.maps.values())[of[0] - MAPS].value_size and number == 130:
                raise Harmful("outputs a record of another size")
            result = self._output(list(self.maps)[of[0] - MAPS], self._bytes(of[1], of[2]))
        elif number == 131:
            name = list(self.maps)[r[1] - MAPS]
            if not self._output(name, b"") and (result := self._new(r[1] - MAPS, r[2])):
                self.reserved[result] = len(self.records.get(name, [])) - 1
        elif number in (132, 133):
            if not self._is_record(r[1]):
                raise Harmful("ends a reservation that there is not")
            name = list(self.maps)[(r[1] - VALUE) // MAPS_APART]
            at, payload = self.reserved.pop(r[1]), self.values.pop(r[1])
            if name in self.records:
                self.records[name][at] = _record(payload, DISCARDED if number == 133 else 0)
        elif number == 6:
            text = self._bytes(r[1], r[2]).split(b"\0")[0].decode()
            count = len([match for match in CONVERSION.finditer(text) if match[3] != "%"])
            values = [*(r[3 : 3 + count]), 0, 0, 0][:3]
            result = self._output(PRINTS, struct.pack("<4Q", zlib.crc32(text.encode()), *values))
        elif number == 3:
            result = -22 & (1 << 64) - 1  # an array
            self._bytes(r[2], 4)
        elif number in (1, 2):
            number_of_map = r[1] - MAPS
            definition = list(self.maps.values())[number_of_map]
            key = self.read_bytes(r[2], 4)
            known = key < definition.max_entries
            if definition.kind in SHAPED:
                key = self._element(definition, key) if known else 0
            address = VALUE + number_of_map * MAPS_APART + key * KEYS_APART if known else 0
            if number == 1:
                result = address
            else:
                size = definition.value_size
                value = [self.read(r[3] + k, 1) for k in range(size)]
                if known and r[4] != 1:
                    self.values[address][:] = bytes(value)
                result = (-7 if not known else -17 if r[4] == 1 else 0) & ((1 << 64) - 1)
        elif number == 505:
            for register, value_ in zip((1, 2, 3), (self.case.thread, 0, 0), strict=True):
                self.write(r[register], 8, value_)
        elif number in LANES:
            result = self._lane(number, r[1], r[2])
        elif number == 607:
            result = self.read(r[1], 8)
            self.write(r[1], 8, max(result, r[2]))
        elif number == 609:
            result = (r[1] | 1).bit_length() - 1
        elif number == 615:
            result = r[1].bit_count()
        else:
            raise Harmful(f"calls helper {number}")
        r[0] = result

    def _element(self, definition: MapDefinition, key: int) -> int:
        """Return which value of a map with an instance for each launch belongs to a key and this thread."""
        unit = {"thread": self.case.thread, "warp": self.case.thread // WARP}.get(SHAPED[definition.kind], 0)
        if SHAPED[definition.kind] == "instance":
            return key
        return key * UNITS + unit if unit < UNITS else definition.max_entries * UNITS

    def _lane(self, number: int, value: Any, other: Any) -> int:
        """Return the result of one of LANES in a warp of which only this lane runs."""
        lane, warp = self.case.thread % WARP, self.case.thread // WARP
        fixed = {602: lane, 603: warp, 606: self.case.thread, 608: 1 << lane, 610: 1 << lane}
        fixed |= {616: (1 << lane) - 1, 618: WARP, 619: 0}
        if number in (610, 611, 612, 617, 619, 621):
            value = value & (1 << 64) - 1  # also for those that do not need it: it must have been written
        if number in fixed:
            return fixed[number]
        if number == 612:
            self.clear &= (other & (1 << 64) - 1) % WARP == lane
            return int(value)
        if number == 617:
            value &= (1 << WARP) - 1
            self.clear &= value != 0
            return int(value & -value == 1 << lane)
        return int(value != 0) << (lane if number == 611 else 0)

    def _output(self, name: str, payload: bytes) -> int:
        """Add a record to a ring. Return what the helper returns."""
        if name in self.records:
            if len(self.records[name]) >= self.room:
                self.lost[name] += 1
                return -11 & (1 << 64) - 1
            self.records[name].append(_record(payload))
        return 0

    def _bytes(self, address: int, size: int) -> bytes:
        return bytes(self.read(address + k, 1) for k in range(size))

    def _is_record(self, address: int) -> bool:
        kinds = [definition.kind for definition in self.maps.values()]
        return address in self.values and kinds[(address - VALUE) // MAPS_APART] == "ringbuf"

    def _new(self, number_of_map: int, size: int) -> int:
        """Return the address of a new value of a map; 0 if it has MOST_KEYS already."""
        first = VALUE + number_of_map * MAPS_APART
        for address in range(first, first + MOST_KEYS * KEYS_APART, KEYS_APART):
            if address not in self.values:
                self.values[address] = bytearray(size)
                return address
        return 0

    def _hash(self, number: int, definition: MapDefinition, r: list[int]) -> int:
        key = self._bytes(r[2], definition.key_size)
        address = self.keys.get(key, 0)
        if number == 1:
            return address
        if number == 3:
            return 0 if self.keys.pop(key, 0) else -2 & (1 << 64) - 1
        value = self._bytes(r[3], definition.value_size)
        if (address and r[4] == 1) or (not address and r[4] == 2):
            return (-17 if address else -2) & (1 << 64) - 1
        if not address:
            address = self.places.get(key, 0) or self._new(r[1] - MAPS, len(value))
            if not address:
                self.lost[definition.name] += 1
                return -7 & (1 << 64) - 1
            self.keys[key] = self.places[key] = address
        self.values[address][:] = value
        return 0

    def read_bytes(self, address: int, size: int) -> int:
        return sum(self.read(address + k, 1) << 8 * k for k in range(size))


def values_of(definition: MapDefinition) -> int:
    """Return how many values of a map are there from the beginning."""
    if definition.kind in ("hash", "ringbuf"):
        return 0
    if SHAPED.get(definition.kind, "instance") == "instance":
        return definition.max_entries + (definition.kind in SHAPED)
    return definition.max_entries * UNITS + 1


def readable(maps: Mapping[str, MapDefinition], left: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return what a run left in its maps; of a hash how many elements were lost, and its elements in order."""
    return {
        name: data
        if maps[name].kind != "hash"
        else b"".join(
            [
                lost(maps[name], data).to_bytes(8, "little"),
                *sorted(element.tobytes() for element in decode(maps[name], data)),
            ]
        )
        for name, data in left.items()
    }


# Ring buffers


def _record(payload: bytes | bytearray, flags: int = 0) -> bytes:
    return struct.pack("<I", len(payload) | flags) + payload


def ring_results(records: Sequence[bytes], lost_: int, stride: int, together: bool) -> bytes:
    """Return what is in a ring: the records, in order if only one thread wrote them, and how many were lost."""
    padded = [record.ljust(stride - 4, b"\0") for record in records]
    return b"".join([lost_.to_bytes(8, "little"), *(sorted(padded) if together else padded)])


def room_of(row: int, apart: bool) -> int:
    """Return for how many records there is room in the ring of a run."""
    return row % 4 if apart else RING_MARGIN


def _ring_control(data: int, room: int) -> bytes:
    """Return the control block of a ring, whose reader has been further than it says."""
    taken = RING_BEGIN - (RING_RECORDS - RING_MARGIN - room)
    ctypes.memmove(data, taken.to_bytes(8, "little"), 8)
    head = struct.pack("<3Q", 1, RING_RECORDS, data).ljust(HEADER, b"\0")
    return head + struct.pack("<3Q", RING_BEGIN, 0, max(0, taken - 1000)).ljust(64, b"\0")


def _ring_left(control: bytes, data: bytes, stride: int, together: bool) -> bytes:
    """Return what is in a ring, and check that nothing else in it has changed."""
    reserved, lost_ = struct.unpack_from("<2Q", control, HEADER)
    rest, records = bytearray(data), []
    rest[:8] = bytes(8)
    for position in range(RING_BEGIN, reserved):
        at = PAGE + position % RING_RECORDS * stride
        if int.from_bytes(data[at : at + 4], "little") != position + 1 & 0xFFFFFFFF:
            raise Harmful(f"does not end record {position - RING_BEGIN} of a ring")
        records.append(data[at + 4 : at + stride])
        rest[at : at + stride] = bytes(stride)
    if any(rest):
        raise Harmful("writes beside the records of a ring")
    return ring_results(records, lost_, stride, together)


# The embedded device


def _kernel(name: str, fragment: Fragment, apart: bool) -> str:
    """Return a kernel in which thread n runs the fragment with the arguments in row n of a table. apart: thread n * APART."""
    registers = [f".reg .{a.type} {a.register};" for a in fragment.arguments]
    stride = 8 * max(1, len(fragment.arguments))
    loads = [f"ld.global.{a.type} {a.register}, [%row+{8 * k}];" for k, a in enumerate(fragment.arguments)]
    lines = [
        f".visible .entry {name}(.param .u64 table)",
        "{",
        ".reg .b64 %row; .reg .b32 %me;",
        "{",
        "ld.param.u64 %row, [table]; mov.u32 %me, %tid.x;",
        *(
            [
                f".reg .pred %other; .reg .b32 %rest; rem.u32 %rest, %me, {APART}; setp.ne.u32 %other, %rest, 0;",
                f"@%other exit; div.u32 %me, %me, {APART};",
            ]
            if apart
            else []
        ),
        f"mad.wide.u32 %row, %me, {stride}, %row;",
        *registers,
        *loads,
        fragment.ptx,
        "}",
        "ret;",
        "}",
    ]
    return "\n".join(lines)


class Pages:
    """Pages of device memory, each between pages without access. They are taken again by the next program."""

    def __init__(self) -> None:
        from engine_device import library

        self.allocate = library().harness_allocate
        self.allocate(PAGE)  # the page before the first one has no access either
        self.addresses: list[int] = []
        self.rings: dict[tuple[int, int], int] = {}

    def ring(self, number: int, stride: int) -> tuple[int, int]:
        """Return the address and the size of the data of a ring, which is zero."""
        size = PAGE + RING_RECORDS * stride
        if (number, stride) not in self.rings:
            self.rings[number, stride] = self.allocate(size)
        ctypes.memset(self.rings[number, stride], 0, size)
        return self.rings[number, stride], size

    def page(self, number: int) -> int:
        while number >= len(self.addresses):
            self.addresses.append(self.allocate(PAGE))
        return self.addresses[number]


@functools.cache
def _pages() -> Pages:
    return Pages()


def _placed(page: int, data: bytes, at_end: bool) -> int:
    return page + (PAGE - len(data) if at_end else 0)


def _given(argument: Argument, case: Case, point: str, addresses: Mapping[str, int]) -> int:
    """Return the value of an argument."""
    if argument.kind == "launch":
        return case.fields[0]
    if argument.kind == "context":
        return case.fields[list(CONTEXTS[point]).index(argument.field)]
    if argument.kind == "map_base":
        return addresses[argument.map]
    if argument.kind == "map_capacity":
        return UNITS
    if argument.kind == "param":
        part = case.maps[argument.map][argument.offset : argument.offset + argument.width]
        return int.from_bytes(part, "little")
    return 0


def on_device(
    programs: Sequence[tuple[Fragment, Sequence[Case]]], point: str, apart: bool = False
) -> list[list[dict[str, bytes]]]:
    """Run programs on the embedded device. Return the maps that each run leaves: each case runs twice, at both ends of pages.

    The runs are the lanes of a warp, which share their rings: the first run has them. apart: each run is the only lane of a warp.
    Raises DeviceFault where a program leaves the memory that it has.
    """
    import numpy as np

    from engine_device import Array, Device

    text = [".version 8.0", ".target sm_80", ".address_size 64"]
    text += [_kernel(f"k{n}", fragment, apart) for n, (fragment, _) in enumerate(programs)]
    device = Device("\n".join(text))
    found = []
    table = Array(np.zeros(64 * 64, np.uint64))
    for n, (fragment, cases) in enumerate(programs):
        used = 0
        rows: list[list[int]] = []
        places: list[dict[str, tuple[int, int, int]]] = []  # address, page, bytes
        rings: list[dict[str, tuple[int, int]]] = []  # address and bytes of the data
        # Each thread has memory of its own; threads of odd numbers at the ends of pages.
        for case in cases:
            for at_end in (False, True):
                rings.append({})
                if apart or not rows:
                    for k, (name, stride) in enumerate(case.rings.items()):
                        rings[-1][name] = _pages().ring(2 * len(rows) + k, stride)
                room = room_of(len(rows), apart)
                controls = {name: _ring_control(data, room) for name, (data, _) in rings[-1].items()}
                place = {}
                for name, data in (case.maps | controls).items():
                    page = _pages().page(used)
                    used += 1
                    ctypes.memset(page, 0xA5, PAGE)
                    place[name] = _placed(page, data, at_end), page, len(data)
                    ctypes.memmove(place[name][0], data, len(data))
                places.append(place)
                addresses = {name: address for name, (address, _, _) in (places[0] | place).items()}
                rows.append([_given(a, case, point, addresses) for a in fragment.arguments] or [0])
        flat = np.array(rows, np.uint64).ravel()
        table.host[: len(flat)] = flat
        device.launch(f"k{n}", 1, len(rows) * (APART if apart else 1), table)
        found.append([])
        for place, ring, case in zip(places, rings, (c for c in cases for _ in range(2)), strict=True):
            left = {name: _taken(*where) for name, where in place.items()}
            for name, (address, size) in ring.items():
                data = ctypes.string_at(address, size)
                left[name] = _ring_left(left[name], data, case.rings[name], not apart)
            found[-1].append(left)
    return found  # fmt: skip


def _taken(at: int, page: int, size: int) -> bytes:
    """Return a value, and check that the rest of its page is unchanged."""
    return _inside(ctypes.string_at(page, PAGE), at - page, size)


def _inside(page: bytes, at: int, size: int) -> bytes:
    """Return a part of a page, and check that the rest is unchanged."""
    if not set(page[:at] + page[at + size :]) <= {0xA5}:
        raise Harmful("writes beside a value")
    return page[at : at + size]


# The embedded AMD device


@dataclass(frozen=True)
class AmdCode:
    """A program as machine code of an AMD GPU. Each of its threads has a launch block, behind which are the fields of its context.

    apart: each thread has a wave of its own. Then LLVM knows that all lanes get the same arguments, as in the probes of tools, and
    keeps them in SGPRs. Otherwise, all threads are lanes of one wave, its last ones, and go separate ways.
    """

    gpu: str
    wave: int
    apart: bool
    probe: amdgcn.Probe
    block: LaunchBlock


def compile_for_amd(program: amdgcn.WaveProgram, gpu: str, apart: bool, point: str) -> AmdCode:
    """Compile a program of a point, for threads that have a launch block each. Raises VerifyError."""
    block = launch_block([program])
    fields = list(CONTEXTS[point])
    skipped = program.wave - AMD_LANES
    lines = [
        f"  %thread = sub i32 {'%group, 0' if apart else f'%lane, {skipped}'}",
        "  %runs = icmp sge i32 %thread, 0",
        "  br i1 %runs, label %run, label %done",
        "run:",
        f"  %distance = mul i32 %thread, {block.size + 8 * len(fields)}",
        "  %distance.wide = zext i32 %distance to i64",
        "  %block = add i64 %blocks, %distance.wide",
        "  %first = add i32 %group, 0",  # threads have different numbers also if they are apart
    ]
    passed = []
    for a in program.arguments:
        kind, name = ("i64" if a.type == "b64" else "i32"), f"{a.name}.0"
        if a.kind == "context":
            width = 8 if a.type == "b64" else 4
            more, value = amdgcn._load(name, block.size + 8 * fields.index(a.field), width, 8 * width)
        elif a.kind == "first_thread" and not apart:
            more, value = [], f"-{skipped}"
        else:
            more, value = amdgcn._value(a, block, name)
        lines += more
        if a.kind == "map_base":  # the block has its distance from the first page
            lines.append(f"  %{name}.base = add i64 {value}, %pages")
            value = f"%{name}.base"
        passed.append(f"{kind} {value}")
    kinds = ", ".join(one.split()[0] for one in passed)
    lines += [f"  call void @{ir.ENTRY}0({', '.join(passed)})", "  br label %done", "done:", "  ret void"]
    given = "i64 inreg %blocks, i64 inreg %pages, i32 inreg %group, i32 %lane"
    declared = f"declare void @{ir.ENTRY}0({kinds}) convergent nounwind"
    text = amdgcn._module([declared], f"void @{amdgcn._ENTRY}({given})", lines)
    return AmdCode(gpu, program.wave, apart, amdgcn._compile(text, [program], gpu), block)


def _amd_kernel(name: str, code: AmdCode) -> str:
    """Return a kernel that runs the code. Its arguments are the addresses of the blocks and of the pages."""
    from hipsim_engine import kernel

    words = [code.probe.code[at : at + 4] for at in range(0, len(code.probe.code), 4)]
    body = [
        "    s_mov_b32 s4, s2",
        "    s_load_dwordx4 s[0:3], s[0:1], 0x0",
        "    s_waitcnt lgkmcnt(0)",
        *(f"    .long {int.from_bytes(word, 'little'):#x}" for word in words),
    ]
    vgprs = max(4, -(-code.probe.vgprs // 4) * 4)
    text = kernel(name, "\n".join(body), gpu=code.gpu, vgprs=vgprs, agprs=0)
    more = [".amdhsa_kernarg_size 16"]
    if code.gpu.startswith("gfx10"):
        more.append(f".amdhsa_wavefront_size32 {int(code.wave == 32)}")
    return text.replace(".end_amdhsa_kernel", "\n".join([*more, ".end_amdhsa_kernel"]))


class _AmdRuns:
    """The runs of a program: a launch block for each, with its context; and pages, each with a value of a map."""

    def __init__(self, code: AmdCode, cases: Sequence[Case]) -> None:
        self.pages: list[bytes] = []
        self.blocks: list[bytes] = []
        self.places: list[dict[str, tuple[int, int, int]]] = []  # number of the page, offset in it, bytes
        for case in cases:
            for at_end in (False, True):
                place = {}
                for name, data in case.maps.items():
                    place[name] = len(self.pages), _placed(0, data, at_end), len(data)
                    self.pages.append(data.rjust(PAGE, b"\xa5") if at_end else data.ljust(PAGE, b"\xa5"))
                self.blocks.append(self.block(code.block, case, place))
                self.places.append(place)

    def block(self, layout: LaunchBlock, case: Case, place: Mapping[str, tuple[int, int, int]]) -> bytes:
        """Return the launch block of a run, and the fields of its context."""
        from hipsim_engine import PAGES_APART

        content = bytearray(layout.size)
        struct.pack_into("<Q", content, layout.launch_id, case.fields[0])
        for name, at in layout.bases.items():
            page, offset, _ = place[name]
            struct.pack_into("<Q", content, at, page * PAGES_APART + offset)
        for name, (at, size) in layout.params.items():
            content[at : at + size] = case.maps[name][:size]
        if layout.shape is not None:
            struct.pack_into("<6I", content, layout.shape, 64, 1, 1, 1, 1, 1)
        return bytes(content) + struct.pack(f"<{len(case.fields)}Q", *case.fields)

    def results(self, content: bytes) -> list[dict[str, bytes]]:
        """Return the maps that each run has left in the pages."""
        return [
            {
                name: _inside(content[page * PAGE : (page + 1) * PAGE], at, size)
                for name, (page, at, size) in place.items()
            }
            for place in self.places
        ]


def on_amd(programs: Sequence[tuple[AmdCode, Sequence[Case]]]) -> list[list[dict[str, bytes]]]:
    """Run programs for one AMD GPU on hipsim's engine. Return the maps that each run leaves, as `on_device` does.

    Raises Harmful where a program leaves the memory that it has.
    """
    import numpy as np

    from hipsim_engine import Engine, assemble

    (gpu,) = {code.gpu for code, _ in programs}
    kernels = [_amd_kernel(f"k{n}", code) for n, (code, _) in enumerate(programs)]
    found = []
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        image = assemble("\n".join(kernels), place, gpu)
        engine = Engine(place, gpu=gpu)
        engine.send("set hostile 7")
        engine.load(image)
        for n, (code, cases) in enumerate(programs):
            runs = _AmdRuns(code, cases)
            engine.put("blocks", np.frombuffer(b"".join(runs.blocks), np.uint8))
            engine.put_pages("pages", np.frombuffer(b"".join(runs.pages), np.uint8))
            threads = len(runs.blocks)
            assert threads <= AMD_LANES
            grid, group = (threads, 1) if code.apart else (code.wave - AMD_LANES + threads,) * 2
            outcome = engine.run(f"k{n}", ["blocks", "pages"], (grid, 1, 1), (group, 1, 1))
            if outcome.fault is not None:
                engine.close()
                raise Harmful(f"program {n}: {outcome.fault}")
            found.append(runs.results(engine.get("pages", np.uint8).tobytes()))
        engine.close()
    return found


# x86-64


@dataclass(frozen=True)
class Job:
    """A host program as machine code, and the cases that it runs."""

    native: Native
    cases: Sequence[Case]


# void enter(values, end of a stack, code): push rbp; mov rbp, rsp; mov rsp, rsi; call rdx; mov rsp, rbp; pop rbp; ret
_ENTER = bytes.fromhex("55 4889e5 4889f4 ffd2 4889ec 5d c3")


def on_host(jobs: Sequence[Job]) -> list[list[dict[str, bytes]]]:
    """Run host programs in a process of their own. Return the maps that each run leaves, as `on_device` does.

    Raises Harmful if the process ends in one of them.
    """
    done = subprocess.run(
        [sys.executable, str(Path(__file__))],
        input=pickle.dumps(list(jobs)),
        capture_output=True,
        check=False,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    found: list[Any] = []
    rest = memoryview(done.stdout)
    while len(rest) >= 8:
        size = int.from_bytes(rest[:8], "little")
        found.append(pickle.loads(rest[8 : 8 + size]))
        rest = rest[8 + size :]
    if len(found) != len(jobs):
        raise Harmful(
            f"program {len(found)} ended its process ({done.returncode}): {done.stderr.decode()[-500:]}"
        )
    if wrong := [n for n, one in enumerate(found) if isinstance(one, str)]:
        raise Harmful(f"program {wrong[0]}: {found[wrong[0]]}")
    return found


def _guarded(size: int) -> int:
    """Return the address of `size` bytes of memory, whole pages, between pages without access. It is never freed."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    base = libc.mmap(None, size + 2 * PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert libc.mprotect(base + PAGE, size, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    return int(base) + PAGE


def _serve() -> None:
    """Run the jobs from stdin, and write what each leaves to stdout."""
    jobs: list[Job] = pickle.loads(sys.stdin.buffer.read())
    pages = [_guarded(PAGE) for _ in range(8)]
    stack = _guarded(8 * PAGE)
    text = mmap.mmap(-1, 1 << 20, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    where = ctypes.addressof(ctypes.c_char.from_buffer(text))
    enter = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(where)
    text[: len(_ENTER)] = _ENTER
    for job in jobs:
        text[64 : 64 + len(job.native.code)] = job.native.code
        found: list[dict[str, bytes]] | str = []
        for case in job.cases:
            for at_end in (False, True):
                place = {}
                for number, (name, data) in enumerate(case.maps.items()):
                    ctypes.memset(pages[number], 0xA5, PAGE)
                    place[name] = _placed(pages[number], data, at_end), pages[number]
                    ctypes.memmove(place[name][0], data, len(data))
                values = []
                for given in job.native.values:
                    if given.kind == "context":
                        values.append([*case.fields, 0, 0, 0, 0][given.number])
                    else:
                        values.append(place[given.map][0])
                array = (ctypes.c_uint64 * max(1, len(values)))(*values)
                enter(ctypes.addressof(array), stack + 8 * PAGE, where + 64)
                try:
                    found.append(
                        {name: _taken(at, page, len(case.maps[name])) for name, (at, page) in place.items()}
                    )
                except Harmful as harm:
                    found = str(harm)
                    break
            if isinstance(found, str):
                break
        data = pickle.dumps(found)
        sys.stdout.buffer.write(len(data).to_bytes(8, "little") + data)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    import gpubpf_guarded

    gpubpf_guarded._serve()

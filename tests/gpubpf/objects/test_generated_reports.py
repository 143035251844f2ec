"""Everything that gpurun prints of generated maps, records and prints: text that fits a terminal, valid JSON and CSV."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import strategies as st

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf import maps
from gpubpf.ebpf.bytecode import BpfFunction, Instruction, Program
from gpubpf.ebpf.maps import MapDefinition, pad8, prints_definition
from gpubpf.kernel import bpf_syscall
from gpubpf.linux.host_programs import Host
from gpubpf.lower import ir
from gpubpf.objects.report import Printer, Reader
from gpubpf.records.results import Instance, RingRecords, SharedArray
from gpubpf_properties import generated, noise, seldom
from gpubpf_text import COMMS, KERNELS, PIDS, check, opened

LOOKS = ((), ("-v",), ("--json",), ("--csv",), ("-T",), ("-T", "--json"), ("-T", "--csv"))
SUMMARY = {"launches_seen": 3, "launches_matched": 3, "launches_instrumented": 3, "not_instrumented": {}}
SUMMARY |= {"lost": 0, "device": "sim", "duration_ns": 1}
NAMED = [name for name in KERNELS if name]
SHAPES = (((1, 1, 1), (1, 1, 1)), ((2, 1, 1), (33, 1, 1)), ((3, 2, 1), (8, 4, 2)), ((40, 1, 1), (32, 1, 1)))
KINDS = ("array", "percpu_array", "hash", "shared_array", *maps.SHAPED, "ringbuf")
ON_HOST = {"array": bpf_syscall.ARRAY, "percpu_array": bpf_syscall.PERCPU_ARRAY, "hash": bpf_syscall.HASH}
ON_HOST |= {"ringbuf": bpf_syscall.RINGBUF}
CPUS = 3
NAMES = ("runs", "data", "m" * 15, "a_map_" + "with_a_long_name" * 8)
COMM: Any = ["comm", "|S16", 8]
NESTED: Any = {"fields": [["pid", "<u4", 0], COMM, ["at", ["<i2", [2, 2]], 24]], "size": 32}
TYPES: tuple[tuple[Any, int], ...] = (
    *(("<u8", 8), ("<i4", 4), ("|u1", 1), ("|b1", 1), ("<f4", 4), ("<f8", 8), ("|S16", 16)),
    *((None, 16), (None, 5), (["<u4", [4]], 16), (["<f8", [2, 1]], 16), (["|S4", [2]], 8)),
    *((NESTED, 32), ({"fields": [["a\x1b[31m", NESTED, 0], ["日本", [NESTED, [2]], 32]], "size": 96}, 96)),
    ({"fields": [["length", "<u8", 0], ["text", "|S0", 8]], "size": 8}, 8),
    ({"fields": [["x", "<u4", 0], ["x", "<u4", 4]], "size": 8}, 8),  # bytes
)
TEXTS = (b"", b"app", "naïve".encode(), b"\x1b[2J", b"\xff\xfe", b"a,\"b'\n", b"none\0\0", b" spaced ")
FORMATS = ("%d of %u\n", "%s%llx %p|%-20lld|%05hd", "%c%c%c", "100%% \x1b[31m\u202e", "", "%d" * 12)
FORMATS += (f"device program on_exit{ir.STOPPED}",)


@st.composite
def values(draw: st.DrawFn, kind: Any, size: int, count: int) -> bytes:
    """Return the bytes of values of a type: noise, zeros, ones, repeated ones, or texts."""
    how = draw(st.integers(0, 4))
    if how == 0:
        return bytes(size * count)
    if how == 1:
        return b"\xff" * (size * count)
    if how == 2:
        return draw(noise).bytes(size) * count
    if how == 3:
        text = b"".join(draw(st.sampled_from(TEXTS)).ljust(16, b"\0") for _ in range(4))
        return (text * (size * count // len(text) + 1))[: size * count]
    return draw(noise).bytes(size * count)


@st.composite
def definition(draw: st.DrawFn, number: int, host: bool) -> MapDefinition:
    """Return a map of an object; `host`: one in the Linux kernel."""
    kind = draw(st.sampled_from(tuple(ON_HOST) if host else KINDS))
    value, size = draw(st.sampled_from(TYPES))
    key, key_size = draw(st.sampled_from(TYPES)) if kind == "hash" else ("<u4", 4)
    entries = draw(st.sampled_from((1, 2, 7, 150)))
    if kind == "ringbuf":
        key, key_size, entries = None, 0, 4096
        if value == "|S16":  # its bytes would be wide, and no key is in front of them
            value, size = NESTED, 32
    name = f"{draw(st.sampled_from(NAMES))}_{number}"
    return MapDefinition(name, kind, key_size, size, entries, key, value, 0, ON_HOST[kind] if host else 0)


@st.composite
def array(draw: st.DrawFn, one: MapDefinition, count: int) -> Any:
    """Return so many values of a map as an array, as the reader of a ring does."""
    kind = np.dtype({"names": ["it"], "formats": [one.value_dtype], "itemsize": one.value_size})
    return np.frombuffer(draw(values(one.value_type, one.value_size, count)), kind)["it"]


@st.composite
def instances(draw: st.DrawFn, one: MapDefinition, pid: int, comm: str, gpu: int) -> list[Instance]:
    """Return the contents of a map on a GPU of a process."""
    found = []
    shaped = one.kind in maps.SHAPED
    for mangled in draw(st.lists(st.sampled_from(NAMED), max_size=2)) if shaped else [""]:
        grid, block = draw(st.sampled_from(SHAPES)) if shaped else ((0, 0, 0), (0, 0, 0))
        threads, blocks = int(np.prod(grid) * np.prod(block)), int(np.prod(grid))
        warps = blocks * -(-int(np.prod(block)) // 32)
        units = {"thread_array": threads, "warp_array": warps, "block_array": blocks, "kernel_array": 1}
        if shaped and one.max_entries > 7:
            one = MapDefinition(one.name, one.kind, 4, one.value_size, 2, "<u4", one.value_type)
        capacity = units.get(one.kind, 3)
        if one.kind == "hash":
            parts = draw(values(None, one.key_size + one.value_size, min(one.max_entries, 20)))
            start = MapDefinition("", "hash", one.key_size, one.value_size, one.max_entries, contents=parts)
            raw = maps.initial(start)
        else:
            size = maps.storage_size(one, capacity) // one.value_size + 1
            raw = draw(values(one.value_type, one.value_size, size))
        place = (pid, comm, gpu, mangled, grid, block, 3, one, raw, capacity, None, None)
        found.append(Instance(*place))
    return found


@st.composite
def in_kernel(draw: st.DrawFn, one: MapDefinition) -> tuple[bytes, bytes]:
    """Return the keys and the values of a map in the Linux kernel."""
    count = draw(st.sampled_from((0, 1, 7))) if one.kind == "hash" else one.max_entries
    keys = draw(values(one.key_type, one.key_size, count))
    if one.kind != "hash":
        keys = b"".join(number.to_bytes(4, "little") for number in range(count))
    size = pad8(one.value_size) * CPUS if one.kind == "percpu_array" else one.value_size
    return keys, draw(values(one.value_type, size, count))


@st.composite
def prints(draw: st.DrawFn, name: str, pid: int, comm: str, gpu: int) -> RingRecords:
    made = np.zeros(draw(st.integers(0, 3)), prints_definition(name).value_dtype)
    for row in made:
        row["format"] = draw(st.integers(0, len(FORMATS)))  # the last one is not known
        row["arguments"] = np.frombuffer(draw(values(None, 8, row["arguments"].size)), "<u8")
    return RingRecords(pid, comm, gpu, 0, made, {})


@st.composite
def measured(draw: st.DrawFn) -> tuple[Any, Any, dict[str, tuple[bytes, bytes]]]:
    """Return a BPF object, a session, and the maps in the Linux kernel."""
    host = draw(seldom)
    found = [draw(definition(number, host)) for number in range(draw(st.integers(0, 5)))]
    pids = PIDS[: draw(st.sampled_from((0, 1, 1, 2, 12)))]
    of = [(pid, draw(st.sampled_from(COMMS)), draw(st.sampled_from((0, 0, 7)))) for pid in pids]
    kept: dict[str, Any] = {}
    for one in found if not host else ():
        if one.kind == "shared_array":
            size = maps.storage_size(one) // one.stride
            raws = [draw(values(None, one.stride, size)) for _ in of]
            kept[one.name] = [
                SharedArray(*own[:2], maps.decode(one, raw)) for own, raw in zip(of, raws, strict=True)
            ]
        elif one.kind == "ringbuf":
            records = [draw(array(one, draw(st.sampled_from((0, 1, 3))))) for _ in of]
            kept[one.name] = [RingRecords(*own, 0, r, {}) for own, r in zip(of, records, strict=True)]
        else:
            kept[one.name] = [part for own in of for part in draw(instances(one, *own))]
    for name in (maps.PRINTS, maps.LONG_PRINTS) if not host else ():
        kept[name] = [draw(prints(name, *own)) for own in of]
    session = SimpleNamespace(
        only_process=lambda: {"pid": 1, "comm": "app"},
        has_map=lambda name: name in kept,
        instances=lambda name: kept[name],
        shared=lambda name: kept[name],
        rings=lambda name: kept[name],
    )
    code = tuple(use_of(one.name) for one in found)
    program = Program("", {"on_exit": BpfFunction("on_exit", "exit", code)}, {one.name: one for one in found})
    items = {one.name: draw(in_kernel(one)) for one in found if host and one.kind != "ringbuf"}
    rings = {one.name: draw(array(one, 2)) for one in found if host and one.kind == "ringbuf"}
    side: Any = SimpleNamespace(_program=program, _files={name: name for name in items})
    attached = SimpleNamespace(
        programs=SimpleNamespace(program=program, maps=program.maps),
        probes=[SimpleNamespace(program="on_exit", kernels=())] if not host else [],
        formats=lambda: dict(enumerate(FORMATS)),
        printing=lambda: dict.fromkeys(range(len(FORMATS)), ("on_exit", "on_entry")),
    )
    bpf = SimpleNamespace(
        attached=attached,
        host_side=SimpleNamespace(items=lambda name: Host.items(side, name), records=lambda name: rings[name])
        if host
        else None,
    )
    return bpf, session, items


def use_of(name: str) -> Instruction:
    return Instruction(b.LD_IMM64, src=b.PSEUDO_MAP, map=name)


@generated(80, made=measured())
def test_a_generated_report(made: Any) -> None:
    bpf, session, items = made
    with (
        mock.patch.object(bpf_syscall, "read_all", lambda file, *_: items[file]),
        mock.patch.object(bpf_syscall, "possible_cpus", lambda: CPUS),
    ):
        for look in LOOKS:
            _, args, page, results = opened("gpurun", *look, "probe.bpf.o")
            reader = Reader(bpf, ["on_exit"])
            printer = Printer(reader, page, results)
            printer.stream(session)
            printer.maps(session)
            results.end(SUMMARY | {"verified_by": ["gpubpf"]}, None if bpf.attached.probes else ())
            # Keys and values, and what programs print, are as wide as they are.
            lines = check(page, args, shares=False, negative=True, wide=": ", values=True)
            found = reader.contents(session)
            if args.json:
                records = [json.loads(line) for line in lines]
                told = [one["map"] for one in records if one["type"] == "map" and one["kind"] != "ringbuf"]
                assert told == [one.definition.name for one in found]
            elif args.csv:
                whole = [*reader.records(session), *found]
                assert len(lines) == 1 + sum(len(list(one.rows())) for one in whole)

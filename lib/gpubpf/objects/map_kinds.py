"""Convert the maps of an object to maps of this library: the kind of each type, and whether the map is on the GPU or the host."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf import maps
from gpubpf.ebpf.btf import Types
from gpubpf.ebpf.bytecode import BpfFunction, Instruction
from gpubpf.ebpf.helpers import HELPERS, ArgumentKind
from gpubpf.ebpf.maps import MAX_RECORD, MapDefinition
from gpubpf.errors import ImageError
from gpubpf.kernel import bpf_syscall
from gpubpf.objects.object_file import ObjectMap, Variables
from gpubpf.record import replace

# enum bpf_map_type of the Linux kernel.
_KERNEL_TYPES = (
    "unspec hash array prog_array perf_event_array percpu_hash percpu_array stack_trace cgroup_array lru_hash lru_percpu_hash lpm_trie"
    " array_of_maps hash_of_maps devmap sockmap cpumap xskmap sockhash cgroup_storage reuseport_sockarray percpu_cgroup_storage queue"
    " stack sk_storage devmap_hash struct_ops ringbuf inode_storage task_storage bloom_filter user_ringbuf cgrp_storage arena"
).split()
_ARRAYS = ("array", "shared_array")
LARGEST_VALUE = 1 << 16  # bytes of a key or value
_RING_CALLS = (ArgumentKind.RECORD_SIZE, ArgumentKind.SHORT_RECORD_SIZE)


def definition(one: ObjectMap, types: Types, record_size: int) -> MapDefinition:
    """Return the definition of a map. Raises ImageError.

    A kind that GPU memory does not have keeps the kernel's name.

    record_size: for a ring buffer, bytes of the records that host programs send; 0: they send none."""
    if one.type not in maps.KINDS and one.type >= len(_KERNEL_TYPES):
        raise ImageError(
            f"map {one.name} is of type {one.type}, which is not known; use a type of the kernel or of bpftime"
        )
    key_type, value_type = (types.layout(number) if number else None for number in (one.key, one.value))
    sizes = (one.key_size, one.value_size, one.max_entries)
    made = maps.declared(one.name, one.type, *sizes, key_type, value_type, one.flags)
    if one.type not in maps.KINDS:
        return replace(made, kind=_KERNEL_TYPES[one.type])
    if made.kind == "ringbuf":
        return replace(made, value_size=record_size, value_type=None) if record_size else made
    if not one.max_entries:
        raise ImageError(
            f"map {one.name} has a max_entries of 0, or none; declare them with __uint(max_entries, N)"
        )
    if made.kind != "hash" and made.key_size != 4:
        raise ImageError(
            f"map {one.name} is an array, but its key has {made.key_size} bytes; use a key of 4 bytes"
        )
    for what, size in (("key", made.key_size), ("value", made.value_size)):
        if not 0 < size <= LARGEST_VALUE:
            raise ImageError(f"map {one.name} has a {what} of {size} bytes; use 1 to {LARGEST_VALUE} bytes")
    return made


def of_variables(one: Variables, name: str, types: Types) -> MapDefinition:
    """Return the map that holds a section of variables: an array with one value. Raises ImageError."""
    size = len(one.contents)
    fields = [[field, layout, at] for field, at, of in one.fields if (layout := types.layout(of)) is not None]
    fits = all(at + maps.type_size(layout) <= size for _, layout, at in fields)
    padded = maps.pad8(size)
    layout = {"fields": fields, "size": padded} if fits else None
    contents = one.contents.ljust(padded, b"\0")
    flags = bpf_syscall.CONSTANT if one.constant else 0
    return MapDefinition(
        name, "array", 4, padded, 1, "<u4", layout, flags, bpf_syscall.ARRAY, contents, one.constant
    )


def names_of_variables(sections: Iterable[Variables], used: Collection[str]) -> dict[int, str]:
    """Return the names of the maps for sections of variables, such as `data` for .data, by number of the section."""
    found: dict[int, str] = {}
    for one in sections:
        name = one.name.lstrip(".").replace(".", "_")
        name = "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in name)
        while name in used or name in found.values():
            name += "_"
        found[one.section] = name
    return found


def record_sizes(codes: Iterable[Sequence[Instruction]]) -> dict[str, int]:
    """Return the size in bytes of the records that host programs send to each ring buffer of the kernel.

    The size is found in the instructions before a call. For device programs, `verify.records` finds it. Raises ImageError if the
    records of a ring buffer have several sizes, or a size that is not constant, because the reader could not separate them."""
    found: dict[str, set[int]] = {}
    for code in codes:
        for pc, i in enumerate(code):
            helper = HELPERS.get(i.imm) if i.opcode == b.JMP | b.CALL and not i.src else None
            kinds = helper.registers if helper is not None else {}
            size = next((kinds[kind][0] for kind in _RING_CALLS if kind in kinds), None)
            if size is None or ArgumentKind.MAP not in kinds:
                continue
            ring = next((j.map for j in _before(code, pc) if _sets(j, kinds[ArgumentKind.MAP][0])), None)
            given = next((j for j in _before(code, pc) if _sets(j, size)), None)
            constant = given is not None and given.opcode & 0xF8 == b.MOV
            if ring is not None:
                found.setdefault(ring, set()).add(given.imm if given is not None and constant else 0)
    for ring, sizes in found.items():
        if len(sizes) > 1 or not 0 < min(sizes) <= MAX_RECORD:
            raise ImageError(
                f"ring buffer {ring}: host programs send records whose size is not one constant of 1 to {MAX_RECORD} bytes;"
                " use a ring buffer for each type of record"
            )
    return {ring: min(sizes) for ring, sizes in found.items()}


def _before(code: Sequence[Instruction], pc: int) -> Iterable[Instruction]:
    return reversed(code[max(0, pc - 64) : pc])


def _sets(i: Instruction, register: int) -> bool:
    return i.cls in (b.LD, b.LDX, b.ALU, b.ALU64) and i.opcode != 0 and i.dst == register


def placed(
    definitions: Mapping[str, MapDefinition], functions: Iterable[BpfFunction], of_machine: Collection[str]
) -> dict[str, MapDefinition]:
    """Return the maps. Maps that both device and host programs use are in host memory. Raises ImageError if that is not possible.

    of_machine: the programs that run for the whole machine."""
    users: dict[str, dict[bool, str]] = {}
    everywhere: dict[str, str] = {}  # users that run for the whole machine
    for function in functions:
        for name in {i.map for i in function.instructions if i.map is not None}:
            users.setdefault(name, {}).setdefault(function.point in b.DEVICE_POINTS, function.name)
            if function.name in of_machine:
                everywhere.setdefault(name, function.name)
    result = dict(definitions)
    for name, sides in users.items():
        one = definitions[name]
        if len(sides) == 2 and not one.constant:
            if one.kind not in _ARRAYS:
                raise ImageError(
                    f"map {name} of kind {one.kind} is used by {sides[True]} on the GPU and by {sides[False]} on the host;"
                    " only arrays can be shared, so use BPF_MAP_TYPE_ARRAY"
                )
            result[name] = replace(one, kind="shared_array")
        elif True in sides and one.kind not in (*_ARRAYS, *maps.SHAPED, "hash", "percpu_array", "ringbuf"):
            raise ImageError(
                f"map {name} is of kind {one.kind}, which GPU memory does not have, and {sides[True]} uses it on the GPU;"
                " use an array, a hash or a ring buffer"
            )
        elif False in sides and one.kernel_type == bpf_syscall.PERF_EVENT_ARRAY:
            raise ImageError(
                f"map {name} is a perf buffer, which {sides[False]} uses on the host; use BPF_MAP_TYPE_RINGBUF"
            )
        elif True not in sides and one.kind in maps.SHAPED:
            raise ImageError(
                f"map {name} has a value for each GPU thread, but only {sides[False]} on the host uses it; use an array"
            )
        if result[name].kind == "shared_array" and name in everywhere:
            raise ImageError(
                f"map {name} is shared with the GPU, so each process has its own, but {everywhere[name]} runs for the whole machine;"
                " use another map, or a uprobe"
            )
    return result

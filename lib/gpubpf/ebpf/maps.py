"""Maps: their definitions, and their layout in GPU memory, which the lowering, the agent and the decoder share.

All numbers are little-endian; storage begins at an address that is a multiple of ALIGNMENT.

    thread_array, warp_array, block_array, kernel_array
                  value[entries][units] and one more value: for each entry, one value for each unit, which is a thread, a warp, a
                  block, or the whole grid. The number of a thread is (block number) * (threads of a block) + (thread in the
                  block), x fastest. Warps are numbered likewise, with (threads of a block + 31) / 32 warps in each block. Units
                  beyond the capacity share the last value, which is not read: if it changed, something was lost.
    site_array    value[shards][sites] and one more value: for each shard, one value for each site of a kernel. The shard is the
                  number of the multiprocessor, or with sampling the thread's group, modulo the number of shards, a power of two.
                  Sites beyond the capacity share the last value.
    array         value[entries]. percpu_array and histogram have the same layout: all threads share a cell, so update it atomically.
    shared_array  value[entries], each padded to 8 bytes, in host memory.
    hash          64-byte header: u64 entries used, u64 lost, u64 slots (a power of two), zeros.
                  Then u64 state[slots], key[slots] (padded to 8 bytes each), value[slots] (padded to 8 bytes each).
                  A state is 0 (never used) or the low 61 bits of the key's hash << STATE_BITS | a SlotState. Slots that were never
                  used have a value of zeros.
    ringbuf       control and data in two places; `rings.py` reads them.
                  Control, in GPU memory: u64 shards, u64 capacity (records of a shard, a power of two), u64 address of the data as
                  the GPU sees it, zeros up to 64; then for each shard 64 bytes: u64 reserved, u64 lost, u64 consumed as last seen.
                  Data: for each shard 64 bytes: u64 consumed, written by the reader; rounded up to 4096; then the records of each
                  shard. A record is {u32 mark, u32 size}, then size bytes, padded to 8. Its slot is position modulo capacity. Its
                  mark, (position + 1) modulo 2^32, is written last and commits it. Bit 31 of size: discarded.
    param         bytes by value in the launch block, not in memory.

For each program at block begin or end, the library adds an array: {u64 lost, u64 0}, then BLOCK_SLOTS slots of 16 bytes. A slot is u64
(48 bits that identify the block, or 0) << 16 | marks (see lower/templates/block.ll), then u64 number of the block's threads that have
reached the program.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gpubpf.errors import Error
from gpubpf.kernel import bpf_syscall
from gpubpf.record import Record, replace

if TYPE_CHECKING:
    import numpy as np

# Kinds of map with one instance for each kernel and launch shape (site_array: for each kernel), and the unit that has
# `max_entries` values in it.
SHAPED = {
    "thread_array": "thread",
    "warp_array": "warp",
    "block_array": "block",
    "kernel_array": "instance",
    "site_array": "site",
}
DEVICE_KINDS = (*SHAPED, "param")  # host programs cannot use these kinds, except copies of parameters
# The kinds of the types of map that a program can name: by number, those of the Linux kernel (enum bpf_map_type) and bpftime's.
KINDS: Mapping[int, str] = {
    bpf_syscall.HASH: "hash",
    bpf_syscall.ARRAY: "array",
    bpf_syscall.PERF_EVENT_ARRAY: "ringbuf",
    bpf_syscall.PERCPU_ARRAY: "percpu_array",
    bpf_syscall.RINGBUF: "ringbuf",
    1501: "hash",  # GPU_HASH_MAP
    1502: "thread_array",  # PERGPUTD_ARRAY_MAP
    1503: "array",  # GPU_ARRAY_MAP
    1504: "shared_array",  # GPU_KERNEL_SHARED_ARRAY_MAP
    1512: "thread_array",  # PERGPUTD_ARRAY_HOST_MAP
    1513: "shared_array",  # GPU_ARRAY_HOST_MAP
    1527: "ringbuf",  # GPU_RINGBUF_MAP
}
_OF_BPFTIME = frozenset(number for number in KINDS if number > 1500)
# bpftime's rings have `max_entries` records for each thread, by default for BPFTIME_THREADS threads.
BPFTIME_RING, BPFTIME_THREADS = 1527, 1024
ALIGNMENT = 256  # bytes: alignment of storage
HEADER = 64  # bytes of the header of a hash, and of a ring's control block
RECORD_HEADER = 8  # bytes before the payload of a ring's record: u32 mark, u32 size
MAX_RECORD = 4096 - RECORD_HEADER
DISCARDED = 1 << 31  # in a record's size
RING_SHARD = 64  # bytes that a shard has in the control block, and in front of the data
RING_PAGE = 4096
RING_MARGIN = 2048  # records that threads of a multiprocessor can have between looking for room and taking it
MAX_PROBES = 128  # slots of a hash that a lookup reads before it gives up
STATE_BITS = 3  # low bits of a slot's state that hold a SlotState
# The hash of a key: from HASH_SEED on, for each of its `chunks`, xor it, multiply by HASH_FACTOR, xor the upper half into the lower.
HASH_SEED, HASH_FACTOR = 7046029254386353131, (1 << 64) - 4658895280553007687
PERF_BYTES = 1 << 18  # size of a perf buffer, which is a ring on a GPU
# The ring buffers for printed texts. If a program prints more than PRINT_ARGUMENTS numbers in a call, it prints all of its texts to
# LONG_PRINTS, so that their order remains.
PRINTS, LONG_PRINTS = "gpubpf_prints", "gpubpf_long_prints"
PRINT_BYTES = 1 << 20
PRINT_ARGUMENTS, LONG_PRINT_ARGUMENTS = 3, 12
BLOCKS = "gpubpf_blocks_"  # prefix to a program's name: its map to find the first or last thread of a block
SAMPLED = "gpubpf_sampled"  # the number of chosen blocks or warps (ebpf/sampling.py), by group
SPENT = "gpubpf_spent"  # with --budget: the counts own, added, skipped (inject/cost.py)
# Parts, counts, lanes: each multiprocessor and lane adds to its own words, so that they do not wait for each other.
SPENT_SHAPE = (32, 3, 32)
GROUPS = 256  # groups of chosen blocks and warps: at random, by the lowest bits of their hash
BLOCK_SLOTS = 1 << 14  # slots for resident blocks: a GPU has at most 32 blocks on each multiprocessor
BLOCK_PROBES = 64  # slots that a search for a block reads
MAX_THREADS = (1 << 32) - 1  # threads of an instance: thread numbers have 32 bits on the GPU
SHARDS_SHIFT = 32  # the capacity of a site array is sites | shards - 1 << SHARDS_SHIFT


class SlotState(IntEnum):
    """What a slot of a hash is used for. Bit 0: the key is there. Bit 1: the value is there, so the slot is in use."""

    WRITING = 1  # one thread is writing the key and the value
    NAMELESS = 2  # in use, but the key is still being written
    FULL = 3
    DELETED = 7


# C types as bcc spells them, to NumPy's.
_SCALARS = {
    "_Bool": "|b1",
    "char": "|i1",
    "signed char": "|i1",
    "unsigned char": "|u1",
    "short": "<i2",
    "unsigned short": "<u2",
    "int": "<i4",
    "unsigned int": "<u4",
    "long": "<i8",
    "unsigned long": "<u8",
    "long long": "<i8",
    "unsigned long long": "<u8",
    "float": "<f4",
    "double": "<f8",
    "__int128": "|V16",
    "unsigned __int128": "|V16",
    **{
        f"{sign}{8 * size}": f"{'|' if size == 1 else '<'}{sign.replace('s', 'i')}{size}"
        for sign in "us"
        for size in (1, 2, 4, 8)
    },
    "bool": "|b1",
}


class MapDefinition(Record):
    """A map of a C text. Sizes are in bytes, `max_entries` is in entries, or in bytes for a ring buffer.

    kind                  a kind of the module's docstring; "type N" if GPU memory has no map of this kind
    key_type, value_type  dtypes as JSON values (see `dtype`)
    flags                 from the C text; bit 31 marks a map that the library added
    kernel_type           the type of map that bcc takes it for (enum bpf_map_type)
    contents              the first bytes of an array's initial contents, followed by zeros; for a hash, its initial elements, each
                          the key and then the value, without padding
    constant              whether the contents never change
    """

    name: str
    kind: str
    key_size: int
    value_size: int
    max_entries: int
    key_type: Any = None
    value_type: Any = None
    flags: int = 0
    kernel_type: int = 0
    contents: bytes = b""
    constant: bool = False

    @cached_property
    def value_dtype(self) -> np.dtype[Any]:
        return dtype(self.value_type, self.value_size)

    @cached_property
    def key_dtype(self) -> np.dtype[Any]:
        return dtype(self.key_type, self.key_size)

    @property
    def kernel_attributes(self) -> tuple[int, int, int, int, int]:
        """Return (type, key size, value size, entries, flags) for bpf(BPF_MAP_CREATE) of a map that host programs use.

        0 entries mean one for each possible CPU. The kernel's ring buffers have no value size, while `value_size` of this
        definition is the size of a record.
        """
        if self.kernel_type == bpf_syscall.RINGBUF:
            return bpf_syscall.RINGBUF, 0, 0, self.capacity, self.flags
        if self.kernel_type == bpf_syscall.PERF_EVENT_ARRAY:
            return bpf_syscall.PERF_EVENT_ARRAY, 4, 4, 0, self.flags
        if self.kind == "shared_array":
            return bpf_syscall.ARRAY, 4, self.value_size, self.max_entries, self.flags | bpf_syscall.MMAPABLE
        return self.kernel_type, self.key_size, self.value_size, self.max_entries, self.flags

    @property
    def stride(self) -> int:
        """The distance in bytes from one value of an array to the next."""
        return pad8(self.value_size) if self.kind == "shared_array" else self.value_size

    @property
    def slots(self) -> int:
        """The number of slots of a hash, at least twice its entries."""
        return 1 << (2 * max(self.max_entries, 8) - 1).bit_length()

    @property
    def capacity(self) -> int:
        """The size of a ring buffer in bytes: what the C text asks for, rounded up to a power of two."""
        return 1 << (max(self.max_entries, 4096) - 1).bit_length()

    def to_json(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in (
                "name",
                "kind",
                "key_size",
                "value_size",
                "max_entries",
                "key_type",
                "value_type",
                "flags",
                "kernel_type",
            )
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MapDefinition:
        return cls(**value)


def kind_of(number: int) -> str:
    """Return the kind of the map type with this number (`KINDS`); "type N" if GPU memory has no map of that type."""
    return KINDS.get(number, f"type {number}")


def kernel_type(kind: str) -> int:
    """Return the Linux kernel's type of map that host programs use for a kind of map. "ringbuf" gives a ring, not a perf buffer."""
    return {"hash": bpf_syscall.HASH, "ringbuf": bpf_syscall.RINGBUF}.get(kind, bpf_syscall.ARRAY)


def declared(
    name: str,
    number: int,
    key_size: int,
    value_size: int,
    max_entries: int,
    key_type: Any = None,
    value_type: Any = None,
    flags: int = 0,
) -> MapDefinition:
    """Return the definition of a map of the type `number` (`KINDS`), with the sizes that an object file declares.

    The kernel's rings and perf buffers have record size 0; `verify.records` finds the real size. Host programs use a map of bpftime as
    the kernel's type of map of the same kind.

    key_type, value_type: as in MapDefinition
    """
    kind = kind_of(number)
    if kind == "ringbuf":
        key_size, key_type = 0, None
    if number in (bpf_syscall.RINGBUF, bpf_syscall.PERF_EVENT_ARRAY):
        value_size, value_type = 0, None
    if number == bpf_syscall.PERF_EVENT_ARRAY:
        max_entries = PERF_BYTES
    kernel = kernel_type(kind) if number in _OF_BPFTIME else number
    made = MapDefinition(name, kind, key_size, value_size, max_entries, key_type, value_type, flags, kernel)
    if number == BPFTIME_RING:
        made = replace(made, max_entries=max_entries * BPFTIME_THREADS * record_stride(made))
    return made


def pad8(size: int) -> int:
    return (size + 7) & ~7


def chunks(size: int) -> list[tuple[int, int]]:
    """Split `size` bytes into naturally aligned parts: (offset, width)."""
    result = []
    at = 0
    while at < size:
        width = next(w for w in (8, 4, 2, 1) if at + w <= size)
        result.append((at, width))
        at += width
    return result


def prints_definition(name: str = PRINTS) -> MapDefinition:
    """Return a ring buffer of prints: PRINTS or LONG_PRINTS. A record is the CRC-32 of the text, then the arguments."""
    arguments = PRINT_ARGUMENTS if name == PRINTS else LONG_PRINT_ARGUMENTS
    fields = [["format", "<u8", 0], ["arguments", ["<u8", [arguments]], 8]]
    size = 8 + 8 * arguments
    return MapDefinition(
        name, "ringbuf", 0, size, PRINT_BYTES, None, {"fields": fields, "size": size}, 1 << 31
    )


def blocks_definition(name: str) -> MapDefinition:
    """Return the map BLOCKS + a program's name."""
    fields = {"fields": [["block", "<u8", 0], ["threads", "<u8", 8]], "size": 16}
    return MapDefinition(name, "array", 4, 16, 1 + BLOCK_SLOTS, "<i4", fields, 1 << 31)


def is_name(name: str) -> bool:
    """Return whether a program may give this name to a map. Names become part of generated code; gpubpf_… are reserved."""
    return name.isascii() and name.isidentifier() and not name.startswith("gpubpf_")


def internal(name: str) -> MapDefinition | None:
    """Return the definition of a map that the library adds; None for other names."""
    if name in (PRINTS, LONG_PRINTS):
        return prints_definition(name)
    if name == SAMPLED:
        return MapDefinition(SAMPLED, "kernel_array", 4, 8, GROUPS, "<i4", "<u8", 1 << 31)
    if name == SPENT:
        return MapDefinition(SPENT, "kernel_array", 4, 8, math.prod(SPENT_SHAPE), "<i4", "<u8", 1 << 31)
    return blocks_definition(name) if name.startswith(BLOCKS) else None


def type_of(description: Any) -> Any:
    """Translate bcc's description of a C type (`bpf_table_leaf_desc`) to a dtype string, `[type, shape]`, or a structure
    `{"fields": [[name, type, offset], …], "size": bytes}`. Return None for types without an equivalent, such as bit fields."""
    described = _describe(description)
    return described[0] if described else None


def type_size(kind: Any) -> int:
    """Return the size in bytes of a type from `type_of`; 0 for None."""
    if isinstance(kind, str):
        return int(kind[2:])
    if isinstance(kind, list):
        size = type_size(kind[0])
        for dimension in kind[1]:
            size *= dimension
        return size
    return int(kind["size"]) if kind else 0


def _describe(description: Any) -> tuple[Any, int, int] | None:
    """Return (type, size, alignment)."""
    if isinstance(description, str):
        name = _SCALARS.get(description)
        if name is None:
            return None
        size = int(name[2:])
        return name, size, size
    if not isinstance(description, list) or len(description) < 2 or not isinstance(description[1], list):
        return None
    what = description[2] if len(description) > 2 else "struct"
    if what == "enum" or (what not in ("struct", "struct_packed", "union")):
        return ("<u4", 4, 4) if what == "enum" else None
    fields: list[list[Any]] = []
    offset = size = 0
    alignment = 1
    for number, member in enumerate(description[1]):
        if not isinstance(member, list) or len(member) < 2:
            return None
        if isinstance(member[1], list) and member[1] and isinstance(member[1][0], list):
            member = ["", member]  # without a name, bcc gives the bare type
        inner = _describe(member[1])
        if inner is None:
            return None
        kind, width, align = inner
        if len(member) > 2:
            if not isinstance(member[2], list):  # a bit field
                return None
            kind = [kind, member[2]]
            for dimension in member[2]:
                width *= dimension
        if what == "struct_packed":
            align = 1
        if what != "union":
            offset = (size + align - 1) // align * align
        alignment = max(alignment, align)
        name = str(member[0])
        if name == "" and isinstance(kind, dict):
            # An anonymous structure or union: its fields belong to the outer type.
            fields += [[field, inner_kind, offset + at] for field, inner_kind, at in kind["fields"]]
        elif not name.startswith("__pad_"):
            fields.append([name or f"_{number}", kind, offset])
        size = max(size, offset + width)
    size = (size + alignment - 1) // alignment * alignment
    return {"fields": fields, "size": size}, size, alignment


def dtype(kind: Any, size: int) -> np.dtype[Any]:
    """Return the NumPy dtype of a type from `type_of`; raw bytes (`V`) if it is unknown or its size is not `size`."""
    import numpy as np

    def convert(kind: Any) -> np.dtype[Any]:
        if isinstance(kind, str):
            return np.dtype(kind)
        if isinstance(kind, list):
            return np.dtype((convert(kind[0]), tuple(kind[1])))
        names = [field[0] for field in kind["fields"]]
        formats = [convert(field[1]) for field in kind["fields"]]
        offsets = [field[2] for field in kind["fields"]]
        return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": kind["size"]})

    try:
        result = convert(kind) if kind is not None else None
    except (TypeError, ValueError, KeyError):
        result = None
    return result if result is not None and result.itemsize == size else np.dtype(f"V{size}")


def sites_and_shards(capacity: int) -> tuple[int, int]:
    """Split the capacity of a site array into sites and shards."""
    return capacity & ((1 << SHARDS_SHIFT) - 1), (capacity >> SHARDS_SHIFT) + 1


def storage_size(defn: MapDefinition, units: int = 0) -> int:
    """Return the size of a map's storage in bytes; 0 for `param`. The size of a ring buffer does not include its control block.

    units: the number of threads, warps or blocks that an instance has room for; 1 for a kernel array; for a site array, the argument
      of `sites_and_shards`

    Raises ValueError for a number out of range or an unknown kind.
    """
    if defn.kind == "site_array":
        sites, shards = sites_and_shards(units)
        units = sites * shards
    if defn.kind in SHAPED:
        if not 0 <= units <= MAX_THREADS:
            raise ValueError(f"an instance has room for at most {MAX_THREADS} units, not {units}")
        return (defn.max_entries * units + 1) * defn.value_size
    if defn.kind in ("array", "percpu_array", "shared_array"):
        return defn.max_entries * defn.stride
    if defn.kind == "hash":
        return HEADER + defn.slots * (8 + pad8(defn.key_size) + pad8(defn.value_size))
    if defn.kind == "ringbuf":
        return defn.capacity
    if defn.kind == "param":
        return 0
    raise ValueError(f"no map of kind {defn.kind!r}")


def header(defn: MapDefinition) -> bytes:
    """Return the first bytes of a map's initial storage. All further bytes are zero.

    Raises Error if a hash has no slot for some of its contents.
    """
    if defn.kind == "hash":
        return _encode_hash(defn)
    return defn.contents if defn.kind == "array" else b""


def elements(defn: MapDefinition) -> dict[bytes, bytes]:
    """Return the initial elements of a hash: key → value."""
    size = defn.key_size + defn.value_size
    parts = (defn.contents[at : at + size] for at in range(0, len(defn.contents), size))
    return {part[: defn.key_size]: part[defn.key_size :] for part in parts}


def _encode_hash(defn: MapDefinition) -> bytes:
    """Return the storage of a hash with its contents, without the zeros at its end."""
    found, slots = elements(defn), defn.slots
    head = b"".join(v.to_bytes(8, "little") for v in (len(found), 0, slots))
    if not found:
        return head
    storage = bytearray(head.ljust(storage_size(defn), b"\0"))
    keys_at = HEADER + 8 * slots
    values_at = keys_at + slots * pad8(defn.key_size)
    for key, value in found.items():
        number = hash_of(key)
        for turn in range(min(MAX_PROBES, slots)):
            slot = (number >> 24) + turn & slots - 1
            at = HEADER + 8 * slot
            if not any(storage[at : at + 8]):
                break
        else:
            raise Error(f"map {defn.name} has no room for all of its first values; give it more entries")
        storage[at : at + 8] = (number << STATE_BITS & (1 << 64) - 1 | SlotState.FULL).to_bytes(8, "little")
        for start, stride, data in ((keys_at, pad8(len(key)), key), (values_at, pad8(len(value)), value)):
            storage[start + slot * stride : start + slot * stride + len(data)] = data
    return bytes(storage)


def hash_of(key: bytes) -> int:
    """Return the 64-bit hash of a key. Its upper bits choose the first slot, and its lower bits are in the slot's state."""
    number = HASH_SEED
    for at, width in chunks(len(key)):
        number = (number ^ int.from_bytes(key[at : at + width], "little")) * HASH_FACTOR & (1 << 64) - 1
        number ^= number >> 32
    return number


def fill(defn: MapDefinition, file: int) -> None:
    """Write the contents of an array or hash to a map in the kernel. Raises OSError."""
    if defn.kind == "hash":
        for key, value in elements(defn).items():
            bpf_syscall.update(file, key, value)
        return
    for number, at in enumerate(range(0, len(defn.contents), defn.value_size)):
        value = defn.contents[at : at + defn.value_size]
        bpf_syscall.update(file, number.to_bytes(4, "little"), value.ljust(defn.stride, b"\0"))
    if defn.constant:
        bpf_syscall.freeze(file)


def initial(defn: MapDefinition, units: int = 0) -> bytes:
    """Return the initial contents of a map's storage. For `param`: `value_size` zeros."""
    size = defn.value_size if defn.kind == "param" else storage_size(defn, units)
    return header(defn).ljust(size, b"\0")


def encode(defn: MapDefinition, value: Any) -> bytes:
    """Return a value of the map as bytes.

    value: bytes, a mapping of the value's fields, or anything that NumPy converts to the value's type
    """
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    import numpy as np

    if not isinstance(value, Mapping):
        return np.array(value, defn.value_dtype).tobytes()
    cell = np.zeros((), defn.value_dtype)
    for field, content in value.items():
        cell[field] = content
    return cell.tobytes()


def decode(defn: MapDefinition, raw: bytes | bytearray | memoryview, units: int = 0) -> np.ndarray[Any, Any]:
    """Return the contents of a map as an array of `value_dtype`, without a copy if the layout allows that.

    Shapes by kind of map; values that are arrays add their dimensions:
    thread_array, warp_array, block_array, kernel_array: (max_entries, units)
    site_array: (shards, sites)
    array, percpu_array, shared_array: (max_entries,)
    hash: (entries,) with fields `key` and `value`

    Raises Error if `raw` is shorter than the map, and for a ring buffer (`rings.py` reads these).
    """
    import numpy as np

    if defn.kind == "param":
        return np.frombuffer(raw, defn.value_dtype, 1)
    if len(raw) < storage_size(defn, units):
        raise Error(
            f"map {defn.name}: only {len(raw)} of {storage_size(defn, units)} bytes were read; measure again"
        )
    inner = defn.value_dtype.shape  # the shape of a value that is an array; () for other values
    if defn.kind == "site_array":
        sites, shards = sites_and_shards(units)
        return np.frombuffer(raw, defn.value_dtype, sites * shards).reshape(shards, sites, *inner)
    if defn.kind in SHAPED:
        values = np.frombuffer(raw, defn.value_dtype, defn.max_entries * units)
        return values.reshape(defn.max_entries, units, *inner)
    if defn.kind == "shared_array":
        cells = np.frombuffer(raw, np.uint8, defn.max_entries * defn.stride).reshape(-1, defn.stride)
        values = np.ascontiguousarray(cells[:, : defn.value_size]).view(defn.value_dtype.base)
        return values.reshape(defn.max_entries, *inner)
    if defn.kind in ("array", "percpu_array"):
        return np.frombuffer(raw, defn.value_dtype, defn.max_entries)
    if defn.kind == "hash":
        return _decode_hash(defn, raw)
    raise Error(f"map {defn.name} of kind {defn.kind} is not an array or hash; read it as a ring buffer")


def _decode_hash(defn: MapDefinition, raw: bytes | bytearray | memoryview) -> np.ndarray[Any, Any]:
    import numpy as np

    slots = defn.slots
    state = np.frombuffer(raw, "<u8", slots, HEADER)
    used = np.flatnonzero((state & (1 << STATE_BITS) - 1) == SlotState.FULL)

    def column(kind: np.dtype[Any], size: int, at: int) -> np.ndarray[Any, Any]:
        cells = np.frombuffer(raw, np.uint8, slots * pad8(size), at).reshape(slots, pad8(size))
        return np.frombuffer(cells[used, :size].tobytes(), np.dtype([("it", kind)]))["it"]

    keys_at = HEADER + 8 * slots
    result = np.empty(len(used), dtype=[("key", defn.key_dtype), ("value", defn.value_dtype)])
    result["key"] = column(defn.key_dtype, defn.key_size, keys_at)
    result["value"] = column(defn.value_dtype, defn.value_size, keys_at + slots * pad8(defn.key_size))
    return result


def record_stride(defn: MapDefinition) -> int:
    """Return the distance in bytes from one record of a ring buffer to the next."""
    return RECORD_HEADER + pad8(defn.value_size)


def lost(defn: MapDefinition, raw: bytes | bytearray | memoryview, units: int = 0) -> int:
    """Return how many updates of a hash found no slot or gave up, or how many groups of threads in a map BLOCKS found no slot.

    For an array by thread, warp, block, kernel or site: 1 if any number of units were beyond the capacity, else 0.
    """
    if defn.kind in SHAPED:
        end = storage_size(defn, units)
        return int(any(raw[end - defn.value_size : end]))
    if defn.name.startswith(BLOCKS):
        return int.from_bytes(raw[:8], "little")
    return int.from_bytes(raw[8:16], "little") if defn.kind == "hash" else 0


# A conversion of a printf format: flags and width, length, type.
CONVERSION = re.compile(r"%([-0# +]*\d{0,3})(ll|l|h{0,2})([a-zA-Z%])")


def prints(formats: Mapping[int, str], records: np.ndarray[Any, Any]) -> Iterator[str]:
    """Yield the lines that device programs printed.

    formats: the fragments' texts, by number
    records: the records of the map PRINTS or LONG_PRINTS
    """
    for record in records:
        text = formats.get(int(record["format"]))
        if text is not None:
            yield format_print(text, [int(v) for v in record["arguments"]])


def format_print(text: str, arguments: list[int]) -> str:
    """Format as C's printf does. Conversions: d i u x X p c, with hh, h, l, ll, width and flags; and %%."""
    rest = iter(arguments)

    def one(match: re.Match[str]) -> str:
        flags, length, conversion = match.groups()
        if conversion == "%":
            return "%"
        if conversion not in "diuxXpc":
            return match[0]
        value = next(rest, 0)
        bits = 64 if conversion == "p" else {"hh": 8, "h": 16, "": 32}.get(length, 64)
        value &= (1 << bits) - 1
        if conversion in "di":
            value -= (value >> (bits - 1)) << bits
            conversion = "d"
        if conversion == "c":
            return f"%{flags}s" % chr(value & 0x7F)
        if conversion == "p":
            return f"%{flags}s" % hex(value)
        return f"%{flags}{conversion}" % value

    return CONVERSION.sub(one, text)

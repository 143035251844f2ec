"""Layout and decoding of maps, against what lowered programs write: run natively, by several threads at once too."""

from __future__ import annotations

import ctypes
import random
import threading

import numpy as np
import pytest

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf import maps
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.errors import Error
from gpubpf_asm import (
    END,
    OUT,
    Native,
    alu,
    atomic,
    call,
    jump,
    load,
    load_map,
    lookup,
    mov,
    movi,
    program,
    store,
    storei,
)
from gpubpf_ring import Ring


def memory_of(definition, threads=0):
    data = maps.initial(definition, threads)
    return ctypes.create_string_buffer(data, len(data))


def address(register, at):
    return [mov(register, 10), alu(b.ADD, register, imm=at)]


# Types


def test_types_from_bcc_descriptions():
    tally = ["tally", [["runs", "unsigned long long"], ["work", "unsigned long long"]], "struct_packed"]
    assert maps.dtype(maps.type_of(tally), 16) == np.dtype([("runs", "<u8"), ("work", "<u8")])
    mixed = [
        "rec",
        [
            ["a", "unsigned long long"],
            ["b", "unsigned int"],
            ["name", "char", [16]],
            ["vs", "unsigned short", [4]],
        ],
        "struct",
    ]
    kind = maps.dtype(maps.type_of(mixed), 40)
    assert (kind["name"].shape, kind["vs"].shape, kind.fields["vs"][1]) == ((16,), (4,), 28)
    padded = [
        "in",
        [["a", "unsigned short"], ["b", "unsigned char", [3]], ["__pad_end", "char", [1]]],
        "struct_packed",
    ]
    kind = maps.dtype(maps.type_of(padded), 6)
    assert kind.names == ("a", "b")
    assert kind.itemsize == 6
    union = ["", [["a", "unsigned int"], ["b", "unsigned char", [4]]], "union"]
    kind = maps.dtype(maps.type_of(["s", [["u", union], ["c", "int"]], "struct"]), 8)
    assert kind.fields["c"][1] == 4
    kind = maps.dtype(maps.type_of(["s", [["c", "int"], union], "struct"]), 8)
    assert [kind.fields[name][1] for name in ("c", "a", "b")] == [0, 4, 4]
    assert maps.dtype(maps.type_of("float"), 4) == np.dtype("<f4")
    assert maps.dtype(maps.type_of("unsigned long long"), 8) == np.dtype("<u8")


@pytest.mark.parametrize(
    "description",
    [
        ["s", [["lo", "unsigned int", 3]], "struct"],
        "wchar_t",
        5,
        None,
        [],
        ["s", 3],
        ["s", [["a", "int"]], "class"],
    ],
)
def test_what_has_no_type_is_bytes(description):
    assert maps.dtype(maps.type_of(description), 12) == np.dtype("V12")


def test_a_type_of_another_size_is_bytes():
    assert maps.dtype("<u4", 8) == np.dtype("V8")


def test_definitions_travel_as_json():
    import json

    definition = MapDefinition("m", "hash", 8, 16, 9, "<u8", {"fields": [["a", "<u8", 0]], "size": 16})
    assert MapDefinition.from_json(json.loads(json.dumps(definition.to_json()))) == definition


# Thread arrays and arrays


@pytest.mark.every(2)
@pytest.mark.parametrize("entries", [1, 3])
def test_thread_array_has_a_place_for_each_thread(entries):
    """Every thread of a 2 x 2 grid of 3 x 2 blocks writes its number; threads beyond the capacity do no harm."""
    definition = MapDefinition(
        "mine",
        "thread_array",
        4,
        16,
        entries,
        None,
        {"fields": [["a", "<u8", 0], ["b", "<u8", 8]], "size": 16},
    )
    threads = 24
    memory = memory_of(definition, threads)
    for capacity in (threads, 20):
        array = (ctypes.c_char * len(memory)).from_address(ctypes.addressof(memory))
        ctypes.memset(array, 0, len(memory))
        for block in range(4):
            for thread in range(6):
                specials = {
                    "ctaid.x": block % 2,
                    "ctaid.y": block // 2,
                    "ctaid.z": 0,
                    "nctaid.x": 2,
                    "nctaid.y": 2,
                }
                specials |= {
                    "tid.x": thread % 3,
                    "tid.y": thread // 3,
                    "tid.z": 0,
                    "ntid.x": 3,
                    "ntid.y": 2,
                    "ntid.z": 1,
                }
                body = []
                for key in range(entries):
                    body += [
                        *lookup("mine", key),
                        mov(6, 0),
                        call(606),
                        store(6, 0, 0),
                        storei(6, 8, 7 + key),
                    ]
                made, function = program([*body, *END], (definition,))
                Native(made, function, specials)(map_mine=ctypes.addressof(memory), capacity_mine=capacity)
        found = maps.decode(definition, memory.raw, capacity)
        assert found.shape == (entries, capacity)
        assert found["a"].tolist() == [list(range(capacity))] * entries
        assert found["b"].tolist() == [[7 + key] * capacity for key in range(entries)]
        assert maps.lost(definition, memory.raw, capacity) == (capacity < threads)
        end = maps.storage_size(definition, capacity)
        assert not any(memory.raw[end:])


@pytest.mark.parametrize(("kind", "units"), [("warp_array", 8), ("block_array", 4), ("kernel_array", 1)])
def test_arrays_of_warps_and_blocks(kind, units):
    """Threads of a grid of 4 blocks of 5 x 7 threads add their numbers to the value of their warp, block, or grid."""
    definition = MapDefinition("sums", kind, 4, 8, 2, None, "<u8")
    memory = memory_of(definition, units)
    expected = [0] * units
    for block in range(4):
        for thread in (0, 31, 32, 34):
            specials = {"ctaid.x": block, "ctaid.y": 0, "ctaid.z": 0, "nctaid.x": 4, "nctaid.y": 1}
            specials |= {"tid.x": thread % 5, "tid.y": thread // 5, "tid.z": 0}
            specials |= {"ntid.x": 5, "ntid.y": 7, "ntid.z": 1}
            code = [*lookup("sums", 1), mov(6, 0), call(606), atomic(0, 6, 0, 0), *END]
            made, function = program(code, (definition,))
            given = {"map_sums": ctypes.addressof(memory), "capacity_sums": units}
            native = Native(made, function, specials)
            native(**{a.name: given[a.name] for a in native.module.arguments})
            number = {"warp_array": 2 * block + thread // 32, "block_array": block, "kernel_array": 0}[kind]
            expected[number] += 35 * block + thread
    found = maps.decode(definition, memory.raw, units)
    assert found.tolist() == [[0] * units, expected]
    assert maps.lost(definition, memory.raw, units) == 0


def test_arrays_by_site():
    """Each multiprocessor has a shard, those beyond the shards share theirs; what is no site gets the value after the last."""
    definition = MapDefinition(
        "sites", "site_array", 4, 16, 1, None, {"fields": [["n", "<u8", 8]], "size": 16}
    )
    capacity = 5 | 3 << 32  # sites | shards - 1 << 32
    memory = memory_of(definition, capacity)
    assert len(memory) == maps.storage_size(definition, capacity) == (4 * 5 + 1) * 16
    for sm in (0, 3, 6, 7):
        for site in (0, 2, 4, 5, 2**31):
            # The key is the number of the launch: the context's site is known to be one.
            code = [mov(7, 1), load(6, 7, 0), store(10, -8, 6), *load_map(1, "sites"), mov(2, 10)]
            code += [alu(b.ADD, 2, imm=-8), call(1), movi(1, 1), atomic(0, 0, 8, 1), *END]
            made, function = program(code, (definition,))
            native = Native(made, function, {"group": sm})
            native(map_sites=ctypes.addressof(memory), capacity_sites=capacity, launch=site)
    found = maps.decode(definition, memory.raw, capacity)
    assert found.shape == (4, 5)
    assert found["n"].tolist() == [[1, 0, 1, 0, 1], [0] * 5, [1, 0, 1, 0, 1], [2, 0, 2, 0, 2]]
    assert maps.lost(definition, memory.raw, capacity) == 1
    assert maps.lost(definition, maps.initial(definition, capacity), capacity) == 0
    assert int.from_bytes(memory.raw[-8:], "little") == 8


def test_maps_that_the_library_adds():
    definition = maps.internal(maps.BLOCKS + "on_end")
    assert definition.kind == "array"
    assert maps.lost(definition, (7).to_bytes(8, "little") + bytes(maps.storage_size(definition))) == 7
    assert maps.internal(maps.PRINTS) == maps.prints_definition()
    assert maps.internal("cells") is None


def test_shared_arrays_have_the_kernels_stride():
    """Values of 12 bytes lie 16 apart, as in the kernel's own array."""
    kind = {"fields": [["a", "<u4", 0], ["b", "<u4", 4], ["c", "<u4", 8]], "size": 12}
    definition = MapDefinition("cells", "shared_array", 4, 12, 3, None, kind, 1 << 10, 2)
    memory = memory_of(definition)
    assert len(memory) == maps.storage_size(definition) == 48
    code = [mov(7, 1), *lookup("cells", 2), load(3, 7, 0), store(0, 8, 3, 4), *END]
    made, function = program(code, (definition,))
    Native(made, function)(map_cells=ctypes.addressof(memory), launch=77)
    assert memory.raw[40:44] == b"M\0\0\0"
    assert [tuple(value) for value in maps.decode(definition, memory.raw)] == [(0, 0, 0)] * 2 + [(0, 0, 77)]


def test_the_maximum():
    definition = MapDefinition("counts", "array", 4, 8, 1, None, "<u8")
    memory = memory_of(definition)
    code = [mov(7, 1), *lookup("counts"), mov(1, 0), load(2, 7, 0), call(607), *END]
    made, function = program(code, (definition,))
    native = Native(made, function)
    for number, highest in ((5, 5), (3, 5), (1 << 63, 1 << 63), (9, 1 << 63)):
        native(map_counts=ctypes.addressof(memory), launch=number)
        assert maps.decode(definition, memory.raw).tolist() == [highest]


def test_thread_array_sizes():
    definition = MapDefinition("mine", "thread_array", 4, 16, 1)
    assert maps.storage_size(definition, 16_000_000) == 16 * 16_000_001
    with pytest.raises(ValueError, match="at most"):
        maps.storage_size(definition, 1 << 32)


def test_array_elements_and_their_limits():
    definition = MapDefinition("counts", "array", 4, 8, 5, None, "<u8")
    memory = memory_of(definition)
    code = [load(3, 1, 0), store(10, -4, 3, 4), *load_map(1, "counts"), *address(2, -4), call(1)]
    code += [jump(b.JEQ, 0, 2, imm=0), movi(1, 1), atomic(0, 0, 0, 1), *END]
    made, function = program(code, (definition,))
    native = Native(made, function)
    for key in (0, 4, 4, 5, 1000, 1 << 31, (1 << 32) - 1):
        native(map_counts=ctypes.addressof(memory), launch=key)
    assert maps.decode(definition, memory.raw).tolist() == [1, 0, 0, 0, 2]


def test_short_memory_is_an_error():
    with pytest.raises(Error, match="bytes were read"):
        maps.decode(MapDefinition("m", "array", 4, 8, 5), b"1234")


# Hashes


def keyed(key_size, value_size=8, entries=64):
    return MapDefinition(
        "keyed", "hash", key_size, value_size, entries, ["|u1", [key_size]], ["|u1", [value_size]]
    )


def hash_program(definition, operation):
    """Key and value from `out`: key at 0, value at 64; the result to 128."""
    code = [*lookup("out"), mov(9, 0)]
    key_at = -(definition.key_size + 7 & ~7)
    value_at = key_at - (definition.value_size + 7 & ~7)
    for k in range(definition.key_size):
        code += [load(3, 9, k, 1), store(10, key_at + k, 3, 1)]
    for k in range(definition.value_size):
        code += [load(3, 9, 64 + k, 1), store(10, value_at + k, 3, 1)]
    code += [*load_map(1, "keyed"), *address(2, key_at), *address(3, value_at)]
    if operation == "lookup":
        code += [
            call(1),
            movi(3, 0),
            jump(b.JEQ, 0, 2, imm=0),
            load(3, 0, 0, 1),
            alu(b.ADD, 3, imm=1),
            store(9, 128, 3),
        ]
    elif operation == "delete":
        code += [call(3), store(9, 128, 0)]
    else:
        code += [movi(4, {"update": 0, "insert": 1, "replace": 2}[operation]), call(2), store(9, 128, 0)]
    made, function = program([*code, *END], (OUT, definition))
    return Native(made, function)


@pytest.mark.parametrize("key_size", [1, 4, 8, 12, 20])
def test_hash_is_a_dictionary(key_size):
    definition = keyed(key_size)
    natives = {
        name: hash_program(definition, name) for name in ("update", "insert", "replace", "delete", "lookup")
    }
    memory, out = memory_of(definition), ctypes.create_string_buffer(256)
    expected: dict[bytes, bytes] = {}
    rng = random.Random(key_size)
    keys = [rng.randbytes(key_size) for _ in range(24)]
    for _ in range(600):
        name, key, value = rng.choice(list(natives)), rng.choice(keys), rng.randbytes(8)
        out.raw = key.ljust(64, b"\0") + value.ljust(192, b"\0")
        natives[name](map_keyed=ctypes.addressof(memory), map_out=ctypes.addressof(out))
        result = int.from_bytes(out.raw[128:136], "little", signed=True)
        if name == "lookup":
            assert result == (expected[key][0] + 1 if key in expected else 0)
        elif name == "delete":
            assert result == (0 if key in expected else -2)
            expected.pop(key, None)
        elif name == "insert" and key in expected:
            assert result == -17
        elif name == "replace" and key not in expected:
            assert result == -2
        else:
            assert result == 0
            expected[key] = value
    found = maps.decode(definition, memory.raw)
    assert {bytes(k): bytes(v) for k, v in zip(found["key"], found["value"], strict=True)} == expected
    assert int.from_bytes(memory.raw[:8], "little") == len(expected)
    assert maps.lost(definition, memory.raw) == 0


def test_a_full_hash_counts_what_is_lost():
    definition = keyed(4, entries=8)
    native = hash_program(definition, "update")
    memory, out = memory_of(definition), ctypes.create_string_buffer(256)
    failed = 0
    for number in range(60):
        out.raw = number.to_bytes(64, "little").ljust(256, b"\0")
        native(map_keyed=ctypes.addressof(memory), map_out=ctypes.addressof(out))
        failed += out.raw[128] != 0
    assert failed == maps.lost(definition, memory.raw) == 60 - definition.slots
    assert len(maps.decode(definition, memory.raw)) == definition.slots


def test_hash_counts_are_exact_with_threads_at_once():
    """What increment() becomes: lookup, insert zero if absent, lookup, add atomically. No count is lost."""
    definition = MapDefinition("keyed", "hash", 8, 8, 64, "<u8", "<u8")
    find = [*load_map(1, "keyed"), *address(2, -8), call(1)]
    code = [load(3, 1, 0), store(10, -8, 3), storei(10, -16, 0), *find, jump(b.JNE, 0, 14, imm=0)]
    code += [*load_map(1, "keyed"), *address(2, -8), *address(3, -16), movi(4, 1), call(2), *find]
    code[len(code) - len(find) - 9] = jump(b.JNE, 0, 8 + len(find), imm=0)
    position = 3 + len(find)
    code[position] = jump(b.JNE, 0, len(code) - position - 1, imm=0)
    code += [jump(b.JEQ, 0, 2, imm=0), movi(1, 1), atomic(0, 0, 0, 1), *END]
    made, function = program(code, (definition,))
    native = Native(made, function)
    memory = memory_of(definition)
    at = ctypes.addressof(memory)

    def work(seed):
        rng = random.Random(seed)
        for _ in range(4000):
            native(map_keyed=at, launch=rng.randrange(16) * 0x1_0000_0001)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = maps.decode(definition, memory.raw)
    assert len(found) == 16
    assert int(found["value"].sum()) == 16000


# Ring buffers


def ring(size=16, entries=4096):
    return MapDefinition(
        "ring", "ringbuf", 0, size, entries, None, {"fields": [["a", "<u8", 0], ["b", "<u8", 8]], "size": 16}
    )


def output_program(definition, size=16, specials=None):
    """A record {launch, work}, of perf's kind where it is shorter."""
    code = [mov(6, 1), load(3, 1, 0), load(4, 1, 16), store(10, -16, 3), store(10, -8, 4)]
    if size == 16:
        code += [*load_map(1, "ring"), *address(2, -16), movi(3, size), movi(4, 0), call(130), *END]
    else:
        code += [
            mov(1, 6),
            *load_map(2, "ring"),
            movi(3, -1),
            *address(4, -16),
            movi(5, size),
            call(25),
            *END,
        ]
    made, function = program(code, (definition,))
    return Native(made, function, specials)


def test_ring_gives_records_in_order():
    memory = Ring(ring(), shards=2)
    native = output_program(memory.definition, specials={"sm": 5})  # more than there are shards
    for number in range(100):
        native(**memory.given(launch=number, work=2 * number))
    assert memory.counts() == [(0, 0), (100, 0)]
    found = memory.take()
    assert found["a"].tolist() == list(range(100))
    assert found["b"].tolist() == [2 * n for n in range(100)]
    assert memory.reader.consumed == [0, 100]
    assert len(memory.take()) == 0


def test_ring_that_is_full_loses_and_says_so():
    """What threads of a multiprocessor may have under way is kept free."""
    memory = Ring(ring())
    native = output_program(memory.definition)
    for number in range(2100):
        native(**memory.given(launch=number, work=0))
    assert memory.take()["a"].tolist() == list(range(2048))
    assert memory.counts() == [(2048, 52)]
    native(**memory.given(launch=5000, work=0))  # what was taken is seen
    assert memory.take()["a"].tolist() == [5000]
    assert memory.counts() == [(2049, 52)]


@pytest.mark.parametrize("start", [0, (1 << 32) - 3000, (1 << 33) - 1])
def test_ring_goes_round_when_it_is_drained(start):
    """Over the end of its memory, and where the low words of positions begin again."""
    memory = Ring(ring())
    native = output_program(memory.definition)
    memory.begin_at(start)
    seen, number = [], 0
    for burst in (1500, 1000, 2040, 700, 2048, 2048, 1500, 5):
        for _ in range(burst):
            native(**memory.given(launch=number, work=0))
            number += 1
        seen += memory.take()["a"].tolist()
    assert seen == list(range(number))
    assert memory.reader.consumed == [start + number]
    assert memory.counts() == [(start + number, 0)]


def test_ring_with_reserved_submitted_and_discarded_records():
    memory = Ring(ring())
    code = [
        mov(6, 1),
        *load_map(1, "ring"),
        movi(2, 16),
        movi(3, 0),
        call(131),
        jump(b.JNE, 0, 2, imm=0),
        *END,
    ]
    code += [load(3, 6, 0), load(4, 6, 16), store(0, 0, 3), store(0, 8, 4), mov(1, 0), movi(2, 0)]
    code += [jump(b.JEQ, 4, 3, imm=1), call(132), *END, call(133), *END]
    made, function = program(code, (memory.definition,))
    native = Native(made, function)
    for number in range(50):
        native(**memory.given(launch=number, work=number % 3))
    assert memory.take()["a"].tolist() == [n for n in range(50) if n % 3 != 1]
    assert memory.reader.consumed == [50]


def test_ring_with_shorter_records():
    """They lie at the same stride, and say their size."""
    memory = Ring(ring())
    for number, size in enumerate((16, 8, 12)):
        output_program(memory.definition, size)(**memory.given(launch=number, work=9))
    assert memory.take()["a"].tolist() == [0, 1, 2]
    assert [memory.data[memory.place.first + 24 * n + 4] for n in range(3)] == [16, 8, 12]


def test_ring_with_a_record_that_is_not_committed():
    memory = Ring(ring())
    native = output_program(memory.definition)
    for number in range(3):
        native(**memory.given(launch=number, work=0))
    mark = memory.at + memory.place.first + 24
    ctypes.memset(mark, 0, 4)
    assert memory.take()["a"].tolist() == [0]
    assert len(memory.take()) == 0
    ctypes.memset(mark, 2, 1)
    assert memory.take()["a"].tolist() == [1, 2]


# Prints


def test_prints_come_back_as_text():
    memory = Ring(maps.prints_definition())
    text = b"at %d\0\0\0"
    words = int.from_bytes(text, "little")
    code = [mov(6, 1), *[b.Instruction(b.LD_IMM64, 3, imm=words), b.Instruction(0)], store(10, -8, 3)]
    code += [*address(1, -8), movi(2, 8), load(3, 6, 16), call(6), *END]
    made, function = program(code, ())
    native = Native(made, function)
    for work in (5, (1 << 64) - 3):
        native(**memory.given(work=work))
    assert list(maps.prints(native.module.formats, memory.take())) == ["at 5", "at -3"]


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        ("%d %u %x", [-1 & 0xFFFFFFFF, 7, 255], "-1 7 ff"),
        ("%lld %llu", [(1 << 64) - 2, (1 << 64) - 2], f"-2 {(1 << 64) - 2}"),
        ("100%% of %5d|%-4u|%04x", [3, 4, 5], "100% of     3|4   |0005"),
        ("%c%c %p", [72, 105, 4096], "Hi 0x1000"),
        ("%ld", [1 << 40], str(1 << 40)),
        ("%d %d", [1], "1 0"),
        ("%s", [1], "%s"),
        ("%hd %hu %hhu %016llx", [0xFFFF, 0x1FFFF, 300, 255], f"-1 65535 44 {255:016x}"),
    ],
)
def test_formats(text, arguments, expected):
    assert maps.format_print(text, arguments) == expected


def test_headers_are_the_beginning_of_storage():
    for definition in (keyed(8), OUT):
        start = maps.header(definition)
        assert maps.initial(definition).startswith(start)
        assert not any(maps.initial(definition)[len(start) :])
    assert maps.initial(MapDefinition("p", "param", 4, 24, 1)) == bytes(24)
    assert maps.storage_size(MapDefinition("p", "param", 4, 24, 1)) == 0
    with pytest.raises(ValueError, match="no map of kind"):
        maps.storage_size(MapDefinition("p", "lpm_trie", 4, 24, 1))


@pytest.mark.parametrize(
    ("number", "kind", "kernel"),
    [
        (1, "hash", 1),
        (2, "array", 2),
        (5, "type 5", 5),
        (1501, "hash", 1),
        (1502, "thread_array", 2),
        (1503, "array", 2),
        (1504, "shared_array", 2),
        (1505, "type 1505", 1505),
        (1512, "thread_array", 2),
        (1513, "shared_array", 2),
        (1527, "ringbuf", 27),
    ],
)
def test_types_of_maps_by_number(number, kind, kernel):
    """The kernel's, and bpftime's (runtime/include/bpftime_shm.hpp there)."""
    made = maps.declared("m", number, 4, 8, 100, "<u4", "<u8")
    assert (made.kind, made.kernel_type) == (kind, kernel)
    assert (made.value_size, made.value_type) == (8, "<u8")
    if kind != "ringbuf":
        assert (made.key_size, made.key_type, made.max_entries) == (4, "<u4", 100)

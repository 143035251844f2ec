"""Messages of a traced process are untrusted: any malformed message is refused, without other effects."""

from __future__ import annotations

import fcntl
import os
import random
import struct

import pytest

from gpubpf.agent import protocol
from gpubpf.agent.definitions import (
    CONTROL,
    SLOT,
    SLOTS,
    ArrayPart,
    FoundKernel,
    Message,
    PatchFailed,
    Place,
    RingPart,
    SnapshotFlag,
)
from gpubpf.agent.protocol import Malformed

SNAPSHOT = (
    struct.pack("<IIIIQQ", 7, 1, 0, SnapshotFlag.RUNNING, 4096, 123456789)
    + struct.pack("<I 2I3I3IQ I IQQQ", 1, 5, 3, 2, 1, 1, 32, 1, 1, 23, 1, 0, 256, 520, 64)
    + struct.pack("<I IQQ I IQQQ", 1, 3, 1024, 64, 1, 4, 0, 2048, 1024)
)
RING = struct.pack("<5IQQ", 4, 1, 0, Place.HOST_RING, 16, 8192, 48)


def test_snapshot() -> None:
    found = protocol.snapshot(SNAPSHOT)
    assert (found.sequence, found.context, found.flags, found.size) == (
        7,
        1,
        SnapshotFlag.RUNNING,
        4096,
    )
    (instance,) = found.instances
    assert (instance.slot, instance.build, instance.grid, instance.block_dim, instance.launches) == (
        5,
        3,
        (2, 1, 1),
        (32, 1, 1),
        23,
    )
    assert instance.arrays == (ArrayPart(0, 256, 520, 64),)
    assert found.taken_ns == 123456789
    assert found.shared == {3: (1024, 64)}
    assert found.rings == (RingPart(4, 0, 2048, 1024),)


def test_parts_beyond_the_memory_are_refused() -> None:
    smaller = SNAPSHOT[:16] + struct.pack("<Q", 700) + SNAPSHOT[24:]
    with pytest.raises(Malformed, match="a map outside its memory"):
        protocol.snapshot(smaller)
    wrapped = SNAPSHOT.replace(struct.pack("<QQ", 256, 520), struct.pack("<QQ", 2**64 - 8, 520))
    with pytest.raises(Malformed, match="a map outside its memory"):
        protocol.snapshot(wrapped)


@pytest.mark.parametrize(
    "decode",
    [
        protocol.hello,
        protocol.hooked,
        protocol.image,
        protocol.found,
        protocol.wanted_kernel,
        protocol.slot_and_text,
        protocol.snapshot,
        protocol.drained,
        protocol.ring,
        protocol.log,
        protocol.context,
        protocol.stack,
        protocol.ranges,
        protocol.kernel_failed,
    ],
)
def test_damaged_messages_are_malformed_and_nothing_else(decode: object) -> None:
    random.seed(1)
    malformed = 0
    for _ in range(3000):
        data = bytearray(SNAPSHOT if random.random() < 0.7 else random.randbytes(random.randrange(64)))
        for _ in range(random.randrange(4)):
            if data:
                data[random.randrange(len(data))] = random.randrange(256)
        try:
            decode(bytes(data[: random.randrange(len(data) + 1)]))  # type: ignore[operator]
        except Malformed:
            malformed += 1
    assert malformed > 100


def test_a_failed_kernel() -> None:
    assert protocol.kernel_failed(struct.pack("<4I", 1, 719, 0, 0)) == protocol.KernelFault(1, 719)
    known = struct.pack("<5I4sI6sI6IQ", 0, 700, 2, 1, 4, b"_Z1f", 6, b"/a.cu\n", 8, 1, 2, 3, 4, 5, 6, 64)
    fault = protocol.KernelFault(0, 700, "_Z1f", ("/a.cu\n", 8), (1, 2, 3), (4, 5, 6), 64, PatchFailed.YES)
    assert protocol.kernel_failed(known) == fault


def test_rings() -> None:
    found = protocol.ring(RING)
    assert (found.map, found.context, found.shards, found.capacity, found.stride) == (4, 1, 16, 8192, 48)
    assert found.first == 4096  # 16 heads of 64 bytes, and the rest of the page
    assert found.size == 4096 + 16 * 8192 * 48
    for shards, capacity, stride in [
        (0, 8192, 48),
        (257, 8192, 48),
        (16, 8191, 48),
        (16, 2048, 48),
        (16, 1 << 40, 48),
    ]:
        with pytest.raises(Malformed, match="a ring of an invalid size"):
            protocol.ring(struct.pack("<5IQQ", 4, 1, 0, Place.HOST_RING, shards, capacity, stride))


def test_capacities_of_site_arrays() -> None:
    assert protocol.sites_and_shards(70 | 255 << 32) == (70, 256)
    assert protocol.sites_and_shards(0) == (0, 1)
    for capacity in ((1 << 22) + 1, 5 | 2 << 32, 5 | 511 << 32, (1 << 64) - 1):
        with pytest.raises(Malformed, match="an invalid number of sites"):
            protocol.sites_and_shards(capacity)


def test_stacks() -> None:
    text = struct.pack("<I", 4) + b"a.so" + struct.pack("<I", 1) + b"f"
    place = struct.pack("<QQ", 0x7F0000001010, 0x10) + text + struct.pack("<II", 7, 1)
    number, frames = protocol.stack(struct.pack("<II", 3, 1) + place)
    assert (number, frames) == (3, (protocol.StackFrame(0x7F0000001010, 0x10, "a.so", "f", 7, True),))


def test_only_files_that_cannot_shrink_may_be_mapped() -> None:
    file = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 4096)
    assert not protocol.sealed(file, 4096)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    assert protocol.sealed(file, 4096) and not protocol.sealed(file, 4097)
    os.close(file)
    with open(os.devnull) as other:
        assert not protocol.sealed(other.fileno(), 0)


def test_frames_come_in_any_pieces() -> None:
    stream = protocol.frame(Message.NAME, b"abc") + protocol.frame(Message.DRAINED, b"") * 2
    for step in (1, 3, 8, len(stream)):
        frames = protocol.Frames()
        found = [f for at in range(0, len(stream), step) for f in frames.feed(stream[at : at + step], [])]
        assert [(kind, payload) for kind, payload, _ in found] == [
            (Message.NAME, b"abc"),
            (Message.DRAINED, b""),
            (Message.DRAINED, b""),
        ]


def test_files_go_with_their_frames_and_too_many_are_refused() -> None:
    frames = protocol.Frames()
    first, second = os.memfd_create("a"), os.memfd_create("b")
    stream = (
        protocol.frame(Message.HELLO, b"")
        + protocol.frame(Message.NAME, b"")
        + protocol.frame(Message.STUBS, struct.pack("<I", 0))  # without one
        + protocol.frame(Message.RING, RING.replace(b"\x01\0\0\0\x10", b"\x02\0\0\0\x10"))  # in GPU memory
        + protocol.frame(Message.IMAGE, b"")
    )
    found = frames.feed(stream, [first, second])
    assert [file for _, _, file in found] == [first, None, None, None, second]
    with pytest.raises(Malformed, match="unexpected file descriptors"):
        frames.feed(b"", [os.memfd_create("x") for _ in range(17)])
    frames.close()
    os.close(first)
    os.close(second)


def test_a_file_that_is_shorter_than_said_gives_what_it_has() -> None:
    file = os.memfd_create("short")
    os.write(file, b"12345")
    assert protocol.read_file(file, 1 << 20, 2) == b"345"
    assert protocol.read_control(file) == ([], 0)
    os.close(file)


def text(what: str) -> bytes:
    return struct.pack("<I", len(what)) + what.encode()


def test_a_module_from_before() -> None:
    told = text("add") + struct.pack("<7I", 1, 3, 0, 8, 8, 8, 16) + struct.pack("<I4i", 4, 32, 0, 1024, 75)
    untold = text("scale") + struct.pack("<I4i", 0, *[-1] * 4)
    message = (
        struct.pack("<5I", 7, 90, 1, 1, 2)
        + text("add")
        + text("scale")
        + struct.pack("<I", 2)
        + told
        + untold
    )
    assert protocol.found(message) == protocol.Found(
        7,
        90,
        1,
        True,
        ("add", "scale"),
        (
            FoundKernel("add", ((0, 8), (8, 8), (16, 4)), 32, 0, 1024, 75),
            FoundKernel("scale", None),
        ),
    )
    for end in range(len(message)):
        with pytest.raises(protocol.Malformed):
            protocol.found(message[:end])


def test_a_kernel_of_a_large_module() -> None:
    message = struct.pack("<4I", 9, 90, 1, 7) + text("add")
    assert protocol.wanted_kernel(message) == protocol.WantedKernel(9, 90, 1, 7, "add")
    for damaged in (*(message[:end] for end in range(len(message))), message[:4] + bytes(4) + message[8:]):
        with pytest.raises(protocol.Malformed):
            protocol.wanted_kernel(damaged)


def test_control_block() -> None:
    file = os.memfd_create("control")
    second = CONTROL.size + SLOT.size
    os.pwrite(file, struct.pack("<I", 2), CONTROL.offset("used"))
    os.pwrite(file, struct.pack("<Q", 3), CONTROL.offset("unnamed"))
    os.pwrite(file, struct.pack("<Q", 10), second + SLOT.offset("seen"))
    os.pwrite(file, struct.pack("<Q", 6), second + SLOT.offset("instrumented"))
    os.pwrite(file, struct.pack("<2Q", 1, 3), second + SLOT.offset("reasons"))
    os.pwrite(file, struct.pack("<Q", 192), second + SLOT.offset("threads"))
    os.ftruncate(file, CONTROL.size + SLOTS * SLOT.size)
    slots, unnamed = protocol.read_control(file)
    assert unnamed == 3
    assert slots == [
        protocol.Counters(),
        protocol.Counters(10, 6, 192, {"sampled out": 1, "filtered": 3}),
    ]
    os.close(file)


def test_counts_of_the_whole_process() -> None:
    file = os.memfd_create("control")
    assert protocol.read_control(file) == ([], 0) and not protocol.was_cut(file)  # too short
    names = [
        "hooks",
        "hooks_timed",
        "hooks_ticks_ns",
        "hooks_rest",
        "hooks_long",
        "hooks_long_ns",
        "hooks_rare_ns",
    ]
    names += ["graphs", "graphs_before", "started_ns", "ended_ns", "cupti_given", "cupti_reported", "grids"]
    names += ["calls_unknown", "calls_elsewhere"]
    for number, name in enumerate(names):
        os.pwrite(file, struct.pack("<Q", 1 << number), CONTROL.offset(name))
    os.pwrite(file, struct.pack("<I", 1), CONTROL.offset("cut"))
    os.ftruncate(file, CONTROL.size)
    assert protocol.hook_calls(file) == protocol.HookCalls(1 + 8, 2, 4, 16, 32, 64)
    assert (protocol.graph_launches(file), protocol.graph_launches_before(file)) == (128, 256)
    assert protocol.virtual_times(file) == (512, 1024) and protocol.was_cut(file)
    assert protocol.cupti_operations(file) == (2048, 4096)
    assert protocol.lost_calls(file) == protocol.LostCalls(1 << 14, 1 << 15)
    os.close(file)

"""What a traced process sends is untrusted: anything but an agent's messages is refused, and nothing else happens."""

from __future__ import annotations

import contextlib
import os
import random
import struct

import pytest

from gpubpf.agent import protocol
from gpubpf.agent.protocol import Malformed

SNAPSHOT = struct.pack("<IIIIQ", 7, 1, 0, protocol.RUNNING, 4096) + struct.pack(
    "<I I3I3IQ I IQQQ I IQQ", 1, 5, 2, 1, 1, 32, 1, 1, 23, 1, 0, 256, 520, 64, 1, 3, 1024, 64
)


def test_snapshot() -> None:
    found = protocol.snapshot(SNAPSHOT)
    assert (found.sequence, found.context, found.flags, found.size) == (7, 1, protocol.RUNNING, 4096)
    (instance,) = found.instances
    assert (instance.slot, instance.grid, instance.block_dim, instance.launches) == (
        5,
        (2, 1, 1),
        (32, 1, 1),
        23,
    )
    assert instance.arrays == (protocol.ArrayPart(0, 256, 520, 64),)
    assert found.shared == {3: (1024, 64)}


def test_parts_beyond_the_memory_are_refused() -> None:
    smaller = SNAPSHOT[:16] + struct.pack("<Q", 700) + SNAPSHOT[24:]
    with pytest.raises(Malformed, match="a map beyond its memory"):
        protocol.snapshot(smaller)
    wrapped = SNAPSHOT.replace(struct.pack("<QQ", 256, 520), struct.pack("<QQ", 2**64 - 8, 520))
    with pytest.raises(Malformed, match="a map beyond its memory"):
        protocol.snapshot(wrapped)


@pytest.mark.parametrize(
    "decode",
    [
        protocol.hello,
        protocol.hooked,
        protocol.image,
        protocol.slot_and_text,
        protocol.snapshot,
        protocol.drained,
    ],
)
def test_damaged_messages_are_malformed_and_nothing_else(decode: object) -> None:
    random.seed(1)
    for _ in range(3000):
        data = bytearray(SNAPSHOT if random.random() < 0.7 else random.randbytes(random.randrange(64)))
        for _ in range(random.randrange(4)):
            if data:
                data[random.randrange(len(data))] = random.randrange(256)
        with contextlib.suppress(Malformed):
            decode(bytes(data[: random.randrange(len(data) + 1)]))  # type: ignore[operator]


def test_frames_come_in_any_pieces() -> None:
    stream = protocol.frame(protocol.NAME, b"abc") + protocol.frame(protocol.DRAINED, b"") * 2
    for step in (1, 3, 8, len(stream)):
        frames = protocol.Frames()
        found = [f for at in range(0, len(stream), step) for f in frames.feed(stream[at : at + step], [])]
        assert [(kind, payload) for kind, payload, _ in found] == [
            (protocol.NAME, b"abc"),
            (protocol.DRAINED, b""),
            (protocol.DRAINED, b""),
        ]


def test_files_go_with_their_frames_and_too_many_are_refused() -> None:
    frames = protocol.Frames()
    first, second = os.memfd_create("a"), os.memfd_create("b")
    stream = (
        protocol.frame(protocol.HELLO, b"")
        + protocol.frame(protocol.NAME, b"")
        + protocol.frame(protocol.IMAGE, b"")
    )
    found = frames.feed(stream, [first, second])
    assert [file for _, _, file in found] == [first, None, second]
    with pytest.raises(Malformed, match="files that belong to nothing"):
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


def test_control_block() -> None:
    file = os.memfd_create("control")
    os.pwrite(file, struct.pack("<I4xQ", 2, 3), 0)
    os.pwrite(file, struct.pack("<4Q", 10, 6, 1, 3), 64 + 256)
    os.ftruncate(file, protocol.CONTROL_SIZE)
    slots, unnamed = protocol.read_control(file)
    assert unnamed == 3
    assert slots == [
        protocol.Counters(),
        protocol.Counters(10, 6, {"sampled out": 1, "filtered": 3}),
    ]
    os.close(file)

"""Where members of the kernel's structures lie: of made-up type information, and the running kernel's."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from gpubpf.errors import Error
from gpubpf.linux import btf
from gpubpf.linux.btf import Member

INT, STRUCT, FORWARD = 1, 4, 7
STRINGS = b"\0task\0pid\0asleep\0other\0"
TASK, PID, ASLEEP, OTHER = (
    STRINGS.index(b"\0" + word + b"\0") + 1 for word in (b"task", b"pid", b"asleep", b"other")
)


def made(types: bytes, strings: bytes = STRINGS) -> bytes:
    return (
        struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(strings)) + types + strings
    )


TYPES = b"".join(
    (
        struct.pack("<III", TASK, FORWARD << 24, 0),
        struct.pack("<IIII", OTHER, INT << 24, 4, 32),
        struct.pack("<III", OTHER, STRUCT << 24 | 1, 16) + struct.pack("<III", TASK, 2, 0),
        # A structure with bit fields: offsets have their bits in the highest byte.
        struct.pack("<III", TASK, 1 << 31 | STRUCT << 24 | 2, 16)
        + struct.pack("<III", PID, 2, 64)
        + struct.pack("<III", ASLEEP, 2, 1 << 24 | 35),
    )
)


def test_members_of_a_structure() -> None:
    data = made(TYPES)
    assert btf.member("task", "pid", data) == Member(8)
    assert btf.member("task", "asleep", data) == Member(4, 3, 1)
    flexible = TYPES.replace(struct.pack("<III", PID, 2, 64), struct.pack("<III", PID, 2, 128))
    assert btf.member("task", "pid", made(flexible)) == Member(
        16
    )  # an array that begins where the structure ends


@pytest.mark.parametrize(
    "structure,name,data",
    [
        ("task", "other", made(TYPES)),
        ("task", "unheard", made(TYPES)),
        ("unheard", "pid", made(TYPES)),
        ("task", "pid", made(TYPES[:-24])),  # its members are cut off
        ("task", "pid", made(TYPES)[:-40]),
        ("task", "pid", b"\0\0" + made(TYPES)[2:]),
        ("task", "pid", b"no type information"),
        ("task", "pid", b""),
    ],
)
def test_what_is_not_there_is_said(structure: str, name: str, data: bytes) -> None:
    with pytest.raises(Error, match=f"type information has no {structure}.{name}; "):
        btf.member(structure, name, data)


@pytest.mark.skipif(not btf._FILE.exists(), reason="this kernel has no type information")
@pytest.mark.skipif(shutil.which("bpftool") is None, reason="needs bpftool")
def test_as_bpftool_has_them(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bpftool", "btf", "dump", "file", str(btf._FILE)], check=True, stdout=subprocess.PIPE, text=True
    )
    inside = False
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("["):
            inside = " STRUCT 'task_struct' " in line
        elif inside and line.split()[0] in ("'in_iowait'", "'pid'", "'comm'"):
            words = dict(word.split("=") for word in line.split()[1:])
            found[line.split()[0].strip("'")] = int(words["bits_offset"]), int(words.get("bitfield_size", 0))
    assert len(found) == 3
    for name, (bits, size) in found.items():
        assert btf.member("task_struct", name) == Member(bits // 8, bits % 8, size)

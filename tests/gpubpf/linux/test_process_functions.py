"""Programs at functions of one process, named as users name them: C++, versions, functions that are chosen at run time."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpubpf.ebpf import compile
from gpubpf.linux import process_functions, x86_code
from gpubpf.linux.host_programs import Host
from gpubpf.linux.process_functions import FunctionProbe
from gpubpf_host import needs_bpf

HERE = Path(__file__).with_name("functions")
TEXT = r"""
#include <uapi/linux/ptrace.h>
BPF_ARRAY(counts, u64, 64);
""" + "".join(
    f"int count_{n}(struct pt_regs *ctx) {{ int n = {n}; u64 *c = counts.lookup(&n);"
    " if (c) __sync_fetch_and_add(c, 1); return 0; }\n"
    for n in range(20)
)
# What users write, at returns or not, and how many calls there are.
PROBES = [
    ("libc.so.6", "memcpy", False, 1000),
    ("libnamed.so", "versioned", False, 3),
    ("libnamed.so", "versioned@LIB_1", False, 5),
    ("libnamed.so", "versioned@@LIB_2", False, 3),
    ("libnamed.so", "chosen", False, 7),
    ("libnamed.so", "chosen", True, 7),
    ("libnamed.so", "ns::f", False, 24),
    ("libnamed.so", "ns::f(int)", False, 11),
    ("libnamed.so", "ns::f(double)", True, 13),
    ("libnamed.so", "ns::g", False, 36),
    ("libnamed.so", "int ns::g<int>(int)", False, 17),
    ("libnamed.so", "ns::g<long>(long)", True, 19),
    ("libnamed.so", "ns::A::operator+", False, 23),
    ("libnamed.so", "other", True, 32),  # three of them by ns::throws
    ("libnamed.so", "ns::throws", False, 5),
    ("libnamed.so", "ns::throws", True, 3),  # two calls are left by an exception
    ("PROGRAM", "main", True, 0),
]
ABSENT = {
    "versioned@LIB_3": "has function versioned only in versions LIB_1, LIB_2 (the default) in libnamed.so",
    "ns::f(char)": "has no function ns::f(char) in libnamed.so",
    "nothing": "has no function nothing in libnamed.so",
}

pytestmark = needs_bpf


@pytest.fixture(scope="module", params=["lazy", "now"])
def process(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """The program, whose linker binds functions before the first call of each, or all at once."""
    place = tmp_path_factory.mktemp("functions")
    shared = ["-O1", "-shared", "-fPIC", f"-Wl,--version-script={HERE}/library.map"]
    library, program = place / "libnamed.so", place / "calls"
    subprocess.run(["g++", *shared, "-o", library, HERE / "library.cpp"], check=True)
    linked = ["-O1", f"-Wl,-z,{request.param}", "-fno-stack-protector", "-o", program, HERE / "calls.cpp"]
    subprocess.run(["g++", *linked, f"-L{place}", "-lnamed", f"-Wl,-rpath,{place}"], check=True)
    running = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert running.stdout is not None and running.stdout.readline() == "ready\n"
    yield program, running
    running.communicate()


def test_every_way_to_name_a_function(process: tuple[Path, subprocess.Popen[str]]) -> None:
    program, running = process
    paths = [str(program) if path == "PROGRAM" else path for path, *_ in PROBES]
    own = [
        FunctionProbe(f"count_{n}", path, symbol, at_return)
        for n, (path, (_, symbol, at_return, _)) in enumerate(zip(paths, PROBES, strict=True))
    ]
    notes: list[str] = []
    with Host(compile.compile_text(TEXT), (), own=own, note=notes.append) as host:
        host.process().attach_functions(running.pid)
        assert running.stdin is not None and running.stdout is not None
        running.stdin.write("go\n")
        assert running.stdout.readline() == "2\n"
        found = host.items("counts")["value"].tolist()[: len(PROBES)]
    assert not notes
    assert found[0] in (1000, 1001)  # the C library may copy the line
    assert found[1:] == [count for *_, count in PROBES[1:]]


@pytest.mark.parametrize("name", ABSENT)
def test_what_is_not_there_is_said(process: tuple[Path, subprocess.Popen[str]], name: str) -> None:
    with process_functions.found(process[1].pid, FunctionProbe("f", "libnamed.so", name)) as places:
        assert places == ABSENT[name]


def test_an_offset_needs_one_function(process: tuple[Path, subprocess.Popen[str]]) -> None:
    for symbol, wanted in {"ns::f": "name one of ns::f(int), ns::f(double)", "chosen": "at run time"}.items():
        probe = FunctionProbe("f", "libnamed.so", symbol, offset=1)
        with process_functions.found(process[1].pid, probe) as places:
            assert isinstance(places, str) and wanted in places


def test_an_object_cannot_make_the_tool_open_a_device(tmp_path: Path) -> None:
    """Opening some devices has effects: a watchdog restarts the machine."""
    os.mkfifo(tmp_path / "fifo")
    for path in ("/dev/null", str(tmp_path / "fifo")):
        said = process_functions.lacking(path, "main", 0)
        assert said == f"{path} cannot be read (not a regular file)"


VECTORED = """
asm(".globl vectored\\n.type vectored, @function\\n"
    "vectored: vpor %xmm0, %xmm0, %xmm0\\nmov %edi, %eax\\nret\\n.size vectored, . - vectored");
"""


def test_a_vector_instruction_that_linux_takes_for_a_jump_gets_no_probe(tmp_path: Path) -> None:
    """The kernel would emulate the jump, so the program would go elsewhere."""
    library = tmp_path / "libvector.so"
    subprocess.run(["gcc", "-shared", "-x", "c", "-", "-o", library], input=VECTORED, text=True, check=True)
    loaded = ctypes.CDLL(str(library))  # not called: the processor may have no such instruction
    with process_functions.found(os.getpid(), FunctionProbe("f", "libvector.so", "vectored")) as places:
        assert places == (
            "cannot have a probe at vectored of libvector.so: its first instruction is a vector instruction that Linux takes for a"
            " jump"
        )
    with process_functions.found(
        os.getpid(), FunctionProbe("f", "libvector.so", "vectored", offset=4)
    ) as places:
        assert not isinstance(places, str)
    del loaded


@pytest.mark.parametrize(
    ("code", "misread"),
    [
        ("62 e2 7d 48 7a c6", True),  # vpbroadcastb, jp
        ("c4 e2 79 78 c0", True),  # vpbroadcastb, js
        ("c5 f9 eb c0", True),  # vpor, jmp
        ("c5 f8 c2 c1 00", True),  # vcmpps, ret
        ("c5 f8 77", True),  # vzeroupper, ja
        ("c5 f9 ef c0", False),  # vpxor
        ("f3 0f 1e fa", False),  # endbr64
        ("0f 70 c0 00", False),  # pshufw: two bytes of opcode
        ("55", False),
        ("eb 00", False),  # a jump
    ],
)
def test_which_instructions_linux_misreads(code: str, misread: bool) -> None:
    assert x86_code.is_misread_by_linux(bytes.fromhex(code)) is misread

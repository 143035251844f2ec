"""A program leaves hooked functions of the driver by exceptions, longjmp and cancelled threads, as it does without the agent."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpubpf import agent
from gpubpf.traced.measurement import Follow

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "session")]

import fake_tool  # noqa: E402

LEAVE = HERE.parents[1] / "tools" / "unwinding" / "leave.cpp"
SOURCES = Path(agent.__file__).parent / "src"
WAYS = ("throw", "jump", "cancel", "exit", "throw")


def hooked() -> list[str]:
    """Return the functions of the driver that the agent hooks."""
    found: list[str] = []
    for table in sorted(SOURCES.glob("hooks*.def")):
        found += re.findall(r"^GPUBPF_HOOK\((cu\w+)\)", table.read_text(), re.M)
    return sorted(set(found))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    """Build the fake driver, with each hooked function behind a callback, and the program."""
    place = tmp_path_factory.mktemp("left")
    object_file, names = place / "fake.o", hooked()
    flags = ["-O1", "-fPIC", "-fexceptions", "-w", "-fcf-protection=branch", "-fno-optimize-sibling-calls"]
    subprocess.run(
        ["gcc", *flags, "-isystem", fake_tool.cuda_include(), "-c", "-o", object_file, HERE / "fakecuda.c"],
        check=True,
    )
    renamed = [f"--redefine-sym={name}=real_{name}" for name in names]
    subprocess.run(["objcopy", *renamed, object_file], check=True)
    words = ", ".join(f"long a{i}" for i in range(12))
    passed = ", ".join(f"a{i}" for i in range(12))
    text = ["void (*act)(int);"]
    for i, name in enumerate(names):
        text += [f"__attribute__((weak)) long real_{name}({words});"]
        text += [
            f"long {name}({words}) {{ if (act) act({i}); return real_{name} ? real_{name}({passed}) : 0; }}"
        ]
    text += ["void *functions[] = {" + ", ".join(f"(void *){n}" for n in names) + "};"]
    text += [f"int count = {len(names)};"]
    (place / "hooked.c").write_text("\n".join(text))
    library, program = place / "libcuda.so.1", place / "leave"
    linked = ["-shared", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic", "-o", library]
    subprocess.run(["gcc", *flags, *linked, place / "hooked.c", object_file, "-ldl", "-lpthread"], check=True)
    subprocess.run(["g++", "-O1", "-g", "-pthread", "-o", program, LEAVE, "-ldl"], check=True)
    return program, library, len(names)


@pytest.mark.parametrize(
    "options", [{}, {"follow": Follow(log_records=1 << 12, stacks=True, allocation_stacks=True)}]
)
def test_every_hooked_function(
    built: tuple[Path, Path, int], options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    program, library, count = built
    command = [str(program), str(library), *WAYS]
    wanted = "".join(f"{way}: {count} of {count}\n" for way in WAYS)
    assert subprocess.run(command, capture_output=True, text=True).stdout == wanted
    said: list[str] = []
    with fake_tool.session(command, note=said.append, complain=said.append, **options) as session:
        for _ in session.intervals():
            pass
    assert capfd.readouterr().out == wanted, said
    assert said == ["no kernel matches 'vectorAdd'; kernels seen: none"]

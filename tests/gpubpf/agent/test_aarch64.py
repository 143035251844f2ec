"""The agent's hooks on aarch64: its decoder compared with objdump, and programs that run in an emulator (qemu-user).

The emulator runs each instruction as the architecture defines it, but its memory order is stronger than that of real processors, and
it has no instruction cache that code could be stale in.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from gpubpf_drivers import driver
from gpubpf_machine import (
    CROSS,
    INCLUDES,
    SOURCES,
    built_for_aarch64,
    needs_aarch64,
    patching_sources,
    run_for_aarch64,
)

HERE = Path(__file__).parent
BASE = 1 << 40  # where objdump puts the instructions, so that no address is negative
LONG = os.environ.get("GPUBPF_LOOKS") == "all"

pytestmark = needs_aarch64

BRANCHES = {"b": "jump", "bl": "call", "cbz": "branch", "cbnz": "branch", "tbz": "branch", "tbnz": "branch"}
ENDS = re.compile(r"(ret|br|eret)(a[ab]z?)?|drps")
EXCEPTIONS = {"svc": "svc", "brk": "break", "hlt": "break"}
# objdump knows these, but the decoder refuses them: they are not in programs, or change more than the decoder has to know.
REFUSED = re.compile(r"hvc|smc|dcps[123]|drps|tstart|tcommit|ttest|tcancel|wfet|wfit")


def expected(place: int, word: str, operands: str) -> str:
    """Return what the decoder has to find in the instruction at `place`, by objdump's text."""
    target = int(match[1], 16) if (match := re.search(r"0x([0-9a-f]+)(?: *<.*>)?$", operands)) else 0
    distance = f" {target - place}"
    if kind := BRANCHES.get(word):
        return kind + distance
    if re.fullmatch(r"bc?\.\w+", word):
        return "branch" + distance
    if word == "adrp":
        return f"address {target - (place & ~4095)}"
    if word == "adr" and not operands.startswith("z"):  # that of vectors has no address
        return "address" + distance
    if word in ("ldr", "ldrsw", "prfm") and "[" not in operands:
        vector = re.match(r"[sdq]\d", operands)
        return ("prefetch" if word == "prfm" else "vector" if vector else "load") + distance
    if re.fullmatch(r"blra?[ab]?z?", word):
        return "call"
    if ENDS.fullmatch(word) or word == "udf":
        return "end"
    return EXCEPTIONS.get(word, "plain")


def words() -> bytes:
    """Return random instructions, more of them of the kinds that depend on their address: 10^6 with GPUBPF_LOOKS=all."""
    numbers = random.Random(81)
    made = []
    for index in range(1_000_000 if LONG else 30_000):
        code = numbers.getrandbits(32)
        if index % 3 == 0:
            code = code & 0xE3FFFFFF | 0x14000000  # branches, exceptions, hints
        elif index % 3 == 1:
            code = code & 0x60FFFFFF | numbers.choice((0x10000000, 0x90000000, 0x18000000, 0x58000000))
        made.append(code)
    return struct.pack(f"<{len(made)}I", *made)


def test_instructions(tmp_path: Path) -> None:
    program, code = tmp_path / "decode", tmp_path / "code"
    compiler = [shutil.which("g++") or "c++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", *INCLUDES]
    decoder = SOURCES / "machine" / "aarch64" / "instruction.cpp"
    subprocess.run([*compiler, "-o", program, HERE / "decode_aarch64.cpp", decoder], check=True)
    code.write_bytes(words())
    with open(code, "rb") as file:
        found = subprocess.run(
            [program], stdin=file, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    command = [f"{CROSS}objdump", "-D", "-z", "-b", "binary", "-m", "aarch64", "-M", "no-aliases"]
    command += [f"--adjust-vma={BASE:#x}", str(code)]
    lines = subprocess.check_output(command, text=True).splitlines()
    wrong, known, refused = [], 0, 0
    for line in lines:
        parts = line.split("\t")
        if len(parts) < 3:
            continue
        place, word = int(parts[0].strip(" :"), 16), parts[2].strip()
        if word.startswith(".") or REFUSED.fullmatch(word):
            continue  # no instruction that objdump knows
        known += 1
        operands = parts[3].partition("//")[0].strip() if len(parts) > 3 else ""
        answer = found[(place - BASE) // 4]
        refused += answer == "unknown"
        if answer not in ("unknown", expected(place, word, operands)):
            wrong.append((parts[1].strip(), word, operands, answer))
    assert wrong[:20] == []
    assert known > len(found) / 2 > 10_000
    assert refused < known / 100


def test_moved_and_undone_instructions_have_the_same_effect(tmp_path: Path) -> None:
    program = built_for_aarch64(
        tmp_path / "moved", HERE / "moved_aarch64.cpp", *patching_sources("aarch64")[-2:]
    )
    done = run_for_aarch64([program, "1000000" if LONG else "5000"])
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_functions_of_many_shapes_can_be_hooked(tmp_path: Path) -> None:
    sources = [HERE / "hook_shapes_aarch64.cpp", *patching_sources("aarch64")]
    done = run_for_aarch64([built_for_aarch64(tmp_path / "shapes", *sources)])
    assert (done.returncode, done.stdout, done.stderr) == (0, "hooked\n", "")


@pytest.mark.long
def test_hooks_are_taken_out_under_load_and_put_in_again(tmp_path: Path) -> None:
    sources = [HERE / "hooks_again.cpp", *patching_sources("aarch64")]
    done = run_for_aarch64([built_for_aarch64(tmp_path / "again", *sources, "-pthread")])
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.mark.long
def test_each_function_of_a_real_driver_can_be_hooked(tmp_path: Path) -> None:
    library = driver("535", "arm64")
    sources = patching_sources("aarch64")
    names = subprocess.check_output([f"{CROSS}nm", "-D", "--defined-only", library], text=True).splitlines()
    functions = [name.partition("@")[0] for _, kind, name in map(str.split, names) if kind in "TW"]
    exports = built_for_aarch64(tmp_path / "exports", HERE / "hook_exports.cpp", *sources, "-ldl")
    done = run_for_aarch64([exports, library], input="\n".join(functions))
    assert done.stdout == f"{len(functions)} of {len(functions)} hooked\n"
    assert done.returncode == 0 and len(functions) > 500
    # Those of the agent's table, which are also called.
    done = run_for_aarch64(
        [built_for_aarch64(tmp_path / "driver", HERE / "hook_driver.cpp", *sources, "-ldl"), library]
    )
    assert done.returncode == 0 and re.match(r"\d\d\d functions hooked, \d+ answers", done.stdout), (
        done.stdout
    )


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc (script/setup)")
def test_a_tool_with_the_agent_and_the_device_for_aarch64() -> None:
    root = HERE.parents[2]
    environment = {**os.environ, "PYTHON": sys.executable}
    for command, expected_lines in (
        (
            ["threadhist", "--work", "stores"],
            ["thread 4 did 25 % less", r"0-3 +23 +92 ", r"4 +23 +69 ", "23 of 23 matching"],
        ),
        (["gpuprofile"], [r"100.0 % .* 23  vectorAdd  main", "23 of 23 matching"]),
    ):
        done = subprocess.run(
            [root / "script" / "aarch64", *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=1500,
        )
        assert done.returncode == 0, done.stderr
        assert all(re.search(line, done.stdout + done.stderr) for line in expected_lines), (
            done.stdout + done.stderr
        )

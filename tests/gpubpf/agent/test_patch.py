"""The agent's inline hooks, and its decoder compared with objdump. test_real_driver.py hooks real drivers."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from gpubpf_machine import INCLUDES, patching_sources

HERE = Path(__file__).parent


def built(name: str, place: Path, *libraries: str) -> Path:
    """Build a test program with the agent's decoder and hooks; return its path."""
    program = place / name
    compiler = [shutil.which("g++") or "c++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(
        [
            *compiler,
            *INCLUDES,
            "-o",
            program,
            HERE / f"{name}.cpp",
            *patching_sources(),
            *libraries,
        ],
        check=True,
    )
    return program


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("patch")


def library_path(name: str) -> str:
    found = subprocess.check_output([shutil.which("gcc") or "cc", f"-print-file-name={name}"], text=True)
    return str(Path(found.strip()).resolve())


def instructions(library: str) -> dict[str, str]:
    """Of a library's functions: bytes in hexadecimal → text."""
    command = ["objdump", "-d", "-w", "-j", ".text", library]
    lines = (line.split("\t") for line in subprocess.check_output(command, text=True).splitlines())
    return {
        parts[1].replace(" ", ""): parts[2] for parts in lines if len(parts) > 2 and "(bad)" not in parts[2]
    }


PREFIX = re.compile(r"addr32|bnd|[c-gs]s|data16|lock|notrack|rep\w*|rex[.\w]*|xacquire|xrelease")


def expected(code: str, text: str) -> str:
    """Return what the decoder has to find in an instruction, by objdump's text."""
    text = text.split("#")[0]
    word = next((w for w in text.split() if not PREFIX.fullmatch(w.split(",")[0])), "")
    indirect = " *" in text
    kind, operand = "plain", "rip" if "(%rip)" in text else "-"
    if word in ("call", "lcall"):
        kind = "call"
    elif word in ("ret", "ud2") or (word in ("jmp", "ljmp") and indirect):
        kind = "end"
    elif word in ("jrcxz", "loop"):
        kind = "immovable"
    elif word.startswith("j"):
        kind = "jump" if word == "jmp" else "branch"
    if not indirect and kind in ("call", "jump", "branch"):
        operand = "relative"
    return f"{len(code) // 2} {kind} {operand}"


@pytest.fixture(scope="module")
def decoder(place: Path) -> Path:
    return built("decode_instructions", place)


def decoded(program: Path, codes: Iterable[str]) -> list[str]:
    answer = subprocess.run(
        [program], input="\n".join(codes) + "\n", capture_output=True, text=True, check=True
    )
    return answer.stdout.splitlines()


@pytest.mark.every(2)
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs binutils")
@pytest.mark.parametrize("library", ["libstdc++.so.6", "libc.so.6"])
def test_instructions(decoder: Path, library: str) -> None:
    codes = instructions(library_path(library))
    found = decoded(decoder, codes)
    assert len(found) == len(codes) > 10_000
    wrong = {
        code: (text, answer)
        for (code, text), answer in zip(codes.items(), found, strict=True)
        if answer not in ("unknown", expected(code, text))
    }
    assert not wrong
    assert found.count("unknown") < len(codes) / 2000  # what is not known is refused, not guessed


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("66480511223344", "7 plain -"),  # add $0x44332211,%rax: REX.W cancels prefix 66
        ("664c69c011223344", "8 plain -"),  # imul
        ("66051122", "4 plain -"),  # add $0x2211,%ax
        ("666648e800000000", "8 call relative"),  # as before __tls_get_addr
        ("67e800000000", "6 call relative"),
        ("678d51ff", "4 plain -"),  # lea -1(%ecx),%edx
        ("41ffd4", "3 call -"),  # call *%r12
        ("ff1500000000", "6 call rip"),
        ("41ffe3", "3 end -"),  # jmp *%r11
        ("62f17fc96f0f", "6 plain -"),  # vmovdqu8 (%rdi),%zmm1{%k1}{z}
        ("62717c481005d2000400", "10 plain rip"),  # vmovups 0x400d2(%rip),%zmm8
        ("62f37d483f0d1122334400", "11 plain rip"),  # vpcmpb $0, with an immediate behind the displacement
        ("6666666666662e0f1f840000000000", "15 plain -"),  # the longest nop
        ("e300", "2 immovable -"),
        ("8fe878c2ec0e", "unknown"),  # vprotd, an XOP instruction: no pop
        ("c7f800000000", "unknown"),  # xbegin: its distance is not that of a jump
        ("c6f800", "unknown"),  # xabort
        ("66e90000", "unknown"),  # AMD's processors take 16 bits, Intel's take 32
        ("660f840000", "unknown"),
        ("67488b0500000000", "unknown"),  # relative to eip
        ("c5e8840000", "unknown"),  # no branch with a VEX prefix
        ("66c5f877", "unknown"),  # no prefix before VEX
        ("48c5f877", "unknown"),
        ("62f27fc96f0f", "6 plain -"),
        ("62f97fc96f0f", "unknown"),  # a reserved bit of EVEX
        ("ffff", "unknown"),
        ("6666666666666666666666666690", "unknown"),  # more prefixes than any assembler writes
    ],
)
def test_instructions_that_are_rare(decoder: Path, code: str, answer: str) -> None:
    assert decoded(decoder, [code]) == [answer]


def test_functions_of_many_shapes_can_be_hooked(place: Path) -> None:
    subprocess.run([built("hook_shapes", place)], check=True, timeout=60)


@pytest.mark.long
def test_hooks_are_taken_out_under_load_and_put_in_again(place: Path) -> None:
    subprocess.run([built("hooks_again", place, "-pthread")], check=True, timeout=60)

"""`lower.patch_function`: the tools' own programs as patches for the Compute Sanitizer API, and what ptxas makes of them."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpubpf.ebpf
from gpubpf.elf import of_bytes
from gpubpf.errors import Error
from gpubpf.images.yields import without_yields
from gpubpf.lower import patch_function
from gpubpf.lower.fragment import Argument, Fragment
from gpubpf.lower.launch_block import LaunchBlock, launch_block
from gpubpf.lower.patch_function import SIGNATURES, Patch, PatchProgram, patch_module, refusal
from gpubpf.ptx.parser import parse
from gpubpf_sass import assembled, sass

TABLE = 0x7F55_0066_7700
CAPABILITIES = ((8, 0), (9, 0), (10, 0), (12, 0))
TOOLS = ("threadhist", "kernelretsnoop", "launchlate", "memtrace", "access_trace")
SPACES = {"shared": 4, "local": 5}
MOST_STACK = 256  # bytes
MOST_REGISTER = 21  # ptxas uses no other for patches


def programs() -> Iterator[tuple[str, str, Fragment]]:
    """Yield (tool's function, point, fragment) of each program that runs in every block, at every execution."""
    for tool in TOOLS:
        kept = json.loads((Path(gpubpf.ebpf.__path__[0]) / "prebuilt" / f"{tool}.json").read_text())
        for name, fragment in kept["fragments"].items():
            point = kept["program"]["functions"][name]["point"]
            if "sampled" not in name and "kept" not in name and point != "access_again":
                yield f"{tool}.{name}", point, Fragment.from_json(fragment)


def instruction(name: str, point: str) -> int:
    for space, number in SPACES.items():
        if space in name:
            return number
    return next(number for number, signature in SIGNATURES.items() if signature.point == point)


def patches() -> list[Patch]:
    return [
        Patch(instruction(name, point), f"gpubpf_program{number}", (PatchProgram(fragment),))
        for number, (name, point, fragment) in enumerate(programs())
    ]


def copies() -> list[Patch]:
    """Return patches at the instructions with other accesses, each with memtrace's program for each access."""
    of = {name: fragment for name, _, fragment in programs()}
    by_space = {"global": "on_copied", "shared": "on_shared", "tensor": "on_unaddressed"}
    found = [
        (
            number,
            tuple(
                PatchProgram(of[f"memtrace.{by_space[a.space]}"], access=k)
                for k, a in enumerate(one.accesses)
            ),
        )
        for number, one in SIGNATURES.items()
        if one.accesses and number not in (patch_function.GLOBAL_ACCESS, *SPACES.values())
    ]
    return [Patch(number, f"gpubpf_program{900 + number}", made) for number, made in found]


def block_of(made: list[Patch]) -> LaunchBlock:
    return launch_block([program.fragment for patch in made for program in patch.programs])


def test_every_program_becomes_a_function() -> None:
    made = patches()
    assert len(made) > 40
    text = patch_module(made, block_of(made), TABLE, (9, 0))
    functions = parse(text).functions
    assert list(functions) == [patch.name for patch in made]
    assert "ld.param.b64 %gpubpf_0pc, [pc];" in text
    assert text.count("st.param.b32 [result], 0;") == len(made)  # another result would end the warp


@pytest.mark.every(4)
@pytest.mark.parametrize("cc", CAPABILITIES)
def test_what_ptxas_makes_of_them(cc: tuple[int, int], tmp_path: Path) -> None:
    """No patch has a barrier, YIELD or uniform register, or a register that ptxas does not use for patches."""
    made = [*patches(), *copies()]
    text = patch_module(made, block_of(made), TABLE, cc, counts_elsewhere=True)
    cubin, report = assembled(text, f"sm_{cc[0]}{cc[1]}", tmp_path, "--compile-as-tools-patch")
    assert {int(size) for size in re.findall(r"(\d+) bytes stack frame", report)} <= set(
        range(MOST_STACK + 1)
    )
    clean = without_yields(cubin.read_bytes())
    if cc >= (9, 0):  # older ones call what ptxas adds for atomics of a part of a warp
        relocated = [section.name for section in of_bytes(clean).sections if ".text" in section.name]
        assert not [name for name in relocated if name.startswith((".rel", ".nv.rel"))]
    cubin.write_bytes(clean)
    for name, code in sass(cubin).items():
        words = " ; ".join(code)
        assert not re.search(r"\b(BAR|YIELD|UR\d+|UP\d)\b", words), name
        assert max(int(number) for number in re.findall(r"\bR(\d+)\b", words)) <= MOST_REGISTER, name


def test_each_access_of_a_copy_has_its_own_address_and_size() -> None:
    fields = [Argument(name, "b64", "context", field=name) for name in ("address", "width", "space")]
    both = tuple(PatchProgram(Fragment("f", "{ }", tuple(fields)), access=k) for k in (0, 1))
    made = [Patch(patch_function.COPY, "gpubpf_program0", both)]
    text = patch_module(made, launch_block([]), TABLE, (9, 0))
    assert "(.param .b64 data, .param .b64 pc, .param .b64 source, .param .b32 to, .param .b32 size)" in text
    source, to = text.split("$gpubpf_skip0:")
    assert "mov.b64 %gpubpf_address, %gpubpf_0source;" in source
    assert "cvt.u64.u32 %gpubpf_address, %gpubpf_0to;" in to
    assert "mov.b32 %gpubpf_0effect, 1;" in source and "mov.b32 %gpubpf_0effect, 2;" in to


def test_the_number_of_the_launch() -> None:
    """It comes from the data of the launch, and only in modules with programs that read it. Each thread counts itself as it begins."""
    of = {f"{tool}": fragment for tool, _, fragment in programs()}
    reads, not_ = of["launchlate.on_entry"], of["threadhist.on_exit"]
    enter = Patch(patch_function.BLOCK_ENTER, "gpubpf_program0", (PatchProgram(reads),))
    leave = Patch(patch_function.BLOCK_EXIT, "gpubpf_program1", (PatchProgram(not_),))
    block = block_of([enter, leave])
    both, alone = (patch_module(made, block, TABLE, (9, 0)) for made in ([enter, leave], [leave]))
    assert both.count("ld.param.b64 %gpubpf_0data, [data];") == 2 and "[data]" not in alone
    assert both.count("atom.global.add.u32 %gpubpf_0begun") == both.count("ld.relaxed.gpu.global.u32") == 1


def test_programs_of_one_instruction_share_a_function() -> None:
    """The API calls one function at an instruction. Programs are skipped at accesses of other kinds."""
    at_access = [patch for patch in patches() if patch.instruction == patch_function.GLOBAL_ACCESS]
    one, other = (patch.programs[0].fragment for patch in at_access[:2])
    programs = (PatchProgram(one, ("load",)), PatchProgram(other, ("store", "atomic")), PatchProgram(one))
    made = [Patch(patch_function.GLOBAL_ACCESS, "gpubpf_program0", programs)]
    text = patch_module(made, block_of(made), TABLE, (9, 0))
    assert list(parse(text).functions) == ["gpubpf_program0"]
    assert text.count(one.ptx.strip()) == 2 and text.count(other.ptx.strip()) == 1
    assert [f"mov.b32 %gpubpf_0bits, {mask};" in text for mask in (1, 6)] == [True, True]
    assert [f"bra $gpubpf_skip{number};" in text for number in range(3)] == [True, True, False]


def test_calls_elsewhere_are_counted_on_demand() -> None:
    made = patches()[:1]
    for counts in (False, True):
        text = patch_module(made, block_of(made), TABLE, (9, 0), counts)
        assert (f"mov.u64 %gpubpf_0at, {TABLE + 8};" in text) is counts
        assert f"mov.u64 %gpubpf_0at, {TABLE};" in text


def test_the_slot_is_that_of_the_ptx() -> None:
    """The agent finds a slot by the same function, and so does the PTX text."""
    granule = 0x7F00_1234_5680 >> patch_function.GRANULE_BITS
    product = granule * patch_function.HASH_FACTOR % (1 << 64)
    assert patch_function.slot_of(granule) == product >> 48
    (factor,) = struct.unpack("<q", struct.pack("<Q", patch_function.HASH_FACTOR))
    made = patches()[:1]
    text = patch_module(made, block_of(made), TABLE, (8, 6))
    assert f"mul.lo.u64 %gpubpf_0slot, %gpubpf_0granule, {factor};" in text
    assert text.startswith(".version 7.0\n.target sm_80\n")
    assert f"add.u64 %gpubpf_0at, %gpubpf_0at, {TABLE + patch_function.HEADER};" in text


def test_refusals() -> None:
    def fragment(field: str, ptx: str = "{ }") -> Fragment:
        return Fragment("f", ptx, (Argument("a", "b64", "context", field=field),))

    assert refusal(fragment("site"), "exit") is None
    assert refusal(fragment("site"), "branch") == "Compute Sanitizer has no patches at point branch"
    assert refusal(fragment("waited"), "barrier_leave") == (
        "Compute Sanitizer does not give waited at point barrier_leave"
    )
    assert "wait for another" in str(refusal(fragment("site", "{ ld.acquire.gpu.u64 %x, [%y]; }"), "exit"))
    patch = Patch(patch_function.BLOCK_ENTER, "gpubpf_program0", (PatchProgram(fragment("arg0")),))
    with pytest.raises(Error, match="does not give arg0 at point entry"):
        patch_module([patch], launch_block([]), TABLE, (9, 0))
    with pytest.raises(Error, match=r"compute capability 6\.1; leave out --sass"):
        patch_module([], launch_block([]), TABLE, (6, 1))

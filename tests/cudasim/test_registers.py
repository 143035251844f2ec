"""Registers per thread: read from the cubin beside the PTX, else estimated; a block that needs too many is refused."""

from __future__ import annotations

import random
import struct
import subprocess
from pathlib import Path

import pytest

from cudasim_device import PROGRAMS, nvcc, run_python
from gpubpf.images import fatbin

PTX_75, SM_75, SM_90 = (
    f"-gencode=arch=compute_{cc},code={kind}_{cc}" for cc, kind in ((75, "compute"), (75, "sm"), (90, "sm"))
)


def build(path: Path, *options: str) -> Path:
    command = [nvcc(), "-w", "-fatbin", *options, "-o", path, PROGRAMS / "registers.cu"]
    subprocess.run(list(map(str, command)), check=True)
    return path


def counts(path: Path, sm: int) -> dict[str, int]:
    """The registers of the kernels, as the cubin for an architecture says."""
    cubin = next(i for i in fatbin.images_of_file(path) if i.kind == "elf" and i.sm == sm)
    return {name: k.registers or 0 for name, k in fatbin.kernels(cubin.read()).items()}


# NUM_REGS, MAX_THREADS_PER_BLOCK, the statuses of launches with 1,024 and 256 threads, and the resident blocks of 1,024 and 256.
ASK = """
    cu = Driver()
    image = open(PATH, "rb").read()
    option, value = ctypes.c_int(0), ctypes.c_void_p(LIMIT)  # CU_JIT_MAX_REGISTERS
    module = cu.handle("cuModuleLoadDataEx", image, int(LIMIT > 0), ctypes.byref(option), ctypes.byref(value))
    where = cu.memory(400)
    for name in ("wide", "bounded"):
        kernel = cu.function(module, name)
        resident = [
            cu.number("cuOccupancyMaxActiveBlocksPerMultiprocessor", kernel, block, ctypes.c_size_t(0))
            for block in (1024, 256)
        ]
        statuses = [cu.launch_status(kernel, where, block=block) for block in (1024, 256)]
        print(*(cu.number("cuFuncGetAttribute", a, kernel) for a in (4, 0)), *statuses, *resident)
    cu.cuCtxSynchronize()
"""


def ask(path: Path, hostile: bool, limit: int = 0, cc: str = "9.0") -> list[list[int]]:
    code = f"    PATH, LIMIT = {str(path)!r}, {limit}\n" + ASK
    lines = run_python(code, hostile, CUDASIM_CC=cc).splitlines()
    return [list(map(int, line.split())) for line in lines]


def most_threads(registers: int, available: int = 65536) -> int:
    return min(1024, available // ((registers * 32 + 255) // 256 * 256) // 4 * 4 * 32)


def told(registers: int) -> list[int]:
    """What a driver tells about a kernel, by the rules of cuda_occupancy.h."""
    per_warp = (registers * 32 + 255) // 256 * 256
    fits = per_warp * 32 <= 65536
    return [
        registers,
        most_threads(registers),
        0 if fits else 701,
        0,
        65536 // per_warp // 32,
        16384 // per_warp * 4 // 8,
    ]


@pytest.mark.every(2)
@pytest.mark.parametrize("hostile", [False, True])
def test_registers_of_the_cubin(hostile: bool, tmp_path: Path) -> None:
    both = build(tmp_path / "both.fatbin", PTX_75, SM_75, SM_90)
    for cc, sm in (("9.0", 90), ("7.5", 75), ("12.0", 90)):  # the last one: the nearest cubin
        expected = counts(both, sm)
        assert expected["wide"] > 72 and expected["bounded"] == 64
        assert ask(both, hostile, cc=cc) == [told(expected[name]) for name in ("wide", "bounded")]
    limited = build(tmp_path / "limited.fatbin", PTX_75, SM_90, "-maxrregcount=40")
    assert counts(limited, 90)["wide"] == 40
    assert ask(limited, hostile)[0] == told(40)


def test_jit_options_limit_what_is_compiled(tmp_path: Path) -> None:
    path = build(tmp_path / "one.fatbin", PTX_75, SM_75)
    assert ask(path, False, limit=32, cc="7.5")[0] == told(
        counts(path, 75)["wide"]
    )  # the cubin runs as it is
    assert ask(path, False, limit=32, cc="9.0")[0] == told(32)  # the driver compiles the PTX


def test_only_ptx_is_estimated(tmp_path: Path) -> None:
    path = build(tmp_path / "ptx.fatbin", PTX_75)
    estimate = ask(path, True)[0][0]
    assert 64 < estimate < 128
    assert ask(path, False)[0] == [
        estimate,
        most_threads(estimate, 65536 // 2 * 3),
        0,
        *told(estimate)[3:],
    ]  # an estimate does not refuse the block
    assert ask(path, True)[0] == told(estimate)


def test_a_damaged_cubin_leaves_the_estimate(tmp_path: Path) -> None:
    whole = build(tmp_path / "whole.fatbin", "-compress-mode=none", PTX_75, SM_90).read_bytes()
    begin = whole.index(b"\x7fELF")
    end = whole.index(b".version") if whole.index(b".version") > begin else len(whole)
    info = whole.index(struct.pack("<BBH", 4, 0x2F, 8), begin)
    made = random.Random(1)
    changed = []
    for at in (*range(begin, begin + 64), *range(info, info + 12), *made.sample(range(begin, end), 200)):
        byte = made.choice((0, 0x7F, 0xFF))
        changed.append(whole[:at] + bytes([byte]) + whole[at + 1 :])
    (tmp_path / "changed").write_bytes(b"".join(changed))
    code = f"""
        cu = Driver()
        images = open({str(tmp_path / "changed")!r}, "rb").read()
        size = {len(whole)}
        found = set()
        for at in range(0, len(images), size):
            module = ctypes.c_void_p()
            assert cu.status("cuModuleLoadData", ctypes.byref(module), images[at : at + size]) == 0, at
            found.add(cu.number("cuFuncGetAttribute", 4, cu.function(module, "wide")))
            cu.cuModuleUnload(module)
        print(len(found) > 1, max(found) < 256)
    """
    assert run_python(code, hostile=False) == "True True\n"


def test_a_copy_is_compared_with_its_original(tmp_path: Path) -> None:
    """An instrumented copy has no cubin: it gets the original's registers and the difference of the estimates."""
    original = build(tmp_path / "original.fatbin", PTX_75, SM_90)
    estimated = build(tmp_path / "estimated.fatbin", PTX_75)
    copy = build(tmp_path / "copy.fatbin", PTX_75, "-DN=100")
    code = f"""
        cu = Driver()
        images = [open(p, "rb").read() for p in {[str(original), str(estimated), str(copy)]!r}]
        wide = [cu.function(cu.handle("cuModuleLoadData", image), "wide") for image in images]
        registers = lambda: [cu.number("cuFuncGetAttribute", 4, kernel) for kernel in wide]
        before = registers()
        cu.cudasim_is_copy_of(wide[2], wide[0])
        after = registers()
        assert before[2] >= before[1] + 16 and before[:2] == after[:2], before
        assert after[2] == before[0] + before[2] - before[1], (before, after)
        assert cu.launch_status(wide[2], cu.memory(400), block=1024) == 701
    """
    run_python(code, hostile=False)

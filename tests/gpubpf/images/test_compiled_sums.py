"""`images.compiled_sums`: against nvdisasm, which reads the same table."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

import pytest

from gpubpf.elf import of_bytes
from gpubpf.errors import ImageError
from gpubpf.images.compiled_sums import operations_by_line
from gpubpf_sass import assembled, nvdisasm

# All kinds in two functions, one in a loop that ptxas unrolls, and lines far apart.
PTX = """.version 8.8
.target ARCH
.address_size 64
.func (.param .b32 r) f(.param .b32 a)
{
    .reg .f32 %f<9>;
    ld.param.f32 %f1, [a];
    mul.f32 %f2, %f1, %f1;
    add.f32 %f3, %f2, 0f40000000;
    mul.f32 %f4, %f3, %f3;
    st.param.f32 [r], %f4;
    ret;
}
.visible .entry other(.param .u64 p)
{
    .reg .b64 %rd<9>; .reg .f64 %fd<9>; .reg .b32 %r<9>; .reg .pred %p;
    ld.param.u64 %rd1, [p];
    mov.u32 %r1, 0;
    mov.f64 %fd1, 0d3FF0000000000000;
LOOP:
    ld.global.f64 %fd2, [%rd1];
    mul.f64 %fd3, %fd2, %fd1;
    sub.f64 %fd1, %fd2, %fd3;
    add.f64 %fd1, %fd1, %fd2;
    add.s64 %rd1, %rd1, 8;
    add.u32 %r1, %r1, 1;
    setp.lt.u32 %p, %r1, 4;
    @%p bra LOOP;
    st.global.f64 [%rd1], %fd1;
    ret;
}
""" + "\n" * 300 + """
.visible .entry k(.param .u64 p)
{
    .reg .b64 %rd<9>; .reg .f32 %f<9>; .reg .b32 %r<9>;
    ld.param.u64 %rd1, [p];
    ld.global.f32 %f1, [%rd1];
    ld.global.f32 %f2, [%rd1+8];
    mul.f32 %f3, %f1, %f2;
    add.f32 %f4, %f3, %f2;
    add.f32 %f5, %f4, %f1;
    { .param .b32 a; .param .b32 r; st.param.f32 [a], %f5; call (r), f, (a); ld.param.f32 %f6, [r]; }
    st.global.f32 [%rd1+16], %f6;
    ld.global.u32 %r1, [%rd1+32];
    ld.global.u32 %r2, [%rd1+36];
    mul.f16x2 %r3, %r1, %r2;
    add.f16x2 %r4, %r3, %r1;
    mul.rn.f16x2 %r5, %r4, %r2;
    add.rn.f16x2 %r6, %r5, %r1;
    st.global.u32 [%rd1+40], %r6;
    ret;
}
"""  # fmt: skip


def of_nvdisasm(cubin: Path) -> dict[int, set[str]]:
    text = subprocess.run(
        [nvdisasm(), "-gp", "-c", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    found: dict[int, set[str]] = {}
    line = 0
    for row in text.splitlines():
        if place := re.search(r'//## File "\.nv_debug_ptx_txt[^"]*", line (\d+)', row):
            line = int(place[1])
        elif made := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([FDH](?:FMA|ADD|MUL)2?)[ .]", row):
            found.setdefault(line, set()).add(made[1])
    return found


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
def test_lines_are_those_of_nvdisasm(arch: str, tmp_path: Path) -> None:
    cubin, _ = assembled(PTX.replace("ARCH", arch), arch, tmp_path, "-lineinfo")
    found = operations_by_line(cubin.read_bytes())
    assert found == of_nvdisasm(cubin)
    kinds = {operation for operations in found.values() for operation in operations}
    assert {"FMUL", "FADD", "FFMA", "DADD", "HMUL2", "HADD2", "HFMA2"} <= kinds
    text = PTX.split("\n")
    assert found[text.index("    sub.f64 %fd1, %fd2, %fd3;") + 1] == {
        "DADD",
        "DFMA",
    }  # in the first turn, %fd1 is 1
    assert found[text.index("    add.f32 %f5, %f4, %f1;") + 1] == {"FADD"}


def test_without_lines_or_when_damaged(tmp_path: Path) -> None:
    cubin, _ = assembled(PTX.replace("ARCH", "sm_80"), "sm_80", tmp_path)
    assert operations_by_line(cubin.read_bytes()) == {}
    with pytest.raises(ImageError):
        operations_by_line(b"no cubin")
    cubin, _ = assembled(PTX.replace("ARCH", "sm_80"), "sm_80", tmp_path, "-lineinfo")
    whole, chance, refused = cubin.read_bytes(), random.Random(1), 0
    (table,) = (section for section in of_bytes(whole).sections if section.name == ".nv_debug_line_sass")
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(4):
            data[table.offset + chance.randrange(table.size)] = chance.randrange(256)
        try:
            operations_by_line(bytes(data))
        except ImageError:
            refused += 1
    assert refused

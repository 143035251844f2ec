"""Constant expressions: ptxas takes them and makes the same code as of the value, and so does the embedded device."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from engine_device import Array, Device, TranslateFailure
from gpubpf import elf
from gpubpf.ptx.module import render
from gpubpf.ptx.parser import parse

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"

INTEGERS = {
    "(1+2)": 3,
    "1+2": 3,
    "((1))+2*(3-1)": 5,
    "1?5:6": 5,
    "0?5:6": 6,
    "1?2?3:4:5": 3,
    "0?2:0?3:4": 4,
    "1||0?2:3": 2,
    "!0": 1,
    "!!5": 1,
    "!-5": 0,
    "!WARP_SZ": 0,
    "~5": -6,
    "-~5": 6,
    "- -5": 5,
    "+ +5": 5,
    "-(-3)": 3,
    "2|1": 3,
    "4^2&6": 6,
    "1|2^3": 1,
    "1|2&4": 1,
    "6&3": 2,
    "1&&2": 1,
    "0||1&&0": 0,
    "1<<40": 1 << 40,
    "1<<2<<3": 32,
    "2+3<<1": 10,
    "1<<64": 1,
    "1<<-1": -(1 << 63),
    "-8>>1": -4,
    "0xffffffffffffffff>>60": 15,
    "(0-1U)>>1": (1 << 63) - 1,
    "-1>>60": -1,
    "-8/3": -2,
    "8/-3": -2,
    "8 % -3": 8,
    "-8 % 3": 2,
    "(5 % 3)-4<0": 0,
    "-7/2U": (1 << 63) - 4,
    "1-2-3": -4,
    "-1<1": 1,
    "-1<1U": 0,
    "1<2==1": 1,
    "(1<2U)-2<0": 1,
    "(.s64)0xffffffffffffffff<1": 1,
    "(.u64)-1<1": 0,
    "(.s64)3": 3,
    "(1?-2:3U)<0": 1,
    "9223372036854775807+1": -(1 << 63),
    "18446744073709551615": -1,
    "18446744073709551616": 0,
    "WARP_SZ-1": 31,
    "5U": 5,
    "0x1fU": 31,
    "0X1f": 31,
    "0b101U": 5,
    "017U": 15,
    "1.0<2.0": 1,
    "(1.5==1.5)+1": 2,
    "(" * 40 + "7" + ")" * 40: 7,
}
FLOATS = {
    "1.5e0+1.0": 2.5,
    "(1.5)": 1.5,
    "-(1.0+2.0)": -3.0,
    "- -1.5": 1.5,
    "+1.5": 1.5,
    "1.5*-2.0": -3.0,
    "3.0/2.0": 1.5,
    "1.0/3.0": 1 / 3,
    "0.1+0.2": 0.1 + 0.2,
    "0d3ff0000000000000+1.0": 2.0,
    "-0d3ff0000000000000": -1.0,
    ".5": 0.5,
    ".5e1": 5.0,
    ".5e-1": 0.05,
    "1.": 1.0,
    "1E+3": 1000.0,
    "1e308*10.0": float("inf"),
}
# Statements, each with one that must have the same effect. %r1, %f1, %a1 and %p1 are the results.
STATEMENTS = {
    "add.u32 %r1, (1+2), %r0;": "add.u32 %r1, 3, %r0;",
    "@!%p0 add.u32 %r1, %r0, 1?2:3;": "@!%p0 add.u32 %r1, %r0, 2;",
    "mov.u32 %r1, sh+(1+2);": "mov.u32 %r1, sh+3;",
    "mov.u32 %r1, sh+1?4:8;": "mov.u32 %r1, sh+4;",
    "mov.u32 %r1, 0x100000001;": "mov.u32 %r1, 1;",
    "mov.u32 %r1, %r0+(1+2)*2;": "mov.u32 %r1, %r0+6;",
    "mov.b32 %r1, 0f3fc00000;": "mov.b32 %r1, 0x3fc00000;",
    "mov.b64 %a1, 1.5;": "mov.b64 %a1, 0x3ff8000000000000;",
    "mov.f32 %f1, 0d3ff8000000000000;": "mov.f32 %f1, 1.5;",
    "mov.f32 %f1, (0f3fc00000);": "mov.f32 %f1, 1.5;",
    "mov.f32 %f1, 1e39;": "mov.f32 %f1, 0f7f800000;",
    "add.f32 %f1, %f0, 1.0/3.0;": "add.f32 %f1, %f0, 0f3eaaaaab;",
    "ld.global.u32 %r1, [%a0+(2*4)];": "ld.global.u32 %r1, [%a0+8];",
    "ld.global.u32 %r1, [%a0+4+8-4];": "ld.global.u32 %r1, [%a0+8];",
    "ld.global.u32 %r1, [%a0+1?8:4];": "ld.global.u32 %r1, [%a0+8];",
    "ld.global.u32 %r1, [%a0+!0*4];": "ld.global.u32 %r1, [%a0+4];",
    "ld.shared.u32 %r1, [sh+1<<3];": "ld.shared.u32 %r1, [sh+8];",
    "ld.shared.u32 %r1, [sh+8|4];": "ld.shared.u32 %r1, [sh+12];",
    "ld.shared.u32 %r1, [sh+WARP_SZ];": "ld.shared.u32 %r1, [sh+32];",
    "ld.shared.u32 %r1, [sh+0x4U];": "ld.shared.u32 %r1, [sh+4];",
    "bar.sync (0+1), 32*2-32;": "bar.sync 1, 32;",
    "bar.sync WARP_SZ-31;": "bar.sync 1;",
    "shfl.sync.idx.b32 %r1, %r0, (1+2), 31&15, ~0;": "shfl.sync.idx.b32 %r1, %r0, 3, 15, -1;",
    "shfl.sync.idx.b32 %r1|%p1, %r0, 3|4, 31, -1;": "shfl.sync.idx.b32 %r1|%p1, %r0, 7, 31, -1;",
    "setp.ne.s32 %p1, %r0, !0;": "setp.ne.s32 %p1, %r0, 1;",
    "setp.ne.and.s32 %p1|%p2, %r0, 1|2, !%p0;": "setp.ne.and.s32 %p1|%p2, %r0, 3, !%p0;",
    "setp.ne.and.s32 %p1, %r0, 3, !0;": "setp.ne.s32 %p1, %r0, 3;",
    "mov.pred %p1, 1?0:1;": "mov.pred %p1, 0;",
    "mov.pred %p1, 2;": "mov.pred %p1, 1;",
    "and.pred %p1, %p0, !0;": "and.pred %p1, %p0, 1;",
    "selp.u32 %r1, (1+2), ~0, %p0;": "selp.u32 %r1, 3, -1, %p0;",
    "lop3.b32 %r1, %r0, %r0, %r0, 0x80|1;": "lop3.b32 %r1, %r0, %r0, %r0, 0x81;",
    "prmt.b32 %r1, %r0, %r0, 0x10+2;": "prmt.b32 %r1, %r0, %r0, 0x12;",
    "mov.b64 %a1, {(1+2), %r0};": "mov.b64 %a1, {3, %r0};",
    "mov.b64 %a1, {1?2:3, !0};": "mov.b64 %a1, {2, 1};",
    "st.global.v2.u32 [%a0+8], {(1+2), 1|4}; ld.global.u64 %a1, [%a0+8];": (
        "st.global.v2.u32 [%a0+8], {3, 5}; ld.global.u64 %a1, [%a0+8];"
    ),
    "st.global.f32 [%a0+8], 1.0+2.0; ld.global.f32 %f1, [%a0+8];": (
        "st.global.f32 [%a0+8], 3.0; ld.global.f32 %f1, [%a0+8];"
    ),
    "st.global.u8 [%a0+8], 0x1ff; ld.global.u32 %r1, [%a0+8];": (
        "st.global.u8 [%a0+8], 0xff; ld.global.u32 %r1, [%a0+8];"
    ),
    "call (%r1), twice, (1+2);": "call (%r1), twice, (3);",
    "call (%r1), twice, ((3));": "call (%r1), twice, (3);",
    "call (%r1), twice, (1?2:3);": "call (%r1), twice, (2);",
    "call (%r1), sum, ((1)+2, (4));": "call (%r1), sum, (3, 4);",
    "shl.b32 %r1, %r0, (1+2);": "shl.b32 %r1, %r0, 3;",
    "bfi.b32 %r1, %r0, %r0, (1+2), 1<<2;": "bfi.b32 %r1, %r0, %r0, 3, 4;",
    "atom.global.add.u32 %r1, [%a0+(4)], (1+2);": "atom.global.add.u32 %r1, [%a0+4], 3;",
    "atom.global.cas.b32 %r1, [%a0+4], 1?1:3, !1;": "atom.global.cas.b32 %r1, [%a0+4], 1, 0;",
    "vote.sync.ballot.b32 %r1, !%p0, 0xffff|0xffff0000;": "vote.sync.ballot.b32 %r1, !%p0, -1;",
    "vote.sync.ballot.b32 %r1, !0, -1;": "vote.sync.ballot.b32 %r1, 1, -1;",
    "cvt.rn.f32.s32 %f1, (1+2);": "cvt.rn.f32.s32 %f1, 3;",
    "cp.async.wait_group (1+2);": "cp.async.wait_group 3;",
    "nanosleep.u32 (1+2);": "nanosleep.u32 3;",
}
# What .global variables are initialised with, and their type.
INITIALIZERS = {
    ("u32", "[3]", "{2|1,1?5:6,!0}"): "{3, 5, 1}",
    ("u8", "[2]", "{300, -1}"): "{44, 255}",
    ("b32", "", "1.5+1.0"): "0x40200000",
    ("b64", "", "1.5"): "0x3ff8000000000000",
    ("f32", "", "0d3ff8000000000000"): "1.5",
    ("f64", "", "0f3fc00000"): "0d000000003FC00000",
    ("u64", "[2U]", "{other+(2*4), generic(other)+2*2}"): "{other+8, generic(other)+4}",
    ("u64", "[0x2]", "{generic(other)+-4, other+1?8:4}"): "{generic(other)+-4, other+8}",
    (
        "u8",
        "[0b10]",
        "{0xFF(other+2*2), 255U(generic(other)+(4))}",
    ): "{0xFF(other+4), 0xFF(generic(other)+4)}",
    ("u8", "[WARP_SZ]", "{1, 2}"): "{1, 2}",
}
# ptxas refuses these, and so does the device, with the line and the kernel.
WRONG = {
    "mov.u64 %a1, 1/0;": "division by zero",
    "mov.u64 %a1, 1.5+1;": "the operands of + must be integers",
    "mov.u64 %a1, !1.5;": "the operand of ! must be an integer",
    "mov.u64 %a1, 1.5?1:2;": "the operands of ?: must be integers",
    "mov.u64 %a1, (.s64)1.5;": "(.s64) requires an integer",
    "mov.u64 %a1, (1+2;": "expected ')', found ';'",
    "mov.u64 %a1, (%a0);": "'%a0' is not a constant expression",
    "ld.global.u32 %r1, [%a0+1.5];": "1.5 is not an integer",
    "mov.u64 %a1, 1 2;": "expected ',', found '2'",
}

ROOM = 48  # bytes of a row: four words that it reads and may change, then its results
REGISTERS = """.reg .b64 %b, %a<2>; .reg .b32 %r<2>; .reg .f32 %f<2>; .reg .f64 %d<2>; .reg .pred %p<3>;
    ld.param.u64 %b, [out];"""
BEFORE = """mov.u64 %a1, 0; mov.u32 %r1, 0; mov.f32 %f1, 0.0; mov.f64 %d1, 0.0; setp.eq.u32 %p1, 1, 0;
    ld.global.u32 %r0, [%a0]; ld.global.f32 %f0, [%a0]; setp.eq.u32 %p0, %r0, 77;"""
AFTER = """st.global.u64 [%a0+16], %a1; st.global.u32 [%a0+24], %r1; st.global.f32 [%a0+28], %f1;
    st.global.f64 [%a0+32], %d1; selp.u32 %r1, 1, 0, %p1; st.global.u32 [%a0+40], %r1;"""
FUNCTIONS = """.shared .b32 sh[64]; .visible .global .align 8 .b32 other[4] = {1, 2, 3, 4};
.func (.reg .u32 r) twice(.reg .u32 a) { add.u32 r, a, a; ret; }
.func (.reg .u32 r) sum(.reg .u32 a, .reg .u32 b) { add.u32 r, a, b; ret; }
"""


def bits(value: float) -> str:
    return f"0d{struct.pack('>d', value).hex()}"


def simple(written: bool) -> str:
    """A kernel that stores 8 bytes for each integer and 16 for each number with a fraction; as `written`, or the values."""
    integers = (
        f"mov.b64 %a1, {text if written else value}; st.global.u64 [%b+{8 * n}], %a1;"
        for n, (text, value) in enumerate(INTEGERS.items())
    )
    floats = (
        f"mov.f64 %d1, {text if written else bits(value)}; st.global.f64 [%b+{16 * n}], %d1;"
        f"mov.f32 %f1, {text if written else bits(value)}; st.global.f32 [%b+{16 * n + 8}], %f1;"
        for n, (text, value) in enumerate(FLOATS.items())
    )
    parts = [REGISTERS, *integers, "ld.param.u64 %b, [second];", *floats]
    return "\n".join([".visible .entry simple(.param .u64 out, .param .u64 second) {", *parts, "ret; }"])


def complete(name: str, statements: Iterable[str]) -> str:
    """A kernel that stores the results of each row."""
    rows = (f"add.u64 %a0, %b, {ROOM * n};\n{BEFORE}\n{row}\n{AFTER}" for n, row in enumerate(statements))
    return "\n".join([f".visible .entry {name}(.param .u64 out) {{", REGISTERS, *rows, "ret; }"])


def variables(prefix: str, written: bool) -> str:
    return "\n".join(
        f".visible .global .align 8 .{kind} {prefix}{n}{dimension} = {text if written else value};"
        for n, ((kind, dimension, text), value) in enumerate(INITIALIZERS.items())
    )


def module(written: bool) -> str:
    statements = STATEMENTS if written else STATEMENTS.values()
    return "\n".join(
        [HEAD, FUNCTIONS, variables("v", written), simple(written), complete("rows", statements)]
    )


def machine_code(text: str, folder: Path) -> dict[str, bytes]:
    source, cubin = folder / "in.ptx", folder / "out.cubin"
    source.write_text(text)
    done = subprocess.run(
        ["ptxas", "-O0", "-arch=sm_80", source, "-o", cubin], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[:2000]
    image = elf.of_bytes(cubin.read_bytes())
    wanted = (".text.", ".nv.global.init", ".rela.nv.global")
    return {s.name: image.contents(s) for s in image.sections if s.name.startswith(wanted)}


def test_the_device_gives_the_values() -> None:
    # One module, because compiling it takes longest.
    text = "\n".join(
        [module(written=True), variables("w", written=False), complete("wanted", STATEMENTS.values())]
    )
    device = Device(text)
    integers, floats = Array(np.zeros(len(INTEGERS), np.int64)), Array(np.zeros((len(FLOATS), 2)))
    device.launch("simple", 1, 1, integers, floats)
    for found, (expression, value) in zip(integers.host.tolist(), INTEGERS.items(), strict=True):
        assert found == value, expression
    for found, (expression, value) in zip(floats.host, FLOATS.items(), strict=True):
        with np.errstate(over="ignore"):
            assert found[0] == value and found.view(np.float32)[2] == np.float32(value), expression
    rows = []
    for name in ("rows", "wanted"):
        out = Array(np.zeros((len(STATEMENTS), ROOM // 4), np.uint32))
        out.host[:, :4] = 5, 1, 2, 3
        device.launch(name, 1, 32, out)
        rows.append(out.host)
    for statement, found, wanted in zip(STATEMENTS, *rows, strict=True):
        assert found.tolist() == wanted.tolist(), statement
    for n, (_, _, initializer) in enumerate(INITIALIZERS):
        found, wanted = (device.variable(f"{prefix}{n}", np.uint8, (8,)).tolist() for prefix in "vw")
        assert found == wanted, initializer


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
def test_ptxas_gives_the_values(tmp_path: Path) -> None:
    written, values = module(written=True), module(written=False)
    code = machine_code(values, tmp_path)
    assert len(code[".text.rows"]) > 16 * len(STATEMENTS)
    assert machine_code(written, tmp_path) == code
    # As copies have them.
    written, values = render(parse(written)), render(parse(values))
    assert machine_code(written, tmp_path) == machine_code(values, tmp_path)


@pytest.mark.parametrize("statement", WRONG)
def test_what_ptxas_refuses_is_refused(statement: str, tmp_path: Path) -> None:
    text = f"{HEAD}{FUNCTIONS}.visible .entry k(.param .u64 out) {{ {REGISTERS}\n{statement}\nret; }}"
    line = text.split(statement)[0].count("\n") + 1
    with pytest.raises(TranslateFailure) as failure:
        Device(text)
    assert str(failure.value).startswith(f"PTX line {line}: {WRONG[statement]}")
    assert str(failure.value).rstrip().endswith(", in k")
    if shutil.which("ptxas") is not None:
        with pytest.raises(AssertionError, match=f"line {line}"):
            machine_code(text, tmp_path)


@pytest.mark.parametrize(
    ("directive", "limit"),
    {"32U, WARP_SZ": (32, 32, 1), "0x20": (32, 1, 1), "0b11, 04, 2": (3, 4, 2)}.items(),
)
def test_sizes_of_directives(directive: str, limit: tuple[int, int, int]) -> None:
    parsed = parse(f"{HEAD}.visible .entry k() .maxntid {directive} {{ .reg .b32 %r<2U>; ret; }}")
    assert parsed.functions["k"].block_limit("maxntid") == limit

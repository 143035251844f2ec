"""What registers hold that the PTX loads and stores as bits."""

from __future__ import annotations

import pytest

from gpubpf.inject.number_types import number_types
from gpubpf.ptx import parser

KERNEL = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry k() {{
.reg .b16 %rs<20>; .reg .b32 %r<20>; .reg .f32 %f<20>; .reg .f16 %h<4>; .reg .pred %p<4>; .reg .b64 %rd<9>;
{}
ret;
}}
"""


@pytest.mark.parametrize(
    ("body", "right"),
    [
        ("cvt.rn.bf16.f32 %rs1, %f1;", {"%rs1": "bf16", "%f1": "f32"}),
        ("cvt.rn.f16.f32 %rs1, %f1; mov.b16 %rs2, %rs1;", {"%rs1": "f16", "%rs2": "f16", "%f1": "f32"}),
        ("{ .reg .b16 c; fma.rn.bf16 %rs2, %rs3, %rs1, c; }", dict.fromkeys(("%rs1", "%rs2", "%rs3", "c"), "bf16")),
        ("fma.rn.bf16x2 %r1, %r2, %r3, %r4;", dict.fromkeys(("%r1", "%r2", "%r3", "%r4"), "bf16")),
        ("mov.b32 %r1, {%rs1, %rs2}; add.f16 %rs3, %rs1, %rs1;", dict.fromkeys(("%r1", "%rs1", "%rs2", "%rs3"), "f16")),
        ("mov.b32 {%rs1, %rs2}, %r1; mul.f16x2 %r1, %r2, %r2;", dict.fromkeys(("%r1", "%rs1", "%rs2", "%r2"), "f16")),
        ("mov.b32 %f1, {0, %rs1};", {"%f1": "f32", "%rs1": "bf16"}),
        ("mov.b32 %r1, {0, %rs1}; shl.b32 %r2, %r1, 1;", {}),
        ("mov.b32 %r1, %f1;", {"%r1": "f32", "%f1": "f32"}),
        ("selp.b16 %rs1, %rs2, 0, %p1; sub.bf16 %rs3, %rs2, %rs2;", dict.fromkeys(("%rs1", "%rs2", "%rs3"), "bf16")),
        ("add.s16 %rs1, %rs2, 1; mov.b16 %rs3, %h1;", {"%rs1": "integer", "%rs2": "integer", "%rs3": "f16", "%h1": "f16"}),
        ("add.u32 %r1, %r2, %r3;", dict.fromkeys(("%r1", "%r2", "%r3"), "integer")),
        # They do not agree, or know nothing.
        ("cvt.rn.bf16.f32 %rs1, %f1; cvt.u32.u16 %r1, %rs1;", {"%f1": "f32", "%r1": "integer"}),
        ("add.f16 %rs1, %rs2, %rs2; add.bf16 %rs3, %rs1, %rs1;", {"%rs2": "f16", "%rs3": "bf16"}),
        ("xor.b16 %rs1, %rs2, 0x8000; and.b32 %r1, %r2, 7; ld.global.u16 %rs3, [%rd1];", {}),
    ],
)  # fmt: skip
def test_number_types(body: str, right: dict[str, str]) -> None:
    (kernel,) = parser.parse(KERNEL.format(body)).entries.values()
    assert number_types(kernel.body or ()) == right

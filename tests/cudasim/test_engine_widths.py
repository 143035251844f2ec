"""Registers whose width does not fit the type of an instruction: the embedded device takes those that ptxas takes."""

from __future__ import annotations

import re
from pathlib import Path

from engine_forms import accepted, legal

LANES = "{%x32_1, %x32_2, %x32_3, %x32_4}"
INSTRUCTIONS = [
    "add.u32 %x32_0, %x32_1, %x32_2;", "add.f16 %x16_0, %x16_1, %x16_2;", "fma.rn.f64 %x64_0, %x64_1, %x64_2, %x64_3;",
    "mul.wide.u16 %x32_0, %x16_1, %x16_2;", "mad.wide.s32 %x64_0, %x32_1, %x32_2, %x64_3;", "popc.b64 %x32_0, %x64_1;",
    "shl.b64 %x64_0, %x64_1, %x32_2;", "bfe.u64 %x64_0, %x64_1, %x32_2, %x32_3;", "sqrt.rn.f32 %x32_0, %x32_1;",
    "setp.lt.s64 %x0_0, %x64_1, %x64_2;", "set.eq.u32.f64 %x32_0, %x64_1, %x64_2;", "selp.b16 %x16_0, %x16_1, %x16_2, %x0_1;",
    "slct.f32.s32 %x32_0, %x32_1, %x32_2, %x32_3;", "vadd.s32.s32.u32 %x32_0, %x32_1, %x32_2;",
    "dp4a.s32.s32 %x32_0, %x32_1, %x32_2, %x32_3;",
    "cvt.u16.u8 %x16_0, %x16_1;", "cvt.rn.f32.s32 %x32_0, %x32_1;", "cvt.rzi.s64.f16 %x64_0, %x16_1;",
    "mov.b32 %x32_0, %x32_1;", "mov.u32 %x32_0, %tid.x;", "mov.u64 %x64_0, %clock64;", "mov.b64 {%x32_0, %x32_1}, %x64_1;",
    "mov.b32 %x32_0, {%x16_1, %x16_2};", "ld.global.u8 %x16_0, [%x64_1];", "ld.f32 %x32_0, [%x64_1];",
    "ld.shared.v2.b32 {%x32_0, %x32_1}, [%x64_1];", "ld.relaxed.gpu.b16 %x16_0, [%x64_1];", "ldu.global.f32 %x32_0, [%x64_1];",
    "st.global.u16 [%x64_1], %x16_0;", "st.v4.f32 [%x64_1], {%x32_0, %x32_1, %x32_2, %x32_3};", "st.f64 [%x64_1], %x64_0;",
    "st.async.mbarrier::complete_tx::bytes.b32 [%x64_1], %x32_2, [%x64_3];", "atom.global.add.u64 %x64_0, [%x64_1], %x64_2;",
    "red.shared.max.s32 [%x64_1], %x32_2;", "atom.cas.b16 %x16_0, [%x64_1], %x16_2, %x16_3;", "isspacep.shared %x0_0, %x64_1;",
    "mapa.u64 %x64_0, %x64_1, %x32_2;", "getctarank.u64 %x32_0, %x64_1;", "nanosleep.u32 %x32_1;", "activemask.b32 %x32_0;",
    "shfl.sync.idx.b32 %x32_0, %x32_1, %x32_2, %x32_3, %x32_4;", "vote.sync.ballot.b32 %x32_0, %x0_1, %x32_2;",
    "match.any.sync.b64 %x32_0, %x64_1, %x32_2;", "redux.sync.add.s32 %x32_0, %x32_1, %x32_2;", "bar.sync %x32_1, %x32_2;",
    f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {LANES}, {LANES}, {{%x32_5, %x32_6}}, {LANES};",
    "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%x64_0, %x64_1}, {%x64_2}, {%x64_3}, {%x64_0, %x64_1};",
    f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {LANES}, [%x64_1];", "mbarrier.init.shared.b64 [%x64_1], %x32_2;",
    "mbarrier.try_wait.b64 %x0_0, [%x64_1], %x64_2, %x32_3;", "cp.async.ca.shared.global [%x64_1], [%x64_2], 8, %x32_3;",
    "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%x64_1], [%x64_2], %x32_3, %x64_4;",
    "tensormap.replace.tile.global_address.b1024.b64 [%x64_1], %x64_2;", f"tex.2d.v4.f32.f32 {LANES}, [%x64_1, {{%x32_5, %x32_6}}];",
    f"tex.level.1d.v4.f32.f32 {LANES}, [%x64_1, {{%x32_5}}], %x32_6;", "txq.width.b32 %x32_0, [%x64_1];",
]  # fmt: skip


def changed() -> list[str]:
    """Return each instruction with each register replaced by those of other widths, but for addresses: ptxas takes most of 16 bits."""
    found = []
    for form in INSTRUCTIONS:
        for match in re.finditer(r"(?<!\[)%x(16|32|64)_(\d)", form):
            for width in ("16", "32", "64"):
                found.append(f"{form[: match.start()]}%x{width}_{match[2]}{form[match.end() :]}")
    return list(dict.fromkeys(found))


def test_each_register_of_an_instruction(tmp_path: Path) -> None:
    forms = changed()
    of_ptxas, of_device = set(legal(tmp_path, forms)), set(accepted(forms))
    assert of_ptxas > set(INSTRUCTIONS)
    assert sorted(of_device - of_ptxas) == []
    assert sorted(of_ptxas - of_device) == []

"""Special registers: which instructions may read them, as ptxas says, and vectors of them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from engine_device import Array, Device
from engine_forms import HEAD, accepted, legal

INTO = {
    "pred": "%x0_1",
    "u16": "%x16_1",
    "u32": "%x32_1",
    "s32": "%x32_1",
    "b32": "%x32_1",
    "u64": "%x64_1",
    "f32": "%x32_1",
}
SPECIAL = (
    "%tid.x %ctaid.w %laneid %lanemask_lt %clock %clock64 %globaltimer %globaltimer_lo %gridid %smid".split()
)
SPECIAL += (
    "%is_explicit_cluster %dynamic_smem_size %envreg1 %pm0 %pm0_64 %tid %tid.g %cluster_ctaid.z".split()
)
VECTORS = "%tid %ntid %ctaid %nctaid %clusterid %nclusterid %cluster_ctaid %cluster_nctaid".split()
OTHERS = """\
add.u32 %x32_0, %x32_1, {};
mul.wide.u32 %x64_1, {}, 4;
setp.lt.u32 %x0_1, {}, 1;
selp.b32 %x32_1, {}, 1, %x0_1;
not.b32 %x32_1, {};
shfl.sync.idx.b32 %x32_1, {}, 0, 31, -1;
st.global.u32 [%x64_1], {};
atom.global.add.u32 %x32_1, [%x64_1], {};
bar.sync {};
mov.b64 %x64_1, {{{}, %x32_1}};
cvt.rn.f32.u32 %x32_1, {};
cvt.u64.u32 %x64_1, {};
cvt.u64.u64 %x64_1, {};
cvt.u32.u16 %x32_1, {};"""


def test_ptxas_and_the_device_agree(tmp_path: Path) -> None:
    """Only mov and cvt of integers read special registers, and mov only with their own width."""
    forms = [f"mov.{t} {into}, {name};" for (t, into), name in itertools.product(INTO.items(), SPECIAL)]
    forms += [line.format(name) for line in OTHERS.splitlines() for name in ("%tid.x", "%clock64")]
    for count, t, name in itertools.product((2, 4), ("u16", "u32", "s32", "f32"), VECTORS):
        elements = ", ".join(f"{INTO[t][:-1]}{k}" for k in range(count))
        forms.append(f"mov.v{count}.{t} {{{elements}}}, {name};")
    legal_ones = legal(tmp_path, forms)
    assert 20 < len(legal_ones) < len(forms) // 2
    assert accepted(forms) == legal_ones


def test_vectors() -> None:
    """The fourth element of an index is 0, that of a size is 1. An element may be left out."""
    names = ("%tid", "%ctaid", "%ntid", "%nctaid")
    reads = "".join(
        f"mov.v4.u32 {{%r0, %r1, %r2, %r3}}, {name}; st.global.v4.u32 [%a+{16 * k}], {{%r0, %r1, %r2, %r3}};"
        for k, name in enumerate(names)
    )
    device = Device(
        HEAD
        + """.visible .entry k(.param .u64 out) { .reg .b32 %r<9>; .reg .b64 %a, %o; .reg .v4 .u32 %v; ld.param.u64 %a, [out];
        mov.u32 %r0, %tid.y; mov.u32 %r1, %tid.x; mad.lo.u32 %r0, %r0, 2, %r1; mov.u32 %r1, %ctaid.z; mad.lo.u32 %r0, %r1, 6, %r0;
        mul.wide.u32 %o, %r0, 80; add.u64 %a, %a, %o; """
        + reads
        + """mov.v4.u32 %v, %tid; mov.v4.u32 {%r4, _, _, %r5}, %ntid; st.global.v4.u32 [%a+64], {%v.y, %v.g, %r4, %r5}; ret; }"""
    )
    out = Array(np.full((12, 20), 99, np.uint32))
    device.launch("k", (1, 1, 2), (2, 3, 1), out)
    for z, y, x in itertools.product(range(2), range(3), range(2)):
        wanted = [x, y, 0, 0, 0, 0, z, 0, 2, 3, 1, 1, 1, 1, 2, 1, y, y, 2, 1]
        assert out.host[z * 6 + y * 2 + x].tolist() == wanted

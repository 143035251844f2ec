"""Forms of sm_100a that are not arithmetic alone: requests to cancel launches, kinds of mma, and two 4-bit floats in a byte."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from engine_device import Array, Device, DeviceFault
from gpubpf_sass import need

HEAD = ".version 8.7\n.target sm_100a\n.address_size 64\n"
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # by their lower bits; the upper bit is the sign


def kernel(body: str, name: str = "k", before: str = "") -> str:
    """A kernel with [a] in %rd1, the thread's 16 bytes of [b] at %rd2, and 128 bytes of shared memory."""
    return f""".visible .entry {name}(.param .u64 a, .param .u64 b) {before} {{
    .reg .b8 %b<4>; .reg .b16 %h<4>; .reg .b32 %r<40>; .reg .b64 %rd<6>; .reg .b128 %q1; .reg .pred %p<4>;
    .shared .align 16 .b8 tile[128]; .shared .align 8 .b64 bar;
    ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b];
    mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mad.lo.u32 %r2, %r1, %r2, %r0;
    mul.wide.u32 %rd3, %r2, 16; add.u64 %rd2, %rd2, %rd3;
    {body} ret; }}
"""


def proven(text: str, folder: Path) -> Device:
    (folder / "k.ptx").write_text(text)
    subprocess.run([need("ptxas"), "-arch=sm_100a", folder / "k.ptx", "-o", folder / "k"], check=True)
    return Device(text)


@pytest.mark.parametrize("everywhere", [False, True])
def test_requests_to_cancel_launches(everywhere: bool, tmp_path: Path) -> None:
    """Each is answered with no on the mbarrier, or on those of all blocks of the cluster, with a response of 16 bytes."""
    name = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
    only = "setp.ne.u32 %p1, %r1, 1; @%p1 bra WAIT;" if everywhere else ""
    body = f"""
    mbarrier.init.shared::cta.b64 [bar], 1; st.shared.v2.u64 [tile], {{-1, -1}};
    mbarrier.arrive.expect_tx.shared::cta.b64 %rd4, [bar], 16;
    barrier.cluster.arrive; barrier.cluster.wait;
    {only}
    {name}{".multicast::cluster::all" * everywhere}.b128 [tile], [bar];
    WAIT: barrier.cluster.arrive; barrier.cluster.wait;
    mbarrier.test_wait.shared::cta.b64 %p2, [bar], %rd4; selp.u32 %r3, 1, 0, %p2;
    ld.shared.b128 %q1, [tile];
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q1; selp.u32 %r4, 1, 0, %p3;
    @%p3 clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {{%r5, %r6, %r7, _}}, %q1;
    @%p3 clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128 %r6, %q1;
    st.global.v2.u32 [%rd2], {{%r3, %r4}};"""
    device = proven(HEAD + kernel(body, before=".reqnctapercluster 2"), tmp_path)
    out = Array(np.full((4, 4), 9, np.uint32))
    for _ in range(2):
        device.launch("k", 2 if everywhere else 4, 1, 0, out)
        assert out.host[: 2 if everywhere else 4, :2].tolist() == [[1, 0]] * (2 if everywhere else 4)


def test_the_kind_of_an_mma_of_8_bit_floats(tmp_path: Path) -> None:
    """.kind::f8f6f4 names the types that the instruction has anyway. All of A are 2 and all of B are x, for one x of each column."""
    row = "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e5m2.f32"
    body = f"""
    mov.u32 %r3, 0x40404040; shr.u32 %r4, %r0, 2; add.u32 %r4, %r4, 0x3c; mul.lo.u32 %r4, %r4, 0x01010101;
    mov.f32 %r5, 0f3F000000;
    {row} {{%r10, %r11, %r12, %r13}}, {{%r3, %r3, %r3, %r3}}, {{%r4, %r4}}, {{%r5, %r5, %r5, %r5}};
    st.global.v4.b32 [%rd2], {{%r10, %r11, %r12, %r13}};"""
    out = Array(np.zeros((32, 4), np.float32))
    proven(HEAD + kernel(body), tmp_path).launch("k", 1, 32, 0, out)
    columns = np.array([1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5])  # of e5m2: 0x3c and up
    for lane in range(32):
        pair = 64 * columns[2 * (lane % 4) : 2 * (lane % 4) + 2] + 0.5
        assert out.host[lane].tolist() == [*pair, *pair]


def test_two_floats_of_4_bits_in_a_register_of_8(tmp_path: Path) -> None:
    """As cuda_fp4.h converts them."""
    body = """
    cvt.u16.u32 %h1, %r2; mov.b16 {%b1, %b2}, %h1;
    cvt.rn.f16x2.e2m1x2 %r3, %b1;
    mov.b32 {%h1, %h2}, %r3; cvt.f32.f16 %r4, %h2; cvt.f32.f16 %r5, %h1;
    cvt.rn.satfinite.e2m1x2.f32 %b1, %r4, %r5; mov.b16 %h3, {%b1, 0}; cvt.u32.u16 %r6, %h3;
    st.global.v2.u32 [%rd2], {%r3, %r6};"""
    out = Array(np.zeros((256, 4), np.uint32))
    proven(HEAD + kernel(body), tmp_path).launch("k", 2, 128, 0, out)
    values = np.array([*FP4, *(-x for x in map(float, FP4))], np.float16).view(np.uint16).astype(np.uint32)
    codes = np.arange(256)
    assert (out.host[:, 0] == (values[codes & 15] | values[codes >> 4] << 16)).all()
    assert (out.host[:, 1] == codes).all()


def test_stochastic_rounding_is_named() -> None:
    forms = [
        "cvt.rs.f16x2.f32 %r3, %r1, %r2, %r0;",
        "cvt.rs.relu.satfinite.bf16x2.f32 %r3, %r1, %r2, %r0;",
        "cvt.rs.satfinite.e4m3x4.f32 %r3, {%r1, %r2, %r1, %r2}, %r0;",
        "cvt.rs.relu.satfinite.e2m1x4.f32 %h1, {%r1, %r2, %r1, %r2}, %r0;",
    ]
    device = Device(HEAD + "".join(kernel(form, f"k{n}") for n, form in enumerate(forms)))
    for n, form in enumerate(forms):
        with pytest.raises(DeviceFault, match=form.split()[0].replace(".", r"\.") + ": PTX does not say"):
            device.launch(f"k{n}", 1, 1, 0, 0)

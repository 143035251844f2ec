"""The rarer forms of loads, stores, atomics, copies and collectives, written in PTX, against NumPy; each proven by ptxas to be one."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import numpy as np
import pytest

from engine_device import Array, Device, DeviceFault, TranslateFailure
from gpubpf_sass import need

# By name: the body of a kernel of 32 threads with [in] in %rd1, [out] in %rd2, the lane in %r0, its place at 4 bytes each in %rd3 and
# %rd4, at 16 bytes each in %rd5 and %rd6, and 1024 bytes of shared memory at `tile`, with the lane's 16 bytes at %r1.
KERNELS = {
    "wide": """
        ld.global.v8.b32 {%r10, %r11, %r12, %r13, _, _, _, %r17}, [%rd9];
        st.global.v8.b32 [%rd10], {%r17, %r10, _, %r12, %r13, %r13, %r13, %r11};""",
    "bytes": """
        ld.global.v4.u8 {%h1, %h2, %h3, %h4}, [%rd3];
        st.shared.v2.u8 [%r1], {%h4, %h3};
        st.shared.v2.u8 [%r1+2], {%h2, %h1};
        ld.shared.u32 %r10, [%r1];
        st.global.u32 [%rd4], %r10;""",
    "wide_shared": """
        ld.global.b128 %q1, [%rd5];
        st.shared.b128 [%r1], %q1;
        ld.shared::cluster.v4.b32 {%r10, %r11, %r12, %r13}, [%r1];
        st.global.v4.b32 [%rd6], {%r13, %r12, %r11, %r10};""",
    "vectors": """
        mov.f32 %f1, 0f3F800000;
        atom.global.v4.f32.add {%f5, %f6, %f7, %f8}, [%rd2], {%f1, %f1, %f1, %f1};
        red.global.add.noftz.v2.f16x2 [%rd2+16], {%r20, %r20};
        max.f32 %f5, %f5, %f8;
        cvt.rzi.u32.f32 %r10, %f5;
        st.global.u32 [%rd4+64], %r10;""",
    "narrow": """
        mov.u16 %h1, 7;
        cvt.u16.u32 %h2, %r0;
        atom.global.cas.b16 %h3, [%rd2], %h1, %h2;
        cvt.u32.u16 %r10, %h3;
        st.global.u32 [%rd4+16], %r10;""",
    "b128": """
        ld.global.b128 %q1, [%rd5];
        atom.global.exch.b128 %q2, [%rd6], %q1;
        atom.global.cas.b128 %q3, [%rd6], %q1, %q2;
        st.global.b128 [%rd6+512], %q3;""",
    "match": """
        activemask.b32 %r10;
        mul.wide.u32 %rd7, %r0, 0x20000000;
        shr.u64 %rd7, %rd7, 31;
        match.any.sync.b64 %r11, %rd7, %r10;
        and.b32 %r12, %r0, 3;
        match.any.sync.b32 %r12, %r12, %r10;
        match.all.sync.b64 %r13|%p1, %rd1, %r10;
        match.all.sync.b32 %r14|%p2, %r0, %r10;
        selp.u32 %r15, 1, 0, %p1;
        selp.u32 %r16, 2, 0, %p2;
        or.b32 %r15, %r15, %r16;
        or.b32 %r15, %r15, %r14;
        and.b32 %r13, %r13, 0xff00;
        or.b32 %r15, %r15, %r13;
        st.global.v4.b32 [%rd6], {%r10, %r11, %r12, %r15};""",
    "match_some": """
        setp.lt.u32 %p1, %r0, 9;
        @!%p1 bra OTHERS;
        activemask.b32 %r10;
        and.b32 %r11, %r0, 1;
        match.any.sync.b32 %r11, %r11, %r10;
        st.global.v2.b32 [%rd8], {%r10, %r11};
        ret;
        OTHERS:
        activemask.b32 %r10;
        setp.gt.u32 %p2, %r0, 29;
        vote.sync.ballot.b32 %r11, %p2, %r10;
        st.global.v2.b32 [%rd8], {%r10, %r11};""",
    "redux": """
        ld.global.f32 %f1, [%rd3];
        redux.sync.min.f32 %f2, %f1, 0xffffffff;
        redux.sync.max.abs.f32 %f3, %f1, 0xffffffff;
        redux.sync.max.NaN.f32 %f4, %f1, 0xffffffff;
        mov.b32 %r10, %f1;
        redux.sync.and.b32 %r11, %r10, 0xffffffff;
        st.global.v4.b32 [%rd6], {%f2, %f3, %f4, %r11};""",
    "spaces": """
        mov.u64 %rd7, table; cvta.const.u64 %rd7, %rd7;
        mov.u64 %rd8, tile; cvta.shared.u64 %rd8, %rd8;
        mov.u64 %rd9, mine; cvta.local.u64 %rd9, %rd9;
        mov.u64 %rd10, a; cvta.param.u64 %rd10, %rd10;
        mov.u32 %r10, 0;
        TESTS
        st.global.u32 [%rd4], %r10;
        cvta.to.shared.u64 %rd8, %rd8; cvta.to.local.u64 %rd9, %rd9; cvta.to.const.u64 %rd7, %rd7;
        st.shared.u32 [%rd8], 11; st.local.u32 [%rd9], 22;
        ld.shared.u32 %r11, [tile]; ld.local.u32 %r12, [mine]; ld.const.u32 %r13, [%rd7+4];
        st.global.v4.b32 [%rd6+128], {%r11, %r12, %r13, %r13};""",
    "matrices": """
        ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd5];
        st.shared.v4.b32 [%r1], {%r10, %r11, %r12, %r13};
        bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r1];
        st.global.v4.b32 [%rd6], {%r10, %r11, %r12, %r13};
        cvt.u64.u32 %rd7, %r1; cvta.shared.u64 %rd7, %rd7;
        ldmatrix.sync.aligned.m8n8.x2.trans.b16 {%r10, %r11}, [%rd7];
        movmatrix.sync.aligned.m8n8.trans.b16 %r12, %r10;
        st.global.v4.b32 [%rd6+512], {%r10, %r11, %r12, %r12};
        ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {%r10, %r11, %r12, %r13}, [%r1];
        st.global.v4.b32 [%rd6+1024], {%r10, %r11, %r12, %r13};
        ldmatrix.sync.aligned.m8n16.x2.shared.b8x16.b4x16_p64 {%r10, %r11}, [%r1];
        ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8x16.b6x16_p32 {%r12, %r13}, [%r1];
        st.global.v4.b32 [%rd6+1536], {%r10, %r11, %r12, %r13};""",
    "matrices_back": """
        ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd5];
        stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r10, %r11, %r12, %r13};
        bar.sync 0;
        ld.shared.v4.b32 {%r14, %r15, %r16, %r17}, [%r1];
        st.global.v4.b32 [%rd6], {%r14, %r15, %r16, %r17};
        stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%r1], {%r10, %r11};
        bar.sync 0;
        ld.shared.v4.b32 {%r14, %r15, %r16, %r17}, [%r1];
        st.global.v4.b32 [%rd6+512], {%r14, %r15, %r16, %r17};
        stmatrix.sync.aligned.m16n8.x4.trans.shared.b8 [%r1], {%r10, %r11, %r12, %r13};
        bar.sync 0;
        ld.shared.v4.b32 {%r14, %r15, %r16, %r17}, [%r1];
        st.global.v4.b32 [%rd6+1024], {%r14, %r15, %r16, %r17};""",
    "few": """
        mov.b64 %rd9, 0;
        st.shared.v2.b64 [%r1], {-1, -1};
        cp.async.ca.shared.global [%r1], [%rd5], 4;
        cp.async.ca.shared.global.L2::cache_hint [%r1+8], [%rd5+8], 8, %r20, %rd9;
        setp.gt.u32 %p1, %r0, 3;
        cp.async.ca.shared.global [%r1+4], [%rd5+4], 4, !%p1;
        cp.async.ca.shared.global [%r1+12], [%rd5+12], 4, 3;
        cp.async.commit_group;
        cp.async.wait_all;
        ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r1];
        st.global.v4.b32 [%rd6], {%r10, %r11, %r12, %r13};
        cp.async.cg.shared::cta.global.L2::64B [%r1], [%rd5], 16, %p1;
        cp.async.wait_group 0;
        ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r1];
        st.global.v4.b32 [%rd6+512], {%r10, %r11, %r12, %r13};""",
    "bulk": """
        setp.ne.u32 %p1, %r0, 0;
        @%p1 bra WAIT;
        mbarrier.init.shared::cta.b64 [bar], 1;
        mbarrier.arrive.expect_tx.shared::cta.b64 %rd7, [bar], 512;
        mov.u32 %r10, 256; mov.u16 %h1, 1; mov.u16 %h2, 0; mov.b64 %rd9, 0;
        cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [tile], [%rd1], %r10, [bar];
        mbarrier.test_wait.shared::cta.b64 %p2, [bar], %rd7;
        selp.u32 %r11, 1, 0, %p2;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint
            [tile+256], [%rd1+256], %r10, [bar], %h1, %rd9;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [tile], [%rd1+256], %r10, [bar], %h2;
        st.global.u32 [%rd2+1024], %r11;
        WAIT:
        bar.sync 0;
        LOOP:
        mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p2, [bar], 0, 0x989680;
        @!%p2 bra LOOP;
        ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r1];
        xor.b32 %r10, %r10, 1;
        st.shared.u32 [%r1], %r10;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        @%p1 ret;
        mov.u32 %r10, 32; mov.u16 %h1, 0x8001;
        cp.async.bulk.global.shared::cta.bulk_group [%rd2], [tile], 128;
        cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd2+128], [tile+128], %r10, %h1;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
        mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 64;
        cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [tile], [tile+64], 64, [bar];
        mbarrier.arrive.shared::cta.b64 %rd7, [bar];
        mbarrier.test_wait.parity.shared::cta.b64 %p2, [bar], 1;
        selp.u32 %r11, 1, 0, %p2;
        st.global.u32 [%rd2+1028], %r11;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd2+256], [tile], %r10;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.min.s64 [%rd2+288], [tile+32], 32;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd2+320], [tile+256], 16;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [%rd2+336], [tile+256], 16;
        cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.and.b32 [tile], [tile+256], 16, [bar];
        ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [tile];
        st.global.v4.b32 [%rd2+512], {%r10, %r11, %r12, %r13};""",
    "told": """
        setp.ne.u32 %p1, %r0, 0;
        @!%p1 mbarrier.init.shared::cta.b64 [bar], 32;
        @!%p1 st.bulk.weak.shared::cta [%r1], 1024, 0;
        bar.sync 0;
        mbarrier.arrive.expect_tx.shared::cta.b64 %rd7, [bar], 24;
        mov.u32 %r10, bar; mov.u64 %rd8, bar; cvta.shared.u64 %rd8, %rd8;
        cvt.u64.u32 %rd9, %r1; cvta.shared.u64 %rd9, %rd9; mov.u32 %r12, tile;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r1], {%r0, 5}, [%r10];
        red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u64 [%r12+8], 1, [%r10];
        mbarrier.test_wait.shared::cta.b64 %p2, [bar], %rd7;
        st.async.mbarrier::complete_tx::bytes.b64 [%rd9+512], %rd7, [%rd8];
        mbarrier.test_wait.shared::cta.b64 %p3, [bar], %rd7;
        bar.sync 0;
        st.async.mmio.release.sys.global.u32 [%rd4], %r0;
        red.async.mmio.release.sys.global.add.u32 [%rd2+1024], %r0;
        ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r1];
        selp.u32 %r13, 1, 0, %p2;
        selp.u32 %r14, 2, 0, %p3;
        or.b32 %r13, %r13, %r14;
        st.global.v4.b32 [%rd6+128], {%r10, %r11, %r12, %r13};""",
    "told_by_name": """
        setp.ne.u32 %p1, %r0, 0;
        @%p1 ret;
        mbarrier.init.b64 [bar], 3;
        st.u32 [tile+12], 0;
        st.u32 [tile+40], 8;
        mov.u64 %rd9, 32;
        st.bulk [tile+32], %rd9, 0;
        cp.async.mbarrier.arrive.noinc.b64 [bar];
        mbarrier.arrive.b64 _, [bar];
        mbarrier.arrive.expect_tx.b64 %rd7, [bar], 24;
        mov.u64 %rd8, bar; cvta.shared.u64 %rd8, %rd8;
        mov.u64 %rd9, tile; cvta.shared.u64 %rd9, %rd9;
        st.async.mbarrier::complete_tx::bytes.b32 [tile], 3, [bar];
        st.async.mbarrier::complete_tx::bytes.b32 [tile+4], 4, [%rd8];
        st.async.mbarrier::complete_tx::bytes.b32 [%rd9+8], 5, [bar];
        st.u64 [tile+16], 6;
        red.async.relaxed.cluster.mbarrier::complete_tx::bytes.add.u64 [tile+16], 1, [bar];
        mbarrier.test_wait.b64 %p2, [bar], %rd7;
        red.async.relaxed.cluster.mbarrier::complete_tx::bytes.inc.u32 [%rd9+12], 99, [bar];
        mbarrier.test_wait.b64 %p3, [bar], %rd7;
        ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [tile];
        st.global.v4.b32 [%rd2], {%r10, %r11, %r12, %r13};
        selp.u32 %r10, 1, 0, %p2;
        selp.u32 %r11, 1, 0, %p3;
        ld.shared.u32 %r12, [tile+16];
        ld.shared.u32 %r13, [tile+40];
        st.global.v4.b32 [%rd2+16], {%r10, %r11, %r12, %r13};""",
    "named": """
        mul.lo.u32 %r10, %r0, 3;
        setp.eq.u32 %p1, %r0, 0;
        @%p1 st.v2.u32 [tile], {%r0, %r0};
        @%p1 st.u32 [tile+8], 7;
        st.u32 [mine+4], %r10;
        bar.sync 0;
        atom.add.u32 %r11, [tile+4], 1;
        red.add.u32 [tile+4], 1;
        atom.cas.b32 %r12, [tile], 0, 5;
        bar.sync 0;
        ld.u32 %r13, [mine+4];
        ld.volatile.u32 %r14, [tile+4];
        ld.u32 %r15, [tile+8];
        mov.u32 %r16, tile;
        ld.shared.u32 %r16, [%r16];
        ld.u32 %r17, [words+4];
        st.u32 [words+12], 9;
        cvta.shared.u64 %rd7, tile;
        ld.u32 %r18, [%rd7+8];
        add.u32 %r17, %r17, %r18;
        st.global.v4.b32 [%rd6], {%r13, %r14, %r15, %r16};
        st.global.u32 [%rd4+512], %r17;
        ld.u32 %r11, [words+12];
        st.global.u32 [%rd4+1024], %r11;""",
    "vector_registers": """
        .reg .v2.b16 %x<4>; .reg .v2.u16 %y; .reg .v4.u32 %z; .reg .v2.b32 %t;
        ld.global.u32 %r10, [%rd3];
        mov.b32 {%x1.x, %x1.y}, %r10;
        mov.b16 %x3.x, %x1.y;
        mov.b16 %x3.y, %x1.x;
        mov.b32 %r11, %x3;
        mov.b32 %y, %r10;
        add.u16 %y.x, %y.x, 1;
        mov.b32 %r12, %y;
        cvt.u32.u16 %r13, %y.g;
        ld.global.v4.u32 %z, [%rd5];
        mov.b64 %rd7, {%z.w, %z.b};
        mov.b64 %t, %rd7;
        mov.v2.u32 {%z.x, %z.y}, %t;
        mov.u32 %z.z, %r11;
        mov.u32 %z.w, %r12;
        st.global.v4.u32 [%rd6], %z;
        st.global.u32 [%rd4+512], %r13;""",
    "elements": """
        .reg .b16 %i; .reg .b64 %j; .reg .s32 %n; .shared .v2 .u32 pair[4]; .shared .u16 halves[4][8];
        .local .u32 lane[4];
        cvt.u16.u32 %i, %r0; cvt.u64.u32 %j, %r0; sub.s32 %n, %r0, 4;
        { .reg .b64 upper; mov.b64 upper, 0x700000000; or.b64 %j, %j, upper; }
        shl.b32 %r10, %r0, 8;
        st.shared.u8 tile[%r0+4], %r0;
        bar.sync 0;
        ld.shared.u8 %r10, tile[%i+4];
        ld.shared.u8 %r11, tile[%j+4];
        ld.shared.u8 %r12, tile[%n+8];
        ld.shared.u8 %r13, tile[2+3];
        st.global.v4.b32 [%rd6], {%r10, %r11, %r12, %r13};
        mov.u32 %r10, pair[3]; mov.u32 %r11, halves[%r0+1]; mov.u32 %r12, tile[-4]; mov.u64 %rd7, tile[%r0];
        cvt.u32.u64 %r13, %rd7;
        { .reg .u32 at; mov.u32 at, pair; sub.u32 %r10, %r10, at; mov.u32 at, halves; sub.u32 %r11, %r11, at; }
        { .reg .u32 at; mov.u32 at, tile; sub.u32 %r12, %r12, at; sub.u32 %r13, %r13, at; }
        st.global.v4.b32 [%rd6+512], {%r10, %r11, %r12, %r13};
        and.b32 %r10, %r0, 3;
        ld.global.u32 %r11, numbers[%r10];
        ldu.global.v2.u32 {%r12, %r13}, numbers[2];
        st.local.u32 lane[%r10], %r0;
        st.u32 lane[%r10+0], %r0;
        ld.u32 %r10, lane[%r10];
        st.global.v4.b32 [%rd6+1024], {%r10, %r11, %r12, %r13};
        and.b32 %r10, %r0, 1;
        ld.const.b32 %r10, table[%r10];
        cvta.global.u64 %rd7, numbers[%r0+-4];
        mov.u64 %rd8, numbers;
        sub.u64 %rd7, %rd7, %rd8;
        mov.b64 {%r11, %r12}, %rd7;
        mul.lo.u32 %r13, %r0, 0x40000000;
        cvta.const.u64 %rd7, table[%r13+1]; mov.u64 %rd8, table; cvta.const.u64 %rd8, %rd8;
        sub.u64 %rd7, %rd7, %rd8; cvt.u32.u64 %r13, %rd7;
        st.global.v4.b32 [%rd6+1536], {%r10, %r11, %r12, %r13};""",
    "uneven": """
        mov.u32 %r10, 24;
        cp.async.bulk.global.shared::cta.bulk_group [%rd2], [tile], %r10;""",
    "outside": """
        mov.u32 %r10, 2048;
        cp.async.bulk.global.shared::cta.bulk_group [%rd2], [tile], %r10;""",
}


def ptx() -> str:
    asks = "isspacep.{} %p1, {}; selp.u32 %r11, 1, 0, %p1; shl.b32 %r10, %r10, 1; or.b32 %r10, %r10, %r11;"
    spaces = ("global", "shared::cta", "local", "const", "param")
    tests = "".join(asks.format(s, r) for r in ("%rd1", "%rd8", "%rd9", "%rd7", "%rd10") for s in spaces)
    text = """.version 9.0
.target sm_100a
.address_size 64
.const .align 8 .b32 table[2] = {33, 44};
.global .align 4 .b32 words[4] = {50, 60, 70, 80}, numbers[4] = {5, 6, 7, 8};
"""
    for name, body in KERNELS.items():
        text += f""".visible .entry {name}(.param .u64 a, .param .u64 b) {{
.reg .pred %p<4>; .reg .b16 %h<8>; .reg .b32 %r<24>; .reg .b64 %rd<12>; .reg .f32 %f<10>; .reg .b128 %q<4>;
.shared .align 128 .b8 tile[1024]; .shared .align 8 .b64 bar; .local .align 16 .b8 mine[16];
ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; cvta.to.global.u64 %rd1, %rd1; cvta.to.global.u64 %rd2, %rd2;
mov.u32 %r0, %tid.x; mul.wide.u32 %rd3, %r0, 4; add.u64 %rd4, %rd2, %rd3; add.u64 %rd3, %rd1, %rd3;
mul.wide.u32 %rd5, %r0, 16; add.u64 %rd6, %rd2, %rd5; add.u64 %rd5, %rd1, %rd5;
mul.wide.u32 %rd8, %r0, 8; add.u64 %rd8, %rd2, %rd8;
mul.wide.u32 %rd9, %r0, 32; add.u64 %rd10, %rd2, %rd9; add.u64 %rd9, %rd1, %rd9;
mov.u32 %r1, tile; mad.lo.u32 %r1, %r0, 16, %r1; mov.b32 %r20, 0x3C003C00;
{body.replace("TESTS", tests)}
ret;
}}
"""
    return text


@functools.cache
def device(virtual: bool = False) -> Device:
    return Device(ptx(), virtual)


def ran(name: str, given: np.ndarray, size: int = 4096, virtual: bool = False) -> np.ndarray:
    """The bytes of [out] after the kernel, as u32; they were 0xEE."""
    out = Array(np.full(size, 0xEE, np.uint8))
    device(virtual).launch(name, 1, 32, Array(given), out)
    return out.host.copy().view(np.uint32)


LANES = np.arange(32, dtype=np.uint32)
NOISE = np.random.default_rng(5).integers(0, 1 << 32, 512, dtype=np.uint32)
EE = 0xEEEEEEEE


def test_ptxas_takes_the_kernels(tmp_path: Path) -> None:
    (tmp_path / "forms.ptx").write_text(ptx())
    command = [need("ptxas"), "-O0", "-arch=sm_100a", "-o", "/dev/null", tmp_path / "forms.ptx"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_eight_words_with_sinks() -> None:
    given = NOISE[:256].reshape(32, 8)
    out = ran("wide", NOISE)[:256].reshape(32, 8)
    assert (out == np.c_[given[:, [7, 0]], np.full(32, EE), given[:, [2, 3, 3, 3, 1]]]).all()


@pytest.mark.every(2)
@pytest.mark.parametrize("virtual", [False, True])
def test_an_address_without_a_space_is_in_the_space_of_the_variable_that_it_names(virtual: bool) -> None:
    out = ran("named", NOISE, virtual=virtual)
    assert (out[:128].reshape(32, 4) == np.c_[3 * LANES, np.full((32, 3), [64, 7, 5])]).all()
    assert (out[128:160] == 67).all() and (out[256:288] == 9).all()


@pytest.mark.parametrize("virtual", [False, True])
def test_each_address_of_an_asynchronous_store_may_name_a_variable(virtual: bool) -> None:
    assert ran("told_by_name", NOISE, virtual=virtual)[:8].tolist() == [3, 4, 5, 1, 0, 1, 7, 0]


def test_elements_of_arrays() -> None:
    """The unit is the size of the array's type, without dimensions and vectors. An index and its offset are summed in 32 bits."""
    out = ran("elements", NOISE)[:512].reshape(4, 32, 4)
    same, zeros = np.stack([LANES] * 3, 1), np.zeros(32, np.uint32)
    assert (out[0] == np.c_[same, zeros + 1]).all()
    assert (out[1] == np.c_[zeros + 12, 2 + 2 * LANES, zeros - 4, LANES]).all()
    numbers = np.array([5, 6, 7, 8], np.uint32)
    assert (out[2] == np.c_[LANES, numbers[LANES % 4], zeros + 7, zeros + 8]).all()
    distance = 4 * (LANES - 4)  # not a negative number of 64 bits
    assert (out[3] == np.c_[np.array([33, 44])[LANES % 2], distance, zeros, zeros + 4]).all()


@pytest.mark.parametrize(
    "text",
    [
        "atom.shared.add.u32 %r1, tile[1], 3;",
        "ld.shared.u32 %r1, [tile[2]];",
        "ld.shared.u32 %r1, tile[%r0][1];",
        "ld.shared.u32 %r1, bar[0];",
        "ld.shared.u32 %r1, %rd1[0];",
        "ld.shared.u32 %r1, tile[2.5];",
        "ld.shared.u32 %r1, tile[%p1];",
        "ld.shared.u32 %r1, tile[%tid.x];",
        "add.u32 %r1, %r1, tile[2];",
        "st.shared.u32 [tile], tile[2];",
        "{ .reg .b32 tile; ld.shared.u32 %r1, tile[2]; }",
    ],
)
def test_what_has_no_element_of_an_array(text: str, tmp_path: Path) -> None:
    whole = f""".version 9.0
.target sm_100a
.address_size 64
.visible .entry k() {{ .reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<4>; .shared .b32 tile[64]; .shared .b64 bar;
{text} ret; }}"""
    (tmp_path / "one.ptx").write_text(whole)
    command = [need("ptxas"), "-arch=sm_100a", "-o", "/dev/null", tmp_path / "one.ptx"]
    assert subprocess.run(command, capture_output=True).returncode != 0
    with pytest.raises(TranslateFailure, match="PTX line 5"):
        Device(whole).launch("k", 1, 1)


def test_elements_of_parameters() -> None:
    """Those of kernels, of functions, and of what is passed to functions. A register cannot choose any of the latter."""
    text = """.version 9.0
.target sm_100a
.address_size 64
.func (.param .b32 two[2]) both(.param .b16 four[4], .param .b32 n) {
.reg .b32 r, i; ld.param.b32 i, [n];
ld.param.u16 r, four[i+1]; st.param.b32 two[0], r;
ld.param.u16 r, four[0]; st.param.b32 two[1], r; ret; }
.visible .entry k(.param .u64 out, .param .b32 n, .param .b16 given[6]) {
.reg .b32 %r<4>; .reg .b64 at; .reg .b16 h; ld.param.u64 at, [out]; ld.param.b32 %r0, [n];
{ .param .b16 four[4]; .param .b32 index; .param .b32 two[2];
ld.param.b16 h, given[1]; st.param.b16 four[0], h; ld.param.b16 h, given[2]; st.param.b16 four[1], h;
ld.param.b16 h, given[%r0+1]; st.param.b16 four[2], h; st.param.b16 four[3], 9; st.param.b32 [index], %r0;
call (two), both, (four, index); ld.param.b32 %r1, two[0]; ld.param.b32 %r2, two[1]; }
st.global.v2.b32 [at], {%r1, %r2}; ret; }
.visible .entry far(.param .u64 out, .param .b32 n, .param .b16 given[6]) {
.reg .b32 r; .reg .b64 at; ld.param.b32 r, [n]; ld.param.u64 at, [out];
ld.param.u16 r, given[r]; st.global.b32 [at], r; ret; }
.visible .entry passed(.param .u64 out, .param .b32 n, .param .b16 given[6]) {
.reg .b32 r; ld.param.b32 r, [n]; { .param .b32 p[2]; st.param.b32 p[r], 1; } ret; }"""
    found = Device(text)
    for n, right in ((2, [9, 11]), (1, [12, 11])):
        out, given = Array(np.zeros(2, np.uint32)), np.array([10, 11, 12, 13, 14, 15], np.uint16)
        given[n + 1] = 13 if n == 2 else 12
        found.launch("k", 1, 1, out, np.uint32(n), given.tobytes())
        assert out.host.tolist() == right
    with pytest.raises(DeviceFault):
        found.launch("far", 1, 1, out, np.uint32(1 << 28), bytes(12))
    with pytest.raises(DeviceFault, match="a register as the index of a parameter"):
        found.launch("passed", 1, 1, 0, np.uint32(0), bytes(12))


def test_vector_registers_and_their_elements() -> None:
    out = ran("vector_registers", NOISE)
    one, four = NOISE[:32], NOISE[:128].reshape(32, 4)
    swapped = one >> 16 | one << 16
    added = one & 0xFFFF0000 | one + 1 & 0xFFFF
    assert (out[:128].reshape(32, 4) == np.c_[four[:, 3], four[:, 2], swapped, added]).all()
    assert (out[128:160] == one >> 16).all()


def test_vectors_of_bytes() -> None:
    assert (ran("bytes", NOISE)[:32] == NOISE[:32].byteswap()).all()


def test_sixteen_bytes_through_shared_memory() -> None:
    assert (ran("wide_shared", NOISE)[:128].reshape(32, 4) == NOISE[:128].reshape(32, 4)[:, ::-1]).all()


def test_vector_atomics() -> None:
    out = Array(np.zeros(1024, np.uint8))
    device().launch("vectors", 1, 32, Array(NOISE), out)
    assert (out.host[:16].view(np.float32) == 32).all()
    assert (out.host[16:24].view(np.float16) == 32).all()
    assert sorted(out.host.view(np.uint32)[16:48]) == list(range(32))  # each saw another sum


def test_compare_and_swap_of_16_and_128_bits() -> None:
    out = Array(np.full(256, 7, np.uint16))
    device().launch("narrow", 1, 32, Array(NOISE), out)
    seen = out.host[8:].view(np.uint32)[:32]
    assert (seen == 7).sum() == 1 and out.host[0] == np.flatnonzero(seen == 7)[
        0
    ]  # the first one's place alone
    assert out.host[1] == 7

    found = ran("b128", NOISE)
    assert (found[:128] == EE).all() and (found[128:256] == NOISE[:128]).all()


def test_match() -> None:
    out = ran("match", NOISE)[:128].reshape(32, 4)
    fours = [sum(1 << n for n in range(32) if n // 4 == lane // 4) for lane in range(32)]
    every = [0x11111111 << lane % 4 for lane in range(32)]
    assert out.tolist() == [[0xFFFFFFFF, a, b, 0xFF01] for a, b in zip(fours, every, strict=True)]
    some = ran("match_some", NOISE)[:64].reshape(32, 2)
    assert some[:9].tolist() == [[0x1FF, 0x155 if n % 2 == 0 else 0xAA] for n in range(9)]
    assert (some[9:] == [0xFFFFFE00, 0xC0000000]).all()


def test_reductions_of_floats() -> None:
    given = np.linspace(-40, 17, 32, dtype=np.float32)
    given[7] = np.nan
    out = ran("redux", given)[:4]
    assert out[:2].view(np.float32).tolist() == [-40, 40]
    assert np.isnan(out[2:3].view(np.float32)[0])
    assert out[3] == np.bitwise_and.reduce(given.view(np.uint32))


def test_spaces() -> None:
    out = ran("spaces", NOISE)
    # five questions about each of five pointers, to global, shared, local, const and param
    assert (out[:32] == 0b10000_01000_00100_00010_00001).all()
    assert (out[32:160].reshape(32, 4) == [11, 22, 44, 44]).all()


def columns(row: np.ndarray) -> np.ndarray:
    """What lane l gets of a matrix [row][column] of bytes that come in fours, row by row."""
    return row.reshape(32, 4).view(np.uint32)[:, 0]


def test_matrices_from_shared_memory() -> None:
    out = ran("matrices", NOISE).reshape(8, 32, 4)
    raw = NOISE[:128].view(np.uint8).reshape(32, 16)
    halves = raw.view(np.uint16)  # [row][column]
    for k in range(4):
        assert (out[0, :, k] == columns(raw[8 * k : 8 * k + 8])).all()
    for k in range(2):
        turned = np.ascontiguousarray(halves[8 * k : 8 * k + 8].T)
        assert (out[1, :, k] == columns(turned.view(np.uint8))).all()
    assert (out[1, :, 2] == columns(raw[:8])).all()  # transposed twice
    for k in range(2):
        turned = np.ascontiguousarray(raw[16 * k : 16 * k + 16].T)
        for half in range(2):
            assert (out[2, :, 2 * k + half] == columns(turned[8 * half : 8 * half + 8])).all()
    bits = np.unpackbits(raw, axis=1, bitorder="little")
    fours = np.packbits(bits[:, :64].reshape(32, 16, 4), axis=2, bitorder="little")[:, :, 0]
    sixes = np.packbits(bits[:, :96].reshape(32, 16, 6), axis=2, bitorder="little")[:, :, 0]
    for k in range(2):
        assert (out[3, :, k] == columns(fours[8 * k : 8 * k + 8])).all()
        turned = np.ascontiguousarray(sixes[:16].T)
        assert (out[3, :, 2 + k] == columns(turned[8 * k : 8 * k + 8])).all()


def test_matrices_to_shared_memory() -> None:
    out = ran("matrices_back", NOISE).view(np.uint8).reshape(8, 32, 16)
    given = NOISE[:128].reshape(32, 4)
    for k in range(4):
        assert (columns(out[0, 8 * k : 8 * k + 8]) == given[:, k]).all()
    for k in range(2):
        turned = np.ascontiguousarray(out[1, 8 * k : 8 * k + 8].view(np.uint16).T)
        assert (columns(turned.view(np.uint8)) == given[:, k]).all()
    assert (out[1, 16:] == out[0, 16:]).all()  # x2 leaves the rest alone
    for k in range(4):
        turned = np.ascontiguousarray(
            out[2, 8 * k : 8 * k + 8].T
        )  # 16 rows of 8: two columns of a row lie in a half word
        pairs = turned.reshape(2, 8, 4, 2).view(np.uint16)[..., 0]  # [half][row][pair]
        assert (pairs[0].ravel() | pairs[1].ravel().astype(np.uint32) << 16 == given[:, k]).all()


def test_copies_of_few_bytes() -> None:
    first, second = ran("few", NOISE)[:256].reshape(2, 32, 4)
    expected = NOISE[:128].reshape(32, 4).copy()
    expected[:4, 1] = 0  # told to read nothing
    expected[:, 3] &= 0xFFFFFF  # told to read three bytes
    assert (first == expected).all()
    expected = NOISE[:128].reshape(32, 4).copy()
    expected[4:] = 0
    assert (second == expected).all()


@pytest.mark.parametrize("virtual", [False, True])
def test_bulk_copies(virtual: bool) -> None:
    given = NOISE.copy()
    given[64:68] = np.array([0.5, 1, 2, 3], np.float32).view(np.uint32)
    start = np.full(4096, 0xEE, np.uint8)
    start[256:288].view(np.uint32)[:] = 1
    start[288:320].view(np.int64)[:] = 5
    start[320:336].view(np.float32)[:] = 10
    start[336:352].view(np.float16)[:] = 1
    out = Array(start)
    device(virtual).launch("bulk", 1, 32, Array(given), out)
    words = out.host.view(np.uint32)
    tile = given[:128].copy()
    tile[::4] ^= 1
    assert (words[:32] == tile[:32]).all()
    masked = np.full(32, 0xEE, np.uint8)
    masked[[0, 15, 16, 31]] = tile[32:40].view(np.uint8)[[0, 15, 16, 31]]
    assert (out.host[128:160] == masked).all()
    tile[:16] = tile[16:32]
    assert (words[64:72] == tile[:8] + 1).all()
    assert (out.host[288:320].view(np.int64) == np.minimum(5, tile[8:16].view(np.int64))).all()
    assert (out.host[320:336].view(np.float32) == 10 + tile[64:68].view(np.float32)).all()
    halves = (np.float16(1) + tile[64:68].view(np.float16)).astype(np.float16)
    assert (out.host[336:352].view(np.float16) == halves).all()
    assert (words[128:132] == tile[:4] & tile[64:68]).all()
    assert words[256:258].tolist() == [0, 1]  # not complete before all bytes came; complete with them


@pytest.mark.parametrize("virtual", [False, True])
def test_stores_and_reductions_that_tell_a_barrier(virtual: bool) -> None:
    out = Array(np.zeros(4096, np.uint8))
    device(virtual).launch("told", 1, 32, Array(NOISE), out)
    words = out.host.view(np.uint32)
    assert words[256] == 31 * 16
    assert (words[:32] == LANES).all()
    rows = words[32:160].reshape(32, 4)
    assert (rows[:, 0] == LANES).all() and (rows[:, 1] == 5).all()
    assert rows[0, 2] == 32 and (rows[1:, 2] == 0).all()
    assert (rows[:, 3] == 2).all()  # complete when the last bytes had come, not before


def test_a_bulk_copy_that_cannot_be_is_a_fault() -> None:
    out = Array(np.zeros(64, np.uint8))
    with pytest.raises(DeviceFault, match="misaligned") as caught:
        device().launch("uneven", 1, 32, Array(NOISE), out)
    assert caught.value.code == 716
    with pytest.raises(DeviceFault) as caught:
        device().launch("outside", 1, 32, Array(NOISE), Array(np.zeros(4096, np.uint8)))
    assert caught.value.code == 700


@pytest.mark.parametrize("virtual", [False, True])
def test_variables_of_inner_blocks(virtual: bool) -> None:
    """A variable is seen in the block that declares it, and hides one of the same name outside (PTX ISA 5.1 and 7.1)."""
    text = """.version 8.0
.target sm_80
.address_size 64
.global .u32 v = 1;
.visible .entry k(.param .u64 out) {
    .reg .b64 %rd<2>; .reg .b32 %r<9>;
    ld.param.u64 %rd1, [out];
    ld.global.u32 %r1, [v];
    {   .shared .u32 v;
        st.shared.u32 [v], 5;
        {   .shared .u32 v;
            st.shared.u32 [v], 6;
            ld.shared.u32 %r3, [v]; }
        ld.shared.u32 %r2, [v]; }
    {   .local .u32 v;
        st.local.u32 [v], 7;
        ld.local.u32 %r4, [v]; }
    {   .global .u32 v = 8;
        ld.global.u32 %r5, [v]; }
    {   .reg .b64 v;
        mov.b64 v, 9;
        {   .shared .u32 v;
            st.shared.u32 [v], 4; }
        cvt.u32.u64 %r6, v; }
    ld.global.u32 %r7, [v];
    st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4};
    st.global.v2.u32 [%rd1+16], {%r5, %r6};
    st.global.u32 [%rd1+24], %r7;
    ret;
}"""
    out = Array(np.zeros(7, np.uint32))
    Device(text, virtual).launch("k", 1, 1, out)
    assert out.host.tolist() == [1, 5, 6, 7, 8, 9, 1]


@pytest.mark.every(3)
@pytest.mark.parametrize("virtual", [False, True])
@pytest.mark.parametrize(
    ("before", "body", "expected"),
    [
        # What a block declares later is not meant yet.
        (
            ".global .u32 v = 1;",
            "{ ld.global.u32 %r1, [v]; .global .u32 v = 8; ld.global.u32 %r2, [v]; }",
            [1, 8],
        ),
        ("", ".reg .b32 w; mov.u32 w, 3; { mov.u32 w, 5; .reg .b32 w; mov.u32 w, 6; } mov.u32 %r1, w;", [5]),
        (
            ".global .u32 v1 = 1;",
            "ld.global.u32 %r1, [v1]; .reg .b32 v<3>; mov.u32 v1, 2; mov.u32 %r2, v1;",
            [1, 2],
        ),
        (
            ".global .u32 v = 1;",
            "{ {.local .u32 a;} ld.global.u32 %r1, [v]; .shared .u32 v; st.shared.u32 [v], 2; }",
            [1],
        ),
        (
            "",
            "{ .reg .b32 %laneid, %pm<3>; mov.u32 %laneid, 5; mov.u32 %pm1, 6; mov.u32 %r1, %laneid; mov.u32 %r2, %pm1; }",
            [5, 6],
        ),
        # %r12 is register 12 of %r<N>, never 2 of %r1<N>.
        (
            "",
            ".reg .b32 a<20>; mov.u32 a11, 1; { .reg .b32 a1<2>; mov.u32 a11, 5; } mov.u32 %r1, a11;",
            [5],
        ),
        # An initialiser means what is declared before it, in the same block or in one around it.
        (
            ".global .u32 v = 1;",
            """{ .global .u64 p[2] = {0, v}; .global .u32 v = 5; .global .u64 q = generic(v);
               ld.global.u64 %rd2, [p+8]; ld.global.u32 %r1, [%rd2]; ld.global.u64 %rd2, [q]; ld.u32 %r2, [%rd2]; }""",
            [1, 5],
        ),
        (
            ".func (.reg .u32 r) f() { .global .u32 v = 9; .global .u64 p = v; .reg .u64 a;"
            " ld.global.u64 a, [p]; ld.global.u32 r, [a]; ret; } .global .u32 v = 1;",
            "call (%r1), f;",
            [9],
        ),
        # A parameter whose address is taken is in local memory (PTX ISA 9.7.9.4).
        (
            ".func (.reg .u32 r) f(.param .b64 v) { .reg .b64 a; mov.b64 a, v; ld.local.u32 r, [a];"
            " st.local.u32 [a], 7; .reg .b32 b; ld.param.u32 b, [a]; add.u32 r, r, b; ret; }",
            "{ .param .b64 q; st.param.b64 [q], 12; call (%r1), f, (q); }",
            [19],
        ),
    ],
)
def test_what_a_name_means(before: str, body: str, expected: list[int], virtual: bool) -> None:
    text = f""".version 8.0
.target sm_80
.address_size 64
{before}
.visible .entry k(.param .u64 out) {{
    .reg .b64 %rd<3>; .reg .b32 %r<3>;
    ld.param.u64 %rd1, [out];
    {body}
    st.global.v2.u32 [%rd1], {{%r1, %r2}};
    ret;
}}"""
    out = Array(np.zeros(2, np.uint32))
    Device(text, virtual).launch("k", 1, 1, out)
    assert out.host.tolist()[: len(expected)] == expected


def test_elements_of_arrays_of_other_blocks() -> None:
    """Each of two blocks reads what the other one wrote to the last elements of an array."""
    text = """.version 9.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 out) .reqnctapercluster 2, 1, 1 {
    .reg .b64 %rd<3>; .reg .b32 %r<9>; .shared .b32 pair[4];
    ld.param.u64 %rd1, [out]; mov.u32 %r1, %ctaid.x; xor.b32 %r2, %r1, 1; mov.u32 %r3, 1;
    mad.lo.u32 %r4, %r1, 5, 70; st.shared.u32 pair[2], %r4; st.shared.u32 pair[3], %r1;
    barrier.cluster.arrive; barrier.cluster.wait;
    mapa.shared::cluster.u32 %r4, pair[2], %r2; ld.shared::cluster.u32 %r5, [%r4];
    mapa.shared::cluster.u32 %r4, pair[%r3+2], %r2; ld.shared::cluster.u32 %r6, [%r4];
    getctarank.shared::cluster.u32 %r7, pair[%r3]; getctarank.shared::cluster.u32 %r8, %r4;
    mul.wide.u32 %rd2, %r1, 16; add.u64 %rd1, %rd1, %rd2;
    st.global.v4.u32 [%rd1], {%r5, %r6, %r7, %r8};
    barrier.cluster.arrive; barrier.cluster.wait; ret; }"""
    out = Array(np.zeros((2, 4), np.uint32))
    Device(text).launch("k", 2, 1, out)
    assert out.host.tolist() == [[75, 1, 0, 1], [70, 0, 1, 0]]

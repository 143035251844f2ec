"""What instructions access: the forms of PTX ISA 9.0, each proven by ptxas to be one, with what it accesses written by hand."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from gpubpf.ptx.access import Access, accesses, unaddressed_accesses, unprobed
from gpubpf.ptx.module import PtxInstruction, render
from gpubpf.ptx.opcodes import counted
from gpubpf.ptx.parser import parse
from gpubpf_sass import need

# An instruction = what it accesses, as `kind space width [address]`, source first; `#` is a size that is not a number, `unless` a
# predicate, `/N` the lanes that have an address; or `- NAME` where it cannot be probed; or nothing where there is no access.
FORMS = {
    "sm_75": """
ld.global.f32 %f1, [%rd1+4]; = load global 4 [%rd1+4]
ld.f64 %fd1, [%rd1]; = load generic 8 [%rd1]
ld.shared.u8 %h1, [%r1+-1]; = load shared 1 [%r1+-1]
ld.shared::cta.s16 %h1, [tile+2]; = load shared 2 [tile+2]
ld.local.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1]; = load local 16 [%rd1]
ld.const.v2.f32 {%f1, %f2}, [table+8]; = load const 8 [table+8]
ld.shared.v2.u32 {%r1, %r2}, pairs[3]; = load shared 8 [pairs+12]
ld.u32 %r1, pairs[%r2]; = load generic 4 pairs[%r2]
ldu.global.f32 %f1, floats[%rd1+2]; = load global 4 floats[%rd1+2]
st.shared.u16 pairs[%h1+-1], %h2; = store shared 2 pairs[%h1+-1]
mov.u32 %r1, pairs[%r2]; =
mov.u64 %rd1, floats[4]; =
cvta.shared.u64 %rd1, pairs[%r2]; =
ld.param.u64 %rd1, [a]; =
ld.param::entry.u64 %rd1, [a]; =
ld.global.v2.u8 {%h1, %h2}, [%rd1]; = load global 2 [%rd1]
ld.global.v4.s8 {%h1, %h2, %h3, %h4}, [%rd1]; = load global 4 [%rd1]
ld.global.v2.f64 {%fd1, %fd2}, [%rd1]; = load global 16 [%rd1]
ld.global.v4.u16 {%h1, %h2, %h3, %h4}, [%rd1]; = load global 8 [%rd1]
ld.local.b16 %h1, [16]; = load local 2 [16]
ld.volatile.global.u32 %r1, [%rd1]; = load global 4 [%rd1]
ld.volatile.shared.u64 %rd1, [%r1]; = load shared 8 [%r1]
ld.weak.global.u32 %r1, [%rd1]; = load global 4 [%rd1]
ld.relaxed.gpu.global.u32 %r1, [%rd1]; = load global 4 [%rd1]
ld.relaxed.cta.shared.u32 %r1, [%r1]; = load shared 4 [%r1]
ld.acquire.sys.u64 %rd1, [%rd1]; = load generic 8 [%rd1]
ld.mmio.relaxed.sys.global.u32 %r1, [%rd1]; = load global 4 [%rd1]
ld.global.ca.u32 %r1, [%rd1]; = load global 4 [%rd1]
ld.global.cg.u32 %r1, [%rd1]; = load global 4 [%rd1]
ld.global.cs.u32 %r1, [%rd1]; = load global 4 [%rd1]
ld.global.lu.u32 %r1, [%rd1]; = load global 4 [%rd1]
ld.global.cv.u32 %r1, [%rd1]; = load global 4 [%rd1]
ld.global.nc.f32 %f1, [%rd1]; = load global 4 [%rd1]
ld.global.ca.nc.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1]; = load global 16 [%rd1]
ld.global.L1::no_allocate.u32 %r1, [%rd1]; = load global 4 [%rd1]
ld.global.nc.L1::evict_last.L2::128B.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1]; = load global 16 [%rd1]
ldu.global.f32 %f1, [%rd1]; = load global 4 [%rd1]
ldu.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1]; = load generic 16 [%rd1]
st.global.f32 [%rd1+4], %f1; = store global 4 [%rd1+4]
st.u8 [%rd1], %h1; = store generic 1 [%rd1]
st.shared.v2.b64 [%r1], {%rd1, %rd2}; = store shared 16 [%r1]
st.shared::cta.u32 [tile+4], 7; = store shared 4 [tile+4]
st.local.u32 [%rd1], %r1; = store local 4 [%rd1]
st.volatile.global.u32 [%rd1], %r1; = store global 4 [%rd1]
st.relaxed.gpu.global.u32 [%rd1], %r1; = store global 4 [%rd1]
st.release.cta.shared.u64 [%r1], %rd1; = store shared 8 [%r1]
st.mmio.relaxed.sys.global.u64 [%rd1], %rd2; = store global 8 [%rd1]
st.global.wb.v4.b32 [%rd1], {%r1, %r2, %r3, %r4}; = store global 16 [%rd1]
st.global.cg.u32 [%rd1], %r1; = store global 4 [%rd1]
st.global.cs.u32 [%rd1], %r1; = store global 4 [%rd1]
st.global.wt.u32 [%rd1], %r1; = store global 4 [%rd1]
st.global.L1::evict_first.u32 [%rd1], %r1; = store global 4 [%rd1]
atom.global.add.u32 %r1, [%rd1], 1; = atomic global 4 [%rd1]
atom.add.f64 %fd1, [%rd1], %fd2; = atomic generic 8 [%rd1]
atom.shared.cas.b64 %rd1, [%r1], %rd2, %rd3; = atomic shared 8 [%r1]
atom.shared::cta.exch.b32 %r1, [tile], %r2; = atomic shared 4 [tile]
atom.acq_rel.gpu.global.cas.b32 %r1, [%rd1], %r2, %r3; = atomic global 4 [%rd1]
atom.relaxed.cta.global.max.s64 %rd1, [%rd1], %rd2; = atomic global 8 [%rd1]
atom.global.inc.u32 %r1, [%rd1], %r2; = atomic global 4 [%rd1]
atom.global.cas.b16 %h1, [%rd1], %h2, %h3; = atomic global 2 [%rd1]
atom.global.add.noftz.f16 %h1, [%rd1], %h2; = atomic global 2 [%rd1]
atom.add.noftz.f16x2 %r1, [%rd1], %r2; = atomic generic 4 [%rd1]
atom.global.or.b32 _, [%rd1], %r1; = atomic global 4 [%rd1]
red.global.add.f32 [%rd1], %f1; = atomic global 4 [%rd1]
red.shared.xor.b32 [%r1+8], %r2; = atomic shared 4 [%r1+8]
red.relaxed.sys.min.u64 [%rd1], %rd2; = atomic generic 8 [%rd1]
red.global.add.noftz.f16x2 [%rd1], %r1; = atomic global 4 [%rd1]
ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r1]; = load shared 16 [%r1] /8
ldmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 {%r1, %r2}, [%r1]; = load shared 16 [%r1] /16
ldmatrix.sync.aligned.m8n8.x4.b16 {%r1, %r2, %r3, %r4}, [%rd1]; = load generic 16 [%rd1]
wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%rd1], %r9;
    = load global 16 [%rd1] 2 in a row, %r9 x 16 bits
wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%r1], {%f1, %f2, %f3, %f4, %f5, %f6, %f7, %f8};
    = store shared 16 [%r1] 4 in a row, 16 x 32 bits, store shared 16 [%r1] 4 in a row, 16 x 32 bits from row 8
wmma.load.b.sync.aligned.row.m32n8k16.s8 {%r1}, [%rd1], 32; = load generic 8 [%rd1] /16 1 in a row, 32 x 8 bits
wmma.load.a.sync.aligned.col.m32n8k16.shared.f16 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%r1];
    = load shared 16 [%r1] 4 in a row, 32 x 16 bits, load shared 16 [%r1] 4 in a row, 32 x 16 bits from row 8
wmma.load.b.sync.aligned.col.m8n8k32.global.u4 {%r1}, [%rd1], %r9; = load global 16 [%rd1] /8 1 in a row, %r9 x 4 bits
tex.1d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [picture, {%r1}]; = - tex
tld4.r.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [picture, {%f1, %f2}]; = - tld4
txq.width.b32 %r1, [picture]; =
suld.b.1d.b32.trap {%r1}, [surface, {%r1}]; = - suld
sust.b.1d.b32.trap [surface, {%r1}], {%r1}; = - sust
sured.b.add.1d.u32.trap [surface, {%r1}], %r2; = - sured
suq.width.b32 %r1, [surface]; =
prefetch.global.L1 [%rd1]; =
prefetchu.L1 [%rd1]; =
isspacep.shared %p1, %rd1; =
bar.sync 0; =
membar.gl; =
""",
    "sm_80": """
wmma.load.c.sync.aligned.col.m8n8k4.global.f64 {%fd1, %fd2}, [%rd1+64], 8; = load global 16 [%rd1+64] 4 in a row, 8 x 64 bits
ld.global.L2::cache_hint.v2.f32 {%f1, %f2}, [%rd1], %rd9; = load global 8 [%rd1]
ld.global.nc.L2::256B.L2::cache_hint.f32 %f1, [%rd1], %rd9; = load global 4 [%rd1]
st.global.L2::cache_hint.u32 [%rd1], %r1, %rd9; = store global 4 [%rd1]
atom.global.add.L2::cache_hint.u32 %r1, [%rd1], %r2, %rd9; = atomic global 4 [%rd1]
red.global.add.L2::cache_hint.f64 [%rd1], %fd1, %rd9; = atomic global 8 [%rd1]
cp.async.ca.shared.global [%r1], [%rd1], 4; = async global 4 [%rd1], async shared 4 [%r1] written
cp.async.ca.shared.global [tile+8], [%rd1+8], 8; = async global 8 [%rd1+8], async shared 8 [tile+8] written
cp.async.cg.shared::cta.global [%r1], [%rd1], 16; = async global 16 [%rd1], async shared 16 [%r1] written
cp.async.ca.shared.global [%r1], [%rd1], 8, 3; = async global 3 [%rd1], async shared 8 [%r1] written
cp.async.ca.shared.global [%r1], [%rd1], 16, 0; = async shared 16 [%r1] written
cp.async.cg.shared.global [%r1], [%rd1], 16, %r2; = async global # %r2 [%rd1], async shared 16 [%r1] written
cp.async.cg.shared.global [%r1], [%rd1], 16, %p1; = async global 16 [%rd1] unless %p1, async shared 16 [%r1] written
cp.async.ca.shared.global [%r1], [%rd1], 4, !%p2; = async global 4 [%rd1] unless !%p2, async shared 4 [%r1] written
cp.async.cg.shared.global.L2::64B [%r1], [%rd1], 16; = async global 16 [%rd1], async shared 16 [%r1] written
cp.async.ca.shared.global.L2::cache_hint [%r1], [%rd1], 4, %rd9; = async global 4 [%rd1], async shared 4 [%r1] written
cp.async.ca.shared.global.L2::cache_hint.L2::128B [%r1], [%rd1], 4, %r2, %rd9;
    = async global # %r2 [%rd1], async shared 4 [%r1] written
cp.async.cg.shared.global.L2::cache_hint [%r1], [%rd1], 16, %p1, %rd9;
    = async global 16 [%rd1] unless %p1, async shared 16 [%r1] written
cp.async.commit_group; =
cp.async.wait_group 0; =
cp.async.mbarrier.arrive.shared.b64 [%r1]; =
mbarrier.init.shared.b64 [%r1], 32; =
mbarrier.arrive.shared.b64 %rd1, [%r1]; =
createpolicy.range.global.L2::evict_last.L2::evict_unchanged.b64 %rd9, [%rd1], 4096, 8192; =
discard.global.L2 [%rd1], 128; =
applypriority.global.L2::evict_normal [%rd1], 128; =
""",
    "sm_90a": """
ld.shared::cluster.f32 %f1, [%r1]; = load shared 4 [%r1]
st.shared::cluster.v2.b32 [%r1], {%r2, %r3}; = store shared 8 [%r1]
ld.relaxed.cluster.shared::cluster.u32 %r1, [%r1]; = load shared 4 [%r1]
ld.global.b128 %q1, [%rd1]; = load global 16 [%rd1]
st.shared.b128 [%r1], %q1; = store shared 16 [%r1]
atom.shared::cluster.add.u32 %r1, [%r1], 1; = atomic shared 4 [%r1]
atom.global.cas.b128 %q1, [%rd1], %q2, %q3; = atomic global 16 [%rd1]
atom.global.exch.L2::cache_hint.b128 %q1, [%rd1], %q2, %rd9; = atomic global 16 [%rd1]
atom.shared.exch.b128 %q1, [tile], %q2; = atomic shared 16 [tile]
atom.add.noftz.bf16 %h1, [%rd1], %h2; = atomic generic 2 [%rd1]
atom.global.add.noftz.bf16x2 %r1, [%rd1], %r2; = atomic global 4 [%rd1]
atom.global.add.v2.f32 {%f1, %f2}, [%rd1], {%f3, %f4}; = atomic global 8 [%rd1]
atom.global.v4.f32.add {%f1, %f2, %f3, %f4}, [%rd1], {%f1, %f2, %f3, %f4}; = atomic global 16 [%rd1]
atom.global.max.noftz.v8.f16 {%h1, %h2, %h3, %h4, %h5, %h6, %h7, %h8}, [%rd1], {%h1, %h2, %h3, %h4, %h5, %h6, %h7, %h8};
    = atomic global 16 [%rd1]
atom.global.add.noftz.v4.bf16x2 {%r1, %r2, %r3, %r4}, [%rd1], {%r1, %r2, %r3, %r4}; = atomic global 16 [%rd1]
red.global.add.noftz.v2.f16 [%rd1], {%h1, %h2}; = atomic global 4 [%rd1]
red.global.add.L2::cache_hint.v4.f32 [%rd1], {%f1, %f2, %f3, %f4}, %rd9; = atomic global 16 [%rd1]
red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u64 [%r1], %rd1, [%r2]; = atomic shared 8 [%r1]
red.async.relaxed.cluster.mbarrier::complete_tx::bytes.inc.u32 [%rd1], %r1, [%rd2]; = atomic generic 4 [%rd1]
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r1], %r2, [%r3]; = store shared 4 [%r1]
st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r1], {%r1, %r2, %r3, %r4}, [%r5]; = store shared 16 [%r1]
st.async.mbarrier::complete_tx::bytes.v2.f64 [%rd1], {%fd1, %fd2}, [%rd2]; = store generic 16 [%rd1]
stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r2}; = store shared 16 [%r1] /8
stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [tile], {%r1, %r2, %r3, %r4}; = store shared 16 [tile]
multimem.ld_reduce.relaxed.sys.global.add.f32 %f1, [%rd1]; = load global 4 [%rd1]
multimem.ld_reduce.weak.global.min.v4.f16x2 {%r1, %r2, %r3, %r4}, [%rd1]; = load global 16 [%rd1]
multimem.ld_reduce.relaxed.gpu.add.acc::f32.v2.bf16x2 {%r1, %r2}, [%rd1]; = load generic 8 [%rd1]
multimem.st.weak.global.v4.f32 [%rd1], {%f1, %f2, %f3, %f4}; = store global 16 [%rd1]
multimem.st.release.sys.global.u64 [%rd1], %rd2; = store global 8 [%rd1]
multimem.red.relaxed.gpu.global.add.v2.f32 [%rd1], {%f1, %f2}; = atomic global 8 [%rd1]
multimem.red.release.sys.global.or.b32 [%rd1], %r1; = atomic global 4 [%rd1]
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [tile], [%rd1], %r2, [%r3];
    = async global # %r2 [%rd1], async shared # %r2 [tile] written
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 256, [%r3];
    = async global 256 [%rd1], async shared 256 [%r1] written
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%r1],[%rd1],%r2,[%r3],%h1,%rd9;
    = async global # %r2 [%rd1], async shared # %r2 [%r1] written
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r1], [%r2], 64, [%r3];
    = async shared 64 [%r2], async shared 64 [%r1] written
cp.async.bulk.global.shared::cta.bulk_group [%rd1], [tile], 128; = async shared 128 [tile], async global 128 [%rd1] written
cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%rd1], [%r1], %r2, %rd9;
    = async shared # %r2 [%r1], async global # %r2 [%rd1] written
cp.async.bulk.prefetch.L2.global [%rd1], 128; =
cp.async.bulk.commit_group; =
cp.async.bulk.wait_group.read 0; =
cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.and.b32 [%r1], [%r2], 64, [%r3];
    = async shared 64 [%r2], async shared 64 [%r1] both
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [tile], %r1;
    = async shared # %r1 [tile], async global # %r1 [%rd1] both
cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.noftz.bf16 [%rd1], [%r2], 16, %rd9;
    = async shared 16 [%r2], async global 16 [%rd1] both
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4]; = - cp.async.bulk.tensor
cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd1, {%r2}], [%r1]; = - cp.async.bulk.tensor
cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.bulk_group [%rd1, {%r2}], [%r1]; = - cp.reduce.async.bulk.tensor
cp.async.bulk.prefetch.tensor.1d.L2.global [%rd1, {%r2}]; =
tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r1], %rd1; = - tensormap.replace
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd1], [%r1], 128; = - tensormap.cp_fenceproxy
fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128; =
mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0; =
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 1, 1, 0, 0; = - wgmma.mma_async
wgmma.mma_async.sp.sync.aligned.m64n8k64.s32.s8.u8 {%r1, %r2, %r3, %r4}, %rd1, %rd2, %r5, 0, %p1; = - wgmma.mma_async
mma.sp.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r1, %r2}, {%r3, %r4}, {%r5, %r6}, {%r1, %r2}, %r7, 0; =
wgmma.commit_group.sync.aligned; =
""",
    "sm_100a": """
ld.global.v8.f32 {%f1, %f2, %f3, %f4, _, _, _, %f8}, [%rd1]; = load global 32 [%rd1]
ld.global.v4.b64 {%rd1, %rd2, _, %rd4}, [%rd1]; = load global 32 [%rd1]
ld.global.nc.L1::evict_last.L2::evict_first.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%rd1]; = load global 32 [%rd1]
ld.global.L2::cache_hint.f32 %f1, [%rd1].unified, %rd9; = load global 4 [%rd1].unified
st.global.v8.b32 [%rd1], {%r1, %r2, _, %r4, %r5, %r6, %r7, %r8}; = store global 32 [%rd1]
st.bulk.weak.shared::cta [%r1], %rd1, 0; = store shared # %rd1 [%r1]
st.bulk [%rd1], 4096, 0; = store generic 4096 [%rd1]
st.async.mmio.release.sys.global.u32 [%rd1], %r1; = store global 4 [%rd1]
red.async.mmio.release.sys.global.add.u32 [%rd1], %r1; = atomic global 4 [%rd1]
multimem.ld_reduce.weak.global.add.acc::f16.v4.e4m3x4 {%r1, %r2, %r3, %r4}, [%rd1]; = load global 16 [%rd1]
multimem.ld_reduce.weak.global.min.e5m2x4 %r1, [%rd1]; = load global 4 [%rd1]
ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r1, %r2}, [%r1]; = load shared 16 [%r1] /16
ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {%r1, %r2, %r3, %r4}, [%r1]; = load shared 16 [%r1]
ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {%r1}, [%r1]; = load shared 16 [%r1] /8
ldmatrix.sync.aligned.m16n16.x1.trans.shared::cta.b8x16.b6x16_p32 {%r1, %r2}, [%r1]; = load shared 16 [%r1] /16
stmatrix.sync.aligned.m16n8.x2.trans.shared.b8 [%r1], {%r1, %r2}; = store shared 16 [%r1] /16
cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd1], [%r1], %r2, %h1;
    = async shared # %r2 [%r1], async global # %r2 [%rd1] written
clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1], [%r2]; = - clusterlaunchcontrol.try_cancel
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32; = store shared 4 [%r1] /1
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r2]; = - tcgen05.ld
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r1}; = - tcgen05.st
tcgen05.cp.cta_group::1.128x256b [%r1], %rd1; = - tcgen05.cp
tcgen05.shift.cta_group::1.down [%r1]; = - tcgen05.shift
tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1; = - tcgen05.mma
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1]; =
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32; =
tcgen05.wait::ld.sync.aligned; =
""",
}

ROWS = [
    (sm, instruction.strip() + ";", expected.strip())
    for sm, text in FORMS.items()
    for instruction, _, expected in (
        line.partition("; =") for line in text.strip().replace("\n    =", " =").splitlines()
    )
]


def module(sm: str, instructions: str) -> str:
    return f""".version 9.0
.target {sm}
.address_size 64
.global .texref picture;
.global .surfref surface;
.const .align 8 .b8 table[64];
.global .f32 floats[64];
.visible .entry k(.param .u64 a) {{
.reg .pred %p<4>;
.reg .b16 %h<9>;
.reg .b32 %r<10>;
.reg .b64 %rd<10>;
.reg .f32 %f<9>;
.reg .f64 %fd<9>;
{".reg .b128 %q<4>;" if sm not in ("sm_75", "sm_80") else ""}
.shared .align 128 .b8 tile[1024];
.shared .v2 .u32 pairs[8];
{instructions}
ret;
}}
"""


BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "s8": 8, "b1": 1}  # of wgmma


def parsed(sm: str, text: str) -> PtxInstruction:
    (found, _) = (
        s for s in parse(module(sm, text)).functions["k"].body or () if isinstance(s, PtxInstruction)
    )
    return found


def written_out(access: Access) -> str:
    size = f"# {access.size}" if access.size is not None else str(access.width)
    text = f"{access.kind} {access.space} {size} {access.address}"
    if access.unless is not None:
        text += f" unless {access.unless}"
    if access.lanes != 32:
        text += f" /{access.lanes}"
    if access.rows is not None:
        rows = access.rows
        text += f" {rows.per_row} in a row, {rows.stride} x {rows.bits} bits"
        text += f" from row {rows.first}" if rows.first else ""
    if access.kind == "async" and access.writes:
        text += " both" if access.reads else " written"
    return text


@pytest.mark.parametrize("sm", FORMS)
def test_ptxas_takes_every_form(sm: str, tmp_path: Path) -> None:
    text = "\n".join(instruction for of, instruction, _ in ROWS if of == sm)
    for name, source in (("written", module(sm, text)), ("rendered", render(parse(module(sm, text))))):
        (tmp_path / f"{name}.ptx").write_text(source)
        command = [need("ptxas"), "-c", "-O0", "-arch", sm, "-o", "/dev/null", tmp_path / f"{name}.ptx"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("sm", "text", "expected"), ROWS, ids=[text for _, text, _ in ROWS])
def test_what_a_form_accesses(sm: str, text: str, expected: str) -> None:
    instruction = parsed(sm, text)
    found = ", ".join(map(written_out, accesses(instruction)))
    name = unprobed(instruction)
    assert (f"- {name}" if name else found) == expected
    assert not (name and found)


@pytest.mark.parametrize(("sm", "text", "expected"), ROWS, ids=[text for _, text, _ in ROWS])
def test_the_kinds_of_work_agree(sm: str, text: str, expected: str) -> None:
    """What `--work` counts as a load, store or atomic is one here."""
    instruction = parsed(sm, text)
    work = set(counted(instruction)) - {"barriers"}
    found = accesses(instruction)
    for access in found:
        assert (access.kind == "async") == (instruction.opcode == "cp")
        assert access.kind == "async" or access.reads == (access.kind in ("load", "atomic"))
        assert access.kind == "async" or access.writes == (access.kind in ("store", "atomic"))
    if any(a.reads and a.writes for a in found):
        assert work == {"atomics"}
    elif found and instruction.opcode == "cp":
        assert work == {"loads", "stores"}
    elif found:
        assert work == {"load": {"loads"}, "store": {"stores"}}[found[0].kind]
    elif work:
        assert expected.startswith("- ")


def test_a_declaration_tells_a_predicate_from_a_size() -> None:
    copy = parsed("sm_80", "cp.async.cg.shared.global [%r1], [%rd1], 16, %r2;")
    source, _ = accesses(copy, lambda name: name == "%r2")
    assert (source.width, source.size, str(source.unless)) == (16, None, "%r2")
    copy = parsed("sm_80", "cp.async.cg.shared.global [%r1], [%rd1], 16, %p1;")
    source, _ = accesses(copy, lambda name: False)
    assert (source.width, str(source.size), source.unless) == (0, "%p1", None)


@pytest.mark.parametrize(
    ("text", "space"),
    [
        ("ld.u32 %r1, [tile+4];", "shared"),
        ("st.volatile.v2.u32 [tile], {%r1, %r1};", "shared"),
        ("atom.add.u32 %r1, [tile+8], 1;", "shared"),
        ("red.add.u32 [mine+8], 1;", "local"),
        ("ld.u32 %r1, [words];", "global"),
        ("ld.u32 %r1, [%rd1];", "generic"),
        ("ld.u32 %r1, [tile2];", "generic"),
    ],
)
def test_a_name_tells_the_space_of_its_variable(text: str, space: str) -> None:
    spaces = {"tile": "shared", "mine": "local", "words": "global", "%rd1": "reg"}
    (found,) = accesses(parsed("sm_80", text), declared_in=lambda name: spaces.get(name, ""))
    assert found.space == space


@pytest.mark.parametrize(
    "text",
    [
        "ld.global.nosuch %r1, [%rd1];",  # no type that is known
        "ldx.global.u32 %r1, [%rd1];",
        "cp.async.ca.shared [%r1], [%rd1], 4;",
        "cp.async.bulk.shared::cta.global [%r1], [%rd1];",
        "ldmatrix.sync.aligned.m8n8.shared.b16 {%r1}, [%r1];",
        "multimem.other.global.u32 %r1, [%rd1];",
        "wmma.load.a.sync.aligned.row.m99999n16k16.global.f16 {%r1}, [%rd1];",
        "wmma.load.a.sync.aligned.row.m8n8k4.global.b1 {%r1}, [%rd1];",
    ],
)
def test_what_is_not_known_is_named(text: str) -> None:
    instruction = parsed("sm_100a", text)
    assert accesses(instruction) == ()
    assert unprobed(instruction) == text.split()[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tex.1d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [%rd1, {%r1}];", ("load", "texture", 16, True, False)),
        (
            "tex.level.2d.v2.f16x2.f32 {%r1, %r2}, [%rd1, {%f1, %f2}], %f3;",
            ("load", "texture", 8, True, False),
        ),
        (
            "tex.2d.v4.u32.f32 {%r1, %r2, %r3, %r4}|%p1, [%rd1, {%f1, %f2}];",
            ("load", "texture", 16, True, False),
        ),
        (
            "tld4.r.2d.v4.s32.f32 {%r1, %r2, %r3, %r4}, [%rd1, {%f1, %f2}];",
            ("load", "texture", 16, True, False),
        ),
        ("suld.b.1d.v2.b8.trap {%h1, %h2}, [%rd1, {%r1}];", ("load", "surface", 2, True, False)),
        (
            "sust.p.2d.v4.b32.zero [%rd1, {%r1, %r2}], {%r1, %r2, %r3, %r4};",
            ("store", "surface", 16, False, True),
        ),
        ("sured.b.add.2d.u64.clamp [%rd1, {%r1, %r2}], %rd2;", ("atomic", "surface", 8, True, True)),
    ],
)
def test_accesses_to_textures_and_surfaces(text: str, expected: tuple[str, str, int, bool, bool]) -> None:
    instruction = parsed("sm_80", text)
    (found,) = unaddressed_accesses(instruction)
    assert (found.kind, found.space, found.width, found.reads, found.writes) == expected
    assert accesses(instruction) == () and unprobed(instruction) == text.partition(".")[0]


@pytest.mark.parametrize(
    ("text", "width"),
    [
        # Bytes of A (64 rows of K) and B (K rows of N) in shared memory, divided by 128 threads. A may be in registers.
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1}, %rd1, %rd2, 1, 1, 1, 0, 0;", 16 + 2),
        ("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, 1, 1, 1, 0, 0;", 16 + 64),
        (
            "wgmma.mma_async.sync.aligned.m64n24k16.f32.f16.f16 {%f1}, {%r1, %r2, %r3, %r4}, %rd2, 1, 1, 1, 0;",
            6,
        ),
        ("wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%f1}, %rd1, %rd2, 1, 1, 1;", 16 + 2),
        ("wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e5m2 {%f1}, %rd1, %rd2, 1, 1, 1;", 16 + 4),
        ("wgmma.mma_async.sync.aligned.m64n16k256.s32.b1.b1.and.popc {%r1}, %rd1, %rd2, 1;", 16 + 4),
        ("wgmma.mma_async.sp.sync.aligned.m64n8k64.s32.s8.u8 {%r1}, %rd1, %rd2, %r5, 0, %p1;", 16 + 4),
    ],
)
def test_bytes_of_wgmma(text: str, width: int) -> None:
    instruction = parsed("sm_90a", text)
    (found,) = unaddressed_accesses(instruction)
    assert (found.kind, found.space, found.reads, found.writes) == ("load", "tensor", True, False)
    shape = re.search(r"m64n([0-9]+)k([0-9]+)\..32\.([a-z0-9]+)", text)
    assert shape is not None
    n, k, bits = int(shape[1]), int(shape[2]), BITS[shape[3]]
    stored = 0 if text.count("{") > 1 else 64 * k // (2 if ".sp." in text else 1)
    assert found.width == width == (stored + k * n) * bits / 8 / 128


def test_tensor_copies_have_unknown_bytes() -> None:
    for text in (
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];",
        "cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd1, {%r2}], [%r1];",
        "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.bulk_group [%rd1, {%r2}], [%r1];",
    ):
        (found,) = unaddressed_accesses(parsed("sm_90", text))
        assert (found.kind, found.space, found.width, found.reads, found.writes) == (
            "async",
            "tensor",
            0,
            True,
            True,
        )
    prefetch = parsed("sm_90", "cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%rd1, {%r1}];")
    assert unaddressed_accesses(prefetch) == () and unprobed(prefetch) is None


@pytest.mark.parametrize(
    ("text", "kind", "width"),
    [
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r2];", "load", 4),
        ("tcgen05.ld.sync.aligned.16x256b.x1.pack::16b.b32 {%r1, %r2, %r3, %r4}, [%r5];", "load", 16),
        ("tcgen05.ld.sync.aligned.16x32bx2.x2.b32 {%r1, %r2}, [%r5], 2;", "load", 8),
        ("tcgen05.st.sync.aligned.16x128b.x1.b32 [%r1], {%r2, %r3};", "store", 8),
        ("tcgen05.st.sync.aligned.16x32bx2.x1.b32 [%r1], 2, {%r2};", "store", 4),
        ("tcgen05.cp.cta_group::1.128x256b [%r1], %rd1;", "async", 4096),
        ("tcgen05.cp.cta_group::2.4x256b [%r1], %rd1;", "async", 128),
        ("tcgen05.cp.cta_group::1.64x128b.warpx2::02_13 [%r1], %rd1;", "async", 1024),
        ("tcgen05.cp.cta_group::1.32x128b.warpx4.b8x16.b4x16_p64 [%r1], %rd1;", "async", 512),
        ("tcgen05.shift.cta_group::1.down [%r1];", "async", 31 * 32),
        ("tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, %p1;", "async", 0),
        ("tcgen05.mma.ws.sp.cta_group::1.kind::i8 [%r1], [%r2], %rd2, [%r4], %r3, %p1;", "async", 0),
    ],
)
def test_tensor_memory(text: str, kind: str, width: int) -> None:
    """Loads and stores have the bytes of a lane's registers; copies have those that one thread moves."""
    instruction = parsed("sm_100a", text)
    (found,) = unaddressed_accesses(instruction)
    assert (found.kind, found.space, found.width) == (kind, "tmem", width)
    assert (found.reads, found.writes) == (kind != "store", kind != "load")


def test_other_instructions_access_no_texture() -> None:
    for text in ("ld.global.u32 %r1, [%rd1];", "txq.width.b32 %r1, [%rd1];", "add.u32 %r1, %r1, 1;"):
        assert unaddressed_accesses(parsed("sm_80", text)) == ()


def test_what_accesses_no_byte_is_no_access() -> None:
    instruction = parsed("sm_100a", "st.bulk [%rd1], 0, 0;")
    assert accesses(instruction) == () and unprobed(instruction) is None

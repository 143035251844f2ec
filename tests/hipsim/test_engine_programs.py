"""hipsim's engine beyond single instructions: memory, atomics, barriers, functions, waves that wait for others, faults."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hipsim_engine import GPUS, Engine, assemble, kernel, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1

# What most kernels begin with: s[8:9], s[10:11] and s[12:13] are the first arguments, v1 is 4 × the work-item's number.
BEGIN = """
    s_load_dwordx4 s[8:11], s[0:1], 0x0
    s_load_dwordx2 s[12:13], s[0:1], 0x10
    s_lshl_b32 s3, s2, 6
    v_add_u32 v1, s3, v0
    v_lshlrev_b32 v1, 2, v1
    s_waitcnt lgkmcnt(0)
"""

LOADS = {  # name → bytes, result from the bytes and the old register
    "ubyte": (1, lambda m, old: m[0]),
    "sbyte": (1, lambda m, old: int.from_bytes(m[:1], "little", signed=True)),
    "ushort": (2, lambda m, old: int.from_bytes(m[:2], "little")),
    "sshort": (2, lambda m, old: int.from_bytes(m[:2], "little", signed=True)),
    "dword": (4, lambda m, old: int.from_bytes(m[:4], "little")),
    "ubyte_d16": (1, lambda m, old: old & 0xFFFF0000 | m[0]),
    "ubyte_d16_hi": (1, lambda m, old: old & 0xFFFF | m[0] << 16),
    "sbyte_d16": (1, lambda m, old: old & 0xFFFF0000 | int.from_bytes(m[:1], "little", signed=True) & 0xFFFF),
    "sbyte_d16_hi": (
        1,
        lambda m, old: old & 0xFFFF | (int.from_bytes(m[:1], "little", signed=True) & 0xFFFF) << 16,
    ),
    "short_d16": (2, lambda m, old: old & 0xFFFF0000 | int.from_bytes(m[:2], "little")),
    "short_d16_hi": (2, lambda m, old: old & 0xFFFF | int.from_bytes(m[:2], "little") << 16),
}
LDS_NAMES = {"ubyte": "u8", "sbyte": "i8", "ushort": "u16", "sshort": "i16", "dword": "b32", "ubyte_d16": "u8_d16",
             "ubyte_d16_hi": "u8_d16_hi", "sbyte_d16": "i8_d16", "sbyte_d16_hi": "i8_d16_hi", "short_d16": "u16_d16",
             "short_d16_hi": "u16_d16_hi"}  # fmt: skip


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


# name in memory and in LDS → new value of the old one and the data
ATOMICS: dict[tuple[str, str], Callable[[int, int, int], int]] = {
    ("swap", "wrxchg_rtn_b"): lambda old, d, n: d,
    ("add", "add_rtn_u"): lambda old, d, n: old + d,
    ("sub", "sub_rtn_u"): lambda old, d, n: old - d,
    ("smin", "min_rtn_i"): lambda old, d, n: min(signed(old, n), signed(d, n)),
    ("smax", "max_rtn_i"): lambda old, d, n: max(signed(old, n), signed(d, n)),
    ("umin", "min_rtn_u"): lambda old, d, n: min(old, d),
    ("umax", "max_rtn_u"): lambda old, d, n: max(old, d),
    ("and", "and_rtn_b"): lambda old, d, n: old & d,
    ("or", "or_rtn_b"): lambda old, d, n: old | d,
    ("xor", "xor_rtn_b"): lambda old, d, n: old ^ d,
    ("inc", "inc_rtn_u"): lambda old, d, n: 0 if old >= d else old + 1,
    ("dec", "dec_rtn_u"): lambda old, d, n: d if old == 0 or old > d else old - 1,
    ("", "rsub_rtn_u"): lambda old, d, n: d - old,
}


# Atomics of floats, which CDNA2 has: name → name in LDS, kind of the data, new value of the old one and the data.
FLOAT_ATOMICS: dict[str, tuple[str, str, Callable[[float, float], float]]] = {
    "add_f64": ("ds_add_rtn_f64", "f64", lambda old, d: old + d),
    "min_f64": ("ds_min_rtn_f64", "f64", min),
    "max_f64": ("ds_max_rtn_f64", "f64", max),
    "add_f32": ("ds_add_rtn_f32", "f32", lambda old, d: old + d),
    "pk_add_f16": ("", "f16", lambda old, d: old + d),
}


# A descriptor that gives its kernel scratch: s[0:3], s[4:5] for the kernarg segment, s[6:7], and the wave's offset behind them.
OWN_SCRATCH = """    .amdhsa_user_sgpr_private_segment_buffer 1
    .amdhsa_user_sgpr_kernarg_segment_ptr 1
    .amdhsa_user_sgpr_flat_scratch_init 1
    .amdhsa_system_sgpr_private_segment_wavefront_offset 1"""


def cdna2_kernels() -> dict[str, str]:
    """Give the texts of kernels for gfx90a alone: data in AGPRs, atomics of floats, packed work-item IDs."""
    made: dict[str, str] = {}
    start = (
        BEGIN + "v_lshlrev_b32 v2, 3, v0\n global_load_dwordx2 a[4:5], v2, s[10:11]\n s_waitcnt vmcnt(0)\n"
    )
    for name, (lds, kind, _) in FLOAT_ATOMICS.items():
        pair = (lambda n: f"[{n}:{n + 1}]") if kind == "f64" else (lambda n: str(n))
        address = "v_mov_b32 v7, s9\n v_add_co_u32 v6, vcc, s8, v2\n v_addc_co_u32 v7, vcc, 0, v7, vcc\n"
        store = "s_waitcnt vmcnt(0) lgkmcnt(0)\n global_store_dwordx2 v2, a[6:7], s[12:13]\n"
        store = "v_accvgpr_write_b32 a7, 0\n" * (kind != "f64") + store
        descriptor = "s_movk_i32 s10, 0x200\n s_mov_b32 s11, 0x27000\n"
        body = {
            "global": f"global_atomic_{name} a{pair(6)}, v2, a{pair(4)}, s[8:9] glc\n",
            "buffer": f"{descriptor} v_accvgpr_mov_b32 a6, a4\n v_accvgpr_mov_b32 a7, a5\n"
            + f"buffer_atomic_{name} a{pair(6)}, v2, s[8:11], 0 offen glc\n",
        }
        if kind == "f64":
            body["flat"] = address + f"flat_atomic_{name} a{pair(6)}, v[6:7], a{pair(4)} glc\n"
        if lds:
            body["lds"] = (
                "global_load_dwordx2 a[8:9], v2, s[8:9]\n s_waitcnt vmcnt(0)\n ds_write_b64 v2, a[8:9]\n"
                + f"{lds} a{pair(6)}, v2, a{pair(4)}\n ds_read_b64 a[8:9], v2\n s_waitcnt lgkmcnt(0)\n"
                + "global_store_dwordx2 v2, a[8:9], s[8:9]\n"
            )
        for space, text in body.items():
            made[f"float_{space}_{name}"] = kernel(
                f"float_{space}_{name}", start + text + store, lds=512, gpu="gfx90a"
            )
    # 16 bytes of each lane through AGPRs and through each kind of memory: a → LDS → scratch → b, and by two ways on.
    made["agpr_memory"] = kernel("agpr_memory", """
    s_add_u32 flat_scratch_lo, s6, s9
    s_addc_u32 flat_scratch_hi, s7, 0
    s_add_u32 s0, s0, s9
    s_addc_u32 s1, s1, 0
    s_load_dwordx4 s[8:11], s[4:5], 0x0
    s_load_dwordx2 s[12:13], s[4:5], 0x10
    v_lshlrev_b32 v2, 4, v0
    s_waitcnt lgkmcnt(0)
    v_mov_b32 v7, s9
    v_add_co_u32 v6, vcc, s8, v2
    v_addc_co_u32 v7, vcc, 0, v7, vcc
    flat_load_dwordx4 a[0:3], v[6:7]
    s_waitcnt 0
    ds_write2_b64 v2, a[0:1], a[2:3] offset1:1
    s_waitcnt lgkmcnt(0)
    ds_read2_b32 a[4:5], v2 offset1:2
    ds_read_b32 a6, v2 offset:4
    ds_read_u16 a7, v2 offset:12
    ds_read_u16_d16_hi a7, v2 offset:14
    s_waitcnt lgkmcnt(0)
    buffer_store_dword a4, off, s[0:3], 0 offset:4
    v_mov_b32 v9, 8
    scratch_store_dwordx2 v9, a[6:7], off
    buffer_load_dword a11, off, s[0:3], 0 offset:4
    scratch_load_dwordx2 a[8:9], v9, off
    s_waitcnt vmcnt(0)
    v_accvgpr_mov_b32 a10, a5
    global_store_dwordx4 v2, a[8:11], s[10:11]
    v_mov_b32 v7, s13
    v_add_co_u32 v6, vcc, s12, v2
    v_addc_co_u32 v7, vcc, 0, v7, vcc
    flat_store_short v[6:7], a10
    flat_store_byte_d16_hi v[6:7], a10 offset:2
    s_mov_b64 s[16:17], s[12:13]
    s_movk_i32 s18, 0x400
    s_mov_b32 s19, 0x27000
    buffer_store_dwordx3 a[8:10], v2, s[16:19], 0 offen offset:4
""", lds=1024, scratch=64, gpu="gfx90a").replace("    .amdhsa_user_sgpr_kernarg_segment_ptr 1", OWN_SCRATCH)  # fmt: skip
    made["split"] = kernel("split", "s_nop 0\n", lds=1024, gpu="gfx90a").replace(
        "    .amdhsa_acc", "    .amdhsa_tg_split 1\n    .amdhsa_acc"
    )
    made["packed_ids"] = kernel("packed_ids", BEGIN + """
    v_and_b32 v2, 0x3ff, v0
    v_bfe_u32 v3, v0, 10, 10
    v_bfe_u32 v4, v0, 20, 10
    v_mul_u32_u24 v5, 12, v4
    v_mad_u32_u24 v5, v3, 4, v5
    v_add_u32 v5, v5, v2
    v_lshlrev_b32 v5, 2, v5
    global_store_dword v5, v0, s[8:9]
""", gpu="gfx90a").replace("    .amdhsa_next", "    .amdhsa_system_vgpr_workitem_id 2\n    .amdhsa_next", 1)  # fmt: skip
    return made


def kernels(gpu: str) -> dict[str, str]:
    """Give the kernels' texts."""
    made: dict[str, str] = {}

    def add(name: str, body: str, lds: int = 0, scratch: int = 0) -> None:
        made[name] = kernel(name, body, lds, scratch, gpu)

    # Loads: from a + offset of the lane (in b); the result to c.
    start = (
        BEGIN
        + """
    global_load_dword v2, v1, s[10:11]
    v_mov_b32 v4, 0x1234abcd
    s_waitcnt vmcnt(0)
    """
    )
    store = "s_waitcnt 0\n global_store_dword v1, v4, s[12:13]\n"
    for name, lds in LDS_NAMES.items():
        add(f"global_{name}", start + f"global_load_{name} v4, v2, s[8:9] offset:12\n" + store)
        flat = "v_mov_b32 v7, s9\n v_add_co_u32 v6, vcc, s8, v2\n v_addc_co_u32 v7, vcc, 0, v7, vcc\n"
        add(f"flat_{name}", start + flat + f"flat_load_{name} v4, v[6:7] offset:12\n" + store)
        add(f"buffer_{name}", start + "s_mov_b32 s10, 1024\n s_mov_b32 s11, 0x27000\n"
            + f"buffer_load_{name} v4, v2, s[8:11], 0 offen offset:12\n" + store)  # fmt: skip
        # Through LDS: every wave copies 1 KiB of a, 16 bytes for each lane.
        copy = "v_lshlrev_b32 v8, 4, v0\n global_load_dwordx4 v[12:15], v8, s[8:9]\n s_waitcnt vmcnt(0)\n ds_write_b128 v8, v[12:15]\n"
        add(f"lds_{name}", start + copy + f"s_waitcnt 0\n ds_read_{lds} v4, v2 offset:12\n" + store, lds=1024)
        copy = "v_lshlrev_b32 v8, 4, v0\n global_load_dwordx4 v[12:15], v8, s[8:9]\n s_waitcnt vmcnt(0)\n"
        add(f"aperture_{name}", start + copy + "ds_write_b128 v8, v[12:15]\n s_waitcnt 0\n"
            + f"s_mov_b64 s[20:21], src_shared_base\n v_mov_b32 v7, s21\n v_mov_b32 v6, v2\n flat_load_{name} v4, v[6:7] offset:12\n"
            + store, lds=1024)  # fmt: skip
    for words in (2, 3, 4):
        add(f"wide_{words}", start + f"global_load_dwordx{words} v[4:{3 + words}], v2, s[8:9]\n"
            + "v_mul_u32_u24 v3, 4, v1\n s_waitcnt 0\n" + f"global_store_dwordx{words} v3, v[4:{3 + words}], s[12:13]\n")  # fmt: skip

    # Stores: data from a, to c + offset of the lane (in b).
    start = (
        BEGIN + "global_load_dword v2, v1, s[10:11]\n global_load_dword v4, v1, s[8:9]\n s_waitcnt vmcnt(0)\n"
    )
    for name in ("byte", "short", "dword", "byte_d16_hi", "short_d16_hi"):
        add(f"global_store_{name}", start + f"global_store_{name} v2, v4, s[12:13]\n")

    # Atomics: each lane on its own place, which is chosen by b; the old value to c. Data is the lane's number × 0x1000003.
    for bits in (32, 64):
        suffix = "_x2" if bits == 64 else ""
        pair = (lambda n: f"v[{n}:{n + 1}]") if bits == 64 else (lambda n: f"v{n}")
        scale = 3 if bits == 64 else 2
        start = (
            BEGIN
            + f"""
    v_lshlrev_b32 v3, {scale}, v0
    global_load_dwordx2 v[4:5], v3, s[10:11]
    s_waitcnt vmcnt(0)
    """
        )
        width = "dwordx2" if bits == 64 else "dword"
        for memory, lds in ATOMICS:
            if memory:
                add(f"atomic_{memory}_{bits}", start + f"global_atomic_{memory}{suffix} {pair(6)}, v3, {pair(4)}, s[8:9] glc\n"
                    + f"s_waitcnt vmcnt(0)\n global_store_{width} v3, {pair(6)}, s[12:13]\n")  # fmt: skip
            add(f"ds_{lds}{bits}", start + f"global_load_{width} {pair(8)}, v3, s[8:9]\n s_waitcnt vmcnt(0)\n"
                + f"ds_write_b{bits} v3, {pair(8)}\n"
                + f"s_waitcnt 0\n ds_{lds}{bits} {pair(6)}, v3, {pair(4)}\n s_waitcnt 0\n"
                + f"ds_read_b{bits} {pair(8)}, v3\n s_waitcnt 0\n"
                + f"global_store_{width} v3, {pair(8)}, s[8:9]\n global_store_{width} v3, {pair(6)}, s[12:13]\n", lds=512)  # fmt: skip

    # All work-items add to one counter, and swap by comparison.
    add(
        "count",
        BEGIN
        + "v_mov_b32 v2, 0\n v_mov_b32 v3, 1\n global_atomic_add v2, v3, s[8:9]\n global_atomic_add v4, v2, v3, s[10:11] glc\n",
    )
    add(
        "compare_swap",
        BEGIN
        + """
    v_mov_b32 v2, 0
again:
    global_load_dword v5, v2, s[8:9]
    s_waitcnt vmcnt(0)
    v_add_u32 v4, 1, v5
    global_atomic_cmpswap v6, v2, v[4:5], s[8:9] glc
    s_waitcnt vmcnt(0)
    v_cmp_ne_u32 vcc, v6, v5
    s_and_b64 exec, exec, vcc
    s_cbranch_execnz again
""",
    )

    # The sum of a workgroup of four waves by a tree in LDS.
    add(
        "tree",
        BEGIN
        + """
    s_lshl_b32 s3, s2, 8
    v_add_u32 v1, s3, v0
    v_lshlrev_b32 v1, 2, v1
    global_load_dword v2, v1, s[8:9]
    v_lshlrev_b32 v3, 2, v0
    s_waitcnt vmcnt(0)
    ds_write_b32 v3, v2
    s_movk_i32 s4, 0x80
loop:
    s_waitcnt lgkmcnt(0)
    s_barrier
    v_cmp_gt_u32 vcc, s4, v0
    s_and_saveexec_b64 s[6:7], vcc
    s_lshl_b32 s5, s4, 2
    v_add_u32 v4, s5, v3
    ds_read_b32 v5, v4
    ds_read_b32 v6, v3
    s_waitcnt lgkmcnt(0)
    v_add_u32 v5, v5, v6
    ds_write_b32 v3, v5
    s_mov_b64 exec, s[6:7]
    s_lshr_b32 s4, s4, 1
    s_cmp_lg_u32 s4, 0
    s_cbranch_scc1 loop
    s_waitcnt lgkmcnt(0)
    s_barrier
    v_cmp_eq_u32 vcc, 0, v0
    s_and_saveexec_b64 s[6:7], vcc
    v_mov_b32 v4, 0
    ds_read_b32 v5, v4
    s_lshl_b32 s5, s2, 2
    v_mov_b32 v4, s5
    s_waitcnt lgkmcnt(0)
    global_store_dword v4, v5, s[10:11]
""",
        lds=1024,
    )

    # LDS accesses whose address, in v4, is 64 bytes before the place that offsets reach: negative in most lanes.
    add(
        "negative_base",
        BEGIN
        + """
    v_lshlrev_b32 v3, 2, v0
    v_add_u32 v2, 1, v0
    ds_write_b32 v3, v2
    v_mov_b32 v2, 0
    ds_write_b32 v3, v2 offset:256
    v_subrev_u32 v4, 64, v3
    s_waitcnt lgkmcnt(0)
    s_barrier
    ds_read_b32 v5, v4 offset:64
    ds_read2_b32 v[6:7], v4 offset0:16 offset1:16
    ds_add_u32 v4, v0 offset:320
    ds_write2_b32 v4, v0, v0 offset0:144 offset1:144
    ds_add_rtn_u32 v8, v4, v0 offset:64
    s_waitcnt lgkmcnt(0)
    s_barrier
    ds_read_b32 v9, v3 offset:256
    ds_read_b32 v10, v3 offset:512
    s_waitcnt lgkmcnt(0)
    v_add_u32 v5, v5, v6
    v_add3_u32 v5, v5, v7, v8
    v_add3_u32 v5, v5, v9, v10
    global_store_dword v1, v5, s[8:9]
""",
        lds=1024,
    )

    # Each workgroup waits until all of them have come: they must all make progress.
    add(
        "grid_barrier",
        BEGIN
        + """
    v_mov_b32 v2, 0
    v_mov_b32 v3, 1
    s_mov_b64 exec, 1
    global_atomic_add v2, v3, s[8:9]
wait:
    global_load_dword v4, v2, s[8:9] glc
    s_waitcnt vmcnt(0)
    v_readfirstlane_b32 s4, v4
    s_cmp_lt_u32 s4, s10
    s_cbranch_scc1 wait
""",
    )

    # Two waves of one workgroup: the second waits for what the first writes at its end.
    add(
        "wave_waits",
        BEGIN
        + """
    v_mov_b32 v2, 0
    v_readfirstlane_b32 s4, v0
    s_cmp_lg_u32 s4, 0
    s_cbranch_scc0 second
first:
    global_load_dword v4, v2, s[8:9] glc
    s_waitcnt vmcnt(0)
    v_readfirstlane_b32 s5, v4
    s_cmp_eq_u32 s5, 0
    s_cbranch_scc1 first
    s_endpgm
second:
    s_sleep 1
    v_mov_b32 v3, 7
    global_store_dword v2, v3, s[8:9]
""",
    )

    # Scratch by swizzled buffer, by FLAT through the aperture, and by SCRATCH: all see the same words.
    made["scratch"] = scratch_kernel(gpu)
    # Function calls: by s_getpc and s_swappc, and by s_call.
    add(
        "calls",
        BEGIN
        + """
    v_mov_b32 v4, 1
    s_getpc_b64 s[20:21]
    s_add_u32 s20, s20, function@rel32@lo+4
    s_addc_u32 s21, s21, function@rel32@hi+12
    s_swappc_b64 s[30:31], s[20:21]
    s_call_b64 s[30:31], function
    global_store_dword v1, v4, s[12:13]
    s_endpgm
function:
    v_mul_u32_u24 v4, 3, v4
    v_add_u32 v4, v4, v0
    s_setpc_b64 s[30:31]
""",
    )
    # What follows a call is code only if the function returns. Compilers put nothing after a call of one that does not.
    for name, end in ("never_returns", "s_endpgm"), ("returns_to_nothing", "s_setpc_b64 s[30:31]"):
        add(
            name,
            BEGIN
            + f"""
    s_getpc_b64 s[20:21]
    s_add_u32 s20, s20, {name}_function@rel32@lo+4
    s_addc_u32 s21, s21, {name}_function@rel32@hi+12
    s_swappc_b64 s[30:31], s[20:21]
    v_mov_b32 v4, 8
    .long 0xd3ff0000
    .long 0
{name}_function:
    s_cbranch_execz 1
    s_nop 0
    {"v_mov_b32 v4, 7" if name == "never_returns" else "v_mov_b32 v4, 0"}
    global_store_dword v1, v4, s[12:13]
    {end}
""",
        )
    add(
        "clock",
        BEGIN
        + """
    s_memtime s[20:21]
    s_nop 0
    s_nop 0
    s_memrealtime s[22:23]
    s_waitcnt lgkmcnt(0)
    s_sub_u32 s24, s22, s20
    v_mov_b32 v4, s20
    v_mov_b32 v5, s24
    s_lshl_b32 s3, s2, 3
    v_mov_b32 v1, s3
    global_store_dwordx2 v1, v[4:5], s[8:9]
""",
    )
    # Work-item and workgroup numbers of a grid whose last workgroups are smaller.
    packed = "v_bfe_u32 v1, v0, 10, 10\n v_bfe_u32 v2, v0, 20, 10\n v_and_b32 v0, 0x3ff, v0\n"
    made["shape"] = kernel("shape", packed * (gpu == "gfx90a") + """
    s_load_dwordx2 s[8:9], s[0:1], 0x0
    v_mov_b32 v5, s2
    v_mov_b32 v6, s3
    s_waitcnt lgkmcnt(0)
    s_mul_i32 s5, s2, 5
    v_add_u32 v7, s5, v0
    s_mul_i32 s6, s3, 4
    v_add_u32 v8, s6, v1
    s_mul_i32 s7, s4, 3
    v_add_u32 v9, s7, v2
    v_mul_u32_u24 v9, 6, v9
    v_add_u32 v9, v9, v8
    v_mul_u32_u24 v9, 12, v9
    v_add_u32 v9, v9, v7
    v_lshlrev_b32 v9, 2, v9
    v_mov_b32 v10, 1
    global_atomic_add v9, v10, s[8:9]
""", gpu=gpu).replace("    .amdhsa_next_free_vgpr", "    .amdhsa_system_sgpr_workgroup_id_y 1\n"
             "    .amdhsa_system_sgpr_workgroup_id_z 1\n"
             "    .amdhsa_system_vgpr_workitem_id 2\n    .amdhsa_next_free_vgpr")  # fmt: skip

    # Faults.
    add("stray", BEGIN + "v_mov_b32 v2, 0x10\n v_mov_b32 v3, 0\n global_load_dword v4, v[2:3], off\n")
    add("beyond", BEGIN + "global_store_dword v1, v0, s[8:9] offset:4092\n")
    add("scalar_stray", "s_mov_b64 s[4:5], 64\n s_load_dword s6, s[4:5], 0x0\n")
    add("misaligned", BEGIN + "v_mov_b32 v2, 2\n global_atomic_add v2, v0, s[8:9]\n")
    for aperture in ("shared", "private"):
        below = f"""
    s_mov_b64 s[20:21], src_{aperture}_base
    s_sub_u32 s21, s21, 1
    v_mov_b32 v7, s21
    v_mov_b32 v6, -4
"""
        add(f"folded_load_{aperture}", below + "flat_load_dword v4, v[6:7] offset:4\n", 64, 64)
        add(f"folded_store_{aperture}", below + "flat_store_dword v[6:7], v0 offset:4\n", 64, 64)
        add(f"folded_atomic_{aperture}", below + "flat_atomic_add v[6:7], v0 offset:4\n", 64, 64)
    add("trap", "s_trap 2\n")
    add("image", ".long 0xf09c0100\n .long 0x610101\n")
    add("unknown", "v_mov_b32 v0, 0\n s_cbranch_scc1 later\n s_endpgm\nlater:\n .long 0xd3ff0000\n .long 0\n")
    add(
        "unsupported",
        BEGIN
        + "global_store_dword v1, v0, s[8:9]\n s_cbranch_execnz past\n ds_append v1 offset:4 gds\npast:\n s_nop 0\n",
    )
    add("into_the_void", "s_mov_b64 s[4:5], 0\n s_setpc_b64 s[4:5]\n")
    add(
        "no_end",
        "s_branch after\n.long 0x12345678\nafter:\n s_getpc_b64 s[4:5]\n"
        "s_add_u32 s4, s4, 0x100000\n s_addc_u32 s5, s5, 0\n s_setpc_b64 s[4:5]\n",
    )
    return made


def scratch_kernel(gpu: str) -> str:
    return kernel("scratch", """
    s_load_dwordx2 s[12:13], s[4:5], 0x0
    s_add_u32 flat_scratch_lo, s6, s9
    s_addc_u32 flat_scratch_hi, s7, 0
    s_add_u32 s0, s0, s9
    s_addc_u32 s1, s1, 0
    v_lshlrev_b32 v1, 4, v0
    v_add_u32 v2, 100, v0
    v_add_u32 v3, 200, v0
    buffer_store_dword v2, off, s[0:3], 0 offset:4
    buffer_store_dword v3, off, s[0:3], 0 offset:8
    buffer_load_dword v4, off, s[0:3], 0 offset:4
    s_mov_b64 s[20:21], src_private_base
    v_mov_b32 v7, s21
    v_mov_b32 v6, 4
    flat_load_dword v5, v[6:7] offset:4
    v_mov_b32 v6, 5
    flat_load_ubyte v8, v[6:7]
    v_mov_b32 v9, 4
    scratch_load_dwordx2 v[10:11], v9, off
    s_waitcnt 0
    v_lshl_add_u32 v8, v8, 16, v11
    v_mov_b32 v6, v10
    v_mov_b32 v7, v8
    global_store_dwordx4 v1, v[4:7], s[12:13]
""", scratch=64, gpu=gpu).replace("    .amdhsa_user_sgpr_kernarg_segment_ptr 1", OWN_SCRATCH)  # fmt: skip


@pytest.fixture(
    scope="module", params=["", "plain", "hostile", pytest.param("gfx90a", marks=pytest.mark.long)]
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The engine with the CPU's widest vectors, with the narrowest, with random time slices, and for another GPU."""
    place = tmp_path_factory.mktemp("programs")
    gpu = request.param if request.param in GPUS else GPUS[0]
    started = Engine(place, {"HIPSIM_VECTORS": request.param} if request.param == "plain" else None, gpu)
    started.load(assemble("".join(kernels(gpu).values()), place, gpu))
    if request.param == "hostile":
        started.send("set hostile 12345")
    yield started
    started.close()


def run(engine: Engine, name: str, *arguments: str, items: int = 64, group: int = 64) -> None:
    outcome = engine.run(name, arguments, (items, 1, 1), (group, 1, 1))
    assert outcome.fault is None, outcome.fault


@pytest.fixture(scope="module")
def cdna2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    place = tmp_path_factory.mktemp("cdna2")
    started = Engine(place, gpu="gfx90a")
    started.load(assemble("".join(cdna2_kernels().values()), place, "gfx90a"))
    yield started
    started.close()


@pytest.mark.parametrize("which", [name for name in cdna2_kernels() if name.startswith("float_")])
def test_atomics_of_floats(cdna2: Engine, which: str) -> None:
    """Each lane has 8 bytes of its own; sums of the numbers here are exact, so only denormals need a rule."""
    _, space, name = which.split("_", 2)
    _, kind, new = FLOAT_ATOMICS[name]
    numpy_kind = {"f64": np.float64, "f32": np.float32, "f16": np.float16}[kind]
    generator = np.random.default_rng(5)
    old, data = (
        generator.integers(-1000, 1000, 512 // np.dtype(numpy_kind).itemsize).astype(numpy_kind) / 4
        for _ in "ab"
    )
    of_lane = 8 // np.dtype(numpy_kind).itemsize
    tiny = np.finfo(numpy_kind).smallest_subnormal
    old[0], data[0] = tiny * 5, tiny * 2
    old[of_lane], data[of_lane] = np.finfo(numpy_kind).tiny, -tiny
    old[2 * of_lane], data[2 * of_lane] = np.inf, 1
    for buffer, content in (("a", old), ("b", data), ("c", np.zeros_like(old))):
        cdna2.put(buffer, content)
    run(cdna2, which, "a", "b", "c")
    changed = 2 if kind == "f16" else 1  # numbers of a lane that are changed
    wanted = old.copy()
    for n in range(len(old)):
        if n % of_lane < changed:
            flushes = kind == "f32" and space != "lds"  # the cache's single precision has no denormals
            a, d = (
                numpy_kind(0) if flushes and abs(x) < np.finfo(numpy_kind).tiny else x
                for x in (old[n], data[n])
            )
            wanted[n] = new(a, d)
    assert list(cdna2.get("a", numpy_kind)) == list(wanted)
    returned = [old[n] if n % of_lane < changed else 0 for n in range(len(old))]
    assert list(cdna2.get("c", numpy_kind)) == returned


def test_memory_of_agprs(cdna2: Engine) -> None:
    words = np.random.default_rng(6).integers(0, 1 << 32, 256, dtype=np.uint32)
    for name, content in (
        ("a", words),
        ("b", np.zeros(256, dtype=np.uint32)),
        ("c", np.zeros(256, dtype=np.uint32)),
    ):
        cdna2.put(name, content)
    run(cdna2, "agpr_memory", "a", "b", "c")
    lanes = words.reshape(64, 4)
    assert (cdna2.get("b", np.uint32).reshape(64, 4) == lanes[:, [1, 3, 2, 0]]).all()
    got = cdna2.get("c", np.uint32).reshape(64, 4)
    assert (got[:, 1:] == lanes[:, [1, 3, 2]]).all()
    assert (got[:, 0] == lanes[:, 2] & 0xFFFFFF).all()


def test_no_lds_where_workgroups_are_split(cdna2: Engine) -> None:
    fault = cdna2.run("split", (), (64, 1, 1), (64, 1, 1)).fault
    assert fault is not None and "LDS in threadgroup split mode" in fault


def test_packed_work_item_ids(cdna2: Engine) -> None:
    cdna2.put("a", np.zeros(24, dtype=np.uint32))
    outcome = cdna2.run("packed_ids", ("a", "a", "a"), (4, 3, 2), (4, 3, 2))
    assert outcome.fault is None, outcome.fault
    wanted = [x | y << 10 | z << 20 for z in range(2) for y in range(3) for x in range(4)]
    assert list(cdna2.get("a", np.uint32)) == wanted


@pytest.mark.parametrize("space", ["global", "flat", "buffer", "lds", "aperture"])
@pytest.mark.parametrize("name", LOADS)
def test_loads(engine: Engine, space: str, name: str) -> None:
    generator = random.Random(name)
    memory = bytes(generator.getrandbits(8) for _ in range(1024))
    size, value = LOADS[name]
    offsets = [generator.randrange(0, 1000, size) for _ in range(64)]
    engine.put("a", np.frombuffer(memory, dtype=np.uint8))
    engine.put("b", np.array(offsets, dtype=np.uint32))
    engine.put("c", np.zeros(64, dtype=np.uint32))
    run(engine, f"{space}_{name}", "a", "b", "c")
    got = [int(x) for x in engine.get("c", np.uint32)]
    assert got == [value(memory[o + 12 : o + 16], 0x1234ABCD) & MASK32 for o in offsets]


@pytest.mark.parametrize("words", [2, 3, 4])
def test_wide_loads_and_stores(engine: Engine, words: int) -> None:
    memory = np.random.default_rng(words).integers(0, 1 << 32, 256, dtype=np.uint32)
    offsets = np.random.default_rng(9).permutation(64).astype(np.uint32) * 12
    engine.put("a", memory)
    engine.put("b", offsets)
    engine.put("c", np.zeros(256, dtype=np.uint32))
    run(engine, f"wide_{words}", "a", "b", "c")
    got = engine.get("c", np.uint32).reshape(64, 4)
    for lane in range(64):
        first = offsets[lane] // 4
        assert list(got[lane, :words]) == list(memory[first : first + words])
        assert not got[lane, words:].any()


def test_buffer_bounds(engine: Engine) -> None:
    """A load outside of a buffer gives 0."""
    engine.put("a", np.full(1024, 0x11, dtype=np.uint8))
    engine.put("b", np.array([1000, 1008, 1009, 1012, 5000, MASK32 - 100] + [0] * 58, dtype=np.uint32))
    engine.put("c", np.zeros(64, dtype=np.uint32))
    run(engine, "buffer_dword", "a", "b", "c")
    assert list(engine.get("c", np.uint32)[:6]) == [0x11111111, 0x11111111, 0, 0, 0, 0]


@pytest.mark.parametrize("name", ["byte", "short", "dword", "byte_d16_hi", "short_d16_hi"])
def test_stores(engine: Engine, name: str) -> None:
    data = np.random.default_rng(3).integers(0, 1 << 32, 64, dtype=np.uint32)
    places = np.random.default_rng(4).permutation(64).astype(np.uint32) * 4
    engine.put("a", data)
    engine.put("b", places)
    engine.put("c", np.full(64, 0xEEEEEEEE, dtype=np.uint32))
    run(engine, f"global_store_{name}", "a", "b", "c")
    got = engine.get("c", np.uint32)
    bits = {"b": 8, "s": 16, "d": 32}[name[0]]
    for lane in range(64):
        value = int(data[lane]) >> (16 if name.endswith("hi") else 0)
        mask = (1 << bits) - 1
        assert int(got[places[lane] // 4]) == 0xEEEEEEEE & ~mask | value & mask


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("names", ATOMICS)
def test_atomics(engine: Engine, names: tuple[str, str], bits: int) -> None:
    kind = np.uint32 if bits == 32 else np.uint64
    generator = random.Random(f"{names}{bits}")
    some = [0, 1, (1 << bits) - 1, 1 << (bits - 1), 5, 6]
    old = [generator.choice(some) if n % 2 else generator.getrandbits(bits) for n in range(64)]
    data = [generator.choice(some) if n % 3 else generator.getrandbits(bits) for n in range(64)]
    for name in ([f"atomic_{names[0]}_{bits}"] if names[0] else []) + [f"ds_{names[1]}{bits}"]:
        engine.put("a", np.array(old, dtype=kind))
        engine.put(
            "b", np.array([*data, 0], dtype=kind)
        )  # 32-bit lanes load the next lane's data with theirs
        engine.put("c", np.zeros(64, dtype=kind))
        run(engine, name, "a", "b", "c")
        assert [int(x) for x in engine.get("c", kind)] == old
        wanted = [ATOMICS[names](o, d, bits) & ((1 << bits) - 1) for o, d in zip(old, data, strict=True)]
        assert [int(x) for x in engine.get("a", kind)] == wanted


def test_counters_of_many_workgroups(engine: Engine) -> None:
    for name in ("a", "b"):
        engine.put(name, np.zeros(1, dtype=np.uint32))
    run(engine, "count", "a", "b", "b", items=64 * 100)
    assert engine.get("a", np.uint32)[0] == engine.get("b", np.uint32)[0] == 6400
    engine.put("a", np.zeros(1, dtype=np.uint32))
    run(engine, "compare_swap", "a", "b", "b", items=64 * 20)
    assert engine.get("a", np.uint32)[0] == 1280


def test_barriers(engine: Engine) -> None:
    values = np.arange(256 * 7, dtype=np.uint32) * 3 + 1
    engine.put("a", values)
    engine.put("b", np.zeros(7, dtype=np.uint32))
    run(engine, "tree", "a", "b", "b", items=256 * 7, group=256)
    assert list(engine.get("b", np.uint32)) == list(values.reshape(7, 256).sum(axis=1))


def test_lds_addresses_may_be_negative_before_the_offset_is_added(engine: Engine) -> None:
    engine.put("a", np.zeros(64, dtype=np.uint32))
    run(engine, "negative_base", "a", "a", "a")
    assert list(engine.get("a", np.uint32)) == [4 * (lane + 1) + 2 * lane for lane in range(64)]


def test_workgroups_that_wait_for_each_other(engine: Engine) -> None:
    engine.put("a", np.zeros(1, dtype=np.uint32))
    run(engine, "grid_barrier", "a", "u64 40", "a", items=64 * 40)
    assert engine.get("a", np.uint32)[0] == 40


def test_waves_that_wait_for_each_other(engine: Engine) -> None:
    engine.put("a", np.zeros(1, dtype=np.uint32))
    run(engine, "wave_waits", "a", "a", "a", items=128, group=128)
    assert engine.get("a", np.uint32)[0] == 7


def test_scratch(engine: Engine) -> None:
    engine.put("a", np.zeros(64 * 4 * 4, dtype=np.uint32))
    run(engine, "scratch", "a")
    got = engine.get("a", np.uint32).reshape(-1, 4)
    for lane in range(64):
        second = 200 + lane
        assert got[lane, 0] == 100 + lane
        assert got[lane, 1] == second
        assert got[lane, 2] == 100 + lane
        assert got[lane, 3] == (((100 + lane) >> 8 & 0xFF) << 16) + second


def test_calls(engine: Engine) -> None:
    engine.put("c", np.zeros(64, dtype=np.uint32))
    run(engine, "calls", "c", "c", "c")
    assert list(engine.get("c", np.uint32)) == [(3 + lane) * 3 + lane for lane in range(64)]


def test_a_call_that_does_not_return(engine: Engine) -> None:
    engine.put("c", np.zeros(64, dtype=np.uint32))
    run(engine, "never_returns", "c", "c", "c")
    assert list(engine.get("c", np.uint32)) == [7] * 64


def test_shape_of_partial_workgroups(engine: Engine) -> None:
    """12 × 6 × 7 work-items in workgroups of 5 × 4 × 3: each runs once."""
    engine.put("a", np.zeros(12 * 6 * 7, dtype=np.uint32))
    outcome = engine.run("shape", ("a",), (12, 6, 7), (5, 4, 3))
    assert outcome.fault is None, outcome.fault
    assert (engine.get("a", np.uint32) == 1).all()


def test_virtual_clock(engine: Engine) -> None:
    engine.send("set virtual 1")
    ends = set()
    for _ in range(3):
        engine.put("a", np.zeros(8, dtype=np.uint32))
        outcome = engine.run("clock", ("a", "a", "a"), (256, 1, 1), (64, 1, 1))
        times = engine.get("a", np.uint32).reshape(4, 2)
        assert len(set(times[:, 0])) == 1  # every workgroup starts when the kernel starts
        assert set(times[:, 1]) == {3}  # 1 ns for each instruction
        ends.add(outcome.end_ns)
    engine.send("set virtual 0")
    assert len(ends) == 1 and ends.pop() == outcome.instructions // 4


FAULTS = {
    "stray": (1, "load of 4 bytes at 0x10, which is not mapped to the device"),
    "beyond": (1, "store of 4 bytes"),
    "scalar_stray": (1, "load of 4 bytes at 0x40"),
    "misaligned": (1, "not aligned"),
    # The aperture test ignores the instruction's constant.
    "folded_load_shared": (1, "load of 4 bytes at 0x1000000000000, which is not mapped to the device"),
    "folded_store_shared": (1, "store of 4 bytes at 0x1000000000000"),
    "folded_atomic_shared": (1, "4 bytes at 0x1000000000000"),
    "folded_load_private": (1, "load of 4 bytes at 0x2000000000000"),
    "folded_store_private": (1, "store of 4 bytes at 0x2000000000000"),
    "folded_atomic_private": (1, "4 bytes at 0x2000000000000"),
    "trap": (3, "trap 2, as of abort()"),
    "image": (2, "image instruction (hipsim has no images) 0xf09c0100"),
    "unknown": (2, "unknown instruction 0xd3ff0000"),
    "unsupported": (2, "unsupported instruction ds_append"),
    "into_the_void": (2, "jump to 0x0: no code"),
    "no_end": (2, "no code"),
    "returns_to_nothing": (2, "unknown instruction 0xd3ff0000"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(engine: Engine, name: str) -> None:
    engine.put("a", np.zeros(1024, dtype=np.uint32))
    outcome = engine.run(name, ("a", "a", "a"), (64, 1, 1), (64, 1, 1))
    assert outcome.fault is not None
    kind, text = FAULTS[name]
    assert outcome.fault.startswith(f"{kind} ") and text in outcome.fault
    assert not engine.get("a", np.uint32).any()  # the unsupported one is found before its kernel stores


@pytest.mark.parametrize("group", [(0, 1, 1), (2048, 1, 1)])
def test_bad_launches(engine: Engine, group: tuple[int, int, int]) -> None:
    engine.put("a", np.zeros(4, dtype=np.uint32))
    assert engine.run("calls", ("a",), (64, 1, 1), group).fault is not None
    assert engine.run("calls", ("a",), (64, 1, 1), (64, 1, 1), lds=1 << 20).fault is not None


@pytest.mark.parametrize(
    ("changes", "body", "text"),
    [
        ({"next_free_vgpr 64": "next_free_vgpr 8"}, "v_mov_b32 v8, 1", "register v8 of a wave that has 8"),
        ({"next_free_vgpr 64": "next_free_vgpr 8"}, "v_mov_b32 v7, 1", None),
        ({"next_free_vgpr 64": "next_free_vgpr 8"}, "v_add_f64 v[0:1], v[2:3], v[7:8]", "register v8"),
        ({"next_free_vgpr 64": "next_free_vgpr 8"}, "global_load_dwordx4 v[5:8], v[0:1], off", "register v8"),
        ({"next_free_sgpr 96": "next_free_sgpr 8"}, "s_mov_b32 s16, 1", "register s16 of a wave that has 16"),
        ({"next_free_sgpr 96": "next_free_sgpr 8"}, "s_load_dwordx2 s[16:17], s[0:1], 0x0", "register s17"),
        ({"next_free_sgpr 96": "next_free_sgpr 8"}, "v_mov_b32 v1, s15", None),
    ],
)
def test_registers_that_a_wave_does_not_have(
    tmp_path: Path, changes: dict[str, str], body: str, text: str | None
) -> None:
    source = kernel("few", f"    s_cbranch_execz end\n    {body}\nend:")
    for old, new in changes.items():
        assert old in source
        source = source.replace(old, new)
    engine = Engine(tmp_path)
    engine.load(assemble(source, tmp_path))
    outcome = engine.run("few", (), (64, 1, 1), (64, 1, 1))
    engine.close()
    assert outcome.fault is None if text is None else text in (outcome.fault or "")


def test_a_kernel_begins_at_a_multiple_of_256(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.load(
        assemble(kernel("moved", "    s_nop 0").replace(".p2align 8", ".p2align 8\n.fill 4, 4, 0"), tmp_path)
    )
    outcome = engine.run("moved", (), (64, 1, 1), (64, 1, 1))
    engine.close()
    assert "not at a multiple of 256" in (outcome.fault or "")


def test_workgroups_are_on_different_compute_units(tmp_path: Path) -> None:
    for gpu, register in (("gfx906", "HW_REG_HW_ID, 8, 7"), ("gfx1030", "HW_REG_HW_ID1, 10, 4")):
        wave = "" if gpu == "gfx906" else ".amdhsa_wavefront_size32 0"
        text = kernel(
            "where",
            f"    s_load_dwordx2 s[4:5], s[0:1], 0x0\n    s_getreg_b32 s6, hwreg({register})\n    v_mov_b32 v1, s6\n"
            "    s_lshl_b32 s7, s2, 2\n    v_mov_b32 v2, s7\n    s_waitcnt lgkmcnt(0)\n    global_store_dword v2, v1, s[4:5]",
            gpu=gpu,
        ).replace(".amdhsa_ieee_mode", f"{wave}\n    .amdhsa_ieee_mode")  # fmt: skip
        engine = Engine(tmp_path, gpu=gpu)
        features = "+wavefrontsize64" if wave else ""
        engine.load(assemble(text, tmp_path, gpu, features))
        engine.put("a", np.zeros(8, np.uint32))
        assert engine.run("where", ("a",), (8, 1, 1), (1, 1, 1)).fault is None
        found = set(engine.get("a", np.uint32).tolist())
        engine.close()
        assert len(found) == (8 if gpu == "gfx906" else 4)  # GFX10 numbers pairs of compute units


def test_overflow_of_halves_is_refused_where_it_is_switched_on(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.load(assemble(kernel("mode", "    s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1"), tmp_path))
    outcome = engine.run("mode", (), (64, 1, 1), (64, 1, 1))
    engine.close()
    assert "FP16_OVFL is not supported" in (outcome.fault or "")

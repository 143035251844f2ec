"""Each instruction of gfx1030 on hipsim's engine, in waves of 32 and of 64 lanes, against an evaluation of its own.

What GFX9 has, too, is tested with GFX9's cases; those of GFX10 alone follow them.
"""

import dataclasses
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hipsim_engine import Engine, kernel, missing
from hipsim_gfx10 import (
    GPU,
    WAVES,
    assemble_for,
    cases_of_gfx9,
    existing,
    kernel_of,
    stem,
    translated,
    with_waves,
)
from hipsim_values import F16, F32, F64

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

gfx9 = cases_of_gfx9("test_engine_instructions")
scalar = cases_of_gfx9("test_engine_scalar")
Case = gfx9.Case
MASK32, OLD, LANES = gfx9.MASK32, gfx9.OLD, gfx9.LANES
HIGH = OLD & 0xFFFF0000  # the other half of the destination
MARK = 0x0DDBA11  # in the register after a mask of 32 lanes

# Results of 16 bits leave the other half of the register alone; GFX9 clears it in these.
HALVES = re.compile(
    r"v_(add|sub|subrev|mul_lo|lshlrev|lshrrev|ashrrev|min|max)_[uib]16|v_frexp_exp_i16_f16|v_cvt_[ui]16_f16"
)
# GFX10 shifts and broadcasts rows in another way, and has no GPR index mode.
GONE = {
    "v_mad_f32",
    "v_mac_f32",
    "v_madak_f32",
    "v_madmk_f32",
    "v_subrev_u16",
    "v_sat_pk_u8_i16",
    "gpr index",
}
GONE_COMPARISONS = re.compile(r"v_cmp_[ft]_[ui]16")


def of_gfx10() -> dict[str, Case]:
    """Give GFX9's cases that look at one lane."""
    found = {}
    for name, case in gfx9.CASES.items():
        gone = name in GONE or GONE_COMPARISONS.fullmatch(name)
        if gone or case.result.startswith("wave") or "gfx906" not in case.gpus:
            continue
        reference = case.reference
        if HALVES.match(name) and "sdwa" not in name:
            reference = lambda *s, f=case.reference: f(*s) & 0xFFFF | HIGH  # noqa: E731
        found[name] = dataclasses.replace(case, reference=reference)
    return found


CASES = of_gfx10()


def add(
    name: str, sources: str, result: str, reference: Callable[..., object], text: str, **more: int
) -> None:
    assert name not in CASES
    CASES[name] = Case(text, tuple(sources.split()), result, reference, **more)


def pair(x: int) -> tuple[int, int]:
    return x & 0xFFFF, x >> 16


def legacy(a: int, b: int, c: int) -> int:
    if F32.is_zero(a) or F32.is_zero(b):
        return gfx9.sum_of(F32, 0, c)
    return gfx9.fused(F32, a, b, c)


def new_cases() -> None:
    fused, total, product = gfx9.fused, gfx9.sum_of, gfx9.product
    add("v_xor3_b32", "u32 u32 u32", "u32", lambda a, b, c: a ^ b ^ c, "v_xor3_b32 v10, v4, v6, v8")
    pi, half_pi = 0x40490FDB, 0x3E48
    add(
        "v_fmaak_f32",
        "f32 f32",
        "f32",
        lambda a, b: fused(F32, a, b, pi),
        f"v_fmaak_f32 v10, v4, v6, {pi:#x}",
    )
    add(
        "v_fmamk_f32",
        "f32 f32",
        "f32",
        lambda a, b: fused(F32, a, pi, b),
        f"v_fmamk_f32 v10, v4, {pi:#x}, v6",
    )
    add(
        "v_fmaak_f16",
        "f16 f16",
        "f16",
        lambda a, b: fused(F16, a, b, half_pi),
        f"v_fmaak_f16 v10, v4, v6, {half_pi:#x}",
    )
    add(
        "v_fmamk_f16",
        "f16 f16",
        "f16",
        lambda a, b: fused(F16, a, half_pi, b),
        f"v_fmamk_f16 v10, v4, {half_pi:#x}, v6",
    )
    # The third source is the destination, whose other half stays.
    old = f"v_and_b32 v10, 0xffff, v8\n v_or_b32 v10, {HIGH:#x}, v10\n "
    add(
        "v_fmac_f16",
        "f16 f16 f16",
        "f16",
        lambda a, b, c: fused(F16, a, b, c),
        old + "v_fmac_f16 v10, v4, v6",
    )
    add("v_fma_legacy_f32", "f32 f32 f32", "f32", legacy, "v_fma_legacy_f32 v10, v4, v6, v8")
    add(
        "v_fmac_legacy_f32", "f32 f32 f32", "f32", legacy, "v_mov_b32 v10, v8\n v_fmac_legacy_f32 v10, v4, v6"
    )
    add("v_pk_fmac_f16", "u32 u32 u32", "pair_f16",
        lambda *s: tuple(fused(F16, *halves) for halves in zip(*map(pair, s), strict=True)),
        "v_mov_b32 v10, v8\n v_pk_fmac_f16 v10, v4, v6")  # fmt: skip
    add("v_dot4c_i32_i8", "u32 u32 u32", "u32", lambda a, b, c: gfx9.dot(a, b, c, 4, 1),
        "v_mov_b32 v10, v8\n v_dot4c_i32_i8 v10, v4, v6")  # fmt: skip
    # Halves from small integers, so that the sum is exact however it is made.
    small = "v_bfe_i32 v{0}, v{0}, 0, 8\n v_cvt_f32_i32 v{0}, v{0}\n v_cvt_pkrtz_f16_f32 v{0}, v{0}, v{0}\n "
    add("v_dot2c_f32_f16", "u32 u32", "f32", lambda a, b: F32.from_double(2.0 * gfx9.signed(a, 8) * gfx9.signed(b, 8) + 3),
        small.format(4) + small.format(6) + "v_mov_b32 v10, 0x40400000\n v_dot2c_f32_f16 v10, v4, v6")  # fmt: skip
    # Literals in VOP3 and VOP3P, and two SGPRs.
    add(
        "v_fma_f32 literal",
        "f32 f32",
        "f32",
        lambda a, b: fused(F32, a, pi, b),
        f"v_fma_f32 v10, v4, {pi:#x}, v6",
    )
    add(
        "v_add_f64 literal",
        "f64",
        "f64",
        lambda a: total(F64, a, 0x40490FDB << 32),
        f"v_add_f64 v[10:11], v[4:5], {pi:#x}",
    )
    add("v_cmp literal", "u32", "mask", lambda a: a < 0x12345678, "v_cmp_gt_u32_e64 s[20:21], 0x12345678, v4")
    add("v_pk_mul_f16 literal", "u32", "pair_f16",
        lambda a: (product(F16, a & 0xFFFF, 0x3E48), product(F16, a >> 16, 0x4100)),
        "v_pk_mul_f16 v10, v4, 0x41003e48")  # fmt: skip
    add("v_add3_u32 sgprs", "u32", "u32", lambda a: a + 0x123 + 0x456,
        "s_movk_i32 s104, 0x123\n s_movk_i32 s105, 0x456\n v_add3_u32 v10, s104, v4, s105")  # fmt: skip
    # The null register is 0, and keeps nothing; the register after it is EXEC.
    add("null", "u32 u32", "u64", lambda a, b: a * b,
        "s_mov_b32 null, 7\n s_mov_b64 null, 7\n v_cmp_eq_u32_e64 null, v4, v4\n"
        " v_mad_u64_u32 v[10:11], null, v4, v6, 0\n v_add_co_u32 v12, null, v4, v6\n"
        " v_add_nc_u32 v10, null, v10\n v_or_b32 v11, null, v11")  # fmt: skip
    # op_sel of a half.
    add("v_add_nc_u16 op_sel", "u32 u32", "u32", lambda a, b: (((a >> 16) + (b & 0xFFFF)) & 0xFFFF) << 16 | OLD & 0xFFFF,
        "v_add_nc_u16 v10, v4, v6 op_sel:[1,0,1]")  # fmt: skip
    for clamped, low, high, f in (
        ("u16", 0, 0xFFFF, lambda x: x),
        ("i16", -0x8000, 0x7FFF, lambda x: gfx9.signed(x, 16)),
    ):
        add(f"v_sub_nc_{clamped} clamp", "u16 u16", "u32", text=f"v_sub_nc_{clamped} v10, v4, v6 clamp",
            reference=lambda a, b, f=f, m=low, n=high: gfx9.clamp(f(a) - f(b), m, n) & 0xFFFF | HIGH)  # fmt: skip
    # Modes: a round mode, and no denormals in single precision.
    add(
        "s_round_mode",
        "f32 f32",
        "f32",
        lambda a, b: total(F32, a, b, gfx9.UP),
        "s_round_mode 0x1\n v_add_f32 v10, v4, v6",
    )
    add("s_denorm_mode", "f32 f32", "f32", lambda a, b: F32.flush(product(F32, F32.flush(a), F32.flush(b))),
        "s_denorm_mode 12\n v_mul_f32 v10, v4, v6")  # fmt: skip
    # Comparisons into EXEC alone.
    before = "s_mov_b32 vcc_lo, 5\n s_mov_b32 vcc_hi, 0\n "
    compare = before + "v_cmpx_{0} {1}, {2}\n v_mov_b32 v10, 1\n s_mov_b64 exec, -1\n"
    compare += "v_add_u32 v10, vcc_lo, v10\n v_subrev_u32 v10, 5, v10"
    for name, kind, f in (
        ("lt_u32", "u32", lambda a, b: a < b),
        ("ge_i64", "u64", lambda a, b: gfx9.signed(a, 64) >= gfx9.signed(b, 64)),
        ("nlt_f32", "f32", lambda a, b: not F32.to_double(a) < F32.to_double(b)),
    ):
        operands = [gfx9.register(n, kind) for n in (4, 6)]
        add(f"v_cmpx_{name}", f"{kind} {kind}", "u32", lambda a, b, f=f: 1 if f(a, b) else OLD,
            compare.format(name, *operands))  # fmt: skip
    add("v_cmpx_class_f32", "f32 u32", "u32", lambda a, b: 1 if gfx9.class_of(F32, a, b) else OLD,
        compare.format("class_f32", "v4", "v6"))  # fmt: skip
    # Registers whose number M0 changes.
    for name, m0, text in (
        ("v_movrels_b32", 2, "v_movrels_b32 v10, v4"),
        ("v_movreld_b32", 2, "v_movreld_b32 v8, v6"),
        ("v_movrelsd_b32", 2, "v_movrelsd_b32 v8, v4"),
        ("v_movrelsd_2_b32", 3 << 16 | 2, "v_movrelsd_2_b32 v7, v4"),
        ("v_swaprel_b32", 3 << 16 | 2, "v_swaprel_b32 v7, v4\n v_mov_b32 v12, v6\n v_xor_b32 v12, v12, v8"),
    ):
        add(name, "u32 u32", "u32", lambda a, b: b, f"s_mov_b32 m0, {m0:#x}\n {text}")
    add("v_movrels_b32 dpp", "u32 u32", "u32", lambda a, b: b,
        "s_mov_b32 m0, 2\n v_movrels_b32_dpp v10, v4 quad_perm:[0,1,2,3] row_mask:0xf bank_mask:0xf")  # fmt: skip


def lane_cases(lanes: int) -> dict[str, tuple[str, Callable[[list[int], list[int]], list[int]]]]:
    """Instructions that look at other lanes: text, and the results of a wave from its sources."""
    made: dict[str, tuple[str, Callable[[list[int], list[int]], list[int]]]] = {}
    whole = "s_mov_b32 exec_lo, -1" if lanes == 32 else "s_mov_b64 exec, -1"
    some = 0xF3C1_5A96_7E18_C3F0 & ((1 << lanes) - 1)  # lanes that are active
    active = [bool(some >> i & 1) for i in range(lanes)]
    choose = f"s_mov_b32 exec_lo, {some & MASK32:#x}\n s_mov_b32 exec_hi, {some >> 32:#x}\n "
    controls: dict[str, Callable[[int], int | None]] = {
        "quad_perm:[3,1,0,2]": lambda i: (i & ~3) + (3, 1, 0, 2)[i & 3],
        "row_shl:3": lambda i: i + 3 if i % 16 + 3 < 16 else None,
        "row_shr:1": lambda i: i - 1 if i % 16 else None,
        "row_ror:5": lambda i: i // 16 * 16 + (i % 16 - 5) % 16,
        "row_mirror": lambda i: i // 16 * 16 + 15 - i % 16,
        "row_half_mirror": lambda i: i // 8 * 8 + 7 - i % 8,
        "row_share:7": lambda i: i // 16 * 16 + 7,
        "row_xmask:13": lambda i: i ^ 13,
    }
    for control, of in controls.items():
        for row, bank, bound, fetch in (
            (15, 15, 0, 0),
            (15, 15, 1, 0),
            (10, 15, 0, 1),
            (15, 6, 1, 0),
            (15, 15, 1, 1),
        ):
            text = f"v_add_nc_u32_dpp v10, v4, v6 {control} row_mask:{row:#x} bank_mask:{bank:#x}"
            text += " bound_ctrl:0" * bound + " fi:1" * fetch

            def wave(a: list[int], b: list[int], of: Callable[[int], int | None] = of, row: int = row, bank: int = bank,
                     bound: int = bound, fetch: int = fetch) -> list[int]:  # fmt: skip
                result = [OLD & MASK32] * lanes
                for i in range(lanes):
                    source = of(i)
                    valid = source is not None and (fetch or active[source])
                    if active[i] and row >> i // 16 & 1 and bank >> i // 4 % 4 & 1 and (valid or bound):
                        result[i] = (a[source] if valid and source is not None else 0) + b[i] & MASK32
                return result

            made[f"dpp {control} {row} {bank} {bound} {fetch}"] = f"{choose}{text}\n {whole}", wave
    eight = [7, 0, 6, 1, 5, 2, 4, 3]
    made["dpp8"] = (
        f"v_add_nc_u32_dpp v10, v4, v6 dpp8:{eight}",
        lambda a, b: [a[(i & ~7) + eight[i & 7]] + b[i] & MASK32 for i in range(lanes)],
    )
    made["dpp8 fi"] = (
        f"{choose}v_mov_b32_dpp v10, v4 dpp8:{eight} fi:1\n {whole}",
        lambda a, b: [a[(i & ~7) + eight[i & 7]] if active[i] else OLD & MASK32 for i in range(lanes)],
    )
    selectors = 0x0F1E2D3C4B5A6978
    scalars = f"s_mov_b32 s22, {selectors & MASK32:#x}\n s_mov_b32 s23, {selectors >> 32:#x}\n "
    for name, across in (("permlane16", 0), ("permlanex16", 16)):
        for fetch, bound in ((0, 0), (1, 0), (0, 1), (1, 1)):

            def permuted(
                a: list[int], b: list[int], across: int = across, fetch: int = fetch, bound: int = bound
            ) -> list[int]:
                result = [OLD & MASK32] * lanes
                for i in range(lanes):
                    source = (i & ~15 ^ across) + (selectors >> 4 * (i & 15) & 15)
                    if active[i] and (fetch or active[source]):
                        result[i] = a[source]
                    elif active[i] and bound:
                        result[i] = 0
                return result

            text = f"v_{name}_b32 v10, v4, s22, s23 op_sel:[{fetch},{bound}]"
            made[f"v_{name}_b32 {fetch} {bound}"] = f"{scalars}{choose}{text}\n {whole}", permuted
    index = 37 % lanes
    made["v_readlane_b32"] = (
        "v_readlane_b32 s22, v4, 37\n v_mov_b32 v10, s22",
        lambda a, b: [a[index]] * lanes,
    )
    made["v_writelane_b32"] = (
        "v_writelane_b32 v10, 33, 41",
        lambda a, b: [33 if i == 41 % lanes else OLD & MASK32 for i in range(lanes)],
    )
    first = active.index(True)
    made["v_readfirstlane_b32"] = (
        f"{choose}v_readfirstlane_b32 s22, v4\n {whole}\n v_mov_b32 v10, s22",
        lambda a, b: [a[first]] * lanes,
    )
    bits = 0xF0F0F0F0_12345678
    made["v_mbcnt"] = (
        f"s_mov_b32 s22, {bits & MASK32:#x}\n s_mov_b32 s23, {bits >> 32:#x}\n"
        " v_mbcnt_lo_u32_b32 v10, s22, 5\n v_mbcnt_hi_u32_b32 v10, s23, v10",
        lambda a, b: [5 + (bits & (1 << i) - 1).bit_count() for i in range(lanes)],
    )
    # Among 32 lanes, also in a wave of 64.
    made["ds_bpermute_b32"] = (
        "v_lshlrev_b32 v12, 2, v4\n ds_bpermute_b32 v10, v12, v6\n s_waitcnt 0",
        lambda a, b: [b[(i & 32) + (a[i] & 31)] for i in range(lanes)],
    )
    made["ds_permute_b32"] = (
        "v_add_nc_u32 v12, 5, v0\n v_lshlrev_b32 v12, 2, v12\n ds_permute_b32 v10, v12, v6\n s_waitcnt 0",
        lambda a, b: [b[(i & 32) + (i - 5) % 32] for i in range(lanes)],
    )
    made["ds_swizzle_b32"] = (
        "ds_swizzle_b32 v10, v4 offset:0x241f\n s_waitcnt 0",
        lambda a, b: [a[i ^ 9] for i in range(lanes)],
    )
    made["exec"] = (
        f"{choose}v_add_nc_u32 v10, v4, v6\n {whole}",
        lambda a, b: [a[i] + b[i] & MASK32 if active[i] else OLD & MASK32 for i in range(lanes)],
    )
    # EXECZ and VCCZ do not see the upper half of a wave of 32.
    upper = 0 if lanes == 32 else 1
    made["execz"] = (
        "s_mov_b32 s22, 0\n s_mov_b64 vcc, 0\n s_mov_b32 vcc_hi, 1\n s_cbranch_vccz 1f\n s_or_b32 s22, s22, 1\n1:\n"
        " s_mov_b32 exec_lo, 0\n s_mov_b32 exec_hi, 1\n s_cbranch_execz 2f\n s_or_b32 s22, s22, 2\n2:\n"
        f" s_mov_b32 exec_hi, -1\n {whole}\n v_mov_b32 v10, s22",
        lambda a, b: [3 * upper] * lanes,
    )
    made["lane words"] = (
        "global_store_dword_addtid v4, s[30:31]\n s_waitcnt_vscnt null, 0\n"
        " global_load_dword_addtid v10, s[30:31]\n s_waitcnt vmcnt(0)",
        lambda a, b: list(a),
    )
    return made


new_cases()


def body(text: str, lanes: int, mode: int | None = None) -> str:
    """Give the instructions around a case's: load its sources, run it, store its result and mask."""
    start = "" if mode is None else f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 8), {mode:#x}"
    shift = 5 if lanes == 32 else 6
    return f"""
    s_load_dwordx8 s[8:15], s[0:1], 0x0
    s_load_dwordx2 s[16:17], s[0:1], 0x20
    s_lshl_b32 s3, s2, {shift}
    v_add_nc_u32 v1, s3, v0
    v_lshlrev_b32 v1, 3, v1
    s_waitcnt lgkmcnt(0)
    global_load_dwordx2 v[4:5], v1, s[8:9]
    global_load_dwordx2 v[6:7], v1, s[10:11]
    global_load_dwordx2 v[8:9], v1, s[12:13]
    s_lshl_b32 s3, s3, 3
    s_add_u32 s30, s14, s3
    s_addc_u32 s31, s15, 0
    v_mov_b32 v10, {OLD & MASK32:#x}
    v_mov_b32 v11, {OLD >> 32:#x}
    s_mov_b32 s20, 0
    s_mov_b32 s21, {MARK if lanes == 32 else 0:#x}
    s_waitcnt vmcnt(0)
    {start}
    {text}
    global_store_dwordx2 v1, v[10:11], s[14:15]
    v_mov_b32 v12, s20
    v_mov_b32 v13, s21
    s_lshl_b32 s3, s2, 3
    v_mov_b32 v14, s3
    global_store_dwordx2 v14, v[12:13], s[16:17]
"""


def label(name: str) -> str:
    return "case_" + re.sub(r"\W+", "_", name)


@pytest.fixture(scope="module", params=WAVES)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, int]]:
    """An engine with one kernel for each case, and the lanes of its waves."""
    lanes = request.param
    place: Path = tmp_path_factory.mktemp("engine")
    started = Engine(place, gpu=GPU)
    kernels = [
        kernel_of(label(name), body(translated(case.text, lanes), lanes, case.mode), lanes)
        for name, case in CASES.items()
    ]
    for name, (text, _) in lane_cases(lanes).items():
        kernels.append(kernel_of(label("lanes " + name), body(text, lanes), lanes))
    for name, (sources, bits, _) in SCALAR.items():
        text = scalar.body(name, sources, bits)
        kernels.append(with_waves(kernel(f"case_{name}", text, gpu=GPU), lanes))
    started.load(assemble_for("".join(kernels), place, lanes))
    yield started, lanes
    started.close()


def put(
    engine: Engine, sources: list[list[int]], kinds: tuple[str, ...], lanes: int, generator: random.Random
) -> None:
    for n, name in enumerate("abc"):
        values = sources[n] if n < len(sources) else [0] * LANES
        bits = int(kinds[n][1:]) if n < len(sources) else 64
        # What is above a narrow source must not matter.
        padded = [v | generator.getrandbits(64) >> bits << bits if bits < 64 else v for v in values]
        engine.put(name, np.array([p & gfx9.MASK64 for p in padded], dtype=np.uint64))
    engine.put("results", np.zeros(LANES, dtype=np.uint64))
    engine.put("masks", np.zeros(LANES // lanes, dtype=np.uint64))


def check(name: str, case: Case, values: list[int], got: int, mask: bool) -> None:
    wanted = case.reference(*values)
    what = f"{name}: sources {[hex(v) for v in values]}: {got:#x}, not {wanted}"
    result = case.result
    if result == "mask":
        assert mask == bool(wanted), what
        return
    if result.endswith("+mask"):
        assert isinstance(wanted, tuple)
        assert mask == bool(wanted[1]), what
        wanted, result = wanted[0], result.removesuffix("+mask")
    if result == "u64":
        assert got == wanted & gfx9.MASK64, what
        return
    if result == "f64":
        assert gfx9.matches(F64, got, wanted, case.ulps), what
        return
    assert got >> 32 == OLD >> 32, what  # the register after the result's
    got &= MASK32
    if result == "u32":
        assert got == wanted & MASK32, what
    elif result == "f32":
        assert gfx9.matches(F32, got, wanted, case.ulps), what
    elif result == "pair_f16":
        assert gfx9.matches(F16, got & 0xFFFF, wanted[0], 0) and gfx9.matches(F16, got >> 16, wanted[1], 0), (
            what
        )
    elif result == "high_f16":
        assert got & 0xFFFF == OLD & 0xFFFF and gfx9.matches(F16, got >> 16, wanted, 0), what
    else:
        assert got >> 16 == HIGH >> 16, what
        assert gfx9.matches(F16, got & 0xFFFF, wanted, case.ulps), what


@pytest.mark.every(12)
@pytest.mark.parametrize("name", CASES)
def test_instruction(engine: tuple[Engine, int], name: str) -> None:
    """The instruction's result in each work-item: edges, like sizes, random bits."""
    started, lanes = engine
    case = CASES[name]
    generator = random.Random(name)
    sources = [gfx9.inputs(kind, generator) for kind in case.sources]
    put(started, sources, case.sources, lanes, generator)
    outcome = started.run(label(name), ("a", "b", "c", "results", "masks"), (LANES, 1, 1), (lanes, 1, 1))
    assert outcome.fault is None, outcome.fault
    results = [int(v) for v in started.get("results", np.uint64)]
    masks = [int(v) for v in started.get("masks", np.uint64)]
    if lanes == 32 and case.result.endswith("mask"):
        assert {mask >> 32 for mask in masks} == {MARK}  # the register after a mask of 32 lanes
    for lane in range(LANES):
        check(
            name,
            case,
            [s[lane] for s in sources],
            results[lane],
            bool(masks[lane // lanes] >> lane % lanes & 1),
        )


@pytest.mark.every(3)
@pytest.mark.parametrize("name", lane_cases(32))
def test_lanes(engine: tuple[Engine, int], name: str) -> None:
    started, lanes = engine
    generator = random.Random(name)
    sources = [gfx9.inputs("u32", generator) for _ in range(2)]
    put(started, sources, ("u32", "u32"), lanes, generator)
    outcome = started.run(
        label("lanes " + name), ("a", "b", "c", "results", "masks"), (LANES, 1, 1), (lanes, 1, 1)
    )
    assert outcome.fault is None, outcome.fault
    results = [int(v) & MASK32 for v in started.get("results", np.uint64)]
    reference = lane_cases(lanes)[name][1]
    for first in range(0, LANES, lanes):
        wanted = reference(*(s[first : first + lanes] for s in sources))
        assert results[first : first + lanes] == wanted


# The scalar unit's instructions that GFX10 kept.
SCALAR = {name: case for name, case in scalar.CASES.items() if name in existing()}


@pytest.mark.every(6)
@pytest.mark.parametrize("name", SCALAR)
def test_scalar_instruction(engine: tuple[Engine, int], name: str) -> None:
    scalar.test_scalar_instruction(engine[0], name)


def test_all_cases_of_gfx9_are_known() -> None:
    """What is left out of GFX9's cases is not there."""
    for name in (*GONE, "v_cmp_f_u16", "v_cmp_t_i16"):
        assert name == "gpr index" or name == "v_sat_pk_u8_i16" or stem(name) not in existing()
    assert set(scalar.CASES) - set(SCALAR) == set()


# An instruction that is not right in all cases is refused before a wave runs.
REFUSED = {
    "v_sat_pk_u8_i16": ("v_sat_pk_u8_i16 v1, v2", "the upper half"),
    "v_mullit_f32": ("v_mullit_f32 v1, v2, v3, v4", "unsupported instruction"),
    "s_subvector_loop_begin": ("s_subvector_loop_begin s1, 1\n s_nop 0", "unsupported instruction"),
    "wave_shl": (".long 0x7e0202fa, 0xff013002", "DPP control"),
    "null": ("s_addk_i32 null, 1", "the null register"),
    "gpr_alloc": ("s_getreg_b32 s4, hwreg(HW_REG_GPR_ALLOC)", "hardware register 5"),
}


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    place = tmp_path_factory.mktemp("refused")
    started = Engine(place, gpu=GPU)
    kernels = [kernel_of(f"refused_{name}", text, 32) for name, (text, _) in REFUSED.items()]
    kernels.append(
        kernel_of("dpp8", "s_mov_b32 exec_lo, 1\n v_mov_b32_dpp v1, v0 dpp8:[1,1,1,1,1,1,1,1]", 32)
    )
    started.load(assemble_for("".join(kernels), place, 32))
    yield started
    started.close()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(refusing: Engine, name: str) -> None:
    outcome = refusing.run(f"refused_{name}", (), (32, 1, 1), (32, 1, 1))
    assert outcome.fault is not None and REFUSED[name][1] in outcome.fault


def test_dpp8_of_an_inactive_lane(refusing: Engine) -> None:
    outcome = refusing.run("dpp8", (), (32, 1, 1), (32, 1, 1))
    assert outcome.fault is not None and "DPP8 reads a lane that is not active" in outcome.fault

"""The scalar unit of hipsim's engine: each instruction against Python's integers, with SCC."""

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from hipsim_engine import Engine, assemble, kernel, missing
from hipsim_values import integers

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

WAVES = 96  # each with inputs of its own
OLD = 0x5A5AA5A5_C3C33C3C
MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1
# name → widths of sources and result, and (result, SCC) of (sources, SCC before); SCC None: it stays
Reference = Callable[..., tuple[int, object]]
CASES: dict[str, tuple[tuple[int, ...], int, Reference]] = {}


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def add(name: str, sources: tuple[int, ...], result: int, reference: Reference) -> None:
    CASES[name] = sources, result, reference


def overflow(x: int) -> bool:
    return not -(1 << 31) <= x < 1 << 31


def field(x: int, control: int, bits: int, is_signed: bool) -> int:
    offset, width = control & (bits - 1), control >> 16 & 0x7F
    if width == 0:
        return 0
    x = (signed(x, bits) if is_signed else x) >> offset
    if width + offset >= bits:
        return x
    return signed(x, width) if is_signed else x & ((1 << width) - 1)


def trailing(x: int) -> int:
    return (x & -x).bit_length() - 1 if x else -1


def sign_run(x: int, bits: int) -> int:
    x ^= (1 << bits) - 1 if x >> (bits - 1) else 0
    return bits - x.bit_length() if x else -1


def cases() -> None:
    two = (32, 32)
    add("s_add_u32", two, 32, lambda a, b, c: (a + b, a + b > MASK32))
    add("s_sub_u32", two, 32, lambda a, b, c: (a - b, a < b))
    add("s_add_i32", two, 32, lambda a, b, c: (a + b, overflow(signed(a) + signed(b))))
    add("s_sub_i32", two, 32, lambda a, b, c: (a - b, overflow(signed(a) - signed(b))))
    add("s_addc_u32", two, 32, lambda a, b, c: (a + b + c, a + b + c > MASK32))
    add("s_subb_u32", two, 32, lambda a, b, c: (a - b - c, a - b - c < 0))
    add("s_min_i32", two, 32, lambda a, b, c: (min(signed(a), signed(b)), signed(a) < signed(b)))
    add("s_min_u32", two, 32, lambda a, b, c: (min(a, b), a < b))
    add("s_max_i32", two, 32, lambda a, b, c: (max(signed(a), signed(b)), signed(a) > signed(b)))
    add("s_max_u32", two, 32, lambda a, b, c: (max(a, b), a > b))
    add("s_mul_i32", two, 32, lambda a, b, c: (a * b, None))
    add("s_mul_hi_u32", two, 32, lambda a, b, c: (a * b >> 32, None))
    add("s_mul_hi_i32", two, 32, lambda a, b, c: (signed(a) * signed(b) >> 32, None))
    add("s_absdiff_i32", two, 32, lambda a, b, c: (abs(signed(a - b)), a != b))
    for n in range(1, 5):
        add(f"s_lshl{n}_add_u32", two, 32, lambda a, b, c, n=n: ((a << n) + b, (a << n) + b > MASK32))
    add("s_abs_i32", (32,), 32, lambda a, c: (abs(signed(a)), a != 0))
    add("s_sext_i32_i8", (32,), 32, lambda a, c: (signed(a, 8), None))
    add("s_sext_i32_i16", (32,), 32, lambda a, c: (signed(a, 16), None))
    for bits in (32, 64):
        mask = (1 << bits) - 1
        logic: dict[str, Callable[[int, int], int]] = {
            "and": lambda a, b: a & b,
            "or": lambda a, b: a | b,
            "xor": lambda a, b: a ^ b,
            "andn2": lambda a, b, m=mask: a & ~b & m,
            "orn2": lambda a, b, m=mask: (a | ~b) & m,
            "nand": lambda a, b, m=mask: ~(a & b) & m,
            "nor": lambda a, b, m=mask: ~(a | b) & m,
            "xnor": lambda a, b, m=mask: ~(a ^ b) & m,
        }
        for name, f in logic.items():
            add(f"s_{name}_b{bits}", (bits, bits), bits, lambda a, b, c, f=f: (f(a, b), f(a, b) != 0))
        shift = (bits, 32)
        by = bits - 1
        add(
            f"s_lshl_b{bits}",
            shift,
            bits,
            lambda a, b, c, m=mask, n=by: (a << (b & n) & m, a << (b & n) & m != 0),
        )
        add(f"s_lshr_b{bits}", shift, bits, lambda a, b, c, n=by: (a >> (b & n), a >> (b & n) != 0))
        add(f"s_ashr_i{bits}", shift, bits, lambda a, b, c, w=bits, n=by: (
            signed(a, w) >> (b & n), signed(a, w) >> (b & n) != 0))  # fmt: skip
        add(f"s_bfm_b{bits}", two, bits, lambda a, b, c, n=by: (((1 << (a & n)) - 1) << (b & n), None))
        for letter in "ui":
            add(f"s_bfe_{letter}{bits}", shift, bits, lambda a, b, c, w=bits, s=letter == "i": (
                field(a, b, w, s), field(a, b, w, s) != 0))  # fmt: skip
        add(f"s_cselect_b{bits}", (bits, bits), bits, lambda a, b, c: (a if c else b, None))
        add(f"s_cmov_b{bits}", (bits,), bits, lambda a, c, m=mask: (a if c else OLD & m, None))
        add(f"s_mov_b{bits}", (bits,), bits, lambda a, c: (a, None))
        add(f"s_not_b{bits}", (bits,), bits, lambda a, c, m=mask: (~a, ~a & m != 0))
        add(f"s_brev_b{bits}", (bits,), bits, lambda a, c, w=bits: (int(f"{a:0{w}b}"[::-1], 2), None))
        add(f"s_wqm_b{bits}", (bits,), bits, lambda a, c, w=bits: (wqm(a, w), a != 0))
        add(f"s_quadmask_b{bits}", (bits,), bits, lambda a, c, w=bits: (quads(a, w), a != 0))
        add(f"s_bcnt0_i32_b{bits}", (bits,), 32, lambda a, c, w=bits: (w - a.bit_count(), a.bit_count() != w))
        add(f"s_bcnt1_i32_b{bits}", (bits,), 32, lambda a, c: (a.bit_count(), a != 0))
        add(f"s_ff0_i32_b{bits}", (bits,), 32, lambda a, c, m=mask: (trailing(~a & m), None))
        add(f"s_ff1_i32_b{bits}", (bits,), 32, lambda a, c: (trailing(a), None))
        add(f"s_flbit_i32_b{bits}", (bits,), 32, lambda a, c, w=bits: (w - a.bit_length() if a else -1, None))
        add(f"s_bitset0_b{bits}", (32,), bits, lambda a, c, m=mask, n=by: (OLD & m & ~(1 << (a & n)), None))
        add(f"s_bitset1_b{bits}", (32,), bits, lambda a, c, m=mask, n=by: (OLD & m | 1 << (a & n), None))
        add(f"s_bitcmp0_b{bits}", shift, 0, lambda a, b, c, n=by: (0, not a >> (b & n) & 1))
        add(f"s_bitcmp1_b{bits}", shift, 0, lambda a, b, c, n=by: (0, a >> (b & n) & 1))
    add("s_flbit_i32", (32,), 32, lambda a, c: (sign_run(a, 32), None))
    add("s_flbit_i32_i64", (64,), 32, lambda a, c: (sign_run(a, 64), None))
    add("s_bitreplicate_b64_b32", (32,), 64, lambda a, c: (int("".join(x * 2 for x in f"{a:b}"), 2), None))
    add("s_pack_ll_b32_b16", two, 32, lambda a, b, c: (a & 0xFFFF | b << 16, None))
    add("s_pack_lh_b32_b16", two, 32, lambda a, b, c: (a & 0xFFFF | b >> 16 << 16, None))
    add("s_pack_hh_b32_b16", two, 32, lambda a, b, c: (a >> 16 | b >> 16 << 16, None))
    relations: dict[str, Callable[[int, int], bool]] = {
        "eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b}  # fmt: skip
    for name, relation in relations.items():
        add(f"s_cmp_{name}_u32", two, 0, lambda a, b, c, f=relation: (0, f(a, b)))
        add(f"s_cmp_{name}_i32", two, 0, lambda a, b, c, f=relation: (0, f(signed(a), signed(b))))
    add("s_cmp_eq_u64", (64, 64), 0, lambda a, b, c: (0, a == b))
    add("s_cmp_lg_u64", (64, 64), 0, lambda a, b, c: (0, a != b))


def wqm(a: int, bits: int) -> int:
    return sum(15 << n for n in range(0, bits, 4) if a >> n & 15)


def quads(a: int, bits: int) -> int:
    return sum(1 << n for n in range(bits // 4) if a >> 4 * n & 15)


cases()


def register(first: int, bits: int) -> str:
    return f"s[{first}:{first + 1}]" if bits == 64 else f"s{first}"


def body(name: str, sources: tuple[int, ...], result: int) -> str:
    operands = [register(34, result)] if result else []
    operands += [register(30 + 2 * n, bits) for n, bits in enumerate(sources)]
    return f"""
    s_load_dwordx4 s[8:11], s[0:1], 0x0
    s_load_dwordx2 s[12:13], s[0:1], 0x10
    s_lshl_b32 s3, s2, 3
    s_waitcnt lgkmcnt(0)
    s_load_dwordx2 s[30:31], s[8:9], s3
    s_load_dwordx2 s[32:33], s[10:11], s3
    s_waitcnt lgkmcnt(0)
    s_mov_b32 s34, {OLD & MASK32:#x}
    s_mov_b32 s35, {OLD >> 32:#x}
    s_bitcmp1_b32 s2, 0
    {name} {", ".join(operands)}
    s_cselect_b32 s36, 1, 0
    s_lshl_b32 s3, s2, 4
    v_mov_b32 v1, s3
    v_mov_b32 v2, s34
    v_mov_b32 v3, s35
    v_mov_b32 v4, s36
    v_mov_b32 v5, 0
    global_store_dwordx4 v1, v[2:5], s[12:13]
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    place = tmp_path_factory.mktemp("scalar")
    started = Engine(place)
    started.load(
        assemble(
            "".join(kernel(f"case_{name}", body(name, s, r)) for name, (s, r, _) in CASES.items()), place
        )
    )
    yield started
    started.close()


@pytest.mark.parametrize("name", CASES)
def test_scalar_instruction(engine: Engine, name: str) -> None:
    sources, bits, reference = CASES[name]
    generator = random.Random(name)
    inputs = [integers(width, WAVES, generator) for width in (*sources, 64, 64)[:2]]
    if len(sources) == 2 and sources[0] == sources[1]:  # some are equal
        inputs[1] = [a if generator.random() < 0.2 else b for a, b in zip(*inputs, strict=True)]
    engine.put("a", np.array(inputs[0], dtype=np.uint64))
    engine.put("b", np.array(inputs[1], dtype=np.uint64))
    engine.put("results", np.zeros(4 * WAVES, dtype=np.uint32))
    outcome = engine.run(f"case_{name}", ("a", "b", "results"), (64 * WAVES, 1, 1), (64, 1, 1))
    assert outcome.fault is None, outcome.fault
    results = engine.get("results", np.uint32).reshape(WAVES, 4)
    for wave in range(WAVES):
        before = wave & 1
        values = [inputs[n][wave] for n in range(len(sources))]
        wanted, scc = reference(*values, before)
        low, high, got_scc, _ = (int(x) for x in results[wave])
        what = f"{name} of {[hex(v) for v in values]}, SCC {before}"
        assert got_scc == (before if scc is None else int(bool(scc))), what
        if bits == 64:
            assert low | high << 32 == wanted & MASK64, what
        elif bits == 32:
            assert low == wanted & MASK32, what
            assert high == OLD >> 32, what
        else:
            assert low | high << 32 == OLD, what

"""Matrix products of CDNA2 on hipsim's engine, against sums in Python's integers and fractions that are rounded step by step."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest

from hipsim_engine import Engine, assemble, kernel, missing
from hipsim_values import F16, F32, F64, Format, edges

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

GPU = "gfx90a"
BF16 = Format(16, 7)
MASK32 = (1 << 32) - 1


@dataclass(frozen=True)
class Product:
    """A matrix product, as its name says: the size of its result, the number of products in a sum, and the kinds of numbers."""

    name: str
    size: int
    depth: int
    blocks: int
    kind: str  # of the factors

    @property
    def sum(self) -> Format | None:
        """The format of the sums; None: integers."""
        return None if self.kind == "i8" else F64 if self.kind == "f64" else F32

    @property
    def factor(self) -> Format | None:
        return {"f32": F32, "f64": F64, "f16": F16, "bf16": BF16, "bf16_1k": BF16, "i8": None}[self.kind]

    @property
    def bits(self) -> int:
        """Bits of a factor."""
        return 8 if self.kind == "i8" else self.factor.bits  # type: ignore[union-attr]

    @property
    def of_lane(self) -> int:
        """Factors in the registers of one lane."""
        return self.size * self.depth * self.blocks // 64

    @property
    def words(self) -> int:
        """Registers of A or B."""
        return self.of_lane * self.bits // 32

    @property
    def result_words(self) -> int:
        return self.size * self.size * self.blocks // 64 * (2 if self.kind == "f64" else 1)


def shapes() -> Iterator[Product]:
    for result, kind, depth in (
        ("f32", "f32", 1),
        ("f32", "f16", 4),
        ("f32", "bf16", 2),
        ("f32", "bf16_1k", 4),
        ("i32", "i8", 4),
    ):
        for size, blocks, times in ((32, 2, 1), (16, 4, 1), (4, 16, 1), (32, 1, 2), (16, 1, 4)):
            name = f"v_mfma_{result}_{size}x{size}x{depth * times}{kind}"
            yield Product(name, size, depth * times, blocks, kind)
    yield Product("v_mfma_f64_16x16x4f64", 16, 4, 1, "f64")
    yield Product("v_mfma_f64_4x4x4f64", 4, 4, 4, "f64")


PRODUCTS = {p.name: p for p in shapes()}


def place_of_factor(p: Product, row: int, k: int, block: int) -> tuple[int, int]:
    """The lane and the number within the lane of A[row][k]; of B[k][row], too."""
    return row + p.size * (block + p.blocks * (k // p.of_lane)), k % p.of_lane


def place_of_sum(p: Product, row: int, column: int, block: int) -> tuple[int, int]:
    """The lane and the register (or pair of registers) of D[row][column]."""
    if p.kind == "f64":
        return (16 * row + 4 * block + column, 0) if p.size == 4 else (16 * (row % 4) + column, row // 4)
    if p.size == 4:
        return 4 * block + column, row
    if p.size == 16:
        return 16 * (row // 4) + column, 4 * block + row % 4
    return 32 * (row // 4 % 2) + column, 16 * block + 4 * (row // 8) + row % 4


@dataclass(frozen=True)
class Case:
    """A product with its modifiers, and where its operands are."""

    product: Product
    modifiers: str = ""
    a: str = "v"
    b: str = "v"
    result: str = "a"
    constant: str = ""  # C

    def modifier(self, name: str) -> int:
        match = re.search(rf"\b{name}:(\d)", self.modifiers)
        return int(match[1]) if match else 0


def cases() -> Iterator[tuple[str, Case]]:
    for number, p in enumerate(PRODUCTS.values()):
        yield p.name, Case(p, "", "va"[number % 2], "va"[number // 2 % 2], "va"[number // 4 % 2])
    chosen = [("32x32x1f32", "cbsz:1 abid:1"), ("4x4x4f16", "cbsz:3 abid:5"), ("16x16x4i8", "cbsz:2 abid:2 blgp:1"),
              ("32x32x4bf16", "blgp:2"), ("16x16x4f32", "blgp:3"), ("16x16x16f16", "blgp:5"), ("4x4x2bf16", "cbsz:4 abid:9"),
              ("32x32x8i8", "blgp:4"), ("16x16x16bf16_1k", "blgp:6"), ("32x32x8f16", "blgp:7")]  # fmt: skip
    for shape, modifiers in chosen:
        (p,) = [p for p in PRODUCTS.values() if p.name.endswith("_" + shape)]
        yield f"{p.name} {modifiers}", Case(p, modifiers)
    for shape, constant in (
        ("16x16x4f32", "1.0"),
        ("4x4x4f64", "-4.0"),
        ("16x16x4f64", "3"),
        ("4x4x4i8", "-16"),
        ("32x32x8f16", "0"),
    ):
        (p,) = [p for p in PRODUCTS.values() if p.name.endswith("_" + shape)]
        yield f"{p.name} C={constant}", Case(p, constant=constant)


CASES = dict(cases())


def label(name: str) -> str:
    return "case_" + re.sub(r"\W+", "_", name)


def registers(kind: str, first: int, count: int) -> str:
    return f"{kind}{first}" if count == 1 else f"{kind}[{first}:{first + count - 1}]"


def body(case: Case) -> str:
    """Each lane's words of A, B, C and D are behind one another in memory, 128 bytes for each lane."""
    p = case.product
    text = """
    s_load_dwordx8 s[8:15], s[0:1], 0x0
    v_lshlrev_b32 v1, 7, v0
    s_waitcnt lgkmcnt(0)
    s_mov_b64 exec, -1
"""
    for kind, first, base in ((case.a, 2, 8), (case.b, 4, 10)):
        for n in range(p.words):
            text += f"global_load_dword {kind}{first + n}, v1, s[{base}:{base + 1}] offset:{4 * n}\n"
    for n in range(p.result_words):
        text += f"global_load_dword {case.result}{8 + n}, v1, s[12:13] offset:{4 * n}\n"
    operands = [
        registers(case.result, 8, p.result_words),
        registers(case.a, 2, p.words),
        registers(case.b, 4, p.words),
    ]
    operands.append(case.constant or operands[0])
    # EXEC does not matter to the product.
    text += f"s_waitcnt vmcnt(0)\n s_mov_b64 exec, 1\n {p.name} {', '.join(operands)} {case.modifiers}\n s_mov_b64 exec, -1\n"
    for n in range(p.result_words):
        text += f"global_store_dword v1, {case.result}{8 + n}, s[14:15] offset:{4 * n}\n"
    return text


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    place = tmp_path_factory.mktemp("matrix")
    started = Engine(place, gpu=GPU)
    text = "".join(kernel(label(name), body(case), gpu=GPU) for name, case in CASES.items())
    started.load(assemble(text, place, GPU))
    yield started
    started.close()


def numbers(f: Format | None, bits: int, count: int, generator: random.Random) -> list[int]:
    """Floats of like size with a few edges among them, or random integers."""
    if f is None:
        return [generator.getrandbits(bits) for _ in range(count)]
    made = []
    for _ in range(count):
        if generator.random() < 0.03:
            made.append(generator.choice(edges(f)))
        elif generator.random() < 0.05:  # denormals
            made.append(generator.getrandbits(f.fraction) | generator.getrandbits(1) * f.sign)
        else:
            exponent = f.bias + generator.randint(-4, 4)
            made.append(
                generator.getrandbits(1) * f.sign | exponent << f.fraction | generator.getrandbits(f.fraction)
            )
    return made


def flushed(f: Format, x: int) -> int:
    """A factor or C of a product of halves: denormals and zeros become +0."""
    return 0 if f.is_denormal(x) or f.is_zero(x) else x


def as_f32(f: Format, x: int) -> int:
    return F32.from_double(f.to_double(x))


def add_f32(x: int, y: int) -> int:
    return F32.flush(F32.compute(lambda p, q: p + q, lambda p, q: p + q, x, y))


def multiply_f32(x: int, y: int) -> int:
    return F32.flush(F32.compute(lambda p, q: p * q, lambda p, q: p * q, x, y))


def host_fma(x: float, y: float, z: float) -> float:
    return x * y + z


def sum_of(p: Product, a: list[int], b: list[int], c: int) -> int:
    """One element of D from a row of A, a column of B and the element of C."""
    if p.kind == "i8":
        signed = [[x - (x >> 7 << 8) for x in side] for side in (a, b)]
        return c + sum(x * y for x, y in zip(*signed, strict=True)) & MASK32
    f, s = p.factor, p.sum
    assert f is not None and s is not None
    if p.kind in ("f32", "f64"):
        for x, y in zip(a, b, strict=True):
            c = s.compute(fused, host_fma, x, y, c)
        return c
    factors = [[as_f32(f, flushed(f, x)) for x in side] for side in (a, b)]
    products = [multiply_f32(x, y) for x, y in zip(*factors, strict=True)]
    c = flushed(F32, c)
    together = 2 if p.kind == "bf16" else 4
    for k in range(0, p.depth, together):
        total = add_f32(products[k], products[k + 1])
        if together == 4:
            total = add_f32(total, add_f32(products[k + 2], products[k + 3]))
        c = add_f32(c, total)
    return c


def fused(x: Fraction, y: Fraction, z: Fraction) -> Fraction:
    return x * y + z


def lane_of_b(lane: int, pattern: int) -> int:
    """The lane that is read in the place of another: none, halves repeated, all moved by 16, quarters repeated."""
    if pattern in (1, 2):
        return 32 * (pattern - 1) + lane % 32
    if pattern == 3:
        return (lane + 16) % 64
    return 16 * (pattern - 4) + lane % 16 if pattern >= 4 else lane


CONSTANTS = {"1.0": 0x3F800000, "-4.0": 0xC010000000000000, "3": 3, "-16": -16 & MASK32, "0": 0}


@pytest.mark.parametrize(
    "name", [n if i % 5 == 0 else pytest.param(n, marks=pytest.mark.long) for i, n in enumerate(CASES)]
)
def test_matrix_product(engine: Engine, name: str) -> None:
    case = CASES[name]
    p, generator = case.product, random.Random(name)
    of_word = 32 // min(p.bits, 32)
    sides = [numbers(p.factor, p.bits, 64 * p.of_lane, generator) for _ in "ab"]  # by lane, then by number
    sum_bits = 64 if p.kind == "f64" else 32
    results = p.size * p.size * p.blocks // 64
    addends = numbers(p.sum, sum_bits, 64 * results, generator)
    for side, values in zip("ab", sides, strict=True):
        words = np.zeros((64, 32), dtype=np.uint32)
        for lane in range(64):
            for n in range(p.of_lane):
                value = values[lane * p.of_lane + n]
                if p.bits == 64:
                    words[lane, 2 * n : 2 * n + 2] = value & MASK32, value >> 32
                else:
                    words[lane, n // of_word] |= np.uint32(value << p.bits * (n % of_word))
        engine.put(side, words)
    width = sum_bits // 32
    content = np.zeros((64, 32), dtype=np.uint32)
    for lane in range(64):
        for n in range(results):
            value = addends[lane * results + n]
            content[lane, width * n : width * (n + 1)] = [value >> 32 * w & MASK32 for w in range(width)]
    engine.put("c", content)
    engine.put("d", np.zeros((64, 32), dtype=np.uint32))
    outcome = engine.run(label(name), ("a", "b", "c", "d"), (64, 1, 1), (64, 1, 1))
    assert outcome.fault is None, outcome.fault
    got_words = engine.get("d", np.uint32).reshape(64, 32)

    cbsz, abid, blgp = (case.modifier(m) for m in ("cbsz", "abid", "blgp"))
    for block in range(p.blocks):
        of_a = (block >> cbsz << cbsz) + abid
        rows, columns = [], []
        for row in range(p.size):
            places = [
                (place_of_factor(p, row, k, of_a), place_of_factor(p, row, k, block)) for k in range(p.depth)
            ]
            rows.append([sides[0][lane * p.of_lane + n] for (lane, n), _ in places])
            columns.append([sides[1][lane_of_b(lane, blgp) * p.of_lane + n] for _, (lane, n) in places])
        for row in range(p.size):
            for column in range(p.size):
                lane, n = place_of_sum(p, row, column, block)
                c = CONSTANTS[case.constant] if case.constant else addends[lane * results + n]
                wanted = sum_of(p, rows[row], columns[column], c)
                got = sum(int(got_words[lane, width * n + w]) << 32 * w for w in range(width))
                same = got == wanted or (p.sum is not None and p.sum.is_nan(wanted) and p.sum.is_nan(got))
                assert same, f"block {block}, D[{row}][{column}]: {got:#x}, not {wanted:#x}"


REFUSED = {
    "v_mfma_f32_16x16x4f32 v[8:11], v1, v2, v[8:11] cbsz:1": "cbsz or abid",
    "v_mfma_f32_32x32x1f32 a[0:31], v1, v2, a[0:31] cbsz:1 abid:2": "cbsz or abid",
    "v_mfma_f64_4x4x4f64 v[8:9], v[2:3], v[4:5], v[8:9] blgp:1": "blgp",
    "v_mfma_f32_32x32x2f32 v[0:15], v1, v20, v[0:15]": "D that overlaps another operand",
    "v_mfma_f64_16x16x4f64 v[0:7], v[10:11], v[6:7], 0": "D that overlaps another operand",
    "v_pk_add_f32 v[2:3], v[4:5], 1.0": "the high word of a constant",
    "v_pk_add_f32 v[2:3], v[4:5], v[6:7] clamp": "clamp",
    "v_pk_mov_b32 v[2:3], v[4:5], v[6:7] op_sel_hi:[0,0]": "op_sel_hi",
    "v_cvt_f64_i32_dpp v[2:3], v3 quad_perm:[0,1,2,3] row_mask:0xf bank_mask:0xf": "DPP control",
    "v_dot2c_f32_f16_dpp v1, -v2, v3 row_newbcast:1 row_mask:0xf bank_mask:0xf": "neg or abs of an integer",
    "v_dot2c_f32_f16 v1, 1.0, v3": "a constant for two halves",
    "v_pk_fmac_f16 v1, 1.0, v2": "a constant for two halves",
    "s_getreg_b32 s3, hwreg(HW_REG_GPR_ALLOC, 0, 4)": "hardware register 5",
    ".long 0xdc548000\n .long 0x037f0004": "several registers from an odd one",  # global_load_dwordx2 v[3:4], v[4:5], off
}


# What is known only when it runs.
FAULTS = {
    "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 5\n v_mfma_f32_4x4x1f32 v[0:3], v4, v5, 0": "rounding is not to the nearest",
    "s_set_gpr_idx_on s2, gpr_idx(SRC0)\n v_mfma_f32_4x4x1f32 v[0:3], v4, v5, 0": "VGPR index mode",
}


@pytest.fixture(scope="module")
def other_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    started = Engine(tmp_path_factory.mktemp("refused"), gpu=GPU)
    yield started
    started.close()


def fault_of(engine: Engine, text: str, name: str) -> str:
    """Run a kernel that must not end well; give what is said of it."""
    code = engine.place / f"{name}.co"
    assemble(kernel("refused", text, gpu=GPU), engine.place, GPU).rename(code)
    engine.load(code)
    fault = engine.run("refused", (), (64, 1, 1), (64, 1, 1)).fault
    assert fault is not None
    return fault


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_known_is_refused_by_name(other_engine: Engine, text: str) -> None:
    fault = fault_of(other_engine, text, f"refused{list(REFUSED).index(text)}")
    assert f"unsupported: {REFUSED[text]} " in fault


@pytest.mark.parametrize("text", FAULTS)
def test_products_that_fail_when_they_run(other_engine: Engine, text: str) -> None:
    fault = fault_of(other_engine, text, f"fault{list(FAULTS).index(text)}")
    assert FAULTS[text] in fault and "v_mfma_f32_4x4x1f32" in fault

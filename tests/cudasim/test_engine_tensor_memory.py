"""tcgen05: tensor memory and the multiplications that use it, against NumPy. The layouts are those of PTX ISA 9.7.16."""

from __future__ import annotations

import functools
import itertools
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from engine_device import Array, Device, DeviceFault
from gpubpf_sass import need

HEAD = ".version 8.8\n.target sm_100a\n.address_size 64\n"
BYTES = 40960  # of shared memory that the host fills

# Where a register of a lane is: lane of the warp and register → lane and column of tensor memory, from the address on.
SHAPES: dict[str, tuple[int, Callable[[int, int], tuple[int, int]]]] = {
    "32x32b": (1, lambda lane, r: (lane, r)),
    "16x64b": (1, lambda lane, r: (lane // 4 + lane % 2 * 8, lane // 2 % 2 + 2 * r)),
    "16x128b": (2, lambda lane, r: (lane // 4 + r % 2 * 8, lane % 4 + r // 2 * 4)),
    "16x256b": (4, lambda lane, r: (lane // 4 + r % 4 // 2 * 8, lane % 4 * 2 + r % 2 + r // 4 * 8)),
}


def kernel(name: str, body: str, columns: int, group: int = 1, before: str = "") -> str:
    """A kernel of 128 threads per block. [a] has what each block's shared memory gets. At the end, the 128 lanes are stored.

    The body finds the address of its tensor memory in %r1, the same with the warp's lanes in %r2, and shared memory in %r7.
    """
    stores = f"""mov.u32 %r290, %r2; add.u32 %r291, %r2, {columns}; mov.u64 %rd8, %rd4;
OUT: tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r9}}, [%r290]; tcgen05.wait::ld.sync.aligned; st.global.b32 [%rd8], %r9;
add.u64 %rd8, %rd8, 4; add.u32 %r290, %r290, 1; setp.lt.u32 %p8, %r290, %r291; @%p8 bra OUT;"""
    cta = f"cta_group::{group}"
    return f""".visible .entry {name}(.param .u64 a, .param .u64 b) {before} {{
.reg .b32 %r<300>; .reg .b64 %rd<9>; .reg .b16 %h<3>; .reg .pred %p<9>;
.shared .align 1024 .b8 tile[{BYTES}]; .shared .align 8 .b64 bar; .shared .b32 at;
ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; mov.u32 %r0, %tid.x; mov.u32 %r3, %ctaid.x;
mad.wide.u32 %rd1, %r3, {BYTES}, %rd1; mad.wide.u32 %rd2, %r3, {128 * 512 * 4}, %rd2;
setp.eq.u32 %p1, %r0, 0; setp.lt.u32 %p2, %r0, 32;
mov.u32 %r4, %r0;
FILL: mul.wide.u32 %rd3, %r4, 4; add.u64 %rd3, %rd3, %rd1; ld.global.b32 %r5, [%rd3]; shl.b32 %r6, %r4, 2; mov.u32 %r7, tile;
add.u32 %r6, %r6, %r7; st.shared.b32 [%r6], %r5; add.u32 %r4, %r4, 128; setp.lt.u32 %p3, %r4, {BYTES // 4}; @%p3 bra FILL;
@%p1 mbarrier.init.shared.b64 [bar], 1;
@!%p2 bra READY; tcgen05.alloc.{cta}.sync.aligned.shared::cta.b32 [at], 512; tcgen05.relinquish_alloc_permit.{cta}.sync.aligned;
READY: bar.sync 0; {"barrier.cluster.arrive; barrier.cluster.wait;" if group == 2 else ""}
ld.shared.b32 %r1, [at]; and.b32 %r2, %r0, 0x60; shl.b32 %r2, %r2, 16; add.u32 %r2, %r2, %r1; mov.u32 %r7, tile;
mad.wide.u32 %rd4, %r0, {4 * 512}, %rd2;
{body}
bar.sync 0; {stores} bar.sync 0; {"barrier.cluster.arrive; barrier.cluster.wait;" if group == 2 else ""}
@!%p2 bra FREED; tcgen05.dealloc.{cta}.sync.aligned.b32 %r1, 512; FREED:
ret; }}
"""


def proven(text: str, folder: Path, virtual: bool = False) -> Device:
    (folder / "k.ptx").write_text(text)
    subprocess.run([need("ptxas"), "-O0", "-arch=sm_100a", folder / "k.ptx", "-o", folder / "k"], check=True)
    return Device(text, virtual=virtual)


def launched(
    device: Device, shared: np.ndarray, blocks: int = 1, name: str = "k", shape: tuple[int, ...] = (128, 512)
) -> np.ndarray:
    given = np.zeros((blocks, BYTES), np.uint8)
    given[:, : shared.shape[-1]] = shared
    out = Array(np.zeros((blocks, *shape), np.uint32))
    device.launch(name, blocks, 128, Array(given), out)
    return out.host.copy()


# --- loads and stores


def words(name: str, count: int, first: int = 10) -> str:
    return "{" + ", ".join(f"%r{first + n}" for n in range(count)) + "}"


@pytest.mark.every(2)
@pytest.mark.parametrize("virtual", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_stores_and_loads(shape: str, packed: bool, virtual: bool, tmp_path: Path) -> None:
    """A register has lane * 256 + register; each warp stores its own lanes. Loads of the same shape give the registers back."""
    per, place = SHAPES[shape]
    count = 2 * per
    fill = " ".join(f"mad.lo.u32 %r{10 + n}, %r0, 256, {n};" for n in range(count))
    pack, unpack = (".pack::16b", ".unpack::16b") if packed else ("", "")
    back = words(shape, count, 40)
    check = " ".join(f"setp.ne.u32 %p5, %r{10 + n}, %r{40 + n}; @%p5 trap;" for n in range(count))
    body = f"""{fill} mov.u32 %r30, -1;
    {" ".join(f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2+{c}], {{%r30}};" for c in range(32))}
    tcgen05.st.sync.aligned.{shape}.x2{unpack}.b32 [%r2], {words(shape, count)}; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.{shape}.x2{pack}.b32 {back}, [%r2]; tcgen05.wait::ld.sync.aligned; {check}"""
    found = launched(proven(HEAD + kernel("k", body, 32), tmp_path, virtual), np.zeros(4, np.uint8))[0]
    expected = np.full((128, 512), 0, np.uint32)
    expected[:, :32] = 0xFFFFFFFF
    for thread, r in itertools.product(range(128), range(count)):
        lane, column = place(thread % 32, r)
        value = thread * 256 + r
        if packed:
            expected[thread // 32 * 32 + lane, 2 * column : 2 * column + 2] = value & 0xFFFF, value >> 16
        else:
            expected[thread // 32 * 32 + lane, column] = value
    assert (found == expected).all()


def test_two_halves_of_a_warp(tmp_path: Path) -> None:
    """.16x32bx2: the upper lanes use the second address, here 16 lanes and 4 columns further on."""
    split = (16 << 16) + 4
    body = f"""mov.u32 %r10, %r0; add.u32 %r11, %r0, 1000; tcgen05.st.sync.aligned.16x32bx2.x2.b32 [%r2], {split}, {{%r10, %r11}};
    tcgen05.wait::st.sync.aligned; tcgen05.ld.sync.aligned.16x32bx2.x2.b32 {{%r12, %r13}}, [%r2], {split};
    tcgen05.wait::ld.sync.aligned; setp.ne.u32 %p5, %r10, %r12; @%p5 trap; setp.ne.u32 %p5, %r11, %r13; @%p5 trap;"""
    found = launched(proven(HEAD + kernel("k", body, 8), tmp_path), np.zeros(4, np.uint8))[0]
    for thread in range(128):
        column = 0 if thread % 32 < 16 else 4
        assert found[thread, column : column + 2].tolist() == [thread, thread + 1000]


# --- copies


@pytest.mark.parametrize(
    ("shape", "rows", "lanes"),
    [
        ("128x256b", 128, lambda row: [row]),
        ("128x128b", 128, lambda row: [row]),
        ("64x128b.warpx2::02_13", 64, lambda row: [row, row + 64]),
        (
            "64x128b.warpx2::01_23",
            64,
            lambda row: [row // 32 * 64 + row % 32, row // 32 * 64 + row % 32 + 32],
        ),
        ("32x128b.warpx4", 32, lambda row: [row, row + 32, row + 64, row + 96]),
    ],
)
def test_copies_from_shared_memory(
    shape: str, rows: int, lanes: Callable[[int], list[int]], tmp_path: Path
) -> None:
    columns = 8 if "256" in shape else 4
    body = f"""{descriptor("%rd5", 0, 1024, 128)}
    @%p1 tcgen05.cp.cta_group::1.{shape} [%r1], %rd5; @%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];
    {WAIT}"""
    shared = np.random.default_rng(1).integers(0, 256, 32768, np.uint8)
    found = launched(proven(HEAD + kernel("k", body, columns), tmp_path), shared)[0]
    for row in range(rows):
        chunks = [shared[row // 8 * 128 + row % 8 * 16 + c * 1024 :][:16] for c in range(columns // 4)]
        # chunks of a row are 1024 bytes apart, and groups of eight rows 128 bytes
        line = np.concatenate(chunks).view(np.uint32)
        for lane in lanes(row):
            assert found[lane, :columns].tolist() == line.tolist(), (row, lane)


WAIT = "WAIT: mbarrier.try_wait.parity.shared.b64 %p4, [bar], 0; @!%p4 bra WAIT; tcgen05.fence::after_thread_sync;"


def descriptor(register: str, at: int, leading: int, stride: int, swizzle: int = 0) -> str:
    """Set a descriptor of a matrix that begins `at` bytes after the tile."""
    high = (stride >> 4) | 1 << 14 | swizzle << 29
    return (
        f"add.u32 %r8, %r7, {at}; shr.u32 %r8, %r8, 4; and.b32 %r8, %r8, 0x3fff; or.b32 %r8, %r8, {(leading >> 4) << 16};"
        f" mov.b64 {register}, {{%r8, {high:#x}}};"
    )


# --- multiplications

CODES = {
    "f16": 0,
    "bf16": 1,
    "tf32": 2,
    "e4m3": 0,
    "e5m2": 1,
    "e2m3": 3,
    "e3m2": 4,
    "e2m1": 5,
    "u8": 0,
    "s8": 1,
}
SMALL = {"e4m3": (4, 3), "e5m2": (5, 2), "e3m2": (3, 2), "e2m3": (2, 3), "e2m1": (2, 1)}
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "u8": 8, "s8": 8} | {t: 1 + sum(p) for t, p in SMALL.items()}


@dataclass(frozen=True)
class Form:
    """A multiplication. `swizzle`: bytes; `turned`: whether A and B have M and N together; `where`: a, if A is in tensor memory."""

    kind: str
    a: str
    b: str
    d: str = "f32"
    m: int = 128
    n: int = 32
    swizzle: int = 0
    turned: tuple[bool, bool] = (False, False)
    weights: bool = False
    group: int = 1
    in_memory: bool = False
    negated: tuple[bool, bool] = (False, False)
    scales: tuple[str, str] = ("", "")  # the type of factors, and how the instruction says how many

    @property
    def k(self) -> int:
        return {"f16": 16, "tf32": 8, "mxf4": 64, "mxf4nvf4": 64}.get(self.kind, 32)

    @property
    def packed(self) -> bool:
        return self.kind in ("mxf4", "mxf4nvf4")

    @property
    def factors(self) -> int:
        return {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4, "block32": 2, "block16": 4}.get(
            self.scales[1], 0
        )

    @property
    def idesc(self) -> int:
        types = (1, 1) if self.packed else (CODES[self.a], CODES[self.b])
        found = types[0] << 7 | types[1] << 10 | self.negated[0] << 13 | self.negated[1] << 14
        found |= self.turned[0] << 15 | self.turned[1] << 16 | self.n >> 3 << 17 | self.m >> 4 << 24
        if self.factors:
            return found | (self.scales[0] == "ue8m0") << 23
        return found | {"f16": 0, "f32": 1, "s32": 2}[self.d] << 4

    def __str__(self) -> str:
        return "-".join(
            str(x) for x in vars(self).values() if x not in ((False, False), False, ("", ""))
        ).replace("'", "")


_F16 = Form("f16", "f16", "f16")
FORMS = [
    _F16,
    replace(_F16, d="f16", m=64, n=8),
    replace(_F16, a="bf16", b="f16", swizzle=128, n=64),
    *(replace(_F16, swizzle=s, turned=t) for s in (0, 32, 64, 128) for t in ((True, False), (False, True))),
    replace(_F16, in_memory=True, negated=(True, False)),
    Form("tf32", "tf32", "tf32", swizzle=64, negated=(False, True)),
    Form("tf32", "tf32", "tf32", in_memory=True),
    *(
        Form("f8f6f4", a, b, n=16)
        for a, b in (("e4m3", "e5m2"), ("e2m3", "e3m2"), ("e2m1", "e4m3"), ("e3m2", "e2m1"))
    ),
    Form("f8f6f4", "e5m2", "e4m3", swizzle=128, turned=(True, True), n=128),
    Form("f8f6f4", "e5m2", "e4m3", in_memory=True),
    Form("i8", "s8", "u8", "s32", m=64, n=24),
    Form("i8", "u8", "s8", "s32", in_memory=True),
    *(replace(_F16, m=m, n=64, weights=True) for m in (32, 64, 128)),
    Form("mxf8f6f4", "e4m3", "e2m3", scales=("ue8m0", "scale_vec::1X"), n=64),
    Form("mxf4", "e2m1", "e2m1", scales=("ue8m0", "scale_vec::2X"), swizzle=128),
    Form("mxf4nvf4", "e2m1", "e2m1", scales=("ue8m0", "block32")),
    Form("mxf4nvf4", "e2m1", "e2m1", scales=("ue4m3", "scale_vec::4X"), n=64),
    Form("mxf4nvf4", "e2m1", "e2m1", scales=("ue4m3", "block16"), in_memory=True),
    *(replace(_F16, m=m, n=64, group=2) for m in (128, 256)),
    Form("f8f6f4", "e4m3", "e4m3", m=256, n=32, group=2, in_memory=True),
]
SWIZZLES = {0: 0, 128: 2, 64: 4, 32: 6}
B_AT, SCALES_AT, A_IN, SCALE_A_IN, SCALE_B_IN = 16384, 36864, 300, 400, 410


def value(code: int, t: str) -> float:
    if t in ("u8", "s8"):
        return float(np.int8(np.uint8(code))) if t == "s8" else float(code)
    if t == "f16":
        return float(np.uint16(code).view(np.float16))
    if t in ("bf16", "tf32"):
        return float(np.uint32(code << 16 if t == "bf16" else code & 0xFFFFE000).view(np.float32))
    exponent, fraction = SMALL[t]
    bias = 2 ** (exponent - 1) - 1
    power, rest = code >> fraction & (2**exponent - 1), code & (2**fraction - 1)
    size = (
        rest * 2.0 ** (1 - bias - fraction)
        if power == 0
        else (2**fraction + rest) * 2.0 ** (power - bias - fraction)
    )
    return -size if code >> (exponent + fraction) & 1 else size


def codes(rng: np.random.Generator, t: str, shape: tuple[int, int]) -> np.ndarray:
    """Codes of small numbers, so that sums are exact in f32."""
    if t in ("f16", "bf16", "tf32"):
        numbers = rng.integers(-16, 17, shape).astype(np.float32) / 8
        if t == "f16":
            return numbers.astype(np.float16).view(np.uint16).astype(np.uint32)
        return numbers.view(np.uint32) >> (16 if t == "bf16" else 0)
    found = rng.integers(0, 2 ** BITS[t], shape, np.uint32)
    if t in ("e4m3", "e5m2"):  # exponents near 0
        exponent, fraction = SMALL[t]
        middle = 2 ** (exponent - 1)
        found = (
            found & ~np.uint32((2**exponent - 1) << fraction)
            | rng.integers(middle - 2, middle + 2, shape, np.uint32) << fraction
        )
    return found


def write(
    shared: np.ndarray, at: int, matrix: np.ndarray, form: Form, t: str, turned: bool
) -> tuple[int, int]:
    """Write a matrix [M or N][K] of codes as a descriptor has it; return its leading and its stride offset."""
    lines = matrix.T if turned else matrix  # one after the other, each contiguous in chunks of 16 bytes
    bits = BITS[t]
    each = 32 if form.packed else 16 if bits <= 8 else 128 // bits
    width = form.swizzle or 16
    chunks = lines.shape[1] // each
    if not form.swizzle:
        leading, stride = (2048, 128) if not turned else (128, 1024)
    elif not turned:
        leading, stride = 16, 8 * width
    else:
        leading, stride = 8 * width * (lines.shape[0] // 8), 8 * width
    for line, c in np.ndindex(lines.shape[0], chunks):
        if not turned:
            place = at + line // 8 * stride + line % 8 * width + (c * 16 if form.swizzle else c * leading)
        elif not form.swizzle:
            place = at + c * stride + line % 8 * 16 + line // 8 * leading
        else:
            place = at + c * 16 // width * leading + c * 16 % width + line % 8 * width + line // 8 * stride
        place ^= (place >> 7 & (width // 16 - 1)) << 4
        whole = sum(int(code) << bits * n for n, code in enumerate(lines[line, c * each : (c + 1) * each]))
        shared[place : place + 16] = np.frombuffer(whole.to_bytes(16, "little"), np.uint8)
    return leading, stride


def placed(form: Form, row: int, column: int) -> tuple[int, int, int]:
    """Block, lane and column of an element of D."""
    if form.group == 2:
        if form.m == 256:
            return row // 128, row % 128, column
        return row // 64, row % 64 + column // (form.n // 2) * 64, column % (form.n // 2)
    if form.weights and form.m < 128:
        part = form.n * form.m // 128
        return 0, row + column // part * form.m, column % part
    return 0, row // 16 * 32 + row % 16 if form.m == 64 else row, column


@functools.cache
def multiplying(form: Form, leading: tuple[int, int], stride: tuple[int, int], keeps: bool) -> str:
    """A kernel: D = A x B, or D = 2 x A x B in two steps. A in tensor memory comes from the shared memory at 0, lane by lane."""
    cta = f"cta_group::{form.group}"
    swizzle = SWIZZLES[form.swizzle]
    text = descriptor("%rd5", 0, leading[0], stride[0], swizzle) + descriptor(
        "%rd6", B_AT, leading[1], stride[1], swizzle
    )
    if form.in_memory:
        text += "shl.b32 %r20, %r0, 5; add.u32 %r20, %r20, %r7;"
        for n in range(8):
            text += f"ld.shared.b32 %r21, [%r20+{4 * n}]; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2+{A_IN + n}], {{%r21}};"
        text += "tcgen05.wait::st.sync.aligned; bar.sync 0;"
    if form.factors:
        for n, at in ((0, SCALE_A_IN), (512, SCALE_B_IN)):
            text += (
                descriptor("%rd7", SCALES_AT + n, 1024, 128)
                + f"@%p1 tcgen05.cp.{cta}.32x128b.warpx4 [%r1+{at}], %rd7;"
            )
    a = f"[%r1+{A_IN}]" if form.in_memory else "%rd5"
    ws = ".ws" if form.weights else ""
    scaled = f".block_scale.{form.scales[1]}" if form.factors else ""
    factors = f"[%r1+{SCALE_A_IN}], [%r1+{SCALE_B_IN}], " if form.factors else ""
    multiply = f"tcgen05.mma{ws}.{cta}.kind::{form.kind}{scaled} [%r1], {a}, %rd6, %r19, {factors}"
    text += f"mov.u32 %r19, {form.idesc:#x}; setp.ne.u32 %p6, %r0, %r0; setp.eq.u32 %p7, %r0, %r0;"
    if form.group == 2:
        text += "barrier.cluster.arrive; barrier.cluster.wait; mov.u32 %r22, %cluster_ctarank; setp.eq.and.u32 %p1, %r22, 0, %p1;"
    text += "".join(f"@%p1 {multiply}{sum_};" for sum_ in ("%p6", "%p7")[: 1 + keeps])
    if form.group == 2:
        text += f"mov.u16 %h1, 3; @%p1 tcgen05.commit.{cta}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [bar], %h1;"
    else:
        text += f"@%p1 tcgen05.commit.{cta}.mbarrier::arrive::one.shared::cluster.b64 [bar];"
    return kernel("k", text + WAIT, form.n, form.group, ".reqnctapercluster 2" if form.group == 2 else "")


def number(word: np.uint32, t: str) -> np.float32 | np.float16 | np.int32:
    if t == "f16":
        return np.uint16(word & 0xFFFF).view(np.float16)
    return word.view(np.float32 if t == "f32" else np.int32)


@pytest.mark.every(3)
@pytest.mark.parametrize("virtual", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_multiplication(form: Form, virtual: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(FORMS.index(form))
    blocks = form.group
    a, b = codes(rng, form.a, (form.m, form.k)), codes(rng, form.b, (form.n, form.k))
    shared = np.zeros((blocks, BYTES), np.uint8)
    leading, stride = [0, 0], [0, 0]
    for block in range(blocks):
        rows, columns = form.m // blocks, form.n // blocks
        part = a[block * rows : (block + 1) * rows]
        if form.in_memory:
            bits = 4 if form.packed else BITS[form.a]
            for row in range(128):
                whole = sum(int(code) << bits * n for n, code in enumerate(part[row]))
                shared[block, 32 * row : 32 * row + 32] = np.frombuffer(
                    whole.to_bytes(32, "little"), np.uint8
                )
        else:
            leading[0], stride[0] = write(shared[block], 0, part, form, form.a, form.turned[0])
        part = b[block * columns : (block + 1) * columns]
        leading[1], stride[1] = write(shared[block], B_AT, part, form, form.b, form.turned[1])
    read = [np.array([[value(int(x), t) for x in row] for row in m]) for m, t in ((a, form.a), (b, form.b))]
    if form.factors:
        e4m3 = form.scales[0] == "ue4m3"
        for n, (lines, at) in enumerate(((form.m, SCALES_AT), (form.n, SCALES_AT + 512))):
            chosen = rng.integers(*((0x30, 0x48) if e4m3 else (125, 130)), (lines, form.factors))
            for row, f in np.ndindex(*chosen.shape):
                shared[0, at + row % 32 * 16 + row // 32 * 4 + f] = chosen[row, f]
            factors = np.vectorize(lambda x: value(int(x), "e4m3") if e4m3 else 2.0 ** (int(x) - 127))(chosen)
            read[n] = read[n] * np.repeat(factors, form.k // form.factors, axis=1)
    keeps = form.group == 1
    product = read[0] @ read[1].T * (1 + keeps) * (-1) ** (sum(form.negated))
    text = HEAD + multiplying(form, tuple(leading), tuple(stride), keeps)
    found = launched(proven(text, tmp_path, virtual), shared, blocks)
    for row, column in np.ndindex(form.m, form.n):
        block, lane, at = placed(form, row, column)
        word = found[block, lane, at]
        got = number(word, form.d)
        assert got == product[row, column].astype(got.dtype), (row, column)


@pytest.mark.parametrize("virtual", [False, True])
def test_lanes_that_are_not_written_and_a_scaled_sum(virtual: bool, tmp_path: Path) -> None:
    """D = A x B, and then, in the lanes that are not hidden, D / 4 + A x B."""
    form, rng = replace(_F16, n=8), np.random.default_rng(9)
    a, b = codes(rng, "f16", (128, 16)), codes(rng, "f16", (8, 16))
    shared = np.zeros(BYTES, np.uint8)
    (first, second) = write(shared, 0, a, form, "f16", False), write(shared, B_AT, b, form, "f16", False)
    masks = [0x1, 0xF0F0F0F0, 0, 0xFFFFFFFF]
    text = multiplying(form, (first[0], second[0]), (first[1], second[1]), True)
    assert text.count("%r19, %p7;") == 1
    text = text.replace("%r19, %p7;", "%r19, {%r60, %r61, %r62, %r63}, %p7, 2;")
    moves = " ".join(f"mov.u32 %r{60 + n}, {mask:#x};" for n, mask in enumerate(masks))
    text = text.replace("mov.u32 %r19,", f"{moves} mov.u32 %r19,")
    found = launched(proven(HEAD + text, tmp_path, virtual), shared)[0][:, :8].copy().view(np.float32)
    values = [matrix.astype(np.uint16).view(np.float16).astype(float) for matrix in (a, b)]
    product = values[0] @ values[1].T
    for lane in range(128):
        hidden = masks[lane // 32] >> lane % 32 & 1
        assert (found[lane] == product[lane] * (1 if hidden else 1.25)).all(), lane


# --- what is a fault

FAULTS = {
    "other lanes": ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r1];", "of its number modulo 4"),
    "columns that are not there": (
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r2+512];",
        "this tensor memory is not allocated",
    ),
    "more columns": (
        "@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [at], 32;",
        "not as many free columns",
    ),
    "another number of columns": (
        "@%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 48;",
        "powers of two from 32 to 512 columns",
    ),
    "a type": (
        "mov.u32 %r19, 0x8040790; @%p1 tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd5, %rd6, %r19, %p1;",
        "has a type that this kind of tcgen05.mma has not",
    ),
    "a shape": (
        "mov.u32 %r19, 0x8000010; @%p1 tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd5, %rd6, %r19, %p1;",
        "does not multiply as this instruction descriptor says",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    body, why = FAULTS[name]
    device = Device(HEAD + kernel("k", f"mov.b64 %rd5, 0; mov.b64 %rd6, 0; {body}", 1))
    with pytest.raises(DeviceFault, match=why):
        launched(device, np.zeros(4, np.uint8))


def test_blocks_have_tensor_memory_of_their_own(tmp_path: Path) -> None:
    body = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r3}; tcgen05.wait::st.sync.aligned;"
    found = launched(proven(HEAD + kernel("k", body, 2), tmp_path), np.zeros(4, np.uint8), 3)
    assert (found[:, :, 0] == np.arange(3)[:, None]).all() and (found[:, :, 1] == 0xFFFFFFFF).all()

"""Arrays, surfaces and textures. Fetches are compared with a reference in NumPy, written from the CUDA programming guide.

One program does all these fetches: it reads the textures and the places from a file.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from cudasim_device import program, run

WRAP, CLAMP, MIRROR, BORDER = range(4)
MODES = ["wrap", "clamp", "mirror", "border"]
ARRAY, LINEAR, PITCHED, MIPMAPPED = range(4)
CUBE, GATHER, FETCH = 10, 20, 30
PLAIN, LEVEL, GRADIENT = range(3)
KINDS = {"i": 0, "u": 1, "f": 2}  # cudaChannelFormatKind


@dataclass
class Case:
    """A texture, and the places that are fetched. `levels[0]` is its texels: [z, y, x, channel]."""

    geometry: int
    levels: list[np.ndarray]
    layered: bool = False
    resource: int = ARRAY
    address: tuple[int, int, int] = (CLAMP, CLAMP, CLAMP)
    linear: bool = False
    normalized: bool = False
    as_float: bool = False
    srgb: bool = False
    border: tuple[float, ...] = (0, 0, 0, 0)
    mip_linear: bool = False
    bias: float = 0
    clamp: tuple[float, float] = (0, 0)
    how: int = PLAIN
    component: int = 0
    places: np.ndarray = field(
        default_factory=lambda: np.zeros((0, 7), np.float32)
    )  # x y z layer level dx dy

    @property
    def texels(self) -> np.ndarray:
        return self.levels[0]

    @property
    def floats(self) -> bool:
        return self.as_float or self.texels.dtype.kind == "f"

    def packed(self) -> bytes:
        depth, height, width, channels = self.texels.shape
        flat = self.geometry in (1, FETCH)
        sizes = width, 0 if flat else height, depth if self.layered or self.geometry in (3, CUBE) else 0
        kind = self.texels.dtype.kind
        texels = b"".join(level.tobytes() for level in self.levels)
        head = struct.pack(
            "<6i4i3i4i4fi3f5i",
            *(self.geometry, self.layered, self.resource, self.texels.itemsize * 8, KINDS[kind], channels),
            *(*sizes, len(self.levels), *self.address),
            *(self.linear, self.normalized, self.as_float, self.srgb, *self.border),
            *(self.mip_linear, self.bias, *self.clamp, self.how, self.component),
            *(0 if self.floats else 1 if kind == "i" else 2, len(texels), len(self.places)),
        )
        places = self.places.copy()
        places.view(np.int32)[:, 3] = self.places[:, 3]
        return head + texels + places.tobytes()


HOSTILE = pytest.mark.parametrize("hostile", [False, True], ids=["kind", "hostile"])


@HOSTILE
def test_arrays_and_surfaces(hostile: bool) -> None:
    done = run([program("arrays", "-lcuda")], hostile)
    assert (done.returncode, done.stdout, done.stderr) == (0, "arrays ok\n", "")


@pytest.mark.parametrize(
    ("how", "line"),
    [
        (
            "outside",
            "surface access outside of the surface in _Z6beyondy, block (0,0,0) thread (0,0,0), PTX line ",
        ),
        ("destroyed", "surface access with a handle that is not a surface object in _Z6beyondy"),
    ],
)
def test_surface_fault(how: str, line: str) -> None:
    done = run([program("arrays", "-lcuda"), how])
    assert (done.returncode, done.stdout) == (0, "sync: cudaErrorLaunchFailure\n")
    assert line in done.stderr


@HOSTILE
def test_surface_reductions(hostile: bool) -> None:
    done = run([program("reductions", "-arch=sm_80")], hostile)
    assert (done.returncode, done.stdout, done.stderr) == (0, "reductions ok\n", "")


@pytest.mark.parametrize(
    ("how", "line"),
    [
        (
            "outside",
            "surface access outside of the surface in _Z7outsidey, block (0,0,0) thread (0,0,0), PTX line ",
        ),
        ("format", "surface reduction of a surface whose texels have no such integers in _Z9formattedy"),
    ],
)
def test_fault_of_a_surface_reduction(how: str, line: str) -> None:
    done = run([program("reductions", "-arch=sm_80"), how])
    assert (done.returncode, done.stdout) == (0, "sync: cudaErrorLaunchFailure\n")
    assert line in done.stderr


# --- the reference ----------------------------------------------------------------------------------


def addressed(mode: int, i: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the texels that numbers of texels stand for, and which of them are in the border."""
    outside = (i < 0) | (i >= count)
    if mode == WRAP:
        return np.mod(i, count), np.zeros_like(outside)
    if mode == MIRROR:
        folded = np.mod(i, 2 * count)
        return np.minimum(folded, 2 * count - 1 - folded), np.zeros_like(outside)
    return np.clip(i, 0, count - 1), outside if mode == BORDER else np.zeros_like(outside)


def values(case: Case, texels: np.ndarray) -> np.ndarray:
    """Return texels as what the texture returns, in double where it returns floats."""
    if not case.floats:
        return texels.astype(np.int64)
    found = texels.astype(np.float64)
    if case.as_float and texels.dtype.kind in "iu":
        found = np.maximum(found / np.iinfo(texels.dtype).max, -1)
        if case.srgb:
            color = found[..., :3]
            found[..., :3] = np.where(color <= 0.04045, color / 12.92, ((color + 0.055) / 1.055) ** 2.4)
    return found


def sampled(
    case: Case, texels: np.ndarray, at: list[np.ndarray], layer: np.ndarray, linear: bool
) -> np.ndarray:
    """Sample one level. `at`: for each dimension, the places in texels, in double."""
    texture = values(case, texels)
    sizes = texels.shape[2], texels.shape[1], texels.shape[0]
    modes = list(case.address)
    if case.geometry == CUBE:
        modes = [CLAMP] * 3
    elif not case.normalized:  # wrap and mirror need normalized coordinates
        modes = [mode if mode == BORDER else CLAMP for mode in modes]

    def read(places: list[np.ndarray]) -> np.ndarray:
        border = np.zeros(len(layer), bool)
        index = [layer, np.zeros_like(layer), np.zeros_like(layer)]  # z y x
        for d, i in enumerate(places):
            texel, outside = addressed(modes[d], i, sizes[d])
            index[2 - d] = texel
            border |= outside
        found = texture[index[0], index[1], index[2]]
        return np.where(border[:, None], np.asarray(case.border[: found.shape[1]]), found)

    if not linear:
        return read([np.floor(x).astype(np.int64) for x in at])
    # 8 bits of fraction, rounded to nearest
    fixed = [np.floor((x - 0.5) * 256 + 0.5).astype(np.int64) for x in at]
    total = np.zeros((len(layer), texture.shape[3]))
    for corner in itertools.product((0, 1), repeat=len(at)):
        weight = np.ones(len(layer))
        for second, x in zip(corner, fixed, strict=True):
            fraction = (x & 255) / 256
            weight = weight * (fraction if second else 1 - fraction)
        texel = read([(x >> 8) + second for second, x in zip(corner, fixed, strict=True)])
        total += weight[:, None] * texel
    return total


def faces(places: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the face of each direction, and its place on the face from 0 to 1."""
    face, s, t = [], [], []
    for x, y, z in places[:, :3].astype(np.float64):
        m = max(abs(x), abs(y), abs(z))
        which, u, v = {
            (True, abs(x)): (0, -z, -y) if x > 0 else (1, z, -y),
            (True, abs(y)): (2, x, z) if y > 0 else (3, x, -z),
            (True, abs(z)): (4, x, -y) if z > 0 else (5, -x, -y),
        }[True, m]
        face.append(which)
        s.append((u / m + 1) / 2)
        t.append((v / m + 1) / 2)
    return np.array(face), np.array(s), np.array(t)


def reference(case: Case) -> np.ndarray:
    """Return what the fetches return: [place, channel]."""
    layer = case.places[:, 3].astype(np.int64) if case.layered else np.zeros(len(case.places), np.int64)
    dimensions = {CUBE: 2, GATHER: 2, FETCH: 1}.get(case.geometry, case.geometry)
    at = [case.places[:, d].astype(np.float64) for d in range(dimensions)]
    layers = case.texels.shape[0] // (6 if case.geometry == CUBE else 1)
    layer = np.clip(layer, 0, layers - 1)
    if case.geometry == CUBE:
        face, *at = faces(case.places)
        layer = layer * 6 + face
    if case.geometry == FETCH:
        found = values(case, case.texels)[0, 0]
        i = case.places[:, 0].astype(np.int64)
        inside = (i >= 0) & (i < len(found))
        return np.where(inside[:, None], found[np.clip(i, 0, len(found) - 1)], 0)

    def level(number: np.ndarray) -> np.ndarray:
        result = np.zeros((len(layer), case.texels.shape[3]))
        for n, texels in enumerate(case.levels):
            scale = [
                texels.shape[2 - d] if case.normalized or case.geometry == CUBE else 1
                for d in range(dimensions)
            ]
            all_places = sampled(
                case, texels, [x * s for x, s in zip(at, scale, strict=True)], layer, case.linear
            )
            result = np.where((number == n)[:, None], all_places, result)
        return result

    if case.geometry == GATHER:
        x, y = (
            (np.floor(a * s * 256 + 0.5).astype(np.int64) - 128) >> 8
            for a, s in zip(
                at, [case.texels.shape[2], case.texels.shape[1]] if case.normalized else [1, 1], strict=True
            )
        )
        corners = [(0, 1), (1, 1), (1, 0), (0, 0)]
        read = [
            sampled(case, case.texels, [x + i, y + j], layer, False)[:, case.component] for i, j in corners
        ]
        return np.stack(read, axis=1)
    if case.resource != MIPMAPPED:
        return sampled_once(case, at, layer)
    detail = np.zeros(len(layer))
    if case.how == LEVEL:
        detail = case.places[:, 4].astype(np.float64)
    elif case.how == GRADIENT:
        size = np.array([case.texels.shape[2], case.texels.shape[1]]) if case.normalized else np.ones(2)
        if dimensions == 1:
            size[1] = size[0]
        slopes = np.abs(case.places[:, 5:7].astype(np.float64)) * size
        detail = np.log2(slopes.max(axis=1))
    detail = np.clip(detail + case.bias, *case.clamp)
    detail = np.clip(detail, 0, len(case.levels) - 1)
    if not case.mip_linear:
        return level(np.floor(detail + 0.5).astype(np.int64))
    fixed = np.floor(detail * 256 + 0.5).astype(np.int64)
    weight = ((fixed & 255) / 256)[:, None]
    above = np.minimum((fixed >> 8) + 1, len(case.levels) - 1)
    return (1 - weight) * level(fixed >> 8) + weight * level(above)


def sampled_once(case: Case, at: list[np.ndarray], layer: np.ndarray) -> np.ndarray:
    scaled = case.normalized or case.geometry == CUBE
    places = [x * case.texels.shape[2 - d] if scaled else x for d, x in enumerate(at)]
    return sampled(case, case.texels, places, layer, case.linear)


# --- the cases --------------------------------------------------------------------------------------

RANDOM = np.random.default_rng(7)
FORMATS = [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.float16, np.float32]


def texels(dtype: type, *shape: int) -> np.ndarray:
    if np.dtype(dtype).kind == "f":
        return RANDOM.uniform(-8, 8, shape).astype(dtype)
    limits = np.iinfo(dtype)
    return RANDOM.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)


def places(case: Case, count: int = 96) -> np.ndarray:
    """Return places in and around the texture; some at the edges of texels, where rounding matters."""
    depth, height, width, _ = case.texels.shape
    found = RANDOM.uniform(-1.6, 2.6, (count, 7)).astype(np.float32)
    found[:24, :3] = np.array([RANDOM.integers(-16, 40, 3) / 16 for _ in range(24)], np.float32)
    if not case.normalized:
        found[:, :3] *= np.array([width, height, depth], np.float32)
    if case.geometry == CUBE:
        found[:, :3] = RANDOM.uniform(-1, 1, (count, 3))
    if case.geometry == FETCH:
        found[:, 0] = RANDOM.integers(-3, width + 3, count)
    layers = depth // 6 if case.geometry == CUBE else depth
    found[:, 3] = RANDOM.integers(0, layers + 2, count)  # beyond the last: the last
    found[:, 4] = RANDOM.uniform(-1, len(case.levels) + 1, count)
    found[:, 5:] = RANDOM.uniform(0.001, 1.5, (count, 2))
    return found


def levels(dtype: type, count: int, depth: int, height: int, width: int, channels: int) -> list[np.ndarray]:
    sizes = [tuple(max(1, n >> k) for n in (depth, height, width)) for k in range(count)]
    return [texels(dtype, *size, channels) for size in sizes]


def cases() -> dict[str, Case]:
    made: dict[str, Case] = {}
    for dtype, channels in itertools.product(FORMATS, (1, 2, 4)):  # every format
        name = f"{np.dtype(dtype).name}-{channels}"
        kind, size = np.dtype(dtype).kind, np.dtype(dtype).itemsize
        made[f"element-{name}"] = Case(2, [texels(dtype, 1, 5, 7, channels)])
        if kind == "f" or size < 4:
            made[f"linear-{name}"] = Case(
                2, [texels(dtype, 1, 5, 7, channels)], linear=True, as_float=kind != "f", normalized=True
            )
            if kind != "f":
                made[f"normalized-{name}"] = Case(2, [texels(dtype, 1, 5, 7, channels)], as_float=True)
    for mode, linear, normalized in itertools.product(range(4), (False, True), (False, True)):
        coordinates = "normalized" if normalized else "texels"
        name = f"{MODES[mode]}-{'linear' if linear else 'point'}-{coordinates}"
        more = {
            "address": (mode, mode, mode),
            "linear": linear,
            "normalized": normalized,
            "border": (0.25, -3, 7, 1),
        }
        made[f"1d-{name}"] = Case(1, [texels(np.float32, 1, 1, 11, 1)], **more)
        made[f"2d-{name}"] = Case(2, [texels(np.float32, 1, 6, 9, 4)], **more)
        made[f"3d-{name}"] = Case(3, [texels(np.float32, 4, 6, 5, 2)], **more)
        made[f"bytes-{name}"] = Case(2, [texels(np.uint8, 1, 6, 9, 4)], as_float=True, **more)
        made[f"pitched-{name}"] = Case(2, [texels(np.float32, 1, 6, 9, 2)], resource=PITCHED, **more)
        made[f"layered1d-{name}"] = Case(1, [texels(np.float32, 5, 1, 9, 1)], layered=True, **more)
        made[f"layered2d-{name}"] = Case(2, [texels(np.float32, 5, 6, 9, 1)], layered=True, **more)
        made[f"gather-{name}"] = Case(GATHER, [texels(np.float32, 1, 6, 9, 4)], component=mode, **more)
    mixed = Case(
        3, [texels(np.float32, 4, 6, 5, 1)], address=(WRAP, MIRROR, BORDER), linear=True, normalized=True
    )
    made["3d-mixed"] = mixed
    made["srgb"] = Case(2, [texels(np.uint8, 1, 6, 9, 4)], as_float=True, srgb=True, linear=True)
    made["gather-integers"] = Case(GATHER, [texels(np.int16, 1, 6, 9, 4)], component=2)
    for linear in (False, True):
        name = "linear" if linear else "point"
        cube = texels(np.float32, 6, 8, 8, 4)
        made[f"cube-{name}"] = Case(CUBE, [cube], linear=linear, normalized=True)
        cubes = texels(np.float32, 18, 8, 8, 1)
        made[f"cubes-{name}"] = Case(CUBE, [cubes], layered=True, linear=linear, normalized=True)
    for dtype in FORMATS:
        made[f"fetch-{np.dtype(dtype).name}"] = Case(FETCH, [texels(dtype, 1, 1, 37, 4)], resource=LINEAR)
    made["fetch-normalized"] = Case(FETCH, [texels(np.int8, 1, 1, 37, 2)], resource=LINEAR, as_float=True)
    for linear, mip_linear, how in itertools.product((False, True), (False, True), (PLAIN, LEVEL, GRADIENT)):
        more = {
            "linear": linear,
            "mip_linear": mip_linear,
            "how": how,
            "resource": MIPMAPPED,
            "normalized": True,
        }
        name = f"{'linear' if linear else 'point'}-{'linear' if mip_linear else 'point'}-{how}"
        made[f"mipmap1d-{name}"] = Case(1, levels(np.float32, 5, 1, 1, 16, 1), clamp=(0, 4), **more)
        made[f"mipmap2d-{name}"] = Case(
            2, levels(np.float32, 4, 1, 8, 16, 2), clamp=(0.5, 2.75), bias=0.5, **more
        )
        if how != GRADIENT:
            made[f"mipmap3d-{name}"] = Case(3, levels(np.float32, 3, 4, 8, 4, 1), clamp=(0, 9), **more)
    for case in made.values():
        case.places = places(case)
    return made


CASES = cases()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What the device returns, by case."""
    folder: Path = tmp_path_factory.mktemp("textures")
    (folder / "in").write_bytes(b"".join(case.packed() for case in CASES.values()))
    done = run([program("textures"), folder / "in", folder / "out"], timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "textures ok\n", "")
    words = np.fromfile(folder / "out", np.uint32).reshape(-1, 4)
    ends = np.cumsum([len(case.places) for case in CASES.values()])
    return dict(zip(CASES, np.split(words, ends[:-1]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_fetches(name: str, results: dict[str, np.ndarray]) -> None:
    case = CASES[name]
    expected = reference(case)
    words = results[name][:, : expected.shape[1]]
    if not case.floats:
        assert (words.view(np.int32) == expected.astype(np.int64).astype(np.uint32).view(np.int32)).all()
        return
    found = words.copy().view(np.float32)
    tolerance = {"rtol": 1e-6, "atol": 1e-6}
    if not case.linear and not case.mip_linear and not case.srgb:
        assert (found == expected.astype(np.float32)).all()
    np.testing.assert_allclose(found, expected, **tolerance)

"""Images out of what nvcc builds, against cuobjdump; out of damaged files only ImageError may come."""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import struct
import subprocess
import sysconfig
import tracemalloc
from pathlib import Path

import pytest

from gpubpf.errors import ImageError
from gpubpf.images import device_link, fatbin, instrument
from gpubpf.ptx import parser

NVCC = shutil.which("nvcc")
CUOBJDUMP = next(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/cuobjdump"), None)
SOURCE = """
namespace ns { template<typename T> __global__ void scale(T *p, T f, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) p[i] *= f; } }
struct Pair { double a; char b; };
__device__ int counter; __constant__ float table[4];
extern "C" __global__ void plain(int *p, Pair q, short s) {
    atomicAdd(&counter, 1); p[threadIdx.x] = table[threadIdx.x & 3] + q.b + s; }
int main() { float *p; cudaMalloc(&p, 400); ns::scale<float><<<1,100>>>(p, 2.f, 100);
    ns::scale<double><<<1,1>>>((double*)p, 2., 1); plain<<<1,1>>>((int*)p, Pair(), 1); return 0; }
"""
SCALE_FLOAT, SCALE_DOUBLE = "_ZN2ns5scaleIfEEvPT_S1_i", "_ZN2ns5scaleIdEEvPT_S1_i"
SM_75_90 = "-gencode arch=compute_75,code=[sm_75,compute_75] -gencode arch=compute_90,code=[sm_90,compute_90]"
FAMILIES = " ".join(f"-gencode arch=compute_{a},code=[sm_{a},compute_{a}]" for a in ("90a", "100f"))
BUILDS = {
    "default": "-cudart shared",
    "two": f"-cudart shared -maxrregcount=32 -Xptxas -dlcm=cg {SM_75_90}",
    "families": f"-cudart shared {FAMILIES}",
    "debug": "-cudart static -G",
    "rdc": "-cudart shared -rdc=true",
    "none": "-cudart shared --compress-mode=none",
    "speed": "-cudart shared --compress-mode=speed",  # LZ4
    "size": "-cudart shared --compress-mode=size",
    "sass": "-cudart shared -gencode arch=compute_90,code=sm_90",
    "library": "-cudart shared -shared -Xcompiler -fPIC",
    "object": "-c",
    "fatbin": "-fatbin",
    "cubin": "-cubin -arch sm_90",
    "ptx": "-ptx -arch sm_90",
}

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory):
    """A function that builds SOURCE one way, once."""
    directory = tmp_path_factory.mktemp("fatbin")
    source = directory / "program.cu"
    source.write_text(SOURCE)

    def built(name: str) -> Path:
        path = directory / (name + (".o" if name == "object" else ""))
        if not path.exists():
            assert NVCC is not None
            subprocess.run(
                [NVCC, *BUILDS[name].split(), "-o", path, source],
                check=True,
                capture_output=True,
                cwd=directory,
            )
        return path

    return built


def oracle(path: Path) -> list[tuple[str, str, str, str]]:
    """(kind, arch, version, options) of each image as cuobjdump lists them."""
    assert CUOBJDUMP is not None
    os.chmod(CUOBJDUMP, 0o755)
    text = subprocess.run([CUOBJDUMP, "-all", path], check=True, capture_output=True, text=True).stdout
    images = []
    for kind, body in re.findall(r"Fatbin (elf|ptx) code:\n=+\n(.*?)(?=\n\n|\Z)", text, re.DOTALL):
        fields = dict(line.split(" = ", 1) for line in body.splitlines() if " = " in line)
        options = " ".join(fields.get("ptxasOptions", "").split())
        images.append((kind, fields["arch"], fields["code version"], options))
    return images


@pytest.mark.every(6)
@needs_nvcc
@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump (PyPI: nvidia-cuda-cuobjdump)")
@pytest.mark.parametrize(
    "name", ["default", "two", "families", "debug", "rdc", "none", "speed", "size", "sass", "library"]
)
def test_agrees_with_cuobjdump(name: str, build) -> None:
    path = build(name)
    images = fatbin.images_of_file(path)
    ours = [(i.kind, i.arch, f"[{i.version[0]},{i.version[1]}]", " ".join(i.options.split())) for i in images]
    assert sorted(ours) == sorted(oracle(path))
    for image in images:
        if image.kind == "elf":
            assert image.payload.startswith(b"\x7fELF")
        else:
            assert f".target {image.arch}" in image.text and image.text.rstrip().endswith("}")


@needs_nvcc
def test_kernels_and_their_parameters(build) -> None:
    images = fatbin.images_of_file(build("two"))
    cubins = [image for image in images if image.kind == "elf" and fatbin.kernels(image.payload)]
    assert [image.arch for image in cubins] == ["sm_75", "sm_90"]
    for image in cubins:
        kernels = fatbin.kernels(image.payload)
        assert set(kernels) == {SCALE_FLOAT, SCALE_DOUBLE, "plain"}
        assert kernels[SCALE_FLOAT].parameters == ((0, 8), (8, 4), (12, 4))
        assert kernels[SCALE_DOUBLE].parameters == ((0, 8), (8, 8), (16, 4))
        assert kernels["plain"].parameters == ((0, 8), (8, 16), (24, 2))
        assert kernels["plain"].parameter_size == 26
        assert all(0 < kernel.registers <= 32 and kernel.code_size > 0 for kernel in kernels.values())


@needs_nvcc
def test_parameters_larger_than_the_old_field_holds(tmp_path: Path) -> None:
    source = tmp_path / "huge.cu"
    source.write_text(
        'struct S { int v[5000]; }; extern "C"'
        "__global__ void huge(const __grid_constant__ S s, int *p, char c) { *p = s.v[threadIdx.x] + c; }"
    )
    subprocess.run([NVCC, "-cubin", "-arch", "sm_90", "-o", tmp_path / "huge", source], check=True)
    (image,) = fatbin.images_of_file(tmp_path / "huge")
    assert fatbin.kernels(image.payload)["huge"].parameters == ((0, 20000), (20000, 8), (20008, 1))


@needs_nvcc
def test_the_options_travel_with_the_ptx(build) -> None:
    options = {image.options for image in fatbin.images_of_file(build("two")) if image.kind == "ptx"}
    assert [option.split() for option in options] == [["-dlcm=cg", "-maxrregcount=32"]]


@pytest.mark.every(2)
@needs_nvcc
@pytest.mark.parametrize(
    "name, kinds", [("fatbin", "elf ptx"), ("cubin", "elf"), ("ptx", "ptx"), ("object", "elf ptx")]
)
def test_other_files(name: str, kinds: str, build) -> None:
    images = fatbin.images_of_file(build(name))
    assert [image.kind for image in images] == kinds.split()
    for image in images:
        if image.kind == "elf":
            assert set(fatbin.kernels(image.payload)) == {SCALE_FLOAT, SCALE_DOUBLE, "plain"}
        else:
            assert all(f".entry {kernel}" in image.text for kernel in (SCALE_FLOAT, SCALE_DOUBLE, "plain"))


@needs_nvcc
def test_bytes_as_a_program_hands_them_to_the_driver(build) -> None:
    raw = build("fatbin").read_bytes()
    expected = fatbin.images_of_bytes(raw)
    wrapper = struct.pack("<IIQQ", fatbin.WRAPPER_MAGIC, 1, 0, 0)
    assert fatbin.images_of_bytes(wrapper + raw) == expected
    doubled = fatbin.images_of_bytes(raw + bytes(16) + raw)
    assert [image.module for image in doubled] == [0, 0, 1, 1]
    assert [len(group) for group in fatbin.modules(doubled)] == [2, 2]
    text = build("ptx").read_bytes()
    assert fatbin.images_of_bytes(text + b"\0")[0].text == text.decode()


@needs_nvcc
def test_without_symbols_and_without_section_headers(build, tmp_path: Path) -> None:
    expected = [(i.kind, i.arch, i.payload) for i in fatbin.images_of_file(build("two"))]
    stripped = tmp_path / "stripped"
    subprocess.run(["strip", "-o", stripped, build("two")], check=True)
    assert [(i.kind, i.arch, i.payload) for i in fatbin.images_of_file(stripped)] == expected
    headless = bytearray(stripped.read_bytes())
    headless[40:48] = bytes(8)  # e_shoff
    headless[58:64] = bytes(6)
    (tmp_path / "headless").write_bytes(headless)
    assert [(i.kind, i.arch, i.payload) for i in fatbin.images_of_file(tmp_path / "headless")] == expected


@needs_nvcc
def test_fatbins_in_other_sections(build, tmp_path: Path) -> None:
    """As in libcufft (.data, .ldata) and in programs with an array. The magic number alone is not a fatbin, nor is PTX in a string."""
    raw = build("fatbin").read_bytes()
    expected = [(i.kind, i.arch, i.payload) for i in fatbin.images_of_bytes(raw)]
    words = ", ".join(map(str, raw))
    (tmp_path / "arrays.c").write_text(f"""
        __attribute__((aligned(8))) unsigned char changed[] = {{{words}}};
        __attribute__((aligned(8))) const unsigned char fixed[] = {{{words}}};
        __attribute__((aligned(8))) const unsigned magic[] = {{{fatbin.FATBIN_MAGIC}u, 0x100001u, 0x7fffffffu, 0}};
        const char text[] = ".version 8.0\\n.target sm_90\\n";
    """)
    library = tmp_path / "library.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "arrays.c"], check=True)
    images = fatbin.images_of_file(library)
    assert [(i.kind, i.arch, i.payload) for i in images] == expected * 2
    assert [len(group) for group in fatbin.modules(images)] == [2, 2]
    with_code = tmp_path / "with_code"
    words = [
        "objcopy",
        f"--add-section=more={build('fatbin')}",
        "--set-section-flags=more=alloc,readonly,data",
    ]
    subprocess.run([*words, build("two"), with_code], check=True)
    both = [(i.kind, i.arch, i.payload) for i in fatbin.images_of_file(with_code)]
    own = [(i.kind, i.arch, i.payload) for i in fatbin.images_of_file(build("two"))]
    assert both == own + expected


@needs_nvcc
def test_what_is_not_linked_is_no_whole_module(build) -> None:
    images = fatbin.images_of_file(build("rdc"))
    assert [image.relocatable for image in images if image.kind == "ptx"] == [True]
    (module,) = device_link.modules(images)
    linked = [image for image in module if not image.relocatable]
    assert [image.kind for image in linked] == ["elf"] and fatbin.choose(linked, (9, 0)) == "SASS only"
    chosen = device_link.choose(module, (9, 0))
    assert isinstance(chosen, fatbin.FatbinImage) and chosen.kind == "ptx" and not chosen.relocatable
    assert set(fatbin.kernels(linked[0].payload)) == set(parser.parse(chosen.text).entries)
    assert device_link.modules(module) == (module,)


def ptx(arch: str, relocatable: bool = False) -> fatbin.FatbinImage:
    suffix = arch[-1] if arch[-1] in "af" else ""
    number = int(arch[3:].rstrip("af"))
    return fatbin.FatbinImage("ptx", number, suffix, (9, 0), "", 0, "", 0, relocatable, b"")


@pytest.mark.parametrize(
    "archs, cc, expected",
    [
        ("sm_75 sm_80 sm_90", (8, 6), "sm_80"),
        ("sm_75 sm_80 sm_90", (9, 0), "sm_90"),
        ("sm_90 sm_90a", (9, 0), "sm_90a"),
        ("sm_75 sm_90a", (10, 0), "sm_75"),
        ("sm_90a", (10, 0), "PTX for another GPU (sm_90a)"),
        ("sm_100f", (10, 3), "sm_100f"),
        ("sm_100f", (12, 0), "PTX for another GPU (sm_100f)"),
        ("sm_120", (9, 0), "PTX for a newer GPU (sm_120)"),
        ("sm_120 sm_100", (9, 0), "PTX for a newer GPU (sm_100)"),
        ("", (9, 0), "SASS only"),
    ],
)
def test_choose(archs: str, cc: tuple[int, int], expected: str) -> None:
    chosen = fatbin.choose([ptx(arch) for arch in archs.split()], cc)
    assert (chosen if isinstance(chosen, str) else chosen.arch) == expected


def test_an_ordinary_program_has_no_images() -> None:
    assert fatbin.images_of_file("/bin/sh") == ()


@pytest.mark.parametrize("path", ["/dev/zero", "/", "/no/such/file", __file__])
def test_other_files_are_one_line(path: str) -> None:
    with pytest.raises(ImageError) as caught:
        fatbin.images_of_file(path)
    assert path in str(caught.value) and "\n" not in str(caught.value) and "; " in str(caught.value)


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ImageError):
        fatbin.images_of_file(tmp_path / "pipe")


def image_header(payload: bytes, flags: int, size: int, compressed: int | None = None) -> bytes:
    stored = len(payload)
    fields = (
        1,
        0x101,
        64,
        stored,
        stored if compressed is None else compressed,
        0,
        0,
        9,
        75,
        0,
        0,
        flags,
        0,
        size,
    )
    header = struct.pack("<HHIQIIHHIIIQQQ", *fields)
    return struct.pack("<IHHQ", fatbin.FATBIN_MAGIC, 1, 16, len(header) + len(payload)) + header + payload


@pytest.mark.parametrize("flags", [0x2000, 0x8000])
def test_a_lie_about_the_size_allocates_nothing(flags: int) -> None:
    import lz4.block
    import zstandard

    pack = (
        zstandard.ZstdCompressor().compress
        if flags == 0x8000
        else lambda d: lz4.block.compress(d, store_size=False)
    )
    small, bomb = pack(b"x" * 100), pack(bytes(1 << 26))
    (honest,) = fatbin.images_of_bytes(image_header(small, flags, 100))
    assert honest.payload == b"x" * 100
    tracemalloc.start()
    for payload, size in ((small, 1 << 29), (bomb, 100), (b"junk" * 10, 1000), (small, 101), (small, 99)):
        with pytest.raises(ImageError):
            assert fatbin.images_of_bytes(image_header(payload, flags, size))[0].payload
    with pytest.raises(ImageError):
        fatbin.images_of_bytes(image_header(small, flags, 1 << 40))
    with pytest.raises(ImageError):
        fatbin.images_of_bytes(image_header(small, flags, 100, compressed=len(small) + 1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24


def use(data: bytes) -> None:
    """Everything that can be asked of an image."""
    for image in fatbin.images_of_bytes(data):
        if image.kind == "elf":
            fatbin.kernels(image.payload)
        assert image.text if image.kind == "ptx" else image.arch


@pytest.mark.every(2)
@needs_nvcc
@pytest.mark.parametrize("name", ["fatbin", "speed", "cubin", "ptx", "default"])
def test_damage_is_an_image_error(name: str, build) -> None:
    original = build(name).read_bytes()
    generator = random.Random(name)
    # Most of the damage goes where structure is: headers of ELF, sections, fatbins and images.
    places = [m.start() for m in re.finditer(re.escape(fatbin.FATBIN_MAGIC.to_bytes(4, "little")), original)]
    places += [0, int.from_bytes(original[40:48], "little")] if original.startswith(b"\x7fELF") else [0]
    for _ in range(1500):
        damaged = bytearray(original)
        for _ in range(generator.randint(1, 8)):
            if generator.random() < 0.7:
                at = min(generator.choice(places) + generator.randint(0, 160), len(damaged) - 1)
            else:
                at = generator.randrange(len(damaged))
            damaged[at] = generator.choice([0, 1, 0x7F, 0x80, 0xFF, generator.randrange(256)])
        if generator.random() < 0.2:
            del damaged[generator.randrange(len(damaged)) :]
        try:
            use(bytes(damaged))
        except ImageError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("kind, size", [(1, 1 << 30), (1, 128 << 20), (2, 1 << 30)])
def test_what_decompresses_to_too_much_is_not_decompressed(codec: str, kind: int, size: int) -> None:
    """A few KB that would become a GB are refused by the size that the header states."""
    flag, stored = (0x8000, b"x" * 4096) if codec == "zstd" else (0x2000, b"x" * (size // 255))
    header = fatbin._IMAGE.pack(
        kind, 0x101, fatbin._IMAGE.size, len(stored), len(stored), 0, 0, 8, 80, 0, 0, flag, 0, size
    )
    body = header + stored
    data = fatbin._FATBIN.pack(fatbin.FATBIN_MAGIC, 1, fatbin._FATBIN.size, len(body)) + body
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ImageError, match=r"larger than (256|64) MiB"):
        fatbin.images_of_bytes(data)[0].read()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_ptx_has_a_limit_however_it_is_stored() -> None:
    text = b".version 8.0\n.target sm_80\n" + bytes(fatbin.LARGEST_PTX)
    with pytest.raises(ImageError, match="too large for PTX"):
        fatbin.images_of_bytes(text)


def relocatable(kind: str, size: int, part: int = 0) -> fatbin.FatbinImage:
    return fatbin.FatbinImage(kind, 90, "", (8, 0), "", 0, "", 0, kind == "ptx", bytes(size), part=part)


def test_a_module_of_many_large_images_is_read_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few megabytes can decompress to hundreds of gigabytes."""
    monkeypatch.setattr(fatbin, "LARGEST_IMAGE", 1000)
    read: list[fatbin.FatbinImage] = []

    def kernels(data: bytes) -> dict[str, None]:
        read.append(data)
        return {"kernel": None}

    monkeypatch.setattr(fatbin, "kernels", kernels)
    assert instrument._entries_of([relocatable("elf", 400) for _ in range(1000)]) == ["kernel"]
    assert len(read) == 2


def test_parts_that_are_large_together_are_not_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fatbin, "LARGEST_PTX", 1000)
    images = [relocatable("ptx", 400, part) for part in range(3)]
    assert (
        device_link.choose(images, (9, 0)) == "its parts have more than 64 MiB of PTX; split it into modules"
    )
    assert all("payload" not in image.__dict__ for image in images)

"""Which image in a process's files a module is of: libraries of nvcc's, mapped by a small program that does nothing else."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpubpf_fuse
import gpubpf_hold
from gpubpf import cache
from gpubpf.agent.definitions import FoundKernel
from gpubpf.agent.protocol import Found
from gpubpf.images import fatbin, listing, mapped
from gpubpf.images.assemble import Target
from gpubpf.images.mapped import AMBIGUOUS, NOT_FOUND, MappedImages
from gpubpf.inject.injected import parameter_layout
from gpubpf.process import address_space, target_files
from gpubpf.ptx import module, parser
from gpubpf.record import replace
from gpubpf_hold import holding

NVCC = shutil.which("nvcc")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
pytestmark = [
    pytest.mark.skipif(NVCC is None, reason="needs nvcc"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]

GPU, OLD, SIM = Target("gpu", (9, 0)), Target("gpu", (7, 0)), Target("sim", (9, 0))

APP = r"""
template <class T, int N> __global__ void scale(T *p, T by) {
    __shared__ T tile[N];
    tile[threadIdx.x] = p[threadIdx.x] * by;
    __syncthreads();
    p[threadIdx.x] = tile[N - 1 - threadIdx.x];
}
__global__ void __launch_bounds__(128) bounded(char c, double *p) { *p = c; }
int run() {
    scale<float, 64><<<1, 1>>>((float *)0, 1.0f);
    scale<double, 64><<<1, 1>>>((double *)0, 1.0);
    bounded<<<1, 1>>>(1, (double *)0);
    return 0;
}
"""
CLASH = r"""
struct pair { float a; double b; };
extern "C" __global__ void update(float *p, KIND k) {
    __shared__ float tile[SIZE];
    tile[threadIdx.x] = *p;
    __syncthreads();
    *p = tile[0] OP 2;
}
#ifdef MORE
extern "C" __global__ void more(float *p) { *p = 0; }
#endif
"""


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs are: `hold`, and what `build` makes."""
    directory = tmp_path_factory.mktemp("mapped")
    gpubpf_hold.build(directory)
    (directory / "app.cu").write_text(APP)
    (directory / "clash.cu").write_text(CLASH)
    return directory


@pytest.fixture(scope="module")
def build(at: Path) -> Callable[..., Path]:
    made: dict[tuple[str, ...], Path] = {}

    def build(source: str, *flags: str) -> Path:
        if (source, *flags) not in made:
            made[source, *flags] = output = at / f"{len(made)}-{source}"
            command = [str(NVCC), *flags, "-o", str(output), str(at / f"{source}.cu")]
            subprocess.run(command, check=True, capture_output=True)
        return made[source, *flags]

    return build


def clash(build: Callable[..., Path], kind: str = "int", size: int = 64, op: str = "+", *more: str) -> Path:
    return build("clash", "-fatbin", *ptx("75"), f"-DKIND={kind}", f"-DSIZE={size}", f"-DOP={op}", *more)


def ptx(*archs: str) -> tuple[str, ...]:
    return tuple(w for a in archs for w in ("-gencode", f"arch=compute_{a},code=compute_{a}"))


def sass(*archs: str) -> tuple[str, ...]:
    return tuple(w for a in archs for w in ("-gencode", f"arch=compute_{a},code=sm_{a}"))


LIBRARY = ("-shared", "-Xcompiler", "-fPIC")
BOTH = (*LIBRARY, *ptx("75", "80", "120"), *sass("90"))


def loaded(file: Path, of: Target, *launched: str, whole: bool = True) -> Found:
    """What a driver tells of the module in `file` that has the kernels `launched` (parts of names), once it is loaded."""
    for images in fatbin.modules(fatbin.images_of_file(file)):
        cubin = fatbin.cubin_for(images, of.cc) if of.device == "gpu" else None
        if cubin is not None:
            kernels = {
                k.name: FoundKernel(
                    k.name,
                    k.parameters,
                    k.registers or -1,
                    fatbin.static_shared(cubin.payload).get(k.name, 0),
                )
                for k in fatbin.kernels(cubin.payload).values()
            }
        else:
            image = fatbin.choose(images, of.cc)
            if isinstance(image, str):
                continue
            kernels = {n: _told(e, image.sm) for n, e in parser.parse(image.text).entries.items()}
        chosen = tuple(k for n, k in kernels.items() if any(part in n for part in launched))
        if chosen:
            names = tuple(kernels) if whole else tuple(k.name for k in chosen)
            return Found(1, of.cc[0] * 10 + of.cc[1], 0, whole, names, chosen)
    raise AssertionError(f"no {launched} in {file}")


def _told(entry: module.Function, sm: int) -> FoundKernel:
    tiles = [s for s in entry.body or () if isinstance(s, module.Variable) and s.space == "shared"]
    shared = sum(v.size for v in tiles)
    return FoundKernel(entry.name, parameter_layout(entry)[0], shared=shared, ptx_version=sm)


def found_in(
    process: subprocess.Popen[str], found: Found, of: Target
) -> tuple[fatbin.FatbinImage | None, set[str]]:
    data, reasons = MappedImages(process.pid).find(found, of)
    if data is None:
        return None, set(reasons.values())
    (image,) = fatbin.images_of_bytes(data)
    return image, set(reasons.values())


# --- one library ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("of", "arch"), [(GPU, "sm_80"), (SIM, "sm_80"), (Target("gpu", (7, 5)), "sm_75")])
def test_a_library_that_a_program_loaded(build: Callable[..., Path], of: Target, arch: str) -> None:
    library = build("app", *BOTH)
    program = (
        f"import ctypes, sys; ctypes.CDLL({str(library)!r}); print('ready', flush=True); sys.stdin.read()"
    )
    with holding(sys.executable, "-c", program) as process:
        image, reasons = found_in(process, loaded(library, of, "scaleIf", "bounded"), of)
        assert image is not None and image.arch == arch and not reasons
        (expected,) = [i for i in fatbin.images_of_file(library) if i.kind == "ptx" and i.arch == arch]
        assert image.payload == expected.payload and image.options == expected.options


def test_which_instance_of_a_template(at: Path, build: Callable[..., Path]) -> None:
    library = build("app", *BOTH)
    with holding(at / "hold", library) as process:
        told = loaded(library, GPU, "scaleId", whole=False)
        assert [k.parameters for k in told.kernels] == [((0, 8), (8, 8))]
        assert found_in(process, told, GPU)[0] is not None
        other = FoundKernel(told.kernels[0].name.replace("scaleId", "scaleIi"), ((0, 8), (8, 4)))
        assert found_in(process, Found(1, 90, 0, False, (other.name,), (other,)), GPU) == (None, {NOT_FOUND})


@pytest.mark.parametrize(
    "change",
    [
        {"parameters": ((0, 8), (8, 4), (16, 8))},
        {"registers": 99},
        {"shared": 12345},
    ],
)
def test_what_the_driver_tells_must_fit(at: Path, build: Callable[..., Path], change: dict[str, Any]) -> None:
    library = build("app", *BOTH)
    with holding(at / "hold", library) as process:
        told = loaded(library, GPU, "bounded")
        assert found_in(process, told, GPU)[0] is not None
        kernels = tuple(replace(k, **change) for k in told.kernels)
        assert found_in(process, replace(told, kernels=kernels), GPU) == (None, {NOT_FOUND})
        for names, whole in (((*told.names, "another"), False), (told.names[:1], True)):
            changed = replace(told, names=names, whole=whole)
            assert found_in(process, changed, GPU) == (None, {NOT_FOUND})


def test_threads_and_ptx_version_of_what_was_compiled(at: Path, build: Callable[..., Path]) -> None:
    library = build("app", *BOTH)
    with holding(at / "hold", library) as process:
        told = loaded(library, SIM, "bounded")

        def changed(**values: int) -> fatbin.FatbinImage | None:
            kernels = tuple(replace(k, **values) for k in told.kernels)
            return found_in(process, replace(told, kernels=kernels), SIM)[0]

        assert changed(max_threads=128) is not None
        assert changed(max_threads=256) is None
        assert changed(ptx_version=75) is None


@pytest.mark.parametrize("flags", [("-no-compress",), ("-Xfatbin", "-compress-all")])
def test_compressed_and_not(at: Path, build: Callable[..., Path], flags: tuple[str, ...]) -> None:
    library = build("clash", "-fatbin", *ptx("75"), *sass("90"), "-DKIND=int", "-DSIZE=64", "-DOP=+", *flags)
    assert {i.codec != "" for i in fatbin.images_of_file(library)} == {flags != ("-no-compress",)}
    with holding(at / "hold", library) as process:
        for of in (GPU, SIM):
            assert found_in(process, loaded(library, of, "update"), of)[0] is not None


def test_options_come_along(at: Path, build: Callable[..., Path]) -> None:
    library = build("clash", "-fatbin", *ptx("75"), "-DKIND=int", "-DSIZE=8", "-DOP=+", "-maxrregcount=32")
    with holding(at / "hold", library) as process:
        image, _ = found_in(process, loaded(library, SIM, "update"), SIM)
        assert image is not None and "-maxrregcount" in image.options


def test_no_ptx_and_why(at: Path, build: Callable[..., Path]) -> None:
    only = build("app", "-fatbin", *sass("90"))
    newer = build("app", "-fatbin", *sass("90"), *ptx("120"))
    for library, reason in ((only, "SASS only"), (newer, "PTX for a newer GPU (sm_120)")):
        with holding(at / "hold", library) as process:
            assert found_in(process, loaded(library, GPU, "bounded"), GPU) == (None, {reason})
    with holding(at / "hold", build("app", *LIBRARY, "-rdc=true", *sass("90"), *ptx("75"))) as process:
        linked = loaded(build("app", *LIBRARY, "-rdc=true", *sass("90"), *ptx("75")), GPU, "bounded")
        image, reasons = found_in(process, linked, GPU)
        assert image is not None and not reasons
        assert set(parser.parse(image.text).entries) == set(linked.names)


def test_ptx_that_the_assembler_kept(at: Path, build: Callable[..., Path]) -> None:
    library = build("app", "-fatbin", *sass("90"), "-lineinfo")
    with holding(at / "hold", library) as process:
        image, reasons = found_in(process, loaded(library, GPU, "bounded"), GPU)
        assert image is not None and not reasons
        text = parser.parse(image.text)
        assert len(text.entries) == 3 and text.sm == "sm_90"


@pytest.mark.parametrize("form", ["ptx", "fatbin"])
def test_an_image_in_an_array(at: Path, build: Callable[..., Path], form: str) -> None:
    """As bin2c makes them, for cuModuleLoadData."""
    file = clash(build)
    (image,) = fatbin.images_of_file(file)
    data = image.payload + b"\0" if form == "ptx" else file.read_bytes()
    text = ",".join(map(str, data))
    source = at / f"array-{form}.c"
    source.write_text(f'_Alignas(8) const unsigned char image[] = {{{text}}}; const char *name = "update";')
    library = source.with_suffix(".so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    with holding(at / "hold", library) as process:
        found, reasons = found_in(process, loaded(file, SIM, "update"), SIM)
        assert found is not None and not reasons
        assert parser.parse(found.text) == parser.parse(image.text)
        other = loaded(clash(build, "double"), SIM, "update")
        assert found_in(process, other, SIM) == (None, {NOT_FOUND})


# --- several ----------------------------------------------------------------------------------------------------


def test_name_clashes(at: Path, build: Callable[..., Path]) -> None:
    first, second = clash(build), clash(build, "double")
    bigger, different = clash(build, "int", 128), clash(build, "int", 64, "*")
    more = clash(build, "int", 64, "+", "-DMORE")
    told = loaded(first, SIM, "update")
    with holding(at / "hold", first, second, bigger, more) as process:
        for file in (first, second, bigger, more):
            image, _ = found_in(process, loaded(file, SIM, "update"), SIM)
            assert image is not None and image.payload == fatbin.images_of_file(file)[0].payload
        # Where the driver does not tell all names, two have the same kernel: it does not matter which of them it is.
        assert found_in(process, loaded(first, SIM, "update", whole=False), SIM)[0] is not None
    with holding(at / "hold", first, different) as process:
        assert found_in(process, told, SIM) == (None, {AMBIGUOUS})
    copy = at / "copy"
    shutil.copy(first, copy)
    with holding(at / "hold", first, copy) as process:
        assert found_in(process, told, SIM)[0] is not None


def test_one_that_has_no_ptx_counts_as_well(at: Path, build: Callable[..., Path]) -> None:
    with_ptx, without = build("app", *BOTH), build("app", "-fatbin", *sass("90"))
    with holding(at / "hold", with_ptx, without) as process:
        assert found_in(process, loaded(with_ptx, GPU, "bounded"), GPU) == (None, {AMBIGUOUS})
        assert found_in(process, loaded(with_ptx, SIM, "bounded"), SIM)[0] is not None


def test_libraries_come_later(at: Path, build: Callable[..., Path]) -> None:
    first, second = clash(build), clash(build, "double")
    program = (
        f"import mmap, sys\nfor name in {[str(first), str(second)]!r}:\n"
        "    f = open(name, 'rb'); globals()[name] = mmap.mmap(f.fileno(), 0, prot=1)\n"
        "    print('ready', flush=True); sys.stdin.readline()\nsys.stdin.read()"
    )
    told = loaded(second, SIM, "update")
    with holding(sys.executable, "-c", program) as process:
        seen = MappedImages(process.pid)
        assert seen.find(told, SIM)[0] is None
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        assert seen.find(told, SIM)[0] is not None


# --- files that are not where they were ----------------------------------------------------------------------------


def without_map_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for who is not root."""

    def refuse(pid: int, start: int, end: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(target_files, "open_mapped", refuse)


@pytest.mark.every(2)
@pytest.mark.parametrize("privileged", [pytest.param(True, marks=needs_root), False])
@pytest.mark.parametrize("fate", ["there", "deleted", "replaced", "unreadable"])
def test_the_file_is_what_is_mapped(
    at: Path, build: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, fate: str, privileged: bool
) -> None:
    library, other = build("app", *BOTH), clash(build)
    mine = at / "mine.so"
    shutil.copy(library, mine)
    if not privileged:
        without_map_files(monkeypatch)
    with holding(at / "hold", mine) as process:
        if fate == "deleted":
            mine.unlink()
        elif fate == "replaced":
            shutil.copy(other, at / "new")
            os.replace(at / "new", mine)
        elif fate == "unreadable":
            mine.chmod(0)
        assert found_in(process, loaded(library, GPU, "bounded"), GPU)[0] is not None
        assert found_in(process, loaded(other, SIM, "update"), SIM) == (None, {NOT_FOUND})
        (file,) = {file for file, _ in MappedImages(process.pid).images()}
        assert file.removesuffix(" (deleted)") == str(mine)


@pytest.mark.parametrize("privileged", [True, False])
@needs_root
def test_a_container(
    at: Path, build: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, privileged: bool
) -> None:
    """Another root, mount, PID and user namespace; a link in there leads nowhere outside."""
    library, outside = clash(build), clash(build, "double")
    root = at / f"root-{privileged}"
    (root / "lib").mkdir(parents=True)
    shutil.copy(at / "hold", root / "hold")
    shutil.copy(library, root / "lib" / "real.so")
    (root / "link.so").symlink_to("/lib/real.so")
    if not privileged:
        without_map_files(monkeypatch)
    if subprocess.run(["unshare", "-U", "-r", "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no user namespaces here, as in a chroot")
    command = ["unshare", "-m", "-p", "-U", "-r", "--fork", "--kill-child", "-R", root, "/hold", "/link.so"]
    with holding(*command) as process:
        (child,) = (
            int(n) for n in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        )
        mapped = MappedImages(child)
        assert mapped.find(loaded(library, SIM, "update"), SIM)[0] is not None
        assert mapped.find(loaded(outside, SIM, "update"), SIM)[0] is None
        with pytest.raises(FileNotFoundError):
            target_files.open_path(child, "../../../../../../../../etc/passwd")
        os.symlink("/etc/passwd", root / "out")
        with pytest.raises(FileNotFoundError):
            target_files.open_path(child, "/out")


def test_devices_and_pipes_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(OSError):
            target_files.open_path(os.getpid(), str(path))


def test_a_file_written_again(at: Path, build: Callable[..., Path]) -> None:
    """In place: what was known of it does not hold."""
    first, second = clash(build), clash(build, "double")
    mine = at / "rewritten"
    shutil.copy(first, mine)
    with holding(at / "hold", mine) as process:
        mapped = MappedImages(process.pid)
        assert mapped.find(loaded(first, SIM, "update"), SIM)[0] is not None
        time.sleep(0.01)  # the clock of file systems ticks
        mine.write_bytes(second.read_bytes())
        assert mapped.find(loaded(first, SIM, "update"), SIM)[0] is None
        assert mapped.find(loaded(second, SIM, "update"), SIM)[0] is not None


def test_a_process_that_ended(at: Path, build: Callable[..., Path]) -> None:
    library = clash(build)
    with holding(at / "hold", library) as process:
        mapped = MappedImages(process.pid)
    assert mapped.find(loaded(library, SIM, "update"), SIM) == (None, {"update": NOT_FOUND})


# --- lies -------------------------------------------------------------------------------------------------------------


def test_lying_headers(at: Path, build: Callable[..., Path]) -> None:
    """Sections beyond the file, endless fatbins: what can be read of the mapping is, and nothing takes long."""
    library = build("app", *BOTH)
    data = library.read_bytes()
    sections = struct.unpack_from("<Q", data, 40)[0]
    fatbin_at = data.rfind(struct.pack("<I", fatbin.FATBIN_MAGIC))
    lies = {
        "headers": data[:40] + struct.pack("<Q", 1 << 60) + data[48:],
        "sizes": data[: sections + 64] + b"".join(_endless(data[sections + 64 :])),
        "fatbin": data[: fatbin_at + 8] + struct.pack("<Q", 1 << 62) + data[fatbin_at + 16 :],
        "none": b"\x7fELF\x02\x01" + bytes(4096),
        "text": b".version 8.0\n.target sm_75\n.address_size 64\n" + b".visible .entry " * 100000,
    }
    told = loaded(library, GPU, "bounded")
    found = {}
    for name, lie in lies.items():
        (at / name).write_bytes(lie)
        with holding(at / "hold", at / name) as process:
            start = time.monotonic()
            found[name] = found_in(process, told, GPU)[0] is not None
            assert time.monotonic() - start < 30
    assert found == {"headers": True, "sizes": True, "fatbin": False, "none": False, "text": False}


def test_files_without_end(at: Path, build: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file takes no room on its disk, and may be as long as it likes."""
    library = build("app", *BOTH)
    endless = at / "endless"
    image = struct.pack("<HHIQIIHHIIIQQQ", 1, 1, 64, 1 << 29, 0, 0, 5, 8, 75, 0, 0, 0, 0, 0)
    with endless.open("wb") as file:
        file.write(struct.pack("<IHHQ", fatbin.FATBIN_MAGIC, 1, 16, 1 << 40))
        for k in range(64):
            file.seek(16 + k * (64 + (1 << 29)))
            file.write(image)
        file.truncate(16 + (1 << 40))
    monkeypatch.setattr(mapped, "READ_LIMIT", 256 << 20)
    told = loaded(library, GPU, "bounded")
    program = f"import mmap, sys; f = open({str(endless)!r}, 'rb'); m = mmap.mmap(f.fileno(), 4096, prot=1)\n"
    with holding(sys.executable, "-c", program + "print('ready', flush=True); sys.stdin.read()") as process:
        start = time.monotonic()
        assert found_in(process, told, GPU) == (None, {NOT_FOUND})
        assert time.monotonic() - start < 60


@pytest.mark.skipif(bool(gpubpf_fuse.cannot_mount()), reason=gpubpf_fuse.cannot_mount())
def test_files_that_a_program_serves_are_not_opened(
    at: Path, build: Callable[..., Path], tmp_path: Path
) -> None:
    """Not even SIGKILL would end the wait for that program, and so neither the tool."""
    told = loaded(clash(build), SIM, "update")
    with gpubpf_fuse.unanswered(tmp_path) as file, holding(at / "hold", file) as process:
        seen = MappedImages(process.pid)
        assert not [*seen.images()] and not [*seen.code_objects()]
        assert listing.sources_of_process(process.pid) == []
        assert seen.find(told, SIM) == (None, {"update": NOT_FOUND})
        for thread in threading.enumerate():
            if thread.name == "gpubpf-files":
                thread.join(60)
                assert not thread.is_alive()


def test_files_that_do_not_answer(
    at: Path, build: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their file system may be a program of the process's own."""
    library = clash(build)
    silent = threading.Event()
    monkeypatch.setattr(mapped, "TIMEOUT", 1)
    monkeypatch.setattr(
        target_files, "open_mapped", lambda *_: os.open(os.devnull, os.O_RDONLY) if silent.wait() else -1
    )
    told = loaded(library, SIM, "update")
    with holding(at / "hold", library) as process:
        seen = MappedImages(process.pid)
        start = time.monotonic()
        assert [seen.find(told, SIM) for _ in range(20)] == [(None, {"update": NOT_FOUND})] * 20
        assert time.monotonic() - start < 15  # 20 times a second would be 20 s
        assert sum(thread.name == "gpubpf-files" for thread in threading.enumerate()) == 1
    silent.set()


def _endless(headers: bytes) -> Iterator[bytes]:
    for header in struct.iter_unpack("<IIQQQQIIQQ", headers[: len(headers) // 64 * 64]):
        yield struct.pack("<IIQQQQIIQQ", *header[:5], 1 << 60, *header[6:])


def test_a_large_library_is_looked_into_where_it_names_the_kernel(
    at: Path, build: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = build("app", *BOTH)
    monkeypatch.setattr(mapped, "LARGE", 0)
    monkeypatch.setattr(mapped, "SLOW", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    os.chmod(tmp_path, 0o700)
    read: list[str] = []
    original = fatbin.FatbinImage.read
    monkeypatch.setattr(fatbin.FatbinImage, "read", lambda image: read.append(image.arch) or original(image))
    with holding(at / "hold", library) as process:
        nowhere = FoundKernel("_Z7nowherev", ())
        assert found_in(process, Found(1, 90, 0, False, (), (nowhere,)), GPU) == (None, {NOT_FOUND})
        assert not read
        told = loaded(library, GPU, "bounded")
        read.clear()
        assert found_in(process, told, GPU)[0] is not None
        assert set(read) == {"sm_90", "sm_80"}  # what runs, and its PTX
        assert list((cache.default().directory or tmp_path).glob("images/*"))
        read.clear()
        assert found_in(process, told, GPU)[0] is not None
        assert read.count("sm_90") == 1  # the names were known


def test_files_without_code_are_read_once(
    at: Path, build: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also by the next tool, and until they change."""
    monkeypatch.setattr(mapped, "_SETTLED", -1000.0)  # the files were written just now
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    os.chmod(tmp_path, 0o700)
    (image,) = fatbin.images_of_file(clash(build))
    text, code = tmp_path / "text", tmp_path / "code"
    text.write_bytes(b"no .version 7 here\0" + bytes(1 << 16) + b"update")
    code.write_bytes(bytes(1 << 16) + image.payload)
    told = loaded(clash(build), SIM, "update")
    read: set[str] = set()
    original = mapped._MappedFile.read

    def reading(file: Any, offset: int, size: int) -> bytes:
        read.add(os.path.basename(file.mappings[0].path))
        return original(file, offset, size)

    monkeypatch.setattr(mapped._MappedFile, "read", reading)
    with holding(at / "hold", text, code) as process:
        first, without_code = MappedImages(process.pid), []
        for images in (first, first, MappedImages(process.pid)):
            assert images.find(told, SIM)[0] is not None and "code" in read
            without_code.append(read - {"code"})
            read.clear()
        assert without_code == [{"hold", "text"}, set(), set()]
        code.write_bytes(bytes(1 << 16))
        text.write_bytes(bytes(1 << 16) + image.payload)
        os.utime(text, (1, 1))
        assert MappedImages(process.pid).find(told, SIM)[0] is not None


def test_mappings_are_only_read(at: Path, build: Callable[..., Path]) -> None:
    """No file stays open."""
    library = build("app", *BOTH)
    with holding(at / "hold", library) as process:
        seen = MappedImages(process.pid)
        before = len(os.listdir("/proc/self/fd"))
        seen.find(loaded(library, GPU, "bounded"), GPU)
        assert len(list(seen.images())) == 5
        assert len(os.listdir("/proc/self/fd")) <= before
        assert address_space.mappings(process.pid)

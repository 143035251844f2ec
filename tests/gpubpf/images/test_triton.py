"""PTX out of Triton's cache: by a cubin's content, by a kernel's name and attributes; the cache is its user's, and may lie."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import gpubpf_hold
from gpubpf.agent.definitions import FoundKernel
from gpubpf.agent.protocol import Found
from gpubpf.images import fatbin, triton
from gpubpf.images.assemble import Target
from gpubpf.images.mapped import AMBIGUOUS, NOT_FOUND, MappedImages
from gpubpf.images.triton import TritonCache
from gpubpf_hold import holding

pytestmark = pytest.mark.skipif(
    shutil.which("ptxas") is None or shutil.which("gcc") is None, reason="needs ptxas and gcc"
)
GPU = Target("gpu", (9, 0))
PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry {name}(.param .u64 p, .param .u32 n) .reqntid {threads}
{{
    .reg .b64 %p; .reg .b32 %r<{registers}>;
    ld.param.u64 %p, [p];
    {loads}
    bar.sync 0;
    {stores}
    ret;
}}
"""


def text(name: str, threads: int = 128, registers: int = 4) -> str:
    loads = "\n".join(f"ld.global.u32 %r{i}, [%p+{4 * i}];" for i in range(registers))
    stores = "\n".join(f"st.global.u32 [%p+{400 + 4 * i}], %r{i};" for i in range(registers))
    return PTX.format(name=name, threads=threads, registers=registers, loads=loads, stores=stores)


def add(cache: Path, entry: str, name: str, ptx: str, *options: str) -> bytes:
    """As Triton puts it there; the cubin."""
    place = cache / entry
    place.mkdir(parents=True)
    (place / f"{name}.ptx").write_text(ptx)
    cubin = place / f"{name}.cubin"
    subprocess.run(["ptxas", "-arch=sm_90a", *options, "-o", cubin, place / f"{name}.ptx"], check=True)
    (place / f"{name}.json").write_text("{}")
    return cubin.read_bytes()


def told(cubin: bytes, **more: int) -> Found:
    (kernel,) = fatbin.kernels(cubin).values()
    found = FoundKernel(kernel.name, kernel.parameters, kernel.registers or -1, 0, **more)
    return Found(1, 90, 0, True, (kernel.name,), (found,))


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("hold")
    at.chmod(0o755)
    return gpubpf_hold.build(at)


@pytest.mark.parametrize("where", ["TRITON_CACHE_DIR", "TRITON_HOME", "HOME", "launcher"])
def test_where_it_lies(hold: Path, tmp_path: Path, where: str) -> None:
    cache = (
        tmp_path / "cache" if where in ("TRITON_CACHE_DIR", "launcher") else tmp_path / ".triton" / "cache"
    )
    cubin = add(cache, "ABC", "add_kernel", text("add_kernel"))
    environment = {where: str(cache if where == "TRITON_CACHE_DIR" else tmp_path)}
    files = (
        [cache / "DEF" / "__triton_launcher.cpython-311-x86_64-linux-gnu.so"] if where == "launcher" else []
    )
    for file in files:
        file.parent.mkdir()
        file.write_bytes(b"\x7fELF")
    with holding(hold, *files, env=environment) as process:
        image = TritonCache(process.pid).ptx_of(cubin)
        assert image is not None and image.text == text("add_kernel").rstrip("\0")
        assert TritonCache(process.pid).ptx_of(cubin + bytes(8)) is not None  # the agent rounds sizes up
        assert TritonCache(process.pid).ptx_of(cubin[:-100] + bytes(100)) is None


def test_an_image_gets_its_ptx(hold: Path, tmp_path: Path) -> None:
    cubin = add(tmp_path, "ABC", "add_kernel", text("add_kernel"))
    lined = add(tmp_path, "DEF", "lined", text("lined"), "-lineinfo")
    other = add(tmp_path / "elsewhere", "GHI", "other", text("other"))
    with holding(hold, env={"TRITON_CACHE_DIR": str(tmp_path), "HOME": "/nowhere"}) as process:
        mapped = MappedImages(process.pid)
        (image,) = fatbin.images_of_bytes(mapped.with_ptx(cubin))
        assert image.kind == "ptx" and image.arch == "sm_90a" and "add_kernel" in image.text
        (image,) = fatbin.images_of_bytes(mapped.with_ptx(lined))
        assert image.text == text("lined") and "-lineinfo" in image.options.split()
        talk = subprocess.run(["ptxas", "--version"], capture_output=True, text=True, check=True).stdout
        assert image.release and f"release {image.release}," in talk
        for data in (other, text("x").encode(), b"", b"\x7fELF", os.urandom(64)):
            assert mapped.with_ptx(data) == data
        later = add(tmp_path, "JKL", "later", text("later"))
        assert mapped.with_ptx(later) != later


def test_which_configuration(hold: Path, tmp_path: Path) -> None:
    """Triton's tuner compiles a kernel several times, under one name."""
    few = add(tmp_path, "A", "tuned", text("tuned", 128, 4))
    many = add(tmp_path, "B", "tuned", text("tuned", 128, 40))
    wide = add(tmp_path, "C", "tuned", text("tuned", 256, 4))
    with holding(hold, env={"TRITON_CACHE_DIR": str(tmp_path), "HOME": "/nowhere"}) as process:
        mapped = MappedImages(process.pid)

        def found(cubin: bytes, **more: int) -> str:
            data, reasons = mapped.find(told(cubin, **more), GPU)
            return fatbin.images_of_bytes(data)[0].text if data else next(iter(reasons.values()))

        assert found(many) == text("tuned", 128, 40)
        assert found(few, max_threads=128) == text("tuned", 128, 4)
        assert found(wide, max_threads=256) == text("tuned", 256, 4)
        assert found(few) == AMBIGUOUS
        unknown = add(tmp_path / "elsewhere", "D", "unknown", text("unknown"))
        assert found(unknown) == NOT_FOUND


def as_nobody() -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("kind", ["theirs", "secret", "link", "pipe"])
def test_nobody_reads_with_the_rights_of_root(
    hold: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    """What the process's user may not read is not read for it: its PTX would come back to it."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="gpubpf-triton-") as directory:
        top = Path(directory)
        top.chmod(0o755)
        shutil.copy(hold, top / "hold")
        cubin = add(top / "cache", "ABC", "add", text("add"))
        ptx = top / "cache" / "ABC" / "add.ptx"
        if kind == "secret":
            ptx.chmod(0o600)
        elif kind == "link":
            secret = top / "secret"
            shutil.move(ptx, secret)
            secret.chmod(0o600)
            ptx.symlink_to(secret)
        elif kind == "pipe":
            ptx.unlink()
            os.mkfifo(ptx)
        with holding(
            top / "hold", env={"TRITON_CACHE_DIR": str(top / "cache")}, preexec_fn=as_nobody
        ) as process:
            assert (TritonCache(process.pid).ptx_of(cubin) is not None) == (kind == "theirs")
    assert os.access("/root", os.R_OK)  # root is root again


def test_a_large_cache_is_listed_once(hold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = add(tmp_path, "ABC", "add", text("add"))
    for i in range(500):
        (tmp_path / f"{i}").mkdir()
        (tmp_path / f"{i}" / "x.json").write_text("")
    listed: list[object] = []
    original = triton._names
    with holding(hold, env={"TRITON_CACHE_DIR": str(tmp_path), "HOME": "/nowhere"}) as process:
        cache = TritonCache(process.pid)
        assert cache.ptx_of(cubin) is not None
        monkeypatch.setattr(
            triton, "_names", lambda place, most: listed.append(place) or original(place, most)
        )  # type: ignore[func-returns-value]
        assert cache.ptx_of(cubin[:-1] + b"x") is None
        assert len(listed) == 1
        add(tmp_path, "new", "new", text("new"))
        listed.clear()
        assert cache.ptx_of(cubin) is not None
        assert len(listed) == 2
    directory = os.open(tmp_path, os.O_RDONLY)
    assert len(original(directory, 7)) == 7 and len(original(directory, 1 << 20)) == 502
    os.close(directory)

"""Code objects for AMD GPUs in files: bundles as Clang writes them, compressed or not, programs, and code objects by themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fuzz.targets import bundle, code_object, small_bundle
from gpubpf.errors import ImageError
from gpubpf.images import offload_bundle
from gpubpf.images.offload_bundle import code_objects, code_objects_of_file

KERNEL = "#include <hip/hip_runtime.h>\n__global__ void scale(float *x) { *x *= 2; }\nint main() { scale<<<1, 1>>>(nullptr); }\n"


def test_bundles_one_behind_the_other() -> None:
    assert list(code_objects(bundle(b"one", b"two") + bytes(100) + bundle(b"three"))) == [
        b"one",
        b"two",
        b"three",
    ]


@pytest.mark.parametrize(
    ("version", "codec"), [(1, "zlib"), (1, "zstd"), (2, "zlib"), (2, "zstd"), (3, "zstd")]
)
def test_compressed_bundles(version: int, codec: str) -> None:
    one = small_bundle(version, codec)
    assert list(code_objects(one)) == [code_object()]
    for gap in (b"", bytes(4096 - len(one) % 4096)):  # as of several translation units
        assert list(code_objects(one + gap + one + gap + bundle(b"two"))) == [*2 * [code_object()], b"two"]


@pytest.mark.parametrize("before", [b"", b"x", bytes(9), b"CCO"])
def test_bundles_behind_other_bytes(before: bytes) -> None:
    assert list(code_objects(before + bundle(b"one"))) == [b"one"]
    assert list(code_objects(before)) == []


def test_many_bundles_are_found_in_one_pass() -> None:
    """The rest of the file is not searched again for the magic that it lacks."""

    class Bytes(bytes):
        searched = 0

        def find(self, what: Any, start: Any = 0, end: Any = None) -> int:
            found = super().find(what, start)
            Bytes.searched += (found if found >= 0 else len(self)) - start
            return found

    data = Bytes(100 * (bundle(b"one") + bytes(5000)))
    assert len(list(code_objects(data))) == 100 and Bytes.searched <= 2 * len(data)


def test_code_for_the_host_is_left_out() -> None:
    data = bundle(b"one", b"two").replace(
        b"hipv4-amdgcn-amd-amdhsa--gfx906", b"host-x86_64-unknown-linux--    ", 1
    )
    assert list(code_objects(data)) == [b"two"]


@pytest.mark.parametrize(
    "data",
    [
        bundle(b"one")[:40],
        bundle(b"one")[:-1],
        offload_bundle.MAGIC + (1 << 40).to_bytes(8, "little"),
        small_bundle(2, "zlib")[:-9],
        small_bundle(3, "zstd")[:60],
        offload_bundle.COMPRESSED + (9).to_bytes(2, "little") + bytes(40),
        offload_bundle.COMPRESSED + bytes.fromhex("0200000020000000ffffffff") + bytes(40),
        small_bundle(2, "zlib")[:12] + bytes(4) + small_bundle(2, "zlib")[16:],
        small_bundle(1, "zstd")[:40],
        small_bundle(1, "zlib")[:40],
    ],
    ids=["header", "end", "count", "zlib", "zstd", "version", "size", "nothing", "frame", "stream"],
)
def test_damaged_bundles(data: bytes) -> None:
    with pytest.raises(ImageError):
        list(code_objects(data))


def test_other_files(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("nothing")
    assert (
        code_objects_of_file(text)
        == code_objects_of_file("/bin/true")
        == code_objects_of_file(tmp_path)
        == []
    )
    assert code_objects_of_file(tmp_path / "absent") == []


@pytest.mark.skipif(shutil.which("hipcc") is None, reason="needs hipcc")
def test_a_program_for_two_gpus(tmp_path: Path) -> None:
    source = tmp_path / "scale.hip"
    source.write_text(KERNEL)
    command = [
        "hipcc",
        "--offload-arch=gfx906",
        "--offload-arch=gfx90a",
        "-w",
        "-o",
        str(tmp_path / "app"),
        str(source),
    ]
    subprocess.run(command, check=True, env={**os.environ, "HIP_PLATFORM": "amd"})
    found = code_objects_of_file(tmp_path / "app")
    assert len(found) == 2 and all(one.startswith(b"\x7fELF") for one in found)
    (tmp_path / "one").write_bytes(found[0])
    assert code_objects_of_file(tmp_path / "one") == [found[0]]

"""What ptxas keeps of the PTX in a cubin: with -lineinfo all of it, and its own options; how that is read."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import gpubpf_cuda
from gpubpf.images import fatbin
from gpubpf.ptx.module import Directive, Module
from gpubpf.ptx.parser import parse
from gpubpf.record import replace

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    *gpubpf_cuda.needs_cuda,
    pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas"),
]


def cubin(ptx: Path, *options: str) -> fatbin.FatbinImage:
    made = ptx.with_suffix(".cubin")
    subprocess.run(["ptxas", "-arch=sm_90", *options, ptx, "-o", made], check=True)
    (image,) = fatbin.images_of_file(made)
    return image


def contents(module: Module) -> tuple[list[object], list[str]]:
    """Functions with their statements, and variables; without what says where in the source something is."""
    functions: list[object] = [
        (
            f.kind,
            f.name,
            f.linkage,
            [str(p) for p in (*f.returns, *f.parameters)],
            [str(d) for d in f.directives],
            [str(s) for s in f.body or () if not (isinstance(s, Directive) and s.name in ("loc", "file"))],
        )
        for f in module.functions.values()
    ]
    return functions, [str(v) for v in module.variables.values()]


@pytest.fixture(scope="module", params=["examples/reduction.cu", "tests/gpubpf/inject/corpus.cu"])
def ptx(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cubins") / "made.ptx"
    source = ROOT / str(request.param)
    subprocess.run(
        ["nvcc", "-w", "-std=c++17", "-lineinfo", "-ptx", "-arch=compute_90", source, "-o", made], check=True
    )
    return made


def test_the_text_in_a_cubin_is_what_it_was_made_of(ptx: Path) -> None:
    image = cubin(ptx, "-lineinfo", "-maxrregcount=40")
    kept = fatbin.ptx_of_cubin(image)
    assert kept is not None and "-maxrregcount 40" in kept.options
    assert contents(parse(kept.text)) == contents(parse(ptx.read_bytes()))
    assert fatbin.choose([image], (9, 0)) == kept


def test_without_lines_there_is_none(tmp_path: Path) -> None:
    source, plain = ROOT / "examples/vectoradd.cu", tmp_path / "plain.ptx"
    subprocess.run(["nvcc", "-ptx", "-arch=compute_90", source, "-o", plain], check=True)
    image = cubin(plain)
    assert fatbin.ptx_of_cubin(image) is None and fatbin.choose([image], (9, 0)) == "SASS only"


def test_what_is_damaged_is_none(ptx: Path) -> None:
    image = cubin(ptx, "-lineinfo")
    data = image.payload
    at = data.index(b".version")
    twice = data[: at + 16] + b".version 9.0" + data[at + 28 :]
    for changed in (
        data[: len(data) // 2],
        data.replace(b".nv_debug_ptx_txt", b".nv_debug_ptx_xxx"),
        twice,
        data[:64],
    ):
        assert fatbin.ptx_of_cubin(replace(image, stored=changed)) is None

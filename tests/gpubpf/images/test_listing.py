"""--list and --ptx: every kernel of a file, whether it can be instrumented, and why not."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import hipsim_engine
from gpubpf.ebpf.probe import Probe
from gpubpf.errors import Error, ImageError
from gpubpf.images import code_objects, fatbin, listing
from gpubpf.images.assemble import Target
from gpubpf.images.sidecar import Sidecar
from gpubpf.inject import inject
from gpubpf.lower.amdgcn import WaveProgram
from gpubpf.ptx import module, parser
from gpubpf.record import replace
from gpubpf.show import cli
from gpubpf.show.parsed import Options

NVCC = shutil.which("nvcc")
GPU, SIM = Target("gpu", (9, 0)), Target("sim", (9, 0))
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")

PTX = """
.version 8.0
.target {arch}
.address_size 64
{declarations}
.visible .entry {name}(.param .u64 p)
{{
    .reg .b64 %a;
    ld.param.u64 %a, [p];
    {body}
    ret;
}}
"""
CALL = "{ .reg .b64 %t; mov.u64 %t, 0; callprototype: .callprototype _ (); call %t, (), callprototype; }"


def ptx_image(
    arch: str = "sm_75", name: str = "_Z5scalePfi", body: str = "", declarations: str = "", **more
) -> fatbin.FatbinImage:
    text = PTX.format(arch=arch, name=name, body=body, declarations=declarations)
    image = fatbin.ptx_image(text.encode(), module=more.pop("module", 0))
    assert image is not None
    return image


def reasons(*images: fatbin.FatbinImage, target: Target = GPU) -> dict[str, str | None]:
    return {k.name.short: k.reason for k in listing.listed([listing.ImageFile("app", images)], target)}


def test_what_can_be_instrumented() -> None:
    (kernel,) = listing.listed([listing.ImageFile("app", (ptx_image(), ptx_image("sm_120")))], GPU)
    assert kernel.record() == {
        "type": "listed",
        "pid": None,
        "comm": None,
        "kernel": "scale",
        "demangled": "scale(float*, int)",
        "mangled": "_Z5scalePfi",
        "file": "app",
        "ptx": ["7.5", "12.0"],
        "sass": [],
        "instrumentable": True,
        "reason": None,
        "remedy": None,
        "launches": None,
    }


def test_what_to_do_is_said_once_for_each_reason() -> None:
    """Not for a kernel that can be instrumented, and not where nobody knows what to do."""
    images = (ptx_image("sm_120"),)
    kernels = listing.listed([listing.ImageFile(name, images) for name in ("one", "two")], GPU)
    (line, *more) = listing.advice(
        [*kernels, *listing.listed([listing.ImageFile("app", (ptx_image(),))], GPU)]
    )
    assert line.startswith("2 kernels with PTX for a newer GPU (sm_120): measure it on such a GPU, or build")
    assert all(len(text) <= 80 for text in (line, *more)) and "+PTX" in " ".join(more)
    assert kernels[0].record()["remedy"] == " ".join((line, *map(str.strip, more))).partition(": ")[2]
    strange = [replace(kernels[0], reason="indirect call")]
    assert listing.advice(strange) == [] and strange[0].record()["remedy"] is None


def test_what_cannot_and_why() -> None:
    assert reasons(ptx_image("sm_120"), target=SIM) == {"scale": None}  # the embedded device is not so strict
    assert reasons(ptx_image("sm_120")) == {"scale": "PTX for a newer GPU (sm_120)"}
    assert reasons(ptx_image("sm_90a"), target=Target("gpu", (10, 0))) == {
        "scale": "PTX for another GPU (sm_90a)"
    }
    assert reasons(ptx_image(declarations=".extern .func helper;", body="call helper;")) == {
        "scale": "needs device linking: helper"
    }
    both = ptx_image(), ptx_image(name="other", body=CALL, module=1)
    assert reasons(*both) == {"scale": None, "other": "indirect call"}


def test_ptx_that_cannot_be_read_still_names_its_kernels() -> None:
    (reason,) = reasons(ptx_image(declarations=".global .u32 x = ;;;{{;")).values()
    assert reason is not None and "\n" not in reason


def test_launches_and_kernels_that_nobody_saw_loaded() -> None:
    source = listing.ImageFile(
        "app",
        (ptx_image(), ptx_image(name="idle", module=1), ptx_image("sm_120", "newer", module=2)),
        {"_Z5scalePfi": 23, "jit": 2, "newer": 1},
    )
    kernels = {k.name.short: (k.launches, k.reason) for k in listing.listed([source], GPU)}
    assert kernels == {
        "scale": (23, None),
        "idle": (0, None),
        "jit": (2, "image not seen"),
        "newer": (1, "PTX for a newer GPU (sm_120)"),
    }


def test_matching() -> None:
    sources = [listing.ImageFile("app", (ptx_image(), ptx_image(name="other", module=1)))]
    checked: list[str] = []

    def check(parsed: module.Module, kernels: Sequence[str]) -> Mapping[str, str]:
        checked.extend(kernels)
        return {}

    def found(*patterns: str) -> list[str]:
        return [k.name.short for k in listing.listed(sources, GPU, check, patterns=patterns)]

    assert found() == ["other", "scale"]
    checked.clear()
    assert found("sc*") == ["scale"] and checked == ["_Z5scalePfi"]
    with pytest.raises(Error) as caught:
        found("vecAdd", "x")
    assert str(caught.value) == "no kernel matches 'vecAdd' or 'x'; kernels seen: other, scale"


def test_a_large_library_is_listed_as_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of the process share the modules. One of them is damaged, and kernels of one name are in several modules."""
    forms = [*(ptx_image(name=f"k{n % 90}", module=n) for n in range(100))]
    forms.append(ptx_image(declarations=".global .u32 x = ;;;{{;", module=100))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    shared = listing.listed([listing.ImageFile("lib", tuple(forms))], GPU)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert shared == listing.listed([listing.ImageFile("lib", tuple(forms))], GPU)
    assert len(shared) == 91 and sum(kernel.reason is not None for kernel in shared) == 1


def test_the_table() -> None:
    first = listing.ImageFile(
        "app", (ptx_image(), ptx_image(name="_Z5scalePdi", module=1)), {"_Z5scalePfi": 1234}
    )
    lines = listing.rows(listing.listed([first, listing.ImageFile("lib", (ptx_image("sm_120"),), {})], GPU))
    assert lines[0].split() == ["KERNEL", "PTX", "SASS", "LAUNCHES", "INSTRUMENT"]
    assert [line.split()[0] for line in lines] == [
        "KERNEL",
        "app:",
        "scale(double*,",
        "scale(float*,",
        "lib:",
        "scale",
    ]
    assert "1,234  yes" in lines[3] and lines[-1].endswith("no: PTX for a newer GPU (sm_120)")


def no_program(wave: int) -> WaveProgram:
    raise AssertionError("a kernel that is refused needs no program")


class Pipeline:
    """A tool whose device program does nothing, at the kernels' exits."""

    def __init__(self, observed: list[listing.ImageFile] | None = None, status: int = 0) -> None:
        self.observed, self.status = observed or [], status

    def target(self, options: Options) -> Target:
        return GPU

    def refusals(self, parsed: module.Module, kernels: Sequence[str]) -> Mapping[str, str]:
        return listing.check_injection(parsed, kernels)

    def checked_code_object(self, data: bytes) -> Sidecar:
        return code_objects.refused(data, [Probe(no_program, "exit")], "it is for an AMD GPU")

    def instrumented_ptx(
        self, image: fatbin.FatbinImage, kernels: Sequence[str], target: Target
    ) -> tuple[str, Mapping[str, str]]:
        probes = [Probe(listing.NOTHING, "exit")]
        done = inject.inject(parser.parse(image.text), dict.fromkeys(kernels, probes))
        return done.text, done.refusals

    def observe(self, options: Options) -> tuple[list[listing.ImageFile], int]:
        return self.observed, self.status


def run(tmp_path: Path, pipeline: Pipeline, **given: object) -> tuple[int, str]:
    options = Options.of(argparse.Namespace(**given))
    status = listing.show(pipeline, options, cli.Output(str(tmp_path / "out")))
    return status, (tmp_path / "out").read_text()


def test_list_of_a_command(tmp_path: Path) -> None:
    pipeline = Pipeline([listing.ImageFile("app", (ptx_image(),), {"_Z5scalePfi": 3})], status=7)
    status, text = run(tmp_path, pipeline, command=["app"], json=True)
    assert status == 7 and json.loads(text)["launches"] == 3
    status, _ = run(tmp_path, pipeline, command=["app"], kernel=["nothing"])
    assert status == 7  # the command failed: its status
    with pytest.raises(Error, match="no kernel matches"):
        run(tmp_path, Pipeline(pipeline.observed), command=["app"], kernel=["nothing"])


def test_kernels_of_hip_itself_do_not_hide_those_of_the_program() -> None:
    own = [f"__amd_rocclr_{number}" for number in range(20)]
    assert listing.no_match(["x"], [*own, "scale"]) == "no kernel matches 'x'; kernels seen: scale"
    assert listing.no_match(["x"], own).endswith("__amd_rocclr_19, and 8 more")


def test_list_of_files(tmp_path: Path) -> None:
    file = tmp_path / "a,b.ptx"
    file.write_bytes(ptx_image().payload)
    assert run(tmp_path, Pipeline(), files=[str(file)])[1].splitlines()[1].split() == [
        "scale",
        "7.5",
        "-",
        "yes",
    ]
    header, row = run(tmp_path, Pipeline(), files=[str(file)], csv=True)[1].splitlines()
    assert header.split(",")[:4] == ["kernel", "demangled", "mangled", "file"]
    assert row == f'scale,"scale(float*, int)",_Z5scalePfi,"{file}",7.5,,yes,,'
    for other in "/bin/sh", "/etc/passwd":
        said = (
            f"^no code for GPUs in {other}; name a program, library, code object, fatbin, cubin or PTX file$"
        )
        with pytest.raises(ImageError, match=said):
            run(tmp_path, Pipeline(), files=[other])


def test_ptx_of_files(tmp_path: Path) -> None:
    file = tmp_path / "app.ptx"
    file.write_bytes(ptx_image().payload)
    status, text = run(tmp_path, Pipeline(), files=[str(file)], ptx=True, kernel=["scale"])
    assert status == 0 and "gpubpf_launch" in text and parser.parse(text).entries
    with pytest.raises(Error, match="no kernel matches 'vec'; kernels seen: scale"):
        run(tmp_path, Pipeline(), files=[str(file)], ptx=True, kernel=["vec"])
    file.write_bytes(ptx_image("sm_120").payload)
    with pytest.raises(Error, match=r"can be instrumented \(scale: PTX for a newer GPU \(sm_120\)\); "):
        run(tmp_path, Pipeline(), files=[str(file)], ptx=True)
    file.write_bytes(ptx_image(body=CALL).payload)
    with pytest.raises(Error, match=r"can be instrumented \(scale: indirect call\); "):
        run(tmp_path, Pipeline(), files=[str(file)], ptx=True)


@pytest.mark.skipif(hipsim_engine.missing() is not None, reason="needs LLVM's tools for AMD GPUs")
def test_kernels_for_amd_gpus_have_no_ptx(tmp_path: Path) -> None:
    hipsim_engine.assemble(
        hipsim_engine.kernel("scale", "s_nop 0", gpu="gfx90a"), tmp_path, gpu="gfx90a"
    ).rename(tmp_path / "a.co")
    options = {"files": [str(tmp_path / "a.co")], "ptx": True}
    for patterns in ([], ["scale"]):
        with pytest.raises(Error, match=r"^kernels for AMD GPUs have no PTX \(scale\); --list shows"):
            run(tmp_path, Pipeline(), kernel=patterns, **options)
    with pytest.raises(Error, match="no kernel matches 'vec'; kernels seen: scale"):
        run(tmp_path, Pipeline(), kernel=["vec"], **options)
    with pytest.raises(Error, match=r"^no kernels$"):
        run(tmp_path, Pipeline(), command=["app"], ptx=True)


@needs_nvcc
def test_built_programs(tmp_path: Path) -> None:
    source = tmp_path / "app.cu"
    source.write_text(
        "__global__ void everywhere(int *p) { *p = 1; }\n"
        "#if __CUDA_ARCH__ == 900\n__global__ void hopper(int *p) { *p = 2; }\n#endif\n"
    )
    sass, ptx = ("-gencode", "arch=compute_90,code=sm_90"), ("-gencode", "arch=compute_75,code=compute_75")
    subprocess.run([NVCC, "-fatbin", *sass, "-o", tmp_path / "sass", source], check=True)
    subprocess.run([NVCC, "-fatbin", *sass, *ptx, "-o", tmp_path / "both", source], check=True)
    source.write_text("__global__ void everywhere() {} int main() { everywhere<<<1,1>>>(); }\n")
    linked = "-cudart", "shared", "-rdc=true"
    subprocess.run([NVCC, *linked, *sass, *ptx, "-o", tmp_path / "rdc", source], check=True)

    def found(name: str) -> dict[str, tuple]:
        sources = listing.sources_of_files([str(tmp_path / name)])
        return {k.name.short: (k.ptx, k.sass, k.reason) for k in listing.listed(sources, GPU)}

    assert found("sass") == dict.fromkeys(("everywhere", "hopper"), ((), ("9.0",), "SASS only"))
    assert found("both") == {
        "everywhere": (("7.5",), ("9.0",), None),
        "hopper": ((), ("9.0",), "not in the PTX for sm_75"),
    }
    assert found("rdc") == {"everywhere": (("7.5",), ("9.0",), None)}


@needs_nvcc
def test_a_process(tmp_path: Path) -> None:
    source = tmp_path / "lib.cu"
    source.write_text(
        '__global__ void mapped(int *p) { *p = 1; } extern "C" int go() { mapped<<<1,1>>>(nullptr); return 0; }'
    )
    library = tmp_path / "lib with space.so"
    subprocess.run(
        [NVCC, "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", "-o", library, source], check=True
    )
    program = (
        f"import mmap, sys; f = open({str(library)!r}, 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1)\n"
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        sources = listing.sources_of_process(process.pid)
        process.communicate(b"")
    assert [(source.file, source.pid) for source in sources] == [(str(library), process.pid)]
    assert sources[0].comm and sources[0].comm.startswith("python")
    assert [kernel.name.short for kernel in listing.listed(sources, GPU)] == ["mapped"]
    with pytest.raises(Error, match="there is no process 4194305; "):
        listing.sources_of_process(2**22 + 1)

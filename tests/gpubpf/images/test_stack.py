"""The stack that copies of kernels with virtual calls need on a GPU, whose limit is that of the original."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gpubpf.ebpf.probe import Probe
from gpubpf.images.assemble import KernelResources, Target, assemblers
from gpubpf.images.copies import make_copies
from gpubpf.images.sidecar import Sidecar
from gpubpf.images.stack import deeper, recursive
from gpubpf.ptx.call_graph import CallGraph
from gpubpf.ptx.parser import parse
from gpubpf_cuda import run_nvcc
from gpubpf_fragments import log

CALL = """{ .param .b64 p; st.param.b64 [p], %rd1;
    t: .callprototype ()_ (.param .b64 _); call %rd2, (p), t; }"""
REGISTERS = ".reg .b64 %rd<3>;"


def graph(inside: str) -> CallGraph:
    """A kernel whose virtual call reaches f and g; f executes `inside`."""
    return CallGraph(
        parse(
            f""".version 9.0
.target sm_90
.address_size 64
.func h() {{ ret; }}
.func f(.param .b64 x) {{ {REGISTERS} ld.param.b64 %rd1, [x]; ld.b64 %rd2, [%rd1]; {inside} ret; }}
.func g(.param .b64 x) {{ ret; }}
.global .align 8 .u64 _ZTV1A[2] = {{f, g}};
.visible .entry k(.param .u64 a) {{ {REGISTERS} ld.param.u64 %rd1, [a]; ld.global.u64 %rd2, [%rd1]; {CALL} ret; }}"""
        )
    )


def stacks(**frames: int) -> dict[str, KernelResources]:
    return {name.replace("_1", "$gpubpf1"): KernelResources(0, stack=size) for name, size in frames.items()}


def test_only_kernels_with_virtual_calls_that_recurse_count() -> None:
    assert recursive(graph(CALL), ["k"]) == ["k"]
    assert recursive(graph("call h;"), ["k"]) == []


def test_no_frame_may_be_larger() -> None:
    deep = graph(CALL)
    before = stacks(k=16, f=24, g=8)
    assert deeper(deep, ["k"], before, stacks(k=16, f_1=24, g_1=0)) == {}
    assert deeper(deep, ["k"], before, stacks(k=16, f=8, f_1=32, g_1=8)) == {
        "k": "indirect calls that recurse: the copy of f needs 32 bytes of stack, not 24"
    }
    assert deeper(deep, ["k"], before, stacks(k=16, f_1=24, gpubpf_program0=8)) == {
        "k": "indirect calls that recurse: the copy of gpubpf_program0 needs 8 bytes of stack, not 0"
    }


SOURCE = """
struct Shape { float size; __device__ virtual float area() const = 0; };
struct Square : Shape { __device__ float area() const override { return size * size; } };
struct Pair : Shape { Shape *parts[2]; __device__ float area() const override { return RECURSE; } };
__global__ void use(Shape *shape, float *area) { area[threadIdx.x] = shape[threadIdx.x].area(); }
__global__ void build(Shape **shapes) { shapes[0] = new Square; shapes[1] = new Pair; }
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.skipif(not assemblers(Target("gpu", (9, 0))), reason="needs ptxas")
@pytest.mark.parametrize("recurse", ["size", "parts[0]->area() + parts[1]->area()"])
def test_programs(recurse: str, tmp_path: Path) -> None:
    source, ptx = tmp_path / "app.cu", tmp_path / "app.ptx"
    source.write_text(SOURCE.replace("RECURSE", recurse))
    run_nvcc(["nvcc", "-ptx", "-arch=sm_90", source, "-o", ptx])
    data = ptx.read_bytes()

    def made(device: str) -> Sidecar:
        wanted = [Probe(log("access", "log"), "access")]
        return make_copies(data.decode(), "", wanted, Target(device, (9, 0)))  # type: ignore[arg-type]

    use = "_Z3useP5ShapePf"
    assert {kernel.name for kernel in made("sim").kernels} == {use, "_Z5buildPP5Shape"}
    found = made("gpu")
    if recurse == "size":
        assert not found.refusals and len(found.kernels) == 2
    else:
        assert [kernel.name for kernel in found.kernels] == ["_Z5buildPP5Shape"]
        assert found.refusals[use].startswith("indirect calls that recurse: the copy of Pair::area needs ")

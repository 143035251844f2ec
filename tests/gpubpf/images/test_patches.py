"""`images.patches`: which kernels without PTX get patches, what the patches are, and the numbers of NVIDIA's API."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from gpubpf.ebpf.maps import SAMPLED
from gpubpf.ebpf.probe import Probe
from gpubpf.ebpf.sampling import PARAMETER
from gpubpf.errors import Error
from gpubpf.images import fatbin
from gpubpf.images.assemble import Target
from gpubpf.images.patches import patches_at, refusal_of, sites_of, with_patched
from gpubpf.images.sidecar import Sidecar
from gpubpf.inject.values import PtxProbe
from gpubpf.lower import patch_function
from gpubpf.lower.fragment import Argument, Fragment
from gpubpf.lower.patch_function import SIGNATURES
from gpubpf.record import replace
from gpubpf_fragments import tally
from gpubpf_sass import need, sass

TABLE = 0x7000_1234_0000


def on_exit(fragment: Fragment) -> list[PtxProbe]:
    return [Probe(fragment, "exit")]


def test_kernels_without_ptx_are_patched() -> None:
    refused = Sidecar(refusals={"a": fatbin.SASS_ONLY, "b": "Tile IR"}, entries=("a", "b", "c"))
    made = with_patched(refused, on_exit(tally()))
    (kernel,) = made.kernels
    assert (kernel.name, kernel.patched, kernel.parameters) == ("a", True, ())
    assert set(kernel.block.bases) == {"tallies"} and made.refusals == {"b": "Tile IR"}
    assert made.image == b""


def test_what_patches_cannot_do_is_the_reason() -> None:
    def reason(argument: Argument, point: str = "exit") -> str:
        probes: list[PtxProbe] = [Probe(Fragment("f", "{ }", (argument,)), point)]
        made = with_patched(Sidecar(refusals={"k": fatbin.SASS_ONLY}), probes)
        assert not made.kernels
        return made.refusals["k"]

    work = Argument("work", "b64", "context", field="work")
    assert "does not give arg0 at point entry" in reason(
        Argument("a", "b64", "context", field="arg0"), "entry"
    )
    assert "no patches at point branch" in reason(work, "branch")
    assert "its launch's host thread" in reason(Argument("who", "b64", "pid_tgid"))
    assert "its launch's allocations" in reason(Argument("epoch", "b64", "epoch"))
    assert refusal_of(on_exit(tally())) is None


def test_programs_of_some_kernels() -> None:
    """A patch is for all kernels of a module. A program that only some of them want tests a bit in the kernel's launch block."""
    probes: list[PtxProbe] = [
        Probe(tally(), "exit", kernels=("one",)),
        Probe(tally(), "exit", kernels=("*",)),
    ]
    refused = Sidecar(refusals=dict.fromkeys(("one", "other"), fatbin.SASS_ONLY))
    assert {k.name: k.programs for k in with_patched(refused, probes).kernels} == {"one": 3, "other": 2}
    text = patches_at(TABLE, probes, Target("sim")).image.decode()
    assert all(f"and.b32 %gpubpf_0word, %gpubpf_0word, {bit};" in text for bit in (1, 2))
    assert "%gpubpf_0word, %gpubpf_0word" not in patches_at(TABLE, probes[:1], Target("sim")).image.decode()
    many: list[PtxProbe] = [Probe(tally(), "exit")] * (patch_function.MOST_PROGRAMS + 1)
    assert "more than 32 programs" in str(refusal_of(many))


def test_sites_of_a_kernel_without_ptx() -> None:
    """Each instruction is one; without source lines, or with different ones in several builds, it is shown by its offset."""
    (kernel,) = with_patched(Sidecar(refusals={"k": fatbin.SASS_ONLY}), on_exit(tally())).kernels
    sites = sites_of([kernel.sites])
    assert sites is not None and sites.get(18).offset == 18 * 16 and not sites.get(18).source
    lines = (*kernel.sites, replace(kernel.sites[0], number=4, source="a.cu", source_line=7))
    with_lines, of_two = sites_of([lines]), sites_of([lines, kernel.sites])
    assert with_lines is not None and [with_lines.get(n).source_line for n in (3, 4, 18)] == [0, 7, 7]
    assert of_two is not None and of_two.get(18).source_line == 0
    assert sites_of([(replace(kernel.sites[0], point="exit"),)]) is None


def test_patches_choose_blocks() -> None:
    """The patch at the beginning counts the chosen blocks, and each patch ends early in the others. Launches differ by %gridid."""
    probes: list[PtxProbe] = [Probe(tally(), "exit", sampled="block")]
    made = patches_at(TABLE, probes, Target("sim"))
    assert [number for number, _ in made.patches] == [patch_function.BLOCK_ENTER, patch_function.BLOCK_EXIT]
    entered, left = made.image.decode().split(".visible .func")[1:]
    assert [text.count("@%gpubpf_0skips bra $gpubpf_end;") for text in (entered, left)] == [1, 1]
    assert [text.count("red.global.add.u64 [%gpubpf_base], 1;") for text in (entered, left)] == [1, 0]
    assert all("mov.u64 %gpubpf_launch, %gridid;" in text for text in (entered, left))
    (kernel,) = with_patched(Sidecar(refusals={"k": fatbin.SASS_ONLY}), probes).kernels
    assert {PARAMETER} <= kernel.block.params.keys() and SAMPLED in kernel.block.bases


def test_what_the_api_does_not_give() -> None:
    def reason(**attributes: Any) -> str | None:
        return refusal_of([Probe(Fragment("f", "{ }", ()), **attributes)])

    assert reason(point="access") is None
    assert reason(point="access", kinds=("load", "async"), spaces=("global", "const")) is None
    assert reason(point="access", kinds=("async",), spaces=("tensor",)) is None
    assert "accesses of the space const" in str(reason(point="access", spaces=("const",)))
    assert "so loads are unknown" in str(reason(point="exit", accumulate="loads"))
    assert "machine code does not tell the types of values" in str(reason(point="value"))


def test_modules_with_ptx_stay_as_they_are() -> None:
    copies = Sidecar(b"cubin", refusals={"k": fatbin.SASS_ONLY})
    assert with_patched(copies, on_exit(tally())) is copies


def test_patches_of_a_context() -> None:
    made = patches_at(TABLE, on_exit(tally()), Target("sim"))
    assert made.patches == ((patch_function.BLOCK_EXIT, "gpubpf_program0"),)
    text = made.image.decode()
    assert ".visible .func (.param .b32 result) gpubpf_program0(.param .b64 data, .param .b64 pc)" in text
    assert str(TABLE + patch_function.HEADER) in text
    access: list[PtxProbe] = [Probe(Fragment("f", "{ }", ()), "access", spaces=("shared", "global"))]
    assert [number for number, _ in patches_at(TABLE, access, Target("sim")).patches] == [
        number for number, one in SIGNATURES.items() if {"shared", "global"} & {a.space for a in one.accesses}
    ]
    copies: list[PtxProbe] = [Probe(Fragment("f", "{ }", ()), "access", kinds=("async",), spaces=("global",))]
    assert {number for number, _ in patches_at(TABLE, copies, Target("sim")).patches} >= {
        patch_function.COPY,
        patch_function.BULK_TO_GLOBAL,
    }
    kinds: list[PtxProbe] = [
        Probe(Fragment("f", "{ }", ()), "access", kinds=(kind,), spaces=("local",))
        for kind in ("load", "store")
    ]
    assert patches_at(TABLE, kinds, Target("sim")).patches == (
        (patch_function.LOCAL_ACCESS, "gpubpf_program0"),
    )
    with pytest.raises(Error, match="no patches at point float"):
        patches_at(TABLE, [Probe(Fragment("f", "{ }", ()), "float")], Target("sim"))


def test_patches_for_a_gpu(tmp_path: Path) -> None:
    """They are assembled as the API wants them, and have no YIELD."""
    need("ptxas")
    made = patches_at(TABLE, on_exit(tally()), Target("gpu", (8, 6)))
    cubin = tmp_path / "patches.cubin"
    cubin.write_bytes(made.image)
    code = sass(cubin)["gpubpf_program0"]
    assert any(re.search(r"\b(ATOM|RED)", line) for line in code)  # the count of unknown shapes
    assert not any("YIELD" in line for line in code)


def header(name: str) -> str:
    for place in map(Path, sys.path):
        for found in place.glob(f"nvidia/**/compute-sanitizer/include/{name}"):
            return found.read_text()
    pytest.skip("nvidia-cuda-sanitizer-api is not installed")


def test_numbers_are_those_of_the_header() -> None:
    text = header("sanitizer_patching.h")
    numbers = {name: int(value) for name, value in re.findall(r"SANITIZER_INSTRUCTION_(\w+)\s*= (\d+)", text)}
    names = {
        "BLOCK_ENTER": patch_function.BLOCK_ENTER,
        "BLOCK_EXIT": patch_function.BLOCK_EXIT,
        "GLOBAL_MEMORY_ACCESS": patch_function.GLOBAL_ACCESS,
        "SHARED_MEMORY_ACCESS": patch_function.SHARED_ACCESS,
        "LOCAL_MEMORY_ACCESS": patch_function.LOCAL_ACCESS,
        "BARRIER": patch_function.BARRIER,
        "CALL": patch_function.CALL,
        "RET": patch_function.RETURN,
        "MEMCPY_ASYNC": patch_function.COPY,
        "REMOTE_SHARED_MEMORY_ACCESS": patch_function.REMOTE_ACCESS,
        "MATRIX_MEMORY_ACCESS": patch_function.MATRIX_ACCESS,
        "BARRIER_RELEASE": patch_function.BARRIER_RELEASE,
        "BULK_COPY_GLOBAL_TO_SHARED": patch_function.BULK_TO_SHARED,
        "BULK_COPY_SHARED_TO_GLOBAL": patch_function.BULK_TO_GLOBAL,
        "BULK_COPY_SHARED_TO_SHARED": patch_function.BULK_IN_SHARED,
        "BULK_REDUCTION_SHARED_TO_GLOBAL": patch_function.BULK_REDUCTION_TO_GLOBAL,
        "BULK_REDUCTION_SHARED_TO_SHARED": patch_function.BULK_REDUCTION_IN_SHARED,
        "TMA_LOAD": patch_function.TENSOR_LOAD,
    }
    assert set(names.values()) == set(SIGNATURES)
    assert {name: numbers[name] for name in names} == names
    types = {"uint64_t": "b64", "uint32_t": "b32", "int32_t": "b32", "void*": "b64"}
    declared_as = dict(re.findall(r"\* ?SanitizerCallback(\w+)\)\(void\* \w+, ([^)]*)\)", text))
    by_callback = {
        "BlockEnter": 1,
        "BlockExit": 2,
        "MemoryAccess": 3,
        "Barrier": 6,
        "MemcpyAsync": 14,
        "MatrixMemoryAccess": 19,
        "BulkCopyGlobalToShared": 30,
        "BulkCopySharedToGlobal": 35,
        "BulkCopySharedToShared": 36,
        "BulkReductionSharedToGlobal": 37,
        "BulkReductionSharedToShared": 38,
        "TensorMemoryLoad": 43,
    }
    for name, number in by_callback.items():
        declared = [
            word.strip().removeprefix("const ").rsplit(" ", 1)[0] for word in declared_as[name].split(",")
        ]
        own = [type_ for _, type_ in SIGNATURES[number].parameters]  # a patch may ignore the last ones
        assert own == [types[word] for word in declared][: len(own)]
    flags = {
        "READ": patch_function._READ_WRITE & 1,
        "WRITE": patch_function._READ_WRITE & 2,
        "PREFETCH": patch_function._PREFETCH,
        "ATOMIC_WRITE_ONLY": patch_function._ONLY_WRITES,
    }
    shifts = dict(re.findall(r"SANITIZER_MEMORY_DEVICE_FLAG_(\w+)\s*= 1 << (\d+)", text))
    assert {name: 1 << int(shifts[name]) for name in flags} == flags
    callbacks = header("sanitizer_callbacks.h")
    assert re.search(r"SANITIZER_CB_DOMAIN_RESOURCE\s*= 3,", callbacks)
    results = header("sanitizer_result.h")
    assert re.search(r"SANITIZER_ERROR_MAX_LIMIT_REACHED\s*= 10,", results)
    assert re.search(r"SANITIZER_ERROR_NOT_INITIALIZED\s*= 13,", results)

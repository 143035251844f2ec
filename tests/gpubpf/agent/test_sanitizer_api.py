"""The agent's declarations of NVIDIA's Compute Sanitizer API agree with NVIDIA's headers, which may not be part of this project."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpubpf.lower import patch_function

SOURCES = Path(__file__).resolve().parents[3] / "lib" / "gpubpf" / "agent" / "src"
CUDA = os.environ.get("CUDA_INCLUDE", "/usr/local/cuda/include")
MEMBERS = {
    "LaunchData": {
        **{
            name: name
            for name in "context stream hStream module function functionName gridId hLaunch".split()
        },
        "gridDim": "gridDim_x",
        "blockDim": "blockDim_x",
        "clusterDim": "clusterDim_x",
    },
    "GraphNodeLaunchData": {name: name for name in "graphExec launchId node nodeType launchData".split()},
}
NUMBERS = {
    "kSuccess": "SANITIZER_SUCCESS",
    "kMaxLimitReached": "SANITIZER_ERROR_MAX_LIMIT_REACHED",
    "kNotInitialized": "SANITIZER_ERROR_NOT_INITIALIZED",
    "kResourceDomain": "SANITIZER_CB_DOMAIN_RESOURCE",
    "kLaunchDomain": "SANITIZER_CB_DOMAIN_LAUNCH",
    "kGraphsDomain": "SANITIZER_CB_DOMAIN_GRAPHS",
    "kLaunchBegin": "SANITIZER_CBID_LAUNCH_BEGIN",
    "kNodeLaunchBegin": "SANITIZER_CBID_GRAPHS_NODE_LAUNCH_BEGIN",
}
INSTRUCTIONS = {  # the number of an instruction, and the type of its patches
    patch_function.BLOCK_ENTER: ("BLOCK_ENTER", "BlockEnter"),
    patch_function.BLOCK_EXIT: ("BLOCK_EXIT", "BlockExit"),
    patch_function.GLOBAL_ACCESS: ("GLOBAL_MEMORY_ACCESS", "MemoryAccess"),
    patch_function.SHARED_ACCESS: ("SHARED_MEMORY_ACCESS", "MemoryAccess"),
    patch_function.LOCAL_ACCESS: ("LOCAL_MEMORY_ACCESS", "MemoryAccess"),
    patch_function.BARRIER: ("BARRIER", "Barrier"),
    patch_function.CALL: ("CALL", "Call"),
    patch_function.RETURN: ("RET", "Ret"),
    patch_function.COPY: ("MEMCPY_ASYNC", "MemcpyAsync"),
    patch_function.REMOTE_ACCESS: ("REMOTE_SHARED_MEMORY_ACCESS", "MemoryAccess"),
    patch_function.MATRIX_ACCESS: ("MATRIX_MEMORY_ACCESS", "MatrixMemoryAccess"),
    patch_function.BARRIER_RELEASE: ("BARRIER_RELEASE", "Barrier"),
    patch_function.BULK_TO_SHARED: ("BULK_COPY_GLOBAL_TO_SHARED", "BulkCopyGlobalToShared"),
    patch_function.BULK_TO_GLOBAL: ("BULK_COPY_SHARED_TO_GLOBAL", "BulkCopySharedToGlobal"),
    patch_function.BULK_IN_SHARED: ("BULK_COPY_SHARED_TO_SHARED", "BulkCopySharedToShared"),
    patch_function.BULK_REDUCTION_TO_GLOBAL: (
        "BULK_REDUCTION_SHARED_TO_GLOBAL",
        "BulkReductionSharedToGlobal",
    ),
    patch_function.BULK_REDUCTION_IN_SHARED: (
        "BULK_REDUCTION_SHARED_TO_SHARED",
        "BulkReductionSharedToShared",
    ),
    patch_function.TENSOR_LOAD: ("TMA_LOAD", "TensorMemoryLoad"),
}
OPTIONAL = {"GetCallbackPcAndSize"}  # not in 12.4


def headers() -> list[Path]:
    """Return the folders of SANITIZER_INCLUDE, which colons separate, and those of installed packages."""
    named = [Path(p) for p in os.environ.get("SANITIZER_INCLUDE", "").split(":") if p]
    found = [p.parent for at in map(Path, sys.path) for p in at.glob("nvidia/**/sanitizer.h")]
    return [p for p in (*named, *found) if (p / "sanitizer.h").exists()]


def functions() -> list[str]:
    text = (SOURCES / "copies/sanitizer_api.h").read_text()
    return re.findall(r"int \(\*(\w+)\)", text)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_declarations_are_those_of_nvidia() -> None:
    if not (places := headers()):
        pytest.skip(
            "pip install nvidia-cuda-sanitizer-api, or set SANITIZER_INCLUDE to folders of sanitizer.h"
        )
    includes = ["#include <cstddef>", "#include <type_traits>", "#include <sanitizer.h>"]
    includes += ['#include "copies/sanitizer_api.h"', "namespace own = gpubpf::sanitizer;"]
    lines: list[str] = []

    def same(one: str, other: str) -> None:
        lines.append(f'static_assert({one} == {other}, "{one}");')

    for structure, members in MEMBERS.items():
        for own, name in members.items():
            same(f"offsetof(own::{structure}, {own})", f"offsetof(Sanitizer_{structure}, {name})")
    for one, other in NUMBERS.items():
        same(f"int(own::{one})", f"int({other})")
    assert set(INSTRUCTIONS) == set(patch_function.SIGNATURES)
    by_instruction: dict[str, list[str]] = {"": lines}
    for number, (name, type_) in INSTRUCTIONS.items():
        by_instruction[name] = lines = []
        same(f"int(SANITIZER_INSTRUCTION_{name})", str(number))
        sizes = [{"b64": 8, "b32": 4}[of] for _, of in patch_function.SIGNATURES[number].parameters]
        lines.append(f"template <class R, class... P> constexpr int sizes_{number}(R (*)(void *, P...)) {{")
        lines.append(
            f"constexpr size_t found[] = {{sizeof(P)...}}, right[] = {{{', '.join(map(str, sizes))}}};"
        )
        lines.append("static_assert(sizeof found >= sizeof right);")  # a patch may ignore the last ones
        lines.append(
            "for (size_t i = 0; i < sizeof right / sizeof *right; i++) if (found[i] != right[i]) return 0;"
        )
        lines.append("return 1; }")
        same(f"sizes_{number}(SanitizerCallback{type_}(nullptr))", "1")
    for place in places:
        declared = set(
            re.findall(r"SANITIZERAPI sanitizer(\w+)\(", "".join(p.read_text() for p in place.glob("*.h")))
        )
        assert set(functions()) - OPTIONAL <= declared, place
        text = (place / "sanitizer_patching.h").read_text()
        known = {name for name in by_instruction if not name or re.search(rf"_INSTRUCTION_{name}\b", text)}
        lacking = [n for n, (name, _) in INSTRUCTIONS.items() if name not in known]
        assert all(patch_function.OPTIONAL >> number & 1 for number in lacking), place
        source = [
            *includes,
            *(line for name in by_instruction if name in known for line in by_instruction[name]),
        ]
        options = [f"-I{directory}" for directory in (place, SOURCES, CUDA)]
        command = ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", *options, "-"]
        done = subprocess.run(command, input="\n".join(source), text=True, capture_output=True)
        assert done.returncode == 0, f"{place}: {done.stderr}"

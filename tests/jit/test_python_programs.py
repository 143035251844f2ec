"""Programs in Python whose kernels are compiled as they run: NVRTC, cuda.core, Numba, Triton; alone, under a tool, attached to."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import jit_programs as jit
from cudasim_device import LIBRARIES
from gpubpf import agent

pytestmark = pytest.mark.skipif(
    not (LIBRARIES / "libcuda.so.1").exists() or not agent.LIBRARY.exists(),
    reason="the embedded device or the agent is not built (script/setup)",
)
SCALE = "_ZN3app5scaleIfEEvPT_5ScaleIS1_Ei"


def all_counted(done: jit.Measured) -> None:
    """Every launch of the last round was seen and instrumented."""
    launches = sum(done.rounds[-1].values())
    assert done.summary["launches_seen"] == done.summary["launches_instrumented"] == launches, done.summary
    assert sum(done.launches.values()) == launches


@pytest.mark.every(2)
@pytest.mark.parametrize("mode", ["ptx", "lineinfo", "library", "options"])
def test_nvrtc(tmp_path: Path, mode: str) -> None:
    command = [jit.nvrtc(), jit.PROGRAMS / "with_nvrtc.py", mode]
    done = jit.under_threadhist(command, tmp_path / "out")
    all_counted(done)
    assert done.launches == done.rounds[0] == {"fill": 2, SCALE: 4}
    assert done.kernels[SCALE]["kernel"] == "app::scale"
    assert "app::scale<float>(float*, Scale<float>, int)" in done.kernels[SCALE]["demangled"]


CUBINS = [
    "cubin",
    "cubin-library",
    "cubin-file",
    "cubin-fatbin",
    "cubin-cuLink",
    "cubin-nvJitLink",
    "nvJitLink",
]


@pytest.mark.parametrize("watching", ["device", "agent"])
@pytest.mark.parametrize("mode", CUBINS)
def test_cubins(tmp_path: Path, mode: str, watching: str) -> None:
    """NVRTC and nvJitLink have the PTX of the cubins that they make. The device asks them for it, or leaves that to the agent."""
    command = [jit.nvrtc(), jit.PROGRAMS / "with_nvrtc.py", mode]
    environment = {"CUDASIM_COMPILERS": "0"} if watching == "agent" else {}
    done = jit.under_threadhist(command, tmp_path / "out", **environment)
    all_counted(done)
    assert done.launches == done.rounds[0] == {"fill": 2, SCALE: 4}
    as_ptx = jit.under_threadhist([*command[:2], "ptx"], tmp_path / "ptx")
    assert {name: r["work"] for name, r in done.kernels.items()} == {
        name: r["work"] for name, r in as_ptx.kernels.items()
    }


@pytest.mark.parametrize("watching", ["device", "agent"])
def test_lto_ir(tmp_path: Path, watching: str) -> None:
    """nvJitLink makes PTX of the LTO-IR when it is asked, as of Numba's kernels. The calls that were inlined are not in that PTX."""
    command = [jit.nvrtc(), jit.PROGRAMS / "with_nvrtc.py", "nvJitLink-lto"]
    environment = {"CUDASIM_COMPILERS": "0"} if watching == "agent" else {}
    done = jit.under_threadhist(command, tmp_path / "out", **environment)
    all_counted(done)
    assert done.launches == done.rounds[0] == {"fill": 2, SCALE: 4}


@pytest.mark.every(3)
@pytest.mark.parametrize("mode", CUBINS)
def test_cubins_without_a_tool(mode: str) -> None:
    assert jit.rounds(jit.alone([jit.nvrtc(), jit.PROGRAMS / "with_nvrtc.py", mode]))


def test_cubins_that_nobody_watches_are_sass_only() -> None:
    """The program is told as by a driver of another GPU."""
    command = [jit.nvrtc(), jit.PROGRAMS / "with_nvrtc.py", "cubin"]
    done = jit.cudasim_device.run(command, CUDASIM_COMPILERS="0")
    assert done.returncode == 1 and "CUDA_ERROR_NO_BINARY_FOR_GPU" in done.stderr
    assert "only machine code (SASS)" in done.stderr


@pytest.mark.parametrize("mode, watching", [("cubin", "device"), ("nvJitLink", "device"), ("later", "agent")])
def test_cubins_attached_to(tmp_path: Path, mode: str, watching: str) -> None:
    """The agent gets the PTX of what is compiled once it is there. In a running process, the tool installs its hooks."""
    environment = {"CUDASIM_COMPILERS": "0"} if watching == "agent" else {}
    command = [jit.nvrtc(), jit.PROGRAMS / "with_nvrtc.py", mode]
    done = jit.attached(command, tmp_path / "out", **environment)
    all_counted(done)
    assert done.launches == done.rounds[1] == {"fill": 2, SCALE: 4}


def test_nvrtc_attached_to(tmp_path: Path) -> None:
    done = jit.attached([jit.nvrtc(), jit.PROGRAMS / "with_nvrtc.py", "ptx"], tmp_path / "out")
    all_counted(done)
    assert done.launches == done.rounds[1] == {"fill": 2, SCALE: 4}


@pytest.mark.every(2)
@pytest.mark.parametrize("mode", ["ptx", "cubin", "linked", "driver"])
def test_cuda_core(tmp_path: Path, mode: str) -> None:
    command = [jit.python("cuda.core", "cuda.bindings", "numpy"), jit.PROGRAMS / "with_cuda_core.py", mode]
    done = jit.under_threadhist(command, tmp_path / "out")
    assert done.rounds == [{"fill": 4}] and done.launches == {"fill": 4}, done.summary


@pytest.mark.every(2)
@pytest.mark.parametrize("mode", ["lineinfo", "debug", "driver"])
def test_numba(tmp_path: Path, mode: str) -> None:
    command = [jit.python("numba.cuda", "numba_cuda", "cuda.core"), jit.PROGRAMS / "with_numba.py", mode]
    done = jit.under_threadhist(command, tmp_path / "out")
    all_counted(done)
    names = {record["kernel"].rsplit("::", 1)[-1]: record["launches"] for record in done.kernels.values()}
    assert names == done.rounds[0] == {"axpy": 3, "table": 1}


def test_numba_attached_to(tmp_path: Path) -> None:
    """What the driver links once the tool is there: it was compiled for other types before."""
    command = [jit.python("numba.cuda", "numba_cuda", "cuda.core"), jit.PROGRAMS / "with_numba.py", "driver"]
    done = jit.attached(command, tmp_path / "out")
    all_counted(done)


def triton(place: Path) -> tuple[list[str | Path], dict[str, str]]:
    command = [jit.python("triton", "cuda.bindings", "numpy"), jit.PROGRAMS / "with_triton.py"]
    return command, {"TRITON_CACHE_DIR": str(place / "cache")}


@pytest.mark.parametrize("lines", ["0", "1"])
def test_triton(tmp_path: Path, lines: str) -> None:
    """The driver gets cubins of Triton's own ptxas: their PTX is in them, or, without lines, beside them in the cache."""
    command, environment = triton(tmp_path)
    done = jit.under_threadhist(
        command, tmp_path / "out", **environment, TRITON_DISABLE_LINE_INFO=str(1 - int(lines))
    )
    all_counted(done)
    assert done.launches == done.rounds[0] == {"axpy": 3, "row_sum": 1}


def test_lines_of_triton_programs(tmp_path: Path) -> None:
    """The text in Triton's cache has the lines of the Python source; what the cubin keeps has not."""
    command, environment = triton(tmp_path)
    tool = [
        *jit.THREADHIST[:1],
        str(jit.ROOT / "tools/memtrace.py"),
        "--device",
        "sim",
        "--json",
        "-o",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(
        [*tool, "--kernel", "row_sum", "--", *map(str, command)],
        env={**os.environ, **environment},
        timeout=120,
    )
    assert done.returncode == 0
    records = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    source = (jit.PROGRAMS / "with_triton.py").read_text().splitlines()
    line = 1 + next(k for k, text in enumerate(source) if "tl.sum(" in text)
    loads = [r for r in records if r["type"] == "site" and r["op"] == "load" and r["space"] == "global"]
    assert {str(r["source"]).rsplit("/", 1)[-1] for r in loads} == {f"with_triton.py:{line}"}


def test_triton_attached_to(tmp_path: Path) -> None:
    command, environment = triton(tmp_path)
    done = jit.attached(command, tmp_path / "out", **environment)
    all_counted(done)
    assert done.launches == done.rounds[1] == {"axpy": 3, "row_sum": 1}

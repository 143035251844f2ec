"""Programs in C that hand the driver what they made: texts, links, images of every kind; alone, under a tool, attached to."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import gpubpf_cuda
import jit_programs as jit
from cudasim_device import LIBRARIES
from gpubpf import agent

pytestmark = pytest.mark.skipif(
    not (LIBRARIES / "libcuda.so.1").exists() or not agent.LIBRARY.exists(),
    reason="the embedded device or the agent is not built (script/setup)",
)

FILL = """
.visible .entry fill(.param .u64 p)
{
 .reg .b64 %rd<4>;
 .reg .b32 %r<4>;
 ld.param.u64 %rd1, [p];
 mov.u32 %r1, %tid.x;
 mul.wide.u32 %rd2, %r1, 4;
 add.u64 %rd1, %rd1, %rd2;
 add.u32 %r2, %r1, 7;
 st.global.u32 [%rd1], %r2;
 ret;
}
"""


def ptx(sm: str = "sm_70") -> str:
    return (
        f".version {'8.8' if sm > 'sm_11' and len(sm) > 5 else '7.0'}\n.target {sm}\n.address_size 64\n{FILL}"
    )


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of every kind that holds the kernel `fill`, by name."""
    place = tmp_path_factory.mktemp("images")
    texts = {
        "old.ptx": ptx(),
        "newer.ptx": ptx("sm_120"),
        "broken.ptx": ptx().replace(" [%rd1], %r2", " st [%rd1]"),
    }
    made = {}
    for name, text in {**texts, "neither": "something else"}.items():
        made[name] = place / name
        made[name].write_text(text)
    if (ptxas := shutil.which("ptxas")) is None or (fatbinary := shutil.which("fatbinary")) is None:
        return made

    def cubin(name: str, *options: str) -> Path:
        subprocess.run([str(ptxas), *options, "-o", place / name, made["old.ptx"]], check=True)
        return place / name

    made["sass.cubin"] = cubin("sass.cubin", "-arch=sm_90")
    made["lines.cubin"] = cubin("lines.cubin", "-arch=sm_90", "-lineinfo", "-maxrregcount=32")
    made["other.cubin"] = cubin("other.cubin", "-arch=sm_80", "-lineinfo")
    made["short.cubin"] = place / "short.cubin"
    made["short.cubin"].write_bytes(made["lines.cubin"].read_bytes()[:-700])

    def fatbin(name: str, *forms: str) -> None:
        made[name] = place / name
        words = [f"--image3={form}" for form in forms]
        subprocess.run([str(fatbinary), "-64", f"--create={made[name]}", *words], check=True)

    fatbin(
        "both.fatbin", f"kind=ptx,sm=70,file={made['old.ptx']}", f"kind=elf,sm=90,file={made['sass.cubin']}"
    )
    fatbin("sass.fatbin", f"kind=elf,sm=90,file={made['sass.cubin']}")
    fatbin(
        "lines.fatbin",
        f"kind=elf,sm=90,file={made['lines.cubin']}",
        f"kind=elf,sm=80,file={made['other.cubin']}",
    )
    fatbin("newer.fatbin", f"kind=ptx,sm=120,file={made['newer.ptx']}")
    return made


@pytest.mark.parametrize("hostile", [False, True])
def test_links(tmp_path: Path, hostile: bool) -> None:
    said = jit.alone([jit.built("link"), tmp_path / "second.ptx"], CUDASIM_HOSTILE=str(int(hostile)))
    assert jit.rounds(said) == [{"fill": 3, "one": 2}]


def test_loads_in_a_capture_are_refused_where_a_driver_may_refuse_them() -> None:
    """Unloading is always refused, as by driver 580."""
    assert jit.alone([jit.built("captured")], CUDASIM_HOSTILE="0").endswith("1 refused\n")
    assert jit.alone([jit.built("captured")], CUDASIM_HOSTILE="1").endswith("4 refused\n")


def test_statuses_and_logs_of_images(images: dict[str, Path]) -> None:
    """The numbers of CUresult that drivers give for such files; what is in the error log."""
    said = jit.alone([jit.built("images"), *images.values()], CUDASIM_HOSTILE="1")
    lines = [line.split(" ", 2) for line in said.splitlines() if not line.startswith("round")]
    status = {name: (int(number), log) for name, number, log in lines}
    good = [name for name, (number, _) in status.items() if number == 0]
    assert status["newer.ptx"][0] == 218 and status["neither"][0] == 200
    assert status["broken.ptx"][0] == 218
    assert "ptxas application ptx input, line 14; error   : " in status["broken.ptx"][1]
    assert status["broken.ptx"][1].endswith("|ptxas fatal   : Ptx assembly aborted due to errors")
    if "sass.cubin" not in images:
        pytest.skip("needs ptxas and fatbinary for the rest")
    assert good == ["old.ptx", "lines.cubin", "both.fatbin", "lines.fatbin"]
    for name in ("sass.cubin", "sass.fatbin", "short.cubin", "newer.fatbin", "other.cubin"):
        assert status[name][0] == 209, name
    assert "only machine code (SASS)" in status["sass.cubin"][1] and "sm_80" in status["other.cubin"][1]
    assert jit.rounds(said) == [{"fill": 3 * len(good)}]


@pytest.mark.every(2)
@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_copies_are_not_loaded_at_a_first_use(tmp_path: Path, loading: str) -> None:
    """With lazy loading a kernel's first launch waits for what runs. Of a kernel that was launched before it must not, with a tool
    neither: here what runs waits for that launch."""
    environment = {"CUDASIM_HOSTILE": "1", "CUDA_MODULE_LOADING": loading}
    said = jit.alone([jit.built("first_use")], **environment)
    assert ("took long" in said) == (loading == "LAZY")
    done = jit.under_threadhist([jit.built("first_use")], tmp_path / "out", **environment)
    assert done.launches == done.rounds[0] == {"wait": 6, "tell": 6, "other": 1}


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("later")
    gpubpf_cuda.build(jit.PROGRAMS / "plugin.cu", place / "plugin.so", "-shared", "-Xcompiler", "-fPIC")
    (place / "fill.ptx").write_text(ptx())
    return [
        gpubpf_cuda.build(jit.PROGRAMS / "later.cu", place / "later"),
        place / "plugin.so",
        place / "fill.ptx",
    ]


@pytest.mark.every(2)
@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_libraries_that_are_opened_later(later: list[Path], tmp_path: Path, loading: str) -> None:
    done = jit.under_threadhist(later, tmp_path / "out", CUDASIM_HOSTILE="1", CUDA_MODULE_LOADING=loading)
    assert done.launches == done.rounds[0] == {"_Z3ownPi": 1, "_Z5weighi": 2, "fill": 3}
    assert done.kernels["_Z5weighi"]["kernel"] == "weigh"


def test_libraries_that_are_opened_once_a_tool_is_there(later: list[Path], tmp_path: Path) -> None:
    for _ in range(
        5
    ):  # the copies have a limited time to become ready, which may be too short on a busy machine
        done = jit.attached(later, tmp_path / "out", CUDASIM_HOSTILE="1")
        if done.summary["not_instrumented"].get("before ready", 0) <= 1:
            break
    found = {**done.launches, "_Z3ownPi": 0}
    assert found == {**done.rounds[1], "_Z3ownPi": 0}, (done.summary, done.stderr)
    assert done.summary["launches_seen"] == 6 and done.summary["lost"] == 0


def test_images_under_a_tool(images: dict[str, Path], tmp_path: Path) -> None:
    """What the program could load is counted, and what it could not changes nothing."""
    done = jit.under_threadhist(
        [jit.built("images"), *images.values()], tmp_path / "out", CUDASIM_HOSTILE="1"
    )
    assert done.launches == {"fill": done.rounds[0]["fill"]} and done.kernels["fill"]["threads"] == 32
    assert done.summary["launches_seen"] == done.summary["launches_instrumented"] == done.rounds[0]["fill"]
    assert done.kernels["fill"]["work"] == done.rounds[0]["fill"] * 32 * 7


@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_modules_come_and_go_under_a_tool(tmp_path: Path, clock: str) -> None:
    """Handles come again for other modules, with kernels of the same name that do different things."""
    done = jit.under_threadhist(
        [jit.built("reload"), "12"], tmp_path / "out", CUDASIM_HOSTILE="1", CUDASIM_CLOCK=clock
    )
    assert done.rounds == [{"step": 24}] and done.launches == {"step": 24}
    assert done.summary["launches_instrumented"] == 24 and done.summary["lost"] == 0
    assert "handles came again" in jit.alone([jit.built("reload"), "12"], CUDASIM_HOSTILE="1")
    assert done.kernels["step"]["work"] == 24 * (
        20 * 13 + 12 * 6
    )  # instructions of threads with work, and of those without


def test_links_under_a_tool(tmp_path: Path) -> None:
    """A linked image tells nobody its PTX: what was added to the link does."""
    done = jit.under_threadhist(
        [jit.built("link"), tmp_path / "second.ptx"], tmp_path / "out", CUDASIM_HOSTILE="1"
    )
    assert done.summary["launches_seen"] == 5
    assert Counter(done.launches) + Counter() == Counter({"one": 2, "fill": 3}), done.summary


def nvrtc_library() -> str:
    """The file of NVRTC that the interpreter of the tests finds."""
    code = "from cuda.pathfinder import load_nvidia_dynamic_lib as load; print(load('nvrtc').abs_path)"
    found = subprocess.run([jit.nvrtc(), "-c", code], capture_output=True, text=True)
    if found.returncode:
        pytest.skip("needs cuda-pathfinder, which finds NVRTC")
    return found.stdout.strip()


@pytest.mark.parametrize("watching", ["device", "agent"])
@pytest.mark.parametrize("when", ["linked", "later"])
def test_a_compiler_that_comes_and_goes(tmp_path: Path, when: str, watching: str) -> None:
    """Threads compile, and a forked child; NVRTC is closed and opened again, and its answers and errno stay the same."""
    environment = {"CUDASIM_HOSTILE": "1", "CUDASIM_COMPILERS": str(int(watching == "device"))}
    command = [jit.built("compilers"), nvrtc_library(), when]
    done = jit.under_threadhist(command, tmp_path / "out", **environment)
    assert done.launches == done.rounds[0] == {f"fill{k}": 2 for k in range(4)}, done.stderr
    assert done.summary["launches_instrumented"] == 8


def test_captures_under_a_tool(tmp_path: Path) -> None:
    done = jit.under_threadhist([jit.built("captured")], tmp_path / "out", CUDASIM_HOSTILE="1")
    assert done.launches == {"more": 13} and done.summary["launches_instrumented"] == 13


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "name, arguments, expected",
    [
        ("reload", ["8"], {"step": 16}),
        ("reload", ["4", "release"], {"step": 8}),
        ("reload", ["4", "reset"], {"step": 8}),
        ("link", ["second.ptx"], {"fill": 3, "one": 2}),
        ("captured", [], {}),
    ],
)
def test_attached_to(tmp_path: Path, name: str, arguments: list[str], expected: dict[str, int]) -> None:
    """Modules that the program loads once the tool is there are measured from their first launch."""
    arguments = [str(tmp_path / a) if "." in a else a for a in arguments]
    done = jit.attached([jit.built(name), *arguments], tmp_path / "out", CUDASIM_HOSTILE="1")
    assert len(done.rounds) == 2
    summary = done.summary
    assert summary["lost"] == 0
    assert summary["launches_matched"] == summary["launches_instrumented"] + sum(
        summary["not_instrumented"].values()
    )
    if expected:
        assert done.launches == expected
        assert summary["launches_seen"] == sum(done.rounds[1].values())

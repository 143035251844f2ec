"""launchlate and CUPTI: operations without a probe have the times of CUPTI's activity records, where nobody else can use CUPTI.

Uses a stand-in for the library."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import gpubpf_examples
from cudasim_device import cuda_include
from gpubpf.session import tracing
from gpubpf.show.parsed import DeviceOptions, Options, OutputOptions
from gpubpf.traced.device import Device

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "tests"


SOURCES = ROOT / "tests" / "gpubpf" / "agent"
DEVICE = ROOT / "lib" / "cudasim" / "lib"
VARIABLE = "GPUBPF_CUPTI_STAND_IN"


def gcc(made: Path, *arguments: str | Path) -> Path:
    subprocess.run(["gcc", "-Wall", "-Werror", "-o", made, *arguments], check=True)
    return made


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the stand-in."""
    made = tmp_path_factory.mktemp("stand-in") / "libcupti.so.13"
    return gcc(made, "-shared", "-fPIC", "-Wl,-soname,libcupti.so.13", SOURCES / "fakecupti.c")


@pytest.fixture(scope="module")
def plugin(library: Path) -> Path:
    """Return a library that uses the stand-in."""
    made = library.parent / "libplugin.so"
    return gcc(made, "-shared", "-fPIC", SOURCES / "cuptiuser.c", library, f"-Wl,-rpath,{library.parent}")


@pytest.fixture(scope="module")
def newer_plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library that uses a function of a newer stand-in with the same DT_SONAME."""
    made = tmp_path_factory.mktemp("newer") / "libplugin.so"
    newer = made.parent / "libcupti.so.13"
    shared = ("-shared", "-fPIC", "-DNEWER")
    gcc(newer, *shared, "-Wl,-soname,libcupti.so.13", SOURCES / "fakecupti.c")
    return gcc(made, *shared, SOURCES / "cuptiuser.c", newer, f"-Wl,-rpath,{made.parent}")


@pytest.fixture(scope="module")
def failing(library: Path) -> Path:
    """Return a stand-in that does not record."""
    made = library.parent / "libcupti-fails.so"
    soname = "-Wl,-soname,libcupti-fails.so"
    return gcc(made, "-shared", "-fPIC", "-DFAILS", soname, SOURCES / "fakecupti.c")


def program(name: str, *arguments: str | Path) -> Path:
    """Compile the program that may use the plugin."""
    BUILD.mkdir(parents=True, exist_ok=True)
    include = f"-I{cuda_include()}"
    driver = (f"-L{DEVICE}", "-l:libcuda.so.1", "-ldl")
    return gcc(
        BUILD / name, include, SOURCES / "cuptiprogram.c", *arguments, *driver, f"-Wl,-rpath-link,{DEVICE}"
    )


def timeline(
    *options: str, of: Sequence[str | Path] = (), status: int = 0, **variables: str
) -> tuple[list[dict[str, Any]], str]:
    """Return the operations of a program in the timeline, and what launchlate said."""
    command = [sys.executable, ROOT / "tools" / "launchlate.py", "--timeline", "--json", "--device", "sim"]
    example = gpubpf_examples.build("vectoradd") / "vectoradd"
    done = subprocess.run(
        [*command, *options, "--", *(of or [example])],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | variables,
    )
    assert done.returncode == status, done.stderr + done.stdout
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [record for record in records if record["type"] == "op"], done.stderr


def copies(
    *options: str, of: Sequence[str | Path] = (), **variables: str
) -> tuple[list[dict[str, Any]], str]:
    """Return the copies of a program in the timeline, and what launchlate said."""
    found, said = timeline(*options, of=of, **variables)
    return [record for record in found if record["op"] in ("h2d", "d2h")], said


def methods(found: list[dict[str, Any]]) -> list[str]:
    """Return the method of each copy, which for CUPTI has the stand-in's length."""
    assert all((copy["dur_ns"] == 5000) == (copy["method"] == "cupti") for copy in found)
    assert all((copy["clock_error_ns"] is None) == (copy["method"] == "cupti") for copy in found)
    return [copy.get("method") for copy in found]


def test_times_are_those_of_the_activity_records(library: Path) -> None:
    found, said = copies(f"--cupti={library}")
    assert len(found) == 3, said
    assert [copy["dur_ns"] for copy in found] == [5000] * 3


def test_a_library_that_is_none_leaves_it_to_timing_events(tmp_path: Path) -> None:
    found, said = copies(f"--cupti={tmp_path}/none.so")
    assert "note: CUPTI provides no timestamps: it cannot be loaded; using timing events instead" in said
    assert len(found) == 3 and {copy["dur_ns"] for copy in found} != {5000}


def test_the_embedded_device_has_none() -> None:
    found, said = copies("--cupti")
    assert "note: CUPTI requires a GPU" in said
    assert len(found) == 3


def test_it_is_used_by_itself_where_nobody_else_can(library: Path) -> None:
    found, said = copies(**{VARIABLE: str(library)})
    assert methods(found) == ["cupti"] * 3, said
    assert "CUPTI" not in said


@pytest.mark.parametrize(
    "variable", ["NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH", "CUPTI_TRACE_LEVEL"]
)
def test_it_is_left_to_a_profiler_that_the_environment_announces(library: Path, variable: str) -> None:
    found, said = copies(**{VARIABLE: str(library), variable: "1"})
    assert methods(found) == ["stamp"] * 3, said
    assert "CUPTI" not in said


def test_it_is_not_used_with_no_cupti(library: Path) -> None:
    assert methods(copies("--no-cupti", **{VARIABLE: str(library)})[0]) == ["stamp"] * 3


def test_a_library_that_cannot_be_loaded_is_no_news_unless_asked_for(tmp_path: Path) -> None:
    found, said = copies(**{VARIABLE: str(tmp_path / "none.so")})
    assert methods(found) == ["stamp"] * 3, said
    assert "CUPTI" not in said


def test_a_program_that_is_linked_to_cupti_keeps_it(library: Path, plugin: Path) -> None:
    made = program("cupti-linked", "-DLINKED", plugin, f"-Wl,-rpath,{plugin.parent}")
    found, said = copies(of=[made], **{VARIABLE: str(library)})
    assert methods(found) == ["stamp"] * 5, said
    assert "CUPTI" not in said


def test_a_program_that_mentions_cupti_keeps_it(library: Path, plugin: Path) -> None:
    made = program("cupti-mentioned", '-DMENTIONED="libcupti.so"')
    assert methods(copies(of=[made, plugin], **{VARIABLE: str(library)})[0]) == ["stamp"] * 5


def test_cupti_is_given_up_before_the_program_loads_a_library(library: Path, plugin: Path) -> None:
    # dlopen() finds the plugin by the program's own search path.
    made = program("cupti-later", f"-Wl,-rpath,{plugin.parent}")
    found, said = copies(of=[made, plugin.name], **{VARIABLE: str(library)})
    assert methods(found) == ["cupti"] * 2 + ["stamp"] * 3, said


def test_a_program_that_loads_another_cupti_gets_its_own(library: Path, newer_plugin: Path) -> None:
    made = program("cupti-newer", f"-Wl,-rpath,{newer_plugin.parent}")
    found, said = copies(of=[made, newer_plugin.name], **{VARIABLE: str(library)})
    assert methods(found) == ["cupti"] * 2 + ["stamp"] * 3, said


@pytest.mark.parametrize("how", ["no-soname", "text", "cut"])
def test_a_file_that_is_not_what_is_expected_is_not_used(library: Path, tmp_path: Path, how: str) -> None:
    odd = tmp_path / "libcupti.so.13"
    if how == "no-soname":
        gcc(odd, "-shared", "-fPIC", SOURCES / "fakecupti.c")
    else:
        odd.write_bytes(library.read_bytes()[:600] if how == "cut" else b"INPUT(libcupti.so.13)\n")
    found, said = copies(**{VARIABLE: str(odd)})
    assert methods(found) == ["stamp"] * 3, said


@pytest.mark.parametrize("order", ["swapped", "apart", "swapped apart"])
def test_records_may_come_in_any_order(library: Path, order: str) -> None:
    assert methods(copies(**{VARIABLE: str(library), "FAKECUPTI": order})[0]) == ["cupti"] * 3


def test_timing_events_stay_if_cupti_reports_nothing(library: Path) -> None:
    mute = {"FAKECUPTI": "mute"}
    found, said = copies(**{VARIABLE: str(library)}, **mute)
    assert methods(found) == ["stamp"] * 3 and "CUPTI" not in said
    found, said = copies(f"--cupti={library}", **mute)
    assert methods(found) == ["stamp"] * 3
    assert "note: CUPTI reported none of 3 operations; their times are from timing events" in said


def test_recording_begins_in_cuinit_with_signals_blocked(library: Path) -> None:
    tells = {"FAKECUPTI": "tells"}
    _, said = copies(**{VARIABLE: str(library)}, **tells)
    assert "enabled 1, signals blocked\n" in said and "signals come" not in said
    assert "enabled 10," not in said  # it would slow the kernel, which has a probe
    _, said = copies(f"--cupti={library}", **tells)
    assert "enabled 10, signals blocked\n" in said


def kernels(library: Path, place: Path, words: str, *arguments: str | Path) -> tuple[list[str], str]:
    """Return how each kernel of a program without probes was timed, and what was said."""
    source, driver = SOURCES / "cuptikernels.c", (f"-L{DEVICE}", "-l:libcuda.so.1", "-ldl")
    made = gcc(place / "kernels", f"-I{cuda_include()}", source, *driver)
    variables = {VARIABLE: str(library), "FAKECUPTI": words, "FAKECUPTI_RECORDS": str(place / "recording")}
    of = [made, place / "recording", *arguments]
    found, said = timeline("--kernel=other", of=of, status=1, **variables)
    return [record["method"] for record in found if record["op"] == "kernel"], said


def test_kernels_are_recorded_after_one_without_a_probe(library: Path, tmp_path: Path) -> None:
    found, said = kernels(library, tmp_path, "tells")
    assert found[0] == "stamp" and found[-1] == "cupti", said
    assert "enabled 10, signals blocked\n" in said and said.count("enabled cuLaunchKernel\n") == 1


@pytest.mark.long
def test_a_library_is_loaded_although_cupti_is_busy(library: Path, plugin: Path, tmp_path: Path) -> None:
    """CUPTI may wait for a kernel that ends only when the program goes on."""
    found, said = kernels(library, tmp_path, "slow", plugin)
    took = re.search(r"^loaded in (.*) s$", said, re.M)
    assert took is not None and float(took[1]) < 2.5, said
    assert set(found) == {"stamp"}


def test_times_that_cupti_does_not_know_are_not_used(library: Path) -> None:
    assert methods(copies(**{VARIABLE: str(library), "FAKECUPTI": "zero"})[0]) == ["stamp"] * 3


def test_only_calls_that_are_timed_are_recorded(library: Path) -> None:
    tells = {"FAKECUPTI": "tells"}
    _, said = copies(**{VARIABLE: str(library)}, **tells)
    assert "enabled cuMemcpyHtoD_v2\n" in said and "cuCtxSynchronize" not in said
    assert "cuLaunchKernel" not in said and "enabled 4," not in said
    _, said = copies(f"--cupti={library}", **tells)
    assert "enabled cuLaunchKernel\n" in said and "cuCtxSynchronize" not in said
    _, said = copies(f"--cupti={library}", FAKECUPTI="tells old")
    assert "enabled 4," in said


@pytest.mark.parametrize("option", [True, False])
def test_the_next_library_is_used_if_one_does_not_record(library: Path, failing: Path, option: bool) -> None:
    both = f"{failing}:{library}"
    found, said = copies(f"--cupti={both}") if option else copies(**{VARIABLE: both})
    assert methods(found) == ["cupti"] * 3, said


def test_a_running_process_does_not_get_cupti(capsys: pytest.CaptureFixture[str]) -> None:
    def libraries(cupti: str | bool | None) -> Sequence[str]:
        options = Options(device=DeviceOptions(cupti=cupti), output=OutputOptions("launchlate"))
        return tracing._cupti(options, Device("gpu"))

    assert [libraries(option) for option in (None, False)] == [(), ()]
    assert capsys.readouterr().err == ""
    assert libraries("") == libraries("/lib.so") == ()
    assert "CUPTI requires a command that launchlate starts" in capsys.readouterr().err


def test_a_program_that_loads_libraries_before_the_driver_may_load_cupti(library: Path) -> None:
    code = "import ctypes; d = ctypes.CDLL('libcuda.so.1'); m = ctypes.c_uint64(); c = ctypes.c_void_p()\n"
    code += "assert not (d.cuInit(0) or d.cuDevicePrimaryCtxRetain(ctypes.byref(c), 0)"
    code += " or d.cuCtxSetCurrent(c)"
    code += " or d.cuMemAlloc_v2(ctypes.byref(m), 64) or d.cuMemcpyHtoD_v2(m, bytes(64), 64))"
    found, said = copies(of=[sys.executable, "-c", code], **{VARIABLE: str(library)})
    assert methods(found) == ["stamp"], said

"""The stand-in for libamdhip64 has the results, times, counts and symbol versions that other tests rely on."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import gpubpf_hip
from gpubpf_hip import Counted, needs_hip, real, run, standin


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("standin")
    return gpubpf_hip.program(directory, standin(directory))


def test_calls_succeed_and_are_counted(made: Path, tmp_path: Path) -> None:
    calls = ["hipMalloc", "hipLaunchKernel", "hipMemcpy", "hipDeviceSynchronize", "hipFree"]
    counts = tmp_path / "counts"
    told = run([str(made), "-t", "3", "-n", "20", *calls], {"STANDIN_COUNTS": str(counts)})
    assert told == dict.fromkeys(calls, Counted(60, 0))
    (found,) = gpubpf_hip.counts(counts).values()
    assert found == dict.fromkeys(calls, 60)


def test_calls_take_the_times_they_are_told(made: Path) -> None:
    plan = "hipLaunchKernel=device:60000 hipMemcpy=result:700 hipMalloc=sleep:30000 hipFree=busy:10000"
    start = time.monotonic()
    told = run(
        [str(made), "hipLaunchKernel", "hipMemcpy", "hipMalloc", "hipFree", "hipDeviceSynchronize"],
        {"STANDIN": plan},
    )
    assert time.monotonic() - start >= 0.06
    assert told["hipMemcpy"].result == 700
    start = time.monotonic()
    run([str(made), "-n", "3", "hipMalloc"], {"STANDIN": plan})
    assert time.monotonic() - start >= 0.09


def test_the_example_is_built_and_takes_the_times_of_the_documentation(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    shutil.copytree(root / "examples" / "hip", tmp_path / "hip")
    sources = root / "tests" / "gpubpf" / "calls" / "hip"
    subprocess.run(["make", "-s", "-C", tmp_path / "hip", f"SOURCES={sources}"], check=True)
    (plan,) = re.findall(r"export STANDIN='([^']*)'", (root / "tools" / "hipsnoop_example.txt").read_text())
    calls = ["hipMalloc", "hipMemcpy", "hipLaunchKernel", "launch", "launch", "hipDeviceSynchronize"]
    start = time.monotonic()
    told = run([str(tmp_path / "hip" / "app"), "-n", "5", *calls], {"STANDIN": plan})
    assert time.monotonic() - start >= 5 * 3 * 600e-6
    assert told["launch"] == Counted(10, 0) and told["hipDeviceSynchronize"] == Counted(5, 0)


@needs_hip
def test_symbols_have_the_versions_of_the_library(tmp_path: Path) -> None:
    late = {"hipGetFuncBySymbol", "hipLaunchKernelExC", "standin_set", "standin_inside"}
    ours, theirs = _versions(standin(tmp_path)), _versions(real())
    assert {name: version for name, version in ours.items() if name not in late}.items() <= theirs.items()


def _versions(path: Path) -> dict[str, str]:
    done = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True)
    return dict(line.split()[-1].split("@@") for line in done.stdout.splitlines() if "@@" in line)

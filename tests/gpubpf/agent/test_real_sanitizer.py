"""The agent and NVIDIA's Compute Sanitizer library, with NVIDIA's driver and without a GPU: who subscribes, and who is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpubpf import agent
from gpubpf_drivers import driver
from gpubpf_host import needs_open_checkout, open_directory, without_gpu

HERE = Path(__file__).parent
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
SUBSCRIBED, REFUSED = 0, 10  # SANITIZER_SUCCESS, SANITIZER_ERROR_MAX_LIMIT_REACHED
NOTICE = "kernels without PTX are not measured: another tool in the process has subscribed to it"

pytestmark = [
    pytest.mark.skipif(
        os.uname().machine != "x86_64" or not shutil.which("gcc"), reason="needs gcc on x86-64"
    ),
    pytest.mark.skipif(not agent.LIBRARY.exists(), reason="the agent is not built (script/setup)"),
    needs_open_checkout,
]


def installed() -> Path:
    for place in map(Path, sys.path):
        for found in place.glob("nvidia/**/compute-sanitizer/libsanitizer-public.so"):
            return found
    pytest.skip("nvidia-cuda-sanitizer-api is not installed")


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """The program, the driver and the library for every user, and a folder to put a /dev."""
    library, cuda = installed(), driver("newest")
    with open_directory() as place:
        warn = ["-O1", "-Wall", "-Wextra", "-Werror"]
        subprocess.run(["gcc", *warn, "-o", place / "subscribes", HERE / "subscribes.c", "-ldl"], check=True)
        shutil.copy(library, place / library.name)
        shutil.copy(cuda, place / "libcuda.so.1")
        (place / "dev").mkdir()
        yield place


def run(place: Path, when: str, traced: bool, sanitizer: str = "") -> tuple[dict[str, int], list[str]]:
    """Return what the program's calls returned, and what the tool said."""
    program = [str(place / "subscribes"), str(place / "libsanitizer-public.so"), when]
    command = ["env", f"LD_LIBRARY_PATH={place}", *program]
    shared = place / f"{when}-{traced}-{bool(sanitizer)}"
    shared.mkdir()
    shared.chmod(0o777)
    options = {"device": "gpu", "wanted": (), "sanitizer": sanitizer}
    tool = [sys.executable, str(HERE / "fake_tool.py"), str(shared / "result"), repr(options), "--"]
    words = [*without_gpu(place / "dev"), *(tool if traced else []), *command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    results = {
        name: int(value) for name, _, value in (line.partition(": ") for line in done.stdout.splitlines())
    }
    return results, json.loads((shared / "result").read_text())["said"] if traced else []


def test_alone(place: Path) -> None:
    """The library works with this driver without a GPU."""
    assert run(place, "after", traced=False)[0] == {
        "cuInit": NO_DEVICE,
        "subscribe": SUBSCRIBED,
        "unsubscribe": 0,
    }


def test_the_agent_is_the_subscriber(place: Path) -> None:
    results, said = run(place, "after", traced=True, sanitizer=str(place / "libsanitizer-public.so"))
    assert results == {"cuInit": NO_DEVICE, "subscribe": REFUSED}
    assert NOTICE not in said


def test_the_program_is_the_subscriber(place: Path) -> None:
    results, said = run(place, "before", traced=True, sanitizer=str(place / "libsanitizer-public.so"))
    assert results == {"cuInit": NO_DEVICE, "subscribe": SUBSCRIBED, "unsubscribe": 0}
    assert NOTICE in said


def test_without_the_option_the_agent_leaves_it_alone(place: Path) -> None:
    results, said = run(place, "after", traced=True)
    assert results == {"cuInit": NO_DEVICE, "subscribe": SUBSCRIBED, "unsubscribe": 0}
    assert not any("kernels without PTX" in text for text in said)

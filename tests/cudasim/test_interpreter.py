"""The translator runs in the environment that the device's library belongs to, whichever Python built the library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cudasim_device import CUDASIM, ROOT, libraries

USER = 65534  # nobody, if root runs this
PROGRAM = r"""
import ctypes, sys
driver = ctypes.CDLL(sys.argv[1])
context, module, function = (ctypes.c_void_p() for _ in range(3))
text = b".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry f() { ret; }\n"
print(driver.cuInit(0), driver.cuCtxCreate_v2(ctypes.byref(context), 0, 0))
print(driver.cuModuleLoadData(ctypes.byref(module), text))
print(driver.cuModuleGetFunction(ctypes.byref(function), module, b"f"))
print(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, None, None), driver.cuCtxSynchronize())
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can enter."""
    with tempfile.TemporaryDirectory(prefix="gpubpf-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def install(packages: Path) -> Path:
    """Install cudasim into a directory; return its libcuda.so.1."""
    for name in ("cudasim/translate", "gpubpf"):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).symlink_to(CUDASIM.parent / name)
    (packages / "cudasim/__init__.py").touch()
    (packages / "cudasim/lib").mkdir()
    return Path(shutil.copy(libraries() / "libcuda.so.1", packages / "cudasim/lib"))


def make_interpreter(path: Path, says: Path) -> None:
    """Write an interpreter that adds its own path to a file."""
    path.parent.mkdir(parents=True)
    path.write_text(f'#!/bin/sh\necho "$0" >>{says}\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)


@pytest.mark.parametrize("kind", ["environment", "checkout"])
def test_the_interpreter_of_the_environment(place: Path, kind: str) -> None:
    said = place / "said"
    said.touch()
    said.chmod(0o666)
    if kind == "environment":
        packages, interpreter = place / "env/lib/python3.11/site-packages", place / "env/bin/python3.11"
    else:
        packages, interpreter = place / "lib", place / ".venv/bin/python3"
        (place / "script").mkdir()
        (place / "script/setup").symlink_to(ROOT / "script/setup")
    library = install(packages)
    make_interpreter(interpreter, said)
    cache = place / "cache"
    cache.mkdir(0o700)
    if not os.geteuid():
        os.chown(cache, USER, USER)
    hidden = ("CUDASIM_PYTHON", "CUDASIM_PYTHONPATH", "PYTHONPATH")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM, library],
        env=variables | {"CUDASIM_CACHE": str(cache), "HOME": str(place)},
        text=True,
        capture_output=True,
        **({} if os.geteuid() else {"user": USER, "group": USER, "extra_groups": []}),
    )
    assert done.stdout == "0 0\n0\n0\n0 0\n", done.stderr
    assert set(said.read_text().split()) == {str(interpreter)}

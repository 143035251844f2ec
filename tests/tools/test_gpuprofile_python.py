"""Python frames in the stacks of gpuprofile and launchlate, with CPython 3.9 to 3.14 where they are installed.

GPUBPF_PYTHONS names further interpreters, separated by colons.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda

pytestmark = gpubpf_cuda.needs_cuda
TOOLS = Path(__file__).resolve().parents[2] / "tools"
PYTHONS = [path for minor in range(9, 15) if (path := shutil.which(f"python3.{minor}", path="/usr/bin"))]
PYTHONS += [path for path in os.environ.get("GPUBPF_PYTHONS", "").split(":") if path]
START = """
import atexit, ctypes, threading

cuda = ctypes.CDLL("libcuda.so.1")
PTX = b".version 7.0\\n.target sm_52\\n.address_size 64\\n.visible .entry touch() { ret; }\\n"
device, context, module, touch = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()

def check(status):
    assert status == 0, status

def use():
    check(cuda.cuCtxSetCurrent(context))

def launch():
    check(cuda.cuLaunchKernel(touch, 1, 1, 1, 1, 1, 1, 0, None, None, None))

check(cuda.cuInit(0))
check(cuda.cuDeviceGet(ctypes.byref(device), 0))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
use()
check(cuda.cuModuleLoadData(ctypes.byref(module), PTX))
check(cuda.cuModuleGetFunction(ctypes.byref(touch), module, b"touch"))
"""
PROGRAM = (
    START
    + """
class Model:
    def step(self):
        launch()  # in a method

def numbers():
    for number in range(3):
        launch()  # in a generator
        yield number

def descend(depth):
    if depth:
        descend(depth - 1)
    else:
        launch()  # at the bottom

def handled():
    try:
        raise KeyError
    except KeyError:
        launch()  # in a handler
    finally:
        launch()  # finally

def compare(one, other):
    launch()  # called by C
    return 0

def worker():
    use()
    for _ in range(5):
        launch()  # in a thread

def grüße():
    launch()  # in a name beyond ASCII

async def coroutine():
    launch()  # in a coroutine

class Last:
    def __del__(self):
        launch()  # in the end

for _ in range(2):
    Model().step()
for _ in numbers():
    pass
descend(5)
descend(200)
handled()
COMPARE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
ctypes.CDLL(None).qsort((ctypes.c_int * 2)(2, 1), 2, 4, COMPARE(compare))
thread = threading.Thread(target=worker)
thread.start()
thread.join()
sorted([2], key=lambda key: launch())
grüße()
try:
    coroutine().send(None)
except StopIteration:
    pass
for _ in range(4):
    launch()  # in a loop
atexit.register(launch)
last = Last()
check(cuda.cuCtxSynchronize())
"""
)
# The Python frames of each stack, outermost first, with the text of the line in the frame before the last: launches.
EXPECTED = {
    ("<module> Model.step launch", "# in a method"): 2,
    ("<module> numbers launch", "# in a generator"): 3,
    ("<module> descend descend descend descend descend descend launch", "# at the bottom"): 1,
    ("<module> handled launch", "# in a handler"): 1,
    ("<module> handled launch", "# finally"): 1,
    ("<module> compare launch", "# called by C"): 1,
    ("Thread._bootstrap Thread._bootstrap_inner Thread.run worker launch", "# in a thread"): 5,
    ("<module> <lambda> launch", "sorted([2], key=lambda key: launch())"): 1,
    ("<module> grüße launch", "# in a name beyond ASCII"): 1,
    ("<module> coroutine launch", "# in a coroutine"): 1,
    ("<module> launch", "# in a loop"): 4,
    ("launch", ""): 1,
}


def stacks_of(tmp_path: Path, python: str, source: str, *arguments: str) -> list[dict[str, Any]]:
    program = tmp_path / "program.py"
    program.write_text(source)
    command = [
        sys.executable,
        str(TOOLS / "gpuprofile.py"),
        "--device",
        "sim",
        "--clock",
        "virtual",
        "--json",
    ]
    command += ["-o", str(tmp_path / "out"), *arguments, "--", python, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    return [one for one in found if one["type"] == "stack"]


@pytest.mark.parametrize("python", PYTHONS)
def test_known_stacks(python: str, tmp_path: Path) -> None:
    lines = ["", *PROGRAM.splitlines()]
    found: Counter[tuple[str, str]] = Counter()
    deep = ended = 0
    for one in stacks_of(tmp_path, python, PROGRAM):
        frames = [frame for frame in one["frames"] if frame["kind"] == "python"]
        names = [frame["name"] for frame in frames]
        assert not any(frame["name"] == "_PyEval_EvalFrameDefault" for frame in one["frames"]) or not frames
        if not one["complete"]:
            assert set(names) == {"descend", "launch"} and len(names) > 20
            deep += one["launches"]
            continue
        if not frames:  # the interpreter was ending
            ended += one["launches"]
            continue
        assert "cuLaunchKernel" in lines[frames[-1]["line"]] and frames[-1]["file"].endswith("/program.py")
        # Before 3.11, code objects have no qualified names.
        names = [name if "." in name else {"step": "Model.step"}.get(name, name) for name in names]
        names = [f"Thread.{name}" if re.match("_bootstrap|run$", name) else name for name in names]
        line = lines[frames[-2]["line"]] if len(frames) > 1 else ""
        found[" ".join(names), line[max(line.find("#"), 0) :]] += one["launches"]
    assert found == EXPECTED
    assert (deep, ended) == (1, 1)


def test_formats_have_the_lines(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(START + "launch()\nlaunch()\n")
    tool = [sys.executable, str(TOOLS / "gpuprofile.py"), "--device", "sim", "--clock", "virtual"]
    scope, svg = tmp_path / "scope", tmp_path / "svg"
    command = [*tool, "-v", "--speedscope", scope, "--svg", svg, "--", sys.executable, program]
    text = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout
    last = len(program.read_text().splitlines())
    assert (
        f"touch   <module>:{last} > launch:" in text
        and f"    <module> (program.py:{last})\n    launch (program.py:" in text
    )
    frames = json.loads(scope.read_text())["shared"]["frames"]
    lines = [frame["line"] for frame in frames if frame["name"] == "<module>"]
    assert sorted(lines) == [last - 1, last]
    assert f"&lt;module&gt;\n2 ns, 100.00 %\n{program}" in svg.read_text()


THREADS = (
    START
    + """
import time

def spin(number):
    use()
    while True:
        launch()

for number in range(4):
    threading.Thread(target=spin, args=(number,), daemon=True).start()
time.sleep(1)
"""
)


@pytest.mark.every(2)
@pytest.mark.parametrize("python", PYTHONS)
def test_an_interpreter_that_ends_while_threads_launch(python: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(THREADS)
    command = [
        sys.executable,
        str(TOOLS / "gpuprofile.py"),
        "--device",
        "sim",
        "--folded",
        "--",
        python,
        program,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert (
        not done.stdout or ";spin;launch;" in done.stdout
    )  # unless the machine was too slow for a launch in time

"""script/gpu's questions: their calls as cuda.h declares them, and what becomes of them when a driver ends or hangs the process."""

from __future__ import annotations

import ast
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gpu import driver, facts, machine, questions
from gpu.driver import DriverError
from gpu.questions import arithmetic, asking, clocks, handles, memory, swaps

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [ROOT / "script/gpu/driver.py", *sorted((ROOT / "script/gpu/questions").glob("*.py"))]
INCLUDE = next(
    (
        place
        for place in (os.environ.get("CUDA_INCLUDE"), "/usr/local/cuda/include")
        if place and Path(place, "cuda.h").exists()
    ),
    "",
)
needs_header = pytest.mark.skipif(
    not INCLUDE or not shutil.which("gcc"), reason="cuda.h and gcc are not there"
)
STRUCTURES = {
    "CUDA_KERNEL_NODE_PARAMS_v2": swaps.NodeParameters,
    "CUlaunchConfig": swaps.LaunchConfig,
    "CUlaunchAttribute": swaps.LaunchAttribute,
    "CUgraphExecUpdateResultInfo": swaps.UpdateResult,
}
# How wide what a pointer parameter points to is; what is not here is a handle or an address.
WIDTHS = {
    "int": 4,
    "unsigned int": 4,
    "CUdriverProcAddressQueryResult": 4,
    "CUstreamCaptureMode": 4,
    "CUmoduleLoadingMode": 4,
}


def compiled(tmp_path: Path, source: str) -> str:
    """What a C program with cuda.h prints."""
    file = tmp_path / "asks.c"
    file.write_text(f"#include <cuda.h>\n#include <stddef.h>\n#include <stdio.h>\n{source}")
    out = tmp_path / "asks"
    subprocess.run(["gcc", "-I", INCLUDE, "-o", str(out), str(file)], check=True)
    return subprocess.run([str(out)], check=True, capture_output=True, text=True).stdout


def declared() -> dict[str, list[str]]:
    """The driver's functions by the name that a program of this cuda.h calls, with the types of their parameters."""
    command = ["gcc", "-E", "-P", "-I", INCLUDE, "-include", "cuda.h", "-x", "c", "/dev/null"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {
        name: [re.sub(r"\s*\w+$", "", one.strip()) for one in parameters.split(",")]
        for name, parameters in re.findall(r"CUresult\s+(cu\w+)\s*\(([^()]*)\)\s*;", text)
        if parameters.strip() != "void"
    } | {name: [] for name in re.findall(r"CUresult\s+(cu\w+)\s*\(void\)\s*;", text)}


def calls() -> Iterator[tuple[str, list[ast.expr | None]]]:
    """Every call of the driver in the kit, with its arguments; None: of the one that takes the result."""
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0]
            if called in ("call", "must", "handle", "out", "prepared") and isinstance(first, ast.Constant):
                assert not any(isinstance(one, ast.Starred) for one in node.args), ast.unparse(node)
                taken: list[ast.expr | None] = [None] if called in ("handle", "out") else []
                yield str(first.value), [*taken, *node.args[1:]]


@needs_header
def test_calls_of_the_driver_are_those_of_its_header() -> None:
    known = declared()
    seen = list(calls())
    assert len({name for name, _ in seen}) > 40
    for name, arguments in seen:
        assert name in known, f"a program of this cuda.h does not call {name}"
        assert len(arguments) == len(known[name]), f"{name}: {known[name]}"
        for argument, kind in zip(arguments, known[name], strict=True):
            pointer = kind.endswith("*")
            if argument is None:
                assert pointer, f"{name} takes no pointer first"
            elif "byref" in ast.unparse(argument):
                assert pointer, f"{name}: {ast.unparse(argument)} for {kind}"
            assert kind not in ("float", "double"), name


@needs_header
def test_what_results_are_written_to_is_wide_enough() -> None:
    """A result of 8 bytes in a variable of 4 overwrites what is behind it."""
    known = declared()
    for source in SOURCES:
        tree = ast.parse(source.read_text())
        narrow = {
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target, value in pairs(node)
            if isinstance(target, ast.Name) and ast.unparse(value).startswith(("ctypes.c_int(", "c_int("))
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name = str(node.args[0].value)
                offset = len(known.get(name, ())) - len(node.args) + 1
                for index, argument in enumerate(node.args[1:]):
                    found = re.fullmatch(r"ctypes\.byref\((\w+)\)", ast.unparse(argument))
                    if name in known and found and found[1] in narrow:
                        kind = known[name][index + offset].removesuffix("*").strip()
                        assert WIDTHS.get(kind) == 4, f"{name}: {kind} in {found[1]}"


def pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield target, node.value


@needs_header
def test_numbers_are_those_of_the_header(tmp_path: Path) -> None:
    names = [name for name in vars(driver) if name.startswith("CU_")]
    values = {"CU_STREAM_LEGACY": "(long)CU_STREAM_LEGACY"}
    lines = "".join(f'    printf("{name} %ld\\n", (long){values.get(name, name)});\n' for name in names)
    text = compiled(tmp_path, f"int main(void) {{\n{lines}    return 0;\n}}\n")
    right = {name: int(value) for name, value in (line.split() for line in text.splitlines())}
    assert {name: getattr(driver, name) for name in names} == right and len(names) > 10


@needs_header
def test_structures_are_those_of_the_header(tmp_path: Path) -> None:
    lines = []
    for name, structure in STRUCTURES.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in structure._fields_:
            at = f"offsetof({name}, {field})"
            lines.append(f'printf("{name}.{field} %zu %zu\\n", {at}, sizeof((({name} *)0)->{field}));')
    text = compiled(tmp_path, "int main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n")
    right = {line.split()[0]: tuple(map(int, line.split()[1:])) for line in text.splitlines()}
    ours: dict[str, tuple[int, ...]] = {}
    for name, structure in STRUCTURES.items():
        ours[name] = (ctypes.sizeof(structure),)
        for field, *_ in structure._fields_:
            member = getattr(structure, field)
            ours[f"{name}.{field}"] = (member.offset, member.size)
    assert ours == right


@pytest.mark.skipif(not shutil.which("ptxas"), reason="ptxas is not there")
@pytest.mark.parametrize("target", ["sm_75", "sm_90"])
def test_kernels_are_what_ptxas_takes(target: str) -> None:
    modules = (driver, clocks, handles, memory, arithmetic)
    kernels = {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str) and ".entry" in value
    }
    assert len(kernels) == 8
    for name, text in kernels.items():
        command = ["ptxas", f"-arch={target}", "-o", os.devnull, "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stderr}"


# --- children ---


def test_what_a_child_says_and_how_it_ends() -> None:
    def dies(say: asking.Say) -> None:
        say(1)
        os.kill(os.getpid(), signal.SIGTERM)

    def raises(say: asking.Say) -> None:
        say({"a": 2})
        raise DriverError("cuInit: CUDA_ERROR_NO_DEVICE")

    def breaks(say: asking.Say) -> None:
        raise ValueError("odd")

    def hangs(say: asking.Say) -> None:
        say(3)
        time.sleep(60)

    assert asking.isolated(lambda say: say("x" * 100_000)) == (["x" * 100_000], "")
    assert asking.isolated(dies) == ([1], "died by SIGTERM")
    assert asking.isolated(raises) == ([{"a": 2}], "cuInit: CUDA_ERROR_NO_DEVICE")
    assert asking.isolated(breaks) == ([], "ValueError: odd")
    assert asking.isolated(hangs, 1) == ([3], "no answer in 1 s")


def test_a_row_that_ends_the_process_costs_itself_alone() -> None:
    def ask(names: Sequence[str]) -> Iterator[tuple[str, str]]:
        for name in names:
            if name == "dies":
                os.kill(os.getpid(), signal.SIGTERM)
            yield name, "fine"
            if name == "last of this process":
                return

    names = ["first", "dies", "last of this process", "fourth"]
    found = asking.row_by_row(names, ask, 20)
    assert found == {name: "died by SIGTERM" if name == "dies" else "fine" for name in names}


def test_rows_for_which_there_is_no_time_are_named() -> None:
    def ask(names: Sequence[str]) -> Iterator[tuple[str, str]]:
        yield names[0], "fine"
        time.sleep(60)

    found = asking.row_by_row(["a", "b", "c"], ask, 1)
    assert found == {"a": "fine", "b": "no answer in 1 s", "c": "not asked: no time"}


def here(path: Path) -> machine.Machine:
    """Where `python -m gpu.questions` is a program in `path`."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return machine.Machine("sim", environment, time.monotonic() + 60)


def asked(tmp_path: Path, program: str, seconds: float = 20) -> dict[str, object]:
    package = tmp_path / "gpu"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "questions.py").write_text(program)
    return facts.ask(here(tmp_path), questions.Question("some", "does it?", "no", seconds, dict))


def test_what_was_seen_before_a_question_is_killed_counts(tmp_path: Path) -> None:
    program = 'import time\nprint(\'{"found": {"a": 1}, "agrees": true}\', flush=True)\ntime.sleep(60)\n'
    said = asked(tmp_path, program, 2)
    assert said["found"] == {"a": 1} and said["agrees"] is False
    assert str(said["answer"]).startswith("no answer: timed out after 2 s")


def test_what_was_seen_before_a_question_fails_counts(tmp_path: Path) -> None:
    said = asked(tmp_path, "import sys\nprint('{\"found\": 1}')\nsys.exit('why')\n")
    assert said["found"] == 1 and said["answer"] == "not asked to the end: why"


def test_a_question_that_fails_at_once_has_failed(tmp_path: Path) -> None:
    with pytest.raises(machine.Failure, match="exit status 1: why"):
        asked(tmp_path, "import sys\nsys.exit('why')\n")


@pytest.mark.long
def test_a_process_that_cannot_be_killed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one is that waits in the driver: the stage goes on."""
    killed: list[int] = []
    kill = os.kill
    monkeypatch.setattr(machine.os, "kill", lambda pid, number: killed.append(pid))
    monkeypatch.setattr(machine.os, "killpg", lambda pid, number: None)
    began = time.monotonic()
    with pytest.raises(machine.Failure, match="timed out after 1 s; last output: here"):
        here(ROOT).start([sys.executable, "-uc", "import time; print('here'); time.sleep(40)"], 1)
    assert killed and time.monotonic() - began < 30
    monkeypatch.undo()
    for pid in killed:
        kill(pid, signal.SIGKILL)

"""The commands of docs/tutorial.md give the output that it shows.

Only numbers are compared: the page leaves lines out, and the words of a report may change.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
EXAMPLES = [
    (block.splitlines()[0].removeprefix("$ "), block.splitlines()[1:])
    for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    if not (ROOT / "lib" / "cudasim" / "lib" / "libcuda.so.1").exists():
        pytest.skip("the embedded device is not built (script/setup)")
    if not list((ROOT / "lib" / "gpubpf" / "agent" / "lib").glob("*.so")):
        pytest.skip("the agent is not built (script/setup)")
    folder = tmp_path_factory.mktemp("tutorial")
    build = next(line for line in PAGE.splitlines() if line.startswith("nvcc "))
    command = build.replace("-o tutorial", f"-o {shlex.quote(str(folder / 'tutorial'))}")
    subprocess.run(shlex.split(command), cwd=ROOT, check=True)
    return folder


def numbers(line: str) -> list[str]:
    return re.findall(r"\d[\d,.]*\d|\d", line)


def test_the_page_has_its_examples() -> None:
    """It shows each of the three tools before the fix and after."""
    commands = {command for command, _ in EXAMPLES}
    for tool in ("launchlate", "threadhist", "memtrace"):
        for end in ("-- ./tutorial", "-- ./tutorial --fixed"):
            assert any(command.startswith(tool) and command.endswith(end) for command in commands)


@pytest.mark.every(4)
@pytest.mark.parametrize("command, shown", EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_an_example(command: str, shown: list[str], where: Path) -> None:
    tool, *arguments = shlex.split(command)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / f"{tool}.py"), "--device", "sim", *arguments],
        cwd=where,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / "lib")},
    )
    assert done.returncode == 0, done.stderr
    lines = iter(done.stdout.splitlines())
    for line in filter(numbers, shown):
        expected = numbers(line)
        assert any(numbers(real)[: len(expected)] == expected for real in lines), (
            f"not in the output, or not in this order: {line!r}\n{done.stdout}"
        )

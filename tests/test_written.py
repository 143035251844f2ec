"""What is written is run: commands of README, the documentation and the example texts print what is shown below them.

The embedded device runs them, not in its hostile mode. `gpubpf_written.py` says what may differ.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_examples
import gpubpf_written
from gpubpf.ebpf import clang, compile
from gpubpf_written import ROOT, TOOLS, Written
from test_contract import read_command_line

PAGES = [
    "README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tools").glob("*_example.txt")),
]
# Commands that do not run here, and why. The first pattern that a command matches counts.
NOT_RUN = {
    r".* -p \d+": "the process is one that the reader has",
    r".*\./(app|nogpu)\b": "the program is the reader's",
    r".*\./main\b": "the program is HeCBench's",
    r".* --clock real\b": "shows times of the host",
    r"(cuda|hip)snoop (?!--list)": "shows times of the host",
    r"gpuhang ": "shows times of the host, how far loops and blocks have got by then",
    r"(?!.*--(list|ebpf|ptx) )(?!.* -- )": "measures every process of the machine",
}
COMPILES = {"gpucount", "gpudist", "gputrace"}
COMMANDS = [command for page in PAGES for command in gpubpf_written.written(page)]


def why_not(command: str) -> str | None:
    """Return why a command is not run here, or None."""
    return next((reason for pattern, reason in NOT_RUN.items() if re.match(pattern, command)), None)


RUN = [command for command in COMMANDS if why_not(command.command) is None]


def test_most_commands_run() -> None:
    """A page that shows commands in another way, or a pattern that matches too much, would go unnoticed."""
    assert len(RUN) >= 55 and len(RUN) >= len(COMMANDS) * 2 / 3
    assert {command.page for command in RUN} >= {"README.md", "docs/tutorial.md", "docs/sampling.md"}
    for pattern in NOT_RUN:
        assert any(re.match(pattern, command.command) for command in COMMANDS), f"{pattern} matches nothing"


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tools as commands."""
    if not list((ROOT / "lib" / "gpubpf" / "agent" / "lib").glob("*.so")):
        pytest.skip("the agent is not built (script/setup)")
    folder = tmp_path_factory.mktemp("commands")
    for tool in TOOLS:
        file = ROOT / "tools" / f"{tool}.py"
        started = str(file) if file.exists() else f"-m{tool}"
        (folder / tool).write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, started])} "$@"\n')
        (folder / tool).chmod(0o755)
    return folder


def put(command: str, where: Path) -> None:
    """Build the examples that a command names, and link them in a directory."""
    names = [name for name in re.findall(r"\./(\w+)", command) if name in gpubpf_examples.NAMES]
    objects = re.findall(r"\w+\.bpf\.o", command)
    built = gpubpf_examples.build(*names, *(["threads.bpf.o"] if objects else []))
    for name in (*names, *objects):
        (where / name).symlink_to(built / name)
    if "bad.bpf.o" in objects:  # as tools/gpurun_example.txt says
        text = (built / "threads.bpf.c").read_text()
        bad = text.replace("zero = 0", "zero = loud").replace("if (mine) ", "")
        (where / "bad.bpf.c").write_text(bad)
        (where / "bad.bpf.o").unlink()
        subprocess.run(["make", "-s", "-f", built / "Makefile", "bad.bpf.o"], cwd=where, check=True)


@pytest.mark.every(8)
@pytest.mark.parametrize("command", RUN, ids=str)
def test_a_command_prints_what_is_written(command: Written, commands: Path, tmp_path: Path) -> None:
    tool = command.words[0]
    if tool in COMPILES | {"gpurun"} and clang.find() is None and not compile.usable():
        pytest.skip("compiling needs clang, or root and bcc")
    put(command.command, tmp_path)
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    environment.pop("CUDASIM_HOSTILE", None)
    for step in command.steps:
        done = subprocess.run(
            ["bash", "-c", step.command],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert not (wrong := gpubpf_written.difference(step, done.stdout)), wrong


@pytest.mark.parametrize("page", PAGES)
def test_commands_without_output_are_command_lines(page: str) -> None:
    for command in gpubpf_written.sh_commands(page):
        if command.split()[0] not in ("cudasim", "hipsim"):  # all their arguments are the program's
            read_command_line(command.split()[0], shlex.split(command)[1:])


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/tools/")])
def test_output_on_the_pages_of_tools_is_that_of_the_examples(page: str) -> None:
    """Those pages show output without the command. The commands of the examples are run (above)."""
    name = Path(page).stem
    example = ROOT / "tools" / f"{name}_example.txt"
    if not example.exists() or name in ("cudasnoop", "hipsnoop"):  # which show times of the host
        return
    texts = [example, ROOT / "README.md", ROOT / "docs/tutorial.md"]
    shown = {steady(line) for text in texts for line in text.read_text().splitlines()}
    blocks = re.findall(r"```text\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert lines and not [line for line in lines if steady(line) not in {*shown, "..."}]


def steady(line: str) -> str:
    return re.sub(r"\(pid \d+\)", "(pid)", line.strip())


def test_the_tutorial_shows_each_problem_before_its_fix_and_after() -> None:
    shown = {command.command for command in COMMANDS if command.page == "docs/tutorial.md"}
    for tool in ("launchlate", "threadhist", "memtrace"):
        for end in ("-- ./tutorial", "-- ./tutorial --fixed"):
            assert any(command.startswith(tool) and command.endswith(end) for command in shown)


# --- what is compared ---


def example(shown: str, printed: str, prose: bool = False) -> str:
    return gpubpf_written.difference(
        Written("page", 1, "threadhist -- ./app", shown.splitlines(), prose), printed
    )


PRINTED = "threadhist: note: one\ntitle (pid 12)\n  1 launch\n\nROW  9\n\nlast\noverhead: 1 ms;\n  4 KB\n"


@pytest.mark.parametrize(
    "shown",
    [
        "title (pid 7)\n  1 launch\n\nROW  9\n\nlast",
        "title (pid 7)\n...\nlast",
        "...\n  1 launch\n...",
        "title ...\n",
    ],
)
def test_what_may_be_left_out(shown: str) -> None:
    assert example(shown, PRINTED) == ""
    assert example(f"{shown}\n\nThis is a sentence.", PRINTED, prose=True) == ""


@pytest.mark.parametrize(
    "shown",
    [
        "title (pid 7)\n  2 launches\n\nROW  9\n\nlast",  # another number
        "title (pid 7)\n\nROW  9\n\nlast",  # a line is missing
        "title (pid 7)\n  1 launch\n\nROW  9\nROW  9\n\nlast",  # a line too many
        "title (pid 7)\n  1 launch\n\nROW  9\n\nlast\n\nROW  8",
        "title (pid 7)\n...\nROW  8\n...",
        "title (pid 7)\n  1 launch\n\nROW  9",  # an end is missing
    ],
)
def test_what_is_wrong(shown: str) -> None:
    assert example(shown, PRINTED) and example(f"{shown}\n\nThis is a sentence.", PRINTED, prose=True)


def test_json_is_compared_by_its_fields() -> None:
    printed = '{"type":"kernel","pid":5,"wave":32,"overhead":{"hooks":3,"registers":6}}\n'
    assert example('{"type":"kernel","pid":6,"wave":32,"overhead":{"hooks":9,"registers":6}}', printed) == ""
    for wrong in ('"wave":64,"overhead":{"hooks":3,"registers":6}', '"overhead":{"hooks":3,"registers":6}'):
        assert example('{"type":"kernel","pid":5,' + wrong + "}", printed)

"""What is written is run: commands of README, the documentation and the example texts print what is shown below them.

The embedded device runs them, not in its hostile mode. `gpubpf_written.py` says what may differ.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gpubpf_examples
import gpubpf_hip
import gpubpf_written
import hipsim_device
from gpubpf.ebpf import clang, compile
from gpubpf.kernel import privileges
from gpubpf_written import ROOT, TOOLS, Written
from test_contract import read_command_line

PAGES = [
    "README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tools").glob("*_example.txt")),
]
# Commands that do not run here, and why. The first pattern that a command matches counts.
NOT_RUN = {
    r"(?!hipsnoop).* -p \d+|\w+ -p \d+": "the process is one that the reader has",
    r"(?!hipsnoop).*\./(app|nogpu)\b": "the program is the reader's",
    r".*\./main\b": "the program is HeCBench's",
    r"launchlate .* --slow|gpuhang .*\./hangs slow": "a fast or a busy machine prints nothing",
    r"(?!.*--(list|ebpf|ptx) )(?!.* -- )": "measures every process of the machine",
}
# Commands that print times of the host, or how far loops and blocks have got: only columns and JSON fields are compared.
OF_THE_HOST = r"cudasnoop (?!--list)|hipsnoop |gpuhang "
# What tools/hipsnoop_example.txt says of its program.
STANDIN = "hipMalloc=busy:90 hipMemcpy=busy:45 hipLaunchKernel=busy:5 hipLaunchKernel=device:600"
FAILING = "hipMemcpy=result:1"
COMPILES = {"gpucount", "gpudist", "gputrace"}
COMMANDS = [command for page in PAGES for command in gpubpf_written.written(page)]


def why_not(command: str) -> str | None:
    """Return why a command is not run here, or None."""
    return next((reason for pattern, reason in NOT_RUN.items() if re.match(pattern, command)), None)


STARTED = [command for command in COMMANDS if why_not(command.command) is None]
RUN = [command for command in STARTED if not re.match(OF_THE_HOST, command.command)]
OF_THE_HOST_RUN = [command for command in STARTED if command not in RUN]


def test_most_commands_run() -> None:
    """A page that shows commands in another way, or a pattern that matches too much, would go unnoticed."""
    assert len(RUN) >= 90 and len(RUN) >= len(COMMANDS) * 3 / 5
    assert len(STARTED) >= len(COMMANDS) * 3 / 4
    assert len([command for command in OF_THE_HOST_RUN if gpubpf_written.headings(command.shown)]) >= 14
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


def put(command: Written, where: Path) -> None:
    """Build the programs that a command names, and link them in a directory."""
    text = command.command
    names = [name for name in re.findall(r"\./(\w+)", text) if name in gpubpf_examples.NAMES]
    objects = re.findall(r"\w+\.bpf\.o", text)
    built = gpubpf_examples.build(*names, *(["threads.bpf.o"] if objects else []))
    for name in (*names, *objects):
        (where / name).symlink_to(built / name)
    if "bad.bpf.o" in objects:  # as tools/gpurun_example.txt says
        source = (built / "threads.bpf.c").read_text()
        bad = source.replace("zero = 0", "zero = loud").replace("if (mine) ", "")
        (where / "bad.bpf.c").write_text(bad)
        (where / "bad.bpf.o").unlink()
        subprocess.run(["make", "-s", "-f", built / "Makefile", "bad.bpf.o"], cwd=where, check=True)
    if command.folder == "cccl":
        (where / "primitives").symlink_to(gpubpf_examples.build("primitives", folder="cccl") / "primitives")
    if command.words[0] == "hipsnoop":
        put_hip(text, where)


def put_hip(command: str, where: Path) -> None:
    """Build the HIP program that a command names, as examples/hip/Makefile does, or skip the test."""
    if "hip/saxpy" in command:
        (where / "hip").mkdir()
        hipsim_device.libraries()
        saxpy = hipsim_device.program("saxpy", "-O2", folder=ROOT / "examples" / "hip")
        (where / "hip" / "saxpy").symlink_to(saxpy)
    elif "./app" in command:
        made = gpubpf_hip.program(where, gpubpf_hip.standin(where), name="app")
        assert made == where / "app"
    else:
        gpubpf_hip.program(where, gpubpf_hip.real(), name="nogpu")


def printed(step: Written, where: Path, commands: Path) -> str:
    """Run a command; return all that it prints. A program that hangs after the end of a report (-d) is ended."""
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    environment.pop("CUDASIM_HOSTILE", None)
    if step.page == "tools/hipsnoop_example.txt":
        environment |= {"HIPSIM_DEVICES": "0", "STANDIN": FAILING if "--errors" in step.command else STANDIN}
    with open(where / "printed", "w+") as output:
        words = ["bash", "-c", step.command]
        process = subprocess.Popen(
            words, cwd=where, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        deadline = time.monotonic() + 300
        try:
            while process.poll() is None:
                text = (where / "printed").read_text()
                assert time.monotonic() < deadline, text
                if "-d" in step.words and "\noverhead: " in text:
                    break
                time.sleep(0.05)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return (where / "printed").read_text()


@pytest.mark.every(8)
@pytest.mark.parametrize("command", RUN, ids=str)
def test_a_command_prints_what_is_written(command: Written, commands: Path, tmp_path: Path) -> None:
    tool = command.words[0]
    if tool in COMPILES | {"gpurun"} and clang.find() is None and not compile.usable():
        pytest.skip("compiling needs clang, or root and bcc")
    put(command, tmp_path)
    for step in command.steps:
        assert not (wrong := gpubpf_written.difference(step, printed(step, tmp_path, commands))), wrong


@pytest.mark.every(6)
@pytest.mark.whole_machine
@pytest.mark.parametrize("command", OF_THE_HOST_RUN, ids=str)
def test_a_command_prints_the_columns_that_are_written(
    command: Written, commands: Path, tmp_path: Path
) -> None:
    if command.words[0] != "gpuhang" and "--list" not in command.words and not privileges.capable():
        pytest.skip("needs CAP_BPF")
    put(command, tmp_path)
    text = printed(command, tmp_path, commands)
    assert not (wrong := gpubpf_written.absent(command, text)), f"{wrong} is not in\n{text}"
    assert "Traceback" not in text and f"{command.words[0]}: error" not in text


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

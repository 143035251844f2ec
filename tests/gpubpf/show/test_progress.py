"""What takes long is shown on a terminal, in one line that is cleared at the end, and nowhere else."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_examples

REPOSITORY = Path(__file__).resolve().parents[3]
BEGIN = f"import sys, time; sys.path.insert(0, {str(REPOSITORY / 'lib')!r})\n"
BEGIN += "from gpubpf.show import notices, output, progress\nprogress.DELAY, progress.PERIOD = 0.2, 0.02\n"
WORK = """
progress.enable("threadhist")
with progress.work("assembling kernels", 500) as task:
    time.sleep(0.5)
    for _ in range(120): task.step()
    time.sleep(0.5)
    notices.note("threadhist", "seen")
    output.Output().write("result\\n")
    time.sleep(0.5)
"""


def run(code: list[str], terminal: bool, stdout_too: bool = False) -> tuple[str, str]:
    """Return what the program wrote to the terminal (or a pipe) that is its standard error, and to its standard output."""
    master, slave = pty.openpty() if terminal else os.pipe()
    process = subprocess.Popen(code, stdout=slave if stdout_too else subprocess.PIPE, stderr=slave)
    os.close(slave)
    seen = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # EIO: nobody has the terminal open any more
            break
        if not part:
            break
        seen += part
    os.close(master)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0, seen.decode()
    return seen.decode(), (out or b"").decode()


def screen(text: str) -> list[str]:
    """Return the lines that a terminal shows in the end."""
    lines = [""]
    column = 0
    for char in text.replace("\r\n", "\n"):
        if char == "\n":
            lines.append("")
            column = 0
        elif char == "\r":
            column = 0
        else:
            lines[-1] = lines[-1][:column].ljust(column) + char + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def test_the_line_counts_and_is_gone_at_the_end() -> None:
    seen, out = run([sys.executable, "-c", BEGIN + WORK], terminal=True)
    assert "threadhist: assembling kernels 0 of 500, 0 s" in seen
    assert "threadhist: assembling kernels 120 of 500, 1 s" in seen
    assert screen(seen) == ["threadhist: note: seen", ""] and out == "result\n"
    assert not re.search(r"[^\r\n -~]", seen)


def test_results_on_the_same_terminal_have_lines_of_their_own() -> None:
    seen, _ = run([sys.executable, "-c", BEGIN + WORK], terminal=True, stdout_too=True)
    assert screen(seen) == ["threadhist: note: seen", "result", ""]


def test_without_a_terminal_nothing_is_shown() -> None:
    assert run([sys.executable, "-c", BEGIN + WORK], terminal=False) == (
        "threadhist: note: seen\n",
        "result\n",
    )


@pytest.mark.parametrize(
    "code",
    [
        "with progress.work('assembling kernels', 5): time.sleep(0.5)",  # no tool said its name
        "progress.enable('threadhist')\nwith progress.work('assembling kernels', 5): time.sleep(0.05)",  # too short
        "progress.enable('threadhist')\ntime.sleep(0.5)",
    ],
)
def test_short_work_and_other_programs_show_nothing(code: str) -> None:
    assert run([sys.executable, "-c", BEGIN + code], terminal=True) == ("", "")


def test_short_pieces_of_work_add_up() -> None:
    code = """
progress.enable("threadhist")
for n in range(12):
    with progress.work("assembling kernels", 10): time.sleep(0.05)
"""
    seen, _ = run([sys.executable, "-c", BEGIN + code], terminal=True)
    assert re.search(
        r"threadhist: assembling kernels [5-9]0 of [6-9]0|threadhist: assembling kernels 1[01]0 of 1[12]0",
        seen,
    )
    assert screen(seen) == [""]


def test_the_oldest_work_of_several_threads_is_shown_and_an_error_ends_it() -> None:
    code = """
import threading
progress.enable("threadhist")
def other():
    with progress.work("reading PTX"): time.sleep(0.8)
threading.Thread(target=other).start()
time.sleep(0.1)
try:
    with progress.work("assembling kernels", 10): time.sleep(0.3); raise KeyError
except KeyError: pass
"""
    seen, _ = run([sys.executable, "-c", BEGIN + code], terminal=True)
    assert "threadhist: reading PTX, 0 s" in seen and "assembling" not in seen
    assert screen(seen) == [""]


@pytest.mark.every(2)
@pytest.mark.parametrize("terminal", [True, False])
def test_a_tool_that_instruments_many_kernels(terminal: bool, tmp_path: Path) -> None:
    kernel = """
.visible .entry k{0}(.param .u64 p) {{
  .reg .b64 %rd<3>; .reg .b32 %r<{1}>;
  ld.param.u64 %rd1, [p];
{2}
  ret;
}}
"""
    body = "\n".join(
        f"  ld.global.u32 %r{n}, [%rd1+{4 * n}]; st.global.u32 [%rd1+{4 * n}], %r{n};" for n in range(40)
    )
    text = ".version 7.5\n.target sm_75\n.address_size 64\n" + "".join(
        kernel.format(n, 60, body) for n in range(250)
    )
    (tmp_path / "many.ptx").write_text(text)
    tool = [
        sys.executable,
        str(REPOSITORY / "tools/memtrace.py"),
        "--device",
        "sim",
        "-o",
        str(tmp_path / "out"),
    ]
    seen, _ = run([*tool, "--ptx", str(tmp_path / "many.ptx")], terminal)
    assert bool(re.search(r"memtrace: instrumenting kernels [1-9][0-9]* of 250, \d+ s", seen)) == terminal
    assert screen(seen) == [""] and (tmp_path / "out").stat().st_size > len(text)


def test_kernels_that_the_embedded_device_translates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text('#!/bin/sh\nsleep 4\nexec gcc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDASIM_CC_COMPILER", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tool = [
        sys.executable,
        str(REPOSITORY / "tools/threadhist.py"),
        "--device",
        "sim",
        "-o",
        str(tmp_path / "out"),
    ]
    seen, _ = run([*tool, "--", str(gpubpf_examples.build("vectoradd") / "vectoradd")], terminal=True)
    assert re.search("threadhist: translating kernels for the embedded device, [1-9] s", seen)
    assert re.fullmatch(r"threadhist: note: attached to \d+ \(vectoradd\)\n", "\n".join(screen(seen)))


@pytest.mark.parametrize("terminal", [True, False])
def test_a_report_that_takes_long(terminal: bool) -> None:
    """A tool that reads and prints results for longer than the delay; here, the delay is nothing."""
    program = gpubpf_examples.build("exits") / "exits"
    code = f"""
progress.DELAY, progress.PERIOD = 0.0, 0.001
sys.path.insert(0, {str(REPOSITORY / "tools")!r})
import kernelretsnoop
from gpubpf.exits import exits_text
from gpubpf.session import translating
translating.PERIOD = 0.01  # how long a translation before it may still be shown
shown = exits_text.lines
def slow(*arguments, **options):
    time.sleep(1)
    return shown(*arguments, **options)
exits_text.lines = slow
sys.exit(kernelretsnoop.main(["--device", "sim", "--", {str(program)!r}]))
"""
    seen, out = run([sys.executable, "-c", BEGIN + code], terminal)
    assert ("kernelretsnoop: preparing the report, " in seen) == terminal, seen
    assert "when its threads exit" in out

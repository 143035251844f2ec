"""gputop on a terminal: what a user sees, what keys do, and that the terminal is as before, however the tool ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpubpf_cuda
from gpubpf_terminal import Terminal

TOOL = Path(__file__).resolve().parents[2] / "tools" / "gputop.py"
# Launches until it is killed: ROUNDS kernels in a row, each for NS, and holds BYTES.
SOURCE = r"""
#include <cstdlib>
#include <cuda_runtime.h>
#include <unistd.h>
__global__ void step(long long ns) {
    long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - begin < ns);
}
int main(int, char **words) {
    void *kept;
    cudaMalloc(&kept, atoi(words[3]));
    for (;;) {
        for (int i = 0; i < atoi(words[1]); i++) step<<<1, 1>>>(atoll(words[2]));
        cudaDeviceSynchronize();
        usleep(20000);
    }
}
"""
pytestmark = gpubpf_cuda.needs_cuda


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_cuda.build(SOURCE, tmp_path_factory.mktemp("stepping") / "stepping")


@pytest.fixture
def busy(program: Path) -> Iterator[list[int]]:
    """Two programs: the first launches more often, the second has more GPU time."""
    words = (("64", "0", "1000"), ("1", "300000000", "1000"))
    running = [subprocess.Popen(["cudasim", "--", program, *some]) for some in words]
    try:
        for one in running:
            while "libcuda.so" not in Path(f"/proc/{one.pid}/maps").read_text():
                assert one.poll() is None
        yield [one.pid for one in running]
    finally:
        for one in running:
            one.kill()
            one.wait()


def gputop(*words: object, **more: object) -> Terminal:
    return Terminal([sys.executable, TOOL, *map(str, words)], **more)  # type: ignore[arg-type]


def pids(shown: Terminal) -> list[int]:
    """The processes in the order of their rows."""
    first = [row for row, line in enumerate(shown.lines) if re.match(r" *PID  COMM", line)]
    rows = shown.lines[first[0] + 1 :] if first else []
    return [int(row.split()[0]) for row in rows[: rows.index("")]] if "" in rows else []


def test_keys_sort_help_and_quit(busy: list[int]) -> None:
    often, long = busy
    with gputop("0.5", "-p", f"{often},{long}") as shown:
        shown.until(lambda me: pids(me) == [long, often])
        assert "sorted by time" in shown.lines[0] and "q quit" in shown.lines[-1]
        assert shown.attributes(0).bold
        shown.press("l")
        shown.until(lambda me: "sorted by launches" in me.text and pids(me) == [often, long])
        shown.press("p")
        shown.until(lambda me: pids(me) == sorted(busy))
        shown.press("h")
        shown.until("Keys:")
        shown.press("h")
        shown.until(lambda me: "Keys:" not in me.text and len(pids(me)) == 2)
        shown.press("xyz\x1b[A")  # keys without a meaning
        shown.press("q")
        assert shown.ended() == 0
        assert shown.modes == shown.before
        assert "LAUNCH/s" in shown.text and "matching launches" in shown.text  # the last report stays


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_restores_the_terminal(busy: list[int], number: signal.Signals) -> None:
    with gputop("0.5", "-p", busy[0]) as shown:
        shown.until("LAUNCH/s")
        assert shown.modes != shown.before
        shown.signal(number)
        assert shown.ended() == 0
        assert shown.modes == shown.before
        assert "matching launches" in shown.text


def test_the_terminal_is_the_shells_while_the_tool_is_stopped(busy: list[int]) -> None:
    environment = {**os.environ, "PS1": "shell> "}
    with Terminal(["bash", "--norc", "-i"], env=environment) as shown:
        shown.until("shell>")
        shown.press(f"{sys.executable} {TOOL} 0.5 -p {busy[0]}\n")
        shown.until("LAUNCH/s")
        shown.press("\x1a")
        shown.until("Stopped")
        shown.press("stty -a\n")
        shown.until(lambda me: re.search(r" icanon .* echo ", me.text) is not None)
        shown.press("clear\n")
        shown.until(lambda me: "icanon" not in me.text)
        shown.press("fg\n")
        shown.until("q quit")
        shown.press("q")
        shown.until("matching launches")
        shown.until("shell>")


def test_an_error_restores_the_terminal(tmp_path: Path) -> None:
    """Whatever is raised while the screen is shown, notices are printed after it."""
    text = """
import argparse, sys
from gpubpf.show.notices import note
from gpubpf.show.output import Output
from gpubpf.show.result_writer import ResultWriter
from gpubpf.top.report import Report
from gpubpf.top.screen import Screen, view
results = ResultWriter(argparse.Namespace(json=False, csv=False, tool="gputop", timestamps=False), Output())
with view(Report("time", None, False), results, lambda: None, True) as shown:
    assert isinstance(shown, Screen)
    note("gputop", "said meanwhile")
    shown.tick()
    raise RuntimeError("on purpose")
"""
    with Terminal([sys.executable, "-c", text]) as shown:
        assert shown.ended() == 1
        assert shown.modes == shown.before
        assert "said meanwhile" in shown.text and "RuntimeError: on purpose" in shown.text


def test_another_size(busy: list[int]) -> None:
    with gputop("0.5", "-p", ",".join(map(str, busy))) as shown:
        shown.until("LAUNCH/s")
        for columns, lines in ((40, 8), (200, 50), (10, 3), (1, 1), (80, 24)):
            shown.resize(columns, lines)
            if columns > 30:
                shown.until(lambda me, last=lines - 1: me.lines[last].startswith("q quit"))
        shown.until(lambda me: len(pids(me)) == 2)
        shown.press("q")
        assert shown.ended() == 0 and shown.modes == shown.before


@pytest.mark.parametrize("term", ["vt100", "xterm-mono"])
def test_a_terminal_without_colours(busy: list[int], term: str) -> None:
    with gputop("0.5", "-p", busy[0], term=term) as shown:
        shown.until("LAUNCH/s")
        shown.press("q")
        assert shown.ended() == 0
        assert not re.search(rb"\x1b\[[0-9;]*[34][0-7]m", shown.written), "no colour"
        assert b"q quit" in shown.written and "q quit" not in shown.text


@pytest.mark.parametrize("term", ["dumb", "no-such-terminal"])
def test_a_terminal_whose_cursor_does_not_move_gets_text(busy: list[int], term: str) -> None:
    with gputop("0.5", "2", "-p", busy[0], term=term) as shown:
        assert shown.ended() == 0
        assert b"q quit" not in shown.written and b"\x1b" not in shown.written
        assert shown.written.count(b"LAUNCH/s") == 2


def test_count_ends_the_screen(busy: list[int]) -> None:
    with gputop("0.5", "2", "-p", busy[0]) as shown:
        assert shown.ended() == 0
        assert b"q quit" in shown.written and shown.modes == shown.before
        assert shown.text.count("LAUNCH/s") == 1


def test_a_command_keeps_its_terminal(program: Path) -> None:
    """COMMAND may read the keys and write to the terminal, so there is no screen."""
    command = ["sh", "-c", "read word; echo got $word"]
    with gputop("--device", "sim", "--", *command) as shown:
        shown.press("quit\n")
        assert shown.ended() == 0
        assert "got quit" in shown.text and b"q quit" not in shown.written


def test_once_is_text_on_a_terminal(busy: list[int]) -> None:
    with gputop("--once", "-p", busy[0]) as shown:
        assert shown.ended() == 0
        assert b"q quit" not in shown.written and "matching launches" in shown.text

"""CUDA programs that launch late or end early, on the embedded device: threadhist counts what they launched."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
from gpubpf.traced.device import LIBRARIES
from gpubpf_host import needs_bpf

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = [sys.executable, str(REPOSITORY / "tools" / "threadhist.py"), "--device", "sim", "--json", "-o"]
CUDASNOOP = [sys.executable, str(REPOSITORY / "tools" / "cudasnoop.py"), "--json", "-o"]
pytestmark = gpubpf_cuda.needs_cuda

# Ten launches, and three more in a destructor that is older than the first call of CUDA.
PROGRAM = r"""
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>
__global__ void tick(int *x) { atomicAdd(x, 1); }
static int *counter;
static const char *way;
static void crashed(int) { if (write(1, "crashed\n", 8)) {} }
static void once(void (*handler)(int), int flags) {  // shows the handler that is replaced
    struct sigaction action {}, before;
    action.sa_handler = handler;
    action.sa_flags = SA_RESETHAND | flags;
    sigaction(SIGSEGV, &action, &before);
    printf("%d %d\n", before.sa_handler == crashed, (before.sa_flags & (SA_RESETHAND | SA_SIGINFO)) == int(SA_RESETHAND));
    fflush(stdout);
}
struct Last {
    ~Last() {
        int found = 0;
        for (int i = 0; i < 3 && !strcmp(way, "late"); i++) tick<<<1, 64>>>(counter);
        cudaMemcpy(&found, counter, sizeof found, cudaMemcpyDeviceToHost);
        printf("found %d\n", found);
    }
} last;
int main(int argc, char **argv) {
    way = argv[1];
    if (!strcmp(way, "once")) once(crashed, 0);
    cudaMalloc(&counter, 4096);
    cudaMemset(counter, 0, 4096);
    if (argc > 2) {
        puts("ready");
        fflush(stdout);
        getchar();
    }
    for (int i = 0; i < 10; i++) tick<<<2, 64>>>(counter);
    cudaDeviceSynchronize();
    if (!strcmp(way, "once")) once(crashed, SA_NODEFER);
    if (!strcmp(way, "fault") || !strcmp(way, "once")) *(volatile int *)8 = 1;
    if (!strcmp(way, "kill")) raise(SIGKILL);
    if (!strcmp(way, "exec")) execl("/bin/echo", "echo", "found 1280", nullptr);
}
"""
WAYS = [
    ("late", 0, 13, "found 1472\n"),
    ("fault", -signal.SIGSEGV, 10, ""),
    ("once", -signal.SIGSEGV, 10, "0 0\n1 1\ncrashed\n"),
    ("exec", 0, 10, "found 1280\n"),
]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("ends") / "app")


def check(out: Path, launches: int) -> None:
    records: list[dict[str, Any]] = [json.loads(line) for line in out.read_text().splitlines()]
    runs = {record["launches"]: record["runs"] for record in records if record["type"] == "kernel"}
    assert runs == {10: 1280} if launches == 10 else {10: 1280, 3: 192}
    summary = records[-1]
    assert summary["launches_seen"] == summary["launches_instrumented"] == launches
    assert (summary["not_instrumented"], summary["lost"]) == ({}, 0)


@pytest.mark.parametrize(("way", "status", "launches", "output"), WAYS)
def test_a_command(tmp_path: Path, app: Path, way: str, status: int, launches: int, output: str) -> None:
    done = subprocess.run(
        [*TOOL, tmp_path / "out", "--", app, way], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (status if status >= 0 else 128 - status, output), done.stderr
    check(tmp_path / "out", launches)


def test_counts_that_nobody_read_are_not_said_to_be_counted(app: Path) -> None:
    """After SIGKILL, some of the ten launches were read, or none."""
    command = [sys.executable, REPOSITORY / "tools" / "threadhist.py", "--device", "sim"]
    text = subprocess.run([*command, "--", app, "kill"], capture_output=True, text=True, timeout=120)
    assert text.returncode == 128 + signal.SIGKILL
    done = subprocess.run(
        [*command, "--json", "--", app, "kill"], capture_output=True, text=True, timeout=120
    )
    records = [json.loads(line) for line in done.stdout.splitlines()]
    read = sum(record["launches"] for record in records if record["type"] == "kernel")
    assert records[-1]["launches_instrumented"] == 10
    assert records[-1].get("launches_unread", 0) == 10 - read
    if found := re.search(
        r"counted at least (\d+) of 10 .*\n  not counted: up to (\d+) \(the program", text.stdout
    ):
        assert int(found[1]) + int(found[2]) == 10
    else:
        assert "counted 10 of 10 " in text.stdout and "lost:" not in text.stdout


@needs_bpf
def test_late_calls(tmp_path: Path, app: Path) -> None:
    command = [*CUDASNOOP, tmp_path / "out", "--", sys.executable, "-m", "cudasim", "--", app, "late"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "found 1472\n"), done.stderr
    records = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert sum(r["count"] for r in records if "LaunchKernel" in r.get("api", "")) == 13


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(("way", "status", "launches", "output"), WAYS)
def test_a_running_process(
    tmp_path: Path, app: Path, way: str, status: int, launches: int, output: str
) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(LIBRARIES)}
    program = subprocess.Popen(
        [app, way, "wait"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with program:
        assert program.stdout is not None and program.stdout.readline() == "ready\n"
        tool = subprocess.Popen(
            [*TOOL, tmp_path / "out", "-p", str(program.pid)], stderr=subprocess.PIPE, text=True
        )
        with tool:
            assert tool.stderr is not None
            said = ""
            while f"attached to {program.pid}" not in said or "not instrumented yet" in said:
                said = tool.stderr.readline()
                assert said
            assert program.communicate("\n", timeout=60)[0] == output
            assert program.returncode == status
            assert tool.wait(60) == 0
    check(tmp_path / "out", launches)

"""gpumem from its command line to its exit status, on a program that leaks what is known beforehand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda

pytestmark = gpubpf_cuda.needs_cuda
TOOL = Path(__file__).resolve().parents[2] / "tools" / "gpumem.py"
SOURCE = r"""
#include <cuda_runtime.h>
#include <thread>
#define KEEP __attribute__((noinline, noclone))
#define NO_TAIL_CALL asm volatile("")
KEEP void *take(size_t bytes) { void *p = nullptr; cudaMalloc(&p, bytes); NO_TAIL_CALL; return p; }
KEEP void leak() { take(1024); NO_TAIL_CALL; }
KEEP void spend() { cudaFree(take(4096)); NO_TAIL_CALL; }
KEEP void others() {
    void *p;
    cudaMallocManaged(&p, 300);
    cudaMallocHost(&p, 200);
    cudaMallocAsync(&p, 100, 0);
    cudaStreamSynchronize(0);
    NO_TAIL_CALL;
}
int main(int count, char **) {
    auto work = [] { for (int i = 0; i < 1000; i++) i % 100 == 7 ? leak() : spend(); };
    std::thread one(work), two(work);
    one.join();
    two.join();
    void *p = take(64);
    cudaFree(p);
    cudaFree(p);                     // refused: it was freed before
    take(size_t(1) << 50);           // refused
    others();
    if (count > 1) cudaDeviceReset();
    return 0;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_cuda.build(SOURCE, tmp_path_factory.mktemp("leaking") / "leaking", "-O2")


def run(*arguments: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, TOOL, "--device", "sim", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    return done


def records(*arguments: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run("--json", *arguments).stdout.splitlines()]


def test_leaks_of_two_threads_are_exact(program: Path) -> None:
    found = records("--", program)
    held = [one for one in found if one["type"] == "held"]
    leaks = [one for one in held if any(frame["name"] == "leak" for frame in one["frames"])]
    assert [(one["kind"], one["bytes"], one["count"]) for one in leaks] == [("device", 20 * 1024, 20)]
    rest = {one["kind"]: (one["bytes"], one["count"]) for one in held if one not in leaks}
    assert rest == {"managed": (300, 1), "pinned": (200, 1), "pool": (100, 1)}
    summary = found[-1]
    counts = ("allocated", "freed", "failed", "frees_failed", "frees_unknown", "lost", "live_bytes")
    assert [summary[name] for name in counts] == [2004, 1981, 1, 1, 0, 0, 20 * 1024 + 600]
    peak = next(one for one in found if one["type"] == "peak")
    assert peak["bytes"] == sum(one["bytes"] for one in peak["held"]) >= 20 * 1024 + 400


def test_a_reset_device_holds_nothing(program: Path) -> None:
    found = records("--", program, "reset")
    assert [one for one in found if one["type"] == "held" and one["kind"] != "pool"] == []


def test_text_and_csv(program: Path) -> None:
    text = run("--top", "1", "--", program)
    assert "> leak > take" in text.stdout and "and 3 rows with 600 B" in text.stdout
    assert "1 allocation failed\n1 free failed" in text.stdout
    assert "no kernel" not in text.stderr
    assert max(map(len, text.stdout.splitlines())) <= 80
    head, *rows = run("--csv", "--", program).stdout.splitlines()
    assert head.split(",")[3:6] == ["kind", "bytes", "count"] and len(rows) == 4


def test_a_running_program_grows(tmp_path: Path) -> None:
    text = """
    #include <cuda_runtime.h>
    #include <unistd.h>
    int main() {
        void *p;
        for (int i = 0; i < 1200; i++) { cudaMalloc(&p, 256); usleep(50000); }
    }
    """
    growing = gpubpf_cuda.build(text, tmp_path / "growing")
    with subprocess.Popen(["cudasim", "--", growing]) as running:
        try:
            found = records("1", "3", "-p", str(running.pid))
            done = run("-d", "0.1", "-p", str(running.pid))
        finally:
            running.kill()
    held = [one["bytes"] for one in found if one["type"] == "held"]
    assert len(held) == 3 and held == sorted(held) and held[0] < held[-1]
    assert "before the attach is unknown" in done.stderr


def test_bad_input_is_one_line_and_status_2() -> None:
    done = run("--top", "0", "--", "/bin/true", status=2)
    assert done.stderr.splitlines()[-1].startswith("gpumem: ")


def test_a_snapshot_has_each_allocation(program: Path) -> None:
    found = records("--snapshot", "--", program)
    each = [one for one in found if one["type"] == "allocation"]
    sums: dict[str, list[int]] = {}
    for one in each:
        sums.setdefault(one["kind"], []).append(one["bytes"])
    assert sums == {"device": [1024] * 20, "managed": [300], "pinned": [200], "pool": [100]}
    assert len({one["base"] for one in each}) == len(each)
    assert [one["held_ns"] for one in each] == sorted((one["held_ns"] for one in each), reverse=True)
    held = {json.dumps(one["frames"]): one["bytes"] for one in found if one["type"] == "held"}
    for one in each:
        held[json.dumps(one["frames"])] -= one["bytes"]
    assert not any(held.values())
    text = run("--snapshot", "--top", "3", "-v", "--", program).stdout
    assert "ADDRESS" in text and "and 20 allocations with 17.6 KB" in text
    peak = text[text.index("peak: ") :]
    assert "> spend > take" in peak and peak.count("> leak") == 2  # the last frees come after the last leak
    done = run("--snapshot", "--csv", "--", program, status=2)
    assert "--csv has no allocations" in done.stderr

"""Processes of a command that cannot get the agent from their environment: the tool attaches while they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
import hipsim_device
from gpubpf.traced.device import LIBRARIES

THREADHIST = [sys.executable, str(Path(__file__).resolve().parents[2] / "tools" / "threadhist.py")]

# Five launches, and ten more once a file exists.
PROGRAM = r"""
#include <cstdio>
#include <unistd.h>
#ifdef __HIP__
#include <hip/hip_runtime.h>
#define cudaDeviceSynchronize() (void)hipDeviceSynchronize()
#define cudaMalloc(p, size) (void)hipMalloc(p, size)
#define cudaMemset(p, value, size) (void)hipMemset(p, value, size)
#define cudaMemcpy(to, from, size, kind) (void)hipMemcpy(to, from, size, hipMemcpyDeviceToHost)
#endif
__global__ void tick(int *x) { atomicAdd(x, 1); }
int main(int argc, char **argv) {
    int *x, found = 0;
    cudaMalloc(&x, 4);
    cudaMemset(x, 0, 4);
    for (int i = 0; i < 5; i++) tick<<<1, 64>>>(x);
    cudaDeviceSynchronize();
    while (access(argv[1], F_OK)) usleep(1000);
    for (int i = 0; i < 10; i++) tick<<<1, 64>>>(x);
    cudaMemcpy(&found, x, 4, cudaMemcpyDefault);
    printf("found %d\n", found);
}
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def records(tmp_path: Path, notice: str, *command: str | Path) -> list[dict[str, Any]]:
    """Run the program under the tool, let it continue after a notice, and return the tool's records."""
    gate, out = tmp_path / "gate", tmp_path / "out"
    words = [*THREADHIST, "--device", "sim", "--json", "-o", out, "--", *command, gate]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tool:
        assert tool.stderr is not None
        said = ""
        try:
            while notice not in said or "not instrumented yet" in said:
                said = tool.stderr.readline()
                assert said
        finally:
            gate.touch()
        assert tool.communicate(timeout=120)[0] == "found 960\n"
        assert tool.returncode == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def check(tmp_path: Path, *command: str | Path) -> None:
    found = records(tmp_path, "attached to", *command)
    (launches,) = (record["launches"] for record in found if record["type"] == "kernel")
    assert found[-1]["launches_instrumented"] == launches
    assert 10 <= launches <= 15  # the tool may attach before the first five
    processes = found[-1]["processes"]
    assert (processes["measured"], processes["missed"]) == (1, {"reached late": 1})


def cleared(libraries: Path) -> list[str]:
    kept = [f"{name}={os.environ[name]}" for name in ("PATH", "HOME") if name in os.environ]
    return ["env", "-i", *kept, f"LD_LIBRARY_PATH={libraries}"]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("strays") / "app")


class TestCuda:
    pytestmark = gpubpf_cuda.needs_cuda

    def test_a_cleared_environment(self, tmp_path: Path, app: Path) -> None:
        check(tmp_path, *cleared(LIBRARIES), app)

    def test_a_child_of_the_command(self, tmp_path: Path, app: Path) -> None:
        check(tmp_path, "sh", "-c", '"$@"; exit $?', "sh", *cleared(LIBRARIES), app)

    @needs_root
    def test_another_network_namespace(self, tmp_path: Path, app: Path) -> None:
        check(tmp_path, "unshare", "--net", app)

    @needs_root
    def test_the_agent_is_not_in_its_files(self, tmp_path: Path, app: Path) -> None:
        from gpubpf import agent

        hidden = f'mount -t tmpfs none "{agent.LIBRARY.parent}" && exec "$@"'
        check(tmp_path, "unshare", "--mount", "sh", "-c", hidden, "sh", app)


def test_a_cleared_environment_with_hip(tmp_path: Path) -> None:
    source = tmp_path / "app.hip"
    source.write_text(PROGRAM)
    hipcc = [hipsim_device.hipcc(), "--offload-arch=gfx906", "-w"]
    hipsim_device.run_hipcc([*hipcc, str(source), "-o", str(tmp_path / "app")])
    check(tmp_path, *cleared(hipsim_device.libraries()), tmp_path / "app")

"""Run a command under one of the tools, and read how many launches the tool saw; what CUDA and HIP need for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Record = Mapping[str, Any]
_KEPT = tuple(f'{{"type":"{kind}"' for kind in ("api", "kernel", "count", "dist", "event", "summary"))


@dataclass(frozen=True)
class Api:
    """The API of a suite's programs: its compiler and the compiler's options, its embedded device, and its tools.

    device: the embedded device's package; "" for a real GPU.
    flags: what takes the place of nvcc's options in a list that both APIs share.
    gpu: the GPU whose builds have a place of their own; "" if there is only one.
    """

    compiler: str
    options: Sequence[str]
    device: str
    tools: Sequence[str]
    flags: Mapping[str, str]
    environment: Mapping[str, str]
    gpu: str = ""

    def alone(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs another one on the device."""
        return (
            [sys.executable, "-m", f"{self.device}.launcher", "--", *command] if self.device else [*command]
        )

    def choice(self, tool: str) -> Sequence[str]:
        """Return the options with which a tool chooses the device."""
        return () if tool == "cudasnoop" or not self.device else ("--device", "sim")


_GPU = os.environ.get("HIPSIM_GPU") or "gfx906"
APIS = {
    "cuda": Api(
        compiler="nvcc",
        # The embedded device is NVIDIA's driver and runtime as shared libraries.
        options=("-cudart", "shared", "-arch=sm_80"),
        device="cudasim",
        tools=("threadhist", "kernelretsnoop", "memtrace", "launchlate"),
        flags={},
        environment={},
    ),
    "hip": Api(
        compiler="hipcc",
        options=(f"--offload-arch={_GPU}", "-w"),
        device="hipsim",
        tools=("hipsnoop", "threadhist", "kernelretsnoop", "memtrace", "launchlate"),
        flags={
            "-Xcompiler": "",
            "--expt-relaxed-constexpr": "",
            "--extended-lambda": "",
            "-use_fast_math": "-ffast-math",
            "--use_fast_math": "-ffast-math",
            "-fmad=false": "-ffp-contract=off",
            "-rdc=true": "-fgpu-rdc",
            "--default-stream": "-fgpu-default-stream=per-thread",
            "per-thread": "",
            "-maxrregcount=32": "",
        },
        environment={"HIP_PLATFORM": "amd"},  # hipcc would take an installed nvcc
        gpu=_GPU,
    ),
}
TOOLS = APIS["cuda"].tools


@dataclass(frozen=True)
class Watched:
    """What a command printed under a tool, how it ended, and the tool's records of calls and kernels and its summary.

    said: the standard error of both. status: None after a timeout. seconds: how long it took.
    """

    printed: str
    said: str
    status: int | None
    records: Sequence[Record]
    seconds: float

    @property
    def summary(self) -> Record:
        return next((r for r in self.records if r["type"] == "summary"), {})

    @property
    def launches(self) -> Counter[str]:
        """Return how many launches the tool measured, by the kernels' mangled names."""
        count: Counter[str] = Counter()
        for record in self.records:
            if record["type"] == "kernel":
                count[record["mangled"]] += record.get("launches", record.get("count", 0))
        return count


def under(
    tool: str,
    command: Sequence[str],
    limit: float,
    place: Path | None = None,
    api: Api = APIS["cuda"],
    more: Sequence[str] = (),
) -> Watched:
    """Run a command under a tool on the device of an API, for `limit` seconds at most, in the directory `place`.

    more: further arguments of the tool."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "records.json"
        options = [*api.choice(tool), "--json", "-o", str(output), *more]
        whole = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *options, "--", *command]
        began = time.monotonic()
        printed, said, status = finished(whole, limit, place)
        seconds = time.monotonic() - began
        records = list(_kept(output)) if output.exists() else []
    return Watched(printed, said, status, records, seconds)


def _kept(output: Path) -> Iterator[Record]:
    """Yield the records of the types that the runners look at. A tool may have written gigabytes of others."""
    with output.open() as lines:
        for line in lines:
            if line.startswith(_KEPT):
                yield json.loads(line)


def finished(
    command: Sequence[str],
    limit: float,
    place: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[str, str, int | None]:
    """Run a command to its end. Return both outputs and the status, which is None if it took longer than `limit` seconds."""
    started = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=place,
        env=environment,
        start_new_session=True,
    )
    try:
        printed, said = started.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _end(started)
        printed, said = started.communicate()
        return printed, said, None
    return printed, said, started.returncode


def _end(started: subprocess.Popen[str]) -> None:
    """End a command and the processes that it started: first the tool, which passes SIGTERM on, then what is left."""
    started.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        started.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)

"""The estimate of the time that the agent's part of hooked calls took."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gpubpf.agent.protocol import HookCalls
from gpubpf.images.sidecar import Sidecar
from gpubpf.session.session import Session
from gpubpf.traced import device
from gpubpf.traced.device import Device
from gpubpf.traced.measurement import Plan, Targets
from gpubpf.traced.workers import SidecarBuilder
from gpubpf_commands import words

HEADERS = [*sorted(Path("/usr/local").glob("cuda*/include"))]
LOADS, PERIOD = 24, 64

PROGRAM = r"""
#include <cuda.h>
#include <cstdio>
int main() {
  CUdevice device;
  CUcontext context;
  if (cuInit(0) || cuDeviceGet(&device, 0) || cuDevicePrimaryCtxRetain(&context, device) || cuCtxSetCurrent(context)) return 1;
  for (int i = 0; i < LOADS; ++i) {
    char text[256];
    snprintf(text, sizeof text, ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry k%d() { ret; }\n", i);
    CUmodule module;
    CUfunction f;
    if (cuModuleLoadData(&module, text)) return 2;
    char name[16];
    snprintf(name, sizeof name, "k%d", i);
    if (cuModuleGetFunction(&f, module, name)) return 3;
    for (int n = 0; n < PERIOD - 2; ++n)
      if (cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr)) return 4;
  }
  return cuCtxSynchronize();
}
"""


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("calls", "ns"),
    [
        (HookCalls(), 0),
        (HookCalls(calls=12), None),
        (HookCalls(calls=12, rare_ns=900), 900),
        (HookCalls(calls=6400, timed=100, short_ns=50_000), 3_200_000),
        # One that was descheduled for 5 ms is no reason to believe that 63 others were.
        (HookCalls(calls=6400, timed=101, short_ns=50_000, long=1, long_ns=5_000_000), 8_200_000),
        (HookCalls(calls=64, timed=1, long=1, long_ns=5_000_000), 5_000_000),
        # Calls that take so long as a rule are counted as all others.
        (HookCalls(calls=6400, timed=100, short_ns=45_000, long=10, long_ns=1_000_000), 66_880_000),
        (HookCalls(calls=64, timed=1, short_ns=500, rare_ns=300_000_000), 300_032_000),
    ],
)
def test_what_calls_are_said_to_have_taken(calls: HookCalls, ns: int | None) -> None:
    assert calls.ns == ns


def test_loads_that_wait_for_the_tool_count_once(tmp_path: Path) -> None:
    """A load in each 64 calls: in a sample of one in 64 there are all of them, or none."""
    headers = next((d for d in HEADERS if (d / "cuda.h").exists()), None)
    if headers is None:
        pytest.skip("needs cuda.h")
    source, app = tmp_path / "app.cpp", tmp_path / "app"
    source.write_text(PROGRAM)
    command = f"g++ -DLOADS={LOADS} -DPERIOD={PERIOD} -I{{headers}} {{source}} -o {{app}} -L{{place}} -lcuda -Wl,-rpath,{{place}}"
    names = {"headers": headers, "source": source, "app": app, "place": device.LIBRARIES}
    subprocess.run(words(command, **names), check=True)
    waited, lock = [0.0], threading.Lock()

    def instrument(data: bytes, target: Any) -> Sidecar:
        began = time.monotonic()
        time.sleep(0.02)
        with lock:
            waited[0] += time.monotonic() - began
        return Sidecar()

    with Session(Targets([str(app)]), Plan(Device("sim")), SidecarBuilder(instrument)) as session:
        for _ in session.intervals():
            pass
    assert session.status == 0
    summary = session.summary()
    took = summary["overhead"]["hooks_ns"] / 1e9
    assert waited[0] >= 0.02 * LOADS
    assert waited[0] <= took <= summary["duration_ns"] / 1e9

"""The functions of hsakmt.h, called by a C++ program without AMD's runtime."""

from __future__ import annotations

import re
import subprocess

import pytest

from hipsim_device import HIPSIM, libraries, run, thunk_program

CHECKS = ("events", "memory", "copies", "barriers", "bad_packets", "faults", "shared", "freed", "newer")
# What ROCr 5.2 (Debian 12) to 6.2 take from the library: nm -D of Debian's, the calls in the sources of the others.
NEWER = """hsaKmtAllocMemoryAlign hsaKmtAvailableMemory hsaKmtDbgDisable hsaKmtDbgEnable hsaKmtDbgGetDeviceData
    hsaKmtDbgGetQueueData hsaKmtExportDMABufHandle hsaKmtGetAMDGPUDeviceHandle hsaKmtGetRuntimeCapabilities hsaKmtOpenSMI
    hsaKmtPcSamplingCreate hsaKmtPcSamplingDestroy hsaKmtPcSamplingQueryCapabilities hsaKmtPcSamplingStart
    hsaKmtPcSamplingStop hsaKmtReplaceAsanHeaderPage hsaKmtReturnAsanHeaderPage hsaKmtSPMAcquire hsaKmtSPMRelease
    hsaKmtSPMSetDestBuffer hsaKmtWaitOnEvent_Ext hsaKmtWaitOnMultipleEvents_Ext""".split()


@pytest.mark.every(3)
@pytest.mark.parametrize("hostile", [False, True], ids=["plain", "hostile"])
@pytest.mark.parametrize("check", CHECKS)
def test_thunk(check: str, hostile: bool) -> None:
    done = run([thunk_program("thunk"), check], hostile, HIPSIM_DEVICES="2", HIPSIM_MEMORY="1G")
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr


def _functions(library: str, which: str) -> set[str]:
    listed = subprocess.run(["nm", "-D", which, library], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r" (hsaKmt\w+)@@?HSAKMT_1$", listed, re.MULTILINE))


def test_every_function_that_the_runtime_needs() -> None:
    ours = _functions(str(libraries() / "libhsakmt.so.1"), "--defined-only")
    assert set(NEWER) <= ours
    installed = "/usr/lib/x86_64-linux-gnu/libhsa-runtime64.so.1"
    try:
        needed = _functions(installed, "--undefined-only")
    except subprocess.CalledProcessError:
        pytest.skip("no libhsa-runtime64.so.1 here; script/setup installs it where the distribution has it")
    assert len(needed) > 30
    assert needed <= ours


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("HIPSIM_GPU", "gfx90c", "set it to gfx906 or gfx90a"),
        ("HIPSIM_DEVICES", "5", "set it to a number of devices from 0 to 4"),
        ("HIPSIM_MEMORY", "lots", "set it to a size from 64M to 8T, such as 16G"),
        ("HIPSIM_MEMORY", "9T", "set it to a size from 64M to 8T, such as 16G"),
        ("HIPSIM_CLOCK", "fast", "unset it, or set it to real or virtual"),
        ("HIPSIM_THREADS", "0", "set it to a number of threads from 1 to 1024"),
        ("HIPSIM_HOSTILE", "yes", "set it to 0 or 1"),
        ("HIPSIM_SEED", "x", "set it to a number of at most 9 digits"),
    ],
)
def test_wrong_settings(name: str, value: str, advice: str) -> None:
    done = run([thunk_program("thunk"), "events"], **{name: value})
    assert done.returncode == 2
    assert done.stderr.startswith(f"hipsim: {name} is '{value}'; {advice}")


def test_the_makefile_has_nothing_to_do_twice() -> None:
    libraries()
    assert subprocess.run(["make", "--question", "-C", str(HIPSIM)], capture_output=True).returncode == 0

"""hipsnoop on the embedded AMD device: calls that succeed, on AMD's own library."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpubpf_scenes as scenes
from gpubpf import agent
from gpubpf_host import needs_bpf
from hipsim_device import ROOT, environment, libraries, measured, program, serving

TOOL = [sys.executable, str(ROOT / "tools" / "hipsnoop.py")]

pytestmark = needs_bpf


def test_a_command_runs_on_the_embedded_device_with_one_notice(tmp_path: Path) -> None:
    app, out = program("vectoradd"), tmp_path / "out"
    libraries()
    done = subprocess.run(
        [*TOOL, "--json", "-e", "-o", out, "--", app], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "1000 sums are right\n"), done.stderr
    assert done.stderr.count("no AMD GPU: HIP runs on hipsim") == 1
    records = [json.loads(line) for line in out.read_text().splitlines()]
    calls = [record for record in records if record["type"] == "call"]
    made = ["hipMalloc", "hipMemcpy"] * 2 + ["hipMalloc", "hipLaunchKernel", "hipMemcpy"] + ["hipFree"] * 3
    assert [call["api"] for call in calls] == made
    assert [call["ret"] for call in calls] == [0] * len(made)
    (launch,) = (call for call in calls if call["api"] == "hipLaunchKernel")
    assert (launch["kernel"], launch["grid"], launch["block_dim"]) == ("vectorAdd", [4, 1, 1], [256, 1, 1])
    copies = [call["bytes"] for call in calls if call["api"] == "hipMemcpy"]
    assert copies == [4000] * 3


def test_launches_in_exit_handlers_and_destructors(tmp_path: Path) -> None:
    out, app = tmp_path / "out", program("ends")
    libraries()
    command = [*TOOL, "--json", "-o", out, "--", app, "older"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (4, "launched\nfound 8\n"), done.stderr
    assert {r["api"]: r["count"] for r in records(out, "api")}["hipLaunchKernel"] == 9


def test_launches_that_the_runtime_rejects(tmp_path: Path) -> None:
    """hipsnoop counts them as errors. They do not reach ROCr, so threadhist does not see them."""
    out, app = tmp_path / "out", program("rejected")
    libraries()
    command = [*TOOL, "--json", "-o", out, "--", app]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "5 failed, found 320\n"), done.stderr
    counts = {r["kernel"]: (r["count"], r["errors"]) for r in records(out, "kernel") if r["count"]}
    assert counts == {"scale": (8, 4), "never": (1, 1)}
    found, done = measured("threadhist", tmp_path / "threads", "--", app)
    assert (done.returncode, done.stdout) == (0, "5 failed, found 320\n"), done.stderr
    assert {r["kernel"]: (r["launches"], r["runs"]) for r in found if r["type"] == "kernel"} == {
        "scale": (4, 320)
    }
    assert (found[-1]["launches_instrumented"], found[-1]["not_instrumented"]) == (4, {})


def test_a_program_with_code_for_other_gpus_runs_as_without_the_tool() -> None:
    app = program("vectoradd", gpu="gfx908")
    libraries()
    alone, traced = (
        subprocess.run(command, capture_output=True, text=True, timeout=300)
        for command in ([app], [*TOOL, "--", app])
    )
    assert traced.returncode == alone.returncode != 0
    assert alone.stderr in traced.stderr and alone.stdout in traced.stdout
    said = f"{app} has code for gfx908, not for gfx906, gfx90a or gfx1030, so it runs without a device"
    assert said in " ".join(traced.stderr.split())


def test_a_wrong_name_of_a_gpu() -> None:
    libraries()
    done = subprocess.run(
        [*TOOL, "--", "true"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HIPSIM_GPU": "gfx1"},
    )
    assert done.returncode == 1
    assert done.stderr == "hipsnoop: HIPSIM_GPU is 'gfx1'; set it to gfx906 or gfx90a or gfx1030\n"


def test_the_kernels_of_a_command_are_listed() -> None:
    app = program("vectoradd")
    libraries()
    done = subprocess.run([*TOOL, "--list", "--", app], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "1000 sums are right" in done.stdout and "vectorAdd" in done.stdout
    assert done.stderr.count("no AMD GPU: HIP runs on hipsim") == 1


@pytest.mark.every(3)
@pytest.mark.parametrize("gpu", ["gfx90a", "gfx1030"])
def test_the_device_is_a_gpu_that_the_program_has_code_for(gpu: str) -> None:
    app = program("vectoradd", gpu=gpu)
    libraries()
    for command in ([*TOOL, "--", app], [sys.executable, "-m", "hipsim", "--", app]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and "1000 sums are right\n" in done.stdout, done.stderr
    other = {**os.environ, "HIPSIM_GPU": "gfx906"}
    done = subprocess.run([*TOOL, "--", app], capture_output=True, text=True, timeout=300, env=other)
    assert f"{app} has code for {gpu}, not for gfx906, so" in " ".join(done.stderr.split())


def test_no_gpu_where_one_was_asked_for() -> None:
    done = subprocess.run(
        [*TOOL, "--device", "gpu", "--", "true"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert done.stderr.startswith("hipsnoop: no AMD GPU can be used: KFD knows none;")


@contextlib.contextmanager
def watching(pid: int, out: Path, *options: str) -> Iterator[None]:
    """hipsnoop on a running process: from when it is attached until it has ended."""
    command = [*TOOL, "--json", "-o", out, "-p", str(pid), *options]
    tool = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tool.stderr is not None and f"attached to {pid}" in tool.stderr.readline()
    try:
        yield
        if tool.poll() is None and not any(word.isdigit() for word in options):
            tool.send_signal(signal.SIGINT)
        assert tool.wait(60) == 0
    finally:
        tool.kill()
        tool.wait()


def records(out: Path, kind: str) -> list[dict[str, Any]]:
    return [r for r in map(json.loads, out.read_text().splitlines()) if r["type"] == kind]


def test_a_running_process_is_watched(tmp_path: Path) -> None:
    """Every call once, with its true result and the kernel's name, although the tool came after all had been loaded."""
    out = tmp_path / "out"
    with serving() as served:
        served.does("rounds 2")
        with watching(served.process.pid, out, "-e"):
            served.does("rounds 5", "threads 3 50", "fail")
        served.does("rounds 2")
    calls = records(out, "call")
    assert Counter(call["api"] for call in calls) == {
        "hipLaunchKernel": 10 + 150 + 1,
        "hipStreamSynchronize": 5 + 3,
        "hipMemcpy": 5 + 1,
        "hipStreamCreate": 3,
        "hipStreamDestroy": 3,
        "hipMalloc": 1,
    }
    *others, launch = [(call["api"], call["error"]) for call in calls if call["ret"]]
    assert others == [("hipMalloc", "hipErrorOutOfMemory"), ("hipMemcpy", "hipErrorInvalidValue")]
    assert launch[0] == "hipLaunchKernel"
    assert launch[1] in ("hipErrorInvalidConfiguration", "hipErrorInvalidValue")  # of HIP 5.2 and 5.7
    launches = Counter((call["kernel"], call["block_dim"][0]) for call in calls if "kernel" in call)
    assert launches == {("work", 256): 5, ("tiny", 64): 5 + 150, ("work", 4096): 1}
    assert len({call["tid"] for call in calls}) == 4
    (summary,) = records(out, "summary")
    assert (summary["calls"], summary["lost"]) == (len(calls), 0)


def test_intervals_add_up(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with serving() as served, watching(served.process.pid, out, "0.3", "3"):
        served.does("rounds 7")
    counts = Counter[str]()
    for record in records(out, "api"):
        counts[record["api"]] += record["count"]
    assert counts == {"hipLaunchKernel": 14, "hipStreamSynchronize": 7, "hipMemcpy": 7}
    kernels = Counter[str]()
    for record in records(out, "kernel"):
        kernels[record["kernel"]] += record["count"]
    assert kernels == {"work": 7, "tiny": 7}


def test_a_wait_for_the_gpu_is_explained(tmp_path: Path) -> None:
    """A thread that blocks until a kernel has ended waits in a system call; that is nearly all of its time."""
    out = tmp_path / "out"
    with serving() as served, watching(served.process.pid, out, "--why"):
        served.does("long 30000")
    (call,) = [record for record in records(out, "api") if record["api"] == "hipStreamSynchronize"]
    waits = [record for record in records(out, "why") if record["api"] == "hipStreamSynchronize"]
    off = sum(wait["ns"] for wait in waits if wait["reason"] in ("blocked", "preempted"))
    assert {wait["syscall"] for wait in waits if wait["reason"] == "blocked"} == {"futex"}
    assert 0.5 * call["total_ns"] < off <= call["total_ns"]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "settings",
    [{}, {"HIPSIM_HOSTILE": "1"}, {"HSA_ENABLE_INTERRUPT": "0"}],
    ids=["default", "hostile", "no interrupts"],
)
def test_every_kernel_has_its_time(tmp_path: Path, settings: dict[str, str]) -> None:
    """AMD's ROCr reports when each kernel ran; its call is known, and it ran after the call began."""
    out = tmp_path / "out"
    with serving(*TOOL, "--json", "-e", "-o", out, "--", **settings) as served:
        served.does("rounds 10", "threads 4 100", "long 2000", "fail")
    (summary,) = records(out, "summary")
    # Two threads may share a queue. Then one of them may enqueue what the other has just put there.
    unknown = summary["device_times"].pop("without_call")
    assert unknown <= 20
    assert summary["device_times"] == {
        "source": "ROCr", "device": "sim", "dispatches": 421, "lost": 0, "unended": 0, "without_name": 0,
        "unread": None,
    }  # fmt: skip
    calls = {
        (call["tid"], call["ts_ns"]): call
        for call in records(out, "call")
        if "kernel" in call and call["ret"] == 0
    }
    dispatches = records(out, "dispatch")
    assert len(dispatches) == len(calls) == 421
    ends = dict[str, int]()
    known = [one for one in dispatches if "call_ns" in one]
    assert len(known) == 421 - unknown
    for dispatch in sorted(known, key=lambda one: one["ts_ns"]):
        call = calls.pop((dispatch["tid"], dispatch["call_ns"]))
        for field in ("kernel", "grid", "block_dim", "stream"):
            assert dispatch[field] == call[field]
        assert dispatch["latency_ns"] > 0 and dispatch["exec_ns"] > 0
        assert dispatch["ts_ns"] >= ends.get(dispatch["stream"], 0)  # one after the other within a stream
        ends[dispatch["stream"]] = dispatch["ts_ns"] + dispatch["exec_ns"]
    kernels = {record["kernel"]: record for record in records(out, "dispatch")}
    assert set(kernels) == {"work", "tiny"}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["kernels", "streams", "cooperative", "devices", "output"])
def test_programs_do_not_notice_the_agent(name: str) -> None:
    """Events, graphs, callbacks, printf and barriers of whole grids work with queues that the agent watches."""
    variables = environment(HIPSIM_DEVICES="2")
    alone, traced = (
        subprocess.run([*command, program(name)], env=variables, capture_output=True, text=True, timeout=300)
        for command in ([], [*TOOL, "-o", "/dev/null", "--"])
    )
    assert (traced.returncode, alone.returncode) == (0, 0)
    assert sorted(traced.stdout.splitlines()) == sorted(
        alone.stdout.splitlines()
    )  # blocks print in any order
    others = [line for line in traced.stderr.splitlines() if not line.startswith("hipsnoop: note:")]
    assert others == alone.stderr.splitlines()


def test_a_queue_that_is_full(tmp_path: Path) -> None:
    """ROCr's own way of waiting for room ends the program, or reorders its packets."""
    out = tmp_path / "out"
    libraries()
    done = subprocess.run(
        [*TOOL, "--json", "-o", out, "--", program("probed"), "1000"],
        capture_output=True, text=True, timeout=300, env=environment(ROC_AQL_QUEUE_SIZE="64"),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    (summary,) = records(out, "summary")
    times = summary["device_times"]
    assert times["dispatches"] >= 1000 + 4 * 1000 + 3 and times["lost"] == 0
    assert summary["calls"] > 5000 and summary["lost"] == 0


@scenes.told
def test_the_example_is_explained(tmp_path: Path) -> None:
    """The known answers in the first comment of examples/hip/saxpy.hip, and every kernel's time although the program exits at once."""
    out = tmp_path / "out"
    example = program("saxpy", "-O2", folder=ROOT / "examples" / "hip")
    done = subprocess.run(
        [*TOOL, "--json", "--why", "-o", out, "--", example], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, f"{20 * 131072}\n"), done.stderr
    counts = {record["api"]: record["count"] for record in records(out, "api")}
    assert (counts["hipLaunchKernel"], counts["hipStreamSynchronize"], counts["hipMemcpy"]) == (
        20,
        20,
        2 + 10 + 1,
    )
    (kernel,) = records(out, "kernel")
    assert (kernel["kernel"], kernel["count"], kernel["exec_ns"]["max"] > 0) == ("saxpy", 20, True)
    (summary,) = records(out, "summary")
    if summary["lost_why"]:
        raise scenes.UntoldError
    asleep = [w for w in records(out, "why") if w["api"] is None and w["syscall"] == "clock_nanosleep"]
    assert [wait["count"] for wait in asleep] == [19] and asleep[0]["ns"] >= 19 * 5_000_000
    assert (summary["device_times"]["dispatches"], summary["device_times"]["unended"]) == (20, 0)


def test_no_times_on_the_virtual_clock() -> None:
    done = subprocess.run(
        [*TOOL, "--", program("vectoradd")],
        env=environment(HIPSIM_CLOCK="virtual"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "no GPU timestamps: those of the virtual clock cannot be compared" in done.stdout


def test_the_agent_knows_amds_structures(tmp_path: Path) -> None:
    """hsa.h says where things are in ROCr's structures. AMD's headers say the same."""
    folder = Path("/usr/include/hsa")
    if not (folder / "hsa_api_trace.h").exists():
        pytest.skip("no headers of ROCr here; install libhsa-runtime-dev")
    source = tmp_path / "same.cpp"
    source.write_text("""
#define AMD_INTERNAL_BUILD
#include "hsa_api_trace.h"
#include "amd_hsa_signal.h"
#include "hsa_ext_amd.h"
namespace ours {
#define _Static_assert static_assert
#define _Bool bool
#include "ours.h"
}
#define AT(table, member, index) \\
    static_assert(offsetof(table, member) == sizeof(ours::hsa_version) + sizeof(void *) * ours::index)
AT(CoreApiTable, hsa_queue_create_fn, HSA_CORE_CREATE_QUEUE);
AT(CoreApiTable, hsa_executable_freeze_fn, HSA_CORE_FREEZE);
AT(CoreApiTable, hsa_executable_destroy_fn, HSA_CORE_DESTROY_EXECUTABLE);
AT(CoreApiTable, hsa_code_object_reader_create_from_file_fn, HSA_CORE_READER_OF_FILE);
AT(CoreApiTable, hsa_code_object_reader_create_from_memory_fn, HSA_CORE_READER_OF_MEMORY);
AT(CoreApiTable, hsa_code_object_reader_destroy_fn, HSA_CORE_DESTROY_READER);
AT(CoreApiTable, hsa_executable_load_agent_code_object_fn, HSA_CORE_LOAD);
namespace ours {
constexpr int functions = (sizeof(AmdExtTable) - sizeof(hsa_version)) / sizeof(void *);
constexpr int first = HSA_AMD_INTERCEPT(functions), second = first + 1;
constexpr bool known(int major) { return major >= HSA_FIRST_MAJOR && major <= HSA_LAST_MAJOR; }
}
AT(AmdExtTable, hsa_amd_queue_intercept_create_fn, first);
AT(AmdExtTable, hsa_amd_queue_intercept_register_fn, second);
static_assert(offsetof(HsaApiTable, core_) == offsetof(ours::hsa_tables, core));
static_assert(offsetof(HsaApiTable, amd_ext_) == offsetof(ours::hsa_tables, amd));
static_assert(offsetof(amd_signal_t, start_ts) == offsetof(ours::hsa_signal, start));
static_assert(offsetof(amd_signal_t, end_ts) == offsetof(ours::hsa_signal, end));
static_assert(offsetof(hsa_queue_t, id) == offsetof(ours::hsa_queue, id));
static_assert(offsetof(hsa_kernel_dispatch_packet_t, kernel_object) == offsetof(ours::hsa_packet, kernel));
static_assert(offsetof(hsa_kernel_dispatch_packet_t, completion_signal) == offsetof(ours::hsa_packet, completion));
static_assert(offsetof(hsa_kernel_dispatch_packet_t, grid_size_x) == offsetof(ours::hsa_packet, grid));
static_assert(offsetof(hsa_kernel_dispatch_packet_t, workgroup_size_x) == offsetof(ours::hsa_packet, block));
static_assert(HSA_SYSTEM_INFO_TIMESTAMP_FREQUENCY == int(ours::HSA_TIMESTAMP_FREQUENCY));
static_assert(HSA_AGENT_INFO_DEVICE == int(ours::HSA_AGENT_DEVICE) && HSA_DEVICE_TYPE_GPU == int(ours::HSA_GPU));
static_assert(HSA_EXECUTABLE_SYMBOL_INFO_TYPE == int(ours::HSA_SYMBOL_TYPE));
static_assert(HSA_EXECUTABLE_SYMBOL_INFO_NAME_LENGTH == int(ours::HSA_SYMBOL_NAME_LENGTH));
static_assert(HSA_EXECUTABLE_SYMBOL_INFO_NAME == int(ours::HSA_SYMBOL_NAME));
static_assert(HSA_EXECUTABLE_SYMBOL_INFO_KERNEL_OBJECT == int(ours::HSA_SYMBOL_KERNEL_OBJECT));
static_assert(HSA_EXECUTABLE_SYMBOL_INFO_KERNEL_KERNARG_SEGMENT_SIZE == int(ours::HSA_SYMBOL_KERNARG_SIZE));
static_assert(HSA_AGENT_INFO_PROFILE == int(ours::HSA_AGENT_PROFILE) && HSA_DEVICE_TYPE_CPU == int(ours::HSA_CPU));
static_assert(HSA_AMD_AGENT_INFO_COMPUTE_UNIT_COUNT == int(ours::HSA_AGENT_COMPUTE_UNITS));
static_assert(HSA_AMD_MEMORY_POOL_INFO_SEGMENT == int(ours::HSA_POOL_SEGMENT));
static_assert(HSA_AMD_MEMORY_POOL_INFO_GLOBAL_FLAGS == int(ours::HSA_POOL_FLAGS));
static_assert(HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_ALLOWED == int(ours::HSA_POOL_MAY_ALLOCATE));
static_assert(HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_KERNARG_INIT == int(ours::HSA_POOL_KERNARG));
static_assert(HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_COARSE_GRAINED == int(ours::HSA_POOL_COARSE_GRAINED));
static_assert(HSA_AMD_SEGMENT_GLOBAL == int(ours::HSA_GLOBAL));
static_assert(HSA_AMD_SIGNAL_AMD_GPU_ONLY == int(ours::HSA_SIGNAL_GPU_ONLY));
static_assert(HSA_SYMBOL_KIND_KERNEL == int(ours::HSA_KERNEL) && HSA_SIGNAL_CONDITION_LT == int(ours::HSA_LESS));
static_assert(HSA_PACKET_TYPE_KERNEL_DISPATCH == int(ours::HSA_KERNEL_DISPATCH));
static_assert(ours::known(HSA_CORE_API_TABLE_MAJOR_VERSION) && ours::known(HSA_AMD_EXT_API_TABLE_MAJOR_VERSION));
""")
    ours = agent.LIBRARY.parents[1].joinpath("hsa", "hsa.h").read_text()
    (tmp_path / "ours.h").write_text(ours.replace("#pragma once", "").replace("#include <std", "// <std"))
    command = ["g++", "-std=c++17", "-w", "-fsyntax-only", f"-I{folder}", str(source)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr

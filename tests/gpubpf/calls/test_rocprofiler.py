"""Kernel dispatches, with stand-ins for ROCm's libraries. Not tested on an AMD GPU."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import struct
import subprocess
import time
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import gpubpf_rocm
from gpubpf.calls import device_times, kernel_times
from gpubpf.calls.api import Api, ApiFunction
from gpubpf.calls.device_times import dispatches as reader
from gpubpf.calls.device_times.dispatches import Dispatches
from gpubpf.errors import TOO_MANY_FILES
from gpubpf.linux import libraries
from gpubpf.record import replace
from gpubpf.traced import amd_device

ADD, SCALE = "_Z9vectorAddPKfS0_Pfi", "_Z5scalePff"


@pytest.fixture(scope="module")
def rocm(tmp_path_factory):
    return gpubpf_rocm.build(tmp_path_factory.mktemp("rocm"))


class Run:
    """Run a program and read its dispatches."""

    def __init__(self, rocm, *command, **environment):
        program = [str(rocm / "program"), *map(str, command)]
        log = rocm / f"log-{time.monotonic_ns()}"
        given = (
            os.environ
            | {"ROCM_PATH": str(rocm), "STANDIN_LOG": str(log)}
            | {k: str(v) for k, v in environment.items()}
        )
        parts = []
        with closing(Dispatches(program, given, os.geteuid())) as dispatches:
            self.environment = dispatches.environment
            child = subprocess.Popen(
                program,
                env=given | dispatches.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            while child.poll() is None:
                parts.append(dispatches.take())
                time.sleep(0.01)
            parts.append(dispatches.take(last=True))
            self.stdout, self.stderr = child.communicate()
            self.pid, self.status, self.reason = child.pid, child.returncode, dispatches.reason
        self.dispatches, self.processes = np.concatenate(parts), dispatches.processes
        self.lost, self.unended = dispatches.lost, dispatches.unended
        lines = log.read_text().split("\n")[:-1] if log.exists() else []
        self.expected = sorted(
            (int(p), int(t), k, int(a), int(b)) for p, t, k, _, a, b in map(str.split, lines)
        )

    def found(self):
        """The process, thread, kernel, start and end of each dispatch."""
        at = [self.processes[number] for number in self.dispatches["process"]]
        kernels = [
            process.names[int(kernel)] for process, kernel in zip(at, self.dispatches["kernel"], strict=True)
        ]
        times = (self.dispatches[name].tolist() for name in ("tid", "start_ns", "end_ns"))
        return sorted(
            (process.pid, tid, kernel, start, end)
            for process, kernel, tid, start, end in zip(at, kernels, *times, strict=True)
        )


def test_every_dispatch_comes_once_with_its_times(rocm):
    run = Run(rocm, "plain", 100)
    assert (run.status, run.stderr, run.reason, run.lost, run.unended) == (0, "", None, 0, 0)
    assert len(run.expected) == 100 and run.found() == run.expected
    assert [process.comm for process in run.processes] == ["program"]
    assert {tuple(block) for block in run.dispatches["block"].tolist()} == {(64, 1, 1), (128, 1, 1)}
    assert run.dispatches["grid"][0].tolist() == [256, 2, 1]
    assert set(run.dispatches["gpu"].tolist()) == {1} and set(run.dispatches["shared"].tolist()) == {16}
    assert (run.dispatches["enqueued_ns"] < run.dispatches["start_ns"]).all()
    assert (run.dispatches["enqueued_ns"] > run.dispatches["start_ns"].min() - 10**9).all()


def test_many_threads_and_ends_that_are_told_of_by_several(rocm):
    run = Run(rocm, "threads", 500, STANDIN_KERNEL_US=1, STANDIN_SDK_WORKERS=3)
    assert len(run.expected) == 4000 and run.found() == run.expected
    assert (run.lost, run.unended) == (0, 0)


@pytest.mark.parametrize(("mode", "status"), [("exits", 4), ("left", 3), ("killed", -signal.SIGKILL)])
def test_a_process_that_ends_in_any_way(rocm, mode, status):
    run = Run(rocm, mode, 20, STANDIN_KERNEL_US=3000)
    assert run.status == status and run.reason is None and run.lost == 0
    # Dispatches that had ended are known; the others are counted as unended.
    assert set(run.found()) <= set(run.expected)
    assert len(run.dispatches) + run.unended == len(run.expected)
    assert (run.unended > 0) == (mode != "exits")


def test_forked_and_executed_processes(rocm):
    run = Run(rocm, "forks", 5)
    assert run.status == 0
    pids = {process.pid for process in run.processes}
    assert (
        len(pids) == 2 and run.pid in pids
    )  # one before the fork, one after; a child of a process with an agent has no agent
    assert run.found() == [line for line in run.expected if line[0] in pids]
    run = Run(rocm, "exec", 5)
    assert [process.pid for process in run.processes] == [run.pid, run.pid]
    assert len(run.expected) == 10 and run.found() == run.expected


def test_the_program_goes_on_with_limits_and_closed_files(rocm):
    run = Run(rocm, "limits", 5)
    assert (run.status, run.stderr) == (0, "") and "limits" in run.reason
    run = Run(rocm, "closes", 5)
    assert run.status == 0 and len(run.dispatches) == 6
    assert int(run.stdout) == int(Run(rocm, "closes", 5, ROCP_TOOL_LIBRARIES="").stdout)


def test_why_there_are_none(rocm, tmp_path):
    cases = (
        ({"STANDIN_SDK_VERSION": 20000}, "rocprofiler-sdk 2.0.0 in the program"),
        ({"STANDIN_SDK_STATUS": 17}, "error status 17"),
    )
    for environment, text in cases:
        run = Run(rocm, "plain", **environment)
        assert (run.status, run.stderr) == (0, "") and text in run.reason and len(run.dispatches) == 0
    # The SDK cannot be loaded. librocprofiler-register itself would end the program.
    broken = tmp_path / "rocm"
    (broken / "lib").mkdir(parents=True)
    for name in ("librocprofiler-register.so.0", "libamdhip64.so.7"):
        (broken / "lib" / name).write_bytes((rocm / "lib" / name).read_bytes())
    (broken / "lib" / "librocprofiler-sdk.so").write_text("no library")
    (broken / "program").symlink_to(rocm / "program")
    run = Run(
        broken, "plain", LD_PRELOAD=f"{broken}/lib/librocprofiler-register.so.0:{broken}/lib/libamdhip64.so.7"
    )
    assert (run.status, run.stderr) == (0, "") and "could not be loaded" in run.reason
    # A program that does not use ROCm.
    with closing(Dispatches(["true"], {"ROCM_PATH": str(rocm)}, 0)) as dispatches:
        assert dispatches.environment and "no process reported any" in dispatches.reason


@pytest.mark.parametrize("with_gpu", [False, True])
def test_nothing_is_set_where_it_cannot_work(monkeypatch, rocm, tmp_path, with_gpu):
    monkeypatch.setattr(libraries, "files", lambda names: [])
    monkeypatch.setattr(amd_device, "has_gpu", lambda: with_gpu)
    found = {"ROCM_PATH": str(rocm)}
    for command, environment, text in (
        ([], found, "did not start the program"),
        (["true"], found | {"ROCP_TOOL_LIBRARIES": "other.so"}, "for another profiler"),
        (["true"], {}, "not installed" if with_gpu else "there is no AMD GPU"),
    ):
        with closing(Dispatches(command, environment, 0)) as dispatches:
            assert dispatches.environment == {} and text in dispatches.reason
            assert len(dispatches.take(last=True)) == 0
    packages = tmp_path / "venv" / "lib" / "python3.12" / "site-packages" / "torch" / "lib"
    packages.mkdir(parents=True)
    (packages / "librocprofiler-sdk.so.1").touch()
    assert device_times.installed(["python"], {"VIRTUAL_ENV": str(tmp_path / "venv")})


def test_a_library_that_some_process_could_not_load_is_not_named(rocm, tmp_path, monkeypatch):
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    copy = private / "agent.so"
    copy.write_bytes(device_times.ROCPROFILER.library.read_bytes())
    for library, right in ((copy, os.geteuid() != 0), (Path(__file__), False)):
        monkeypatch.setattr(device_times, "ROCPROFILER", replace(device_times.ROCPROFILER, library=library))
        with closing(Dispatches(["true"], {"ROCM_PATH": str(rocm)}, 0)) as dispatches:
            assert bool(dispatches.environment) == right


@pytest.mark.long
def test_a_reader_that_is_late_says_how_many_it_missed(rocm):
    program = [str(rocm / "program"), "plain", str(reader.SLOTS + 1000)]
    given = os.environ | {"ROCM_PATH": str(rocm), "STANDIN_KERNEL_US": "0"}
    with closing(Dispatches(program, given, os.geteuid())) as dispatches:
        subprocess.run(program, env=given | dispatches.environment, check=True)
        taken = dispatches.take(last=True)
        assert (len(taken), dispatches.lost, dispatches.unended) == (reader.SLOTS, 1000, 0)
        assert taken["dispatch"].max() == reader.SLOTS + 1000


def test_when_the_tool_has_gone_nothing_more_is_written(rocm):
    program = [str(rocm / "program"), "asks", "5"]
    given = os.environ | {"ROCM_PATH": str(rocm)}
    with closing(Dispatches(program, given, os.geteuid())) as dispatches:
        child = subprocess.Popen(program, env=given | dispatches.environment, stdin=subprocess.PIPE)
        count = 0
        while count < 5:
            count += len(dispatches.take())
            time.sleep(0.01)
        file = os.dup(dispatches.processes[0].file)
    child.communicate(b"\n", 60)
    assert child.returncode == 0
    _, enqueued, written, *_ = reader._RING.unpack(os.pread(file, reader._RING.size, 0))
    os.close(file)
    assert enqueued == written == 5


@pytest.mark.parametrize("files", [0, 1])
def test_without_files_the_dispatches_of_later_programs_are_said_to_be_missing(rocm, files):
    """The connection takes a file, and the agent's memory another one."""
    program = [str(rocm / "program"), "plain"]
    given = os.environ | {"ROCM_PATH": str(rocm)}
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(Dispatches(program, given, os.geteuid())) as dispatches:
        subprocess.run(program, env=given | dispatches.environment, check=True, stdout=subprocess.DEVNULL)
        assert len(dispatches.take()) and dispatches.unread is None
        subprocess.run(program, env=given | dispatches.environment, check=True, stdout=subprocess.DEVNULL)
        with ExitStack() as gaps:
            number, most = -1, max(int(name) for name in os.listdir("/proc/self/fd"))
            while number <= most:
                number = os.dup(0)
                gaps.callback(os.close, number)
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (number + 1 + files, limits[1]))
                assert len(dispatches.take(last=True)) == 0
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert dispatches.unread == TOO_MANY_FILES and dispatches.reason is None


def test_what_comes_from_a_process_is_not_trusted(rocm, tmp_path):
    hello = struct.Struct("<Q4I16s")
    with closing(Dispatches(["true"], {"ROCM_PATH": str(rocm)}, os.geteuid())) as dispatches:
        address = "\0" + dispatches.environment[reader.SOCKET]

        def say(data, *files):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(address)
                socket.send_fds(peer, [data], files) if files else peer.send(data)
                return len(dispatches.take())

        sealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(sealed, reader._SIZE)
        plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        os.ftruncate(plain, reader._SIZE)
        good = hello.pack(reader.MAGIC, reader.STARTED, 0, 10100, os.getpid(), b"me\n")
        for data, files in (
            (b"", ()), (b"x", ()), (hello.pack(1, 1, 0, 0, 0, b""), ()), (hello.pack(reader.MAGIC, 99, 0, 0, 0, b""), ()),
            (good, ()), (good, (plain,)), (good, (sealed,)), (good, (sealed, sealed)),
        ):  # fmt: skip
            assert say(data, *files) == 0
        assert dispatches.processes == []
        fcntl.fcntl(sealed, 1033, 2 | 4)  # F_ADD_SEALS: SHRINK, GROW
        junk = np.random.default_rng(1).integers(0, 255, reader.HEADER + 4096, np.uint8).tobytes()
        os.pwrite(sealed, junk, 0)
        assert say(good, sealed) == 0 and len(dispatches.processes) == 1
        # Valid counters, followed by random bytes.
        os.pwrite(sealed, struct.pack("<5Q2I", reader.MAGIC, 3, 3, 4096, 0, 0, 9), 0)
        slots = np.frombuffer(junk[: 3 * reader._SLOT.itemsize], reader._SLOT).copy()
        slots["number"] = [1, 2, 3]
        slots["start_ns"], slots["end_ns"] = [5, 6, 7], [6, 5, 9]
        os.pwrite(sealed, slots.tobytes(), reader.HEADER)
        os.pwrite(sealed, junk[:4096], reader.HEADER + reader.SLOTS * reader._SLOT.itemsize)
        taken = dispatches.take()
        assert taken["start_ns"].tolist() == [5, 7] and set(taken["gpu"].tolist()) <= {-1, *range(64)}
        # The reader waits for a slot that is never completed, then counts it as lost.
        os.pwrite(sealed, bytes(8192), reader.HEADER + slots.nbytes)
        os.pwrite(sealed, struct.pack("<5Q2I", reader.MAGIC, 5, 5, 0, 0, 0, 0), 0)
        for _ in range(reader.PATIENCE):
            assert len(dispatches.take()) == 0 and dispatches.lost == 0
        dispatches.take()
        assert dispatches.lost == 2
        os.close(sealed)
        os.close(plain)


# --- which call a dispatch is of ---


def events(*calls):
    """Return events with the fields that matter here. Each call: thread, start, end, function, block."""
    made = np.zeros(len(calls), records_dtype())
    for at, (tid, begin, end, function, block) in zip(made, calls, strict=True):
        at["tgid"], at["tid"], at["start_ns"], at["end_ns"], at["function"] = 7, tid, begin, end, function
        at["arguments"][3:5], at["stack"][1] = (1 << 32 | block, 1) if block else 0, 0x100
    return made


def records_dtype():
    words = [("arguments", "<u8", 6), ("stack", "<u8", 4), ("memory", "<u8", 10)]
    return np.dtype(
        [(n, "<u8") for n in ("start_ns", "end_ns")]
        + [(n, "<u4") for n in ("tgid", "tid", "function")]
        + words
    )


def ended(*dispatches):
    made = np.zeros(len(dispatches), reader.DISPATCH)
    for at, (tid, enqueued, block) in zip(made, dispatches, strict=True):
        at["tid"], at["enqueued_ns"], at["start_ns"], at["end_ns"] = (
            tid,
            enqueued,
            enqueued + 10,
            enqueued + 30,
        )
        at["block"], at["grid"] = (block, 1, 1), (4 * block - 1, 1, 1)
    return made


def test_dispatches_after_the_end_of_the_measurement_are_left_out(monkeypatch):
    made = ended((1, 100, 64), (1, 200, 64), (1, 300, 64), (1, 0, 64))
    made["start_ns"][3], made["end_ns"][3] = 400, 450  # it is not known when it was enqueued
    times = kernel_times.KernelTimes(Api("HIP", (), (), {}), ["true"], {}, 0)
    monkeypatch.setattr(times._processes, "take", lambda last: made)
    monkeypatch.setattr(times._processes, "processes", [SimpleNamespace(pid=7)])
    monkeypatch.setattr(times._joiner, "kernel", lambda process, kernel: "k")
    for end, count in ((None, 4), (400, 4), (399, 3), (200, 2), (99, 0)):
        times.take(ended_ns=end)
        assert sum(run.count for run in times.runs().values()) == count


@pytest.fixture
def joining():
    function = ApiFunction(
        "hipLaunchKernel",
        "hipLaunchKernel",
        "launch",
        "kernel=0 grid=1:packed block=3:packed shared=s0 stream=s1",
    )
    api = Api(
        "test",
        (),
        (
            function,
            ApiFunction("hipGraphLaunch", "hipGraphLaunch", "graph"),
            ApiFunction("hipFree", "hipFree", "sync"),
        ),
        {},
    )
    processes = Dispatches([], {}, 0)
    processes.processes.append(reader.AgentProcess(7, 7, "app", -1, -1, names={5: SCALE}))
    return kernel_times.DispatchJoiner(api, processes)


def test_a_dispatch_is_of_the_call_around_it(joining):
    joining.calls(
        events((8, 100, 200, 0, 64), (8, 300, 400, 0, 64), (9, 100, 400, 1, 0), (8, 210, 290, 2, 0))
    )
    # At the start and at the end of a call; two in a graph launch; between calls; in a call that runs no kernel.
    found = joining.dispatches(
        ended((8, 100, 64), (9, 150, 32), (8, 200, 64), (9, 390, 64), (8, 205, 64), (8, 250, 64)), last=True
    )
    assert found.dispatches["enqueued_ns"].tolist() == [100, 150, 200, 205, 250, 390]  # as they started
    assert found.known.tolist() == [True] * 3 + [False] * 2 + [True]
    assert found.calls["start_ns"][found.known].tolist() == [100, 100, 100, 100]
    assert found.calls["function"][found.known].tolist() == [0, 1, 0, 1]


def test_a_dispatch_of_another_size_is_not_of_the_call(joining):
    joining.calls(events((8, 100, 200, 0, 64)))
    found = joining.dispatches(ended((8, 150, 128), (8, 160, 64)))
    assert found.known.tolist() == [False, True]


def test_a_call_that_still_goes_on_is_waited_for(joining):
    assert len(joining.dispatches(ended((8, 150, 64))).known) == 0
    joining.calls(events((8, 100, 900, 0, 64)))
    found = joining.dispatches(ended())
    assert found.known.tolist() == [True]
    assert len(joining.dispatches(ended((8, 1000, 64))).known) == 0
    for _ in range(kernel_times.PATIENCE - 1):
        assert len(joining.dispatches(ended()).known) == 0
    assert joining.dispatches(ended()).known.tolist() == [False]
    # The call of a dispatch without a time of enqueuing stays unknown.
    assert joining.dispatches(ended((8, 0, 64))).known.tolist() == [False]


def test_of_a_thread_that_nobody_can_number(joining):
    joining.calls(events((8, 100, 200, 0, 64), (9, 150, 400, 0, 64), (9, 500, 600, 0, 64)))
    found = joining.dispatches(
        ended((0, 120, 64), (0, 180, 64), (0, 300, 64), (0, 450, 64), (0, 550, 128)), last=True
    )
    assert found.known.tolist() == [True, False, True, False, False]
    assert found.calls["tid"].tolist() == [8, 0, 9, 0, 9]


def test_calls_are_remembered_in_parts(joining, monkeypatch):
    monkeypatch.setattr(kernel_times, "CHUNK", 4)
    monkeypatch.setattr(kernel_times, "MOST_CALLS", 40)
    for i in range(100):
        joining.calls(events((8, 100 * i, 100 * i + 10, 0, 64), (9, 100 * i, 100 * i + 90, 1, 0)))
    joining.calls(events((10, 0, 10_000, 1, 0)))  # this call returned last
    some = ended(*((8, 100 * i + 5, 64) for i in range(100)), (9, 9_980, 32), (10, 9_995, 32))
    found = joining.dispatches(some, last=True)
    forgotten = int(np.argmax(found.known))
    assert 78 <= forgotten <= 83 and found.known[forgotten:].all()
    began = found.calls["start_ns"][forgotten:].tolist()
    assert began == [100 * i for i in range(forgotten, 100)] + [9_900, 0]


def test_records(joining):
    joining.calls(events((8, 100, 200, 0, 64)))
    some = ended((8, 150, 64), (8, 250, 64))
    some["kernel"] = 5, 6
    first, second = joining.records(joining.dispatches(some, last=True))
    assert first == {
        "type": "dispatch", "pid": 7, "comm": "app", "gpu": 0, "queue": "0x0", "kernel": "scale", "ts_ns": 160, "exec_ns": 20,
        "grid": [4, 1, 1], "block_dim": [64, 1, 1], "shared_bytes": 0, "tid": 8, "api": "hipLaunchKernel", "call_ns": 100,
        "latency_ns": 60, "stream": "0x100",
    }  # fmt: skip
    assert (
        second["kernel"] == "kernel 6"
        and not {"tid", "api", "call_ns", "latency_ns", "stream"} & second.keys()
    )

"""Programs on the fake driver (agent/fakecuda.c) under a session: the counts are right, and the program behaves as without it."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import gpubpf_fuse
from gpubpf import agent
from gpubpf.agent import protocol
from gpubpf.agent.definitions import PROTOCOL_VERSION, Message
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.errors import SessionError
from gpubpf.images.assemble import Target
from gpubpf.images.sidecar import Sidecar
from gpubpf.inject.values import InjectedVariable
from gpubpf.lower.launch_block import LaunchBlock
from gpubpf.memory.allocations import Allocation, Allocations
from gpubpf.process import limits, target_socket, traceable
from gpubpf.record import replace
from gpubpf.records import reasons
from gpubpf.session import tracing
from gpubpf.session.session import Session
from gpubpf.show.parsed import DeviceOptions, Options, TargetOptions
from gpubpf.traced import device, server, workers
from gpubpf.traced.joining import Joining
from gpubpf.traced.measurement import Follow, Plan, Targets
from gpubpf.traced.traced_process import TracedProcess
from gpubpf_commands import quoted

HERE = Path(__file__).parents[1] / "agent"
sys.path.insert(0, str(HERE))

import fake_tool  # noqa: E402
from fake_tool import built, measure  # noqa: E402


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program and the fake driver beside it."""
    return built(tmp_path_factory.mktemp("fake"))


def measure_until_launched(command: list[str], afterwards: Path) -> dict[str, Any]:
    """Measure a command until it has launched a kernel. It goes on when the file `afterwards` is there, after the measurement."""
    command = ["env", f"AFTERWARDS={afterwards}", *command]
    with fake_tool.session(command, note=lambda text: None, complain=lambda text: None) as session:
        for _ in session.intervals(0.05):
            if any(kernel.launches for kernel in session.kernels()):
                session._stop()
                afterwards.touch()
                break
    return fake_tool.result(session)


def counted(found: dict[str, Any]) -> tuple[int, int, int]:
    summary = found["summary"]
    reasons = sum(summary["not_instrumented"].values())
    assert summary["launches_matched"] == summary["launches_instrumented"] + reasons
    return summary["launches_seen"], summary["launches_matched"], summary["launches_instrumented"]


@pytest.mark.parametrize(
    ("mode", "number", "seen", "matched", "instrumented", "status"),
    [
        ("plain", 23, 23, 23, 23, 0),
        ("threads", 500, 4000, 4000, 4000, 0),
        ("shapes", 30, 31, 30, 30, 0),
        ("capture", 0, 2, 2, 2, 0),  # what a capture takes down does not run
        ("childafter", 5, 5, 5, 5, 0),
        ("destroy", 7, 8, 8, 8, 0),
        ("leave", 5, 8, 8, 5, 0),
        ("library", 7, 7, 7, 7, 0),
        ("reload", 50, 50, 50, 50, 0),
        ("_exit", 6, 6, 6, 6, 4),
        ("quick_exit", 6, 6, 6, 6, 5),
        ("term", 6, 6, 6, 6, 143),
        ("nocuda", 0, 0, 0, 0, 3),
    ],
)
def test_counts(
    target: Path, mode: str, number: int, seen: int, matched: int, instrumented: int, status: int
) -> None:
    found = measure([str(target), mode, str(number)])
    assert counted(found) == (seen, matched, instrumented)
    assert found["status"] == status
    assert found["summary"]["lost"] == 0
    # One value for each thread, as large as the launches that counted it.
    for grid, block_dim, launches, values in found["instances"]:
        assert values == [launches] * (grid[0] * block_dim[0])
    assert sum(i[2] for i in found["instances"]) == instrumented


def test_obsolete_functions_that_cannot_be_hooked_do_not_end_the_measurement(tmp_path: Path) -> None:
    found = measure([str(built(tmp_path, "-DTINY_LAUNCH_GRID")), "plain", "23"])
    assert counted(found) == (23, 23, 23) and found["status"] == 0
    (note,) = (line for line in found["said"] if "obsolete" in line)
    assert note.startswith(
        "obsolete functions of this driver cannot be hooked; launches through them are not counted: cuLaunchGrid: "
    )


def test_a_wait_that_cannot_be_hooked_is_not_held_back(tmp_path: Path) -> None:
    found = measure([str(built(tmp_path, "-DTINY_WAIT_VALUE")), "plain", "23"])
    assert counted(found) == (23, 23, 23) and found["status"] == 0
    (note,) = (line for line in found["said"] if "cannot be hooked" in line)
    assert note.startswith(
        "calls of cuStreamWaitValue32_v2 are not held back while the agent loads or frees, because this driver's"
        " functions cannot be hooked: cuStreamWaitValue32_v2: "
    )


def test_output_is_the_programs_own(target: Path, capfd: pytest.CaptureFixture[str]) -> None:
    subprocess.run([target, "childafter", "9"], check=True)
    alone = capfd.readouterr()
    assert measure([str(target), "childafter", "9"])["status"] == 0
    assert capfd.readouterr() == alone


def test_one_instance_for_each_launch_shape(target: Path) -> None:
    instances = measure([str(target), "shapes", "30"])["instances"]
    assert sorted((i[0], i[1], i[2]) for i in instances) == [
        ([1, 1, 1], [5, 1, 1], 10),
        ([2, 1, 1], [5, 1, 1], 10),
        ([3, 1, 1], [5, 1, 1], 10),
    ]


def test_contexts_of_one_process_are_added_up(target: Path) -> None:
    found = measure([str(target), "destroy", "7"])  # 7 in a context that it destroys, 1 in another
    assert found["instances"] == [[[1, 1, 1], [5, 1, 1], 8, [8] * 5]]


@pytest.mark.parametrize(
    ("options", "instrumented", "reasons"),
    [
        ({"launches": (5, 9)}, 5, {"filtered": 18}),
        ({"launches": (5, None)}, 19, {"filtered": 4}),
        ({"sample": 4}, 6, {"sampled out": 17}),
        ({"launches": (3, 12), "sample": 5}, 2, {"filtered": 13, "sampled out": 8}),
    ],
)
def test_launch_filters(
    target: Path, options: dict[str, Any], instrumented: int, reasons: dict[str, int]
) -> None:
    found = measure([str(target), "plain", "23"], **options)
    assert found["summary"]["launches_instrumented"] == instrumented
    assert found["summary"]["not_instrumented"] == reasons


def test_copies_that_would_not_be_resident_are_not_launched(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_OCCUPANCY", "0")
    assert measure([str(target)])["summary"]["not_instrumented"] == {"occupancy": 23}


def test_launches_that_cannot_run_are_not_blamed_on_the_copy(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NO_ROOM", "1")
    assert measure([str(target)])["summary"]["not_instrumented"] == {"launch failed": 23}


@pytest.mark.every(3)
@pytest.mark.parametrize("code", [1, 2, 200, 201, 209, 400, 701, 720, 801, 912, 913])
def test_launches_whose_copy_the_driver_refuses_are_the_originals(
    target: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    monkeypatch.setenv("FAKE_REFUSE_COPY", str(code))
    found = measure([str(target), "plain", "23"])
    assert capfd.readouterr().out == "launched 23\n"  # no launch failed
    assert found["summary"]["not_instrumented"] == {"copy failed": 23}, found


def test_a_map_too_small_is_enlarged_for_the_next_launch(target: Path) -> None:
    for launches in (40, 400, 4000):  # of 100,000 threads, 5 ms apart; on a busy machine it takes longer
        found = measure([str(target), "large", str(launches)], map_memory=1 << 16)
        reasons = found["summary"]["not_instrumented"]
        assert set(reasons) == {"map too small"}
        assert counted(found)[2] == launches - reasons["map too small"]
        if reasons["map too small"] < launches:
            return
    pytest.fail("the map was never enlarged")


def test_refusals_have_their_own_reason(target: Path) -> None:
    def refuse(image: bytes, target: Any) -> fake_tool.Sidecar:
        return fake_tool.Sidecar(refusals={"vectorAdd": "SASS only"}, entries=("vectorAdd", "reduce"))

    assert measure([str(target)], instrument=refuse)["summary"]["not_instrumented"] == {"SASS only": 23}


def test_a_variable_that_is_not_found_is_the_reason(target: Path) -> None:
    def with_variable(image: bytes, device: Any) -> fake_tool.Sidecar:

        return replace(
            fake_tool.instrument(image, device), variables=(InjectedVariable("table", 0, "global", 4, False),)
        )

    reasons = measure([str(target)], instrument=with_variable)["summary"]["not_instrumented"]
    assert reasons == {
        "the copy cannot use the variables": 23
    }  # the fake driver knows no globals, not even the copy's table


def test_a_driver_that_rejects_the_copy(target: Path) -> None:
    def broken(image: bytes, device: Any) -> fake_tool.Sidecar:
        return replace(fake_tool.instrument(image, device), image=b"no image")

    reasons = measure([str(target)], instrument=broken)["summary"]["not_instrumented"]
    assert reasons == {"the driver rejects the copy, error 200": 23}


def test_slow_instrumentation_is_waited_for_within_bounds(target: Path) -> None:
    def slow(image: bytes, device: Any) -> fake_tool.Sidecar:
        time.sleep(0.5)
        return fake_tool.instrument(image, device)

    assert counted(measure([str(target)], instrument=slow)) == (23, 23, 23)
    found = measure([str(target)], instrument=slow, image_wait=0.1)
    assert found["summary"]["not_instrumented"] == {"before ready": 23}
    found = measure([str(target), "slow", "900"], instrument=slow, image_wait=0.1)  # comes while it runs
    assert 0 < found["summary"]["not_instrumented"]["before ready"] < 900


def test_nothing_matches(target: Path) -> None:
    def nothing(image: bytes, device: Any) -> fake_tool.Sidecar:
        return fake_tool.Sidecar(entries=("vectorAdd", "reduce"))

    found = measure([str(target)], wanted=("vecAdd",), instrument=nothing)
    assert found["status"] == 1
    assert found["said"] == ["no kernel matches 'vecAdd'; kernels seen: reduce, vectorAdd"]
    assert found["summary"]["launches_matched"] == 0
    assert (
        measure([str(target), "nocuda"], wanted=("x",), instrument=nothing)["status"] == 3
    )  # the command's own comes first
    assert measure(["true"], wanted=())["said"] == ["no kernel was launched"]
    found = measure(["true"], wanted=("vecAdd",))
    assert (found["status"], found["said"]) == (1, ["no kernel was launched"])


def test_a_kernel_that_matches_is_loaded_but_not_launched(target: Path) -> None:
    def loaded(image: bytes, device: Any) -> fake_tool.Sidecar:
        return fake_tool.Sidecar(entries=("vectorAdd", "reduce"))

    for wanted, status, said in (
        ("reduce", 0, "no kernel was launched"),
        ("vecAdd", 1, "no kernel matches 'vecAdd'; kernels seen: reduce, vectorAdd"),
    ):
        found = measure([str(target), "slow", "0"], wanted=(wanted,), instrument=loaded)
        assert (found["status"], found["said"]) == (status, [said])


def test_one_of_two_patterns_matches(target: Path) -> None:
    found = measure([str(target)], wanted=("vectorAdd", "vecAdd"))
    assert found["status"] == 0 and found["summary"]["launches_matched"] == 23
    assert [text for text in found["said"] if "no kernel" in text] == [
        "no kernel matches 'vecAdd'; kernels seen: reduce, vectorAdd"
    ]


# --- processes ---


def test_children_are_followed(target: Path) -> None:
    found = measure(["sh", "-c", f"{quoted(target)} & {quoted(target)} slow 30; wait; exit 9"])
    assert counted(found) == (53, 53, 53)
    assert found["status"] == 9


def test_fifty_forks(target: Path) -> None:
    assert counted(measure([str(target), "forks", "50"])) == (50, 50, 50)


def test_many_processes_need_many_files_of_the_tool_only(target: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    tool = shlex.join(map(str, (sys.executable, HERE / "fake_tool.py", result)))
    command = quoted(f"ulimit -n; exec {quoted(target)} forks 80")
    done = subprocess.run(
        ["sh", "-c", f"ulimit -Sn 60; exec {tool} -- sh -c {command}"],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "60\nfailed 0\n"
    found = json.loads(result.read_text())
    assert counted(found) == (80, 80, 80) and found["summary"]["lost"] == 0


def test_processes_that_are_gone_take_no_files(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubpf.traced.workers.RECENTLY_ENDED", 2)
    before = len(os.listdir("/proc/self/fd"))
    with fake_tool.session(["sh", "-c", f"for i in $(seq 20); do {quoted(target)} plain 2; done"]) as session:
        for _ in session.intervals():
            pass
        until = time.monotonic() + 60  # others do it meanwhile
        while len(os.listdir("/proc/self/fd")) > before + 15 and time.monotonic() < until:
            time.sleep(0.01)
        assert len(os.listdir("/proc/self/fd")) <= before + 15
        while session._measurement.active() and time.monotonic() < until:
            time.sleep(0.01)
        assert session._measurement.active() == []
    found = fake_tool.result(session)
    assert counted(found) == (40, 40, 40) and found["summary"]["lost"] == 0
    assert found["instances"] == [[[1, 1, 1], [5, 1, 1], 2, [2] * 5]] * 20


def test_one_sidecar_for_processes_that_start_together(target: Path) -> None:
    made = []

    def instrument(image: bytes, device: Any) -> fake_tool.Sidecar:
        made.append(image)
        time.sleep(0.3)
        return fake_tool.instrument(image, device)

    found = measure([str(target), "forks", "8"], instrument=instrument)
    assert counted(found) == (8, 8, 8) and len(made) == 1


def test_a_program_that_closes_every_file_goes_on(target: Path) -> None:
    found = measure([str(target), "closeall", "5"])
    assert found["status"] == 0
    assert found["summary"]["lost"] == found["summary"]["launches_instrumented"] > 0


@pytest.mark.may_come_too_late
def test_a_program_that_closes_every_file_does_not_wait_for_answers(target: Path) -> None:
    start = time.monotonic()
    found = measure([str(target), "closefirst", "5"], wanted=())
    assert time.monotonic() - start < 9  # the agent gives up a silent tool after 10 s
    assert found["status"] == 0
    assert (
        "closed all its file descriptors, including the agent's; its later launches may not be counted"
        in found["said"][0]
    )


def test_programs_find_the_signal_handlers_that_they_set(
    target: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    subprocess.run([target, "handlers"], check=True)
    alone = capfd.readouterr()
    assert measure([str(target), "handlers"])["status"] == 0
    assert capfd.readouterr() == alone


def test_wrong_parameters_are_the_drivers_to_refuse(target: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = measure([str(target), "wrong"])
    assert found["summary"]["not_instrumented"] == {"launch failed": 1, "copy failed": 1}
    assert capfd.readouterr().out == "1\nlaunched 1\n"


def test_the_last_reading_does_not_end_a_capture(
    target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = measure_until_launched([str(target), "longcapture"], tmp_path / "afterwards")
    assert capfd.readouterr().out == "captured 0\nlaunched 1\n"
    assert counted(found) == (1, 1, 1) and found["summary"]["lost"] == 0


def test_a_context_that_goes_after_the_measurement_is_left_alone(target: Path, tmp_path: Path) -> None:
    found = measure_until_launched([str(target), "destroylater"], tmp_path / "afterwards")
    assert found["status"] == 0
    assert counted(found) == (1, 1, 1) and found["summary"]["lost"] == 0


def test_no_more_than_a_part_of_the_memory_is_taken(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MEMORY", str(2 << 20))
    found = measure([str(target), "large", "10"], map_memory=1 << 16)
    assert found["summary"]["not_instrumented"] == {"map too small": 10}


def test_death_of_the_program(target: Path) -> None:
    found = measure([str(target), "kill", "23"])
    assert found["status"] == 128 + signal.SIGKILL
    assert found["summary"]["launches_instrumented"] == 23
    kept = sum(instance[2] for instance in found["instances"])  # of a reading in between; seldom any
    assert found["summary"]["lost"] == 23 - kept
    assert f"the counts of up to {23 - kept} launches are lost" in found["said"][0]


@pytest.mark.every(2)
@pytest.mark.parametrize("mode", ["threads", "reload", "destroy", "large"])
def test_an_agent_that_is_short_of_memory_does_not_hurt(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    preload = tmp_path / "short_memory.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", preload, HERE / "short_memory.c", "-ldl"], check=True)
    monkeypatch.setattr("gpubpf.session.session.ANSWER_WAIT", 1.0)
    start = time.monotonic()
    for seed in range(12):
        environment = [f"SHORT_MEMORY={(5, 20, 60)[seed % 3]}", f"SHORT_MEMORY_SEED={seed * 1000}"]
        command = ["env", f"LD_PRELOAD={preload}", *environment, str(target), mode, "20"]
        with fake_tool.session(command, wanted=(), image_wait=1.0) as session:
            pass
        assert session.status == 0, seed
    assert time.monotonic() - start < 100


def test_nothing_is_lost_when_a_busy_program_is_told_to_end(target: Path) -> None:
    found = measure([str(target), "busyterm", "50"])
    assert found["status"] == 143
    # "lost" is a bound: each of the four threads may be stopped inside a launch that the last reading did not wait for.
    assert counted(found)[2] > 4 and found["summary"]["lost"] <= 4


@pytest.mark.parametrize(
    ("command", "status"), [(["/no/such"], 127), (["no-such-command"], 127), (["/tmp"], 126)]
)
def test_commands_that_cannot_run(command: list[str], status: int) -> None:
    with pytest.raises(SessionError) as caught, fake_tool.session(command):
        pass
    assert caught.value.status == status


def test_another_tools_injection_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "/other.so")
    with pytest.raises(SessionError, match="CUDA_INJECTION64_PATH is set"), fake_tool.session(["true"]):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="another user needs root")
def test_under_sudo_the_command_runs_as_who_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = pwd.getpwnam("nobody")
    monkeypatch.setenv("SUDO_USER", "nobody")
    out = tmp_path / "out"
    out.touch()
    out.chmod(0o666)
    for parent in [tmp_path, *list(tmp_path.parents)[:3]]:
        parent.chmod(parent.stat().st_mode | 0o755)
    # The checkout may be where that user gets nowhere: under /root.
    monkeypatch.setattr(agent, "LIBRARY", Path(shutil.copy(agent.LIBRARY, tmp_path)))
    assert (
        measure(["sh", "-c", f"echo $(id -u) $(id -G) $HOME $USER $SUDO_USER > {quoted(out)}"], wanted=())[
            "status"
        ]
        == 0
    )
    assert out.read_text() == f"{user.pw_uid} {user.pw_gid} {user.pw_dir} nobody\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="another user needs root")
def test_another_users_program_is_traced(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUDO_USER", "nobody")
    # The checkout may be where that user gets nowhere: under /root.
    monkeypatch.setattr(agent, "LIBRARY", Path(shutil.copy(agent.LIBRARY, target.parent)))
    for parent in [target.parent, *list(target.parent.parents)[:3]]:
        parent.chmod(parent.stat().st_mode | 0o755)
    assert counted(measure([str(target)])) == (23, 23, 23)
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "agent.so").touch()
    monkeypatch.setattr(agent, "LIBRARY", private / "agent.so")
    with pytest.raises(SessionError, match="nobody cannot read"):
        measure([str(target)])


@pytest.mark.skipif(os.geteuid() != 0, reason="another user needs root")
def test_a_program_whose_command_changes_its_user_is_traced(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command runs as root, and starts the program as somebody else, as services do."""
    monkeypatch.setattr(agent, "LIBRARY", Path(shutil.copy(agent.LIBRARY, target.parent)))
    for parent in [target.parent, *list(target.parent.parents)[:3]]:
        parent.chmod(parent.stat().st_mode | 0o755)
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", str(target)]
    assert counted(measure(command)) == (23, 23, 23)
    assert counted(measure(["sh", "-c", shlex.join(command) + "; true"])) == (23, 23, 23)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user needs root")
def test_a_daemon_of_another_user_counts_as_missed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has left its parents, so anybody could have started it."""
    monkeypatch.setattr(agent, "LIBRARY", Path(shutil.copy(agent.LIBRARY, target.parent)))
    for parent in [target.parent, *list(target.parent.parents)[:3]]:
        parent.chmod(parent.stat().st_mode | 0o755)
    done = target.parent / "daemon-done"
    done.unlink(missing_ok=True)
    begin = f"while [ $(ps -o ppid= -p $PPID) != 1 ]; do sleep 0.1; done; {shlex.quote(str(target))}"
    as_other = f"setpriv --reuid=65534 --regid=65534 --clear-groups sh -c {shlex.quote(begin)}"
    daemon = f"({as_other}; touch {shlex.quote(str(done))}) >&- 2>&- &"
    wait = f"while [ ! -e {shlex.quote(str(done))} ]; do sleep 0.1; done"
    found = measure(["sh", "-c", f"sh -c {shlex.quote(daemon)}; {wait}"], wanted=())
    assert found["summary"]["processes"]["missed"] == {"another user": 1}


def test_descendants(tmp_path: Path) -> None:
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    ) as shell:
        assert shell.stdout is not None
        inner = int(shell.stdout.readline())
        assert traceable.descends(inner, shell.pid) and traceable.descends(inner, os.getpid())
        assert not traceable.descends(shell.pid, inner) and not traceable.descends(shell.pid, shell.pid)
        assert not traceable.descends(1, os.getpid()) and not traceable.descends(2**22 - 1, os.getpid())
        os.kill(inner, signal.SIGKILL)


@pytest.mark.parametrize("mode", ["threads", "shapes", "destroy", "reload", "capture", "large", "_exit"])
def test_under_sanitizers(target: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = agent.LIBRARY.parent / "sanitize" / agent.LIBRARY.name
    if not library.exists():
        if os.environ.get("GPUBPF_REQUIRE_SANITIZE") == "1":
            pytest.fail("run make -C lib/gpubpf/agent SANITIZE=1")
        pytest.skip("needs make -C lib/gpubpf/agent SANITIZE=1")
    runtime = subprocess.check_output(["g++", "-print-file-name=libasan.so"], text=True).strip()
    monkeypatch.setattr(agent, "LIBRARY", library)
    monkeypatch.setenv(
        "ASAN_OPTIONS", "detect_leaks=0"
    )  # what an agent keeps is kept for as long as the process lives
    found = measure(["env", f"LD_PRELOAD={runtime}", str(target), mode, "20"])
    assert found["status"] == (4 if mode == "_exit" else 0)
    assert found["summary"]["lost"] == 0


def test_users_that_are_not_there() -> None:
    with pytest.raises(SessionError, match="there is no user"):
        fake_tool.session(["true"], user="nosuchuser")


# --- the tool's own end ---


class Tool:
    """fake_tool.py as a process of its own."""

    def __init__(self, target: Path, place: Path, mode: str, number: int, **options: Any) -> None:
        self.target = target
        self.result = place / "result.json"
        self.output = place / "output"
        output, part = quoted(self.output), quoted(f"{self.output}.part")
        command = f"{quoted(target)} {mode} {number} > {part}; echo status $? >> {part}; mv {part} {output}"
        self.process = subprocess.Popen(
            [sys.executable, HERE / "fake_tool.py", self.result, repr(options), "--", "sh", "-c", command],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_until_attached(self) -> None:
        assert self.process.stderr and self.process.stderr.readline() == "attached\n"

    def wait_for_launches(self) -> None:
        """Wait until a program that sleeps after each launch has slept 50 times since the attach."""

        def sleeps() -> int:
            programs = (pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._runs(pid))
            return sum(int(traceable.status(pid)["voluntary_ctxt_switches"]) for pid in programs)

        deadline, before = time.monotonic() + 100, sleeps()
        while sleeps() < before + 50:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def _runs(self, pid: int) -> bool:
        """Return whether a process is this tool's program."""
        try:
            return os.getsid(pid) == self.process.pid and os.readlink(f"/proc/{pid}/exe") == str(self.target)
        except OSError:
            return False

    def program_output(self) -> str:
        """Wait for the program to end, and return what it printed."""
        deadline = time.monotonic() + 100
        while not self.output.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return self.output.read_text()

    def found(self) -> dict[str, Any]:
        return dict(json.loads(self.result.read_text()))


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.01, 0.1])
def test_killing_the_tool_under_load_does_not_hurt(target: Path, tmp_path: Path, delay: float) -> None:
    tool = Tool(target, tmp_path, "threads", 500_000)
    tool.wait_until_attached()
    time.sleep(delay)
    tool.process.kill()
    tool.process.wait()
    assert tool.program_output() == "launched 4000000\nstatus 0\n"


@pytest.mark.long
def test_a_tool_that_is_stopped_holds_the_program_up_for_seconds_only(target: Path, tmp_path: Path) -> None:
    start = time.monotonic()
    tool = Tool(target, tmp_path, "reload", 5, stop=True)
    try:
        assert tool.program_output() == "launched 5\nstatus 0\n"
        assert time.monotonic() - start < 30
    finally:
        tool.process.kill()
        tool.process.wait()


def test_sigterm_prints_and_leaves(target: Path, tmp_path: Path) -> None:
    tool = Tool(target, tmp_path, "slow", 3000)
    tool.wait_until_attached()
    tool.wait_for_launches()
    tool.process.terminate()
    assert tool.process.wait(60) == 0
    assert not tool.output.exists()  # the program still runs
    found = tool.found()
    assert 0 < found["summary"]["launches_instrumented"] < 3000
    # What a machine that stood still has lost is said.
    seen = sum(i[2] for i in found["instances"])
    assert seen + found["summary"]["lost"] == found["summary"]["launches_instrumented"], found["summary"]
    assert tool.program_output() == "launched 3000\nstatus 0\n"


def test_ctrl_c_ends_both_and_nothing_is_lost(target: Path, tmp_path: Path) -> None:
    tool = Tool(target, tmp_path, "slow", 5000)
    tool.wait_until_attached()
    tool.wait_for_launches()
    os.killpg(tool.process.pid, signal.SIGINT)
    assert tool.process.wait(60) == 130  # sh and the program died of it
    found = tool.found()
    assert 0 < found["summary"]["launches_instrumented"] < 5000
    assert found["summary"]["lost"] == 0
    assert sum(i[2] for i in found["instances"]) == found["summary"]["launches_instrumented"]


@pytest.mark.every(2)
def test_duration_ends_the_measurement_not_the_program(target: Path, tmp_path: Path) -> None:
    began = time.monotonic_ns()
    tool = Tool(target, tmp_path, "slow", 3000, duration=1)
    assert tool.process.wait(60) == 0
    took = time.monotonic_ns() - began
    assert tool.program_output() == "launched 3000\nstatus 0\n"
    found = tool.found()
    assert 0 < found["summary"]["launches_instrumented"] < 3000
    assert 0.9e9 < found["summary"]["duration_ns"] < took


def test_intervals(target: Path, tmp_path: Path) -> None:
    tool = Tool(target, tmp_path, "slow", 800, interval=0.25)
    assert tool.process.wait(60) == 0
    found = tool.found()
    assert found["shown"] >= 3
    assert found["instances"][0][2] == 800


# --- hostile and broken agents ---


def connect_and(act: Callable[[socket.socket], None]) -> list[str]:
    """Return the notices of a session while a process of the user does `act` with its socket."""
    said: list[str] = []
    with fake_tool.session(["sleep", "0.5"], note=said.append, wanted=()) as session:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect("\0" + session.socket_name[1:])
            act(peer)
            for _ in session.intervals():
                pass
        assert session.summary()["launches_seen"] == 0
        said += session.summary().get("processes", {}).get("missed", {})
    return said


def test_garbage_is_refused() -> None:
    said = connect_and(lambda peer: peer.sendall(struct.pack("<II", Message.NAME, 4) + b"\xff" * 4))
    assert any("a message that is too short" in line for line in said)
    said = connect_and(lambda peer: peer.sendall(struct.pack("<II", Message.NAME, 1 << 31)))
    assert any("too long" in line for line in said)


def snapshot_of(size: int, context: int = 0) -> bytes:
    """A snapshot of nothing, with a memory file of `size` bytes."""
    return protocol.frame(Message.SNAPSHOT, struct.pack("<4IQQIII", 0, context, 0, 0, size, 0, 0, 0, 0))


def test_a_flood_of_garbage_is_no_flood_of_notices() -> None:
    said: list[str] = []
    with fake_tool.session(["sleep", "0.3"], note=said.append, wanted=()) as session:
        for _ in range(30):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect("\0" + session.socket_name[1:])
                peer.sendall(struct.pack("<II", Message.NAME, 1 << 31))
                while peer.recv(4096):  # until it is turned out
                    pass
    assert len([line for line in said if "too long" in line]) == 10


def test_claims_without_memory_behind_them_are_refused() -> None:
    def act(peer: socket.socket) -> None:
        file = os.memfd_create("maps")
        os.ftruncate(file, 1 << 39)
        head = struct.pack("<4IQQI", 0, 0, 0, 0, 1 << 39, 0, 1)
        array = struct.pack("<8IQI", 0, 0, 1, 1, 1, 1, 1, 1, 1, 1) + struct.pack(
            "<IQQQ", 0, 0, 1 << 39, 1 << 36
        )
        rest = struct.pack("<II", 0, 0)
        socket.send_fds(peer, [protocol.frame(Message.SNAPSHOT, head + array + rest)], [file])
        os.close(file)

    assert any("a snapshot larger than its file" in line for line in connect_and(act))


@pytest.mark.parametrize(
    "kind, payload, refusal",
    [
        (
            Message.RING,
            struct.pack("<5IQQ", 0, 0, 0, 1, 4, 4096, 48),
            "a ring that was not requested",
        ),
        (
            Message.RING,
            struct.pack("<5IQQ", 9, 0, 0, 1, 4, 4096, 48),
            "a ring that was not requested",
        ),
        (Message.LOG, struct.pack("<Q", 4096), "an unexpected message"),
        (Message.STUBS, struct.pack("<I", 1), "an unexpected message"),  # before its greeting
        (Message.STACK, struct.pack("<II", 1, 1 << 30), "a count larger than its message"),
    ],
)
def test_files_that_nobody_asked_for_are_refused(kind: int, payload: bytes, refusal: str) -> None:
    def act(peer: socket.socket) -> None:
        file = os.memfd_create("x")
        socket.send_fds(peer, [protocol.frame(kind, payload)], [file])
        os.close(file)

    before = len(os.listdir("/proc/self/fd"))
    assert any(refusal in line for line in connect_and(act))
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_log_that_is_none_is_refused() -> None:
    said: list[str] = []
    follow = Follow(log_records=4096)
    with fake_tool.session(["sleep", "0.5"], note=said.append, wanted=(), follow=follow) as session:
        for seals in (0, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect("\0" + session.socket_name[1:])
                file = os.memfd_create("log", os.MFD_ALLOW_SEALING)
                os.ftruncate(file, 4096)
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
                socket.send_fds(peer, [protocol.frame(Message.LOG, struct.pack("<Q", 4096))], [file])
                os.close(file)
                while peer.recv(4096):
                    pass
        for _ in session.intervals():
            pass
    assert len([line for line in said if "an invalid log" in line]) == 2


def hello_and_stubs(peer: socket.socket) -> None:
    hello = protocol.frame(Message.HELLO, struct.pack("<3I", PROTOCOL_VERSION, 0, 4) + b"fast" + bytes(4))
    stubs = protocol.frame(Message.STUBS, struct.pack("<I", 0))
    with open(os.memfd_create("control"), "wb") as file:
        socket.send_fds(peer, [hello + stubs], [file.fileno()])
    peer.recv(1 << 16)


def test_a_process_that_does_not_wait_to_be_attached_to_is_no_secret() -> None:
    def act(peer: socket.socket) -> None:
        hello_and_stubs(peer)
        peer.shutdown(socket.SHUT_RDWR)

    said = connect_and(act)
    assert any("1 process ended or continued before the tool could attach" in line for line in said)
    assert "not reached in time" in said


def test_the_time_of_every_process_begins_when_they_are_watched() -> None:
    """And not when the tool has prepared its report: it begins to count at once."""
    plan = Plan(device.Device("sim"))
    session = Session(
        Targets(all_processes=True), plan, workers.SidecarBuilder(lambda image, target: Sidecar())
    )
    session._started = time.monotonic() - 3
    assert session._after_began(5) == session._started + 5


def test_an_attach_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process can keep its thread waiting for ever. The others are measured, and the measurement ends with them."""
    monkeypatch.setattr("gpubpf.session.session.JOIN_WAIT", 0.5)
    going_on, said = threading.Event(), list[str]()
    measured, stuck = (subprocess.Popen(["sleep", "60"]) for _ in range(2))

    def attach(self: Joining, pid: int, starting: int | None) -> None:
        if pid == stuck.pid:
            going_on.wait(60)

    monkeypatch.setattr(Joining, "_join", attach)
    with fake_tool.session([], [measured.pid, stuck.pid], note=said.append, wanted=()) as session:
        assert session._joining.under_way is False and not going_on.is_set()
        for _ in session.intervals():
            pass
        assert session.summary()["processes"]["missed"] == {reasons.FORBIDDEN: 1}
    assert said[0].startswith(f"pid {stuck.pid} (sleep) cannot be traced: the attach does not end;")
    with (
        pytest.raises(SessionError, match="the attach does not end"),
        fake_tool.session([], [stuck.pid], wanted=()),
    ):
        pass
    going_on.set()
    for process in (measured, stuck):
        process.kill()
        process.wait()


class Watcher:
    """Watches no process. close: what to do when the session closes it. arriving: the processes that it has not attached to."""

    blind = False

    def __init__(
        self, close: Callable[[], None] = lambda: None, arriving: dict[int, str] | None = None
    ) -> None:
        self.close, self._arriving, self.attaches = close, arriving or {}, True

    def stop_attaching(self) -> None:
        self.attaches = False

    def unattached(self) -> dict[int, str]:
        return self._arriving


def test_agents_stop_before_the_watcher_is_closed(target: Path) -> None:
    """A process can delay the watcher's end for seconds. The measurement does not last longer for it."""
    closing: list[int] = []

    def close() -> None:
        closing.append(time.monotonic_ns())
        until = time.monotonic() + 30
        while not session._measurement.all_processes()[0].last_drain and time.monotonic() < until:
            time.sleep(0.001)

    with fake_tool.session([str(target), "slow", "100000"], duration=0.2) as session:
        session._watcher = watcher = Watcher(close)  # type: ignore[assignment]
        for _ in session.intervals():
            pass
        session._child.kill()
        assert session._measurement.all_processes()[0].last_drain, "the agent was not asked"
        assert not watcher.attaches and 0 < session._measurement.ended_ns <= closing[0]
        found = fake_tool.result(session)
    assert found["summary"]["lost"] == 0 and 0 < counted(found)[2] == sum(i[2] for i in found["instances"])


def test_processes_that_come_too_late_are_counted_once(target: Path) -> None:
    """Not those whose hooks were live when the measurement ended, though their agent has detached by now."""
    with fake_tool.session([str(target), "slow", "100000"], duration=0.2) as session:
        arriving = {session._child.pid: "target", os.getpid(): "late"}
        session._watcher = Watcher(arriving=arriving)  # type: ignore[assignment]
        for _ in session.intervals():
            pass
        session._child.kill()
        processes = session.summary()["processes"]
    assert processes["measured"] == 1 and processes["missed"] == {reasons.TOO_LATE: 1}


def test_an_attach_that_fails_after_the_end_is_left_to_the_watcher() -> None:
    with fake_tool.session(["sleep", "60"], wanted=()) as session:
        pid = session._child.pid
        first = session.join(pid)
        session._measurement.stopped = True
        second = session.join(pid)
        session._measurement.stopped = False
        ends(session)
        assert (first, second) == (reasons.NO_DRIVER, reasons.TOO_LATE)
        assert session.summary()["processes"]["missed"] == {reasons.NO_DRIVER: 1}


def test_an_attach_that_is_not_over_is_counted_by_the_watcher() -> None:
    """Its process ends meanwhile, and then the measurement of every process."""
    said: list[str] = []
    with fake_tool.session(["sleep", "0.5"], note=said.append, wanted=()) as session:
        ours, agents = target_socket.pair()
        process = session._server.adopt(ours, os.getpid(), os.pidfd_open(os.getpid()))
        assert process is not None
        session._watcher = Watcher()  # type: ignore[assignment]
        with agents:
            hello_and_stubs(agents)
        for _ in session.intervals():
            pass
        assert process.sent_stubs and process.disconnected
        assert "missed" not in session.summary().get("processes", {})
    assert not any("before the tool could attach" in line for line in said)


def test_more_gpus_than_there_are_are_refused() -> None:
    context = protocol.frame(Message.CONTEXT, struct.pack("<II", 1, 1 << 20))
    assert any("an invalid GPU number" in line for line in connect_and(lambda peer: peer.sendall(context)))


def test_names_and_contexts_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubpf.process.limits.TEXT", 1000)
    monkeypatch.setattr("gpubpf.process.limits.CONTEXTS", 3)
    name = protocol.frame(Message.NAME, struct.pack("<II", 0, 500) + b"\x1b" * 500)
    said = connect_and(lambda peer: peer.sendall(name * 2))
    assert any("too many names" in line for line in said)

    def contexts(peer: socket.socket) -> None:
        with open(os.memfd_create("maps"), "wb") as file:
            for context in range(4):
                socket.send_fds(peer, [snapshot_of(0, context)], [file.fileno()])

    before = len(os.listdir("/proc/self/fd"))
    assert any("memory of too many contexts" in line for line in connect_and(contexts))
    assert len(os.listdir("/proc/self/fd")) <= before + 3  # what it had said before is kept


def connections(session: Session) -> Iterator[socket.socket]:
    """Yield new connections of this process to a session, without end. They stay open."""
    while True:
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(60)
        peer.connect("\0" + session.socket_name[1:])
        yield peer


def greet(peer: socket.socket) -> None:
    hello = protocol.frame(Message.HELLO, struct.pack("<3I", PROTOCOL_VERSION, 0, 4) + b"many" + bytes(4))
    with open(os.memfd_create("control"), "wb") as file:
        socket.send_fds(peer, [hello], [file.fileno()])


def ends(session: Session) -> None:
    session._child.send_signal(signal.SIGKILL)
    for _ in session.intervals():
        pass


def test_a_process_has_one_connection() -> None:
    """Each one that greets replaces the one before, so limits of a process cannot be multiplied."""
    said: list[str] = []
    with fake_tool.session(["sleep", "60"], note=said.append, wanted=()) as session:
        peers = [peer for peer, _ in zip(connections(session), range(10), strict=False)]
        greet(peers[0])
        for before, peer in pairwise(peers):
            greet(peer)
            assert before.recv(16) == b""  # it is closed
        live = [p for p in session._measurement.all_processes() if not p.disconnected]
        assert len(live) == 1
        for peer in peers:
            peer.close()
        ends(session)


@pytest.mark.parametrize("greeting", [False, True])
def test_a_process_cannot_connect_without_end(greeting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS_OF_PROCESS" if greeting else "GREETINGS", 5)
    said: list[str] = []
    with fake_tool.session(["sleep", "60"], note=said.append, wanted=()) as session:
        peers = []
        for peer, number in zip(connections(session), range(20), strict=False):
            peers.append(peer)
            if greeting and number < 5:
                greet(peer)
        session._server.settle(60)
        assert len(session._measurement.all_processes()) == 5
        for peer in peers[5:]:
            assert peer.recv(16) == b""
        ends(session)
        assert session.summary()["processes"]["missed"][reasons.UNHOOKED] == 1
        for peer in peers:
            peer.close()
    name = traceable.comm(os.getpid())
    assert [line for line in said if "connections" in line] == [
        f"pid {os.getpid()} ({name}) is not fully traced: it already has too many connections or files"
    ]


def test_all_processes_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one process has filled counts after it has disconnected."""
    for limit, most in (("TEXTS", 1000), ("UNFINISHED", 2000)):
        monkeypatch.setattr(limits, limit, most)
        monkeypatch.setattr(limits, f"{limit}_OF_USER", 0)
    name = protocol.frame(Message.NAME, struct.pack("<II", 0, 600) + b"n" * 600)
    said: list[str] = []
    with fake_tool.session(["sleep", "60"], note=said.append, wanted=()) as session:
        for peer, data in zip(connections(session), (name, name, name[:500] + bytes(9)), strict=False):
            greet(peer)
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            assert not peer.recv(16)
            peer.close()
        assert session._server._unfinished.taken == 0
        part = struct.pack("<II", Message.NAME, 1 << 20) + bytes(1200)
        peers = [peer for peer, _ in zip(connections(session), range(2), strict=False)]
        for peer in peers:
            peer.sendall(part)
        assert not peers[1].recv(16)
        for peer in peers:
            peer.close()
        ends(session)
    assert [line.partition(": ")[2] for line in said if "exceed" in line] == [
        "the names and stacks of root exceed 0 MiB",
        "the incomplete messages of root exceed 0 MiB",
    ]


def test_a_malformed_message_leaves_room_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrives with it is not given back, because it was not counted."""
    with fake_tool.session(["sleep", "60"], wanted=()) as session:
        for peer, _ in zip(connections(session), range(3), strict=False):
            peer.sendall(struct.pack("<II", Message.NAME, 0xFFFFFFFF) + bytes(1000))
            assert not peer.recv(16)
            peer.close()
        assert session._server._unfinished.taken == 0
        ends(session)
        assert session.summary()["processes"]["missed"] == {reasons.UNHOOKED: 1}  # it is one process


def test_a_user_hands_over_few_files_that_may_never_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a message or without one. The tool cannot get rid of them."""
    monkeypatch.setattr(limits, "FOREIGN_FILES_OF_USER", 3)
    hello = protocol.frame(Message.HELLO, struct.pack("<3I", PROTOCOL_VERSION, 0, 4) + b"evil" + bytes(4))
    with fake_tool.session(["sleep", "60"], wanted=()) as session, open("/etc/passwd", "rb") as file:
        server = session._server
        for peer, data in zip(connections(session), (hello, hello[:9], hello), strict=False):
            (process,) = connected(session, 1)
            process.user = 1000  # all that runs here belongs to root
            socket.send_fds(peer, [data], [file.fileno()])
            peer.shutdown(socket.SHUT_WR)
            assert peer.recv(16) == b""
            peer.close()
            connected(session, 0)
        assert server._foreign_files == {1000: 3}
        ours, theirs = target_socket.pair()
        with theirs:
            assert server._admit(ours, os.getpid(), 1000) is None
        ends(session)


def connected(session: Session, count: int) -> list[TracedProcess]:
    """Wait until so many processes are connected, and return them."""
    until = time.monotonic() + 60
    while len(found := [p for p in session._measurement.active() if not p.disconnected]) != count:
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


@pytest.mark.skipif(bool(gpubpf_fuse.cannot_mount()), reason=gpubpf_fuse.cannot_mount())
def test_a_file_that_does_not_close_delays_nobody(tmp_path: Path) -> None:
    """A program serves it (FUSE), and close(2) waits for that program."""
    said: list[str] = []
    with (
        fake_tool.session(["sleep", "60"], note=said.append, wanted=()) as session,
        gpubpf_fuse.unanswered(tmp_path, closes=False) as place,
    ):
        bad, good = (peer for peer, _ in zip(connections(session), range(2), strict=False))
        file = os.open(place, os.O_RDWR)
        hello = protocol.frame(Message.HELLO, struct.pack("<3I", PROTOCOL_VERSION, 0, 4) + b"evil" + bytes(4))
        socket.send_fds(bad, [hello], [file])
        target_socket.discard(file)  # closing it here would wait as well
        assert bad.recv(16) == b""
        bad.close()
        good.sendall(struct.pack("<II", Message.NAME, 1 << 31))
        assert good.recv(16) == b""  # the server answers
        good.close()
        ends(session)
    assert any("a file that is not in memory" in line for line in said)


def test_settling_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody connects again and again."""
    with fake_tool.session(["sleep", "60"], wanted=()) as session:
        monkeypatch.setattr(session._server, "_accept", lambda: True)
        assert session._server.settle(60)
        ends(session)


def test_who_answers_for_a_process_that_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.scans, "user_of", lambda pid: 12345)
    with fake_tool.session(["sleep", "60"], wanted=()) as session, next(connections(session)):
        session._server.settle(60)
        assert [process.user for process in session._measurement.all_processes()] == [12345]
        ends(session)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_few_processes_of_other_users_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REFUSED", 3)
    monkeypatch.setattr(server.traceable, "descends", lambda pid, of: False)
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + sys.argv[1]); s.recv(1)"
    with fake_tool.session(["sleep", "60"], wanted=()) as session:
        name = session._server.socket_name[1:]
        for _ in range(5):
            subprocess.run([sys.executable, "-I", "-c", code, name], user=65534, check=True)
        assert len(session._server._refused) == 3
        ends(session)
        assert session.summary()["processes"]["missed"][reasons.OTHER_USER] == 3


def test_a_program_waits_for_a_tool_that_is_slow(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example because many processes start at once. The agent gives up 5 s after the tool's last message."""
    prompt = workers._welcome

    def slow(*arguments: Any) -> None:
        time.sleep(5.5)
        prompt(*arguments)

    monkeypatch.setattr(workers, "_welcome", slow)
    found = measure([str(target), "plain", "2"])
    assert counted(found) == (2, 2, 2) and found["said"] == []


def test_mistakes_of_our_own_do_not_leave_the_program_waiting(target: Path) -> None:
    def broken(image: bytes, device: Any) -> fake_tool.Sidecar:
        raise KeyError("oops")

    found = measure([str(target)], instrument=broken)
    assert found["status"] == 0 and "internal error, KeyError: 'oops'" in found["said"][0]


def test_a_missing_package_is_named_once(target: Path) -> None:
    def lacking(image: bytes, device: Any) -> fake_tool.Sidecar:
        raise ModuleNotFoundError("No module named 'zstandard'", name="zstandard.backend")

    found = measure([str(target)], instrument=lacking)
    lines = [line for line in found["said"] if "zstandard" in line]
    assert found["status"] == 0 and len(lines) == 1, found["said"]
    (line,) = lines
    assert line.startswith("modules are not instrumented: the Python package zstandard is missing in ")
    assert re.search(r" -m pip install zstandard$|bin/python3 instead of this interpreter$", line)


def test_a_control_block_that_shrinks_is_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubpf.session.session.ANSWER_WAIT", 0.1)  # it does not answer
    monkeypatch.setattr("gpubpf.session.session.DRAIN_WAIT", 0.1)

    def act(peer: socket.socket) -> None:
        file = os.memfd_create("control")
        payload = struct.pack("<3I", PROTOCOL_VERSION, 0, 4) + b"evil" + bytes(4)
        socket.send_fds(peer, [protocol.frame(Message.HELLO, payload)], [file])
        threading.Event().wait(0.1)
        os.close(file)

    connect_and(act)


def test_a_tool_that_fails_waits_for_its_command(tmp_path: Path) -> None:
    def tick() -> None:
        raise SessionError("cannot write")

    command = ["sh", "-c", f"sleep 0.5; echo done > {quoted(tmp_path)}/said"]
    with (
        pytest.raises(SessionError, match="cannot write"),
        fake_tool.session(command, wanted=()) as session,
    ):
        for _ in session.intervals(tick=tick, every=0.1):
            pass
    assert (tmp_path / "said").read_text() == "done\n"


def test_the_agent_is_built() -> None:
    assert agent.LIBRARY.exists(), "run script/setup, or make -C lib/gpubpf/agent"


def test_watching_every_process_takes_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(
        SessionError, match=r"^watching all processes requires root; use sudo, or name what to trace"
    ):
        tracing._targets(Options())


def test_what_files_hold_is_told_without_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "ask_driver", lambda: "there is no driver")
    monkeypatch.setattr(device, "LIBRARIES", Path("/nowhere"))

    def options(asked_for: str, files: list[str]) -> Options:
        return Options(TargetOptions(files=files), device=DeviceOptions(asked_for))

    for asked_for in ("auto", "sim"):
        assert tracing.target(options(asked_for, ["app"])).device == "sim"
    for asked_for, files in (("gpu", ["app"]), ("auto", [])):
        with pytest.raises(SessionError):
            tracing.target(options(asked_for, files))


# --- what memory programs cannot see ---


def test_what_is_not_probed_is_named_for_kernels_that_were_launched(target: Path) -> None:
    def instrument(image: bytes, target: Target) -> Sidecar:
        made = fake_tool.instrument(image, target)
        if not made.kernels:
            return made
        (kernel,) = made.kernels
        launched = replace(kernel, unprobed={"tex": 1, "cp.async.bulk.tensor": 2})
        never = replace(kernel, name="other", unprobed={"wmma.load": 5})
        return replace(made, kernels=(launched, never))

    found = measure([str(target), "plain", "3"], instrument=instrument, accesses=True)
    assert counted(found) == (3, 3, 3)
    assert list(found["summary"]["not_probed"].items()) == [("cp.async.bulk.tensor", 2), ("tex", 1)]
    assert "not_probed" not in measure([str(target), "plain", "3"], instrument=instrument)["summary"]


# --- memory ---


def allocations(*command: str) -> list[Allocation]:
    found = Allocations()
    with fake_tool.session(list(command), follow=Follow(log_records=256)) as session:
        for _ in session.intervals():
            pass
        for log in session.logs():
            found.add(log)
    return found.all()


def test_memory_at_addresses_that_the_program_chooses(target: Path) -> None:
    """Mappings, which end piece by piece or together, and another process's memory."""
    at, found = 0x700000000000, allocations(str(target), "maps")
    assert [(a.call, a.base - at, a.bytes, a.first_epoch, a.last_epoch) for a in found] == [
        ("cuMemMap", 0, 4096, 0, None),
        ("cuMemMap", 4096, 4096, 0, 0),
        ("cuMemMap", 8192, 4096, 0, 0),
        ("cuMemMap", 12288, 4096, 0, None),
        ("cuMemMap", 8192, 4096, 1, None),
        ("cuIpcOpenMemHandle", 1 << 20, 12345, 1, 1),
        ("cuIpcOpenMemHandle", 1 << 20, 12345, 2, None),
        ("cuMemPoolImportPointer", 2 << 20, 12345, 2, None),
    ]
    assert [a.shared for a in found] == [False, False, False, True, False, True, True, True]


@pytest.mark.parametrize(("copies", "copied"), [("1", False), ("2", None)])
def test_a_batch_of_copies_may_copy_from_anywhere(target: Path, copies: str, copied: bool | None) -> None:
    assert [a.copied for a in allocations(str(target), "batch", copies)] == [copied] * 4


# --- arrays by site ---

CELLS = MapDefinition("cells", "site_array", 4, 8, 1, None, "<u8")


def by_site(sites: int) -> dict[str, Any]:
    block = LaunchBlock(32, bases={"cells": 16}, capacities={"cells": 24})

    def instrument(image: bytes, target: Target) -> Sidecar:
        made = fake_tool.instrument(image, target)
        kernels = (replace(k, block=block, site_count=sites) for k in made.kernels)
        return replace(made, kernels=tuple(kernels))

    return {"instrument": instrument, "definitions": [CELLS]}


def test_all_shapes_of_a_kernel_share_an_array_by_site(target: Path) -> None:
    with fake_tool.session([str(target), "shapes", "30"], **by_site(5000)) as session:
        for _ in session.intervals():
            pass
    (found,) = session.instances("cells")  # the fake kernel adds 1 for each thread, in the first shard
    assert (found.grid, found.block_dim, found.launches) == ((0, 0, 0), (0, 0, 0), 30)
    assert found.capacity == 5000 | 3 << 32 and found.array.shape == (4, 5000)  # for 4 multiprocessors
    assert found.array[0, 0] == 30 and not found.array[1:].any()
    assert session.summary()["lost"] == 0


@pytest.mark.parametrize(
    ("sites", "shards"), [(4096, 256), (4097, 128), (100_000, 8), (1 << 20, 1), (1 << 21, 1)]
)
def test_a_kernel_with_many_sites_has_fewer_shards(
    target: Path, monkeypatch: pytest.MonkeyPatch, sites: int, shards: int
) -> None:
    """Its array has at most 8 MiB, unless one shard needs more; a GPU of 132 multiprocessors."""
    monkeypatch.setenv("FAKE_MULTIPROCESSORS", "132")
    with fake_tool.session([str(target), "plain", "9"], map_memory=64 << 20, **by_site(sites)) as session:
        for _ in session.intervals():
            pass
    assert session.summary()["not_instrumented"] == {}
    (found,) = session.instances("cells")
    assert found.array.shape == (shards, sites) and found.array[0, 0] == 9


def test_a_snapshot_has_only_the_used_part_of_map_memory(target: Path) -> None:
    """It is copied from the GPU at each reading."""
    with fake_tool.session([str(target), "plain", "9"], map_memory=64 << 20) as session:
        for _ in session.intervals():
            pass
    (found,) = session.instances("tallies")
    assert found.launches == 9
    sizes = [s.snapshot.size for p in session._measurement.processes for s in p.snapshots.values()]
    assert len(sizes) == 1 and found.array.nbytes <= sizes[0] < 1 << 20


def test_a_grid_beyond_all_maps_runs_as_it_is(target: Path) -> None:
    found = measure([str(target), "huge", "3"])
    assert (found["status"], counted(found)) == (0, (3, 3, 0))
    assert found["summary"]["not_instrumented"] == {"map too small": 3}


def test_a_grid_of_any_size_has_room_in_an_array_by_site(target: Path) -> None:
    with fake_tool.session([str(target), "huge", "3"], **by_site(5)) as session:
        for _ in session.intervals():
            pass
    assert [(one.launches, one.array[0].tolist()) for one in session.instances("cells")] == [(3, [3] * 5)]
    assert session.status == 0 and session.summary()["not_instrumented"] == {}


def test_a_module_with_more_sites_than_memory_runs_as_it_is(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MEMORY", str(2 << 20))
    options = by_site(1 << 20)
    with fake_tool.session([str(target), "plain", "9"], map_memory=1 << 16, **options) as session:
        for _ in session.intervals():
            pass
    assert session.instances("cells") == []
    assert session.summary()["not_instrumented"] == {"map too small": 9}

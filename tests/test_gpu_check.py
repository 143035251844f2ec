"""script/gpu-check: what it does with what it finds, and its questions, asked of the embedded device."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import types
from pathlib import Path

import pytest

from gpu import (
    answers,
    cases,
    facts,
    machine,
    overhead,
    pack,
    probes,
    questions,
    records,
    references,
    report,
    sanitizer,
    smoke,
    stage,
)
from gpu.questions import arithmetic
from gpu.stages import STAGES
from gpubpf.errors import CompileError
from gpubpf.lower.fragment import Argument, Fragment

ROOT = Path(__file__).resolve().parent.parent
NAMES = {path.stem for path in (ROOT / "examples").glob("*.cu")}
OURS = {path.stem for path in pack.PROGRAMS.glob("*.cu")}
needs_device = pytest.mark.skipif(
    not (machine.SIMULATOR / "libcuda.so.1").exists(),
    reason="the embedded device is not built (script/setup)",
)


def here(device: str = "sim", seconds: float = 60) -> machine.Machine:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'lib'}:{ROOT / 'script'}"}
    return machine.Machine(device, environment, time.monotonic() + seconds)


def wait_until_gone(pid: int) -> None:
    """A process that was killed. It would be there for a minute if it had not been."""
    ends = time.monotonic() + 20
    with contextlib.suppress(OSError):
        while "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < ends


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "script" / "gpu-check"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


# Not /dev/nvidiactl: NVIDIA's driver library makes that file itself, GPU or not.
@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="there is a GPU")
def test_it_refuses_without_a_gpu() -> None:
    done = run()
    assert done.returncode == 1 and done.stderr.startswith("gpu-check: ") and done.stderr.count("\n") == 1


def test_an_unknown_stage_is_a_usage_error() -> None:
    done = run("--stage", "facts,nonsense")
    assert done.returncode == 2 and "there are smoke, patched, answers, overhead" in done.stderr


def test_a_glob_that_matches_no_part_is_a_usage_error() -> None:
    done = run("--stage", "smoke", "--only", "1 *", "--only", "nosuch")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpu-check: no part of smoke matches 'nosuch'; --list shows the parts\n"


def test_parts_are_listed_without_a_gpu() -> None:
    done = run("--list", "--only", "* clocks", "--only", "*attach*", "--only", "clock64*")
    assert (done.returncode, done.stderr) == (0, "")
    listed = done.stdout.splitlines()
    assert {"smoke: 5 clocks", "smoke: 7 attach and leave", "facts: clock64 offsets"} <= set(listed) and len(
        listed
    ) < 9


def test_every_program_that_is_asked_for_is_there() -> None:
    assert {answer[2].split()[0] for answer in records.ANSWERS} == NAMES
    loads = [*overhead.LOADS, *overhead.FRAMEWORKS]
    words = [program for load in loads for program in (load.program, load.sim) if program]
    words += [program for pair in references.LOADS.values() for program in pair]
    words += [row[0] for row in (*answers.SAME, *sanitizer.PROGRAMS, *sanitizer.COSTS.values())]
    words += ["programs/gridbarrier 20", "programs/handles", "programs/first"]
    words += re.findall(r'"(programs/[^"]+)"', Path(cases.__file__).read_text())
    for text in words:
        name = text.split()[0]
        if name.endswith(".py"):
            assert (pack.PROGRAMS.parent / name).exists(), name
        else:
            folder, _, stem = name.rpartition("/")
            assert stem in (OURS if folder == "programs" else NAMES), name
    for tool, options in overhead.MODES.values():
        text = (ROOT / "tools" / f"{tool}.py").read_text() + (ROOT / "lib/gpubpf/show/options.py").read_text()
        text = text.replace("--sample-{what}", "--sample-blocks")
        assert all(f'"{option}"' in text for option in re.findall(r"(?<!\S)--?\w[\w-]*", options)), options
    assert {mode for load in loads for mode in load.modes} <= set(overhead.MODES)


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("device", ["gpu", "sim"])
def test_parts_of_a_stage_have_names_of_their_own_and_fit_into_its_time(name: str, device: str) -> None:
    parts = STAGES[name](here(device))
    names = [part.name for part in parts]
    assert len(set(names)) == len(names) > 0
    assert all(part.seconds <= 240 for part in parts)


def test_stages_come_in_the_order_of_their_worth_and_risk() -> None:
    """What may leave the GPU in a bad state comes after everything that measures the tools."""
    order = [
        "smoke",
        "patched",
        "answers",
        "overhead",
        "facts",
        "frameworks",
        "matrices",
        "sanitizer",
        "references",
    ]
    assert list(STAGES) == order
    risky = {part.name for part in STAGES["matrices"](here("gpu"))}
    assert risky == {"capture", "capture during a wait", "spinning kernel"}
    assert not risky & {part.name for name in order[:6] for part in STAGES[name](here("gpu"))}
    assert all(
        "null" in load.modes
        for load in overhead.LOADS
        if "graph" not in load.name and "records" not in load.name
    )


def test_packed_runtimes_are_those_that_programs_ask_for() -> None:
    ways = {name.partition("-")[2] for name in cases.RUNTIMES}
    assert ways == set(pack.RUNTIMES) and (f"shared-{pack.OWN}",) == cases.SIM_RUNTIMES


def test_the_manual_has_every_question_and_stage() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    rows = "| hardware | what has been verified |\n|---|---|\n"  # as in a report
    assert rows in text
    for question in questions.QUESTIONS:
        assert f"| {question.name} |" in text, question.name
    for name in STAGES:
        assert f"`{name}`" in text


# --- stages ---


def test_a_part_that_fails_ends_nothing(tmp_path: Path) -> None:
    def fails() -> stage.Result:
        raise machine.Failure("why")

    def lacks() -> stage.Result:
        raise machine.Missing("what")

    def breaks() -> stage.Result:
        return {"x": {}["absent"]}

    parts = [
        stage.Part("right", lambda: {"answer": 1}, 1),
        stage.Part("wrong", lambda: {"wrong": "it is 2"}, 1),
        stage.Part("fails", fails, 1),
        stage.Part("lacks", lacks, 1),
        stage.Part("breaks", breaks, 1),
        stage.Part("long", dict, 1000),
        stage.Part("left out", dict, 1),
    ]
    result = stage.run_stage("facts", parts, here(), ["[!l]*", "l[ao][cn]*"], tmp_path)
    states = [(part["name"], part["state"]) for part in result["parts"]]
    right = [
        ("right", "done"),
        ("wrong", "wrong"),
        ("fails", "failed"),
        ("lacks", "missing"),
        ("breaks", "failed"),
    ]
    assert states == [*right, ("long", "not reached")]
    assert json.loads((tmp_path / "facts.json").read_text()) == result
    assert result["note"] == "embedded device, not run on hardware"


def test_a_command_that_does_not_end_is_killed_with_what_it_started() -> None:
    code = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid); time.sleep(60)"
    with pytest.raises(machine.Failure, match="timed out after 1 s") as raised:
        here().start([sys.executable, "-uc", code], 1)
    wait_until_gone(int(str(raised.value).rsplit(" ", 1)[1]))


def test_a_part_has_no_more_time_than_its_limit(tmp_path: Path) -> None:
    """Though each of its commands may take longer, and the whole stage, too."""
    device = here("gpu")

    def sleeps() -> stage.Result:
        for _ in range(3):
            device.start(["sleep", "0.6"], 50)
        return {}

    parts = [stage.Part("long", sleeps, 1), stage.Part("next", dict, 1), stage.Part("may", sleeps, 1, 30)]
    found = stage.run_stage("facts", parts[:2], device, (), tmp_path)["parts"]
    assert [part["state"] for part in found] == ["failed", "done"] and device.left() > 50
    assert re.match(
        r"not done in 1 s: (timed out after 1 s; last output: nothing|no time is left)$", found[0]["why"]
    )
    device.environment = {}
    found = stage.run_stage("facts", parts[2:], device, (), tmp_path)["parts"]
    assert found[0]["state"] == "done"


def test_a_part_of_smoke_may_use_the_time_that_others_left(tmp_path: Path) -> None:
    device = here("gpu", 100)

    def left() -> stage.Result:
        return {"left": round(device.left())}

    parts = [stage.Part(name, left, 20) for name in "abc"]
    found = stage.run_stage("smoke", parts, device, (), tmp_path, stops=True)["parts"]
    assert [part["left"] for part in found] == pytest.approx([60, 80, 100], abs=10)


def test_what_was_found_and_begun_is_written_whenever_the_stage_is_ended(tmp_path: Path) -> None:
    written = tmp_path / "facts.json"

    def looks() -> stage.Result:
        found = json.loads(written.read_text())["parts"]
        assert [(part["name"], part["state"]) for part in found] == [("first", "done"), ("second", "ended")]
        return {"seen": Path("no JSON")}

    stage.run_stage(
        "facts", [stage.Part("first", dict, 1), stage.Part("second", looks, 1)], here(), (), tmp_path
    )
    found = json.loads(written.read_text())["parts"]
    assert [part["state"] for part in found] == ["done", "done"] and found[1]["seen"] == "no JSON"
    assert [path.name for path in tmp_path.iterdir()] == ["facts.json"]


def test_a_later_run_keeps_what_an_earlier_one_found(tmp_path: Path) -> None:
    """As with --only, and with --done and the folder that the results go to."""
    machines = here("gpu"), here("gpu"), here("sim")
    written = tmp_path / "facts.json"

    def run_on(number: int, found: dict[str, int], only: str = "*") -> None:
        parts = [
            stage.Part(name, lambda n=n: {"found": n}, 1000 if n == 0 else 1) for name, n in found.items()
        ]
        machines[number].facts["driver"] = f"58{number}"
        result = stage.run_stage("facts", parts, machines[number], [only], tmp_path)
        assert {part["name"] for part in result["parts"]} <= set(found)

    def known() -> list[tuple[str, int | None, str]]:
        runs = stage.runs(json.loads(written.read_text()))
        return [
            (part["name"], part.get("found"), run["machine"]["driver"])
            for run in runs
            for part in run["parts"]
        ]

    run_on(0, {"a": 1, "b": 2, "c": 0})
    run_on(1, {"a": 0, "b": 3, "c": 4, "d": 5}, "[abc]")
    a, b, c = ("a", 1, "580"), ("b", 3, "581"), ("c", 4, "581")
    assert known() == [a, ("a", None, "581"), b, c]
    assert report.done(tmp_path, "gpu") == {("facts", "a"), ("facts", "b"), ("facts", "c")}
    run_on(1, {"d": 5}, "nothing")
    run_on(2, {"a": 7})
    assert set(known()) == {a, ("a", None, "581"), b, c, ("a", 7, "582")}
    assert report.done(tmp_path, "sim") == {("facts", "a")}
    text = report.write(tmp_path, tmp_path / "results").read_text()
    assert "driver 580" in text and "driver 581" in text and "driver 582" not in text


def test_an_older_result_does_not_count_because_it_was_kept(tmp_path: Path) -> None:
    kept = result("facts", part("a"), part("b"))
    again = result("facts", part("a", "wrong"), date="2026-01-02 04:00 UTC")
    (tmp_path / "other.json").write_text(json.dumps(again))
    (tmp_path / "facts.json").write_text(json.dumps(kept))
    stage.run_stage("facts", [stage.Part("c", dict, 1)], here("gpu"), (), tmp_path)
    assert report.done(tmp_path, "gpu") == {("facts", "b"), ("facts", "c")}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"stage": "smo', "Unterminated string"),
        ("\udcff", "can't decode"),
        pytest.param("[" * 100_000, "maximum recursion", id="deep"),
        ('{"parts": []}', "no valid stage, date, device, commit, machine"),
        ("date", "no valid date"),
        ("name", "no valid name"),
        ("from", "no valid date, device, commit, machine"),
    ],
)
def test_a_damaged_file_is_named_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, why: str
) -> None:
    broken = result("facts", part("symbols", **({"from": {"machine": 1}} if text == "from" else {})))
    broken.pop(text, None)
    broken["parts"][0].pop(text if text != "from" else "", None)
    (tmp_path / "good.json").write_text(json.dumps(result("facts", part("handles"))))
    (tmp_path / "other.json").write_text('{"date": 1}')
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(broken) if text.isalpha() else text, errors="surrogateescape")
    assert report.done(tmp_path, "gpu") == {("facts", "handles")}
    assert "symbols" not in report.write(tmp_path, tmp_path / "results").read_text()
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith(f"gpu-check: skipping {bad}, which is damaged: ") and why in first
    assert len(others) == 1


ENDED = """
import importlib.machinery, importlib.util, pathlib, signal, sys, time
loader = importlib.machinery.SourceFileLoader("check", sys.argv[1])
check = importlib.util.module_from_spec(importlib.util.spec_from_loader("check", loader))
loader.exec_module(check)
from gpu import machine, stage
check.handle_signals()
here = machine.Machine("sim", {}, time.monotonic() + 60)
parts = [stage.Part("sleeps", lambda: vars(here.start(["/bin/sleep", "60"])))]
stage.run_stage("facts", parts, here, (), pathlib.Path(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ended_by_a_signal_it_leaves_nothing_running(tmp_path: Path, number: int) -> None:
    """As `timeout` and Ctrl-C end it: the JSON says what was begun, and what was started is gone."""
    command = [sys.executable, "-c", ENDED, str(ROOT / "script" / "gpu-check"), str(tmp_path)]
    written, started = tmp_path / "facts.json", list[int]()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while process.poll() is None and not (written.exists() and started):
            started = machine.descendants(process.pid) if written.exists() else []
        process.send_signal(number)
        assert process.stderr and process.stderr.read() == b""
    assert process.returncode == 128 + number and len(started) == 1
    assert json.loads(written.read_text())["parts"][-1]["state"] == "ended"
    wait_until_gone(started[0])


def test_one_of_each_kind_of_known_answer_comes_before_the_second_of_any() -> None:
    names = [part.name for part in answers.parts(here("gpu"))]
    tools = list(dict.fromkeys(answer[0] for answer in records.ANSWERS))
    kinds = [f"{tool} " for tool in tools] + [rf"{tool} .*-- static/" for tool in tools]
    kinds += [re.escape(f"same: threadhist -- {row[0]}") + "$" for row in answers.SAME]
    kinds += [re.escape(f"attached to: {program}") for program in answers.ATTACHED] + ["compute-sanitizer "]
    first = [next(index for index, name in enumerate(names) if re.match(kind, name)) for kind in kinds]
    assert max(first) < len(kinds) + len(
        answers.SAME
    )  # memtrace, too, is tried on each program whose results must be the same


def test_what_loads_libraries_below_a_command_is_told() -> None:
    found = answers.ways_in(here(), ["env", "NVTX_INJECTION64_PATH=other.so"])
    assert sorted(found) == ["CUDA_INJECTION64_PATH=/the/agent's", "NVTX_INJECTION64_PATH=other.so"]


def test_where_children_are_not_told_the_group_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "descendants", lambda pid: [])
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    with pytest.raises(machine.Failure, match="timed out after 1 s") as raised:
        here().start([sys.executable, "-c", code], 1)
    wait_until_gone(int(str(raised.value).rsplit(" ", 1)[1]))


def test_what_python_lacks_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu", dict)
    monkeypatch.setattr(machine, "PYTHON", ".".join(map(str, sys.version_info[:2])))
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: name == "numpy" or None)
    with pytest.raises(machine.Failure, match="has no llvmlite, pyarrow; use a Python that has"):
        machine.prepare("gpu", 1)


PLAIN = "heap: cudaSuccess, set\nturn 0: 0 of three\n"


@pytest.mark.parametrize(
    ("said", "instrumented", "wrong"),
    [
        (PLAIN, 3, ""),
        (PLAIN, 0, "no launch was instrumented: None"),
        (PLAIN.replace("cudaSuccess, set", "cudaErrorInvalidValue, not set"), 3,
         "the program prints 'heap: cudaErrorInvalidValue, not set' under memtrace, alone 'heap: cudaSuccess, set'"),
    ],
)  # fmt: skip
def test_a_limit_that_can_no_longer_be_set_is_wrong(
    monkeypatch: pytest.MonkeyPatch, said: str, instrumented: int, wrong: str
) -> None:
    fake = fake_machine(
        monkeypatch, PLAIN, said, [{"type": "summary", "launches_instrumented": instrumented}]
    )
    assert cases.printing(fake, "memtrace")["wrong"] == wrong


def fake_machine(
    monkeypatch: pytest.MonkeyPatch, plain: str, said: str, found: machine.Records
) -> machine.Machine:
    """A machine whose program prints `plain` alone, and `said` under a tool that has these records."""
    fake = here()
    monkeypatch.setattr(fake, "start", lambda *_: subprocess.CompletedProcess([], 0, plain, ""))
    monkeypatch.setattr(fake, "trace", lambda *_: (subprocess.CompletedProcess([], 0, said, ""), found))
    monkeypatch.setattr(fake, "program", str.split)
    return fake


def test_counts_of_two_contexts_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"type": "thread", "kernel": "count", "block_dim": [n, 1, 1], "runs": runs}
        for n, runs in ((32, 23), (64, 17))
    ]
    assert cases.contexts(fake_machine(monkeypatch, "x", "x", rows))["wrong"] == ""
    rows[1]["runs"] = 40
    assert cases.contexts(fake_machine(monkeypatch, "x", "x", rows))["wrong"].startswith(
        "counted 23 launches of 32 threads, 40 launches of 64 threads; right are"
    )


def test_a_runtime_whose_kernels_are_not_seen_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cases.runtime(fake_machine(monkeypatch, "runtime 11.8", "runtime 11.8", []), "shared-11.8")
    assert found["wrong"] == "vectorAdd stores [], not [4, 4, 4, 4, 3]; kernels seen: none"


@pytest.mark.parametrize(
    ("copy", "wrong"),
    [
        ({"setmaxnreg": 2, "ignored": "", "local": "0 bytes"}, ""),
        ({"setmaxnreg": 2, "ignored": "C7507: 'setmaxnreg' ignored", "local": "0 bytes"},
         "setmaxnreg is not heeded in the copy: C7507: 'setmaxnreg' ignored"),
        ({"setmaxnreg": 2, "ignored": "", "local": "232 bytes"},
         "the copy keeps 232 bytes of a thread in local memory, the original none"),
    ],
)  # fmt: skip
def test_a_copy_that_does_not_move_registers_is_wrong(
    monkeypatch: pytest.MonkeyPatch, copy: dict[str, object], wrong: str
) -> None:
    text = "round 1 1\ndigest ab\n"
    fake = fake_machine(monkeypatch, text, text, [{"type": "summary", "launches_instrumented": 1}])
    monkeypatch.setattr(cases, "assembled_copy", lambda *_: copy)
    assert cases.setmaxnreg(fake)["wrong"] == wrong


def test_the_drivers_version_is_nvmls_where_the_kernel_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nvml:
        @staticmethod
        def nvmlInit_v2() -> int:
            return 0

        @staticmethod
        def nvmlSystemGetDriverVersion(text: ctypes.Array[ctypes.c_char], size: int) -> int:
            text.value = b"580.1.2"
            return 0

    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: Nvml)
    assert machine.nvml_version() == "580.1.2"


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    earlier = result("facts", part("symbols"), part("handles", "wrong"), part("capture", "ended"))
    later = result("facts", part("handles"), part("symbols", "not reached"), date="2026-01-02 04:00 UTC")
    other = result("facts", part("clock64 offsets"), device="sim")
    for name, content in (("a", later), ("b", earlier), ("c", other)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert report.done(tmp_path, "gpu") == {("facts", "symbols"), ("facts", "handles")}
    with pytest.raises(machine.Failure, match="is not a directory"):
        report.done(tmp_path / "absent", "gpu")


LISTS = """
import importlib.machinery, importlib.util, sys
loader = importlib.machinery.SourceFileLoader("check", sys.argv[1])
check = importlib.util.module_from_spec(importlib.util.spec_from_loader("check", loader))
loader.exec_module(check)
check.pack.build_here = lambda: None  # no program is run
sys.exit(check.main(sys.argv[2:]))
"""


def script(monkeypatch: pytest.MonkeyPatch, parts: list[stage.Part]) -> types.ModuleType:
    """script/gpu-check as a module, whose smoke stage has these parts."""
    loader = importlib.machinery.SourceFileLoader("check", str(ROOT / "script" / "gpu-check"))
    spec = importlib.util.spec_from_loader("check", loader)
    assert spec
    check = importlib.util.module_from_spec(spec)
    loader.exec_module(check)
    monkeypatch.setattr(check, "STAGES", {"smoke": lambda here: parts})
    monkeypatch.setattr(check.pack, "build_here", lambda: None)
    monkeypatch.setattr(check.machine, "prepare", lambda device, seconds: here(device, seconds))
    monkeypatch.setattr(check.signal, "signal", lambda *_: None)
    return check


def test_building_takes_no_time_from_the_stages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check = script(monkeypatch, [stage.Part("1 first", dict, 2)])
    monkeypatch.setattr(check.pack, "build_here", lambda: time.sleep(3))
    monkeypatch.setenv("OUT", str(tmp_path))
    assert check.main(["--device", "sim", "--seconds", "3"]) == 0
    said = capsys.readouterr().out
    assert "1 done" in said and "--report" not in said


def test_a_part_of_smoke_that_is_not_reached_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check = script(monkeypatch, [stage.Part("1 first", dict, 1), stage.Part("2 second", dict, 1000)])
    monkeypatch.setenv("OUT", str(tmp_path))
    assert check.main(["--device", "sim", "--stage", "smoke"]) == 1
    assert f"smoke is not complete: run it again with --done {tmp_path}\n" in capsys.readouterr().out


def test_what_smoke_could_not_check_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks() -> stage.Result:
        raise machine.Missing("this Python has no torch")

    named = ("9 Triton under memtrace", "10 PyTorch under threadhist")
    check = script(
        monkeypatch, [stage.Part("1 first", dict, 1), *(stage.Part(name, lacks, 1) for name in named)]
    )
    monkeypatch.setenv("OUT", str(tmp_path))
    assert check.main(["--device", "sim", "--stage", "smoke"]) == 0
    told = "gpu-check: PyTorch and Triton were not checked: this Python has no torch;"
    assert f"{told} missing parts are run again with --done {tmp_path}\n" in capsys.readouterr().out


def test_results_that_cannot_be_written_are_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check = script(monkeypatch, [stage.Part("1 first", dict, 1)])
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUT", str(tmp_path / "file" / "folder"))
    assert check.main(["--device", "sim"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"gpu-check: cannot make {tmp_path}/file/folder for the results: Not a directory;")
    assert said.count("\n") == 1


@needs_device
def test_a_call_leaves_out_what_an_earlier_one_has_done(tmp_path: Path) -> None:
    def listed(*options: str) -> list[str]:
        command = [
            sys.executable,
            "-c",
            LISTS,
            str(ROOT / "script" / "gpu-check"),
            "--device",
            "sim",
            *options,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    whole = listed("--list")
    assert [*dict.fromkeys(line.partition(":")[0] for line in whole)] == list(STAGES)
    earlier = result(
        "facts", part("carry flag"), part("handles", "ended"), part("symbols", "wrong"), device="sim"
    )
    (tmp_path / "facts.json").write_text(json.dumps(earlier))
    left = listed("--list", "--done", str(tmp_path))
    assert set(whole) - set(left) == {"facts: carry flag"} and len(left) == len(whole) - 1


# --- the smoke stage ---


def smoke_part(device: machine.Machine, number: int) -> stage.Part:
    return next(part for part in smoke.parts(device) if part.name.startswith(f"{number} "))


def test_the_parts_of_the_smoke_stage_fit_into_its_time() -> None:
    parts = smoke.parts(here("gpu"))
    assert [int(part.name.split()[0]) for part in parts] == list(range(1, 11))
    assert sum(part.seconds for part in parts) <= smoke.SECONDS - 4
    assert not any(part.limit for part in parts)


@needs_device
def test_smoke_on_the_embedded_device(tmp_path: Path) -> None:
    """Of the parts that take a second; script/gpu-check --device sim --stage smoke runs all."""
    device = machine.prepare("sim", 90)
    parts = [part for part in smoke.parts(device) if part.name.split()[0] in ("1", "3", "8")]
    found = stage.run_stage("smoke", parts, device, (), tmp_path, stops=True)["parts"]
    assert [part["state"] for part in found] == ["done"] * 3, found
    assert found[0]["answer"].startswith("embedded device, not run on hardware; module loading: ")
    assert "; PTX compiler: works; " in found[0]["answer"]
    assert found[2]["answer"].startswith("these calls wait for the kernel: cuCtxSynchronize, ")
    assert found[2]["answer"].endswith("; no capture was invalidated")


@needs_device
@pytest.mark.parametrize(
    ("number", "environment", "why"),
    [
        (1, {"CUDASIM_DEVICES": "0"}, "the driver gives no context on GPU 0: .*CUDA_ERROR_NO_DEVICE"),
        (3, {"CUDASIM_HIDE_VARIABLES": "1"}, "all but .*; the code assumes: global and constant variables"),
    ],
)
def test_a_driver_that_differs_ends_the_smoke_stage(
    tmp_path: Path, number: int, environment: dict[str, str], why: str
) -> None:
    device = machine.prepare("sim", 90)
    device.environment = {**device.environment, **environment}
    never = stage.Part("never", lambda: pytest.fail("a part after the failure was run"))
    parts = [smoke_part(device, number), never]
    (found,) = stage.run_stage("smoke", parts, device, (), tmp_path, stops=True)["parts"]
    assert found["state"] in stage.BAD and re.search(why, found["why"]), found["why"]
    assert "\n" not in found["why"]


def launches(*errors: int | None) -> machine.Records:
    return [{"type": "launch", "method": "device", "clock_error_ns": error} for error in errors]


def kernel(name: str, ns: int, method: str, op: str = "kernel") -> dict[str, object]:
    return {"type": "op", "op": op, "name": name, "dur_ns": ns, "method": method}


SUMMARY = {"type": "summary", "lost": 0, "launches_instrumented": 0, "not_instrumented": {}}


@pytest.mark.parametrize(
    ("number", "records", "said", "why"),
    [
        (1, [], "undefined symbol: cuInit", "the agent cannot be loaded here: undefined symbol: cuInit"),
        (2, [SUMMARY | {"not_instrumented": {"load failed": 1}}], "",
         r"threadhist counts \[\] stores of vectoradd, not \[4, 4, 4, 4, 3\] \(.'load failed': 1.\)"),
        (4, [SUMMARY | {"records": 2, "lost": 3}, {"type": "exit"}], "", "shows 1 of 2 exits, 3 are lost"),
        (5, launches(), "", "launchlate, alone: no launch has a time of its own"),
        (5, launches(None, 10), "", "launchlate, alone: no launch has a time of its own"),
        (5, launches(9_000_000), "", "times on the host's clock are known to 9000000 ns only"),
        (6, [kernel("first", 9_000_000, "device")], "", "a kernel of 2000 us has 9000.0 us by the device probe"),
        (6, [kernel("first", 1_989_000, "device"), kernel("alone", 2_000_000, "stamp")], "", "has 1989.0 us by the device"),
        (6, [kernel("first", 2_000_100, "device")], "", "a kernel of 2000 us has no time by timing events"),
        (6, [kernel("first", 2_000_100, "stamp")], "", "that the device probe must time has method stamp, not device"),
        (9, [SUMMARY | {"not_instrumented": {"no PTX": 1}}], "digest 1",
         "memtrace instruments no launch of programs/triton_kernels.py softmax: .'no PTX': 1."),
        (10, [SUMMARY], "digest 1", "threadhist sees no launch of programs/torch_work.py ones"),
        (7, [SUMMARY], "", "threadhist -p instruments no launch of the running program: .'before ready': 9."),
    ],
)  # fmt: skip
def test_each_part_of_the_smoke_stage_can_fail(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    number: int,
    records: machine.Records,
    said: str,
    why: str,
) -> None:
    """A tool's records that are not right; 1: an agent that cannot be loaded."""
    device = here()
    status = 1 if "symbol" in said else 0
    done = subprocess.CompletedProcess([], status, said, said)
    monkeypatch.setattr(device, "start", lambda *_: done)
    monkeypatch.setattr(device, "trace", lambda *_: (subprocess.CompletedProcess([], 0, said, ""), records))
    monkeypatch.setattr(device, "program", str.split)
    monkeypatch.setattr(device, "needs", lambda *_: None)
    answer = {"answer": "every 32 ns", "agrees": True, "found": {"memfd": {"seen": True}}}
    monkeypatch.setattr(facts, "ask", lambda *_: dict(answer))
    attached = {
        "instrumented": {"threadhist": [0, {"before ready": 9}]},
        "us": {"threadhist": [1, 2, 1]},
        "notices": [],
        "wrong": "",
    }
    monkeypatch.setattr(answers, "attached", lambda *_, **__: attached)
    found = stage.run_stage("smoke", [smoke_part(device, number)], device, (), tmp_path)["parts"][0]
    assert found["state"] in stage.BAD and re.search(why, found["why"]), found["why"]


OWN = [kernel("first", 2_001_500, "device"), kernel("alone", 1_999_000, "stamp")]
BY_CUPTI = kernel("alone", 1_992_000, "cupti")
SILENT = "launchlate: note: CUPTI reported none of 1,012 operations; their times are from timing events"
REFUSED = "launchlate: note: CUPTI provides no timestamps: it is too old; using timing events instead"


@pytest.mark.parametrize(
    ("by_cupti", "said", "default", "wrong", "note"),
    [
        ([BY_CUPTI], "", [BY_CUPTI, kernel("h2d", 9, "cupti", "h2d")], "", "by default, CUPTI times copies and kernels"),
        ([BY_CUPTI], "", [OWN[1], kernel("h2d", 9, "stamp", "h2d")], "", "by default, CUPTI times nothing"),
        ([OWN[1]], "", OWN, "a kernel that CUPTI must time has method stamp, not cupti", ""),
        ([BY_CUPTI], "", [kernel("alone", 5_000, "cupti")], "a kernel of 2000 us has 5.0 us by CUPTI by default", ""),
        ([OWN[1]], REFUSED, OWN, "", "CUPTI was not used: CUPTI provides no timestamps: it is too old"),
        ([OWN[1]], SILENT, OWN, "", "CUPTI was not used: CUPTI reported none of 1,012 operations"),
    ],
)  # fmt: skip
def test_times_of_timing_events_are_not_taken_for_cuptis(
    monkeypatch: pytest.MonkeyPatch,
    by_cupti: machine.Records,
    said: str,
    default: machine.Records,
    wrong: str,
    note: str,
) -> None:
    def trace(
        tool: str, options: str, *_: object
    ) -> tuple[subprocess.CompletedProcess[str], machine.Records]:
        found = OWN if "--no-cupti" in options else by_cupti if "--cupti" in options else default
        return subprocess.CompletedProcess([], 0, "", said if "--cupti" in options else ""), found

    device = here("gpu")
    monkeypatch.setattr(device, "trace", trace)
    monkeypatch.setattr(device, "program", str.split)
    found = smoke.lengths(device)
    assert found["wrong"] == wrong and note in found["answer"]
    assert found["answer"].startswith("first: 2001.5 us by the device probe, 1999.0 us by timing events")
    assert ("CUPTI" in found["us"]) == (not said)


@pytest.mark.parametrize("said", [REFUSED, SILENT])
def test_an_error_of_the_clock_is_not_taken_for_one_with_cupti(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    def trace(
        tool: str, options: str, *_: object
    ) -> tuple[subprocess.CompletedProcess[str], machine.Records]:
        return subprocess.CompletedProcess([], 0, "", said if " --cupti" in options else ""), launches(310)

    device = here("gpu")
    monkeypatch.setattr(device, "trace", trace)
    monkeypatch.setattr(device, "program", str.split)
    monkeypatch.setattr(facts, "ask", lambda *_: {"answer": "every 32 ns; and more"})
    monkeypatch.setattr(smoke, "latency", bool)
    found = smoke.clocks(device)
    assert found["answer"].startswith(
        "globaltimer ticks every 32 ns; alone, times are known to 310 ns; not measured with CUPTI, because CUPTI "
    )
    assert not found["wrong"] and found["answer"].endswith(
        "; without the PTX compiler, times are known to 310 ns"
    )


def test_a_result_that_changes_under_a_tool_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    device = here()
    plain, traced = (subprocess.CompletedProcess([], 0, f"digest {n}\n", "it said this") for n in (1, 2))
    monkeypatch.setattr(device, "start", lambda *_: plain)
    monkeypatch.setattr(device, "trace", lambda *_: (traced, [SUMMARY]))
    found = smoke.alike(device, "threadhist", "programs/torch_work.py ones", plain, instrumented=False)
    assert found["wrong"] == "programs/torch_work.py ones ends differently under threadhist: it said this"


def test_pytorch_is_run_alone_once_and_its_images_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    device, begun = here(), list[str]()

    def start(command: list[str], *_: object) -> subprocess.CompletedProcess[str]:
        begun.append(" ".join(command))
        return subprocess.CompletedProcess([], 0, "first 90.5\ndigest 1\ndigest 2\n", "")

    def trace(tool: str, *_: object) -> tuple[subprocess.CompletedProcess[str], machine.Records]:
        said = "first 120.0\ndigest 1\n" + "digest 2\n" * (tool == "memtrace")
        more = {"launches_instrumented": 1, "overhead": {"images": 12, "image_bytes": 34567}}
        return subprocess.CompletedProcess([], 0, said, ""), [SUMMARY | more]

    monkeypatch.setattr(device, "start", start)
    monkeypatch.setattr(device, "trace", trace)
    monkeypatch.setattr(device, "program", str.split)
    monkeypatch.setattr(device, "needs", lambda *_: None)
    parts = {part.name.split()[0]: part for part in smoke.parts(device)}
    found = [parts[number].run() for number in ("9", "10")]
    assert [of["wrong"] for of in found] == ["", ""] and len(begun) == 1
    assert found[1]["answer"].endswith(": 90.5 ms alone, 120.0 ms with threadhist; 12 images, 34567 bytes")


# --- the packed file ---


def test_the_packed_ptxas_is_one_that_the_driver_can_load_from() -> None:
    assert machine.ptxas_folder("13.0") == machine.ptxas_folder("14.1") == machine.PLACE / "bin"
    assert machine.ptxas_folder("12.4") == machine.PLACE / "bin12"


# A program of the embedded device that runs on. A signal changes a byte of the driver's code, another one changes it back. The time of
# a launch in its first argument is that after the signal.
CHANGES = f"""
import ctypes, mmap, signal, sys, time
driver = ctypes.CDLL({str(machine.SIMULATOR / "libcuda.so.1")!r})
at = ctypes.cast(driver.cuMemFree_v2, ctypes.c_void_p).value + 1
byte = ctypes.c_ubyte.from_address(at)
def change(*_):
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(at & ~4095), ctypes.c_size_t(8192), 7) == 0
    byte.value ^= 1
    us[0] = sys.argv[1]
us = [100]
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, change)
for _ in range(1000 if sys.argv[-1] == "9" else 1):
    print("round", us[0], "1\\ndigest 1", flush=True)
    time.sleep(0.02)
"""


@pytest.mark.every(2)
@needs_device
@pytest.mark.parametrize(
    ("repairs", "wrong"), [(True, ""), (False, "tool leaves 1 bytes of the driver's code changed")]
)
def test_a_tool_that_leaves_a_hook_in_the_driver_is_wrong(
    monkeypatch: pytest.MonkeyPatch, repairs: bool, wrong: str
) -> None:
    device = here()

    def trace(
        tool: str, options: str, *_: object
    ) -> tuple[subprocess.CompletedProcess[str], machine.Records]:
        pid = int(options.split()[1])
        os.kill(pid, signal.SIGUSR1)
        if repairs:
            threading.Timer(1.5, os.kill, (pid, signal.SIGUSR2)).start()
        time.sleep(0.2)
        return subprocess.CompletedProcess([], 0, "", ""), [{"type": "summary", "launches_matched": 1}]

    after = "150" if repairs else "300"
    command = [sys.executable, "-c", CHANGES]
    monkeypatch.setattr(device, "trace", trace)
    monkeypatch.setattr(device, "program", lambda words: [*command, after, words.split()[-1]])
    monkeypatch.setattr(answers, "LEAVES_SECONDS", 20 if repairs else 0.2)
    found = answers.attached(device, "graph a b c 9", ["tool"], seconds=1)
    told = [] if repairs else ["launches take 3.0 times as long after tool left"]
    assert found["wrong"] == wrong and found["notices"] == told
    assert found["changed"] == ({} if repairs else {"tool": 1})


def test_breakpoints_of_others_are_no_difference() -> None:
    before = bytes(9000)
    assert answers.differences(before, before) == 0
    assert answers.differences(before, b"\xcc" + before[1:-1] + b"\1") == 1
    assert answers.driver_code(os.getpid()) == {}


@needs_device
def test_a_driver_that_is_too_old_for_the_programs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    device = here()
    device.facts["driver_cuda"] = "12.8"
    with pytest.raises(
        machine.Failure, match=r"of CUDA 12\.8 does not run.*--stage facts,frameworks,matrices"
    ):
        smoke_part(device, 1).run()


def test_the_packed_agent_replaces_one_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, content in (("place/agent", "packed"), ("agent", "stale")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "libgpubpf-agent.so").write_text(content)
    monkeypatch.setattr(machine, "PLACE", tmp_path / "place")
    monkeypatch.setattr(machine, "AGENT", tmp_path / "agent")
    machine.use_packed_agent()
    assert [file.read_text() for file in (tmp_path / "agent").iterdir()] == ["packed"]


def test_the_packed_file_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, place = tmp_path / "packed.tar.xz", tmp_path / "place"
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "PACKED", packed)
    monkeypatch.setattr(machine, "PLACE", place)
    with pytest.raises(machine.Failure, match="is missing; make it with"):
        machine.unpack()
    (tmp_path / "commit").write_text("abc\n")
    for content in ("one", "two"):
        (tmp_path / "examples").mkdir(exist_ok=True)
        (tmp_path / "examples" / "program").write_text(content)
        with tarfile.open(packed, "w:xz") as archive:
            archive.add(tmp_path / "examples", "./examples")
            archive.add(tmp_path / "commit", "./commit")
        machine.unpack()
        assert (place / "examples" / "program").read_text() == content
    (place / "examples" / "program").write_text("kept")
    machine.unpack()  # the same file: nothing to do
    assert (place / "examples" / "program").read_text() == "kept"


def test_packed_programs_find_the_packed_runtime_and_others_their_own() -> None:
    gpu = here("gpu")
    assert gpu.libraries([str(machine.PLACE / "programs" / "workloads"), "all"])
    assert gpu.libraries(["ncu", str(machine.PLACE / "examples" / "vectoradd")])
    assert not gpu.libraries(
        ["threadhist", "-o", str(machine.PLACE / "results"), "--", "python3", "train.py"]
    )
    with pytest.raises(machine.Missing):
        gpu.program("programs/absent 1")


@pytest.mark.parametrize("error", [CompileError("no bcc"), ModuleNotFoundError("no llvmlite")])
def test_packing_says_why_there_are_no_patches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    def patches() -> str:
        raise error

    monkeypatch.setattr(probes, "patches", patches)
    monkeypatch.setattr(pack, "run", lambda *_: None)
    assert pack.build_sanitizer(tmp_path, tmp_path, tmp_path) == str(error)


@needs_device
def test_a_running_program_is_patched_and_left(tmp_path: Path) -> None:
    """On the embedded device's own library, which patches at any time."""
    for tool in ("g++", "ptxas"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    if not (library := machine.SIMULATOR / "libsanitizer-public.so").exists():
        pytest.skip("the embedded device is built without Compute Sanitizer")
    pack.build_late(tmp_path, Path(os.environ.get("CUDA_INCLUDE", "/usr/local/cuda/include")))
    assert (tmp_path / "late.cubin").stat().st_size
    argument = Argument(name="map_counts", type="b64", kind="map_base", map="counts")
    adds = Fragment("on_exit", "{ red.global.add.u64 [%gpubpf_map_counts], 1; }", (argument,))
    head = ".version 8.0\n.target sm_80\n.address_size 64\n"
    (tmp_path / "patches.ptx").write_text(head + probes.patch("on_exit", adds))
    command = [tmp_path / "late", library, pack.PROGRAMS / "late.ptx", tmp_path / "patches.ptx"]
    environment = os.environ | {"LD_LIBRARY_PATH": str(machine.SIMULATOR)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    result = sanitizer.judged(done.returncode, done.stdout)
    assert not result["wrong"], done.stdout
    exits = {(one["phase"], one["graph"]): one["exits"] for one in result["phases"]}
    assert exits == {
        (phase, graph): sanitizer.LATE_EXITS if phase.startswith("patched") else 0
        for phase in ("alone", "patched", "unpatched", "patched again", "unsubscribed")
        for graph in (False, True)
    }


def test_what_a_program_that_is_patched_late_says() -> None:
    line = '{"phase":"%s","graph":%s,"result":%d,"us":1.0,"exits":5,"sum":%s}'
    phases = ("alone", "patched", "unpatched", "patched again", "unsubscribed")
    lines = [line % (phase, graph, phase == "patched", 3) for phase in phases for graph in ("false", "true")]
    answer = sanitizer.judged(0, "\n".join(lines))["answer"]
    assert "patched: error 1" in answer and "graph: 5 exits patched again" in answer
    assert (
        "results differ"
        in sanitizer.judged(0, "\n".join([*lines[:-1], lines[-1].replace("3}", "4}")]))["wrong"]
    )
    assert "status 1 after 1 of 10" in sanitizer.judged(1, lines[0])["wrong"]


def test_a_device_program_becomes_a_patch() -> None:
    argument = Argument(name="map_counts", type="b64", kind="map_base", map="counts")
    body = "{\n\tatom.global.add.u64 %rd1, [%gpubpf_map_counts], 1;\n}"
    text = probes.patch(
        "on_access", Fragment(function="on_access", ptx=body, arguments=(argument,), registers=2)
    )
    (head,) = re.findall(
        r"^\.visible \.func \(\.param \.b32 result\) countAccess\((.*)\)$", text, re.MULTILINE
    )
    assert head.count(".param") == 6 and body in text
    assert (
        text.index("ld.param.b64 %gpubpf_map_counts, [data];")
        < text.index(body)
        < text.index("st.param.b32 [result], 0;")
    )


# --- costs ---


def test_ratios_are_made_within_a_turn() -> None:
    first = {
        "alone": iter([(10.0, 8.0), (20.0, 16.0), (10.0, 10.0)]),
        "tool": iter([(11.0, 8.8), (22.0, 16.0), (12.0, 10.0)]),
    }
    found = overhead.by_turns({name: lambda n=name: next(first[n]) for name in first}, 3, here(), 60)
    assert found["turns"] == 3 and found["us"] == {"alone": [10.0, 10.0], "tool": [12.0, 10.0]}
    assert found["ratio"] == {"tool": [1.1, 1.1, 1.2]} and found["gpu_ratio"] == {"tool": [1.0, 1.0, 1.1]}


def test_a_way_that_fails_is_left_out_with_the_reason() -> None:
    def fails() -> overhead.Times:
        raise machine.Failure("why")

    found = overhead.by_turns({"alone": lambda: (1.0, 1.0), "tool": fails}, 2, here(), 60)
    assert found["failed"] == {"tool": "why"} and found["turns"] == 2 and not found["ratio"]
    with pytest.raises(machine.Failure, match="why"):
        overhead.by_turns({"alone": fails}, 2, here(), 60)


def test_no_turn_is_begun_that_would_take_too_long() -> None:
    found = overhead.by_turns({"alone": lambda: (1.0, 1.0)}, 3, here(), 0)
    assert found["turns"] == 1


@pytest.mark.parametrize(
    ("status", "instrumented", "wrong"),
    [
        (0, 5, ""),
        (0, 0, "threadhist: threadhist instrumented no launch"),
        (1, 5, "threadhist: the program fails with threadhist: why"),
    ],
)
def test_a_tool_that_measures_nothing_costs_nothing_and_is_wrong(
    monkeypatch: pytest.MonkeyPatch, status: int, instrumented: int, wrong: str
) -> None:
    def start(*_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, "round 1 1\n", "")

    def trace(*_: object) -> tuple[subprocess.CompletedProcess[str], machine.Records]:
        done = subprocess.CompletedProcess([], status, "round 1 1\n", "why")
        return done, [{"type": "summary", "launches_instrumented": instrumented}]

    fake = here()
    monkeypatch.setattr(fake, "start", start)
    monkeypatch.setattr(fake, "trace", trace)
    monkeypatch.setattr(fake, "program", str.split)
    found = overhead.compared(fake, overhead.Load("triad", "triad", "", ("threadhist",)))
    assert found["wrong"] == wrong and ("threadhist" in found["ratio"]) == (not wrong)


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - The user ...\n", "ERR_NVGPUCTRPERM"),
        ("==PROF== Connected\n", "ncu measured no kernel"),
        ("  triad\n    gpu__time_duration.sum us 3\n", ""),
    ],
)
def test_ncu_that_may_not_measure_is_not_taken_for_one_that_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, why: str
) -> None:
    monkeypatch.setattr(references, "found", lambda name: name)
    command, _, check = references.ncu(here("gpu"), tmp_path)
    Path(command[command.index("--log-file") + 1]).write_text(log)
    done = subprocess.CompletedProcess([], 0, "round 1 1\n", "")
    if why:
        with pytest.raises(machine.Failure, match=why):
            check(done)
    else:
        check(done)


def test_triton_without_a_compiler_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: name)
    bare = machine.Machine("gpu", {"PATH": str(tmp_path)}, 0)
    bare.needs("torch")
    with pytest.raises(machine.Missing, match="C compiler"):
        bare.needs("torch", "triton")


def test_rounds_of_a_program() -> None:
    assert overhead.rounds("round 3 1\nround 1.5 9\nround 2 2\ndigest 1\n") == (2.0, 2.0)
    with pytest.raises(machine.Failure):
        overhead.rounds("digest 1\n")


def test_goals_are_those_of_long_kernels() -> None:
    found = {"ratio": {"threadhist": [1.02, 1, 1.1], "memtrace": [2.9, 2, 3]}, "nothing_ns": [60, 0, 90]}
    assert overhead.goals("triad, 64 Mi elements", found) == {
        "threadhist at most 1.01x": False,
        "memtrace at most 3.0x": True,
    }
    assert overhead.goals("empty kernel", found) == {"a launch without programs at most 50 ns": False}


# --- the report ---


def result(
    name: str, *parts: stage.Result, device: str = "gpu", date: str = "2026-01-02 03:04 UTC"
) -> stage.Result:
    facts = {"gpu": "some GPU", "driver": "580"}
    return {
        "stage": name,
        "date": date,
        "device": device,
        "note": "",
        "commit": "abc",
        "machine": facts,
        "parts": parts,
    }


def part(name: str, state: str = "done", **more: object) -> stage.Result:
    return {"name": name, "state": state, "why": "", "seconds": 1.0, **more}


def test_the_report_puts_runs_of_a_stage_together(tmp_path: Path) -> None:
    asked = part("symbols", question="one | address?", answer="yes", believed="so", agrees=True)
    ratios = {
        "us": {"alone": [10.0, 9.0]},
        "ratio": {"tool": [1.1, 1.0, 1.2]},
        "gpu_ratio": {},
        "goals": {"little": False},
    }
    (tmp_path / "1.json").write_text(json.dumps(result("facts", asked, part("handles", "not reached"))))
    later = result(
        "facts",
        part("symbols", "not reached"),
        part("handles", answer="no", agrees=False),
        date="2026-01-02 04:00 UTC",
    )
    (tmp_path / "2.json").write_text(json.dumps(later))
    asked_too = part("first launches", answer="alone 1 ms, memtrace, cold 90 ms")
    (tmp_path / "3.json").write_text(json.dumps(result("overhead", part("triad", **ratios), asked_too)))
    written = report.write(tmp_path, tmp_path / "results")
    assert written.name == "gpu-2026-01-02.md" and written.with_suffix(".json").exists()
    text = written.read_text()
    assert "## facts: 2 done" in text and "one \\| address?" in text and "| NO |" in text
    assert "1.100 (1.000 to 1.200)" in text and "- triad: little: NOT met" in text
    assert "- first launches: alone 1 ms, memtrace, cold 90 ms" in text


def test_a_report_of_several_commits_says_so(tmp_path: Path) -> None:
    one = result("facts", part("symbols"), part("handles", "failed", why="it fell"), part("capture", "ended"))
    (tmp_path / "1.json").write_text(json.dumps(one))
    text = report.write(tmp_path, tmp_path / "results").read_text()
    assert text.startswith("# some GPU, 2026-01-02 03:04 UTC, commit abc\n") and "different code" not in text
    assert "| some GPU, driver 580, commit abc | facts: 1 done, 1 failed, 1 ended |" in text
    assert "- facts: nothing is known of capture" in text and "failed: it fell" in text
    later = {**result("facts", part("handles"), date="2026-01-02 04:00 UTC"), "commit": "def"}
    (tmp_path / "2.json").write_text(json.dumps(later))
    text = report.write(tmp_path, tmp_path / "results").read_text()
    assert "commits abc, def" in text and "runs of different code or on different machines" in text
    assert "| some GPU, driver 580, commit abc | facts: 1 done, 1 ended |" in text
    assert "| some GPU, driver 580, commit def | facts: 1 done |" in text
    again = {
        **result("facts", part("symbols"), part("capture"), date="2026-01-02 05:00 UTC"),
        "commit": "def",
    }
    (tmp_path / "3.json").write_text(json.dumps(again))
    text = report.write(tmp_path, tmp_path / "results").read_text()
    assert "abc" not in text.splitlines()[0]  # of that run nothing is left


def test_a_result_that_was_broken_off_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text(json.dumps(result("facts", part("symbols", answer="yes"))))
    (tmp_path / "2.json").write_text(
        json.dumps(result("facts", part("symbols", "ended"), date="2026-01-02 04:00 UTC"))
    )
    text = report.write(tmp_path, tmp_path / "results").read_text()
    assert "## facts: 1 done" in text and "yes" in text


def test_results_of_the_embedded_device_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "1.json").write_text(json.dumps(result("facts", part("symbols", answer="yes"))))
    (tmp_path / "2.json").write_text(json.dumps(result("facts", part("handles", answer="no"), device="sim")))
    text = report.write(tmp_path, tmp_path / "results").read_text()
    assert "## facts: 1 done" in text and "handles" not in text
    assert capsys.readouterr().err.startswith("gpu-check: left out 1 results of the embedded device")


def test_no_report_is_made_of_the_embedded_device(tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text(json.dumps(result("facts", part("symbols"), device="sim")))
    with pytest.raises(machine.Failure, match="has results of the embedded device only; reports need"):
        report.write(tmp_path, tmp_path / "results")
    assert not (tmp_path / "results").exists()


# --- the questions, asked of the embedded device: those whose answer it was made to give ---


@pytest.mark.every(2)
@needs_device
@pytest.mark.parametrize(
    "name",
    [
        "symbols",
        "host register",
        "captured swap",
        "capture during a wait",
        "ring after trap",
        "ring after kill",
    ],
)
def test_a_question(name: str) -> None:
    (question,) = (question for question in questions.QUESTIONS if question.name == name)
    said = facts.ask(here(), question)
    assert said["agrees"] in (True, None), said


@needs_device
def test_the_carry_is_the_adders() -> None:
    said = facts.ask(here(), questions.named("carry flag"))
    assert said["agrees"] and said["answer"] == "392 results, 0 differ"


def test_the_carry_that_is_expected() -> None:
    assert arithmetic.expected("sub.cc", "addc", 32, 1, 1) == 3  # 1 - 1 does not borrow: a carry
    assert arithmetic.expected("sub.cc", "addc", 32, 0, 1) == 1
    assert arithmetic.expected("add.cc", "subc", 32, 1, 5) == 3  # 5 - 1, less one without a carry
    assert arithmetic.expected("add.cc", "subc", 64, 2**64 - 1, 5) == 6


@needs_device
def test_the_cost_of_marks_is_told_for_the_host_and_the_gpu() -> None:
    said = facts.ask(here(), questions.named("marks in a stream"))
    calls = (
        "cuEventRecord",
        "cuEventRecord, no timing",
        "cuStreamWriteValue64, host memory",
        "cuStreamWriteValue64, GPU memory",
    )
    assert set(said["found"]) == set(calls)
    assert all(set(of) == {"host_ns", "gpu_ns"} for of in said["found"].values()), said


@needs_device
@pytest.mark.parametrize(
    ("name", "answers"),
    [
        (
            "cupti correlation",
            {"": "yes$", "mute": "no$"},
        ),
        (
            "cupti enabled under a kernel",
            {"": r"alone, it takes [\d.]+ ms; under a kernel, it takes [\d.]+ ms$"},
        ),
    ],
)
def test_questions_about_cupti(tmp_path: Path, name: str, answers: dict[str, str]) -> None:
    """Asked of a stand-in."""
    device, library = here(), tmp_path / "libcupti.so.13"
    source = ROOT / "tests/gpubpf/agent/fakecupti.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    path = {"LD_LIBRARY_PATH": str(machine.SIMULATOR)}
    for how, answer in answers.items():
        device.environment = {
            **device.environment,
            **path,
            "GPUBPF_CUPTI_STAND_IN": str(library),
            "FAKECUPTI": how,
        }
        said = facts.ask(device, questions.named(name))
        assert re.match(answer, said["answer"]), said
        assert (
            said["agrees"] == {"": True, "mute": False}[how]
            if "correlation" in name
            else said["agrees"] is None
        )


@needs_device
def test_without_cupti_nothing_is_asked_of_it(tmp_path: Path) -> None:
    """Where there is none, and where NVIDIA's finds no GPU."""
    device = here()
    with pytest.raises(machine.Missing, match=r"there is no CUPTI here|error \d+ of CUPTI"):
        facts.ask(device, questions.named("cupti correlation"))


@needs_device
def test_a_question_without_an_answer_is_an_answer() -> None:
    asked = questions.Question("spinning kernel", "does it?", "no", 0.5, dict)
    said = facts.ask(here(), asked)
    assert said["agrees"] is False and said["answer"].startswith("no answer: timed out")

"""`gpubpf check -p PID`: what it says about processes, which it leaves alone."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpubpf_hold
from gpubpf.agent.definitions import Vendor
from gpubpf.check import process
from gpubpf.check.finding import LIMITED, MISSING, OK, UNKNOWN, Finding
from gpubpf.check.machine import Machine
from gpubpf.errors import SessionError
from gpubpf.process import limits
from gpubpf.traced.device import Device
from gpubpf_host import ORDINARY

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tools" / "gpubpf"
DRIVER = ROOT / "lib/cudasim/lib/libcuda.so.1"
Start = Callable[..., subprocess.Popen[str]]
# Says that it is ready, and then waits.
WAIT = "import sys; print('ready', flush=True); sys.stdin.read()"
LOAD = "import ctypes, sys; driver = ctypes.CDLL(sys.argv[1]); " + WAIT
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
needs_driver = pytest.mark.skipif(not DRIVER.exists(), reason="needs the embedded device")


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program, and wait until it says a line."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str | Path, **options: Any) -> subprocess.Popen[str]:
        child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)
        started.append(child)
        assert child.stdout is not None and child.stdout.readline()
        return child

    yield begin
    for child in started:
        child.kill()
        child.communicate()


def found(pid: int) -> dict[str, Finding]:
    return dict(process.findings(pid, Machine(timeout=30)))


def tools_are(findings: dict[str, Finding], state: str, value: str) -> None:
    for tool in (*process.DEVICE_TOOLS, "launchlate"):
        assert findings[tool].state == state and value in findings[tool].value, (tool, findings[tool])


def test_a_process_without_a_driver(start: Start) -> None:
    child = start(sys.executable, "-c", WAIT)
    findings = found(child.pid)
    assert (findings["attach"].state, findings["agent"].state) == (OK, OK)
    assert findings["devices"].state == MISSING and "neither the CUDA driver" in findings["devices"].value
    tools_are(findings, MISSING, "has not loaded a GPU's driver")
    assert findings["cudasnoop"].value == "nothing yet: it has not loaded libcuda.so or libcudart.so"
    assert not findings["hipsnoop"].needed


@needs_driver
def test_a_process_on_the_embedded_device_is_left_alone(start: Start) -> None:
    child = start(sys.executable, "-c", LOAD, DRIVER)
    before = Path(f"/proc/{child.pid}/maps").read_text()
    findings = found(child.pid)
    assert findings["devices"].value == "CUDA: the embedded device"
    assert findings["cuda-runtime"].state == LIMITED and not findings["cuda-runtime"].needed
    assert findings["kernels"].value.startswith("none in its files")
    assert findings["threadhist"].state == UNKNOWN and findings["launchlate"].state == OK
    assert "libcuda.so" in findings["cudasnoop"].value or findings["cudasnoop"].state == MISSING
    assert Path(f"/proc/{child.pid}/maps").read_text() == before
    assert os.listdir(f"/proc/{child.pid}/task") == [str(child.pid)]


@needs_driver
def test_kernels_are_counted_as_list_counts_them(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = ROOT / "examples" / "vectoradd"
    if not program.exists():
        pytest.skip("needs examples/vectoradd")
    # A program with kernels, which waits in a library's constructor: no kernel runs.
    source = tmp_path / "wait.c"
    source.write_text(
        '#include <unistd.h>\n__attribute__((constructor)) void wait(void) { write(1, "x\\n", 2); pause(); }\n'
    )
    library = tmp_path / "libwait.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    paths = {"LD_LIBRARY_PATH": str(DRIVER.parent), "LD_PRELOAD": str(library)}
    child = start(program, env=os.environ | paths)
    findings = found(child.pid)
    assert findings["cuda-runtime"].value == "libcudart.so.13"
    assert findings["profilers"].value == "LD_PRELOAD" and not findings["profilers"].needed
    if findings["devices"].state == OK:  # cudart may load the driver later
        assert findings["kernels"].value == "1 of 1 can be instrumented"
        assert findings["threadhist"] == Finding(OK, "launches of 1 kernel")
        monkeypatch.setattr(process, "SHARE", 0)
        late = found(child.pid)["kernels"]
        assert late.value == "0 of 1 can be instrumented"
        assert "not checked within 0 s (1)" in late.consequence


@needs_driver
def test_a_process_that_a_tool_measures(start: Start) -> None:
    child = start(sys.executable, "-c", LOAD + "", DRIVER)
    tool = subprocess.Popen(
        [sys.executable, ROOT / "tools/threadhist.py", "--json", "-p", str(child.pid)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert tool.stdout is not None
        attached = tool.stdout.readline()
        if not attached:
            pytest.skip("cannot attach here: " + tool.communicate()[1])
        findings = found(child.pid)
        assert "threadhist" in findings["agent"].value and findings["agent"].state == LIMITED
        tools_are(findings, MISSING, "a tool measures it now: threadhist")
    finally:
        tool.send_signal(signal.SIGTERM)
        tool.communicate()
    findings = found(child.pid)
    assert findings["agent"] == Finding(OK, "in the process, and idle: a tool has measured it before")


@needs_driver
def test_a_process_that_a_debugger_traces_or_that_is_stopped(start: Start) -> None:
    child = start(sys.executable, "-c", LOAD, DRIVER)
    child.send_signal(signal.SIGSTOP)
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    findings = found(child.pid)
    assert "is stopped" in findings["attach"].value and "kill -CONT" in findings["attach"].action
    tools_are(findings, MISSING, "is stopped")
    child.send_signal(signal.SIGCONT)
    library = ctypes.CDLL(None, use_errno=True)
    assert library.ptrace(0x4206, child.pid, 0, 0) == 0  # PTRACE_SEIZE
    try:
        findings = found(child.pid)
        assert "already traced by" in findings["attach"].value
        tools_are(findings, MISSING, "already traced by")
    finally:
        child.kill()  # ends the tracing, too
        os.waitpid(child.pid, 0)


@needs_driver
def test_a_filter_and_namespaces(start: Start) -> None:
    filtered = (
        "import ctypes, struct; c = ctypes.CDLL(None); code = struct.pack('<HBBI', 6, 0, 0, 0x7fff0000);"
        "data = ctypes.create_string_buffer(code, len(code));"
        "prog = struct.pack('<H6xQ', 1, ctypes.addressof(data)); c.prctl(38, 1, 0, 0, 0);"
        "assert c.prctl(22, 2, ctypes.c_char_p(prog), 0, 0) == 0;"
    )
    child = start(sys.executable, "-c", filtered + LOAD, DRIVER)
    findings = found(child.pid)
    assert findings["seccomp"].state == UNKNOWN and findings["seccomp"].value.startswith("a filter")
    assert findings["namespaces"].value == "those of this command"
    if os.geteuid() == 0:
        child = start("unshare", "-m", sys.executable, "-c", WAIT)
        assert "(mnt)" in found(child.pid)["namespaces"].value


def test_a_static_program(start: Start, tmp_path: Path) -> None:
    source = tmp_path / "static.c"
    source.write_text('#include <unistd.h>\nint main(void) { write(1, "x\\n", 2); pause(); }\n')
    built = subprocess.run(["gcc", "-static", "-o", tmp_path / "static", source], capture_output=True)
    if built.returncode:
        pytest.skip("needs a static C library")
    findings = found(start(tmp_path / "static").pid)
    assert findings["attach"].state == MISSING and "no shared C library" in findings["attach"].value


@needs_root
def test_a_process_of_another_user_and_processes_that_are_none(start: Start) -> None:
    child = start(sys.executable, "-c", WAIT)
    ordinary = [
        *ORDINARY,
        sys.executable,
        SCRIPT,
        "check",
    ]

    def said(*words: object) -> str:
        done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        return done.stderr

    assert "belongs to another user; use sudo" in said(*ordinary, "-p", child.pid)
    own = [sys.executable, SCRIPT, "check", "-p"]
    assert "is a kernel thread" in said(*own, 2)
    assert "there is no process 4194303; run ps" in said(*own, 4194303)
    child.kill()
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert "has ended and is a zombie" in said(*own, child.pid)


def test_a_process_that_ends_meanwhile(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    child = start(sys.executable, "-c", WAIT)
    checked = process.traceable.check_traceable

    def check(pid: int) -> None:
        checked(pid)
        child.kill()
        child.communicate()

    monkeypatch.setattr(process.traceable, "check_traceable", check)
    with pytest.raises(SessionError, match=rf"pid {child.pid} ended, or|there is no process {child.pid}"):
        found(child.pid)


def test_a_process_with_more_mappings_than_a_tool_reads(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start(sys.executable, "-c", WAIT)
    monkeypatch.setattr(limits, "LONGEST_LINE", 20)  # real ones are longer
    with pytest.raises(
        SessionError, match="its list of mappings is too large; start the program with the tool"
    ):
        found(child.pid)


def test_a_name_with_control_characters_is_one_line(start: Start) -> None:
    name = "import ctypes; ctypes.CDLL(None).prctl(15, b'a\\x1b[2J\\nb', 0, 0, 0);"
    child = start(sys.executable, "-c", name + WAIT)
    done = subprocess.run(
        [sys.executable, SCRIPT, "check", "-p", str(child.pid)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[0].startswith("ok       process          a\\x1b[2J\\nb (pid ")
    assert "\x1b" not in done.stdout


@needs_driver
def test_any_number_of_libraries_is_a_short_sentence(tmp_path: Path) -> None:
    names = [f"libcudart.so.{number}." + "9" * 200 for number in range(50)]
    for name in names:
        shutil.copy(DRIVER, tmp_path / name)
    with gpubpf_hold.holding(gpubpf_hold.build(tmp_path), *(tmp_path / name for name in names)) as process:
        findings = found(process.pid)
    for finding in findings.values():
        assert len(finding.value) < 1000, finding
    assert findings["cuda-runtime"].value.endswith(" and 42 more")


def test_records_have_the_pid(start: Start) -> None:
    child = start(sys.executable, "-c", WAIT)
    words = [sys.executable, SCRIPT, "check", "--json", "-p", str(child.pid)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 1 and {record["pid"] for record in records} == {child.pid}
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert {"process", "attach", *tools} - {"gpubpf", "cudasim", "hipsim"} <= {
        record["name"] for record in records
    }


def test_kernels_of_amd_gpus_and_tools_that_have_no_probes_for_them() -> None:
    devices = {Vendor.AMD: Device("sim")}
    kernels = process._Kernels(0, Counter(), 2)

    def said(of: process._Kernels, amd: bool) -> tuple[str, str]:
        finding = process._device_tool(None, devices, of, amd)
        return finding.state, finding.value

    assert process._counted(kernels) == Finding(OK, "2 kernels for AMD GPUs")
    assert said(kernels, True) == (OK, "2 kernels for AMD GPUs, where their code allows it")
    assert said(kernels, False) == (
        MISSING,
        "nothing: kernels of AMD GPUs have no probes at its points yet",
    )
    both = process._Kernels(3, Counter(refused=1), 2)
    assert said(both, False) == (LIMITED, "launches of 2 kernels; not of 1")
    assert said(process._Kernels(1, Counter(refused=1), 2), False) == (MISSING, "nothing: refused")

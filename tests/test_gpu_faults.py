"""script/gpu-check's smoke stage: a fault for each of its ten parts, and the line that tells it.

The faults are real: a driver or a file is broken, or a program does something else; the tools and the embedded device run. Two of
test_gpu_check.py, which need only a variable, belong to these: part 3, and a machine without a GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpu import machine, smoke, stage
from gpubpf_cuda import build, needs_cuda

pytestmark = needs_cuda
ROOT = Path(__file__).resolve().parent.parent
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the packed file is unpacked: empty folders."""
    for folder in ("examples", "programs"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(machine, "PLACE", tmp_path)
    return tmp_path


def said(number: int, place: Path, device: machine.Machine | None = None, **environment: str) -> str:
    """What a part says, in one line, when it is wrong or has failed."""
    device = device or machine.prepare("sim", 90)
    device.environment = {**device.environment, **environment}
    part = next(part for part in smoke.parts(device) if part.name.startswith(f"{number} "))
    (found,) = stage.run_stage("smoke", [part], device, (), place / "out", stops=True)["parts"]
    assert found["state"] in stage.BAD, found
    assert found["why"] and "\n" not in found["why"]
    return str(found["why"])


def script(path: Path, text: str) -> Path:
    """A Python program at `path`."""
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


def library(path: Path, source: str, *flags: str | Path) -> Path:
    path.with_suffix(".c").write_text(source)
    command = ["gcc", "-shared", "-fPIC", "-o", path, path.with_suffix(".c"), *flags]
    subprocess.run(command, check=True, capture_output=True)
    return path


@pytest.mark.parametrize(
    ("size", "why"), [(5000, "it died by SIG"), (200, "OSError: .*libgpubpf-agent.so: ")]
)
def test_1_an_agent_that_is_cut_off(
    place: Path, monkeypatch: pytest.MonkeyPatch, size: int, why: str
) -> None:
    (place / "agent").mkdir()
    (place / "agent/libgpubpf-agent.so").write_bytes(
        (machine.AGENT / "libgpubpf-agent.so").read_bytes()[:size]
    )
    monkeypatch.setattr(smoke, "AGENT", place / "agent")
    found = said(1, place)
    assert re.match(f"the agent cannot be loaded here: {why}", found), found


# What the driver calls in the library of CUDA_INJECTION64_PATH. It greets as an agent of protocol version 1.
GREETS = """
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
int InitializeInjection(void) {
    const char *name = getenv("GPUBPF_SOCKET");
    struct sockaddr_un to = {AF_UNIX, ""};
    unsigned frame[] = {1, 12, 1, 12080, 0};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    memcpy(to.sun_path + 1, name + 1, strlen(name) - 1);
    if (connect(fd, (struct sockaddr *)&to, sizeof to.sun_family + strlen(name))) return 0;
    return send(fd, frame, sizeof frame, 0) > 0;
}
"""


@pytest.mark.every(2)
@needs_gcc
@pytest.mark.parametrize(
    ("source", "why"),
    [
        (GREETS, r"the agent \S+ has protocol version 1, the tools have \d+; build or pack it again"),
        ("int nothing;", r"the driver does not start the agent \S+ in cuInit: it sends no greeting"),
    ],
)
def test_1_an_agent_of_another_version_and_one_that_is_none(
    place: Path, monkeypatch: pytest.MonkeyPatch, source: str, why: str
) -> None:
    (place / "agent").mkdir()
    library(place / "agent/libgpubpf-agent.so", source)
    monkeypatch.setattr(smoke, "AGENT", place / "agent")
    found = said(1, place)
    assert re.match(why, found), found


@needs_gcc
def test_2_all_that_the_tool_says_is_shown(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is not in its last line. An agent that is none greets without its file."""
    build(ROOT / "examples/vectoradd.cu", place / "examples/vectoradd")
    other = library(place / "other.so", GREETS)
    started = f"import os, sys\nsys.path.insert(0, {str(ROOT / 'lib')!r})\n"
    started += (
        f"from gpubpf import agent\nimport pathlib, runpy\nagent.LIBRARY = pathlib.Path({str(other)!r})\n"
    )
    started += "sys.argv.pop(0)\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    device = machine.prepare("sim", 90)
    monkeypatch.setattr(device, "python", str(script(place / "python", started)))
    found = said(2, place, device)
    assert re.search(r"sent an invalid message \(.*\); .*no traced process launched a kernel", found), found


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("del os.environ['CUDA_INJECTION64_PATH']", r"threadhist counts \[\] stores of vectoradd, not \[4, 4, 4, 4, 3\] \("),
        ("arguments += ['20']", r"threadhist counts \[4, 4, 4, 4, 4\] stores of vectoradd, not \[4, 4, 4, 4, 3\] \("),
    ],
)  # fmt: skip
def test_2_a_program_that_the_agent_does_not_get_into_and_one_that_does_more(
    place: Path, does: str, why: str
) -> None:
    real = build(ROOT / "examples/vectoradd.cu", place / "examples/real")
    started = f"import os\narguments = [{str(real)!r}]\n{does}\nos.execv(arguments[0], arguments)\n"
    script(place / "examples/vectoradd", started)
    found = said(2, place)
    assert re.match(why, found), found


def driver_with(place: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Put a driver with these functions in front of the embedded device, whose library has another name here."""
    folder = place / "driver"
    folder.mkdir()
    renamed = (machine.SIMULATOR / "libcuda.so.1").read_bytes().replace(b"libcuda.so.1\0", b"libcuda.so.0\0")
    (folder / "libcuda.so.0").write_bytes(renamed)
    for file in machine.SIMULATOR.iterdir():
        if not file.name.startswith("libcuda.so"):
            (folder / file.name).symlink_to(file)
    soname = [
        "-Wl,-soname,libcuda.so.1",
        "-Wl,--no-as-needed",
        folder / "libcuda.so.0",
        f"-Wl,-rpath,{folder}",
    ]
    library(folder / "libcuda.so.1", source, *soname)
    monkeypatch.setattr(machine, "SIMULATOR", folder)


REFUSES = "int cuMemHostRegister_v2(void *at, unsigned long size, unsigned flags) { return 801; }\n"


@needs_gcc
def test_4_a_driver_that_registers_no_memory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver_with(place, monkeypatch, REFUSES)
    why = said(4, place)
    assert re.match(
        r"the GPU cannot use a memfd \(CUDA_ERROR_NOT_SUPPORTED\).*; the code assumes: yes, both", why
    ), why


SLOW = """
#include <dlfcn.h>
#include <stddef.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t which, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym((void *)-1L, "clock_gettime");
    if (which == CLOCK_MONOTONIC_RAW) usleep(10000);
    return real(which, now);
}
"""


@needs_gcc
@pytest.mark.long
def test_5_a_gpu_whose_clock_takes_long_to_read(place: Path) -> None:
    build(ROOT / "examples/latency.cu", place / "examples/latency")
    why = said(5, place, LD_PRELOAD=str(library(place / "slow.so", SLOW)))
    assert re.match(r"launchlate, alone: times on the host's clock are known to \d{7,}\S* ns only", why), why


@pytest.mark.long
def test_6_a_kernel_that_takes_longer_than_it_should(place: Path) -> None:
    real = build(ROOT / "examples/latency.cu", place / "examples/real")
    script(place / "examples/latency", f"import os\nos.execv({str(real)!r}, [{str(real)!r}, '9000'])\n")
    assert re.match(r"a kernel of 2000 us has (9|\d\d)\d{3}\.\d us by the device probe", said(6, place))


def frameworks(place: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> machine.Machine:
    """A machine where a program stands in for those of Triton and PyTorch."""
    device = machine.prepare("sim", 90)
    stands_in = script(place / "stands_in.py", program)
    monkeypatch.setattr(device, "needs", lambda *_: None)
    monkeypatch.setattr(device, "program", lambda words: [sys.executable, str(stands_in), *words.split()[1:]])
    return device


# A process that uses the driver, and launches nothing.
OPENS = "from gpu.driver import Driver\nDriver().open()\nprint('digest 1')\n"
CHANGES = "import os\nprint('digest', 2 if 'CUDA_INJECTION64_PATH' in os.environ else 1)\n"
DIES = "import os, sys\nprint('digest 1')\nsys.exit('CUDA_INJECTION64_PATH' in os.environ and 'illegal address')\n"


@pytest.mark.parametrize(
    ("number", "program", "why"),
    [
        (9, OPENS, "memtrace instruments no launch of programs/triton_kernels.py softmax"),
        (9, CHANGES, "programs/triton_kernels.py softmax ends differently under memtrace"),
        (10, OPENS, "threadhist sees no launch of programs/torch_work.py ones"),
        (10, DIES, "programs/torch_work.py ones ends differently under threadhist"),
    ],
)
def test_9_10_a_framework_that_the_tool_does_not_see_or_disturbs(
    place: Path, monkeypatch: pytest.MonkeyPatch, number: int, program: str, why: str
) -> None:
    device = frameworks(place, monkeypatch, program)
    assert said(number, place, device).startswith(why)


RUNS_ON = """
import sys, time
for _ in range(int(sys.argv[-1])):
    print("round 1 1", flush=True)
    time.sleep(0.05)
"""


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("program", "why"),
    [
        (RUNS_ON, r"threadhist, exit status 1: .*"),
        pytest.param(
            "import time\nprint('round 1 1')\ntime.sleep(1)\n",
            r"the program ended by itself, 0, after threadhist: ",
            marks=pytest.mark.long,
        ),
    ],
)
def test_7_a_program_that_cannot_be_attached_to(place: Path, program: str, why: str) -> None:
    script(place / "programs/workloads", program)
    found = said(7, place)
    assert re.match(why, found), found


WAITS = """
#include <dlfcn.h>
#include <stddef.h>
int cuCtxSynchronize(void);
int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t size, void *stream) {
    static int (*real)(void *, unsigned long long, size_t, void *);
    if (!real) real = dlsym(RTLD_NEXT, "cuMemcpyDtoHAsync_v2");
    int code = cuCtxSynchronize();
    return code ? code : real(to, from, size, stream);
}
"""


@pytest.mark.long
@needs_gcc
def test_8_a_driver_whose_copies_wait_for_the_whole_gpu(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver_with(place, monkeypatch, "#define _GNU_SOURCE\n" + WAITS)
    why = said(8, place, CUDASIM_PYTHONPATH=str(ROOT / "lib"))
    assert re.match(
        "these calls wait for the kernel: .*copy, private stream, pinned.*; the code assumes: ", why
    ), why


@pytest.mark.long
def test_8_a_first_launch_may_wait_if_kernels_are_loaded_at_their_first_use(place: Path) -> None:
    device = machine.prepare("sim", 90)
    more = {"CUDASIM_HOSTILE": "1", "CUDA_MODULE_LOADING": "LAZY"}
    device.environment = {**device.environment, **more}
    found = smoke.asked(device, "spinning kernel", ("none",))
    assert found["wrong"] == "" and found["lazy loading"], found
    assert "first launch, private stream" in found["waits"]

"""Which device a command runs on."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cudasim
import hipsim
from gpubpf.errors import SessionError, UsageError
from gpubpf.session import tracing
from gpubpf.show import cli
from gpubpf.traced import amd_device, device


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "ask_driver", lambda: "there is no driver")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    (tmp_path / "libcuda.so.1").touch()
    monkeypatch.setattr(device, "LIBRARIES", tmp_path)
    return tmp_path


def test_without_a_gpu_the_embedded_device_is_used_and_said(no_gpu: None, built: Path) -> None:
    chosen = device.choose("auto", {"LD_LIBRARY_PATH": "/mine"})
    assert chosen.kind == "sim" and chosen.notice and "cudasim" in chosen.notice
    assert chosen.environment == {"LD_LIBRARY_PATH": f"{built}:/mine", "CUDASIM_CLOCK": "real"}
    assert device.choose("sim", {}).notice is None  # it was asked for
    assert device.choose("sim", {}).environment == {"LD_LIBRARY_PATH": str(built), "CUDASIM_CLOCK": "real"}


def test_the_clock_of_the_embedded_device(
    no_gpu: None, built: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """--clock comes before the environment, and that before what suits the tool."""

    def clock_of(*words: str) -> bool:
        parser = cli.parser("launchlate", "text", "examples")
        cli.add_targets(parser)
        cli.add_device(parser, times=True)
        args = cli.parse(parser, list(words))
        return tracing.device_of(cli.Options.of(args)).virtual

    monkeypatch.delenv("CUDASIM_CLOCK", raising=False)
    monkeypatch.delenv("HIPSIM_CLOCK", raising=False)
    assert clock_of("--", "app") and not clock_of("--clock", "real", "--", "app") and not clock_of()
    monkeypatch.setenv("CUDASIM_CLOCK", "real")
    assert not clock_of("--", "app") and clock_of("--clock", "virtual", "--", "app")
    assert device.choose("sim", {}, default_clock="virtual").virtual
    assert device.choose("sim", {"HIPSIM_CLOCK": "virtual"}).virtual
    with pytest.raises(UsageError, match="--clock chooses the clock of a COMMAND"):
        clock_of("--clock", "virtual", "-p", str(os.getpid()))
    monkeypatch.setattr(device, "ask_driver", lambda: (9, 0))
    with pytest.raises(UsageError, match="--clock is for the embedded device"):
        clock_of("--clock", "real", "--", "app")


def test_an_unknown_clock_is_an_error(no_gpu: None, built: Path) -> None:
    with pytest.raises(UsageError, match="CUDASIM_CLOCK is 'bogus'; unset it, or set it to real or virtual"):
        device.choose("auto", {"CUDASIM_CLOCK": "bogus"})
    with pytest.raises(UsageError, match="HIPSIM_CLOCK is 'bogus'"):
        device.choose("auto", {"HIPSIM_CLOCK": "bogus"})
    library = Path(cudasim.__file__).parent / "lib" / "libcuda.so.1"
    if library.exists():
        words = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(library)!r}).cuInit(0)"]
        environment = os.environ | {"CUDASIM_CLOCK": "bogus"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        said = "cudasim: CUDASIM_CLOCK is 'bogus'; unset it, or set it to real or virtual\n"
        assert (done.returncode, done.stderr) == (2, said)


CC = "set it to a compute capability such as 9.0"
SIZE = "set it to a size of at least 1M, such as 16G"
NUMBER = "set it to a number of devices from 0 to 64"
SECONDS = "set it to a number of seconds such as 10, or to never"


@pytest.mark.parametrize(
    ("name", "values", "advice"),
    [
        ("CC", ["abc", "99.9", "9.", "9.0x", "-9", "9.10", "2.0"], CC),
        ("MEMORY", ["lots", "16T", "1K", "-1G", "nan", "16GB", "1e300"], SIZE),
        ("DEVICES", ["x", "-1", "65", "2x"], NUMBER),
        ("OPTIMIZE_AFTER", ["x", "-1", "2.5", "2000000", "Never"], SECONDS),
    ],
)
def test_settings_of_the_embedded_device_are_checked(name: str, values: list[str], advice: str) -> None:
    library = Path(cudasim.__file__).parent / "lib" / "libcuda.so.1"
    if not library.exists():
        pytest.skip("the embedded device is not built")
    words = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(library)!r}).cuInit(0)"]

    def said(value: str) -> tuple[int, str]:
        environment = os.environ | {f"CUDASIM_{name}": value}
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        return done.returncode, done.stderr

    for value in values:
        assert said(value) == (2, f"cudasim: CUDASIM_{name} is {value!r}; {advice}\n")
    right = {
        "CC": ["", "8", "12.1"],
        "MEMORY": ["", "1048576", "2.5g"],
        "DEVICES": ["", "0", "64"],
        "OPTIMIZE_AFTER": ["", "0", "60", "never"],
    }
    for value in right[name]:
        assert said(value) == (0, "")


def test_a_gpu_that_was_asked_for_is_not_replaced(no_gpu: None) -> None:
    with pytest.raises(SessionError, match="no GPU can be used: there is no driver; use --device sim"):
        device.choose("gpu")


def test_an_embedded_device_that_is_not_built(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "LIBRARIES", Path("/nowhere"))
    for wanted in ("auto", "sim"):
        with pytest.raises(SessionError, match="the embedded device is not built; run script/setup"):
            device.choose(wanted)


def driver(directory: Path, body: str) -> str:
    """A libcuda.so.1 of our own; returns what ask_driver() says in a process that finds it."""
    source = directory / "driver.c"
    source.write_text("#include <string.h>\n#include <stdlib.h>\n" + body)
    library = directory / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    return asked(directory)


def asked(directory: Path) -> str:
    code = "from gpubpf.traced import device; device.DRIVER_TIMEOUT = 2.0; print(device.ask_driver())"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(directory)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


WORKS = """
int cuGetErrorName(int code, const char **text) { *text = "CUDA_ERROR_NO_DEVICE"; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, NAME, size); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
"""


@pytest.mark.parametrize(
    ("init", "name", "answer"),
    [
        ("return 0;", "NVIDIA H200", "(9, 0)"),
        ("return 100;", "", "cuInit returns CUDA_ERROR_NO_DEVICE (100)"),
        ("abort();", "", "the driver crashed (status -6)"),
        ("for (;;) {}", "", "the driver did not answer in 2 s"),
        ("return 0;", "cudasim (embedded device)", "libcuda.so.1 is the embedded device"),
    ],
)
def test_only_a_driver_that_can_be_initialized_is_a_gpu(
    tmp_path: Path, init: str, name: str, answer: str
) -> None:
    body = f'#define NAME "{name}"\n{WORKS}\nint cuInit(unsigned flags) {{ {init} }}\n'
    assert driver(tmp_path, body) == answer


def test_no_driver_or_a_broken_one_is_no_gpu(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    assert asked(tmp_path).startswith("the driver library cannot be loaded (")
    assert "cuDeviceGet" in driver(tmp_path, "int cuInit(unsigned flags) { return 0; }")


def test_compute_capability_of_the_embedded_device() -> None:
    sim = device.Device("sim")
    assert device.compute_capability(sim, {}) == (9, 0)
    assert device.compute_capability(sim, {"CUDASIM_CC": "7.5"}) == (7, 5)
    assert device.compute_capability(sim, {"CUDASIM_CC": "8"}) == (8, 0)
    assert device.compute_capability(sim, {"CUDASIM_CC": "new"}) == (9, 0)


def test_a_program_that_is_linked_with_hip_is_for_hip(tmp_path: Path) -> None:
    """It may have no code for GPUs, but compile its kernels with HIPRTC."""
    library, main = tmp_path / "libamdhip64.so.6", tmp_path / "main.c"
    main.write_text("int main(void) { return 0; }\n")
    subprocess.run(
        ["cc", "-shared", "-Wl,-soname,libamdhip64.so.6", "-o", library, "-xc", "/dev/null"], check=True
    )
    for name, libraries in (("with", ["-Wl,--no-as-needed", str(library)]), ("without", [])):
        subprocess.run(["cc", "-o", tmp_path / name, main, *libraries], check=True)
    assert amd_device.is_for_hip(str(tmp_path / "with"))
    assert not any(
        map(amd_device.is_for_hip, (str(tmp_path / "without"), str(main), str(tmp_path), "nothing-here"))
    )


def test_an_amd_gpu_is_used_for_programs_of_hip_only(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(amd_device, "has_gpu", lambda: True)
    monkeypatch.setattr(amd_device, "is_for_hip", lambda program: program == "hip")

    def of(program: str, **options: object) -> device.Device:
        defaults = {"tool": "launchlate", "pid": [], "device": None, "clock": None, "measures_times": True}
        return tracing._device(
            cli.Options.of(argparse.Namespace(**defaults | options, command=[program])), amd=True
        )

    assert of("hip") == of("hip", device="gpu") == device.Device("gpu")
    with pytest.raises(UsageError, match="--clock is for the embedded device"):
        of("hip", clock="virtual")
    assert capsys.readouterr().err == ""
    chosen = of("hip", device="sim")
    assert chosen.virtual and str(hipsim.LIBRARIES) in chosen.environment["LD_LIBRARY_PATH"]
    assert (
        of("other").kind == "sim" and str(hipsim.LIBRARIES) not in of("other").environment["LD_LIBRARY_PATH"]
    )
    with pytest.raises(SessionError, match="there is no driver"):
        of("other", device="gpu")

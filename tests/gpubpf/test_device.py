"""Which device a command runs on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cudasim
from gpubpf.errors import SessionError, UsageError
from gpubpf.session import device


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "DEVICE_FILES", (Path("/dev/no-such-gpu"),))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    (tmp_path / "libcuda.so.1").touch()
    monkeypatch.setattr(device, "LIBRARIES", tmp_path)
    return tmp_path


def test_without_a_gpu_the_embedded_device_is_used_and_said(no_gpu: None, built: Path) -> None:
    chosen = device.choose("auto", {"LD_LIBRARY_PATH": "/mine"})
    assert chosen.kind == "sim" and chosen.notice and "cudasim" in chosen.notice
    assert chosen.environment == {"LD_LIBRARY_PATH": f"{built}:/mine"}
    assert device.choose("sim", {}).notice is None  # it was asked for
    assert device.choose("sim", {}).environment == {"LD_LIBRARY_PATH": str(built)}


def test_an_unknown_clock_is_an_error(no_gpu: None, built: Path) -> None:
    with pytest.raises(UsageError, match="CUDASIM_CLOCK is 'bogus'; unset it, or set it to real or virtual"):
        device.choose("auto", {"CUDASIM_CLOCK": "bogus"})
    library = Path(cudasim.__file__).parent / "lib" / "libcuda.so.1"
    if library.exists():
        words = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(library)!r}).cuInit(0)"]
        environment = os.environ | {"CUDASIM_CLOCK": "bogus"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        said = "cudasim: CUDASIM_CLOCK is 'bogus'; unset it, or set it to real or virtual\n"
        assert (done.returncode, done.stderr) == (2, said)


def test_a_gpu_that_was_asked_for_is_not_replaced(no_gpu: None) -> None:
    with pytest.raises(
        SessionError, match="no GPU can be used: there is no /dev/no-such-gpu; use --device sim"
    ):
        device.choose("gpu")


def test_an_embedded_device_that_is_not_built(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "LIBRARIES", Path("/nowhere"))
    for wanted in ("auto", "sim"):
        with pytest.raises(SessionError, match="the embedded device is not built; run script/setup"):
            device.choose(wanted)


def test_a_gpu_needs_device_file_and_driver(monkeypatch: pytest.MonkeyPatch, built: Path) -> None:
    monkeypatch.setattr(device, "DEVICE_FILES", (Path("/dev/null"),))
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: object())
    assert device.choose("auto") == device.Device("gpu")

    def missing(name: str) -> object:
        raise OSError("no such library")

    monkeypatch.setattr(device.ctypes, "CDLL", missing)
    assert device.choose("auto").kind == "sim"


def test_compute_capability_of_the_embedded_device() -> None:
    sim = device.Device("sim")
    assert device.compute_capability(sim, {}) == (9, 0)
    assert device.compute_capability(sim, {"CUDASIM_CC": "7.5"}) == (7, 5)
    assert device.compute_capability(sim, {"CUDASIM_CC": "8"}) == (8, 0)
    assert device.compute_capability(sim, {"CUDASIM_CC": "new"}) == (9, 0)

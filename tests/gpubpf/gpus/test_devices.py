"""What is read of drivers: each value, or the reason why it is not known."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gpubpf.agent.definitions import Vendor
from gpubpf.gpus import devices
from gpubpf.gpus.devices import Devices, GpuDevice
from gpubpf.top.records import DEVICE
from gpubpf_gpus import amd_cards, build_nvml, use_no_nvml, use_nvml
from gpubpf_schema import problems

GIB = 1 << 30


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for NVML's library."""
    library = build_nvml(tmp_path)
    use_nvml(monkeypatch, tmp_path)
    return library


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """/sys/class/drm with an AMD GPU, and no NVML."""
    use_no_nvml(monkeypatch)
    return amd_cards(tmp_path)


def read(cards: Path = Path("/nonexistent")) -> tuple[list[GpuDevice], list[str]]:
    with Devices(cards) as all_:
        found = all_.read()
        again = all_.read()
        assert [one.index for one in found] == [one.index for one in again]
        return found, list(all_.unknown(found))


def test_nvml_through_cuda_python(nvml: Path) -> None:
    (first, second), unknown = read()
    assert first == GpuDevice(
        Vendor.NVIDIA, 0, "NVIDIA Test 0", "GPU-0", 0.95, 40 * GIB, 80 * GIB, 1980, 512345, 61, False,
        processes=[{"pid": 1234, "memory_bytes": 3 * GIB}, {"pid": 77, "memory_bytes": None}], instances=[],
    )  # fmt: skip
    assert (second.utilization, second.power_mw, second.temperature_c, second.mig) == (None, None, 61, True)
    instance = {
        "name": "NVIDIA Test MIG 1g",
        "id": "MIG-0",
        "memory_used_bytes": GIB,
        "memory_total_bytes": 80 * GIB,
    }
    assert second.instances == [instance]
    assert unknown == ["NVML 1: utilization, power unknown: Not Supported"]
    assert devices.line(first) == (
        "NVML 0 (NVIDIA Test 0): util 95 %, 40.0 GB of 80.0 GB, 1,980 MHz, 512 W, 61 C"
    )
    assert devices.line(second).endswith("61 C, MIG with 1 instance")
    for one in (first, second):
        assert not list(problems(DEVICE.schema, DEVICE.record(one)))


def test_a_library_without_some_functions(nvml: Path) -> None:
    """An older driver: each value that is there is read."""
    build_nvml(nvml.parent, "-DOLD")
    (first, _), unknown = read()
    assert (first.utilization, first.temperature_c) == (0.95, None)
    assert "NVML 0: temperature unknown: function nvmlDeviceGetTemperatureV is not found" in unknown


def test_a_library_that_cannot_be_loaded_is_one_sentence(nvml: Path) -> None:
    nvml.write_text("this is not a library")
    found, unknown = read()
    assert found == [] and len(unknown) == 1
    assert unknown[0].startswith("values of NVIDIA's driver are unknown: ")


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import time; time.sleep(600)", "NVML did not answer in 0.2 s"),
        ("raise SystemExit", "the process that reads NVML has ended"),
        ("print('{\"devices\": []}', flush=True)", "the process that reads NVML has ended"),
        ('print(\'{"error": "no driver"}\', flush=True)', "no driver"),
        ('print(\'{"error": "lacks it", "missing": "cuda-bindings"}\')', "lacks it; "),
    ],
)
def test_a_driver_that_does_not_answer_keeps_nobody_waiting(
    nvml: Path, monkeypatch: pytest.MonkeyPatch, program: str, why: str
) -> None:
    monkeypatch.setattr(devices, "_READER", program)
    if "did not answer" in why:
        monkeypatch.setattr(devices, "START_WAIT", 0.2)
        monkeypatch.setattr(devices, "ANSWER_WAIT", 0.1)
    with Devices(Path("/nonexistent")) as all_:
        assert all_.read() == []
        assert why in "".join(all_.unknown([]))
        assert all_.read() == []


def test_an_error_of_the_driver_may_pass(nvml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ('{"devices": []}', '{"error": "GPU is lost"}', '{"devices": [{"index": 5}]}')
    text = "import sys\n" + "".join(
        f"print({answer!r}, flush=True); sys.stdin.readline()\n" for answer in answers
    )
    monkeypatch.setattr(devices, "_READER", text)
    with Devices(Path("/nonexistent")) as all_:
        assert all_.read() == [] and all_.nvml_why == "GPU is lost"
        assert [one.index for one in all_.read()] == [5] and all_.nvml_why == ""


def test_an_answer_that_comes_late_counts(nvml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import sys; print('{\"devices\": []}', flush=True); sys.stdin.readline(); "
    text += (
        'import time; time.sleep(1); print(\'{"devices": [{"index": 5}]}\', flush=True); sys.stdin.readline()'
    )
    monkeypatch.setattr(devices, "_READER", text)
    monkeypatch.setattr(devices, "START_WAIT", 0.05)
    monkeypatch.setattr(devices, "ANSWER_WAIT", 0.05)
    with Devices(Path("/nonexistent")) as all_:
        until = time.monotonic() + 60
        while not (found := all_.read()):
            assert time.monotonic() < until
        assert found[0].index == 5


def test_amd_from_sysfs(cards: Path) -> None:
    (one,), unknown = read(cards)
    assert one == GpuDevice(
        Vendor.AMD, 0, "AMD Instinct MI210", "0000:83:00.0", 0.37, 11763712, 68702699520, 1700, 96000, 45
    )
    assert unknown == []
    assert devices.line(one) == (
        "sysfs 0 (AMD Instinct MI210): util 37 %, 11.2 MB of 64.0 GB, 1,700 MHz, 96 W, 45 C"
    )
    assert not list(problems(DEVICE.schema, DEVICE.record(one)))


def test_amd_without_some_files(cards: Path) -> None:
    place = cards / "card1/device"
    (place / "product_name").unlink()
    (place / "gpu_busy_percent").write_text("")
    (place / "hwmon/hwmon3/power1_average").rename(place / "hwmon/hwmon3/power1_input")
    (place / "hwmon/hwmon3/temp1_input").unlink()
    (one,) = devices.amd(cards)
    assert (one.name, one.utilization, one.temperature_c, one.power_mw) == (None, None, None, 96000)
    assert one.unknown["temperature_c"] == "no file hwmon/hwmon*/temp1_input"
    assert sorted(one.unknown) == ["name", "temperature_c", "utilization"]


def test_the_name_of_a_single_amd_gpu_is_hips(cards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hip:
        def devices(self) -> list[dict[str, str]]:
            return [{"name": "AMD Radeon VII"}]

        def close(self) -> None:
            closed.append(True)

    closed: list[bool] = []
    monkeypatch.setattr(devices, "HipDevices", Hip)
    (cards / "card1/device/product_name").unlink()
    (one,), unknown = read(cards)
    assert (one.name, unknown, closed) == ("AMD Radeon VII", [], [True])


def test_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    use_no_nvml(monkeypatch)
    assert read() == ([], [])

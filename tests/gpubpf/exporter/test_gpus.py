"""The GPUs themselves: what drivers report, as metrics with bounded numbers of series."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")
from gpubpf.agent.definitions import Vendor
from gpubpf.exporter import gpus
from gpubpf.exporter.gpus import Gpus, Reading, families
from gpubpf.exporter.metrics import MOST_LETTERS, Family
from gpubpf.exporter.pods import Place
from gpubpf.exporter.watch import Owner
from gpubpf.gpus.devices import Devices, GpuDevice
from gpubpf.record import replace
from gpubpf_exporter import exporting, get, until
from gpubpf_gpus import amd_cards, build_nvml, use_no_nvml, use_nvml

GIB = 1 << 30
FIRST, SECOND = ("nvidia", "0", "GPU-0"), ("nvidia", "1", "GPU-1")
Values = Mapping[str, Mapping[tuple[str, ...], float]]


def values(found: Sequence[Family]) -> Values:
    """The samples of each metric, by labels."""
    made = {}
    for family in found:
        samples = dict(family.samples)
        assert len(samples) == len(family.samples), "a series is there once"
        assert all(len(labels) == len(family.labels) for labels in samples)
        made[family.name.removeprefix("gpubpf_")] = samples
    return made


def owner(pid: int) -> Owner:
    return Owner(f"app{pid}", Place("team", f"pod-{pid}", "main"))


def read(devices: Devices) -> tuple[Values, list[str]]:
    """What the first readings give, and the notices."""
    notices: list[str] = []
    with Gpus(0.01, 5, notices.append, devices, owner) as made:
        until(lambda: values(made.latest())["gpu_readings"][()] >= 3)
        return values(made.latest()), notices


def test_gpus_of_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second GPU is divided, and does not report two values: they have no series, but the reason."""
    build_nvml(tmp_path)
    use_nvml(monkeypatch, tmp_path)
    found, notices = read(Devices(Path("/nonexistent")))
    assert found["gpus"] == {("nvidia",): 2}
    assert found["gpu_info"] == {(*FIRST, "NVIDIA Test 0"): 1, (*SECOND, "NVIDIA Test 1"): 1}
    assert found["gpu_utilization_ratio"] == {FIRST: 0.95}
    assert found["gpu_memory_used_bytes"] == {FIRST: 40 * GIB, SECOND: 40 * GIB}
    assert found["gpu_memory_total_bytes"] == {FIRST: 80 * GIB, SECOND: 80 * GIB}
    assert found["gpu_clock_hertz"] == {FIRST: 1.98e9, SECOND: 1.98e9}
    assert found["gpu_power_watts"] == {FIRST: pytest.approx(512.345)}
    assert found["gpu_temperature_celsius"] == {FIRST: 61, SECOND: 61}
    assert found["gpu_mig_enabled"] == {FIRST: 0, SECOND: 1}
    instance = (*SECOND, "MIG-0", "NVIDIA Test MIG 1g")
    assert found["mig_memory_used_bytes"] == {instance: GIB}
    assert found["mig_memory_total_bytes"] == {instance: 80 * GIB}
    assert found["process_gpu_memory_bytes"] == {(*FIRST, "app1234", "team", "pod-1234", "main"): 3 * GIB}
    assert found["gpu_values_unknown"] == {
        (*SECOND, "utilization", "Not Supported"): 1,
        (*SECOND, "power", "Not Supported"): 1,
    }
    assert notices == ["NVML 1: utilization, power unknown: Not Supported"], "once, not in each reading"


def test_a_driver_that_fails_is_a_series_and_one_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_nvml(tmp_path).write_text("this is not a library")
    use_nvml(monkeypatch, tmp_path)
    found, notices = read(Devices(Path("/nonexistent")))
    assert found["gpus"] == found["gpu_info"] == {}
    (((vendor, gpu, number, value, reason), one),) = found["gpu_values_unknown"].items()
    assert (vendor, gpu, number, value, one) == ("nvidia", "", "", "all", 1) and reason
    (notice,) = notices
    assert notice.startswith("values of NVIDIA's driver are unknown: ")


def test_gpus_of_sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_no_nvml(monkeypatch)
    cards = amd_cards(tmp_path)
    (cards / "card1/device/hwmon/hwmon3/temp1_input").unlink()
    found, notices = read(Devices(cards))
    gpu = ("amd", "0", "0000:83:00.0")
    assert found["gpu_info"] == {(*gpu, "AMD Instinct MI210"): 1}
    assert found["gpu_utilization_ratio"] == {gpu: 0.37} and found["gpu_power_watts"] == {gpu: 96}
    assert found["gpu_clock_hertz"] == {gpu: 1.7e9} and found["gpu_temperature_celsius"] == {}
    assert found["gpu_values_unknown"] == {(*gpu, "temperature", "no file hwmon/hwmon*/temp1_input"): 1}
    assert notices == ["sysfs 0: temperature unknown: no file hwmon/hwmon*/temp1_input"]


def test_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    use_no_nvml(monkeypatch)
    found, notices = read(Devices(Path("/nonexistent")))
    assert not notices and {name for name, samples in found.items() if samples} == {"gpu_readings"}


GPU = GpuDevice(Vendor.NVIDIA, 0, 'name"}\n\x1b[31m', "GPU-x", 0.5)


def made(devices: Sequence[GpuDevice], top: int = 5) -> Values:
    return values(list(families(Reading(devices), owner, top)))


def test_the_number_of_series_is_bounded() -> None:
    instance = {"name": "1g", "memory_used_bytes": 1, "memory_total_bytes": 2}
    many = [{**instance, "id": f"MIG-{n}"} for n in range(100)]
    users = [{"pid": pid, "memory_bytes": pid} for pid in range(1, 1001)]
    found = made([replace(GPU, index=n, instances=many, processes=users) for n in range(100)], top=7)
    assert found["gpus"] == {("nvidia",): 100}, "their number is known"
    assert len(found["gpu_utilization_ratio"]) == gpus.MOST_GPUS
    assert len(found["mig_memory_used_bytes"]) == gpus.MOST_GPUS * gpus.MOST_INSTANCES
    memory = found["process_gpu_memory_bytes"]
    assert len(memory) == 7 + gpus.MOST_GPUS
    assert sum(memory.values()) == gpus.MOST_GPUS * sum(range(1, 1001)), "the rest is `other`"
    assert memory["nvidia", "0", "GPU-x", "app1000", "team", "pod-1000", "main"] == 1000


def test_memory_of_an_owner_is_added_up() -> None:
    def same(pid: int) -> Owner:
        return owner(1)

    users = [{"pid": 1, "memory_bytes": 5}, {"pid": 2, "memory_bytes": 6}, {"pid": 3, "memory_bytes": None}]
    (family,) = [
        one
        for one in families(Reading([replace(GPU, processes=users)]), same, 5)
        if one.name == "gpubpf_process_gpu_memory_bytes"
    ]
    assert dict(family.samples) == {("nvidia", "0", "GPU-x", "app1", "team", "pod-1", "main"): 11}


def test_what_a_driver_says_is_printable_and_short() -> None:
    found = made([replace(GPU, id="x" * 1000, unknown={"power_mw": "\n\x1b" * 1000})])
    for samples in found.values():
        for labels in samples:
            assert all(len(text) <= MOST_LETTERS and text.isprintable() for text in labels)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_scrape_has_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter watches every process; no program runs."""
    build_nvml(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with exporting() as exporter:

        def there() -> Any:
            found = exporter.scrape()
            return found if get(found, "gpubpf_gpu_power_watts") else {}

        found = until(there, exporter.notices)
        assert get(found, "gpubpf_gpu_power_watts", id="GPU-0") == pytest.approx(512.345)
        assert get(found, "gpubpf_mig_memory_used_bytes", instance_id="MIG-0") == GIB
        assert get(found, "gpubpf_process_gpu_memory_bytes") == 3 * GIB
        exporter.noticed("NVML 1: utilization, power unknown: Not Supported\n")
        assert exporter.end() == 0

"""GPUs that are not there: a stand-in for NVML's library, and sysfs of a machine with an AMD GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gpubpf.gpus import devices

STAND_IN = Path(__file__).parents[1] / "gpubpf/gpus/nvml_stand_in.c"
CARD = {  # as the kernel's amdgpu driver lays it out
    "vendor": "0x1002\n",
    "product_name": "AMD Instinct MI210\n",
    "gpu_busy_percent": "37\n",
    "mem_info_vram_used": "11763712\n",
    "mem_info_vram_total": "68702699520\n",
    "hwmon/hwmon3/freq1_input": "1700000000\n",
    "hwmon/hwmon3/power1_average": "96000000\n",
    "hwmon/hwmon3/temp1_input": "45000\n",
}


def build_nvml(directory: Path, *options: str) -> Path:
    """Build the stand-in for NVML's library, with known answers. Skips the test without a compiler or cuda-bindings."""
    pytest.importorskip("cuda.bindings.nvml", reason="no cuda-bindings here; script/setup --dev installs it")
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    library = directory / "libnvidia-ml.so.1"
    command = ["gcc", "-Wall", "-Wextra", "-Wno-unused-parameter", "-shared", "-fPIC", *options]
    subprocess.run([*command, "-o", library, STAND_IN], check=True)
    return library


def use_nvml(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Let this process find NVML's library in a directory, and wait long for its answers."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(directory))
    monkeypatch.setattr(devices, "START_WAIT", 60.0)
    monkeypatch.setattr(devices, "ANSWER_WAIT", 60.0)


def use_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process find no NVML."""
    monkeypatch.setattr(devices, "NVIDIA_FILES", ())
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)


def amd_cards(directory: Path) -> Path:
    """Return a directory /sys/class/drm with an AMD GPU, its connectors, and a GPU of another vendor."""
    place = directory / "devices/pci0000:80/0000:83:00.0"
    for name, text in CARD.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    other = directory / "devices/0000:03:00.0"
    other.mkdir()
    (other / "vendor").write_text("0x1a03\n")
    drm = directory / "drm"
    for name, target in (("card0", other), ("card1", place), ("card1-DP-1", place)):
        (drm / name).mkdir(parents=True)
        (drm / name / "device").symlink_to(target)
    (drm / "version").write_text("drm\n")
    return drm

"""What drivers say of the GPUs of this machine: utilization, memory, clock, power, temperature, MIG.

with Devices() as devices:
    for one in devices.read(): …          # GpuDevice, each value or the reason why it is not known

NVIDIA's GPUs are those of NVML, through cuda-python in a child process (nvml_reader.py). AMD's are those of sysfs
(https://docs.kernel.org/gpu/amdgpu/thermal.html); the name of a single one is that of hip-python, where it is installed.
Not tested with a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpubpf.agent.definitions import Vendor
from gpubpf.errors import how_to_install
from gpubpf.gpus.hip_devices import HipDevices
from gpubpf.process import children
from gpubpf.record import Record, field, replace
from gpubpf.show import table

_READER = "from gpubpf.gpus import nvml_reader; nvml_reader.main()"
NVIDIA_FILES = (
    Path("/dev/nvidiactl"),
    Path("/dev/dxg"),
)  # one exists where NVIDIA's driver is loaded; the second on WSL
CARDS = Path("/sys/class/drm")
_AMD = "0x1002"  # PCI vendor
START_WAIT, ANSWER_WAIT = 5.0, 0.5  # seconds
LONGEST_ANSWER = 1 << 20  # bytes
NAME = 24  # columns
# Values, and what they are called in sentences.
VALUES = {
    "name": "name",
    "id": "identity",
    "utilization": "utilization",
    "memory_used_bytes": "used memory",
    "memory_total_bytes": "memory",
    "clock_mhz": "clock",
    "power_mw": "power",
    "temperature_c": "temperature",
    "mig": "MIG mode",
    "instances": "MIG instances",
    "processes": "processes",
}


class GpuDevice(Record):
    """A GPU, as its driver describes it.

    index: the driver's number of the GPU; a process may number its GPUs otherwise.
    id: UUID of an NVIDIA GPU, PCI address of an AMD GPU.
    utilization: from 0 to 1, by the driver's own measure and in its own interval.
    clock_mhz, power_mw, temperature_c: of the GPU's multiprocessors, in MHz; of the board, in mW; in degrees Celsius.
    mig: whether MIG is on. instances: the MIG instances: `name`, `id`, `memory_used_bytes`, `memory_total_bytes`.
    processes: those that use the GPU, measured or not: `pid`, `memory_bytes`.
    unknown: by the name of a value: why it is None.
    """

    vendor: Vendor
    index: int
    name: str | None = None
    id: str | None = None
    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    clock_mhz: int | None = None
    power_mw: int | None = None
    temperature_c: int | None = None
    mig: bool | None = None
    instances: Sequence[Mapping[str, Any]] = ()
    processes: Sequence[Mapping[str, Any]] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)


def has_nvml() -> bool:
    """Return whether NVML may find a GPU: NVIDIA's driver is loaded, or LD_LIBRARY_PATH has NVML's library."""
    places = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    return any(file.exists() for file in (*NVIDIA_FILES, *(Path(one, "libnvidia-ml.so.1") for one in places)))


class Nvml:
    """A child process that reads NVML.

    why: why nothing is known; "": something is, or NVML has not answered yet.
    """

    def __init__(self) -> None:
        self.why = ""
        self._pending = 1  # answers that will come: the first without a question
        self._text = b""
        self._process = subprocess.Popen(
            children.python(_READER),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=children.environment("LD_LIBRARY_PATH"),
            start_new_session=True,  # Ctrl-C must not end it
        )  # fmt: skip
        self._wait = START_WAIT  # for the next answer

    def read(self) -> list[GpuDevice]:
        """Return what NVML says of each GPU now; [] if it says nothing in time, or reports an error, which may pass."""
        if not self._pending or self._wait == START_WAIT:
            self._ask()
        found: list[GpuDevice] = []
        until = time.monotonic() + self._wait
        while self._pending and (answer := self._answer(until)) is not None:
            self._pending -= 1
            self.why = answer.get("error", "")
            if missing := answer.get("missing"):
                self.why += f"; {how_to_install(missing)}"
            found = [GpuDevice(Vendor.NVIDIA, **one) for one in answer.get("devices", ())]
        if self._pending and not self.why:
            self.why = f"NVML did not answer in {self._wait:g} s"
        self._wait = ANSWER_WAIT
        return found

    def _ask(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, and its last line says why
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
            self._pending += 1

    def _answer(self, until: float) -> dict[str, Any] | None:
        """Return the next answer; None: no answer came before the time `until` (time.monotonic)."""
        assert self._process.stdout is not None
        while b"\n" not in self._text:
            if not select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data or len(self._text) > LONGEST_ANSWER:
                self._pending = 0
                self.why = self.why or "the process that reads NVML has ended"
                return None
            self._text += data
        line, self._text = self._text.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def amd(cards: Path = CARDS) -> list[GpuDevice]:
    """Return what the kernel's driver says of AMD's GPUs. cards: the directory /sys/class/drm."""
    found: list[GpuDevice] = []
    for card in sorted(cards.glob("card*"), key=lambda path: (len(path.name), path.name)):
        place = card / "device"
        with contextlib.suppress(OSError):  # another vendor's files may be missing
            if card.name[4:].isdigit() and (place / "vendor").read_text().strip() == _AMD:
                found.append(_amd_card(place, len(found)))
    return found


def _amd_card(place: Path, index: int) -> GpuDevice:
    values: dict[str, Any] = {}
    unknown: dict[str, str] = {}

    def read(name: str, value: Callable[[str], Any], *files: str) -> None:
        """Set a value from the first of these files that exists."""
        paths = [path for pattern in files for path in sorted(place.glob(pattern))]
        try:
            if not paths:
                raise FileNotFoundError(f"no file {files[0]}")
            values[name] = value(paths[0].read_text().strip())
        except (OSError, ValueError) as error:
            unknown[name] = getattr(error, "strerror", None) or str(error)

    def divided(by: int) -> Callable[[str], int]:
        return lambda text: int(text) // by

    read("name", str, "product_name")
    read("utilization", lambda text: int(text) / 100, "gpu_busy_percent")
    read("memory_used_bytes", int, "mem_info_vram_used")
    read("memory_total_bytes", int, "mem_info_vram_total")
    read("clock_mhz", divided(10**6), "hwmon/hwmon*/freq1_input")
    read("power_mw", divided(1000), "hwmon/hwmon*/power1_average", "hwmon/hwmon*/power1_input")
    read("temperature_c", divided(1000), "hwmon/hwmon*/temp1_input")
    return GpuDevice(Vendor.AMD, index, id=place.resolve().name, **values, unknown=unknown)


class Devices:
    """All GPUs of this machine, as a context manager. cards: see `amd`."""

    def __init__(self, cards: Path = CARDS) -> None:
        self._cards = cards

    def __enter__(self) -> Devices:
        self._nvml = Nvml() if has_nvml() else None
        self._hip = HipDevices() if amd(self._cards) else None
        self._name: str | None = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._nvml:
            self._nvml.close()
        if self._hip:
            self._hip.close()

    def read(self) -> list[GpuDevice]:
        """Return the GPUs, with their values now."""
        return [*(self._nvml.read() if self._nvml else ()), *self._amd()]

    def _amd(self) -> Iterator[GpuDevice]:
        found = amd(self._cards)
        if self._hip and not self._name and len(found) == 1:
            named = self._hip.devices() or ()
            self._name = named[0]["name"] if len(named) == 1 else None
        for one in found:
            if one.name is None and self._name:
                rest = {name: why for name, why in one.unknown.items() if name != "name"}
                one = replace(one, name=self._name, unknown=rest)
            yield one

    @property
    def nvml_why(self) -> str:
        """Why NVML reported nothing in the last reading; "" if it reported something, or if there is no NVML."""
        return self._nvml.why if self._nvml else ""

    def unknown(self, found: Sequence[GpuDevice]) -> Iterator[str]:
        """Yield a sentence about each GPU with values that are not known, and about NVML if it says nothing."""
        if self.nvml_why:
            yield f"values of NVIDIA's driver are unknown: {self.nvml_why}"
        for one in found:
            by_reason: dict[str, list[str]] = {}
            for name, why in one.unknown.items():
                by_reason.setdefault(why, []).append(VALUES.get(name, name))
            for why, names in by_reason.items():
                yield f"{driver_name(one)}: {', '.join(names)} unknown: {why}"


def driver_name(one: GpuDevice) -> str:
    """Return what to call a GPU of a driver: ``NVML 0``. A process may number its GPUs otherwise."""
    return f"{'sysfs' if one.vendor == Vendor.AMD else 'NVML'} {one.index}"


def line(one: GpuDevice) -> str:
    """Return the known values of a GPU: ``NVML 0 (NVIDIA H100): util 95 %, 40.0 of 80.0 GB, 1,980 MHz, 512 W, 61 C``."""
    used, total = one.memory_used_bytes, one.memory_total_bytes
    parts = [
        f"util {100 * one.utilization:.0f} %" if one.utilization is not None else "",
        f"{table.size(used)} of {table.size(total)}" if used is not None and total is not None else "",
        f"{one.clock_mhz:,} MHz" if one.clock_mhz is not None else "",
        f"{one.power_mw / 1000:.0f} W" if one.power_mw is not None else "",
        f"{one.temperature_c} C" if one.temperature_c is not None else "",
        f"MIG with {table.count(len(one.instances), 'instance')}" if one.mig else "",
    ]
    name = f" ({table.fit(one.name, NAME)})" if one.name else ""
    return f"{driver_name(one)}{name}: {', '.join(filter(None, parts)) or 'nothing known'}"

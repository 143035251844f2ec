"""The GPUs themselves: what their drivers report, as metrics.

gpus = Gpus(5.0, top, note)
with gpus:                        # a thread reads NVML and sysfs every 5 seconds
    for family in gpus.latest(): …

A thread of its own reads the drivers, because a driver may hang.
A value that is not known has no series of its own; another series has the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from gpubpf.exporter.metrics import OTHER, Family, label
from gpubpf.exporter.pods import Pods
from gpubpf.exporter.watch import OWNER_LABELS, Owner
from gpubpf.gpus.devices import VALUES, Devices, GpuDevice
from gpubpf.process import traceable
from gpubpf.record import Record

MOST_GPUS, MOST_INSTANCES = 64, 16  # with series; a GPU has at most 7 MIG instances (NVIDIA's MIG User Guide)
MOST_NOTICES = 20
CLOSE_WAIT = 1.0  # seconds for a reading that is under way when the exporter ends
GPU_LABELS = ("vendor", "gpu", "id")
INSTANCE_LABELS = (*GPU_LABELS, "instance_id", "profile")
# (metric, meaning, value of GpuDevice, factor)
_GAUGES: tuple[tuple[str, str, str, float], ...] = (
    (
        "utilization_ratio",
        "Utilization of the GPU by its driver's own measure, from 0 to 1.",
        "utilization",
        1,
    ),
    ("memory_used_bytes", "GPU memory in use.", "memory_used_bytes", 1),
    ("memory_total_bytes", "GPU memory.", "memory_total_bytes", 1),
    ("clock_hertz", "Clock of the multiprocessors.", "clock_mhz", 1e6),
    ("power_watts", "Power that the board draws.", "power_mw", 1e-3),
    ("temperature_celsius", "Temperature of the GPU.", "temperature_c", 1),
    ("mig_enabled", "1 if the GPU is divided into MIG instances.", "mig", 1),
)


class Reading(Record):
    """What the drivers reported at one time.

    devices: the GPUs.
    failed: by vendor: why its driver reports nothing.
    """

    devices: Sequence[GpuDevice] = ()
    failed: Sequence[tuple[str, str]] = ()


class Gpus:
    """Reads the drivers in a thread of its own, as a context manager.

    every: seconds between readings.
    top: the number of owners of GPU memory that have series of their own.
    note: gets a notice about each value that is not known, and about each driver that reports nothing.
    devices: reads the drivers.
    owner: return the owner of a process, by its pid.
    """

    def __init__(
        self,
        every: float,
        top: int,
        note: Callable[[str], None],
        devices: Devices | None = None,
        owner: Callable[[int], Owner] | None = None,
    ) -> None:
        self._every, self._top, self._note = every, top, note
        self._devices, self._owner = devices or Devices(), owner or _owners()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpubpf-gpus", daemon=True)
        self._noted: set[str] = set()
        self._readings = 0
        self._latest = list(families(Reading(), self._owner, top))

    def __enter__(self) -> Gpus:
        self._devices.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the readings. Wait a moment for one that is under way."""
        self._ending.set()
        self._thread.join(CLOSE_WAIT)
        self._devices.__exit__()

    def latest(self) -> list[Family]:
        """Return the metrics as of the last reading. From any thread."""
        about = "How often the drivers of GPUs were read. A driver that hangs stops this counter."
        return [*self._latest, Family("gpubpf_gpu_readings", "counter", about, (), [((), self._readings)])]

    def _run(self) -> None:
        while not self._ending.is_set():
            found = self._devices.read()
            for text in self._devices.unknown(found):
                self._note_once(text)
            failed = [("nvidia", self._devices.nvml_why)] if self._devices.nvml_why else []
            self._latest = list(families(Reading(tuple(found), failed), self._owner, self._top))
            self._readings += 1
            self._ending.wait(self._every)

    def _note_once(self, text: str) -> None:
        if text not in self._noted and len(self._noted) < MOST_NOTICES and not self._ending.is_set():
            self._noted.add(text)
            self._note(text)


def _owners() -> Callable[[int], Owner]:
    """Return a function that returns the owner of a process, by its pid."""
    pods = Pods()
    return lambda pid: Owner(traceable.comm(pid), pods.place(pid))


def families(reading: Reading, owner: Callable[[int], Owner], top: int) -> Iterator[Family]:
    """Yield the metrics of a reading. owner, top: see `Gpus`."""
    shown = reading.devices[:MOST_GPUS]
    counts: dict[str, int] = {}
    for one in reading.devices:
        counts[one.vendor.word] = counts.get(one.vendor.word, 0) + 1
    yield Family(
        "gpubpf_gpus",
        "gauge",
        f"GPUs that the driver reports. The first {MOST_GPUS} of all have series.",
        ("vendor",),
        [((vendor,), count) for vendor, count in counts.items()],
    )
    named = [((*_labels(one), label(one.name or "")), 1.0) for one in shown]
    yield Family(
        "gpubpf_gpu_info", "gauge", "1; the labels have the GPU's name.", (*GPU_LABELS, "name"), named
    )
    for name, about, value, factor in _GAUGES:
        known = [(_labels(one), getattr(one, value)) for one in shown]
        samples = [(labels, factor * number) for labels, number in known if number is not None]
        yield Family(f"gpubpf_gpu_{name}", "gauge", about, GPU_LABELS, samples)
    yield from _instances(shown)
    yield _memory(shown, owner, top)
    yield _unknown(reading, shown)


def _labels(one: GpuDevice) -> tuple[str, ...]:
    return one.vendor.word, str(one.index), label(one.id or "")


def _instances(shown: Iterable[GpuDevice]) -> Iterator[Family]:
    """Yield the metrics of MIG instances."""
    found = [
        ((*_labels(one), label(instance["id"]), label(instance["name"])), instance)
        for one in shown
        for instance in one.instances[:MOST_INSTANCES]
    ]
    for name, about in (
        ("memory_used_bytes", "Memory in use of a MIG instance."),
        ("memory_total_bytes", "Memory of a MIG instance."),
    ):
        samples = [(labels, float(instance[name])) for labels, instance in found]
        yield Family(f"gpubpf_mig_{name}", "gauge", about, INSTANCE_LABELS, samples)


def _memory(shown: Iterable[GpuDevice], owner: Callable[[int], Owner], top: int) -> Family:
    """Return how much memory of each GPU the processes of each owner hold. The owners with the least memory share a series."""
    held: dict[tuple[str, ...], int] = {}
    for one in shown:
        for process in one.processes:
            if process["memory_bytes"] is not None:
                key = (*_labels(one), *owner(process["pid"]).labels)
                held[key] = held.get(key, 0) + process["memory_bytes"]
    samples: dict[tuple[str, ...], float] = {}
    for place, (key, bytes_) in enumerate(sorted(held.items(), key=lambda item: (-item[1], item[0]))):
        if place >= top:
            key = (*key[: len(GPU_LABELS)], *(OTHER,) * len(OWNER_LABELS))
        samples[key] = samples.get(key, 0) + bytes_
    return Family(
        "gpubpf_process_gpu_memory_bytes",
        "gauge",
        "GPU memory of processes of this name, in this container, measured or not; NVIDIA's GPUs only.",
        (*GPU_LABELS, *OWNER_LABELS),
        list(samples.items()),
    )


def _unknown(reading: Reading, shown: Iterable[GpuDevice]) -> Family:
    samples: dict[tuple[str, ...], float] = {
        (vendor, "", "", "all", label(why)): 1 for vendor, why in reading.failed
    }
    for one in shown:
        for value, why in one.unknown.items():
            samples[(*_labels(one), VALUES.get(value, value), label(why))] = 1
    return Family(
        "gpubpf_gpu_values_unknown",
        "gauge",
        "1 for each value that a driver does not report, with the reason.",
        (*GPU_LABELS, "value", "reason"),
        list(samples.items()),
    )

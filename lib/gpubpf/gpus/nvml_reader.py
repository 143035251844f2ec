"""Read NVIDIA's GPUs through NVML, by cuda-python. This is a separate program, which `devices.Nvml` starts: a driver may hang.

It prints a line when it is ready, and a line for each line that it reads from standard input: a JSON object with `devices`, or with
`error`. It imports nothing of gpubpf. NVML's documentation: https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

NOT_REPORTED = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE


def main() -> None:
    """Answer until standard input ends."""
    try:
        from cuda.bindings import nvml
    except ImportError:
        say({"error": "the Python package cuda-bindings is missing", "missing": "cuda-bindings"})
        return
    try:
        nvml.init_v2()
    except Exception as error:  # the package raises types of several of its modules
        say({"error": first_line(error)})
        return
    say({"devices": []})
    for _ in sys.stdin:
        try:
            say({"devices": [device(nvml, index) for index in range(nvml.device_get_count_v2())]})
        except Exception as error:
            say({"error": first_line(error)})


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def device(nvml: Any, index: int) -> dict[str, Any]:
    """Return what NVML says of a GPU: each value, or the reason in `unknown`."""
    unknown: dict[str, str] = {}
    found: dict[str, Any] = {"index": index, "unknown": unknown}

    def read(names: str, value: Callable[[], Any]) -> None:
        """Set the values with these names. Each is read separately: a GPU may have some of them only."""
        words = names.split()
        values: Any = (None,) * len(words)
        try:
            made = value()
            values = made if len(words) > 1 else (made,)
        except Exception as error:
            unknown.update(dict.fromkeys(words, first_line(error)))
        found.update(zip(words, values, strict=True))

    def memory(of: int) -> tuple[int, int]:
        told = nvml.device_get_memory_info_v2(of)
        return int(told.used), int(told.total)

    def instances() -> list[dict[str, Any]]:
        made = []
        for number in range(nvml.device_get_max_mig_device_count(handle)):
            try:
                one = nvml.device_get_mig_device_handle_by_index(handle, number)
            except Exception:  # there is no instance of this number
                continue
            used, total = memory(one)
            name, uuid = str(nvml.device_get_name(one)), str(nvml.device_get_uuid(one))
            made.append({"name": name, "id": uuid, "memory_used_bytes": used, "memory_total_bytes": total})
        return made

    def processes() -> list[dict[str, Any]]:
        made = []
        for one in nvml.device_get_compute_running_processes_v3(handle):
            used = int(one.used_gpu_memory)
            made.append({"pid": int(one.pid), "memory_bytes": None if used == NOT_REPORTED else used})
        return made

    handle = nvml.device_get_handle_by_index_v2(index)
    read("name", lambda: str(nvml.device_get_name(handle)))
    read("id", lambda: str(nvml.device_get_uuid(handle)))
    read("utilization", lambda: int(nvml.device_get_utilization_rates(handle).gpu) / 100)
    read("memory_used_bytes memory_total_bytes", lambda: memory(handle))
    read("clock_mhz", lambda: int(nvml.device_get_clock_info(handle, int(nvml.ClockType.CLOCK_SM))))
    read("power_mw", lambda: int(nvml.device_get_power_usage(handle)))
    sensor = nvml.TemperatureSensors.TEMPERATURE_GPU
    read("temperature_c", lambda: int(nvml.device_get_temperature_v(handle, sensor)))
    read("mig", lambda: bool(nvml.device_get_mig_mode(handle)[0]))
    found["instances"] = []
    if found["mig"]:
        read("instances", instances)
    read("processes", processes)
    for name in ("instances", "processes"):
        found[name] = found[name] or []
    return found

"""Instrumented kernels on the embedded device: they do what the originals do, and count what is known beforehand.

The device's libcuda is used in a child process (this file as a script), by its public entry points alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpubpf.ebpf.probe import Probe
from gpubpf.record import replace

HERE = Path(__file__).resolve().parent
LIBCUDA = HERE.parents[2] / "lib" / "cudasim" / "lib" / "libcuda.so.1"

# kernel: grid, block, dynamic shared memory, parameters (a name of BUFFERS, or bytes)
BUFFERS: dict[str, bytes] = {
    "ints": struct.pack("<1024i", *(k * 7 % 50 for k in range(1024))),
    "floats": struct.pack("<1024f", *(k % 13 / 4 for k in range(1024))),
    "bytes": bytes(k % 256 for k in range(1024)),
    "zeros": bytes(4096),
}


def number(value: int) -> bytes:
    return struct.pack("<i", value)


LAUNCHES: dict[str, tuple[int, int, int, list[str | bytes]]] = {
    "_Z9vectorAddPKfS0_Pfi": (4, 8, 0, ["floats", "floats", "zeros", number(19)]),
    "_Z10gridStridePKfS0_Pfi": (1, 5, 0, ["floats", "floats", "zeros", number(19)]),
    "_Z6reduceIiEvPKT_PS0_i": (2, 64, 256, ["ints", "zeros", number(100)]),
    "_Z5callsPii": (1, 1, 0, ["ints", number(5)]),
    "_Z18leavesFromFunctionPii": (1, 8, 0, ["ints", number(3)]),
    "_Z22earlyReturnThenBarrierPii": (1, 64, 0, ["ints", number(40)]),
    "_Z9histogramPKhi": (2, 32, 0, ["bytes", number(1000)]),
    "_Z9variablesPi": (1, 1, 0, ["ints"]),
    "_Z5hidesPi": (1, 1, 0, ["ints"]),
    "_Z10localTablePii": (1, 4, 0, ["ints", number(9)]),
    "_Z8switchesPii": (1, 1, 0, ["ints", number(4)]),
    "_Z15exitsByAssemblyPii": (1, 4, 0, ["ints", number(3)]),
    "_Z8shufflesPi": (1, 32, 0, ["ints"]),
    "_Z6groupsPii": (1, 32, 0, ["ints", number(900)]),
    "_Z11manyReturnsPii": (1, 4, 0, ["ints", number(60)]),
    "_Z5nbodyP6float4P6float3if": (1, 128, 0, ["floats", "zeros", number(128), struct.pack("<f", 0.5)]),
}


def reports(ptx: Path) -> dict[str, Any]:
    """What the script says: for each kernel, whether effects were the same, and runs and work of each thread."""
    done = subprocess.run([sys.executable, __file__, str(ptx)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.every(4)
@pytest.mark.parametrize("options", [[], ["-G"]], ids=["optimized", "debug"])
def test_kernels_run_as_before_and_are_counted(options: list[str], tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    if not LIBCUDA.exists():
        pytest.skip("the embedded device is not built; run script/setup")
    ptx = tmp_path / "corpus.ptx"
    subprocess.run(
        [nvcc, "-ptx", "-arch=sm_75", *options, str(HERE / "corpus.cu"), "-o", str(ptx)], check=True
    )
    found = reports(ptx)
    assert set(found) == set(LAUNCHES)
    for name, report in found.items():
        assert report["same"], name
        assert set(report["runs"]) == {1}, name
        assert min(report["instructions"]) >= 5, name
    stores = {name: report["stores"] for name, report in found.items()}
    assert stores["_Z9vectorAddPKfS0_Pfi"] == [1] * 19 + [0] * 13
    assert stores["_Z10gridStridePKfS0_Pfi"] == [4, 4, 4, 4, 3]
    assert stores["_Z22earlyReturnThenBarrierPii"] == [2] * 40 + [0] * 24
    # one into shared memory, one for each turn that the thread takes part in, one result
    turns = [sum(t < s for s in (32, 16, 8, 4, 2, 1)) for t in range(64)]
    assert stores["_Z6reduceIiEvPKT_PS0_i"] == [1 + turns[t] + (t == 0) for t in range(64)] * 2
    assert stores["_Z9histogramPKhi"] == [0] * 64
    assert stores["_Z15exitsByAssemblyPii"] == [0] * 4
    # lanes 0 to 3 leave in a function that a function calls
    left = stores["_Z18leavesFromFunctionPii"]
    assert left[:4] == [0] * 4 and min(left[4:]) >= 4
    if not options:
        assert found["_Z9vectorAddPKfS0_Pfi"]["instructions"] == [22] * 19 + [11] * 13


# --- the script ---------------------------------------------------------------------------------------


class Device:
    """A context on the embedded device."""

    def __init__(self) -> None:
        self.api = ctypes.CDLL(str(LIBCUDA))
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.api, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: error {status}")

    def load(self, text: str) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), text.encode() + b"\0")
        return module

    def allocate(self, data: bytes) -> int:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(len(data)))
        self.write(address.value, data)
        return address.value

    def write(self, address: int, data: bytes) -> None:
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

    def read(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return data.raw

    def variable(self, module: ctypes.c_void_p, name: str) -> int | None:
        address, size = ctypes.c_uint64(), ctypes.c_size_t()
        found = self.api.cuModuleGetGlobal_v2(
            ctypes.byref(address), ctypes.byref(size), module, name.encode()
        )
        return address.value if found == 0 else None

    def launch(
        self,
        module: ctypes.c_void_p,
        kernel: str,
        grid: int,
        block: int,
        shared: int,
        parameters: list[bytes],
    ) -> None:
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
        buffers = [ctypes.create_string_buffer(p, len(p)) for p in parameters]
        pointers = (ctypes.c_void_p * len(buffers))(*(ctypes.addressof(b) for b in buffers))
        self.call("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, shared, None, pointers, None)
        self.call("cuCtxSynchronize")


def main(path: str) -> None:
    from gpubpf.inject.inject import inject
    from gpubpf.ptx.module import Function, render
    from gpubpf.ptx.parser import parse
    from gpubpf.ptx.symbols import TABLE
    from gpubpf_fragments import tally

    device = Device()
    application = parse(Path(path).read_text())
    # without the kernels that do not run here: translating them takes most of the time
    wanted = tuple(
        i for i in application.items if not isinstance(i, Function) or i.kind == "func" or i.name in LAUNCHES
    )
    application = replace(application, items=wanted)
    probes = [Probe(tally(kind), "exit", kind) for kind in ("instructions", "stores")]
    injected = inject(application, dict.fromkeys(LAUNCHES, probes))
    assert not injected.refusals, injected.refusals
    original, sidecar = device.load(render(application)), device.load(injected.text)

    places: dict[str, int] = {}
    slots: list[bytes] = []
    for variable in injected.variables:
        place = device.variable(original, variable.name)
        if place is None and variable.copied:
            place = device.variable(sidecar, variable.name)
        assert place is not None, variable
        places[variable.name] = place
        entry = variable.entry
        slots.append(struct.pack("<Q", place) if entry is None else device.read(place + entry, 8))
    table = device.variable(sidecar, TABLE)
    assert table is not None
    device.write(table, b"".join(slots))
    variables = [(places[v.name], v.size) for v in injected.variables if not v.copied]
    found = {}
    for kernel, (grid, block, shared, parameters) in LAUNCHES.items():
        layout = injected.kernels[kernel]
        before = [device.read(*place) for place in variables]

        def effects(
            run: Callable[[list[bytes]], None], wanted: list[str | bytes] = parameters
        ) -> list[bytes]:
            buffers = {k: device.allocate(BUFFERS[p]) for k, p in enumerate(wanted) if isinstance(p, str)}
            run([p if isinstance(p, bytes) else struct.pack("<Q", buffers[k]) for k, p in enumerate(wanted)])
            return [device.read(b, 1024) for b in buffers.values()] + [
                device.read(*place) for place in variables
            ]

        threads = grid * block
        hidden = bytearray(layout.block.size)
        tallies = {name: device.allocate(bytes(16 * threads)) for name in layout.block.bases}
        for name, address in tallies.items():
            struct.pack_into("<Q", hidden, layout.block.bases[name], address)
            struct.pack_into("<Q", hidden, layout.block.capacities[name], threads)
        expected = effects(lambda given: device.launch(original, kernel, grid, block, shared, given))  # noqa: B023
        for place, data in zip(variables, before, strict=True):
            device.write(place[0], data)
        same = expected == effects(
            lambda given: device.launch(sidecar, kernel, grid, block, shared, [*given, bytes(hidden)])  # noqa: B023
        )
        report: dict[str, Any] = {"same": same}
        for name, address in tallies.items():
            words = struct.unpack(f"<{2 * threads}Q", device.read(address, 16 * threads))
            report["runs"], report[name] = words[::2], words[1::2]
        found[kernel] = report
    print(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[1] / "support"))
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)

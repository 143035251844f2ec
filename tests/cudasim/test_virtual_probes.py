"""On the virtual clock an instrumented kernel takes exactly the time of the original, for every thread, whatever the probes do."""

from __future__ import annotations

import importlib.util
import re
import struct
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from engine_device import Array, Device, compile_cuda, library, nvcc
from gpubpf.ebpf.maps import GROUPS, SAMPLED
from gpubpf.ebpf.probe import Probe
from gpubpf.inject.inject import inject
from gpubpf.inject.injected import Injected
from gpubpf.inject.values import PtxProbe
from gpubpf.lower.fragment import Argument, Fragment
from gpubpf.ptx.module import Module, render
from gpubpf.ptx.parser import parse
from gpubpf.ptx.symbols import TABLE
from gpubpf.record import replace
from gpubpf_fragments import ROOM, log, tally

PTX = Path(__file__).resolve().parents[1] / "gpubpf" / "inject"
START = 5_000


def _inject_runs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("inject_runs", PTX / "test_inject_runs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUNS = _inject_runs()


INDEX = "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.u32 %r4, %r2, %r3, %r1;"


def stamp(name: str) -> Fragment:
    """NAME[thread] = globaltimer"""
    return Fragment(
        name,
        f"""{{
.reg .b64 %rd<4>; .reg .b32 %r<5>;
mov.u64 %rd1, %globaltimer;
{INDEX}
mul.wide.u32 %rd2, %r4, 8; add.u64 %rd2, %rd2, %gpubpf_{name};
st.u64 [%rd2], %rd1;
}}""",
        (Argument(name, "b64", "map_base", name),),
    )


def long_stamp(name: str) -> Fragment:
    """The same, after work whose length differs between lanes, atomics and collectives."""
    return Fragment(
        name,
        f"""{{
.reg .pred %p<4>; .reg .b64 %rd<6>; .reg .b32 %r<12>;
mov.u64 %rd1, %globaltimer;
{INDEX}
and.b32 %r5, %r1, 7;
$L_again:
setp.eq.u32 %p1, %r5, 0;
@%p1 bra $L_done;
sub.u32 %r5, %r5, 1;
nanosleep.u32 1000;
bra $L_again;
$L_done:
activemask.b32 %r6;
bar.warp.sync %r6;
shfl.sync.idx.b32 %r7, %r4, 0, 31, %r6;
vote.sync.ballot.b32 %r8, %p1, %r6;
mul.wide.u32 %rd2, %r4, 8; add.u64 %rd2, %rd2, %gpubpf_{name};
atom.exch.b64 %rd3, [%rd2], %rd1;
mov.u64 %rd4, %clock64;
setp.ne.u64 %p2, %rd4, %rd1;
@%p2 trap;
}}""",
        (Argument(name, "b64", "map_base", name),),
    )


COUNT = Probe(tally("tallies"), "exit", "instructions")
SHORT = [Probe(long_stamp("began"), "entry"), Probe(stamp("left"), "exit"), COUNT]
POINTS = (
    "access",
    "basic_block",
    "branch",
    "value",
    "float",
    "instruction",
    "barrier_arrive",
    "barrier_leave",
    "function_entry",
    "function_exit",
    "block_begin",
    "block_end",
)
EVERYWHERE = [*SHORT, *(Probe(log(point), point) for point in POINTS)]
LONG = [Probe(stamp("began"), "entry"), Probe(long_stamp("left"), "exit"), COUNT]


def corpus(kernels: list[str], *options: str) -> Module:
    text = compile_cuda((PTX / "corpus.cu").read_text(), *options)
    application = parse(
        re.sub("_INTERNAL_[0-9a-f]+", "_INTERNAL_0", text)
    )  # names that differ each time are not cached
    kept = tuple(i for i in application.items if getattr(i, "kind", "func") == "func" or i.name in kernels)
    return replace(application, items=kept)


class Pair:
    """A module and its instrumented copy, loaded."""

    def __init__(self, application: Module, kernels: list[str], probes: list[PtxProbe]) -> None:
        self.injected: Injected = inject(application, dict.fromkeys(kernels, probes))
        assert not self.injected.refusals
        self.original = Device(render(application), virtual=True)
        self.copy = Device(self.injected.text, virtual=True)
        places = []
        for variable in self.injected.variables:
            owner = self.original if self._address(self.original, variable.name) else self.copy
            places.append(self._address(owner, variable.name))
        if places:
            self.copy.variable(TABLE, np.uint64, (len(places),))[:] = places

    @staticmethod
    def _address(device: Device, name: str) -> int:
        return int(library().harness_variable(RUNS.ctypes.c_void_p(device.module), name.encode()))

    def variables(self) -> list[np.ndarray]:
        return [
            self.original.variable(v.name, np.uint8, (v.size,))
            for v in self.injected.variables
            if self._address(self.original, v.name) and v.size
        ]

    def compare(
        self, kernel: str, grid: int, block: int, shared: int, arguments: list[str | bytes]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ends of threads and their work; asserts that the probes saw the right times."""

        def given() -> list[object]:
            return [
                Array(np.frombuffer(RUNS.BUFFERS[a], np.uint8)) if isinstance(a, str) else a
                for a in arguments
            ]

        before = [v.copy() for v in self.variables()]
        self.original.launch(kernel, grid, block, *given(), shared=shared, start=START)
        ends, duration = self.original.ends, self.original.duration
        for variable, data in zip(self.variables(), before, strict=True):
            variable[:] = data
        threads = grid * block
        layout = self.injected.kernels[kernel].block
        hidden = bytearray(layout.size)
        rows = {"log": 5 * ROOM, SAMPLED: GROUPS // 2}
        maps = {name: Array(np.zeros((rows.get(name, threads), 2), np.uint64)) for name in layout.bases}
        for name, storage in maps.items():
            struct.pack_into("<Q", hidden, layout.bases[name], storage.address)
        struct.pack_into("<Q", hidden, layout.capacities["tallies"], threads)
        for offset, size in layout.params.values():  # with sampling: every warp is chosen
            hidden[offset : offset + size] = b"\xff" * size
        self.copy.launch(kernel, grid, block, *given(), bytes(hidden), shared=shared, start=START, seed=3)
        assert (self.copy.ends == ends).all(), (self.copy.ends, ends)
        assert self.copy.duration == duration == ends.max() - START
        began = maps["began"].host.reshape(-1)[:threads]
        left = maps["left"].host.reshape(-1)[:threads]
        assert (began == START).all()
        assert np.isin(ends - left, [0, 1]).all()  # 0: the end of the function, without a `ret`
        return ends, maps["tallies"].host[:, 1]


CORPUS = {
    **{
        name: launch for name, launch in RUNS.LAUNCHES.items() if "manyReturns" not in name
    },  # takes long to translate
    "_Z8gridSyncPi": (4, 32, 0, ["ints"]),
    "_Z6lane31Pyi": (1, 64, 0, ["zeros", RUNS.number(50)]),
    "_Z5spinsPViPi": (1, 32, 0, ["zeros", "zeros"]),
}
UNOPTIMIZED = ("calls", "switches", "spins")
WAITING = {"reduce", "earlyReturnThenBarrier", "shuffles", "groups", "nbody", "gridSync"}


@pytest.mark.every(4)
@pytest.mark.skipif(nvcc() is None, reason="nvcc is not installed")
@pytest.mark.parametrize("options", [(), ("-G",)], ids=["optimized", "debug"])
def test_compiled_kernels_take_the_time_of_the_original(options: tuple[str, ...]) -> None:
    kernels = [name for name in CORPUS if not options or any(part in name for part in UNOPTIMIZED)]
    pair = Pair(corpus(kernels, *options), kernels, SHORT)
    for name in kernels:
        grid, block, shared, arguments = CORPUS[name]
        ends, work = pair.compare(name, grid, block, shared, arguments)
        if any(w in name for w in WAITING):
            assert (ends - START >= work).all(), name
        else:
            assert (ends - START == work).all(), name


@pytest.mark.every(2)
@pytest.mark.skipif(nvcc() is None, reason="nvcc is not installed")
@pytest.mark.parametrize("form", ["inline", "functions", "sampled"])
def test_programs_at_every_point_take_no_time(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "functions":
        monkeypatch.setattr("gpubpf.inject.plan.MAX_INLINE", 0)
        monkeypatch.setattr("gpubpf.inject.plan.MIN_FUNCTION", 0)
    wanted = ("vectorAdd", "histogram", "leavesFromFunction", "gridSync")
    kernels = [name for name in CORPUS if any(part in name for part in wanted)]
    probes = [replace(one, sampled="warp") if form == "sampled" else one for one in EVERYWHERE]
    pair = Pair(corpus(kernels), kernels, probes)
    assert ("gpubpf_program0" in pair.injected.text) is (form == "functions")
    for name in kernels:
        pair.compare(name, *CORPUS[name])


@pytest.mark.skipif(nvcc() is None, reason="nvcc is not installed")
def test_threads_that_communicate_take_the_time_of_the_original() -> None:
    application = parse(compile_cuda(Path(__file__).with_name("communicating.cu").read_text()))
    pair = Pair(application, list(application.entries), LONG)
    for name in application.entries:
        pair.compare(name, 4, 96, 0, ["zeros"])


@pytest.mark.every(2)
@pytest.mark.parametrize("n", range(6))
def test_ways_out_take_the_time_of_the_original(n: int) -> None:
    application = parse((PTX / "edges.ptx").read_text())
    names = list(application.entries)
    pair = edges()
    for name in names:
        ends, work = pair.compare(name, 1, 40, 0, ["zeros", RUNS.number(n)])
        assert (ends - START == work).all(), name


@cache
def edges() -> Pair:
    application = parse((PTX / "edges.ptx").read_text())
    points = (Probe(log(point), point) for point in POINTS)
    return Pair(application, list(application.entries), [*LONG, *points])

"""The driver on the virtual clock: when work of streams and graphs starts and ends, and what time calls take."""

from __future__ import annotations

import textwrap
from random import Random

import pytest

from cudasim_device import run_python

HOSTILE = pytest.mark.parametrize("hostile", [False, True], ids=["kind", "hostile"])
LAUNCH = 1000
# work(n) takes 3 n + 2 ns: a parameter, n turns of three instructions, ret.
PRELUDE = '''
WORK = """
.visible .entry work(.param .u32 turns) {
    .reg .b32 %r<3>; .reg .pred %p<2>;
    ld.param.u32 %r1, [turns];
again:
    sub.u32 %r1, %r1, 1;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra again;
    ret;
}
.visible .entry stamp(.param .u64 where) {
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [where];
    mov.u64 %rd2, %globaltimer;
    st.global.u64 [%rd1], %rd2;
    ret;
}
"""
import threading
from ctypes import byref, c_float, c_int, c_size_t, c_uint64, c_void_p
cu = Driver()
cu.library.cudasim_virtual_now.restype = c_uint64
module = cu.module(HEADER + WORK)
work, stamp = cu.function(module, "work"), cu.function(module, "stamp")
begin = cu.library.cudasim_virtual_now()

def now():
    return cu.library.cudasim_virtual_now() - begin

def launch(turns, stream=None, status=0):
    assert cu.launch_status(work, c_int(turns), grid=3, block=40, stream=stream) == status

def streams(count, flags=1):
    return [cu.handle("cuStreamCreate", flags) for _ in range(count)]

def record(stream):
    event = cu.handle("cuEventCreate", 0)
    cu.cuEventRecord(event, stream)
    return event

def at(event):
    cu.cuEventSynchronize(event)
    cu.cudasim_event_time(event, byref(ns := c_uint64()))
    return ns.value - begin

def pinned(size):
    return cu.handle("cuMemHostAlloc", c_size_t(size), 0)

def took(turns):
    return 3 * turns + 2
'''


def timeline(code: str, hostile: bool = False) -> list[str]:
    """The lines that `code` prints, run on the virtual clock with the names of PRELUDE."""
    whole = PRELUDE + textwrap.dedent(code)
    return run_python(whole, hostile, CUDASIM_CLOCK="virtual").splitlines()


@HOSTILE
def test_two_kernels_behind_each_other(hostile: bool) -> None:
    code = """
        s, = streams(1)
        before = record(s); launch(5000, s); between = record(s); launch(10, s); after = record(s)
        print(now(), at(before), at(between), at(after), now())
        ms = c_float(); cu.cuEventElapsedTime_v2(byref(ms), before, between); print(round(ms.value * 1e6))
        for wrong in range(3):
            launch(1, c_void_p(1234), 400)
        print(now())
    """
    first = LAUNCH + 15002
    assert timeline(code, hostile) == [
        f"{2 * LAUNCH} 0 {first} {first + 32} {first + 32}",
        f"{first}",
        f"{first + 32}",
    ]


@HOSTILE
def test_copies_and_memsets_take_their_time(hostile: bool) -> None:
    code = """
        s, = streams(1)
        host, device = pinned(1 << 20), cu.memory(1 << 20)
        cu.cuMemcpyHtoDAsync_v2(device, host, c_size_t(100_001), s)
        launch(10, s)
        done = record(s)
        print(now(), at(done))
        cu.cuMemsetD8Async(device, 0, c_size_t(101), s)
        cu.cuMemsetD32Async(device, 0, c_size_t(100), s)
        print(now(), at(record(s)))
        cu.cuMemcpyDtoH_v2(host, device, c_size_t(5))
        print(now())
        cu.cuMemcpyDtoD_v2(device, c_void_p(device.value + 4096), c_size_t(4000))
        print(now()); cu.cuCtxSynchronize(); print(now())
        cu.cuMemFree_v2(device)
        print(now())
        device, start = cu.memory(1 << 20), now()
        cu.cuMemcpyHtoDAsync_v2(device, b"x" * 1_000_000, c_size_t(1_000_000), s)  # staged, not waited for
        print(now() - start, at(record(s)) - start)
    """
    copied = 10_001 + 32
    assert timeline(code, hostile) == [
        f"{LAUNCH} {copied}",
        f"{copied} {copied + 2 + 4}",
        f"{copied + 7}",
        f"{copied + 7}",
        f"{copied + 407}",
        f"{copied + 407}",
        "0 100000",
    ]


@HOSTILE
def test_eight_streams_at_once(hostile: bool) -> None:
    code = """
        all = streams(8)
        for i, s in enumerate(all):
            launch(1000 * (8 - i), s)
        print(now(), *(at(record(s)) for s in reversed(all)))
    """
    ends = [LAUNCH * (i + 1) + 3 * 1000 * (8 - i) + 2 for i in range(8)]
    # Events are recorded when the thread has come so far, or later.
    seen, now = [], 8 * LAUNCH
    for end in reversed(ends):
        now = max(now, end)
        seen.append(now)
    assert timeline(code, hostile) == [" ".join(map(str, [8 * LAUNCH, *seen]))]


@HOSTILE
def test_events_across_streams_and_the_legacy_stream(hostile: bool) -> None:
    code = """
        a, b = streams(2)
        launch(7000, a)
        cu.cuStreamWaitEvent(b, record(a), 0)
        launch(10, b)
        print(at(record(b)))
        cu.cuCtxSynchronize(); start = now()
        c, d = streams(2, 0)  # blocking: they and the legacy stream wait for each other
        launch(1000, c); launch(10, None); launch(10, d); launch(10, a)
        print(*(at(record(s)) - start for s in (a, c, None, d)))
        cu.cuStreamDestroy_v2(c)
        launch(2000, d); cu.cuStreamDestroy_v2(d); launch(10, None)
        start = now(); cu.cuStreamSynchronize(None); print(now() - start)
    """
    behind = LAUNCH + 21002 + 32
    # After 4,000 ns of launches: a is free, the legacy stream waits for c, d for the legacy stream.
    legacy = LAUNCH + 3002 + 32
    assert timeline(code, hostile) == [
        f"{behind}",
        f"{4 * LAUNCH + 32} {legacy} {legacy + 32} {legacy + 32}",
        f"{6002 + 32 - LAUNCH}",
    ]


@HOSTILE
def test_polling_ends_and_tells_the_truth(hostile: bool) -> None:
    code = """
        a, b = streams(2)
        launch(5000, a); launch(1000, b)
        ends = record(a), record(b)
        asked = []
        while 600 in (answers := [cu.status("cuEventQuery", e) for e in ends]):
            asked.append((now(), *answers))
        print(asked, now())
        launch(100, a)
        print(cu.status("cuStreamQuery", a), cu.status("cuStreamQuery", b), cu.status("cuStreamQuery", a), now())
        launch(1000, a); end = record(a); launches = 0
        while cu.status("cuEventQuery", end) == 600:  # time passes: no polling
            launch(1, b); launches += 1
        print(launches)
    """
    assert timeline(code, hostile) == [
        "[(2000, 600, 600), (5002, 600, 0)] 16002",
        "600 0 0 17304",
        "4",
    ]


@HOSTILE
def test_graph_diamond_and_replays(hostile: bool) -> None:
    code = """
        a, b = streams(2)
        fork, join = (cu.handle("cuEventCreate", 2) for _ in range(2))
        cu.cuStreamBeginCapture_v2(a, 0)
        launch(1000, a)
        cu.cuEventRecord(fork, a); cu.cuStreamWaitEvent(b, fork, 0)
        launch(5000, b); launch(100, a); launch(100, a)
        cu.cuEventRecord(join, b); cu.cuStreamWaitEvent(a, join, 0)
        launch(10, a)
        graph = c_void_p(); cu.cuStreamEndCapture(a, byref(graph))
        replay = cu.handle("cuGraphInstantiateWithFlags", graph, c_uint64(0))
        start = now()
        cu.cuGraphLaunch(replay, a)
        print(now() - start, at(record(a)) - start)
        start = now()
        cu.cuGraphLaunch(replay, a); cu.cuGraphLaunch(replay, b)  # never beside each other
        print(at(record(b)) - start, at(record(a)) - start)
    """
    once = 3002 + 15002 + 32
    assert timeline(code, hostile) == [
        f"{LAUNCH} {LAUNCH + once}",
        f"{LAUNCH + 2 * once} {LAUNCH + 2 * once}",
    ]


@HOSTILE
def test_two_host_threads(hostile: bool) -> None:
    code = """
        a, b = streams(2)
        launch(5000, a)
        cu.cuStreamSynchronize(a)
        print(now())
        def other():
            cu.cuCtxSetCurrent(cu.context)  # begins where the first thread is
            lines.append(now()); launch(100, b); lines.append(now())
            cu.cuStreamSynchronize(b); lines.append(now())
        lines = []
        thread = threading.Thread(target=other); thread.start(); thread.join()
        print(*lines, now())
        launch(1, b); print(at(record(b)))  # behind the other thread's kernel
        def waits():
            cu.cuCtxSetCurrent(cu.context); launch(100, a); events.append(record(a)); cu.cuStreamSynchronize(a)
        events, start = [record(a)], now()
        thread = threading.Thread(target=waits); thread.start(); thread.join()
        ms = c_float(); cu.cuEventElapsedTime_v2(byref(ms), *events)  # the thread that joined knows
        print(round(ms.value * 1e6), cu.status("cuStreamQuery", a), now() - start)
    """
    first = LAUNCH + 15002
    assert timeline(code, hostile) == [
        f"{first}",
        f"{first} {first + LAUNCH} {first + LAUNCH + 302} {first}",
        f"{first + LAUNCH + 302 + 5}",
        f"{LAUNCH + 302} 0 {LAUNCH + 302}",
    ]


@HOSTILE
def test_kernels_read_the_same_clock(hostile: bool) -> None:
    code = """
        where, s = pinned(16), streams(1)[0]
        launch(100, s)
        cu.launch(stamp, where, stream=s)
        cu.cuStreamSynchronize(s)
        print(c_uint64.from_address(where.value).value - begin)
        print(*(cu.number("cuDeviceGetAttribute", rate, 0) for rate in (13, 36)))
    """
    # The clock is read before the reading instruction counts.
    assert timeline(code, hostile) == [f"{max(2 * LAUNCH, LAUNCH + 302) + 1}", "1000000 1000000"]


def test_host_functions_values_and_a_tools_own_work() -> None:
    code = """
        a, b = streams(2)
        cell, seen = cu.memory(8), []
        function = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: seen.append(now()))
        launch(1000, a)
        cu.cuLaunchHostFunc(a, function, None)
        cu.cuStreamWriteValue64_v2(a, cell, c_uint64(7), 0)
        cu.cuStreamWaitValue64_v2(b, cell, c_uint64(7), 0)
        print(at(record(b)), seen, now())
        def tool():
            cu.library.cudasim_untimed(1)
            cu.cuCtxSetCurrent(cu.context)
            mine, = streams(1)
            launch(100_000, mine); launch(100_000, b)
            cu.cuMemcpyDtoH_v2(pinned(8), cell, c_size_t(8))
            cu.cuStreamSynchronize(mine)
            while cu.status("cuStreamQuery", b): pass
            cu.cuMemFree_v2(cu.memory(100))
            cu.library.cudasim_untimed(0)
        thread = threading.Thread(target=tool); thread.start(); thread.join()
        cu.library.cudasim_untimed(1); cu.cuCtxSynchronize(); cu.library.cudasim_untimed(0)
        cu.cuCtxSynchronize()
        print(now()); launch(10, b); print(at(record(b)) - now(), now())
    """
    end = LAUNCH + 3002
    assert timeline(code) == [f"{end} [{end}] {end}", f"{end}", f"0 {end + LAUNCH + 32}"]


@HOSTILE
def test_a_wait_for_a_value_ends_when_a_stream_wrote_it(hostile: bool) -> None:
    """However far the writing stream is by then."""
    code = """
        writer, *waiting = streams(5)
        cell = cu.memory(4)
        cu.cuMemsetD32_v2(cell, 0, c_size_t(1)); cu.cuCtxSynchronize()
        start = now()
        for value in range(1, 9):
            launch(1000, writer)
            cu.cuStreamWriteValue32_v2(writer, cell, c_int(value), 0)
        cu.library.cudasim_untimed(1)
        while cu.status("cuStreamQuery", writer): pass
        cu.library.cudasim_untimed(0)
        for i, s in enumerate(waiting):
            cu.cuStreamWaitValue32_v2(s, cell, c_int(2 * i + 2), 0)  # at least
        print(*(at(record(s)) - start for s in waiting))
    """
    ends = [LAUNCH + (i + 1) * 3002 for i in range(8)]
    # The first two were written before the thread came to the waits.
    now = 8 * LAUNCH
    assert timeline(code, hostile) == [" ".join(str(max(now, end)) for end in ends[1::2])]


def test_twenty_runs_are_one() -> None:
    """Four processes, five times each, two of them hostile."""
    code = """
        all = streams(4, 0) + streams(4)
        host, device = pinned(1 << 16), cu.memory(1 << 16)
        for _ in range(5):
            begin = cu.library.cudasim_virtual_now()
            events = []
            for i in range(60):
                s = all[i * 7 % 8] if i % 11 else None
                if i % 5 == 4: cu.cuMemcpyHtoDAsync_v2(device, host, c_size_t(997 * i), s)
                if i % 3 == 2: cu.cuStreamWaitEvent(s, events[i // 2], 0)
                launch(1 + i * 37 % 400, s)
                if i % 7 == 0: cu.cuMemsetD8Async(device, 0, c_size_t(100 + i), s)
                if i % 13 == 0: cu.status("cuStreamQuery", all[i % 8])
                events.append(record(s))
            cu.cuCtxSynchronize()
            print([at(event) for event in events])
    """
    runs = [run for hostile in (False, True) * 2 for run in timeline(code, hostile)]
    assert len(runs) == 20 and len(set(runs)) == 1


class Model:
    """The definition, in a few lines: one host thread, six streams (the last is the legacy one, 0–2 are blocking)."""

    def __init__(self) -> None:
        self.now, self.ends, self.events, self.seen = 0, [0] * 6, [], []

    def submit(self, stream: int, duration: int, *fences: int) -> int:
        implicit = self.ends[:3] if stream == 5 else self.ends[5:] if stream < 3 else []
        start = max(self.now, self.ends[stream], *fences, *implicit)
        self.ends[stream] = start + duration
        return start

    def do(self, what: str, stream: int, number: int) -> None:
        if what == "launch":
            self.now += LAUNCH
            self.submit(stream, 3 * number + 2)
        elif what == "copy":
            self.submit(stream, -(-number // 10))
        elif what == "fill":
            self.submit(stream, -(-number // 100))
        elif what == "record":
            self.events.append(self.submit(stream, 0))
        elif what == "wait" and self.events:
            self.submit(stream, 0, self.events[number % len(self.events)])
        elif what == "sync":
            self.now = max(self.now, self.ends[stream], *(self.ends[:3] if stream == 5 else []))
            self.seen.append(self.now)


@HOSTILE
def test_random_programs_follow_the_definition(hostile: bool) -> None:
    random = Random(hostile)
    kinds = ["launch"] * 5 + ["copy", "fill", "record", "record", "wait", "wait", "sync"]
    steps = [(random.choice(kinds), random.randrange(6), random.randrange(1, 5000)) for _ in range(400)]
    model = Model()
    for step in steps:
        model.do(*step)
    code = f"""
        all = [*streams(3, 0), *streams(2), None]
        host, device = pinned(8192), cu.memory(8192)
        events, seen = [], []
        for what, stream, number in {steps}:
            s = all[stream]
            if what == "launch": launch(number, s)
            if what == "copy": cu.cuMemcpyHtoDAsync_v2(device, host, c_size_t(number), s)
            if what == "fill": cu.cuMemsetD8Async(device, 1, c_size_t(number), s)
            if what == "record": events.append(record(s))
            if what == "wait" and events: cu.cuStreamWaitEvent(s, events[number % len(events)], 0)
            if what == "sync": cu.cuStreamSynchronize(s); seen.append(now())
        cu.cuCtxSynchronize()
        print(now(), seen, [at(event) for event in events])
    """
    assert timeline(code, hostile) == [f"{max(model.now, *model.ends)} {model.seen} {model.events}"]


@HOSTILE
def test_nodes_of_random_graphs_start_when_their_dependencies_end(hostile: bool) -> None:
    random = Random(2 + hostile)
    nodes = [
        (random.randrange(1, 3000), sorted(random.sample(range(i), random.randrange(min(i, 3) + 1))))
        for i in range(40)
    ]
    ends: list[int] = []
    for turns, after in nodes:
        ends.append(max([LAUNCH, *(ends[i] for i in after)]) + 3 * turns + 2)
    code = f"""
        class Parameters(ctypes.Structure):  # CUDA_KERNEL_NODE_PARAMS_v1
            _fields_ = [("func", c_void_p), ("shape", ctypes.c_uint * 7), ("parameters", c_void_p), ("extra", c_void_p)]
        graph, made, events = cu.handle("cuGraphCreate", 0), [], []
        for turns, after in {nodes}:
            argument = c_int(turns)
            pointer = (c_void_p * 1)(ctypes.addressof(argument))
            given = Parameters(work.value, (2, 1, 1, 8, 1, 1, 0), ctypes.addressof(pointer), None)
            before = (c_void_p * 3)(*(made[i] for i in after))
            made.append(cu.handle("cuGraphAddKernelNode", graph, before, c_size_t(len(after)), byref(given)).value)
            events.append(cu.handle("cuEventCreate", 0))
            end = (c_void_p * 1)(made[-1])
            cu.handle("cuGraphAddEventRecordNode", graph, end, c_size_t(1), events[-1])
        replay = cu.handle("cuGraphInstantiateWithFlags", graph, c_uint64(0))
        cu.cuGraphLaunch(replay, None)
        print([at(event) for event in reversed(events)], now())
        cu.cuCtxSynchronize(); print(now())
    """
    assert timeline(code, hostile) == [f"{ends[::-1]} {max(ends)}", f"{max(ends)}"]


def test_real_clock_has_no_virtual_time() -> None:
    code = """
        cu = Driver()
        cu.library.cudasim_virtual_now.restype = ctypes.c_uint64
        print(cu.library.cudasim_virtual_now() == 2**64 - 1)
    """
    assert run_python(code, CUDASIM_CLOCK="real") == "True\n"

"""The GPU's clocks."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter

from gpu.driver import PTX, Driver, DriverError, Spinning
from gpu.questions.asking import Answer, question

TICK = (
    PTX
    + """
.visible .entry tick(.param .u64 out, .param .u64 count) {
    .reg .pred %p<3>; .reg .b64 %rd<10>;
    ld.param.u64 %rd1, [out];
    ld.param.u64 %rd2, [count];
    mov.u64 %rd3, %globaltimer;
    mov.u64 %rd6, 0;
again:
    mov.u64 %rd4, %globaltimer;
    mov.u64 %rd5, %clock64;
    setp.eq.u64 %p1, %rd3, %rd4;
    @%p1 bra again;
    mov.u64 %rd3, %rd4;
    st.global.u64 [%rd1], %rd4;
    st.global.u64 [%rd1+8], %rd5;
    add.u64 %rd1, %rd1, 16;
    add.u64 %rd6, %rd6, 1;
    setp.lt.u64 %p2, %rd6, %rd2;
    @%p2 bra again;
    ret;
}
"""
)


def _ticks(driver: Driver, function: int, count: int) -> list[tuple[int, int]]:
    out = driver.memory(16 * count)
    if code := driver.launch(function, [out, count]) or driver.call("cuCtxSynchronize"):
        raise DriverError(driver.name(code))
    words = driver.read(out, 2 * count)
    return list(itertools.pairwise([0, *words]))[1::2]


@question("how often does globaltimer tick?", "every 32 ns on Hopper, every 1,000 ns on older GPUs")
def globaltimer_tick() -> Answer:
    driver = Driver().open()
    seen = [timer for timer, _ in _ticks(driver, driver.kernel(TICK, "tick"), 2000)]
    steps = [b - a for a, b in itertools.pairwise(seen)]
    common = Counter(steps).most_common(8)
    tick = math.gcd(*steps)  # a turn of the kernel's loop may be longer than a tick
    return {
        "answer": f"every {tick} ns; seen were steps of {min(steps)} ns at least, {common[0][0]} most often, {max(steps)} at most",
        "agrees": tick == 32 if driver.cc() >= 90 else None,
        "steps": {str(step): count for step, count in common},
    }


# Of each block: its multiprocessor, and what both clocks say as globaltimer ticks, twice, 100 µs and more between.
CLOCKS = (
    PTX
    + """
.visible .entry clocks(.param .u64 out, .param .u64 unused) {
    .reg .pred %p<3>; .reg .b32 %r<3>; .reg .b64 %rd<10>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %ctaid.x;
    mul.wide.u32 %rd2, %r1, 40;
    add.u64 %rd1, %rd1, %rd2;
    mov.u32 %r2, %smid;
    cvt.u64.u32 %rd3, %r2;
    mov.u64 %rd4, %globaltimer;
first:
    mov.u64 %rd5, %globaltimer;
    mov.u64 %rd6, %clock64;
    setp.eq.u64 %p1, %rd4, %rd5;
    @%p1 bra first;
    add.u64 %rd4, %rd5, 100000;
second:
    mov.u64 %rd7, %globaltimer;
    mov.u64 %rd8, %clock64;
    setp.lt.u64 %p2, %rd7, %rd4;
    @%p2 bra second;
    mov.u64 %rd4, %rd7;
third:
    mov.u64 %rd7, %globaltimer;
    mov.u64 %rd8, %clock64;
    setp.eq.u64 %p1, %rd4, %rd7;
    @%p1 bra third;
    st.global.u64 [%rd1], %rd3;
    st.global.u64 [%rd1+8], %rd5;
    st.global.u64 [%rd1+16], %rd6;
    st.global.u64 [%rd1+24], %rd7;
    st.global.u64 [%rd1+32], %rd8;
    ret;
}
"""
)


@question(
    "how far apart is clock64 of different multiprocessors?",
    "so far that only a line for each multiprocessor ties it to globaltimer",
)
def clock64_offsets() -> Answer:
    driver = Driver().open()
    spinning = Spinning(driver, 2)
    spinning.start(grid=driver.multiprocessors())  # until the clocks of an idle GPU have gone up
    time.sleep(0.5)
    spinning.stop()
    grid = 4 * driver.multiprocessors()
    out = driver.memory(40 * grid)
    function = driver.kernel(CLOCKS, "clocks")
    offsets: dict[int, list[float]] = {}
    rates = []
    for _ in range(5):
        if code := driver.launch(function, [out, 0], grid=grid) or driver.call("cuCtxSynchronize"):
            raise DriverError(driver.name(code))
        words = driver.read(out, 5 * grid)
        rows = list(zip(*(words[i::5] for i in range(5)), strict=True))
        rate = statistics.median((c2 - c1) / (t2 - t1) for _, t1, c1, t2, c2 in rows)
        began = min(t1 for _, t1, *_ in rows)
        # Of this launch alone: between launches the rate may change.
        of = {sm: c1 - rate * (t1 - began) for sm, t1, c1, *_ in rows}
        middle = statistics.median(of.values())
        for sm, offset in of.items():
            offsets.setdefault(sm, []).append(offset - middle)
        rates.append(rate)
    middles = [statistics.median(of) for of in offsets.values()]
    return {
        "answer": f"{len(middles)} multiprocessors, offsets spread over {max(middles) - min(middles):.0f} cycles",
        "agrees": None,
        "within_one_cycles": round(statistics.median(max(of) - min(of) for of in offsets.values())),
        "cycles_per_ns": rates,
    }

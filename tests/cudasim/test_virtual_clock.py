"""The engine's virtual clock: what threads read, and how long kernels take."""

from __future__ import annotations

import numpy as np
import pytest

from engine_device import Array, Device

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"


def kernel(body: str, head: str = "") -> str:
    return f"{HEAD}{head}\n.visible .entry k(.param .u64 out)\n{{\n{body}\n}}\n"


SETUP = """
    .reg .pred %p<9>; .reg .b32 %r<40>; .reg .b64 %rd<40>;
    mov.u32 %r1, %tid.x;
    ld.param.u64 %rd1, [out];
    mul.wide.u32 %rd2, %r1, 8;
    add.s64 %rd1, %rd1, %rd2;
"""  # 4 instructions


def run(text: str, threads: int = 32, grid: int = 1, **options: int) -> tuple[list[int], int]:
    device = Device(text, virtual=True)
    out = Array(np.zeros(threads, np.int64))
    device.launch("k", grid, threads, out, **options)
    return out.host.tolist(), device.duration


@pytest.mark.parametrize("clock", ["globaltimer", "clock64"])
def test_a_clock_shows_what_came_before_it(clock: str) -> None:
    times, duration = run(
        kernel(f"{SETUP} mov.u64 %rd3, %{clock}; st.global.u64 [%rd1], %rd3; ret;"), start=1000
    )
    assert times == [1004] * 32
    assert duration == 7


def test_lanes_have_times_of_their_own() -> None:
    body = f"""{SETUP}
    setp.ne.u32 %p1, %r1, 31;
    @%p1 bra DONE;
    mov.u32 %r2, 0;
AGAIN:
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p2, %r2, 100;
    @%p2 bra AGAIN;
DONE:
    mov.u64 %rd3, %globaltimer;
    st.global.u64 [%rd1], %rd3;
    ret;"""
    times, duration = run(kernel(body))
    assert times == [6] * 31 + [6 + 1 + 300]
    assert duration == 307 + 3

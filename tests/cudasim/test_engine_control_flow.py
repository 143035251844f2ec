"""Random structured programs: divergent branches, loops, breaks, returns; against an interpreter, in several schedules."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine_device import Array, Device, compile_cuda, nvcc

pytestmark = pytest.mark.skipif(nvcc() is None, reason="nvcc is not installed")

MASK = 0xFFFFFFFF
PROGRAMS, THREADS, MOST_STEPS = 16, 160, 20_000
Node = tuple  # (kind, …): see `text`


class Return(Exception):
    pass


class Break(Exception):
    pass


def generate(rng: random.Random, depth: int) -> list[Node]:
    nodes: list[Node] = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.random()
        if kind < 0.4 or depth == 0:
            nodes.append(("op", rng.choice("+*^-"), rng.randint(1, 99)))
        elif kind < 0.6:
            arms = generate(rng, depth - 1), generate(rng, depth - 1)
            nodes.append(("if", rng.randint(2, 5), rng.randint(0, 3), *arms))
        elif kind < 0.8:
            nodes.append(("loop", rng.randint(2, 7), generate(rng, depth - 1)))
        elif kind < 0.87:
            nodes.append(("match",))
        elif kind < 0.93:
            nodes.append(("break", rng.randint(3, 9)))
        else:
            nodes.append(("return", rng.randint(20, 60)))
    return nodes


def text(nodes: list[Node], depth: int = 0) -> str:
    """CUDA C++ of a program: `v` is what it computes, `t` the thread."""
    out = []
    for node in nodes:
        match node:
            case ("op", sign, n):
                out.append(f"v = v {sign} {n}u;")
            case ("if", n, rest, yes, no):
                out.append(
                    f"if ((v + t) % {n}u == {rest}u) {{ {text(yes, depth)} }} else {{ {text(no, depth)} }}"
                )
            case ("loop", n, body):
                i = f"i{depth}"
                head = f"for (unsigned {i} = 0; {i} < (v ^ t) % {n}u; {i}++)"
                out.append(f"{head} {{ v += {i}; {text(body, depth + 1)} }}")
            case ("match",):  # a collective of one lane, in divergent code
                out.append("v += __popc(__match_any_sync(1u << (threadIdx.x & 31), v));")
            case ("break", n):
                out.append(f"if (v % {n}u == 1u) break;" if depth else "")
            case ("return", n):
                out.append(f"if (v % {n}u == 7u) {{ out[t] = v; return; }}")
    return "\n".join(out)


class Machine:
    def __init__(self, thread: int) -> None:
        self.t = self.v = thread
        self.steps = 0

    def run(self, nodes: list[Node], depth: int = 0) -> None:
        for node in nodes:
            match node:
                case ("op", sign, n):
                    v = self.v
                    self.v = {"+": v + n, "*": v * n, "^": v ^ n, "-": v - n}[sign] & MASK
                case ("if", n, rest, yes, no):
                    self.run(yes if (self.v + self.t & MASK) % n == rest else no, depth)
                case ("loop", n, body):
                    self.loop(n, body, depth)
                case ("match",):
                    self.v = self.v + 1 & MASK
                case ("break", n) if depth and self.v % n == 1:
                    raise Break
                case ("return", n) if self.v % n == 7:
                    raise Return

    def loop(self, n: int, body: list[Node], depth: int) -> None:
        i = 0
        try:
            while i < (self.v ^ self.t) % n:
                self.steps += 1
                if self.steps > MOST_STEPS:
                    raise OverflowError
                self.v = self.v + i & MASK
                self.run(body, depth + 1)
                i += 1
        except Break:
            pass


def expected(program: list[Node]) -> list[int] | None:
    """None for a program that runs too long."""
    found = []
    for thread in range(THREADS):
        machine = Machine(thread)
        try:
            machine.run(program)
        except Return:
            pass
        except OverflowError:
            return None
        found.append(machine.v)
    return found


def test_random_programs() -> None:
    rng = random.Random(20)
    programs = [generate(rng, 4) for _ in range(PROGRAMS)]
    head = "unsigned t = blockIdx.x * blockDim.x + threadIdx.x, v = t;"
    source = "".join(
        f'extern "C" __global__ void k{k}(unsigned *out) {{ {head}\n{text(p)}\nout[t] = v; }}\n'
        for k, p in enumerate(programs)
    )
    device = Device(compile_cuda(source, "-w"))
    compared = 0
    for k, program in enumerate(programs):
        wanted = expected(program)
        if wanted is None:
            continue
        for seed in (None, 5, 6):
            out = Array(np.zeros(THREADS, np.uint32))
            device.launch(f"k{k}", 2, THREADS // 2, out, seed=seed)
            assert list(out.host) == wanted, source
        compared += 1
    assert compared > PROGRAMS // 2


FUNCTIONS = r"""
__noinline__ __device__ unsigned long long waits(volatile unsigned *begun, unsigned long long kept)
{
    unsigned long long sum = 0;
    atomicAdd((unsigned *)begun, 1);
    while (begun[1] < 16)
        sum |= kept;
    return sum | kept;
}
__noinline__ __device__ unsigned works(volatile unsigned *begun, unsigned t)
{
    unsigned a = t, b = t * 3, c = t * 5, d = t * 7;
    while (begun[0] < 16)
        a++;
    for (unsigned i = 0; i < t; i++) {
        a += b ^ i; b += c ^ i; c += d ^ i; d += a ^ i;
    }
    atomicAdd((unsigned *)begun + 1, 1);
    return a + b + c + d;
}
extern "C" __global__ void both(unsigned long long *out, unsigned *begun)
{
    const unsigned t = threadIdx.x;
    if (t % 2)
        out[t] = waits(begun, 0x0123456789abcdefull + t);
    else
        out[t] = works(begun, t);
}
"""


def test_lanes_of_a_warp_in_two_functions_at_once() -> None:
    device = Device(compile_cuda(FUNCTIONS))
    out, begun = Array(np.zeros(32, np.uint64)), Array(np.zeros(2, np.uint32))
    device.launch("both", 1, 32, out, begun)
    expected = np.arange(1, 32, 2, dtype=np.uint64) + np.uint64(0x0123456789ABCDEF)
    assert (out.host[1::2] == expected).all()


ARGUMENTS = """.version 8.0
.target sm_80
.address_size 64
.func (.reg .pred odd, .reg .v2 .u32 both) split(.reg .v2 .u32 given, .reg .pred add, .reg .u32 more) {
    .reg .pred %p<2>; .reg .u32 %r<4>;
    mov.v2.u32 both, given;
    @!add bra NOT;
    add.u32 both.x, given.x, more;
NOT:
    and.b32 %r1, both.x, 1;
    setp.ne.u32 odd, %r1, 0;
    ret;
}
.visible .entry k(.param .u64 out) {
    .reg .pred %p<4>; .reg .u32 %r<9>; .reg .u64 %rd<4>; .reg .v2 .u32 %v, %w;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    mad.wide.u32 %rd1, %r1, 16, %rd1;
    mov.u32 %v.x, %r1;
    mul.lo.u32 %v.y, %r1, 3;
    setp.gt.u32 %p1, %r1, 20;
    mov.u32 %r3, 5;
    @%p1 bra LATE;
    call (%p2, %w), split, (%v, %p1, %r3);
    bra DONE;
LATE:
    call (%p2, %w), split, (%v, %p1, %r3);
DONE:
    selp.u32 %r4, 1, 0, %p2;
    st.global.v4.u32 [%rd1], {%w.x, %w.y, %r4, %r4};
    ret;
}
"""


def test_predicates_and_vectors_as_arguments_and_results() -> None:
    out = Array(np.zeros((32, 4), np.uint32))
    Device(ARGUMENTS).launch("k", 1, 32, out)
    lanes = np.arange(32)
    first = lanes + 5 * (lanes > 20)
    assert (out.host == np.c_[first, 3 * lanes, first & 1, first & 1]).all()

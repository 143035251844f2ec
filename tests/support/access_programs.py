"""Random PTX kernels whose threads access memory in branches and loops, for comparisons of what memtrace finds in them.

    text = module(7, 6)                              # the kernels k0 … k5
    SOURCE                                           # a program that launches them, from a file

All accesses are to the room that a kernel gets, whatever the values are: the writer knows an upper bound of each register. Addresses
depend on the thread's index, parameters, the turn of a loop, and numbers that nothing writes; they may wrap around in 16 bits, or be
bit fields. So the numbers of a kernel are the same in each run.
"""

from __future__ import annotations

import random

ROOM = 1 << 20  # bytes of `out` and `in`
SHARED = 1 << 15  # bytes
TURNS = 12  # of a loop, at most
MOST = 1 << 16  # of a register
KERNEL = "(.param .u64 out, .param .u64 in, .param .u32 n)"
SHAPES = (("2", "64, 1"), ("3", "40, 1"), ("2", "16, 6"), ("1", "7, 11"))  # blocks and threads
SOURCE = (
    r"""
#include <cuda.h>
#include <cuda_runtime.h>
#include <cstdlib>
#include <string>
#include <vector>
int main(int, char **argv) {
    char *out, *in;
    if (cudaMalloc(&out, ROOM) || cudaMalloc(&in, ROOM)) return 1;
    std::vector<unsigned> some(ROOM / 4);
    for (size_t i = 0; i < some.size(); i++) some[i] = i * 2654435761u >> 7;
    cudaMemcpy(in, some.data(), ROOM, cudaMemcpyHostToDevice);
    CUmodule module;
    if (cuModuleLoad(&module, argv[1])) return 2;
    for (int k = 0; k < atoi(argv[2]); k++) {
        CUfunction function;
        if (cuModuleGetFunction(&function, module, ("k" + std::to_string(k)).c_str())) return 3;
        unsigned n = k % 2 ? 3 : 8;
        void *given[] = {&out, &in, &n};
LAUNCHES    }
    return cudaDeviceSynchronize() != cudaSuccess;
}
"""
).replace("ROOM", str(ROOM)).replace(
    "LAUNCHES",
    "".join(f"        if (cuLaunchKernel(function, {g}, 1, 1, {b}, 1, 0, 0, given, 0)) return 4;\n" for g, b in SHAPES),
)  # fmt: skip


class _Writer:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.lines: list[str] = []
        # The registers that are written, with their largest values: thread and block, parameter, and a number from memory.
        self.most = {"%r0": 255, "%r1": 15, "%r2": 3, "%r3": 31, "%r4": TURNS, "%r5": 63}
        self.names = 8
        self.labels = self.accesses = 0

    def new(self, most: int) -> str:
        self.names += 1
        self.most[f"%r{self.names}"] = most
        return f"%r{self.names}"

    def source(self, most: int = MOST) -> str:
        fit = [name for name, bound in self.most.items() if bound <= most]
        return self.rng.choice(fit[-6:] if self.rng.random() < 0.5 else fit)

    def compute(self) -> None:
        """Compute a number from others."""
        kind, a = self.rng.randrange(8), self.source()
        if kind == 0:
            b = self.source()
            if self.most[a] + self.most[b] < MOST:
                self.lines.append(f"add.u32 {self.new(self.most[a] + self.most[b])}, {a}, {b};")
        elif kind == 1:
            times = self.rng.choice([2, 3, 4, 8, 16, 20, 32, 33, 64])
            if self.most[a] * times < MOST:
                self.lines.append(f"mul.lo.u32 {self.new(self.most[a] * times)}, {a}, {times};")
        elif kind == 2:
            b = self.rng.choice([str(self.rng.choice([1, 5, 8, 15, 32, 64])), self.source()])
            most = (1 << max(self.most[a], self.most.get(b, 64)).bit_length()) - 1
            if most < MOST:
                self.lines.append(f"{self.rng.choice(['xor', 'or'])}.b32 {self.new(most)}, {a}, {b};")
        elif kind == 3:
            mask = self.rng.choice([1, 3, 7, 15, 31, 56, 0x60, 0xFFFFFFE0])
            self.lines.append(f"and.b32 {self.new(min(self.most[a], mask))}, {a}, {mask};")
        elif kind == 4:  # a field of bits, of which the upper ones are lost
            up, down = self.rng.choice([(28, 24), (27, 27), (30, 26), (24, 20), (0, 2), (0, 5)])
            moved = self.new(MOST)
            self.lines.append(f"shl.b32 {moved}, {a}, {up};")
            del self.most[moved]
            bound = 0xFFFFFFFF >> down if up else self.most[a] >> down
            self.lines.append(f"shr.u32 {self.new(min(bound, MOST))}, {moved}, {down};")
        elif kind == 5:  # 16 bits that wrap around in some lanes
            half, added = self.names, self.rng.choice([0xFFF0, 0xFFFF, 0xFFE0, 0xFFFA, 16])
            self.lines.append(f"cvt.u16.u32 %h{half}, {a};")
            self.lines.append(f"add.u16 %h{half}, %h{half}, {added};")
            self.lines.append(f"cvt.u32.u16 {self.new(0xFFFF)}, %h{half};")
        elif kind == 6:
            name = self.rng.choice(["min.u32", "max.u32"])
            most = max(self.most[a], 20)
            self.lines.append(f"{name} {self.new(most)}, {a}, 20;")
        else:
            b = self.source()
            self.compare("%p2")
            self.lines.append(f"selp.b32 {self.new(max(self.most[a], self.most[b]))}, {a}, {b}, %p2;")

    def compare(self, into: str) -> None:
        other = self.rng.choice([str(self.rng.choice([0, 1, 3, 5, 8, 16, 31])), self.source()])
        name = self.rng.choice(["lt.u32", "ge.u32", "eq.u32", "ne.u32"])
        self.lines.append(f"setp.{name} {into}, {self.source()}, {other};")

    def access(self) -> None:
        """Access memory at a place that a register has, and perhaps at others beside it."""
        width = self.rng.choice([4, 4, 4, 4, 8, 16, 2, 1])
        space = self.rng.choice(["global", "shared"])
        base, index = f"%rd{self.names + 10}", self.source()
        if space == "shared":
            index = self.source((SHARED - 1024) // width)
            self.lines.append(f"mad.lo.u32 %s{self.names}, {index}, {width}, %s0;")
            base = f"%s{self.names}"
        else:
            far = width == 16 and self.most[index] >= MOST // 2
            self.lines.append(f"mul.wide.u32 {base}, {index}, {8 if far else width};")
            if far:
                self.lines.append(f"and.b64 {base}, {base}, -16;")
            room = "%rd1" if self.rng.random() < 0.5 else "%rd2"
            self.lines.append(f"add.s64 {base}, {base}, {room};")
        guard = self.rng.choice(["", "", "", "@%p1 ", "@!%p1 "])
        kind, vector = {16: ("u32", "v4."), 8: ("u64", ""), 4: ("u32", ""), 2: ("u16", ""), 1: ("u8", "")}[
            width
        ]
        value = {16: "{%v0, %v1, %v2, %v3}", 8: "%rd9", 4: "%v0", 2: "%h0", 1: "%h0"}[width]
        self.names += 1
        for _ in range(self.rng.choice([1, 1, 2, 4])):
            offset = width * self.rng.choice([0, 0, 1, 8, 16, 3, 32])
            store = self.rng.random() < 0.4 and not (space == "global" and room == "%rd2")
            if store:
                self.lines.append(f"{guard}st.{space}.{vector}{kind} [{base}+{offset}], {value};")
            else:
                self.lines.append(f"{guard}ld.{space}.{vector}{kind} {value}, [{base}+{offset}];")
            self.accesses += 1

    def part(self, depth: int) -> None:
        """Write some steps. What they compute is not used behind them, because a loop or branch may not have computed it."""
        before = dict(self.most)
        for _ in range(self.rng.randint(2, 5)):
            kind = self.rng.random()
            if kind < 0.4 or (not depth and kind < 0.6):
                self.compute()
            elif kind < 0.65 or not depth:
                self.access()
            elif kind < 0.75:
                self.branch(depth)
            else:
                self.loop(depth)
        self.access()
        self.most = before

    def label(self) -> str:
        self.labels += 1
        return f"$L{self.labels}"

    def branch(self, depth: int) -> None:
        other, end = self.label(), self.label()
        self.compare("%p1")
        self.lines.append(f"@%p1 bra {other};")
        self.part(depth - 1)
        self.lines += [f"bra {end};", f"{other}:"]
        self.part(depth - 1)
        self.lines.append(f"{end}:")

    def loop(self, depth: int) -> None:
        """Write a loop: its registers advance in each turn, perhaps only in some lanes, and may begin again."""
        before = dict(self.most)
        start, end = self.label(), self.label()
        turn = self.new(TURNS)
        self.lines.append(f"mov.u32 {turn}, 0;")
        moving: list[tuple[str, str, int]] = []
        for _ in range(self.rng.randint(1, 2)):
            step, begin = self.rng.choice([1, 4, 8, 16, 24, 32, 64]), self.source(MOST // 8)
            name = self.new(self.most[begin] + TURNS * step)
            self.lines.append(f"mov.u32 {name}, {begin};")
            moving.append((name, begin, step))
        self.lines.append(f"{start}:")
        self.part(depth - 1)
        for name, begin, step in moving:
            how = self.rng.randrange(5)
            if how == 0:
                self.compare("%p3")
            guard = "@%p3 " if how == 0 else ""
            self.lines.append(f"{guard}add.u32 {name}, {name}, {step};")
            if how == 1:
                self.lines.append(f"setp.eq.u32 %p3, {turn}, 2; @%p3 mov.u32 {name}, {begin};")
        self.lines.append(f"add.u32 {turn}, {turn}, 1;")
        if self.rng.random() < 0.3:
            self.compare("%p3")
            self.lines.append(f"@%p3 bra {end};")
        if self.rng.random() < 0.1:
            self.lines.append(f"setp.gt.u32 %p3, {turn}, %r3; @%p3 ret;")
        most = self.rng.choice(["3", "%r4", "%r4", "%r6"])  # %r6 differs between lanes
        self.lines += [f"setp.lt.u32 %p3, {turn}, {most};", f"@%p3 bra {start};", f"{end}:"]
        self.most = before


def _kernel(rng: random.Random, name: str) -> str:
    writer = _Writer(rng)
    while writer.accesses < 12:
        writer.compute()
        writer.loop(2)
        writer.part(1)
    start = [
        *(f"mov.u32 %r{n}, %{what};" for n, what in enumerate("tid.x tid.y ctaid.x laneid".split())),
        "ld.param.u32 %r4, [n];",
        "ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [in];",
        "ld.global.nc.u32 %r5, [%rd2+64]; and.b32 %r5, %r5, 63;",
        "and.b32 %r6, %r0, 7;",
        "mov.u32 %s0, tile;",
        "setp.lt.u32 %p1, %r3, 20; setp.eq.u32 %p2, %r3, 3; setp.eq.u32 %p3, %r3, 4;",
        "mov.u32 %v0, 1; mov.u32 %v1, 1; mov.u32 %v2, 1; mov.u32 %v3, 1; mov.u64 %rd9, 1; mov.u16 %h0, 1;",
    ]
    count = writer.names + 16
    registers = f".reg .b32 %r<{count}>, %s<{count}>, %v<4>; .reg .b64 %rd<{count}>; .reg .b16 %h<{count}>; .reg .pred %p<4>;"
    shared = f".shared .align 128 .b8 tile[{SHARED}];"
    return f".visible .entry {name}{KERNEL} {{\n" + "\n".join(
        [registers, shared, *start, *writer.lines, "ret;\n}"]
    )


def module(seed: int, kernels: int) -> str:
    """Return the text of a module with this many kernels."""
    rng = random.Random(seed)
    head = ".version 8.3\n.target sm_80\n.address_size 64\n"
    return head + "\n".join(_kernel(rng, f"k{n}") for n in range(kernels))

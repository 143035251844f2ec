"""Random PTX programs that store many of their values, and what contradicts the claims of `ptx/lanes.py` about them.

A program has branches, loops and predicated instructions, at which the lanes of a warp may part.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import numpy as np

from engine_device import Array, Device
from gpubpf.ptx import lane_terms
from gpubpf.ptx.lanes import Known, Lanes
from gpubpf.ptx.module import Address, Name, PtxInstruction
from gpubpf.ptx.parser import parse

HEAD = ".version 8.3\n.target sm_80\n.address_size 64\n.visible .global .align 16 .b8 table[256];\n"
SITES = 60  # values that a program stores, at most
BLOCKS = [(32, 1, 1), (64, 2, 1), (8, 8, 2), (5, 7, 3), (16, 16, 1)]
GRID = (3, 2, 1)
NUMBERS = [0, 1, 2, 3, 4, 7, 8, 12, 31, 32, 64, 96, 255, 1024, 4096, 0x7FFFFFFF, 0xFFFFFFE0, 0xFFFFFFFF]
_BINARY = (
    "add.u32 sub.s32 mul.lo.u32 and.b32 or.b32 xor.b32 min.s32 max.u32 min.u32 add.s32 mul.lo.s32".split()
)
_WIDE = "mul.wide.s32 mul.wide.u32".split()


class _Writer:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.lines: list[str] = []
        self.narrow = [f"%r{n}" for n in range(10)]  # those that are written: 32 bits, then 64
        self.long = ["%rd1"]
        self.sites = self.labels = 0
        self.uniform = False  # whether lanes stay together in branches and loops

    def source(self) -> str:
        """Return a register that is written, rather one of the last."""
        return self.rng.choice(self.narrow[-8:] if self.rng.random() < 0.6 else self.narrow)

    def constant(self) -> int:
        return self.rng.choice(NUMBERS)

    def target(self, fixed: bool) -> str:
        """Return a register of 32 bits to write: often a new one; in arms and loops one that is written already."""
        if fixed or self.rng.random() < 0.1:
            return self.rng.choice(self.narrow[10:] or self.narrow[:1])
        self.narrow.append(f"%r{len(self.narrow)}")
        return self.narrow[-1]

    def step(self, fixed: bool, guard: str = "") -> None:
        kind, a = self.rng.random(), self.source()
        if kind < 0.12 and not fixed:
            name, b = (
                self.rng.choice(_WIDE),
                self.rng.choice([str(self.rng.choice([1, 4, 24, 0x10000])), self.source()]),
            )
            self.long.append(f"%rd{len(self.long) + 1}")
            self.lines.append(f"{name} {self.long[-1]}, {a}, {b};")
            return
        if kind < 0.18 and not fixed:
            self.long.append(f"%rd{len(self.long) + 1}")
            one, other = (self.rng.choice(self.long[:-1]) for _ in "ab")
            name = self.rng.choice(["add.s64", "sub.s64", "or.b64", "and.b64"])
            self.lines.append(f"{name} {self.long[-1]}, {one}, {other};")
            return
        if kind < 0.3 and not fixed:
            self.index()
            return
        into = self.target(fixed)
        if kind < 0.5:
            self.lines.append(f"{guard}{self.rng.choice(_BINARY)} {into}, {a}, {self.constant()};")
        elif kind < 0.65:
            self.lines.append(f"{guard}{self.rng.choice(_BINARY)} {into}, {a}, {self.source()};")
        elif kind < 0.75:
            name = self.rng.choice(["shl.b32", "shr.u32", "shr.s32"])
            self.lines.append(f"{guard}{name} {into}, {a}, {self.rng.choice([1, 2, 5, 7, 16, 31, 33])};")
        elif kind < 0.8:
            start, length = self.rng.randrange(12), self.rng.choice([1, 2, 5, 8, 31])
            self.lines.append(f"{guard}bfe.u32 {into}, {a}, {start}, {length};")
        elif kind < 0.85:
            name = self.rng.choice(["div.u32", "rem.u32", "div.s32", "rem.s32"])
            self.lines.append(f"{guard}{name} {into}, {a}, {self.rng.choice([3, 8, 32, '%r4'])};")
        elif kind < 0.9:
            self.lines.append(
                f"{guard}mad.lo.s32 {into}, {a}, {self.rng.choice(['4', self.source()])}, {self.source()};"
            )
        elif kind < 0.94:
            self.lines.append(f"{guard}{self.rng.choice(['not.b32', 'neg.s32'])} {into}, {a};")
        elif kind < 0.97:
            self.lines.append(f"{guard}cvt.u32.u64 {into}, {self.rng.choice(self.long)};")
        else:
            self.compare("%p2")
            self.lines.append(f"{guard}selp.b32 {into}, {a}, {self.source()}, %p2;")
        if self.rng.random() < 0.3:
            self.store(into)

    def index(self) -> None:
        """Compute an address as programs do: the thread's index plus another number, extended to 64 bits; and store it."""
        into, times = self.target(False), self.rng.choice([1, 128, 0x7FFFFFF0, 0xFFFFFFF0])
        lane, varies = (
            self.rng.choice(["%r0", "%r1", "%r5", "%r7"]),
            self.rng.choice(["%r3", "%r3", "%r6", "%r8"]),
        )
        if self.rng.random() < 0.4:  # as bit fields
            self.lines.append(
                f"{self.rng.choice(['or', 'xor'])}.b32 {into}, %r9, {self.rng.choice(['%r5', '%r5', '%r7'])};"
            )
        else:
            self.lines.append(f"mad.lo.s32 {into}, {varies}, {times}, {lane};")
        self.long.append(f"%rd{len(self.long) + 1}")
        self.lines.append(f"{self.rng.choice(_WIDE)} {self.long[-1]}, {into}, 4;")
        self.store(self.long[-1])

    def compare(self, into: str) -> None:
        name = self.rng.choice(["lt.s32", "ge.u32", "eq.s32", "ne.u32", "lo.u32"])
        if self.uniform:
            self.lines.append(f"setp.{name} {into}, {self.rng.choice(['%r3', '%r6'])}, {self.constant()};")
            return
        self.lines.append(
            f"setp.{name} {into}, {self.source()}, {self.rng.choice([str(self.constant()), self.source()])};"
        )

    def store(self, value: str = "") -> None:
        if self.sites == SITES:
            return
        value = value or self.source() if self.rng.random() < 0.6 else self.rng.choice(self.long)
        if value.startswith("%rd"):
            self.lines.append(f"st.global.u64 [%rd99+{16 * self.sites}], {value};")
        else:
            self.lines.append(f"st.global.u32 [%rd99+{16 * self.sites}], {value};")
        self.lines.append(f"st.global.u32 [%rd99+{16 * self.sites + 8}], 1;")
        self.sites += 1

    def part(self, depth: int, fixed: bool) -> None:
        for _ in range(self.rng.randint(2, 6)):
            kind = self.rng.random()
            if kind < 0.6 or not depth:
                guarded = fixed and not self.uniform and self.rng.random() < 0.1
                self.step(fixed, self.rng.choice(["@%p1 ", "@!%p1 "]) if guarded else "")
            elif kind < 0.8:
                self.branch(depth)
            else:
                self.loop(depth)
            if self.rng.random() < 0.5:
                self.store()

    def label(self) -> str:
        self.labels += 1
        return f"$L{self.labels}"

    def branch(self, depth: int) -> None:
        other, end = self.label(), self.label()
        self.compare("%p1")
        self.lines.append(f"@%p1 bra {other};")
        self.part(depth - 1, fixed=True)
        self.lines += [f"bra {end};", f"{other}:"]
        self.part(depth - 1, fixed=True)
        self.lines.append(f"{end}:")

    def loop(self, depth: int) -> None:
        start, turn = self.label(), f"%r{120 + self.labels}"
        self.lines += [f"mov.u32 {turn}, 0;", f"{start}:"]
        self.part(depth - 1, fixed=True)
        turns = self.rng.choice(["3", "%r203" if self.uniform else "%r7"])  # %r7 differs between lanes
        self.lines += [
            f"add.u32 {turn}, {turn}, 1;",
            f"setp.lt.u32 %p3, {turn}, {turns};",
            f"@%p3 bra {start};",
        ]
        if self.rng.random() < 0.5:
            self.narrow.append(turn)


def program(seed: int) -> str:
    """Return the text of a program."""
    writer = _Writer(random.Random(seed))
    end = "ret;"
    if seed % 2:
        # Some lanes leave the kernel, the others stay together for a while.
        writer.lines.append("setp.gt.u32 %p1, %r5, 23; @%p1 bra $END;")
        end = "$END: ret;"
    if seed % 3:
        writer.uniform = True
        for _ in range(3):
            writer.index()
        for _ in range(2):
            writer.loop(1)
        writer.uniform = False
    for _ in range(3):
        writer.index()
    while writer.sites < SITES // 2:
        writer.part(2, fixed=False)
        writer.store()
    start = [
        *(
            f"mov.u32 %r{n}, %{name};"
            for n, name in enumerate("tid.x tid.y tid.z ctaid.x ntid.x laneid".split())
        ),
        "ld.param.u32 %r6, [n];",
        "and.b32 %r7, %r0, 7;",
        "ld.param.u32 %r8, [m];",
        "shl.b32 %r9, %r3, 4;",
        "and.b32 %r203, %r6, 3;",
        "setp.eq.u32 %p1, %r7, 2;",
        "setp.eq.u32 %p2, %r7, 1;",
        "ld.param.u64 %rd1, [q];",
        *(
            f"mov.u32 %r{n}, 0;" for n in range(10, 121 + writer.labels)
        ),  # as no instruction may have run that writes it
        # The place of this thread's values
        "mov.u32 %r200, %ctaid.y; mov.u32 %r201, %nctaid.x; mad.lo.u32 %r200, %r200, %r201, %r3;",
        "mov.u32 %r202, %ntid.z; mad.lo.u32 %r200, %r200, %r202, %r2;",
        "mov.u32 %r202, %ntid.y; mad.lo.u32 %r200, %r200, %r202, %r1;",
        "mad.lo.u32 %r200, %r200, %r4, %r0;",
        f"ld.param.u64 %rd98, [out]; mul.wide.u32 %rd97, %r200, {16 * SITES}; add.s64 %rd99, %rd98, %rd97;",
    ]
    registers = ".reg .b32 %r<256>; .reg .b64 %rd<128>; .reg .pred %p<4>;"
    body = "\n".join([registers, *start, *writer.lines, end])
    return f"{HEAD}.visible .entry k(.param .u64 out, .param .u32 n, .param .u32 m, .param .u64 q) {{\n{body}\n}}"


class Claims:
    """What the analysis says of the values that a program stores: by site."""

    def __init__(self, text: str) -> None:
        module = parse(text)
        function = module.functions["k"]
        lanes = Lanes(function, module.variables)
        self.found: dict[int, tuple[Known, int]] = {}  # what is known, and the bits of the value
        for index, statement in enumerate(function.body or ()):
            if not isinstance(statement, PtxInstruction) or statement.opcode != "st":
                continue
            address, value = statement.operands
            assert isinstance(address, Address)
            if isinstance(value, Name):
                known = lanes.operand(index, value)
                width = 64 if value.name.startswith("%rd") else 32
                if known is not None:
                    self.found[address.offset // 16] = known, width

    def kinds(self) -> Counter[str]:
        """Return how many values are proven to depend on the thread, need a comparison, or are unknown."""
        return Counter(
            known.reason or ("compared" if known.needs else "same" if known.is_uniform else "proven")
            for known, _ in self.found.values()
        )

    def contradictions(self, device: Device, seed: int) -> Iterator[str]:
        """Run the program; yield the sites whose values are not as it is proven of them."""
        rng = random.Random(seed)
        for block in BLOCKS:
            n, m = (rng.choice([*NUMBERS, rng.randrange(1 << 32)]) for _ in "ab")
            q = rng.choice([rng.randrange(1 << 64), 0xFFFFFFF0, 4096])
            threads = int(np.prod(block))
            blocks = int(np.prod(GRID))
            out = Array(np.zeros((blocks, threads, SITES, 2), np.uint64))
            device.launch("k", GRID, block, out, np.uint32(n), np.uint32(m), q, seed=seed)
            constants = {
                ("param", "n", 0, 32): n,
                ("param", "m", 0, 32): m,
                ("param", "q", 0, 64): q,
                **{("size", f"ntid.{axis}"): size for axis, size in zip("xyz", block, strict=True)},
                **{("size", f"nctaid.{axis}"): size for axis, size in zip("xyz", GRID, strict=True)},
            }
            x, y, _ = block
            those = [lane_terms.Thread((t % x, t // x % y, t // x // y), constants) for t in range(threads)]
            for site, (known, width) in self.found.items():
                if known.reason or known.needs:
                    continue
                claimed = np.array([lane_terms.value(known.sum, t) % (1 << width) for t in those], np.uint64)
                with np.errstate(over="ignore"):
                    rest = (out.host[:, :, site, 0] - claimed) & np.uint64((1 << width) - 1)
                for of_block, done in zip(rest, out.host[:, :, site, 1] != 0, strict=True):
                    for first in range(0, threads, 32):
                        seen = {*of_block[first : first + 32][done[first : first + 32]].tolist()}
                        low = {value % (1 << min(known.zeros, width)) for value in seen}
                        if len(seen) > 1 or (known.exact and seen - {0}) or (not known.exact and low - {0}):
                            yield f"site {site} in blocks of {block}: {known}"

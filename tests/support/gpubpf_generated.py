"""For tests: device programs that a seed decides, and small changes that may make them unsound.

A program reaches the value of map `grid` by addresses with an offset that it computes from its inputs. It bounds the offset in one of
many ways, mostly so that the last byte of the value is just inside. It ends with stores of its registers to map `out`.

The same instructions are a device program with arrays, and a host program with shared arrays. Some programs also use a hash, a ring
buffer, a map that has values for each launch, and printed text, and some use helpers for the lanes of a warp; those are device
programs only.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import STACK_SIZE, BpfFunction, Instruction, Program
from gpubpf.ebpf.maps import SHAPED, MapDefinition, prints_definition
from gpubpf.record import replace
from gpubpf_asm import (
    END,
    Code,
    alu,
    atomic,
    call,
    ja,
    jump,
    leave,
    load,
    load64,
    load_map,
    mov,
    movi,
    store,
    storei,
)

POINT, HOST_POINT = "barrier_leave", "operation"  # both have at least FIELDS fields of 8 bytes
FIELDS = 5
LOOKUP, UPDATE, DELETE, THREAD, MAXIMUM, LOG2, POPCOUNT = 1, 2, 3, 505, 607, 609, 615
PRINT, GLOBAL_THREAD, LANE, MATCH, BALLOT, SHUFFLE, LANES_BELOW, FIRST, UNIFORM, ANY = (
    6,
    606,
    602,
    610,
    611,
    612,
    616,
    617,
    619,
    621,
)
# Those without arguments, with a number, and with lanes; and the most that some of them return in warps of 32 lanes.
PLAIN_LANES, NUMBER_LANES = (
    (LANE, 603, GLOBAL_THREAD, 608, LANES_BELOW, 618),
    (MATCH, BALLOT, FIRST, UNIFORM, ANY),
)
FEW = {LANE: 31, FIRST: 1, UNIFORM: 1, ANY: 1}
TEXTS = (b"%llu", b"%d %u\n", b"a%x-%%", b"x", b"%lld%lld%lld end", b"long text without numbers")
EVENT_OUTPUT, OUTPUT, RESERVE, SUBMIT, DISCARD = 25, 130, 131, 132, 133
TABLE_KEY, TABLE_VALUE = 8, 16  # bytes of a key and of a value of map `table`
OF_LANES = (*PLAIN_LANES, *NUMBER_LANES, SHUFFLE)
ONLY_ON_GPUS = (THREAD, MAXIMUM, LOG2, POPCOUNT, *OF_LANES)
OWN_VALUE = 16  # bytes of a value of map `own`
KEY, BYTES, XYZ, ROOM, TEXT = -136, -144, -176, -200, -240  # places on the stack that no slot has
SLOTS = tuple(range(-64, 0, 8))
REGISTERS = (0, 1, 2, 3, 4, 5)  # numbers; r6: the context, r7: a number or a counter, r8: `out`, r9: `grid`
BINARY = (b.ADD, b.SUB, b.MUL, b.OR, b.AND, b.XOR, b.LSH, b.RSH, b.ARSH, b.DIV, b.MOD)
COMPARISONS = (b.JEQ, b.JGT, b.JGE, b.JSET, b.JNE, b.JSGT, b.JSGE, b.JLT, b.JLE, b.JSLT, b.JSLE)
ATOMICS = (0x00, 0x40, 0x50, 0xA0, 0x01, 0x41, 0x51, 0xA1, b.ATOMIC_XCHG, b.ATOMIC_CMPXCHG)
EDGES = (0, 1, 7, 8, 31, 63, 64, 255, -1, -8, 0x7FFFFFFF, -0x80000000)
WIDE_EDGES = (1 << 31, 1 << 32, (1 << 32) + 8, (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1)
_SUBPROGRAM = 1 << 20  # imm of a call until the place of the subprogram is known


@dataclass
class State:
    """What the generator knows at one place: the registers and slots that hold numbers, and what other slots hold."""

    numbers: set[int]
    slots: dict[int, str] = field(default_factory=dict)  # `number`, `grid`, `out`, `context` or `stack`

    def copy(self) -> State:
        return State(set(self.numbers), dict(self.slots))

    def meet(self, other: State) -> None:
        self.numbers &= other.numbers
        self.slots = {at: kind for at, kind in self.slots.items() if other.slots.get(at) == kind}


@dataclass(frozen=True)
class Generated:
    """A program of both sides. `size`: bytes of a value of `grid`. `record`: bytes of a record of `ring`; 0 without it, a hash,
    prints, and the map `own`, of the kind `own`."""

    code: tuple[Instruction, ...]
    size: int
    entries: int
    plain: bool
    record: int = 0
    own: str = "kernel_array"

    def program(self, host: bool = False) -> tuple[Program, BpfFunction]:
        kind = "shared_array" if host else "array"
        maps = (
            MapDefinition("grid", kind, 4, self.size, self.entries),
            MapDefinition("out", kind, 4, 64, 1),
            MapDefinition("settings", "param", 4, 32, 1),
        )
        if self.record:
            maps += (
                MapDefinition("table", "hash", TABLE_KEY, TABLE_VALUE, 4),
                MapDefinition("ring", "ringbuf", 0, self.record, 1 << 16),
                MapDefinition("own", self.own, 4, OWN_VALUE, 2),
                prints_definition(),
            )
        function = BpfFunction("probe", HOST_POINT if host else POINT, self.code)
        return Program("", {"probe": function}, {m.name: m for m in maps}), function

    def _calls(self, helpers: tuple[int, ...]) -> bool:
        return any(i.opcode == b.JMP | b.CALL and i.src == 0 and i.imm in helpers for i in self.code)

    @property
    def only_on_gpus(self) -> bool:
        return bool(self.record) or self._calls(ONLY_ON_GPUS)

    @property
    def on_lanes(self) -> bool:
        return self._calls(OF_LANES)


class Generator:
    """Writes one program."""

    def __init__(self, rng: random.Random, collecting: bool = False) -> None:
        self.rng = rng
        self.size = rng.choice((8, 24, 32, 64, 96, 128, 256))
        self.entries = rng.choice((1, 1, 2, 5))
        self.subprograms: list[Code] = []
        self.kinds: list[bool] = []  # whether each subprogram takes an address of the stack
        self.inside_subprogram = False
        self.on_gpu = collecting or rng.random() < 0.4  # uses helpers that only GPUs have
        # Leaves out bounds that the kernel's verifier does not see: by divisions and by helpers that only GPUs have, and offsets of
        # addresses that are negative for a while.
        self.plain = rng.random() < 0.7
        self.record = rng.choice((8, 16, 24)) if collecting or rng.random() < 0.25 else 0
        self.own = rng.choice([kind for kind in SHAPED if kind != "site_array"])

    def generate(self) -> Generated:
        rng = self.rng
        code = [mov(6, 1)]
        state = State(set())
        for name, register in (("out", 8), ("grid", 9)):
            code += self.address_of(name, rng.randrange(self.entries) if name == "grid" else 0)
            if rng.random() < 0.8:
                code += [jump(b.JNE, 0, 2, imm=0), *END]
            code += [mov(register, 0)]
        for register in (*REGISTERS, 7):
            if rng.random() < 0.9:
                code += self.input(register)
                state.numbers.add(register)
        if not state.numbers:
            code += [movi(0, 1)]
            state.numbers.add(0)
        for at in SLOTS:
            if rng.random() < 0.4:
                code += [store(10, at, self.some(state))]
                state.slots[at] = "number"
        code += self.block(state, rng.randrange(3, 9))
        for k, register in enumerate(sorted(state.numbers)[:8]):
            code += [store(8, 8 * k, register)]
        code += END
        for number, body in enumerate(self.subprograms):
            for at, i in enumerate(code):
                if i.opcode == b.JMP | b.CALL and i.src and i.imm == _SUBPROGRAM + number:
                    code[at] = replace(i, imm=len(code) - at - 1)
            code += body
        return Generated(tuple(code), self.size, self.entries, self.plain, self.record, self.own)

    # Numbers

    def some(self, state: State) -> int:
        return self.rng.choice(sorted(state.numbers))

    def target(self, state: State, *taken: int) -> int:
        """Return a register to write a number to."""
        register = self.rng.choice([r for r in REGISTERS if r not in taken])
        state.numbers.add(register)
        return register

    def address_of(self, name: str, key: int) -> Code:
        return [storei(10, KEY, key, 4), *load_map(1, name), mov(2, 10), alu(b.ADD, 2, imm=KEY), call(LOOKUP)]

    def input(self, register: int) -> Code:
        """Put a number that the tests choose into a register."""
        rng = self.rng
        kind = rng.randrange(4)
        if kind == 0:
            size = rng.choice((1, 2, 4, 8))
            return [
                load(
                    register,
                    9,
                    size * rng.randrange(self.size // size),
                    size,
                    size < 8 and rng.random() < 0.4,
                )
            ]
        if kind == 1:
            return [movi(register, rng.choice(EDGES))]
        if kind == 2 and rng.random() < 0.3:
            return load64(register, rng.choice(WIDE_EDGES))
        size = rng.choice((1, 2, 4, 8, 8, 8))
        return [load(register, 6, 8 * rng.randrange(1, FIELDS) + size * rng.randrange(8 // size), size)]

    def arithmetic(self, state: State) -> Code:
        rng = self.rng
        wide = rng.random() < 0.5
        source = self.some(state)
        target = self.some(state)
        kind = rng.randrange(12)
        if kind == 0:
            return [alu(b.NEG, target, wide=wide)]
        if kind == 1:
            return [
                Instruction(
                    rng.choice((b.ALU, b.ALU | 8, b.ALU64)) | b.END, target, imm=rng.choice((16, 32, 64))
                )
            ]
        if kind <= 3:
            target = self.target(state)
            return [alu(b.MOV, target, source, wide=wide, offset=rng.choice((0, 8, 16, 32 if wide else 0)))]
        op = rng.choice(BINARY)
        offset = rng.randrange(2) if op in (b.DIV, b.MOD) else 0
        if rng.random() < 0.5:
            return [alu(op, target, source, wide=wide, offset=offset)]
        imm = rng.choice(EDGES) if rng.random() < 0.6 else b.signed(rng.getrandbits(32), 32)
        if op in (b.LSH, b.RSH, b.ARSH):
            imm &= 63 if wide else 31
        if op in (b.DIV, b.MOD):
            imm = imm or 3
        return [alu(op, target, imm=imm, wide=wide, offset=offset)]

    # Bounds

    def bounded(self, state: State, t: int, n: int) -> Code:
        """Put a number from 0 to n - 1 into t, any of them if the inputs are so."""
        rng = self.rng
        x = self.some(state)
        wide = rng.random() < 0.6
        least = [alu(b.MOV, t, x, wide=wide)]
        power = n & (n - 1) == 0
        bits = n.bit_length() - 1
        if power and (self.plain or rng.random() < 0.5):
            down = [alu(b.AND, t, imm=n - 1)]
        else:
            down = [jump(b.JLT, t, 1, imm=n), movi(t, n - 1)] if self.plain else [alu(b.MOD, t, imm=n)]
        ways: list[Callable[[], Code]] = [
            lambda: [*least, jump(b.JLT, t, 1, imm=n, wide=wide), movi(t, n - 1)],
            lambda: [*least, jump(b.JLE, t, 1, imm=n - 1, wide=wide), movi(t, 0)],
            lambda: [*least, jump(b.JGT, t, 1, imm=n - 1, wide=wide), ja(1), movi(t, n - 1)],
            lambda: [*least, jump(b.JGE, t, 1, imm=n, wide=wide), ja(1), movi(t, 0)],
            lambda: [
                *least,
                jump(b.JLT, t, 2, imm=n, wide=wide),
                *(END if not self.inside_subprogram else [movi(0, 0), leave()]),
            ],
            lambda: [
                mov(t, x),
                jump(b.JSGE, t, 1, imm=0),
                movi(t, 0),
                jump(b.JSLT, t, 1, imm=n),
                movi(t, n - 1),
            ],
            lambda: [
                mov(t, x),
                jump(b.JSGT, t, 1, imm=n - 1),
                ja(1),
                movi(t, n - 1),
                jump(b.JSLT, t, 1, imm=0),
                ja(1),
                movi(t, 0),
            ],
            lambda: [
                alu(b.MOV, t, x, wide=False),
                jump(b.JSGE, t, 1, imm=0, wide=False),
                movi(t, 0),
                jump(b.JSLE, t, 1, imm=n - 1, wide=False),
                movi(t, n - 1),
            ],
            lambda: [mov(t, x), jump(b.JEQ, t, 1, imm=n - 1), movi(t, 0)],
            lambda: [mov(t, x), jump(b.JNE, t, 1, imm=n - 1), ja(1), movi(t, n // 2)],
            lambda: [*least, store(10, BYTES, t), load(t, 10, BYTES + rng.randrange(8), 1), *down],
            lambda: [
                *least,
                store(10, BYTES, t, 4),
                load(t, 10, BYTES, 2, True),
                alu(b.AND, t, imm=0x7FFF),
                *down,
            ],
            lambda: [alu(b.MOV, t, x, offset=8), alu(b.ADD, t, imm=128), *down],
            lambda: [*least, *down, alu(b.SUB, t, imm=n - 1), alu(b.NEG, t)],
            lambda: [
                alu(b.MOV, t, x, wide=False),
                alu(b.DIV, t, imm=(0xFFFFFFFF // n + 1) & 0x7FFFFFFF, wide=False),
                *down,
            ],
        ]
        if not self.plain:
            ways += [lambda: [*least, alu(b.MOD, t, imm=n, wide=wide)]] * 3
        if (y := self.other(t, x)) is not None:
            ways += [
                lambda: [
                    movi(y, n),
                    mov(t, x),
                    jump(b.JLT, t, 1, y),
                    mov(t, y),
                    jump(b.JNE, t, 1, imm=n),
                    movi(t, 0),
                ],
                lambda: [movi(y, n), *least, jump(b.JGT, y, 1, t), movi(t, n - 1)],
                lambda: [
                    mov(y, x),
                    mov(t, y),
                    jump(b.JLT, y, 1, imm=n),
                    movi(t, n - 1),
                ],  # two copies of a number
                lambda: [
                    mov(y, x),
                    store(10, BYTES, y),
                    jump(b.JLT, y, 2, imm=n),
                    movi(t, 0),
                    ja(1),
                    load(t, 10, BYTES),
                ],
                lambda: [movi(y, n - 1), *least, jump(b.JLE, t, 1, y, wide=wide), mov(t, y)],
            ]
            state.numbers.add(y)
            first = [movi(y, 1)]  # not every way gives y a value
        else:
            first = []
        if power:
            ways += [
                lambda: [*least, alu(b.AND, t, imm=n - 1, wide=wide)],
                lambda: [*least, alu(b.AND, t, imm=n - 1, wide=wide), alu(b.XOR, t, imm=n - 1)],
                lambda: [*least, alu(b.AND, t, imm=n - 1), alu(b.OR, t, imm=n // 2)],
                lambda: [mov(t, x), alu(b.RSH, t, imm=64 - bits)] if bits else [movi(t, 0)],
                lambda: [mov(t, x), alu(b.RSH, t, imm=32 - bits, wide=False)] if bits else [movi(t, 0)],
                lambda: (
                    [mov(t, x), alu(b.ARSH, t, imm=64 - bits), alu(b.ADD, t, imm=n // 2)]
                    if bits
                    else [movi(t, 0)]
                ),
                lambda: [mov(t, x), jump(b.JSET, t, 1, imm=-n), ja(1), movi(t, n - 1)],
                lambda: [
                    *least,
                    alu(b.AND, t, imm=n - 1),
                    Instruction(b.ALU | 8 | b.END, t, imm=16),
                    alu(b.RSH, t, imm=8),
                ],
            ]
        if self.on_gpu and not self.plain and not self.inside_subprogram and n >= 64:
            state.numbers -= {0, 1, 2, 3, 4, 5}
            state.numbers.add(7)
            return [mov(1, x), movi(7, 3), call(LOG2), mov(t, 0)]
        few = [helper for helper, most in FEW.items() if most < n]
        if self.on_gpu and not self.plain and not self.inside_subprogram and few and rng.random() < 0.3:
            state.numbers -= {0, 1, 2, 3, 4, 5}
            state.numbers.add(7)
            return [mov(1, x), movi(7, 3), call(rng.choice(few)), mov(t, 0)]
        return [*first, *rng.choice(ways)()]

    def other(self, *taken: int) -> int | None:
        free = [r for r in REGISTERS if r not in taken]
        return self.rng.choice(free) if self.rng.random() < 0.5 else None

    def index(self, state: State) -> Code:
        """Access `grid` at an offset that depends on a number."""
        rng = self.rng
        size = rng.choice([s for s in (1, 2, 4, 8) if s <= self.size])
        stride = size * rng.choice((1, 1, 2, 3)) if self.size >= 3 * size else size
        fixed = size * rng.randrange(max(1, (self.size - size) // size // 2 + 1))
        n = (self.size - size - fixed) // stride + 1
        if rng.random() < 0.5:
            n = 1 << n.bit_length() - 1
            fixed = self.size - size - (n - 1) * stride  # the last element ends where the value ends
            fixed -= fixed % size
        t, p = rng.sample(REGISTERS, 2)
        state.numbers -= {p}
        if not state.numbers - {t}:
            return []
        kept = state.numbers - {t}
        state.numbers = kept
        code = self.bounded(state, t, n)
        state.numbers.discard(p)
        at = [at for at, kind in state.slots.items() if kind == "grid"]
        fetch = [load(p, 10, rng.choice(at))] if at and rng.random() < 0.5 else [mov(p, 9)]
        last = n * stride - stride
        scale = rng.choice(("mul", "lsh") if stride & (stride - 1) == 0 else ("mul",))
        scaled = (
            [alu(b.MUL, t, imm=stride)] if scale == "mul" else [alu(b.LSH, t, imm=stride.bit_length() - 1)]
        )
        if stride == 1 and rng.random() < 0.7:
            scaled = []
        split = rng.choice((0, fixed, fixed, -8, 16))
        way = rng.choice((0, 1, 2, 4) if self.plain else range(5))
        if self.plain and way == 1:
            split = min(split, fixed)
        if way == 0:
            reach = [*fetch, alu(b.SUB, p, imm=split - fixed), alu(b.ADD, p, t)]
        elif way == 1:
            reach = [*fetch, alu(b.ADD, t, imm=fixed - split), alu(b.ADD, p, t)]
        elif way == 2:
            reach = [*fetch, alu(b.ADD, t, p), mov(p, t), alu(b.ADD, p, imm=fixed - split)]
        elif way == 3:
            reach = [*fetch, alu(b.ADD, p, imm=fixed - split + last), alu(b.SUB, p, t)]
        else:
            reach = [*fetch, alu(b.ADD, p, t), alu(b.ADD, p, imm=fixed - split)]
        state.numbers.discard(t)
        if way not in (2,) and rng.random() < 0.3:
            state.numbers.add(t)
        if not state.numbers:
            reach += [movi(7, 5)]
            state.numbers.add(7)
        return [*code, *scaled, *reach, *self.access(state, p, split, size, p)]

    def access(self, state: State, base: int, offset: int, size: int, *taken: int) -> Code:
        rng = self.rng
        kind = rng.randrange(5)
        if kind == 0:
            return [load(self.target(state, *taken), base, offset, size, size < 8 and rng.random() < 0.4)]
        if kind == 1:
            return [storei(base, offset, rng.choice(EDGES), size)]
        if kind <= 3 or size < 4:
            return [store(base, offset, self.some(state), size)]
        op = rng.choice(ATOMICS)
        if op == b.ATOMIC_CMPXCHG and 0 not in state.numbers:
            if base == 0:
                op = b.ATOMIC_ADD
            else:
                state.numbers.add(0)
                return [movi(0, 5), atomic(op, base, offset, self.some(state), size)]
        return [atomic(op, base, offset, self.some(state), size)]

    # The stack

    def spill(self, state: State) -> Code:
        rng = self.rng
        at = rng.choice(SLOTS)
        if rng.random() < 0.6 or self.inside_subprogram:
            state.slots[at] = "number"
            register = self.some(state)
            if rng.random() < 0.3:
                half = rng.choice((1, 2, 4))
                return [
                    storei(10, at, rng.choice(EDGES)),
                    store(10, at + half * rng.randrange(8 // half), register, half),
                ]
            return [store(10, at, register)]
        kind, register = rng.choice((("grid", 9), ("out", 8), ("context", 6), ("stack", 10)))
        state.slots[at] = kind
        return [store(10, at, register)]

    def fill(self, state: State) -> Code:
        rng = self.rng
        if not state.slots:
            return []
        at, kind = rng.choice(sorted(state.slots.items()))
        if kind == "number":
            size = rng.choice((1, 2, 4, 8, 8))
            t = self.target(state)
            return [load(t, 10, at + size * rng.randrange(8 // size), size, size < 8 and rng.random() < 0.4)]
        p = rng.choice(REGISTERS)
        rest = state.numbers - {p}
        if not rest:
            return []
        state.numbers = rest
        code = [load(p, 10, at)]
        if kind == "grid":
            size = rng.choice((1, 2, 4, 8))
            return [*code, *self.access(state, p, size * rng.randrange(self.size // size), size, p)]
        if kind == "out":
            return [*code, *self.access(state, p, 8 * rng.randrange(8), 8, p)]
        if kind == "context":
            return [*code, load(self.target(state), p, 8 * rng.randrange(1, FIELDS))]
        numbers = [a for a, k in state.slots.items() if k == "number"]
        if not numbers:
            return code
        return [*code, *self.access(state, p, rng.choice(numbers), 8, p)]

    def stack_address(self, state: State) -> Code:
        """Access a slot by an address that is computed."""
        rng = self.rng
        numbers = [at for at, kind in state.slots.items() if kind == "number"]
        p = rng.choice(REGISTERS)
        rest = state.numbers - {p}
        if not numbers or not rest:
            return []
        state.numbers = rest
        at = rng.choice(numbers)
        first = rng.choice((0, 8, -16, at, -256))
        size = rng.choice((1, 2, 4, 8))
        inner = size * rng.randrange(8 // size)
        ways = [
            [mov(p, 10), alu(b.ADD, p, imm=first)],
            [mov(p, 10), alu(b.ADD, p, imm=first - 8), alu(b.ADD, p, imm=8)],
            [movi(p, first), alu(b.ADD, p, 10)],
        ]
        if self.plain and self.inside_subprogram:
            ways.pop()  # the kernel takes this for an address of the caller's stack
        return [*rng.choice(ways), *self.access(state, p, at - first + inner, size, p)]

    # Helpers and subprograms

    def clobber(self, state: State) -> Code:
        state.numbers -= {1, 2, 3, 4, 5}
        state.numbers.add(0)
        return []

    def helper(self, state: State) -> Code:
        rng = self.rng
        kinds = ["update", "lookup", "param"] + (
            ["thread", "max", "log2", "popcount", "lanes", "lanes", "shuffle"] if self.on_gpu else []
        )
        kind = rng.choice(kinds)
        x = self.some(state)
        if kind == "param":
            size = rng.choice((1, 2, 4, 8))
            code = [*self.address_of("settings", 0), jump(b.JNE, 0, 2, imm=0), *END]
            self.clobber(state)
            return [*code, load(0, 0, size * rng.randrange(32 // size), size)]
        if kind == "lookup":
            key = rng.choice((b.ADD, b.AND, b.MOD))
            code = [mov(7, x), *([alu(key, 7, imm=self.entries)] if key != b.MOD or self.entries > 1 else [])]
            size = rng.choice((1, 2, 4, 8))
            self.clobber(state)
            state.numbers = {7}
            code += [
                store(10, KEY, 7, 4),
                *load_map(1, "grid"),
                mov(2, 10),
                alu(b.ADD, 2, imm=KEY),
                call(LOOKUP),
            ]
            body = self.access(state, 0, size * rng.randrange(self.size // size), size, 0)
            state.numbers = {7, 1}
            return [*code, movi(1, 0), jump(b.JEQ, 0, len(body), imm=0), *body, movi(1, 3)]
        if kind == "update":
            numbers = [at for at, kind in state.slots.items() if kind == "number"]
            if len(numbers) < 8:
                return []
            self.clobber(state)
            code = [storei(10, KEY, 0, 4), *load_map(1, "out"), mov(2, 10), alu(b.ADD, 2, imm=KEY)]
            return [*code, mov(3, 10), alu(b.ADD, 3, imm=-64), movi(4, rng.randrange(3)), call(UPDATE)]
        if kind == "thread":
            code = []
            for register, at in zip((1, 2, 3), (XYZ, XYZ + 8, XYZ + 16), strict=True):
                code += [mov(register, 10), alu(b.ADD, register, imm=at)]
            self.clobber(state)
            return [*code, call(THREAD), load(0, 10, XYZ)]
        if kind == "max":
            code = [mov(2, x), mov(1, rng.choice((8, 9))), call(MAXIMUM)]
            self.clobber(state)
            return code
        if kind == "shuffle":
            lane = rng.choice(([movi(2, 0)], [mov(2, x)], *[[call(LANE), mov(2, 0)]] * 2))
            self.clobber(state)
            return [mov(7, x), *lane, mov(1, 7), call(SHUFFLE)]
        if kind == "lanes":
            code = [mov(1, x), call(rng.choice((*PLAIN_LANES, *NUMBER_LANES)))]
            self.clobber(state)
            return code
        code = [mov(1, x), call(LOG2 if kind == "log2" else POPCOUNT)]
        self.clobber(state)
        return code

    def buffer(self, state: State, register: int, size: int, on_stack: bool = True) -> Code | None:
        """Put the address of `size` readable bytes into a register: one in `grid`, or perhaps that of slots with numbers.

        A place in `grid` may depend on a number. Registers below 6 have no numbers then.
        """
        rng = self.rng
        numbers = [at for at, kind in state.slots.items() if kind == "number"]
        starts = [at for at in numbers if set(range(at, at + size, 8)) <= set(numbers)]
        if on_stack and starts and (size > self.size or rng.random() < 0.5):
            self.clobber(state)
            return [mov(register, 10), alu(b.ADD, register, imm=rng.choice(starts))]
        if size > self.size:
            return None
        room = (self.size - size) // 8 + 1
        if rng.random() < 0.3:
            self.clobber(state)
            return [mov(register, 9), alu(b.ADD, register, imm=8 * rng.randrange(room))]
        bound = self.bounded(state, register, room)
        self.clobber(state)
        return [*bound, alu(b.LSH, register, imm=3), alu(b.ADD, register, 9)]

    def collect(self, state: State) -> Code:
        """Use the hash or the ring buffer. The helper reads memory, or returns the address of some."""
        rng = self.rng
        kinds = (
            "output",
            "event",
            "reserve",
            "lookup",
            "update",
            "update",
            "delete",
            "print",
            "print",
            "own",
        )
        kind = rng.choice((*kinds, "max") if self.on_gpu else kinds)
        size = {"output": self.record, "event": self.record, "update": TABLE_VALUE, "max": 8}.get(
            kind, TABLE_KEY
        )
        inner = rng.choice((1, 2, 4, 8))
        if kind == "reserve":
            self.clobber(state)
            code: Code | None = [*load_map(1, "ring"), movi(2, self.record), movi(3, 0), call(RESERVE)]
            body = [mov(7, 0)]
            for _ in range(rng.randrange(1, 4)):
                inner = rng.choice((1, 2, 4, 8))
                body += [storei(7, inner * rng.randrange(self.record // inner), rng.choice(EDGES), inner)]
            body += [mov(1, 7), movi(2, 0), call(rng.choice((SUBMIT, DISCARD)))]
            state.numbers = {7}
            return [*code, jump(b.JEQ, 0, len(body), imm=0), *body, movi(7, 4)]
        if kind == "print":
            return self.printed(state)
        if kind == "own":
            x = self.some(state)
            key = (
                [mov(7, x), *self.bounded(state, 7, 2)]
                if rng.random() < 0.5
                else [mov(7, x), alu(b.AND, 7, imm=3)]
            )
            self.clobber(state)
            state.numbers = {7}
            code = [
                *key,
                store(10, KEY, 7, 4),
                *load_map(1, "own"),
                mov(2, 10),
                alu(b.ADD, 2, imm=KEY),
                call(LOOKUP),
            ]
            body = self.access(state, 0, inner * rng.randrange(OWN_VALUE // inner), inner, 0)
            state.numbers = {7}
            return [*code, jump(b.JEQ, 0, len(body), imm=0), *body]
        target = {"output": 2, "event": 4, "max": 1}.get(kind, 3)
        if (code := self.buffer(state, target, size, kind != "max")) is None:
            return []
        state.numbers = {7}
        if kind == "output":
            code += [*load_map(1, "ring"), movi(3, self.record), movi(4, 0), call(OUTPUT)]
        elif kind == "event":
            code += [mov(1, 6), *load_map(2, "ring"), movi(3, 0), movi(5, self.record), call(EVENT_OUTPUT)]
        elif kind == "max":
            code += [movi(2, 5), call(MAXIMUM)]
        elif kind == "update":
            code += [
                storei(10, BYTES, rng.randrange(6)),
                *load_map(1, "table"),
                mov(2, 10),
                alu(b.ADD, 2, imm=BYTES),
            ]
            code += [movi(4, rng.randrange(3)), call(UPDATE)]
        else:
            code += [mov(2, 3), *load_map(1, "table"), call(LOOKUP if kind == "lookup" else DELETE)]
        if kind == "lookup":
            body = self.access(state, 0, inner * rng.randrange(TABLE_VALUE // inner), inner, 0)
            state.numbers = {7}
            code += [jump(b.JEQ, 0, len(body), imm=0), *body]
        return [*code, movi(7, 4)]

    def printed(self, state: State) -> Code:
        """Print a text with numbers, of which some may be left out."""
        rng = self.rng
        text = rng.choice(TEXTS) + b"\0"
        words = [text[at : at + 8].ljust(8, b"\0") for at in range(0, len(text), 8)]
        numbers = [self.some(state) for _ in range(3)]
        code = [store(10, ROOM + 8 * k, number) for k, number in enumerate(numbers)]
        for k, word in enumerate(words):
            code += [*load64(7, int.from_bytes(word, "little")), store(10, TEXT + 8 * k, 7)]
        code += [load(3 + k, 10, ROOM + 8 * k) for k in range(3)]
        code += [mov(1, 10), alu(b.ADD, 1, imm=TEXT), movi(2, len(text)), call(PRINT), mov(7, 0)]
        self.clobber(state)
        state.numbers |= {7}
        return code

    def call(self, state: State) -> Code:
        """Call a subprogram with two numbers and an address of a slot or of `grid`."""
        rng = self.rng
        numbers = [at for at, kind in state.slots.items() if kind == "number"]
        x, y = self.some(state), self.some(state)
        code = [store(10, ROOM, x), store(10, ROOM + 8, y)]
        on_stack = bool(numbers) and rng.random() < 0.4
        if len(self.subprograms) < 3 and (not self.subprograms or rng.random() < 0.6):
            self.inside_subprogram = True
            inner = State({1, 2, 0})
            body: Code = [movi(0, 0)]
            if on_stack:
                body += self.access(inner, 3, 0, 8, 3)
            else:
                body += [mov(9, 3)]
            for at in SLOTS[-4:]:
                body += [storei(10, at, 0)]
                inner.slots[at] = "number"
            choices = [self.arithmetic, self.spill, self.fill, self.stack_address]
            if not on_stack:
                choices.append(self.index)
            for _ in range(rng.randrange(1, 4)):
                body += rng.choice(choices)(inner)
            if 0 not in inner.numbers:
                body += [mov(0, self.some(inner))]
            self.inside_subprogram = False
            self.subprograms.append([*body, leave()])
            self.kinds.append(on_stack)
        number: int | None = len(self.subprograms) - 1
        if self.kinds[number] and not numbers:
            number = self.kinds.index(False) if False in self.kinds else None
        if number is None:
            return []
        code += [mov(3, 10), alu(b.ADD, 3, imm=rng.choice(numbers))] if self.kinds[number] else [mov(3, 9)]
        code += [load(1, 10, ROOM), load(2, 10, ROOM + 8)]
        code += [Instruction(b.JMP | b.CALL, 0, b.PSEUDO_CALL, 0, _SUBPROGRAM + number)]
        self.clobber(state)
        return code

    # Control flow

    def block(self, state: State, length: int, depth: int = 0) -> Code:
        rng = self.rng
        code: Code = []
        for _ in range(length):
            kinds: list[tuple[int, Callable[[State], Code]]] = [
                (6, self.arithmetic),
                (6, self.index),
                (2, self.spill),
                (2, self.fill),
                (2, self.stack_address),
                (1, self.fresh_input),
                (1, self.null_test),
            ]
            if depth < 2:
                kinds += [
                    (2 if self.on_gpu else 1, self.helper),
                    (2, lambda s: self.either(s, depth)),
                    (1, lambda s: self.loop(s, depth)),
                    (1, self.call),
                    *([(12, self.collect)] if self.record else []),
                ]
            code += rng.choices([one for _, one in kinds], [weight for weight, _ in kinds])[0](state)
        return code

    def null_test(self, state: State) -> Code:
        """Test for NULL what is an address on one path and a number on the other."""
        rng, t = self.rng, self.target(state)
        address = [mov(t, rng.choice((6, 8, 9, 10)))]
        if rng.random() < 0.3:
            address = [mov(t, 10), alu(b.ADD, t, imm=-STACK_SIZE)]
        return [
            *(*self.input(t), jump(b.JSGT, t, 2, imm=rng.choice(EDGES))),
            *(movi(t, rng.choice((0, 0, 1))), ja(len(address)), *address),
            *(jump(rng.choice((b.JEQ, b.JNE)), t, 2, imm=0), movi(t, 1), ja(1), movi(t, 2)),
        ]

    def fresh_input(self, state: State) -> Code:
        return self.input(self.target(state))

    def either(self, state: State, depth: int) -> Code:
        rng = self.rng
        x, y = self.some(state), self.some(state)
        other = state.copy()
        first = self.block(state, rng.randrange(1, 3), depth + 1)
        second = self.block(other, rng.randrange(3), depth + 1)
        state.meet(other)
        wide = rng.random() < 0.6
        op = rng.choice(COMPARISONS)
        after: Code = []
        if not state.numbers:
            after = [movi(7, 1)]
            state.numbers.add(7)
        if rng.random() < 0.3:
            test = jump(op, x, len(first) + 1, y, wide=wide)
        else:
            test = jump(op, x, len(first) + 1, imm=rng.choice(EDGES), wide=wide)
        return [test, *first, ja(len(second)), *second, *after]

    def loop(self, state: State, depth: int) -> Code:
        """Count r7 up to a constant or a bounded number, with r7 as an index."""
        rng = self.rng
        times = rng.randrange(1, 6)
        inner = State(state.numbers - {7}, dict(state.slots))
        if not inner.numbers:
            return []
        size = rng.choice((1, 2, 4, 8))
        count = min(times, self.size // size)
        p = rng.choice(sorted(REGISTERS))
        body: Code = []
        for _ in range(rng.randrange(2)):
            body += self.arithmetic(inner)
        before = set(inner.numbers)
        inner.numbers.discard(p)
        if not inner.numbers:
            return []
        fixed = self.size - size * count
        body += [mov(p, 7), alu(b.MUL, p, imm=size), alu(b.ADD, p, 9)]
        body += self.access(inner, p, fixed - fixed % size, size, p)
        if p in before:
            body += [movi(p, times)]
        body += [alu(b.ADD, 7, imm=1, wide=rng.random() < 0.7)]
        state.numbers |= {7}
        # Each iteration finds what the first one found; registers that only the body sets have a value behind the loop, too.
        state.numbers |= inner.numbers | ({p} & before)
        start = [movi(r, 0) for r in sorted(inner.numbers - before - {7})]
        return [
            *start,
            movi(7, 0),
            *body,
            jump(rng.choice((b.JLT, b.JNE)), 7, -len(body) - 1, imm=count, wide=rng.random() < 0.7),
        ]


def generate(rng: random.Random, collecting: bool = False) -> Generated:
    """Return a program that the gate will probably accept. collecting: it may use every helper and map."""
    while True:
        try:
            return Generator(rng, collecting).generate()
        except IndexError:  # no register has a number any more
            continue


def mutate(made: Generated, rng: random.Random) -> Generated:
    """Change a program in one instruction, so that it may be unsound."""
    code = list(made.code)
    first = 0 if rng.random() < 0.2 else min(16, len(code) // 2)  # behind the lookups
    for _ in range(100):
        at = rng.randrange(first, len(code))
        i = code[at]
        if i.opcode in (0, b.LD_IMM64) or i.opcode == b.JMP | b.EXIT:
            continue
        jumps = i.cls in (b.JMP, b.JMP32)
        op = i.opcode & 0xF0
        ways: list[Instruction] = []
        if not (jumps and op in (b.JA, b.CALL)):
            ways += [ja(0)]
            if i.cls == b.ST or (i.cls not in (b.LDX, b.STX) and not i.opcode & 8):
                ways += [
                    replace(i, imm=b.signed(v, 32))
                    for v in (i.imm + 1, i.imm - 1, i.imm + 8, 2 * i.imm, -i.imm)
                ] * 2
        if jumps and op not in (b.JA, b.CALL):
            ways += [replace(i, opcode=i.opcode & 0x0F | rng.choice(COMPARISONS)) for _ in range(3)]
            ways += [replace(i, opcode=i.opcode ^ b.JMP ^ b.JMP32)] * 3
        if i.cls in (b.ALU, b.ALU64):
            if op not in (b.END, b.NEG, b.MOV) and not i.offset:
                ways += [replace(i, opcode=i.opcode & 0x0F | rng.choice(BINARY[:-2]))]
            ways += [replace(i, opcode=i.opcode ^ b.ALU ^ b.ALU64)] * 2
            if i.opcode & 8:
                ways += [replace(i, src=rng.randrange(11))]
        if i.cls in (b.LDX, b.ST, b.STX):
            ways += [replace(i, offset=i.offset + d) for d in (-8, -4, -1, 1, 4, 8)]
            if i.opcode & 0xE0 == b.MEM:
                ways += [replace(i, opcode=i.opcode & ~0x18 | size) for size in (0x00, 0x08, 0x10, 0x18)]
            ways += [replace(i, src=rng.randrange(10)), replace(i, dst=rng.randrange(10))]
        if i.opcode == b.JMP | b.CALL and i.src == 0:
            continue
        if not ways:
            continue
        changed = rng.choice(ways)
        if changed != i:
            code[at] = changed
            break
    return replace(made, code=tuple(code))

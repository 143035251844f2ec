"""Lowering against a plain interpreter, over random programs of every class of instruction; and what GPUs get."""

from __future__ import annotations

import ctypes
import random
import re
import subprocess

import pytest

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.errors import VerifyError
from gpubpf.images.assemble import find_ptxas
from gpubpf.lower import host_code, nvptx
from gpubpf.verify.rules import check
from gpubpf_asm import (
    END,
    OUT,
    SIZES,
    Interpreter,
    Native,
    alu,
    atomic,
    call,
    call_program,
    ja,
    jump,
    leave,
    load,
    load64,
    load_map,
    lookup,
    mov,
    movi,
    program,
    store,
    storei,
)
from gpubpf_bcc import compiled
from gpubpf_sass import assembled as cubin_of
from gpubpf_sass import sass
from hipsim_engine import GPUS, missing

BINARY = (b.ADD, b.SUB, b.MUL, b.OR, b.AND, b.XOR, b.LSH, b.RSH, b.ARSH, b.DIV, b.MOD)
COMPARE = (b.JEQ, b.JGT, b.JGE, b.JSET, b.JNE, b.JSGT, b.JSGE, b.JLT, b.JLE, b.JSLT, b.JSLE)
EDGES = (
    0,
    1,
    2,
    31,
    32,
    63,
    64,
    -1,
    -2,
    0x7FFFFFFF,
    -0x80000000,
    1 << 31,
    (1 << 63) - 1,
    1 << 63,
    0xFFFFFFFF,
)
ATOMICS = (0x00, 0x40, 0x50, 0xA0, 0x01, 0x41, 0x51, 0xA1, 0xE1, 0xF1)
# r9 keeps the value of map `out`: 64 bytes of input, 64 of scratch, 64 of output. r0 to r8 are numbers.
SCRATCH, RESULT = 64, 128


def arithmetic(rng, wide):
    op = rng.choice(BINARY)
    dst, src = rng.randrange(9), rng.randrange(9)
    offset = rng.randrange(2) if op in (b.DIV, b.MOD) else 0
    if rng.random() < 0.5:
        return [alu(op, dst, src, wide=wide, offset=offset)]
    imm = rng.choice(EDGES) if rng.random() < 0.4 else rng.getrandbits(32)
    imm = b.signed(imm, 32)
    if op in (b.LSH, b.RSH, b.ARSH):
        imm &= 63 if wide else 31
    if op in (b.DIV, b.MOD):
        imm = imm or 7
    return [alu(op, dst, imm=imm, wide=wide, offset=offset)]


def unary(rng):
    dst, src = rng.randrange(9), rng.randrange(9)
    return [
        rng.choice(
            [
                alu(b.NEG, dst, wide=True),
                alu(b.NEG, dst, wide=False),
                alu(b.MOV, dst, src, wide=True, offset=rng.choice((0, 8, 16, 32))),
                alu(b.MOV, dst, src, wide=False, offset=rng.choice((0, 8, 16))),
                alu(b.MOV, dst, imm=b.signed(rng.getrandbits(32), 32), wide=rng.random() < 0.5),
                b.Instruction(b.ALU | b.END | rng.choice((0, 8)), dst, imm=rng.choice((16, 32, 64))),
                b.Instruction(b.ALU64 | b.END, dst, imm=rng.choice((16, 32, 64))),
            ]
        )
    ]


def memory(rng):
    size = rng.choice((1, 2, 4, 8))
    base, low = rng.choice(((10, -64), (9, SCRATCH)))
    offset = low + size * rng.randrange(64 // size)
    register = rng.randrange(9)
    return [
        rng.choice(
            [
                load(register, base, offset, size, sign=size < 8 and rng.random() < 0.5),
                store(base, offset, register, size),
                storei(base, offset, b.signed(rng.getrandbits(32), 32), size),
            ]
        )
    ]


def atomics(rng):
    size = rng.choice((4, 8))
    base, low = rng.choice(((10, -64), (9, SCRATCH)))
    return [atomic(rng.choice(ATOMICS), base, low + size * rng.randrange(64 // size), rng.randrange(9), size)]


def branch(rng):
    wide = rng.random() < 0.5
    body = [one for _ in range(rng.randrange(1, 4)) for one in arithmetic(rng, rng.random() < 0.5)]
    other = [one for _ in range(rng.randrange(1, 3)) for one in unary(rng)]
    src = rng.randrange(9) if rng.random() < 0.6 else None
    imm = b.signed(rng.choice(EDGES), 32)
    forward = b.Instruction(0x06, imm=len(other)) if rng.random() < 0.3 else ja(len(other))
    return [
        jump(rng.choice(COMPARE), rng.randrange(9), len(body) + 1, src, imm, wide),
        *body,
        forward,
        *other,
    ]


CLASSES = {
    "alu64": lambda rng: arithmetic(rng, True),
    "alu32": lambda rng: arithmetic(rng, False),
    "unary": unary,
    "memory": memory,
    "atomics": atomics,
    "branches": branch,
    "mixed": lambda rng: rng.choice((unary, memory, atomics, branch, lambda r: arithmetic(r, True)))(rng),
}


def frame(body):
    """A whole program around `body`: numbers from the map into r0 to r8, and back at its end."""
    start = [*lookup("out"), mov(9, 0)]
    start += [storei(10, -8 * k, 0) for k in range(1, 9)]
    start += [load(k, 9, 8 * (k % 8)) for k in range(9)]
    start.insert(len(lookup("out")), jump(b.JNE, 0, 2, imm=0))
    start[len(lookup("out")) + 1 : len(lookup("out")) + 1] = [movi(0, 0), leave()]
    return [*start, *body, *(store(9, RESULT + 8 * k, k) for k in range(9)), movi(0, 0), leave()]


def interpreted(code, value):
    """Return the program, and what the map has after it."""
    made, function = program(code)
    expected = Interpreter(function.instructions, value)
    expected.run()
    return made, function, bytes(expected.value)


def compare(code, value):
    made, function, expected = interpreted(code, value)
    native = Native(made, function)
    memory = ctypes.create_string_buffer(bytes(value), len(value))
    native(map_out=ctypes.addressof(memory))
    assert memory.raw == expected


def numbers(rng):
    words = [
        rng.choice(EDGES) if rng.random() < 0.5 else rng.getrandbits(rng.choice((8, 32, 64)))
        for _ in range(16)
    ]
    return b"".join((word & (1 << 64) - 1).to_bytes(8, "little") for word in words).ljust(256, b"\0")


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("seed", range(12))
def test_same_as_interpreter(kind, seed):
    rng = random.Random(f"{kind} {seed}")
    body = [one for _ in range(24) for one in CLASSES[kind](rng)]
    compare(frame(body), numbers(rng))


@pytest.fixture(scope="module", params=GPUS)
def amd(request, tmp_path_factory):
    if (reason := missing()) is not None:
        pytest.skip(reason)
    from gpubpf_amd import AmdGpu

    gpu = AmdGpu(tmp_path_factory.mktemp("amd"), request.param)
    yield gpu
    gpu.engine.close()


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.every(6)
def test_same_as_interpreter_on_amd_gpus(amd, kind, seed):
    rng = random.Random(f"amd {kind} {seed}")
    body = [one for _ in range(24) for one in CLASSES[kind](rng)]
    value = numbers(rng)
    made, function, expected = interpreted(frame(body), value)
    assert amd.run(made, function, {"out": value}) == {"out": expected}


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("signed", [0, 1])
def test_division_at_its_edges(wide, signed):
    rng = random.Random(5)
    for left in EDGES:
        words = [left, *rng.sample(EDGES, 7)]
        body = []
        for k in range(1, 8):
            body += [mov(8, 0), alu(b.DIV if k % 2 else b.MOD, 8, k, wide=wide, offset=signed), mov(k, 8)]
        value = b"".join((w & (1 << 64) - 1).to_bytes(8, "little") for w in words).ljust(256, b"\0")
        compare(frame(body), value)


# Each leaves an address in r3, which the gate knows is not NULL.
NEVER_NULL = {
    "the context": [mov(3, 8)],
    "the context, moved": [mov(3, 8), alu(b.ADD, 3, imm=-16)],
    "a map": load_map(3, "out"),
    "the stack": [mov(3, 10), alu(b.ADD, 3, imm=-b.STACK_SIZE)],
    "below the stack": [mov(3, 10), alu(b.ADD, 3, imm=-b.STACK_SIZE - 16)],
}


@pytest.mark.parametrize("address", NEVER_NULL)
def test_an_address_where_another_path_has_a_number(address):
    """Both paths come to one test for NULL, so the test is executed."""
    code = NEVER_NULL[address]
    for decides in (0, 1):
        compare(
            [
                *(mov(8, 1), *lookup("out"), mov(9, 0), load(6, 9, 0)),
                *(jump(b.JNE, 6, 2, imm=0), movi(3, 0), ja(len(code)), *code),
                *(jump(b.JEQ, 3, 2, imm=0), movi(4, 1), ja(1), movi(4, 2)),
                *(store(9, 8, 4), movi(0, 0), leave()),
            ],
            decides.to_bytes(8, "little") + bytes(248),
        )


def test_constants_of_64_bits():
    compare(frame([*load64(3, 0xFEDCBA9876543210), *load64(4, -1), *load64(5, 1 << 63)]), bytes(256))


def test_a_bounded_loop():
    body = [
        movi(1, 0),
        movi(2, 0),
        alu(b.ADD, 2, 1),
        alu(b.XOR, 2, 3),
        alu(b.ADD, 1, imm=1),
        jump(b.JLT, 1, -4, imm=37),
    ]
    compare(frame(body), numbers(random.Random(3)))


def test_a_loop_over_an_array_on_the_stack():
    """Unrolled, so that it is in registers."""
    body = [movi(1, 0), mov(2, 10), alu(b.ADD, 2, imm=-64), store(2, 0, 1), alu(b.ADD, 2, imm=8)]
    body += [alu(b.ADD, 1, imm=1), jump(b.JNE, 1, -4, imm=8), load(3, 10, -16), load(4, 10, -64), movi(2, 0)]
    compare(frame(body), bytes(256))
    made, function = program(frame(body))
    assert ".local" not in nvptx.lower(made, check(made, function)).ptx


def test_subprograms_have_their_own_stack_and_registers():
    """main: r7 kept over two calls of a function that uses r7 and its stack, and one stack address passed down."""
    begin = lookup("out")
    main = [
        *begin,
        jump(b.JNE, 0, 2, imm=0),
        movi(0, 0),
        leave(),
        mov(9, 0),
        load(7, 9, 0),
        storei(10, -16, 5),
    ]
    main += [mov(1, 7), mov(2, 10), alu(b.ADD, 2, imm=-16)]
    first = len(main)
    main += [None, store(9, RESULT, 0), mov(1, 0), mov(2, 10), alu(b.ADD, 2, imm=-16)]
    second = len(main)
    main += [
        None,
        store(9, RESULT + 8, 0),
        store(9, RESULT + 16, 7),
        load(3, 10, -16),
        store(9, RESULT + 24, 3),
    ]
    main += [movi(0, 0), leave()]
    sub = [mov(7, 1), store(10, -8, 7), load(3, 2, 0), alu(b.MUL, 3, imm=3), store(2, 0, 3), load(0, 10, -8)]
    sub += [alu(b.ADD, 0, 3), leave()]
    main[first] = call_program(len(main) - first - 1)
    main[second] = call_program(len(main) - second - 1)
    compare([*main, *sub], numbers(random.Random(8)))


# What a GPU gets


def assembled(made, function, arch="sm_90"):
    """ptxas -v of a kernel that holds the fragment and little else."""
    ptxas = find_ptxas()
    if ptxas is None:
        pytest.skip("no ptxas")
    fragment = nvptx.lower(made, check(made, function))
    return fragment, run_ptxas(ptxas, kernel_with(fragment, arch), arch)


def kernel_with(fragment, arch="sm_90"):
    lines = []
    for number, a in enumerate(fragment.arguments):
        lines.append(f".reg .{a.type} {a.register};")
        lines.append(f"ld.param.{a.type} {a.register}, [block+{8 * number}];")
    size = 8 * len(fragment.arguments) + 8
    body = "\n".join(["{", *lines, fragment.ptx, "}"])
    return (
        f".version 8.0\n.target {arch}\n.address_size 64\n"
        f".visible .entry k(.param .align 8 .b8 block[{size}])\n{{\n{body}\nret;\n}}\n"
    )


def run_ptxas(ptxas, text, arch):
    done = subprocess.run(
        [ptxas, "-v", f"-arch={arch}", "-o", "/dev/null", "/dev/stdin"],
        input=text,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr + text
    return int(re.search(r"Used (\d+) registers", done.stderr)[1])


@pytest.mark.parametrize("kind", CLASSES)
def test_ptxas_takes_what_is_made(kind):
    rng = random.Random(f"ptxas {kind}")
    body = [one for _ in range(60) for one in CLASSES[kind](rng)]
    made, function = program(frame(body))
    fragment, _ = assembled(made, function)
    assert ".local" not in fragment.ptx
    assert "call" not in fragment.ptx
    assert [a.name for a in fragment.arguments] == ["map_out"]


def test_an_array_that_needs_memory_is_rejected():
    body = [load(1, 9, 0), alu(b.AND, 1, imm=7), alu(b.LSH, 1, imm=3), mov(2, 10), alu(b.ADD, 2, imm=-64)]
    body += [alu(b.ADD, 2, 1), load(3, 2, 0)]
    made, function = program(frame(body))
    with pytest.raises(VerifyError, match="stack"):
        check(made, function)


def test_every_helper_assembles():
    """Each is called once, in one program, and ptxas takes it."""
    keyed = MapDefinition("keyed", "hash", 12, 16, 100)
    ring = MapDefinition("ring", "ringbuf", 0, 24, 8192)
    lanes = MapDefinition("lanes", "thread_array", 4, 16, 3)
    code = [storei(10, -8 * k, 0) for k in range(1, 9)]

    def address(register, at):
        return [mov(register, 10), alu(b.ADD, register, imm=at)]

    code = [mov(6, 1), *code]
    for helper in (503, 504, 505, 508, 601):
        code += [*address(1, -8), *address(2, -16), *address(3, -24), call(helper)]
    total = [movi(7, 0)]
    for helper in (14, 502, 509, 510, 511, 602, 603, 604, 605, 606, 608, 613, 614, 616):
        total += [call(helper), alu(b.ADD, 7, 0)]
    for helper in (610, 611, 612, 615, 617):
        total += [mov(1, 7), movi(2, 5), call(helper), alu(b.ADD, 7, 0)]
    code += [*total, call(506), store(10, -16, 7)]
    for name in ("keyed", "lanes"):
        for flags in (0, 1, 2):
            code += [*load_map(1, name), *address(2, -16), *address(3, -64), movi(4, flags), call(2)]
        code += [
            *load_map(1, name),
            *address(2, -16),
            call(1),
            jump(b.JEQ, 0, 5, imm=0),
            movi(1, 7),
            atomic(0, 0, 8, 1),
            mov(1, 0),
            movi(2, 9),
            call(607),
            mov(1, 0),
            call(609),
        ]
    code += [*load_map(1, "keyed"), *address(2, -16), call(3)]
    code += [*load_map(1, "ring"), *address(2, -24), movi(3, 24), movi(4, 0), call(130)]
    code += [mov(1, 6), *load_map(2, "ring"), movi(3, -1), *address(4, -24), movi(5, 24), call(25)]
    for helper in (132, 133):
        code += [*load_map(1, "ring"), movi(2, 24), movi(3, 0), call(131), jump(b.JEQ, 0, 4, imm=0)]
        code += [storei(0, 8, 5), mov(1, 0), movi(2, 0), call(helper)]
    code += [storei(10, -64, 0x0A6425), *address(1, -64), movi(2, 8), load(3, 6, 16), call(6)]
    code += [*address(1, -64), call(501), movi(0, 0), leave()]
    made, function = program(code, (keyed, ring, lanes))
    fragment, _ = assembled(made, function, "sm_75")
    assert {a.kind for a in fragment.arguments} == {
        "map_base",
        "map_capacity",
        "context",
        "pid_tgid",
        "kernel",
        "epoch",
    }
    assert set(fragment.formats.values()) == {"%d\n", "%%d\n"}
    assert {"globaltimer", "laneid", "smid", "warpid", "clock64", "ctaid.z", "ntid.y"} <= set(
        re.findall(r"%(\w+(?:\.[xyz])?)", fragment.ptx)
    )


LANES = """#include <gpubpf.h>
struct cell { u64 requests, lanes, firsts, highest; };
GPU_SITE_ARRAY(cells, struct cell);
int together(struct gpu_access *ctx) {
    u64 site = ctx->site;
    u32 firsts = gpu_ballot(!(gpu_match(ctx->address >> 5) & gpu_lanes_below()));
    u64 first = gpu_shuffle(ctx->address, gpu_log2(ctx->active & -ctx->active));
    struct cell *cell = cells.lookup(&site);
    if (!cell || !gpu_first(ctx->active))
        return 0;
    __sync_fetch_and_add(&cell->requests, 1);
    __sync_fetch_and_add(&cell->lanes, gpu_popcount(ctx->active));
    __sync_fetch_and_add(&cell->firsts, gpu_popcount(firsts));
    gpu_max(&cell->highest, first + gpu_kernel() + gpu_epoch());
    return 0;
}
int branches(struct gpu_access *ctx) {
    u64 site = ctx->site, lanes = 0;
    struct cell *cell = cells.lookup(&site);
    if (ctx->address & 64)
        lanes = gpu_match(ctx->address);
    else
        lanes = gpu_match(ctx->width);
    if (cell)
        __sync_fetch_and_add(&cell->lanes, lanes);
    return 0;
}
int known(struct gpu_access *ctx) {
    u64 site = ctx->site, flag = 0;
    struct cell *cell = cells.lookup(&site);
    if (!cell)
        return 0;
    if (ctx->address & 64) {
        __sync_fetch_and_add(&cell->lanes, 7);
        flag = 1;
    }
    u32 lanes = gpu_ballot(1);
    if (flag)
        __sync_fetch_and_add(&cell->lanes, lanes);
    return 0;
}
int begins(struct gpu_block_begin *ctx) {
    u64 site = ctx->site;
    struct cell *cell = cells.lookup(&site);
    if (cell)
        __sync_fetch_and_add(&cell->requests, 1);
    return 0;
}
int ends(struct gpu_block_end *ctx) {
    u64 site = ctx->site;
    struct cell *cell = cells.lookup(&site);
    if (cell)
        __sync_fetch_and_add(&cell->lanes, 1);
    return 0;
}
"""


@pytest.fixture(scope="module")
def lanes():
    made = compiled(LANES)
    return {f.name: nvptx.lower(made, check(made, f)) for f in made.device_functions}


def test_what_lanes_find_out_is_asked_where_it_is_written(lanes):
    """Two calls in two branches stay two, and one call that a known condition follows stays one."""
    asked = {name: re.findall(r"(match|vote|shfl)\S*\.sync", f.ptx) for name, f in lanes.items()}
    assert asked["together"] == ["match", "vote", "shfl", "shfl"]
    assert asked["branches"] == ["match", "match"]
    assert asked["known"] == ["vote"]
    masks = {name: f.ptx.count("activemask") for name, f in lanes.items()}
    assert masks == {"together": 3, "branches": 2, "known": 1, "begins": 1, "ends": 1}
    kinds = {a.kind for a in lanes["together"].arguments}
    assert kinds == {"context", "kernel", "epoch", "shard"}


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100"])
def test_ptxas_takes_it_for_every_architecture(lanes, arch):
    """As text for sm_70, which newer ones take."""
    ptxas = find_ptxas()
    if ptxas is None:
        pytest.skip("no ptxas")
    used = {name: run_ptxas(ptxas, kernel_with(fragment, "sm_70"), arch) for name, fragment in lanes.items()}
    assert used["together"] <= 20
    assert max(used.values()) <= 32


def test_what_lanes_find_out_costs_little(lanes, tmp_path):
    """Sums are added without waiting for an answer, nothing is in memory, and no half of a shuffle is for nothing."""
    instructions = sass(cubin_of(kernel_with(lanes["together"]), "sm_90", tmp_path)[0])["k"]
    text = "\n".join(instructions)
    assert [op for op in ("ATOM", "LDL", "STL", "CALL") if op in text] == []
    assert text.count("RED") == 4
    assert "UPOPC" not in text.split("RED", 1)[1]  # nor does ptxas add up over lanes what one adds
    assert len(instructions) <= 75


def test_clocks_are_read_where_the_program_reads_them(tmp_path):
    """Neither LLVM nor ptxas moves a clock over an atomic, a store or another clock."""
    code = [call(605), mov(7, 0), *lookup("out"), mov(8, 0), movi(1, 1), atomic(0, 8, 0, 1), call(502)]
    code += [store(8, 8, 7), store(8, 16, 0), call(605), store(8, 24, 0), movi(1, 1), atomic(0, 8, 32, 1)]
    code += [call(605), store(8, 40, 0), movi(0, 0), leave()]
    made, function = program(code)
    fragment = nvptx.lower(made, check(made, function))
    order = ["clock", "atom", "globaltimer", "clock", "atom", "clock"]
    found = re.findall(r"%(clock|globaltimer)|\b(atom|red)\.", fragment.ptx)
    assert [first or second.replace("red", "atom") for first, second in found] == order
    lines = "\n".join(sass(cubin_of(kernel_with(fragment), "sm_90", tmp_path)[0])["k"])
    found = re.findall(r"SR_(CLOCK|GLOBALTIMER)LO|\b(ATOM|RED)", lines)
    assert [first or second for first, second in found] == [
        "CLOCK",
        "RED",
        "GLOBALTIMER",
        "CLOCK",
        "RED",
        "CLOCK",
    ]


def test_a_thread_that_ends_at_entry(tmp_path):
    """It leaves where the program says, without memory of its own; what the program would do next, only others do."""
    code = [load(7, 1, 16), *lookup("out"), mov(8, 0), jump(b.JNE, 7, 2, imm=0), call(507), movi(7, 5)]
    made, function = program([*code, store(8, 0, 7), *END], point="entry")
    fragment = nvptx.lower(made, check(made, function))
    assert fragment.ptx.count("exit;") == 1 and ".local" not in fragment.ptx
    instructions = sass(cubin_of(kernel_with(fragment), "sm_90", tmp_path)[0])["k"]
    exits, stores = (
        [n for n, line in enumerate(instructions) if re.search(what, line)]
        for what in (r"\bEXIT\b", r"\bSTG")
    )
    assert len(exits) == 2 and len(stores) == 1 and exits[0] < stores[0] < exits[1]


def test_labels_and_registers_are_local_to_the_block():
    """Two copies of a fragment in one kernel, as with two exits."""
    rng = random.Random(2)
    made, function = program(frame([one for _ in range(12) for one in branch(rng)]))
    fragment, _ = assembled(made, function)
    text = kernel_with(fragment).replace("ret;\n}", fragment_copy(fragment) + "ret;\n}")
    run_ptxas(find_ptxas(), text, "sm_90")


def fragment_copy(fragment):
    lines = [
        f".reg .{a.type} {a.register}; ld.param.{a.type} {a.register}, [block];" for a in fragment.arguments
    ]
    return "\n".join(["{", *lines, fragment.ptx, "}\n"])


def test_a_large_host_program_is_one_function():
    """The agent calls the first byte of its code."""
    rng = random.Random(1)
    code = [load(3, 1, 8), load(4, 1, 16), *lookup("out"), mov(9, 0), load(3, 9, 0), load(4, 9, 8)]
    for _ in range(1900):
        code += [alu(b.MUL, 3, imm=rng.getrandbits(30) | 1), alu(rng.choice((b.ADD, b.XOR, b.SUB)), 3, 4)]
    out = MapDefinition("out", "shared_array", 4, 64, 1)
    made, function = program([*code, store(9, 0, 3), *END], (out,), "operation")
    native = host_code.lower(made, function)
    assert len(native.code) > 10_000


def test_what_a_record_costs(tmp_path):
    """An exit program that puts 40 bytes with both clocks into a ring: registers, and instructions, at each way out."""
    ring = MapDefinition("ring", "ringbuf", 0, 40, 1 << 20)
    code = [
        mov(6, 1),
        call(605),
        store(10, -40, 0),
        call(502),
        store(10, -32, 0),
        load(3, 6, 0),
        store(10, -24, 3),
    ]
    code += [call(606), store(10, -16, 0), call(604), store(10, -8, 0, 4), load(3, 6, 8), store(10, -4, 3, 4)]
    code += [*load_map(1, "ring"), mov(2, 10), alu(b.ADD, 2, imm=-40), movi(3, 40), movi(4, 0), call(130)]
    made, function = program([*code, movi(0, 0), leave()], (ring,))
    fragment, used = assembled(made, function)
    instructions = sass(cubin_of(kernel_with(fragment), "sm_90", tmp_path)[0])["k"]
    assert used <= 32
    assert len([line for line in instructions if not line.startswith(".L")]) <= 150
    assert sum("ATOM" in line for line in instructions) == 1


def test_the_number_of_a_launch_in_a_graph():
    """It is counted from the number of the first kernel of the replay, which lies in GPU memory."""
    code = [
        mov(6, 1),
        *lookup("out"),
        load(1, 6, 0),
        store(0, 0, 1),
        load(1, 6, 4, 4),
        store(0, 8, 1),
        movi(0, 0),
        leave(),
    ]
    made, function = program(code)
    native = Native(made, function)
    memory, cell = ctypes.create_string_buffer(256), ctypes.c_uint64(7 << 40 | 100)
    for launch, replay, expected in (
        (7 << 40 | 5, 0, 7 << 40 | 5),
        (3, ctypes.addressof(cell), 7 << 40 | 103),
    ):
        native(launch=launch, replay=replay, map_out=ctypes.addressof(memory))
        assert memory.raw[:8] == expected.to_bytes(8, "little")
        assert memory.raw[8:12] == (expected >> 32).to_bytes(4, "little")


def test_parts_of_arguments():
    """Only a half, or a byte, of what is given in a register of 64 bits."""
    for offset, size in ((16, 4), (20, 4), (16, 1), (23, 1), (18, 2)):
        code = [mov(6, 1), *lookup("out"), load(1, 6, offset, size), store(0, 0, 1), movi(0, 0), leave()]
        made, function = program(code)
        fragment, _ = assembled(made, function)
        assert {a.name for a in fragment.arguments} == {"work", "map_out"}
        memory = ctypes.create_string_buffer(256)
        Native(made, function)(work=0x1122334455667788, map_out=ctypes.addressof(memory))
        shifted = 0x1122334455667788 >> 8 * (offset - 16) & (1 << 8 * size) - 1
        assert int.from_bytes(memory.raw[:8], "little") == shifted


def test_sizes_of_memory_instructions_are_kept():
    """One load of each size stays one, of that size."""
    for size in SIZES:
        made, function = program(frame([load(1, 9, 64, size)]))
        fragment = nvptx.lower(made, check(made, function))
        assert re.search(rf"ld\.global\.b{8 * size}", fragment.ptx) or size == 8
    assert OUT.value_size == 256

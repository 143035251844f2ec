"""Injection: properties of the PTX and of the SASS that ptxas makes of it, and counts compared with an interpreter's."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import pytest

from gpubpf.ebpf.bytecode import DEVICE_POINTS, WORK
from gpubpf.ebpf.probe import Probe
from gpubpf.inject.exits import MAX_EXIT_COPIES
from gpubpf.inject.inject import inject
from gpubpf.inject.injected import Injected
from gpubpf.inject.values import PtxProbe
from gpubpf.lower.launch_block import LaunchBlock, launch_block
from gpubpf.ptx.flow import LEAVING
from gpubpf.ptx.module import Module, PtxInstruction, render
from gpubpf.ptx.parser import parse
from gpubpf.ptx.symbols import TABLE
from gpubpf_fragments import TIME, Argument, Fragment, log, tally
from gpubpf_sass import assembled, need, registers, sass
from ptxrun import Memory, Thread, place_variables

HERE = Path(__file__).parent
HEAD = ".version 8.3\n.target sm_75\n.address_size 64\n"


TALLY = tally()
BASE, ROOM, _ = TALLY.arguments

OPTIONS = {
    "sm_75": ["-arch=sm_75"],
    "sm_90 lineinfo": ["-arch=sm_90", "-lineinfo"],
    "sm_75 debug": ["-arch=sm_75", "-G"],
    "sm_80 rdc": ["-arch=sm_80", "-rdc=true"],
}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Module]:
    """corpus.cu, compiled in several ways."""
    folder = tmp_path_factory.mktemp("corpus")
    nvcc = need("nvcc")
    running = {
        name: subprocess.Popen(
            [nvcc, "-ptx", *options, str(HERE / "corpus.cu"), "-o", str(folder / f"{name}.ptx")]
        )
        for name, options in OPTIONS.items()
    }
    assert [p.wait() for p in running.values()] == [0] * len(running)
    return {name: parse((folder / f"{name}.ptx").read_text()) for name in OPTIONS}


@pytest.fixture(scope="session")
def edges() -> Module:
    return parse((HERE / "edges.ptx").read_text())


def everywhere(module: Module, *probes: PtxProbe) -> Injected:
    return inject(module, dict.fromkeys(module.entries, probes))


def statements(text: str, kernel: str) -> list[object]:
    return list(parse(text).functions[kernel].body or ())


# --- acceptance by ptxas ----------------------------------------------------------------------------


@pytest.mark.every(10)
@pytest.mark.parametrize("variant", OPTIONS)
@pytest.mark.parametrize("work", ["instructions", "loads"])
def test_ptxas_accepts_the_corpus(corpus: dict[str, Module], variant: str, work: str, tmp_path: Path) -> None:
    module = corpus[variant]
    probes = (Probe(TALLY, "exit", work), Probe(TIME, "entry"), Probe(TIME, "exit"))
    if work == "loads":  # once with programs at every point
        probes += tuple(Probe(log(point, point), point) for point in DEVICE_POINTS)
    injected = everywhere(module, *probes)
    reasons = {
        "takesAddress": "indirect call; keepsAddress passes on the address of fibonacci",
        "keepsAddress": "takes the address of ",
    }
    refused = {n: reason for n in module.entries for word, reason in reasons.items() if word in n}
    assert all(injected.refusals[n].startswith(reason) for n, reason in refused.items()), injected.refusals
    assert set(injected.kernels) == set(module.entries) - set(injected.refusals)
    assert set(injected.refusals) == set(refused)
    options = ["-lineinfo"] if "lineinfo" in variant else []
    for arch in {variant.split()[0]} | ({"sm_90"} if work == "instructions" else set()):
        _, report = assembled(injected.text, arch, tmp_path, *options)
        used = registers(report)
        assert set(used) == set(injected.kernels)
    assert ".func" in injected.text and "takesAddress" not in injected.text
    assert not any(kernel.unknown for kernel in injected.kernels.values())


def test_the_probe_is_cheap(corpus: dict[str, Module], tmp_path: Path) -> None:
    module = corpus["sm_90 lineinfo"]
    _, before = assembled(render(module), "sm_90", tmp_path)
    _, after = assembled(everywhere(module, Probe(TALLY, "exit", "stores")).text, "sm_90", tmp_path)
    old, new = registers(before), registers(after)
    assert all(new[name] - old[name] <= 8 for name in new), {n: (old[n], new[n]) for n in new}


def test_edges_are_accepted(edges: Module, tmp_path: Path) -> None:
    points = [Probe(log(point, point), point) for point in DEVICE_POINTS]
    for work in WORK:
        injected = everywhere(edges, Probe(TALLY, "exit", work), Probe(TIME, "exit"), *points)
        assert not injected.refusals
        for arch in ("sm_75", "sm_90"):
            assembled(injected.text, arch, tmp_path)


# --- the ways out -----------------------------------------------------------------------------------


def test_every_exit_has_a_probe_of_its_own(corpus: dict[str, Module], edges: Module) -> None:
    """No ret or exit of a kernel without a probe since the last label or the start, and no site twice."""
    for module in (*corpus.values(), edges):
        injected = everywhere(module, Probe(TIME, "exit"))
        for name, kernel in injected.kernels.items():
            seen: list[str] = []
            probed = False
            for statement in statements(injected.text, name):
                if not isinstance(statement, PtxInstruction):
                    continue
                if statement.opcode == "mov" and str(statement.operands[0]) == "%gpubpf_site":
                    seen.append(str(statement.operands[1]))
                    probed = True
                if statement.opcode in LEAVING:
                    assert probed, f"{name}: line {statement.line}"
                    probed = False
            assert len(seen) == len(set(seen))
            assert set(map(int, seen)) <= {site.number for site in kernel.sites}
            assert kernel.shared_exits == 0


def test_lanes_do_not_wait_in_front_of_a_probe(corpus: dict[str, Module], tmp_path: Path) -> None:
    """The clock is read once before each EXIT, and there is no BSYNC before it that the original lacks."""
    for variant, arch in (("sm_75", "sm_75"), ("sm_90 lineinfo", "sm_90")):
        module = corpus[variant]
        original = sass(assembled(render(module), arch, tmp_path)[0])
        injected = everywhere(module, Probe(TIME, "exit"))
        probed = sass(assembled(injected.text, arch, tmp_path)[0])
        for name in injected.kernels:
            if "leavesFromFunction" in name or "calls" in name:
                continue  # their functions are in the same section
            code = probed[name]
            waiting = False  # a BSYNC since the last jump or exit
            new = sum("BSYNC" in c for c in code) > sum("BSYNC" in c for c in original[name])
            for line in code:
                if re.search(r"\b(EXIT|BRA|BRX)\b", line):
                    waiting = False
                elif "BSYNC" in line:
                    waiting = True
                assert not (new and waiting and "GLOBALTIMER" in line), f"{arch} {name}"
            assert sum("GLOBALTIMER" in c for c in code) >= sum("EXIT" in c for c in code), f"{arch} {name}"
        lanes = next(n for n in injected.kernels if "lane31" in n)
        assert sum("EXIT" in c for c in probed[lanes]) == sum("EXIT" in c for c in original[lanes]) == 5
        assert not any("BSYNC" in c for c in probed[lanes])
        strided = next(n for n in injected.kernels if "gridStride" in n)
        assert not any("BSYNC" in c for c in original[strided])


def test_many_branches_to_one_return_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(f"setp.eq.u32 %p1, %r1, {i}; @%p1 bra out;\n" for i in range(500))
    text = (
        f"{HEAD}.visible .entry k(.param .u32 n) {{ .reg .pred %p<3>; .reg .b32 %r<3>; {lines} out: ret; }}"
    )
    injected = everywhere(parse(text), Probe(TIME, "exit"))
    kernel = injected.kernels["k"]
    assert len(kernel.sites) == MAX_EXIT_COPIES + 1
    assert kernel.shared_exits == 500 - MAX_EXIT_COPIES


@pytest.mark.parametrize(
    "toolkit",
    [
        "/usr/local/cuda-13.0/bin/../targets/x86_64-linux/include",
        "/x/site-packages/nvidia/cu13/bin/..//include",
        "/opt/cuda/include",
    ],
)
def test_sites_are_where_the_source_leaves(toolkit: str) -> None:
    """At the branch, where several lead to one return; in an inlined function, where it is in one, unless the toolkit has it; never
    line 0."""
    text = f"""{HEAD}
.visible .entry k(.param .u32 n) {{
    .reg .pred %p<6>; .reg .b32 %r<3>;
    .loc 1 4 3
    @%p1 bra out;
    .loc 2 9 1
    .loc 1 0 3
    @%p2 bra out;
    .loc 1 6 1, function_name $L__info_string0, inlined_at 2 30 5
    @%p3 exit;
    .loc 2 12 1
    .loc 3 5 1, function_name $L__info_string1, inlined_at 2 12 1
    .loc 3 70 1, function_name $L__info_string2, inlined_at 3 5 1
    @%p4 exit;
turn:
    .loc 1 8 1
    @%p4 bra out;
    @%p5 bra turn;
    @%p1 bra out;
    .loc 7 21 1
    bra last;
out:
    .loc 1 20 1
    ret;
last:
    .loc 1 22 1
    ret;
}}
.file 1 "/src/a b.cu"
.file 2 "c.cuh", 1700000000, 1234
.file 3 "{toolkit}/device_atomic_functions.hpp"
"""
    lines = text.splitlines()
    injected = everywhere(parse(text), Probe(TIME, "exit"))
    found = {(lines[s.line - 1].strip(), s.source, s.source_line) for s in injected.kernels["k"].sites}
    assert found == {
        ("@%p1 bra out;", "/src/a b.cu", 4),
        ("@%p2 bra out;", "c.cuh", 9),
        ("@%p3 exit;", "/src/a b.cu", 6),
        ("@%p4 exit;", "c.cuh", 12),
        ("@%p4 bra out;", "/src/a b.cu", 8),
        ("@%p1 bra out;", "/src/a b.cu", 8),
        ("bra last;", "", 0),  # of a file without a name
    }
    assert {s.function for s in injected.kernels["k"].sites} == {"k"}


def test_a_kernel_without_instructions_has_one_way_out() -> None:
    injected = everywhere(parse(f"{HEAD}.visible .entry k() {{ }}"), Probe(TIME, "exit"))
    assert not injected.refusals and len(injected.kernels["k"].sites) == 1


def test_trap_is_no_exit() -> None:
    text = f"{HEAD}.visible .entry k() {{ .reg .pred %p<2>; @%p1 trap; ret; }}"
    assert len(everywhere(parse(text), Probe(TIME, "exit")).kernels["k"].sites) == 1


# --- counts, by execution ---------------------------------------------------------------------------

THREADS = 3


def run(
    module: Module, memory: Memory, kernel: str, variables: dict[str, int], parameters: bytes
) -> list[dict[str, int]]:
    found = []
    for index in range(THREADS):
        special = {"%tid.x": index, "%tid.y": 0, "%ctaid.x": 0, "%ntid.x": 4, "%nctaid.x": 1}
        thread = Thread(module, memory, variables, special)
        thread.run(kernel, parameters)
        found.append({kind: thread.work[kind] for kind in WORK})
    return found


def compare(module: Module, kernel: str, number: int) -> None:
    """Run a kernel (pointer, int) with and without probes: same effects, one run, and the counts of the interpreter."""
    memory = Memory()
    variables = place_variables(module, memory)
    buffer = memory.allocate(4096)
    for k in range(1024):
        memory.write(buffer + 4 * k, 4, k * 7 % 50)
    before, top = dict(memory.bytes), memory.top
    parameters = struct.pack("<Qi", buffer, number)
    expected = run(module, memory, kernel, variables, parameters)
    for kind in WORK:
        injected = inject(module, {kernel: [Probe(TALLY, "exit", kind)]})
        assert not injected.refusals
        copy = parse(injected.text)
        other = Memory()
        other.bytes, other.top = dict(before), top
        mine = place_variables(copy, other)
        for variable in injected.variables:
            assert variable.entry is None
            other.write(mine[TABLE] + 8 * variable.index, 8, variables[variable.name])
        tallies = other.allocate(4096)
        layout = injected.kernels[kernel]
        block = bytearray(layout.block.size)
        struct.pack_into("<Q", block, layout.block.bases["tallies"], tallies)
        struct.pack_into("<Q", block, layout.block.capacities["tallies"], THREADS)
        run(copy, other, kernel, mine, parameters.ljust(layout.block_offset, b"\0") + bytes(block))
        counts = [other.words(tallies + 16 * t, 2, 8) for t in range(THREADS)]
        assert counts == [[1, work[kind]] for work in expected], f"{kernel}({number}) {kind}"
        assert other.words(buffer, 1024) == memory.words(buffer, 1024)
        for variable in module.variables.values():
            if variable.space == "global":
                place = variables[variable.name], variable.size, 1
                assert other.words(*place) == memory.words(*place), variable.name


@pytest.mark.parametrize("kernel", ["predicated", "calls", "indexed", "loops", "variables"])
@pytest.mark.parametrize("number", range(6))
def test_counts_of_edges(edges: Module, kernel: str, number: int) -> None:
    compare(edges, kernel, number)


@pytest.mark.every(2)
@pytest.mark.parametrize("variant", ["sm_75", "sm_75 debug"])
@pytest.mark.parametrize(
    ("kernel", "numbers"),
    [
        ("calls", (0, 2, 5)),
        ("leavesFromFunction", (0, 2, 5)),
        ("manyReturns", (3, 40)),
        ("earlyReturnThenBarrier", (2,)),
    ],
)
def test_counts_of_compiled_kernels(
    corpus: dict[str, Module], variant: str, kernel: str, numbers: tuple[int, ...]
) -> None:
    module = corpus[variant]
    name = next(n for n in module.entries if re.fullmatch(rf"_Z\d+{kernel}Pii", n))
    for number in numbers:
        compare(module, name, number)


def test_counts_by_hand() -> None:
    """vectorAdd's shape: 2 ways, 9 and 17 instructions, 2 loads and a store on the longer one."""
    text = f"""{HEAD}.visible .entry k(.param .u64 p, .param .u32 n) {{
        .reg .pred %p<2>; .reg .b32 %r<6>; .reg .b64 %rd<4>;
        ld.param.u64 %rd1, [p]; ld.param.u32 %r1, [n]; mov.u32 %r2, %tid.x; setp.ge.s32 %p1, %r2, %r1; @%p1 bra out;
        mul.wide.s32 %rd2, %r2, 4; add.s64 %rd3, %rd1, %rd2; ld.global.u32 %r3, [%rd3]; st.global.u32 [%rd3], %r3;
        out: ret; }}"""
    module = parse(text)
    memory = Memory()
    done = run(module, memory, "k", {}, struct.pack("<Qi", memory.allocate(64), 2))
    assert [work["instructions"] for work in done] == [10, 10, 6]
    assert [work["loads"] for work in done] == [1, 1, 0]
    assert [work["blocks"] for work in done] == [3, 3, 2]
    compare(module, "k", 2)


def test_straight_line_code_is_counted_with_one_add() -> None:
    text = (
        f"{HEAD}.visible .entry k(.param .u64 p) {{ .reg .b64 %rd<3>; {'add.u64 %rd1, %rd1, 1;' * 50} ret; }}"
    )
    injected = everywhere(parse(text), Probe(TALLY, "exit", "instructions"))
    adds = re.findall(r"add\.s64 (\S+), \1, (\d+);", injected.text)
    assert [amount for _, amount in adds] == ["51"]
    injected = everywhere(parse(text), Probe(TALLY, "exit", "loads"))
    assert not re.findall(r"add\.s64 (\S+), \1, (\d+);", injected.text)


def test_a_pragma_stays_with_its_load(tmp_path: Path) -> None:
    text = f"""{HEAD}.global .align 16 .b8 t[64];
.visible .entry k(.param .u64 p) {{ .reg .b32 %r<6>; .reg .pred %p<2>; .reg .b64 %rd<2>;
setp.eq.u64 %p1, %rd1, 5; bra next; next: .pragma "used_bytes_mask 0xfff";
@%p1 ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [t]; st.global.u32 [%rd1], %r1; ret; }}"""
    injected = everywhere(parse(text), Probe(TALLY, "exit", "loads"))
    lines = injected.text.splitlines()
    at = next(i for i, line in enumerate(lines) if "used_bytes_mask" in line)
    assert "ld.global.v4" in lines[at + 1] and lines[at - 2].strip() == "//gpubpf}"
    assert "ld.const" in lines[at - 3] and "@%p1 add" in lines[at - 4]
    assembled(injected.text, "sm_75", tmp_path)


# --- the launch block -------------------------------------------------------------------------------


@pytest.mark.parametrize("point, often", [("access", True), ("exit", False)])
def test_the_values_of_a_multiprocessor_are_found_once(point: str, often: bool, tmp_path: Path) -> None:
    """Where the kernel and the called function begin, for points that a thread passes many times; else at the place."""
    shard = Argument("mine", "b64", "shard", "cells", width=24)
    count = Fragment("count", "{ red.global.add.u64 [%gpubpf_mine], 1; }", (shard,))
    text = f"""{HEAD}.func f() {{ .reg .b64 %rd<2>; mov.u64 %rd1, 64; st.global.u32 [%rd1], 1; st.global.u32 [%rd1], 2; ret; }}
    .visible .entry k(.param .u64 a) {{ .reg .b64 %rd<2>; ld.param.u64 %rd1, [a];
    st.global.u32 [%rd1], 1; st.global.u32 [%rd1+4], 2; st.global.u32 [%rd1+8], 3; call f; ret; }}"""
    injected = inject(parse(text), {"k": [Probe(count, point)]})
    block = injected.kernels["k"].block
    assert (block.bases, block.capacities) == ({"cells": 16}, {"cells": 24})
    assert injected.text.count("red.global.add.u64") == (5 if often else 1)
    assert injected.text.count("%smid") == (2 if often else 1)
    assert "mul.wide.u32 %gpubpf_0offset, %gpubpf_0number, 24;" in injected.text
    assembled(injected.text, "sm_75", tmp_path)


def test_launch_block_layout() -> None:
    params = Argument("filter", "b32", "param", "filter", offset=12, width=4)
    wider = Argument("more", "b64", "param", "filter", offset=16, width=8)
    block = launch_block(
        [
            Fragment("program", "{}", (BASE, ROOM, params)),
            Fragment("program", "{}", (Argument("t", "b64", "map_base", "t"), wider)),
        ]
    )
    assert block == LaunchBlock(64, 0, 8, {"tallies": 16, "t": 32}, {"tallies": 24}, {"filter": (40, 24)})


def test_the_first_thread_of_a_grid_counts_its_executions(tmp_path: Path) -> None:
    """Only if the launch block has a counter, and not if a program reads the launch's number."""
    module = parse(f"{HEAD}.visible .entry k() {{ ret; }}")
    nothing = Fragment("nothing", "{ }", ())
    injected = inject(module, {"k": [Probe(nothing, "exit")]}, counts_executions=True)
    block = injected.kernels["k"].block
    assert (block.size, block.executions) == (24, 16)
    memory = Memory()
    counter = memory.allocate(8)
    for tid, at in (((0, 0), counter), ((1, 0), counter), ((0, 1), counter), ((0, 0), 0), ((0, 0), counter)):
        special = {f"%{of}.{axis}": 0 for of in ("tid", "ctaid") for axis in "xyz"}
        special |= {"%tid.x": tid[0], "%ctaid.z": tid[1]}
        Thread(parse(injected.text), memory, {}, special).run("k", struct.pack("<3Q", 7, 0, at))
    assert memory.words(counter, 1, 8) == [2]
    assembled(injected.text, "sm_75", tmp_path)
    reads = Fragment("reads", "{ }", (Argument("launch", "b64", "launch", ""),))
    kernel = inject(module, {"k": [Probe(reads, "exit")]}, counts_executions=True).kernels["k"]
    assert kernel.block.executions is None


@pytest.mark.parametrize(
    ("body", "may_hang"),
    [
        ("ret;", False),
        (".reg .pred %p; setp.ne.b32 %p, %r1, 0; @%p bra over; add.s32 %r1, %r1, 1; over: ret;", False),
        ("again: bra again;", True),
        ("bar.sync 0; ret;", True),
        ("call waits; ret;", True),
        ("griddepcontrol.wait; ret;", True),
    ],
)
def test_programs_only_where_a_kernel_may_hang(body: str, may_hang: bool) -> None:
    function = ".func waits { again: bra again; }\n"
    module = parse(f"{HEAD}{function}.entry k () {{ .reg .b32 %r1; {body} }}\n")
    for loops, expected in (("all", may_hang), ("", True)):
        kernel = inject(module, {"k": [Probe(TALLY, "entry", loops=loops)]}).kernels["k"]
        assert bool(kernel.sites) == expected


def test_fragments_find_the_launch_in_the_block() -> None:
    store = "{ .reg .b64 %rd<2>; mov.b64 %rd1, %gpubpf_out; st.u64 [%rd1], %gpubpf_launch; st.u64 [%rd1+8], %gpubpf_replay; }"
    kinds = (("launch", ""), ("replay", ""), ("out", "out"))
    arguments = tuple(Argument(name, "b64", "map_base" if on else name, on) for name, on in kinds)
    injected = inject(
        parse(f"{HEAD}.visible .entry k() {{ ret; }}"),
        {"k": [Probe(Fragment("ids", store, arguments), "exit")]},
    )
    block = injected.kernels["k"].block
    assert (block.size, block.launch_id, block.replay, block.bases) == (24, 0, 8, {"out": 16})
    memory = Memory()
    out = memory.allocate(16)
    Thread(parse(injected.text), memory, {}, {}).run("k", struct.pack("<3Q", 7 << 40 | 5, 1234, out))
    assert memory.words(out, 2, 8) == [7 << 40 | 5, 1234]


def test_the_block_follows_the_application_parameters() -> None:
    text = f"""{HEAD}.visible .entry k(.param .u8 a, .param .u64 .ptr .global .align 16 b, .param .align 16 .b8 c[20], .param .u16 d)
        {{ ret; }}"""
    kernel = everywhere(parse(text), Probe(TALLY, "exit")).kernels["k"]
    assert kernel.parameters == ((0, 1), (8, 8), (16, 20), (36, 2))
    assert kernel.block_offset == 40


def test_parameters_too_large() -> None:
    text = "{}.visible .entry k(.param .align 8 .b8 big[4344]) {{ ret; }}"
    old = text.format(".version 8.0\n.target sm_75\n.address_size 64\n")
    assert everywhere(parse(old), Probe(TALLY, "exit")).refusals == {"k": "parameters too large"}
    assert not everywhere(parse(text.format(HEAD)), Probe(TALLY, "exit")).refusals


# --- variables and refusals -------------------------------------------------------------------------


def test_variables_are_reached_through_the_table(corpus: dict[str, Module]) -> None:
    module = corpus["sm_75"]
    injected = everywhere(module, Probe(TALLY, "exit"))
    by_name = {v.name: v for v in injected.variables if v.entry is None}
    copy = parse(injected.text)
    assert [v.index for v in injected.variables] == list(range(len(injected.variables)))
    assert f".visible .const .align 8 .b64 {TABLE}[{len(injected.variables)}];" in injected.text
    entries = {(v.name, v.entry, v.fixed) for v in injected.variables if v.entry is not None}
    assert entries == {("_ZTV4Line", 16, True), ("_ZTV6Square", 16, True), ("chosen", 0, False)}
    for name in (
        "counter",
        "weights",
        "squares",
        "managed_flag",
        "particles",
        "pointer_to_counter",
        "message",
    ):
        assert not by_name[name].copied
        assert name not in copy.variables
    assert by_name["weights"].space == "const" and by_name["weights"].size == 64
    copied = {name for name, v in by_name.items() if v.copied}
    assert "_ZZ10localTablePiiE5table" in copied and "_ZZ9variablesPiE12calls_so_far" not in copied
    assert any(name.startswith("$str") for name in copied)
    for name in copied:
        assert copy.variables[name].initializer == module.variables[name].initializer
        assert copy.variables[name].linkage == ("visible",)
    assert "ld.const.f32" not in injected.text and "ld.global.nc.f32" in injected.text


def test_static_variables_that_the_host_may_write_are_not_copied(corpus: dict[str, Module]) -> None:
    injected = everywhere(corpus["sm_80 rdc"], Probe(TALLY, "exit"))
    found = [v for v in injected.variables if "private_scale" in v.name]
    assert found and not found[0].copied


def test_a_table_of_literals_is_copied_with_them(tmp_path: Path) -> None:
    text = f"""{HEAD}.global .align 1 .b8 $str[2] = {{97}};
.global .align 8 .u64 _ZZ1kE5names[2] = {{generic($str), 0}};
.global .align 4 .u32 _ZZ1kE4seen[1] = {{7}};
.visible .entry k(.param .u64 p) {{ .reg .b32 %r<4>; .reg .b64 %rd<5>;
ld.param.u64 %rd1, [p]; mov.u64 %rd2, _ZZ1kE5names; ld.global.u64 %rd3, [%rd2]; ld.u8 %r1, [%rd3];
mov.u64 %rd4, _ZZ1kE4seen; st.global.u64 [%rd1], %rd4; ret; }}"""
    injected = everywhere(parse(text), Probe(TALLY, "exit"))
    assert {v.name: v.copied for v in injected.variables} == {"_ZZ1kE5names": True, "_ZZ1kE4seen": False}
    assert set(parse(injected.text).variables) == {TABLE, "$str", "_ZZ1kE5names"}
    assembled(injected.text, "sm_75", tmp_path)


@pytest.mark.parametrize("point", ["exit", "function_entry"])
def test_an_alias_is_called_by_the_name_of_its_function(point: str, tmp_path: Path) -> None:
    """With work alone, the function keeps its name; with a program in it, it gets another."""
    text = f"""{HEAD}.visible .func (.param .b32 r) one(.param .b32 x);
.visible .func (.param .b32 r) other(.param .b32 x);
.visible .func (.param .b32 r) one(.param .b32 x) {{ .reg .b32 %r<2>; ld.param.b32 %r1, [x]; st.param.b32 [r], %r1; ret; }}
.alias other, one;
.visible .entry k(.param .u64 p) {{ .reg .b32 %r<2>; .reg .b64 %rd<2>; ld.param.u64 %rd1, [p]; ld.global.u32 %r1, [%rd1];
{{ .param .b32 y; .param .b32 q; st.param.b32 [y], %r1; call (q), other, (y); ld.param.b32 %r1, [q]; }}
st.global.u32 [%rd1], %r1; ret; }}"""
    injected = everywhere(parse(text), Probe(TALLY, "exit", "instructions"), Probe(TIME, point))
    assert not injected.refusals
    assembled(injected.text, "sm_75", tmp_path)


@pytest.mark.parametrize(
    ("before", "body", "reason"),
    [
        (".extern .func far(.param .b32 x);", "call far, (%r1);", "needs device linking: far"),
        (".func f() { ret; }", "mov.u64 %rd1, f; st.u64 [%rd2], %rd1;", "takes the address of f"),
        (
            ".func f() { ret; }\n.global .u64 v[1] = {f};",
            "ld.global.u64 %rd1, [v]; t: .callprototype ()_ (); call %rd1, (), t;",
            "indirect call; v has the address of f",
        ),
        (
            ".global .texref t;",
            "tex.1d.v4.f32.s32 {%r1, %r1, %r1, %r1}, [t, {%r1}];",
            "texture or surface reference t",
        ),
        ("", "isspacep.const %p1, %rd1;", "isspacep.const: constants are accessed in global memory here"),
        (
            "",
            ".reg .b64 %gpubpf_x;",
            "the name %gpubpf_x is reserved for gpubpf: this PTX is instrumented already",
        ),
        ("", ".global .u32 v;", "variable v is declared in a function"),
        ("", "{ .local .u64 p; ret; }", "variable p hides a parameter"),
        ("", ".reg .b32 %laneid;", "a variable has the name of the special register %laneid"),
        ("", "bra nowhere;", "PTX line 5: there is no label nowhere"),
        (
            ".func (.reg .b32 r) f(.reg .b32 x) { ret; }",
            "call (%r1), f, (%r1);",
            "function f takes its parameters in registers",
        ),
    ],
)
def test_refusals(before: str, body: str, reason: str) -> None:
    text = f"""{HEAD}{before}
.visible .entry k(.param .u64 p) {{ .reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %rd<4>; {body} ret; }}
.visible .entry fine() {{ ret; }}"""
    injected = everywhere(parse(text), Probe(TALLY, "exit", "instructions"))
    assert set(injected.kernels) == {"fine"}
    assert re.sub(r"line \d+", "line 5", injected.refusals["k"]) == reason
    assert ".entry k" not in injected.text


def test_ranges_of_registers_hide_names_of_the_module() -> None:
    """`.reg .b64 f<3>` declares `f1`, which is not the function then."""
    kernel = ".visible .entry {}() {{ .reg .b64 f<3>; {} ret; }}\n"
    text = HEAD + ".func f1() { ret; }\n.func g() { ret; }\n"
    text += kernel.format("moves", "mov.u64 f1, 7;") + kernel.format("takes", "mov.u64 f, 7;").replace(
        "<3>", ""
    )
    text += kernel.format("calls", "{ proto: .callprototype _ (); mov.u64 f1, g; call f1, proto; }")
    injected = everywhere(parse(text), Probe(TALLY, "exit", "instructions"))
    assert set(injected.kernels) == {"moves", "takes"}
    assert injected.refusals["calls"].startswith("indirect call")


def test_a_name_of_the_module_until_the_function_declares_it() -> None:
    """The copy reads the module's variable through its table, and the block's own variable by its name."""
    text = f"""{HEAD}.global .u32 v;
.visible .entry k() {{ .reg .b32 %r<3>;
    {{ ld.global.u32 %r1, [v]; .shared .u32 v; ld.shared.u32 %r2, [v]; }} ret; }}"""
    injected = everywhere(parse(text), Probe(TALLY, "exit", "instructions"))
    assert injected.refusals == {}
    assert [variable.name for variable in injected.variables] == ["v"]
    assert "ld.shared.u32 %r2, [v];" in injected.text
    assert "ld.global.u32 %r1, [v];" not in injected.text


NAMED = [
    # A label has the name of a variable, a function or the kernel.
    f"{{ {name}: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 3; @%p1 bra {name}; }}"
    for name in ("v", "f", "k")
] + [
    "{ v: .branchtargets A, B; brx.idx %r2, v; A: mov.u32 %r1, 5; bra C; B: mov.u32 %r1, 6; C: }",
    # The way to an exit passes a declaration: its names mean something else where the branch is.
    ".reg .u32 x; mov.u32 x, 7; { L: add.u32 %r1, %r1, 1; setp.gt.u32 %p1, %r1, 3; @%p1 bra E; bar.sync 0;"
    " add.u32 %r2, %r2, x; bra L; .reg .u64 x; E: mov.u64 x, 5; ret; }",
    "{ @%p1 bra A; @%p2 bra A; A: mov.u32 %r2, 0; bra E; .reg .u64 x; E: mov.u64 x, 5; ret; }",
    # %r12 is never a register of `%r1<9>`.
    ".reg .b64 %r1<9>; mov.u32 %r12, 5; st.global.u32 [%rd1], %r12;",
]


@pytest.mark.parametrize("body", NAMED)
def test_copies_of_code_with_confusing_names(body: str, tmp_path: Path) -> None:
    text = f"""{HEAD}.global .u32 v; .func f() {{ ret; }}
.visible .entry k(.param .u64 p) {{ .reg .pred %p<3>; .reg .b32 %r<20>; .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [p]; ld.global.v2.u32 {{%r1, %r2}}, [%rd1]; setp.eq.u32 %p1, %r1, 1; setp.eq.u32 %p2, %r1, 0;
    {body} ld.global.u32 %r3, [v]; call f; st.global.v4.u32 [%rd1], {{%r1, %r2, %r3, %r12}}; ret; }}"""
    assembled(text, "sm_90", tmp_path)
    injected = everywhere(parse(text), Probe(TALLY, "exit", "instructions"))
    assert injected.refusals == {}
    assembled(injected.text, "sm_90", tmp_path)


def test_what_is_instrumented_is_not_instrumented_again(edges: Module) -> None:
    once = everywhere(edges, Probe(TALLY, "exit"))
    twice = everywhere(parse(once.text), Probe(TALLY, "exit"))
    assert set(twice.refusals) == set(edges.entries)
    assert all("instrumented already" in reason for reason in twice.refusals.values())


def test_old_architectures_are_refused() -> None:
    text = ".version 6.0\n.target sm_60\n.address_size 64\n.visible .entry k() { ret; }"
    assert everywhere(parse(text), Probe(TALLY, "exit")).refusals == {"k": "PTX for sm_60, older than sm_70"}


def test_unknown_instructions_are_named(tmp_path: Path) -> None:
    text = f"{HEAD}.visible .entry k() {{ .reg .b32 %r<2>; frobnicate.wide.u32 %r1, 0; ret; }}"
    injected = everywhere(parse(text), Probe(TALLY, "exit", "instructions"))
    assert injected.kernels["k"].unknown == ("frobnicate.wide.u32",)


def test_functions_that_leave_are_made_for_each_set_of_probes(edges: Module, tmp_path: Path) -> None:
    text = f"""{HEAD}.func f(.param .u32 n) {{ exit; }}
.visible .entry a(.param .u32 n) {{ .param .b32 x; st.param.b32 [x], 1; call f, (x); ret; }}
.visible .entry b(.param .u32 n) {{ .param .b32 x; st.param.b32 [x], 1; call f, (x); ret; }}"""
    module = parse(text)
    injected = inject(module, {"a": [Probe(TIME, "exit")], "b": [Probe(TALLY, "exit", "blocks")]})
    assert {"f$gpubpf1", "f$gpubpf2"} <= set(parse(injected.text).functions)
    assembled(injected.text, "sm_75", tmp_path)

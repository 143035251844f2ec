"""What programs are told of values: by form of instruction, by ptxas, and by execution on the embedded device's engine."""

from __future__ import annotations

import importlib.util
import re
import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from engine_device import Array
from gpubpf.ebpf.bytecode import CONTEXTS, KINDS, RETURNS, TYPES
from gpubpf.ebpf.probe import Probe
from gpubpf.inject import plan
from gpubpf.inject.inject import inject
from gpubpf.inject.operands import operands, without_value
from gpubpf.inject.values import Site
from gpubpf.lower.fragment import Argument, Fragment
from gpubpf.ptx.access import accesses
from gpubpf.ptx.parser import parse
from gpubpf_fragments import log
from gpubpf_points import HEAD, Run
from gpubpf_sass import assembled, sass

_spec = importlib.util.spec_from_file_location("forms", Path(__file__).parents[1] / "ptx" / "test_access.py")
assert _spec is not None and _spec.loader is not None
_forms = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_forms)
FORMS, ROWS, module, parsed = _forms.FORMS, _forms.ROWS, _forms.module, _forms.parsed

VALUELESS = ("ldmatrix", "stmatrix", "wmma.load", "wmma.store", "st.bulk", "tcgen05.alloc")


@pytest.mark.parametrize("sm", FORMS)
def test_each_load_store_and_atomic_has_a_value_or_is_named(sm: str) -> None:
    for of, text, told in ROWS:
        if of != sm:
            continue
        instruction = parsed(sm, text)
        found, name = operands(instruction), without_value(instruction)
        if told.startswith("- "):
            assert (found, name) == (None, told[2:])
        elif text.startswith(VALUELESS):
            assert found is None and text.startswith(name) and name in VALUELESS
        elif not told or "async" in told.split():
            assert found is None and name is None
        else:
            (access,) = accesses(instruction)
            assert found is not None and name is None, text
            assert found.type in TYPES
            of_each = [items for items in (found.given, found.read) if items]
            assert all(len(items) * found.size == access.width for items in of_each if str(items[0]) != "_")
            assert bool(found.given) == (access.kind != "load") and bool(found.read) >= (
                access.kind == "load"
            )


@pytest.mark.parametrize(
    ("text", "type_", "size", "given", "read"),
    [
        ("ld.global.nc.v4.f32 {%f1, _, %f3, %f4}, [%rd1];", "f32", 4, "", "%f1 _ %f3 %f4"),
        ("ld.global.L2::cache_hint.s8 %h1, [%rd1], %rd9;", "s8", 1, "", "%h1"),
        ("st.shared.v2.b64 [%r1], {%rd1, 7};", "b64", 8, "%rd1 7", ""),
        ("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r1], %r2, [%r3];", "u32", 4, "%r2", ""),
        ("atom.global.add.noftz.f16x2 %r1, [%rd1], %r2;", "f16", 4, "%r2", "%r1"),
        ("atom.global.cas.b64 %rd1, [%rd2], %rd3, %rd4;", "b64", 8, "%rd4", "%rd1"),
        ("atom.global.add.L2::cache_hint.u32 %r1, [%rd1], %r2, %rd9;", "u32", 4, "%r2", "%r1"),
        ("atom.global.v2.f32.add {%f1, %f2}, [%rd1], {%f3, %f4};", "f32", 4, "%f3 %f4", "%f1 %f2"),
        ("red.global.add.noftz.bf16x2 [%rd1], %r1;", "bf16", 4, "%r1", ""),
        ("red.global.max.s64 [%rd1], -5;", "s64", 8, "-5", ""),
        ("multimem.ld_reduce.global.add.acc::f32.v2.bf16x2 {%r1, %r2}, [%rd1];", "bf16", 4, "", "%r1 %r2"),
        ("multimem.ld_reduce.global.min.e5m2x4 %r1, [%rd1];", "b8", 4, "", "%r1"),
    ],
)
def test_operands(text: str, type_: str, size: int, given: str, read: str) -> None:
    found = operands(parsed("sm_100a", text))
    assert found is not None and (found.type, found.size) == (type_, size)
    assert [" ".join(map(str, items)) for items in (found.given, found.read)] == [given, read]


@pytest.mark.parametrize(
    "text",
    [
        "st.global.u32 [%rd1];",
        "st.global.u32 [%rd1], [%rd2];",
        "st.global.v2.u32 [%rd1], {%r1, {%r2, %r3}};",
        "ld.global.u32 [%rd1];",
        "ld.global.u32 %r1, %r2, [%rd1];",
        "atom.global.cas.b32 %r1, [%rd1], 1;",
        "st.global.b128 [%rd1], 0;",
    ],
)
def test_what_is_not_understood_is_named(text: str) -> None:
    instruction = parsed("sm_100a", text)
    assert operands(instruction) is None and without_value(instruction) == text.split()[0]


# --- assembled ----------------------------------------------------------------------------------------

# Adds all that it is told to a word: nothing of it can be left out.
TOLD = [field for field in CONTEXTS["value"] if field != "launch"]
SUM = Fragment(
    "sum",
    "{ .reg .b64 %rd<4>; mov.b64 %rd1, 0;"
    + " ".join(f"mad.lo.u64 %rd1, %rd1, 31, %gpubpf_{field};" for field in TOLD)
    + " red.global.add.u64 [%gpubpf_sums], %rd1; }",
    (
        Argument("sums", "b64", "map_base", "sums"),
        *(Argument(field, "b64", "context", field=field) for field in TOLD),
    ),
)
COUNT = Fragment(
    "count",
    "{ red.global.add.u32 [%gpubpf_sums], %gpubpf_type; }",
    (Argument("sums", "b64", "map_base", "sums"), Argument("type", "b32", "context", field="type")),
)


@pytest.mark.parametrize("sm", FORMS)
def test_ptxas_takes_a_program_at_every_form(sm: str, tmp_path: Path) -> None:
    rows = [
        (text, told) for of, text, told in ROWS if of == sm and not re.search(r"\[(picture|surface)\b", text)
    ]
    injected = inject(parse(module(sm, "\n".join(text for text, _ in rows))), {"k": [Probe(SUM, "value")]})
    assert not injected.refusals
    valued = [text for text, _ in rows if operands(parsed(sm, text)) is not None]
    kernel = injected.kernels["k"]
    assert [site.opcode for site in kernel.sites] == [text.split()[0] for text in valued]
    named = Counter(without_value(parsed(sm, text)) for text, _ in rows)
    assert kernel.unprobed == {name: n for name, n in named.items() if name is not None}
    assembled(injected.text, sm, tmp_path, "-O0")


LITERALS = """
st.global.b32 [%rd1], 0f3F800000; st.global.f32 [%rd1], 0d3FF0000000000000; st.global.f32 [%rd1], 1.5;
st.global.f64 [%rd1], 0d3FF0000000000000; st.global.u8 [%rd1], 70000; st.global.v2.f32 [%rd1], {0f00000000, %f1};
st.global.v4.u8 [%rd1], {1, 2, %r1, %h1}; st.global.u16 [%rd1], %rd2; st.global.u64 [%rd1], table+8; st.global.b32 [%rd1], %f1;
st.global.u8 [%rd1], %c1; ld.global.s8 %c1, [%rd1]; ld.global.u16 %rd3, [%rd1]; st.global.b16 [%rd1], %e1;
"""


@pytest.mark.parametrize("sm", ["sm_75", "sm_80", "sm_90"])
def test_ptxas_takes_registers_and_numbers_of_every_kind(sm: str, tmp_path: Path) -> None:
    text = module(sm, ".reg .u8 %c<2>; .reg .f16 %e<2>;" + LITERALS)
    injected = inject(parse(text), {"k": [Probe(SUM, "value")]})
    assert len(injected.kernels["k"].sites) == LITERALS.count(";") and not injected.kernels["k"].unprobed
    assembled(injected.text, sm, tmp_path)


VECTORS = """
.reg .v2.u16 %a; .reg .v4.u32 %b<2>; .reg .v4.f32 %e<3>; .reg .v2.b64 %g; .reg .v4.u8 %i;
ld.global.v2.u16 %a, [%rd1]; ld.global.v4.u32 %b0, [%rd1]; st.global.v4.u32 [%rd1], %b1; ld.global.v2.b64 %g, [%rd1];
ld.global.v4.u8 %i, [%rd1]; ld.global.v4.u8 %b0, [%rd1]; st.global.v4.f32 [%rd1], %e1; st.global.v2.b32 [%rd1], {%b0.x, %b0.g};
atom.global.add.v2.f32 {%e0.x, %e0.z}, [%rd1], {%e1.x, %e1.w}; red.global.add.v4.f32 [%rd1], %e2; st.global.f32 [%rd1], %e0.b;
"""


def test_ptxas_takes_registers_of_vectors(tmp_path: Path) -> None:
    """ptxas takes the name of such a register only where it expects a vector."""
    text = module("sm_90", VECTORS)
    injected = inject(parse(text), {"k": [Probe(SUM, "value")]})
    sites = injected.kernels["k"].sites
    assert len(sites) == VECTORS.count("[") and not injected.kernels["k"].unprobed
    (atomic,) = (site for site in sites if site.opcode.startswith("atom"))
    assert atomic.effect & RETURNS  # a later instruction reads an element by its other name
    assembled(injected.text, "sm_90", tmp_path)


def test_an_unused_result_stays_unused(tmp_path: Path) -> None:
    """Otherwise, ptxas could not make a reduction of the atomic, which the GPU does without waiting for the answer."""
    text = module(
        "sm_90a",
        "ld.param.u64 %rd1, [a]; atom.global.add.u32 %r1, [%rd1], 5; atom.global.max.u32 _, [%rd1+4], 5;",
    )
    injected = inject(parse(text), {"k": [Probe(SUM, "value")]})
    cubin, _ = assembled(injected.text, "sm_90a", tmp_path)
    names = [name for line in sass(cubin)["k"] for name in re.findall(r"\b(?:ATOM|RED)(?!UX)\w*", line)]
    assert len(names) == 4 and all(name.startswith("RED") for name in names)
    assert [site.effect for site in injected.kernels["k"].sites] == [3, 3]


# --- executed -----------------------------------------------------------------------------------------

THREADS = 16
VALUES = f"""{HEAD}
.global .align 16 .b32 table[64];
.const .align 8 .b16 fixed[4] = {{1, 2, 0x8003, 4}};
.shared .align 16 .b8 cells[512];
.visible .entry k(.param .u64 p) {{
    .reg .pred %p<4>; .reg .b16 %h<9>; .reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .f32 %f<9>; .reg .f64 %fd<4>;
    .local .align 16 .b8 mine[32];
    ld.param.u64 %rd1, [p];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 16;
    add.u64 %rd3, %rd1, %rd2;
    setp.lt.u32 %p1, %r1, 5;
    add.u32 %r2, %r1, 0xfff0;
    cvt.rn.f32.u32 %f1, %r1;
    ld.global.u32 %r3, [%rd3];                              //! words
    ld.global.s8 %r4, [%rd3+3];                             //! last byte
    ld.global.v2.u16 {{%h1, _}}, [%rd3+4];                  //! a half of two
    ld.global.v4.u32 {{%r5, %r6, %r7, %r8}}, [%rd3];        //! four words
    ld.global.b64 %rd4, [%rd3+8];                           //! long
    mov.u64 %rd5, %rd3;
    ld.global.u64 %rd5, [%rd5+8];                           //! over its address
    @%p1 ld.global.f32 %f2, [%rd3];                         //! some
    @!%p1 ld.global.f32 %f2, [%rd3+4];                      //! the others
    st.global.f32 [%rd3+1024], %f1;                         //! float
    st.global.u8 [%rd3+1028], %r2;                          //! byte of a word
    st.global.u16 [%rd3+1030], -2;                          //! number
    @%p1 st.global.v2.f32 [%rd3+1032], {{%f1, 0f3F800000}}; //! two floats
    mov.u32 %r9, cells;
    mad.lo.u32 %r9, %r1, 16, %r9;
    st.shared.v4.u8 [%r9], {{%r1, 2, %r2, 255}};            //! bytes
    mov.u64 %rd6, cells;
    cvta.shared.u64 %rd7, %rd6;
    add.u64 %rd7, %rd7, %rd2;
    ld.u32 %r10, [%rd7];                                    //! shared
    st.local.v2.b64 [mine+16], {{%rd2, %rd3}};              //! two longs
    mov.u64 %rd8, mine;
    cvta.local.u64 %rd9, %rd8;
    ld.u64 %rd9, [%rd9+24];                                 //! local
    mov.u64 %rd10, table;
    st.global.u64 [table+8], %rd10;                         //! address
    mul.wide.u32 %rd11, %r1, 4;
    add.u64 %rd12, %rd10, %rd11;
    add.u64 %rd12, %rd12, 64;
    atom.global.add.u32 %r11, [%rd12], %r2;                 //! result
    atom.global.exch.b32 %r11, [%rd12], %r11;               //! operand is overwritten
    atom.global.cas.b32 %r12, [%rd12], %r2, 77;             //! cas
    atom.global.max.u32 %r13, [%rd12], 1000;                //! unused
    red.global.add.u32 [%rd12], %r1;                        //! red
    @%p1 atom.global.add.f32 %f3, [%rd3+1024], 0f40000000;  //! floats added
    ld.const.u16 %h2, [fixed+4];                            //! constant
    st.global.v4.b32 [%rd3+2048], {{%r11, %r12, %r3, %r10}};
    st.global.v4.b32 [%rd3+3072], {{%r4, %r5, %r6, %r7}};
    st.global.v2.b64 [%rd3+4096], {{%rd4, %rd5}};
    st.global.v4.f32 [%rd3+5120], {{%f2, %f3, %f1, %f1}};
    st.global.v2.b64 [%rd3+6144], {{%rd9, %rd12}};
    st.global.v4.u16 [%rd3+7168], {{%h1, %h2, %h1, %h2}};
    cvt.u32.u32 %r8, %r8;
    ret;
}}"""


def first(t: int) -> list[int]:
    """The data of a thread."""
    return [0x80000000 + 0x01010101 * t, 0x10000 * t + 7, t, 0xAB000000 + t]


def _word(number: float) -> int:
    return struct.unpack("<I", struct.pack("<f", number))[0]


def _expected(address: int, table: int) -> dict[str, tuple[str, dict[int, tuple[int, int, int, int]]]]:
    """What is told at each mark of VALUES: type, and low, high, old_low, old_high by thread. `address`: of the data."""
    everyone, few, rest = range(THREADS), range(5), range(5, THREADS)

    def all_(of: object, threads: Iterable[int] = everyone) -> dict[int, tuple[int, int, int, int]]:
        return {t: tuple(of(t)) + (0,) * (4 - len(of(t))) for t in threads}  # type: ignore[operator]

    def long(t: int, word: int) -> int:
        return first(t)[word] | first(t)[word + 1] << 32

    start = 65000  # what the table's cells begin with, plus the thread
    sums = {t: start + t + 0xFFF0 + t for t in everyone}
    swapped = {t: start + t for t in everyone}  # behind the exch
    return {
        "words": ("u32", all_(lambda t: (first(t)[0],))),
        "last byte": ("s8", all_(lambda t: (first(t)[0] >> 24,))),
        "a half of two": ("b16", all_(lambda t: (7,))),
        "four words": ("u32", all_(lambda t: (long(t, 0), long(t, 2)))),
        "long": ("b64", all_(lambda t: (long(t, 2),))),
        "over its address": ("u64", all_(lambda t: (long(t, 2),))),
        "some": ("f32", all_(lambda t: (first(t)[0],), few)),
        "the others": ("f32", all_(lambda t: (first(t)[1],), rest)),
        "float": ("f32", all_(lambda t: (_word(t),))),
        "byte of a word": ("u8", all_(lambda t: (0xF0 + t & 0xFF,))),
        "number": ("b16", all_(lambda t: (0xFFFE,))),
        "two floats": ("f32", all_(lambda t: (_word(t) | _word(1) << 32,), few)),
        "bytes": ("u8", all_(lambda t: (t | 2 << 8 | (0xF0 + t & 0xFF) << 16 | 255 << 24,))),
        "shared": ("u32", all_(lambda t: (t | 2 << 8 | (0xF0 + t & 0xFF) << 16 | 255 << 24,))),
        "two longs": ("b64", all_(lambda t: (16 * t, address + 16 * t))),
        "local": ("u64", all_(lambda t: (address + 16 * t,))),
        "address": ("u64", all_(lambda t: (table,))),
        "result": ("u32", all_(lambda t: (0xFFF0 + t, 0, start + t))),
        "operand is overwritten": ("b32", all_(lambda t: (start + t, 0, sums[t]))),
        "cas": ("b32", all_(lambda t: (77, 0xFFF0 + t, swapped[t]))),
        "unused": ("u32", all_(lambda t: (1000,))),
        "red": ("u32", all_(lambda t: (t,))),
        "floats added": ("f32", all_(lambda t: (_word(2), 0, _word(t)), few)),
        "constant": ("b16", all_(lambda t: (0x8003,))),
    }


@pytest.fixture(params=["inline", "functions"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "functions":
        monkeypatch.setattr(plan, "MAX_INLINE", 0)
        monkeypatch.setattr(plan, "MIN_FUNCTION", 0)
    return str(request.param)


def _data() -> Array:
    words = np.zeros(4096, np.uint32)
    words[: 4 * THREADS] = [word for t in range(THREADS) for word in first(t)]
    return Array(words)


def _marks(sites: dict[int, Site]) -> dict[str, Site]:
    lines = VALUES.splitlines()
    return {
        lines[site.line - 1].split("//! ")[1]: site
        for site in sites.values()
        if "//!" in lines[site.line - 1]
    }


@pytest.mark.every(2)
def test_values_are_told_and_stay_as_they_are(form: str) -> None:
    where = log("value", "where", "site", "address", "width", "space", "kind", "effect")
    accessed = log("access", "accessed", "site", "address", "width", "space", "kind", "effect")
    run = Run(VALUES, [Probe(log("value"), "value"), Probe(where, "value"), Probe(accessed, "access")])
    table = run.variables["table"].view(np.uint32)
    original, data = _data(), _data()
    table[:] = 65000 - 16 + np.arange(64)
    run.original.launch("k", 1, THREADS, original)
    after = table.copy()
    table[:] = 65000 - 16 + np.arange(64)
    run("k", THREADS, data)
    assert (table == after).all()
    results, right = data.host.reshape(-1, 4), original.host.reshape(-1, 4)
    results[384 : 384 + THREADS, :2] = right[384 : 384 + THREADS, :2] = (
        0  # an address in the data, which differs
    )
    assert (results == right).all() and all(right[64 * k : 64 * k + THREADS].any() for k in range(8))

    sites = run.sites("k")
    marks = _marks({n: s for n, s in sites.items() if s.point == "value"})
    assert not run.injected.kernels["k"].unprobed
    expected = _expected(data.address, run.variables["table"].ctypes.data)
    assert set(marks) == set(expected)
    told = run.records(8)
    for name, (type_, values) in expected.items():
        site = marks[name]
        rows = {t: row for t, number, *row in told if number == site.number}
        assert {t: tuple(row[3:]) for t, row in rows.items()} == values, name
        used = name in ("result", "operand is overwritten", "cas", "floats added")
        assert site.type == type_ and bool(site.effect & RETURNS) == used
        lanes = sum(1 << t for t in values)
        assert {tuple(row[:2]) for row in rows.values()} == {(TYPES.index(type_), site.effect)}
        assert all(row[2] >> t & 1 and row[2] & ~lanes == 0 for t, row in rows.items())
    # addresses, spaces and widths are those of the accesses
    lines = {n: s.line for n, s in sites.items()}
    of_values = Counter((t, lines[n], *rest, effect & 3) for t, n, *rest, effect in run.records(6, "where"))
    of_accesses = Counter((t, lines[n], *rest) for t, n, *rest in run.records(6, "accessed"))
    assert of_values == of_accesses and of_values.total() > 300


def test_values_of_vector_registers(form: str) -> None:
    text = f"""{HEAD}
.func (.param .align 8 .b8 out[8]) pair(.param .b32 in) {{
    .reg .v2.u32 %v; ld.param.u32 %v.x, [in]; add.u32 %v.y, %v.x, 256; st.param.v2.u32 [out], %v; ret;
}}
.visible .entry k(.param .u64 p) {{
    .reg .b32 %r<3>; .reg .b64 %rd<4>; .reg .v4.u32 %v; .reg .v2.u16 %h;
    ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 16; add.u64 %rd2, %rd1, %rd2;
    ld.global.v4.u32 %v, [%rd2];
    st.global.v4.u32 [%rd2+1024], %v;
    ld.global.v2.u16 %h, [%rd2+4];
    {{ .param .b32 a; .param .align 8 .b8 r[8]; st.param.b32 [a], %r1; call (r), pair, (a); }}
    ret;
}}"""
    run = Run(text, [Probe(log("value"), "value"), Probe(log("function_exit", "left"), "function_exit")])
    run("k", THREADS, _data())
    values = Counter((t, low, high) for t, _, _, _, _, low, high, _, _ in run.records(8))
    four = Counter((t, first(t)[0] | first(t)[1] << 32, t | first(t)[3] << 32) for t in range(THREADS))
    two = Counter((t, first(t)[1], 0) for t in range(THREADS))
    assert values == four + four + two
    assert [(t, low, high) for t, _, low, high in run.records(3, "left")] == [
        (t, t | t + 256 << 32, 0) for t in range(THREADS)
    ]


def test_programs_are_where_their_kinds_and_spaces_are(form: str) -> None:
    probes = [
        Probe(
            log("value", "stores", "site", "kind", "space"),
            "value",
            kinds=("store",),
            spaces=("shared", "local"),
        ),
        Probe(
            log("value", "loads", "site", "kind", "space"),
            "value",
            kinds=("load",),
            spaces=("shared", "const"),
        ),
        Probe(log("value", "atomics", "low"), "value", kinds=("atomic",)),
    ]
    run = Run(VALUES, probes)
    run.variables["table"].view(np.uint32)[:] = 65000 - 16 + np.arange(64)
    run("k", THREADS, _data())
    named = {site.number: name for name, site in _marks(run.sites("k")).items()}
    found = {
        name: Counter((named[n], KINDS[kind], space) for _, n, kind, space in run.records(3, name))
        for name in ("stores", "loads")
    }
    assert found == {
        "stores": {("bytes", "store", 1): 16, ("two longs", "store", 2): 16},
        "loads": {("shared", "load", 1): 16, ("constant", "load", 3): 16},
    }
    assert len(run.records(1, "atomics")) == 5 * THREADS + 5


def test_only_what_a_program_reads_is_computed() -> None:
    def added(*fields: str) -> str:
        text = f"""{HEAD}.visible .entry k(.param .u64 p) {{ .reg .b32 %r<9>; .reg .b64 %rd<4>;
            ld.param.u64 %rd1, [p];
            ld.v4.u32 {{%r1, %r2, %r3, %r4}}, [%rd1];
            atom.global.add.u32 %r5, [%rd1], %r1;
            st.global.v4.u32 [%rd1], {{%r5, %r2, %r3, %r4}};
            ret; }}"""
        return inject(parse(text), {"k": [Probe(log("value", "log", "site", *fields), "value")]}).text

    plain = added()
    assert "%gpubpf_0value" not in plain and "%gpubpf_0old" not in plain and "activemask" not in plain
    assert "isspacep" not in plain
    assert "%gpubpf_0value1" not in added("low") and "%gpubpf_0value0" not in added("high")
    assert added("old_low").count("or.b64 %gpubpf_0old0") == 1 and "%gpubpf_0value" not in added("old_low")
    assert added("address").count("isspacep.shared") == 1


def test_a_load_of_which_the_application_uses_some_bytes(tmp_path: Path) -> None:
    """The pragma says which bytes need not be loaded. It stays for programs that read no value."""
    text = f"""{HEAD}.visible .entry k(.param .u64 p) {{ .reg .b32 %r<6>; .reg .b64 %rd<2>;
ld.param.u64 %rd1, [p]; .pragma "used_bytes_mask 0xfff";
ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%rd1]; st.global.u32 [%rd1], %r1; ret; }}"""
    for field, stays in (("high", False), ("width", True)):
        injected = inject(parse(text), {"k": [Probe(log("value", "log", field), "value")]})
        lines = injected.text.splitlines()
        own = next(n for n, line in enumerate(lines) if "ld.global.v4" in line)
        assert ("used_bytes_mask" in lines[own - 1]) is stays is ("used_bytes_mask" in injected.text)
        assembled(injected.text, "sm_80", tmp_path)

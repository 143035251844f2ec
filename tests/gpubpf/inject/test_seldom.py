"""In a module with many probes, what a program seldom does is a call of a function, which begins the program again."""

from __future__ import annotations

import struct

import pytest

from gpubpf.ebpf.probe import Probe
from gpubpf.inject import plan
from gpubpf.inject.inject import inject
from gpubpf.inject.seldom import called, shortened, without_unused
from gpubpf.lower.fragment import Argument, Fragment
from gpubpf.ptx.parser import parse
from ptxrun import Memory, Thread

COUNTS = Argument("counts", "b64", "map_base", "counts")
ADDRESS = Argument("address", "b64", "context", field="address")
# Counts accesses at multiples of 8 nearly always; others seldom, in two ways that meet again, and with them what both have in common.
COUNT = """{
	.reg .pred 	%p<3>;
	.reg .b64 	%rd<6>;
	mov.b64 %rd1, %gpubpf_address;
	and.b64 	%rd2, %rd1, 7;
	setp.ne.b64 	%p1, %rd2, 0;
	@%p1 bra 	$L__BB0_2;
	{
	.reg .b64 %kept;
	mov.b64 %kept, 1;
	red.global.add.u64 [%gpubpf_counts], %kept;
	}
	bra.uni 	$L__BB0_5;
$L__BB0_2:
$gpubpf_seldom0:
	setp.eq.b64 	%p2, %rd2, 4;
	@%p2 bra 	$L__BB0_4;
	red.global.add.u64 [%gpubpf_counts+8], 1;
	bra.uni 	$L__BB0_6;
$L__BB0_4:
	red.global.add.u64 [%gpubpf_counts+16], 1;
	bra.uni 	$L__BB0_6;
$L__BB0_5:
	red.global.add.u64 [%gpubpf_counts+24], 1;
	bra.uni 	$gpubpf_end;
$L__BB0_6:
	red.global.add.u64 [%gpubpf_counts+32], 1;
$gpubpf_end:
}"""
FRAGMENT = Fragment("count", COUNT, (COUNTS, ADDRESS), seldom=("$gpubpf_seldom0",))
OFFSETS = (0, 1, 4, 8, 12, 16, 17, 24)
KERNEL = """.version 6.3
.target sm_70
.address_size 64
.visible .entry k(.param .u64 a) {{ .reg .b64 %rd<2>; ld.param.u64 %rd1, [a];
{accesses}
ret; }}
"""


@pytest.mark.parametrize("inline", [4000, 0])
def test_each_access_is_counted_once(inline: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MAX_INLINE", inline)
    monkeypatch.setattr(plan, "MIN_FUNCTION", 0)
    text = KERNEL.format(accesses="\n".join(f"st.global.u8 [%rd1+{at}], 1;" for at in OFFSETS))
    injected = inject(parse(text), {"k": [Probe(FRAGMENT, "access")]})
    assert injected.text.count("call gpubpf_program0,") == (0 if inline else len(OFFSETS))
    assert (
        injected.text.count("+16], 1;") == (len(OFFSETS) if inline else 1) + 1
    )  # with a store of the kernel
    memory = Memory()
    data, counts = memory.allocate(32), memory.allocate(40)
    Thread(parse(injected.text), memory, {}, {}).run("k", struct.pack("<4Q", data, 0, 0, counts))
    assert memory.words(counts, 5, 8) == [4, 2, 2, 4, 4]


@pytest.mark.parametrize(
    "limit, value, calls",
    [("MAX_INLINE", 1000, 0), ("MAX_INLINE", 100, 8), ("MAX_MODULE", 10, 9), ("MAX_PROGRAM", 10, 9)],
)
def test_small_kernels_of_large_modules_call_no_function(
    limit: str, value: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inlined programs need fewer registers: a call has fixed registers for its arguments and for what it preserves."""
    for name, number in {"MIN_FUNCTION": 0, "MAX_INLINE": 100, limit: value}.items():
        monkeypatch.setattr(plan, name, number)
    large = KERNEL.format(accesses="\n".join(f"st.global.u8 [%rd1+{at}], 1;" for at in OFFSETS))
    small = (
        KERNEL.format(accesses="st.global.u8 [%rd1], 1;").split("\n", 3)[3].replace("entry k", "entry small")
    )
    probes = [Probe(FRAGMENT, "access")]
    text = inject(parse(large + small), {"k": probes, "small": probes}).text
    assert text.count("call gpubpf_program0") == calls
    assert text[text.index("entry small") :].count("call gpubpf_program0") == calls - 8 * bool(calls)


@pytest.mark.parametrize(
    "limit, whole",
    [("MAX_SHORT", ["k"]), ("MAX_MODULE", ["k"]), ("", [])],
)
def test_a_large_kernel_does_not_make_calls_of_the_programs_in_a_small_one(
    limit: str, whole: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel has its own limit: in the large one, programs are functions; in the small one, their rarely executed parts."""
    lines = shortened(FRAGMENT, "f").text.count("\n")
    limits = {"MIN_FUNCTION": 0, "MAX_INLINE": 1, "MAX_PROGRAM": 1} | ({limit: 2 * lines} if limit else {})
    for name, number in limits.items():
        monkeypatch.setattr(plan, name, number)
    large = KERNEL.format(accesses="\n".join(f"st.global.u8 [%rd1+{at}], 1;" for at in OFFSETS))
    small = (
        KERNEL.format(accesses="st.global.u8 [%rd1], 1;").split("\n", 3)[3].replace("entry k", "entry small")
    )
    injected = inject(parse(large + small), {name: [Probe(FRAGMENT, "access")] for name in ("k", "small")})
    begins = injected.text.index("entry k("), injected.text.index("entry small(")
    bodies = {"k": injected.text[begins[0] : begins[1]], "small": injected.text[begins[1] :]}
    for name, stores in (("k", len(OFFSETS)), ("small", 1)):
        called_whole = bodies[name].count("call gpubpf_program0_whole,")
        called_part = bodies[name].count("call gpubpf_program0,")
        assert (called_whole, called_part) == ((stores, 0) if name in whole else (0, stores))
    declared = injected.text.count(".func gpubpf_program0") // 2  # a declaration and a definition of each
    assert declared == 1 + bool(whole)
    for name, stores in (("k", len(OFFSETS)), ("small", 1)):
        memory = Memory()
        data, counts = memory.allocate(32), memory.allocate(40)
        Thread(parse(injected.text), memory, {}, {}).run(name, struct.pack("<4Q", data, 0, 0, counts))
        assert memory.words(counts, 1, 8) == [4 if stores > 1 else 1]


def test_what_is_never_left_out() -> None:
    short = shortened(FRAGMENT, "f")
    assert [n for n in (0, 8, 16, 24, 32) if f"%gpubpf_counts{f'+{n}' * bool(n)}]" in short.text] == [0, 24]
    without = Fragment("count", COUNT, (COUNTS, ADDRESS))
    assert shortened(without, "f") == called(without, "f")
    assert "red" not in called(without, "f").text and "call f," in short.text


def test_the_function_does_not_ask_again() -> None:
    """The lanes that call it come to the label: what the others do is not in it, nor the branch there."""
    function = shortened(FRAGMENT, "f").functions[0]
    body = "\n".join(str(statement) for statement in function.statements or ())
    assert [n for n in (0, 8, 16, 24, 32) if f"%gpubpf_counts{f'+{n}' * bool(n)}]" in body] == [8, 16, 32]
    assert "@%p1" not in body and "@%p2" in body


WIDTH = Argument("width", "b32", "context", field="width")
# Counts accesses by their addresses modulo 8, in three ways, and adds up their widths. Two of the ways are seldom.
TWICE = """{
	.reg .pred 	%p<3>;
	.reg .b64 	%rd<6>;
	cvt.u64.u32 	%rd3, %gpubpf_width;
	and.b64 	%rd1, %gpubpf_address, 7;
	setp.ne.b64 	%p1, %rd1, 0;
	@%p1 bra 	$L__BB0_2;
	red.global.add.u64 [%gpubpf_counts], 1;
	bra.uni 	$gpubpf_end;
$L__BB0_2:
	and.b64 	%rd2, %rd1, 1;
	setp.ne.b64 	%p2, %rd2, 0;
	@%p2 bra 	$L__BB0_4;
$gpubpf_seldom0:
	red.global.add.u64 [%gpubpf_counts+8], 1;
	bra.uni 	$L__BB0_5;
$L__BB0_4:
$gpubpf_seldom1:
	red.global.add.u64 [%gpubpf_counts+16], 1;
$L__BB0_5:
	red.global.add.u64 [%gpubpf_counts+24], %rd3;
$gpubpf_end:
}"""
TWO = Fragment("twice", TWICE, (COUNTS, ADDRESS, WIDTH), seldom=("$gpubpf_seldom0", "$gpubpf_seldom1"))


def test_each_seldom_part_has_a_function_for_each_width(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in {"MAX_INLINE": 0, "MIN_FUNCTION": 0}.items():
        monkeypatch.setattr(plan, name, number)
    stores = [(0, 4), (8, 1), (4, 4), (12, 4), (2, 2), (5, 1), (7, 1), (6, 1)]
    accesses = "\n".join(f"st.global.u{8 * width} [%rd1+{at}], 1;" for at, width in stores)
    text = inject(parse(KERNEL.format(accesses=accesses)), {"k": [Probe(TWO, "access")]}).text
    for part in ("", "_1"):
        assert [text.count(f"call gpubpf_program0_width{width}{part},") for width in (1, 2, 4)] == [4, 1, 3]
    assert text.count(".func gpubpf_program0") == 2 * 6 and "gpubpf_given2" not in text
    memory = Memory()
    data, counts = memory.allocate(32), memory.allocate(32)
    Thread(parse(text), memory, {}, {}).run("k", struct.pack("<4Q", data, 0, 0, counts))
    assert memory.words(counts, 4, 8) == [2, 4, 2, 4 + 4 + 2 + 1 + 1 + 1]


def test_a_part_holds_nothing_of_another() -> None:
    bodies = [
        "\n".join(str(s) for s in function.statements or ()) for function in shortened(TWO, "f").functions
    ]
    reached = [[n for n in (8, 16, 24) if f"%gpubpf_counts+{n}]" in body] for body in bodies]
    assert reached == [[8, 24], [16, 24]]
    assert not any("@%p" in body or "setp" in body for body in bodies)
    assert called(TWO, "f", {"width": "4"}).text.count("st.param") == 2


def test_what_lanes_compare_is_left_out_where_nothing_reads_it() -> None:
    compare = ["{", ".reg .b32 %together;", "activemask.b32 %together;"]
    match = [*compare, "match.all.sync.b64 %r5, %rd1, %together;", "}"]
    other = [*compare, "match.all.sync.b64 %r6|%p3, %rd1, %together;", "}"]  # with two results
    adds = [*compare, "red.global.add.u64 [%rd2], 1;", "mov.b32 %r9, 1;", "}"]
    asks, kept = ["setp.ne.b32 %p1, %r5, -1;", "selp.b32 %r7, 1, 0, %p1;"], ["st.global.u32 [%rd2], %r7;"]
    assert without_unused([*match, *asks]) == []
    assert without_unused([*match, *asks, *kept]) == [*match, *asks, *kept]
    assert without_unused([*other, *adds]) == [*other, *adds]

"""In a module with many probes, what a program seldom does is a call of a function, which begins the program again."""

from __future__ import annotations

import struct

import pytest

from gpubpf.ebpf.probe import Probe
from gpubpf.inject import plan
from gpubpf.inject.inject import inject
from gpubpf.inject.seldom import called, shortened
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
    function = shortened(FRAGMENT, "f").function
    body = "\n".join(str(statement) for statement in function.statements or ())
    assert [n for n in (0, 8, 16, 24, 32) if f"%gpubpf_counts{f'+{n}' * bool(n)}]" in body] == [8, 16, 32]
    assert "@%p1" not in body and "@%p2" in body

"""Probes that stand in many places: translated once, and seen by each place as if they stood there alone."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cudasim.translate import translate
from cudasim.translate.outline import PREFIX, outline
from engine_device import Array, Device, DeviceFault
from gpubpf.ptx.module import PtxInstruction
from gpubpf.ptx.parser import parse

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
# Adds the lanes that run it together, times the place's number, to a cell of this lane.
PROBE = """{
    .reg .b64 %gpubpf_cell;
    .reg .b32 %gpubpf_site;
    add.u64 %gpubpf_cell, %rd1, %rd2;
    mov.u32 %gpubpf_site, SITE;
    {
        .reg .b32 %r<6>;
        .reg .pred %p<2>;
        .reg .b64 %rd<2>;
        mov.u32 %r1, 0;
        $again:
        add.u32 %r1, %r1, 1;
        setp.lt.u32 %p1, %r1, TURNS;
        @%p1 bra $again;
        activemask.b32 %r2;
        { .reg .b32 %r1; mov.u32 %r1, %r2; match.any.sync.b32 %r2, 7, %r1; }
        popc.b32 %r3, %r2;
        mul.lo.u32 %r3, %r3, %gpubpf_site;
        ld.global.u32 %r4, [%gpubpf_cell];
        add.u32 %r4, %r4, %r3;
        st.global.u32 [%gpubpf_cell], %r4;
    }
}"""


def probe(site: int, turns: int = 1) -> str:
    return f"//gpubpf{{\n{PROBE.replace('SITE', str(site)).replace('TURNS', str(turns))}\n//gpubpf}}\n"


def kernel(body: str, name: str = "k") -> str:
    return f""".visible .entry {name}(.param .u64 out) {{
.reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>;
ld.param.u64 %rd1, [out];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd2, %r1, 4;
{body}
ret;
}}
"""


def ran(text: str, seed: int | None = None, virtual: bool = False) -> list[int]:
    out = Array(np.zeros(32, np.uint32))
    Device(text, virtual).launch("k", 1, 32, out, seed=seed)
    return out.host.tolist()


def outlined(text: str) -> list[str]:
    return [name for name in outline(parse(text)).functions if name.startswith(PREFIX)]


def calls(text: str) -> int:
    functions = outline(parse(text)).functions.values()
    return sum(isinstance(s, PtxInstruction) and s.opcode == "call" for f in functions for s in f.body or ())


def test_one_function_for_all_places_of_all_kernels() -> None:
    text = HEAD + kernel("".join(map(probe, range(1, 5)))) + kernel(probe(9) + probe(7), "l")
    assert len(outlined(text)) == 1 and calls(text) == 6
    assert translate(text).count("match") == 0 and translate(text).count("CS_OP_MATCH_ANY") == 1
    assert ran(text) == [32 * (1 + 2 + 3 + 4)] * 32


def test_what_stands_once_or_was_not_injected_stays() -> None:
    assert not outlined(HEAD + kernel(probe(1)))
    plain = probe(1).replace("//gpubpf{", "").replace("//gpubpf}", "")
    assert not outlined(HEAD + kernel(plain + plain))
    assert not outlined(HEAD + kernel(probe(1) + probe(2, turns=2)))  # another text


@pytest.mark.parametrize(
    "change",
    [
        ("mov.u32 %r1, 0;", "mov.u32 %r1, 0; mov.u32 %gpubpf_site, 5;"),  # writes what is outside
        ("mov.u32 %r1, 0;", "mov.u32 %r1, 0; setp.eq.u32 %p7, %r1, 0;"),
        ("mov.u32 %r1, 0;", "mov.u32 %r1, 0; @%p7 bra $again;"),  # reads a predicate
        ("mov.u32 %r1, 0;", ".local .b32 there; mov.u32 %r1, 0;"),
        ("mov.u32 %r1, 0;", "mov.u32 %r1, 0; ld.param.u64 %rd1, [out];"),
        ("popc.b32 %r3, %r2;", "popc.b32 %r3, %r2; @%p1 exit;"),
    ],
)
def test_what_is_not_closed_in_itself_stays(change: tuple[str, str]) -> None:
    text = HEAD + kernel((probe(1) + probe(2)).replace(*change))
    assert not outlined(text)
    assert ran(text)[0] in (96, 32 * (5 + 5))


TWICE = """.func (.reg .b32 %r) twice(.param .b32 a) {
.reg .b32 %r1; ld.param.b32 %r1, [a]; add.u32 %r, %r1, %r1; ret;
}
"""
CALL = """mul.lo.u32 %r3, %r3, %gpubpf_site;
        {
            .param .b32 give;
            st.param.b32 [give], %r3;
            call (%r3), TARGET, (give)END;
        }"""


@pytest.mark.parametrize("virtual", [False, True])
def test_a_probe_that_calls_a_function(virtual: bool) -> None:
    """As one does that has a part for rare cases (gpu_seldom)."""
    call = CALL.replace("TARGET", "twice").replace("END", "")
    probes = "".join(probe(k).replace("mul.lo.u32 %r3, %r3, %gpubpf_site;", call) for k in (1, 2, 3))
    text = HEAD + TWICE + kernel(probes)
    assert len(outlined(text)) == 1
    assert ran(text, virtual=virtual) == [2 * 32 * (1 + 2 + 3)] * 32


def test_a_probe_that_calls_through_a_register_stays() -> None:
    call = CALL.replace("TARGET", "%rd3").replace("END", ", shape")
    probes = "".join(probe(k).replace("mul.lo.u32 %r3, %r3, %gpubpf_site;", call) for k in (1, 2))
    shape = "shape: .callprototype (.param .b32 _) _ (.param .b32 _);\nmov.u64 %rd3, twice;\n"
    assert not outlined(HEAD + TWICE + kernel(shape + probes))


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("virtual", [False, True])
def test_lanes_of_different_places_are_not_together(seed: int | None, virtual: bool) -> None:
    """Also where the warp yields in the probe, and those of the other place come to the same instruction meanwhile."""
    body = f"""and.b32 %r2, %r1, 3; setp.eq.u32 %p1, %r2, 0;
@%p1 bra $A;
{probe(100, turns=3000)} bra $B;
$A:
{probe(1, turns=3000)}
$B:
"""
    expected = [8 if lane % 4 == 0 else 24 * 100 for lane in range(32)]
    assert ran(HEAD + kernel(body), seed, virtual) == expected


def test_lines_stay_those_of_the_text() -> None:
    text = HEAD + kernel(probe(1) + probe(2) + "st.global.u32 [%rd2], %r1;")
    line = text[: text.index("st.global.u32 [%rd2], %r1")].count("\n") + 1
    with pytest.raises(DeviceFault) as caught:
        ran(text)
    assert caught.value.line == line


def test_probes_take_no_virtual_time() -> None:
    times = []
    for body in ("", probe(1) + probe(2) + probe(3)):
        device = Device(HEAD + kernel(body + "add.u32 %r1, %r1, 1;" + body), virtual=True)
        device.launch("k", 1, 32, Array(np.zeros(32, np.uint32)))
        times.append(device.duration)
    assert times[0] == times[1]


def test_a_hundred_probes_are_little_more_to_compile_than_a_few() -> None:
    few, many = (translate(HEAD + kernel("".join(map(probe, range(n))))).count("\n") for n in (2, 102))
    assert many - few < 100 * 30
    assert len(re.findall(r"static int fn_", translate(HEAD + kernel(probe(1) + probe(2))))) == 2

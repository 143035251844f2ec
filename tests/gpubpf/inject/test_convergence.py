"""No lane waits for another between the branch that it leaves by and the clock that its exit probe reads, by the SASS.

Since sm_70 the lanes of a warp meet again only where the compiler says so: at a BSYNC (those that the BSSY before it counted) or a
WARPSYNC. So there must be none on the way, in straight-line code, from the last divergent branch or memory access to the clock.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpubpf.ebpf.bytecode import ADD
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.ebpf.probe import Probe
from gpubpf.ebpf.sampling import Unit
from gpubpf.inject import sidecar
from gpubpf.inject.inject import inject
from gpubpf.lower import nvptx
from gpubpf.lower.fragment import Argument
from gpubpf.ptx.parser import parse
from gpubpf.verify.rules import check
from gpubpf_asm import alu, call, leave, load_map, mov, movi, program, store
from gpubpf_fragments import TIME, Fragment, tally
from gpubpf_sass import assembled, sass

HEAD = ".version 8.3\n.target sm_75\n.address_size 64\n"
REGISTERS = ".reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %rd<5>;"
START = f"""{REGISTERS} ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 31; mul.wide.u32 %rd3, %r1, 4;
    add.u64 %rd2, %rd1, %rd3; ld.global.u32 %r3, [%rd2];"""
BODIES = {
    "predicated": "setp.eq.u32 %p1, %r2, 31; @%p1 ret; st.global.u32 [%rd2], %r1; setp.gt.u32 %p2, %r2, 7; @!%p2 exit;"
    " st.global.u32 [%rd2+4], %r3; ret;",
    "work_of_one_lane": """setp.ne.u32 %p1, %r2, 31; @%p1 bra out;
        turn: ld.volatile.global.u32 %r4, [%rd2]; add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, %r4; @%p2 bra turn;
        out: ret;""",
    "loop_left_in_the_middle": """turn: ld.volatile.global.u32 %r4, [%rd2]; setp.eq.u32 %p1, %r4, %r2; @%p1 bra out;
        st.global.u32 [%rd2+8], %r3; add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 500; @%p2 bra turn;
        out: ret;""",
    "loops_in_loops": """mov.u32 %r5, 0;
        outer: mov.u32 %r6, 0;
        inner: ld.volatile.global.u32 %r4, [%rd2]; setp.eq.u32 %p1, %r4, %r6; @%p1 bra out;
        add.u32 %r6, %r6, 1; setp.lt.u32 %p2, %r6, %r2; @%p2 bra inner;
        add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, %r3; @%p3 bra outer;
        out: ret;""",
    "loop_with_exit": """turn: ld.volatile.global.u32 %r4, [%rd2]; setp.eq.u32 %p1, %r4, %r2; @%p1 exit;
        st.global.u32 [%rd2], %r3; add.u32 %r3, %r3, 1; bra turn;""",
    "both_ways_to_uni": """setp.lt.u32 %p1, %r2, 9; @%p1 bra other; st.global.u32 [%rd2], %r2; bra.uni out;
        other: st.global.u32 [%rd2+4], %r2;
        out: ret.uni;""",
    "merged": """setp.eq.u32 %p1, %r2, 1; @%p1 bra out; st.global.u32 [%rd2], %r2;
        setp.eq.u32 %p2, %r2, 2; @%p2 bra out; st.global.u32 [%rd2+4], %r2;
        setp.eq.u32 %p3, %r3, 3; @%p3 bra out; st.global.u32 [%rd2+8], %r2;
        out: ret;""",
    "barrier_behind": """setp.lt.u32 %p1, %r2, 3; @%p1 bra out; st.shared.u32 [cells], %r1; bar.sync 0;
        ld.shared.u32 %r4, [cells]; st.global.u32 [%rd2], %r4;
        out: ret;""",
    "switch": """and.b32 %r4, %r2, 3; ts: .branchtargets one, two, out, three; brx.idx %r4, ts;
        one: st.global.u32 [%rd2], %r2; bra out;
        two: st.global.u32 [%rd2+4], %r2; ret;
        three: st.global.u32 [%rd2+8], %r2;
        out: ret;""",
    "in_a_function": """{ .param .b32 a; .param .b64 b; st.param.b32 [a], %r2; st.param.b64 [b], %rd2; call leaves, (a, b); }
        st.global.u32 [%rd2+4], %r3; ret;""",
    "function_in_a_loop": """turn: { .param .b32 a; .param .b64 b; st.param.b32 [a], %r3; st.param.b64 [b], %rd2;
        call leaves, (a, b); } add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 100; @%p1 bra turn; ret;""",
    "in_a_loop_of_a_function": """{ .param .b32 a; .param .b64 b; st.param.b32 [a], %r2; st.param.b64 [b], %rd2; call spins, (a, b); }
        st.global.u32 [%rd2+4], %r3; ret;""",
}
MODULE = (
    HEAD
    + ".shared .align 4 .b32 cells[4];\n"
    + f""".func leaves(.param .b32 n, .param .b64 p) {{ {REGISTERS} ld.param.u32 %r1, [n]; ld.param.u64 %rd1, [p];
    st.global.u32 [%rd1+64], %r1; setp.eq.u32 %p1, %r1, 5; @%p1 bra gone; ld.volatile.global.u32 %r2, [%rd1];
    setp.eq.u32 %p2, %r2, 1; @%p2 exit; ret;
    gone: exit; }}\n"""
    + f""".func spins(.param .b32 n, .param .b64 p) {{ {REGISTERS} ld.param.u32 %r1, [n]; ld.param.u64 %rd1, [p];
    turn: ld.volatile.global.u32 %r2, [%rd1]; setp.eq.u32 %p1, %r2, %r1; @%p1 bra gone; add.u32 %r1, %r1, 1;
    st.global.u32 [%rd1+8], %r1; setp.lt.u32 %p2, %r1, 77; @%p2 bra turn; ret;
    gone: exit; }}\n"""
    + "".join(
        f".visible .entry {name}(.param .u64 p) {{ {START}\n{body}\n}}\n" for name, body in BODIES.items()
    )
)

RING = MapDefinition("ring", "ringbuf", 0, 16, 65536)
_LABEL = re.compile(r"\(?`?\(?(\.L_\w+)\)?")
_CLOCK = re.compile(r"SR_(GLOBALTIMERLO|CLOCKLO)")
_WAITS = re.compile(r"\b(BSYNC|WARPSYNC)\b")
# What the lanes of a warp do one after the other anyway, or may part at.
_SERIAL = re.compile(r"\b(BRX|JMX|CALL|RET|BAR|LD[GSL]?|ST[GSL]?|ATOM\w*|RED\w*)\b|^@!?U?P\d.*\b(BRA|EXIT)\b")


def ring_program() -> Fragment:
    """A record {clock, globaltimer}, the clocks read first."""
    code = [call(605), mov(6, 0), call(502), store(10, -16, 6), store(10, -8, 0), *load_map(1, "ring")]
    code += [mov(2, 10), alu(ADD, 2, imm=-16), movi(3, 16), movi(4, 0), call(130), movi(0, 0), leave()]
    made, function = program(code, (RING,))
    return nvptx.lower(made, check(made, function))


def waits_before(code: list[str], wanted: re.Pattern[str]) -> list[int]:
    """The instructions that are `wanted` and that a lane may come to from a BSYNC or WARPSYNC with nothing in between."""
    labels = {line[:-1]: n for n, line in enumerate(code) if line.endswith(":")}
    before: dict[int, set[int]] = {n: set() for n in range(len(code))}
    for n, line in enumerate(code):
        jump = re.search(r"\bBRA(?:\.\w+)*\b", line)
        if jump and (target := _LABEL.search(line[jump.end() :])) and target[1] in labels:
            before[labels[target[1]]].add(n)
        ends = re.match(r"(BRA|EXIT|BRX|JMX|RET)\b", line) is not None
        if not ends and n + 1 < len(code):
            before[n + 1].add(n)
    found = []
    for n, line in enumerate(code):
        if not wanted.search(line):
            continue
        seen, todo = set(), list(before[n])
        while todo:
            at = todo.pop()
            if at in seen or _SERIAL.search(code[at]) or (_CLOCK.search(code[at]) and at != n):
                continue
            seen.add(at)
            if _WAITS.search(code[at]):
                found.append(n)
                break
            todo.extend(before[at])
    return found


@pytest.mark.every(4)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("kind", ["time", "ring"])
def test_no_lane_waits_before_its_clock(arch: str, kind: str, tmp_path: Path) -> None:
    module = parse(MODULE)
    fragment = TIME if kind == "time" else ring_program()
    injected = inject(module, dict.fromkeys(BODIES, (Probe(fragment, "exit"),)))
    assert not injected.refusals
    original = sass(assembled(MODULE, arch, tmp_path)[0])
    probed = sass(assembled(injected.text, arch, tmp_path)[0])
    for name in BODIES:
        code = probed[name]
        clocks = [line for line in code if _CLOCK.search(line)]
        assert len(clocks) >= len(injected.kernels[name].sites) - ("function" in name), f"{name}: {clocks}"
        if waits_before(original[name], re.compile(r"\bEXIT\b")):
            continue  # there it waits without a probe
        guilty = waits_before(code, _CLOCK)
        text = "\n".join(f"{'>' if n in guilty else ' '} {line}" for n, line in enumerate(code))
        assert not guilty, f"{name}:\n{text}"


_SKIPS = re.compile(r"^@!?U?P\d.*\b(BRA|EXIT)\b")


@pytest.mark.every(2)
@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
@pytest.mark.parametrize("bodies", [1, 2])
@pytest.mark.parametrize("unit", ["block", "warp"])
def test_no_lane_waits_for_sampling(
    arch: str, unit: Unit, bodies: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a kernel with one body, a branch stands before each clock. All lanes of a warp take it, or none: it must not hide a wait."""
    if bodies == 1:
        monkeypatch.setattr(sidecar, "is_split", lambda plan, kernel: False)
    probe = Probe(TIME, "exit", sampled=unit)
    injected = inject(parse(MODULE), dict.fromkeys(BODIES, (probe,)))
    original = sass(assembled(MODULE, arch, tmp_path)[0])
    for name, code in sass(assembled(injected.text, arch, tmp_path)[0]).items():
        clocks = [n for n, line in enumerate(code) if _CLOCK.search(line)]
        assert clocks or name not in BODIES
        if name not in BODIES or waits_before(original[name], re.compile(r"\bEXIT\b")):
            continue
        assert not waits_before(code, _CLOCK)
        for clock in clocks if bodies == 1 else ():  # the nearest branch before it, in straight-line code
            skip = next(n for n in range(clock, -1, -1) if _SKIPS.search(code[n]) or code[n].endswith(":"))
            assert not waits_before([*code[:skip], "SKIP ;", *code[skip + 1 :]], re.compile("SKIP"))


COUNT = Fragment(
    "count", "{ red.global.add.u64 [%gpubpf_counts], 1; }", (Argument("counts", "b64", "map_base", "counts"),)
)


@pytest.mark.every(2)
@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
@pytest.mark.parametrize("point", ["basic_block", "branch"])
def test_lanes_still_leave_each_for_itself(point: str, arch: str, tmp_path: Path) -> None:
    """Programs at blocks and branches merge no ways out: lanes that leave would wait for others that wait at a barrier for them."""
    injected = inject(parse(MODULE), dict.fromkeys(BODIES, (Probe(COUNT, point),)))
    exits = [
        {
            name: sum("EXIT" in line for line in code)
            for name, code in sass(assembled(text, arch, tmp_path)[0]).items()
        }
        for text in (MODULE, injected.text)
    ]
    original, probed = exits
    assert all(probed[name] >= original[name] for name in BODIES) and max(original.values()) > 3


def test_loops_are_spared_where_no_clock_is_read() -> None:
    """The way out inside of a loop costs instructions in every turn."""
    module = parse(MODULE)
    for fragment, kept in ((tally(), False), (TIME, True)):
        text = inject(module, {"loops_in_loops": [Probe(fragment, "exit")]}).text
        assert ("%gpubpf_0gone" in text) is kept


def test_the_check_finds_a_wait() -> None:
    """It is no check that passes whatever it is given."""
    code = [".L_x_1:", "LDG.E R1, [R2] ;", "@P0 BRA `(.L_x_2) ;", "STG.E [R2], R1 ;", ".L_x_2:", "BSYNC B0 ;"]
    code += ["MOV R4, R5 ;", "BRA `(.L_x_3) ;", ".L_x_3:", "CS2R R2, SR_GLOBALTIMERLO ;", "EXIT ;"]
    assert waits_before(code, _CLOCK) == [9]
    assert waits_before([*code[:5], "NOP ;", *code[6:]], _CLOCK) == []
    assert waits_before([*code[:6], "@P1 BRA `(.L_x_1) ;", *code[6:]], _CLOCK) == []


def test_most_kernels_do_not_wait_by_themselves(tmp_path: Path) -> None:
    """Or the check above would compare nothing."""
    original = sass(assembled(MODULE, "sm_90", tmp_path)[0])
    waiting = [name for name in BODIES if waits_before(original[name], re.compile(r"\bEXIT\b"))]
    assert len(waiting) <= 2, waiting


@pytest.mark.parametrize("name", BODIES)
def test_lanes_that_stay_wait_for_the_probe_of_those_that_leave(name: str) -> None:
    """Only for a program that reads the multiprocessor's clock: each branch to an exit has a barrier for the lanes that met there."""
    counts = {}
    for kind, fragment in (("clock", ring_program()), ("timer", TIME)):
        made = inject(parse(MODULE), {name: (Probe(fragment, "exit"),)})
        lines = [line.strip() for line in made.text.splitlines()]
        barriers = [n for n, line in enumerate(lines) if line == "bar.warp.sync %gpubpf_0parting;"]
        # Behind it, those that leave do.
        assert all(lines[n + 1] == "@%gpubpf_0gone exit;" for n in barriers)
        assert len(barriers) == sum(line == "activemask.b32 %gpubpf_0parting;" for line in lines)
        counts[kind] = len(barriers)
    assert counts["timer"] == 0
    assert (counts["clock"] > 0) == (name not in ("both_ways_to_uni", "switch"))

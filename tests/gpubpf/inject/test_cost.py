"""The count of the instructions that injection adds, for --budget."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine_device import Array
from gpubpf.ebpf.maps import SPENT, SPENT_SHAPE
from gpubpf.ebpf.probe import Probe
from gpubpf.inject import cost, plan
from gpubpf.inject.cost import ADDED, COST, SAMPLED_COST, SKIPPED, longest_path
from gpubpf.inject.sampling import SKIPS
from gpubpf.inject.values import PtxProbe
from gpubpf.lower.fragment import Fragment
from gpubpf_points import HEAD, Run

THREADS = 40
# Threads below 8 leave at once; the others store 4 times.
KERNEL = f"""{HEAD}
.visible .entry k(.param .u64 p) {{
    .reg .b64 %rd<4>; .reg .b32 %r<4>; .reg .pred %p;
    ld.param.u64 %rd1, [p];
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p, %r1, 8;
    @%p bra $gone;
    mul.wide.u32 %rd2, %r1, 4;
    add.u64 %rd3, %rd1, %rd2;
    mov.u32 %r2, 4;
$more:
    st.global.u32 [%rd3], %r2;
    sub.u32 %r2, %r2, 1;
    setp.ne.u32 %p, %r2, 0;
    @%p bra $more;
$gone:
    ret;
}}"""
OWN = 8 * (4 + 1) + 32 * (4 + 3 + 4 * 4 + 1)
# Each thread calls a function, which threads below 8 do not return from.
CALLING = f"""{HEAD}
.func inner(.param .b32 t) {{
    .reg .b32 %r<2>; .reg .pred %p;
    ld.param.b32 %r1, [t];
    setp.lt.u32 %p, %r1, 8;
    @%p exit;
    ret;
}}
.visible .entry k(.param .u64 p) {{
    .reg .b32 %r<2>;
    mov.u32 %r1, %tid.x;
    {{ .param .b32 t; st.param.b32 [t], %r1; call inner, (t); }}
    ret;
}}"""
CLOCK = "mov.u64 %x, %globaltimer;\n"


def program(count: int = 12, before: str = "", after: str = "", seldom: tuple[str, ...] = ()) -> Fragment:
    """Return a program of so many instructions between others."""
    lines = "add.u64 %x, %x, 1;\n" * count
    return Fragment(
        "program", f"{{\n.reg .b64 %x; .reg .pred %q;\n{before}{lines}{after}}}", (), seldom=seldom
    )


def counted(kernel: str, *probes: PtxProbe) -> list[int]:
    """Run the kernel with these programs. Return the sums: own, added and skipped instructions."""
    run = Run(kernel, probes)
    run("k", THREADS, Array(np.zeros(THREADS, np.uint32)))
    parts = run.maps[SPENT].host[: math.prod(SPENT_SHAPE)].reshape(SPENT_SHAPE)
    return [int(total) for total in parts.sum(axis=(0, 2))]


def spent(*probes: PtxProbe, kernel: str = KERNEL) -> tuple[int, int]:
    """Return the kernel's own instructions, and the added ones, without sampling."""
    own, added, skipped = counted(kernel, *probes, Probe(COST, "exit", ADDED))
    assert skipped == 0
    return own, added


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("point", "runs", "before"),
    [
        ("entry", THREADS, ""),
        ("exit", THREADS, ""),
        ("exit", THREADS, CLOCK),  # the exit stays in the loop, and threads that go on skip the program
        ("access", 4 * 32, ""),
        ("value", 4 * 32, ""),
        ("basic_block", 8 * 2 + 32 * (2 + 4 + 1), ""),
        ("branch", 8 + 32 * 5, ""),
        ("instruction", 8 * 2 + 32 * (2 + 3 + 4 * 2), ""),
    ],
)
def test_a_program_counts_as_often_as_it_runs(point: str, runs: int, before: str) -> None:
    own, added = spent(Probe(program(0, before), point))
    assert own == OWN and added > 0
    assert spent(Probe(program(12, before), point)) == (own, added + 12 * runs)


@pytest.mark.parametrize(
    ("point", "runs"), [("function_entry", THREADS), ("function_exit", 32), ("exit", THREADS)]
)
def test_called_functions_count(point: str, runs: int) -> None:
    own, added = spent(Probe(program(0), point), kernel=CALLING)
    assert own == 8 * (3 + 3) + 32 * (3 + 4 + 1)
    assert spent(Probe(program(12), point), kernel=CALLING) == (own, added + 12 * runs)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "point", ["entry", "exit", "access", "value", "basic_block", "branch", "instruction"]
)
def test_with_sampling_threads_count_what_they_execute_in_chosen_blocks_and_in_others(point: str) -> None:
    """Whether their block is chosen or not."""

    def sampled(count: int) -> list[int]:
        programs = Probe(program(count), point, sampled="block"), Probe(SAMPLED_COST, "exit", SKIPPED)
        return counted(KERNEL, *programs)

    runs = (spent(Probe(program(12), point))[1] - spent(Probe(program(0), point))[1]) // 12
    (own, few, left), (again, many, other) = sampled(0), sampled(12)
    assert own == again == OWN
    assert many == few + 12 * runs
    assert other == left < few


def test_a_kernel_without_other_programs_counts_the_counting() -> None:
    """Two reductions and what leads to them for each thread, and two additions for each basic block."""
    text = Run(KERNEL, [Probe(COST, "exit", ADDED)]).injected.text
    added = [part.partition("//gpubpf}")[0] for part in text.split("//gpubpf{")[1:]]
    tallies = [
        int(line.split()[-1].rstrip(";"))
        for line in text.splitlines()
        if f"_0{ADDED}, %gpubpf_0{ADDED}," in line
    ]
    assert sum(tallies) == sum(longest_path(part, {}) for part in added)


@pytest.mark.every(2)
@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("taken", [True, False])
def test_what_a_program_seldom_does_counts_where_it_does_it(
    inline: bool, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not inline:
        monkeypatch.setattr(plan, "MAX_INLINE", 0)
        monkeypatch.setattr(plan, "MIN_FUNCTION", 0)
    to_it = f"setp.{'ne' if taken else 'eq'}.u64 %q, %x, 1000;\n@%q bra $L__BB0_1;\n"
    found = []
    for count in (3, 300):
        rest = "bra $L__BB0_2;\n$L__BB0_1:\n" + "add.u64 %x, %x, 2;\n" * count + "$L__BB0_2:\n"
        probes = [Probe(program(12, to_it, rest, seldom=("$L__BB0_1",)), "access")]
        found.append(spent(*probes))
        text = Run(KERNEL, [*probes, Probe(COST, "exit", ADDED)]).injected.text
        assert "gpubpf seldom" not in text and "gpubpf often" not in text
    runs = (spent(Probe(program(12), "access"))[1] - spent(Probe(program(0), "access"))[1]) // 12
    assert found[1][1] - found[0][1] == taken * 297 * runs


@pytest.mark.parametrize("kinds", [(ADDED,), (ADDED, SKIPPED)])
def test_what_counts_a_seldom_block_counts_itself(kinds: tuple[str, ...]) -> None:
    added = "\n".join((cost._SELDOM, *["add.u64 %x, %x, 2;"] * 5, cost._OFTEN, "ret;"))
    lines = cost._with_seldom_blocks(added, {}, kinds).split("\n")
    assert lines == [*(cost.add(kind, 5 + len(kinds)) for kind in kinds), *["add.u64 %x, %x, 2;"] * 5, "ret;"]


def test_a_program_that_became_a_function_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MAX_INLINE", 0)
    monkeypatch.setattr(plan, "MIN_FUNCTION", 0)
    (_, few), (_, many) = (spent(Probe(program(count), "access")) for count in (3, 15))
    assert many - few == 12 * 4 * 32


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("", 0),
        ("{ .reg .b32 %a; mov.u32 %a, 1; } // mov.u32 %a, 2;", 1),
        ("mov.b64 %a, {%b, %c}; st.shared::cta.u32 [%a], %b;", 2),
        ("@%p bra $x; add.u32 %a, %a, 1; add.u32 %a, %a, 1; $x: add.u32 %a, %a, 1;", 4),
        ("@%p bra $x; add.u32 %a, %a, 1; bra.uni $y; $x: add.u32 %a, %a, 1; add.u32 %a, %a, 2; $y:", 3),
        ("$x: add.u32 %a, %a, 1; @%p bra $x; add.u32 %a, %a, 1;", 3),  # one turn of a loop
        (
            "{ @%p bra $x; add.u32 %a, %a, 1; $x: } { bra $x; add.u32 %a, %a, 1; $x: }",
            3,
        ),  # labels of two scopes
        ("{ call.uni gpubpf_program0, (a); call gpubpf_program0, (a); }", 22),
        ("call gpubpf_program1;", 1),
        (f"@{SKIPS} bra $x; add.u32 %a, %a, 1; add.u32 %a, %a, 1; $x:", 3),
    ],
)
def test_the_longest_path(text: str, length: int) -> None:
    assert longest_path(text, {"gpubpf_program0": 10}) == length
    assert longest_path(text, {"gpubpf_program0": 10}, skips=True) == (1 if SKIPS in text else length)

"""How benchmarks/executed.py tells which machine instructions a basic block became."""

from __future__ import annotations

from pathlib import Path

import pytest

import executed
from gpubpf_sass import nvdisasm

DIVISION = """.version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 p)
{
 .reg .b64 %rd<2>; .reg .f32 %f<4>;
 ld.param.u64 %rd1, [p];
 ld.global.v2.f32 {%f1, %f2}, [%rd1];
 div.rn.f32 %f3, %f1, %f2;
 st.global.f32 [%rd1], %f3;
 ret;
}
"""


def test_functions_of_ptxas_belong_to_no_line(tmp_path: Path) -> None:
    """A division of unusual numbers is done in a function that lies behind the kernel, and so behind the line of `ret`."""
    nvdisasm()
    file = tmp_path / "k.ptx"
    file.write_text(DIVISION)
    text = executed.Text(file)
    (last,) = (line for line, instruction in text.at.items() if instruction.opcode == "ret")
    (division,) = (line for line, instruction in text.at.items() if instruction.opcode == "div")
    assert text.machine([last]) < 10 < text.machine([division]) < 40
    assert text.accesses(division - 1) and text.accesses(division + 1) and not text.accesses(division)
    assert text.moved(division - 1) == (8, 0)


def test_the_worst_program_is_told_with_its_reason() -> None:
    def result(program: str, own: float, probed: float) -> executed.Result:
        alone = executed.Executed(lanes=32, warps=1, machine=own, starts=2, accesses=4)
        more = executed.Executed(lanes=64, warps=2, machine=probed)
        return executed.Result(program, "memtrace", alone, more, {"k": (16, 40)}, "k")

    results = [result("small", 20, 200), result("large", 400, 800), result("middle", 100, 300)]
    row = "| memtrace | 3 | 3.00 | 3.00 | 10.00 | small | 10 (50) | 5.0 (25.0) |"
    assert row in executed.report(results).splitlines()


def test_only_programs_with_a_name_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("examples/matmul", "workloads/tiled", "workloads/triad")
    measured: list[str] = []
    monkeypatch.setattr(executed, "programs", lambda suites: ((name, [], None, {}) for name in names))
    monkeypatch.setattr(executed, "measure", lambda name, *rest: measured.append(name) or ())
    assert executed.main(["--only", "workloads/t*", "workloads"]) == 1
    assert measured == ["workloads/tiled", "workloads/triad"]
    assert "correct --only" in capsys.readouterr().err

from __future__ import annotations

import pytest

from cudasim.translate import function
from cudasim.translate.arithmetic import TABLE as TRANSLATED
from gpubpf.ptx.module import PtxInstruction
from gpubpf.ptx.opcodes import TABLE, facts


def _facts(name: str) -> str:
    opcode, *modifiers = name.split(".")
    return facts(PtxInstruction(opcode, tuple(modifiers))).name


@pytest.mark.parametrize(
    ("instruction", "row"),
    [
        ("cp.async.bulk.tensor.2d.shared::cluster.global.tile", "cp.async.bulk.tensor"),
        ("cp.async.bulk.shared::cluster.global", "cp.async"),
        ("cp.async.bulk.commit_group", "cp.async.bulk.commit_group"),
        ("cp.reduce.async.bulk.global.shared::cta.add.u32", "cp.reduce"),
        ("ld.global.u32", "ld"),
        ("ldx.global.u32", ""),
    ],
)
def test_the_row_with_the_most_modifiers_counts(instruction: str, row: str) -> None:
    assert _facts(instruction) == row


def test_each_row_with_modifiers_has_a_row_for_its_opcode() -> None:
    assert {name.partition(".")[0] for name in TABLE if "." in name} <= TABLE.keys()


def test_each_instruction_that_the_device_executes_is_known() -> None:
    assert TRANSLATED.keys() | function._CONTROL.keys() <= TABLE.keys()

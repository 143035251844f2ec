"""Host programs as code for aarch64, run in an emulator: they compute what the same programs compute on this machine."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
from pathlib import Path

import pytest

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.errors import VerifyError
from gpubpf.lower import host_code
from gpubpf_asm import END, alu, load, lookup, mov, program, store
from gpubpf_host import Agent
from gpubpf_machine import CROSS, needs_aarch64, run_for_aarch64

HERE = Path(__file__).parent
OPERATIONS = (b.ADD, b.SUB, b.MUL, b.DIV, b.MOD, b.OR, b.AND, b.XOR)


@needs_aarch64
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the code to compare with is for x86-64")
def test_host_programs_compute_the_same(tmp_path: Path) -> None:
    harness = tmp_path / "harness"
    subprocess.run(
        [f"{CROSS}gcc", "-O1", "-Wall", "-Werror", "-o", harness, HERE / "host_aarch64.c"], check=True
    )
    numbers = random.Random(81)
    for length in (1, 30, 400):
        code = [load(3, 1, 8), load(4, 1, 16), *lookup("out"), mov(9, 0), load(3, 9, 0), load(4, 9, 8)]
        for _ in range(length):
            code += [alu(numbers.choice(OPERATIONS), 3, imm=numbers.getrandbits(30) | 1)]
            code += [alu(numbers.choice(OPERATIONS), 4, 3), alu(b.XOR, 3, 4)]
        out = MapDefinition("out", "shared_array", 4, 64, 1)
        made, function = program([*code, store(9, 0, 3), store(9, 8, 4), *END], (out,), "operation")
        words = (ctypes.c_uint64 * 8)()
        fields = [numbers.getrandbits(64) for _ in range(8)]
        Agent(host_code.lower(made, function), {"out": ctypes.addressof(words)}, {})(*fields)

        native = host_code.lower(made, function, "aarch64")
        (tmp_path / "code").write_bytes(native.code)
        values = [str(fields[v.number]) if v.kind == "context" else "map" for v in native.values]
        done = run_for_aarch64([harness, tmp_path / "code", *values])
        assert [int(line) for line in done.stdout.split()] == list(words)


def test_a_machine_without_an_agent_is_refused() -> None:
    made, function = program([*END], (), "operation")
    with pytest.raises(VerifyError, match="there is no agent for riscv64"):
        host_code.lower(made, function, "riscv64")

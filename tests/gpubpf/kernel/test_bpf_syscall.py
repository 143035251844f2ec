"""What the kernel's verifier says, and that signals do not count as a refusal."""

from __future__ import annotations

import errno
import os
import signal
import struct

import pytest

from gpubpf.kernel import bpf_syscall
from gpubpf.kernel.bpf_syscall import Rejected

LOG = """\
returning from callee:
 frame1: R0_w=scalar(id=4) R10=fp0
to caller at 38:
 R0_w=scalar(id=4) R6=ctx() R10=fp0
38: (b7) r0 = 1                       ; R0_w=1
47: (61) r2 = *(u32 *)(r4 +0)
R4 unbounded memory access, make sure to bounds check any such access
processed 65 insns (limit 1000000) max_states_per_insn 0 total_states 4 peak_states 4 mark_read 0
"""


@pytest.mark.parametrize(
    "after", ["", "R1_w=scalar() R2=map_value(ks=4,vs=64)\n", "caller:\n frame1: R0=0\n"]
)
def test_the_reason_is_a_message_and_no_state_of_registers(after: str):
    message, at = Rejected(OSError(errno.EACCES, "Permission denied"), LOG + after).reason()
    assert message == "R4 unbounded memory access, make sure to bounds check any such access"
    assert at == 47


def test_signals_while_the_verifier_runs():
    """The kernel gives up with EAGAIN if a signal comes. The verifier takes far longer for this loop than the signals are apart."""

    def instruction(opcode: int, registers: int, offset: int = 0, value: int = 0) -> bytes:
        return struct.pack("<BBhi", opcode, registers, offset, value)

    rounds = 200_000
    code = instruction(0xB7, 1, value=rounds) + instruction(0xB7, 0)  # r1 = rounds; r0 = 0
    code += instruction(0x07, 0, value=1) + instruction(0x17, 1, value=1)  # r0 += 1; r1 -= 1
    code += instruction(0x55, 1, -3) + instruction(0x95, 0)  # if r1 != 0 goto -3; exit
    came = 0

    def count(*_: object) -> None:
        nonlocal came
        came += 1
        if came == 4:
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        os.close(bpf_syscall.load_program(1, code))  # BPF_PROG_TYPE_SOCKET_FILTER
    except PermissionError:
        pytest.skip("needs CAP_BPF")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert came == 4


def test_an_array_of_each_cpu_without_batches(monkeypatch: pytest.MonkeyPatch):
    """As before Linux 5.13, which answers so."""
    try:
        file = bpf_syscall.create_map(bpf_syscall.PERCPU_ARRAY, 4, 8, 3)
    except PermissionError:
        pytest.skip("needs CAP_BPF")
    size = bpf_syscall.value_bytes(bpf_syscall.PERCPU_ARRAY, 8)
    values = [bytes([number]) * size for number in (1, 2, 3)]
    for number, value in enumerate(values):
        bpf_syscall.update(file, number.to_bytes(4, "little"), value)
    call = bpf_syscall.bpf

    def without_batches(command: int, *arguments: object):
        if command == bpf_syscall._MAP_LOOKUP_BATCH:
            raise OSError(524, "Unknown error 524")
        return call(command, *arguments)

    with_batches = bpf_syscall.read_all(file, bpf_syscall.PERCPU_ARRAY, 4, 8, 3)
    monkeypatch.setattr(bpf_syscall, "bpf", without_batches)
    assert bpf_syscall.read_all(file, bpf_syscall.PERCPU_ARRAY, 4, 8, 3) == with_batches
    assert with_batches == (struct.pack("<3I", 0, 1, 2), b"".join(values))
    os.close(file)

"""What the kernel's verifier says, without a kernel."""

from __future__ import annotations

import errno

import pytest

from gpubpf.process.bpf_syscall import Rejected

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

"""Decides whether a device program may run: by the kernel's verifier, and by rules for what a GPU adds."""

from __future__ import annotations

from gpubpf.ebpf.bytecode import BpfFunction, Program
from gpubpf.verify import kernel
from gpubpf.verify.rules import check
from gpubpf.verify.values import Checked, CheckedAccess, CheckedCall

__all__ = ["Checked", "CheckedAccess", "CheckedCall", "check", "verify"]


def verify(program: Program, function: BpfFunction) -> tuple[Checked, str | None]:
    """Both gates for one device program. Raises VerifyError, whose message names the instruction and the C line.

    Our own goes first, since the kernel's needs to be told which loads read the context. Returns what was learnt, and the
    release of the kernel whose verifier agreed: None where it cannot be asked (it needs CAP_BPF, as compiling does: what
    is compiled here is judged here, and what is prebuilt carries its verdict).
    """
    checked = check(program, function)
    return checked, kernel.check(program, checked)

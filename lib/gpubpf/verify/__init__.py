"""Decides whether a device program may run: the kernel's verifier first, then what a GPU adds."""

from __future__ import annotations

from gpubpf.bytecode import Function, Program
from gpubpf.verify.rules import Access, Call, Checked, check

__all__ = ["Access", "Call", "Checked", "check", "verify"]


def verify(program: Program, function: Function) -> Checked:
    """Both gates for one device program. Raises VerifyError, whose message names the instruction and the C line.

    The kernel's verifier needs CAP_BPF; it is left out where that is missing (compiling needs it as well, so what
    was compiled here was judged here, and what is prebuilt carries its verdict).
    """
    from gpubpf.verify import kernel

    kernel.check(program, function)
    return check(program, function)

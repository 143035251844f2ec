"""Decide whether a device program may run: by the kernel's verifier, and by additional rules for GPUs."""

from __future__ import annotations

from gpubpf.ebpf.bytecode import BpfFunction, Program
from gpubpf.verify import kernel
from gpubpf.verify.rules import check
from gpubpf.verify.values import Checked


def verify(program: Program, function: BpfFunction) -> tuple[Checked, str | None]:
    """Verify one device program by both gates. Raises VerifyError, which names the instruction and the C line.

    Our own gate is the second one but runs first, because it finds the loads that read the context, which the first gate must know.

    Returns what our gate learnt, and the release of the kernel whose verifier accepted the program. The release is None without a
    verdict of the kernel, for example without CAP_BPF. Prebuilt programs carry the verdict from when they were built.
    """
    checked = check(program, function)
    return checked, kernel.check(program, checked)

"""For tests that compile C: the program, or a skip with the reason where bcc cannot be used."""

from __future__ import annotations

import pytest

from gpubpf.ebpf import compile
from gpubpf.ebpf.bytecode import Program
from gpubpf.errors import CompileError


def compiled(text: str) -> Program:
    try:
        return compile.compile_text(text)
    except CompileError as error:
        if any(reason in str(error) for reason in ("python3-bpfcc", "CAP_BPF", "kernel headers")):
            pytest.skip(str(error))
        raise

"""The processor that this Python process runs on."""

from __future__ import annotations

import os

X86_64, AARCH64 = "x86_64", "aarch64"
NAME = os.uname().machine  # X86_64, AARCH64, or another of Linux's names
IS_X86_64 = NAME == X86_64
LIBRARIES = f"/usr/lib/{NAME}-linux-gnu"  # where Debian and Ubuntu have libraries for it

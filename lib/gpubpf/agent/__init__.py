"""The agent: a C++ library that the driver loads into each traced process, and this side of its protocol."""

from __future__ import annotations

from pathlib import Path

LIBRARY = Path(__file__).parent / "lib" / "libgpubpf-agent.so"

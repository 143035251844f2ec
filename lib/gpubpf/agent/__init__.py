"""The agent, a C++ library that is loaded into each traced process, and the tool's side of its protocol."""

from __future__ import annotations

from pathlib import Path

LIBRARY = Path(__file__).parent / "lib" / "libgpubpf-agent.so"
HSA_LIBRARY = LIBRARY.with_name("libgpubpf-agent-hsa.so")  # for AMD GPUs

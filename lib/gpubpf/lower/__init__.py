"""Lowering of verified device programs: one lowering (`ir.py`), one table per target (`nvptx.py`)."""

from gpubpf.lower.ir import Argument
from gpubpf.lower.nvptx import Fragment, lower

__all__ = ["Argument", "Fragment", "lower"]

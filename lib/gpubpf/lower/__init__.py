"""Lowering of verified device programs: one lowering (`ir.py`), one table per target (`nvptx.py`)."""

from gpubpf.lower.fragment import Argument, Fragment

__all__ = ["Argument", "Fragment"]

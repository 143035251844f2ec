"""Garbage is looked for seldom while a tool starts, and as usual from then on."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import gc, sys
gc.set_threshold(int(sys.argv[1]), 8, 9)
from gpubpf.show import cli, garbage
cli.command("tool")(lambda argv: print(gc.get_threshold()[0]) or 0)()
garbage.as_usual()
print(*gc.get_threshold()[:2])
"""


@pytest.mark.parametrize("usual, loading", [(700, 50_000), (0, 0), (90_000, 90_000)])
def test_the_threshold_while_a_tool_starts(usual: int, loading: int) -> None:
    """0: the caller has turned collection off."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(usual)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(loading), str(usual), "8"]

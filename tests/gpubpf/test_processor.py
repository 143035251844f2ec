"""One module knows which processor this is."""

from __future__ import annotations

import re
from pathlib import Path

LIBRARIES = Path(__file__).resolve().parents[2] / "lib"


def test_nothing_else_asks_which_processor_this_is() -> None:
    asks = re.compile(r"uname\(\)\.machine|uname\(\)\[4\]|platform\.(machine|processor|uname)\(")
    found = {
        path.relative_to(LIBRARIES).as_posix()
        for path in LIBRARIES.rglob("*.py")
        if asks.search(path.read_text())
    }
    assert found == {"gpubpf/processor.py"}

"""Comments, docstrings and messages are plain English: patterns that make a reader search for what is meant."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = {
    'write "is not a", not "is no"': re.compile(
        r"(?<!there )(?<!There )\b(?:is|are|was|were) no (?!longer|more|less|fewer|such)[a-z]"
    ),
    'name the thing first: no sentence begins with "Of"': re.compile(
        r'(?:# |// |\. |""")Of (?:the|a|an|each|all|those|such|several) '
    ),
}


def _sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "lib", "tools"], capture_output=True, text=True, check=True
    )
    paths = (ROOT / name for name in listed.stdout.splitlines())
    return [path for path in paths if path.suffix in (".py", ".cpp", ".h") and path.is_file()]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
@pytest.mark.parametrize("rule", PATTERNS)
def test_sources_are_plain_english(rule: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in _sources()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PATTERNS[rule].search(line)
    ]
    assert not found, rule + "\n" + "\n".join(found)

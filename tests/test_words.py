"""Comments, docstrings and messages are plain English: patterns that make a reader search for what is meant."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Rules for all sources.
PATTERNS = {
    'write "is not a", not "is no"': re.compile(
        r"(?<!there )(?<!There )\b(?:is|are|was|were) no (?!longer|more|less|fewer|such)[a-z]"
    ),
    'name the thing first: no sentence begins with "Of"': re.compile(
        r'(?:# |// |\. |""")Of (?:the|a|an|each|all|those|such|several) '
    ),
    'knowledge is "about" something, not "of" it': re.compile(r"\bknown of\b"),
    'lanes "diverge", they do not "part"': re.compile(r"\blanes (?:may )?part\b"),
    'name the list that the loop appends to, not "which grows"': re.compile(r"\bwhich grows\b"),
    'say what an empty value means ("() for all"), not "none named"': re.compile(r"\bnone named\b"),
    'write "prefix of", not "what begins"': re.compile(r"\b[Ww]hat begins (?:the|a)\b"),
}
# Rules for the packages whose sources follow them. Add a package when it does.
PACKAGES = tuple(
    f"lib/{name}/"
    for name in (
        *(f"gpubpf/{name}" for name in ("ebpf", "gcn", "images", "inject", "lower", "ptx", "verify")),
        "cudasim/translate",
    )
)
PACKAGE_PATTERNS = {
    "a docstring explains one parameter a line": re.compile(
        r'`\w+`: .*(?<!e\.g)[.:;] `\w+`(?:, `\w+`)*: |^(?:\s*"""[^`]*)?\s*\w+: [^"`]*\. [a-z_]+: '
    ),
    'name the thing first: no comment begins with "of"': re.compile(r"# [Oo]f [a-z`]"),
    'write "record", not "note" or "take note"': re.compile(r'"""Note |\b[Tt]ake note\b'),
    'name the number: no noun is left out after "so many"': re.compile(r"\bso many(?! \w+ that)\b"),
    'only people say and tell: write "print", "report", "state" or "describe"': re.compile(
        r"\b(?:ptxas|driver|API|PTX|compiler|tool|header|launch|program|mask)s? (?:says?|said|tells?|told)\b"
    ),
    "only people ask: an instruction tests, a caller passes": re.compile(
        r"\basks whether\b|\bwho asks\b", re.I
    ),
    'no pronoun instead of the noun: "the same of", "that of it", "what of it"': re.compile(
        r"\b(?:the same of|what of it|that of it|those of which|of which are)\b"
    ),
}


def _sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "lib", "tools"], capture_output=True, text=True, check=True
    )
    paths = (ROOT / name for name in listed.stdout.splitlines())
    return [path for path in paths if path.suffix in (".py", ".cpp", ".h") and path.is_file()]


def _check(rule: str, pattern: re.Pattern[str], paths: list[Path]) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, rule + "\n" + "\n".join(found)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
@pytest.mark.parametrize("rule", PATTERNS)
def test_sources_are_plain_english(rule: str) -> None:
    _check(rule, PATTERNS[rule], _sources())


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
@pytest.mark.parametrize("rule", PACKAGE_PATTERNS)
def test_packages_are_plain_english(rule: str) -> None:
    paths = [
        path
        for path in _sources()
        if path.suffix == ".py" and path.relative_to(ROOT).as_posix().startswith(PACKAGES)
    ]
    assert len(paths) > 100
    _check(rule, PACKAGE_PATTERNS[rule], paths)


def test_patterns_find_what_they_forbid() -> None:
    before = {
        'knowledge is "about" something, not "of" it': "Return what is known of the result.",
        'lanes "diverge", they do not "part"': "Yield the branches at which lanes may part.",
        "a docstring explains one parameter a line": "    `size`: of each. `more`: bits to add.",
        'name the thing first: no comment begins with "of"': "MOST = 64  # of a function",
        'write "record", not "note" or "take note"': '"""Note an access with a probe."""',
        'name the number: no noun is left out after "so many"': "Return the warps with so many registers.",
        "only people ask: an instruction tests, a caller passes": "an instruction asks whether there is an address",
    }
    every = PATTERNS | PACKAGE_PATTERNS
    assert [rule for rule, line in before.items() if not every[rule].search(line)] == []

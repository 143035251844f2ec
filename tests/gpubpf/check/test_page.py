"""What docs/tools/gpubpf.md and README show of `gpubpf check` is what it prints today."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf.__main__
from gpubpf.check import table
from gpubpf.check.finding import STATES

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/tools/gpubpf.md").read_text()
TITLES = [check.title for check in table.CHECKS]
FIRST = re.compile(rf"({'|'.join(STATES)}) +(\S+(?: \S+)*)  +(.*)")


def rows(text: str) -> dict[str, tuple[str, str]]:
    """Return the state of each entry, and what follows from it and is to be done, by title."""
    found: dict[str, tuple[str, str]] = {}
    for entry in re.split(rf"^(?={'|'.join(STATES)})", text, flags=re.MULTILINE):
        if first := FIRST.match(entry):
            words = " ".join(entry.split())
            found[first[2]] = first[1], words[found_at:] if (found_at := words.find(" so: ")) >= 0 else ""
    return found


def shown(command: str) -> dict[str, tuple[str, str]]:
    block = re.search(rf"\$ {command}\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    return rows(block[1])


def test_the_checks_that_the_page_shows() -> None:
    entries = shown("gpubpf check")
    assert len(entries) >= 5
    assert [*entries] == [title for title in TITLES if title in entries]


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="the page shows a machine without a GPU")
def test_an_entry_in_the_same_state_says_the_same() -> None:
    as_user = {} if os.geteuid() else {"user": 65534, "group": 65534, "extra_groups": []}
    command = [sys.executable, "-m", "gpubpf", "check", "--timeout", "60"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "lib")}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd="/", **as_user)
    printed = rows(done.stdout)
    assert {*printed} <= {*TITLES}, done.stderr
    same = [
        title for title, (state, _) in shown("gpubpf check").items() if printed.get(title, ("",))[0] == state
    ]
    assert same, done.stdout
    for title in same:
        assert printed[title] == shown("gpubpf check")[title]


def test_the_names_of_a_process() -> None:
    manual = (ROOT / "man/man8/gpubpf.8").read_text()
    listed = re.search(r"In a process: (.*), and then the name of each tool", manual)
    assert listed is not None
    tools = [path.stem for path in (ROOT / "tools").glob("*.py")]
    for name in shown(r"gpubpf check -p \d+"):
        assert {*name.removesuffix(",").split(", ")} <= {*listed[1].split(", "), *tools}


@pytest.mark.parametrize("page", ["README.md", "docs/tools/gpubpf.md"])
def test_its_command_lines(page: str) -> None:
    lines = re.findall(r"^(?:    |\$ )?(gpubpf check.*)$", (ROOT / page).read_text(), re.MULTILINE)
    assert lines
    for line in lines:
        words = re.split(r"  +#| && | \| ", line)[0]
        gpubpf.__main__.build_parser().parse_args(shlex.split(words)[1:])

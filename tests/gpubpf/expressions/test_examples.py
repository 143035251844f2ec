"""The examples of --help and the example texts are specifications that the tools take.

tests/test_contract.py reads those of the man pages.
"""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from gpubpf.expressions import specs
from gpubpf.show import cli
from gpubpf.show.parsed import LookOptions

ROOT = Path(__file__).resolve().parents[3]
READERS = {"gpucount": specs.count, "gpudist": None, "gputrace": specs.trace}


def examples(tool: str) -> list[str]:
    """Return the command lines of a tool, without the program that they measure."""
    if str(ROOT / "tools") not in sys.path:
        sys.path.insert(0, str(ROOT / "tools"))
    found = [line.strip() for line in importlib.import_module(tool).EXAMPLES.split("\n")]
    for name in (f"tools/{tool}_example.txt", f"docs/tools/{tool}.md", "README.md", "docs/expressions.md"):
        found += re.findall(rf"^(?:# |    \$ )?({tool} .*)$", (ROOT / name).read_text(), re.MULTILINE)
    return [
        re.split(r"\s{2,}#? ?|\s# ", line)[0] for line in found if line.startswith(f"{tool} ") and "'" in line
    ]


@pytest.mark.parametrize("tool", READERS)
def test_every_example_is_taken(tool: str) -> None:
    commands = examples(tool)
    assert len(commands) > 10
    for command in commands:
        args = cli.parse(importlib.import_module(tool).build_parser(), shlex.split(command)[1:])
        if "lanes ==" in command or '"%s", lane' in command:  # examples of mistakes
            continue
        if (reader := READERS[tool]) is None:
            of = importlib.import_module(tool).distributions_of
            assert of(args.kinds, args.specs, args.width, LookOptions()), command
        else:
            assert specs.read(args.specs, LookOptions(), reader), command

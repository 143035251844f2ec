"""Which commands and options a client may use: those that measure, and that neither start a program nor write or read files."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from gpubpf.errors import UsageError
from gpubpf.show import cli
from gpubpf.show.table import printable

TOOLS = (
    *(
        "launchlate",
        "gpuprofile",
        "gpumem",
        "gputop",
        "threadhist",
        "memtrace",
        "kernelretsnoop",
        "cudasnoop",
        "hipsnoop",
    ),
    *("warpdiv", "barrierlate", "nansnoop", "gpuhang", "gpucount", "gpudist", "gputrace"),
)
SPEC_TOOLS = ("gpucount", "gpudist", "gputrace")  # their operands are SPECs
# The others choose the target, the form and the place of the results, or files.
OPTIONS = frozenset(
    (
        *("--kernel", "--launch", "--sample", "--sample-blocks", "--sample-warps", "--budget", "--seed"),
        *("--block", "--thread", "--graphs", "--no-graphs", "--comm", "--cgroup", "-t"),
        *("--by", "--work", "--top", "--weight", "--kinds", "--stores", "--after", "--width", "--sort"),
        *("--slow", "--timeline", "--stacks", "-s", "--errors", "--api", "--why", "-e", "--snoop", "-v"),
        *("--footprint", "--granule", "--no-allocations", "--site", "--address", "--warps"),
        *("-H", "-L", "-C"),
    )
)


def parser(tool: str) -> cli.Parser:
    """Return the parser of a tool. Raises UsageError for a name that is not in TOOLS."""
    if tool not in TOOLS:
        raise UsageError(f"there is no tool {printable(tool)}; the tools are {', '.join(TOOLS)}")
    made: cli.Parser = importlib.import_module(f"gpubpf.tools.{tool}").build_parser()
    return made


def check(tool: str, options: Sequence[str], specs: Sequence[str]) -> None:
    """Raise UsageError for options that a client may not use, and for operands where the tool takes none.

    options: each option is a word; its value is the next word.
    specs: the SPECs of gpucount, gpudist or gputrace.
    """
    known = parser(tool)._option_string_actions
    words = iter(options)
    for word in words:
        if word not in known:
            raise UsageError(f"{tool} has no option {printable(word)}; an option and its value are two words")
        if word not in OPTIONS:
            raise UsageError(f"{word} is not offered here; run {tool} at the shell")
        if known[word].nargs == 0:
            continue
        value = next(words, None)
        if value is None or value.startswith("-"):
            raise UsageError(f"{word} needs a value")
    if specs and tool not in SPEC_TOOLS:
        raise UsageError(f"{tool} takes no SPEC")
    for spec in specs:
        if spec.startswith("-") or ":" not in spec:
            raise UsageError(f"{printable(spec)} is not a SPEC; write POINT:KERNEL, such as entry:*")

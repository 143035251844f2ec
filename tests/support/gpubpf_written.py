"""What pages show of commands: the commands, what is printed, and whether that is what a command prints today."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOOLS = {path.stem for path in (ROOT / "tools").glob("*.py")} | {"cudasim", "hipsim"}
_COMMAND = re.compile(r"[#$] (?:cd (\w+); )?(\S.*)")
# Lines that pages leave out: what the program prints, notices, and the overhead with the lines that continue it.
_LEFT_OUT = re.compile(
    r"^(?:\w+: PASSED|(?:pow|rake|sort): \d+|thread 7 of block 0 says hello .*|\w+: note: .*|embedded device, real clock: .*|"
    r"overhead: .*(?:\n  .*)*)\n",
    re.MULTILINE,
)
_VOLATILE = {"pid": 0, "ts_ns": 0, "duration_ns": 0, "hooks": 0, "hooks_ns": 0, "stood_ns": 0}
_VOLATILE |= {"image_bytes": 0, "drained_bytes": 0, "tid": 0}
# What differs between two runs, and between machines: process and thread numbers, addresses of the host.
_NORMAL = (
    (re.compile(r"\bpid \d+"), "pid N"),
    # gputop's rows: a process with its share, a kernel with its time.
    (re.compile(r"^[ \d]{7}(?=  [a-z]\w*  +\d+\.\d %|  +\d+(\.\d+)? [mnu]?s  )"), "PID"),
    (re.compile(r"^( +\d+\.\d) +\d+ (?=\w)"), r"\1 TID "),
    (re.compile(r"\b0x5[0-9a-f]{11}\b"), "0xHOST"),
    (re.compile(r"\+0x[0-9a-f]+ \("), "+0xN ("),
    (re.compile(r"^/\S*/(?=lib\w+\.so)"), "/DIRECTORY/"),
)


@dataclass
class Written:
    """A command that a page shows.

    page, line   where
    command      as it is written, without `cd`
    folder       the directory of examples/ that it runs in, if not examples/ itself
    shown        the lines below it, as far as the next command
    prose        whether text follows the output in `shown`, after an empty line
    then         commands that come right after it and are not of a tool, such as tail
    """

    page: str
    line: int
    command: str
    shown: list[str] = field(default_factory=list)
    prose: bool = False
    then: list[Written] = field(default_factory=list)
    folder: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.command}"

    @property
    def steps(self) -> list[Written]:
        """This command and those that follow it."""
        return [self, *self.then]

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command)


def written(page: str) -> list[Written]:
    """Return the commands of tools that a page shows with their output."""
    text = (ROOT / page).read_text()
    found: list[Written] = []
    for first, block, prose in _blocks(page, text):
        now: Written | None = None
        for number, line in enumerate(block, first):
            if command := _COMMAND.fullmatch(line):
                now = Written(page, number, command[2], prose=prose, folder=command[1] or "")
                if now.words[0] in TOOLS:
                    found.append(now)
                elif found and now.words[0] != "cd":
                    found[-1].then.append(now)
            elif now is not None:
                now.shown.append(line)
    return found


def _blocks(page: str, text: str) -> Iterator[tuple[int, list[str], bool]]:
    """Yield the parts of a page that show commands: the first line's number, the lines, and whether text follows the output."""
    lines = text.split("\n")
    if page.endswith(".txt"):
        yield 1, lines, True
        return
    block: list[str] = []
    fenced = False
    for number, line in enumerate([*lines, ""], 1):
        if line.startswith("```"):
            fenced = line == "```text"
        elif fenced or line.startswith("    ") or (block and not line and not fenced):
            block.append(line if fenced else line[4:])
            continue
        if any(_COMMAND.fullmatch(one) for one in block[:1]):
            while block and not block[-1]:
                block.pop()
            yield number - len(block), block, False
        block = []


def sh_commands(page: str) -> list[str]:
    """Return the commands of tools in a page's blocks of shell commands, without their comments."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    lines = [re.split(r"\s+# ", line)[0] for block in blocks for line in block.splitlines()]
    lines = [line.removeprefix("sudo ") for line in lines]
    return [line for line in lines if line.split(" ")[0] in TOOLS]


def difference(written: Written, printed: str) -> str:
    """Return what is wrong with the output that a page shows; "" if nothing is.

    A line `...` stands for any lines, and a line that ends with `...` for any rest of it.
    """
    if not any(written.shown) and not written.prose:
        return ""
    shown = [normal(line) for line in written.shown]
    real = [normal(line) for line in essential(printed)]
    ends = _ends(shown, real)
    if not written.prose:
        if len(shown) in ends:
            return ""
    elif any(_is_prose(written.shown[end:]) for end in ends):
        return ""
    reached = max(_reached(shown, real))
    return f"{written}\nline {written.line + 1 + reached} is not what is printed:\n" + "\n".join(
        [*(f"  {line}" for line in written.shown[reached : reached + 3]), "printed:", printed]
    )


_HEADING = re.compile(r" *[A-Z][A-Z-]+(?: +(?:[A-Z][A-Z0-9-]*|s|ms|us))+")


def headings(lines: list[str]) -> list[str]:
    """Return the lines that name the columns of tables, whatever the columns' widths are."""
    return [" ".join(line.split()) for line in lines if _HEADING.fullmatch(line)]


def fields(lines: list[str]) -> dict[str, set[str]]:
    """Return the names that are in the JSON records of each type. A page may leave out some (`...`)."""
    found: dict[str, set[str]] = {}
    for line in lines:
        if match := re.match(r'\{"type":"(\w+)"', line):
            found.setdefault(match[1], set()).update(re.findall(r'"(\w+)":', line))
    return found


def absent(written: Written, printed: str) -> list[str]:
    """Return the columns and JSON fields that a page shows, but that a command did not print."""
    lines = printed.splitlines()
    real, names = headings(lines), fields(lines)
    return [
        *(heading for heading in headings(written.shown) if heading not in real),
        *(
            f"{kind}: {name}"
            for kind, shown in fields(written.shown).items()
            for name in sorted(shown - names.get(kind, set()))
        ),
    ]


def essential(printed: str) -> list[str]:
    """Return the lines that were printed, without those that pages leave out.

    A long message of a tool is wrapped, as on a terminal.
    """
    lines = _LEFT_OUT.sub("", printed).splitlines()
    message = re.compile(rf"({'|'.join(TOOLS)}): ")
    return [part for line in lines for part in (_wrapped(line) if message.match(line) else [line])]


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, 80, break_long_words=False, break_on_hyphens=False)


def normal(line: str) -> str:
    """Return a line without what differs between two runs."""
    if line.startswith("{"):
        return json.dumps(_steady(json.loads(line)))
    for pattern, replacement in _NORMAL:
        line = pattern.sub(replacement, line)
    return line.rstrip()


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _VOLATILE[key] if key in _VOLATILE else _steady(item) for key, item in value.items()}
    return value


def _states(shown: list[str], real: list[str]) -> set[tuple[int, int]]:
    """Return how far both texts can be followed together, as pairs of line numbers."""
    known, todo = set(), [(0, 0)]
    while todo:
        at = todo.pop()
        if at in known:
            continue
        known.add(at)
        here, there = at
        more = there < len(real)
        if more and not real[there]:
            todo.append((here, there + 1))
        if here < len(shown):
            if shown[here] == "...":
                todo.append((here + 1, there))
                if more:
                    todo.append((here, there + 1))
            elif not shown[here]:
                todo.append((here + 1, there))
            elif more and shown[here].endswith("..."):
                if real[there].startswith(shown[here].removesuffix("...").rstrip()):
                    todo += [(here + 1, after) for after in range(there + 1, len(real) + 1)]
            elif more and shown[here] == real[there]:
                todo.append((here + 1, there + 1))
    return known


def _ends(shown: list[str], real: list[str]) -> set[int]:
    """Return after how many lines of `shown` all of `real` can have been shown."""
    return {here for here, there in _states(shown, real) if there == len(real)}


def _reached(shown: list[str], real: list[str]) -> set[int]:
    return {here for here, _ in _states(shown, real)}


def _is_prose(lines: list[str]) -> bool:
    """Return whether all paragraphs of these lines are sentences."""
    paragraphs = [part for part in "\n".join(lines).split("\n\n") if part.strip()]
    sentence = re.compile(r"\s*\S.*(?<!\.\.)[.:?]\s*", re.DOTALL)
    return all(re.match(r" {4}\S", part) or sentence.fullmatch(part) for part in paragraphs)

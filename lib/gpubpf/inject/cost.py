"""Count the instructions that injection adds, for --budget: each thread counts them in registers, as it counts work.

`COST` is a program that adds the counts up when a thread leaves the kernel. `body.py` puts `TALLY` where the count of the statements
that follow begins, and `tallied` replaces it by an addition of their number. The number is that of the longest path through the added
statements, without the parts that programs mark as seldom executed; loops count as one turn. Each basic block of these parts adds its
own number.

With sampling, each thread counts what it would execute in a chosen block or warp (`ADDED`), and what in others (`SKIPPED`). So a
launch tells what launches cost on average, whichever blocks it chose.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from gpubpf.ebpf.maps import SPENT, SPENT_SHAPE
from gpubpf.lower.fragment import Argument, Fragment
from gpubpf.ptx.emit import add, text
from gpubpf.ptx.module import Directive, Function, Statement

from .sampling import SKIPS
from .seldom import blocks_of, reached

# Kinds of work that no tool can ask for: added instructions; those of threads that sampling leaves out. Who asks for the second gets
# the first, too, and the application's instructions.
ADDED, SKIPPED = "added", "skipped"
TALLY = Directive("", "")  # stands for the addition of a number that is not known yet


def _cost(*counts: str) -> Fragment:
    """Return a program that adds these counts, which are fields of its context, to SPENT."""
    parts, numbers, lanes = SPENT_SHAPE
    lines = [
        ".reg .b32 %part, %lane;",
        ".reg .b64 %place;",
        "mov.u32 %part, %smid;",
        f"and.b32 %part, %part, {parts - 1};",
        f"mad.wide.u32 %place, %part, {8 * numbers * lanes}, %gpubpf_base;",
        "mov.u32 %lane, %laneid;",
        "mad.wide.u32 %place, %lane, 8, %place;",
        *(f"red.global.add.u64 [%place+{8 * lanes * n}], %gpubpf_{name};" for n, name in enumerate(counts)),
    ]
    arguments = (Argument(name, "b64", "context", field=name) for name in counts)
    return Fragment(
        "cost", "\n".join(["{", *lines, "}"]), (*arguments, Argument("base", "b64", "map_base", SPENT))
    )


COST = _cost("own", ADDED)
SAMPLED_COST = _cost("own", ADDED, SKIPPED)

_SELDOM = "//gpubpf seldom"  # behind this, a basic block is seldom executed
_OFTEN = "//gpubpf often"  # up to here
# A comment; a label; a statement, which may contain braces. A brace between statements is skipped.
_TOKEN = re.compile(r"//(?P<comment>[^\n]*)|(?P<label>[$\w]+):(?!:)|(?P<statement>[@.$%\w][^;]*);")
_BRANCH = re.compile(r"(?P<guard>@!?%\w+\s+)?bra(?:\.uni)?\s+(?P<target>[$\w]+)$")
_CALL = re.compile(r"(?:@!?%\w+\s+)?call(?:\.uni)?\s+(?P<name>[$\w]+)")


def remarked(fragment: Fragment, ptx: str) -> str:
    """Return the text of a fragment with comments that tell `tallied` which basic blocks it seldom executes."""
    if not fragment.seldom:
        return ptx
    blocks = blocks_of(ptx.splitlines()[1:-1])
    often = reached(blocks, [0], fragment.seldom)
    lines: list[str] = []
    for n, block in enumerate(blocks):
        head = bool(block.label)
        lines += block.lines if n in often else (*block.lines[:head], _SELDOM, *block.lines[head:], _OFTEN)
    return "\n".join(["{", *lines, "}"])


def longest_path(added: str, functions: Mapping[str, int], skips: bool = False) -> int:
    """Return the most instructions that a thread executes in added text, without seldom parts and further turns of loops.

    functions: the same of the functions that the text may call, by name. skips: of a thread that sampling leaves out.
    """
    length = 0  # from here to the end
    after: dict[str, int] = {}  # the same from each label; a branch leads to the next label of its name
    for token in reversed(list(_TOKEN.finditer(added))):
        if (comment := token["comment"]) is not None:
            length = 0 if f"//{comment}" == _SELDOM else length
        elif label := token["label"]:
            after[label] = length
        elif branch := _BRANCH.match(token["statement"]):
            there = after.get(branch["target"], 0)
            if branch["guard"] == f"@{SKIPS} ":
                length = 1 + (there if skips else length)
            else:
                length = 1 + (max(length, there) if branch["guard"] else there)
        elif not token["statement"].startswith("."):
            called = _CALL.match(token["statement"])
            length += 1 + (functions.get(called["name"], 0) if called else 0)
    return length


def lengths(programs: Iterable[Function]) -> dict[str, int]:
    """Return the longest path of each function that probes call."""
    return {
        program.name: longest_path(
            "\n".join(s.text for s in program.statements or () if isinstance(s, Directive)), {}
        )
        for program in programs
    }


def _with_seldom_blocks(added: str, functions: Mapping[str, int], kinds: Collection[str]) -> str:
    """Return added text with additions in place of the comments of `remarked`.

    Only threads that sampling chooses execute these blocks, so that the sum is what all threads execute: it counts for both kinds.
    """
    lines: list[str] = []
    start = 0
    for line in added.split("\n"):
        if line == _SELDOM:
            start = len(lines)
        elif line != _OFTEN:
            lines.append(line)
        elif length := longest_path("\n".join(lines[start:]), functions):
            lines[start:start] = [add(kind, length + len(kinds)) for kind in kinds]
    return "\n".join(lines)


def tallied(
    statements: Iterable[Statement], functions: Mapping[str, int], kinds: Iterable[str]
) -> list[Statement]:
    """Replace each TALLY by additions of the number of added instructions up to the next one, its own included.

    kinds: ADDED, and with sampling SKIPPED.
    """
    out: list[Statement] = []
    place: int | None = None  # of the last TALLY
    counts = dict.fromkeys(kinds, 0)
    for statement in [*statements, TALLY]:
        if statement is not TALLY:
            if isinstance(statement, Directive) and not statement.name:
                for kind in counts:
                    counts[kind] += longest_path(statement.text, functions, kind == SKIPPED)
                if _SELDOM in statement.text:
                    statement = text(_with_seldom_blocks(statement.text, functions, counts))
            out.append(statement)
            continue
        if place is not None:
            if any(counts.values()):
                out[place] = text("\n".join(add(kind, n + len(counts)) for kind, n in counts.items()))
            else:
                del out[place]
            counts = dict.fromkeys(counts, 0)
        place = len(out)  # what precedes the first TALLY counts with what follows it
        out.append(statement)
    return out[:-1]

"""Count the instructions that injection adds, for --budget: each thread counts them in registers, as it counts work.

`COST` is a program that adds up the threads' counts when they leave the kernel. `body.py` inserts the placeholder `TALLY` at the
beginning of a group of added statements, and `tallied` replaces it by an instruction that adds the group's length. The length is that
of the longest path through the group; a loop counts as one iteration. Parts that programs mark as seldom executed do not count there:
each of their basic blocks adds its own length.

With sampling, each thread counts the instructions that it would execute in a chosen block or warp (`ADDED`), and those in any other
(`SKIPPED`). So each launch shows what launches cost on average, whichever blocks were chosen.
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

# Kinds of work for --budget alone, which tools cannot ask for: the added instructions of a chosen thread, and of a thread that
# sampling skips.
ADDED, SKIPPED = "added", "skipped"
TALLY = Directive("", "")  # placeholder for the addition of a number that is not known yet


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

_SELDOM = "//gpubpf seldom"  # the beginning of a basic block that is seldom executed
_OFTEN = "//gpubpf often"  # the end of such a block
# A comment; a label; a statement, which may contain braces. A brace between statements is skipped.
_TOKEN = re.compile(r"//(?P<comment>[^\n]*)|(?P<label>[$\w]+):(?!:)|(?P<statement>[@.$%\w][^;]*);")
_BRANCH = re.compile(r"(?P<guard>@!?%\w+\s+)?bra(?:\.uni)?\s+(?P<target>[$\w]+)$")
_CALL = re.compile(r"(?:@!?%\w+\s+)?call(?:\.uni)?\s+(?P<name>[$\w]+)")


def remarked(fragment: Fragment, ptx: str) -> str:
    """Return the text of a fragment with comments that mark its seldom executed basic blocks for `tallied`."""
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
    """Return the number of instructions on the longest path through added text. Loops count once, seldom executed parts not at all.

    functions: the longest path through each function that the text may call, by name
    skips: whether sampling skips the thread
    """
    length = 0  # instructions from here to the end
    after: dict[str, int] = {}  # the same from a label; a branch leads to the next label of its name
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
    """Return added text in which the blocks that `remarked` marked add their own length, instead of the comments.

    Each block adds its length to all `kinds`. Skipped threads never execute these blocks, so their cost is known from the chosen
    threads alone.
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
    """Replace each TALLY by instructions that add the number of added instructions up to the next TALLY, including themselves.

    kinds: ADDED, and with sampling SKIPPED
    """
    out: list[Statement] = []
    place: int | None = None  # the index of the last TALLY in `out`
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
        place = len(out)  # statements before the first TALLY count with those after it
        out.append(statement)
    return out[:-1]

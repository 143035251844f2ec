"""Move a fragment, or the part that it seldom executes, into a function.

short = shortened(fragment, "gpubpf_program0")
short.text, short.function              # the common path, which calls the function at each seldom path
called(fragment, "gpubpf_program0")     # a call of the function

In both cases, the function is the whole fragment. At a label of `Fragment.seldom`, lanes call the function, which executes the
fragment from its start: what they executed before has no effects. So the only parameters of the function are the fragment's
arguments. The function does not test again whether to branch to the label, because all lanes that call it do.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from gpubpf.ptx.emit import marked, text
from gpubpf.ptx.module import Function, Variable
from gpubpf.record import Record, replace

if TYPE_CHECKING:
    from gpubpf.lower.fragment import Fragment

_END = "$gpubpf_end"
_LABEL = re.compile(r"\s*(\$\w+):\s*$")
_BRANCH = re.compile(r"\s*(@!?%\w+\s+)?bra(?:\.uni)?\s+(\$\w+);")


class Shortened(Record):
    """The text that is inlined for a fragment, and the function that this text calls."""

    text: str
    function: Function


class Block(Record):
    """A basic block: its label or "", its lines, the labels that it branches to, and whether it can fall through to the next block."""

    label: str
    lines: tuple[str, ...]
    targets: tuple[str, ...]
    falls: bool


def called(fragment: Fragment, name: str) -> Shortened:
    """Return a call of the fragment, which becomes the function `name` with the fragment's arguments as parameters."""
    parameters = tuple(
        Variable("param", a.type, f"gpubpf_given{n}") for n, a in enumerate(fragment.arguments)
    )
    lines = [f".reg .{a.type} {a.register};" for a in fragment.arguments]
    lines += [
        f"ld.param.{a.type} {a.register}, [{p.name}];"
        for a, p in zip(fragment.arguments, parameters, strict=True)
    ]
    body = marked([text("\n".join([*lines, fragment.ptx.strip(), "ret;"]))])
    return Shortened(_call(fragment, name), Function("func", name, parameters, statements=tuple(body)))


def shortened(fragment: Fragment, name: str) -> Shortened:
    """Return the fragment without its seldom executed parts: in their place, the fragment calls the function `name` and ends.

    If the fragment does not mark such a part, return a call of the whole fragment.
    """
    if not fragment.seldom:
        return called(fragment, name)
    blocks = blocks_of(fragment.ptx.strip().splitlines()[1:-1])
    kept = reached(blocks, [0], set(fragment.seldom))
    decided = [line for block in _decided(blocks, kept, fragment.seldom) for line in block.lines]
    whole = called(replace(fragment, ptx="\n".join(["{", *decided, "}"])), name)
    lines: list[str] = []
    for n, block in enumerate(blocks):
        if block.label in fragment.seldom:
            lines += [f"{block.label}:", whole.text, f"bra.uni {_END};"]
        elif n in kept or (len(block.lines) == 1 and block.label):
            lines += block.lines
    if not any(block.label == _END for block in blocks):
        lines.append(f"{_END}:")
    return Shortened("\n".join(["{", *lines, "}"]), whole.function)


def _call(fragment: Fragment, name: str) -> str:
    """Return the text that calls the function, with the fragment's registers as arguments."""
    given = [(f"gpubpf_give{n}", a) for n, a in enumerate(fragment.arguments)]
    lines = [f".param .{a.type} {slot};" for slot, a in given]
    lines += [f"st.param.{a.type} [{slot}], {a.register};" for slot, a in given]
    arguments = f", ({', '.join(slot for slot, _ in given)})" if given else ""
    return "\n".join(["{", *lines, f"call {name}{arguments};", "}"])


def blocks_of(lines: Sequence[str]) -> list[Block]:
    """Return the basic blocks. Labels and branches in nested scopes (inline assembly) are ignored."""
    found: list[Block] = []
    current: list[str] = []
    depth = 0

    def end(targets: tuple[str, ...] = (), falls: bool = True) -> None:
        if current:
            label = _LABEL.match(current[0])
            found.append(Block(label[1] if label else "", tuple(current), targets, falls))
            current.clear()

    for line in lines:
        if not depth and _LABEL.match(line):
            end()
        current.append(line)
        depth += line.count("{") - line.count("}")
        if not depth and (branch := _BRANCH.match(line)):
            end((branch[2],), bool(branch[1]))
    end()
    return found


def reached(blocks: Sequence[Block], start: Iterable[int], without: Collection[str] = ()) -> set[int]:
    """Return the numbers of the blocks that are reachable from `start` without entering a block with a label in `without`."""
    at = _numbers(blocks)
    seen: set[int] = set()
    todo = list(start)
    while todo:
        n = todo.pop()
        if n in seen or n >= len(blocks) or blocks[n].label in without:
            continue
        seen.add(n)
        todo += [at[target] for target in blocks[n].targets]
        todo += [n + 1] if blocks[n].falls else []
    return seen


def _numbers(blocks: Sequence[Block]) -> dict[str, int]:
    return {block.label: n for n, block in enumerate(blocks) if block.label}


def _decided(blocks: Sequence[Block], first: set[int], seldom: Collection[str]) -> list[Block]:
    """Return the blocks for lanes that reach one of the labels: branches of the earlier blocks `first` lead nowhere else."""
    at = _numbers(blocks)
    goals = {at[label] for label in seldom}
    later = reached(blocks, goals)
    leads = {n: bool(goals & reached(blocks, [n])) for n in range(len(blocks))}
    found = list(blocks)
    for n in first - later:
        block = blocks[n]
        if not (block.targets and block.falls):
            continue
        if not leads[at[block.targets[0]]]:
            found[n] = replace(block, lines=block.lines[:-1], targets=())
        elif not leads.get(n + 1, False):
            found[n] = replace(block, lines=(*block.lines[:-1], f"bra {block.targets[0]};"), falls=False)
    left = reached(found, [0])
    return [block for n, block in enumerate(found) if n in left]

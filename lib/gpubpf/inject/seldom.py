"""Move a fragment, or the parts that it seldom executes, into functions.

short = shortened(fragment, "gpubpf_program0", {"width": "4"})
short.text, short.functions             # the common path, which calls a function at each seldom path
called(fragment, "gpubpf_program0")     # a call of a function with the whole fragment

Each label of `Fragment.seldom` has a function. Lanes that come to the label call the function, which executes the fragment from its
start: what they executed before has no effects. So the only parameters of the function are the fragment's arguments. The function does
not test again whether to branch to the label, because all lanes that call it do.

Fields of the context that are known numbers at a probe are constants in its functions, so that ptxas leaves out what depends on them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from gpubpf.lower.fragment import KEPT_NUMBER
from gpubpf.ptx.emit import marked, text
from gpubpf.ptx.module import Function, Variable
from gpubpf.record import Record, replace

if TYPE_CHECKING:
    from gpubpf.lower.fragment import Argument, Fragment

_END = "$gpubpf_end"
_LABEL = re.compile(r"\s*(\$\w+):\s*$")
_BRANCH = re.compile(r"\s*(@!?%\w+\s+)?bra(?:\.uni)?\s+(\$\w+);")
# Instructions without an effect besides their result, as far as they may be all that reads the result of one between lanes.
_COMPUTES = re.compile(
    r"\s*(?:setp|selp|mov|cvt|and|or|xor|not|add|sub|shl|shr|popc|activemask|match|vote|shfl)\.[\w.]+\s+(%\w+)"
)
_DECLARES = re.compile(r"\s*\.reg\s")
_REGISTER = re.compile(r"%\w+")
_UNBOUND: Mapping[str, str] = MappingProxyType({})


class Shortened(Record):
    """The text that is inlined for a fragment, and the functions that this text calls."""

    text: str
    functions: tuple[Function, ...]


class Block(Record):
    """A basic block: its label or "", its lines, the labels that it branches to, and whether it can fall through to the next block."""

    label: str
    lines: tuple[str, ...]
    targets: tuple[str, ...]
    falls: bool


def called(fragment: Fragment, name: str, known: Mapping[str, str] = _UNBOUND) -> Shortened:
    """Return a call of the fragment, which becomes the function `name` with the fragment's arguments as parameters.

    known: fields of the context that are constants in the function, by name
    """
    given = [a for a in fragment.arguments if a.kind != "context" or a.field not in known]
    parameters = {a: Variable("param", a.type, f"gpubpf_given{n}") for n, a in enumerate(given)}
    lines = [f".reg .{a.type} {a.register};" for a in fragment.arguments]
    for a in fragment.arguments:
        if a in parameters:
            lines.append(f"ld.param.{a.type} {a.register}, [{parameters[a].name}];")
        else:
            lines.append(f"mov.{a.type} {a.register}, {known[a.field]};")
    returns: tuple[Variable, ...] = ()
    lines.append(fragment.ptx.strip())
    if fragment.keeps:
        returns = (Variable("param", "b64", "gpubpf_kept"),)
        lines = [
            f".reg .b64 {KEPT_NUMBER};",
            f"mov.b64 {KEPT_NUMBER}, 0;",
            *lines,
            f"st.param.b64 [gpubpf_kept], {KEPT_NUMBER};",
        ]
    body = marked([text("\n".join([*lines, "ret;"]))])
    function = Function("func", name, tuple(parameters.values()), returns, statements=tuple(body))
    return Shortened(_call(given, name, fragment.keeps), (function,))


def shortened(fragment: Fragment, name: str, known: Mapping[str, str] = _UNBOUND) -> Shortened:
    """Return the fragment without its seldom executed parts: in place of each, the fragment calls a function and ends.

    If the fragment does not mark such a part, return a call of the whole fragment. `known`: as in `called`.
    """
    if not fragment.seldom:
        return called(fragment, name, known)
    blocks = blocks_of(fragment.ptx.strip().splitlines()[1:-1])
    kept = reached(blocks, [0], set(fragment.seldom))
    parts: dict[str, Shortened] = {}
    for n, label in enumerate(fragment.seldom):
        if not _enters(blocks, kept, label):
            continue
        decided = [line for block in _decided(blocks, kept, label) for line in block.lines]
        ptx = "\n".join(["{", *without_unused(decided), "}"])
        parts[label] = called(replace(fragment, ptx=ptx), f"{name}_{n}" if n else name, known)
    lines: list[str] = []
    for n, block in enumerate(blocks):
        if block.label in parts:
            lines += [f"{block.label}:", parts[block.label].text, f"bra.uni {_END};"]
        elif n in kept or (len(block.lines) == 1 and block.label):
            lines += block.lines
    if not any(block.label == _END for block in blocks):
        lines.append(f"{_END}:")
    functions = tuple(function for part in parts.values() for function in part.functions)
    return Shortened("\n".join(["{", *lines, "}"]), functions)


def _call(arguments: Sequence[Argument], name: str, keeps: bool = False) -> str:
    """Return the text that calls the function, with the registers of arguments. keeps: whether it returns KEPT_NUMBER."""
    given = [(f"gpubpf_give{n}", a) for n, a in enumerate(arguments)]
    lines = [f".param .{a.type} {slot};" for slot, a in given]
    lines += [f"st.param.{a.type} [{slot}], {a.register};" for slot, a in given]
    slots = f", ({', '.join(slot for slot, _ in given)})" if given else ""
    if not keeps:
        return "\n".join(["{", *lines, f"call {name}{slots};", "}"])
    kept = ["ld.param.b64 " + KEPT_NUMBER + ", [gpubpf_gives];"]
    return "\n".join(
        ["{", ".param .b64 gpubpf_gives;", *lines, f"call (gpubpf_gives), {name}{slots};", *kept, "}"]
    )


def without_unused(lines: Sequence[str]) -> list[str]:
    """Leave out comparisons of lanes whose result nothing reads, and what only computes such a result.

    ptxas keeps each instruction that lanes execute together (`match`, `vote`, `shfl`), whether something reads the result or not.
    """
    groups: list[list[str]] = []  # a scope, or a single line
    depth = 0
    for line in lines:
        if depth:
            groups[-1].append(line)
        else:
            groups.append([line])
        depth += line.count("{") - line.count("}")
    results = [_results(group) for group in groups]
    registers = [set(_REGISTER.findall("\n".join(group))) for group in groups]
    readers = Counter(register for found in registers for register in found)
    left = dict.fromkeys(range(len(groups)))
    while unused := [n for n in left if results[n] and all(readers[one] == 1 for one in results[n])]:
        for n in unused:
            del left[n]
            readers -= Counter(registers[n])
    return [line for n in left for line in groups[n]]


def _results(group: Sequence[str]) -> set[str]:
    """Return the registers that a line or scope sets, as others see them; none if it may have another effect."""
    found: set[str] = set()
    own: set[str] = set()
    for line in group[1:-1] if len(group) > 1 else group:
        if _DECLARES.match(line):
            own.update(_REGISTER.findall(line))
        elif (computed := _COMPUTES.match(line)) and "|" not in line:
            found.add(computed[1])
        else:
            return set()
    return found - own


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


def _enters(blocks: Sequence[Block], first: set[int], label: str) -> bool:
    """Return whether one of the blocks `first` leads to the label."""
    goal = _numbers(blocks)[label]
    return any(label in blocks[n].targets or (blocks[n].falls and n + 1 == goal) for n in first)


def _decided(blocks: Sequence[Block], first: set[int], label: str) -> list[Block]:
    """Return the blocks for lanes that reach the label: branches of the earlier blocks `first` lead nowhere else."""
    at = _numbers(blocks)
    goal = at[label]
    later = reached(blocks, [goal])
    leads = {n: goal in reached(blocks, [n]) for n in range(len(blocks))}
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

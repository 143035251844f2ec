"""The functions that templates become, run step by step, so that tests can let threads take their steps in any order."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, MutableMapping, Sequence


def basic_blocks(text: str) -> dict[str, list[str]]:
    """The basic blocks of a function in LLVM IR, each a list of lines, by label."""
    blocks: dict[str, list[str]] = {}
    label = ""
    for line in text.split("\n")[1:-1]:
        if line.endswith(":"):
            label = line[:-1]
            blocks[label] = []
        elif line.strip():
            blocks[label].append(line.strip())
    return blocks


BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << b,
    "lshr": lambda a, b: a >> b,
}


def steps(
    blocks: Mapping[str, Sequence[str]], memory: MutableMapping[int, int], arguments: Mapping[str, int]
) -> Generator[None, None, int]:
    """A thread that runs the function: a generator that stops before each access to memory, and returns the result.

    memory: the values at addresses. Every access of an address has the same width.
    """
    values = dict(arguments)
    label, came_from = "entry", ""

    def get(word: str) -> int:
        word = word.strip(" ,")
        named = {"true": 1, "false": 0}
        return values[word] if word[0] == "%" else named[word] if word in named else int(word)

    while True:
        for line in blocks[label]:
            name, _, right = line.partition(" = ") if line[0] == "%" else ("", "", line)
            words = re.split(r"[ ,]+", right)
            bits = next((int(w[1:]) for w in words if re.fullmatch(r"i\d+", w)), 64)
            mask = (1 << bits) - 1
            if words[0] == "br":
                way = words[2] if len(words) == 3 else words[4] if get(words[2]) else words[6]
                came_from, label = label, way.strip("%")
                break
            if words[0] == "ret":
                return get(words[-1])
            if words[0] == "phi":
                choice = re.search(rf"\[ (\S+), %{came_from} \]", right)
                result = get(choice[1]) & mask
            elif words[0] in BINARY:
                result = BINARY[words[0]](get(words[2]) & mask, get(words[3]) & mask) & mask
            elif words[0] == "icmp":
                a, b = get(words[3]) & mask, get(words[4]) & mask
                result = int({"eq": a == b, "ne": a != b, "ult": a < b}[words[1]])
            elif words[0] in ("zext", "trunc"):
                result = get(words[2]) & mask & ((1 << int(words[-1][1:])) - 1)
            elif words[0] in ("inttoptr", "ptrtoint"):
                result = get(words[2])
            elif words[0] == "select":
                result = get(words[4] if get(words[2]) else words[6])
            elif words[0] == "getelementptr":
                result = get(words[3]) + get(words[5])
            elif words[0] == "extractvalue":
                result = get(words[-2])[int(words[-1])]
            elif words[0] == "fence":
                continue
            elif words[0] == "load":
                yield
                result = memory[get(words[words.index("ptr") + 1])]
            elif words[0] == "store":
                yield
                at = words.index("ptr")
                memory[get(words[at + 1])] = get(words[at - 1]) & mask
                continue
            elif words[0] == "cmpxchg":
                yield
                at, old = get(words[2]), get(words[4]) & mask
                result = (memory[at], int(memory[at] == old))
                if memory[at] == old:
                    memory[at] = get(words[6]) & mask
            else:
                assert words[0] == "atomicrmw", line
                yield
                at = get(words[3])
                result = memory[at]
                memory[at] = BINARY[words[1]](result, get(words[5])) & mask
            values[name] = result

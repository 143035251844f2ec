"""Translations that count how often each basic block runs: CUDASIM_COUNT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .function import FunctionCode


@dataclass(frozen=True)
class Counting:
    """Where to write the counts.

    directory  where a process creates a new file each time it unloads the translation
    module     the file in the directory with the PTX text
    """

    directory: Path
    module: str


def head(blocks: int) -> str:
    """Return C that stands before the functions of a text: COUNT(N) counts a function's block N for the lanes of `mask`.

    blocks: the number of the module's basic blocks
    """
    return (
        f"static struct {{ uint64_t warps, lanes; }} counts_[{blocks}];\n"
        "#define COUNT(N) (__atomic_fetch_add(&counts_[AT(N)].warps, 1, __ATOMIC_RELAXED), "
        "__atomic_fetch_add(&counts_[AT(N)].lanes, __builtin_popcount(mask), __ATOMIC_RELAXED))\n"
    )


def tail(counting: Counting, codes: Mapping[str, FunctionCode], base: Mapping[str, int]) -> str:
    """Return C that writes the counts of the functions `codes` to a new file when the translation is unloaded.

    The file's first line names the module. Each other line is for one block: executions by warps, executions by lanes, the function,
    and the lines of the block's instructions in the PTX text.

    base: the number of each function's first block
    """
    rows = [
        f'{{{base[name] + block.number}u, "{name} {" ".join(map(str, block.lines))}"}},'
        for name, code in codes.items()
        for block in code.blocks
        if block.lines
    ]
    place = str(counting.directory).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return (
        "#include <stdio.h>\n#include <unistd.h>\n"
        "static const struct { uint32_t block; const char *text; } counted_[] = {\n"
        + "\n".join([*rows, "{0, 0}};\n"])
        + "static pid_t counting_;\n"
        "__attribute__((constructor)) static void begin_counts_(void) { counting_ = getpid(); }\n"
        "__attribute__((destructor)) static void write_counts_(void) {\n"
        "    if (getpid() != counting_) return; /* a child process has its parent's counts */\n"
        "    char name[4096];\n"
        f'    snprintf(name, sizeof name, "{place}/%d-%p.counts", (int)getpid(), (void *)counts_);\n'
        '    FILE *file = fopen(name, "w");\n'
        "    if (!file) return;\n"
        f'    fprintf(file, "{counting.module}\\n");\n'
        "    for (int k = 0; counted_[k].text; k++) {\n"
        "        const uint64_t warps = counts_[counted_[k].block].warps, lanes = counts_[counted_[k].block].lanes;\n"
        '        if (warps) fprintf(file, "%lu %lu %s\\n", warps, lanes, counted_[k].text);\n'
        "    }\n"
        "    fclose(file);\n"
        "}\n"
    )

"""How many SASS instructions of a probe a warp executes, on the paths that nearly every request takes.

    way = executed(cubin, "kernel", (*PATHS["bytes touched before"], "load"))

The control flow is read from nvdisasm. A path is told by the instructions on it that talk to memory or to other lanes, in order;
of all ways through the kernel with just these the shortest is taken. What a false predicate switches off counts, as it is issued.
"""

from __future__ import annotations

import heapq
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpubpf.errors import Error

# Offsets of the cells of places (struct gpu_traffic).
CELLS = "|".join(f"{192 * place:x}" for place in range(1, 16))
# What is told of a path; all else may be on it or not.
LANDMARKS = (
    ("SHFL", r"SHFL"),
    ("MATCH", r"MATCH"),
    (
        "add",
        rf"(?:REDG?|ATOMG?)\.E\.ADD\.64\b[^+]*(?:\+0x(?:{CELLS})\].*)?$",
    ),  # to the first number of a cell
    ("or", r"(?:REDG?|ATOMG?)\.E\.OR\.64"),
    ("atomic", r"(?:RED|ATOM)"),
    ("load", r"LDG?\.E"),
    ("store", r"STG?\.E"),
    ("shared", r"(?:LDS|STS|ATOMS)"),
)
PATHS = {
    "place alone": ("MATCH", "add"),
    "bytes touched before": ("MATCH", "load", "load", "add"),
    "bytes touched first": ("MATCH", "load", "load", "add", "or"),
    "bytes read and written before": ("MATCH", "load", "load", "load", "add"),
    "bytes read and written first": ("MATCH", "load", "load", "load", "add", "or", "or"),
}


def paths(covered: bool, both: bool) -> list[str]:
    """Those of a probe, with or without what bytes are touched (`covered`), `both`: of one access read and written."""
    names = list(PATHS)
    return names[3:] if covered and both else names[1:3] if covered else names[:1]


def executed(
    cubin: bytes, kernel: str, wanted: Sequence[str], landmarks: Sequence[tuple[str, str]] = LANDMARKS
) -> list[str]:
    """The SASS instructions on the shortest way through a kernel, into and out of its functions, whose landmarks are `wanted`: a
    path, then the application's own. `landmarks`: names and patterns. Raises Error if there is no such path."""
    code, targets = disassembled(cubin, kernel)
    # Where: instruction, landmarks passed, where a call goes back to. How far it is there, and from where.
    queue: list[tuple[int, tuple[int, int, int], tuple[int, int, int] | None]] = [(0, (0, 0, -1), None)]
    came: dict[tuple[int, int, int], tuple[int, int, int] | None] = {}
    while queue:
        count, here, before = heapq.heappop(queue)
        at, passed, back = here
        if at >= len(code) or here in came:
            continue
        came[here] = before
        guard, name, operands = code[at]
        landmark = next(
            (mark for mark, pattern in landmarks if re.match(pattern, f"{name} {operands}")), None
        )
        if landmark is not None and not (guard and landmark == "load"):  # the number of a graph's launch
            if passed == len(wanted) or wanted[passed] != landmark:
                continue
            passed += 1
        if name == "EXIT" and passed == len(wanted):
            way = []
            step: tuple[int, int, int] | None = here
            while step is not None:
                way.append(" ".join(code[step[0]]).strip())
                step = came[step]
            return way[::-1]
        if name == "EXIT" and not guard:
            continue
        following = [(at + 1, back)]
        if name.startswith("RET"):
            following = [(back, -1), *(following if guard else ())]
        elif re.match(r"BRA(?!\.DIV)|CALL", name):
            target = re.search(r"`\(([.\w$]+)\)", operands)
            if target is None:
                raise Error(f"{kernel}: a jump that nvdisasm does not tell the target of: {name} {operands}")
            conditional = guard or re.match(r"\s*!?U?P\d", operands)
            away = targets[target[1]], at + 1 if name.startswith("CALL") else back
            following = [away, *(following if conditional else ())]
        for place, to in following:
            heapq.heappush(queue, (count + 1, (place, passed, to), here))
    raise Error(f"{kernel}: no way with {', '.join(wanted)}")


def disassembled(cubin: bytes, kernel: str) -> tuple[list[tuple[str, str, str]], dict[str, int]]:
    """(guard, opcode, operands) of each instruction, and the number of the instruction at each label."""
    tool = next(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvdisasm"), None)
    if tool is None:
        raise Error("there is no nvdisasm; install nvidia-cuda-nvdisasm from PyPI")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-c", file.name], check=True, capture_output=True, text=True).stdout
    code, targets = [], {}
    here = False
    for line in text.splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.([\w$]+)", line):
            here = section[1] == kernel
        elif here and (label := re.match(r"([.$][\w$]+):", line)):
            targets[label[1]] = len(code)
        elif here and (
            found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line)
        ):
            code.append((found[1] or "", found[2], found[3]))
    return code, targets

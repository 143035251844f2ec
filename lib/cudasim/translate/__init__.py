"""Translate PTX to C and compile it to a shared object, for the embedded device.

scope.py       names in a function
values.py      operands as C expressions
syntax.py      the forms that arithmetic instructions have
arithmetic.py  one lane's arithmetic; video.py its scalar video instructions; memory.py its memory accesses
               copies.py asynchronous copies; matrix.py matrices that a warp moves
               tensor.py multiplications from registers and shared memory; tensor_memory.py those from tensor memory
function.py    basic blocks (block.py), calls, barriers, collectives
liveness.py    registers that lanes keep between blocks
lane_loops.py  loops that lanes run one after another
render.py      a function's blocks as a C function
outline.py     probes that occur at many places
program.py     the module: variables, call graph, descriptions
compiler.py    the C compiler
"""

from __future__ import annotations

import sys

from gpubpf.ptx.parser import parse

from .program import TranslatedModule


def translate(ptx: str | bytes, virtual: bool = False) -> str:
    """Return the C text for a PTX module, in one file.

    virtual: whether the code runs on the virtual clock

    Raises gpubpf.errors.PtxError, which names the instruction and the PTX line.
    """
    return TranslatedModule(parse(ptx), virtual).c_texts(sys.maxsize)[0]

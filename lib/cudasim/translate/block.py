"""A basic block of a function that is translated."""

from __future__ import annotations

from dataclasses import dataclass, field

from .scope import Register
from .values import Code


@dataclass(eq=False, slots=True)
class Block:
    codes: list[Code] = field(default_factory=list)
    kind: str = "goto"  # goto, branch, table, exit, return, trap, call, indirect, collective, barrier, sleep
    targets: list[Block] = field(default_factory=list)
    predicate: Register | None = None
    negated: bool = False
    head: Code | None = None  # evaluates the operands of the terminator, one lane at a time
    detail: str = ""  # collective or barrier operation; name of the callee; index of a branch table
    # For a collective, as C: whether all members have arrived ("": the engine determines that), and the operation to run then.
    # Otherwise, the operands for the engine: as statements if they differ between lanes, else as arguments of cs_meet.
    arrived: str = ""
    direct: str = ""
    waits: str = ""
    alike: str = ""
    line: int = 0
    spins: bool = False
    reached: int = 0  # virtual clock: instructions of the application, including the terminator
    turn: bool = False  # virtual clock: its first instruction communicates, so it waits for its turn
    lines: list[int] = field(default_factory=list)  # the lines of its instructions in the PTX text
    number: int = 0
    live_in: frozenset[Register] = frozenset()
    live_out: frozenset[Register] = frozenset()

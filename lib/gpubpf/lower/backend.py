"""What differs between the targets of the lowering, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Backend:
    """One target of LLVM.

    `pointer`: the type of an address of map memory. `scope`: of its atomic operations. `warps`: whether it has warps.

    `calls`: for each thing that only the target knows, the function, intrinsic or inline assembly (`asm …`) that returns it, and
    its type: `tid.x` … `nctaid.z`, `lane`, `this_lane` (the same, compared as it is), `lanes_below`, `sm`, `group`, `warp_slot`
    (number of the warp on its multiprocessor), `clock`, `globaltimer`, `active`, `membar`, `exit`, `seldom` (a mark); with
    arguments `match`, `ballot`, `any`, `shuffle`, and `alike`, which is the mask of all lanes of the warp only if all are active
    and have the same value.

    `reads`: for each type of argument, the inline assembly with constraints that reads it from its register; None: arguments are
    the function's parameters.

    `given`: things of `calls` that are arguments instead: (kind of argument, its type). Where `first_thread` is among them, the
    number of a thread in its block is that plus its lane. `shard`: the address of the multiprocessor's part of a site array; back ends
    without it compute that from `group`.

    `join`: for targets without `warps` whose lanes run together as well (waves): where lanes must continue together, the statement
    that keeps LLVM from separating them. "" for targets that run one thread at a time.

    `pause`: the statement of a thread that waits for another one: it lets others run. "" for targets whose programs never wait.

    `functions`: definitions in LLVM IR of functions that `calls` names. `warp`: lanes of a warp, a power of two.
    """

    triple: str
    pointer: str
    scope: str
    calls: Mapping[str, tuple[str, str]]
    reads: Mapping[str, str] | None = None
    warps: bool = False
    given: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    join: str = ""
    pause: str = ""
    functions: str = ""
    warp: int = 32

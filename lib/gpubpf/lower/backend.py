"""The differences between the targets of the lowering, as a table."""

from __future__ import annotations

from collections.abc import Mapping

from gpubpf.record import Record, field


class Backend(Record):
    """One LLVM target.

    `pointer`: the type of a pointer to map memory.

    `scope`: the scope of atomic operations on map memory.

    `warps`: whether the target has warps.

    `warp`: the lanes of a warp, a power of two.

    `calls`: for each target-specific value or operation, the function, intrinsic or inline assembly (`asm …`) that returns it, and its
    type: `tid.x` … `nctaid.z`, `lane`, `this_lane` (the same, for comparisons in 32 bits), `lanes_below`, `sm`, `group`, `warp_slot`
    (the number of the warp on its multiprocessor), `clock`, `globaltimer`, `active`, `membar`, `exit`, `seldom` (a mark); with
    arguments `match`, `ballot`, `any`, `shuffle`, and `alike`, which is the mask of all lanes of the warp only if all are active and
    have the same value. Optional: `element`, `scale` and `shift`, arithmetic that LLVM would do with slower instructions; `replay`,
    the word at an address, or 0 if the address is 0.

    `reads`: for each argument type, the inline assembly, with constraints, that reads it from its register; None: arguments are
    function parameters.

    `given`: values that are arguments instead of `calls`, each as (kind of argument, its type). With `first_thread`, the number of a
    thread in its block is `first_thread` plus the thread's lane. `shard`: the address of the multiprocessor's part of a site array;
    back ends without `shard` compute the address from `group`. `global_warp`: the number of the warp in the grid.

    `join`: for targets without `warps` whose lanes also run together (waves): the statement that keeps LLVM from separating lanes that
    must continue together. "" for targets that run one thread at a time.

    `pause`: the statement with which a waiting thread lets others run. "" for targets whose programs never wait.

    `functions`: LLVM IR definitions of functions that `calls` names.
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

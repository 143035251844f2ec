"""With sampling, give a kernel two bodies: an instrumented one for the chosen blocks or warps, and the original for all others.

Then a block that is not chosen runs the original's instructions after one branch. Otherwise, it would test a predicate at each probe,
and each test would end one of ptxas's basic blocks, so that loads wait for each other. (With memtrace and one block in 64, an H200
took 4.3 times as long for a tiled matrix product.)

    if is_split(plan, name):
        body, statements = split_body(plan, sites, variables, name)

Both bodies have scopes of their own for registers and labels. They share the variables in shared and local memory.
"""

from __future__ import annotations

from gpubpf.ebpf.probe import Probe
from gpubpf.ptx.emit import marked, text
from gpubpf.ptx.module import Close, Label, Open, Statement, Variable
from gpubpf.record import replace

from .body import Body
from .plan import InjectionPlan
from .sampling import GROUP, SKIPS, choice, units
from .tables import SiteTable, VariableTable

_ORIGINAL = "$gpubpf_original"
_OWN_SPACES = ("reg", "param")  # spaces: each body declares its own variables in these
# All warps of a warp group must execute the same one of these instructions (PTX ISA), so all must run the same body.
_BY_WARP_GROUP = ("wgmma", "setmaxnreg")


def is_split(plan: InjectionPlan, kernel: str) -> bool:
    """Return whether a kernel gets two bodies. Otherwise, its probes test whether the thread is chosen.

    A program that runs in all blocks, such as the one that counts costs for --budget, needs a single body. So do kernels that call a
    function with variables in shared memory: each body would call a copy of the function with variables of its own.
    """
    probes = plan.probes[kernel]
    if not probes or not all(p.sampled for p in probes):
        return False
    depth = 0
    for statement in plan.module.functions[kernel].body or ():
        depth += isinstance(statement, Open) - isinstance(statement, Close)
        if depth and isinstance(statement, Variable) and statement.space not in _OWN_SPACES:
            return False  # each body would have its own variable
    functions = [plan.module.functions[f] for f in plan.graph.reach(kernel)]
    called = [f for f in functions if f.kind != "entry" and f.mentions(".shared")]
    if any(isinstance(s, Variable) and s.space == "shared" for f in called for s in f.body or ()):
        return False
    by_group = any(f.mentions(word) for f in functions for word in _BY_WARP_GROUP)
    return not (by_group and "warp" in units([probes]))


def split_body(
    plan: InjectionPlan, sites: SiteTable, variables: VariableTable, kernel: str
) -> tuple[Body, tuple[Statement, ...]]:
    """Return the body for the chosen blocks or warps, and the statements of the kernel with both bodies. Raises Refusal, PtxError."""
    function = plan.module.functions[kernel]
    probes = plan.probes[kernel]
    (unit,) = units([probes])
    probes = tuple(replace(p, unconditional=True) for p in probes)
    chosen = Body(plan, sites, variables, function, plan.variant_of[kernel], probes)
    others = Body(plan, sites, variables, function, 0, ())
    bodies = [body.rewrite() for body in (chosen, others)]
    common = [s for s in bodies[0] if _is_common(s)]
    choose = [text(f".reg .pred {SKIPS};"), text(f".reg .b32 {GROUP};")]
    choose.append(text(chosen.filler.text(Probe(choice(unit, counts=True), "entry"), {})))
    choose.append(text(f"@{SKIPS} bra {_ORIGINAL};"))
    scopes = [[Open(), *(s for s in body if not _is_common(s)), Close()] for body in bodies]
    return chosen, (*common, *marked(choose), *scopes[0], Label(_ORIGINAL), *scopes[1])


def _is_common(statement: Statement) -> bool:
    return isinstance(statement, Variable) and statement.space not in _OWN_SPACES

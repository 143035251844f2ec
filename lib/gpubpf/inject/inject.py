"""Inject device programs into copies of an application's kernels.

    injected = inject(parse(ptx), {"_Z9vectorAddPKfS0_Pfi": [Probe(fragment, "exit", accumulate="instructions")]})
    injected.text       # PTX: the instrumented kernels and the functions and variables that they use, nothing else

Injection adds to a kernel:

* a hidden last parameter, the launch block. Like every parameter, it is in the constant bank;
* if asked for, a count of the kernel's executions at its entry, for bodies of conditional graph nodes (executions.py);
* the programs' fragments, each in its own `{ }`: at the kernel's entry, before every `ret` or `exit` of the kernel, at entry and
  returns of called functions, before memory accesses, around barriers, at the beginning of basic blocks, before branches, before
  stores and after loads and atomics for their values, after instructions for their results. A `trap` is not an exit: it makes the
  launch fail;
* with sampling, the choice whether the thread's block or warp runs the programs. Most kernels then have a second body without them
  (split.py);
* accumulators: one 64-bit register per counted kind of work, and one `add` of a constant per basic block.

The comments `//gpubpf{` and `//gpubpf}` enclose added statements. `//gpubpf+N` stands for N instructions that the original executes
there and the copy does not. The virtual clock of the embedded device counts the original's instructions (docs/timing.md).

Every exit of the kernel has its own probe. If several branches lead to one `ret`, each branch gets its own `ret`. With one probe
before a common `ret`, ptxas would make the lanes of a warp wait for each other there (BSSY … BSYNC). The block would then hang if
some threads return early while others go to a barrier. Each copy carries its own number, the site, so that ptxas does not merge the
copies.

Module-scope variables stay in the application's module. The copy accesses them through `gpubpf_variables`, a table of their
addresses. Names that begin with `gpubpf` are reserved.

Each stage has its own module: `checks` refuses kernels, `plan` decides names and signatures, `exits` plans the exits of a function,
`body` rewrites it, `sidecar` collects the functions and builds the instrumented module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gpubpf.errors import PtxError, Refusal
from gpubpf.lower.launch_block import launch_block
from gpubpf.ptx.call_graph import CallGraph
from gpubpf.ptx.module import Module, render

from .checks import check_kernel
from .injected import Injected
from .plan import InjectionPlan
from .sampling import choice, units
from .sidecar import SidecarModule
from .values import InjectedKernel, PtxProbe


def inject(
    module: Module,
    kernels: Mapping[str, Sequence[PtxProbe]],
    minimum_version: tuple[int, int] = (6, 3),
    each: Callable[[str], object] = lambda name: None,
    counts_executions: bool = False,
) -> Injected:
    """Return the instrumented kernels of a module. All kernels share one launch block layout.

    A kernel that cannot be instrumented raises nothing: `Injected.refusals` has the reason.

    kernels: the probes of each kernel to instrument, by mangled name
    minimum_version: the PTX ISA version of the fragments; `.version` becomes at least this
    each: called with the name of each instrumented kernel
    counts_executions: whether kernels count how often they run, unless a program reads the launch's number
    """
    graph = CallGraph(module)
    sampled = units(kernels.values())
    fragments = [p.program for probes in kernels.values() for p in probes]
    block = launch_block([*fragments, *(choice(unit, True) for unit in sampled)], counts_executions)
    refusals: dict[str, str] = {}
    accepted: dict[str, Sequence[PtxProbe]] = {}
    for name, probes in kernels.items():
        try:
            check_kernel(module, graph, name, block)
            accepted[name] = probes
        except (Refusal, PtxError) as error:
            refusals[name] = str(error)
    while True:
        sidecar = SidecarModule(InjectionPlan(module, graph, block, accepted))
        done, failed = _add_kernels(sidecar, each)
        if not failed:
            made, variables = sidecar.finish(minimum_version)
            return Injected(render(made), done, variables, refusals, made, sidecar.launched)
        refusals |= failed  # start again, so that nothing of these kernels remains in the module
        accepted = {name: probes for name, probes in accepted.items() if name not in failed}


def _add_kernels(
    sidecar: SidecarModule, each: Callable[[str], object]
) -> tuple[dict[str, InjectedKernel], dict[str, str]]:
    """Add all planned kernels to the sidecar. Return them by name, and the reasons for those that failed.

    If any failed, discard the sidecar.
    """
    done: dict[str, InjectedKernel] = {}
    failed: dict[str, str] = {}
    for name in sidecar.plan.probes:
        try:
            sidecar.add_called(name)
            sidecar.add_launched(name)
        except (Refusal, PtxError) as error:
            failed[name] = str(error)
    in_functions = sidecar.sites.count
    for name in sidecar.plan.probes:
        sidecar.sites.count = in_functions
        try:
            if name not in failed:
                done[name] = sidecar.add_kernel(name)
                each(name)
        except (Refusal, PtxError) as error:
            failed[name] = str(error)
    return done, failed

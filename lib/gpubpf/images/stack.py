"""Check the stack of copies of recursive kernels: kernels whose calls through registers may reach the calling function again.

ptxas reports to the driver how much stack a kernel needs, except if functions call themselves. Then each thread has as much stack as
the program has set (`cudaLimitStackSize`; 1,024 bytes by default). Probes enlarge the stack frames of functions, so that a copy may
need more stack than the original.

    deeper(graph, kernels, before, after)     # {"_Z3usePP5Shape": "indirect calls that recurse: …"}
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

from gpubpf import names
from gpubpf.images.assemble import KernelResources
from gpubpf.ptx.call_graph import CallGraph
from gpubpf.ptx.emit import WAITING
from gpubpf.ptx.symbols import FUNCTION, PREFIX


def recursive(graph: CallGraph, kernels: Iterable[str]) -> list[str]:
    """Return the kernels with calls through registers that reach a function which may call itself. Raises PtxError."""
    found = []
    for kernel in kernels:
        reached = graph.reach(kernel)
        if any(graph.of(name).shapes for name in reached):
            calls = {name: {graph.resolve(called) for called in graph.of(name).calls} for name in reached}
            sorter = TopologicalSorter(calls)
            with contextlib.suppress(CycleError):
                sorter.prepare()
                continue
            found.append(kernel)
    return found


def deeper(
    graph: CallGraph,
    kernels: Collection[str],
    before: Mapping[str, KernelResources],
    after: Mapping[str, KernelResources],
) -> dict[str, str]:
    """Return those of the recursive `kernels` with a function whose copy has a larger stack frame, with the reason. Raises PtxError.

    before, after: the resources of the originals' functions, and of the copies' functions, as ptxas reports them
    """
    frames: dict[str, int] = {}
    for name, resources in after.items():
        original = name.partition(f"${PREFIX}")[0]  # all variants of a function count as it
        frames[original] = max(frames.get(original, 0), resources.stack)
    probes = {name for name in frames if name.startswith((FUNCTION, WAITING))}
    found: dict[str, str] = {}
    for kernel in kernels:
        for name in sorted(graph.reach(kernel) | probes):
            old = before[name].stack if name in before else 0
            if frames.get(name, 0) > old:
                found[kernel] = (
                    f"indirect calls that recurse: the copy of {names.demangle(name).short} needs {frames[name]} bytes"
                    f" of stack, not {old}"
                )
                break
    return found

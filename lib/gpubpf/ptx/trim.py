"""Keep some of a module's kernels, with the functions and variables that they use.

module.render(trim(parsed, ["vectorAdd"]))      # PTX that ptxas takes
"""

from __future__ import annotations

from collections.abc import Iterable

from gpubpf.record import replace

from . import flow, module
from .call_graph import CallGraph


def trim(parsed: module.Module, kernels: Iterable[str]) -> module.Module:
    """Return the application's module with only these kernels, and the functions and variables that they use."""
    graph = CallGraph(parsed)
    functions: set[str] = set()
    variables: set[str] = set()
    todo = list(kernels)
    while todo:
        name = todo.pop()
        if name in parsed.variables and name not in variables:
            variables.add(name)
            # A variable's initial value may refer to others, and to functions.
            todo += flow.find_initializer_names(parsed.variables[name].initializer)
        elif name in parsed.functions and name not in functions:
            reached = graph.reach(name)
            functions |= reached
            for used in map(graph.of, reached):
                todo += used.variables | used.launched | {graph.entries[f].table for f in used.originals}
    kept = []
    for item in parsed.items:
        if isinstance(item, module.Function):
            wanted = item.name in functions
        elif isinstance(item, module.Variable):
            wanted = item.name in variables or item.space == "shared"
        else:
            # From the DWARF data, keep only the names that `.loc … function_name` refers to.
            wanted = item.name != "section" or item.text.split()[1].startswith(".debug_str")
        if wanted:
            kept.append(item)
    # With `debug`, ptxas would require the dropped sections.
    target = tuple(word for word in parsed.target if word != "debug")
    return replace(parsed, target=target, items=tuple(kept))

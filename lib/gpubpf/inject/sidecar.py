"""Build the instrumented module: add the rewritten functions one by one, then finish it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpubpf.lower.launch_block import align
from gpubpf.ptx.call_graph import may_wait
from gpubpf.ptx.constants import is_constant
from gpubpf.ptx.emit import array, at_lines, marked
from gpubpf.ptx.flow import GRID_LAUNCH, find_initializer_names
from gpubpf.ptx.indirect import Entry
from gpubpf.ptx.module import Directive, Function, Item, Module, Variable
from gpubpf.ptx.source import source_files
from gpubpf.ptx.symbols import GRIDS, LAUNCH, TABLE
from gpubpf.record import replace

from .body import Body
from .device_launches import launched_name
from .executions import count_executions
from .injected import parameter_layout
from .plan import InjectionPlan
from .split import is_split, split_body
from .tables import SiteTable, VariableTable
from .values import InjectedKernel, InjectedVariable

# Constants may point to further constants. Chains longer than this are not copied.
MAX_POINTERS = 16


class SidecarModule:
    """The functions and variables of an instrumented module.

    Add the called functions of all kernels first, then the kernels: sites are numbered in this order.
    """

    def __init__(self, plan: InjectionPlan) -> None:
        self.plan = plan
        self.sites = SiteTable(source_files(plan.module))
        self.variables = VariableTable()
        self._rewritten: dict[str, Function] = {}  # by new name
        self._new_names: dict[str, set[str]] = {}  # by original name
        self._shared_exits: dict[str, int] = {}  # by new name
        self.launched: tuple[str, ...] = ()  # kernels with a launched copy

    def add_called(self, kernel: str) -> None:
        """Add the functions that a kernel calls, directly or indirectly. Raises Refusal, PtxError."""
        variants = {self.plan.variant_of[kernel]} | ({0} if is_split(self.plan, kernel) else set())
        for name in sorted(self.plan.graph.reach(kernel) - {kernel}):
            for variant in sorted(variants):
                self._add_function(name, variant)

    def _add_function(self, name: str, variant: int) -> None:
        plan = self.plan
        function = plan.module.functions[name]
        if plan.graph.resolve(name) != name and plan.role(name, variant) is not None:
            return  # an alias: rewritten calls use the target's name
        new = plan.new_name(name, variant)
        if new in self._rewritten:
            return
        made = plan.signature(function, variant)
        if function.defined:
            body = Body(plan, self.sites, self.variables, function, variant, plan.variants[variant])
            made = made.with_body(body.rewrite())
            self._shared_exits[new] = body.exits.shared_exits
        self._add(name, made)

    def _add(self, original: str, made: Function) -> None:
        if made.statements is not None:
            made = made.with_body(tuple(at_lines(made.statements)))
        self._rewritten[made.name] = made
        self._new_names.setdefault(original, set()).add(made.name)

    def add_launched(self, kernel: str) -> None:
        """Add the copies of the kernels that a kernel may launch, after the functions of all kernels. Raises Refusal, PtxError."""
        plan = self.plan
        for name in sorted(plan.graph.launched(kernel) - set(self.launched)):
            for called in sorted(plan.graph.reach(name) - {name}):
                self._add_function(called, 0)
            function = plan.module.functions[name]
            body = Body(plan, self.sites, self.variables, function, 0, ())
            made = replace(function, name=launched_name(name), linkage=("visible",))
            self._add(name, made.with_body(body.rewrite()))
            self.launched += (name,)

    def add_kernel(self, name: str) -> InjectedKernel:
        """Add a kernel, after its called functions. Raises Refusal, PtxError."""
        plan = self.plan
        function = plan.module.functions[name]
        variant = plan.variant_of[name]
        reached = plan.graph.reach(name)
        if is_split(plan, name):
            body, statements = split_body(plan, self.sites, self.variables, name)
        else:
            body = Body(plan, self.sites, self.variables, function, variant, plan.probes[name])
            statements = body.rewrite()
        statements = (*marked(count_executions(plan.block)), *statements)
        parameters = (*function.parameters, array(LAUNCH, plan.block.size))
        self._add(name, replace(function, parameters=parameters).with_body(statements))
        self._shared_exits[name] = body.exits.shared_exits
        layout, end = parameter_layout(function)
        run = {plan.new_name(f, variant) for f in reached - {name}} | {name}
        return InjectedKernel(
            layout,
            align(end, 8),
            plan.block,
            self.sites.of(run),
            sum(self._shared_exits.get(f, 0) for f in run),
            tuple(sorted({u for f in reached for u in plan.graph.of(f).unknown})),
            may_wait(function, plan.graph),
            self.sites.count,
            plan.unprobed(name),
            is_split(plan, name),
        )

    def finish(self, minimum_version: tuple[int, int]) -> tuple[Module, tuple[InjectedVariable, ...]]:
        """Return the module, and the variables whose addresses its table needs."""
        module, slots = self.plan.module, self.variables.slots
        copies = self._copies()
        items: list[Item] = []
        if slots:
            items.append(
                Variable("const", "b64", TABLE, align=8, dimensions=(len(slots),), linkage=("visible",))
            )
        for program in self.plan.programs:
            items += [program.with_body(None), program]
        seen: set[str] = set()
        for item in module.items:
            if isinstance(item, Variable):
                if item.name in copies:
                    linkage = "visible" if item is module.variables[item.name] else "extern"
                    items.append(replace(item, space="global", linkage=(linkage,)))
                elif item.name in self.variables.kept:
                    items.append(item)
            elif isinstance(item, Function):
                for new in sorted(self._new_names.get(item.name, ())):
                    made = self._rewritten[new]
                    if (made.kind == "func" or new == launched_name(item.name)) and new not in seen:
                        seen.add(new)
                        # Declare them first: a definition may call a function, or launch a kernel, that is defined later.
                        items.append(made.declaration)
                    if item.defined:
                        items.append(made)
            elif _is_kept(item, self._new_names):
                items.append(item)
        items.sort(key=_rank)
        target = tuple(t for t in module.target if t != "debug")  # it requires DWARF, which is left out
        made_module = Module(max(module.version, minimum_version), target, module.address_size, tuple(items))
        return made_module, tuple(self._injected(what, index, copies) for what, index in slots.items())

    def _injected(self, what: str | Entry, index: int, copies: Collection[str]) -> InjectedVariable:
        if what == GRIDS:
            return InjectedVariable(GRIDS, index, "global", 8, False, self._users(what))
        name, entry = (what, None) if isinstance(what, str) else (what.table, what)
        v = self.plan.module.variables[name]
        made = InjectedVariable(name, index, v.space, v.size, name in copies, self._users(what))
        if entry is None:
            return made
        return replace(made, copied=False, entry=entry.offset, fixed=entry.fixed)

    def _users(self, what: str | Entry) -> tuple[str, ...]:
        """Return the instrumented kernels that use a variable or an entry, directly or in called functions."""
        graph = self.plan.graph

        def uses(function: str) -> bool:
            used = graph.of(function)
            if what == GRIDS:
                return any(GRID_LAUNCH.fullmatch(name) for name in used.calls)
            return what in used.variables or any(graph.entries[name] == what for name in used.originals)

        return tuple(k for k in self.plan.probes if any(uses(function) for function in graph.runs(k)))

    def _copies(self) -> frozenset[str]:
        """Return the variables of the table that may be copied, and the variables that their initializers point to."""
        found: set[str] = set()
        known: dict[str, bool] = {}
        for name in self.variables.slots:
            if isinstance(name, str) and self._is_copyable(name, known, 0):
                found |= self._pointed_to(name)
        return frozenset(found)

    def _is_copyable(self, name: str, known: dict[str, bool], depth: int) -> bool:
        """Return whether a copy of `name`, and of what its initializer points to, would equal the original."""
        if name not in known:
            known[name] = False  # do not copy a constant that points back to itself
            module = self.plan.module
            variable = module.variables.get(name)
            known[name] = (
                variable is not None
                and depth < MAX_POINTERS
                and is_constant(module, variable)
                and all(
                    self._is_copyable(n, known, depth + 1)
                    for n in set(find_initializer_names(variable.initializer))
                )
            )
        return known[name]

    def _pointed_to(self, name: str) -> set[str]:
        """Return a variable and those that its initializer points to, directly or indirectly."""
        seen: set[str] = set()
        todo = [name]
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo.extend(find_initializer_names(self.plan.module.variables[name].initializer))
        return seen


def _rank(item: Item) -> int:
    """Return the sort key of an item: declarations come before their uses."""
    if isinstance(item, Directive):
        return {"file": 0, "pragma": 0}.get(item.name, 9)
    if isinstance(item, Variable):
        return 2
    return 5 if item.defined else 1


def _is_kept(item: Directive, functions: Mapping[str, set[str]]) -> bool:
    if item.name in ("file", "pragma"):
        return True
    if item.name == "alias":
        return bool(item.names) and item.names[0] in functions
    # .debug_str holds the names that `.loc … function_name` refers to. The other DWARF sections describe the code before rewriting.
    return item.name == "section" and item.text.split()[1].startswith(".debug_str")

"""The module that `inject` makes, and changes to it that need no new injection."""

from __future__ import annotations

from collections.abc import Mapping

from gpubpf.lower.launch_block import align
from gpubpf.ptx.module import Directive, Function, Module, render
from gpubpf.ptx.symbols import LIMITED
from gpubpf.record import Record, field, replace

from .values import InjectedKernel, InjectedVariable


class Injected(Record):
    """The instrumented module.

    text      the rendered `module`; without kernels if all were refused
    refusals  why kernels cannot be instrumented, by mangled name
    launched  the kernels that have a copy for other kernels to launch (device_launches.py)
    """

    text: str
    kernels: dict[str, InjectedKernel]
    variables: tuple[InjectedVariable, ...]
    refusals: dict[str, str]
    module: Module = field(repr=False)
    launched: tuple[str, ...] = ()

    @property
    def late_refusals(self) -> dict[str, str]:
        """The kernels that cannot be instrumented if the program loaded the module before the tool attached, with the reason."""
        return {k: v.refusal for v in self.variables if v.refusal for k in v.kernels} | self.refusals

    def limited(self, limits: Mapping[str, int]) -> str:
        """Return `text` with a second copy of each kernel in `limits`, NAME$gpubpf_limited, limited to that many registers."""
        made = [
            replace(_limit(self.module.functions[name], registers), name=name + LIMITED)
            for name, registers in limits.items()
        ]
        return render(replace(self.module, items=(*self.module.items, *made)))

    def within(self, limits: Mapping[str, int]) -> Injected:
        """Return this module with each kernel in `limits` limited to that many registers, unless the kernel has its own limit."""
        items = [
            _limit(item, limits[item.name])
            if isinstance(item, Function) and item.defined and item.name in limits and not _limits(item)
            else item
            for item in self.module.items
        ]
        module = replace(self.module, items=tuple(items))
        return replace(self, text=render(module), module=module) if limits else self


_LIMITS = ("maxnreg", "minnctapersm")  # directives that limit a kernel's registers


def _limits(kernel: Function) -> bool:
    return any(directive.name in _LIMITS for directive in kernel.directives)


def _limit(kernel: Function, registers: int) -> Function:
    """Return the kernel limited to this many registers per thread. The limit replaces the kernel's own limits."""
    others = tuple(d for d in kernel.directives if d.name not in _LIMITS)
    return replace(kernel, directives=(*others, Directive("maxnreg", f".maxnreg {registers}")))


def parameter_layout(function: Function) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return (offset, size) of each parameter of a kernel, and the end of the last, in bytes (PTX ISA 5.1.6: natural alignment)."""
    found = []
    end = 0
    for parameter in function.parameters:
        # In `.param .u64 .ptr .global .align 16 p`, the alignment is that of the memory that p points to.
        natural = 8 if "ptr" in parameter.attributes else parameter.alignment
        offset = align(end, natural)
        found.append((offset, parameter.size))
        end = offset + parameter.size
    return tuple(found), end

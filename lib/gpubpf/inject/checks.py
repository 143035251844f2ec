"""Refuse kernels that cannot be instrumented, before anything is rewritten."""

from __future__ import annotations

import re

from gpubpf import names
from gpubpf.errors import Refusal
from gpubpf.lower.launch_block import LaunchBlock, align
from gpubpf.ptx.address_flow import Parameter
from gpubpf.ptx.call_graph import CallGraph
from gpubpf.ptx.flow import GRID_BUFFER, SYSTEM_FUNCTIONS
from gpubpf.ptx.module import Function, Module, PtxInstruction, Variable
from gpubpf.ptx.symbols import DEVICE_RUNTIME, PREFIX

from .device_launches import kernels_passed
from .injected import parameter_layout

# The special registers that probes read (PTX ISA 9.0, chapter 10).
_SPECIAL = re.compile(
    "%(n?tid|n?ctaid|laneid|warpid|smid|lanemask_[a-z]+|clock(64|_hi)?|globaltimer(_lo|_hi)?|dynamic_smem_size|total_smem_size)"
)
_OPAQUE = ("texref", "surfref", "samplerref")


def check_kernel(module: Module, graph: CallGraph, name: str, block: LaunchBlock) -> None:
    """Check that the kernel `name` and everything that it calls can be instrumented.

    Raises Refusal with the reason, and PtxError for PTX that cannot be read.
    """
    entry = module.entries.get(name)
    if entry is None:
        raise Refusal("the PTX does not define this kernel")
    if module.address_size != 64:
        raise Refusal("32-bit PTX; build it with -m64")
    if module.architecture < 70:  # a newer .target would drop the assumption that a warp runs in lockstep
        raise Refusal(f"PTX for {module.sm}, older than sm_70")
    _, end = parameter_layout(entry)
    # PTX ISA 9.0, .param: 4352 bytes; 32764 since 8.1 on sm_70 and newer
    limit = 32764 if module.version >= (8, 1) else 4352
    if align(end, 8) + block.size > limit:
        raise Refusal("parameters too large")
    _check_code(module, graph, name)
    for kernel in sorted(graph.launched(name)):
        try:
            _check_code(module, graph, kernel)
            _check_address(graph, name, kernel)
        except Refusal as refusal:
            raise Refusal(f"launches {names.demangle(kernel).short}; {refusal}") from None
    _check_launches(module, graph, name)


def _check_address(graph: CallGraph, name: str, launched: str) -> None:
    """Check that the kernel `name` uses the address of the kernel `launched` only to launch it.

    Raises Refusal: in the copy, the address is that of a launched copy, which must not leave the thread.
    """
    for function in graph.runs(name):
        if launched in graph.of(function).launched and graph.stays(function, {launched}) is None:
            raise Refusal("its address is passed on")


def _check_launches(module: Module, graph: CallGraph, name: str) -> None:
    """Check that the copy of the kernel `name` launches only copies. Raises Refusal if a kernel's address may come from memory."""
    runs, kernels = graph.runs(name), module.entries
    todo = [Parameter(function, 0) for function in runs if GRID_BUFFER.fullmatch(function)]
    for to in todo:  # the loop appends to `todo`
        called = {one for one in module.functions if graph.resolve(one) == graph.resolve(to.function)}
        for function in runs:
            if called.isdisjoint(graph.of(function).calls):
                continue
            found = kernels_passed(module.functions[function], kernels, called, to.number)
            if found is None or not called.isdisjoint(graph.through_registers(function)):
                raise Refusal("launches kernels through pointers")
            todo += found - set(todo)


def _check_code(module: Module, graph: CallGraph, name: str) -> None:
    for parameter in module.functions[name].parameters:
        if parameter.type in _OPAQUE:
            raise Refusal(f"texture or surface reference {parameter.name}")
        _check_name(parameter.name)
    functions = sorted(graph.reach(name))
    variables = sorted({v for f in functions for v in graph.of(f).variables})
    for function in functions:
        if graph.of(function).indirect:
            why = graph.obstacle(function)
            raise Refusal(f"indirect call; {why}" if why else "indirect call")
    if any(graph.of(f).shapes for f in functions) and graph.leaving(set(functions) - {name}):
        raise Refusal("indirect call; perhaps of a function that leaves the kernel")
    if taken := sorted({t for f in functions for t in graph.of(f).taken}):
        raise Refusal(f"takes the address of {taken[0]}")  # it differs in the copy's module
    for function in functions:
        _check_function(module, module.functions[function], graph)
    for variable in variables:
        declared = module.variables[variable]
        _check_name(variable)
        if declared.type in _OPAQUE or declared.space == "tex":
            raise Refusal(f"texture or surface reference {variable}")


def _check_function(module: Module, function: Function, graph: CallGraph) -> None:
    meant = module.functions.get(graph.resolve(function.name))
    linked = function.name in SYSTEM_FUNCTIONS or re.fullmatch(DEVICE_RUNTIME, function.name) is not None
    if (meant is None or not meant.defined) and not linked:
        raise Refusal(f"needs device linking: {function.name}")
    signature = {variable.name for variable in (*function.parameters, *function.returns)}
    for statement in function.body or ():
        if isinstance(statement, Variable) and statement.space in ("global", "const"):
            raise Refusal(f"variable {statement.name} is declared in a function")
        if isinstance(statement, Variable) and (
            any(map(statement.declares, signature)) if statement.count else statement.name in signature
        ):
            raise Refusal(f"variable {statement.name} hides a parameter")  # which probes read there
        if isinstance(statement, Variable):
            _check_name(statement.name)
        if (
            isinstance(statement, PtxInstruction)
            and statement.opcode == "isspacep"
            and "const" in statement.modifiers
        ):
            raise Refusal("isspacep.const: constants are accessed in global memory here")


def _check_name(name: str) -> None:
    if _SPECIAL.fullmatch(name):
        raise Refusal(f"a variable has the name of the special register {name}")
    if name.lstrip("%").startswith(PREFIX):
        raise Refusal(f"the name {name} is reserved for gpubpf: this PTX is instrumented already")

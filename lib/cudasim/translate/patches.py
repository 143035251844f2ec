"""Insert calls of patch functions into a module, as NVIDIA's Compute Sanitizer API inserts them into machine code.

    text = patched(parse(kernels), patches, {BLOCK_EXIT: "count_exit"})

A patch function is a PTX `.func` with the parameters that `sanitizer_patching.h` documents for its instrumentation point. The calls
stand before the patched instruction, except for the points whose names end with RELEASE, and malloc. Like a tool's probes, they take
no virtual time and keep the lines of the original.

Program counters: a function begins at a multiple of 128 from the module's first program counter; each instruction takes 16. A comment
`//cudasim.function NAME OFFSET SIZE` at the end of the text gives the place of each function, and `//cudasim.patch NAME OFFSET SIZE`
that of each patch function. The instructions of patch functions have their places as lines: PATCH_LINES and more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gpubpf.errors import PtxError
from gpubpf.ptx.emit import at_lines, marked, text
from gpubpf.ptx.module import (
    Address,
    Close,
    Directive,
    Function,
    Group,
    Immediate,
    Label,
    Module,
    Name,
    Not,
    Open,
    Operand,
    PtxInstruction,
    Statement,
    Variable,
    Vector,
    numbered,
    render,
    type_size,
)
from gpubpf.record import replace

# Sanitizer_InstructionId. The points of other instructions are never reached on the embedded device.
BLOCK_ENTER, BLOCK_EXIT, GLOBAL, SHARED, LOCAL, BARRIER, SYNCWARP, SHFL, CALL, RET, MALLOC, FREE = range(
    1, 13
)
MEMCPY_ASYNC, PIPELINE_COMMIT, PIPELINE_WAIT, REMOTE_SHARED = 14, 15, 16, 17
MATRIX, CACHE_CONTROL, CLUSTER_ARRIVE, CLUSTER_WAIT = 19, 20, 21, 22
BARRIER_RELEASE, SYNCWARP_RELEASE, CLUSTER_WAIT_ENTRY = 29, 33, 40
BULK_GLOBAL_TO_SHARED, BULK_SHARED_TO_GLOBAL, BULK_SHARED_TO_SHARED = 30, 35, 36
BULK_REDUCTION_TO_GLOBAL, BULK_REDUCTION_TO_SHARED, TENSOR_LOAD = 37, 38, 43

READ, WRITE, ATOMIC_SYSTEM = 1, 2, 4  # Sanitizer_DeviceMemoryFlags
_SCOPES = {"cta": 1 << 4, "cluster": 1 << 6, "gpu": 1 << 6, "sys": 1 << 7}
_STRONG = {"relaxed", "acquire", "release", "acq_rel", "volatile", "mmio"}
UNALIGNED, SYNCHRONIZING = 1, 2  # Sanitizer_BarrierFlags

INSTRUCTION, ALIGNMENT = 16, 128  # bytes of program counters
FUNCTION_MARK, PATCH_MARK = "//cudasim.function", "//cudasim.patch"
PATCH_LINES = 1 << 24  # as CS_PATCH_LINES in device_abi.h; modules have fewer lines
_VALUE = "sanitizer_value"  # the local variable with the value that a store writes
_VALUE_BYTES = 32
_SPACES = {
    "global": GLOBAL,
    "shared": SHARED,
    "shared::cta": SHARED,
    "local": LOCAL,
    "shared::cluster": REMOTE_SHARED,
}
_LOAD_MODES = ("tile", "im2col", "im2col::w::128", "im2col::w", "tile::gather4")  # Sanitizer_LoadMode
_MOST_COORDINATES = 5
_LAST_IS_NEW = (
    MEMCPY_ASYNC,
    BULK_SHARED_TO_GLOBAL,
)  # older versions pass no last argument, so patches may ignore it
_ACCESSES = {"ld": READ, "ldu": READ, "st": WRITE, "atom": READ | WRITE, "red": READ | WRITE}


@dataclass(slots=True)
class _Call:
    """A call of a patch function.

    point      its instrumentation point
    arguments  the arguments after `userdata` and `pc`, as (bits, operand)
    setup      the instructions that compute the arguments
    generic    whether %sanitizer_address is a generic address; then lanes whose address is not in the point's space skip the call
    """

    point: int
    arguments: list[tuple[int, str]] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    generic: bool = False


class _Patches(NamedTuple):
    """The calls around one instruction."""

    before: list[_Call]
    after: list[_Call]


class _Declared:
    """The types and spaces of names, by nested scopes."""

    def __init__(self, module: Module, function: Function) -> None:
        self.scopes: list[dict[str, Variable]] = [dict(module.variables), {}]
        for variable in (*function.parameters, *function.returns):
            self.declare(variable)

    def declare(self, variable: Variable) -> None:
        self.scopes[-1][variable.name] = variable

    def find(self, name: str) -> Variable | None:
        prefix, _ = numbered(name)
        for scope in reversed(self.scopes):
            for key in (name, prefix):
                if (found := scope.get(key)) is not None and (
                    found.declares(name) if found.space == "reg" else key == name
                ):
                    return found
        return None

    def follow(self, statement: Statement) -> None:
        if isinstance(statement, Open):
            self.scopes.append({})
        elif isinstance(statement, Close) and len(self.scopes) > 2:
            self.scopes.pop()
        elif isinstance(statement, Variable):
            self.declare(statement)


def layout(module: Module) -> dict[str, tuple[int, int]]:
    """Return (first program counter, size) of each defined function, in bytes. Program counters are relative to the module's first."""
    found: dict[str, tuple[int, int]] = {}
    at = 0
    for function in module.functions.values():
        if not function.defined:
            continue
        # The end of the body leaves the function, so it has a program counter, too.
        count = 1 + sum(isinstance(statement, PtxInstruction) for statement in function.body or ())
        found[function.name] = at, count * INSTRUCTION
        at += (count * INSTRUCTION + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    return found


def patched(module: Module, patches: Module | None, names: Mapping[int, str]) -> str:
    """Return the text of a module with calls of patch functions.

    patches: a module with the patch functions, and the functions and variables that they use
    names: instrumentation point (Sanitizer_InstructionId) → the name of its patch function

    Raises PtxError if a patch function is missing or has other parameters than its calls, or if both modules define a name.
    """
    places = layout(module)
    patch_places: dict[str, tuple[int, int]] = {}
    items = list(module.items)
    version, target = module.version, module.target
    if names and patches is not None:
        for name in names.values():
            if name not in patches.functions or not patches.functions[name].defined:
                raise PtxError(f"the patches do not define the function {name}")
        patch_places = layout(patches)
        new = [
            _patch(item, patch_places[item.name][0]) if isinstance(item, Function) and item.defined else item
            for item in patches.items
            if not isinstance(item, Directive)
        ]
        taken = {*module.functions, *module.variables} & {*patches.functions, *patches.variables}
        if clash := next((name for name in sorted(taken)), None):
            raise PtxError(f"both the module and its patches define {clash}")
        items = [
            _Patcher(module, item, patches, names, places).patched()
            if isinstance(item, Function) and item.defined
            else item
            for item in items
        ]
        # The module's own functions come first, so that their numbers, which determine their addresses, do not change.
        items += new
        version = max(version, patches.version)
        if patches.architecture > module.architecture:
            target = (patches.target[0], *module.target[1:])
    marks = [
        f"{mark} {name} {at} {size}"
        for mark, found in ((FUNCTION_MARK, places), (PATCH_MARK, patch_places))
        for name, (at, size) in found.items()
    ]
    return "\n".join([render(Module(version, target, module.address_size, tuple(items))), *marks, ""])


def _patch(function: Function, at: int) -> Function:
    """Return a patch function as it is inserted: its instructions take no virtual time, and their lines are their places.

    at: the function's first program counter, from that of the patches.
    """
    begin, end = Directive("gpubpf", "//gpubpf{"), Directive("gpubpf", "//gpubpf}")
    lines = itertools.count(PATCH_LINES + at // INSTRUCTION)
    # A .loc would name one of the module's files.
    kept = (s for s in function.body or () if not (isinstance(s, Directive) and s.name == "loc"))
    statements = [replace(s, line=next(lines)) if isinstance(s, PtxInstruction) else s for s in kept]
    return function.with_body(tuple(at_lines((begin, *statements, end))))


class _Patcher:
    """Inserts the calls into one function."""

    def __init__(
        self,
        module: Module,
        function: Function,
        patches: Module,
        names: Mapping[int, str],
        places: Mapping[str, tuple[int, int]],
    ) -> None:
        self.function = function
        self.patches = patches
        self.names = names
        self.places = places
        self.kernel = function.kind == "entry"
        self.declared = _Declared(module, function)
        self.base = places[function.name][0]
        self.labels = 0
        self.stores = False
        body = function.body or ()
        self.carries = any(isinstance(s, PtxInstruction) and "cc" in s.modifiers for s in body)

    def patched(self) -> Function:
        """Return the function with the calls."""
        statements = list(self._statements())
        if self.stores:
            value = text(f".local .align 16 .b8 {_VALUE}[{_VALUE_BYTES}];")
            statements.insert(0, value)
        return self.function.with_body(tuple(at_lines(marked(statements))))

    def _statements(self) -> Iterator[Statement]:
        pc = self.base
        begun = False
        for statement in self.function.body or ():
            if not begun and isinstance(statement, PtxInstruction | Label | Open):
                begun = True
                yield from self._enter()
            self.declared.follow(statement)
            if not isinstance(statement, PtxInstruction):
                yield statement
                continue
            before, after = self._calls(statement)
            yield from self._inserted(before, pc, statement)
            yield statement
            yield from self._inserted(after, pc, statement)
            pc += INSTRUCTION
        if not begun:
            yield from self._enter()
        if not self._ends():
            point = BLOCK_EXIT if self.kernel else RET
            yield from self._inserted(self._wanted([_Call(point)]), pc, None)

    def _ends(self) -> bool:
        """Return whether the last instruction leaves the function, so that its end is not reached."""
        last = next(
            (s for s in reversed(self.function.body or ()) if isinstance(s, PtxInstruction | Label)), None
        )
        return (
            isinstance(last, PtxInstruction)
            and last.predicate is None
            and last.opcode in ("ret", "exit", "trap")
        )

    def _enter(self) -> Iterator[Statement]:
        calls = self._wanted([_Call(BLOCK_ENTER)]) if self.kernel else []
        return self._inserted(calls, self.base, None)

    def _wanted(self, calls: Iterable[_Call]) -> list[_Call]:
        return [call for call in calls if call.point in self.names]

    def _calls(self, i: PtxInstruction) -> _Patches:
        """Return the calls for the instrumentation points of an instruction."""
        find = _POINTS.get(i.opcode)
        if find is None:
            return _Patches([], [])
        before, after = find(self, i)
        return _Patches(self._wanted(before), self._wanted(after))

    # -- the text of calls

    def _inserted(self, calls: list[_Call], pc: int, i: PtxInstruction | None) -> Iterator[Statement]:
        """Yield the calls, for the lanes that execute the instruction."""
        if not calls:
            return
        lines: list[str] = []
        skip = self._label()
        if i is not None and i.predicate is not None:
            lines.append(f"@{'' if i.negated else '!'}{i.predicate} bra {skip};")
        if self.carries:  # calls do not preserve the carry, but patches of machine code do
            lines += [".reg .b32 %sanitizer_carry;", "addc.u32 %sanitizer_carry, 0, 0;"]
        for call in calls:
            lines += self._text(call, pc)
        if self.carries:
            lines.append("add.cc.u32 %sanitizer_carry, %sanitizer_carry, -1;")
        lines.append(f"{skip}:")
        yield text("{\n" + "\n".join(lines) + "\n}")

    def _label(self) -> str:
        self.labels += 1
        return f"$sanitizer_{self.labels}"

    def _text(self, call: _Call, pc: int) -> list[str]:
        name = self.names[call.point]
        function = self.patches.functions[name]
        arguments = [(64, "%sanitizer_data"), (64, "%sanitizer_pc"), *call.arguments]
        if call.point in _LAST_IS_NEW and len(function.parameters) == len(arguments) - 1:
            arguments.pop()
        if [8 * p.size for p in function.parameters] != [bits for bits, _ in arguments]:
            expected = ", ".join(f".b{bits}" for bits, _ in arguments)
            raise PtxError(f"the patch function {name} must have the parameters {expected}")
        if [8 * p.size for p in function.returns] != [32]:
            raise PtxError(f"the patch function {name} must return a .b32")
        formals = [f"sanitizer_{k}" for k in range(len(arguments))]
        skip = self._label()
        return [
            "{",
            ".reg .b64 %sanitizer_data, %sanitizer_pc;",
            ".reg .b32 %sanitizer_result;",
            ".reg .pred %sanitizer_failed;",
            *call.setup,
            *(self._only_in_space(call.point, skip) if call.generic else ()),
            "mov.u64 %sanitizer_data, %sanitizer_userdata64;",
            "mov.u64 %sanitizer_pc, %sanitizer_pc64;",
            f"add.s64 %sanitizer_pc, %sanitizer_pc, {pc};",
            *(f".param .b{bits} {p};" for (bits, _), p in zip(arguments, formals, strict=True)),
            ".param .b32 sanitizer_returned;",
            *(f"st.param.b{b} [{p}], {o};" for (b, o), p in zip(arguments, formals, strict=True)),
            f"call (sanitizer_returned), {name}, ({', '.join(formals)});",
            "ld.param.b32 %sanitizer_result, [sanitizer_returned];",
            "setp.ne.u32 %sanitizer_failed, %sanitizer_result, 0;",
            "@%sanitizer_failed exit;",
            *([f"{skip}:"] if call.generic else ()),
            "}",
        ]

    @staticmethod
    def _only_in_space(point: int, skip: str) -> list[str]:
        """Return instructions that branch to `skip` unless a generic address is in the space of a point.

        Otherwise, they convert an address in shared or local memory from generic to that space.
        """
        lines = [".reg .pred %sanitizer_in;"]
        if point == GLOBAL:
            for space in ("shared", "local"):
                lines += [
                    f"isspacep.{space} %sanitizer_in, %sanitizer_address;",
                    f"@%sanitizer_in bra {skip};",
                ]
            return lines
        space = "shared" if point == SHARED else "local"
        return [
            *lines,
            f"isspacep.{space} %sanitizer_in, %sanitizer_address;",
            f"@!%sanitizer_in bra {skip};",
            f"cvta.to.{space}.u64 %sanitizer_address, %sanitizer_address;",
        ]

    # -- operands

    def _bits(self, name: str) -> int:
        """Return the size of a register in bits; 0 for another name."""
        found = self.declared.find(name)
        return 8 * type_size(found.type) if found is not None and found.space == "reg" else 0

    def _address(self, address: Address, register: str) -> list[str]:
        """Return instructions that put an address into a register of 64 bits."""
        base = "0" if address.base is None else address.base
        if self._bits(base) == 32:
            lines = [f"cvt.u64.u32 {register}, {base};"]
        else:
            lines = [f"mov.u64 {register}, {base};"]
        if address.index is not None:
            wide = f"{register}_index"
            lines += [
                f".reg .b64 {wide};",
                f"mul.wide.u32 {wide}, {address.index}, {address.unit};",
                f"add.s64 {register}, {register}, {wide};",
            ]
        if address.offset:
            lines.append(f"add.s64 {register}, {register}, {address.offset};")
        return lines

    def _number(self, operand: Operand, register: str) -> list[str]:
        """Return instructions that put an operand of 32 bits into a new register."""
        return [f".reg .b32 {register};", f"mov.b32 {register}, {operand};"]

    # -- instrumentation points

    def access(self, i: PtxInstruction) -> _Patches:
        """ld, st, atom, red: accesses of global, shared and local memory."""
        address = next((o for o in i.operands if isinstance(o, Address)), None)
        types = [m for m in i.modifiers if _is_type(m)]
        space = self._space(i, address)
        if address is None or not types or (space is not None and space not in _SPACES):
            return _Patches([], [])
        vector = next((int(m[1:]) for m in i.modifiers if m in ("v2", "v4", "v8")), 1)
        size = type_size(types[-1]) * vector
        flags = self._flags(i)
        setup = [".reg .b64 %sanitizer_address, %sanitizer_value_at;"]
        setup += self._address(address, "%sanitizer_address")
        setup += self._stored(i, types[-1], vector)
        arguments = [
            (64, "%sanitizer_address"),
            (32, str(size)),
            (32, str(flags)),
            (64, "%sanitizer_value_at"),
        ]
        if space is not None:
            return _Patches([_Call(_SPACES[space], arguments, setup)], [])
        return _Patches([_Call(point, arguments, setup, True) for point in (GLOBAL, SHARED, LOCAL)], [])

    def _space(self, i: PtxInstruction, address: Address | None) -> str | None:
        """Return the space of an access; None for a generic address."""
        for m in i.modifiers:
            if m in ("global", "local", "param", "const") or m.startswith(("shared", "param")):
                return m
        named = self.declared.find(address.base) if address is not None and address.base else None
        return None if named is None or named.space == "reg" else named.space

    def _flags(self, i: PtxInstruction) -> int:
        flags = _ACCESSES[i.opcode]
        scope = next((m for m in i.modifiers if m in _SCOPES), None)
        atomic = flags == READ | WRITE
        if atomic or not _STRONG.isdisjoint(i.modifiers):
            scope = scope or ("sys" if "volatile" in i.modifiers else "gpu")
            flags |= _SCOPES[scope]
            if atomic and scope == "sys":
                flags |= ATOMIC_SYSTEM
        return flags

    def _stored(self, i: PtxInstruction, kind: str, vector: int) -> list[str]:
        """Return instructions that set %sanitizer_value_at: to the address of the value that a store writes, else to 0."""
        if i.opcode != "st" or not isinstance(i.operands[1], Name | Immediate | Vector):
            return ["mov.u64 %sanitizer_value_at, 0;"]
        self.stores = True
        vectors = f".v{vector}" if vector > 1 else ""
        return [
            f"st.local{vectors}.{kind} [{_VALUE}], {i.operands[1]};",
            f"mov.u64 %sanitizer_value_at, {_VALUE};",
            "cvta.local.u64 %sanitizer_value_at, %sanitizer_value_at;",
        ]

    def barrier(self, i: PtxInstruction) -> _Patches:
        """bar and barrier: of the block, and of the warp."""
        modifiers = [m for m in i.modifiers if m != "cta"]
        if modifiers[:1] == ["warp"]:
            setup = self._number(i.operands[0], "%sanitizer_mask")
            arguments = [(32, "%sanitizer_mask")]
            return _Patches([_Call(SYNCWARP, arguments, setup)], [_Call(SYNCWARP_RELEASE, arguments, setup)])
        if modifiers[:1] == ["cluster"]:
            if "arrive" in modifiers:
                return _Patches([_Call(CLUSTER_ARRIVE)], [])
            return _Patches([_Call(CLUSTER_WAIT_ENTRY)], [_Call(CLUSTER_WAIT)])
        operands = list(i.operands)
        if modifiers[0] == "red":  # destination, barrier, threads, predicate
            operands = operands[1:-1]
        flags = SYNCHRONIZING if modifiers[0] != "arrive" else 0
        if i.opcode == "barrier" and "aligned" not in modifiers:
            flags |= UNALIGNED
        setup = self._number(operands[0], "%sanitizer_barrier")
        setup += self._number(operands[1] if len(operands) > 1 else Immediate("0"), "%sanitizer_threads")
        arguments = [(32, "%sanitizer_barrier"), (32, "%sanitizer_threads"), (32, str(flags))]
        after = [_Call(BARRIER_RELEASE, arguments, setup)] if flags & SYNCHRONIZING else []
        return _Patches([_Call(BARRIER, arguments, setup)], after)

    def leave(self, i: PtxInstruction) -> _Patches:
        """ret and exit."""
        point = BLOCK_EXIT if self.kernel or i.opcode == "exit" else RET
        return _Patches([_Call(point)], [])

    def shuffle(self, i: PtxInstruction) -> _Patches:
        return _Patches([_Call(SHFL)], [])

    def call(self, i: PtxInstruction) -> _Patches:
        """A call. For a system function, the patch gets 0 as the address of the target."""
        callee = next((o for o in i.operands if isinstance(o, Name)), None)
        if callee is None:
            return _Patches([], [])
        if callee.name in ("malloc", "free") and callee.name not in self.places:
            return self._heap(i, callee.name)
        setup = [".reg .b64 %sanitizer_target;"]
        if callee.name in self.places:
            offset = self.places[callee.name][0]
            setup += ["mov.u64 %sanitizer_target, %sanitizer_pc64;"]
            setup += [f"add.s64 %sanitizer_target, %sanitizer_target, {offset};"]
        else:
            known = self._bits(callee.name) == 64
            setup += [f"mov.u64 %sanitizer_target, {callee.name if known else 0};"]
        return _Patches([_Call(CALL, [(64, "%sanitizer_target"), (32, "0")], setup)], [])

    def _heap(self, i: PtxInstruction, name: str) -> _Patches:
        """malloc and free, whose arguments and result have 64 bits."""
        *returned, passed = (o.items[0] for o in i.operands if isinstance(o, Group))
        if name == "free":
            setup = self._argument(passed, "%sanitizer_memory")
            return _Patches([_Call(FREE, [(64, "%sanitizer_memory")], setup)], [])
        setup = self._argument(returned[0], "%sanitizer_memory")
        setup += self._argument(passed, "%sanitizer_size")
        arguments = [(64, "%sanitizer_memory"), (64, "%sanitizer_size")]
        return _Patches([], [_Call(MALLOC, arguments, setup)])

    def _argument(self, operand: Operand, register: str) -> list[str]:
        """Return instructions that put an argument or result of a call into a new register of 64 bits."""
        found = self.declared.find(operand.name) if isinstance(operand, Name) else None
        how = (
            f"ld.param.b64 {register}, [{operand}];"
            if found and found.space == "param"
            else f"mov.b64 {register}, {operand};"
        )
        return [f".reg .b64 {register};", how]

    def copy(self, i: PtxInstruction) -> _Patches:
        """cp.async of 4, 8 or 16 bytes and its groups; cp.async.bulk and cp.reduce.async.bulk, of tensors only to shared memory."""
        modifiers = i.modifiers
        if "commit_group" in modifiers:
            return _Patches([_Call(PIPELINE_COMMIT)], [])
        if "wait_group" in modifiers or "wait_all" in modifiers:
            if "bulk" in modifiers:
                return _Patches([], [])
            groups = i.operands[0] if i.operands else Immediate("0")
            return _Patches([_Call(PIPELINE_WAIT, [(32, str(groups))])], [])
        if "bulk" in modifiers and "prefetch" not in modifiers:
            return self._tensor(i) if "tensor" in modifiers else self._bulk(i)
        if modifiers[:1] != ("async",) or not {"bulk", "mbarrier"}.isdisjoint(modifiers):
            return _Patches([], [])
        to, source, size = i.operands[:3]
        rest = i.operands[3 : len(i.operands) - ("L2::cache_hint" in modifiers)]
        assert isinstance(to, Address) and isinstance(source, Address)
        setup = [
            ".reg .b64 %sanitizer_source, %sanitizer_wide;",
            ".reg .b32 %sanitizer_to, %sanitizer_zeros;",
        ]
        setup += self._address(source, "%sanitizer_source") + self._address(to, "%sanitizer_wide")
        setup += ["cvt.u32.u64 %sanitizer_to, %sanitizer_wide;", *self._zeros(rest, size)]
        arguments = [
            (64, "%sanitizer_source"),
            (32, "%sanitizer_to"),
            (32, str(size)),
            (32, "%sanitizer_zeros"),
        ]
        return _Patches([_Call(MEMCPY_ASYNC, arguments, setup)], [])

    def _bulk(self, i: PtxInstruction) -> _Patches:
        """A bulk copy: `[destination], [source], size`, then an mbarrier, a mask of blocks or a mask of bytes."""
        to, source, size = i.operands[:3]
        rest = i.operands[3 : len(i.operands) - ("L2::cache_hint" in i.modifiers)]
        barrier = next((o for o in rest if isinstance(o, Address)), None)
        mask = next((o for o in rest if not isinstance(o, Address)), None)
        assert isinstance(to, Address) and isinstance(source, Address)
        registers = "%sanitizer_to, %sanitizer_from, %sanitizer_barrier, %sanitizer_size, %sanitizer_mask"
        setup = [".reg .b64 %sanitizer_wide_to, %sanitizer_wide_from;", f".reg .b32 {registers};"]
        setup += self._address(to, "%sanitizer_wide_to") + self._address(source, "%sanitizer_wide_from")
        setup += [
            "cvt.u32.u64 %sanitizer_to, %sanitizer_wide_to;",
            "cvt.u32.u64 %sanitizer_from, %sanitizer_wide_from;",
            f"mov.b32 %sanitizer_size, {size};",
            "shr.u32 %sanitizer_size, %sanitizer_size, 4;",  # blocks of 16 bytes
            "mov.b32 %sanitizer_barrier, 0;",
        ]
        if barrier is not None:
            setup += [".reg .b64 %sanitizer_wide;", *self._address(barrier, "%sanitizer_wide")]
            setup.append("cvt.u32.u64 %sanitizer_barrier, %sanitizer_wide;")
        data = [
            (32, "%sanitizer_to"),
            (32, "%sanitizer_from"),
            (32, "%sanitizer_barrier"),
            (32, "%sanitizer_size"),
        ]
        wide_to, wide_from = (64, "%sanitizer_wide_to"), (64, "%sanitizer_wide_from")
        spaces = [m for m in i.modifiers if m.startswith(("global", "shared"))]  # destination, source
        to_global = spaces[0] == "global"
        if i.modifiers[0] == "reduce":
            if to_global:
                return _Patches([_Call(BULK_REDUCTION_TO_GLOBAL, [wide_to, data[1], data[3]], setup)], [])
            order = [data[1], data[0], data[2], data[3]]
            return _Patches([_Call(BULK_REDUCTION_TO_SHARED, order, setup)], [])
        if "global" not in spaces:
            order = [data[1], data[0], data[2], data[3]]
            return _Patches([_Call(BULK_SHARED_TO_SHARED, order, setup)], [])
        masked = (32, "1" if mask is not None else "0")
        if mask is not None:  # the mask has 16 bits
            setup += [
                f"cvt.u32.u16 %sanitizer_mask, {mask};",
                "shl.b32 %sanitizer_mask, %sanitizer_mask, 16;",
                "or.b32 %sanitizer_size, %sanitizer_size, %sanitizer_mask;",
            ]
        if to_global:
            return _Patches([_Call(BULK_SHARED_TO_GLOBAL, [wide_to, data[1], data[3], masked], setup)], [])
        order = [wide_from, data[0], data[2], data[3], masked]
        return _Patches([_Call(BULK_GLOBAL_TO_SHARED, order, setup)], [])

    def _tensor(self, i: PtxInstruction) -> _Patches:
        """A load from a tensor: `[destination], [map, {coordinates}], [mbarrier]`, and more. The header has no type for stores."""
        addresses = [o for o in i.operands if isinstance(o, Address)]
        if i.modifiers[0] == "reduce" or len(addresses) != 3 or len(addresses[1].coordinates) != 1:
            return _Patches([], [])
        to, tensor, barrier = addresses
        given = tensor.coordinates[0]
        places = given.items if isinstance(given, Vector) else (given,)
        names = [f"%sanitizer_place{number}" for number in range(_MOST_COORDINATES)]
        setup = [".reg .b64 %sanitizer_map, %sanitizer_wide_to, %sanitizer_wide;"]
        setup.append(f".reg .b32 %sanitizer_to, %sanitizer_barrier, {', '.join(names)};")
        setup += self._address(replace(tensor, coordinates=()), "%sanitizer_map")
        setup += [*self._address(to, "%sanitizer_wide_to"), *self._address(barrier, "%sanitizer_wide")]
        setup += ["cvt.u32.u64 %sanitizer_to, %sanitizer_wide_to;"]
        setup += ["cvt.u32.u64 %sanitizer_barrier, %sanitizer_wide;"]
        setup += [
            f"mov.b32 {name}, {place};"
            for name, place in itertools.zip_longest(names, places[:_MOST_COORDINATES], fillvalue="0")
        ]
        mode = next((k for k, name in enumerate(_LOAD_MODES) if name in i.modifiers), 0)
        multicast = int(any(m.startswith("multicast") for m in i.modifiers))
        numbers = (len(places), multicast, 0, mode)  # the mask and the offsets of im2col are not passed
        arguments = [(64, "%sanitizer_map"), (32, "%sanitizer_to"), (32, "%sanitizer_barrier")]
        arguments += [(32, name) for name in names] + [(32, str(number)) for number in numbers]
        return _Patches([_Call(TENSOR_LOAD, arguments, setup)], [])

    def _zeros(self, rest: tuple[Operand, ...], size: Operand) -> list[str]:
        """Return instructions that set %sanitizer_zeros to the bytes that a cp.async fills with zeros."""
        if not rest:
            return ["mov.b32 %sanitizer_zeros, 0;"]
        name = rest[0].operand if isinstance(rest[0], Not) else rest[0]
        if isinstance(name, Name) and self._bits(name.name) == 8:  # a predicate: ignore-src
            return (
                [f"selp.b32 %sanitizer_zeros, {size}, 0, {name};"]
                if name is rest[0]
                else [f"selp.b32 %sanitizer_zeros, 0, {size}, {name};"]
            )
        return [
            f"mov.b32 %sanitizer_zeros, {rest[0]};",
            f"sub.u32 %sanitizer_zeros, {size}, %sanitizer_zeros;",
        ]

    def matrix(self, i: PtxInstruction) -> _Patches:
        """ldmatrix and stmatrix: rows of 16 bytes in shared memory."""
        address = next((o for o in i.operands if isinstance(o, Address)), None)
        count = next((int(m[1:]) for m in i.modifiers if m in ("x1", "x2", "x4")), 0)
        if address is None or not count:
            return _Patches([], [])
        loads = i.opcode == "ldmatrix"
        setup = [".reg .b64 %sanitizer_wide;", ".reg .b32 %sanitizer_row;"]
        setup += [*self._address(address, "%sanitizer_wide"), "cvt.u32.u64 %sanitizer_row, %sanitizer_wide;"]
        setup += self._rows(i, count)
        arguments = [
            (32, "%sanitizer_row"),
            (32, "16"),
            (32, str(READ if loads else WRITE)),
            (32, str(count)),
            (64, "%sanitizer_value_at"),
        ]
        return _Patches([_Call(MATRIX, arguments, setup)], [])

    def _rows(self, i: PtxInstruction, count: int) -> list[str]:
        """Return instructions that set %sanitizer_value_at to the address of the registers that stmatrix writes, else to 0."""
        lines = [".reg .b64 %sanitizer_value_at;", "mov.u64 %sanitizer_value_at, 0;"]
        if i.opcode == "ldmatrix":
            return lines
        self.stores = True
        vectors = f".v{count}" if count > 1 else ""
        return [
            lines[0],
            f"st.local{vectors}.b32 [{_VALUE}], {i.operands[1] if count > 1 else _single(i.operands[1])};",
            f"mov.u64 %sanitizer_value_at, {_VALUE};",
            "cvta.local.u64 %sanitizer_value_at, %sanitizer_value_at;",
        ]

    def prefetch(self, i: PtxInstruction) -> _Patches:
        """prefetch to a cache."""
        address = next((o for o in i.operands if isinstance(o, Address)), None)
        level = next((k for k, m in ((1, "L1"), (2, "L2")) if m in i.modifiers), 0)
        if address is None or not level:
            return _Patches([], [])
        setup = [".reg .b64 %sanitizer_address;", *self._address(address, "%sanitizer_address")]
        return _Patches([_Call(CACHE_CONTROL, [(64, "%sanitizer_address"), (32, str(level))], setup)], [])


def _single(operand: Operand) -> Operand:
    return operand.items[0] if isinstance(operand, Vector) else operand


def _is_type(modifier: str) -> bool:
    try:
        type_size(modifier)
    except PtxError:
        return False
    return True


_POINTS: dict[str, Callable[[_Patcher, PtxInstruction], _Patches]] = {
    **dict.fromkeys(_ACCESSES, _Patcher.access),
    **dict.fromkeys(("bar", "barrier"), _Patcher.barrier),
    **dict.fromkeys(("ret", "exit"), _Patcher.leave),
    **dict.fromkeys(("ldmatrix", "stmatrix"), _Patcher.matrix),
    "shfl": _Patcher.shuffle,
    "cp": _Patcher.copy,
    "prefetch": _Patcher.prefetch,
    "call": _Patcher.call,
}

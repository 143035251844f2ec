"""Translate one PTX function to a C function that runs its basic blocks for the lanes of a warp.

Straight-line code becomes loops over the active lanes (segments). Registers that live only inside a segment are C
locals; those that live longer are arrays in the warp's frame. Everything that can stop a warp (barriers, collectives,
calls, branches) ends a block, so a warp is always resumed at the start of a block.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from gpubpf.errors import PtxError
from gpubpf.ptx.carry import reads_carry
from gpubpf.ptx.flow import KERNEL_LAUNCHES, find_names
from gpubpf.ptx.module import (
    Function,
    Group,
    Immediate,
    Label,
    Name,
    Not,
    Operand,
    Pair,
    PtxInstruction,
    Variable,
    Vector,
)

from . import copies, dynamic_parallelism, matrix, memory, tensor, texture, video  # noqa: F401 (copies, texture, video: their instructions)
from .arithmetic import TABLE, lose_carry
from .block import Block
from .lane_loops import MOST_TURNS, LaneLoop, lane_loops, suits
from .scope import Names, Register, Scope, Storage
from .values import Code, Unsupported, Values, c_type, size_of

SLOT = 16  # bytes: alignment of call arguments
SYSTEM_CALLS = {"vprintf", "malloc", "free", "__assertfail"}
# A loop with atomics or ordered loads may wait for another thread, so each iteration uses more of the quantum.
SPIN_COST = 16

MIN_CHECKED_TOGETHER = 6  # shared accesses in a segment, to check them all at once
MOST_STEPS = 24  # instructions to compute a value again where it is used
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]+|\d+")
_ARGUMENT = re.compile(r"R->(r_p_\w+)\[l\]")
# What the C of a value mentions that differs between lanes, or that is no value of its own; a lane's number and thread index vary only
# with the lane.
_VARIES = re.compile(r"\b(?:l|mask|now|api|at_\w+|cs_\w+|R)\b|w->(?:at|budget)\b")
_LANE = re.compile(r"w->tid\[[0-2]\]\[l\]|\bl\b")
_FRAME = re.compile(r"R->(\w+)")
_SHARED = re.compile(r"at_shared/\*(\w+)\+(\d+)\*/\(w, [^,]*, (\d+), \d+, CS_AT\(\d+, \d+\)\)")


def slots(sizes: list[int]) -> list[int]:
    """Return the offsets of arguments in the argument area, followed by its size, in bytes."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + max(SLOT, (size + SLOT - 1) // SLOT * SLOT))
    return offsets


def kernel_parameters(function: Function) -> list[tuple[int, int, int]]:
    """Return (offset, size, alignment) of each parameter of a kernel, in bytes."""
    found: list[tuple[int, int, int]] = []
    at = 0
    for p in function.parameters:
        at = (at + p.alignment - 1) // p.alignment * p.alignment
        found.append((at, p.size, p.alignment))
        at += p.size
    return found


class FunctionCode:
    """The translation of one function. `render` needs the decisions of the module: numbers of blocks, frame offsets."""

    def __init__(
        self,
        function: Function,
        index: int,
        module_scope: dict[str, Storage],
        functions: dict[str, Function],
        indices: dict[str, int],
        virtual: bool = False,
        counted: bool = False,
    ) -> None:
        self.function = function
        self.virtual = virtual
        self.counted = counted
        self.index = index
        self.functions = functions
        self.names = Names(function, module_scope)
        self.values = Values(self.names, indices, virtual)
        self.kernel = function.kind == "entry"
        self.blocks: list[Block] = []
        self.observes = False  # virtual clock: results depend on the order in which threads communicate
        self.callees: set[str] = set()
        self.indirect = False
        self.args_size = 0
        # Results of a .func: destination, slot, size.
        self.arguments: list[tuple[Storage | Register, int, int]] = []
        self.results: list[tuple[Storage | Register, int, int]] = []
        self.recursive = False
        self._labels: dict[int, Block] = {}
        self._current = Block()
        self._declare()
        self.adds_carry = any(
            isinstance(statement, PtxInstruction) and reads_carry(statement)
            for statement, _ in self.names.statements
        )
        self._together: dict[Register, Code] = {}  # results of activemask
        self.values.constants = self._constants()
        self._build()
        self._liveness()
        self._repeat = self._computed_again()

    # -- declarations

    def _declare(self) -> None:
        root = self.names.root
        if self.kernel:
            for p, (at, size, align) in zip(
                self.function.parameters, kernel_parameters(self.function), strict=True
            ):
                root.storages[p.name] = Storage("kernel", p.name, at, size, align)
        else:
            self._formals(self.function.parameters, self.arguments)
            self._formals(self.function.returns, self.results)
        body = self.function.body
        assert body is not None
        self.names.flatten(body)
        if not self.kernel:
            self._find_address_taken()

    @property
    def injected(self) -> bool:
        """Return whether the injector added the whole function."""
        instructions = sum(isinstance(statement, PtxInstruction) for statement, _ in self.names.statements)
        return not self.kernel and len(self.names.injected) == instructions

    def _formals(self, formals: tuple[Variable, ...], out: list[tuple[Storage | Register, int, int]]) -> None:
        offsets = slots([p.size for p in formals])
        self.args_size = max(self.args_size, offsets[-1])
        for p, offset in zip(formals, offsets, strict=False):
            if p.space != "reg":
                out.append((self.names.declare_parameter(self.names.root, p), offset, p.size))
                continue
            self.names.declare(self.names.root, p)
            elements = [f"{p.name}.{e}" for e in "xyzw"[: p.vector]] if p.vector > 1 else [p.name]
            for k, element in enumerate(elements):
                register = self.names.root.registers[element]
                width = max(1, register.width)
                out.append((register, offset + k * width, width))

    def _find_address_taken(self) -> None:
        """Put parameters whose address mov takes into local memory (PTX ISA 9.7.9.4)."""
        byname = {p.name for p in self.function.parameters}
        for statement, scope in self.names.statements:
            if isinstance(statement, PtxInstruction) and statement.opcode == "mov":
                for o in statement.operands[1:]:
                    if (
                        isinstance(o, Name)
                        and o.name in byname
                        and self.names.register(scope, o.name) is None
                    ):
                        storage = self.names.storage(scope, o.name)
                        if storage is not None and storage.kind == "frame":
                            align = max(8, storage.align)
                            self.names.local_size = (self.names.local_size + align - 1) // align * align
                            self.values.local_parameters[storage.name] = self.names.local_size
                            scope.storages[o.name] = storage
                            self.names.root.storages[o.name] = storage
                            self.names.local_size += storage.size

    # -- blocks

    def _start(self, block: Block | None = None) -> Block:
        """Begin the next block. The current block falls through to it if it has no end yet."""
        block = block or Block()
        if not self._current.targets and self._current.kind == "goto":
            self._current.targets = [block]
        self.blocks.append(block)
        self._current = block
        return block

    def _end(self, kind: str, *targets: Block) -> Block:
        block = self._current
        block.kind = kind
        block.targets = list(targets)
        return block

    def _label(self, number: int) -> Block:
        return self._labels.setdefault(number, Block())

    def _build(self) -> None:
        again = self._repeated() if self.virtual else range(0)
        mentions = self._mentions() if self.virtual else Counter()
        self._current = Block()
        self.blocks.append(self._current)  # prologue
        self._start()
        v = self.values
        for position, (statement, scope) in enumerate(self.names.statements):
            if isinstance(statement, Label):
                self._omitted(position)
                self._start(self._label(scope.labels[statement.name]))
                continue
            if self._current.kind != "goto" or self._current.targets:
                self._start()
            self._omitted(position)
            if self.virtual and position not in self.names.injected and memory.communicates(statement):
                if self._current.codes or self._current.reached:
                    self._start()
                self._current.turn = True
                result = next(find_names(statement.operands[:1]), "_")
                used = statement.opcode == "atom" and result != "_" and mentions[result] > 1
                self.observes |= memory.observes(statement, used, not self.kernel or position in again)
            self._current.lines.append(statement.line)
            v.begin(statement, scope)
            v.injected = position in self.names.injected
            v.elapsed, v.cost = self._current.reached, int(not v.injected)
            self._current.reached += v.cost
            control = _CONTROL.get(statement.opcode)
            if control is not None and not (self.virtual and control == "_sleep"):
                v.elapsed = v.cost = (
                    0  # the operands of a terminator are read after the block's time has passed
                )
                self._checked(getattr(self, control), statement, scope)
                continue
            if statement.opcode == "call":
                self._checked(self._call, statement, scope)
                continue
            emit = TABLE.get(statement.opcode)
            if emit is None:
                raise v.unsupported()
            self._append(statement, scope, self._checked(emit, v, statement))
        self._omitted(len(self.names.statements))
        if self._current.kind == "goto" and not self._current.targets:
            self._end("exit" if self.kernel else "return")
        for block in self.blocks:
            if block.kind == "goto" and not block.targets:
                raise PtxError(f"{self.function.name}: a block without an end")
        placed = set(map(id, self.blocks))
        for block in self.blocks:
            if any(id(t) not in placed for t in block.targets):
                raise PtxError(f"{self.function.name}: a branch to a label that is not there")
        for number, block in enumerate(self.blocks):
            block.number = number

    def _constants(self) -> dict[Register, Immediate]:
        """Return the registers whose only definition is a mov of a number. nvcc passes the members of shuffles and votes in these."""
        found: dict[Register, Immediate] = {}
        written = Counter(w for w, _, _ in self.arguments if isinstance(w, Register))
        for statement, scope in self.names.statements:
            if not isinstance(statement, PtxInstruction):
                continue
            for name in find_names(statement.operands[:1]):  # addresses too, which is safe
                if (register := self.names.register(scope, name)) is not None:
                    written[register] += 1
                    if statement.opcode != "mov" or statement.predicate is not None:
                        continue
                    destination, source = statement.operands
                    kind = statement.modifiers[-1]
                    if (
                        isinstance(destination, Name)
                        and isinstance(source, Immediate)
                        and not source.is_float
                        and kind[0] != "f"
                        and register.width in (4, 8)
                        and size_of(kind) == register.width
                    ):
                        found[register] = source
        return {register: number for register, number in found.items() if written[register] == 1}

    def _repeated(self) -> set[int]:
        """Return the positions of statements that a backward branch may repeat."""
        labels: dict[int, int] = {}
        end: dict[int, int] = {}  # position of a label → position of the last branch back to it
        for position, (statement, scope) in enumerate(self.names.statements):
            if isinstance(statement, Label):
                labels[scope.labels[statement.name]] = position
        for position, (statement, scope) in enumerate(self.names.statements):
            if not isinstance(statement, PtxInstruction) or statement.opcode not in ("bra", "brx"):
                continue
            last = statement.operands[-1] if statement.operands else None
            if not isinstance(last, Name):
                continue
            targets: tuple[str, ...] = (last.name,)
            if statement.opcode == "brx":
                targets = self.names.table(scope, last.name, statement.line)
            for target in targets:
                begin = labels[self.names.label(scope, target, statement.line)]
                if begin < position:
                    end[begin] = position
        found: set[int] = set()
        until = -1
        for position in range(len(self.names.statements)):
            until = max(until, end.get(position, -1))
            if position <= until:
                found.add(position)
        return found

    def _mentions(self) -> Counter[str]:
        """Count how often each name occurs in operands and as a predicate."""
        found: Counter[str] = Counter()
        for statement, _ in self.names.statements:
            if isinstance(statement, PtxInstruction):
                found.update(find_names(statement.operands))
        return found

    def _omitted(self, position: int) -> None:
        """Count the instructions of the original that this copy leaves out before a statement."""
        count = self.names.omitted.get(position)
        if count:
            if self._current.kind != "goto" or self._current.targets:
                self._start()
            self._current.reached += count

    def _checked(self, emit: Callable[..., Any], *arguments: object) -> Any:
        """Report operands of unexpected number or kind as an unsupported instruction."""
        try:
            return emit(*arguments)
        except PtxError:
            raise
        except (KeyError, IndexError, ValueError, AssertionError, StopIteration):
            raise self.values.unsupported() from None

    def _append(self, statement: PtxInstruction, scope: Scope, text: str) -> None:
        code = self.values.code
        code.text = text
        timed = any(
            name.startswith(("%clock", "%globaltimer")) for name in find_names(statement.operands[1:])
        )
        code.rematerializable = (statement.opcode == "mov" and not timed) or (
            self.kernel and statement.opcode == "ld" and "param" in statement.modifiers
        )
        if statement.predicate is not None:
            found = self.names.register(scope, statement.predicate)
            if found is None:
                raise PtxError(f"PTX line {statement.line}: {statement.predicate} is not declared")
            code.text = f"if ({'!' if statement.negated else ''}{found.name}) {{ {text} }}"
            code.uses.add(found)
            code.uses |= code.defs
        if statement.opcode in ("atom", "red", "mbarrier") or (
            statement.opcode == "ld" and memory.strong(statement)
        ):
            self._current.spins = True
        self._current.codes.append(code)

    def _guard(self, statement: PtxInstruction, scope: Scope) -> Block | None:
        """Return the block to which lanes go that do not execute a predicated control instruction.

        The instruction gets its own block, which begins here.
        """
        if statement.predicate is None:
            return None
        found = self.names.register(scope, statement.predicate)
        if found is None:
            raise PtxError(f"PTX line {statement.line}: {statement.predicate} is not declared")
        after = Block()
        inner = Block()
        block = self._end("branch", inner, after)
        block.predicate, block.negated = found, statement.negated
        self._start(inner)
        self.values.begin(statement, scope)
        self.values.elapsed = self.values.cost = 0
        return after

    def _resume(self, after: Block | None) -> None:
        if after is not None:
            self._start(after)

    def _branch(self, statement: PtxInstruction, scope: Scope) -> None:
        target_name = statement.operands[0]
        if not isinstance(target_name, Name):
            raise self.values.unsupported()
        target = self._label(self.names.label(scope, target_name.name, statement.line))
        if statement.predicate is None:
            self._end("goto", target)
            return
        found = self.names.register(scope, statement.predicate)
        if found is None:
            raise PtxError(f"PTX line {statement.line}: {statement.predicate} is not declared")
        after = Block()
        block = self._end("branch", target, after)
        block.predicate, block.negated = found, statement.negated
        self._start(after)

    def _branch_table(self, statement: PtxInstruction, scope: Scope) -> None:
        after = self._guard(statement, scope)
        table = statement.operands[1]
        if not isinstance(table, Name):
            raise self.values.unsupported()
        names = self.names.table(scope, table.name, statement.line)
        targets = [self._label(self.names.label(scope, n, statement.line)) for n in names]
        head = self.values.code
        index = self.values.src(statement.operands[0], "u32")
        head.text = (
            f"const u32 i_ = {index}; w->pcs[l] = (const u32[]){{@TARGETS@}}[i_ < {len(targets)} ? i_ : 0];"
        )
        self._end("table", *targets).head = head
        self._resume(after)

    def _leave(self, statement: PtxInstruction, scope: Scope) -> None:
        after = self._guard(statement, scope)
        self._end("exit" if self.kernel or statement.opcode == "exit" else "return")
        self._resume(after)

    def _trap(self, statement: PtxInstruction, scope: Scope) -> None:
        after = self._guard(statement, scope)
        self._end("trap").line = statement.line
        self._resume(after)

    # -- calls

    def _call(self, statement: PtxInstruction, scope: Scope) -> None:
        operands = list(statement.operands)
        returned = self._group(operands)
        callee = operands.pop(0)
        passed = self._group(operands)
        if not isinstance(callee, Name):
            raise self.values.unsupported()
        register = self.names.register(scope, callee.name)
        if register is None and callee.name in SYSTEM_CALLS:
            call = self._system_call(callee.name, returned, passed, scope)
            self._append(statement, scope, " ".join([call, *self._lost_carry()]))
            return
        target = self.functions.get(callee.name)
        if register is None and (target is None or not target.defined):
            if (function := dynamic_parallelism.find(callee.name)) is not None:
                call = self._runtime_call(function, returned, passed, scope)
                self._append(statement, scope, " ".join([call, *self._lost_carry()]))
                return
            if KERNEL_LAUNCHES.match(callee.name):
                raise Unsupported(
                    f"PTX line {statement.line}: the kernel launches kernels with {callee.name}, which the embedded device lacks"
                )
            raise Unsupported(
                f"PTX line {statement.line}: function {callee.name} is not defined in this module"
            )
        after = self._guard(statement, scope)
        v = self.values
        v.elapsed = v.cost = 0
        head = v.code
        parts: list[str] = []
        formal_sizes = [p.size for p in target.parameters] if target is not None else None
        sizes = [self._argument_size(o, scope, formal_sizes, k) for k, o in enumerate(passed)]
        offsets = slots(sizes)
        self.args_size = max(self.args_size, offsets[-1])
        for o, size, offset in zip(passed, sizes, offsets, strict=False):
            where = f"w->args + (u64)l * @ARGS@ + {offset}"
            storage = None
            if isinstance(o, Name) and self.names.register(scope, o.name) is None:
                storage = self.names.storage(scope, o.name)
            if storage is not None and storage.kind == "frame":
                parts.append(f"__builtin_memcpy({where}, R->{storage.name}[l], {min(size, storage.size)});")
            elif storage is not None and storage.kind == "kernel":
                parts.append(
                    f"__builtin_memcpy({where}, w->params + {storage.index}, {min(size, storage.size)});"
                )
            else:
                items = o.items if isinstance(o, Vector) else (o,)
                width = size // len(items)
                for k, item in enumerate(items):
                    t = self._argument_type(item, scope, width)
                    parts.append(f"ST({c_type(width)}, {where} + {k * width}, {v.src(item, t)});")
        parts.append("w->retpc[l] = @NEXT@;")
        resume = Block()
        if register is not None:
            self.indirect = True
            parts.append(f"w->pcs[l] = api->indirect(w, {v.read(register)});")
            head.memory = True
            parts.insert(0, v.line())
            block = self._end("indirect", resume)
        else:
            assert target is not None
            self.callees.add(target.name)  # callee.name may be an alias
            block = self._end("call", resume)
            block.detail = target.name
        head.text = " ".join(parts)
        block.head = head
        self._start(resume)
        v.begin(statement, scope)
        texts = []
        formal_sizes = [p.size for p in target.returns] if target is not None else None
        sizes = [self._argument_size(o, scope, formal_sizes, k) for k, o in enumerate(returned)]
        offsets = slots(sizes)
        self.args_size = max(self.args_size, offsets[-1])
        for o, size, offset in zip(returned, sizes, offsets, strict=False):
            where = f"w->args + (u64)l * @ARGS@ + {offset}"
            if isinstance(o, Vector) or (
                isinstance(o, Name) and self.names.register(scope, o.name) is not None
            ):
                items = o.items if isinstance(o, Vector) else (o,)
                width = size // len(items)
                for k, item in enumerate(items):
                    t = self._argument_type(item, scope, width)
                    texts.append(v.dst(item, t, f"LD({c_type(width)}, {where} + {k * width})"))
                continue
            assert isinstance(o, Name)
            storage = self.names.storage(scope, o.name)
            if storage is None or storage.kind != "frame":
                if o.name == "_":
                    continue
                raise v.unsupported(f"result {o.name}")
            texts.append(f"__builtin_memcpy(R->{storage.name}[l], {where}, {min(size, storage.size)});")
        texts += self._lost_carry()
        if texts:
            v.code.text = " ".join(texts)
            self._current.codes.append(v.code)
        self._resume(after)

    def _lost_carry(self) -> list[str]:
        """Return the C for what a call does to the carry, if this function adds one."""
        return [lose_carry(self.values)] if self.adds_carry else []

    @staticmethod
    def _group(operands: list[Operand]) -> tuple[Operand, ...]:
        """Take `(a, b)` from the front of the operands, if there is one."""
        if not operands or not isinstance(operands[0], Group):
            return ()
        group = operands.pop(0)
        assert isinstance(group, Group)
        return group.items

    def _argument_size(self, o: Operand, scope: Scope, formal: list[int] | None, k: int) -> int:
        if formal is not None and k < len(formal):
            return formal[k]
        if isinstance(o, Vector):
            return sum(self._argument_size(item, scope, None, 0) for item in o.items)
        if isinstance(o, Name):
            register = self.names.register(scope, o.name)
            if register is not None:
                return max(1, register.width)
            storage = self.names.storage(scope, o.name)
            if storage is not None and storage.kind in ("frame", "kernel"):
                return storage.size
        return 8

    def _argument_type(self, o: Operand, scope: Scope, width: int) -> str:
        """Return the type of an argument or result of `width` bytes."""
        found = self.names.register(scope, o.name) if isinstance(o, Name) else None
        return "pred" if found is not None and not found.width else f"b{width * 8}"

    def _system_call(
        self, name: str, returned: tuple[Operand, ...], passed: tuple[Operand, ...], scope: Scope
    ) -> str:
        v = self.values
        v.code.alone = True
        v.code.memory = True

        def argument(k: int, width: int) -> str:
            return self._passed(passed[k], scope, width)

        if name == "__assertfail":
            list_ = f"{argument(0, 8)}, {argument(1, 8)}, {argument(2, 4)}, {argument(3, 8)}"
            return f"{v.line()} api->assertfail(w, {list_});"
        calls = {"vprintf": ("vprintf", 2, 4), "malloc": ("allocate", 1, 8), "free": ("release", 1, 0)}
        service, count, width = calls[name]
        call = f"api->{service}(w, {', '.join(argument(k, 8) for k in range(count))})"
        return self._returned(call, width, returned, scope)

    def _runtime_call(
        self,
        function: dynamic_parallelism.Call,
        returned: tuple[Operand, ...],
        passed: tuple[Operand, ...],
        scope: Scope,
    ) -> str:
        """Return the text of a call of the device runtime, lane by lane."""
        v = self.values
        v.code.alone = True
        v.code.memory = True
        if len(passed) != len(function.arguments):
            raise v.unsupported("number of arguments")
        arguments = []
        for operand, size in zip(passed, function.arguments, strict=True):
            if size == dynamic_parallelism.DIM3:
                arguments += [self._passed(operand, scope, 4, at) for at in (0, 4, 8)]
            else:
                arguments.append(self._passed(operand, scope, size))
        call = f"api->runtime(w, {function.number}, (const u64[]){{{', '.join(arguments) or '0'}}})"
        return self._returned(call, function.result, returned, scope)

    def _passed(self, operand: Operand, scope: Scope, width: int, offset: int = 0) -> str:
        """Return the text of an argument of `width` bytes, or of that part of it which begins at `offset`."""
        if isinstance(operand, Name) and self.names.register(scope, operand.name) is None:
            storage = self.names.storage(scope, operand.name)
            if storage is not None and storage.kind == "frame":
                return f"LD(u{width * 8}, R->{storage.name}[l]{f' + {offset}' if offset else ''})"
        if offset:
            raise self.values.unsupported("an argument")
        return self.values.src(operand, f"b{width * 8}")

    def _returned(self, call: str, width: int, returned: tuple[Operand, ...], scope: Scope) -> str:
        """Return the text that stores what a call of the system returns, `width` bytes."""
        v = self.values
        if not returned or not width:
            return f"{v.line()} {call};"
        o = returned[0]
        assert isinstance(o, Name)
        if self.names.register(scope, o.name) is not None:
            return f"{v.line()} {v.dst(o, f'b{width * 8}', call)}"
        storage = self.names.storage(scope, o.name)
        if storage is None:
            raise v.unsupported(f"result {o.name}")
        return f"{v.line()} ST(u{width * 8}, R->{storage.name}[l], {call});"

    # -- barriers and collectives

    def _collective(
        self,
        statement: PtxInstruction,
        scope: Scope,
        operation: str,
        a: tuple[Operand, str] | None,
        b: str,
        c: str,
        members: Operand | None,
        results: list[tuple[Operand, str, str]],
    ) -> None:
        """End a block with a collective. members: the operand with the mask; None: the lanes that are here."""
        v = self.values
        head, block = v.code, self._current
        arrived, mask = self._arrived(block, members)
        parts = {"cb": b, "cc": c, "cm": mask}
        constant = {k for k, text in parts.items() if _NUMBER.fullmatch(text.rstrip("u"))}
        fixed = constant & {"cb", "cc"} if arrived and "SHFL" in operation else set()
        later = fixed | ({"cm"} if arrived and operation != "CS_OP_SYNC_TIMES" else set())
        if constant >= later >= {"cm"}:
            bits = sum(bit for k, bit in (("cb", 1), ("cc", 2)) if k in later)
            block.alike = f"{bits}, {', '.join(parts[k] if k in later else '0' for k in ('cb', 'cc', 'cm'))}"
        waits = [f"w->{k}[l] = {parts[k]};" for k in parts if k in later and not block.alike]
        if arrived and a is not None and a[1] == "pred" and (voter := self._voter(a[0])) is not None:
            block.predicate, block.negated = voter
            waits.append("w->ca[l] = ones_ >> l & 1;")
        elif a is not None:
            parts = {"ca": v.src(*a), **parts}
        head.text = " ".join(f"w->{k}[l] = {text};" for k, text in parts.items() if text and k not in later)
        if "SHFL" in operation:
            given = [parts[k] if k in fixed else "0" for k in ("cb", "cc")]
            how = ("cb" in fixed) + 2 * ("cc" in fixed)
            name = f"shuffle_{operation.rpartition('_')[2].lower()}_{how}_{'_'.join(given)}"
            v.helpers[name] = (
                f"OPTIMIZED void {name}(W *w, u32 mask) {{ cs_shuffle(w, mask, {operation}, {how}, {', '.join(given)}); }}"
            )
            block.direct = f"{name}(w, mask);"
        elif block.predicate is not None:
            block.direct = f"cs_vote(w, mask, {operation}, ones_);"
        elif operation == "CS_OP_MATCH_ALL":
            block.direct = "cs_match_all(w, mask);"
        elif operation != "CS_OP_SYNC":
            block.direct = f"api->execute(w, mask, {operation});"
        resume = Block()
        self._end("collective", resume)
        block.detail, block.head, block.line = operation, head, statement.line
        block.arrived, block.waits = arrived, " ".join(waits)
        self._start(resume)
        v.begin(statement, scope)
        text = " ".join(v.dst(o, t, expression) for o, t, expression in results)
        if text:
            v.code.text = text
            self._current.codes.append(v.code)

    def _arrived(self, block: Block, members: Operand | None) -> tuple[str, str]:
        """Return C that tells whether all members of a collective at the end of a block are here, and the members.

        Constant members are here unless some are missing. So are the lanes that activemask found in the same block, but for those
        of other callers."""
        if members is None:
            return "1", "mask"
        found = self.names.register(self.values.scope, members.name) if isinstance(members, Name) else None
        last = next((code for code in reversed(block.codes) if found in code.defs), None)
        if found is not None and last is not None and self._together.get(found) is last:
            if self.kernel:
                return "1", "mask"
            return "cs_one_caller(R->ret, mask)", "cs_same_caller(R->ret, mask, l)"
        text = self.values.src(members, "b32")
        return (f"!({text} & ~w->exited & ~mask)" if _NUMBER.fullmatch(text.rstrip("u")) else ""), text

    def _voter(self, operand: Operand) -> tuple[Register, bool] | None:
        """Return the predicate register that a vote reads, and whether it is negated; None if the operand is none."""
        negated = isinstance(operand, Not)
        name = operand.operand if isinstance(operand, Not) else operand
        found = self.names.register(self.values.scope, name.name) if isinstance(name, Name) else None
        return (found, negated) if found is not None and not found.width else None

    def _warp(self, i: PtxInstruction, scope: Scope) -> None:
        """Translate shfl, vote, match, redux and elect (PTX ISA 9.7.9.6, 9.7.13)."""
        after = self._guard(i, scope)
        v = self.values
        m = i.modifiers
        operands = i.operands
        sync = "sync" in m
        if i.opcode == "activemask":  # in a function, lanes are together if they were called from one place
            together = "mask"
            if not self.kernel:
                v.code.alone = True
                v.code.before = "const u32 one_ = cs_one_caller(R->ret, mask);"
                together = "one_ ? mask : cs_same_caller(R->ret, mask, l)"
            v.code.text = v.dst(operands[0], "b32", together)
            if i.predicate is None:
                self._together |= dict.fromkeys(v.code.defs, v.code)
            self._current.codes.append(v.code)
            self._resume(after)
            return

        def members(k: int) -> Operand | None:
            return operands[k] if sync else None

        value, predicate = "(u32)w->cr[l]", "w->cp[l]"
        if i.opcode == "shfl":
            mode = next(x for x in m if x in ("up", "down", "bfly", "idx"))
            results = self._pair(operands[0], "b32", value, predicate)
            self._collective(
                i,
                scope,
                f"CS_OP_SHFL_{mode.upper()}",
                (operands[1], "b32"),
                v.src(operands[2], "b32"),
                v.src(operands[3], "b32"),
                members(4),
                results,
            )
        elif i.opcode == "vote":
            mode = next(x for x in m if x in ("all", "any", "uni", "ballot"))
            results = [(operands[0], "b32", value) if mode == "ballot" else (operands[0], "pred", value)]
            self._collective(
                i, scope, f"CS_OP_VOTE_{mode.upper()}", (operands[1], "pred"), "", "", members(2), results
            )
        elif i.opcode == "match":
            mode = "ANY" if "any" in m else "ALL"
            results = self._pair(operands[0], "b32", value, predicate)
            self._collective(
                i, scope, f"CS_OP_MATCH_{mode}", (operands[1], m[-1]), "", "", members(2), results
            )
        elif i.opcode == "redux":
            kind = m[-1]
            operation = next(x for x in m if x in ("add", "min", "max", "and", "or", "xor")).upper()
            if size_of(kind) != 4:
                raise v.unsupported()
            if operation in ("MIN", "MAX"):
                operation += {"s32": "S", "f32": "F"}.get(kind, "U")
            flags = f"{('abs' in m) + 2 * ('NaN' in m)}" if kind == "f32" else ""
            results = [(operands[0], "b32", value)]
            self._collective(
                i, scope, f"CS_OP_REDUX_{operation}", (operands[1], "b32"), "", flags, members(2), results
            )
        elif i.opcode == "elect":
            results = self._pair(operands[0], "b32", value, predicate)
            self._collective(i, scope, "CS_OP_ELECT", None, "", "", members(1), results)
        self._resume(after)

    @staticmethod
    def _pair(destination: Operand, t: str, value: str, predicate: str) -> list[tuple[Operand, str, str]]:
        if isinstance(destination, Pair):
            return [(destination.first, t, value), (destination.second, "pred", predicate)]
        return [(destination, t, value)]

    def _matrix(self, i: PtxInstruction, scope: Scope) -> None:
        """Translate ldmatrix, stmatrix and movmatrix: lanes offer addresses or contents of rows, then load or store."""
        after = self._guard(i, scope)
        v = self.values
        head = v.code
        head.text = f"{matrix.offer(v, i)} w->cm[l] = ~0u;"
        resume = Block()
        block = self._end("collective", resume)
        block.detail, block.head, block.line = "CS_OP_SYNC", head, i.line
        self._start(resume)
        v.begin(i, scope)
        v.code.alone = True
        v.code.text = matrix.exchange(v, i)
        self._current.codes.append(v.code)
        self._resume(after)

    def _tensor(self, i: PtxInstruction, scope: Scope) -> None:
        """Translate mma, wmma and wgmma: all lanes arrive, then load, multiply or store."""
        if i.opcode == "wgmma" and i.modifiers[0] in ("fence", "commit_group", "wait_group"):
            self._append(i, scope, "")  # a multiplication is done at once
            return
        after = self._guard(i, scope)
        v = self.values
        resume = Block()
        block = self._end("collective", resume)
        block.detail, block.line = "CS_OP_SYNC", i.line
        block.arrived, block.alike = "!(~w->exited & ~mask)", "0, 0, 0, ~0u"
        self._start(resume)
        v.begin(i, scope)
        moves = i.opcode == "wmma" and i.modifiers[0] in ("load", "store")
        if i.opcode == "wgmma":
            v.code.text = tensor.multiply_group(v, i)
        else:
            v.code.text = tensor.transfer(v, i) if moves else tensor.multiply(v, i)
        self._current.codes.append(v.code)
        self._resume(after)

    def _barrier(self, i: PtxInstruction, scope: Scope) -> None:
        """Translate bar and barrier (PTX ISA 9.7.13.1–3)."""
        after = self._guard(i, scope)
        v = self.values
        m = [x for x in i.modifiers if x not in ("cta", "aligned")]
        if m[0] == "warp":
            operation = "CS_OP_SYNC_TIMES" if v.virtual and not v.injected else "CS_OP_SYNC"
            self._collective(i, scope, operation, None, "", "", i.operands[0], [])
            self._resume(after)
            return
        if m[0] == "cluster":  # a cluster has one block here
            if m[1] == "arrive":
                self._resume(after)
                return
            kind, number, count, predicate = "CS_BAR_SYNC", "16", "0", "0"
        else:
            operands = list(i.operands)
            kind = {"sync": "CS_BAR_SYNC", "arrive": "CS_BAR_ARRIVE", "red": "CS_BAR_RED"}.get(m[0], "")
            if not kind:
                raise v.unsupported()
            destination = None
            predicate = "0"
            if m[0] == "red":
                kind = f"CS_BAR_{m[1].upper()}"
                destination = operands.pop(0)
                predicate = v.src(operands.pop(), "pred")
            number = v.src(operands[0], "u32")
            count = v.src(operands[1], "u32") if len(operands) > 1 else "0"
        head = v.code
        head.text = f"w->ca[l] = {number}; w->cb[l] = {count}; w->cc[l] = {predicate};"
        constants = f"{number} {count}".replace("u", "").split()
        if (
            kind == "CS_BAR_SYNC"
            and all(_NUMBER.fullmatch(x) for x in constants)
            and int(constants[0], 0) <= 16
        ):
            head.text = ""
            kind = f"{number}, {count}"
        resume = Block()
        block = self._end("barrier", resume)
        block.detail, block.head, block.line = kind, head, i.line
        self._start(resume)
        if m[0] == "red":
            v.begin(i, scope)
            assert destination is not None
            v.code.text = v.dst(destination, "u32" if m[1] == "popc" else "pred", "(u32)w->cr[l]")
            self._current.codes.append(v.code)
        self._resume(after)

    def _sleep(self, i: PtxInstruction, scope: Scope) -> None:
        after = self._guard(i, scope)
        head = self.values.code
        head.text = f"w->cb[l] = {self.values.src(i.operands[0], 'u32')};"
        resume = Block()
        self._end("sleep", resume).head = head
        self._start(resume)
        self._resume(after)

    # -- liveness of registers at block boundaries

    def _liveness(self) -> None:
        uses: dict[int, set[Register]] = {}
        defs: dict[int, set[Register]] = {}
        for block in self.blocks:
            use: set[Register] = set()
            define: set[Register] = set()
            for code in block.codes:
                use |= code.uses - define
                define |= code.defs
            if block.head is not None:
                use |= block.head.uses - define
            if block.predicate is not None and block.predicate not in define:
                use.add(block.predicate)
            if block.kind == "return":
                use |= {w for w, _, _ in self.results if isinstance(w, Register)} - define
            uses[block.number], defs[block.number] = use, define
        changed = True
        while changed:
            changed = False
            for block in reversed(self.blocks):
                out: set[Register] = set()
                for target in block.targets:
                    out |= target.live_in
                live = frozenset(uses[block.number] | (out - defs[block.number]))
                block.live_out = frozenset(out)
                if live != block.live_in:
                    block.live_in = live
                    changed = True

    @property
    def registers(self) -> int:
        """Estimate the 32-bit registers per thread: the most that are live between blocks, plus a few."""
        free = self._rematerializable()
        kept = ({r for r in b.live_in if r.width} - free for b in self.blocks)
        most = max(sum(max(1, (r.width + 3) // 4) for r in live) for live in kept)
        return min(255, (most + 10 + 7) // 8 * 8)

    def _computed_again(self) -> dict[Register, Code]:
        """Return the registers that are computed where they are used, so that no lane keeps them, with their instructions.

        They have one definition, which every use follows. It depends only on constants, the launch and the block: all lanes of a
        warp have the same value. A copy of a lane's number or thread index counts as well, because it costs as much as a load.
        """
        codes = [code for b in self.blocks for code in (*b.codes, b.head) if code is not None]
        defined = Counter(r for code in codes for r in code.defs)
        kept = {w for w, _, _ in (*self.arguments, *self.results) if isinstance(w, Register)}
        in_frame = {name for code in codes for name in _FRAME.findall(code.before + code.text)}
        kept |= self.blocks[0].live_in | {
            r for code in codes for r in code.uses | code.whole if r.name in in_frame
        }
        candidates = [code for code in codes if len(code.defs) == 1 and not (code.before or code.alone)]
        candidates = [
            code for code in candidates if all(defined[r] == 1 and r not in kept for r in code.defs)
        ]
        found: dict[Register, Code] = {}
        cost: dict[Register, int] = {}  # instructions that compute it
        varying: set[Register] = set()
        size = -1
        while size != len(found):
            size = len(found)
            for code in candidates:
                (register,) = code.defs
                steps = 1 + sum(cost.get(r, MOST_STEPS) for r in code.uses)
                if register in found or steps > MOST_STEPS:
                    continue
                varies = bool(_LANE.search(code.text) or code.uses & varying)
                text = _LANE.sub("", code.text) if code.rematerializable else code.text
                if _VARIES.search(text) or (not code.rematerializable and (varies or code.memory)):
                    continue
                found[register], cost[register] = code, steps
                if varies:
                    varying.add(register)
        return found

    def _values(self, needed: set[Register]) -> tuple[list[str], list[str]]:
        """Return C that computes registers again: once for the warp, and in each lane."""
        order: dict[Register, Code] = {}

        def add(register: Register) -> None:
            if register not in order:
                code = self._repeat[register]
                for used in sorted(code.uses, key=lambda r: r.name):
                    add(used)
                order[register] = code

        for register in sorted(needed, key=lambda r: r.name):
            add(register)
        whole: list[str] = []
        lanes: list[str] = []
        varying: set[Register] = set()
        for register, code in order.items():
            text = f"{c_type(register.width)} {register.name}; {code.text}"
            if _LANE.search(code.text) or code.uses & varying:
                varying.add(register)
                lanes.append(text)
            else:
                whole.append(text)
        return whole, lanes

    def _rematerializable(self) -> set[Register]:
        """Return registers that a compiler need not keep, because it can compute them again at their use: kernel parameters,
        special registers, constants, and copies of these."""
        codes = [code for block in self.blocks for code in block.codes]
        found = set().union(*(code.defs for code in codes if code.rematerializable))
        size = -1
        while size != len(found):
            size = len(found)
            for code in codes:
                if not code.rematerializable or not code.uses <= found:
                    found -= code.defs
        return found

    # -- rendering

    def _head_joins(self, block: Block) -> bool:
        """Return whether the last lane loop of a block can read the terminator's operands.

        It can if every lane reads them, and at the same time.
        """
        head = block.head
        if head is None or not head.text:
            return False
        return not self.virtual or not (head.memory or head.before or "w->time" in head.text)

    def segments(self, block: Block) -> list[list[Code]]:
        """Split the block's straight-line code where all lanes must finish one part before the next begins."""
        found: list[list[Code]] = []
        wrote = read = closed = False
        joins = [block.head] if block.head is not None and self._head_joins(block) else []
        for code in [*block.codes, *joins]:
            if (not code.text and not code.before) or not code.defs.isdisjoint(self._repeat):
                continue
            hazard = (wrote and (code.reads_shared or code.writes_shared)) or (read and code.writes_shared)
            if not found or closed or code.alone or hazard:
                found.append([])
                wrote = read = False
            found[-1].append(code)
            wrote |= code.writes_shared
            read |= code.reads_shared
            closed = code.alone
        return found

    def render(self, base: int, entries: dict[str, int], local_base: int, args: int) -> str:
        """Return the C function, with @FRAME@ for the offset of its frame. `entries`: the first block of each function."""
        self._fields: dict[str, int] = {}
        codes = [c for b in self.blocks for c in (*b.codes, b.head) if c is not None]
        self._mentioned = Counter(name for code in codes for name in _ARGUMENT.findall(code.text))
        self._passing: set[str] = set()
        frame = f"frame_{self.index}"
        lines: list[str] = []
        loops = self._lane_loops()
        in_loop = {block: loop for loop in loops for block in loop.blocks}
        for block in self.blocks:
            loop = in_loop.get(block)
            if loop is None:
                lines.append(self._render_block(block, base, entries))
            elif block is loop.blocks[0]:
                lines.append(self._render_loop(loop, base))
        body = "\n".join(lines)
        body = body.replace("@ARGS@", str(args))
        body = _fill_local(body, local_base)
        low, high = base, base + len(self.blocks)
        entered = {b for loop in loops for b in loop.entries}
        places = [b for b in self.blocks if b not in in_loop or b in entered]
        cases = " ".join(f"case {low + b.number}: goto B{low + b.number};" for b in places)
        # Functions of a module share a file, or not; so the preprocessor keeps one of each.
        helpers = "".join(
            f"#ifndef {n}\n#define {n} {n}\n{t}\n#endif\n" for n, t in self.values.helpers.items()
        )
        return (
            f"{helpers}static int fn_{self.index}(W *w) {{\n"
            f"struct {frame} *const R = (struct {frame} *)(w->frame + @FRAME@); (void)R;\n"
            f"PROLOGUE({low}u, {high}u);\n{'u32 from_;' if loops else ''}\n"
            f"switch (pc) {{ {cases} default: __builtin_unreachable(); }}\n{body}\n}}\n"
        )

    def frame_struct(self) -> tuple[str, list[tuple[int, int]], int]:
        """Return the struct of values that live across segments, its fields to save as (offset, width), and its size in bytes."""
        fields: list[tuple[str, int, int]] = []  # declaration, bytes per lane (0: a bit), alignment
        if not self.kernel:
            fields.append(("u32 ret[32]", 4, 4))
            if self.values.stack:
                fields.append(("u32 sp[32]", 4, 4))
        for register, width in sorted(self._fields.items()):
            fields.append(
                (f"{c_type(width)} {register}[32]" if width else f"u32 {register}", width, width or 4)
            )
        for name in self.names.frame:
            if name not in self.values.local_parameters and name not in self._passing:
                size = self._room(name)
                fields.append((f"u8 {name}[32][{size}] __attribute__((aligned(16)))", size, 16))
        table: list[tuple[int, int]] = []
        at = 0
        for _, width, align in fields:
            at = (at + align - 1) // align * align
            table.append((at, width))
            at += 32 * width or 4
        total = max(64, (at + 63) // 64 * 64)
        members = " ".join(f"{declaration};" for declaration, _, _ in fields) or "u32 none;"
        name = f"struct frame_{self.index}"
        text = f"{name} {{ {members} }} __attribute__((aligned(64)));\n"
        return f'{text}_Static_assert(sizeof({name}) == {total}, "frame");\n', table, total

    def _room(self, parameter: str) -> int:
        """Return the bytes that a lane's part of a parameter takes in the frame."""
        return max(SLOT, (self.names.frame[parameter].size + SLOT - 1) // SLOT * SLOT)

    @property
    def _formal(self) -> set[str]:
        return {w.name for w, _, _ in (*self.arguments, *self.results) if isinstance(w, Storage)}

    def _render_segment(self, codes: list[Code], live_after: set[Register]) -> str:
        need: set[Register] = set()
        defined: set[Register] = set()
        for code in codes:
            need |= code.uses - defined
            defined |= code.defs
        stored = sorted(defined & live_after, key=lambda r: r.name)
        again = need & self._repeat.keys()
        need -= again
        lines, inner = self._values(again)
        lines += [c.before for c in codes if c.before]
        lines += [f"u32 n_{r.name} = 0;" for r in stored if not r.width]
        if any(c.memory for c in codes):
            inner.insert(0, "w->lane = l;")
        whole = set().union(*(c.whole for c in codes))
        for r in sorted(need | defined, key=lambda r: r.name):
            if r in need:
                self._fields[r.name] = r.width
            if r in need - whole:
                inner.append(_loaded(r))
            elif r in defined:
                inner.append(f"{c_type(r.width)} {r.name};")
        # An argument that is used in this segment only needs no place in the frame.
        mentioned = Counter(name for code in codes for name in _ARGUMENT.findall(code.text))
        passing = {
            n for n, count in mentioned.items() if count == self._mentioned[n] and n not in self._formal
        }
        self._passing |= passing
        inner += [f"u8 {n}[{self._room(n)}] __attribute__((aligned(16)));" for n in sorted(passing)]
        statements = self._statements(codes, (need | again) - defined)
        inner += [_ARGUMENT.sub(lambda m: m[1] if m[1] in passing else m[0], text) for text in statements]
        for r in stored:
            self._fields[r.name] = r.width
            inner.append(_stored(r))
        if any(c.text for c in codes):
            lines += ["LANES", *inner, "END"]
        lines += [f"R->{r.name} = (R->{r.name} & ~mask) | n_{r.name};" for r in stored if not r.width]
        return "{ " + "\n".join(lines) + " }"

    @staticmethod
    def _statements(codes: list[Code], constant: set[Register]) -> list[str]:
        """Return the statements of a segment, in two copies if many shared accesses can be checked together.

        An unrolled loop reads [%r1], [%r1+4], and so on. If the whole span is in shared memory, the accesses need no checks of
        their own. If not, the second copy finds the faulty access.
        """
        texts = [c.text for c in codes if c.text]
        spans: dict[Register, tuple[int, int]] = {}
        count = 0
        for code in codes:
            for register, offset, size in code.shared:
                if register in constant and offset % size == 0:
                    end, align = spans.get(register, (0, 1))
                    spans[register] = max(end, offset + size), max(align, size)
                    count += 1
        if count < MIN_CHECKED_TOGETHER:
            return texts
        tests = [
            f"{r.name} < shared_size_ && (u64){r.name} + {end} <= shared_size_ && !({r.name} & {align - 1})"
            for r, (end, align) in sorted(spans.items(), key=lambda item: item[0].name)
        ]
        names = {r.name for r in spans}

        def unchecked(match: re.Match[str]) -> str:
            name, offset, size = match.group(1, 2, 3)
            if name not in names or int(offset) % int(size):
                return match.group()
            return f"(shared_ + (u64){name} + {offset})"

        fast = [_SHARED.sub(unchecked, text) for text in texts]
        return [f"if (LIKELY({' && '.join(tests)})) {{", *fast, "} else {", *texts, "}"]

    def _render_block(self, block: Block, base: int, entries: dict[str, int]) -> str:
        here = base + block.number
        lines = [f"B{here}: __attribute__((unused));"]
        if block.number == 0:
            lines += self._prologue(block)
        if block.turn:
            lines.append(f"TURN({here}u);")
        if self.counted:
            lines.append(f"COUNT({here});")
        lines += self._pass_time(block)
        live = set(block.live_out)
        if block.head is not None and not self._head_joins(block):
            live = (live - block.head.defs) | block.head.uses
        if block.predicate is not None and block.predicate not in self._repeat:
            live.add(block.predicate)
            self._fields[block.predicate.name] = 0
        if block.kind == "return":
            live |= {w for w, _, _ in self.results if isinstance(w, Register)}
        parts: list[str] = []
        for codes in reversed(self.segments(block)):
            parts.append(self._render_segment(codes, live))
            defined: set[Register] = set()
            need: set[Register] = set()
            for code in codes:
                need |= code.uses - defined
                defined |= code.defs
            live = (live - defined) | need
        lines += reversed(parts)
        if self.virtual and block.reached:
            lines.append(f"TICK({block.reached});")
        lines.append(self._terminator(block, base, entries))
        text = "\n".join(lines)
        if block.kind in ("call", "indirect"):
            return text.replace("@NEXT@", f"{base + block.targets[0].number}u")
        return text.replace("@TARGETS@", ", ".join(str(base + t.number) for t in block.targets))

    def _lane_loops(self) -> list[LaneLoop]:
        if self.virtual or self.counted:
            return []
        return lane_loops(self.blocks, {b for b in self.blocks[1:] if suits(b, len(self.segments(b)))})

    def _render_loop(self, loop: LaneLoop, base: int) -> str:
        """Return a loop that lanes run one after another. A lane leaves it at its end, or after MOST_TURNS jumps back."""
        codes = [c for b in loop.blocks for c in self._lane_codes(b)]
        predicates = {b.predicate for b in loop.blocks if b.predicate is not None}
        defined: set[Register] = set().union(*(c.defs for c in codes))
        used: set[Register] = predicates.union(*(c.uses for c in codes))
        live_in: set[Register] = set().union(*(b.live_in for b in loop.entries))
        live_out = live_in.union(*(b.live_in for b in loop.exits))
        again = used & self._repeat.keys()
        stored = sorted(defined & live_out, key=lambda r: r.name)
        loaded = ((used & live_in) | set(stored)) - self._repeat.keys()
        whole, lanes = self._values(again)
        for r in sorted((used | defined) - self._repeat.keys(), key=lambda r: r.name):
            if r in loaded:
                self._fields[r.name] = r.width
                lanes.append(_loaded(r))
            else:
                lanes.append(f"{c_type(r.width)} {r.name};")
        here = base + loop.entries[0].number
        lines = [
            f"B{base + b.number}: __attribute__((unused)); from_ = {base + b.number}; goto L{here};"
            for b in loop.entries
        ]
        lines += [f"L{here}: {{", *whole, *(f"u32 n_{r.name} = 0;" for r in stored if not r.width)]
        lines += ["u32 most_ = 0, to_ = CS_NO_PC, apart_ = 0;", "LANES", *lanes, "u32 turns_ = 0, pc_;"]
        if any(c.memory for c in codes):
            lines.append("w->lane = l;")
        enter = " ".join(f"case {base + b.number}: goto G{base + b.number};" for b in loop.entries[1:])
        lines += [f"switch (from_) {{ {enter} default: goto G{here}; }}"]
        inside = set(loop.blocks)
        for block in loop.blocks:
            own = self._lane_codes(block)
            constant = set().union(*(c.uses for c in own)) - set().union(*(c.defs for c in own))
            lines += [f"G{base + block.number}: __attribute__((unused));", *self._statements(own, constant)]
            lines.append(self._lane_branch(block, inside, base, f"O{here}"))
        lines.append(f"O{here}:;")
        for r in stored:
            self._fields[r.name] = r.width
            lines.append(_stored(r))
        lines.append("if (turns_ > most_) most_ = turns_;")
        lines += ["w->pcs[l] = pc_; if (to_ == CS_NO_PC) to_ = pc_; apart_ |= to_ ^ pc_;", "END"]
        lines += [f"R->{r.name} = (R->{r.name} & ~mask) | n_{r.name};" for r in stored if not r.width]
        # A way out that leads back may be part of a loop that waits for another thread.
        leads_back = any(b.number <= loop.blocks[-1].number for b in loop.exits)
        cost = f"(s32)most_ * {1 + len(codes) // 64}{f' + {SPIN_COST}' if leads_back else ''}"
        lines += [f"if (UNLIKELY((w->budget -= {cost}) < 0)) return CS_YIELD;", "if (!apart_) switch (to_) {"]
        lines += [f"case {base + b.number}: JUMP({base + b.number});" for b in (*loop.exits, *loop.entries)]
        lines += ["} goto pick; }"]
        return "\n".join(lines)

    def _lane_codes(self, block: Block) -> list[Code]:
        """Return a block's code, without what is computed again where it is used."""
        return [c for c in block.codes if c.text and c.defs.isdisjoint(self._repeat)]

    @staticmethod
    def _lane_branch(block: Block, loop: set[Block], base: int, leave: str) -> str:
        """Return the end of a block in such a loop: a lane's jumps inside the loop, or out of it."""

        def jump(target: Block) -> str:
            at = base + target.number
            if target not in loop:
                return f"{{ pc_ = {at}; goto {leave}; }}"
            if target.number > block.number:
                return f"goto G{at};"
            return f"{{ if (++turns_ >= {MOST_TURNS}) {{ pc_ = {at}; goto {leave}; }} goto G{at}; }}"

        if block.kind == "goto":
            return jump(block.targets[0])
        assert block.predicate is not None
        taken, fall = block.targets
        return f"if ({'!' if block.negated else ''}{block.predicate.name}) {jump(taken)} else {jump(fall)}"

    def _pass_time(self, block: Block) -> list[str]:
        """Skip the equal iterations of a loop of one block that only reads the clock, for all lanes at once.

        The iterations up to the last one, or up to the point where the warp yields, are skipped, unless blocks are counted."""
        if self.counted or not (
            self.virtual and block.kind == "branch" and block.targets[0] is block and block.reached
        ):
            return []
        need: set[Register] = set()
        defined: set[Register] = set()
        for code in block.codes:
            need |= code.uses - defined
            defined |= code.defs
        alone = any(c.memory or c.before or c.alone or c.writes_shared or c.reads_shared for c in block.codes)
        if alone or need & defined or block.predicate not in defined or block.turn:
            return []  # an iteration depends on the one before it, or on other threads
        assert block.predicate is not None
        alike = ["w->time[l] == w->time[first_]"]
        load = []
        values, of_lane = self._values(need & self._repeat.keys())
        if of_lane:
            return []
        for r in sorted(need - self._repeat.keys(), key=lambda r: r.name):
            self._fields[r.name] = r.width
            at = f"R->{r.name}[l]" if r.width else f"(R->{r.name} >> l & 1)"
            alike.append(f"{at} == {at.replace('[l]', '[first_]').replace('>> l', '>> first_')}")
            load.append(f"const {c_type(r.width)} {r.name} = {at};")
        declared = [f"{c_type(r.width)} {r.name} = 0;" for r in sorted(defined, key=lambda r: r.name)]
        again = f"{'!' if block.negated else ''}{block.predicate.name}"
        return [
            "{ const u32 first_ = (u32)__builtin_ctz(mask); u32 alike_ = 1;",
            *values,
            f"LANES alike_ &= {' && '.join(alike)}; END",
            f"if (alike_ && w->budget >= {block.reached}) {{ const u32 l = first_; const u64 begin_ = w->time[l];",
            f"const u64 most_ = begin_ + (u32)w->budget - {block.reached}; u64 passed_;",
            *load,
            f"for (; w->time[l] <= most_; w->time[l] += {block.reached}) {{",
            *declared,
            *(c.text for c in block.codes if c.text),
            f"if (!({again})) break; }}",
            "passed_ = w->time[l] - begin_; w->time[l] = begin_; TICK(passed_); } }",
        ]

    def _prologue(self, block: Block) -> list[str]:
        lines: list[str] = []
        if self.recursive:
            lines.append(f"w->line = {self.function.line};{self._no_time} api->push(w, mask, {self.index});")
        inner: list[str] = []
        if self.values.stack and not self.kernel:
            inner.append("R->sp[l] = w->sp[l];")
        if not self.kernel:
            inner.append("R->ret[l] = w->retpc[l];")
            for where, offset, size in self.arguments:
                source = f"w->args + (u64)l * @ARGS@ + {offset}"
                if isinstance(where, Register) and not where.width:
                    self._fields[where.name] = 0
                    bit = f"(u32)LD(u8, {source}) << l"
                    inner.append(f"R->{where.name} = (R->{where.name} & ~(1u << l)) | {bit};")
                elif isinstance(where, Register):
                    self._fields[where.name] = where.width
                    inner.append(f"R->{where.name}[l] = LD({c_type(where.width)}, {source});")
                elif where.name in self.values.local_parameters:
                    to = f"w->local + (u64)l * w->local_stride + w->lsp[l] + @LOCAL@{self.values.local_parameters[where.name]}@"
                    inner.append(f"__builtin_memcpy({to}, {source}, {size});")
                else:
                    inner.append(f"__builtin_memcpy(R->{where.name}[l], {source}, {size});")
        formals = {w for w, _, _ in self.arguments if isinstance(w, Register)}
        for r in sorted(block.live_in - formals, key=lambda r: r.name):  # read before they are written
            self._fields[r.name] = r.width
            if r.width:
                inner.append(f"R->{r.name}[l] = 0;")
            else:
                lines.append(f"R->{r.name} &= ~mask;")
        if inner:
            lines += ["LANES", *inner, "END"]
        return lines

    @property
    def _no_time(self) -> str:
        """Return C for after TICK: it resets the time that a fault adds to the lane's time."""
        return " w->elapsed = 0;" if self.virtual else ""

    def _jump(self, block: Block, target: Block, base: int) -> str:
        to = base + target.number
        loop = self.blocks[target.number : block.number + 1]
        if not loop:
            return f"JUMP({to});"
        if self.virtual:
            # Added code does not change where a warp yields: TICK counts, and a probe's loop is short.
            return f"BACK({to}, 0);" if any(b.reached for b in loop) else f"JUMP({to});"
        cost = 1 + sum(len(b.codes) for b in loop) // 64
        if any(b.spins for b in loop):
            cost = max(cost, SPIN_COST)
        return f"BACK({to}, {cost});"

    def _terminator(self, block: Block, base: int, entries: dict[str, int]) -> str:
        head = ""
        if block.head is not None and block.head.text and not self._head_joins(block):
            head = self._render_segment([block.head], set())
        if block.kind == "goto":
            return self._jump(block, block.targets[0], base)
        if block.kind == "branch":
            return self._conditional(block, base)
        if block.kind == "exit":
            return "cs_exit(w, mask); goto pick;"
        if block.kind == "trap":
            where = f"w->lane = (u32)__builtin_ctz(mask); w->line = {block.line};{self._no_time}"
            return f"{where} api->fault(w, CS_FAULT_LAUNCH_FAILED, 0, 0, 0); goto pick;"
        if block.kind == "table":
            test = "w->budget" if self.virtual else "--w->budget"
            return f"{head} if (UNLIKELY({test} < 0)) return CS_YIELD; goto pick;"
        if block.kind == "return":
            lines = ["LANES w->pcs[l] = R->ret[l];"]
            if self.values.stack:
                lines.append("w->sp[l] = R->sp[l];")
            for result, offset, size in self.results:
                to = f"w->args + (u64)l * @ARGS@ + {offset}"
                if isinstance(result, Register):
                    self._fields[result.name] = result.width
                    value = f"R->{result.name}[l]" if result.width else f"R->{result.name} >> l & 1"
                    lines.append(f"ST({c_type(result.width)}, {to}, {value});")
                else:
                    lines.append(f"__builtin_memcpy({to}, R->{result.name}[l], {size});")
            lines.append("END")
            if self.recursive:
                lines.append(f"api->pop(w, mask, {self.index});")
            return "\n".join([*lines, "goto pick;"])
        resume = f"{base + block.targets[0].number}u"
        if block.kind == "call":
            return f"{head} LEAVE({entries[block.detail]});"
        if block.kind == "indirect":
            return f"{head} goto pick;"
        if block.kind == "sleep":
            return f"{head} api->nanosleep(w, mask, {resume}); goto pick;"
        if block.kind == "collective":
            jump = self._jump(block, block.targets[0], base)
            ones = self._ones(block)
            if block.arrived == "1":
                return f"{head} {{ {ones} {block.direct} }} {jump}"
            call = f"w->line = {block.line};{self._no_time} if (!api->collective(w, mask, {block.detail}, {resume})) goto pick;"
            if block.arrived:
                if block.alike:
                    call = f"if (!cs_meet(w, mask, {block.detail}, {resume}, {block.line}, {block.alike})) goto pick;"
                wait = f"LANES {block.waits} END {call}" if block.waits else call
                call = f"{{ {ones} if (LIKELY({block.arrived})) {{ {block.direct} }} else {{ {wait} }} }}"
            return f"{head} {call} {jump}"
        if not block.detail.startswith("CS_"):
            return f"w->line = {block.line};{self._no_time} api->bar_sync(w, mask, {block.detail}, {resume}); goto pick;"
        return f"{head} w->line = {block.line};{self._no_time} api->barrier(w, mask, {block.detail}, {resume}); goto pick;"

    def _ones(self, block: Block) -> str:
        """Return C for `ones_`, the lanes whose predicate a vote reads as true; "" for another collective."""
        if block.predicate is None:
            return ""
        ones = f"R->{block.predicate.name}"
        if block.predicate in self._repeat:
            ones = f"({block.predicate.name} ? ~0u : 0u)"
        values = " ".join(self._values({block.predicate} & self._repeat.keys())[0])
        return f"{values} const u32 ones_ = {'~' if block.negated else ''}{ones};"

    def _conditional(self, block: Block, base: int) -> str:
        """Translate a conditional branch. Lanes that go to the lower target run first; the others wait at theirs."""
        assert block.predicate is not None
        taken, fall = block.targets
        if taken is fall:
            return self._jump(block, taken, base)
        if block.predicate in self._repeat:  # the same for all lanes
            name = block.predicate.name
            values = " ".join(self._values({block.predicate})[0])
            go = f"if ({'!' if block.negated else ''}{name}) {self._jump(block, taken, base)} else {self._jump(block, fall, base)}"
            return f"{{ {values} {go} }}"
        test = f"{'~' if block.negated else ''}R->{block.predicate.name} & mask"
        low, high = (taken, fall) if taken.number < fall.number else (fall, taken)
        high_lanes = "t_" if high is taken else "mask & ~t_"
        return (
            f"{{ const u32 t_ = {test};\n"
            f"if (t_ == mask) {self._jump(block, taken, base)}\n"
            f"else if (!t_) {self._jump(block, fall, base)}\n"
            f"else {{ SPLIT({high_lanes}, {base + high.number}u); {self._jump(block, low, base)} }} }}"
        )


def _loaded(r: Register) -> str:
    """Return the declaration of a lane's register with its value in the frame. A predicate is a bit there."""
    return f"{c_type(r.width)} {r.name} = {f'R->{r.name}[l]' if r.width else f'R->{r.name} >> l & 1'};"


def _stored(r: Register) -> str:
    """Return the statement that stores a lane's register in the frame; a predicate in `n_NAME`, the bits of all lanes."""
    return f"R->{r.name}[l] = {r.name};" if r.width else f"n_{r.name} |= (u32){r.name} << l;"


def _fill_local(text: str, local_base: int) -> str:
    parts = text.split("@LOCAL@")
    filled = [parts[0]]
    for part in parts[1:]:
        number, _, rest = part.partition("@")
        filled.append(f"{local_base + int(number)}u{rest}")
    return "".join(filled)


_CONTROL = {
    "bra": "_branch", "brx": "_branch_table", "ret": "_leave", "exit": "_leave", "trap": "_trap", "brkpt": "_trap",
    "bar": "_barrier", "barrier": "_barrier", "shfl": "_warp", "vote": "_warp", "match": "_warp", "redux": "_warp",
    "activemask": "_warp", "elect": "_warp", "nanosleep": "_sleep",
    "ldmatrix": "_matrix", "stmatrix": "_matrix", "movmatrix": "_matrix",
    "mma": "_tensor", "wmma": "_tensor", "wgmma": "_tensor",
}  # fmt: skip

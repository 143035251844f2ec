"""Translate one PTX function to basic blocks, whose instructions are C.

Everything that can stop a warp (barriers, collectives, calls, branches) ends a block, so a warp is always resumed at the start of a
block.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from gpubpf.errors import PtxError
from gpubpf.ptx.flow import KERNEL_LAUNCHES, find_names
from gpubpf.ptx.module import (
    Address,
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
from gpubpf.ptx.opcodes import facts

from . import copies, dynamic_parallelism, matrix, memory, syntax, tensor, tensor_memory, texture, video  # noqa: F401 (copies, texture, video: their instructions)
from .arithmetic import TABLE, lose_carry
from .block import Block
from .liveness import computed_again, mark_live
from .scope import Names, Register, Scope, Storage
from .values import Code, Unsupported, Values, c_type, size_of

SLOT = 16  # bytes: alignment of call arguments
SYSTEM_CALLS = {"vprintf", "malloc", "free", "__assertfail"}
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]+|\d+")


def slots(sizes: list[int]) -> list[int]:
    """Return the offsets of arguments in the argument area, followed by its size, in bytes."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + max(SLOT, (size + SLOT - 1) // SLOT * SLOT))
    return offsets


def _taken(i: PtxInstruction) -> Iterator[str]:
    """Yield the names whose addresses an instruction takes, and the names of arrays that it indexes by registers."""
    for operand in i.operands:
        if isinstance(operand, Address) and operand.base is not None and operand.index is not None:
            yield operand.base
    yield from (o.name for o in i.operands[1:] if i.opcode == "mov" and isinstance(o, Name))


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
    """The translation of one function: its basic blocks, and the facts that `render.render` and the module need.

    again: the result of `computed_again`
    """

    def __init__(
        self,
        function: Function,
        index: int,
        module_scope: dict[str, Storage],
        functions: dict[str, Function],
        indices: dict[str, int],
        of: tuple[tuple[int, int], str],
        virtual: bool = False,
        counted: bool = False,
    ) -> None:
        """Translate the body. Raises PtxError.

        index: the function's number in the module
        module_scope: the variables of the module
        functions: the functions of the module
        indices: the numbers of the functions
        of: the version of PTX and the target (`sm_80`)
        virtual: whether the code runs on the virtual clock
        counted: whether the code counts how often each block runs
        """
        self.function = function
        self.virtual = virtual
        self.counted = counted
        self.of = of
        self.index = index
        self.functions = functions
        self.names = Names(function, module_scope)
        self.values = Values(self.names, indices, virtual, function.line)
        self.values.version = of[0]
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
            isinstance(statement, PtxInstruction) and facts(statement).adds_carry
            for statement, _ in self.names.statements
        )
        self._together: dict[Register, Code] = {}  # results of activemask
        self.values.constants = self._constants()
        self._build()
        results = {w for w, _, _ in self.results if isinstance(w, Register)}
        mark_live(self.blocks, results)
        arguments = {w for w, _, _ in self.arguments if isinstance(w, Register)}
        self.again = computed_again(self.blocks, results | arguments)

    # -- declarations

    def _declare(self) -> None:
        if self.kernel:
            for p, (at, size, align) in zip(
                self.function.parameters, kernel_parameters(self.function), strict=True
            ):
                self.names.declare_kernel_parameter(p, at, size, align)
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
                out.append((self.names.declare_parameter(p), offset, p.size))
                continue
            self.names.declare(self.names.root, p)
            elements = [f"{p.name}.{e}" for e in "xyzw"[: p.vector]] if p.vector > 1 else [p.name]
            for k, element in enumerate(elements):
                register = self.names.root.registers[element]
                width = max(1, register.width)
                out.append((register, offset + k * width, width))

    def _find_address_taken(self) -> None:
        """Put parameters whose address mov takes, or which registers index, into local memory (PTX ISA 9.7.9.4)."""
        byname = {p.name for p in self.function.parameters}
        for statement, scope in self.names.statements:
            for name in _taken(statement) if isinstance(statement, PtxInstruction) else ():
                if name not in byname or self.names.register(scope, name) is not None:
                    continue
                storage = self.names.storage(scope, name)
                known = self.values.local_parameters
                if storage is not None and storage.kind == "frame" and storage.name not in known:
                    align = max(8, storage.align)
                    self.names.local_size = (self.names.local_size + align - 1) // align * align
                    known[storage.name] = self.names.local_size
                    scope.storages[name] = storage
                    self.names.root.storages[name] = storage
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
            if wrong := syntax.reason(statement, *self.of):
                raise v.unsupported(wrong)
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
            if statement.opcode == "tcgen05" and statement.modifiers[:1] in _TENSOR_MEMORY:
                self._checked(self._tensor, statement, scope)
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
                line = block.line or self.function.line
                raise PtxError(f"PTX line {line}: control leaves the function without ret or exit")
        placed = set(map(id, self.blocks))
        for block in self.blocks:
            if any(id(t) not in placed for t in block.targets):
                line = block.line or self.function.line
                raise PtxError(f"PTX line {line}: a branch to a missing label")
        for number, block in enumerate(self.blocks):
            block.number = number

    def _constants(self) -> dict[Register, Immediate]:
        """Return the registers whose only definition is a mov of a number. nvcc passes the members of shuffles and votes in them."""
        found: dict[Register, Immediate] = {}
        written = Counter(w for w, _, _ in self.arguments if isinstance(w, Register))
        for statement, scope in self.names.statements:
            if not isinstance(statement, PtxInstruction):
                continue
            for name in find_names(statement.operands[:1]):  # addresses too, which is safe
                if (register := self.names.register(scope, name)) is not None:
                    written[register] += 1
                    match statement:
                        case PtxInstruction(
                            "mov", (*_, kind), (Name(), Immediate() as source), predicate=None
                        ) if not source.is_float and kind[0] != "f" and register.width in (4, 8):
                            with contextlib.suppress(
                                ValueError
                            ):  # an unknown type: the instruction is refused later
                                if size_of(kind) == register.width:
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
        """Count the instructions of the original that an instrumented copy leaves out before a statement."""
        count = self.names.omitted.get(position)
        if count:
            if self._current.kind != "goto" or self._current.targets:
                self._start()
            self._current.reached += count

    def _checked(self, emit: Callable[..., Any], *arguments: object) -> Any:
        """Report operands of unexpected number or kind as an unsupported instruction."""
        try:
            return emit(*arguments)
        except PtxError as error:
            if str(error).startswith("PTX line"):
                raise
            raise PtxError(f"PTX line {self.values.instruction.line}: {error}") from None
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
        """Return the block where lanes continue that do not execute a predicated control instruction; None without a predicate.

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
        head.text = f"const u32 i_ = {index}; w->pcs[l] = entry_ + (const u32[]){{@TARGETS@}}[i_ < {len(targets)} ? i_ : 0];"
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
            where = f"w->args + (u64)l * args_ + {offset}"
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
            where = f"w->args + (u64)l * args_ + {offset}"
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
        """Return the C for the effect of a call on the carry, if this function reads the carry."""
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
            raise v.unsupported("wrong number of arguments")
        arguments = []
        for operand, size in zip(passed, function.arguments, strict=True):
            if size == dynamic_parallelism.DIM3:
                arguments += [self._passed(operand, scope, 4, at) for at in (0, 4, 8)]
            else:
                arguments.append(self._passed(operand, scope, size))
        call = f"api->runtime(w, {function.number}, (const u64[]){{{', '.join(arguments) or '0'}}})"
        return self._returned(call, function.result, returned, scope)

    def _passed(self, operand: Operand, scope: Scope, width: int, offset: int = 0) -> str:
        """Return the text of an argument of `width` bytes, or of the part of an argument that begins at byte `offset`."""
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
        """End a block with a collective.

        operation: CS_OP_… of device_abi.h
        a: an operand and its type
        b, c: further operands, as C
        members: the operand with the mask of lanes; None: the active lanes
        results: (operand, type, C) for each result
        """
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
        """Return C for whether all members of a collective at the end of a block have arrived ("": unknown), and for the members.

        For constant members, C compares their mask with the active lanes. If the members are the result of an activemask in the same
        block, they have arrived, except for lanes with another caller.
        """
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
        """Return the predicate register that a vote reads, and whether it is negated; None if the operand is not a predicate."""
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
        if i.opcode == "activemask":  # in a function, lanes with the same caller are together
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
            if mode == "ANY" and isinstance(operands[0], Pair):
                raise v.unsupported("two results")
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
        """Translate mma, wmma, wgmma, and tcgen05 of a warp: all lanes arrive, then load, multiply or store."""
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
        if i.opcode == "tcgen05":
            v.code.text = tensor_memory.together(v, i)
        elif i.opcode == "wgmma":
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
        if m[0] == "cluster":
            resume = Block()
            block = self._end("cluster barrier", resume)
            block.detail, block.line = str(int({"arrive": False, "wait": True}[m[1]])), i.line
            self._start(resume)
            self._resume(after)
            return
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
        values = [int(x, 0) if _NUMBER.fullmatch(x) else None for x in constants]
        if (values[0] or 0) > 15 or (values[1] or 0) % 32 or (m[0] == "arrive" and values[1] == 0):
            raise v.unsupported("a barrier's number is at most 15, and a number of threads a multiple of 32")
        if kind == "CS_BAR_SYNC" and None not in values:
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


_TENSOR_MEMORY = {(what,) for what in tensor_memory.TOGETHER}
_CONTROL = {
    "bra": "_branch", "brx": "_branch_table", "ret": "_leave", "exit": "_leave", "trap": "_trap", "brkpt": "_trap",
    "bar": "_barrier", "barrier": "_barrier", "shfl": "_warp", "vote": "_warp", "match": "_warp", "redux": "_warp",
    "activemask": "_warp", "elect": "_warp", "nanosleep": "_sleep",
    "ldmatrix": "_matrix", "stmatrix": "_matrix", "movmatrix": "_matrix",
    "mma": "_tensor", "wmma": "_tensor", "wgmma": "_tensor",
}  # fmt: skip

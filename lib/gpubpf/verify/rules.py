"""The second gate: an abstract interpreter that follows every path of a device program.

It tracks for each register whether it holds a number, with its range, or an address, with its object and offset. It rejects what a GPU
thread must not do. The lowering uses what the gate learns, such as which memory each instruction accesses.
"""

from __future__ import annotations

from collections import deque
from typing import NoReturn

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf import maps
from gpubpf.ebpf.bytecode import CONTEXTS, STACK_SIZE, BpfFunction, Instruction, Program
from gpubpf.errors import VerifyError
from gpubpf.record import replace
from gpubpf.verify import copies, flow, ranges
from gpubpf.verify.calls import HelperCall
from gpubpf.verify.ranges import Range, constant, truncate
from gpubpf.verify.registers import AbstractMachine, DiffersByPath
from gpubpf.verify.values import (
    NUMBER,
    Checked,
    Checkpoint,
    CodePlace,
    State,
    Value,
    title,
    value_covers,
)

MAX_STEPS = 65536  # instructions followed over all paths
MAX_DEPTH = 8
MAX_INSTRUCTIONS = 4096
MAX_COPIED = 32  # blocks that are copied, see `copies`
TURNS = 20  # iterations of a loop that are followed one by one, before one state stands for all further iterations
_COMPARED = (7, 6, 8, 9, 2, 0, 1, 3, 4, 5)  # registers, those that differ most often first; r10 never differs
_MANY = 12  # after this many finished states at a place, further states there are generalized


def check(program: Program, function: BpfFunction, sizing: bool = False) -> Checked:
    """Follow every path of `function` and return what was learnt. Raises VerifyError.

    An instruction that does different things on different paths is copied for each path, if possible. If a device program's loops are
    too long to follow, the program must be safe given only what holds in every iteration; the lowering then limits the iterations.

    sizing: whether ring buffers may lack a record size; such a program cannot be lowered yet
    """
    try:
        return _separated(program, function, sizing, False)
    except _TooLong as error:
        if function.point not in b.DEVICE_POINTS:
            raise
        try:
            return _separated(program, function, sizing, True)
        except VerifyError:
            raise error from None


class _TooLong(VerifyError):
    """The paths of a program have too many instructions."""


def _separated(program: Program, function: BpfFunction, sizing: bool, widening: bool) -> Checked:
    """Follow every path, and copy instructions that do different things on different paths. Raises VerifyError."""
    for _ in range(MAX_COPIED):
        try:
            return _Checker(program, function, sizing, widening).run()
        except DiffersByPath as error:
            code = copies.separate(function.instructions, error.pc)
            if code is None or len(code) > MAX_INSTRUCTIONS:
                raise
            function = replace(function, instructions=code)
    return _Checker(program, function, sizing, widening).run()


class _Checker(AbstractMachine):
    """Follows all paths of one program on the abstract machine, and applies the rules to each instruction."""

    def __init__(
        self, program: Program, function: BpfFunction, sizing: bool = False, widening: bool = False
    ) -> None:
        super().__init__(program, function)
        self.sizing, self.widening = sizing, widening
        self.loops: dict[CodePlace, frozenset[int]] = {}
        self.holding: dict[CodePlace, tuple[str, int]] = {}  # place → a record that some path holds there
        self.code = function.instructions
        self.reached: set[CodePlace] = set()
        self.edges: set[tuple[CodePlace, bool]] = set()
        self.steps = 0

    # The walk over the paths

    def run(self) -> Checked:
        self._validate()
        self.targets, self.live, self.matters = flow.liveness(self.code)
        self.spills = flow.spills(self.code)
        self.depths = flow.depths(self.code) if self.widening else []
        first = State()
        first.registers[1] = Value("context", constant(0))
        first.registers[10] = Value("stack", constant(0), 0)
        pending = [first]
        checkpoints: dict[CodePlace, deque[Checkpoint]] = {}
        while pending:
            state = pending.pop()
            while True:
                place = (state.chain, state.pc)
                if state.pc in self.targets and self._known(checkpoints, state):
                    self._finish(state.mark)
                    break
                self.reached.add(place)
                if state.held:
                    self.holding[place] = next(iter(state.held.values()))
                self.steps += 1
                if self.steps > MAX_STEPS:
                    what = f"all its paths together have more than {MAX_STEPS} instructions"
                    raise _TooLong(str(self.reject(state.pc, what, "bound its loops by smaller constants")))
                following = self._step(state, self.code[state.pc])
                if not following:
                    self._finish(state.mark)
                    break
                state = following[0]
                if len(following) > 1:
                    pending.append(following[1])
                    if state.mark is not None:
                        state.mark.open += 1
        for place in self.holding.keys() & self.loops.keys():  # LOOP_TURNS may end the program there
            raise self._held(*self.holding[place])
        return Checked(
            self.function,
            self.accesses,
            self.calls,
            frozenset(self.reached),
            frozenset(self.edges),
            self.loops,
            self.steps,
            self.stack_low,
            {place: known for place, known in self.constants.items() if known is not None},
        )

    def _finish(self, mark: Checkpoint | None) -> None:
        while mark is not None:
            mark.open -= 1
            if mark.open:
                return
            mark = mark.parent

    def _known(self, checkpoints: dict[CodePlace, deque[Checkpoint]], state: State) -> bool:
        """Return whether this state, or a more general state, was already followed to its end. If not, remember this state.

        With `widening`, a state that stands for all iterations of a loop also covers later iterations.
        """
        kept = checkpoints.setdefault((state.chain, state.pc), deque(maxlen=64))
        for checkpoint in kept if self.widening else ():
            if checkpoint.open and checkpoint.widened and self._covers(checkpoint.state, state):
                self._next_turn(state, checkpoint.state)
                return True
        if sum(not checkpoint.open for checkpoint in kept) >= _MANY:
            self._forget(state)
        for checkpoint in kept:
            if checkpoint.open:
                if self._covers(checkpoint.state, state) and self._covers(state, checkpoint.state):
                    self._endless(state)
            elif self._covers(checkpoint.state, state, checkpoint.read):
                state.reads(checkpoint.read)
                return True
        widened = self.widening and self._widen(state)
        checkpoint = Checkpoint(state.copy(), state.mark, widened)
        kept.append(checkpoint)
        state.mark, state.written = checkpoint, 0
        return False

    def _widen(self, state: State) -> bool:
        """After TURNS iterations of a loop, forget the numbers that changed in the last iteration. Return whether the loop had TURNS.

        The state then stands for all further iterations. If it does not cover a later one, more numbers are forgotten there.
        """
        before = self._last_turn(state)
        if before is None:
            return False
        for number, (value, old) in enumerate(zip(state.registers, before.registers, strict=True)):
            if value is not None and old is not None and value.kind == old.kind == "number":
                state.registers[number] = value if value.range == old.range else NUMBER
        for stack, old_stack in zip(state.stacks, before.stacks, strict=True):
            for at, (value, k, n) in stack.items():
                was, old_k, old_n = old_stack.get(at, (value, k, n))
                if value.kind == was.kind == "number" and (value.range, k, n) != (was.range, old_k, old_n):
                    stack[at] = (NUMBER, k, n)
        return True

    def _last_turn(self, state: State) -> State | None:
        """Return the state at this place in the previous iteration of the loop; None before the loop has had TURNS iterations."""
        depth, turns, last = self.depths[state.pc], 0, None
        mark = state.mark if depth else None
        while mark is not None and turns < TURNS:
            if mark.state.chain == state.chain:
                if mark.state.pc == state.pc:
                    turns, last = turns + 1, last or mark.state
                elif self.depths[mark.state.pc] < depth:
                    break  # the enclosing loop began an iteration
            mark = mark.parent
        return last if turns == TURNS else None

    def _held(self, name: str, pc: int) -> VerifyError:
        return self.reject(
            pc,
            f"the record reserved in {name} is held while a loop of unknown length runs",
            "submit or discard it before",
        )

    def _next_turn(self, state: State, every: State) -> None:
        """Record that an iteration of a loop is covered by `every`, the state that stands for all iterations."""
        for name, pc in state.held.values():
            raise self._held(name, pc)
        state.reads((1 << STACK_SIZE * len(state.stacks)) - 1)  # the followed iteration may read anything
        numbers = {n for n, value in enumerate(every.registers) if value is not None and _is_any(value)}
        stack = every.stacks[-1]
        numbers |= {
            at
            for at in range(-STACK_SIZE, 0, 8)
            if all(_is_any(stack[at + k][0]) if at + k in stack else False for k in range(8))
        }
        place = (state.chain, state.pc)
        self.loops[place] = self.loops.get(place, frozenset(numbers)) & numbers

    def _forget(self, state: State) -> None:
        """Forget the ranges of numbers that do not matter for an address, a helper call or a loop, to follow fewer paths.

        The verdict on the more general state also holds for each state that it covers.
        """
        matters = self.matters[state.pc]
        for number, value in enumerate(state.registers):
            if value is not None and value.kind == "number" and not matters >> number & 1:
                state.registers[number] = NUMBER
        for frame, stack in enumerate(state.stacks):
            kept = matters if frame == len(state.stacks) - 1 else 0
            for at, (value, k, n) in stack.items():
                # A helper may need a constant there.
                known = value.range.constant is not None and at >= self.spills
                if value.kind == "number" and not known and not kept & flow.stack_bytes(at, 1):
                    stack[at] = (NUMBER, k, n)

    def _endless(self, state: State) -> NoReturn:
        # If the loop reads memory, assume that it waits for another thread, which may be a lane of the same warp.
        waits = False
        place = state.pc
        for pc in range(place, len(self.code)):
            i = self.code[pc]
            if i.cls in (b.LDX, b.STX) and ((state.chain, pc) in self.accesses):
                waits |= self.accesses[(state.chain, pc)].kind == "memory" and (
                    i.cls == b.LDX or i.opcode & 0xE0 == b.ATOMIC
                )
            if i.cls in (b.JMP, b.JMP32) and flow.target_of(pc, i) == place:
                break
        if waits:
            raise self.reject(
                place,
                "a loop that waits for memory which another thread writes: lanes of one warp can wait for each other forever",
                "do not spin; use an atomic that needs no lock",
            )
        raise self.reject(
            place, "a loop that may never end", "bound it by a counter that changes in every iteration"
        )

    def _covers(self, old: State, new: State, read: int = -1) -> bool:
        """Return whether everything that is possible in `new` is also possible in `old`.

        read: a mask of the stack bytes that matter. The states may differ in all other stack bytes.
        """
        if len(old.stacks) != len(new.stacks) or len(old.held) != len(new.held):
            return False
        if old.effect is None and new.effect is not None:
            return False
        live = self.live[old.pc]
        ids: dict[int, object] = {}
        for number in _COMPARED:
            if live >> number & 1 and not value_covers(old.registers[number], new.registers[number], ids):
                return False
        for old_saved, new_saved in zip(old.returns, new.returns, strict=True):
            for x, y in zip(old_saved, new_saved, strict=True):
                if not value_covers(x, y, ids):
                    return False
        for frame, (old_stack, new_stack) in enumerate(zip(old.stacks, new.stacks, strict=True)):
            matters = read >> frame * STACK_SIZE  # bit STACK_SIZE + `at`, as in frame_bytes
            for at, (value, k, n) in old_stack.items():
                if not matters >> at + STACK_SIZE & 1:
                    continue
                other = new_stack.get(at)
                if other is None:
                    return False
                new_value, new_k, new_n = other
                if value == NUMBER and new_value.kind == "number":
                    continue
                if k != new_k or n != new_n:
                    return False
                # Compare each value once: skip a byte that belongs to the same value as the byte before it.
                before = (
                    k
                    and matters >> at - 1 + STACK_SIZE & 1
                    and old_stack.get(at - 1) == (value, k - 1, n)
                    and new_stack.get(at - 1) == (new_value, k - 1, n)
                )
                if not before and not value_covers(value, new_value, ids):
                    return False
        # Each held record of the old state must stand for a different record of the new state.
        found = [ids.get(number) for number in old.held]
        return len(set(found)) == len(found) and all(
            isinstance(number, int) and number in new.held and new.held[number][0] == name
            for number, (name, _) in zip(found, old.held.values(), strict=True)
        )

    # Structure

    def _validate(self) -> None:
        code = self.code
        if not code:
            raise VerifyError(f"{title(self.function)}: it is empty; write a body")
        if len(code) > MAX_INSTRUCTIONS:
            raise self.reject(
                0, f"{len(code)} instructions (at most {MAX_INSTRUCTIONS})", "do less in one program"
            )
        if self.function.point not in CONTEXTS:
            raise VerifyError(
                f"program {self.function.name}: its argument is not a context of the library; use struct gpu_entry, gpu_exit …"
            )
        pc = 0
        starts = set()
        while pc < len(code):
            starts.add(pc)
            i = code[pc]
            if i.dst > 10 or i.src > 10:
                raise self.reject(pc, "a register beyond r10", "compile the C text again")
            if not flow.opcode_known(i):
                raise self.reject(pc, f"unknown instruction 0x{i.opcode:02x}", "compile the C text again")
            if i.opcode == b.LD_IMM64:
                if pc + 1 >= len(code) or code[pc + 1].opcode:
                    raise self.reject(pc, "half of an ld_imm64", "compile the C text again")
                if i.map is not None and i.map not in self.program.maps:
                    raise self.reject(pc, f"map {i.map} is not declared", "declare it in the C text")
                if i.map is not None and not maps.is_name(i.map):
                    raise self.reject(pc, f"a map cannot have the name {i.map!r}", "give it another name")
                if i.map is None and i.src:
                    raise self.reject(
                        pc, "refers to a variable or an unknown map", "use a map or an array on the stack"
                    )
                pc += 1
            fetches = i.cls == b.STX and i.opcode & 0xE0 == b.ATOMIC and i.imm & b.FETCH
            writes = i.cls in (b.LD, b.LDX, b.ALU, b.ALU64) or (fetches and i.imm != b.ATOMIC_CMPXCHG)
            if writes and (i.src if fetches else i.dst) == 10:
                raise self.reject(pc, "writes r10, the frame pointer", "compile the C text again")
            pc += 1
        for pc in starts:
            i = code[pc]
            if i.cls in (b.JMP, b.JMP32):
                op = i.opcode & 0xF0
                if op == b.CALL and i.src == b.PSEUDO_CALL:
                    if pc + 1 + i.imm not in starts:
                        raise self.reject(pc, "calls no function", "make the function static inline")
                elif op not in (b.CALL, b.EXIT) and flow.target_of(pc, i) not in starts:
                    raise self.reject(pc, "jumps out of the program", "compile the C text again")
            next_pc = pc + 2 if i.opcode == b.LD_IMM64 else pc + 1
            if next_pc not in starts and i.opcode not in (0x05, 0x06, 0x95):
                raise self.reject(pc, "runs past the end of the program", "end every function with return")

    # One instruction

    def _step(self, state: State, i: Instruction) -> list[State]:
        """Return the states after an instruction: none at the end of a path, two after a jump that can go both ways."""
        if i.cls in (b.ALU, b.ALU64):
            self._alu(state, i)
        elif i.cls == b.LD:
            name = i.map
            if name is not None and i.src == b.PSEUDO_VALUE:
                state.registers[i.dst] = self._first_value(state.pc, name, i.imm)
            elif name is not None:
                state.registers[i.dst] = Value("map", constant(0), name)
            else:
                state.registers[i.dst] = Value("number", constant(i.imm))
            state.pc += 1
        elif i.cls == b.LDX:
            self.load(state, i)
        elif i.cls in (b.ST, b.STX):
            if i.opcode & 0xE0 == b.ATOMIC:
                self.atomic(state, i)
            else:
                self.store(state, i)
        else:
            return self._jump(state, i)
        state.pc += 1
        return [state]

    def _first_value(self, pc: int, name: str, offset: int) -> Value:
        """Return the address of a global variable, which is in the first value of a map."""
        if self.program.maps[name].kind not in ("array", "shared_array"):
            raise self.reject(pc, f"map {name} holds no variables", "compile it again")
        return Value("value", constant(offset), name, self.new_id())

    def _operand(self, state: State, i: Instruction) -> Value:
        if i.opcode & 0x08:
            return self.read(state, i.src)
        return Value("number", constant(i.imm))

    def _alu(self, state: State, i: Instruction) -> None:
        pc, op, wide = state.pc, i.opcode & 0xF0, i.cls == b.ALU64
        if op == b.MOV:
            source = self._operand(state, i)
            if source.kind != "number":
                if not wide or i.offset:
                    raise self.reject(pc, "truncates an address", "keep addresses in pointers")
            elif i.offset:
                extended = ranges.extend(source.range, i.offset)
                source = Value("number", extended if wide else truncate(extended))
            elif not wide:
                source = Value("number", truncate(source.range))
            elif i.opcode & 0x08 and source.range.constant is None and not source.id:
                source = source._replace(id=self.new_id())  # a test of one copy then also bounds the other
                state.registers[i.src] = source
            state.registers[i.dst] = source
            return
        target = self.read(state, i.dst)
        if op == b.END:
            self.number(state, target, "swaps the bytes of an address")
            state.registers[i.dst] = Value("number", _byte_swap(target.range, i))
            return
        if op == b.NEG:
            self.number(state, target, "negates an address")
            zero = constant(0)
            state.registers[i.dst] = Value("number", ranges.operate(b.SUB, zero, target.range, wide, False))
            return
        source = self._operand(state, i)
        if op in (b.DIV, b.MOD) and not i.opcode & 0x08 and not i.imm:
            raise self.reject(pc, "divides by the constant 0", "divide by something else")
        if op in (b.LSH, b.RSH, b.ARSH) and not i.opcode & 0x08 and not 0 <= i.imm < (64 if wide else 32):
            raise self.reject(pc, f"shifts by {i.imm} bits", "shift by less than the number's width")
        if target.kind == "number" and source.kind == "number":
            result = ranges.operate(op, target.range, source.range, wide, i.offset == 1)
            state.registers[i.dst] = Value("number", result)
            return
        state.registers[i.dst] = self._pointer_arithmetic(state, op, wide, target, source)

    def _pointer_arithmetic(self, state: State, op: int, wide: bool, target: Value, source: Value) -> Value:
        pc = state.pc
        if op not in (b.ADD, b.SUB) or not wide:
            raise self.reject(pc, "calculates with an address", "only add to pointers or subtract from them")
        if target.kind != "number" and source.kind != "number":
            if (
                op == b.SUB
                and target.kind == source.kind
                and target.object == source.object
                and target.id == source.id
            ):
                return Value("number", ranges.operate(b.SUB, target.range, source.range, True, False))
            raise self.reject(pc, "combines two addresses", "only subtract pointers into the same object")
        if target.kind == "number":
            if op == b.SUB:
                raise self.reject(pc, "subtracts an address from a number", "only add to pointers")
            target, source = source, target
        if target.nullable:
            raise self.reject(pc, "calculates with a pointer that may be NULL", "test it against NULL first")
        if target.kind == "map":
            raise self.reject(pc, "calculates with the address of a map", "use its methods")
        offset = ranges.operate(op, target.range, source.range, True, False)
        if not -(1 << 29) <= offset.slo <= offset.shi <= 1 << 29:
            raise self.reject(
                pc, "adds a number without bounds to an address", "test it against its limits first"
            )
        return target._replace(range=offset)

    # Jumps

    def _jump(self, state: State, i: Instruction) -> list[State]:
        op = i.opcode & 0xF0
        if op == b.JA:
            state.pc = flow.target_of(state.pc, i)
            return [state]
        if op == b.EXIT:
            return self._exit(state)
        if op == b.CALL:
            if i.src == b.PSEUDO_CALL:
                return self._enter(state, i)
            HelperCall(self, state, i.imm).run()
            state.pc += 1
            return [state]
        left, right = self.read(state, i.dst), self._operand(state, i)
        following = []
        place = (state.chain, state.pc)
        for taken in (False, True):
            known = self._compare(state, i, left, right, taken)
            if known is None:
                continue
            self.edges.add((place, taken))
            other = state.copy()
            self._learn(other, i.dst, known[0])
            if i.opcode & 0x08:
                self._learn(other, i.src, known[1])
            other.pc = flow.target_of(state.pc, i) if taken else state.pc + 1
            following.append(other)
        return following

    def _compare(
        self, state: State, i: Instruction, left: Value, right: Value, taken: bool
    ) -> tuple[Value, Value] | None:
        """Return what is known about both operands if the jump goes this way; None if the jump cannot go this way."""
        op, wide = i.opcode & 0xF0, i.cls == b.JMP
        if left.kind == right.kind == "number":
            refined = (ranges.refine if wide else ranges.refine32)(op, left.range, right.range, taken)
            if refined is None:
                return None
            return left._replace(range=refined[0]), right._replace(range=refined[1])
        pointer, other = (left, right) if left.kind != "number" else (right, left)
        if other.kind == "number" and other.range.constant == 0 and op in (b.JEQ, b.JNE) and wide:
            is_null = (op == b.JEQ) == taken
            if not pointer.nullable:
                return None if is_null else (left, right)
            known = (
                Value("number", constant(0), id=pointer.id) if is_null else pointer._replace(nullable=False)
            )
            return (known, right) if pointer is left else (left, known)
        if (
            wide
            and op in (b.JEQ, b.JNE)
            and pointer.kind == other.kind
            and not pointer.nullable
            and not other.nullable
        ):
            return left, right
        raise self.reject(state.pc, "compares an address with a number", "only test pointers against NULL")

    def _learn(self, state: State, register: int, value: Value) -> None:
        """Apply what a jump revealed about a value to every copy of it."""
        old = state.registers[register]
        if old is None or value == old:
            return
        if old.kind == "record" and value.kind == "number":
            state.held.pop(old.id, None)
        state.registers[register] = value if value.kind == old.kind else value._replace(id=0)
        if not old.id:
            return

        def renew(copy: Value) -> Value:
            if copy.kind == old.kind == "number":
                return value
            if value.kind == "number":
                return value._replace(id=0)
            return copy._replace(nullable=False)

        def same(copy: Value | None) -> bool:
            return copy is not None and copy.id == old.id and copy.kind == old.kind

        state.registers = [renew(v) if v is not None and same(v) else v for v in state.registers]
        state.returns = [
            tuple(renew(v) if v is not None and same(v) else v for v in saved) for saved in state.returns
        ]
        for stack in state.stacks:
            made: dict[int, Value] = {}
            for at, (v, k, n) in list(stack.items()):
                if same(v):
                    stack[at] = (made.setdefault(id(v), renew(v)), k, n)

    def _enter(self, state: State, i: Instruction) -> list[State]:
        if len(state.stacks) >= MAX_DEPTH:
            raise self.reject(state.pc, f"calls nested more than {MAX_DEPTH} deep", "do not recurse")
        state.returns.append(tuple(state.registers[6:10]))
        state.chain = (*state.chain, state.pc)
        state.stacks.append({})
        state.registers[0] = None
        state.registers[6:10] = [None] * 4
        state.registers[10] = Value("stack", constant(0), len(state.stacks) - 1)
        state.pc += 1 + i.imm
        return [state]

    def _exit(self, state: State) -> list[State]:
        result = state.registers[0]
        if not state.chain:
            if result is None:
                raise self.reject(state.pc, "returns without a value", "end with return 0")
            self.number(state, result, "returns an address")
            for name, pc in state.held.values():
                raise self.reject(
                    pc,
                    f"the record reserved in {name} is not submitted on every path",
                    "submit or discard it",
                )
            return []
        if result is not None and result.kind == "stack" and result.object == len(state.stacks) - 1:
            raise self.reject(state.pc, "returns the address of a local variable", "return the value")
        state.pc = state.chain[-1] + 1
        state.chain = state.chain[:-1]
        state.stacks.pop()
        frames = len(state.stacks)
        state.registers[1:6] = [None] * 5
        state.registers[6:10] = state.returns.pop()
        state.registers[10] = Value("stack", constant(0), frames - 1)
        for stack in state.stacks:
            for at, (value, _, _) in list(stack.items()):
                if value.kind == "stack" and int(value.object or 0) >= frames:
                    del stack[at]
        return [state]


def _is_any(value: Value) -> bool:
    return value.kind == "number" and value.range == NUMBER.range


def _byte_swap(value: Range, i: Instruction) -> Range:
    if i.cls == b.ALU and not i.opcode & 0x08:  # to little-endian, which both targets are
        return truncate(value, i.imm)
    return ranges.swap(value, i.imm)

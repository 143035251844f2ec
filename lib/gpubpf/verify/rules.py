"""The second gate: an abstract interpreter over every path of a device program.

It knows of each register whether it holds a number (with its range) or an address (of what, at which offset), and rejects
what a GPU thread must not do. What it learns on the way, the lowering goes by: which memory each instruction reaches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple, NoReturn

from gpubpf import bytecode as b
from gpubpf.bytecode import CONTEXTS, STACK_SIZE, Function, Instruction, Program
from gpubpf.errors import VerifyError
from gpubpf.maps import MAX_RECORD, SHAPED, MapDefinition
from gpubpf.verify import ranges
from gpubpf.verify.ranges import ANY, Range, constant, truncate, within

MAX_STEPS = 65536  # instructions followed over all paths
MAX_DEPTH = 8
MAX_INSTRUCTIONS = 4096
MAX_PARAM = 1024  # bytes of a GPU_PARAM: they travel with every launch
_MANY = 12  # ways to one place, each followed to its end, from which on they are taken together
Chain = tuple[
    int, ...
]  # the calls (instruction numbers) that lead into a subprogram; () is the program itself
Place = tuple[Chain, int]


class Value(NamedTuple):
    """What a register or stack slot holds.

    kind `number`: `range` is its value. Otherwise an address and `range` the offset from what `object` names:
    `context`; `stack` (object: frame number); `map` (itself, object: name); `value` (of the map `object`);
    `record` (object: its bytes). `id` ties copies together; `nullable`: may be 0 until a test has told.
    """

    kind: str
    range: Range
    object: str | int | None = None
    id: int = 0
    nullable: bool = False


@dataclass(frozen=True)
class Access:
    """The memory that an instruction reaches, on every path.

    kind `stack`, `memory` (global; `alignment` of the access), `context` (`name` its field, `offset` in it), `param` (`name` its map).
    """

    kind: str
    name: str = ""
    offset: int = 0
    alignment: int = 0


@dataclass(frozen=True)
class Call:
    """A call of a helper: the map it works on, what its address arguments point into (`stack` or `memory`, by register),
    the constant size in bytes (of an update: its flags) and the constant text, where it has them."""

    helper: int
    map: str = ""
    pointers: Mapping[int, str] = field(default_factory=dict)
    size: int = 0
    text: str = ""


@dataclass(frozen=True)
class Checked:
    """A device program that passed, with what was learnt: by place, memory reached and calls made; the places that are
    reached at all; and for each conditional jump that is, where it may go."""

    function: Function
    accesses: Mapping[Place, Access]
    calls: Mapping[Place, Call]
    reached: frozenset[Place]
    edges: frozenset[tuple[Place, bool]]
    steps: int
    stack_low: int  # lowest stack offset that is written


NUMBER = Value("number", ANY)

# Helpers: name, and the maps that the first argument may be (empty: takes no map).
_STORAGE = ("array", "percpu_array", "hash", "shared_array", *SHAPED)
HELPERS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: ("map_lookup_elem", (*_STORAGE, "param")),
    2: ("map_update_elem", _STORAGE),
    3: ("map_delete_elem", ("hash",)),
    6: ("trace_printk", ()),
    14: ("get_current_pid_tgid", ()),
    25: ("perf_event_output", ("ringbuf",)),
    130: ("ringbuf_output", ("ringbuf",)),
    131: ("ringbuf_reserve", ("ringbuf",)),
    132: ("ringbuf_submit", ()),
    133: ("ringbuf_discard", ()),
    501: ("puts", ()),
    502: ("get_globaltimer", ()),
    503: ("get_block_idx", ()),
    504: ("get_block_dim", ()),
    505: ("get_thread_idx", ()),
    506: ("gpu_membar", ()),
    601: ("gpu_grid_dim", ()),
    602: ("gpu_lane", ()),
    603: ("gpu_warp", ()),
    604: ("gpu_sm", ()),
    605: ("gpu_clock", ()),
    606: ("gpu_global_thread", ()),
    607: ("gpu_max", ()),
    608: ("gpu_active", ()),
    609: ("gpu_log2", ()),
    610: ("gpu_match", ()),
    611: ("gpu_ballot", ()),
    612: ("gpu_shuffle", ()),
    613: ("gpu_kernel", ()),
    614: ("gpu_epoch", ()),
    615: ("gpu_popcount", ()),
    616: ("gpu_lanes_below", ()),
    617: ("gpu_first", ()),
}
# What a host program for launches may call where it runs in the traced process, and not in the kernel.
_NATIVE = ("shared_array",)
NATIVE_HELPERS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: ("map_lookup_elem", (*_NATIVE, "param")),
    2: ("map_update_elem", _NATIVE),
    5: ("ktime_get_ns", ()),
    7: ("get_prandom_u32", ()),
    8: ("get_smp_processor_id", ()),
    14: ("get_current_pid_tgid", ()),
    15: ("get_current_uid_gid", ()),
    16: ("get_current_comm", ()),
    42: ("get_numa_node_id", ()),
    80: ("get_current_cgroup_id", ()),
    120: ("get_ns_current_pid_tgid", ()),
    123: ("get_current_ancestor_cgroup_id", ()),
    125: ("ktime_get_boot_ns", ()),
    160: ("ktime_get_coarse_ns", ()),
}
# Names for messages (enum bpf_func_id).
_KERNEL_ONLY = {
    3: "map_delete_elem",
    4: "probe_read",
    6: "trace_printk",
    25: "perf_event_output",
    27: "get_stackid",
    35: "get_current_task",
    45: "probe_read_str",
    67: "get_stack",
    112: "probe_read_user",
    113: "probe_read_kernel",
    114: "probe_read_user_str",
    115: "probe_read_kernel_str",
    130: "ringbuf_output",
    131: "ringbuf_reserve",
    158: "get_current_task_btf",
}
_OUT_POINTERS = (503, 504, 505, 601)
# Registers of arguments that may be any number.
_ANY_NUMBER = {
    607: 1 << 2,
    609: 1 << 1,
    610: 1 << 1,
    611: 1 << 1,
    612: 1 << 1 | 1 << 2,
    615: 1 << 1,
    617: 1 << 1,
}
_NUMBERS = {609: 1, 610: 1, 611: 1, 612: 2, 615: 1, 617: 1}  # helpers that take numbers only, and how many
_NONE = (14, 502, 506, 602, 603, 604, 605, 606, 608, 613, 614, 616)  # that take nothing
_COUNTS = {
    **_NUMBERS,
    **dict.fromkeys(_NONE, 0),
    1: 2,
    3: 2,
    607: 2,
}  # how many they take, where it is less than five
_RESULTS = {
    602: within(0, 31),
    603: within(0, 1023),
    604: within(0, ranges.U32),
    608: within(1, ranges.U32),
    609: within(0, 63),
    610: within(1, ranges.U32),
    611: within(0, ranges.U32),
    615: within(0, 64),
    616: within(0, ranges.U32 >> 1),
    617: within(0, 1),
}

Byte = tuple[Value, int, int]  # byte k of a value that was stored as n bytes


class _Checkpoint:
    """A state at a jump target, and how many paths from it are not followed to their ends yet."""

    __slots__ = ("open", "parent", "state")

    def __init__(self, state: _State, parent: _Checkpoint | None) -> None:
        self.state, self.parent, self.open = state, parent, 1


class _State:
    """All that is known at a place on one path."""

    __slots__ = ("chain", "held", "mark", "pc", "registers", "returns", "stacks")

    def __init__(self) -> None:
        self.pc = 0
        self.registers: list[Value | None] = [None] * 11
        self.stacks: list[dict[int, Byte]] = [{}]
        self.chain: Chain = ()
        self.returns: list[tuple[Value | None, ...]] = []  # the callers' r6 to r9
        self.held: dict[int, tuple[str, int]] = {}  # records reserved: map and instruction, by id
        self.mark: _Checkpoint | None = None

    def copy(self) -> _State:
        other = _State.__new__(_State)
        other.pc, other.chain, other.mark = self.pc, self.chain, self.mark
        other.registers = list(self.registers)
        other.stacks = [dict(stack) for stack in self.stacks]
        other.returns = list(self.returns)
        other.held = dict(self.held)
        return other


def place_of(program: Program, function: Function, pc: int) -> str:
    """Where an error is, for its message."""
    line = function.instructions[pc].line if 0 <= pc < len(function.instructions) else 0
    text = program.quote(line)
    where = f"C line {line}" + (f" `{text}`" if text else "") if line else "C line not known"
    return f"{title(function)}, instruction {pc}, {where}"


def title(function: Function) -> str:
    """What a message calls a program."""
    return f"{'device' if function.point in b.DEVICE_POINTS else 'host'} program {function.name}"


def check(program: Program, function: Function) -> Checked:
    """Follows every path of `function`. Raises VerifyError."""
    return _Checker(program, function).run()


class _Checker:
    def __init__(self, program: Program, function: Function) -> None:
        self.program, self.function = program, function
        self.code = function.instructions
        self.accesses: dict[Place, Access] = {}
        self.calls: dict[Place, Call] = {}
        self.reached: set[Place] = set()
        self.edges: set[tuple[Place, bool]] = set()
        self.ids = 0
        self.steps = 0
        self.stack_low = 0

    # Messages

    def reject(self, pc: int, what: str, remedy: str) -> VerifyError:
        line = self.code[pc].line if 0 <= pc < len(self.code) else 0
        text = self.program.quote(line)
        where = f"C line {line}" + (f" `{text}`" if text else "") if line else "C line not known"
        return VerifyError(f"{title(self.function)}, instruction {pc}, {where}: {what}; {remedy}")

    # The walk

    def run(self) -> Checked:
        self._validate()
        self.targets, self.live, self.matters = self._flow()
        self.spills, self.spilled = self._spills()
        first = _State()
        first.registers[1] = Value("context", constant(0))
        first.registers[10] = Value("stack", constant(0), 0)
        pending = [first]
        checkpoints: dict[Place, deque[_Checkpoint]] = {}
        while pending:
            state = pending.pop()
            while True:
                place = (state.chain, state.pc)
                if state.pc in self.targets and self._known(checkpoints, state):
                    self._finish(state.mark)
                    break
                self.reached.add(place)
                self.steps += 1
                if self.steps > MAX_STEPS:
                    raise self.reject(
                        state.pc,
                        f"too many instructions on all its paths together (more than {MAX_STEPS})",
                        "bound its loops by smaller constants",
                    )
                following = self._step(state, self.code[state.pc])
                if not following:
                    self._finish(state.mark)
                    break
                state = following[0]
                if len(following) > 1:
                    pending.append(following[1])
                    if state.mark is not None:
                        state.mark.open += 1
        return Checked(
            self.function,
            self.accesses,
            self.calls,
            frozenset(self.reached),
            frozenset(self.edges),
            self.steps,
            self.stack_low,
        )

    def _finish(self, mark: _Checkpoint | None) -> None:
        while mark is not None:
            mark.open -= 1
            if mark.open:
                return
            mark = mark.parent

    def _known(self, checkpoints: dict[Place, deque[_Checkpoint]], state: _State) -> bool:
        """Whether this state, or a more general one, was followed to its end already. Else remembers it."""
        kept = checkpoints.setdefault((state.chain, state.pc), deque(maxlen=64))
        if sum(not checkpoint.open for checkpoint in kept) >= _MANY:
            self._forget(state)
        for checkpoint in kept:
            if checkpoint.open:
                if self._covers(checkpoint.state, state) and self._covers(state, checkpoint.state):
                    self._endless(state)
            elif self._covers(checkpoint.state, state):
                return True
        checkpoint = _Checkpoint(state.copy(), state.mark)
        kept.append(checkpoint)
        state.mark = checkpoint
        return False

    def _forget(self, state: _State) -> None:
        """Where paths multiply, drops what is known of numbers that no address, no helper and no loop depends on.

        What is found out about the more general state holds for all of them.
        """
        matters = self.matters[state.pc]
        for number, value in enumerate(state.registers):
            if value is not None and value.kind == "number" and not matters >> number & 1:
                state.registers[number] = NUMBER
        for frame, stack in enumerate(state.stacks):
            kept = matters if frame == len(state.stacks) - 1 else 0
            for at, (value, k, n) in stack.items():
                known = (
                    value.range.constant is not None and at >= self.spills
                )  # a helper may want a constant there
                if value.kind == "number" and not known and not kept & _stack_bytes(at, 1):
                    stack[at] = (NUMBER, k, n)

    def _endless(self, state: _State) -> NoReturn:
        # Is memory read on the way round? Then the loop waits for somebody else, who may be a lane of the same warp.
        waits = False
        place = state.pc
        for pc in range(place, len(self.code)):
            i = self.code[pc]
            if i.cls in (b.LDX, b.STX) and ((state.chain, pc) in self.accesses):
                waits |= self.accesses[(state.chain, pc)].kind == "memory" and (
                    i.cls == b.LDX or i.opcode & 0xE0 == b.ATOMIC
                )
            if i.cls in (b.JMP, b.JMP32) and self._target(pc, i) == place:
                break
        if waits:
            raise self.reject(
                place,
                "a loop that waits for memory which another thread writes: lanes of one warp can wait for each other for ever",
                "do not spin; use an atomic that needs no lock",
            )
        raise self.reject(
            place, "a loop that may never end", "bound it by a counter that changes in every turn"
        )

    def _covers(self, old: _State, new: _State) -> bool:
        """Whether everything possible in `new` is possible in `old`."""
        if len(old.stacks) != len(new.stacks) or len(old.held) != len(new.held):
            return False
        live = self.live[old.pc]
        ids: dict[int, int] = {}
        for number in range(11):
            if live >> number & 1 and not _value_covers(old.registers[number], new.registers[number], ids):
                return False
        for old_saved, new_saved in zip(old.returns, new.returns, strict=True):
            for x, y in zip(old_saved, new_saved, strict=True):
                if not _value_covers(x, y, ids):
                    return False
        for old_stack, new_stack in zip(old.stacks, new.stacks, strict=True):
            for at, (value, k, n) in old_stack.items():
                if at < self.spills and not self.spilled[old.pc] >> (at + STACK_SIZE) & 1:
                    continue
                other = new_stack.get(at)
                if other is None:
                    return False
                if value is other[0] and (k, n) == other[1:]:
                    continue
                if value.kind == "number" and value.range == ANY and other[0].kind == "number":
                    continue
                if (k, n) != other[1:] or not _value_covers(value, other[0], ids):
                    return False
        return True

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
                f"program {self.function.name}: it is no device program; give it a struct gpu_entry, gpu_exit … argument"
            )
        pc = 0
        starts = set()
        while pc < len(code):
            starts.add(pc)
            i = code[pc]
            if i.dst > 10 or i.src > 10:
                raise self.reject(pc, "a register beyond r10", "compile the C text again")
            if not _opcode_known(i):
                raise self.reject(pc, f"unknown instruction 0x{i.opcode:02x}", "compile the C text again")
            if i.opcode == b.LD_IMM64:
                if pc + 1 >= len(code) or code[pc + 1].opcode:
                    raise self.reject(pc, "half of an ld_imm64", "compile the C text again")
                if i.map is not None and i.map not in self.program.maps:
                    raise self.reject(pc, f"map {i.map} is not declared", "declare it in the C text")
                if i.map is None and i.src:
                    raise self.reject(
                        pc, "refers to a variable or an unknown map", "use a map or an array on the stack"
                    )
                pc += 1
            writes = i.cls in (b.LD, b.LDX, b.ALU, b.ALU64) or (
                i.cls == b.STX and i.opcode & 0xE0 == b.ATOMIC and i.imm & b.FETCH
            )
            target = i.src if i.cls == b.STX else i.dst
            if writes and target == 10 and i.imm != b.ATOMIC_CMPXCHG:
                raise self.reject(pc, "writes r10, the frame pointer", "compile the C text again")
            pc += 1
        for pc in starts:
            i = code[pc]
            if i.cls in (b.JMP, b.JMP32):
                op = i.opcode & 0xF0
                if op == b.CALL and i.src == b.PSEUDO_CALL:
                    if pc + 1 + i.imm not in starts:
                        raise self.reject(pc, "calls no function", "make the function static inline")
                elif op not in (b.CALL, b.EXIT) and self._target(pc, i) not in starts:
                    raise self.reject(pc, "jumps out of the program", "compile the C text again")
            next_pc = pc + 2 if i.opcode == b.LD_IMM64 else pc + 1
            if next_pc not in starts and i.opcode not in (0x05, 0x06, 0x95):
                raise self.reject(pc, "runs past the end of the program", "end every function with return")

    def _target(self, pc: int, i: Instruction) -> int:
        return pc + 1 + (i.imm if i.opcode == 0x06 else i.offset)

    def _spills(self) -> tuple[int, list[int]]:
        """The stack below which the compiler only keeps registers, since no address points there; and by instruction a mask of its
        bytes, from the lowest, that may still be read. What else lies there makes no difference between two ways to a place."""
        nothing = -STACK_SIZE, [0] * len(self.code)
        low = 0
        for pc, i in enumerate(self.code):
            if i.opcode == b.JMP | b.CALL and i.src == 1:
                return nothing  # functions have stacks of their own
            if i.cls in (b.ALU, b.ALU64) and i.opcode & 0x08 and i.src == 10:
                then = self.code[pc + 1] if pc + 1 < len(self.code) else i
                if i.opcode & 0xF0 != b.MOV or then.opcode != b.ALU64 | b.ADD or then.dst != i.dst:
                    return nothing
                low = min(low, then.imm)
            if i.cls == b.STX and i.src == 10:
                return nothing
        live = [0] * len(self.code)
        changed = True
        while changed:
            changed = False
            for pc in range(len(self.code) - 1, -1, -1):
                i, result = self.code[pc], 0
                for successor in _successors(self.code, pc):
                    result |= live[successor]
                at = i.offset + STACK_SIZE
                if 0 <= at < STACK_SIZE:
                    bytes_ = ((1 << {0x00: 4, 0x08: 2, 0x10: 1, 0x18: 8}[i.opcode & 0x18]) - 1) << at
                    if i.cls == b.LDX and i.src == 10:
                        result |= bytes_
                    elif i.cls in (b.ST, b.STX) and i.dst == 10:
                        atomic = i.cls == b.STX and i.opcode & 0xE0 == b.ATOMIC
                        result = result | bytes_ if atomic else result & ~bytes_
                if result != live[pc]:
                    live[pc], changed = result, True
        return low, live

    def _flow(self) -> tuple[set[int], list[int], list[int]]:
        """Jump targets; and by instruction, masks of registers: those whose value may still be read, and those whose value may
        decide what memory is reached, what a helper is given, or how often a loop turns, with bytes of the stack (`_needs`)."""
        size = len(self.code)
        targets: set[int] = set()
        live = [0] * (size + 1)
        after: list[tuple[int, ...]] = []
        for pc, i in enumerate(self.code):
            op = i.opcode & 0xF0
            if i.opcode == b.LD_IMM64:
                after.append((pc + 2,))
            elif i.cls in (b.JMP, b.JMP32) and op == b.EXIT:
                after.append(())
            elif i.cls in (b.JMP, b.JMP32) and op != b.CALL:
                target = self._target(pc, i)
                target = target if 0 <= target < size else size  # unreachable second slots hold anything
                targets.add(target)
                after.append((target,) if op == b.JA else (pc + 1, target))
            else:
                after.append((pc + 1,))
        before: list[list[int]] = [[] for _ in range(size + 1)]
        for pc, successors in enumerate(after):
            for successor in successors:
                before[min(successor, size)].append(pc)
        ending = ways_out(after)  # jumps out of a loop
        for pc, successors in enumerate(after):
            for head in successors:
                if head <= pc:
                    loop = _loop(head, pc, before)
                    ending |= {place for place in loop if not loop.issuperset(after[place])}
        matters = [0] * (size + 1)
        changed = True
        while changed:
            changed = False
            for pc in range(size - 1, -1, -1):
                result = needed = 0
                for successor in after[pc]:
                    result |= live[successor]
                    needed |= matters[successor]
                used, made = _uses(self.code[pc])
                result = result & ~made | used
                needed = _needs(self.code[pc], needed, pc in ending)
                if (result, needed) != (live[pc], matters[pc]):
                    live[pc], matters[pc] = result, needed
                    changed = True
        return targets, live, matters

    # One instruction

    def _step(self, state: _State, i: Instruction) -> list[_State]:
        """The states after it: none at an end, two after an open jump; the first continues this path."""
        if i.cls in (b.ALU, b.ALU64):
            self._alu(state, i)
        elif i.cls == b.LD:
            definition = i.map
            if definition is not None:
                state.registers[i.dst] = Value("map", constant(0), definition)
            else:
                state.registers[i.dst] = Value("number", constant(i.imm))
            state.pc += 1
        elif i.cls == b.LDX:
            self._load(state, i)
        elif i.cls in (b.ST, b.STX):
            if i.opcode & 0xE0 == b.ATOMIC:
                self._atomic(state, i)
            else:
                self._store(state, i)
        else:
            return self._jump(state, i)
        state.pc += 1
        return [state]

    def _read(self, state: _State, register: int) -> Value:
        value = state.registers[register]
        if value is None:
            raise self.reject(
                state.pc, f"r{register} is read before it has a value", "give the variable a value first"
            )
        return value

    def _operand(self, state: _State, i: Instruction) -> Value:
        if i.opcode & 0x08:
            return self._read(state, i.src)
        return Value("number", constant(i.imm))

    def _alu(self, state: _State, i: Instruction) -> None:
        pc, op, wide = state.pc, i.opcode & 0xF0, i.cls == b.ALU64
        if op == b.MOV:
            source = self._operand(state, i)
            if source.kind != "number":
                if not wide or i.offset:
                    raise self.reject(pc, "cuts an address to fewer bits", "keep addresses in pointers")
            elif i.offset:
                extended = ranges.extend(source.range, i.offset)
                source = Value("number", extended if wide else truncate(extended))
            elif not wide:
                source = Value("number", truncate(source.range))
            elif i.opcode & 0x08 and source.range.constant is None and not source.id:
                source = source._replace(id=self._new_id())  # so that a test of one copy tells of the other
                state.registers[i.src] = source
            state.registers[i.dst] = source
            return
        target = self._read(state, i.dst)
        if op == b.END:
            self._number(state, target, "swaps the bytes of an address")
            state.registers[i.dst] = Value("number", _byte_swap(target.range, i))
            return
        if op == b.NEG:
            self._number(state, target, "negates an address")
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

    def _pointer_arithmetic(self, state: _State, op: int, wide: bool, target: Value, source: Value) -> Value:
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
            raise self.reject(pc, "calculates with what may be NULL", "test it against NULL first")
        if target.kind == "map":
            raise self.reject(pc, "calculates with the address of a map", "use its methods")
        offset = ranges.operate(op, target.range, source.range, True, False)
        if not -(1 << 29) <= offset.slo <= offset.shi <= 1 << 29:
            raise self.reject(
                pc, "adds a number without bounds to an address", "test it against its limits first"
            )
        return target._replace(range=offset)

    def _number(self, state: _State, value: Value, what: str) -> None:
        if value.kind != "number":
            raise self.reject(state.pc, what, "keep addresses in pointers")

    def _new_id(self) -> int:
        self.ids += 1
        return self.ids

    # Memory

    def _reach(self, state: _State, base: Value, offset: int, size: int, write: bool) -> Range:
        """Checks one access through a register and notes it. Returns the offset range."""
        pc = state.pc
        if base.kind == "number":
            raise self.reject(
                pc,
                f"{'writes to' if write else 'reads from'} an address that is only a number",
                "device programs reach their context, their stack and map values",
            )
        if base.nullable:
            raise self.reject(
                pc, "uses a pointer that may be NULL", "test the result of lookup against NULL first"
            )
        where = ranges.operate(b.ADD, base.range, constant(offset), True, False)
        if base.kind == "map":
            raise self.reject(pc, f"reaches into map {base.object} itself", "use its methods")
        if base.kind == "context":
            access = self._context(pc, where, size, write)
        elif base.kind == "stack":
            at = where.constant
            if at is None:
                raise self.reject(
                    pc,
                    "an array on the stack with an index that is not constant: a probe's stack is in registers",
                    "unroll the loop, or use a map",
                )
            self._stack_bounds(pc, where, size, True)
            access = Access("stack")
        else:
            access = self._value(pc, base, where, size, write)
        self._note_access(state, access)
        return where

    def _note_access(self, state: _State, access: Access) -> None:
        place = (state.chain, state.pc)
        known = self.accesses.get(place)
        if known is not None and known.kind == access.kind == "memory":
            access = Access("memory", alignment=min(known.alignment, access.alignment))
        elif known is not None and known != access:
            raise self.reject(
                state.pc,
                "reaches different memory on different paths",
                "write the access once in each branch",
            )
        self.accesses[place] = access

    def _context(self, pc: int, where: Range, size: int, write: bool) -> Access:
        if write:
            raise self.reject(pc, "writes to its context", "the context is read-only; copy the field first")
        at = where.constant
        if at is None:
            raise self.reject(pc, "reads its context at an offset that is not constant", "name the field")
        for name, (start, length) in CONTEXTS[self.function.point].items():
            if start <= signed64(at) and signed64(at) + size <= start + length:
                if (at - start) % size:
                    raise self.reject(pc, "reads its context unaligned", "read whole fields")
                return Access("context", name, at - start)
        raise self.reject(
            pc,
            f"reads byte {signed64(at)} of its context, beyond struct gpu_{self.function.point}",
            "use its fields, and the context type of where the program is attached",
        )

    def _stack_bounds(self, pc: int, where: Range, size: int, aligned: bool = False) -> int:
        at = signed64(where.lo)
        if aligned and at % size:
            raise self.reject(
                pc, f"reaches stack offset {at}, size {size}, unaligned", "do not pack the structure"
            )
        if not -STACK_SIZE <= at <= at + size <= 0:
            raise self.reject(
                pc,
                f"reaches stack offset {at}, size {size}, outside of the stack",
                "stay within the variable",
            )
        return at

    def _value(self, pc: int, base: Value, where: Range, size: int, write: bool) -> Access:
        if base.kind == "record":
            limit, what, alignment, name = int(base.object or 0), "the reserved record", 8, ""
        else:
            definition = self.program.maps[str(base.object)]
            limit, what, name = definition.value_size, f"a value of map {definition.name}", definition.name
            alignment = value_alignment(definition)
        if where.slo < 0 or where.shi + size > limit:
            bounds = str(where.slo) if where.slo == where.shi else f"{where.slo} to {where.shi}"
            raise self.reject(
                pc,
                f"reaches offset {bounds}, size {size}, of {what}, which has {limit} bytes",
                "test the index against its limits first",
            )
        if alignment % size or not where.multiple_of(size):
            raise self.reject(
                pc, f"an access of {size} bytes that is not aligned", "do not pack the structure"
            )
        if name and definition.kind == "param":
            if write:
                raise self.reject(pc, f"writes to parameter {name}", "parameters are read-only; use an array")
            at = where.constant
            if at is None:
                raise self.reject(
                    pc, f"reads parameter {name} at an offset that is not constant", "unroll the loop"
                )
            return Access("param", name, at)
        possible = where.bits | where.unknown
        known = possible & -possible if possible else alignment
        return Access("memory", alignment=min(alignment, known))

    def _load(self, state: _State, i: Instruction) -> None:
        size = b.WIDTH[i.opcode & 0x18]
        base = self._read(state, i.src)
        where = self._reach(state, base, i.offset, size, False)
        if base.kind == "stack":
            value = self._stack_load(state, int(base.object or 0), signed64(where.lo), size)
        elif base.kind == "context" or size == 8:
            value = NUMBER if size == 8 else Value("number", within(0, (1 << 8 * size) - 1))
        else:
            value = Value("number", within(0, (1 << 8 * size) - 1))
        if i.opcode & 0xE0 == b.MEMSX:
            self._number(state, value, "cuts an address to fewer bits")
            value = Value("number", ranges.extend(value.range, 8 * size))
        state.registers[i.dst] = value

    def _stack_load(self, state: _State, frame: int, at: int, size: int) -> Value:
        stack = state.stacks[frame]
        parts = []
        for k in range(size):
            part = stack.get(at + k)
            if part is None:
                raise self.reject(
                    state.pc,
                    f"reads byte {at + k} of the stack, which was never written",
                    "give the whole variable a value first",
                )
            parts.append(part)
        first = parts[0][0]
        if all(value is first and n == size and k == number for number, (value, k, n) in enumerate(parts)):
            return first
        if any(value.kind != "number" for value, _, _ in parts):
            raise self.reject(state.pc, "reads a part of an address", "keep addresses in pointers")
        total = 0
        for number, (value, k, _) in enumerate(parts):
            byte = value.range.constant
            if byte is None:
                return Value("number", within(0, (1 << 8 * size) - 1))
            total |= (byte >> 8 * k & 0xFF) << 8 * number
        return Value("number", constant(total))

    def _stack_store(self, state: _State, frame: int, at: int, size: int, value: Value) -> None:
        if value.kind == "number" and size < 8:
            value = Value("number", truncate(value.range, 8 * size))
        stack = state.stacks[frame]
        self.stack_low = min(self.stack_low, at)
        for k in range(size):
            stack[at + k] = (value, k, size)

    def _store(self, state: _State, i: Instruction) -> None:
        size = b.WIDTH[i.opcode & 0x18]
        base = self._read(state, i.dst)
        value = self._read(state, i.src) if i.cls == b.STX else Value("number", constant(i.imm))
        where = self._reach(state, base, i.offset, size, True)
        if base.kind == "stack":
            if value.kind != "number" and size != 8:
                raise self.reject(state.pc, "stores a part of an address", "keep addresses in pointers")
            self._stack_store(state, int(base.object or 0), signed64(where.lo), size, value)
        elif value.kind != "number":
            raise self.reject(
                state.pc, "stores an address in a map, where it means nothing to others", "store a number"
            )

    def _atomic(self, state: _State, i: Instruction) -> None:
        size = b.WIDTH[i.opcode & 0x18]
        base = self._read(state, i.dst)
        operand = self._read(state, i.src)
        self._number(state, operand, "an atomic operation on an address")
        if i.imm == b.ATOMIC_CMPXCHG:
            self._number(state, self._read(state, 0), "compares an address atomically")
        where = self._reach(state, base, i.offset, size, True)
        old = NUMBER if size == 8 else Value("number", within(0, ranges.U32))
        if base.kind == "stack":
            at = signed64(where.lo)
            self._number(
                state,
                self._stack_load(state, int(base.object or 0), at, size),
                "an atomic operation on an address",
            )
            self._stack_store(state, int(base.object or 0), at, size, NUMBER)
        if i.imm == b.ATOMIC_CMPXCHG:
            state.registers[0] = old
        elif i.imm & b.FETCH:
            state.registers[i.src] = old

    # Jumps

    def _jump(self, state: _State, i: Instruction) -> list[_State]:
        op = i.opcode & 0xF0
        if op == b.JA:
            state.pc = self._target(state.pc, i)
            return [state]
        if op == b.EXIT:
            return self._exit(state)
        if op == b.CALL:
            if i.src == b.PSEUDO_CALL:
                return self._enter(state, i)
            _Calls(self, state, i.imm).run()
            state.pc += 1
            return [state]
        left, right = self._read(state, i.dst), self._operand(state, i)
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
            other.pc = self._target(state.pc, i) if taken else state.pc + 1
            following.append(other)
        return following

    def _compare(
        self, state: _State, i: Instruction, left: Value, right: Value, taken: bool
    ) -> tuple[Value, Value] | None:
        """Both operands as the jump tells of them; None where it cannot go this way."""
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

    def _learn(self, state: _State, register: int, value: Value) -> None:
        """Writes what a jump told of a value to every copy of it."""
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

    def _enter(self, state: _State, i: Instruction) -> list[_State]:
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

    def _exit(self, state: _State) -> list[_State]:
        result = state.registers[0]
        if not state.chain:
            if result is None:
                raise self.reject(state.pc, "returns without a value", "end with return 0")
            self._number(state, result, "returns an address")
            for name, pc in state.held.values():
                raise self.reject(
                    pc,
                    f"the record reserved in {name} is not submitted on every path",
                    "submit or discard it",
                )
            return []
        if result is not None and result.kind == "stack" and result.object == len(state.stacks) - 1:
            raise self.reject(state.pc, "returns the address of a variable of its own", "return the value")
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


class _Calls:
    """One call of a helper: its arguments checked one by one, its result and effects written to the state."""

    def __init__(self, checker: _Checker, state: _State, helper: int) -> None:
        self.checker, self.state, self.helper = checker, state, helper
        self.pointers: dict[int, str] = {}
        self.map: MapDefinition | None = None
        self.size = 0
        self.text = ""

    def reject(self, what: str, remedy: str) -> VerifyError:
        return self.checker.reject(self.state.pc, what, remedy)

    def run(self) -> None:
        on_host = self.checker.function.point in b.HOST_POINTS
        helpers = NATIVE_HELPERS if on_host else HELPERS
        if self.helper not in helpers:
            if on_host:
                name = _KERNEL_ONLY.get(self.helper, f"number {self.helper}")
                raise self.reject(f"helper {name} exists only in the kernel", "run as root")
            raise self.reject(
                f"helper {self.helper} does not exist on a GPU", "see gpubpf.h for those that do"
            )
        name, kinds = helpers[self.helper]
        self.name = name
        if kinds:
            self.map = self._map(2 if self.helper == 25 else 1, kinds)
        result: Value | None = Value("number", _RESULTS.get(self.helper, ANY))
        special = {
            1: self._lookup,
            2: self._update,
            3: self._delete,
            6: self._print,
            16: self._comm,
            25: self._output,
            130: self._output,
            131: self._reserve,
            132: self._submit,
            133: self._submit,
            120: self._namespace,
            123: self._level,
            501: self._print,
            607: self._maximum,
        }.get(self.helper)
        if special is not None:
            result = special() or result
        elif self.helper in _OUT_POINTERS:
            for register in (1, 2, 3):
                self._write_u64(register)
        for register in range(1, 1 + _NUMBERS.get(self.helper, 0)):
            self.checker._number(self.state, self._argument(register), f"{name} of an address")
        state = self.state
        place = (state.chain, state.pc)
        call = Call(self.helper, self.map.name if self.map else "", self.pointers, self.size, self.text)
        if self.checker.calls.setdefault(place, call) != call:
            raise self.reject(
                f"calls {name} with different maps, sizes or texts on different paths",
                "write the call once in each branch",
            )
        state.registers[0] = result
        state.registers[1:6] = [None] * 5

    def _map(self, register: int, kinds: tuple[str, ...]) -> MapDefinition:
        value = self._argument(register)
        if value.kind != "map":
            raise self.reject(f"{self.name} is given no map", "use the map's methods")
        definition = self.checker.program.maps[str(value.object)]
        if definition.kind not in kinds and self.checker.function.point not in b.DEVICE_POINTS:
            raise self.reject(
                f"map {definition.name} exists only in the kernel",
                "declare it with GPU_SHARED_ARRAY, or run as root",
            )
        if definition.kind not in kinds:
            raise self.reject(
                f"{self.name} does not work on map {definition.name} of kind {definition.kind}",
                f"kinds it works on: {', '.join(kinds)}",
            )
        if definition.kind == "param" and definition.value_size > MAX_PARAM:
            raise self.reject(
                f"parameter {definition.name} has {definition.value_size} bytes (at most {MAX_PARAM})",
                "make it smaller, or use an array",
            )
        return definition

    def _argument(self, register: int) -> Value:
        return self.checker._read(self.state, register)

    def _constant(self, register: int, what: str) -> int:
        value = self._argument(register)
        number = value.range.constant if value.kind == "number" else None
        if number is None:
            raise self.reject(f"{self.name} with a {what} that is not constant", f"use a constant {what}")
        return number

    def _memory(self, register: int, size: int, what: str) -> list[Value] | None:
        """Checks that `size` bytes can be read; on the stack returns them, byte by byte."""
        value = self._argument(register)
        if value.kind not in ("stack", "value", "record") or value.nullable:
            hint = (
                "test it against NULL first"
                if value.nullable
                else "pass the address of a variable on the stack"
            )
            raise self.reject(f"{self.name}: its {what} is no address of readable memory", hint)
        if value.kind == "stack":
            at = value.range.constant
            if at is None:
                raise self.reject(
                    f"{self.name}: the address of its {what} is not constant", "unroll the loop"
                )
            begin = self.checker._stack_bounds(self.state.pc, value.range, size)
            stack = self.state.stacks[int(value.object or 0)]
            result = []
            for k in range(size):
                part = stack.get(begin + k)
                if part is None:
                    raise self.reject(
                        f"{self.name}: byte {k} of its {what} was never written (padding counts)",
                        "set the whole structure to zero first",
                    )
                if part[0].kind != "number":
                    raise self.reject(f"{self.name}: its {what} holds an address", "pass numbers")
                byte = part[0].range.constant
                result.append(
                    Value(
                        "number", constant(byte >> 8 * part[1] & 0xFF) if byte is not None else within(0, 255)
                    )
                )
            self.pointers[register] = "stack"
            return result
        self._outside(register, value, size, what)
        return None

    def _outside(self, register: int, value: Value, size: int, what: str, aligned: bool = True) -> None:
        if value.kind == "value" and self.checker.program.maps[str(value.object)].kind == "param":
            raise self.reject(f"{self.name}: its {what} lies in a parameter", "copy it to the stack first")
        limit = (
            int(value.object or 0)
            if value.kind == "record"
            else self.checker.program.maps[str(value.object)].value_size
        )
        if value.range.slo < 0 or value.range.shi + size > limit:
            raise self.reject(
                f"{self.name}: its {what} of {size} bytes reaches beyond the {limit} bytes there",
                "pass the address of a large enough variable",
            )
        step = gcd(size, 8) if aligned else 1
        alignment = (
            8 if value.kind == "record" else value_alignment(self.checker.program.maps[str(value.object)])
        )
        if alignment % step or not value.range.multiple_of(step & -step):
            raise self.reject(f"{self.name}: its {what} is not aligned", "copy it to the stack first")
        self.pointers[register] = "memory"

    def _write_u64(self, register: int) -> None:
        value = self._argument(register)
        if value.kind not in ("stack", "value", "record") or value.nullable:
            raise self.reject(
                f"{self.name}: argument {register} is no address to write to", "pass &variable of a u64"
            )
        if value.kind == "stack":
            if value.range.constant is None:
                raise self.reject(f"{self.name}: argument {register} is not constant", "unroll the loop")
            at = self.checker._stack_bounds(self.state.pc, value.range, 8, True)
            self.checker._stack_store(
                self.state, int(value.object or 0), at, 8, Value("number", within(0, ranges.U32))
            )
            self.pointers[register] = "stack"
        else:
            self._outside(register, value, 8, f"argument {register}")

    def _lookup(self) -> Value:
        definition = self.map
        assert definition is not None
        key = self._memory(2, definition.key_size, "key")
        address = Value("value", constant(0), definition.name, self.checker._new_id(), True)
        if definition.kind == "site_array":  # what is beyond the last site has a value too
            return address._replace(nullable=False)
        if definition.kind == "hash" or key is None:
            if definition.kind == "param":
                raise self.reject("lookup in a parameter with a key that is not constant", "use the key 0")
            return address
        number = 0
        for k, byte in enumerate(key):
            if byte.range.constant is None:
                if definition.kind == "param":
                    raise self.reject(
                        "lookup in a parameter with a key that is not constant", "use the key 0"
                    )
                return address
            number |= byte.range.constant << 8 * k
        if number < definition.max_entries:
            return address._replace(nullable=False)
        if definition.kind == "param":
            raise self.reject(f"parameter {definition.name} has no key {number}", "use the key 0")
        return address

    def _update(self) -> None:
        definition = self.map
        assert definition is not None
        self._memory(2, definition.key_size, "key")
        self._memory(3, definition.value_size, "value")
        flags = self._constant(4, "flag")
        if flags not in (0, 1, 2):
            raise self.reject(f"update with flags {flags}", "use BPF_ANY, BPF_NOEXIST or BPF_EXIST")
        self.size = flags

    def _delete(self) -> None:
        assert self.map is not None
        self._memory(2, self.map.key_size, "key")

    def _comm(self) -> None:
        self.size = self._constant(2, "size")
        if not 0 < self.size <= 64:
            raise self.reject(f"{self.name} into {self.size} bytes", "16 bytes hold every name")
        self._buffer(1)

    def _namespace(self) -> None:
        for register in (1, 2):
            self.checker._number(self.state, self._argument(register), "a namespace that is an address")
        self.size = self._constant(4, "size")
        if self.size != 8:
            raise self.reject(f"{self.name} into {self.size} bytes", "pass a struct bpf_pidns_info")
        self._buffer(3)

    def _buffer(self, register: int) -> None:
        """An argument that points to `size` bytes which the helper fills."""
        value = self._argument(register)
        if value.kind == "stack" and value.range.constant is not None:
            begin = self.checker._stack_bounds(self.state.pc, value.range, self.size)
            for k in range(self.size):
                self.checker._stack_store(
                    self.state, int(value.object or 0), begin + k, 1, Value("number", within(0, 255))
                )
            self.pointers[register] = "stack"
        elif value.kind == "value" and not value.nullable:
            self._outside(register, value, self.size, "buffer", aligned=False)
        else:
            raise self.reject(f"{self.name}: argument {register} is no buffer", "pass an array")

    def _level(self) -> None:
        self.checker._number(self.state, self._argument(1), "a level that is an address")

    def _output(self) -> None:
        perf = self.helper == 25
        if perf:
            if self._argument(1).kind != "context":
                raise self.reject(f"{self.name}: its first argument is not the context", "pass ctx")
            self.checker._number(self.state, self._argument(3), "flags that are an address")
        else:
            self.checker._number(self.state, self._argument(4), "flags that are an address")
        self.size = self._record_size(5 if perf else 3, perf)
        self._memory(4 if perf else 2, self.size, "record")

    def _maximum(self) -> None:
        value = self._argument(1)
        kept = value.kind == "value" and self.checker.program.maps[str(value.object)].kind != "param"
        if not kept or value.nullable:
            raise self.reject(
                f"{self.name}: its cell is no value of a map", "pass what lookup gave, tested against NULL"
            )
        self._outside(1, value, 8, "cell")
        self.checker._number(self.state, self._argument(2), "the maximum of an address")

    def _record_size(self, register: int, shorter: bool = False) -> int:
        """All records of a ring have one size, so that it has one stride; perf's may be `shorter`."""
        assert self.map is not None
        size = self._constant(register, "size")
        if not 0 < size <= MAX_RECORD:
            raise self.reject(f"a record of {size} bytes (1 to {MAX_RECORD})", "make it smaller")
        whole = self.map.value_size
        if size != whole and not (shorter and size < whole):
            raise self.reject(
                f"a record of {size} bytes in ring {self.map.name}, whose records have {whole}",
                f"put one type of records into it, and name that in GPU_RINGBUF({self.map.name}, type, pages)",
            )
        return size

    def _reserve(self) -> Value:
        assert self.map is not None
        self.size = self._record_size(2)
        if self._argument(3).range.constant != 0:
            raise self.reject("ringbuf_reserve with flags", "pass 0")
        number = self.checker._new_id()
        self.state.held[number] = (self.map.name, self.state.pc)
        return Value("record", constant(0), self.size, number, True)

    def _submit(self) -> None:
        value = self._argument(1)
        if (
            value.kind != "record"
            or value.nullable
            or value.range.constant != 0
            or value.id not in self.state.held
        ):
            raise self.reject(
                f"{self.name} of what is no reserved record",
                "pass what ringbuf_reserve gave, tested against NULL, once",
            )
        self.checker._number(self.state, self._argument(2), "flags that are an address")
        name, _ = self.state.held.pop(value.id)
        self.map = self.checker.program.maps[name]
        self.size = int(value.object or 0)
        state = self.state
        state.registers = [None if _is_record(v, value.id) else v for v in state.registers]
        state.returns = [tuple(None if _is_record(v, value.id) else v for v in s) for s in state.returns]
        for stack in state.stacks:
            for at in [at for at, (v, _, _) in stack.items() if _is_record(v, value.id)]:
                del stack[at]

    def _print(self) -> None:
        # puts takes no length: its text ends at the first zero byte.
        self.size = self._constant(2, "size") if self.helper == 6 else self._text_length()
        if not 0 < self.size <= STACK_SIZE:
            raise self.reject(f"{self.name} of {self.size} bytes", "print shorter texts")
        content = self._memory(1, self.size, "text")
        if content is None or any(byte.range.constant is None for byte in content):
            raise self.reject(f"{self.name} of a text that is not constant", "use a string literal")
        data = bytes(byte.range.constant or 0 for byte in content)
        self.text = data.split(b"\0", 1)[0].decode("utf-8", "replace")
        if self.helper == 6:
            conversions = self.text.replace("%%", "").count("%")
            if conversions > 3:
                raise self.reject("trace_printk with more than three values", "print in two calls")
            for register in range(3, 3 + conversions):
                self.checker._number(self.state, self._argument(register), "prints an address")
        elif "%" in self.text:
            self.text = self.text.replace("%", "%%")

    def _text_length(self) -> int:
        """Bytes of the constant text on the stack that r1 points to, with the zero byte at its end."""
        value = self._argument(1)
        at = value.range.constant
        if value.kind != "stack" or at is None:
            raise self.reject(f"{self.name}: its text is not on the stack", "print with gpu_puts")
        stack = self.state.stacks[int(value.object or 0)]
        for size in range(1, STACK_SIZE + 1):
            part = stack.get(signed64(at) + size - 1)
            byte = part[0].range.constant if part is not None and part[0].kind == "number" else None
            if part is None or byte is None:
                raise self.reject(f"{self.name} of a text that is not constant", "use a string literal")
            if byte >> 8 * part[1] & 0xFF == 0:
                return size
        raise self.reject(f"{self.name} of a text without end", "end it with a zero byte")


def _is_record(value: Value | None, number: int) -> bool:
    return value is not None and value.kind == "record" and value.id == number


def signed64(value: int) -> int:
    return b.signed(value, 64)


def value_alignment(definition: MapDefinition) -> int:
    """The power of two that every value of the map is aligned to in storage (at most 16)."""
    if definition.kind == "param":
        return 8
    if definition.kind == "hash":
        return 8
    return gcd(16, definition.stride)


def _value_covers(old: Value | None, new: Value | None, ids: dict[int, int]) -> bool:
    if old is None:
        return True
    if new is None or old.kind != new.kind or old.object != new.object or old.nullable != new.nullable:
        return False
    if old.kind == "number":
        if old.id and ids.setdefault(old.id, new.id) != new.id:
            return False
    elif (old.nullable or old.kind == "record") and ids.setdefault(old.id, new.id) != new.id:
        return False
    return old.range.includes(new.range)


def _uses(i: Instruction) -> tuple[int, int]:
    """Masks of the registers an instruction reads and of those it overwrites."""
    op = i.opcode & 0xF0
    source = 1 << i.src if i.opcode & 0x08 else 0
    if i.cls in (b.ALU, b.ALU64):
        if op == b.MOV:
            return source, 1 << i.dst
        if op == b.END:
            source = 0
        return source | 1 << i.dst, 0
    if i.cls == b.LD:
        return 0, 1 << i.dst
    if i.cls == b.LDX:
        return 1 << i.src, 1 << i.dst
    if i.cls == b.ST:
        return 1 << i.dst, 0
    if i.cls == b.STX:
        atomic = i.opcode & 0xE0 == b.ATOMIC and i.imm == b.ATOMIC_CMPXCHG
        return 1 << i.dst | 1 << i.src | (1 if atomic else 0), 0
    if op == b.JA:
        return 0, 0
    if op == b.EXIT:
        return 1, 0
    if op == b.CALL:
        return (1 << 1 + _COUNTS.get(i.imm, 5) if i.src == 0 else 1 << 6) - 2, 0b111111
    return source | 1 << i.dst, 0


def _successors(code: Sequence[Instruction], pc: int) -> tuple[int, ...]:
    """Where an instruction may go on; those beyond the end are left out."""
    i, op, size = code[pc], code[pc].opcode & 0xF0, len(code)
    if i.opcode == b.LD_IMM64:
        after: tuple[int, ...] = (pc + 2,)
    elif i.cls in (b.JMP, b.JMP32) and op == b.EXIT:
        after = ()
    elif i.cls in (b.JMP, b.JMP32) and op != b.CALL:
        target = pc + 1 + (i.imm if i.opcode == 0x06 else i.offset)
        after = (target,) if op == b.JA else (pc + 1, target)
    else:
        after = (pc + 1,)
    return tuple(successor for successor in after if 0 <= successor < size)


def ways_out(after: Sequence[tuple[int, ...]]) -> set[int]:
    """The jumps that leave a loop, also one that is part of another, wherever the compiler has put its parts."""
    found: set[int] = set()
    reached = {0}
    new = [0]
    while new:
        more = {to for to in after[new.pop()] if to < len(after)} - reached
        reached |= more
        new += more
    pending = [reached]
    while pending:
        places = pending.pop()
        for loop in _cycles(after, places):
            found |= {place for place in loop if not loop.issuperset(after[place])}
            heads = {to for place in reached - loop for to in after[place] if to in loop}
            pending.append(loop - (heads or {min(loop)}))
    return found


def _cycles(after: Sequence[tuple[int, ...]], places: set[int]) -> Iterator[set[int]]:
    """The largest sets of places each of which leads to each other without leaving `places`."""
    reach = dict.fromkeys(places, 0)  # masks
    changed = True
    while changed:
        changed = False
        for place in sorted(places, reverse=True):
            mask = reach[place]
            for to in after[place]:
                if to in reach:
                    mask |= 1 << to | reach[to]
            if mask != reach[place]:
                reach[place], changed = mask, True
    rest = {place for place in places if reach[place] >> place & 1}
    while rest:
        one = rest.pop()
        loop = {one} | {place for place in rest if reach[one] >> place & 1 and reach[place] >> one & 1}
        rest -= loop
        yield loop


def _loop(head: int, last: int, before: list[list[int]]) -> set[int]:
    """The instructions on the ways from `head` to `last`, which jumps back to it."""
    loop, pending = {head, last}, [last]
    while pending:
        place = pending.pop()
        if place != head:
            pending += [one for one in before[place] if one not in loop]
            loop.update(before[place])
    return loop


def _stack_bytes(at: int, size: int) -> int:
    """The bits of these bytes of the stack in a mask of what matters; those of registers come first."""
    return ((1 << size) - 1) << (11 + STACK_SIZE + at) if -STACK_SIZE <= at <= -size else 0


def _needs(i: Instruction, after: int, ends_loop: bool) -> int:
    """A mask of the registers, and of the bytes of the stack that the program names as such, that matter before an instruction,
    given those that matter after it (see `_flow`)."""
    used, made = _uses(i)
    if i.cls in (b.ALU, b.ALU64):
        return after & ~made | (used if after >> i.dst & 1 else 0)
    bytes_ = _stack_bytes(i.offset, b.WIDTH[i.opcode & 0x18]) if i.cls in (b.LDX, b.ST, b.STX) else 0
    if i.cls == b.LDX:
        kept = bytes_ if i.src == 10 and after >> i.dst & 1 else 0
        return after & ~(1 << i.dst) | 1 << i.src | kept
    if i.cls in (b.ST, b.STX):
        if i.dst != 10 or i.opcode & 0xE0 == b.ATOMIC:
            return after | 1 << i.dst
        return after & ~bytes_ | (1 << i.src if i.cls == b.STX and after & bytes_ else 0)
    if i.opcode == b.JMP | b.CALL:
        return after & ~made | used & ~_ANY_NUMBER.get(i.imm, 0)
    if i.cls in (b.JMP, b.JMP32):
        return after | used if ends_loop else after
    return after & ~made


def _opcodes() -> Iterator[tuple[int, frozenset[int] | None]]:
    """Every opcode there is, with the offsets it may have where they mean something (None: any)."""
    zero = frozenset({0})
    yield b.LD_IMM64, zero
    for cls in (b.ALU, b.ALU64):
        for source in (0, 8):
            for op in (b.ADD, b.SUB, b.MUL, b.OR, b.AND, b.LSH, b.RSH, b.XOR, b.ARSH):
                yield cls | source | op, zero
            for op in (b.DIV, b.MOD):
                yield cls | source | op, frozenset({0, 1})
        yield cls | b.NEG, zero
        yield cls | b.MOV, zero
        yield cls | 8 | b.MOV, frozenset({0, 8, 16, 32} if cls == b.ALU64 else {0, 8, 16})
    yield b.ALU | b.END, zero
    yield b.ALU | 8 | b.END, zero
    yield b.ALU64 | b.END, zero
    for size in b.WIDTH:
        yield b.LDX | b.MEM | size, None
        yield b.ST | b.MEM | size, None
        yield b.STX | b.MEM | size, None
        if size != 0x18:
            yield b.LDX | b.MEMSX | size, None
    for size in (0x00, 0x18):
        yield b.STX | b.ATOMIC | size, None
    for cls in (b.JMP, b.JMP32):
        for op in (b.JEQ, b.JGT, b.JGE, b.JSET, b.JNE, b.JSGT, b.JSGE, b.JLT, b.JLE, b.JSLT, b.JSLE):
            for source in (0, 8):
                yield cls | op | source, None
        yield cls | b.JA, None
    yield b.JMP | b.CALL, zero
    yield b.JMP | b.EXIT, zero


_OPCODES = dict(_opcodes())
_ATOMICS = frozenset(
    {b.ATOMIC_ADD, b.ATOMIC_OR, b.ATOMIC_AND, b.ATOMIC_XOR}
    | {b.ATOMIC_ADD | b.FETCH, b.ATOMIC_OR | b.FETCH, b.ATOMIC_AND | b.FETCH, b.ATOMIC_XOR | b.FETCH}
    | {b.ATOMIC_XCHG, b.ATOMIC_CMPXCHG}
)


def _opcode_known(i: Instruction) -> bool:
    if i.opcode not in _OPCODES:
        return False
    offsets = _OPCODES[i.opcode]
    if offsets is not None and i.offset not in offsets:
        return False
    if i.opcode & 0xF0 == b.END and i.cls in (b.ALU, b.ALU64):
        return i.imm in (16, 32, 64)
    if i.cls == b.STX and i.opcode & 0xE0 == b.ATOMIC:
        return i.imm in _ATOMICS
    if i.opcode == b.JMP | b.CALL:
        return i.src in (0, b.PSEUDO_CALL)
    return True


def _byte_swap(value: Range, i: Instruction) -> Range:
    bits = i.imm
    low = truncate(value, bits)
    if i.cls == b.ALU and not i.opcode & 0x08:  # to little-endian, which this is
        return low
    number = low.constant
    if number is None:
        return within(0, (1 << bits) - 1)
    return constant(int.from_bytes(number.to_bytes(bits // 8, "little"), "big"))

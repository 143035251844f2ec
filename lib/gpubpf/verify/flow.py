"""Control flow and liveness, which the second gate computes before it follows any path: the successors of each instruction, and which
registers and stack bytes matter at each place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import STACK_SIZE, Instruction
from gpubpf.ebpf.helpers import HELPERS, ArgumentKind


def target_of(pc: int, i: Instruction) -> int:
    """Return the target of a jump."""
    return pc + 1 + (i.imm if i.opcode == 0x06 else i.offset)


def jumps(i: Instruction) -> bool:
    """Return whether an instruction is a jump, conditional or not."""
    return i.cls in (b.JMP, b.JMP32) and i.opcode & 0xF0 not in (b.CALL, b.EXIT)


def successors(code: Sequence[Instruction], pc: int) -> tuple[int, ...]:
    """Return the instructions that can follow `pc`. The target of a jump is last.

    A target outside the code is replaced by the end of the code. The second slot of an ld_imm64, which is never reached and may hold
    anything, can have such a target.
    """
    i, size = code[pc], len(code)
    if jumps(i):
        target = target_of(pc, i)
        target = target if 0 <= target < size else size
        return (target,) if i.opcode & 0xF0 == b.JA else (pc + 1, target)
    if i.opcode == b.JMP | b.EXIT or i.opcode == b.JMP32 | b.EXIT:
        return ()
    return (min(pc + 2, size) if i.opcode == b.LD_IMM64 else pc + 1,)


def liveness(code: Sequence[Instruction]) -> tuple[set[int], list[int], list[int]]:
    """Return the jump targets, the live registers and the registers and stack bytes that matter.

    The second and third result have a mask for each instruction. A live register may still be read. A register or stack byte matters
    if its value may decide which memory the program accesses, what it passes to a helper, or how often a loop runs (`_needs`).
    """
    size = len(code)
    after = [successors(code, pc) for pc in range(size)]
    targets = {after[pc][-1] for pc, i in enumerate(code) if jumps(i)}
    live = [0] * (size + 1)
    before: list[list[int]] = [[] for _ in range(size + 1)]
    for pc, places in enumerate(after):
        for place in places:
            before[place].append(pc)
    ending = loop_exits(after)
    for pc, places in enumerate(after):
        for head in places:
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
            used, made = _uses(code[pc])
            result = result & ~made | used
            needed = _needs(code[pc], needed, pc in ending)
            if (result, needed) != (live[pc], matters[pc]):
                live[pc], matters[pc] = result, needed
                changed = True
    return targets, live, matters


def spills(code: Sequence[Instruction]) -> int:
    """Return the stack offset below which the compiler put only spilled registers.

    The offset is a guess: the lowest stack address that the program takes. It only affects how many paths the gate follows.
    """
    low = 0
    for pc, i in enumerate(code):
        if i.opcode == b.JMP | b.CALL and i.src == 1:
            return -STACK_SIZE  # functions have stacks of their own
        if i.cls in (b.ALU, b.ALU64) and i.opcode & 0x08 and i.src == 10:
            then = code[pc + 1] if pc + 1 < len(code) else i
            if i.opcode & 0xF0 != b.MOV or then.opcode != b.ALU64 | b.ADD or then.dst != i.dst:
                return -STACK_SIZE
            low = min(low, then.imm)
        if i.cls == b.STX and i.src == 10:
            return -STACK_SIZE
    return low


def _uses(i: Instruction) -> tuple[int, int]:
    """Return the mask of the registers that an instruction reads, and the mask of the registers that it overwrites."""
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
        helper = HELPERS.get(i.imm) if i.src == 0 else None
        return (2 << (len(helper.arguments) if helper is not None else 5)) - 2, 0b111111
    return source | 1 << i.dst, 0


def loop_exits(after: Sequence[tuple[int, ...]]) -> set[int]:
    """Return the jumps that leave a loop."""
    return {place for loop in _loops(after) for place in loop if not loop.issuperset(after[place])}


def depths(code: Sequence[Instruction]) -> list[int]:
    """Return the loop depth of each instruction. At the head of an outer loop, inner loops do not count."""
    found = [0] * len(code)
    for loop in _loops([successors(code, pc) for pc in range(len(code))]):
        for place in loop:
            found[place] += 1
    return found


def _loops(after: Sequence[tuple[int, ...]]) -> Iterator[set[int]]:
    """Yield the instructions of each loop. Loops may be nested, and need not be contiguous."""
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
            yield loop
            heads = {to for place in reached - loop for to in after[place] if to in loop}
            pending.append(loop - (heads or {min(loop)}))


def _cycles(after: Sequence[tuple[int, ...]], places: set[int]) -> Iterator[set[int]]:
    """Yield the strongly connected components of `places` that have a cycle."""
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
    """Return the instructions on all paths from `head` to `last`, which jumps back to `head`."""
    loop, pending = {head, last}, [last]
    while pending:
        place = pending.pop()
        if place != head:
            pending += [one for one in before[place] if one not in loop]
            loop.update(before[place])
    return loop


def stack_bytes(at: int, size: int) -> int:
    """Return the bits of stack bytes in the masks of what matters (`liveness`), after those of the registers; 0 outside the stack."""
    return ((1 << size) - 1) << (11 + STACK_SIZE + at) if -STACK_SIZE <= at <= -size else 0


def _needs(i: Instruction, after: int, ends_loop: bool) -> int:
    """Return the mask of the registers and directly addressed stack bytes that matter before an instruction.

    `after`: the mask after the instruction (see `liveness`).
    """
    used, made = _uses(i)
    if i.cls in (b.ALU, b.ALU64):
        return after & ~made | (used if after >> i.dst & 1 else 0)
    bytes_ = stack_bytes(i.offset, b.WIDTH[i.opcode & 0x18]) if i.cls in (b.LDX, b.ST, b.STX) else 0
    if i.cls == b.LDX:
        kept = bytes_ if i.src == 10 and after >> i.dst & 1 else 0
        return after & ~(1 << i.dst) | 1 << i.src | kept
    if i.cls in (b.ST, b.STX):
        if i.dst != 10 or i.opcode & 0xE0 == b.ATOMIC:
            return after | 1 << i.dst
        return after & ~bytes_ | (1 << i.src if i.cls == b.STX and after & bytes_ else 0)
    if i.opcode == b.JMP | b.CALL:
        helper = HELPERS.get(i.imm) if i.src == 0 else None
        free = helper.registers.get(ArgumentKind.NUMBER, ()) if helper is not None else ()
        return after & ~made | used & ~sum(1 << register for register in free)
    if i.cls in (b.JMP, b.JMP32):
        return after | used if ends_loop else after
    return after & ~made


def _opcodes() -> Iterator[tuple[int, frozenset[int] | None]]:
    """Yield every valid opcode with the offsets that it allows (None: any)."""
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


def opcode_known(i: Instruction) -> bool:
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

"""Render the basic blocks of a function as a C function.

Straight-line code becomes loops over the active lanes (segments). Registers that live only inside a segment are C locals; those that
live longer are arrays in the warp's frame.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from .block import Block
from .function import SLOT, FunctionCode
from .lane_loops import MOST_TURNS, LaneLoop, lane_loops, suits
from .liveness import recomputed
from .scope import Register, Storage
from .values import Code, c_type

SPIN_COST = 16  # cost of an iteration if the loop (with atomics or ordered loads) may wait for another thread
MIN_CHECKED_TOGETHER = 6  # the fewest shared accesses in a segment that are checked all at once
_ARGUMENT = re.compile(r"R->(r_p_\w+)\[l\]")
_SHARED = re.compile(r"at_shared/\*(\w+)\+(\d+)\*/\(w, [^,]*, (\d+), \d+, CS_AT\(LINE\(-?\d+\), \d+\)\)")


# Values of the module that a function's code needs. Each is a constant of the C function, so that other code does not depend on it.
PLACES = (
    "entry_",  # the number of its first block
    "line_",  # its first line in the PTX text
    "args_",  # the bytes of a lane's argument area
    "frame_at_",  # where its frame begins in the warp's frames
    "local_at_",  # where its local memory begins in a lane's
)


@dataclass(frozen=True)
class Rendered:
    """A function in C. Only `text()` depends on the module that contains the function.

    helpers  the C functions that it calls
    body     the text between the constants of PLACES and the closing brace
    callees  the names of the PTX functions that it calls
    fields   the fields of the frame to save when the function calls itself, as (offset, bytes per lane; 0 for a bit)
    size     the size of the frame, which holds the values that live across segments, in bytes
    """

    helpers: str
    body: str
    callees: list[str]
    fields: list[tuple[int, int]]
    size: int

    def text(self, name: str, places: list[str]) -> str:
        """Return the C function `name`.

        places: C expressions for PLACES, and for the number of each callee's first block
        """
        names = [*PLACES, *map(_callee, range(len(self.callees)))]
        constants = ", ".join(f"{n} = {place}" for n, place in zip(names, places, strict=True))
        return f"{self.helpers}static int {name}(W *w) {{\nconst u32 {constants};\n{self.body}}}\n"


def render(code: FunctionCode) -> Rendered:
    """Return a function in C."""
    return _Renderer(code).rendered()


def _callee(number: int) -> str:
    return f"callee{number}_"


class _Renderer:
    def __init__(self, code: FunctionCode) -> None:
        self.code = code
        self._callees: list[str] = []
        self._fields: dict[str, int] = {}  # fields of the frame: register → width
        self._passing: set[str] = set()  # arguments that need no place in the frame
        codes = [c for b in code.blocks for c in (*b.codes, b.head) if c is not None]
        self._mentioned = Counter(name for c in codes for name in _ARGUMENT.findall(c.text))

    def rendered(self) -> Rendered:
        loops = self._lane_loops()
        in_loop = {block: loop for loop in loops for block in loop.blocks}
        lines: list[str] = []
        for block in self.code.blocks:
            loop = in_loop.get(block)
            if loop is None:
                lines.append(self._block(block))
            elif block is loop.blocks[0]:
                lines.append(self._loop(loop))
        entered = {b for loop in loops for b in loop.entries}
        starts = [b.number for b in self.code.blocks if b not in in_loop or b in entered]
        cases = " ".join(f"case {at}: goto B{at};" for at in starts)
        # Functions of a module share a file, or not; so the preprocessor keeps one of each.
        helpers = "".join(
            f"#ifndef {n}\n#define {n} {n}\n{t}\n#endif\n" for n, t in self.code.values.helpers.items()
        )
        frame, fields, size = self._frame()
        body = (
            f"{frame}struct frame *const R = (struct frame *)(w->frame + frame_at_); (void)R;\n"
            f"PROLOGUE({len(self.code.blocks)}u);\n{'u32 from_;' if loops else ''}\n"
            f"switch (pc - entry_) {{ {cases} default: __builtin_unreachable(); }}\n"
            + "\n".join(lines)
            + "\n"
        )
        return Rendered(helpers, body, self._callees, fields, size)

    def _frame(self) -> tuple[str, list[tuple[int, int]], int]:
        """Return the struct of values that live across segments, (offset, width) of its fields to save, and its size in bytes."""
        fields: list[tuple[str, int, int]] = []  # declaration, bytes per lane (0: a bit), alignment
        if not self.code.kernel:
            fields.append(("u32 ret[32]", 4, 4))
            if self.code.values.stack:
                fields.append(("u32 sp[32]", 4, 4))
        for register, width in sorted(self._fields.items()):
            fields.append(
                (f"{c_type(width)} {register}[32]" if width else f"u32 {register}", width, width or 4)
            )
        for name in self.code.names.frame:
            if name not in self.code.values.local_parameters and name not in self._passing:
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
        text = f"struct frame {{ {members} }} __attribute__((aligned(64)));\n"
        return f'{text}_Static_assert(sizeof(struct frame) == {total}, "frame");\n', table, total

    def _room(self, parameter: str) -> int:
        """Return the bytes that a lane's part of a parameter takes in the frame."""
        return max(SLOT, (self.code.names.frame[parameter].size + SLOT - 1) // SLOT * SLOT)

    def _head_joins(self, block: Block) -> bool:
        """Return whether the last lane loop of a block can also read the terminator's operands.

        It can if all lanes read the operands at the same time.
        """
        head = block.head
        if head is None or not head.text:
            return False
        return not self.code.virtual or not (head.memory or head.before or "w->time" in head.text)

    def _segments(self, block: Block) -> list[list[Code]]:
        """Split the block's straight-line code where all lanes must finish one part before the next begins."""
        found: list[list[Code]] = []
        wrote = read = closed = False
        joins = [block.head] if block.head is not None and self._head_joins(block) else []
        for code in [*block.codes, *joins]:
            if (not code.text and not code.before) or any(r in self.code.again for r in code.defs):
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

    @property
    def _formal(self) -> set[str]:
        return {w.name for w, _, _ in (*self.code.arguments, *self.code.results) if isinstance(w, Storage)}

    def _segment(self, codes: list[Code], live_after: set[Register]) -> str:
        need: set[Register] = set()
        defined: set[Register] = set()
        for code in codes:
            need |= code.uses - defined
            defined |= code.defs
        stored = sorted(defined & live_after, key=lambda r: r.name)
        again = need & self.code.again.keys()
        need -= again
        lines, inner = recomputed(self.code.again, again)
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
        # An argument that is used only in this segment does not need a place in the frame.
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

        An unrolled loop reads [%r1], [%r1+4], and so on. If the whole span is in shared memory, the first copy runs, without a check
        of each access. If not, the second copy runs and finds the faulty access.
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

    def _block(self, block: Block) -> str:
        here = block.number
        lines = [f"B{here}: __attribute__((unused));"]
        if block.number == 0:
            lines += self._prologue(block)
        if block.turn:
            lines.append(f"TURN({here});")
        if self.code.counted:
            lines.append(f"COUNT({here});")
        lines += self._pass_time(block)
        live = set(block.live_out)
        if block.head is not None and not self._head_joins(block):
            live = (live - block.head.defs) | block.head.uses
        if block.predicate is not None and block.predicate not in self.code.again:
            live.add(block.predicate)
            self._fields[block.predicate.name] = 0
        if block.kind == "return":
            live |= {w for w, _, _ in self.code.results if isinstance(w, Register)}
        parts: list[str] = []
        for codes in reversed(self._segments(block)):
            parts.append(self._segment(codes, live))
            defined: set[Register] = set()
            need: set[Register] = set()
            for code in codes:
                need |= code.uses - defined
                defined |= code.defs
            live = (live - defined) | need
        lines += reversed(parts)
        if self.code.virtual and block.reached:
            lines.append(f"TICK({block.reached});")
        lines.append(self._terminator(block))
        text = "\n".join(lines)
        if block.kind in ("call", "indirect"):
            return text.replace("@NEXT@", f"AT({block.targets[0].number})")
        return text.replace("@TARGETS@", ", ".join(str(t.number) for t in block.targets))

    def _lane_loops(self) -> list[LaneLoop]:
        if self.code.virtual or self.code.counted:
            return []
        return lane_loops(
            self.code.blocks, {b for b in self.code.blocks[1:] if suits(b, len(self._segments(b)))}
        )

    def _loop(self, loop: LaneLoop) -> str:
        """Return a loop that lanes run one after another. A lane stops at the loop's end, or after MOST_TURNS jumps back."""
        codes = [c for b in loop.blocks for c in self._lane_codes(b)]
        predicates = {b.predicate for b in loop.blocks if b.predicate is not None}
        defined: set[Register] = set().union(*(c.defs for c in codes))
        used: set[Register] = predicates.union(*(c.uses for c in codes))
        live_in: set[Register] = set().union(*(b.live_in for b in loop.entries))
        live_out = live_in.union(*(b.live_in for b in loop.exits))
        again = used & self.code.again.keys()
        stored = sorted(defined & live_out, key=lambda r: r.name)
        loaded = ((used & live_in) | set(stored)) - self.code.again.keys()
        whole, lanes = recomputed(self.code.again, again)
        for r in sorted((used | defined) - self.code.again.keys(), key=lambda r: r.name):
            if r in loaded:
                self._fields[r.name] = r.width
                lanes.append(_loaded(r))
            else:
                lanes.append(f"{c_type(r.width)} {r.name};")
        here = loop.entries[0].number
        lines = [
            f"B{b.number}: __attribute__((unused)); from_ = {b.number}; goto L{here};" for b in loop.entries
        ]
        lines += [f"L{here}: {{", *whole, *(f"u32 n_{r.name} = 0;" for r in stored if not r.width)]
        lines += ["u32 most_ = 0, to_ = CS_NO_PC, apart_ = 0;", "LANES", *lanes, "u32 turns_ = 0, pc_;"]
        if any(c.memory for c in codes):
            lines.append("w->lane = l;")
        enter = " ".join(f"case {b.number}: goto G{b.number};" for b in loop.entries[1:])
        lines += [f"switch (from_) {{ {enter} default: goto G{here}; }}"]
        inside = set(loop.blocks)
        for block in loop.blocks:
            own = self._lane_codes(block)
            constant = set().union(*(c.uses for c in own)) - set().union(*(c.defs for c in own))
            lines += [f"G{block.number}: __attribute__((unused));", *self._statements(own, constant)]
            lines.append(self._lane_branch(block, inside, f"O{here}"))
        lines.append(f"O{here}:;")
        for r in stored:
            self._fields[r.name] = r.width
            lines.append(_stored(r))
        lines.append("if (turns_ > most_) most_ = turns_;")
        lines += ["w->pcs[l] = pc_; if (to_ == CS_NO_PC) to_ = pc_; apart_ |= to_ ^ pc_;", "END"]
        lines += [f"R->{r.name} = (R->{r.name} & ~mask) | n_{r.name};" for r in stored if not r.width]
        # If control can return to the loop, it may be inside a loop that waits for another thread.
        leads_back = any(b.number <= loop.blocks[-1].number for b in loop.exits)
        cost = f"(s32)most_ * {1 + len(codes) // 64}{f' + {SPIN_COST}' if leads_back else ''}"
        lines += [
            f"if (UNLIKELY((w->budget -= {cost}) < 0)) return CS_YIELD;",
            "if (!apart_) switch (to_ - entry_) {",
        ]
        lines += [f"case {b.number}: JUMP({b.number});" for b in (*loop.exits, *loop.entries)]
        lines += ["} goto pick; }"]
        return "\n".join(lines)

    def _lane_codes(self, block: Block) -> list[Code]:
        """Return a block's code, without the registers that are computed again at each use."""
        return [c for c in block.codes if c.text and not any(r in self.code.again for r in c.defs)]

    def _lane_branch(self, block: Block, loop: set[Block], leave: str) -> str:
        """Return the end of a block in a lane loop: a lane's jumps inside the loop, or out of it.

        loop: the blocks of the loop
        leave: C that leaves the loop
        """

        def jump(target: Block) -> str:
            at = target.number
            if target not in loop:
                return f"{{ pc_ = AT({at}); goto {leave}; }}"
            if target.number > block.number:
                return f"goto G{at};"
            return f"{{ if (++turns_ >= {MOST_TURNS}) {{ pc_ = AT({at}); goto {leave}; }} goto G{at}; }}"

        if block.kind == "goto":
            return jump(block.targets[0])
        assert block.predicate is not None
        taken, fall = block.targets
        return f"if ({'!' if block.negated else ''}{block.predicate.name}) {jump(taken)} else {jump(fall)}"

    def _pass_time(self, block: Block) -> list[str]:
        """Skip the equal iterations of a loop of one block that only reads the clock, for all lanes at once.

        The code skips the iterations up to the last one, or up to the point where the warp yields, unless blocks are counted.
        """
        if self.code.counted or not (
            self.code.virtual and block.kind == "branch" and block.targets[0] is block and block.reached
        ):
            return []
        need: set[Register] = set()
        defined: set[Register] = set()
        for code in block.codes:
            need |= code.uses - defined
            defined |= code.defs
        alone = any(c.memory or c.before or c.alone or c.writes_shared or c.reads_shared for c in block.codes)
        if alone or need & defined or block.predicate not in defined or block.turn:
            return []  # an iteration depends on the previous iteration, or on other threads
        assert block.predicate is not None
        alike = ["w->time[l] == w->time[first_]"]
        load = []
        values, of_lane = recomputed(self.code.again, need & self.code.again.keys())
        if of_lane:
            return []
        for r in sorted(need - self.code.again.keys(), key=lambda r: r.name):
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
        if self.code.recursive:
            lines.append(f"w->line = LINE(0);{self._no_time} api->push(w, mask, {self.code.index});")
        inner: list[str] = []
        if self.code.values.stack and not self.code.kernel:
            inner.append("R->sp[l] = w->sp[l];")
        if not self.code.kernel:
            inner.append("R->ret[l] = w->retpc[l];")
            for where, offset, size in self.code.arguments:
                source = f"w->args + (u64)l * args_ + {offset}"
                if isinstance(where, Register) and not where.width:
                    self._fields[where.name] = 0
                    bit = f"(u32)LD(u8, {source}) << l"
                    inner.append(f"R->{where.name} = (R->{where.name} & ~(1u << l)) | {bit};")
                elif isinstance(where, Register):
                    self._fields[where.name] = where.width
                    inner.append(f"R->{where.name}[l] = LD({c_type(where.width)}, {source});")
                elif where.name in self.code.values.local_parameters:
                    at = f"local_at_ + {self.code.values.local_parameters[where.name]}u"
                    to = f"w->local + (u64)l * w->local_stride + w->lsp[l] + {at}"
                    inner.append(f"__builtin_memcpy({to}, {source}, {size});")
                else:
                    inner.append(f"__builtin_memcpy(R->{where.name}[l], {source}, {size});")
        formals = {w for w, _, _ in self.code.arguments if isinstance(w, Register)}
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
        return " w->elapsed = 0;" if self.code.virtual else ""

    def _jump(self, block: Block, target: Block) -> str:
        to = target.number
        loop = self.code.blocks[target.number : block.number + 1]
        if not loop:
            return f"JUMP({to});"
        if self.code.virtual:
            # Added code does not change where a warp yields: TICK counts, and a probe's loop is short.
            return f"BACK({to}, 0);" if any(b.reached for b in loop) else f"JUMP({to});"
        cost = 1 + sum(len(b.codes) for b in loop) // 64
        if any(b.spins for b in loop):
            cost = max(cost, SPIN_COST)
        return f"BACK({to}, {cost});"

    def _terminator(self, block: Block) -> str:
        head = ""
        if block.head is not None and block.head.text and not self._head_joins(block):
            head = self._segment([block.head], set())
        line = self.code.values.line_number(block.line)
        if block.kind == "goto":
            return self._jump(block, block.targets[0])
        if block.kind == "branch":
            return self._conditional(block)
        if block.kind == "exit":
            return "cs_exit(w, mask); goto pick;"
        if block.kind == "trap":
            where = f"w->lane = (u32)__builtin_ctz(mask); w->line = {line};{self._no_time}"
            return f"{where} api->fault(w, CS_FAULT_LAUNCH_FAILED, 0, 0, 0); goto pick;"
        if block.kind == "table":
            test = "w->budget" if self.code.virtual else "--w->budget"
            return f"{head} if (UNLIKELY({test} < 0)) return CS_YIELD; goto pick;"
        if block.kind == "return":
            lines = ["LANES w->pcs[l] = R->ret[l];"]
            if self.code.values.stack:
                lines.append("w->sp[l] = R->sp[l];")
            for result, offset, size in self.code.results:
                to = f"w->args + (u64)l * args_ + {offset}"
                if isinstance(result, Register):
                    self._fields[result.name] = result.width
                    value = f"R->{result.name}[l]" if result.width else f"R->{result.name} >> l & 1"
                    lines.append(f"ST({c_type(result.width)}, {to}, {value});")
                else:
                    lines.append(f"__builtin_memcpy({to}, R->{result.name}[l], {size});")
            lines.append("END")
            if self.code.recursive:
                lines.append(f"api->pop(w, mask, {self.code.index});")
            return "\n".join([*lines, "goto pick;"])
        resume = f"AT({block.targets[0].number})"
        if block.kind == "call":
            if block.detail not in self._callees:
                self._callees.append(block.detail)
            return f"{head} LEAVE({_callee(self._callees.index(block.detail))});"
        if block.kind == "indirect":
            return f"{head} goto pick;"
        if block.kind == "sleep":
            return f"{head} api->nanosleep(w, mask, {resume}); goto pick;"
        if block.kind == "collective":
            jump = self._jump(block, block.targets[0])
            ones = self._ones(block)
            if block.arrived == "1":
                return f"{head} {{ {ones} {block.direct} }} {jump}"
            call = f"w->line = {line};{self._no_time} if (!api->collective(w, mask, {block.detail}, {resume})) goto pick;"
            if block.arrived:
                if block.alike:
                    call = (
                        f"if (!cs_meet(w, mask, {block.detail}, {resume}, {line}, {block.alike})) goto pick;"
                    )
                wait = f"LANES {block.waits} END {call}" if block.waits else call
                call = f"{{ {ones} if (LIKELY({block.arrived})) {{ {block.direct} }} else {{ {wait} }} }}"
            return f"{head} {call} {jump}"
        if block.kind == "cluster barrier":
            return f"w->line = {line};{self._no_time} api->cluster_barrier(w, mask, {block.detail}, {resume}); goto pick;"
        if not block.detail.startswith("CS_"):
            return f"w->line = {line};{self._no_time} api->bar_sync(w, mask, {block.detail}, {resume}); goto pick;"
        return f"{head} w->line = {line};{self._no_time} api->barrier(w, mask, {block.detail}, {resume}); goto pick;"

    def _ones(self, block: Block) -> str:
        """Return C for `ones_`, the lanes in which the predicate of a vote is true; "" for another collective."""
        if block.predicate is None:
            return ""
        ones = f"R->{block.predicate.name}"
        if block.predicate in self.code.again:
            ones = f"({block.predicate.name} ? ~0u : 0u)"
        values = " ".join(recomputed(self.code.again, {block.predicate} & self.code.again.keys())[0])
        return f"{values} const u32 ones_ = {'~' if block.negated else ''}{ones};"

    def _conditional(self, block: Block) -> str:
        """Translate a conditional branch. Lanes with the lower target run first; the other lanes wait at their target."""
        assert block.predicate is not None
        taken, fall = block.targets
        if taken is fall:
            return self._jump(block, taken)
        if block.predicate in self.code.again:  # the same for all lanes
            name = block.predicate.name
            values = " ".join(recomputed(self.code.again, {block.predicate})[0])
            go = f"if ({'!' if block.negated else ''}{name}) {self._jump(block, taken)} else {self._jump(block, fall)}"
            return f"{{ {values} {go} }}"
        test = f"{'~' if block.negated else ''}R->{block.predicate.name} & mask"
        low, high = (taken, fall) if taken.number < fall.number else (fall, taken)
        high_lanes = "t_" if high is taken else "mask & ~t_"
        return (
            f"{{ const u32 t_ = {test};\n"
            f"if (t_ == mask) {self._jump(block, taken)}\n"
            f"else if (!t_) {self._jump(block, fall)}\n"
            f"else {{ SPLIT({high_lanes}, {high.number}); {self._jump(block, low)} }} }}"
        )


def _loaded(r: Register) -> str:
    """Return the declaration of a lane's register with its value in the frame. A predicate is a bit there."""
    return f"{c_type(r.width)} {r.name} = {f'R->{r.name}[l]' if r.width else f'R->{r.name} >> l & 1'};"


def _stored(r: Register) -> str:
    """Return the statement that stores a lane's register in the frame; a predicate in `n_NAME`, the bits of all lanes."""
    return f"R->{r.name}[l] = {r.name};" if r.width else f"n_{r.name} |= (u32){r.name} << l;"

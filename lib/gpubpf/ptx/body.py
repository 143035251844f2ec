"""The body of one function, rewritten: accumulators, probes, ways out, calls, the module's variables through the table."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..errors import Error
from .emit import RETURNED, accumulator, add, array, counts, guard, marked, text, widened
from .flow import LEAVING, SYSTEM_FUNCTIONS, WORK, Flow, callee, counted
from .module import (
    Address,
    Close,
    Directive,
    Function,
    Group,
    Immediate,
    Instruction,
    Label,
    Name,
    Not,
    Open,
    Operand,
    Pair,
    Statement,
    Variable,
    Vector,
)
from .source import source_lines
from .values import LAUNCH, TABLE, Placement, Refusal, map_of

if TYPE_CHECKING:
    from ..lower.fragment import Argument
    from .inject import Role, Sidecar

# A kernel with more branches to its returns than this keeps one probe for the rest of them (`shared_exits` counts those).
MAX_EXIT_COPIES = 64
# Instructions, beside branches, that are worth copying to keep the ways out of a kernel apart.
MAX_TAIL = 4

PASSED_WORK = "gpubpf_work"  # parameter: the work so far
_GONE = "%gpubpf_0gone"  # registers with a digit there: no argument is named so


class Body:
    """Rewrites the body of one function."""

    def __init__(
        self,
        sidecar: Sidecar,
        function: Function,
        exits: tuple[Placement, ...],
        entries: tuple[Placement, ...],
    ) -> None:
        self.sidecar = sidecar
        self.function = function
        self.exits = exits
        self.entries = entries
        self.name = sidecar.new_name(function.name, exits)
        self.entry = function.kind == "entry"
        self.role = None if self.entry else sidecar.role(function.name, exits)
        self.flow = Flow(function.body or (), self._may_not_return)
        self.local = {v.name for v in (*function.parameters, *function.returns)}
        self.local.update(s.name for s in self.flow.body if isinstance(s, Variable) and s.count is None)
        self.addresses = 0
        self.labels = 0
        self.shared_exits = 0
        self.before: dict[int, list[Statement]] = {}  # adds in front of an instruction
        self.retarget: dict[int, dict[str, str]] = {}  # branch or table → label → label of the copy
        self.after: dict[int, list[Statement]] = {}
        self.widen: dict[int, Variable] = {}
        self.apart: dict[int, tuple[tuple[int, ...], bool]] = {}
        self.sources = source_lines(self.flow.body)
        self.arrivals: dict[
            int, list[int | None]
        ] = {}  # a `ret` → the branches that keep it; None: control falls into it
        self.dead: set[int] = set()
        self.leaves = frozenset() if not exits else LEAVING if self.entry else frozenset({"exit"})

    def _may_not_return(self, name: str) -> bool:
        return (
            name in self.sidecar.module.functions and self.sidecar.graph.resolve(name) in self.sidecar.leaving
        )

    def rewrite(self) -> tuple[Statement, ...]:
        body = self.flow.body
        self._count()
        self._separate_exits()
        start = next((i for i, s in enumerate(body) if isinstance(s, Instruction | Label | Open)), len(body))
        out: list[Statement] = []
        for index in range(len(body) + 1):
            if index == start:
                out += self._prologue()
            if index == len(body):
                break
            if index not in self.dead:
                added = self.before.get(index, []) + self._emit(index)
                if added and out and _for_the_next(out[-1]) and isinstance(body[index], Instruction):
                    added.insert(len(added) - 1, out.pop())
                out += added
            out += self.after.get(index, [])
        if self.flow.falls_off:
            out += self._fall_off()
        head: list[Statement] = [text(f".reg .b64 {accumulator(kind)};") for kind in self._counting()]
        if self.apart:
            head.append(text(f".reg .pred {_GONE};"))
        if self.addresses:
            head.append(Variable("reg", "b64", "%gpubpf_0address", count=self.addresses))
        # Calls are emitted after the declarations of their results, whose size they decide.
        wide = {id(body[index]): declaration for index, declaration in self.widen.items()}
        return tuple(marked(head + [wide.get(id(s), s) for s in out]))

    # accumulators

    def _counting(self) -> tuple[str, ...]:
        if self.entry or self.role is not None:
            return self.sidecar.work
        return ()

    def _count(self) -> None:
        """Plan one add per block and kind in front of the block's first instruction, and one at each predicated access."""
        for block in self.flow.blocks if self._counting() else ():
            total = dict.fromkeys(WORK, 0)
            total["instructions"] = len(block.instructions)
            total["blocks"] = int(block.entered)
            for index in block.instructions:
                instruction = self.flow.body[index]
                assert isinstance(instruction, Instruction)
                for kind in counted(instruction):
                    if instruction.predicate is None:
                        total[kind] += 1
                    elif kind in self.sidecar.work:
                        self.before.setdefault(index, []).append(text(f"{guard(instruction)}{add(kind, 1)}"))
            adds = [text(add(kind, total[kind])) for kind in self.sidecar.work if total[kind]]
            first = block.instructions[0]
            self.before[first] = adds + self.before.get(first, [])

    def _prologue(self) -> list[Statement]:
        out: list[Statement] = []
        if self.apart:
            out.append(self._opaque("eq"))
        for position, kind in enumerate(self._counting()):
            if self.role is not None and self.role.leaving:
                out.append(text(f"ld.param.b64 {accumulator(kind)}, [{PASSED_WORK}+{8 * position}];"))
            else:
                out.append(text(f"mov.b64 {accumulator(kind)}, 0;"))
        return out + [self._probe(p, 0) for p in self.entries]

    # ways out

    def _separate_exits(self) -> None:
        """Plan a copy of the tail for every branch to it."""
        if not self.leaves:
            return
        body = self.flow.body
        self._leave_loops()
        sources: dict[int, dict[int, None]] = {}
        for index, targets in self.flow.targets.items():
            instruction = body[index]
            assert isinstance(instruction, Instruction)
            if index in self.apart or index in self.dead:
                continue
            source = self.flow.table(index) if instruction.opcode == "brx" else index
            for target in dict.fromkeys(targets):
                sources.setdefault(target, {})[source] = None
        copies = 0
        for label in sorted(sources):
            path = self.flow.tail(label, MAX_TAIL)
            if path is None:
                continue
            last = body[path[-1]]
            assert isinstance(last, Instruction)
            if last.opcode not in self.leaves:
                continue
            falls = self._falls_into(label)
            takers = list(sources[label])[0 if falls else 1 :]
            self.arrivals.setdefault(path[-1], []).append(None if falls else next(iter(sources[label])))
            place = next(i for i in path if self._opcode(i) in ("bra", *LEAVING))
            name = body[label]
            assert isinstance(name, Label)
            for source in takers:
                if copies == MAX_EXIT_COPIES:
                    self.shared_exits += 1
                    self.arrivals[path[-1]].append(None)
                    continue
                copies += 1
                new = self._label("exit")
                self.retarget.setdefault(source, {})[name.name] = new
                copy: list[Statement] = [Label(new)]
                for index in path:
                    copy += self.before.get(index, [])
                    if index == path[-1]:
                        copy += self._leave(index, source)
                    elif self._opcode(index) == "bra":
                        copy += counts(1)
                    else:
                        copy += self._plain(index)
                self.after.setdefault(place, []).extend(copy)

    def _leave_loops(self) -> None:
        """Plan for the branches that leave a divergent loop and the kernel at once.

        Whatever stands behind a loop, ptxas lets the lanes that are through with it wait for the others, unless it is a bare EXIT. So
        these branches stay inside the loop: the probe becomes a conditional part of its body, and the EXIT comes behind it. It costs
        three instructions per turn, hence only where it matters: to a probe that reads a clock, and in loops that synchronize, which
        would wait for the waiting lanes.
        """
        given = self.entry or (self.role is not None and self.role.leaving)  # the launch block
        if not (given and self.sidecar.block.bases):
            return
        body = self.flow.body
        timed = any(word in p.fragment.ptx for p in self.exits for word in ("%globaltimer", "%clock"))
        synchronizing = {
            self.flow.cycles[number]
            for number, block in enumerate(self.flow.blocks)
            if number in self.flow.cycles and any(self._synchronizes(i) for i in block.instructions)
        }
        gone: set[tuple[int, int]] = set()
        for number, block in enumerate(self.flow.blocks):
            index = block.instructions[-1]
            instruction = body[index]
            assert isinstance(instruction, Instruction)
            cycle = self.flow.cycles.get(number)
            if cycle is None or instruction.predicate is None or "uni" in instruction.modifiers:
                continue
            if not (timed or cycle in synchronizing):
                continue
            stays = any(self.flow.cycles.get(s) == cycle for s in block.successors)
            if instruction.opcode in self.leaves and stays:
                self.apart[index] = (index,), True
            elif instruction.opcode == "bra" and stays:
                for start, taken in ((self.flow.targets[index][0], True), (index, False)):
                    path = self.flow.tail(start, MAX_TAIL)
                    if path is None or self._opcode(path[-1]) not in self.leaves:
                        continue
                    bare = all(self._opcode(i) in ("bra", *LEAVING) for i in path)
                    if bare or self.flow.scope[start] == self.flow.scope[index]:  # names mean the same here
                        self.apart[index] = path, taken
                        gone |= {(number, s) for s in block.successors if self.flow.cycles.get(s) != cycle}
                        break
        if gone:
            self._left_out(gone)

    def _left_out(self, gone: set[tuple[int, int]]) -> None:
        """Leave out what only the edges between blocks in `gone` led to."""
        seen: set[int] = set()
        todo = [0]
        while todo:
            number = todo.pop()
            if number not in seen:
                seen.add(number)
                todo += [s for s in self.flow.blocks[number].successors if (number, s) not in gone]
        for number in self.flow.reachable - seen:
            self.dead.update(self.flow.blocks[number].instructions)

    def _synchronizes(self, index: int) -> bool:
        statement = self.flow.body[index]
        assert isinstance(statement, Instruction)
        if statement.opcode == "call":
            return callee(statement) not in SYSTEM_FUNCTIONS
        return statement.opcode in ("bar", "barrier", "shfl", "vote", "match", "redux")

    def _opaque(self, comparison: str) -> Directive:
        """Set the predicate that says that this thread is gone, to false (`eq`) or true (`ne`), with ptxas unable to tell which.

        A map's address is never 0. If ptxas knew the value it would split the loop, and its lanes would wait again.
        """
        offset = next(iter(self.sidecar.block.bases.values()))
        return text(
            f"{{ .reg .b64 %gpubpf_base; ld.param.u64 %gpubpf_base, [{LAUNCH}+{offset}];"
            f" setp.{comparison}.u64 {_GONE}, %gpubpf_base, 0; }}"
        )

    def _leave_loop(self, index: int) -> list[Statement]:
        """A branch of `_leave_loops`: around the probe, then out."""
        branch = self.flow.body[index]
        assert isinstance(branch, Instruction)
        path, taken = self.apart[index]
        stay = self._label("stay")
        negated = branch.negated != taken  # around the probe go those that stay
        around = Instruction("bra", (), (Name(stay),), branch.predicate, negated)
        alone = path == (index,)  # an `exit` with a predicate: no branch leads to it
        out: list[Statement] = [*counts(1), text(str(around))] if alone else [around]
        for step in path:
            if step != index:
                out += self.before.get(step, [])
            if step != path[-1] and self._opcode(step) == "bra":
                out += counts(1) if step != index else []
            elif step != path[-1]:
                out += self._plain(step)
        site = self._site(index)
        if not alone:
            out += counts(1)
        out += [self._probe(p, site) for p in self.exits]
        out += [self._opaque("ne"), Label(stay), text(f"@{_GONE} exit;")]
        if not taken:
            out.append(text(f"bra {branch.operands[0]};"))
        return out

    def _opcode(self, index: int) -> str:
        statement = self.flow.body[index]
        assert isinstance(statement, Instruction)
        return statement.opcode

    def _falls_into(self, label: int) -> bool:
        """Whether control can come to a label from the statement before it."""
        for index in range(label - 1, -1, -1):
            statement = self.flow.body[index]
            if index in self.apart:
                return self.apart[index][1]
            if isinstance(statement, Instruction):
                return statement.predicate is not None or statement.opcode not in (
                    "bra", "brx", "ret", "exit", "trap",
                )  # fmt: skip
            if isinstance(statement, Label) and index in self.flow.leaders:
                return True
        return True

    def _site(self, index: int) -> int:
        """A number for the way out that begins with the statement at `index`."""
        line = self.flow.body[index].line
        return self.sidecar.site(self.name, self.function.name, line, self.sources[index])

    def _leave(self, index: int, source: int | None = None) -> list[Statement]:
        """A `ret` or `exit` with what has to happen before it; `source` is the branch that alone leads to it."""
        instruction = self.flow.body[index]
        assert isinstance(instruction, Instruction)
        if instruction.opcode in self.leaves:
            if source is None and len(arrivals := self.arrivals.get(index, [])) == 1:
                source = arrivals[0]
            site = self._site(index if source is None else source)
            going = dataclasses.replace(instruction, predicate=None, negated=False)
            # It counts in front of the probe: there the thread's time is the one that it ends at.
            leave = [*counts(1), *[self._probe(p, site) for p in self.exits], text(str(going))]
            if instruction.predicate is None:
                return leave
            over = self._label("stay")
            skip = f"@{'' if instruction.negated else '!'}{instruction.predicate} bra {over};"
            return [text(skip), *leave, Label(over), *counts(1)]
        if instruction.opcode == "ret" and self.role is not None:
            return [*self._return_work(guard(instruction)), instruction]
        return [instruction]

    def _return_work(self, condition: str = "") -> list[Statement]:
        if self.role is None or not self.role.returns_work:
            return []
        result = self.function.returns[0].name if self.function.returns else RETURNED
        return [
            text(f"{condition}st.param.b64 [{result}+{self.role.work_offset + 8 * k}], {accumulator(kind)};")
            for k, kind in enumerate(self.sidecar.work)
        ]

    def _fall_off(self) -> list[Statement]:
        """What stands at the end of a body that does not end with a `ret`."""
        if self.entry:
            here = self.sources[-1] if self.sources else (0, 0)
            site = (
                self.sidecar.site(self.name, self.function.name, self.function.line, here)
                if self.exits
                else 0
            )
            return [*[self._probe(p, site) for p in self.exits], text("ret;")]
        return [*self._return_work(), text("ret;")]

    def _label(self, what: str) -> str:
        self.labels += 1
        return f"$gpubpf_{what}_{self.labels}"

    def _probe(self, placement: Placement, site: int) -> Directive:
        """The fragment, in a scope that declares and fills the registers it reads."""
        lines = ["{"]
        for argument in placement.fragment.arguments:
            lines.append(f".reg .{argument.type} {argument.register};")
            lines.append(self._fill(argument, placement, site))
        lines += [placement.fragment.ptx.strip(), "}"]
        return text("\n".join(lines))

    def _fill(self, argument: Argument, placement: Placement, site: int) -> str:
        block = self.sidecar.block
        register, bits = argument.register, int(argument.type[1:])
        if argument.kind == "context":
            if argument.field == "site":
                return f"mov.b{bits} {register}, {site};"
            if argument.field == "work":
                if placement.accumulate is None or placement.point != "exit":
                    return f"mov.b{bits} {register}, 0;"
                source = accumulator(placement.accumulate)
                return (
                    f"mov.b64 {register}, {source};"
                    if bits == 64
                    else f"cvt.u{bits}.u64 {register}, {source};"
                )
            raise Error(
                f"a device program asks for the context field {argument.field!r}, which is not known here"
            )
        width = 8
        if argument.kind == "launch":
            offset = block.launch_id
        elif argument.kind == "replay":
            offset = block.replay
        elif argument.kind == "map_base":
            offset = block.bases[map_of(argument)]
        elif argument.kind == "map_capacity":
            offset = block.capacities[map_of(argument)]
        elif argument.kind == "pid_tgid" and block.pid_tgid is not None:
            offset = block.pid_tgid
        elif argument.kind == "param":
            offset = block.params[map_of(argument)][0] + argument.offset
            width = argument.width
        else:
            raise Error(f"a device program asks for {argument.kind!r}, which is not known here")
        # a narrow value is zero-extended into a wider register
        return f"ld.param.u{8 * min(width, bits // 8)} {register}, [{LAUNCH}+{offset}];"

    # statements

    def _emit(self, index: int) -> list[Statement]:
        statement = self.flow.body[index]
        if isinstance(statement, Directive) and index in self.retarget:
            listed = statement.text
            moved = self.retarget[index]
            if moved:
                listed = f".branchtargets {', '.join(moved.get(n, n) for n in statement.names)};"
            return [Directive(statement.name, listed)]
        if index in self.apart:
            return self._leave_loop(index)
        if not isinstance(statement, Instruction):
            return [statement]
        if statement.opcode in LEAVING:
            return self._leave(index)
        if statement.opcode == "bra" and index in self.retarget:
            target = statement.operands[0]
            assert isinstance(target, Name)
            return [dataclasses.replace(statement, operands=(Name(self.retarget[index][target.name]),))]
        if statement.opcode == "call":
            return self._call(index, statement)
        return self._plain(index)

    def _plain(self, index: int) -> list[Statement]:
        """An instruction with the module's variables reached through the table."""
        instruction = self.flow.body[index]
        assert isinstance(instruction, Instruction)
        loads: list[Statement] = []
        operands = tuple(self._operand(o, loads) for o in instruction.operands)
        return [
            *loads,
            dataclasses.replace(instruction, modifiers=_modifiers(instruction), operands=operands),
        ]

    def _operand(self, operand: Operand, loads: list[Statement]) -> Operand:
        match operand:
            case Name():
                if not self._aliased(operand.name):
                    return operand
                return Name(self._load(operand.name, loads, operand.offset))
            case Address():
                coordinates = tuple(self._operand(o, loads) for o in operand.coordinates)
                base = operand.base
                if base is not None and self._aliased(base):
                    base = self._load(base, loads)
                return dataclasses.replace(operand, base=base, coordinates=coordinates)
            case Vector():
                return Vector(tuple(self._operand(o, loads) for o in operand.items))
            case Group():
                return Group(tuple(self._operand(o, loads) for o in operand.items))
            case Pair():
                return Pair(self._operand(operand.first, loads), self._operand(operand.second, loads))
            case Not() | Immediate():
                return operand

    def _aliased(self, name: str) -> bool:
        variable = self.sidecar.module.variables.get(name)
        if variable is None or name in self.local:
            return False
        if variable.space not in ("global", "const"):
            self.sidecar.shared.add(name)
            return False
        return True

    def _load(self, name: str, loads: list[Statement], offset: int = 0) -> str:
        """A register with the variable's address. Read at each use: the table lies in the constant bank."""
        register = f"%gpubpf_0address{self.addresses}"
        self.addresses += 1
        loads.append(text(f"ld.const.b64 {register}, [{TABLE}+{self.sidecar.slot(name)}];"))
        if offset:
            loads.append(text(f"add.s64 {register}, {register}, {offset};"))
        return register

    # calls

    def _call(self, index: int, call: Instruction) -> list[Statement]:
        name = callee(call)
        assert name is not None
        role = self.sidecar.role(name, self.exits)
        if role is None:
            return [call]
        at = next(i for i, o in enumerate(call.operands) if isinstance(o, Name))
        results = next((o.items for o in call.operands[:at] if isinstance(o, Group)), ())
        arguments = next((o.items for o in call.operands[at + 1 :] if isinstance(o, Group)), ())
        condition = guard(call)
        kinds = len(self.sidecar.work)
        setup: list[Statement] = []
        after: list[Statement] = []
        if role.leaving:
            arguments, setup = self._hidden_arguments(arguments)
        if role.returns_work:
            result, declared, copied = self._result(index, name, results, role, condition)
            setup = declared + setup
            for k, kind in enumerate(self.sidecar.work):
                slot = f"[{result}+{role.work_offset + 8 * k}]"
                returned = f"%gpubpf_0returned{k}"
                after.append(text(f"ld.param.b64 {returned}, {slot};"))  # ptxas takes no predicate here
                if role.leaving:  # it was given the work so far
                    after.append(text(f"{condition}mov.b64 {accumulator(kind)}, {returned};"))
                else:
                    after.append(
                        text(f"{condition}add.s64 {accumulator(kind)}, {accumulator(kind)}, {returned};")
                    )
            setup.insert(0, text(f".reg .b64 %gpubpf_0returned<{kinds}>;"))
            after += copied
            results = (Name(result),)
        operands: tuple[Operand, ...] = (Group(results),) if results else ()
        operands += (Name(self.sidecar.new_name(name, self.exits)),)
        operands += (Group(arguments),) if arguments else ()
        return [Open(), *setup, dataclasses.replace(call, operands=operands), *after, Close()]

    def _hidden_arguments(
        self, arguments: tuple[Operand, ...]
    ) -> tuple[tuple[Operand, ...], list[Statement]]:
        """The arguments with the work so far and the launch block behind them, and how these two are filled."""
        setup: list[Statement] = []
        if self.sidecar.work:
            setup.append(array("gpubpf_passed_work", 8 * len(self.sidecar.work)))
            for k, kind in enumerate(self.sidecar.work):
                setup.append(text(f"st.param.b64 [gpubpf_passed_work+{8 * k}], {accumulator(kind)};"))
            arguments += (Name("gpubpf_passed_work"),)
        setup.append(array("gpubpf_passed_launch", self.sidecar.block.size))
        setup.append(text(".reg .b64 %gpubpf_word;"))
        for offset in range(0, self.sidecar.block.size, 8):
            setup.append(text(f"ld.param.b64 %gpubpf_word, [{LAUNCH}+{offset}];"))
            setup.append(text(f"st.param.b64 [gpubpf_passed_launch+{offset}], %gpubpf_word;"))
        return (*arguments, Name("gpubpf_passed_launch")), setup

    def _result(
        self, index: int, name: str, results: tuple[Operand, ...], role: Role, condition: str
    ) -> tuple[str, list[Statement], list[Statement]]:
        """Where the widened result of a call goes: its name, its declaration if it is ours, and how the original gets its part."""
        function = self.sidecar.module.functions[self.sidecar.graph.resolve(name)]
        kinds = len(self.sidecar.work)
        original = function.returns[0] if function.returns else None
        given = results[0] if results else None
        if original is not None and isinstance(given, Name):
            declared = self.flow.declaration(index, given.name)
            statement = self.flow.body[declared] if declared is not None else None
            if declared is not None and isinstance(statement, Variable) and statement.space == "param":
                self.widen[declared] = widened(statement, role.work_offset, kinds)
                return given.name, [], []
        mine = dataclasses.replace(widened(original, role.work_offset, kinds), name="gpubpf_result")
        copied: list[Statement] = []
        if original is not None and isinstance(given, Name) and given.name != "_":
            if condition:
                raise Refusal(f"a predicated call of {name} that returns in a register")
            copied.append(text(f"ld.param.{original.type} {given.name}, [gpubpf_result];"))
        return "gpubpf_result", [mine], copied


def _for_the_next(statement: Statement) -> bool:
    """Whether this is a pragma about the very next instruction (PTX ISA, "used_bytes_mask"), always a load."""
    return (
        isinstance(statement, Directive)
        and "used_bytes_mask" in statement.text
        and statement.name == "pragma"
    )


def _modifiers(instruction: Instruction) -> tuple[str, ...]:
    """State spaces as they are where no `.const` variable is left: the originals are reached in global memory.

    Constants do not change while a kernel runs, hence `.nc`, unless the load says something else about caching.
    """
    modifiers = instruction.modifiers
    if "const" not in modifiers:
        return modifiers
    if instruction.opcode in ("ld", "cvta"):
        at = modifiers.index("const")
        plain = instruction.opcode == "ld" and at == 0
        return (*modifiers[:at], "global", *(("nc",) if plain else ()), *modifiers[at + 1 :])
    return modifiers

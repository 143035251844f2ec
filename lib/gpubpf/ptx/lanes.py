"""Determine, before a kernel runs, what is known about the addresses that the lanes of a warp access together.

    lanes = Lanes(function, module.variables)
    found = lanes.address(17, access.address)       # an address in the instruction at statement 17
    found.known, found.needs, found.reason

An address is U + F. F is a function of the thread's index and of numbers that are the same in the whole launch (`lane_terms`). U is
any number that is the same in all lanes that execute the instruction together. F need not be affine: Triton's addresses are bit fields
of the index.

If `needs` is empty, the form U + F is proven: for any two threads of a warp, whatever path they took. U may change in a loop in which
all lanes stay together, from the first turn to the last: then it is the same in all lanes in each turn. Otherwise the form holds under
these conditions, which a single comparison at run time checks:

    turn    lanes that execute the instruction together are in the same iteration of a loop
    path    the lanes took the same path to a value; each path has its own U
    wrap    U + F does not wrap around between two lanes when a narrow index (32 bits) is extended to a 64-bit address
    memory  lanes that load from the same address load the same value

The value of a register is what all definitions that reach an instruction have in common. With a single definition, it therefore does
not matter when each lane executed it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from gpubpf.record import Record, replace

from . import lane_terms as terms
from .flow import Flow, find_names
from .lane_terms import Sum
from .module import Address, Function, Immediate, Name, Not, Operand, PtxInstruction, Variable, Vector
from .opcodes import LEAVING, facts, is_of_parameters

ZERO: Sum = terms.number(0)
NOTHING: frozenset[str] = frozenset()
MOST_BLOCKS = 1500  # in a larger function, registers with several definitions are unknown
_ROUNDS = 64  # evaluations of an instruction before its result is given up
_INTEGER = re.compile(r"([usb])(8|16|32|64)")
_SIZES = tuple(f"{name}.{axis}" for name in ("ntid", "nctaid") for axis in "xyz")
_UNIFORM = tuple(f"%ctaid.{axis}" for axis in "xyz")
_RUNNING = (
    "%smid",
    "%nsmid",
    "%warpid",
    "%nwarpid",
    "%gridid",
    "%cluster",
    "%nclusterid",
    "%dynamic",
    "%total",
    "%aggr",
)
# Instructions that compute only with registers, besides those that `opcodes` lists as simple.
_COMPUTING = frozenset(
    "bfind bmsk brev clz cnot copysign cos ex2 lg2 mad24 mul24 prmt rcp rsqrt sad sin slct sqrt szext tanh testp".split()
)
# Why nothing is known about a value, as reports print it.
REASONS = {
    "data": "depends on loaded data",
    "path": "its distance between lanes depends on the path",
    "turns": "lanes advance by different distances in a loop",
    "mixed": "mixes the thread's index with a value that varies, by other operations than sums",
    "call": "an argument or a result of a function",
    "lanes": "comes from an atomic, a shuffle, or another exchange between lanes",
    "local": "depends on a thread's own memory",
    "other": "an instruction that the analysis does not follow",
    "large": "the function is too large, or the sum too long",
}


class Lanes:
    """What is known about the registers of one function."""

    def __init__(self, function: Function, variables: Mapping[str, Variable]) -> None:
        """Analyse a function. Raises PtxError.

        variables: the variables of the module, by name
        """
        self._function = function
        self._module = variables
        self._flow = Flow(function.body or ())
        self._paths = Paths(self._flow)
        self._definitions: dict[int | str, list[int]] = {}
        self._users: dict[int | str, list[int]] = {}
        self._writes: dict[int, tuple[str, ...]] = {}
        for index, instruction in self._flow.instructions():
            self._writes[index] = tuple(self._written(index, instruction))
            for name in self._writes[index]:
                self._definitions.setdefault(self._key(index, name), []).append(index)
            read = [*find_names(instruction.operands)]
            read += [instruction.predicate] if instruction.predicate else []
            for name in dict.fromkeys(read):
                self._users.setdefault(self._key(index, name), []).append(index)
        self._reaching = self._reach()
        # At first, lanes are assumed to stay together everywhere. What shows to be wrong is assumed no more, until nothing is.
        # split: branches at which lanes that are in the same turn may diverge; parting: instructions after which lanes may no
        # longer be together.
        self._split: frozenset[int] = frozenset()
        self._parting: frozenset[int] = frozenset()
        while True:
            self._results: dict[int, Known] = {}
            self._solve()
            found = self._split.union(self._divergent()), self._parting.union(self._parts())
            if found == (self._split, self._parting):
                break
            self._split, self._parting = found

    def address(self, index: int, address: Address) -> Known:
        """Return what is known about an address in the instruction at statement `index`."""
        if address.index is not None or address.coordinates:
            return _unknown("other")
        base = self.operand(index, Name(address.base)) if address.base is not None else Known(ZERO, True)
        base = base or _unknown("other")
        return base if base.reason else _shifted(base, address.offset, self._width(index, address.base))

    def operand(self, index: int, operand: Operand) -> Known | None:
        """Return what is known about an operand of the instruction at statement `index`; None if no definition is known yet."""
        if isinstance(operand, Immediate):
            return Known(ZERO if operand.is_float else terms.number(operand.integer), not operand.is_float, 0)
        if isinstance(operand, Not):
            found = self.operand(index, operand.operand)
            if found is None or found.reason or not found.exact:
                return found
            return replace(found, sum=terms.add(terms.number(1), terms.scale(found.sum, -1)))
        if not isinstance(operand, Name):
            return _unknown("other")
        return self._named(index, operand)

    def definitions(self, index: int, name: str) -> tuple[int, ...] | None:
        """Return the instructions that may have written a register that the instruction at `index` reads; None for other names."""
        at = self._flow.declaration(index, name)
        declared = self._flow.body[at] if at is not None else None
        if not isinstance(declared, Variable) or declared.space != "reg" or declared.vector != 1:
            return None
        key = self._key(index, name)
        return self._reaching.get((index, key), tuple(self._definitions.get(key, ())))

    def is_same_register(self, index: int, name: str, other: int, of: str) -> bool:
        """Return whether `name` at statement `index` is the register that `of` is at statement `other`."""
        return self._key(index, name) == self._key(other, of)

    def _named(self, index: int, operand: Name) -> Known | None:
        name = operand.name
        at = self._flow.declaration(index, name)
        declared = self._flow.body[at] if at is not None else None
        if isinstance(declared, Variable) and declared.space == "reg":
            return (
                self._register(index, self._key(index, name)) if declared.vector == 1 else _unknown("other")
            )
        variable = declared if isinstance(declared, Variable) else self._module.get(name)
        if variable is not None or any(p.name == name for p in self._function.parameters):
            align = variable.alignment if variable is not None else 1
            return Known(ZERO, zeros=min(terms.trailing(align), terms.trailing(operand.offset)))
        if name.startswith("%tid.") and name[5:] in "xyz":
            return Known(terms.atom(("tid", "xyz".index(name[5:]))), True)
        if name == "%laneid":
            return Known(terms.atom(("lane",)), True)
        if name[1:] in _SIZES:
            return Known(terms.atom(("size", name[1:])), True)
        if name == "WARP_SZ":
            return Known(terms.number(32), True)
        if name in _UNIFORM:
            return Known(ZERO)
        return Known(ZERO, needs=frozenset({"turn"})) if name.startswith(_RUNNING) else _unknown("other")

    def _key(self, index: int, name: str) -> int | str:
        """Return a key for the register that a name refers to at a statement. Registers of different scopes may have the same name."""
        whole = name.partition(".")[0]
        at = self._flow.declaration(index, whole)
        return name if at is None else f"{at} {whole}"

    def _written(self, index: int, instruction: PtxInstruction) -> Iterator[str]:
        """Yield the registers that an instruction may write."""
        if instruction.opcode in ("bar", "barrier") and "red" not in instruction.modifiers:
            return
        if facts(instruction).control in ("branch", "table", "leave"):
            return
        known = facts(instruction)
        every = known.result == "any" or not known.is_known or known.control == "call"
        for operand in instruction.operands if every else instruction.operands[:1]:
            if isinstance(operand, Address):
                continue
            for name in find_names((operand,)):
                at = self._flow.declaration(index, name.partition(".")[0])
                declared = self._flow.body[at] if at is not None else None
                if isinstance(declared, Variable) and declared.space == "reg":
                    yield name.partition(".")[0]

    def _width(self, index: int, name: str | None) -> int:
        """Return the bits of a register; 64 for a variable."""
        at = self._flow.declaration(index, name) if name is not None else None
        declared = self._flow.body[at] if at is not None else None
        found = (
            _INTEGER.fullmatch(declared.type)
            if isinstance(declared, Variable) and declared.space == "reg"
            else None
        )
        return int(found[2]) if found else 64

    # --- fixpoint ---

    def _register(self, index: int, key: int | str) -> Known | None:
        """Return what all definitions of a register that reach a statement have in common; None if no definition is known yet."""
        indices: Sequence[int] = self._definitions.get(key, ())
        if (index, key) in self._reaching:
            indices = self._reaching[index, key]
        found = [self._results[i] for i in indices if i in self._results]
        if not found:
            return None
        if unknown := next((one for one in found if one.reason), None):
            return unknown
        conditional = any(self._flow.instruction(i).predicate is not None for i in indices)
        if len({(one.sum, one.exact) for one in found}) == 1 and found[0].exact and not conditional:
            return replace(found[0], needs=NOTHING.union(*(one.needs for one in found)))
        if len(indices) == 1 and not conditional:
            return found[0]
        lanes = [_relative(one) for one in found]
        if len({one.sum for one in lanes}) > 1:
            return _unknown("turns" if self._paths.cyclic(indices) else "path")
        together = self._paths.same(indices, index, self._split) and not self._by_lane(indices)
        needs = NOTHING.union(*(one.needs for one in lanes))
        if not together:
            needs |= {"path"}
        elif self._function.kind != "entry" or not self._paths.together(index, self._parting):
            needs |= {"turn"}
        return Known(lanes[0].sum, False, min(one.zeros for one in lanes), needs)

    def _reach(self) -> dict[tuple[int, int | str], tuple[int, ...]]:
        """Return (instruction, register) → the definitions that reach the instruction, for registers with several definitions."""
        many = {key: indices for key, indices in self._definitions.items() if len(indices) > 1}
        bit: dict[tuple[int | str, int], int] = {}
        all_of: dict[int | str, int] = {}
        for key, indices in many.items():
            for index in indices:
                bit[key, index] = 1 << len(bit)
                all_of[key] = all_of.get(key, 0) | bit[key, index]
        reads: dict[int, list[int | str]] = {}
        for key in many:
            for index in self._users.get(key, ()):
                reads.setdefault(index, []).append(key)
        found: dict[tuple[int, int | str], tuple[int, ...]] = {}

        def through(block: int, reaching: int, note: bool) -> int:
            for index in self._flow.blocks[block].instructions:
                for key in reads.get(index, ()) if note else ():
                    found[index, key] = tuple(i for i in many[key] if reaching & bit[key, i])
                for name in self._writes[index]:
                    key = self._key(index, name)
                    if key in many:
                        kept = self._flow.instruction(index).predicate is not None
                        reaching = (reaching if kept else reaching & ~all_of[key]) | bit[key, index]
            return reaching

        count = len(self._flow.blocks)
        before = [0] * count
        todo = dict.fromkeys(range(count)) if many else {}
        while todo:
            block = next(iter(todo))
            del todo[block]
            after = through(block, before[block], note=False)
            for successor in self._flow.blocks[block].successors:
                if after & ~before[successor]:
                    before[successor] |= after
                    todo[successor] = None
        for block in range(count) if many else ():
            through(block, before[block], note=True)
        return found

    def _by_lane(self, indices: Sequence[int]) -> bool:
        """Return whether one of these instructions has a predicate that differs between lanes."""
        return any(not self._is_uniform_branch(i) for i in indices)

    def _is_uniform_branch(self, index: int) -> bool:
        predicate = self._flow.instruction(index).predicate
        if predicate is None:
            return True
        found = self._named(index, Name(predicate))
        return found is None or (not found.reason and found.is_uniform)

    def _divergent(self) -> Iterator[int]:
        """Yield the branches at which lanes may diverge."""
        for index, instruction in self._flow.instructions():
            if not facts(instruction).parts:
                if facts(instruction).control == "table":
                    yield index
            elif instruction.predicate is not None:
                found = self._named(index, Name(instruction.predicate))
                if found is None or found.reason or not found.is_uniform:
                    yield index

    def _parts(self) -> Iterator[int]:
        """Yield the instructions after which lanes that were together may no longer be: at other places, or in other turns of a loop.

        In a called function, lanes may take paths of different lengths.
        """
        for index, instruction in self._flow.instructions():
            control = facts(instruction).control
            if control in ("call", "table"):
                yield index
            elif control in ("branch", "leave") and instruction.predicate is not None:
                found = self._named(index, Name(instruction.predicate))
                if found is None or found.reason or found.needs or not found.is_uniform:
                    yield index

    def _solve(self) -> None:
        """Evaluate each instruction until nothing changes. What is known about a result only ever decreases."""
        writers = [index for index, _ in self._flow.instructions() if self._writes[index]]
        todo = dict.fromkeys(writers)
        rounds: dict[int, int] = {}
        while todo:
            index = next(iter(todo))
            del todo[index]
            result = self._evaluate(index)
            if result is not None and result != self._results.get(index):
                rounds[index] = rounds.get(index, 0) + 1
                if rounds[index] > _ROUNDS or terms.size(result.sum) > terms.MOST_SIZE:
                    result = _unknown("large")
                self._note(index, result, todo)
            if not todo:  # the remaining instructions read registers that nothing writes
                for left in writers:
                    if left not in self._results:
                        self._note(left, _unknown("other"), todo)

    def _note(self, index: int, result: Known, todo: dict[int, None]) -> None:
        """Keep an instruction's result. If it has changed, add the instructions that read it to `todo`."""
        if result != self._results.get(index):
            self._results[index] = result
            for name in self._writes[index]:
                todo.update(dict.fromkeys(self._users.get(self._key(index, name), ())))

    # --- instructions ---

    def _evaluate(self, index: int) -> Known | None:
        """Return what is known about an instruction's result; None while nothing is known about an operand."""
        instruction = self._flow.instruction(index)
        known = facts(instruction)
        if len(instruction.operands) < 2 or known.control == "call":
            return _unknown("call" if known.control == "call" else "other")
        if instruction.opcode in ("ld", "ldu"):
            return self._load(index, instruction)
        if instruction.opcode == "vote":
            return Known(ZERO, needs=frozenset({"turn"}))
        if known.waits or "atomics" in known.counts or instruction.opcode == "activemask":
            return _unknown("lanes")
        operands = instruction.operands[1:]
        if isinstance(operands[0], Vector):
            operands = (*operands[0].items, *operands[1:])
        if any(isinstance(o, Address) for o in operands):
            return _unknown("other")
        inputs: list[Known] = []
        for operand in operands:
            found = self.operand(index, operand)
            if found is None:
                return None
            inputs.append(found)
        if unknown := next((one for one in inputs if one.reason), None):
            return unknown
        if not isinstance(instruction.operands[0], Name):
            return _other(inputs)
        return result_of(instruction, inputs)

    def _load(self, index: int, instruction: PtxInstruction) -> Known | None:
        address = instruction.operands[1]
        if not isinstance(address, Address):
            return _unknown("other")
        parameter = next((p for p in self._function.parameters if p.name == address.base), None)
        if is_of_parameters(instruction):
            if self._function.kind != "entry" or parameter is None:
                return _unknown("call")
            found = _INTEGER.fullmatch(instruction.modifiers[-1])
            single = isinstance(instruction.operands[0], Name) and address.index is None
            target = instruction.operands[0]
            if single and found and isinstance(target, Name):
                bits = int(found[2])
                if found[1] == "u" or self._width(index, target.name) == bits:
                    return Known(terms.atom(("param", parameter.name, address.offset, bits)), True)
            return Known(ZERO) if address.index is None else _unknown("call")
        if "local" in instruction.modifiers:
            return _unknown("local")
        known = self.operand(index, Name(address.base)) if address.base is not None else Known(ZERO, True)
        if known is None or known.reason:
            return known
        if not known.is_uniform:
            return _unknown("data")
        constant = {"const", "nc"} & {*instruction.modifiers}  # does not change while the kernel runs
        return Known(ZERO, needs=known.needs if constant else known.needs | {"memory"})


class Known(Record):
    """What is known about a value U + F in the lanes of a warp (see the module's docstring).

    sum     F; if `exact`, the whole value
    exact   whether U is 0, so that the value is known
    zeros   how many zero bits U ends with, at least
    needs   the conditions: turn, path, wrap, memory
    reason  why nothing is known, a key of REASONS; "" if something is known
    """

    sum: Sum
    exact: bool = False
    zeros: int = 0
    needs: frozenset[str] = NOTHING
    reason: str = ""

    @property
    def is_uniform(self) -> bool:
        """Whether the value is the same in all lanes."""
        return not any(terms.of_lanes(of) for of, _ in self.sum[1])

    @property
    def shape(self) -> str:
        """How the value differs between the lanes of a warp: "same", "affine" in the thread's index, or "other"."""
        plain = {("tid", 0), ("tid", 1), ("tid", 2), ("lane",)}

        def affine(of: terms.Atom) -> bool:
            if of[0] == "*":
                return sum(terms.of_lanes(part) for part in of[1:]) == 1 and all(
                    part in plain for part in of[1:] if terms.of_lanes(part)
                )
            return of in plain

        lanes = [of for of, _ in self.sum[1] if terms.of_lanes(of)]
        return "same" if not lanes else "affine" if all(map(affine, lanes)) else "other"


class Paths:
    """Which blocks of a function only some lanes of a warp execute."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._blocks = flow.blocks
        self._at = {index: n for n, block in enumerate(flow.blocks) for index in block.instructions}
        self._found_before: dict[int, frozenset[int]] = {}

    def cyclic(self, indices: Sequence[int]) -> bool:
        """Return whether one of these instructions is in a loop."""
        return any(self._at[index] in self._flow.cycles for index in indices)

    def same(self, indices: Sequence[int], user: int, divergent: Collection[int]) -> bool:
        """Return whether the same lanes execute all of some instructions. Only the lanes that also execute `user` count.

        Lanes that leave a loop or the kernel do not count either.

        indices: the instructions, which write a register
        user: the instruction that reads the register
        divergent: the branches at which lanes diverge
        """
        if not divergent:
            return True
        if len(self._blocks) > MOST_BLOCKS:
            return False
        splitting = {self._at[index] for index in divergent}

        def edges(index: int) -> frozenset[tuple[int, int]]:
            at = self._at[index]
            return frozenset(e for e in self._edges[at] if e[0] in splitting and not self._leaves(*e, at))

        found = {edges(index) for index in indices}
        mine = edges(user)
        return len(found) == 1 or all(of <= mine for of in found)

    def together(self, user: int, parting: Collection[int]) -> bool:
        """Return whether all lanes that execute an instruction took the same path to it, and execute it equally often.

        user: the instruction
        parting: the instructions after which lanes may no longer be together
        """
        if not parting:
            return True
        if len(self._blocks) > MOST_BLOCKS:
            return False
        at = self._at[user]
        loop, before = self._flow.cycles.get(at), self._before(at)
        for index in parting:
            block = self._at[index]
            if loop is not None and self._flow.cycles.get(block) == loop:
                return False  # lanes may be in different turns, or leave the loop earlier than others
            if block == at:
                if index < user:
                    return False  # a call: only the last instruction of a block branches
                continue
            ways = sum(s == at or s in before for s in self._blocks[block].successors)
            if ways > 1 or (ways and facts(self._flow.instruction(index)).control == "call"):
                return False
        return True

    def _before(self, block: int) -> frozenset[int]:
        """Return the blocks from which a path leads to a block."""
        if block not in self._found_before:
            found: set[int] = set()
            todo = list(self._predecessors[block])
            while todo:
                one = todo.pop()
                if one not in found:
                    found.add(one)
                    todo += self._predecessors[one]
            self._found_before[block] = frozenset(found)
        return self._found_before[block]

    @functools.cached_property
    def _predecessors(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self._blocks]
        for number, block in enumerate(self._blocks):
            for successor in block.successors:
                found[successor].append(number)
        return found

    def _leaves(self, branch: int, taken: int, block: int) -> bool:
        """Return whether lanes that do not take an edge leave the kernel, or leave a loop that contains the edge and `block`.

        The edge leads from block `branch` to block `taken`.
        """
        cycles = self._flow.cycles
        others = [s for s in self._blocks[branch].successors if s != taken]
        loop = cycles.get(branch)
        if (
            loop is not None
            and cycles.get(block) == loop
            and all(cycles.get(other) != loop for other in others)
        ):
            return True
        if self._last(branch).opcode in LEAVING:
            return True
        return all(
            not self._blocks[other].successors
            and all(
                facts(self._flow.instruction(i)).control == "leave" for i in self._blocks[other].instructions
            )
            for other in others
        )

    def _last(self, block: int) -> PtxInstruction:
        return self._flow.instruction(self._blocks[block].instructions[-1])

    @functools.cached_property
    def _edges(self) -> dict[int, frozenset[tuple[int, int]]]:
        """Return the edges that decide whether a block runs (control dependence), directly or indirectly, by block."""
        count = len(self._blocks)
        everything = (1 << (count + 1)) - 1
        after = [everything] * count + [
            1 << count
        ]  # the blocks that are on every path from a block to the end, including the block (post-dominators)
        follows = []
        for block in range(count):
            last = self._last(block)
            ends = not self._blocks[block].successors or last.opcode in LEAVING or last.opcode == "trap"
            follows.append([*self._blocks[block].successors, *([count] if ends else [])])
        changed = True
        while changed:
            changed = False
            for block in range(count - 1, -1, -1):
                common = everything
                for successor in follows[block]:
                    common &= after[successor]
                common |= 1 << block
                if common != after[block]:
                    after[block], changed = common, True
        direct: list[set[tuple[int, int]]] = [set() for _ in range(count)]
        for branch in range(count):
            if len(follows[branch]) < 2:
                continue
            for successor in follows[branch]:
                depends = after[successor] & ~(after[branch] & ~(1 << branch)) & ~(1 << count)
                while depends:
                    block = (depends & -depends).bit_length() - 1
                    depends &= depends - 1
                    direct[block].add((branch, successor))
        found: dict[int, frozenset[tuple[int, int]]] = {}
        for block in range(count):
            seen: set[tuple[int, int]] = set()
            todo = list(direct[block])
            while todo:
                edge = todo.pop()
                if edge not in seen:
                    seen.add(edge)
                    todo += direct[edge[0]]
            found[block] = frozenset(seen)
        return found


# --- the result of an instruction ---


def result_of(instruction: PtxInstruction, inputs: Sequence[Known]) -> Known:
    """Return what is known about the result of an instruction that computes with registers."""
    opcode, modifiers = instruction.opcode, instruction.modifiers
    found = _known_result(opcode, modifiers, list(inputs))
    if found is not None:
        return found
    known = facts(instruction)
    return _other(inputs) if known.is_simple or opcode in _COMPUTING else _unknown("other")


def _known_result(opcode: str, modifiers: tuple[str, ...], inputs: list[Known]) -> Known | None:
    """Return the result of an operation that the analysis follows; None for other operations."""
    if opcode == "setp":
        return _comparison(modifiers, inputs)
    kinds = [found for m in modifiers if (found := _INTEGER.fullmatch(m))]
    if (opcode == "mov" and modifiers[-1:] == ("pred",)) or (
        opcode in ("and", "or", "xor") and modifiers == ("pred",)
    ):
        return inputs[0] if opcode == "mov" else _bitwise(opcode, inputs, 1)
    if {"cc", "sat", "hi"} & {*modifiers}:
        return None
    if opcode == "cvta":
        if "local" in modifiers:
            return _unknown("local")
        # The window of another space begins at the same address in all lanes.
        return inputs[0] if "global" in modifiers else replace(_relative(inputs[0]), zeros=0)
    if opcode == "mov" and len(inputs) == 1:
        return inputs[0]
    if not kinds or len(kinds) != len(
        [m for m in modifiers if re.fullmatch(r"(?:[usb]|b?f|tf)\d+(?:x2)?", m)]
    ):
        return None
    sign, width = kinds[-1][1] == "s", int(kinds[-1][2])
    if opcode == "mov":
        return _packed(inputs, width)
    if opcode == "cvt":
        if len(kinds) != 2 or set(modifiers) - {kinds[0][0], kinds[1][0]}:
            return None
        narrow = _wrapped(inputs[0], width)
        return _wrapped(_extended(narrow, width, sign), int(kinds[0][2]))
    if opcode in ("add", "sub"):
        return _wrapped(_sum(inputs[0], inputs[1], 1 if opcode == "add" else -1), width)
    if opcode == "neg":
        return _wrapped(_sum(Known(ZERO, True), inputs[0], -1), width)
    if opcode == "not":
        return _wrapped(_sum(Known(terms.number(-1), True), inputs[0], -1), width)
    if opcode in ("mul", "mad"):
        if "wide" in modifiers:
            factors = [_extended(_wrapped(one, width), width, sign) for one in inputs[:2]]
            width *= 2
        else:
            factors = inputs[:2]
        product = _product(*factors)
        if product is None or opcode == "mul":
            return None if product is None else _wrapped(product, width)
        return _wrapped(_sum(product, inputs[2], 1), width)
    if opcode == "shl":
        distance = terms.constant(inputs[1].sum) if inputs[1].exact else None
        if distance is None:
            return None
        factor = 1 << distance if 0 <= distance < width else 0
        return _wrapped(_product(inputs[0], Known(terms.number(factor), True)) or inputs[0], width)
    if opcode == "shr":
        return _shifted_right(inputs, width, sign)
    if opcode in ("and", "or", "xor"):
        return _bitwise(opcode, inputs, width)
    if opcode == "bfe" and not sign:
        start, length = (terms.constant(one.sum) if one.exact else None for one in inputs[1:3])
        if start is None or length is None or not 0 <= start < width or not 0 <= length <= width:
            return None
        moved = _shifted_right([inputs[0], inputs[1]], width, False)
        return moved and _bitwise("and", [moved, Known(terms.number((1 << length) - 1), True)], width)
    return _exactly(opcode, inputs, width, sign)


def _exactly(opcode: str, inputs: Sequence[Known], width: int, sign: bool) -> Known | None:
    """Return the result of an operation whose inputs are all exact."""
    if opcode == "selp":
        if not all(one.exact for one in inputs):
            return None
        a, b, chosen = (one.sum for one in inputs)
        return _made(inputs, terms.atom(("if", chosen, _read(a, width, sign), _read(b, width, sign))))
    names = {"min": "min", "max": "max", "div": "/", "rem": "%"}
    if opcode not in names or not all(one.exact for one in inputs):
        return None
    a, b = (_read(one.sum, width, sign) for one in inputs[:2])
    if opcode in ("div", "rem") and terms.span(b)[0] < 1:
        return None
    return _wrapped(_made(inputs, _operation(names[opcode], a, b)), width)


def _comparison(modifiers: tuple[str, ...], inputs: Sequence[Known]) -> Known | None:
    found = _INTEGER.fullmatch(modifiers[-1])
    if not found or len(inputs) != 2 or not all(one.exact for one in inputs):
        return None
    names = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
    name = names.get(modifiers[0], modifiers[0])
    if name not in ("eq", "ne", "lt", "le", "gt", "ge"):
        return None
    a, b = (_read(one.sum, int(found[2]), found[1] == "s") for one in inputs)
    return _made(inputs, _operation(name, a, b))


def _operation(name: str, a: Sum, b: Sum) -> Sum:
    made = (name, a, b)
    if a[1] or b[1]:
        return terms.atom(made)
    return terms.number(terms.value(terms.atom(made), terms.Thread((0, 0, 0), {})))


def _shifted_right(inputs: Sequence[Known], width: int, sign: bool) -> Known | None:
    value, by = inputs[:2]
    distance = terms.constant(by.sum) if by.exact else None
    if distance is None or distance < 0:
        return None
    distance = min(distance, width - 1 if sign else width)
    if value.exact:
        read = _read(value.sum, width, sign)
        return _made(inputs, _operation(">>", read, terms.number(distance)))
    if not _is_below(value.sum, value.zeros) or distance > value.zeros:
        return None
    moved = _operation(">>", value.sum, terms.number(distance))
    return _lanes_of(moved, value.zeros - distance, value.needs | by.needs)


def _bitwise(opcode: str, inputs: Sequence[Known], width: int) -> Known | None:
    name = {"and": "&", "or": "|", "xor": "^"}[opcode]
    a, b = inputs[:2]
    if a.exact and b.exact:
        return _made(inputs, _operation(name, *(terms.unsigned(one.sum, width) for one in (a, b))))
    if opcode == "and":
        for value, mask in ((a, b), (b, a)):
            bits = terms.constant(mask.sum) if mask.exact else None
            if bits is None or value.exact or not _is_below(value.sum, value.zeros):
                continue
            bits %= 1 << width
            low = bits & ((1 << value.zeros) - 1)
            kept = _operation("&", value.sum, terms.number(low))
            if bits == low:
                return _made(inputs, kept)
            return _lanes_of(kept, value.zeros, a.needs | b.needs)
        return None
    for value, other in ((a, b), (b, a)):
        # U + F | G = U + (F | G) if F and G only have bits that are 0 in U
        if not value.exact and other.exact and all(_is_below(one.sum, value.zeros) for one in (value, other)):
            return _lanes_of(_operation(name, value.sum, other.sum), value.zeros, a.needs | b.needs)
    return None


def _packed(inputs: Sequence[Known], width: int) -> Known | None:
    """Return a register of `width` bits that is put together from smaller registers."""
    each = width // len(inputs)
    if not all(one.exact for one in inputs):
        return None
    total = ZERO
    for n, one in enumerate(inputs):
        total = terms.add(total, terms.scale(terms.unsigned(one.sum, each), 1 << (n * each)))
    return _made(inputs, total)


def _product(a: Known, b: Known) -> Known | None:
    if a.exact and b.exact:
        return _made((a, b), terms.multiply(a.sum, b.sum))
    for value, factor in ((a, b), (b, a)):
        if factor.exact and factor.is_uniform:
            made = terms.multiply(value.sum, factor.sum)
            low = min(64, value.zeros + terms.zeros(factor.sum))
            return _lanes_of(made, low, a.needs | b.needs)
    return None


def _sum(a: Known, b: Known, sign: int) -> Known:
    if a.exact and b.exact:
        return _made((a, b), terms.add(a.sum, terms.scale(b.sum, sign)))
    a, b = _relative(a), _relative(b)
    lanes = terms.add(a.sum, terms.scale(b.sum, sign))
    return Known(lanes, False, min(a.zeros, b.zeros), a.needs | b.needs)


def _extended(one: Known, width: int, sign: bool) -> Known:
    """Return a register of `width` bits as a number with or without sign."""
    if one.exact:
        return replace(one, sum=_read(one.sum, width, sign))
    fits = one.is_uniform or (_is_below(one.sum, min(one.zeros, width - 1)))
    return replace(one, zeros=min(one.zeros, width), needs=one.needs if fits else one.needs | {"wrap"})


def _wrapped(one: Known, width: int) -> Known:
    return replace(one, sum=terms.modulo(one.sum, width), zeros=min(one.zeros, width))


def _shifted(one: Known, offset: int, width: int) -> Known:
    """Return a register plus the offset of an address."""
    if not offset or not one.exact:
        return replace(one, zeros=min(one.zeros, terms.trailing(offset)))
    return _wrapped(replace(one, sum=terms.add(one.sum, terms.number(offset))), width)


def _relative(one: Known) -> Known:
    """Return the value without the part that is the same in all lanes, which becomes U."""
    if not one.exact:
        return one
    return _lanes_of(one.sum, 64, one.needs)


def _lanes_of(made: Sum, zeros: int, needs: frozenset[str]) -> Known:
    """Return what is known about `made` + N, where N is the same in all lanes and ends with `zeros` zero bits."""
    lanes, rest = terms.split(made)
    return Known(lanes, False, min(zeros, terms.zeros(rest)), needs)


def _is_below(a: Sum, bits: int) -> bool:
    """Return whether a sum is never negative and always less than 2^bits."""
    low, high = terms.span(a)
    return low >= 0 and high < 1 << bits


def _read(a: Sum, width: int, sign: bool) -> Sum:
    return terms.signed(a, width) if sign else terms.unsigned(a, width)


def _made(inputs: Sequence[Known], made: Sum) -> Known:
    return Known(made, True, 0, NOTHING.union(*(one.needs for one in inputs)))


def _other(inputs: Sequence[Known]) -> Known:
    """Return the result of an operation that the analysis does not follow: the same in all lanes if all inputs are."""
    if all(one.is_uniform for one in inputs):
        return Known(ZERO, needs=NOTHING.union(*(one.needs for one in inputs)))
    return _unknown("mixed" if any(not one.exact for one in inputs) else "other")


def _unknown(reason: str) -> Known:
    return Known(ZERO, reason=reason)

"""Follow the addresses of functions and kernels through a function: may they leave the thread?

    passes(function, {"add"})                          # frozenset({Parameter("fold", 0)}): `function` gives fold the address of add
    passes(fold, (), {Parameter("fold", 0)})           # frozenset(): fold only calls its argument
    passes(keeps, (), {Parameter("keeps", 0)})         # None: keeps stores its argument in global memory

In the copy of a module, a function has another address than in the original. The difference cannot be seen as long as the address
stays in registers, local memory and parameters, and is only called.

The analysis is conservative: it follows addresses through registers regardless of order. In local memory, it knows the place of an
access at a constant offset in a variable. (nvcc has one variable for all local objects of a function.) An access at a computed offset
may be anywhere from the constant part of the offset on, where the accessed object begins, but not before that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from gpubpf.errors import PtxError
from gpubpf.record import Record

from .flow import KERNEL_LAUNCHES, Flow, callee, find_names
from .module import (
    Address,
    Close,
    Function,
    Group,
    Immediate,
    Name,
    Open,
    Operand,
    PtxInstruction,
    Variable,
    Vector,
    type_size,
)
from .tokens import parse_integer

_WIDTH = 8  # bytes of an address
_MOST_PASSES = 64  # over a function's body, before the analysis gives up


class _Place(Record):
    """A place in a local variable or parameter.

    offset  in bytes
    exact   whether the place is exactly at the offset; if not, it is anywhere from the offset on
    """

    variable: str
    offset: int
    exact: bool = True

    def moved(self, offset: int) -> _Place | None:
        """Return the place `offset` bytes further; None if it may be before the beginning of an object."""
        if self.exact:
            return _Place(self.variable, self.offset + offset)
        return self if offset >= 0 else None

    def onwards(self) -> _Place:
        """Return the place that stands for all places from this one on."""
        return _Place(self.variable, self.offset, False)

    def joined(self, other: _Place) -> _Place | None:
        """Return the place that includes this place and the other one; None for places in different variables."""
        if self == other or self.variable != other.variable:
            return self if self == other else None
        return _Place(self.variable, min(self.offset, other.offset), False)

    def may_overlap(self, address: _Place, width: int) -> bool:
        """Return whether an access of `width` bytes at this place may overlap a function's address that is stored at `address`."""
        if self.variable != address.variable:
            return False
        before = self.exact and self.offset + width <= address.offset
        after = address.exact and address.offset + _WIDTH <= self.offset
        return not (before or after)


class Parameter(Record):
    """A place in a parameter of a function: the parameter's number, and the offset in bytes."""

    function: str
    number: int
    offset: int = 0


class _Leaves(Exception):
    """An address may leave the thread."""


def passes(
    function: Function, addresses: Collection[str], parameters: Collection[Parameter] = ()
) -> frozenset[Parameter] | None:
    """Return the parameters of other functions in which a function passes addresses; None if an address may leave the thread.

    An address stays in the thread while it is in registers, local memory or parameters, and is only called or launched.

    addresses: names of functions and kernels whose addresses the function takes
    parameters: the function's own parameters that contain addresses
    """
    try:
        return _Addresses(function, addresses, parameters).follow()
    except (_Leaves, PtxError):
        return None


class _Addresses:
    """The registers, local memory and parameters that may hold one of the addresses, in one function.

    The sets only grow. The analysis ends when a pass over the body adds nothing.
    """

    def __init__(
        self, function: Function, addresses: Collection[str], parameters: Collection[Parameter]
    ) -> None:
        self.function = function
        self.given = {_Place(function.parameters[p.number].name, p.offset) for p in parameters}
        self.own = {place.variable for place in self.given}
        registers = {v.name for v in function.parameters if v.space == "reg"}
        self.held = set(addresses) | (self.own & registers)
        self.own -= registers
        declared = [s for s in function.body or () if isinstance(s, Variable)]
        self.variables = {s.name for s in declared if s.space == "local"}
        if any(sum(s.declares(name) for s in declared) > 1 for name in self.variables):
            raise _Leaves  # variables of the same name in several blocks cannot be distinguished
        if self.variables and not self._always_means_them():
            raise _Leaves
        # Local variable, or register that points into one → the place. None: any place.
        self.places: dict[str, _Place | None] = {name: _Place(name, 0) for name in self.variables}
        self.stored: set[_Place | None] = set()  # places in local memory that hold addresses
        self.escaped: set[_Place | None] = set()  # other code may access local memory from these places on
        # By scope: parameter of a call → the offsets of addresses in it, in bytes.
        self.passed: list[dict[str, set[int]]] = []
        self.bases: set[str] = set()  # names through which addresses are stored
        self.found: set[Parameter] = set()

    def _always_means_them(self) -> bool:
        """Return whether the names of local variables always refer to these, and never to something of the module."""
        flow = Flow(self.function.body or ())
        return not any(
            name in self.variables and flow.declaration(index, name) is None
            for index, instruction in flow.instructions()
            for name in find_names(instruction.operands)
        )

    def follow(self) -> frozenset[Parameter]:
        """Return where addresses are passed. Raises _Leaves."""
        before: tuple[object, ...] = ()
        for _ in range(_MOST_PASSES):
            self.passed = [{}]
            for statement in self.function.body or ():
                if isinstance(statement, Variable) and statement.space == "param":
                    self.passed[-1][statement.name] = set()
                elif isinstance(statement, Open):
                    self.passed.append({})
                elif isinstance(statement, Close) and len(self.passed) > 1:
                    self.passed.pop()
                elif isinstance(statement, PtxInstruction):
                    self._instruction(statement)
            if any(_exposes(place, stored) for place in self.escaped for stored in self.stored):
                raise _Leaves
            now = (len(self.held), dict(self.places), len(self.stored))
            if now == before:
                if (
                    not self.bases <= self._surely_local()
                    or {v.name for v in self.function.returns} & self.held
                ):
                    raise _Leaves
                return frozenset(self.found)
            before = now
        raise _Leaves

    def _instruction(self, instruction: PtxInstruction) -> None:
        if any(isinstance(o, Address) and o.index is not None for o in instruction.operands):
            raise _Leaves  # it may be any element of an array: compilers do not write that
        match instruction.opcode:
            case "call":
                self._call(instruction)
            case "ld":
                self._load(instruction)
            case "st":
                self._store(instruction)
            case _:
                self._compute(instruction)

    def _call(self, call: PtxInstruction) -> None:
        target = callee(call) or ""
        at = next((n for n, o in enumerate(call.operands) if isinstance(o, Name)), len(call.operands))
        names = _names(call.operands) - {target}
        self._escape(names)
        groups = [operand for operand in call.operands[at + 1 :] if isinstance(operand, Group)]
        given = [(o.name, n) for n, o in enumerate(groups[0].items if groups else ()) if isinstance(o, Name)]
        if not (names - {name for name, _ in given}).isdisjoint(self.held | self.own):
            raise _Leaves
        for name, number in given:
            offsets = self._argument(name) | ({0} if name in self.held else set())
            if name in self.own or (offsets and target.startswith("%")):
                raise _Leaves
            if not KERNEL_LAUNCHES.match(target):
                self.found |= {Parameter(target, number, offset) for offset in offsets}

    def _argument(self, name: str) -> set[int]:
        """Return the offsets, in bytes, of addresses in a call's parameter. The innermost parameter of this name counts."""
        return next(
            (scope[name] for scope in reversed(self.passed) if name in scope),
            self.passed[0].setdefault(name, set()),
        )

    def _load(self, load: PtxInstruction) -> None:
        address = load.operands[1] if len(load.operands) == 2 else None
        if not isinstance(address, Address) or address.base is None:
            self._only_others(load.operands)
            return
        width = _width_of(load)
        offsets = range(0, width * len(_items(load.operands[0])), width)
        if "param" in load.modifiers and address.base in self.own:
            places = [_Place(address.base, address.offset + offset) for offset in offsets]
            self._read(load.operands[0], places, width, self.given)
        elif self._is_local(load, address):
            place = self._place(address)
            moved = [_moved(place, offset) for offset in offsets]
            self._read(load.operands[0], moved, width, self.stored, load.modifiers[-1] == "f64")
        else:
            if "param" in load.modifiers and self._argument(address.base):
                raise _Leaves
            self._only_others(load.operands[1:])

    def _read(
        self,
        to: Operand,
        places: Sequence[_Place | None],
        width: int,
        where: Collection[_Place | None],
        number: bool = False,
    ) -> None:
        """Record the registers that a load may fill with an address. Raises _Leaves if the load may read only a part of one.

        to: the operand that receives the loaded value
        places: the place that each element of `to` is loaded from; None: any place
        width: bytes of each loaded element
        where: the places that hold addresses
        number: whether the load reads a floating-point number
        """
        for item, place in zip(_items(to), places, strict=True):
            for other in where:
                exact = place is not None and other is not None and place.exact and other.exact
                same = place is None or other is None or place.variable == other.variable
                # An array of addresses may be read backwards.
                backwards = same and not exact and width == _WIDTH and not number
                if not (backwards or _may_overlap(place, other, width)):
                    continue
                if exact and (place != other or width != _WIDTH):
                    raise _Leaves  # a part of the address
                self.held |= _names([item])

    def _store(self, store: PtxInstruction) -> None:
        address, *values = store.operands or (None,)
        self._escape(_names(values))
        if not isinstance(address, Address) or not _names([address]).isdisjoint(self.held):
            self._only_others(store.operands)
            return
        width = _width_of(store)
        for number, item in enumerate(item for value in values for item in _items(value)):
            if _names([item]).isdisjoint(self.held):
                continue
            if width != _WIDTH:
                raise _Leaves
            if "param" in store.modifiers and address.base not in {v.name for v in self.function.returns}:
                self._argument(address.base or "").add(address.offset + number * width)
            elif self._is_local(store, address):
                self.bases.add(address.base or "")
                self.stored.add(_moved(self._place(address), number * width))
            else:
                raise _Leaves

    def _compute(self, instruction: PtxInstruction) -> None:
        opcode, operands = instruction.opcode, instruction.operands
        to, read = _names(operands[:1]), _names(operands[1:])
        if not read.isdisjoint(self.own):
            raise _Leaves  # the instruction takes the address of a parameter
        if not read.isdisjoint(self.places):
            place = self._result(instruction)
            for name in to:
                known = self.places.get(name, place)
                self.places[name] = known.joined(place) if known is not None and place is not None else None
            if opcode not in ("mov", "add", "sub", "mad", "selp", "cvta"):
                self._escape(read)
        if not read.isdisjoint(self.held):
            if _compares_with_null(instruction):
                return
            if opcode not in ("mov", "selp"):
                raise _Leaves
            self.held |= to

    def _result(self, instruction: PtxInstruction) -> _Place | None:
        """Return the place that an instruction's result points to, computed from the address of a local variable; None: any place."""
        match instruction.opcode, instruction.operands[1:]:
            case "mov" | "cvta", (Name(name=name, offset=offset),):
                return _moved(self.places.get(name), offset)
            case "add", (Name(name=name, offset=0), Immediate(text=number)):
                return _moved(
                    self.places.get(name), (parse_integer(number) + (1 << 63)) % (1 << 64) - (1 << 63)
                )
            case "add", (Name(name=one, offset=0), Name(name=other, offset=0)):
                bases = [self.places[name] for name in (one, other) if name in self.places]
                return bases[0].onwards() if len(bases) == 1 and bases[0] is not None else None
            case "mad", (_, _, Name(name=name, offset=0)) if name in self.places:
                base = self.places[name]
                return base.onwards() if base is not None else None
        return None

    def _surely_local(self) -> set[str]:
        """Return the names of the local variables, and of the registers that only hold their addresses."""
        writing = [s for s in self.function.body or () if isinstance(s, PtxInstruction) and s.opcode != "st"]
        found = set(self.places)
        while True:
            written = [_names(s.operands[:1]) for s in writing if not _keeps_local(s, found)]
            mixed = found.intersection(set[str]().union(*written)) - self.variables
            if not mixed:
                return found
            found -= mixed

    def _escape(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.places:
                place = self.places[name]
                self.escaped.add(place.onwards() if place is not None else None)

    def _is_local(self, access: PtxInstruction, address: Address) -> bool:
        return "local" in access.modifiers or address.base in self.places

    def _place(self, address: Address) -> _Place | None:
        return _moved(self.places.get(address.base or ""), address.offset)

    def _only_others(self, operands: Iterable[Operand]) -> None:
        if not _names(operands).isdisjoint(self.held | self.own):
            raise _Leaves


def _keeps_local(instruction: PtxInstruction, local: Collection[str]) -> bool:
    """Return whether an instruction computes an address in a local variable from registers and variables in `local`."""
    match instruction.opcode, instruction.operands[1:]:
        case "mov" | "cvta", (Name(name=name),):
            return name in local
        case "add", (one, other):
            return sum(isinstance(o, Name) and o.name in local for o in (one, other)) == 1
        case "sub", (Name(name=name), _):
            return name in local
        case "mad", (_, _, Name(name=name)):
            return name in local
        case "selp", (Name(name=one), Name(name=other), _):
            return one in local and other in local
    return False


def _compares_with_null(instruction: PtxInstruction) -> bool:
    """Return whether an instruction compares an address with 0. The result is the same in the copy as in the original."""
    if instruction.opcode != "setp" or instruction.modifiers[:1] not in (("eq",), ("ne",)):
        return False
    match instruction.operands:
        case (_, Name(), Immediate(text=number)):
            return parse_integer(number) == 0
    return False


def _exposes(escaped: _Place | None, stored: _Place | None) -> bool:
    """Return whether code that gets the address of the place `escaped` may access an address that is stored in the other place.

    It may if the address is stored behind `escaped`, or ends there: `escaped` may be the end of an array.
    """
    if escaped is None or stored is None:
        return True
    ends = escaped.variable == stored.variable and stored.offset + _WIDTH == escaped.offset
    return ends or escaped.onwards().may_overlap(stored, _WIDTH)


def _moved(place: _Place | None, offset: int) -> _Place | None:
    return None if place is None else place.moved(offset)


def _may_overlap(place: _Place | None, address: _Place | None, width: int = _WIDTH) -> bool:
    return place is None or address is None or place.may_overlap(address, width)


def _width_of(access: PtxInstruction) -> int:
    """Return the bytes of each element that a load or store accesses. Raises PtxError."""
    return type_size(access.modifiers[-1] if access.modifiers else "")


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


def _names(operands: Iterable[Operand]) -> set[str]:
    """Return the names in operands. An element of a vector register counts as the register."""
    return {name.partition(".")[0] for name in find_names(operands)}

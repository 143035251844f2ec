"""Names inside a function: nested scopes, registers, variables, labels (PTX ISA 5.1, 5.2, 7.1)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from gpubpf.errors import PtxError
from gpubpf.ptx.module import (
    Address,
    Close,
    Function,
    Group,
    Label,
    Name,
    Open,
    Operand,
    PtxInstruction,
    Statement,
    Variable,
    Vector,
    type_size,
)

_NUMBERED = re.compile(r"^(.*?)(\d+)$")
# Instructions that take one address of any space; modifiers that name a space, or a form for which `memory.space_at` is asked.
_GENERIC = frozenset({"ld", "ldu", "st", "atom", "red", "ldmatrix", "stmatrix", "wmma"})
_SPACES = frozenset({"global", "shared", "local", "const", "param", "async", "bulk"})
_READING = frozenset({"ld", "ldu"})
MOST_VECTORS = 4096  # in one declaration
_BAD = re.compile(r"[^A-Za-z0-9_]")


@dataclass(frozen=True, slots=True)
class Register:
    """One register. `name`: a C identifier, unique in the function. `width`: bytes, 0 for a predicate."""

    name: str
    width: int


@dataclass(slots=True)
class Storage:
    """A variable that a function can use.

    kind: global (index into the image's variables), shared (index into its shared variables), local (offset in the
    lane's local memory), kernel (offset in the kernel's parameters), frame (a `.param` of a function or call: a field
    of the frame called `name`).
    """

    kind: str
    name: str
    index: int
    size: int
    align: int
    constant: bool = False  # .const


@dataclass(slots=True)
class Scope:
    parent: Scope | None
    registers: dict[str, Register] = field(default_factory=dict)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)  # prefix → (count, width)
    storages: dict[str, Storage] = field(default_factory=dict)
    vectors: dict[str, Vector] = field(default_factory=dict)  # vector registers and their elements
    labels: dict[str, int] = field(default_factory=dict)  # name → label number
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)  # .branchtargets


def lifted(statements: Iterable[Statement]) -> Iterator[Variable]:
    """Yield the variables of a body whose storage belongs to the module, whatever block declares them."""
    for statement in statements:
        if isinstance(statement, Variable) and statement.space in ("shared", "global", "const"):
            yield statement


def key_of_lifted(function: str, number: int) -> str:
    """Return the key of a function's `number`th lifted variable in the scope of the module. No name in PTX contains it."""
    return f"{function}\0{number}"


def c_name(name: str, suffix: str = "") -> str:
    return _BAD.sub("_", name.lstrip("%")) + suffix


class Names:
    """All names of one function. Names are looked up from the scope of a statement."""

    def __init__(self, function: Function, module_scope: dict[str, Storage]) -> None:
        self.function = function
        self.root = Scope(None)
        self.module = module_scope
        self.local_size = 0
        self.labels = 0
        self.has_vectors = False
        self.frame: dict[str, Storage] = {}
        self.statements: list[tuple[PtxInstruction | Label, Scope]] = []
        # By position in `statements`: instructions that the injector added; and the number of instructions of the application that a
        # thread would reach before this one, and that the injector left out (docs/timing.md).
        self.injected: set[int] = set()
        self.omitted: dict[int, int] = {}
        self._numbers = 0
        self._lifted = 0  # variables of the module that were declared so far
        self._identifiers: set[str] = set()

    # -- declaring

    def _identifier(self, name: str) -> str:
        wanted = c_name(name)
        found = "r_" + wanted
        while found in self._identifiers:
            self._numbers += 1
            found = f"r_{wanted}_{self._numbers}"
        self._identifiers.add(found)
        return found

    def declare(self, scope: Scope, variable: Variable) -> None:
        if variable.space == "reg":
            width = 0 if variable.type == "pred" else type_size(variable.type)
            if variable.vector > 1:
                self.declare_vectors(scope, variable, width)
            elif variable.count is not None:
                scope.ranges[variable.name] = (variable.count, width)
            else:
                scope.registers[variable.name] = Register(self._identifier(variable.name), width)
        elif variable.space == "local":
            align = max(1, variable.alignment)
            self.local_size = (self.local_size + align - 1) // align * align
            scope.storages[variable.name] = Storage(
                "local", variable.name, self.local_size, variable.size, align
            )
            self.local_size += variable.size
        elif variable.space == "param":
            self.declare_parameter(scope, variable)
        elif variable.space in ("shared", "global", "const"):
            storage = self.module.get(key_of_lifted(self.function.name, self._lifted))
            self._lifted += 1
            if storage is not None:
                scope.storages[variable.name] = storage
        else:
            raise PtxError(f"PTX line {variable.line}: .{variable.space} variables are not supported")

    def declare_vectors(self, scope: Scope, variable: Variable, width: int) -> None:
        """Declare the elements of vector registers. A register as a whole is written as the vector of its elements."""
        if (variable.count or 0) > MOST_VECTORS:
            raise PtxError(f"PTX line {variable.line}: more than {MOST_VECTORS} vector registers")
        self.has_vectors = True
        single = variable.count is None
        for name in (
            [variable.name] if single else [f"{variable.name}{n}" for n in range(variable.count or 0)]
        ):
            elements = []
            for element, other in zip("xyzw"[: variable.vector], "rgba", strict=False):
                found = Register(self._identifier(f"{name}.{element}"), width)
                scope.registers[f"{name}.{element}"] = scope.registers[f"{name}.{other}"] = found
                elements.append(Name(f"{name}.{element}"))
            scope.vectors[name] = Vector(tuple(elements))

    def declare_parameter(self, scope: Scope, variable: Variable) -> Storage:
        found = Storage("frame", self._identifier("p_" + variable.name), 0, variable.size, variable.alignment)
        self.frame[found.name] = found
        scope.storages[variable.name] = found
        return found

    def new_register(self, name: str, width: int) -> Register:
        found = self.root.registers.get(name)
        if found is None:
            found = self.root.registers[name] = Register(self._identifier(name), width)
        return found

    # -- looking up

    def register(self, scope: Scope, name: str) -> Register | None:
        at: Scope | None = scope
        while at is not None and name not in at.storages:  # a variable hides registers of outer blocks
            if (found := self._declared(at, name)) is not None:
                return found
            at = at.parent
        return None

    def _declared(self, scope: Scope, name: str) -> Register | None:
        """Return the register of a name that a scope itself declares."""
        if (found := scope.registers.get(name)) is not None:
            return found
        if not scope.ranges or (numbered := _NUMBERED.match(name)) is None:
            return None
        # %r12 is register 12 of %r<N>; a prefix may itself end in digits
        for cut in range(max(numbered.start(2), len(name) - 9), len(name)):
            declared = scope.ranges.get(name[:cut])
            if declared is not None and int(name[cut:]) < declared[0] and str(int(name[cut:])) == name[cut:]:
                found = scope.registers[name] = Register(self._identifier(name), declared[1])
                return found
        return None

    def storage(self, scope: Scope, name: str) -> Storage | None:
        at: Scope | None = scope
        while at is not None:
            if (found := at.storages.get(name)) is not None:
                return found
            at = at.parent
        return self.module.get(name)

    def label(self, scope: Scope, name: str, line: int) -> int:
        at: Scope | None = scope
        while at is not None:
            if (found := at.labels.get(name)) is not None:
                return found
            at = at.parent
        raise PtxError(f"PTX line {line}: there is no label {name} in {self.function.name}")

    def table(self, scope: Scope, name: str, line: int) -> tuple[str, ...]:
        at: Scope | None = scope
        while at is not None:
            if (found := at.tables.get(name)) is not None:
                return found
            at = at.parent
        raise PtxError(f"PTX line {line}: {name} is not a list of branch targets")

    def in_named_space(self, scope: Scope, i: PtxInstruction) -> PtxInstruction:
        """Return an instruction whose address names a variable with the variable's space, as ptxas takes it. Raises PtxError."""
        if i.opcode not in _GENERIC or not i.modifiers:
            return i
        given = next((m for m in (m.split("::")[0] for m in i.modifiers) if m in _SPACES), "")
        if given == "const" and i.opcode not in _READING:
            raise PtxError(f"PTX line {i.line}: State space incorrect for instruction '{i.opcode}'")
        address = next((o for o in i.operands if isinstance(o, Address)), None)
        space = self.named_space(scope, address)
        if given in ("async", "bulk") or not space:
            return i
        if space != (given or space) or (space == "const" and not given):
            raise PtxError(f"PTX line {i.line}: State space mismatch between '{i.opcode}' and its address")
        return i if given else replace(i, modifiers=(*i.modifiers[:-1], space, i.modifiers[-1]))

    def named_space(self, scope: Scope, address: Operand | None) -> str:
        """Return the space of the variable that an address names; "" if it names none, or a parameter."""
        if not isinstance(address, Address) or address.base is None or self.register(scope, address.base):
            return ""
        found = self.storage(scope, address.base)
        if found is None or found.kind in ("kernel", "frame"):
            return ""
        return "const" if found.constant else found.kind

    def vector(self, scope: Scope, operand: Operand) -> Operand:
        """Return the vector of a vector register's elements instead of the register; any other operand as it is."""
        if isinstance(operand, Group):
            return Group(tuple(self.vector(scope, item) for item in operand.items))
        at: Scope | None = scope
        while at is not None and isinstance(operand, Name) and not operand.offset:
            if operand.name in at.vectors:
                return at.vectors[operand.name]
            if operand.name in at.storages or self._declared(at, operand.name) is not None:
                break
            at = at.parent
        return operand

    # -- flattening

    def flatten(self, body: tuple[Statement, ...]) -> None:
        """Collect statements with their scopes, declare variables, and number labels. Raises PtxError."""
        scope = self.root
        pending: Label | None = None
        depth = 0  # of marks around added statements
        for statement in body:
            if isinstance(statement, Open):
                scope = Scope(scope)
            elif isinstance(statement, Close):
                if scope.parent is None:
                    raise PtxError(f"PTX line {statement.line}: a }} too many")
                scope = scope.parent
            elif isinstance(statement, Variable):
                self.declare(scope, statement)
            elif isinstance(statement, Label):
                scope.labels[statement.name] = self.labels
                self.labels += 1
                pending = statement
                self.statements.append((statement, scope))
            elif isinstance(statement, PtxInstruction):
                if depth:
                    self.injected.add(len(self.statements))
                statement = self.in_named_space(scope, statement)
                if self.has_vectors:
                    operands = tuple(self.vector(scope, operand) for operand in statement.operands)
                    statement = replace(statement, operands=operands)
                self.statements.append((statement, scope))
            elif statement.name == "gpubpf":
                kind = statement.text.strip().removeprefix("//gpubpf")
                if kind.startswith("+"):
                    at = len(self.statements)
                    self.omitted[at] = self.omitted.get(at, 0) + int(kind)
                else:
                    depth = max(0, depth + (1 if kind == "{" else -1))
            elif statement.name == "branchtargets" and pending is not None:
                scope.tables[pending.name] = statement.names

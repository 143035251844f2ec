"""Names inside a function: nested scopes, registers, variables, labels (PTX ISA 5.1, 5.2, 7.1)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpubpf.errors import PtxError
from gpubpf.ptx.module import (
    Address,
    Close,
    Function,
    Generic,
    Group,
    Initializer,
    Label,
    Masked,
    Name,
    Open,
    Operand,
    PtxInstruction,
    Statement,
    Variable,
    Vector,
    numbered,
    type_size,
)
from gpubpf.ptx.opcodes import SPACES, facts
from gpubpf.record import replace

_SPACE_OF = {"kernel": "param", "frame": "param"}  # by kind of storage; the other kinds are spaces
MOST_VECTORS = 4096  # in one declaration
_BAD = re.compile(r"[^A-Za-z0-9_]")


@dataclass(frozen=True, slots=True)
class Register:
    """One register.

    name   a C identifier, unique in the function
    width  bytes; 0 for a predicate
    """

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
class Declared:
    """The names that a block declares, to find names that it declares twice."""

    names: set[str] = field(default_factory=set)
    ranges: dict[str, int] = field(default_factory=dict)  # prefix → count

    def add(self, variable: Variable) -> None:
        """Add the name, or range of names, of a variable. Raises PtxError if the block already declares one of these names."""
        taken: str | None
        if variable.count is not None:
            first = variable.name + "0"
            taken = (
                first if variable.name in self.ranges else next(filter(variable.declares, self.names), None)
            )
            self.ranges[variable.name] = variable.count
        else:
            taken = variable.name if self._holds(variable.name) else None
            self.names.add(variable.name)
        if taken is not None:
            raise PtxError(f"PTX line {variable.line}: {taken} is declared twice in a block")

    def add_label(self, label: Label) -> None:
        """Add the name of a label. Raises PtxError if the block already declares it."""
        if self._holds(label.name):
            raise PtxError(f"PTX line {label.line}: {label.name} is declared twice in a block")
        self.names.add(label.name)

    def _holds(self, name: str) -> bool:
        prefix, number = numbered(name)
        return name in self.names or 0 <= number < self.ranges.get(prefix, 0)


@dataclass(slots=True)
class Scope:
    """The names that a statement can use: those that its block declares before it, and the names of `parent`.

    A block with declarations after other statements has several scopes. The parent of each is the scope before it.
    """

    parent: Scope | None
    registers: dict[str, Register] = field(default_factory=dict)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)  # prefix → (count, width)
    storages: dict[str, Storage] = field(default_factory=dict)
    vectors: dict[str, Vector] = field(default_factory=dict)  # vector registers and their elements
    labels: dict[str, int] = field(default_factory=dict)  # name → label number
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)  # .branchtargets
    declared: Declared = field(default_factory=Declared)

    def after(self) -> Scope:
        """Return a scope for the block's next statements. Earlier statements do not see its declarations."""
        return Scope(self, labels=self.labels, tables=self.tables, declared=self.declared)


def lifted(function: Function) -> Iterator[tuple[str, Variable]]:
    """Yield the variables of a function whose storage belongs to the module, whatever block declares them.

    Yield (key in the module's scope, variable). The initialiser names other lifted variables by their keys. Raises PtxError.
    """
    keys = (key_of_lifted(function.name, number) for number in itertools.count())
    blocks: list[list[tuple[Variable, str]]] = [[(v, "") for v in (*function.parameters, *function.returns)]]
    for statement in function.body or ():
        if isinstance(statement, Open):
            blocks.append([])
        elif isinstance(statement, Close) and len(blocks) > 1:
            blocks.pop()
        elif isinstance(statement, Variable):
            is_lifted = statement.space in ("shared", "global", "const")
            key = next(keys) if is_lifted else ""
            if is_lifted:
                yield key, replace(statement, initializer=_with_keys(statement, blocks))
            blocks[-1].append((statement, key))


def key_of_lifted(function: str, number: int) -> str:
    """Return the key of a function's `number`th lifted variable in the scope of the module. No name in PTX contains it."""
    return f"{function}\0{number}"


def _with_keys(variable: Variable, blocks: list[list[tuple[Variable, str]]]) -> Initializer | None:
    """Return the initialiser of a function's variable with keys for the names of the function's other variables."""

    def named(operand: Name) -> Name:
        declared = ((v, key) for block in reversed(blocks) for v, key in block if v.declares(operand.name))
        found, key = next(declared, (None, operand.name))
        if found is not None and found.space not in ("global", "const"):
            raise PtxError(
                f"PTX line {variable.line}: the initialiser names {operand.name}, which is not in .global or .const"
            )
        return replace(operand, name=key)

    def renamed(value: Initializer) -> Initializer:
        match value:
            case tuple():
                return tuple(map(renamed, value))
            case Generic():
                return replace(value, operand=named(value.operand))
            case Masked(operand=Name() as operand):
                return replace(value, operand=named(operand))
            case Masked(operand=Generic() as operand):
                return replace(value, operand=replace(operand, operand=named(operand.operand)))
            case Name():
                return named(value)
            case _:
                return value

    return renamed(variable.initializer) if variable.initializer is not None else None


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
        # By position in `statements`: the instructions that the injector added; and how many instructions of the application, directly
        # before a statement, the injector left out (docs/timing.md).
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
        """Declare a variable in a scope. Raises PtxError if its block declares the name already."""
        scope.declared.add(variable)
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
            self._declare_parameter(scope, variable)
        elif variable.space in ("shared", "global", "const"):
            storage = self.module.get(key_of_lifted(self.function.name, self._lifted))
            self._lifted += 1
            if storage is not None:
                scope.storages[variable.name] = storage
        else:
            raise PtxError(f"PTX line {variable.line}: .{variable.space} variables are not supported")

    def declare_vectors(self, scope: Scope, variable: Variable, width: int) -> None:
        """Declare the elements of vector registers. A whole register then stands for the vector of its elements."""
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

    def declare_parameter(self, variable: Variable) -> Storage:
        """Declare a parameter or a result of the function. Raises PtxError."""
        self.root.declared.add(variable)
        return self._declare_parameter(self.root, variable)

    def declare_kernel_parameter(self, variable: Variable, offset: int, size: int, align: int) -> None:
        """Declare a parameter of the kernel. Raises PtxError."""
        self.root.declared.add(variable)
        self.root.storages[variable.name] = Storage("kernel", variable.name, offset, size, align)

    def _declare_parameter(self, scope: Scope, variable: Variable) -> Storage:
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
        if not scope.ranges:
            return None
        prefix, number = numbered(name)
        count, width = scope.ranges.get(prefix, (0, 0))
        if 0 <= number < count:
            found = scope.registers[name] = Register(self._identifier(name), width)
        return found

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
        raise PtxError(f"PTX line {line}: there is no label {name}")

    def table(self, scope: Scope, name: str, line: int) -> tuple[str, ...]:
        at: Scope | None = scope
        while at is not None:
            if (found := at.tables.get(name)) is not None:
                return found
            at = at.parent
        raise PtxError(f"PTX line {line}: {name} is not a list of branch targets")

    def in_named_space(self, scope: Scope, i: PtxInstruction) -> PtxInstruction:
        """Return an instruction with the space of the variable that its address names, as ptxas takes it. Raises PtxError."""
        taken = facts(i).spaces
        if not taken or not i.modifiers:
            return i
        given = next((m for m in (m.split("::")[0] for m in i.modifiers) if m in SPACES), "")
        if given and given not in taken:
            raise PtxError(f"PTX line {i.line}: State space incorrect for instruction '{i.opcode}'")
        address = next((o for o in i.operands if isinstance(o, Address)), None)
        space = self.named_space(scope, address)
        if given in ("async", "bulk") or not space:
            return i
        if space != (given or space) or (space in ("const", "param") and not given):
            raise PtxError(f"PTX line {i.line}: State space mismatch between '{i.opcode}' and its address")
        return i if given else replace(i, modifiers=(*i.modifiers[:-1], space, i.modifiers[-1]))

    def named_space(self, scope: Scope, address: Operand | None) -> str:
        """Return the space of the variable that an address names; "" if it does not name a variable."""
        if not isinstance(address, Address) or address.base is None or self.register(scope, address.base):
            return ""
        found = self.storage(scope, address.base)
        if found is None:
            return ""
        return "const" if found.constant else _SPACE_OF.get(found.kind, found.kind)

    def vector(self, scope: Scope, operand: Operand) -> Operand:
        """Return a vector register as the vector of its elements; any other operand as it is."""
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
        outer: list[Scope] = []  # where each block that is open was opened
        used = 0  # length of `statements` at the block's last declaration; -1: other statements may have followed
        pending: Label | None = None
        depth = 0  # nesting of the marks around added statements
        for statement in body:
            if isinstance(statement, Open):
                outer.append(scope)
                scope = Scope(scope)
                used = len(self.statements)
            elif isinstance(statement, Close):
                if not outer:
                    raise PtxError(f"PTX line {statement.line}: this }} has no matching {{")
                scope = outer.pop()
                used = -1
            elif isinstance(statement, Variable):
                if used != len(self.statements):
                    scope = scope.after()
                    used = len(self.statements)
                self.declare(scope, statement)
            elif isinstance(statement, Label):
                scope.declared.add_label(statement)
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

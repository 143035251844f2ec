"""A PTX interpreter for tests: one thread at a time, slow and plain, for the instructions that integer kernels use.

It counts work by its own definitions, instruction by instruction as it executes, so that what the injector adds up
in blocks can be compared with it. Barriers do nothing: run kernels whose threads do not wait for each other.
"""

from __future__ import annotations

import contextlib
import struct
from collections import Counter

from gpubpf.ptx.flow import Flow, callee
from gpubpf.ptx.module import (  # fmt: skip
    Address,
    Directive,
    Function,
    Generic,
    Group,
    Immediate,
    Module,
    Name,
    PtxInstruction,
    Variable,
    Vector,
    type_size,
)


class Exited(Exception):
    """The thread has left the kernel."""


class Memory:
    """Bytes at addresses; what was never written reads 0."""

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}
        self.top = 0x10000

    def allocate(self, size: int) -> int:
        address = self.top
        self.top += (size + 255) // 256 * 256 + 256
        return address

    def read(self, address: int, size: int) -> int:
        return int.from_bytes(bytes(self.bytes.get(address + k, 0) for k in range(size)), "little")

    def write(self, address: int, size: int, value: int) -> None:
        for k, byte in enumerate((value & ((1 << (8 * size)) - 1)).to_bytes(size, "little")):
            self.bytes[address + k] = byte

    def words(self, address: int, count: int, size: int = 4) -> list[int]:
        return [self.read(address + size * k, size) for k in range(count)]


def place_variables(module: Module, memory: Memory) -> dict[str, int]:
    """Addresses of the module's variables, initialised."""
    placed = {
        v.name: memory.allocate(max(v.size, 4096 if v.space == "shared" else 8))
        for v in module.variables.values()
    }
    for variable in module.variables.values():
        initializer = variable.initializer
        if initializer is None:
            continue
        size = type_size(variable.type)
        items = initializer if isinstance(initializer, tuple) else (initializer,)
        for position, item in enumerate(items):
            if isinstance(item, Generic):
                item = item.operand
            if isinstance(item, Name):
                value = placed.get(item.name, 0) + item.offset
            else:
                value = _bits(item, 8 * size)
            memory.write(placed[variable.name] + position * size, size, value)
    return placed


def _bits(literal: Immediate, bits: int) -> int:
    """The bit pattern of a literal."""
    if literal.is_float:
        return int.from_bytes(struct.pack("<f" if bits == 32 else "<d", literal.real), "little")
    return literal.integer & ((1 << bits) - 1)


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


class Thread:
    """Runs one thread of a kernel. `work` is what it did, by kind, its own counting.

    trace: each instruction that it executed, as (function, index of the statement), and whether its predicate was true.
    """

    def __init__(
        self, module: Module, memory: Memory, variables: dict[str, int], special: dict[str, int]
    ) -> None:
        self.module, self.memory, self.variables, self.special = module, memory, variables, special
        self.work: Counter[str] = Counter()
        self.flows: dict[str, Flow] = {}
        self.steps = 0
        self.trace: list[tuple[str, int, bool]] = []

    def run(self, kernel: str, parameters: bytes) -> None:
        function = self.module.functions[kernel]
        values: dict[str, bytearray] = {}
        end = 0
        for parameter in function.parameters:
            natural = 8 if "ptr" in parameter.attributes else parameter.alignment
            start = -(-end // natural) * natural
            end = start + parameter.size
            values[parameter.name] = bytearray(parameters[start:end].ljust(parameter.size, b"\0"))
        with contextlib.suppress(Exited):
            self.call(function, values)

    def call(self, function: Function, parameters: dict[str, bytearray]) -> bytearray:
        if function.name not in self.flows:
            self.flows[function.name] = Flow(function.body or ())
        frame = Frame(self, function, self.flows[function.name], parameters)
        frame.run()
        return frame.params[function.returns[0].name] if function.returns else bytearray()


class Frame:
    def __init__(
        self, thread: Thread, function: Function, flow: Flow, parameters: dict[str, bytearray]
    ) -> None:
        self.thread, self.flow, self.memory = thread, flow, thread.memory
        self.name = function.name
        self.registers: dict[tuple[int, str], int] = {}
        self.params = dict(parameters)
        for result in function.returns:
            self.params[result.name] = bytearray(result.size)
        self.scoped: dict[tuple[int, str], bytearray] = {}
        self.places: dict[tuple[int, str], int] = {}
        self.declared: set[tuple[int, str]] = set()
        self.ranged: list[tuple[int, str, int]] = []
        for scope, statement in zip(flow.scope, flow.body, strict=True):
            texts = [statement] if isinstance(statement, Variable) else []
            for variable in texts:
                if variable.space == "reg" and variable.count is not None:
                    self.ranged.append((scope, variable.name, variable.count))
                elif variable.space == "reg":
                    self.declared.add((scope, variable.name))
                elif variable.space == "param":
                    self.scoped[scope, variable.name] = bytearray(variable.size)
                else:
                    self.places[scope, variable.name] = self.memory.allocate(variable.size)
        self.cache: dict[tuple[int, str], int] = {}

    def up(self, scope: int):
        while True:
            yield scope
            if scope == 0:
                return
            scope = self.flow.parent[scope]

    def home(self, scope: int, name: str) -> int:
        """The scope that declares a register."""
        if (scope, name) not in self.cache:
            for s in self.up(scope):
                if (s, name) in self.declared or any(
                    rs == s
                    and name.startswith(rn)
                    and name[len(rn) :].isdigit()
                    and int(name[len(rn) :]) < count
                    for rs, rn, count in self.ranged
                ):
                    self.cache[scope, name] = s
                    break
            else:
                raise AssertionError(f"no register {name}")
        return self.cache[scope, name]

    def is_register(self, scope: int, name: str) -> bool:
        try:
            self.home(scope, name)
        except AssertionError:
            return False
        return True

    def param(self, scope: int, name: str) -> bytearray | None:
        for s in self.up(scope):
            if (s, name) in self.scoped:
                return self.scoped[s, name]
        return self.params.get(name)

    def value(self, scope: int, operand, bits: int = 64) -> int:
        if isinstance(operand, Immediate):
            return _bits(operand, bits)
        if not isinstance(operand, Name):
            raise AssertionError(f"operand {operand}")
        if operand.name in self.thread.special:
            return self.thread.special[operand.name]
        if self.is_register(scope, operand.name):
            return self.registers.get((self.home(scope, operand.name), operand.name), 0)
        for s in self.up(scope):
            if (s, operand.name) in self.places:
                return self.places[s, operand.name] + operand.offset
        return self.thread.variables[operand.name] + operand.offset

    def set(self, scope: int, operand, value: int) -> None:
        assert isinstance(operand, Name)
        self.registers[self.home(scope, operand.name), operand.name] = value

    def run(self) -> None:
        body = self.flow.body
        index = 0
        entered = True
        thread = self.thread
        counting = not any(isinstance(s, Variable) and s.name.startswith("%gpubpf") for s in body)
        while index < len(body):
            statement = body[index]
            if not isinstance(statement, PtxInstruction):
                entered = entered or index in self.flow.leaders
                index += 1
                continue
            thread.steps += 1
            assert thread.steps < 3_000_000, "this does not end"
            scope = self.flow.scope[index]
            true = (
                statement.predicate is None
                or bool(self.value(scope, Name(statement.predicate))) != statement.negated
            )
            opcode, modifiers = statement.opcode, statement.modifiers
            thread.trace.append((self.name, index, true))
            if counting:
                thread.work["instructions"] += 1
                thread.work["blocks"] += entered
                if true:
                    if opcode in ("ld", "st") and "param" not in modifiers:
                        thread.work["loads" if opcode == "ld" else "stores"] += 1
                    thread.work["atomics"] += opcode in ("atom", "red")
                    thread.work["barriers"] += opcode in ("bar", "barrier") and modifiers[0] != "warp"
            entered = opcode in ("bra", "brx", "ret", "exit")
            index += 1
            if not true:
                continue
            if opcode == "bra":
                index = self.flow.targets[index - 1][0]
            elif opcode == "brx":
                index = self.flow.targets[index - 1][self.value(scope, statement.operands[0])]
            elif opcode == "ret":
                return
            elif opcode in ("exit", "trap"):
                raise Exited
            elif opcode == "call":
                self.do_call(scope, statement)
            elif opcode not in ("bar", "membar", "fence"):
                self.execute(scope, statement)

    def do_call(self, scope: int, call: PtxInstruction) -> None:
        name = callee(call)
        target = self.thread.module.functions[name]
        at = next(i for i, o in enumerate(call.operands) if isinstance(o, Name))
        arguments = next((o.items for o in call.operands[at + 1 :] if isinstance(o, Group)), ())
        results = next((o.items for o in call.operands[:at] if isinstance(o, Group)), ())
        given = {}
        for formal, actual in zip(target.parameters, arguments, strict=True):
            assert isinstance(actual, Name)
            passed = self.param(scope, actual.name)
            if passed is None:  # a register
                passed = bytearray(
                    (self.value(scope, actual) % 2 ** (8 * formal.size)).to_bytes(formal.size, "little")
                )
            assert passed is not None and len(passed) == formal.size, f"{name}: {formal} given {actual}"
            given[formal.name] = bytearray(passed)
        if not target.defined:
            return
        result = self.thread.call(target, given)
        for actual in results:
            kept = self.param(scope, actual.name)
            if kept is not None:
                assert len(kept) == len(result), f"{name}: {actual} takes a result of {len(result)} bytes"
                kept[:] = result
            elif actual.name != "_":
                self.set(scope, actual, int.from_bytes(result, "little"))

    def access(self, scope: int, i: PtxInstruction, address: Address):
        """(read, write) of an address."""
        if address.base is not None and "param" in i.modifiers and not self.is_register(scope, address.base):
            data = self.param(scope, address.base)
            assert data is not None, address

            def read(offset: int, size: int) -> int:
                assert 0 <= address.offset + offset <= len(data) - size, f"{address} of {len(data)} bytes"
                return int.from_bytes(
                    data[address.offset + offset : address.offset + offset + size], "little"
                )

            def write(offset: int, size: int, value: int) -> None:
                assert 0 <= address.offset + offset <= len(data) - size, f"{address} of {len(data)} bytes"
                start = address.offset + offset
                data[start : start + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")

            return read, write
        start = (self.value(scope, Name(address.base)) if address.base else 0) + address.offset
        return (
            lambda offset, size: self.memory.read(start + offset, size),
            lambda offset, size, value: self.memory.write(start + offset, size, value),
        )

    def execute(self, scope: int, i: PtxInstruction) -> None:
        opcode, m, o = i.opcode, i.modifiers, i.operands
        kind = m[-1] if m else "b32"
        bits = 1 if kind == "pred" else 8 * type_size(kind) if kind != "" else 32
        mask = (1 << bits) - 1
        get = lambda k, b=bits: self.value(scope, o[k], b)  # noqa: E731
        signed = kind.startswith("s")
        number = lambda k: _signed(get(k), bits) if signed else get(k) & mask  # noqa: E731
        if opcode in ("ld", "st"):
            at = 1 if opcode == "ld" else 0
            read, write = self.access(scope, i, o[at])
            other = o[1 - at]
            parts = other.items if isinstance(other, Vector) else (other,)
            for k, part in enumerate(parts):
                if opcode == "ld":
                    value = read(k * bits // 8, bits // 8)
                    self.set(scope, part, _signed(value, bits) & (2**64 - 1) if signed else value)
                else:
                    write(k * bits // 8, bits // 8, self.value(scope, part, bits))
            return
        if opcode in ("atom", "red"):
            at = 1 if opcode == "atom" else 0
            read, write = self.access(scope, i, o[at])
            old = read(0, bits // 8)
            assert "add" in m
            write(0, bits // 8, old + get(at + 1))
            if opcode == "atom":
                self.set(scope, o[0], old)
            return
        if opcode == "setp":
            compare = m[0]
            x, y = (
                (_signed(get(1), bits), _signed(get(2), bits)) if signed else (get(1) & mask, get(2) & mask)
            )
            result = {
                "eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y,
                "lo": x < y, "ls": x <= y, "hi": x > y, "hs": x >= y,
            }[compare]  # fmt: skip
            self.set(scope, o[0], int(result))
            return
        if opcode == "selp":
            value = get(1) if self.value(scope, o[3]) else get(2)
        elif opcode in ("mov", "cvta"):
            if isinstance(o[0], Vector) or isinstance(o[1], Vector):
                raise AssertionError(f"{i}")
            value = get(1)
        elif opcode == "cvt":
            source = m[-1]
            raw = self.value(scope, o[1])
            size = 8 * type_size(source)
            value = _signed(raw, size) if source.startswith("s") else raw & ((1 << size) - 1)
            bits = 8 * type_size(m[-2])
            mask = (1 << bits) - 1
        elif opcode == "mul" and "wide" in m:
            value, mask = number(1) * number(2), (1 << 2 * bits) - 1
        elif opcode == "mad" and "wide" in m:
            value, mask = number(1) * number(2) + self.value(scope, o[3]), (1 << 2 * bits) - 1
        elif opcode == "mad":
            value = get(1) * get(2) + get(3)
        elif opcode in ("shl", "shr"):
            amount = min(get(2, 32) & 0xFFFFFFFF, bits)
            value = get(1) << amount if opcode == "shl" else number(1) >> amount
        elif opcode in ("min", "max"):
            value = (min if opcode == "min" else max)(number(1), number(2))
        elif opcode == "not":
            value = ~get(1)
        elif opcode == "neg":
            value = -get(1)
        elif opcode in ("div", "rem"):
            x, y = number(1), number(2)
            quotient = (abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)) if y else -1
            value = quotient if opcode == "div" else x - quotient * y
        elif opcode == "popc":
            value = bin(get(1) & mask).count("1")
        else:
            value = {
                "add": lambda: get(1) + get(2), "sub": lambda: get(1) - get(2), "mul": lambda: get(1) * get(2),
                "and": lambda: get(1) & get(2), "or": lambda: get(1) | get(2), "xor": lambda: get(1) ^ get(2),
            }[opcode]()  # fmt: skip
        self.set(scope, o[0], value & mask)


__all__ = ["Directive", "Memory", "Thread", "place_variables"]

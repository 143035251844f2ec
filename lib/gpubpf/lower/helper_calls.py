"""Lower helper calls, as the helper table specifies (`gpubpf.ebpf.helpers`)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.helpers import HELPERS, ArgumentKind
from gpubpf.ebpf.maps import (
    DISCARDED,
    LONG_PRINT_ARGUMENTS,
    LONG_PRINTS,
    PRINT_ARGUMENTS,
    PRINTS,
    SHAPED,
    SHARDS_SHIFT,
    MapDefinition,
)
from gpubpf.lower import storage
from gpubpf.lower.emitter import AXES, NOT_NULL, Emitter
from gpubpf.verify.values import CheckedCall, value_alignment


def format_number(text: str) -> int:
    """Return the number that identifies a printed text in the print ring buffer."""
    return zlib.crc32(text.encode())


class HelperCalls(Emitter):
    """Emits helper calls."""

    def helper(self, call: CheckedCall) -> str:
        """Emit a helper call, as the helper table specifies, and return its result."""
        helper = HELPERS[call.helper]
        use = helper.native if self.checked.function.point in b.HOST_POINTS else helper.device
        assert use is not None
        return LOWERINGS[use.lowering](self, call, use.operand)

    def index(self, call: CheckedCall, operand: str) -> str:
        for register, axis in zip(HELPERS[call.helper].registers[ArgumentKind.RESULT], AXES, strict=True):
            value = self.special(f"{operand}.{axis}")
            kind, pointer = self.source(register, call)
            self.emit(f"store i64 {value}, {kind} {pointer}, align {1 if kind == 'ptr' else 8}")
        return "0"

    def lookup(self, call: CheckedCall, operand: str) -> str:
        definition = self.map(call.map)
        if definition.kind == "param":
            return str(NOT_NULL)  # the address is not used: each access knows its parameter
        if definition.kind == "hash":
            return self.hash_call("find", call, definition)
        return self.element(call, definition)

    def element(self, call: CheckedCall, definition: MapDefinition) -> str:
        """Return the address of an array element; 0 if the key is out of bounds."""
        kind, pointer = self.source(2, call)
        key = self.value(f"load i32, {kind} {pointer}, align {1 if kind == 'ptr' else 4}")
        inside = self.value(f"icmp ult i32 {key}, {definition.max_entries}")
        base = self.base(definition.name)
        if SHAPED.get(definition.kind, "instance") == "instance":
            address = self.at(base, key, definition.stride)
            return self.value(f"select i1 {inside}, i64 {address}, i64 0")
        capacity = self.argument("map_capacity", f"capacity_{definition.name}", map=definition.name)
        if definition.kind == "site_array" and "shard" in self.backend.given:
            return self.in_shard(definition, base, key, capacity)
        if definition.kind == "site_array":
            return self.at(base, self.of_site(key, capacity), definition.value_size)
        # A unit beyond the capacity gets the element after the last one. This needs no branch and stays inside the map.
        unit = self.number(SHAPED[definition.kind], "i32")
        room = self.low(capacity)
        fits = self.value(f"icmp ult i32 {unit}, {room}")
        if definition.max_entries == 1:
            index = self.wide(self.value(f"select i1 {fits}, i32 {unit}, i32 {room}"))
        else:
            row = self.value(f"select i1 {fits}, i32 {key}, i32 {definition.max_entries}")
            column = self.value(f"select i1 {fits}, i32 {unit}, i32 0")
            index = self.value(f"add nuw i64 {self.product(row, room)}, {self.wide(column)}")
        offset = self.value(f"mul i64 {index}, {definition.value_size}")
        address = self.value(f"add nuw i64 {base}, {offset}")
        return self.value(f"select i1 {inside}, i64 {address}, i64 0")

    def at(self, base: str, index: str, size: int) -> str:
        """Return the address of element `index`, an i32. The address is never 0: maps are not at address 0, and do not wrap around."""
        if "element" in self.backend.calls:
            address = self.value(self.call("element", f"i32 {index}", f"i32 {size}", f"i64 {base}"))
            self.declared.add("declare void @llvm.assume(i1)")
            self.emit(f"call void @llvm.assume(i1 {self.value(f'icmp ne i64 {address}, 0')})")
            return address
        offset = self.value(f"mul i64 {self.wide(index)}, {size}")
        return self.value(f"add nuw i64 {base}, {offset}")

    def product(self, a: str, b: str) -> str:
        """Return the product of two i32 as an i64."""
        if "product" in self.backend.calls:
            return self.value(self.call("product", f"i32 {a}", f"i32 {b}"))
        return self.value(f"mul nuw i64 {self.wide(a)}, {self.wide(b)}")

    def of_site(self, site: str, capacity: str) -> str:
        """Return the index of a site's value in this thread's shard; for a site beyond the capacity, the one after the last value."""
        sites = self.low(capacity)
        mask = self.low(self.value(f"lshr i64 {capacity}, {SHARDS_SHIFT}"))
        shard = self.value(f"and i32 {self.special32('group')}, {mask}")
        row = self.value(f"mul i32 {shard}, {sites}")
        own = self.value(f"add i32 {row}, {site}")
        last = self.value(f"mul i32 {self.value(f'add i32 {mask}, 1')}, {sites}")
        inside = self.value(f"icmp ult i32 {site}, {sites}")
        return self.value(f"select i1 {inside}, i32 {own}, i32 {last}")

    def in_shard(self, definition: MapDefinition, base: str, site: str, capacity: str) -> str:
        """Return the address of a site's value in this thread's shard; for a site beyond the capacity, that after the last value.

        The shard's address is an argument of the program.
        """
        kind, type_ = self.backend.given["shard"]
        size = definition.value_size
        shard = self.argument(kind, f"shard_{definition.name}", type_, map=definition.name, width=size)
        sites = self.low(capacity)
        shards = self.low(self.value(f"lshr i64 {capacity}, {SHARDS_SHIFT}"))
        last = self.value(f"mul i32 {self.value(f'add i32 {shards}, 1')}, {sites}")
        inside = self.value(f"icmp ult i32 {site}, {sites}")
        first = self.value(f"select i1 {inside}, i64 {shard}, i64 {base}")
        index = self.value(f"select i1 {inside}, i32 {site}, i32 {last}")
        return self.value(f"add nuw i64 {first}, {self.value(f'mul nuw i64 {self.wide(index)}, {size}')}")

    def update(self, call: CheckedCall, operand: str) -> str:
        definition = self.map(call.map)
        if definition.kind == "hash":
            return self.hash_call(("update", "insert", "replace")[call.flags], call, definition)
        address = self.element(call, definition)
        there = self.value(f"icmp ne i64 {address}, 0")
        if call.flags == 1:  # BPF_NOEXIST: elements of an array always exist
            return self.value(f"select i1 {there}, i64 -17, i64 -7")
        write, done = self.fresh("write"), self.fresh("done")
        self.emit(f"br i1 {there}, label %{write}, label %{done}")
        self.label(write)
        self.copy(
            (self.backend.pointer, self.memory(address)),
            self.source(3, call),
            definition.value_size,
            value_alignment(definition),
        )
        self.emit(f"br label %{done}")
        self.label(done)
        return self.value(f"select i1 {there}, i64 0, i64 -7")

    def delete(self, call: CheckedCall, operand: str) -> str:
        definition = self.map(call.map)
        if definition.kind != "hash":
            return "-22"  # -EINVAL, as in the kernel
        return self.hash_call("delete", call, definition)

    def hash_call(self, operation: str, call: CheckedCall, definition: MapDefinition) -> str:
        words = []
        kind, pointer = self.source(2, call)
        for at, width in storage.chunks(definition.key_size):
            place = self.value(f"getelementptr i8, {kind} {pointer}, i64 {at}")
            part = self.value(f"load i{8 * width}, {kind} {place}, align {1 if kind == 'ptr' else width}")
            words.append(f"i{8 * width} {part}")
        arguments = [f"i64 {self.base(definition.name)}", *words]
        if operation in ("update", "insert", "replace"):
            kind, pointer = self.source(3, call)
            for at, width in storage.chunks(definition.value_size):
                place = self.value(f"getelementptr i8, {kind} {pointer}, i64 {at}")
                part = self.value(f"load i{8 * width}, {kind} {place}, align {1 if kind == 'ptr' else width}")
                arguments.append(f"i{8 * width} {part}")
        name = f"hash_{operation}_{definition.name}"
        text = storage.hash_function(name, operation, definition, self.backend)
        return self.value(f"call i64 {self.function(name, text)}({', '.join(arguments)})")

    def reserve_room(self, definition: MapDefinition) -> tuple[str, str]:
        """Emit the reservation of a record. Return the address of its header, or 0, and its mark."""
        name = f"ring_{definition.name}"
        text = storage.ring_function(name, definition, self.backend)
        base, sm = self.base(definition.name), self.special32("sm")
        pair = self.value(f"call {{ i64, i32 }} {self.function(name, text)}(i64 {base}, i32 {sm})")
        return (
            self.value(f"extractvalue {{ i64, i32 }} {pair}, 0"),
            self.value(f"extractvalue {{ i64, i32 }} {pair}, 1"),
        )

    def commit(self, header: str, size: int, mark: str) -> None:
        """Emit the store of a record's mark and size. The host sees them only after the payload."""
        pointer = self.memory(header)
        word = self.value(f"or i64 {self.wide(mark)}, {size << 32}")
        self.emit(f"store atomic i64 {word}, {self.backend.pointer} {pointer} release, align 8")

    def record(self, definition: MapDefinition, size: int, fill: Callable[[str], None]) -> str:
        header, mark = self.reserve_room(definition)
        there = self.value(f"icmp ne i64 {header}, 0")
        write, done = self.fresh("write"), self.fresh("done")
        self.emit(f"br i1 {there}, label %{write}, label %{done}")
        self.label(write)
        fill(self.memory(header, 8))
        self.commit(header, size, mark)
        self.emit(f"br label %{done}")
        self.label(done)
        return self.value(f"select i1 {there}, i64 0, i64 -11")

    def output(self, call: CheckedCall, operand: str) -> str:
        source = self.source(HELPERS[call.helper].register(ArgumentKind.RECORD), call)

        def fill(payload: str) -> None:
            self.copy((self.backend.pointer, payload), source, call.size, 8)

        return self.record(self.map(call.map), call.size, fill)

    def reserve(self, call: CheckedCall, operand: str) -> str:
        header, mark = self.reserve_room(self.map(call.map))
        there = self.value(f"icmp ne i64 {header}, 0")
        write, done = self.fresh("write"), self.fresh("done")
        self.emit(f"br i1 {there}, label %{write}, label %{done}")
        self.label(write)
        # The size field keeps the mark until the record is submitted.
        pointer = self.memory(header, 4)
        self.emit(f"store i32 {mark}, {self.backend.pointer} {pointer}, align 4")
        self.emit(f"br label %{done}")
        self.label(done)
        payload = self.value(f"add i64 {header}, 8")
        return self.value(f"select i1 {there}, i64 {payload}, i64 0")

    def submit(self, call: CheckedCall, operand: str, state: int = 0) -> str:
        payload = self.get(1)
        header = self.value(f"add i64 {payload}, -8")
        pointer = self.memory(header, 4)
        mark = self.value(f"load i32, {self.backend.pointer} {pointer}, align 4")
        self.commit(header, call.size | state, mark)
        return "0"

    def discard(self, call: CheckedCall, operand: str) -> str:
        return self.submit(call, operand, DISCARDED)

    def print(self, call: CheckedCall, operand: str) -> str:
        conversions = call.text.replace("%%", "").count("%")
        printed = HELPERS[call.helper].registers.get(ArgumentKind.PRINTED, ())
        numbers = [
            register for register in printed if register not in call.pointers
        ]  # the others are already part of the text
        return self.print_text(call.text, [self.get(register) for register in numbers[:conversions]])

    def print_array(self, call: CheckedCall, operand: str) -> str:
        values = []
        for at in call.numbers:
            kind, pointer = self.source(HELPERS[call.helper].register(ArgumentKind.VALUES), call)
            place = self.value(f"getelementptr i8, {kind} {pointer}, i64 {at}")
            values.append(self.value(f"load i64, {kind} {place}, align 1"))
        return self.print_text(call.text, values)

    def print_text(self, text: str, values: Sequence[str] = ()) -> str:
        """Emit a record in the print buffer. Return 0, or -11 (-EAGAIN) if the ring buffer is full."""
        long = any(len(call.numbers) > PRINT_ARGUMENTS for call in self.checked.calls.values())
        number = format_number(text)
        self.formats[number] = text
        values = list(values)
        values += ["0"] * ((LONG_PRINT_ARGUMENTS if long else PRINT_ARGUMENTS) - len(values))

        def fill(payload: str) -> None:
            for at, value in enumerate([str(number), *values]):
                place = self.value(f"getelementptr i8, {self.backend.pointer} {payload}, i64 {8 * at}")
                self.emit(f"store i64 {value}, {self.backend.pointer} {place}, align 8")

        definition = self.map(LONG_PRINTS if long else PRINTS)
        return self.record(definition, definition.value_size, fill)

    def agent_function(self, call: CheckedCall, operand: str) -> str:
        """Emit a call of the agent's C function that replaces a kernel helper, with the same arguments. Return its result."""
        arguments = []
        for register, argument in enumerate(HELPERS[call.helper].arguments, 1):
            if argument.kind is ArgumentKind.BUFFER:
                arguments.append(" ".join(self.source(register, call)))
            else:
                value = str(call.size) if argument.kind is ArgumentKind.SIZE else self.get(register)
                arguments.append(f"i64 {value}")
        address = self.argument("helper", f"helper_{call.helper}", offset=call.helper)
        function = self.value(f"inttoptr i64 {address} to ptr")
        return self.value(f"call i64 {function}({', '.join(arguments)})")

    def error(self, call: CheckedCall, operand: str) -> str:
        """Emit zeros for the buffers, which the kernel also clears when the helper fails. Return the error."""
        for register, argument in enumerate(HELPERS[call.helper].arguments, 1):
            if argument.kind is ArgumentKind.BUFFER:
                kind, pointer = self.source(register, call)
                for at in range(call.size):
                    place = self.value(f"getelementptr i8, {kind} {pointer}, i64 {at}")
                    self.emit(f"store i8 0, {kind} {place}")
        return operand

    def maximum(self, call: CheckedCall, operand: str) -> str:
        helper = HELPERS[call.helper]
        pointer = self.memory(self.get(helper.register(ArgumentKind.CELL)))
        value = self.get(helper.register(ArgumentKind.NUMBER))
        return self.value(
            f"atomicrmw umax {self.backend.pointer} {pointer}, i64 {value} {self.backend.scope} monotonic"
        )

    def logarithm(self, call: CheckedCall, operand: str) -> str:
        self.declared.add("declare i64 @llvm.ctlz.i64(i64, i1)")
        some = self.value(f"or i64 {self.get(1)}, 1")
        return self.value(f"xor i64 63, {self.value(f'call i64 @llvm.ctlz.i64(i64 {some}, i1 true)')}")

    def popcount(self, call: CheckedCall, operand: str) -> str:
        self.declared.add("declare i64 @llvm.ctpop.i64(i64)")
        return self.value(f"call i64 @llvm.ctpop.i64(i64 {self.get(1)})")

    def first(self, call: CheckedCall, operand: str) -> str:
        """Return whether the executing lane is the lowest lane of a mask.

        The code compares the lane's number, not a mask. So ptxas knows that only one lane continues, and does not reduce over the
        lanes before each atomic operation.
        """
        kind, mask = ("i32", self.low(self.get(1))) if self.program.lanes == 32 else ("i64", self.get(1))
        self.declared.add(f"declare {kind} @llvm.cttz.{kind}({kind}, i1)")
        lowest = self.value(f"call {kind} @llvm.cttz.{kind}({kind} {mask}, i1 true)")
        lowest = lowest if kind == "i32" else self.low(lowest)
        lowest = self.value(f"freeze i32 {lowest}")  # an empty mask has no lowest lane: any number is fine
        return self.wide(self.value(f"icmp eq i32 {self.special32('this_lane')}, {lowest}"), 1)

    def uniform(self, call: CheckedCall, operand: str) -> str:
        mask = self.collective("alike", f"i64 {self.get(1)}")
        return self.wide(self.value(f"icmp eq i64 {mask}, {(1 << self.backend.warp) - 1}"), 1)

    def any(self, call: CheckedCall, operand: str) -> str:
        found = self.collective("any", f"i64 {self.get(1)}")
        return self.wide(self.value(f"icmp ne i64 {found}, 0"), 1)

    def keep(self, call: CheckedCall, operand: str) -> str:
        self.emit(self.call("keep", f"i64 {self.get(1)}"))
        return "0"

    def warp(self, call: CheckedCall, operand: str) -> str:
        return self.value(f"lshr i64 {self.in_block('i64')}, {self.warp_shift}")

    def global_warp(self, call: CheckedCall, operand: str) -> str:
        known = self.known("global_warp")
        return self.wide(self.number("warp", "i32") if known is None else known)


# The lowerings, by their names in the helper table. Each gets the call and the operand from the table.
LOWERINGS: Mapping[str, Callable[[HelperCalls, CheckedCall, str], str]] = {
    "lookup": HelperCalls.lookup,
    "update": HelperCalls.update,
    "delete": HelperCalls.delete,
    "print": HelperCalls.print,
    "print_array": HelperCalls.print_array,
    "output": HelperCalls.output,
    "reserve": HelperCalls.reserve,
    "submit": HelperCalls.submit,
    "discard": HelperCalls.discard,
    "function": HelperCalls.agent_function,
    "error": HelperCalls.error,
    "argument": lambda lowering, call, operand: lowering.argument(operand, operand),
    "special": lambda lowering, call, operand: lowering.special(operand),
    "index": HelperCalls.index,
    "lanes": lambda lowering, call, operand: lowering.collective(
        operand,
        *(f"i64 {lowering.get(register)}" for register, _ in enumerate(HELPERS[call.helper].arguments, 1)),
    ),
    "shuffle": lambda lowering, call, operand: lowering.collective(
        "shuffle", f"i64 {lowering.get(1)}", f"i32 {lowering.low(lowering.get(2))}"
    ),
    "keep": HelperCalls.keep,
    "warp": HelperCalls.warp,
    "warp_size": lambda lowering, call, operand: str(lowering.backend.warp),
    "global_warp": HelperCalls.global_warp,
    "thread": lambda lowering, call, operand: lowering.number("thread", "i64"),
    "maximum": HelperCalls.maximum,
    "logarithm": HelperCalls.logarithm,
    "popcount": HelperCalls.popcount,
    "first": HelperCalls.first,
    "uniform": HelperCalls.uniform,
    "any": HelperCalls.any,
}

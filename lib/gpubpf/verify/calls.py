"""The second gate's checks of one helper call, by the description in the helper table."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import STACK_SIZE
from gpubpf.ebpf.helpers import HELPERS, ArgumentKind, Helper, HelperArgument, Pointer, Use, number_of
from gpubpf.ebpf.maps import CONVERSION, LONG_PRINT_ARGUMENTS, PRINT_ARGUMENTS, MapDefinition, chunks
from gpubpf.errors import VerifyError
from gpubpf.verify import ranges
from gpubpf.verify.ranges import constant, within
from gpubpf.verify.registers import SELDOM, AbstractMachine
from gpubpf.verify.values import CheckedCall, State, Value, frame_bytes, signed64, value_alignment

# At these calls, the program ends or begins again.
_ENDING = frozenset((number_of("bpf_cuda_exit"), SELDOM))
# These helpers change maps, or print. (`bpf_map_lookup_elem` is not one of them: a store through its result is a separate access.)
_EFFECTS = frozenset(
    map(
        number_of,
        (
            *("bpf_map_update_elem", "bpf_map_delete_elem"),
            *("bpf_trace_printk", "bpf_trace_vprintk", "gpu_puts"),
            *("bpf_perf_event_output", "bpf_ringbuf_output"),
            *("bpf_ringbuf_reserve", "bpf_ringbuf_submit", "bpf_ringbuf_discard"),
        ),
    )
)
MAX_PARAM = 1024  # bytes of a GPU_PARAM: every launch passes them
# Arguments of these kinds are checked first; the other checks depend on them.
_FIRST = (
    ArgumentKind.CONTEXT,
    ArgumentKind.MAP,
    ArgumentKind.SIZE,
    ArgumentKind.RECORD_SIZE,
    ArgumentKind.SHORT_RECORD_SIZE,
    ArgumentKind.VALUES_SIZE,
)


class HelperCall:
    """One helper call: checks each argument, then updates the state with the result and the effects."""

    def __init__(self, machine: AbstractMachine, state: State, number: int) -> None:
        self.machine, self.state, self.number = machine, state, number
        self.pointers: dict[int, str] = {}
        self.map: MapDefinition | None = None
        self.key: list[Value] | None = None  # the bytes of the key, if it is on the stack
        self.size = self.flags = self.values_size = 0
        self.numbers: tuple[int, ...] = ()  # offsets of the numbers in an array of printed values
        self.text = ""
        self.strings: dict[int, str] = {}  # the strings of %s conversions, by the conversion's number

    def reject(self, what: str, remedy: str) -> VerifyError:
        return self.machine.reject(self.state.pc, what, remedy)

    def run(self) -> None:
        self.helper, self.use = self._find()
        self.name = self.helper.name
        arguments = sorted(enumerate(self.helper.arguments, 1), key=lambda one: one[1].kind not in _FIRST)
        for register, argument in arguments:
            _CHECKS[argument.kind](self, register, argument)
        if self.strings:
            self.text = self._with_strings()
        result = self._result(self.helper.result_in(self.machine.program.lanes))
        state = self.state
        if self.number in _ENDING:
            for held, _ in state.held.values():
                raise self.reject(
                    f"calls {self.name} while the record reserved in {held} is held",
                    "submit or discard it before",
                )
        if self.number == SELDOM and state.effect is not None:
            raise self.reject(
                f"calls {self.name} after instruction {state.effect} changed memory, and may begin again here",
                f"call {self.name} before",
            )
        if self.number in _EFFECTS:
            self.machine.note_effect(state)
        place = (state.chain, state.pc)
        name = self.map.name if self.map else ""
        call = CheckedCall(self.number, name, self.pointers, self.size, self.flags, self.text, self.numbers)
        if self.machine.calls.setdefault(place, call) != call:
            raise self.machine.differs(
                state.pc,
                f"calls {self.name} with different maps, sizes or texts on different paths",
                "write the call once in each branch",
            )
        state.registers[0] = result
        state.registers[1:6] = [None] * 5

    def _find(self) -> tuple[Helper, Use]:
        """Return the helper, and its use by programs on this side (host or device)."""
        helper = HELPERS.get(self.number)
        if self.number == b.POISON:
            raise self.reject(
                "uses a member or type that this kernel does not have",
                "test that with bpf_core_field_exists first",
            )
        name = helper.name if helper is not None else f"helper number {self.number}"
        if self.machine.function.point in b.HOST_POINTS:
            if helper is None or helper.native is None:
                raise self.reject(f"{name} exists only in the kernel", "run as root")
            return helper, helper.native
        if helper is None or helper.device is None:
            instead = f"use {helper.instead}" if helper is not None and helper.instead else ""
            raise self.reject(
                f"{name} does not exist on a GPU", instead or "see gpubpf.h for the helpers that do"
            )
        if helper.device.points and self.machine.function.point not in helper.device.points:
            allowed = ", ".join(f"struct gpu_{point}" for point in helper.device.points)
            raise self.reject(f"{name} does not work at this point", f"call it in a program with a {allowed}")
        return helper, helper.device

    def _result(self, result: tuple[int, int] | Pointer) -> Value:
        if result is Pointer.VALUE:
            return self._value_found()
        if result is Pointer.RECORD:
            assert self.map is not None
            number = self.machine.new_id()
            self.state.held[number] = (self.map.name, self.state.pc)
            return Value("record", constant(0), self.size, number, True)
        return Value("number", within(*result))

    # Arguments

    def _context(self, register: int, argument: HelperArgument) -> None:
        value = self._argument(register)
        if value.kind != "context" and (value.kind != "number" or value.range.constant != 0):
            raise self.reject(f"{self.name}: its argument {argument.name} is not the context", "pass ctx")

    def _map(self, register: int, argument: HelperArgument) -> None:
        value, kinds = self._argument(register), self.use.maps
        if value.kind != "map":
            raise self.reject(f"{self.name} is given no map", "use the map's methods")
        definition = self.machine.program.maps[str(value.object)]
        if definition.kind not in kinds and self.machine.function.point not in b.DEVICE_POINTS:
            raise self.reject(
                f"map {definition.name} exists only in the kernel",
                "declare it with GPU_SHARED_ARRAY, or run as root",
            )
        if definition.kind not in kinds:
            raise self.reject(
                f"{self.name} does not work on map {definition.name} of kind {definition.kind}",
                f"use a map of kind {', '.join(kinds)}",
            )
        if definition.kind == "param" and definition.value_size > MAX_PARAM:
            raise self.reject(
                f"parameter {definition.name} has {definition.value_size} bytes (at most {MAX_PARAM})",
                "make it smaller, or use an array",
            )
        if definition.constant and self.number in _EFFECTS:
            raise self._writes_constant(definition)
        self.map = definition

    def _number(self, register: int, argument: HelperArgument) -> None:
        what = f"{self.name}: its argument {argument.name} is an address"
        self.machine.number(self.state, self._argument(register), what)

    def _no_flags(self, register: int, argument: HelperArgument) -> None:
        if self._argument(register).range.constant != 0:
            raise self.reject(f"{self.name} with {argument.name}", "pass 0")

    def _update_flags(self, register: int, argument: HelperArgument) -> None:
        self.flags = self._constant(register, "flag")
        if self.flags not in (0, 1, 2):
            raise self.reject(
                f"{self.name} with {argument.name} {self.flags}", "use BPF_ANY, BPF_NOEXIST or BPF_EXIST"
            )

    def _key(self, register: int, argument: HelperArgument) -> None:
        assert self.map is not None
        self.key = self._memory(register, self.map.key_size, "key")

    def _value(self, register: int, argument: HelperArgument) -> None:
        assert self.map is not None
        self._memory(register, self.map.value_size, "value")

    def _size(self, register: int, argument: HelperArgument) -> None:
        self.size = self._constant(register, "size")
        if not argument.least <= self.size <= argument.most:
            bounds = (
                f"{argument.least} to {argument.most}" if argument.least < argument.most else argument.most
            )
            raise self.reject(f"{self.name} of {self.size} bytes", f"pass a size of {bounds} bytes")

    def _record_size(self, register: int, argument: HelperArgument) -> None:
        """Check the size of a record. All records of a ring buffer have the same size, so that its stride is constant."""
        assert self.map is not None
        size = self._constant(register, "size")
        if not argument.least <= size <= argument.most:
            bounds = f"{argument.least} to {argument.most}"
            raise self.reject(f"a record of {size} bytes ({bounds})", "make it smaller")
        whole = self.map.value_size
        if not whole and not self.machine.sizing:
            raise self.reject(
                f"ring buffer {self.map.name} has no record size",
                "declare it with GPU_RINGBUF(name, type, pages)",
            )
        if whole and size != whole and not (argument.kind is ArgumentKind.SHORT_RECORD_SIZE and size < whole):
            raise self.reject(
                f"a record of {size} bytes in ring buffer {self.map.name}, whose records have {whole}",
                f"put one type of record into it, and name that type in GPU_RINGBUF({self.map.name}, type, pages)",
            )
        self.size = size

    def _record(self, register: int, argument: HelperArgument) -> None:
        self._memory(register, self.size, "record")

    def _reserved(self, register: int, argument: HelperArgument) -> None:
        value = self._argument(register)
        if (
            value.kind != "record"
            or value.nullable
            or value.range.constant != 0
            or value.id not in self.state.held
        ):
            raise self.reject(
                f"{self.name} of memory that is not a reserved record",
                "pass the result of ringbuf_reserve, tested against NULL, once",
            )
        name, _ = self.state.held.pop(value.id)
        self.map = self.machine.program.maps[name]
        self.size = int(value.object or 0)
        state = self.state
        state.registers = [None if _is_record(v, value.id) else v for v in state.registers]
        state.returns = [tuple(None if _is_record(v, value.id) else v for v in s) for s in state.returns]
        for stack in state.stacks:
            for at in [at for at, (v, _, _) in stack.items() if _is_record(v, value.id)]:
                del stack[at]

    def _buffer(self, register: int, argument: HelperArgument) -> None:
        value = self._argument(register)
        if value.kind == "stack" and value.range.constant is not None:
            begin = self.machine.stack_bounds(self.state.pc, value.range, self.size)
            for k in range(self.size):
                self.machine.stack_store(
                    self.state, int(value.object or 0), begin + k, 1, Value("number", within(0, 255))
                )
            self.pointers[register] = "stack"
        elif value.kind == "value" and not value.nullable:
            self._written(register, value, self.size, argument.name, aligned=False)
        else:
            raise self.reject(f"{self.name}: its argument {argument.name} is not a buffer", "pass an array")

    def _result_address(self, register: int, argument: HelperArgument) -> None:
        value = self._argument(register)
        if value.kind not in ("stack", "value", "record") or value.nullable:
            raise self.reject(
                f"{self.name}: its argument {argument.name} is not the address of writable memory",
                "pass &variable of a u64",
            )
        if value.kind == "stack":
            if value.range.constant is None:
                raise self.reject(
                    f"{self.name}: its argument {argument.name} is not constant", "unroll the loop"
                )
            at = self.machine.stack_bounds(self.state.pc, value.range, 8, True)
            self.machine.stack_store(
                self.state, int(value.object or 0), at, 8, Value("number", within(0, ranges.U32))
            )
            self.pointers[register] = "stack"
        else:
            self._written(register, value, 8, f"argument {argument.name}")

    def _cell(self, register: int, argument: HelperArgument) -> None:
        value = self._argument(register)
        kept = value.kind == "value" and self.machine.program.maps[str(value.object)].kind != "param"
        if not kept or value.nullable:
            raise self.reject(
                f"{self.name}: its argument {argument.name} is not in the value of a map",
                "pass the result of lookup, tested against NULL",
            )
        self._written(register, value, 8, argument.name)

    def _text(self, register: int, argument: HelperArgument) -> None:
        counted = ArgumentKind.SIZE in self.helper.registers
        if not counted:  # the text ends at the first zero byte
            self.size = self._text_length(self._argument(register))
        self.text = self._constant_text(register, self._argument(register), self.size)
        kinds = self.helper.registers
        most = PRINT_ARGUMENTS if ArgumentKind.PRINTED in kinds else LONG_PRINT_ARGUMENTS
        if ArgumentKind.PRINTED not in kinds and ArgumentKind.VALUES not in kinds:
            self.text = self.text.replace("%", "%%")
        elif self._conversions() > most:
            raise self.reject(f"{self.name} with more than {most} values", "print in two calls")

    def _printed(self, register: int, argument: HelperArgument) -> None:
        number = self.helper.registers[ArgumentKind.PRINTED].index(register)
        conversions = [match[3] for match in CONVERSION.finditer(self.text) if match[3] != "%"]
        if conversions[number : number + 1] == ["s"]:
            self.strings[number] = self._string(register, self._argument(register))
            self.pointers[register] = "text"
        elif number < self._conversions():
            self._number(register, argument)

    def _values_size(self, register: int, argument: HelperArgument) -> None:
        self.values_size = self._constant(register, "size of its values")
        if self.values_size % 8 or not argument.least <= self.values_size <= argument.most:
            raise self.reject(
                f"{self.name} with {self.values_size} bytes of values",
                f"pass at most {argument.most // 8} values",
            )

    def _values(self, register: int, argument: HelperArgument) -> None:
        count, array = self._conversions(), self._argument(register)
        if 8 * count > self.values_size:
            raise self.reject(
                f"{self.name} of a text with {count} conversions, but {self.values_size // 8} values",
                "pass a value for each conversion",
            )
        if not count:
            return
        if array.kind != "stack" or array.range.constant is None:
            raise self.reject(
                f"{self.name}: its values are not at a constant place on the stack", "use an array"
            )
        begin = self.machine.stack_bounds(self.state.pc, array.range, 8 * count)
        conversions = [match[3] for match in CONVERSION.finditer(self.text) if match[3] != "%"]
        numbers = []
        for number in range(count):
            value = self.machine.stack_load(self.state, int(array.object or 0), begin + 8 * number, 8)
            if conversions[number : number + 1] == ["s"]:
                self.strings[number] = self._string(register, value)
                continue
            self.machine.number(self.state, value, f"{self.name}: value {number + 1} is an address")
            numbers.append(8 * number)
        self.numbers = tuple(numbers)
        self.pointers[register] = "stack"

    def _string(self, register: int, address: Value) -> str:
        """Return the constant string at an address that a %s conversion prints. `register`: the argument that it belongs to."""
        return self._constant_text(register, address, self._text_length(address))

    def _constant_text(self, register: int, address: Value, size: int) -> str:
        """Return a constant text of at most `size` bytes, on the stack or in a constant map."""
        data = self.machine.constant_bytes(address, size)
        if data is None:
            content = self._memory(register, size, "text", address)
            if content is None or any(byte.range.constant is None for byte in content):
                raise self.reject(f"{self.name} of a text that is not constant", "use a string literal")
            data = bytes(byte.range.constant or 0 for byte in content)
        return data.split(b"\0", 1)[0].decode("utf-8", "replace")

    def _with_strings(self) -> str:
        """Return the text with its %s conversions replaced by their strings."""
        number = -1

        def one(match: re.Match[str]) -> str:
            nonlocal number
            number += match[3] != "%"
            if match[3] != "s":
                return match[0]
            return (f"%{match[1]}s" % self.strings[number]).replace("%", "%%")

        return CONVERSION.sub(one, self.text)

    # Shared by several kinds of argument

    def _conversions(self) -> int:
        return self.text.replace("%%", "").count("%")

    def _argument(self, register: int) -> Value:
        return self.machine.read(self.state, register)

    def _constant(self, register: int, what: str) -> int:
        value = self._argument(register)
        number = value.range.constant if value.kind == "number" else None
        if number is None:
            raise self.reject(f"{self.name} with a {what} that is not constant", f"use a constant {what}")
        return number

    def _memory(
        self, register: int, size: int, what: str, address: Value | None = None
    ) -> list[Value] | None:
        """Check that `size` bytes can be read. Return the bytes if they are on the stack, else None.

        address: the address to check; by default, the value of the argument
        """
        value = address if address is not None else self._argument(register)
        if value.kind not in ("stack", "value", "record") or value.nullable:
            hint = (
                "test it against NULL first"
                if value.nullable
                else "pass the address of a variable on the stack"
            )
            raise self.reject(f"{self.name}: its {what} is not the address of readable memory", hint)
        if value.kind == "stack":
            at = value.range.constant
            if at is None:
                raise self.reject(
                    f"{self.name}: the address of its {what} is not constant", "unroll the loop"
                )
            begin = self.machine.stack_bounds(self.state.pc, value.range, size)
            frame = int(value.object or 0)
            stack = self.state.stacks[frame]
            self.state.reads(frame_bytes(frame, begin, size))
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
        self._check_bounds(register, value, size, what)
        return None

    def _written(self, register: int, value: Value, size: int, what: str, aligned: bool = True) -> None:
        """Check that the helper may write to memory other than the stack, and record the write as an effect that others see."""
        self._check_bounds(register, value, size, what, aligned)
        if value.kind == "value" and (definition := self.machine.program.maps[str(value.object)]).constant:
            raise self._writes_constant(definition)
        self.machine.note_effect(self.state)

    def _writes_constant(self, definition: MapDefinition) -> VerifyError:
        return self.reject(
            f"{self.name} writes to a constant in {definition.name}", "declare the variable without const"
        )

    def _check_bounds(self, register: int, value: Value, size: int, what: str, aligned: bool = True) -> None:
        if value.kind == "value" and self.machine.program.maps[str(value.object)].kind == "param":
            raise self.reject(f"{self.name}: its {what} is in a parameter", "copy it to the stack first")
        limit = (
            int(value.object or 0)
            if value.kind == "record"
            else self.machine.program.maps[str(value.object)].value_size
        )
        if value.range.slo < 0 or value.range.shi + size > limit:
            raise self.reject(
                f"{self.name}: its {what} of {size} bytes reaches beyond the {limit} bytes of the object",
                "pass the address of a large enough variable",
            )
        # The lowering accesses the memory in naturally aligned parts.
        step = max(width for _, width in chunks(size)) if aligned else 1
        alignment = (
            8 if value.kind == "record" else value_alignment(self.machine.program.maps[str(value.object)])
        )
        if alignment % step or not value.range.multiple_of(step):
            raise self.reject(f"{self.name}: its {what} is not aligned", "copy it to the stack first")
        self.pointers[register] = "memory"

    def _value_found(self) -> Value:
        """Return the result of a lookup. The result is not nullable if the map certainly has the key."""
        definition, key = self.map, self.key
        assert definition is not None
        address = Value("value", constant(0), definition.name, self.machine.new_id(), True)
        if definition.kind == "site_array":  # sites beyond the capacity share one value
            return address._replace(nullable=False)
        if definition.kind == "hash":
            return address
        if key is None or any(byte.range.constant is None for byte in key):
            if definition.kind == "param":
                raise self.reject("lookup in a parameter with a key that is not constant", "use the key 0")
            return address
        number = int.from_bytes(bytes(byte.range.constant or 0 for byte in key), "little")
        if number < definition.max_entries:
            return address._replace(nullable=False)
        if definition.kind == "param":
            raise self.reject(f"parameter {definition.name} has no key {number}", "use the key 0")
        return address

    def _text_length(self, value: Value) -> int:
        """Return the size in bytes of a text on the stack or in a constant map, including its terminating zero byte."""
        at = value.range.constant
        if value.kind == "value":
            definition = self.machine.program.maps[str(value.object)]
            end = definition.contents.find(b"\0", at or 0) if definition.constant and at is not None else -1
            if at is not None and end >= 0:
                return end + 1 - at
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
        raise self.reject(f"{self.name} of a text without an end", "end it with a zero byte")


_CHECKS: Mapping[ArgumentKind, Callable[[HelperCall, int, HelperArgument], None]] = {
    ArgumentKind.CONTEXT: HelperCall._context,
    ArgumentKind.MAP: HelperCall._map,
    ArgumentKind.KEY: HelperCall._key,
    ArgumentKind.VALUE: HelperCall._value,
    ArgumentKind.UPDATE_FLAGS: HelperCall._update_flags,
    ArgumentKind.NO_FLAGS: HelperCall._no_flags,
    ArgumentKind.NUMBER: HelperCall._number,
    ArgumentKind.SIZE: HelperCall._size,
    ArgumentKind.RECORD: HelperCall._record,
    ArgumentKind.RECORD_SIZE: HelperCall._record_size,
    ArgumentKind.SHORT_RECORD_SIZE: HelperCall._record_size,
    ArgumentKind.RESERVED: HelperCall._reserved,
    ArgumentKind.BUFFER: HelperCall._buffer,
    ArgumentKind.RESULT: HelperCall._result_address,
    ArgumentKind.CELL: HelperCall._cell,
    ArgumentKind.TEXT: HelperCall._text,
    ArgumentKind.PRINTED: HelperCall._printed,
    ArgumentKind.VALUES: HelperCall._values,
    ArgumentKind.VALUES_SIZE: HelperCall._values_size,
}


def _is_record(value: Value | None, number: int) -> bool:
    return value is not None and value.kind == "record" and value.id == number

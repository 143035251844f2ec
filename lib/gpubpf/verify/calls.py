"""One call of a helper, as the second gate judges it."""

from __future__ import annotations

from math import gcd

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf import ranges
from gpubpf.ebpf.bytecode import STACK_SIZE
from gpubpf.ebpf.helpers import HELPERS, KERNEL_ONLY, NATIVE_HELPERS, NUMBERS, OUT_POINTERS, RESULTS
from gpubpf.ebpf.maps import MAX_RECORD, MapDefinition
from gpubpf.ebpf.ranges import ANY, constant, within
from gpubpf.errors import VerifyError
from gpubpf.verify.registers import Machine
from gpubpf.verify.values import Call, State, Value, signed64, value_alignment

MAX_PARAM = 1024  # bytes of a GPU_PARAM: they travel with every launch


class HelperCall:
    """One call of a helper: its arguments checked one by one, its result and effects written to the state."""

    def __init__(self, machine: Machine, state: State, helper: int) -> None:
        self.machine, self.state, self.helper = machine, state, helper
        self.pointers: dict[int, str] = {}
        self.map: MapDefinition | None = None
        self.size = 0
        self.text = ""

    def reject(self, what: str, remedy: str) -> VerifyError:
        return self.machine.reject(self.state.pc, what, remedy)

    def run(self) -> None:
        on_host = self.machine.function.point in b.HOST_POINTS
        helpers = NATIVE_HELPERS if on_host else HELPERS
        if self.helper not in helpers:
            if on_host:
                name = KERNEL_ONLY.get(self.helper, f"number {self.helper}")
                raise self.reject(f"helper {name} exists only in the kernel", "run as root")
            raise self.reject(
                f"helper {self.helper} does not exist on a GPU", "see gpubpf.h for those that do"
            )
        name, kinds = helpers[self.helper]
        self.name = name
        if kinds:
            self.map = self._map(2 if self.helper == 25 else 1, kinds)
        result: Value | None = Value("number", RESULTS.get(self.helper, ANY))
        special = {
            1: self._lookup,
            2: self._update,
            3: self._delete,
            6: self._print,
            16: self._comm,
            25: self._output,
            130: self._output,
            131: self._reserve,
            132: self._submit,
            133: self._submit,
            120: self._namespace,
            123: self._level,
            501: self._print,
            607: self._maximum,
        }.get(self.helper)
        if special is not None:
            result = special() or result
        elif self.helper in OUT_POINTERS:
            for register in (1, 2, 3):
                self._write_u64(register)
        for register in range(1, 1 + NUMBERS.get(self.helper, 0)):
            self.machine.number(self.state, self._argument(register), f"{name} of an address")
        state = self.state
        place = (state.chain, state.pc)
        call = Call(self.helper, self.map.name if self.map else "", self.pointers, self.size, self.text)
        if self.machine.calls.setdefault(place, call) != call:
            raise self.reject(
                f"calls {name} with different maps, sizes or texts on different paths",
                "write the call once in each branch",
            )
        state.registers[0] = result
        state.registers[1:6] = [None] * 5

    def _map(self, register: int, kinds: tuple[str, ...]) -> MapDefinition:
        value = self._argument(register)
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
                f"kinds it works on: {', '.join(kinds)}",
            )
        if definition.kind == "param" and definition.value_size > MAX_PARAM:
            raise self.reject(
                f"parameter {definition.name} has {definition.value_size} bytes (at most {MAX_PARAM})",
                "make it smaller, or use an array",
            )
        return definition

    def _argument(self, register: int) -> Value:
        return self.machine.read(self.state, register)

    def _constant(self, register: int, what: str) -> int:
        value = self._argument(register)
        number = value.range.constant if value.kind == "number" else None
        if number is None:
            raise self.reject(f"{self.name} with a {what} that is not constant", f"use a constant {what}")
        return number

    def _memory(self, register: int, size: int, what: str) -> list[Value] | None:
        """Checks that `size` bytes can be read; on the stack returns them, byte by byte."""
        value = self._argument(register)
        if value.kind not in ("stack", "value", "record") or value.nullable:
            hint = (
                "test it against NULL first"
                if value.nullable
                else "pass the address of a variable on the stack"
            )
            raise self.reject(f"{self.name}: its {what} is no address of readable memory", hint)
        if value.kind == "stack":
            at = value.range.constant
            if at is None:
                raise self.reject(
                    f"{self.name}: the address of its {what} is not constant", "unroll the loop"
                )
            begin = self.machine.stack_bounds(self.state.pc, value.range, size)
            stack = self.state.stacks[int(value.object or 0)]
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
        self._outside(register, value, size, what)
        return None

    def _outside(self, register: int, value: Value, size: int, what: str, aligned: bool = True) -> None:
        if value.kind == "value" and self.machine.program.maps[str(value.object)].kind == "param":
            raise self.reject(f"{self.name}: its {what} lies in a parameter", "copy it to the stack first")
        limit = (
            int(value.object or 0)
            if value.kind == "record"
            else self.machine.program.maps[str(value.object)].value_size
        )
        if value.range.slo < 0 or value.range.shi + size > limit:
            raise self.reject(
                f"{self.name}: its {what} of {size} bytes reaches beyond the {limit} bytes there",
                "pass the address of a large enough variable",
            )
        step = gcd(size, 8) if aligned else 1
        alignment = (
            8 if value.kind == "record" else value_alignment(self.machine.program.maps[str(value.object)])
        )
        if alignment % step or not value.range.multiple_of(step & -step):
            raise self.reject(f"{self.name}: its {what} is not aligned", "copy it to the stack first")
        self.pointers[register] = "memory"

    def _write_u64(self, register: int) -> None:
        value = self._argument(register)
        if value.kind not in ("stack", "value", "record") or value.nullable:
            raise self.reject(
                f"{self.name}: argument {register} is no address to write to", "pass &variable of a u64"
            )
        if value.kind == "stack":
            if value.range.constant is None:
                raise self.reject(f"{self.name}: argument {register} is not constant", "unroll the loop")
            at = self.machine.stack_bounds(self.state.pc, value.range, 8, True)
            self.machine.stack_store(
                self.state, int(value.object or 0), at, 8, Value("number", within(0, ranges.U32))
            )
            self.pointers[register] = "stack"
        else:
            self._outside(register, value, 8, f"argument {register}")

    def _lookup(self) -> Value:
        definition = self.map
        assert definition is not None
        key = self._memory(2, definition.key_size, "key")
        address = Value("value", constant(0), definition.name, self.machine.new_id(), True)
        if definition.kind == "site_array":  # what is beyond the last site has a value too
            return address._replace(nullable=False)
        if definition.kind == "hash" or key is None:
            if definition.kind == "param":
                raise self.reject("lookup in a parameter with a key that is not constant", "use the key 0")
            return address
        number = 0
        for k, byte in enumerate(key):
            if byte.range.constant is None:
                if definition.kind == "param":
                    raise self.reject(
                        "lookup in a parameter with a key that is not constant", "use the key 0"
                    )
                return address
            number |= byte.range.constant << 8 * k
        if number < definition.max_entries:
            return address._replace(nullable=False)
        if definition.kind == "param":
            raise self.reject(f"parameter {definition.name} has no key {number}", "use the key 0")
        return address

    def _update(self) -> None:
        definition = self.map
        assert definition is not None
        self._memory(2, definition.key_size, "key")
        self._memory(3, definition.value_size, "value")
        flags = self._constant(4, "flag")
        if flags not in (0, 1, 2):
            raise self.reject(f"update with flags {flags}", "use BPF_ANY, BPF_NOEXIST or BPF_EXIST")
        self.size = flags

    def _delete(self) -> None:
        assert self.map is not None
        self._memory(2, self.map.key_size, "key")

    def _comm(self) -> None:
        self.size = self._constant(2, "size")
        if not 0 < self.size <= 64:
            raise self.reject(f"{self.name} into {self.size} bytes", "16 bytes hold every name")
        self._buffer(1)

    def _namespace(self) -> None:
        for register in (1, 2):
            self.machine.number(self.state, self._argument(register), "a namespace that is an address")
        self.size = self._constant(4, "size")
        if self.size != 8:
            raise self.reject(f"{self.name} into {self.size} bytes", "pass a struct bpf_pidns_info")
        self._buffer(3)

    def _buffer(self, register: int) -> None:
        """An argument that points to `size` bytes which the helper fills."""
        value = self._argument(register)
        if value.kind == "stack" and value.range.constant is not None:
            begin = self.machine.stack_bounds(self.state.pc, value.range, self.size)
            for k in range(self.size):
                self.machine.stack_store(
                    self.state, int(value.object or 0), begin + k, 1, Value("number", within(0, 255))
                )
            self.pointers[register] = "stack"
        elif value.kind == "value" and not value.nullable:
            self._outside(register, value, self.size, "buffer", aligned=False)
        else:
            raise self.reject(f"{self.name}: argument {register} is no buffer", "pass an array")

    def _level(self) -> None:
        self.machine.number(self.state, self._argument(1), "a level that is an address")

    def _output(self) -> None:
        perf = self.helper == 25
        if perf:
            if self._argument(1).kind != "context":
                raise self.reject(f"{self.name}: its first argument is not the context", "pass ctx")
            self.machine.number(self.state, self._argument(3), "flags that are an address")
        else:
            self.machine.number(self.state, self._argument(4), "flags that are an address")
        self.size = self._record_size(5 if perf else 3, perf)
        self._memory(4 if perf else 2, self.size, "record")

    def _maximum(self) -> None:
        value = self._argument(1)
        kept = value.kind == "value" and self.machine.program.maps[str(value.object)].kind != "param"
        if not kept or value.nullable:
            raise self.reject(
                f"{self.name}: its cell is no value of a map", "pass what lookup gave, tested against NULL"
            )
        self._outside(1, value, 8, "cell")
        self.machine.number(self.state, self._argument(2), "the maximum of an address")

    def _record_size(self, register: int, shorter: bool = False) -> int:
        """All records of a ring have one size, so that it has one stride; perf's may be `shorter`."""
        assert self.map is not None
        size = self._constant(register, "size")
        if not 0 < size <= MAX_RECORD:
            raise self.reject(f"a record of {size} bytes (1 to {MAX_RECORD})", "make it smaller")
        whole = self.map.value_size
        if size != whole and not (shorter and size < whole):
            raise self.reject(
                f"a record of {size} bytes in ring {self.map.name}, whose records have {whole}",
                f"put one type of records into it, and name that in GPU_RINGBUF({self.map.name}, type, pages)",
            )
        return size

    def _reserve(self) -> Value:
        assert self.map is not None
        self.size = self._record_size(2)
        if self._argument(3).range.constant != 0:
            raise self.reject("ringbuf_reserve with flags", "pass 0")
        number = self.machine.new_id()
        self.state.held[number] = (self.map.name, self.state.pc)
        return Value("record", constant(0), self.size, number, True)

    def _submit(self) -> None:
        value = self._argument(1)
        if (
            value.kind != "record"
            or value.nullable
            or value.range.constant != 0
            or value.id not in self.state.held
        ):
            raise self.reject(
                f"{self.name} of what is no reserved record",
                "pass what ringbuf_reserve gave, tested against NULL, once",
            )
        self.machine.number(self.state, self._argument(2), "flags that are an address")
        name, _ = self.state.held.pop(value.id)
        self.map = self.machine.program.maps[name]
        self.size = int(value.object or 0)
        state = self.state
        state.registers = [None if _is_record(v, value.id) else v for v in state.registers]
        state.returns = [tuple(None if _is_record(v, value.id) else v for v in s) for s in state.returns]
        for stack in state.stacks:
            for at in [at for at, (v, _, _) in stack.items() if _is_record(v, value.id)]:
                del stack[at]

    def _print(self) -> None:
        # puts takes no length: its text ends at the first zero byte.
        self.size = self._constant(2, "size") if self.helper == 6 else self._text_length()
        if not 0 < self.size <= STACK_SIZE:
            raise self.reject(f"{self.name} of {self.size} bytes", "print shorter texts")
        content = self._memory(1, self.size, "text")
        if content is None or any(byte.range.constant is None for byte in content):
            raise self.reject(f"{self.name} of a text that is not constant", "use a string literal")
        data = bytes(byte.range.constant or 0 for byte in content)
        self.text = data.split(b"\0", 1)[0].decode("utf-8", "replace")
        if self.helper == 6:
            conversions = self.text.replace("%%", "").count("%")
            if conversions > 3:
                raise self.reject("trace_printk with more than three values", "print in two calls")
            for register in range(3, 3 + conversions):
                self.machine.number(self.state, self._argument(register), "prints an address")
        elif "%" in self.text:
            self.text = self.text.replace("%", "%%")

    def _text_length(self) -> int:
        """Bytes of the constant text on the stack that r1 points to, with the zero byte at its end."""
        value = self._argument(1)
        at = value.range.constant
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
        raise self.reject(f"{self.name} of a text without end", "end it with a zero byte")


def _is_record(value: Value | None, number: int) -> bool:
    return value is not None and value.kind == "record" and value.id == number

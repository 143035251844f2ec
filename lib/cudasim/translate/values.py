"""Translate operands to C expressions. Every value is a bit pattern in an unsigned integer; predicates are 0 or 1."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from gpubpf.errors import PtxError
from gpubpf.ptx.module import Address, Immediate, Name, Not, Operand, PtxInstruction, Vector, type_size

from .scope import Names, Register, Scope

FLOATS = {"f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "tf32"}
SIGNED = {"s8", "s16", "s32", "s64"}

_AXES = {"x": 0, "y": 1, "z": 2, "w": 3, "r": 0, "g": 1, "b": 2, "a": 3}
_PER_AXIS = {
    "%tid": "w->tid[{0}][l]",
    "%ntid": "w->ntid[{0}]",
    "%ctaid": "w->ctaid[{0}]",
    "%nctaid": "w->nctaid[{0}]",
    "%clusterid": "(w->ctaid[{0}] / w->cluster_nctaid[{0}])",
    "%nclusterid": "(w->nctaid[{0}] / w->cluster_nctaid[{0}])",
    "%cluster_ctaid": "(w->ctaid[{0}] % w->cluster_nctaid[{0}])",
    "%cluster_nctaid": "w->cluster_nctaid[{0}]",
}
_SPECIAL = {
    "%laneid": "l",
    "%warpid": "w->warpid",
    "%nwarpid": "w->nwarpid",
    "%smid": "w->smid",
    "%nsmid": "w->nsmid",
    "%gridid": "w->gridid",
    "%lanemask_eq": "(1u << l)",
    "%lanemask_lt": "((1u << l) - 1)",
    "%lanemask_le": "((2u << l) - 1)",
    "%lanemask_gt": "~((2u << l) - 1)",
    "%lanemask_ge": "~((1u << l) - 1)",
    "%dynamic_smem_size": "w->dynamic_shared",
    "%total_smem_size": "w->total_shared",
    "%aggr_smem_size": "w->total_shared",
    "%cluster_ctarank": "(w->shared_at >> CS_RANK_SHIFT)",
    "%cluster_nctarank": "(w->cluster_nctaid[0] * w->cluster_nctaid[1] * w->cluster_nctaid[2])",
    "%is_explicit_cluster": "w->explicit_cluster",
    "%envreg1": "(u32)(w->workspace >> 32)",
    "%envreg2": "(u32)w->workspace",
    "%current_graph_exec": "0ull",
    "%sanitizer_userdata64": "w->userdata",  # patches.py uses this register and the next one
    "%sanitizer_pc64": "w->first_pc",
}
CLOCKS = {
    "%clock": "(u32)now",
    "%clock_hi": "(u32)(now >> 32)",
    "%clock64": "now",
    "%globaltimer": "now",
    "%globaltimer_lo": "(u32)now",
    "%globaltimer_hi": "(u32)(now >> 32)",
}
RESERVED_SHARED = 1024  # bytes at the beginning of a block's shared memory, if a kernel uses them


def _special_widths(name: str) -> tuple[int, ...]:
    """Return the sizes, in bytes, of the types with which mov can read a special register.

    The oldest special registers have several sizes, because their size changed between versions of PTX.
    """
    base = name.partition(".")[0]
    if base in ("%tid", "%ntid", "%ctaid", "%nctaid"):
        return (2, 4)
    if base == "%gridid":
        return (2, 4, 8)
    return (8,) if base.endswith("64") or base in ("%globaltimer", "%current_graph_exec") else (4,)


# The instructions that take registers which are wider than the type.
_WIDER = {"cvt", "ld", "ldu", "st", "suld", "sust"}


class Unsupported(PtxError):
    """The embedded device does not support an instruction."""


@dataclass(slots=True)
class Code:
    """One translated instruction of a block's straight-line part."""

    text: str = ""
    uses: set[Register] = field(default_factory=set)
    defs: set[Register] = field(default_factory=set)
    before: str = ""  # executed once for the warp, before the lane loop
    whole: set[Register] = field(default_factory=set)  # `before` reads these from the frame
    alone: bool = False  # needs its own lane loop: all lanes execute this before any lane continues
    writes_shared: bool = False
    reads_shared: bool = False
    memory: bool = False
    rematerializable: bool = False  # a compiler may compute its result again at each use
    shared: list[tuple[Register, int, int]] = field(default_factory=list)  # accesses: register, offset, bytes


def size_of(type_name: str) -> int:
    """Return the bytes of a type; 0 for a predicate. Raises ValueError for an unknown type."""
    if type_name in ("u16x2", "s16x2", "f32x2"):
        return 8 if type_name == "f32x2" else 4
    try:
        return 0 if type_name == "pred" else type_size(type_name)
    except PtxError as error:
        raise ValueError(str(error)) from None


def c_type(width: int) -> str:
    return f"u{width * 8}" if width else "u8"


def constant(value: int, width: int) -> str:
    value &= (1 << (8 * width)) - 1
    if width == 16:
        return f"((u128){value >> 64:#x}ull << 64 | {value & (1 << 64) - 1:#x}ull)"
    return f"{value:#x}ull" if width == 8 else f"{value:#x}u"


def half_bits(value: float) -> int:
    try:
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    except OverflowError:
        return 0xFC00 if value < 0 else 0x7C00


def single_bits(value: float) -> int:
    try:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    except OverflowError:
        return 0xFF800000 if value < 0 else 0x7F800000


def immediate_bits(operand: Immediate, type_name: str) -> int:
    """Return the bit pattern of a literal as a `type_name` (PTX ISA 4.5)."""
    text = operand.text.lstrip("+-")
    if text[:2] in ("0f", "0F", "0d", "0D"):
        width, bits = (4 if text[1] in "fF" else 8), int(text[2:], 16)
        # ptxas does not convert `0f…` to a double.
        if width <= size_of(type_name) or (width == 4 and type_name not in FLOATS):
            return bits ^ (operand.text.startswith("-") << (width * 8 - 1))
    elif not operand.is_float and type_name not in ("f32", "f64"):
        return operand.integer
    value = operand.real
    if type_name not in FLOATS:
        type_name = "f64" if size_of(type_name) == 8 else "f32"
    if type_name == "f64":
        return int(struct.unpack("<Q", struct.pack("<d", value))[0])
    if type_name in ("f32", "tf32"):
        return single_bits(value)
    if type_name == "f16":
        return half_bits(value)
    return single_bits(value) >> 16


class Values:
    """Translates the operands of one instruction to C, and records in `code` what it reads and writes."""

    def __init__(
        self, names: Names, functions: dict[str, int], virtual: bool = False, first_line: int = 0
    ) -> None:
        self.names = names
        self.first_line = first_line  # the line of the function in the PTX text
        self.version = (9, 0)  # of PTX in the module
        self.functions = functions
        self.virtual = virtual  # on the virtual clock
        self.elapsed = 0  # virtual clock: instructions of the block before this one
        self.injected = False  # virtual clock: whether the injector added this instruction
        self.cost = 1  # virtual clock: ns of this instruction; 0 if the block's time has already been added
        self.constants: dict[Register, Immediate] = {}  # registers that always have one value
        self.code = Code()
        self.scope: Scope = names.root
        self.instruction = PtxInstruction("")
        self.address_taken: set[int] = set()
        self.variables: set[int] = set()
        self.shared_variables: set[int] = set()
        self.reserved_shared = False
        self.helpers: dict[str, str] = {}  # C functions that several instructions share, by name
        self.stack = False  # whether the function allocates local memory at run time
        self._based: tuple[Register, int] | None = None  # register and offset of the last address
        self.local_parameters: dict[str, int] = {}  # parameters of a function that live in local memory

    def begin(self, instruction: PtxInstruction, scope: Scope) -> None:
        self.code = Code()
        self.scope = scope
        self.instruction = instruction

    def unsupported(self, why: str = "") -> Unsupported:
        found = self.instruction
        name = found.full_name
        return Unsupported(
            f"PTX line {found.line}: the embedded device does not support {name}{': ' + why if why else ''}"
        )

    def register(self, name: str) -> Register:
        found = self.names.register(self.scope, name)
        if found is None:
            raise PtxError(f"PTX line {self.instruction.line}: {name} is not declared")
        return found

    def read(self, register: Register) -> str:
        if register not in self.code.defs:
            self.code.uses.add(register)
        return register.name

    # -- sources

    def src(self, operand: Operand, type_name: str) -> str:
        """Return a source operand as an unsigned integer with the width of `type_name`."""
        width = size_of(type_name)
        if isinstance(operand, Immediate):
            if type_name == "pred":
                return str(int(bool(operand.integer)))
            return constant(immediate_bits(operand, type_name), width)
        if isinstance(operand, Not):
            return f"!{self.src(operand.operand, 'pred')}"
        if isinstance(operand, Address) and operand.index is not None:
            return f"({c_type(width)}){self.address(operand)}"
        if not isinstance(operand, Name):
            raise self.unsupported(f"operand {operand}")
        found = self.names.register(self.scope, operand.name)  # a register may hide a special register
        if (
            found is None
            and operand.name.startswith("%")
            and (special := self.special(operand.name)) is not None
        ):
            self._check_special(operand.name, type_name)
            return f"({c_type(width)}){special}"
        if found is None and operand.name in _PER_AXIS:
            raise self.unsupported(f"special register {operand.name} is a vector")
        if found is not None:
            if found in self.constants and found.width == width and not operand.offset:
                return constant(self.constants[found].integer, width)
            text = self.read(found)
            if operand.offset:  # `%r1+4`, which ptxas computes with the register's width
                text = f"({c_type(found.width)})({text} + {operand.offset & (1 << 8 * found.width) - 1}ull)"
            self._check_width(found, operand.name, type_name)
            return text if found.width == width else f"({c_type(width)}){text}"
        return f"({c_type(width)})({self.address_of(operand.name, operand.offset)})"

    def _check_width(self, register: Register, name: str, type_name: str) -> None:
        """Refuse a register whose width is not that of the type, as ptxas does; some instructions take wider ones (PTX ISA 9.4.1)."""
        width = size_of(type_name)
        opcode, is_async = self.instruction.opcode, self.instruction.modifiers[:1] == ("async",)
        wider = register.width > width > 0 and opcode in _WIDER and not is_async
        if register.width != width and not wider and opcode != "call":
            raise self.unsupported(
                f"{name} has {8 * register.width or 1} bits, and .{type_name} {8 * width or 1}"
            )

    def check_elements(self, items: tuple[Operand, ...]) -> None:
        """Refuse a vector of registers of several widths."""
        found = [self.names.register(self.scope, item.name) for item in items if isinstance(item, Name)]
        if len({register.width for register in found if register is not None}) > 1:
            raise self.unsupported("the elements of the vector have several widths")

    def require(self, version: tuple[int, int], what: str) -> None:
        """Refuse the instruction if the module's version of PTX is older than the version with `what`."""
        if self.version < version:
            raise self.unsupported(f"{what} requires PTX ISA .version {version[0]}.{version[1]} or later")

    def signed(self, operand: Operand, type_name: str) -> str:
        width = size_of(type_name)
        return f"(s{width * 8}){self.src(operand, type_name)}"

    def integer(self, operand: Operand, type_name: str) -> str:
        """Return a source operand as a C integer with the signedness of the type."""
        return self.signed(operand, type_name) if type_name in SIGNED else self.src(operand, type_name)

    def _check_special(self, name: str, type_name: str) -> None:
        """Refuse a special register where ptxas refuses it. Only mov, with the register's width, and cvt of integers can read it."""
        i = self.instruction
        if name == "%is_explicit_cluster":  # the only predicate
            if i.opcode == "mov" and type_name == "pred":
                return
            raise self.unsupported(f"special register {name} is a predicate")
        if i.opcode not in ("mov", "cvt") or "pred" in i.modifiers or FLOATS & set(i.modifiers):
            raise self.unsupported(f"special register {name}")
        widths = _special_widths(name)
        if size_of(type_name) > max(widths) or (i.opcode == "mov" and size_of(type_name) not in widths):
            raise self.unsupported(f"special register {name} has {8 * max(widths)} bits")

    def special_vector(self, name: str) -> Vector | None:
        """Return the elements of a special register that is a vector, such as %tid; None for other names."""
        if name not in _PER_AXIS or self.names.register(self.scope, name) is not None:
            return None
        return Vector(tuple(Name(f"{name}.{axis}") for axis in "xyzw"))

    def special(self, name: str) -> str | None:
        base, _, axis = name.partition(".")
        if base in _PER_AXIS and axis in _AXES:
            if _AXES[axis] == 3:
                return "0u" if base in ("%tid", "%ctaid", "%cluster_ctaid", "%clusterid") else "1u"
            return _PER_AXIS[base].format(_AXES[axis])
        if name in _SPECIAL:
            return _SPECIAL[name]
        if name in CLOCKS and self.virtual:
            return f"({CLOCKS[name].replace('now', self.now())})"
        if name in CLOCKS:
            self.code.alone = True
            which = "globaltimer" if name.startswith("%globaltimer") else "clock"
            self.code.before = f"const u64 now = api->{which}(w);"
            return CLOCKS[name]
        if name.startswith("%reserved_smem_offset"):
            self.reserved_shared = True
            return (
                f"(w->shared_at + {RESERVED_SHARED}u)" if name.endswith(("_end", "_cap")) else "w->shared_at"
            )
        if name.startswith(("%envreg", "%pm")):
            return "0u"
        return None

    def now(self) -> str:
        """Return the lane's virtual time before this instruction."""
        return f"(w->time[l] + {self.elapsed})" if self.elapsed else "w->time[l]"

    def address_of(self, name: str, offset: int = 0) -> str:
        """Return the address of a variable or function in its state space."""
        plus = f" + {offset}" if offset > 0 else f" - {-offset}" if offset < 0 else ""
        storage = self.names.storage(self.scope, name)
        if storage is None:
            if name in self.functions:
                self.address_taken.add(self.functions[name])
                return f"w->code_base + {16 * (self.functions[name] + 1)}ull{plus}"
            raise PtxError(f"PTX line {self.instruction.line}: {name} is not declared")
        if storage.kind == "global":
            self.variables.add(storage.index)
            return f"w->vars[{storage.index}]{plus}"
        if storage.kind == "shared":
            self.shared_variables.add(storage.index)
            return f"w->shared_offsets[{storage.index}]{plus}"
        if storage.kind == "local":
            return f"w->lsp[l] + local_at_ + {storage.index}u{plus}"
        if storage.name in self.local_parameters:
            return f"w->lsp[l] + local_at_ + {self.local_parameters[storage.name]}u{plus}"
        if storage.kind == "kernel":
            return f"w->param_window + {storage.index}{plus}"
        raise self.unsupported(f"the address of {name}")

    # -- destinations

    def define(self, operand: Operand) -> Register | None:
        """Return the register that the destination operand names; None for the sink `_`."""
        if not isinstance(operand, Name):
            raise self.unsupported(f"destination {operand}")
        if operand.name == "_":
            return None
        return self.register(operand.name)

    def dst(self, operand: Operand, type_name: str, expression: str) -> str:
        """Return an assignment. A register wider than the type is sign- or zero-extended (PTX ISA 9.4.1)."""
        found = self.define(operand)
        if found is None:
            return f"(void)({expression});"
        width = size_of(type_name)
        self._check_width(found, str(operand), type_name)
        self.code.defs.add(found)
        if found.width > width and type_name in SIGNED:
            return f"{found.name} = ({c_type(found.width)})(s{found.width * 8})(s{width * 8})({expression});"
        if found.width > width > 0:
            return f"{found.name} = ({c_type(width)})({expression});"
        return f"{found.name} = ({c_type(found.width)})({expression});"

    # -- addresses

    def address(self, operand: Operand) -> str:
        """Return an address such as `[%rd1+8]` or `array[%r1]` as u64 in its space. Sums of 32 bits wrap."""
        self._based = None
        if not isinstance(operand, Address):
            raise self.unsupported(f"address {operand}")
        if operand.base is None:
            return f"{operand.offset & (1 << 64) - 1}ull"
        if operand.index is not None:
            index = f"(u32){self.read(self.register(operand.index))}"
            bytes_ = f"{index} * {operand.unit}u + {operand.offset & (1 << 32) - 1}u"
            return f"(u64)({self.address_of(operand.base)} + (u32)({bytes_}))"
        found = self.names.register(self.scope, operand.base)
        if found is None:
            return f"(u64)({self.address_of(operand.base, operand.offset)})"
        text = self.read(found)
        offset = operand.offset
        self._based = found, offset
        if not offset:
            return f"(u64){text}"
        sign = "+" if offset > 0 else "-"
        return (
            f"(u64)({text} {sign} {abs(offset)}u)"
            if found.width == 4
            else f"({text} {sign} {abs(offset)}ull)"
        )

    def forget_base(self) -> None:
        """Forget the register and offset of the last address: the next pointer is elsewhere."""
        self._based = None

    def pointer(self, space: str, address: str, size: int, access: str) -> str:
        """Return a host pointer, after checks."""
        self.code.memory = True
        code = ord(access)
        if space == "shared":
            if access == "r":
                self.code.reads_shared = True
            else:
                self.code.writes_shared = True
            mark = ""
            if self._based is not None and self._based[1] >= 0:
                # rendering may replace this by an unchecked access, see render.py
                register, offset = self._based
                self.code.shared.append((register, offset, size))
                mark = f"/*{register.name}+{offset}*/"
            return f"at_shared{mark}(w, {address}, {size}, {code}, {self.place})"
        if space == "local":
            return f"at_local(w, l, {address}, {size}, {code}, {self.place})"
        if space == "generic":
            return f"at_generic(w, {address}, {size}, {code})"
        return f"at_global(w, {address}, {size}, {code})"

    def line(self, space: str = "generic") -> str:
        """Return C that records the line and the time for faults, if the access itself does not pass them."""
        return "" if space in ("shared", "local") else f"w->at = {self.place};"

    @property
    def place(self) -> str:
        """The place of the instruction, for faults."""
        elapsed = self.elapsed + self.cost if self.virtual else 0
        return f"CS_AT({self.line_number(self.instruction.line)}, {elapsed})"

    def line_number(self, line: int) -> str:
        """Return C for a line of the PTX text, counted from the function's first line."""
        return f"LINE({line - self.first_line})"

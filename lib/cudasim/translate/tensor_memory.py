"""Translate tcgen05 to C: tensor memory, and the multiplications that use it (PTX ISA 9.7.16). The engine has both.

Everything is done at once, so waiting never blocks. Warps allocate, load and store together; single threads multiply and copy.
"""

from __future__ import annotations

from gpubpf.ptx.module import Address, Immediate, Name, Operand, PtxInstruction, Vector

from .arithmetic import emits
from .copies import for_each_rank, in_shared
from .memory import space_at
from .tensor import in_lanes, registers_of
from .values import Values

_SHAPES = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}  # registers for .x1
_COPIED = {
    "128x256b": "128X256B",
    "128x128b": "128X128B",
    "64x128b.warpx2::02_13": "64X128B_02_13",
    "64x128b.warpx2::01_23": "64X128B_01_23",
    "32x128b.warpx4": "32X128B",
}
_KINDS = {"f16": "F16", "tf32": "TF32", "f8f6f4": "F8F6F4", "i8": "I8"}
# Kinds with block scaling: how many factors a row has, by what the instruction says.
_FACTORS = {
    "mxf8f6f4": {"": 1, "scale_vec::1X": 1, "block32": 1},
    "mxf4": {"": 2, "scale_vec::2X": 2, "block32": 2},
    "mxf4nvf4": {"scale_vec::2X": 2, "scale_vec::4X": 4, "block32": 2, "block16": 4},
}
TOGETHER = {"alloc", "dealloc", "relinquish_alloc_permit", "ld", "st", "wait::ld", "wait::st"}


def _of_warp(v: Values, operand: Operand) -> str:
    """Return C for an operand or address of 32 bits that is the same in all lanes."""
    if not isinstance(operand, Address):
        return f"({in_lanes(v, operand, 'b32')})[__builtin_ctz(mask)]"
    if operand.coordinates or operand.index is not None:
        raise v.unsupported()
    base = (
        "0u" if operand.base is None else f"({in_lanes(v, Name(operand.base), 'b32')})[__builtin_ctz(mask)]"
    )
    return f"{base} + {operand.offset & 0xFFFFFFFF}u"


def _call(operation: str, *fields: str) -> str:
    """Return a call of the engine, and before it what it gets."""
    given = ", ".join((f".operation = CS_TMEM_{operation}", *fields))
    return f"api->tensor_memory(w, &(const struct cs_tensor_memory){{{given}}})"


def together(v: Values, i: PtxInstruction) -> str:
    """Return C in which a lane takes its results of an instruction that the warp executes together (`v.code.before`)."""
    what, *m = i.modifiers
    v.code.alone = True
    if what in ("wait::ld", "wait::st", "relinquish_alloc_permit"):
        return ""
    line = f"w->line = {v.line_number(i.line)};"
    if what == "dealloc":
        address, columns = i.operands
        freed = f".address = {_of_warp(v, address)}", f".count = {_of_warp(v, columns)}"
        v.code.before = f"{line} {_call('RELEASE', *freed)};"
        return ""
    if what == "alloc":
        place, columns = i.operands
        v.code.memory = v.code.writes_shared = True
        call = _call("ALLOCATE", f".count = {_of_warp(v, columns)}")
        v.code.before = f"{line} const u32 found_ = {call};"
        pointer = v.pointer(space_at(v, i, place), v.address(place), 4, "w")
        return f"if (l == (u32)__builtin_ctz(mask)) {{ {v.line()} ST(u32, {pointer}, found_); }}"
    shape = next(x for x in m if x in _SHAPES)
    count = int(next(x for x in m if x[0] == "x" and x[1:].isdigit())[1:])
    loads = what == "ld"
    operands = list(i.operands)
    data = operands.pop(0 if loads else -1)
    address, *split = operands
    registers = registers_of(v, data, _SHAPES[shape] * count)
    fields = (
        f".address = {_of_warp(v, address)}",
        f".count = {count}",
        f".shape = CS_TMEM_{shape.upper()}",
        f".packed = {int('pack::16b' in m or 'unpack::16b' in m)}",
        *(f".split = {_of_warp(v, operand)}" for operand in split),
        ".registers = t_",
    )
    given = f"u32 t_[{len(registers)}][32];"
    if loads:
        if "red" in m:
            raise v.unsupported()
        v.code.before = f"{line} {given} {_call('LOAD', *fields)};"
        return " ".join(v.dst(o, "b32", f"t_[{k}][l]") for k, o in enumerate(registers))
    taken = " ".join(
        f"__builtin_memcpy(t_[{k}], {in_lanes(v, o, 'b32')}, sizeof *t_);" for k, o in enumerate(registers)
    )
    v.code.before = f"{line} {given} {taken} {_call('STORE', *fields)};"
    return ""


@emits("tcgen05")
def alone(v: Values, i: PtxInstruction) -> str:
    """Translate what single threads execute: multiplications, copies, commits."""
    what, *m = i.modifiers
    v.code.alone = True
    if what.startswith("fence::"):
        return ""
    v.code.memory = v.code.reads_shared = v.code.writes_shared = True
    if what == "commit":
        return _commit(v, i)
    if what == "cp":
        shape = _COPIED.get(".".join(x for x in m if not x.startswith("cta_group")))
        if shape is None:
            raise v.unsupported()
        address, descriptor = i.operands
        fields = [f".shape = CS_TMEM_{shape}", f".a = {v.src(descriptor, 'b64')}"]
        return f"{v.line()} {_call('COPY', _address(v, address), *fields, _pair(m))};"
    if what == "mma" and "sp" not in m:
        return f"{v.line()} {_call('MULTIPLY', *_multiplication(v, i), _pair(m))};"
    raise v.unsupported()


def _address(v: Values, operand: Operand, name: str = "address") -> str:
    found = f".{name} = (u32)({v.address(operand)})"
    v.forget_base()
    return found


def _pair(m: list[str]) -> str:
    return f".pair = {int('cta_group::2' in m)}"


def _multiplication(v: Values, i: PtxInstruction) -> list[str]:
    """Return the fields that describe a multiplication."""
    m = i.modifiers
    kind = next(x for x in m if x.startswith("kind::")).removeprefix("kind::")
    weights = "ws" in m
    d, a, b, descriptor, *rest = i.operands
    in_memory = isinstance(a, Address)
    fields = [
        _address(v, d),
        f".a_in_memory = {int(in_memory)}",
        _address(v, a, "a") if in_memory else f".a = {v.src(a, 'b64')}",
        f".b = {v.src(b, 'b64')}",
        f".descriptor = {v.src(descriptor, 'b32')}",
        f".weights = {int(weights)}",
    ]
    if "block_scale" in m:
        if "cta_group::2" in m:
            raise v.unsupported()
        size = next((x for x in m if x.startswith(("scale_vec", "block16", "block32"))), "")
        factors = _FACTORS[kind][size]
        scale_a, scale_b, keeps = rest
        fields += [
            f".kind = CS_TMEM_{'MXF8F6F4' if kind == 'mxf8f6f4' else 'MXF4'}",
            f".factors = {factors}",
            _address(v, scale_a, "scale_a"),
            _address(v, scale_b, "scale_b"),
        ]
        return [*fields, f".keeps = {v.src(keeps, 'pred')}"]
    fields.append(f".kind = CS_TMEM_{_KINDS[kind]}")
    if isinstance(rest[0], Vector):
        hidden = rest.pop(0)
        assert isinstance(hidden, Vector) and len(hidden.items) == (8 if "cta_group::2" in m else 4)
        fields.append(f".hidden = {{{', '.join(v.src(o, 'b32') for o in hidden.items)}}}")
    fields.append(f".keeps = {v.src(rest.pop(0), 'pred')}")
    if rest:
        if weights or not isinstance(rest[0], Immediate) or not 0 <= rest[0].integer <= 15:
            raise v.unsupported("a mask of columns" if weights else f"scale-input-d {rest[0]}")
        fields.append(f".halvings = {rest[0].integer}")
    return fields


def _commit(v: Values, i: PtxInstruction) -> str:
    """Return C that arrives on an mbarrier, or on those of the blocks that a mask names. What was started before is complete."""
    address, *mask = i.operands
    arrive = "mbar_arrive((u64 *){}, 1, 0);"
    if not mask:
        space = space_at(v, i, address)
        return f"{v.line()} {arrive.format(v.pointer(space, v.address(address), 8, 'a'))}"
    text = f"const u64 b_ = {in_shared(v, address)};"
    v.forget_base()
    pointer = v.pointer("shared", "cs_map_to_rank(b_, r_)", 8, "a")
    return f"{{ {v.line()} {text} {for_each_rank(v, mask[0], arrive.format(pointer))} }}"

"""Translate arithmetic, logic, comparison and conversion instructions to C (PTX ISA 9.7.1–9.7.6, 9.7.8, 9.7.9).

Each function takes the operand renderer and an instruction, and returns C statements for one lane.
"""

from __future__ import annotations

from collections.abc import Callable

from gpubpf.ptx.carry import sets_carry
from gpubpf.ptx.module import Immediate, Name, Operand, Pair, PtxInstruction, Vector
from gpubpf.ptx.opcodes import facts
from gpubpf.record import replace

from .values import SIGNED, Values, c_type, size_of

Emit = Callable[[Values, PtxInstruction], str]
TABLE: dict[str, Emit] = {}

ROUNDING = {"rn": "CS_ROUND_NEAREST", "rm": "CS_ROUND_DOWN", "rp": "CS_ROUND_UP", "rz": "CS_ROUND_ZERO"}
INTEGER_ROUNDING = {
    "rni": "CS_ROUND_NEAREST",
    "rmi": "CS_ROUND_DOWN",
    "rpi": "CS_ROUND_UP",
    "rzi": "CS_ROUND_ZERO",
}
PACKED = {"f16x2": "f16", "bf16x2": "bf16", "u16x2": "u16", "s16x2": "s16"}
_SUFFIX = {"f32": "32", "f64": "64"}
_FLUSH = {"f32": "ftz", "f16": "hftz", "bf16": "bftz"}  # the C functions for .ftz


def emits(*opcodes: str) -> Callable[[Emit], Emit]:
    def register(function: Emit) -> Emit:
        for opcode in opcodes:
            TABLE[opcode] = function
        return function

    return register


def rounding(i: PtxInstruction) -> str | None:
    """Return a rounding mode as C; None for the default, to nearest."""
    for m in i.modifiers:
        if m in ROUNDING and m != "rn":
            return ROUNDING[m]
    return None


def width_bits(type_name: str) -> int:
    return size_of(type_name) * 8


def float_result(v: Values, i: PtxInstruction, expression: str, type_name: str) -> str:
    """Apply .ftz, .sat, .satfinite and .relu to a result."""
    if type_name == "f32":
        if "ftz" in i.modifiers:
            expression = f"ftz({expression})"
        if "sat" in i.modifiers:
            expression = f"sat32({expression})"
    elif type_name == "f64" and "sat" in i.modifiers:
        expression = f"sat64({expression})"
    elif type_name in ("f16", "bf16"):
        h = "h" if type_name == "f16" else "b"
        if "ftz" in i.modifiers:
            expression = f"{h}ftz({expression})"
        if "satfinite" in i.modifiers:
            expression = f"{h}finite({expression})"
        if "sat" in i.modifiers:
            expression = f"{h}sat({expression})"
        if "relu" in i.modifiers:
            expression = f"{h}relu({expression})"
    return expression


def float_source(v: Values, i: PtxInstruction, operand: Operand, type_name: str) -> str:
    text = v.src(operand, type_name)
    if "ftz" in i.modifiers and type_name in _FLUSH and not isinstance(operand, Immediate):
        return f"{_FLUSH[type_name]}({text})"
    return text


def packed_half(i: PtxInstruction, text: str, element: str) -> str:
    """Apply .ftz to half of a packed source."""
    return f"{_FLUSH[element]}({text})" if "ftz" in i.modifiers else text


def halves(
    v: Values, i: PtxInstruction, type_name: str, function: Callable[[list[str]], str], sources: int
) -> str:
    """Translate a packed instruction: apply `function` to the low and to the high halves of the sources."""
    element = PACKED[type_name]
    texts = [v.src(o, type_name) for o in i.operands[1 : 1 + sources]]
    names = [f"x{k}" for k in range(sources)]
    declarations = "".join(f"const u32 {n} = {t}; " for n, t in zip(names, texts, strict=True))
    low, high = (
        function([packed_half(i, f"{half}({n})", element) for n in names]) for half in ("lo16", "hi16")
    )
    return f"{{ {declarations}{v.dst(i.operands[0], 'b32', f'pack16({low}, {high})')} }}"


def float_operation(v: Values, i: PtxInstruction, operation: str, type_name: str, sources: int) -> str:
    """Translate add, sub, mul or fma of any floating-point type."""
    if type_name == "f32x2":
        texts = [v.src(o, type_name) for o in i.operands[1 : 1 + sources]]
        declarations = "".join(f"const u64 x{k} = {text}; " for k, text in enumerate(texts))
        of_ftz = "ftz({})" if "ftz" in i.modifiers else "{}"
        low, high = (
            _single(i, operation, [of_ftz.format(f"(u32)(x{k} >> {at})") for k in range(sources)], "f32")
            for at in (0, 32)
        )
        low, high = (float_result(v, i, x, "f32") for x in (low, high))
        return f"{{ {declarations}{v.dst(i.operands[0], type_name, f'(u32)({low}) | (u64)({high}) << 32')} }}"
    if "f32" in i.modifiers and type_name in ("f16", "bf16"):  # add.f32.f16: its last operand is an f32
        up = f"{type_name}_to_f32"
        texts = [f"{up}({v.src(o, type_name)})" for o in i.operands[1:sources]]
        texts.append(v.src(i.operands[sources], "f32"))
        type_name = "f32"
    elif rounding(i) and type_name not in (*_SUFFIX, "bf16", "bf16x2"):
        raise v.unsupported()
    else:
        texts = [float_source(v, i, o, type_name) for o in i.operands[1 : 1 + sources]]
    if type_name in ("f16x2", "bf16x2"):
        element = PACKED[type_name]
        return halves(
            v,
            i,
            type_name,
            lambda x: float_result(v, i, _of_half(i, operation, x, element), element),
            sources,
        )
    if type_name in ("f16", "bf16"):
        expression = _of_half(i, operation, texts, type_name)
    else:
        expression = _single(i, operation, texts, type_name)
    return v.dst(i.operands[0], type_name, float_result(v, i, expression, type_name))


def _single(i: PtxInstruction, operation: str, sources: list[str], type_name: str) -> str:
    """Return an operation on f32 or f64, in the instruction's rounding mode."""
    suffix = _SUFFIX[type_name]
    mode = rounding(i)
    if mode is None:
        return f"f{operation}{suffix}({', '.join(sources)})"
    values = [f"f{suffix}_({t})" for t in sources] + ["0"] * (3 - len(sources))
    return f"u{suffix}_(api->round{suffix}(CS_F_{operation.upper()}, {mode}, {', '.join(values)}))"


def _of_half(i: PtxInstruction, operation: str, sources: list[str], type_name: str) -> str:
    """Return an operation on 16-bit floats. With .oob, the result is 0 if a factor is the value that tensor copies fill with."""
    letter = "h" if type_name == "f16" else "b"
    if "xorsign" in i.modifiers:
        sizes = ", ".join(f"(u16)({x} & 0x7fff)" for x in sources)
        return f"{letter}xorsign({letter}{operation}({sizes}), {', '.join(sources)})"
    if mode := rounding(i):  # only bf16 has modes
        expression = f"bfma_round({', '.join(sources)}, {mode})"
    else:
        expression = f"{letter}{operation}({', '.join(sources)})"
    if "oob" in i.modifiers:
        return f"(u16)(is_oob({sources[0]}) | is_oob({sources[1]}) ? 0 : {expression})"
    return expression


def is_float(type_name: str) -> bool:
    return type_name in ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2")


# --- add, sub, mul, mad, fma ------------------------------------------------------------------------


def _carry(v: Values) -> str:
    return v.read(v.names.new_register("%cc", 1))


def _set_carry(v: Values, expression: str) -> str:
    found = v.names.new_register("%cc", 1)
    v.code.defs.add(found)
    return f"{found.name} = (u8)({expression});"


def lose_carry(v: Values) -> str:
    """Return the C for the effect of a call on the carry, which the call does not preserve (PTX ISA 9.7.2).

    Hostile mode inverts the carry; otherwise, it stays.
    """
    return _set_carry(v, f"{_carry(v)} ^ w->hostile")


def _sum_with_carry(v: Values, i: PtxInstruction, t: str, a: str, b: str, carry: str | int) -> str:
    """Return the C for a sum of two unsigned numbers and a carry. An instruction with .cc keeps the carry of the sum.

    The PTX ISA has no saturation with a carry (9.7.2), but ptxas 13.0 accepts it. The machine code saturates the sums of addc and
    subc. It saturates the sums of madc only at -O0, so .sat of madc is refused.
    """
    if "sat" in i.modifiers:
        if i.opcode == "madc":
            raise v.unsupported("saturation with a carry")
        total = f"(s64)(s32){a} + (s32){b} + (s64){carry}"
        return v.dst(i.operands[0], t, f"clamp_s32({total})")
    wide = "u128" if size_of(t) == 8 else "u64"
    text = f"{{ const {wide} x_ = ({wide}){a} + {b} + {carry}; {v.dst(i.operands[0], t, 'x_')}"
    if sets_carry(i):
        text += " " + _set_carry(v, f"(x_ >> {width_bits(t)}) & 1")
    return text + " }"


@emits("add", "sub", "addc", "subc")
def add(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    subtract = i.opcode.startswith("sub")
    if is_float(t):
        return float_operation(v, i, "sub" if subtract else "add", t, 2)
    sign = "-" if subtract else "+"
    if facts(i).adds_carry or sets_carry(i):
        # A difference sets the carry of the adder: a - b is a + ~b + 1, which carries unless the difference borrows.
        a, b = (c_cast(t, v.src(o, t)) for o in i.operands[1:3])
        b = c_cast(t, f"~{b}") if subtract else b
        carry = _carry(v) if facts(i).adds_carry else int(subtract)
        return _sum_with_carry(v, i, t, a, b, carry)
    if t in PACKED:
        return halves(v, i, t, lambda x: f"(u16)({x[0]} {sign} {x[1]})", 2)
    a, b = v.src(i.operands[1], t), v.src(i.operands[2], t)
    if "sat" in i.modifiers:
        return v.dst(i.operands[0], t, f"{i.opcode}_sat_s32({a}, {b})")
    return v.dst(i.operands[0], t, f"{a} {sign} {b}")


@emits("mul")
def mul(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    if is_float(t):
        return float_operation(v, i, "mul", t, 2)
    return v.dst(i.operands[0], _product_type(i, t), _product(v, i, t))


def _product_type(i: PtxInstruction, t: str) -> str:
    return f"{t[0]}{width_bits(t) * 2}" if "wide" in i.modifiers else t


def _product(v: Values, i: PtxInstruction, t: str) -> str:
    a, b = v.src(i.operands[1], t), v.src(i.operands[2], t)
    w = width_bits(t)
    signed = t in SIGNED
    if "wide" in i.modifiers:
        s = "s" if signed else "u"
        return f"(u{2 * w})(({s}{2 * w})({s}{w})({a}) * ({s}{2 * w})({s}{w})({b}))"
    if "hi" in i.modifiers:
        if w == 64:
            return f"mulhi_{'s' if signed else 'u'}64({a}, {b})"
        s = "s" if signed else "u"
        return f"(u{w})((({s}{2 * w})({s}{w})({a}) * ({s}{2 * w})({s}{w})({b})) >> {w})"
    if w == 16:
        return f"(u16)((u32)({a}) * (u32)({b}))"
    return f"({a}) * ({b})"


@emits("mad", "madc")
def mad(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    if is_float(t):
        return float_operation(v, i, "fma", t, 3)
    result = _product_type(i, t)
    product = _product(v, i, t)
    c = v.src(i.operands[3], result)
    if facts(i).adds_carry or sets_carry(i):
        carry = _carry(v) if facts(i).adds_carry else 0
        return _sum_with_carry(v, i, result, c_cast(result, product), c_cast(result, c), carry)
    if "sat" in i.modifiers:  # mad.hi.sat.s32
        return v.dst(i.operands[0], result, f"add_sat_s32({product}, {c})")
    return v.dst(i.operands[0], result, f"{product} + {c}")


def c_cast(type_name: str, expression: str) -> str:
    return f"({c_type(size_of(type_name))})({expression})"


@emits("fma")
def fma(v: Values, i: PtxInstruction) -> str:
    return float_operation(v, i, "fma", i.modifiers[-1], 3)


@emits("mul24", "mad24")
def mul24(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    a, b = v.src(i.operands[1], t), v.src(i.operands[2], t)
    if t in SIGNED:
        a, b = f"((s64)(s32)(({a}) << 8) >> 8)", f"((s64)(s32)(({b}) << 8) >> 8)"
    else:
        a, b = f"(s64)(({a}) & 0xffffffu)", f"(s64)(({b}) & 0xffffffu)"
    product = f"mul24({a} * {b}, {int('hi' in i.modifiers)})"
    if i.opcode == "mul24":
        return v.dst(i.operands[0], t, product)
    c = v.src(i.operands[3], t)
    if "sat" in i.modifiers:
        return v.dst(i.operands[0], t, f"add_sat_s32({product}, {c})")
    return v.dst(i.operands[0], t, f"{product} + {c}")


@emits("div")
def div(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    if t in ("f32", "f64"):
        return float_operation(v, i, "div_approx" if "approx" in i.modifiers else "div", t, 2)
    sign = "s" if t in SIGNED else "u"
    return v.dst(
        i.operands[0], t, f"div{sign}{width_bits(t)}({v.src(i.operands[1], t)}, {v.src(i.operands[2], t)})"
    )


@emits("rem")
def rem(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    sign = "s" if t in SIGNED else "u"
    return v.dst(
        i.operands[0], t, f"rem{sign}{width_bits(t)}({v.src(i.operands[1], t)}, {v.src(i.operands[2], t)})"
    )


@emits("abs", "neg")
def absolute(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    if t in ("f16x2", "bf16x2"):
        change = "& 0x7fff" if i.opcode == "abs" else "^ 0x8000"
        return halves(v, i, t, lambda x: f"({x[0]} {change})", 1)
    if is_float(t):
        x = float_source(v, i, i.operands[1], t)
        top = f"{1 << (width_bits(t) - 1):#x}" + ("ull" if t == "f64" else "u")
        return v.dst(i.operands[0], t, f"{x} & ~{top}" if i.opcode == "abs" else f"{x} ^ {top}")
    x = v.src(i.operands[1], t)
    w = width_bits(t)
    if i.opcode == "neg":
        return v.dst(i.operands[0], t, f"0u - ({x})")
    return v.dst(i.operands[0], t, f"(s{w})({x}) < 0 ? 0u - ({x}) : ({x})")


@emits("sad")
def sad(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    a, b = v.integer(i.operands[1], t), v.integer(i.operands[2], t)
    c = v.src(i.operands[3], t)
    return v.dst(
        i.operands[0], t, f"{c} + (u64)({a} < {b} ? (u64)({b}) - (u64)({a}) : (u64)({a}) - (u64)({b}))"
    )


@emits("min", "max")
def minimum(v: Values, i: PtxInstruction) -> str:
    t = [m for m in i.modifiers if m != "relu"][-1]
    nan = "NaN" in i.modifiers
    xor = "xorsign" in i.modifiers
    if t in ("f16", "bf16", "f16x2", "bf16x2"):
        name = i.opcode + ("nan" if nan else "")
        return float_operation(v, i, name, t, 2)
    if t in ("f32", "f64"):
        texts = [float_source(v, i, o, t) for o in i.operands[1:]]
        suffix = _SUFFIX[t]
        sizes = [f"(({text}) & 0x7fffffffu)" for text in texts] if "abs" in i.modifiers else texts
        expression = sizes[0]
        for text in sizes[1:]:
            expression = f"f{i.opcode}{suffix}({expression}, {text})"
        if nan:
            for text in texts:
                expression = f"nanprop32({expression}, {text}, 0)"
        if xor:
            expression = f"xorsign32({expression}, {texts[0]}, {texts[1]})"
        return v.dst(i.operands[0], t, float_result(v, i, expression, t))
    macro = i.opcode.upper()
    if t in PACKED:
        kind = PACKED[t]
        return halves(v, i, t, lambda x: _relu16(i, f"(u16){macro}({kind}, {x[0]}, {x[1]})"), 2)
    kind = f"{'s' if t in SIGNED else 'u'}{width_bits(t)}"
    expression = f"{macro}({kind}, {v.src(i.operands[1], t)}, {v.src(i.operands[2], t)})"
    if "relu" in i.modifiers:
        expression = f"MAX({kind}, {expression}, 0)"
    return v.dst(i.operands[0], t, expression)


def _relu16(i: PtxInstruction, expression: str) -> str:
    return f"(u16)MAX(s16, {expression}, 0)" if "relu" in i.modifiers else expression


# --- bits -------------------------------------------------------------------------------------------


@emits("and", "or", "xor")
def logic(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    sign = {"and": "&", "or": "|", "xor": "^"}[i.opcode]
    return v.dst(i.operands[0], t, f"({v.src(i.operands[1], t)}) {sign} ({v.src(i.operands[2], t)})")


@emits("not")
def invert(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    return v.dst(i.operands[0], t, f"{'!' if t == 'pred' else '~'}({v.src(i.operands[1], t)})")


@emits("cnot")
def cnot(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    return v.dst(i.operands[0], t, f"({v.src(i.operands[1], t)}) == 0")


@emits("shl", "shr")
def shift(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    w = width_bits(t)
    a, n = v.src(i.operands[1], t), i.operands[2]
    if isinstance(n, Immediate) and 0 <= n.integer < w:
        if i.opcode == "shl":
            return v.dst(i.operands[0], t, f"({a}) << {n.integer}")
        cast = f"(s{w})" if t in SIGNED else f"(u{w})"
        return v.dst(i.operands[0], t, f"{cast}({a}) >> {n.integer}")
    count = v.src(n, "b32")
    if i.opcode == "shl":
        return v.dst(i.operands[0], t, f"shl{w}({a}, {count})")
    return v.dst(i.operands[0], t, f"shr_{'s' if t in SIGNED else 'u'}{w}({a}, {count})")


@emits("shf")
def funnel(v: Values, i: PtxInstruction) -> str:
    a, b, n = (v.src(o, "b32") for o in i.operands[1:4])
    n = f"({n}) & 31" if "wrap" in i.modifiers else f"MIN(u32, {n}, 32)"
    return v.dst(i.operands[0], "b32", f"shf_{'l' if 'l' in i.modifiers else 'r'}({a}, {b}, {n})")


@emits("popc", "clz")
def count_bits(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    a = v.src(i.operands[1], t)
    w = width_bits(t)
    return v.dst(i.operands[0], "u32", f"clz{w}({a})" if i.opcode == "clz" else f"__builtin_popcountll({a})")


@emits("brev")
def brev(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    return v.dst(i.operands[0], t, f"brev{width_bits(t)}({v.src(i.operands[1], t)})")


@emits("bfind")
def bfind(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    kind = f"{'s' if t in SIGNED else 'u'}{width_bits(t)}"
    amount = int("shiftamt" in i.modifiers)
    return v.dst(i.operands[0], "u32", f"bfind_{kind}({v.src(i.operands[1], t)}, {amount})")


@emits("fns")
def fns(v: Values, i: PtxInstruction) -> str:
    m, b, n = v.src(i.operands[1], "b32"), v.src(i.operands[2], "b32"), v.signed(i.operands[3], "s32")
    return v.dst(i.operands[0], "b32", f"cs_fns({m}, {b}, {n})")


@emits("bfe")
def bfe(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    kind = f"{'s' if t in SIGNED else 'u'}{width_bits(t)}"
    a, p, n = v.src(i.operands[1], t), v.src(i.operands[2], "u32"), v.src(i.operands[3], "u32")
    return v.dst(i.operands[0], t, f"bfe_{kind}({a}, {p}, {n})")


@emits("bfi")
def bfi(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    a, b = v.src(i.operands[1], t), v.src(i.operands[2], t)
    p, n = v.src(i.operands[3], "u32"), v.src(i.operands[4], "u32")
    return v.dst(i.operands[0], t, f"bfi{width_bits(t)}({a}, {b}, {p}, {n})")


@emits("bmsk")
def bmsk(v: Values, i: PtxInstruction) -> str:
    a, b = v.src(i.operands[1], "b32"), v.src(i.operands[2], "b32")
    return v.dst(i.operands[0], "b32", f"bmsk({a}, {b}, {int('wrap' in i.modifiers)})")


@emits("szext")
def szext(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    a, n = v.src(i.operands[1], t), v.src(i.operands[2], "u32")
    n = f"({n}) & 31" if "wrap" in i.modifiers else n
    return v.dst(i.operands[0], t, f"szext_{'s' if t in SIGNED else 'u'}({a}, {n})")


@emits("prmt")
def prmt(v: Values, i: PtxInstruction) -> str:
    a, b, c = (v.src(o, "b32") for o in i.operands[1:4])
    modes = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    for m in i.modifiers:
        if m in modes:
            return v.dst(i.operands[0], "b32", f"prmt_mode({a}, {b}, {c}, {modes.index(m)})")
    return v.dst(i.operands[0], "b32", f"prmt({a}, {b}, {c})")


@emits("lop3")
def lop3(v: Values, i: PtxInstruction) -> str:
    a, b, c = (v.src(o, "b32") for o in i.operands[1:4])
    table = i.operands[4]
    if not isinstance(table, Immediate):
        raise v.unsupported("a table that is not constant")
    value = f"lop3({a}, {b}, {c}, {table.integer})"
    destination = i.operands[0]
    if isinstance(destination, Pair) or len(i.operands) > 5:  # lop3.BoolOp d|p, …, q
        q = v.src(i.operands[5], "pred")
        first, second = (
            (destination.first, destination.second) if isinstance(destination, Pair) else (destination, None)
        )
        sign = "|" if "or" in i.modifiers else "&"
        text = f"{{ const u32 x_ = {value}; const u8 q_ = {q}; {v.dst(first, 'b32', 'x_')}"
        if second is not None:
            text += f" {v.dst(second, 'pred', f'(x_ != 0) {sign} q_')}"
        return text + " }"
    return v.dst(destination, "b32", value)


@emits("dp4a")
def dp4a(v: Values, i: PtxInstruction) -> str:
    ta, tb = i.modifiers[-2:]
    a, b, c = (v.src(o, "b32") for o in i.operands[1:4])
    return v.dst(i.operands[0], "b32", f"dp4a({a}, {b}, {c}, {int(ta == 's32')}, {int(tb == 's32')})")


@emits("dp2a")
def dp2a(v: Values, i: PtxInstruction) -> str:
    ta, tb = i.modifiers[-2:]
    a, b, c = (v.src(o, "b32") for o in i.operands[1:4])
    high = int("hi" in i.modifiers)
    return v.dst(i.operands[0], "b32", f"dp2a({a}, {b}, {c}, {int(ta == 's32')}, {int(tb == 's32')}, {high})")


# --- float functions --------------------------------------------------------------------------------


@emits("rcp", "sqrt", "rsqrt")
def reciprocal(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    x = float_source(v, i, i.operands[1], t)
    suffix = _SUFFIX[t]
    mode = rounding(i)
    if t == "f64" and {"approx", "ftz"} <= set(i.modifiers):  # only the upper 32 bits count
        expression = f"high64(f{i.opcode}64(high64({x})))"
    elif mode is None or "approx" in i.modifiers:
        expression = f"f{i.opcode}{suffix}({x})"
    elif i.opcode == "sqrt":
        expression = f"u{suffix}_(api->round{suffix}(CS_F_SQRT, {mode}, f{suffix}_({x}), 0, 0))"
    else:
        expression = f"u{suffix}_(api->round{suffix}(CS_F_DIV, {mode}, 1, f{suffix}_({x}), 0))"
    return v.dst(i.operands[0], t, float_result(v, i, expression, t))


@emits("sin", "cos", "ex2", "lg2", "tanh")
def transcendental(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    name = {"sin": "sinf", "cos": "cosf", "ex2": "exp2f", "lg2": "log2f", "tanh": "tanhf"}[i.opcode]
    if t == "f32":
        x = float_source(v, i, i.operands[1], t)
        return v.dst(i.operands[0], t, float_result(v, i, f"u32_({name}(f32_({x})))", t))
    element = PACKED.get(t, t)
    if element not in ("f16", "bf16"):
        raise v.unsupported()
    up, down = ("f16_to_f32", "f32_to_f16") if element == "f16" else ("bf16_to_f32", "f32_to_bf16")

    def one(x: list[str]) -> str:
        return float_result(v, i, f"{down}(u32_({name}(f32_({up}({x[0]})))))", element)

    if t in PACKED:
        return halves(v, i, t, one, 1)
    return v.dst(i.operands[0], t, one([float_source(v, i, i.operands[1], t)]))


@emits("copysign")
def copysign(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    a, b = v.src(i.operands[1], t), v.src(i.operands[2], t)
    return v.dst(i.operands[0], t, f"copysign{_SUFFIX[t]}({a}, {b})")


@emits("testp")
def testp(v: Values, i: PtxInstruction) -> str:
    kinds = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    t = i.modifiers[-1]
    return v.dst(
        i.operands[0], "pred", f"testp{_SUFFIX[t]}({v.src(i.operands[1], t)}, {kinds.index(i.modifiers[0])})"
    )


# --- comparison and selection -----------------------------------------------------------------------

_RELATION = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_COMPARISONS = set(_RELATION) | set(_UNSIGNED) | {"equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"}


def compare(v: Values, i: PtxInstruction, operator: str, a: str, b: str, t: str) -> str:
    """Return a comparison, 0 or 1. For NaN, ordered comparisons are false, and operators that end in u are true (PTX ISA 9.7.6)."""
    if is_float(t):
        if t in ("f16", "bf16"):
            up = "f16_to_f32" if t == "f16" else "bf16_to_f32"
            a, b, suffix = f"{up}({a})", f"{up}({b})", "32"
        else:
            suffix = _SUFFIX[t]
        x, y = f"f{suffix}_({a})", f"f{suffix}_({b})"
        unordered = f"__builtin_isunordered({x}, {y})"
        if operator == "num":
            return f"!{unordered}"
        if operator == "nan":
            return unordered
        if operator == "ne":
            return f"(!{unordered} && {x} != {y})"
        if operator == "neu":
            return f"({x} != {y})"
        if operator in _RELATION:
            return f"({x} {_RELATION[operator]} {y})"
        if operator.endswith("u") and operator[:2] in _RELATION:
            return f"({unordered} || {x} {_RELATION[operator[:2]]} {y})"
        raise v.unsupported(operator)
    w = width_bits(t)
    if operator in _UNSIGNED:
        return f"((u{w})({a}) {_UNSIGNED[operator]} (u{w})({b}))"
    if operator not in _RELATION:
        raise v.unsupported(operator)
    cast = f"(s{w})" if t in SIGNED else f"(u{w})"
    return f"({cast}({a}) {_RELATION[operator]} {cast}({b}))"


def comparison_operator(v: Values, i: PtxInstruction) -> str:
    for m in i.modifiers:
        if m in _COMPARISONS:
            return m
    raise v.unsupported("a comparison operator is missing")


def combine(v: Values, i: PtxInstruction, test: str, c: str | None) -> str:
    """Combine `test` with the predicate operand by the instruction's boolean operator."""
    if c is None:
        return test
    for m in ("and", "or", "xor"):
        if m in i.modifiers:
            return f"({test} {dict(zip(('and', 'or', 'xor'), '&|^', strict=True))[m]} {c})"
    raise v.unsupported("a boolean operator is missing")


def _packed_comparisons(
    v: Values, i: PtxInstruction, operator: str, element: str, c: str | None
) -> list[str]:
    """Return the comparisons of the low and of the high halves of `a_` and `b_`, combined with `c_`."""
    found = []
    for half in ("lo16", "hi16"):
        a, b = (packed_half(i, f"{half}({n})", element) for n in ("a_", "b_"))
        found.append(combine(v, i, compare(v, i, operator, a, b, element), c and "c_"))
    return found


@emits("setp")
def setp(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    operator = comparison_operator(v, i)
    destination = i.operands[0]
    c = v.src(i.operands[3], "pred") if len(i.operands) > 3 else None
    if t in ("f16x2", "bf16x2"):
        element = PACKED[t]
        a, b = v.src(i.operands[1], t), v.src(i.operands[2], t)
        low, high = _packed_comparisons(v, i, operator, element, c)
        text = f"{{ const u32 a_ = {a}, b_ = {b}; const u8 c_ = {c or 0}; (void)c_; "
        if not isinstance(destination, Pair):  # undocumented: ptxas 13.0 compares the low halves
            return text + f"{v.dst(destination, 'pred', low)} }}"
        return text + f"{v.dst(destination.first, 'pred', low)} {v.dst(destination.second, 'pred', high)} }}"
    a, b = (float_source(v, i, o, t) if is_float(t) else v.src(o, t) for o in i.operands[1:3])
    test = compare(v, i, operator, a, b, t)
    if isinstance(destination, Pair) and t in ("f16", "bf16"):
        raise v.unsupported("two results")
    if not isinstance(destination, Pair):
        return v.dst(destination, "pred", combine(v, i, test, c and f"(u8)({c})"))
    text = f"{{ const u8 t_ = {test}, c_ = {c or 0}; (void)c_; "
    text += v.dst(destination.first, "pred", combine(v, i, "t_", c and "c_"))
    return text + f" {v.dst(destination.second, 'pred', combine(v, i, '(u8)!t_', c and 'c_'))} }}"


@emits("set")
def set_(v: Values, i: PtxInstruction) -> str:
    dtype, t = i.modifiers[-2:]
    operator = comparison_operator(v, i)
    c = v.src(i.operands[3], "pred") if len(i.operands) > 3 else None
    one = {"f32": "0x3f800000u", "f16": "0x3c00u", "bf16": "0x3f80u"}.get(dtype, "0xffffffffu")
    if t in ("f16x2", "bf16x2"):
        element = PACKED[t]
        a, b = v.src(i.operands[1], t), v.src(i.operands[2], t)
        one = {"f16x2": "0x3c00u", "bf16x2": "0x3f80u"}.get(dtype, "0xffffu")
        low, high = _packed_comparisons(v, i, operator, element, c)
        text = f"{{ const u32 a_ = {a}, b_ = {b}; const u8 c_ = {c or 0}; (void)c_; "
        return text + v.dst(i.operands[0], "b32", f"pack16({low} ? {one} : 0u, {high} ? {one} : 0u)") + " }"
    a, b = (float_source(v, i, o, t) if is_float(t) else v.src(o, t) for o in i.operands[1:3])
    test = combine(v, i, compare(v, i, operator, a, b, t), c and f"(u8)({c})")
    return v.dst(i.operands[0], dtype, f"{test} ? {one} : 0u")


@emits("selp")
def selp(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    a, b, p = v.src(i.operands[1], t), v.src(i.operands[2], t), v.src(i.operands[3], "pred")
    return v.dst(i.operands[0], t, f"{p} ? {a} : {b}")


@emits("slct")
def slct(v: Values, i: PtxInstruction) -> str:
    t, ct = i.modifiers[-2:]
    a, b = v.src(i.operands[1], t), v.src(i.operands[2], t)
    c = float_source(v, i, i.operands[3], ct)
    test = f"f32_({c}) >= 0" if ct == "f32" else f"(s32)({c}) >= 0"
    return v.dst(i.operands[0], t, f"{test} ? {a} : {b}")


# --- mov and conversion -----------------------------------------------------------------------------


@emits("mov")
def mov(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    destination, source = i.operands
    if {"v2", "v4"} & set(i.modifiers) and isinstance(source, Name):
        source = v.special_vector(source.name) or source
        if not (isinstance(source, Vector) and isinstance(destination, Vector)):
            raise v.unsupported("both operands must be vectors")
        if len(source.items) != len(destination.items):
            raise v.unsupported("vectors of different sizes")
    if isinstance(destination, Vector) and isinstance(source, Vector):
        # all sources are read before a destination is written
        part = t
        text = "{ "
        for k, item in enumerate(source.items):
            text += f"const {c_type(size_of(part))} x{k}_ = {v.src(item, part)}; "
        return text + " ".join(v.dst(o, part, f"x{k}_") for k, o in enumerate(destination.items)) + " }"
    if isinstance(source, Vector):
        w = width_bits(t) // len(source.items)
        wide = c_type(size_of(t))
        parts = [f"({wide})({v.src(o, f'b{w}')}) << {w * k}" for k, o in enumerate(source.items)]
        return v.dst(destination, t, " | ".join(f"({p})" for p in parts))
    if isinstance(destination, Vector):
        w = width_bits(t) // len(destination.items)
        text = f"{{ const {c_type(size_of(t))} x_ = {v.src(source, t)}; "
        return (
            text
            + " ".join(v.dst(o, f"b{w}", f"x_ >> {w * k}") for k, o in enumerate(destination.items))
            + " }"
        )
    return v.dst(destination, t, v.src(source, t))


@emits("cvta")
def cvta(v: Values, i: PtxInstruction) -> str:
    space = next((m.split("::")[0] for m in i.modifiers if m.split("::")[0] in _WINDOWS), None)
    if space is None:
        raise v.unsupported()
    a = v.src(i.operands[1], "u64")
    window = _WINDOWS[space]
    if window:
        a = f"{a} - {window}" if "to" in i.modifiers else f"{a} + {window}"
    return v.dst(i.operands[0], "u64" if i.modifiers[-1] == "u64" else "u32", a)


_WINDOWS = {"global": "", "const": "", "param": "", "shared": "w->shared_window", "local": "w->local_window"}


@emits("mapa")
def mapa(v: Values, i: PtxInstruction) -> str:
    """Translate the mapping of an address in shared memory to another block of the cluster."""
    t = i.modifiers[-1]
    address, rank = v.src(i.operands[1], t), v.src(i.operands[2], "u32")
    if "shared::cluster" in i.modifiers:
        return v.dst(i.operands[0], t, f"cs_map_to_rank({address}, {rank})")
    window = "w->shared_window"
    return v.dst(i.operands[0], t, f"{window} + cs_map_to_rank(({address}) - {window}, {rank})")


@emits("getctarank")
def getctarank(v: Values, i: PtxInstruction) -> str:
    a = v.src(i.operands[1], i.modifiers[-1])
    if "shared::cluster" not in i.modifiers:
        a = f"({a}) - w->shared_window"
    return v.dst(i.operands[0], "u32", f"(u32)(({a}) >> CS_RANK_SHIFT)")


@emits("isspacep")
def isspacep(v: Values, i: PtxInstruction) -> str:
    space = i.modifiers[0].removesuffix("::cta").removesuffix("::entry")
    address = i.operands[1]
    found = v.names.register(v.scope, address.name) if isinstance(address, Name) else None
    a = f"(u64){v.src(address, 'u32' if found is not None and found.width == 4 else 'u64')}"
    tests = {
        "shared::cluster": f"(({a}) - w->shared_window < CS_MOST_BLOCKS << CS_RANK_SHIFT)",
        "local": f"(({a}) - w->local_window < (1u << 24))",
        "param": f"(({a}) - w->param_window < (1u << 16))",
        "const": f"(({a}) - w->constants < w->constant_size)",
    }
    tests["global"] = f"!({' | '.join(tests.values())})"
    tests["shared"] = f"(({a}) - w->shared_window - w->shared_at < (1u << CS_RANK_SHIFT))"
    return v.dst(i.operands[0], "pred", tests[space])


def _is_int(t: str) -> bool:
    return t[0] in "usb" and t[1:].isdigit()


@emits("cvt")
def cvt(v: Values, i: PtxInstruction) -> str:
    m = list(i.modifiers)
    if m[0] == "pack":
        return _cvt_pack(v, i)
    dtype, stype = m[-2], m[-1]
    if "rs" in m:
        raise v.unsupported("PTX does not say how stochastic rounding uses the random bits")
    if dtype in ("f16x2", "bf16x2") and stype == "f32":
        element = PACKED[dtype]
        high, low = (_narrow(v, i, v.src(o, "f32"), "f32", element) for o in i.operands[1:3])
        high, low = (_converted(v, i, x, element) for x in (high, low))
        return v.dst(i.operands[0], "b32", f"pack16({low}, {high})")
    if not _SMALL.keys().isdisjoint((dtype, stype)):
        return _cvt_small(v, i, dtype, stype)
    if "ue8m0x2" in (dtype, stype):
        return _cvt_exponents(v, i, dtype, stype)
    known = {"f16", "bf16", "f32", "f64", "tf32"}
    if not all(_is_int(t) or t in known for t in (dtype, stype)):
        raise v.unsupported()
    source = i.operands[1]
    if _is_int(stype) and _is_int(dtype):
        return v.dst(i.operands[0], dtype, _int_to_int(v, i, v.src(source, stype), stype, dtype))
    if _is_int(stype):
        return v.dst(i.operands[0], dtype, _int_to_float(v, i, v.src(source, stype), stype, dtype))
    text = v.src(source, stype)
    if "ftz" in m and stype == "f32" and not isinstance(source, Immediate):
        text = f"ftz({text})"
    if _is_int(dtype):
        up = {"f32": "(f64)f32_({})", "f64": "f64_({})", "f16": "(f64)f32_(f16_to_f32({}))"}
        up["bf16"] = "(f64)f32_(bf16_to_f32({}))"
        mode = next((c for k, c in INTEGER_ROUNDING.items() if k in m), "CS_ROUND_ZERO")
        wide = int(stype == "f64" or size_of(dtype) == 8)
        sign = "s" if dtype in SIGNED else "u"
        return v.dst(
            i.operands[0], dtype, f"to_{sign}({up[stype].format(text)}, {mode}, {width_bits(dtype)}, {wide})"
        )
    return v.dst(i.operands[0], dtype, _float_to_float(v, i, text, stype, dtype))


def _int_to_int(v: Values, i: PtxInstruction, text: str, stype: str, dtype: str) -> str:
    ws, wd = width_bits(stype), width_bits(dtype)
    value = f"(s{ws})({text})" if stype in SIGNED else f"(u{ws})({text})"
    if "sat" not in i.modifiers:
        return f"({'s' if stype in SIGNED else 'u'}{max(ws, wd)}){value}"
    low = -(1 << (wd - 1)) if dtype in SIGNED else 0
    high = (1 << (wd - 1)) - 1 if dtype in SIGNED else (1 << wd) - 1
    clamp = f"x_ < (s128){_s64(low)} ? (s128){_s64(low)} : x_ > (s128){high}ull ? (s128){high}ull : x_"
    return f"(u64)({{ const s128 x_ = {value}; {clamp}; }})"


def _s64(value: int) -> str:
    return f"({value + 1}ll - 1)" if value < 0 else f"{value}ll"


def _int_to_float(v: Values, i: PtxInstruction, text: str, stype: str, dtype: str) -> str:
    w = width_bits(stype)
    signed = stype in SIGNED
    value = f"({'s' if signed else 'u'}{w})({text})"
    mode = rounding(i)
    if dtype in _SUFFIX:
        bits = _SUFFIX[dtype]
        zero = ", 0" if dtype == "f32" else ""
        call = f"api->convert{bits}(CS_F_FROM_{'S' if signed else 'U'}64, {mode}, (s64)({value}){zero})"
        text = f"u{bits}_({f'({dtype})({value})' if mode is None else call})"
        return float_result(v, i, text, dtype)
    # an f64 rounds a 64-bit integer a second time, but no integer that large is near a halfway point of these types
    sticky = (
        f"u64_((f64)({value}))"
        if w < 64
        else f"u64_(api->convert64(CS_F_FROM_{'S' if signed else 'U'}64, CS_ROUND_ZERO, (s64)({value})))"
    )
    return _converted(v, i, _narrow(v, i, sticky, "f64", dtype), dtype)


def _converted(v: Values, i: PtxInstruction, text: str, dtype: str) -> str:
    """Apply .sat, .satfinite and .relu to a result of cvt; .ftz only to an f32 (PTX ISA 9.7.9.22)."""
    if dtype != "f32":
        i = replace(i, modifiers=tuple(m for m in i.modifiers if m != "ftz"))
    return float_result(v, i, text, dtype)


def _narrow(v: Values, i: PtxInstruction, text: str, stype: str, dtype: str) -> str:
    mode = rounding(i) or "CS_ROUND_NEAREST"
    if stype == "f32" and mode == "CS_ROUND_NEAREST":
        return f"f32_to_{dtype}({text})"
    value = f"f32_({text})" if stype == "f32" else f"f64_({text})"
    bits = "5, 10" if dtype == "f16" else "8, 7"
    return f"(u16)cs_narrow({value}, {bits}, {mode})"


def _float_to_float(v: Values, i: PtxInstruction, text: str, stype: str, dtype: str) -> str:
    mode = next((c for k, c in INTEGER_ROUNDING.items() if k in i.modifiers), None)
    if dtype == "tf32":
        half = {"rna": "0x1000", "rz": "0"}.get(i.modifiers[0], f"0xfff + ({text} >> 13 & 1)")
        finite, relu = (int(m in i.modifiers) for m in ("satfinite", "relu"))
        return f"f32_to_tf32({text}, {half}, {finite}, {relu})"
    if mode is not None:  # round to an integral value
        if stype == "f32":
            text = f"u32_((f32)round_i(f32_({text}), {mode}))"
        elif stype == "f64":
            text = f"u64_(round_i(f64_({text}), {mode}))"
        else:
            up, down = ("f16_to_f32", "f32_to_f16") if stype == "f16" else ("bf16_to_f32", "f32_to_bf16")
            text = f"{down}(u32_((f32)round_i(f32_({up}({text})), {mode})))"
    if stype == dtype:
        result = text
    elif stype in ("f16", "bf16"):
        single = f"{stype}_to_f32({text})"
        if dtype == "f32":
            result = single
        elif dtype == "f64":
            result = f"u64_((f64)f32_({single}))"
        else:
            result = _narrow(v, i, single, "f32", dtype)
    elif dtype in ("f16", "bf16"):
        result = _narrow(v, i, text, stype, dtype)
    elif dtype == "f64":
        result = f"u64_((f64)f32_({text}))"
    else:
        direction = rounding(i)
        if direction is None:
            result = f"u32_((f32)f64_({text}))"
        else:
            result = f"u32_(api->convert32(CS_F_FROM_F64, {direction}, 0, f64_({text})))"
    return _converted(v, i, result, dtype)


# The functions of small floats, their last arguments, and the bits between two floats.
_SMALL = {
    "e4m3x2": ("fp8", "0", 8),
    "e5m2x2": ("fp8", "1", 8),
    "e2m3x2": ("tiny", "2, 3", 8),
    "e3m2x2": ("tiny", "3, 2", 8),
    "e2m1x2": ("tiny", "2, 1", 4),
}


def _cvt_small(v: Values, i: PtxInstruction, dtype: str, stype: str) -> str:
    """Translate cvt of two floats of 8 or 6 bits, each in a byte, or of 4 bits, both in one byte.

    The forms are cvt.rn.satfinite{.relu}.SMALL.{f32,f16x2} and cvt.rn{.relu}.f16x2.SMALL.
    """
    relu = "relu" in i.modifiers
    name, format_, bits = _SMALL[stype if dtype == "f16x2" else dtype]
    both = f"b{2 * bits}"
    if dtype == "f16x2":
        halves = [f"{name}_to_f16(x_ >> {bits * k} & {(1 << bits) - 1}, {format_})" for k in (0, 1)]
        low, high = (f"hrelu({h})" if relu else h for h in halves)
        source = v.src(i.operands[1], both)
        return f"{{ const u32 x_ = {source}; {v.dst(i.operands[0], 'b32', f'pack16({low}, {high})')} }}"
    if stype == "f32":
        high, low = (v.src(o, "f32") for o in i.operands[1:3])
    elif stype == "f16x2":
        source = v.src(i.operands[1], "b32")
        low, high = f"f16_to_f32((u16)({source}))", f"f16_to_f32((u16)(({source}) >> 16))"
    else:
        raise v.unsupported()
    low, high = (f"f32_to_{name}({x}, {format_}, {int(relu)})" for x in (low, high))
    return v.dst(i.operands[0], both, f"{low} | {high} << {bits}")


def _cvt_exponents(v: Values, i: PtxInstruction, dtype: str, stype: str) -> str:
    """Translate cvt.{rz,rp}{.satfinite}.ue8m0x2.{f32,bf16x2} and cvt.rn.bf16x2.ue8m0x2."""
    if stype == "ue8m0x2":
        source = v.src(i.operands[1], "b16")
        low, high = (f"e8m0_to_bf16(x_ >> {8 * k} & 255)" for k in (0, 1))
        return f"{{ const u32 x_ = {source}; {v.dst(i.operands[0], 'b32', f'pack16({low}, {high})')} }}"
    if stype == "f32":
        high, low = (v.src(o, "f32") for o in i.operands[1:3])
    else:
        both = v.src(i.operands[1], "b32")
        low, high = f"({both}) << 16", f"({both}) & 0xffff0000u"
    up, finite = (int(m in i.modifiers) for m in ("rp", "satfinite"))
    low, high = (f"f32_to_e8m0({x}, {up}, {finite})" for x in (low, high))
    return v.dst(i.operands[0], "b16", f"{low} | {high} << 8")


def _cvt_pack(v: Values, i: PtxInstruction) -> str:
    """Translate cvt.pack.sat.{u16,s16}.s32 d, a, b and cvt.pack.sat.{u8,s8,u4,s4,u2,s2}.s32.b32 d, a, b, c."""
    kind = i.modifiers[2]
    w = int(kind[1:])
    low = -(1 << (w - 1)) if kind[0] == "s" else 0
    high = (1 << (w - 1)) - 1 if kind[0] == "s" else (1 << w) - 1

    def clamp(o: Operand) -> str:
        return f"((u32)MAX(s32, MIN(s32, {v.src(o, 's32')}, {high}), {low}) & {(1 << w) - 1}u)"

    value = f"{clamp(i.operands[2])} | {clamp(i.operands[1])} << {w}"
    if len(i.operands) > 3:
        value += f" | ({v.src(i.operands[3], 'b32')}) << {2 * w}"
    return v.dst(i.operands[0], "b32", value)

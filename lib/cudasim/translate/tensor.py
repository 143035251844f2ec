"""Translate mma, wmma and wgmma to C (PTX ISA 9.7.14, 9.7.15). All lanes of the warp take part.

A lane's part of a matrix is its fragment. With g = lane / 4 and t = lane % 4, the fragments of mma are (9.7.14.5):

A, M×K      with 8 rows: row g. With 16 rows: registers 0, 2, … have row g, registers 1, 3, … row g + 8. A register of e elements has
            columns t·e and up; the next register of the row has those 4·e columns later.
B, K×N      column g; register r has rows t·e + 4·e·r and up.
C, D, M×N   row g (or g, g, g + 8, g + 8, …), columns 2·t and 2·t + 1.

mma.m8n8k4 of f16 differs (device_matrix.h). A sparse A has the fragments of a matrix of K/2 columns. PTX leaves wmma's fragments open.
Here they are those of mma, one tile of 16×K, K×8 or 16×8 after the other, whatever the layout in memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpubpf.ptx.module import Immediate, Name, Operand, PtxInstruction, Vector

from .arithmetic import rounding
from .memory import space_of
from .values import Values, c_type, constant, immediate_bits, size_of

# Bits of an element. Elements of fewer than 32 bits share a register.
_BITS = {
    "f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1,
    "f32": 32, "s32": 32, "e3m2": 8, "e2m3": 8, "e2m1": 8, "f4": 4,
}  # fmt: skip
_SMALL = {"e3m2", "e2m3", "e2m1"}  # these fill a byte each; f4 stands for e2m1 in half a byte
# Kinds of mma with block scaling: the types of factors, and how many a row of A has, by default first.
_SCALES: dict[str, tuple[dict[str, tuple[int, ...]], int]] = {
    "kind::mxf8f6f4": ({"ue8m0": (1,)}, 1),
    "kind::mxf4": ({"ue8m0": (2,)}, 2),
    "kind::mxf4nvf4": ({"ue8m0": (2, 4), "ue4m3": (4,)}, 0),
}
_UNSCALED = "const struct cs_scales *const scales_ = 0;"
_DENSE = "const u8 *const rows_ = 0;"
_SPARSE = {"sp", "sp::ordered_metadata"}
_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
_SAME = {
    "s8": "int8",
    "u8": "int8",
    "s4": "int4",
    "u4": "int4",
    "e4m3": "fp8",
    "e5m2": "fp8",
    "f4": "fp4",
} | dict.fromkeys(_SMALL, "fp8")
_FLOAT_SUMS = {("f32", "f32")}
_HALF_SUMS = {(d, c) for d in ("f16", "f32") for c in ("f16", "f32")}
# The types of D and C by the type of A and B.
_SUMS = {
    "f16": _HALF_SUMS, "bf16": _FLOAT_SUMS, "tf32": _FLOAT_SUMS, "fp8": {("f16", "f16"), ("f32", "f32")},
    "fp4": {("f32", "f32")},
    "f64": {("f64", "f64")}, "int8": {("s32", "s32")}, "int4": {("s32", "s32")}, "b1": {("s32", "s32")},
}  # fmt: skip
_SHAPES = {
    "mma": {
        "f16": {(8, 8, 4), (16, 8, 8), (16, 8, 16)},
        "bf16": {(16, 8, 8), (16, 8, 16)},
        "tf32": {(16, 8, 4), (16, 8, 8)},
        "fp8": {(16, 8, 16), (16, 8, 32)},
        "fp4": {(16, 8, 64)},
        "f64": {(8, 8, 4), (16, 8, 4), (16, 8, 8), (16, 8, 16)},
        "int8": {(8, 8, 16), (16, 8, 16), (16, 8, 32)},
        "int4": {(8, 8, 32), (16, 8, 32), (16, 8, 64)},
        "b1": {(8, 8, 128), (16, 8, 128), (16, 8, 256)},
    },
    "mma.sp": {
        "f16": {(16, 8, 16), (16, 8, 32)},
        "bf16": {(16, 8, 16), (16, 8, 32)},
        "tf32": {(16, 8, 8), (16, 8, 16)},
        "fp8": {(16, 8, 64)},
        "fp4": {(16, 8, 128)},
        "int8": {(16, 8, 32), (16, 8, 64)},
        "int4": {(16, 8, 64), (16, 8, 128)},
    },
    "wmma": {
        **{t: {(16, 16, 16), (32, 8, 16), (8, 32, 16)} for t in ("f16", "bf16", "int8")},
        "tf32": {(16, 16, 8)},
        "f64": {(8, 8, 4)},
        "int4": {(8, 8, 32)},
        "b1": {(8, 8, 128)},
    },
}


@dataclass(frozen=True, slots=True)
class Matrix:
    """One operand of a multiplication: `which` of A, B and C (or D), its shape, and the type of its elements."""

    which: str
    m: int
    n: int
    k: int
    type: str

    @property
    def per_register(self) -> int:
        return max(1, 32 // _BITS[self.type])

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows and columns."""
        return {"a": (self.m, self.k), "b": (self.k, self.n)}.get(self.which, (self.m, self.n))

    @property
    def registers(self) -> int:
        rows, columns = self.shape
        return max(1, rows * columns // 32 // self.per_register)

    @property
    def group(self) -> str:
        return _SAME.get(self.type, self.type)

    def place(self) -> tuple[str, str]:
        """Return the row and the column of element e_ of register r_ of lane l, as C."""
        e = self.per_register
        if self.which == "c":
            element = f"r_ * {e} + e_"
            return f"cs_row({self.m}, l, {element})", f"cs_column({self.m}, l, {element})"
        halves = 2 if self.which == "a" and self.m > 8 else 1
        across, along = (f"cs_{x}({self.k}, {e}, {halves}, l, r_)" for x in ("across", "along"))
        return (across, f"({along} + e_)") if self.which == "a" else (f"({along} + e_)", across)


def _shape(v: Values, i: PtxInstruction) -> tuple[int, int, int]:
    found = next(filter(None, map(_SHAPE.fullmatch, i.modifiers)), None)
    if found is None:
        raise v.unsupported()
    m, n, k = map(int, found.groups())
    return m, n, k


def registers_of(v: Values, operand: Operand, count: int) -> tuple[Operand, ...]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise v.unsupported(f"{len(items)} registers for {count}")
    return items


# --- wmma.load, wmma.store


def transfer(v: Values, i: PtxInstruction) -> str:
    """Return C in which a lane loads or stores its fragment, element by element or 32 bits at a time."""
    m = i.modifiers
    loads = m[0] == "load"
    which, t = m[1], m[-1]
    matrix = Matrix("c" if which == "d" else which, *_shape(v, i), t)
    rows, columns = matrix.shape
    groups = [matrix.group] if matrix.which in "ab" else [g for g, sums in _SUMS.items() if (t, t) in sums]
    if not any((matrix.m, matrix.n, matrix.k) in _SHAPES["wmma"].get(g, ()) for g in groups):
        raise v.unsupported()
    destination, address, *rest = i.operands if loads else (i.operands[1], i.operands[0], *i.operands[2:])
    # For f16, PTX gives A and B eight registers in every shape. Those that a shape does not need repeat the first ones.
    distinct = matrix.registers
    count = 8 if matrix.which in "ab" and t == "f16" else distinct
    items = registers_of(v, destination, count)
    row_major = "row" in m
    bits, e = _BITS[t], matrix.per_register
    # whether the elements of a register are neighbours in memory
    together = e == 1 or (row_major == (matrix.which != "b") and matrix.which != "c")
    if bits < 8 and not together:
        raise v.unsupported()
    stride = v.src(rest[0], "u32") if rest else f"{columns if row_major else rows}u"
    text = f"{{ {v.line()} const u64 p_ = {v.address(address)}, s_ = {stride}; "
    v.forget_base()
    outer, inner = matrix.place() if row_major else matrix.place()[::-1]
    width = max(4, bits // 8) if together else bits // 8
    offset = f"({outer} * s_ + {inner}) * {bits} / 8"
    space = space_of(i)
    pointer = v.pointer(space, f"p_ + {offset}", width, "r" if loads else "w")
    pointer = pointer.replace(f", {v.place})", ", w->at)")  # many instructions share the function
    each = f"for (u32 r_ = 0; r_ < {distinct}; r_++) for (u32 e_ = 0; e_ < {1 if together else e}; e_++)"
    kind, t = c_type(width), "b64" if bits == 64 else "b32"
    wide = c_type(size_of(t))
    access = f"x_[r_] |= ({wide})LD({kind}, {pointer})" if loads else f"ST({kind}, {pointer}, x_[r_]"
    access += f" << e_ * {bits};" if loads else f" >> e_ * {bits});"
    name = "_".join(("wmma", *(x for x in m if x not in ("sync", "aligned")))).replace("::", "_")
    v.helpers[name] = (
        "FN __attribute__((noinline)) "
        f"void {name}(W *w, const u32 l, const u64 p_, const u64 s_, {wide} *x_) {{ LOCALS; {each} {access} }}"
    )
    x, call = f"{wide} x_[{distinct}]", f"{name}(w, l, p_, s_, x_);"
    if loads:
        text += f"{x} = {{0}}; {call} "
        return text + " ".join(v.dst(o, t, f"x_[{k % distinct}]") for k, o in enumerate(items)) + " }"
    values = ", ".join(v.src(o, t) for o in items)
    return f"{text}{x} = {{{values}}}; {call} }}"


# --- mma, wmma.mma


def multiply(v: Values, i: PtxInstruction) -> str:
    """Return C in which a lane takes its part of D. The multiplication precedes it, once for the warp (`v.code.before`)."""
    m = i.modifiers
    sparse = not _SPARSE.isdisjoint(m)
    family = _SHAPES.get(f"{i.opcode}.sp" if sparse else i.opcode, {})
    shape = _shape(v, i)
    types = [x for x in m if x in _BITS]
    if len(types) == 2 and i.opcode == "wmma":
        types[1:1] = ["f16", "f16"]
    kind = next((x for x in m if x.startswith("kind::")), "")
    if kind in ("kind::mxf4", "kind::mxf4nvf4"):
        types = ["f4" if t == "e2m1" else t for t in types]
    d_type, a_type, b_type, c_type_ = types
    columns = shape[2] // 2 if sparse else shape[2]
    a, b = Matrix("a", *shape[:2], columns, a_type), Matrix("b", *shape, b_type)
    c, d = Matrix("c", *shape, c_type_), Matrix("c", *shape, d_type)
    scaled = kind in _SCALES
    if (
        not {"sync", "aligned"} <= set(m)
        or shape not in family.get(a.group, ())
        or a.group != b.group
        or (d_type, c_type_) not in _SUMS[a.group]
        or scaled != ("block_scale" in m)
        or (scaled and d_type != "f32")
        or (kind != "" and (a.group != ("fp4" if kind.startswith("kind::mxf4") else "fp8") or shape[2] < 32))
        or (not kind and not _SMALL.isdisjoint(types))
    ):
        raise v.unsupported()
    v.code.alone = True
    quads = a_type == "f16" and shape == (8, 8, 4)
    distinct = {"a": 2, "b": 2, "c": 8 // c.per_register, "d": 8 // d.per_register}
    if not quads:
        distinct = {"a": a.registers, "b": b.registers, "c": c.registers, "d": d.registers}
    repeated = i.opcode == "wmma" and a_type == "f16"
    given = []
    for name, operand in zip("abc", i.operands[1:4], strict=True):
        items = registers_of(v, operand, 8 if repeated and name != "c" else distinct[name])
        of = "f64" if a_type == "f64" else c_type_ if name == "c" and c_type_ == "f32" else "b32"
        given.append(f"(const void *const[]){{{', '.join(in_lanes(v, o, of) for o in items)}}}")
    results = registers_of(v, i.operands[0], distinct["d"])
    sizes = ", ".join(map(str, shape))
    if quads:
        call = (
            f"cs_mma_quads(d_, {', '.join(given)}, {_layout(m)}, CS_{d_type.upper()}, CS_{c_type_.upper()})"
        )
    elif a_type == "f64":
        call = f"cs_mma_f64(w, d_, {', '.join(given)}, {sizes}, {rounding(i) or 'CS_ROUND_NEAREST'})"
    elif a_type == "b1":
        operation = next(x for x in m if x in ("xor", "and"))
        call = f"cs_mma_b1(d_, {', '.join(given)}, {sizes}, {int(operation == 'and')}, 0)"
    else:
        kinds = ", ".join(f"CS_{x.upper()}" for x in types)
        rows = _sparse_rows(v, a, *i.operands[4:6]) if sparse else _DENSE
        scales = _block_scales(v, kind, i.operands[-4:]) if scaled else _UNSCALED
        flags = "CS_FINITE" if "satfinite" in m else "0"
        call = f"{rows} {scales} cs_mma(d_, {', '.join(given)}, rows_, {sizes}, {kinds}, {flags}, scales_)"
    t = "b64" if a_type == "f64" else "b32"
    v.code.before = f"{c_type(size_of(t))} d_[{distinct['d']}][32]; {call};"
    return " ".join(v.dst(o, t, f"d_[{k}][l]") for k, o in enumerate(results))


# --- wgmma


def multiply_group(v: Values, i: PtxInstruction) -> str:
    """Return C in which a lane takes its part of D of wgmma.mma_async. Each of the four warps multiplies 16 of the 64 rows of A."""
    m = i.modifiers
    group, n, k = _shape(v, i)
    sparse = "sp" in m
    columns = k // 2 if sparse else k
    d_type, a_type, b_type = (x for x in m if x in _BITS)
    a, b = Matrix("a", 16, n, columns, a_type), Matrix("b", 16, n, k, b_type)
    d = Matrix("c", 16, n, k, d_type)
    if (
        group != 64
        or n % 8
        or not 8 <= n <= 256
        or columns * _BITS[a_type] != 256
        or a.group != b.group
        or a_type in ("f64", "s4", "u4")
        or not _SMALL.isdisjoint((a_type, b_type))
        or (d_type, d_type) not in _SUMS[a.group]
        or (sparse and a_type == "b1")
    ):
        raise v.unsupported()
    v.code.alone = True
    v.code.reads_shared = True
    destination, first, second, *rest = i.operands
    rows = _sparse_rows(v, a, rest.pop(0), rest.pop(0)) if sparse else _DENSE
    scale = rest.pop(0)
    numbers = [o.integer for o in rest if isinstance(o, Immediate)]
    in_registers = isinstance(first, Vector)
    signs = numbers[:2] if a.group not in ("int8", "b1") else []
    turned = numbers[2:] if a_type in ("f16", "bf16") else []
    turned_a, turned_b = [0, *turned] if in_registers and turned else turned or [0, 0]
    registers = registers_of(v, destination, d.registers)
    sums = ", ".join(in_lanes(v, o, "f32" if d_type == "f32" else "b32") for o in registers)
    lines = [
        f"w->line = {v.line_number(i.line)};",
        f"u32 d_[{d.registers}][32], a_[{a.registers}][32], b_[{b.registers}][32];",
    ]
    lines.append(f"const void *const c_[] = {{{sums}}};")
    if in_registers:
        given = ", ".join(in_lanes(v, o, "b32") for o in registers_of(v, first, a.registers))
        lines.append(f"const void *const ra_[] = {{{given}}};")
    else:
        lines.append(
            _gathered(v, "a_", first, a, "w->warpid % 4 * 16", turned_a) + _pointers("a_", a.registers)
        )
    lines.append(_gathered(v, "b_", second, b, "0", turned_b) + _pointers("b_", b.registers))
    keeps = v.src(scale, "pred")
    if isinstance(scale, Name):
        keeps = f"R->{keeps} & mask"
    flags = [f"({keeps} ? 0 : CS_FROM_ZERO)"]
    flags += ["CS_NEGATED"] if signs and signs[0] * signs[1] < 0 else []
    flags += ["CS_FINITE"] if "satfinite" in m else []
    if a_type == "b1":
        lines.append(f"cs_mma_b1(d_, ra_, rb_, c_, 16, {n}, {k}, 1, {flags[0]});")
    else:
        kinds = ", ".join(f"CS_{x.upper()}" for x in (d_type, a_type, b_type, d_type))
        lines.append(
            f"{rows} cs_mma(d_, ra_, rb_, c_, rows_, 16, {n}, {k}, {kinds}, {' | '.join(flags)}, 0);"
        )
    v.code.before = " ".join(lines)
    return " ".join(v.dst(o, "b32", f"d_[{r}][l]") for r, o in enumerate(registers))


def _gathered(v: Values, into: str, descriptor: Operand, matrix: Matrix, first: str, turned: int) -> str:
    halves = 2 if matrix.which == "a" else 1
    lanes = in_lanes(v, descriptor, "b64")
    sizes = f"{matrix.registers}, {matrix.k}, {matrix.per_register}, {halves}, {turned}"
    return f"cs_gather(w, {into}, ({lanes})[__builtin_ctz(mask)], {first}, {sizes}); "


def _pointers(name: str, count: int) -> str:
    return f"const void *const r{name}[] = {{{', '.join(f'{name}[{r}]' for r in range(count))}}};"


def _sparse_rows(v: Values, a: Matrix, metadata: Operand, selector: Operand) -> str:
    """Return C that finds the rows of B that multiply the elements of a sparse A.

    a: the matrix of the K/2 columns that are stored
    """
    # A lane has the metadata of 8 chunks. The selector names the lanes, out of each four, that have metadata.
    chunk = {"tf32": 2, "int4": 8}.get(a.group, 4)
    lanes = 2 * a.k // chunk // 4
    first = selector.integer * lanes if isinstance(selector, Immediate) else -1
    if not 0 <= first < 4:
        raise v.unsupported(f"sparsity selector {selector}")
    arguments = f"{in_lanes(v, metadata, 'b32')}, {first}, {2 * a.k}, CS_{a.type.upper()}"
    return f"u8 rows_[{16 * a.k}]; cs_sparse_rows(rows_, {arguments});"


def _block_scales(v: Values, kind: str, operands: tuple[Operand, ...]) -> str:
    """Return C that declares `scales_`, which describes block scaling.

    It has the registers with the factors, by lane, and the lanes and the bytes of these registers that the instruction names."""
    m = v.instruction.modifiers
    types, count = _SCALES[kind]
    size = next((int(x[-2]) for x in m if x.startswith("scale_vec::")), count)
    t = next((x for x in m if x in types), "")
    if size not in types.get(t, ()):
        raise v.unsupported()
    fields = []
    for name, data, place in (("a", operands[0], operands[1]), ("b", operands[2], operands[3])):
        (factors,) = registers_of(v, data, 1)
        byte, thread = registers_of(v, place, 2)
        fields.append(f".{name} = {in_lanes(v, factors, 'b32')}")
        for what, operand, most in (("byte", byte, 4), ("thread", thread, 2 if name == "a" else 4)):
            text = f"({in_lanes(v, operand, 'b16')})[__builtin_ctz(mask)]"
            if isinstance(operand, Immediate) and operand.integer >= most:
                raise v.unsupported(f"{what}-id {operand}")
            fields.append(f".{what}_{name} = {text} & {most - 1}")
    fields += [f".count = {size}", f".e4m3 = {int(t == 'ue4m3')}"]
    return f"const struct cs_scales scaling_ = {{{', '.join(fields)}}}, *const scales_ = &scaling_;"


def _layout(m: tuple[str, ...]) -> str:
    a, b = (x for x in m if x in ("row", "col"))
    return f"{int(a == 'col')}, {int(b == 'col')}"


def in_lanes(v: Values, operand: Operand, t: str) -> str:
    """Return a pointer to the 32 lanes' values of a source operand."""
    width = size_of(t)
    if isinstance(operand, Immediate):
        return f"(const {c_type(width)}[32]){{[0 ... 31] = {constant(immediate_bits(operand, t), width)}}}"
    found = v.names.register(v.scope, operand.name) if isinstance(operand, Name) else None
    if found is None or found.width != width or (isinstance(operand, Name) and operand.offset):
        raise v.unsupported(f"operand {operand}")
    v.code.whole.add(found)
    return f"R->{v.read(found)}"

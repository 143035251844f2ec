"""Translate texture and surface instructions to C (PTX ISA 9.7.10, 9.7.11). The engine samples and finds addresses.

A texture or surface is named by a 64-bit handle in a register (as in code of nvcc), or by a variable that holds the handle.
"""

from __future__ import annotations

from gpubpf.ptx.module import Address, Operand, Pair, PtxInstruction, Vector

from .arithmetic import emits
from .memory import atomically
from .values import Values, c_type, size_of

# geometry → its number in the ABI, whether it has layers, the coordinates besides the layer
_GEOMETRIES = {
    "1d": ("CS_1D", False, 1),
    "2d": ("CS_2D", False, 2),
    "3d": ("CS_3D", False, 3),
    "a1d": ("CS_1D", True, 1),
    "a2d": ("CS_2D", True, 2),
    "cube": ("CS_CUBE", False, 3),
    "acube": ("CS_CUBE", True, 3),
}
_COMPONENTS = {"r": 0, "g": 1, "b": 2, "a": 3}
_QUERIES = {
    "width": "CS_QUERY_WIDTH",
    "height": "CS_QUERY_HEIGHT",
    "depth": "CS_QUERY_DEPTH",
    "array_size": "CS_QUERY_LAYERS",
    "num_mipmap_levels": "CS_QUERY_LEVELS",
}
_OF_LEVELS = {"width", "height", "depth"}  # the queries with a level
_OUTSIDE = {"trap": "CS_SURFACE_TRAP", "clamp": "CS_SURFACE_CLAMP", "zero": "CS_SURFACE_ZERO"}


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


def _handle(v: Values, operand: Operand) -> str:
    """Return the handle of `[%rd1, …]` or `[variable, …]`."""
    if not isinstance(operand, Address) or operand.base is None or operand.offset:
        raise v.unsupported()
    found = v.names.register(v.scope, operand.base)
    if found is not None:
        if found.width != 8:
            raise v.unsupported(f"{operand.base} is not a register of 64 bits")
        return f"(u64){v.read(found)}"
    storage = v.names.storage(v.scope, operand.base)
    if storage is None or storage.kind != "global":
        raise v.unsupported("a texture or surface reference that is not a variable")
    return f"*(const u64 *)({v.address_of(operand.base)})"


def _geometry(v: Values, i: PtxInstruction) -> tuple[str, bool, int]:
    if {"2dms", "a2dms"}.intersection(i.modifiers):
        raise v.unsupported("no function of CUDA creates a texture with several samples for each texel")
    found = [_GEOMETRIES[m] for m in i.modifiers if m in _GEOMETRIES]
    if len(found) != 1:
        raise v.unsupported()
    return found[0]


def _coordinates(v: Values, operand: Operand, layered: bool, count: int, t: str) -> list[str]:
    """Return designated initialisers of the layer and the coordinates."""
    if not isinstance(operand, Address) or len(operand.coordinates) != 1:
        raise v.unsupported("a separate sampler")
    items = list(_items(operand.coordinates[0]))
    fields = [f".layer = {v.src(items.pop(0), 'u32')}"] if layered else []
    fields.append(f".at = {{{_list(v, items, count, t)}}}")
    return fields


def _list(v: Values, items: list[Operand] | tuple[Operand, ...], count: int, t: str) -> str:
    cast = "(s32)" if t == "s32" else ""
    return ", ".join(cast + v.src(items[k], t) for k in range(count))


@emits("tex", "tld4")
def tex(v: Values, i: PtxInstruction) -> str:
    m = list(i.modifiers)
    gather = i.opcode == "tld4"
    coordinate_type = m.pop()
    result_type = m.pop()
    if coordinate_type not in ("s32", "f32") or result_type not in ("s32", "u32", "f32", "f16", "f16x2"):
        raise v.unsupported()
    operation = "level" if "level" in m else "grad" if "grad" in m else ""
    geometry, layered, count = _geometry(v, i)
    gathers = geometry in ("CS_2D", "CS_CUBE") and result_type not in ("f16", "f16x2")
    if (coordinate_type == "s32" and (gather or geometry == "CS_CUBE")) or (gather and not gathers):
        raise v.unsupported("PTX has no such form")
    if gather and geometry == "CS_CUBE":
        raise v.unsupported("four texels of a cubemap may be on several faces")
    known = {*_GEOMETRIES, "v4", "v2", "base", "level", "grad", *(_COMPONENTS if gather else ())}
    if not known.issuperset(m):
        raise v.unsupported()
    first, place, *rest = i.operands
    destination, present = (first.first, first.second) if isinstance(first, Pair) else (first, None)
    fields = [f".handle = {_handle(v, place)}", f".geometry = {geometry}", f".layered = {int(layered)}"]
    fields += _coordinates(v, place, layered, count, "f32" if coordinate_type == "f32" else "u32")
    if coordinate_type == "s32":
        fields.append(".integer = 1")
    if gather:
        fields.append(".operation = CS_TEX_GATHER")
        fields.append(f".component = {next(_COMPONENTS[x] for x in m if x in _COMPONENTS)}")
    elif operation == "level":
        kind = "f32" if coordinate_type == "f32" else "s32"
        level = v.src(rest.pop(0), kind)
        level = level if kind == "f32" else f"u32_((f32)(s32){level})"
        fields += [".operation = CS_TEX_LEVEL", f".level = {level}"]
    elif operation == "grad":
        dx, dy = (_list(v, _items(rest.pop(0)), count, "f32") for _ in range(2))
        fields += [".operation = CS_TEX_GRAD", f".dx = {{{dx}}}", f".dy = {{{dy}}}"]
    if rest:
        offsets = rest.pop(0)
        if rest or not isinstance(offsets, Vector):
            raise v.unsupported("CUDA's textures have no function that compares depths")
        fields.append(f".offset = {{{_list(v, offsets.items, count, 's32')}}}")
    v.code.memory = True
    text = f"{{ {v.line()} struct cs_texture_fetch f_ = {{{', '.join(fields)}}}; api->texture_fetch(w, &f_); "
    items = _items(destination)
    for k, item in enumerate(items):
        if result_type == "f16x2":
            value = f"pack16(f32_to_f16(f_.result[{2 * k}]), f32_to_f16(f_.result[{2 * k + 1}]))"
            text += v.dst(item, "b32", value)
        elif result_type == "f16":
            text += v.dst(item, "b16", f"f32_to_f16(f_.result[{k}])")
        else:
            text += v.dst(item, "b32", f"f_.result[{k}]")
        text += " "
    if present is not None:  # the predicate for whether a sparse texture has memory at this place
        text += v.dst(present, "pred", "1") + " "
    return text + "}"


def _surface(v: Values, i: PtxInstruction, place: Operand, size: int) -> str:
    """Return the initialiser of a surface access."""
    geometry, layered, count = _geometry(v, i)
    if geometry == "CS_CUBE":
        raise v.unsupported()
    outside = next((_OUTSIDE[x] for x in i.modifiers if x in _OUTSIDE), "CS_SURFACE_TRAP")
    fields = [f".handle = {_handle(v, place)}", f".geometry = {geometry}", f".layered = {int(layered)}"]
    fields += [f".outside = {outside}", f".size = {size}"]
    fields += _coordinates(v, place, layered, count, "s32")
    v.code.memory = True
    return f"{v.line()} const struct cs_surface_access s_ = {{{', '.join(fields)}}};"


def _surface_type(v: Values, i: PtxInstruction) -> str:
    for m in i.modifiers:
        if m in ("b8", "b16", "b32", "b64"):
            return m
    raise v.unsupported()


@emits("suld")
def suld(v: Values, i: PtxInstruction) -> str:
    if i.modifiers[0] != "b":
        raise v.unsupported()
    t = _surface_type(v, i)
    width = size_of(t)
    destination, place = i.operands
    items = _items(destination)
    text = f"{{ {_surface(v, i, place, width * len(items))} "
    text += "const u8 *p_ = (const u8 *)api->surface(w, &s_); "
    text += " ".join(
        f"const {c_type(width)} x{k}_ = LD({c_type(width)}, p_ + {k * width});" for k in range(len(items))
    )
    return text + " " + " ".join(v.dst(o, t, f"x{k}_") for k, o in enumerate(items)) + " }"


@emits("sust")
def sust(v: Values, i: PtxInstruction) -> str:
    t = _surface_type(v, i)
    width = size_of(t)
    place, source = i.operands
    items = _items(source)
    text = f"{{ {_surface(v, i, place, width * len(items))} "
    if i.modifiers[0] == "p":
        if t != "b32":
            raise v.unsupported()
        values = ", ".join(v.src(o, t) for o in items)
        return f"{text}const u32 x_[] = {{{values}}}; api->surface_put(w, &s_, x_, {len(items)}); }}"
    if i.modifiers[0] != "b":
        raise v.unsupported()
    text += "u8 *p_ = (u8 *)api->surface(w, &s_); "
    stores = (f"ST({c_type(width)}, p_ + {k * width}, {v.src(o, t)});" for k, o in enumerate(items))
    return text + " ".join(stores) + " }"


# The types of sured, by whether it is formatted and by operation (PTX ISA 9.7.11.3)
_REDUCTIONS = {
    ("b", "add"): ("u32", "s32", "u64"),
    ("b", "min"): ("u32", "s32", "u64", "s64"),
    ("b", "max"): ("u32", "s32", "u64", "s64"),
    ("b", "and"): ("b32",),
    ("b", "or"): ("b32",),
    ("p", "add"): ("b32",),
    ("p", "min"): ("b32", "b64"),
    ("p", "max"): ("b32", "b64"),
    ("p", "and"): ("b32",),
    ("p", "or"): ("b32",),
}


@emits("sured")
def sured(v: Values, i: PtxInstruction) -> str:
    form, operation, geometry, t, outside = i.modifiers
    if geometry not in ("1d", "2d", "3d") or outside not in _OUTSIDE:
        raise v.unsupported()
    if t not in _REDUCTIONS.get((form, operation), ()):
        raise v.unsupported()
    width = size_of(t)
    place, source = i.operands
    kind = c_type(width)
    text = f"{{ {_surface(v, i, place, width)} const {kind} v_ = {v.src(source, t)}; "
    if form == "b":
        return f"{text}void *p_ = api->surface(w, &s_); (void){atomically(v, operation, t, 'p_')}; }}"
    text += "u32 signed_; void *p_ = api->surface_texel(w, &s_, &signed_); "
    signed, unsigned = (atomically(v, operation, f"{sign}{8 * width}", "p_") for sign in "su")
    return f"{text}if (signed_) (void){signed}; else (void){unsigned}; }}"


@emits("txq", "suq")
def query(v: Values, i: PtxInstruction) -> str:
    asked = i.modifiers[-2]
    is_of_level = "level" in i.modifiers
    if asked not in _QUERIES:
        raise v.unsupported("the answer depends on the source language")
    if (is_of_level and asked not in _OF_LEVELS) or (i.opcode == "suq" and asked == "num_mipmap_levels"):
        raise v.unsupported("PTX has no such form")
    level = v.src(i.operands[2], "u32") if is_of_level else "0"
    v.code.memory = True
    call = f"api->texture_query(w, {_handle(v, i.operands[1])}, {_QUERIES[asked]}, {level})"
    return f"{v.line()} {v.dst(i.operands[0], 'b32', call)}"

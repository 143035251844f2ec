"""Translate asynchronous copies and mbarriers to C (PTX ISA 9.7.9.25, 9.7.13.15).

Copies are done at once, so waiting for one never blocks.
"""

from __future__ import annotations

from gpubpf.ptx.module import Address, Immediate, Name, Not, Operand, PtxInstruction, Vector
from gpubpf.record import replace

from .arithmetic import emits
from .memory import atomically, check_multiple, complete_mbarrier, element, space_at, type_of
from .values import Values, c_type, size_of

_REDUCTIONS = {"add", "and", "or", "xor", "min", "max", "inc", "dec"}


@emits("cp")
def cp(v: Values, i: PtxInstruction) -> str:
    m = i.modifiers
    if "L2::cache_hint" in m:
        v.src(i.operands[-2 if "cp_mask" in m else -1], "b64")
    if m[:3] == ("async", "mbarrier", "arrive"):
        # the copies are complete, so this arrives at once; without .noinc it also increments the expected arrivals
        v.code.alone = True
        space = space_at(v, i, i.operands[0])
        pointer = v.pointer(space, v.address(i.operands[0]), 8, "a")
        return (
            f"{v.line(space)} mbar_arrive((u64 *){pointer}, 1, 0);" if "noinc" in m else f"(void){pointer};"
        )
    if "prefetch" in m:
        if "tensor" not in m:
            v.src(i.operands[1], "u32")  # the size
        return ""
    if "tensor" in m:
        return _tensor(v, i)
    if any(x in m for x in ("commit_group", "wait_group", "wait_all")):
        if i.operands and not isinstance(i.operands[0], Immediate):
            raise v.unsupported("a number of groups that is not constant")
        v.code.alone = True
        return ""
    return _bulk(v, i) if "bulk" in m else _small(v, i)


def _small(v: Values, i: PtxInstruction) -> str:
    """Translate cp.async of 4, 8 or 16 bytes."""
    size = i.operands[2]
    if not isinstance(size, Immediate):
        raise v.unsupported("a size that is not constant")
    n = size.integer
    if n not in ((16,) if "cg" in i.modifiers else (4, 8, 16)):
        raise v.unsupported(f"{n} bytes")
    to = v.pointer("shared", v.address(i.operands[0]), n, "w")
    source = v.pointer("global", v.address(i.operands[1]), n, "r")
    count = f"{n}u"
    rest = i.operands[3 : len(i.operands) - ("L2::cache_hint" in i.modifiers)]
    if rest:
        extra = rest[0]
        found = v.names.register(v.scope, extra.name) if isinstance(extra, Name) else None
        if isinstance(extra, Not) or (found is not None and found.width == 0):
            v.require((7, 7), "a predicate")
            count = f"({v.src(extra, 'pred')} ? 0u : {n}u)"
        else:
            count = f"MIN(u32, {v.src(extra, 'u32')}, {n}u)"
    text = f"{{ {v.line()} u8 *d_ = (u8 *){to}; const u32 n_ = {count}; "
    return text + (
        f"if (n_) __builtin_memcpy(d_, {source}, n_); if (n_ < {n}) __builtin_memset(d_ + n_, 0, {n} - n_); }}"
    )


def _bulk(v: Values, i: PtxInstruction) -> str:
    """Translate cp.async.bulk and cp.reduce.async.bulk of multiples of 16 bytes."""
    m = list(i.modifiers)
    to, source_space = (x.split("::")[0] for x in m if x.split("::")[0] in ("global", "shared"))
    v.code.alone = True
    operands = list(i.operands)
    destination, source = v.address(operands[0]), v.address(operands[1])
    multicast = "multicast::cluster" in m
    text = f"const u64 to_ = {_of_rank(destination, multicast)}, from_ = {source}; "
    text += f"const u32 n_ = {v.src(operands[2], 'u32')}; {check_multiple(to, 'to_', 'n_', 16)} "
    if m[0] == "reduce":
        operation = next(x for x in m if x in _REDUCTIONS)
        t = type_of(v, i)
        width = size_of(t)
        kind = c_type(width)
        body = f"const {kind} v_ = LD({kind}, {element(v, source_space, 'from_', width, 'r')}); "
        body += f"(void){atomically(v, operation, t, element(v, to, 'to_', width, 'a'))};"
        text += f"for (u32 k_ = 0; k_ < n_; k_ += {width}) {{ {body} }} "
    else:
        read, write = element(v, source_space, "from_", 16, "r"), element(v, to, "to_", 16, "w")
        copy = f"const u128 x_ = LD(u128, {read}); ST(u128, {write}, x_);"
        if "cp_mask" in m:
            copy = f"cs_copy_masked({write}, {read}, {v.src(operands[-1], 'b16')});"
        text += f"for (u32 k_ = 0; k_ < n_; k_ += 16) {{ {copy} }} "
    if "bulk_group" not in m:
        text += _complete(v, operands[3], multicast)
    return f"{{ {v.line()} {for_each_rank(v, operands[4], text) if multicast else text} }}"


def _of_rank(address: str, multicast: bool) -> str:
    """Return an address in shared memory; for a multicast, the address in the block of rank `r_`."""
    return f"cs_map_to_rank({address}, r_)" if multicast else address


def for_each_rank(v: Values, mask: Operand, text: str) -> str:
    """Return C that runs `text` for the rank `r_` of each block that the mask of a multicast names."""
    each = f"for (u32 ranks_ = {v.src(mask, 'b16')}; ranks_; ranks_ &= ranks_ - 1)"
    return f"{each} {{ const u32 r_ = (u32)__builtin_ctz(ranks_); {text} }}"


def in_shared(v: Values, operand: Operand) -> str:
    """Return an address in the block's shared memory. The operand may be a generic address."""
    is_shared = space_at(v, v.instruction, operand) == "shared"
    return v.address(operand) if is_shared else f"{v.address(operand)} - w->shared_window"


def _complete(v: Values, mbarrier: Operand, multicast: bool, paired: bool = False) -> str:
    """Return C that completes `n_` bytes on an mbarrier.

    multicast: the mbarrier is that of the block of rank `r_`
    paired: or that of the other block of its pair, if the operand is in a block of the other parity (.cta_group::2)
    """
    if not multicast:
        return f"mbar_complete((u64 *){v.pointer('shared', v.address(mbarrier), 8, 'a')}, n_);"
    address = in_shared(v, mbarrier)
    v.forget_base()
    to = "cs_map_to_pair(b_, r_)" if paired else _of_rank("b_", multicast)
    return f"const u64 b_ = {address}; mbar_complete((u64 *){v.pointer('shared', to, 8, 'a')}, n_);"


# The modes of loads and of stores, with their names in the ABI.
_LOADS = {"tile": "TILE", "im2col": "IM2COL", "tile::gather4": "ROWS"}
_STORES = {"tile": "TILE", "im2col_no_offs": "IM2COL", "tile::scatter4": "ROWS"}


def _tensor(v: Values, i: PtxInstruction) -> str:
    """Translate cp.async.bulk.tensor and cp.reduce.async.bulk.tensor, but for .im2col::w and .im2col::w::128."""
    m = list(i.modifiers)
    loads = "bulk_group" not in m
    modes = _LOADS if loads else _STORES
    if {"im2col::w", "im2col::w::128"}.intersection(m):
        raise v.unsupported()
    v.code.alone = v.code.memory = v.code.reads_shared = v.code.writes_shared = True
    mode = next((name for modifier, name in modes.items() if modifier in m), "TILE")
    first, second, *rest = i.operands
    tensor, shared = (second, first) if loads else (first, second)
    if not isinstance(tensor, Address) or len(tensor.coordinates) != 1:
        raise v.unsupported()
    coordinates = tensor.coordinates[0]
    places = coordinates.items if isinstance(coordinates, Vector) else (coordinates,)
    rank = int(next(x for x in m if x in ("1d", "2d", "3d", "4d", "5d"))[0])
    if len(places) != (5 if mode == "ROWS" else rank):
        raise v.unsupported(f"{len(places)} coordinates")
    operation = next((x.upper() for x in m if x in _REDUCTIONS), "LOAD" if loads else "STORE")
    at = ", ".join(f"(s32){v.src(place, 's32')}" for place in places)
    multicast = "multicast::cluster" in m
    fields = [
        f".map = {v.address(replace(tensor, coordinates=()))}",
        f".shared = {_of_rank(v.address(shared), multicast)}",
        f".rank = {rank}",
        f".operation = CS_TENSOR_{operation}",
        f".mode = CS_TENSOR_{mode}",
        f".at = {{{at}}}",
    ]
    if mode == "IM2COL" and loads:
        offsets = rest.pop(1)
        items = offsets.items if isinstance(offsets, Vector) else (offsets,)
        if len(items) != rank - 2:
            raise v.unsupported(f"{len(items)} offsets")
        fields.append(f".offset = {{{', '.join(v.src(o, 'b16') for o in items)}}}")
    v.forget_base()
    text = f"{v.line()} const struct cs_tensor_copy c_ = {{{', '.join(fields)}}}; "
    if not loads:
        return f"{{ {text}api->tensor_copy(w, &c_); }}"
    paired = "cta_group::2" in m
    text += f"const u32 n_ = api->tensor_copy(w, &c_); {_complete(v, rest[0], multicast, paired)}"
    return f"{{ {for_each_rank(v, rest[1], text) if multicast else text} }}"


# The fields of tensormap.replace that are constants, with the number of their values; and the fields that belong to a dimension.
_CHOICES = {"elemtype": 16, "interleave_layout": 3, "swizzle_mode": 4, "swizzle_atomicity": 4, "fill_mode": 2}
_DIMENSIONS = {"box_dim": 5, "global_dim": 5, "global_stride": 4, "element_stride": 5}
_NEWER_TYPES = 13  # the element types from this number on came with PTX 8.7


@emits("tensormap")
def tensormap(v: Values, i: PtxInstruction) -> str:
    """Translate tensormap.replace and tensormap.cp_fenceproxy. All lanes execute them with the same operands."""
    v.code.alone = v.code.memory = v.code.reads_shared = v.code.writes_shared = True
    if i.modifiers[0] == "cp_fenceproxy":
        if not isinstance(i.operands[2], Immediate) or i.operands[2].integer != 128:
            raise v.unsupported(f"{i.operands[2]} bytes")
        to, source = v.address(i.operands[0]), v.address(i.operands[1])
        copied = f"LD(u64, {element(v, 'shared', 'from_', 8, 'r')})"
        stored = f"ST(u64, {element(v, 'global', 'to_', 8, 'w')}, {copied});"
        return f"{{ {v.line()} const u64 to_ = {to}, from_ = {source}; for (u64 k_ = 0; k_ < 128; k_ += 8) {stored} }}"
    _, _, field, *_, t = i.modifiers
    address, *rest = i.operands
    dimension = 0
    if field in _DIMENSIONS:
        place = rest.pop(0)
        dimension = place.integer if isinstance(place, Immediate) else -1
        if not 0 <= dimension < _DIMENSIONS[field]:
            raise v.unsupported(f"dimension {place}")
    (value,) = rest
    if field in _CHOICES:
        number = value.integer if isinstance(value, Immediate) else -1
        if not 0 <= number < _CHOICES[field]:
            raise v.unsupported(f"value {value}")
        if field == "elemtype" and number >= _NEWER_TYPES:
            v.require((8, 7), f"value {value}")
    window = "w->shared_window + " if space_at(v, i, address) == "shared" else ""
    fields = f".map = {window}{v.address(address)}, .field = CS_MAP_{field.upper()}, .dimension = {dimension}"
    v.forget_base()
    return (
        f"{{ {v.line()} const struct cs_map_change c_ = {{{fields}, .value = {v.src(value, t)}}}; "
        "api->change_map(w, &c_); }"
    )


@emits("clusterlaunchcontrol")
def clusterlaunchcontrol(v: Values, i: PtxInstruction) -> str:
    """Translate clusterlaunchcontrol. It never cancels a launch here, as if all blocks of the grid had begun.

    A response has the answer in bit 0 and the first block's coordinates in its other words.
    """
    m = i.modifiers
    if m[0] == "query_cancel":
        destination, response = i.operands
        words = ["(u32)(x_ >> 32)", "(u32)(x_ >> 64)", "(u32)(x_ >> 96)", "0"]
        if m[1] == "is_canceled":
            results = v.dst(destination, "pred", "(u8)(x_ & 1)")
        elif m[1] == "get_first_ctaid":
            if not isinstance(destination, Vector):
                raise v.unsupported("a result that is not a vector")
            pairs = zip(destination.items, words, strict=True)
            results = " ".join(v.dst(item, "b32", word) for item, word in pairs)
        else:
            results = v.dst(destination, "b32", words["xyz".index(m[1].removeprefix("get_first_ctaid::"))])
        return f"{{ const u128 x_ = {v.src(response, 'b128')}; {results} }}"
    v.code.alone = True
    place, mbarrier = i.operands
    everywhere = "multicast::cluster::all" in m
    to = in_shared(v, place) if everywhere else v.address(place)
    text = f"const u64 to_ = {to}; const u32 n_ = 16; "
    v.forget_base()
    space = space_at(v, i, place)
    if not everywhere:
        store = f"ST(u128, {v.pointer(space, 'to_', 16, 'w')}, 0);"
        completion = complete_mbarrier(v, space_at(v, i, mbarrier), mbarrier, "n_")
        return f"{{ {v.line()} {text}{store} {completion} }}"
    store = f"ST(u128, {v.pointer('shared', _of_rank('to_', True), 16, 'w')}, 0);"
    each = "for (u32 r_ = 0; r_ < w->cluster_nctaid[0] * w->cluster_nctaid[1] * w->cluster_nctaid[2]; r_++)"
    return f"{{ {v.line()} {text}{each} {{ {store} {_complete(v, mbarrier, True)} }} }}"


@emits("mbarrier")
def mbarrier(v: Values, i: PtxInstruction) -> str:
    m = i.modifiers
    kind = m[0]
    if kind == "pending_count":
        return v.dst(i.operands[0], "b32", f"{v.src(i.operands[1], 'b64')} & 0xfffffu")
    v.code.alone = True
    result = kind in ("arrive", "arrive_drop", "test_wait", "try_wait")
    operands = i.operands
    address = operands[1] if result else operands[0]
    space = space_at(v, i, address)
    pointer = f"(u64 *){v.pointer(space, v.address(address), 8, 'a')}"
    line = v.line(space)
    if kind == "init":
        return f"{line} mbar_init({pointer}, {v.src(operands[1], 'b32')});"
    if kind == "inval":
        return f"{line} *{pointer} = 0;"
    if kind in ("expect_tx", "complete_tx"):
        change = "mbar_expect" if kind == "expect_tx" else "mbar_complete"
        return f"{line} {change}({pointer}, {v.src(operands[1], 'b32')});"
    if kind in ("arrive", "arrive_drop"):
        count = v.src(operands[2], "b32") if len(operands) > 2 else "1"
        text = f"{line} {{ u64 *const b_ = {pointer}; "
        if "expect_tx" in m:
            text += f"mbar_expect(b_, {count}); "
            count = "1"
        drop = count if kind == "arrive_drop" else "0"
        return f"{text}const u64 x_ = mbar_arrive(b_, {count}, {drop}); {v.dst(operands[0], 'b64', 'x_')} }}"
    if kind in ("test_wait", "try_wait"):
        if len(operands) > 3:
            v.src(operands[3], "u32")  # the limit of the time
        wanted = f"{v.src(operands[2], 'b32')} & 1" if "parity" in m else f"{v.src(operands[2], 'b64')} >> 63"
        return f"{line} {{ const u64 x_ = *{pointer}; {v.dst(operands[0], 'pred', f'(x_ >> 63) != ({wanted})')} }}"
    raise v.unsupported()

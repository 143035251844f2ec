"""Translate loads, stores, atomics and fences to C (PTX ISA 9.7.9, 9.7.13)."""

from __future__ import annotations

from gpubpf.errors import PtxError
from gpubpf.ptx.module import Address, Immediate, Name, Operand, PtxInstruction, Vector
from gpubpf.record import replace

from .arithmetic import emits
from .values import FLOATS, Values, c_type, size_of

SPACES = {"global", "shared", "local", "const", "param"}
_STRONG = {"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio", "sc"}


def space_of(i: PtxInstruction) -> str:
    for m in i.modifiers:
        base = m.split("::")[0]
        if base in SPACES:
            return base
    return "generic"


def space_at(v: Values, i: PtxInstruction, address: Operand) -> str:
    """Return the space of one address: the instruction's or, without one, the space of the variable that the address names."""
    space = space_of(i)
    return v.names.named_space(v.scope, address) or space if space == "generic" else space


def strong(i: PtxInstruction) -> bool:
    """Return whether other threads may see an access or its order: it must not move, and all lanes do it before any continues."""
    return not _STRONG.isdisjoint(i.modifiers)


def communicates(i: PtxInstruction) -> bool:
    """Return whether an instruction communicates with other threads. On the virtual clock, such an instruction waits for its turn."""
    if i.opcode in ("ld", "st", "cp") and not any(m.startswith("mbarrier") for m in i.modifiers):
        return i.modifiers[:1] == ("reduce",) if i.opcode == "cp" else strong(i)
    if i.opcode in ("st", "cp"):
        return True
    if i.opcode == "tcgen05":
        return i.modifiers[:1] == ("commit",)
    return i.opcode in ("atom", "red", "mbarrier", "multimem") or (
        i.opcode == "call" and _called(i) == "vprintf"
    )


def observes(i: PtxInstruction, used: bool, again: bool) -> bool:
    """Return whether the order in which threads communicate can change their results.

    used: whether the result is read
    again: whether the instruction may be executed more than once, like a load that waits for a value
    """
    if i.opcode in ("atom", "red"):
        return used or i.modifiers[-1] in FLOATS  # floating-point sums depend on the order
    if i.opcode == "cp" and i.modifiers[0] == "reduce" and i.modifiers[-1] in FLOATS:
        return True
    if i.opcode == "multimem":
        return (
            again if i.modifiers[0] == "ld_reduce" else i.modifiers[0] == "red" and i.modifiers[-1] in FLOATS
        )
    return (
        again
        if i.opcode == "ld"
        else i.opcode in ("mbarrier", "call", "cp") and i.modifiers[:1] != ("reduce",)
    )


def _called(i: PtxInstruction) -> str:
    return next((o.name for o in i.operands if isinstance(o, Name)), "")


def type_of(v: Values, i: PtxInstruction) -> str:
    """Return the last type in the modifiers: `.v4.f32.add` and `.f16.max.noftz` are allowed, too."""
    for m in reversed(i.modifiers):
        if m.rstrip("0123456789x") in ("b", "u", "s", "f", "bf"):
            size_of(m)
            return m
    raise v.unsupported()


def is_sink(operand: Operand) -> bool:
    return isinstance(operand, Name) and operand.name == "_"


def _vector(i: PtxInstruction) -> int:
    return next((int(m[1:]) for m in i.modifiers if m in ("v2", "v4", "v8")), 1)


def _parameter(v: Values, operand: Operand, space: str, how: str) -> str | None:
    """Return a pointer for `[param+4]`; None if the address does not name a parameter. Raises PtxError."""
    if space not in ("param",) or not isinstance(operand, Address) or operand.base is None:
        return None
    if v.names.register(v.scope, operand.base) is not None:
        return None
    storage = v.names.storage(v.scope, operand.base)
    if storage is None:
        return None
    if storage.kind == "kernel":
        if how == "w":
            raise PtxError(
                f"PTX line {v.instruction.line}: Illegal to write to input parameter '{storage.name}'"
            )
        return f"(w->params + {storage.index + operand.offset})" if operand.index is None else None
    if storage.kind == "frame" and storage.name in v.local_parameters:
        if operand.index is not None:
            return None
        offset = v.local_parameters[storage.name] + operand.offset
        return f"(w->local + (u64)l * w->local_stride + w->lsp[l] + local_at_ + {offset}u)"
    if storage.kind == "frame":
        if operand.index is not None:
            raise v.unsupported("a register as the index of a parameter of a call, or of a result")
        if not 0 <= operand.offset < max(1, storage.size):
            raise v.unsupported("an offset outside of the parameter")
        return f"(R->{storage.name}[l] + {operand.offset})"
    return None


def _pointer(v: Values, i: PtxInstruction, operand: Operand, size: int, how: str) -> tuple[str, str]:
    """Return the pointer to `size` bytes for a load or store, and the statement that must precede the access."""
    space = space_of(i)
    v.code.memory = True
    v.code.alone = strong(i)
    parameter = _parameter(v, operand, space, how)
    if parameter is not None:
        return parameter, ""
    if space == "param" and v.names.function.kind == "func":
        space = "local"  # a parameter whose address mov takes is in local memory (PTX ISA 9.7.9.4)
    return v.pointer(space, v.address(operand), size, how), v.line(space) + " "


@emits("ld", "ldu")
def ld(v: Values, i: PtxInstruction) -> str:
    t = i.modifiers[-1]
    count = _vector(i)
    width = size_of(t)
    kind = c_type(width)
    pointer, before = _pointer(v, i, i.operands[1], width * count, "r")
    load = "LDV" if strong(i) and width <= 8 else "LD"
    destination = i.operands[0]
    if count == 1 and not isinstance(destination, Vector):
        return before + v.dst(destination, t, f"{load}({kind}, {pointer})")
    if not isinstance(destination, Vector):
        raise v.unsupported(f"destination {destination}")
    v.check_elements(destination.items)
    text = f"{{ {before}const u8 *p_ = (const u8 *){pointer}; "
    text += " ".join(
        f"const {kind} x{k}_ = {load}({kind}, p_ + {k * width});" for k in range(len(destination.items))
    )
    return text + " " + " ".join(v.dst(o, t, f"x{k}_") for k, o in enumerate(destination.items)) + " }"


@emits("st")
def st(v: Values, i: PtxInstruction) -> str:
    if i.modifiers[0] == "async" and "release" in i.modifiers:
        i = replace(i, modifiers=i.modifiers[1:])
    elif i.modifiers[0] in ("async", "bulk"):
        return (store_async if i.modifiers[0] == "async" else store_bulk)(v, i)
    t = i.modifiers[-1]
    width = size_of(t)
    kind = c_type(width)
    pointer, before = _pointer(v, i, i.operands[0], width * _vector(i), "w")
    store = ("STSC" if "sc" in i.modifiers else "STV") if strong(i) and width <= 8 else "ST"
    source = i.operands[1]
    items = source.items if isinstance(source, Vector) else (source,)
    if len(items) == 1:
        return f"{before}{store}({kind}, {pointer}, {v.src(items[0], t)});"
    v.check_elements(items)
    text = f"{{ {before}u8 *p_ = (u8 *){pointer}; "
    return (
        text
        + " ".join(
            f"{store}({kind}, p_ + {k * width}, {v.src(o, t)});"
            for k, o in enumerate(items)
            if not is_sink(o)
        )
        + " }"
    )


def store_async(v: Values, i: PtxInstruction) -> str:
    """Translate st.async to shared memory. The store is done at once, and completes its bytes on the mbarrier."""
    t = i.modifiers[-1]
    width = size_of(t)
    space = space_at(v, i, i.operands[0])
    source = i.operands[1]
    items = source.items if isinstance(source, Vector) else (source,)
    v.code.alone = True
    pointer = v.pointer(space, v.address(i.operands[0]), width * len(items), "w")
    text = f"{{ {v.line()} u8 *p_ = (u8 *){pointer}; "
    text += " ".join(f"ST({c_type(width)}, p_ + {k * width}, {v.src(o, t)});" for k, o in enumerate(items))
    completion = complete_mbarrier(v, space_at(v, i, i.operands[2]), i.operands[2], str(width * len(items)))
    return f"{text} {completion} }}"


def store_bulk(v: Values, i: PtxInstruction) -> str:
    """Translate st.bulk, which stores zeros."""
    space = space_at(v, i, i.operands[0])
    v.code.alone = True
    address = v.address(i.operands[0])
    if not isinstance(i.operands[2], Immediate) or i.operands[2].integer:
        raise v.unsupported(f"initial value {i.operands[2]}")
    size = v.src(i.operands[1], "u64")
    text = f"{{ {v.line()} const u64 to_ = {address}, n_ = {size}; {check_multiple(space, 'to_', 'n_', 8)} "
    return text + f"for (u64 k_ = 0; k_ < n_; k_ += 8) ST(u64, {element(v, space, 'to_', 8, 'w')}, 0); }}"


def check_multiple(space: str, address: str, size: str, unit: int) -> str:
    """Return a check that faults if the size of a bulk copy is not a multiple of the unit."""
    base = "shared_window_ + " if space == "shared" else ""
    return f"if ({size} & {unit - 1}) api->fault(w, CS_FAULT_MISALIGNED, {base}{address}, (u32){size}, 'w');"


def element(v: Values, space: str, address: str, width: int, access: str) -> str:
    """Return a host pointer to the bytes `k_` after an address in a C variable."""
    v.forget_base()
    return v.pointer(space, f"{address} + k_", width, access)


def complete_mbarrier(v: Values, space: str, operand: Operand, size: str) -> str:
    """Return C that completes bytes on an mbarrier."""
    pointer = v.pointer(space, v.address(operand), 8, "a")
    return f"mbar_complete((u64 *){pointer}, {size});"


_FETCH = {"add": "ATOM_ADD", "and": "ATOM_AND", "or": "ATOM_OR", "xor": "ATOM_XOR", "exch": "ATOM_EXCH"}


def _update(v: Values, operation: str, t: str, value: str) -> str:
    """Return the new value from `old` and `value`, for atomic operations without a corresponding instruction."""
    width = size_of(t) * 8
    signed = f"s{width}" if t.startswith("s") else f"u{width}"
    if operation in ("min", "max"):
        if t in ("f32", "f64"):
            return f"f{operation}{width}(old, {value})"
        halves = {"f16": "h", "bf16": "b"}
        if t in halves:
            return f"{halves[t]}{operation}(old, {value})"
        if t in ("f16x2", "bf16x2"):
            h = halves[t[:-2]]
            return (
                f"pack16({h}{operation}(lo16(old), lo16({value})), {h}{operation}(hi16(old), hi16({value})))"
            )
        return f"{operation.upper()}({signed}, old, {value})"
    if operation == "inc":
        return f"old >= {value} ? 0 : old + 1"
    if operation == "dec":
        return f"old == 0 || old > {value} ? {value} : old - 1"
    if operation == "add":
        if t in ("f32", "f64"):
            return f"fadd{width}(old, {value})"
        if t in ("f16", "bf16"):
            return f"{'h' if t == 'f16' else 'b'}add(old, {value})"
        if t in ("f16x2", "bf16x2"):
            h = "h" if t == "f16x2" else "b"
            return f"pack16({h}add(lo16(old), lo16({value})), {h}add(hi16(old), hi16({value})))"
    raise v.unsupported()


_OPERATIONS = {"add", "and", "or", "xor", "exch", "min", "max", "inc", "dec", "cas"}


@emits("atom", "red")
def atom(v: Values, i: PtxInstruction) -> str:
    t = type_of(v, i)
    operation = _operation(v, i)
    completes = "mbarrier::complete_tx::bytes" in i.modifiers
    count = _vector(i)
    width = size_of(t)
    kind = c_type(width)
    result = i.operands[0] if i.opcode == "atom" else None
    operands = i.operands[1:] if i.opcode == "atom" else i.operands
    space = space_at(v, i, operands[0])
    pointer = v.pointer(space, v.address(operands[0]), width * count, "a")
    if space == "shared":
        v.code.reads_shared = True
    v.code.alone = v.code.alone or completes
    value = operands[1]
    swapped = v.src(operands[2], t) if operation == "cas" else ""
    if count > 1:
        if not isinstance(value, Vector):
            raise v.unsupported()
        text = f"{{ {v.line(space)} u8 *p_ = (u8 *){pointer}; "
        for k, item in enumerate(value.items):
            text += f"{{ const {kind} v_ = {v.src(item, t)}; (void)v_; "
            text += f"const {kind} x_ = {atomically(v, operation, t, f'(p_ + {k * width})')}; (void)x_; "
            if isinstance(result, Vector):
                text += v.dst(result.items[k], t, "x_")
            text += " } "
        return text + "}"
    text = f"{{ {v.line(space)} void *p_ = {pointer}; const {kind} v_ = {v.src(value, t)}; (void)v_; "
    text += f"const {kind} x_ = {atomically(v, operation, t, 'p_', swapped)}; (void)x_; "
    if result is not None and not is_sink(result):
        text += v.dst(result, t, "x_")
    if completes:
        text += complete_mbarrier(v, space_at(v, i, operands[2]), operands[2], str(width))
    return text + " }"


def atomically(v: Values, operation: str, t: str, where: str, swapped: str = "") -> str:
    """Return C for an atomic operation on `v_` and the value at `where`, whose result is the old value.

    swapped: for cas, the value to store if the old value equals `v_`
    """
    width = size_of(t)
    kind = c_type(width)
    if operation == "cas":
        if width == 16:
            return f"cs_cas128({where}, v_, {swapped})"
        return f"ATOM_CAS({kind}, {where}, v_, {swapped})"
    if operation == "exch" and width == 16:
        return f"cs_exch128({where}, v_)"
    if operation in _FETCH and t not in FLOATS:
        return f"{_FETCH[operation]}({kind}, {where}, v_)"
    return f"ATOM_CAS_LOOP({kind}, {where}, {_update(v, operation, t, 'v_')})"


@emits("membar", "fence")
def fence(v: Values, i: PtxInstruction) -> str:
    if any(m.startswith(("proxy", "mbarrier")) for m in i.modifiers):
        return ""
    v.code.alone = True
    v.code.before = "__atomic_thread_fence(__ATOMIC_SEQ_CST);"
    return ""


@emits(
    "prefetch",
    "prefetchu",
    "applypriority",
    "discard",
    "createpolicy",
    "griddepcontrol",
    "setmaxnreg",
    "pmevent",
)
def nothing(v: Values, i: PtxInstruction) -> str:
    if i.opcode == "createpolicy":
        return v.dst(i.operands[0], "b64", "0")
    return ""


_COMBINED = {"add": "+", "and": "&", "or": "|", "xor": "^"}


@emits("multimem")
def multimem(v: Values, i: PtxInstruction) -> str:
    """Translate an access to each device's memory at an address of a multicast object (PTX ISA 9.7.9.14)."""
    what, t = i.modifiers[0], type_of(v, i)
    width, count = size_of(t), _vector(i)
    if what not in ("ld_reduce", "st", "red"):
        raise v.unsupported()
    where, value = (i.operands[1], i.operands[0]) if what == "ld_reduce" else i.operands[:2]
    items = value.items if isinstance(value, Vector) else (value,)
    if len(items) != count:
        raise v.unsupported(f"{len(items)} values")
    v.check_elements(items)
    v.code.memory = v.code.alone = True
    access = {"ld_reduce": "r", "st": "w", "red": "a"}[what]
    size = width * count
    text = f"{{ {v.line()} u8 *r_[CS_MOST_REPLICAS]; "
    text += f"const u32 n_ = api->replicas(w, {v.address(where)}, {size}, {ord(access)}, r_); "
    if what == "ld_reduce":
        text += " ".join(_reduced(v, i, t, k) for k in range(count))
        return text + " ".join(v.dst(item, t, f"x{k}_") for k, item in enumerate(items)) + " }"
    kind = c_type(width)
    text += "for (u32 j_ = 0; j_ < n_; j_++) { "
    for k, item in enumerate(items):
        at = f"(r_[j_] + {k * width})"
        text += f"{{ const {kind} v_ = {v.src(item, t)}; (void)v_; "
        text += (
            f"ST({kind}, {at}, v_); }} " if what == "st" else f"{atomically(v, _operation(v, i), t, at)}; }} "
        )
    return text + "} }"


def _operation(v: Values, i: PtxInstruction) -> str:
    found = next((m for m in i.modifiers if m in _OPERATIONS), None)
    if found is None:
        raise v.unsupported()
    return found


def _reduced(v: Values, i: PtxInstruction, t: str, k: int) -> str:
    """Return C for `xk_`, the values of all devices at one place, reduced in the order of the devices."""
    operation, width = _operation(v, i), size_of(t)
    kind, at = c_type(width), k * width
    each = "for (u32 j_ = 1; j_ < n_; j_++)"
    if any(m.startswith("acc::") for m in i.modifiers):
        return _reduced_as_f32(v, i, t, k, each)
    updated = (
        f"old {_COMBINED[operation]} v_"
        if operation in _COMBINED and t not in FLOATS
        else _update(v, operation, t, "v_")
    )
    return (
        f"{kind} x{k}_ = LDV({kind}, r_[0] + {at}); {each} {{ const {kind} old = x{k}_,"
        f" v_ = LDV({kind}, r_[j_] + {at}); x{k}_ = ({kind})({updated}); }} "
    )


def _reduced_as_f32(v: Values, i: PtxInstruction, t: str, k: int, each: str) -> str:
    """Return C for `xk_`, a sum of halves that is rounded once, at the end (`.acc::f32`)."""
    half = t.removesuffix("x2")
    if "acc::f32" not in i.modifiers or half not in ("f16", "bf16") or _operation(v, i) != "add":
        raise v.unsupported()
    text, sums = "", []
    for part in range(2 if t.endswith("x2") else 1):
        sums.append(f"f32_to_{half}(s{k}_{part}_)")
        load = f"{half}_to_f32(LDV(u16, r_[{{}}] + {k * size_of(t) + 2 * part}))"
        text += f"u32 s{k}_{part}_ = {load.format(0)}; "
        text += f"{each} s{k}_{part}_ = fadd32(s{k}_{part}_, {load.format('j_')}); "
    return (
        text
        + f"const {c_type(size_of(t))} x{k}_ = {sums[0] if len(sums) == 1 else f'pack16({sums[0]}, {sums[1]})'}; "
    )


@emits("nanosleep")
def nanosleep(v: Values, i: PtxInstruction) -> str:
    """Translate nanosleep on the virtual clock: it advances the clock. On the real clock, it ends a block (function.py)."""
    v.code.alone = True
    return "" if v.injected else f"w->budget = 0; w->time[l] += {v.src(i.operands[0], 'u32')};"


@emits("alloca")
def alloca(v: Values, i: PtxInstruction) -> str:
    """Allocate downwards from the end of the lane's local memory, until the function returns (PTX ISA 9.7.15)."""
    v.stack = True
    v.code.memory = True
    t = i.modifiers[-1]
    align = i.operands[2].integer if len(i.operands) > 2 and isinstance(i.operands[2], Immediate) else 8
    if align not in (1, 2, 4, 8, 16):
        raise v.unsupported(f"alignment {align}; use 1, 2, 4, 8 or 16")
    size = f"(u64){v.src(i.operands[1], t)}"
    return f"{v.line()} {v.dst(i.operands[0], t, f'cs_alloca(w, l, {size})')}"


@emits("stacksave")
def stacksave(v: Values, i: PtxInstruction) -> str:
    v.stack = True
    return v.dst(i.operands[0], i.modifiers[-1], "w->sp[l]")


@emits("stackrestore")
def stackrestore(v: Values, i: PtxInstruction) -> str:
    v.stack = True
    v.code.memory = True
    return f"{v.line()} cs_stackrestore(w, l, {v.src(i.operands[0], i.modifiers[-1])});"

"""Loads, stores, atomics, fences and asynchronous copies → C (PTX ISA 9.7.9, 9.7.13)."""

from __future__ import annotations

from gpubpf.ptx.module import Address, Immediate, Instruction, Name, Operand, Vector

from .arithmetic import emits
from .values import FLOATS, Values, c_type, size_of

SPACES = {"global", "shared", "local", "const", "param"}
_STRONG = {"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio", "sc"}


def space_of(i: Instruction) -> str:
    for m in i.modifiers:
        base = m.split("::")[0]
        if base in SPACES:
            return base
    return "generic"


def strong(i: Instruction) -> bool:
    """Ordered, or meant to be seen by other threads: not to be moved, done by all lanes before what follows."""
    return not _STRONG.isdisjoint(i.modifiers)


def communicates(i: Instruction) -> bool:
    """Whether other threads are meant to see this, or it to see what they did: on the virtual clock it waits for its turn."""
    if i.opcode in ("ld", "st"):
        return strong(i)
    if i.opcode == "cp":
        return "mbarrier" in i.modifiers
    return i.opcode in ("atom", "red", "mbarrier") or (i.opcode == "call" and _called(i) == "vprintf")


def observes(i: Instruction, used: bool, again: bool) -> bool:
    """Whether the order in which threads communicate can show in what they do.

    `used`: something reads the result; `again`: it may be reached more than once, as a load that waits for a value is.
    """
    if i.opcode in ("atom", "red"):
        return used or i.modifiers[-1] in FLOATS  # sums of floats depend on the order
    return again if i.opcode == "ld" else i.opcode in ("mbarrier", "call", "cp")


def _called(i: Instruction) -> str:
    return next((o.name for o in i.operands if isinstance(o, Name)), "")


def _vector(i: Instruction) -> int:
    return next((int(m[1:]) for m in i.modifiers if m in ("v2", "v4", "v8")), 1)


def _parameter(v: Values, operand: Operand, space: str) -> tuple[str, str] | None:
    """`[param+4]` by name: (pointer expression, frame field or "") ; None when the address is not a parameter's name."""
    if space not in ("param",) or not isinstance(operand, Address) or operand.base is None:
        return None
    if v.names.register(v.scope, operand.base) is not None:
        return None
    storage = v.names.storage(v.scope, operand.base)
    if storage is None:
        return None
    if storage.kind == "kernel":
        return f"(w->params + {storage.index + operand.offset})", ""
    if storage.kind == "frame" and storage.name in v.local_parameters:
        offset = v.local_parameters[storage.name] + operand.offset
        return f"(w->local + (u64)l * w->local_size + w->lsp[l] + @LOCAL@{offset}@)", ""
    if storage.kind == "frame":
        if not 0 <= operand.offset < max(1, storage.size):
            raise v.unsupported("an offset outside of the parameter")
        return f"(R->{storage.name}[l] + {operand.offset})", storage.name
    return None


@emits("ld", "ldu")
def ld(v: Values, i: Instruction) -> str:
    t = i.modifiers[-1]
    space = space_of(i)
    count = _vector(i)
    width = size_of(t)
    kind = c_type(width)
    v.code.memory = True
    parameter = _parameter(v, i.operands[1], space)
    if parameter is not None:
        pointer = parameter[0]
    else:
        pointer = v.pointer(space, v.address(i.operands[1]), width * count, "r")
    is_strong = strong(i)
    v.code.alone = is_strong
    load = "LDV" if is_strong and width <= 8 else "LD"
    before = "" if parameter is not None else v.line(space) + " "
    destination = i.operands[0]
    if count == 1 and not isinstance(destination, Vector):
        return before + v.dst(destination, t, f"{load}({kind}, {pointer})")
    if not isinstance(destination, Vector):
        raise v.unsupported(f"destination {destination}")
    text = f"{{ {before}const u8 *p_ = (const u8 *){pointer}; "
    text += " ".join(
        f"const {kind} x{k}_ = {load}({kind}, p_ + {k * width});" for k in range(len(destination.items))
    )
    return text + " " + " ".join(v.dst(o, t, f"x{k}_") for k, o in enumerate(destination.items)) + " }"


@emits("st")
def st(v: Values, i: Instruction) -> str:
    t = i.modifiers[-1]
    space = space_of(i)
    count = _vector(i)
    width = size_of(t)
    kind = c_type(width)
    v.code.memory = True
    parameter = _parameter(v, i.operands[0], space)
    if parameter is not None:
        pointer = parameter[0]
    else:
        pointer = v.pointer(space, v.address(i.operands[0]), width * count, "w")
    is_strong = strong(i)
    v.code.alone = is_strong
    store = ("STSC" if "sc" in i.modifiers else "STV") if is_strong and width <= 8 else "ST"
    before = "" if parameter is not None else v.line(space) + " "
    source = i.operands[1]
    items = source.items if isinstance(source, Vector) else (source,)
    if len(items) == 1:
        return f"{before}{store}({kind}, {pointer}, {v.src(items[0], t)});"
    text = f"{{ {before}u8 *p_ = (u8 *){pointer}; "
    return (
        text
        + " ".join(f"{store}({kind}, p_ + {k * width}, {v.src(o, t)});" for k, o in enumerate(items))
        + " }"
    )


_FETCH = {"add": "ATOM_ADD", "and": "ATOM_AND", "or": "ATOM_OR", "xor": "ATOM_XOR", "exch": "ATOM_EXCH"}


def _update(v: Values, i: Instruction, operation: str, t: str, value: str) -> str:
    """The new value from `old` and `value` of operations without an instruction of their own."""
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
def atom(v: Values, i: Instruction) -> str:
    if "async" in i.modifiers:
        raise v.unsupported()
    t = i.modifiers[-1]
    operation = next((m for m in i.modifiers if m in _OPERATIONS), None)
    if operation is None:
        raise v.unsupported()
    if t == "noftz":
        raise v.unsupported()
    space = space_of(i)
    count = _vector(i)
    width = size_of(t)
    kind = c_type(width)
    result = i.operands[0] if i.opcode == "atom" else None
    operands = i.operands[1:] if i.opcode == "atom" else i.operands
    pointer = v.pointer(space, v.address(operands[0]), width * count, "a")
    if space == "shared":
        v.code.reads_shared = True
    value = operands[1]

    def one(where: str, source: Operand) -> str:
        x = v.src(source, t)
        if operation == "cas":
            y = v.src(operands[2], t)
            if width == 16:
                return f"cs_cas128({where}, {x}, {y})"
            return f"ATOM_CAS({kind}, {where}, {x}, {y})"
        if operation == "exch" and width == 16:
            return f"cs_exch128({where}, {x})"
        if operation in _FETCH and t not in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2"):
            return f"{_FETCH[operation]}({kind}, {where}, {x})"
        return f"ATOM_CAS_LOOP({kind}, {where}, {_update(v, i, operation, t, 'v_')})"

    if count > 1:
        if not isinstance(value, Vector):
            raise v.unsupported()
        text = f"{{ {v.line(space)} u8 *p_ = (u8 *){pointer}; "
        for k, item in enumerate(value.items):
            text += f"{{ const {kind} v_ = {v.src(item, t)}; (void)v_; "
            text += f"const {kind} x_ = {one(f'(p_ + {k * width})', item)}; (void)x_; "
            if isinstance(result, Vector):
                text += v.dst(result.items[k], t, "x_")
            text += " } "
        return text + "}"
    text = f"{{ {v.line(space)} void *p_ = {pointer}; const {kind} v_ = {v.src(value, t)}; (void)v_; "
    text += f"const {kind} x_ = {one('p_', value)}; (void)x_; "
    if result is not None and not (isinstance(result, Name) and result.name == "_"):
        text += v.dst(result, t, "x_")
    return text + " }"


@emits("membar", "fence")
def fence(v: Values, i: Instruction) -> str:
    if any(m.startswith(("proxy", "mbarrier")) for m in i.modifiers):
        return ""
    v.code.alone = True
    v.code.before = "__atomic_thread_fence(__ATOMIC_SEQ_CST);"
    return ""


@emits("prefetch", "prefetchu", "applypriority", "discard", "createpolicy", "griddepcontrol", "setmaxnreg")
def nothing(v: Values, i: Instruction) -> str:
    if i.opcode == "createpolicy":
        return v.dst(i.operands[0], "b64", "0")
    return ""


@emits("cp")
def cp(v: Values, i: Instruction) -> str:
    """cp.async: copied at once; groups complete at once."""
    m = i.modifiers
    if m[:3] == ("async", "mbarrier", "arrive"):
        # the copies are complete, so this arrives at once; without .noinc it also adds the arrival that is expected
        v.code.alone = True
        space = "shared" if space_of(i) == "shared" else "generic"
        pointer = v.pointer(space, v.address(i.operands[0]), 8, "a")
        return (
            f"{v.line(space)} mbar_arrive((u64 *){pointer}, 1, 0);" if "noinc" in m else f"(void){pointer};"
        )
    if m[0] != "async" or "bulk" in m or "reduce" in m:
        raise v.unsupported()
    if any(x in m for x in ("commit_group", "wait_group", "wait_all")):
        v.code.alone = True
        return ""
    size = i.operands[2]
    if not isinstance(size, Immediate):
        raise v.unsupported("a size that is not constant")
    n = size.integer
    to = v.pointer("shared", v.address(i.operands[0]), n, "w")
    source = v.pointer("global", v.address(i.operands[1]), n, "r")
    count = f"{n}u"
    if len(i.operands) > 3:
        extra = i.operands[3]
        predicate = (
            isinstance(extra, Name) and (found := v.names.register(v.scope, extra.name)) and found.width == 0
        )
        if predicate:
            count = f"({v.src(extra, 'pred')} ? 0u : {n}u)"
        elif not any("cache_hint" in x for x in m) or len(i.operands) > 4:
            count = f"MIN(u32, {v.src(extra, 'u32')}, {n}u)"
    text = f"{{ {v.line()} u8 *d_ = (u8 *){to}; const u32 n_ = {count}; "
    return text + (
        f"if (n_) __builtin_memcpy(d_, {source}, n_); if (n_ < {n}) __builtin_memset(d_ + n_, 0, {n} - n_); }}"
    )


@emits("mbarrier")
def mbarrier(v: Values, i: Instruction) -> str:
    """Without transaction counts (those belong to bulk copies)."""
    m = i.modifiers
    kind = m[0]
    if kind == "pending_count":
        return v.dst(i.operands[0], "b32", f"{v.src(i.operands[1], 'b64')} & 0xfffffu")
    if kind in ("expect_tx", "complete_tx") or "expect_tx" in m:
        raise v.unsupported()
    v.code.alone = True
    result = kind in ("arrive", "arrive_drop", "test_wait", "try_wait")
    operands = i.operands
    if result and isinstance(operands[0], Address):  # arrive without a result
        operands = (Name("_"), *operands)
    address = operands[1] if result else operands[0]
    space = "shared" if space_of(i) == "shared" else "generic"
    pointer = f"(u64 *){v.pointer(space, v.address(address), 8, 'a')}"
    line = v.line(space)
    if kind == "init":
        return f"{line} mbar_init({pointer}, {v.src(operands[1], 'b32')});"
    if kind == "inval":
        return f"{line} *{pointer} = 0;"
    if kind in ("arrive", "arrive_drop"):
        count = v.src(operands[2], "b32") if len(operands) > 2 else "1"
        drop = count if kind == "arrive_drop" else "0"
        return f"{line} {{ const u64 x_ = mbar_arrive({pointer}, {count}, {drop}); {v.dst(operands[0], 'b64', 'x_')} }}"
    if kind in ("test_wait", "try_wait"):
        wanted = f"{v.src(operands[2], 'b32')} & 1" if "parity" in m else f"{v.src(operands[2], 'b64')} >> 63"
        return f"{line} {{ const u64 x_ = *{pointer}; {v.dst(operands[0], 'pred', f'(x_ >> 63) != ({wanted})')} }}"
    raise v.unsupported()


@emits("nanosleep")
def nanosleep(v: Values, i: Instruction) -> str:
    """On the virtual clock, where it is the time that passes; on the real one it ends a block (function.py)."""
    v.code.alone = True
    return "" if v.injected else f"w->budget = 0; w->time[l] += {v.src(i.operands[0], 'u32')};"


@emits("alloca")
def alloca(v: Values, i: Instruction) -> str:
    """From the end of the lane's local memory downwards, until the function returns (PTX ISA 9.7.15)."""
    v.stack = True
    v.code.memory = True
    t = i.modifiers[-1]
    align = i.operands[2].integer if len(i.operands) > 2 and isinstance(i.operands[2], Immediate) else 8
    if align not in (1, 2, 4, 8, 16):
        raise v.unsupported("this alignment")
    size = f"(u64){v.src(i.operands[1], t)}"
    return f"{v.line()} {v.dst(i.operands[0], t, f'cs_alloca(w, l, {size})')}"


@emits("stacksave")
def stacksave(v: Values, i: Instruction) -> str:
    v.stack = True
    return v.dst(i.operands[0], i.modifiers[-1], "w->sp[l]")


@emits("stackrestore")
def stackrestore(v: Values, i: Instruction) -> str:
    v.stack = True
    v.code.memory = True
    return f"{v.line()} cs_stackrestore(w, l, {v.src(i.operands[0], i.modifiers[-1])});"


@emits("ldmatrix")
def ldmatrix(v: Values, i: Instruction) -> str:
    raise v.unsupported()

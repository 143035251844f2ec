"""What is known about each opcode of PTX ISA 9.0: one row for an opcode, or for an opcode with the modifiers that make a difference.

    facts(instruction).counts      # ("loads",)
    facts(instruction).ends        # True for bra, brx, ret, exit and trap
    facts(instruction).is_known    # False: the effects of the instruction are unknown

To add an opcode, add a row to `_ROWS`. The emulated device takes the same rows; its C for an opcode is in `cudasim/translate`.

Kinds of work (`threadhist --work`):

instructions  every PTX instruction that the thread reaches, including `ld.param`, `bra`, `call`, `ret`, and those predicated off.
loads         ld, ldu, ldmatrix, wmma.load, multimem.ld_reduce, tcgen05.ld, and the sources of cp.async and tcgen05.cp, of every space
              but .param.
stores        st, stmatrix, wmma.store, st.async, st.bulk, multimem.st, tcgen05.st, tcgen05.alloc, and the destinations of cp.async and
              tcgen05.cp, of every space but .param.
atomics       atom, red, red.async, multimem.red, cp.reduce.async.
barriers      bar and barrier (arrive, sync, red, cluster arrive and wait), but neither bar.warp.sync nor mbarrier.
blocks        basic blocks entered. A block begins at the start of the kernel or function, at a label that is the target of a
              branch, and after bra, brx, ret, exit and trap (predicated or not). A call does not end a block.

Texture and surface fetches, prefetches and collectives such as shfl count as instructions only.
Instructions and blocks always count; the other kinds count only if the predicate is true. A vector access counts once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from gpubpf.record import Record, replace

from .module import Operand, PtxInstruction

# State spaces; and "async" and "bulk", forms of an instruction that also access one of these spaces.
SPACES = frozenset("global shared local const param async bulk".split())


class Facts(Record):
    """A row of the table: what holds for an instruction with this name.

    name        the opcode, with the modifiers that the row is for: "cp.async"
    is_known    False: the row stands for all opcodes without a row
    counts      the kinds of work that the instruction counts as if its predicate is true, besides "instructions"
    control     "branch" (bra), "table" (brx), "leave" (ret, exit), "trap", "call", or "" if the next instruction follows
    waits       what a thread may wait for at the instruction: "lanes" of its warp or block, other "blocks", or ""
    result      what the first operand receives: "value", "pred", "u32", "nothing"; "any": every operand may be written
    mixed       the operands have different types, or the result says nothing about the types of the operands
    is_simple   the instruction only computes with registers, in few machine instructions
    adds_carry  the instruction reads the carry flag
    spaces      the state spaces and forms of an instruction with one address of any space
    moves       False: the instruction has an address in brackets, but moves no data (caches, barriers, queries, addresses)
    unaddressed the kind and space of an access whose address is unknown (textures, surfaces, tensors, tensor memory)
    is_opaque   the instruction accesses memory, and no program can see the access
    has_value   False: lanes share what the instruction loads or stores, or the instruction stores zeros
    is_late     the floating-point result arrives later, so programs cannot see it
    """

    name: str
    is_known: bool = True
    counts: tuple[str, ...] = ()
    control: str = ""
    waits: str = ""
    result: str = "value"
    mixed: bool = False
    is_simple: bool = False
    adds_carry: bool = False
    spaces: frozenset[str] = frozenset()
    moves: bool = True
    unaddressed: tuple[str, str] | None = None
    is_opaque: bool = False
    has_value: bool = True
    is_late: bool = False

    @property
    def ends(self) -> bool:
        """Whether a basic block ends with the instruction."""
        return self.control not in ("", "call")

    @property
    def parts(self) -> bool:
        """Whether lanes diverge at the instruction if it has a predicate: some branch or leave, others continue with the next one."""
        return self.control in ("branch", "leave")

    @property
    def is_of_image(self) -> bool:
        """Whether the instruction accesses a texture or surface."""
        return self.unaddressed is not None and self.unaddressed[1] in ("texture", "surface")


def _rows() -> Iterator[Facts]:
    """Yield the rows. A row for an opcode with modifiers repeats what holds for the opcode."""
    # --- computing with registers ---
    for name in (
        "activemask alloca bmsk brev cnot copysign cos dp2a dp4a ex2 getctarank lg2 mad24 mapa movmatrix mul24 rcp rsqrt sad sin "
        "sqrt stacksave szext tanh vabsdiff vabsdiff2 vabsdiff4 vadd vadd2 vadd4 vavrg2 vavrg4 vmad vmax vmax2 vmax4 vmin vmin2 "
        "vmin4 vset vset2 vset4 vshl vshr vsub vsub2 vsub4"
    ).split():
        yield Facts(name)
    for name in (
        "abs add and bfe bfi cvt div fma lop3 mad max min mul neg not or rem selp shf shl shr sub xor".split()
    ):
        yield Facts(name, is_simple=True)
    for name in "addc madc subc".split():
        yield Facts(name, adds_carry=True)
    for name in "cvta mov".split():
        yield Facts(name, is_simple=True, moves=False)
    for name in "bfind clz fns".split():
        yield Facts(name, result="u32")
    for name in "isspacep istypep testp".split():
        yield Facts(name, result="pred")
    for name in "mma prmt slct".split():
        yield Facts(name, mixed=True)
    yield Facts("popc", result="u32", is_simple=True)
    yield Facts("set", mixed=True, is_simple=True)
    yield Facts("setp", result="pred", mixed=True, is_simple=True)

    # --- control flow, and instructions without a result ---
    yield Facts("bra", control="branch", result="nothing")
    yield Facts("brx", control="table", result="nothing")
    for name in "exit ret".split():
        yield Facts(name, control="leave", result="nothing")
    yield Facts("trap", control="trap", result="nothing")
    yield Facts("call", control="call", result="nothing")
    for name in "brkpt griddepcontrol membar pmevent setmaxnreg stackrestore".split():
        yield Facts(name, result="nothing")
    yield Facts("nanosleep", waits="blocks", result="nothing")

    # --- instructions that lanes or threads execute together ---
    for name in "bar barrier".split():
        yield Facts(name, counts=("barriers",), waits="lanes", result="nothing")
        yield Facts(f"{name}.warp", waits="lanes", result="nothing")
    for name in "elect redux vote".split():
        yield Facts(name, waits="lanes")
    yield Facts("match", waits="lanes", result="u32")
    yield Facts("shfl", waits="lanes", mixed=True)

    # --- memory ---
    yield Facts("ld", counts=("loads",), spaces=SPACES)
    yield Facts("ldu", counts=("loads",), spaces=frozenset({"global"}))
    yield Facts("st", counts=("stores",), spaces=SPACES - {"const"})
    yield Facts("st.bulk", counts=("stores",), spaces=SPACES - {"const"}, has_value=False)
    yield Facts("atom", counts=("atomics",), spaces=frozenset({"global", "shared"}))
    yield Facts("red", counts=("atomics",), spaces=frozenset({"global", "shared", "async"}))
    yield Facts("multimem", waits="blocks")
    yield Facts("multimem.ld_reduce", counts=("loads",), waits="blocks")
    yield Facts("multimem.st", counts=("stores",), waits="blocks")
    yield Facts("multimem.red", counts=("atomics",), waits="blocks")
    yield Facts("ldmatrix", counts=("loads",), spaces=SPACES, has_value=False)
    yield Facts("stmatrix", counts=("stores",), spaces=SPACES, has_value=False)
    yield Facts("wmma", mixed=True, spaces=SPACES)
    yield Facts("wmma.load", counts=("loads",), mixed=True, spaces=SPACES, has_value=False)
    yield Facts("wmma.store", counts=("stores",), mixed=True, spaces=SPACES, has_value=False)
    for name in "applypriority createpolicy prefetch prefetchu suq txq".split():
        yield Facts(name, moves=False)
    for name in "discard fence mbarrier".split():
        yield Facts(name, result="nothing", moves=False)

    # --- copies ---
    copy = Facts("cp.async", counts=("loads", "stores"), result="nothing")
    yield copy
    yield replace(copy, name="cp.async.bulk.tensor", unaddressed=("async", "tensor"))
    yield Facts("cp.reduce", counts=("atomics",), result="nothing")
    yield Facts(
        "cp.reduce.async.bulk.tensor",
        counts=("atomics",),
        result="nothing",
        unaddressed=("async", "tensor"),
    )
    for name in (
        "cp cp.async.bulk.commit_group cp.async.bulk.wait_group cp.async.commit_group cp.async.wait_all "
        "cp.async.wait_group"
    ).split():
        yield Facts(name, result="nothing")
    for name in "cp.async.bulk.prefetch cp.async.mbarrier".split():
        yield Facts(name, result="nothing", moves=False)

    # --- textures, surfaces, tensors ---
    for name in "tex tld4".split():
        yield Facts(name, mixed=True, unaddressed=("load", "texture"))
    yield Facts("suld", mixed=True, unaddressed=("load", "surface"))
    yield Facts("sust", mixed=True, unaddressed=("store", "surface"))
    yield Facts("sured", mixed=True, unaddressed=("atomic", "surface"))
    yield Facts("wgmma", result="nothing", mixed=True)
    yield Facts("wgmma.mma_async", result="nothing", mixed=True, unaddressed=("load", "tensor"), is_late=True)
    tensor = Facts("tcgen05", result="any", mixed=True)
    yield tensor
    tensor = replace(tensor, result="nothing")
    for name in "commit dealloc fence relinquish_alloc_permit wait".split():
        yield replace(tensor, name=f"tcgen05.{name}", moves=False)
    yield replace(tensor, name="tcgen05.alloc", counts=("stores",), waits="blocks", has_value=False)
    copied = ("async", "tmem")
    yield replace(tensor, name="tcgen05.cp", counts=("loads", "stores"), unaddressed=copied)
    yield replace(tensor, name="tcgen05.shift", unaddressed=copied)
    yield replace(tensor, name="tcgen05.mma", unaddressed=copied, is_late=True)
    yield replace(
        tensor,
        name="tcgen05.ld",
        counts=("loads",),
        result="value",
        unaddressed=("load", "tmem"),
        has_value=False,
    )
    yield replace(
        tensor, name="tcgen05.st", counts=("stores",), unaddressed=("store", "tmem"), has_value=False
    )
    yield Facts("tensormap", result="nothing")
    for name in "tensormap.cp_fenceproxy tensormap.replace".split():
        yield Facts(name, result="nothing", is_opaque=True)
    yield Facts("clusterlaunchcontrol")
    yield Facts("clusterlaunchcontrol.try_cancel", is_opaque=True)


TABLE = {row.name: row for row in _rows()}
LEAVING = frozenset(row.name for row in TABLE.values() if row.control == "leave")
_UNKNOWN = Facts("", is_known=False)


def facts(instruction: PtxInstruction) -> Facts:
    """Return what is known about an instruction: the row of its opcode with the most of its modifiers."""
    return _found(instruction.opcode, instruction.modifiers)


@functools.lru_cache(4096)
def _found(opcode: str, modifiers: tuple[str, ...]) -> Facts:
    names = [".".join((opcode, *modifiers[:count])) for count in range(len(modifiers), -1, -1)]
    return next((TABLE[name] for name in names if name in TABLE), _UNKNOWN)


def counted(instruction: PtxInstruction) -> tuple[str, ...]:
    """Return the kinds of work, besides instructions, that an instruction counts as when its predicate is true."""
    return () if is_of_parameters(instruction) else facts(instruction).counts


def is_of_parameters(instruction: PtxInstruction) -> bool:
    """Return whether an instruction accesses parameters, which are not memory."""
    return any(m == "param" or m.startswith("param::") for m in instruction.modifiers)


def written(instruction: PtxInstruction) -> tuple[Operand, ...]:
    """Return the operands that an instruction may write."""
    return instruction.operands if facts(instruction).result == "any" else instruction.operands[:1]

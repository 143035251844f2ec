"""Keep products and sums rounded as in the original.

    module = with_roundings(module, functions_with_sums(module, ["kernel"]), operations)
    products_before(flow, live_carry(flow))[index]      # the multiplications to emit right before the addition `index`

PTX lets ptxas contract `mul` and `add` or `sub` without a rounding mode to `fma` (PTX ISA 9.0, 9.7.3): the sum is then rounded once
instead of twice. ptxas 13.0 does so if both are in one basic block and nothing else reads the product; of two such products, it takes
the first. A probe ends the block, so ptxas would choose otherwise in a copy. Therefore

* products and sums that ptxas does not contract in the original, as its machine code shows, get a rounding mode, which prevents the
  contraction in the copy.
* any other product is emitted right before the sum, without a probe between them.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from gpubpf.errors import PtxError
from gpubpf.ptx.call_graph import CallGraph
from gpubpf.ptx.carry import Carry
from gpubpf.ptx.flow import Flow, find_names
from gpubpf.ptx.module import Function, Module, Name, PtxInstruction, Statement
from gpubpf.record import replace

# Type → the machine instructions (SASS) that multiply, add, and do both at once.
_TYPES = {
    **dict.fromkeys(("f16", "f16x2", "bf16", "bf16x2"), ("HMUL2", "HADD2", "HFMA2")),
    "f32": ("FMUL", "FADD", "FFMA"),
    "f32x2": ("FMUL2", "FADD2", "FFMA2"),
    "f64": ("DMUL", "DADD", "DFMA"),
}
_PRODUCTS, _SUMS = ("mul.f", "mul.bf", "div."), ("add.f", "add.bf", "sub.f", "sub.bf")  # beginnings
_FIXED = {"rn", "rz", "rm", "rp", "sat"}  # modifiers that prevent a contraction


def functions_with_sums(module: Module, kernels: Iterable[str]) -> set[str]:
    """Return these kernels and the functions that they call, without those in which ptxas has nothing to contract."""
    graph = CallGraph(module)
    reached: set[str] = set()
    for kernel in kernels:
        with contextlib.suppress(PtxError):  # the injection refuses this kernel later
            reached |= graph.reach(kernel)
    return {
        name
        for name in reached
        if any(module.functions[name].mentions(product) for product in _PRODUCTS)
        and any(module.functions[name].mentions(total) for total in _SUMS)
    }


def with_roundings(
    module: Module, functions: Collection[str], operations: Mapping[int, frozenset[str]]
) -> Module:
    """Return the module with a rounding mode at each product and sum that ptxas does not contract in the original.

    functions: the names of the functions to change
    operations: the original's machine operations, such as FFMA, by line of its PTX (`images.compiled_sums`)

    In a loop that ptxas unrolls, one line may have several operations. If ptxas contracts only some of them, the line stays as it is.
    """
    items = [
        _with_roundings(item, operations)
        if isinstance(item, Function) and item.defined and item.name in functions
        else item
        for item in module.items
    ]
    return replace(module, items=tuple(items))


def _with_roundings(function: Function, operations: Mapping[int, frozenset[str]]) -> Function:
    body = list(function.body or ())
    alone = Counter(line for line in map(_line, body) if line)  # instructions of each line

    def made(statement: Statement) -> tuple[bool, bool, bool]:
        """Return whether the machine code of this instruction has a multiplication, an addition, and a contraction of both."""
        found = operations.get(_line(statement), frozenset()) if alone[_line(statement)] == 1 else frozenset()
        multiplies, adds, both = (name in found for name in _TYPES[_type(statement)])
        return multiplies, adds, both

    products: defaultdict[str, list[int]] = defaultdict(list)  # register → statements with its products
    for index, statement in enumerate(body):
        if isinstance(statement, PtxInstruction) and _may_contract(statement, "mul"):
            products[str(statement.operands[0])].append(index)
    apart = {index for places in products.values() for index in places if made(body[index])[0]}
    for index, statement in enumerate(body):
        if isinstance(statement, PtxInstruction) and _may_contract(statement, "add", "sub"):
            _, adds, both = made(statement)
            if adds and not both:
                apart.add(index)
            elif both:
                read = {place for name in find_names(statement.operands[1:]) for place in products[name]}
                if adds or read <= apart:
                    apart -= read
    return function.with_body(
        tuple(
            replace(statement, modifiers=("rn", *statement.modifiers))
            if index in apart and isinstance(statement, PtxInstruction)
            else statement
            for index, statement in enumerate(body)
        )
    )


def _line(statement: Statement) -> int:
    return statement.line if isinstance(statement, PtxInstruction) else 0


def _type(statement: Statement) -> str:
    assert isinstance(statement, PtxInstruction)
    return statement.modifiers[-1]


def products_before(flow: Flow, carry: Carry) -> Mapping[int, Sequence[int]]:
    """Return the multiplications that can move to right before a sum without changing a value: sum → multiplications, in order.

    Keys and values are indices of statements in `flow.body`. A multiplication can move if it is unconditional and has a single
    reader, the sum, in the same basic block. Between the two, there must be no call and no write to the multiplication's registers.
    The carry must not be live at either of them. Elements of vector registers do not move, because they have several names.
    """
    kept = carry.before | carry.after
    mentions = Counter(
        name
        for _, instruction in flow.instructions()
        for name in (*find_names(instruction.operands), instruction.predicate)
        if name is not None
    )
    found: defaultdict[int, list[int]] = defaultdict(list)
    for block in flow.blocks:
        waiting: dict[str, int] = {}  # register with a product → the statement that computes it
        users: defaultdict[str, list[str]] = defaultdict(list)  # register → products that need it
        for index in block.instructions:
            instruction = flow.instruction(index)
            if instruction.opcode == "call":
                waiting.clear()
                continue
            if _may_contract(instruction, "add", "sub") and index not in kept:
                for name in find_names(instruction.operands[1:]):
                    if name in waiting and flow.means_same(waiting[name], index):
                        found[index].append(waiting.pop(name))
            for name in find_names(instruction.operands[:1]):
                for product in users.pop(name, ()):
                    waiting.pop(product, None)
            if _is_product(instruction) and instruction.predicate is None and index not in kept:
                product, names = str(instruction.operands[0]), [*find_names(instruction.operands)]
                if mentions[product] == 2 and not any("." in name for name in names):
                    waiting[product] = index
                    for name in names:
                        users[name].append(product)
    return {index: sorted(products) for index, products in found.items()}


def _is_product(instruction: PtxInstruction) -> bool:
    """Return whether an instruction ends with a multiplication that ptxas may contract with a sum."""
    approximate = instruction.opcode == "div" and instruction.modifiers[0] in ("approx", "full")
    return approximate or _may_contract(instruction, "mul")


def _may_contract(instruction: PtxInstruction, *opcodes: str) -> bool:
    modifiers = instruction.modifiers
    return (
        instruction.opcode in opcodes
        and bool(modifiers)
        and modifiers[-1] in _TYPES
        and _FIXED.isdisjoint(modifiers)
        and len(instruction.operands) == 3
        and isinstance(instruction.operands[0], Name)
    )

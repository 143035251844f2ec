"""Find the products that ptxas contracts with a sum, which must stay in one basic block with it.

    products_before(flow, live_carry(flow))[index]      # the multiplications to emit right before the addition `index`

PTX lets ptxas contract `mul` and `add` or `sub` without a rounding mode to `fma` (PTX ISA 9.0, 9.7.3): the sum is then rounded once
instead of twice. ptxas 13.0 does so if both are in one basic block and nothing else reads the product; of two such products, it takes
the first. A probe between product and sum ends the block: without this, a copy would round elsewhere than the original.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from .carry import Carry
from .flow import Flow, find_names
from .module import Name, PtxInstruction

_TYPES = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"}
_FIXED = {"rn", "rz", "rm", "rp", "sat"}  # with these, nothing is contracted


def products_before(flow: Flow, carry: Carry) -> Mapping[int, Sequence[int]]:
    """Return the multiplications that may be executed right before a sum instead of where they are, in their order.

    Keys and values are indices of statements of `flow.body`. Only what changes no value is listed: an unconditional multiplication
    whose result has one reader, in the same basic block, with neither a call nor another value of its registers before that. The carry
    is live at neither of the two.
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
        waiting: dict[str, int] = {}  # products, and where they are computed
        users: defaultdict[str, list[str]] = defaultdict(list)  # registers, and the products that need them
        for index in block.instructions:
            instruction = flow.instruction(index)
            if instruction.opcode == "call":
                waiting.clear()
                continue
            if _may_contract(instruction, "add", "sub") and index not in kept:
                for name in find_names(instruction.operands[1:]):
                    if name in waiting and _same_registers(flow, waiting[name], index):
                        found[index].append(waiting.pop(name))
            for name in find_names(instruction.operands[:1]):
                for product in users.pop(name, ()):
                    waiting.pop(product, None)
            if _may_contract(instruction, "mul") and instruction.predicate is None and index not in kept:
                product = str(instruction.operands[0])
                if mentions[product] == 2:
                    waiting[product] = index
                    for name in find_names(instruction.operands):
                        users[name].append(product)
    return {index: sorted(products) for index, products in found.items()}


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


def _same_registers(flow: Flow, product: int, use: int) -> bool:
    """Return whether the names of a multiplication mean the same registers where its product is used."""
    names = find_names(flow.instruction(product).operands)
    return all(flow.declaration(product, name) == flow.declaration(use, name) for name in names)

"""The instructions of a kernel: what they use, where they branch to and exit, and a copy of them elsewhere.

kernel_code = read(code, comgr, kernel)
copy = kernel_code.moved(address, {})      # the same instructions at another address
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from gpubpf.errors import ImageError, Refusal
from gpubpf.gcn.code_object import CodeObject, GcnKernel
from gpubpf.gcn.comgr import Comgr, GcnInstruction

_JUMPS = ("s_swappc_b64", "s_setpc_b64", "s_call_b64", "s_rfe_b64")
_INDEXED = re.compile(r"s_movrel|v_movrel|s_set_gpr_idx")
_REGISTERS = re.compile(r"\b([sva])(?:(\d+)\b|\[(\d+):(\d+)\])")
_BRANCH = re.compile(r"s_branch|s_cbranch_")
_OTHER_BRANCH = re.compile(r"s_cbranch_(?:\w+_fork|join)|s_subvector_loop")
_WAITING = re.compile(r"atomic|\b(?:glc|sc[01]|slc|dlc)\b|^s_(?:sleep|dcache_inv)|^buffer_(?:wbinv|inv|gl)")
_WRITES_EXEC = re.compile(r"s_\w+(?:saveexec|wrexec)|v_cmpx")
_NEAR = 1 << 17  # bytes that s_branch reaches
_LOW, _HIGH = 8, 16  # where the literals behind s_getpc_b64 are, in bytes from it


@dataclass(frozen=True)
class Reference:
    """An address that is computed from the program counter: where s_getpc_b64 is, and the 64-bit sum of it and two literals."""

    place: int
    target: int


@dataclass(frozen=True)
class MovedCode:
    """A copy of a kernel's instructions. `places`: the address of each instruction by the one that it had.

    references: places of s_getpc_b64 in the copy whose address is not in the kernel, each with the sum of its two literals.
    """

    content: bytearray
    places: Mapping[int, int]
    references: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class KernelCode:
    """The instructions of a kernel, with their bytes in `content`, and the registers that they name."""

    begin: int
    content: bytes
    instructions: tuple[GcnInstruction, ...]
    sgprs: int
    vgprs: int
    references: tuple[Reference, ...]

    @property
    def end(self) -> int:
        return self.begin + len(self.content)

    @property
    def exits(self) -> list[GcnInstruction]:
        return [instruction for instruction in self.instructions if instruction.name == "s_endpgm"]

    @cached_property
    def branches(self) -> dict[int, int]:
        """Where the branch at an address leads. Raises Refusal if that is no instruction of the kernel."""
        found = {}
        known = {instruction.address for instruction in self.instructions}
        for branch in self.instructions:
            if _BRANCH.match(branch.name):
                # It counts words from the next instruction.
                (words,) = struct.unpack_from("<h", self.content, branch.address - self.begin)
                found[branch.address] = to = branch.address + 4 + 4 * words
                if to not in known:
                    raise Refusal("it branches out of its code")
        return found

    @cached_property
    def waits(self) -> bool:
        """Whether it may wait for another workgroup: a loop has an atomic operation, a load that goes past the caches, or s_sleep."""
        loops = [(to, at) for at, to in self.branches.items() if to <= at]
        return any(
            first <= instruction.address <= last
            for instruction in self.instructions
            if loops and _WAITING.search(f"{instruction.name} {instruction.operands}")
            for first, last in loops
        )

    def blocks(self) -> Iterator[list[GcnInstruction]]:
        """Yield the basic blocks: what runs from the first instruction to the last."""
        leaders = set(self.branches.values())
        block: list[GcnInstruction] = []
        for instruction in self.instructions:
            if block and instruction.address in leaders:
                yield block
                block = []
            block.append(instruction)
            if instruction.address in self.branches or instruction.name == "s_endpgm":
                yield block
                block = []
        if block:
            yield block

    def moved(self, to: int, before: Mapping[int, bytes]) -> MovedCode:
        """Return a copy that lies at `to`, with code put before the instructions at some addresses. Raises Refusal.

        Who branches to such an instruction goes to the code before it.
        """
        starts, places, at = {}, {}, to
        for instruction in self.instructions:
            starts[instruction.address] = at
            places[instruction.address] = at = at + len(before.get(instruction.address, b""))
            at += instruction.size
        content = bytearray()
        for instruction in self.instructions:
            content += before.get(instruction.address, b"")
            offset = instruction.address - self.begin
            content += self.content[offset : offset + instruction.size]
        for address, target in self.branches.items():
            at = places[address]
            struct.pack_into("<h", content, at - to, words(at, starts[target]))
        elsewhere = []
        for reference in self.references:
            at = places[reference.place]
            following = [places.get(reference.place + distance - 4) for distance in (_LOW, _HIGH)]
            if following != [at + _LOW - 4, at + _HIGH - 4]:
                raise Refusal("it computes an address of its code")
            inside = places.get(reference.target) if self.begin <= reference.target < self.end else None
            if inside is None and self.begin <= reference.target < self.end:
                raise Refusal("it computes an address of its code")
            target = reference.target if inside is None else starts[reference.target]
            distance = target - (at + 4) & (1 << 64) - 1
            struct.pack_into("<I", content, at - to + _LOW, distance & 0xFFFFFFFF)
            struct.pack_into("<I", content, at - to + _HIGH, distance >> 32)
            if inside is None:
                elsewhere.append((at, distance))
        return MovedCode(content, places, tuple(elsewhere))


def words(at: int, to: int) -> int:
    """Return the operand of a branch at an address. Raises Refusal if it does not reach so far."""
    distance = to - at - 4
    if not -_NEAR <= distance < _NEAR:
        raise Refusal("its code is too far from room for probes")
    return distance // 4


def writes_exec(instruction: GcnInstruction) -> bool:
    """Return whether an instruction may change EXEC."""
    return instruction.operands.startswith("exec") or bool(_WRITES_EXEC.match(instruction.name))


def read(code: CodeObject, comgr: Comgr, kernel: GcnKernel) -> KernelCode:
    """Look at all instructions of a kernel. Raises Refusal."""
    size = kernel.end - kernel.begin
    if size >= _NEAR:
        raise Refusal("it is larger than a branch reaches")
    offset = code.offset(kernel.begin, size)
    content = code.data[offset : offset + size]
    most = {"s": 0, "v": 0, "a": 0}
    try:
        instructions = tuple(comgr.disassemble(content, kernel.begin))
    except ImageError as error:
        raise Refusal(str(error)) from None
    if any(instruction.name in _JUMPS for instruction in instructions):
        raise Refusal("it calls functions")
    references = []
    for number, instruction in enumerate(instructions):
        if instruction.name == "s_getpc_b64":
            references.append(_reference(instructions[number : number + 3], content, kernel.begin))
        if _INDEXED.match(instruction.name):
            raise Refusal(f"it computes the numbers of registers ({instruction.name})")
        if _OTHER_BRANCH.match(instruction.name):
            raise Refusal(f"it branches by {instruction.name}")
        if instruction.name.startswith("s_endpgm_"):
            raise Refusal(f"it ends with {instruction.name}")
        for kind, one, _, last in _REGISTERS.findall(instruction.operands):
            most[kind] = max(most[kind], int(one or last) + 1)
    made = KernelCode(kernel.begin, content, instructions, most["s"], most["v"], tuple(references))
    if not made.exits:
        raise Refusal("it never ends")
    return made


def _reference(instructions: Sequence[GcnInstruction], content: bytes, begin: int) -> Reference:
    """Return the address that three instructions compute as compilers write it. Raises Refusal for any others."""
    pair = re.fullmatch(r"s\[(\d+):(\d+)\]", instructions[0].operands)
    if pair and [one.name for one in instructions[1:]] == ["s_add_u32", "s_addc_u32"]:
        low, high = pair.groups()
        getpc, add, carry = instructions
        if (
            add.size == carry.size == 8
            and add.operands.startswith(f"s{low}, s{low}, ")
            and carry.operands.startswith(f"s{high}, s{high}, ")
        ):
            literals = [struct.unpack_from("<I", content, one.address + 4 - begin)[0] for one in (add, carry)]
            sum_ = getpc.address + 4 + (literals[0] | literals[1] << 32)
            return Reference(getpc.address, sum_ & (1 << 64) - 1)
    raise Refusal("it computes an address of its code")

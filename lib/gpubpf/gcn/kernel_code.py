"""The instructions of a kernel and the functions it calls: registers, branches, exits, and a relocated copy.

kernel_code = read(code, comgr, kernel)
copy = kernel_code.moved(address, {})      # the same instructions at another address
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from gpubpf.errors import ImageError, Refusal
from gpubpf.gcn import calls
from gpubpf.gcn.code_object import CodeObject, GcnKernel
from gpubpf.gcn.comgr import Comgr, GcnInstruction
from gpubpf.lower.launch_block import align
from gpubpf.record import Record

_INDEXED = re.compile(r"v_movrel|s_set_gpr_idx")  # VGPRs are indexed at run time
_REGISTERS = re.compile(r"\b([sva])(?:(\d+)\b|\[(\d+):(\d+)\])")
_OTHER_BRANCH = re.compile(r"s_cbranch_(?:\w+_fork|join)|s_subvector_loop")
# Signs of a loop that waits for another workgroup: cache-bypassing loads, atomics with a result, s_sleep. Not buffer_gl0_inv: each
# barrier has one on GFX10, and an acquire from other workgroups also has buffer_gl1_inv.
_WAITING = re.compile(r"\b(?:glc|sc[01]|slc|dlc)\b|^s_(?:sleep|dcache_inv|atomic)|^buffer_(?:wbinv|inv|gl1)")
_COMPARES = re.compile(r"\w+_atomic_f?cmpswap(?:_x2)? v\[?(\d+)(?::\d+\])?, v\S+, v\[(\d+):(\d+)\].* glc")
_WRITES_EXEC = re.compile(r"s_\w+(?:saveexec|wrexec)|v_cmpx")
_HOST_CALL = "__ockl_hostcall"  # prefix of AMD's functions that call the host
_NEAR = 1 << 17  # bytes that s_branch reaches
_LOW, _HIGH = 8, 16  # byte offsets of the literals from s_getpc_b64


class Reference(Record):
    """An address computed from the program counter: the address of s_getpc_b64, and the resulting 64-bit address.

    last  the address of the last of the three instructions that compute it
    sgpr  the first of the two SGPRs that hold it
    """

    place: int
    target: int
    last: int
    sgpr: int


class Region(NamedTuple):
    """The code of a kernel or a function: its first address, its end, and the function's name, or "" if unknown."""

    begin: int
    end: int
    name: str


class MovedCode(Record):
    """A relocated copy of a kernel's instructions.

    places      original address of an instruction → its new address
    starts      original address of an instruction → the new address of the code that is inserted before it
    references  each s_getpc_b64 in the copy whose target is outside the kernel, with the 64-bit distance in its two literals
    """

    content: bytearray
    places: Mapping[int, int]
    starts: Mapping[int, int]
    references: tuple[tuple[int, int], ...]


class KernelCode(Record):
    """The instructions of a kernel and of the functions that it calls, and the registers that they name.

    code     the bytes of each instruction, by address
    regions  the kernel and each function
    calls    the addresses of the references whose targets are these functions
    """

    code: Mapping[int, bytes]
    instructions: tuple[GcnInstruction, ...]
    regions: tuple[Region, ...]
    sgprs: int
    vgprs: int
    references: tuple[Reference, ...]
    calls: frozenset[int]

    @property
    def exits(self) -> list[GcnInstruction]:
        return [instruction for instruction in self.instructions if instruction.name == "s_endpgm"]

    @property
    def is_indexed(self) -> bool:
        """Whether VGPR numbers are computed at run time. The code may then use VGPRs that it does not name."""
        return any(_INDEXED.match(instruction.name) for instruction in self.instructions)

    @cached_property
    def inside_indexing(self) -> set[int]:
        """The addresses before which no code can be inserted, because VGPR indexing is on there."""
        found: set[int] = set()
        on = False
        for instruction in self.instructions:
            if on:
                found.add(instruction.address)
            if instruction.name in ("s_set_gpr_idx_on", "s_set_gpr_idx_off"):
                on = instruction.name == "s_set_gpr_idx_on"
        return found

    @cached_property
    def branches(self) -> dict[int, int]:
        """The target of each branch, by the branch's address."""
        return _branches(self.instructions, self.code)

    @cached_property
    def waits(self) -> bool:
        """Whether the kernel may wait for another workgroup: a loop has an atomic with a result, a cache-bypassing load, or s_sleep.

        Retry loops (`_tries_again`) do not count. If a function has such an instruction, every loop with a call counts. Host calls
        (printf, assert) do not count: they wait only for the host and for waves that are already running.
        """
        host = [region for region in self.regions if region.name.startswith(_HOST_CALL)]
        loops = [
            (to, at)
            for at, to in self.branches.items()
            if to <= at and not any(region.begin <= at < region.end for region in host)
        ]
        asking = [
            one
            for one in self.instructions
            if loops and _WAITING.search(f"{one.name} {one.operands}") and not self._tries_again(one, loops)
        ]
        functions = [
            one
            for one in asking
            if not any(region.begin <= one.address < region.end for region in (self.regions[0], *host))
        ]
        asking += [one for one in self.instructions if functions and one.name == calls.CALL]
        return any(first <= one.address <= last for one in asking for first, last in loops)

    def _tries_again(self, instruction: GcnInstruction, loops: Sequence[tuple[int, int]]) -> bool:
        """Return whether an instruction is a compare-and-swap in a retry loop, whose next iteration expects the value found.

        A retry loop ends once no other thread changes the value in between. A loop that waits for a lock always expects the
        same value.
        """
        match = _COMPARES.match(f"{instruction.name} {instruction.operands}")
        around = [loop for loop in loops if loop[0] <= instruction.address <= loop[1]]
        if not match or not around:
            return False
        found, first, last = (int(number) for number in match.groups())
        expected = first + (last - first + 1) // 2
        begin, end = min(around, key=lambda loop: loop[1] - loop[0])
        return any(
            one.name.startswith("v_mov_b32") and one.operands == f"v{expected}, v{found}"
            for one in self.instructions
            if begin <= one.address <= end
        )

    def blocks(self) -> Iterator[list[GcnInstruction]]:
        """Yield the basic blocks: runs of instructions that execute from the first to the last."""
        leaders = {*self.branches.values(), *(region.begin for region in self.regions)}
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

    def moved(
        self, to: int, before: Mapping[int, bytes], behind: Mapping[int, bytes] | None = None
    ) -> MovedCode:
        """Return a copy at address `to`, with code inserted before and after some instructions. Raises Refusal if it cannot be moved.

        A branch to such an instruction goes to the code inserted before it.
        """
        behind = behind or {}
        starts, places, content = {}, {}, bytearray()
        for instruction in self.instructions:
            address = instruction.address
            starts[address] = to + len(content)
            content += before.get(address, b"")
            places[address] = to + len(content)
            content += self.code[address] + behind.get(address, b"")
        for address, target in self.branches.items():
            at = places[address]
            struct.pack_into("<h", content, at - to, words(at, starts[target]))
        elsewhere = []
        for reference in self.references:
            at = places[reference.place]
            following = [places.get(reference.place + distance - 4) for distance in (_LOW, _HIGH)]
            if following != [at + _LOW - 4, at + _HIGH - 4]:
                raise Refusal("it computes an address of its code")
            own = self.regions[0]
            inside = own.begin <= reference.target < own.end or reference.place in self.calls
            if inside and reference.target not in starts:
                raise Refusal("it computes an address of its code")
            target = starts[reference.target] if inside else reference.target
            distance = target - (at + 4) & (1 << 64) - 1
            struct.pack_into("<I", content, at - to + _LOW, distance & 0xFFFFFFFF)
            struct.pack_into("<I", content, at - to + _HIGH, distance >> 32)
            if not inside:
                elsewhere.append((at, distance))
        return MovedCode(content, places, starts, tuple(elsewhere))


def words(at: int, to: int) -> int:
    """Return the operand of a branch at an address, in 4-byte words. Raises Refusal if the target is out of range."""
    distance = to - at - 4
    if not -_NEAR <= distance < _NEAR:
        raise Refusal("its code is too far from room for probes")
    return distance // 4


def entered(block: Sequence[GcnInstruction]) -> GcnInstruction:
    """Return the first instruction at which all lanes of a basic block are active. Where paths join, code first restores EXEC."""
    return next((one for one in block if not one.operands.startswith("exec")), block[-1])


def writes_exec(instruction: GcnInstruction) -> bool:
    """Return whether an instruction may change EXEC."""
    return instruction.operands.startswith("exec") or bool(_WRITES_EXEC.match(instruction.name))


def read(code: CodeObject, comgr: Comgr, kernel: GcnKernel) -> KernelCode:
    """Read all instructions of a kernel and of the functions that it calls. Raises Refusal if they cannot be copied."""
    size = kernel.end - kernel.begin
    if size >= _NEAR:
        raise Refusal("it is larger than a branch reaches")
    offset = code.offset(kernel.begin, size)
    try:
        begun = list(comgr.disassemble(code.data[offset : offset + size], kernel.begin))
    except ImageError as error:
        raise Refusal(str(error)) from None
    found = _Found(code, kernel.descriptor.wave)
    found.add(begun, is_kernel=True)
    while found.wanted:
        address = found.wanted.pop()
        found.add(calls.function_at(code, comgr, address, _NEAR - 1), is_kernel=False)
    return found.code_of_kernel()


class _Found:
    """The code found so far: the kernel's instructions, then those of its functions. `wanted`: functions still to read."""

    def __init__(self, code: CodeObject, wave: int) -> None:
        self._file = code
        # On GFX10, comgr supports only waves of 32 lanes: of a mask of 64 lanes, it names just the lower register.
        self._has_wide_masks = code.gpu.startswith("gfx10") and wave == 64
        self._code: dict[int, bytes] = {}
        self._instructions: list[GcnInstruction] = []
        self._regions: list[Region] = []
        self._references: list[Reference] = []
        self._calls: set[int] = set()
        self.wanted: set[int] = set()

    def add(self, instructions: Sequence[GcnInstruction], is_kernel: bool) -> None:
        """Add the instructions of the kernel or of one function. Raises Refusal if they cannot be copied."""
        if any(instruction.address in self._code for instruction in instructions):
            raise Refusal("it calls a function that lies within another one")
        for one in instructions:
            _check(one)
            at = self._file.offset(one.address, one.size)
            self._code[one.address] = self._file.data[at : at + one.size]
        references = [
            _reference(instructions[number : number + 3], self._code)
            for number, instruction in enumerate(instructions)
            if instruction.name == "s_getpc_b64"
        ]
        computed = {reference.last: reference.sgpr for reference in references}
        branches = _branches(instructions, self._code)
        called = calls.called(instructions, branches, computed, is_kernel)
        begin, end = instructions[0].address, instructions[-1].address + instructions[-1].size
        for reference in references:
            if reference.last in called and not (is_kernel and begin <= reference.target < end):
                self._calls.add(reference.place)
                self.wanted.add(reference.target)
        self._instructions += instructions
        self._references += references
        self._regions.append(Region(begin, end, self._file.functions.get(begin, ("", 0))[0]))
        self.wanted -= {region.begin for region in self._regions}

    def code_of_kernel(self) -> KernelCode:
        """Return the code found. Raises Refusal if it has no exit."""
        most = {"s": 0, "v": 0, "a": 0}
        for instruction in self._instructions:
            for kind, one, _, last in _REGISTERS.findall(instruction.operands):
                most[kind] = max(most[kind], int(one or last) + 1)
        if self._has_wide_masks:  # such a mask starts at an even register
            most["s"] = align(most["s"], 2)
        made = KernelCode(
            self._code,
            tuple(self._instructions),
            tuple(self._regions),
            most["s"],
            most["v"],
            tuple(self._references),
            frozenset(self._calls),
        )
        if not made.exits:
            raise Refusal("it never ends")
        return made


def _check(instruction: GcnInstruction) -> None:
    """Raise Refusal for an instruction that cannot be copied."""
    if instruction.name.startswith("s_movrel"):
        raise Refusal(f"it computes the numbers of SGPRs ({instruction.name})")
    if _OTHER_BRANCH.match(instruction.name):
        raise Refusal(f"it branches by {instruction.name}")
    if instruction.name.startswith("s_endpgm_"):
        raise Refusal(f"it ends with {instruction.name}")


def _branches(instructions: Sequence[GcnInstruction], code: Mapping[int, bytes]) -> dict[int, int]:
    """Return the target of each branch, by the branch's address. Raises Refusal if a target is not an instruction."""
    found = {}
    for branch in instructions:
        if calls.BRANCH.match(branch.name):
            found[branch.address] = to = calls.branch_target(branch, code[branch.address])
            if to not in code:
                raise Refusal("it branches out of its code")
    return found


def _reference(instructions: Sequence[GcnInstruction], code: Mapping[int, bytes]) -> Reference:
    """Return the address computed by three instructions, in the form compilers emit. Raises Refusal for any other form."""
    pair = re.fullmatch(r"s\[(\d+):(\d+)\]", instructions[0].operands)
    if pair and [one.name for one in instructions[1:]] == ["s_add_u32", "s_addc_u32"]:
        low, high = pair.groups()
        getpc, add, carry = instructions
        if (
            add.size == carry.size == 8
            and add.operands.startswith(f"s{low}, s{low}, ")
            and carry.operands.startswith(f"s{high}, s{high}, ")
        ):
            literals = [struct.unpack_from("<I", code[one.address], 4)[0] for one in (add, carry)]
            sum_ = getpc.address + 4 + (literals[0] | literals[1] << 32)
            return Reference(getpc.address, sum_ & (1 << 64) - 1, carry.address, int(low))
    raise Refusal("it computes an address of its code")

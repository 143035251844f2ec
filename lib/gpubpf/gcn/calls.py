"""Find the functions that a kernel calls: the targets of its calls, and where each function's code ends.

A call takes its target from a pair of SGPRs. Every value that can reach the pair must be a function address computed from the program
counter, and only calls may use it. Then the function can be copied along with the kernel.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence

from gpubpf.errors import ImageError, Refusal
from gpubpf.gcn.code_object import CodeObject
from gpubpf.gcn.comgr import Comgr, GcnInstruction

CALL, _JUMP = "s_swappc_b64", "s_setpc_b64"
_NEVER = ("s_call_b64", "s_rfe_b64")
_RETURN = "s[30:31]"  # the return address, at the end of a function
BRANCH = re.compile(r"s_branch|s_cbranch_")
NO_WAY_ON = ("s_branch", "s_endpgm", _JUMP)
_SGPRS = re.compile(r"\bs(?:(\d+)\b|\[(\d+):(\d+)\])")
VCC = 106  # the number of VCC's lower half
_WITHOUT_RESULT = re.compile(r"s_(?:cmp|bitcmp|setpc|store|buffer_store|scratch_store|atomic|set_)")
_TWO_RESULTS = re.compile(r"v_(?:\w+_co_|div_scale|mad_[iu]64)")


def branch_target(instruction: GcnInstruction, code: bytes) -> int:
    """Return the target of a branch. `code`: the instruction's bytes. The offset counts 4-byte words from the next instruction."""
    (words,) = struct.unpack_from("<h", code)
    return instruction.address + 4 + 4 * int(words)


def function_at(code: CodeObject, comgr: Comgr, address: int, most: int) -> list[GcnInstruction]:
    """Return the instructions of the function at an address. Raises Refusal if it cannot be read or exceeds `most` bytes.

    Without a symbol that gives its size, the function ends at the first jump or s_endpgm behind which no branch leads.

    most: the largest size of the function, in bytes
    """
    named = address in code.functions
    size = min(code.functions[address][1] if named else most + 1, code.bytes_from(address))
    if named and size > most:
        raise Refusal("it calls a function that is larger than a branch reaches")
    found: list[GcnInstruction] = []
    furthest = address
    try:
        offset = code.offset(address, size)
        for instruction in comgr.disassemble(code.data[offset : offset + size], address):
            found.append(instruction)
            here = instruction.address + instruction.size
            if BRANCH.match(instruction.name):
                at = offset + instruction.address - address
                furthest = max(furthest, branch_target(instruction, code.data[at : at + 4]))
            if not named and instruction.name in NO_WAY_ON and here > furthest:
                break
    except ImageError as error:
        # Anything may follow a call that does not return.
        if not found or found[-1].address < furthest or found[-1].name != CALL:
            raise Refusal(f"it calls a function that cannot be read: {error}") from None
    return found


def called(
    instructions: Sequence[GcnInstruction],
    targets: Mapping[int, int],
    computed: Mapping[int, int],
    is_kernel: bool,
) -> set[int]:
    """Return the computed addresses that a kernel or function only calls. Raises Refusal for unsupported calls.

    targets: branch → its target, both as addresses
    computed: for each address computed from the program counter, the address of the last of the three instructions that compute it →
      the first of the two SGPRs that hold it
    """
    found: set[int] = set()
    flow = _Flow(instructions, targets)
    for number, instruction in enumerate(instructions):
        if instruction.name in _NEVER:
            raise Refusal(f"it calls functions by {instruction.name}")
        if instruction.name not in (CALL, _JUMP):
            continue
        pair = instruction.operands.rpartition(", ")[2]
        if instruction.name == _JUMP and pair == _RETURN and not is_kernel:
            continue
        first = min(sgprs(pair), default=-1)
        for address in flow.written_before(number, first):
            if computed.get(address) != first:
                raise Refusal("it calls functions whose addresses it loads")
            found.add(address)
    for address in found:
        flow.check_only_called(address, computed[address])
    return found


def sgprs(text: str) -> set[int]:
    """Return the numbers of the SGPRs in operands, including VCC."""
    found: set[int] = set()
    for one, first, last in _SGPRS.findall(text):
        found.update(range(int(one or first), int(one or last) + 1))
    for half in re.findall(r"\bvcc(?:_lo|_hi)?\b", text):
        found.update({"vcc": (VCC, VCC + 1), "vcc_lo": (VCC,), "vcc_hi": (VCC + 1,)}[half])
    return found


def use(instruction: GcnInstruction) -> tuple[set[int], set[int]]:
    """Return the SGPRs that an instruction writes, and the SGPRs that it reads."""
    operands = instruction.operands.split(", ")
    results = 0 if _WITHOUT_RESULT.match(instruction.name) else 1
    results += bool(_TWO_RESULTS.match(instruction.name))
    return sgprs(", ".join(operands[:results])), sgprs(", ".join(operands[results:]))


class _Flow:
    """The control flow between instructions."""

    def __init__(self, instructions: Sequence[GcnInstruction], targets: Mapping[int, int]) -> None:
        self._instructions = instructions
        self._numbers = {instruction.address: number for number, instruction in enumerate(instructions)}
        self._next: list[list[int]] = [[] for _ in instructions]
        self._before: list[list[int]] = [[] for _ in instructions]
        for number, instruction in enumerate(instructions):
            following = [] if instruction.name in NO_WAY_ON else [number + 1]
            if (target := targets.get(instruction.address)) in self._numbers:
                following.append(self._numbers[target])
            for other in following:
                if other < len(instructions):
                    self._next[number].append(other)
                    self._before[other].append(number)

    def written_before(self, number: int, first: int) -> set[int]:
        """Return the addresses of the instructions that may have written a pair of SGPRs last. Raises Refusal if a path has none."""
        found: set[int] = set()
        seen, left = {number}, [number]
        while left:
            here = left.pop()
            if here == 0:
                raise Refusal("it calls functions whose addresses it is given")
            for before in self._before[here]:
                if use(self._instructions[before])[0] & {first, first + 1}:
                    found.add(self._instructions[before].address)
                elif before not in seen:
                    seen.add(before)
                    left.append(before)
        return found

    def check_only_called(self, address: int, first: int) -> None:
        """Raise Refusal if anything but a call may read the pair of SGPRs written by the instruction at an address."""
        pair = {first, first + 1}
        seen: set[int] = set()
        left = [self._numbers[address]]
        while left:
            for following in self._next[left.pop()]:
                if following in seen:
                    continue
                seen.add(following)
                instruction = self._instructions[following]
                writes, reads = use(instruction)
                if reads & pair and instruction.name not in (CALL, _JUMP):
                    raise Refusal("it keeps the address of a function")
                if not writes & pair:
                    left.append(following)

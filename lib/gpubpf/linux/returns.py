"""Find the instructions at which the functions of a library return.

    code = Code(file)
    code.returns(address, size)         # Returns((0x1139, 0x1150), "")

The kernel's return probes replace the return address on the stack by that of a trampoline. Unwinding stops there: an exception is not
caught, and a cancelled thread does not release its locks. A probe at each return instruction changes nothing on the stack.

The search follows the code from a function's entry, past calls and along jumps. So it also finds returns in a part of the function
that is elsewhere, and in another function to which this function jumps at its end. It finds only instructions that the program can
execute, or that the compiler placed after a call that does not return. It does not reach data between instructions.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Iterator
from functools import cached_property

from gpubpf import elf
from gpubpf.errors import ImageError
from gpubpf.linux import x86_code
from gpubpf.linux.x86_code import Block
from gpubpf.process import limits
from gpubpf.record import Record

_PIECE = 1 << 16  # bytes of code to read at once
_MOST_BLOCKS = 50_000  # blocks of one function
_MOST_BOUNDS = 1 << 20  # functions, or parts of functions, in one table of a file
_NO_RETURN = "it has no return instruction"
_DATA = "there is data in its code"
_LARGE = "it has too much code"
_UNKNOWN = "it has an instruction that is not known"
_ANYWHERE = "it ends in a jump to a function that only the running program knows"


class Returns(Record):
    """The addresses of a function's return instructions.

    unseen: why the function may also return at unknown addresses; "" if it does not.
    jumps: the function can end in a jump to an exported function.
    own: the addresses in the function itself, not in a part that is elsewhere or in a function that it jumps to.
    """

    addresses: tuple[int, ...]
    unseen: str = ""
    jumps: bool = False
    own: frozenset[int] = frozenset()


class _Step(Record):
    """What follows a block.

    to: the blocks where control can go.
    returns: address of the block's return instruction; None: no return.
    unseen: why control can also go to unknown addresses; "" if it cannot.
    """

    to: tuple[int, ...] = ()
    returns: int | None = None
    unseen: str = ""


class Code:
    """The code of a library or program, an open file that stays the caller's. Addresses are those in the file.

    The file is untrusted. After limits.CODE seconds of this thread's CPU time, further functions have too much code."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._library = elf.LoadedFile(file)
        self._pieces: dict[int, bytes] = {}
        self._steps: dict[int, _Step] = {}
        self._until = time.thread_time() + limits.CODE

    def returns(self, address: int) -> Returns:
        """Return where the function at an address returns."""
        steps = self._reached(address)
        unseen = next((step.unseen for step in steps.values() if step.unseen), "")
        if unseen or len(steps) > _MOST_BLOCKS or self._is_late():
            return Returns((), unseen or _LARGE)
        found = {step.returns for step in steps.values() if step.returns is not None}
        jumps = any(at in self._entries and at != address for at in steps)
        after = bisect.bisect_right(self._bounds, address)
        end = self._bounds[after] if after < len(self._bounds) else address
        own = frozenset(at for at in found if address <= at < end)
        return Returns(tuple(sorted(found)), "" if found else _NO_RETURN, jumps, own)

    def is_misread(self, address: int) -> bool:
        """Return whether a uprobe at an instruction would make the program do something else, see `x86_code`."""
        return x86_code.is_misread_by_linux(self._bytes(address, address + 16))

    def loaded_functions(self, address: int) -> set[int]:
        """Return the functions whose addresses the function at an address loads."""
        found: set[int] = set()
        for start in self._reached(address):
            for at, instruction in self._instructions(start, self._block(start).end):
                distance = x86_code.loaded_address(instruction)
                if distance is not None:
                    found.add(at + len(instruction) + distance)
        return {at for at in found & self.functions if self._piece(at)[0]}

    def _reached(self, address: int) -> dict[int, _Step]:
        """Return the blocks that the function at an address can reach. Stop at a block whose successors are unknown."""
        found: dict[int, _Step] = {}
        waiting = [address]
        while waiting and len(found) <= _MOST_BLOCKS and not self._is_late():
            at = waiting.pop()
            if at in found:
                continue
            if at not in self._steps:
                self._steps[at] = self._step(self._block(at))
            found[at] = step = self._steps[at]
            if step.unseen:
                break
            waiting += step.to
        return found

    def _is_late(self) -> bool:
        return time.thread_time() > self._until

    # --- what follows a block ---

    def _step(self, block: Block) -> _Step:
        after = bisect.bisect_right(self._bounds, block.start)
        crossed = after < len(self._bounds) and self._bounds[after] < block.end
        if crossed or block.kind is None:
            until = self._bounds[after] if crossed else block.last
            if self._calls_last(block, until):
                return _Step()  # the call does not return
            if crossed:
                return _Step((until,))
        if block.kind == x86_code.RETURN:
            return _Step(returns=block.last)
        if block.kind == x86_code.JUMP:
            return _Step((block.target,))
        if block.kind == x86_code.BRANCH:
            return _Step((block.target, block.end))
        if block.kind == x86_code.END:
            return _Step()
        if block.kind == x86_code.INDIRECT:
            return self._after_indirect(block)
        return _Step(unseen=_UNKNOWN)

    def _calls_last(self, block: Block, until: int) -> bool:
        """Return whether only padding is between a call in a block and an address after the block's start."""
        return any(
            x86_code.is_call(instruction) and self._after_padding(at + len(instruction)) >= until
            for at, instruction in self._instructions(block.start, until)
        )

    def _after_indirect(self, block: Block) -> _Step:
        jump = self._bytes(block.last, block.end)
        distance = x86_code.slot(jump)
        if distance is not None:
            imported = self._imports.get(block.end + distance)
            name = imported.name if imported is not None else ""
            if name in self._exports:
                return _Step((self._exports[name].address,))
            return _Step(unseen=f"it ends in a jump to {name or 'another function'}")
        before = (instruction for _, instruction in self._instructions(block.start, block.last))
        return self._around(block.last) if x86_code.is_switch(jump, before) else _Step(unseen=_ANYWHERE)

    def _around(self, jump: int) -> _Step:
        """Return all blocks of the function around a jump that can go to any of them."""
        after = bisect.bisect_right(self._bounds, jump)
        start = self._bounds[after - 1] if after else jump
        end = self._bounds[after] if after < len(self._bounds) else jump + _PIECE
        blocks, begins, targets = list[int](), set[int](), {jump}
        at = start
        while at < end and self._after_padding(at) < end:
            if self._is_late():
                return _Step(unseen=_LARGE)
            block = self._block(at)
            begins.add(block.last)
            for place, instruction in self._instructions(at, block.last):
                begins.add(place)
                distance = x86_code.loaded_address(instruction)
                if distance is not None and start < place + len(instruction) + distance < end:
                    return _Step(unseen=_DATA)  # such as the table
            if block.kind is None:
                return _Step(unseen=_DATA)
            if block.kind in (x86_code.JUMP, x86_code.BRANCH):
                targets.add(block.target)
            blocks.append(at)
            at = block.end
        if any(start <= target < end and target not in begins for target in targets):
            return _Step(unseen=_DATA)
        return _Step(tuple(blocks))

    # --- the file ---

    def _block(self, address: int) -> Block:
        piece, base = self._piece(address)
        return x86_code.block(piece, address - base, base)

    def _instructions(self, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield the instructions of a block that begin before `end`, with their addresses."""
        piece, base = self._piece(start)
        return x86_code.instructions(piece, start - base, end - base, base)

    def _after_padding(self, address: int) -> int:
        piece, base = self._piece(address)
        return base + x86_code.after_padding(piece, address - base)

    def _bytes(self, start: int, end: int) -> bytes:
        piece, base = self._piece(start)
        return piece[start - base : end - base]

    def _piece(self, address: int) -> tuple[bytes, int]:
        """Return a piece of code that has the address in its first half, and the piece's own address; b"" outside of code."""
        segment = next((s for s in self._segments if 0 <= address - s.address < s.size), None)
        if segment is None:
            return b"", address
        base = address - (address - segment.address) % (_PIECE // 2)
        if base not in self._pieces:
            self._pieces[base] = self._library.some(base, _PIECE)
        return self._pieces[base], base

    @cached_property
    def _segments(self) -> tuple[elf.Segment, ...]:
        return tuple(s for s in self._library.segments if s.executable)

    @cached_property
    def _exports(self) -> dict[str, elf.Symbol]:
        return elf.exports(self._library)

    @cached_property
    def _imports(self) -> dict[int, elf.Import]:
        with contextlib.suppress(OSError, ImageError):
            return elf.of_file(self._file).imports()
        return {}

    @cached_property
    def _entries(self) -> frozenset[int]:
        return frozenset(symbol.address for symbol in self._exports.values())

    @cached_property
    def functions(self) -> frozenset[int]:
        """The addresses at which functions begin or end, according to the file. Some may be missing."""
        return frozenset(self._bounds)

    @cached_property
    def _bounds(self) -> list[int]:
        """The addresses at which functions begin or end, according to the file. Some may be missing."""
        found: set[int] = set()
        for symbol in self._exports.values():
            found |= {symbol.address, symbol.address + symbol.size}
        with contextlib.suppress(OSError, ImageError):
            file = elf.of_file(self._file)
            found.update(file.frame_starts()[:_MOST_BOUNDS].tolist())
            for symbols, _ in file.symbol_tables((elf.STT_FUNC,)):
                symbols = symbols[:_MOST_BOUNDS]
                found.update(symbols["value"].tolist())
                found.update((symbols["value"] + symbols["size"])[symbols["size"] > 0].tolist())
        return sorted(found)

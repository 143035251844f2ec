"""The segment that is appended to a code object, and the jumps and calls between its code and the existing code."""

from __future__ import annotations

import struct

from gpubpf import elf
from gpubpf.errors import ImageError
from gpubpf.gcn.code_object import PT_GNU_STACK, PT_LOAD, CodeObject
from gpubpf.gcn.comgr import Comgr
from gpubpf.gcn.kernel_code import words
from gpubpf.lower import amdgcn
from gpubpf.record import MutableRecord, field

PAGE = 4096
NOP = 0xBF800000  # s_nop
_NEAR = 1 << 17  # bytes that s_branch reaches
_PADDING = 1024  # bytes after the last instruction that the instruction cache may prefetch; most on gfx90a (LLVM: EmitCodeEnd)
_INFO = 4  # offset of a symbol's type and binding in its entry
_LOW, _HIGH = 8, 16  # offsets of the literals in the code that computes an address


class Added(MutableRecord):
    """Content appended after the code object, from address `begin` on."""

    begin: int
    content: bytearray = field(default_factory=bytearray)

    @property
    def here(self) -> int:
        return self.begin + len(self.content)

    def align(self, to: int) -> None:
        self.content += bytes(-self.here % to)

    def add(self, code: bytes) -> int:
        """Add code and return its address."""
        at = self.here
        self.content += code
        return at


def branch(at: int, to: int) -> bytes:
    """Return s_branch, placed at an address. Raises Refusal if the target is out of range."""
    return struct.pack("<I", 0xBF820000 | words(at, to) & 0xFFFF)


def jump(comgr: Comgr, at: int, to: int) -> bytes:
    """Return a jump between any two addresses. It may change the two registers at `amdgcn.BACK`."""
    if -_NEAR <= to - at - 4 < _NEAR:
        return branch(at, to)
    return _far(comgr, at, to, "s_setpc_b64 {pair}")


def call(comgr: Comgr, at: int, to: int) -> bytes:
    """Return a call at an address to a probe that returns."""
    return _far(comgr, at, to, "s_swappc_b64 {pair}, {pair}")


def _far(comgr: Comgr, at: int, to: int, go: str) -> bytes:
    """Return the code at address `at` that computes address `to` and goes there."""
    low, high = (f"s{amdgcn.BACK + n}" for n in range(2))
    pair = f"s[{amdgcn.BACK}:{amdgcn.BACK + 1}]"
    any_ = "0x12345678"  # a placeholder that assembles to a 32-bit literal
    lines = [f"s_getpc_b64 {pair}", f"s_add_u32 {low}, {low}, {any_}", f"s_addc_u32 {high}, {high}, {any_}"]
    code = bytearray(comgr.assemble("\n".join([*lines, go.format(pair=pair)])))
    distance = to - at - 4 & (1 << 64) - 1  # s_getpc_b64 gives the address of the next instruction
    struct.pack_into("<I", code, _LOW, distance & 0xFFFFFFFF)
    struct.pack_into("<I", code, _HIGH, distance >> 32)
    return bytes(code)


def hide_variables(code: CodeObject, image: bytearray) -> None:
    """Make the copy's variables local, so that ROCr does not list them: probed code uses the variables of the original."""
    for section in code.elf.sections:
        if section.type in (elf.SHT_SYMTAB, elf.SHT_DYNSYM):
            names = code.elf.name_table(section)
            for number, one in enumerate(code.elf.symbols(section)):
                if one.type == elf.STT_OBJECT and not names.at(one.name).endswith(".kd"):
                    image[section.offset + elf.SYMBOL_SIZE * number + _INFO] = elf.STT_OBJECT  # STB_LOCAL


def append(code: CodeObject, image: bytearray, added: Added) -> None:
    """Append the added content as a segment, replacing program header PT_GNU_STACK. Raises ImageError if it has no such header."""
    added.content += struct.pack("<I", NOP) * (_PADDING // 4)  # s_nop
    image += bytes(-len(image) % PAGE)
    table, count = struct.unpack_from("<Q", image, 32)[0], struct.unpack_from("<H", image, 56)[0]
    for number in range(count):
        at = table + 56 * number
        if struct.unpack_from("<I", image, at)[0] == PT_GNU_STACK:
            size = len(added.content)
            fields = (PT_LOAD, 5, len(image), added.begin, added.begin, size, size, PAGE)
            struct.pack_into("<II6Q", image, at, *fields)
            image += added.content
            return
    raise ImageError("it has no program header that can be replaced (PT_GNU_STACK)")

"""An AMD GPU code object: its target GPU, and its kernels with their descriptors.

Source: "User Guide for AMDGPU Backend" of LLVM: ELF Code Object, Kernel Descriptor, Initial Kernel Execution State.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cached_property

from gpubpf import elf
from gpubpf.errors import ImageError
from gpubpf.record import Record

EM_AMDGPU = 224
PT_LOAD, PT_GNU_STACK = 1, 0x6474E551
DESCRIPTOR = 64  # bytes
# e_flags & 0xFF
_GPUS: Mapping[int, str] = {
    0x2C: "gfx900", 0x2D: "gfx902", 0x2E: "gfx904", 0x2F: "gfx906", 0x30: "gfx908", 0x31: "gfx909", 0x32: "gfx90c",
    0x33: "gfx1010", 0x34: "gfx1011", 0x35: "gfx1012", 0x36: "gfx1030", 0x37: "gfx1031", 0x38: "gfx1032", 0x39: "gfx1033",
    0x3D: "gfx1035", 0x3E: "gfx1034", 0x3F: "gfx90a", 0x40: "gfx940", 0x41: "gfx1100", 0x42: "gfx1013", 0x43: "gfx1150",
    0x44: "gfx1103", 0x45: "gfx1036", 0x46: "gfx1101", 0x47: "gfx1102", 0x48: "gfx1200", 0x4A: "gfx1151", 0x4B: "gfx941",
    0x4C: "gfx942", 0x4E: "gfx1201", 0x4F: "gfx950",
}  # fmt: skip
_SEGMENT = struct.Struct("<II6Q")
# User SGPRs in order: (bit in the kernel code properties, number of registers).
_USER_SGPRS = {
    "private_buffer": (0, 4),
    "dispatch_pointer": (1, 2),
    "queue_pointer": (2, 2),
    "kernarg": (3, 2),
    "dispatch_id": (4, 2),
    "scratch_init": (5, 2),
    "private_size": (6, 1),
}


class Descriptor(Record):
    """A kernel descriptor. `entry`: the distance in bytes from the descriptor to the first instruction."""

    group_bytes: int
    private_bytes: int
    kernarg_bytes: int
    entry: int
    resources: tuple[int, int, int]  # COMPUTE_PGM_RSRC1 to 3
    properties: int
    preload: int

    @classmethod
    def parse(cls, data: bytes) -> Descriptor:
        group, private, kernarg, entry = struct.unpack_from("<III4xq", data)
        third, first, second, properties, preload = struct.unpack_from("<IIIHH", data, 44)
        return cls(group, private, kernarg, entry, (first, second, third), properties, preload)

    @property
    def wave(self) -> int:
        """Lanes per wave, on GPUs that support both sizes."""
        return 32 if self.properties >> 10 & 1 else 64

    @property
    def user_sgprs(self) -> int:
        return self.resources[1] >> 1 & 31

    def has(self, name: str) -> bool:
        """Return whether a user SGPR of _USER_SGPRS is initialized when a wave starts."""
        return bool(self.properties >> _USER_SGPRS[name][0] & 1)

    def register(self, name: str) -> int:
        """Return the number of a user SGPR's first register, whether it is initialized or not."""
        number = 0
        for each, (_, count) in _USER_SGPRS.items():
            if each == name:
                return number
            number += count if self.has(each) else 0
        raise KeyError(name)

    @property
    def workgroup_ids(self) -> tuple[bool, bool, bool]:
        """Whether the x, y and z workgroup indices are initialized when a wave starts."""
        return tuple(bool(self.resources[1] >> bit & 1) for bit in (7, 8, 9))  # type: ignore[return-value]

    @property
    def last_sgprs(self) -> int:
        """Number of SGPRs after the workgroup indices: workgroup information and scratch offset."""
        return (self.resources[1] >> 10 & 1) + (self.resources[1] & 1)


class GcnKernel(Record):
    """A kernel: its mangled name, its descriptor with file offset and address, and the address range of its code."""

    name: str
    descriptor: Descriptor
    descriptor_offset: int
    descriptor_address: int
    begin: int
    end: int


_ABI_V4 = 2  # the first ABI version of code objects that can state that code runs with and without a feature (version 4)


def is_code_object(data: bytes) -> bool:
    """Return whether the data is an ELF file for AMD GPUs."""
    return data[:4] == b"\x7fELF" and int.from_bytes(data[18:20], "little") == EM_AMDGPU


class CodeObject:
    """A code object in memory. Raises ImageError if the data is damaged or not a code object."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.elf = elf.of_bytes(data)
        if self.elf.machine != EM_AMDGPU:
            raise ImageError("it is not a code object for AMD GPUs; name another file")
        number = self.elf.flags & 0xFF
        if number not in _GPUS:
            raise ImageError(f"it is for an unknown AMD GPU (number {number:#x})")
        self.gpu = _GPUS[number]

    @property
    def target(self) -> str:
        """The GPU with the features that the code depends on: "gfx90a:xnack+" (LLVM, "User Guide for AMDGPU Backend", e_flags)."""
        flags, features = self.elf.flags, []
        for name, shift, old in (("sramecc", 10, 0x200), ("xnack", 8, 0x100)):
            if self.elf.abi_version >= _ABI_V4:
                features += {2: [f"{name}-"], 3: [f"{name}+"]}.get(flags >> shift & 3, [])
            elif flags & old:
                features.append(f"{name}+")
        return ":".join([self.gpu, *features])

    @property
    def isa(self) -> str:
        """The instruction set, in comgr's notation."""
        return f"amdgcn-amd-amdhsa--{self.gpu}"

    @cached_property
    def end(self) -> int:
        """The first address after all loaded segments. Raises ImageError if it is 4 GiB or more."""
        ends = [0]
        at, count = struct.unpack_from("<Q", self.data, 32)[0], struct.unpack_from("<H", self.data, 56)[0]
        for number in range(count):
            header = self.elf.source.read(at + number * _SEGMENT.size, _SEGMENT.size)
            kind, _, _, address, _, _, size, _ = _SEGMENT.unpack(header)
            ends += [address + size] if kind == PT_LOAD else []
        if max(ends) >> 32:
            raise ImageError("its addresses are too large; build it again")
        return max(ends)

    def offset(self, address: int, size: int) -> int:
        """Return the file offset of `size` bytes at an address. Raises ImageError if the file does not contain them."""
        first, last = (elf.offset_of(self.elf.loads, at) for at in (address, address + size - 1))
        if first is None or last is None or last - first != size - 1 or last >= len(self.data):
            raise ImageError(f"it has no {size} bytes at address {address:#x}; build it again")
        return first

    @cached_property
    def functions(self) -> dict[int, tuple[str, int]]:
        """The name and size in bytes of each function that has a symbol, by address. Raises ImageError if a table is damaged."""
        found: dict[int, tuple[str, int]] = {}
        for section in self.elf.sections:
            if section.type in (elf.SHT_SYMTAB, elf.SHT_DYNSYM):
                names = self.elf.name_table(section)
                for one in self.elf.symbols(section):
                    if one.type == elf.STT_FUNC and one.size:
                        found[one.value] = names.at(one.name), one.size
        return found

    def bytes_from(self, address: int) -> int:
        """Return the number of bytes from an address to the end of its segment in the file; 0 if it is in no segment."""
        ends = (
            s.address + min(s.size, len(self.data) - s.offset) for s in self.elf.loads if s.address <= address
        )
        return max((end - address for end in ends if end > address), default=0)

    @cached_property
    def kernels(self) -> tuple[GcnKernel, ...]:
        """All kernels, sorted by name. Raises ImageError if one is damaged or has no code."""
        functions: dict[str, tuple[int, int]] = {}
        descriptors: dict[str, int] = {}
        for section in self.elf.sections:
            if section.type != elf.SHT_DYNSYM:
                continue
            names = self.elf.name_table(section)
            for symbol in self.elf.symbols(section):
                name = names.at(symbol.name)
                if symbol.type == elf.STT_FUNC:
                    functions[name] = symbol.value, symbol.size
                elif name.endswith(".kd") and symbol.size == DESCRIPTOR:
                    descriptors[name.removesuffix(".kd")] = symbol.value
        return tuple(
            self._kernel(name, address, functions.get(name)) for name, address in sorted(descriptors.items())
        )

    def _kernel(self, name: str, address: int, function: tuple[int, int] | None) -> GcnKernel:
        offset = self.offset(address, DESCRIPTOR)
        descriptor = Descriptor.parse(self.data[offset : offset + DESCRIPTOR])
        begin = address + descriptor.entry
        if function is None or function[0] != begin or not function[1]:
            raise ImageError(f"kernel {name} has no code; build it again")
        self.offset(begin, function[1])
        return GcnKernel(name, descriptor, offset, address, begin, begin + function[1])

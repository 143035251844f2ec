"""Bindings for AMD's code object manager (libamd_comgr), a disassembler and assembler that every HIP installation has.

    comgr = Comgr("amdgcn-amd-amdhsa--gfx906")
    for instruction in comgr.disassemble(code, address): …
    comgr.assemble("s_mov_b32 s0, 1")      # bytes

The bindings support comgr 2 and 3 (amd_comgr.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from gpubpf import elf
from gpubpf.errors import ImageError

LIBRARIES = ("libamd_comgr.so.3", "libamd_comgr.so.2")
_SOURCE, _RELOCATABLE = 1, 7  # amd_comgr_data_kind_t
_READ = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)
_PRINT = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p)
_ANNOTATE = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_void_p)


class GcnInstruction(NamedTuple):
    """An instruction: its address and size in bytes, its name and its operands in comgr's notation."""

    address: int
    size: int
    name: str
    operands: str


class _Handle(ctypes.Structure):
    _fields_ = [("handle", ctypes.c_uint64)]


@cache
def _library() -> ctypes.CDLL:
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ImageError(
        f"AMD's code object manager ({LIBRARIES[-1]}) is not installed; install ROCm or libamd-comgr2"
    )


def _call(function: str, *arguments: object) -> None:
    status = getattr(_library(), function)(*arguments)
    if status:
        raise ImageError(
            f"AMD's code object manager failed with status {status} in {function}; check that it supports this GPU"
        )


class Comgr:
    """The instruction set `isa`, such as "amdgcn-amd-amdhsa--gfx90a:xnack-". Raises ImageError if comgr does not support it."""

    def __init__(self, isa: str) -> None:
        self._isa = isa.encode()
        self._code, self._base, self._printed = b"", 0, b""
        self._assembled: dict[str, bytes] = {}  # a cache by text: assembling takes 11 ms
        self._probes: dict[bytes, tuple[GcnInstruction, ...]] = {}
        # comgr may call these as long as the handle exists, so keep references to them.
        self._callbacks = _READ(self._read), _PRINT(self._print), _ANNOTATE(lambda address, user: None)
        self._info = _Handle()
        _call("amd_comgr_create_disassembly_info", self._isa, *self._callbacks, ctypes.byref(self._info))

    def _read(self, address: int, to: int, size: int, user: object) -> int:
        found = (
            self._code[address - self._base : address - self._base + size] if address >= self._base else b""
        )
        ctypes.memmove(to, found, len(found))
        return len(found)

    def _print(self, text: bytes, user: object) -> None:
        self._printed = text

    def disassemble(self, code: bytes, address: int) -> Iterator[GcnInstruction]:
        """Yield the instructions of `code`, located at `address`. Raises ImageError at an invalid instruction."""
        self._code, self._base = code, address
        step = _library().amd_comgr_disassemble_instruction
        size, at, end = ctypes.c_uint64(), address, address + len(code)
        while at < end:
            if (
                step(self._info, ctypes.c_uint64(at), None, ctypes.byref(size))
                or not 0 < size.value <= end - at
            ):
                raise ImageError(f"unknown instruction at +{at - address:#x}")
            name, _, operands = self._printed.decode("ascii", "replace").strip().partition(" ")
            yield GcnInstruction(at, size.value, name, operands.strip())
            at += size.value

    def probe(self, code: bytes) -> tuple[GcnInstruction, ...]:
        """Return a probe's instructions, with addresses from 0. The result is cached, because many kernels share a probe."""
        if code not in self._probes:
            self._probes[code] = tuple(self.disassemble(code, 0))
        return self._probes[code]

    def assemble(self, text: str) -> bytes:
        """Return the machine code of assembly text without directives. Raises ImageError if it does not assemble."""
        if text not in self._assembled:
            self._assembled[text] = self._assemble(text)
        return self._assembled[text]

    def assemble_each(self, groups: Sequence[Sequence[str]]) -> list[list[bytes]]:
        """Return the machine code of each line of each group. Each line is one instruction. Raises ImageError if one is invalid."""
        made = self.assemble("\n".join(line for lines in groups for line in lines))
        parts = (made[one.address : one.address + one.size] for one in self.disassemble(made, 0))
        return [[next(parts) for _ in lines] for lines in groups]

    def _assemble(self, text: str) -> bytes:
        source, given, made, action, result = (_Handle() for _ in range(5))
        _call("amd_comgr_create_data", _SOURCE, ctypes.byref(source))
        _call("amd_comgr_create_data_set", ctypes.byref(given))
        _call("amd_comgr_create_data_set", ctypes.byref(made))
        _call("amd_comgr_create_action_info", ctypes.byref(action))
        try:
            data = text.encode() + b"\n"
            _call("amd_comgr_set_data", source, ctypes.c_size_t(len(data)), data)
            _call("amd_comgr_set_data_name", source, b"probe.s")
            _call("amd_comgr_data_set_add", given, source)
            _call("amd_comgr_action_info_set_isa_name", action, self._isa)
            _call("amd_comgr_do_action", _assemble_action(), action, given, made)
            _call(
                "amd_comgr_action_data_get_data", made, _RELOCATABLE, ctypes.c_size_t(0), ctypes.byref(result)
            )
            return _text_of(_content(result))
        finally:
            if result.handle:
                _call("amd_comgr_release_data", result)
            _call("amd_comgr_destroy_action_info", action)
            _call("amd_comgr_destroy_data_set", made)
            _call("amd_comgr_destroy_data_set", given)
            _call("amd_comgr_release_data", source)


@cache
def _assemble_action() -> int:
    """Return the number of the assemble action. comgr 3 removed some actions and renumbered the later ones."""
    major, minor = ctypes.c_size_t(), ctypes.c_size_t()
    _library().amd_comgr_get_version(ctypes.byref(major), ctypes.byref(minor))
    return 10 if major.value < 3 else 8


def _content(data: _Handle) -> bytes:
    size = ctypes.c_size_t()
    _call("amd_comgr_get_data", data, ctypes.byref(size), None)
    content = ctypes.create_string_buffer(size.value)
    _call("amd_comgr_get_data", data, ctypes.byref(size), content)
    return content.raw


def _text_of(relocatable: bytes) -> bytes:
    file = elf.of_bytes(relocatable)
    return next((file.contents(section) for section in file.sections if section.name == ".text"), b"")

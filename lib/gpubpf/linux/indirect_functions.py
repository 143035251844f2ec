"""Find the implementations of a function that is chosen when a process starts (STT_GNU_IFUNC), such as memcpy of glibc.

The symbol is the address of a resolver, which returns the address of the implementation. The dynamic linker calls the resolver, and
writes the result to the words through which programs and libraries call the function. These words show which implementation a process
uses. If no library has such a word yet, the candidates are the functions whose addresses the resolver loads.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from gpubpf import elf
from gpubpf.errors import ImageError
from gpubpf.linux.libraries import MappedCode
from gpubpf.linux.returns import Code
from gpubpf.process import address_space, limits
from gpubpf.process.address_space import Library

_PAGE = 0xFFF


def implementations(
    pid: int, mapped: MappedCode, code: Code, name: str, resolver: int
) -> tuple[int, ...] | str:
    """Return the addresses of the implementations that a process uses, or may use; or a text: where else the implementation is.

    All addresses are those in the library's file.

    mapped: the library's code in the process.
    code: the library's code in the file.
    name: name of the function.
    resolver: address of its resolver.

    Raises OSError.
    """
    mappings = address_space.mappings(pid)
    found = address_space.libraries(mappings)
    target = next((one for one in found if one.mappings[0].file == (mapped.device, mapped.inode)), None)
    if target is None:
        return "memory"
    words = _words(pid, found, target, name, resolver)
    distance = _distance(pid, target)
    used = {word - distance for word in words} & code.functions
    if not used and any(m.path == "[vdso]" and m.start <= word < m.end for word in words for m in mappings):
        return "the kernel's vDSO"
    return tuple(sorted(used or code.loaded_functions(resolver)))


def _words(pid: int, libraries: Sequence[Library], target: Library, name: str, resolver: int) -> set[int]:
    """Return the values of the words through which all libraries of a process call a function of the library `target`."""
    found: set[int] = set()
    until = time.thread_time() + limits.CODE
    with address_space.Memory(pid) as memory:
        for library in libraries:
            if time.thread_time() > until:  # the process has mapped more than any program does
                break
            with address_space.library_file(pid, library) as (_, source, _):
                if not isinstance(source, elf.LoadedFile):
                    continue
                distance = library.base - _lowest(source)
                with contextlib.suppress(OSError, ImageError):
                    for place, one in elf.of_file(source.descriptor).imports().items():
                        if one.name == name or (library is target and one.resolver == resolver):
                            found.add(int.from_bytes(memory.some(distance + place, 8), "little"))
    return found


def _distance(pid: int, library: Library) -> int:
    """Return the distance from the addresses in a library's file to those in the process."""
    with address_space.library_file(pid, library) as (_, source, base):
        return library.base - (_lowest(source) if isinstance(source, elf.LoadedFile) else base)


def _lowest(file: elf.LoadedFile) -> int:
    return min((s.address for s in file.segments), default=0) & ~_PAGE

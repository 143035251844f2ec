"""CUDA device code wherever it lies: in ELF executables and libraries, fatbins, cubins and PTX text.

A *fatbin* is one module in several forms: for each architecture a cubin (an ELF file of its own) or PTX.
nvcc puts one fatbin per translation unit, one after the other, into the section ``.nv_fatbin``; what is
still to be linked by nvlink (``-rdc=true``) into ``__nv_relfatbin``. There is no public document of the
format: what is here was seen in what nvcc 11.8, 12.9 and 13.0 wrote, and agrees with cuobjdump.

Everything read here is untrusted: sizes are checked before they are used, and every failure is an
`ImageError`.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from gpubpf.errors import ImageError

WRAPPER_MAGIC = 0x466243B1
FATBIN_MAGIC = 0xBA55ED50
LARGEST_IMAGE = 1 << 30  # bytes, uncompressed
EM_CUDA = 190

_WRAPPER_SIZE = 24
_FATBIN = struct.Struct("<IHHQ")  # magic, version, header size, size of the images
# kind, version, header size, payload size, compressed size, offset of the options' place, minor, major, sm,
# name offset, name size, flags, reserved, uncompressed size
_IMAGE = struct.Struct("<HHIQIIHHIIIQQQ")
_KINDS = {1: "ptx", 2: "elf"}
_CODECS = {0x2000: "lz4", 0x8000: "zstd"}
_SUFFIXES = {0x100000: "a", 0x200000: "f"}
_PTX_VERSION = re.compile(rb"^\s*\.version\s+(\d{1,3})\.(\d{1,3})", re.MULTILINE)
_PTX_TARGET = re.compile(rb"^\s*\.target\s+sm_(\d{1,4})([af]?)", re.MULTILINE)


@dataclass(frozen=True)
class Image:
    """One form of one module.

    `payload` is decompressed when it is first asked for, and raises ImageError if it can't be.
    """

    kind: str  # "ptx" or "elf"
    sm: int  # 75 for sm_75 and compute_75
    suffix: str  # "", or "a" (this architecture only), or "f" (this family only)
    version: tuple[int, int]  # PTX ISA version of PTX, ABI of a cubin
    options: str  # what ptxas is to be told with this PTX, such as "-maxrregcount=32"; "" for cubins
    flags: int
    name: str  # the source file, with -g; mostly ""
    module: int  # images with the same number are forms of one module
    relocatable: bool  # meant for nvlink: not a whole module
    stored: bytes = field(repr=False)
    codec: str = ""  # of `stored`: "", "lz4" or "zstd"
    size: int = 0  # uncompressed, when there is a codec

    @property
    def arch(self) -> str:
        return f"sm_{self.sm}{self.suffix}"

    @property
    def capability(self) -> str:
        """The compute capability as users write it: "7.5", "9.0a"."""
        return f"{self.sm // 10}.{self.sm % 10}{self.suffix}"

    @cached_property
    def payload(self) -> bytes:
        data = _decompress(self.stored, self.codec, self.size)
        return data.rstrip(b"\0") if self.kind == "ptx" else data

    @property
    def text(self) -> str:
        """PTX as text.

        Bytes that are not UTF-8 (file names in comments) survive a round trip by "surrogateescape".
        """
        return self.payload.decode("utf-8", "surrogateescape")

    def runs_on(self, cc: tuple[int, int]) -> bool:
        """Whether a driver can compile this PTX for, or load this cubin on, a device of this capability."""
        major, minor = divmod(self.sm, 10)
        if self.suffix == "a":
            return (major, minor) == cc
        if self.suffix == "f" or self.kind == "elf":
            return major == cc[0] and minor <= cc[1]
        return (major, minor) <= cc


def choose(images: Sequence[Image], cc: tuple[int, int]) -> Image | str:
    """The PTX of one module that suits a device of compute capability `cc` best, or why there is none."""
    ptx = [image for image in images if image.kind == "ptx"]
    whole = [image for image in ptx if not image.relocatable]
    suitable = [image for image in whole if image.runs_on(cc)]
    if suitable:
        return max(suitable, key=lambda image: (image.sm, image.suffix != ""))
    if whole:
        nearest = min(whole, key=lambda image: image.sm)
        newer = divmod(nearest.sm, 10) > cc
        return f"PTX for {'a newer' if newer else 'another'} GPU ({nearest.arch})"
    return "PTX for a device link" if ptx else "SASS only"


def modules(images: Sequence[Image]) -> tuple[tuple[Image, ...], ...]:
    """The images of each module, in the order of the file."""
    groups: dict[int, list[Image]] = {}
    for image in images:
        groups.setdefault(image.module, []).append(image)
    return tuple(tuple(group) for group in groups.values())


def images_of_file(path: str | os.PathLike[str]) -> tuple[Image, ...]:
    """The images in a file: an ELF executable, library or object, a fatbin, a cubin, PTX.

    Raises ImageError for a file that cannot be read or is none of these. An ELF file without device code
    has no images.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ImageError(
                    f"{os.fspath(path)} is not a file; name a program, a library, a fatbin, a cubin or PTX"
                )
            return _images(_Descriptor(file.fileno(), status.st_size))
    except OSError as error:
        raise ImageError(f"cannot read {os.fspath(path)}: {error.strerror}; check its name") from None
    except ImageError as error:
        if os.fspath(path) in str(error):
            raise
        raise ImageError(f"{os.fspath(path)}: {error}") from None


def images_of_bytes(data: bytes) -> tuple[Image, ...]:
    """The images in bytes, as a program gave them to the driver (`cuModuleLoadData`, `cuLibraryLoadData`)."""
    return _images(_Memory(data))


# --- where bytes come from ----------------------------------------------------------------------------------


class _Source(Protocol):
    @property
    def size(self) -> int: ...

    def read(self, offset: int, size: int) -> bytes:
        """Exactly these bytes. Raises ImageError where they are not all there."""


@dataclass(frozen=True)
class _Memory:
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, size: int) -> bytes:
        _check(offset, size, len(self.data))
        return self.data[offset : offset + size]


@dataclass(frozen=True)
class _Descriptor:
    """A file, read in pieces.

    PyTorch's libraries have gigabytes. Not mapped: a file cut short would kill the reader.
    """

    descriptor: int
    size: int

    def read(self, offset: int, size: int) -> bytes:
        _check(offset, size, self.size)
        pieces = []
        while size:
            piece = os.pread(self.descriptor, min(size, 1 << 26), offset)
            if not piece:
                raise ImageError("the file ended early; was it being written?")
            pieces.append(piece)
            offset, size = offset + len(piece), size - len(piece)
        return b"".join(pieces)


def _check(offset: int, size: int, total: int) -> None:
    if offset < 0 or size < 0 or offset + size > total:
        raise ImageError(f"it is cut short: {size} bytes at {offset} of {total}; build it again")


# --- which format -------------------------------------------------------------------------------------------


def _images(source: _Source) -> tuple[Image, ...]:
    start = source.read(0, min(64, source.size))
    if start.startswith(b"\x7fELF"):
        elf = Elf(source)
        if elf.machine == EM_CUDA:
            return (_cubin(elf, source.read(0, source.size)),)
        return tuple(_images_of_elf(elf))
    if source.size > LARGEST_IMAGE:
        raise ImageError("it is too large for a fatbin or PTX; name a program or a library")
    data = source.read(0, source.size)
    if len(start) >= 4 and int.from_bytes(start[:4], "little") in (WRAPPER_MAGIC, FATBIN_MAGIC):
        offset = _WRAPPER_SIZE if int.from_bytes(start[:4], "little") == WRAPPER_MAGIC else 0
        return tuple(_fatbins(data, offset, 0, False))
    if (image := ptx_image(data)) is not None:
        return (image,)
    raise ImageError("there is no CUDA code in it; name a program, a library, a fatbin, a cubin or PTX")


def ptx_image(data: bytes, options: str = "", module: int = 0) -> Image | None:
    """PTX text as an image; None where it is not PTX, which says `.version` and `.target` (PTX ISA 11.1)."""
    data = data.rstrip(b"\0")
    version, target = _PTX_VERSION.search(data), _PTX_TARGET.search(data)
    if version is None or target is None or b"\0" in data:
        return None
    numbers = int(version[1]), int(version[2])
    return Image("ptx", int(target[1]), target[2].decode(), numbers, options, 0, "", module, False, data)


def _cubin(elf: Elf, data: bytes) -> Image:
    # The ABI version says where e_flags has the architecture. The suffix "a" is in no cubin, only in fatbins.
    sm = elf.flags >> 8 & 0xFF if elf.abi_version >= 8 else elf.flags & 0xFF
    relocatable = elf.type == 1
    return Image("elf", sm, "", (1, elf.abi_version), "", 0, "", 0, relocatable, data)


def _images_of_elf(elf: Elf) -> Iterator[Image]:
    module = 0
    if elf.sections:
        for name, relocatable in ((".nv_fatbin", False), ("__nv_relfatbin", True)):
            for section in elf.sections:
                if section.name == name and section.in_file:
                    for image in _fatbins(elf.contents(section), 0, module, relocatable):
                        module = image.module + 1
                        yield image
        return
    # Without section headers (sstrip): in what the loader maps. Something else may look like a fatbin's
    # beginning.
    for offset, size in elf.segments:
        data = elf.source.read(offset, min(size, elf.source.size - offset))
        for position in _magics(data, -offset % 8):
            try:
                found = list(_fatbin(data, position, module, False)[0])
            except ImageError:
                continue
            module += 1
            yield from found


# --- fatbins ------------------------------------------------------------------------------------------------


def _magics(data: bytes, phase: int = 0) -> Iterator[int]:
    """Where fatbins may begin: their alignment is 8."""
    magic = FATBIN_MAGIC.to_bytes(4, "little")
    position = data.find(magic)
    while position >= 0:
        if position % 8 == phase:
            yield position
        position = data.find(magic, position + 4)


def _fatbins(data: bytes, offset: int, module: int, relocatable: bool) -> Iterator[Image]:
    """The images of fatbins that lie one after the other from `offset` on, with zeros in between."""
    while offset < len(data):
        if data[offset : offset + 4] != FATBIN_MAGIC.to_bytes(4, "little"):
            following = data.find(FATBIN_MAGIC.to_bytes(4, "little"), offset)
            if following < 0:
                if data[offset:].strip(b"\0"):
                    raise ImageError("there is something else between its fatbins; build it again")
                return
            if data[offset:following].strip(b"\0"):
                raise ImageError("there is something else between its fatbins; build it again")
            offset = following
        images, offset = _fatbin(data, offset, module, relocatable)
        yield from images
        module += 1


def _fatbin(data: bytes, offset: int, module: int, relocatable: bool) -> tuple[list[Image], int]:
    """The images of the fatbin at `offset`, and where it ends."""
    _check(offset, _FATBIN.size, len(data))
    magic, _, header_size, size = _FATBIN.unpack_from(data, offset)
    if magic != FATBIN_MAGIC or header_size < _FATBIN.size:
        raise ImageError("it is not a fatbin; build it again")
    position, end = offset + header_size, offset + header_size + size
    _check(offset, end - offset, len(data))
    images = []
    while position < end:
        image, position = _image(data, position, end, module, relocatable)
        if image is not None:
            images.append(image)
    return images, end


def _image(data: bytes, at: int, end: int, module: int, relocatable: bool) -> tuple[Image | None, int]:
    """The image whose header is at `at`, None if of another kind than PTX and ELF; and where the next begins."""
    _check(at, _IMAGE.size, end)
    (number, _, header_size, stored_size, compressed_size, options_at, minor, major, sm, name_at, name_size,
     flags, _, size) = _IMAGE.unpack_from(data, at)  # fmt: skip
    if header_size < _IMAGE.size:
        raise ImageError("a header in its fatbin is too small; build it again")
    payload, payload_size = at + header_size, stored_size
    _check(at, header_size + stored_size, end)
    if (kind := _KINDS.get(number)) is None:  # LTO's intermediate code: nothing that can be instrumented
        return None, payload + stored_size
    codec = next((codec for bit, codec in _CODECS.items() if flags & bit), "")
    if codec:
        if not 0 < compressed_size <= payload_size or size > LARGEST_IMAGE:
            raise ImageError("the sizes of a compressed image in its fatbin make no sense; build it again")
        payload_size = compressed_size
    suffix = next((suffix for bit, suffix in _SUFFIXES.items() if flags & bit), "")
    name = _text(data, at, header_size, name_at, name_size)
    options = ""
    if kind == "ptx" and options_at:  # there, relative to the image: the offset and the length of the options
        if options_at + 8 > header_size:
            raise ImageError("the options of an image lie outside its header; build it again")
        options = _text(data, at, header_size, *struct.unpack_from("<II", data, at + options_at))
    stored = data[payload : payload + payload_size]
    version = (major, minor)
    relocatable = relocatable or "--compile-only" in options.split()
    image = Image(
        kind,
        sm,
        suffix,
        version,
        options,
        flags,
        name,
        module,
        relocatable,
        stored,
        codec,
        size if codec else 0,
    )
    return image, payload + stored_size


def _text(data: bytes, at: int, header_size: int, offset: int, size: int) -> str:
    """A string in the header at `at`."""
    if not size:
        return ""
    _check(offset, size, header_size)
    return data[at + offset : at + offset + size].split(b"\0")[0].decode("utf-8", "replace").strip()


def _decompress(data: bytes, codec: str, size: int) -> bytes:
    """`data` decompressed, which must give exactly `size` bytes."""
    if not codec:
        return data
    result = _decompress_zstd(data, size) if codec == "zstd" else _decompress_lz4(data, size)
    if len(result) != size:
        raise ImageError(f"an image has {len(result)} bytes, not {size} as its header says; build it again")
    return result


def _decompress_lz4(data: bytes, size: int) -> bytes:
    if size > 255 * len(data) + 64:  # LZ4 cannot compress better: do not allocate what cannot come
        raise ImageError("the size of a compressed image makes no sense; build it again")
    import lz4.block  # only here: most programs have no LZ4

    try:
        return bytes(lz4.block.decompress(data, uncompressed_size=size))
    except (lz4.block.LZ4BlockError, ValueError, MemoryError, OverflowError):
        raise ImageError("a compressed image (LZ4) is damaged; build it again") from None


def _decompress_zstd(data: bytes, size: int) -> bytes:
    import zstandard

    pieces: list[bytes] = []
    missing = size + 1  # one more shows that there is too much
    try:
        # In pieces: what the frame says of its size and window is as untrusted as the rest.
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data) as reader:
            while missing and (piece := reader.read(min(missing, 1 << 20))):
                pieces.append(piece)
                missing -= len(piece)
    except (zstandard.ZstdError, ValueError, MemoryError):
        raise ImageError("a compressed image (zstd) is damaged; build it again") from None
    return b"".join(pieces)


# --- ELF ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    name: str
    type: int
    offset: int
    size: int
    link: int
    info: int

    @property
    def in_file(self) -> bool:
        return self.type not in (0, 8)  # SHT_NULL, SHT_NOBITS


class Elf:
    """A 64-bit little-endian ELF file.

    Its sections and loadable segments (System V ABI, chapters 4 and 5).
    """

    _SECTION = struct.Struct("<IIQQQQIIQQ")
    _SEGMENT = struct.Struct("<IIQQQQQQ")

    def __init__(self, source: _Source) -> None:
        self.source = source
        header = source.read(0, 64)
        if header[:6] != b"\x7fELF\x02\x01":
            raise ImageError("it is not a 64-bit ELF file of this byte order; CUDA has no others")
        self.abi_version = header[8]
        self.type, self.machine = struct.unpack_from("<HH", header, 16)
        self._program_headers, self._section_headers, self.flags = struct.unpack_from("<QQI", header, 32)
        (
            self._segment_size,
            self._segment_count,
            self._section_size,
            self._section_count,
            self._names_index,
        ) = struct.unpack_from("<5H", header, 54)

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """All sections; none where the section headers are missing."""
        if not self._section_headers or self._section_size != self._SECTION.size:
            return ()
        count, names_index = self._section_count, self._names_index
        if (
            count == 0 or names_index == 0xFFFF
        ):  # more than fit 16 bits: the first section header has the numbers
            first = self._SECTION.unpack(self.source.read(self._section_headers, self._SECTION.size))
            count, names_index = count or first[5], first[6] if names_index == 0xFFFF else names_index
        if count > self.source.size // self._SECTION.size:
            raise ImageError("it has more sections than it has room for; build it again")
        table = self.source.read(self._section_headers, count * self._SECTION.size)
        headers = list(self._SECTION.iter_unpack(table))
        if names_index >= len(headers):
            raise ImageError("the names of its sections are missing; build it again")
        names = self.source.read(headers[names_index][4], headers[names_index][5])
        return tuple(Section(_string(names, h[0]), h[1], h[4], h[5], h[6], h[7]) for h in headers)

    @cached_property
    def loads(self) -> tuple[tuple[int, int, int], ...]:
        """(offset in the file, address, size in the file) of each loadable segment."""
        if not self._program_headers or self._segment_size != self._SEGMENT.size:
            return ()
        table = self.source.read(self._program_headers, self._segment_count * self._SEGMENT.size)
        loadable = (h for h in self._SEGMENT.iter_unpack(table) if h[0] == 1)
        return tuple((h[2], h[3], h[5]) for h in loadable if h[2] < self.source.size)

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """(offset, size) in the file of each loadable segment."""
        return tuple((offset, size) for offset, _, size in self.loads)

    def contents(self, section: Section) -> bytes:
        return self.source.read(section.offset, section.size) if section.in_file else b""


def elf_of_bytes(data: bytes) -> Elf:
    """Raises ImageError for what is none."""
    return Elf(_Memory(data))


def elf_of_file(descriptor: int) -> Elf:
    """Of an open file, which stays the caller's. Raises ImageError for what is none."""
    return Elf(_Descriptor(descriptor, os.fstat(descriptor).st_size))


def _string(table: bytes, offset: int) -> str:
    """The zero-terminated string at `offset` of a string table; "" where there is none."""
    if offset >= len(table):
        return ""
    end = table.find(b"\0", offset)
    return table[offset : end if end >= 0 else len(table)].decode("utf-8", "replace")


# --- cubins -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CubinKernel:
    """What a cubin says of one of its kernels. Names of attributes as cuobjdump -elf prints them."""

    name: str  # mangled
    parameters: tuple[tuple[int, int], ...]  # (offset, size) in bytes, in order: EIATTR_KPARAM_INFO
    parameter_size: int  # EIATTR_PARAM_CBANK, EIATTR_CBANK_PARAM_SIZE
    registers: int | None = None  # EIATTR_REGCOUNT
    code_size: int = 0  # bytes of SASS


_EIATTR_FRAME_SIZE, _EIATTR_KPARAM_INFO, _EIATTR_CBANK_PARAM_SIZE = 0x11, 0x17, 0x19
_EIATTR_REGCOUNT, _EIATTR_KPARAM_INFO_V2 = 0x2F, 0x45
_STO_CUDA_ENTRY = 0x10


def kernels(cubin: bytes) -> dict[str, CubinKernel]:
    """The kernels of a cubin by mangled name, in the order of its symbol table. Raises ImageError."""
    elf = Elf(_Memory(cubin))
    if elf.machine != EM_CUDA:
        raise ImageError("it is not a cubin; name one")
    by_name = {section.name: section for section in elf.sections}
    if len(cubin) < sum(section.size for section in elf.sections if section.in_file) // 4:
        raise ImageError("its sections overlap; build it again")  # else each could be as large as the file
    registers: dict[int, int] = {}
    if (common := by_name.get(".nv.info")) is not None:
        for attribute, value in _attributes(elf.contents(common)):
            if attribute == _EIATTR_REGCOUNT and len(value) >= 8:
                symbol, count = struct.unpack_from("<II", value)
                registers[symbol] = count
    found: dict[str, CubinKernel] = {}
    for index, name, size in _entry_symbols(elf, by_name):
        info = by_name.get(f".nv.info.{name}")
        kernel = _kernel(name, elf.contents(info) if info is not None else b"")
        found[name] = replace(kernel, registers=registers.get(index), code_size=size)
    return found


def _entry_symbols(elf: Elf, by_name: dict[str, Section]) -> Iterator[tuple[int, str, int]]:
    """(index, name, size) of each kernel in the symbol table.

    Without one, of each section of code that has parameters.
    """
    symbols = next((section for section in elf.sections if section.type == 2), None)  # SHT_SYMTAB
    if symbols is None:
        for name, section in by_name.items():
            if name.startswith(".text.") and f".nv.constant0.{name[6:]}" in by_name:
                yield -1, name[6:], section.size
        return
    if symbols.link >= len(elf.sections):
        raise ImageError("the names of its symbols are missing; build it again")
    names = elf.contents(elf.sections[symbols.link])
    table = elf.contents(symbols)
    for index, (name, info, other, section_index, _, size) in enumerate(
        struct.iter_unpack("<IBBHQQ", table[: len(table) // 24 * 24])
    ):
        if info & 0xF == 2 and other & _STO_CUDA_ENTRY and section_index and (text := _string(names, name)):
            yield index, text, size


def _kernel(name: str, info: bytes) -> CubinKernel:
    parameters: dict[int, tuple[int, int]] = {}
    total = 0
    for attribute, value in _attributes(info):
        if attribute == _EIATTR_KPARAM_INFO and len(value) >= 12:
            _, ordinal, offset, packed = struct.unpack_from("<IHHI", value)
            parameters[ordinal] = (offset, packed >> 18)
        elif attribute == _EIATTR_KPARAM_INFO_V2 and len(value) >= 12:  # since parameters may be 32,764 bytes
            _, ordinal, offset, size = struct.unpack_from("<IHHI", value)
            parameters[ordinal] = (offset, size)
        elif attribute == _EIATTR_CBANK_PARAM_SIZE:
            total = int.from_bytes(value, "little")
    return CubinKernel(name, tuple(parameters[ordinal] for ordinal in sorted(parameters)), total)


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, value) of a .nv.info section.

    U8 format, u8 attribute, then a u16: the value, or with format 4 its size.
    """
    position = 0
    while position + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, position)
        position += 4
        if form != 4:
            yield attribute, info[position - 2 : position]
            continue
        if position + size > len(info):
            raise ImageError("the attributes of a kernel are cut short; build it again")
        yield attribute, info[position : position + size]
        position += size

"""Read CUDA device code from ELF executables and libraries, fatbins, cubins and PTX text.

A *fatbin* is one module in several forms: for each architecture, a cubin (a separate ELF file) or PTX. nvcc puts one fatbin per
translation unit, one after the other, into the section ``.nv_fatbin``. Code that nvlink must still link (``-rdc=true``) goes into
``__nv_relfatbin`` (device_link.py). No public document describes the format: it was inferred from files that nvcc 11.8, 12.9 and 13.0
wrote, and agrees with cuobjdump.

Everything read here is untrusted: sizes are checked before use, and every failure is an `ImageError`.
"""

from __future__ import annotations

import heapq
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from gpubpf import elf
from gpubpf.elf import ByteSource, Elf, HeldBytes, OpenFile, Section, check_range
from gpubpf.errors import Error, ImageError
from gpubpf.images import tile_ir
from gpubpf.record import Record, field, replace

WRAPPER_MAGIC = 0x466243B1
FATBIN_MAGIC = 0xBA55ED50
# In bytes. A few KB can decompress to a GB, so images have smaller limits than files.
LARGEST_FATBIN = 1 << 30
LARGEST_IMAGE = 256 << 20  # decompressed
LARGEST_PTX = 64 << 20
MOST_IMAGES = 1 << 18  # per file
COMPILE_ONLY = "--compile-only"  # ptxas's option for code that nvlink must still link
SASS_ONLY, LINKED = "SASS only", "linked from several images"  # why there is no PTX
LARGEST_GAP = 1 << 20  # bytes between fatbins

# The sections where nvcc puts fatbins, and whether these are inputs of nvlink.
_FATBIN_SECTIONS = {".nv_fatbin": False, "__nv_relfatbin": True}
_LOADED = elf.SHF_ALLOC | elf.SHF_EXECINSTR
_WRAPPER_SIZE = 24
_CHUNK = 1 << 20  # bytes to search at a time
_HEADER_LIMIT = 1 << 20
_TEXT_LIMIT = 64 << 20
_COMMENTS = rb"(?m)(?:^|(?<=\0))(?:[ \t]*(?://[^\n\0]*)?\r?\n)*\Z"
# The start of a fatbin and of PTX. Two expressions, each with a literal prefix, are six times as fast as a combined one.
_LITERALS = (b"\x50\xed\x55\xba", b".version")
_BEGINNINGS = (re.compile(re.escape(_LITERALS[0])), re.compile(re.escape(_LITERALS[1]) + rb"[ \t]+\d"))
LONGEST_BEGINNING = max(map(len, _LITERALS))  # bytes
_FATBIN = struct.Struct("<IHHQ")  # magic, version, header size, size of the images
# kind, version, header size, payload size, compressed size, offset of the options' location, minor, major, sm,
# name offset, name size, flags, reserved, uncompressed size
_IMAGE = struct.Struct("<HHIQIIHHIIIQQQ")
_KINDS = {1: "ptx", 2: "elf", 8: "lto", 0x80: "tile"}
_LINKED_WRAPPER = 2  # wrapper version if the first fatbin was linked from the others
_CODECS = {0x2000: "lz4", 0x8000: "zstd"}
_SUFFIXES = {0x100000: "a", 0x200000: "f"}
_PTXAS_NAME = r"ptxas (\d{1,3}\.\d{1,3})"
# No \s before the directive: it would match line feeds, which makes the search slow in many empty lines.
_PTX_VERSION = rb"(?m)^[ \t\r\f\v]*\.version\s+(\d{1,3})\.(\d{1,3})"
_PTX_TARGET = rb"(?m)^[ \t\r\f\v]*\.target\s+sm_(\d{1,4})([af]?)"


class FileRange(Record):
    """Bytes of a source that have not been read yet."""

    source: ByteSource
    offset: int
    size: int

    def read(self) -> bytes:
        return self.source.read(self.offset, self.size)


class FatbinImage(Record):
    """One form of one module.

    `payload` is read and decompressed at first use, and raises ImageError if that fails.
    """

    kind: str  # "ptx", "elf", "lto" (code for link-time optimisation) or "tile" (Tile IR); the last two cannot be instrumented
    sm: int  # 75 for sm_75 and compute_75
    suffix: str  # "", "a" (this architecture only) or "f" (this family only)
    version: tuple[int, int]  # a PTX's ISA version, or a cubin's ABI version
    options: str  # ptxas options for this PTX, such as "-maxrregcount=32"; "" for cubins
    flags: int
    name: str  # the source file, with -g; "ptxas 12.8" for PTX found with its cubin; usually ""
    module: int  # images with the same number are forms of one module
    relocatable: bool  # an input of nvlink, not a complete module
    stored: bytes | FileRange = field(repr=False)
    codec: str = ""  # compression of `stored`: "", "lz4" or "zstd"
    size: int = 0  # uncompressed size, if there is a codec
    part: int = 0  # a module's relocatable images with the same number are forms of one translation unit
    partial: bool = False  # relocatable: other parts may have been linked to the module

    @property
    def arch(self) -> str:
        return f"sm_{self.sm}{self.suffix}"

    @property
    def release(self) -> str:
        """The CUDA release of the ptxas that made the cubin of this PTX, such as "12.8"; "" if unknown."""
        found = re.fullmatch(_PTXAS_NAME, self.name)
        return found[1] if found is not None else ""

    @property
    def full_size(self) -> int:
        """The size of the payload in bytes: what the image claims, or less."""
        return self.size or (self.stored.size if isinstance(self.stored, FileRange) else len(self.stored))

    @cached_property
    def payload(self) -> bytes:
        return self.read()

    def read(self) -> bytes:
        """Return the payload without keeping it, for processing gigabytes. Raises ImageError."""
        if self.kind == "ptx" and self.full_size > LARGEST_PTX:
            raise ImageError("its PTX is larger than 64 MiB; split it into modules")
        stored = self.stored.read() if isinstance(self.stored, FileRange) else self.stored
        data = _decompress(stored, self.codec, self.size)
        return data.rstrip(b"\0") if self.kind == "ptx" else data

    @property
    def text(self) -> str:
        """The PTX as text. Raises ImageError.

        Bytes that are not UTF-8, such as file names in comments, survive a round trip with "surrogateescape".
        """
        return self.payload.decode("utf-8", "surrogateescape")

    def runs_on(self, cc: tuple[int, int]) -> bool:
        """Return whether a driver can compile this PTX for, or load this cubin on, a device of compute capability `cc`."""
        major, minor = divmod(self.sm, 10)
        if self.suffix == "a":
            return (major, minor) == cc
        if self.suffix == "f" or self.kind == "elf":
            return major == cc[0] and minor <= cc[1]
        return (major, minor) <= cc


def choose(images: Sequence[FatbinImage], cc: tuple[int, int], newer: bool = False) -> FatbinImage | str:
    """Return the PTX of one module that best suits a device of compute capability `cc`, or the reason why there is none.

    If no PTX is suitable, but a cubin for the device contains the PTX it was made from, return that PTX.
    newer: whether the device also runs PTX for newer devices; then the PTX for the oldest of these is chosen
    """
    ptx = [image for image in images if image.kind == "ptx"]
    whole = [image for image in ptx if not image.relocatable]
    suitable = [image for image in whole if image.runs_on(cc)]
    if suitable:
        return max(suitable, key=lambda image: (image.sm, image.suffix != ""))
    if whole and newer:
        return min(whole, key=lambda image: image.sm)
    if (cubin := cubin_for(images, cc)) is not None:
        # Its PTX is for blocks with threads, but the program launches it without threads.
        if _is_tile(cubin):
            return tile_ir.REASON
        if (kept := ptx_of_cubin(cubin)) is not None:
            return kept
    if whole:
        nearest = min(whole, key=lambda image: image.sm)
        newer = divmod(nearest.sm, 10) > cc
        return f"PTX for {'a newer' if newer else 'another'} GPU ({nearest.arch})"
    if not ptx and any(image.kind == "tile" for image in images):
        return tile_ir.REASON
    return "PTX for a device link" if ptx else SASS_ONLY


def _is_tile(cubin: FatbinImage) -> bool:
    """Return whether a cubin was made from Tile IR."""
    try:
        return tile_ir.IN_CUBINS in cubin.read()
    except ImageError:
        return False


def cubin_for(images: Iterable[FatbinImage], cc: tuple[int, int]) -> FatbinImage | None:
    """Return the cubin of one module that a driver chooses for a device of compute capability `cc`; None if it has none."""
    cubins = (i for i in images if i.kind == "elf" and not i.relocatable and i.runs_on(cc))
    return max(cubins, key=lambda image: (image.sm, image.suffix != ""), default=None)


def modules(images: Sequence[FatbinImage]) -> tuple[tuple[FatbinImage, ...], ...]:
    """Group images by module, in file order."""
    groups: dict[int, list[FatbinImage]] = {}
    for image in images:
        groups.setdefault(image.module, []).append(image)
    return tuple(tuple(group) for group in groups.values())


def renumbered(image: FatbinImage, first: int) -> FatbinImage:
    """Return the image with `first` added to its module number."""
    return replace(image, module=first + image.module)


def images_of_file(path: str | os.PathLike[str]) -> tuple[FatbinImage, ...]:
    """Return the images in a file: an ELF executable, library or object, a fatbin, a cubin, or PTX.

    Raises ImageError for a file that cannot be read or has another format. An ELF file without device code has no images.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ImageError(
                    f"{os.fspath(path)} is not a file; name a program, a library, a fatbin, a cubin or PTX"
                )
            return _held(_images(OpenFile(file.fileno(), status.st_size)))
    except OSError as error:
        raise ImageError(f"cannot read {os.fspath(path)}: {error.strerror}; check its name") from None
    except _NoImage:
        raise no_code(path) from None
    except ImageError as error:
        if os.fspath(path) in str(error):
            raise
        raise ImageError(f"{os.fspath(path)}: {error}") from None


def no_code(file: str | os.PathLike[str]) -> ImageError:
    """Return the error for a file without code for GPUs."""
    return ImageError(
        f"no code for GPUs in {os.fspath(file)}; name a program, library, code object, fatbin, cubin or PTX file"
    )


def images_of_bytes(data: bytes) -> tuple[FatbinImage, ...]:
    """Return the images in bytes that a program passed to the driver (`cuModuleLoadData`, `cuLibraryLoadData`). Raises ImageError."""
    return _held(_images(HeldBytes(data)))


def _held(images: Iterable[FatbinImage]) -> tuple[FatbinImage, ...]:
    """Read the bytes of images, so that they remain available after the source is closed."""
    return tuple(
        replace(i, stored=i.stored.read() if isinstance(i.stored, FileRange) else i.stored) for i in images
    )


# --- detecting the format -------------------------------------------------------------------------------------------


def images_of(source: ByteSource) -> tuple[FatbinImage, ...]:
    """Return the images in `source` without reading their bytes. Raises ImageError."""
    return _images(source)


def scan(source: ByteSource, start: int, end: int, texts: bool = True) -> Iterator[FatbinImage]:
    """Yield the images of everything between two offsets that looks like a fatbin (aligned to 8 bytes) or, with `texts`, PTX text."""
    behind = at = start
    module = 0
    beginnings = _BEGINNINGS if texts else _BEGINNINGS[:1]
    while at < end:
        data = source.read(at, min(end - at, _CHUNK + 16))
        for match in heapq.merge(*(b.finditer(data) for b in beginnings), key=re.Match.start):
            position, text = at + match.start(), match[0].startswith(b".")
            if match.start() >= _CHUNK or position < behind or (position % 8 and not text):
                continue  # it will be found in the next chunk, or is inside the previous image
            try:
                if text:
                    found, behind = _text_at(source, position, end, module)
                else:
                    found, behind = _fatbin(source, position, end, module, False)
            except ImageError:
                continue
            yield from found
            module += 1
        at += _CHUNK


def may_begin_in(data: bytes) -> bool:
    """Return whether a fatbin or PTX text may begin in these bytes. `scan`, which takes six times as long, knows."""
    return any(literal in data for literal in _LITERALS)


def _text_at(source: ByteSource, at: int, limit: int, module: int) -> tuple[list[FatbinImage], int]:
    """Return PTX text up to a zero byte, with the comments before `.version`, and the offset of its end. Raises ImageError."""
    if re.search(_PTX_TARGET, source.read(at, min(256, limit - at))) is None:
        raise ImageError("it is not PTX; build it again")
    data, end = b"", at
    while b"\0" not in data[-_CHUNK:] and end < limit and len(data) < _TEXT_LIMIT:
        data += source.read(end, min(_CHUNK, limit - end))
        end = at + len(data)
    data = data.partition(b"\0")[0]
    before = min(at, 4096)
    comments = re.search(_COMMENTS, source.read(at - before, before))
    image = ptx_image((comments[0] if comments else b"") + data, module=module)
    return [image] if image is not None else [], at + len(data)


def pack(image: FatbinImage) -> bytes:
    """Return a fatbin that contains only this PTX, its name and its options."""
    text, name, options = image.payload, image.name.encode(), image.options.encode()
    words = (struct.pack("<II", _IMAGE.size + 8, len(options)) + options if options else b"") + name
    header = _IMAGE.size + len(words) + -len(words) % 8
    flags = image.flags & ~sum(_CODECS) | sum(
        bit for bit, suffix in _SUFFIXES.items() if suffix == image.suffix
    )
    options_at = _IMAGE.size if options else 0
    name_at = _IMAGE.size + len(words) - len(name) if name else 0
    body = _IMAGE.pack(
        1, 0x101, header, len(text), 0, options_at, image.version[1], image.version[0], image.sm, name_at,
        len(name), flags, 0, 0,
    )  # fmt: skip
    body = (body + words).ljust(header, b"\0") + text
    return _FATBIN.pack(FATBIN_MAGIC, 1, _FATBIN.size, len(body)) + body


class _NoImage(ImageError):
    """The bytes are in no format that can contain CUDA code."""


def _images(source: ByteSource) -> tuple[FatbinImage, ...]:
    start = source.read(0, min(64, source.size))
    if start.startswith(b"\x7fELF"):
        file = Elf(source)
        if file.machine == elf.EM_CUDA:
            return (_cubin(file, source.read(0, source.size)),)
        return tuple(_images_of_elf(file))
    if source.size > LARGEST_FATBIN:
        raise ImageError("it is too large for a fatbin or PTX; name a program or a library")
    magic, version = (int.from_bytes(start[at : at + 4], "little") for at in (0, 4))
    if magic == WRAPPER_MAGIC and version == _LINKED_WRAPPER:  # as the agent sends it
        first, end = _fatbin(source, _WRAPPER_SIZE, source.size, 0, False)
        return (*first, *_fatbins(source, end, source.size, 1, True))
    if magic in (WRAPPER_MAGIC, FATBIN_MAGIC):
        offset = _WRAPPER_SIZE if magic == WRAPPER_MAGIC else 0
        return tuple(_fatbins(source, offset, source.size, 0, False))
    if source.size > LARGEST_PTX:
        raise ImageError("it is too large for PTX; name a program, library, fatbin or cubin")
    data = source.read(0, source.size)
    if data.startswith(tile_ir.MAGIC) and len(data) > len(tile_ir.MAGIC) + 1:
        return (FatbinImage("tile", 0, "", (data[8], data[9]), "", 0, "", 0, False, data),)
    if (image := ptx_image(data)) is not None:
        return (image,)
    raise _NoImage("there is no CUDA code in it; name a program, library, fatbin, cubin or PTX file")


def ptx_image(data: bytes, made_by: PtxasRun | None = None, module: int = 0) -> FatbinImage | None:
    """Return PTX text as an image; None if the data is not PTX. PTX must have `.version` and `.target` (PTX ISA 11.1).

    made_by: how ptxas made a cubin from this PTX, if known
    """
    data = data.rstrip(b"\0")
    version, target = re.search(_PTX_VERSION, data), re.search(_PTX_TARGET, data)
    if version is None or target is None or b"\0" in data:
        return None
    numbers = int(version[1]), int(version[2])
    release, options = made_by or PtxasRun()
    name = f"ptxas {release}" if release else ""
    sm, suffix = int(target[1]), target[2].decode()
    return FatbinImage("ptx", sm, suffix, numbers, options, 0, name, module, False, data)


def _cubin(cubin: Elf, data: bytes) -> FatbinImage:
    # The location of the architecture in e_flags depends on the ABI version. Only fatbins have the suffix "a"; cubins do not.
    sm = cubin.flags >> 8 & 0xFF if cubin.abi_version >= 8 else cubin.flags & 0xFF
    relocatable = cubin.type == elf.ET_REL
    return FatbinImage("elf", sm, "", (1, cubin.abi_version), "", 0, "", 0, relocatable, data)


def _images_of_elf(file: Elf) -> Iterator[FatbinImage]:
    module = 0
    if file.sections:
        _check_overlap(file.sections, file.source.size)
        for section in sorted(file.sections, key=lambda section: section.name not in _FATBIN_SECTIONS):
            if not section.in_file:
                continue
            end = section.offset + section.size
            if section.name in _FATBIN_SECTIONS:
                check_range(section.offset, section.size, file.source.size)
                found = _fatbins(file.source, section.offset, end, module, _FATBIN_SECTIONS[section.name])
            elif section.type == elf.SHT_PROGBITS and section.flags & _LOADED == elf.SHF_ALLOC:
                # NVIDIA's libraries also keep fatbins in .data or .ldata, programs in arrays.
                end = min(end, file.source.size)
                found = (renumbered(i, module) for i in scan(file.source, section.offset, end, texts=False))
            else:
                continue
            last = module - 1
            for image in found:
                last = image.module
                yield image
            module = last + 1
        return
    # Without section headers (sstrip), search the loaded segments. Other data there may look like the start of a fatbin.
    for segment in file.loads:
        end = min(segment.offset + segment.size, file.source.size)
        for image in scan(file.source, segment.offset, end):
            yield renumbered(image, module)
        module += MOST_IMAGES


# --- fatbins ------------------------------------------------------------------------------------------------


def _fatbins(
    source: ByteSource, offset: int, end: int, module: int, relocatable: bool
) -> Iterator[FatbinImage]:
    """Yield the images of consecutive fatbins from `offset` on. Only zeros may be between them. Raises ImageError."""
    count = 0
    while (offset := _following(source, offset, end)) < end:
        images, offset = _fatbin(source, offset, end, module, relocatable)
        yield from images
        module += 1
        count += len(images)
        if count > MOST_IMAGES:
            raise ImageError("it has more images than any program; build it again")


def _following(source: ByteSource, offset: int, end: int) -> int:
    """Return the offset of the next fatbin, or `end`. Raises ImageError if anything but zeros precedes it."""
    for at in range(offset, min(end, offset + LARGEST_GAP), 4096):
        data = source.read(at, min(4096, end - at))
        if rest := data.lstrip(b"\0"):
            found = at + len(data) - len(rest)
            begin = found - (found - offset) % 4  # the magic number's first byte is not zero
            if source.read(begin, min(4, end - begin)) != FATBIN_MAGIC.to_bytes(4, "little"):
                raise ImageError("there is other data between its fatbins; build it again")
            return begin
    return end


def _fatbin(
    source: ByteSource, offset: int, limit: int, module: int, relocatable: bool
) -> tuple[list[FatbinImage], int]:
    """Return the images of the fatbin at `offset`, and the offset of its end, at most `limit`. Raises ImageError."""
    check_range(offset, _FATBIN.size, limit)
    magic, _, header_size, size = _FATBIN.unpack(source.read(offset, _FATBIN.size))
    if magic != FATBIN_MAGIC or header_size < _FATBIN.size:
        raise ImageError("it is not a fatbin; build it again")
    position, end = offset + header_size, offset + header_size + size
    check_range(offset, end - offset, limit)
    images: list[FatbinImage] = []
    while position < end:
        image, position = _image(source, position, end, module, relocatable)
        if image is not None:
            images.append(image)
        if len(images) > MOST_IMAGES:
            raise ImageError("it has more images than any program; build it again")
    if any(image.relocatable for image in images):  # only its PTX indicates that
        images = [replace(image, relocatable=True) for image in images]
    return images, end


def _image(
    source: ByteSource, at: int, end: int, module: int, relocatable: bool
) -> tuple[FatbinImage | None, int]:
    """Return the image whose header is at `at` (None if its kind is unknown), and the offset of the next one. Raises ImageError."""
    check_range(at, _IMAGE.size, end)
    (number, _, header_size, stored_size, compressed_size, options_at, minor, major, sm, name_at, name_size,
     flags, _, size) = _IMAGE.unpack(source.read(at, _IMAGE.size))  # fmt: skip
    if header_size < _IMAGE.size:
        raise ImageError("a header in its fatbin is too small; build it again")
    payload, payload_size = at + header_size, stored_size
    check_range(at, header_size + stored_size, end)
    if (kind := _KINDS.get(number)) is None:
        return None, payload + stored_size
    codec = next((codec for bit, codec in _CODECS.items() if flags & bit), "")
    if codec:
        if not 0 < compressed_size <= payload_size:
            raise ImageError("a compressed image in its fatbin has impossible sizes; build it again")
        if size > LARGEST_IMAGE:
            raise ImageError("a compressed image in its fatbin is larger than 256 MiB; store it uncompressed")
        payload_size = compressed_size
    if payload_size > LARGEST_FATBIN:
        raise ImageError("an image in its fatbin is larger than 1 GiB; build it again")
    suffix = next((suffix for bit, suffix in _SUFFIXES.items() if flags & bit), "")
    header = source.read(at, min(header_size, _HEADER_LIMIT)) if name_size or options_at else b""
    name = _text(header, name_at, name_size)
    options = ""
    if kind == "ptx" and options_at:  # the location of the options' offset and length, relative to the image
        if options_at + 8 > len(header):
            raise ImageError("the options of an image lie outside its header; build it again")
        options = _text(header, *struct.unpack_from("<II", header, options_at))
    image = FatbinImage(
        kind,
        sm,
        suffix,
        (major, minor),
        options,
        flags,
        name,
        module,
        relocatable or COMPILE_ONLY in options.split(),
        FileRange(source, payload, payload_size),
        codec,
        size if codec else 0,
    )
    return image, payload + stored_size


def _text(header: bytes, offset: int, size: int) -> str:
    """Return a string in an image's header. Raises ImageError."""
    if not size:
        return ""
    check_range(offset, size, len(header))
    return header[offset : offset + size].split(b"\0")[0].decode("utf-8", "replace").strip()


def _decompress(data: bytes, codec: str, size: int) -> bytes:
    """Decompress `data`. Raises ImageError unless the result has exactly `size` bytes."""
    if not codec:
        return data
    result = decompress_zstd(data, size) if codec == "zstd" else _decompress_lz4(data, size)
    if len(result) != size:
        raise ImageError(f"an image has {len(result)} bytes, but its header declares {size}; build it again")
    return result


def _decompress_lz4(data: bytes, size: int) -> bytes:
    if size > 255 * len(data) + 64:  # LZ4 cannot compress better, so allocate no more
        raise ImageError("a compressed image has an impossible size; build it again")
    import lz4.block  # imported here because most programs have no LZ4

    try:
        return bytes(lz4.block.decompress(data, uncompressed_size=size))
    except (lz4.block.LZ4BlockError, ValueError, MemoryError, OverflowError):
        raise ImageError("a compressed image (LZ4) is damaged; build it again") from None


def decompress_zstd(data: bytes, size: int) -> bytes:
    import zstandard

    pieces: list[bytes] = []
    missing = size + 1  # one more byte, to detect excess data
    try:
        # In pieces, because the sizes in the frame header are also untrusted.
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data) as reader:
            while missing and (piece := reader.read(min(missing, 1 << 20))):
                pieces.append(piece)
                missing -= len(piece)
    except (zstandard.ZstdError, ValueError, MemoryError):
        raise ImageError("a compressed image (zstd) is damaged; build it again") from None
    return b"".join(pieces)


# --- cubins -------------------------------------------------------------------------------------------------


class CubinKernel(Record):
    """A cubin's data about one of its kernels. Attributes have the names that cuobjdump -elf prints."""

    name: str  # mangled
    parameters: tuple[tuple[int, int], ...]  # (offset, size) in bytes, in order: EIATTR_KPARAM_INFO
    parameter_size: int  # EIATTR_PARAM_CBANK, EIATTR_CBANK_PARAM_SIZE
    registers: int | None = None  # EIATTR_REGCOUNT
    code_size: int = 0  # bytes of SASS
    max_threads: int | None = None  # per block, if the program limits it: EIATTR_MAX_THREADS, EIATTR_REQNTID


_EIATTR_MAX_THREADS, _EIATTR_REQNTID = 0x05, 0x10
_EIATTR_KPARAM_INFO, _EIATTR_CBANK_PARAM_SIZE = 0x17, 0x19
_EIATTR_REGCOUNT, _EIATTR_KPARAM_INFO_V2 = 0x2F, 0x45
_STO_CUDA_ENTRY = 0x10


_DEBUG_PTX = r"\.nv_debug_ptx_txt(\.\d+)?"


def kernel_names(cubin: bytes) -> list[str]:
    """Return the mangled names of a cubin's kernels. Raises ImageError."""
    return list(dict.fromkeys(name for _, name, _ in _entry_symbols(*_cubin_sections(cubin))))


def _cubin_sections(cubin: bytes) -> tuple[Elf, dict[str, Section]]:
    """Return a cubin and its sections by name. Raises ImageError."""
    file = elf.of_bytes(cubin)
    if file.machine != elf.EM_CUDA:
        raise ImageError("it is not a cubin; name a cubin file")
    _check_overlap(file.sections, len(cubin))
    return file, {section.name: section for section in file.sections}


def _check_overlap(sections: Iterable[Section], size: int) -> None:
    """Raise ImageError if many sections of a file overlap, because each could be as large as the file."""
    if size < sum(section.size for section in sections if section.in_file) // 4:
        raise ImageError("its sections overlap; build it again")


def ptx_of_cubin(image: FatbinImage) -> FatbinImage | None:
    """Return the PTX that a cubin was made from; None if the cubin does not contain it or is damaged.

    With -lineinfo or -G, ptxas keeps the statements in a section, one per line. Several linked texts are returned as one. Cubins from
    Triton and from `nvcc -lineinfo` have this section. Cubins from nvJitLink and NVRTC have it if line information was requested.
    """
    try:
        file, _ = _cubin_sections(image.read())
        texts = [file.contents(s) for s in file.sections if re.fullmatch(_DEBUG_PTX, s.name)]
        made_by = ptxas_run(image.payload)
    except ImageError:
        return None
    if not texts or sum(map(len, texts)) > LARGEST_PTX or any(t.count(b".version ") != 1 for t in texts):
        return None
    texts = [text.replace(b"\0", b"\n") for text in texts]
    linked = COMPILE_ONLY in made_by.options.split()
    if len(texts) > 1 or linked:
        from gpubpf.ptx.link import Input, link  # imported here because few cubins are linked

        try:
            inputs = [Input(f"text {k}", text.decode()) for k, text in enumerate(texts)]
            # A part that was compiled without line information has no text.
            texts = [link(inputs, partial=True).encode()]
        except (Error, UnicodeDecodeError):
            return None
    return ptx_image(texts[0], made_by, image.module)


class PtxasRun(NamedTuple):
    """How ptxas made a cubin: its CUDA release, such as "12.8", and its options. "" means unknown."""

    release: str = ""
    options: str = ""


def ptxas_run(cubin: bytes) -> PtxasRun:
    """Return how ptxas made a cubin, according to the cubin. Raises ImageError.

    The data is in an ELF note (u32 size of the name, u32 size of the description, u32 type, name). Its description ends with four
    strings: the tool, its version, its build, its options.
    """
    file, _ = _cubin_sections(cubin)
    for section in file.sections:
        if section.name == ".note.nv.tkinfo":
            for words in file.contents(section).split(b"NVIDIA Corp\0")[1:]:
                strings = [s.decode("utf-8", "replace") for s in words[24:].split(b"\0") if s]
                if len(strings) >= 4 and strings[0].startswith("ptxas"):
                    release = re.search(r"release (\d{1,3}\.\d{1,3}),", strings[1])
                    options = strings[3].strip() if strings[3].lstrip().startswith("-") else ""
                    return PtxasRun(release[1] if release is not None else "", options)
    return PtxasRun()


def kernels(cubin: bytes) -> dict[str, CubinKernel]:
    """Return the kernels of a cubin by mangled name, in symbol table order. Raises ImageError."""
    file, by_name = _cubin_sections(cubin)
    registers: dict[int, int] = {}
    if (common := by_name.get(".nv.info")) is not None:
        for attribute, value in _attributes(file.contents(common)):
            if attribute == _EIATTR_REGCOUNT and len(value) >= 8:
                symbol, count = struct.unpack_from("<II", value)
                registers[symbol] = count
    found: dict[str, CubinKernel] = {}
    for index, name, size in _entry_symbols(file, by_name):
        if name in found:
            continue
        info = by_name.get(f".nv.info.{name}")
        kernel = _kernel(name, file.contents(info) if info is not None else b"")
        found[name] = replace(kernel, registers=registers.get(index), code_size=size)
    return found


def static_shared(cubin: bytes) -> dict[str, int]:
    """Return the bytes of static shared memory of each kernel in a cubin that uses it. Raises ImageError.

    On architectures where the system reserves shared memory, that part is included.
    """
    prefix = ".nv.shared."
    found = {
        s.name.removeprefix(prefix): s.size for s in elf.of_bytes(cubin).sections if s.name.startswith(prefix)
    }
    return {name: size for name, size in found.items() if not name.startswith("reserved.")}


def _entry_symbols(cubin: Elf, by_name: dict[str, Section]) -> Iterator[tuple[int, str, int]]:
    """Yield the index, name and size in bytes of each kernel in the symbol table.

    Without a symbol table, the kernels are the code sections with parameters, and the index is -1.
    """
    table = next((section for section in cubin.sections if section.type == elf.SHT_SYMTAB), None)
    if table is None:
        for name, section in by_name.items():
            if name.startswith(".text.") and f".nv.constant0.{name[6:]}" in by_name:
                yield -1, name[6:], section.size
        return
    names = cubin.name_table(table)
    for index, symbol in enumerate(cubin.symbols(table)):
        kernel = symbol.type == elf.STT_FUNC and symbol.other & _STO_CUDA_ENTRY and symbol.section
        if kernel and (name := names.at(symbol.name)):
            yield index, name, symbol.size


def _kernel(name: str, info: bytes) -> CubinKernel:
    parameters: dict[int, tuple[int, int]] = {}
    total, threads = 0, None
    for attribute, value in _attributes(info):
        if attribute == _EIATTR_KPARAM_INFO and len(value) >= 12:
            _, ordinal, offset, packed = struct.unpack_from("<IHHI", value)
            parameters[ordinal] = (offset, packed >> 18)
        elif (
            attribute == _EIATTR_KPARAM_INFO_V2 and len(value) >= 12
        ):  # the attribute of ptxas versions that allow 32,764 bytes of parameters
            _, ordinal, offset, size = struct.unpack_from("<IHHI", value)
            parameters[ordinal] = (offset, size)
        elif attribute == _EIATTR_CBANK_PARAM_SIZE:
            total = int.from_bytes(value, "little")
        elif attribute in (_EIATTR_MAX_THREADS, _EIATTR_REQNTID) and len(value) >= 12:
            x, y, z = struct.unpack_from("<III", value)
            threads = x * y * z
    layout = tuple(parameters[ordinal] for ordinal in sorted(parameters))
    return CubinKernel(name, layout, total, max_threads=threads)


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the attribute and value of each entry in a .nv.info section. Raises ImageError.

    An entry is a u8 format, a u8 attribute and a u16: the value or, for format 4, the size of the value that follows.
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

"""Find and link the PTX of code linked by nvlink (`nvcc -rdc=true`).

nvlink makes machine code only. The original PTX is kept next to it: each translation unit's fatbin is a *part* of the module. In a
file, the parts are in the section ``__nv_relfatbin``. In a process, a wrapper of version 2 points to them.

    for images in modules(images_of_file("app")):   # with the parts that they were linked from
        chosen = choose(images, (9, 0))             # the linked PTX of the parts, or why they cannot be linked

Modules that were not linked are handled as in `fatbin`.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path

from gpubpf import cache, elf
from gpubpf.errors import Error, ImageError, PtxError
from gpubpf.images import fatbin
from gpubpf.images.fatbin import FatbinImage
from gpubpf.record import Record, replace

LTO = "link-time optimised code (-dlto) without PTX"
# NVIDIA's code for launches from kernels, which nvcc adds. It uses private entry points of the driver.
DEVICE_RUNTIME = "cuda_device_runtime_cu"
_MAX_REGISTERS = r"(?<![\w-])-{1,2}maxrregcount[= ]([0-9]+)"
_STAGE = "linked"
_LOCAL, _WEAK, _COMMON = 0, 2, 0xFFF2  # STB_LOCAL, STB_WEAK, SHN_COMMON


def choose(images: Sequence[FatbinImage], cc: tuple[int, int], newer: bool = False) -> FatbinImage | str:
    """Do the same as `fatbin.choose`. For a linked module, return the linked PTX of its parts."""
    whole = [image for image in images if not image.relocatable]
    if len(whole) == len(images) or any(image.kind == "ptx" for image in whole):
        return fatbin.choose(whole, cc, newer)
    chosen = _linked(images, cc, newer)
    kept = fatbin.choose(whole, cc, newer) if isinstance(chosen, str) else chosen
    return kept if isinstance(kept, FatbinImage) else chosen


def modules(images: Sequence[FatbinImage]) -> tuple[tuple[FatbinImage, ...], ...]:
    """Group images by module as `fatbin.modules` does, and put parts into the module that was linked from them."""
    is_new = any(image.relocatable and not image.part for image in images)
    return fatbin.modules(_grouped(images) if is_new else images)


def _linked(images: Sequence[FatbinImage], cc: tuple[int, int], newer: bool) -> FatbinImage | str:
    """Return the linked PTX of a module's parts for compute capability `cc`, or why they cannot be linked.

    Parts without suitable PTX are left out. Kernels that call a function of such a part cannot be instrumented, nor can kernels that
    call a weak function that such a part may override.
    """
    parts: dict[tuple[int, int], list[FatbinImage]] = {}
    for image in images:
        if image.relocatable:
            parts.setdefault((image.module, image.part), []).append(image)
    taken, others, without = [], [], []
    for part in parts.values():
        whole = [replace(image, relocatable=False) for image in part if image.kind == "ptx"]
        chosen = fatbin.choose(whole, cc, newer)
        if isinstance(chosen, FatbinImage):
            taken.append(chosen)
        else:
            others.append(part)
            lto = not whole and any(image.kind == "lto" for image in part)
            without.append(LTO if lto else chosen)
    if sum(image.full_size for image in taken) > fatbin.LARGEST_PTX:
        return "its parts have more than 64 MiB of PTX; split it into modules"
    try:
        taken = [image for image in taken if DEVICE_RUNTIME.encode() not in image.payload]
        if taken:
            texts = tuple(image.text for image in taken)
            overridden = _overridden(texts, others)
            partial = bool(others) or any(image.partial for image in taken)
            return _link(texts, _options(taken), images[0].module, overridden, partial)
    except (ImageError, PtxError) as error:
        return str(error)
    except Error as error:
        return f"the program's parts cannot be linked: {error}"
    return max(
        without, key=lambda reason: (reason == LTO, reason != fatbin.SASS_ONLY), default=fatbin.SASS_ONLY
    )


def _options(images: Iterable[FatbinImage]) -> str:
    """Return ptxas options for all images: the first one's, with the smallest register limit, so that the largest blocks can run."""
    options = [image.options for image in images]
    limits = [int(match[1]) for text in options if (match := re.search(_MAX_REGISTERS, text))]
    words = re.sub(_MAX_REGISTERS, "", options[0]).replace("--compile-only", "").split()
    return " ".join([*words, *([f"-maxrregcount={min(limits)}"] if limits else [])])


def _overridden(texts: Iterable[str], others: Sequence[Iterable[FatbinImage]]) -> frozenset[str]:
    """Return the weak definitions in PTX texts that other parts may override. A part that cannot be read may override any of them."""
    if not others:
        return frozenset()
    symbols = [_symbols(part) for part in others]
    strong = {name for found in symbols if found is not None for name in found.strong}
    overridden: set[str] = set()
    for own in map(_symbols_of_ptx, texts):
        overridden |= own.weak & strong
        if None in symbols:
            overridden |= own.weak - own.kernels
    return frozenset(overridden)


@functools.lru_cache(maxsize=8)
def _link(
    texts: tuple[str, ...], options: str, number: int, overridden: frozenset[str], partial: bool
) -> FatbinImage:
    """Link PTX texts into one image. overridden, partial: as for `link`. Raises Error."""
    key = cache.key(_version(), str(partial), *sorted(overridden), *texts)
    store = cache.default()
    if (made := store.get(_STAGE, key)) is None:
        from gpubpf.ptx.link import Input, link  # imported here, because few programs link

        inputs = [Input(f"text {k}", text) for k, text in enumerate(texts)]
        # A part without PTX may define the missing names.
        linked = link(inputs, complete=False, overridden=overridden, partial=partial)
        made = linked.encode("utf-8", "surrogateescape")
        store.put(_STAGE, key, made)
    image = fatbin.ptx_image(made, fatbin.PtxasRun(options=options), number)
    if image is None:
        raise ImageError("its PTX has no .version and .target; build it again")
    return image


@functools.cache
def _version() -> str:
    package = Path(__file__).resolve().parents[1]
    return cache.key_of_files([*sorted((package / "ptx").glob("*.py")), Path(__file__)])


# --- grouping parts by module --------------------------------------------------------------------------


class _Symbols(Record):
    kernels: frozenset[str] = frozenset()
    strong: frozenset[str] = frozenset()
    weak: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()


def _grouped(images: Sequence[FatbinImage]) -> tuple[FatbinImage, ...]:
    """Return the images of a file, with the parts of each device link in the module that was linked from them.

    A file has no table of this. A part belongs to the machine code that has its kernels, and to modules that need its functions and
    variables if no other part has them. Parts that belong to no machine code form one module, which the driver links.
    """
    parts: dict[int, list[FatbinImage]] = {}
    modules: dict[int, list[FatbinImage]] = {}
    for image in images:
        (parts if image.relocatable else modules).setdefault(image.module, []).append(image)
    if not parts:
        return tuple(images)
    read = {number: _symbols(part) for number, part in parts.items()}
    symbols = {number: found for number, found in read.items() if found is not None}
    first: dict[int, set[int]] = {}  # the parts with the kernels of each module
    claimed: set[int] = set()
    for number, module in modules.items():
        if any(image.kind == "ptx" for image in module):
            continue  # it was not linked
        kernels = _kernels(module)
        first[number] = {
            k for k, s in symbols.items() if s.kernels and s.kernels <= kernels and k not in claimed
        }
        claimed |= first[number]
    rest = {k for k, s in symbols.items() if s.kernels and k not in claimed}
    if rest:
        first[min(rest)] = rest
    # Parts that cannot be read, such as LTO code, may define any name. With several modules, it is unknown for which module.
    offers = _offers(symbols) if len(symbols) == len(parts) or len(first) == 1 else {}
    found = [image for image in images if not image.relocatable]
    free = parts.keys() - {k for members in first.values() for k in members}
    for number, members in first.items():
        found += _members(number, members, parts, symbols, offers, free, len(first) == 1)
    return tuple(found)


def _offers(symbols: Mapping[int, _Symbols]) -> dict[int, set[str]]:
    """Return the names for which each part may be added to a module.

    If several parts have strong definitions of a name, they belong to different modules, but it is unknown which part belongs to which
    module. Weak definitions of a name are all the same. A part offers its weak definitions only if none of its strong definitions may
    belong to another module.
    """
    counts = Counter(name for s in symbols.values() for name in s.strong)
    offers: dict[int, set[str]] = {}
    for number, s in symbols.items():
        offers[number] = {name for name in s.strong if counts[name] == 1}
        if len(offers[number]) == len(s.strong):
            offers[number] |= {name for name in s.weak if not counts[name]}
    return offers


def _members(
    number: int,
    first: set[int],
    parts: Mapping[int, list[FatbinImage]],
    symbols: Mapping[int, _Symbols],
    offers: Mapping[int, set[str]],
    free: Set[int],
    alone: bool,
) -> list[FatbinImage]:
    """Return the images of some parts, and of the parts that they need, as members of module `number`.

    A free part may override weak definitions of this module or of another module. Such a part becomes a member without its PTX, which
    marks that the definitions are uncertain.

    number: the module's number
    first: the parts that certainly belong to the module
    offers: the result of `_offers`
    free: the parts that are not in `first` of any module
    alone: whether there is no other module
    """
    members = set(first)
    while True:
        missing = {name for k in members for name in symbols[k].missing}
        weak = {name for k in members for name in symbols[k].weak}
        more = {
            k
            for k, offered in offers.items()
            if k not in members and (offered & missing or (alone and offered & symbols[k].strong & weak))
        }
        if not more:
            break
        members |= more
    weak -= {name for k in members for name in symbols[k].strong}
    open_ = {k for k in free - members if weak and (k not in symbols or symbols[k].strong & weak)}
    return [
        replace(image, module=number, part=k + 1, partial=not free <= members)
        for k in sorted(members | open_)
        for image in parts[k]
        if k in members or image.kind != "ptx"
    ]


def _kernels(module: Iterable[FatbinImage]) -> set[str]:
    found: set[str] = set()
    for image in module:
        try:
            if image.kind == "elf":
                found.update(fatbin.kernel_names(image.read()))
        except ImageError:
            continue
    return found


def _symbols(part: Iterable[FatbinImage]) -> _Symbols | None:
    """Return the names that a part defines and needs, from its PTX or else from its relocatable cubin. None if it has neither."""
    for image in sorted(part, key=lambda image: image.kind != "ptx"):
        try:
            if image.kind == "ptx":
                return _symbols_of_ptx(image.text)
            if image.kind == "elf":
                return _symbols_of_cubin(image.read())
        except (ImageError, PtxError):
            continue
    return None


def _symbols_of_ptx(text: str) -> _Symbols:
    # Imported here, because few programs link.
    from gpubpf.ptx import parser
    from gpubpf.ptx.link import find_definitions, is_local, is_weak

    parsed = parser.parse(text)
    defined = find_definitions(parsed)
    linked = {name: item for name, item in defined.items() if not is_local(item)}
    weak = frozenset(name for name, item in linked.items() if is_weak(item))
    missing = (parsed.functions.keys() | parsed.variables.keys()) - defined.keys()
    return _Symbols(frozenset(parsed.entries), frozenset(linked) - weak, weak, frozenset(missing))


def _symbols_of_cubin(data: bytes) -> _Symbols:
    file = elf.of_bytes(data)
    strong: set[str] = set()
    weak: set[str] = set()
    missing: set[str] = set()
    for table in (section for section in file.sections if section.type == elf.SHT_SYMTAB):
        names = file.name_table(table)
        for symbol in file.symbols(table):
            binding = symbol.info >> 4
            if binding == _LOCAL or not (name := names.at(symbol.name)):
                continue
            if not symbol.section:
                missing.add(name)
            elif binding == _WEAK or symbol.section == _COMMON:
                weak.add(name)
            else:
                strong.add(name)
    kernels = frozenset(fatbin.kernel_names(data))
    return _Symbols(kernels, frozenset(strong), frozenset(weak), frozenset(missing))

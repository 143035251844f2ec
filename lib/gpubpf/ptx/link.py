"""Link several PTX texts into one, like a device link (`cuLinkAddData`, `nvcc -rdc=true`).

    text = link([Input("first.ptx", first), Input("second.ptx", second)])

Names that are local to a text (without `.visible`, `.extern`, `.weak` or `.common`: PTX ISA 5.1.13, 11.6) are renamed if another text
uses them. A definition in one text resolves declarations in the others. Source files are renumbered, so that each `.loc` still names
the right file. Only the function names remain of the DWARF. Nothing is optimized away.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gpubpf.errors import Error

from .flow import SYSTEM_FUNCTIONS
from .module import Function, Item, Module, Variable, render
from .parser import parse
from .source import source_files
from .tokens import strip_comments

_IDENTIFIER = re.compile(r"(?<![\w$%.])[\w$]+")
_FILE_NUMBER = re.compile(r"((?:^|(?<=[\s;{}]))\.(?:file|loc)\s+|\binlined_at\s+)([0-9]{1,9})(?=\s)")
_FUNCTION_NAME = re.compile(r"\$L__info_string[0-9]+\b")  # a label in .debug_str
_LINKED = {"visible", "extern", "weak", "common"}


class LinkError(Error):
    """The texts do not fit together: a name is undefined, or defined twice."""


@dataclass(frozen=True)
class Input:
    """A text, and its name for messages."""

    name: str
    text: str


def link(inputs: Sequence[Input], complete: bool = True) -> str:
    """Return the PTX of all `inputs` as one text. Unless `complete`, names that no text defines remain declarations.

    Raises PtxError for text that cannot be read, LinkError for texts that do not fit together.
    """
    modules = [parse(item.text) for item in inputs]
    if len(modules) > 1:
        files = accumulate((max(source_files(module), default=0) for module in modules), initial=0)
        modules = [
            parse(_renamed(item.text, module, _names(modules, position), position, before))
            for position, (item, module, before) in enumerate(zip(inputs, modules, files, strict=False))
        ]
    for module in modules:
        for function in module.functions.values():
            _ = function.body  # parsed now, so that errors have this text's lines
    definitions = _definitions(inputs, modules)
    if complete:
        _all_defined(inputs, modules, definitions)
    if len(inputs) == 1:
        return inputs[0].text  # unchanged, with lines and comments
    items = tuple(_items(modules, definitions))
    newest = max(modules, key=lambda module: module.architecture)
    # With `debug`, ptxas requires the sections that are dropped.
    options = dict.fromkeys(word for module in modules for word in module.target[1:] if word != "debug")
    return render(
        Module(
            max(module.version for module in modules),
            (newest.sm, *options),
            newest.address_size,
            items,
        )
    )


def _is_local(item: Function | Variable) -> bool:
    return not _LINKED.intersection(item.linkage) and not (
        isinstance(item, Function) and item.kind == "entry"
    )


def _named(module: Module) -> dict[str, Function | Variable]:
    return {**module.functions, **module.variables}


def _names(modules: Sequence[Module], without: int) -> set[str]:
    return {name for k, module in enumerate(modules) if k != without for name in _named(module)}


def _renamed(text: str, module: Module, taken: set[str], position: int, files: int) -> str:
    """Return a module's text with new names for its local names in `taken`, and with `files` added to its source file numbers."""
    clashes = {name for name, item in _named(module).items() if _is_local(item) and name in taken}
    has_lines = ".loc" in text
    if not clashes and not has_lines:
        return text
    text = strip_comments(text)
    if clashes:
        text = _IDENTIFIER.sub(lambda match: match[0] + f"$link{position}" * (match[0] in clashes), text)
    if has_lines:
        text = _FILE_NUMBER.sub(lambda match: f"{match[1]}{int(match[2]) + files}", text)
        text = _FUNCTION_NAME.sub(lambda match: f"{match[0]}_{position}", text)
    return text


def _is_definition(item: Item) -> bool:
    if isinstance(item, Function):
        return item.defined
    return isinstance(item, Variable) and "extern" not in item.linkage


def _definitions(inputs: Sequence[Input], modules: Sequence[Module]) -> dict[str, tuple[int, Item]]:
    """Return the module number and the definition of each name. Raises LinkError.

    A strong definition replaces weak ones. Otherwise the first counts, or the largest of `.common` definitions.
    """
    found: dict[str, tuple[int, Item]] = {}
    for position, module in enumerate(modules):
        for name, item in _named(module).items():
            if not _is_definition(item):
                continue
            if (other := found.get(name)) is not None and not {"weak", "common"} & set(item.linkage):
                if not {"weak", "common"} & set(_linkage(other[1])):
                    raise LinkError(
                        f"Multiple definition of '{name}' in '{inputs[position].name}', first defined in "
                        f"'{inputs[other[0]].name}'; link one of them"
                    )
                found[name] = (position, item)
            elif other is None or _is_larger_common(item, other[1]):
                found[name] = (position, item)
    return found


def _is_larger_common(item: Item, other: Item) -> bool:
    if not isinstance(item, Variable) or not isinstance(other, Variable):
        return False
    return {"common"} <= set(item.linkage) & set(other.linkage) and item.size > other.size


def _linkage(item: Item) -> tuple[str, ...]:
    return item.linkage if isinstance(item, Function | Variable) else ()


def _all_defined(
    inputs: Sequence[Input], modules: Sequence[Module], definitions: dict[str, tuple[int, Item]]
) -> None:
    for position, module in enumerate(modules):
        for name, item in _named(module).items():
            if name in definitions or name in SYSTEM_FUNCTIONS:
                continue
            if isinstance(item, Variable) and item.space == "shared":
                continue  # dynamic shared memory: the launch defines it
            if isinstance(item, Function) and not _called(module, name):
                continue
            raise LinkError(
                f"Undefined reference to '{name}' in '{inputs[position].name}'; link the code that defines it"
            )


def _called(module: Module, name: str) -> bool:
    return any(function.mentions(name) for function in module.functions.values() if function.defined)


def _items(modules: Sequence[Module], definitions: dict[str, tuple[int, Item]]) -> Iterator[Item]:
    """Yield declarations of all functions, then variables, which may hold function addresses, then the remaining items."""
    declared: set[str] = set()
    for module in modules:
        for function in module.functions.values():
            if function.kind != "func" or function.name in declared:
                continue
            declared.add(function.name)
            defined = definitions.get(function.name)
            origin = defined[1] if defined is not None else function
            assert isinstance(origin, Function)
            yield origin.with_body(None)
    variables: dict[str, Variable] = {}
    for position, module in enumerate(modules):
        for item in module.items:
            if not isinstance(item, Variable):
                continue
            if item.name in definitions:
                if definitions[item.name] == (position, item):
                    yield item
            elif item.name not in variables or item.alignment > variables[item.name].alignment:
                variables[item.name] = item  # dynamic shared memory: the strictest alignment counts
    yield from variables.values()
    aliases: set[str] = set()
    for position, module in enumerate(modules):
        for item in module.items:
            if isinstance(item, Variable):
                continue
            if isinstance(item, Function):
                if item.defined and definitions[item.name] == (position, item):
                    yield item
            elif item.name == "section":
                if item.text.split()[1].startswith(".debug_str"):
                    yield item
            elif item.name != "alias" or item.names[0] not in aliases:
                aliases.update(item.names[:1] if item.name == "alias" else ())
                yield item

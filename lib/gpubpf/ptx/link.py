"""Link several PTX texts into one, like a device link (`cuLinkAddData`, `nvcc -rdc=true`).

    text = link([Input("first.ptx", first), Input("second.ptx", second)])

Names that are local to a text (without `.visible`, `.extern`, `.weak` or `.common`: PTX ISA 5.1.13, 11.6) are renamed if another text
uses them. A definition in one text resolves declarations in the others. Source files are renumbered, so that each `.loc` still names
the right file. The DWARF is dropped, except for function names. Nothing is optimized away.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, chain

from gpubpf.errors import Error
from gpubpf.record import Record, replace

from .flow import SYSTEM_FUNCTIONS, find_initializer_names
from .indirect import PARTIAL
from .module import Directive, Function, Item, Module, Variable, render
from .parser import parse
from .source import source_files
from .symbols import DEVICE_RUNTIME
from .tokens import strip_comments

_IDENTIFIER = re.compile(r'"(?:\\.|[^"\\\n])*"?|(?<![\w$%.])[\w$]+')  # or a string, which is not renamed
_FILE_NUMBER = re.compile(r"((?:^|(?<=[\s;{}]))\.(?:file|loc)\s+|\binlined_at\s+)([0-9]{1,9})(?=\s)")
_FUNCTION_NAME = re.compile(r"\$L__info_string[0-9]+\b")  # a label in .debug_str
_LINKED = {"visible", "extern", "weak", "common"}
_Definitions = dict[str, tuple[int, Function | Variable]]  # by name, with the number of the module


class LinkError(Error):
    """The texts do not fit together: a name is undefined, or defined twice."""


class Input(Record):
    """A PTX text, and its name for messages."""

    name: str
    text: str


def link(
    inputs: Sequence[Input],
    complete: bool = True,
    overridden: Collection[str] = (),
    partial: bool = False,
) -> str:
    """Return the PTX of all `inputs` as one text.

    complete: whether each name must be defined; otherwise, names that no text defines remain declarations
    overridden: functions whose weak definitions are ignored, because code without PTX may define them differently
    partial: whether the module also has code outside of `inputs`; the text is then marked with PARTIAL

    Raises PtxError for text that cannot be read, LinkError for texts that do not fit together.
    """
    modules = [parse(item.text) for item in inputs]
    if len(modules) > 1:
        files = accumulate((max(source_files(module), default=0) for module in modules), initial=0)
        names = Counter(name for module in modules for name in _named(module))
        modules = [
            parse(_renamed(item.text, module, names, position, before))
            for position, (item, module, before) in enumerate(zip(inputs, modules, files, strict=False))
        ]
    for module in modules:
        for function in module.functions.values():
            _ = function.body  # parsed now, so that errors have this text's lines
    definitions = _definitions(inputs, modules, overridden)
    if complete:
        _all_defined(inputs, modules, definitions)
    if len(inputs) == 1 and not overridden:
        return _marked(inputs[0].text, partial)  # otherwise unchanged, with lines and comments
    items = tuple(_items(modules, definitions))
    # sm_90a has the instructions of sm_90 and more; sm_100a those of sm_100f.
    newest = max(modules, key=lambda m: (m.architecture, m.sm.endswith("a"), m.sm.endswith("f")))
    # With `debug`, ptxas requires the sections that are dropped.
    options = dict.fromkeys(word for module in modules for word in module.target[1:] if word != "debug")
    version = max(module.version for module in modules)
    return _marked(render(Module(version, (newest.sm, *options), newest.address_size, items)), partial)


def _marked(text: str, partial: bool) -> str:
    """Return the text, marked with PARTIAL if it is only a part of its module's code. Then no call through a register is followed."""
    return f"{text}\n.extern .func {PARTIAL} ();\n" if partial else text


def find_definitions(module: Module) -> dict[str, Function | Variable]:
    """Return what a text defines, by name. The declaration of a function's alias counts as its definition."""
    return {
        **{n: f for n, f in module.functions.items() if f.defined or n in module.aliases},
        **{n: v for n, v in module.variables.items() if "extern" not in v.linkage},
    }


def is_local(item: Function | Variable) -> bool:
    """Return whether only its own text can use a function or variable."""
    return not _LINKED.intersection(item.linkage) and not (
        isinstance(item, Function) and item.kind == "entry"
    )


def is_weak(item: Function | Variable) -> bool:
    """Return whether a definition gives way to those of other texts."""
    return not {"weak", "common"}.isdisjoint(item.linkage)


def _named(module: Module) -> dict[str, Function | Variable]:
    return {**module.functions, **module.variables}


def _renamed(text: str, module: Module, names: Counter[str], position: int, files: int) -> str:
    """Return a module's text with new names for its local names that other modules use, and `files` added to its file numbers.

    `names`: the number of modules that use each name.
    """
    clashes = {name for name, item in _named(module).items() if is_local(item) and names[name] > 1}
    has_lines = ".loc" in text or ".file" in text
    if not clashes and not has_lines:
        return text
    text = strip_comments(text)
    if clashes:
        text = _IDENTIFIER.sub(lambda match: match[0] + f"$link{position}" * (match[0] in clashes), text)
    if has_lines:
        text = _FILE_NUMBER.sub(lambda match: f"{match[1]}{int(match[2]) + files}", text)
        text = _FUNCTION_NAME.sub(lambda match: f"{match[0]}_{position}", text)
    return text


def _definitions(
    inputs: Sequence[Input], modules: Sequence[Module], overridden: Collection[str]
) -> _Definitions:
    """Return the module number and the definition of each name. Raises LinkError.

    A strong definition replaces weak ones. Otherwise the first counts, or the largest of `.common` definitions.
    """
    found: _Definitions = {}
    for position, module in enumerate(modules):
        for name, item in find_definitions(module).items():
            if name in overridden and isinstance(item, Function) and is_weak(item):
                continue
            if (other := found.get(name)) is not None and not is_weak(item):
                if not is_weak(other[1]):
                    raise LinkError(
                        f"Multiple definition of '{name}' in '{inputs[position].name}', first defined in "
                        f"'{inputs[other[0]].name}'; link one of them"
                    )
                found[name] = (position, item)
            elif other is None or _is_larger_common(item, other[1]):
                found[name] = (position, item)
    return found


def _is_larger_common(item: Function | Variable, other: Function | Variable) -> bool:
    if not isinstance(item, Variable) or not isinstance(other, Variable):
        return False
    return {"common"} <= set(item.linkage) & set(other.linkage) and item.size > other.size


def _all_defined(inputs: Sequence[Input], modules: Sequence[Module], definitions: _Definitions) -> None:
    for position, module in enumerate(modules):
        for name, item in _named(module).items():
            if name in definitions or name in SYSTEM_FUNCTIONS:
                continue
            if isinstance(item, Function) and re.fullmatch(DEVICE_RUNTIME, name):
                continue  # the embedded device has these itself
            if isinstance(item, Variable) and item.space == "shared":
                continue  # dynamic shared memory: the launch defines it
            if isinstance(item, Function) and not _called(module, name):
                continue
            raise LinkError(
                f"Undefined reference to '{name}' in '{inputs[position].name}'; link the code that defines it"
            )


def _called(module: Module, name: str) -> bool:
    return any(function.mentions(name) for function in module.functions.values() if function.defined)


def _items(modules: Sequence[Module], definitions: _Definitions) -> Iterator[Item]:
    """Yield declarations of all functions, then variables, which may hold function addresses, then the remaining items."""
    declared: set[str] = set()
    for item in chain.from_iterable(module.items for module in modules):
        if not isinstance(item, Function) or item.name in declared or (item.kind == "entry" and item.defined):
            continue
        declared.add(item.name)
        found = definitions.get(item.name)
        origin = item
        if found is not None and isinstance(found[1], Function):
            origin = found[1]
        elif is_weak(item):
            origin = replace(item, linkage=("extern",))
        yield origin.declaration
    undefined: dict[str, Variable] = {}
    variables: list[Variable] = []
    for position, module in enumerate(modules):
        for item in module.items:
            if not isinstance(item, Variable):
                continue
            if item.name in definitions:
                if definitions[item.name] == (position, item):
                    variables.append(item)
            elif item.name not in undefined or item.alignment > undefined[item.name].alignment:
                undefined[item.name] = item  # dynamic shared memory: the strictest alignment counts
    yield from undefined.values()
    yield from _with_declarations(variables)
    for position, module in enumerate(modules):
        for item in module.items:
            if isinstance(item, Function):
                if item.defined and definitions.get(item.name) == (position, item):
                    yield item
            elif isinstance(item, Directive) and _is_kept(item, position, definitions):
                yield item


def _with_declarations(variables: Sequence[Variable]) -> Iterator[Variable]:
    """Yield variables, with a declaration of each that an initializer names before its definition."""
    later = {variable.name: variable for variable in variables}
    for variable in variables:
        for name in find_initializer_names(variable.initializer):
            if (named := later.pop(name, None)) is not None:
                yield replace(named, linkage=("extern",), initializer=None)
        later.pop(variable.name, None)
        yield variable


def _is_kept(item: Directive, position: int, definitions: _Definitions) -> bool:
    if item.name == "section":
        return ".debug_str" in item.text.split("{")[0]
    if item.name == "alias":
        return any(name in definitions and definitions[name][0] == position for name in item.names[:1])
    return True

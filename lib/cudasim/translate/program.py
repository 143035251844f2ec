"""Translate a PTX module to C: functions, frames, kernels and variables, described by a `cs_image`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from gpubpf.errors import PtxError
from gpubpf.ptx.module import (
    Function,
    Generic,
    Immediate,
    Initializer,
    Masked,
    Module,
    Name,
    Variable,
    type_size,
)

from . import counts
from .compiler import LEVELS, PROBED
from .declarations import check_declarations
from .function import SLOT, FunctionCode, kernel_parameters
from .liveness import estimated_registers
from .outline import PREFIX, outline
from .render import render
from .scope import Storage, lifted
from .values import RESERVED_SHARED, Unsupported, immediate_bits

# A module with more than SPLIT_LINES lines of C is compiled in parts of about PART_LINES lines, each when a kernel that needs it is
# launched. The compiler takes 0.1 s even for an empty file. Only parts are compiled again at a higher level after they ran long.
SPLIT_LINES, PART_LINES = LEVELS[0][0], 800
# Limits in bytes for an initialised variable, shared memory, local memory and parameters. They exceed the limits of any device.
MOST_INITIAL = 1 << 28
MOST_SHARED, MOST_LOCAL, MOST_PARAMETERS = 1 << 24, 512 << 10, 1 << 15


@dataclass(frozen=True)
class Relocation:
    offset: int
    width: int
    function: bool
    index: int
    addend: int
    mask: int
    shift: int


def _align(value: int, alignment: int) -> int:
    return (value + alignment - 1) // alignment * alignment


class TranslatedModule:
    """The translation of a module. `c_texts()` returns the result.

    virtual   whether each thread has its own clock: 1 ns for each instruction of the application that it reaches
    counting  where to count how often each basic block runs; None: the translation does not count
    """

    def __init__(
        self, module: Module, virtual: bool = False, counting: counts.Counting | None = None
    ) -> None:
        if module.address_size != 64:
            raise PtxError(
                f".address_size {module.address_size}: CUDA only runs programs with 64-bit addresses"
            )
        self.module = module = module if counting else outline(module)
        self.virtual = virtual
        self.counting = counting
        self.scope: dict[str, Storage] = {}
        self.variables: list[Variable] = []
        self.shared: list[Variable] = []
        self.functions: dict[str, Function] = dict(module.functions)
        for alias, name in module.aliases.items():
            if name in self.functions:
                self.functions[alias] = self.functions[name]
        self._collect_variables()
        defined = [f for f in module.functions.values() if f.defined]
        self.indices = {f.name: i for i, f in enumerate(defined)}
        for name, function in self.functions.items():
            if function.defined:
                self.indices.setdefault(name, self.indices[function.name])
        self.codes: dict[str, FunctionCode] = {}
        self.refused: dict[str, str] = {}  # function that cannot be translated → the reason
        self.taken: set[str] = set()
        self.initial: list[tuple[bytes, list[Relocation]]] = [self._initial(v) for v in self.variables]
        self._translate(defined)
        self._order()
        self._layout()

    # -- variables

    def _collect_variables(self) -> None:
        check_declarations(self.module)
        for variable in self.module.variables.values():
            self._variable(variable, variable.name)
        for function in self.module.functions.values():
            if function.defined:
                for key, variable in lifted(function):
                    self._variable(variable, key)

    def _variable(self, variable: Variable, key: str) -> None:
        if variable.space in ("global", "const"):
            if variable.type in ("texref", "surfref", "samplerref"):
                return  # using it is an error, declaring it is not
            self.scope[key] = Storage(
                "global",
                key,
                len(self.variables),
                variable.size,
                variable.alignment,
                variable.space == "const",
            )
            self.variables.append(variable)
        elif variable.space == "shared":
            if variable.size > MOST_SHARED:
                raise PtxError(
                    f"PTX line {variable.line}: {variable.name} has {variable.size} bytes;"
                    f" a shared variable may have {MOST_SHARED}"
                )
            self.scope[key] = Storage("shared", key, len(self.shared), variable.size, variable.alignment)
            self.shared.append(variable)
        elif variable.space != "tex":
            raise PtxError(f"PTX line {variable.line}: .{variable.space} is not supported at module scope")

    def _initial(self, variable: Variable) -> tuple[bytes, list[Relocation]]:
        if variable.initializer is None:
            return b"", []
        data = bytearray()
        relocations: list[Relocation] = []
        width = type_size(variable.type)
        inner = variable.vector
        for length in variable.dimensions[1:]:
            inner *= length or 1
        self._fill(variable, variable.initializer, data, relocations, width, list(variable.dimensions), 0)
        return bytes(data.rstrip(b"\0")) if not relocations else bytes(data), relocations

    def _fill(
        self,
        variable: Variable,
        value: Initializer,
        data: bytearray,
        relocations: list[Relocation],
        width: int,
        dimensions: list[int | None],
        at: int,
    ) -> None:
        """Write `value` at byte `at`. Nested braces initialise the next dimension."""
        if isinstance(value, tuple):
            step = width
            for length in dimensions[1:]:
                step *= length or 1
            if not dimensions and variable.vector > 1:
                step = width
            elif variable.vector > 1:
                step *= variable.vector
            for k, item in enumerate(value):
                flat = not isinstance(item, tuple)
                offset = at + k * (width if flat else step)
                self._fill(variable, item, data, relocations, width, dimensions[1:], offset)
            return
        if at + width > MOST_INITIAL:
            raise PtxError(
                f"PTX line {variable.line}: the initial value of {variable.name} has more than {MOST_INITIAL} bytes"
            )
        if len(data) < at + width:
            data.extend(bytes(at + width - len(data)))
        if isinstance(value, Immediate):
            bits = immediate_bits(value, variable.type) & (1 << 8 * width) - 1
            data[at : at + width] = bits.to_bytes(width, "little")
            return
        mask, shift, addend = (1 << 64) - 1, 0, 0
        if isinstance(value, Masked):
            mask = value.mask
            shift = (mask & -mask).bit_length() - 1
            value = value.operand
        if isinstance(value, Generic):
            value = value.operand
        assert isinstance(value, Name)
        addend = value.offset
        found = self.scope.get(value.name)
        if found is not None and found.kind == "global":
            relocations.append(Relocation(at, width, False, found.index, addend, mask, shift))
        elif value.name in self.functions and self.functions[value.name].defined:
            self.taken.add(self.functions[value.name].name)
            relocations.append(Relocation(at, width, True, self.indices[value.name], addend, mask, shift))
        elif value.name not in self.functions:
            # A function that is only declared stays 0: calling it is a fault.
            raise PtxError(f"PTX line {variable.line}: {value.name} in an initialiser is not defined")

    # -- functions

    def _translate(self, defined: list[Function]) -> None:
        """Translate kernels and every function that they can reach."""
        names = {self.indices[f.name]: f.name for f in defined}
        todo = [f.name for f in defined if f.kind == "entry"]
        todo += sorted(self.taken)
        while todo:
            name = todo.pop()
            if name in self.codes or name in self.refused:
                continue
            function = self.functions[name]
            try:
                if any(directive.name == "blocksareclusters" for directive in function.directives):
                    raise Unsupported(
                        f"PTX line {function.line}: the embedded device does not support .blocksareclusters"
                    )
                code = FunctionCode(
                    function,
                    self.indices[name],
                    self.scope,
                    self.functions,
                    self.indices,
                    (self.module.version, self.module.sm),
                    self.virtual,
                    self.counting is not None,
                )
                if (
                    code.names.local_size > MOST_LOCAL
                    or sum(p.size for p in function.parameters) > MOST_PARAMETERS
                ):
                    raise PtxError(
                        f"PTX line {function.line}: more than {MOST_LOCAL} bytes of local memory for each thread,"
                        f" or {MOST_PARAMETERS} bytes of parameters"
                    )
            except Unsupported as error:
                self.refused[name] = str(error)
                continue
            except PtxError as error:
                raise PtxError(f"{error}, in {name}") from None
            self.codes[name] = code
            todo += sorted(code.callees)
            for index in sorted(code.values.address_taken):
                self.taken.add(names[index])
                todo.append(names[index])
        bad = set(self.refused)
        while bad:  # refuse the callers, too
            bad = {n for n, code in self.codes.items() if not self._callees(code).isdisjoint(self.refused)}
            for name in bad:
                callees = self._callees(self.codes[name])
                self.refused[name] = next(self.refused[c] for c in sorted(callees) if c in self.refused)
            self.codes = {n: code for n, code in self.codes.items() if n not in bad}
        self.taken -= set(self.refused)

    def _callees(self, code: FunctionCode) -> set[str]:
        if not code.indirect:
            return code.callees
        return code.callees | {n for n in self.taken if self.functions[n].kind == "func"}

    def _order(self) -> None:
        """Find the strongly connected components of the call graph, callees first (Tarjan's algorithm, without recursion)."""
        number: dict[str, int] = {}
        low: dict[str, int] = {}
        stack: list[str] = []
        on_stack: set[str] = set()
        self.components: list[list[str]] = []
        for root in sorted(self.codes):
            if root in number:
                continue
            work = [(root, iter(sorted(self._callees(self.codes[root]))))]
            number[root] = low[root] = len(number)
            stack.append(root)
            on_stack.add(root)
            while work:
                name, rest = work[-1]
                for callee in rest:
                    if callee not in number:
                        number[callee] = low[callee] = len(number)
                        stack.append(callee)
                        on_stack.add(callee)
                        work.append((callee, iter(sorted(self._callees(self.codes[callee])))))
                        break
                    if callee in on_stack:
                        low[name] = min(low[name], number[callee])
                else:
                    work.pop()
                    if work:
                        low[work[-1][0]] = min(low[work[-1][0]], low[name])
                    if low[name] == number[name]:
                        component = []
                        while True:
                            member = stack.pop()
                            on_stack.discard(member)
                            component.append(member)
                            if member == name:
                                break
                        self.components.append(component)
        for component in self.components:
            cyclic = len(component) > 1 or component[0] in self._callees(self.codes[component[0]])
            for name in component:
                self.codes[name].recursive = cyclic

    def _layout(self) -> None:
        """Number the blocks, and place the local memory of each function in the lane's local memory."""
        self.base: dict[str, int] = {}
        at = 0
        for component in self.components:
            for name in component:
                self.base[name] = at
                at += len(self.codes[name].blocks)
        self.npcs = at
        self.local_base: dict[str, int] = {}
        self.local_end: dict[str, int] = {}
        start = [0] * len(self.components)
        of = {n: k for k, component in enumerate(self.components) for n in component}
        for k in range(len(self.components) - 1, -1, -1):  # callers first
            end = start[k]
            for name in self.components[k]:
                self.local_base[name] = end
                end = _align(end + self.codes[name].names.local_size, SLOT)
            for name in self.components[k]:
                self.local_end[name] = end
                for callee in self._callees(self.codes[name]):
                    if of[callee] != k:
                        start[of[callee]] = max(start[of[callee]], end)
        self.component_local = {
            n: self.local_end[n] - min(self.local_base[m] for m in component)
            for component in self.components
            for n in component
        }
        self.args = max([SLOT, *(c.args_size for c in self.codes.values())])

    def reach(self, name: str) -> set[str]:
        seen: set[str] = set()
        todo = [name]
        while todo:
            at = todo.pop()
            if at not in seen:
                seen.add(at)
                todo += self._callees(self.codes[at])
        return seen

    # -- text

    def c_texts(self, split: int = SPLIT_LINES, part: int = PART_LINES) -> list[str]:
        """Return the C texts of the module: a single one for at most `split` lines.

        Otherwise, the first text describes the module, and the others have parts of the code, of about `part` lines.
        """
        self.kernels = [f.name for f in self.module.functions.values() if f.defined and f.kind == "entry"]
        self.reached = {n: sorted(self.reach(n)) for n in self.kernels if n in self.codes}
        self.rendered = {name: render(code) for name, code in self.codes.items()}
        self._place_frames()
        lines = {name: one.body.count("\n") for name, one in self.rendered.items()}
        self.parts: dict[str, list[int]] = {n: [] for n in self.reached}
        self.portable: list[tuple[str, str] | None] = []  # by part: digest and function of a portable one
        apart = self._divided(lines, part) if sum(lines.values()) > split else []
        together = [] if apart else [self._text(list(self.codes))]
        nfunctions = 1 + max(self.indices.values(), default=-1)
        tables = [self._function_table(nfunctions), self._variable_tables(), self._kernel_tables()]
        tables.append(self._portable_table())
        return ["\n".join([self._head(), *together, *tables, self._image(nfunctions)]), *apart]

    def _place_frames(self) -> None:
        """Place the frame of each function. A frame holds an array over the lanes for each register.

        Lanes of a warp may be in different functions at the same time, so frames of functions must not share memory. Frames of kernels
        may share memory, because a warp runs only one kernel.
        """
        self.frame_offset: dict[str, int] = {}
        self.frame_end: dict[str, int] = {}
        at = max((self.rendered[n].size for n in self.reached), default=0)
        for name, one in self.rendered.items():
            begin = 0 if name in self.reached else at
            self.frame_offset[name] = begin
            self.frame_end[name] = begin + one.size
            at = max(at, self.frame_end[name])

    def _divided(self, lines: Mapping[str, int], most: int) -> list[str]:
        """Return the C texts of the parts. Functions that the same kernels reach are compiled together, about `most` lines at a time.

        Probes are in separate parts, with their own optimization level. A portable function is a separate part, so that other modules
        can use the compiled part.
        """
        reaching: dict[str, list[str]] = {n: [] for n in self.codes}
        for kernel, reached in self.reached.items():
            for name in reached:
                reaching[name].append(kernel)
        groups: dict[tuple[bool, tuple[str, ...]], list[str]] = {}
        for name, kernels in reaching.items():
            if kernels:
                groups.setdefault((self.codes[name].injected, tuple(kernels)), []).append(name)
        parts: list[list[str]] = []
        size, probes = most, False
        for (injected, users), names in sorted(groups.items(), key=lambda item: item[0][0]):
            portable = {n for n in names if self._is_portable(n)}
            rest = [n for n in names if n not in portable]
            if rest and (size >= most or injected != probes):
                parts.append([])
                size, probes = 0, injected
            if rest:
                parts[-1] += rest
                size += sum(lines[n] for n in rest)
            used = [len(parts) - 1] if rest else []
            if portable:
                used += range(len(parts), len(parts) + len(portable))
                parts += [[n] for n in names if n in portable]
                size = most  # nothing else goes into the last part
            for kernel in users:
                self.parts[kernel] += [k for k in used if k not in self.parts[kernel]]
        texts = []
        for names in parts:
            alone = self._is_portable(names[0])
            texts.append(self._portable_text(names[0]) if alone else f"{self._head()}{self._text(names)}")
            digest = hashlib.sha256(texts[-1].encode()).hexdigest()
            self.portable.append((digest, names[0]) if alone else None)
        return texts

    def _is_portable(self, name: str) -> bool:
        """Return whether the text of a function of probes is the same in other modules.

        The text differs if it contains the module's number of a variable or function (a recursive function contains its own), or names
        of the application's registers (an outlined scope contains the registers that it reads). Functions with calls through
        registers, or with counts, also stay in their module.
        """
        code = self.codes[name]
        values = code.values
        numbers = (
            values.variables or values.shared_variables or values.address_taken or values.reserved_shared
        )
        registers = name.startswith(PREFIX) and not all(
            p.name.lstrip("%").startswith("gpubpf") for p in code.function.parameters
        )
        stays = numbers or registers or code.recursive or code.indirect or self.counting
        return code.injected and not stays

    def _head(self) -> str:
        probed = any(code.names.injected for code in self.codes.values())
        head = (PROBED if probed else "") + '#include "device_runtime.h"\n'
        return head + counts.head(self.npcs) if self.counting else head

    def _places(self, name: str) -> list[int]:
        """Return the module's values for PLACES of a function, and the number of each callee's first block."""
        first, line = self.base[name], self.codes[name].function.line
        places = [first, line, self.args, self.frame_offset[name], self.local_base[name]]
        return places + [self.base[callee] for callee in self.rendered[name].callees]

    def _text(self, names: list[str]) -> str:
        """Return C with these functions, and the table of them."""
        codes = {n: self.codes[n] for n in names}
        functions = [
            self.rendered[n].text(f"fn_{code.index}", [f"{place}u" for place in self._places(n)])
            for n, code in codes.items()
        ]
        counted = counts.tail(self.counting, codes, self.base) if self.counting else ""
        rows = "".join(f"{{{code.index}, fn_{code.index}}}, " for code in codes.values())
        return "\n".join([*functions, counted + _part_table(rows, len(names), "0, 0")])

    def _portable_text(self, name: str) -> str:
        """Return a C text with only this function. The engine sets its `places` from the module's image."""
        count = len(self._places(name))
        function = self.rendered[name].text("run", [f"places[{k}]" for k in range(count)])
        table = _part_table("{0, run}, ", 1, f"{count}, places")
        return f"{self._head()}static uint32_t places[{count}];\n{function}{table}"

    def _portable_table(self) -> str:
        rows, lines = [], []
        for k, found in enumerate(self.portable):
            if found is None:
                rows.append("{0, 0, 0, 0},")
                continue
            digest, name = found
            places = self._places(name)
            lines.append(f"static const uint32_t places_{k}[] = {{{', '.join(map(str, places))}}};")
            rows.append(f'{{"{digest}", {self.codes[name].index}, {len(places)}, places_{k}}},')
        return "\n".join(
            [*lines, "static const struct cs_portable portable[] = {" + "".join(rows) + "{0}};\n"]
        )

    def _function_table(self, count: int) -> str:
        lines = []
        names = {self.indices[f.name]: f.name for f in self.functions.values() if f.defined}
        for index in range(count):
            name = names[index]
            if name in self.codes and self.codes[name].recursive:
                fields = ", ".join(f"{{{offset}, {width}}}" for offset, width in self.rendered[name].fields)
                lines.append(f"static const struct cs_field fields_{index}[] = {{{fields}}};")
        lines.append(f"static const struct cs_function functions[{count}] = {{")
        for index in range(count):
            name = names[index]
            code = self.codes.get(name)
            if code is None:
                lines.append(f'{{"{name}", CS_NO_PC, 0, 0, 0, 0}},')
                continue
            fields = f"fields_{index}" if code.recursive else "0"
            nfields = len(self.rendered[name].fields) if code.recursive else 0
            lines.append(
                f'{{"{name}", {self.base[name]}u, {self.frame_offset[name]}, {nfields}, '
                f"{self.component_local[name] if code.recursive else 0}, {fields}}},"
            )
        lines.append("};")
        owners: list[str] = []
        for component in self.components:
            for name in component:
                owners += [str(self.codes[name].index)] * len(self.codes[name].blocks)
        lines.append(f"static const uint16_t owners[] = {{{', '.join(owners) or '0'}}};\n")
        if count > 65535:
            raise PtxError("the module has more than 65535 functions; split it into several modules")
        return "\n".join(lines)

    def _variable_tables(self) -> str:
        lines = []
        rows = []
        for k, (variable, (data, relocations)) in enumerate(zip(self.variables, self.initial, strict=True)):
            initial = "0"
            if data:
                lines.append(f"static const uint8_t init_{k}[{len(data)}] = {_bytes(data)};")
                initial = f"init_{k}"
            table = "0"
            if relocations:
                entries = ", ".join(
                    f"{{{r.offset}, {r.mask:#x}ull, {r.addend}, {r.width}, {int(r.function)}, {r.index}, {r.shift}}}"
                    for r in relocations
                )
                lines.append(f"static const struct cs_reloc relocs_{k}[] = {{{entries}}};")
                table = f"relocs_{k}"
            visible = int(bool({"visible", "weak", "common"} & set(variable.linkage)))
            rows.append(
                f'{{"{variable.name}", {variable.size}, {max(1, variable.alignment)}, '
                f"{int(variable.space == 'const')}, {visible}, {int('extern' in variable.linkage)}, "
                f"{int('managed' in variable.attributes)}, {initial}, {len(data)}, {table}, {len(relocations)}}},"
            )
        lines.append("static const struct cs_variable variables[] = {" + "\n".join(rows) + "{0}};\n")
        return "\n".join(lines)

    def _kernel_tables(self) -> str:
        lines = []
        rows = []
        for k, name in enumerate(self.kernels):
            function = self.functions[name]
            parameters = kernel_parameters(function)
            params = ", ".join(f"{{{o}, {s}, {a}}}" for o, s, a in parameters) or "{0, 0, 0}"
            lines.append(f"static const struct cs_param params_{k}[] = {{{params}}};")
            parameter_bytes = parameters[-1][0] + parameters[-1][1] if parameters else 0
            req, most = _dimensions(function, "reqntid"), _dimensions(function, "maxntid")
            limit = (function.block_limit("maxnreg") or (0,))[0]
            cluster = _cluster(function)
            if name in self.refused:
                rows.append(
                    f'{{"{name}", CS_NO_PC, {len(parameters)}, {parameter_bytes}, 0, 0, 0, 0, 0, 0, 0, {req}, {most}, {limit}, '
                    f"{cluster}, params_{k}, 0, 0, 0, 0, 0, {_bytes(self.refused[name].encode())}}},"
                )
                continue
            reach = self.reached[name]
            reserved = RESERVED_SHARED if any(self.codes[n].values.reserved_shared for n in reach) else 0
            static, offsets = self._shared_layout(reach, reserved)
            lines.append(f"static const uint32_t shared_{k}[] = {{{', '.join(map(str, offsets)) or '0'}}};")
            used = sorted({x for n in reach for x in self.codes[n].values.variables})
            lines.append(f"static const uint32_t uses_{k}[] = {{{', '.join(map(str, used)) or '0'}}};")
            parts = self.parts[name]
            lines.append(f"static const uint32_t parts_{k}[] = {{{', '.join(map(str, parts)) or '0'}}};")
            frame = max(self.frame_end[n] for n in reach)
            local = max(self.local_end[n] for n in reach)
            registers = max(estimated_registers(self.codes[n].blocks) for n in reach)
            ordered = int(any(self.codes[n].observes for n in reach))
            recursive = int(any(self.codes[n].recursive or self.codes[n].values.stack for n in reach))
            rows.append(
                f'{{"{name}", {self.base[name]}u, {len(parameters)}, {parameter_bytes}, {static}, {local}, '
                f"{registers}, {frame}, {recursive}, {reserved}, {ordered}, {req}, {most}, {limit}, "
                f"{cluster}, params_{k}, shared_{k}, "
                f"{len(used)}, uses_{k}, {len(parts)}, parts_{k}, 0}},"
            )
        lines.append("static const struct cs_kernel kernels[] = {" + "\n".join(rows) + "{0}};\n")
        return "\n".join(lines)

    def _shared_layout(self, reach: list[str], reserved: int) -> tuple[int, list[int]]:
        """Return the static size of shared memory, and the offset of each shared variable of the module (0 if unused).

        The variables begin after `reserved` bytes, which the size does not include.
        """
        used = {x for n in reach for x in self.codes[n].values.shared_variables}
        offsets = [0] * len(self.shared)
        at = reserved
        dynamic = []
        for k, variable in enumerate(self.shared):
            if k not in used:
                continue
            if "extern" in variable.linkage or variable.size == 0:
                dynamic.append(k)
                continue
            at = _align(at, max(1, variable.alignment))
            offsets[k] = at
            at += variable.size
        align = max([SLOT, *(self.shared[k].alignment for k in dynamic)])
        for k in dynamic:
            offsets[k] = _align(at, align)
        return (_align(at, align) if dynamic and at else at) - reserved, offsets

    def _image(self, nfunctions: int) -> str:
        major, minor = self.module.version
        return (
            '__attribute__((visibility("default"))) const struct cs_image cudasim_image = {'
            f"CS_ABI, {major * 10 + minor}, {self.module.architecture}, {self.args}, {len(self.kernels)}, {nfunctions}, "
            f"{len(self.variables)}, {self.npcs}, {len(self.shared)}, kernels, functions, variables, owners, {int(self.virtual)}, "
            f"{len(self.portable)}, portable}};\n"
        )


def _part_table(rows: str, count: int, places: str) -> str:
    return (
        f"static const struct cs_code code[] = {{{rows}{{0}}}};\n"
        '__attribute__((visibility("default"))) const struct cs_part cudasim_part = '
        f"{{CS_ABI, {count}, code, {places}}};\n"
    )


def _dimensions(function: Function, name: str) -> str:
    return f"{{{', '.join(map(str, function.block_limit(name) or (0, 0, 0)))}}}"


def _cluster(function: Function) -> str:
    """Return the directives about clusters: the required shape, the most blocks, whether a launch must have a shape."""
    most = (function.block_limit("maxclusterrank") or (0,))[0]
    explicit = any(directive.name == "explicitcluster" for directive in function.directives)
    return f"{_dimensions(function, 'reqnctapercluster')}, {most}, {int(explicit)}"


def _bytes(data: bytes) -> str:
    """Return bytes as a string literal, which compiles quickly. Octal escapes cannot swallow the next character."""
    parts = [data[k : k + 1000] for k in range(0, len(data), 1000)]
    return "\n".join('"' + "".join(f"\\{b:03o}" for b in part) + '"' for part in parts)

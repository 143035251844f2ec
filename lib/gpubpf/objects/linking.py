"""Link an object's functions to whole programs: subprograms, references to maps, and CO-RE relocations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import Instruction
from gpubpf.errors import ImageError
from gpubpf.objects.core import Relocations
from gpubpf.objects.object_file import MOST_INSTRUCTIONS, Function, ObjectFile
from gpubpf.record import replace

_MOST_LINES = 1 << 20
_CALL = b.JMP | b.CALL
_KERNEL_CALL = 2  # `src` in a call of a function of the Linux kernel


class Linker:
    """Links programs.

    kernel: returns the object's relocations for the running kernel; called only if there are relocations.
    variables: number of a section of variables → name of the map that holds it."""

    def __init__(
        self, file: ObjectFile, variables: Mapping[int, str], kernel: Callable[[], Relocations]
    ) -> None:
        self._file, self._variables, self._kernel = file, variables, kernel
        first = file.programs[0]
        place = file.sections[first.section].name, first.start
        self._source = file.lines[place][0] if place in file.lines else ""

    def program(self, function: Function) -> tuple[Instruction, ...]:
        """Return a program's instructions, followed by those of its subprograms. Raises ImageError."""
        placed: dict[tuple[int, int], int] = {}
        waiting = [function]
        code: list[Instruction] = []
        calls: list[tuple[int, tuple[int, int]]] = []
        while waiting:
            one = waiting.pop()
            if (one.section, one.start) in placed:
                continue
            placed[one.section, one.start] = len(code)
            own = self._instructions(one)
            if len(code) + len(own) > MOST_INSTRUCTIONS:
                raise ImageError(
                    f"program {function.name} has more than {MOST_INSTRUCTIONS:,} instructions; split it"
                )
            for pc, i in enumerate(own):
                if i.opcode == _CALL and i.src == b.PSEUDO_CALL:
                    target = self._callee(one, pc, i)
                    calls.append((len(code) + pc, (target.section, target.start)))
                    waiting.append(target)
            code += own
        for pc, place in calls:
            code[pc] = replace(code[pc], imm=placed[place] - pc - 1)
        return tuple(code)

    def _callee(self, caller: Function, pc: int, i: Instruction) -> Function:
        """Return the function that a call calls: named by a relocation, or in the same section at a distance."""
        found = self._file.references.get((caller.section, caller.start + 8 * pc))
        if found is None:
            place = caller.section, caller.start + 8 * (pc + 1 + i.imm)
        else:  # clang writes -1 for a function with a symbol; otherwise the instruction has the offset in the section
            place = found.section, found.offset + 8 * (i.imm + 1)
        if place not in self._file.functions:
            raise ImageError(f"function {caller.name}, instruction {pc}, calls no function; compile it again")
        return self._file.functions[place]

    def _instructions(self, function: Function) -> list[Instruction]:
        file = self._file
        section = file.sections[function.section].name
        try:
            code = list(b.decode(file.code(function), self._lines(section, function)))
        except ValueError as error:
            raise ImageError(f"function {function.name}: {error}; compile it again") from None
        if not code:
            raise ImageError(f"function {function.name} is empty; write a body")
        for pc, i in enumerate(code):
            at = function.start + 8 * pc
            if i.opcode == b.LD_IMM64:
                code[pc] = self._referring(function, pc, i)
            if (relocation := file.core_relocations.get((section, at))) is not None:
                self._kernel().patched(code, pc, *relocation)
            if i.opcode == _CALL and i.src == _KERNEL_CALL:
                raise ImageError(
                    f"function {function.name} calls a function of the Linux kernel (kfunc), which is not supported"
                )
        return code

    def _referring(self, function: Function, pc: int, i: Instruction) -> Instruction:
        """Return an ld_imm64 that refers to a map or variable, by name."""
        found = self._file.references.get((function.section, function.start + 8 * pc))
        if found is None:
            if i.src:  # a file descriptor or another number that would mean an object of this process
                raise ImageError(
                    f"function {function.name}, instruction {pc}, refers to nothing; compile it again"
                )
            return i
        if found.kind == "map":
            return replace(i, src=b.PSEUDO_MAP, imm=0, map=found.name)
        if found.kind == "value":
            size = self._file.sections[found.section].size
            at = found.offset + (i.imm & 0xFFFFFFFF)
            if found.section not in self._variables or at > size:
                raise ImageError(
                    f"function {function.name}, instruction {pc}, refers to no variable; compile it again"
                )
            return replace(i, src=b.PSEUDO_VALUE, imm=at, map=self._variables[found.section])
        callee = self._file.functions.get((found.section, found.offset + (i.imm & 0xFFFFFFFF)))
        raise ImageError(
            f"function {function.name} takes the address of function {callee.name if callee else found.name};"
            " helpers that call functions back are not supported"
        )

    # --- source lines ---

    def _lines(self, section: str, function: Function) -> list[int]:
        """Return the line of each instruction. An instruction from a header has the line of the instruction before it."""
        lines, last = [], 0
        for at in range(function.start, function.start + function.size, 8):
            name, line, _ = self._file.lines.get((section, at), ("", 0, ""))
            last = line if name == self._source and line else last
            lines.append(last)
        return lines

    def text(self) -> str:
        """Return the source's lines that belong to instructions, each at its number; other lines are empty."""
        known = {
            line: text
            for name, line, text in self._file.lines.values()
            if name == self._source and 0 < line < _MOST_LINES
        }
        lines = [""] * max(known, default=0)
        for line, text in known.items():
            lines[line - 1] = text.replace("\n", " ")
        return "\n".join(lines)

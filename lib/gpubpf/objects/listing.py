"""The contents of an object, for `--ebpf`: its maps, and its programs as source lines with their instructions."""

from __future__ import annotations

from collections.abc import Iterator

from gpubpf.ebpf import disassembly
from gpubpf.ebpf.bytecode import BpfFunction, Program
from gpubpf.objects.loading import LoadedObject
from gpubpf.show import table


def lines(loaded: LoadedObject) -> Iterator[str]:
    """Yield the lines for people."""
    program = loaded.programs.program
    for one in program.maps.values():
        key, value = (table.count(size, "byte") for size in (one.key_size, one.value_size))
        yield (
            f"map {one.name}: {one.kind.replace('_', ' ')}, key {key}, value {value},"
            f" {one.max_entries:,} {'bytes' if one.kind == 'ringbuf' else 'entry' if one.max_entries == 1 else 'entries'}"
        )
    for name, place in loaded.places.items():
        function = program.functions[name]
        yield ""
        yield f"program {name}: section {place.section}, {table.count(len(function.instructions), 'instruction')}"
        yield from _code(program, function)


def _code(program: Program, function: BpfFunction) -> Iterator[str]:
    line = 0
    for pc, i in enumerate(function.instructions):
        if i.line != line:
            line = i.line
            yield f"  ; {line}: {program.quote(line)}"
        if not i.opcode:  # the second half of an ld_imm64
            continue
        yield f"  {pc:5}: {disassembly.text(i)}"

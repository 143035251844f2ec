"""What is in an object, for `--ebpf`: its maps, and its programs as instructions between the source lines that they are from."""

from __future__ import annotations

from collections.abc import Iterator

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import BpfFunction, Program
from gpubpf.ebpf.helpers import HELPERS
from gpubpf.objects.loading import LoadedObject


def lines(loaded: LoadedObject) -> Iterator[str]:
    """Yield the lines for people."""
    program = loaded.programs.program
    for one in program.maps.values():
        yield (
            f"map {one.name}: {one.kind.replace('_', ' ')}, key {one.key_size} bytes, value {one.value_size} bytes,"
            f" {one.max_entries:,} {'bytes' if one.kind == 'ringbuf' else 'entries'}"
        )
    for name, place in loaded.places.items():
        function = program.functions[name]
        yield ""
        yield f"program {name}: section {place.section}, {len(function.instructions)} instructions"
        yield from _code(program, function)


def _code(program: Program, function: BpfFunction) -> Iterator[str]:
    line = 0
    for pc, i in enumerate(function.instructions):
        if i.line != line:
            line = i.line
            yield f"  ; {line}: {program.quote(line)}"
        if not i.opcode:  # the second half of an ld_imm64
            continue
        what = ""
        if i.map is not None:
            what = f"{i.map}+{i.imm}" if i.src == b.PSEUDO_VALUE else i.map
        elif i.opcode == b.JMP | b.CALL and not i.src:
            what = HELPERS[i.imm].name if i.imm in HELPERS else f"helper {i.imm}"
        imm = 0 if i.map is not None else i.imm
        text = f"{pc:5}: {i.opcode:02x} dst=r{i.dst} src=r{i.src} off={i.offset} imm={imm}"
        yield f"  {text}  {what}".rstrip()

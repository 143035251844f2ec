"""Find the size of the records in ring buffers that an object file declares.

The kernel's ring buffers declare none, and bpftime's declare the largest that is possible. On a GPU all records of a ring have the
same room, so it should be no larger than what the programs write.
"""

from __future__ import annotations

from dataclasses import replace

from gpubpf.ebpf.bytecode import Program
from gpubpf.ebpf.maps import MapDefinition, record_stride, type_size
from gpubpf.verify.rules import check


def sized(program: Program) -> Program:
    """Return the program with the size of the largest record that device programs write to each ring. Raises VerifyError."""
    found: dict[str, int] = {}
    for function in program.device_functions:
        for call in check(program, function, sizing=True).calls.values():
            if call.map in program.maps and program.maps[call.map].kind == "ringbuf":
                found[call.map] = max(found.get(call.map, 0), call.size)
    made = {name: _resized(program.maps[name], size) for name, size in found.items()}
    return replace(program, maps={**program.maps, **made})


def _resized(ring: MapDefinition, size: int) -> MapDefinition:
    known = type_size(ring.value_type) == size
    small = replace(ring, value_size=size, value_type=ring.value_type if known else None)
    if not ring.value_size:
        return small  # its size is in bytes, not in records
    return replace(small, max_entries=ring.max_entries * record_stride(small) // record_stride(ring))

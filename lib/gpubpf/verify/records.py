"""Find the record size of the ring buffers that an object file declares.

The kernel's ring buffers do not declare a record size, and bpftime's declare the largest possible size. On a GPU, all records of a
ring take the same space, so the record size should be that of the largest record that the programs write.
"""

from __future__ import annotations

from gpubpf.ebpf.bytecode import Program
from gpubpf.ebpf.maps import MapDefinition, record_stride, type_size
from gpubpf.record import replace
from gpubpf.verify.rules import check


def sized(program: Program) -> Program:
    """Return the program, with each ring's record size set to the largest record that device programs write. Raises VerifyError."""
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

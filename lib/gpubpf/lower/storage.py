"""LLVM IR functions that work on shared maps: hash tables, ring buffers, and the table of blocks. LLVM inlines them.

Their code is in templates/*.ll, with placeholders for the values of the map and the target:

    $name                   a value, as text
    ; if warps … ; else … ; end     lines that depend on a condition
    ; for keys … ; end              lines repeated for each item of a list, with its values
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from gpubpf import own_files
from gpubpf.ebpf.maps import (
    BLOCK_PROBES,
    BLOCK_SLOTS,
    HASH_FACTOR,
    HASH_SEED,
    HEADER,
    MAX_PROBES,
    RING_MARGIN,
    RING_PAGE,
    RING_SHARD,
    STATE_BITS,
    MapDefinition,
    SlotState,
    chunks,
    pad8,
    record_stride,
)
from gpubpf.lower.backend import Backend

# How often an update tries again, after a pause, while another thread writes the value. On a GPU, all tries together take about a
# second, but the other thread needs only a few microseconds. The limit ensures that a launch cannot hang.
WAITS = 1 << 20
HASH_OPERATIONS = ("find", "delete", "update", "insert", "replace")
_TEMPLATES = Path(__file__).parent / "templates"
_SECTION = re.compile(r"; (if|for) (\w+)")


def ring_function(name: str, definition: MapDefinition, backend: Backend) -> str:
    """Return `{ i64 address of a record or 0, i32 its mark } name(i64 base, i32 multiprocessor)`, which reserves a record."""
    return _filled(
        "ring",
        backend,
        name=name,
        header_size=HEADER,
        shard_size=RING_SHARD,
        margin=RING_MARGIN,
        page_size=RING_PAGE,
        page_mask=RING_PAGE - 1,
        stride=record_stride(definition),
    )


def block_function(
    name: str, last: bool, backend: Backend, slots: int = BLOCK_SLOTS, probes: int = BLOCK_PROBES
) -> str:
    """Return `i1 name(i64 base, i64 launch, i64 block, i32 threads)`.

    The result is whether the calling thread is the first of its block to call the function; with `last`, whether it is the last.
    """
    return _filled("block", backend, name=name, last=last, slot_mask=slots - 1, probes=probes)


def hash_function(name: str, operation: str, definition: MapDefinition, backend: Backend) -> str:
    """Return `i64 name(i64 base, key parts…[, value parts…])` for one of HASH_OPERATIONS. Only the last three take a value."""
    keys, values = _parts(definition.key_size), _parts(definition.value_size)
    hashed, equal = str(HASH_SEED), "true"
    for part in keys:
        n = part["n"]
        part |= {"mixed": hashed, "word": f"%w{n}" if part["narrow"] else f"%k{n}", "equal_before": equal}
        hashed, equal = f"%h{n}", f"%kall{n}"
    parameters = ["i64 %base", *(f"i{part['bits']} %k{part['n']}" for part in keys)]
    bits = "0"
    for part in values:
        n = part["n"]
        part |= {"bits_before": bits, "value_word": f"%wide_value{n}" if part["narrow"] else f"%value{n}"}
        bits = f"%bits{n}"
    if operation in ("update", "insert", "replace"):
        parameters += [f"i{part['bits']} %value{part['n']}" for part in values]
    keys_at = HEADER + 8 * definition.slots
    return _filled(
        "hash",
        backend,
        name=name,
        parameters=", ".join(parameters),
        keys=keys,
        values=values,
        hash=hashed,
        factor=HASH_FACTOR - (1 << 64),
        equal=equal,
        value_bits=bits,
        state_bits=STATE_BITS,
        **{state.name: int(state) for state in SlotState},
        absent="0" if operation == "find" else "-2",
        claims=operation in ("update", "insert"),
        writes=operation in ("update", "replace"),
        **{word: operation == word for word in ("find", "insert", "delete")},
        header_size=HEADER,
        slot_mask=definition.slots - 1,
        probes=min(MAX_PROBES, definition.slots),
        waits=WAITS,
        keys_at=keys_at,
        key_stride=pad8(definition.key_size),
        values_at=keys_at + definition.slots * pad8(definition.key_size),
        value_stride=pad8(definition.value_size),
    )


def _parts(size: int) -> list[dict[str, Any]]:
    return [
        {"n": n, "offset": offset, "width": width, "bits": 8 * width, "narrow": width < 8}
        for n, (offset, width) in enumerate(chunks(size))
    ]


def _filled(template: str, backend: Backend, **values: Any) -> str:
    waves = bool(backend.join)
    fixed: dict[str, Any] = {name: getattr(backend, name) for name in ("pointer", "scope", "join", "pause")}
    fixed |= {"warps": backend.warps, "waves": waves, "together": backend.warps or waves}
    return "\n".join(_expanded(_lines(template), {**fixed, **values}))


@functools.cache
def _lines(template: str) -> tuple[str, ...]:
    return tuple(own_files.read(_TEMPLATES / f"{template}.ll").decode().splitlines())


def _expanded(lines: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Return the lines without comments, with the sections expanded as the values select."""
    result: list[str] = []
    rest = iter(lines)
    for line in rest:
        if (section := _SECTION.fullmatch(line)) is None:
            if line and not line.startswith(";"):
                result.append(Template(line).substitute(values))
            continue
        branches: list[list[str]] = [[], []]
        depth, otherwise = 1, 0
        for inner in rest:
            depth += bool(_SECTION.fullmatch(inner)) - (inner == "; end")
            if not depth:
                break
            if inner == "; else" and depth == 1:
                otherwise = 1
            else:
                branches[otherwise].append(inner)
        value = values[section[2]]
        if section[1] == "if":
            result += _expanded(branches[0 if value else 1], values)
        else:
            for item in value:
                result += _expanded(branches[0], {**values, **item})
    return result

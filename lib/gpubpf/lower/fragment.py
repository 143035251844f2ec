"""What lowering makes. Apart from the lowering, so that prebuilt programs start without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Argument:
    """A value that a fragment is given, in a register of PTX type `type` named `register`.

    kind `launch` (the launch id, or its distance from that at `replay`), `replay` (address of that word in GPU memory, or 0),
    `map_base` (address of the storage of `map`), `map_capacity` (threads, warps or blocks that the array by launch shape `map` has
    room for, below 2^32; of a site array sites | shards - 1 << 32), `param` (`width` bytes at `offset` of the `param` map `map`,
    zero-extended), `context` (what the injector supplies: `field` of bytecode.CONTEXTS), `kernel` (its number in the process),
    `epoch` (of allocations), `pid_tgid` (of the host thread that launched: process << 32 | thread);
    in host programs `helper` (address of the function that is helper number `offset`).
    """

    name: str
    type: str
    kind: str
    map: str = ""
    field: str = ""
    offset: int = 0
    width: int = 8

    @property
    def register(self) -> str:
        return f"%gpubpf_{self.name}"


@dataclass(frozen=True)
class Fragment:
    """A lowered device program.

    `ptx` is a block `{ … }` with its own registers and labels, left by falling out of its end; it reads its `arguments` from
    the registers that they name. It needs PTX 6.3 and sm_70. `registers` are the 32-bit registers it declares: virtual ones,
    ptxas needs far fewer. `formats`: printed texts by number (see maps.prints).
    """

    function: str
    ptx: str
    arguments: tuple[Argument, ...]
    registers: int = 0
    formats: Mapping[int, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "function": self.function,
            "ptx": self.ptx,
            "arguments": [asdict(argument) for argument in self.arguments],
            "registers": self.registers,
            "formats": {str(number): text for number, text in self.formats.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Fragment:
        return cls(
            value["function"],
            value["ptx"],
            tuple(Argument(**argument) for argument in value["arguments"]),
            value["registers"],
            {int(number): text for number, text in value["formats"].items()},
        )

"""The result of lowering a device program. It is separate from the lowering, which prebuilt programs do not import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpubpf.record import Record, asdict, field

KEPT_NUMBER = "%gpubpf_0again"  # the register in which a program keeps a number (`gpu_keep`)


class Argument(Record):
    """A value that a program receives. A fragment reads it from the register `register`, of PTX type `type`.

    Kinds:
        launch        the launch id; in a graph, the number to add to the id at `replay`
        replay        the address of a launch id in GPU memory; 0 outside of graphs
        map_base      the address of the storage of `map`
        map_capacity  the number of threads, warps or blocks that an instance of `map` has room for, below 2^32; for a site
                      array sites | shards - 1 << 32
        shard         the address of the values of the site array `map` for the thread's `group`; `width`: bytes of a value
        param         `width` bytes at `offset` in the `param` map `map`, zero-extended
        context       `field` of the context (bytecode.CONTEXTS), which the injector supplies
        group         the multiprocessor's number; with sampling, a hash that all threads of a block or warp share
        global_warp   the number of the warp in the grid, which the prologue of the kernel or function computes
        kernel        the number of the kernel in the process
        epoch         the launch's epoch of allocations
        pid_tgid      process << 32 | thread, for the host thread that launched
        time          on AMD GPUs: `field` of amdgcn.TIMES
        sm, warp_slot on AMD GPUs: from a hardware register
        shape         on AMD GPUs: `field` of the launch's shape (ntid.x … nctaid.z)
        register      on AMD GPUs: `field` of amdgcn.REGISTERS
        first_thread  on AMD GPUs: the number of the wave's first work-item in its workgroup
        helper        in host programs: the address of the C function for helper number `offset`
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


class Fragment(Record):
    """A lowered device program.

    ptx        a block `{ … }` with its own registers and labels. It reads its arguments from registers, ends at its closing brace, and
               needs PTX 6.3 and sm_70
    arguments  the arguments, and the registers that hold them
    registers  the number of 32-bit registers that the block declares; these are virtual, and ptxas needs far fewer
    formats    the texts that the program prints, by number (see maps.prints)
    seldom     the labels of the parts that the program marks as seldom executed (`gpu_seldom`)
    """

    function: str
    ptx: str
    arguments: tuple[Argument, ...]
    registers: int = 0
    formats: Mapping[int, str] = field(default_factory=dict)
    seldom: tuple[str, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether a thread may wait for another one: only updates of a hash do (templates/hash.ll), and only they have this load."""
        return ".acquire" in self.ptx

    @property
    def keeps(self) -> bool:
        """Whether the program sets KEPT_NUMBER."""
        return KEPT_NUMBER in self.ptx

    def to_json(self) -> dict[str, Any]:
        return {
            "function": self.function,
            "ptx": self.ptx,
            "arguments": [asdict(argument) for argument in self.arguments],
            "registers": self.registers,
            "formats": {str(number): text for number, text in self.formats.items()},
            "seldom": list(self.seldom),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Fragment:
        return cls(
            value["function"],
            value["ptx"],
            tuple(Argument(**argument) for argument in value["arguments"]),
            value["registers"],
            {int(number): text for number, text in value["formats"].items()},
            tuple(value["seldom"]),
        )

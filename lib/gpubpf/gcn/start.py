"""A wave's initial registers, the values saved for probes, and the values that a site sets for a probe, as assembly text."""

from __future__ import annotations

from collections.abc import Sequence

from gpubpf.errors import Refusal
from gpubpf.gcn.code_object import GcnKernel
from gpubpf.lower import amdgcn
from gpubpf.record import Record

# Values that the prologue saves, in the order of a probe's first registers (amdgcn.REGISTERS): launch block address (2), workgroup
# indices (3), the first lane's work-item, EXEC (2).
SAVED = amdgcn.KEPT
_INDICES, _FIRST, _LANES = 2, 5, 6
KEPT = 4  # VGPRs that hold the kernel's initial registers while the entry probe runs


class Save(Record):
    """Where the prologue saves values: in SGPRs from `sgpr` on or, if there are too few, in lanes of a VGPR."""

    sgpr: int
    vgpr: int | None

    def put(self, number: int, source: str) -> str:
        """Return the text that saves a register as value `number`."""
        if self.vgpr is None:
            return f"s_mov_b32 s{self.sgpr + number}, {source}"
        return f"v_writelane_b32 v{self.vgpr}, {source}, {number}"

    def get(self, number: int, to: int) -> str:
        """Return the text that restores value `number` to an SGPR."""
        if self.vgpr is None:
            return f"s_mov_b32 s{to}, s{self.sgpr + number}"
        return f"v_readlane_b32 s{to}, v{self.vgpr}, {number}"


class Start(Record):
    """The registers when a wave starts: as the kernel expects them, and as the prologue needs them.

    kernarg     the first register of the argument address
    indices     the registers of the workgroup indices
    moves       (from, to) of the moves between registers, in the order in which they must be done
    packed      whether one VGPR holds all work-item indices
    items       the work-item indices that the kernel requests: x (0), x and y (1), or all (2)
    sgprs       the number of initialized SGPRs
    resources   the new COMPUTE_PGM_RSRC2
    properties  the new kernel code properties of the descriptor
    """

    kernarg: int
    indices: tuple[int, int, int]
    moves: tuple[tuple[int, int], ...]
    sgprs: int
    resources: int
    properties: int
    packed: bool
    items: int

    @classmethod
    def of(cls, kernel: GcnKernel, packed: bool) -> Start:
        """Return the registers for a kernel. Raises Refusal if the argument address does not fit into the user SGPRs."""
        descriptor = kernel.descriptor
        kernarg = descriptor.register("kernarg")
        more = 0 if descriptor.has("kernarg") else 2
        users = descriptor.user_sgprs
        if users + more > 16:
            raise Refusal("all its user SGPRs are taken")
        moves = [(register + more, register) for register in range(kernarg, users) if more]
        old = users
        new = users + more
        indices = []
        for wanted in descriptor.workgroup_ids:
            indices.append(new)
            if wanted:
                moves += [(new, old)] if new != old else []
                old += 1
            new += 1
        for _ in range(descriptor.last_sgprs):
            moves += [(new, old)] if new != old else []
            old, new = old + 1, new + 1
        resources = descriptor.resources[1] & ~(31 << 1) & ~(3 << 11)
        resources |= (users + more) << 1 | 7 << 7 | 2 << 11  # enable all workgroup and work-item indices
        x, y, z = indices
        items = descriptor.resources[1] >> 11 & 3
        properties = descriptor.properties | 1 << 3
        return cls(kernarg, (x, y, z), tuple(moves), new, resources, properties, packed, items)

    def prologue(self, save: Save, wave: int, block_offset: int) -> str:
        """Return the text of the prologue. It may change SCC and the SGPRs after the initialized ones."""
        one, two = f"s{self.sgprs}", f"s{self.sgprs + 1}"
        lines = [f"v_readfirstlane_b32 {one}, v0"]
        for number in () if self.packed else (1, 2):
            lines += [
                f"v_readfirstlane_b32 {two}, v{number}",
                f"s_lshl_b32 {two}, {two}, {10 * number}",
                f"s_or_b32 {one}, {one}, {two}",
            ]
        # The order matters: the slots of the first values may be registers that are still in use here.
        lines += [
            save.put(_FIRST, one),
            *(save.put(_INDICES + n, f"s{register}") for n, register in enumerate(self.indices)),
            save.put(_LANES, "exec_lo"),
            *((save.put(_LANES + 1, "exec_hi"),) if wave == 64 else ()),
            f"s_add_u32 {one}, s{self.kernarg}, {block_offset:#x}",
            f"s_addc_u32 {two}, s{self.kernarg + 1}, 0",
            save.put(1, two),
            save.put(0, one),
            *(f"s_mov_b32 s{to}, s{source}" for source, to in self.moves),
            # v0 now holds all three work-item indices. The kernel may rely on seeing only those that it requested.
            *(
                (f"v_and_b32 v0, {(1 << 10 * (self.items + 1)) - 1:#x}, v0",)
                if self.packed and self.items < 2
                else ()
            ),
        ]
        return "\n".join(lines)


def keep(start: Start, vgpr: int) -> list[str]:
    """Return the text that saves the kernel's initial registers in KEPT VGPRs from `vgpr` on."""
    items = [f"v_mov_b32 v{vgpr + n}, v{n}" for n in range(KEPT - 1)]  # the work-item indices
    return items + [f"v_writelane_b32 v{vgpr + KEPT - 1}, s{n}, {n}" for n in range(start.sgprs)]


def restore(start: Start, vgpr: int, save: Save, wave: int) -> list[str]:
    """Return the text that restores the registers saved by `keep`, after a probe."""
    return [
        "s_waitcnt vmcnt(0) lgkmcnt(0)",
        *_all_lanes(save, wave),
        *(f"v_mov_b32 v{n}, v{vgpr + n}" for n in range(KEPT - 1)),
        *(f"v_readlane_b32 s{n}, v{vgpr + KEPT - 1}, {n}" for n in range(start.sgprs)),
        "s_nop 4",
    ]


def _all_lanes(save: Save, wave: int) -> list[str]:
    """Return the text that enables the lanes that the wave started with. The text changes s0 and s1."""
    if wave == 64:
        return [save.get(_LANES, 0), save.get(_LANES + 1, 1), "s_mov_b64 exec, s[0:1]"]
    return [save.get(_LANES, 0), "s_mov_b32 exec_lo, s0"]


def site(save: Save, wave: int, number: int, counters: Sequence[int] = ()) -> list[str]:
    """Return the text that sets the registers of a probe for site `number`."""
    return arrive(save, wave) + give(save, f"s_mov_b32 s{amdgcn.SITE}, {number:#x}", counters)


def arrive(save: Save, wave: int) -> list[str]:
    """Return the text that begins a site. The text waits for loads, which must not overwrite the probe's registers.

    On GFX10.1, changing SGPRs before a store has read them is a hazard. Compilers also avoid it with v_nop.
    """
    return ["s_waitcnt vmcnt(0) lgkmcnt(0)", "v_nop", *_all_lanes(save, wave)]


def give(save: Save, place: str, counters: Sequence[int]) -> list[str]:
    """Return the text that sets the registers of a probe in the active lanes.

    place: the instruction that sets the site's number
    counters: the VGPRs with the thread's work

    On GFX9, a memory access within five instructions of a vector write to its SGPR is a hazard (s_nop).
    """
    return [
        *(save.get(n, n) for n in range(_LANES)),
        place,
        *(f"v_mov_b32 v{n}, v{counter}" for n, counter in enumerate(counters)),
        *(() if save.vgpr is None else ("s_nop 4",)),
    ]

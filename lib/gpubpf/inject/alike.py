"""Find accesses that differ from an earlier one of the same basic block only by a constant distance, for `Probe.alike`.

    alike = Alike(moves_alike(probes))
    alike.enter()                                    # where a basic block or scope begins or ends
    alike.find(instruction, access, modulus)         # the site of an earlier access, or None
    alike.add(instruction, access, site)
    alike.overwrite(instruction)                     # after each instruction

`count_unlike` counts the accesses of a function that are not alike to an earlier access.

Two alike accesses differ only in the offset of their address, and no instruction between them overwrites the base register:
`ld.shared.f32 %f1, [%r1+64];` after `ld.shared.f32 %f2, [%r1];`. Unrolled loops over tiles have many alike accesses. A load and a
store may be alike, too, as in `a[i] += b[i]`, unless a program depends on which of both it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from gpubpf.ptx.access import Access, accesses, unaddressed_accesses, without_operands
from gpubpf.ptx.congruence import common_bits
from gpubpf.ptx.flow import find_names
from gpubpf.ptx.module import Address, Close, Function, Label, Open, PtxInstruction, Variable, with_spaces
from gpubpf.ptx.opcodes import facts
from gpubpf.record import replace

from .deferral import DeferredGroup
from .exits import synchronizes
from .probe_text import PtxProbe

_Key = tuple[str | None, bool, Access]


class Alike:
    """The accesses of the current basic block, with which later accesses are compared.

    moves: whether a load and a store may be alike (`moves_alike`)
    """

    def __init__(self, moves: bool) -> None:
        self._moves = moves
        self._found: dict[_Key, list[tuple[int, int]]] = {}  # offset in bytes and site of each access
        # The groups of deferred accesses (deferral.py), by predicate and whether it is negated.
        self.groups: dict[tuple[str | None, bool], DeferredGroup] = {}

    def enter(self) -> None:
        """Forget all accesses: other lanes may execute what follows, or names may mean something else."""
        self._found.clear()
        self.groups.clear()

    def find(self, instruction: PtxInstruction, access: Access, modulus: int) -> int | None:
        """Return the site of an earlier access whose distance to `access` is a multiple of `modulus` bytes; None without one."""
        key = self._key(instruction, access)
        if key is None:
            return None
        offset = access.address.offset
        return next((site for at, site in self._found.get(key, ()) if (offset - at) % modulus == 0), None)

    def add(self, instruction: PtxInstruction, access: Access, site: int) -> None:
        """Record an access that has a probe."""
        key = self._key(instruction, access)
        if key is not None:
            self._found.setdefault(key, []).append((access.address.offset, site))

    def overwrite(self, instruction: PtxInstruction) -> None:
        """Forget the accesses whose base register or predicate an instruction may overwrite.

        If lanes may reconverge at the instruction, forget all accesses: more lanes may execute what follows.
        """
        # Lanes also reconverge at mma.sync, ldmatrix.sync and others.
        together = "sync" in instruction.modifiers or synchronizes(instruction)
        known = facts(instruction)
        if together or known.control == "call" or known.result == "any":
            self.enter()
        if (
            (self._found or self.groups)
            and instruction.operands
            and not isinstance(instruction.operands[0], Address)
        ):
            written = {name.partition(".")[0] for name in find_names(instruction.operands[:1])}
            for key in [key for key in self._found if not written.isdisjoint(_registers(key))]:
                del self._found[key]
            for one in [one for one in self.groups if one[0] in written]:
                del self.groups[one]

    def _key(self, instruction: PtxInstruction, access: Access) -> _Key | None:
        """Return what two alike accesses have in common; None for accesses that are not compared."""
        address = access.address
        plain = access.kind in ("load", "store") and access.size is None and access.rows is None
        if not plain or address.base is None or address.coordinates or address.index is not None:
            return None
        same = replace(access, address=replace(address, offset=0))
        if self._moves:
            same = replace(same, kind="load", reads=True, writes=False)
        return instruction.predicate, instruction.negated, same


def moves_alike(probes: Collection[PtxProbe]) -> bool:
    """Return whether programs with `Probe.alike` do the same at a load as at a store.

    A program may read the effect if another one is attached to the accesses that are alike (`Probe.repeats`).
    """
    at_access = [p for p in probes if p.point == "access" and p.alike]
    repeated = {(p.kinds, p.spaces, p.kernels) for p in at_access if p.repeats}
    for probe in at_access:
        if probe.kinds and ("load" in probe.kinds) != ("store" in probe.kinds):
            return False
        if not probe.repeats:
            told = {"kind"} if (probe.kinds, probe.spaces, probe.kernels) in repeated else {"kind", "effect"}
            if any(a.kind == "context" and a.field in told for a in probe.program.arguments):
                return False
    return True


def count_unlike(
    function: Function, variables: Mapping[str, Variable], modulus: int, moves: bool
) -> Counter[Access]:
    """Return an upper bound on the number of accesses that need a probe, by access without its operands.

    variables: the variables of the module
    modulus: `Probe.alike`
    moves: whether a load and a store may be alike
    """
    bits = common_bits(function, variables)
    alike, found = Alike(moves), Counter[Access]()
    for index, (statement, spaces) in enumerate(with_spaces(function.body or (), variables)):
        if not isinstance(statement, PtxInstruction):
            if isinstance(statement, Label | Open | Close):
                alike.enter()
            continue
        for access in (*accesses(statement, declared_in=spaces.get), *unaddressed_accesses(statement)):
            if alike.find(statement, access, step_of(access, bits, modulus)) is None:
                found[without_operands(access)] += 1
                alike.add(statement, access, index)
        alike.overwrite(statement)
        if facts(statement).ends:
            alike.enter()
    return found


def step_of(access: Access, bits: Mapping[str, int], modulus: int) -> int:
    """Return the modulus for `Alike.find`, in bytes: 1 if the addresses of all lanes are equal modulo `modulus`, else `modulus`.

    bits: the result of `congruence.common_bits`
    """
    return 1 if modulus <= 1 << bits.get(access.address.base or "", 0) else modulus


def _registers(key: _Key) -> set[str]:
    predicate, _, access = key
    return {name.partition(".")[0] for name in (predicate, access.address.base) if name is not None}

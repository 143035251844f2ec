"""Count accesses in loops with registers, and run their programs once for many executions by the same lanes.

    deferred = deferred_accesses(function, module.variables)    # statements
    group = DeferredGroup(0, guards)
    group.sites.append(DeferredSite(...))
    group.head(again, in_loop)                       # before the first of its accesses
    group.flush(again)                               # where the thread leaves the kernel

An access is deferred if `ptx.lanes` proves how its address differs between lanes, and if its addresses are always the same modulo 32
(`ptx.steady`). Then each execution by the same lanes does what the first one did. A program with `Probe.keeps` runs at the first one
and keeps a number (`gpu_keep`). The others only add 1 to a register. Where other lanes execute the access, where a thread leaves the
kernel, and after LIMIT executions, the program at `access_again` gets the number and how often the access was executed.

Accesses of a basic block with the same predicate form a group: the same lanes execute them equally often. A group has two registers:
the lanes of its last execution, and the executions by these lanes since the last flush. The kept numbers are in local memory. In each
execution, the lanes find out together whether one of them was in another set of lanes before. So a set of lanes always begins and
ends its executions together, and each lane knows for itself what it has to add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpubpf.lower.fragment import KEPT_NUMBER
from gpubpf.ptx.access import Access, accesses
from gpubpf.ptx.congruence import common_bits
from gpubpf.ptx.flow import Flow
from gpubpf.ptx.lanes import MOST_BLOCKS, Lanes
from gpubpf.ptx.module import Function, PtxInstruction, Variable, with_spaces
from gpubpf.ptx.steady import Steady
from gpubpf.record import MutableRecord, Record, field

LIMIT = 1 << 16  # executions after which a group is flushed, so that readings in between see them
MOST_SITES = 32  # deferred accesses of a kernel, each with 8 bytes of local memory for each thread
MOST_WIDTH = 16  # bytes of a lane
SPACES = ("shared",)
ROOM = "gpubpf_again"  # a variable in local memory: the kept numbers
COUNT = "%gpubpf_0count"  # the register with the executions, for the program at `access_again`
_SELDOM, _OFTEN = "//gpubpf seldom", "//gpubpf often"


def deferred_accesses(function: Function, variables: Mapping[str, Variable], modulus: int) -> frozenset[int]:
    """Return the statements of a kernel whose access can be deferred.

    modulus: programs do not tell addresses apart that differ by a multiple of it; a power of two
    variables: the variables of the module
    """
    body = function.body or ()
    flow = Flow(body)
    if function.kind != "entry" or not flow.cycles or len(flow.blocks) > MOST_BLOCKS:
        return frozenset()
    in_loops = {index for number in flow.cycles for index in flow.blocks[number].instructions}
    found: dict[int, Access] = {}
    for index, (statement, spaces) in enumerate(with_spaces(body, variables)):
        if index in in_loops and isinstance(statement, PtxInstruction):
            some = accesses(statement, declared_in=spaces.get)
            if len(some) == 1 and _is_plain(some[0]):
                found[index] = some[0]
    if not found:
        return frozenset()
    lanes = Lanes(function, variables)
    steady, same = Steady(function, flow, lanes), common_bits(function, variables)
    bits = modulus.bit_length() - 1

    def is_deferred(index: int, access: Access) -> bool:
        base = access.address.base
        known = lanes.address(index, access.address)
        if known.reason or known.needs:
            return False
        return base is None or same.get(base, 0) >= bits or steady.bits(index, base) >= bits

    return frozenset(index for index, access in found.items() if is_deferred(index, access))


def _is_plain(access: Access) -> bool:
    """Return whether an access may be deferred if its address is known."""
    plain = access.size is None and access.rows is None and access.unless is None and access.lanes == 32
    address = access.address
    return (
        plain
        and access.kind in ("load", "store")
        and access.space in SPACES
        and access.width <= MOST_WIDTH
        and address.index is None
        and not address.coordinates
    )


class DeferredSite(Record):
    """A deferred access.

    site: the number of its site
    access: what it accesses
    place: the place of its kept number in ROOM
    """

    site: int
    access: Access
    place: int


class DeferredGroup(MutableRecord):
    """The deferred accesses of a basic block with the same predicate.

    number: identifies the group in its kernel
    guards: guards (`@!%p1 `) that are true in lanes that do not execute the accesses
    """

    number: int
    guards: tuple[str, ...] = ()
    sites: list[DeferredSite] = field(default_factory=list)

    @property
    def registers(self) -> dict[str, str]:
        """The registers that outlive a scope, with their types. Both of 32 bits are 0 at first."""
        return {self.mask: "b32", self.turns: "b32", self.fresh: "pred"}

    @property
    def mask(self) -> str:
        """The register with the lanes of the last execution."""
        return f"%gpubpf_0mask{self.number}"

    @property
    def turns(self) -> str:
        """The register with the number of executions since the last flush."""
        return f"%gpubpf_0turns{self.number}"

    @property
    def fresh(self) -> str:
        """The predicate: in this execution, the programs of the group's accesses run."""
        return f"%gpubpf_0fresh{self.number}"

    def head(self, again: Callable[[DeferredSite], str], remarks: bool) -> str:
        """Return the text before the first access of the group.

        again: returns the text that runs the program for earlier executions of an access
        remarks: whether to mark the seldom executed part for `cost.tallied`
        """
        now, late = "%gpubpf_0now", "%gpubpf_0late"
        lines = ["{", f".reg .b32 {now};", f".reg .pred {late};"]
        if self.guards:
            lines += [f"setp.ne.u32 {self.fresh}, 0, 0;", *(f"{one}bra $gpubpf_over;" for one in self.guards)]
        lines += [
            f"activemask.b32 {now};",
            f"setp.ge.u32 {late}, {self.turns}, {LIMIT};",
            f"setp.ne.or.b32 {self.fresh}, {now}, {self.mask}, {late};",
            f"vote.sync.any.pred {self.fresh}, {self.fresh}, {now};",
            f"@!{self.fresh} bra $gpubpf_known;",
            *([_SELDOM] if remarks else []),
            self.flush(again),
            f"mov.b32 {self.mask}, {now};",
            f"mov.b32 {self.turns}, 0;",
            *([_OFTEN] if remarks else []),
            "$gpubpf_known:",
            f"add.u32 {self.turns}, {self.turns}, 1;",
            *(["$gpubpf_over:"] if self.guards else []),
            "}",
        ]
        return "\n".join(lines)

    def flush(self, again: Callable[[DeferredSite], str]) -> str:
        """Return the text that adds the executions since the last flush. `again`: as in `head`."""
        none, count = "%gpubpf_0none", COUNT
        lines = ["{", f".reg .pred {none};", f".reg .b64 {KEPT_NUMBER}, {count};"]
        lines += [f"setp.eq.u32 {none}, {self.turns}, 0;", f"@{none} bra $gpubpf_flushed;"]
        lines.append(f"cvt.u64.u32 {count}, {self.turns};")
        for site in self.sites:
            lines += [
                "{",
                f"ld.local.b64 {KEPT_NUMBER}, [{ROOM}+{8 * site.place}];",
                f"setp.eq.u64 {none}, {KEPT_NUMBER}, 0;",
                f"@{none} bra $gpubpf_skipped;",
                again(site),
                "$gpubpf_skipped:",
                "}",
            ]
        return "\n".join([*lines, "$gpubpf_flushed:", "}"])


def stored(site: DeferredSite) -> str:
    """Return the text that stores the number that a program has kept."""
    return f"st.local.b64 [{ROOM}+{8 * site.place}], {KEPT_NUMBER};"

"""Count accesses in loops with registers, and run their programs once for many executions by the same lanes.

    found = deferrable(function, module.variables, 32)
    group = DeferredGroup(0, guards)                 # accesses in found.proven
    group.sites.append(DeferredSite(17, access, 0))
    group.head(again, remarks=False)                 # before the first access of the group
    checked = CheckedAccess(0, DeferredSite(18, access, 1))  # an access in found.checked
    group.flush(again), checked.flush(again)         # where the thread leaves the kernel

A program with `Probe.keeps` runs at the first execution and keeps a number (`gpu_keep`), in local memory. Further executions that do
the same only add 1 to a register. Where the thread leaves the kernel, and after LIMIT executions, the program at `access_again` gets
the number and the count.

Proven accesses: `ptx.lanes` proves how the address differs between lanes, and `ptx.steady` that it is always the same modulo 32.
Then each execution by the same lanes does the same. Those of a basic block with the same predicate form a group: the same lanes
execute them equally often. A group has two registers: the lanes of its last execution, and the executions by these lanes since
the last flush. In each execution, the lanes find out together whether one of them was in another set of lanes before. So a set of
lanes always begins and ends its executions together, and each lane knows for itself what it has to add.

Checked accesses: `ptx.lanes` knows how the address differs between lanes, under a condition. Each execution compares the lanes'
distances from their first addresses, so the condition need not hold. Only executions by all lanes of the warp count. Others, and
those that differ from the first one, run the usual programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gpubpf.lower.fragment import KEPT_NUMBER
from gpubpf.ptx import lane_terms as terms
from gpubpf.ptx.access import Access, accesses
from gpubpf.ptx.congruence import common_bits
from gpubpf.ptx.flow import Flow
from gpubpf.ptx.lanes import MOST_BLOCKS, Lanes
from gpubpf.ptx.module import Function, PtxInstruction, Variable, with_spaces
from gpubpf.ptx.steady import Steady
from gpubpf.record import MutableRecord, Record, field

from .probe_text import AT

LIMIT = 1 << 16  # executions after which a group is flushed, so that readings in between see them
MOST_SITES = 32  # deferred accesses of a kernel, each with 8 bytes of local memory for each thread
MOST_WIDTH = 16  # bytes of a lane
SPACES = ("global", "shared")
MOST_CHECKED = 8  # checked accesses of a kernel, each with 5 registers
ROOM = "gpubpf_again"  # a variable in local memory: the kept numbers
COUNT = "%gpubpf_0count"  # the register with the executions, for the program at `access_again`
_SELDOM, _OFTEN = "//gpubpf seldom", "//gpubpf often"


class Deferrable(Record):
    """The statements of a kernel whose access can be deferred.

    proven: known to do the same in each execution by the same lanes
    checked: known to do so if one comparison holds, which each execution makes
    """

    proven: frozenset[int] = frozenset()
    checked: frozenset[int] = frozenset()


NONE = Deferrable()


def deferrable(function: Function, variables: Mapping[str, Variable], modulus: int) -> Deferrable:
    """Return which accesses of a kernel can be deferred.

    modulus: programs do not tell addresses apart that differ by a multiple of it; a power of two
    variables: the variables of the module
    """
    body = function.body or ()
    flow = Flow(body)
    if function.kind != "entry" or not flow.cycles or len(flow.blocks) > MOST_BLOCKS:
        return NONE
    in_loops = {index for number in flow.cycles for index in flow.blocks[number].instructions}
    found: dict[int, Access] = {}
    for index, (statement, spaces) in enumerate(with_spaces(body, variables)):
        if index in in_loops and isinstance(statement, PtxInstruction):
            some = accesses(statement, declared_in=spaces.get)
            if len(some) == 1 and _is_plain(some[0]):
                found[index] = some[0]
    if not found:
        return NONE
    lanes = Lanes(function, variables)
    steady, same = Steady(function, flow, lanes), common_bits(function, variables)
    bits = modulus.bit_length() - 1
    # Then a warp may have lanes of several rows, whose requests cost more.
    in_rows = function.mentions("%tid.y")
    proven: set[int] = set()
    checked: set[int] = set()
    for index, access in found.items():
        base, known = access.address.base, lanes.address(index, access.address)
        if known.reason:
            continue
        varying = terms.split(known.sum)[0]
        if access.space == "global" and not varying[1]:
            continue  # the usual program marks new bytes of a broadcast once, not in each lane
        alike = terms.zeros(varying) >= bits or (base is not None and same.get(base, 0) >= bits)
        if not known.needs and (alike or base is None or steady.bits(index, base) >= bits):
            proven.add(index)
        elif in_rows or not _is_usual(varying, access.width):
            checked.add(index)
    return Deferrable(frozenset(proven), frozenset(checked))


def _is_usual(varying: terms.Sum, width: int) -> bool:
    """Return whether each lane of a row begins where the lane before ends. Programs treat requests of one row first."""
    return varying in (terms.scale(terms.atom(of), width) for of in (("tid", 0), ("lane",)))


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
        none = "%gpubpf_0none"
        lines = ["{", f".reg .pred {none};", f".reg .b64 {KEPT_NUMBER}, {COUNT};"]
        lines += [f"setp.eq.u32 {none}, {self.turns}, 0;", f"@{none} bra $gpubpf_flushed;"]
        lines.append(f"cvt.u64.u32 {COUNT}, {self.turns};")
        for site in self.sites:
            lines += _added(site, again)
        return "\n".join([*lines, "$gpubpf_flushed:", "}"])


class CheckedAccess(MutableRecord):
    """A deferred access whose executions compare addresses. It counts requests of all lanes of the warp.

    number: identifies the access in its kernel
    site: the access
    """

    number: int
    site: DeferredSite

    @property
    def registers(self) -> dict[str, str]:
        """The registers that outlive a scope, with their types."""
        return {self.first: "b64", self.turns: "b32", self.modulus: "b32"}

    @property
    def first(self) -> str:
        """The register with the lane's address in the execution whose numbers the lanes keep."""
        return f"%gpubpf_0first{self.number}"

    @property
    def turns(self) -> str:
        """The register with the number of counted executions, minus 1. So it is -1 at first."""
        return f"%gpubpf_0further{self.number}"

    @property
    def modulus(self) -> str:
        """The register with the bits of a distance that must be 0 in executions that count."""
        return f"%gpubpf_0modulus{self.number}"

    def text(
        self,
        guards: Sequence[str],
        where: Sequence[str],
        keep: str,
        ordinary: str,
        marks: str,
        again: Callable[[DeferredSite], str],
        modulus: int,
    ) -> str:
        """Return the probes of the access.

        guards: guards (`@!%p1 `) that are true in lanes that do not execute the access
        where: instructions that put the address into AT
        keep: the text that runs the program that keeps a number, and stores the number
        ordinary: the text that runs the programs for an execution that does not count
        marks: the text that runs other programs for an execution that counts
        again: as in `DeferredGroup.head`
        modulus: as in `deferrable`
        """
        now, low, away, known, fresh = (f"%gpubpf_0{n}" for n in ("now", "rest", "away", "known", "fresh"))
        lines = ["{", f".reg .b32 {now}, {low};", f".reg .b64 {AT}, {away};", f".reg .pred {known}, {fresh};"]
        lines += [f"{one}bra $gpubpf_done;" for one in guards]
        lines += [
            *where,
            f"activemask.b32 {now};",
            f"sub.s64 {away}, {AT}, {self.first};",
            f"match.all.sync.b64 {low}|{known}, {away}, {now};",
            f"cvt.u32.u64 {low}, {away};",
            f"and.b32 {low}, {low}, {self.modulus};",
            f"setp.eq.and.u32 {known}, {low}, 0, {known};",
            f"setp.eq.and.s32 {known}, {now}, -1, {known};",
            f"setp.lt.and.u32 {known}, {self.turns}, {LIMIT}, {known};",
            f"@{known} add.u32 {self.turns}, {self.turns}, 1;",
            f"@{known} bra $gpubpf_counted;",
            f"setp.eq.s32 {fresh}, {now}, -1;",
            f"setp.eq.and.s32 {fresh}, {self.turns}, -1, {fresh};",
            f"@!{fresh} bra $gpubpf_ordinary;",
            f"mov.b64 {self.first}, {AT};",
            f"mov.b32 {self.turns}, 0;",
            f"and.b64 {away}, {AT}, {modulus - 1};",
            f"match.all.sync.b64 {low}|{known}, {away}, {now};",
            f"selp.b32 {self.modulus}, 0, {modulus - 1}, {known};",
            keep,
            "bra $gpubpf_counted;",
            "$gpubpf_ordinary:",
            f"setp.lt.u32 {fresh}, {self.turns}, {LIMIT};",
            f"@{fresh} bra $gpubpf_few;",
            self.flush(again),
            f"mov.b32 {self.turns}, -1;",
            "$gpubpf_few:",
            ordinary,
            "bra $gpubpf_done;",
            "$gpubpf_counted:",
            marks,
            "$gpubpf_done:",
            "}",
        ]
        return "\n".join(line for line in lines if line)

    def flush(self, again: Callable[[DeferredSite], str]) -> str:
        """Return the text that adds the counted executions. `again`: as in `DeferredGroup.head`."""
        none = "%gpubpf_0none"
        lines = ["{", f".reg .pred {none};", f".reg .b64 {KEPT_NUMBER}, {COUNT};"]
        lines += [f"setp.eq.s32 {none}, {self.turns}, -1;", f"@{none} bra $gpubpf_flushed;"]
        lines += [f"cvt.u64.u32 {COUNT}, {self.turns};", f"add.s64 {COUNT}, {COUNT}, 1;"]
        return "\n".join([*lines, *_added(self.site, again), "$gpubpf_flushed:", "}"])


def _added(site: DeferredSite, again: Callable[[DeferredSite], str]) -> list[str]:
    """Return the lines that run the program for COUNT executions, in lanes that kept a number."""
    none = "%gpubpf_0none"
    return [
        "{",
        f"ld.local.b64 {KEPT_NUMBER}, [{ROOM}+{8 * site.place}];",
        f"setp.eq.u64 {none}, {KEPT_NUMBER}, 0;",
        f"@{none} bra $gpubpf_skipped;",
        again(site),
        "$gpubpf_skipped:",
        "}",
    ]


def stored(site: DeferredSite) -> str:
    """Return the text that stores the number that a program has kept."""
    return f"st.local.b64 [{ROOM}+{8 * site.place}], {KEPT_NUMBER};"

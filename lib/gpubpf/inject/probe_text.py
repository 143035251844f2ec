"""Build the text of probes: a fragment with its arguments, and the code around it at a memory access.

filler = Filler(block)
filler.text(probe, {"site": "7"})
filler.access(probes, access, 7, ["@!%p1 "], [f"mov.b64 {AT}, %rd1;"])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from gpubpf.ebpf.bytecode import KINDS, READS, SPACES, UNADDRESSED_SPACES, WRITES
from gpubpf.ebpf.maps import SHARDS_SHIFT
from gpubpf.errors import Error
from gpubpf.lower.fragment import KEPT_NUMBER
from gpubpf.lower.launch_block import LaunchBlock, map_of
from gpubpf.ptx.access import Access, Rows
from gpubpf.ptx.symbols import LAUNCH

from .cost import remarked
from .sampling import GROUP, SKIPS
from .values import PtxProbe

if TYPE_CHECKING:
    from gpubpf.lower.fragment import Argument, Fragment


# The points that a thread reaches many times.
FREQUENT = ("access", "basic_block", "branch", "value", "float", "instruction")
AGAIN = "access_again"  # the point for executions of deferred accesses (deferral.py)
# A probe at one of these divides a basic block of the original. ptxas contracts products and sums within a block (contraction.py).
DIVIDING = ("access", "value", "barrier_arrive", "barrier_leave")
# Programs at these points see the result of each product and each sum, so ptxas must not contract them.
SEEING_RESULTS = ("float", "instruction")
# Spaces that a generic address may point to. Constants are excluded, since the copy accesses them in global memory.
_GENERIC = frozenset({"global", "shared", "local"})
# A digit after `%gpubpf_` keeps these registers apart from those of the fragments' arguments.
AT = "%gpubpf_0at"
# The number of the warp in its grid, and the launch id. The prologue sets both if a program reads the number of the warp.
GLOBAL_WARP = "%gpubpf_0warp"
LAUNCH_ID = "%gpubpf_0launch"
BYTES = "%gpubpf_0bytes"
_ACTIVE = {"active": "%gpubpf_0active"}
_OVER = "$gpubpf_over"
_ELSEWHERE = "$gpubpf_elsewhere"
_SKIPPED = "$gpubpf_skipped"
# Fields of the context with few values. Functions that hold programs, or parts of programs, are made for each of the values.
_FEW_VALUES = ("width", "effect", "kind", "space")


class Filler:
    """Fills in the arguments of fragments. Arguments from the launch block are the same everywhere."""

    def __init__(
        self,
        block: LaunchBlock,
        called: Callable[[Fragment, Mapping[str, str]], str | None] = lambda fragment, known: None,
        parameters: bool = False,
        clusters: bool = False,
        remarks: bool = False,
    ) -> None:
        """Prepare for a module with the launch block `block`.

        called: returns the text to inline for a fragment that became a function, or whose parts did; None for any other fragment. It
                is given the fields of the context that are known numbers, by name
        parameters: whether generic addresses may point to kernel parameters
        clusters: whether generic addresses may point to shared memory of other blocks
        remarks: whether to mark seldom executed parts for `cost.tallied`
        """
        self.block = block
        self._called = called
        self.parameters = parameters
        self.clusters = clusters
        self.remarks = remarks
        self._known: dict[int, tuple[PtxProbe, str, tuple[tuple[str, str, int], ...]]] = {}

    def scope(self, probe: PtxProbe, lines: Sequence[str]) -> str:
        """Return the lines of a probe in a scope. If the program is sampled, threads that are not chosen skip the scope."""
        skip, end = ([f"@{SKIPS} bra {_SKIPPED};"], [f"{_SKIPPED}:"]) if probe.checks_choice else ([], [])
        return "\n".join(["{", *skip, *lines, *end, "}"])

    def text(self, probe: PtxProbe, context: Mapping[str, str]) -> str:
        """Return a fragment in a scope that declares and sets its arguments. `context`: field → number or 64-bit register."""
        _, start, fields = self._parts(probe)
        lines = [start]
        for register, field, bits in fields:
            if field not in context:
                raise Error(
                    f"a device program reads the context field {field!r}, which {probe.point} does not have"
                )
            value = context[field]
            if bits == 64 or not value.startswith("%"):
                lines.append(f"mov.b{bits} {register}, {value};")
            else:
                lines.append(f"cvt.u{bits}.u64 {register}, {value};")
        read = {field for _, field, _ in fields}
        known = {f: context[f] for f in _FEW_VALUES if f in read and not context[f].startswith("%")}
        ptx = self._called(probe.program, known) or probe.program.ptx.strip()
        lines.append(remarked(probe.program, ptx) if self.remarks else ptx)
        return "\n".join([*lines, "}"])

    def basic_block(self, probe: PtxProbe, fields: Mapping[str, int]) -> str:
        """Return a fragment at the beginning of a basic block. `fields`: the fields of the context, except `active`."""
        return self.scope(probe, [*self._active(probe), self.text(probe, _numbers(fields) | _ACTIVE)])

    def branch(self, probe: PtxProbe, fields: Mapping[str, int], condition: str) -> str:
        """Return a fragment before a branch.

        fields: the fields of the context, except `active` and `taken`
        condition: the predicate operand (`!%p1`) that is true in lanes that take the branch
        """
        lines = self._active(probe, "taken")
        if self.reads(probe, "taken"):
            lines += [
                ".reg .b32 %gpubpf_0going;",
                ".reg .b64 %gpubpf_0taken;",
                f"vote.sync.ballot.b32 %gpubpf_0going, {condition}, %gpubpf_0mask;",
                "cvt.u64.u32 %gpubpf_0taken, %gpubpf_0going;",
            ]
        context = _numbers(fields) | {"taken": "%gpubpf_0taken"} | _ACTIVE
        return self.scope(probe, [*lines, self.text(probe, context)])

    def _active(self, probe: PtxProbe, *fields: str) -> list[str]:
        """Return instructions that set the register of `active`, if the fragment reads `active` or one of `fields`."""
        if not self.reads(probe, "active", *fields):
            return []
        return [
            ".reg .b32 %gpubpf_0mask;",
            ".reg .b64 %gpubpf_0active;",
            "activemask.b32 %gpubpf_0mask;",
            "cvt.u64.u32 %gpubpf_0active, %gpubpf_0mask;",
        ]

    def reads(self, probe: PtxProbe, *fields: str) -> bool:
        """Return whether the fragment reads one of these fields of its context."""
        return any(field in fields for _, field, _ in self._parts(probe)[2])

    def reads_any(self, probes: Iterable[PtxProbe], *fields: str) -> bool:
        """Return whether one of the fragments reads one of these fields of its context."""
        return any(self.reads(probe, *fields) for probe in probes)

    def _parts(self, probe: PtxProbe) -> tuple[PtxProbe, str, tuple[tuple[str, str, int], ...]]:
        """Return the probe, the text that is the same everywhere, and the context arguments as (register, field, bits)."""
        found = self._known.get(id(probe))
        if found is None:
            lines = ["{"]
            fields = []
            for argument in probe.program.arguments:
                lines.append(f".reg .{argument.type} {argument.register};")
                if argument.kind == "context":
                    fields.append((argument.register, argument.field, int(argument.type[1:])))
            for argument in probe.program.arguments:
                if argument.kind == "shard" and probe.point in (
                    *FREQUENT,
                    AGAIN,
                ):  # the prologue has computed it
                    lines.append(f"mov.b64 {argument.register}, {shard_register(argument, probe)};")
                elif argument.kind == "shard":
                    lines.append(self.shard(argument, probe, argument.register))
                elif argument.kind == "global_warp":
                    lines.append(f"mov.b32 {argument.register}, {GLOBAL_WARP};")
                elif argument.kind == "launch" and identifies_warp(probe):
                    lines.append(f"mov.b64 {argument.register}, {LAUNCH_ID};")
                elif argument.kind == "replay" and identifies_warp(probe):
                    lines.append(f"mov.b64 {argument.register}, 0;")
                elif argument.kind == "group":
                    lines.append(f"mov.b32 {argument.register}, {_group(probe)};")
                elif argument.kind != "context":
                    offset, width = self._word(argument)
                    # a narrow value is zero-extended into a wider register
                    bits = 8 * min(width, int(argument.type[1:]) // 8)
                    lines.append(f"ld.param.u{bits} {argument.register}, [{LAUNCH}+{offset}];")
            found = self._known[id(probe)] = probe, "\n".join(lines), tuple(fields)
        return found

    def shard(self, argument: Argument, probe: PtxProbe, register: str) -> str:
        """Return instructions that compute a program's argument of kind `shard`."""
        base, sites = self.block.bases[map_of(argument)], self.block.capacities[map_of(argument)]
        shard, some, offset = "%gpubpf_0number", "%gpubpf_0some", "%gpubpf_0offset"
        lines = [
            "{",
            f".reg .b32 {shard}, {some};",
            f".reg .b64 {offset};",
            f"mov.u32 {shard}, {_group(probe)};",
            f"ld.param.u32 {some}, [{LAUNCH}+{sites + SHARDS_SHIFT // 8}];",
            f"and.b32 {shard}, {shard}, {some};",
            f"ld.param.u32 {some}, [{LAUNCH}+{sites}];",
            f"mul.lo.u32 {shard}, {shard}, {some};",
            f"ld.param.u64 {register}, [{LAUNCH}+{base}];",
            f"mul.wide.u32 {offset}, {shard}, {argument.width};",
            f"add.s64 {register}, {register}, {offset};",
            "}",
        ]
        return "\n".join(lines)

    @property
    def _shared(self) -> str:
        return "shared::cluster" if self.clusters else "shared"

    def _word(self, argument: Argument) -> tuple[int, int]:
        """Return the offset of an argument in the launch block and its size, in bytes. Raises Error for an unknown kind."""
        block = self.block
        if argument.kind == "param":
            return block.params[map_of(argument)][0] + argument.offset, argument.width
        if argument.kind == "map_base":
            return block.bases[map_of(argument)], 8
        if argument.kind == "map_capacity":
            return block.capacities[map_of(argument)], 8
        words = {
            "launch": block.launch_id,
            "replay": block.replay,
            "pid_tgid": block.pid_tgid,
            "kernel": block.kernel,
            "epoch": block.epoch,
        }
        offset = words.get(argument.kind)
        if offset is None:
            raise Error(f"a device program reads {argument.kind!r}, which the launch block does not have")
        return offset, 8

    def access(
        self,
        probes: Sequence[PtxProbe],
        access: Access,
        site: int,
        guards: Sequence[str],
        address: Sequence[str],
        size: Sequence[str] = (),
        more: Mapping[str, str] = MappingProxyType({}),
        setup: Sequence[str] = (),
        kept: str = "",
    ) -> str:
        """Return the probes at one access, in a scope. Lanes that do not access memory skip the scope.

        guards   guards (`@%p1 `) that are true in lanes that do not access memory; sampling adds a guard for threads that are not
                 chosen
        address  instructions that put the address into the 64-bit register AT
        size     instructions that put the number of bytes into BYTES, if the access has no fixed width
        more     further context fields
        setup    instructions that set the registers of `more`
        kept     the instruction that stores the number that the program keeps, if the program keeps one
        """
        guards = [*([f"@{SKIPS} "] if any(p.checks_choice for p in probes) else []), *guards]
        lines = [
            "{",
            *([f".reg .b64 {KEPT_NUMBER};"] if kept else []),
            *(f"{condition}bra {_OVER};" for condition in guards),
        ]
        if access.lanes < 32:
            lines += [
                ".reg .b32 %gpubpf_0lane;",
                ".reg .pred %gpubpf_0beyond;",
                "mov.u32 %gpubpf_0lane, %laneid;",
            ]
            lines += [
                f"setp.ge.u32 %gpubpf_0beyond, %gpubpf_0lane, {access.lanes};",
                f"@%gpubpf_0beyond bra {_OVER};",
            ]
        if size:
            lines += [f".reg .b64 {BYTES};", ".reg .pred %gpubpf_0none;", *size]
            lines += [f"setp.eq.u64 %gpubpf_0none, {BYTES}, 0;", f"@%gpubpf_0none bra {_OVER};"]
        context = {
            "site": str(site),
            "kind": str(KINDS.index(access.kind)),
            "width": BYTES if size else str(access.width),
            "effect": str(effect(access)),
            "address": AT,
            **_ACTIVE,
            **more,
        }
        generic = access.space == "generic"
        located = generic and any(self.reads(p, "address", "space") or not _everywhere(p) for p in probes)
        if located or (generic and self.parameters) or any(self.reads(p, "address") for p in probes):
            lines += [f".reg .b64 {AT};", *address]
        if generic and self.parameters:
            lines += [".reg .pred %gpubpf_0param;", f"isspacep.param %gpubpf_0param, {AT};"]
            lines.append(f"@%gpubpf_0param bra {_OVER};")
        if located:
            lines += [line.replace("shared::any", self._shared) for line in _LOCATED]
            context |= {"address": "%gpubpf_0offset", "space": "%gpubpf_0space"}
        elif not generic:
            context["space"] = str((*SPACES, *UNADDRESSED_SPACES).index(access.space))
        lines += setup
        for probe in probes:
            elsewhere = _elsewhere(probe) if generic else ()
            lines += ["{", *elsewhere, *self._active(probe)]
            lines += [self.text(probe, context), *([f"{_ELSEWHERE}:"] if elsewhere else []), "}"]
        lines += [kept] if kept else []
        if guards or size or access.lanes < 32 or (generic and self.parameters):
            lines.append(f"{_OVER}:")
        lines.append("}")
        return "\n".join(lines)

    def result(
        self,
        probes: Sequence[PtxProbe],
        guards: Sequence[str],
        setup: Sequence[str],
        context: Mapping[str, str],
    ) -> str:
        """Return the probes after an instruction, in a scope. Lanes that do not execute the instruction skip the scope.

        guards, setup  as in `access`
        context        all fields of the context except `active`
        """
        guards = [*([f"@{SKIPS} "] if any(p.checks_choice for p in probes) else []), *guards]
        lines = ["{", *(f"{condition}bra {_OVER};" for condition in guards), *setup]
        for probe in probes:
            lines += ["{", *self._active(probe), self.text(probe, {**context, **_ACTIVE}), "}"]
        return "\n".join([*lines, *([f"{_OVER}:"] if guards else []), "}"])


def identifies_warp(probe: PtxProbe) -> bool:
    """Return whether a program reads the number of the warp in its grid."""
    return any(argument.kind == "global_warp" for argument in probe.program.arguments)


def _group(probe: PtxProbe) -> str:
    """Return the register whose low bits select the part of a map that a program uses (gpu_group)."""
    return GROUP if probe.sampled else "%smid"


def shard_register(argument: Argument, probe: PtxProbe) -> str:
    """Return the register that a function's prologue sets for probes at FREQUENT points."""
    return f"%gpubpf_0shard{'_sampled' if probe.sampled else ''}_{map_of(argument)}"


# Compute the space and offset of a generic address. shared::any is replaced by shared::cluster or shared.
_LOCATED = (
    ".reg .pred %gpubpf_0shared, %gpubpf_0local;",
    ".reg .b64 %gpubpf_0space, %gpubpf_0offset, %gpubpf_0other;",
    f"isspacep.shared::any %gpubpf_0shared, {AT};",
    f"isspacep.local %gpubpf_0local, {AT};",
    f"cvta.to.shared::any.u64 %gpubpf_0other, {AT};",
    f"selp.b64 %gpubpf_0offset, %gpubpf_0other, {AT}, %gpubpf_0shared;",
    f"cvta.to.local.u64 %gpubpf_0other, {AT};",
    "selp.b64 %gpubpf_0offset, %gpubpf_0other, %gpubpf_0offset, %gpubpf_0local;",
    f"selp.b64 %gpubpf_0space, {SPACES.index('shared')}, {SPACES.index('global')}, %gpubpf_0shared;",
    f"selp.b64 %gpubpf_0space, {SPACES.index('local')}, %gpubpf_0space, %gpubpf_0local;",
)


def in_rows(rows: Rows, width: int) -> list[str]:
    """Return instructions that turn the address of a matrix in AT into the lane's own address. Each lane accesses `width` bytes."""
    row, along, step = "%gpubpf_0row", "%gpubpf_0along", "%gpubpf_0step"
    bytes_ = f"shl.b64 {step}, {step}, {(rows.bits // 8).bit_length() - 1};"
    if rows.bits < 8:
        bytes_ = f"shr.u64 {step}, {step}, {(8 // rows.bits).bit_length() - 1};"
    return [
        f".reg .b32 {row}, {along};",
        f".reg .b64 {step};",
        f"mov.u32 {row}, %laneid;",
        f"and.b32 {along}, {row}, {rows.per_row - 1};",
        f"mul.wide.u32 {step}, {along}, {width};",
        f"add.s64 {AT}, {AT}, {step};",
        f"shr.u32 {row}, {row}, {rows.per_row.bit_length() - 1};",
        f"add.u32 {row}, {row}, {rows.first};",
        f"mul.wide.u32 {step}, {row}, {rows.stride};",
        bytes_,
        f"add.s64 {AT}, {AT}, {step};",
    ]


def effect(access: Access) -> int:
    """Return what an access does, as a value of `enum gpu_effect`."""
    return READS * access.reads + WRITES * access.writes


def wants(probe: PtxProbe, access: Access) -> bool:
    """Return whether a program's filters may admit an access. For generic addresses, the space is known only at run time."""
    if probe.kinds and access.kind not in probe.kinds:
        return False
    if not probe.spaces:
        return access.space not in UNADDRESSED_SPACES
    return access.space in probe.spaces or (
        access.space == "generic" and bool(_GENERIC.intersection(probe.spaces))
    )


def _numbers(fields: Mapping[str, int]) -> dict[str, str]:
    """Return the fields of a context that are known now, as operands."""
    return {name: str(number) for name, number in fields.items()}


def _everywhere(probe: PtxProbe) -> bool:
    """Return whether a program's filters admit all spaces that a generic address may point to."""
    return not probe.spaces or set(probe.spaces) >= _GENERIC


def _elsewhere(probe: PtxProbe) -> list[str]:
    """Return branches that skip a program if a generic address points to a space that its filters exclude."""
    if _everywhere(probe):
        return []
    shared, local = "%gpubpf_0shared", "%gpubpf_0local"
    if "global" in probe.spaces:
        return [
            f"@{predicate} bra {_ELSEWHERE};"
            for space, predicate in (("shared", shared), ("local", local))
            if space not in probe.spaces
        ]
    if "shared" not in probe.spaces:
        return [f"@!{local} bra {_ELSEWHERE};"]
    if "local" not in probe.spaces:
        return [f"@!{shared} bra {_ELSEWHERE};"]
    return [
        ".reg .pred %gpubpf_0both;",
        f"or.pred %gpubpf_0both, {shared}, {local};",
        f"@!%gpubpf_0both bra {_ELSEWHERE};",
    ]

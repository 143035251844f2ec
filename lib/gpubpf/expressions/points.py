"""The points that gpucount, gpudist and gputrace take: what is attached where, and what an expression may name there.

A new attach point of the library needs a row in POINTS, and its context in `bytecode.CONTEXTS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from gpubpf.agent.definitions import NUMBER_MASK
from gpubpf.ebpf.bytecode import (
    CONTEXTS,
    FLOAT_OPERATIONS,
    KINDS,
    OPERANDS,
    READS,
    RETURNS,
    SPACES,
    TYPES,
    WORK,
    WRITES,
)
from gpubpf.errors import UsageError
from gpubpf.expressions.syntax import U64, Names, Type
from gpubpf.expressions.values import VALUES
from gpubpf.record import Record, field, replace

ALL = ""  # the key of what is attached without a DETAIL


class Attachment(Record):
    """How a program is attached: with `BPF.attach_gpu_METHOD`, and these arguments beside the kernel and the function's name.

    The program's argument is a `struct gpu_CONTEXT *`.

    lacks: fields of the context that have no value with these arguments.
    """

    method: str
    context: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()

    @property
    def fields(self) -> dict[str, Type]:
        """The fields of the context that expressions may name."""
        return dict.fromkeys((name for name in CONTEXTS[self.context] if name not in self.lacks), U64)

    def with_values(self) -> Attachment:
        """Return the attachment whose program also gets the values, for an attachment to memory accesses; else this attachment."""
        return replace(self, method="value", context="value") if self.context == "access" else self


class Point(Record):
    """A point as the command line names it.

    details: DETAIL → attachment; ALL: without a DETAIL.
    glob: the argument of `BPF.attach_gpu_METHOD` that any other DETAIL is a glob for; "": other DETAILs are errors.
    by_warp: one event for each warp, of its lowest lane; otherwise one event for each active lane.
    of_launch: the point is a launch, whose values are known on the host. The attached program does nothing, but makes the launch count
        as measured.
    values: the names in `values.ELEMENTS` that expressions may use. Only a program that uses one of them is attached with values,
        because values cost more.
    """

    name: str
    details: Mapping[str, Attachment]
    glob: str = ""
    by_warp: bool = False
    of_launch: bool = False
    values: tuple[str, ...] = ()

    def attachment(self, detail: str) -> Attachment:
        """Return the attachment for a DETAIL. Raises UsageError."""
        if detail in self.details:
            return self.details[detail]
        if not self.glob:
            known = [name for name in self.details if name and "." not in name]
            both = next((f", or both, such as {name}" for name in self.details if "." in name), "")
            advice = f"use one of: {', '.join(known)}{both}" if known else "leave it out"
            raise UsageError(f"{self.name} has no detail {detail!r}; {advice}")
        plain = self.details[ALL]
        return Attachment(plain.method, plain.context, {**plain.arguments, self.glob: detail}, plain.lacks)

    def names(self, attachment: Attachment) -> Names:
        """Return what expressions may name."""
        if self.of_launch:
            return Names(self.name, {}, dict.fromkeys(LAUNCH_NAMES, U64), texts=TEXTS[:1])
        known = attachment.fields
        constants: Mapping[str, int] = {}
        if "space" in known:
            constants = {**CONSTANTS, **(RETURNED if "old" in self.values else {})}
        if "operands" in known:
            constants = {**OPERATIONS, **OF_TYPES} if "operation" in known else OF_TYPES
        elif self.values:
            constants = {**constants, **OF_TYPES}
            known = attachment.with_values().fields
        hidden = (*self.values, *(() if "old" in self.values else OLD))
        fields = {name: type_ for name, type_ in known.items() if name not in hidden}
        added = {
            name: ", ".join(detail for detail, one in self.details.items() if name in one.fields)
            for name in {name for one in self.details.values() for name in one.fields} - known.keys()
        }
        return Names(self.name, fields, dict.fromkeys(BUILTINS, U64), constants, TEXTS, self.values, added)

    def needs_values(self, used: set[str]) -> bool:
        """Return whether one of these names needs the values of the access."""
        return bool(self.values) and not used.isdisjoint({*VALUES, *RETURNED, *OF_VALUES})


class Builtin(Record):
    """A name that every device program has. c: its C text. after: the statement in SETUP that must run before the C text."""

    c: str
    after: tuple[str, ...] = ()


def _index(name: str, setup: str, *others: str) -> dict[str, Builtin]:
    """Return the parts of an index or dimension: NAME.x, NAME.y and NAME.z."""
    return {f"{name}.{axis}": Builtin(f"{name}_{axis}", (setup, *others)) for axis in "xyz"}


# Statements that several builtins need, in the order in which they run. Clocks are read first.
SETUP: Mapping[str, str] = {
    "globaltimer": "u64 globaltimer = bpf_get_globaltimer();",
    "clock": "u64 clock = gpu_clock();",
    "active": "u64 active = gpu_active();",
    "grid": "u64 grid_x, grid_y, grid_z;\n    gpu_grid_dim(&grid_x, &grid_y, &grid_z);",
    "block_dim": "u64 block_dim_x, block_dim_y, block_dim_z;\n"
    "    bpf_get_block_dim(&block_dim_x, &block_dim_y, &block_dim_z);",
    "block": "u64 block_x, block_y, block_z;\n    bpf_get_block_idx(&block_x, &block_y, &block_z);",
    "thread": "u64 thread_x, thread_y, thread_z;\n    bpf_get_thread_idx(&thread_x, &thread_y, &thread_z);",
}
BUILTINS: Mapping[str, Builtin] = {
    "globaltimer": Builtin("globaltimer", ("globaltimer",)),
    "clock": Builtin("clock", ("clock",)),
    "smid": Builtin("(u64)gpu_sm()"),
    "warp": Builtin("(u64)gpu_warp()"),
    "lane": Builtin("(u64)gpu_lane()"),
    "active": Builtin("active", ("active",)),
    "grid": Builtin("(grid_x * grid_y * grid_z)", ("grid",)),
    **_index("grid", "grid"),
    "block_dim": Builtin("(block_dim_x * block_dim_y * block_dim_z)", ("block_dim",)),
    **_index("block_dim", "block_dim"),
    "block": Builtin("((block_z * grid_y + block_y) * grid_x + block_x)", ("grid", "block")),
    **_index("block", "block"),
    "thread": Builtin(
        "((thread_z * block_dim_y + thread_y) * block_dim_x + thread_x)", ("block_dim", "thread")
    ),
    **_index("thread", "thread"),
    "gthread": Builtin("gpu_global_thread()"),
    "launch": Builtin(f"(ctx_launch & {NUMBER_MASK:#x}ull)"),
    "pid": Builtin("(bpf_get_current_pid_tgid() >> 32)"),
}
CONSTANTS: Mapping[str, int] = {
    **{f"GPU_{name.upper()}": number for names in (SPACES, KINDS) for number, name in enumerate(names)},
    "GPU_READS": READS,
    "GPU_WRITES": WRITES,
}
OLD = ("old_low", "old_high")  # fields of atomics
OF_VALUES = ("type", "low", "high", *OLD)  # fields of accesses that only programs with values have
RETURNED = {"GPU_RETURNS": RETURNS}  # a bit in `effect` of an atomic, only in programs with values
# Constants to compare `operation` and `type` of instructions with.
OPERATIONS = {f"GPU_FLOAT_{name.upper()}": number for number, name in enumerate(FLOAT_OPERATIONS)}
OF_TYPES = {f"GPU_{name.upper()}": number for number, name in enumerate(TYPES)}
TEXTS = ("kernel", "source")
# The values of a launch that the host knows, in the order of `launches.values`.
LAUNCH_NAMES = (
    "launch", "pid", "tid", "gpu", "stream", "call_ns", "threads", "shared", "grid", "grid.x", "grid.y", "grid.z",
    "block_dim", "block_dim.x", "block_dim.y", "block_dim.z",
)  # fmt: skip


def _accesses(kinds: Mapping[str, tuple[str, ...]], named: bool) -> Mapping[str, Attachment]:
    """Return the attachments for memory accesses of these kinds, by DETAIL.

    A DETAIL is a space; if the kinds are `named`, also a kind, and KIND.SPACE."""
    every = tuple(dict.fromkeys(kind for some in kinds.values() for kind in some))

    def attached(some: tuple[str, ...], spaces: tuple[str, ...]) -> Attachment:
        return Attachment("access", "access", {"kinds": some, "spaces": spaces})

    found = {ALL: attached(every, SPACES)} | {space: attached(every, (space,)) for space in SPACES}
    for word, some in kinds.items() if named else ():
        found[word] = attached(some, SPACES)
        found |= {f"{word}.{space}": attached(some, (space,)) for space in SPACES}
    return MappingProxyType(found)


def _plain(context: str) -> Mapping[str, Attachment]:
    return {ALL: Attachment(context, context)}


_OPCODES = {"ld": ("load",), "st": ("store",), "atom": ("atomic",), "cp": ("async",)}
POINTS: Mapping[str, Point] = {
    point.name: point
    for point in (
        Point("kernel", _plain("entry"), of_launch=True),
        Point("entry", _plain("entry")),
        Point(
            "exit",
            {ALL: Attachment("exit", "exit", lacks=("work",))}
            | {work: Attachment("exit", "exit", {"accumulate": work}) for work in WORK},
        ),
        Point("block_begin", _plain("block_begin")),
        Point("block_end", _plain("block_end")),
        Point(
            "barrier",
            {
                ALL: Attachment("barrier_arrive", "barrier_arrive"),
                "arrive": Attachment("barrier_arrive", "barrier_arrive"),
                "leave": Attachment("barrier_leave", "barrier_leave"),
            },
            by_warp=True,
        ),
        Point("bb", _plain("basic_block"), by_warp=True),
        Point("branch", _plain("branch"), by_warp=True),
        Point("load", _accesses({"load": ("load",)}, named=False), values=("value",)),
        Point("store", _accesses({"store": ("store",)}, named=False), values=("value",)),
        Point("atomic", _accesses({"atomic": ("atomic",)}, named=False), values=("value", "old")),
        Point("access", _accesses({kind: (kind,) for kind in KINDS} | _OPCODES, named=True)),
        Point("float", _plain("float"), glob="opcodes", values=("value", *OPERANDS)),
        Point("instruction", _plain("instruction"), glob="opcodes", values=("value", *OPERANDS)),
        Point("func", _plain("function_entry"), glob="function"),
        Point("funcret", _plain("function_exit"), glob="function"),
    )
}


def point(name: str) -> Point:
    """Return a point by its name. Raises UsageError for an unknown name; the message lists the points."""
    if name not in POINTS:
        raise UsageError(f"there is no point {name!r}; use one of: {', '.join(POINTS)}")
    return POINTS[name]


def setup(used: set[str], attachment: Attachment) -> Iterator[str]:
    """Yield the C statements that these names need. CTX keeps the loads of the context where they are."""
    used = used.union(*(VALUES[name].fields for name in used & VALUES.keys()))
    fields = used & attachment.fields.keys()
    needed = {name for builtin in used & BUILTINS.keys() - fields for name in BUILTINS[builtin].after}
    yield from (statement for name, statement in SETUP.items() if name in needed)
    yield from (f"u64 ctx_{name} = CTX({name});" for name in attachment.fields if name in fields)


def c_names(attachment: Attachment) -> dict[str, str]:
    """Return the C text of every name that an expression may use. Names of the context come before builtins, except `launch`.

    A value comes before the field with its bytes."""
    found = {name: builtin.c for name, builtin in BUILTINS.items()}
    found |= {
        name: f"{value}ull" for name, value in {**CONSTANTS, **RETURNED, **OPERATIONS, **OF_TYPES}.items()
    }
    found |= {name: f"ctx_{name}" for name in attachment.fields if name != "launch"}
    return found | {name: value.c for name, value in VALUES.items()}

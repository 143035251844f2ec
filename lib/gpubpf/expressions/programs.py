"""Make the C text of a measurement: the tool's own part, followed by one program for each specification.

Each program begins like this; names of builtins are those of `points`:

    int on_0(struct gpu_access *ctx) {
        u64 active = gpu_active();
        u64 ctx_site = CTX(site);
        int site = ctx_site;
        int mine = …;                           FILTER, --block and --thread: 1 in the lanes that count
        gpu_mask lanes = gpu_ballot(mine);      these lanes

Nothing before the last of these lines branches by lane, so lanes that enter the program together also reach this line together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from gpubpf.expressions import points
from gpubpf.expressions.c_text import ARITHMETIC, c_text
from gpubpf.expressions.specs import Distribution, Spec, Trace
from gpubpf.expressions.syntax import Node, names_of
from gpubpf.expressions.values import FUNCTIONS
from gpubpf.show.notices import note

if TYPE_CHECKING:
    from gpubpf.program import BPF

NOTHING = "    return 0;"
_OF_LANES = frozenset(("lane", "active"))  # the names whose range depends on the number of lanes in a warp
# The context is read before any branch. The kernel's verifier may follow a path that gpubpf's verifier knows to be impossible, such as
# behind lane == 40, and no path may then read a field that the kernel's verifier does not expect.
_READ = "\n#define CTX(_field) (*(volatile u64 *)&ctx->_field)  /* read here, and not behind a branch */\n"
_FILTER = "GPU_PARAM(filter, struct gpu_filter);            /* --block and --thread */\n"
_CHOSEN = (
    "    int key = 0;\n    struct gpu_filter *wanted = filter.lookup(&key);\n"
    "    int mine = wanted && gpu_selected(wanted);"
)


def function_name(number: int) -> str:
    """Return the name of the program of a specification, by its number on the command line."""
    return f"on_{number}"


def attach(b: BPF, specs: Sequence[Spec], kernels: Sequence[tuple[str, ...]], tool: str) -> None:
    """Attach the program of each specification to its kernels. Print a notice if the compiler finds that a filter is never true.

    kernels: for each specification its globs; no globs: every kernel."""
    for number, (spec, globs) in enumerate(zip(specs, kernels, strict=True)):
        one, name = spec.attachment, function_name(number)
        getattr(b, f"attach_gpu_{one.method}")(kernel=globs, fn_name=name, **one.arguments)
        b.attached.titles[name] = repr(spec.text)
        if spec.filter is not None and not spec.point.of_launch and not b.attached.uses_maps(name):
            # The compiler assumes NVIDIA's warps. Waves of AMD GPUs may have 64 lanes.
            of_lanes = not _OF_LANES.isdisjoint(names_of(spec.filter))
            where = " in warps of 32 lanes" if of_lanes else ""
            note(tool, f"the filter of {spec.text!r} is never true{where}")


def counting(program: str, specs: Sequence[Spec], chosen: bool) -> str:
    """Return the text of gpucount.

    program: the tool's own part, with `struct tally` and `add`.
    chosen: --block or --thread is given."""
    parts = []
    for number, spec in enumerate(specs):
        parts.append("" if spec.point.of_launch else f"\nGPU_SITE_ARRAY(counts_{number}, struct tally);")
        body = f"    struct tally *to = counts_{number}.lookup(&site);\n    return mine ? add(to, lanes) : 0;"
        parts.append(_function(number, spec, chosen, body, counts_lanes=True))
    return _text(program, parts, chosen)


def distributing(program: str, wanted: Sequence[Distribution], entries: int, chosen: bool) -> str:
    """Return the text of gpudist.

    program: the tool's own part.
    entries: the number of different values, or buckets, that fit into the table."""
    parts = []
    for number, one in enumerate(wanted):
        if one.spec.point.of_launch:
            parts.append(_function(number, one.spec, chosen, NOTHING))
            continue
        value = f"    u64 value = (u64)({one.type})%s;"
        if one.kind == "log2":
            parts.append(f"\nGPU_SITE_ARRAY(sums_{number}, struct log2);")
            body = f"    return add_log2(sums_{number}.lookup(&site), value, {int(one.signed)}, mine, lanes);"
        else:
            parts.append(f"\nGPU_SITE_ARRAY(sums_{number}, struct sum);")
            parts.append(f"GPU_HASH(values_{number}, struct seen, u64, {entries});")
            bucket = "value" if one.kind == "values" else f"bucket(value, {int(one.signed)}, {one.width}ull)"
            owner = {"": "0, 0", "kernel": "gpu_kernel(), 0", "source": "gpu_kernel(), site"}[one.key]
            body = (
                f"    struct seen seen = {{{bucket}, {owner}}};\n"
                "    gpu_mask same = gpu_match(seen.value) & lanes;\n"
                f"    add_sum(sums_{number}.lookup(&site), value, {int(one.signed)}, mine, lanes);\n"
                f"    if (mine && gpu_first(same))\n        values_{number}.increment(seen, gpu_popcount(same));\n{NOTHING}"
            )
        parts.append(_function(number, one.spec, chosen, body, {value: one.value}))
    return _text(program, parts, chosen)


def tracing(program: str, wanted: Sequence[Trace], pages: int, chosen: bool) -> str:
    """Return the text of gputrace.

    program: the tool's own part.
    pages: size of the ring buffer in pages of 4096 bytes."""
    most = max((len(one.numbers) for one in wanted), default=0) or 1
    parts = (
        []
        if not wanted
        else [
            f"\nstruct event {{ struct place place; u64 values[{most}]; }};",
            f"GPU_RINGBUF(events, struct event, {pages});",
        ]
    )
    for number, one in enumerate(wanted):
        values = {f"    u64 value_{n} = %s;": node for n, node in enumerate(one.numbers)}
        stores = "".join(f"    event->values[{n}] = value_{n};\n" for n in range(len(values)))
        body = (
            "    struct event *event = 0;\n"
            "    if (mine)\n        event = events.ringbuf_reserve(sizeof *event);\n"
            "    if (!event)\n        return 0;                                /* the ring counts it as lost */\n"
            f"    describe(&event->place, ctx_launch, site, {number}, globaltimer);\n{stores}"
            f"    events.ringbuf_submit(event, 0);\n{NOTHING}"
        )
        parts.append(_function(number, one.spec, chosen, body, values, needed=("globaltimer", "launch")))
    return _text(program, parts, chosen)


def _text(program: str, parts: Iterable[str], chosen: bool) -> str:
    made = "\n".join(part for part in parts if part)
    helpers = (
        ARITHMETIC if any(name in made for name in ("gpu_divide", "gpu_remainder", "gpu_select")) else ""
    )
    if any(name in made for name in ("gpu_element", "gpu_isnan", "gpu_isinf")):
        helpers += FUNCTIONS
    if made:
        helpers = _READ + helpers
    return program.strip("\n") + "\n" + helpers + ("\n" + _FILTER if chosen else "") + made + "\n"


def _function(
    number: int,
    spec: Spec,
    chosen: bool,
    body: str,
    values: Mapping[str, Node] | None = None,
    needed: Iterable[str] = (),
    counts_lanes: bool = False,
) -> str:
    """Return the program of a specification.

    body: the statements that run in the chosen lanes.
    values: statement with %s → the expression that replaces %s.
    needed: builtins that `body` uses.
    counts_lanes: `lanes` has all lanes that pass the filter, even at points with one event per warp."""
    start = f"\nint {function_name(number)}(struct gpu_{spec.attachment.context} *ctx) {{"
    if spec.point.of_launch:
        return f"{start}\n{NOTHING}\n}}"
    values = values or {}
    used = {name for node in (*values.values(), spec.filter) if node is not None for name in names_of(node)}
    used |= {"site", *needed}
    names = points.c_names(spec.attachment)
    lines = [start]
    lines += (f"    {statement}" for statement in points.setup(used, spec.attachment))
    lines.append("    int site = ctx_site;")
    lines += (statement % c_text(node, names) for statement, node in values.items())
    lines.append(_CHOSEN if chosen else "    int mine = 1;")
    if spec.filter is not None:
        lines.append(f"    mine &= !!{c_text(spec.filter, names)};")
    is_all = spec.filter is None and not chosen
    lines.append(f"    gpu_mask lanes = {'gpu_active()' if is_all else 'gpu_ballot(mine)'};")
    if spec.point.by_warp and not counts_lanes:
        lines += ("    mine &= !!gpu_first(lanes);", "    lanes = gpu_ballot(mine);")
    return "\n".join([*lines, body, "}"])

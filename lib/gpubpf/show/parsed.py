"""The options that the tools share, as values. Each stage of a measurement takes the group that it needs.

    options = Options.of(args)      # the parsed command line, with the names that command_line.py lists

The options of one tool stay in `args`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from gpubpf.record import Record, replace
from gpubpf.show.option_values import EVERYTHING

if TYPE_CHECKING:
    import argparse

    from gpubpf.show.option_values import Ranges


Group = TypeVar("Group", bound=Record)


class TargetOptions(Record):
    """What to trace; with neither `command` nor `pids`, every process.

    command: COMMAND [ARG…]; None: no command.
    files: FILE… of --list and --ptx.
    user: --user.
    ptx_options: not --no-ptx-options.
    duration: seconds.
    alone: the tool has the Python process to itself.
    """

    command: Sequence[str] | None = None
    pids: Sequence[int] = ()
    files: Sequence[str] = ()
    user: str | None = None
    ptx_options: bool = True
    duration: float | None = None
    alone: bool = False


class KernelOptions(Record):
    """Which kernels and launches to measure.

    wanted: globs or mangled names; empty: every kernel.
    launches: the first and the last launch, from 1; None: no end.
    sample: one launch in so many.
    budget: per cent; None: no limit.
    graphs: whether to measure kernels in CUDA graphs; None: as the driver allows.
    sass: also measure kernels without PTX.
    """

    wanted: Sequence[str] = ()
    launches: tuple[int, int | None] = (1, None)
    sample: int = 1
    budget: float | None = None
    graphs: bool | None = None
    sass: bool = False


class ThreadOptions(Record):
    """Which GPU threads to measure: --block, --thread; and which host threads: --cgroup, --comm, -t."""

    block: Ranges = (EVERYTHING,) * 3
    thread: Ranges = (EVERYTHING,) * 3
    cgroup: int | None = None
    comm: str | None = None
    tid: int | None = None


class SamplingOptions(Record):
    """In which blocks or warps the programs run: --sample-blocks 1/N, --sample-warps 1/N, --seed."""

    blocks: int | None = None
    warps: int | None = None
    seed: int | None = None


class DeviceOptions(Record):
    """Where kernels run.

    kind: "auto", "gpu" or "sim".
    clock: "virtual", "real" or None: the embedded device's clock.
    measures_times: the tool measures times, so the default clock is the virtual one.
    map_memory: bytes.
    cupti: a path, or "": --cupti; None: neither --cupti nor --no-cupti; False: no CUPTI.
    """

    kind: str = "auto"
    clock: str | None = None
    measures_times: bool = False
    map_memory: int = 2**28
    cupti: str | bool | None = False


class RingOptions(Record):
    """The ring buffers for records. size: bytes. place: "host" or "gpu". None: as the tool chooses."""

    size: int | None = None
    place: str | None = None


class OutputOptions(Record):
    """Where results go, how often, and in which form.

    path: None: standard output.
    interval: seconds between two reports; None: one report at the end.
    count: number of reports; None: no limit.
    """

    tool: str = ""
    path: str | None = None
    json: bool = False
    csv: bool = False
    timestamps: bool = False
    verbose: bool = False
    interval: float | None = None
    count: int | None = None


class Options(Record):
    """The shared options of a command line."""

    targets: TargetOptions = TargetOptions()
    kernels: KernelOptions = KernelOptions()
    threads: ThreadOptions = ThreadOptions()
    sampling: SamplingOptions = SamplingOptions()
    device: DeviceOptions = DeviceOptions()
    rings: RingOptions = RingOptions()
    output: OutputOptions = OutputOptions()

    @classmethod
    def of(cls, args: argparse.Namespace) -> Options:
        """Return the options of a parsed command line. An option that is None, or that the tool does not have, gets its default."""
        given = vars(args)

        def group(of: type[Group], **renamed: str) -> Group:
            names = {name: renamed.get(name, name) for name in of.__match_args__}
            return of(**{name: given[its] for name, its in names.items() if given.get(its) is not None})

        device = group(DeviceOptions, kind="device")
        return cls(
            group(TargetOptions, pids="pid"),
            group(KernelOptions, wanted="kernel", launches="launch"),
            group(ThreadOptions),
            group(SamplingOptions, blocks="sample_blocks", warps="sample_warps"),
            replace(device, cupti=given.get("cupti", False)),  # None: neither --cupti nor --no-cupti
            group(RingOptions, size="ring_size", place="ring"),
            group(OutputOptions, path="output"),
        )

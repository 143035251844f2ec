"""The options that the tools share, as values. Each stage of a measurement takes the group that it needs.

    options = Options.of(args)      # the parsed command line, with the names that command_line.py lists

The options of one tool stay in `args`. A stage in the library that needs them takes a group of its own, which `group` makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    ranges: globs: only launches in a range with such a name; empty: all launches.
    """

    wanted: Sequence[str] = ()
    launches: tuple[int, int | None] = (1, None)
    sample: int = 1
    budget: float | None = None
    graphs: bool | None = None
    sass: bool = False
    ranges: Sequence[str] = ()


class ThreadOptions(Record):
    """Which GPU threads to measure: --block, --thread; and which host threads: --cgroup, --comm, -t."""

    block: Ranges = (EVERYTHING,) * 3
    thread: Ranges = (EVERYTHING,) * 3
    cgroup: int | None = None
    comm: str | None = None
    tid: int | None = None

    @property
    def filtered(self) -> bool:
        """Whether --block or --thread leaves any thread out."""
        return any(extent != EVERYTHING for extent in (*self.block, *self.thread))

    @property
    def host_filters(self) -> str:
        """The given filters of host threads, for a message: ``-t 1 --comm helper``."""
        return as_given({"-t": self.tid, "--comm": self.comm, "--cgroup": self.cgroup})


class SamplingOptions(Record):
    """In which blocks or warps the programs run: --sample-blocks 1/N, --sample-warps 1/N, --seed."""

    blocks: int | None = None
    warps: int | None = None
    seed: int | None = None

    @property
    def given(self) -> bool:
        """Whether only some blocks or warps are measured."""
        return bool(self.blocks or self.warps)


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


class LookOptions(Record):
    """What to print instead of measuring: --list, --ptx, --ebpf."""

    list: bool = False
    ptx: bool = False
    ebpf: bool = False


class OutputOptions(Record):
    """Where results go, how often, and in which form.

    path: None: standard output.
    dataset: DIR of --parquet DIR; None: no Parquet files.
    records: where the records that the tool writes are declared; see `command_line.Parser`.
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
    dataset: str | None = None
    records: str = ""


class Options(Record):
    """The shared options of a command line."""

    targets: TargetOptions = TargetOptions()
    kernels: KernelOptions = KernelOptions()
    threads: ThreadOptions = ThreadOptions()
    sampling: SamplingOptions = SamplingOptions()
    device: DeviceOptions = DeviceOptions()
    rings: RingOptions = RingOptions()
    output: OutputOptions = OutputOptions()
    looks: LookOptions = LookOptions()

    @classmethod
    def of(cls, args: argparse.Namespace) -> Options:
        """Return the options of a parsed command line. An option that is None, or that the tool does not have, gets its default."""
        device = group(DeviceOptions, args, kind="device")
        return cls(
            group(TargetOptions, args, pids="pid"),
            group(KernelOptions, args, wanted="kernel", launches="launch", ranges="range"),
            group(ThreadOptions, args),
            group(SamplingOptions, args, blocks="sample_blocks", warps="sample_warps"),
            replace(device, cupti=vars(args).get("cupti", False)),  # None: neither --cupti nor --no-cupti
            group(RingOptions, args, size="ring_size", place="ring"),
            group(OutputOptions, args, path="output"),
            group(LookOptions, args),
        )

    def with_kernels(self, wanted: Sequence[str]) -> Options:
        """Return these options for other kernels. wanted: see `KernelOptions`."""
        return replace(self, kernels=replace(self.kernels, wanted=wanted))

    def with_pids(self, pids: Sequence[int]) -> Options:
        """Return these options for other processes. pids: of -p."""
        return replace(self, targets=replace(self.targets, pids=pids))

    def with_reports(self, interval: float | None, count: int | None) -> Options:
        """Return these options for other reports: see `OutputOptions`."""
        return replace(self, output=replace(self.output, interval=interval, count=count))

    def with_command(self, command: Sequence[str] | None) -> Options:
        """Return these options for another command. command: see `TargetOptions`."""
        return replace(self, targets=replace(self.targets, command=command))

    def with_times(self, measures_times: bool) -> Options:
        """Return these options for a tool that measures times, or does not: see `DeviceOptions`."""
        return replace(self, device=replace(self.device, measures_times=measures_times))


def group(of: type[Group], args: argparse.Namespace, **renamed: str) -> Group:
    """Return a group of options. An option that is None, or that the tool does not have, gets the group's default.

    of: the class of the group.
    renamed: for fields whose names are not those of the parsed command line: that name.
    """
    given = vars(args)
    names = {name: renamed.get(name, name) for name in of.__match_args__}
    return of(**{name: given[its] for name, its in names.items() if given.get(its) is not None})


def as_given(options: Mapping[str, object]) -> str:
    """Return the given options, for a message: ``-t 1 --errors``.

    options: the value of each option: True or something false for an option without a value, a list for a repeatable option.
    """
    given = []
    for option, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            given += [option if one is True else f"{option} {one}"] if one else []
    return " ".join(given)

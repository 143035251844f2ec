"""The options that tools share: one function for each group, so that an option means the same in every tool."""

from __future__ import annotations

import argparse
import os
from typing import Any

from gpubpf.show.command_line import Parser, PrintSchemas
from gpubpf.show.option_values import (
    parse_addresses,
    parse_cgroup,
    parse_comm,
    parse_file,
    parse_granule,
    parse_launches,
    parse_percent,
    parse_picture,
    parse_pids,
    parse_ranges,
    parse_results,
    parse_sampling,
    parse_seed,
    parse_share,
    parse_sites,
    parse_size,
    positive,
    seconds,
)

KERNEL_GLOB = "whose demangled name (without template arguments and parameter list) matches GLOB, or whose mangled name equals it"

# What survives the end of a program; docs/attach.md explains it.
_ALWAYS = "However a program ends, the report has what was measured until then."
_LAST_READING = f"{_ALWAYS}\nBut SIGKILL, a stack overflow or a failed kernel may lose the last second."


def add_targets(
    made: Parser, specs: str = "", operand: tuple[str, str] = ("", ""), in_linux: bool = False
) -> None:
    """Add what to trace and for how long: -p, --user, -d, interval and count. `parse` splits off COMMAND.

    specs: help text for SPEC, if the tool takes specifications.
    operand: name (OBJECT) and help text of the first word, if the tool requires one.
    in_linux: the tool counts in the Linux kernel only, where counts survive every end of a program."""
    group = made.add_argument_group("what to trace, and for how long", _ALWAYS if in_linux else _LAST_READING)
    words, about = "interval [count]", "print every interval seconds, count times"
    if specs:
        made.takes_specs = True
        words, about = f"SPEC... [{words}]", f"SPEC: {specs}; {about}"
    if operand[0]:
        made.operand = operand[0]
        words, about = f"{operand[0]} [{words}]", f"{operand[0]}: {operand[1]}; {about}"
    group.add_argument("positional", nargs="*", metavar=words, help=about)
    group.add_argument(
        "-p",
        dest="pid",
        action="extend",
        type=parse_pids,
        metavar="PID[,PID...]",
        help="trace these running processes (with neither -p nor COMMAND: every process; requires root)",
    )
    group.add_argument(
        "-d",
        "--duration",
        type=seconds,
        metavar="S",
        help="end the measurement after S seconds (fractions allowed)",
    )
    group.add_argument(
        "--user", metavar="NAME", help="run COMMAND as NAME (default under sudo: the user who called sudo)"
    )


def add_kernels(made: Parser, graphs: str = "measure kernels in CUDA graphs") -> None:
    """Add which kernels and launches to measure: --kernel, --launch, --sample, --range, --graphs, --no-graphs.

    graphs: help text of --graphs.
    """
    group = made.add_argument_group("which kernels and launches")
    group.add_argument(
        "--kernel", action="append", metavar="GLOB", help=f"only kernels {KERNEL_GLOB}; repeatable"
    )
    _add_launches(group, "one launch in N")
    group.add_argument(
        "--range",
        action="append",
        metavar="GLOB",
        help="only launches in an NVTX range whose name matches GLOB; repeatable",
    )
    group.add_argument(
        "--graphs",
        action="store_true",
        default=None,
        help=f"{graphs}, also with drivers before CUDA 13.0, where this was not tested",
    )
    group.add_argument(
        "--no-graphs", dest="graphs", action="store_false", help="do not measure kernels in CUDA graphs"
    )


def add_patches(made: Parser) -> None:
    """Add how to measure kernels without PTX: --sass."""
    made.add_argument_group("kernels without PTX").add_argument(
        "--sass",
        action="store_true",
        help="also measure kernels of COMMAND that have only machine code, with NVIDIA's Compute Sanitizer library",
    )


def _add_launches(group: argparse._ArgumentGroup, sample: str) -> None:
    group.add_argument(
        "--launch",
        type=parse_launches,
        metavar="N:M",
        help="only the Nth to Mth launch of each kernel and process (from 1, inclusive)",
    )
    group.add_argument("--sample", type=positive, metavar="N", help=sample)


def add_threads(made: Parser) -> None:
    """Add which GPU threads to measure: --block, --thread. The device programs filter."""
    group = made.add_argument_group("which threads (each index is a number, A:B or *; default *)")
    group.add_argument(
        "--block", type=parse_ranges, metavar="X[,Y[,Z]]", help="only blocks with these indices"
    )
    group.add_argument(
        "--thread", type=parse_ranges, metavar="X[,Y[,Z]]", help="only threads with these indices"
    )


def add_sampling(made: Parser, warps: bool = True) -> None:
    """Add in which blocks or warps the programs run: --sample-blocks, --sample-warps, --seed. `BPF.sample` reads them.

    warps: whether the tool has --sample-warps."""
    group = made.add_argument_group("sampling on the GPU")
    unit = group.add_mutually_exclusive_group()
    for what in ("blocks", "warps")[: 1 + warps]:
        unit.add_argument(
            f"--sample-{what}",
            type=parse_share,
            metavar="1/N",
            help=f"measure one in N {what}, chosen at random in each launch (N: a power of two)",
        )
    group.add_argument(
        "--seed", type=parse_seed, metavar="S", help="repeat the choice of an earlier run: its seed"
    )


def add_budget(made: Parser) -> None:
    """Add --budget. `BPF.limit` reads it."""
    group = made.add_argument_group("overhead")
    group.add_argument(
        "--budget",
        type=parse_percent,
        metavar="PERCENT",
        help="measure so few launches of each kernel that probes add less than PERCENT to its instructions",
    )


def add_host_filters(made: Parser, what: str = "launches") -> None:
    """Add which host threads to measure: --cgroup, --comm, -t. The host program filters, with `gpu_host_selected` of gpubpf.h."""
    group = made.add_argument_group("which host threads")
    group.add_argument(
        "--cgroup",
        type=parse_cgroup,
        metavar="PATH|ID",
        help=f"only {what} by threads in this cgroup (v2) or below it",
    )
    group.add_argument("--comm", type=parse_comm, metavar="NAME", help=f"only {what} by threads of this name")
    group.add_argument("-t", dest="tid", type=positive, metavar="TID", help=f"only {what} by this thread")


def add_calls(made: Parser) -> None:
    """Add which calls of a host API to measure: --api, --kernel, --launch, --sample, --errors, --slow."""
    group = made.add_argument_group("which calls")
    group.add_argument(
        "--api",
        action="append",
        default=[],
        metavar="GLOB",
        help="only functions whose name matches GLOB, or a group: launch, memory, copy, sync, stream, event, graph, module,"
        " device, other, trivial; repeatable (default: all except trivial)",
    )
    group.add_argument(
        "--kernel",
        action="append",
        metavar="GLOB",
        help=f"only launches of kernels {KERNEL_GLOB}; repeatable",
    )
    _add_launches(group, "one launch in N of each kernel and process")
    group.add_argument("--errors", action="store_true", help="only calls that failed")
    group.add_argument(
        "--slow",
        type=positive,
        metavar="US",
        help="only calls longer than US microseconds, with what happened during each",
    )


def add_call_views(made: Parser) -> None:
    """Add what to show of calls: -e, --why, --timeline, --trace."""
    group = made.add_argument_group("what to show (default: a summary by function and by kernel)")
    group.add_argument("-e", "--snoop", dest="each", action="store_true", help="print a line for each call")
    group.add_argument(
        "--why",
        action="store_true",
        help="print what calls, and the gaps between launches, spent their time on",
    )
    group.add_argument("--timeline", action="store_true", help="print what each thread did, in order")
    group.add_argument(
        "--trace", type=parse_file, metavar="FILE", help="write a trace for ui.perfetto.dev to FILE"
    )


def add_device(made: Parser, times: bool = False, default: str = "default") -> None:
    """Add where device programs run, and how much memory their maps have: --device, --map-memory.

    times: the tool measures times, so add --clock. The tool may set `measures_times` to False if the user asked for no times.
    default: in the help text of --clock, when the virtual clock is the default."""
    group = made.add_argument_group("device")
    group.add_argument(
        "--device",
        choices=("auto", "gpu", "sim"),
        help="gpu, or sim: the embedded device (default auto: a GPU if there is one)",
    )
    if times:
        made.set_defaults(measures_times=True)
        group.add_argument(
            "--clock",
            choices=("virtual", "real"),
            help=f"clock of the embedded device: virtual ({default}) counts instructions and repeats exactly; real measures this CPU",
        )
    group.add_argument(
        "--map-memory", type=parse_size, metavar="SIZE", help="GPU memory for maps (default 256M)"
    )
    group.add_argument(
        "--no-ptx-options",
        dest="ptx_options",
        action="store_false",
        help="do not set the variables with which CuPy and XLA keep the PTX of the kernels that COMMAND compiles",
    )


def add_embedded_device(made: Parser) -> None:
    """Add the device that the command runs on, for a tool without device programs: --device."""
    made.add_argument_group("device").add_argument(
        "--device",
        choices=("auto", "gpu", "sim"),
        help="gpu, or sim: COMMAND runs on the embedded device (default auto: a GPU if there is one)",
    )


def add_rings(made: Parser) -> None:
    """Add the ring buffers for records of device programs: --ring-size, --ring."""
    group = made.add_argument_group("records")
    group.add_argument(
        "--ring-size", type=parse_size, metavar="SIZE", help="size of the ring buffer for records"
    )
    group.add_argument(
        "--ring", choices=("host", "gpu"), help="put it in host memory (default) or in GPU memory"
    )


def add_accesses(made: Parser) -> None:
    """Add the record of every memory access: -e, --parquet, --heatmap; filters: --site, --address, --warps.

    The device programs filter.
    """
    group = made.add_argument_group("every access (instead of tables)")
    group.add_argument(
        "-e", dest="each", action="store_true", help="print a line for each access of each thread"
    )
    group.add_argument(
        "--parquet",
        action=FileOrDataset,
        type=parse_file,
        metavar="FILE",
        help="write each access to a Parquet file; DIR/: write the records of --json below DIR",
    )
    group.add_argument(
        "--heatmap",
        type=parse_picture,
        metavar="FILE",
        help="draw accesses by address and time (.svg, .png or .pdf)",
    )
    group.add_argument(
        "--site",
        type=parse_sites,
        default=(),
        metavar="N[,N...]",
        help="only these instructions: site numbers or ranges A:B, as in the tables and --json",
    )
    group.add_argument(
        "--address",
        type=parse_addresses,
        metavar="LO:HI",
        help="only accesses to these addresses (shared and local memory: offsets)",
    )
    group.add_argument("--warps", type=parse_sampling, default=1, metavar="N", help="one warp in N")


def add_coverage(made: Parser) -> None:
    """Add which bytes are touched: --no-allocations, --footprint, --granule."""
    group = made.add_argument_group("which bytes of memory are touched")
    group.add_argument(
        "--no-allocations",
        dest="allocations",
        action="store_false",
        help="do not track which bytes of each allocation are read or written; reduces overhead",
    )
    group.add_argument(
        "--footprint",
        action="store_true",
        help="show how much memory each kernel touches, and how often it touches the same bytes again",
    )
    group.add_argument(
        "--granule",
        type=parse_granule,
        default=1,
        metavar="BYTES",
        help="track memory in units of BYTES, a power of two, for programs with much memory (default 1: exact)",
    )


def add_looks(made: Parser, device_programs: bool = True) -> None:
    """Add what to print instead of measuring: --list, --ptx (only tools with device programs), --ebpf."""
    group = made.add_argument_group("instead of measuring")
    group.add_argument(
        "--list",
        action="store_true",
        help="list the kernels of FILE..., -p PID or COMMAND: which can be instrumented, and why the others cannot"
        if device_programs
        else "list the libraries of FILE..., -p PID or COMMAND, their functions with probes, and kernels",
    )
    if device_programs:
        group.add_argument("--ptx", action="store_true", help="print the instrumented PTX of these kernels")
    group.add_argument("--ebpf", action="store_true", help="print the program's C text and exit")


class FileOrDataset(argparse.Action):
    """--parquet of memtrace: a file for accesses, or, if it ends in "/" or is a directory, the directory for all records."""

    def __call__(
        self, parser: argparse.ArgumentParser, into: argparse.Namespace, value: Any, *_: Any
    ) -> None:
        if value.endswith("/") or os.path.isdir(value):
            into.dataset = value
        else:
            into.parquet = value


def add_output(made: Parser, records: str = "") -> None:
    """Add where results go and in which form: -o, --json, --csv, --parquet, --json-schema, -T, -v. records: see `Parser`."""
    made.records = records
    group = made.add_argument_group("results")
    group.add_argument(
        "-o",
        dest="output",
        type=parse_results,
        metavar="FILE",
        help="write results to FILE (default, or -: standard output)",
    )
    form = group.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON Lines; the man page lists the fields")
    form.add_argument("--csv", action="store_true", help="print the main table as CSV")
    if "--parquet" not in made._option_string_actions:
        form.add_argument(
            "--parquet",
            dest="dataset",
            type=parse_file,
            metavar="DIR",
            help="write the records of --json below DIR, as Parquet files",
        )
    group.add_argument(
        "--json-schema", action=PrintSchemas, nargs=0, help="print the JSON schema of each record, and exit"
    )
    group.add_argument("-T", dest="timestamps", action="store_true", help="print the time with each result")
    group.add_argument("-v", dest="verbose", action="store_true", help="print more details")

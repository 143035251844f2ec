#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""gpurun   Run the programs of an eBPF object file in GPU kernels and on the host.

USAGE: gpurun OBJECT [options] [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]
       gpurun --run PROGRAM [--grid X[,Y[,Z]]] [--block X[,Y[,Z]]] OBJECT

OBJECT is a file that `clang -target bpf -g` made, in the conventions of libbpf and bpftime: the names of its sections say where its
programs go. gpurun verifies them, attaches them, and shows what they print and what is in their maps. The traced program needs no
change and no rebuild.
"""

from __future__ import annotations

import math
import os.path
import sys

if __package__ in (None, ""):  # run as tools/gpurun.py: the library is in ../lib
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "lib"))

from gpubpf.show import cli  # early: Ctrl-C is answered quietly from here on

TOOL = "gpurun"
EXAMPLES = """examples:
    gpurun probe.bpf.o -- ./app                 print its maps at the end
    gpurun probe.bpf.o 1 10 -p 1234             each second, ten times
    gpurun probe.bpf.o --json -o out.jsonl -- ./app
    gpurun probe.bpf.o --attach on_entry=kprobe/_Z5scalePf -- ./app
    gpurun probe.bpf.o --set limit=100 -- ./app a variable of the object
    gpurun probe.bpf.o --set 'sizes[3]=64' -- ./app
    gpurun probe.bpf.o --sass -- ./app          also kernels without PTX
    gpurun probe.bpf.o --ebpf                   show what is in the object
    gpurun --run add --grid 4 --block 256 add.bpf.o
                                                a program as a kernel of its own
"""
USAGE = """gpurun OBJECT [options] [interval [count]]
              [-p PID[,PID...] | -- COMMAND [ARG...]]
       gpurun --run PROGRAM [--grid X[,Y[,Z]]] [--block X[,Y[,Z]]] OBJECT"""


def build_parser() -> cli.Parser:
    """Return the parser: the object, what to change in it, and the shared options."""
    parser = cli.parser(TOOL, "Run the programs of an eBPF object in GPU kernels.", EXAMPLES, USAGE)
    cli.add_targets(parser, operand=("OBJECT", "an eBPF object file"))
    group = parser.add_argument_group("what to change in the object")
    group.add_argument(
        "--attach",
        action="append",
        default=[],
        metavar="PROGRAM=SECTION",
        help="attach PROGRAM as if it were in SECTION, such as kprobe/KERNEL; repeatable",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set the initial value of a variable, or of an element of an array or hash: NAME[KEY]=VALUE; repeatable",
    )
    group = parser.add_argument_group("a program as a kernel of its own (instead of -p and COMMAND)")
    group.add_argument("--run", metavar="PROGRAM", help="run only PROGRAM, once")
    for option, what in (("--grid", "blocks"), ("--block", "threads of a block")):
        group.add_argument(
            option, type=cli.extents, default=None, metavar="X[,Y[,Z]]", help=f"{what} (default 1)"
        )
    cli.add_kernels(parser)
    cli.add_patches(parser)
    cli.add_device(parser, times=True, default="default without programs on the host")
    cli.add_rings(parser)
    cli.add_looks(parser)
    cli.add_output(parser, "gpubpf.objects.report")
    return parser


@cli.command(TOOL)
def main(argv: list[str] | None = None) -> int:
    """Run the tool; return its exit status."""
    parser = build_parser()
    args = cli.parse(parser, argv)
    options = cli.Options.of(args)
    if args.run and (args.command or args.pid or args.list or args.ptx):
        parser.error("--run excludes -p, COMMAND, --list and --ptx")
    if not args.run and (args.grid or args.block):
        parser.error("--grid and --block are those of --run")
    from gpubpf.objects import launch, loading, settings

    for option, given, most in (
        ("grid", args.grid, launch.LARGEST_GRID),
        ("block", args.block, launch.LARGEST_BLOCK),
    ):
        extents = given or (1, 1, 1)
        if any(extent > one for extent, one in zip(extents, most, strict=True)):
            parser.error(f"--{option} may be at most {','.join(map(str, most))}")
    if math.prod(args.block or (1,)) > launch.MOST_THREADS:
        parser.error(f"--block may have at most {launch.MOST_THREADS} threads")
    moved = settings.sections(args.attach)
    loaded = loading.load(args.operand, settings.Settings(moved, args.set, args.run))
    globs = tuple(args.kernel)  # for programs that name no kernel
    options = options.with_kernels([launch.KERNEL] if args.run else loaded.kernels(globs))
    out = cli.open_results(options.output)
    if args.ebpf:
        from gpubpf.objects import listing

        out.lines(listing.lines(loaded))
        return 0
    from gpubpf.program import BPF

    b = BPF(source=loaded.programs)
    if args.run:
        options = options.with_command(loaded.attach_alone(b, args.grid, args.block))
    else:
        loaded.attach(b, globs, own_files=bool(args.command))
    loading.check_room(args.operand, b, args.map_memory)
    if args.list or args.ptx:
        return b.show_kernels(options, out)
    b.say_verdict(args.tool)
    times = not (b.attached.host_programs or b.attached.process_functions)  # these read the real clock
    with b.trace(options.with_times(times), out) as session:
        from gpubpf.objects.report import Printer, Reader  # imports NumPy, which would delay the first probe

        results = cli.ResultWriter(options.output, out, session.now_ns)
        reader = Reader(b, loaded.places if args.run else loaded.attached)
        printer = Printer(reader, out, results)
        for _ in session.intervals(args.interval, args.count, tick=lambda: printer.stream(session)):
            printer.maps(session)
            if out.closed:
                break
        reader.say_stopped(args.tool)
        launches = None if b.attached.probes else ()  # without device programs, no launch is counted
        results.end(session.summary() | {"verified_by": b.verified_by}, launches)
    return session.status


if __name__ == "__main__":
    sys.exit(main())

"""Run a suite of programs from outside, and print a table of what it showed: `script/conformance --help`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path

from conformance import blackwell, bpf, bpftime, build, copies, programs, ptx, wheels
from conformance.outcome import DIFFERENT, Outcome, table
from conformance.tools import APIS, TOOLS

EPILOG = """\
suites:
  bpf           eBPF programs of bpf_conformance, through the lowerings to PTX and x86-64
  bpftime       bpftime's GPU examples under gpurun: their programs, unmodified, on their own victims
  ptx           PTX kernels of ZLUDA's tests, plain and under each tool
  polybench     CUDA programs of PolyBench/GPU, built with nvcc, plain and under each tool
  rodinia       the same for Rodinia
  samples       the same for NVIDIA's cuda-samples
  samples12     the same for samples of release 12.5 that later releases do not have
  procuda       the same for the book "Professional CUDA C Programming"
  hecbench      the same for HeCBench
  hecbench-hip  HIP programs of HeCBench, built with hipcc, plain and under each tool for HIP
  rocrand       the same for rocRAND's own tests, which need librocrand-dev and libgtest-dev
  rocprim       the same for rocPRIM's own tests, which need librocprim-dev and libgtest-dev
  programs      CUDA programs that you built: each executable in DIR, plain and under each tool
  copies        executables, PTX files and cubins in DIR: ptxas assembles what the tools make of each kernel; nothing runs
  blackwell     PTX that is new with Blackwell: ptxas assembles each construct and its copies; see script/conformance blackwell --help
  wheels        what --list says of the kernels in Python wheels; see script/conformance wheels --help

examples:
  script/conformance bpf                            check out the suite and run it
  script/conformance ptx --from ~/ZLUDA             a checkout that is here already
  script/conformance hecbench --only 'a*'           the programs of this suite whose name begins with a
  HIPSIM_GPU=gfx90a script/conformance hecbench-hip build for this GPU, and run on it
  script/conformance programs --from ~/built        each executable below this directory
  script/conformance programs --from ~/built --device gpu
                                                    the same on the GPU of this machine
  script/conformance copies --from build/conformance
                                                    the instrumented kernels of all programs that were built
"""
RUN: dict[str, Callable[[Path, int], Iterator[Outcome]]] = {
    "bpf": bpf.run,
    "bpftime": bpftime.run,
    "ptx": ptx.run,
}
LISTS = {path.stem: build.suite(path) for path in sorted(build.LISTS.glob("*.toml"))}
EVERY_TOOL = [*dict.fromkeys(tool for api in APIS.values() for tool in api.tools)]
SOURCES = {
    "bpf": (bpf.URL, bpf.COMMIT),
    "bpftime": (bpftime.URL, bpftime.COMMIT),
    "ptx": (ptx.URL, ptx.COMMIT),
}
SOURCES |= {name: (suite.url, suite.commit) for name, suite in LISTS.items()}
PATIENCE = 600  # seconds for a step of git
SKIPPED = 77  # exit status when nothing ran; test runners such as automake's take it for "skipped"


class Skipped(Exception):
    """The suite cannot be had here."""


def checkout(url: str, commit: str) -> Path:
    """Return a directory with the files of a commit, which later calls use again. Raises Skipped."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = caches / "gpubpf-conformance" / f"{url.rsplit('/', 1)[1]}-{commit}"
    if not (place / ".git" / "HEAD").exists():
        _git("init", "--quiet", str(place))
    if not (place / ".git" / "FETCH_HEAD").exists():
        _git("-C", str(place), "fetch", "--quiet", "--depth", "1", url, commit)
    _git("-C", str(place), "checkout", "--quiet", "--force", commit)
    return place


def _git(*arguments: str) -> None:
    try:
        subprocess.run(["git", *arguments], check=True, capture_output=True, text=True, timeout=PATIENCE)
    except FileNotFoundError:
        raise Skipped("git is missing") from None
    except subprocess.TimeoutExpired:
        raise Skipped(f"git {' '.join(arguments)} took longer than {PATIENCE} s") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().split("\n")
        raise Skipped(next((line for line in lines if line.startswith("fatal")), lines[-1])) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 if a program gave something different from what was expected."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["wheels"]:
        return wheels.main(argv[1:])
    if argv[:1] == ["blackwell"]:
        return blackwell.main(argv[1:])
    parser = argparse.ArgumentParser(
        prog="conformance",
        description=__doc__.split(":")[0] + ".",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    suites = [*RUN, *LISTS, "programs", "copies"]
    parser.add_argument("suite", choices=suites, metavar="SUITE", help=", ".join(suites))
    parser.add_argument("--from", dest="directory", type=Path, metavar="DIR", help="take the suite from DIR")
    parser.add_argument("--commit", metavar="C", help="check out this commit, not the one of the table")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="run N programs at once (default 2)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write each outcome to FILE, as JSON Lines"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="only programs of this name, which may have * (not bpf, bpftime and ptx); may be given several times",
    )
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="only every Nth of the programs that --only names, from the first on (suites that are built here)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue an interrupted run, whose outcomes are in FILE of --json (not bpf, bpftime and ptx)",
    )
    parser.add_argument(
        "--ways",
        type=_ways,
        default=EVERY_TOOL,
        metavar="WAYS",
        help=f"run programs only in these ways: alone, {', '.join(EVERY_TOOL)} (default all that fit; alone is always one)",
    )
    parser.add_argument(
        "--device",
        choices=["sim", "gpu"],
        default="sim",
        help="gpu: run on the GPU of this machine (programs only)",
    )
    parser.add_argument("--build-only", action="store_true", help="build the programs, and run none")
    args = parser.parse_args(argv)
    if args.resume and not args.json:
        parser.error("--resume requires --json FILE")
    if args.suite in RUN and (args.resume or args.only):
        parser.error(f"{args.suite} has no --only and no --resume")
    if args.every < 1 or (args.every > 1 and args.suite not in LISTS):
        parser.error(f"--every must be a positive integer, and goes with {', '.join(LISTS)}")
    if args.device == "gpu" and args.suite != "programs":
        parser.error("--device gpu is for programs only")
    directory = args.directory
    if directory is None:
        if args.suite not in SOURCES:
            parser.error(f"{args.suite} requires --from DIR")
        url, commit = SOURCES[args.suite]
        try:
            directory = checkout(url, args.commit or commit)
        except Skipped as reason:
            print(
                f"conformance: skipped {args.suite}: {reason}; give a checkout of {url} with --from",
                file=sys.stderr,
            )
            return SKIPPED
    if args.suite == "copies" and not shutil.which("ptxas"):
        print("conformance: skipped copies: ptxas is missing", file=sys.stderr)
        return SKIPPED
    if args.suite in LISTS and not shutil.which(compiler := LISTS[args.suite].api.compiler):
        print(f"conformance: skipped {args.suite}: {compiler} is missing", file=sys.stderr)
        return SKIPPED
    outcomes = _earlier(args)
    with args.json.open("a" if args.resume else "w") if args.json else contextlib.nullcontext() as file:
        for outcome in _outcomes(args, directory.resolve(), {o.file for o in outcomes}):
            outcomes.append(outcome)
            if file:
                print(json.dumps(asdict(outcome)), file=file, flush=True)
    if not outcomes:
        print(f"conformance: skipped {args.suite}: {directory} has no programs of it", file=sys.stderr)
        return SKIPPED
    print(table(outcomes))
    if args.suite == "copies":
        print(f"\n{copies.figure(outcomes)}")
    return int(any(o.verdict == DIFFERENT for o in outcomes))


def _ways(text: str) -> list[str]:
    """Return the tools among the ways in a list with commas."""
    ways = text.split(",")
    if unknown := set(ways) - {"alone", *EVERY_TOOL}:
        raise argparse.ArgumentTypeError(f"no such way: {', '.join(sorted(unknown))}")
    return [tool for tool in EVERY_TOOL if tool in ways]


def _earlier(args: argparse.Namespace) -> list[Outcome]:
    """Return the outcomes in the file of an interrupted run, except those of the last program: some may be missing."""
    if not args.resume or not args.json.exists():
        return []
    found = [Outcome(**json.loads(line)) for line in args.json.read_text().splitlines()]
    kept = [o for o in found if o.file != found[-1].file]
    args.json.write_text("".join(json.dumps(asdict(o)) + "\n" for o in kept))
    return kept


def _outcomes(args: argparse.Namespace, directory: Path, done: Collection[str]) -> Iterator[Outcome]:
    if args.suite in RUN:
        return RUN[args.suite](directory, args.jobs)
    only = args.only or ["*"]
    if args.suite == "copies":
        return copies.run(directory, args.jobs, only, done)
    if args.suite == "programs":
        tools = [tool for tool in TOOLS if tool in args.ways]
        api = APIS["cuda"] if args.device == "sim" else replace(APIS["cuda"], device="")
        return programs.run(directory, args.jobs, tools, only, done, api)
    suite = LISTS[args.suite]
    named = [program for program in suite.programs if any(fnmatch(program.name, name) for name in only)]
    suite = replace(suite, programs=named[:: args.every])
    place = build.BUILT / args.suite / suite.api.gpu
    tools = [tool for tool in suite.api.tools if tool in args.ways]
    return programs.run_list(suite, directory, place, args.jobs, only, args.build_only, done, tools)


if __name__ == "__main__":
    sys.exit(main())

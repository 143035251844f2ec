# PYTHON_ARGCOMPLETE_OK
"""The `cudasim` command: run a program on the embedded CUDA device, with no tool."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from gpubpf.errors import Error
from gpubpf.show import cli

LIBRARIES = Path(__file__).resolve().parent / "lib"
CLOCKS = ("real", "virtual")
EPILOG = """\
examples:
  cudasim -- ./vectoradd            run ./vectoradd where there is no GPU
  CUDASIM_HOSTILE=1 cudasim -- ./a  as strict as drivers are, and stricter
  CUDASIM_DEVICES=2 cudasim -- ./a  with two devices

The program must hold PTX and use the shared CUDA runtime (nvcc -cudart shared)
or the driver. Results are exact; times mean nothing, except on the virtual
clock (--clock virtual): there 1 ns is one PTX instruction of a thread, 10 bytes
copied or 100 bytes set, a launch call takes 1,000 ns, and every run repeats.
"""


class LauncherError(Error):
    """The program cannot be run; `status` is the exit status."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


def build_parser() -> cli.Parser:
    """The command line up to ``--``."""
    parser = cli.Parser(
        prog="cudasim",
        usage="cudasim [--clock real|virtual] -- COMMAND [ARG...]",
        description="Run a program on the embedded CUDA device: a GPU in software.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        help="what clocks and events show: real time (default), or a virtual one that repeats exactly",
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    return parser


def environment(current: Mapping[str, str], clock: str | None = None) -> dict[str, str]:
    """`current` with what a program needs to find the embedded device; raises LauncherError if it is not built."""
    if not (LIBRARIES / "libcuda.so.1").exists():
        raise LauncherError("the embedded device is not built; run script/setup")
    clock = clock or current.get("CUDASIM_CLOCK") or "real"
    if clock not in CLOCKS:
        raise LauncherError(f"CUDASIM_CLOCK is {clock!r}; unset it, or set it to real or virtual", 2)
    changed = dict(current)
    changed["LD_LIBRARY_PATH"] = ":".join(filter(None, (str(LIBRARIES), current.get("LD_LIBRARY_PATH"))))
    changed["CUDASIM_CLOCK"] = clock
    return changed


def execute(command: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Become the command; its exit status is the shell's to see. Raises LauncherError (127 not found, 126 no program)."""
    name = command[0] or repr("")
    try:
        if not command[0]:
            raise FileNotFoundError
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(command[0], list(command), dict(variables))
    except FileNotFoundError:
        raise LauncherError(f"{name}: not found; check the name and PATH", 127) from None
    except OSError as error:
        raise LauncherError(
            f"{name}: {error.strerror}; check that it is a program that may be run", 126
        ) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, set the environment, become the command."""
    with cli.errors("cudasim"):
        parser = build_parser()
        own, command = cli.split_command(sys.argv[1:] if argv is None else argv)
        arguments = cli.parse_own(parser, own)
        if arguments.words or not command:
            parser.error("the command goes behind '--': cudasim -- COMMAND")
        execute(command, environment(os.environ, arguments.clock))


if __name__ == "__main__":
    sys.exit(main())

"""The `cudasim` command: run a program on the embedded CUDA device, with no tool."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

LIBRARIES = Path(__file__).resolve().parent / "lib"
EPILOG = """\
examples:
  cudasim -- ./vectoradd            run ./vectoradd where there is no GPU
  CUDASIM_HOSTILE=1 cudasim -- ./a  as strict as drivers are, and stricter
  CUDASIM_DEVICES=2 cudasim -- ./a  with two devices

The program must hold PTX and use the shared CUDA runtime (nvcc -cudart shared) or the driver.
Results are exact; times mean nothing.
"""


class LauncherError(Exception):
    """What a user can mend, in one line; `status` is the exit status."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="cudasim",
        usage="cudasim [--clock real|virtual] -- COMMAND [ARG...]",
        description="Run a program on the embedded CUDA device: a GPU in software.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--clock", choices=("real", "virtual"), help="what kernels' clocks and events show (default real)"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the program and its arguments"
    )
    return parser


def environment(current: Mapping[str, str], clock: str | None = None) -> dict[str, str]:
    """`current` with what a program needs to find the embedded device; raises LauncherError if it is not built."""
    if not (LIBRARIES / "libcuda.so.1").exists():
        raise LauncherError("the embedded device is not built; run script/setup")
    clock = clock or current.get("CUDASIM_CLOCK") or "real"
    if clock == "virtual":
        raise LauncherError("there is no virtual clock yet; use --clock real")
    changed = dict(current)
    changed["LD_LIBRARY_PATH"] = ":".join(filter(None, (str(LIBRARIES), current.get("LD_LIBRARY_PATH"))))
    changed["CUDASIM_CLOCK"] = clock
    return changed


def execute(command: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Become the command; its exit status is the shell's to see. Raises LauncherError (127 not found, 126 no program)."""
    try:
        os.execvpe(command[0], list(command), dict(variables))
    except FileNotFoundError:
        raise LauncherError(f"{command[0]}: not found; give a path or a command on PATH", 127) from None
    except OSError as error:
        raise LauncherError(f"{command[0]}: {error.strerror}; give a program", 126) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, set the environment, become the command."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("no command; say: cudasim -- COMMAND")
    try:
        execute(command, environment(os.environ, arguments.clock))
    except LauncherError as error:
        print(f"cudasim: {error}", file=sys.stderr)
        return error.status


if __name__ == "__main__":
    sys.exit(main())

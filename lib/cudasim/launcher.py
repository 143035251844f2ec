# PYTHON_ARGCOMPLETE_OK
"""The `cudasim` command: run a program on the embedded CUDA device, with no tool."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from gpubpf import __version__
from gpubpf.errors import Error

LIBRARIES = Path(__file__).resolve().parent / "lib"
CLOCKS = ("real", "virtual")
EPILOG = """\
examples:
  cudasim -- ./vectoradd            run ./vectoradd where there is no GPU
  CUDASIM_HOSTILE=1 cudasim -- ./a  at least as strict as any driver
  CUDASIM_DEVICES=2 cudasim -- ./a  with two devices

The program must contain PTX and use the shared CUDA runtime (nvcc -cudart
shared) or the driver. Results are exact. Times mean nothing, except on the
virtual clock (--clock virtual): there 1 ns is one PTX instruction of a thread,
10 bytes copied or 100 bytes set, a launch call takes 1,000 ns, and all runs
show the same times.
"""


class LauncherError(Error):
    """The program cannot be run. `status` is the exit status of `cudasim`."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Report a usage error in one line, with exit status 2."""
        raise LauncherError(f"{message}; see cudasim --help", 2)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exit after --help. Raises OSError if the help text cannot be written."""
        if sys.stdout is not None:
            sys.stdout.flush()
        super().exit(status, message)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser for the options before ``--``."""
    parser = _Parser(
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
        help="clock that programs and events read: real (default), or virtual, which repeats exactly",
    )
    parser.add_argument("--version", action="version", version=f"cudasim (gpubpf) {__version__}")
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    return parser


def environment(current: Mapping[str, str], clock: str | None = None) -> dict[str, str]:
    """Return `current` with the variables that make a program use the embedded device.

    Raises LauncherError if the device is not built, or if the clock is unknown.
    """
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
    """Replace this process by the command, so that the caller sees the command's exit status.

    Raises LauncherError with status 127 for a command that is not found, 126 for one that cannot be executed.
    """
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
            f"{name}: {error.strerror}; check that it is an executable program", 126
        ) from None


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command line into the words before and after the first ``--``."""
    at = words.index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


def _complain(text: str) -> None:
    """Write one line to standard error, with control characters escaped. Nothing happens if that is closed."""
    line = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"cudasim: {line}\n")
            sys.stderr.flush()


def _discard_output() -> None:
    """Drop what standard output still buffers: Python would try to write it again at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of the command line on the embedded device; return the exit status if it cannot be run."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # raised outside of the main thread
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    try:
        parser = build_parser()
        options, command = _split(sys.argv[1:] if argv is None else argv)
        if "_ARGCOMPLETE" in os.environ:  # a shell completes the options
            import argcomplete

            argcomplete.autocomplete(parser)
        arguments = parser.parse_intermixed_args(options)
        if arguments.words or not command:
            parser.error("give the command after '--': cudasim -- COMMAND")
        execute(command, environment(os.environ, arguments.clock))
    except Error as error:
        _complain(str(error))
        return error.status
    except BrokenPipeError:
        _discard_output()
        return 0
    except OSError as error:
        _discard_output()
        _complain(f"cannot write: {error.strerror}; check the space left")
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""Run a program on an embedded device: what the commands `cudasim` and `hipsim` have in common.

A device is a folder of libraries that the dynamic linker finds before those of the GPU's vendor, and a clock that an environment
variable chooses.
"""

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
from gpubpf.record import Record

CLOCKS = ("real", "virtual")


class LauncherError(Error):
    """The program cannot be run. `status` is the exit status of the command."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


class EmbeddedDevice(Record):
    """A device. `libraries`: its folder. `library`: a file in this folder that exists once the device is built."""

    name: str  # name of the command
    libraries: Path
    library: str
    description: str
    epilog: str
    gpus: tuple[str, ...] = ()  # the values of --gpu; empty: the command has no such option

    @property
    def prefix(self) -> str:
        """The beginning of the names of environment variables, such as CUDASIM."""
        return self.name.upper()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Report a usage error in one line, with exit status 2."""
        raise LauncherError(f"{message}; see {self.prog} --help", 2)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exit after --help. Raises OSError if the help text cannot be written."""
        if sys.stdout is not None:
            sys.stdout.flush()
        super().exit(status, message)


def build_parser(device: EmbeddedDevice) -> argparse.ArgumentParser:
    """Return the parser for the options before ``--``."""
    gpu = f" [--gpu {'|'.join(device.gpus)}]" if device.gpus else ""
    parser = _Parser(
        prog=device.name,
        usage=f"{device.name} [--clock real|virtual]{gpu} -- COMMAND [ARG...]",
        description=device.description,
        epilog=device.epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        help="clock that programs and events read: real (default), or virtual, which counts instructions",
    )
    if device.gpus:
        help_text = f"GPU to emulate (default: one that the program has code for, or {device.gpus[0]})"
        parser.add_argument("--gpu", choices=device.gpus, help=help_text)
    parser.add_argument("--version", action="version", version=f"{device.name} (gpubpf) {__version__}")
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    return parser


def environment(
    device: EmbeddedDevice, current: Mapping[str, str], clock: str | None = None, gpu: str | None = None
) -> dict[str, str]:
    """Return `current` with the variables that make a program use the device.

    Raises LauncherError if the device is not built, or if the clock is unknown.
    """
    if not (device.libraries / device.library).exists():
        raise LauncherError("the embedded device is not built; run script/setup")
    variable = f"{device.prefix}_CLOCK"
    clock = clock or current.get(variable) or "real"
    if clock not in CLOCKS:
        raise LauncherError(f"{variable} is {clock!r}; unset it, or set it to real or virtual", 2)
    changed = dict(current)
    path = filter(None, (str(device.libraries), current.get("LD_LIBRARY_PATH")))
    changed["LD_LIBRARY_PATH"] = ":".join(path)
    changed[variable] = clock
    if gpu:
        changed[f"{device.prefix}_GPU"] = gpu
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


def _complain(name: str, text: str) -> None:
    """Write one line to standard error, with control characters escaped. Do nothing if standard error is closed."""
    line = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{name}: {line}\n")
            sys.stderr.flush()


def _discard_output() -> None:
    """Drop what standard output still buffers: Python would try to write it again at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def main(device: EmbeddedDevice, argv: Sequence[str] | None = None) -> int:
    """Run the command of the command line on the device; return the exit status if it cannot be run."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # raised outside of the main thread
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    try:
        parser = build_parser(device)
        options, command = _split(sys.argv[1:] if argv is None else argv)
        if "_ARGCOMPLETE" in os.environ:  # a shell completes the options
            import argcomplete

            argcomplete.autocomplete(parser)
        arguments = parser.parse_intermixed_args(options)
        if arguments.words or not command:
            parser.error(f"give the command after '--': {device.name} -- COMMAND")
        gpu = arguments.gpu if device.gpus else None
        execute(command, environment(device, os.environ, arguments.clock, gpu))
    except Error as error:
        _complain(device.name, str(error))
        return error.status
    except BrokenPipeError:
        _discard_output()
        return 0
    except OSError as error:
        _discard_output()
        _complain(device.name, f"cannot write: {error.strerror}; check the space left")
        return 1

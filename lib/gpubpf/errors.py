"""Errors that a user can act on. Each message is one line: ``WHAT FAILED; WHAT TO DO``."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
TOO_MANY_FILES = "too many open files; raise the limit (ulimit -n)"

# Python is built without some of its modules if the headers of their libraries are missing then.
COMPLETE_PYTHON = (
    "use the distribution's Python, or build this one again with the headers of its libraries "
    "(libffi-dev, zlib1g-dev)"
)
_FILES_OR_REPAIR = "raise the limit on open files (ulimit -n) if it is low, or run script/setup"


def out_of_files(error: BaseException) -> bool:
    """Return whether the limit on open files, of the process or of the machine, caused an error."""
    return isinstance(error, OSError) and error.errno in OUT_OF_FILES


def in_words(error: BaseException) -> str:
    """Return an error in words, for the end of a notice."""
    if out_of_files(error):
        return TOO_MANY_FILES
    return str(getattr(error, "strerror", None) or error)


class Error(Exception):
    """Base of all errors that have a cause outside of the library. `str()` is one line for the user.

    `status` is the exit status of a tool that ends with this error: 2 for wrong usage, else 1.
    """

    status = 1


def missing_package(error: ImportError) -> str:
    """Return the line for the user about a Python package that this interpreter lacks or cannot load."""
    if not isinstance(error, ModuleNotFoundError):
        said = str(error).strip().splitlines() or ["no reason given"]
        return f"a Python package cannot be loaded: {said[-1].strip()}; {_FILES_OR_REPAIR}"
    package = (error.name or str(error)).split(".")[0]
    if package in sys.stdlib_module_names:
        return f"{package}, a part of Python itself, is missing in {sys.executable}; {COMPLETE_PYTHON}"
    return f"the Python package {package} is missing in {sys.executable}; {how_to_install(package)}"


def how_to_install(package: str) -> str:
    """Return a command, or another remedy, that installs a Python package for this interpreter."""
    if sys.prefix != sys.base_prefix:
        return f"run {sys.executable} -m pip install {package}"
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "script/setup").exists():
        environment = checkout / ".venv" if os.geteuid() else Path("/opt/gpubpf")  # as script/setup chooses
        return f"run script/setup, and then {environment}/bin/python3 instead of this interpreter"
    import sysconfig  # imported here because it is seldom needed

    if (Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED").exists():  # pip refuses to install there
        return f"install the distribution's package of {package}, or install gpubpf and it into a virtual environment"
    return f"run {sys.executable} -m pip install {package}"


class UsageError(Error):
    """The command line is wrong."""

    status = 2


class CompileError(Error):
    """The C text does not compile, or bcc is not usable on this machine."""


class VerifyError(Error):
    """A device program was rejected. The message names the instruction and the C line."""


class PtxError(Error):
    """PTX that cannot be read. The message names the line."""


class ImageError(Error):
    """An ELF file, fatbin or cubin that cannot be read."""


class Refusal(Error):
    """A kernel cannot be instrumented. `str()` is the reason, as the user sees it."""


class AssembleError(Error):
    """ptxas is missing, or rejected the PTX."""


class SessionError(Error):
    """The command could not be started, attached to, or served."""

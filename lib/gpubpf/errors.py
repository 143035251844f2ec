"""Errors a user can act on: one line each, ``WHAT; WHAT TO DO``, never a traceback."""

from __future__ import annotations


class Error(Exception):
    """Base of everything the library raises for a cause outside it. `str()` is one line for the user.

    `status` is the exit status a tool ends with: 1 for what a user can fix, 2 for usage.
    """

    status = 1


class UsageError(Error):
    """The command line asks for something that makes no sense."""

    status = 2


class CompileError(Error):
    """The C text does not compile, or bcc is not usable here."""


class VerifyError(Error):
    """A device program was rejected; the message names the instruction and the C line."""


class PtxError(Error):
    """PTX that cannot be read. The message names the line."""


class ImageError(Error):
    """An ELF file, fatbin or cubin that cannot be read."""


class AssembleError(Error):
    """ptxas is missing, or rejected the PTX."""


class SessionError(Error):
    """The command could not be started, attached to, or served."""

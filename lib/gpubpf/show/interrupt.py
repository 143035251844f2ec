"""Ctrl-C while a tool is loaded ends the process quietly: a traceback through
half-loaded modules helps nobody.

Importing this module makes Ctrl-C end the process, if Python's own handler is in place. `raises` restores Python's handler.
"""

from __future__ import annotations

# Not the module `signal`, which is written in Python and imports other modules: Ctrl-C may come while these load.
import _signal as signal  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


def ends() -> bool:
    """Let Ctrl-C end the process. Returns False, and changes nothing, when there is another handler or this is not the main thread."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler and _handle(signal.SIG_DFL)


def raises() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, as Python does by default."""
    _handle(signal.default_int_handler)


def _handle(handler: int | Callable[[int, FrameType | None], object]) -> bool:
    try:
        signal.signal(signal.SIGINT, handler)
    except ValueError:  # only the main thread may set handlers
        return False
    return True


loading = ends()

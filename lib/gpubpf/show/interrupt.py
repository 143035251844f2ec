"""Ctrl-C while a tool is loaded ends the process quietly: a traceback through
half-loaded modules helps nobody.

Importing this module switches to that, where Python's own handler is in place. `raises` switches back.
"""

from __future__ import annotations

# Not signal, which is written in Python and imports others: Ctrl-C may come while they load.
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

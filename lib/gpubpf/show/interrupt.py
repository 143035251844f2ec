"""While a tool is loaded Ctrl-C ends the process: nothing is measured yet, and nobody wants to know which module was on its way.

To import this begins that, where Python's own handler was in place; `raises` ends it.
"""

from __future__ import annotations

import signal


def ends() -> bool:
    """From now on Ctrl-C ends the process. False: somebody handles it, or this is not the main thread; nothing was changed."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler and _handle(signal.SIG_DFL)


def raises() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, as Python has it."""
    _handle(signal.default_int_handler)


def _handle(handler: signal._HANDLER) -> bool:
    try:
        signal.signal(signal.SIGINT, handler)
    except ValueError:  # only the main thread may say
        return False
    return True


loading = ends()

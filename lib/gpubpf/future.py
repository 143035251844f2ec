"""The result of work that another thread does.

`Future` has the methods of `concurrent.futures.Future` that the library needs. Importing concurrent.futures takes 5 ms, because it
imports logging.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Future(Generic[T]):
    """A result or an exception, which one thread sets once. Any thread may call the methods."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all of these
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Future[T]], object]] = []

    def done(self) -> bool:
        """Return whether the result or the exception is known."""
        with self._changed:
            return self._done

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the result or the exception is known, at most `timeout` seconds. Return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._done, timeout)

    def result(self, timeout: float | None = None) -> T:
        """Return the result, or raise the exception. Raises TimeoutError if neither is known after `timeout` seconds."""
        if not self.wait(timeout):
            raise TimeoutError
        if self._error is None:
            result: T = self._result
            return result
        try:
            raise self._error
        finally:
            del self  # the exception refers to this frame; it must not refer back to the exception

    def set_result(self, result: T) -> None:
        """Set the result. Calls the callbacks in this thread."""
        self._settle(result, None)

    def set_exception(self, error: BaseException) -> None:
        """Set the exception. Calls the callbacks in this thread."""
        self._settle(None, error)

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Call `callback` with this object once the result or the exception is known; at once if it is known already."""
        with self._changed:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback(self)

    def _settle(self, result: Any, error: BaseException | None) -> None:
        with self._changed:
            if self._done:
                raise RuntimeError("a result was set twice")
            self._done, self._result, self._error = True, result, error
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            callback(self)


def wait(futures: Iterable[Future[Any]], timeout: float) -> None:
    """Wait until all futures are done, at most `timeout` seconds."""
    until = time.monotonic() + timeout
    for future in futures:
        future.wait(max(0.0, until - time.monotonic()))

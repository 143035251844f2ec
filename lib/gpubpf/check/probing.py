"""Run checks side by side. A check that hangs, such as in a driver or in a file system of the network, ends as UNKNOWN."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from gpubpf.check.finding import UNKNOWN, Check, Finding
from gpubpf.check.machine import Machine
from gpubpf.errors import in_words

T = TypeVar("T")
_LONGER = "try again with a longer --timeout"
_GRACE = (
    1.0  # seconds beyond the timeout: a check that ends itself at the timeout can still report the reason
)


def run(checks: Sequence[Check], machine: Machine) -> Iterator[tuple[Check, Finding]]:
    """Yield each check with its finding, in the order of `checks`. Each check has `machine.timeout` seconds."""
    results: dict[str, Finding | None] = {}

    def read(check: Check) -> None:
        results[check.name] = found(lambda: check.read(machine))

    threads = [threading.Thread(target=read, args=(check,), daemon=True) for check in checks]
    for thread in threads:
        thread.start()
    until = time.monotonic() + machine.timeout + _GRACE
    for check, thread in zip(checks, threads, strict=True):
        thread.join(max(until - time.monotonic(), 0))
        finding = results.get(check.name) if not thread.is_alive() else no_answer(machine)
        if finding is not None:
            yield check, finding


def found(function: Callable[[], Finding | None]) -> Finding | None:
    """Return the finding of a function. An unexpected error, such as a file that it may not read, becomes UNKNOWN."""
    try:
        return function()
    except PermissionError as error:
        what = f"{error.filename}: " if error.filename else ""
        return Finding(UNKNOWN, f"{what}{in_words(error)}", action="run gpubpf check as root to see it")
    except subprocess.TimeoutExpired as error:
        return Finding(UNKNOWN, f"no answer in {error.timeout:g} s", action=_LONGER)
    except Exception as error:
        what = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        said = in_words(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        return Finding(UNKNOWN, what + said)


def within(seconds: float, function: Callable[[], T]) -> T | None:
    """Return the result of a function, or raise its error; None if it takes longer."""
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return results[0] if results else None


def no_answer(machine: Machine) -> Finding:
    """Return the finding about a check that did not end in time."""
    return Finding(UNKNOWN, f"no answer in {machine.timeout:g} s", action=_LONGER)

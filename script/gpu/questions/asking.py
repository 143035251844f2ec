"""Questions, and the child processes that ask them: a driver may kill a process, or never return."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpu.driver import DriverError

# "answer": a sentence; "agrees": with what was believed, None: nothing was; what else was seen.
Answer = dict[str, Any]
Say = Callable[[Any], None]


class CannotAsk(Exception):
    """This machine lacks what the question needs."""


@dataclass(frozen=True)
class Question:
    """A question about the driver. `believed`: what the code assumes. `seconds`: the time limit of its process."""

    name: str
    text: str
    believed: str
    seconds: float
    ask: Callable[..., Answer]


QUESTIONS: list[Question] = []


def question(
    text: str, believed: str, seconds: float = 20
) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    def register(ask: Callable[..., Answer]) -> Callable[..., Answer]:
        QUESTIONS.append(Question(ask.__name__.replace("_", " "), text, believed, seconds, ask))
        return ask

    return register


def note(**seen: Any) -> None:
    """Print what was seen so far: the answer, should this process be killed."""
    print(json.dumps({"answer": "not all was asked", "agrees": None, **seen}), flush=True)


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def isolated(action: Callable[[Say], None], seconds: float = 10) -> tuple[list[Any], str]:
    """Run `action` in a child process; return what it said, and how it ended ("" if well). Use no driver in this process before."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            die_with_parent()
            os.close(reader)
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            _answer(action, writer)
        os._exit(0)  # without waiting for what the driver may still wait for
    os.close(writer)
    said, late = _listen(reader, seconds)
    os.close(reader)
    status = reap(child, kill=late)
    ended = [text for kind, text in said if kind == "ended"]
    if late:
        ended = [f"no answer in {seconds:.0f} s"]
    elif not ended:
        ended = [f"died by {signal.Signals(status).name}" if status else "ended without a word"]
    if status is None:
        ended = [f"{ended[0] or 'it was over'}; its process could not be killed"]
    return [value for kind, value in said if kind == "said"], str(ended[0])


def _answer(action: Callable[[Say], None], writer: int) -> None:
    def write(kind: str, value: Any) -> None:
        line = json.dumps([kind, value]).encode() + b"\n"
        while line:
            line = line[os.write(writer, line) :]

    ended = ""
    try:
        action(lambda value: write("said", value))
    except DriverError as error:
        ended = str(error)
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
    write("ended", ended)


def _listen(reader: int, seconds: float) -> tuple[list[tuple[str, Any]], bool]:
    """Return the lines that arrived, and whether the time ran out."""
    ends, text, late = time.monotonic() + seconds, b"", False
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, ends - time.monotonic()))
        if not ready:
            late = True
            break
        if not (more := os.read(reader, 65536)):
            break
        text += more
    return [tuple(json.loads(line)) for line in text.split(b"\n")[:-1]], late


def reap(child: int, kill: bool = False, seconds: float = 8) -> int | None:
    """Return the signal that ended a child, 0 if it exited; None if it does not end in time, as in a driver that does not return."""
    if kill:
        os.kill(child, signal.SIGKILL)
    ends = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status & 127
        if time.monotonic() > ends:
            return None if kill else reap(child, True, seconds)
        time.sleep(0.005)


def alone(action: Callable[[], Any], seconds: float = 10) -> Any:
    """Return the result of `action`, run in a child process; a sentence if it does not end well."""
    said, ended = isolated(lambda say: say(action()), seconds)
    return said[0] if said else ended


def row_by_row(
    names: Sequence[str], ask: Callable[[Sequence[str]], Iterator[tuple[str, Any]]], seconds: float
) -> dict[str, Any]:
    """Return a row for each name, made by `ask` in a child process.

    If the child ends early, its end is the row of the name that it was at, and another child continues with the rest.
    """
    found: dict[str, Any] = {}
    ends = time.monotonic() + seconds
    left = list(names)
    while left and time.monotonic() < ends:

        def run(say: Say, left: Sequence[str] = left) -> None:
            for row in ask(left):
                say(row)

        said, ended = isolated(run, ends - time.monotonic())
        found |= dict(said)
        left = [name for name in left if name not in found]
        if left and (ended or not said):
            found[left.pop(0)] = ended or "no answer"
    return found | dict.fromkeys(left, "not asked: no time")

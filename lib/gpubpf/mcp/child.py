"""Runs one of this project's commands for a client, within limits of time and size."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

import anyio
from anyio.abc import ByteReceiveStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream

from gpubpf.process import children

MOST_BYTES = 1 << 20  # of the records in an answer
LONGEST_LINE = 1 << 20
MOST_NOTICES = 20
PATIENCE = 60.0  # seconds for attaching and reporting, beside the time of the measurement itself
LONGEST_NOTICE = 4096  # characters
_INTERRUPT_WAIT = 10.0  # seconds after SIGINT until SIGKILL
_KILL_WAIT = (
    5.0  # seconds after SIGKILL: a command that waits in the kernel for a process (FUSE) does not end
)


async def answer(module: str, words: Sequence[str], seconds: float, most: int) -> dict[str, Any]:
    """Run a command with `--json`. Return its records, notices and exit status.

    module: what to run: a module with a function `main`.
    words: the arguments of its command line.
    seconds: how long the command measures. If the command runs PATIENCE seconds longer, it is interrupted, and then killed.
    most: the number of records to return. The last record of a tool, its summary, is always among them.
    """
    program = f"from {module} import main; sys.exit(main())"
    command = children.python(program, *words)
    process = await anyio.open_process(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    records = _Records(most)
    notices: list[str] = []
    late = True
    try:
        with anyio.move_on_after(seconds + PATIENCE):
            async with anyio.create_task_group() as group:
                group.start_soon(_read, process.stdout, records.add)
                group.start_soon(_read, process.stderr, lambda line: _note(notices, line))
            await process.wait()
            late = False
    finally:
        await _end(process)
    if late:
        notices.append(f"interrupted, because it took more than {seconds + PATIENCE:g} s")
    if process.returncode is None:
        notices.append(
            "it does not end, because it waits for a process (FUSE?); its records may be incomplete"
        )
    return {
        "records": [*records.found, *records.summary],
        "left_out": records.left_out,
        "notices": notices,
        "status": process.returncode,
    }


class _Records:
    """The first records of a command's output, and its summary. The others are counted."""

    def __init__(self, most: int) -> None:
        self.found: list[dict[str, Any]] = []
        self.summary: list[
            dict[str, Any]
        ] = []  # the last one that found no room; the answer to a question may have any number
        self.left_out = 0
        self._most, self._room = most, MOST_BYTES

    def add(self, line: bytes) -> None:
        """Take a line of the output; keep it if there is room for it."""
        has_room = len(self.found) < self._most and len(line) <= self._room
        if not has_room and not line.startswith(b'{"type":"summary"'):
            self.left_out += 1
            return
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # a line that was cut off, or lists in lists in lists
            self.left_out += 1
            return
        if has_room:
            self.found.append(record)
            self._room -= len(line)
        else:
            self.left_out += len(self.summary)
            self.summary = [record]


def _note(notices: list[str], line: bytes) -> None:
    if len(notices) < MOST_NOTICES:
        notices.append(line[:LONGEST_NOTICE].decode("utf-8", "replace"))


async def _read(stream: ByteReceiveStream | None, take: Any) -> None:
    """Call `take` for each line of a stream until the stream ends. The rest of a line that is too long becomes a line of its own."""
    if stream is None:
        return
    lines = BufferedByteReceiveStream(stream)
    while True:
        try:
            take(await lines.receive_until(b"\n", LONGEST_LINE))
        except anyio.DelimiterNotFound:
            take(await lines.receive_exactly(LONGEST_LINE))
        except anyio.IncompleteRead:
            return


async def _end(process: Process) -> None:
    """End a command that still runs as Ctrl-C does, so that it detaches from its targets; else with SIGKILL. Wait for seconds."""
    with anyio.CancelScope(shield=True):
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            with anyio.move_on_after(_INTERRUPT_WAIT):
                await process.wait()
        if process.returncode is None:
            process.kill()
            with anyio.move_on_after(_KILL_WAIT):
                await process.wait()
        if process.returncode is not None:
            await process.aclose()  # this waits for the end

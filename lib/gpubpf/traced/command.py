"""Start a command to trace, and set up the tool's own process: its open file limit, and the signals that end a measurement.

`Session` and the calls package use it.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shlex
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from gpubpf import agent
from gpubpf.agent.definitions import CUPTI_AUTOMATIC, CUPTI_VARIABLE, SANITIZER_VARIABLE, SOCKET_VARIABLE
from gpubpf.errors import SessionError
from gpubpf.process import users

if TYPE_CHECKING:
    from gpubpf.traced.measurement import Measurement


# Open file limits saved by `raise_file_limit`; the first one is the original.
_files: list[tuple[int, int]] = []
# Seconds. Waits for `Signals.reader` time out: in one of 700 runs, such a wait did not return after SIGTERM and SIGINT; cause unknown.
LONGEST_WAIT = 1.0
NVTX_VARIABLE = "NVTX_INJECTION64_PATH"  # of NVIDIA's NVTX: the library that gets the ranges
CUPY_VARIABLE = "CUPY_COMPILE_WITH_PTX"  # since CuPy 12
_PYTHON = re.compile(r"(^|/)python[\d.]*$|\.py$")
XLA_OPTION = "--xla_gpu_asm_extra_flags"  # of XLA_FLAGS: options of its ptxas


class NotStarted(SessionError):
    """The command could not be started. `status`: the exit status for that case, 126 or 127, as in a shell."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def start_command(
    command: Sequence[str], measurement: Measurement, socket_name: str
) -> subprocess.Popen[bytes]:
    """Start a command whose processes load the agent in their first cuInit, or when they initialize ROCr.

    Raises SessionError; its subclass `NotStarted` if the command itself cannot be started."""
    environment = dict(os.environ)
    environment.update(measurement.device.environment)
    environment["CUDA_INJECTION64_PATH"] = str(agent.LIBRARY)
    if measurement.amd:
        environment.update(rocr_tool(agent.HSA_LIBRARY, environment))
    if measurement.targets.ptx_options and measurement.device.kind == "gpu" and may_run_python(command):
        added = ptx_options(environment)
        environment.update(added)
        if added:
            values = " ".join(f"{name}={shlex.quote(value)}" for name, value in added.items())
            measurement.note_once(
                f"the command runs with {values}, so that its kernels have PTX (--no-ptx-options)"
            )
    if measurement.agent_config.ranges or measurement.agent_config.chosen_ranges:
        if NVTX_VARIABLE in environment:
            measurement.note_once(
                f"{NVTX_VARIABLE} is set, so another tool gets the ranges of the command; unset it to see ranges"
            )
        else:
            environment[NVTX_VARIABLE] = str(agent.LIBRARY)
    environment[SOCKET_VARIABLE] = socket_name
    environment.pop(CUPTI_VARIABLE, None)
    if measurement.follow.cupti:
        automatic = CUPTI_AUTOMATIC if measurement.follow.cupti_automatic else ""
        environment[CUPTI_VARIABLE] = automatic + ":".join(measurement.follow.cupti)
    environment.pop(SANITIZER_VARIABLE, None)
    if measurement.follow.sanitizer:
        environment[SANITIZER_VARIABLE] = ":".join(measurement.follow.sanitizer)
    if measurement.user and not users.can_read(measurement.user, agent.LIBRARY.resolve()):
        raise SessionError(
            f"{measurement.user.name} cannot read {agent.LIBRARY}; install gpubpf where every user can read it, or use --user root"
        )
    return run(command, environment, measurement.user)


def other_tool(environment: Mapping[str, str]) -> str | None:
    """Return why a command with these variables cannot be traced: they load another tool's library. None: it can be traced."""
    if "CUDA_INJECTION64_PATH" in environment:
        return "CUDA_INJECTION64_PATH is set, so another tool traces this command; unset it"
    return None


def may_run_python(command: Sequence[str]) -> bool:
    """Return whether a command may run Python programs: it names Python or a Python file, or is a script, such as torchrun."""
    import shutil  # imported here because few commands need it

    if any(_PYTHON.search(word) for word in command):
        return True
    try:
        path = shutil.which(command[0]) or command[0]
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return file.read(2) == b"#!"
    except (OSError, ValueError):
        return False


def ptx_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which CuPy and XLA keep the PTX of kernels that they compile, unless the environment says otherwise.

    CuPy then passes PTX to the driver. XLA's ptxas keeps the PTX in the cubin."""
    added = {} if CUPY_VARIABLE in environment else {CUPY_VARIABLE: "1"}
    flags = environment.get("XLA_FLAGS", "")
    if XLA_OPTION not in flags:
        added["XLA_FLAGS"] = f"{flags} {XLA_OPTION}=-lineinfo".strip()
    return added


def rocr_tool(library: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which ROCr loads `library` besides the tools that the environment names.

    ROCr splits HSA_TOOLS_LIB at spaces. If the path has a space, the variable has only the file name, and LD_LIBRARY_PATH the
    directory."""
    others = environment.get("HSA_TOOLS_LIB")
    names = [others] if others else []
    if " " not in str(library):
        return {"HSA_TOOLS_LIB": " ".join([*names, str(library)])}
    places = [str(library.parent), environment.get("LD_LIBRARY_PATH", "")]
    return {
        "HSA_TOOLS_LIB": " ".join([*names, library.name]),
        "LD_LIBRARY_PATH": ":".join(place for place in places if place),
    }


def run(
    command: Sequence[str], environment: Mapping[str, str], user: users.User | None
) -> subprocess.Popen[bytes]:
    """Start a command with this environment, as `user` (None: the user who runs the tool).

    Raises `NotStarted` if it cannot be started."""
    environment = dict(environment)
    as_user: dict[str, Any] = {}
    if user:
        as_user = {"user": user.uid, "group": user.gid, "extra_groups": user.groups}
        environment.update(HOME=user.home, USER=user.name, LOGNAME=user.name)
        environment["SHELL"] = user.shell or "/bin/sh"
        for name in ("SUDO_USER", "SUDO_UID", "SUDO_GID", "SUDO_COMMAND"):
            environment.pop(name, None)
    if _files:
        as_user["preexec_fn"] = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, _files[0])
    try:
        # Keep files open that the user's shell opened for the command. The tool's own files are not inheritable.
        return subprocess.Popen(command, env=environment, close_fds=False, **as_user)
    except OSError as error:
        if isinstance(error, FileNotFoundError) or not command[0]:
            raise NotStarted(127, f"{command[0] or repr('')}: not found; check the name and PATH") from None
        text = f"{command[0]}: {error.strerror}; check that it is an executable program"
        raise NotStarted(126, text) from None


def raise_file_limit() -> None:
    """Raise the tool's limit on open files, because each traced process needs several. Commands started later get the old limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
        _files.append(before)


def _ignore_once(number: int, frame: FrameType | None) -> None:
    """Ignore a SIGINT that arrives just after a measurement has ended by itself: the user meant to end the measurement, not to lose
    the results. The next SIGINT ends the process."""
    signal.signal(number, signal.SIG_DFL)


class Signals:
    """Catches SIGINT, SIGTERM and SIGHUP, if the main thread calls `catch`.

    The file `reader` becomes readable after a signal and after `wake`, which any thread may call. `clear` empties it. Wait for it
    at most LONGEST_WAIT, then check `interrupted` and `terminated`."""

    def __init__(self) -> None:
        self.interrupted = False  # SIGINT: end the measurement, wait for the command
        self.terminated = False  # SIGTERM, SIGHUP: leave at once
        self._handlers: dict[int, Any] = {}
        self._wakeup_before: int | None = None  # None: not caught
        self.reader = self._writer = -1

    def catch(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        os.set_blocking(self.reader, False)
        if threading.current_thread() is not threading.main_thread():
            return
        # Python runs handlers only in the main thread, when it next executes bytecode. The byte is written at once, on whichever
        # thread the kernel delivers the signal to.
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:  # keep ignoring a signal that is ignored, as under nohup
                self._handlers[number] = before
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupted = True
        else:
            self.terminated = True

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # the pipe is full or closed
            os.write(self._writer, b"s")

    def clear(self) -> None:
        """Empty `reader`. Call this before checking what woke the thread."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.reader, 64)

    def close(self) -> None:
        """Restore the signals' actions. If no SIGINT has arrived and SIGINT would end the process, the next one is ignored."""
        if self._wakeup_before is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            self._wakeup_before = None
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._handlers.get(signal.SIGINT) == signal.SIG_DFL and not self.interrupted:
            signal.signal(signal.SIGINT, _ignore_once)
        self._handlers.clear()
        reader, writer = self.reader, self._writer
        self.reader = self._writer = -1  # threads may still call `wake`
        os.close(reader)
        os.close(writer)

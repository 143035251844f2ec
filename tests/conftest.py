"""For the whole suite: child processes import the checkout's library, and the embedded device is not kind."""

import contextlib
import fcntl
import functools
import io
import os
import signal
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpubpf_code import wait_until_no_probe_is_in

REPOSITORY = Path(__file__).resolve().parent.parent
DRIVER = REPOSITORY / "lib" / "cudasim" / "lib" / "libcuda.so.1"
WITHOUT_DRIVER = (
    "ebpf",
    "exits",
    "expressions",
    "query",
    "report",
    "threads",
    "verify",
)  # of tests/gpubpf: like the mark without_driver
TRIES = 5  # of tests of `may_come_too_late`

os.environ["PYTHONPATH"] = os.pathsep.join(
    part for part in (str(REPOSITORY / "lib"), os.environ.get("PYTHONPATH")) if part
)
os.environ.setdefault("CUDASIM_HOSTILE", "1")


os.environ.setdefault("GPUBPF_CHOICE", (REPOSITORY / "tests" / "choice").read_text().strip())
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # started in a shell's background: Ctrl-C is tested, too
    signal.signal(signal.SIGINT, signal.default_int_handler)


_start_process = subprocess.Popen.__init__


def _start_process_unbuffered(self: subprocess.Popen, *arguments: Any, **options: Any) -> None:
    """`readline` takes only its line from a pipe. What a buffer has beyond it, `communicate` would not return."""
    if options.get("text") or options.get("encoding"):
        options.setdefault("bufsize", 0)
    _start_process(self, *arguments, **options)
    for stream in (self.stdout, self.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream._CHUNK_SIZE = 1  # type: ignore[attr-defined]


subprocess.Popen.__init__ = _start_process_unbuffered  # type: ignore[method-assign]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hardware: needs a GPU; skipped with the reason where there is none")
    config.addinivalue_line("markers", "long: takes long; only with GPUBPF_LOOKS=all")
    config.addinivalue_line(
        "markers",
        "every(n): every nth case of the test; tests/choice has the turn; all with GPUBPF_LOOKS=all",
    )
    config.addinivalue_line(
        "markers", "own_processes: runs where no other process is seen, as all would be measured"
    )
    config.addinivalue_line(
        "markers",
        f"may_come_too_late: tried {TRIES} times; on a busy machine, what has to come in time may not, such as a hold",
    )
    config.addinivalue_line(
        "markers", "whole_machine: watches every process, or has probes in a driver that all use; runs alone"
    )
    config.addinivalue_line(
        "markers", "without_driver: takes long, and no process of it uses a GPU driver; runs beside any other"
    )


@functools.cache
def _turns() -> list[tuple[str, int]]:
    """Return the lines of tests/turns: a pattern of files, and the n of which every nth test of such a file runs."""
    lines = [line.split() for line in (REPOSITORY / "tests" / "turns").read_text().splitlines()]
    return [(words[1], int(words[0])) for words in lines if words and words[0] != "#"]


@functools.cache
def _turns_of(path: Path) -> int:
    """Return the n of which every nth test of a file runs."""
    return next((n for pattern, n in _turns() if path.match(pattern)), 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes long, and tests that take turns: cases of `every(n)`, and tests of the files in tests/turns.

    n choices in a row run all of them. At least one of each file runs. A test that the command line names, as in FILE::TEST, runs
    with all its cases.
    """
    if os.environ.get("GPUBPF_LOOKS") == "all" or any("::" in argument for argument in config.args):
        return
    choice = int(os.environ["GPUBPF_CHOICE"])
    numbers: Counter[tuple[Path, str]] = Counter()  # of a test's cases, or of a file's tests
    waiting: dict[Path, list[pytest.Item]] = {}  # whose turn it is not, of each file
    chosen, files = set(), set()
    for item in items:
        if item.get_closest_marker("long"):
            continue
        path, group, n = item.path, item.path.stem, _turns_of(item.path)
        if every := item.get_closest_marker("every"):
            group, n = item.name.partition("[")[0], n * every.args[0]
        turn = choice + zlib.crc32(group.encode()) + numbers[path, group]
        numbers[path, group] += 1
        if turn % n:
            waiting.setdefault(path, []).append(item)
        else:
            chosen.add(item)
            files.add(path)
    chosen |= {tests[choice % len(tests)] for path, tests in waiting.items() if path not in files}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which cases ran."""
    if os.environ.get("GPUBPF_LOOKS") != "all":
        terminalreporter.write_line(
            f"tests/choice says which cases run. GPUBPF_CHOICE={os.environ['GPUBPF_CHOICE']} repeats this choice;"
            " script/test --all runs every case."
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test of `own_processes` in its own pytest and PID namespace, if possible; try one of `may_come_too_late` several times."""
    if pyfuncitem.get_closest_marker("may_come_too_late") is not None and (
        pyfuncitem.get_closest_marker("own_processes") is None or "GPUBPF_OWN_PROCESSES" in os.environ
    ):
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        before = _children()
        for last in (*[False] * (TRIES - 1), True):
            try:
                pyfuncitem.obj(**arguments)
            except (AssertionError, OSError):  # what was not held may have ended
                if last:
                    raise
            else:
                break
            finally:
                _end_children(before)  # what a failed try has left would be found by the next one
        return True
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if pyfuncitem.get_closest_marker("own_processes") is None or "GPUBPF_OWN_PROCESSES" in os.environ:
        return None
    if subprocess.run([*unshare, "true"], stderr=subprocess.DEVNULL).returncode:
        return None
    done = subprocess.run(
        [*unshare, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid],
        cwd=pyfuncitem.config.rootpath,
        env={**os.environ, "GPUBPF_OWN_PROCESSES": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return True


def _children() -> set[int]:
    """The processes that this one has started, but for the helper that demangles names, which stays."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return {pid for pid in found if not _demangles(pid)}


def _demangles(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"names.serve" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _end_children(before: set[int]) -> None:
    """Kill what was started since; `subprocess` takes note of their end."""
    for pid in _children() - before:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture(autouse=True)
def _one_that_watches_the_machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """What holds each process that comes to the driver runs alone: the programs of any other test, of other workers and other runs
    too, would be traced by it for a moment, also where it has process numbers of its own, which are seen from outside."""
    without_driver = request.path.parent in [REPOSITORY / "tests/gpubpf" / name for name in WITHOUT_DRIVER]
    without_driver = without_driver or request.node.get_closest_marker("without_driver") is not None
    if "GPUBPF_OWN_PROCESSES" in os.environ or without_driver:
        yield
        return
    watches = any(request.node.get_closest_marker(name) for name in ("own_processes", "whole_machine"))
    place = Path(tempfile.gettempdir()) / f"gpubpf-tests-{os.getuid()}"
    with open(f"{place}-turn", "w") as turn, open(f"{place}-machine", "w") as machine:
        fcntl.flock(turn, fcntl.LOCK_EX)  # who waits for all others comes before those that come later
        fcntl.flock(machine, fcntl.LOCK_EX if watches else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        yield
        if watches and DRIVER.exists():
            wait_until_no_probe_is_in(DRIVER)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY

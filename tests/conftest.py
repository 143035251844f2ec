"""For the whole suite: child processes import the checkout's library, and the embedded device is not kind."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

os.environ["PYTHONPATH"] = os.pathsep.join(
    part for part in (str(REPOSITORY / "lib"), os.environ.get("PYTHONPATH")) if part
)
os.environ.setdefault("CUDASIM_HOSTILE", "1")
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # started in a shell's background: Ctrl-C is tested, too
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hardware: needs a GPU; skipped with the reason where there is none")
    config.addinivalue_line(
        "markers", "own_processes: runs where no other process is seen, as all would be measured"
    )
    config.addinivalue_line(
        "markers", "whole_machine: watches every process; of such tests one runs at a time"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test of `own_processes` is run by a pytest of its own, in process numbers of its own, where that can be."""
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


@pytest.fixture(autouse=True)
def _one_that_watches_the_machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of those that hold each process that comes to the driver, the second finds it traced by the first, also where it is one of
    its own: process numbers of one's own are seen from outside. Other workers, and other runs, wait."""
    watches = any(request.node.get_closest_marker(name) for name in ("own_processes", "whole_machine"))
    if not watches or "GPUBPF_OWN_PROCESSES" in os.environ:
        yield
        return
    with open(Path(tempfile.gettempdir()) / f"gpubpf-whole-machine-{os.getuid()}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY

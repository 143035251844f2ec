"""For the whole suite: child processes import the checkout's library, and the embedded device is not kind."""

import os
import signal
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


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY

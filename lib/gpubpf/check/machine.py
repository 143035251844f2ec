"""The machine that is checked, as a value with the places of its files. Tests use a machine with other places."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from gpubpf.record import Record, field

TIMEOUT = 5.0  # seconds for each check, and for each child process in it


class Machine(Record):
    """The places where a check reads. Functions that the checks share with the tools read fixed places."""

    root: Path = Path("/")
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    timeout: float = TIMEOUT

    def text(self, path: Path, absent: str | None = None) -> str:
        """Return the text of a file, without newlines at its end. Raises OSError.

        absent: what to return if the file does not exist; None: raise FileNotFoundError.
        """
        try:
            return path.read_text(errors="replace").rstrip("\n")
        except FileNotFoundError:
            if absent is None:
                raise
            return absent

    def status(self) -> dict[str, str]:
        """Return the fields of this process's status. Raises OSError."""
        lines = (line.partition(":") for line in self.text(self.proc / "self/status").splitlines())
        return {name: rest.strip() for name, _, rest in lines}

    def mounts(self) -> Iterator[tuple[str, str, frozenset[str]]]:
        """Yield the directory, the file system's type and all options of each mount. Raises OSError."""
        for line in self.text(self.proc / "self/mountinfo").splitlines():
            before, _, after = line.partition(" - ")
            words, kind = before.split(), after.split()
            if len(words) > 5 and len(kind) > 2:
                yield words[4], kind[0], frozenset((*words[5].split(","), *kind[2].split(",")))

    def commands(self) -> Iterator[str]:
        """Yield the name (comm) of each process that this user sees. Raises OSError."""
        os.stat(self.proc / "self")  # raises OSError if the directory is not a mounted /proc
        for entry in os.listdir(self.proc):
            if entry.isdigit():
                try:
                    yield self.text(self.proc / entry / "comm")
                except OSError:  # it has ended
                    continue

"""Find the source files that records name, below directories that the user named."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpubpf.process import target_files
from gpubpf.show.files_below import files_below
from gpubpf.show.table import printable

MOST_FILES = 100_000  # that are looked at
MOST_BYTES = 1 << 20  # of one file
MOST_LINES = 5000


class Sources:
    """The files below some directories. Records have names without directories, such as memory.cu."""

    def __init__(self, directories: Sequence[str]):
        self._given = bool(directories)
        self._paths: dict[str, list[str]] = {}
        looked = 0
        for directory in directories:
            for place, names in files_below(directory, hidden=False):
                for name in names:
                    self._paths.setdefault(name, []).append(os.path.join(place, name))
                looked += len(names)
                if looked > MOST_FILES:
                    return

    def text(self, name: str, known: Sequence[int] = ()) -> tuple[list[str] | None, str]:
        """Return the lines of a source file, printable; None if there is no file. Also return what the reader should know.

        known: the numbers of the lines that the records are about. If the file has no code there, it is another version.
        """
        if not self._given:
            return None, "the source is not in this report; gpubpf report --source DIR shows it"
        paths = self._paths.get(os.path.basename(name), [])
        exact = [path for path in paths if path.endswith("/" + name.lstrip("/"))] or paths
        if not exact:
            return None, "the source was not found below --source DIR"
        try:
            with open(target_files.open_regular(exact[0], links=False), "rb") as file:
                read = file.read(MOST_BYTES + 1)
        except OSError as error:
            return None, f"the source cannot be read: {error.strerror}"
        text = read[:MOST_BYTES].decode("utf-8", "replace").replace("\r\n", "\n")
        lines = [printable(line.expandtabs(4)) for line in text.split("\n")]
        about = []
        if len(exact) > 1:
            about.append(f"{len(exact)} files have this name; this is {printable(exact[0])}")
        cut = len(read) > MOST_BYTES or len(lines) > MOST_LINES
        if cut:
            about.append("the end of the file is left out")
        without = [
            number
            for number in sorted(known)  # 0: code of no line
            if number and (not lines[number - 1].strip() if number <= len(lines) else not cut)
        ]
        if without:
            about.append(
                f"the file is not the version that was measured: line {without[0]} has no code here, but was measured"
            )
        return lines[:MOST_LINES], "; ".join(about)

"""Find the files below a directory whose owner may be anybody."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator

DEPTH = 32  # directories in each other; os.walk calls itself for each
MOST_ENTRIES = 1_000_000  # files and directories to look at


def files_below(directory: str, hidden: bool = True) -> Iterator[tuple[str, list[str]]]:
    """Yield each directory, the given one first, with the names of its files, sorted. Symbolic links to directories are not followed.

    Directories that cannot be read, that are deeper than DEPTH, or that come after MOST_ENTRIES entries are left out.

    hidden: also look into directories whose names begin with a dot.
    """
    waiting, left = deque([(directory, 0)]), MOST_ENTRIES
    while waiting and left > 0:
        place, depth = waiting.popleft()
        names, below = list[str](), list[str]()
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                left -= 1
                if left < 0:
                    break
                is_directory = False
                with contextlib.suppress(OSError):
                    is_directory = entry.is_dir(follow_symlinks=False)
                (below if is_directory else names).append(entry.name)
        yield place, sorted(names)
        if depth < DEPTH:
            found = [name for name in sorted(below) if hidden or not name.startswith(".")]
            waiting.extend((os.path.join(place, name), depth + 1) for name in found)

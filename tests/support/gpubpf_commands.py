"""Command lines for tests. The paths in them may contain spaces: those of the checkout, of TMPDIR, and of a compiler's headers."""

from __future__ import annotations

import shlex


def words(command: str, **values: object) -> list[str]:
    """Return the words of a command. Each {NAME} in a word stands for a value, which may contain spaces."""
    return [word.format(**values) for word in command.split()]


def quoted(path: object) -> str:
    """Return a path as a shell reads it."""
    return shlex.quote(str(path))

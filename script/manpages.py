#!/usr/bin/env python3
"""Build the man pages, which share text.

    script/manpages.py DIRECTORY      write all pages there: threadhist.8, launchlate.8, ...

A page's source is `man/man8/NAME.8`, plain roff with two requests that are carried out here:

    .so fragments/FILE   insert `man/fragments/FILE`
    .ds NAME VALUE       set a parameter; \\*[NAME] stands for its value, also in fragments

man knows both: `man -M man NAME` shows a page from a checkout. The built pages have neither, because man would look for the
fragments where pages are installed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

MAN = Path(__file__).resolve().parent.parent / "man"


class SourceError(Exception):
    """A page uses a parameter that it does not set, or includes a fragment that does not exist."""


def names() -> list[str]:
    """Return the names of all pages, sorted: `cudasim`, `cudasnoop`, ..."""
    return sorted(path.stem for path in MAN.glob("man8/*.8"))


def page(name: str) -> str:
    """Return the roff text of a page. Raises SourceError and, for an unknown page, FileNotFoundError."""
    return "".join(_expanded(MAN / "man8" / f"{name}.8", {}))


def _expanded(path: Path, parameters: dict[str, str]) -> Iterator[str]:
    """Yield a file's lines with fragments and parameters in place; add the parameters that it sets."""
    for line in path.read_text("utf-8").splitlines(keepends=True):
        request, _, rest = line.rstrip("\n").partition(" ")
        if request == ".ds":
            name, _, value = rest.partition(" ")
            parameters[name] = _filled(value.removeprefix('"'), parameters, path)  # a quote keeps spaces
        elif request == ".so":
            fragment = MAN / rest
            if not fragment.is_file():
                raise SourceError(f"{path}: there is no {rest} in {MAN}")
            yield from _expanded(fragment, parameters)
        elif request != '.\\"':  # a comment
            yield _filled(line, parameters, path)


def _filled(text: str, parameters: dict[str, str], path: Path) -> str:
    """Return the text with every parameter replaced by its value."""
    try:
        return re.sub(r"\\\*\[([^]]*)\]", lambda match: parameters[match[1]], text)
    except KeyError as error:
        raise SourceError(f"{path}: parameter {error} is not set; add '.ds NAME VALUE' to the page") from None


def write(directory: Path) -> None:
    """Write all pages into a directory, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in names():
        (directory / f"{name}.8").write_text(page(name), "utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: script/manpages.py DIRECTORY")
    write(Path(sys.argv[1]))

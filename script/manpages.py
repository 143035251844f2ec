#!/usr/bin/env python3
"""Build the man pages, which share text, and show them from a checkout.

    script/manpages.py threadhist     show one page, as `man threadhist` does once it is installed
    script/manpages.py -o DIRECTORY   write all pages there: threadhist.8, launchlate.8, ...

A page's source is `man/NAME.8.in`: plain roff, with two requests that are carried out here and not by groff.

    .so FILE             insert `man/fragments/FILE`
    .ds NAME VALUE       set a parameter; \\*[NAME] stands for its value, also in fragments

groff knows both, so `groff -man -s -I man/fragments -Tutf8 man/NAME.8.in` shows the same page.
The built pages have neither: man would look for the fragments where pages are installed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "man"


class SourceError(Exception):
    """A page uses a parameter that it does not set, or includes a fragment that does not exist."""


def names() -> list[str]:
    """Return the names of all pages, sorted: `cudasim`, `cudasnoop`, ..."""
    return sorted(path.name.removesuffix(".8.in") for path in SOURCES.glob("*.8.in"))


def page(name: str) -> str:
    """Return the roff text of a page. Raises SourceError and, for an unknown page, FileNotFoundError."""
    return "".join(_expanded(SOURCES / f"{name}.8.in", {}))


def _expanded(path: Path, parameters: dict[str, str]) -> Iterator[str]:
    """Yield a file's lines with fragments and parameters in place; add the parameters that it sets."""
    for line in path.read_text("utf-8").splitlines(keepends=True):
        request, _, rest = line.rstrip("\n").partition(" ")
        if request == ".ds":
            name, _, value = rest.partition(" ")
            parameters[name] = _filled(value.removeprefix('"'), parameters, path)  # a quote keeps spaces
        elif request == ".so":
            fragment = SOURCES / "fragments" / rest
            if not fragment.is_file():
                raise SourceError(f"{path}: there is no fragment {rest!r} in {fragment.parent}")
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


def show(name: str) -> int:
    """Show a page with man; return its exit status."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / f"{name}.8"
        file.write_text(page(name), "utf-8")
        return subprocess.run(["man", file]).returncode  # man takes a name with a slash as a file


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the man pages, or show one from a checkout.")
    parser.add_argument("name", nargs="?", choices=names(), help="the page to show")
    parser.add_argument("-o", dest="directory", type=Path, help="write all pages into this directory")
    arguments = parser.parse_args()
    if arguments.directory is not None and arguments.name is None:
        write(arguments.directory)
        return 0
    if arguments.name is None or arguments.directory is not None:
        parser.error("give the name of a page, or -o DIRECTORY")
    return show(arguments.name)


if __name__ == "__main__":
    sys.exit(main())

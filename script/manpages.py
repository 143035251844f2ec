#!/usr/bin/env python3
"""Build the man pages, which share text.

    script/manpages.py DIRECTORY      write all pages there: threadhist.8, launchlate.8, ...
    script/manpages.py --fields       write the fragments with the fields of records, as the library declares them

A page's source is `man/man8/NAME.8`, plain roff with two requests that are carried out here:

    .so fragments/FILE   insert `man/fragments/FILE`
    .ds NAME VALUE       set a parameter; \\*[NAME] stands for its value, also in fragments

man knows both: `man -M man NAME` shows a page from a checkout. The built pages have neither, because man would look for the
fragments where pages are installed.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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


# --- FIELDS ---


def fields() -> dict[str, str]:
    """Return the fragments about records by file name: of each tool, those that not every tool writes; and of gpubpf diff."""
    sys.path.insert(0, str(MAN.parent / "lib"))
    made = {}
    for tool in sorted(path.stem for path in (MAN.parent / "tools").glob("*.py")):
        declared = importlib.import_module(f"gpubpf.tools.{tool}").build_parser().declared()
        own = [one for one in declared if one.name not in ("attached", "watching", "listed", "summary")]
        known: set[str] = set()
        made[f"fields-{tool}.roff"] = "".join(f"{line}\n" for one in own for line in record(one, known))
        if tables := [one for one in own if one.csv]:
            made[f"csv-{tool}.roff"] = "".join(f"{line}\n" for line in _tables(tables))
    known = set()
    records = importlib.import_module("gpubpf.query.difference_records").RECORDS
    made["fields-diff.roff"] = "".join(f"{line}\n" for one in records for line in record(one, known))
    return made


def record(of: Any, known: set[str]) -> Iterator[str]:
    """Yield the description of a record. known: fields with their meanings that were described before."""
    yield from (".TP", f".B {of.name}", _roff(of.about))
    line = ""
    for field in of.fields:
        text = f"\\fI{field.name}\\fR{_meaning(field.schema)}"
        if text in known:
            line += f"\\fI{field.name}\\fR, "
        else:
            yield f"{line}{text};" if field is not of.fields[-1] else f"{line}{text}."
            line = ""
        known.add(text)
    if line:
        yield f"{line[:-2]}."
    if of.notes:
        yield _roff(of.notes)


def _meaning(schema: Mapping[str, Any]) -> str:
    """Return the description of a field and the fields of its object in parentheses."""
    said = [_roff(schema["description"])] if "description" in schema else []
    inner = schema
    while "items" in inner or isinstance(inner.get("additionalProperties"), Mapping):
        inner = inner.get("items") or inner["additionalProperties"]
    if "properties" in inner:
        parts = (f"\\fI{name}\\fR{_meaning(one)}" for name, one in inner["properties"].items())
        said.append(", ".join(parts))
    elif "enum" in schema and not all(str(word or "null") in "".join(said) for word in schema["enum"]):
        words = [word or "null" for word in schema["enum"]]
        said.insert(0, f"{', '.join(words[:-1])} or {words[-1]}")
    return f" ({(': ' if inner.get('properties') else ', ').join(said)})" if said else ""


def _tables(tables: Sequence[Any]) -> Iterator[str]:
    yield '.SS "CSV columns"'
    yield "With \\fB\\-T\\fR, the first column is ts_ns."
    for of in tables:
        if len(tables) > 1:
            yield from (".TP", f".B {of.name}")
        yield f"{', '.join(of.columns)}."


def _roff(text: str) -> str:
    """Return a text with its options in bold type."""
    text = re.sub(
        r"(?<![\w-])--?[A-Za-z][\w-]*",
        lambda option: f"\\fB{option[0].replace('-', chr(92) + '-')}\\fR",
        text,
    )
    return text.replace("'", "\\(aq")


if __name__ == "__main__":
    if len(sys.argv) != 2 or (sys.argv[1].startswith("-") and sys.argv[1] != "--fields"):
        sys.exit("usage: script/manpages.py DIRECTORY | --fields")
    if sys.argv[1] == "--fields":
        for name, text in fields().items():
            (MAN / "fragments" / name).write_text(text, "utf-8")
    else:
        write(Path(sys.argv[1]))

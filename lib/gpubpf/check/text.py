"""Findings as text: for a terminal, and for a bug report, which contains no personal data."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from gpubpf.check.finding import STATES, Finding
from gpubpf.record import replace
from gpubpf.show import table

_STATE, _TITLE = 9, 17  # columns
_UUID = re.compile(r"\b(?:GPU-|MIG-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_HOMES = re.compile(r"(?<![\w.-])/(?:home|Users|var/home|export/home)/[^/\s,;:)]+|(?<![\w.-])/root\b")
_SHARED_ACCOUNTS = ("root", "nobody", "user")  # these names are not personal, and also occur in sentences


def lines(rows: Iterable[tuple[str, Finding]], merge: bool = False) -> Iterator[str]:
    """Yield the lines about findings, each with its title. merge: successive equal findings share one line, with all their titles."""
    merged: list[tuple[list[str], Finding]] = []
    for title, finding in rows:
        if merge and merged and merged[-1][1] == finding:
            merged[-1][0].append(title)
        else:
            merged.append(([title], finding))
    for titles, finding in merged:
        yield from _entry(", ".join(titles), finding)


def _entry(title: str, finding: Finding) -> Iterator[str]:
    start = f"{finding.state:{_STATE}}"
    indent = " " * (_STATE + _TITLE)
    if len(title) < _TITLE:
        yield from _wrapped(f"{start}{title:{_TITLE}}", finding.value, indent)
    else:
        yield from _wrapped(start, title, " " * _STATE)
        yield from _wrapped(indent, finding.value, indent)
    for word, sentence in (("so: ", finding.consequence), ("do: ", finding.action)):
        if sentence:
            yield from _wrapped(f"{indent}{word}", sentence, indent + " " * len(word))


def _wrapped(start: str, sentence: str, indent: str) -> list[str]:
    import textwrap  # imported here because the import is slow

    return textwrap.wrap(
        table.printable(sentence),
        table.WIDTH,
        initial_indent=start,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def conclusion(rows: Sequence[tuple[str, Finding]]) -> list[str]:
    """Return sentences: the number of findings in each state, and which missing things the tools need."""
    fails = [title for title, finding in rows if finding.fails]
    need = f"tools or options need: {', '.join(fails)}" if fails else "nothing that a tool needs is missing"
    return table.wrap(f"{counts(finding for _, finding in rows)}; {need}")


def counts(findings: Iterable[Finding]) -> str:
    """Return ``12 ok, 1 missing``: the number of findings in each state."""
    states = Counter(finding.state for finding in findings)
    return ", ".join(f"{states[state]} {state}" for state in STATES if state in states)


def without_names(finding: Finding) -> Finding:
    """Return a finding whose texts are `impersonal`."""
    return replace(
        finding,
        value=impersonal(finding.value),
        consequence=impersonal(finding.consequence),
        action=impersonal(finding.action),
    )


def impersonal(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return a text without home directories, users' names, the host's name, UUIDs and GPUs' serial numbers."""
    names, homes = set[str](), set[str]()
    with contextlib.suppress(KeyError):
        account = pwd.getpwuid(os.getuid())
        names.add(account.pw_name)
        homes.add(account.pw_dir)
    names |= {environment.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")}
    homes |= {environment.get("HOME", ""), str(Path.home())}
    hosts = {os.uname().nodename, os.uname().nodename.partition(".")[0], environment.get("HOSTNAME", "")}
    for home in sorted(homes, key=len, reverse=True):
        if len(home) > 1:  # not "/"
            text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    text = _UUID.sub("UUID", _HOMES.sub("~", text))
    for word, stand_in in [(name, "USER") for name in names] + [(host, "HOST") for host in hosts]:
        if word and word not in _SHARED_ACCOUNTS:
            text = re.sub(rf"\b{re.escape(word)}\b", stand_in, text)
    return text

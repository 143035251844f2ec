"""A finding: the state of one thing that tools need, the consequence, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpubpf.check.machine import Machine
from gpubpf.record import Record

OK, LIMITED, MISSING, UNKNOWN = "ok", "limited", "missing", "unknown"
STATES = (OK, LIMITED, MISSING, UNKNOWN)


class Finding(Record):
    """What a check found. All texts are for the user; only `state` is for scripts."""

    state: str
    value: str  # what the check found
    consequence: str = ""  # which tools or options do not work
    action: str = ""  # what to do
    needed: bool = True  # False: every tool works without it, perhaps with fewer features

    @property
    def fails(self) -> bool:
        """Whether something that a tool needs is limited or missing."""
        return self.needed and self.state in (LIMITED, MISSING)

    def record(self, name: str) -> dict[str, Any]:
        """Return the JSON record "check"."""
        return {
            "type": "check",
            "name": name,
            "state": self.state,
            "ok": None if self.state == UNKNOWN else self.state == OK,
            "needed": self.needed,
            "value": self.value,
            "consequence": self.consequence or None,
            "do": self.action or None,
        }


class Check(Record):
    """A row of the table.

    name: for scripts; a name never changes.
    title: for people.
    read: runs the check. It returns None if the check does not apply. An OSError becomes a finding with the state UNKNOWN.
    """

    name: str
    title: str
    read: Callable[[Machine], Finding | None]


def ok(value: str) -> Finding:
    """Return a finding without consequence and action."""
    return Finding(OK, value)


def of_error(error: Exception, consequence: str, needed: bool = True) -> Finding:
    """Return MISSING for an error of the library, whose text is ``WHAT FAILED; WHAT TO DO``."""
    what, _, action = str(error).partition("; ")
    return Finding(MISSING, what, consequence, action, needed)

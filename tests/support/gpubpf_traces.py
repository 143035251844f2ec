"""Whether ui.perfetto.dev would understand a trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def problems(trace: Any) -> Iterator[str]:
    """What of a loaded trace a viewer would not understand."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        yield "no traceEvents"
        return
    begun: set[Any] = set()
    open_: dict[Any, list[float]] = {}
    slices = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        begin, end = event["ts"], event["ts"] + event["dur"]
        around = [until for until in open_.get((event["pid"], event["tid"]), []) if until > begin + 1e-4]
        if around and end > around[-1] + 1e-4:
            yield f"overlaps another, and would be dropped: {event}"
        open_[event["pid"], event["tid"]] = [*around, end]
    for event in trace["traceEvents"]:
        phase = event.get("ph")
        if phase not in ("M", "X", "s", "f"):
            yield f"phase {phase!r}"
        if not isinstance(event.get("pid"), int) or not isinstance(event.get("name"), str):
            yield f"no process or name: {event}"
        if phase != "M" and not (
            isinstance(event.get("ts"), (int, float)) and isinstance(event.get("tid"), int)
        ):
            yield f"no time or thread: {event}"
        if phase == "X" and not (isinstance(event.get("dur"), (int, float)) and event["dur"] >= 0):
            yield f"no length: {event}"
        if phase == "s":
            begun.add(event["id"])
        if phase == "f" and (event["id"] not in begun or event.get("bp") != "e"):
            yield f"an arrow without begin: {event}"

"""The options of hipsnoop and cudasnoop, as values: those that all tools share, and those of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpubpf.record import Record
from gpubpf.show.parsed import Options, as_given, group

if TYPE_CHECKING:
    import argparse


class CallViews(Record):
    """Which calls are measured, and how they are shown.

    api: globs of functions, and groups; empty: all except trivial ones.
    errors: only calls that failed.
    slow: only calls that took longer, in microseconds; None: all.
    each: a line for each call.
    why: what calls, and the gaps between launches, spent their time on.
    timeline: what each thread did, in order.
    trace: the path of a file for the trace; None: no trace.
    """

    api: Sequence[str] = ()
    errors: bool = False
    slow: int | None = None
    each: bool = False
    why: bool = False
    timeline: bool = False
    trace: str | None = None

    @property
    def needs_events(self) -> bool:
        """Whether a view needs each call."""
        return bool(self.each or self.slow or self.timeline or self.trace)


class SnoopOptions(Record):
    """The command line of hipsnoop or cudasnoop.

    shared: the options that all tools share.
    calls: the options of calls.
    """

    shared: Options
    calls: CallViews

    @classmethod
    def of(cls, args: argparse.Namespace) -> SnoopOptions:
        """Return the options of a parsed command line."""
        return cls(Options.of(args), group(CallViews, args))

    @property
    def filters(self) -> str:
        """The given options that select calls, for a message."""
        calls = {"--api": self.calls.api, "--errors": self.calls.errors, "--slow": self.calls.slow}
        return " ".join(filter(None, (self.shared.threads.host_filters, as_given(calls))))

    @property
    def everyone(self) -> bool:
        """Whether every process of the machine is traced."""
        return not self.shared.targets.command and not self.shared.targets.pids

    @property
    def selects_launches(self) -> bool:
        """Whether --launch or --sample selects only some launches of a kernel."""
        kernels = self.shared.kernels
        return kernels.launches != (1, None) or kernels.sample > 1

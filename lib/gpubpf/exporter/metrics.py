"""The metrics as values: what Prometheus scrapes and what is pushed to an OpenTelemetry collector are made of the same families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gpubpf import digest
from gpubpf.record import Record, field
from gpubpf.show.table import printable

MOST_LETTERS = 120  # of the value of a label
OTHER = "other"  # the value of each label of the series for the rest


class Family(Record):
    """A metric.

    name: without the suffix `_total` of a counter.
    kind: a counter never decreases; a gauge may.
    about: what the metric counts.
    labels: the names of the labels.
    samples: for each series the values of the labels, and the number.
    """

    name: str
    kind: Literal["counter", "gauge"]
    about: str
    labels: Sequence[str] = ()
    samples: Sequence[tuple[tuple[str, ...], float]] = field(default_factory=tuple)


def label(text: str) -> str:
    """Return a text as the value of a label: printable, and of bounded length. Long texts that differ stay different."""
    shown = printable(text)
    if len(shown) <= MOST_LETTERS:
        return shown
    number = digest.sha256(shown.encode()).hexdigest()[:8]
    return f"{shown[: MOST_LETTERS - 9]}~{number}"

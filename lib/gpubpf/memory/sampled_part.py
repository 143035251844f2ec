"""The sampled part of the traffic of a site or kernel, and the standard errors of the estimates (session/sampled.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf.record import Record
from gpubpf.session.sampled import Estimate, rounded

if TYPE_CHECKING:
    from gpubpf.session.sampled import Sample

# The sums of a site that have standard errors with sampling → their JSON fields.
SUMS = {
    "requests": "requests",
    "accesses": "accesses",
    "bytes": "bytes",
    "sectors": "sectors",
    "least": "sectors_least",
}


class SampledPart(Record):
    """The sampled part of the traffic of a site or kernel.

    sums: each of SUMS over the sampled blocks or warps, as an array with one element per group
    """

    sample: Sample
    sums: Mapping[str, np.ndarray[Any, Any]]

    @classmethod
    def of(cls, parts: Sequence[SampledPart | None]) -> SampledPart | None:
        """Return the sum of the parts of several sites; None without sampling."""
        found = [part for part in parts if part is not None]
        if not found:
            return None
        sums = {name: np.sum([part.sums[name] for part in found], axis=0) for name in SUMS}
        return cls(found[0].sample, sums)

    def errors(self) -> dict[str, float | None]:
        """Return the standard errors of the JSON fields of these sums, and of `ratio`."""
        found = {field: rounded(self.sample.total(self.sums[name]).error) for name, field in SUMS.items()}
        return found | {
            "ratio": rounded(self.sample.error_of_ratio(self.sums["sectors"], self.sums["least"]))
        }

    def estimate(self, name: str) -> Estimate:
        """Return the estimate of one of SUMS over all blocks."""
        return self.sample.total(self.sums[name])

"""Estimate totals from the blocks or warps that --sample-blocks or --sample-warps chose, with standard errors.

    sample = samples(session, sampling)[key]
    sample.total(work)       # Estimate: of all blocks, from the work of the chosen ones by group
    sample.error_of_ratio(sectors, least)

Each launch chooses each block or warp (below: unit) independently with probability 1/N. Given the number of chosen units, every set of
that size is equally likely. So the mean of the chosen units estimates the mean of all units, and its standard error is that of a
random sample without replacement. The standard error needs the sum of the squared deviations of the chosen units. The device does not
keep these deviations, but only sums by group: the hash of a chosen unit puts it into one of up to GROUPS groups. The squared
deviations of S groups add up to 1 - 1/S times those of the units, on average. While launches may be running, the number of units is
unknown. Then the sum of the chosen units is multiplied by N, which has a larger error. docs/sampling.md explains all of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf.ebpf.maps import GROUPS, SAMPLED
from gpubpf.record import Record
from gpubpf.show import table

if TYPE_CHECKING:
    from gpubpf.ebpf.sampling import Sampling
    from gpubpf.records.results import Instance
    from gpubpf.session.session import Session

    Groups = np.ndarray[Any, Any]


class Estimate(Record):
    """An estimated total and its standard error, None if that is unknown."""

    value: float
    error: float | None

    def text(self, what: str) -> str:
        """Return ``12.3 M stores +- 0.4 % (standard error)``. what: the plural of what was counted."""
        return f"{table.number(self.value)} {what} +- {self.percent or 'unknown'} (standard error)"

    @property
    def percent(self) -> str:
        """The standard error in per cent of the value: ``0.4 %``; "" if it is unknown."""
        if self.error is None:
            return ""
        return f"{100 * self.error / self.value if self.value else 0.0:.1f} %"


def rounded(error: float | None) -> float | None:
    """Return a standard error as JSON has it."""
    return None if error is None else round(error, 6)


class Sample(Record):
    """The units that were chosen in some launches.

    units   number of blocks or warps in these launches; None if some launches may have been running when maps were read
    chosen  number of chosen units by group: int64 [GROUPS]
    """

    sampling: Sampling
    units: int | None
    chosen: Groups

    @classmethod
    def of(cls, sampling: Sampling, instances: Iterable[Instance]) -> Sample:
        """Return the sample that instances of the map SAMPLED describe together."""
        units: int | None = 0
        chosen = np.zeros(GROUPS, np.int64)
        for one in instances:
            more = one.launches * one.shape.blocks * (one.shape.warps if sampling.unit == "warp" else 1)
            units = units + more if one.idle and units is not None else None
            chosen = chosen + one.array[:, 0].astype(np.int64)
        return cls(sampling, units, chosen)

    def since(self, before: Sample | None) -> Sample:
        """Return the sample of an interval.

        before: the sample of the same launches when the interval began; None: no launch had begun.

        A unit that was running when the interval began or ended has only a part of its sums in the interval."""
        if before is None:
            return self
        units = None if self.units is None or before.units is None else self.units - before.units
        return Sample(self.sampling, units, self.chosen - before.chosen)

    @property
    def count(self) -> int:
        """How many units were chosen."""
        return int(self.chosen.sum())

    @property
    def factor(self) -> float:
        """What a sum over the chosen units must be multiplied by."""
        if self.units is None or not self.count:
            return float(self.sampling.one_in)
        return self.units / self.count

    def scaled(self, value: int) -> int:
        """Return the estimate of a total, to the nearest integer: exactly the value if every unit was chosen."""
        return value if self.factor == 1 else round(value * self.factor)

    def total(self, values: Groups) -> Estimate:
        """Return the total over all units. values: the sums over the chosen units, by group, whose number is a power of two."""
        values = np.asarray(values, np.float64)
        if self.units is None:
            expected = np.full(len(values), values.mean())
        else:
            expected = values.sum() / max(self.count, 1) * self.folded(len(values))
        return Estimate(self.scaled(int(values.sum())), self._error(values - expected))

    def error_of_ratio(self, above: Groups, below: Groups) -> float | None:
        """Return the standard error of the quotient of two totals, to first order.

        above, below: numerator and denominator, each like `values` of `total`."""
        above, below = np.asarray(above, np.float64), np.asarray(below, np.float64)
        if not below.sum():
            return None
        error = self._error(above - above.sum() / below.sum() * below)
        return None if error is None else error / (below.sum() * self.factor)

    def _error(self, deviations: Groups) -> float | None:
        """Return the standard error of a total. deviations: each group's sum minus its expected sum; they add up to 0."""
        count, groups, one_in = self.count, len(deviations), self.sampling.one_in
        if one_in == 1 or count == self.units:
            return 0.0
        if count < 2 or groups < 2 or (self.units is not None and count > self.units):
            return None
        squares = float((deviations**2).sum()) * groups / (groups - 1)  # estimate for the chosen units
        if self.units is None:
            return math.sqrt(one_in * (one_in - 1) * squares)
        return math.sqrt(self.units * (self.units - count) / count * squares / (count - 1))

    def folded(self, groups: int) -> Groups:
        """Return the number of chosen units by group, after merging the groups into `groups` groups (a power of two)."""
        return self.chosen.reshape(-1, groups).sum(axis=0)

    def record(self) -> dict[str, Any]:
        """Return the field `sampled` of a JSON record."""
        sampling = self.sampling
        names = {"unit": sampling.unit, "one_in": sampling.one_in, "seed": sampling.seed}
        return names | {"chosen": self.count, "of": self.units}

    def sentence(self, word: str) -> str:
        """Return ``sampled 812 of the 12,800 blocks of all launches (1 in 16, seed 7)``. word: the singular, such as "block"."""
        how = f"1 in {self.sampling.one_in}, seed {self.sampling.seed}"
        if self.units is None:
            unknown = "launches may have been running when maps were read"
            return f"sampled {table.count(self.count, word)} ({how}); {unknown}"
        return f"sampled {self.count:,} of the {table.count(self.units, word)} of all launches ({how})"


def kernel_of(instance: Instance) -> tuple[Any, ...]:
    """Return a key for the kernel and launch shape of an instance. It has more than the pid, which programs may have in turn."""
    return (
        instance.process, instance.pid, instance.gpu, instance.mangled, instance.grid, instance.block_dim,
    )  # fmt: skip


def samples(
    session: Session, sampling: Sampling | None, key: Callable[[Instance], Any] = kernel_of
) -> dict[Any, Sample]:
    """Return the samples by `key`; empty without sampling. Instances with equal keys form one sample."""
    if sampling is None:
        return {}
    found: dict[Any, list[Instance]] = {}
    for one in session.instances(SAMPLED):
        found.setdefault(key(one), []).append(one)
    return {kernel: Sample.of(sampling, instances) for kernel, instances in found.items()}

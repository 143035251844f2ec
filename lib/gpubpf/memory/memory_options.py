"""The options of memtrace, as values: those that all tools share, those of single accesses, and those of touched bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpubpf.errors import UsageError
from gpubpf.record import Record, replace
from gpubpf.show.parsed import Options, group

if TYPE_CHECKING:
    import argparse

PATCHED_SHARE = (
    64  # with --sass, memtrace measures one block in 64 on a GPU, because patches at each access are slow
)


class AccessViews(Record):
    """The record of every access, instead of tables, and which accesses are in it.

    each: a line for each access.
    parquet: FILE of --parquet FILE; None: no Parquet file of accesses.
    heatmap: FILE of --heatmap; None: no heatmap.
    site: ranges of site numbers; empty: every site.
    address: first and last address; None: every address.
    warps: N, if one warp in N is measured.
    """

    each: bool = False
    parquet: str | None = None
    heatmap: str | None = None
    site: Sequence[tuple[int, int]] = ()
    address: tuple[int, int] | None = None
    warps: int = 1

    @property
    def given(self) -> bool:
        """Whether the user asked for a record of every access."""
        return bool(self.each or self.parquet or self.heatmap)

    @property
    def filtered(self) -> bool:
        """Whether some accesses are left out."""
        return bool(self.site or self.address or self.warps > 1)


class CoverageViews(Record):
    """Which bytes of memory are touched.

    allocations: which bytes of each allocation.
    footprint: how much memory each kernel touches.
    granule: bytes; a power of two.
    """

    allocations: bool = True
    footprint: bool = False
    granule: int = 1

    @property
    def given(self) -> bool:
        """Whether touched bytes are tracked."""
        return self.allocations or self.footprint


class MemoryOptions(Record):
    """The command line of memtrace."""

    shared: Options
    accesses: AccessViews = AccessViews()
    coverage: CoverageViews = CoverageViews()

    @classmethod
    def of(cls, args: argparse.Namespace) -> MemoryOptions:
        """Return the options of a parsed command line. Raises UsageError for options that exclude each other."""
        shared, accesses, coverage = Options.of(args), group(AccessViews, args), group(CoverageViews, args)
        partial = shared.sampling.given or shared.kernels.budget is not None
        if coverage.footprint and partial:
            other = "--sample-blocks or --sample-warps" if shared.kernels.budget is None else "--budget"
            raise UsageError(f"--footprint cannot be combined with {other}; it needs every access")
        if coverage.footprint and accesses.given:
            raise UsageError(
                "--footprint cannot be combined with -e, --parquet or --heatmap; run the tool once for each"
            )
        if accesses.filtered and not accesses.given:
            raise UsageError(
                "--site, --address and --warps filter single accesses; add -e, --parquet or --heatmap"
            )
        tracked = coverage.allocations and not partial and not shared.kernels.sass
        return cls(
            shared.with_times(bool(accesses.heatmap)), accesses, replace(coverage, allocations=tracked)
        )

    def sampled_by_default(self) -> MemoryOptions:
        """Return these options, with `--sass` on a GPU with a sample of blocks unless the user chose a sample. A notice says so.

        Raises SessionError if the device cannot be used."""
        shared = self.shared
        if not shared.kernels.sass or shared.sampling.given:
            return self
        from gpubpf.session import tracing
        from gpubpf.show import notices

        if tracing.target(shared).device != "gpu":
            return self
        notices.note(
            shared.output.tool,
            f"--sass measures one block in {PATCHED_SHARE}; --sample-blocks 1/1 measures all",
        )
        sampling = replace(shared.sampling, blocks=PATCHED_SHARE)
        return replace(self, shared=replace(shared, sampling=sampling))

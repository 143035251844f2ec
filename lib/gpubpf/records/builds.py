"""Builds of a kernel: kernels in the modules of a process that have the same name but different sites.

Static kernels of two source files may have the same name. A kernel in a header is in each file's module, where its sites may have
other numbers. `Session.sites` returns the sites of one build.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf.record import replace

if TYPE_CHECKING:
    from gpubpf.inject.values import Site


def joined(tables: Iterable[Sequence[Site]]) -> tuple[dict[int, Site], list[dict[int, int]]]:
    """Return one table with the sites of all builds, and for each build a mapping: number in the build → number in the table.

    Sites with a source line become one site if they agree in everything except the line of the PTX. Sites without a source line become
    one only if all sites of the two builds agree. Sites that share a probe stay together. A site keeps its number if the number is
    still free, as for all sites of the first build.
    """
    whole: dict[int, Site] = {}
    numbers: list[dict[int, int]] = []
    known: dict[Any, dict[int, int]] = {}
    kernels: dict[Any, int] = {}
    for table in tables:
        kernel = kernels.setdefault(without_first_line(table), len(kernels))
        groups: dict[int, list[Site]] = {}
        for site in table:
            groups.setdefault(site.number if site.like is None else site.like, []).append(site)
        own: dict[int, int] = {}
        for group in groups.values():
            same = tuple(replace(site, line=0) for site in group)
            place = same if all(site.source for site in group) else (kernel, same)
            if place not in known:
                known[place] = _add(whole, group)
            own |= known[place]
            for site in group:
                other = whole[known[place][site.number]]
                if site.source and other.line != site.line:
                    whole[other.number] = replace(other, line=0)
        numbers.append(own)
    return whole, numbers


def without_first_line(table: Sequence[Site]) -> tuple[Site, ...]:
    """Return the sites with PTX lines counted from the first site's line, so that copies of a kernel in several modules are equal."""
    return tuple(replace(site, line=site.line - table[0].line) for site in table)


def _add(whole: dict[int, Site], group: Sequence[Site]) -> dict[int, int]:
    """Add sites that share a probe. Return their numbers in the table."""
    numbers: dict[int, int] = {}
    for site in group:
        numbers[site.number] = number = site.number if site.number not in whole else max(whole) + 1
        whole[number] = replace(site, number=number)
    for number in numbers.values():
        if (like := whole[number].like) is not None:
            whole[number] = replace(whole[number], like=numbers.get(like))
    return numbers

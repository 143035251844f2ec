"""Builds of a kernel: the kernels of one name in the modules of a process, where their sites differ.

Static kernels of two source files may have the same name. A kernel of a header is in each file's module, where other sites may come
before its own. `Session.sites` returns the sites of one build.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf.record import replace

if TYPE_CHECKING:
    from gpubpf.inject.values import Site


def joined(tables: Iterable[Sequence[Site]]) -> tuple[dict[int, Site], list[dict[int, int]]]:
    """Return a table with the sites of all builds, and for each build the numbers that its sites have there, by their own.

    Sites of one source line that agree in all but the line of the PTX are the same. Without source lines, all sites of two builds must
    agree. Sites that share a probe stay together. Numbers of the first build, and others that are free, remain.
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
    """Return the sites with their lines counted from the first site's. They are equal for a kernel that several modules contain."""
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

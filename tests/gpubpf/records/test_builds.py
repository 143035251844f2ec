"""The sites of builds of a kernel in one table."""

from __future__ import annotations

from gpubpf.inject.values import Site
from gpubpf.record import replace
from gpubpf.records.builds import joined


def table(line: int, *sources: str) -> list[Site]:
    return [Site(n, "k", line + n, source, 5 * bool(source)) for n, source in enumerate(sources)]


def test_one_build_keeps_its_numbers() -> None:
    one = [Site(2, "k", 7), Site(5, "k", 8, like=2)]
    assert joined([one]) == ({2: one[0], 5: one[1]}, [{2: 2, 5: 5}])
    assert joined([[]]) == ({}, [{}])


def test_a_kernel_of_a_header_has_its_sites_once() -> None:
    """Its lines in the PTX differ between modules."""
    one, other = table(40, "k.h", "k.h"), table(90, "k.h", "k.h")
    whole, numbers = joined([one, other])
    assert whole == {n: replace(site, line=0) for n, site in enumerate(one)} and numbers == [{0: 0, 1: 1}] * 2
    one, other = table(40, "", ""), table(90, "", "")
    whole, numbers = joined([one, other])
    assert whole == dict(enumerate(one)) and numbers == [{0: 0, 1: 1}] * 2


def test_different_sites_get_different_numbers() -> None:
    whole, numbers = joined([table(40, "a.cu", "k.h"), table(40, "b.cu", "k.h", "b.cu"), table(40, "", "")])
    assert numbers == [{0: 0, 1: 1}, {0: 2, 1: 1, 2: 3}, {0: 4, 1: 5}]
    assert [(n, site.number, site.source) for n, site in whole.items()] == [
        *((0, 0, "a.cu"), (1, 1, "k.h"), (2, 2, "b.cu"), (3, 3, "b.cu"), (4, 4, ""), (5, 5, "")),
    ]
    # Without source lines, a line of the PTX is one of a module.
    assert joined([table(40, "", ""), table(40, "", "", "")])[1] == [{0: 0, 1: 1}, {0: 2, 1: 3, 2: 4}]


def test_sites_that_share_a_probe_stay_together() -> None:
    """The counts of a first site are those of its followers: builds have it in common only if they have all of them in common."""
    one = table(40, "a.cu", "a.cu", "a.cu")
    other = [one[0], replace(one[1], like=0), replace(one[2], like=0)]
    whole, numbers = joined([one, other, other])
    assert numbers == [{0: 0, 1: 1, 2: 2}, {0: 3, 1: 4, 2: 5}, {0: 3, 1: 4, 2: 5}]
    assert [whole[n].like for n in range(6)] == [None, None, None, None, 3, 3]

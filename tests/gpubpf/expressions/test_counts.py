"""What gpucount prints for people."""

from __future__ import annotations

import pytest

from gpubpf.expressions import counts, specs
from gpubpf.expressions.counts import Count
from gpubpf.show.owner_columns import OwnerColumns


@pytest.mark.parametrize(
    ("waves", "word"), [((None,), "warps"), ((64, 32), "waves"), ((64, None), "warps and waves")]
)
def test_the_heading_has_the_word_of_the_gpus_vendor(waves: tuple[int | None, ...], word: str) -> None:
    found = [Count(7, "app", 0, wave, specs.count("load:*"), "scale", 4, 100) for wave in waves]
    heading = counts.lines(found, OwnerColumns(), False)[0]
    assert heading == f"COUNT: executions by {word}; THREADS: the lanes in them"

"""Which kernels of a large module get their copies when some are launched."""

from __future__ import annotations

from gpubpf.images.instrument import Later, Source
from gpubpf.session.large_modules import ALL_ABOVE, LargeModule


def test_all_get_their_copies_once_many_were_launched() -> None:
    names = tuple(f"k{k}" for k in range(10 * ALL_ABOVE))
    module = LargeModule(Later(names, Source("", "", "", {}, False)))
    for name in names[:10]:
        assert module.ask([name]) == module.ask([name, name]) == {name}  # launched in two contexts
    assert module.ask(["other"]) == frozenset()
    assert module.ask([names[10], "other"]) is None

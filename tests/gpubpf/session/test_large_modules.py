"""Which kernels of a large module get their copies when some are launched."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpubpf import cache
from gpubpf.images.instrument import Later, Source
from gpubpf.session.large_modules import ALL_ABOVE, STAGE, LargeModule, Step

NAMES = tuple(f"k{k}" for k in range(10 * ALL_ABOVE))


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def loaded(digest: str = "ab" * 32) -> LargeModule:
    return LargeModule(Later(NAMES, Source("", digest, "", "", {}, False)))


def test_all_get_their_copies_once_many_were_launched() -> None:
    module = loaded()
    for name in NAMES[:10]:
        assert module.launched(name) is module.launched(name) is Step.ONE  # launched in two contexts
    assert module.launched("other") is Step.NOTHING
    assert module.launched(NAMES[10]) is Step.ALL
    assert module.launched(NAMES[11]) is module.launched(NAMES[0]) is Step.WAIT


def test_a_later_run_begins_with_what_earlier_ones_launched() -> None:
    assert loaded().first == ()
    loaded().launched("k7")
    loaded().launched("k3")
    loaded().launched("other")
    assert loaded().first == ("k3", "k7")
    assert loaded("cd" * 32).first == ()
    several = loaded()
    for name in NAMES[:20]:
        several.launched(name)
    assert loaded().first == NAMES[:10]  # no more than get their copies one by one


@pytest.mark.parametrize("kept", [b"", b"{", b"7", b'{"k1": 1, "no": 2}', b"[[], null]"])
def test_what_lies_in_the_cache_is_only_believed_if_it_fits(kept: bytes) -> None:
    cache.default().put(STAGE, "ab" * 32, kept)
    assert set(loaded().first) <= {"k1"}
    assert loaded().launched("k2") is Step.ONE
    assert "k2" in loaded().first

"""Which kernels of a large module get their copies when some are launched."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpubpf import cache
from gpubpf.images.sidecar import Later, Source
from gpubpf.traced import large_modules
from gpubpf.traced.large_modules import ALL_ABOVE, STAGE, LargeModule, Step

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


def launch(*names: str) -> None:
    module = loaded()
    for name in names:
        module.launched(name)


def test_a_later_run_begins_with_what_earlier_ones_launched() -> None:
    assert loaded().first == ()
    launch("k7", "other")
    launch("k3", "k7")
    assert loaded().first == ("k3", "k7") and loaded("cd" * 32).first == ()


def test_what_the_latest_run_launched_comes_first() -> None:
    """No more than get their copies one by one: all others get theirs then."""
    launch(*NAMES[:10])
    launch(*NAMES[10:16], *NAMES[6:10])
    assert set(loaded().first) == set(NAMES[6:16])
    launch(*NAMES[20:30])
    assert set(loaded().first) == set(NAMES[20:30])


def test_what_the_cache_remembers_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may launch any number of kernels with names of any length, and the list is written for each."""
    monkeypatch.setattr(large_modules, "MOST_NAMES", 3)
    written: list[bytes] = []
    put = cache.Cache.put

    def putting(store: cache.Cache, stage: str, key: str, data: bytes) -> Path | None:
        written.append(data)
        return put(store, stage, key, data)

    monkeypatch.setattr(cache.Cache, "put", putting)
    launch(*NAMES[:8])
    assert len(written) == 3 and loaded().first == NAMES[:3]
    launch(NAMES[9])
    assert loaded().first == (NAMES[9], *NAMES[:2])
    monkeypatch.setattr(large_modules, "MOST_BYTES", 10)
    written.clear()
    launch(*NAMES[4:6])
    assert written == []


@pytest.mark.parametrize("kept", [b"", b"{", b"7", b'{"k1": 1, "no": 2}', b"[[], null]"])
def test_what_lies_in_the_cache_is_only_believed_if_it_fits(kept: bytes) -> None:
    cache.default().put(STAGE, "ab" * 32, kept)
    assert set(loaded().first) <= {"k1"}
    assert loaded().launched("k2") is Step.ONE
    assert "k2" in loaded().first

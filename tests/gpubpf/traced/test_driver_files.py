"""Which driver files get a probe."""

from __future__ import annotations

import pytest

from gpubpf.process import limits
from gpubpf.traced.driver_files import DriverFiles, FileId

pytestmark = pytest.mark.without_driver


def files(*numbers: int) -> list[FileId]:
    return [(b"00:01", number) for number in numbers]


def test_a_process_has_a_limit() -> None:
    found = DriverFiles()
    assert found.admitted(7, 1000, files(*range(100))) == files(*range(limits.DRIVERS_OF_PROCESS))
    assert found.admitted(8, 1001, files(50)) == files(50)  # that it was too much for another is no matter


def test_root_has_a_higher_limit() -> None:
    found = DriverFiles()
    for user, expected in ((1000, limits.DRIVERS_OF_USER), (0, 200)):
        admitted = [f for pid in range(200) for f in found.admitted(pid, user, files(1000 * user + pid))]
        assert len(admitted) == expected
    assert found.admitted(999, 1000, files(1000 * 1000, 5)) == files(1000 * 1000, 5)  # known ones


def test_the_machine_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DRIVERS", 5)
    monkeypatch.setattr(limits, "DRIVERS_OF_USER", 1)
    found = DriverFiles()
    assert sum(len(found.admitted(pid, 0, files(pid))) for pid in range(10)) == 4
    assert sum(len(found.admitted(pid, 1000, files(pid))) for pid in range(10, 20)) == 1
    assert not found.admitted(20, 1001, files(20))


def test_files_that_nobody_maps_any_more_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNMAPPED_DRIVERS", 1)
    found = DriverFiles()
    found.admitted(7, 1000, files(1, 2, 3))
    found.admitted(8, 1000, files(2))
    assert found.surplus() == []
    found.keep({8})
    assert found.surplus() == files(1)  # 3 is kept, 2 is mapped
    found.admitted(8, 1000, [])
    assert found.surplus() == files(2)
    assert found.admitted(9, 1000, files(1)) == files(1)


def test_what_is_given_up_no_longer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNMAPPED_DRIVERS", 0)
    found = DriverFiles()
    for round_ in range(10):
        own = files(*range(16 * round_, 16 * (round_ + 1)))
        assert found.admitted(round_, 1000, own) == own
        found.keep(set())
        assert found.surplus() == own

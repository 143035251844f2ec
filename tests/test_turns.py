"""Tests that take turns: each has its turn, and no file is left out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.without_driver
TESTS = Path(__file__).parent
TURNS = [line.split() for line in (TESTS / "turns").read_text().splitlines() if line[:1].isdigit()]


class Item:
    """A test: its file, its name, and the n of its mark `every`, or 0."""

    def __init__(self, file: str, name: str, n: int = 0) -> None:
        self.path, self.name, self._n = TESTS / file, name, n

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(args=[self._n]) if name == "every" and self._n else None


def test_patterns_match_files() -> None:
    assert TURNS and all(int(n) > 1 for n, _ in TURNS)
    assert not [pattern for _, pattern in TURNS if not list(TESTS.parent.glob(pattern))]


def test_each_test_has_its_turn(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    conftest = pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    monkeypatch.delenv("GPUBPF_LOOKS", raising=False)
    monkeypatch.setattr(conftest, "_turns", lambda: [("tests/a/test_*.py", 3)])
    tests = [
        *(Item("a/test_many.py", f"test_{number}") for number in range(7)),
        *(Item("a/test_many.py", f"test_cases[{number}]", 2) for number in range(2)),
        Item("a/test_one.py", "test_one"),
        Item("b/test_cases.py", "test_always"),
        *(Item("b/test_cases.py", f"test_cases[{number}]", 6) for number in range(4)),
        Item("b/test_few.py", "test_few[0]", 6),
        Item("b/test_few.py", "test_few[1]", 6),
    ]
    config = SimpleNamespace(args=["tests"], hook=SimpleNamespace(pytest_deselected=lambda items: None))
    times: Counter[Item] = Counter()
    for choice in range(100, 106):
        monkeypatch.setenv("GPUBPF_CHOICE", str(choice))
        items = list(tests)
        conftest.pytest_collection_modifyitems(config, items)
        assert {item.path for item in items} == {item.path for item in tests}
        assert 2 <= sum(item.path.name == "test_many.py" for item in items) <= 4
        times.update(items)
    assert [times[item] for item in tests] == [2] * 7 + [1, 1] + [6, 6] + [1] * 4 + [
        times[item] for item in tests[-2:]
    ]
    assert min(times[item] for item in tests[-2:]) >= 1

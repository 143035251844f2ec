"""What a version promises, the next ones keep (docs/versions.md)."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import gpubpf_examples
import promises

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.mark.every(6)  # runs every tool
def test_nothing_that_was_promised_is_missing() -> None:
    gpubpf_examples.build(*promises.PROGRAMS)
    promises.build_optional()
    missing = promises.absent(promises.promised(), promises.now())
    assert not missing, "keep these, or the next version breaks scripts"


def test_a_removal_is_found() -> None:
    """An option, one of its choices, a field in an object, a record, and a status."""
    before = {
        "tool: options": {"--device", "--device=sim"},
        "tool: kernel record": {"work", "registers.before"},
        "exit statuses": {"tool --no-such-option: 2"},
    }
    after = {"tool: options": {"--device", "--new"}, "exit statuses": {"tool --no-such-option: 1"}}
    assert promises.absent(before, after) == [
        "exit statuses: tool --no-such-option: 2",
        "tool: kernel record: registers.before",
        "tool: kernel record: work",
        "tool: options: --device=sim",
    ]
    assert promises.absent(before, before) == []


def test_fields_of_a_record() -> None:
    record = {
        "type": "kernel",
        "registers": {"before": 8},
        "rows": [{"a": 1}, {"b": None}],
        "values": {"7": 1},
    }
    assert {*promises.fields(record)} == {
        "type", "registers", "registers.before", "rows", "rows.a", "rows.b", "values",
    }  # fmt: skip


def test_what_cannot_be_built_here_is_not_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = {f"{name}: a record": {"b"} for name in ("memtrace with HIP", "hipsnoop", "gpurun", "memtrace")}
    monkeypatch.setattr(promises, "EXAMPLES", tmp_path)
    assert promises.absent(before, {}) == ["memtrace: a record: b"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root can tell all")
def test_what_only_root_can_tell_is_not_missing_for_others() -> None:
    assert promises.absent({"cudasnoop: api record": {"count"}}, {}) == []


def test_a_release_says_at_once_all_that_stands_in_its_way(tmp_path: Path) -> None:
    (tmp_path / "script").mkdir()
    (tmp_path / "lib/gpubpf").mkdir(parents=True)
    shutil.copy2(REPOSITORY / "script/release", tmp_path / "script")
    initial, changelog = tmp_path / "lib/gpubpf/__init__.py", tmp_path / "CHANGELOG.md"
    initial.write_text('"""The library."""\n__version__ = "0.1.0"\n')
    changelog.write_text("## [Unreleased]\n")
    listing = tmp_path / "script/promises.py"
    listing.write_text("#!/bin/sh\necho 'new: a field'\necho 'missing: a field'\nexit 1\n")
    listing.chmod(0o755)

    def git(*words: str) -> None:
        user = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(["git", *user, *words], cwd=tmp_path, check=True, capture_output=True)

    def problems() -> list[str]:
        done = subprocess.run(["script/release", "--check"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == bool(done.stderr) and not done.stdout
        return done.stderr.splitlines()

    git("init", "-q")
    git("commit", "--allow-empty", "-qm", "first")
    git("tag", "v0.1.0")
    said = problems()
    for word in ("has changes", "[0.1.0] - YYYY-MM-DD", "v0.1.0 is tagged", "a promise is broken", "--write"):
        assert len([line for line in said if word in line]) == 1
    assert len(said) == 5
    initial.write_text('"""The library."""\n__version__ = "0.2.0"\n')
    changelog.write_text("## [0.2.0] - 2026-12-01\n")
    listing.write_text("#!/bin/sh\n")
    git("add", ".")
    git("commit", "-qm", "second")
    assert problems() == []

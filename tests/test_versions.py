"""What a version promises, the next ones keep (docs/versions.md)."""

import os

import pytest

import gpubpf_examples
import promises


def test_nothing_that_was_promised_is_missing() -> None:
    gpubpf_examples.build(*promises.PROGRAMS)
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


@pytest.mark.skipif(os.geteuid() == 0, reason="root can tell all")
def test_what_only_root_can_tell_is_not_missing_for_others() -> None:
    assert promises.absent({"cudasnoop: api record": {"count"}}, {}) == []

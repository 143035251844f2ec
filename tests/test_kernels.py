"""script/kernels: its command line, what a machine starts with, and its report. The machines themselves are not started."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import stat
import subprocess
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "script" / "kernels"
REPORT = """<testsuites><testsuite>
<testcase classname="tests.gpubpf.kernel.test_a" name="test_good"/>
<testcase classname="tests.gpubpf.kernel.test_a" name="test_bad[1]"><failure message="no"/></testcase>
<testcase classname="tests.gpubpf.kernel.test_a" name="test_broken"><error message="no"/></testcase>
<testcase classname="tests.gpubpf.kernel.test_a" name="test_1"><skipped message="needs cgroups"/></testcase>
<testcase classname="tests.gpubpf.kernel.test_a" name="test_2"><skipped message="needs cgroups"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("kernels", str(SCRIPT))
    spec = importlib.util.spec_from_loader("kernels", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_what_the_command_line_names(kernels: ModuleType) -> None:
    assert kernels.arguments([]) == (list(kernels.RELEASES), kernels.GROUPS, False)
    tests = {"tests/a": ["tests/a"], "tests/b.py::c": ["tests/b.py::c"]}
    assert kernels.arguments(["--emulate", "jammy", "--", *tests]) == (["jammy"], tests, True)


@pytest.mark.parametrize(
    ("words", "message"), [(["jessie"], "no release 'jessie'"), (["jammy", "--"], "no test after --")]
)
def test_what_makes_no_sense_is_refused(words: list[str], message: str) -> None:
    done = subprocess.run([SCRIPT, *words], capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr


def test_every_group_has_tests(kernels: ModuleType) -> None:
    assert all((SCRIPT.parents[1] / path).exists() for tests in kernels.GROUPS.values() for path in tests)


def test_the_archive_has_folders_before_their_files(kernels: ModuleType) -> None:
    made = kernels.archive({"init": (b"run", 0o755), "a/b/c.ko": (b"12345", 0o644)})
    at, found = 0, []
    while at < len(made):
        assert made[at : at + 6] == b"070701"
        fields = [int(made[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        name = made[at + 110 : at + 110 + fields[11]]
        content = at + 110 + fields[11] + 3 & ~3
        found.append((name, fields[1], made[content : content + fields[6]]))
        at = content + fields[6] + 3 & ~3
    assert found == [
        (b"a\0", stat.S_IFDIR | 0o755, b""),
        (b"a/b\0", stat.S_IFDIR | 0o755, b""),
        (b"init\0", stat.S_IFREG | 0o755, b"run"),
        (b"a/b/c.ko\0", stat.S_IFREG | 0o644, b"12345"),
        (b"TRAILER!!!\0", 0, b""),
    ]


def test_results_of_a_group(kernels: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "0.xml").write_text(REPORT)
    found = kernels.report(tmp_path / "0.xml")
    failed = [f"tests/gpubpf/kernel/test_a.py::{name}" for name in ("test_bad[1]", "test_broken")]
    assert found == (1, failed, Counter({"needs cgroups": 2}), True)
    assert not kernels.report(tmp_path / "1.xml").whole
    lines = list(kernels.table({"jammy": ("5.15.0", {"a": found, "b": kernels.report(tmp_path / "1.xml")})}))
    assert lines[2:4] == ["| 5.15.0 (jammy) | a | 1 | 2 | 2 |", "| 5.15.0 (jammy) | b |  | did not end |  |"]
    assert lines[4:] == [*(f"jammy: failed: {test}" for test in failed), "jammy: a: skipped 2: needs cgroups"]

"""The commands that README promises."""

import os
import subprocess
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPTS = ("common", "demo", "setup", "test")


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse(script):
    done = subprocess.run(["bash", "-n", REPOSITORY / "script" / script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_readme_names_the_scripts_there_are():
    readme = (REPOSITORY / "README.md").read_text()
    for script in ("demo", "test"):
        assert f"    script/{script} " in readme
        assert os.access(REPOSITORY / "script" / script, os.X_OK)


def test_ci_runs_script_test_and_nothing_else():
    lines = (REPOSITORY / ".ci/run").read_text().splitlines()
    assert lines[0] == "#!/bin/sh" and len(lines) == 2 and lines[1].endswith('/../script/test"')


def test_setup_refuses_what_it_does_not_know():
    done = subprocess.run([REPOSITORY / "script/setup", "--no-such"], capture_output=True, text=True)
    assert done.returncode == 2 and "script/setup --dev" in done.stdout


@pytest.mark.skipif(
    "GPUBPF_SET_UP" not in os.environ, reason="script/setup has not just run (script/test says so)"
)
def test_a_second_setup_has_nothing_to_do_and_says_nothing():
    start = time.monotonic()
    done = subprocess.run([REPOSITORY / "script/setup"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert time.monotonic() - start < 2

"""What errors advise."""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

import pytest

from gpubpf import errors


@pytest.mark.parametrize(
    ("environment", "checkout", "managed", "advice"),
    [
        (True, True, True, f"run {sys.executable} -m pip install numpy"),
        (False, True, True, "run script/setup, and then .*/bin/python3 instead of this interpreter"),
        (False, False, True, "install the distribution's package of numpy, or .* a virtual environment"),
        (False, False, False, f"run {sys.executable} -m pip install numpy"),
    ],
)
def test_advice_for_a_missing_package_is_what_pip_accepts(
    environment: bool,
    checkout: bool,
    managed: bool,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Debian's pip installs only into virtual environments."""
    monkeypatch.setattr(sys, "prefix", "/environment" if environment else sys.base_prefix)
    module = tmp_path / "lib/gpubpf/errors.py"
    monkeypatch.setattr(errors, "__file__", str(module))
    if checkout:
        (tmp_path / "script").mkdir()
        (tmp_path / "script/setup").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    if managed:
        (tmp_path / "EXTERNALLY-MANAGED").touch()
    said = errors.missing_package(ModuleNotFoundError("No module named 'numpy.fft'", name="numpy.fft"))
    place = f"the Python package numpy is missing in {sys.executable}; "
    assert said.startswith(place)
    assert re.fullmatch(advice, said.removeprefix(place)), said

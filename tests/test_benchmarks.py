"""Each benchmark finds what it imports. Nothing is measured here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = """
import runpy, sys
before = list(sys.path)
for file in sys.argv[1:]:
    sys.path[:] = [file.rpartition("/")[0], *before]  # as for a script
    runpy.run_path(file, run_name="imported")
    for name in [name for name in sys.modules if name in ("executed", "conformance") or name.startswith("conformance.")]:
        del sys.modules[name]  # or the next file would find it
"""


def test_benchmarks_import_what_they_need() -> None:
    files = sorted(map(str, (ROOT / "benchmarks").glob("*.py")))
    assert files
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "lib")}
    subprocess.run([sys.executable, "-c", CODE, *files], check=True, env=environment, cwd=ROOT)

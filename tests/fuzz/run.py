"""Fuzz one target with Atheris: run.py TARGET [OPTION OF LIBFUZZER | CORPUS]…; script/fuzz calls it."""

import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("lib", "tests", "tests/support")]
with atheris.instrument_imports(include=["gpubpf", "cudasim"]):
    from fuzz.targets import TARGETS

target = TARGETS[sys.argv.pop(1)]
atheris.Setup(sys.argv, target.run)
atheris.Fuzz()

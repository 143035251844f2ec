"""What tool and agent agree on: the C++ header compiles, and the documentation shows the same tables."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from gpubpf.agent import definitions
from gpubpf.session import operation_log

ROOT = Path(__file__).resolve().parents[3]


def test_the_header_compiles_with_the_offsets_that_python_reads(tmp_path: Path) -> None:
    (tmp_path / "definitions.h").write_text(definitions.cpp())
    (tmp_path / "all.cpp").write_text('#include "definitions.h"\n')
    compiler = [shutil.which("g++") or "c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    subprocess.run([*compiler, tmp_path / "all.cpp"], check=True)
    for part in definitions.PARTS:
        for field, at in part.offsets():
            read = operation_log.DTYPE.fields[part.name][0] if part.name != "queue" else operation_log.DTYPE
            offset = read.fields[field.name][1]
            assert offset == (at if part.name != "queue" else definitions.PART_OFFSET + at)
            assert f"offsetof({part.name.title()}Part, {field.name}) == {at})" in definitions.cpp()


def test_every_kind_has_one_part() -> None:
    kinds = [kind for part in definitions.PARTS for kind in part.kinds]
    assert sorted(kinds) == sorted(definitions.Kind)
    for part in definitions.PARTS:
        last, at = list(part.offsets())[-1]
        assert (
            at + definitions.SIZES[last.type] * last.count
            <= definitions.RECORD_SIZE - definitions.PART_OFFSET
        )


def test_the_documentation_shows_them() -> None:
    assert definitions.markdown() in (ROOT / "docs" / "timing.md").read_text(), (
        "docs/timing.md: put in what lib/gpubpf/agent/definitions.py --markdown prints"
    )

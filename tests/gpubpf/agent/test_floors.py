"""The order of the agent's files: a file includes only headers of files that come before it, so there are no circles of includes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpubpf import agent

SOURCES = Path(agent.__file__).parent / "src"
# From the lowest floor to the highest, and in order on each floor. A name stands for a source with its header (`thread`: thread.h and
# thread.cpp). A header may have no source: what it declares is then defined on a higher floor, and its text says where.
# docs/architecture.md has the same floors.
FLOORS = {
    "ground": "heap rows library readable compiled instruction prologue",
    "wire": "wire this_agent messages lifetime signals shared_files",
    "jumps": "patch hooks.def hooks_module.def hooks_graph.def hooks_log.def hooks_held.def hooks_all.def hook_table"
    " compilers",
    "log": "log/log log/other_profilers log/private_copy log/python log/stack",
    "threads": "thread log/numbers log/allocation log/host_program",
    "state": "driver/driver attachment state driver/stream driver/objects",
    "driver": "log/clock driver/fault driver/waiting_call driver/current driver/gpu_idle",
    "operations": "log/stamp log/cupti log/operation",
    "copies": "copies/shared copies/image copies/link copies/original copies/deferred copies/patched copies/launch copies/sidecar"
    " copies/sanitizer_api copies/patches copies/preexisting copies/graph copies/drain",
    "hooks": "driver/leftovers hook_call hooks_log hooks_graph hooks_module hooks",
    "agent": "lifetimes agent",
}
ORDER = {name: number for number, name in enumerate(" ".join(FLOORS.values()).split())}
FILES = sorted(path for path in SOURCES.rglob("*") if path.suffix in (".h", ".cpp", ".def"))


def unit(name: str) -> str:
    """Return the name of a file as in FLOORS. A source and its header are one unit; a table of hooks is one of its own."""
    return re.sub(r"\.(h|cpp)$", "", name)


def test_every_file_has_a_place() -> None:
    found = {unit(path.relative_to(SOURCES).as_posix()) for path in FILES}
    assert found == set(ORDER), "put a new file into FLOORS, behind all that it includes"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCES).as_posix())
def test_a_file_includes_only_what_comes_before_it(path: Path) -> None:
    own = unit(path.relative_to(SOURCES).as_posix())
    names = re.findall(r'^\s*#include "([^"]+)"', path.read_text(), re.M)
    included = {unit(name) for name in names if (SOURCES / name).exists()} - {own}
    later = sorted(name for name in included if ORDER[name] > ORDER[own])
    assert not later, (
        f"{own} is below {', '.join(later)}: move the declarations that it needs to a lower file"
    )

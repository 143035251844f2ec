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
    "ground": "heap rows library readable compiled file_code machine/code machine/cpu"
    " machine/x86_64/instruction machine/x86_64/code machine/x86_64/cpu"
    " machine/aarch64/instruction machine/aarch64/code machine/aarch64/cpu",
    "wire": "peer wire this_agent messages lifetime signals shared_files",
    "jumps": "patch hooks.def hooks_module.def hooks_graph.def hooks_log.def hooks_held.def hooks_all.def hook_table"
    " compilers",
    "log": "log/log log/other_profilers log/private_copy log/python log/stack",
    "threads": "thread log/ranges log/nvtx log/numbers log/allocation log/host_program",
    "state": "driver/driver attachment state driver/stream driver/objects",
    "driver": "log/clock driver/fault driver/waiting_call driver/current driver/gpu_idle",
    "operations": "log/stamp log/cupti machine/x86_64/loads machine/aarch64/loads log/operation",
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


OF_A_MACHINE = re.compile(
    r"__x86_64__|__aarch64__|__builtin_ia32|x86intrin|\basm\b|\bmachine/(?:x86_64|aarch64)/"
)


def test_only_files_of_a_machine_depend_on_it() -> None:
    other = [path for path in FILES if path.relative_to(SOURCES).parent.parent.name != "machine"]
    other += sorted((SOURCES.parent / "hsa").iterdir())
    assert [path.name for path in other if OF_A_MACHINE.search(path.read_text())] == []


def test_each_machine_has_the_same_files() -> None:
    def names(machine: str) -> set[str]:
        return {path.name for path in (SOURCES / "machine" / machine).iterdir()}

    assert names("x86_64") == names("aarch64")

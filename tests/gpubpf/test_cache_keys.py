"""The cache's keys name every module that makes what is kept, so that an update never meets results of older code."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path

import pytest

from gpubpf import cache

grimp = pytest.importorskip("grimp")
LIB = Path(cache.__file__).parents[1]
# Modules that change nothing of a result: they move, print or read bytes. A key has the text or the image that was found in a file
# (`elf`, `fatbin`, `device_link`). Only host programs are made for a processor (`processor`), and no key is theirs.
NEVER = ("cache", "digest", "elf", "errors", "kernel", "process", "processor", "record", "show")
# A key has the lowered programs.
LOWERED = ("ebpf", "inject", "lower", "names", "verify")
# What else is imported beside the functions that make a result. `images.mapped` imports nearly all of it, so it has no row.
EXCUSED = {
    "gpubpf.images.instrument": (*NEVER, "images.fatbin", "images.tile_ir", "images.device_link"),
    "gpubpf.images.code_objects": (*NEVER, *LOWERED, "linux", "own_files"),
    "gpubpf.images.device_link": (
        "cache",
        "digest",
        "elf",
        "errors",
        "images.fatbin",
        "images.tile_ir",
        "kernel",
        "record",
    ),
    "gpubpf.images.assemble": (
        "cache",
        "digest",
        "elf",
        "errors",
        "images",
        "kernel",
        "process",
        "processor",
        "ptx",
        "record",
    ),
    "gpubpf.ebpf.compile": ("cache", "digest", "errors", "kernel", "processor", "record", "ziglang"),
}


def _of(module: str, names: Iterable[str]) -> bool:
    return any(f"{module}.".startswith(f"gpubpf.{name}.") for name in names)


@pytest.fixture(scope="module")
def graph() -> object:
    return grimp.build_graph("gpubpf", cache_dir=None)


@pytest.mark.parametrize("module", EXCUSED)
def test_a_key_has_every_module_that_makes_its_results(
    module: str, graph: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    covered: set[Path] = set()
    maker = importlib.import_module(module)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "key_of_files", lambda files: covered.update(files) or "")
        maker._version.__wrapped__()
    assert covered and all(file.exists() for file in covered)
    modules = {
        ".".join(file.relative_to(LIB).with_suffix("").parts) for file in covered if LIB in file.parents
    }
    imported = graph.find_upstream_modules(module) | {module}  # type: ignore[attr-defined]
    packages = {m for m in imported if (LIB / Path(*m.split("."))).is_dir()}
    missing = {m for m in imported - packages - modules if not _of(m, EXCUSED[module])}
    assert not missing, "add them to the key, or say here why they change no result"


def test_nothing_is_excused_that_is_not_imported(graph: object) -> None:
    for module, excused in EXCUSED.items():
        imported = graph.find_upstream_modules(module) | {module}  # type: ignore[attr-defined]
        assert not [name for name in excused if not any(_of(m, [name]) for m in imported)]

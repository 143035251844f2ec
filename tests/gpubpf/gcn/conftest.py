from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpubpf_gcn
from gpubpf.gcn import inner_sites, kernel_writer
from hipsim_engine import GPUS


@pytest.fixture(scope="module", params=GPUS)
def gpu(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def built(gpu: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the code object with the kernels of gpubpf_gcn."""
    return gpubpf_gcn.build(tmp_path_factory.mktemp("gcn"), gpu)


def _taken(gpu: str) -> int:
    """Return how many SGPRs the kernel has, for it to use all of them: hardly more than the probes of these tests need."""
    return 34 if gpu == "gfx1030" else 36


@pytest.fixture(params=["free", "taken"])
def room(request: pytest.FixtureRequest, gpu: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whether there are SGPRs that the kernel does not use."""
    if request.param == "taken":
        monkeypatch.setattr(inner_sites, "SGPRS", _taken(gpu))
        monkeypatch.setattr(kernel_writer, "SGPRS", _taken(gpu))
    chosen, kept = inner_sites.InnerSites.registers, []

    def registers(*given: Any) -> Any:
        found = chosen(*given)
        kept.append(bool(found[0].lanes))
        return found

    monkeypatch.setattr(inner_sites.InnerSites, "registers", registers)
    yield
    assert kept == [request.param == "taken"]

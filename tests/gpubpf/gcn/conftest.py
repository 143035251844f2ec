from __future__ import annotations

from pathlib import Path

import pytest

import gpubpf_gcn
from hipsim_engine import GPUS


@pytest.fixture(scope="module", params=GPUS)
def gpu(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def built(gpu: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the code object with the kernels of gpubpf_gcn."""
    return gpubpf_gcn.build(tmp_path_factory.mktemp("gcn"), gpu)

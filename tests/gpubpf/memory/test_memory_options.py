"""`memory.memory_options`: what memtrace measures by default with --sass."""

from __future__ import annotations

import pytest

from gpubpf.images.assemble import Target
from gpubpf.memory.memory_options import PATCHED_SHARE, MemoryOptions
from gpubpf.session import tracing
from gpubpf.show.parsed import KernelOptions, Options, SamplingOptions


@pytest.mark.parametrize(
    ("sass", "given", "device", "blocks"),
    [
        (True, None, "gpu", PATCHED_SHARE),
        (True, 1, "gpu", 1),
        (True, None, "sim", None),
        (False, None, "gpu", None),
    ],
)
def test_patches_measure_a_sample_on_a_gpu(
    sass: bool,
    given: int | None,
    device: str,
    blocks: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tracing, "target", lambda options: Target(device, (9, 0)))
    shared = Options(kernels=KernelOptions(sass=sass), sampling=SamplingOptions(blocks=given))
    made = MemoryOptions(shared).sampled_by_default()
    assert made.shared.sampling.blocks == blocks
    said = f"--sass measures one block in {PATCHED_SHARE}; --sample-blocks 1/1 measures all"
    assert (said in capsys.readouterr().err) is (blocks == PATCHED_SHARE)

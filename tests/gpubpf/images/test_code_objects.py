"""Sidecars for AMD GPUs: made in a child process, kept in the cache, and refused where AMD's library crashes."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import hipsim_engine
from gpubpf.ebpf.bytecode import DEVICE_POINTS
from gpubpf.ebpf.probe import Probe
from gpubpf.gcn import POINTS, comgr
from gpubpf.gcn.code_object import CodeObject
from gpubpf.images import code_objects
from gpubpf.images.code_objects import ForWaves, instrument
from gpubpf.lower import amdgcn
from gpubpf.record import replace
from gpubpf.verify.rules import check
from gpubpf_bcc import compiled
from hipsim_engine import assemble, kernel

pytestmark = pytest.mark.skipif(
    hipsim_engine.missing() is not None, reason="needs LLVM's tools for AMD GPUs, which script/setup installs"
)
RESERVED = ".long 0x0707caf9\n.long 0x41928789"  # SDWA; libamd_comgr of LLVM 15 crashes as it prints this


@pytest.fixture(scope="module")
def probe() -> Probe[ForWaves]:
    program = compiled("#include <gpubpf.h>\nint on_exit(struct gpu_exit *ctx) { return 0; }")
    checked = check(program, program.functions["on_exit"])
    return Probe(lambda wave: amdgcn.lower(program, checked, wave), "exit", "instructions", kernels=("one",))


def built(place: Path, body: str) -> bytes:
    return assemble(kernel("one", body) + kernel("two", ""), place).read_bytes()


def test_a_sidecar_and_the_cache(
    tmp_path: Path, probe: Probe[ForWaves], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = built(tmp_path, "s_nop 3")
    made = instrument(data, [probe])
    assert made.entries == ("one", "two") and not made.refusals
    (one,) = made.kernels
    assert one.name == "one" and one.amd is not None and one.amd.wave == 64
    assert CodeObject(made.image).gpu == "gfx906" and len(made.image) > len(data)
    monkeypatch.setattr(code_objects, "_in_child", lambda *arguments: pytest.fail("made twice"))
    assert instrument(data, [probe]) == made


def test_what_one_version_of_amds_library_made_or_refused_is_not_kept_for_another(
    tmp_path: Path, probe: Probe[ForWaves], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = built(tmp_path, "s_nop 4")
    with monkeypatch.context() as patch:
        patch.setattr(comgr, "LIBRARIES", ("libamd_comgr.so.none",))  # as if it was not installed
        patch.setattr(code_objects, "_comgr_files", lambda: iter(()))
        patch.setattr(
            code_objects,
            "_in_child",
            lambda data, *others: code_objects._instrument(CodeObject(data), *others),
        )
        comgr._library.cache_clear()
        code_objects._version.cache_clear()
        assert "is not installed" in instrument(data, [probe]).refusals["one"]
    comgr._library.cache_clear()
    code_objects._version.cache_clear()
    assert list(code_objects._comgr_files())
    assert instrument(data, [probe]).image


@pytest.mark.parametrize("point", [point for point in DEVICE_POINTS if point not in POINTS])
def test_points_that_these_kernels_lack_are_refused_by_name(
    tmp_path: Path, probe: Probe[ForWaves], point: str
) -> None:
    data, lacking = built(tmp_path, "s_nop 3"), replace(probe, point=point)
    alone = instrument(data, [lacking])
    assert not alone.kernels
    assert alone.refusals == {"one": f"kernels of AMD GPUs have no probes at {point} yet"}
    beside = instrument(data, [lacking, probe])
    assert [kernel.name for kernel in beside.kernels] == ["one"] and not beside.refusals


def test_arguments_without_metadata_are_refused(tmp_path: Path) -> None:
    program = compiled(
        '#include <gpubpf.h>\nint on_entry(struct gpu_entry *ctx) { bpf_trace_printk("%d", ctx->arg1); return 0; }'
    )
    checked = check(program, program.functions["on_entry"])
    attached = Probe(lambda wave: amdgcn.lower(program, checked, wave), "entry", kernels=("one",))
    made = instrument(built(tmp_path, "s_nop 3"), [attached])
    assert not made.kernels
    assert made.refusals == {"one": "its metadata does not say what arguments it has"}


def test_what_crashes_amds_library_is_refused(tmp_path: Path, probe: Probe[ForWaves]) -> None:
    made = instrument(built(tmp_path, RESERVED), [probe])
    assert not made.kernels and not made.image
    assert made.refusals == {"one": "AMD's code object manager cannot read its code object"}


def test_what_takes_too_long_is_refused(
    tmp_path: Path, probe: Probe[ForWaves], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_objects, "_PATIENCE", 0)
    made = instrument(built(tmp_path, "s_nop 5"), [probe])
    assert not made.kernels and not made.image
    assert made.refusals == {"one": "making the copies of its code object takes longer than 0 s"}


def test_a_segment_that_is_longer_than_the_file(tmp_path: Path, probe: Probe[ForWaves]) -> None:
    data = bytearray(built(tmp_path, "s_nop 3"))
    (table,), (count,) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<H", data, 56)
    found = []
    for number in range(count):  # each segment begins near the end of the file
        changed = bytearray(data)
        struct.pack_into("<Q", changed, table + 56 * number + 8, len(data) - 20)
        found.append(instrument(bytes(changed), [probe]))
    assert code_objects.Sidecar() in found  # the segment with the descriptors


@pytest.mark.parametrize("data", [b"", b"\x7fELF", bytes(1000)])
def test_what_is_no_code_object(data: bytes, probe: Probe[ForWaves]) -> None:
    assert instrument(data, [probe]) == code_objects.Sidecar()

"""The contexts of programs agree with the C header, the calls of `BPF`, and the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpubpf.ebpf import headers
from gpubpf.ebpf.bytecode import (
    CONTEXTS,
    HOST_POINTS,
    KINDS,
    READS,
    RETURNS,
    SPACES,
    TYPES,
    UNADDRESSED_SPACES,
    WORK,
    WRITES,
)
from gpubpf.program import BPF
from gpubpf.ptx import opcodes
from gpubpf.ptx.parser import parse

ROOT = Path(__file__).parents[3]


def _header() -> str:
    return re.sub(r"/\*.*?\*/", "", (headers.INCLUDE / "gpubpf.h").read_text(), flags=re.S)


@pytest.mark.parametrize("point", CONTEXTS)
def test_the_header_has_the_fields_in_their_order(point):
    body = re.search(rf"struct gpu_{point} \{{(.*?)\}};", _header(), re.S)
    assert body is not None
    declarations = [d.strip() for d in body[1].split(";") if d.strip()]
    assert all(d.startswith("u64 ") for d in declarations)
    fields = [name.strip() for d in declarations for name in d[4:].split(",")]
    assert fields == list(CONTEXTS[point])
    assert list(CONTEXTS[point].values()) == [(8 * n, 8) for n in range(len(fields))]


@pytest.mark.parametrize("point", CONTEXTS)
def test_a_call_attaches_it_and_the_documentation_has_it(point):
    call = f"attach_{point}" if point in HOST_POINTS else f"attach_gpu_{point}"
    assert callable(getattr(BPF, call))
    text = (ROOT / "docs/attach-points.md").read_text()
    assert f"`struct gpu_{point} *`" in text
    assert f"`{call}" in text
    missing = [field for field in CONTEXTS[point] if f"`{field}`" not in text]
    assert not missing


def test_kinds_spaces_types_and_effects_of_accesses():
    enums = dict(re.findall(r"enum gpu_(\w+) \{([^}]*)\}", _header()))
    assert tuple(w.strip().removeprefix("GPU_").lower() for w in enums["kind"].split(",")) == KINDS
    assert tuple(w.strip().removeprefix("GPU_").lower() for w in enums["space"].split(",")) == (
        *SPACES,
        *UNADDRESSED_SPACES,
    )
    assert tuple(w.strip().removeprefix("GPU_").lower() for w in enums["type"].split(",")) == TYPES
    assert dict(re.findall(r"GPU_(\w+) = (\d)", enums["effect"])) == {
        "READS": str(READS),
        "WRITES": str(WRITES),
        "RETURNS": str(RETURNS),
    }


def test_work_is_what_the_injector_counts():
    text = (ROOT / "docs/attach-points.md").read_text()
    assert all(f"`{kind}`" in text for kind in WORK)
    forms = "ld.global.u32 %r,[%d]; st.u32 [%d],%r; atom.add.u32 %r,[%d],1; bar.sync 0;"
    kernel = parse(f".version 8.0\n.target sm_80\n.visible .entry k() {{ {forms} }}").functions["k"]
    work = {kind for statement in kernel.body or () for kind in opcodes.counted(statement)}
    assert {"instructions", "blocks", *work} == set(WORK)

"""The templates of LLVM IR: what they make is a module that LLVM takes, for every back end, operation and size."""

from __future__ import annotations

import llvmlite.binding as llvm
import pytest

from gpubpf.ebpf import compile
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.lower import amdgcn, nvptx, storage
from gpubpf.lower.host_code import HOST
from gpubpf.lower.nvptx import NVPTX

BACKENDS = {"nvptx": NVPTX, "host": HOST, "wave32": amdgcn.backend(32), "wave64": amdgcn.backend(64)}
SIZES = [(1, 1), (3, 7), (4, 8), (12, 16), (64, 200)]


def made(backend) -> dict[str, str]:
    """Every function that a template can become."""
    texts = {f"block {last}": storage.block_function("f", last, backend) for last in (False, True)}
    for key, value in SIZES:
        ring = MapDefinition("ring", "ringbuf", 0, value, 8192)
        texts[f"ring {value}"] = storage.ring_function("f", ring, backend)
        table = MapDefinition("table", "hash", key, value, 100)
        for operation in storage.HASH_OPERATIONS:
            texts[f"{operation} {key} {value}"] = storage.hash_function("f", operation, table, backend)
    return texts


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_llvm_takes_them(backend):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(backend.triple).create_target_machine(opt=2)
    for name, text in made(backend).items():
        module = llvm.parse_assembly(f'target triple = "{backend.triple}"\n{backend.functions}\n{text}')
        module.verify()
        function = module.get_function("f")
        assert not function.is_declaration, name
        function.linkage = "external"
        nvptx.optimize(module, machine)


def test_each_part_of_a_template_is_used():
    """A section that no back end and no operation selects would be code that nothing checks."""
    used = {
        line.split("=")[0].strip()
        for b in BACKENDS.values()
        for text in made(b).values()
        for line in text.split("\n")
    }
    for name in ("block", "hash", "ring"):
        for line in storage._lines(name):
            if line and "$" not in line and not line.startswith(";"):
                assert line.split("=")[0].strip() in used, line


def test_a_changed_template_is_another_version(monkeypatch, tmp_path):
    """What was compiled and lowered before with another template is not taken from the cache."""
    root = tmp_path / "gpubpf"
    (root / "lower/templates").mkdir(parents=True)
    (root / "ebpf").mkdir()
    monkeypatch.setattr(compile, "__file__", str(root / "ebpf/compile.py"))
    (root / "lower/templates/ring.ll").write_text("; one\n")
    before = compile._version.__wrapped__()
    (root / "lower/templates/ring.ll").write_text("; two\n")
    assert compile._version.__wrapped__() != before

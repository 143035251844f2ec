"""SHA-256 of any length is that of hashlib, and that of short data needs no OpenSSL."""

import hashlib
import subprocess
import sys

import pytest

from gpubpf import digest


@pytest.mark.parametrize("length", [0, 1, 1000, digest._LONG - 1, digest._LONG, digest._LONG + 1])
def test_it_is_that_of_hashlib(length, monkeypatch):
    data = bytes(range(256)) * (length // 256) + bytes(length % 256)
    expected = hashlib.sha256(data)
    monkeypatch.delitem(sys.modules, "hashlib")
    assert digest.sha256(data).digest() == expected.digest()
    assert digest.sha256(data[:100], b"", data[100:]).hexdigest() == expected.hexdigest()
    assert len(expected.digest()) == digest.SIZE


def test_a_python_without_its_own_code_uses_hashlib(monkeypatch):
    monkeypatch.delitem(sys.modules, "hashlib")
    for module in ("_sha2", "_sha256"):
        monkeypatch.setitem(sys.modules, module, None)
    assert digest.sha256(b"abc").digest() == hashlib.sha256(b"abc").digest()


def test_what_a_tool_imports_needs_no_openssl():
    modules = "program cache session.tracing traced.joining attach.loading images.mapped images.instrument"
    imports = "; ".join(f"import gpubpf.{module}" for module in modules.split())
    script = f"import sys; {imports}; gpubpf.cache.key('a'); print(sorted({{'_hashlib', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

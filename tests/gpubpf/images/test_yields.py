"""`images.yields`: functions of probes have no YIELD, and nothing else of a cubin changes."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

from gpubpf.ebpf.probe import Probe
from gpubpf.errors import ImageError
from gpubpf.images.yields import without_yields
from gpubpf.inject import plan
from gpubpf.inject.inject import inject
from gpubpf.lower.fragment import Argument, Fragment
from gpubpf.ptx.parser import parse
from gpubpf_sass import assembled, nvdisasm

KERNEL = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 p) { .reg .b64 %at; BODY ret; }
"""
CALL = "{ .param .b64 q; add.u64 %at, %at, 8; st.param.b64 [q], %at; call NAME, (q); }\n"
PTX = """
.version 8.0
.target sm_80
.address_size 64
.func gpubpf_program7(.param .b64 a) { BODY }
.func gpubpf_waiting7(.param .b64 a) { BODY }
.visible .entry k(.param .u64 p)
{
    .reg .b64 %at; .reg .b32 %x; .reg .pred %other;
    ld.param.u64 %at, [p];
    mov.u32 %x, %tid.x;
    setp.eq.u32 %other, %x, 3;
    @%other bra END;
    CALLS
END:
    st.global.u32 [%at+8], %x;
    ret;
}
""".replace(
    "BODY",
    """
    .reg .b64 %at, %old;
    ld.param.u64 %at, [a];
    atom.global.add.u64 %old, [%at+160], 1;
    st.global.u64 [%at], %old;
    ret;
    """,
).replace("CALLS", (CALL.replace("NAME", "gpubpf_program7") + CALL.replace("NAME", "gpubpf_waiting7")) * 9)


def disassembled(cubin: Path) -> list[str]:
    done = subprocess.run([nvdisasm(), "-c", str(cubin)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.every(2)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_only_functions_of_probes_lose_their_yield(arch: str, tmp_path: Path) -> None:
    cubin, _ = assembled(PTX, arch, tmp_path)
    before = disassembled(cubin)
    changed = tmp_path / "changed.cubin"
    changed.write_bytes(without_yields(cubin.read_bytes()))
    after = disassembled(changed)
    different = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    # Both functions have one before. If this ptxas writes none, the module is no longer needed.
    assert sum("YIELD" in line for line in before) == 2
    assert [(old.split()[1], new.split()[1]) for old, new in different] == [("YIELD", "NOP")]
    start = next(n for n, line in enumerate(after) if line.startswith("$k$gpubpf_waiting7:"))
    assert any("YIELD" in line for line in after[start : start + 12])
    # The scheduler's bits stay: the last 8 bytes differ only in the fields of YIELD's own operand.
    words = [
        struct.unpack(f"<{len(data) // 8}Q", data[: len(data) // 8 * 8])
        for data in (cubin.read_bytes(), changed.read_bytes())
    ]
    pairs = [(old, new) for old, new in zip(*words, strict=True) if old != new]
    assert len(pairs) == 2 and pairs[0] == (0x7946, 0x7918)
    assert pairs[1][0] >> 41 == pairs[1][1] >> 41 and pairs[1][1] & 0x1FFFFFFFFFF == 0


@pytest.mark.parametrize("waits", [False, True])
def test_functions_where_a_thread_may_wait_have_another_name(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a program's function says whether a hash in it waits for other threads."""
    for limit in ("MIN_FUNCTION", "MAX_INLINE"):
        monkeypatch.setattr(plan, limit, 0)
    look = "ld.acquire.gpu.global.b64 %gpubpf_site, [%gpubpf_site];" if waits else ""
    fragment = Fragment("f", f"{{\n{look}\n}}", (Argument("site", "b64", "context", field="site"),))
    text = KERNEL.replace("BODY", "ld.param.u64 %at, [p]; st.global.u64 [%at], %at;")
    made = inject(parse(text), {"k": [Probe(fragment, "access")]}).text
    found = [name for name in ("gpubpf_program0", "gpubpf_waiting0") if f".func {name}(" in made]
    assert found == [f"gpubpf_{'waiting' if waits else 'program'}0"]


def test_a_file_that_is_no_cubin_is_refused() -> None:
    with pytest.raises(ImageError):
        without_yields(b"no cubin")

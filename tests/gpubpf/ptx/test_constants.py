"""Which variables of a module nothing can write, so that a copy of the module may have a copy of them."""

from __future__ import annotations

import pytest

from gpubpf.ptx.constants import is_constant
from gpubpf.ptx.parser import parse

HEAD = """.version 8.0
.target sm_80
.address_size 64
.global .u32 _ZZ1kvE5table[4] = {1, 2, 3, 4};
"""


@pytest.mark.parametrize(
    ("body", "constant"),
    [
        ("ld.global.u32 %r1, [_ZZ1kvE5table+4];", True),
        ("mov.u64 %rd1, _ZZ1kvE5table; add.s64 %rd2, %rd1, 8; ld.global.u32 %r1, [%rd2];", True),
        ("st.global.u32 [_ZZ1kvE5table], 5;", False),
        ("mov.u64 %rd1, _ZZ1kvE5table; st.global.u64 [%rd3], %rd1;", False),
        # A vector register has its address, and so has a variable of the function.
        (".reg .v2 .b64 v; mov.b64 v.x, _ZZ1kvE5table; st.global.v2.b64 [%rd3], v;", False),
        ("{ .global .u64 p = _ZZ1kvE5table; ld.global.u64 %rd1, [p]; st.global.u32 [%rd1], 5; }", False),
        # Another variable of this name.
        ("{ .shared .u32 _ZZ1kvE5table; st.shared.u32 [_ZZ1kvE5table], 5; }", True),
    ],
)
def test_a_variable_is_constant_if_nothing_writes_it(body: str, constant: bool) -> None:
    text = f"{HEAD}.visible .entry k() {{ .reg .b32 %r<3>; .reg .b64 %rd<4>; {body} ret; }}"
    module = parse(text)
    assert is_constant(module, module.variables["_ZZ1kvE5table"]) == constant

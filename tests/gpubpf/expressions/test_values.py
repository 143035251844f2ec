"""Values in expressions: their C text, compiled by this machine's C compiler, against the same numbers as Python reads them."""

from __future__ import annotations

import math
import random
import struct
import subprocess
from pathlib import Path

import pytest

from gpubpf.ebpf.bytecode import TYPES
from gpubpf.ebpf.floats import as_float, element, is_denormal
from gpubpf.ebpf.headers import INCLUDE
from gpubpf.errors import UsageError
from gpubpf.expressions import specs
from gpubpf.expressions.c_text import c_text
from gpubpf.expressions.points import c_names
from gpubpf.expressions.syntax import names_of

# How struct reads an element as a floating-point number; bf16 is the upper half of an f32. Other types are none.
FORMS = {"b16": "e", "f16": "e", "b32": "f", "f32": "f", "b64": "d", "f64": "d"}
KINDS = [kind for kind in TYPES if kind != "pred"]
NAMES = ("value", "isnan(value)", "isinf(value)")
# Functions of the header, and what Python says about the element of which they set the sign bit.
MASKS = {
    "gpu_nans": math.isnan,
    "gpu_not_finite": lambda one: not math.isfinite(one),
    "gpu_zeros": lambda one: one == 0,
}


def bits_of(kind: str) -> int:
    return int(kind.lstrip("bfus"))


def elements(kind: str, raw: bytes) -> list[float]:
    """Return the floating-point numbers in 16 bytes."""
    if kind == "bf16":
        return [struct.unpack("<f", b"\0\0" + raw[at : at + 2])[0] for at in range(0, 16, 2)]
    form = FORMS.get(kind)
    return list(struct.unpack(f"<{128 // bits_of(kind)}{form}", raw)) if form else []


def low(raw: bytes) -> int:
    return int.from_bytes(raw, "little")


def first(kind: str, raw: bytes) -> int:
    """Return the first element as an integer of 64 bits, or the first 8 bytes of it."""
    return int.from_bytes(raw[: min(8, bits_of(kind) // 8)], "little", signed=kind[0] == "s")


def words(kind: str, numbers: random.Random) -> bytes:
    """Return 16 bytes whose elements are often NaN, infinite, or beside these."""
    made, size = b"", min(8, bits_of(kind) // 8)
    fraction = {"bf16": 7}.get(kind, {16: 10, 32: 23, 64: 52}.get(8 * size, 4))
    infinity = (1 << 8 * size - 1) - (1 << fraction)
    while len(made) < 16:
        some = (
            0,
            infinity,
            infinity + 1,
            infinity - 1,
            infinity | 1 << fraction - 1,
            (1 << 8 * size - 1) - 1,
        )
        one = numbers.choice((*some, *[0] * 6, numbers.getrandbits(8 * size - 1)))
        made += (one | numbers.getrandbits(1) << 8 * size - 1).to_bytes(size, "little")
    return made


def test_the_c_text_sees_what_python_does(tmp_path: Path) -> None:
    numbers = random.Random(5)
    cases = [(kind, words(kind, numbers)) for kind in KINDS for _ in range(300)]
    cases += [(kind, bytes(16)) for kind in KINDS]
    names = c_names(specs.count("store:* (value)").attachment)
    masks = [f"{function}(ctx_type, ctx_low)" for function in (*MASKS, "gpu_denormals")]
    rows = (f"{{{TYPES.index(kind)},{low(raw[:8])}ull,{low(raw[8:])}ull}}" for kind, raw in cases)
    source = [
        "#include <stdio.h>\ntypedef unsigned long long u64; typedef long long s64;",
        f"enum {{ {', '.join('GPU_' + kind.upper() for kind in TYPES)} }};",
        (INCLUDE / "gpubpf_floats.h").read_text().replace("#include <gpubpf.h>", ""),
        f"u64 cases[][3] = {{{','.join(rows)}}};",
        "int main(void) {",
        f"for (int i = 0; i < {len(cases)}; i++) {{",
        "u64 ctx_type = cases[i][0], ctx_low = cases[i][1], ctx_high = cases[i][2];",
        f'printf("%lld %llu %llu %llu %llu %llu %llu\\n", {", ".join([*(names[name] for name in NAMES), *masks])}); }} }}',
    ]
    (tmp_path / "all.c").write_text("\n".join(source))
    subprocess.run(["cc", "-w", "-O1", "-o", tmp_path / "all", tmp_path / "all.c"], check=True)
    said = subprocess.run([tmp_path / "all"], capture_output=True, text=True, check=True).stdout.splitlines()
    found = [tuple(map(int, line.split())) for line in said]
    seen = {one[1:3] for one in found}
    assert seen == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for (kind, raw), one in zip(cases, found, strict=True):
        floats = elements(kind, raw)
        number = first(kind, raw)
        shown = number - (1 << 64) if number >> 63 == 1 else number
        assert one[:3] == (shown, any(map(math.isnan, floats)), any(map(math.isinf, floats))), (
            kind,
            raw.hex(),
        )
        bits, floats = bits_of(kind), floats[: 64 // bits_of(kind)]
        holds = [list(map(test, floats)) for test in MASKS.values()]
        numbers_of = [element(kind, low(raw[:8]), low(raw[8:]), at) for at in range(len(floats))]
        names_of_floats = {"b16": "f16", "b32": "f32", "b64": "f64"}
        holds.append([is_denormal(names_of_floats.get(kind, kind), number) for number in numbers_of])
        for mask, of_each in zip(one[3:], holds, strict=True):
            right = sum(1 << bits * at + bits - 1 for at, held in enumerate(of_each) if held)
            assert mask == right, (kind, raw.hex())


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_reads_the_first_element(kind: str) -> None:
    numbers = random.Random(6)
    floats = kind in FORMS or kind == "bf16"
    for raw in (words(kind, numbers) for _ in range(100)):
        element = first(kind, raw)
        right = elements(kind, raw)[0] if floats else float(element)
        found = as_float(element % (1 << 64), TYPES.index(kind))
        assert found == right or (math.isnan(found) and math.isnan(right))


def test_what_is_no_type_is_an_integer() -> None:
    assert as_float(7, len(TYPES)) == as_float(7, 2**64 - 1) == 7.0


def test_only_a_program_that_uses_values_is_attached_with_them() -> None:
    def method(spec: specs.Spec) -> tuple[str, dict]:
        return spec.attachment.method, dict(spec.attachment.arguments)

    where = {"kinds": ("store",), "spaces": ("shared",)}
    assert method(specs.count("store:*:shared (address)")) == ("access", where)
    assert method(specs.count("store:*:shared (isinf(value))")) == ("value", where)
    assert method(specs.distribution("store:*:shared:u8:value, kernel").spec) == ("value", where)
    assert method(specs.distribution("store:*:shared (value):u8:width").spec) == ("value", where)
    assert method(specs.trace('store:*:shared "%f %s", value, kernel').spec) == ("value", where)
    assert method(specs.trace("store:*:shared").spec) == ("access", where)
    assert method(specs.count("atomic:* (old == 0)"))[0] == "value"
    assert method(specs.count("atomic:* (effect & GPU_RETURNS)"))[0] == "value"
    assert method(specs.count("atomic:* (effect & GPU_WRITES)"))[0] == "access"


def test_a_value_is_signed_and_takes_part_in_expressions() -> None:
    spec = specs.count("atomic:* (value < 0 && !isnan(old) && old + 0u > 3)")
    assert spec.filter is not None and list(names_of(spec.filter)) == ["value", "isnan(old)", "old"]
    text = c_text(spec.filter, c_names(spec.attachment))
    assert "(s64)gpu_element(ctx_type, ctx_low) < (s64)0ull" in text
    assert "gpu_isnan(ctx_type, ctx_old_low, ctx_old_high)" in text
    assert "((gpu_element(ctx_type, ctx_old_low) + 0ull) > 3ull)" in text


def test_a_record_has_the_type_once_if_a_float_is_shown() -> None:
    shown = specs.trace('atomic:* "%5.1f %d %e %s", value, old, old, source')
    assert [list(names_of(node)) for node in shown.numbers] == [["value"], ["old"], ["old"], ["type"]]
    assert len(specs.trace('atomic:* "%d", value').numbers) == 1
    values = shown.format.with_floats(
        (0x3FC0, 0xC000, 0xC000, "a.cu:3"), [TYPES.index("bf16"), None, TYPES.index("bf16"), None]
    )
    assert shown.format.show(values) == "  1.5 49152 -2.000000e+00 a.cu:3"
    assert shown.format.json(values) == [1.5, 49152, -2.0, "a.cu:3"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("load:* (old)", "load has no 'old'; fields:"),
        ("load:* (valu)", "values: value; builtins:"),
        ("access:* (value)", "access has no 'value'"),
        ("entry:* (isnan(value))", "isnan() takes a floating-point value; entry has only integers"),
        ("access:* (isinf(value))", "isinf() takes a floating-point value; access has only integers"),
        ("store:* (isnan(width))", "isnan() takes a value alone; write isnan(value)"),
        ("store:* (isnan(value + 1))", "isnan() takes a value alone; write isnan(value)"),
        ("store:* (isnan())", "isnan() takes a value alone; write isnan(value)"),
        ("store:* (isnan((value)))", "isnan() takes a value alone; write isnan(value)"),
        ("atomic:* (isinf(width))", "isinf() takes a value alone; write isinf(value) or isinf(old)"),
        ("store:* (isnan)", "store has no 'isnan'"),
        ("store:* (value > 1.5)", "1.5 is a floating-point number; store has only integers"),
        ("store:* (GPU_RETURNS)", "store has no 'GPU_RETURNS'"),
        ("store:* (old_low)", "store has no 'old_low'"),
        ("access:* (type)", "access has no 'type'"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as found:
        specs.count(text)
    assert message in str(found.value) and "\n" not in str(found.value)

"""Expressions: what C says they mean, in Python and as C text, and one line for every mistake."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

import pytest

from gpubpf.errors import UsageError
from gpubpf.expressions import points
from gpubpf.expressions.c_text import ARITHMETIC, c_text
from gpubpf.expressions.evaluate import evaluate
from gpubpf.expressions.syntax import (
    DEEPEST,
    LONGEST,
    MASK,
    PRECEDENCE,
    U64,
    Names,
    names_of,
    parse,
    parse_list,
)

ROOT = Path(__file__).resolve().parents[3]

NAMES = Names(
    "load",
    {"width": U64, "address": U64},
    {"lane": U64, "block": U64, "block.x": U64},
    texts=("kernel", "source"),
)
VALUES = {"width": 4, "address": 0x7F00_0000_0010, "lane": 31, "block.x": 7}


def value(text: str) -> int:
    return evaluate(parse(text, NAMES), VALUES)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("10 - 4 - 3", 3),  # from the left
        ("100 / 7 % 5", 4),
        ("1 << 2 + 1", 8),  # + binds tighter than <<
        ("6 & 3 == 3", 0),  # == binds tighter than &
        ("1 | 6 ^ 2 & 3", 5),
        ("0 || 5 && 0", 0),
        ("lane == 31 ? width : 9", 4),
        ("0 ? 1 : 0 ? 2 : 3", 3),  # from the right
        ("-1 < 0", 1),  # both signed
        ("-1 < lane", 0),  # one unsigned: C converts the other
        ("lane - 32 > 0", 1),
        ("-7 / 2", -3 & MASK),
        ("-7 % 2", -1 & MASK),
        ("-8 >> 1", -4 & MASK),
        ("(lane - 32) >> 63", 1),
        ("lane / (width - 4)", 0),
        ("lane % (width - 4)", 31),
        ("1 << 64", 1),
        ("1 << (lane + 1)", 1 << 32),
        ("!width + !!width", 1),
        ("~0", MASK),
        ("- - 3", 3),
        ("+4", 4),
        ("0x1F + 010 + 0b11 + 7u + 2ULL", 31 + 8 + 3 + 7 + 2),
        ("18446744073709551615 > 0", 1),
        ("popcount(0xff00) + popcount(lane)", 13),
        ("s8(0x1ff) + s16(0x18000) + s32(0x17fffffff)", 2**31 - 1 - 1 - 2**15),
        ("s32(0xfffffff9) < 0 && s32(0xfffffff9) == -7", 1),
        ("log2(0) + log2(1) + log2(1025)", 10),
        ("address % 128", 16),
        ("block.x * 2", 14),
        ("9223372036854775807 + 1 < 0", 1),  # signed numbers wrap around
    ],
)
def test_expressions_mean_what_c_says(text: str, right: int) -> None:
    assert value(text) == right
    assert value(f"  (({text}))\n\t") == right


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a number, a name or '(' is missing in an empty expression"),
        ("1 +", "a number, a name or '(' is missing after '1 +'"),
        ("(1", "')' is missing"),
        ("1)", "unexpected ')' after '1'"),
        ("1 2", "unexpected '2' after '1': an operator is missing"),
        ("1 ? 2", "':' is missing"),
        ("width = 4", "unexpected '=' after 'width'"),
        ("width +* 2", "unexpected '*' after 'width +'"),
        (
            "lanes",
            "load has no 'lanes'; fields: width, address; builtins: lane, block(.x); texts: kernel, source; functions:",
        ),
        ("block.w", "load has no 'block.w'"),
        ("block.xy", "load has no 'block.xy'"),
        ("kernel == 1", "kernel is a text, not a number"),
        ("sqrt(4)", "there is no function sqrt(); use one of: popcount, log2, s8, s16, s32"),
        ("isnan(width)", "isnan() takes a floating-point value; load has only integers"),
        ("popcount(1, 2)", "')' behind the argument of popcount() is missing"),
        ("popcount", "load has no 'popcount'"),
        ("1.5 < 2", "1.5 is a floating-point number"),
        ("1e3", "1e3 is a floating-point number"),
        ("1x", "'1x' is not a number"),
        ("09", "09 is not an octal number"),
        ("18446744073709551616", "has more than 64 bits"),
        ("width / 0", "/ 0 divides by zero"),
        ("width % 0x0", "% 0 divides by zero"),
        ('"text"', "unexpected '\"' at the beginning"),
        ("'a'", 'unexpected "\'" at the beginning'),
        ("1 */ 2", "unexpected '/' after '1 *'"),
        ("/* 1 */", "unexpected '/' at the beginning"),
        ("1; return 0", "unexpected ';' after '1'"),
        ("width\\\n", "unexpected '\\\\' after 'width'"),
        ("#define x", "unexpected '#' at the beginning"),
        ("größe", "unexpected 'ö' after 'gr'"),
        ("lane\0", "unexpected '\\x00' after 'lane'"),
        ("(" * 100 + "1" + ")" * 100, f"nested more than {DEEPEST} levels deep"),
        ("-" * 100 + "1", f"nested more than {DEEPEST} levels deep"),
        ("1" + " + 1" * 100, f"more than {DEEPEST} operations in a row"),
        ("popcount(" * 100, f"nested more than {DEEPEST} levels deep"),
        ("1 ? " * 100, f"nested more than {DEEPEST} levels deep"),
        ("1 + " * LONGEST, f"it may have {LONGEST:,}"),
    ],
)
def test_every_mistake_is_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as found:
        parse(text, NAMES)
    assert message in str(found.value) and "\n" not in str(found.value) and len(str(found.value)) < 300


def test_lists_have_names_of_texts_in_them() -> None:
    found = parse_list("source, lane + 1, kernel", NAMES, NAMES.texts)
    assert found[0] == "source" and found[2] == "kernel" and evaluate(found[1], VALUES) == 32
    with pytest.raises(UsageError, match="source is a text"):
        parse_list("source + 1", NAMES, NAMES.texts)
    assert list(names_of(parse("lane ? popcount(width) : -address", NAMES))) == ["lane", "width", "address"]


def expression(random: random.Random, depth: int) -> str:
    """A random expression, with brackets only here and there."""
    if depth == 0 or random.random() < 0.15:
        numbers = (
            "0",
            "1",
            "3",
            "63",
            "64",
            "0x8000000000000000",
            "0xffffffffffffffff",
            "9223372036854775807",
        )
        return random.choice((*VALUES, *VALUES, *numbers))
    parts = [expression(random, depth - 1) for _ in range(3)]
    made = random.choice(
        [
            *(f"{parts[0]} {operator} {parts[1]}" for operator in PRECEDENCE if operator not in "/%"),
            *(f"{parts[0]} {operator} ({parts[1]} + 0)" for operator in "/%"),  # not by a literal 0
            f"({parts[0]} ? {parts[1]} : {parts[2]})",
            *(
                f"{operator}({parts[0]})"
                for operator in ("-", "~", "!", "popcount", "log2", "s8", "s16", "s32")
            ),
        ]
    )
    return f"({made})" if random.random() < 0.5 else made


def test_the_c_text_computes_what_python_does(tmp_path) -> None:
    """Two hundred random expressions, compiled by this machine's C compiler."""
    numbers = random.Random(20)
    texts = [expression(numbers, 5) for _ in range(200)]
    names = {name: f"v[{number}]" for number, name in enumerate(VALUES)}
    nodes = []
    for text in texts:
        try:
            nodes.append(parse(text, NAMES))
        except UsageError as error:
            assert "in a row" in str(error)
    assert len(nodes) > 150
    written = [c_text(node, names) for node in nodes]
    inputs = [list(VALUES.values()), [0, 0, 0, 0], [MASK] * 4, [numbers.getrandbits(64) for _ in VALUES]]
    source = [
        "#include <stdio.h>\ntypedef unsigned long long u64; typedef long long s64;"
        "typedef signed char s8; typedef short s16; typedef int s32;",
        "static u64 gpu_popcount(u64 v) { return __builtin_popcountll(v); }",
        "static u64 gpu_log2(u64 v) { return v ? 63 - __builtin_clzll(v) : 0; }",
        ARITHMETIC,
        *(f"static u64 f{n}(const u64 *v) {{ return {text}; }}" for n, text in enumerate(written)),
        "int main(void) {",
        f"u64 inputs[][4] = {{{','.join('{' + ','.join(f'{n}ull' for n in some) + '}' for some in inputs)}}};",
        *(
            f'printf("%llu\\n", f{n}(inputs[{which}]));'
            for n in range(len(nodes))
            for which in range(len(inputs))
        ),
        "}",
    ]
    (tmp_path / "all.c").write_text("\n".join(source))
    subprocess.run(["cc", "-w", "-O1", "-o", tmp_path / "all", tmp_path / "all.c"], check=True)
    said = subprocess.run([tmp_path / "all"], capture_output=True, text=True, check=True).stdout.split()
    wanted = [evaluate(node, dict(zip(VALUES, some, strict=True))) for node in nodes for some in inputs]
    assert [int(one) for one in said] == wanted


def test_only_names_numbers_and_operators_reach_the_compiler() -> None:
    """Whatever bytes a user types: either they are refused, or the C text is made of known words."""
    numbers = random.Random(7)
    alphabet = [
        *"0123456789abxulL .,;:?!~()[]{}<>=+-*/%&|^\"'\\#@`$\n\t\0é",
        "lane",
        "width",
        "/*",
        "*/",
        "//",
        "asm",
    ]
    known = re.compile(r"(?:\d+ull|u64|s64|NAME|gpu_\w+|[-+*/%&|^~!<>=?:(), ])+")
    taken = 0
    for _ in range(3000):
        text = "".join(numbers.choice(alphabet) for _ in range(numbers.randrange(1, 9)))
        try:
            node = parse(text, NAMES)
        except UsageError as error:
            assert "\n" not in str(error) and "\0" not in str(error)
            continue
        taken += 1
        made = c_text(node, dict.fromkeys(VALUES, "NAME"))
        assert known.fullmatch(made) and "/*" not in made and "//" not in made
    assert taken > 50


@pytest.mark.parametrize("point", points.POINTS.values(), ids=lambda point: point.name)
def test_every_name_of_a_point_has_its_c_text(point) -> None:
    for attachment in point.details.values():
        names = point.names(attachment)
        if not point.of_launch:
            known = {*names.fields, *names.builtins, *names.constants, *names.values}
            attached = attachment.with_values() if point.needs_values(known) else attachment
            assert known <= points.c_names(attached).keys() | {"launch"}
            assert "NULL" not in str(points.c_names(attached))


def test_every_point_is_in_the_documentation_and_the_man_pages() -> None:
    page = (ROOT / "docs/expressions.md").read_text().partition("| point |")[2].partition("\n\n")[0]
    table = {name for row in page.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert table == set(points.POINTS)
    listed = (ROOT / "man/fragments/specs.roff").read_text().partition(".PP\nAt ")[0]
    heads = [line for line in listed.splitlines() if line.startswith((".B ", ".BR "))]
    assert set(points.POINTS) <= {name for line in heads for name in re.findall(r"\w+", line)}

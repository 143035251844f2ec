"""What a command line asks for: specifications, filters, types, keys and formats."""

from __future__ import annotations

import math

import pytest

from gpubpf.errors import UsageError
from gpubpf.expressions import specs
from gpubpf.expressions.formats import Format
from gpubpf.show.parsed import LookOptions


def test_points_kernels_and_details() -> None:
    plain = specs.count("store:scale:global")
    assert (plain.point.name, plain.kernel, plain.text) == ("store", "scale", "store:scale:global")
    assert plain.attachment.arguments == {"kinds": ("store",), "spaces": ("global",)}
    named = specs.count("  func:ns::outer*:ns::inner  (lane\n == 0)  ")
    assert (named.kernel, named.attachment.arguments) == ("ns::outer*", {"function": "ns::inner"})
    assert named.text == "func:ns::outer*:ns::inner (lane == 0)" and named.filter is not None
    for name in ("twice(int)", "ns::f::operator()", "k::{lambda(int)#1}", "twice(int,*)"):
        assert specs.count(f"func:*:{name} (lane)").attachment.arguments == {"function": name}
    odd = specs.count("exit:(anonymous namespace)::k (lane)")
    assert odd.kernel == "(anonymous namespace)::k" and odd.filter is not None


@pytest.mark.parametrize(
    ("detail", "kinds", "spaces"),
    [
        ("atom.global", ("atomic",), ("global",)),
        ("ld.shared", ("load",), ("shared",)),
        ("st", ("store",), ("global", "shared", "local", "const")),
        ("async.shared", ("async",), ("shared",)),
        ("local", ("load", "store", "atomic", "async"), ("local",)),
    ],
)
def test_details_of_accesses(detail: str, kinds: tuple, spaces: tuple) -> None:
    found = specs.count(f"access:*:{detail}").attachment
    assert found.arguments == {"kinds": kinds, "spaces": spaces}


def test_a_field_may_depend_on_the_detail() -> None:
    assert specs.count("exit:*:stores (work > 3)").attachment.arguments == {"accumulate": "stores"}
    assert specs.count("barrier:*:leave (waited > 3)").attachment.context == "barrier_leave"
    for text in ("exit:* (work > 3)", "barrier:* (waited > 3)"):
        with pytest.raises(UsageError, match=r"has 'w.* only with a DETAIL: "):
            specs.count(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("foo:*", "there is no point 'foo'; use one of: kernel, entry, exit,"),
        ("load:", "'load:' is not POINT:KERNEL"),
        ("load:a:global:b", "is not POINT:KERNEL"),
        ("load:*:globl", "load has no detail 'globl'; use one of: global, shared, local, const"),
        ("entry:*:x", "entry has no detail 'x'; leave it out"),
        ("access:*:atom.globl", "atomic, async, ld, st, atom, cp, or both, such as load.global"),
        ("load:ns::fill<int, 3>", "KERNEL has no template arguments; write 'ns::fill' for all of them, or"),
        ("load:fill<int>:shared", "KERNEL has no template arguments; write 'fill' for all of them, or"),
        ("load:* lane == 0", "'* lane == 0' has a space in it; put a FILTER in brackets"),
        ("load:* (lane", "the filter has no closing bracket"),
        ("load:* (lane) more", "unexpected 'more' behind the filter"),
        ("load:* ()", "in an empty expression"),
        ("kernel:* (lane == 0)", "kernel has no 'lane'; builtins: launch, pid,"),
        ('load:* "%u"', "unexpected '\"%u\"' behind the filter"),
    ],
)
def test_what_gpucount_refuses(text: str, message: str) -> None:
    with pytest.raises(UsageError) as found:
        specs.count(text)
    assert message in str(found.value) and "\n" not in str(found.value)


def test_distributions() -> None:
    one = specs.distribution("load:spmv:u64:address % 128")
    assert (one.spec.kernel, one.type, one.key, one.label) == (
        "spmv",
        "u64",
        "",
        "load:spmv:u64:address % 128",
    )
    keyed = specs.distribution("load:ns::k:global (lane ? 1 : 0) : s32 : width ? 1 : 2, source #two words")
    assert (keyed.spec.kernel, keyed.type, keyed.key, keyed.label) == ("ns::k", "s32", "source", "two words")
    assert keyed.signed and keyed.spec.filter is not None
    assert specs.distribution("kernel:*:u64:threads, kernel").key == "kernel"
    made = specs.distribution("exit:foo::{lambda()#1}:u64:thread # label")
    assert (made.spec.kernel, made.label) == ("foo::{lambda()#1}", "label")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("load:*", "there is no TYPE:EXPR; write SPEC:TYPE:EXPR"),
        ("load:*:u32", "there is no TYPE:EXPR; write SPEC:TYPE:EXPR"),
        ("load:*:f32:width", "there is no TYPE:EXPR; write SPEC:TYPE:EXPR"),
        ("load:* (lane) more:u32:width", "unexpected 'more:u32:width' behind the filter"),
        ("load:*:u32:", "in an empty expression"),
        ("load:*:u32:source", "use it as a key: EXPR, source"),
        ("load:*:u32:width, lane", "one key after a comma: kernel or source"),
        ("load:*:u32:width, kernel, source", "one key after a comma"),
        ("kernel:*:u32:threads, source", "kernel has no 'source'"),
    ],
)
def test_what_gpudist_refuses(text: str, message: str) -> None:
    with pytest.raises(UsageError) as found:
        specs.distribution(text)
    assert message in str(found.value) and "\n" not in str(found.value)


def test_traces() -> None:
    one = specs.trace('exit:vectorAdd (lane == 31) "%u %lu", block, globaltimer')
    assert len(one.numbers) == 2 and one.spec.text == "exit:vectorAdd (lane == 31)"
    text = specs.trace('store:soft* "at %s (%%), \\"thread\\" %-5d|\\t%#x", source, gthread, address')
    assert text.arguments[0] == "source" and len(text.numbers) == 2
    assert text.format.show(["a.cu:3", 7, 255]) == 'at a.cu:3 (%), "thread" 7    |\t0xff'
    assert specs.trace("entry:*").format.show([]) == ""
    assert specs.trace('entry:* "a\\nb\\n"').format.show([]) == "a\nb"


@pytest.mark.parametrize(
    ("form", "values", "text", "json"),
    [
        ("%d %u", [2**64 - 1, 2**64 - 1], "-1 18446744073709551615", [-1, 2**64 - 1]),
        ("%05d|%-4lu|%3hhi", [42, 7, 9], "00042|7   |  9", [42, 7, 9]),
        ("%x %X %o %#llx", [255, 255, 8, 16], "ff FF 10 0x10", [255, 255, 8, 16]),
        ("%p", [4096], "0x1000", ["0x1000"]),
        ("%8.3s|", ["a\x1bbcd"], "     a\\x|", ["a\x1bbcd"]),
        ("%+d % d %c", [3, 4, 65], "+3  4 A", [3, 4, 65]),
        (
            "%f %.2lf %e %g",
            [1.5, -0.125, 300.0, 0.5],
            "1.500000 -0.12 3.000000e+02 0.5",
            [1.5, -0.125, 300.0, 0.5],
        ),
        ("%+.1f|%-6g|%#.0f|%07.2f", [2.0, 2.0, 2.0, -1.5], "+2.0|2     |2.|-001.50", [2.0, 2.0, 2.0, -1.5]),
        (
            "%06f|%e|%+g|%5f",
            [math.inf, -math.inf, math.inf, math.nan],
            "   inf|-inf|+inf|  nan",
            ["inf", "-inf", "inf", "nan"],
        ),
    ],
)
def test_conversions(form: str, values: list, text: str, json: list) -> None:
    found, rest = Format.read(f'"{form}" rest')
    assert rest == " rest" and found.show(values) == text and found.json(values) == json


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('entry:* "%u"', "FORMAT needs 1 EXPR, not 0;"),
        ('entry:* "' + "%u" * 33 + '"' + ", lane" * 33, "33 EXPRs follow the FORMAT; there may be 32"),
        ('entry:* "%u", lane, warp', "FORMAT needs 1 EXPR, not 2;"),
        ('entry:* "%s", lane', "%s does not fit EXPR 1, which is a number"),
        ('entry:* "%u", kernel', "%u does not fit EXPR 1, which is the text kernel; use %s"),
        (
            'entry:* "%f", lane',
            "%f shows a floating-point number, and EXPR 1 is an integer; use %u, %d or %x",
        ),
        (
            'store:* "%u %.3e", lane, value + 1',
            "%.3e shows a floating-point number, and EXPR 2 is an integer",
        ),
        ('store:* "%g", (isnan(value))', "%g shows a floating-point number"),
        ('store:* "%g", source', "%g does not fit EXPR 1, which is the text source; use %s"),
        (
            'store:* "%a", value',
            "FORMAT has no conversion '%a'; use one of: %d %i %u %x %X %o %p %c %s %f %e %g %%",
        ),
        ('entry:* "%n", lane', "FORMAT has no conversion '%n'"),
        ('entry:* "%"', "FORMAT has no conversion '%'"),
        ('entry:* "%*d", lane', "FORMAT has no conversion '%*'"),
        ('entry:* "%99999d", lane', "is too wide"),
        ('entry:* "%+u", lane', "the flags + and space belong to %d"),
        ('entry:* "%#o", lane', "# to %x"),
        ('entry:* "\\q"', "FORMAT has no escape \\q"),
        ('entry:* "open', "FORMAT has no closing double quote"),
        ('entry:* "%u" lane', "put a comma before each EXPR"),
        ('entry:* "%u", lane,', "is missing after 'lane,'"),
        ("entry:* (lane) lane", "a FORMAT begins with a double quote"),
        ("entry:*(lane == 0)", "'*(lane == 0)': write a space before (FILTER)"),
        ("float:*:(div)", "'(div)': write a space before (FILTER)"),
        ("func:*:*twice*(lane == 0)", "'*twice*(lane == 0)': write a space before (FILTER)"),
        ("exit:* (work)", "exit has 'work' only with a DETAIL: instructions, loads, stores,"),
    ],
)
def test_what_gputrace_refuses(text: str, message: str) -> None:
    with pytest.raises(UsageError) as found:
        specs.trace(text)
    assert message in str(found.value) and "\n" not in str(found.value)


def chosen(*texts: str, wanted: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    return specs.choose_kernels(wanted, map(specs.count, texts))


def test_kernels_of_the_command_line() -> None:
    of_each = chosen("entry:a*", "exit:b", "exit:a*")
    assert of_each == [("a*",), ("b",), ("a*",)] and specs.union(of_each) == ["a*", "b"]
    of_each = chosen("entry:a*", "exit:*")
    assert of_each == [("a*",), ()] and specs.union(of_each) == []
    of_each = chosen("entry:*", wanted=("x", "y"))
    assert of_each == [("x", "y")] and specs.union(of_each) == ["x", "y"]
    assert specs.union([]) == []
    with pytest.raises(UsageError, match="exclude each other"):
        chosen("entry:a", wanted=("x",))


def read(*texts: str) -> list[specs.Spec]:
    return specs.read(texts, LookOptions(), specs.count)


def test_a_message_names_the_specification() -> None:
    with pytest.raises(UsageError, match=r"^'load:x \(y\)': load has no 'y'"):
        read("entry:*", "load:x\n(y)")
    with pytest.raises(UsageError, match="no SPEC is given; write POINT:KERNEL"):
        read()
    with pytest.raises(UsageError, match="33 SPECs are given; a run takes at most 32"):
        read(*["entry:*"] * 33)

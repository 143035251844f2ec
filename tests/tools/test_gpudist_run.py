"""gpudist from its command line to its exit status, on a program with known answers (tests/support/gpubpf_specs.py)."""

import csv
import json
import subprocess
import sys

import pytest

import gpubpf_specs
from gpubpf_specs import line_of

pytestmark = gpubpf_specs.needs_all

SOURCES = {
    line_of("shared[own] = all"): {"8": 576},
    line_of("out[all] = value"): {"4": 576},
    line_of("out[all] = own"): {"4": 192},
}


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    return gpubpf_specs.build(tmp_path_factory.mktemp("app"))


def measured(out, app, kind, *arguments):
    """Return the records of two launches of ns::work by label and key; buckets and values as dictionaries."""
    found = gpubpf_specs.measured("gpudist", out, app, kind, *arguments)
    records = {}
    for one in found:
        if one["type"] == "dist":
            shown = one.get("values") or {(low, high): count for low, high, count in one["buckets"]}
            assert sum(shown.values()) == one["count"]
            records[one["label"], one["key"]] = (shown, one["sum"])
    return records


def times(number, values):
    return {value: number * count for value, count in values.items()}


@pytest.mark.every(2)
def test_how_often_each_value_occurs(app, tmp_path):
    found = measured(
        *(tmp_path / "out", app, "-C"),
        "load:ns::work:global:u32:width#widths",
        "store:ns::work:u64:width, source #by source",
        "access:*:u8:kind, kernel#kinds",
        "barrier:*:u32:popcount(active)#barriers",
        "kernel:*:u64:threads, kernel#launches",
        "exit:ns::work:loads:u32:work#loads",
        "entry:ns::work (lane < 2):s32:0 - lane * 3#negative",
        "entry:ns::work (gthread == 300):s16:0xffff + 0 * lane#cast",
    )
    assert found["widths", None] == (times(2 * 6, {"4": 88}), 2 * 6 * 88 * 4)
    assert {key: found.pop(("by source", key))[0] for key in SOURCES} == {
        key: times(2, values) for key, values in SOURCES.items()
    }
    kinds = {"0": 576 + 6 * 88, "1": 576 + 6 * 128, "2": 18}
    assert found["kinds", "ns::work"][0] == times(2, kinds) and found["kinds", "ns::rest"] == ({"1": 64}, 64)
    assert found["barriers", None] == ({"32": 36}, 36 * 32)
    assert found["launches", "ns::work"] == ({"576": 2}, 1152) and found["launches", "ns::rest"] == (
        {"64": 1},
        64,
    )
    assert found["loads", None] == (times(2 * 6, {"1": 8, "2": 88}), 2 * 6 * 184)
    assert found["negative", None] == ({"-3": 36, "0": 36}, -108)
    assert found["cast", None] == ({"-1": 2}, -2)


@pytest.mark.parametrize("kind", ["-H", "-C"])
def test_sums_of_more_than_64_bits(app, tmp_path, kind):
    """2 launches of ns::work with 576 threads; lanes 0 to 31 are each in 36 warps."""
    found = measured(
        *(tmp_path / "out", app, kind),
        "entry:ns::work:u64:~0 - lane#unsigned",
        "entry:ns::work:s64:~0 - lane#negative",
        "entry:ns::work:s64:(lane % 2 ? ~0u / 2 : 0 - ~0u / 2 - 1) - 0 * lane#large",
    )
    assert found["unsigned", None][1] == 36 * sum(2**64 - 1 - lane for lane in range(32))
    assert found["negative", None][1] == 36 * sum(-1 - lane for lane in range(32))
    assert found["large", None][1] == 36 * 16 * (2**63 - 1 - 2**63)


def test_powers_of_two(app, tmp_path):
    found = measured(
        *(tmp_path / "out", app, "-H"),
        "entry:ns::work:u64:gthread#threads",
        "entry:ns::work:s16:0 - gthread#negative",
        "barrier:ns::work:leave (warp == 1):u32:block#blocks",
        "kernel:*:u32:threads#launches",
        *(f"{spec}:u64:address#never" for spec in gpubpf_specs.NEVER),
    )
    assert ("never", None) not in found
    slots = {(0, 1): 2} | {(1 << n, (2 << n) - 1): 1 << n for n in range(1, 9)} | {(512, 1023): 64}
    assert found["threads", None] == (times(2, slots), 576 * 575)
    assert found["negative", None] == ({(0, 1): 2, (-32768, -1): 2 * 575}, -576 * 575)
    assert found["blocks", None] == (times(2, {(0, 1): 2, (2, 3): 2, (4, 7): 2}), 30)
    assert found["launches", None] == ({(64, 127): 1, (512, 1023): 2}, 1216)


def test_equal_widths_of_chosen_threads(app, tmp_path):
    found = measured(
        *(tmp_path / "out", app, "-L", "--width", "100", "--block", "*,1", "--kernel", "ns::w*"),
        "entry:*:u64:gthread#threads",
        "entry:*:s32:gthread - 350#negative",
        "entry:*:u8:gthread, source#bytes",
    )
    # Blocks of the second row have the threads 288 to 575.
    threads = {(200, 299): 12, (300, 399): 100, (400, 499): 100, (500, 599): 76}
    assert found["threads", None] == (times(2, threads), 2 * sum(range(288, 576)))
    negative = {(-100, -1): 62, (0, 99): 100, (100, 199): 100, (200, 299): 26}
    assert found["negative", None][0] == times(2, negative)
    (key,) = (key for label, key in found if label == "bytes")
    # Modulo 256: 32 to 255, then 0 to 63.
    assert key.startswith("app.cu:")
    assert found["bytes", key][0] == times(2, {(0, 99): 68 + 64, (100, 199): 100, (200, 299): 56})


def test_text_and_csv(app, tmp_path):
    done = gpubpf_specs.run("gpudist", "-C", "load:ns::work:shared:u32:width, kernel", "--", app, "1", "0")
    lines = done.stdout.splitlines()
    assert done.returncode == 7 and lines[2] == "load:ns::work:shared:u32:width, kernel"
    assert lines[3] == "  kernel: ns::work" and "576 values, mean 8.0" in lines[4]
    assert lines[7].split() == ["8", ":", "576", "|****************************************|"]
    out = tmp_path / "out.csv"
    label = "entry:ns::work:u64:gthread#a, b"
    gpubpf_specs.run("gpudist", "-L", "--width", "500", label, "--csv", "-o", out, "--", app, "1", "0")
    assert [(one["label"], one["low"], one["high"], one["count"]) for one in csv.DictReader(out.open())] == [
        ("a, b", "0", "499", "500"),
        ("a, b", "500", "999", "76"),
    ]


def test_several_kinds_of_distributions(app, tmp_path):
    """As bcc's argdist: each SPEC has the kind of the option before it, and each option may come again."""
    out = tmp_path / "out"
    specs = [f"entry:ns::work:u32:gthread#{label}" for label in "abcd"]
    options = ["-H", *specs[:2], "-C", specs[2], "-L", specs[3], "--width", "500"]
    gpubpf_specs.run("gpudist", *options, "--json", "-o", out, "--", app, "1", "0")
    found = {one["label"]: one for one in map(json.loads, out.open()) if one["type"] == "dist"}
    assert {label: one["kind"] for label, one in found.items()} == {
        "a": "log2", "b": "log2", "c": "values", "d": "linear"
    }  # fmt: skip
    assert found["a"]["buckets"] == found["b"]["buckets"] and found["a"]["buckets"][-1] == [512, 1023, 64]
    assert found["c"]["values"] == {str(value): 1 for value in range(576)}
    assert found["d"]["buckets"] == [[0, 499, 500], [500, 999, 76]]


def test_values_beyond_the_room_are_said_to_be_missing(app, tmp_path):
    """A table with 16 slots; each block of 96 threads has other values, in one launch of 6 blocks."""
    tool = (gpubpf_specs.ROOT / "tools/gpudist.py").read_text()
    small = tmp_path / "gpudist.py"
    library = f"sys.path.insert(0, {str(gpubpf_specs.ROOT / 'lib')!r})\n"
    small.write_text(
        tool.replace("ENTRIES = 65536", "ENTRIES = 8").replace(
            "from gpubpf.show", f"{library}from gpubpf.show", 1
        )
    )
    command = [sys.executable, small, "-C", "entry:ns::work:u32:gthread", "--device", "sim"]
    for options in (["--json"], []):
        done = subprocess.run(
            [*command, *options, "--", app, "1", "0"], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 7, done.stderr
        if options:
            found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            (dist,) = (one for one in found if one["type"] == "dist")
            assert (dist["count"], sum(dist["values"].values()), dist["missing"]) == (576, 16, 560)
            assert found[-1]["lost"] == 560
        else:
            assert "560 values missing: no room in the table" in done.stdout
            assert "lost: 560 (a map was full" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["load:*:u64:width"], "choose a distribution: -H (powers of two), -L (equal widths) or -C"),
        (["-H", "-C", "load:*:u64:width"], "put each SPEC behind its own: -H SPEC... -C SPEC..."),
        (["-C", "load:*:u64:width", "-H", "--json", "load:*:u64:lane"], "put each SPEC behind its own"),
        (["-H", "--width", "3", "load:*:u64:width"], "--width is the width of the buckets of -L"),
        (["-L", "--width", str(1 << 63), "load:*:u64:width"], "--width must be below 2^63"),
        (["-L", "--width", "0", "load:*:u64:width"], "--width"),
        (["-H", "load:*:width"], "there is no TYPE:EXPR; write SPEC:TYPE:EXPR, with TYPE one of: u8,"),
        (["-H", "load:*:u64:width, lane"], "EXPR may have one key after a comma: kernel or source"),
        (["-H", "load:*:u64:wid"], "load has no 'wid'; fields: launch, site, address, width"),
        (["-H", "load:*:u64:1; }"], "unexpected ';' after '1'"),
        (["-H", "load:*:u64:(width"], "')' is missing after '(width'"),
        (["-H"], "no SPEC is given"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, message):
    done = gpubpf_specs.run("gpudist", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("gpudist: ") and message in done.stderr

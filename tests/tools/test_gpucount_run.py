"""gpucount from its command line to its exit status, on a program with known answers (tests/support/gpubpf_specs.py)."""

import csv
import json
import subprocess
import sys

import pytest

import gpubpf_specs
from gpubpf.kernel import privileges

pytestmark = gpubpf_specs.needs_all

# Of a launch of ns::work: 6 blocks of 3 warps. SPEC, executions by warps, lanes.
ANSWERS = [
    ("entry:*", 18, 576),
    ("exit:*", 36, 576),  # lane 5 takes another way out than the others, in each warp
    ("block_begin:*", 6, 6),
    ("block_end:*", 6, 6),
    ("barrier:*", 18, 576),
    ("barrier:*:leave (waited >= 0)", 18, 576),
    # Warp 1 parts at the first load and at the call, and lane 5 of each warp goes its own way.
    ("branch:* (taken && taken != active)", 6 * (1 + 1 + 3), 6 * 5 * 32),
    ("branch:* (popcount(taken) + popcount(active & ~taken) != popcount(active))", 0, 0),
    ("bb:* (popcount(active) == 1 && lane == 5)", 36, 36),  # that of the atomic, and its return
    ("load:ns::*:global (lane < 32 && width == 4 && gthread >= 0)", 6 * (2 + 2), 6 * (40 + 48)),
    ("load:ns::*:shared", 18, 576),
    ("store:ns::work:shared", 18, 576),
    ("store:ns::work:global", 6 * 4, 6 * 128),
    ("store:ns::work:global (warp == 2)", 12, 6 * 64),
    ("store:ns::work:global (block.x == 1 && block.y == 1)", 4, 128),
    ("store:ns::work:global (thread.y == 1)", 6 * 3, 6 * 80),
    ("store:ns::work:global (block == 5 && thread % 32 >= 30)", 4, 8),
    ("access:*:ld", 18 + 6 * 4, 576 + 6 * 88),
    ("access:*:atom.global (popcount(active) == 1 && lane == 5)", 18, 18),
    ("access:ns::work (space == GPU_SHARED && kind == GPU_STORE)", 18, 576),
    ("exit:ns::work:stores (work == 3)", 12, 192),
    ("exit:ns::work:loads (work / 2 == 1)", 6 * 6, 6 * (96 - 8)),
    ("func:*:ns::twice", 12, 6 * 48),
    ("funcret:*:*twice* (grid * block_dim == 576 && grid.x == 3 && block_dim.y == 2)", 12, 6 * 48),
    ("entry:ns::work (gthread == block * 96 + thread && (lane == 31 ? warp : 9) == 1)", 6, 6),
    ("entry:ns::work (launch > 0 && pid > 1 && smid < 1000 && clock >= 0 && globaltimer > 0)", 18, 576),
]


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    return gpubpf_specs.build(tmp_path_factory.mktemp("app"))


@pytest.mark.every(4)
def test_every_point_counts_what_is_known(app, tmp_path):
    specs = [spec for spec, _, _ in ANSWERS]
    found = gpubpf_specs.measured("gpucount", tmp_path / "out", app, *specs, *gpubpf_specs.NEVER)
    assert not any(one["count"] for one in found if one.get("spec") in gpubpf_specs.NEVER)
    assert found[-1]["verified_by"] == (["gpubpf", "kernel"] if privileges.capable() else ["gpubpf"])
    counts = {
        (one["spec"], one["kernel"]): (one["count"], one["threads"])
        for one in found
        if one["type"] == "count"
    }
    assert {spec: counts[spec, "ns::work"] for spec in specs} == {
        spec: (2 * warps, 2 * lanes) for spec, warps, lanes in ANSWERS
    }
    assert counts["entry:*", "ns::rest"] == (2, 64) and counts["access:*:ld", "ns::rest"] == (0, 0)
    one = next(one for one in found if one["type"] == "count")
    assert set(one) == {
        *("type", "pid", "comm", "gpu", "vendor", "wave", "spec", "kernel", "mangled", "count", "threads")
    }
    assert (one["comm"], one["wave"], one["mangled"][:2]) == ("app", 32, "_Z")


def test_launches_and_their_filters(app, tmp_path):
    specs = {
        "kernel:*": {"ns::work": (3, 3 * 576), "ns::rest": (1, 64)},
        "kernel:ns::w*": {"ns::work": (3, 3 * 576)},
        "kernel:* (threads < 100 && grid.x == 2)": {"ns::rest": (1, 64)},
        "kernel:* (shared == 16 && block_dim.y == 2 && grid == 6)": {"ns::work": (3, 3 * 576)},
    }
    found = gpubpf_specs.measured("gpucount", tmp_path / "out", app, *specs, launches=3)
    counts: dict = {}
    for one in found:
        if one["type"] == "count":
            counts.setdefault(one["spec"], {})[one["kernel"]] = (one["count"], one["threads"])
    assert counts == specs


def test_options_leave_launches_and_threads_out(app, tmp_path):
    options = ("--launch", "2", "--block", "1", "--thread", "0:7", "--kernel", "ns::work")
    found = gpubpf_specs.measured(
        "gpucount", tmp_path / "out", app, "entry:*", "store:*:global (lane % 2)", "kernel:*", *options
    )
    counts = {one["spec"]: (one["count"], one["threads"]) for one in found if one["type"] == "count"}
    # Two blocks have block index x 1; in each, threads 0 to 7 of the rows y 0 and y 1: the latter are lanes 16 to 23 of warp 1.
    assert counts == {"entry:*": (4, 32), "store:*:global (lane % 2)": (4, 16), "kernel:*": (1, 576)}
    assert found[-1]["not_instrumented"] == {"filtered": 1}


def test_text_and_csv(app, tmp_path):
    done = gpubpf_specs.run("gpucount", "kernel:*", "store:ns::work:global", "--", app, "2", "0")
    assert (done.returncode, done.stdout.splitlines()[:2]) == (7, ["launched", "right"])
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["kernel:*", "ns::work", "2", "1,152"] in rows and ["kernel:*", "ns::rest", "1", "64"] in rows
    assert ["store:ns::work:global", "ns::work", "48", "1,536"] in rows
    assert not [row for row in rows if row[:2] == ["store:ns::work:global", "ns::rest"]]
    out = tmp_path / "out.csv"
    gpubpf_specs.run(
        "gpucount", "--csv", "-o", out, "entry:* (lane, 1)".replace(", 1", ""), "--", app, "1", "0"
    )
    table = list(csv.DictReader(out.open()))
    assert all(one["mangled"].startswith("_Z") for one in table)
    assert {(one["spec"], one["kernel"], one["count"], one["threads"]) for one in table} == {
        ("entry:* (lane)", "ns::work", "18", "558"),
        ("entry:* (lane)", "ns::rest", "2", "62"),
    }


def test_long_specs_stay_apart(app):
    long = [f"store:ns::work:global (warp == 2 && lane < 32 && block.x < {n})" for n in (5, 6)]
    shown = gpubpf_specs.run("gpucount", *long, "--", app, "1", "0").stdout.splitlines()
    assert f"[1] {long[0]}" in shown and f"[2] {long[1]}" in shown
    assert [line.split() for line in shown if line.startswith("[") and "ns::work  " in line] == [
        ["[1]", "ns::work", "12", "384"],
        ["[2]", "ns::work", "12", "384"],
    ]
    assert max(map(len, shown)) <= 80


SPECS = ("entry:*", "kernel:*")


@pytest.mark.may_come_too_late
def test_intervals_add_up_in_a_running_process(app, tmp_path):
    out = tmp_path / "out"
    gpubpf_specs.run("gpucount", *SPECS, "--", app, "1", "0")  # compiled from here on
    command = [sys.executable, "-m", "cudasim.launcher", "--", app, "1000", "20"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout.readline() == b"launched\n"
        done = gpubpf_specs.run("gpucount", *SPECS, "0.4", "3", "--json", "-o", out, "-p", str(program.pid))
        program.kill()
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in out.read_text().splitlines()]
    counts = [one for one in found if one["type"] == "count"]
    launches = sum(one["count"] for one in counts if one["spec"] == "kernel:*")
    threads = sum(one["threads"] for one in counts if one["spec"] == "entry:*")
    assert len(counts) > 2 and launches >= found[-1]["launches_instrumented"] > 2
    assert threads == 576 * found[-1]["launches_instrumented"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["load:* (lanes)"], "'load:* (lanes)': load has no 'lanes'; fields: launch, site, address,"),
        (["nowhere:*"], "there is no point 'nowhere'; use one of: kernel, entry,"),
        (['load:* (1) */ }; int main() { " \n\\'], "unexpected '*/ }; int main() {"),
        (["load:* (1 */ 2)"], "unexpected '/' after '1 *'"),
        (["load:* (" + "(" * 5000 + ")"], "the filter has no closing bracket"),
        (["load:* (" + "(" * 900 + "1" + ")" * 900 + ")"], "nested more than 64 levels deep"),
        (["load:* (1" + "+1" * 3000 + ")"], "the expression has 6,001 characters; it may have 4,000"),
        (["load:* (1\n;2)"], "unexpected ';' after '1'"),
        (["--kernel", "a", "load:b"], "--kernel and the KERNEL of 'load:b' exclude each other"),
        ([], "no SPEC is given; write POINT:KERNEL"),
        (["load"], "interval must be a positive number of seconds, not 'load'; a SPEC is POINT:KERNEL"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, message):
    done = gpubpf_specs.run("gpucount", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("gpucount: ") and message in done.stderr and len(done.stderr) < 500


@pytest.mark.parametrize(("name", "where"), [("lane", " in warps of 32 lanes"), ("warp - warp", "")])
def test_a_filter_that_is_never_true_is_said(name, where):
    spec = f"load:* ({name} == 40)"
    done = gpubpf_specs.run("gpucount", "--device", "sim", spec, "--", "true")
    assert f"gpucount: note: the filter of '{spec}' is never true{where}\n" in done.stderr

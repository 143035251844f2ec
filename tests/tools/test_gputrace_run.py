"""gputrace from its command line to its exit status, on a program with known answers (tests/support/gpubpf_specs.py)."""

import csv
import json

import pytest

import gpubpf_examples
import gpubpf_specs
from gpubpf_specs import line_of

pytestmark = gpubpf_specs.needs_all


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    return gpubpf_specs.build(tmp_path_factory.mktemp("app"))


@pytest.mark.every(2)
def test_events_at_every_kind_of_point(app, tmp_path):
    one, stores, barrier, launch, atomic = specs = (
        'exit:ns::work (gthread == 100) "thread %u of %u, %s \\"%s\\"", thread, block_dim, kernel, source',
        'store:ns::work:global (warp == 2 && block == 5) "%d %#lx", 0 - lane, width',
        'barrier:ns::* (lane > 4) "%u lanes", popcount(active)',
        'kernel:* (threads < 1000) "%lu by %s", threads, kernel',
        "atomic:*",
    )
    found = gpubpf_specs.measured("gputrace", tmp_path / "out", app, *specs, *gpubpf_specs.NEVER)
    assert not [event for event in found if event.get("spec") in gpubpf_specs.NEVER]
    events = {}
    for event in found:
        if event["type"] == "event":
            events.setdefault(event["spec"], []).append(event)

    def of(spec):
        return events[spec.split(' "')[0]]

    # Thread 100 of the grid is thread (4, 0) of block (1, 0).
    assert [(e["block"], e["thread"], e["args"]) for e in of(one)] == [
        ([1, 0, 0], [4, 0, 0], [4, 96, "ns::work", of(one)[0]["source"]])
    ] * 2
    assert of(one)[0]["text"] == f'thread 4 of 96, ns::work "{of(one)[0]["source"]}"'
    assert len({e["launch"] for e in of(one)}) == 2
    # Warp 2 has the threads 64 to 95, so row 1 from x 16 on, and stores twice.
    assert len(of(stores)) == 2 * 2 * 32 and {tuple(e["block"]) for e in of(stores)} == {(2, 1, 0)}
    assert {(e["thread"][0], e["thread"][1], *e["args"]) for e in of(stores)} == {
        (16 + lane, 1, -lane, 4) for lane in range(32)
    }
    assert {e["source"] for e in of(stores)} == {line_of("out[all] = value"), line_of("out[all] = own")}
    assert {e["text"] for e in of(stores) if e["thread"][0] == 17} == {"-1 0x4"}
    # Once for each warp, for the lowest lane that passes the filter.
    assert len(of(barrier)) == 2 * 18 and {e["text"] for e in of(barrier)} == {"32 lanes"}
    assert {tuple(e["thread"]) for e in of(barrier)} == {(5, 0, 0), (37, 0, 0), (21, 1, 0)}
    assert [(e["text"], e["block"], e["thread"], e["source"]) for e in of(launch)] == [
        ("576 by ns::work", None, None, None),
        ("576 by ns::work", None, None, None),
        ("64 by ns::rest", None, None, None),
    ]
    assert len(of(atomic)) == 36 and {(e["text"], len(e["args"])) for e in of(atomic)} == {("", 0)}
    launches = [event["launch"] for event in found if event["type"] == "event"]
    assert launches == sorted(launches)
    assert (found[-1]["records"], found[-1]["records_lost"]) == (2 + 128 + 36 + 36, {})


@pytest.mark.every(2)
def test_times_and_chosen_threads(app, tmp_path):
    """On the virtual clock, a thread's time is that of its instructions, and of all lanes the same at the entry."""
    specs = ('entry:ns::* "%lu", globaltimer', 'exit:ns::* "%lu", globaltimer')
    options = ("-T", "--block", "0,0", "--thread", "3:5,1", "--kernel", "ns::work")
    runs = [
        gpubpf_specs.measured(
            "gputrace", tmp_path / "out", app, *(s.replace("ns::*", "*") for s in specs), *options
        )
        for _ in range(2)
    ]
    times = [[(e["thread"], e["ts_ns"]) for e in run if e["type"] == "event"] for run in runs]
    assert times[0] == times[1] and len(times[0]) == 2 * 2 * 3
    for event in runs[0]:
        if event["type"] == "event":
            assert event["ts_ns"] == event["args"][0] and event["thread"][1] == 1
    entries = {(e["launch"], e["ts_ns"]) for e in runs[0] if e.get("spec") == "entry:*"}
    assert len(entries) == 2


def test_text_and_csv(app, tmp_path):
    spec = 'store:ns::rest (gthread > 61) "%s\\n%c%%%03u", source, 64, lane'
    done = gpubpf_specs.run("gputrace", spec, "kernel:ns::r*", "--", app, "1", "0")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert done.returncode == 7 and ["LAUNCH", "KERNEL", "BLOCK", "THREAD", "EVENT"] in lines
    source = line_of("out[threadIdx.x] = 1")
    for lane in ("30", "31"):  # an event is one line
        assert ["ns::rest", "1", lane, f"{source}\\n@%0{lane}"] in [line[1:] for line in lines]
    assert ["ns::rest", "-", "-", "kernel:ns::r*"] in [line[1:] for line in lines]
    out = tmp_path / "out.csv"
    gpubpf_specs.run("gputrace", spec, "--csv", "-o", out, "--", app, "1", "0")
    rows = list(csv.DictReader(out.open()))
    assert [(row["block_x"], row["thread_x"], row["source"], row["text"]) for row in rows] == [
        ("1", lane, source, f"{source}\\n@%0{lane}") for lane in ("30", "31")
    ]


def test_lost_events_are_counted_and_said(tmp_path):
    program, out = gpubpf_examples.build("bandwidth") / "bandwidth", tmp_path / "out"
    done = gpubpf_specs.run(
        "gputrace", 'load:* "%u", lane', "--ring-size", "64K", "--json", "-o", out, "--", program, "16384"
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in out.read_text().splitlines()]
    summary = found[-1]
    lost = sum(summary["records_lost"].values())
    # Of 16,384 elements, all kernels but one load two, and one three; a launch of `turned` has a load from shared memory, too.
    assert lost == summary["lost"] > 0 and lost + summary["records"] == 8 * 16384
    assert sum(one["type"] == "event" for one in found) == summary["records"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ('exit:* "%u"', "FORMAT needs 1 EXPR, not 0;"),
        ('exit:* "%s", lane', "%s does not fit EXPR 1, which is a number"),
        ('exit:* "%f", lane', "%f shows a floating-point number"),
        ('exit:* "%n", lane', "FORMAT has no conversion '%n'"),
        ('exit:* (lane = 3) "%u", lane', "unexpected '=' after 'lane'"),
        ('exit:* "x" */ }', "unexpected '*/ }' behind the FORMAT"),
        ('exit:* "open', "FORMAT has no closing double quote"),
        (
            'exit:* "%u", work',
            "exit has 'work' only with a DETAIL: instructions, loads, stores, atomics, barriers, blocks",
        ),
        ('kernel:* "%s", source', "kernel has no 'source'; builtins: launch,"),
        ("exit:* lane", "'* lane' has a space in it; put a FILTER in brackets"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(spec, message):
    done = gpubpf_specs.run("gputrace", spec, "--", "true")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("gputrace: ") and message in done.stderr

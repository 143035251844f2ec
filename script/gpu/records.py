"""The known answers: what a tool's records must be for each example."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from gpu.machine import Records


def of(records: Records, kind: str, kernel: str = "") -> Records:
    return [r for r in records if r["type"] == kind and (not kernel or r["kernel"] == kernel)]


def work(records: Records, kernel: str) -> list[int]:
    """Return the work by linear thread number of the kernel's only launch shape."""
    threads = of(records, "thread", kernel)
    threads.sort(key=lambda r: (*reversed(r["block"]), *reversed(r["thread"])))
    return [r["work"] for r in threads]


def runs(records: Records, kernel: str) -> set[int]:
    return {r["runs"] for r in of(records, "thread", kernel)}


def triangle(records: Records) -> bool:
    return work(records, "triangular") == [t + 1 for t in range(256)] and set(work(records, "balanced")) == {
        257
    }


def lanes(records: Records) -> bool:
    hog = work(records, "laneHog")
    return hog == [800 if t % 32 == 31 else 100 for t in range(128)] and set(work(records, "even")) == {100}


def bins(records: Records) -> bool:
    counts = [len(range(t, 10000, 1024)) + (t % 128 < 64) for t in range(1024)]
    return work(records, "histogram") == counts


def latency(records: Records) -> bool:
    """Return whether counts, waits and their reasons are right, within the clocks' error."""
    launches: dict[str, Records] = {}
    for r in of(records, "launch"):
        launches.setdefault(r["kernel"], []).append(r)
    counts = {"first": 1, "second": 1, "filled": 1, "producer": 1, "consumer": 1, "together": 8, "alone": 3}
    behind = {name: launches[name][0] for name in ("second", "consumer", "filled")}
    return (
        {name: len(launches[name]) for name in counts} == counts
        and waited(behind["second"], "kernel", "first")
        and waited(behind["consumer"], "event", "producer")
        and waited(behind["filled"], "copy", "h2d")
        and all(r["wait_ns"] == 0 for r in launches["alone"])
        and all(
            behind_by(launches[first][0], launches[second][0])
            for first, second in (("first", "second"), ("producer", "consumer"))
        )
    )


def waited(launch: dict, kind: str, name: str) -> bool:
    """Return whether a launch waited for that operation, or did not wait because it had ended in time."""
    what = launch["waited_for"]
    return (what["kind"], what["name"]) == (kind, name) if what else not launch["wait_ns"]


def behind_by(first: dict, second: dict) -> bool:
    """Return whether the wait is the first launch's length except for the overlap, within the clocks' error."""
    error = 2 * (first["clock_error_ns"] + second["clock_error_ns"]) + 1
    whole = second["api_ns"] + second["wait_ns"] + second["overhead_ns"] == second["latency_ns"]
    return whole and abs(second["wait_ns"] - max(0, first["end_ns"] - second["return_ns"])) <= error


def replays(records: Records) -> bool:
    """Return whether each node of each replay ran once, and no two at the same time."""
    steps = sorted(
        (r["graph"]["replay"], r["graph"]["node"], r["start_ns"], r["end_ns"]) for r in of(records, "launch")
    )
    order = [step[:2] for step in steps] == [(replay, node) for replay in range(1, 11) for node in range(3)]
    return order and all(a[3] <= b[2] for a, b in itertools.pairwise(steps))


# The lanes that stay wait while the probe of those that leave runs: late lanes are as much later, at most.
PROBE_NS = 2000


def leaving(records: Records) -> bool:
    """Return whether each lane left as often as it was launched; on a GPU, also whether the right lanes are late, and how late."""
    lanes: dict[str, dict[int, Any]] = {}
    for r in of(records, "lane"):
        lanes.setdefault(r["kernel"], {})[r["lane"]] = r
    names = {"lateLane", "together", "fourths", "slowWarp", "slowBlock"}
    counted = set(lanes) == names and all(r["exits"] == 96 for rows in lanes.values() for r in rows.values())
    if of(records, "summary")[-1]["device"] == "sim":
        return counted  # times mean nothing there
    late = {name: [rows[n]["late_ns"]["p50"] for n in range(32)] for name, rows in lanes.items()}
    spread = {r["kernel"]: r for r in of(records, "kernel")}
    wait = spread["slowWarp"]["block_spread_ns"]["p50"]  # of whole warps: no probe delays another
    on_time = late["lateLane"][:31] + late["together"] + late["slowWarp"] + late["slowBlock"]
    on_time += [ns for lane, ns in enumerate(late["fourths"]) if lane % 4 != 3]
    return (
        counted
        and wait > 1000
        and max(on_time) < 0.02 * wait
        and all(
            0.98 * length <= ns <= length + PROBE_NS
            for length, ns in ((wait, late["lateLane"][31]), (wait / 2, late["fourths"][31]))
        )
        and spread["slowBlock"]["grid_spread_ns"]["p50"] > 0.8 * wait
    )


# examples/memory: kernel → of each site op and space, sectors of a request (mean), pattern, most bank ways.
LOAD, STORE = ("load global", 4, "unit"), ("store global", 4, "unit")
TOUCHES = {
    "stride1": [LOAD, STORE],
    "stride2": [("load global", 8, "stride 2"), STORE],
    "stride8": [("load global", 32, "stride 8"), STORE],
    "stride32": [("load global", 32, "stride 32"), STORE],
    "misaligned": [("load global", 5, "unit"), STORE],
    "broadcast": [("load global", 1, "broadcast"), STORE],
    "readOnly": [LOAD, STORE],
    "wide2": [("load global", 8, "unit"), ("store global", 8, "unit")],
    "wide4": [("load global", 16, "unit"), ("store global", 16, "unit")],
    "halfWarp": [("load global", 2, "unit"), ("store global", 2, "unit")],
    "predicated": [("load global", 2, "unit"), ("store global", 2, "unit")],
    "gather": [LOAD, ("load global", 32, "gather"), STORE],
    "transposeNaive": [LOAD, ("store global", 32, "stride 64")],
    "transposeShared": [LOAD, ("store shared", 4, "unit", 1), ("load shared", 32, "stride 32", 32), STORE],
    "histogramGlobal": [LOAD, ("atomic global", 1, "gather")],
    "generic": [
        LOAD,
        ("store shared", 4, "unit", 1),
        ("store shared", 4, "unit", 1),
        ("load shared", 8, "stride 2", 2),
        STORE,
    ],
    "asynchronous": [
        ("async global", 8, "stride 2"),
        ("async shared", 4, "unit", 1),
        ("load shared", 4, "unit", 1),
        STORE,
    ],
    "localArray": [LOAD, ("store local", 4, "unit"), ("load local", 4, "unit"), STORE],
    "unused": [LOAD, STORE],
}


def touches(records: Records) -> bool:
    """Return whether every site of every kernel of examples/memory is right."""
    for kernel, right in TOUCHES.items():
        found = sorted(of(records, "site", kernel), key=lambda r: r["site"])
        rows = [
            (f"{r['op']} {r['space']}", r["sectors"] / r["requests"], r["pattern"])
            + ((r["bank_ways"]["max"],) if r["bank_ways"] else ())
            for r in found
        ]
        if rows != right:
            return False
    ways = {r["bank_ways"]["max"] for r in of(records, "site", "transposePadded") if r["space"] == "shared"}
    meet = {
        r["kernel"]: r["contention_max"]
        for r in of(records, "site")
        if r["op"] == "atomic" and r["contention_max"] > 1
    }
    return ways == {1} and meet == {"histogramGlobal": 4, "histogramShared": 8}


def bound(records: Records) -> bool:
    """Return whether 8,192 elements are 256 requests at each site of examples/bandwidth."""
    found = {
        kernel: [
            (r["op"], r["pattern"]) for r in sorted(of(records, "site", kernel), key=lambda r: r["site"])
        ]
        for kernel in ("triad", "everyEighth", "shuffled", "bins")
    }
    return found == {
        "triad": [("load", "unit"), ("load", "unit"), ("store", "unit")],
        "everyEighth": [("load", "stride 8"), ("store", "unit")],
        "shuffled": [("load", "unit"), ("load", "gather"), ("store", "unit")],
        "bins": [("load", "unit"), ("atomic", "gather")],
    } and {r["requests"] for r in of(records, "site") if r["kernel"] in found} == {256}


def halves(records: Records) -> bool:
    found = {(r["bytes"], r["read_bytes"], r["written_bytes"]) for r in of(records, "allocation")}
    return found >= {(8192, 4096, 0), (8192, 0, 4096)}


# tool, options, program, the answer: what the records must be.
def callers(records: Records) -> bool:
    """Return whether each launch has the host functions that led to it, and every launch is there."""
    found = {
        (r["kernel"], *(one["name"] for one in r["frames"] if one["name"] in ("step", "forward", "backward", "validate", "run"))):
        r["launches"] for r in of(records, "stack")
    }  # fmt: skip
    return found == {
        ("check", "step", "validate"): 10,
        ("layer", "step", "forward", "run"): 20,
        ("layer", "step", "backward", "run"): 20,
    }


def split(records: Records) -> bool:
    """Return whether every warp of one kernel splits at one branch, half of its lanes each way, and no warp of the other kernel."""
    kernels = {r["kernel"]: r for r in of(records, "kernel")}
    parting = [r for r in of(records, "branch") if r["diverged"]]
    return (
        [(r["kernel"], r["executed"], r["diverged"], r["taken"], r["not_taken"]) for r in parting]
        == [("mixed", 16, 16, 256, 256)]
        and kernels["sorted"]["efficiency"] == 1.0
        and parting[0]["lost"]
        == 32 * kernels["mixed"]["instructions"] - kernels["mixed"]["lane_instructions"]
    )


def late(records: Records) -> bool:
    """Return whether warp 0 is the last at one barrier of one kernel each time, and every warp passes each barrier 16 times."""
    found = of(records, "barrier")
    always = [r["kernel"] for r in found if r["last"][:1] == [{"warp": 0, "count": 16}]]
    return "uneven" in always and {(r["waits"], r["rounds"], r["unknown"]) for r in found} == {(64, 16, 0)}


def stands(records: Records) -> bool:
    """Return whether two warps wait for a flag that is lost, and two others for them at a barrier."""
    hang = of(records, "hang")[-1]
    places = {r["kind"]: (r["warps"], r["address"] is not None) for r in of(records, "place")}
    return (hang["verdict"], hang["exited"], places) == (
        "spinning",
        2,
        {"spin": (2, True), "barrier": (2, False), "exited": (2, False)},
    )


def origin(records: Records) -> bool:
    """Return whether the first infinity and the NaN of the softmax have their places, and the other kernel has neither."""
    found = of(records, "nan")
    (lost,) = (r for r in found if r["kind"] == "nan")
    first, last = found[0]["first"], lost["first"]
    finite = "inf" not in first["operands"] and "nan" not in first["operands"]
    return (
        {r["kernel"] for r in found} == {"naive"}
        and (found[0]["kind"], first["block"], finite) == ("inf", [2, 0, 0], True)
        and (lost["op"], lost["count"], last["operands"]) == ("div.rn.f32", 1, ["inf", "inf"])
        and (last["block"], last["thread"]) == ([2, 0, 0], [17, 0, 0])
    )


ANSWERS: list[tuple[str, str, str, Callable[[Records], bool]]] = [
    ("threadhist", "--work stores", "vectoradd", lambda r: work(r, "vectorAdd") == [4, 4, 4, 4, 3]),
    ("threadhist", "--work stores", "vectoradd 1000003 5",
     lambda r: work(r, "vectorAdd") == [200001] * 3 + [200000] * 2),
    ("threadhist", "", "vectoradd 19 5 1 23", lambda r: runs(r, "vectorAdd") == {23}),
    ("threadhist", "--work stores --top 1", "vectoradd 16000000 256 62500",
     lambda r: of(r, "kernel")[0]["threads"] == of(r, "kernel")[0]["work"] == 16_000_000),
    ("threadhist", "--work stores --thread 3:4", "vectoradd", lambda r: work(r, "vectorAdd") == [4, 3]),
    ("threadhist", "--work stores --block 1", "vectoradd 19 5 2", lambda r: work(r, "vectorAdd") == [2, 2, 2, 2, 1]),
    ("threadhist", "--launch 2:3", "vectoradd 19 5 1 9", lambda r: runs(r, "vectorAdd") == {2}),
    ("threadhist", "--sample 4", "vectoradd 19 5 1 12", lambda r: runs(r, "vectorAdd") == {3}),
    ("threadhist", "--work loads", "imbalance", triangle),
    ("threadhist", "--work loads", "divergence", lanes),
    ("threadhist", "--work loads --kernel columnSums", "tutorial",
     lambda r: work(r, "columnSums") == list(range(1, 513))),
    ("threadhist", "--work loads --kernel columnSumsEven", "tutorial --fixed",
     lambda r: set(work(r, "columnSumsEven")) == {256, 257}),
    ("threadhist", "--work atomics", "histogram", bins),
    ("threadhist", "--work barriers --kernel tree", "reduction", lambda r: set(work(r, "tree")) == {9}),
    ("threadhist", "--work barriers --kernel tiled", "matmul", lambda r: set(work(r, "tiled")) == {8}),
    ("threadhist", "--work stores --kernel straight", "transpose", lambda r: sum(work(r, "straight")) == 3500),
    ("threadhist", "", "streams", lambda r: runs(r, "step") == {20} and runs(r, "gather") == {1}),
    ("threadhist", "", "language", lambda r: all(runs(r, kernel) == {1} for kernel in ("counted", "climb", "make", "called"))),
    ("nansnoop", "", "softmax", origin),
    ("warpdiv", "", "branches", split),
    ("barrierlate", "", "barriers", late),
    ("gpumem", "", "training", lambda r: sum(one["bytes"] for one in of(r, "held") if one["kind"] == "device") == 1024),
    ("gpuprofile", "", "training", callers),
    ("gputop", "", "training", lambda r: of(r, "process")[0]["launches"] == 50 and of(r, "process")[0]["memory_bytes"] == 1024),
    ("gpuhang", "--after 1", "hangs flag 4", stands),
    ("launchlate", "-v", "latency", latency),
    ("launchlate", "-v --graphs --kernel step", "latency 200", replays),
    ("kernelretsnoop", "", "exits", leaving),
    ("threadhist", "", "cooperative", lambda r: runs(r, "relay") == {1} and runs(r, "tiles") == {1}),
    ("memtrace", "", "memory", touches),
    ("memtrace", "", "memory unused", halves),
    ("memtrace", "--no-allocations", "bandwidth 8192", bound),
    ("threadhist", "--work stores", "bandwidth 2000 3",
     lambda r: all(set(work(r, kernel)) == {3} for kernel in ("triad", "everyEighth", "shuffled"))),
    ("threadhist", "--work loads", "memory halfWarp predicated",
     lambda r: all(work(r, kernel) == ([1] * 16 + [0] * 16) * 32 for kernel in ("halfWarp", "predicated"))),
]  # fmt: skip

"""Known answers a second time, with the PTX hidden: every tool with --sass finds with patches what it finds with copies."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
import patched_programs as programs
from gpu.records import ANSWERS
from gpubpf_examples import DEVICE, ROOT, build
from gpubpf_objects import build as build_object
from gpubpf_objects import needs_clang

Records = list[dict[str, Any]]

pytestmark = [
    *gpubpf_cuda.needs_cuda,
    pytest.mark.skipif(
        not (DEVICE / "libsanitizer-public.so").exists(),
        reason="the embedded device is built without Compute Sanitizer",
    ),
]


def run(tool: str, options: list[str], command: list[str], hidden: bool, out: Path, **variables: str) -> str:
    """Run a tool; with --sass if the PTX is hidden. Return what the command printed."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDASIM_SASS"} | variables
    environment |= (
        {"CUDASIM_SASS": "1", "GPUBPF_SANITIZER": str(DEVICE / "libsanitizer-public.so")} if hidden else {}
    )
    words = [
        sys.executable,
        str(ROOT / f"tools/{tool}.py"),
        "--device",
        "sim",
        *(["--sass"] if hidden else []),
    ]
    done = subprocess.run(
        [*words, *options, "--json", "-o", str(out), "--", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "not exact" not in done.stderr or "nested" in command[0], done.stderr
    return done.stdout


def read(out: Path) -> Records:
    return [json.loads(line) for line in out.read_text().splitlines()]


def rows(found: Records, kind: str, *fields: str) -> Counter[str]:
    """Return the records of a type with these fields alone, and how often each is there."""
    return Counter(json.dumps([r.get(name) for name in fields]) for r in found if r["type"] == kind)


SHAPE = ("kernel", "grid", "block_dim")


def added_up(found: Records, kind: str, key: tuple[str, ...], *sums: str) -> dict[str, list[int]]:
    """Return the sums of fields over intervals."""
    result: dict[str, list[int]] = {}
    for r in (r for r in found if r["type"] == kind):
        at = json.dumps([r[name] for name in key])
        before = result.get(at, [0] * len(sums))
        result[at] = [a + r[name] for a, name in zip(before, sums, strict=True)]
    return {at: values for at, values in result.items() if any(values)}


def traffic(found: Records) -> Any:
    """Return what memtrace found at accesses that patches see: neither constants nor asynchronous copies."""
    seen = [r for r in found if r["type"] == "site" and r["space"] != "const" and r["op"] != "async"]
    fields = (
        "kernel",
        "op",
        "space",
        "width",
        "requests",
        "accesses",
        "bytes",
        "sectors",
        "sectors_least",
        "pattern",
    )
    return rows(seen, "site", *fields)


def nodes(found: Records) -> Records:
    """Return the records with the node and the replay of a graph's launches, without the graph's handle."""
    return [
        r | {"node": [r["graph"].get("node"), r["graph"].get("replay")] if r.get("graph") else None}
        for r in found
    ]


# By tool: what both ways have in common.
ALIKE: dict[str, Callable[[Records], Any]] = {
    "threadhist": lambda r: added_up(r, "thread", (*SHAPE, "block", "thread"), "runs", "work"),
    "kernelretsnoop": lambda r: (
        added_up(r, "lane", (*SHAPE, "lane"), "exits"),
        added_up(r, "kernel", SHAPE, "exits"),
        rows(r, "exit", "kernel", "launch", "block", "thread"),
    ),
    "launchlate": lambda r: (
        rows(nodes(r), "launch", "kernel", "launch", "node"),
        rows(r, "kernel", "kernel", "count"),
        all(one["start_ns"] <= one["end_ns"] for one in r if one["type"] == "launch"),
    ),
    "memtrace": traffic,
    "gputop": lambda r: Counter(
        {k["kernel"]: k["launches"] for one in r if one["type"] == "process" for k in one["kernels"]}
    ),
    "gpucount": lambda r: added_up(r, "count", ("spec", "kernel"), "threads"),
    "gpudist": lambda r: added_up(r, "dist", ("label", "key"), "count", "sum"),
    "gputrace": lambda r: rows(r, "event", "spec", "kernel", "launch", "block", "thread", "args"),
}


def both(
    tool: str, options: list[str], command: list[str], at: Path, **variables: str
) -> dict[bool, Records]:
    """Run a tool both ways. Returns the records with the PTX hidden, and without."""
    found = {}
    for hidden in (True, False):
        text = run(tool, options, command, hidden, at / str(hidden), **variables)
        plain = subprocess.run(
            command,
            env=os.environ | {"LD_LIBRARY_PATH": str(DEVICE)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert text == plain.stdout
        found[hidden] = read(at / str(hidden))
    return found


def compare(tool: str, found: dict[bool, Records]) -> None:
    alike = ALIKE[tool]
    assert alike(found[True]) == alike(found[False])
    one, other = (found[hidden][-1] for hidden in (True, False))
    for name in ("launches_seen", "launches_matched", "launches_instrumented", "not_instrumented", "lost"):
        assert one[name] == other[name], name


# The answers that --sass can give. What it refuses is in test_patched_run.py.
REFUSED = ("--launch", "--sample", "--top")  # with --top, not every thread is shown
TOLD = [answer for answer in ANSWERS if answer[0] in ALIKE and not any(word in answer[1] for word in REFUSED)]


@pytest.mark.every(2)
@pytest.mark.parametrize("answer", TOLD, ids=lambda answer: f"{answer[0]} {answer[1]} {answer[2]}")
def test_a_known_answer(answer: Any, tmp_path: Path) -> None:
    tool, options, program, right = answer
    name, *arguments = program.split()
    words = options.split()
    if tool == "threadhist" and "--work" not in words:  # --sass counts no instructions
        words += ["--work", "runs"]
    if tool == "memtrace":
        words = ["--no-allocations"]
    found = both(tool, words, [str(build(name) / name), *arguments], tmp_path)
    compare(tool, found)
    if tool in ("launchlate", "kernelretsnoop", "threadhist"):
        assert right(found[True])


SPECS = {
    "threadhist": ["--work", "runs"],
    "threadhist atomics": ["--work", "atomics"],
    "kernelretsnoop": [],
    "kernelretsnoop -e": ["-e"],
    "launchlate": ["-v", "--graphs"],
    "gputop": ["3600"],  # one report, at the end
    "gpucount": [
        "kernel:*",
        "entry:*",
        "exit:* (lane == 3)",
        "atomic:*:global",
        "access:*:global",
        "exit:* (launch % 2)",
    ],
    "gpudist": ["-H", "exit:*:u64:gthread", "entry:*:u32:lane, kernel"],
    "gputrace": ['exit:* (thread < 2) "%lu %lu", lane, gthread', "entry:* (gthread == 1)"],
}


@functools.cache
def made(name: str, at: Path) -> list[str]:
    text, *flags = {
        "streams": (programs.PROGRAM,),
        "nodes": (programs.NODES,),
        "nested": (programs.NESTED, "-rdc=true", "-lcudadevrt"),
        "contexts": (programs.MODULES, f"-L{DEVICE}", "-lcuda"),
        "unloading": (programs.LOADED, f"-L{DEVICE}", "-lcuda"),
    }[name]
    words = {"contexts": ["3", "0"], "unloading": ["4"]}.get(name, [])
    return [str(gpubpf_cuda.build(text, at / name, *flags)), *words]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.mark.every(3)
@pytest.mark.parametrize("hostile", ["0", "1"])
@pytest.mark.parametrize("name", ["streams", "contexts", "unloading"])
@pytest.mark.parametrize("what", list(SPECS))
def test_programs(what: str, name: str, hostile: str, folder: Path, tmp_path: Path) -> None:
    """In several streams, a graph, two contexts, modules that are unloaded, and functions that are loaded late."""
    variables = {"CUDASIM_HOSTILE": hostile, "CUDA_MODULE_LOADING": "LAZY" if hostile == "1" else "EAGER"}
    tool = what.split()[0]
    compare(tool, both(tool, SPECS[what], made(name, folder), tmp_path, **variables))


@pytest.mark.every(2)
@pytest.mark.parametrize("what", ["kernelretsnoop -e", "launchlate", "gputrace"])
def test_grids_that_kernels_launch(what: str, folder: Path, tmp_path: Path) -> None:
    """Their threads have no launch id, so only launches of the host have records. The calls in the others are lost."""
    tool = what.split()[0]
    found = both(tool, SPECS[what], made("nested", folder), tmp_path)
    assert ALIKE[tool](found[True]) == ALIKE[tool](found[False])
    assert found[True][-1]["patch_calls_lost"]["launches"] > 0


@pytest.mark.parametrize("what", ["kernelretsnoop -e", "launchlate", "gputrace"])
def test_nodes_of_a_graph(what: str, folder: Path, tmp_path: Path) -> None:
    """Nodes with one kernel and shape are told apart if they run one after the other; otherwise they are not measured."""
    tool = what.split()[0]
    found = both(tool, SPECS[what], made("nodes", folder), tmp_path)
    assert found[True][-1]["not_instrumented"] == {"alike nodes": 6}
    apart = {hidden: [r for r in records if r.get("kernel") != "pair"] for hidden, records in found.items()}
    assert ALIKE[tool](apart[True]) == ALIKE[tool](apart[False])
    assert found[True][-1]["lost"] == 0


@pytest.mark.parametrize("what", ["threadhist", "gpucount", "kernelretsnoop"])
def test_intervals_and_several_processes(what: str, folder: Path, tmp_path: Path) -> None:
    """The sums over intervals are those of the whole run, of all processes."""
    program = made("streams", folder)[0]
    command = ["sh", "-c", f"{program} & {program}; wait; sleep 0.3; {program}"]
    tool = what.split()[0]
    found = {}
    for hidden, words in {True: ["0.1"], False: []}.items():
        assert (
            run(tool, [*SPECS[what], *words], command, hidden, tmp_path / str(hidden))
            == f"{programs.SUM}\n" * 3
        )
        found[hidden] = read(tmp_path / str(hidden))
    compare(tool, found)


OBJECT = """
MAP(counts, GPU_ARRAY, u32, u64, 3);
static void count(u32 which) {
    u64 *at = bpf_map_lookup_elem(&counts, &which);
    if (at)
        __sync_fetch_and_add(at, 1);
}
SEC("kprobe/vectorAdd") int on_entry(void *ctx) { count(0); return 0; }
SEC("kretprobe/vectorAdd") int on_exit(void *ctx) { count(1); return 0; }
SEC("kprobe/__memcapture") int on_access(void *ctx) { count(2); return 0; }
"""


@needs_clang
def test_an_object(tmp_path: Path) -> None:
    """Programs of an object file: 5 threads add 19 numbers, with two loads and a store each."""
    words = [str(build_object(OBJECT, tmp_path / "object.bpf.o"))]
    for hidden in (True, False):
        run("gpurun", words, [str(build("vectoradd") / "vectoradd")], hidden, tmp_path / str(hidden))
        (counts,) = (r for r in read(tmp_path / str(hidden)) if r["type"] == "map")
        assert [entry["value"] for entry in counts["entries"]] == [5, 5, 3 * 19]

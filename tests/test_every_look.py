"""Programs under every tool and look, on both clocks of the embedded devices: the text is readable and the data valid.

The suite runs a small part of the matrix, which tests/choice chooses. GPUBPF_CHOICE=N overrides it.
GPUBPF_LOOKS=all runs all cases, for hours.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpubpf_examples
import gpubpf_objects
import hipsim_device
from gpubpf.ebpf import clang
from gpubpf.names import demangle
from gpubpf_dataset import check_dataset
from gpubpf_examples import ROOT
from gpubpf_schema import check_records
from gpubpf_text import longest, shortened

SHORT = {"matmul": ["64"]}  # with a record for every access, the whole program would take minutes
EXAMPLES = {name: f"{name}: PASSED" for name in gpubpf_examples.NAMES}  # what each writes last
HIP = {
    "cooperative": "all rounds are right",
    "copies": "copies are right",
    "points": "right",
    "probed": "right",
    "streams": "streams are right",
    "vectoradd": "1000 sums are right",
    "waits": "right 256",
}
HIP_GPU = "gfx90a"
CALLS = ("cudasnoop", "hipsnoop")
NOT_ON_AMD = ("func:*", "value", "old")  # points and values that probes do not have there
ONLY_CUDA = ("cudasnoop",)
LOOKS = {
    "threadhist": [
        *("", "-v", "--json", "--csv", "--top 5", "--by lane", "--by warp", "--by block", "-T --by block -v"),
        *(f"--work {kind}" for kind in ("loads", "stores", "atomics", "barriers", "blocks")),
        *("--block 0 --thread 0:3", "--by warp --csv", "--by lane --json", "--thread 5000"),
    ],
    "kernelretsnoop": ["", "-v", "-e", "--json", "--csv", "-e --json", "--block 0 -T", "--heatmap {}.svg"],
    "launchlate": [
        *("", "-s", "-v", "--timeline", "--slow 1", "--stacks", "-s -v -T", "--csv", "--trace {}.json"),
        *("-v --json --timeline", "--stacks --json"),
    ],
    "memtrace": [
        *("", "-v", "--footprint", "--footprint -v --granule 32", "--no-allocations", "--json --footprint"),
        *("--csv", "-e --warps 8", "-e --json --warps 8", "--heatmap {}.svg --warps 8", "--block 0 -T"),
    ],
    "gpuhang": ["", "-v --after 0.01", "--json", "--csv -T --after 0.01"],
    "warpdiv": [
        "--threads --json",
        "",
        "-v",
        "--json",
        "--csv -T",
        "--by line",
        "--by kernel --csv",
        "--by function --json --top 2",
    ],
    "barrierlate": ["", "-v", "--json", "--csv -T", "--top 1"],
    "gpumem": ["", "-v", "--json", "--csv -T", "--top 1"],
    "gputop": ["", "--once", "-v", "--json", "--csv -T", "--sort memory --top 1"],
    "gpuprofile": [
        "",
        "-v",
        "--json",
        "--csv -T",
        "--weight launches --top 2 -v",
        "--speedscope {}.json --json",
    ],
    "nansnoop": [
        "",
        "-v",
        "--json",
        "--csv -T",
        "--stores -v",
        "--kinds inf,overflow,denormal --check --block 0",
    ],
    "gpucount": [
        *(
            "kernel:* entry:* exit:*:stores",
            "load:* store:*:global atomic:* -v",
            "barrier:* func:* block_end:* --json",
        ),
        *("access:*:ld.global access:*:cp barrier:*:leave --csv", "exit:* --block 0 --thread 0:3 -T"),
    ],
    "gpudist": [
        *(
            "-H exit:*:loads:u64:work,kernel",
            "-C load:*:u32:popcount(active),source",
            "-H kernel:*:u64:threads --csv",
        ),
        *(
            "-L --width 8 entry:*:s32:lane-16 -v",
            "-C store:*:u64:address --json",
            "-C atomic:*:u32:old,source load:*:s32:value",
            "-H barrier:*:leave:u64:waited -T",
        ),
    ],
    "gputrace": [
        *(
            "kernel:* exit:*:stores --thread 31",
            "barrier:* func:* --block 0 --thread 0:31 -T",
            "kernel:* --csv",
        ),
        *("store:* atomic:* --thread 0 --json", "access:*:st.global --block 0 --thread 0 -T"),
    ],
    "cudasnoop": [
        *(
            "",
            "-v",
            "-e",
            "-e -v",
            "--why",
            "--slow 1",
            "--timeline",
            "--json -e",
            "--csv",
            "--trace {}.json",
        ),
        "--errors -e -T",
    ],
}
LOOKS["hipsnoop"] = LOOKS["cudasnoop"]
LOOKS["gpurun"] = ["", "-v", "--json", "--csv -T"]
OBJECT = """
struct count { u64 times, sum; };
MAP(lanes, GPU_ARRAY, u32, struct count, 32);
MAP(blocks, GPU_HASH, u64, u64, 64);
MAP(threads, THREAD_ARRAY, u32, u32[2], 1);
SEC("kretprobe/*") int on_exit(void *ctx) {
    u64 x, y, z, bx, by, bz, one = 1;
    bpf_get_thread_idx(&x, &y, &z);
    bpf_get_block_idx(&bx, &by, &bz);
    u32 lane = x % 32, zero = 0;
    struct count *count = bpf_map_lookup_elem(&lanes, &lane);
    if (count) {
        __sync_fetch_and_add(&count->times, 1);
        __sync_fetch_and_add(&count->sum, bx);
    }
    u64 block = bx % 40, *blocks_of = bpf_map_lookup_elem(&blocks, &block);
    if (!blocks_of)
        bpf_map_update_elem(&blocks, &block, &one, 0);
    u32 *mine = bpf_map_lookup_elem(&threads, &zero);
    if (mine)
        mine[1] += 1;
    if (!bx && !x)
        print("thread %d left block %d of y %d", (u32)x, (u32)bx, (u32)by);
    return 0;
}
"""


def can_be_measured(name: str, tool: str, look: str) -> bool:
    """Return whether a tool has this look for a program: hipsnoop for HIP, those of ONLY_CUDA for CUDA, the others for both."""
    if name in EXAMPLES:
        return tool != "hipsnoop"
    return tool not in ONLY_CUDA and not any(word in look for word in NOT_ON_AMD)


MATRIX = [
    (name, tool, look, clock)
    for tool, looks in LOOKS.items()
    for look in looks
    for name in (*EXAMPLES, *(f"hip-{name}" for name in HIP))
    for clock in ("real", "virtual")
    if can_be_measured(name, tool, look)
]
ALL_COLUMNS = 90  # of a table of memtrace, which leaves some out without -v
STEP = 1 if os.environ.get("GPUBPF_LOOKS") == "all" else 383
CHOICE = int(os.environ["GPUBPF_CHOICE"])  # tests/conftest.py sets it


def name_of(case: tuple[str, str, str, str]) -> str:
    name, tool, look, clock = case
    return "-".join((name, tool, look.replace(" ", "_").replace("{}", "FILE"), clock))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the object for gpurun."""
    if clang.find() is None:
        pytest.skip("needs clang")
    return gpubpf_objects.build(OBJECT, tmp_path_factory.mktemp("object") / "looks.o")


def program_of(name: str) -> tuple[Path, list[str], str]:
    """Build a program; return its file, its arguments, and what it writes last."""
    if name in EXAMPLES:
        return gpubpf_examples.build(name) / name, SHORT.get(name, []), EXAMPLES[name]
    kernels = name.removeprefix("hip-")
    hipsim_device.libraries()
    return hipsim_device.program(kernels, gpu=HIP_GPU), [], HIP[kernels]


def marked(case: tuple[str, str, str, str]) -> Any:
    """cudasnoop and hipsnoop have probes in the library that all use."""
    return pytest.param(case, marks=[pytest.mark.whole_machine] if case[1] in CALLS else [], id=name_of(case))


@pytest.mark.parametrize("case", [marked(case) for case in MATRIX[CHOICE % STEP :: STEP]])
def test_a_look(case: tuple[str, str, str, str], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    name, tool, look, clock = case
    if tool in CALLS and os.geteuid():
        pytest.skip("needs root")
    program, arguments, last = program_of(name)
    results = tmp_path / "results"
    options = look.format(tmp_path / "file").split()
    command = [str(program), *arguments]
    if tool == "cudasnoop":
        command = [sys.executable, "-m", "cudasim.launcher", "--clock", clock, "--", *command]
    elif tool != "hipsnoop":
        options += ["--device", "sim"]
    if tool == "gpurun":
        options.append(str(request.getfixturevalue("compiled")))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "lib"),
        "CUDASIM_CLOCK": clock,
        "HIPSIM_CLOCK": clock,
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *options, "-o", str(results), "--", *command],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, [last]), done.stderr
    assert "Traceback" not in done.stderr and "warning" not in done.stderr.lower(), done.stderr
    files = list(tmp_path.glob("file.*"))
    assert files or "{}" not in look, done.stderr
    for file in files:
        assert file.stat().st_size > 100
        assert file.suffix != ".json" or json.loads(file.read_text(), parse_constant=refused)
    made = results.read_text()
    if "--json" in options:
        records = [json.loads(line, parse_constant=refused) for line in made.splitlines()]
        check_records(tool, made.splitlines())
        check_dataset(tool, "".join(made.splitlines(keepends=True)[-500:]), tmp_path / "dataset")
        assert records[-1]["type"] == "summary"
    elif "--csv" in options:
        rows = list(csv.reader(io.StringIO(made)))
        assert len({len(row) for row in rows}) == 1, made
    else:
        readable(made, done.stderr, numbers=tool != "nansnoop")
        verbose = "-v" in options
        if not (tool in CALLS and "-e" in options):  # the line of a call keeps its numbers whole
            shown = shortened(made, names_in(program)) if verbose else made
            widest = max(shown.splitlines(), key=len)
            assert len(widest) <= (ALL_COLUMNS if verbose and tool == "memtrace" else 80), widest


@functools.cache
def names_in(program: Path) -> list[str]:
    """Return the long C++ names in a program, among them its kernels', that -v prints in full."""
    return longest(demangle(name.decode()).full for name in re.findall(rb"_Z\w+", program.read_bytes()))


def readable(text: str, notices: str, numbers: bool) -> None:
    """numbers: all numbers are finite."""
    assert text.strip(), notices
    assert not numbers or not re.search(r"\b(nan|inf|None|NaN)\b", text), text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text), text
    assert not re.search(r": *;|; *;|, *,|\(\)|:\s*$", text.rstrip()), text


def refused(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")

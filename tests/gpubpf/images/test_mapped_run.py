"""A tool on a program that has been launching for long: which of its kernels it measures, and that their counts are right."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
from gpubpf.traced.device import LIBRARIES

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [
    *gpubpf_cuda.needs_cuda,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="attaching needs x86-64"),
]

# Two libraries have a kernel of one name, with other parameters; two of one name and the same parameters; and an instance of a
# template that the program has, too.
LIBRARY = r"""
template <class T> __global__ void twice(T *p) { p[threadIdx.x] *= 2; }
extern "C" __global__ void update(int *p, KIND by) { for (int i = 0; i < TURNS; i++) atomicAdd(p, (int)by + i); }
extern "C" __global__ void same(int *p) { *p = TURNS; }
extern "C" int SUFFIX(only)(int *p) {
    twice<<<1, 32>>>(p);
    return cudaDeviceSynchronize();
}
extern "C" int SUFFIX(go)(int *p) {
    update<<<1, 32>>>(p, (KIND)1);
    same<<<1, 1>>>(p);
    twice<<<1, 32>>>(p);
    return cudaDeviceSynchronize();
}
"""
PROGRAM = r"""
#include <cstdio>
#include <dlfcn.h>
#include <poll.h>
template <class T> __global__ void twice(T *p) { p[threadIdx.x] *= 2; }
template <class T, int N> __global__ void each(T *p, int n) { for (int i = threadIdx.x; i < n; i += N) p[i] += N; }
int main(int argc, char **argv) {
    int *p, n = 0;
    if (cudaMalloc(&p, 4096)) return 1;
    int (*go[2])(int *) = {};
    for (int k = 1; k < argc; k++)
        if (!(go[k - 1] = (int (*)(int *))dlsym(dlopen(argv[k], RTLD_NOW), k == 1 ? "first_go" : "second_go"))) return 2;
    for (struct pollfd in = {0, POLLIN, 0}; !poll(&in, 1, 2); n++) {
        each<int, 32><<<1, 32>>>(p, 64);
        each<unsigned, 16><<<1, 16>>>((unsigned *)p, 64);
        twice<<<1, 32>>>(p);
        for (int k = 1; k < argc; k++) if (go[k - 1](p)) return 3;
        if (cudaDeviceSynchronize()) return 4;
        if (!n) { puts("ready"); fflush(stdout); }
    }
    printf("%d\n", n);
    return 0;
}
"""
# Launches of both libraries only what they have in common, until there is a line; then all, and looks at the results.
COMMON = r"""
#include <cstdio>
#include <dlfcn.h>
#include <poll.h>
int main(int, char **argv) {
    int *p, value, n = 0;
    if (cudaMalloc(&p, 4096)) return 1;
    int (*only[2])(int *), (*go[2])(int *);
    const char *names[2][2] = {{"first_only", "first_go"}, {"second_only", "second_go"}};
    for (int k = 0; k < 2; k++) {
        void *library = dlopen(argv[1 + k], RTLD_NOW);
        if (!(only[k] = (int (*)(int *))dlsym(library, names[k][0]))) return 2;
        if (!(go[k] = (int (*)(int *))dlsym(library, names[k][1]))) return 2;
    }
    for (struct pollfd in = {0, POLLIN, 0}; !poll(&in, 1, 2); n++) {
        if (only[0](p) || only[1](p)) return 3;
        if (!n) { puts("ready"); fflush(stdout); }
    }
    for (int i = 0; i < 500; i++)
        for (int k = 0; k < 2; k++) {
            if (go[k](p) || cudaMemcpy(&value, p, 4, cudaMemcpyDeviceToHost)) return 4;
            if (value != 2 * (k ? 5 : 3)) return printf("%d of library %d\n", value, k), 5;
            poll(nullptr, 0, 2);
        }
    return 0;
}
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("found")
    for name, kind, turns in (("first", "int", 3), ("second", "double", 5)):
        flags = ("-shared", "-Xcompiler", "-fPIC", f"-DKIND={kind}", f"-DTURNS={turns}")
        gpubpf_cuda.build(re.sub(r"SUFFIX\((.*?)\)", rf"{name}_\1", LIBRARY), at / f"{name}.so", *flags)
    gpubpf_cuda.build(COMMON, at / "common", "-ldl")
    return gpubpf_cuda.build(PROGRAM, at / "app", "-ldl")


@contextlib.contextmanager
def launching(program: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """The program, when each kernel has been launched; it ends well."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(LIBRARIES)}
    process = subprocess.Popen(
        [str(w) for w in (program, *arguments)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        process.communicate("", timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def threadhist(pid: int, expected: int) -> list[dict[str, Any]]:
    """What it says at its end, which comes when it has counts of as many kernels."""
    command = [sys.executable, ROOT / "tools" / "threadhist.py", "0.5", "-d", "20", "--json", "-p", str(pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tool:
        assert tool.stdout is not None
        records: list[dict[str, Any]] = []
        enough = False
        for line in tool.stdout:
            records.append(json.loads(line))
            if not enough:
                enough = len({r["demangled"] for r in records if r["type"] == "kernel"}) >= expected
                if enough:
                    tool.send_signal(signal.SIGINT)
    assert tool.returncode == 0
    return records


def kernels(records: list[dict[str, Any]]) -> dict[str, tuple[int, float, float]]:
    """By full name: threads; runs by launch and thread; the work of a run.

    Of all intervals together: a launch may be under way between two.
    """
    found: dict[str, Counter[str]] = {}
    threads = {}
    for r in records:
        if r["type"] == "kernel":
            threads[r["demangled"]] = r["threads"]
            found.setdefault(r["demangled"], Counter()).update(
                {k: r[k] for k in ("runs", "launches", "work")}
            )
    return {
        name: (threads[name], n["runs"] / n["launches"] / threads[name], n["work"] / n["runs"])
        for name, n in found.items()
    }


@pytest.mark.every(2)
@pytest.mark.parametrize("fate", ["there", "deleted"])
def test_what_was_launching_is_counted(app: Path, tmp_path: Path, fate: str) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(app.read_bytes())
    mine.chmod(0o755)
    with launching(mine) as process:
        if fate == "deleted":
            mine.unlink()
        records = threadhist(process.pid, 3)
    summary = records[-1]
    assert summary["launches_seen"] == summary["launches_instrumented"] + sum(
        summary["not_instrumented"].values()
    )
    assert set(summary["not_instrumented"]) <= {"before ready"}
    found = kernels(records)
    assert {name: (threads, runs) for name, (threads, runs, _) in found.items()} == {
        "void each<int, 32>(int*, int)": (32, 1),
        "void each<unsigned int, 16>(unsigned int*, int)": (16, 1),
        "void twice<int>(int*)": (32, 1),
    }
    # Each thread of the second goes through its loop four times, of the first twice.
    assert (
        found["void each<unsigned int, 16>(unsigned int*, int)"][2]
        > found["void each<int, 32>(int*, int)"][2]
    )


def test_names_that_several_libraries_have(app: Path) -> None:
    with launching(app, app.parent / "first.so", app.parent / "second.so") as process:
        records = threadhist(process.pid, 5)
    found, summary = kernels(records), records[-1]
    assert summary["launches_seen"] == summary["launches_instrumented"] + sum(
        summary["not_instrumented"].values()
    )
    assert set(summary["not_instrumented"]) <= {"before ready", "ambiguous"}, records
    # Told apart by the parameters of `update`, and then by the module, though both have the same names.
    assert found["update"][:2] == (32, 1) and found["same"][:2] == (1, 1)


@pytest.mark.every(2)
def test_libraries_that_differ_in_what_they_launch_later(app: Path) -> None:
    """What both have in common is measured at once. Each gets copies of its own kernels: else its results would change."""
    command = [sys.executable, ROOT / "tools" / "threadhist.py", "--json", "-d", "60", "-p"]
    libraries = (app.parent / "first.so", app.parent / "second.so")
    with (
        launching(app.parent / "common", *libraries) as process,
        subprocess.Popen([*command, str(process.pid)], stdout=subprocess.PIPE, text=True) as tool,
    ):
        assert tool.stdout is not None
        while json.loads(tool.stdout.readline())["type"] != "attached":
            pass
        time.sleep(1)
        out, _ = process.communicate("\n", timeout=60)
        assert process.returncode == 0, out
        records = [json.loads(line) for line in tool.stdout]
    found, summary = kernels(records), records[-1]
    assert set(summary["not_instrumented"]) <= {"before ready", "ambiguous"}, summary
    assert {"same", "update"} <= set(found)
    (same,) = (r for r in records if r["type"] == "kernel" and r["kernel"] == "same")
    assert same["launches"] > 500, (same, summary)  # of both


def mappings(pid: int) -> list[str]:
    """Return the mappings of a process, except that of the kernel for another tracer's probes, which may come at any time."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if not line.endswith("[uprobes]")]


@pytest.mark.parametrize("option", ["--list", "--ptx"])
def test_listing_does_not_touch_the_process(app: Path, option: str) -> None:
    with launching(app, app.parent / "first.so") as process:
        before = mappings(process.pid)
        command = [sys.executable, ROOT / "tools" / "threadhist.py", option, "-p", str(process.pid)]
        done = subprocess.run(
            [*command, "--kernel", "update", "--json"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert mappings(process.pid) == before
    if option == "--ptx":
        assert f"// {app.parent / 'first.so'}: from the PTX for sm_" in done.stdout
        return
    (record,) = (json.loads(line) for line in done.stdout.splitlines())
    assert record["kernel"] == "update" and record["file"] == str(app.parent / "first.so")
    assert record["pid"] == process.pid and record["comm"] == "app"
    assert record["instrumentable"] is True and record["launches"] is None

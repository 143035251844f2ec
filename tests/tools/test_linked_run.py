"""The tools on a program whose device code nvlink joins (`nvcc -rdc=true`): exact counts, lines and names of all files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda
import gpubpf_examples
import gpubpf_rdc

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = gpubpf_cuda.needs_cuda


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_rdc.build(tmp_path_factory.mktemp("rdc"), "-lineinfo")


def run(tool: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / f"tools/{tool}.py"), "--device", "sim", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def measured(tool: str, app: Path, out: Path, *arguments: str) -> list[dict]:
    done = run(tool, *arguments, "--json", "-o", out, "--", app)
    assert (done.returncode, done.stdout) == (gpubpf_rdc.STATUS, gpubpf_rdc.OUTPUT), done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.every(2)
def test_counts_of_all_files(app: Path, tmp_path: Path) -> None:
    records = measured("threadhist", app, tmp_path / "out", "--work", "stores")
    kernels = {record["kernel"] for record in records if record["type"] == "kernel"}
    assert kernels == {"first", "second", "doubled"}
    summary = records[-1]
    assert (summary["launches_seen"], summary["launches_instrumented"]) == (6, 6)
    assert (summary["lost"], summary["not_instrumented"]) == (0, {})
    work = {
        (record["kernel"], 64 * record["block"][0] + record["thread"][0]): record["work"]
        for record in records
        if record["type"] == "thread"
    }
    # The last thread of `first` and `second` also stores what it prints.
    assert [work["first", i] for i in range(127)] == [3 * gpubpf_rdc.stores_of_first(i) for i in range(127)]
    assert [work["second", i] for i in range(127)] == [2] * 127 and work["doubled", 0] == 2


@pytest.mark.every(15)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] if n == "tutorial" else []) for n in gpubpf_examples.NAMES],
)
def test_an_example_is_counted_as_without_device_linking(name: str, tmp_path: Path) -> None:
    def counts(*flags: str) -> dict[tuple[object, ...], list[int]]:
        out, source = tmp_path / "out", REPOSITORY / "examples" / f"{name}.cu"
        options = ["-O2", "-arch=sm_80", "-I", str(source.parent), *flags]
        built = gpubpf_cuda.build(source, tmp_path / f"{name}{''.join(flags)}", *options)
        size = ["64"] if name == "matmul" else []
        done = run("threadhist", "--by", "block", "--work", "stores", "--json", "-o", out, "--", built, *size)
        assert done.stdout.splitlines()[-1:] == [f"{name}: PASSED"], done.stderr
        *records, summary = [json.loads(line) for line in out.read_text().splitlines()]
        assert (summary["lost"], summary["not_instrumented"]) == (0, {})
        return {
            (one["kernel"], *one["block_dim"], *one["block"]): [one["runs"], one["work"]]
            for one in records
            if one["type"] == "block"
        }

    linked = counts("-rdc=true")
    assert linked and linked == counts()


@pytest.mark.long
def test_lines_of_all_files(app: Path, tmp_path: Path) -> None:
    records = measured("memtrace", app, tmp_path / "out", "--kernel", "first")
    text = json.dumps(records)
    for name in ("first.cu", "second.cu", "plus.cu"):
        assert name in text


def test_list(app: Path) -> None:
    done = run("threadhist", "--list", "--json", app)
    listed = {record["kernel"]: record["reason"] for record in map(json.loads, done.stdout.splitlines())}
    assert listed == {"first": None, "second": None, "doubled": None}


def test_a_kernel_that_launches_kernels(tmp_path: Path) -> None:
    app = gpubpf_cuda.build(
        "__global__ void child() {} __global__ void parent() { child<<<1, 1>>>(); }\n"
        "int main() { child<<<1, 1>>>(); parent<<<1, 1>>>(); cudaDeviceSynchronize(); return 0; }\n",
        tmp_path / "app",
        "-rdc=true",
    )
    done = run("threadhist", "--list", "--json", app)
    listed = {record["kernel"]: record["reason"] for record in map(json.loads, done.stdout.splitlines())}
    assert listed == {"child": None, "parent": None}

"""Maps in a HIP program's own kernels (include/hip/gpubpf_maps.h): what is written when the process ends."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hipsim_device import PROGRAMS, ROOT, environment, hipcc, program, run

HEADER = ROOT / "lib" / "gpubpf" / "include" / "hip"
# Programs are built again when the header changes.
OPTIONS = (
    f"-I{HEADER}",
    f"-DHEADER={zlib.crc32((HEADER / 'gpubpf_maps.h').read_bytes())}",
)
N = 1000


def _program(*options: str, gpu: str = "gfx906") -> Path:
    return program("own_maps", *OPTIONS, *options, gpu=gpu)


def _maps(folder: Path) -> list[dict[str, Any]]:
    """The lines of the one file in a folder, each with the same fields in front."""
    (path,) = folder.glob("maps.*.json")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        assert path.name == f"maps.{line.pop('pid')}.json"
        assert (line.pop("type"), line.pop("vendor")) == ("map", "amd")
    return lines


def _known(times: int = 1) -> list[dict[str, Any]]:
    """What the maps of a GPU have after `times` launches, in the order of their names."""
    numbers = [i for i in range(N) for _ in range(times)]
    bits = sorted(Counter(i.bit_length() for i in numbers).items())
    few = Counter(i % 6 - 1 for i in numbers)
    paths = Counter(i % 3 for i in numbers)
    return [
        {"map": "few", "kind": "hash", "entries": {2**64 - 1 if k < 0 else k: n for k, n in few.items()}},
        {"map": "keys", "kind": "hash", "entries": {k - 2: 1.5 * N * times / 5 for k in range(5)}, "lost": 0},
        {
            "map": "lengths",
            "kind": "histogram",
            "buckets": [[1 << b - 1 if b else 0, (1 << b) - 1, n] for b, n in bits],
        },
        {"map": "pairs", "kind": "array", "entries": {0: "00" * 8, 1: "00" * 4 + "07000000"}},
        {"map": "paths", "kind": "array", "entries": dict(paths)},
        {"map": "sums", "kind": "array", "entries": {0: 0, 1: N * times / 2}},
        {"map": "wide", "kind": "hash", "entries": {k: _wide(N * times // 2) for k in (0, -1)}, "lost": 0},
    ]


def _wide(w: float) -> str:
    return struct.pack("<4d", 0, 0, 0, w).hex()


def _check(lines: list[dict[str, Any]], times: int = 1) -> None:
    """The lines of one GPU's maps have what is known. `few` has room for 4 of its 5 small keys, and always for the largest."""
    for line in lines:
        if "entries" in line:
            line["entries"] = {one["key"]: one["value"] for one in line["entries"]}
    few, known = lines[0], _known(times)
    wanted = known[0].pop("entries")
    found = few.pop("entries")
    assert len(found) == 5 and found.items() <= wanted.items() and 2**64 - 1 in found
    assert few.pop("lost") == N * times - sum(found.values())
    assert lines == known


@pytest.mark.every(6)
@pytest.mark.parametrize("gpu", ["gfx906", "gfx90a", "gfx1030"])
def test_known_answers(tmp_path: Path, gpu: str) -> None:
    done = run([_program(gpu=gpu)], HIPSIM_GPU=gpu, GPUBPF_MAPS=f"{tmp_path}/maps.%p.json")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    lines = _maps(tmp_path)
    assert {line.pop("gpu") for line in lines} == {0}
    _check(lines)


def test_each_gpu_has_its_own(tmp_path: Path) -> None:
    done = run([_program()], HIPSIM_DEVICES="2", GPUBPF_MAPS=f"{tmp_path}/maps.%p.json")
    assert done.returncode == 0, done.stderr
    lines = _maps(tmp_path)
    assert [line["gpu"] for line in lines] == [0, 1] * 7
    for same in (lines[::2], lines[1::2]):
        assert len({line.pop("gpu") for line in same}) == 1
        _check(same)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("how", "said", "times"),
    [
        ("early", "early 0\ndone\n", 1),  # the first call finds no maps; the end of the process does
        ("again", "again 7\ndone\n", 2),  # what is written last counts
        ("forks", "child 0\ndone\n", 1),  # the child, which cannot use ROCr, writes nothing
    ],
)
def test_when_they_are_written(tmp_path: Path, how: str, said: str, times: int) -> None:
    done = run([_program(), how], timeout=60, GPUBPF_MAPS=f"{tmp_path}/maps.%p.json")
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
    lines = _maps(tmp_path)
    assert all(line.pop("gpu") == 0 for line in lines)
    _check(lines, times)


def test_a_code_object_that_the_program_loads(tmp_path: Path) -> None:
    """The program's own maps stay empty; those of the module have everything."""
    module = tmp_path / "module.co"
    command = [hipcc(), "--genco", "--offload-arch=gfx906", "-w", "-std=c++17", f"-I{HEADER}"]
    command += [str(PROGRAMS / "own_maps.hip"), "-o", str(module)]
    subprocess.run(command, check=True, env={**os.environ, "HIP_PLATFORM": "amd"})
    done = run([_program(), "module", module], GPUBPF_MAPS=f"{tmp_path}/maps.%p.json")
    assert done.returncode == 0, done.stderr
    lines = [line for line in _maps(tmp_path) if line.pop("gpu") == 0]
    used = [line for line in lines if line["map"] != "few" or line["entries"]]
    by_name = [[line for line in used if line["map"] == name] for name in sorted({x["map"] for x in used})]
    _check([max(same, key=lambda line: len(json.dumps(line))) for same in by_name])


def test_damaged_maps_are_left_out(tmp_path: Path) -> None:
    done = run([_program("-DDAMAGED")], GPUBPF_MAPS=f"{tmp_path}/maps.%p.json")
    assert (done.returncode, done.stdout) == (0, "done\n")
    lines = _maps(tmp_path)
    assert all(line.pop("gpu") == 0 for line in lines)
    _check(lines)
    size = "its size is not what its description says"
    assert sorted(done.stderr.splitlines()) == [
        "gpubpf: the map cut is left out: it has no description",
        "gpubpf: the map huge is left out: it is larger than 256 MiB",
        f"gpubpf: the map longer is left out: {size}",
        f"gpubpf: the map odd is left out: {size}",
        "gpubpf: the map other is left out: it was built with another version of gpubpf_maps.h",
        f"gpubpf: the map unknown is left out: {size}",
        f"gpubpf: the map within is left out: {size}",
        f"gpubpf: the map wraps is left out: {size}",
    ]


def test_a_process_that_another_thread_ends(tmp_path: Path) -> None:
    """HIP has destroyed its code objects before the maps could be read. The program has to write them itself."""
    done = run([_program(), "thread"], timeout=60, GPUBPF_MAPS=f"{tmp_path}/maps.%p.json")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    done = run([_program()], GPUBPF_MAPS=f"{tmp_path}/none/maps.json")
    assert (done.returncode, done.stdout) == (0, "done\n")
    wrong = f"cannot write the maps to {tmp_path}/none/maps.json: No such file or directory"
    assert set(done.stderr.splitlines()) == {f"gpubpf: {wrong}"}


def test_nothing_is_written_unless_asked(tmp_path: Path) -> None:
    done = subprocess.run(
        [_program()], env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    assert not list(tmp_path.iterdir())


def test_with_a_tool(tmp_path: Path) -> None:
    """The probed copies of kernels count in the same maps."""
    tool = [sys.executable, ROOT / "tools" / "threadhist.py", "--", _program()]
    done = run(tool, GPUBPF_MAPS=f"{tmp_path}/maps.%p.json")
    assert done.returncode == 0 and "counted 1 of 1 matching launches" in done.stdout, done
    lines = _maps(tmp_path)
    assert all(line.pop("gpu") == 0 for line in lines)
    _check(lines)


def test_the_example_of_the_page(tmp_path: Path) -> None:
    """The program of docs/own-maps.md writes the lines that the page has."""
    page = (ROOT / "docs" / "own-maps.md").read_text()
    code = re.split(r"^```(?:c\+\+)?\n", page, flags=re.MULTILINE)[1]
    (tmp_path / "spmv.hip").write_text(
        code
        + """
        int main() {
            int *begins, *ends;
            if (hipMallocManaged(&begins, 4000) || hipMallocManaged(&ends, 4000)) return 1;
            for (int i = 0; i < 1000; ++i) begins[i] = 5, ends[i] = i < 210 ? 6 : 7 + i % 2;
            spmv<<<4, 256>>>(begins, ends, 1000);
        }
        """
    )
    done = run([program("spmv", *OPTIONS, folder=tmp_path)], GPUBPF_MAPS=f"{tmp_path}/maps.json")
    assert (done.returncode, done.stderr) == (0, "")
    shown = [line.strip() for line in page.splitlines() if line.startswith('    {"type"')]
    found = (tmp_path / "maps.json").read_text().splitlines()
    assert [re.sub(r'"pid":\d+', '"pid":4711', line) for line in found] == shown


def test_the_header_is_found() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpubpf.include"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "lib")}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(done.stdout.rstrip("\n"), "gpubpf_maps.h").exists()

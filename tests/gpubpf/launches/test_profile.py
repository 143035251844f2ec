"""gpuprofile's rows, and how they look: stacks of hostile names, too deep, too many."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from gpubpf.agent.definitions import STACK_NOT_UNWOUND, STACK_TOO_DEEP, RangeName, Vendor
from gpubpf.errors import Error
from gpubpf.images import symbols
from gpubpf.launches import arrays, profile, profile_files, profile_text
from gpubpf.launches.dependencies import NONE
from gpubpf.launches.frames import Frame, Stack
from gpubpf.launches.launches import LoggedProcess
from gpubpf.launches.profile import StackRow
from gpubpf.process.host_frames import HostFrame
from gpubpf.records.fields import KERNEL
from gpubpf.show import table
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf_profiles import boxes_of, fields_of, samples_of
from gpubpf_properties import generated
from gpubpf_text import COMMS, KERNELS, PIDS


def row(stack: Stack, gpu_ns: int = 1000, launches: int = 2, **more: Any) -> StackRow:
    fields = {
        "process": 1,
        "pid": 7,
        "comm": "app",
        "gpu": 0,
        "vendor": Vendor.NVIDIA,
        "wave": None,
        "mangled": "_Z5scalePfi",
    }
    return StackRow(**(fields | more), stack=stack, gpu_ns=gpu_ns, launches=launches)


def stack(*names: str, complete: bool = True) -> Stack:
    return Stack(tuple(Frame(name, "/bin/app") for name in names), complete)


def table_of(*rows: StackRow, by: str = "time") -> list[str]:
    return list(profile_text.report(rows, by, OwnerColumns(), None, False))


def test_frames_of_what_the_agent_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {0x20: "main", 0x30: "train"}
    monkeypatch.setattr(
        symbols,
        "lookup",
        lambda path, at, mapped: symbols.FunctionOffset(known[at], 1) if at in known else None,
    )
    told = [
        HostFrame(0x7F01, 0x90, "/lib/libx.so", ""),
        HostFrame(0x7F02, 0x91, "/lib/libx.so", "ns::push<int>(int)"),
        HostFrame(0x7F03, 0, "", ""),
        HostFrame(0x5530, 0x30, "/bin/app", "wrong"),
        HostFrame(0x5520, 0x20, "/bin/app", ""),
    ]
    names = ["main", "train", "0x7f03", "ns::push", "libx.so+0x90"]
    made = Stack.of(told)
    assert ([frame.name for frame in made.frames], made.complete) == (names, True)
    for symbol in (STACK_TOO_DEEP, STACK_NOT_UNWOUND):
        made = Stack.of([*told, HostFrame(0, 0, "", symbol)])
        assert ([frame.name for frame in made.frames], made.complete) == (names, False)
    # A function may have any name; what stands for missing frames has no address.
    assert Stack.of([*told, HostFrame(1, 0, "", STACK_TOO_DEEP)]).complete
    assert Stack.of(()) == Stack()


def view(stacks: list[int], lasted: list[int], parents: list[int] | None = None) -> Any:
    """Launches of one kernel as `Profile.add` needs them: the numbers of their stacks, and their times."""
    count = len(stacks)
    told = {number: (HostFrame(number, 0, "", f"f{number}"),) for number in range(1, 9)}
    columns = SimpleNamespace(
        parent=np.array(parents or [-1] * count),
        stack=np.array(stacks),
        names=["_Z5scalePfi"],
        processes=[LoggedProcess(7, "app", stacks=told, number=1)],
        **{name: np.zeros(count, np.int64) for name in ("process", "gpu", "name", "ranges")},
    )
    common = {"vendor": "nvidia", "wave": 32}
    return SimpleNamespace(
        columns=columns, waits=SimpleNamespace(exec=np.array(lasted)), common=lambda at: common
    )


def test_ranges_come_before_the_stack() -> None:
    launches = view([1, 1, 1, 0], [100, 10, 1, 5])
    launches.columns.ranges = np.array([1, 2, 0, 1])
    launches.columns.processes[0].ranges = {1: (RangeName("", "step"), RangeName("lib", "forward"))}
    made = profile.Profile()
    made.add(launches, np.arange(4))
    step = ["step", "forward"]
    assert sums(made) == [([*step, "f1"], 100, 1, 0), (["f1"], 11, 2, 0), (step, 5, 1, 0)]
    launches.columns.processes[0].ranges[2] = (RangeName("", "late"),)  # comes after the launches
    assert [names for names, *_ in sums(made)] == [[*step, "f1"], ["late", "f1"], step, ["f1"]]
    first = made.rows("time")[0]
    assert first.folded == "step;forward;f1;scale"
    assert profile_text.own_line(first.stack, 80) == "[step] > [forward] > f1"
    missing = first.stack._replace(complete=False)
    assert profile_text.own_line(missing, 80) == "[step] > [forward] > [incomplete] > f1"
    assert list(profile_text.all_frames(missing)) == [
        *("    step", "    forward (lib)", "    [incomplete]", "    f1"),
    ]


@pytest.mark.parametrize(
    ("vendor", "wave", "expected"),
    [
        (Vendor.NVIDIA, None, ("nvidia", 32)),
        (Vendor.AMD, 64, ("amd", 64)),
        (Vendor.AMD, None, ("amd", None)),  # no kernel was seen that says it
    ],
)
def test_the_vendor_does_not_follow_from_the_wave(
    vendor: Vendor, wave: int | None, expected: tuple[str, int | None]
) -> None:
    record = profile.STACK.record(row(stack("main"), vendor=vendor, wave=wave))
    assert (record["vendor"], record["wave"]) == expected


def sums(made: profile.Profile) -> list[tuple[list[str], int, int, int]]:
    rows = made.rows("time")
    return [([f.name for f in one.stack.frames], one.gpu_ns, one.launches, one.untimed) for one in rows]


def test_launches_by_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    made, whole = profile.Profile(), profile.Profile()
    # The last launch is in a graph, which the third one has launched.
    made.add(view([1, 2, 3, 1, 0], [100, 10, NONE, 50, 7], [-1, -1, -1, -1, 2]), np.array([0, 1, 3, 4]))
    expected = [(["f1"], 150, 2, 0), (["f2"], 10, 1, 0), (["f3"], 7, 1, 0)]
    assert sums(made) == expected
    made.add(view([2, 9], [NONE, 5]), np.arange(2))
    assert sums(made) == [expected[0], (["f2"], 10, 2, 1), expected[2], ([], 5, 1, 0)]
    for _ in range(2):
        whole.take(made)
    assert sums(whole)[0] == (["f1"], 300, 4, 0)
    monkeypatch.setattr(profile, "MOST_ROWS", 2)
    made = profile.Profile()
    made.add(view([1, 2, 3, 4], [50, 40, 30, 20]), np.arange(4))
    assert sorted(sums(made)) == [([], 50, 2, 0), (["f1"], 50, 1, 0), (["f2"], 40, 1, 0)]


@pytest.mark.parametrize("by", ["time", "launches"])
def test_a_log_with_any_times(tmp_path: Path, by: str) -> None:
    """The process chooses them. Files have numbers of 64 bits, and sums of NumPy would wrap to negative ones."""
    made, longest = profile.Profile(), profile.LONGEST
    times = [*[longest] * 3000, longest + 1, 2**63 - 1, -1, -(2**62), NONE]
    made.add(view([1] * len(times), times), np.arange(len(times)))
    assert sums(made) == [(["f1"], profile.MOST_NS, len(times), 5)]
    made = profile.Profile()
    made.add(view([1] * 1023, [longest] * 1022 + [7]), np.arange(1023))
    assert sums(made) == [(["f1"], 1022 * longest + 7, 1023, 0)]
    made.add(view([2] * 3, [-5, 2**62, 2**62]), np.arange(3))
    for form in profile_files.FORMS:
        profile_files.write(str(tmp_path / form), form, made.rows(by), by)
    assert samples_of(tmp_path / "pprof")[-1][1] == [3, 0]
    assert [value for _, value in fields_of(profile_files._field(1, -1))] == [2**64 - 1]


def test_sums_are_exact() -> None:
    values = [2**63 - 1, 2**63 - 1, -(2**63), -(2**63) + 1, 5, -7]
    for count in range(len(values) + 1):
        assert arrays.exact_sum(np.array(values[:count], np.int64)) == sum(values[:count])


def test_which_frames_are_the_programs_own() -> None:
    start = [Frame("_start", "/bin/app"), Frame("libc.so.6+0x27249", "/lib/libc.so.6")]
    own = [Frame("main", "/bin/app"), Frame("cublasGemm", "/lib/libcublas.so.13")]
    runtime = [
        Frame("__device_stub__Z5scalePfi", "/bin/app"),
        Frame("cudaLaunchKernel", "/bin/app"),
        Frame("libcuda.so.1+0x1234", "/lib/libcuda.so.1"),
    ]
    assert Stack((*start, *own, *runtime), True).own() == tuple(own)
    assert Stack((*own, *runtime), False).own() == tuple(own)
    assert Stack((*start, *runtime), True).own() == (*start, *runtime)  # nothing else is known


def test_the_interpreter_is_not_the_programs_own() -> None:
    told = [
        HostFrame(5, 0x40, "/lib/driver.cpython-311.so", ""),
        HostFrame(1, 0, "/lib/libffi.so.8", "ffi_call"),
        HostFrame(2, 0, "/opt/train.py", "Model.step", line=12, python=True),
        HostFrame(3, 0, "/bin/python3.11", "Py_RunMain"),
        HostFrame(4, 0, "/bin/python3.11", "_start"),
    ]
    made = Stack.of(told)
    assert made.own() == (Frame("Model.step", "/opt/train.py", 12, "python"),)
    assert symbols.frame_of(told[2]) == symbols.caller(told) == "Model.step (train.py:12)"
    assert len(Stack.of((*told[:2], *told[3:])).own()) == 3  # without _start: no frames of Python are known


def test_a_stack_that_does_not_fit_loses_its_middle() -> None:
    names = [f"function{number}" for number in range(40)]
    (line,) = (line for line in table_of(row(stack(*names))) if "scale" in line)
    assert line.endswith("function0 > ... > function38 > function39") and len(line) <= 80
    (line,) = (line for line in table_of(row(stack("main", "f" * 300))) if "scale" in line)
    assert len(line) <= 80 and "fff...fff" in line
    (line,) = (line for line in table_of(row(stack("main", *["climb"] * 30, "go"))) if "scale" in line)
    assert line.endswith("main > climb (30x) > go")


def test_shares_are_of_the_weight() -> None:
    rows = row(stack("a"), 3000, 1), row(stack("b"), 1000, 3)
    assert [line.split()[0] for line in table_of(*rows)[3:5]] == ["75.0", "25.0"]
    assert [line.split()[0] for line in table_of(*rows, by="launches")[3:5]] == ["25.0", "75.0"]
    assert any("unknown  " in line for line in table_of(row(stack("a"), 0, 2, untimed=2)))
    assert table_of()[0] == "no launches to show"


def test_names_cannot_break_a_line_of_folded_stacks() -> None:
    rows = [row(stack("main", "a;b\nc\x1b[2J")), row(stack("main", "a;b\nc\x1b[2J")), row(stack("x"), 0)]
    assert list(profile.folded_lines(rows, "time", False)) == ["main;a:b\\nc\\x1b[2J;scale 2000"]
    (line,) = profile.folded_lines([row(stack("main"), comm="a b;\n")], "launches", True)
    assert line == "a b:\\n (pid 7);main;scale 2"


@generated(30)
def test_a_generated_report(rng: random.Random, tmp_path: Path) -> None:
    words = [*KERNELS, *COMMS, "main", "n" * 300, "app::Model<int>::step", "operator()"]
    rows = [
        row(
            stack(*(rng.choice(words) for _ in range(rng.randrange(64))), complete=rng.random() < 0.8),
            rng.choice((0, 1, rng.randrange(10**15))),
            rng.randrange(1, 10**9),
            process=(process := rng.randrange(3)),
            pid=PIDS[process],
            comm=rng.choice(COMMS),
            gpu=rng.randrange(2),
            mangled=rng.choice(KERNELS),
        )
        for _ in range(rng.choice((0, 1, 40)))
    ]
    by = rng.choice(("time", "launches"))
    for line in profile_text.report(rows, by, OwnerColumns(), rng.choice((None, 3)), rng.random() < 0.5):
        assert len(line) <= 80 and line.isprintable(), line
    folded = list(profile.folded_lines(rows, by, True))
    assert sum(int(line.rpartition(" ")[2]) for line in folded) == sum(one.weight(by) for one in rows)
    assert all(line.isprintable() for line in folded)
    for form in profile_files.FORMS:
        profile_files.write(str(tmp_path / form), form, rows, by)
    made = json.loads((tmp_path / "speedscope").read_text())
    total = sum(one.weight(by) for one in rows)
    assert sum(one["endValue"] for one in made["profiles"]) == total
    assert sum(value[by == "time"] for _, value in samples_of(tmp_path / "pprof")) == total
    assert Counter(";".join(names) for names, _ in samples_of(tmp_path / "pprof")) == Counter(
        ";".join(frames_of(one)) for one in rows
    )
    ElementTree.parse(tmp_path / "svg")


def frames_of(one: StackRow) -> list[str]:
    names = [] if one.stack.complete else ["[incomplete]"]
    names += [frame.name for frame in one.stack.frames]
    return [table.printable(name) for name in (*names, KERNEL.value(one))]


def test_a_flame_graph(tmp_path: Path) -> None:
    long, evil = "n" * 300, "<script>&]]>\x00\ud800\n\"'"
    rows = [row(stack("main", long), 600), row(stack("main", evil), 400), row(stack("idle"), 0)]
    profile_files.write(str(tmp_path / "svg"), "svg", rows, "time")
    boxes = boxes_of(tmp_path / "svg")
    tips = {tip.splitlines()[0]: (tip, begin, end) for tip, begin, end in boxes}
    assert set(tips) == {"main", long, "<script>&]]>\\x00\\ud800\\n\"'", "scale"}
    assert tips["main"] == ("main\n1.00 us, 100.00 %\n/bin/app", 0, 1200)
    assert tips[long][0].splitlines()[1] == "600 ns, 60.00 %" and tips[long][1:] == (480, 1200)
    assert "<script>&" not in (tmp_path / "svg").read_text()
    # Two processes have a box each, and a box for a stack that is too small to see is left out.
    rows = [row(stack("main"), 10**9), row(stack("main"), 10**9, process=2, pid=8), row(stack("small"), 1)]
    profile_files.write(str(tmp_path / "svg"), "svg", rows, "time")
    named = [tip.splitlines()[0] for tip, _, _ in boxes_of(tmp_path / "svg")]
    assert named == ["app (pid 7)", "main", "scale", "app (pid 8)", "main", "scale"]
    profile_files.write(str(tmp_path / "svg"), "svg", [], "launches")
    assert boxes_of(tmp_path / "svg") == [] and "0 launches" in (tmp_path / "svg").read_text()


def test_an_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(
        Error, match=r"cannot write .*/absent/x: No such file or directory; choose another file"
    ):
        profile_files.write(str(tmp_path / "absent/x"), "svg", [], "time")

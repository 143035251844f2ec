"""Two measurements of one program (gpubpf diff)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

import gpubpf.__main__
from gpubpf.errors import Error
from gpubpf.query import difference, difference_records, views
from gpubpf_kept import TIMES, keep, some
from gpubpf_schema import declared, problems
from test_contract import TOOLS

pytest.importorskip("duckdb")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

SHAPE: dict[str, Any] = {"grid": [4, 1, 1], "block_dim": [64, 1, 1]}
KERNELS = {"gemm": 1e6, "softmax": 4e4, "copy": 5e3}  # and how long a launch takes, ns
Place = Callable[..., Path]


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Return a function that makes the records of `launchlate -v`, some runs of a program. Launches vary by 0.5 %, runs by 0.5 %."""
    start = tmp_path_factory.mktemp("template")
    keep(
        start,
        "launchlate",
        some("launchlate", "launch", pid=1, comm="app", latency_ns=1000, running=False, **SHAPE),
    )
    [template] = start.rglob("launch-*.parquet")
    one = parquet.read_table(template)
    where = template.relative_to(start).parent

    def make(seed: int, runs: int, slower: float = 1, launches: int = 60) -> Path:
        random = numpy.random.default_rng(seed)
        made = tmp_path_factory.mktemp("runs")
        (made / where).mkdir(parents=True)
        for run in range(runs):
            names = numpy.repeat([*KERNELS], launches)
            means = numpy.repeat([*KERNELS.values()], launches)
            means = numpy.where(names == "gemm", means * slower, means)
            of_run = numpy.repeat(random.normal(1, 0.005, len(KERNELS)), launches)
            times = means * of_run * random.normal(1, 0.005, len(names))
            times[random.random(len(names)) < 0.02] *= 10  # the host's pauses
            table = one.take([0] * len(names))
            for column, values in (
                ("kernel", names),
                ("exec_ns", times.astype("int64")),
                ("run", [f"run{run}"] * len(names)),
            ):
                at = table.schema.get_field_index(column)
                table = table.set_column(at, table.field(at), pyarrow.array(values, table.field(at).type))
            parquet.write_table(table, made / where / f"launch-run{run}-0000.parquet")
        return made

    return make


def compared(a: Path, b: Path, floor: float = 0.01) -> dict[tuple[str, str, str], str]:
    """Return the verdict for each kernel, place and measure."""
    with difference.compare([str(a)], [str(b)], floor) as database:
        rows = database.execute("SELECT kernel, place, measure, verdict FROM compared").fetchall()
    return {(kernel, place, measured): verdict for kernel, place, measured, verdict in rows}


def diff(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    capsys.readouterr()
    status = gpubpf.__main__.main(["diff", *map(str, words)])
    return status, capsys.readouterr().out


def records_of(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    """Return the records of --json. Each is as difference_records.py declares it."""
    schemas = {one.name: one.schema for one in difference_records.RECORDS}
    records = [json.loads(text) for text in diff(capsys, "--json", *words)[1].splitlines()]
    for one in records:
        assert not list(problems(schemas[one["type"]], one)), one
    return records


@pytest.mark.every(4)
@pytest.mark.parametrize("runs", [1, 5])
@pytest.mark.parametrize("pair", range(20))
def test_equal_runs_have_no_finding(pair: int, runs: int, measure: Place) -> None:
    a, b = measure(2 * pair, runs), measure(2 * pair + 1, runs)
    assert {*compared(a, b).values()} == {"same"}


@pytest.mark.parametrize("runs", [1, 5])
def test_a_regression_of_five_percent_is_found(
    runs: int, measure: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    for pair in range(3):
        verdicts = compared(measure(100 + pair, runs), measure(200 + pair, runs, slower=1.05))
        found = [key for key, verdict in verdicts.items() if verdict != "same"]
        assert found == [("gemm", "<<<4,64>>>", "GPU time")]
    a, b = measure(1, runs), measure(2, runs, slower=1.05)
    status, said = diff(capsys, a, b)
    lines = said.splitlines()
    assert (
        status == 0
        and lines[0] == "1 measure got worse, 0 got better; 5 of 6 measures are equal within the noise"
    )
    assert lines[2].split()[0] == "WORSE" and "gemm" in lines[3] and max(map(len, lines)) <= 80
    assert ("few runs:" in said) == (runs == 1)
    assert diff(capsys, "--fail-above", "3%", a, b)[0] == 1
    assert diff(capsys, "--fail-above", "9", a, b)[0] == 0
    assert diff(capsys, "--fail-above", "0", b, a)[0] == 0  # it got better
    assert diff(capsys, "--fail-above", "0", a, a)[0] == 0


def test_noise_hides_what_it_may_have_made(measure: Place) -> None:
    """One run of A is 5 % slower than its others: five percent are noise then."""
    a, b = measure(1, 2), measure(2, 2, slower=1.05)
    odd = measure(3, 1, slower=1.05)
    [file] = odd.rglob("*.parquet")
    target = next(a.rglob("launch-run0-*.parquet")).with_name("launch-odd-0000.parquet")
    table = parquet.read_table(file)
    at = table.schema.get_field_index("run")
    parquet.write_table(table.set_column(at, table.field(at), pyarrow.array(["odd"] * len(table))), target)
    assert {*compared(a, b).values()} == {"same"}


def test_memory_does_not_grow_with_the_launches(measure: Place) -> None:
    a = measure(1, 1, launches=200_000)
    with difference.compare([str(a)], [str(a)], 0.01, memory=128 << 20) as database:
        assert database.sql("SELECT DISTINCT verdict FROM compared").fetchall() == [("same",)]


def traffic(sectors: int, **more: Any) -> list[dict[str, Any]]:
    """Return records of memtrace about a kernel with one load."""
    site: dict[str, Any] = {"kernel": "step", "source": "step.cu:7", "op": "load", "space": "global"}
    site |= {"requests": 100, "sectors": sectors, "bank_ways": None, "standard_error": None, **more}
    return [
        some("memtrace", "site", **site),
        some("memtrace", "kernel", kernel="step", launches=2, sectors=sectors, sampled=None),
    ]


def test_counts_are_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path / "a", "memtrace", *traffic(400))
    keep(tmp_path / "b", "memtrace", *traffic(408))
    keep(tmp_path / "c", "memtrace", *traffic(402))
    line = ("step", "step.cu:7", "sectors per global load")
    assert compared(tmp_path / "a", tmp_path / "b")[line] == "worse"
    assert compared(tmp_path / "b", tmp_path / "a")[line] == "better"
    assert compared(tmp_path / "a", tmp_path / "c")[line] == "same"
    assert compared(tmp_path / "a", tmp_path / "c", 0)[line] == "worse"
    assert compared(tmp_path / "a", tmp_path / "b")["step", "step.cu:7", "global loads per launch"] == "same"
    assert diff(capsys, "--json", "--fail-above", "1", tmp_path / "a", tmp_path / "b")[0] == 1
    records = records_of(capsys, tmp_path / "a", tmp_path / "b")
    [found] = [one for one in records if one.get("measure") == line[2]]
    assert found | {"type": "difference", "a": 4.0, "b": 4.08, "noise": 0, "runs_a": 1, "unit": ""} == found
    assert round(found["change"], 9) == 0.02
    assert records[-1] == {
        "type": "summary", "worse": 2, "better": 0, "same": 1, "unknown": 0, "not_compared": 0
    }  # fmt: skip


def test_the_limit_of_failures_also_limits_what_is_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, sectors in (("a", 1000), ("b", 1008)):
        keep(tmp_path / name, "memtrace", *traffic(sectors))
    a, b = tmp_path / "a", tmp_path / "b"
    assert diff(capsys, a, b)[1].startswith("no finding")
    assert diff(capsys, "--fail-above", "0.5", a, b)[0] == 1
    assert diff(capsys, "--fail-above", "0.9", a, b)[0] == 0


def test_the_time_limit_holds_while_records_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first statement would not end."""
    keep(tmp_path, "memtrace", *traffic(1))
    monkeypatch.setattr(
        views,
        "statements",
        lambda path: iter([("", "SELECT count(*) FROM range(1000000000000) AS a, range(1000000) AS b")]),
    )
    with pytest.raises(SystemExit) as ended:
        gpubpf.__main__.main(["diff", "--timeout", "0.2", str(tmp_path), str(tmp_path)])
    assert ended.value.code == 1 and "longer than --timeout" in capsys.readouterr().err


def test_an_error_leaves_an_older_file(tmp_path: Path, measure: Place) -> None:
    keep(tmp_path / "a", "memtrace", *traffic(1))
    file = tmp_path / "old.txt"
    file.write_text("old")
    with pytest.raises(SystemExit):
        gpubpf.__main__.main(["diff", "-o", str(file), str(tmp_path / "a"), str(measure(1, 1))])
    assert file.read_text() == "old"


def test_long_names_leave_lines_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NOISE is left out first if all is exact, so that the place stays readable."""
    long = "void cutlass::device_kernel<" + "cute::tuple<int,int>," * 9
    for name, ns in (("a", 100), ("b", 200)):
        more = [{"kernel": f"{long}{name}{number}>"} for number in range(12)]
        launches = [
            some("launchlate", "launch", exec_ns=ns, latency_ns=1, clock_error_ns=0, **SHAPE, **one)
            for one in ({"kernel": f"{long}step>"}, *more)
            for _ in range(9)
        ]
        summary = some("launchlate", "summary", tool="launchlate", device="sim", sampling=None)
        keep(tmp_path / name, "launchlate", summary, *launches)
    said = diff(capsys, tmp_path / "a", tmp_path / "b")[1]
    lines = said.splitlines()
    assert max(map(len, lines)) <= 80 and "<<<4,64>>>" in lines[3]
    assert said.count("not compared") == 2 and "and 4 more" in " ".join(said.split())


def test_a_value_that_was_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lost in (("a", 0), ("b", 30)):
        keep(
            tmp_path / name,
            "warpdiv",
            some("warpdiv", "summary", tool="warpdiv", device="gpu", sampling=None),
            some("warpdiv", "kernel", kernel="step", launches=1, instructions=0),
            some("warpdiv", "branch", kernel="step", source="step.cu:9", lost=lost),
        )
    status, said = diff(capsys, "--fail-above", "900%", tmp_path / "a", tmp_path / "b")
    assert status == 1 and " new " in said and "step.cu:9" in said


def divergence(directory: Path, one_in: int | None, lost: int) -> Path:
    """Keep the records of warpdiv about one kernel. one_in: the share of blocks that were sampled; None: all."""
    keep(
        directory,
        "warpdiv",
        some(
            "warpdiv",
            "summary",
            tool="warpdiv",
            device="sim",
            sampling=one_in and {"unit": "block", "one_in": one_in, "seed": lost},
        ),
        some(
            "warpdiv", "kernel", kernel="step", launches=1, instructions=100, lane_instructions=lost, wave=32
        ),
        some("warpdiv", "branch", kernel="step", source="step.cu:9", lost=lost),
    )
    return directory


def test_a_sample_of_counts_is_not_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts of sampled blocks depend on which blocks were chosen, and are those of these blocks alone."""
    a, b = divergence(tmp_path / "a", 8, 1000), divergence(tmp_path / "b", 8, 2000)
    assert {*compared(a, b).values()} == {"unknown"}
    for place in (a, b):  # three runs more; those of a measurement choose the same blocks
        for _ in range(3):
            divergence(place, 8, 1000 if place == a else 2000)
    assert {*compared(a, b).values()} == {"unknown"}
    other = divergence(tmp_path / "other", None, 8000)
    assert compared(a, other) == {("step", "", "efficiency of warps"): "unknown"}
    text = " ".join(diff(capsys, a, other)[1].split())
    assert "different sampling: warpdiv's lane-instructions per launch of step" in text


def test_counts_of_sampled_launches_are_compared_with_such(tmp_path: Path) -> None:
    """Launches of a kernel may differ, so the mean of each third launch is not the mean of all."""
    for name, sectors, left_out in (("all", 400, 0), ("third", 800, 6), ("third, too", 800, 6)):
        counts: dict[str, Any] = {"launches_matched": 9, "not_instrumented": {"sampled out": left_out}}
        summary = some("memtrace", "summary", tool="memtrace", device="sim", sampling=None, **counts)
        keep(tmp_path / name, "memtrace", *traffic(sectors), summary)
    with pytest.raises(Error, match="no measure in common"):
        compared(tmp_path / "all", tmp_path / "third")
    assert {*compared(tmp_path / "third", tmp_path / "third, too").values()} == {"same"}


def launched(directory: Path, *exec_ns: int, device: str = "sim", **more: Any) -> Path:
    """Keep the records of `launchlate -v` about launches of one kernel."""
    launch: dict[str, Any] = SHAPE | {"latency_ns": 1000, "clock_error_ns": 0} | more
    keep(
        directory,
        "launchlate",
        some("launchlate", "summary", tool="launchlate", device=device, sampling=None),
        *(some("launchlate", "launch", kernel="step", exec_ns=ns, **launch) for ns in exec_ns),
        kernel_of(*exec_ns),
    )
    return directory


def kernel_of(*exec_ns: int, **more: Any) -> dict[str, Any]:
    """Return the kernel record of launchlate about some launches."""
    times = TIMES | {"mean": sum(exec_ns) / len(exec_ns)}
    names = {"kernel": "step", "mangled": "_Z4stepv", "demangled": "step()"}
    return some(
        "launchlate",
        "kernel",
        **names | {"count": len(exec_ns), "exec_ns": times, "clock_error_ns": 0} | more,
    )


def test_launches_are_not_compared_with_the_mean_of_a_kernel(tmp_path: Path) -> None:
    """A few launches are very slow: the mean of all is not the mean without the slowest and fastest tenth."""
    times = [100] * 19 + [100_000]
    a = launched(tmp_path / "a", *times)
    keep(tmp_path / "b", "launchlate", kernel_of(*times))
    for pair in ((a, tmp_path / "b"), (tmp_path / "b", a), (tmp_path / "b", tmp_path / "b")):
        assert compared(*pair) == {("step", "", "GPU time"): "unknown"}
    assert {*compared(a, a)} == {("step", "<<<4,64>>>", "GPU time"), ("step", "<<<4,64>>>", "launch latency")}


def test_instances_of_a_template_are_compared_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One instance became slower and the other one faster, so the mean of all launches is the same."""
    for name, of_float, of_double in (("a", 100, 200), ("b", 200, 100)):
        for _ in range(2):
            keep(
                tmp_path / name,
                "launchlate",
                some("launchlate", "summary", tool="launchlate", device="sim", sampling=None),
                kernel_of(of_float, mangled="_Z4stepIfEvv", demangled="void step<float>()"),
                kernel_of(of_double, mangled="_Z4stepIdEvv", demangled="void step<double>()"),
                *(
                    some("launchlate", "launch", kernel="step", exec_ns=ns, latency_ns=1, **SHAPE)
                    for ns in (of_float, of_double)
                ),
            )
    assert compared(tmp_path / "a", tmp_path / "b") == {
        ("void step<float>()", "", "GPU time"): "worse",
        ("void step<double>()", "", "GPU time"): "better",
    }
    text = " ".join(diff(capsys, tmp_path / "a", tmp_path / "b")[1].split())
    assert "in A, launchlate does not say which instance a launch is of (step)" in text


def test_a_kernel_with_other_arguments_is_compared(tmp_path: Path) -> None:
    for name, mangled in (("a", "_Z4stepi"), ("b", "_Z4stepii")):
        keep(tmp_path / name, "launchlate", kernel_of(5, mangled=mangled))
    assert {*compared(tmp_path / "a", tmp_path / "b")} == {("step", "", "GPU time")}


def test_all_launches_are_compared_if_shapes_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = launched(tmp_path / "a", *[100] * 20)
    b = launched(tmp_path / "b", *[200] * 20, grid=[8, 1, 1])
    assert compared(a, b)["step", "", "GPU time"] == "worse" and len(compared(a, b)) == 2
    text = " ".join(diff(capsys, a, b)[1].split())
    assert "only A has launchlate's GPU time and launch latency of step (<<<4,64>>>)" in text


def test_a_tick_of_the_clock_is_noise(tmp_path: Path) -> None:
    a = launched(tmp_path / "a", *[1024] * 20, device="gpu", clock_error_ns=32)
    for name, ns, verdict in (("b", 1056, "same"), ("c", 1088, "worse")):
        other = launched(tmp_path / name, *[ns] * 20, device="gpu", clock_error_ns=32)
        assert compared(a, other)["step", "<<<4,64>>>", "GPU time"] == verdict
    times = launched(tmp_path / "d", *[10] * 20), launched(tmp_path / "e", *[11] * 20)
    assert compared(*times)["step", "<<<4,64>>>", "GPU time"] == "worse"  # virtual time is exact


def test_what_cannot_be_compared_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "<script>\x1b[31m"
    for name, kernel, device, lost in (("a", "old", "gpu", 0), ("b", hostile, "sim", 3)):
        keep(
            tmp_path / name,
            "launchlate",
            *(
                some("launchlate", "kernel", kernel=one, count=1, exec_ns=TIMES | {"mean": 5.0})
                for one in ("step", kernel)
            ),
            some(
                "launchlate",
                "summary",
                tool="launchlate",
                device=device,
                lost=lost,
                not_instrumented={"no PTX": 2} if lost else {},
            ),
        )
        keep(
            tmp_path / name,
            "threadhist",
            *([some("threadhist", "kernel", work=1, launches=1, **SHAPE)] * (name == "b")),
        )
    status, said = diff(capsys, "--fail-above", "1", tmp_path / "a", tmp_path / "b")
    text = " ".join(said.split())
    assert status == 0 and "\x1b" not in said and max(map(len, said.splitlines())) <= 80
    for part in (
        "no finding; 0 of 1 measure is equal",
        "unknown: 1 measure (launchlate: GPU time): so few runs do not show the noise",
        "not compared: only A has launchlate's GPU time of old",
        r"not compared: only B has launchlate's GPU time of <script>\x1b[31m",
        "not compared: only B has threadhist's",
        "differs: device: a GPU in A, an embedded device in B",
        "incomplete: in B, launchlate lost 3 records",
        "incomplete: in B, launchlate did not measure 2 launches (no PTX)",
        "times say nothing about a GPU",
    ):
        assert part in text, part
    records = records_of(capsys, tmp_path / "a", tmp_path / "b")
    assert {one["type"] for one in records} == {one.name for one in difference_records.RECORDS}
    assert {one["side"] for one in records if one["type"] == "not_compared"} == {"a", "b"}
    assert sum(one["missing"] for one in records if one["type"] == "condition") == 2


def test_every_statement_works(tmp_path: Path) -> None:
    """A statement with a mistake would be left out like one whose records are missing."""
    for tool in TOOLS:
        keep(tmp_path, tool, *(some(tool, one.name) for one in declared(tool)))
    with views.opened() as database:
        views.add_records(database, [str(tmp_path)])
        database.execute("CREATE TABLE several (kernel VARCHAR, mangled VARCHAR, name VARCHAR)")
        for name in ("instances.sql", "measures.sql", "conditions.sql"):
            for view, statement in views.statements(f"{Path(difference.__file__).parent}/{name}"):
                assert database.execute(statement), view


def test_refusals(tmp_path: Path, measure: Place, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path / "a", "memtrace", *traffic(1))
    keep(tmp_path / "none", "memtrace", some("memtrace", "unallocated"))
    for words, status, said in (
        ((tmp_path / "a", tmp_path / "none"), 1, "none has no records that can be compared; measure with"),
        ((tmp_path / "a", measure(1, 1)), 1, "no measure in common"),
        ((tmp_path / "a", tmp_path / "b"), 2, "is not a directory"),
        ((tmp_path / "a",), 2, "required: B"),
        (("--fail-above", "-1", tmp_path / "a", tmp_path / "a"), 2, "percentage"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            gpubpf.__main__.main(["diff", *map(str, words)])
        shown = capsys.readouterr()
        assert ended.value.code == status and said in shown.err and shown.out == ""

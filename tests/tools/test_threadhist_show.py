"""What threadhist prints, from counts made up here: every number in the output is known."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import manpages

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tools"))

import threadhist  # noqa: E402
from gpubpf.records.results import Instance as SessionInstance  # noqa: E402
from gpubpf.show import cli  # noqa: E402
from gpubpf.show.option_values import EVERYTHING  # noqa: E402
from gpubpf.show.owner_columns import OwnerColumns  # noqa: E402
from gpubpf.threads.thread_counts import Reader  # noqa: E402
from gpubpf.threads.thread_records import ThreadViews  # noqa: E402

FIELDS = manpages.page("threadhist").split(".SH FIELDS")[1].split(".SH EXAMPLES")[0]
SUMMARY = {
    "type": "summary",
    "tool": "threadhist",
    "device": "sim",
    "launches_seen": 30,
    "launches_matched": 25,
    "launches_instrumented": 23,
    "not_instrumented": {"capture": 2},
    "lost": 0,
    "duration_ns": 5,
}


@dataclass
class Instance:
    grid: tuple
    block_dim: tuple
    array: np.ndarray
    launches: int = 23
    pid: int = 1234
    comm: str = "vectoradd"
    gpu: int = 0
    kernel: str = "vectorAdd"
    demangled: str = "vectorAdd(float const*, float const*, float*, int)"
    mangled: str = "_Z9vectorAddPKfS0_Pfi"
    registers_before: int | None = 12
    registers_after: int | None = 16
    spilled: int = 0
    wave: int | None = None
    process: int = 1
    idle: bool = True
    waits: bool = False

    shape = SessionInstance.shape


def instance(work, grid=(1, 1, 1), runs=23, **changed):
    work = np.asarray(work, dtype=np.uint64)
    array = np.zeros((1, work.size), dtype=[("runs", "<u8"), ("work", "<u8")])
    array["runs"], array["work"] = runs, work.ravel()
    block_dim = changed.pop("block_dim", (work.size // int(np.prod(grid)), 1, 1))
    return Instance(grid, block_dim, array, **changed)


@pytest.fixture
def show(tmp_path):
    def shown(*argv, instances, before=None, several=False):
        args = cli.parse(threadhist.build_parser(), argv)
        session = SimpleNamespace(
            stopped=True,
            instances=lambda name: instances if name == "tallies" else [],
            summary=lambda: dict(SUMMARY),
        )
        out = cli.Output(str(tmp_path / "out"))
        found = (before or Reader(args.block, args.thread, bool(args.interval))).read(session)
        results = cli.ResultWriter(cli.Options.of(args).output, out)
        threadhist.report(
            found,
            OwnerColumns(several),
            cli.group(ThreadViews, args),
            results,
        )
        results.end(session.summary())
        text = (tmp_path / "out").read_text()
        return [json.loads(line) for line in text.splitlines()] if args.json else text

    return shown


FIVE = [92, 92, 92, 92, 69]


def test_the_finding_comes_before_the_rows(show):
    text = show("--work", "stores", instances=[instance(FIVE)])
    lines = text.splitlines()
    assert lines[0] == "vectorAdd: stores per thread"
    finding = next(n for n, line in enumerate(lines) if "thread 4 did 25 % less than the others" in line)
    rows = [line.split()[:5] for line in lines if re.match(r"\s+\S+ +23 ", line)]
    assert rows == [["0-3", "23", "92", "105", "%"], ["4", "23", "69", "79", "%"]]
    assert finding < lines.index(next(line for line in lines if line.startswith("THREAD")))
    assert "23 launches, 5 threads" in text and "imbalance 1.05" in text
    assert "84 % have no thread" in text and "multiple of 32" in text
    assert "not counted: 2 (capture)" in text


@pytest.mark.parametrize("wave", [32, 64])
def test_the_waves_of_an_amd_gpu(show, wave):
    """A wave has 32 or 64 lanes, and is called a wave."""
    text = show(instances=[instance([4] * 60 + [1] * 36, wave=wave, block_dim=(96, 1, 1))])
    if wave == 64:
        assert "idle lanes: 10 % have no thread, 4 % wait for the busiest lane of their wave" in text
        assert "blocks of 96 leave 32 of a wave's 64 lanes empty: use a multiple of 64" in text
    else:
        assert "wait for the busiest lane of their wave" in text and "multiple of" not in text
    waves = show("--by", "warp", instances=[instance([4] * 64 + [1] * 32, wave=wave, block_dim=(96, 1, 1))])
    assert "instructions per wave" in waves and "warp" not in waves.replace("WARP", "")
    assert f"wave {96 // wave - (wave == 32)}" in waves


@pytest.mark.every(2)
@pytest.mark.parametrize("by", ["thread", "lane", "warp", "block"])
@pytest.mark.parametrize("work", [FIVE, np.arange(4096) ** 2, [2**63] * 64], ids=["few", "many", "huge"])
def test_nothing_is_wider_than_a_terminal(show, by, work):
    grid = (1, 1, 1) if len(work) < 32 else (2, 1, 1)
    text = show(
        "--by", by, "--work", "instructions", instances=[instance(work, grid, kernel="n::" + "k" * 300)]
    )
    assert max(map(len, text.splitlines())) <= 80


def test_processes_and_gpus_have_columns(show):
    work = np.arange(64) * 10**16
    made = [instance(work, pid=4194304 - n, comm="a" * 15, gpu=n % 2, kernel="k" * 30) for n in range(12)]
    text = show(instances=made)
    heads = [line.split() for line in text.splitlines() if line.lstrip().startswith("PID")]
    assert heads[0][:4] == ["PID", "COMM", "GPU", "KERNEL"] and heads[1][:4] == [
        "PID",
        "COMM",
        "GPU",
        "THREAD",
    ]
    assert max(map(len, text.splitlines())) <= 80
    overview = text.split("\n\n")[1].splitlines()
    assert sorted(row.split()[0] for row in overview[1:13]) == [str(4194304 - n) for n in range(11, -1, -1)]
    assert {row.split()[5] for row in overview[1:13]} == {"64"}  # threads: nothing is added up
    assert text.count("aaaaaaa (pid ") == 8 and "the 8 with the most instructions" in overview[-1]
    assert show("-v", instances=made).count("aaaaaaa (pid ") == 12
    alone = show(instances=[instance(FIVE)])
    assert "PID" not in alone and "GPU" not in alone
    assert "PID" in show(instances=[instance(FIVE)], several=True)


def test_shapes_of_one_kernel_are_told_apart(show):
    made = [
        instance(FIVE, pid=pid, grid=(n, 1, 1), block_dim=(5 // n, 1, 1)) for pid in (1, 2) for n in (1, 5)
    ]
    rows = show(instances=made).split("\n\n")[1].splitlines()
    assert [row.split()[3] for row in rows] == ["GRID:BLOCK", "1:5", "5:1", "1:5", "5:1"]


def test_kernels_of_one_name_are_told_apart(show):
    made = [instance(FIVE, kernel="scale", mangled=f"_Z5scaleI{type}EviT_") for type in "fd"]
    titles = [line for line in show(instances=made).splitlines() if line.startswith("scale")]
    assert titles == [f"scale<{name}>(int, {name}): instructions per thread" for name in ("float", "double")]
    assert show(instances=made[:1]).startswith("scale: instructions")


def test_many_threads_are_a_histogram_with_the_ends_named(show):
    work = np.full(1024, 100)
    work[700], work[3] = 9000, 1
    text = show(instances=[instance(work, (4, 1, 1))])
    assert re.search(r"64 -> 127 +: 1022 ", text) and re.search(r"8192 -> 16383 +: 1 ", text)
    assert re.search(r"^ *2 +188 +23 +9,000 ", text, re.MULTILINE)
    assert re.search(r"^ *0 +3 +23 +1 ", text, re.MULTILINE)


def test_top_shows_the_busiest(show):
    records = show("--json", "--top", "2", instances=[instance([5, 9, 1, 7])])
    assert [record["thread"] for record in records if record["type"] == "thread"] == [[1, 0, 0], [3, 0, 0]]
    text = show("--top", "2", instances=[instance([5, 9, 1, 7])])
    assert len(re.findall(r"^ +\d+ +23 ", text, re.MULTILINE)) == 2


def test_of_very_large_grids_only_some_threads_are_written(show, monkeypatch, capsys):
    monkeypatch.setattr("gpubpf.threads.thread_records.MOST_RECORDS", 4)
    large = [
        instance([5, 9, 1, 7, 7, 3, 2, 8], grid=(2, 1, 1)),
        instance(FIVE[:4], mangled="_Z5otherv", kernel="other"),
    ]

    def written(*argv):
        records = show(*argv, instances=large)
        kernels = [record for record in records if record["type"] == "kernel"]
        threads = [r for r in records if r["type"] == "thread" and r["kernel"] == "vectorAdd"]
        assert len(threads) == next(k["thread_records"] for k in kernels if k["kernel"] == "vectorAdd")
        assert {k["kernel"]: (k["threads"], k["thread_records"]) for k in kernels}["other"][0] == 4
        return [record["work"] for record in threads], capsys.readouterr().err, records

    works, notice, records = written("--json")
    assert works == [9, 8, 7, 7]
    assert notice == (
        "threadhist: note: vectorAdd: wrote only the 4 of 8 threads with the most work; "
        "add up all with --by warp or --by block, or write all with --all-threads\n"
    )
    kernel = next(r for r in records if r["type"] == "kernel" and r["kernel"] == "vectorAdd")
    assert (kernel["work"], kernel["selected"]) == (42, 8)
    assert sum(record["type"] == "thread" and record["kernel"] == "other" for record in records) == 4
    assert written("--json", "--all-threads")[:2] == ([5, 9, 1, 7, 7, 3, 2, 8], "")
    assert written("--json", "--top", "6")[:2] == ([9, 8, 7, 7, 5, 3], "")
    works, notice, records = written("--json", "--by", "block")
    assert (works, notice) == (
        [],
        "threadhist: note: vectorAdd: no records of its 8 threads; --all-threads writes them\n",
    )
    assert [r["work"] for r in records if r["type"] == "block" and r["kernel"] == "vectorAdd"] == [22, 20]
    text = show("--csv", instances=large)
    assert len(text.splitlines()) == 1 + 4 + 4 and "wrote only the 4 of 8" in capsys.readouterr().err
    show("--csv", "--by", "block", instances=large)
    show(instances=large)
    assert not capsys.readouterr().err


def test_json_has_every_thread_then_the_kernel_then_the_summary(show):
    records = show("--json", "--work", "stores", instances=[instance(FIVE)])
    assert [record["type"] for record in records] == ["thread"] * 5 + ["kernel", "summary"]
    assert records[4] == {
        "type": "thread",
        "pid": 1234,
        "comm": "vectoradd",
        "gpu": 0,
        "vendor": "nvidia",
        "wave": 32,
        "kernel": "vectorAdd",
        "grid": [1, 1, 1],
        "block_dim": [5, 1, 1],
        "block": [0, 0, 0],
        "thread": [4, 0, 0],
        "runs": 23,
        "work": 69,
    }
    kernel = records[5]
    assert (kernel["launches"], kernel["threads"], kernel["runs"], kernel["work"]) == (23, 5, 115, 437)
    assert kernel["imbalance"] == pytest.approx(92 / 87.4, abs=1e-6)
    assert kernel["work_kind"] == "stores" and kernel["registers"] == {"before": 12, "after": 16}
    assert kernel["demangled"].endswith("int)") and kernel["mangled"] == "_Z9vectorAddPKfS0_Pfi"
    assert records[6] == SUMMARY


def test_identity_in_three_dimensions(show):
    made = instance(np.arange(2 * 3 * 2 * 4 * 2 * 2), (2, 3, 2), block_dim=(4, 2, 2))
    records = [record for record in show("--json", instances=[made]) if record["type"] == "thread"]
    for number, record in enumerate(records):
        (bx, by, bz), (tx, ty, tz) = record["block"], record["thread"]
        assert number == ((bz * 3 + by) * 2 + bx) * 16 + (tz * 2 + ty) * 4 + tx == record["work"]


def test_a_choice_of_no_thread_is_said(show, capsys):
    made = instance(np.arange(64), (2, 1, 1))
    lines = show("--block", "9", instances=[made]).splitlines()
    assert lines[1:4] == [
        "  grid 2 x 1 x 1, block 32 x 1 x 1; vectoradd (pid 1234)",
        "  no thread of this grid matches --block and --thread",
        "",
    ]
    records = show("--json", "--block", "9", instances=[made])
    assert (records[0]["threads"], records[0]["selected"], records[0]["runs"]) == (64, 0, 0)
    assert "grid 2 x 1 x 1, block 32 x 1 x 1: no thread" in capsys.readouterr().err


def test_threads_that_were_not_chosen_are_left_out(show):
    made = instance(np.arange(64), (2, 1, 1))
    records = show("--json", "--block", "1", "--thread", "2:3", instances=[made])
    assert [(record["block"], record["thread"]) for record in records if record["type"] == "thread"] == [
        ([1, 0, 0], [2, 0, 0]),
        ([1, 0, 0], [3, 0, 0]),
    ]
    assert (records[-2]["threads"], records[-2]["selected"]) == (64, 2) and records[-2]["idle_lanes"] is None


@pytest.mark.parametrize(
    ("by", "first"),
    [("lane", {"lane": 0}), ("warp", {"block": [0, 0, 0], "warp": 0}), ("block", {"block": [0, 0, 0]})],
)
def test_groups_have_records_of_their_own(show, by, first):
    records = show("--json", "--by", by, instances=[instance(np.ones(128), (2, 1, 1))])
    groups = [record for record in records if record["type"] == by]
    assert len(groups) == {"lane": 32, "warp": 4, "block": 2}[by]
    assert first.items() <= groups[0].items() and groups[0]["work"] == groups[0]["threads"]
    assert sum(record["type"] == "thread" for record in records) == 128


def test_an_interval_shows_what_is_new(show):
    before = Reader(*2 * ((EVERYTHING,) * 3,), since_last=True)
    made = instance(FIVE)
    assert show("1", "--json", instances=[made], before=before)[-2]["work"] == sum(FIVE)
    assert [record["type"] for record in show("1", "--json", instances=[made], before=before)] == ["summary"]
    made = instance(np.array(FIVE) + 4, runs=24, launches=24)
    records = show("1", "--json", instances=[made], before=before)
    assert (records[-2]["work"], records[-2]["launches"], records[0]["runs"]) == (20, 1, 1)


def test_csv_is_the_table(show):
    text = show("--csv", instances=[instance(FIVE, mangled="a,b")])
    lines = text.splitlines()
    assert lines[5] == '1234,vectoradd,0,"a,b",1,1,1,5,1,1,0,0,0,4,0,0,23,69,"a,b"'
    assert len(lines) == 6 and lines[0].count(",") == 18
    for by in ("lane", "warp", "block"):
        header, *rows = show("--csv", "-T", "--by", by, instances=[instance(FIVE)]).splitlines()
        assert all(row.count(",") == header.count(",") for row in rows)
        assert set(header.split(",")) <= set(re.findall(r"\w+", FIELDS))
        assert header.startswith("ts_ns,pid,") and int(rows[0].split(",")[0]) > 0


def test_every_field_and_column_is_in_the_man_page(show):
    words = set(re.findall(r"\w+", re.sub(r"\\f[BRIP]", "", FIELDS)))
    for by in ("thread", "lane", "warp", "block"):
        for record in show("--json", "-T", "--by", by, instances=[instance(np.ones(64), (2, 1, 1))]):
            assert {record["type"], *record} - {"type"} <= words
        header = (
            show("--by", by, instances=[instance(np.ones(16), (2, 1, 1))]).split("\n\n")[1].splitlines()[0]
        )
        assert set(re.findall(r"[A-Z]+", header)) <= words


def test_names_that_targets_chose_are_escaped(show):
    made = instance(FIVE, mangled="\x1b[2J", comm="a\nb", demangled="\x1b]0;")
    assert "\x1b" not in show(instances=[made]) and "\x1b" not in show("-v", instances=[made])
    assert "\x1b" not in show("--csv", instances=[made])
    assert show("--json", instances=[made])[0]["kernel"] == "\x1b[2J"


def test_runs_are_not_estimated_from_a_sample(capsys: pytest.CaptureFixture[str]) -> None:
    """What is summed over a sample's blocks is work; a thread's runs are not part of it."""
    with pytest.raises(SystemExit) as ended:
        threadhist.main(["--work", "runs", "--sample-warps", "1/4", "--", "true"])
    assert ended.value.code == 2
    assert "--work runs counts how often threads run, which a sample does not show" in capsys.readouterr().err

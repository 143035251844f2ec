"""One HTML page about the records that tools kept (gpubpf report)."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

import gpubpf.__main__
from gpubpf.errors import Error
from gpubpf.query import views
from gpubpf.report import facts
from gpubpf.report.sources import Sources
from gpubpf_kept import keep, some
from gpubpf_schema import declared
from test_contract import TOOLS

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")

HOSTILE = "</script><script>document.title='taken'</script>\x1b[31m\u202e<img src=x onerror=alert(1)>"
SHAPE: dict[str, Any] = {"grid": [2, 1, 1], "block_dim": [4, 1, 1]}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Some launches of a kernel with a hostile name, memory traffic, an uneven kernel, and a lost launch."""
    runs = tmp_path / "runs"
    launch: dict[str, Any] = {"kernel": HOSTILE, "exec_ns": 100, "latency_ns": 50, "running": False}
    keep(
        runs,
        "launchlate",
        *(
            some("launchlate", "launch", **launch, launch=at, start_ns=1000 * at, end_ns=1000 * at + 100)
            for at in range(20)
        ),
        some(
            "launchlate",
            "summary",
            tool="launchlate",
            device="gpu",
            lost=0,
            not_instrumented={"no PTX": 3},
        ),
    )
    site: dict[str, Any] = {"op": "load", "space": "global", "pattern": "stride 8", "standard_error": None}
    keep(
        runs,
        "memtrace",
        some(
            "memtrace",
            "site",
            **site,
            kernel="step",
            source="step.cu:2",
            requests=10,
            sectors=80,
            sectors_least=10,
            wasted_bytes=2240,
            bank_ways=None,
        ),
        some(
            "memtrace", "kernel", kernel="step", sectors=80, sectors_least=10, wasted_bytes=2240, launches=1
        ),
    )
    keep(
        runs,
        "threadhist",
        some("threadhist", "kernel", kernel="uneven", imbalance=2.0, work=96, work_kind="loads", **SHAPE),
        *(
            some(
                "threadhist",
                "thread",
                kernel="uneven",
                block=[block, 0, 0],
                thread=[thread, 0, 0],
                work=8 * thread,
                **SHAPE,
            )
            for block in range(2)
            for thread in range(4)
        ),
    )
    return runs


@pytest.fixture
def source(tmp_path: Path) -> Path:
    place = tmp_path / "src/below"
    place.mkdir(parents=True)
    (place / "step.cu").write_text("__global__ void step() {\n\tx[i] = <b>;\x1b\n}\n")
    return tmp_path / "src"


def report(*words: object) -> int:
    return gpubpf.__main__.main(["report", *map(str, words)])


def test_facts(kept: Path, source: Path) -> None:
    found = facts.gather([str(kept)], [str(source)])
    assert [(one["tool"], one["kernel"], one["source"]) for one in found["findings"]] == [
        ("launchlate", None, None),
        ("memtrace", "step", "step.cu:2"),
        ("threadhist", "uneven", None),
    ]
    assert "no kernel of the program for 90 %" in found["findings"][0]["finding"]
    assert found["findings"][1]["finding"] == (
        "its loads move 2.19 KB in vain, 8 times what contiguous lanes need (stride 8): 87.5 % of the kernel's traffic"
    )
    assert [one["weight"] for one in found["findings"]] == pytest.approx([0.9, 0.875, 0.5], abs=0.01)
    [kernel] = [one for one in found["kernels"] if one.get("launches") == 20]
    assert (kernel["gpu_ns"], kernel["mean_ns"], kernel["latency_ns"]) == (2000, 100, 50)
    assert kernel["kernel"].endswith(r"\x1b[31m\u202e<img src=x onerror=alert(1)>")
    assert sum(one["ns"] for one in found["moments"]) == 2000
    assert sum(one["launches"] for one in found["latencies"]) == 20
    assert [(one["y"], one["x"], one["work"]) for one in found["threads"]] == [
        (block, thread, 8 * thread) for block in range(2) for thread in range(4)
    ]
    assert found["missing"] == [{"tool": "launchlate", "reason": "no PTX", "launches": 3, "runs": 1}]
    [file] = found["files"]
    assert file["text"] == ["__global__ void step() {", "    x[i] = <b>;\\x1b", "}", ""]
    assert [one["wasted_bytes"] for one in file["facts"]["2"]] == [2240]
    assert found["left_out"] == {}


def test_the_page_has_everything_inside_and_names_are_no_html(kept: Path, tmp_path: Path) -> None:
    assert report(kept, "-o", tmp_path / "page.html", "--title", HOSTILE) == 0
    page = (tmp_path / "page.html").read_text()
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    allowed = re.findall(r"'sha256-([^']+)'", page)
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    rest = re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.S)
    assert allowed == hashes and len(hashes) == 3 and "default-src 'none'" in rest
    assert re.findall(r"<script|<link|<img|<iframe|<base|<[a-z]+ [^>]*src=|\x1b|@\w+@", rest) == [
        "<script"
    ]  # the facts
    assert page.count("Permission is hereby granted") == 2  # the licences of uPlot and Tabulator
    [packed] = re.findall(r'id="facts">([^<]*)<', page)
    assert json.loads(zlib.decompress(base64.b64decode(packed)))["kernels"]


def launchlate_run(place: Path, launches: int, *, single: bool, **name: str | None) -> None:
    """Keep a run of launchlate with some launches of 100 ns. single: with -v."""
    told: dict[str, Any] = {"kernel": "k", "pid": 1, "exec_ns": 100, "latency_ns": 50, "running": False}
    times = dict.fromkeys(("mean", "p50", "p99", "max"), 100)
    keep(
        place,
        "launchlate",
        *(
            some("launchlate", "launch", **told, launch=at, start_ns=1000 * at, end_ns=1000 * at + 100)
            for at in range(launches if single else 0)
        ),
        some(
            "launchlate", "kernel", **told | name | {"count": launches, "exec_ns": times, "latency_ns": times}
        ),
    )


def test_sums_are_over_all_runs(tmp_path: Path) -> None:
    """Also if launches were kept in one run and not in another, or another tool saw the kernel in its own run."""
    name = {"mangled": "_Z1kPf", "demangled": "k(float*)"}
    launchlate_run(tmp_path, 10, single=True, **name)
    launchlate_run(tmp_path, 20, single=False, **name)
    launchlate_run(tmp_path, 30, single=True, **name)
    [kernel] = facts.gather([str(tmp_path)])["kernels"]
    assert (kernel["launches"], kernel["gpu_ns"], kernel["mean_ns"]) == (60, 6000, 100)
    assert "p99_ns" not in kernel  # unknown: the launches of one run were not kept
    stack = some("gpuprofile", "stack", kernel="k", pid=1, launches=40, gpu_ns=40_000, **name)
    keep(tmp_path, "gpuprofile", stack)
    [kernel] = facts.gather([str(tmp_path)])["kernels"]
    assert (kernel["launches"], kernel["gpu_ns"], kernel["mean_ns"]) == (100, 46_000, 460)


def test_instances_of_a_template_are_several_kernels(tmp_path: Path) -> None:
    one, other = ({"mangled": f"_Z1kI{part}E", "demangled": f"k<{part}>()"} for part in "fd")
    launchlate_run(tmp_path, 3, single=False, **one)
    launchlate_run(tmp_path, 4, single=False, **other)
    launchlate_run(tmp_path, 5, single=True, **other)
    found = facts.gather([str(tmp_path)])["kernels"]
    assert {(row["kernel"], row["full_name"]): row["launches"] for row in found} == {
        ("k", "k<f>()"): 3,
        ("k", "k<d>()"): 9,
    }


def test_the_page_says_that_runs_have_no_timeline(tmp_path: Path) -> None:
    for _ in range(9):
        launchlate_run(tmp_path, 1, single=True, mangled=None, demangled=None)
    found = facts.gather([str(tmp_path)])
    assert (len(found["timelines"]), found["left_out"]) == (8, {"timelines": 8})


def test_threads_are_summed_for_each_kind_of_work(tmp_path: Path) -> None:
    """Runs with another --work are apart. A thread's records of several intervals, and of several runs, add up."""
    told = SHAPE | {"kernel": "k", "pid": 1}
    for kind, works in (("instructions", [100, 300]), ("instructions", [1]), ("loads", [5])):
        keep(
            tmp_path,
            "threadhist",
            *(some("threadhist", "kernel", **told, work_kind=kind, imbalance=1.5) for _ in works),
            *(
                some("threadhist", "thread", **told, block=[0, 0, 0], thread=[0, 0, 0], work=work)
                for work in works
            ),
        )
    found = facts.gather([str(tmp_path)])["threads"]
    assert [(one["work_kind"], one["work"]) for one in found] == [("instructions", 401), ("loads", 5)]


def test_the_head_line_is_about_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also about the runs that the list of the newest leaves out."""
    monkeypatch.setattr(facts, "LISTS", facts.LISTS | {"runs": ("day DESC, run DESC", 2)})
    for day, host, device in (("02", "b", "gpu"), ("01", "a", "sim"), ("03", "b", "gpu"), ("04", "b", "gpu")):
        place = tmp_path / "made"
        keep(place, "launchlate", some("launchlate", "summary", tool="launchlate", device=device))
        [made] = place.rglob("*.parquet")
        kept = tmp_path / f"runs/tool=launchlate/day=2026-01-{day}/host={host}"
        kept.mkdir(parents=True)
        made.rename(kept / made.name)
    found = facts.gather([str(tmp_path / "runs")])
    assert found["about"] == [
        {
            "runs": 4,
            "tools": "launchlate",
            "hosts": 2,
            "first_day": "2026-01-01",
            "last_day": "2026-01-04",
            "embedded": 1,
        }
    ]
    assert [one["day"][-2:] for one in found["runs"]] == ["04", "03"]
    assert found["left_out"] == {"runs": 2}


@pytest.mark.parametrize("title", ["@facts@", "@scripts@", "@title@ @none@"])
def test_a_title_is_no_template(kept: Path, tmp_path: Path, title: str) -> None:
    report(kept, "-o", tmp_path / "page.html", "--title", title)
    assert f"<title>{title}</title>" in (tmp_path / "page.html").read_text()


def site(kernel: str, sectors: int, least: int, **more: Any) -> dict[str, Any]:
    told = {"op": "load", "space": "global", "pattern": "unit", "bank_ways": None, "requests": least}
    told |= {"source": "a.cu:1", "wasted_bytes": 32 * (sectors - least), "sectors_least": least}
    return some("memtrace", "site", **told | {"kernel": kernel, "sectors": sectors} | more)


def test_findings_are_weighed_by_all_that_kernels_do(tmp_path: Path) -> None:
    """A small kernel comes last however badly it does; what hardly matters is no finding."""
    shared = {"space": "shared", "wasted_bytes": None, "sectors_least": 0, "requests": 1, "source": "a.cu:3"}
    keep(
        tmp_path,
        "memtrace",
        site("large", 4000, 2000),
        site("large", 30, 10, source="a.cu:2"),  # below 1 % of the kernel's traffic
        site("small", 80, 10),
        site("tiny", 8, 1),  # below 1 in 1,000 of all traffic
        site("well", 15_882, 15_882),
        site("tiny", 0, 0, **shared | {"bank_ways": {"mean": 9.0, "max": 9}}),
    )
    found = facts.gather([str(tmp_path)])["findings"]
    assert [(one["kernel"], one["source"], one["share_of"]) for one in found] == [
        ("large", "a.cu:1", "of all memory traffic"),
        ("small", "a.cu:1", "of all memory traffic"),
    ]
    assert [one["weight"] for one in found] == pytest.approx([0.1, 0.0035])


def test_an_embedded_device_is_no_idle_gpu(tmp_path: Path) -> None:
    launch: dict[str, Any] = {"kernel": "k", "exec_ns": 1, "running": False}
    for device in ("gpu", "sim"):
        keep(
            tmp_path / device,
            "launchlate",
            *(
                some("launchlate", "launch", **launch, start_ns=99 * at, end_ns=99 * at + 1)
                for at in range(20)
            ),
            some("launchlate", "summary", tool="launchlate", device=device),
        )
        found = facts.gather([str(tmp_path / device)])["findings"]
        assert [one["tool"] for one in found] == (["launchlate"] if device == "gpu" else [])


@pytest.mark.parametrize("times", [1, 2])
def test_a_file_is_replaced_meanwhile(kept: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The records are read again; if a file is replaced again, the message names it."""
    [path] = kept.rglob("site-*.parquet")
    whole, run_file, calls = path.read_bytes(), views.run_file, []

    def replaced(database: Any, sql: str) -> None:
        calls.append(sql)
        if len(calls) <= times:
            path.write_bytes(b"PAR1" + bytes(len(whole) - 8) + b"PAR1")
        try:
            run_file(database, sql)
        finally:
            path.write_bytes(whole)

    monkeypatch.setattr(views, "run_file", replaced)
    if times == 1:
        assert facts.gather([str(kept)])["lines"]
    else:
        with pytest.raises(Error, match=f"{path.name} was replaced while it was read"):
            facts.gather([str(kept)])
    assert len(calls) == 2


def test_many_rows_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "LISTS", facts.LISTS | {"kernels": ("", 5)})
    one = some("memtrace", "kernel", launches=1)
    keep(tmp_path, "memtrace", *(one | {"kernel": f"k{at}", "wasted_bytes": at} for at in range(9)))
    found = facts.gather([str(tmp_path)])
    assert found["left_out"] == {"kernels": 5}
    assert [row["kernel"] for row in found["kernels"]] == ["k8", "k7", "k6", "k5", "k4"]


def test_every_statement_works(tmp_path: Path) -> None:
    """A statement with a mistake would be left out like one whose records are missing."""
    for tool in TOOLS:
        keep(tmp_path, tool, *(some(tool, one.name) for one in declared(tool)))
    with views.opened() as database:
        views.add_records(database, [str(tmp_path)])
        for view, statement in views.statements(facts.SQL):
            assert database.execute(statement), view


def test_sources(source: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("password")
    (source / "link.cu").symlink_to(secret)
    os.mkfifo(source / "pipe.cu")
    (source / "changed.cu").touch()
    (source / "step.cu").write_text("other")
    (source / "long.cu").write_text("\n" * 6000)
    found = Sources([str(source)])
    unreadable = None, "the source cannot be read: not a regular file"
    assert found.text("link.cu") == found.text("pipe.cu") == unreadable
    (source / "changed.cu").unlink()
    (source / "changed.cu").symlink_to(secret)  # after the directories were read
    assert found.text("changed.cu") == unreadable
    (source / "changed.cu").unlink()
    (source / "changed.cu").write_bytes(b"a\r\nb\xff\n")
    assert found.text("changed.cu") == (["a", "b\ufffd", ""], "")
    assert found.text("../secret") == (None, "the source was not found below --source DIR")
    text, about = found.text("below/step.cu")
    assert text is not None and text[0].startswith("__global__") and about == ""
    assert "2 files have this name" in found.text("step.cu")[1]
    assert "the end of the file is left out" in found.text("long.cu")[1]
    assert "--source DIR shows it" in Sources([]).text("step.cu")[1]
    assert "not the version" in found.text("below/step.cu", [2, 9])[1]
    assert "line 4 has no code here" in found.text("below/step.cu", [2, 4])[1]
    assert found.text("below/step.cu", [0, 2, 3])[1] == ""
    assert "not the version" not in found.text("long.cu", [7000])[1]  # perhaps in the part that is left out


def test_refusals(kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    keep(tmp_path / "none", "memtrace", some("memtrace", "unallocated"))
    for words, status, said in (
        ((kept,), 2, "-o"),
        ((kept, "-o", "-"), 2, "not the name of a file"),
        ((kept, "--source", tmp_path / "no", "-o", page), 2, "is not a directory"),
        ((tmp_path / "none", "-o", page), 1, "there is nothing of them"),
        ((tmp_path / "no", "-o", page), 2, "is not a directory"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            report(*words)
        assert ended.value.code == status and said in capsys.readouterr().err
    assert not page.exists()


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_browser_shows_the_page(kept: Path, source: Path, tmp_path: Path) -> None:
    """The script ends, every section has its content, and hostile names are text."""
    page = tmp_path / "page.html"
    site = {"kernel": "step", "space": "shared", "requests": 7}
    keep(
        kept, "memtrace", some("memtrace", "site", **site, source="step.cu:90")
    )  # beyond the end of the file
    report(kept, "--source", source, "-o", page)
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    done = subprocess.run(
        [*command, "--virtual-time-budget=20000", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
    )
    shown = done.stdout
    assert 'data-ready="yes"' in shown, done.stderr[-2000:]
    assert "<title>gpubpf report</title>" in shown and "<img src=x" not in shown
    assert "&lt;img src=x onerror=alert(1)&gt;" in shown
    for section in ("findings", "missing", "time", "kernels", "lines", "threads", "files", "runs"):
        assert f'<section id="{section}">' in shown, section  # not hidden
    assert "stride 8" in shown and "tabulator-row" in shown and shown.count("<canvas") == 3
    assert "x[i] = &lt;b&gt;;\\x1b" in shown
    assert '<td class="number">90</td>' in shown and "not the version that was measured" in shown

"""Questions about the records that tools kept (gpubpf query)."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

import gpubpf.__main__
from gpubpf_kept import TIMES, keep, some
from gpubpf_schema import declared
from test_contract import TOOLS

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/analysis.md").read_text()


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert gpubpf.__main__.main(["query", *map(str, words)]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *words: object, notes: int = 0) -> tuple[int, str]:
    """Return the exit status of a question that is refused, and the complaint. notes: the notices before it."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        gpubpf.__main__.main(["query", *map(str, words)])
    said = capsys.readouterr()
    *noted, complaint = said.err.splitlines(keepends=True)
    assert said.out == "" and len(noted) == notes
    assert isinstance(ended.value.code, int)
    return ended.value.code, complaint


@pytest.fixture
def two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two hosts: on the second one, the kernel takes three times as long, and a launch is lost."""
    for host, mean, lost in (("node1", 100.0, {}), ("node 2/x", 300.0, {"no PTX": 1})):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        keep(
            tmp_path,
            "launchlate",
            some("launchlate", "kernel", kernel="step", count=4, exec_ns=TIMES | {"mean": mean}),
            some("launchlate", "launch", kernel="step", launch=1, latency_ns=7, comm="'; DROP"),
            some("launchlate", "launch", kernel="<b>\x1b[31m", launch=2, latency_ns=None, comm="=1"),
            some(
                "launchlate",
                "summary",
                tool="launchlate",
                launches_matched=4,
                launches_instrumented=4 - len(lost),
                not_instrumented=lost,
                duration_ns=10,
            ),
        )
    return tmp_path


def test_ready_views(two_hosts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rows(question: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in ask(capsys, "--json", question, two_hosts).splitlines()]

    [first, second] = rows("FROM stragglers")
    assert (first["host"], first["kernel"], first["launches"], first["ratio"]) == ("node 2/x", "step", 4, 1.5)
    assert (second["host"], second["ratio"], second["hosts"]) == ("node1", 0.5, 2)
    assert [(one["host"], one["reason"], one["launches"]) for one in rows("FROM launches_lost")] == [
        ("node 2/x", "no PTX", 1)
    ]
    assert [(one["host"], one["measured"], one["share"]) for one in rows("FROM hosts")] == [
        ("node 2/x", 3, 0.75),
        ("node1", 4, 1.0),
    ]
    assert [one["latency_ns"] for one in rows("FROM slowest_launches")] == [7, 7, None, None]


def test_forms(two_hosts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question = "SELECT kernel, latency_ns, comm FROM launchlate_launch WHERE host = 'node1' ORDER BY launch"
    assert ask(capsys, question, two_hosts).splitlines() == [
        "kernel       latency_ns  comm",
        "step                  7  '; DROP",
        r"<b>\x1b[31m           -  =1",
    ]
    assert [*csv.reader(io.StringIO(ask(capsys, "--csv", question, two_hosts)))] == [
        ["kernel", "latency_ns", "comm"],
        ["step", "7", "'; DROP"],
        [r"<b>\x1b[31m", "", "'=1"],
    ]
    file = two_hosts / "answer"
    assert ask(capsys, "--json", "-o", file, question, two_hosts) == ""
    assert json.loads(file.read_text().splitlines()[1])["kernel"] == "<b>\x1b[31m"
    many = ask(capsys, "FROM range(1001)", two_hosts)
    assert len(many.splitlines()) == 1001  # and the header
    listed = ask(capsys, "--list", two_hosts)
    assert "stragglers: " in listed and "launchlate_launch: records" in listed and "worst_lines" not in listed
    assert max(map(len, listed.splitlines())) <= 80
    described = [json.loads(line) for line in ask(capsys, "--list", "--json", two_hosts).splitlines()]
    assert {"exec_ns", "host"} <= {
        *next(one["columns"] for one in described if one["view"] == "launchlate_kernel")
    }


def test_the_page_names_every_view_and_its_questions_have_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for tool in TOOLS:
        keep(tmp_path, tool, *(some(tool, one.name) for one in declared(tool)))
    listed = [json.loads(line) for line in ask(capsys, "--list", "--json", tmp_path).splitlines()]
    ready = [one["view"] for one in listed if one["about"] != "records"]
    assert ready == sorted(re.findall(r"^\| `(\w+)` \| .*\? \|", PAGE, re.M))
    for view in ready:
        ask(capsys, f"FROM {view}", tmp_path)
    questions = re.findall(r"^\| [^`]*\? \| `(SELECT .*)` \|$", PAGE, re.M)
    assert len(questions) == 5
    for question in questions:
        ask(capsys, question, tmp_path)


def test_a_ready_view_without_its_records_names_the_tool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, "threadhist", some("threadhist", "kernel", kernel="step"))
    status, said = refusal(capsys, "FROM stragglers", tmp_path)
    assert status == 1
    assert said.endswith("needs: hosts on which a kernel takes longer than elsewhere (launchlate)\n")


def test_refusals(two_hosts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = f"COPY (SELECT 1) TO '{two_hosts}/made'"
    (two_hosts / "link").symlink_to("/etc/passwd")
    (two_hosts / "beside").write_text("no record")
    for question, status, said in (
        ("SELEC 1", 1, "syntax error"),
        ("FROM nothing", 1, "gpubpf query --list DIR lists the views"),
        ("SELECT 1; SELECT 2", 2, "2 statements; give one SELECT or FROM"),
        ("", 2, "0 statements"),
        (copy, 2, "is not a question"),
        ("INSTALL httpfs", 2, "is not a question"),
        (f"WITH a AS ({copy}) SELECT 1", 2, "COPY is not part of a question"),
        (f"EXPLAIN ANALYZE {copy}", 2, "COPY is not part of a question"),
        ("SELECT 1 AS a, 2 AS a", 2, "two columns of the answer are called a"),
        ("FROM read_text('/etc/passwd')", 1, "Permission Error"),
        # Names in records may ask for this, and an assistant may obey.
        (f"FROM read_text('{two_hosts}/link')", 1, "Permission Error"),
        (f"FROM read_text('{two_hosts}/beside')", 1, "Permission Error"),
        (f"FROM glob('{two_hosts}/*')", 1, "Permission Error"),
        (f"FROM query('{copy.replace(chr(39), chr(39) * 2)}')", 1, "single SELECT"),
        ("FROM enable_logging(storage = 'file')", 1, "locked"),
        ("FROM enable_profiling(save_location = 'x')", 1, "locked"),
        ("SELECT 1 / (kernel)::INT FROM launchlate_launch", 1, "Conversion Error"),
    ):
        assert refusal(capsys, question, two_hosts)[0] == status, question
        assert said in refusal(capsys, question, two_hosts)[1]
    assert not (two_hosts / "made").exists()
    assert refusal(capsys, "FROM hosts", tmp_path / "none") == (
        2,
        f"gpubpf: {tmp_path}/none is not a directory; give the DIR of a tool's --parquet DIR\n",
    )
    (tmp_path / "empty").mkdir()
    status, said = refusal(capsys, "FROM hosts", tmp_path / "empty")
    assert status == 1 and "there are no records of tools in" in said and "--parquet DIR" in said
    assert (
        refusal(capsys, "FROM hosts")[0] == 2
        and refusal(capsys, "--json", "--csv", "FROM x", two_hosts)[0] == 2
    )


def test_directories_may_have_any_name_and_come_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part of DIR is taken for a glob, or for a column."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    for name in ("g[1]*", "g1", "count=7/host=zz", "it's"):
        keep(tmp_path / name, "launchlate", some("launchlate", "kernel", kernel=name, count=3))
        question = "SELECT kernel, count, host FROM launchlate_kernel"
        answer = ask(capsys, "--json", question, tmp_path / name, tmp_path / name).splitlines()
        assert [json.loads(line) for line in answer] == [{"kernel": name, "count": 3, "host": "node"}]


def test_without_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tool still runs, or was killed."""
    keep(tmp_path, "launchlate", some("launchlate", "kernel", exec_ns=TIMES | {"mean": 123456789.25}))
    assert (
        ask(capsys, "--csv", "SELECT exec_ns.mean FROM launchlate_kernel", tmp_path) == "mean\n123456789.25\n"
    )
    assert "launchlate_kernel: records" in ask(capsys, "--list", tmp_path)
    assert "summaries does not exist" in refusal(capsys, "FROM summaries", tmp_path)[1]


def test_a_damaged_file(two_hosts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is cut off, or whose footer is not one, is named and left out."""
    [first, second] = sorted(two_hosts.rglob("summary-*.parquet"))
    whole = first.read_bytes()
    for cut in (b"", whole[:4], whole[:-20]):
        first.write_bytes(cut)
        capsys.readouterr()
        assert gpubpf.__main__.main(["query", "--json", "FROM hosts", str(two_hosts)]) == 0
        said = capsys.readouterr()
        assert len(said.out.splitlines()) == 1
        assert said.err == f"gpubpf: note: {first} is not a whole Parquet file; its records are left out\n"
    second.write_bytes(whole[:4] + b"\xff" * (len(whole) - 8) + whole[-4:])
    assert gpubpf.__main__.main(["query", "FROM launchlate_kernel", str(two_hosts)]) == 0
    assert f"gpubpf: note: {second} is damaged; its records are left out" in capsys.readouterr().err
    for file in two_hosts.rglob("*.parquet"):
        file.write_bytes(second.read_bytes())
    assert "are damaged; measure again" in refusal(capsys, "FROM hosts", two_hosts, notes=6)[1]


def test_only_files_in_the_directory_are_read(
    two_hosts: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its owner may put a link to the file of another user there, or a pipe, which would never answer; also very many of them."""
    first = min(two_hosts.rglob("summary-*.parquet"))
    elsewhere = tmp_path_factory.mktemp("elsewhere") / first.name
    first.rename(elsewhere)
    first.symlink_to(elsewhere)
    pipe = first.with_name("summary-pipe.parquet")
    os.mkfifo(pipe)
    capsys.readouterr()
    assert gpubpf.__main__.main(["query", "--json", "FROM hosts", str(two_hosts)]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 1
    assert sorted(said.err.splitlines()) == sorted(
        f"gpubpf: note: {path} cannot be read (not a regular file); its records are left out"
        for path in (first, pipe)
    )
    for number in range(100):
        first.with_name(f"summary-{number}.parquet").touch()
    assert gpubpf.__main__.main(["query", "--json", "FROM hosts", str(two_hosts)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11 and lines[-1] == "gpubpf: note: the records of 92 further files are left out"


def test_damaged_values(two_hosts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The footer is right. An error names the file."""
    file = max(two_hosts.rglob("kernel-*.parquet"))
    whole = file.read_bytes()
    values = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    file.write_bytes(whole[:4] + b"\xff" * (values - 4) + whole[values:])
    status, complaint = refusal(capsys, "SELECT sum(exec_ns.mean) FROM launchlate_kernel", two_hosts)
    assert status == 1 and complaint == f"gpubpf: {file} is damaged; move it away\n"


def test_only_damaged_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path, "launchlate", some("launchlate", "kernel"))
    for file in tmp_path.rglob("*.parquet"):
        file.write_bytes(b"")
    assert "there are no records of tools" in refusal(capsys, "FROM hosts", tmp_path, notes=1)[1]


def test_options_may_stand_anywhere(two_hosts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question = "SELECT count(*) AS n FROM launchlate_kernel"
    for words in (
        ("--json", question, two_hosts),
        (question, "--json", two_hosts),
        (question, two_hosts, "--json"),
    ):
        assert ask(capsys, *words) == '{"n":2}\n'
    assert "stragglers" in ask(capsys, two_hosts, "--list")


def test_limits(two_hosts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "SELECT count(*) FROM range(10000000000) AS a, range(1000000) AS b WHERE a.range % 7 = b.range % 5"
    assert "took longer than --timeout" in refusal(capsys, "--timeout", 0.2, long, two_hosts)[1]
    large = "SELECT list(range) FROM range(100000000)"
    assert "raise --memory" in refusal(capsys, "--memory", "64M", large, two_hosts)[1]

"""The records of a tool as Parquet files (--parquet DIR)."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from gpubpf.errors import Error
from gpubpf.show import dataset
from gpubpf.show.dataset import Dataset
from gpubpf.show.fields import Field, Fields, maybe
from gpubpf_dataset import check_dataset, records_in
from gpubpf_schema import declared, value_of
from test_contract import TOOLS

duckdb = pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")

NUMBER = Fields("number", "One.", (Field("value", "integer"), Field("text", "string?", when="with --text")))
OTHER = Fields("other", "One.", (Field("reasons", "{ns}"), Field("what", "any"), Field("late_ns", "[ns]")))
RECORDS = NUMBER, OTHER


def written(directory: Path, records: Iterable[dict[str, Any]], fields: Iterable[Fields] = RECORDS) -> str:
    """Write records below a directory, and return the name of the run."""
    out = Dataset(str(directory), "threadhist", fields)
    out.records(records)
    out.close()
    return out.run


@pytest.mark.parametrize("tool", TOOLS)
def test_rows_are_the_records_of_json(tool: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    @hypothesis.settings(
        max_examples=3, deadline=None, database=None, derandomize=True, phases=[hypothesis.Phase.generate]
    )
    @hypothesis.given(st.data())
    def check(data: st.DataObject) -> None:
        place = tmp_path_factory.mktemp("dataset")
        records = [
            {"type": record["type"]} | record  # Hypothesis chooses the order
            for one in declared(tool)
            for record in data.draw(st.lists(value_of(one.schema), min_size=1, max_size=2))
        ]
        text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        check_dataset(tool, text, place)

    check()


def test_many_records_become_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "FILE_BYTES", 10_000)
    monkeypatch.setattr(dataset, "BUFFER_BYTES", 5_000)
    monkeypatch.setattr(dataset, "PAUSE", 0.01)
    out = Dataset(str(tmp_path), "threadhist", RECORDS)
    for start in range(0, 3000, 100):
        out.records(NUMBER.record(value=start + n) for n in range(100))
    out.close()
    assert len(list(tmp_path.rglob("number-*.parquet"))) > 3 and not list(tmp_path.rglob(".*"))
    assert [one["value"] for one in records_in(tmp_path, NUMBER, out.run)] == list(range(3000))


def test_numbers_beyond_64_bits_are_null_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(tmp_path, [NUMBER.record(value=2**63), NUMBER.record(value=1, text="a")])
    assert records_in(tmp_path, NUMBER, run) == [
        {"type": "number"},
        {"type": "number", "value": 1, "text": "a"},
    ]
    assert (
        "threadhist: note: 1 integers beyond 64 bits, with the sign, are null in Parquet"
        in capsys.readouterr().err
    )


def test_names_that_are_not_unicode_and_large_numbers_of_any_kind(tmp_path: Path) -> None:
    name = b"/\xe9".decode("utf-8", "surrogateescape")
    run = written(tmp_path, [NUMBER.record(value=1, text=name)])
    assert records_in(tmp_path, NUMBER, run) == [{"type": "number", "value": 1, "text": "/\\udce9"}]
    run = written(tmp_path, [OTHER.record(reasons={name: 1}, what=[2**64], late_ns=[])])
    [record] = records_in(tmp_path, OTHER, run)
    assert (record["reasons"], record["what"]) == ({"/\\udce9": 1}, [2**64])


def test_files_are_complete_at_any_moment(tmp_path: Path) -> None:
    """A tool that is killed leaves what it wrote more than a second ago."""
    program = """if True:
        import sys, time
        from gpubpf.show.dataset import Dataset
        from gpubpf.show.fields import Field, Fields
        number = Fields("number", "", (Field("value", "integer"), Field("text", "string?", when="")))
        out = Dataset(sys.argv[1], "threadhist", [number])
        value = 0
        while True:
            out.records(number.record(value=value + n, text=None) for n in range(1000))
            time.sleep(0.01)
            value += 1000
            print(out.rows, flush=True)
    """
    child = subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    rows = next(rows for line in child.stdout if (rows := int(line)))
    child.send_signal(signal.SIGKILL)
    child.communicate()
    [run] = {path.stem.split("-", 1)[1].rsplit("-", 1)[0] for path in tmp_path.rglob("number-*.parquet")}
    values = [one["value"] for one in records_in(tmp_path, NUMBER, run)]
    assert len(values) >= rows and values == list(range(len(values)))


def test_a_directory_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool ends with one line, also if a write never returns."""
    answers = threading.Event()
    monkeypatch.setattr(dataset, "STALLED", 0.1)
    monkeypatch.setattr(dataset, "BUFFER_BYTES", 100)
    monkeypatch.setattr(Dataset, "_add", lambda self, kind, texts: answers.wait())
    out = Dataset(str(tmp_path), "threadhist", RECORDS)
    with pytest.raises(Error, match="has not answered for"):
        for value in range(10_000):
            out.records([NUMBER.record(value=value)])
    with pytest.raises(Error, match="choose another directory with --parquet"):
        out.close()
    answers.set()


def test_what_killed_tools_left_is_removed(tmp_path: Path) -> None:
    """Files that a tool still writes, and young ones, stay."""
    written(tmp_path, [NUMBER.record(value=1)])
    [file] = tmp_path.rglob("number-*.parquet")
    names = ("old", "young", "locked")
    left = {name: file.with_name(f".number-{name}-0000.parquet.part") for name in names}
    for name, path in left.items():
        path.write_bytes(b"PAR1")
        if name != "young":
            os.utime(path, (1, 1))
    with open(left["locked"], "rb") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        written(tmp_path, [NUMBER.record(value=2)])
    assert [name for name in names if left[name].exists()] == ["young", "locked"]
    assert file.exists()


def test_a_record_does_not_wait_for_the_next(tmp_path: Path) -> None:
    out = Dataset(str(tmp_path), "threadhist", RECORDS)
    out.records([NUMBER.record(value=1)])
    until = time.monotonic() + 60
    while not list(tmp_path.rglob("number-*.parquet")) and time.monotonic() < until:
        time.sleep(0.05)
    assert [one["value"] for one in records_in(tmp_path, NUMBER, out.run)] == [1]
    out.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_writes_with_one_capability_into_a_directory_of_a_user(tmp_path: Path) -> None:
    """The names in records come from traced processes."""
    place = tmp_path / "own"
    place.mkdir(mode=0o755)
    os.chown(place, 65534, 65534)
    out = Dataset(str(place), "threadhist", RECORDS)
    state = Path(f"/proc/self/task/{out._thread.native_id}/status")
    until = time.monotonic() + 60
    while "CapEff:\t0000000000000002" not in state.read_text() and time.monotonic() < until:
        time.sleep(0.01)
    assert "CapEff:\t0000000000000002" in state.read_text() and "NoNewPrivs:\t1" in state.read_text()
    out.records([NUMBER.record(value=1)])
    out.close()
    assert [one["value"] for one in records_in(place, NUMBER, out.run)] == [1]


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        Error, match=r"cannot write into .*/file: .*; check the directory or choose another one"
    ):
        Dataset(str(tmp_path / "file"), "threadhist", RECORDS)
    out = Dataset(str(tmp_path / "dir"), "threadhist", RECORDS)
    for place, *_ in os.walk(tmp_path / "dir"):
        last = Path(place)
    last.rmdir()
    last.symlink_to(tmp_path)  # no link below the directory is followed
    out.records([NUMBER.record(value=1)])
    with pytest.raises(Error, match="cannot write into"):
        out.close()
    assert not list(tmp_path.glob("*.parquet"))


def test_the_description_of_a_column_and_of_a_file(tmp_path: Path) -> None:
    import pyarrow.parquet

    written(tmp_path, [OTHER.record(reasons={"a": 1}, what=[1, {"b": None}], late_ns=[5])])
    [path] = tmp_path.rglob("other-*.parquet")
    schema = pyarrow.parquet.read_schema(path)
    assert schema.metadata[b"gpubpf.schema"] == b"1" and schema.metadata[b"gpubpf.tool"] == b"threadhist"
    assert schema.field("what").metadata[b"gpubpf.content"] == b"JSON"
    nothing = Fields("timed", "", (Field("late_ns", maybe("ns"), "after the first"),))
    written(tmp_path, [nothing.record(late_ns=None)], [nothing])
    [path] = tmp_path.rglob("timed-*.parquet")
    metadata = pyarrow.parquet.read_schema(path).field("late_ns").metadata
    assert metadata[b"unit"] == b"ns" and metadata[b"description"] == b"after the first"


def test_lines_may_come_in_pieces(tmp_path: Path) -> None:
    out = Dataset(str(tmp_path), "threadhist", RECORDS)
    records = (NUMBER.record(value=n, text="\n\u2028") for n in range(5))
    text = "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in records).encode()
    for at in range(0, len(text), 7):
        out.write(text[at : at + 7])
    out.close()
    assert [one["value"] for one in records_in(tmp_path, NUMBER, out.run)] == [0, 1, 2, 3, 4]

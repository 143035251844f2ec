"""Files of others that `gpubpf query`, `report`, `diff` and `exporter` read. See targets.py."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from fuzz.targets import target
from gpubpf.errors import Error
from gpubpf.exporter import pods
from gpubpf.exporter.metrics import MOST_LETTERS, label
from gpubpf.exporter.pods import Place, Pods
from gpubpf.process.containers import Container
from gpubpf.query import difference, views
from gpubpf.report import facts
from gpubpf_kept import TIMES, keep, some

MEMORY = 256 << 20  # bytes that DuckDB may use


@functools.cache
def _directory() -> Path:
    place = Path(tempfile.mkdtemp(prefix="gpubpf-fuzz-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place


@functools.cache
def _whole() -> Path:
    """Return a directory with the records of a run, which nobody has changed."""
    place = _directory() / "whole"
    kernel = some("launchlate", "kernel", kernel="step", count=3, exec_ns=TIMES | {"mean": 5.0})
    ends = some("launchlate", "summary", tool="launchlate", device="gpu", lost=0, not_instrumented={"x": 1})
    keep(place, "launchlate", kernel, kernel | {"kernel": "other"}, ends)
    return place


@functools.cache
def _files() -> tuple[Path, ...]:
    return tuple(sorted(_whole().rglob("*.parquet")))


def parquet_seeds() -> Iterable[bytes]:
    """The first byte says which file it is, and who reads it."""
    for at, file in enumerate(_files()):
        for reader in range(len(_READERS)):
            yield bytes([len(_files()) * reader + at]) + file.read_bytes()


@target(Error, seeds=parquet_seeds)
def parquet(data: bytes) -> None:
    """Read a Parquet file beside a whole one, as gpubpf query, report or diff does."""
    reader, file = divmod(data[0] if data else 0, len(_files()))
    changed = _directory() / "changed"
    shutil.copytree(_whole(), changed, dirs_exist_ok=True)
    (changed / _files()[file].relative_to(_whole())).write_bytes(data[1:])
    with contextlib.redirect_stderr(io.StringIO()):  # notices about what is left out
        try:
            _READERS[reader % len(_READERS)](str(changed))
        except Error as error:
            assert "\n" not in str(error)
            raise


def _ask(directory: str) -> None:
    """Ask each view, as gpubpf query does."""
    with views.connect([directory], MEMORY) as database:
        answer = database.sql("SELECT view_name FROM duckdb_views() WHERE NOT internal")
        for (name,) in answer.fetchall():
            views.ask(database, f'FROM "{name}"').fetchall()


def _report(directory: str) -> None:
    json.dumps(facts.gather([directory], (), MEMORY))


def _compare(directory: str) -> None:
    with difference.compare([str(_whole())], [directory], 0.01, MEMORY) as database:
        database.sql("FROM compared").fetchall()


_READERS = (_ask, _report, _compare)


def log_seeds() -> Iterable[bytes]:
    """Names of files in /var/log/containers, then, behind an empty one, those of directories in /var/log/pods."""
    number = b"13a0f64b" * 8
    return [
        b"web-7f_team_main-%s.log\0\0team_web-7f_96dd7de3-0783-4613-a707-e0effc077ef5" % number,
        b"_.log\0a_b.log\0__-.log\0\0_\0a_\0__",
        b"a-%s.log\0\0" % number,
    ]


@target(seeds=log_seeds)
def kubelet_logs(data: bytes) -> None:
    """Find the names of pods and containers in the names of the kubelet's logs, which anybody may have made."""
    files, _, directories = data.partition(b"\0\0")
    listed = {"containers": files.split(b"\0"), "pods": directories.split(b"\0")}

    def names(directory: Path) -> list[str]:
        return [os.fsdecode(name) for name in listed[directory.name]]

    read = pods._names
    pods._names = names
    try:
        known = Pods(Path("/nowhere"))
        known._read()
        for number in (*known._containers, "13a0f64b" * 8):
            for pod in (*known._pods, "", "96dd7de3-0783-4613-a707-e0effc077ef5"):
                place = known.of(Container(number, pod))
                assert isinstance(place, Place)
                for part in (place.namespace, place.pod, place.container):
                    shown = label(part)
                    assert len(shown) <= MOST_LETTERS and shown.isprintable()
    finally:
        pods._names = read

"""How fast records of memory accesses become columns, lines and files: for ./run, and a test's lower bound.

Records are made up: a kernel of 4,096 blocks of 256 threads that loads and stores 4 bytes a thread, at addresses in a row or anywhere.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpubpf.memory import access_log, access_text, parquet
from gpubpf.memory.access_log import AccessLog
from gpubpf.records.kernel_shapes import KernelShape

PLACES = [KernelShape(7, "app", 0, name, (4096, 1, 1), (256, 1, 1)) for name in ("_Z4copyPfS_", "_Z5scalePf")]
RECORD = np.dtype([("address", "<u8"), ("launch", "<u8"), ("thread", "<u4"), ("site", "<u2"), ("how", "<u2")])
STORED = np.dtype([("mark", "<u4"), ("size", "<u4"), ("payload", RECORD)])  # as a ring has them
PART = 1 << 18  # records that a reading of a ring gives at once
SITE = SimpleNamespace(source="/src/copy.cu", source_line=17, line=40, effect=1)


def records(count: int, start: int = 0, scattered: bool = False) -> Any:
    """The payloads of records in the order in which warps execute, those from number `start` on."""
    made = np.zeros(count, STORED)["payload"]
    number = np.arange(start, start + count)
    warp, lane = number // 64 % 32768, number % 32  # a load of 32 lanes, then a store
    made["thread"] = 32 * warp + lane
    made["site"] = number // 32 % 2
    made["how"] = (number // 32 % 2) << 2 | (warp // 8 % 132) << 4
    made["launch"] = np.uint64(1 | 4 << access_log.NUMBER_BITS)
    at = np.random.default_rng(start).integers(0, 1 << 26, count) if scattered else made["thread"]
    made["address"] = 0x7F0000000000 + 4 * at.astype(np.uint64)
    return made


def _taken(log: AccessLog, parts: Any) -> None:
    for part in parts:
        rings = [SimpleNamespace(process=1, records=part)]
        session: Any = SimpleNamespace(
            rings=lambda name, rings=rings: rings,
            stopped=False,
            sites=lambda mangled, pid, build: {0: SITE, 1: SITE},
        )
        log.take(session, ())


def _log(*sinks: Any) -> AccessLog:
    log = AccessLog(False, False, sinks)
    log.places.of_launch.update({(1, number + 1): place for number, place in enumerate(PLACES)})
    return log


def _best(run: Callable[[], object], times: int = 3) -> float:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found)


def decoded_per_second(count: int = 1 << 21, kernels: int = 1) -> float:
    """Records that become columns, with all coordinates; of launches of one kernel, or of two that run at once."""
    made = records(count)
    if kernels == 2:
        made["launch"] += np.random.default_rng(1).integers(0, 2, count, np.uint64)
    parts = [made[at : at + PART] for at in range(0, count, PART)]
    log = _log(lambda accesses, where, times: accesses.coordinates())
    return count / _best(lambda: _taken(log, parts))


def lines_per_second(form: str, count: int = PART) -> float:
    """Records that become lines: json, csv or text."""
    out: Any = SimpleNamespace(closed=False, write=lambda text: None)
    made = records(count)
    return count / _best(lambda: _taken(_log(access_text.AccessPrinter(out, form)), [made]))


def parquet_file(path: Path, count: int, scattered: bool = False) -> dict[str, float]:
    """A file of so many accesses: accesses_per_second, mb_per_second (of records), bytes_per_access, and rss_mb, the most memory that
    this process ever had; records are made in between, which does not count."""
    spent, done = 0.0, 0
    began = time.perf_counter()
    file = parquet.Writer(str(path))
    with file:
        log = _log(file)
        spent += time.perf_counter() - began
        while done < count:
            made = records(min(PART, count - done), done, scattered)
            began = time.perf_counter()
            _taken(log, [made])
            spent += time.perf_counter() - began
            done += len(made)
        began = time.perf_counter()
    spent += time.perf_counter() - began
    return {
        "accesses_per_second": count / spent,
        "mb_per_second": count * RECORD.itemsize / spent / 1e6,
        "bytes_per_access": path.stat().st_size / count,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def figures(directory: Path, count: int = 100_000_000) -> dict[str, dict[str, float]]:
    """All of the above, in millions a second: for a report. `count` accesses go to files in `directory`, which are removed."""
    found: dict[str, dict[str, float]] = {
        "decoded": {
            "one kernel": decoded_per_second() / 1e6,
            "two at once": decoded_per_second(kernels=2) / 1e6,
        },
        "lines": {form: lines_per_second(form) / 1e6 for form in ("text", "json", "csv")},
    }
    for name, scattered in (("parquet, in a row", False), ("parquet, scattered", True)):
        path = directory / "accesses.parquet"
        try:
            found[name] = parquet_file(path, count, scattered)
        finally:
            path.unlink(missing_ok=True)
    return found

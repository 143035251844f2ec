"""A running `gpubpf exporter`, a program for it to watch, and what a scrape finds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpubpf.traced.device import LIBRARIES

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 200.0  # seconds; a machine that runs other tests may be slow
# Each line of its standard input is a number of launches. `nap` takes 1 ms on the virtual clock, and a few instructions more.
PROGRAM = """
#include <cstdio>
__global__ void nap(int *n) { __nanosleep(1000000); if (threadIdx.x == 0) atomicAdd(n, 1); }
template <typename T> __global__ void one(T *n) { *n = 1; }
int main() {
  int *n, count;
  cudaMalloc(&n, 4);
  one<<<1, 1>>>(n);
  cudaDeviceSynchronize();
  puts("ready");
  for (fflush(stdout); scanf("%d", &count) == 1; fflush(stdout)) {
    for (int i = 0; i < count; i++) nap<<<3, 64>>>(n);
    one<<<1, 1>>>(n);
    printf("%s\\n", cudaGetErrorString(cudaDeviceSynchronize()));
  }
}
"""
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Program:
    """The running PROGRAM. clock: "virtual" or "real"; tools that watch the whole machine leave out the former.

    under: a command that executes it.
    """

    def __init__(self, path: Path, clock: str = "virtual", under: Sequence[str] = ()) -> None:
        environment = os.environ | {"LD_LIBRARY_PATH": str(LIBRARIES), "CUDASIM_CLOCK": clock}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([*under, path], stdin=pipe, stdout=pipe, env=environment, text=True)
        assert self._line() == "ready"

    @property
    def pid(self) -> int:
        return self._process.pid

    def launch(self, count: int) -> None:
        """Let it launch `nap` so often, and `one` once; wait until all have run."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        assert self._line() == "no error"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def end(self, by: int | None = None) -> None:
        """Let it exit, or kill it with a signal."""
        if by is not None:
            self._process.send_signal(by)
        self._process.communicate(timeout=PATIENCE)


class Exporter:
    """A running exporter, which listens on a free port."""

    def __init__(self, *words: str | Path, under: Sequence[str] = ()) -> None:
        command = [sys.executable, "-m", "gpubpf", "exporter", "--listen", "127.0.0.1:0", "--every", "0.3"]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "lib")}
        self.process = subprocess.Popen(
            [*under, *command, *map(str, words)], stderr=subprocess.PIPE, env=environment, text=True
        )
        self.notices: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        notice = self.noticed(" serving ")
        self.url = notice.split(" serving ")[1].strip()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.notices.append(line)

    def noticed(self, text: str) -> str:
        """Wait for a notice with a text, and return the notice."""
        return until(lambda: next((line for line in self.notices if text in line), ""), self.notices)

    def scrape(self) -> Samples:
        """Return the samples of one scrape, by name and labels."""
        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(self.url, timeout=PATIENCE) as answer:
            text = answer.read().decode()
        families = text_string_to_metric_families(text)
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    def wait_for(self, value: float, name: str, **labels: str) -> Samples:
        """Scrape until a sample has this value; return the scrape."""

        def look() -> Samples:
            found = self.scrape()
            return found if get(found, name, **labels) == value else {}

        return until(look, self.notices)

    def end(self, by: int = signal.SIGTERM) -> int:
        """End the exporter with a signal, and return its exit status."""
        self.process.send_signal(by)
        status = self.process.wait(timeout=PATIENCE)
        self._reader.join()
        return status


def until(look: Callable[[], Any], about: object = "") -> Any:
    """Return what `look` returns, once that is true. about: what to show if it never is."""
    end = time.monotonic() + PATIENCE
    while not (found := look()):
        assert time.monotonic() < end, about
        time.sleep(0.1)
    return found


def get(samples: Samples, name: str, **labels: str) -> float | None:
    """Return the only sample of this name with these labels; None: there is none."""
    wanted = set(labels.items())
    found = [value for (its, having), value in samples.items() if its == name and wanted <= having]
    assert len(found) <= 1, found
    return found[0] if found else None


@contextlib.contextmanager
def exporting(*words: str | Path, under: Sequence[str] = ()) -> Iterator[Exporter]:
    """Run an exporter in a block. under: a command that runs it."""
    made = Exporter(*words, under=under)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
            made.process.wait()

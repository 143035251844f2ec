"""A program that maps the files it is given, and does nothing else."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCE = r"""
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        int file = open(argv[i], O_RDONLY);
        struct stat s;
        if (file < 0 || fstat(file, &s) != 0 || mmap(0, s.st_size, PROT_READ, MAP_PRIVATE, file, 0) == MAP_FAILED) return 1;
        close(file);
    }
    puts("ready");
    fflush(stdout);
    char c;
    return read(0, &c, 1) < 0;
}
"""


def build(directory: Path) -> Path:
    """Static, so that it runs in any root: `hold FILE…`, which says "ready"."""
    (directory / "hold.c").write_text(SOURCE)
    subprocess.run(["gcc", "-static", "-o", directory / "hold", directory / "hold.c"], check=True)
    return directory / "hold"


@contextlib.contextmanager
def holding(*command: object, **how: Any) -> Iterator[subprocess.Popen[str]]:
    """A program that has said "ready"."""
    process = subprocess.Popen(
        [str(c) for c in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **how
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()

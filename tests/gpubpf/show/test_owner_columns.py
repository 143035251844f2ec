"""The columns PID, COMM and GPU in line-by-line output, before and after a second process or GPU appears."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpubpf.exits import exit_log
from gpubpf.memory import access_text
from gpubpf.memory.access_log import Accesses, SiteLabels
from gpubpf.records.kernel_shapes import KernelShape
from gpubpf.show import cli
from gpubpf.show.owner_columns import Owner, OwnerColumns

ONE, OTHER, SECOND = Owner(7, "app", 0), Owner(4194304, "n" * 15, 0), Owner(7, "app", 1)
EXIT = np.dtype([("launch", "<u8"), ("thread", "<u4"), ("sm", "<u2"), ("site", "<u2")])
ACCESS = np.dtype([("launch", "<u8"), ("site", "<u2"), ("how", "<u4"), ("address", "<u8"), ("thread", "<u4")])


@pytest.mark.parametrize(
    ("owners", "columns"),
    [
        ([ONE], []),
        ([ONE, OTHER], ["PID", "COMM"]),
        ([ONE, SECOND], ["GPU"]),
        ([ONE, OTHER, SECOND], ["PID", "COMM", "GPU"]),
        ([ONE, ONE._replace(comm="python3")], ["PID", "COMM"]),  # it executed another program
    ],
)
def test_what_is_the_same_everywhere_has_no_column(owners: list[Owner], columns: list[str]) -> None:
    whose = OwnerColumns().see(owners)
    assert list(whose.cells(ONE)) == columns == whose.header.split()
    assert whose.name(SECOND) == "app (pid 7)" + (", GPU 1" if "GPU" in columns else "")
    whose.see([ONE])
    assert list(whose.cells(ONE)) == columns
    assert list(OwnerColumns(True).cells(ONE)) == ["PID", "COMM"]


def test_with_both_vendors_a_gpu_has_its_vendor() -> None:
    whose, amd = OwnerColumns().see([ONE, SECOND]), ONE._replace(pid=8, vendor="amd")
    assert whose.gpu_name(SECOND) == "GPU 1"
    whose.see([amd])
    assert [whose.gpu_name(one) for one in (ONE, amd)] == ["NVIDIA GPU 0", "AMD GPU 0"]
    assert whose.name(amd) == "app (pid 8), AMD GPU 0" and whose.cells(amd)["GPU"] == "AMD 0"


@pytest.mark.parametrize("form", ["exits", "accesses"])
def test_lines_fit_a_terminal_and_the_header_comes_again_with_its_columns(form: str, tmp_path: Path) -> None:
    out, whose = cli.Output(str(tmp_path / "out")), OwnerColumns()
    write = exit_log.ExitPrinter(out, "text", whose)
    put = access_text.AccessPrinter(out, "text", False, whose)
    for owner in (ONE, SECOND, OTHER, ONE):
        place = KernelShape(*owner[:3], "_ZN4name13a_long_kernelILi256EEEvPf", (99, 99, 1), (32, 8, 1))
        if form == "exits":
            records = np.zeros(3, EXIT)
            records["launch"], records["thread"], records["sm"] = 123456, 2_500_000, 131
            write(place, records, np.array([10**12, 0, 10**12]))  # of another process: before the first
        else:
            records = np.zeros(3, ACCESS)
            records["launch"], records["address"], records["thread"] = 123456, 0x7FFFFFFFFFFF, 2_500_000
            put(Accesses.of(place, 1, records), SiteLabels.of({}), None)
    lines = (tmp_path / "out").read_text().splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    headers = [n for n, line in enumerate(lines) if "BLOCK" in line]
    assert headers == [0, 4, 8] and len(lines) == 15
    whose_first = [lines[n].split()[:3] for n in headers]
    assert whose_first[1][0] == "GPU" and whose_first[2] == ["PID", "COMM", "GPU"]
    assert lines[5].split()[0] == "1"
    assert [line.split()[:3] for line in (lines[9], lines[12])] == [
        ["4194304", "nnn...nn", "0"],
        ["7", "app", "0"],
    ]

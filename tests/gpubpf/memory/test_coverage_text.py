"""What kernels touched of allocations, for people."""

from __future__ import annotations

import sys

import pytest

from gpubpf.agent.definitions import Vendor
from gpubpf.images import symbols
from gpubpf.memory import coverage_text
from gpubpf.memory.allocations import Allocation
from gpubpf.memory.coverage import AllocationCoverage, CoverageReport, Footprint, Outside
from gpubpf.process.host_frames import HostFrame
from gpubpf.record import replace


def frame(symbol: str, file: str = "") -> HostFrame:
    return HostFrame(0x1000, 0, file, symbol)


HERE = (frame("cudaMalloc"), frame("my::allocate"), frame("main"))
THERE = (frame("cuMemAlloc_v2"), frame("other"), frame("main"))


def row(bytes_, read, written, either, stack=HERE, kind="device", call="cuMemAlloc", base=4096, process=1):
    made = Allocation(process, 7, "app", 0, base, bytes_, call, kind, stack, 0, None, 0, None)
    return AllocationCoverage(made, read, written, either)


def report(*rows, elsewhere=None, footprints=(), full=False, incomplete=False) -> CoverageReport:
    return CoverageReport(list(rows), elsewhere or {}, list(footprints), full, incomplete)


def lines(found: CoverageReport, granule: int = 1, verbose: bool = False) -> list[str]:
    made = list(coverage_text.allocation_lines(found, granule, verbose))
    assert all(len(line) <= 80 for line in made), made
    return made


def cells(found: CoverageReport, **options) -> list[list[str]]:
    made = lines(found, **options)
    at = next(n for n, line in enumerate(made) if line.strip().startswith("BYTES"))
    rows = (line.split() for line in made[at + 1 :] if line[:1] in " 0123456789?")
    return [row for row in rows if len(row) > 4]


def test_the_most_untouched_first_and_those_of_one_place_together():
    found = cells(
        report(
            row(100, 50, 0, 50), row(1000, 1, 2, 3, THERE), row(100, 0, 0, 0, base=9000), row(8, 8, 8, 8, ())
        )
    )
    assert found == [
        ["1,000", "1", "2", "997", "1", "cuMemAlloc", "other"],
        ["200", "50", "0", "150", "2", "cuMemAlloc", "my::allocate"],
        ["8", "8", "8", "0", "1", "cuMemAlloc"],
    ]


def test_what_is_not_known_of_one_is_not_known_of_all_from_there():
    made = report(row(100, 50, 0, 50), row(10 << 30, None, None, None), full=True)
    assert cells(made)[0] == ["10.7G", "?", "?", "?", "2", "cuMemAlloc", "my::allocate"]
    assert any("use --granule 64" in line for line in lines(made))
    small = report(row(100, None, None, None), full=True)  # a granule of 4 bytes is none larger
    assert any("use --granule 8" in line for line in lines(small))
    assert any("use --granule 512" in line for line in lines(made, granule=256))


def test_variables_and_memory_of_the_host_only_where_they_were_touched():
    made = report(
        row(100, 0, 0, 0, kind="host"),
        row(100, 0, 0, 0, (), "variable", "variable unused"),
        row(400, 0, 8, 8, (), "variable", "variable ns::table"),
    )
    assert cells(made) == [["400", "0", "8", "392", "ns::table"]]


def test_findings():
    made = lines(report(row(100, 0, 0, 0), row(60, 0, 60, 60), row(5, 5, 0, 5), incomplete=True))
    text = " ".join(map(str.strip, made))
    assert "never touched by kernels: 1 allocation of device memory, 100 bytes; made by my::allocate" in text
    assert "written, but neither read nor copied: 1 allocation of device memory, 60 bytes; made by" in text
    assert any("some allocations are missing" in line for line in made)
    for copied in (True, None):  # the host reads it, or may do so in a graph
        (one,) = [row(60, 0, 60, 60)]
        one = replace(one, allocation=replace(one.allocation, copied=copied))
        assert not any("neither read" in line for line in lines(report(one)))
    (one,) = [row(100, 0, 0, 0)]
    one = replace(one, allocation=replace(one.allocation, shared=True))
    assert not any("never touched" in line for line in lines(report(one)))
    many = lines(report(*[row(6964, 0, 6964, 6964)] * 20))  # one column too many for a line
    assert "written, but neither read nor copied: 20 allocations of device memory, 139,280" in many
    assert max(map(len, many)) <= 80


def test_calls_that_would_look_the_same_show_their_addresses(monkeypatch):
    monkeypatch.setattr(
        symbols, "lookup", lambda path, offset, mapped: symbols.FunctionOffset("main", offset)
    )
    stacks = [(HostFrame(0, offset, "/bin/app", ""),) for offset in (0x20, 0x40)]
    assert list(symbols.callers(stacks).values()) == ["main+0x20 (app)", "main+0x40 (app)"]
    assert list(symbols.callers(stacks[:1]).values()) == ["main (app)"]
    made = lines(report(*[row(100, 0, 60, 60, stack) for stack in stacks], row(100, 0, 0, 0, stacks[1])))
    assert "written, but neither read nor copied: 2 allocations" in " ".join(made)
    assert (
        "never touched by kernels: 1 allocation of device memory, 100 bytes; made by main+0x40 (app)"
        in " ".join(map(str.strip, made))
    )


def test_no_finding_where_not_all_was_probed():
    made = lines(replace(report(row(100, 0, 0, 0)), partial=True))
    assert not any(line.startswith("never touched") for line in made)
    assert any("may have touched more" in line for line in made)


def test_no_finding_where_textures_were_read():
    made = replace(
        report(row(100, 0, 0, 0)), hidden=True, footprints=[Footprint(7, "app", 0, "bar", 10, 320)]
    )
    text = " ".join(" ".join(lines(made)).split())
    assert "never touched" not in text
    assert (
        "kernels may have touched more: accesses to textures and surfaces, and bulk tensor copies, are not seen"
        in text
    )
    said = list(coverage_text.footprint_lines(made, ()))
    assert (
        any(line.startswith("incomplete: accesses to textures") for line in said)
        and max(map(len, said)) <= 80
    )


def test_many_places_and_long_names():
    stacks = [(frame(f"a::very::long::name::of::a::function::number::{n}"),) for n in range(30)]
    rows = [row(10**12 + n, 10**11, 10**10, 10**11 + n, stack) for n, stack in enumerate(stacks)]
    short, full = lines(report(*rows)), lines(report(*rows), verbose=True)
    assert any(line.startswith("18 more places") for line in short)
    assert sum("very" in line for line in full) > 50


def test_what_is_in_no_allocation():
    assert any("1,234 bytes" in line for line in lines(report(elsewhere={(7, "app"): Outside(1234)})))
    assert lines(report()) == []


def test_what_is_behind_an_allocation():
    def said(outside):
        return " ".join(" ".join(lines(report(one, elsewhere={(7, "app"): outside}))).split())

    one = row(100, 100, 0, 100)
    text = said(Outside(1234, 34, one.allocation))
    assert (
        "app (pid 7): kernels touched 34 bytes behind the end of an allocation of 100 bytes (made by" in text
    )
    assert "out of bounds" in text and "touched 1,200 bytes outside of all known allocations" in text
    assert "outside of all" not in said(Outside(34, 34, one.allocation))


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "?"), (0, "0"), (9_999_999, "9,999,999"), (10**7, "10.0M"), (1234567890123, "1.2T")],
)
def test_numbers(count, text):
    assert coverage_text._number(count) == text


def test_of_allocations_from_before_nothing_is_claimed():
    made = report(row(100, 0, 0, 0, (), call="before"), row(50, 0, 0, 0))
    text = lines(made)
    assert ["100", "0", "0", "100", "(made", "before)"] in [line.split() for line in text]
    assert any("earlier accesses are unknown" in line for line in text)
    assert any("never touched by kernels: 1 allocation" in line and "50 bytes" in line for line in text)
    assert "made before" not in "\n".join(lines(report(row(50, 0, 0, 0))))


def test_of_several_processes_each_row_says_whose_it_is():
    def owned(pid, gpu, **more):
        one = row(10**10, 10**9, 0, 10**9, **more)
        return replace(one, allocation=replace(one.allocation, pid=pid, process=pid, gpu=gpu, comm="c" * 15))

    text = lines(report(owned(4194304, 0), owned(4194304, 1), owned(9, 0), owned(9, 0)))
    assert [line.split()[0:3:2] for line in text[2:6]] == [
        ["PID", "GPU"],
        *(["9", "0"], ["4194304", "0"], ["4194304", "1"]),
    ]
    assert text[3].split()[-2] == "2"  # of one place and GPU
    amd = owned(8, 0)
    amd = replace(amd, allocation=replace(amd.allocation, vendor=Vendor.AMD))
    both = [line.split()[2:4] for line in lines(report(owned(9, 0), amd))[3:5]]
    assert sorted(both) == [["AMD", "0"], ["NVIDIA", "0"]]


def test_footprints():
    made = report(
        footprints=[Footprint(7, "app", 0, "_Z3foov", 10, 320), Footprint(7, "app", 0, "bar", None, None)]
    )
    text = list(coverage_text.footprint_lines(made, []))
    assert any(line.split() == ["foo", "320", "10", "?", "?"] for line in text)
    assert any(line.split() == ["bar", "?", "?", "?", "?"] for line in text)
    full = replace(made, full=True)
    assert "--granule 32" in "".join(coverage_text.footprint_lines(full, []))
    assert "--granule" not in "".join(coverage_text.footprint_lines(full, [], granule=32))
    assert coverage_text.footprint_record(made.footprints[0], 25) == {
        "type": "footprint", "pid": 7, "comm": "app", "gpu": 0, "vendor": "nvidia", "wave": 32,
        "kernel": "foo", "demangled": "foo()", "mangled": "_Z3foov",
        "sectors": 10, "bytes": 320, "requests": 25, "reuse": 2.5,
    }  # fmt: skip


def test_frames_in_files_are_told_by_their_symbols():
    record = coverage_text.allocation_record(row(1, 1, 1, 1, (frame("", sys.executable),)), 16)
    assert record["within_bytes"] == 16 and record["untouched_bytes"] == 0
    assert record["stack"][0].startswith(("python", "_start"))

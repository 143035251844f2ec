"""gputop's report of any processes and kernels: their number, sizes and hostile names."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from gpubpf.agent.definitions import Vendor
from gpubpf.gpus.devices import GpuDevice
from gpubpf.show.fields import Fields
from gpubpf.show.output import Output
from gpubpf.show.result_writer import ResultWriter
from gpubpf.top.records import GPU, PROCESS
from gpubpf.top.report import SORTS, Report
from gpubpf.top.usage import GRAPH, GpuUse, Interval, KernelUse, Use
from gpubpf_properties import NUMBERS, generated, rngs
from gpubpf_schema import problems
from gpubpf_text import COMMS, KERNELS, PIDS


def interval(rng: random.Random, most: int) -> Interval:
    """An interval with at most so many processes."""
    vendors = rng.choice(((Vendor.NVIDIA,), (Vendor.AMD,), (Vendor.NVIDIA, Vendor.AMD)))
    length = rng.choice((0, 10**6, 10**9, 10**12))
    uses = []
    for number in range(rng.randint(0, most)):
        vendor = rng.choice(vendors)
        kernels = [
            KernelUse(rng.choice((*KERNELS, GRAPH)), rng.choice(NUMBERS), rng.choice(NUMBERS))
            for _ in range(rng.choice((0, 1, 3, 40)))
        ]
        use = Use(
            number,
            rng.choice(PIDS),
            rng.choice(COMMS),
            rng.randrange(rng.choice((1, 16))),
            vendor,
            None,
            length,
        )
        use.busy_ns = rng.choice((None, 0, length // 3, length))
        use.launches, use.copies_bytes, use.memory_bytes = (rng.choice(NUMBERS) % 2**43 for _ in range(3))
        use.waits, use.wait_ns = rng.choice(NUMBERS), rng.choice(NUMBERS)
        use.kernels = kernels
        uses.append(use)
    pairs = {(use.vendor.word, use.gpu): use for use in uses}
    gpus = [GpuUse(one.vendor, one.gpu, length, rng.choice((None, length // 2)), 1) for one in pairs.values()]
    return Interval(10**9, 10**9 + length, tuple(uses), tuple(gpus), rng.choice((0, 5)))


@generated(60, rng=rngs)
def test_text_fits_a_terminal(rng: random.Random) -> None:
    report = Report(rng.choice(list(SORTS)), rng.choice((None, 1, 100)), False)
    for line in report.lines(interval(rng, rng.choice((1, 3, 30)))):
        assert len(line) <= 80 and line.isprintable(), line


@generated(60, rng=rngs)
def test_a_screen_of_any_size(rng: random.Random) -> None:
    report = Report(rng.choice(list(SORTS)), rng.choice((None, 1, 100)), False, rng.choice(("", "a notice")))
    shown = interval(rng, rng.choice((1, 3, 300)))
    width, height = rng.choice((1, 20, 79, 80, 200)), rng.choice((0, 1, 5, 22, 60))
    lines = report.screen(rng.choice((shown, None)), width, height)
    assert len(lines) <= height and all(line.text.isprintable() for line in lines)
    if width >= 79:
        assert all(len(line.text) <= width for line in lines), lines


def test_a_screen_shows_both_tables_and_how_much_it_leaves_out() -> None:
    kernels = [KernelUse(f"kernel{n}", 100 - n, 1) for n in range(50)]
    uses = [Use(n, n, "app", 0, Vendor.NVIDIA, None, 100, 50, n, kernels=kernels) for n in range(1, 101)]
    shown = Interval(0, 100, tuple(uses), (GpuUse(Vendor.NVIDIA, 0, 100, 50, 100),), 0)
    lines = [line.text for line in Report("launches", None, False).screen(shown, 80, 22)]
    assert len(lines) == 22
    assert sum("app" in line for line in lines) == 7 and "and 93 other rows" in lines
    assert lines[4].split()[0] == "100", "sorted by launches"
    assert sum(" kernel" in line and line[-1].isdigit() for line in lines) == 7 and lines[-1].endswith(
        "other kernels"
    )
    few = Interval(0, 100, tuple(uses[:2]), shown.gpus, 0)
    lines = [line.text for line in Report("launches", None, False).screen(few, 80, 60)]
    assert len(lines) == 60 and not any("other row" in line for line in lines)
    top = [line.text for line in Report("launches", 3, False).screen(shown, 80, 60)]
    assert (
        sum("app" in line for line in top) == 3
        and sum(" kernel" in line and line[-1].isdigit() for line in top) == 3
    )


def test_many_gpus_leave_room_for_the_tables() -> None:
    uses = [Use(n, n, "app", n, Vendor.NVIDIA, None, 100, 50, n) for n in range(8)]
    gpus = tuple(GpuUse(Vendor.NVIDIA, n, 100, 10 * n, 1) for n in range(8))
    known = tuple(GpuDevice(Vendor.NVIDIA, n, utilization=n / 10 if n else None) for n in range(8))
    shown = Interval(0, 100, tuple(uses), gpus, 0, known)
    lines = [line.text for line in Report("time", None, False).screen(shown, 80, 22)]
    assert lines[1].startswith("kernels ran: GPU 0 0.0 %, GPU 1 10.0 %, ") and lines[2].endswith(
        "GPU 7 70.0 %"
    )
    assert lines[3].startswith("util: NVML 0 unknown, NVML 1 10.0 %, ")
    assert sum("app" in line for line in lines) == 8
    lines = [line.text for line in Report("time", None, False).screen(shown, 80, 60)]
    assert "GPU 7: kernels ran for 70.0 % of the time" in lines and "NVML 7: util 70 %" in lines


@generated(20, rng=rngs)
def test_records_are_as_declared(rng: random.Random) -> None:
    place = Path("/dev/null")
    writer = ResultWriter(
        argparse.Namespace(json=True, csv=False, tool="gputop", timestamps=False), Output(str(place))
    )
    one = interval(rng, 5)
    Report("time", None, False).write(one, writer)
    declared: dict[str, Fields] = {fields.name: fields for fields in (PROCESS, GPU)}
    for use in one.processes:
        assert PROCESS.record(use)["vendor"] == use.vendor.word
    for record in (*map(PROCESS.record, one.processes), *map(GPU.record, one.gpus)):
        assert not list(problems(declared[record["type"]].schema, json.loads(json.dumps(record))))

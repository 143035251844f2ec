"""Instances of a kernel that are added up, and those that are not."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpubpf.agent.definitions import InstancePart
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.inject.values import Site
from gpubpf.record import replace
from gpubpf.records.results import Instance, merged
from gpubpf.session import readout

COUNTS = MapDefinition("counts", "thread_array", 4, 8, 1, value_type="<u8")


def test_the_contexts_of_a_program_are_added_up_but_not_the_programs_of_a_process() -> None:
    values = np.array([1, 2, 0], "<u8").tobytes()  # two threads, and what found no room
    one = Instance(7, "app", 0, "_Z1kv", (1, 1, 1), (2, 1, 1), 3, COUNTS, values, 2, None, None, process=1)
    other_context = replace(one, context=1)
    next_program = replace(one, comm="next", process=2)
    found = merged([one, other_context, next_program])
    assert [(i.comm, i.launches, i.array.ravel().tolist()) for i in found] == [
        ("app", 6, [2, 4]),
        ("next", 3, [1, 2]),
    ]


def test_the_blocks_of_all_launch_shapes() -> None:
    shapes = [((3, 4, 1), 2), ((5, 1, 1), 1), ((0, 0, 0), 3)]  # the last one is for all shapes
    instances = [InstancePart(0, 0, grid, (32, 1, 1), launches, ()) for grid, launches in shapes]
    contexts = dict.fromkeys((1, 2), SimpleNamespace(snapshot=SimpleNamespace(gpu=0, instances=instances)))
    process = SimpleNamespace(number=1, names={0: "k"}, snapshots=contexts)
    measurement = SimpleNamespace(lock=threading.Lock(), all_processes=lambda: [process])
    assert readout.blocks(measurement) == {(1, 0, "k"): 2 * (2 * 12 + 5)}  # type: ignore[arg-type]


def test_sites_that_differ_between_builds_are_left_out_unless_the_build_is_known() -> None:
    one = (Site(0, "k", 1), Site(1, "k", 2), Site(2, "k", 3))
    other = (Site(0, "k", 1), Site(1, "k", 9))
    process = SimpleNamespace(pid=7, sites={"k": [one, other]})
    measurement: Any = SimpleNamespace(lock=threading.Lock(), processes=[process])
    assert sorted(readout.sites(measurement, "k", 7)) == [0, 2]
    for build, table in enumerate((one, other)):
        assert readout.sites(measurement, "k", 7, build) == dict(enumerate(table))
    assert readout.sites(measurement, "k", 7, 2) == {}


def test_a_kernel_of_a_header_has_the_same_sites_in_every_module() -> None:
    """Only their lines in the PTX differ. Without source lines, all sites must agree."""

    def found(*tables: list[Site]) -> dict[int, Site]:
        process = SimpleNamespace(pid=7, sites={"k": tables})
        measurement = SimpleNamespace(lock=threading.Lock(), processes=[process])
        return readout.sites(measurement, "k", 7)  # type: ignore[arg-type]

    def table(line: int, source: str, *widths: int) -> list[Site]:
        return [
            Site(n, "k", line + n, source, 5 * bool(source), width=width) for n, width in enumerate(widths)
        ]

    assert found(table(40, "k.h", 4, 8), table(90, "k.h", 4, 8)) == {
        n: Site(n, "k", 0, "k.h", 5, width=width) for n, width in ((0, 4), (1, 8))
    }
    assert found(table(40, "k.h", 4, 8), table(90, "k.h", 4, 2)).keys() == {0}
    assert found(table(40, "k.h", 4), table(90, "other.h", 4)) == {}
    assert found(table(40, "", 4, 8), table(90, "", 4, 8)) == dict(enumerate(table(40, "", 4, 8)))
    assert found(table(40, "", 4, 8), table(90, "", 4, 2)) == {}

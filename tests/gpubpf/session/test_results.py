"""Instances of a kernel that are added up, and those that are not."""

from __future__ import annotations

import dataclasses

import numpy as np

from gpubpf.ebpf.maps import MapDefinition
from gpubpf.session.results import Instance, merged

COUNTS = MapDefinition("counts", "thread_array", 4, 8, 1, value_type="<u8")


def test_the_contexts_of_a_program_are_added_up_but_not_the_programs_of_a_process() -> None:
    values = np.array([1, 2, 0], "<u8").tobytes()  # two threads, and what found no room
    one = Instance(7, "app", 0, "_Z1kv", (1, 1, 1), (2, 1, 1), 3, COUNTS, values, 2, None, None, process=1)
    other_context = dataclasses.replace(one, context=1)
    next_program = dataclasses.replace(one, comm="next", process=2)
    found = merged([one, other_context, next_program])
    assert [(i.comm, i.launches, i.array.ravel().tolist()) for i in found] == [
        ("app", 6, [2, 4]),
        ("next", 3, [1, 2]),
    ]

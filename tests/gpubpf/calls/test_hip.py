"""Calls to AMD's own library without a GPU: each is recorded once, with its arguments and its result."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from gpubpf.calls import arrays
from gpubpf.calls.api import hip
from gpubpf.calls.probes import CallCounts, CallOptions, CallProbes
from gpubpf.linux import libraries
from gpubpf.linux.libraries import LibraryNames
from gpubpf_commands import words
from gpubpf_host import needs_bpf

HERE = Path(__file__).parent
FOUND = libraries.files(LibraryNames("libamdhip64.so.5"))

pytestmark = [needs_bpf, pytest.mark.skipif(not FOUND, reason="needs libamdhip64-5")]


def test_each_call_of_a_program(tmp_path: Path) -> None:
    threads, launches = 8, 2000
    compiler = "gcc -O1 -Wall -Wextra -Werror -pthread {here}/hip.c -o {place}/hip {library}"
    subprocess.run(words(compiler, here=HERE, place=tmp_path, library=FOUND[0]), check=True)
    said: list[str] = []
    calls = CallProbes(hip(), hip().choose(["*", "trivial"]), CallOptions(events=True), said.append)
    try:
        calls.start()
        calls.trace(os.getpid())
        program = subprocess.Popen(
            [tmp_path / "hip", str(threads), str(launches)], stdout=subprocess.PIPE, text=True
        )
        calls.forget(os.getpid())
        told, _ = program.communicate()
        handle, *results = told.split()
        calls.stop()
        sums, events = calls.sums(), calls.events()
        counts = calls.counts
    finally:
        calls.close()
    own = {"hipMalloc", "hipMemcpy", "hipGetDeviceCount", "hipLaunchKernel", "hipDeviceSynchronize"}
    names = np.array([hip().functions[n].name for n in sums["function"]])
    assert set(names) == own and set(sums["tgid"].tolist()) == {program.pid}
    by_name = dict(zip(names, sums, strict=True))
    assert {name: int(s["count"]) for name, s in by_name.items()} == {
        **dict.fromkeys(own, 1),
        "hipLaunchKernel": threads * launches,
    }
    assert int(results[3]) == by_name["hipLaunchKernel"]["errors"] == threads * launches
    assert by_name["hipLaunchKernel"]["kernel"] == int(handle, 16)
    assert len(events) + counts.records == sums["count"].sum() and counts == CallCounts(
        records=counts.records
    )
    assert said == []

    given = {"hipGetDeviceCount": 0, "hipMalloc": 1, "hipMemcpy": 2, "hipDeviceSynchronize": 4}
    for number in np.unique(events["function"]):
        function, some = hip().functions[number], events[events["function"] == number]
        if function.name in given:
            assert some["result"].tolist() == [int(results[given[function.name]])] and some["failed"].all()
            size = {"hipMalloc": 4096, "hipMemcpy": 8}.get(function.name)
            if size is not None:
                sizes = arrays.values(function, some, "bytes")
                assert sizes is not None and sizes.tolist() == [size]
            continue
        assert set(some["result"].tolist()) == {101}
        for field, wanted in (("grid", [1, 2, 3]), ("block", [4, 5, 6])):
            shapes = arrays.shapes(function, some, field)
            assert shapes is not None and (shapes == wanted).all()
        for field, value in (("shared", 77), ("stream", 0x1234), ("kernel", int(handle, 16))):
            values = arrays.values(function, some, field)
            assert values is not None and (values == value).all()

#!/usr/bin/env python3
"""What programs at functions of a library cost: ns of a call, by the ways of attaching; and records read from a ring a second.

    sudo PYTHONPATH=lib python3 benchmarks/uprobes.py [CALLS]

A program calls a function that does nothing, CALLS times in one thread; what is attached does nothing, or keeps the entry until the
return and sends a record. `push`: a function that begins with a push, as most do, which the kernel need not single-step. The lowest
of several rounds, in which all ways take turns, so that a busy machine disturbs all alike.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent / "tests/gpubpf/linux/uprobes"
sys.path[:0] = [str(HERE.parent / part) for part in ("lib", "script", "tests/support", "tests/gpubpf/linux")]

import test_uprobes as tested  # noqa: E402

from gpubpf.linux import uprobes  # noqa: E402
from gpubpf.linux.host_programs import Host  # noqa: E402
from gpubpf.program import BPF  # noqa: E402

ROUNDS = 4
FUNCTIONS = tested.FUNCTIONS[:6]
EMPTY = r"""
#include <uapi/linux/ptrace.h>
int on_call(struct pt_regs *ctx) { return 0; }
int on_return(struct pt_regs *ctx) { return 0; }
"""


def host(text: str, returns: bool) -> Host:
    b = BPF(text=text)
    b.attach_uprobe("libsnoop.so", FUNCTIONS, fn_name="on_call")
    if returns:
        b.attach_uprobe("libsnoop.so", FUNCTIONS, fn_name="on_return", ret=True)
    made = b.host(None, print)
    assert made is not None
    return made


def main() -> None:
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    place = Path(tempfile.mkdtemp(prefix="gpubpf-"))
    library = place / "libsnoop.so.2.1"
    flags = f"-O1 -shared -fPIC -Wl,--version-script={SOURCES}/library.map"
    subprocess.run(f"gcc {flags} {SOURCES}/library.c -o {library}".split(), check=True)
    subprocess.run(f"gcc -O1 -pthread {SOURCES}/calls.c -o {place}/calls -ldl".split(), check=True)
    best = uprobes.best_method()
    ways = uprobes.METHODS[uprobes.METHODS.index(best) :]
    lowest: dict[str, float] = {}
    with tested.Calls(place, library, 1, calls) as process:
        for _ in range(ROUNDS):
            lowest["no probe"] = min(lowest.get("no probe", 1e9), process.go())
            lowest["no probe, push"] = min(lowest.get("no probe, push", 1e9), process.go("p"))
            for way in ways:
                uprobes.best_method = lambda chosen=way: chosen
                for text, what in ((EMPTY, "empty"), (tested.TEXT, "record")):
                    for returns in (False, True):
                        if text is tested.TEXT and not returns:
                            continue
                        with host(text, returns) as made:
                            if text is tested.TEXT:
                                tested.watch(made, process)
                            name = f"{way}: {what}, entry{' + return' if returns else ''}"
                            lowest[name] = min(lowest.get(name, 1e9), process.go())
                            lowest[name + ", push"] = min(lowest.get(name + ", push", 1e9), process.go("p"))
            uprobes.best_method = lambda: best
            with host(tested.TEXT, True) as made:  # a process that is none of those meant
                name = f"{best}: record, another process"
                lowest[name] = min(lowest.get(name, 1e9), process.go())
        with host(tested.TEXT, True) as made:
            tested.watch(made, process)
            rates = []
            for _ in range(ROUNDS):
                process.go()
                start = time.perf_counter()
                found = made.records("events")
                rates.append(len(found) / (time.perf_counter() - start))
                assert (np.diff(found["end_ns"].astype("i8")) >= 0).all()
    for name, ns in lowest.items():
        print(f"{name:40} {ns:8.0f} ns")
    print(f"records read: {max(rates) / 1e6:.1f} million a second, {found.dtype.itemsize} bytes each")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What probes at return instructions cost, against the kernel's return probes: ns of a call, and the time to attach and to detach.

    sudo PYTHONPATH=lib python3 benchmarks/returns.py [LIBRARY…]

A program calls a function that begins with a push and does nothing. What is attached does nothing. The lowest of several rounds. Then,
for each library: functions of the API, their return instructions, and the seconds to find them, to attach, and to detach. Without
LIBRARY: the libraries of HIP and CUDA that are installed here.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "lib")]

from gpubpf import elf  # noqa: E402
from gpubpf.calls.api import cuda, hip  # noqa: E402
from gpubpf.kernel import bpf_syscall, libc  # noqa: E402
from gpubpf.linux import libraries  # noqa: E402
from gpubpf.linux.returns import Code  # noqa: E402
from gpubpf.program import BPF  # noqa: E402

ROUNDS = 5
LIBRARY = """
__attribute__((noinline)) int inner(int x) { __asm__ volatile(""); return x + 1; }
int called(int x) { __asm__ volatile("" ::: "rbx"); return inner(x) + 1; }
"""
PROGRAM = """
#include <stdio.h>
#include <time.h>
int called(int);
int main(void) {
    char line[8];
    setvbuf(stdout, 0, _IOLBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        struct timespec a, b;
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a);
        for (int i = 0; i < 20000; i++) called(i);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b);
        printf("%.0f\\n", ((b.tv_sec - a.tv_sec) * 1e9 + b.tv_nsec - a.tv_nsec) / 20000);
    }
}
"""
NOTHING = bytes.fromhex("b700000000000000 9500000000000000")  # r0 = 0; exit
EMPTY = """
#include <uapi/linux/ptrace.h>
int on_call(struct pt_regs *ctx) { return 0; }
int on_return(struct pt_regs *ctx) { return 0; }
"""


def link(program: int, path: Path, offsets: list[int], returns: bool = False) -> int:
    """Attach a program, also with the kernel's return probes, which gpubpf does not use."""
    name = ctypes.create_string_buffer(str(path).encode())
    at = (ctypes.c_uint64 * len(offsets))(*offsets)
    words = (program, 0, bpf_syscall.UPROBE_MULTI, 0, ctypes.addressof(name), ctypes.addressof(at), 0, 0)
    return libc.bpf(28, struct.pack("<IIIIQQQQIII", *words, len(offsets), int(returns), 0))[0]


def costs() -> None:
    place = Path(tempfile.mkdtemp(prefix="gpubpf-"))
    library = place / "libcalled.so"
    flags = ["-O1", "-fcf-protection=none", "-x", "c", "-"]
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, *flags], input=LIBRARY, text=True, check=True)
    linked = [*flags, "-x", "none", str(library)]
    subprocess.run(["gcc", "-o", place / "program", *linked], input=PROGRAM, text=True, check=True)
    with library.open("rb") as file:
        loaded, code = elf.LoadedFile(file.fileno()), Code(file.fileno())
        address = elf.exports(loaded)["called"].address
        entry, returns = (
            [loaded.offset(address)],
            [loaded.offset(at) for at in code.returns(address).addresses],
        )
    program = bpf_syscall.load_program(
        bpf_syscall.KPROBE, NOTHING, name="nothing", attach=bpf_syscall.UPROBE_MULTI
    )
    ways = {
        "no probe": [],
        "entry": [(entry, False)],
        "entry and return instruction": [(returns, False), (entry, False)],
        "entry and the kernel's return probe": [(entry, True), (entry, False)],
    }
    with subprocess.Popen(
        [place / "program"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as running:
        assert running.stdin is not None and running.stdout is not None
        lowest = dict.fromkeys(ways, 1e9)
        for _ in range(ROUNDS):
            for way, probes in ways.items():
                links = [link(program, library, offsets, at_return) for offsets, at_return in probes]
                running.stdin.write("\n")
                lowest[way] = min(lowest[way], float(running.stdout.readline()))
                for one in links:
                    os.close(one)
        running.stdin.close()
    for way, ns in lowest.items():
        print(f"{way:40} {ns:8.0f} ns")


def attached(path: str) -> None:
    api = hip() if "hip" in path else cuda()
    symbols = [f.symbol for f in api.functions]
    with open(path, "rb") as file:
        exported = elf.exports(elf.LoadedFile(file.fileno()))
        began, code = time.process_time(), Code(file.fileno())
        found = {s: code.returns(exported[s].address) for s in symbols if s in exported}
        took = time.process_time() - began
    b = BPF(text=EMPTY)
    for name, at_return in (("on_call", False), ("on_return", True)):
        b.attach_uprobe(path, symbols, fn_name=name, ret=at_return, optional=True)
    began = time.monotonic()
    host = b.host(None, print)
    attaching = time.monotonic() - began - took
    began = time.monotonic()
    if host is not None:
        host.detach()
        host.wait_until_detached()
        host.close()
    detaching = time.monotonic() - began
    places = {at for one in found.values() for at in one.addresses}
    pairs = sum(len(one.addresses) for one in found.values())
    unseen = sum(bool(one.unseen) for one in found.values())
    print(
        f"{path}: {len(found)} functions, {unseen} without; {len(places)} return instructions, {pairs} probes at them;"
        f" found in {took:.2f} s, attached in {attaching:.2f} s, detached in {detaching:.2f} s"
    )


def main() -> None:
    costs()
    names = [*hip().libraries, *cuda().libraries]
    for path in sys.argv[1:] or [p for name in names for p in libraries.files(libraries.LibraryNames(name))]:
        attached(path)


if __name__ == "__main__":
    main()

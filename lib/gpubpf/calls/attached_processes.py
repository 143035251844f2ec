"""Announce each traced process that has loaded a library of the API, and keep the names of these processes.

traced_processes.py decides which processes are traced, and for how long.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress

from gpubpf.calls.call_fields import ATTACHED, WATCHING
from gpubpf.calls.kernel_names import KernelNames
from gpubpf.calls.probes import CallProbes
from gpubpf.calls.snoop_options import SnoopOptions
from gpubpf.calls.traced_processes import TracedProcesses
from gpubpf.linux import libraries
from gpubpf.linux.libraries import LibraryNames
from gpubpf.process import proc, traceable
from gpubpf.show import cli

_ELF_32 = b"\x7fELF\x01"


class AttachedProcesses:
    """The traced processes that have loaded a library of the API, so that its probes count their calls.

    A process counts as attached when it maps a library, or when it has made a call.
    """

    def __init__(
        self,
        processes: TracedProcesses,
        calls: CallProbes,
        kernels: KernelNames,
        options: SnoopOptions,
        out: cli.Output,
        note: Callable[[str], None],
        first_notice: str | None = None,
    ) -> None:
        self._processes, self._calls, self._kernels = processes, calls, kernels
        self._targets, self._json = options.shared.targets, options.shared.output.json
        self._out, self._note = out, note
        self._first_notice = first_notice  # printed before the first process is announced
        self._names = LibraryNames(*calls.api.libraries)
        self._of_32_bits: set[str] = set()  # 32-bit programs for which there was a notice
        self._comms: dict[int, str] = {}
        self.attached: set[int] = set()
        self.waiting: list[int] = []  # processes that were not yet seen to map a library

    @property
    def library(self) -> str:
        """The name of the library that processes must load."""
        return self._calls.api.libraries[0]

    def begin(self) -> None:
        """Announce what is traced."""
        self.waiting = list(self._processes.pids)
        if self._targets.command and (program := shutil.which(self._targets.command[0])):
            with suppress(OSError), open(program, "rb") as file:
                self._check_bits(os.path.basename(program), file.read(len(_ELF_32)) != _ELF_32)
        if self._processes.everyone:
            self._note("watching every process")
            if self._json:
                self._out.records([WATCHING.record(ts_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME))])
        self.check_maps()
        for pid in self.waiting if self._targets.pids else ():
            self._note(f"pid {pid} ({traceable.comm(pid)}) has not loaded {self.library} yet; waiting")

    def check_maps(self) -> None:
        """Announce the processes that have mapped a library since the last check."""
        for pid in tuple(self.waiting):
            with suppress(OSError):
                if libraries.mapped(pid, self._names):
                    self._announce(pid, traceable.comm(pid))
                else:
                    self._check_bits(traceable.comm(pid), proc.is_64_bit(pid))

    def _check_bits(self, name: str, is_64_bit: bool) -> None:
        """Give a notice if a program cannot load any of the libraries that have probes."""
        if not is_64_bit and name not in self._of_32_bits:
            self._of_32_bits.add(name)
            self._note(f"{name} is a 32-bit program; only calls of 64-bit libraries are traced")

    def check_calls(self) -> None:
        """Announce the processes that have made their first call since the last check."""
        for pid, comm in self._calls.seen.items():
            self._comms[pid] = comm  # the process may have executed another program
            if pid not in self.attached:
                self._announce(pid, comm)

    def _announce(self, pid: int, comm: str) -> None:
        self.attached.add(pid)
        self._comms[pid] = comm
        self._kernels.look(pid)
        if pid in self.waiting:
            self.waiting.remove(pid)
        if self._first_notice is not None:
            self._note(self._first_notice)
            self._first_notice = None
        self._note(f"attached to {pid} ({comm})")
        self._calls.announced(pid)
        if self._json:
            now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            self._out.records([ATTACHED.record(pid=pid, comm=comm, ts_ns=now)])

    def is_traced(self, pid: int) -> bool:
        """Return whether a process is known to be traced."""
        return self._processes.everyone or pid in self._comms

    def comm(self, pid: int) -> str:
        """Return the name of a process, or "" if it is unknown."""
        if pid not in self._comms:
            self._comms.update(self._calls.seen)
        return self._comms.get(pid, "")

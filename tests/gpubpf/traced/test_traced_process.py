"""What the session knows of one process."""

from __future__ import annotations

import socket

import pytest

from gpubpf.agent.definitions import Vendor
from gpubpf.agent.protocol import StackFrame
from gpubpf.images import symbols
from gpubpf.images.sidecar import Sidecar, SidecarKernel
from gpubpf.inject.values import Site
from gpubpf.lower.launch_block import LaunchBlock
from gpubpf.process import address_space
from gpubpf.process.target_socket import TargetSocket
from gpubpf.record import replace
from gpubpf.traced.traced_process import TracedProcess


def process(number: int, pid: int = 7, started: float = 1.5, vendor: Vendor = Vendor.NVIDIA) -> TracedProcess:
    made = TracedProcess(TargetSocket(socket.socket()), pid, number)
    made.started, made.vendor = started, vendor
    return made


def test_the_kernels_that_wait_are_counted_once() -> None:
    one = process(1)
    assert one.waiting == 0
    one.preparing[0] = frozenset({""})  # it is not known yet which there are
    assert one.waiting == 1
    one.preparing[1] = frozenset({"scale"})
    one.preparing[2] = frozenset({"scale"})  # in a copy made in advance
    assert one.waiting == 1
    one.preparing[3] = frozenset({"sum"})
    assert one.waiting == 2


def test_names_and_sites_are_counted_once() -> None:
    one = process(1)
    sites = tuple(Site(number, "scale", number) for number in range(10))
    kernel = SidecarKernel("scale", (), 0, LaunchBlock(0), sites)
    module = Sidecar(b"", (kernel,), {"sum": "only SASS"}, entries=("scale", "sum", "n" * 1000))
    assert one.bytes_to_keep(module) > 1000 + 10 * 100
    one.add_sites(module)
    one.entries.update(module.entries)
    assert one.bytes_to_keep(module) == 0
    other = replace(module, kernels=(replace(kernel, sites=sites[:5]),))
    assert one.bytes_to_keep(other) > 5 * 100


def test_a_program_follows_another_in_the_same_process() -> None:
    first = process(1)
    assert process(2).agent == first.agent
    assert process(2, started=2.5).agent != first.agent  # its PID was reused
    assert process(2, pid=8).agent != first.agent
    assert process(2, vendor=Vendor.AMD).agent != first.agent  # the second agent of a program


def test_a_caller_that_a_return_probe_hides_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    page = 0x7FFFFFFFE000
    maps = f"{page:x}-{page + 4096:x} --xp 00000000 00:00 0                          [uprobes]\n"
    mapped = address_space.parse(
        [*maps.encode().split(b"\n"), b"7f0000000000-7f0000002000 rwxp 00000000 00:00 0"]
    )
    monkeypatch.setattr(
        address_space,
        "mapping_at",
        lambda pid, at, most: next((m for m in mapped if m.start <= at < m.end), None),
    )
    one = process(1)
    # A return address less one: as the agent sends it.
    addresses = (page - 1, page + 0x7F, 0x7F0000000FFF, 0x7F0000001234)
    one.add_stack(3, [StackFrame(address, 0, "", "") for address in addresses])
    assert [symbols.frame_of(frame) for frame in one.stacks[3]] == [
        "unknown",
        f"{page + 0x7F:#x}",
        "0x7f0000000fff",
        "0x7f0000001234",
    ]
    assert symbols.caller(one.stacks[3]) == "unknown"

"""Runs device programs on hipsim's engine: at the exit of a kernel that does nothing."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gpubpf.ebpf.bytecode import BpfFunction, Program
from gpubpf.ebpf.probe import Probe
from gpubpf.gcn.code_object import CodeObject
from gpubpf.gcn.inject import inject
from gpubpf.lower import amdgcn
from gpubpf.verify.rules import check
from hipsim_engine import Engine, assemble, kernel


class AmdGpu:
    """An engine of one GPU, and the kernel."""

    def __init__(self, place: Path, gpu: str) -> None:
        self.place, self.runs = place, 0
        self.code = CodeObject(assemble(kernel("none", "", gpu=gpu), place, gpu).read_bytes())
        self.engine = Engine(place, gpu=gpu)

    def run(self, made: Program, function: BpfFunction, maps: Mapping[str, bytes]) -> dict[str, bytes]:
        """Run a program once, in one thread, and give its maps afterwards."""
        (empty,) = self.code.kernels
        program = amdgcn.lower(made, check(made, function), empty.descriptor.wave)
        injected = inject(self.code, {"none": [Probe(program, "exit")]})
        assert not injected.refusals
        block = injected.kernels["none"].block
        words = ["u64 0"] * (block.size // 8)
        for name, content in maps.items():
            self.engine.put(name, np.frombuffer(content, np.uint8))
            words[block.bases[name] // 8] = name
        if block.shape is not None:
            ones = f"u64 {struct.unpack('<Q', struct.pack('<II', 1, 1))[0]}"
            words[block.shape // 8 : block.shape // 8 + 3] = [ones] * 3
        self.runs += 1  # the engine keeps code by its name
        image = self.place / f"{self.runs}.co"
        image.write_bytes(injected.image)
        self.engine.load(image)
        outcome = self.engine.run("none", words, (1, 1, 1), (1, 1, 1))
        assert outcome.fault is None, outcome.fault
        return {
            name: self.engine.get(name, np.uint8).tobytes()[: len(content)] for name, content in maps.items()
        }

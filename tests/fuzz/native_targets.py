"""The readers in C++: what each target is built from, and inputs to start from. The targets are in native/.

With clang, a target is a program of libFuzzer's. With g++, native/main.cpp replays inputs and makes changed ones.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cudasim_device import cuda_include
from fuzz.targets import INPUTS, Seeds, cubins, elf_seeds, image_seeds, overlapping_sections
from gpubpf import elf
from gpubpf.agent import protocol
from gpubpf.agent.definitions import BlockField, HostCode, MapSpec, Place, Unit
from gpubpf.images import fatbin

ROOT = Path(__file__).resolve().parents[2]
NATIVE = Path(__file__).parent / "native"
AGENT, DEVICE = ROOT / "lib/gpubpf/agent", ROOT / "lib/cudasim"
# Each target is linked with few parts of the library: what those call elsewhere is not reached.
_OPTIONS = ("-std=c++17", "-g1", "-pthread", "-no-pie", "-Wl,--unresolved-symbols=ignore-all")
_CHECKS = ("-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")


@dataclass(frozen=True)
class NativeTarget:
    """A reader in C++. `parts`: the files beside the target's own that it is linked with. `what`: a description."""

    name: str
    what: str
    folder: Path
    parts: tuple[str, ...]
    seeds: Seeds
    libraries: tuple[str, ...] = ()

    @property
    def inputs(self) -> list[bytes]:
        """Inputs to start from, and those that were once read wrongly."""
        return [*self.seeds(), *(file.read_bytes() for file in sorted(INPUTS.glob(f"{self.name}-*")))]

    def build(self, directory: Path) -> Path:
        """Build the target without libFuzzer."""
        return self._build(
            directory, ["g++", "-O0", "-fsanitize=address,undefined", str(NATIVE / "main.cpp")]
        )

    def build_fuzzer(self, directory: Path) -> Path:
        """Build the target with libFuzzer. Needs clang."""
        clang = shutil.which("clang++")
        assert clang is not None
        return self._build(directory, [clang, "-O1", "-fsanitize=fuzzer,address,undefined"])

    def _build(self, directory: Path, compiler: list[str]) -> Path:
        program = directory / self.name
        generated = self.folder / ("lib/build" if self.folder == AGENT else "build")
        sources = [NATIVE / f"{self.name}.cpp", *(self.folder / "src" / part for part in self.parts)]
        include = [
            "-iquote",
            self.folder / "src",
            "-iquote",
            ROOT / "lib",
            f"-I{generated}",
            "-isystem",
            cuda_include() or "/usr/include",
        ]
        subprocess.run(
            [*compiler, *_OPTIONS, *_CHECKS, *include, *sources, *self.libraries, "-o", program],
            check=True,
            capture_output=True,
            text=True,
        )
        return program


def answer_seeds() -> Iterable[bytes]:
    spec = MapSpec(1024, 8, b"abc", Unit.CONTEXT, Place.GPU)
    host = HostCode("launch", b"\xc3", b"parameters", ((0, 0, 1), (2, 0, 3)))
    config = protocol.AgentConfig(
        [spec, spec], 1 << 20, log_records=1024, host=[host], clock_kernels={90: b"cubin"}
    )
    yield b"W" + protocol.welcome(config, 1)[8:]
    fields = (BlockField(0, 16, 24), BlockField(1, 32, None))
    layout = protocol.KernelLayout("kernel", [8, 4], 16, bytes(64), fields, pid_tgid=40, kernel=48)
    slots = [
        protocol.VariableSlot("variable", 0, True, ("kernel",)),
        protocol.VariableSlot("table", 1, False, (), 8, "a reason"),
    ]
    sidecar = protocol.sidecar(
        7,
        100,
        [layout],
        {"other": "a reason"},
        slots,
        None,
        [("child", "copy")],
        ["later", "first"],
        ["first"],
    )
    yield b"S" + sidecar[12:]
    yield b"S" + struct.pack("<Q", 1 << 30) + sidecar[20:]  # a file that is much smaller
    yield b"M" + struct.pack("<IQ", 1, 4096)
    yield b"C" + struct.pack("<IIIQQ", 0, 1, 2, 5, 6)
    yield sidecar + protocol.drain(1, 0.5, 0)


def code_seeds() -> Iterable[bytes]:
    """Beginnings of functions."""
    yield bytes.fromhex("f30f1efa554889e54883ec20e80000000031c0c3")
    yield bytes.fromhex("4157415641554154554889fd534881ec98000000488b05000000000f84100000007505ebf0c3")
    yield bytes.fromhex("c5f877c4e2f92ec1628101480f6f05000000000f1f8400000000000fb6c0e2fe")
    yield bytes.fromhex("66662e0f1f840000000000b801000000488b0425000000006690ff2500000000")


def arm_code_seeds() -> Iterable[bytes]:
    """Beginnings of functions for aarch64."""
    yield bytes.fromhex("5f2403d53f2303d5fd7bbea9fd030091e00300aac0035fd6bf2303d5")
    yield bytes.fromhex("ff8300d1090000b0290140f90a000010400000b4ffffff97000000140b000058c00000541f2003d5")
    yield bytes.fromhex("4000009c600000362000805201000094010000d4200020d4")


def device_image_seeds() -> Iterable[bytes]:
    seeds = list(image_seeds())
    yield from seeds
    packed = bytearray(seeds[0])
    struct.pack_into("<IIQ", packed, 0, fatbin.WRAPPER_MAGIC, 1, 0)
    yield bytes(packed[:16]) + bytes(8) + seeds[0]  # a wrapper
    # Its list of fat binaries is in memory that is mapped, but cannot be read (native/device_images.cpp).
    yield struct.pack("<IIQQ", fatbin.WRAPPER_MAGIC, 2, 0, 1 << 20) + seeds[0]
    # Sizes that wrap around the address space.
    packed = bytearray(seeds[0])
    struct.pack_into("<Q", packed, 8, (1 << 64) - 1)
    struct.pack_into("<Q", packed, 16 + 8, (1 << 64) - 200)
    yield from (bytes(packed) + bytes(after) for after in range(0, 4096, 512))  # at several places of a page
    # A section of no type with contents anywhere.
    cubin = bytearray(overlapping_sections(b".cudasim.ptx", 1, b"text"))
    table = len(cubin) - 64
    struct.pack_into("<I", cubin, table + 4, elf.SHT_NULL)
    struct.pack_into("<QQ", cubin, table + 24, 1 << 40, 1 << 20)
    yield bytes(cubin)
    # A cubin that is cut short at the end of its fatbin, and an image of two gigabytes from some bytes.
    for whole in cubins()[-1:]:
        yield fatbin_of(2, whole[: len(whole) // 2])
    large = bytearray(seeds[2])
    struct.pack_into("<Q", large, 16 + 0x38, 1 << 31)
    yield bytes(large)


def library_seeds() -> Iterable[bytes]:
    """Libraries: two with section headers, a small one whose name begins with "lib", and that one without its end."""
    yield from elf_seeds()
    library = named_library(b"libcupti.so.12")
    yield library
    yield library[:-1]
    for at in (32, 64 + 8, 64 + 32, 120 + 8, 120 + 16, 120 + 32, 176 + 8, 176 + 24, 176 + 40):
        yield library[:at] + struct.pack("<q", -16) + library[at + 8 :]


def named_library(name: bytes) -> bytes:
    """Return a library that has nothing but a DT_SONAME."""
    dynamic = struct.pack("<8q", 5, 0x1000 + 240, 10, len(name) + 2, 14, 1, 0, 0)
    strings = b"\0" + name + b"\0"
    size = 176 + len(dynamic) + len(strings)
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0)
    load = struct.pack("<IIQQQQQQ", elf.PT_LOAD, 4, 0, 0x1000, 0x1000, size, size, 4096)
    dynamics = struct.pack("<IIQQQQQQ", 2, 4, 176, 0x1000 + 176, 0, len(dynamic), len(dynamic), 8)
    return header + load + dynamics + dynamic + strings


def cache_seeds() -> Iterable[bytes]:
    """The file of the target's content, and files of another version, content, name and length."""
    for name, content, mark in (
        (b"module", b"content", b"gpubpf cache 1.\n"),
        (b"module", b"content", b"gpubpf cache 0.\n"),
        (b"other", b"another", b"gpubpf cache 1.\n"),
    ):
        made = content + hashlib.sha256(name + b"\0" + content).digest() + mark
        yield from (made, made[1:], made[:-1], b"")


def fatbin_of(kind: int, payload: bytes) -> bytes:
    """Return a fatbin of one image for sm_90."""
    image = struct.pack("<HHIQIIHHIIIQQQ", kind, 0x101, 64, len(payload), 0, 0, 0, 8, 90, 0, 0, 0, 0, 0)
    return struct.pack("<IHHQ", fatbin.FATBIN_MAGIC, 1, 16, len(image) + len(payload)) + image + payload


TARGETS = {
    target.name: target
    for target in (
        NativeTarget(
            "agent_answers", "the agent: what the tool sends", AGENT,
            ("wire.cpp", "messages.cpp", "shared_files.cpp", "state.cpp", "copies/sidecar.cpp", "copies/shared.cpp",
             "log/host_program.cpp", "log/log.cpp", "machine/x86_64/cpu.cpp"), answer_seeds,
        ),
        NativeTarget(
            "program_code", "the agent: code that it patches", AGENT,
            ("machine/x86_64/instruction.cpp", "machine/x86_64/code.cpp", "file_code.cpp"), code_seeds,
        ),
        NativeTarget(
            "arm_code", "the agent: code for aarch64 that it patches", AGENT,
            ("machine/aarch64/instruction.cpp", "machine/aarch64/code.cpp", "file_code.cpp"), arm_code_seeds,
        ),
        NativeTarget(
            "agent_libraries", "the agent: libraries that it copies or searches", AGENT, ("wire.cpp",), library_seeds,
        ),
        NativeTarget(
            "device_images", "the embedded device: images", DEVICE, ("driver/cubin.cpp", "driver/fatbin.cpp"),
            device_image_seeds, ("-l:libzstd.a", "-l:liblz4.a"),
        ),
        NativeTarget(
            "device_cache", "the embedded device: files of its cache", DEVICE, (), cache_seeds,
        ),
        NativeTarget(
            "launch_parameters", "the embedded device: parameters of launches", DEVICE, (),
            lambda: [bytes([2, 1, 8, 4]) + bytes(12), bytes([3, 0, 1, 200, 4]), bytes([2, 3, 8, 4])],
        ),
    )
}  # fmt: skip

"""bpf_conformance: eBPF programs with the result that each must have, through each lowering."""

from __future__ import annotations

import ctypes
import functools
import mmap
import multiprocessing
import re
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import hipsim_engine
from conformance.bpf_assembler import Unknown, assemble
from conformance.driver import Driver, DriverError, Job
from conformance.outcome import DIFFERENT, REFUSED, SAME, Outcome
from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import BpfFunction, Program
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.errors import VerifyError
from gpubpf.lower import host_code, nvptx
from gpubpf.verify.rules import check
from gpubpf_amd import AmdGpu
from gpubpf_asm import Code, call_program, jump, leave, lookup, mov, movi, program, store

URL = "https://github.com/Alan-Jowett/bpf_conformance"
COMMIT = "f558566280d8e76c95a502cfd8014264d8668130"


@dataclass(frozen=True)
class Case:
    """A program, which gets the address and the length of `memory`, and the r0 that it must return."""

    name: str
    text: str
    memory: bytes
    result: int


def cases(directory: Path) -> Iterator[Case]:
    """Read the suite's files, sorted by name."""
    for path in sorted((directory / "tests").glob("*.data")):
        yield case(path.stem, path.read_text())


def case(name: str, text: str) -> Case:
    """Read a file: sections that begin with `-- NAME`."""
    parts = re.split(r"^-- (.+)$", re.sub(r"#.*", "", text), flags=re.MULTILINE)[1:]
    sections = dict(zip(map(str.strip, parts[::2]), parts[1::2], strict=True))
    return Case(name, sections["asm"], bytes.fromhex(sections.get("mem", "")), int(sections["result"], 0))


def made(given: Case) -> Callable[[str], tuple[Program, BpfFunction]]:
    """Return the case as a program for a point. It becomes a function that a small main program calls.

    The main program passes the value of the map `out`, which begins with the memory, and stores r0 behind it.
    """
    body = assemble(given.text)
    room = _result_at(given)
    call: Code = [
        mov(1, 6) if given.memory else movi(1, 0),
        movi(2, len(given.memory)),
        call_program(3),
        store(6, room, 0),
        movi(0, 0),
        leave(),
    ]
    code = [*lookup("out"), jump(b.JNE, 0, 2, imm=0), movi(0, 0), leave(), mov(6, 0), *call, *body]

    def at(point: str) -> tuple[Program, BpfFunction]:
        kind = "array" if point == "exit" else "shared_array"
        return program(code, [MapDefinition("out", kind, 4, room + 8, 1)], point)

    return at


def _result_at(given: Case) -> int:
    return (len(given.memory) + 7) // 8 * 8


def by_ptx(given: Case) -> int:
    """Return what the program gives as PTX on the embedded device."""
    whole, function = made(given)("exit")
    fragment = nvptx.lower(whole, check(whole, function))
    lines = ["ld.param.b64 %given, [first];", "ld.param.b64 %result, [second];"]
    for argument in fragment.arguments:
        assert argument.kind == "map_base", f"the suite's programs need no {argument.kind}"
        lines += [f".reg .b64 {argument.register};", f"mov.b64 {argument.register}, %given;"]
    lines += [
        fragment.ptx,
        f"ld.b64 %value, [%given+{_result_at(given)}];",
        "st.b64 [%result], %value;",
        "ret;",
    ]
    text = "\n".join(
        [
            ".version 8.0\n.target sm_90\n.address_size 64",
            ".visible .entry program(.param .b64 first, .param .b64 second) {",
            ".reg .b64 %given, %result, %value;",
            *lines,
            "}\n",
        ]
    )
    raw = _driver().run(Job(text, "program", given.memory.ljust(_result_at(given) + 8, b"\0"), 8))
    return int.from_bytes(raw, "little")


@functools.cache
def _driver() -> Driver:
    return Driver()


def by_x86(given: Case) -> int:
    """Return what the program gives as x86-64 machine code in this process."""
    native = host_code.lower(*made(given)("launch"))
    if any(value.kind == "helper" for value in native.values):
        raise Unknown("calls a helper, which only the agent has")
    room = _result_at(given)
    memory = ctypes.create_string_buffer(given.memory.ljust(room, b"\0"), room + 8)
    values = (ctypes.c_uint64 * (len(native.values) + 1))(
        *(ctypes.addressof(memory) if value.kind == "map_base" else 0 for value in native.values)
    )
    with mmap.mmap(-1, len(native.code), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as code:
        code.write(native.code)
        held = ctypes.c_char.from_buffer(code)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.addressof(held))(values)
        del held
    return int.from_bytes(memory.raw[room:], "little")


def by_amd(gpu: str, given: Case) -> int:
    """Return what the program gives as code for an AMD GPU, on the engine of the embedded device."""
    room = _result_at(given)
    memory = given.memory.ljust(room + 8, b"\0")
    return int.from_bytes(_amd_gpu(gpu)[0].run(*made(given)("exit"), {"out": memory})["out"][room:], "little")


@functools.cache
def _amd_gpu(gpu: str) -> tuple[AmdGpu, tempfile.TemporaryDirectory[str]]:
    place = tempfile.TemporaryDirectory(prefix="gpubpf-bpf-")
    return AmdGpu(Path(place.name), gpu), place


AMD_GPUS = ("gfx90a", "gfx1030")  # waves of 64 and of 32 lanes
WAYS: dict[str, Callable[[Case], int]] = {"ptx": by_ptx, "x86-64": by_x86}
if hipsim_engine.missing() is None:
    WAYS |= {gpu: functools.partial(by_amd, gpu) for gpu in AMD_GPUS}


def run(directory: Path, jobs: int) -> Iterator[Outcome]:
    """Run each program of the suite through each lowering."""
    # Not by fork: CUDA does not survive it, should this process use CUDA.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as processes:
        for found in processes.map(outcomes, cases(directory)):
            yield from found


def outcomes(given: Case) -> list[Outcome]:
    """Run a case through each lowering."""
    return [_outcome(given, way, lowering) for way, lowering in WAYS.items()]


def _outcome(given: Case, way: str, lowering: Callable[[Case], int]) -> Outcome:
    try:
        found = lowering(given)
    except (VerifyError, Unknown) as error:
        return Outcome(given.name, way, REFUSED, reason(str(error)))
    except (AssertionError, DriverError) as error:
        return Outcome(given.name, way, DIFFERENT, str(error))
    if found == given.result:
        return Outcome(given.name, way, SAME)
    return Outcome(given.name, way, DIFFERENT, f"r0 is {found:#x}, expected {given.result:#x}")


def reason(message: str) -> str:
    """Return a message of the gate without the program's name, its place, its numbers and the advice."""
    message = re.sub(r"^\w+ program \w+[^:]*: ", "", message).split("; ")[0]
    return re.sub(r"(?<!\w)-?\d+\b", "N", message)

"""What reads untrusted bytes: one function per reader, the errors that it may raise, and inputs to start from.

A target is given any bytes. A defect is: an error that is not in `refusals`, ten seconds of work, or two gigabytes of memory.
script/fuzz looks for such inputs. test_fuzz.py runs those that were found (inputs/), those in `hard`, and some thousands of others.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import hipsim_engine
from cudasim.translate.program import TranslatedModule
from gpubpf import cache, elf, names
from gpubpf.agent import definitions, protocol
from gpubpf.agent.definitions import CONTROL, LOG_HEADER, Message, Place
from gpubpf.attach import patching
from gpubpf.calls import kernel_names
from gpubpf.calls.device_times import dispatches
from gpubpf.ebpf import compile, maps
from gpubpf.ebpf.bytecode import CONTEXTS, DEVICE_POINTS, LD_IMM64, BpfFunction, Instruction, Program
from gpubpf.ebpf.probe import Probe
from gpubpf.errors import Error, ImageError, PtxError, Refusal, SessionError
from gpubpf.gcn import access, arguments, comgr, kernel_code
from gpubpf.gcn.code_object import CodeObject
from gpubpf.gcn.leaving import leaving
from gpubpf.gcn.lines import SourceLines
from gpubpf.images import assemble, code_objects, fatbin, line_table, offload_bundle, sidecar
from gpubpf.inject.inject import inject
from gpubpf.inject.values import PtxProbe
from gpubpf.launches.launches import Launches, LoggedProcess
from gpubpf.lower import amdgcn
from gpubpf.lower.fragment import Argument, Fragment
from gpubpf.process import address_space
from gpubpf.ptx import module, parser, source
from gpubpf.ptx.call_graph import CallGraph
from gpubpf.ptx.link import Input, LinkError, link
from gpubpf.records.log_file import LogFile
from gpubpf.records.operation_log import OpLog
from gpubpf.records.rings import RingReader

INPUTS = Path(__file__).parent / "inputs"
Seeds = Callable[[], Iterable[bytes]]


@dataclass(frozen=True)
class Target:
    """A reader. `read` gets any bytes, and raises nothing but `refusals`.

    seeds: inputs that it accepts, or nearly. hard: inputs that once took too long or too many stack frames.
    """

    name: str
    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    seeds: Seeds
    hard: Seeds

    def run(self, data: bytes) -> bool:
        """Read `data`; return whether it was accepted. Anything that this raises is a defect."""
        try:
            self.read(data)
        except self.refusals:
            return False
        return True

    @property
    def kept(self) -> list[bytes]:
        """Inputs that were once read wrongly."""
        return [file.read_bytes() for file in sorted(INPUTS.glob(f"{self.name}-*"))]


TARGETS: dict[str, Target] = {}


def target(
    *refusals: type[Exception], seeds: Seeds, hard: Seeds = tuple
) -> Callable[[Callable[[bytes], object]], Callable[[bytes], object]]:
    """Make a function a target of its own name."""

    def add(read: Callable[[bytes], object]) -> Callable[[bytes], object]:
        TARGETS[read.__name__] = Target(read.__name__, read, refusals, seeds, hard)
        return read

    return add


def memory_file(data: bytes) -> int:
    """Return a file with these contents, sealed as an agent's files are."""
    file = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.write(file, data)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return file


# --- files of device code ---------------------------------------------------------------------------------

PTX = b"""\
.version 8.0
.target sm_80
.address_size 64
.global .align 4 .u32 counter = 7;
.const .align 8 .b8 table[16] = {1, 2, 3, 4, 5, 6, 7, 8};
.extern .shared .align 16 .b8 room[];
.func (.reg .u32 r) twice(.reg .u32 a) { add.u32 r, a, a; ret; }
.visible .entry scale(.param .u64 p, .param .u32 n) .maxntid 256, 1, 1
{
 .reg .pred %p<3>; .reg .b32 %r<8>; .reg .b64 %rd<6>; .reg .f32 %f<4>;
 .loc 1 3 5
 ld.param.u64 %rd1, [p]; ld.param.u32 %r1, [n];
 mov.u32 %r2, %tid.x; mov.u32 %r3, %ctaid.x; mad.lo.s32 %r4, %r3, 32, %r2;
 setp.ge.u32 %p1, %r4, %r1;
 @%p1 bra DONE;
 mul.wide.u32 %rd2, %r4, 4; add.s64 %rd3, %rd1, %rd2;
LOOP:
 ld.global.f32 %f1, [%rd3]; fma.rn.f32 %f2, %f1, 0f40000000, %f1; st.global.f32 [%rd3], %f2;
 ld.global.v2.u32 {%r5, %r6}, [counter]; atom.global.add.u32 %r7, [counter], 1;
 setp.lt.u32 %p2, %r7, 9; @%p2 bra LOOP;
 bar.sync 0;
 { .param .b32 q0; st.param.b32 [q0], %r7; }
DONE: ret;
}
"""

# Calls through pointers from a variable, a local array and an argument, and a kernel that launches another one.
POINTERS = b"""\
.version 8.0
.target sm_80
.address_size 64
.extern .func (.param .b64 r) cudaGetParameterBufferV2(.param .b64 f, .param .align 4 .b8 g[12], .param .align 4 .b8 b[12],
 .param .b32 s);
.extern .func (.param .b32 r) cudaLaunchDeviceV2(.param .b64 p, .param .b64 s);
.func one(.param .b64 x) { ret; }
.func two(.param .b64 x) { ret; }
.global .align 8 .u64 table[2] = {one, two};
.func apply(.param .b64 f, .param .b64 x) { .reg .b64 %rd<3>; ld.param.u64 %rd1, [f]; ld.param.u64 %rd2, [x];
 { .param .b64 q; st.param.b64 [q], %rd2; p: .callprototype ()_ (.param .b64 _); call %rd1, (q), p; } ret; }
.func other(.param .b64 x) { ret; }
.visible .entry child(.param .u64 p) { ret; }
.visible .entry parent(.param .u64 p, .param .u32 n)
{
 .local .align 8 .b8 depot[32]; .reg .b64 %rd<9>; .reg .b32 %r<5>; .reg .pred %p<2>;
 ld.param.u64 %rd1, [p]; ld.param.u32 %r1, [n];
 mul.wide.s32 %rd2, %r1, 8; mov.u64 %rd3, table; add.s64 %rd3, %rd3, %rd2; ld.global.u64 %rd4, [%rd3];
 { .param .b64 q; st.param.b64 [q], %rd1; p: .callprototype ()_ (.param .b64 _); call %rd4, (q), p; }
 mov.u64 %rd5, depot; mov.u64 %rd6, other; st.local.u64 [%rd5+8], %rd6; st.local.u32 [%rd5+16], %r1;
 add.s64 %rd7, %rd5, %rd2; ld.local.u64 %rd6, [%rd5+8];
 { .param .b64 q; st.param.b64 [q], %rd6; .param .b64 s; st.param.b64 [s], %rd1; call apply, (q, s); }
 mov.u64 %rd8, child;
 { .param .b64 a; st.param.b64 [a], %rd8; .param .align 4 .b8 b[12]; .param .align 4 .b8 c[12]; .param .b32 d;
 .param .b64 r; call (r), cudaGetParameterBufferV2, (a, b, c, d); ld.param.b64 %rd2, [r]; }
 { .param .b64 a; st.param.b64 [a], %rd2; .param .b64 b; st.param.b64 [b], 0; .param .b32 r;
 call (r), cudaLaunchDeviceV2, (a, b); ld.param.b32 %r2, [r]; }
 ret;
}
"""


def ptx_seeds() -> Iterable[bytes]:
    return [
        PTX,
        POINTERS,
        definitions.CLOCK_KERNEL.read_bytes(),
        PTX.replace(b"sm_80", b"sm_90a"),
        VIRTUAL,
        b".version 8.0\n.target sm_80\n",
    ]


VIRTUAL = b"""\
.version 8.0
.target sm_80
.address_size 64
.func (.param .b32 r) area(.param .b64 x) { .reg .b32 %r<2>; mov.u32 %r1, 5; st.param.b32 [r], %r1; ret; }
.func (.param .b32 r) other(.param .b64 x) { ret; }
.func (.param .b32 r) third(.param .b64 x) { ret; }
.global .align 8 .u64 _ZTV1A[3] = {0, area, other};
.visible .entry use(.param .u64 p)
{
 .reg .b32 %r<4>; .reg .b64 %rd<6>; .reg .f32 %f<6>; .reg .pred %p<2>; .local .align 8 .b8 depot[8];
 ld.param.u64 %rd1, [p]; ld.global.u64 %rd2, [%rd1]; setp.eq.u64 %p1, %rd1, 0;
 mov.u64 %rd3, area; mov.u64 %rd4, third; st.local.u64 [depot], %rd4; ld.local.u64 %rd5, [depot]; selp.b64 %rd2, %rd3, %rd5, %p1;
 { .param .b64 q; st.param.b64 [q], %rd1; .param .b32 s;
   t: .callprototype (.param .b32 _) _ (.param .b64 _); call (s), %rd2, (q), t; ld.param.b32 %r1, [s]; }
 tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%rd1, {%f5, %f5}]; sust.b.1d.b32.trap [%rd1, {%r1}], {%r2};
 ret;
}
"""


def hard_virtual() -> bytes:
    """Many calls, each of which may reach many functions."""
    functions = b"".join(b".func f%d(.param .b64 x) { ret; }\n" % n for n in range(64))
    table = b".global .u64 _ZTV1A[64] = {%s};\n" % b", ".join(b"f%d" % n for n in range(64))
    call = b"{ .param .b64 q; st.param.b64 [q], %rd1; t: .callprototype ()_ (.param .b64 _); call %rd1, (q), t; }\n"
    head, kernel = (
        b".version 8.0\n.target sm_80\n.address_size 64\n",
        b".visible .entry k() { .reg .b64 %rd<2>;\n",
    )
    return head + functions + table + kernel + 4000 * call + b"ret; }\n"


def hard_addresses() -> bytes:
    """A body that takes the addresses of many functions, of which some leave it."""
    functions = b"".join(b".func f%d() { ret; }\n" % n for n in range(1000))
    takes = b"".join(b"mov.u64 %%rd%d, f%d;\n" % (n, n) for n in range(1000))
    chain = b"".join(b"mov.u64 %%rd%d, %%rd%d;\n" % (n, n + 1) for n in range(1000))
    head, kernel = (
        b".version 8.0\n.target sm_80\n.address_size 64\n",
        b".visible .entry k() { .reg .b64 %rd<1001>;\n",
    )
    return head + functions + kernel + takes + chain + b"st.global.u64 [%rd0], %rd9; ret; }\n"


# Instructions with too few operands, or with others than they take.
ODD = b"""\
ld.u32 %r1;
ld.u32;
ld.v2.u32 [%rd1], {%r1};
ld.u32 %rd, [%rd1];
st.u32 [%rd1];
st.v4.u32 [%rd1], %r1;
st.u32 [%rd1], %p1;
st.u32 [%rd1], [%rd1];
st.bulk [%rd1];
st.bulk;
atom.cas.b32 %r1, [%rd1], 1;
atom.add.u32 [%rd1];
red.add.u32 [%rd1];
@%p1 bra;
@%p1 ret %r1;
brx.idx;
@%p1 brx.idx %r1;
wmma.load.a.m16n16k16.f16 [%rd1];
cp.async.shared.global [%rd1], [%rd1];
bar.red [%rd1];
.pragma "used_bytes_mask 1"; ret;
.pragma "used_bytes_mask 1"; bar.sync 0;
.pragma "used_bytes_mask 1";
"""


def hard_ptx() -> Iterable[bytes]:
    yield hard_virtual()
    yield hard_addresses()
    head = b".version 8.0\n.target sm_80\n.address_size 64\n"
    body = b".visible .entry k() { %s ret; }\n"
    yield from (
        head.replace(b"8.0", version) for version in (b"8\xc2\xb2.0", b"8.\xd9\xa3", b"8." + b"1" * 5000)
    )
    yield from (head.replace(b"sm_80", sm) + body % b"" for sm in (b"sm_\xc2\xb2", b"sm_" + b"8" * 5000))
    for deep in (b"(", b"-", b"{", b"1+(", b"0xff("):
        yield head + b".global .u32 x = " + 3000 * deep + b"1;"
        yield head + body % (b"mov.u32 %r1, " + 3000 * deep + b"1;")
    yield head + body % (b"ld.u32 %r1, [" + b"x, [" * 3000)
    yield head + b".global .u32 x = " + b"(1<<63)*" * 3000 + b"1;"
    yield head + b".global .u32 x = 0x" + b"f" * 5000 + b";"
    yield head + b".global .u32 x[99999999][99999999];" + body % b"mov.u64 %rd1, x;"
    yield head + body % b".reg .b32 %r<4294967295>; .local .b8 x[4294967295]; mov.u32 %r4294967294, 0;"
    yield head + body % (b".reg .b32 %r<4>; mov.u32 %r" + b"1" * 5000 + b", 0;")
    registers = b".reg .pred %p<4>; .reg .b32 %r<4>; .reg .b64 %rd<4>; "
    yield from (head + body % (registers + odd) for odd in ODD.splitlines())
    yield head + body % (b".loc " + b"1" * 5000 + b" 1 1\n")
    yield head + b".file " + b"1" * 5000 + b' "a.cu"\n'
    yield head + b".entry k() .maxntid " + b"9" * 5000 + b" { ret; }"
    yield from (head + 300_000 * piece for piece in (b"/*", b'"\\', b"\n", b"{", b".pragma ", b"$"))


def probes() -> list[PtxProbe]:
    """A program at each point, which reads all fields of its context."""
    count = "{ .reg .b64 %rd<2>; ld.u64 %rd1, [%gpubpf_m]; add.u64 %rd1, %rd1, 1; st.u64 [%gpubpf_m], %rd1; }"
    found = []
    for point in DEVICE_POINTS:
        fields = [field for field in CONTEXTS[point] if field != "launch"]
        text = "{" + "".join(f"st.u64 [%gpubpf_m], %gpubpf_{field};" for field in fields) + count + "}"
        arguments = [Argument(field, "b64", "context", field=field) for field in fields]
        made = Fragment(point, text, (Argument("m", "b64", "map_base", "m"), *arguments))
        found.append(Probe(made, point, "instructions" if point == "exit" else None))
    return found


@target(PtxError, seeds=ptx_seeds, hard=hard_ptx)
def ptx(data: bytes) -> None:
    """Parse PTX; write what was parsed, and parse that again to the same text."""
    parsed = parser.parse(data)
    text = module.render(parsed)
    files = source.source_files(parsed)
    for name, entry in parsed.entries.items():
        CallGraph(parsed).reach(name)
        source.source_lines(entry.body or (), files)
        entry.block_limit("maxntid")
    assert module.render(parser.parse(text)) == text


@target(PtxError, seeds=ptx_seeds, hard=hard_ptx)
def translation(data: bytes) -> None:
    """Translate PTX to C for the embedded device."""
    TranslatedModule(parser.parse(data)).c_texts()


@target(PtxError, seeds=ptx_seeds, hard=hard_ptx)
def injection(data: bytes) -> None:
    """Inject programs at every point of every kernel: what is written can be parsed."""
    parsed = parser.parse(data)
    made = inject(parsed, dict.fromkeys(parsed.entries, probes()))
    parser.parse(made.text)


def several_texts() -> Iterable[bytes]:
    yield PTX + b"\0" + PTX.replace(b"scale", b"other").replace(b"twice", b"thrice")


def hard_texts() -> Iterable[bytes]:
    locals_ = b".version 8.0\n.target sm_80\n" + b"".join(b".global .u32 v%d;\n" % n for n in range(4000))
    yield locals_ + b"\0" + locals_


@target(PtxError, LinkError, seeds=several_texts, hard=hard_texts)
def linking(data: bytes) -> None:
    """Link the texts that zero bytes separate: what is written can be parsed."""
    texts = [part.decode("utf-8", "replace") for part in data.split(b"\0")[:4]]
    parser.parse(link([Input(f"text {k}", text) for k, text in enumerate(texts)], complete=False))


@functools.cache
def cubins() -> tuple[bytes, ...]:
    """Cubins by ptxas, with and without line information; none where it is missing."""
    made = []
    for options in ("", "-lineinfo"):
        with contextlib.suppress(Error):
            made.append(assemble.assemble(PTX.decode(), assemble.Target("gpu", (9, 0)), options).cubin)
    return tuple(made)


def image_seeds() -> Iterable[bytes]:
    image = fatbin.ptx_image(PTX, fatbin.PtxasRun("13.0", "-maxrregcount=32"))
    assert image is not None
    packed = fatbin.pack(image)
    return [
        packed,
        packed + bytes(8) + packed,
        compressed(packed, "lz4"),
        compressed(packed, "zstd"),
        PTX,
        *cubins(),
    ]


@functools.cache
def code_object() -> bytes:
    """A code object for an AMD GPU; no kernels in it where LLVM's tools are missing."""
    if hipsim_engine.missing():
        return b"\x7fELF"
    turns = "s_getpc_b64 s[4:5]\ns_add_u32 s4, s4, 0x1000\ns_addc_u32 s5, s5, 0\nlast:\ns_cbranch_execz last"
    leaves = """
    s_and_saveexec_b64 s[6:7], vcc
    turn:
    s_andn2_b64 exec, exec, s[8:9]
    s_cbranch_execnz turn
    s_or_b64 exec, exec, s[6:7]
    s_and_saveexec_b64 s[6:7], vcc"""
    text = hipsim_engine.kernel("turns", turns) + hipsim_engine.kernel("leaves", leaves)
    with tempfile.TemporaryDirectory() as place:
        return hipsim_engine.assemble(text, Path(place), debug=True).read_bytes()


def bundle(*codes: bytes) -> bytes:
    """Return a bundle of code objects as Clang writes it."""
    name = b"hipv4-amdgcn-amd-amdhsa--gfx906"
    at, entries = 4096, b""
    for code in codes:
        entries += struct.pack("<3Q", at, len(code), len(name)) + name
        at += len(code)
    return (offload_bundle.MAGIC + struct.pack("<Q", len(codes)) + entries).ljust(4096, b"\0") + b"".join(
        codes
    )


def small_bundle(version: int, codec: str) -> bytes:
    """Return a compressed bundle."""
    import zstandard

    whole = bundle(code_object())
    stored = zstandard.compress(whole) if codec == "zstd" else zlib.compress(whole)
    sizes = {1: struct.pack("<I", len(whole)), 2: struct.pack("<II", 24 + len(stored), len(whole)),
             3: struct.pack("<QQ", 32 + len(stored), len(whole))}[version]  # fmt: skip
    return (
        offload_bundle.COMPRESSED + struct.pack("<HH", version, codec == "zstd") + sizes + bytes(8) + stored
    )


def hip_seeds() -> Iterable[bytes]:
    code = code_object()
    return [
        bundle(code),
        bundle(code, code) + bytes(64) + bundle(code),
        code,
        small_bundle(2, "zstd"),
        small_bundle(3, "zlib"),
    ]


@target(ImageError, seeds=hip_seeds)
def hip_code(data: bytes) -> None:
    """Read the code objects of a bundle, or one by itself: their kernels, and the instructions of those."""
    for one in (*offload_bundle.code_objects(data), data):
        code_objects.instrument(one, ())
        with contextlib.suppress(Error):
            code = CodeObject(one)
            arguments.places(code)
            disassembler = comgr.Comgr(code.isa)
            for kernel in code.kernels[:4]:
                with contextlib.suppress(Refusal):
                    body = kernel_code.read(code, disassembler, kernel)
                    places = leaving(body)
                    body.moved(1 << 20, {place: bytes(8) for place in places})
                    for instruction in body.instructions:
                        access.accesses(instruction, scratch=True)
                SourceLines(one).at(kernel.begin)


def compressed(packed: bytes, codec: str) -> bytes:
    """Return a fatbin of one image with its payload compressed."""
    import lz4.block
    import zstandard

    header = int.from_bytes(packed[20:24], "little")
    text = packed[16 + header :]
    made = lz4.block.compress(text, store_size=False) if codec == "lz4" else zstandard.compress(text)
    whole = bytearray(packed[: 16 + header] + made)
    struct.pack_into("<Q", whole, 8, header + len(made))
    struct.pack_into("<QI", whole, 16 + 8, len(made), len(made))
    struct.pack_into("<QQQ", whole, 16 + 0x28, 0x2000 if codec == "lz4" else 0x8000, 0, len(text))
    return bytes(whole)


def overlapping_sections(name: bytes, count: int, contents: bytes, flags: int = 0) -> bytes:
    """Return a cubin in which `count` sections of a name are the same bytes."""
    strings = b"\0.shstrtab\0" + name + b"\0"
    at = 64 + len(strings) + len(contents)
    section = struct.Struct("<IIQQQQIIQQ")
    table = section.pack(1, 3, 0, 0, 64, len(strings), 0, 0, 1, 0)
    table += count * section.pack(11, 1, 0, 0, 64 + len(strings), len(contents), 0, 0, 1, 0)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\2\1\1\x33\7",
        2,
        elf.EM_CUDA,
        1,
        0,
        0,
        at,
        90,
        64,
        0,
        0,
        64,
        count + 1,
        0,
    )
    return header + strings + contents + table


def hard_images() -> Iterable[bytes]:
    yield b"\n" * (1 << 20)
    yield b" \n" * (1 << 19) + b".version 8.0\n.target sm_80\n"
    yield overlapping_sections(b".nv_debug_ptx_txt", 8000, PTX * 2000)
    yield overlapping_sections(b".note.nv.tkinfo", 8000, bytes(1 << 20))
    host = bytearray(
        overlapping_sections(
            b".nv_fatbin", 8000, (struct.pack("<IHHQ", fatbin.FATBIN_MAGIC, 1, 16, 0)) * 65536
        )
    )
    struct.pack_into("<H", host, 18, 62)
    yield bytes(host)


@target(ImageError, seeds=image_seeds, hard=hard_images)
def images(data: bytes) -> None:
    """Read all images of a fatbin, cubin or PTX as the tools do, and choose one."""
    found = fatbin.images_of_bytes(data)
    for image in found[:8]:
        with contextlib.suppress(ImageError):
            image.read()
            if image.kind == "elf":
                fatbin.ptx_of_cubin(image)
                fatbin.kernels(image.payload)
                fatbin.static_shared(image.payload)
                fatbin.ptxas_run(image.payload)
                fatbin.kernel_names(image.payload)
                line_table.source_lines(image.payload)
            else:
                assert fatbin.images_of_bytes(fatbin.pack(image))[0].payload == image.payload
    for cc in ((7, 0), (9, 0), (12, 0)):
        chosen = fatbin.choose(found, cc)
        if not isinstance(chosen, str):
            with contextlib.suppress(ImageError):
                chosen.text  # noqa: B018  reads it


@target(ImageError, seeds=image_seeds, hard=hard_images)
def scan(data: bytes) -> None:
    """Look for images anywhere in a file, as in a stripped program."""
    for image, _ in zip(fatbin.scan(elf.HeldBytes(data), 0, len(data)), range(8), strict=False):
        with contextlib.suppress(ImageError):
            image.read()


def elf_seeds() -> Iterable[bytes]:
    return [*cubins(), Path("/proc/self/exe").read_bytes()[:65536], small_library()]


@functools.cache
def small_library() -> bytes:
    """A small shared library, with its section headers; empty where none is installed."""
    import _ctypes

    return Path(_ctypes.__file__).read_bytes()[: 1 << 18]


@target(ImageError, seeds=elf_seeds)
def elf_file(data: bytes) -> None:
    """Read sections, segments and symbols of an ELF file."""
    file = elf.of_bytes(data)
    file.search_path()
    for section in file.sections[:32]:
        with contextlib.suppress(ImageError):
            file.contents(section)
            for symbol, _ in zip(file.symbols(section), range(64), strict=False):
                file.name_table(section).at(symbol.name)
    for table, strings in file.symbol_tables((elf.STT_FUNC, elf.STT_OBJECT)):
        for symbol in table[:16]:
            elf.string_at(strings, int(symbol["name"]))


class _Bytes:
    """Bytes as the memory of a process, from address 0 on."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def some(self, address: int, size: int) -> bytes:
        return self._data[address : address + size] if address >= 0 else b""

    def read(self, address: int, size: int) -> bytes:
        if len(data := self.some(address, size)) != size:
            raise OSError
        return data


@target(seeds=elf_seeds)
def exports(data: bytes) -> None:
    """Read the exported functions of a library in a process's memory."""
    elf.exports(_Bytes(data))


@target(ImageError, seeds=elf_seeds)
def host_symbols(data: bytes) -> None:
    """Find the kernels that a program's symbols and code stand for."""
    opened = memory_file(data)
    try:
        file = kernel_names._ElfFile(os.dup(opened))
    finally:
        os.close(opened)
    assert isinstance(file.has_kernels, bool)
    assert isinstance(file.registrations, dict)
    assert isinstance(file.symbols.handles, dict)
    for segment in file.loads[:4]:
        file.symbols.name(segment.address)
        file.text(segment.address)


# --- what the agent sends ---------------------------------------------------------------------------------

DECODERS = {
    Message.HELLO: protocol.hello,
    Message.IMAGE: protocol.image,
    Message.NAME: protocol.slot_and_text,
    Message.REFUSED: protocol.slot_and_text,
    Message.SNAPSHOT: protocol.snapshot,
    Message.DRAINED: protocol.drained,
    Message.HOOKED: protocol.hooked,
    Message.LOG: protocol.log,
    Message.RING: protocol.ring,
    Message.STACK: protocol.stack,
    Message.RANGES: protocol.ranges,
    Message.CONTEXT: protocol.context,
    Message.FOUND: protocol.found,
    Message.KERNEL: protocol.wanted_kernel,
    Message.READY: protocol.ready,
}


def message_seeds() -> Iterable[bytes]:
    text = struct.pack("<I", 4) + b"name"
    payloads = {
        Message.HELLO: struct.pack("<II", definitions.PROTOCOL_VERSION, 12080) + text + bytes(4),
        Message.IMAGE: struct.pack("<IIIQIQI", 1, 90, 0, 4096, 1, 512, 0),
        Message.NAME: struct.pack("<I", 3) + text,
        Message.SNAPSHOT: struct.pack("<IIIIQQ", 7, 1, 0, 1, 4096, 123)
        + struct.pack("<I 2I3I3IQ I IQQQ", 1, 5, 3, 2, 1, 1, 32, 1, 1, 23, 1, 0, 256, 520, 64)
        + struct.pack("<I IQQ I IQQQ", 1, 3, 1024, 64, 1, 4, 0, 2048, 1024),
        Message.DRAINED: struct.pack("<II", 1, 1),
        Message.HOOKED: text + text + struct.pack("<II", 1, 90),
        Message.LOG: struct.pack("<Q", 1024),
        Message.RING: struct.pack("<5IQQ", 4, 1, 0, Place.HOST_RING, 16, 8192, 48),
        Message.STACK: struct.pack("<IIQQ", 1, 1, 4096, 16) + text + text,
        Message.RANGES: struct.pack("<II", 1, 1) + text + text,
        Message.CONTEXT: struct.pack("<III", 1, 0, 90),
        Message.KERNEL: struct.pack("<IIIII4s", 2, 90, 0, 1, 4, b"name"),
        Message.FOUND: struct.pack("<IIIII", 1, 90, 0, 1, 1)
        + text
        + struct.pack("<I", 1)
        + text
        + struct.pack("<IIII4i", 1, 1, 0, 8, 16, 0, 0, 1024),
        Message.READY: struct.pack("<I", 1),
    }
    frames = [protocol.frame(kind, payload) for kind, payload in payloads.items()]
    return [*frames, b"".join(frames)]


def line_table_seeds() -> Iterable[bytes]:
    lengths = bytes((0, 1, 1, 1, 1, 0, 0, 0, 1))
    header = struct.pack("<BBbBB", 16, 1, -5, 14, 10) + lengths + b"/src\0\0a.cu\0\1\0\0b.h\0\0\7\7\0"
    program = b"\0\11\2" + bytes(8) + b"\1\3\x7f\2\x80\1\4\2\x20\xff\10\11\7\0\1\0\1\1"
    content = struct.pack("<HI", 2, len(header)) + header + program
    yield (struct.pack("<I", len(content)) + content) * 2


@target(
    *(struct.error, IndexError, ValueError, ArithmeticError),  # `line_table.sequences` makes one of them
    seeds=line_table_seeds,
)
def lines_of_cubin(data: bytes) -> None:
    """Read the rows of a line table."""
    for rows in line_table._rows(data):
        assert all(isinstance(path, str) for _, _, path in rows)


@target(protocol.Malformed, seeds=message_seeds)
def messages(data: bytes) -> None:
    """Split a stream into frames, in two pieces, and decode each."""
    frames = protocol.Frames()
    half = len(data) // 2
    for kind, payload, _ in [*frames.feed(data[:half], ()), *frames.feed(data[half:], ())]:
        if kind in DECODERS:
            DECODERS[Message(kind)](payload)


def log_seeds() -> Iterable[bytes]:
    header = bytearray(LOG_HEADER.size)
    for name, value in (("capacity", 16), ("clock", 0), ("reserved", 16)):
        struct.pack_into("<Q", header, LOG_HEADER.offset(name), value)
    records = bytearray()
    for number in range(16):
        record = bytearray(definitions.RECORD_SIZE)
        struct.pack_into("<QQHH", record, 0, number + 1, number + 1, number % 17, number % 7)
        struct.pack_into("<QQ", record, 40, 1000 * number, 1000 * number + 500)
        records += record
    return [bytes(header + records)]


@target(SessionError, seeds=log_seeds)
def operation_log(data: bytes) -> None:
    """Read the file of an operation log, and look at each launch in it."""
    log = OpLog(LogFile(memory_file(data[: 1 << 16])))
    launches, process = Launches(64), LoggedProcess(1)
    launches.log(process, log.read())
    launches.log(process, log.read(ended=True))
    launches.fresh(launches.columns(), last=True)


@target(seeds=lambda: [bytes(CONTROL.size) + bytes(range(256)) * 8, b"\xff" * (CONTROL.size + 4096)])
def control_block(data: bytes) -> None:
    """Read the counters that an agent keeps."""
    file = memory_file(data)
    try:
        for read in (
            protocol.read_control,
            protocol.graph_launches,
            protocol.virtual_times,
            protocol.was_cut,
        ):
            read(file)
        assert (protocol.hook_calls(file).ns or 0) >= 0
    finally:
        os.close(file)


def patch_seeds() -> Iterable[bytes]:
    yield b"".join(patching.RECORD.pack(at, bytes(8), bytes(range(8)), 5) for at in (4096, 8192))


@target(SessionError, seeds=patch_seeds)
def patch_list(data: bytes) -> None:
    """Read the list of patches that an agent sends."""
    file = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        os.write(file, data)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, patching.SEALS)
        patching.read_patches(file)
    finally:
        os.close(file)


def mapping_seeds() -> Iterable[bytes]:
    yield b"".join(
        b"%x-%x %s %08x fe:00 %d                    %s\n" % line
        for line in (
            (0x400000, 0x41F000, b"r--p", 0, 260811, b"/usr/bin/python3.11"),
            (0x41F000, 0x6D2000, b"r-xp", 0x1F000, 260811, b"/usr/bin/python3.11"),
            (0x1C3C000, 0x1DC4000, b"rw-p", 0, 0, b"[heap]"),
            (0x7F884A8D1000, 0x7F884A97F000, b"r--p", 0, 149105, b"/usr/lib/libcuda.so.1 (deleted)"),
            (0x7F884A97F000, 0x7F884AA00000, b"r-xp", 0xCD1000, 149105, b"/usr/lib/libcuda.so.1 (deleted)"),
            (0x7F884AA00000, 0x7F884AA01000, b"rw-s", 0, 5, b"/memfd:gpubpf-control (deleted)"),
            (0x7FFFE5B9F000, 0x7FFFE5BC0000, b"rw-p", 0, 0, b"[stack]"),
            (0xFFFFFFFFFF600000, 0xFFFFFFFFFF601000, b"--xp", 0, 0, b""),
        )
    )


def hard_mappings() -> Iterable[bytes]:
    """A file's name can contain any character but a line feed and a slash."""
    line = b"7f0000000000-7f0000001000 r-xp 00000000 08:01 123 /tmp/a%b\n"
    for separator in (b"\x0b", b"\x0c", b"\x1c", b"\xc2\x85", b"\xe2\x80\xa8"):
        yield line % (separator + b"b")
        yield line % (separator + b"0-ffffffff r-xp 00000000 08:01 124 /lib/libcuda.so.1")
    yield line.replace(b"123", b"1" * 7000)
    yield b"f" * 7000 + line


@target(seeds=mapping_seeds, hard=hard_mappings)
def mappings(data: bytes) -> None:
    """Read the list of a process's mappings. Each line is at most one of them."""
    lines = [line for line in data.split(b"\n") if b"-" in line]
    found = address_space.parse(data.split(b"\n"))
    assert len(found) <= len(lines)
    address_space.libraries(found)


def dispatch_seeds() -> Iterable[bytes]:
    header = dispatches._RING.pack(dispatches.MAGIC, 3, 2, 32, 0, 0, 1)
    slots = b"".join(
        struct.pack("<8Q10I", n, 10, 20, 5, 1, 7, 1, n, 1, 0, 64, 1, 1, 64, 1, 1, 0, 0) for n in (1, 2)
    )
    yield header + slots + dispatches._NAME.pack(7, 6, 1) + b"k1.kd\0\0\0"


@target(seeds=dispatch_seeds)
def dispatch_ring(data: bytes) -> None:
    """Read the memory of an agent in a program that uses ROCm: header, slots, names."""
    header, slots = dispatches._RING.size, 2 * dispatches._SLOT.itemsize
    file = os.memfd_create("fuzz", os.MFD_CLOEXEC)
    os.truncate(file, dispatches._SIZE)
    for at, part in (
        (0, data[:header]),
        (dispatches.HEADER, data[header : header + slots]),
        (dispatches.HEADER + dispatches.SLOTS * dispatches._SLOT.itemsize, data[header + slots :]),
    ):
        os.pwrite(file, part, at)
    reader = dispatches.Dispatches([], {}, 0)
    process = dispatches.AgentProcess(1, 1, "app", file, -1)
    reader.processes.append(process)
    try:
        assert len(reader.take(last=True)) <= dispatches.SLOTS
    finally:
        reader.close()


def ring_seeds() -> Iterable[bytes]:
    place = ring_place()
    area = bytearray(place.size)
    for position in range(8):
        at = place.first + position * place.stride
        struct.pack_into("<II", area, at, position + 1, 8)
    return [bytes(area)]


def ring_place() -> protocol.RingPlace:
    shards, stride = 1, 16
    return protocol.ring(
        struct.pack("<5IQQ", 0, 1, 0, Place.HOST_RING, shards, definitions.LEAST_CAPACITY, stride)
    )


@target(Error, seeds=ring_seeds)
def ring(data: bytes) -> None:
    """Read a ring."""
    place = ring_place()
    reader = RingReader(place, np.dtype("<u8"), None)
    area = data[: place.size].ljust(place.size, b"\0")
    reader.control(area)
    reader.read_copy(area)
    reader.read_copy(area, last=True)
    for count in reader.counts():
        assert count.reserved >= count.received


# --- maps, programs, names, caches -----------------------------------------------------------------------------


def hash_map() -> maps.MapDefinition:
    return maps.MapDefinition("counts", "hash", 4, 8, 8, "<u4", "<u8")


def map_seeds() -> Iterable[bytes]:
    made = bytearray(maps.initial(hash_map()))
    struct.pack_into("<4Q", made, maps.HEADER, 8 | maps.SlotState.FULL, 1, 7, 2)
    yield bytes(made)


@target(Error, seeds=map_seeds)
def map_contents(data: bytes) -> None:
    """Decode a hash, and the lost updates of it."""
    definition = hash_map()
    assert len(maps.decode(definition, data)) <= definition.slots
    maps.lost(definition, data)


def name_seeds() -> Iterable[bytes]:
    return [
        b"_ZN2ns5scaleIfLi3EEEvPT_i",
        b"_Z6kernelIJiiEEvDpT_",
        b"vectorAdd",
        b"_ZZ4mainENKUlvE_clEv",
        b"28__device_stub__Z6kernelPfi",
    ]


def hard_names() -> Iterable[bytes]:
    yield b"9" * 16000 + b"__device_stub__k"
    yield b"9" * 16000
    yield b"_Z1kI" + b"T_" * 20 + b"E" * 20000
    yield from (10_000 * piece for piece in (b"a ", b"a<", b"operator ", b"{(", b"decltype("))


@target(seeds=name_seeds, hard=hard_names)
def kernel_name(data: bytes) -> None:
    """Demangle, shorten and match a kernel's name."""
    text = data.decode("utf-8", "replace")
    names.shorten(names.demangle(text).full)
    names.shorten(text)
    names.matches(["scale*"], text)
    kernel_names._kernel_of(text)


def cached_seeds() -> Iterable[bytes]:
    code = (Instruction(LD_IMM64, map="m"), Instruction(0), Instruction(0x95))
    definition = maps.MapDefinition("m", "array", 4, 8, 1)
    program = Program("", {"f": BpfFunction("f", "exit", code)}, {"m": definition}, "GPL")
    argument = Argument("m", "b64", "map_base", "m")
    readable = [
        compile.to_json(program),
        Fragment("f", "{ }", (argument,), 1, {1: "%d"}, ("$L",)).to_json(),
        amdgcn.WaveProgram("f", 64, "s_nop 0", (argument,), {1: "%d"}, True).to_json(),
    ]
    return [
        sidecar.pack(sidecar.Sidecar(entries=("k",))),
        assemble._pack((b"cubin", {}, ())),
        *(json.dumps(value).encode() for value in readable),
    ]


@target(
    seeds=cached_seeds, hard=lambda: [struct.pack("<I", 1 << 20) + b"[" * (1 << 20), b"[" * (1 << 20) + b"\n"]
)
def cached(data: bytes) -> None:
    """Read a result of the cache whose digest is right, but which another version may have made."""
    sidecar.unpack(data)
    assemble._unpack(data)
    for read in (
        lambda value: compile.from_json(value, ""),
        Fragment.from_json,
        amdgcn.WaveProgram.from_json,
    ):
        cache.from_json(data, read)


from fuzz import kept_targets, object_targets, process_targets, program_targets, report_targets  # noqa: E402, F401  add their targets

"""Images and programs to sidecars: what is done when ptxas does not take them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpubpf.ebpf.probe import Probe
from gpubpf.errors import AssembleError
from gpubpf.images import assemble as assembling
from gpubpf.images import copies, fatbin, instrument
from gpubpf.images.assemble import Assembled, KernelResources, Target, assemble
from gpubpf.images.fatbin import FatbinImage
from gpubpf.images.occupancy import limit_of_copy, most_registers
from gpubpf.images.sidecar import Sidecar
from gpubpf.memory.memory_options import MemoryOptions
from gpubpf.program import BPF
from gpubpf.ptx.parser import parse
from gpubpf.record import replace
from gpubpf.show import cli
from gpubpf.tools import memtrace
from gpubpf_cuda import run_nvcc
from gpubpf_fragments import TIME, log

ROOT = Path(__file__).resolve().parents[3]
PTX = b""".version 8.3
.target sm_80
.address_size 64
.visible .entry fine() { ret; }
.visible .entry wide() { ret; }
"""


def _image() -> FatbinImage:
    return FatbinImage("ptx", 80, "", (8, 3), "", 0, "", 0, False, PTX)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ptxas is asked for; it gives up on `wide` unless it may be careful, and on `broken`."""
    asked: list[str] = []

    def assemble(text: str, target: Target, options: str = "") -> Assembled:
        asked.append(options.strip())
        if "entry broken" in text:
            raise AssembleError("ptxas fatal: something else")
        if "entry wide" in text and "-Ofc=min" not in options:
            raise AssembleError(
                "ptxas fatal   : (C7600) Register allocation failed with register count of '7'."
            )
        return Assembled(text.encode(), {})

    monkeypatch.setattr(copies, "assemble", assemble)
    return asked


def test_a_kernel_with_too_many_predicates_is_assembled_with_more_care(asked: list[str]) -> None:
    made = copies.make_copies(PTX.decode(), "", [Probe(TIME, "exit")], Target("gpu", (8, 0)))
    assert {kernel.name for kernel in made.kernels} == {"fine", "wide"} and not made.refusals
    assert asked == ["", "-Ofc=min"] and made.options.strip() == "-Ofc=min"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_of_machine_code_only_the_image_for_this_gpu_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "k.cu"
    source.write_text("__global__ void k(float *a) { a[threadIdx.x] = 1; }\n")
    codes = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in (75, 80, 90)]
    run_nvcc(["nvcc", "-fatbin", *codes, "-o", tmp_path / "k.fatbin", source])
    images = fatbin.images_of_file(tmp_path / "k.fatbin")
    assert sorted(image.sm for image in images) == [75, 80, 90]
    read: list[int] = []
    kept = FatbinImage.read
    monkeypatch.setattr(FatbinImage, "read", lambda image: read.append(image.sm) or kept(image))
    for cc, sms in (((9, 0), {90}), ((8, 6), {80}), ((12, 0), {75, 80, 90})):
        read.clear()
        fresh = [replace(image) for image in images]
        made = instrument.instrument_module(fresh, [Probe(TIME, "exit")], Target("gpu", cc))
        assert made.refusals == {"_Z1kPf": fatbin.SASS_ONLY} and set(read) == sms


HEAD = ".version 8.3\n.target sm_80\n.address_size 64\n"
FIRST = (
    HEAD
    + ".global .u32 mine;\n.extern .func helper ();\n"
    + ".visible .entry first() { .reg .b64 %a; mov.u64 %a, mine; st.global.u32 [%a], 1; call helper, (); ret; }\n"
)
SECOND = (
    HEAD
    + ".global .u32 mine;\n.visible .func helper () { ret; }\n.visible .entry second() { call helper, (); ret; }\n"
)


def test_texts_that_are_linked() -> None:
    """As the agent sends them; a variable of one file is not that of another, though they have one name."""
    data = b"\0".join(text.encode() for text in (FIRST, SECOND))
    joined = instrument.made_from(b"cubin", data, 2)
    made = instrument.instrument_image(joined, [Probe(TIME, "exit")], Target("sim", (9, 0)))
    assert {kernel.name for kernel in made.kernels} == {"first", "second"} and not made.refusals
    assert all(variable.name != "mine" for variable in made.variables)
    for other in (FIRST.encode(), FIRST.encode() + b"\0"):
        (image,) = fatbin.images_of_bytes(instrument.made_from(b"cubin", other, 1))
        assert (image.kind, image.text, image.options) == ("ptx", FIRST, "")
    many = b"\0".join([FIRST.encode()] * (instrument.MOST_TEXTS + 2))
    for other in (b"\x7fELF\0\0", b"", bytes(8192), FIRST.encode() + b" " * fatbin.LARGEST_PTX, many):
        assert instrument.made_from(b"cubin", other, 1) == b"cubin"
    assert b"gpubpf_partial" not in joined
    for given in (data, FIRST.encode()):
        assert b"gpubpf_partial" in instrument.made_from(b"cubin", given, 3)


def test_texts_that_do_not_fit_together() -> None:
    data = b"\0".join(text.encode() for text in (FIRST, SECOND, SECOND))
    assert instrument.made_from(b"cubin", data, 3) == b"cubin"


def test_another_fault_is_a_refusal_of_that_kernel(asked: list[str]) -> None:
    made = copies.make_copies(
        PTX.decode().replace("wide", "broken"), "", [Probe(TIME, "exit")], Target("gpu", (8, 0))
    )
    assert made.refusals == {"broken": "ptxas fatal: something else"}
    assert [kernel.name for kernel in made.kernels] == ["fine"] and "-Ofc=min" not in asked


def test_a_failure_that_may_pass_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel is refused this time, and instrumented the next."""
    failures: list[AssembleError] = []

    def assemble(text: str, target: Target, options: str = "") -> Assembled:
        if failures:
            raise failures[0]
        return Assembled(text.encode(), {})

    monkeypatch.setattr(copies, "assemble", assemble)
    for failure, kept in (
        (assembling.TemporaryFailure("cannot run ptxas"), set()),
        (AssembleError("ptxas fatal: something else"), {"fine", "wide"}),
    ):
        (place := tmp_path / str(len(kept))).mkdir(mode=0o700)
        monkeypatch.setenv("XDG_CACHE_HOME", str(place))
        refused = []
        for failures[:] in ([failure], []):
            made = instrument.instrument_module([_image()], [Probe(TIME, "exit")], Target("gpu", (8, 0)))
            refused.append(made.refusals.keys())
        assert refused == [{"fine", "wide"}, kept]


@pytest.mark.parametrize("failing", ["with_lines", "registers"])
def test_a_failure_about_the_original_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failing: str
) -> None:
    """Else the copy would round in another way, or use more registers, until the cache is cleared."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines = "mul.f32 %f1, %f1, %f1; st.global.f32 [%rd], %f1; add.f32 %f1, %f1, %f1; ret;"
    text = ACCESSES.replace("LIMIT", "").replace("ret;", f"\n.reg .f32 %f<2>;\n{lines}")

    def killed(*arguments: object) -> None:
        raise assembling.TemporaryFailure("ptxas was killed")

    def made() -> Sidecar:
        return instrument.instrument_image(
            text.encode(), [Probe(log("access"), "access")], Target("gpu", (8, 0))
        )

    with monkeypatch.context() as broken:
        broken.setattr(copies, failing, killed)
        first = made()
    assert set(first.refusals.values()) == ({"ptxas was killed"} if failing == "with_lines" else set())
    second = made()
    assert not second.refusals and second.text != first.text and made().text == second.text


def test_a_refusal_is_not_kept_when_another_assembler_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without ptxas a kernel is refused; once it is installed, the kernel is instrumented."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(assembling, "_libraries", list)
    if not (found := assembling.find_ptxas()):
        pytest.skip("needs ptxas")
    for paths, refused in (((), {"fine", "wide"}), ((found,), set())):
        monkeypatch.setattr(assembling, "_found", lambda *_, paths=paths: paths)
        made = instrument.instrument_module([_image()], [Probe(TIME, "exit")], Target("gpu", (8, 0)))
        assert set(made.refusals) == refused


# Its producer gives registers to its consumers.
SPECIALISED = b"""
.version 8.3
.target sm_90a
.address_size 64
.visible .entry plain(.param .u64 p) .maxntid 256, 1, 1 .minnctapersm 1 {
    .reg .b64 %rd<3>; .reg .b32 %r<3>;
    ld.param.u64 %rd1, [p];
    ld.global.u32 %r1, [%rd1];
    ld.global.u32 %r1, [%rd1+4];
    ld.global.u32 %r1, [%rd1+8];
    ret;
}
.visible .entry specialised(.param .u64 p) .maxntid 256, 1, 1 BOUND {
    .reg .pred %p; .reg .b64 %rd<3>; .reg .b32 %r<9>;
    ld.param.u64 %rd1, [p];
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p, %r1, 128;
    @%p bra consume;
    setmaxnreg.dec.sync.aligned.u32 40;
    ld.global.u32 %r2, [%rd1];
    st.global.u32 [%rd1+4], %r2;
    ret;
consume:
    setmaxnreg.inc.sync.aligned.u32 232;
    ld.global.u32 %r3, [%rd1+8];
    st.global.u32 [%rd1+12], %r3;
    ret;
}
"""
HOPPER = Target("gpu", (9, 0))


def specialised(bound: str) -> tuple[str, FatbinImage]:
    text = SPECIALISED.replace(b"BOUND", bound.encode())
    return text.decode(), FatbinImage("ptx", 90, "a", (8, 3), "", 0, "", 0, False, text)


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
@pytest.mark.parametrize(("bound", "ignored"), [(".minnctapersm 1", False), ("", True)])
def test_setmaxnreg_is_heeded_in_the_copy_as_in_the_original(
    tmp_path: Path, bound: str, ignored: bool
) -> None:
    """Even with programs as long as memtrace's, which are functions in other modules. Without a bound, ptxas ignores it anyway."""
    text, _ = specialised(bound)
    original = assemble(text, HOPPER)
    assert [advisory.split(":")[0] for advisory in original.advisories] == ["C7508"] * ignored
    (tmp_path / "k.ptx").write_text(text)
    command = [sys.executable, ROOT / "tools" / "memtrace.py", "--device", "sim", "--ptx", tmp_path / "k.ptx"]
    copy = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "entry specialised" in copy and "//gpubpf{" in copy and "call gpubpf" not in copy
    assert assemble(copy, HOPPER).advisories == original.advisories


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_in_which_setmaxnreg_would_be_ignored_is_refused(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Also if ptxas assembles it only when it optimizes less."""

    def ignores(text: str, target: Target, options: str = "") -> Assembled:
        if fails and "//gpubpf{" in text and "-Ofc=min" not in options:
            raise AssembleError("ptxas fatal : Register allocation failed with register count of '7'")
        ignored = "//gpubpf{" in text and "setmaxnreg" in text
        why = "C7507: Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register requirements."
        return Assembled(text.encode(), {}, (), (why,) if ignored else ())

    monkeypatch.setattr(copies, "assemble", ignores)
    text, _ = specialised("")
    made = copies.make_copies(text, "", [Probe(TIME, "exit")], HOPPER)
    assert [kernel.name for kernel in made.kernels] == ["plain"]
    assert made.refusals == {"specialised": "setmaxnreg would be ignored in the copy (ptxas C7507)"}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_registers_of_a_program_with_line_numbers_of_inlined_functions(tmp_path: Path) -> None:
    """Its PTX names the functions in a section of its own."""
    source = tmp_path / "k.cu"
    source.write_text(
        "__device__ __forceinline__ float f(float x) { return x * 2 + 1; }\n"
        "__global__ void k(float *a) { atomicAdd(a, f(a[threadIdx.x])); }\n"
    )
    run_nvcc(["nvcc", "-ptx", "-lineinfo", "-arch=sm_80", "-o", tmp_path / "k.ptx", source])
    text = (tmp_path / "k.ptx").read_text()
    assert "function_name" in text
    made = copies.make_copies(text, "--generate-line-info", [Probe(TIME, "exit")], Target("gpu", (8, 0)))
    (used,) = instrument.register_use(made, Target("gpu", (8, 0)), [made.kernels[0].name]).values()
    assert 0 < used.before <= used.after


# Kernels with an access each; LIMIT is a directive of the second.
ACCESSES = """.version 8.3
.target sm_80
.address_size 64
.visible .entry free(.param .u64 p) {
    .reg .b64 %rd; ld.param.u64 %rd, [p]; st.global.u32 [%rd], 1; ret;
}
.visible .entry bound(.param .u64 p) LIMIT {
    .reg .b64 %rd; ld.param.u64 %rd, [p]; st.global.u32 [%rd], 1; ret;
}
"""


def limits(text: str) -> dict[str, list[str]]:
    """The directives of each kernel that limit its registers."""
    entries = re.findall(r"\.entry (\w+)\([^)]*\)([^{]*)\{", text)
    return {name: re.findall(r"\.(?:maxnreg|minnctapersm) \d+", between) for name, between in entries}


@pytest.mark.parametrize(
    ("before", "at_accesses", "at_exits"),
    [
        *((8, 32, 32), (27, 32, 32), (28, 40, 32), (32, 40, 32), (33, 40, 40)),
        *((36, 48, 40), (64, 72, 64), (160, 168, 168), (190, 200, 255), (250, 255, 255)),
    ],
)
def test_a_copy_is_limited(
    monkeypatch: pytest.MonkeyPatch, before: int, at_accesses: int, at_exits: int
) -> None:
    """Unless the kernel has a limit of its own. If no cubin tells its registers, ptxas is asked, for a GPU and probes at accesses."""
    monkeypatch.setattr(copies, "assemble", lambda text, *_: Assembled(text.encode(), {}))
    monkeypatch.setattr(
        copies, "registers", lambda *_: dict.fromkeys(("free", "bound"), KernelResources(before))
    )
    text = ACCESSES.replace("LIMIT", ".maxntid 128, 1, 1 .minnctapersm 2")
    cubin = {"free": before, "bound": before}
    for device, known, own in (
        *(("gpu", {}, False), ("gpu", cubin, True)),
        *(("sim", cubin, True), ("sim", cubin, False), ("sim", {}, False)),
    ):
        for point, sampled, limit in (
            ("access", "", at_accesses),
            ("access", "block", at_exits),
            ("exit", "", at_exits),
        ):
            target = Target(device, (8, 0))
            made = copies.make_copies(text, "", [Probe(TIME, point, sampled=sampled)], target, known, own)
            is_limited = own or (point == "access" and (known or device == "gpu"))
            found = limits(made.image.decode())
            assert found["free"] == ([f".maxnreg {limit}"] if is_limited else [])
            assert found["bound"] == [".minnctapersm 2"]


def test_the_warps_that_fit_with_these_limits() -> None:
    def warps(registers: int) -> int:  # on a part of a multiprocessor
        return min(16, 512 // (-(-registers // 8) * 8))

    for before in range(1, 256):
        for lines, least, more in ((520, 32, 12), (1549, 40, 19)):  # of memtrace's programs
            most = limit_of_copy(before, lines)
            assert (before < most <= max(least, before + more) and most % 8 == 0) or most == 255
            assert 8 * warps(most) >= 5 * warps(before)
        most = limit_of_copy(before, 0)
        assert most >= before and warps(most) == warps(before)
        assert most == 255 or warps(most + 1) < warps(before)


def test_a_copy_may_use_the_registers_with_which_it_can_be_launched() -> None:
    """65,536 registers: 1,024 threads may have 64 each. If blocks wait for each other, as many as of the original must fit."""
    text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry {0}() {1} {{ ret; }}\n"
    for bound, most in (("", 64), (".maxntid 256, 1, 1", 255), (".reqntid 512, 1, 1", 128)):
        kernel = parse(text.format("k", bound)).functions["k"]
        assert most_registers(kernel, 32, False) == most
        assert most_registers(kernel, 32, True) == 32


def test_a_module_with_a_limit_has_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "assemble", lambda text, *_: Assembled(text.encode(), {}))
    before = {"free": 24, "bound": 24}
    made = copies.make_copies(
        ACCESSES.replace("LIMIT", ""),
        "-maxrregcount=32",
        [Probe(TIME, "access")],
        Target("gpu", (8, 0)),
        before,
    )
    assert limits(made.image.decode()) == {"free": [], "bound": []}


def test_a_copy_that_cannot_be_limited_is_assembled_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def assemble(text: str, *_: object) -> Assembled:
        if "maxnreg" in text:
            raise AssembleError(
                "ptxas fatal   : (C7600) Register allocation failed with register count of '32'."
            )
        return Assembled(text.encode(), {})

    monkeypatch.setattr(copies, "assemble", assemble)
    before = {"free": 24, "bound": 24}
    made = copies.make_copies(
        ACCESSES.replace("LIMIT", ""), "", [Probe(TIME, "access")], Target("gpu", (8, 0)), before
    )
    assert [kernel.name for kernel in made.kernels] == ["free", "bound"] and not made.refusals
    assert limits(made.image.decode()) == {"free": [], "bound": []}


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
def test_memtrace_keeps_most_warps_of_a_small_kernel() -> None:
    """Without a limit, this copy needs more than 40 registers."""
    b = BPF(text=memtrace.PROGRAM)
    memtrace.attach(b, MemoryOptions.of(cli.parse(memtrace.build_parser(), ["--", "true"])))
    load = "add.s64 %rd, %rd, 4096; ld.global.u32 %r, [%rd]; st.shared.u32 [there], %r; "
    text = ACCESSES.replace("st.global.u32 [%rd], 1; ", ".reg .b32 %r; .shared .b32 there; " + load * 3)
    made = copies.make_copies(text.replace("LIMIT", ".maxnreg 64"), "", b.attached.lowered_probes(), HOPPER)
    used = instrument.register_use(made, HOPPER, ["free", "bound"])
    assert used["free"].before <= 16 and used["free"].after <= 40 < used["bound"].after
    assert used["free"].spilled <= 32 and not used["bound"].spilled
    for target in (HOPPER, Target("sim")):
        assert instrument.register_use(made, target, ["free"]) == {"free": used["free"]}


def many(kernels: int, more: str = "") -> bytes:
    """A module with that many kernels, of which each adds to `hidden`, but the first only reads it."""
    use = "atom.global.add.u32 %r, [hidden], 1;"
    entry = ".visible .entry k{}() {{ .reg .b32 %r; {} ret; }}\n"
    bodies = [
        entry.format(k, use if k else use.replace("atom.global.add", "ld.global").replace(", 1", ""))
        for k in range(kernels)
    ]
    head = ".version 8.0\n.target sm_80\n.address_size 64\n.global .align 4 .u32 _ZZhiddenvE1x = 1;\n"
    return (head + "".join(bodies).replace("hidden", "_ZZhiddenvE1x") + more).encode()


def test_kernels_of_a_large_module_get_their_copies_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted, target = [Probe(TIME, "exit")], Target("sim", (9, 0))
    data = many(instrument.MANY_KERNELS + 1)
    names = tuple(f"k{k}" for k in range(instrument.MANY_KERNELS + 1))
    made = instrument.instrument_image(data, wanted, target, later=True)
    assert made.later is not None and made.later.kernels == made.entries == names
    assert not (made.image or made.kernels or made.refusals)
    assert isinstance(made.later.source.stored, bytes) and len(made.later.source.stored) < len(data)
    assert made.later.source.text == data.decode()
    one = instrument.instrument_kernels(made.later.source, wanted, target, ["k0"])
    assert [kernel.name for kernel in one.kernels] == ["k0"] and one.entries == names and one.later is None
    # Another kernel writes the variable, so the first must not get a copy of it.
    assert [(v.name, v.copied) for v in one.variables] == [("_ZZhiddenvE1x", False)]
    # Once there is a sidecar with all copies, nothing is left for later.
    whole = instrument.instrument_kernels(made.later.source, wanted, target)
    assert tuple(kernel.name for kernel in whole.kernels) == names
    assert instrument.instrument_image(data, wanted, target, later=True) == whole
    assert instrument.instrument_image(data, wanted, target) == whole


@pytest.mark.parametrize(
    ("kernels", "more"),
    [
        (instrument.MANY_KERNELS, ""),
        (40, ".visible .func f() { .reg .b64 %f; p: .callprototype _ (); call %f, (), p; ret; }\n"),
        (40, ".visible .func f() { .reg .b64 %f; t: .calltargets g; call %f, (), t; ret; }\n"),
        (40, ".extern .func (.param .b64 r) cudaGetParameterBufferV2 (.param .b64 a, .param .b64 b);\n"),
        (40, ".extern .func (.param .b32 r) cudaLaunchDeviceV2 (.param .b64 a, .param .b64 b);\n"),
    ],
)
def test_these_modules_get_all_copies_at_once(
    kernels: int, more: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There are few, or some depend on how variables are when the module is loaded, or launch each other."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = instrument.instrument_image(
        many(kernels, more), [Probe(TIME, "exit")], Target("sim", (9, 0)), later=True
    )
    assert made.later is None and len(made.kernels) == kernels


def test_only_the_kernels_that_the_user_chose_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = instrument.instrument_image(
        many(40), [Probe(TIME, "exit", kernels=("k1*",))], Target("sim", (9, 0)), later=True
    )
    assert made.later is None and len(made.kernels) == 11

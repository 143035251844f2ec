"""ptxas and nvJitLink: the application's options kept, what each kernel needs, errors in one line, the cache."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from gpubpf import cache
from gpubpf.agent.definitions import CLOCK_KERNEL
from gpubpf.errors import AssembleError
from gpubpf.images import assemble, fatbin
from gpubpf.process import traceable
from gpubpf_commands import quoted

TARGET = assemble.Target("gpu", (9, 0))
LOADS = "\n".join(f"ld.global.f64 %d{i}, [%a+{i * 8}];" for i in range(40))
STORES = "\n".join(f"st.global.f64 [%a+{i * 8}], %d{39 - i};" for i in range(40))
PTX = f"""
.version 8.0
.target sm_75
.address_size 64
.visible .entry hungry(.param .u64 p)
{{
    .reg .b64 %a;
    .reg .f64 %d<40>;
    .shared .align 4 .b8 tile[512];
    ld.param.u64 %a, [p];
    {LOADS}
    bar.sync 0;
    {STORES}
    ret;
}}
.visible .entry empty() {{ ret; }}
"""

needs_ptxas = pytest.mark.skipif(assemble.find_ptxas() is None, reason="needs ptxas")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> cache.Cache:
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    return cache.default()


@needs_ptxas
def test_a_cubin_and_what_its_kernels_need() -> None:
    done = assemble.assemble(PTX, TARGET)
    assert set(fatbin.kernels(done.cubin)) == {"hungry", "empty"} == set(done.functions)
    hungry = done.functions["hungry"]
    assert hungry.registers > 80 and hungry.spill_stores == hungry.spill_loads == hungry.stack == 0
    assert hungry.registers == fatbin.kernels(done.cubin)["hungry"].registers
    assert fatbin.images_of_bytes(done.cubin)[0].arch == "sm_90"


@needs_ptxas
def test_the_applications_options_are_kept() -> None:
    needs = assemble.assemble(PTX, TARGET, "-dlcm=cg  -maxrregcount=32 ").functions["hungry"]
    assert needs.registers <= 32 and needs.spill_stores > 0 and needs.stack > 0


def test_only_options_that_steer_the_code_are_passed_on() -> None:
    text = "-g --dont-merge-basicblocks --compile-only -maxrregcount 32 --opt-level=1 -O2 -o /etc/passwd -dlcm=cg;reboot"
    passed, ignored = assemble.steering(
        text + " -optf=/etc/x --maxntid=128,1,1 -dlcm=ca --new-option=3 -maxrregcount=$(x)"
    )
    assert passed == (
        "-g",
        "--dont-merge-basicblocks",
        "-maxrregcount=32",
        "--opt-level=1",
        "-O2",
        "--maxntid=128,1,1",
        "-dlcm=ca",
    )
    assert "--compile-only" in ignored and "-optf=/etc/x" in ignored and "--new-option=3" in ignored
    assert not any("passwd" in word or ";" in word or "$" in word for word in passed)
    assert assemble.steering("") == ((), ())
    assert assemble.steering("-maxrregcount") == ((), ("-maxrregcount",))


@needs_ptxas
def test_the_embedded_device_loads_the_ptx_itself() -> None:
    done = assemble.assemble("not even PTX", assemble.Target("sim"), "-maxrregcount=32")
    assert done.cubin == b"not even PTX" and done.functions == {}
    needs = assemble.registers(PTX, assemble.Target("sim"))
    assert needs is not None and needs["empty"].registers > 0
    assert assemble.registers("not even PTX", assemble.Target("sim")) is None


@needs_ptxas
def test_only_some_kernels_are_compiled_for_their_registers() -> None:
    everything = assemble.registers(PTX, assemble.Target("sim"))
    assert everything is not None and len(everything) > 1
    only = assemble.registers(PTX, assemble.Target("sim"), kernels=["empty"])
    assert only == {"empty": everything["empty"]}
    names = [f"k{n}" for n in range(100_000)]  # too many for a command line
    assert assemble.registers(PTX, assemble.Target("sim"), kernels=["empty", *names]) == everything


@needs_ptxas
def test_an_error_is_one_line_with_ptxas_own_words() -> None:
    bad = PTX.replace("bar.sync 0;", "bad.sync 0;")
    line = bad.split("\n").index("    bad.sync 0;") + 1
    with pytest.raises(AssembleError) as caught:
        assemble.assemble(bad, TARGET)
    message = str(caught.value)
    assert f"line {line}" in message and "bad" in message and "\n" not in message and "; " in message
    with pytest.raises(AssembleError, match=r"older than the PTX.*Unsupported \.version 99"):
        assemble.assemble(PTX.replace("8.0", "99.0"), TARGET)


@needs_ptxas
def test_architectures() -> None:
    # The suffix of the PTX counts, and a GPU that the assembler does not know gets code for an older one like it.
    special = PTX.replace("sm_75", "sm_90a").replace("bar.sync 0;", "wgmma.fence.sync.aligned;")
    assert fatbin.kernels(assemble.assemble(special, TARGET).cubin)
    assert (
        fatbin.images_of_bytes(assemble.assemble(PTX, assemble.Target("gpu", (9, 7))).cubin)[0].arch
        == "sm_90"
    )
    with pytest.raises(AssembleError, match="does not know this GPU"):
        assemble.assemble(PTX, assemble.Target("gpu", (99, 0)))


@needs_ptxas
def test_a_small_kernel_for_each_generation_of_gpus() -> None:
    made = dict(assemble.for_each_generation(CLOCK_KERNEL.read_text(), 0))
    assert {80, 90} <= set(made) <= set(assemble.GENERATIONS)
    for cc, cubin in made.items():
        assert fatbin.images_of_bytes(cubin)[0].arch == f"sm_{cc}"
        assert set(fatbin.kernels(cubin)) == {"gpubpf_clock"}


@pytest.mark.parametrize(
    ("cc", "suffix", "tried"),
    [
        ((7, 5), "", ["sm_75", "sm_70"]),  # not sm_72: a Tegra GPU, whose code no desktop GPU runs
        ((8, 9), "", ["sm_89", "sm_86", "sm_80"]),  # not sm_87
        ((10, 3), "f", ["sm_103f", "sm_100f"]),  # not sm_101
        ((9, 0), "a", ["sm_90a"]),
        ((8, 7), "", ["sm_87"]),  # a Tegra GPU runs no code for others
    ],
)
def test_architectures_that_a_gpu_runs(cc: tuple[int, int], suffix: str, tried: list[str]) -> None:
    known = [f"sm_{number}{suffix}" for number in (70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 103)]
    asked: list[str] = []

    class Old:
        identity, version, release = "old", 0, ""

        def run(self, ptx: bytes, arch: str, options: tuple[str, ...], niceness: int) -> Any:
            asked.append(arch)
            raise assemble._UnknownArchitecture(arch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "_assemblers", lambda: iter([Old()]))
        with pytest.raises(AssembleError):
            assemble.assemble(PTX.replace("sm_75", f"sm_75{suffix}"), assemble.Target("gpu", cc))
    assert [arch for arch in asked if arch in known] == tried


def test_text_that_is_not_utf_8_survives() -> None:
    text = (PTX + "// caf\udce9\n").replace("\n.version", "\n//\udcff\n.version")
    assert assemble.assemble(text, assemble.Target("sim")).cubin.endswith(b"caf\xe9\n")


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A ptxas that writes a line each time it assembles; the only one."""
    real = assemble.find_ptxas()
    home = tmp_path / "toolkit"
    (home / "bin").mkdir(parents=True)
    script = home / "bin" / "ptxas"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || echo run >> "{tmp_path}/runs"\nexec "{real}" "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(home))
    (tmp_path / "runs").write_text("")
    return tmp_path / "runs"


@needs_ptxas
def test_the_cache(counting: Path, own_cache: cache.Cache) -> None:
    def runs() -> int:
        return len(counting.read_text().split())

    first = assemble.assemble(PTX, TARGET)
    assert runs() == 1
    assert assemble.assemble(PTX, TARGET) == first
    assert runs() == 1
    assemble.assemble(PTX, TARGET, "-maxrregcount=64")
    assemble.assemble(PTX + "//", TARGET)
    assemble.assemble(PTX, assemble.Target("gpu", (8, 0)))
    assert runs() == 4
    assert own_cache.directory is not None
    for file in (own_cache.directory / "assemble").iterdir():  # damaged: made again
        file.write_bytes(b"[1]\nx")
    assert assemble.assemble(PTX, TARGET) == first
    assert runs() == 5


@needs_ptxas
def test_a_refusal_is_kept_in_the_cache(counting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a tool does not ask each assembler about each old GPU at each start."""
    monkeypatch.setattr(assemble, "_libraries", list)
    unknown = assemble.Target("gpu", (99, 0))
    with pytest.raises(AssembleError, match="does not know this GPU") as first:
        assemble.assemble(PTX, unknown)
    assert counting.read_text().split() == ["run"]
    with pytest.raises(AssembleError) as second:
        assemble.assemble(PTX, unknown)
    assert str(first.value) == str(second.value)
    assert counting.read_text().split() == ["run"]


def no_assembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "_found", lambda *_: ())
    monkeypatch.setattr(assemble, "_libraries", list)


def test_no_assembler(monkeypatch: pytest.MonkeyPatch) -> None:
    no_assembler(monkeypatch)
    assert assemble.registers(PTX, TARGET) is None
    with pytest.raises(AssembleError, match="ptxas is missing; install"):
        assemble.assemble(PTX, TARGET)
    assert assemble.assemble(PTX, assemble.Target("sim")).cubin


@needs_ptxas
def test_a_newer_ptxas_elsewhere_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "bin" / "ptxas"
    old.parent.mkdir()
    old.write_text(
        "#!/bin/sh\necho \"ptxas m.ptx, line 3; fatal   : Unsupported .version 8.0; current version is '7.0'\" >&2; exit 1\n"
    )
    old.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert assemble.find_ptxas() == str(old)
    assert assemble.assemble(PTX, TARGET).functions


@pytest.mark.parametrize(("driver", "used"), [(0, "13"), (13, "13"), (14, "13"), (12, "12")])
def test_the_ptxas_is_not_newer_than_the_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: int, used: str
) -> None:
    monkeypatch.setattr(assemble, "_found", lambda *_: (ptxas(tmp_path, "13"), ptxas(tmp_path, "12")))
    assert assemble.assemble(PTX, assemble.Target("gpu", (9, 0), driver)).cubin == used.encode()


@pytest.mark.parametrize(
    ("release", "driver", "used"),
    [("12.1", 0, "12"), ("12.1", 13, "12"), ("13.1", 12, "12"), ("12.0", 0, "13"), ("13.1", 0, "13")],
)
def test_the_ptxas_that_made_the_application_is_preferred(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, release: str, driver: int, used: str
) -> None:
    monkeypatch.setattr(assemble, "_found", lambda *_: (ptxas(tmp_path, "13"), ptxas(tmp_path, "12")))
    target = assemble.Target("gpu", (9, 0), driver, release)
    assert assemble.assemble(PTX, target).cubin == used.encode()


@pytest.mark.parametrize(("release", "on_all_cpus"), [("12.7", False), ("12.8", True), ("13.0", True)])
def test_kernels_are_compiled_on_all_cpus_where_ptxas_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, release: str, on_all_cpus: bool
) -> None:
    made = Path(ptxas(tmp_path, release))
    made.write_text(made.read_text().replace("while", f'echo "$*" > {tmp_path}/arguments; while'))
    (tmp_path / "arguments").touch()
    (tmp_path / "arguments").chmod(0o666)
    monkeypatch.setattr(assemble, "_found", lambda *_: (str(made),))
    assert assemble.assemble(PTX, TARGET).cubin == release.encode()
    arguments = (tmp_path / "arguments").read_text().split()
    assert "-arch=sm_90" in arguments and ("-split-compile=0" in arguments) == on_all_cpus


def test_a_ptxas_that_takes_long_ends_with_the_tool(tmp_path: Path) -> None:
    """Also if the tool is killed."""
    made = Path(ptxas(tmp_path, "13"))
    started = tmp_path / "started"
    made.write_text(f"#!/bin/sh\n[ $1 = --version ] || {{ echo $$ > {quoted(started)}; exec sleep 600; }}\n")
    started.touch()
    started.chmod(0o666)
    script = f"from gpubpf.images import assemble; assemble.Ptxas({str(made)!r}).run(b'', 'sm_90', (), 3)"
    with tempfile.TemporaryDirectory() as left:  # a tool that is killed leaves its files
        os.chmod(left, 0o777)
        with subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"TMPDIR": left}) as tool:
            try:
                until = time.monotonic() + 60
                while not started.read_text().endswith("\n"):
                    assert tool.poll() is None and time.monotonic() < until
                    time.sleep(0.01)
                pid = int(started.read_text())
                own = os.getpriority(os.PRIO_PROCESS, 0)
                assert os.getpriority(os.PRIO_PROCESS, pid) == min(own + 3, 19)
            finally:
                tool.kill()
    while traceable.status(pid).get("State", "Z")[0] != "Z":  # where PID 1 waits for no process, it stays
        assert time.monotonic() < until
        time.sleep(0.01)


def test_without_a_ptxas_for_the_driver_the_reason_names_the_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(assemble, "_found", lambda *_: (ptxas(tmp_path, "13"),))
    monkeypatch.setattr(assemble, "_libraries", list)
    with pytest.raises(AssembleError) as raised:
        assemble.assemble(PTX, assemble.Target("gpu", (9, 0), 12))
    why = "ptxas is of CUDA 13, and the driver of CUDA 12 does not load its code; install nvidia-cuda-nvcc-cu12 from PyPI"
    assert str(raised.value) == why


def ptxas(directory: Path, release: str) -> str:
    """A ptxas that says its release, and writes it as the cubin."""
    made = directory / release / "ptxas"
    made.parent.mkdir()
    made.write_text(
        f"#!/bin/sh\ncase $1 in --version) echo 'Cuda compilation tools, release {release}.1, V{release}.1.80';;\n"
        f"*) while [ $# -gt 1 ]; do [ $1 = -o ] && printf {release} > $2; shift; done;; esac\n"
    )
    made.chmod(0o755)
    for folder in (made.parent, directory, *directory.parents[:2]):
        folder.chmod(folder.stat().st_mode | 0o711)
    return str(made)


def test_a_ptxas_without_its_mode_is_made_executable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    ptxas = packages / "nvidia" / "cu13" / "bin" / "ptxas"
    ptxas.parent.mkdir(parents=True)
    ptxas.write_text("#!/bin/sh\n")
    ptxas.chmod(0o644)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(packages))
    assemble._found.cache_clear()
    try:
        assert str(ptxas) in assemble._found("", "", "/nowhere")
    finally:
        assemble._found.cache_clear()
    assert os.stat(ptxas).st_mode & stat.S_IXUSR


LIBRARY = next(iter([os.environ["NVJITLINK"]] if "NVJITLINK" in os.environ else assemble._libraries()), None)


@pytest.mark.skipif(
    LIBRARY is None, reason="needs nvJitLink (PyPI: nvidia-nvjitlink; or its path in NVJITLINK)"
)
def test_nvjitlink(monkeypatch: pytest.MonkeyPatch) -> None:
    no_assembler(monkeypatch)
    monkeypatch.setattr(assemble, "_libraries", lambda: [LIBRARY])
    done = assemble.assemble(PTX, TARGET)
    assert set(fatbin.kernels(done.cubin)) == {"hungry", "empty"} == set(done.functions)
    assert done.functions["hungry"].registers > 80
    limited = assemble.assemble(PTX, TARGET, "-dlcm=cg -maxrregcount=32").functions["hungry"]
    assert limited.registers <= 32
    with pytest.raises(AssembleError, match="bad"):
        assemble.assemble(PTX.replace("bar.sync 0;", "bad.sync 0;"), TARGET)
    with pytest.raises(AssembleError, match="does not know"):
        assemble.assemble(PTX, assemble.Target("gpu", (99, 0)))


@pytest.mark.skipif(
    LIBRARY is None, reason="needs nvJitLink (PyPI: nvidia-nvjitlink; or its path in NVJITLINK)"
)
def test_nvjitlink_is_not_used_for_setmaxnreg(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would ignore it in each kernel, and the tool would measure another one."""
    no_assembler(monkeypatch)
    monkeypatch.setattr(assemble, "_libraries", lambda: [LIBRARY])
    text = PTX.replace(".target sm_75", ".target sm_90a").replace(
        ".visible .entry empty() {",
        ".visible .entry empty() .maxntid 128 .minnctapersm 1 { setmaxnreg.dec.sync.aligned.u32 40;",
    )
    with pytest.raises(AssembleError, match="nvJitLink ignores setmaxnreg; install nvidia-cuda-nvcc"):
        assemble.assemble(text, TARGET)


def test_ptxas_talk() -> None:
    talk = """ptxas info    : 0 bytes gmem, 8 bytes cmem[4]
ptxas info    : Compiling entry function 'rec' for 'sm_90'
ptxas info    : Function properties for rec
    416 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 31 registers, used 1 barriers, 448 bytes cumulative stack size, 128 bytes smem, 360 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Function properties for _Z3fibi
    24 bytes stack frame, 20 bytes spill stores, 20 bytes spill loads
"""
    assert assemble.parse_verbose(talk) == {
        "rec": assemble.KernelResources(31, 12, 16, 448, 128, 368),
        "_Z3fibi": assemble.KernelResources(0, 20, 20, 24),
    }

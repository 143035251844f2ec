"""Programs that hipcc built, on AMD's own libamdhip64 and libhsa-runtime64; each checks its results itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpubpf_commands import quoted
from hipsim_device import assert_no_code, program, run, thunk_program

KERNELS = "transpose shuffles votes atomics multiply dynamic scratch arguments doubles last_block whole_words".split()
SETTINGS = {
    "plain": {},
    "hostile": {"HIPSIM_HOSTILE": "1"},
    "no-sdma": {"HSA_ENABLE_SDMA": "0"},
    "no-interrupts": {"HSA_ENABLE_INTERRUPT": "0"},
    "virtual-clock": {"HIPSIM_CLOCK": "virtual"},
    "one-thread": {"HIPSIM_THREADS": "1"},
}


GPUS = ["gfx906", "gfx90a"]


def output(
    name: str, *arguments: str, options: tuple[str, ...] = (), gpu: str = GPUS[0], **settings: str
) -> str:
    """What the program prints; it must succeed."""
    done = run([program(name, *options, gpu=gpu), *arguments], HIPSIM_GPU=gpu, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hipsim:" not in done.stderr
    return done.stdout


@pytest.mark.every(6)
@pytest.mark.parametrize("setting", SETTINGS)
def test_kernels(setting: str) -> None:
    assert output("kernels", **SETTINGS[setting]).split() == KERNELS


@pytest.mark.parametrize(
    "setting", ["plain", *(pytest.param(s, marks=pytest.mark.long) for s in ("hostile", "virtual-clock"))]
)
def test_kernels_on_gfx90a(setting: str) -> None:
    assert output("kernels", gpu="gfx90a", **SETTINGS[setting]).split() == KERNELS


@pytest.mark.every(4)
def test_matrix_products() -> None:
    """Sums of small integers, which are exact."""
    done = output("matrix", options=("-ffp-contract=off", "-munsafe-fp-atomics"), gpu="gfx90a")
    assert done.split() == ["single", "double", "half", "brain", "byte", "atomics", "registers"]


@pytest.mark.long
def test_other_programs_on_gfx90a() -> None:
    assert output("copies", "memset", gpu="gfx90a") == "copies are right\n"
    assert output("streams", gpu="gfx90a") == "streams are right\n"
    assert output("memory", gpu="gfx90a", HIPSIM_MEMORY="1G") == "gfx90a:sramecc+:xnack-\n"
    assert output("devices", gpu="gfx90a", HIPSIM_DEVICES="2") == "devices are right\n"
    assert len(output("output", gpu="gfx90a").splitlines()) == 8
    assert output("cooperative", gpu="gfx90a") == "all rounds are right\n"
    assert output("compiled", gpu="gfx90a").split() == ["errors", "kernel", "template", "variable"]


@pytest.mark.every(6)
@pytest.mark.parametrize("setting", SETTINGS)
def test_copies(setting: str) -> None:
    assert output("copies", "memset", **SETTINGS[setting]) == "copies are right\n"


@pytest.mark.every(3)
@pytest.mark.parametrize("setting", ["plain", "hostile", "no-interrupts", "virtual-clock"])
def test_streams(setting: str) -> None:
    assert output("streams", **SETTINGS[setting]) == "streams are right\n"


@pytest.mark.every(2)
@pytest.mark.parametrize("setting", ["plain", "hostile"])
def test_memory_and_errors(setting: str) -> None:
    assert output("memory", HIPSIM_MEMORY="1G", **SETTINGS[setting]) == "gfx906:sramecc+:xnack-\n"


@pytest.mark.every(3)
@pytest.mark.parametrize("setting", ["plain", "hostile", "no-sdma"])
def test_two_devices(setting: str) -> None:
    assert output("devices", HIPSIM_DEVICES="2", **SETTINGS[setting]) == "devices are right\n"


def test_printf() -> None:
    lines = output("output").splitlines()
    first = [f"block {b} thread {t}: text 2.500 1099511627776" for b in (0, 1) for t in (5, 37)]
    rest = [f"block 0 thread 5: text {i}.000 1099511627776" for i in range(3)]
    assert sorted(lines[:4]) == sorted(first)  # blocks print in any order
    assert lines[4:] == [*rest, "done"]


def test_cooperative_launch() -> None:
    assert output("cooperative") == "all rounds are right\n"


def library(name: str) -> None:
    """Skip the test where a library of AMD's is missing."""
    if not Path("/usr/include", name).exists():
        pytest.skip(f"no {name} here; install lib{name}-dev")


GENERATORS = ["philox", "mtgp32", "sobol32", "sobol64"]
SLOW = ["xorwow", "mrg32k3a"]
RUNS = [pytest.param(GPUS[0], name) for name in GENERATORS] + [pytest.param("gfx90a", "sobol32")]
RUNS += [pytest.param(GPUS[0], name, marks=pytest.mark.long) for name in SLOW]
RUNS += [
    pytest.param("gfx90a", name, marks=pytest.mark.long) for name in [*GENERATORS, *SLOW] if name != "sobol32"
]


@pytest.mark.every(6)
@pytest.mark.parametrize(("gpu", "name"), RUNS)
def test_rocrand(gpu: str, name: str) -> None:
    library("rocrand")
    done = run([program("random", "-lrocrand", gpu=gpu), name], HIPSIM_GPU=gpu)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{name}\n", "")


@pytest.mark.long
@pytest.mark.parametrize("gpu", GPUS)
def test_rocrand_in_kernels(gpu: str) -> None:
    library("rocrand")
    assert output("random_engines", gpu=gpu).split() == "xorwow mrg32k3a philox sobol32 sobol64".split()


@pytest.mark.long
@pytest.mark.parametrize("gpu", GPUS)
def test_rocprim(gpu: str) -> None:
    library("rocprim")
    assert output("primitives", gpu=gpu).split() == ["scan", "reduce", "sort", "select"]
    assert output("algorithms", gpu=gpu).split() == ["pairs", "merges", "segments", "runs", "histogram"]


RUNS = [pytest.param(GPUS[0], setting) for setting in ("plain", "hostile")]
RUNS += [pytest.param("gfx90a", "plain", marks=pytest.mark.long)]


@pytest.mark.every(3)
@pytest.mark.parametrize(("gpu", "setting"), RUNS)
def test_rocsparse(gpu: str, setting: str) -> None:
    library("rocsparse")
    done = output("sparse", options=("-lrocsparse",), gpu=gpu, **SETTINGS[setting])
    assert done.split() == ["product", "transposed", "solution", "factors"]


@pytest.mark.every(2)
@pytest.mark.parametrize("gpu", GPUS)
def test_lanes_in_different_kinds_of_memory(gpu: str) -> None:
    assert output("generic", gpu=gpu) == "ok\n"


@pytest.mark.parametrize("setting", ["plain", pytest.param("hostile", marks=pytest.mark.long)])
def test_a_child_process_does_not_change_what_its_parent_has(setting: str) -> None:
    done = run([program("forks")], **SETTINGS[setting])
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.every(2)
@pytest.mark.parametrize("setting", ["plain", "hostile"])
def test_kernels_that_the_program_compiles(setting: str) -> None:
    assert output("compiled", **SETTINGS[setting]).split() == ["errors", "kernel", "template", "variable"]


@pytest.mark.parametrize(
    ("what", "ours", "amds"),
    [
        (
            "write",
            r"kernel 'writeOutside\(int\*, unsigned long\)'.*: store of 4 bytes at 0x\w+, which is not mapped",
            "Page not present",
        ),
        ("near", r"kernel 'writeOutside\(int\*, unsigned long\)'.*: store of 4 bytes", "Page not present"),
        (
            "null",
            r"kernel 'readOutside\(int const\*, int\*\)'.*: load of 4 bytes at 0x0, which",
            "on address (nil)",
        ),
        ("host", r"kernel 'readOutside\(int const\*, int\*\)'.*: load of 4 bytes at 0x", "Page not present"),
        ("freed", r"kernel 'readOutside\(int const\*, int\*\)'.*: load of 4 bytes at 0x", "Page not present"),
    ],
)
def test_memory_faults(what: str, ours: str, amds: str) -> None:
    done = run([program("faults"), what])
    assert done.returncode == -6, done.stderr  # ROCr aborts the program
    assert re.search(f"^hipsim: {ours}", done.stderr, re.MULTILINE), done.stderr
    assert "Memory access fault by GPU node-1" in done.stderr and amds in done.stderr


@pytest.mark.parametrize(
    ("what", "said"), [("abort", ""), ("assert", "Device-side assertion `value == 1' failed")]
)
def test_traps(what: str, said: str) -> None:
    done = run([program("faults"), what])
    assert done.returncode == -6, done.stderr
    assert said in done.stdout + done.stderr
    assert "HSA_STATUS_ERROR_EXCEPTION" in done.stderr and "hipsim: kernel '" in done.stderr


def test_damaged_code() -> None:
    code = program("store", "--genco")
    assert run([program("modules"), code]).returncode == 0
    for size in ("0", "3", "1000", "4096"):
        done = run([program("modules"), code, size])
        assert (done.returncode, done.stdout) == (0, "hipErrorInvalidKernelFile\n"), done.stderr


def test_code_for_another_gpu() -> None:
    foreign = program("store", "--genco", gpu="gfx1030")
    assert_no_code(run([program("modules"), foreign]))
    done = run([program("vectoradd", gpu="gfx1030")], HIPSIM_GPU="gfx90a")
    assert_no_code(done)
    assert re.match(
        r"hipsim: \S+ has code for gfx1030, not for gfx90a; set HIPSIM_GPU=gfx1030\n", done.stderr
    ), done


@pytest.mark.every(3)
@pytest.mark.parametrize("gpu", ["gfx90a", "gfx1030"])
def test_each_program_gets_a_gpu_that_it_has_code_for(gpu: str) -> None:
    done = run(["sh", "-c", f"{quoted(program('vectoradd'))} && {quoted(program('vectoradd', gpu=gpu))}"])
    assert (done.returncode, done.stdout.count("sums are right"), done.stderr) == (0, 2, ""), done


def test_a_program_with_code_for_other_gpus_only(tmp_path: Path) -> None:
    app = tmp_path / "app"
    content = Path(thunk_program("thunk")).read_bytes()
    app.write_bytes(
        content + b"".join(b"-amdgcn-amd-amdhsa--%s\0" % name for name in (b"gfx908:sramecc+", b"gfx1100"))
    )
    app.chmod(0o755)
    done = run([app, "events"])
    said = "has code for gfx1100, gfx908:sramecc+, not for gfx906; build it with --offload-arch=gfx906"
    assert done.stderr == f"hipsim: app {said}\n", done


def test_no_device() -> None:
    done = run([program("vectoradd")], HIPSIM_DEVICES="0")
    assert done.returncode == 1 and re.search("hipErrorInvalidDevice|invalid device ordinal", done.stderr)

"""Programs that hipcc built for gfx1030, on AMD's own libamdhip64 and libhsa-runtime64; each checks its results itself."""

import re

import pytest

from hipsim_device import assert_no_code, program, run
from hipsim_gfx10 import GPU, cases_of_gfx9

gfx9 = cases_of_gfx9("test_programs")
ALL = [pytest.param(name, marks=pytest.mark.long) for name in gfx9.SETTINGS if name != "plain"]


def output(name: str, *arguments: str, options: tuple[str, ...] = (), **settings: str) -> str:
    """What the program prints; it must succeed."""
    done = run([program(name, *options, gpu=GPU), *arguments], HIPSIM_GPU=GPU, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hipsim:" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("setting", ["plain", *ALL])
def test_kernels(setting: str) -> None:
    assert output("kernels", **gfx9.SETTINGS[setting]).split() == gfx9.KERNELS


@pytest.mark.parametrize("setting", ["plain", *ALL])
def test_copies(setting: str) -> None:
    """HIP compiles its copy kernels for this GPU."""
    assert output("copies", "memset", **gfx9.SETTINGS[setting]) == "copies are right\n"


@pytest.mark.parametrize("setting", [ALL[0]])
def test_streams(setting: str) -> None:
    assert output("streams", **gfx9.SETTINGS[setting]) == "streams are right\n"


def test_properties() -> None:
    """The name, the lanes of a wave, and errors."""
    assert output("memory", HIPSIM_MEMORY="1G") == f"{GPU}\n"


@pytest.mark.long
def test_two_devices() -> None:
    assert output("devices", HIPSIM_DEVICES="2") == "devices are right\n"


@pytest.mark.long
def test_printf() -> None:
    assert output("output").splitlines()[-1] == "done"


@pytest.mark.long
def test_cooperative_launch() -> None:
    assert output("cooperative") == "all rounds are right\n"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) for name in ("philox", "mtgp32", "sobol32", "xorwow")]
)
def test_rocrand(name: str) -> None:
    """The library has code for this GPU."""
    gfx9.library("rocrand")
    done = run([program("random", "-lrocrand", gpu=GPU), name], HIPSIM_GPU=GPU)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{name}\n", "")


@pytest.mark.long
def test_rocrand_in_kernels() -> None:
    gfx9.library("rocrand")
    assert output("random_engines").split() == "xorwow mrg32k3a philox sobol32 sobol64".split()


@pytest.mark.long
def test_rocprim() -> None:
    gfx9.library("rocprim")
    assert output("primitives").split() == ["scan", "reduce", "sort", "select"]
    assert output("algorithms").split() == ["pairs", "merges", "segments", "runs", "histogram"]


@pytest.mark.long
def test_rocsparse() -> None:
    gfx9.library("rocsparse")
    done = output("sparse", options=("-lrocsparse",))
    assert done.split() == ["product", "transposed", "solution", "factors"]


@pytest.mark.long
def test_kernels_that_the_program_compiles() -> None:
    assert output("compiled").split() == ["errors", "kernel", "template", "variable"]


@pytest.mark.long
def test_memory_faults() -> None:
    done = run([program("faults", gpu=GPU), "write"], HIPSIM_GPU=GPU)
    assert done.returncode == -6, done.stderr  # ROCr aborts the program
    ours = r"kernel 'writeOutside\(int\*, unsigned long\)'.*: store of 4 bytes at 0x\w+, which is not mapped"
    assert re.search(f"^hipsim: {ours}", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.long
def test_code_for_gfx906() -> None:
    assert_no_code(run([program("vectoradd")], HIPSIM_GPU=GPU))

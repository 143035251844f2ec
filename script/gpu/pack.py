"""Build the programs, and pack what the machine with the GPU needs: libraries, ptxas, the agent, programs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpu import patched, probes
from gpu.machine import (
    AGENT,
    PACKED,
    PACKED_CUPTI,
    PLACE,
    PYTHON,
    ROOT,
    SIMULATOR,
    Failure,
    commit,
    sources,
)
from gpubpf.errors import Error
from gpubpf.images.assemble import device_runtime

PACKAGES = ("argcomplete", "cxxfilt", "lz4", "tabulate", "zstandard")  # beside NumPy, which is PyTorch's
OLDER_PTXAS = "nvidia-cuda-nvcc-cu12==12.9.*"  # for PyTorch and Triton on drivers of CUDA 12
CUPTI = "nvidia-cuda-cupti==13.0.*"
SANITIZER = "nvidia-cuda-sanitizer-api==13.0.*"
# NVIDIA's packages of older CUDA runtimes, by version. Only the newer ones have the static runtime.
RUNTIMES = {
    "11.8": "nvidia-cuda-runtime-cu11==11.8.*",
    "12.1": "nvidia-cuda-runtime-cu12==12.1.*",
    "12.4": "nvidia-cuda-runtime-cu12==12.4.*",
    "12.9": "nvidia-cuda-runtime-cu12==12.9.*",
}
OWN = "13.0"  # the runtime of the toolkit
ARCHITECTURES = ("75", "90")  # PTX for the oldest, so that any newer GPU takes it; SASS of some
LIMIT = 50 * 2**20
PROGRAMS = Path(__file__).parent / "programs"
HOPPER = "-gencode arch=compute_90a,code=[sm_90a,compute_90a]"
FLAGS = {"specialised": HOPPER}  # of programs that need a GPU of their own
MORE_FLAGS = {"pointers": "-rdc=true -lcudadevrt"}  # of kernels that launch kernels
LIBRARY = "g++ -std=c++17 -O2 -Wall -Wextra -Werror -shared -fPIC -static-libstdc++ -static-libgcc".split()


def pack() -> None:
    """Make the packed file. Raises Failure if one of its parts is missing."""
    toolkit, made_from = real_toolkit(), sources()
    # The file says of which sources it is: the agent has to be of these.
    run(["make", "-s", "-C", str(AGENT.parent)], "the agent cannot be built")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        top, wheels = Path(scratch, "gpu"), Path(scratch, "wheels")
        download(PACKAGES, wheels)
        for wheel in wheels.iterdir():
            shutil.unpack_archive(wheel, top / "site", "zip")
        for tests in [path for path in (top / "site").rglob("tests") if path.is_dir()]:
            shutil.rmtree(tests)
        for name in ("ptxas", "nvlink"):
            copy(toolkit / "bin" / name, top / "bin" / name)
        copy(Path(device_runtime(str(toolkit / "bin/ptxas"))), top / "lib/libcudadevrt.a")
        copy(older_ptxas(Path(scratch, "nvcc")), top / "bin12/ptxas")
        copy(runtime(toolkit), top / "lib/libcudart.so.13")
        for library in AGENT.glob("*.so"):
            copy(library, top / "agent" / library.name)
            run(["strip", str(top / "agent" / library.name)], "cannot strip the agent")
        copy(cupti(Path(scratch, "cupti")), top / PACKED_CUPTI)
        sanitizer = sanitizer_api(Path(scratch))
        copy(sanitizer / "lib" / "libsanitizer-public.so", top / "lib/libsanitizer-public.so")
        build(
            top,
            Path(scratch),
            "".join(f" -gencode arch=compute_{a},code=[sm_{a},compute_{a}]" for a in ARCHITECTURES),
        )
        build_static(top, Path(scratch))
        build_machine(top)
        for version, package in RUNTIMES.items():
            build_runtime(
                top, toolkit, Path(scratch), version, wheel_libraries(package, Path(scratch, version))
            )
        lacking = build_sanitizer(top / "programs", sanitizer / "include", toolkit)
        (top / "commit").write_text(commit() + "\n")
        (top / "sources").write_text(made_from)
        PACKED.parent.mkdir(exist_ok=True)
        os.environ["XZ_OPT"] = "-T1 -6"
        run(["tar", "-C", str(top), "-cJf", str(PACKED), "."], "cannot pack")
    size = PACKED.stat().st_size
    print(f"gpu-check: packed {PACKED.relative_to(ROOT)}, {size / 2**20:.1f} MiB", file=sys.stderr)
    if size > LIMIT:
        raise Failure(f"the packed file is over {LIMIT >> 20} MiB; leave programs out")
    if lacking:
        raise Failure(f"the packed file has no patches for the stage sanitizer: {lacking}")


def build(top: Path, scratch: Path, flags: str = "") -> None:
    """Build the examples and programs with the shared runtime, into top/examples and top/programs."""
    copied = scratch / "shared"
    shutil.copytree(ROOT / "examples", copied, ignore=built)
    # One of them has a flag of its own, which none given keeps.
    options = [f"NVCCFLAGS={flags}"] if flags else []
    run(["make", "-s", "-B", "-C", str(copied), *options], "the examples cannot be built")
    for source in copied.glob("*.cu"):
        copy(source.with_suffix(""), top / "examples" / source.stem)
    (top / "programs").mkdir(parents=True, exist_ok=True)
    for source in PROGRAMS.glob("*.cu"):
        out = top / "programs" / source.stem
        run(
            [
                "nvcc",
                "-std=c++17",
                "-O2",
                "-cudart",
                "shared",
                *FLAGS.get(source.stem, flags).split(),
                *MORE_FLAGS.get(source.stem, "").split(),
                "-o",
                str(out),
                str(source),
                "-ldl",
            ],
            f"{source.name} cannot be built",
        )
    source = PROGRAMS / "activity.cpp"
    run(
        [*LIBRARY, "-o", str(top / "programs" / "libactivity.so"), str(source), "-ldl"],
        f"{source.name} cannot be built",
    )


def build_static(top: Path, scratch: Path) -> None:
    """Build the examples and handles with the static runtime, as nvcc does by default, into top/static."""
    copied = scratch / "static"
    shutil.copytree(ROOT / "examples", copied, ignore=built)
    makefile = copied / "Makefile"
    makefile.write_text(makefile.read_text().replace("-cudart shared", "-cudart static"))
    flags = f"-gencode arch=compute_{ARCHITECTURES[0]},code=compute_{ARCHITECTURES[0]} -gencode arch=compute_90,code=compute_90"
    run(["make", "-s", "-B", "-C", str(copied), f"NVCCFLAGS={flags}"], "the examples cannot be built static")
    for source in copied.glob("*.cu"):
        copy(source.with_suffix(""), top / "static" / source.stem)
    handles = PROGRAMS / "handles.cu"
    command = [
        "nvcc",
        "-std=c++17",
        "-O2",
        *flags.split(),
        "-o",
        str(top / "static/handles"),
        str(handles),
        "-ldl",
    ]
    run(command, "handles.cu cannot be built static")


def build_machine(top: Path) -> None:
    """Build the programs that --sass measures, without PTX, into top/machine."""
    where = top / "machine"
    where.mkdir(parents=True, exist_ok=True)
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    for source in (*(ROOT / f"examples/{name}.cu" for name in patched.EXAMPLES), PROGRAMS / "workloads.cu"):
        command = ["nvcc", "-std=c++17", "-O2", "-cudart", "shared", *codes, "-o", str(where / source.stem)]
        run([*command, str(source), "-ldl"], f"{source.name} cannot be built without PTX")


def build_runtime(top: Path, toolkit: Path, scratch: Path, version: str, libraries: Path) -> None:
    """Build programs/runtimes.cpp with the CUDA runtime in `libraries`, shared, and static if it has one, into top/runtimes.

    The shared runtime is packed beside them, unless it is the toolkit's own.
    """
    image = scratch / "vectoradd.fatbin"
    if not image.exists():
        codes = "".join(f" -gencode arch=compute_{a},code=[sm_{a},compute_{a}]" for a in ARCHITECTURES)
        run(
            ["nvcc", "-fatbin", *codes.split(), "-o", str(image), str(ROOT / "examples/vectoradd.cu")],
            "the device code of vectoradd cannot be built",
        )
    (top / "runtimes").mkdir(parents=True, exist_ok=True)
    shared = min(libraries.glob("libcudart.so.[0-9]*"))
    ways: dict[str, list[str]] = {"shared": [str(shared)]}
    if version != OWN:
        copy(shared, top / "lib" / version / shared.name)
        # Stronger than LD_LIBRARY_PATH, where a runtime of the same name may be.
        ways["shared"] += [f"-Wl,--disable-new-dtags,-rpath,$ORIGIN/../lib/{version}"]
        if (static := libraries / "libcudart_static.a").exists():
            ways["static"] = [str(static), "-ldl", "-lrt", "-lpthread"]
    for way, words in ways.items():
        command = ["g++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", f'-DFATBIN="{image}"']
        command += ["-isystem", str(toolkit / "include"), "-o", str(top / "runtimes" / f"{way}-{version}")]
        run(
            [*command, str(PROGRAMS / "runtimes.cpp"), *words], f"runtimes.cpp cannot be built with {version}"
        )


def wheel_libraries(package: str, scratch: Path) -> Path:
    """Return the folder of libraries of one of NVIDIA's packages."""
    download((package,), scratch)
    (wheel,) = scratch.glob("*.whl")
    shutil.unpack_archive(wheel, scratch / "in", "zip")
    return next((scratch / "in").rglob("libcudart.so.*")).parent


def build_sanitizer(where: Path, include: Path, toolkit: Path) -> str:
    """Build the library that counts by patches of the Compute Sanitizer API, and the patches for Hopper.

    Return why the patches, which require bcc, cannot be made; "" if they are.
    """
    command = [*LIBRARY, "-isystem", str(include), "-isystem", str(toolkit / "include")]
    command += ["-o", str(where / "libpatches.so"), str(PROGRAMS / "patches.cpp"), "-ldl"]
    run(command, "patches.cpp cannot be built")
    build_late(where, toolkit / "include")
    try:
        text = probes.patches()
    except (Error, ImportError) as error:
        return str(error)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(text)
        file.flush()
        command = [
            "ptxas",
            "-arch=sm_90",
            "--compile-as-tools-patch",
            "-o",
            str(where / "patches.cubin"),
            file.name,
        ]
        run(command, "the patches cannot be assembled")
    return ""


def build_late(where: Path, include: Path) -> None:
    """Build the program that patches its own kernel while it runs, and the machine code of this kernel for Hopper."""
    command = [*"g++ -std=c++17 -O2 -Wall -Wextra -Werror -static-libstdc++ -static-libgcc".split()]
    command += ["-isystem", str(include), "-o", str(where / "late"), str(PROGRAMS / "late.cpp")]
    command += [f"-L{SIMULATOR}", "-lcuda", "-ldl"]  # as NVIDIA's, this is libcuda.so.1
    run(command, "late.cpp cannot be built")
    command = ["ptxas", "-arch=sm_90", "-o", str(where / "late.cubin"), str(PROGRAMS / "late.ptx")]
    run(command, "late.ptx cannot be assembled")


def older_ptxas(scratch: Path) -> Path:
    """Return the ptxas of NVIDIA's package for CUDA 12."""
    download((OLDER_PTXAS,), scratch)
    (wheel,) = scratch.glob("*.whl")
    shutil.unpack_archive(wheel, scratch / "in", "zip")
    ptxas = next((scratch / "in").rglob("ptxas"))
    ptxas.chmod(0o755)  # PyPI's wheels lack the executable bit
    return ptxas


def cupti(scratch: Path) -> Path:
    """Return the library of NVIDIA's CUPTI package."""
    download((CUPTI,), scratch)
    (wheel,) = scratch.glob("*.whl")
    shutil.unpack_archive(wheel, scratch / "in", "zip")
    return next((scratch / "in").rglob("libcupti.so.*"))


def sanitizer_api(scratch: Path) -> Path:
    """Return where lib/ and include/ of NVIDIA's package are unpacked."""
    wheels = scratch / "sanitizer"
    download((SANITIZER,), wheels)
    for wheel in wheels.glob("*.whl"):
        shutil.unpack_archive(wheel, wheels / "in", "zip")
    found = list((wheels / "in").rglob("libsanitizer-public.so"))
    if not found:
        raise Failure("NVIDIA's sanitizer package has no libsanitizer-public.so")
    return found[0].parent.parent


def download(packages: Sequence[str], where: Path) -> None:
    options = ["-q", "--no-deps", "--python-version", PYTHON, "--only-binary=:all:", "-d", str(where)]
    run([sys.executable, "-m", "pip", "download", *options, *packages], "cannot download the packages")


def built(directory: str, names: list[str]) -> list[str]:
    """Return the names that copytree leaves out: what make built."""
    return [name for name in names if f"{name}.cu" in names]


def real_toolkit() -> Path:
    """Return the toolkit's directory; nvcc on PATH may be a script that calls another one. Raises Failure."""
    nvcc = shutil.which("nvcc")
    if not nvcc:
        raise Failure("nvcc is needed to build the programs; put the CUDA toolkit on PATH")
    said = subprocess.run([nvcc, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True).stderr
    top = next((line.partition("TOP=")[2] for line in said.splitlines() if "TOP=" in line), "")
    return Path(top) if top else Path(nvcc).resolve().parent.parent


def runtime(toolkit: Path) -> Path:
    found = [*toolkit.glob("lib64/libcudart.so.13"), *toolkit.glob("lib/libcudart.so.13")]
    if not found:
        raise Failure(f"there is no libcudart.so.13 in {toolkit}; install the CUDA 13 runtime")
    return found[0]


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source.resolve(), target)


def run(command: Sequence[str], complaint: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failure(f"{complaint}: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}")


def build_here() -> None:
    """Build the programs for the embedded device into PLACE, if a source is newer than they are."""
    sources = [*PROGRAMS.glob("*.c*"), *(ROOT / "examples").glob("*.cu"), ROOT / "examples" / "check.h"]
    stamp = PLACE / "built"
    if stamp.exists() and stamp.stat().st_mtime > max(path.stat().st_mtime for path in sources):
        return
    PLACE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        build(PLACE, Path(scratch))
        toolkit = real_toolkit()
        build_runtime(PLACE, toolkit, Path(scratch), OWN, runtime(toolkit).parent)
    stamp.touch()

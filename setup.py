"""What pyproject.toml cannot say: make builds the C++ parts, script/manpages.py the man pages, README.md becomes a page of its own."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

CPP_PARTS = ("lib/cudasim", "lib/gpubpf/agent", "lib/gpubpf/calls/device_times")
OPTIONAL_PARTS = ("lib/hipsim",)  # needs AMD's headers, which not every distribution has
# For script/setup --cuda: the AMD part is built later.
WITHOUT_AMD = bool(os.environ.get("WITHOUT_AMD"))
# script/setup took the C++ parts from a wheel.
WITHOUT_MAKE = bool(os.environ.get("WITHOUT_MAKE"))
NEEDED = "g++ make liblz4-dev libzstd-dev"  # Debian's packages
PAGES = [path.name for path in Path("man/man8").glob("*.8")]
BUILT_PAGES = "build/man"
_REASON = re.compile(r"\*\*\*.*|.*\berror:.*|.*(?:not found|No such file|cannot find).*|no cuda\.h .*")


def cuda_include() -> str | None:
    """Return the directory of CUDA's headers: CUDA_INCLUDE, or that of PyPI's packages; None if make has to look for it."""
    if chosen := os.environ.get("CUDA_INCLUDE"):
        return chosen
    packages = importlib.util.find_spec("nvidia")
    for place in (packages and packages.submodule_search_locations) or ():
        if Path(place, "cu13/include/cuda.h").exists():
            return f"{place}/cu13/include"
    return None


def build_with_make(part: str) -> str:
    """Build a C++ part. Return the reason if it does not build, else ""."""
    variables = [f"PYTHON={sys.executable}"]
    if include := cuda_include():
        variables.append(f"CUDA_INCLUDE={include}")
    target = "lib/libgpubpf-agent.so" if WITHOUT_AMD and part == "lib/gpubpf/agent" else "all"
    command = ["make", "--silent", "-j", str(os.cpu_count() or 1), "-C", part, target, *variables]
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        return f"make cannot be run ({error.strerror}); it needs {NEEDED}"
    sys.stderr.write(done.stderr)
    if done.returncode == 0:
        return ""
    said = [line for line in done.stderr.splitlines() if _REASON.search(line)]
    return f"{said[0].strip() if said else 'make failed'}; it needs {NEEDED}"


class BuildWithMake(build_py):
    """Build the libraries where package data is collected from (make decides what is out of date), and the man pages."""

    def run(self) -> None:
        for part in () if WITHOUT_MAKE else CPP_PARTS:
            if why := build_with_make(part):
                raise SystemExit(f"gpubpf: {part} does not build: {why}")
        for part in () if WITHOUT_AMD or WITHOUT_MAKE else OPTIONAL_PARTS:
            if why := build_with_make(part):
                print(f"gpubpf: left out: {part} does not build: {why}", file=sys.stderr)
        if PAGES:
            subprocess.run([sys.executable, "script/manpages.py", BUILT_PAGES], check=True)
        super().run()
        self.strip_libraries()

    def strip_libraries(self) -> None:
        """Remove what only debuggers read from the copies of the libraries: nine tenths. Those in the checkout keep it."""
        libraries = [str(path) for path in Path(self.build_lib).rglob("*.so*")]
        if libraries and shutil.which("strip"):
            subprocess.run(["strip", "--strip-unneeded", *libraries], check=True)


class BinaryDistribution(Distribution):
    """Holds built libraries, so the wheel is for one platform."""

    def has_ext_modules(self) -> bool:
        return True


class AnyPythonWheel(bdist_wheel):
    """Nothing in the wheel is linked with Python: one wheel serves all versions."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def long_description() -> str:
    """Return README.md without what would lead to other files: links become their text, a picture its description."""
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[([^]]*)\]\((?!https://)[^)]*\)", r"(Picture: \1)", text)
    return re.sub(r"\[([^]]*)\]\((?!https://)[^)]*\)", r"\1", text)


for part in CPP_PARTS + OPTIONAL_PARTS:
    Path(part, "lib").mkdir(exist_ok=True)  # what make will fill is a package already
setup(
    packages=find_namespace_packages(
        "lib", exclude=["*.__pycache__", "*.build", "*.build.*", "*.sanitize*", "*.egg-info*", "embedded"]
    ),
    data_files=[
        ("share/man/man8", [f"{BUILT_PAGES}/{page}" for page in PAGES]),
        ("share/bash-completion/completions", [str(path) for path in Path("completions").glob("*")]),
    ],
    long_description=long_description(),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildWithMake, "bdist_wheel": AnyPythonWheel},
    distclass=BinaryDistribution,
)

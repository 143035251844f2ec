"""What pyproject.toml cannot say: make builds the C++ parts, script/manpages.py the man pages."""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

CPP_PARTS = ("lib/cudasim", "lib/gpubpf/agent", "lib/gpubpf/calls/device_times")
OPTIONAL_PARTS = ("lib/hipsim",)  # needs AMD's headers, which not every distribution has
PAGES = [path.name for path in Path("man/man8").glob("*.8")]
BUILT_PAGES = "build/man"


class BuildWithMake(build_py):
    """Build the libraries where package data is collected from (make decides what is out of date), and the man pages."""

    def run(self) -> None:
        variables = [f"PYTHON={sys.executable}"]  # which is there at run time, too, unless the wheel moves
        if cuda_include := os.environ.get("CUDA_INCLUDE"):
            variables.append(f"CUDA_INCLUDE={cuda_include}")
        for part in CPP_PARTS:
            subprocess.run(["make", "--silent", "-C", part, *variables], check=True)
        for part in OPTIONAL_PARTS:
            if subprocess.run(["make", "--silent", "-C", part], stderr=subprocess.DEVNULL).returncode:
                print(f"left out: {part} does not build; make -C {part} says why", file=sys.stderr)
        if PAGES:
            subprocess.run([sys.executable, "script/manpages.py", BUILT_PAGES], check=True)
        super().run()


class BinaryDistribution(Distribution):
    """Holds built libraries, so the wheel is for one platform."""

    def has_ext_modules(self) -> bool:
        return True


for part in CPP_PARTS + OPTIONAL_PARTS:
    Path(part, "lib").mkdir(exist_ok=True)  # what make will fill is a package already
setup(
    packages=find_namespace_packages(
        "lib", exclude=["*.__pycache__", "*.build", "*.sanitize*", "*.egg-info*", "embedded"]
    ),
    data_files=[
        ("share/man/man8", [f"{BUILT_PAGES}/{page}" for page in PAGES]),
        ("share/bash-completion/completions", [str(path) for path in Path("completions").glob("*")]),
    ],
    cmdclass={"build_py": BuildWithMake},
    distclass=BinaryDistribution,
)

"""What pyproject.toml cannot say: make builds the C++ parts."""

import os
import subprocess

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

CPP_PARTS = ("lib/cudasim", "lib/gpubpf/agent")


class BuildWithMake(build_py):
    """Build the libraries where package data is collected from; make decides what is out of date."""

    def run(self) -> None:
        cuda_include = os.environ.get("CUDA_INCLUDE")
        for part in CPP_PARTS:
            variables = [f"CUDA_INCLUDE={cuda_include}"] if cuda_include else []
            subprocess.run(["make", "--silent", "-C", part, *variables], check=True)
        super().run()


class BinaryDistribution(Distribution):
    """Holds built libraries, so the wheel is for one platform."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    packages=find_namespace_packages(
        "lib", exclude=["*.__pycache__", "*.build", "*.sanitize*", "*.egg-info*"]
    ),
    cmdclass={"build_py": BuildWithMake},
    distclass=BinaryDistribution,
)

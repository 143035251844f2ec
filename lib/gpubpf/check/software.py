"""gpubpf itself: its Python, the packages that it needs, and its libraries."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform

from gpubpf import __version__, agent
from gpubpf.calls import device_times
from gpubpf.check.finding import MISSING, Finding, ok
from gpubpf.check.machine import Machine
from gpubpf.errors import COMPLETE_PYTHON, how_to_install

# Modules of Python that tools need, and that not every build of it has. Without _ctypes, this check does not start, either.
BUILT_WITH_HEADERS = {"zlib": "zlib"}

# Modules by package, as in pyproject.toml; a test compares them.
NEEDED = {
    "cxxfilt": "cxxfilt",
    "llvmlite": "llvmlite",
    "lz4": "lz4",
    "msgpack": "msgpack",
    "numpy": "numpy",
    "pyelftools": "elftools",
    "tabulate": "tabulate",
    "zstandard": "zstandard",
}
OPTIONAL = {
    "argcomplete": "argcomplete",
    "duckdb": "duckdb",
    "matplotlib": "matplotlib",
    "mcp": "mcp",
    "opentelemetry-exporter-otlp-proto-grpc": "grpc",  # a part that only this package needs
    "prometheus_client": "prometheus_client",
    "pyarrow": "pyarrow",
}
_WITHOUT = {
    "argcomplete": "shells do not complete options",
    "duckdb": "gpubpf query, gpubpf diff and gpubpf report cannot be used",
    "matplotlib": "--heatmap cannot be used",
    "mcp": "gpubpf mcp cannot be used",
    "opentelemetry-exporter-otlp-proto-grpc": "gpubpf exporter --otlp cannot be used",
    "prometheus_client": "gpubpf exporter cannot be used",
    "pyarrow": "--parquet cannot be used",
}


def _missing(modules: dict[str, str]) -> list[str]:
    return [package for package, module in modules.items() if importlib.util.find_spec(module) is None]


def _versions(packages: dict[str, str]) -> str:
    found = []
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(package)  # installed, but without a version
    return ", ".join(found)


def python(machine: Machine) -> Finding:
    """The versions of gpubpf and Python, and whether Python is complete."""
    versions = f"gpubpf {__version__} with Python {platform.python_version()}"
    if lacks := _missing(BUILT_WITH_HEADERS):
        return Finding(MISSING, f"{versions} without {', '.join(lacks)}", "no tool works", COMPLETE_PYTHON)
    return ok(versions)


def packages(machine: Machine) -> Finding:
    """The Python packages that tools need."""
    if lacks := _missing(NEEDED):
        return Finding(MISSING, f"no {', '.join(lacks)}", "no tool works", how_to_install(" ".join(lacks)))
    return ok(_versions(NEEDED))


def optional(machine: Machine) -> Finding:
    """The Python packages that some options need."""
    if lacks := _missing(OPTIONAL):
        why = "; ".join(_WITHOUT[package] for package in lacks)
        return Finding(MISSING, f"no {', '.join(lacks)}", why, how_to_install(" ".join(lacks)), needed=False)
    return ok(_versions(OPTIONAL))


def libraries(machine: Machine) -> Finding:
    """The libraries of gpubpf that measured programs load."""
    places = {
        agent.LIBRARY: "every tool but cudasnoop and hipsnoop",
        agent.HSA_LIBRARY: "HIP programs are not measured by every tool but hipsnoop",
        **{
            one.library: "hipsnoop has no times of kernels"
            for one in (device_times.HSA, device_times.ROCPROFILER)
        },
    }
    lacks = [library for library in places if not library.exists()]
    if lacks:
        why = places[lacks[0]] + (" does not work" if lacks[0] == agent.LIBRARY else "")
        action = "run script/setup, or install gpubpf again"
        return Finding(MISSING, f"not built: {', '.join(one.name for one in lacks)}", why, action)
    return ok(f"{len(places)} built")

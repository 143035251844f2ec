"""Suites of CUDA and HIP programs in source form: the lists in `SUITE.toml`, and what the compiler makes of each program.

A list begins with the suite's address and commit, and with defaults for its programs. `[programs]` has one line for each:

    vectorAdd = { directory = "Samples/0_Introduction/vectorAdd", args = "-n 1000" }

directory: the program's directory in the checkout, where the compiler runs. `*` stands for the program's name.
sources: patterns of the files to compile, from this directory.
flags: the compiler's options. The list's own are in its `flags`; a program's are added. `$SUITE` is the checkout, `*` the name,
    `$CUDA` the directory of CUDA's headers.
libraries: NVIDIA's libraries to link with, such as `nvrtc`. They and their headers are those of a package from PyPI, or of the
    toolkit.
modules: files that the program loads at run time, such as `a.fatbin`, each with its source.
files: patterns of other files that the program opens. It runs in a directory with links to these. A path may begin with
    `$CUDA/`, too.
inputs: files that the program reads and the checkout does not have, each with the shell command that writes it.
smaller: sizes (or seeds) that are fixed in the sources: words of these, and what takes their place in a copy, which is built.
    The list's own come first; a program's are added.
args: the program's arguments, in which `$SUITE` is the checkout, too.
environment: variables for the program, such as the number of the device's GPUs.
measured: a pattern of lines whose numbers differ between runs, besides those that the runner recognizes.
unordered: whether threads or processes print lines in any order.

A list of HIP programs has `api = "hip"`. It can be the twin of a CUDA list: `twin` is the name of that list, which also has
the address and the commit. `names` are programs of the twin whose lines hold here, too: nvcc's options become those of hipcc.
The fields of a line in `[programs]` take the place of those of the twin's line.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from conformance.tools import APIS, ROOT, Api, finished
from gpubpf.traced.device import LIBRARIES

LISTS = Path(__file__).parent
BUILT = ROOT / "build" / "conformance"
LIMIT = 600.0  # seconds for the compiler
PACKAGES = {
    "nvrtc": "nvidia-cuda-nvrtc",
    "nvJitLink": "nvidia-nvjitlink",
    "curand": "nvidia-curand",
    "nvvm": "nvidia-nvvm",
}  # on PyPI
SOURCES = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp")


@dataclass(frozen=True)
class Program:
    """One line of a list. The fields are those of the module's docstring."""

    name: str
    directory: str = "*"
    sources: str = "*.cu"
    flags: str = ""
    libraries: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)
    files: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)
    smaller: Mapping[str, str] = field(default_factory=dict)
    args: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    measured: str = ""
    unordered: bool = False


@dataclass(frozen=True)
class Suite:
    """A list of programs. Patterns of their output: wrong, if the program's own check failed; right, if it passed ("": unknown)."""

    url: str
    commit: str
    wrong: str
    programs: Sequence[Program]
    api: Api = APIS["cuda"]
    right: str = ""


def suite(path: Path) -> Suite:
    """Return the list in a file."""
    given = tomllib.loads(path.read_text())
    lines, api = given.pop("programs"), APIS[given.pop("api", "cuda")]
    if twin := given.pop("twin", ""):
        other = tomllib.loads(path.with_name(f"{twin}.toml").read_text())
        lines = _shared(other.pop("programs"), given.pop("names").split(), lines, api)
        given = {key: other[key] for key in ("url", "commit", "wrong", "sources")} | given
    about = {key: given.pop(key) for key in ("url", "commit", "wrong", "right") if key in given}
    common = Program(name="", **given)
    programs = []
    for name, line in lines.items():
        flags = f"{common.flags} {line.pop('flags', '')}".replace("*", name)
        smaller = {**common.smaller, **line.pop("smaller", {})}
        program = replace(common, name=name, flags=flags, smaller=smaller, **line)
        programs.append(replace(program, directory=program.directory.replace("*", name)))
    return Suite(programs=programs, api=api, **about)


def _shared(
    twin: Mapping[str, Any], names: Sequence[str], own: Mapping[str, Any], api: Api
) -> dict[str, dict[str, Any]]:
    """Return the lines of a list that shares programs with another one, in the order of their names."""
    lines = {}
    for name in sorted({*names, *own}, key=str.lower):
        line = {**twin.get(name, {})}
        if flags := line.get("flags"):
            line["flags"] = " ".join(_translated(flag, api) for flag in flags.split())
        line |= own.get(name, {})
        lines[name] = line
    return lines


def _translated(flag: str, api: Api) -> str:
    """Return what takes the place of one of nvcc's options. Headers come first from the twin's directory."""
    other = f"{flag.removesuffix('cuda')}hip " if flag.startswith("-I") and flag.endswith("-cuda") else ""
    return other + api.flags.get(flag, flag)


def built(
    program: Program, checkout: Path, version: str | None, place: Path, api: Api = APIS["cuda"]
) -> tuple[list[str], str]:
    """Build a program in `place`, unless it is there already. Return its command, and why the compiler failed or "".

    version: the checkout's commit; without one, the program is built again.
    """
    place = place / program.name
    what = asdict(
        replace(program, args="", environment={}, measured="", unordered=False)
    )  # these need no other executable
    headers = [
        os.environ[name] for name in ("CPLUS_INCLUDE_PATH", "NVCC_APPEND_FLAGS") if os.environ.get(name)
    ]
    key = hashlib.sha256(
        json.dumps([what, version, api.options, _version(api), *headers]).encode()
    ).hexdigest()
    args = shlex.split(program.args)
    command = [str(place / program.name), *(arg.replace("$SUITE", str(checkout)) for arg in args)]
    kept = place / "built.json"
    if version and kept.exists() and json.loads(kept.read_text())["key"] == key:
        return command, ""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    reason = _build(program, checkout, place, api)
    if not reason:  # what was missing may be there the next time
        kept.write_text(json.dumps({"key": key}))
    return command, reason


def commit(checkout: Path) -> str | None:
    """Return the commit of a checkout; None if it is no checkout of git."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else None


def _version(api: Api) -> str:
    command = [api.compiler, "--version"]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=_environment(api)).stdout


def _environment(api: Api) -> dict[str, str]:
    return {**os.environ, **api.environment}


def _build(program: Program, checkout: Path, place: Path, api: Api) -> str:
    directory = checkout / program.directory
    if program.smaller and (missing := _copy(directory, directory := place / "source", program.smaller)):
        return f"the sources do not have: {missing}"
    if not (sources := _matches(directory, program.sources)):
        return f"no {program.sources} in {program.directory}"
    given = program.flags.replace("$SUITE", str(checkout))
    flags = shlex.split(given.replace("$CUDA", str(_cuda_headers())) if "$CUDA" in given else given)
    try:
        flags += [flag for library in program.libraries.split() for flag in _library(library)]
    except FileNotFoundError as error:
        return str(error)
    used = [flag for flag in flags if flag.startswith("-l")]  # a linker takes from these what came before
    steps = [["-o", str(place / program.name), *sources, *used]]
    for name, source in program.modules.items():
        steps.append(["-ptx" if name.endswith(".ptx") else "-fatbin", "-o", str(place / name), source])
    # Programs of CUDA's driver API link with -lcuda, whose place has the name libcuda.so.1 only.
    libraries = [f"-L{_stubs(place.parent)}", "-Xlinker", "--allow-shlib-undefined"]
    options = [*api.options, *(libraries if api.compiler == "nvcc" else ()), *flags]
    for step in steps:
        command = [api.compiler, *options, *step]
        said, errors, status = finished(command, LIMIT, directory, _environment(api))
        if status is None:
            return f"{api.compiler} takes longer than {LIMIT:.0f} s"
        if status != 0:
            return _error(errors + said, api)
    _link(program, directory, place)
    for name, command in program.inputs.items():
        (place / name).write_bytes(
            subprocess.run(command, shell=True, check=True, stdout=subprocess.PIPE).stdout
        )
    return ""


def _library(name: str) -> list[str]:
    """Return the compiler's options for one of NVIDIA's libraries. Raises FileNotFoundError if it is not here."""
    packages = importlib.util.find_spec("nvidia")
    places = [Path(path) for path in (packages and packages.submodule_search_locations) or ()]
    places = [lib for place in places for lib in sorted(place.glob("cu*/lib"), reverse=True)]
    headers = _cuda_headers()
    places += [headers.parent / "lib", *(place / "nvvm" / "lib64" for place in headers.parents[:3])]
    for lib in places:
        for library in sorted(lib.glob(f"lib{name}.so*")):
            linker = f"-rpath={lib},--as-needed"  # a program may use the headers only
            return [f"-I{lib.parent / 'include'}", f"-L{lib}", "-Xlinker", linker, f"-l:{library.name}"]
    raise FileNotFoundError(f"needs {name} (PyPI: {PACKAGES.get(name, name)})")


def _link(program: Program, directory: Path, place: Path) -> None:
    """Make links to the files that a program opens."""
    wanted = shlex.split(program.files)
    for name in _matches(directory, shlex.join(name for name in wanted if not name.startswith("$CUDA/"))):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).symlink_to(directory / name)
    for name in wanted:
        if name.startswith("$CUDA/"):
            (place / Path(name).name).symlink_to(_cuda_headers() / name.removeprefix("$CUDA/"))


def _cuda_headers() -> Path:
    """Return the directory of CUDA's headers: nvcc says where it is."""
    command = ["nvcc", "--dryrun", "-E", "-x", "cu", os.devnull]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    found = re.search(r'INCLUDES="-I([^"]+)"', said)
    return Path(found[1] if found else "/usr/local/cuda/include").resolve()


def _copy(directory: Path, copy: Path, words: Mapping[str, str]) -> str:
    """Copy the files of a directory with other words in place of some. Return the words that no file has."""
    missing = set(words)
    shutil.copytree(directory, copy)
    for path in copy.rglob("*"):
        if path.suffix in SOURCES:
            text = path.read_text(errors="surrogateescape")
            missing -= {old for old in words if old in text}
            for old, new in words.items():
                text = text.replace(old, new)
            path.write_text(text, errors="surrogateescape")
    return ", ".join(sorted(missing))


def _matches(directory: Path, patterns: str) -> list[str]:
    return [
        os.path.relpath(path, directory)
        for pattern in shlex.split(patterns)
        for path in sorted(directory.parent.glob(f"{directory.name}/{pattern}"))
    ]


def _stubs(place: Path) -> Path:
    """Return a directory that has the embedded driver by the name that the linker looks for."""
    link = place / ".libraries" / "libcuda.so"
    link.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        link.symlink_to(LIBRARIES / "libcuda.so.1")
    return link.parent


def _error(text: str, api: Api) -> str:
    """Return the first error of a compiler or linker, without its place."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    signs = ("error", "undefined", "fatal")
    line = next((line for line in lines if any(sign in line.lower() for sign in signs)), None)
    if line is None:
        return f"{api.compiler} failed"
    return line[line.lower().find("error") :][:160] if "error" in line.lower() else line[:160]

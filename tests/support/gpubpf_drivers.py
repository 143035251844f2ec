"""NVIDIA's driver libraries and CUDA runtimes for tests without a GPU, from packages of apt and pip.

Nothing is installed: a package is unpacked into a cache folder (GPUBPF_DRIVER_CACHE, else gpubpf-drivers in the user's cache).
By default, downloads may take 20 s in all. With GPUBPF_DRIVERS=all, a test takes every branch and runtime, and 10 minutes.

Drivers come from the archive that this Debian or Ubuntu uses itself, with lists of its own, so the machine's stay as they are.
GPUBPF_DRIVER_SOURCES names another apt sources file (deb822), as for Ubuntu's drivers on Debian. GPUBPF_LIBCUDA is the path of the
installed driver, which a test takes as well. With GPUBPF_REQUIRE_LIBCUDA=1, a test fails where a library is missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ALL = os.environ.get("GPUBPF_DRIVERS") == "all"
INSTALLED = Path(os.environ.get("GPUBPF_LIBCUDA", "/usr/lib/x86_64-linux-gnu/libcuda.so.1"))
BRANCHES = ("470", "525", "535", "550", "555", "570", "580", "590", "595") if ALL else ("535",)
DRIVERS = (*(("installed",) if INSTALLED.exists() else ()), *BRANCHES, "newest")
RUNTIMES = ("11.8", "12.1", "12.4", "12.9", "13.0", "newest")
CACHE = Path(
    os.environ.get("GPUBPF_DRIVER_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpubpf-drivers"
)
SECONDS = 600 if ALL else 20  # for all downloads of a test run
_PACKAGE = re.compile(r"libcuda1|libnvidia-(tesla-([0-9]+-)?cuda1|compute-[0-9]+)")
_DEBIAN = ("bookworm", "trixie", "experimental")  # 535, 550, 555


class Unavailable(Exception):
    """Why a package cannot be had."""


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    size: int

    @property
    def driver(self) -> str:
        """The version without the packages' own part."""
        return self.version.partition("-")[0]


def _number(driver: str) -> list[int]:
    return [int(n) for n in driver.split(".")]


@functools.cache
def _deadline() -> float:
    return time.monotonic() + SECONDS


def _run(*command: object, cwd: Path | None = None) -> str:
    """Run a package client for the time that is left. Raises Unavailable."""
    name = " ".join(map(str, command[:1]))
    try:
        done = subprocess.run(
            list(map(str, command)), cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=max(_deadline() - time.monotonic(), 0.1),
        )  # fmt: skip
    except FileNotFoundError:
        raise Unavailable(f"there is no {name}") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{name} did not end within {SECONDS} s") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith(("E:", "ERROR:"))]
        raise Unavailable(f"{name}: {(said or [f'status {done.returncode}'])[-1]}")
    return done.stdout


@contextlib.contextmanager
def _made(place: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `place` when it is whole; test runs do this one after the other."""
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".new-") as made:
        inner = Path(made, "whole")
        inner.mkdir()
        yield inner
        inner.rename(place)


@contextlib.contextmanager
def _cache(kind: str) -> Iterator[Path]:
    place = CACHE / kind
    place.mkdir(parents=True, exist_ok=True)
    with open(place / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield place


def _sources() -> str:
    """Return an apt sources file with the part of this system's archive that has drivers."""
    if given := os.environ.get("GPUBPF_DRIVER_SOURCES"):
        return Path(given).read_text()
    try:
        system = platform.freedesktop_os_release()
    except OSError:
        raise Unavailable("this is neither Debian nor Ubuntu") from None
    codename = system.get("VERSION_CODENAME", "")
    form = "$(RELEASE) $(COMPONENT) $(REPO_URI)"
    lines = _run("apt-get", "indextargets", "--format", form, "Created-By: Packages").splitlines()
    uri = next((line.split()[2] for line in lines if line.startswith(f"{codename} main ")), None)
    suites, component = {
        "debian": (_DEBIAN, "non-free"),
        "ubuntu": ((codename, f"{codename}-updates"), "restricted"),
    }.get(system["ID"], ((), ""))
    if uri is None or not suites:
        raise Unavailable("apt has no archive of Debian or Ubuntu")
    keys = f"/usr/share/keyrings/{system['ID']}-archive-keyring.gpg"
    return (
        f"Types: deb\nURIs: {uri}\nSuites: {' '.join(suites)}\nComponents: {component}\nSigned-By: {keys}\n"
    )


@dataclass(frozen=True)
class Apt:
    """apt with sources and lists of its own."""

    place: Path
    architecture: str

    def __call__(self, program: str, *arguments: object, cwd: Path | None = None) -> str:
        settings = {
            "Dir::Etc::SourceList": self.place / "drivers.sources",
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State::Lists": self.place / "lists",
            "Dir::Cache": self.place / "cache",
            "Acquire::Languages": "none",
            "Acquire::Retries": 0,
            "Acquire::http::Timeout": 5,
            "Acquire::https::Timeout": 5,
            "APT::Architecture": self.architecture,
            "APT::Architectures": self.architecture,
            "APT::Sandbox::User": "",  # the user _apt may not see this folder
        }
        options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        return _run(program, *options, *arguments, cwd=cwd)


@functools.cache
def _index(architecture: str) -> tuple[Apt, tuple[Package, ...]]:
    """Return apt and the drivers that it knows, oldest first. Raises Unavailable; `_known` also remembers that."""
    with _cache(f"apt-{architecture}") as place:
        apt = Apt(place, architecture)
        for folder in ("lists/partial", "cache/archives/partial"):
            (place / folder).mkdir(parents=True, exist_ok=True)
        (place / "drivers.sources").write_text(_sources())
        apt("apt-get", "-q", "update", "--error-on=any")
        names = [name for name in apt("apt-cache", "pkgnames", "lib").split() if _PACKAGE.fullmatch(name)]
        found = set()
        for part in apt("apt-cache", "show", *names).split("\n\n") if names else []:
            fields = dict(re.findall(r"^(Package|Version|Size): (.*)$", part, re.M))
            if int(fields.get("Size", 0)) > 1 << 20:  # not one that only names another
                found.add(Package(fields["Package"], fields["Version"], int(fields["Size"])))
        return apt, tuple(sorted(found, key=lambda p: (_number(p.driver), -p.size)))


@functools.cache
def _known(architecture: str) -> tuple[Apt, tuple[Package, ...]] | Unavailable:
    try:
        return _index(architecture)
    except Unavailable as why:
        return why


def _unpack(apt: Apt, package: Package, place: Path) -> None:
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".new-") as made:
        apt("apt-get", "-q", "download", f"{package.name}={package.version}", cwd=Path(made))
        [file] = Path(made).glob("*.deb")
        _run("dpkg-deb", "-x", file, Path(made, "files"))
        libraries = [f for f in Path(made).rglob("libcuda.so.*") if f.is_file() and not f.is_symlink()]
        if not libraries:
            raise Unavailable(f"{package.name} {package.version} has no libcuda.so")
        with _made(place) as whole:
            shutil.copy(libraries[0], whole / "libcuda.so.1")


@functools.cache
def _driver(wanted: str, architecture: str) -> Path | Unavailable:
    if wanted == "installed":
        return INSTALLED
    newest = wanted == "newest"
    with _cache("drivers" if architecture == "amd64" else f"drivers-{architecture}") as place:
        cached = sorted(place.glob("[1-9]*"), key=lambda p: _number(p.name))
        if not newest:
            cached = [p for p in cached if p.name.startswith(f"{wanted}.")]
        told = (
            place / "newest"
        )  # exists: the archive was asked before, and is asked again only with GPUBPF_DRIVERS=all
        if cached and (not newest or (told.exists() and not ALL)):
            return cached[-1] / "libcuda.so.1"
        if isinstance(known := _known(architecture), Unavailable):
            return cached[-1] / "libcuda.so.1" if cached else known
        apt, packages = known
        packages = tuple(p for p in packages if newest or p.driver.startswith(f"{wanted}."))
        if not packages:
            return Unavailable(f"apt has no package of driver {wanted}")
        into = place / packages[-1].driver
        try:
            if not into.exists():
                _unpack(apt, packages[-1], into)
        except Unavailable as why:
            return cached[-1] / "libcuda.so.1" if cached else why
        if newest:
            told.touch()
        return into / "libcuda.so.1"


@functools.cache
def _runtime(wanted: str) -> Path | Unavailable:
    with _cache("runtimes") as place:
        into = place / wanted
        if not into.exists():
            suffix = {"11": "-cu11", "12": "-cu12"}.get(wanted[:2], "")
            package = f"nvidia-cuda-runtime{suffix}" + (">=13" if wanted == "newest" else f"=={wanted}.*")
            pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--no-input"]
            pip += ["--timeout", "5", "--retries", "0", "--no-cache-dir"]
            try:
                with tempfile.TemporaryDirectory(dir=place, prefix=".new-") as made:
                    _run(*pip, "download", "--no-deps", "--only-binary", ":all:", "-d", made, package)
                    [wheel] = Path(made).glob("*.whl")
                    with zipfile.ZipFile(wheel) as files, _made(into) as whole:
                        [name] = [n for n in files.namelist() if re.search(r"/libcudart\.so\.[0-9.]+$", n)]
                        (whole / name.rpartition("/")[2]).write_bytes(files.read(name))
            except Unavailable as why:
                return why
        return next(into.glob("libcudart.so.*"))


def _found_or_skip(what: str, found: Path | Unavailable) -> Path:
    """Return what was found. Else skip the test, or with GPUBPF_REQUIRE_LIBCUDA=1 fail it."""
    if isinstance(found, Path):
        return found
    reason = f"no {what} here: {found}"
    if os.environ.get("GPUBPF_REQUIRE_LIBCUDA") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def driver(wanted: str, architecture: str = "amd64") -> Path:
    """Return a driver library: of a branch ("535"), "newest", or "installed". Skip or fail where there is none."""
    return _found_or_skip(f"NVIDIA driver {wanted}", _driver(wanted, architecture))


def runtime(wanted: str) -> Path:
    """Return NVIDIA's CUDA runtime of a version ("11.8"), or "newest". Skip or fail where there is none."""
    return _found_or_skip(f"CUDA runtime {wanted}", _runtime(wanted))

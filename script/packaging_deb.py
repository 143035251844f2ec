"""Make a Debian package of a wheel: what `script/package deb` does.

What the wheel installs goes to /usr/lib/gpubpf, and the commands to /usr/bin. The Python packages that it needs are the distribution's
where Debian 12, Debian 13 and Ubuntu 24.04 all have them, new enough. The others are in the private directory, too. packaging/debian
holds the texts. Needs dpkg-deb, binutils, and PyPI.
"""

from __future__ import annotations

import configparser
import gzip
import os
import shutil
import subprocess
import tempfile
import time
import tomllib
from hashlib import md5
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ROOT / "packaging/debian"
PRIVATE = "usr/lib/gpubpf"
# The distribution's names of what pyproject.toml needs, and what their versions begin with.
DISTRIBUTIONS = {
    "argcomplete": ("python3-argcomplete", ""),
    "lz4": ("python3-lz4", ""),
    "msgpack": ("python3-msgpack", ""),
    "numpy": ("python3-numpy", "1:"),
    "pyelftools": ("python3-pyelftools", ""),
    "zstandard": ("python3-zstandard", ""),
}
# Debian 12 has llvmlite 0.39 and tabulate 0.8.9, Ubuntu 24.04 llvmlite 0.42. No distribution has cxxfilt. None of the three is linked
# with Python, so one copy serves all versions.
PRIVATE_PACKAGES = ("cxxfilt", "llvmlite", "tabulate")
# -I: root's commands run no code of PYTHONPATH or of a home directory.
COMMAND = """#!/usr/bin/python3 -I
# PYTHON_ARGCOMPLETE_OK
import sys

sys.path.insert(0, "/{private}")
from {module} import {function}

sys.exit({function}())
"""
CHANGES = """gpubpf ({version}) stable; urgency=medium

  * The changes are in CHANGELOG.md.gz, in this directory.

 -- {maintainer}  {date}
"""


def requirements() -> dict[str, str]:
    """Return the Python packages that gpubpf needs, with their oldest versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return dict(line.split(">=") for line in project["dependencies"])


ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}  # of wheels → of packages


def machine_of(wheel: Path) -> str:
    """Return the machine that a wheel is for."""
    return next(machine for machine in ARCHITECTURES if wheel.stem.endswith(machine))


def dependencies() -> str:
    """Return the distribution's packages that gpubpf needs, as Depends lists them."""
    needed = {name: version for name, version in requirements().items() if name not in PRIVATE_PACKAGES}
    return ", ".join(
        f"{DISTRIBUTIONS[name][0]} (>= {DISTRIBUTIONS[name][1]}{version})" for name, version in needed.items()
    )


def add_files(tree: Path, wheel: Path, pip: Path) -> None:
    """Install the wheel and the private packages into `tree`, without what only pip and tests need."""
    private = tree / PRIVATE
    wanted = [f"{name}>={requirements()[name]}" for name in PRIVATE_PACKAGES]
    # Of Python 3.11 and of glibc 2.28, whatever is here.
    platform = [
        f"--platform=manylinux{tag}_{machine_of(wheel)}" for tag in ("_2_28", "_2_27", "2014", "_2_17")
    ]
    base: list[str | Path] = [pip, "install", "-q", "--no-deps", "--no-compile", "--only-binary=:all:"]
    for words in (["--python-version=3.11", *platform, *wanted], [str(wheel)]):
        subprocess.run([*base, f"--target={private}", "--upgrade", *words], check=True)
    os.rename(private / "share", tree / "usr/share")
    shutil.rmtree(private / "bin", ignore_errors=True)
    shutil.rmtree(private / "llvmlite/tests")
    for path in [*private.glob("*.dist-info/*")]:
        if path.name in ("RECORD", "INSTALLER", "REQUESTED", "WHEEL", "top_level.txt", "direct_url.json"):
            path.unlink()
    subprocess.run(["strip", "--strip-unneeded", private / "llvmlite/binding/libllvmlite.so"], check=True)


def add_commands(tree: Path) -> None:
    """Write the commands that the wheel's entry points name into /usr/bin."""
    directory = tree / "usr/bin"
    directory.mkdir()
    (points,) = tree.glob(f"{PRIVATE}/gpubpf-*.dist-info/entry_points.txt")
    parser = configparser.ConfigParser(delimiters="=")
    parser.read(points)
    for name, place in parser["console_scripts"].items():
        module, function = place.split(":")
        command = directory / name
        command.write_text(COMMAND.format(private=PRIVATE, module=module, function=function))
        command.chmod(0o755)
    shutil.rmtree(points.parent)


def compressed(source: Path | str, target: Path) -> None:
    """Write a text as `target`, with the name .gz added."""
    data = source.encode() if isinstance(source, str) else source.read_bytes()
    target.with_name(f"{target.name}.gz").write_bytes(gzip.compress(data, 9, mtime=0))


def add_texts(tree: Path, version: str, maintainer: str, when: int) -> None:
    """Compress the man pages, and write what Debian wants in each package."""
    for page in [*tree.glob("usr/share/man/man8/*.8")]:
        compressed(page, page)
        page.unlink()
    documents = tree / "usr/share/doc/gpubpf"
    documents.mkdir(parents=True)
    shutil.copy(TEXTS / "copyright", documents)
    compressed(ROOT / "CHANGELOG.md", documents / "CHANGELOG.md")
    date = time.strftime("%a, %d %b %Y %H:%M:%S +0000", time.gmtime(when))
    compressed(CHANGES.format(version=version, maintainer=maintainer, date=date), documents / "changelog")
    hook = tree / "usr/share/python3/runtime.d/gpubpf.rtupdate"
    hook.parent.mkdir(parents=True)
    shutil.copy(TEXTS / "rtupdate", hook)


def set_modes(tree: Path) -> None:
    """Only commands and scripts may be executed. Everybody may read."""
    scripts = ("usr/bin/", "usr/share/python3/runtime.d/", "DEBIAN/p")
    for path in tree.rglob("*"):
        executable = path.is_dir() or str(path.relative_to(tree)).startswith(scripts)
        path.chmod(0o755 if executable else 0o644)
    tree.chmod(0o755)


def commit(form: str) -> str:
    """Return what git log says of the newest commit; "" if this is not a checkout."""
    done = subprocess.run(
        ["git", "-C", ROOT, "log", "-1", f"--format={form}"], capture_output=True, text=True
    )
    return done.stdout.strip()


def build_deb(wheel: Path, directory: Path, pip: Path, glibc: str, compression: str = "xz") -> Path:
    """Make a package of a wheel; return its path.

    pip: the command. glibc: the oldest version that the wheel's libraries need. compression: as dpkg-deb knows it.
    """
    version, architecture = wheel.name.split("-")[1], ARCHITECTURES[machine_of(wheel)]
    # The same commit gives the same package: dpkg-deb sets no file's time later than this.
    when = int(os.environ.get("SOURCE_DATE_EPOCH") or commit("%ct") or time.time())
    maintainer = commit("%an <%ae>") or "gpubpf <gpubpf@localhost>"
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        control = tree / "DEBIAN"
        control.mkdir(parents=True)
        add_files(tree, wheel, pip)
        add_commands(tree)
        add_texts(tree, version, maintainer, when)
        files = sorted(path for path in tree.rglob("*") if path.is_file())
        size = sum(-(-path.stat().st_size // 1024) for path in files)
        text = (TEXTS / "control").read_text()
        (control / "control").write_text(
            text.format(
                version=version,
                architecture=architecture,
                size=size,
                glibc=glibc,
                python=dependencies(),
                maintainer=maintainer,
            )
        )
        for name in ("postinst", "prerm"):
            shutil.copy(TEXTS / name, control)
        sums = [f"{md5(path.read_bytes()).hexdigest()}  {path.relative_to(tree)}\n" for path in files]
        (control / "md5sums").write_text("".join(sums))
        set_modes(tree)
        made = directory / f"gpubpf_{version}_{architecture}.deb"
        command: list[str | Path] = [
            "dpkg-deb",
            "--root-owner-group",
            f"-Z{compression}",
            "--build",
            tree,
            made,
        ]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "SOURCE_DATE_EPOCH": str(when)}
        )
    return made

"""What ``--list`` says of the kernels in Python wheels: `script/conformance wheels --help`.

A wheel is downloaded by pip, or is a file. Each of its libraries is unpacked for as long as it is looked at.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpubpf.errors import Error
from gpubpf.images import listing
from gpubpf.images.assemble import Target
from gpubpf.ptx.module import Module
from gpubpf.show import progress

DEVICES = ((9, 0), (12, 0))
# The largest are hundreds of megabytes. They are downloaded one at a time, and removed.
WHEELS = (
    "nvidia-cublas",
    "nvidia-cufft",
    "nvidia-curand",
    "nvidia-cusolver",
    "nvidia-cusparse",
    "nvidia-cudnn-cu13",
    "cupy-cuda13x",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "torch",
    "xformers",
)
_LEAST = 20_000  # bytes: smaller files have no device code
_ENDINGS = (".so", ".cubin", ".fatbin", ".ptx", ".hsaco")


@dataclass
class Library:
    """What ``--list`` says of a library's kernels. reasons: kernels by reason, for each device; "": can be instrumented."""

    wheel: str
    library: str
    kernels: int
    reasons: dict[str, dict[str, int]]


def look(
    wheel: Path, devices: Sequence[tuple[int, int]] = DEVICES, check: listing.Check = listing.check_injection
) -> Iterator[Library]:
    """Yield what is known of each library with device code. devices: compute capabilities."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as directory:
        for member in archive.infolist():
            path = Path(member.filename)
            if member.file_size < _LEAST or not (path.suffix in _ENDINGS or ".so." in path.name):
                continue
            unpacked = Path(archive.extract(member, directory))
            with contextlib.suppress(Error):  # no device code
                sources = listing.sources_of_files([str(unpacked)])
                reasons: dict[str, dict[str, int]] = {}
                kernels = 0
                for cc in devices:
                    found = listing.listed(sources, Target("gpu", cc), check)
                    kernels = len(found)
                    reasons[f"{cc[0]}.{cc[1]}"] = dict(Counter(kernel.reason or "" for kernel in found))
                if kernels:
                    yield Library(wheel.name, path.name, kernels, reasons)
            unpacked.unlink()


def table(libraries: Sequence[Library]) -> str:
    """Return the table for the documentation: one line per library, with the most frequent reason for each device."""
    devices = list(libraries[0].reasons) if libraries else []
    lines = ["| wheel | library | kernels | " + " | ".join(f"{d}: yes | no, mostly" for d in devices) + " |"]
    lines.append("|---|---|--:|" + "--:|---|" * len(devices))
    for found in libraries:
        library = found.library.partition(".cpython-")[0]
        cells = [" ".join(found.wheel.split("-")[:2]), f"`{library}`", f"{found.kernels:,}"]
        for device in devices:
            reasons = Counter(found.reasons[device])
            cells.append(f"{reasons.pop('', 0):,}")
            cells.append(
                ", ".join(f"{reason} ({count:,})" for reason, count in reasons.most_common(1)) or "-"
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _no_check(parsed: Module, kernels: Sequence[str]) -> Mapping[str, str]:
    return {}


@contextlib.contextmanager
def _had(name: str) -> Iterator[list[Path]]:
    """Give the wheel of this name, from a file or from the package index, while the context lasts."""
    if Path(name).is_file():
        yield [Path(name)]
        return
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--only-binary=:all:"]
        done = subprocess.run([*command, "-d", directory, name], capture_output=True, text=True)
        if done.returncode:
            print(f"conformance: skipped {name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        yield sorted(Path(directory).glob("*.whl"))


def main(argv: Sequence[str]) -> int:
    """Print the table. Return 1 if no library had device code."""
    parser = argparse.ArgumentParser(
        prog="conformance wheels",
        description="Show what --list says of the kernels in Python wheels.",
        epilog="example:\n  script/conformance wheels nvidia-cufft ./my-0.1-py3-none-any.whl",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names",
        nargs="*",
        default=WHEELS,
        metavar="WHEEL",
        help=f"a package for pip download, or a wheel's file (default: {', '.join(WHEELS)})",
    )
    parser.add_argument(
        "--ptx-only",
        action="store_true",
        help="count a kernel that has PTX as yes, without trying to instrument it: minutes less for a large library",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write one record per library to FILE")
    args = parser.parse_args(argv)
    check = _no_check if args.ptx_only else listing.check_injection
    progress.enable("conformance")
    libraries = []
    with args.json.open("w") if args.json else contextlib.nullcontext() as file:
        for name in args.names:
            with _had(name) as wheels:
                try:
                    for library in (library for wheel in wheels for library in look(wheel, check=check)):
                        libraries.append(library)
                        if file:
                            print(json.dumps(asdict(library)), file=file, flush=True)
                except zipfile.BadZipFile as error:
                    print(f"conformance: skipped {name}: {error}", file=sys.stderr)
    if libraries:
        print(table(libraries))
    return int(not libraries)

"""Whether ptxas assembles what the tools make of programs: each kernel to which --list says yes, with the probes of each way."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from conformance.outcome import DIFFERENT, REFUSED, SAME, Outcome
from gpubpf.errors import Error
from gpubpf.images import fatbin
from gpubpf.ptx import parser

# The options of a tool, by the name of the way. Together they have programs at every kind of point.
WAYS: dict[str, tuple[str, ...]] = {
    "threadhist": ("threadhist",),
    "threadhist loads": ("threadhist", "--work", "loads"),
    "threadhist sampled": ("threadhist", "--work", "blocks", "--sample-blocks", "1/64"),
    "kernelretsnoop": ("kernelretsnoop",),
    "memtrace": ("memtrace",),
    "memtrace sampled": ("memtrace", "--sample-blocks", "1/64"),
    "gpucount": ("gpucount", "instruction:*", "barrier:*", "func:*"),
    "gpudist": ("gpudist", "-C", "exit:*:instructions:u64:work, kernel"),
    "gputrace": ("gputrace", 'load:* "%d", address'),
}
_ENTRY = re.compile(r"^\.visible \.entry ([\w$]+)|^\.entry ([\w$]+)", re.MULTILINE)
_HEAD = re.compile(r"^// .*: from the PTX for (\w+)\n", re.MULTILINE)
_LIMIT = 600  # seconds for one run of ptxas


def run(
    directory: Path, jobs: int, only: Sequence[str] = ("*",), done: Collection[str] = ()
) -> Iterator[Outcome]:
    """Assemble the copies of each executable, PTX file, cubin and fatbin below a directory.

    only: patterns of the files' names, without their directories.
    done: files to leave out, relative to the directory.
    """
    files = [
        path
        for path in sorted(directory.rglob("*"))
        if any(fnmatch(path.name, pattern) for pattern in only)
        and str(path.relative_to(directory)) not in done
        and path.is_file()
        and _has_kernels(path)
    ]
    with ProcessPoolExecutor(jobs) as processes:
        for found in processes.map(partial(outcomes, directory), files):
            yield from found


def figure(found: Sequence[Outcome]) -> str:
    """Return the number of copies that ptxas assembled, in one line."""
    copies = [o for o in found if o.verdict != REFUSED]
    good = sum(o.verdict == SAME for o in copies)
    kernels, files, ways = ({getattr(o, of) for o in copies} for of in ("program", "file", "way"))
    return f"ptxas assembled {good:,} of {len(copies):,} copies: {len(kernels):,} kernels of {len(files):,} files in {len(ways)} ways"


def _has_kernels(path: Path) -> bool:
    if path.suffix == ".ptx":
        return True
    with contextlib.suppress(Error, OSError):
        return bool(fatbin.images_of_file(path))
    return False


def outcomes(directory: Path, path: Path, ways: Sequence[str] = tuple(WAYS)) -> list[Outcome]:
    """Return an outcome for each kernel of a file and each way. `directory`: what the file's name is relative to."""
    found = []
    for way in ways:
        kernels = [json.loads(line) for line in _printed(WAYS[way], "--list", "--json", path).splitlines()]
        yes = {kernel["mangled"] for kernel in kernels if kernel.get("instrumentable")}
        assembled, said = _assembled(_printed(WAYS[way], "--ptx", path)) if yes else (set(), "")
        for kernel in kernels:
            if (name := kernel.get("mangled")) is None:
                continue
            program = f"{path.relative_to(directory)}: {name}"
            if name not in yes:
                found.append(Outcome(program, way, REFUSED, kernel["reason"]))
            elif name in assembled:
                found.append(Outcome(program, way, SAME))
            elif _is_refused(path, name):
                found.append(Outcome(program, way, REFUSED, "ptxas refuses the original, too"))
            else:
                found.append(Outcome(program, way, DIFFERENT, said or "--ptx has no copy"))
    return found


def _is_refused(path: Path, kernel: str) -> bool:
    """Return whether ptxas refuses the program's own PTX that has the kernel."""
    texts = [image.text for image in fatbin.images_of_file(path) if image.kind == "ptx"]
    return any(ptxas(text) for text in texts if kernel in text)


def _printed(way: Sequence[str], *options: object) -> str:
    """Return what a tool prints."""
    name, *words = way
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        importlib.import_module(f"gpubpf.tools.{name}").main(
            [*map(str, options[:-1]), *words, str(options[-1])]
        )
    return out.getvalue()


def _assembled(text: str) -> tuple[set[str], str]:
    """Return the kernels that ptxas assembles, of modules that --ptx printed, and what it says of the others."""
    assembled: set[str] = set()
    said = ""
    for module in _HEAD.split(text)[2::2]:
        if error := ptxas(module):
            said = error
        else:
            assembled |= set(parser.parse(module).entries)
    return assembled, said


def ptxas(text: str) -> str:
    """Return the first error of ptxas; "" for PTX that it assembles. Optimizing takes time, and finds no further errors."""
    target = parser.parse(text)
    # ptxas of CUDA 13 has no older architectures.
    arch = target.sm if target.architecture > 75 else "sm_75"
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "copy.ptx"
        source.write_text(text)
        done = subprocess.run(
            [shutil.which("ptxas") or "ptxas", "-O0", f"-arch={arch}", source, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT,
        )
    if done.returncode == 0:
        return ""
    return next(
        (line for line in done.stderr.splitlines() if "error" in line or "fatal" in line), done.stderr
    )

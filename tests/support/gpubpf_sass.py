"""What ptxas makes of PTX, for tests: cubins, registers, and instructions as nvdisasm lists them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def need(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed")
    return found


def nvdisasm() -> str:
    for root in map(Path, sys.path):
        for found in root.glob("nvidia/**/bin/nvdisasm"):
            found.chmod(0o755)
            return str(found)
    return need("nvdisasm")


def assembled(text: str, arch: str, folder: Path, *options: str) -> tuple[Path, str]:
    """The cubin, and what ptxas says about registers."""
    ptx, cubin = folder / "in.ptx", folder / "out.cubin"
    ptx.write_text(text)
    done = subprocess.run(
        [need("ptxas"), "-v", f"-arch={arch}", *options, str(ptx), "-o", str(cubin)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[:2000]
    return cubin, done.stderr


def registers(report: str) -> dict[str, int]:
    """Registers per entry, from `ptxas -v`."""
    return {
        name: int(count)
        for name, count in re.findall(r"entry function '([\w$]+)'.*?Used (\d+) registers", report, re.DOTALL)
    }


def sass(cubin: Path) -> dict[str, list[str]]:
    """The instructions of each kernel, and its labels (`.L_x_0:`)."""
    text = subprocess.run([nvdisasm(), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        section = re.match(r"\s*\.section\s+\.text\.([\w$]+)", line)
        if section:
            current = found.setdefault(section.group(1), [])
        elif re.match(r"\.L_\w+:", line):
            current.append(line.strip())
        elif re.match(r"\s*/\*[0-9a-f]{4,}\*/", line):
            code = re.sub(r"/\*.*?\*/", "", line).strip()
            if code and not code.startswith("NOP"):
                current.append(code)
    return found

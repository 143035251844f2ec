"""The file systems that a process has mounted, and which of them a program serves (FUSE)."""

from __future__ import annotations

from gpubpf.errors import out_of_files
from gpubpf.process import proc

SERVED = ("fuse", "devtmpfs")  # file systems whose pages come from a program or a driver


def types(pid: int) -> dict[str, str]:
    """Return the types of the file systems that a process has mounted, by device."""
    found: dict[str, str] = {}
    try:
        lines = proc.read(pid, "mountinfo").decode("utf-8", "replace").split("\n")
    except OSError as error:
        if out_of_files(error):
            raise
        return found
    for line in lines:
        before, _, after = line.partition(" - ")
        if ":" in (number := "".join(before.split(" ")[2:3])):
            major, _, minor = number.partition(":")
            found[f"{int(major):02x}:{int(minor):02x}"] = after.partition(" ")[0]
    return found


def served(pid: int) -> list[str]:
    """Return the devices of file systems that a process sees mounted and that a program serves. Raises OSError."""
    return [device for device, kind in types(pid).items() if kind.startswith(SERVED)]

"""The container in which a process runs, by the paths of its cgroups.

    found = containers.of(pid)
    found.id, found.pod

Container runtimes put the container's ID into the path, and the kubelet that of the pod. How they write them depends on the version of
cgroups, on the driver (systemd or cgroupfs) and on the runtime. The ends of the paths are what they have in common.
"""

from __future__ import annotations

import re

from gpubpf.process import proc
from gpubpf.record import Record

_ID = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?=/|$)")
# With systemd, "_" replaces "-". The kubelet gives pods from files on the machine an ID of 32 digits.
_POD = re.compile(r"[/-]pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=\.slice|/|$)")
_MONITOR = re.compile(r"/crio-conmon-[^/]*")  # CRI-O's own process for a container


class Container(Record):
    """A container. id: 64 hexadecimal digits; "": none. pod: the ID of its Kubernetes pod; "": none."""

    id: str = ""
    pod: str = ""


def of(pid: int) -> Container:
    """Return the container of a process. Raises OSError."""
    return in_paths(proc.text(pid, "cgroup"))


def in_paths(text: str) -> Container:
    """Return the container that a process's file `cgroup` names. The innermost one counts, where a container runs in another one.

    The lines are NUMBER:CONTROLLERS:PATH (cgroups(7)). In version 1, some controllers may have other paths: the longest counts.
    """
    paths = [_MONITOR.sub("", line.split(":", 2)[2]) for line in text.splitlines() if line.count(":") >= 2]
    for path in sorted(paths, key=len, reverse=True):
        pods = [found.group(1).replace("_", "-") for found in _POD.finditer(path)]
        rest = path
        if pods:  # IDs before the pod are those of a machine that is a container itself
            rest = path[[*_POD.finditer(path)][-1].end() :]
        ids = _ID.findall(rest)
        if ids or pods:
            return Container(ids[-1] if ids else "", pods[-1] if pods else "")
    return Container()

"""The names of pods and containers, from the directories of the kubelet's logs.

The kubelet names the log of each container POD_NAMESPACE_CONTAINER-ID.log in /var/log/containers, and the directory of each pod's logs
NAMESPACE_POD_ID in /var/log/pods. The names of namespaces, pods and containers have no underscore. So the names are there without
asking the API server, which would need rights in the cluster.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gpubpf.process import containers
from gpubpf.process.containers import Container
from gpubpf.record import Record

LOGS = Path("/var/log")
AGAIN = 5.0  # seconds until the directories are read again for an unknown container
MOST = 10_000  # names in a directory
SHORT = 12  # digits of a container's ID that docker shows


class Place(Record):
    """Where a process runs. What is not known is "".

    namespace: the Kubernetes namespace.
    pod: the name of the pod; its ID, if its name is not known.
    container: the name of the container; the beginning of its ID, if its name is not known.
    """

    namespace: str = ""
    pod: str = ""
    container: str = ""


class Pods:
    """Finds the places of processes.

    logs: the directory that has the kubelet's directories.
    clock: return the time in seconds.
    """

    def __init__(self, logs: Path = LOGS, clock: Callable[[], float] = time.monotonic) -> None:
        self._logs, self._clock = logs, clock
        self._containers: dict[str, Place] = {}  # by ID
        self._pods: dict[str, Place] = {}  # by ID; without the container
        self._read_at = float("-inf")

    def place(self, pid: int) -> Place:
        """Return where a process runs; an empty place outside of containers, or if the process has ended."""
        try:
            return self.of(containers.of(pid))
        except OSError:
            return Place()

    def of(self, container: Container) -> Place:
        """Return the place of a container."""
        if (container.id or container.pod) and container.id not in self._containers:
            self._read()
        if (known := self._containers.get(container.id)) is not None:
            return known
        pod = self._pods.get(container.pod, Place("", container.pod))
        return Place(pod.namespace, pod.pod, container.id[:SHORT])

    def _read(self) -> None:
        """Read the directories, unless that was done a moment ago."""
        if self._clock() < self._read_at + AGAIN:
            return
        self._read_at = self._clock()
        self._containers, self._pods = {}, {}
        for name in _names(self._logs / "containers"):
            pod, _, rest = name.removesuffix(".log").partition("_")
            namespace, _, rest = rest.partition("_")
            container, _, number = rest.rpartition("-")
            if container:
                self._containers[number] = Place(namespace, pod, container)
        for name in _names(self._logs / "pods"):
            namespace, _, rest = name.partition("_")
            pod, _, number = rest.rpartition("_")
            if pod:
                self._pods[number] = Place(namespace, pod)


def _names(directory: Path) -> list[str]:
    """Return the names in a directory, at most MOST; none if it cannot be read."""
    names: list[str] = []
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) >= MOST:
                break
    return names

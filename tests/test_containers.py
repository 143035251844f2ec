"""A tool in a container that the Container Device Interface (CDI) gives a GPU: docs/containers.md.

podman reads the description of a GPU that nvidia-ctk writes, mounts what it names, and runs its hooks. Here, the driver's library is
the embedded device's, and a script does the work of NVIDIA's program for hooks.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_examples

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
DRIVER = "580.65.06"
# What `nvidia-cdi-hook create-symlinks` and `update-ldcache` do. The runtime writes the container's state to its input.
HOOK = """#!/bin/sh
bundle=$(sed 's/.*"bundle":"\\([^"]*\\)".*/\\1/')
root=$(sed -n 's/.*"root":{"path":"\\([^"]*\\)".*/\\1/p' "$bundle/config.json")
case $1 in
create-symlinks)
    shift
    while [ $# != 0 ]; do
        ln -sf "${2%%::*}" "$root${2#*::}"
        shift 2
    done
    ;;
update-ldcache) ldconfig -r "$root" ;;
esac
"""
# Everything is in memory, and in a mount namespace that ends with the command. The container's root directory is this machine's, with
# changes that nobody else sees. podman looks for descriptions in /run/cdi. Arguments: a directory, and the command.
RUN = """set -e
place=$1; shift
mount -t tmpfs gpubpf-cdi /run
mkdir -p /run/cdi /run/lock
cp "$place/nvidia.json" /run/cdi/
mount -t tmpfs -o mode=755 gpubpf-cdi /mnt
mkdir /mnt/upper /mnt/work /mnt/root /mnt/storage /mnt/state
mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work gpubpf-cdi /mnt/root
export CONTAINERS_CONF=$place/containers.conf
exec podman --root /mnt/storage --runroot /mnt/state --storage-driver vfs --cgroup-manager cgroupfs --runtime runc run --rm \\
    --cgroups=no-conmon --network=none --device nvidia.com/gpu=all --rootfs /mnt/root "$@"
"""


def edits(hook: Path) -> dict[str, object]:
    """Return what `nvidia-ctk cdi generate` describes (nvidia-container-toolkit 1.17), without the devices that are not here."""

    def mount(name: str, source: Path) -> dict[str, object]:
        options = ["ro", "nosuid", "nodev", "bind"]
        return {"hostPath": str(source), "containerPath": f"{LIBRARIES}/{name}", "options": options}

    def run(*arguments: str) -> dict[str, object]:
        return {"hookName": "createContainer", "path": str(hook), "args": ["nvidia-cdi-hook", *arguments]}

    return {
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        "mounts": [mount(f"libcuda.so.{DRIVER}", gpubpf_examples.DEVICE / "libcuda.so.1")],
        "hooks": [
            run("create-symlinks", "--link", f"libcuda.so.1::{LIBRARIES}/libcuda.so"),
            run("update-ldcache", "--folder", LIBRARIES),
        ],
    }


@pytest.mark.every(2)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts an overlay of this machine")
@pytest.mark.skipif(
    shutil.which("podman") is None or shutil.which("runc") is None, reason="needs podman and runc"
)
def test_a_tool_in_a_container_finds_the_driver_that_cdi_mounts(tmp_path: Path) -> None:
    examples = gpubpf_examples.build("vectoradd", "training")
    program = examples / "vectoradd"
    # The program's own runtime. NVIDIA's does not run on the embedded device.
    shutil.copy2(gpubpf_examples.DEVICE / "libcudart.so.13", tmp_path)
    hook = tmp_path / "hook"
    hook.write_text(HOOK)
    hook.chmod(0o755)
    described = {
        "cdiVersion": "0.3.0",
        "kind": "nvidia.com/gpu",
        "devices": [{"name": "all", "containerEdits": {"env": ["GPUBPF_TEST=1"]}}],
        "containerEdits": edits(hook),
    }
    (tmp_path / "nvidia.json").write_text(json.dumps(described))
    (tmp_path / "containers.conf").write_text("[containers]\ndefault_ulimits = []\n")
    script = f"""
        cd {tmp_path}
        echo "visible: $NVIDIA_VISIBLE_DEVICES"
        ldconfig -p | grep 'libcuda.so.1 '
        {sys.executable} {ROOT}/tools/gpubpf check --json | grep '"nvidia-gpu"'
        {sys.executable} {ROOT}/tools/threadhist.py -- {program} 19 5 1 23
        {sys.executable} {ROOT}/tools/gpumem.py -- {examples}/training
        export CUDASIM_PYTHON={sys.executable} CUDASIM_PYTHONPATH={ROOT}/lib
        LD_LIBRARY_PATH={tmp_path} {program} 19 5 1 23 && echo "without a tool, too"
        readlink -f /usr/lib/x86_64-linux-gnu/libcuda.so
    """
    command = ["unshare", "--mount", "--propagation", "private", "bash", "-c", RUN, "run", tmp_path]
    variables = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    done = subprocess.run(
        [*command, "sh", "-c", script], capture_output=True, text=True, env=variables, timeout=240
    )
    if "cgroup" in done.stderr and not done.stdout:
        pytest.skip(f"podman starts no container here: {done.stderr.strip()}")
    assert "visible: void" in done.stdout, done.stderr
    assert "=> /lib/x86_64-linux-gnu/libcuda.so.1" in done.stdout
    assert "libcuda.so.1 is the embedded device" in done.stdout
    assert "23 launches, 5 threads" in done.stdout, done.stderr
    # Functions of the host are named although the tool has no CAP_SYS_PTRACE.
    assert re.search(r"held in 2 allocations from 1 host stack\n(.*\n)+1.00 KB .* main\n", done.stdout), (
        done.stdout
    )
    assert "without a tool, too" in done.stdout, done.stderr
    assert f"{LIBRARIES}/libcuda.so.{DRIVER}" in done.stdout
    assert not Path(f"{LIBRARIES}/libcuda.so.{DRIVER}").exists()  # nothing stays

"""Run checks in fresh distributions: what `script/package check --release NAME` does.

A distribution is installed once by debootstrap, into build/package/roots. A check runs in an overlay of it, in memory, so that nothing
that it installs stays. All mounts are in a mount namespace of the check's own, and end with it. Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from packaging_checks import ROOT, CheckError, say

ROOTS = ROOT / "build/package/roots"
DEBIAN = "http://deb.debian.org/debian"
UBUNTU = "http://archive.ubuntu.com/ubuntu"
UBUNTU_KEYS = "/usr/share/keyrings/ubuntu-archive-keyring.gpg"
# The releases, and where they come from. Python is 3.11, 3.13, 3.14 and 3.12.
RELEASES = {"bookworm": DEBIAN, "trixie": DEBIAN, "forky": DEBIAN, "noble": UBUNTU}
DEBOOTSTRAP = "/usr/share/debootstrap/scripts"
INCLUDED = "ca-certificates,python3,python3-venv"
SCRIPTS = ("script/packaging_checks.py", "script/packaging_deb_checks.py", "pyproject.toml")
# Arguments: the root below, the directory to show as /check, the command.
ENTER = """set -e
below=$1 check=$2; shift 2
mount -t tmpfs -o mode=755 gpubpf-check /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay -o "lowerdir=$below,upperdir=/mnt/upper,workdir=/mnt/work" gpubpf-check /mnt/root
mkdir -p /mnt/root/check
mount --bind "$check" /mnt/root/check
mount -t proc proc /mnt/root/proc
for place in dev sys; do mount --rbind /$place /mnt/root/$place; done
mount -t tmpfs -o mode=1777 gpubpf-check /mnt/root/tmp
cp /etc/resolv.conf /mnt/root/etc/resolv.conf
# A proxy of this machine may have a certificate of its own.
certificates=/etc/ssl/certs/ca-certificates.crt
[ ! -e $certificates ] || cp $certificates /mnt/root$certificates
variables=(PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 PIP_CERT=$certificates)
[ -z "${PIP_INDEX_URL-}" ] || variables+=("PIP_INDEX_URL=$PIP_INDEX_URL")
exec chroot /mnt/root env -i "${variables[@]}" "$@"
"""


def install(release: str) -> Path:
    """Return the directory of a release, installed if it is not there yet. Raises CheckError."""
    directory = ROOTS / release
    if directory.exists():
        return directory
    if shutil.which("debootstrap") is None:
        raise CheckError("needs debootstrap; run: apt-get install debootstrap")
    options, script = [], f"{DEBOOTSTRAP}/sid"
    if RELEASES[release] == UBUNTU:
        if not os.path.exists(UBUNTU_KEYS):
            raise CheckError(
                f"{release} needs Ubuntu's keys in {UBUNTU_KEYS}; install the package ubuntu-keyring (Debian 12: that of Debian 13)"
            )
        options, script = [f"--keyring={UBUNTU_KEYS}", "--components=main,universe"], f"{DEBOOTSTRAP}/gutsy"
    say(f"installing {release}")
    ROOTS.mkdir(parents=True, exist_ok=True)
    started = Path(tempfile.mkdtemp(prefix=f"{release}.", dir=ROOTS))
    command = ["debootstrap", "--variant=minbase", f"--include={INCLUDED}", *options]
    with open(ROOTS / f"{release}.log", "w") as log:
        done = subprocess.run([*command, release, started, RELEASES[release], script], stdout=log, stderr=log)
    if done.returncode:
        raise CheckError(f"debootstrap failed; its messages are in {log.name}")
    started.chmod(0o755)
    started.rename(directory)
    return directory


def enter(below: Path, seen: Path, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in an overlay of a root; options are those of subprocess.run. seen: a directory that it sees as /check."""
    unshare = ["unshare", "--mount", "--propagation", "private", "bash", "-c", ENTER, "enter"]
    return subprocess.run([*unshare, below, seen, *command], **options)


def lay_out(directory: Path, file: Path, programs: Path) -> None:
    """Copy what a check needs. file: the wheel or the .deb. programs: a directory of built examples."""
    for name in SCRIPTS:
        (directory / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy2(ROOT / name, directory / name)
    shutil.copy2(file, directory)
    shutil.copytree(programs, directory / "programs")
    directory.chmod(0o755)


def check(release: str, file: Path, programs: Path) -> None:
    """Check a wheel or a .deb in a release. programs: a directory of built examples. Raises CheckError."""
    below = install(release)
    with tempfile.TemporaryDirectory(prefix="gpubpf-check-") as scratch:
        seen = Path(scratch)
        lay_out(seen, file, programs)
        script = "packaging_deb_checks.py" if file.suffix == ".deb" else "packaging_checks.py"
        if enter(
            below, seen, "python3", "-B", f"/check/script/{script}", f"/check/{file.name}", "/check/programs"
        ).returncode:
            raise CheckError(f"{file.name} failed in {release}")

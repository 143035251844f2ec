"""What users install: the wheel and the Debian package."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gpubpf_examples
import packaging_checks
import packaging_deb
import packaging_roots

REPOSITORY = Path(__file__).resolve().parents[1]
BUILT = ("lib/cudasim/lib/libcuda.so.1", "lib/gpubpf/agent/lib/libgpubpf-agent.so")
needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb")
needs_built = pytest.mark.skipif(
    not all((REPOSITORY / name).exists() for name in BUILT), reason="script/setup has not built the C++ parts"
)


def make_wheel(directory: Path) -> Path:
    """Return a wheel of the parts that script/setup built. Its libraries need this machine's glibc."""
    sources = directory / "sources"
    (sources / "script").mkdir(parents=True)
    for name in ("lib", "tools", "man", "completions"):
        left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "sanitize", "*.gch")
        shutil.copytree(REPOSITORY / name, sources / name, symlinks=True, ignore=left_out)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "script/manpages.py"):
        shutil.copy2(REPOSITORY / name, sources / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        directory,
    ]
    subprocess.run(
        [*command, sources], check=True
    )  # copies are as old as their originals: make has nothing to do
    (made,) = directory.glob("*.whl")
    return made


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process itself has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def deb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("deb")
    wheel = make_wheel(directory)
    pip = Path(sys.executable).with_name("pip")
    try:
        return packaging_deb.build_deb(wheel, directory, pip, "2.28", "none")
    except subprocess.CalledProcessError as error:
        if "llvmlite" in str(error.cmd):
            pytest.skip("PyPI cannot be reached")
        raise


def test_every_python_package_comes_from_somewhere() -> None:
    ours = {*packaging_deb.DISTRIBUTIONS, *packaging_deb.PRIVATE_PACKAGES}
    assert ours == {*packaging_deb.requirements()}
    assert "python3-numpy (>= 1:1.24)" in packaging_deb.dependencies()


@pytest.mark.every(2)
@needs_dpkg
@needs_built
def test_what_is_in_a_deb(deb: Path, tmp_path: Path) -> None:
    fields = subprocess.run(["dpkg-deb", "-f", deb], capture_output=True, text=True, check=True).stdout
    assert "Architecture: amd64" in fields and "python3-argcomplete" in fields and "{" not in fields
    subprocess.run(["dpkg-deb", "-R", deb, tmp_path], check=True)
    for name in packaging_checks.COMMANDS:
        assert (tmp_path / f"usr/share/man/man8/{name}.8.gz").is_file()
        assert (tmp_path / f"usr/share/bash-completion/completions/{name}").is_file()
        assert os.access(tmp_path / "usr/bin" / name, os.X_OK)
    assert {path.name for path in (tmp_path / "usr/bin").iterdir()} == {*packaging_checks.COMMANDS}
    listed = dict(
        reversed(line.split("  ", 1)) for line in (tmp_path / "DEBIAN/md5sums").read_text().splitlines()
    )
    files = {str(path.relative_to(tmp_path)) for path in (tmp_path / "usr").rglob("*") if path.is_file()}
    assert {*listed} == files
    private = tmp_path / packaging_deb.PRIVATE
    for name in (
        *packaging_deb.PRIVATE_PACKAGES,
        "gpubpf/agent/lib/libgpubpf-agent.so",
        "cudasim/lib/libcuda.so.1",
    ):
        assert (private / name).exists()
    assert not [name for name in files if re.search(r"\.pyc$|/RECORD$|\.so\.?\d*\.new$|/build/", name)]


@pytest.mark.every(4)  # takes a minute
@needs_dpkg
@needs_built
@pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root: it installs a package, in an overlay of this machine"
)
def test_a_deb_is_installed_used_and_removed(deb: Path, tmp_path: Path) -> None:
    """On this machine, in an overlay in memory; script/package check does it in fresh distributions."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in packaging_checks.EXAMPLES:
        shutil.copy2(gpubpf_examples.build(name) / name, programs)
    scripts = tmp_path / "check"
    packaging_roots.lay_out(scripts, deb, programs)
    check = [
        "python3",
        "-B",
        "/check/script/packaging_deb_checks.py",
        f"/check/{deb.name}",
        "/check/programs",
    ]
    # For the tool, as in a container, this is a process outside.
    device = {**os.environ, "LD_LIBRARY_PATH": str(gpubpf_examples.DEVICE), "CUDASIM_CLOCK": "real"}
    program = [programs / "vectoradd", "19", "5", "1", "1000000000"]
    with subprocess.Popen(program, env=device, stdout=subprocess.DEVNULL) as outside:
        while cpu_seconds(outside.pid) < 1:  # it has begun to launch kernels by then
            assert outside.poll() is None
            time.sleep(0.05)
        outside.send_signal(signal.SIGSTOP)  # it needs a whole CPU
        try:
            done = packaging_roots.enter(
                Path("/"), scripts, *check, str(outside.pid), capture_output=True, text=True
            )
        finally:
            outside.kill()
    if re.search(r"apt-get(.|\n)*(Could not resolve|Unable to fetch|Failed to fetch)", done.stderr):
        pytest.skip("the distribution's packages cannot be reached")
    assert done.returncode == 0, done.stderr
    assert "fine" in done.stderr


def test_a_release_that_cannot_be_installed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaging_roots, "ROOTS", tmp_path / "roots")
    monkeypatch.setattr(packaging_roots, "UBUNTU_KEYS", str(tmp_path / "no.gpg"))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/sbin/{name}")
    with pytest.raises(
        packaging_checks.CheckError,
        match=r"noble needs Ubuntu's keys in .*no\.gpg; install the package ubuntu-keyring",
    ):
        packaging_roots.install("noble")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(packaging_checks.CheckError, match="apt-get install debootstrap"):
        packaging_roots.install("trixie")
    assert not (tmp_path / "roots").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts an overlay")
def test_nothing_stays_of_what_a_check_does(tmp_path: Path) -> None:
    """What it writes, and its mounts, end with it."""
    seen, written = tmp_path / "seen", Path("/etc/gpubpf-written")
    seen.mkdir()
    (seen / "file").write_text("seen")
    script = f"cat /check/file && touch {written} && echo ' written'"
    done = packaging_roots.enter(Path("/"), seen, "sh", "-c", script, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("seen written\n", "")
    assert not written.exists()
    assert "gpubpf-check" not in Path("/proc/self/mounts").read_text()

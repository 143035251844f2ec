"""`gpubpf check`: each line fails in an environment that is made for it."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpubpf_host
from gpubpf.calls import device_times
from gpubpf.check import profilers, software, table
from gpubpf.check.finding import LIMITED, MISSING, OK, STATES, UNKNOWN
from gpubpf.ebpf import clang
from gpubpf.errors import missing_package
from gpubpf.kernel import bpf_syscall, syscalls

ROOT = Path(__file__).resolve().parents[3]
FIRST = {
    "self/ns/pid": "pid:[4026531836]",
    "self/ns/user": "user:[4026531837]",
    "self/status": "Seccomp:\t0\n",
}
ONE = """
import json, sys
from pathlib import Path
from gpubpf.check import probing, table
from gpubpf.check.machine import Machine
name, places, timeout = sys.argv[1:]
machine = Machine(timeout=float(timeout), **{place: Path(path) for place, path in json.loads(places).items()})
for check, finding in probing.run([one for one in table.CHECKS if one.name == name], machine):
    print(json.dumps(finding.record(check.name)))
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
Record = dict[str, Any]


def one(
    name: str,
    prefix: tuple[str, ...] = (),
    places: dict[str, Path] | None = None,
    library: Path | None = None,
    timeout: float = 30,
    preexec: Callable[[], None] | None = None,
    **environment: str,
) -> Record:
    """The record of one check, in a process of its own. prefix: a command that makes its environment. places: of Machine."""
    paths = {place: str(path) for place, path in (places or {}).items()}
    words = [*prefix, sys.executable, "-c", ONE, name, json.dumps(paths), str(timeout)]
    variables = {**os.environ, "PYTHONPATH": str(library or ROOT / "lib"), **environment}
    done = subprocess.run(
        words, capture_output=True, text=True, env=variables, preexec_fn=preexec, timeout=120
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 1, done.stderr
    found: Record = json.loads(lines[0])
    assert found["type"] == "check" and found["name"] == name and found["state"] in STATES
    assert found["ok"] == {OK: True, UNKNOWN: None}.get(found["state"], False)
    return found


def mounted(script: str, *more: str) -> tuple[str, ...]:
    """A prefix: `script` changes mounts, which only the command sees."""
    return ("unshare", "-m", *more, "sh", "-e", "-c", f'{script}; exec "$@"', "sh")


def without(directory: str, glob: str) -> tuple[str, ...]:
    """A prefix: some files of a directory are not there."""
    made = "mkdir /mnt/u /mnt/w; mount -t overlay o -o lowerdir={0},upperdir=/mnt/u,workdir=/mnt/w {0}; rm -f {0}/{1}"
    return mounted("mount -t tmpfs t /mnt; " + made.format(directory, glob))


ORDINARY = (*gpubpf_host.ORDINARY, "env", "HOME=/nonexistent")


@pytest.fixture
def proc(tmp_path: Path) -> Callable[..., dict[str, Path]]:
    """Make a /proc with these files: name → text; what begins like a namespace becomes a symbolic link."""

    def make(**files: str) -> dict[str, Path]:
        for name, text in (FIRST | files).items():
            path = tmp_path / "proc" / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            if ":[" in text:
                path.unlink(missing_ok=True)
                path.symlink_to(text)
            else:
                path.write_text(text)
        return {"proc": tmp_path / "proc"}

    return make


def expect(found: Record, state: str, value: str, needed: bool = True) -> None:
    assert (found["state"], found["needed"]) == (state, needed), found
    assert value in found["value"], found
    assert found["consequence"] or state in (OK, UNKNOWN)
    if needed and state in (LIMITED, MISSING):
        assert found["do"]


# --- gpubpf itself ---------------------------------------------------------------------------------------------


def test_python_states_its_version() -> None:
    expect(one("python"), OK, "gpubpf ")


def test_python_that_was_built_without_a_module(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['zlib'] = None\n")
    found = one("python", library=Path(f"{tmp_path}:{ROOT / 'lib'}"))
    expect(found, MISSING, "without zlib")
    assert "zlib1g-dev" in found["do"] and "pip" not in found["do"]
    assert "pip" not in missing_package(ModuleNotFoundError(name="_ctypes"))


@pytest.mark.parametrize(("name", "needed"), [("packages", True), ("optional-packages", False)])
def test_packages_that_are_missing(name: str, needed: bool, tmp_path: Path) -> None:
    leave_out = "import sys\nsys.path[:] = [place for place in sys.path if 'packages' not in place]\n"
    (tmp_path / "sitecustomize.py").write_text(leave_out)
    found = one(name, library=Path(f"{tmp_path}:{ROOT / 'lib'}"))
    expect(
        found,
        MISSING,
        "llvmlite"
        if needed
        else "no argcomplete, duckdb, matplotlib, mcp, opentelemetry-exporter-otlp-proto-grpc, prometheus_client, pyarrow",
        needed,
    )


def test_the_packages_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[><=~! ]", one)[0] for one in requirements}

    extras = project["optional-dependencies"]
    optional = [*extras["analysis"], *extras["exporter"], *extras["mcp"], *extras["otlp"]]
    assert names(project["dependencies"] + optional) == {*software.NEEDED, *software.OPTIONAL}
    assert names(optional) <= set(software.OPTIONAL)


@pytest.fixture(scope="module")
def unbuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the library without what is built."""
    place = tmp_path_factory.mktemp("unbuilt") / "lib"
    leave_out = shutil.ignore_patterns("build", "__pycache__", "*.so", "*.so.*", "src", "tools")
    shutil.copytree(ROOT / "lib", place, ignore=leave_out)
    (place / "gpubpf" / "tools").unlink(missing_ok=True)
    return place


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("libraries", "not built: libgpubpf-agent.so", True),
        ("cudasim", "the embedded device is not built", True),
        ("hipsim", "the embedded device is not built", False),
    ],
)
def test_libraries_that_are_not_built(name: str, value: str, needed: bool, unbuilt: Path) -> None:
    expect(one(name, library=unbuilt), MISSING, value, needed)


# --- GPUs ------------------------------------------------------------------------------------------------------

DRIVER = """
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int cuInit(unsigned flags) { INIT }
int cuGetErrorName(int code, const char **text) { *text = "CUDA_ERROR_UNKNOWN"; return 0; }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "NVIDIA H200", size); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
"""
MANAGEMENT = """
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { __builtin_strcpy(text, "580.159.04"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(1ul + index); return 0; }
int nvmlDeviceGetMigMode(void *handle, unsigned *mode, unsigned *pending) { *mode = MIG; return 0; }
int nvmlSystemGetConfComputeState(unsigned *state) { state[1] = CONFIDENTIAL; state[2] = 0; return 0; }
"""


@pytest.fixture
def driver(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Build a libcuda.so.1, and a libnvidia-ml.so.1 if it is described. Return the variables with which programs find them."""

    def build(
        init: str = "return 0;", version: int = 13000, management: dict[str, int] | None = None
    ) -> dict[str, str]:
        place = tmp_path / "driver"
        place.mkdir()
        flags = [f"-DINIT={init}", f"-DVERSION={version}"]
        parts = [("libcuda.so.1", DRIVER, flags)]
        if management is not None:
            parts.append(("libnvidia-ml.so.1", MANAGEMENT, [f"-D{k}={v}" for k, v in management.items()]))
        for name, text, options in parts:
            command = ["gcc", "-shared", "-fPIC", "-w", *options, "-x", "c", "-", "-o", place / name]
            subprocess.run(command, input=text.encode(), check=True)
        return {"LD_LIBRARY_PATH": str(place)}

    return build


DEFAULT = {"MIG": 0, "CONFIDENTIAL": 0}


def test_two_gpus(driver: Callable[..., dict[str, str]]) -> None:
    found = one("nvidia-gpu", **driver())
    expect(found, OK, "2 x NVIDIA H200 (9.0)")


@pytest.mark.parametrize("options", [("-I",), ("-I", "-S")])  # with and without cuda-python
def test_the_driver_answers_cuda_python_as_it_answers_ctypes(options: tuple[str, ...]) -> None:
    question = ROOT / "lib/gpubpf/traced/driver_question.py"
    variables = {**os.environ, "LD_LIBRARY_PATH": str(ROOT / "lib/cudasim/lib"), "CUDASIM_DEVICES": "2"}
    words = [sys.executable, *options, question, "details"]
    said = json.loads(subprocess.run(words, capture_output=True, text=True, env=variables, check=True).stdout)
    assert said["gpus"] == [{"name": "cudasim embedded device (software)", "cc": [9, 0]}] * 2
    assert said["version"] == 13000
    expect(
        one("nvidia-gpu", LD_LIBRARY_PATH=variables["LD_LIBRARY_PATH"]),
        MISSING,
        "the embedded device",
        needed=False,
    )


def test_no_gpu_is_not_needed_where_no_hardware_is_seen(
    proc: Callable[..., dict[str, Path]], tmp_path: Path
) -> None:
    found = one("nvidia-gpu", places=proc() | {"sys": tmp_path}, LD_LIBRARY_PATH=str(tmp_path))
    expect(found, MISSING, "none: ", needed=False)


@pytest.mark.parametrize(
    ("init", "value"),
    [
        ("return 999;", "not usable: cuInit returns CUDA_ERROR_UNKNOWN (999)"),
        ("abort();", "not usable: the driver crashed (status -6)"),
        ("for (;;) pause();", "not usable: the driver did not answer in 2 s"),
    ],
)
def test_a_gpu_that_cannot_be_used(
    init: str, value: str, driver: Callable[..., dict[str, str]], proc: Callable[..., dict[str, Path]]
) -> None:
    places = proc(driver__nvidia__version="NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04")
    expect(one("nvidia-gpu", places=places, timeout=2, **driver(init)), MISSING, value)


def test_a_gpu_without_a_driver(tmp_path: Path, proc: Callable[..., dict[str, Path]]) -> None:
    place = tmp_path / "bus/pci/devices/0000:41:00.0"
    place.mkdir(parents=True)
    (place / "vendor").write_text("0x10de\n")
    (place / "class").write_text("0x030200\n")
    found = one("nvidia-gpu", places=proc() | {"sys": tmp_path}, LD_LIBRARY_PATH=str(tmp_path))
    expect(found, MISSING, "not usable")
    assert "modprobe nvidia" in found["do"]


@pytest.mark.parametrize(
    ("version", "state", "needed"), [(13000, OK, True), (12040, LIMITED, False), (10020, LIMITED, True)]
)
def test_drivers_by_age(
    version: int, state: str, needed: bool, driver: Callable[..., dict[str, str]]
) -> None:
    expect(one("nvidia-driver", **driver(version=version)), state, f"CUDA {version // 1000}.", needed)


@needs_root
def test_ptxas_that_is_newer_than_the_driver_or_cannot_be_run_or_is_missing(
    driver: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    ptxas = tmp_path / "toolkit/bin/ptxas"
    ptxas.parent.mkdir(parents=True)
    ptxas.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 99.1, V99.1.0'\n")
    ptxas.chmod(0o755)
    # No other assembler: the system's Python has no packages of NVIDIA, and toolkits are hidden.
    hidden = (
        *mounted("mount -t tmpfs t /usr/local"),
        "/usr/bin/env",
        "-u",
        "CUDA_PATH",
        "/usr/bin/python3",
        "-c",
        ONE,
    )
    alone = {**driver(), "PATH": "/usr/bin:/bin", "CUDA_HOME": str(tmp_path / "toolkit")}

    def found() -> Record:
        variables = {**os.environ, "PYTHONPATH": str(ROOT / "lib"), **alone}
        words = [*hidden, "ptxas", "{}", "30"]
        return json.loads(subprocess.run(words, capture_output=True, env=variables, check=True).stdout)

    expect(found(), MISSING, "ptxas 99.1 is newer than the driver's CUDA 13")
    ptxas.write_text("#!/bin/sh\nexit 1\n")
    expect(found(), MISSING, "cannot be run")
    ptxas.unlink()
    expect(found(), MISSING, "not installed")


@pytest.mark.parametrize(
    ("name", "management", "state", "value"),
    [
        ("mig", DEFAULT, OK, "off"),
        ("mig", DEFAULT | {"MIG": 1}, LIMITED, "on for 2 of 2 GPUs"),
        ("confidential-computing", DEFAULT, OK, "off"),
        ("confidential-computing", DEFAULT | {"CONFIDENTIAL": 1}, LIMITED, "on, developer tools off"),
        ("mig", None, UNKNOWN, "NVML does not say"),
    ],
)
def test_modes_of_gpus(
    name: str,
    management: dict[str, int] | None,
    state: str,
    value: str,
    driver: Callable[..., dict[str, str]],
) -> None:
    found = one(name, **driver(management=management))
    expect(found, state, value, needed=state == OK)


def test_mps(proc: Callable[..., dict[str, Path]]) -> None:
    expect(one("mps", places=proc(**{"12__comm": "nvidia-cuda-mps\n"})), LIMITED, "runs", needed=False)
    expect(one("mps", places=proc(), CUDA_MPS_PIPE_DIRECTORY="/x"), LIMITED, "is set", needed=False)


@pytest.mark.parametrize("compiler", ["/nonexistent/cc", "false"])
def test_cudasim_without_a_working_compiler(compiler: str) -> None:
    expect(one("cudasim", CUDASIM_CC_COMPILER=compiler), MISSING, "the C compiler")


KFD = "mount -t tmpfs t /sys/class; mkdir -p /sys/class/kfd/kfd/topology/nodes/1; echo 5 >/sys/class/kfd/kfd/topology/nodes/1/gpu_id"


@needs_root
def test_amd_gpus(tmp_path: Path) -> None:
    expect(one("amd-gpu"), MISSING, "none", needed=False)
    dev = {"dev": tmp_path}
    expect(one("amd-gpu", mounted(KFD), dev), MISSING, "no /dev/kfd")
    (tmp_path / "kfd").touch(mode=0o600)
    tmp_path.chmod(0o755)
    # pytest's own directories are closed to other users.
    as_other = f"{KFD}; mkdir -p /mnt; mount -t tmpfs t /mnt; touch /mnt/kfd; chmod 600 /mnt/kfd"
    found = one("amd-gpu", (*mounted(as_other), *ORDINARY), {"dev": Path("/mnt")})
    expect(found, MISSING, "may not open /dev/kfd")
    assert "usermod -aG root USER" in found["do"]
    expect(one("amd-gpu", mounted(KFD), dev), LIMITED, "", needed=False)


@needs_root
def test_rocr_that_is_broken_and_hipsim_without_it(tmp_path: Path) -> None:
    from gpubpf.linux.libraries import LibraryNames, files

    found = files(LibraryNames("libhsa-runtime64.so"))
    if not found:
        pytest.skip("needs ROCr")
    empty = "; ".join(f"mount --bind /dev/null {path}" for path in found)
    expect(one("rocr", mounted(f"{KFD}; {empty}")), LIMITED, "it cannot be loaded")
    directory = os.path.dirname(found[0])
    gone = without(directory, "libhsa-runtime64*")
    cache = 'mount --bind /dev/null /etc/ld.so.cache; exec "$@"'
    prefix = (*gone, "sh", "-c", cache, "sh")
    expect(one("rocr", prefix), MISSING, "not installed", needed=False)
    expect(one("hipsim", prefix), MISSING, "libhsa-runtime64.so is not installed", needed=False)


# --- the kernel ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "state", "needed"),
    [("5.4.0-42-generic", MISSING, True), ("5.15.0", LIMITED, False), ("6.1.0", OK, True)],
)
def test_kernels_by_age(release: str, state: str, needed: bool, proc: Callable[..., dict[str, Path]]) -> None:
    places = proc(sys__kernel__osrelease=release + "\n")
    without_bpf = ("setpriv", "--bounding-set=-all") if os.geteuid() == 0 else ()
    expect(one("kernel", without_bpf, places), state, release, needed)


@needs_root
def test_an_old_kernel_may_have_newer_features(proc: Callable[..., dict[str, Path]]) -> None:
    """As RHEL's 5.14 has them."""
    has = bpf_syscall.raw_arguments("sched_switch", 4)
    release = "5.14.0-503.el9"
    found = one("kernel", places=proc(sys__kernel__osrelease=f"{release}\n"))
    expect(found, OK if has else LIMITED, release, needed=has)


@needs_root
@pytest.mark.parametrize("name", ["bpf", "uprobes"])
def test_programs_of_an_ordinary_user_and_of_a_user_namespace(name: str) -> None:
    expect(one(name, ORDINARY), MISSING, "not allowed without CAP_")
    if subprocess.run(["unshare", "-Ur", "true"], stderr=subprocess.DEVNULL).returncode == 0:
        expect(one(name, ("unshare", "-Ur")), MISSING, "does not count in a user namespace")


@needs_root
def test_bpf_that_a_filter_refuses() -> None:
    found = one("bpf", preexec=lambda: refuse(("bpf",), errno.EPERM))
    expect(found, MISSING, "loading a program fails: Operation not permitted")


@needs_root
def test_filters_that_kill_do_not_end_the_check() -> None:
    for name, call in (("bpf", "bpf"), ("ptrace", "ptrace")):
        found = one(name, preexec=lambda: refuse(("bpf", "ptrace"), None))
        expect(found, MISSING, f"a seccomp filter kills each process that calls {call}(2)")


@needs_root
def test_without_proc_nothing_is_guessed() -> None:
    hidden = mounted("umount -l /proc")
    for name in ("user-namespace", "hidepid", "seccomp", "profilers", "kernel"):
        expect(one(name, hidden), UNKNOWN, "No such file or directory")
    expect(one("pid-namespace", hidden), MISSING, "/proc is not that of this PID namespace")


@needs_root
def test_no_uprobes() -> None:
    hidden = mounted("mount -t tmpfs t /sys/bus")
    found = one("uprobes", hidden)
    if found["state"] == LIMITED:  # the kernel has links to many uprobes
        expect(found, LIMITED, "not through perf_event_open(2)")
    # BPF_LINK_CREATE: as in a kernel without such links
    found = one("uprobes", hidden, preexec=lambda: refuse(("bpf",), errno.EINVAL, argument=28))
    expect(found, MISSING, "the kernel does not offer them")


@needs_root
def test_no_tracepoints() -> None:
    expect(one("tracefs", ORDINARY), UNKNOWN, "may not read it")
    hidden = "mount -t tmpfs t /sys/kernel"
    kept = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
    expect(one("tracefs", (*mounted(hidden), *kept)), MISSING, "cannot read the kernel's tracepoints")


@needs_root
def test_no_type_information() -> None:
    expect(one("btf", mounted("mount -t tmpfs t /sys/kernel")), MISSING, "no BTF")


@needs_root
def test_no_compiler(tmp_path: Path) -> None:
    prefix = (*without("/usr/bin", "clang*"), *ORDINARY, "PATH=/usr/bin:/bin")
    expect(one("compiler", prefix), MISSING, "neither clang nor bcc")
    old = "mount -t tmpfs -o mode=755 t /mnt; echo '#!/bin/sh\necho Debian clang version 11.0.1-2' >/mnt/clang; chmod 755 /mnt/clang"
    found = one("compiler", (*mounted(old), *ORDINARY, "PATH=/mnt:/usr/bin:/bin"))
    expect(found, LIMITED, "clang is version 11")
    other = tmp_path / "bcc"
    other.mkdir()
    (other / "__init__.py").touch()
    found = one("compiler", library=Path(f"{tmp_path}:{ROOT / 'lib'}"))
    expect(found, MISSING, "another project's")


@needs_root
def test_no_kernel_headers() -> None:
    pytest.importorskip("bcc")
    hidden = "mount -t tmpfs t /usr/src; mount -t tmpfs t /lib/modules; mount -t tmpfs t /sys/kernel"
    found = one("kernel-headers", mounted(hidden))
    expect(found, MISSING, "bcc finds none")
    if clang.find():  # it compiles instead of bcc
        assert found["consequence"] == "tools of your own do not work as root"
        assert "clang" in one("compiler", mounted(hidden))["value"]


# --- isolation -------------------------------------------------------------------------------------------------


def test_yama(proc: Callable[..., dict[str, Path]]) -> None:
    expect(one("ptrace", places=proc(sys__kernel__yama__ptrace_scope="3\n")), MISSING, "ptrace_scope is 3")
    if os.geteuid() == 0:
        kept = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")
        found = one("ptrace", kept, proc(sys__kernel__yama__ptrace_scope="1\n"))
        expect(found, LIMITED, "ptrace_scope is 1")


def test_ptrace_that_a_filter_refuses() -> None:
    found = one("ptrace", preexec=lambda: refuse(("ptrace",), errno.EPERM))
    expect(found, MISSING, "ptrace(2) is refused: Operation not permitted")


def test_namespaces(proc: Callable[..., dict[str, Path]]) -> None:
    found = one("user-namespace", places=proc(**{"self/ns/user": "user:[4026532000]"}))
    expect(found, LIMITED, "not the machine's own")
    if os.geteuid() == 0:
        inside = ("unshare", "-p", "-f", "--mount-proc", "--kill-child")
        expect(one("pid-namespace", inside), LIMITED, "not the machine's own", needed=False)
        expect(
            one("pid-namespace", ("unshare", "-p", "-f")), MISSING, "/proc is not that of this PID namespace"
        )


@needs_root
def test_hidepid() -> None:
    hidden = mounted("mount -t proc -o hidepid=2 p /proc", "-p", "-f", "--kill-child")
    expect(one("hidepid", (*hidden, *ORDINARY)), LIMITED, "hidepid=")
    expect(one("hidepid", hidden), OK, "does not apply to root")


def test_filters_of_system_calls() -> None:
    found = one("seccomp", preexec=lambda: refuse(("pidfd_getfd", "openat2"), errno.ENOSYS))
    expect(found, LIMITED, "a filter refuses pidfd_getfd, openat2")
    assert "-p" in found["consequence"] and "every tool" in found["consequence"]
    found = one("seccomp", preexec=lambda: refuse(("memfd_create",), None))
    expect(found, LIMITED, "a filter refuses memfd_create")
    expect(one("seccomp", preexec=lambda: refuse(("reboot",), errno.EPERM)), OK, "a filter, which allows")


@needs_root
def test_no_new_privileges() -> None:
    expect(one("no-new-privileges", (*ORDINARY, "setpriv", "--no-new-privs")), LIMITED, "sudo gains nothing")


def test_cgroups(proc: Callable[..., dict[str, Path]]) -> None:
    line = "30 24 0:26 / /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu\n"
    expect(one("cgroups", places=proc(self__mountinfo=line)), LIMITED, "v1 alone", needed=False)
    expect(one("cgroups", places=proc(self__mountinfo="")), LIMITED, "none mounted", needed=False)


def test_containers(proc: Callable[..., dict[str, Path]], tmp_path: Path) -> None:
    places = {**proc(**{"self/ns/pid": "pid:[4026532001]"}), "root": tmp_path}
    expect(one("container", places=places, container="lxc"), LIMITED, "lxc", needed=False)
    (tmp_path / ".dockerenv").touch()
    expect(one("container", places=places, container=""), LIMITED, "docker", needed=False)
    expect(one("container", places={**proc(), "root": tmp_path}, container=""), OK, "signs of docker")


# --- other profilers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "consequence", "needed"),
    [
        ("CUDA_INJECTION64_PATH", "every tool refuses COMMAND", True),
        ("NVTX_INJECTION64_PATH", "launchlate does not use CUPTI", False),
        ("NSYS_PROFILING_SESSION_ID", "launchlate does not use CUPTI", False),
        ("LD_AUDIT", "launchlate does not use CUPTI", False),
        ("HSA_TOOLS_LIB", "hipsnoop has no times of kernels", False),
        ("ROCP_TOOL_LIBRARIES", "hipsnoop has no times of kernels", False),
        ("LD_PRELOAD", "loads these libraries, too", False),
    ],
)
def test_variables_of_profilers(name: str, consequence: str, needed: bool) -> None:
    found = one("profiler-variables", **{name: "libc.so.6"} if name != "LD_AUDIT" else {name: ""})
    expect(found, LIMITED, name, needed)
    assert consequence in found["consequence"] and name in found["do"]


def test_variables_are_those_of_the_agent() -> None:
    text = (ROOT / "lib/gpubpf/agent/src/log/other_profilers.cpp").read_text()
    (listed,) = re.findall(r"kProfilers\[\] = \{(.*?)\}", text, re.DOTALL)
    assert tuple(re.findall(r'"([^"]+)"', listed)) == profilers.CUPTI_VARIABLES
    assert set(device_times.ROCPROFILER.others) <= set(device_times.HSA.others)


def test_profilers_that_run(proc: Callable[..., dict[str, Path]]) -> None:
    expect(one("profilers", places=proc(**{"7__comm": "nv-hostengine\n"})), OK, "DCGM runs")
    places = proc(**{"8__comm": "compute-sanitiz\n", "9__comm": "nsys\n"})
    found = one("profilers", places=places)
    expect(found, LIMITED, "Compute Sanitizer, DCGM, Nsight Systems run", needed=False)


# --- files and limits ------------------------------------------------------------------------------------------


@needs_root
def test_shared_memory(tmp_path: Path) -> None:
    expect(one("shared-memory", places={"dev": tmp_path}), MISSING, "there is no /dev/shm", needed=False)
    small = mounted("mount -t tmpfs -o size=1m t /dev/shm")
    expect(one("shared-memory", small), LIMITED, "1.00 MB free", needed=False)
    closed = (*mounted("mount -t tmpfs -o mode=755 t /dev/shm"), *ORDINARY)
    expect(one("shared-memory", closed), LIMITED, "not writable", needed=False)


@needs_root
def test_nothing_that_can_be_executed(proc: Callable[..., dict[str, Path]]) -> None:
    places = proc(sys__vm__memfd_noexec="2\n")
    text = (places["proc"] / "sys/vm/memfd_noexec").read_text()
    script = "; ".join(
        f"mount -t tmpfs -o noexec,mode=1777 t {place}" for place in ("/tmp", "/dev/shm", "/var/tmp", "/mnt")
    )
    script += f"; mkdir -p /mnt/proc/sys/vm; echo {text.strip()} >/mnt/proc/sys/vm/memfd_noexec"
    found = one(
        "executable-files", mounted(script), {"proc": Path("/mnt/proc")}, HOME="/tmp", XDG_CACHE_HOME=""
    )
    expect(found, MISSING, "neither memory files nor a directory")
    usable = one("executable-files", places=places)
    assert usable["state"] == OK and "can be executed" in usable["value"]


def test_no_temporary_files() -> None:
    expect(one("temporary-files", ("prlimit", "--fsize=0")), MISSING, "no directory is usable")


@needs_root
def test_little_space() -> None:
    script = "mount -t tmpfs -o size=2m,mode=1777 t /mnt"
    expect(one("temporary-files", mounted(script), TMPDIR="/mnt"), LIMITED, "/mnt, 1.9")
    found = one("cache", mounted(script + "; mkdir -m 700 /mnt/c"), XDG_CACHE_HOME="/mnt/c")
    expect(found, LIMITED, "2.00 MB free", needed=False)


@needs_root
def test_no_cache() -> None:
    script = "mount -t tmpfs -o mode=1777 t /tmp; touch /tmp/gpubpf-0"
    found = one("cache", mounted(script), HOME="/nonexistent", XDG_CACHE_HOME="/nonexistent")
    expect(found, LIMITED, "no directory can be used", needed=False)


def test_few_open_files() -> None:
    expect(one("open-files", ("prlimit", "--nofile=256")), LIMITED, "256 at most")


@needs_root
def test_little_locked_memory() -> None:
    script = (
        "mount -t tmpfs -o mode=755 t /mnt; mkdir -p /mnt/sys/kernel; echo 5.4.0 >/mnt/sys/kernel/osrelease"
    )
    prefix = (*mounted(script), "prlimit", "--memlock=65536", *ORDINARY)
    expect(one("locked-memory", prefix, {"proc": Path("/mnt")}), LIMITED, "64.0 KB")


# --- all of them -----------------------------------------------------------------------------------------------


def test_every_check_fails_in_a_test_of_this_file() -> None:
    text = Path(__file__).read_text()
    missing = [check.name for check in table.CHECKS if f'"{check.name}"' not in text]
    assert not missing


def test_names_and_titles_are_unique_and_fit() -> None:
    names = [check.name for check in table.CHECKS]
    assert len(set(names)) == len(names)
    assert all(len(check.title) < 17 for check in table.CHECKS)


def refuse(names: tuple[str, ...], code: int | None, argument: int | None = None) -> None:
    """Add a filter to this process that refuses system calls: with an error, or by killing the process.

    argument: refuse only calls with this first argument.
    """
    action = struct.pack("<HBBI", 0x06, 0, 0, 0x80000000 if code is None else 0x00050000 | code)
    load = struct.pack("<HBBI", 0x20, 0, 0, 0)  # the call's number
    tests = b""
    for name in names:
        more = b"" if argument is None else struct.pack("<HBBIHBBI", 0x20, 0, 0, 16, 0x15, 0, 1, argument)
        rest = (len(more) + len(action)) // 8
        tests += struct.pack("<HBBI", 0x15, 0, rest, syscalls.NUMBERS[name]) + more + action
    code_bytes = load + tests + struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000)
    program = ctypes.create_string_buffer(code_bytes, len(code_bytes))
    described = struct.pack("<H6xQ", len(code_bytes) // 8, ctypes.addressof(program))
    library = ctypes.CDLL(None, use_errno=True)
    assert library.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert library.prctl(22, 2, ctypes.c_char_p(described), 0, 0) == 0  # PR_SET_SECCOMP, a filter


@pytest.fixture(autouse=True)
def no_gpu_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Variables of the caller that a check reports."""
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "LD_PRELOAD", "HSA_TOOLS_LIB", "CUDASIM_CC_COMPILER"):
        monkeypatch.delenv(name, raising=False)
    yield

"""The machine that the check runs on, and how it starts programs."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpubpf.traced.device import cupti_libraries

ROOT = Path(__file__).resolve().parents[2]
PACKED = ROOT / "build" / "gpu-check.tar.xz"
PLACE = ROOT / "build" / "gpu"  # unpacked, or built here: ignored by git
# In the packed file. launchlate finds it below a folder of Python packages; PyTorch and others do not look there.
PACKED_CUPTI = Path("site/nvidia/packed/lib/libcupti.so.13")
AGENT = ROOT / "lib" / "gpubpf" / "agent" / "lib"
SIMULATOR = ROOT / "lib" / "cudasim" / "lib"
PROGRAMS_CUDA = 13  # of the packed programs: an older driver does not run them
PYTHON = "3.12"
PYTHON_HAS = ("numpy", "llvmlite", "pyarrow")  # what the tools need and the packed file has not
SIM_NOTE = "embedded device, not run on hardware"

Records = list[dict[str, Any]]


class Failure(Exception):
    """What went wrong, in one line for the user. `output`: what a command had printed."""

    output = ""


class Missing(Failure):
    """This machine lacks something that a part needs."""


@dataclass
class Machine:
    """Starts programs and tools. `device` is "gpu" or "sim"; `ends` is the time.monotonic() at which everything must be over."""

    device: str
    environment: Mapping[str, str]
    ends: float
    python: str = sys.executable
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def sim(self) -> bool:
        return self.device == "sim"

    @property
    def slower(self) -> int:
        """Return how many times as long a part may take: the embedded device compiles instrumented kernels with gcc."""
        return 3 if self.sim else 1

    @contextlib.contextmanager
    def setting(self, environment: Mapping[str, str]) -> Iterator[None]:
        """Add to the environment of what is started in the meantime."""
        before = self.environment
        self.environment = {**before, **environment}
        try:
            yield
        finally:
            self.environment = before

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.ends - time.monotonic()

    def program(self, words: str) -> list[str]:
        """Return the command of a packed program: "NAME ARGUMENT…" in examples/, or "static/NAME", "programs/NAME". Raises Missing."""
        name, *arguments = words.split()
        path = PLACE / (name if "/" in name else f"examples/{name}")
        if name.endswith(".py"):
            return [self.python, str(Path(__file__).parent / name), *arguments]
        if not path.exists():
            raise Missing(f"{name} is not in the packed file")
        return [str(path), *arguments]

    def needs(self, *modules: str) -> None:
        """Raise Missing if one of these Python modules is not installed, or lacks what it needs itself."""
        for name in modules:
            if importlib.util.find_spec(name.partition(".")[0]) is None:
                raise Missing(f"this Python has no {name}")
        compilers = (self.environment.get("CC", "gcc"), "gcc", "clang")
        if "triton" in modules and not any(
            shutil.which(name, path=self.environment.get("PATH")) for name in compilers
        ):
            raise Missing("Triton needs a C compiler for its launches, and there is none")

    def libraries(self, command: Sequence[str]) -> dict[str, str]:
        """Return the variables by which packed programs find the CUDA runtime; other programs (PyTorch) have their own."""
        if self.sim:
            return {"LD_LIBRARY_PATH": str(SIMULATOR)}
        packed = {PLACE / folder for folder in ("examples", "static", "programs", "machine")}
        if packed.isdisjoint(Path(word).parent for word in command):
            return {}
        path = (str(PLACE / "lib"), self.environment.get("LD_LIBRARY_PATH", ""))
        return {"LD_LIBRARY_PATH": ":".join(filter(None, path))}

    def cupti(self) -> list[str]:
        """Return where CUPTI's library may be, the packed one first; nothing on the embedded device."""
        packed = PLACE / PACKED_CUPTI
        return [] if self.sim else [*([str(packed)] if packed.exists() else []), *cupti_libraries()]

    def start(
        self, command: Sequence[str], seconds: float = 120, more: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, with `more` in its environment. Raises Failure after `seconds`, or when everything must be over.

        The command is then killed with its descendants."""
        if self.left() <= 0:
            raise Failure("no time is left")
        environment = {**self.environment, **self.libraries(command), **(more or {})}
        limit = max(1.0, min(seconds, self.left()))
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            out, err = killed(process)
            said = (err or out).strip().splitlines()[-1:] or ["nothing"]
            failure = Failure(f"timed out after {limit:.0f} s; last output: {said[0][:300]}")
            failure.output = out
            raise failure from None
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)

    def trace(
        self,
        tool: str,
        options: str,
        command: Sequence[str],
        seconds: float = 120,
        more: Mapping[str, str] | None = None,
        kind: str = "",
    ) -> tuple[subprocess.CompletedProcess[str], Records]:
        """Run a tool on a command, or as its options say; return the finished process and the tool's records.

        `kind`: only records of this type. The others are not parsed: a tool with `-e` writes millions of them.
        """
        results = PLACE / f"results.{os.getpid()}.jsonl"
        results.unlink(missing_ok=True)
        head = [self.python, str(ROOT / "tools" / f"{tool}.py"), "--device", self.device, "--json"]
        try:
            rest = ["--", *command] if command else []
            done = self.start([*head, "-o", str(results), *options.split(), *rest], seconds, more)
            return done, records_in(results, kind)
        except ValueError as error:
            raise Failure(f"{tool} wrote no JSON: {error}") from None
        finally:
            results.unlink(missing_ok=True)


def records_in(file: Path, kind: str = "") -> Records:
    """Return the JSON records in a file, or those of one type; none without the file. Raises ValueError for other text."""
    if not file.exists():
        return []
    with file.open() as lines:
        records = (json.loads(line) for line in lines if kind in line)
        return [record for record in records if not kind or record["type"] == kind]


def killed(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Kill a process and its descendants; return its output. It may survive if the driver does not let it die."""
    for pid in (*descendants(process.pid), process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # not every kernel tells of children
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=5)
    except subprocess.TimeoutExpired as late:  # it cannot die, or somebody has its output open still
        out, err = late.stdout or b"", late.stderr or b""
        return out.decode(errors="replace"), err.decode(errors="replace")


def descendants(pid: int) -> list[int]:
    """Return the descendants of a process. A tool's command continues when the tool is killed."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, file.read_text().split()):
                found += [child, *descendants(child)]
    return found


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a command printed, for a message; the signal that ended it if it printed nothing."""
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    if not said and done.returncode < 0:
        return f"it died by {signal.Signals(-done.returncode).name}"
    return said[-1][:300] if said else "nothing"


def tool_said(done: subprocess.CompletedProcess[str], tool: str) -> str:
    """Return all that a tool printed about itself, and the last line of the command: the first of them may be the root cause."""
    lines = [line for line in done.stderr.splitlines() if line.startswith(f"{tool}: ")]
    if (last := last_line(done)) != "nothing" or not lines:
        lines.append(last)
    return "; ".join(dict.fromkeys(line[:300].removeprefix(f"{tool}: ") for line in lines))[:1500]


def gpu() -> dict[str, Any]:
    """Return the name, versions and compute capability of GPU 0, as the driver tells them. Raises Failure without a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise Failure(
            "there is no NVIDIA driver here (libcuda.so.1); run this on a machine with a GPU, or with --device sim"
        ) from None
    if (code := driver.cuInit(0)) != 0:
        raise Failure(f"the NVIDIA driver finds no GPU (cuInit: {code}); run this on a machine with a GPU")
    device, version = ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDeviceGetName(name, 256, device)
    driver.cuDriverGetVersion(ctypes.byref(version))

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    shown = name.value.decode(errors="replace")
    if "cudasim" in shown.lower():
        raise Failure(
            f"this is the embedded device ({shown}); say --device sim, or take a machine with a GPU"
        )
    kernel_module = Path("/proc/driver/nvidia/version")
    words = kernel_module.read_text().split("\n")[0].split() if kernel_module.exists() else []
    release = next((word for word in words if word.count(".") == 2 and word.replace(".", "").isdigit()), "")
    return {
        "gpu": shown,
        "cc": f"{attribute(75)}.{attribute(76)}",  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        "multiprocessors": attribute(16),
        "driver": release or next((word for word in words if word[:3].isdigit()), "") or nvml_version(),
        "driver_cuda": f"{version.value // 1000}.{version.value % 1000 // 10}",
    }


def nvml_version() -> str:
    """Return the driver's version from NVML, for sandboxes that hide the kernel module (gVisor); "" without NVML."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    text = ctypes.create_string_buffer(80)
    if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, 80):
        return ""
    return text.value.decode(errors="replace")


def surroundings() -> dict[str, Any]:
    """Return what else the results depend on."""
    versions = {}
    for name in ("numpy", "torch", "triton", "cuda-bindings", "llvmlite", "pyarrow"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    libc = " ".join(platform.libc_ver())
    return {
        "kernel": platform.release(),
        "libc": libc,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "packages": versions,
        "found": {name: shutil.which(name) or "" for name in ("nvcc", "ncu", "nsys", "compute-sanitizer")},
        "root": os.geteuid() == 0,
    }


def commit() -> str:
    """Return the commit of the checkout, and whether files are changed; without git, the commit that the packed file was made from."""
    found, changed = (
        git("rev-parse", "--short=12", "HEAD"),
        git("status", "--porcelain", "--untracked-files=no"),
    )
    if found:
        return f"{found} with changes" if changed else found
    note = PLACE / "commit"
    return f"{note.read_text().strip()} (the packed file's)" if note.exists() else ""


def git(*arguments: str) -> str:
    """Return the output of a git command; empty without git."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def code() -> str:
    """Return a digest of the tools and the check as they lie here, on which the results depend besides the packed file."""
    digest = hashlib.sha256(sources().encode())
    folders = ("lib/gpubpf", "tools", "script/gpu")
    for file in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def unpack() -> None:
    """Unpack the packed file into PLACE, unless it is there. Raises Failure."""
    if not PACKED.exists():
        raise Failure(
            f"{PACKED.relative_to(ROOT)} is missing; make it with script/gpu-check --pack, bring it along"
        )
    with PACKED.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    stamp = PLACE / "unpacked"
    if stamp.exists() and stamp.read_text() == digest:
        return
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    shutil.unpack_archive(PACKED, PLACE, "xztar")
    stamp.write_text(digest)


def ptxas_folder(driver_cuda: str) -> Path:
    """Return where the packed ptxas is for a driver of this CUDA version. One of CUDA 12 does not load what ptxas 13 makes."""
    return PLACE / ("bin" if int(driver_cuda.partition(".")[0]) >= PROGRAMS_CUDA else "bin12")


def use_packed_agent() -> None:
    """Put the packed agent where the tools find it. One that is there already may be of other sources."""
    AGENT.mkdir(parents=True, exist_ok=True)
    for file in (PLACE / "agent").iterdir():
        new = AGENT / f"{file.name}.new"
        shutil.copy(file, new)
        new.rename(AGENT / file.name)  # a process may have the old one mapped


def sources() -> str:
    """Return a digest of the sources of the packed file: an agent of other sources may speak another protocol."""
    digest = hashlib.sha256()
    folders = ("lib/gpubpf/agent/src", "examples", "script/gpu/programs")
    files = sorted(path for folder in folders for path in (ROOT / folder).rglob("*"))
    shared = (
        "agent/definitions.py",
        "ebpf/bytecode.py",
        "ebpf/maps.py",
        "ptx/symbols.py",
    )  # as in the agent's Makefile
    for file in (*files, *(ROOT / "lib/gpubpf" / path for path in shared)):
        if file.suffix in (".c", ".cpp", ".h", ".def", ".cu", ".S", ".py"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def prepare(device: str, seconds: float) -> Machine:
    """Return the machine, with everything in place. Raises Failure."""
    facts = surroundings()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    paths = [str(ROOT / "lib"), str(Path(__file__).parent.parent)]
    if device == "sim":
        if not (SIMULATOR / "libcuda.so.1").exists() or not list(AGENT.glob("*.so")):
            raise Failure("the embedded device or the agent is not built; run script/setup")
        environment.setdefault("CUDASIM_CLOCK", "real")  # as on a GPU, times are to be found, not known
        facts = {"gpu": SIM_NOTE, **facts}
    else:
        facts = {**gpu(), **facts}
        if sys.version_info[:2] != tuple(map(int, PYTHON.split("."))):
            raise Failure(
                f"the packed libraries are for Python {PYTHON}; call it as python{PYTHON} script/gpu-check"
            )
        lacking = [name for name in PYTHON_HAS if importlib.util.find_spec(name) is None]
        if lacking:
            raise Failure(f"{sys.executable} has no {', '.join(lacking)}; use a Python that has")
        unpack()
        if (PLACE / "sources").read_text() != sources():
            raise Failure(
                "the packed file was made from other sources; make it anew with script/gpu-check --pack"
            )
        use_packed_agent()
        paths.append(str(PLACE / "site"))
        ptxas = ptxas_folder(facts["driver_cuda"])
        environment["PATH"] = f"{ptxas}:{environment.get('PATH', '/usr/bin:/bin')}"
    cache = PLACE / "cache"
    cache.mkdir(parents=True, mode=0o700, exist_ok=True)
    environment |= {"PYTHONPATH": ":".join(paths), "XDG_CACHE_HOME": str(cache)}
    return Machine(device, environment, time.monotonic() + seconds, facts=facts)

"""Install a wheel as an ordinary user without a compiler, and use it: what `script/package check` does on this machine.

Each check runs in a new environment, for each interpreter from 3.11 that is installed; packaging_roots.py does the same in other
distributions. The programs that the tools measure are built
before, by nvcc and hipcc; what needs a compiler that is not there is left out, with a line that says so. Needs PyPI.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
USER = 65534  # nobody, if root runs this
BASE = 330  # megabytes that the package takes with all that it needs
COMMANDS = tuple(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"])
NVCC_PLACES = ("/usr/local/cuda/bin", "/opt/gpubpf/bin", str(ROOT / ".venv/bin"))
EXAMPLES = (
    *("vectoradd", "latency", "exits", "memory", "imbalance", "softmax", "branches", "barriers"),
    *("training", "hangs"),
)
HIP_EXAMPLE = "saxpy"
OBJECT = "threads.bpf.o"
_STORES = ("vectoradd", "threadhist --kernel vectorAdd --work stores", "19 5 1 23", r"\n +4 +23 +69 ")
# An example, how a tool is called, arguments of the example, and what the output matches. The first two are one measurement, cold and
# with its cache.
MEASUREMENTS = (
    _STORES,
    _STORES,
    ("vectoradd", "cudasim", "", "PASSED"),
    ("latency", "launchlate --kernel second", "", "second +1 +500.0"),
    ("exits", "kernelretsnoop --kernel lateLane", "", "lane 31 exits 20.0 us"),
    ("memory", "memtrace --kernel transposeNaive", "transposeNaive", "stride 64"),
    ("softmax", "nansnoop", "", "Infinity first at softmax.cu:19 in naive"),
    ("hangs", "gpuhang --after 0.5", "flag 3", "spinning: its loops cannot end by themselves"),
    ("branches", "warpdiv", "", "branches.cu:27  mixed         16      "),
    ("barriers", "barrierlate", "", "barriers.cu:28: warp 0 arrives last 16 of 16 times"),
    ("training", "gpumem", "", "1.00 KB held in 2 allocations from 1 host stack"),
    ("training", "gputop", "", "        10  check"),
    ("training", "gpuprofile", "", "20  layer   main > step > forward > run"),
    ("imbalance", "gpucount kernel:triangular", "", "kernel:triangular +triangular +1 +256"),
    ("imbalance", "gpudist -H exit:triangular:loads:u64:work", "", "256 values, mean 128.5"),
    ("imbalance", "gputrace 'exit:triangular (gthread == 7) \"=%lu=\", gthread'", "", "=7="),
    (HIP_EXAMPLE, "hipsim", "20", ""),
    (HIP_EXAMPLE, "threadhist --work loads", "20", "saxpy: loads per thread"),
)


class CheckError(Exception):
    """The wheel does not do what it should."""


def say(text: str) -> None:
    print(f"package: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Done:
    """A command that ended: `text` is all that it printed."""

    status: int
    text: str
    seconds: float


@dataclass(frozen=True)
class User:
    """An ordinary user. `home` holds all files of hers. The commands are in `environment`, whose bin is PATH."""

    home: Path
    environment: Path

    def command(self, words: Sequence[str | Path], root: bool = False) -> dict[str, Any]:
        """Return what makes subprocess run a command of the environment, or another one by its path."""
        command = [str(word) for word in words]
        found = self.environment / "bin" / command[0]
        if found.exists():
            command[0] = str(found)
        return {
            "args": command,
            "env": self.variables(),
            "cwd": self.home,
            **({} if root else identity()),
        }

    def run(self, *words: str | Path, root: bool = False, status: int = 0) -> Done:
        """Run a command. Raises CheckError for another exit status."""
        started = time.monotonic()
        done = subprocess.run(
            **self.command(words, root), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode != status:
            raise CheckError(f"{' '.join(map(str, words))}: status {done.returncode}\n{done.stdout[-3000:]}")
        return Done(done.returncode, done.stdout, time.monotonic() - started)

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            **self.command(words), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def variables(self) -> dict[str, str]:
        return {
            "PATH": f"{self.environment}/bin",
            "HOME": str(self.home),
            "PIP_CACHE_DIR": str(self.home.parent / "pip-cache"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            **{
                name: value
                for name, value in os.environ.items()
                if name.startswith(("PIP_INDEX", "PIP_CERT", "SSL_"))
            },
        }


def expect(done: Done, *patterns: str) -> Done:
    """Raise CheckError if a command did not print something that matches each pattern."""
    for pattern in patterns:
        if not re.search(pattern, done.text):
            raise CheckError(f"expected {pattern!r} in\n{done.text[-3000:]}")
    return done


def interpreters() -> list[str]:
    """Return the interpreters from Python 3.11 with venv that the user may run, one of each version."""
    found: dict[str, str] = {}
    places = ["/usr/bin", "/usr/local/bin", *os.environ.get("PATH", "").split(":")]
    names = ["python3", *(f"python3.{minor}" for minor in range(11, 15))]
    probe = "import sys, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for path in (f"{place}/{name}" for place in places for name in names if place):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            command = [path, "-I", "-c", probe]
            version = subprocess.run(
                command, check=True, capture_output=True, text=True, cwd="/", **identity()
            ).stdout.strip()
            if version not in found and tuple(map(int, version.split("."))) >= (3, 11):
                found[version] = path
    return list(found.values())


def identity() -> dict[str, Any]:
    """Return what makes a child process an ordinary user's."""
    return {} if os.geteuid() else {"user": USER, "group": USER, "extra_groups": []}


def build_examples(directory: Path) -> None:
    """Build programs for the tools to measure, and an object for gpurun; say which ones cannot be built."""
    path = ":".join((os.environ.get("PATH", ""), *NVCC_PLACES))
    if nvcc := shutil.which("nvcc", path=path):
        for name in EXAMPLES:
            source = ROOT / "examples" / f"{name}.cu"
            command: list[str | Path] = [
                nvcc,
                "-std=c++17",
                "-cudart",
                "shared",
                "-lineinfo",
                "-o",
                directory / name,
                source,
            ]
            subprocess.run(command, check=True)
    variables = {**os.environ, "PATH": path}
    if hipcc := shutil.which("hipcc", path=path):
        variables["PATH"] += f":{Path(hipcc).parent}"
    for folder, name in (("examples/hip", HIP_EXAMPLE), ("examples", OBJECT)):
        making = ["make", "-s", "-C", str(ROOT / folder), name]
        if subprocess.run(making, env=variables, capture_output=True).returncode == 0:
            shutil.copy2(ROOT / folder / name, directory)
    if absent := [name for name in (*EXAMPLES, HIP_EXAMPLE, OBJECT) if not (directory / name).exists()]:
        say(f"left out: {' '.join(absent)}, which cannot be built here (nvcc, hipcc, clang)")


def megabytes(directory: Path) -> float:
    return sum(path.lstat().st_size for path in directory.rglob("*")) / 1e6


def leftovers(user: User) -> Iterator[Path]:
    """Yield what is in the environment by a name of the package's."""
    ours = {*COMMANDS, "gpubpf", "cudasim", "hipsim"}
    for path in user.environment.rglob("*"):
        if re.split(r"[-.]", path.name)[0] in ours:
            yield path


def as_version(wheel: Path, version: str, directory: Path) -> Path:
    """Write a copy of a wheel that says it is another version; return its path."""
    was = wheel.name.split("-")[1]
    target = directory / wheel.name.replace(f"-{was}-", f"-{version}-", 1)
    info, record = f"gpubpf-{was}.dist-info/", ""
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            data = old.read(entry)
            name = entry.filename.replace(f"gpubpf-{was}.d", f"gpubpf-{version}.d", 1)
            if entry.filename == info + "METADATA":
                data = data.replace(f"\nVersion: {was}\n".encode(), f"\nVersion: {version}\n".encode(), 1)
            if entry.filename == info + "RECORD":
                record = name
                continue
            entry.filename = name
            new.writestr(entry, data)
        lines = [f"{entry.filename},,\n" for entry in new.infolist()]
        new.writestr(record, "".join([*lines, f"{record},,\n"]))
    return target


def check_installation(user: User, python: str, wheel: Path) -> None:
    """Install the wheel alone; nothing is compiled, and everything is in its place."""
    user.run(python, "-m", "venv", user.environment)
    empty = megabytes(user.environment)
    done = user.run("pip", "install", "-q", "--only-binary", ":all:", wheel)
    size = megabytes(user.environment) - empty
    say(f"  installed in {done.seconds:.0f} s; {size:.0f} MB with what it needs")
    if size > BASE:
        raise CheckError(f"the package takes {size:.0f} MB with what it needs; {BASE} are enough")
    for name in COMMANDS:
        for place in (f"share/man/man8/{name}.8", f"share/bash-completion/completions/{name}"):
            if not (user.environment / place).is_file():
                raise CheckError(f"{place} is missing")
        expect(user.run(name, "--help"), name)
    user.run("pip", "check")


def check_without_compiler(user: User, wheel: Path, examples: Sequence[str], programs: Path) -> None:
    """Without any C compiler, the embedded CUDA device says what to do, in one line; with ziglang, everything works."""
    python = re.escape(f"{user.environment}/bin/python")
    if "vectoradd" in examples:
        advice = rf"no C compiler|needs a C compiler and found none; .*run {python}\S* -m pip install ziglang"
        expect(user.run("cudasim", "--", programs / "vectoradd", status=1), advice)
    check_what_check_says(user, (), compiler=False)
    done = user.run("pip", "install", "-q", f"gpubpf[sim] @ file://{wheel}")
    say(f"  [sim] in {done.seconds:.0f} s")


def check_tools(user: User, examples: Sequence[str], programs: Path, advice: str) -> None:
    """Run each tool on a program whose answer is known. advice: what to do about a missing package, after which its name follows."""
    seconds = []
    for program, options, arguments, pattern in MEASUREMENTS:
        if program in examples:
            done = user.run(*shlex.split(options), "--", programs / program, *arguments.split())
            seconds.append(expect(done, pattern).seconds)
    if seconds:
        say(f"  first measurement: {seconds[0]:.1f} s; again: {seconds[1]:.1f} s")
    for option, package in (("--heatmap=a.svg", "matplotlib"), ("--parquet=a.parquet", "pyarrow")):
        done = user.run("memtrace", option, "--", "/bin/true", status=1)
        expect(done, rf"^memtrace: {option[:9]}: .* {package} is missing in .*; {advice} {package}")
    for command, package in (("mcp", "mcp"), ("query SQL .", "duckdb"), ("report . -o a.html", "duckdb")):
        done = user.run("gpubpf", *command.split(), status=1)
        expect(done, rf"^gpubpf: .* {package} is missing in .*; {advice} {package}\b.*\n$")
    check_what_check_says(user, examples, compiler=True)
    expect(user.run("gpurun", "no.bpf.o", "--", "/bin/true", status=1), "no.bpf.o: cannot be read")
    if (programs / OBJECT).exists() and "vectoradd" in examples:
        done = user.run("gpurun", programs / OBJECT, "--", programs / "vectoradd", *"19 5 1 23".split())
        expect(done, "0: threads 0-4: 23")
    for name in ("hipsnoop", "cudasnoop"):
        expect(user.run(name, status=1), f"^{name}: .*root")
    if os.geteuid():
        return
    if "vectoradd" in examples:
        done = user.run("cudasnoop", "--", "cudasim", "--", programs / "vectoradd", root=True)
        expect(done, "cudaLaunchKernel")
    if (
        "imbalance" in examples
    ):  # root has bcc where the distribution's packages brought it, but no kernel headers
        done = user.run("gpucount", "kernel:triangular", "--", programs / "imbalance", root=True)
        expect(done, "kernel:triangular +triangular +1 +256")
    if HIP_EXAMPLE in examples:
        expect(user.run("hipsnoop", "--", programs / HIP_EXAMPLE, "20", root=True), "hipLaunchKernel +20")


def check_what_check_says(user: User, examples: Sequence[str], compiler: bool) -> None:
    """`gpubpf check` says what the other commands show. compiler: whether there is a C compiler for the embedded devices."""
    done = user.run(
        "gpubpf", "check", "--json", "--timeout", "60", status=1
    )  # an ordinary user may not load eBPF programs
    states = {record["name"]: record["state"] for record in map(json.loads, done.text.splitlines())}
    expected = {
        **dict.fromkeys(("python", "packages", "libraries"), "ok"),
        "optional-packages": "missing",
        "nvidia-gpu": "ok" if os.path.exists("/dev/nvidiactl") else "missing",
        "amd-gpu": "ok" if os.path.exists("/dev/kfd") else "missing",
        "cudasim": "ok" if compiler else "missing",
        "bpf": "missing",
    }
    if HIP_EXAMPLE in examples:
        expected["hipsim"] = "ok"
    wrong = {name: states.get(name) for name, state in expected.items() if states.get(name) != state}
    if wrong:
        raise CheckError(f"gpubpf check: expected {expected}, but {wrong}\n{done.text}")
    said = ", ".join(
        f"{sum(s == state for s in states.values())} {state}" for state in sorted({*states.values()})
    )
    say(f"  gpubpf check is right: {said}")


def measure_over(user: User, programs: Path, upgrade: Callable[[], object]) -> None:
    """Measure vectoradd before an upgrade and after it, with the tool that was started before."""
    command: list[str | Path] = [
        "threadhist",
        "--kernel",
        "vectorAdd",
        "--",
        programs / "vectoradd",
        "19",
        "5",
        "1",
    ]
    with user.start(*command, "1000000000") as running:
        said = ""
        while not (attached := re.search(r"attached to (\d+)", said)):
            line = running.stdout.readline() if running.stdout else ""
            if not line:
                raise CheckError(f"a tool ended before the upgrade:\n{said}")
            said += line
        upgrade()
        expect(user.run(*command, "23"), "23 launches")
        os.kill(int(attached[1]), signal.SIGTERM)
        said += running.communicate(timeout=300)[0]
    expect(Done(running.returncode, said, 0), r"launches, 5 threads")
    if running.returncode != 128 + signal.SIGTERM:
        raise CheckError(f"a tool did not survive an upgrade: status {running.returncode}\n{said}")


def check_upgrade(user: User, wheel: Path, examples: Sequence[str], programs: Path) -> None:
    """Install a newer version while a tool of the older one runs, with its cache. Both measure."""
    older = as_version(wheel, "0.0.1", user.home)
    user.run("pip", "install", "-q", "--force-reinstall", "--no-deps", older)
    expect(user.run("pip", "show", "gpubpf"), "Version: 0.0.1")
    expect(user.run("pip", "check"), "No broken")
    if "vectoradd" not in examples:
        return
    measure_over(user, programs, lambda: user.run("pip", "install", "-q", "--upgrade", "--no-deps", wheel))


def check_removal(user: User) -> None:
    user.run("pip", "uninstall", "-q", "-y", "gpubpf")
    left = [str(path.relative_to(user.environment)) for path in leftovers(user)]
    if left:
        raise CheckError(f"uninstalling left {', '.join(left)}")


def usable_examples(programs: Path) -> list[str]:
    """Return the names of the programs in a directory whose libraries this machine has."""
    found = [name for name in (*EXAMPLES, HIP_EXAMPLE) if (programs / name).exists()]
    known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
    if HIP_EXAMPLE in found:
        # hipcc here builds for one version of AMD's runtime, and each version has a name of its own.
        text = (programs / HIP_EXAMPLE).read_bytes().decode("latin-1")
        needed = re.findall(r"libamdhip64\.so\.\d+", text)[:1]
        if not any(name in known for name in needed):
            say(f"left out: {HIP_EXAMPLE}, without AMD's runtime {' '.join(needed)}")
            found.remove(HIP_EXAMPLE)
    return found


def check_wheel(wheel: Path, programs: Path) -> None:
    """Raise CheckError if the wheel does not do what it should for an ordinary user. programs: a directory of built examples."""
    examples = usable_examples(programs)
    cache = programs / "pip-cache"
    cache.mkdir(exist_ok=True)
    for number, python in enumerate(interpreters()):
        home = programs / f"user{number}"
        home.mkdir()
        copied = Path(shutil.copy2(wheel, home))
        if not os.geteuid():
            for path in (home, cache):
                os.chown(path, USER, USER)
        user = User(home, home / "venv")
        say(f"{wheel.name}, {python}")
        check_installation(user, python, copied)
        check_without_compiler(user, copied, examples, programs)
        check_tools(user, examples, programs, "run .* -m pip install")
        check_upgrade(user, copied, examples, programs)
        check_removal(user)
        shutil.rmtree(home)
        say("  fine")


if __name__ == "__main__":  # in another distribution (packaging_roots.py)
    try:
        check_wheel(Path(sys.argv[1]), Path(sys.argv[2]))
    except CheckError as error:
        say(str(error))
        sys.exit(1)

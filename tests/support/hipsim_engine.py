"""Runs small kernels of AMD instructions on hipsim's engine, without AMD's runtime."""

import fcntl
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).resolve().parents[2] / "lib" / "hipsim"
TOOL = SOURCE / "build" / "run_code_object"
GPUS = ("gfx906", "gfx90a", "gfx1030")
PAGE = 4096
PAGES_APART = 2 * PAGE  # of `Engine.put_pages`


def missing() -> str | None:
    """Say what is not installed that these tests need."""
    for program in ("llvm-mc-15", "ld.lld-15", "make", "g++"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return None


def build() -> None:
    """Make run_code_object, once for all processes of a test run."""
    locks = SOURCE.parent.parent / "build" / "tests"
    locks.mkdir(parents=True, exist_ok=True)
    with open(locks / "hipsim.lock", "w") as lock:  # hipsim_device makes the library there
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(
            ["make", "--silent", "-j2", "-C", str(SOURCE), "tool"], check=True, stdout=subprocess.DEVNULL
        )


def assemble(text: str, place: Path, gpu: str = "gfx906", features: str = "", debug: bool = False) -> Path:
    """Assemble a text to a code object; `features` are llvm-mc's, where the GPU's own are not meant. debug: with line tables."""
    place = place.resolve()
    source, unlinked, linked = place / "kernels.s", place / "kernels.o", place / "kernels.co"
    source.write_text(text)
    target = ["--arch=amdgcn", "--triple=amdgcn-amd-amdhsa", f"-mcpu={gpu}", f"-mattr={features}"]
    target.append("--amdhsa-code-object-version=4")
    if debug:  # nothing of the place gets into it
        target += ["-g", "--fdebug-compilation-dir=.", "--main-file-name=kernels.s"]
    assembler = ["llvm-mc-15", *target, "-filetype=obj", "-o", str(unlinked), source.name]
    subprocess.run(assembler, check=True, cwd=place)
    subprocess.run(["ld.lld-15", "-shared", "-o", str(linked), str(unlinked)], check=True)
    return linked


# What a kernel descriptor must say on some GPUs only: there, AGPRs begin behind the VGPRs.
DIRECTIVES = {"gfx90a": ".amdhsa_accum_offset"}


def kernel(
    name: str,
    body: str,
    lds: int = 0,
    scratch: int = 0,
    gpu: str = GPUS[0],
    vgprs: int = 64,
    agprs: int = 64,
) -> str:
    """Give the text of a kernel: s[0:1] is its kernarg segment, s2 its workgroup, v0 its work-item.

    vgprs: a multiple of 4. agprs: on GPUs that have them.
    """
    return f"""
.text
.globl {name}
.p2align 8
.type {name},@function
{name}:
{body}
    s_endpgm
.size {name}, . - {name}
.rodata
.p2align 6
.amdhsa_kernel {name}
    .amdhsa_user_sgpr_kernarg_segment_ptr 1
    .amdhsa_system_sgpr_workgroup_id_x 1
    .amdhsa_group_segment_fixed_size {lds}
    .amdhsa_private_segment_fixed_size {scratch}
    .amdhsa_next_free_vgpr {vgprs + agprs if gpu in DIRECTIVES else vgprs}
    {f"{DIRECTIVES[gpu]} {vgprs}" if gpu in DIRECTIVES else ""}
    .amdhsa_next_free_sgpr 96
    .amdhsa_ieee_mode 1
    .amdhsa_dx10_clamp 1
    .amdhsa_float_denorm_mode_32 3
    .amdhsa_float_denorm_mode_16_64 3
.end_amdhsa_kernel
"""


@dataclass
class Outcome:
    """What one run gave: the instructions executed and the end on the virtual clock, or the fault's text."""

    instructions: int = 0
    end_ns: int = 0
    seconds: float = 0.0
    fault: str | None = None


class Engine:
    """A run_code_object process."""

    def __init__(self, place: Path, environment: dict[str, str] | None = None, gpu: str = GPUS[0]) -> None:
        build()
        self.place = place
        self.process = subprocess.Popen(
            [TOOL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.buffers: set[str] = set()
        self.gpu = gpu
        self.send(f"gpu {gpu}")

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait() == 0

    def send(self, line: str) -> None:
        """Send a command that has no answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line: str) -> str:
        """Send a command, and give the line that answers it."""
        self.send(line)
        assert self.process.stdout is not None
        answer = self.process.stdout.readline().rstrip("\n")
        assert answer and not answer.startswith("error"), answer
        return answer

    def lines(self, line: str) -> Iterable[str]:
        """Send a command, and give the lines that answer it."""
        answer = self.ask(line)
        assert self.process.stdout is not None
        while answer != "end":
            yield answer
            answer = self.process.stdout.readline().rstrip("\n")

    def load(self, code: Path) -> None:
        """Run kernels of this code object from now on."""
        self.send(f"load {code}")

    def put(self, name: str, content: np.ndarray) -> None:
        """Make a buffer with this content."""
        self._make("buffer", name, content, content.nbytes)

    def put_pages(self, name: str, content: np.ndarray) -> None:
        """Make pages with this content, PAGES_APART bytes apart, each between pages without access."""
        assert content.nbytes % PAGE == 0
        self._make("pages", name, content, content.nbytes // PAGE)

    def _make(self, kind: str, name: str, content: np.ndarray, size: int) -> None:
        path = self.place / f"{name}.in"
        content.tofile(path)
        if name in self.buffers:
            self.send(f"free {name}")
        self.buffers.add(name)
        self.send(f"{kind} {name} {size} {path}")

    def get(self, name: str, kind: type) -> np.ndarray:
        """Give the content of a buffer."""
        path = self.place / f"{name}.out"
        assert self.ask(f"dump {name} {path}") == "ok"
        return np.fromfile(path, dtype=kind)

    def run(
        self,
        name: str,
        arguments: Iterable[str],
        grid: tuple[int, int, int],
        group: tuple[int, int, int],
        lds: int = 0,
    ) -> Outcome:
        """Run a kernel; an argument is "u32 N", "u64 N" or the name of a buffer."""
        for argument in arguments:
            self.send("argument " + (argument if " " in argument else f"buffer {argument}"))
        words = self.ask(f"run {name} {' '.join(map(str, grid + group))} {lds}").split(" ", 3)
        if words[0] == "ok":
            return Outcome(int(words[1]), int(words[2]), float(words[3]))
        return Outcome(fault=" ".join(words[1:]))

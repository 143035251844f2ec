#!/usr/bin/env python3
"""How long a program with 500 kernels waits for its copies: python3 benchmarks/large_module.py [FILE.md]

Needs nvcc and ptxas, no GPU: this is the tool's part, up to the cubin that the agent loads. The caches are new.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "lib"), str(ROOT / "tools")]

import memtrace  # noqa: E402
import threadhist  # noqa: E402
from gpubpf.images import fatbin  # noqa: E402
from gpubpf.images.assemble import Target  # noqa: E402
from gpubpf.images.instrument import instrument_kernels, instrument_module  # noqa: E402
from gpubpf.images.sidecar import Sidecar  # noqa: E402
from gpubpf.memory.memory_options import MemoryOptions  # noqa: E402
from gpubpf.program import BPF  # noqa: E402
from gpubpf.show import cli  # noqa: E402
from gpubpf.traced.large_modules import ALL_ABOVE  # noqa: E402

KERNELS = 500
TARGET = Target("gpu", (9, 0), 13)
KERNEL = """
__global__ void kernel%d(float *a, const float *b, int n, float s) {
    __shared__ float tile[256];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0;
    for (int j = 0; j < %d; ++j) {
        tile[threadIdx.x] = i < n ? b[(i * %d + j) %% n] : 0.0f;
        __syncthreads();
        for (int t = 0; t < 16; ++t) sum += tile[(threadIdx.x + t * %d) & 255] * s;
        __syncthreads();
    }
    if (i < n) a[i] = sum / (1.0f + i) + table[i & 255] + %d.0f + expf(sum) * sinf(s);
}
"""
HEAD = f"""# What a module with {KERNELS} kernels costs

Seconds until the tool has the copies, and seconds of CPU time that it and ptxas need, for sm_90 on this
machine, with empty caches unless the row says otherwise. No GPU ran.

    python3 benchmarks/large_module.py benchmarks/results/large_module.md

"""


def program(directory: Path) -> Path:
    """Return the fatbin of a source file with KERNELS kernels."""
    kernels = (KERNEL % (k, 4 + k % 7, 1 + k % 5, k % 9, k) for k in range(KERNELS))
    (directory / "many.cu").write_text("__device__ float table[256];\n" + "".join(kernels))
    command = ["nvcc", "-fatbin", "-lineinfo", "-gencode", "arch=compute_90,code=compute_90"]
    subprocess.run(
        [*command, "-o", directory / "many.fatbin", directory / "many.cu"], check=True, capture_output=True
    )
    return directory / "many.fatbin"


def tools() -> dict[str, BPF]:
    counting, tracing = BPF(text=threadhist.PROGRAM), BPF(text=memtrace.PROGRAM)
    counting.attach_gpu_exit(kernel=[], fn_name="on_exit", accumulate="instructions")
    memtrace.attach(tracing, MemoryOptions.of(cli.parse(memtrace.build_parser(), ["--", "true"])))
    return {"threadhist": counting, "memtrace": tracing}


def timed(make: Callable[[], object]) -> str:
    """Return the seconds that `make` takes, as two cells: passed, and of CPUs."""

    def cpu() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(u.ru_utime + u.ru_stime for u in used)

    start, before = time.monotonic(), cpu()
    make()
    return f"{time.monotonic() - start:.2f} | {cpu() - before:.2f}"


def rows(tool: BPF, image: Path) -> dict[str, str]:
    """Return the cells of each row for one tool, in an order in which earlier rows fill the caches that later ones use."""
    images, attachments = fatbin.images_of_file(image), tool.attached.lowered_probes()

    def load() -> Sidecar:
        return instrument_module(images, attachments, TARGET, later=True)

    found = {"loading the module": timed(load)}
    later = load().later
    assert later is not None

    def launch(kernels: range) -> None:
        for k in kernels:
            made = instrument_kernels(later.source, attachments, TARGET, [later.kernels[k]])
            assert len(made.kernels) == 1 and made.image

    few, most = 10, KERNELS // ALL_ABOVE
    found["the first launch of one kernel"] = timed(lambda: launch(range(1)))
    found[f"the first launches of {few} others, in turn"] = timed(lambda: launch(range(1, few + 1)))
    found[f"the same {few + 1} kernels in a second run"] = timed(lambda: (load(), launch(range(few + 1))))
    found[f"the first launches of {most - few - 1} others, in turn"] = timed(
        lambda: launch(range(few + 1, most))
    )
    found["the copies of all kernels"] = timed(lambda: instrument_kernels(later.source, attachments, TARGET))
    found["the same in a second run"] = timed(load)
    assert load().later is None
    return found


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_CACHE_HOME"] = place
        image = program(Path(place))
        columns = {name: rows(tool, image) for name, tool in tools().items()}
    lines = [
        "| | " + " | ".join(f"{name}: s | CPU s" for name in columns) + " |",
        "|---|" + "---:|" * 2 * len(columns),
        *(
            f"| {row} | " + " | ".join(column[row] for column in columns.values()) + " |"
            for row in next(iter(columns.values()))
        ),
    ]
    text = HEAD + "\n".join(lines) + "\n"
    print(text, end="")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

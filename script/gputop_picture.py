#!/usr/bin/env python3
"""Draw docs/images/gputop.svg: the screen of gputop, while three programs run on the embedded device.

    script/gputop_picture.py [FILE]

Needs nvcc and pyte, which script/setup --dev installs. The programs' kernels only wait.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/support"))

import gpubpf_cuda  # noqa: E402 (it is not installed)
from gpubpf_terminal import Terminal  # noqa: E402

SOURCE = r"""
#include <cstdlib>
#include <cuda_runtime.h>
#include <unistd.h>
__device__ void wait_for(long long ns) {
    long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - begin < ns);
}
__global__ void attention(long long ns) { wait_for(ns); }
__global__ void gemm(long long ns) { wait_for(ns); }
__global__ void layer_norm(long long ns) { wait_for(ns); }
int main(int, char **words) {  // bytes, copied bytes, us of each kernel, us of a pause
    char *kept, *host = (char *)calloc(1, atoi(words[2]));
    cudaMalloc(&kept, atoi(words[1]));
    for (long long ns = 1000 * atoi(words[3]);; usleep(atoi(words[4]))) {
        cudaMemcpy(kept, host, atoi(words[2]), cudaMemcpyHostToDevice);
        attention<<<1, 1>>>(ns);
        for (int i = 0; i < 4; i++) gemm<<<1, 1>>>(ns / 2);
        layer_norm<<<1, 1>>>(ns / 10);
        cudaDeviceSynchronize();
    }
}
"""
PROGRAMS = {
    "train": (400 << 20, 8 << 20, 40_000, 5_000),
    "serve": (120 << 20, 1 << 20, 3_000, 60_000),
    "notebook": (30 << 20, 1 << 10, 500, 400_000),
}
WIDTH, HEIGHT = 8.4, 18  # of a character, in pixels
STYLE = "font: 14px DejaVu Sans Mono, Menlo, Consolas, monospace; white-space: pre"


def picture(shown: Terminal) -> str:
    """Return a screen as SVG."""
    columns, lines = 80, shown.lines
    size = f'width="{columns * WIDTH + 20:.0f}" height="{len(lines) * HEIGHT + 20}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{STYLE}">']
    parts.append('<rect width="100%" height="100%" rx="6" fill="#1d2021"/>')
    for row, text in enumerate(lines):
        if not text:
            continue
        look, top = shown.attributes(row), row * HEIGHT + 10
        color, weight = ("#1d2021", "") if look.reverse else ("#ebdbb2", "")
        if look.reverse:
            box = f'x="10" y="{top}" width="{len(text) * WIDTH:.1f}" height="{HEIGHT}"'
            parts.append(f'<rect {box} fill="#ebdbb2"/>')
        if look.bold:
            weight = ' font-weight="bold"'
        place = f'x="10" y="{top + HEIGHT - 4}" textLength="{len(text) * WIDTH:.1f}"'
        parts.append(f'<text xml:space="preserve" {place} fill="{color}"{weight}>{escape(text)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    """Run the programs and the tool, and write the picture."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/images/gputop.svg"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "lib")}
    with contextlib.ExitStack() as running:
        pids = []
        place = Path(running.enter_context(tempfile.TemporaryDirectory()))
        app = gpubpf_cuda.build(SOURCE, place / "app")
        for name, words in PROGRAMS.items():
            command = [sys.executable, "-m", "cudasim.launcher", "--", shutil.copy(app, place / name)]
            command += map(str, words)
            one = running.enter_context(subprocess.Popen(command, env=environment))
            running.callback(one.kill)
            pids.append(one.pid)
        time.sleep(3)  # they load their kernels
        command = [sys.executable, ROOT / "tools/gputop.py", "-p", ",".join(map(str, pids))]
        with Terminal(command, lines=18, env=environment) as shown:
            for _ in range(3):  # the first report is of programs that were just stopped and patched
                line = shown.lines[0]
                shown.until(lambda me, line=line: "LAUNCH/s" in me.text and me.lines[0] != line)
            target.write_text(picture(shown))
            print(shown.text)
            shown.press("q")
            shown.ended()
    return 0


if __name__ == "__main__":
    sys.exit(main())

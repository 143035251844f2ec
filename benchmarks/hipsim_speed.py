"""How many wave instructions hipsim's engine executes in a second.

    python3 benchmarks/hipsim_speed.py [THREADS]

Builds hipsim_speed.hip with hipcc, and runs its kernels on the engine without AMD's runtime. Give it an idle machine.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
HIPSIM = HERE.parent / "lib" / "hipsim"
MIB = 1 << 20

# Kernel, arguments, grid, workgroup.
RUNS = (
    ("integers", ("buffer a", "u32 20000"), (16384, 1, 1), (256, 1, 1)),
    ("doubles", ("buffer a", "u32 10000"), (16384, 1, 1), (256, 1, 1)),
    ("bodies", ("buffer a", "buffer b", "u32 8192"), (8192, 1, 1), (256, 1, 1)),
    ("product", ("buffer a", "buffer b", "buffer c", "u32 512"), (512, 512, 1), (16, 16, 1)),
    ("stream", ("buffer a", "buffer b", "buffer c", "u32 4000000"), (262144, 1, 1), (256, 1, 1)),
)


def main(arguments: list[str]) -> int:
    """Build, run, print one line for each kernel."""
    threads = int(arguments[0]) if arguments else len(os.sched_getaffinity(0))
    subprocess.run(["make", "--silent", "-j2", "-C", str(HIPSIM), "tool"], check=True)
    with tempfile.TemporaryDirectory() as place:
        code = Path(place) / "speed.co"
        flags = ["--offload-arch=gfx906", "-O3", "--cuda-device-only", "--no-gpu-bundle-output", "-w", "-c"]
        environment = {**os.environ, "HIP_PLATFORM": "amd"}
        subprocess.run(
            ["hipcc", *flags, str(HERE / "hipsim_speed.hip"), "-o", str(code)],
            check=True,
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        commands = [f"load {code}", f"set threads {threads}"]
        for name, given, grid, group in RUNS:
            commands += [f"buffer {buffer} {16 * MIB}" for buffer in "abc"]
            commands += [f"argument {argument}" for argument in given]
            commands += [f"run {name} {' '.join(map(str, grid + group))} 0"]
            commands += [f"free {buffer}" for buffer in "abc"]
        done = subprocess.run(
            [HIPSIM / "build" / "run_code_object"],
            input="\n".join(commands) + "\n",
            capture_output=True,
            text=True,
            check=True,
        )
    print(f"wave instructions of hipsim on {threads} threads")
    print(f"{'kernel':12}{'instructions':>14}{'seconds':>10}{'millions/s':>12}")
    for (name, *_), line in zip(RUNS, done.stdout.splitlines(), strict=True):
        word, *numbers = line.split()
        if word != "ok":
            print(f"{name:12}{line}")
            return 1
        instructions, seconds = int(numbers[0]), float(numbers[2])
        print(f"{name:12}{instructions:14}{seconds:10.2f}{instructions / seconds / 1e6:12.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

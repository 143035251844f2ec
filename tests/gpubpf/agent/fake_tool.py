"""A tool for programs on the fake driver: `fake_tool.py RESULT [OPTIONS] -- COMMAND…`, options as a Python dictionary.

Its probe adds 1 for each thread of `vectorAdd`. RESULT gets a JSON object: what the session ended with.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpubpf.ebpf.maps import MapDefinition
from gpubpf.errors import Error
from gpubpf.images.assemble import Target
from gpubpf.images.sidecar import RegisterUse, Sidecar, SidecarKernel
from gpubpf.lower.launch_block import LaunchBlock
from gpubpf.session.session import Session
from gpubpf.traced.device import Device
from gpubpf.traced.measurement import Follow, Listener, Plan, Targets
from gpubpf.traced.workers import SidecarBuilder


def cuda_include() -> Path:
    import nvidia

    places = [Path("/usr/local/cuda/include"), *sorted(Path("/usr/local").glob("cuda-*/include"))]
    places += [Path(p) / "cu13/include" for p in nvidia.__path__]
    return next(place for place in places if (place / "cuda.h").exists())


def built(place: Path, *options: str, program: str = "target") -> Path:
    """Build PROGRAM.c, with the fake driver beside it."""
    for part in (place, *list(place.parents)[:2]):  # for other users
        part.chmod(part.stat().st_mode | 0o711)
    compiler = [
        shutil.which("gcc") or "cc",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-isystem",
        str(cuda_include()),
    ]
    library = place / "libcuda.so.1"
    # A function that is only a jump cannot be hooked. Nor can one of a single instruction and `ret`, while another tracer has a probe
    # at that instruction. So none is only a jump, and all begin with endbr64, where such probes do no harm.
    flags = [
        "-fno-optimize-sibling-calls",
        "-fcf-protection=branch",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
    ]
    flags += ["-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic"]
    source = HERE / "fakecuda.c"
    subprocess.run([*compiler, *flags, *options, "-o", library, source, "-ldl", "-lpthread"], check=True)
    made = place / program
    subprocess.run([*compiler, "-o", made, HERE / f"{program}.c", library, f"-Wl,-rpath,{place}"], check=True)
    return made


HERE = Path(__file__).parent
DEFINITION = MapDefinition("tallies", "thread_array", 4, 8, 1, None, "<u8")


BLOCK = LaunchBlock(32, bases={"tallies": 16}, capacities={"tallies": 24})


def instrument(image: bytes, target: Target) -> Sidecar:
    names = tuple(image.decode().split("\n")[1:-1])
    if "vectorAdd" not in names:
        return Sidecar(entries=names)
    return Sidecar(
        b"FAKE instrumented 2\nvectorAdd\n",
        (SidecarKernel("vectorAdd", ((0, 4), (4, 4)), 8, BLOCK),),
        {},
        (),
        names,
    )


def session(command: list[str], pids: Sequence[int] = (), **options: Any) -> Session:
    """Options: the fields of Plan, SidecarBuilder and Listener, and `user`, `duration`; `device` by its kind; `sanitizer`: the path of
    the Compute Sanitizer library."""
    if sanitizer := options.pop("sanitizer", ""):
        options["follow"] = Follow(sanitizer=(sanitizer,))
    options = {
        "map_memory": 1 << 20,
        "instrument": instrument,
        "wanted": ("vectorAdd",),
        "definitions": [DEFINITION],
        "registers": lambda sidecar, target: {"vectorAdd": RegisterUse(10, 12)},
    } | options
    options["device"] = Device(options.get("device", "sim"))
    if wanted := options["wanted"]:
        options["matches"] = lambda name: name in wanted

    def made(kind: Any) -> Any:
        names = [name for name in kind.__match_args__ if name in options]
        return kind(**{name: options.pop(name) for name in names})

    targets = Targets(command, pids, user=options.pop("user", None))
    plan, builder, listener = made(Plan), made(SidecarBuilder), made(Listener)
    return Session(targets, plan, builder, listener, **options)


def result(measured: Session) -> dict[str, Any]:
    return {
        "summary": measured.summary(),
        "status": measured.status,
        "kernels": {kernel.mangled: kernel.launches for kernel in measured.kernels()},
        "instances": [
            [list(i.grid), list(i.block_dim), i.launches, i.array[0].tolist()]
            for i in measured.instances("tallies")
        ],
    }


def measure(command: list[str], **options: Any) -> dict[str, Any]:
    """Measure a command to its end. The result has what the tool said, too."""
    said: list[str] = []
    with session(command, note=said.append, complain=said.append, **options) as measured:
        for _ in measured.intervals():
            pass
    return result(measured) | {"said": said}


def main() -> int:
    own, command = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
    options = ast.literal_eval(own[1]) if len(own) > 1 else {}
    if options.pop("stop", False):  # as by Ctrl-Z, in the middle of its work
        options["instrument"] = lambda image, target: os.kill(os.getpid(), signal.SIGSTOP)
    interval = options.pop("interval", None)
    said: list[str] = []
    shown = 0
    try:
        with session(
            command,
            note=said.append,
            complain=said.append,
            attached=lambda pid, comm, ts_ns, again: print("attached", file=sys.stderr, flush=True),
            **options,
        ) as measured:
            for _ in measured.intervals(interval):
                shown += 1
                with open(own[0], "w") as out:
                    json.dump(result(measured) | {"shown": shown}, out)
    except Error as error:
        print(error, file=sys.stderr)
        return error.status
    with open(own[0], "w") as out:
        json.dump(result(measured) | {"shown": shown, "said": said}, out)
    return measured.status


if __name__ == "__main__":
    sys.exit(main())

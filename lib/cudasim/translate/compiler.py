"""Compile C text to a shared object: choose the compiler and its flags."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpubpf import processor, ziglang
from gpubpf.errors import Error, how_to_install

SOURCES = Path(__file__).resolve().parent.parent / "src"
# The semantics of PTX differ from C's: the compiler must not fuse multiply and add, integers wrap, and pointers may alias.
SEMANTICS = [
    "-std=gnu11",
    "-ffp-contract=off",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-trapping-math",
]
# The number of lines of C up to which each level is used. A function is one dense graph of blocks, on which optimizers spend much
# time: 7,000 lines take 0.6 s at -O0, 1.3 s at -Og, 3.2 s at -O1. Code compiled at -O0 runs about five times slower.
LEVELS = ((1_500, "-O2"), (5_000, "-O1"), (120_000, "-Og"))
# The beginning of the C text of a module with probes. A user waits for the compiler at a tool's first run, so -O2 takes too long, and
# so does -O1 for functions of probes with thousands of lines (5,000 lines take 3.2 s at -O1, 1.4 s at -Og).
PROBED = "/* with probes */\n"
PROBED_LEVELS = ((3_000, "-O1"), (120_000, "-Og"))
# The beginning of the C text of code that ran for a long time in an earlier process (engine/image.cpp). It may take longer to compile.
RUNS_LONG = "/* runs for a long time */\n"
RUNS_LONG_LEVELS = ((5_000, "-O2"), (20_000, "-O1"), (120_000, "-Og"))
MARKS = ((PROBED, PROBED_LEVELS), (RUNS_LONG, RUNS_LONG_LEVELS))
_OF_LINKER = re.compile(r"\bld returned|linker command failed")
# Directories of C libraries that may be installed without the files for developers.
_LIBRARIES = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/usr/lib")


class CompilerError(Error):
    """There is no C compiler, or it failed."""


def command() -> list[str]:
    """Return the command of the C compiler. Raises CompilerError if none is installed."""
    chosen = os.environ.get("CUDASIM_CC_COMPILER")
    if chosen:
        return chosen.split()
    for name in ("gcc", "cc", "clang"):
        found = shutil.which(name)
        if found:
            return [found]
    if zig := ziglang.find():
        # The target is for any CPU; zig's default is the CPU that it runs on. Without optimization, zig adds a sanitizer.
        return [zig, "cc", "-target", f"{processor.NAME}-linux-gnu", "-fno-sanitize=undefined"]
    raise CompilerError(
        "the embedded device needs a C compiler and found none; install gcc or clang,"
        f" or for ziglang's compiler {how_to_install('ziglang')}"
    )


@functools.cache
def machine_flags() -> tuple[str, ...]:
    """Return the compiler's flags for instruction sets of this CPU that make a difference. Without FMA, fma() is a library call."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ()
    for line in text.splitlines():
        if line.startswith("flags"):
            have = set(line.split())
            if {"avx2", "fma", "f16c", "bmi2"} <= have:
                return ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mpopcnt")
            break
    return ()


def _cause(log: str) -> str:
    """Return the line of the compiler's messages with the cause: the first error or, without one, the first line.

    Lines such as "In function 'f':" come before an error. If the linker fails, the last line only reports that it failed.
    """
    lines = log.strip().splitlines()
    errors = (line for line in lines if "error:" in line and not _OF_LINKER.search(line))
    return next(errors, lines[0] if lines else "")


def compile_c(text: str, output: str) -> None:
    """Compile `text` to the shared object `output`, which appears only when it is complete.

    Raises CompilerError.
    """
    lines = text.count("\n")
    levels = next((known for mark, known in MARKS if text.startswith(mark)), LEVELS)
    level = next((name for most, name in levels if lines <= most), "-O0")
    temporary = f"{output}.{os.getpid()}.tmp"
    compiler = command()
    arguments = [
        *compiler, *SEMANTICS, level, *machine_flags(), "-w", "-fPIC", "-fvisibility=hidden",
        f"-I{SOURCES}", "-x", "c", "-",
    ]  # fmt: skip
    try:
        if compiler[0] == ziglang.find():
            _compile_with_zig(arguments, text, temporary)
        else:
            _run([*arguments, "-shared", "-o", temporary, "-lm"], text)
        os.replace(temporary, output)
    except OSError as error:
        raise CompilerError(f"the C compiler could not be run: {error}") from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def _compile_with_zig(arguments: Sequence[str], text: str, output: str) -> None:
    """Compile and link in two steps. `zig cc -shared` would first build a C library to link with, for many seconds."""
    import tempfile  # most have another compiler

    with tempfile.TemporaryDirectory() as directory:
        compiled = f"{directory}/compiled.o"
        caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), directory)
        _run([*arguments, "-c", "-o", compiled], text, caches)
        places = [f"-L{place}" for place in _LIBRARIES]
        words = ["-shared", "-z", "defs", compiled, *places, "-l:libm.so.6", "-l:libc.so.6", "-o", output]
        _run([arguments[0], "ld.lld", *words])


def _run(words: Sequence[str], text: str = "", variables: Mapping[str, str] | None = None) -> None:
    """Run the compiler or the linker with `text` as its input. Raises CompilerError, or OSError if it cannot be run."""
    environment = {**os.environ, "LC_ALL": "C", **(variables or {})}
    done = subprocess.run(words, input=text.encode(), capture_output=True, check=False, env=environment)
    if done.returncode != 0:
        why = _cause(done.stderr.decode(errors="replace")) or f"status {done.returncode}"
        raise CompilerError(f"the C compiler failed: {why}")

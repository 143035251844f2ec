"""Generate tables for the driver and the runtime from the CUDA headers.

    generate.py errors INCLUDE            error names and numbers      → C++ (errors.inc)
    generate.py entries INCLUDE           cuGetProcAddress's table     → C++ (entries.inc)
    generate.py stubs cu|cuda INCLUDE OBJECT…
                                          entry points that the headers declare and no object defines → C. They return
                                          "not supported", and exist so that programs link and load.

The Makefile runs it; it writes to standard output. It reads `cuda.h`, `cudaTypedefs.h`, `driver_types.h` and
`cuda_runtime_api.h` of any version of the toolkit.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED and cudaErrorNotSupported


def read(include: Path, name: str) -> str:
    """Return a header without comments, with continued lines joined."""
    text = (include / name).read_text(encoding="utf-8", errors="replace")
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    return text.replace("\\\n", " ")


def enumerators(text: str, prefix: str) -> list[tuple[str, int]]:
    """Return (name, number) of the enumerators that begin with `prefix`, by number, one name for each number."""
    found: dict[int, str] = {}
    for name, number in re.findall(rf"\b({prefix}\w+)\s*=\s*(\d+)\s*[,}}\n]", text):
        found.setdefault(int(number), name)
    return sorted(((name, number) for number, name in found.items()), key=lambda pair: pair[1])


def errors(include: Path) -> str:
    """Return `X(number, "name")` lines for the error enumerations of driver and runtime."""
    driver_text, runtime_text = read(include, "cuda.h"), read(include, "driver_types.h")
    result = re.search(r"typedef enum cudaError_enum \{(.*?)\} CUresult;", driver_text, re.S)
    error = re.search(r"enum __device_builtin__ cudaError\s*\{(.*?)\};", runtime_text, re.S)
    if result is None or error is None:
        raise SystemExit("generate.py: no error enumerations in the CUDA headers")
    lines = ["// Made by generate.py from the CUDA headers.", "#ifdef CUDASIM_DRIVER_ERRORS"]
    lines += [f'X({number}, "{name}")' for name, number in enumerators(result[1] + ",", "CUDA_")]
    lines += ["#else"]
    lines += [f'X({number}, "{name}")' for name, number in enumerators(error[1] + ",", "cuda")]
    return "\n".join([*lines, "#endif", ""])


def driver_names(include: Path) -> tuple[set[str], dict[str, str], dict[str, str]]:
    """Return the driver's exported names; the newest symbol of each base name; the per-thread variant of each symbol."""
    text = read(include, "cuda.h")
    declared = set(re.findall(r"CUresult\s+CUDAAPI\s+(cu\w+)\s*\(", text))
    newest: dict[str, str] = {}
    per_thread: dict[str, str] = {}
    for base, wrapper, symbol in re.findall(r"#\s*define\s+(cu\w+)\s+__CUDA_API_PT(DS|SZ)\((cu\w+)\)", text):
        newest[base] = symbol
        per_thread[symbol] = f"{symbol}_pt{wrapper.lower()}"
    for base, symbol in re.findall(r"#\s*define\s+(cu\w+)\s+(cu\w+)\s*\n", text):
        if not symbol.endswith(("_ptsz", "_ptds")):
            newest[base] = symbol
    names = declared | set(newest.values()) | set(per_thread.values())
    return {name for name in names if not name.endswith("_ptsz_ptsz")}, newest, per_thread


def entries(include: Path) -> str:
    """Return lines `X("name", version, symbol, per-thread symbol or symbol)`, and declarations of the symbols."""
    names, newest, per_thread = driver_names(include)
    typedefs = read(include, "cudaTypedefs.h")
    versions: dict[str, set[int]] = {}
    for base, version in re.findall(r"\*PFN_(cu\w+?)_v(\d+)\)", typedefs):
        versions.setdefault(base, set()).add(int(version))
    rows: list[tuple[str, int, str]] = []
    bases = {re.sub(r"(_v\d+)?(_pt(ds|sz))?$", "", name) for name in names} | set(versions)
    bases |= {name for name in names if name in versions}
    for base in sorted(bases):
        known = sorted(versions.get(base, {2000}))
        for position, version in enumerate(known):
            symbol = base if position == 0 else f"{base}_v{position + 1}"
            if len(known) == 1:
                symbol = newest.get(base, base)
            if position == len(known) - 1 and symbol not in names:
                symbol = newest.get(base, symbol)
            if symbol in names:
                rows.append((base, version, symbol))
    used = {symbol for _, _, symbol in rows}
    used |= {per_thread[symbol] for symbol in used if symbol in per_thread}
    lines = ["// Made by generate.py from the CUDA headers.", "#ifdef CUDASIM_DECLARE"]
    lines += [f'extern "C" int {symbol}();' for symbol in sorted(used)]
    lines += ["#else"]
    lines += [
        f'X("{base}", {version}, {symbol}, {per_thread.get(symbol, symbol)})'
        for base, version, symbol in rows
    ]
    return "\n".join([*lines, "#endif", ""])


def runtime_names(include: Path) -> set[str]:
    """Return the runtime's exported names, including per-thread variants."""
    text = read(include, "cuda_runtime_api.h")
    names = set(re.findall(r"CUDARTAPI(?:_CDECL)?\s+(cuda[A-Z]\w+)\s*\(", text))
    for wrapper, symbol in re.findall(r"__CUDART_API_PT(DS|SZ)\((cuda\w+)\)", text):
        names |= {symbol, f"{symbol}_pt{wrapper.lower()}"}
    return names


def defined(objects: list[str]) -> set[str]:
    """Return the global symbols that the object files define."""
    output = subprocess.run(
        ["nm", "-g", "--defined-only", "-P", *objects], check=True, capture_output=True, text=True
    ).stdout
    return {line.split()[0] for line in output.splitlines() if line and not line.endswith(":")}


def stubs(library: str, include: Path, objects: list[str]) -> str:
    """Return C definitions of the entry points that the headers declare and no object defines."""
    names = driver_names(include)[0] if library == "cu" else runtime_names(include)
    lines = ["/* Made by generate.py: declared by the CUDA headers, not offered by this device. */"]
    lines += [f"int {name}(void) {{ return {NOT_SUPPORTED}; }}" for name in sorted(names - defined(objects))]
    return "\n".join([*lines, ""])


def main(arguments: list[str]) -> int:
    """Run a command line as in the module's docstring; return the exit status."""
    match arguments:
        case ["errors", include]:
            sys.stdout.write(errors(Path(include)))
        case ["entries", include]:
            sys.stdout.write(entries(Path(include)))
        case ["stubs", "cu" | "cuda" as library, include, *objects]:
            sys.stdout.write(stubs(library, Path(include), objects))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

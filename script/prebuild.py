#!/usr/bin/env python3
"""Compile, verify and lower the shipped tools' programs into package data.

    script/prebuild.py [TOOL.py …]       write lib/gpubpf/ebpf/prebuilt/TOOL.json
    script/prebuild.py --check           write nothing; exit status 1 if a file is not current

Needs bcc and CAP_BPF. A tool is a Python file with a string PROGRAM.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "lib"))

from gpubpf.attach import cuinit
from gpubpf.ebpf import compile
from gpubpf.ebpf.bytecode import HOST_POINTS, WIDE, Program, points, register_functions
from gpubpf.ebpf.headers import INCLUDE
from gpubpf.errors import CompileError, Error, VerifyError
from gpubpf.exporter import gpu_time
from gpubpf.kernel import privileges
from gpubpf.launches import off_cpu
from gpubpf.linux.host_programs import try_load
from gpubpf.lower import host_code, nvptx
from gpubpf.lower.programs import PREBUILT, is_by_lanes, prebuilt_key
from gpubpf.memory import access_trace
from gpubpf.verify import verify
from gpubpf.verify.rules import check

TOOLS = Path(__file__).resolve().parent.parent / "tools"
SOURCES = (
    *sorted(TOOLS.glob("*.py")),
    Path(off_cpu.__file__),
    Path(access_trace.__file__),
    Path(cuinit.__file__),
    Path(gpu_time.__file__),
)


def program_text(path: Path) -> str | None:
    """Return the string PROGRAM of a tool, without running the tool; None if it has none."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "PROGRAM" for t in node.targets
        ):
            value = ast.literal_eval(node.value)
            return value if isinstance(value, str) else None
    return None


def build(text: str) -> dict[str, Any]:
    """Return the prebuilt form of a C text. Raises CompileError or VerifyError, also if the kernel's verifier cannot be used."""
    program = compile.compile_text(text)
    kernels = {}
    for function in program.device_functions:
        checked, release = verify(program, function)
        if checked.loops:  # their limit needs a map for a text, which prebuilt programs do not have
            raise VerifyError(
                f"device program {function.name}: its paths are too many to follow; simplify it"
            )
        if release is None:
            raise VerifyError(
                f"device program {function.name}: the kernel's verifier needs CAP_BPF; run as root"
            )
        kernels[function.name] = release
    for function in program.host_functions:
        try_load(program, function)
        kernels[function.name] = platform.release()
    return {
        "key": prebuilt_key(text),
        "made_with": versions(),
        "verdict": kernels,
        "program": compile.to_json(program),
        "fragments": fragments(program),
        "natives": natives(program),
    }


def has_programs(text: str) -> bool:
    """Return whether a C text, or a header of this package that it includes, defines programs."""
    included = re.findall(r"#include <(gpubpf_\w+\.h)>", text)
    whole = "\n".join([text, *((INCLUDE / name).read_text() for name in included)])
    return bool(points(whole) or register_functions(whole))


def texts(tool: Path) -> dict[Path, str]:
    """Return the prebuilt files of a tool, each with its text: PROGRAM, and if that asks for the number of lanes, the text for 64.

    There are none if PROGRAM has no programs, because the tool makes them of its command line."""
    text = program_text(tool)
    if text is None or not has_programs(text):
        return {}
    found = {PREBUILT / f"{tool.stem}.json": text}
    return found | ({PREBUILT / f"{tool.stem}-64.json": WIDE + text} if is_by_lanes(text) else {})


def fragments(program: Program) -> dict[str, Any]:
    """Return the lowered device programs of a text as JSON values. Those for 64 lanes are lowered when they are used."""
    if program.lanes != 32:
        return {}
    return {f.name: nvptx.lower(program, check(program, f)).to_json() for f in program.device_functions}


def natives(program: Program) -> dict[str, Any]:
    """Return the native forms of a text's programs for launches and operations as JSON values, or the reason why one has none."""
    found: dict[str, Any] = {}
    for function in program.host_functions:
        if function.point in HOST_POINTS:
            try:
                found[function.name] = host_code.lower(program, function).to_json()
            except VerifyError as error:
                found[function.name] = str(error)
    return found


def versions() -> dict[str, str]:
    """Return the versions of bcc and llvmlite, which decide what a result looks like. Other versions give other results, as good."""
    found = {"llvmlite": metadata.version("llvmlite"), "bcc": ""}
    with contextlib.suppress(ImportError, AttributeError):
        found["bcc"] = importlib.import_module("bcc").__version__
    return found


def current(path: Path, text: str) -> bool:
    """Return whether a prebuilt file is for this text and has what would be made of it today.

    The bytecode is compared only if the same version of bcc made it and can be used, the fragments only if the same LLVM did.
    """
    try:
        kept = json.loads(path.read_bytes())
        program = compile.from_json(kept["program"], text)
        made_with = kept["made_with"]
        if kept["key"] != prebuilt_key(text):
            return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    here = versions()
    if here["bcc"] and made_with.get("bcc") == here["bcc"] and privileges.capable():
        with contextlib.suppress(CompileError):
            if compile.to_json(compile.compile_text(text)) != kept["program"]:
                return False
    if made_with.get("llvmlite") != here["llvmlite"]:
        return True
    return fragments(program) == kept["fragments"] and natives(program) == kept.get("natives", {})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="script/prebuild.py", description=__doc__.split("\n")[0])
    parser.add_argument("tools", nargs="*", type=Path, metavar="TOOL.py")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; status 1 if a file is not current"
    )
    args = parser.parse_args(argv)
    status = 0
    try:
        for target, text in (item for tool in args.tools or SOURCES for item in texts(tool).items()):
            if args.check:
                if not current(target, text):
                    print(
                        f"prebuild: {target.name} is not current; run script/prebuild.py",
                        file=sys.stderr,
                    )
                    status = 1
                continue
            written = json.dumps(build(text), indent=1)
            written = re.sub(r"\[[\d,\s]+\]", lambda m: re.sub(r"\s", "", m[0]), written)  # numbers of lines
            target.write_text(written + "\n")
            print(f"{target.name}: {target.stat().st_size} bytes")
    except Error as error:
        print(f"prebuild: {error}", file=sys.stderr)
        return error.status
    return status


if __name__ == "__main__":
    sys.exit(main())

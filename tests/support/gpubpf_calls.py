"""For tests and measurements of calls: the functions of gpubpf/calls/library.c, of which program.c makes calls."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpubpf.calls.api import ApiFunction
from gpubpf_commands import words

if TYPE_CHECKING:
    import numpy as np

HERE = Path(__file__).parents[1] / "gpubpf" / "calls"
LAUNCH = "kernel=0 grid=1:packed block=3:packed shared=s0 stream=s1"
BY = "kernel=1 grid=0@0 block=0@12 shared=0@24 stream=0@32"
FUNCTIONS = tuple(
    ApiFunction(f"calls{name}", f"calls_{name}", *rest)
    for name, *rest in (
        ("quick", "other"),
        ("launch", "launch", LAUNCH),
        ("launch_by", "launch", BY),
        ("launch_from", "launch", "kernel=0@0"),
        ("outer", "sync"),
        ("ends_in_quick", "sync"),
        ("back", "sync"),
        ("gives", "memory", "bytes=1 out=0"),
        ("query", "event", "", "query"),
        ("text", "other", "", "other"),
        ("sleep", "sync"),
        ("absent", "other"),
    )
)
NUMBER = {f.symbol.removeprefix("calls_"): i for i, f in enumerate(FUNCTIONS)}


def build(place: Path) -> Path:
    """The program, linked with the library, which lies beside it."""
    warn = "-O1 -Wall -Wextra -Werror -Wno-unused-parameter"
    shared = "-foptimize-sibling-calls -shared -fPIC -Wl,-soname,libgpucalls.so.1"
    for made in (
        f"gcc {warn} {shared} {{here}}/library.c -o {{place}}/libgpucalls.so.1",
        f"gcc {warn} -pthread {{here}}/program.c -o {{place}}/program {{place}}/libgpucalls.so.1 -Wl,-rpath,{{place}}",
    ):
        subprocess.run(words(made, here=HERE, place=place), check=True)
    return place / "program"


def by_function(sums: np.ndarray[Any, Any], field: str = "count") -> dict[str, int]:
    found: dict[str, int] = {}
    for s in sums:
        name = FUNCTIONS[s["function"]].symbol.removeprefix("calls_")
        found[name] = found.get(name, 0) + int(s[field])
    return found

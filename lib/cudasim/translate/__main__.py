"""`python -m cudasim.translate [--virtual] IN.ptx OUT`: OUT is a shared object, or C text if it ends in `.c`. `--virtual`: for the
virtual clock.

Large modules are put off: OUT describes the module alone, and the C text of its code lies beside it in OUT.0.c, OUT.1.c, …
(OUT without its suffix), which `python -m cudasim.translate IN.c OUT …` compiles, several at once.

Exit status 0; 2 for PTX that cannot be translated, 3 for a compiler that failed, with one line on standard error.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpubpf.errors import Error
from gpubpf.ptx.module import parse

from .compiler import CompilerError, compile_c
from .program import Program


def _translate(source: Path, output: Path, virtual: bool) -> None:
    image, *parts = Program(parse(source.read_bytes()), virtual).c_texts()
    for k, text in enumerate(parts):
        temporary = output.with_suffix(f".{k}.{os.getpid()}.tmp")
        temporary.write_text(text)
        temporary.replace(output.with_suffix(f".{k}.c"))
    if output.suffix == ".c":
        output.write_text(image)
    else:
        compile_c(image, str(output))


def main(arguments: list[str]) -> int:
    virtual = arguments[:1] == ["--virtual"]
    arguments = arguments[virtual:]
    if not arguments or len(arguments) % 2:
        print(
            "usage: python -m cudasim.translate [--virtual] IN.ptx OUT | IN.c OUT [IN.c OUT ...]",
            file=sys.stderr,
        )
        return 1
    pairs = list(zip(arguments[::2], arguments[1::2], strict=True))
    try:
        if not pairs[0][0].endswith(".c"):
            _translate(Path(arguments[0]), Path(arguments[1]), virtual)
            return 0
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(lambda pair: compile_c(Path(pair[0]).read_text(), pair[1]), pairs))
    except CompilerError as error:
        print(error, file=sys.stderr)
        return 3
    except Error as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

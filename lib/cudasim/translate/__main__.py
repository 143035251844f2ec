"""Translate, compile and link PTX for the embedded device, from the command line.

`python -m cudasim.translate [--virtual] [--count DIRECTORY] IN.ptx OUT`: OUT is a shared object, or C text if it ends in `.c`.
`--virtual`: for the virtual clock. `--count`: the result counts how often each basic block runs (counts.py).

Large modules are compiled in parts: OUT only describes the module. The C text of the module's code is in OUT.0.c, OUT.1.c, … (OUT
without its suffix). `python -m cudasim.translate IN.c OUT …` compiles these files, several at once.

`python -m cudasim.translate --link|--check OUT NAME IN.ptx [NAME IN.ptx …]`: OUT is one PTX text, linked from several texts. With
`--check`, names may remain undefined.

`python -m cudasim.translate --patch OUT IN.ptx [ID=NAME ...] [PATCHES.ptx ...]`: OUT is the text IN.ptx with calls of patch
functions (patches.py). ID is an instrumentation point, NAME a function of one of the PATCHES.

The exit status is 0 for success, 1 for wrong usage, 2 for PTX that cannot be translated, 3 for a compiler that failed, 4 for texts
that do not fit together. A failure prints one line on standard error.
"""

from __future__ import annotations

import gc
import hashlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpubpf.errors import Error
from gpubpf.ptx.link import Input, LinkError, link
from gpubpf.ptx.module import AT_LINE
from gpubpf.ptx.parser import parse

from .compiler import CompilerError, compile_c
from .counts import Counting
from .patches import patched
from .program import TranslatedModule


def _translate(source: Path, output: Path, virtual: bool, directory: str) -> None:
    ptx = source.read_bytes()
    counting = None
    if directory:
        ptx = ptx.replace(
            AT_LINE.encode(), b"//"
        )  # lines are those of this text, so that no two instructions have the same
        counting = Counting(Path(directory).resolve(), hashlib.sha256(ptx).hexdigest()[:16] + ".ptx")
        (counting.directory / counting.module).write_bytes(ptx)
    image, *parts = TranslatedModule(parse(ptx), virtual, counting).c_texts()
    for k, text in enumerate(parts):
        temporary = output.with_suffix(f".{k}.{os.getpid()}.tmp")
        temporary.write_text(text)
        temporary.replace(output.with_suffix(f".{k}.c"))
    if output.suffix == ".c":
        output.write_text(image)
    else:
        compile_c(image, str(output))


def _link(complete: bool, output: Path, words: list[str]) -> None:
    inputs = [
        Input(name, Path(file).read_text(encoding="utf-8", errors="replace"))
        for name, file in zip(words[::2], words[1::2], strict=True)
    ]
    temporary = output.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(link(inputs, complete))
    temporary.replace(output)


def _patch(output: Path, source: Path, words: list[str]) -> None:
    names = {int(point): name for point, _, name in (word.partition("=") for word in words if "=" in word)}
    texts = [Path(word).read_text(encoding="utf-8", errors="replace") for word in words if "=" not in word]
    inputs = [Input(f"patches {number}", text) for number, text in enumerate(texts, 1)]
    patches = parse(link(inputs, False)) if inputs else None
    temporary = output.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(patched(parse(source.read_bytes()), patches, names))
    temporary.replace(output)


def _compile(words: list[str]) -> None:
    texts = [
        (Path(source).read_text(), output) for source, output in zip(words[::2], words[1::2], strict=True)
    ]
    texts.sort(key=lambda one: -len(one[0]))  # the longest first, to keep all CPUs busy
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda one: compile_c(*one), texts))


def main(arguments: list[str]) -> int:
    virtual = arguments[:1] == ["--virtual"]
    try:
        match arguments[virtual:]:
            case ["--link" | "--check" as how, output, *words] if words and len(words) % 2 == 0:
                _link(how == "--link", Path(output), words)
            case ["--patch", output, source, *words]:
                _patch(Path(output), Path(source), words)
            case ["--count", directory, source, output]:
                _translate(Path(source), Path(output), virtual, directory)
            case [source, output] if not source.endswith(".c"):
                _translate(Path(source), Path(output), virtual, "")
            case [source, _, *_] if source.endswith(".c") and not virtual and len(arguments) % 2 == 0:
                _compile(arguments)
            case _:
                usage = (
                    "[--virtual] [--count DIRECTORY] IN.ptx OUT | IN.c OUT [IN.c OUT ...]"
                    " | --link|--check OUT NAME IN.ptx ... | --patch OUT IN.ptx [ID=NAME ...] [PATCHES.ptx ...]"
                )
                print("usage: python -m cudasim.translate", usage, file=sys.stderr)
                return 1
    except (CompilerError, OSError) as error:
        print(error, file=sys.stderr)
        return 3
    except LinkError as error:
        print(error, file=sys.stderr)
        return 4
    except Error as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    gc.disable()  # the process ends soon; looking for cycles among its values takes a quarter of the time
    sys.exit(main(sys.argv[1:]))

"""`python -m cudasim.translate IN.ptx OUT`: OUT is a shared object, or C text if it ends in `.c`.

Exit status 0; 2 for PTX that cannot be translated, 3 for a compiler that failed, with one line on standard error.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gpubpf.errors import Error

from . import translate
from .compiler import CompilerError, compile_c


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m cudasim.translate IN.ptx OUT", file=sys.stderr)
        return 1
    source, output = arguments
    try:
        text = translate(Path(source).read_bytes())
        if output.endswith(".c"):
            Path(output).write_text(text)
        else:
            compile_c(text, output)
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

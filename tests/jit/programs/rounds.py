"""For programs that make their kernels at run time, in Python: as jit.h.

`for _ in rounds(): …` around what a program does. After every round a line says how often it launched what: `round 0 {"fill": 5}`.
With --again there are two; before the second the program says "ready", and waits for a line on standard input.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator

launched: Counter[str] = Counter()


def rounds() -> Iterator[int]:
    for number in range(1 + ("--again" in sys.argv)):
        if number:
            print("ready", flush=True)
            if not sys.stdin.readline():
                return
        yield number
        print(f"round {number} {json.dumps(launched)}", flush=True)
        launched.clear()

"""Property tests: hypothesis generates values, and reduces those that make a test fail to the simplest ones.

The values are the same in each run. GPUBPF_REPORTS=N tries N times as many, GPUBPF_LOOKS=all ten times as many, and other
ones in each run; a failure then prints a decorator that repeats it.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, configuration, given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

TIMES = int(os.environ.get("GPUBPF_REPORTS", "10" if os.environ.get("GPUBPF_LOOKS") == "all" else "1"))
# Not in the checkout: constants of the code, and patches that add a failing example to a test.
configuration.set_hypothesis_home_dir(Path(tempfile.gettempdir()) / f"gpubpf-tests-{os.getuid()}-hypothesis")
# Not the constants of the modules that happen to be loaded: the values would depend on the tests that ran before in the process.
providers._get_local_constants = lambda: providers._local_constants
LARGEST = 2**63 - 1
NUMBERS = (0, 1, 2, 31, 999, 1000, 10**6 - 1, 10**9, 2**32, 10**12, 2**53 + 1, LARGEST)

rngs = st.randoms(use_true_random=False)  # hypothesis reduces each choice
# For thousands of numbers, of which only the seed is reduced.
noise = st.integers(0, 2**32 - 1).map(np.random.default_rng)
seldom = st.integers(0, 9).map(lambda value: value > 6)


def generated(examples: int, **values: st.SearchStrategy) -> Callable[[Any], Any]:
    """Run a test with that many examples of `values`, by default of `rng`.

    An example may take any time, since the machine may be busy. Fixtures are made once for all examples.
    """
    chosen = settings(
        max_examples=examples * TIMES,
        derandomize=TIMES == 1,
        print_blob=TIMES != 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: chosen(given(**(values or {"rng": rngs}))(test))


def number(rng: random.Random, most: int = LARGEST) -> int:
    """Return a number whose size may be any, or one at which a format may change."""
    made = rng.randrange(1 << rng.randrange(1, 64)) if rng.randrange(2) else rng.choice(NUMBERS)
    return made % (most + 1)


def rare(rng: random.Random) -> bool:
    """Return True three times of ten. The simpler value is False, unlike that of `rng.random() < 0.3`."""
    return rng.randrange(10) > 6


def numbers(most: int = LARGEST) -> st.SearchStrategy[int]:
    return st.sampled_from([n for n in NUMBERS if n <= most]) | st.integers(0, most)


def lanes(count: int, most: int) -> st.SearchStrategy[Any]:
    """Return an array of a value for each of `count` threads: equal but for one, or repeated after a few threads."""

    def but_one(value: int, thread: int, other: int) -> Any:
        made = np.full(count, value, np.uint64)
        made[thread] = other
        return made

    few = st.lists(numbers(most), min_size=1, max_size=33)
    return st.builds(but_one, numbers(most), st.integers(0, count - 1), numbers(most)) | few.map(
        lambda values: np.resize(np.array(values, np.uint64), count)
    )

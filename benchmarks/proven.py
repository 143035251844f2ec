#!/usr/bin/env python3
"""What is known of the addresses that the lanes of a warp access, before a kernel runs, and why nothing is known of the others.

    python3 benchmarks/proven.py [--sites] CORPUS=DIRECTORY|FILE.ptx…

Reads the PTX texts, those in a directory as one corpus, and prints a table of accesses by corpus. `--sites` also prints each access.
"proven" holds whatever the lanes do; "with a comparison" may fail at run time, and a comparison tells (lib/gpubpf/ptx/lanes.py).
`nvcc -ptx -arch=sm_80 FILE.cu` makes a PTX text. The last column is the time that the analysis took, in seconds per 1,000 accesses.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "lib")]

from gpubpf.errors import PtxError  # noqa: E402
from gpubpf.ptx.access import accesses  # noqa: E402
from gpubpf.ptx.lanes import REASONS, Known, Lanes  # noqa: E402
from gpubpf.ptx.module import PtxInstruction, with_spaces  # noqa: E402
from gpubpf.ptx.parser import parse  # noqa: E402

NEEDS = ("wrap", "turn", "path", "memory")


def known(text: str) -> Iterator[tuple[str, PtxInstruction, Known]]:
    """Yield the kernel or function, the instruction, and what is known of its address, for each access of a PTX text."""
    module = parse(text)
    for function in module.functions.values():
        if not function.defined:
            continue
        lanes = Lanes(function, module.variables)
        for index, (statement, spaces) in enumerate(with_spaces(function.body or (), module.variables)):
            if isinstance(statement, PtxInstruction):
                for access in accesses(statement, declared_in=spaces.get):
                    yield function.name, statement, lanes.address(index, access.address)


def files(argument: str) -> tuple[str, list[Path]]:
    """Return the name of a corpus and its PTX files."""
    name, equals, where = argument.rpartition("=")
    place = Path(where)
    return name if equals else place.name, sorted(place.glob("**/*.ptx")) if place.is_dir() else [place]


def row(name: str, found: Counter[str], seconds: float) -> str:
    """Return a row of the table."""
    total = max(found.total(), 1)
    cells = [name, str(found.total())]
    cells += [f"{100 * found[kind] / total:.0f} %" for kind in ("proven", "compared", *REASONS)]
    return f"| {' | '.join([*cells, f'{1000 * seconds / total:.2f}'])} |"


def main(arguments: Sequence[str]) -> int:
    """Print the tables; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("corpora", nargs="+", metavar="CORPUS=DIRECTORY|FILE.ptx")
    parser.add_argument("--sites", action="store_true", help="also print what is known of each access")
    args = parser.parse_args(arguments)
    rows, needs, unread = [], Counter[tuple[str, ...]](), 0
    for argument in args.corpora:
        name, texts = files(argument)
        found, start = Counter[str](), time.process_time()
        for file in texts:
            try:
                for function, instruction, of in known(file.read_text(errors="replace")):
                    found[of.reason or ("compared" if of.needs else "proven")] += 1
                    if of.needs and not of.reason:
                        needs[tuple(need for need in NEEDS if need in of.needs)] += 1
                    if args.sites:
                        what = of.reason or f"{of.shape} {' '.join(sorted(of.needs))}"
                        print(f"{file.name} {function} line {instruction.line}: {instruction} {what}")
            except (OSError, PtxError) as error:
                print(f"{file}: {error}", file=sys.stderr)
                unread += 1
        rows.append(row(name, found, time.process_time() - start))
    columns = ["corpus", "accesses", "proven", "with a comparison", *REASONS, "s / 1,000"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    print("\n".join(rows))
    print("\nUnknown, by reason:\n" + "\n".join(f"  {name:<7} {text}" for name, text in REASONS.items()))
    if needs:
        print("\nWhat the comparison is needed for:")
        print("\n".join(f"  {count:>6}  {', '.join(of)}" for of, count in needs.most_common()))
    return 1 if unread else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The values of options: ranges, sizes, times, process ids. Each function raises
argparse.ArgumentTypeError for a value that it rejects."""

from __future__ import annotations

import argparse
import os

Range = tuple[int, int]  # first and last, both inclusive
Ranges = tuple[Range, Range, Range]

LARGEST_INDEX = 2**32 - 1
EVERYTHING: Range = (0, LARGEST_INDEX)
SITE_RANGES = 8  # maximum ranges of --site: the device programs compare with this many
LARGEST_GRANULE = 1 << 20
LARGEST_SHARE = 1 << 16  # largest N of --sample-blocks 1/N: the hash has 32 bits, of which groups use 8
_SIZE_SUFFIXES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_range(text: str) -> Range:
    """Return ``7`` as (7, 7), ``2:5`` as (2, 5), ``:5`` as (0, 5), and ``*`` as everything."""
    if text == "*":
        return EVERYTHING
    first, colon, last = text.partition(":")
    low = _number(first, 0 if colon else None)
    high = _number(last, LARGEST_INDEX) if colon else low
    if high > LARGEST_INDEX:
        raise argparse.ArgumentTypeError(f"{text!r} is larger than {LARGEST_INDEX}")
    if low > high:
        raise argparse.ArgumentTypeError(f"{text!r} is an empty range; write FIRST:LAST")
    return low, high


def parse_ranges(text: str) -> Ranges:
    """Parse ``X[,Y[,Z]]``, each as in `parse_range`. A dimension that is left out means everything."""
    parts = [parse_range(part) for part in text.split(",")]
    if len(parts) > 3:
        raise argparse.ArgumentTypeError(f"{text!r} has more than three dimensions; write X,Y,Z")
    x, y, z = (parts + [EVERYTHING] * 3)[:3]
    return x, y, z


def extents(text: str) -> tuple[int, int, int]:
    """Parse ``X[,Y[,Z]]``, each a positive integer; 1 where it is left out."""
    parts = [positive(part) for part in text.split(",")]
    if len(parts) > 3:
        raise argparse.ArgumentTypeError(f"{text!r} has more than three dimensions; write X,Y,Z")
    x, y, z = [*parts, 1, 1][:3]
    return x, y, z


def parse_launches(text: str) -> tuple[int, int | None]:
    """Return ``N:M`` as (N, M), ``N:`` as (N, None), ``:M`` as (1, M), and ``N`` as (N, N). Launches count from 1."""
    first, colon, last = text.partition(":")
    low = _number(first, 1 if colon else None)
    high = (_number(last) if last else None) if colon else low
    if low < 1 or (high is not None and high < low):
        raise argparse.ArgumentTypeError(f"{text!r} is an empty range; write FIRST:LAST, counted from 1")
    return low, high


def parse_sites(text: str) -> tuple[Range, ...]:
    """Parse ``N[,N…]``, each a number or ``A:B``. Ranges that touch are merged; at most `SITE_RANGES` may remain."""
    ranges: list[Range] = []
    for low, high in sorted(parse_range(part) for part in text.split(",")):
        if ranges and low <= ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], max(high, ranges[-1][1])
        else:
            ranges.append((low, high))
    if len(ranges) > SITE_RANGES:
        raise argparse.ArgumentTypeError(
            f"{text!r} has {len(ranges)} ranges of sites; name at most {SITE_RANGES}"
        )
    return tuple(ranges)


def parse_addresses(text: str) -> Range:
    """Parse ``LO:HI``, both inclusive, or one address; hexadecimal with 0x, or decimal."""
    first, colon, last = text.partition(":")
    try:
        low = int(first, 0) if first else 0
        high = (int(last, 0) if last else 2**64 - 1) if colon else low
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an address range such as 0x7f0000000000:0x7f00000fffff"
        ) from None
    if not 0 <= low <= high < 2**64:
        raise argparse.ArgumentTypeError(f"{text!r} is an empty range; write the lower address first")
    return low, high


def parse_size(text: str) -> int:
    """Return the bytes of ``256M``, ``1G`` or ``4096``. K, M, G and T are powers of 1024."""
    digits = text.rstrip("BbIi").upper()
    suffix = digits[-1:] if digits[-1:].isalpha() else ""
    number = digits.removesuffix(suffix) if suffix else digits
    size = int(number) * _SIZE_SUFFIXES.get(suffix, 0) if _is_number(number) else 0
    if not 0 < size < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 64M or 1G")
    return size


def parse_granule(text: str) -> int:
    """Parse a power of two, in bytes, up to 1 MB."""
    size = parse_size(text)
    if size & (size - 1) or not 0 < size <= LARGEST_GRANULE:
        raise argparse.ArgumentTypeError(f"{text!r} is not a power of two between 1 and 1M")
    return size


def parse_sampling(text: str) -> int:
    """Parse N of "one in N": a positive integer of 32 bits, as the device programs take it."""
    number = positive(text)
    if number >= 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r} is larger than {(1 << 32) - 1}")
    return number


def parse_share(text: str) -> int:
    """Parse ``1/N`` and return N, a power of two."""
    one, slash, number = text.partition("/")
    size = int(number) if _is_number(number) else 0
    if one != "1" or not slash or not 0 < size <= LARGEST_SHARE or size & (size - 1):
        raise argparse.ArgumentTypeError(
            f"must be 1/N with N a power of two up to {LARGEST_SHARE}, not {text!r}"
        )
    return size


def parse_percent(text: str) -> float:
    """Parse a percentage above 0, at most 100; ``5%`` is 5."""
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = 0.0
    if not 0 < percent <= 100:
        raise argparse.ArgumentTypeError(f"must be a percentage above 0 and at most 100, not {text!r}")
    return percent


def parse_seed(text: str) -> int:
    """Parse a seed: an integer from 0 that fits into 32 bits."""
    if not _is_number(text) or int(text) >= 1 << 32:
        raise argparse.ArgumentTypeError(f"must be an integer from 0 to {(1 << 32) - 1}, not {text!r}")
    return int(text)


def parse_file(text: str) -> str:
    """Return the name of a file that is written in addition to the results. Only the results may go to standard output."""
    if text in ("", "-"):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a file; give one")
    return text


def parse_picture(text: str) -> str:
    """Return the name of a picture's file. Its suffix determines the format."""
    if not parse_file(text).lower().endswith((".svg", ".png", ".pdf")):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .svg, .png or .pdf")
    return text


def parse_results(text: str) -> str | None:
    """Return the name of the file for results; None: standard output."""
    return None if text == "-" else text


def parse_pids(text: str) -> list[int]:
    """Parse ``PID[,PID…]``."""
    return list(dict.fromkeys(positive(part) for part in text.split(",")))


def parse_cgroup(text: str) -> int:
    """Return the id of a cgroup. `text` is the id, or the directory of a cgroup v2: a path, or as in /proc/PID/cgroup."""
    if _is_number(text):
        return positive(text)
    for root in ("", "/sys/fs/cgroup/", "/sys/fs/cgroup/unified/"):
        path = root + (text.lstrip("/") if root else text)
        if os.path.exists(os.path.join(path, "cgroup.controllers")):  # every cgroup v2 has this file
            return os.stat(path).st_ino
    if os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a cgroup v2; name one below /sys/fs/cgroup")
    raise argparse.ArgumentTypeError(
        f"there is no cgroup {text!r}; name a directory below /sys/fs/cgroup, or an id"
    )


def parse_comm(text: str) -> str:
    """Parse a thread's name: 1 to 15 bytes, the most that Linux keeps."""
    if not 0 < len(text.encode()) < 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a thread name; those have 1 to 15 bytes")
    return text


def positive(text: str) -> int:
    """Parse a positive integer."""
    if not _is_number(text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, not {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """Parse a time in seconds, more than 0; fractions are allowed."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, not {text!r}")
    return value


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def _number(text: str, default: int | None = None) -> int:
    if not text and default is not None:
        return default
    if not _is_number(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return int(text)


def parse_endpoint(text: str) -> str:
    """Parse the URL of an OpenTelemetry collector."""
    from urllib.parse import urlsplit

    try:
        url = urlsplit(text)
        usable = url.scheme in ("http", "https") and url.hostname and (url.port or 1)
    except ValueError:
        usable = False
    if not usable:
        raise argparse.ArgumentTypeError(f"must be a URL such as http://localhost:4317, not {text!r}")
    return text

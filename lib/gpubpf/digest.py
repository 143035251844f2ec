"""SHA-256 without OpenSSL for short data: ``hashlib`` loads it, which takes 5 ms of a tool's start.

    digest.sha256(data).hexdigest()

Long data goes through hashlib, whose code uses the processor's instructions for SHA-256 and is several times as fast.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from hashlib import _Hash

SIZE = 32  # bytes
_LONG = 256 << 10  # bytes; from about 800 KB on, OpenSSL is faster even if it must be loaded


def sha256(*parts: bytes) -> _Hash:
    """Return the SHA-256 of all parts together, in their order, as a hash object of hashlib."""
    made = _function(sum(map(len, parts)))()
    for part in parts:
        made.update(part)
    return made


def _function(length: int) -> Callable[[], _Hash]:
    if length < _LONG and "hashlib" not in sys.modules:
        for module in ("_sha2", "_sha256"):  # Python's own, from 3.12 on and before; a build can lack it
            try:
                made: Callable[[], _Hash] = __import__(module).sha256
            except (ImportError, AttributeError):
                continue
            return made
    import hashlib

    return hashlib.sha256

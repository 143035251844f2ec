"""Contents of maps as JSON values and as text: numbers, strings, lists, and structures with their BTF names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def plain(value: Any) -> Any:
    """Return a NumPy value in JSON types.

    Structures become mappings, and arrays become lists. Arrays of char become strings if they are text. Bytes of an unknown type
    become a list of 8-byte words, or of bytes if their number is not a multiple of 8. NaN and infinities become strings.
    """
    import numpy as np

    if isinstance(value, np.void) and value.dtype.names:
        return {name: plain(value[name]) for name in value.dtype.names}
    if isinstance(value, np.void):
        return _words(value.tobytes())
    if isinstance(value, np.ndarray):
        return [plain(one) for one in value]
    if isinstance(value, bytes):
        return _text(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bytes):
        return _text(value)
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


def _words(data: bytes) -> list[int]:
    size = 8 if len(data) % 8 == 0 else 1
    return [int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size)]


def _text(data: bytes) -> str | list[int]:
    """Return an array of char: a string if it is printable text without its zeros at the end, else a list of bytes."""
    try:
        text = data.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        return list(data)
    return text if text.isprintable() else list(data)


def shown(value: Any) -> str:
    """Return a JSON value as text for people."""
    return str(value) if isinstance(value, (int, float, str)) else json.dumps(value, ensure_ascii=False)


def columns(array: np.ndarray[Any, Any]) -> list[Any]:
    """Return the values of an array in JSON types."""
    if array.dtype.names is None and array.dtype.kind in "iufb" and array.ndim == 1:
        values: list[Any] = array.tolist()
        if array.dtype.kind != "f":
            return values
    return [plain(one) for one in array]

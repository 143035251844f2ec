"""Format very many records fast: text in which only numbers differ is built as one array of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from gpubpf.record import Record

if TYPE_CHECKING:
    import numpy as np

CHUNK = 1 << 13  # records per call: few enough for the CPU cache, many enough to amortize the call


class Words(Record):
    """A column of text: `texts[codes]`."""

    texts: Sequence[bytes]
    codes: np.ndarray

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, places: slice) -> Words:
        return Words(self.texts, self.codes[places])


class Hex(Record):
    """A column of numbers in lower-case hexadecimal, without leading zeros."""

    values: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, places: slice) -> Hex:
        return Hex(self.values[places])


Column: TypeAlias = "np.ndarray | Words | Hex"


def records(parts: Sequence[bytes | Column]) -> bytes:
    """Return the text of records. Each consists of all `parts`: bytes that are the same in every record, or a column.

    A column is an array of numbers, written in decimal, or `Words`, or `Hex`. Columns are one-dimensional, unsigned and equally
    long; there must be at least one. A record takes about 0.2 us, where a loop takes several us. Calls with `CHUNK` records keep
    the working set in the CPU cache.

    >>> records([b"a", np.array([1, 20]), b"\\n"])
    b'a1\\na20\\n'
    """
    import numpy as np

    count = next(len(part) for part in parts if not isinstance(part, bytes))
    if count == 0:
        return b""
    columns = [_constant_or_digits(part) for part in parts]
    template = b"".join(column if isinstance(column, bytes) else b"0" * len(column[0]) for column in columns)
    text = np.empty((count, len(template)), dtype=np.uint8)
    text[:] = np.frombuffer(template, dtype=np.uint8)
    shown = np.ones(text.shape, dtype=bool)
    at = 0
    for column in columns:
        if isinstance(column, bytes):
            at += len(column)
            continue
        for digits, visible in zip(*column, strict=True):
            text[:, at] = digits
            shown[:, at] = visible
            at += 1
    return text[shown].tobytes()


def joined(texts: Sequence[bytes], columns: Sequence[Column]) -> bytes:
    """Return `records` in chunks: a text, a column, a text, a column …, a text."""
    parts: list[bytes] = []
    for at in range(0, len(columns[0]), CHUNK):
        pieces = (column[at : at + CHUNK] for column in columns)
        parts.append(records([part for pair in zip(texts, (*pieces, b""), strict=True) for part in pair]))
    return b"".join(parts)


def _constant_or_digits(part: bytes | Column) -> bytes | tuple[np.ndarray, np.ndarray]:
    """Return a constant, or two arrays [character, record]: the characters of a column, and whether each is shown.

    Characters that are not shown are leading zeros, or padding behind words.
    """
    import numpy as np

    if isinstance(part, bytes):
        return part
    if isinstance(part, Words):
        letters, lengths = _letters(part.texts)
        column = np.arange(letters.shape[1])[:, None]
        return letters.T[:, part.codes], column < lengths[part.codes]
    if isinstance(part, Hex):
        return _hexadecimal(part.values)
    largest = int(part.max())
    if largest == int(part.min()):
        return b"%d" % largest
    places = len(str(largest))
    rest: np.ndarray = part.astype(np.uint32 if largest < 2**32 else np.uint64)
    digits = np.empty((places, len(part)), dtype=np.uint8)
    visible = np.empty((places, len(part)), dtype=bool)
    for place in range(places - 1, -1, -1):
        visible[place] = rest > 0
        tenth = rest // 10  # NumPy is fast at dividing by a constant, but not in divmod
        digits[place] = rest - 10 * tenth
        rest = tenth
        if rest.dtype.itemsize == 8 and place and int(rest.max()) < 2**32:
            rest = rest.astype(np.uint32)
    visible[-1] = True
    digits += ord("0")
    return digits, visible


def _letters(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return uint8 [text, longest], padded with spaces, and the length of each text."""
    import numpy as np

    longest = max(map(len, texts), default=0)
    letters = np.frombuffer(b"".join(text.ljust(longest) for text in texts), np.uint8)
    return letters.reshape(len(texts), longest), np.array([len(text) for text in texts])


def _hexadecimal(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the digits, and whether each is shown, as `_constant_or_digits` does."""
    import numpy as np

    places = max(1, -(-int(values.max(initial=0)).bit_length() // 4))
    digits = np.empty((places, len(values)), dtype=np.uint8)
    visible = np.empty((places, len(values)), dtype=bool)
    for place in range(places):
        rest = values >> np.uint64(4 * (places - 1 - place))
        digits[place] = rest & np.uint64(15)
        visible[place] = rest > 0
    visible[-1] = True
    return np.frombuffer(b"0123456789abcdef", np.uint8)[digits], visible


def aligned(columns: Sequence[tuple[Column, int]], end: bytes = b"\n") -> bytes:
    """Return a line for each record: columns with a space between them, and `end`.

    Each column comes with its width. Numbers (from 0) align right, in at least `width` characters; so do words. Words with a negative
    width align left, in exactly that many characters.

    >>> aligned([(np.array([1, 20]), 3), (np.array([7, 8]), 2)], b".\\n")
    b'  1  7 .\\n 20  8 .\\n'
    """
    import numpy as np

    count = len(columns[0][0])
    parts = []
    for values, least in columns:
        if isinstance(values, Words):
            parts.append(_placed(values, least))
            continue
        if isinstance(values, Hex):
            digits, visible = _hexadecimal(values.values)
            width = max(least, len(digits) + 2)
            text = np.full((count, width + 1), ord(" "), dtype=np.uint8)
            text[:, width - len(digits) : width][visible.T] = digits.T[visible.T]
            first = width - visible.sum(axis=0)  # the place of "0x"
            each = np.arange(count)
            text[each, first - 2], text[each, first - 1] = ord("0"), ord("x")
            parts.append(text)
            continue
        width = max(least, len(str(int(values.max(initial=0)))))
        text = np.full((count, width + 1), ord(" "), dtype=np.uint8)
        rest = values.astype(np.uint64)
        for place in range(width - 1, -1, -1):
            shown = (rest > 0) | (place == width - 1)
            tenth = rest // np.uint64(10)
            digit = (rest - tenth * np.uint64(10)).astype(np.uint8)
            text[:, place] = np.where(shown, digit + ord("0"), ord(" "))
            rest = tenth
            if not rest.any():
                break
        parts.append(text)
    if end[:1] == b"\n":
        parts[-1] = parts[-1][:, :-1]
    parts.append(np.broadcast_to(np.frombuffer(end, dtype=np.uint8), (count, len(end))))
    return np.concatenate(parts, axis=1).tobytes()


def _placed(words: Words, least: int) -> np.ndarray:
    """Return uint8 [record, width + 1]: the words of a column, and a space."""
    longest = max(least, *map(len, words.texts))
    texts = [text[:-least].ljust(-least) if least < 0 else text.rjust(longest) for text in words.texts]
    return _letters([text + b" " for text in texts])[0][words.codes]

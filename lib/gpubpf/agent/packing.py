"""How the messages between tool and agent are packed. Their declaration decides: the annotations of a class's fields.

A message is a subclass of `Packed`, declared in definitions.py. Its fields are packed one after the other, little-endian::

    U32, U64, I32, I64    a number; `U32 | None` and `U64 | None`: all bits set for None
    Seconds               u32, in ms
    bool, an IntEnum      u32
    str, bytes            u32 length, and the bytes
    another Packed        its fields
    tuple[A, B]           both
    tuple[A, ...], Sequence[A], Mapping[A, B]    u32 count, and the items
    A | None              u32: 0 for None; else 1, and A

`encode` and `decode` pack and unpack them here, and `cpp` declares the same classes for `Writer` and `Reader` in src/wire.h.
`decode` reads what a traced process sent, which is untrusted. It raises Malformed.

This module needs only the standard library, because definitions.py also runs before anything is installed.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from struct import Struct
from typing import Annotated, Any, TypeAlias, TypeVar, Union, get_args, get_origin

from gpubpf.errors import SessionError
from gpubpf.record import Record


class Malformed(SessionError):
    """A process sent a message that no agent sends. `what`: what is wrong, such as "too many rings"."""

    def __init__(self, what: str) -> None:
        super().__init__(f"its agent sent an invalid message ({what})")


class Reader:
    """Takes a payload apart, from front to back."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        """Return the next bytes. Raises Malformed if there are fewer."""
        if size > len(self._data) - self._at:
            raise Malformed("a message that is too short")
        self._at += size
        return self._data[self._at - size : self._at]

    def count(self, least: int) -> int:
        """Return a number of items. Raises Malformed if the payload is too short for so many of `least` bytes each."""
        n = int.from_bytes(self.take(4), "little")
        if n * least > len(self._data) - self._at:
            raise Malformed("a count larger than its message")
        return n


class _Kind:
    """The values of a field. least: bytes of the shortest; type: their type in C++; suffix: of the field's name there."""

    least = 4
    type = ""
    suffix = ""

    def read(self, reader: Reader) -> Any:
        raise NotImplementedError

    def write(self, value: Any) -> bytes:
        raise NotImplementedError

    def initial(self, value: Any) -> str:
        """Return how C++ gives a new object this value."""
        return ""


class _Number(_Kind):
    """A number. format: of `struct`. of, to: make a value of the number, and a number of the value."""

    def __init__(
        self,
        format: str,
        type: str,
        of: Callable[[int], Any] = int,
        to: Callable[[Any], int] = int,
        suffix: str = "",
    ) -> None:
        self.struct, self.type, self.of, self.to, self.suffix = Struct("<" + format), type, of, to, suffix
        self.least = self.struct.size

    def read(self, reader: Reader) -> Any:
        return self.of(self.struct.unpack(reader.take(self.least))[0])

    def write(self, value: Any) -> bytes:
        return self.struct.pack(self.to(value))

    def initial(self, value: Any) -> str:
        number = 0 if value is _MISSING else self.to(value)
        return f" = {self.type}({number}{'u' if number > 0 else ''})"

    def or_none(self) -> _Number:
        """Return the same numbers, and None for all bits set."""
        none = (1 << 8 * self.least) - 1
        return _Number(
            self.struct.format[1:],
            self.type,
            lambda number: None if number == none else number,
            lambda value: none if value is None else value,
        )


U32: TypeAlias = Annotated[int, _Number("I", "uint32_t")]
U64: TypeAlias = Annotated[int, _Number("Q", "uint64_t")]
I32: TypeAlias = Annotated[int, _Number("i", "int32_t")]
I64: TypeAlias = Annotated[int, _Number("q", "int64_t")]
Seconds: TypeAlias = Annotated[
    float, _Number("I", "uint32_t", lambda ms: ms / 1000, lambda seconds: int(seconds * 1000), "_ms")
]
_LENGTH = Struct("<I")
_MISSING: Any = object()


def one_of(values: Sequence[Any], type: str) -> _Number:
    """Return how one of these values is packed: as its number. type: of the number in C++."""

    def value_of(number: int) -> Any:
        if number >= len(values):
            raise Malformed(f"an unknown {type}")
        return values[number]

    return _Number("I", type, value_of, values.index)


class _Bytes(_Kind):
    """A text, or bytes."""

    def __init__(self, text: bool) -> None:
        self.text = text
        self.type = "std::string" if text else "std::vector<uint8_t>"

    def read(self, reader: Reader) -> Any:
        data = reader.take(reader.count(1))
        return data.decode("utf-8", "backslashreplace") if self.text else data

    def write(self, value: Any) -> bytes:
        data = value.encode() if self.text else value
        return _LENGTH.pack(len(data)) + data


class _Several(_Kind):
    """A fixed number of values: a tuple."""

    def __init__(self, kinds: Sequence[_Kind]) -> None:
        self.kinds = kinds
        self.least = sum(kind.least for kind in kinds)
        plain = [kind.struct.format[1:] for kind in kinds if isinstance(kind, _Number) and kind.of is int]
        self.numbers = Struct("<" + "".join(plain)) if len(plain) == len(kinds) else None  # read at once
        self.type = f"std::{'pair' if len(kinds) == 2 else 'tuple'}<{', '.join(kind.type for kind in kinds)}>"

    def read(self, reader: Reader) -> Any:
        if self.numbers is not None:
            return self.numbers.unpack(reader.take(self.least))
        return tuple([kind.read(reader) for kind in self.kinds])

    def write(self, value: Any) -> bytes:
        return b"".join([kind.write(one) for kind, one in zip(self.kinds, value, strict=True)])


class _Object(_Several):
    """An object of a subclass of `Packed`."""

    def __init__(self, of: type[Packed]) -> None:
        super().__init__([_kind(annotation) for annotation in _annotations(of)])
        self.of = of
        self.names: tuple[str, ...] = of.__match_args__
        self.type = of.__name__

    def read(self, reader: Reader) -> Any:
        return self.of(*super().read(reader))

    def write(self, value: Any) -> bytes:
        return super().write([getattr(value, name) for name in self.names])


class AtMost:
    """In an annotation: what is read has at most `limit` items. excess: what is wrong with a message that has more."""

    def __init__(self, limit: int, excess: str) -> None:
        self.limit, self.excess = limit, excess


class _Many(_Kind):
    """Any number of values: a tuple, or a dict whose items are packed as pairs."""

    def __init__(
        self, item: _Kind, made: Callable[[Iterator[Any]], Any] = tuple, most: AtMost | None = None
    ) -> None:
        self.item, self.made, self.most = item, made, most
        self.type = f"std::vector<{item.type}>"

    def read(self, reader: Reader) -> Any:
        item, count = self.item, reader.count(self.item.least)
        if self.most is not None and count > self.most.limit:
            raise Malformed(self.most.excess)
        return self.made(item.read(reader) for _ in range(count))

    def write(self, value: Any) -> bytes:
        items = value.items() if self.made is dict else value
        return _LENGTH.pack(len(value)) + b"".join([self.item.write(one) for one in items])


class _Maybe(_Kind):
    """A value, or None."""

    def __init__(self, value: _Kind) -> None:
        self.value = value
        self.type = f"std::optional<{value.type}>"

    def read(self, reader: Reader) -> Any:
        return self.value.read(reader) if any(reader.take(4)) else None

    def write(self, value: Any) -> bytes:
        return _LENGTH.pack(0) if value is None else _LENGTH.pack(1) + self.value.write(value)


_evaluated: dict[tuple[str, str], Any] = {}  # by module and text of an annotation
_objects: dict[type, _Object] = {}


def _annotations(of: type[Packed]) -> Iterator[Any]:
    """Yield the annotations of a class's fields, evaluated."""
    for text in of.__annotations__.values():
        key = of.__module__, text
        if key not in _evaluated:
            _evaluated[key] = eval(text, vars(sys.modules[of.__module__]))
        yield _evaluated[key]


def _kind(annotation: Any) -> _Kind:
    """Return how the values of an annotation are packed."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        about = arguments[1]
        return _Many(_kind(get_args(arguments[0])[0]), most=about) if isinstance(about, AtMost) else about
    if origin is None:
        if annotation is bool:
            return _Number("I", "bool", bool)
        if annotation in (str, bytes):
            return _Bytes(annotation is str)
        if issubclass(annotation, Packed):
            return _object(annotation)
        return one_of(list(annotation), annotation.__name__)
    if origin in (types.UnionType, Union):
        value = _kind(arguments[0])
        return value.or_none() if isinstance(value, _Number) else _Maybe(value)
    if issubclass(origin, Mapping):
        return _Many(_Several([_kind(one) for one in arguments]), dict)
    if len(arguments) == 1 or arguments[1] is Ellipsis:
        return _Many(_kind(arguments[0]))
    return _Several([_kind(one) for one in arguments])


def _object(of: type[Packed]) -> _Object:
    if of not in _objects:
        _objects[of] = _Object(of)
    return _objects[of]


class Packed(Record):
    """A message, or a part of messages. A message says its number: ``class Ready(Packed, message=Message.READY)``."""

    message = -1

    def __init_subclass__(cls, message: int = -1) -> None:
        super().__init_subclass__()
        cls.message = message


Value = TypeVar("Value", bound=Packed)


def decode(of: type[Value], payload: bytes) -> Value:
    """Return the message of this class in a payload. Raises Malformed."""
    message: Value = _object(of).read(Reader(payload))
    return message


def encode(message: Packed) -> bytes:
    """Return the payload of a message."""
    return _object(type(message)).write(message)


def cpp(of: type[Packed]) -> Iterator[str]:
    """Yield the declaration of a class in C++."""
    kind = _object(of)
    yield f"struct {of.__name__} {{"
    if of.message >= 0:
        yield f"  static constexpr Message kMessage = Message({int(of.message)});"
    names = []
    for name, one in zip(kind.names, kind.kinds, strict=True):
        names.append(name + one.suffix)
        yield f"  {one.type} {names[-1]}{one.initial(of._defaults.get(name, _MISSING))};"
    yield f"  auto tie() {{ return std::tie({', '.join(names)}); }}"
    yield f"  auto tie() const {{ return std::tie({', '.join(names)}); }}"
    yield "};"
